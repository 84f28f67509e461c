"""Calls of a step run down the house, as house_calls.py sees them."""

import threading

import house_calls
from test_house import room

CALLS_UP = 8  # kinds of them; the number may only fall


def test_calls_go_down_but_for_few(monkeypatch, tmp_path):
    """In a step, as house_calls.py sees it: by functions, since how often each is called depends on threads."""
    monkeypatch.chdir(tmp_path)
    watch = house_calls.watched_step()
    up = {(caller, callee) for caller, callee in watch.up if room(caller) != "system"}
    assert watch.deepest and {(room(caller), room(callee)) for caller, callee in up} <= {("tiers", "engine"), ("optim", "engine")}, up
    assert len(up) <= CALLS_UP, up


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
