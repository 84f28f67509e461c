"""States of the next updates are read in the backward pass, if updates follow step(). Not a bit changes, whatever comes between."""

import time

import pytest
import torch
from support.helpers import assert_same_states, states_of, training
from support.models import tiny_gpt, tokens

import infinity
from infinity.plan.record import GRADIENTS, STATES
from infinity.plan.slots import HostState, StatesAhead

ON_NVME = {"param_tier": "nvme", "optimizer_state_tier": "nvme"}
OPTIONS = {"max_grad_norm": 0.5}


def train(model, optimizer, steps=4, between=lambda step: None, num_micro=1):
    for step in range(steps):
        for micro in range(num_micro):
            (model(*tokens(step, micro)) / num_micro).backward()
        between(step)
        optimizer.step()
        optimizer.zero_grad()


def read(engine):
    """Chunks whose states are in slots and clean."""
    cache = engine.records.caches[STATES]
    return {index for index, entry in cache.entries.items() if entry.state is HostState.CLEAN}


@pytest.fixture
def expected(tmp_path):
    with training(tiny_gpt, tmp_path / "expected", options=OPTIONS, param_tier="host", optimizer_state_tier="host") as (model, engine, optimizer):
        train(model, optimizer)
        return states_of(engine, model)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("residency", ["auto", "none"])
def test_the_backward_pass_reads_the_states_of_the_first_updates(residency, expected, tmp_path):
    found = []

    def between(step):
        engine.records.flush()
        time.sleep(0.2)
        found.append(read(engine))

    with training(tiny_gpt, tmp_path, options=OPTIONS, residency=residency, **ON_NVME) as (model, engine, optimizer):
        train(model, optimizer, between=between)
        assert_same_states(states_of(engine, model), expected)
        first = sorted((chunk for chunk in engine.registry.chunks if chunk.trainable), key=lambda chunk: chunk.span.index)
        assert found[-1] >= {chunk.index for chunk in first[:20]}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("delays", ["reads", "writes"])
@pytest.mark.parametrize("num_slots", [2, 5])
def test_few_slots_and_slow_drives_change_no_bit(num_slots, delays, expected, monkeypatch, tmp_path):
    monkeypatch.setattr("infinity.plan.host_memory.STATE_SLOTS", num_slots)
    monkeypatch.setattr("infinity.plan.host_memory._Sharing._add_record_slots", lambda sharing, left: None)
    with training(tiny_gpt, tmp_path, options=OPTIONS, **ON_NVME) as (model, engine, optimizer):
        assert engine.placement.slots[STATES] == num_slots
        if delays == "reads":
            engine.records.on_read = lambda: time.sleep(1e-3)
        else:
            finish = engine.records._finish_writes
            monkeypatch.setattr(engine.records, "_finish_writes", lambda *args: (time.sleep(2e-3), finish(*args)))
        train(model, optimizer)
        assert_same_states(states_of(engine, model), expected)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["evaluation", "load", "dropped gradients", "changed weight"])
def test_states_that_are_read_ahead_stay_true(what, tmp_path):
    """After the states are read, the program evaluates, loads a checkpoint, drops gradients or changes a weight."""

    def run(folder, **config):
        with training(tiny_gpt, folder, options=OPTIONS, **config) as (model, engine, optimizer):

            def between(step):
                if what == "evaluation":
                    with torch.no_grad():
                        model(*tokens(9))
                elif what == "dropped gradients" and step == 2:
                    optimizer.zero_grad()
                    model(*tokens(7)).backward()
                elif what == "changed weight" and step == 2:
                    with torch.no_grad(), infinity.gathered([first := next(model.parameters())]):
                        first.mul_(0.5)

            train(model, optimizer, between=between)
            if what == "load":
                infinity.save(folder / "saved", model, optimizer)
                train(model, optimizer, steps=1)
                model(*tokens(5)).backward()  # reads states ahead
                optimizer.zero_grad()
                infinity.load(folder / "saved", model, optimizer)
                train(model, optimizer, steps=2)
            return states_of(engine, model)

    assert_same_states(run(tmp_path / "a", **ON_NVME), run(tmp_path / "b", param_tier="host", optimizer_state_tier="host"))


@pytest.mark.long
@pytest.mark.parametrize("by_layer", [False, True])
def test_steps_of_several_micro_batches_read_ahead_too(by_layer, tmp_path):
    def run(folder, **config):
        with training(tiny_gpt, folder, options=OPTIONS | {"accumulation_steps": 3}, **config) as (model, engine, optimizer):
            for step in range(3):
                if by_layer:
                    infinity.accumulate(model, [tokens(step, micro) for micro in range(3)], lambda model, batch: model(*batch) / 3)
                else:
                    for micro in range(3):
                        (model(*tokens(step, micro)) / 3).backward()
                ahead.append(engine.cycle.updates._states_ahead is not None)
                optimizer.step()
                optimizer.zero_grad()
            return states_of(engine, model)

    ahead = []
    found = run(tmp_path / "a", **ON_NVME)
    assert ahead == [False, True, True], "in the first step, the order of the updates is unknown"
    assert_same_states(found, run(tmp_path / "b", param_tier="host", optimizer_state_tier="host"))


@pytest.mark.slow
def test_the_rest_of_host_memory_is_slots_if_updates_follow(tmp_path):
    slots = {}
    for update in ("deferred", "backward"):
        for host_memory in ("64MiB", "600KiB"):
            with training(tiny_gpt, tmp_path, update=update, host_memory=host_memory, **ON_NVME) as (_, engine, optimizer):
                num, placement = len(engine.registry.chunks), engine.placement
                slots[update, host_memory] = placement.slots[STATES]
                assert placement.host_nbytes <= (64 << 20 if host_memory == "64MiB" else 600 << 10)
                assert update == "backward" or placement.homes[GRADIENTS]
    assert slots["deferred", "64MiB"] == num > slots["deferred", "600KiB"] >= slots["backward", "64MiB"], slots


@pytest.mark.parametrize("told", [{"activation_tier": "host"}, {"options": {"accumulation_steps": 2, **OPTIONS}}], ids=str)
def test_host_memory_stays_for_activations(told, tmp_path):
    with training(tiny_gpt, tmp_path, **{"options": OPTIONS, "host_memory": "600KiB", **told}, **ON_NVME) as (_, engine, _):
        few = engine.placement.slots[STATES]
    with training(tiny_gpt, tmp_path, options=OPTIONS, host_memory="600KiB", **ON_NVME) as (_, engine, _):
        many = engine.placement.slots[STATES]
    assert few <= 12 < many


def test_no_states_are_read_ahead_without_waiting_updates(monkeypatch, tmp_path):
    monkeypatch.setattr(StatesAhead, "advance", lambda ahead: pytest.fail("the plan reads the states"))
    with training(tiny_gpt, tmp_path, **ON_NVME) as (model, _, optimizer):
        train(model, optimizer, steps=2)
