"""A simulated storage tier: transfers take virtual time, and no bytes exist.

Knows extents, transfers and the interface of infinity/system/storage.py. Must not know chunks.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable
from pathlib import Path

import aio_ext
from infinity.errors import SwapError
from infinity.simulation.links import Links
from infinity.simulation.threads import SimulatedThreads
from infinity.sizes import round_up
from infinity.system.swap_directory import ALIGNMENT
from infinity.system.threads import threads


class SimulatedExtent:
    def __init__(self, nbytes: int):
        self.nbytes = round_up(nbytes, ALIGNMENT)


class SimulatedTransfer:
    """finish(): called when the bytes have arrived. Returns an error or None."""

    def __init__(self, nbytes: int, words: str, finish: Callable[[], BaseException | None], promote: Callable[[int], object]):
        self.nbytes, self.done, self.promote = nbytes, False, promote
        self._words, self._finish = words, finish
        self._error: BaseException | None = None
        self.followers: list[Callable[[], object]] = []
        self._is_over = threads().lock()
        self._is_over.acquire()

    def end(self) -> None:
        self._error = self._finish()
        self.done = True
        self._is_over.release()
        for follow in self.followers:
            follow()

    def wait(self) -> None:
        if not self.done:
            self._is_over.acquire()
            self._is_over.release()
        if self._error is not None:
            raise self._error

    def in_words(self) -> str:
        return self._words


class SimulatedDrives:
    """A rank's share of the drives: one read and one write at a time, in the order of their priorities. links: "nvme_read" and "nvme_write" are
    the drives. read, write: their rates in bytes/s, if no other link is busy. nbytes_per_s: what a measurement of all drives would say. room_nbytes:
    of the share. latency(): seconds between the transfer of the bytes and the end."""

    def __init__(
        self,
        threads: SimulatedThreads,
        links: Links,
        *,
        read: float,
        write: float,
        nbytes_per_s: float = 0.0,
        latency: Callable[[], float] = lambda: 1e-4,
        room_nbytes: int = 1 << 60,
    ):
        self.threads, self.latency, self.room_nbytes, self.nbytes_per_s = threads, latency, room_nbytes, nbytes_per_s
        self._links, self._rates = links, {"read": read, "write": write}
        self.allocated_nbytes = 0
        self.read_nbytes = self.write_nbytes = 0
        self._last: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # the last transfer of each extent

    def allocate(self, nbytes: int) -> SimulatedExtent:
        extent = self.extent(nbytes)
        self.allocated_nbytes += extent.nbytes
        return extent

    def extent(self, nbytes: int) -> SimulatedExtent:
        return SimulatedExtent(nbytes)

    def extend(self, nbytes: int) -> SimulatedExtent:
        extent = self.allocate(nbytes)
        self.reserve()
        return extent

    def reserve(self) -> None:
        if self.allocated_nbytes > self.room_nbytes:
            raise SwapError(errno.ENOSPC, f"{self.allocated_nbytes} bytes of extents, but room for {self.room_nbytes}", "simulated")

    def read(self, extent, buffer, *, offset: int = 0, priority: int = aio_ext.PREFETCH, what: str = "") -> SimulatedTransfer:
        self.read_nbytes += len(buffer)
        return self.begin("read", extent, len(buffer), lambda: None, priority)

    def write(self, extent, buffer, *, offset: int = 0, priority: int = aio_ext.WRITE, what: str = "") -> SimulatedTransfer:
        self.write_nbytes += len(buffer)
        return self.begin("write", extent, len(buffer), lambda: None, priority)

    def begin(self, op: str, extent, nbytes: int, finish: Callable[[], BaseException | None], priority: int) -> SimulatedTransfer:
        """A transfer after the earlier ones of the extent."""
        before, work = self._last.get(extent), None
        if before is not None and before.done:
            before = None

        def promote(wanted: int = aio_ext.DEMAND) -> None:
            nonlocal priority
            priority = min(priority, wanted)
            if work is not None:
                self._links.promote(work, priority)
            elif before is not None:
                before.promote(priority)

        def enter() -> None:
            nonlocal work, before
            before = None
            work = self._links.begin(f"nvme_{op}", nbytes / self._rates[op], end, priority)

        def end() -> None:
            self.threads.call_after(self.latency(), transfer.end)

        transfer = self._last[extent] = SimulatedTransfer(nbytes, f"a {op} of {nbytes} bytes", finish, promote)
        if before is None:
            enter()
        else:
            before.promote(priority)
            before.followers.append(enter)
        return transfer

    def path_of(self, extent) -> Path:
        return Path("simulated")

    def close(self) -> None:
        """Nothing is left."""
