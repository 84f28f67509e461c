"""The phases of a step and the damage of an error, see [Note: phases of a step] in step_state.py."""

import itertools

import pytest
from support.helpers import assert_moves, training
from support.models import inputs, loss_of, mlp

from infinity.engine.steps.step_state import _DAMAGE_MOVES, _STEP_MOVES, Damage, StepPhase, StepState
from infinity.errors import UsageError
from infinity.tiers.route_position import Course

EMPTY, PASSING, EXPECTING, RECEIVING, LAYERWISE, BETWEEN, CLOSED = StepPhase


@pytest.fixture
def state():
    return StepState(Course())


@pytest.mark.parametrize("before, after", list(itertools.product(StepPhase, repeat=2)))
def test_a_step_changes_its_phase_only_as_its_table_allows(before, after, state):
    assert_moves(state, "phase", _STEP_MOVES, state.become, before, after, "a step is {after} after it was {before}")
    if (before, after) in _STEP_MOVES:
        assert state._course.in_backward is (after in (PASSING, EXPECTING, RECEIVING, LAYERWISE))


@pytest.mark.parametrize("before, after", list(itertools.product(Damage, repeat=2)))
def test_damage_changes_only_as_its_table_allows(before, after, state):
    assert_moves(state, "damage", _DAMAGE_MOVES, state.become_damaged, before, after, "damage: {after} after {before}")


@pytest.mark.parametrize("begun_in", [EMPTY, BETWEEN])
@pytest.mark.parametrize("has_updated, damage", [(False, Damage.GRADIENTS), (True, Damage.WEIGHTS)])
def test_a_pass_that_raises_sets_the_damage(begun_in, has_updated, damage, state):
    state.phase = begun_in
    state.become(RECEIVING)
    state.fail_pass(has_updated=has_updated)
    assert (state.phase, state.damage) == (begun_in, damage)
    state.forget_gradients()
    assert (state.phase, state.damage) == (EMPTY, Damage.NONE if damage is Damage.GRADIENTS else damage)
    state.begin_load()
    state.begin_load()
    state.become(PASSING)
    state.fail_pass(has_updated=False)
    assert state.damage is Damage.RECORDS
    state.end_load()
    assert state.damage is Damage.NONE


def test_passes_and_steps_are_counted(state):
    for phase in (EXPECTING, LAYERWISE):
        state.become(phase)
        state.receive()
        assert state.has_gradients and state.in_backward
        state.end_pass()
        assert state.count_backward() == state.num_backwards - 1
    assert state.num_backwards == 2
    state.end_step()
    assert (state.phase, state.num_backwards, state.num_steps) == (EMPTY, 0, 1)
    state.close()
    state.close()
    assert state.is_closed


def test_a_training_loop_takes_each_step_through_its_phases(tmp_path, monkeypatch):
    phases = []
    become = StepState.become
    monkeypatch.setattr(StepState, "become", lambda self, phase: (become(self, phase), phases.append(phase)))
    with training(mlp, tmp_path, options={"accumulation_steps": 2}) as (model, engine, optimizer):
        for _ in range(2):
            for number in range(2):
                loss_of(model(inputs(model, number))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert phases == 2 * (2 * [EXPECTING, RECEIVING, BETWEEN] + [EMPTY]) + [CLOSED]


def test_a_backward_pass_whose_end_raises_counts_as_failed(tmp_path, monkeypatch):
    with training(mlp, tmp_path) as (model, engine, optimizer):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(engine.gradients, "hurry", lambda: 1 / 0)
            loss_of(model(inputs(model, 0))).backward()
        with pytest.raises(UsageError, match=r"step\(\) after a backward pass that raised; call zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model(inputs(model, 0))).backward()
        optimizer.step()
        assert engine.cycle.state.num_steps == 1
