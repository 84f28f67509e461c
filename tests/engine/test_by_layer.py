"""Layer-wise accumulation of chains of blocks: the gradients of the ordinary loop, the bytes read from NVMe, and steps of both kinds in turn.
All other tests of layer-wise accumulation are in test_accumulate.py."""

import pytest
import torch
from support.helpers import NVME, assert_nothing_held, assert_same_states, on_gpu, run_micro_batches, states_of, training
from support.micro_batches import MICROS, loss_of, micro_batches
from support.models import Chain
from torch import nn

from infinity.optim.loss_scale import LossScale

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = pytest.mark.long


def run(directory, by_layer, *, num_steps=4, make=Chain, **config):
    options = {"accumulation_steps": MICROS} | config.pop("options", {})
    losses = []
    with training(make, directory, options=options, **config) as (model, engine, optimizer):
        for step in range(num_steps):
            batches = [(x.to(engine.device), y.to(engine.device)) for x, y in micro_batches(step)]
            losses += run_micro_batches(model, batches, loss_of, by_layer)
            optimizer.step()
            optimizer.zero_grad()
            assert_nothing_held(engine)
        return losses, states_of(engine, model)


@pytest.mark.few(1)
@pytest.mark.parametrize("places", [NVME, {"param_tier": "device", "optimizer_state_tier": "device"}, {"param_tier": "host", "optimizer_state_tier": "nvme"}], ids=str)
@pytest.mark.parametrize(
    "update, dtype",
    [
        ("deferred", "fp32"),
        ("backward", "bf16"),
        pytest.param("backward", "fp32", marks=LONG),
        pytest.param("deferred", "bf16", marks=LONG),
    ],
)
def test_losses_and_states_are_those_of_the_ordinary_loop(places, update, dtype, tmp_path):
    config = {"dtype": dtype, "update": update, **places}
    losses, states = run(tmp_path, True, **config)
    expected_losses, expected_states = run(tmp_path, False, **config)
    assert losses == expected_losses
    assert_same_states(states, expected_states)


@on_gpu
@pytest.mark.parametrize("dtype, update", [("fp32", "backward"), ("bf16", "deferred"), ("bf16", "backward"), ("fp16", "deferred")])
def test_on_a_gpu_losses_and_states_are_those_of_the_ordinary_loop(dtype, update, deterministic, tmp_path):
    config = {"device": "cuda", "dtype": dtype, "update": update, "make": lambda: Chain(512), "chunk_mib": 1 / 4, **NVME}
    losses, states = run(tmp_path, True, **config)
    expected_losses, expected_states = run(tmp_path, False, **config)
    assert losses == expected_losses
    assert_same_states(states, expected_states)


@pytest.mark.slow
def test_clipping_in_fp16_has_the_bits_of_the_ordinary_loop(tmp_path):
    options = {"max_grad_norm": 0.1, "loss_scale": LossScale(initial=256.0)}
    found = [run(tmp_path, by_layer, dtype="fp16", options=options, **NVME) for by_layer in (True, False)]
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])


@pytest.mark.long
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_eight_micro_batches_read_14_bytes_a_parameter(update, tmp_path):
    """The ordinary loop reads 42 bytes per parameter and step."""
    make = lambda: Chain(hidden=256, num_blocks=24)  # 96 chunks, more than the slots
    options = {"accumulation_steps": MICROS}
    read = {}
    for by_layer in (True, False):
        config = NVME | {"dtype": "bf16", "chunk_mib": 1 / 8, "update": update, "options": options}
        with training(make, tmp_path, **config) as (model, engine, optimizer):
            for step in range(4):
                if step == 2:
                    begin = engine.stats()["nvme_read_nbytes"]
                run_micro_batches(model, micro_batches(step), loss_of, by_layer)
                optimizer.step()
                optimizer.zero_grad()
            stats = engine.stats()
            read[by_layer] = (stats["nvme_read_nbytes"] - begin) / stats["num_parameters"] / 2
    print(f"{update}: {read[True]:.2f} bytes a parameter and step, the ordinary loop {read[False]:.2f}")
    assert 12.5 < read[True] < 14.0 * 1.03  # less than 14: weights that are still in slots after forward are not read again
    assert 36 < read[False] < 42.0 * 1.03


class Odd(Chain):
    """The first segment is frozen, one segment may block the gradient, and the last segment is a container."""

    def __init__(self):
        super().__init__(num_blocks=4)
        self.first.requires_grad_(False)
        self.last = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 50))
        self.cut = False

    def segments(self):
        middle = [*self.blocks[:3], Cut() if self.cut else nn.Identity(), *self.blocks[3:]]
        return [self.first, *(nn.Sequential(part) for part in middle), self.last]


class Cut(nn.Module):
    def forward(self, x):
        return x.detach()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("cut", [False, True])
def test_odd_segments_have_the_gradients_of_the_ordinary_loop(cut, dtype, tmp_path):
    def make():
        model = Odd()
        model.cut = cut
        return model

    config = {"dtype": dtype, "update": "deferred", "num_steps": 2, "make": make, **NVME}
    if dtype == "fp16":
        config["options"] = {"loss_scale": LossScale(initial=256.0)}
    losses, states = run(tmp_path, True, **config)
    expected_losses, expected_states = run(tmp_path, False, **config)
    assert losses == expected_losses
    assert_same_states(states, expected_states)


class Tied(Chain):
    def __init__(self):
        super().__init__()
        self.last.weight = self.first.weight


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["deferred", "auto"])
@pytest.mark.parametrize("make", [pytest.param(Chain, marks=LONG), Tied])
@pytest.mark.parametrize(
    "order", [(0, 1, 0, 1), pytest.param((1, 0, 0, 1), marks=LONG), pytest.param((0, 0, 1, 1), marks=LONG)], ids=str
)
def test_layer_wise_and_ordinary_steps_may_alternate(order, make, update, tmp_path):
    with training(make, tmp_path, options={"accumulation_steps": MICROS}, update=update, **NVME) as (model, engine, optimizer):
        with training(make, tmp_path / "other", options={"accumulation_steps": MICROS}, param_tier="host", optimizer_state_tier="host") as other:
            for step, by_layer in enumerate(order):
                for net, adam in ((model, optimizer), (other[0], other[2])):
                    run_micro_batches(net, micro_batches(step), loss_of, by_layer and net is model)
                    adam.step()
                    adam.zero_grad()
            for ours, theirs in zip(model.parameters(), other[0].parameters(), strict=True):
                torch.testing.assert_close(engine.read_state(ours)["weight"], other[1].read_state(theirs)["weight"], rtol=1e-5, atol=1e-6)
