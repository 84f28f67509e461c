"""A simulated storage tier: transfers take virtual time, and no bytes exist.

Knows extents, transfers and the interface of infinity/system/storage.py. Must not know chunks.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from infinity.errors import SwapError
from infinity.simulation.threads import SimulatedThreads
from infinity.sizes import round_up
from infinity.system.swap_directory import ALIGNMENT
from infinity.system.threads import now, threads


class SimulatedExtent:
    def __init__(self, nbytes: int):
        self.nbytes = round_up(nbytes, ALIGNMENT)


class SimulatedTransfer:
    """finish(): called when the bytes have arrived. Returns an error or None."""

    def __init__(self, nbytes: int, words: str, finish: Callable[[], BaseException | None]):
        self.nbytes, self.done = nbytes, False
        self._words, self._finish = words, finish
        self._error: BaseException | None = None
        self._is_over = threads().lock()
        self._is_over.acquire()

    def end(self) -> None:
        self._error = self._finish()
        self.done = True
        self._is_over.release()

    def wait(self) -> None:
        if not self.done:
            self._is_over.acquire()
            self._is_over.release()
        if self._error is not None:
            raise self._error

    def promote(self, priority: int = 0) -> None:
        """The drive works in order."""

    def in_words(self) -> str:
        return self._words


class SimulatedDrives:
    """A rank's share of the drives, which works in order, at a rate in bytes/s. num_local: ranks of the node, each with such a share.
    room_nbytes: of the share.

    free_at: the end of the last transfer.
    """

    def __init__(self, threads: SimulatedThreads, *, rate: float, latency_s: float = 1e-4, num_local: int = 1, room_nbytes: int = 1 << 60):
        self.threads, self.rate, self.latency_s, self.room_nbytes = threads, rate, latency_s, room_nbytes
        self._allocated_nbytes = 0
        self.nbytes_per_s = rate * num_local
        self.read_nbytes = self.write_nbytes = 0
        self.free_at = 0.0

    def allocate(self, nbytes: int) -> SimulatedExtent:
        extent = self.extent(nbytes)
        self._allocated_nbytes += extent.nbytes
        return extent

    def extent(self, nbytes: int) -> SimulatedExtent:
        return SimulatedExtent(nbytes)

    def extend(self, nbytes: int) -> SimulatedExtent:
        extent = self.allocate(nbytes)
        self.reserve()
        return extent

    def reserve(self) -> None:
        if self._allocated_nbytes > self.room_nbytes:
            raise SwapError(errno.ENOSPC, f"{self._allocated_nbytes} bytes of extents, but room for {self.room_nbytes}", "simulated")

    def read(self, extent, buffer, *, offset: int = 0, priority: int = 0, what: str = "") -> SimulatedTransfer:
        self.read_nbytes += len(buffer)
        return self.begin("read", len(buffer), lambda: None)

    def write(self, extent, buffer, *, offset: int = 0, priority: int = 0, what: str = "") -> SimulatedTransfer:
        self.write_nbytes += len(buffer)
        return self.begin("write", len(buffer), lambda: None)

    def begin(self, op: str, nbytes: int, finish: Callable[[], BaseException | None]) -> SimulatedTransfer:
        """A transfer after all earlier ones."""
        transfer = SimulatedTransfer(nbytes, f"a {op} of {nbytes} bytes", finish)
        seconds = self.latency_s + nbytes / self.rate
        self.free_at = max(self.free_at, now()) + seconds
        self.threads.call_after(self.free_at - now(), transfer.end)
        return transfer

    def path_of(self, extent) -> Path:
        return Path("simulated")

    def close(self) -> None:
        """Nothing is left."""
