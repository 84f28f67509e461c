"""Sums of gradients in layer-wise steps where activations fill the device when the first sums come: NVMe is spared."""

import pytest
import torch
from helpers import ScriptedGauge, assert_same_states, run_micro_batches, states_of, training
from models import Chain

from infinity.engine.layerwise.micro_batch import MicroBatch
from infinity.engine.memory import activation_meter
from tests.engine.test_by_layer import loss_of

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_BLOCKS, STEPS = 6, 4
BLOCK_NBYTES = 4 * 2 * 128 * 256  # the sum of a block's two matrices
SEGMENT_NBYTES = BLOCK_NBYTES  # activations between two blocks, of all micro-batches
CONFIG = {"dtype": "bf16", "chunk_mib": 1 / 64}


@pytest.fixture
def gauge(monkeypatch):
    """A device that is full of activations after the forward passes. Each segment's backward pass frees a part."""
    gauge = ScriptedGauge(0)
    monkeypatch.setattr(activation_meter, "SLACK", 0.0)
    monkeypatch.setattr("infinity.engine.engine.gauge_of", lambda device: gauge)
    run, go_back = MicroBatch.run_segment, MicroBatch.backward

    def run_segment(self):
        run(self)
        gauge.activations += SEGMENT_NBYTES // self.step.num

    def backward(self, position):
        is_left = position == self.position
        go_back(self, position)
        gauge.activations -= is_left * (SEGMENT_NBYTES // self.step.num)

    monkeypatch.setattr(MicroBatch, "run_segment", run_segment)
    monkeypatch.setattr(MicroBatch, "backward", backward)
    return gauge


def micro_batches(step, num):
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(0, 50, (2, 8), generator=generator) for _ in range(2)) for _ in range(num)]


def train(directory, gauge, num, *, by_layer=True, **config):
    """Returns (losses, states, bytes written to NVMe in each step)."""
    options = {"accumulation_steps": num, "max_grad_norm": 1.0}
    losses, written, config = [], [], CONFIG | {"device_memory": gauge.capacity} | config
    with training(lambda: Chain(hidden=128, num_blocks=NUM_BLOCKS), directory, options=options, **config) as (model, engine, optimizer):
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


@pytest.mark.parametrize("host_memory, capacity", [("1500KiB", 2200), ("2200KiB", 2200), ("1500KiB", 2500)])
def test_more_micro_batches_write_hardly_more_in_the_first_step(host_memory, capacity, gauge, tmp_path):
    """The memory of activations is not known yet. In backward passes, the ops so far tell how much is left."""
    gauge.capacity = capacity << 10
    few, many = (train(tmp_path / str(num), gauge, num, host_memory=host_memory)[2] for num in (2, 8))
    assert many[0] <= 1.5 * few[0], (few, many)


@pytest.mark.parametrize("capacity", [1500, 1900])
def test_more_micro_batches_write_hardly_more_in_later_steps(capacity, gauge, tmp_path):
    """The first sums have places in host memory, and the last sums have those of activations. A few sums have neither."""
    gauge.capacity = capacity << 10
    few, many = (train(tmp_path / str(num), gauge, num, host_memory="1500KiB")[2] for num in (2, 8))
    assert max(many[1:]) <= 1.5 * min(few[1:]), (few, many)


@pytest.mark.parametrize("capacity", [1500, 1900, 2500])
def test_results_are_those_of_the_ordinary_loop(capacity, gauge, tmp_path):
    gauge.capacity = capacity << 10
    losses, states, _ = train(tmp_path / "loop", gauge, 4, by_layer=False, host_memory="1500KiB")
    found, found_states, _ = train(tmp_path / "layer", gauge, 4, host_memory="1500KiB")
    assert found == losses
    assert_same_states(found_states, states)
