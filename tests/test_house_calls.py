"""Calls of a step run down the house, as house_calls.py sees them."""

import threading

import house_calls
from test_house import room


def test_calls_of_a_step_go_down(monkeypatch, tmp_path):
    """But for what a lane was given to run, what a policy of plan was given to ask, and an optimizer, which calls its engine."""
    monkeypatch.chdir(tmp_path)
    watch = house_calls.watched_step()
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
