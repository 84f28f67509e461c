"""fp16 with a loss scale, bf16 moments and non-finite gradients give the same bits in every tier."""

import contextlib
import math
import types

import pytest
import torch
import torch.utils.checkpoint
from support import helpers
from support.helpers import NVME, assert_same_states, states_of, training
from support.models import gpt_step, inputs, loss_of, mlp, tiny_gpt, tokens
from torch import nn

import infinity
from infinity.optim.adam import Dither, store_dithered
from infinity.optim.loss_scale import LossScale

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES = {
    "device": {"param_tier": "device", "optimizer_state_tier": "device"},
    "host": {"param_tier": "host", "optimizer_state_tier": "host"},
    "nvme": NVME,
    "nvme, small chunks": NVME | {"chunk_mib": 1 / 256},
    "nvme, large chunks": NVME | {"chunk_mib": 1},
}


# ---- fp16 ----


class Faint(nn.Module):
    """The gradients are about 1e-8, below the smallest fp16 number."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return (self.last(torch.tanh(self.first(x))).float() - 1).square().mean() * 1e-7


def faint_losses(directory, num_steps=30, **options):
    with training(Faint, directory, dtype="fp16", options={"lr": 1e-2, "eps": 1e-12} | options, **NVME) as (model, engine, opt):
        losses = []
        for _ in range(num_steps):
            loss = model(torch.ones(4, 32, dtype=torch.float16))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses, engine.stats()


@pytest.mark.slow
def test_fp16_trains_where_unscaled_gradients_flush_to_zero(tmp_path):
    scaled, stats = faint_losses(tmp_path)
    unscaled, _ = faint_losses(tmp_path, loss_scale=LossScale(initial=1.0, growth=1.0))
    assert scaled[-1] < 0.2 * scaled[0]
    assert unscaled[-1] > 0.9 * unscaled[0]
    assert stats["num_skipped_steps"] == 0 and stats["loss_scale"] == 2.0**16


@pytest.mark.slow
def test_at_an_overflow_the_scale_shrinks_and_no_byte_changes(tmp_path):
    scale = LossScale(initial=2.0**40, backoff=2.0**-8, interval=3, growth=4.0)
    with training(tiny_gpt, tmp_path, dtype="fp16", options={"loss_scale": scale}, **NVME) as (model, engine, optimizer):
        before, scales = states_of(engine, model), []
        for step in range(12):
            model(*tokens(step)).backward()
            skipped = engine.cycle.num_skipped
            optimizer.step()
            optimizer.zero_grad()
            scales.append(engine.stats()["loss_scale"])
            if engine.cycle.num_skipped > skipped:
                assert_same_states(states_of(engine, model), before)
            else:
                break
        assert len(scales) >= 3 and scales[:2] == [2.0**32, 2.0**24]
        engine.flush()
        assert all(chunk.steps[param] == 1 for chunk in engine.registry.chunks for param in chunk.steps)
        for more in range(2):
            gpt_step(model, optimizer, 100 + more)
        assert engine.stats()["loss_scale"] == 4 * scales[-1]


@pytest.mark.slow
def test_fp16_has_the_bits_of_the_reference_loop(tmp_path):
    torch.manual_seed(0)
    plain_model = tiny_gpt()
    masters = [nn.Parameter(p.detach().clone()) for p in plain_model.parameters()]
    reference = helpers.ReferenceAdamW(masters, lr=1e-3)
    plain_model.half()
    options = {"lr": 1e-3, "loss_scale": LossScale(initial=1024.0)}
    with training(tiny_gpt, tmp_path, dtype="fp16", options=options, **NVME) as (model, engine, optimizer):
        for step in range(20):
            loss = plain_model(*tokens(step)).float()
            (loss * 1024).backward()
            for master, p in zip(masters, plain_model.parameters(), strict=True):
                master.grad, p.grad = p.grad.float(), None
            reference.step(grad_scale=1 / 1024)
            for master, p in zip(masters, plain_model.parameters(), strict=True):
                p.data.copy_(master)
            assert gpt_step(model, optimizer, step) == loss.item()
        for param, master in zip(model.parameters(), masters, strict=True):
            found, expected = engine.read_state(param), reference.state[master]
            helpers.assert_same_bits(found["weight"], master.detach().half(), "weight")
            for name, key in (("master", "master"), ("momentum", "m"), ("variance", "v")):
                helpers.assert_same_bits(found[name], expected[key], name)


@pytest.mark.parametrize("container", ["tuple", "dict"])
def test_outputs_of_an_fp16_model_are_fp32_in_the_same_containers(container, tmp_path):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            out = self.inner(x)
            return (out, 3, [out * 2]) if container == "tuple" else {"out": out, "more": [out * 2]}

    with training(Wrapped, tmp_path, dtype="fp16") as (model, engine, optimizer):
        found = model(torch.ones(2, 8, dtype=torch.float16))
        assert type(found) is (tuple if container == "tuple" else dict)
        tensors = [found[0], found[2][0]] if container == "tuple" else [found["out"], found["more"][0]]
        assert all(tensor.dtype == torch.float32 for tensor in tensors)
        sum(tensor.sum() for tensor in tensors).backward()
        optimizer.step()


# ---- placement ----


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x.to(self.b.bias.dtype))))


class Boxed(Two):
    def forward(self, x):
        return types.SimpleNamespace(value=super().forward(x))


def reentrant(model, x):
    return torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True)


WAYS = {
    "once": lambda model, x: model(x),
    "twice": lambda model, x: model(model(x)),
    "checkpoint": lambda model, x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
    "reentrant checkpoint": reentrant,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_fp16_gradients_match_fp32_for_every_kind_of_call(way, tmp_path):
    found = {}
    for dtype, options in (("fp32", {}), ("fp16", {"loss_scale": LossScale(initial=256.0)})):
        torch.manual_seed(3)
        before = nn.Linear(8, 8)  # outside the engine
        with training(Two, tmp_path, dtype=dtype, options=options, **NVME) as (model, engine, optimizer):
            x = before(torch.ones(4, 8))
            WAYS[way](model, x if way != "reentrant checkpoint" else x.detach()).square().mean().backward()
            optimizer.step()
            assert engine.cycle.num_skipped == 0
            found[dtype] = [engine.read_state(p)["momentum"] for p in model.parameters()] + [before.weight.grad]
    for ours, expected in zip(found["fp16"], found["fp32"], strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=0.02, atol=1e-5)


@pytest.mark.parametrize(
    "make, call, message",
    [
        (Two, lambda model, x: model.b(torch.tanh(model.a(x.half()))), "a was called by itself, but .* scales the outputs"),
        (Boxed, lambda model, x: model(x).value, "has a gradient that comes from no output of the model"),
    ],
)
def test_fp16_refuses_a_graph_that_it_cannot_scale(make, call, message, tmp_path):
    with training(make, tmp_path, dtype="fp16", **NVME) as (model, engine, optimizer):
        with pytest.raises(infinity.UsageError, match=message):
            call(model, torch.ones(4, 8)).float().square().mean().backward()
        optimizer.zero_grad()


def test_a_nan_norm_makes_every_weight_nan(tmp_path):
    """torch.nn.utils.clip_grad_norm_ does the same."""
    results = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = Two()
        x = torch.ones(4, 8)

        def backward():
            y = model(x)
            with contextlib.nullcontext() if plain else infinity.gathered(model.b.bias):
                term = (model.b.bias * torch.tensor([math.nan] + [0.0] * 7)).sum()
            (y.square().mean() + 1e3 * term).backward()

        if plain:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            results.append([p.detach() for p in model.parameters()])
        else:
            config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, host_memory="64MiB")
            with infinity.offload(model, config) as engine:
                optimizer = infinity.SGD(model.parameters(), lr=1.0, max_grad_norm=1.0)
                backward()
                optimizer.step()
                results.append([engine.read_state(p)["weight"] for p in model.parameters()])
    assert all(torch.equal(a.isnan(), b.isnan()) and a.isnan().all() for a, b in zip(*results, strict=True))


FP16, BF16_MOMENTS = {"dtype": "fp16"}, {"dtype": "bf16", "optimizer_state_dtype": "bf16"}
RULES = [  # short runs have each precision and each rule once
    *((infinity.AdamW, FP16), (infinity.SGD, BF16_MOMENTS), (infinity.Lion, FP16)),
    *(pytest.param(*case, marks=pytest.mark.long) for case in ((infinity.AdamW, BF16_MOMENTS), (infinity.SGD, FP16), (infinity.Lion, BF16_MOMENTS))),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer, config", RULES)
def test_placement_changes_no_bit(config, optimizer, tmp_path):
    options = {"lr": 1e-2, "momentum": 0.9} if optimizer is infinity.SGD else {"lr": 1e-3, "weight_decay": 0.1}
    expected = None
    for update in ("deferred", "auto"):
        for name, places in PLACES.items():
            made = training(tiny_gpt, tmp_path, optimizer=optimizer, options=options, update=update, **config | places)
            with made as (model, engine, opt):
                for step in range(6):
                    gpt_step(model, opt, step)
                states = states_of(engine, model)
            expected = expected or states
            assert_same_states(states, expected, f"{name} {update}")


# ---- bf16 moments ----


def test_dither_depends_on_the_element_and_not_on_the_part():
    whole = Dither.of(5, "a.weight", 3, 0).bits(10_000)
    for begin in (0, 1, 1024, 9_999):
        assert torch.equal(Dither.of(5, "a.weight", 3, begin).bits(10_000 - begin), whole[begin:])
    others = [Dither.of(6, "a.weight", 3, 0), Dither.of(5, "b", 3, 0), Dither.of(5, "a.weight", 4, 0), Dither.of(5, "a.weight", 3, 1 << 32)]
    for other in others:
        assert (other.bits(10_000) == whole).sum() < 5


def test_dithered_rounding_is_unbiased_and_independent():
    numel = 1 << 20
    random = Dither.of(1, "w", 1, 0).bits(numel)
    low, high = random & 0xFFFF, random >> 16
    for halves in (low, high):
        assert halves.double().mean().item() == pytest.approx(32767.5, abs=5 * 18919 / math.sqrt(numel))
        counts = torch.bincount((halves >> 8).int(), minlength=256).double()
        chi = ((counts - numel / 256) ** 2 / (numel / 256)).sum().item()
        assert abs(chi - 255) < 6 * math.sqrt(510)
    for a, b in ((low, high), (low[1:], low[:-1]), (high[1:], high[:-1]), (low, Dither.of(1, "w", 2, 0).bits(numel) & 0xFFFF)):
        correlation = torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()
        assert abs(correlation) < 6 / math.sqrt(numel)
    value = torch.full((numel,), 1.0 + 2**-9 / 3)
    target = torch.empty(numel, dtype=torch.bfloat16)
    store_dithered(target, value, low)
    assert set(target.unique().tolist()) == {1.0, 1.0078125}
    step = 0.0078125
    assert target.double().mean().item() == pytest.approx(value[0].item(), abs=5 * step * 0.5 / math.sqrt(numel))


@pytest.mark.long
@pytest.mark.parametrize("steps", [1500, pytest.param(5000, marks=pytest.mark.long)])
def test_the_variance_in_bf16_stays_unbiased_over_many_steps(steps, tmp_path):
    """With beta2 = 0.999 and rounding to nearest, changes below 1/256 of the value would all be lost."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(512))

        def forward(self, x):
            return (self.weight * x).sum()

    config = {"dtype": "bf16", "optimizer_state_dtype": "bf16", "param_tier": "host", "optimizer_state_tier": "host"}
    with training(Scale, tmp_path, options={"lr": 0.0}, **config) as (model, engine, optimizer):
        generator = torch.Generator().manual_seed(0)
        exact = torch.zeros(512, dtype=torch.float64)
        for _ in range(steps):
            x = torch.randn(512, generator=generator).bfloat16()
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            exact = exact * 0.999 + x.double().square() * 0.001
        variance = engine.read_state(model.weight)["variance"]
        assert variance.dtype == torch.bfloat16
        assert variance.double().mean().item() == pytest.approx(exact.mean().item(), rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("compression, expected", [("off", 8.0), ("auto", 4 + 4 / 3)])
def test_bf16_moments_write_8_bytes_a_parameter_or_a_third_less_late(compression, expected, tmp_path):
    from support.traffic import traffic, traffic_gpt

    read, written, _ = traffic(traffic_gpt, tmp_path, update="backward", optimizer_state_dtype="bf16", compression=compression)
    assert read == pytest.approx(10.0, rel=0.03)
    assert written == pytest.approx(expected, rel=0.03)


# ---- gradients that are not finite ----


@pytest.mark.parametrize("nonfinite", ["ignore", "skip", "raise"])
def test_a_nan_in_a_gradient_is_ignored_skipped_or_raised(nonfinite, tmp_path):
    with training(mlp, tmp_path, nonfinite=nonfinite, **NVME) as (model, engine, optimizer):
        for step in range(3):
            loss_of(model(inputs(model, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = states_of(engine, model)
        (loss_of(model(inputs(model, 3))) * math.nan).backward()
        if nonfinite == "raise":
            with pytest.raises(infinity.NonFiniteError, match="not finite; the first is of .*No state was changed"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        after = states_of(engine, model)
        if nonfinite == "ignore":
            assert all(state["weight"].isnan().all() for state in after.values())
            return
        assert_same_states(after, before)
        assert engine.stats()["num_skipped_steps"] == 1
        loss_of(model(inputs(model, 4))).backward()
        optimizer.step()
        assert all(state["weight"].isfinite().all() for state in states_of(engine, model).values())


def test_settings_that_need_fp16_are_refused_without_it(tmp_path):
    with pytest.raises(infinity.ConfigError, match="loss_scale with dtype='bf16'"):
        with training(mlp, tmp_path, dtype="bf16", options={"loss_scale": LossScale()}):
            pass
    for wrong in ({"initial": 0.0}, {"growth": 0.5}, {"backoff": 2.0}, {"interval": 0}, {"minimum": 1e9}):
        with pytest.raises(infinity.ConfigError, match=f"loss_scale: {next(iter(wrong))}="):
            LossScale(**wrong)
