"""Measures steps, and reports a very long step: one line on standard error, once a minute.

Knows clocks, meters of links, and the waits of threads. Must not know lanes, nor the work of a step.
"""

# [Note: how a long step is noticed]
# No thread exists for this purpose. Idle lanes, and threads that wait for a lane, wake now and then anyway, and check the step then. A step
# therefore costs only two readings of the clock. A line is printed only while a thread of the program waits for the engine. Other delays,
# such as late data or a debugger, concern only the program.

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections import deque

from infinity.output import say
from infinity.system.events import LINKS, Events, now
from infinity.system.waits import of_the_program

LONG = 10  # multiple of the median of previous steps
LEAST_S = 5.0  # and at least so many seconds
UNSETTLED_S = 60.0  # limit without a median
PAUSE_S = 60.0  # between two lines
NUM_UNSETTLED = 2  # first steps, which make traces and plans
NUM_STEPS = 16  # steps in the median


class Pace:
    """The duration of one engine's steps. who: begins the lines, such as "rank 1 of 2, "."""

    def __init__(self, events: Events, who: str = ""):
        self._meters, self._who = events.meters, who
        self._num_steps = 0
        self._seconds: deque[float] = deque(maxlen=NUM_STEPS)
        self._median_s: float | None = None
        self._began = 0.0
        self._stalled: list[float] = []  # seconds of waiting by link at the begin of the step
        self._said = -PAUSE_S
        self._lock = threading.Lock()  # guards the time of the last line

    def begin(self) -> None:
        """Begin a step."""
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
        """End the step, if any."""
        _under_way.discard(self)

    def speak_if_long(self) -> None:
        """Print the current wait if the step is long and no line was printed within a minute; from any thread."""
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
        """Earlier waits of the step, of at least a tenth of a second, longest first."""
        spans = zip(LINKS, self._stalls(), self._stalled)
        waited = sorted(((after - before, title) for title, after, before in spans if after - before >= 0.1), reverse=True)
        return "; before that " + ", ".join(f"{seconds:.1f} s for {title}" for seconds, title in waited) if waited else ""

    def _stalls(self) -> list[float]:
        return [self._meters[link].stall_seconds for link in LINKS]


_under_way: set[Pace] = set()  # of engines that are in a step
os.register_at_fork(after_in_child=_under_way.clear)


def look() -> None:
    """Check all steps; called by threads that wake anyway, see [Note: how a long step is noticed]."""
    for pace in list(_under_way):
        with contextlib.suppress(Exception):  # for example, standard error is closed: no lane may end because of this
            pace.speak_if_long()
