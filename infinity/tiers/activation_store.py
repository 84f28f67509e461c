"""Host memory and NVMe for saved activations: allocation, writes, reads and release.

Knows saved storages, a heap of host memory and a swap. Must not know tensors, autograd, or how bytes reach the device.
"""

# [Note: host memory of activations]
# An area goes to another storage once the last transfer of the area is over. The storages that were saved first are needed last, so
# they are written to NVMe first. Memory that was read ahead is given up if an earlier read needs memory.

from __future__ import annotations

import bisect
import contextlib
from collections import deque

from infinity.errors import SwapError
from infinity.system.arena import PAGE_NBYTES, Area, Arena, Heap
from infinity.system.failure import FirstFailure
from infinity.system.lanes import Lane
from infinity.system.threads import monitor
from infinity.system.waits import waits
from infinity.tiers.saved_storage import SavedStorage, StorageState


class ExtentPool:
    """Extents on NVMe that are used again. nbytes: of all extents."""

    def __init__(self, swap):
        self.nbytes = 0
        self._swap = swap
        self._free: list = []  # smallest first

    def take(self, nbytes: int):
        """An extent of nbytes or more, where nbytes is a multiple of 4096. Raises SwapError."""
        index = bisect.bisect_left(self._free, nbytes, key=_size)
        if index < len(self._free):
            return self._free.pop(index)
        unit = max(1 << nbytes.bit_length() - 4, PAGE_NBYTES)  # similar sizes share extents
        extent = self._swap.extend(-(-nbytes // unit) * unit)
        self.nbytes += extent.nbytes
        return extent

    def give_back(self, extent) -> None:
        bisect.insort(self._free, extent, key=_size)


class ActivationStore:
    """swap: None if nothing may go to NVMe. who: prefix of errors, such as "rank 1 of 2, "."""

    def __init__(self, arena: Arena, swap, budget_nbytes: int, *, who: str, failure: FirstFailure):
        self.swap, self.who, self.failure = swap, who, failure
        self.heap = Heap(arena, budget_nbytes)
        self.extents = ExtentPool(swap)
        self.writer = Lane("activations-cn", failure)
        self.storages: dict[int, SavedStorage] = {}  # by number, in every state
        self._changed = monitor()  # guards fields that the writer changes: states, memory and the counts
        self._cooling: deque = deque()  # (transfer, memory that is free when the transfer is over)
        self._num_writing = self._num_written = self._num_reads = 0

    def take(self, nbytes: int) -> Area | None:
        """Host memory. If no memory is free, write the storage that backward needs last to NVMe. None if no storage can give memory."""
        while True:
            num_written = self._num_written
            if (memory := self.try_take(nbytes)) is not None:
                return memory
            self.failure.check()
            with self._changed:
                if self._num_writing or self._num_written != num_written:
                    with waits("room in host memory for saved activations", self.writer.ident):
                        self._changed.wait_for(lambda: self._num_written != num_written)
                    continue
            if self._cooling:
                self._cooling[0][0].wait()
            elif not (self.write_oldest() or self._give_up_last()):
                return None

    def try_take(self, nbytes: int) -> Area | None:
        """Host memory that is free now, or None."""
        self.reclaim()
        return self.heap.take(nbytes)

    def reclaim(self) -> None:
        """Free the memory of transfers that are over."""
        while self._cooling and self._cooling[0][0].done:
            self.heap.give_back(self._cooling.popleft()[1])

    def free_after(self, transfer, memory: Area) -> None:
        """Free host memory once the transfer is over."""
        self._cooling.append((transfer, memory))

    def shrink(self) -> None:
        """Give unused host memory back to the arena."""
        while self._cooling:
            self._cooling[0][0].wait()
            self.reclaim()
        self.heap.shrink()

    def discard(self, stored: SavedStorage) -> None:
        """Free memory and extent of a storage that no saved tensor needs."""
        self.await_write(stored)
        if stored.memory is not None:
            self.free_after(stored.read if stored.state is StorageState.READING else stored.copy, stored.memory)
        if stored.extent is not None:
            self.extents.give_back(stored.extent)

    # To NVMe.

    def write_oldest(self) -> bool:
        """Begin to write the oldest storage in host memory. Returns whether there is one."""
        if self.swap is None:
            return False
        oldest = next((stored for stored in self.storages.values() if stored.state is StorageState.HOST), None)
        if oldest is not None:
            self.write(oldest)
        return oldest is not None

    def write(self, stored: SavedStorage) -> None:
        """Begin to move a storage from host memory to NVMe."""
        if stored.extent is None:
            stored.extent = self.extents.take(stored.memory.nbytes)
        with self._changed:
            stored.begin_write()
            self._num_writing += 1
        self.writer.push(lambda: self._run_write(stored), f"activation {stored.number}")

    def _run_write(self, stored: SavedStorage) -> None:
        error = None
        try:
            stored.copy.wait()
            self.swap.write(stored.extent, stored.memory.buffer, what=self._name(stored)).wait()
        except BaseException as caught:
            error = caught
            self.failure.note(error, f"activation {stored.number} ({self.writer.name}): ")  # before waiting threads see HOST and retry
        with self._changed:
            if error is not None or stored.wanted:
                stored.become(StorageState.HOST)
            else:
                stored.become(StorageState.NVME)
                self.heap.give_back(stored.take_memory())
            self._num_writing -= 1
            self._num_written += 1
            self._changed.notify_all()
        if error is not None:
            raise error

    def want(self, stored: SavedStorage) -> bool:
        """Keep the storage's memory also during a write. Returns whether a write is running."""
        with self._changed:
            return stored.want()

    def await_write(self, stored: SavedStorage) -> None:
        """Keep the storage's memory, and wait for a running write."""
        with self._changed:
            if stored.want():
                with waits(f"the write of activation {stored.number}", self.writer.ident):
                    self._changed.wait_for(lambda: stored.state is not StorageState.WRITING)

    # From NVMe.

    def read(self, stored: SavedStorage, memory: Area, priority: int) -> None:
        """Begin to read a storage into host memory."""
        self._num_reads += 1
        read = self.swap.read(stored.extent, memory.buffer, priority=priority, what=self._name(stored))
        stored.begin_read(memory, read, self._num_reads)

    def await_read(self, stored: SavedStorage) -> None:
        stored.read.promote()
        stored.read.wait()
        stored.become(StorageState.HOST)

    def _give_up_last(self) -> bool:
        """Give up the memory of the storage that was read ahead last: NVMe still has the bytes. Returns whether there is one."""
        reading = (stored for stored in self.storages.values() if stored.state is StorageState.READING)
        last = max(reading, key=lambda stored: stored.read_number, default=None)
        if last is not None:
            with contextlib.suppress(SwapError):  # the bytes may never be needed
                last.read.wait()
            last.become(StorageState.NVME)
            self.heap.give_back(last.take_memory())
        return last is not None

    def _name(self, stored: SavedStorage) -> str:
        return f"{self.who}activation {stored.number}: "


def _size(extent) -> int:
    return extent.nbytes
