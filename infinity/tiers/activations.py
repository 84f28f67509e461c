"""Saved activations away from the device: to host memory while forward goes on, past its budget to NVMe or not at all, back before backward.

Knows storages, host memory, a swap, and parts of a graph by names that are given to it. Must not know modules, autograd's graph or weights:
whoever packs and unpacks saved tensors asks here, in the training thread. Over 500 lines because a storage's way out, back and to its end is
one protocol.
"""

# [Note: what is moved]
# The unit is a storage, as it is what plain PyTorch keeps alive: views of one are moved once, whatever their shapes and
# strides, and are views of one storage again when they are back. A tensor that is a small part of its storage stays, as it may
# be a slice of somebody's data set; so do small ones, and model buffers, which stay on the device anyway.
#
# [Note: what lives when]
#
#     DEVICE --copy begun--> LEAVING --let go--> HOST --copied back--> HOME
#                                                | ^
#                                         write  v | read
#                                WRITING --> NVME --> READING
#
# A storage stays on the DEVICE until as many bytes as it has were saved after it, for what was saved last is needed first, and on
# demand until host memory has room for it, while smaller ones leave. At most NUM_LEAVING are LEAVING at a time. Both are referred
# to until they are let go; the compute stream waits for the copy then, so that what is allocated in its place is written after it
# was read. HOME is a new storage; it lives until the last saved tensor of it is dropped. While somebody else keeps the original
# alive, nothing comes back: it is used itself. Whether it was changed is told by a tensor of no bytes that shares its version counter.
#
# Host memory is given to another storage once the last transfer from or to it is over. The first saved are needed last, so
# they are the ones written to NVMe; backward fetches in reverse order, and reads ahead as far as host memory allows. Where parts of the
# graph go backward in another order than the reverse one, such as micro-batches that pass a layer together, whoever saves says which part
# it is in, and which come after one.

from __future__ import annotations

import bisect
import contextlib
import ctypes
import enum
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable

import torch

import aio_ext
from infinity.errors import BudgetError, SwapError, UsageError
from infinity.sizes import format_bytes
from infinity.system.arena import PAGE_NBYTES, Area, Arena, Heap
from infinity.system.failure import FirstFailure
from infinity.system.interrupts import uninterrupted
from infinity.system.lanes import Job, Lane, Monitor, Need
from infinity.system.waits import waits

MIN_NBYTES = 64 << 10  # smaller storages stay: a copy would cost more than it frees
MIN_PART = 1 / 4  # of its storage that a tensor must be to move it
NUM_LEAVING = 2  # storages under way to the host: one is copied while the next is filled
NUM_COMING = 2  # storages on the device ahead of their use
LOOK_AHEAD = 32  # storages that are looked at for it


class Place(enum.Enum):
    """Of a storage's bytes, see [Note: what lives when]."""

    DEVICE = "device"
    LEAVING = "leaving"
    HOST = "host"
    WRITING = "writing"
    NVME = "nvme"
    READING = "reading"
    HOME = "home"


_MOVES = {
    (Place.DEVICE, Place.LEAVING),
    (Place.LEAVING, Place.HOST),
    (Place.HOST, Place.HOME),
    (Place.HOST, Place.WRITING),
    (Place.WRITING, Place.NVME),
    (Place.WRITING, Place.HOST),  # it was wanted before its memory was given away, or could not be written
    (Place.NVME, Place.READING),
    (Place.READING, Place.HOST),
    (Place.READING, Place.NVME),  # another one needed its memory more
}


class Copy:
    """A copy from or to the device. `order` lets what the device does next come after it, `wait` lets this thread."""

    __slots__ = ("_device", "_event", "_job")

    def __init__(self, *, job: Job | None = None, event: torch.cuda.Event | None = None, device: torch.device | None = None):
        self._job, self._event, self._device = job, event, device

    @property
    def done(self) -> bool:
        return self._job.done if self._event is None else self._event.query()

    def order(self) -> None:
        if self._event is None:
            self._job.wait()
        else:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        if self._event is None:
            self._job.wait()
        else:
            self._event.synchronize()


class Kept:
    """The bytes of one storage, needed until backward."""

    def __init__(self, number: int, tensor: torch.Tensor, storage: torch.UntypedStorage, key: tuple[int, int]):
        self.number = number  # in order of saving
        self.nbytes = storage.nbytes()
        self.key = key
        self.place = Place.DEVICE
        self.memory: Area | None = None
        self.extent = None
        self.copy: Copy | None = None  # the last one
        self.read = None  # the transfer from NVMe
        self.read_number = 0  # in order of reading
        self.home: torch.UntypedStorage | None = None
        self.looks: set[Look] = set()  # of saved tensors
        self.part: Hashable = None  # of the graph
        self.saved_until = 0  # bytes that were saved when it was, all storages together
        self.wanted = False  # again, while it is being written
        self.was_cut = False  # before it left the device
        self.watch = tensor.detach()
        self.watch.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._original = storage._weak_ref()

    def counts_versions_of(self, tensor: torch.Tensor) -> bool:
        """Whether its version counter is the tensor's; parts of a storage may have their own, such as those of unsafe_chunk."""
        version = self.watch._version
        with torch.autograd._unsafe_preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            return self.watch._version != version

    def original(self) -> torch.UntypedStorage | None:
        """The storage that was saved, if it is still alive."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._original)
        return storage if storage is not None and storage.nbytes() >= self.nbytes else None

    def become(self, place: Place) -> None:
        assert (self.place, place) in _MOVES, f"{self}: {place} from {self.place}"
        self.place = place

    def __del__(self):
        torch.UntypedStorage._free_weak_ref(self._original)

    def __repr__(self):
        return f"Kept({self.number}, {format_bytes(self.nbytes)}, {self.place.value})"


class Look(Need):
    """What a saved tensor needs."""

    __slots__ = ("kept",)


class SavedTensor:
    """A tensor that autograd saved: a view of what is kept."""

    __slots__ = ("__weakref__", "_dtype", "_layout", "_version", "kept")

    def __init__(self, kept: Kept, tensor: torch.Tensor, dropped: deque[Look]):
        self.kept = kept
        self._layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self._version = tensor._version
        self._dtype = tensor.dtype
        look = Look(self, dropped.append)
        look.kept = kept
        kept.looks.add(look)

    @property
    def versions(self) -> tuple[int, int]:
        """When it was saved, and now."""
        return self._version, self.kept.watch._version

    @property
    def shape(self) -> tuple[int, ...]:
        return self._layout[1]

    def look_into(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._layout)


class Parts:
    """Parts of a graph that do not go backward in the reverse order: which storages are of which."""

    def __init__(self):
        self._part: Hashable = None  # that is being saved, if there are any
        self._parts_after: Callable[[Hashable], Iterable[Hashable]] = lambda part: ()
        self._numbers: dict[Hashable, list[int]] = {}

    @contextlib.contextmanager
    def saving(self, part: Hashable, parts_after: Callable[[Hashable], Iterable[Hashable]]):
        """What is saved meanwhile is of this part. parts_after(part): those that go backward after it, in their order."""
        self._part, self._parts_after = part, parts_after
        try:
            yield
        finally:
            self._part = None

    def add(self, kept: Kept) -> None:
        kept.part = self._part
        if kept.part is not None:
            self._numbers.setdefault(kept.part, []).append(kept.number)

    def forget(self, kept: Kept) -> None:
        if kept.part is not None:
            self._numbers[kept.part].remove(kept.number)
            if not self._numbers[kept.part]:
                del self._numbers[kept.part]

    def needed_after(self, kept: Kept) -> Iterable[int]:
        """Numbers, the next one first."""
        if kept.part is None:
            return range(kept.number - 1, -1, -1)
        own = (earlier for earlier in reversed(self._numbers[kept.part]) if earlier < kept.number)
        others = (reversed(self._numbers.get(part, ())) for part in self._parts_after(kept.part))
        return itertools.chain(own, itertools.chain.from_iterable(others))


class Extents:
    """Room on NVMe, that is used again. nbytes: all of it."""

    def __init__(self, swap):
        self.nbytes = 0
        self._swap = swap
        self._free: list = []  # smallest first

    def take(self, nbytes: int):
        """An extent of nbytes or more, 4096 or a multiple. Raises SwapError."""
        index = bisect.bisect_left(self._free, nbytes, key=_size)
        if index < len(self._free):
            return self._free.pop(index)
        unit = max(1 << nbytes.bit_length() - 4, PAGE_NBYTES)  # sizes alike share theirs
        extent = self._swap.extend(-(-nbytes // unit) * unit)
        self.nbytes += extent.nbytes
        return extent

    def give_back(self, extent) -> None:
        """Nothing is in it."""
        bisect.insort(self._free, extent, key=_size)


def _size(extent) -> int:
    return extent.nbytes


class Activations:
    """Keeps saved activations in host memory, at most budget_nbytes of it, and what does not fit there on NVMe.

    swap: None where nothing is to go there. to_nvme: write all of them; host memory only passes them on. who: begins the text of errors,
    such as "rank 1 of 2, ". on_demand: saves nothing until it is switched on, and what has no room then stays on the device. What was saved is
    restored in either case.
    """

    def __init__(self, arena: Arena, swap, device: torch.device, budget_nbytes: int, *, to_nvme: bool, on_demand: bool = False,
                 who: str = "", failure: FirstFailure | None = None):
        self.is_on = not on_demand
        self.on_demand = on_demand
        self.has_refused = False  # since it was switched: something stays, or did
        self.device = device
        self.to_nvme = to_nvme
        self.who = who
        self.swap = swap
        self.heap = Heap(arena, budget_nbytes)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.failure = failure or FirstFailure()
        self.copies = Lane("activations", self.failure, "the copy of a saved activation")  # does on the CPU what the stream does on CUDA
        self.writer = Lane("activations-cn", self.failure)
        self._changed = Monitor()  # guards what the writer changes: places, their memory and the counts
        self._kept: dict[int, Kept] = {}  # by number
        self._by_storage: dict[tuple[int, int], Kept] = {}  # by address and version
        self._staying: dict[int, torch.UntypedStorage] = {}  # by number, oldest first
        self._leaving: dict[int, torch.UntypedStorage] = {}  # whose copies are under way
        self._coming: dict[int, Kept] = {}  # fetched ahead
        self._cooling: deque = deque()  # (transfer, memory that is free when it is over)
        self._dropped: deque[Look] = deque()  # in whatever thread
        self._extents = Extents(swap)
        self._fixed: set[int] = set()  # addresses of buffers
        self._num_kept = self._largest_nbytes = self._saved_nbytes = self._moved_nbytes = 0
        self._num_writing = self._num_written = self._num_reads = 0
        self.parts = Parts()
        self._closed = False

    @contextlib.contextmanager
    def switched(self, is_on: bool):
        before, self.is_on, self.has_refused = self.is_on, is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def begin_forward(self, buffers: Iterable[torch.Tensor]) -> None:
        """buffers: the model's, which stay where they are."""
        self.drain()
        self._fixed = {buffer.untyped_storage()._cdata for buffer in buffers}

    @uninterrupted
    def save(self, tensor: torch.Tensor) -> SavedTensor | None:
        """Keep a tensor's bytes; None if it is to stay. Raises BudgetError if they may not and no memory can hold them, SwapError."""
        if type(tensor) is not torch.Tensor or tensor.device != self.device or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_NBYTES:
            return None
        if storage._cdata in self._fixed or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return None
        self.drain()
        key = (storage._cdata, tensor._version)
        kept = self._by_storage.get(key)
        if kept is None or kept.nbytes != storage.nbytes() or not kept.counts_versions_of(tensor):
            if tensor.numel() * tensor.element_size() < MIN_PART * storage.nbytes():
                return None
            kept = self._by_storage[key] = self._keep(tensor, storage, key)
        return SavedTensor(kept, tensor, self._dropped)

    @uninterrupted
    def restore(self, saved: SavedTensor) -> torch.Tensor:
        """The tensor, on the device; what was saved before it is fetched ahead. Raises SwapError."""
        self.drain()
        kept = saved.kept
        storage = kept.original()
        if storage is None:
            if self._closed:
                raise UsageError("a backward pass after close(): the engine is closed, and what was saved for it is gone")
            while kept.place is Place.LEAVING:
                self._let_go()
            if kept.place is Place.DEVICE or kept.was_cut:
                raise UsageError(f"the storage of a saved tensor of shape {saved.shape} was cut before it left the device")
            if kept.place is not Place.HOME:
                self._to_host(kept)
                self._to_device(kept)
            self._coming.pop(kept.number, None)
            kept.copy.order()
            storage = kept.home
        self._fetch_ahead(kept.number)
        return saved.look_into(storage)

    def stats(self) -> dict[str, int]:
        """Bytes: moved to the host so far, of host memory, in use there at most, and of room on NVMe."""
        return {
            "moved_nbytes": self._moved_nbytes,
            "host_nbytes": self.heap.nbytes,
            "host_peak_nbytes": self.heap.peak_nbytes,
            "nvme_nbytes": self._extents.nbytes,
        }

    @uninterrupted
    def shrink(self) -> None:
        """Give host memory back in which nothing is."""
        self.drain()
        while self._cooling:
            self._cooling[0][0].wait()
            self._reclaim()
        self.heap.shrink()

    def close(self) -> None:
        self._closed = True
        self.copies.close()
        self.writer.close()
        if self.stream is not None:
            self.stream.synchronize()
        self._staying.clear()
        self._leaving.clear()
        self._coming.clear()

    # Forward: to the host, and on to NVMe.

    def _keep(self, tensor: torch.Tensor, storage: torch.UntypedStorage, key: tuple[int, int]) -> Kept:
        self._largest_nbytes = max(self._largest_nbytes, storage.nbytes())
        kept = Kept(self._num_kept, tensor, storage, key)
        self._num_kept += 1
        self._kept[kept.number] = kept
        self.parts.add(kept)
        self._staying[kept.number] = storage
        self._saved_nbytes += kept.nbytes
        kept.saved_until = self._saved_nbytes
        try:
            self._send_due()
        except BaseException:  # nothing is saved then
            self._forget(kept)
            raise
        return kept

    def _send_due(self) -> None:
        """Send those after which enough was saved; on demand what has no room stays."""
        refused_nbytes, moved_nbytes = self._saved_nbytes + 1, self._moved_nbytes
        for number in list(self._staying):
            kept = self._kept[number]
            if kept.nbytes >= refused_nbytes or self._saved_nbytes - kept.saved_until < kept.nbytes:
                continue
            try:
                self._send(kept)
            except BudgetError:
                if not self.on_demand:
                    raise
                refused_nbytes, self.has_refused = kept.nbytes, True
        if self._leaving and refused_nbytes <= self._saved_nbytes and self._moved_nbytes == moved_nbytes:
            self._let_go()  # of which nothing that leaves later would

    def _send(self, kept: Kept) -> None:
        """Begin to copy it."""
        kept.memory = self._take(kept.nbytes)
        storage = self._leaving[kept.number] = self._staying.pop(kept.number)
        kept.was_cut = storage.nbytes() < kept.nbytes
        kept.copy = self._copy(kept.memory, storage, min(kept.nbytes, storage.nbytes()), out=True)
        kept.become(Place.LEAVING)
        self._moved_nbytes += kept.nbytes
        if len(self._leaving) > NUM_LEAVING:
            self._let_go()
        if self.heap.free_nbytes < 2 * self._largest_nbytes:  # so that the next ones need not wait for it
            self._write_oldest()

    def _let_go(self) -> None:
        """What left first may be overwritten on the device by what is done there from now on."""
        number = next(iter(self._leaving))
        kept = self._kept[number]
        kept.copy.order()
        del self._leaving[number]
        kept.become(Place.HOST)
        if self.to_nvme:
            self._write(kept)

    def _take(self, nbytes: int) -> Area:
        """Host memory; if there is none, that of what is needed last, once it is on NVMe."""
        while True:
            num_written = self._num_written
            self._reclaim()
            if (piece := self.heap.take(nbytes)) is not None:
                return piece
            self.failure.check()
            with self._changed:
                if self._num_writing or self._num_written != num_written:
                    with waits("room in host memory for saved activations", self.writer.ident):
                        self._changed.wait_for(lambda: self._num_written != num_written)
                    continue
            if self._cooling:
                self._cooling[0][0].wait()
            elif self.swap is None or not (self._write_oldest() or self._give_up_last()):
                if self.swap is None or not self._leaving:  # else what leaves can be written then
                    raise _no_room(self.who, nbytes, self.heap.budget_nbytes)
                self._let_go()

    def _write_oldest(self) -> bool:
        if self.swap is None:
            return False
        oldest = next((kept for kept in self._kept.values() if kept.place is Place.HOST), None)
        if oldest is not None:
            self._write(oldest)
        return oldest is not None

    def _give_up_last(self) -> bool:
        """Let go of what was read ahead, and is needed last; it is on NVMe still."""
        reading = (kept for kept in self._kept.values() if kept.place is Place.READING)
        last = max(reading, key=lambda kept: kept.read_number, default=None)
        if last is not None:
            with contextlib.suppress(SwapError):  # it may never be needed
                last.read.wait()
            last.become(Place.NVME)
            self.heap.give_back(last.memory)
            last.memory = None
        return last is not None

    def _reclaim(self) -> None:
        while self._cooling and self._cooling[0][0].done:
            self.heap.give_back(self._cooling.popleft()[1])

    def _write(self, kept: Kept) -> None:
        """Begin to move it from host memory to NVMe."""
        if kept.extent is None:
            kept.extent = self._extents.take(kept.memory.nbytes)
        kept.wanted = False
        with self._changed:
            kept.become(Place.WRITING)
            self._num_writing += 1
        self.writer.push(lambda: self._run_write(kept), f"activation {kept.number}")

    def _run_write(self, kept: Kept) -> None:
        error = None
        try:
            kept.copy.wait()
            self.swap.write(kept.extent, kept.memory.buffer, what=_name(self.who, kept)).wait()
        except BaseException as caught:
            error = caught
            self.failure.note(error, f"activation {kept.number} ({self.writer.name}): ")  # else who waits would begin it again
        with self._changed:
            if error is not None or kept.wanted:
                kept.become(Place.HOST)
            else:
                kept.become(Place.NVME)
                self.heap.give_back(kept.memory)
                kept.memory = None
            self._num_writing -= 1
            self._num_written += 1
            self._changed.notify_all()
        if error is not None:
            raise error

    # Backward: to the host, and on to the device.

    def _to_host(self, kept: Kept) -> None:
        """Have its bytes in host memory."""
        with self._changed:
            kept.wanted = True
            self._await_write(kept)
        if kept.place is Place.NVME:
            self._read(kept, self._take(kept.nbytes), aio_ext.DEMAND)
        if kept.place is Place.READING:
            kept.read.promote()
            kept.read.wait()
            kept.become(Place.HOST)

    def _read(self, kept: Kept, memory: Area, priority: int) -> None:
        kept.memory = memory
        kept.become(Place.READING)
        self._num_reads += 1
        kept.read_number = self._num_reads
        kept.read = self.swap.read(kept.extent, memory.buffer, priority=priority, what=_name(self.who, kept))

    def _to_device(self, kept: Kept) -> None:
        kept.home = torch.UntypedStorage(kept.nbytes, device=self.device)
        kept.copy = self._copy(kept.memory, kept.home, kept.nbytes, out=False)
        self._cooling.append((kept.copy, kept.memory))
        kept.memory = None
        kept.become(Place.HOME)

    def _fetch_ahead(self, number: int) -> None:
        """Bring what is needed after this one closer: to the device, or to host memory while there is room."""
        room = NUM_COMING - len(self._coming)
        reads = True
        self._reclaim()
        for earlier in list(itertools.islice(self.parts.needed_after(self._kept[number]), LOOK_AHEAD)):
            kept = self._kept.get(earlier)
            if kept is None or kept.place in (Place.DEVICE, Place.LEAVING, Place.HOME) or kept.original() is not None:
                continue
            with self._changed:
                kept.wanted = True  # if it is being written, its memory stays
                if kept.place is Place.WRITING:
                    continue
            if kept.place is Place.NVME and reads:
                memory = self.heap.take(kept.nbytes)
                reads = memory is not None
                if reads:
                    self._read(kept, memory, aio_ext.PREFETCH)
            if kept.place is Place.READING and kept.read.done:
                self._to_host(kept)
            if kept.place is Place.HOST and room > 0:
                self._to_device(kept)
                self._coming[earlier] = kept
                room -= 1
            elif not reads:
                break

    def _copy(self, memory: Area, storage: torch.UntypedStorage, nbytes: int, *, out: bool) -> Copy:
        """Between host memory and a storage on the device, after what the device was given so far."""
        if self.stream is None:
            ends = (memory.address, storage.data_ptr()) if out else (storage.data_ptr(), memory.address)
            return Copy(job=self.copies.push(lambda _alive=(memory, storage): ctypes.memmove(*ends, nbytes)))
        on_host = torch.frombuffer(memory.buffer, dtype=torch.uint8, count=nbytes)
        on_device = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (nbytes,), (1,))
        self.stream.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self.stream):
            if out:
                on_host.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(on_host, non_blocking=True)
            return Copy(event=self.stream.record_event(), device=self.device)

    def drain(self) -> None:
        """Forget what no saved tensor needs any more."""
        while self._dropped:
            look = self._dropped.popleft()
            look.kept.looks.discard(look)
            if not look.kept.looks:
                self._forget(look.kept)

    def _forget(self, kept: Kept) -> None:
        del self._kept[kept.number]
        self.parts.forget(kept)
        if self._by_storage.get(kept.key) is kept:
            del self._by_storage[kept.key]
        self._staying.pop(kept.number, None)
        if self._leaving.pop(kept.number, None) is not None or self._coming.pop(kept.number, None) is not None:
            kept.copy.order()  # the device memory is free for what comes next
        with self._changed:
            kept.wanted = True
            self._await_write(kept)
        if kept.memory is not None:
            self._cooling.append((kept.read if kept.place is Place.READING else kept.copy, kept.memory))
        if kept.extent is not None:
            self._extents.give_back(kept.extent)

    def _await_write(self, kept: Kept) -> None:
        if kept.place is Place.WRITING:
            with waits(f"the write of activation {kept.number}", self.writer.ident):
                self._changed.wait_for(lambda: kept.place is not Place.WRITING)


def _name(who: str, kept: Kept) -> str:
    return f"{who}activation {kept.number}: "


def _no_room(who: str, nbytes: int, budget_nbytes: int) -> BudgetError:
    return BudgetError(
        f"{who}a saved activation of {format_bytes(nbytes)} does not fit into what is left of host_memory for activations, "
        f"{format_bytes(budget_nbytes)}. Raise host_memory, or use activations='device'."
    )
