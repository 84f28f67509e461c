"""Counts the device bytes of gradients that are on their way to host memory, and makes the training thread wait if there are too many.

Knows numbers of bytes, and the lane that moves them. Must not know chunks.
"""

from __future__ import annotations

from infinity.system.events import Events, now
from infinity.system.failure import FirstFailure
from infinity.system.lanes import Lane
from infinity.system.threads import monitor
from infinity.system.waits import waits
from infinity.tiers.span_state import DeviceTier


class BytesInFlight:
    """limit_nbytes: while more bytes than this are in flight, `wait_for_room` blocks. lane: moves the bytes."""

    def __init__(self, limit_nbytes: int, tier: DeviceTier, lane: Lane, events: Events, failure: FirstFailure):
        self.limit_nbytes = limit_nbytes
        self.nbytes = 0
        self._tier, self._lane, self._events, self._failure = tier, lane, events, failure
        self._changed = monitor()

    def add(self, nbytes: int, *, is_booked: bool = False) -> None:
        """Bytes leave for host memory; a negative number: bytes have left the device. is_booked: the tier counts them already."""
        with self._changed:
            self.nbytes += nbytes
            if not is_booked:
                self._tier.book(nbytes)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Block the training thread while too many bytes are in flight."""
        if self.nbytes <= self.limit_nbytes:  # only this thread makes the number larger
            return
        with self._changed:
            start = now()
            self._lane.wake()
            with waits("room for gradients on the device", self._lane.ident):
                while self.nbytes > self.limit_nbytes:
                    self._failure.check()
                    self._changed.wait(1.0)
            self._events.stalled("d2h", "room for gradients", start, now())
