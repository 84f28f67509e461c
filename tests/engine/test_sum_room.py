"""Sums of gradients in layer-wise steps on a device with little room: micro-batches add up there, not on NVMe."""

import pytest
import torch
from helpers import NVME, assert_same_states, run_micro_batches, states_of, training
from models import Chain

from infinity.sizes import parse_bytes
from infinity.tiers.gradients import Gradients
from tests.engine.test_by_layer import loss_of

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
BLOCK_NBYTES = 4 * 2 * 128 * 256  # the sum of a block's two matrices
WITHOUT_PLACE = NVME | {"dtype": "bf16", "host_memory": "700KiB", "chunk_mib": 1 / 64}  # for most gradients


def wide():
    return Chain(hidden=128, num_blocks=6)


def micro_batches(step, num):
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(0, 50, (2, 8), generator=generator) for _ in range(2)) for _ in range(num)]


def train(directory, device_memory, num, *, by_layer=True):
    """Returns (losses, states, bytes from the device to the host in each step, bytes written to NVMe in each step)."""
    options = {"accumulation_steps": num, "max_grad_norm": 1.0}
    losses, sent, written = [], [], []
    with training(wide, directory, options=options, device_memory=device_memory, **WITHOUT_PLACE) as (model, engine, optimizer):
        for step in range(STEPS):
            links = engine.stats()["links"]
            losses += run_micro_batches(model, micro_batches(step, num), loss_of, by_layer)
            optimizer.step()
            optimizer.zero_grad()
            for chunk in engine.registry.chunks:
                engine.updater.finish(chunk)
            for link, found in (("d2h", sent), ("nvme_write", written)):
                found.append(engine.stats()["links"][link]["nbytes"] - links[link]["nbytes"])
        return losses, states_of(engine, model), sent, written


@pytest.mark.parametrize("device_memory", ["700KiB", "1MiB", "2MiB"])
def test_more_micro_batches_move_hardly_more_bytes(device_memory, tmp_path):
    """Each sum leaves once. Where the room ends, one segment of six may lack some."""
    _, _, few, few_written = train(tmp_path / "few", device_memory, 2)
    _, _, many, many_written = train(tmp_path / "many", device_memory, 8)
    for index in range(STEPS):
        assert few[index] <= many[index] <= few[index] + 8 * BLOCK_NBYTES // 2
        assert many_written[index] <= 1.15 * few_written[index]


def test_sums_never_take_more_than_their_room(monkeypatch, tmp_path):
    """With each gradient that arrives, the device bytes of the engine stay within its memory."""
    most = []
    keep = Gradients._keep

    def check(self, *args):
        keep(self, *args)
        most.append(self.tier.held_nbytes)

    monkeypatch.setattr(Gradients, "_keep", check)
    for device_memory in ("300KiB", "500KiB", "700KiB", "1MiB"):
        most.clear()
        train(tmp_path / device_memory, device_memory, 4)
        assert 0 < max(most) <= parse_bytes(device_memory)


@pytest.mark.parametrize("device_memory", ["300KiB", "500KiB", "1MiB"])
def test_results_are_those_of_the_ordinary_loop(device_memory, tmp_path):
    losses, states, _, _ = train(tmp_path / "loop", device_memory, 4, by_layer=False)
    found, found_states, _, _ = train(tmp_path / "layer", device_memory, 4)
    assert found == losses
    assert_same_states(found_states, states)
