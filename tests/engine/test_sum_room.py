"""Sums of gradients in layer-wise steps where activations fill the device when the first sums come: few gradients go to NVMe."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.helpers import ScriptedGauge, assert_same_states, run_micro_batches, states_of, training
from support.models import Block, Chain
from torch import nn

from infinity.engine.layerwise.micro_batch import MicroBatch
from infinity.engine.memory import activation_meter, allocation_trial
from support.micro_batches import loss_of

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_BLOCKS, STEPS = 6, 4
BLOCK_NBYTES = 4 * 2 * 128 * 256  # the sum of a block's two matrices
CONFIG = {"dtype": "bf16", "chunk_mib": 1 / 64}


@pytest.fixture
def gauge(monkeypatch):
    """A device that is full of activations after the forward passes. Each segment's backward pass frees a part.

    segment_nbytes: activations between two blocks, of all micro-batches.
    """
    gauge = ScriptedGauge(0)
    gauge.segment_nbytes = BLOCK_NBYTES
    monkeypatch.setattr(activation_meter, "SLACK", 0.0)
    monkeypatch.setattr(allocation_trial, "now", lambda: 0.0)  # no division is undone because steps of a busy machine take longer
    monkeypatch.setattr("infinity.engine.engine.gauge_of", lambda device: gauge)
    run, go_back = MicroBatch.run_segment, MicroBatch.backward

    def run_segment(self):
        run(self)
        gauge.activations += gauge.segment_nbytes // self.step.num

    def backward(self, position):
        is_left = position == self.position
        go_back(self, position)
        gauge.activations -= is_left * (gauge.segment_nbytes // self.step.num)

    monkeypatch.setattr(MicroBatch, "run_segment", run_segment)
    monkeypatch.setattr(MicroBatch, "backward", backward)
    return gauge


def micro_batches(step, num):
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(0, 50, (2, 8), generator=generator) for _ in range(2)) for _ in range(num)]


def chain(num_blocks=NUM_BLOCKS):
    return Chain(hidden=128, num_blocks=num_blocks)


class Tied(nn.Module):
    """The head is the embedding, whose gradient comes last. [B, S] tokens -> [B, S, 1024]."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(1024, 128)
        self.blocks = nn.ModuleList(Block(128) for _ in range(NUM_BLOCKS))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.first.weight)


def train(directory, gauge, num, *, make=chain, by_layer=True, **config):
    """Returns (losses, states, bytes written to NVMe in each step)."""
    options = {"accumulation_steps": num, "max_grad_norm": 1.0}
    losses, written, config = [], [], CONFIG | {"device_memory": gauge.capacity} | config
    with training(make, directory, options=options, **config) as (model, engine, optimizer):
        gauge.tier = engine.tier
        for step in range(STEPS):
            before = engine.stats()["links"]["nvme_write"]["nbytes"]
            losses += run_micro_batches(model, micro_batches(step, num), loss_of, by_layer)
            optimizer.step()
            optimizer.zero_grad()
            for chunk in engine.registry.chunks:
                engine.updater.finish(chunk)
            written.append(engine.stats()["links"]["nvme_write"]["nbytes"] - before)
            assert gauge.activations == 0
        return losses, states_of(engine, model), written


@pytest.mark.long
@pytest.mark.parametrize("capacity", [2200, 2500])
def test_more_micro_batches_write_hardly_more_in_the_first_step(capacity, gauge, tmp_path):
    """In backward passes, a forecast from the ops so far tells what activations take."""
    gauge.capacity = capacity << 10
    few, many = (train(tmp_path / str(num), gauge, num, host_memory="1500KiB")[2] for num in (2, 8))
    assert many[0] <= 1.5 * few[0], (few, many)


@pytest.mark.long
def test_more_micro_batches_write_hardly_more_in_later_steps(gauge, tmp_path):
    """The first sums have places in host memory. The last sums use memory that activations have freed. A few sums go to NVMe."""
    gauge.capacity = 1500 << 10
    few, many = (train(tmp_path / str(num), gauge, num, host_memory="1500KiB")[2] for num in (2, 8))
    assert max(many[1:]) <= 1.5 * min(few[1:]), (few, many)


@pytest.mark.long
def test_the_sum_of_a_tied_weight_uses_memory_that_activations_have_freed(gauge, tmp_path):
    gauge.capacity = 2500 << 10
    config = {"make": Tied, "host_memory": "2200KiB", "chunk_mib": 1 / 16}
    few, many = (train(tmp_path / str(num), gauge, num, **config)[2] for num in (2, 8))
    assert max(many[1:]) <= 1.2 * min(few[1:]), (few, many)


@pytest.mark.long
@pytest.mark.parametrize("capacity", [1500, 1900, 2500])
@pytest.mark.parametrize("make", [chain, Tied])
def test_results_are_those_of_the_ordinary_loop(make, capacity, gauge, tmp_path):
    gauge.capacity = capacity << 10
    losses, states, _ = train(tmp_path / "loop", gauge, 4, make=make, by_layer=False, host_memory="1500KiB")
    found, found_states, _ = train(tmp_path / "layer", gauge, 4, make=make, host_memory="1500KiB")
    assert found == losses
    assert_same_states(found_states, states)


@pytest.fixture
def large_first_segment(gauge, monkeypatch):
    """Few activations between blocks. Ops of the first segment take more memory, and fail if the device has too little. forward, backward: their
    bytes.
    """
    gauge.capacity, gauge.segment_nbytes = 2500 << 10, BLOCK_NBYTES // 4
    sizes = SimpleNamespace(forward=0, backward=0, num_failures=0)
    run, go_back = MicroBatch.run_segment, MicroBatch.backward

    def allocate(nbytes):
        if gauge.tier.held_nbytes + gauge.activations + nbytes > gauge.capacity:
            gauge.failures += 1
            sizes.num_failures += 1
            raise torch.OutOfMemoryError
        gauge.activations += nbytes
        if gauge.tier.before_change is not None:
            gauge.tier.before_change()
        gauge.activations -= nbytes

    def run_segment(self):
        if self.position == 0:
            allocate(sizes.forward)
        run(self)

    def backward(self, position):
        if position == self.position == 0:
            allocate(sizes.backward)
        go_back(self, position)

    monkeypatch.setattr(MicroBatch, "run_segment", run_segment)
    monkeypatch.setattr(MicroBatch, "backward", backward)
    monkeypatch.setattr(activation_meter, "SLACK", 0.05)
    return sizes


@pytest.mark.long
def test_sums_leave_room_for_a_large_first_segment(gauge, large_first_segment, tmp_path):
    large_first_segment.forward = large_first_segment.backward = 600 << 10
    train(tmp_path, gauge, 8, make=lambda: chain(8), host_memory="1500KiB")
    assert large_first_segment.num_failures == 0


def test_a_step_that_lacked_room_for_the_first_segment_can_be_repeated(gauge, large_first_segment, tmp_path):
    """The backward pass takes far more than the forward pass. After the failure, no forecast counts any more."""
    large_first_segment.forward, large_first_segment.backward = 0, 600 << 10
    config = CONFIG | {"options": {"accumulation_steps": 8, "max_grad_norm": 1.0}, "host_memory": "1500KiB", "device_memory": gauge.capacity}
    with training(lambda: chain(8), tmp_path, **config) as (model, engine, optimizer):
        gauge.tier = engine.tier
        with pytest.raises(torch.OutOfMemoryError):
            run_micro_batches(model, micro_batches(0, 8), loss_of, True)
        gauge.activations = 0
        optimizer.zero_grad()
        run_micro_batches(model, micro_batches(0, 8), loss_of, True)
        optimizer.step()
    assert large_first_segment.num_failures == 1
