"""What happened when: meters of the links and, on request, a trace of their work.

Knows lanes by name and a clock. Must not know chunks, tiers or threads: whoever moves bytes reports here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

LINKS = ("nc", "cg", "gg", "rs", "gc", "update", "cn")

now = time.perf_counter


@dataclass
class Meter:
    """Totals of one link since the engine was made.

    nbytes: moved. busy_seconds: time with at least one transfer under way. stall_seconds: time the training thread
    waited for this link.
    """

    nbytes: int = 0
    busy_seconds: float = 0.0
    stall_seconds: float = 0.0
    _busy_until: float = 0.0


@dataclass(frozen=True)
class Event:
    """One piece of work: lane, what it was, its start and end in seconds of `now`."""

    lane: str
    what: object
    start: float
    end: float


@dataclass
class Events:
    """Meters of every link; with `tracing` also a list of `Event`s. Appending is safe from any thread."""

    tracing: bool = False
    meters: dict[str, Meter] = field(default_factory=lambda: {link: Meter() for link in LINKS})
    trace: list[Event] = field(default_factory=list)

    def moved(self, link: str, what: object, nbytes: int, start: float, end: float) -> None:
        """A transfer or update is over. Each link has one reporting thread, so its meter needs no lock."""
        meter = self.meters[link]
        meter.nbytes += nbytes
        meter.busy_seconds += max(0.0, end - max(start, meter._busy_until))
        meter._busy_until = max(end, meter._busy_until)
        self.mark(link, what, start, end)

    def stalled(self, link: str, seconds: float) -> None:
        self.meters[link].stall_seconds += seconds

    def mark(self, lane: str, what: object, start: float, end: float) -> None:
        if self.tracing:
            self.trace.append(Event(lane, what, start, end))
