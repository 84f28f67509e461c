"""infinity.EMA: the averages of torch's AveragedModel in every placement, and weights that the average replaces for an evaluation."""

import contextlib
import signal
from types import SimpleNamespace

import pytest
import torch
from support.helpers import NVME, assert_same_bits, assert_same_states, split, states_of, training
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import infinity
from infinity.formats.format import AVERAGE, Format
from infinity.optim.average import exchange
from infinity.optim.shard import Shard

pytestmark = pytest.mark.usefixtures("one_thread")

DECAY = 0.8
HOST = {"param_tier": "host", "optimizer_state_tier": "host", "residency": "none"}
DEVICE = {"param_tier": "device", "optimizer_state_tier": "device"}


class Branches(nn.Module):
    """A model with a frozen layer, a buffer, and a branch that some steps leave out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.sometimes = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x, branch):
        x = self.second(F.relu(self.first(self.frozen(x)))) + self.shift.to(x.dtype)
        return self.sometimes(x) if branch else x


def step(model, optimizer, number, branch=None):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)
    loss = model(x, number % 3 == 2 if branch is None else branch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def reference(num_steps, make_optimizer, decay=DECAY):
    """(averaged values, weights) of plain PyTorch, by name."""
    torch.manual_seed(0)
    model = Branches()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = make_optimizer([param for param in model.parameters() if param.requires_grad])
    for number in range(num_steps):
        step(model, optimizer, number)
        averaged.update_parameters(model)
    return averaged.module.state_dict(), model.state_dict()


@contextlib.contextmanager
def averaging(directory, *, optimizer=infinity.AdamW, make=Branches, decay=DECAY, **options):
    """Yields (model, engine, optimizer, EMA)."""
    found = []

    def make_optimizer(params, **options):
        found.append(infinity.EMA(engine_model[0], decay))
        return optimizer(params, **options)

    engine_model = []

    def make_model():
        engine_model.append(make())
        return engine_model[0]

    with training(make_model, directory, optimizer=make_optimizer, **options) as (model, engine, made):
        yield model, engine, made, found[0]


OPTIMIZERS = {
    "adamw": (infinity.AdamW, lambda params: torch.optim.AdamW(params, lr=1e-2), {}),
    "sgd": (infinity.SGD, lambda params: torch.optim.SGD(params, lr=1e-2), {}),
    "clipped": (infinity.AdamW, lambda params: Clipped(params, lr=1e-2), {"max_grad_norm": 0.5}),
}


class Clipped(torch.optim.AdamW):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.5)
        return super().step(closure)


@pytest.mark.few(2)
@pytest.mark.parametrize("update", ["auto", "deferred"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", [NVME, HOST, DEVICE, {}], ids=["nvme", "host", "device", "auto"])
def test_the_average_is_that_of_torchs_averaged_model(place, optimizer, update, tmp_path):
    kind, plain, options = OPTIMIZERS[optimizer]
    expected, weights = reference(8, plain)
    with averaging(tmp_path, optimizer=kind, options={"lr": 1e-2} | options, update=update, **place) as (model, _, ours, ema):
        for number in range(8):
            step(model, ours, number)
        found, here = ema.state_dict(), model.state_dict()
        assert ema.num_averaged == 8
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(here[name], weights[name], rtol=0, atol=2e-6)
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)


def masters_of(state):
    """The fp32 values of a parameter from its segments."""
    if "residual" in state:
        return ((state["weight"].view(torch.int16).int() << 16) + state["residual"]).view(torch.float32)
    return state.get("master", state["weight"]).float()


BF16 = {"dtype": "bf16"}
FORMATS = {
    "bf16": BF16,
    "no-master": BF16 | {"master": "none"},
    "8bit": BF16 | {"optimizer_state_dtype": "8bit", "master": "none"},
    "coded": BF16 | {"compression": "on"},
    "fp16": {"dtype": "fp16", "options": {"loss_scale": infinity.LossScale(initial=8.0)}},
    "muon": BF16 | {"optimizer": infinity.Muon},
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("format", FORMATS)
def test_the_average_has_the_same_fp32_bits_in_every_tier(format, tmp_path):
    found, how = {}, FORMATS[format]
    for place, options in {"nvme": NVME, "host": HOST, "device": DEVICE}.items():
        if place != "nvme" and "compression" in how:
            continue
        with averaging(tmp_path / place, **how, **options) as (model, engine, ours, ema):
            expected = {}
            for number in range(4):
                step(model, ours, number, branch=True)
                for name, param in model.named_parameters() if place == "nvme" else ():
                    value = masters_of(engine.read_state(param))
                    expected[name] = expected[name] + (value - expected[name]) * (1 - DECAY) if name in expected else value
            found[place] = ema.state_dict()
            for name, value in expected.items():
                assert_same_bits(found[place][name], value, name)
    for place, values in found.items():
        for name, value in values.items():
            assert_same_bits(value, found["nvme"][name], f"{place} {name}")


@pytest.mark.few(1)
@pytest.mark.parametrize("format", ["bf16", "no-master", "fp16"])
def test_an_evaluation_with_the_average_leaves_all_bits(format, tmp_path):
    for place in (NVME, DEVICE):
        with averaging(tmp_path, **FORMATS[format], **place) as (model, engine, ours, ema):
            with ema.weights():  # no step yet: the average is the weights
                first = model.state_dict()
            for name, value in model.state_dict().items():
                assert_same_bits(first[name], value, name)
            for number in range(3):
                step(model, ours, number)
            averaged, before, evaluated = ema.state_dict(), states_of(engine, model), Branches()
            with ema.weights():
                for name, value in model.state_dict().items():
                    expected = split(averaged[name])[0] if value.dtype is torch.bfloat16 else averaged[name].to(value.dtype)
                    assert_same_bits(value, expected, name)
                evaluated.load_state_dict(model.state_dict())
                with torch.no_grad():
                    x = torch.ones(2, 16, dtype=model.second.weight.dtype)
                    torch.testing.assert_close(model(x, False).float(), evaluated.to(x.dtype)(x, False).float())
            assert_same_states(states_of(engine, model), before)
            step(model, ours, 3)


def test_inside_the_block_training_and_saving_are_refused(tmp_path):
    with averaging(tmp_path, update="deferred") as (model, _, ours, ema):
        step(model, ours, 0)
        calls = {
            "a forward pass": lambda: step(model, ours, 1),
            "step": ours.step,
            "infinity.save": lambda: infinity.save(tmp_path / "checkpoint", model, ours),
            "infinity.load": lambda: infinity.load(tmp_path / "checkpoint", model, ours),
            "new weights": lambda: model.load_state_dict(model.state_dict()),
            "ema.weights": lambda: ema.weights().__enter__(),
            "ema.state_dict": ema.state_dict,
        }
        with ema.weights():
            for name, call in calls.items():
                with pytest.raises(infinity.UsageError, match=f"{name}.* inside `with ema.weights"):
                    call()
        model(torch.ones(2, 16), False).sum().backward()
        with pytest.raises(infinity.UsageError, match=r"between backward\(\) and step"):
            with ema.weights():
                pass
        with pytest.raises(infinity.UsageError, match="has an infinity.EMA already"):
            infinity.EMA(model)
    with training(Branches, tmp_path) as (model, _, _), pytest.raises(infinity.UsageError, match="before the optimizer"):
        infinity.EMA(model)
    with pytest.raises(infinity.ConfigError, match="decay=1: expected"):
        infinity.EMA(model, decay=1)


def test_a_step_that_is_skipped_does_not_count(tmp_path):
    with averaging(tmp_path, dtype="fp16", options={"loss_scale": infinity.LossScale(initial=2.0**30)}) as (model, _, ours, ema):
        step(model, ours, 0)
        assert ema.num_averaged == 0
        for number in range(20):
            step(model, ours, number)
        assert 0 < ema.num_averaged < 20


def test_a_checkpoint_has_the_average(tmp_path):
    with averaging(tmp_path / "a", **NVME) as (model, engine, ours, ema):
        for number in range(4):
            step(model, ours, number)  # the last step leaves a branch out: its average is behind
        infinity.save(tmp_path / "checkpoint", model, ours)
        step(model, ours, 4)
        expected, states = ema.state_dict(), states_of(engine, model)
    for options in (NVME, {"chunk_mib": 1 / 64}):
        with averaging(tmp_path / "b", **options) as (model, engine, ours, ema):
            infinity.load(tmp_path / "checkpoint", model, ours)
            assert ema.num_averaged == 4
            step(model, ours, 4)
            assert_same_states({"": ema.state_dict()}, {"": expected})
            assert_same_states(states_of(engine, model), states)


def test_the_average_begins_anew_after_a_checkpoint_without_it(tmp_path):
    with training(Branches, tmp_path / "a") as (model, engine, ours):
        for number in range(2):
            step(model, ours, number)
        infinity.save(tmp_path / "checkpoint", model, ours)
    with averaging(tmp_path / "b") as (model, engine, ours, ema):
        step(model, ours, 5)
        infinity.load(tmp_path / "checkpoint", model, ours)
        assert ema.num_averaged == 0
        step(model, ours, 2)
        assert_same_states({"": ema.state_dict()}, {"": model.state_dict()})
        infinity.save(tmp_path / "with", model, ours)
        expected = {name: {kind: value for kind, value in state.items() if kind != "average"} for name, state in states_of(engine, model).items()}
    with training(Branches, tmp_path / "a", seed=1) as (model, engine, ours):
        infinity.load(tmp_path / "with", model, ours)
        assert_same_states(states_of(engine, model), expected)


def test_a_zero_weight_without_a_master_is_zero_after_an_evaluation(tmp_path):
    """The bits of a weight above the lower half of an average may be those of NaN."""
    weight = torch.tensor([0.0, -0.0, 1.0, float("nan")], dtype=torch.bfloat16)
    average = torch.tensor([-1.001, 1.001, 3.3, 2.2])
    shard = Shard(Format("bf16_rounded", moments=(), averaged=True), {"weight": weight.clone(), AVERAGE: average.clone()})
    exchange(shard)
    assert torch.equal(shard["weight"], average.bfloat16())
    exchange(shard)
    assert torch.equal(shard["weight"].view(torch.int16), weight.view(torch.int16))
    assert torch.equal(shard[AVERAGE].view(torch.int32), average.view(torch.int32))


def test_an_interrupted_evaluation_leaves_the_weights(tmp_path):
    with averaging(tmp_path, **NVME) as (model, engine, optimizer, ema):
        step(model, optimizer, 0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        handle = next(iter(model.children())).register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt), ema.weights(), torch.no_grad():
            step(model, SimpleNamespace(step=lambda: None, zero_grad=lambda: None), 1)
        handle.remove()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        step(model, optimizer, 1)


def test_steps_before_a_new_value_count_with_the_old_one(tmp_path):
    """A branch has no gradient in some steps. Then the program sets its weight."""
    torch.manual_seed(0)
    plain = Branches()
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    plain_optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], lr=1e-2)
    with averaging(tmp_path, **NVME) as (model, engine, optimizer, ema):
        for number, branch in enumerate([True, True, False, False, False, None, False]):
            if branch is None:
                with torch.no_grad():
                    plain.sometimes.weight.fill_(1.0)
                with infinity.gathered(model.sometimes.weight), torch.no_grad():
                    model.sometimes.weight.fill_(1.0)
                continue
            step(plain, plain_optimizer, number, branch)
            averaged.update_parameters(plain)
            step(model, optimizer, number, branch)
        found = ema.state_dict()["sometimes.weight"]
    assert torch.allclose(found, averaged.module.sometimes.weight, rtol=0, atol=1e-5)


def test_a_moment_may_not_be_named_like_the_average():
    class Wrong(infinity.Rule):
        moments = ("average",)

    with pytest.raises(infinity.ConfigError, match="average"):
        infinity.Optimizer([torch.nn.Parameter(torch.zeros(2))], Wrong(), {"lr": 0.1})
