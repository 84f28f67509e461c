"""Gradients whose only place is the device, because neither host memory nor NVMe has room for them: no bit depends on it."""

import pytest
import torch
import torch.nn.functional as F
from support.helpers import assert_same_states, run_micro_batches, states_of, training
from support.models import Chain, tiny_gpt, tokens

from infinity.engine import build
from infinity.plan import host_memory
from infinity.plan import placement as planner
from infinity.plan.record import GRADIENTS, STATES
from infinity.plan.tiers import DEVICE
from infinity.system.events import Events

pytestmark = pytest.mark.usefixtures("one_thread")

IN_HOST = {"param_tier": "host", "optimizer_state_tier": "host"}


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch):
    """The budgets of these tests are kilobytes."""
    monkeypatch.setattr(planner, "UNDER_WAY_NBYTES", 0)


@pytest.fixture
def small_drive(monkeypatch):
    """A function that limits the free bytes on every drive."""
    return lambda nbytes: monkeypatch.setattr(build, "room_nbytes", lambda paths: nbytes)


def of_gpt(step, num_micro):
    return [tokens(step, micro) for micro in range(num_micro)]


def of_chain(step, num_micro):
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(50, (3, 7), generator=generator) for _ in range(2)) for _ in range(num_micro)]


class Loop:
    """Runs steps in one of the ways: the ordinary loop, or layer-wise steps of a chain."""

    def __init__(self, num_micro, by_layer):
        self.num_micro, self.by_layer = num_micro, by_layer
        self.make = Chain if by_layer else tiny_gpt

    def step(self, model, optimizer, step):
        if self.by_layer:
            loss_of = lambda output, target: F.cross_entropy(output.float().flatten(0, 1), target.flatten()) / self.num_micro
            losses = run_micro_batches(model, of_chain(step, self.num_micro), loss_of, True)
        else:
            losses = []
            for x, y in of_gpt(step, self.num_micro):
                loss = model(x, y) / self.num_micro
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    def run(self, directory, **config):
        """(losses, states, homes, statistics) after four steps. Asserts that no gradient waits after its update."""
        with training(self.make, directory, **config) as (model, engine, optimizer):
            losses = [loss for step in range(4) for loss in self.step(model, optimizer, step)]
            for chunk in engine.registry.chunks:
                engine.updater.finish(chunk)
            assert engine.tier.waiting_nbytes == 0
            return losses, states_of(engine, model), engine.placement.homes, engine.stats()


WAYS = {
    "clip": (Loop(1, False), {"max_grad_norm": 0.5}, "auto"),
    "deferred": (Loop(1, False), {}, "deferred"),
    "loop": (Loop(3, False), {"accumulation_steps": 3}, "auto"),
    "loop clip": (Loop(3, False), {"accumulation_steps": 3, "max_grad_norm": 0.5}, "auto"),
    "by layer": (Loop(3, True), {"accumulation_steps": 3}, "auto"),
    "by layer clip": (Loop(3, True), {"accumulation_steps": 3, "max_grad_norm": 0.5}, "deferred"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("device_kib", [384])
def test_gradients_with_no_other_place_have_the_bits_of_host_memory(device_kib, dtype, way, small_drive, tmp_path):
    loop, options, update = WAYS[way]
    config = {"dtype": dtype, "options": options, "update": update}
    expected = loop.run(tmp_path, **config, **IN_HOST)
    crowded = config | {"device_memory": f"{device_kib}KiB", "host_memory": "96KiB"}
    with training(loop.make, tmp_path, **crowded) as (_, engine, _):
        ample = engine.placement
    counts = []
    for lacking in (1, 2):  # fewer than the slots, see below
        small_drive(ample.nvme_nbytes - lacking * max(ample.sizes[GRADIENTS]))
        losses, found, homes, stats = loop.run(tmp_path, **crowded)
        counts.append(sum(gradient == DEVICE != states for gradient, states in zip(homes[GRADIENTS], homes[STATES])))
        assert losses == expected[0]
        assert_same_states(found, expected[1], f"{counts[-1]} gradients")
        assert stats["peak_device_nbytes"] <= device_kib << 10
    assert counts == [1, 2]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["loop", "by layer"])
def test_updates_proceed_if_gradients_without_extents_fill_all_slots(way, small_drive, monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "GRADIENT_SLOTS", 3)
    monkeypatch.setattr(host_memory, "WEIGHT_SLOTS", 3)
    monkeypatch.setattr(host_memory, "STATE_SLOTS", 3)
    loop, options, update = WAYS[way]
    config = {"options": options, "update": update}
    expected = loop.run(tmp_path, **config, **IN_HOST)
    crowded = config | {"device_memory": "256KiB" if way == "loop" else "384KiB", "host_memory": "96KiB"}
    with training(loop.make, tmp_path, **crowded) as (_, engine, _):
        placement = engine.placement
    small_drive(placement.nvme_nbytes - int(0.3 * sum(placement.sizes[GRADIENTS])))
    assert_same_states(loop.run(tmp_path, **crowded)[1], expected[1])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("device_kib", [256, 384])
def test_gradients_on_the_device_never_move_to_nvme(device_kib, small_drive, monkeypatch, tmp_path):
    for name in ("GRADIENT_SLOTS", "WEIGHT_SLOTS", "STATE_SLOTS"):
        monkeypatch.setattr(host_memory, name, 3)
    loop, options, update = WAYS["clip"]
    crowded = {"options": options, "update": update, "device_memory": f"{device_kib}KiB", "host_memory": "96KiB"}
    with training(loop.make, tmp_path, **crowded) as (_, engine, _):
        placement = engine.placement
    small_drive(placement.nvme_nbytes - int(0.5 * sum(placement.sizes[GRADIENTS])))
    moves, moved = [], Events.moved

    def noted(self, link, what, *args, **options):
        moves.append((link, what))
        return moved(self, link, what, *args, **options)

    monkeypatch.setattr(Events, "moved", noted)
    with training(loop.make, tmp_path, **crowded) as (model, engine, optimizer):
        for step in range(5):
            if step == 2:
                moves.clear()  # the division of the device has been made
            loop.step(model, optimizer, step)
        chunks = [chunk for span in engine.device_budget.staying for chunk in engine.registry.chunks_in(engine.registry.spans[span])]
        assert {chunk.has_no_room_elsewhere for chunk in chunks} == {False, True}
    staying = {chunk.index for chunk in chunks}
    assert [(link, what) for link, what in moves if link == "nvme_write" and what[1] == GRADIENTS and what[0] in staying] == []
    assert any(link == "nvme_write" and what[1] == STATES for link, what in moves)
