"""The split update: of the updates of a backward pass some follow step(), whichever these are with the same bits, and none whose gradient has
no place to wait in."""

import itertools
import threading

import helpers
import pytest
import torch
from helpers import NVME, assert_same_states, run_micro_batches, states_of, training
from torch import nn

import infinity
from infinity.errors import UsageError
from infinity.plan.host_memory import MIN_GRADIENT_SLOTS
from infinity.plan.record import GRADIENTS, STATES

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, MICROS = 10, 3
SIZES = {"chunk_mib": 1 / 16, "host_memory": "64MiB", "device_memory": "2MiB"}


def stack():
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(LAYERS)))


class Blocks(nn.Module):
    """As `stack`, of blocks that accumulation by layer finds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(step, micro=0):
    return torch.randn(4, 128, generator=torch.Generator().manual_seed(100 * step + micro))


def loss_of(output, target=None):
    return output.float().square().mean()


def split(engine, crowded):
    """Have drives be behind, as `crowded` says of one update after the other. Returns the indices of the chunks that are put off."""
    engine.start()
    answers = itertools.cycle(crowded)
    engine.records.is_crowded = lambda kind: next(answers)
    return note_put_off(engine)


def note_put_off(engine):
    found, put_off = [], engine.updater.put_off

    def noted(chunk):
        found.append(chunk.index)
        put_off(chunk)

    engine.updater.put_off = noted
    return found


def run(directory, kind, crowded=(False,), *, steps=5, **config):
    """Losses, states and the chunks put off."""
    options = {"accumulation_steps": MICROS} if kind != "ordinary" else {}
    losses = []
    with training(Blocks if kind != "ordinary" else stack, directory, options=options, **SIZES | NVME | config) as (model, engine, optimizer):
        put_off = split(engine, crowded)
        for step in range(steps):
            batches = [(inputs(step, micro).to(engine.registry.spans[0].dtype), None) for micro in range(MICROS if options else 1)]
            losses += run_micro_batches(model, batches, loss_of, kind == "by layer")
            optimizer.step()
            optimizer.zero_grad()
        return losses, states_of(engine, model), put_off


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["ordinary", "accumulated", "by layer"])
def test_whichever_updates_are_put_off_the_bits_are_the_same(kind, dtype, tmp_path):
    expected_losses, expected_states, put_off = run(tmp_path, kind, update="deferred", dtype=dtype)
    assert not put_off
    for crowded in ([False], [True], [True, False], [False, False, False, True]):
        losses, states, put_off = run(tmp_path, kind, crowded, update="backward", dtype=dtype)
        assert losses == expected_losses
        assert_same_states(states, expected_states, str(crowded))
        assert bool(put_off) == any(crowded)
        if crowded == [True]:
            assert len(set(put_off)) >= LAYERS / 2


@pytest.mark.parametrize("changes", [{"residency": "auto", "host_memory": "700KiB"}, {"compression": "on"}, {"optimizer_state_dtype": "bf16"}], ids=str)
def test_put_off_updates_of_other_placements_and_formats_have_the_same_bits(changes, tmp_path):
    config = {"dtype": "bf16"} | changes
    losses, states, _ = run(tmp_path, "ordinary", update="deferred", **config)
    found_losses, found_states, put_off = run(tmp_path, "ordinary", [True, False], update="backward", **config)
    assert put_off and losses == found_losses
    assert_same_states(found_states, states)


def test_updates_that_are_behind_let_those_that_follow_wait_for_the_next_forward_pass(tmp_path):
    """Held up in their lane, those that have begun pin two thirds of the slots: the others are announced by step(), and begin as they are needed."""
    make = lambda: nn.Sequential(*stack(), *stack(), *stack())
    places = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "update": "backward"}  # gradients find places of their own
    with training(make, tmp_path, **SIZES | places) as (model, engine, optimizer):
        goes_on = threading.Event()

        def step(number, settles=False):
            loss_of(model(inputs(number))).backward()
            if settles:
                engine.updater.drain()
                engine.records.flush()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(2):  # now the plan knows when gradients are complete
            step(number, settles=True)  # what a slow drive has not written as step() ends would mark the next updates
        engine.flush()
        chunks, num_slots = engine.registry.chunks, engine.placement.slots[STATES]
        assert num_slots < len(chunks) and engine.placement.slots[GRADIENTS] == 0
        before = [chunk.num_changes for chunk in chunks]
        put_off = note_put_off(engine)
        engine.updater.lane.on_job = goes_on.wait
        step(2)
        goes_on.set()
        assert put_off[-1] == 0 and put_off == sorted(put_off, reverse=True)  # as the backward pass comes to them
        assert 2 / 3 * num_slots <= len(chunks) - len(put_off) <= 5 / 3 * num_slots
        step(3)
        engine.flush()
        assert [chunk.num_changes - number for chunk, number in zip(chunks, before)] == [2] * len(chunks)


@pytest.mark.parametrize("num_more, puts_off", [(0, False), (8, True)])
def test_no_update_is_put_off_for_whose_gradient_there_are_only_the_slots_that_others_pass_through(num_more, puts_off, tmp_path):
    config = NVME | {"chunk_mib": 1 / 16, "update": "backward"}
    config["host_memory"] = helpers.least_host_memory(stack, tmp_path, **config) + num_more * (256 << 10)
    with training(stack, tmp_path, **config) as (model, engine, optimizer):
        put_off = split(engine, [True])
        assert (engine.placement.slots[GRADIENTS] > MIN_GRADIENT_SLOTS) == puts_off
        for step in range(4):
            loss_of(model(inputs(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert bool(put_off) == puts_off


@pytest.mark.parametrize("crowded", [[True], [False, True]], ids=str)
def test_what_is_refused_does_not_depend_on_what_was_put_off(crowded, tmp_path):
    with training(stack, tmp_path, update="backward", **SIZES | NVME) as (model, engine, optimizer):
        put_off = split(engine, crowded)
        for step in range(2):
            loss_of(model(inputs(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model(inputs(2))).backward()
        assert put_off
        with pytest.raises(UsageError, match="between a backward pass that has begun to update and its step"):
            model(inputs(3))
        with pytest.raises(UsageError, match="between a backward pass that has begun to update and its step"):
            optimizer.zero_grad()
        optimizer.step()


def test_after_a_backward_pass_that_failed_a_checkpoint_is_loaded_and_nothing_put_off_is_left(tmp_path):
    """The gradient that waited is forgotten: it would be added to the next one."""

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = stack()
            self.fails = False

        def forward(self, x):
            first = self.layers[0](x)
            if self.fails:
                first.register_hook(lambda grad: (_ for _ in ()).throw(RuntimeError("on purpose")))
            return self.layers[1:](first)

    with training(Failing, tmp_path, update="backward", **SIZES | NVME) as (model, engine, optimizer):
        put_off = split(engine, [True, False])

        def train(steps):
            for step in steps:
                loss_of(model(inputs(step))).backward()
                optimizer.step()
                optimizer.zero_grad()

        train(range(3))
        infinity.save(tmp_path / "saved", model, optimizer)
        train(range(3, 5))
        engine.flush()
        expected = states_of(engine, model)
        infinity.load(tmp_path / "saved", model, optimizer)
        train(range(3, 4))
        put_off.clear()
        model.fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            loss_of(model(inputs(9))).backward()
        assert put_off
        model.fails = False
        with pytest.raises(UsageError, match="failed after some chunks had been updated"):
            optimizer.step()
        infinity.load(tmp_path / "saved", model, optimizer)
        train(range(3, 5))
        assert_same_states(states_of(engine, model), expected)


def test_old_weights_that_come_to_the_device_once_their_update_is_put_off_are_gone_after_step(tmp_path):
    """A pass that leaves its plan fetches ahead what the plan uses later. Spans that stay on the device would still have it in the next one."""

    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.order = nn.ModuleList(nn.Linear(128, 128) for _ in range(4)), ()

        def forward(self, x):
            for index in self.order:
                x = torch.tanh(self.layers[index](x))
            return x

    def states(update, crowded):
        places = {"param_tier": "device", "optimizer_state_tier": "nvme", "residency": "none", "update": update}
        with training(Ordered, tmp_path / update, **SIZES | places) as (model, engine, optimizer):
            put_off = split(engine, crowded)
            for step, model.order in enumerate([(1, 0, 1, 3), (1, 0, 1, 3), (2, 2, 3, 0), (2, 2, 3, 0), (1, 0, 1, 3)]):
                loss_of(model(inputs(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            engine.flush()
            return states_of(engine, model), put_off

    expected, _ = states("deferred", [False])
    found, put_off = states("backward", [True])
    assert put_off
    assert_same_states(found, expected)
