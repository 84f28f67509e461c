"""Gradients that have slots and no planned place on NVMe, because the drive is too small: equal bits, and no thread that hangs."""

import errno
import time

import pytest
import torch
from support.helpers import NVME, assert_same_states, states_of, training
from support.models import gpt_step, gpt_step_by_layer, tiny_gpt
from torch import nn

import infinity
from infinity.engine import build
from infinity.plan import host_memory
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS
from infinity.system.swap import Swap

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"chunk_mib": 1 / 512, "host_memory": "128KiB"}


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    for name in ("WEIGHT_SLOTS", "STATE_SLOTS", "GRADIENT_SLOTS"):
        monkeypatch.setattr(host_memory, name, 3)


@pytest.fixture
def small_drive(monkeypatch):
    """A function that limits the free bytes on every drive."""
    return lambda nbytes: monkeypatch.setattr(build, "room_nbytes", lambda paths: nbytes)


def planned(directory, make=tiny_gpt, **config):
    with training(make, directory, **config) as (_, engine, _):
        return engine.placement


def records_nbytes(placement):
    """Bytes of weights and states on NVMe."""
    homes = placement.homes
    return sum(n for kind in (WEIGHTS, STATES) for n, home in zip(placement.on_nvme[kind], homes[kind]) if home.is_storage)


def trained(directory, *, delays=None, steps=4, **config):
    with training(tiny_gpt, directory, **config) as (model, engine, optimizer):
        for name, seconds in (delays or {}).items():
            lane = engine.updater.lane if name == "update" else engine.gradients.gc
            lane.on_job = lambda seconds=seconds: time.sleep(seconds)
        losses = [gpt_step(model, optimizer, step, optimizer.accumulation_steps) for step in range(steps)]
        passing = [chunk.gradient_passes for chunk in engine.registry.chunks]
        return losses, states_of(engine, model), engine.placement, passing


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("delays", [{}, {"update": 0.003}, {"gc": 0.003}])
@pytest.mark.parametrize("places", [NVME, {}])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_without_a_place_on_nvme_have_the_same_bits(dtype, places, delays, small_drive, tmp_path):
    config = {"dtype": dtype, "device_memory": "128KiB"} | SMALL | places
    losses, states, ample, passing = trained(tmp_path / "ample", **config)
    assert not any(passing) and ample.on_nvme[GRADIENTS] == ample.sizes[GRADIENTS]
    small_drive(records_nbytes(ample) + 3 * max(ample.sizes[GRADIENTS]))
    found = trained(tmp_path / "small", delays=delays, **config)
    assert any(found[3]) and not any(found[2].on_nvme[GRADIENTS])
    assert found[2].slots[GRADIENTS] < len(found[3])
    assert found[0] == losses
    assert_same_states(found[1], states)


def test_slots_for_the_largest_ops_and_shared_parameters(small_drive, tmp_path):
    config = {"device_memory": "128KiB"} | SMALL | NVME
    counts = []
    for tie in (False, True):
        make = lambda tie=tie: tiny_gpt(tie=tie)
        ample = planned(tmp_path / f"ample-{tie}", make, **config)
        small_drive(ample.nvme_nbytes - 1)
        counts.append(planned(tmp_path / f"small-{tie}", make, **config).slots[GRADIENTS])
        small_drive(1 << 40)
    assert 3 < counts[0] < counts[1]


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"accumulation_steps": 2}])
def test_gradients_that_wait_for_step_have_a_place(options, small_drive, tmp_path):
    config = {"options": options, "param_tier": "host", "optimizer_state_tier": "nvme", "host_memory": "600KiB", "chunk_mib": 1 / 512}
    ample = planned(tmp_path / "ample", **config)
    small_drive(ample.nvme_nbytes)
    assert planned(tmp_path / "small", **config).on_nvme[GRADIENTS] == ample.on_nvme[GRADIENTS]


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["a gradient", "all sums"])
def test_sums_need_no_place_if_steps_are_by_layer(lacking, small_drive, tmp_path):
    config = {"dtype": "bf16", "device_memory": "160KiB", "options": {"accumulation_steps": 3}} | SMALL | NVME
    results = []
    for name in ("ample", "small"):
        with training(tiny_gpt, tmp_path / name, **config) as (model, engine, optimizer):
            assert engine.placement.only_by_layer == (name == "small")
            losses = [gpt_step_by_layer(model, optimizer, step, 3) for step in range(3)]
            results.append((losses, states_of(engine, model)))
            ample = engine.placement
            if name == "small":
                with pytest.raises(infinity.UsageError, match="have no room for sums of gradients.* infinity.accumulate"):
                    gpt_step(model, optimizer, 0, 3)
                optimizer.zero_grad()
                before = engine.stats()["links"]["d2h"]["nbytes"]
                gpt_step_by_layer(model, optimizer, 3, 3)
                engine.flush()
                described = infinity.describe(model).step_nbytes["d2h"]
                moved = engine.stats()["links"]["d2h"]["nbytes"] - before
                assert described <= moved < 1.3 * described  # some gradients find no room for a sum on the device
        small_drive(records_nbytes(ample) if lacking == "all sums" else ample.nvme_nbytes - max(ample.sizes[GRADIENTS]))
    assert results[0][0] == results[1][0]
    assert_same_states(results[1][1], results[0][1])


def test_clipped_sums_need_their_places(small_drive, tmp_path):
    config = {"options": {"accumulation_steps": 3, "max_grad_norm": 0.5}} | SMALL | NVME
    ample = planned(tmp_path / "ample", **config)
    small_drive(records_nbytes(ample))
    small = planned(tmp_path / "small", **config)
    assert not small.only_by_layer and small.on_nvme[GRADIENTS] == ample.on_nvme[GRADIENTS]  # the drive refuses the excess


class Twice(nn.Module):
    """All layers run twice before the loss, so that each gradient is complete late."""

    def __init__(self, num_layers=24):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(num_layers))

    def forward(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
        return x


class Kinds(nn.Module):
    """Modules registered by kind and run by layer, as in XLM: chunks are complete out of order."""

    def __init__(self, num_kinds=8, num_layers=13):
        super().__init__()
        self.kinds = nn.ModuleList(nn.ModuleList(nn.Linear(24, 24) for _ in range(num_layers)) for _ in range(num_kinds))

    def forward(self, x):
        for layers in zip(*self.kinds):
            for linear in layers:
                x = x + torch.tanh(linear(x))
        return x


LATE = {"twice": (lambda: Twice(24), 48), "few": (lambda: Twice(4), 48), "kinds": (Kinds, 24), "one kind": (lambda: Kinds(1, 24), 24)}


def run_late(name, directory, *, retain=False, num_forwards=1, steps=2, **config):
    make, hidden = LATE[name]
    config = {"device_memory": "64KiB", "host_memory": "256KiB", "chunk_mib": 1 / 256} | NVME | config
    xs = torch.randn(num_forwards, 2, hidden, generator=torch.Generator().manual_seed(0))
    with training(make, directory, **config) as (model, engine, optimizer):
        losses = []
        for _ in range(steps):
            loss = sum(model(x).square().mean() for x in xs)
            loss.backward(retain_graph=retain)
            losses.append(loss.item())
            del loss
            optimizer.step()
            optimizer.zero_grad()
        written = engine.stats()["nvme_write_nbytes"]
        return losses, states_of(engine, model), engine.placement, written


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("how", [{}, {"retain": True}, {"num_forwards": 2}], ids=["once", "retained", "two forwards"])
@pytest.mark.parametrize("name", LATE)
def test_gradients_that_are_complete_late_have_the_same_bits(name, how, small_drive, tmp_path):
    losses, states, ample, _ = run_late(name, tmp_path / "ample", **how)
    small_drive(records_nbytes(ample))
    found = run_late(name, tmp_path / "small", **how)
    assert found[2].gradients_pass and found[0] == losses
    assert_same_states(found[1], states)


@pytest.mark.slow
def test_a_gradient_on_a_full_drive_is_an_error_and_no_hang(small_drive, monkeypatch, tmp_path):
    """Later an error of the backward pass ends it, and zero_grad() does not hang."""
    *_, ample, _ = run_late("kinds", tmp_path / "ample")
    small_drive(records_nbytes(ample))

    def full(self, nbytes):
        raise infinity.SwapError(errno.ENOSPC, "no space", "nvme")

    monkeypatch.setattr(Swap, "extend", full)
    start = time.monotonic()
    with pytest.raises(infinity.SwapError, match="NVMe has no room for a gradient that waits for others: no space"):
        run_late("kinds", tmp_path / "small")
    assert time.monotonic() - start < 30


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("device_kib", [96, 128, 192])
def test_a_step_by_layer_with_little_device_memory_has_the_same_bits(device_kib, dtype, small_drive, tmp_path):
    """The device has no room for the sums of a layer."""
    config = {"dtype": dtype, "device_memory": f"{device_kib}KiB", "options": {"accumulation_steps": 3}} | SMALL | NVME
    results = []
    for name in ("ample", "small"):
        with training(tiny_gpt, tmp_path / name, **config) as (model, engine, optimizer):
            assert engine.placement.only_by_layer == (name == "small")
            assert infinity.describe(model).only_by_layer == (name == "small")
            assert ("micro-batches a step need infinity.accumulate" in str(infinity.describe(model))) == (name == "small")
            losses = [gpt_step_by_layer(model, optimizer, step, 3) for step in range(2)]
            results.append((losses, states_of(engine, model)))
            small_drive(records_nbytes(engine.placement))
    assert results[0][0] == results[1][0]
    assert_same_states(results[1][1], results[0][1])
