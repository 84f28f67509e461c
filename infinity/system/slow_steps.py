"""How long an engine's steps take, and what one says that takes very long: a line on standard error, once a minute.

Knows clocks, meters of links, and what threads wait for. Must not know lanes, nor what a step does.
"""

# [Note: how a long step is noticed]
# No thread is there for it. Lanes that have nothing to do, and who waits for one, wake now and then anyway, and look then. So a step costs
# two readings of the clock. It speaks only while a thread of the program waits for something of an engine's: what else takes long, such as
# data that come late or a debugger, is the program's own business.

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections import deque

from infinity.output import say
from infinity.system.events import LINKS, Events, now
from infinity.system.waits import of_the_program

LONG = 10  # a step that takes so many times the median of those before
LEAST_S = 5.0  # and at least this
UNSETTLED_S = 60.0  # where there is no median yet
PAUSE_S = 60.0  # between two lines
NUM_UNSETTLED = 2  # first steps, which make traces and plans
NUM_STEPS = 16  # that the median is of


class Pace:
    """Of one engine's steps. who: begins its lines, such as "rank 1 of 2, "."""

    def __init__(self, events: Events, who: str = ""):
        self._meters, self._who = events.meters, who
        self._num_steps = 0
        self._seconds: deque[float] = deque(maxlen=NUM_STEPS)
        self._median_s: float | None = None
        self._began = 0.0
        self._stalled: list[float] = []  # seconds by link, when it began
        self._said = -PAUSE_S
        self._lock = threading.Lock()  # over when it spoke last

    def begin(self) -> None:
        """A step begins."""
        self._began = now()
        self._stalled = self._stalls()
        _under_way.add(self)

    def step_done(self) -> None:
        if self in _under_way:
            self.end()
            self._num_steps += 1
            if self._num_steps > NUM_UNSETTLED:
                self._seconds.append(now() - self._began)
                self._median_s = statistics.median(self._seconds)

    def end(self) -> None:
        """No step is under way."""
        _under_way.discard(self)

    def speak_if_long(self) -> None:
        """Say what the step under way waits for, if it is long and has not spoken within a minute; from any thread."""
        seconds, median_s = now() - self._began, self._median_s
        if seconds < (UNSETTLED_S if median_s is None else max(LONG * median_s, LEAST_S)) or (wait := of_the_program()) is None:
            return
        with self._lock:
            if now() - self._said < PAUSE_S:
                return
            self._said = now()
        usual = "" if median_s is None else f", {median_s:.2f} s as a rule"
        text = f"{self._who}step {self._num_steps + 1} takes {seconds:.1f} s so far{usual}. Waits {wait.seconds:.1f} s for {wait}"
        say(text + self._by_link())

    def _by_link(self) -> str:
        """What the step has waited for before, for at least a tenth of a second, longest first."""
        spans = zip(LINKS, self._stalls(), self._stalled)
        waited = sorted(((after - before, link) for link, after, before in spans if after - before >= 0.1), reverse=True)
        return "; before that " + ", ".join(f"{seconds:.1f} s for {link}" for seconds, link in waited) if waited else ""

    def _stalls(self) -> list[float]:
        return [self._meters[link].stall_seconds for link in LINKS]


_under_way: set[Pace] = set()  # of engines that are in a step
os.register_at_fork(after_in_child=_under_way.clear)


def look() -> None:
    """For whoever wakes now and then anyway; see [Note: how a long step is noticed]."""
    for pace in list(_under_way):
        with contextlib.suppress(Exception):  # such as of a standard error that is closed: no lane may end by it
            pace.speak_if_long()
