"""Meters of the links and, on request, a trace of their work.

Knows lanes by name and a clock. Must not know chunks, tiers or threads: the code that moves bytes, computes or waits reports here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from infinity.system.threads import now

LINKS = ("nvme_read", "h2d", "all_gather", "reduce_scatter", "d2h", "update", "nvme_write")  # h2d: host to device; d2h: device to host
COMPUTE, STALL, STEP, SLOTS = "compute", "stall", "step", "slots"  # lanes of a trace beside the links
MAX_EVENTS = 1 << 18  # capacity of a trace, some 70 MiB; the oldest events go first

@dataclass
class Meter:
    """Totals of one link since the engine was created.

    nbytes: bytes moved. busy_seconds: time with at least one active transfer. stall_seconds: time that the training thread waited for
    this link.
    """

    nbytes: int = 0
    busy_seconds: float = 0.0
    stall_seconds: float = 0.0
    _busy: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=8))  # the last disjoint busy intervals

    def moved(self, nbytes: int, start: float, end: float) -> None:
        """Add a transfer. Reports arrive about when transfers end, but from several threads: a transfer may begin before one reported
        earlier.
        """
        self.nbytes += nbytes
        while self._busy and self._busy[-1][1] >= start:
            first, last = self._busy.pop()
            self.busy_seconds -= last - first
            start, end = min(start, first), max(end, last)
        self._busy.append((start, end))
        self.busy_seconds += end - start

    def totals(self) -> dict[str, float]:
        return {"nbytes": self.nbytes, "busy_seconds": self.busy_seconds, "stall_seconds": self.stall_seconds}


class Event(NamedTuple):
    """One piece of work: lane, description, start and end in seconds of `now`, and bytes moved.

    what: depends on the lane. Of a link, a chunk's index, alone or with the kind of its segments. Of COMPUTE, (phase, op). Of STALL,
    (link, the awaited work). Of STEP, the step's number, from 1. Of SLOTS, an instant, the number of used slots by kind.
    """

    lane: str
    what: object
    start: float
    end: float
    nbytes: int = 0


@dataclass
class Events:
    """Meters of every link; with `tracing` also the last `max_events` `Event`s. All methods are safe in any thread.

    With tracing, `timeline` (see timeline.py) records device compute, and count_slots() returns the number of used slots.
    """

    tracing: bool = False
    meters: dict[str, Meter] = field(default_factory=lambda: {link: Meter() for link in LINKS})
    max_events: int = MAX_EVENTS
    num_left_out: int = 0  # events that did not fit
    complete_since: float = 0.0  # from this time on, the trace is complete
    timeline: object = None
    count_slots: Callable[[], dict[str, int]] = dict
    before_end: Callable[[str, float, float], float] | None = None  # given link, start and end of a move; returns the end, which may be later
    _trace: deque[Event] = field(default_factory=deque)
    _num_steps: int = 0
    _step_start: float = field(default_factory=now)
    _slots: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def moved(self, link: str, what: object, nbytes: int, start: float, end: float, marks=None) -> None:
        """Report the end of a transfer or update. marks: start and end on the device's clock, if that is more exact; see `device_mark`."""
        if self.before_end is not None:
            end = self.before_end(link, start, end)
        with self._lock:
            self.meters[link].moved(nbytes, start, end)
        if marks is not None and None not in marks:
            self.timeline.note(link, what, nbytes, *marks)
        else:
            self.mark(link, what, start, end, nbytes)

    def stalled(self, link: str, what: object, start: float, end: float) -> None:
        """Report that the training thread waited for work of a link."""
        self.meters[link].stall_seconds += end - start
        if self.timeline is not None:
            self.timeline.interrupt(start, end)
        self.mark(STALL, (link, what), start, end)

    def wait(self, link: str, waitable, what: object) -> object:
        """Wait for an object with `done` and `wait()`, and charge the time to the link."""
        if waitable.done:
            return waitable.wait()
        start = now()
        try:
            return waitable.wait()
        finally:
            self.stalled(link, what, start, now())

    def device_waited(self, link: str, what: object, since) -> None:
        """Report that the current CUDA stream waits for work of a link, from the `device_mark` `since` on."""
        if since is not None:
            self.timeline.note(STALL, (link, what), 0, since, self.device_mark())

    def step_done(self) -> None:
        """End the step: later events belong to the next step."""
        if self.tracing:
            end = now()
            self._num_steps += 1
            self.mark(STEP, self._num_steps, self._step_start, end)
            self._step_start = end
            if self.timeline is not None:
                self.timeline.resolve()

    def device_mark(self):
        """A mark in the current CUDA stream, for `moved`; None without tracing, and on the CPU, whose host clock is exact."""
        return self.timeline.mark() if self.timeline is not None else None

    def mark(self, lane: str, what: object, start: float, end: float, nbytes: int = 0) -> None:
        if not self.tracing:
            return
        with self._lock:
            self._append(Event(lane, what, start, end, nbytes))
            slots = self.count_slots() if lane in LINKS else self._slots
            if slots != self._slots:
                self._slots = slots
                self._append(Event(SLOTS, slots, at := now(), at))

    @property
    def trace(self) -> list[Event]:
        """The kept events, in the order of reports."""
        with self._lock:
            return list(self._trace)

    def _append(self, event: Event) -> None:
        self._trace.append(event)
        while len(self._trace) > self.max_events:
            self.num_left_out += 1
            self.complete_since = max(self.complete_since, self._trace.popleft().end)
