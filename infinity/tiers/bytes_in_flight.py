"""Counts the device bytes of gradients that are on their way to host memory, and makes the training thread wait if there are too many.

Knows numbers of bytes, and the lane that moves them. Must not know chunks.
"""

from __future__ import annotations

from collections.abc import Callable

from infinity.errors import BudgetError
from infinity.system.events import Events, now
from infinity.system.failure import FirstFailure
from infinity.system.lanes import Lane
from infinity.system.threads import monitor
from infinity.system.waits import waits
from infinity.tiers.span_state import DeviceTier


_GLANCE_S = 1.0
_TOO_MANY = (
    "gradients of more chunks than expected are incomplete: host memory has no slot for another one, and NVMe has no room for waiting gradients. "
    "Compute fewer outputs before each backward pass, raise host_memory, or add a directory to swap_dirs"
)


class BytesInFlight:
    """limit_nbytes: while more bytes than this are in flight, `wait_for_room` blocks. lane: moves the bytes. is_stuck(): whether the lane cannot
    continue before the training thread does."""

    def __init__(
        self, limit_nbytes: int, tier: DeviceTier, lane: Lane, events: Events, failure: FirstFailure, is_stuck: Callable[[], bool]
    ):
        self.limit_nbytes = limit_nbytes
        self.nbytes = 0
        self._tier, self._lane, self._events, self._failure = tier, lane, events, failure
        self._is_stuck = is_stuck
        self._changed = monitor()

    def add(self, nbytes: int, *, is_booked: bool = False) -> None:
        """Bytes leave for host memory; a negative number: bytes have left the device. is_booked: the tier counts them already."""
        with self._changed:
            self.nbytes += nbytes
            if not is_booked:
                self._tier.book(nbytes)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Block the training thread while too many bytes are in flight. Raises BudgetError if they can never leave."""
        if self.nbytes <= self.limit_nbytes:  # only this thread makes the number larger
            return
        start, stuck_at = now(), None
        self._lane.wake()
        with waits("room for gradients on the device", self._lane.ident):
            while self.nbytes > self.limit_nbytes:
                self._failure.check()
                stuck_at, before = self.nbytes if self._is_stuck() else None, stuck_at
                if stuck_at is not None and stuck_at == before:  # twice in a row, because the lane could be between two gradients
                    self._failure.note(BudgetError(_TOO_MANY))
                    self._failure.check()
                with self._changed:
                    self._changed.wait_for(lambda: self.nbytes <= self.limit_nbytes, _GLANCE_S)
        self._events.stalled("d2h", "room for gradients", start, now())
