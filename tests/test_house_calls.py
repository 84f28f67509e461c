"""Calls between packages run down the house, as house_calls.py sees them."""

import threading

import pytest
from support import house_calls
from support.house import room

from infinity.tiers.record_mover import RecordMover

MOST_FRAMES_OF_A_FETCH = 9
MOST_KINDS = 4


@pytest.fixture(autouse=True)
def all_updates_in_backward(monkeypatch, tmp_path):
    """All updates run in backward, however slow the drive is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RecordMover, "is_crowded", lambda records, kind: False)


@pytest.mark.parametrize("scene", house_calls.SCENES)
def test_calls_go_down_except_the_named_kinds(scene):
    watch = house_calls.watched(scene)
    unnamed = {kind for kind in watch.kinds() if kind not in house_calls.KINDS}
    assert not unnamed, f"calls that go up: {unnamed}"
    assert watch.deepest or scene in ("start", "load_state_dict", "accumulate", "close")
    lanes = {(caller, callee) for caller, callee in watch.up if caller.startswith("system.lanes.") and room(callee) == "checkpoints"}
    assert not lanes, f"lanes of an engine run code of checkpoints: {lanes}"


def test_four_kinds_of_calls_go_up():
    """A new kind needs a better reason than a number."""
    assert len(house_calls.KINDS) <= MOST_KINDS


def test_a_fetch_takes_nine_frames_from_hook_to_submitted_read():
    stack = house_calls.watched("step").deepest_fetch
    assert (room(stack[0]), room(stack[-1])) == ("engine", "system") and len(stack) <= MOST_FRAMES_OF_A_FETCH, stack
    assert not [name for name in stack if "<lambda>" in name or "<locals>" in name]  # no closures


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
    assert watch.kinds() == watch.up
