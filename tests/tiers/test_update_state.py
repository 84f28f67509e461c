"""The life of an update, see [Note: life of an update] in update_state.py."""

import itertools

import pytest
from support.helpers import assert_moves, training
from support.models import inputs, mlp

from infinity.tiers.update_state import _UPDATE_MOVES, UpdateStage, UpdateState

IDLE, EXPECTED, READY, EARLY, PUT_OFF, ANNOUNCED = UpdateStage


@pytest.mark.parametrize("before, after", list(itertools.product(UpdateStage, repeat=2)))
def test_an_update_moves_only_as_its_table_allows(before, after):
    update = UpdateState()
    message = "an update is {after} after it was {before}"
    assert_moves(update, "stage", _UPDATE_MOVES, update.become, before, after, message)


@pytest.mark.parametrize(
    "when, home, life",
    [
        ("backward", "host", [EXPECTED, READY, EARLY, IDLE]),
        ("split", "nvme", [EXPECTED, READY, PUT_OFF, ANNOUNCED, IDLE]),
        ("deferred", "nvme", [ANNOUNCED, IDLE]),
        ("deferred", "host", []),  # step() begins it at once
    ],
)
def test_a_step_takes_an_update_through_its_stages(when, home, life, tmp_path, monkeypatch):
    moves = []
    become = UpdateState.become
    monkeypatch.setattr(UpdateState, "become", lambda self, stage: (become(self, stage), moves.append((self, stage))))
    update = "deferred" if when == "deferred" else "backward"
    with training(lambda: mlp(4), tmp_path, update=update, param_tier=home, optimizer_state_tier=home) as (model, engine, optimizer):
        engine.start()
        engine.records.is_crowded = lambda kind: True
        for _ in range(3):
            engine.cycle.updates.behind.update(engine.registry.chunks if when == "split" else ())
            model(inputs(model, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        for chunk in engine.registry.chunks:
            assert [stage for update, stage in moves if update is chunk.update] == 3 * life, chunk
            assert not chunk.update.is_running
