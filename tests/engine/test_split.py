"""The split update: some updates of a backward pass are put off until after step(). Any choice of these has the same bits.
No update is put off if its gradient has no place to wait."""

import itertools
import threading

import pytest
import torch
from support import helpers
from support.helpers import NVME, assert_same_states, run_micro_batches, states_of, training
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
    """The layers of `stack` in a list of blocks, which layer-wise accumulation needs."""

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
    """Simulate slow drives: `crowded` says for each update in turn whether drives are behind. Returns the list of chunks put off."""
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
    """Losses, states, and the chunks put off."""
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


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["ordinary", "accumulated", "by layer"])
def test_any_choice_of_updates_that_are_put_off_has_the_same_bits(kind, dtype, tmp_path):
    expected_losses, expected_states, put_off = run(tmp_path, kind, update="deferred", dtype=dtype)
    assert not put_off
    for crowded in ([False], [True], [True, False], [False, False, False, True]):
        losses, states, put_off = run(tmp_path, kind, crowded, update="backward", dtype=dtype)
        assert losses == expected_losses
        assert_same_states(states, expected_states, str(crowded))
        assert bool(put_off) == any(crowded)
        if crowded == [True]:
            assert len(set(put_off)) >= LAYERS / 2


@pytest.mark.few(1)
@pytest.mark.parametrize("changes", [{"residency": "auto", "host_memory": "700KiB"}, {"compression": "on"}, {"optimizer_state_dtype": "bf16"}], ids=str)
def test_updates_put_off_in_other_placements_have_the_same_bits(changes, tmp_path):
    config = {"dtype": "bf16"} | changes
    losses, states, _ = run(tmp_path, "ordinary", update="deferred", **config)
    found_losses, found_states, put_off = run(tmp_path, "ordinary", [True, False], update="backward", **config)
    assert put_off and losses == found_losses
    assert_same_states(found_states, states)


def test_updates_are_put_off_while_earlier_updates_hold_the_slots(tmp_path):
    """Updates that are blocked in their lane pin two thirds of the slots. step() announces the others, which begin when they are needed."""
    make = lambda: nn.Sequential(*stack(), *stack(), *stack())
    places = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "update": "backward"}  # each gradient has a place in host memory
    with training(make, tmp_path, **SIZES | places) as (model, engine, optimizer):
        goes_on = threading.Event()

        def step(number, settles=False):
            loss_of(model(inputs(number))).backward()
            if settles:
                engine.updater.drain()
                engine.records.flush()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(2):  # after these steps, the plan knows when gradients are complete
            step(number, settles=True)  # otherwise writes of a slow drive at the end of step() would mark the next updates
        engine.flush()
        chunks, num_slots = engine.registry.chunks, engine.placement.slots[STATES]
        assert num_slots < len(chunks) and engine.placement.slots[GRADIENTS] == 0
        before = [chunk.num_changes for chunk in chunks]
        put_off = note_put_off(engine)
        engine.updater.lane.on_job = goes_on.wait
        begin, cache, lock = engine.updater.begin, engine.records.caches[STATES], engine.records.lock

        def begin_with_slot(chunk, *arguments, **options):
            """The thread that grants slots may be late on a busy machine."""
            begin(chunk, *arguments, **options)
            with lock:
                while not (cache.is_crowded() or ((entry := cache.find(chunk)) and entry.pins)):
                    lock.wait(0.01)

        engine.updater.begin = begin_with_slot
        step(2)
        goes_on.set()
        assert put_off[-1] == 0 and put_off == sorted(put_off, reverse=True)  # in the order of the backward pass
        assert 2 / 3 * num_slots <= len(chunks) - len(put_off) <= 5 / 3 * num_slots
        step(3)
        engine.flush()
        assert [chunk.num_changes - number for chunk, number in zip(chunks, before)] == [2] * len(chunks)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_more, puts_off", [(0, False), (8, True)])
def test_no_update_is_put_off_with_only_the_fewest_gradient_slots(num_more, puts_off, tmp_path):
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


@pytest.mark.few(1)
@pytest.mark.parametrize("crowded", [[True], [False, True]], ids=str)
def test_refusals_do_not_depend_on_the_updates_that_are_put_off(crowded, tmp_path):
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


def test_loading_after_a_failed_backward_drops_updates_that_were_put_off(tmp_path):
    """The gradient that waited is dropped. Otherwise the next gradient would be added."""

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


def test_old_weights_leave_the_device_after_step_if_updates_are_put_off(tmp_path):
    """A pass that leaves its plan prefetches weights that the plan uses later. Spans that stay on the device must not keep old weights."""

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
