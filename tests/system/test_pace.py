"""Pace: a very long step reports its current wait once a minute. Other steps report nothing."""

import io
import sys

import pytest

from infinity.system import slow_steps as pace
from infinity.system.events import Events
from infinity.system.slow_steps import Pace, look
from infinity.system.waits import waits


@pytest.fixture
def clock(monkeypatch):
    """The clock of Pace, in seconds; a test moves the clock forward."""
    seconds = [1000.0]
    monkeypatch.setattr(pace, "now", lambda: seconds[0])
    return seconds


@pytest.fixture
def steps(clock):
    """The Pace of an engine after ten steps: two of 30 s, then eight of 1 s."""
    events = Events()
    made = Pace(events, "rank 1 of 2, ")
    made.events = events
    for step in range(10):
        made.begin()
        clock[0] += 30 if step < 2 else 1
        made.step_done()
    yield made
    made.end()


def lines(capsys, what="an update of chunk 3"):
    """Lines that look() prints while a thread of the program waits for `what` (None: no thread waits)."""
    if what is not None:
        with waits(what):
            look()
    else:
        look()
    return capsys.readouterr().err.splitlines()


def test_a_step_of_ten_times_the_median_reports_its_wait_each_minute(steps, clock, capsys):
    steps.begin()
    steps.events.stalled("update", 3, 0.0, 7.5)
    steps.events.stalled("nvme_read", 3, 0.0, 0.05)
    clock[0] += 9.9
    assert lines(capsys) == []
    clock[0] += 0.2
    (line,) = lines(capsys)
    assert line == (
        "infinity: rank 1 of 2, step 11 takes 10.1 s so far, 1.00 s as a rule. Waits 0.0 s for an update of chunk 3; before that 7.5 s "
        "for update"
    )
    assert lines(capsys) == []
    clock[0] += 59.7
    assert lines(capsys) == []
    clock[0] += 0.4
    (line,) = lines(capsys, "room in host memory")
    assert "step 11 takes 70.2 s so far" in line and "for room in host memory;" in line


def test_no_report_without_a_wait_for_the_engine_or_between_steps(steps, clock, capsys):
    steps.begin()
    clock[0] += 100
    assert lines(capsys, None) == []
    steps.step_done()
    clock[0] += 100
    assert lines(capsys) == []


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_closed_stderr_is_no_error(steps, clock, monkeypatch, capsys, stream):
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    steps.begin()
    clock[0] += 100
    with monkeypatch.context() as patched, waits("an update of chunk 3"):
        patched.setattr(sys, "stderr", stream)
        look()
    assert lines(capsys) == []
    clock[0] += 61
    assert len(lines(capsys)) == 1


def test_a_short_step_is_reported_only_after_the_least_time(clock, capsys):
    made = Pace(Events())
    for _ in range(5):
        made.begin()
        clock[0] += 0.01
        made.step_done()
    made.begin()
    clock[0] += pace.LEAST_S - 0.1
    assert lines(capsys) == []
    clock[0] += 0.2
    (line,) = lines(capsys)
    assert line.startswith("infinity: step 6 takes 5.1 s so far, 0.01 s as a rule. Waits")
    made.end()


def test_a_first_step_reports_after_a_minute(clock, capsys):
    made = Pace(Events())
    made.begin()
    clock[0] += 59
    assert lines(capsys) == []
    clock[0] += 2
    assert lines(capsys) == ["infinity: step 1 takes 61.0 s so far. Waits 0.0 s for an update of chunk 3"]
    made.end()


def test_after_ten_long_steps_a_long_step_is_not_reported(steps, clock, capsys):
    for _ in range(10):
        steps.begin()
        clock[0] += 100
        steps.step_done()
    steps.begin()
    clock[0] += 200
    assert lines(capsys) == []
