"""The host memory that a checkpoint's records go through: a few areas, each filled, written from, and filled again.

Knows memory, and when a write from it is over. Must not know what is written, nor where.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import aio_ext
from infinity.errors import SwapError
from infinity.system.arena import PAGE_NBYTES, Arena, Region
from infinity.system.lanes import Monitor

AREA_NBYTES = 16 << 20  # at most; of one segment
LEAST_AREAS = 2  # one is filled while the other is written


class Areas:
    """Areas of host memory that any thread may take. path: of the checkpoint, for who hears that a write failed."""

    def __init__(self, path: Path, *, host_nbytes: int, largest_nbytes: int, pin: bool):
        """host_nbytes: of all, though two there are in any case. largest_nbytes: of what is ever put into one."""
        self.path = path
        self.nbytes = min(AREA_NBYTES, -(-max(largest_nbytes, 1) // PAGE_NBYTES) * PAGE_NBYTES)
        self._most = max(LEAST_AREAS, host_nbytes // self.nbytes)
        self._arena = Arena(pin=pin)
        self._lock = Monitor()
        self._free: deque[tuple[Region, list[aio_ext.Ticket]]] = deque()  # nobody fills them; written longest ago comes first
        self._num = 0
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def area(self) -> Iterator[tuple[Region, list[aio_ext.Ticket]]]:
        """Memory from which nothing is written any more, and a list for the tickets of what is begun from it. Raises what `fail` was
        told, SwapError if what was written from it before failed."""
        region, tickets = self._take()
        begun: list[aio_ext.Ticket] = []
        try:
            self._wait_for(tickets)
            yield region, begun
        finally:
            with self._lock:
                self._free.append((region, begun))
                self._lock.notify_all()

    def settle(self) -> None:
        """Wait for all that was begun. Nobody fills an area meanwhile. Raises SwapError."""
        for _, tickets in self._free:
            self._wait_for(tickets)

    def fail(self, error: BaseException) -> None:
        """Nobody is to wait for an area any more."""
        with self._lock:
            self._error = self._error or error
            self._lock.notify_all()

    def close(self) -> None:
        self._arena.close()

    def _take(self) -> tuple[Region, list[aio_ext.Ticket]]:
        """An area, with what is still being written from it; a new one only if all others are in use."""
        with self._lock:
            while True:
                if self._error is not None:
                    raise self._error
                is_full = self._num == self._most
                if self._free and (is_full or all(ticket.done for ticket in self._free[0][1])):
                    return self._free.popleft()
                if not is_full:
                    self._num += 1
                    break
                self._lock.wait()
        return self._arena.region(self.nbytes), []

    def _wait_for(self, tickets: list[aio_ext.Ticket]) -> None:
        for ticket in tickets:
            try:
                ticket.wait()
            except OSError as error:
                raise SwapError(error.errno, f"a write of the checkpoint failed ({error.strerror})", str(self.path)) from error
