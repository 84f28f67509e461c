"""Calls of a step run down the house, as house_calls.py sees them."""

import threading

import house_calls
import pytest
from test_house import room

from infinity.tiers.record_mover import RecordMover

MOST_FRAMES_OF_A_FETCH = 9


@pytest.fixture(scope="module")
def watch(tmp_path_factory):
    """One watched step, whose updates all run during backward however slow the drive is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("step"))
        patch.setattr(RecordMover, "is_crowded", lambda records, kind: False)
        return house_calls.watched_step()


def test_a_fetch_takes_nine_frames_from_hook_to_submitted_read(watch):
    stack = watch.deepest_fetch
    assert (room(stack[0]), room(stack[-1])) == ("engine", "system") and len(stack) <= MOST_FRAMES_OF_A_FETCH, stack
    assert not [name for name in stack if "<lambda>" in name or "<locals>" in name]  # no closures


def test_calls_of_a_step_go_down(watch):
    """But for what a lane was given to run, what a policy of plan was given to ask, and an optimizer, which calls its engine."""
    up = {(caller, callee) for caller, callee in watch.up if (room(caller), room(callee)) != ("optim", "engine")}
    assert watch.deepest and not {(caller, callee) for caller, callee in up if room(caller) not in house_calls.GIVEN}


def test_the_watch_sees_a_call_that_goes_up(monkeypatch):
    monkeypatch.setattr(house_calls, "name_of", lambda frame: {"lower": "tiers.a.lower", "upper": "engine.b.upper"}.get(frame.f_code.co_name))

    def upper():
        pass

    def lower():
        upper()

    with house_calls.Watch() as watch:
        watch.is_on, watch.thread = True, threading.get_ident()
        lower()
        watch.is_on = False
    assert watch.up == {("tiers.a.lower", "engine.b.upper"): 1} and watch.deepest == ["tiers.a.lower", "engine.b.upper"]
