"""The compute lane of a trace, and marks in the streams of a CUDA device.

Knows ops by name and the device's clock. Must not know modules, spans or transfers. Exists only if a trace is requested.
"""

# [Note: time on a CUDA device]
# The training thread runs ahead of the device. Marks are therefore timing events in a stream. At the end of a step, events that have passed
# are read, and the others later: no thread waits. A mark's time is the time of the last mark that was read, plus the device's difference
# between both. The time is not before the thread recorded the mark, nor after the mark was seen to have passed. This keeps the clocks of
# device and host together in a run of days. If a thread was held up between a mark and its time, later marks move, and return later. Ops
# are in one stream, so none begins before the end of the previous one.

from __future__ import annotations

from collections import deque

import torch

from infinity.system.events import COMPUTE, Events, now
from infinity.system.streams import has_streams, timed_event

_MANY = 4096  # waiting marks, if no step ends


class Timeline:
    """The compute lane by the host's clock, for the CPU. One op computes at a time: a module's inner modules interrupt the outer one."""

    def __init__(self, events: Events):
        self.events = events
        self._op: tuple[str, str] | None = None
        self._start = None

    def begin(self, phase: str, op: str) -> None:
        """End the previous op and begin this one."""
        end = self.end()
        self._op, self._start = (phase, op), end if end is not None else self._here()

    def end(self):
        """End the current op, if any; returns the time or mark."""
        if self._op is None:
            return None
        end = self._here()
        self._note(self._op, self._start, end)
        self._op = None
        return end

    def interrupt(self, start: float, end: float) -> None:
        """Report a wait of the training thread, which computed nothing meanwhile."""
        if self._op is not None:
            self._note(self._op, self._start, start)
            self._start = end

    def mark(self) -> None:
        """A mark of the current stream; None on the CPU."""

    def resolve(self, *, wait: bool = False) -> None:
        """Pass finished marks to the trace. wait: wait for the rest, too."""

    def _here(self):
        return now()

    def _note(self, op, start, end) -> None:
        self.events.mark(COMPUTE, op, start, end)


class CudaTimeline(Timeline):
    """The compute lane by the clock of a CUDA device; see [Note: time on a CUDA device]."""

    def __init__(self, events: Events, device: torch.device):
        super().__init__(events)
        self.device = device
        self._waiting: deque[tuple] = deque()  # (lane, what, nbytes, first mark, last mark)
        event, _ = self.mark()
        event.synchronize()
        self._last = event, now()  # the last mark that was read, and its time
        self._computed = 0.0  # time up to which compute is in the trace

    def interrupt(self, start: float, end: float) -> None:
        """No effect: the device continues meanwhile."""

    def mark(self) -> tuple[torch.cuda.Event, float]:
        return timed_event(self.device), now()

    def note(self, lane: str, what: object, nbytes: int, first, last) -> None:
        """Report work between two marks, to be traced once they have passed. From any thread."""
        self._waiting.append((lane, what, nbytes, first, last))

    def resolve(self, *, wait: bool = False) -> None:
        while self._waiting:
            lane, what, nbytes, first, last = self._waiting[0]
            if wait:
                last[0].synchronize()
            elif not last[0].query():
                return
            self._waiting.popleft()
            start = max(self._time(first), self._computed if lane == COMPUTE else 0.0)
            end = max(start, self._time(last))
            if lane == COMPUTE:
                self._computed = end
            self.events.mark(lane, what, start, end, nbytes)

    def _time(self, mark: tuple[torch.cuda.Event, float]) -> float:
        event, recorded = mark
        known, time = self._last
        found = min(max(time + known.elapsed_time(event) / 1e3, recorded), now())
        self._last = event, found
        return found

    def _here(self):
        return self.mark()

    def _note(self, op, start, end) -> None:
        self.note(COMPUTE, op, 0, start, end)
        if len(self._waiting) > _MANY:
            self.resolve()


def timeline_of(device: torch.device, events: Events) -> Timeline:
    return CudaTimeline(events, device) if has_streams(device) else Timeline(events)
