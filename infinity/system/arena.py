"""Pinned host memory, leased in slots of a fixed size, or in areas of any size (a heap).

Knows memory. Must not know the contents, nor chunks, tiers, devices' streams or files. The user of a slot releases the slot only when no
copy and no disk request uses the memory.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from infinity.errors import BudgetError, UsageError
from infinity.system import host_bytes
from infinity.system.threads import monitor

PAGE_NBYTES = 4096
HUGE_NBYTES = 2 << 20
HEAP_REGION_NBYTES = 64 << 20
_TOUCH_NBYTES = 64 << 20  # per thread at a time; so few pages that torch does not use its own threads
_TOUCH_THREADS = 16

# [Note: when memory is unmapped]
# A region's mmap is never closed, only forgotten. Every buffer and tensor on the mmap refers to it, so the last of them to go unmaps the
# memory. (mmap.close() would refuse while a memoryview lives, but not for a tensor: torch.frombuffer keeps a reference to the object and no
# claim on its buffer.) A forked child has the objects without the memory, and keeps them permanently, because their addresses may belong to
# another mapping by the time the child drops them.
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_kept_by_child: list[mmap.mmap] = []
os.register_at_fork(after_in_child=lambda: _kept_by_child.extend(_mappings))


class Arena:
    """Pinned host memory: huge pages, touched in parallel, not inherited by forks.

    pin: register each region with CUDA, so that copies to and from a device are asynchronous. All regions are registered with the device
    that is current when the arena is created, whichever thread asks. Otherwise CUDA would make a context of some hundred MiB on the
    thread's device, which by default is the node's first. on_region(nbytes): called after each region.
    """

    def __init__(self, *, pin: bool = False, on_region: Callable[[int], None] = lambda nbytes: None):
        self.pin = pin
        self.on_region = on_region
        self._device = torch.cuda.current_device() if pin else None
        self._regions: list[Region] = []
        self._pinning: tuple[ThreadPoolExecutor, list[Future]] | None = None  # inside a `together` block

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(region.nbytes for region in self._regions)

    def region(self, nbytes: int) -> Region:
        """Zeroed memory of nbytes, rounded up to 4096. Raises BudgetError if pinning fails, OSError if mapping fails."""
        pool, under_way = self._pinning or (None, [])
        for each in under_way:
            if each.done():  # no memory is touched after a failure
                each.result()
        region = Region(nbytes)
        if pool is not None:
            under_way.append(pool.submit(region.pin, self._device))
        elif self.pin:
            region.pin(self._device)
        self._regions.append(region)
        self.on_region(region.nbytes)
        return region

    @contextlib.contextmanager
    def together(self):
        """Inside the block, one thread pins regions while the next one is touched. At the end of the block all are pinned, or the errors of
        `region` are raised.
        """
        if not self.pin:
            yield
            return
        with ThreadPoolExecutor(1, "infinity-pin") as pool:
            self._pinning = pool, []
            try:
                yield
                for each in self._pinning[1]:
                    each.result()
            finally:
                self._pinning = None

    def give_back(self, region: Region) -> None:
        """Free a region that nothing uses."""
        self._regions.remove(region)
        region.close()

    def close(self) -> None:
        """Free all regions, each after the last reference. Idempotent."""
        while self._regions:
            self._regions.pop().close()

    def __repr__(self) -> str:
        return f"Arena({_mib(self.nbytes)}, {len(self._regions)} regions{', pinned' if self.pin else ''})"


class Region:
    """A contiguous piece of an arena, aligned to 2 MiB. buffer: a memoryview of its nbytes."""

    def __init__(self, nbytes: int):
        if nbytes < 1:
            raise ValueError(f"a region of {nbytes} bytes: expected 1 byte or more")
        self.nbytes = _round_up(nbytes, PAGE_NBYTES)
        # mmap aligns to 4 KiB. The extra 2 MiB are never touched and cost only addresses.
        mapping = mmap.mmap(-1, self.nbytes + HUGE_NBYTES, flags=host_bytes.map_flags())
        _mappings.add(mapping)
        mapping.madvise(mmap.MADV_DONTFORK)
        start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_NBYTES
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, still correct
            mapping.madvise(mmap.MADV_HUGEPAGE, start, self.nbytes)
        self.buffer: memoryview | None = memoryview(mapping)[start : start + self.nbytes]
        self.address = torch.frombuffer(self.buffer, dtype=torch.uint8).data_ptr()
        self._tensors: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}
        host_bytes.work(self.nbytes, _touch, self.buffer)
        self._unpin: weakref.finalize | None = None

    def pin(self, device: int) -> None:
        """Register the memory with CUDA, once, with `device` as the current device. Raises BudgetError."""
        with torch.cuda.device(device):
            _register(self.address, self.nbytes)
        # If nobody closes the region: CUDA must not keep addresses that another mapping may get.
        self._unpin = weakref.finalize(self, _unregister, self.address, os.getpid(), device)
        self._unpin.atexit = False

    def tensor(self, dtype: torch.dtype, offset_nbytes: int, numel: int) -> torch.Tensor:
        """A 1-D view [numel] of the bytes from offset_nbytes; the same object each time."""
        key = (dtype, offset_nbytes, numel)
        tensor = self._tensors.get(key)
        if tensor is None:
            if self.buffer is None:
                raise UsageError("host memory is used after its arena was closed")
            if numel:
                tensor = torch.frombuffer(self.buffer, dtype=dtype, offset=offset_nbytes, count=numel)
            else:
                tensor = torch.empty(0, dtype=dtype, device="cpu")  # frombuffer refuses an empty tensor
            tensor = self._tensors.setdefault(key, tensor)  # another thread may have been first
        return tensor

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()
        self._tensors.clear()
        self.buffer = None

    def __repr__(self) -> str:
        return f"Region({_mib(self.nbytes)}{', pinned' if self._unpin is not None else ''})"


class Slots:
    """A pool of `count` equal leases of one region. Acquiring waits if no slot is free.

    slot_nbytes: nbytes rounded up to 4096, so every slot is aligned to 4096. peak: the most slots ever leased at once.
    """

    def __init__(self, arena: Arena, name: str, nbytes: int, count: int):
        self.name = name
        self.slot_nbytes = _round_up(nbytes, PAGE_NBYTES)
        self.count = count
        self.peak = 0
        self._region = arena.region(self.slot_nbytes * count)
        self._free = list(range(count))[::-1]
        self._changed = monitor()
        self._closed = False

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, timeout: float | None = None) -> Slot:
        """Lease a slot; waits until one is free. Raises TimeoutError after timeout seconds, UsageError once closed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._closed, timeout):
                raise TimeoutError(f"none of {self.count} {self.name} slots became free within {timeout} s")
            return self._lease()

    def try_acquire(self) -> Slot | None:
        """Lease a slot if one is free now."""
        with self._changed:
            return self._lease() if self._free or self._closed else None

    def close(self) -> None:
        """Refuse further leases: all waiting threads get UsageError. Existing leases stay valid until released. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _lease(self) -> Slot:
        if self._closed:
            raise UsageError(f"the {self.name} slots are closed")
        slot = Slot(self, self._free.pop())
        self.peak = max(self.peak, self.count - len(self._free))
        return slot

    def _take_back(self, slot: Slot) -> None:
        with self._changed:
            slot._leased()
            slot._slots = None
            self._free.append(slot.index)
            self._changed.notify()

    def __repr__(self) -> str:
        return f"Slots({self.name}, {self.num_free} of {self.count} free, {_mib(self.slot_nbytes)} each)"


class Slot:
    """A lease of slot_nbytes bytes. index: position in the pool."""

    __slots__ = ("index", "nbytes", "_slots")

    def __init__(self, slots: Slots, index: int):
        self.index = index
        self.nbytes = slots.slot_nbytes
        self._slots: Slots | None = slots

    @property
    def buffer(self) -> memoryview:
        """The slot's bytes, writable."""
        begin = self.index * self.nbytes
        return self._leased()._region.buffer[begin : begin + self.nbytes]

    def tensor(self, dtype: torch.dtype, offset_nbytes: int, numel: int) -> torch.Tensor:
        """A 1-D view [numel] of the bytes from offset_nbytes; the same object each time that this memory is leased."""
        end_nbytes = offset_nbytes + numel * dtype.itemsize
        if offset_nbytes < 0 or end_nbytes > self.nbytes:
            raise ValueError(f"bytes {offset_nbytes} to {end_nbytes} were requested of a slot of {self.nbytes}")
        return self._leased()._region.tensor(dtype, self.index * self.nbytes + offset_nbytes, numel)

    def release(self) -> None:
        """Free the lease. Raises UsageError if already free."""
        self._leased()._take_back(self)

    def _leased(self) -> Slots:
        if self._slots is None:
            raise UsageError(f"slot {self.index} is used after its release")
        return self._slots

    def __repr__(self) -> str:
        name = self._slots.name if self._slots else "released"
        return f"Slot({self.index}, {_mib(self.nbytes)}, {name})"


class Area:
    """A byte range of a region: nbytes from offset_nbytes on."""

    __slots__ = ("nbytes", "offset_nbytes", "region")

    def __init__(self, region: Region, offset_nbytes: int, nbytes: int):
        self.region = region
        self.offset_nbytes = offset_nbytes
        self.nbytes = nbytes

    @property
    def buffer(self) -> memoryview:
        return self.region.buffer[self.offset_nbytes : self.offset_nbytes + self.nbytes]

    @property
    def address(self) -> int:
        return self.region.address + self.offset_nbytes

    def tensor(self, dtype: torch.dtype, offset_nbytes: int, numel: int) -> torch.Tensor:
        """Like `Region.tensor`, relative to the area's start."""
        return self.region.tensor(dtype, self.offset_nbytes + offset_nbytes, numel)


class Heap:
    """Areas of any size, for data of unpredictable sizes. The heap takes regions when needed, and keeps a region until a larger one needs
    the budget.

    budget_nbytes: the most bytes of all regions. peak_nbytes: the most bytes ever in use.
    """

    def __init__(self, arena: Arena, budget_nbytes: int):
        self.budget_nbytes = budget_nbytes // PAGE_NBYTES * PAGE_NBYTES
        self.nbytes = self.used_nbytes = self.peak_nbytes = 0
        self._arena = arena
        self._gaps: list[tuple[Region, list[tuple[int, int]]]] = []  # each region's free ranges (begin, end), ascending
        self._monitor = monitor()  # no lock: in a simulation a new region takes time, and threads that give areas back wait for the heap meanwhile

    @property
    def free_nbytes(self) -> int:
        return self.budget_nbytes - self.used_nbytes

    def take(self, nbytes: int) -> Area | None:
        """The first gap of at least nbytes, rounded up to 4096. None if no gap is large enough, and budget or memory for another region is
        missing.
        """
        nbytes = _round_up(max(nbytes, 1), PAGE_NBYTES)
        with self._monitor:
            for region, gaps in self._gaps:
                for index, (begin, end) in enumerate(gaps):
                    if end - begin >= nbytes:
                        return self._give(region, gaps, index, nbytes)
            if self.nbytes + nbytes - sum(region.nbytes for region, _ in self._empty()) > self.budget_nbytes:
                return None
            self._give_empty_back(nbytes)
            try:
                region = self._arena.region(min(max(nbytes, HEAP_REGION_NBYTES), self.budget_nbytes - self.nbytes))
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                return None
            self.nbytes += region.nbytes
            self._gaps.append((region, [(0, region.nbytes)]))
            return self._give(region, self._gaps[-1][1], 0, nbytes)

    def shrink(self) -> None:
        """Give empty regions back to the arena."""
        with self._monitor:
            self._give_empty_back(self.budget_nbytes + 1)

    def _give_empty_back(self, nbytes: int) -> None:
        """Free empty regions until a region of nbytes fits the budget."""
        for region, gaps in self._empty():
            if self.nbytes + nbytes > self.budget_nbytes:
                self._gaps.remove((region, gaps))
                self.nbytes -= region.nbytes
                self._arena.give_back(region)

    def _empty(self) -> list[tuple[Region, list[tuple[int, int]]]]:
        return [(region, gaps) for region, gaps in self._gaps if gaps == [(0, region.nbytes)]]

    def give_back(self, area: Area) -> None:
        """Free an area; the caller must not use the area any more."""
        begin, end = area.offset_nbytes, area.offset_nbytes + area.nbytes
        with self._monitor:
            gaps = next(gaps for region, gaps in self._gaps if region is area.region)
            index = bisect.bisect(gaps, (begin, end))
            if index < len(gaps) and gaps[index][0] == end:
                end = gaps.pop(index)[1]
            if index and gaps[index - 1][1] == begin:
                index -= 1
                begin = gaps.pop(index)[0]
            gaps.insert(index, (begin, end))
            self.used_nbytes -= area.nbytes

    def _give(self, region: Region, gaps: list[tuple[int, int]], index: int, nbytes: int) -> Area:
        begin, end = gaps[index]
        gaps[index : index + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
        self.used_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        return Area(region, begin, nbytes)

    def __repr__(self) -> str:
        return f"Heap({_mib(self.used_nbytes)} of {_mib(self.budget_nbytes)} used)"


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _touch(buffer: memoryview) -> None:
    """Make the kernel provide every page now. One thread zeroes 3 GB/s at best; several threads work in parallel."""

    def touch(begin: int) -> None:
        torch.frombuffer(buffer[begin : begin + _TOUCH_NBYTES], dtype=torch.uint8)[::PAGE_NBYTES].zero_()

    begins = range(0, len(buffer), _TOUCH_NBYTES)
    if len(begins) == 1:
        touch(0)
        return
    num_threads = min(len(begins), _TOUCH_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(touch, begins))


def _unregister(address: int, pid: int, device: int) -> None:
    if pid == os.getpid():
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)


def _register(address: int, nbytes: int) -> None:
    error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
    if error == torch.cuda.cudart().cudaError.success:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "any amount" if limit == resource.RLIM_INFINITY else _mib(limit)
    raise BudgetError(
        f"pinning {_mib(nbytes)} of host memory failed ({error}); memlock allows {allowed}. Raise this limit with "
        "`ulimit -l unlimited` (docker: `--ulimit memlock=-1`, systemd: `LimitMEMLOCK=infinity`), or lower host_memory."
    )
