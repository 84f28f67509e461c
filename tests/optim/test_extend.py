"""Formats and optimizers that a program adds, as in examples/extend/."""

import importlib.util
from pathlib import Path

import pytest
import torch
from support.helpers import NVME, assert_same_states, states_of, training
from torch import nn

import infinity
from infinity.config import CHOICES
from infinity.formats.format import STORAGES
from infinity.integrations.engines import taken
from infinity.model.gpt import GPT
from infinity.optim.shard import CODECS

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(__file__).parent.parent.parent / "examples" / "extend"


def example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RMSPROP, LAMB, SCALED = example("rmsprop"), example("lamb"), example("block_scaled_format")
ADAFACTOR, SCHEDULE_FREE = example("adafactor"), example("schedule_free")
DTYPE = "int16_block128"


@pytest.fixture(scope="module", autouse=True)
def registered():
    """Register the format for this file only."""
    SCALED.register_format()
    yield
    del STORAGES[DTYPE], CODECS[DTYPE]
    CHOICES["dtype"] = tuple(name for name in CHOICES["dtype"] if name != DTYPE)


def step(model, optimizer, number):
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(number))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def gpt():
    return GPT(hidden=64, layers=3, heads=4, vocab=64, seq=16)


@pytest.mark.long
def test_rmsprop_trains_as_torchs_rmsprop(tmp_path):
    torch.manual_seed(0)
    plain = gpt()
    theirs = torch.optim.RMSprop(plain.parameters(), lr=1e-3)
    expected = [step(plain, theirs, number) for number in range(5)]
    with training(gpt, tmp_path, optimizer=RMSPROP.RMSprop, options={"lr": 1e-3}, **NVME) as (model, engine, ours):
        assert [step(model, ours, number) for number in range(5)] == pytest.approx(expected, rel=1e-5)
        for name, param in plain.named_parameters():
            state = engine.read_state(model.get_parameter(name))
            torch.testing.assert_close(state["weight"], param.detach(), rtol=1e-3, atol=1e-4)  # tiny gradients have random signs
            torch.testing.assert_close(state["square_avg"], theirs.state[param]["square_avg"], rtol=1e-4, atol=1e-9)


def test_rmsprop_refuses_invalid_hyperparameters(tmp_path):
    with pytest.raises(infinity.ConfigError, match="alpha=-1"):
        with training(gpt, tmp_path, optimizer=RMSPROP.RMSprop, options={"alpha": -1}):
            pass


PLACES = {"host": {"param_tier": "host", "optimizer_state_tier": "host", "residency": "none"}, "nvme": NVME, "auto": {}, "coded": NVME | {"compression": "on"}}


@pytest.mark.long
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_a_coded_format_has_the_same_bits_in_every_tier(update, tmp_path):
    found = {}
    for place, options in PLACES.items():
        with training(gpt, tmp_path / place, dtype=DTYPE, update=update, options={"lr": 1e-3}, **options) as (model, engine, ours):
            losses = [step(model, ours, number) for number in range(4)]
            found[place] = losses, states_of(engine, model)
            assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    for place, (losses, states) in found.items():
        assert losses == found["host"][0], place
        assert_same_states(states, found["host"][1], place)


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of You et al. 2020, in float64."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p).double(), "v": torch.zeros_like(p).double()}
                state["step"] += 1
                grad = p.grad.double()
                state["m"] += 0.1 * (grad - state["m"])
                state["v"] += 0.001 * (grad**2 - state["v"])
                of_adam = state["m"] / (1 - 0.9 ** state["step"]) / ((state["v"] / (1 - 0.999 ** state["step"])).sqrt() + 1e-6)
                direction = of_adam + 0.01 * p.double()
                norms = p.double().norm(), direction.norm()
                p -= (group["lr"] * (norms[0] / norms[1] if all(norms) else 1.0) * direction).float()


@pytest.mark.long
def test_lamb_trains_as_its_paper_says(tmp_path):
    torch.manual_seed(0)
    plain = gpt()
    reference = Lamb(plain.parameters(), lr=1e-2)
    expected = [step(plain, reference, number) for number in range(10)]
    found = []
    for places in (NVME, {"param_tier": "host", "optimizer_state_tier": "host"}, {"chunk_mib": 1 / 4}):
        with training(gpt, tmp_path, optimizer=LAMB.LAMB, **places) as (model, engine, ours):
            assert [step(model, ours, number) for number in range(10)] == pytest.approx(expected, rel=1e-4)
            found.append(states_of(engine, model))
    for states in found[1:]:
        assert_same_states(states, found[0])


def test_tiles_are_refused_for_a_rule_of_whole_parameters(tmp_path):
    make = lambda: nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(infinity.ConfigError, match="0.weight lies in tiles, and LambRule needs the whole parameter. Set tile_above=None"):
        with training(make, tmp_path, optimizer=LAMB.LAMB, tile_above=4096):
            pass


def test_a_rule_of_matrices_trains_a_coded_format(tmp_path):
    """The last layer's matrices begin within blocks of the storage."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 50))
        model.stack = nn.Parameter(torch.randn(3, 50, 7) / 10)
        model.forward = lambda x: model[1](model[0](x)) @ model.stack
        return model

    losses = {}
    for dtype in ("bf16", DTYPE):
        with training(make, tmp_path / dtype, optimizer=infinity.Muon, dtype=dtype, options={"lr": 0.01}, **NVME) as (model, engine, ours):
            losses[dtype] = []
            for _ in range(6):
                loss = (model(torch.ones(4, 64, dtype=torch.bfloat16)) - 1).square().mean()
                loss.backward()
                ours.step()
                ours.zero_grad()
                losses[dtype].append(loss.item())
    assert losses[DTYPE][-1] < losses[DTYPE][0]
    assert losses[DTYPE] == pytest.approx(losses["bf16"], rel=0.05)


@pytest.mark.long
def test_a_coded_format_trains_like_bf16(tmp_path):
    losses = {}
    for dtype in ("bf16", DTYPE):
        with training(gpt, tmp_path / dtype, dtype=dtype, options={"lr": 3e-3}, **NVME) as (model, engine, ours):
            losses[dtype] = [step(model, ours, 0) for _ in range(12)]
            if dtype == DTYPE:
                weights = sum(chunk.record.weight_nbytes for chunk in engine.registry.chunks)
                numel = sum(chunk.record.numel for chunk in engine.registry.chunks)
                assert weights <= numel * (2 + 4 / 128) + 8192 * len(engine.registry.chunks)
    assert losses[DTYPE][-1] < losses[DTYPE][0] / 2
    assert losses[DTYPE] == pytest.approx(losses["bf16"], rel=0.03)


@pytest.mark.long
def test_a_coded_format_is_saved_loaded_and_exported(tmp_path):
    options = {"dtype": DTYPE, "options": {"lr": 1e-3}}
    with training(gpt, tmp_path / "a", **options, **NVME) as (model, engine, ours):
        for number in range(2):
            step(model, ours, number)
        infinity.save(tmp_path / "checkpoint", model, ours)
        weights = model.state_dict()
        step(model, ours, 2)
        expected = states_of(engine, model)
    with training(gpt, tmp_path / "b", seed=1, chunk_mib=1 / 64, **options) as (model, engine, ours):
        infinity.load(tmp_path / "checkpoint", model, ours)
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights[name]), name
        step(model, ours, 2)
        assert_same_states(states_of(engine, model), expected)


def test_values_that_the_program_writes_are_coded(tmp_path):
    make = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with training(make, tmp_path, dtype=DTYPE, **NVME) as (model, engine, _):
        value = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
        with torch.no_grad(), infinity.gathered(model[0].weight):
            model[0].weight.copy_(value)
        got = model.state_dict()["0.weight"]
        assert (got.float() - value.bfloat16().float()).abs().max() < 1e-3 + value.abs().max() / 100
        model.load_state_dict(model.state_dict() | {"1.weight": value})
        assert torch.equal(engine.read_state(model[1].weight)["master"], value)


def test_a_coded_format_has_no_home_on_the_device(tmp_path):
    with pytest.raises(infinity.ConfigError, match="coded weights live in host memory or on NVMe"):
        with training(gpt, tmp_path, dtype=DTYPE, param_tier="device", optimizer_state_tier="device"):
            pass


def test_a_format_name_is_registered_once():
    with pytest.raises(ValueError, match="exists already"):
        SCALED.register_format()


def test_trainers_take_the_dtype_in_which_a_format_computes(tmp_path):
    model = gpt()
    config = infinity.Config(dtype=DTYPE, swap_dirs=tmp_path, device="cpu")
    with taken(model, config, "bf16", told="bf16=True", asked=lambda dtype: f"{dtype}=True") as engine:
        assert engine.config.dtype == DTYPE
    with pytest.raises(infinity.ConfigError, match="fp16=True over an engine of dtype 'int16_block128'"):
        taken(gpt(), config, "fp16", told="fp16=True", asked=lambda dtype: f"{dtype}=True")


def test_bf16_moments_are_refused_for_a_format_that_a_program_adds():
    with pytest.raises(infinity.ConfigError, match="this value goes with dtype='bf16' only"):
        infinity.Config(dtype=DTYPE, optimizer_state_dtype="bf16")


class Factored(nn.Module):
    """Matrices of several sizes, a vector, a stack of matrices, and a matrix with fewer elements than a row and a column together."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 40), nn.Linear(40, 1))
        self.stack = nn.Parameter(torch.randn(3, 40, 5) / 7)

    def forward(self, x):
        return self.layers(x) + (self.layers[:3](x) @ self.stack).square().mean()


def factored_step(model, optimizer, number):
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.slow
def test_adafactor_trains_as_torchs_adafactor(tmp_path):
    torch.manual_seed(0)
    plain = Factored()
    theirs = torch.optim.Adafactor(plain.parameters(), lr=1e-2, weight_decay=0.1)
    expected = [factored_step(plain, theirs, number) for number in range(8)]
    options = {"options": {"lr": 1e-2, "weight_decay": 0.1}, "optimizer": ADAFACTOR.Adafactor}
    for places in (NVME, {"param_tier": "host", "optimizer_state_tier": "host"}, {"chunk_mib": 1 / 4}):
        with training(Factored, tmp_path, **options, **places) as (model, engine, ours):
            found = [factored_step(model, ours, number) for number in range(4)]
            infinity.save(tmp_path / "checkpoint", model, ours)
        with training(Factored, tmp_path, seed=1, **options) as (model, engine, ours):
            infinity.load(tmp_path / "checkpoint", model, ours)
            found += [factored_step(model, ours, number) for number in range(4, 8)]
            assert found == pytest.approx(expected, rel=1e-5)
            for name, param in plain.named_parameters():
                torch.testing.assert_close(model.state_dict()[name], param.detach(), rtol=1e-5, atol=1e-6)
    states = engine.registry.chunks
    assert sum(chunk.record.moments_nbytes for chunk in states) < sum(chunk.record.numel for chunk in states)  # AdamW: 8 bytes an element


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_factored_moments_train_weights_in_bf16(moments, tmp_path):
    losses = {}
    for dtype, options in {"fp32": {}, "bf16": {"optimizer_state_dtype": moments}}.items():
        with training(Factored, tmp_path, optimizer=ADAFACTOR.Adafactor, dtype=dtype, **options, **NVME) as (model, engine, ours):
            losses[dtype] = [factored_step(model, ours, 0) for _ in range(8)]
            assert engine.read_state(model.stack)["row"].dtype is torch.float32
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05, abs=0.02)


class ScheduleFree(torch.optim.Optimizer):
    """Algorithm 1 of Defazio et al. 2024 with AdamW, in the sequences x, y and z of the paper, in float64. No warm-up."""

    def __init__(self, params, lr, weight_decay, beta1=0.9, beta2=0.999):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.betas, self.num = (beta1, beta2), 0

    @torch.no_grad()
    def step(self):
        (beta1, beta2), group = self.betas, self.param_groups[0]
        self.num += 1
        for p in group["params"]:
            s = self.state[p]
            if not s:
                s |= {"x": p.double().clone(), "z": p.double().clone(), "v": torch.zeros_like(p).double()}
            grad = p.grad.double()
            s["v"] = beta2 * s["v"] + (1 - beta2) * grad**2
            y = (1 - beta1) * s["z"] + beta1 * s["x"]
            direction = grad / ((s["v"] / (1 - beta2**self.num)).sqrt() + 1e-8) + group["weight_decay"] * y
            s["z"] = s["z"] - group["lr"] * direction
            s["x"] = (1 - 1 / self.num) * s["x"] + s["z"] / self.num
            p.copy_((1 - beta1) * s["z"] + beta1 * s["x"])


SCHEDULE = {"lr": 1e-2, "weight_decay": 0.05}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["nvme", "auto"])
def test_schedule_free_adamw_trains_and_evaluates_as_its_paper_says(place, tmp_path):
    torch.manual_seed(0)
    plain = Factored()
    reference = ScheduleFree(plain.parameters(), **SCHEDULE)
    expected = [factored_step(plain, reference, number) for number in range(6)]
    how = {"optimizer": SCHEDULE_FREE.ScheduleFreeAdamW, "options": SCHEDULE} | PLACES[place]
    with training(Factored, tmp_path, **how) as (model, engine, ours):
        found = []
        for number in range(6):
            found.append(factored_step(model, ours, number))
            ours.eval()
            values = model.state_dict()
            with pytest.raises(infinity.UsageError, match="after eval"):
                ours.step()
            if number == 3:
                infinity.save(tmp_path / "checkpoint", model, ours)
                infinity.load(tmp_path / "checkpoint", model, ours)
            ours.train()
        assert found == pytest.approx(expected, rel=1e-5)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(values[name], reference.state[param]["x"].float(), rtol=1e-5, atol=2e-6)


def test_schedule_free_adamw_trains_as_its_authors_package(tmp_path):
    package = pytest.importorskip("schedulefree")
    torch.manual_seed(0)
    plain = Factored()
    theirs = package.AdamWScheduleFree(plain.parameters(), warmup_steps=3, foreach=False, **SCHEDULE)
    theirs.train()
    expected = [factored_step(plain, theirs, number) for number in range(8)]
    theirs.eval()
    options = SCHEDULE | {"warmup_steps": 3}
    with training(Factored, tmp_path, optimizer=SCHEDULE_FREE.ScheduleFreeAdamW, options=options, **NVME) as (model, engine, ours):
        assert [factored_step(model, ours, number) for number in range(8)] == pytest.approx(expected, rel=1e-5)
        ours.eval()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-5, atol=2e-6)
