"""Moves records between storage and host memory: the nc and cn links.

A request asks for the weights, the states or the gradient of a chunk in host memory. The mover grants the request when a slot is free.
The reader thread picks the next request by the policy of plan/slots.py. A request that waits for one kind of slot never blocks another kind.
Must not know the device, plans or arithmetic.
"""

# [Note: order of reads and writes]
# An update pins its entry before it computes, and unpins the entry when the write is over. An entry leaves host memory only when it is clean.
# So a request for a chunk with an update under way gets the entry of that update, and waits for the update. A request that finds no entry
# reads the bytes of a completed write. (aio_ext also keeps overlapping reads and writes in order, but compression.py submits writes late.)

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence

import torch

import aio_ext
from infinity.errors import UsageError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.optim.shard import Shard
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS, Record
from infinity.plan.slots import Entry, HostCache, HostState, Requests, keeps
from infinity.system.events import Events, now
from infinity.system.failure import FirstFailure
from infinity.system.lanes import Job, Lane
from infinity.system.threads import Monitor, threads
from infinity.system.waits import waits
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.extents_on_demand import ExtentsOnDemand


class Request(Job):
    """A request for one kind of segments of a chunk in host memory. The result is the entry. With `pin`, the entry is pinned."""

    __slots__ = ("_writer", "chunk", "is_dropped", "kind", "number", "pin")

    def __init__(self, chunk: ChunkState, kind: str, pin: bool, writer: Lane):
        """writer: the lane whose writes free slots."""
        super().__init__(None)
        self.chunk = chunk
        self.kind = kind
        self.pin = pin
        self.is_dropped = False
        self._writer = writer

    @property
    def worker(self) -> int | None:
        return self._writer.ident

    @property
    def is_read(self) -> bool:
        """Whether the copy is in host memory, or this request brings none: it has failed, or was dropped for another one."""
        source = self.result.source if self.done and self.result is not None else None
        return self.is_dropped or (self.done and (source is None or source.done))

    def in_words(self) -> str:
        return _room(self.chunk, self.kind)

    def refuse(self, error: BaseException) -> None:
        self._error = error
        self.finish()


class Lease:
    """Host copies of a chunk, by kind. They stay pinned for the holder until they are written or given back."""

    __slots__ = ("chunk", "entries", "records")

    def __init__(self, records: RecordMover, chunk: ChunkState, entries: dict[str, Entry]):
        self.records = records
        self.chunk = chunk
        self.entries = entries

    @property
    def shard(self) -> Shard:
        """The segments of the record in these copies; a gradient has none."""
        record, found = self.chunk.record, {}
        for kind, entry in self.entries.items():
            found |= segments(record, kind, entry.memory.tensor)
        return Shard(record.format, found)

    def begin_change(self) -> bool:
        """Announce that the holder changes the chunk's gradient, or the whole record. Returns whether the copies were clean."""
        if WEIGHTS in self.entries:
            self.chunk.begin_change(self)
        records, clean = self.records, True
        with records.lock:
            for entry in self.entries.values():
                while entry.state is HostState.WRITING:
                    records.failure.check()
                    with waits(f"the write of {self.chunk.title}", records._writer.ident):
                        records.lock.wait()
                if entry.state is HostState.DIRTY:
                    clean = False
                else:
                    entry.become(HostState.DIRTY)
        return clean

    def write_back(self, catch_up: Callable[[memoryview], None] | None = None) -> None:
        """Write dirty copies to storage, and give each copy back after the write. A resident copy stays. catch_up: the moments in storage may
        be late, see `Compressor.write`."""
        records, chunk, started = self.records, self.chunk, []
        try:
            for kind, entry in self.entries.items():
                with records.lock:
                    if entry.resident:
                        entry.become(HostState.CLEAN)
                        records.unpin(chunk, kind, entry)
                        continue
                    entry.become(HostState.WRITING)
                how = {"catch_up": catch_up} if catch_up is not None and kind == STATES else {}
                transfer = records.storage.write(*records._place(chunk, kind, entry), what=records._name(chunk, kind), **how)
                started.append((kind, entry, transfer, now()))
            if started:
                records._writer.push(functools.partial(records._finish_writes, chunk, started))
        except BaseException as error:  # also an interrupt: other threads would wait forever for the end of such a write
            records.failure.note(error)
            raise

    def give_back(self) -> None:
        """Unpin the copies as they are."""
        for kind, entry in self.entries.items():
            self.records.unpin(self.chunk, kind, entry)


def segments(record: Record, kind: str, view: Callable[[torch.dtype, int, int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Segments of one copy, by name, 1-D. view: makes a tensor of the copy's memory from a dtype, an offset in bytes and a number of values."""
    found = record.of(kind)
    return {segment.name: view(TORCH_DTYPES[segment.dtype], offset, segment.count(record.numel)) for segment, offset, _ in found}


def _room(chunk: ChunkState, kind: str) -> str:
    """A phrase for reports: the thing that a request without a slot waits for."""
    return f"room in host memory for the {kind} of {chunk.title}"


class RecordMover:
    """Moves records between storage and host memory. keep: clean copies stay in their slots until another chunk needs the slot."""

    def __init__(
        self,
        storage,
        caches: dict[str, HostCache],
        lock: Monitor,
        events: Events,
        failure: FirstFailure,
        *,
        keep: bool,
        who: str = "",
    ):
        self.storage = storage  # the storage, or the compressor in front of it; None if no record has its home in storage
        self.caches = caches
        self.lock = lock
        self.events = events
        self.keep = keep
        self.who = who  # the first words of an error, such as "rank 1 of 2, "
        self.on_read = None  # runs before each read, in the reader thread; tests inject delays here
        self.failure = failure  # of a write or an update, whose slots are lost: threads that wait for a slot look here
        failure.wakes(lock)
        self._waiting = Requests()
        self._closing = False
        self._writer = Lane("cn", failure)
        self._settler = Lane("nc-settle", failure)
        self._reader = threads().start(self._read_loop, "infinity-nc")

    def request(self, chunk: ChunkState, kind: str, *, urgent: bool = False, pin: bool = True) -> Request:
        """Ask for a copy. pin=False reads ahead: another chunk may take the slot before anybody uses the copy.

        The read begins here if a slot is free and no other request waits. Otherwise the read begins in the reader thread.
        """
        with self.lock:
            request = Request(chunk, kind, pin, self._writer)
            self._waiting.ask(request, urgent=urgent)
            entry = self.caches[kind].find(chunk)
            try:
                may_grant = (entry is not None and entry.resident) or not (self._waiting or self.on_read)  # a resident copy needs no slot
                if not may_grant or not self._grant(request):
                    self._waiting.put(request)
                    self.lock.notify_all()
            except BaseException:
                self._withdraw(request)
                raise
        return request

    def hurry(self, request: Request) -> None:
        """A thread waits for the request: this request and earlier requests of the same kind overtake all reads ahead."""
        with self.lock:
            self._waiting.hurry(request)
            self.lock.notify_all()
        source = request.result.source if request.done and request.result is not None else None
        if source is not None:
            source.promote()

    def hurry_all(self) -> None:
        """The training thread waits for updates: all requests so far overtake reads ahead, in the order of asking."""
        with self.lock:
            self._waiting.hurry_all()
            self.lock.notify_all()

    def settle(self, entry: Entry) -> None:
        """Wait until the read of the entry is over."""
        source = entry.source
        if source is not None:
            source.wait()
        with self.lock:
            if entry.state is HostState.READING:
                entry.become(HostState.CLEAN)
                self.lock.notify_all()

    @contextlib.contextmanager
    def lease(self, chunk: ChunkState, *kinds: str, write: bool = False, fresh: bool = False):
        """Copies of these kinds, by default of the whole record, pinned and read inside the block. fresh: the mover reads nothing, and the
        block fills the copies.

        write: the block changes the copies. The mover writes them to storage after the block, also after an error. A gradient is written when
        another chunk needs the slot.
        """
        kinds = kinds or ((WEIGHTS, STATES) if chunk.trainable else (WEIGHTS,))
        lease = Lease(self, chunk, {kind: self.fresh(chunk, kind) for kind in kinds}) if fresh else self.obtain(chunk, kinds)
        writes_back = False
        try:
            if write:
                lease.begin_change()
                writes_back = GRADIENTS not in kinds
            yield lease
        finally:
            if writes_back:
                lease.write_back()
            else:
                lease.give_back()

    def fresh(self, chunk: ChunkState, kind: str) -> Entry:
        """A pinned, clean entry for the caller to fill, without a read."""
        cache = self.caches[kind]
        with self.lock:
            while True:
                self.failure.check()
                entry = cache.find(chunk) or cache.claim(chunk, urgent=True)
                if entry is not None:
                    break
                if not cache.frees_soon():
                    self._make_clean(kind)
                with waits(_room(chunk, kind), self._writer.ident):
                    self.lock.wait()
            entry.pin()
            if entry.state is HostState.READING and entry.source is None:
                entry.become(HostState.CLEAN)
        self.settle(entry)
        return entry

    def obtain(self, chunk: ChunkState, kinds: Iterable[str]) -> Lease:
        """Copies of several kinds. One lock covers all requests, so two threads that ask for the same kinds get them in one order."""
        requests: list[Request] = []
        try:
            with self.lock:
                for kind in kinds:
                    requests.append(self.request(chunk, kind, urgent=True))
            for request in requests:
                self.hurry(request)
            return self.granted(requests)
        except BaseException:  # after an interrupt, other threads continue
            for request in requests:
                self._withdraw(request)
            raise

    def granted(self, requests: Sequence[Request]) -> Lease:
        """Wait for requests of one chunk, and for their reads. Copies that were requested with `pin` stay pinned until they are written or
        given back."""
        entries = {request.kind: request.wait() for request in requests}
        for entry in entries.values():
            self.settle(entry)
        return Lease(self, requests[0].chunk, entries)

    def _withdraw(self, request: Request) -> None:
        """The requester no longer waits: drop the request, or unpin the granted copy."""
        with self.lock:
            if request.pin and request.result is not None:
                self.unpin(request.chunk, request.kind, request.result)
            else:
                self._waiting.withdraw(request)
                self.lock.notify_all()

    def clean_ahead(self, kind: str) -> None:
        """Write a dirty copy before a chunk needs the slot, if no other slot is available."""
        with self.lock:
            cache = self.caches[kind]
            if cache.farthest(HostState.CLEAN) is None and not cache.frees_soon():
                self._make_clean(kind)

    def discard(self, chunk: ChunkState, kind: str) -> None:
        """The copy is no longer needed, in host memory or in storage."""
        with self.lock:
            entry = self.caches[kind].find(chunk)
            if entry is not None and entry.state is HostState.DIRTY:
                entry.become(HostState.CLEAN)
            if isinstance(on_demand := chunk.extents[kind], ExtentsOnDemand) and (entry is None or entry.state is HostState.CLEAN):
                on_demand.give_back(chunk.index)  # no transfer is under way
            if entry is not None and self.caches[kind].drop(entry):
                self.lock.notify_all()
            self._forget_late(chunk, kind)

    def unpin(self, chunk: ChunkState, kind: str, entry: Entry) -> None:
        with self.lock:
            self.caches[kind].unpin(entry, keep=self._keeps(chunk, kind))
            self.lock.notify_all()

    def drop(self, chunk: ChunkState, kind: str) -> None:
        """Free the slot of a copy that no op needs, unless the policy keeps the copy."""
        with self.lock:
            entry = self.caches[kind].find(chunk)
            if entry is not None and not self._keeps(chunk, kind) and self.caches[kind].drop(entry):
                self.lock.notify_all()

    def notify_readers(self) -> None:
        """The result of `HostCache.frees_soon` has changed: wake threads that wait for a slot."""
        with self.lock:
            self.lock.notify_all()

    def is_crowded(self, kind: str) -> bool:
        with self.lock:
            return self.caches[kind].is_crowded()

    def slots_in_use(self) -> dict[str, int]:
        """By kind, for the kinds that have slots."""
        return {kind: cache.slots.count - cache.slots.num_free for kind, cache in self.caches.items() if cache.slots is not None}

    def flush(self) -> None:
        """Wait until all writes that have begun are over."""
        self._writer.drain()
        self.failure.check()

    def close(self) -> None:
        with self.lock:
            self._closing = True
            self.lock.notify_all()
        self._reader.join()
        self._settler.close()
        self._writer.close()

    def _keeps(self, chunk: ChunkState, kind: str) -> bool:
        return keeps(kind, keep=self.keep, weights_wanted=chunk.keep_weights)

    def _place(self, chunk: ChunkState, kind: str, entry: Entry):
        """The extent of an entry that borrows a slot, and the bytes of the slot that belong to it."""
        extent = chunk.extents[kind]
        if isinstance(extent, ExtentsOnDemand):
            extent = extent.of(chunk.index)
        return extent, entry.memory.buffer[: extent.nbytes]

    def _make_clean(self, kind: str) -> None:
        """No slot of the kind is available: write the dirty copy with the farthest next use, unless another slot becomes free soon."""
        if (entry := self.caches[kind].to_write()) is not None:
            entry.pin()
            Lease(self, entry.chunk, {kind: entry}).write_back()

    def _finish_writes(self, chunk: ChunkState, started) -> None:
        for kind, entry, transfer, start in started:
            transfer.wait()
            self.events.moved("nvme_write", (chunk.index, kind), transfer.nbytes, start, now())
            with self.lock:
                entry.become(HostState.CLEAN)
                self.unpin(chunk, kind, entry)
                self._forget_late(chunk, kind)

    def _forget_late(self, chunk: ChunkState, kind: str) -> None:
        """A record that has moved to the device needs no redo log. A write that is still under way calls this again at its end."""
        if kind == STATES and chunk.on_device and chunk.redo is not None:
            chunk.redo.forget()

    def _name(self, chunk: ChunkState, kind: str) -> str:
        return f"{self.who}chunk {chunk.index} ({kind}): "

    def _grant(self, request: Request) -> bool:
        """Grant the request the entry of the chunk, or a new entry in a slot. The read of a new entry begins here. Called with the lock held.

        Returns False if no slot is available yet. The requester gets an error. The caller gets an interrupt.
        """
        chunk, kind, cache = request.chunk, request.kind, self.caches[request.kind]
        entry = cache.find(chunk)
        if entry is None:
            urgent = self._waiting.is_urgent(request)
            try:
                entry = cache.claim(chunk, urgent=urgent)
                if entry is None:
                    if request.pin:
                        self._make_clean(kind)
                    return False
                if self.on_read is not None:
                    self.on_read()
                start, (extent, buffer) = now(), self._place(chunk, kind, entry)
                priority = aio_ext.DEMAND if urgent else aio_ext.PREFETCH
                entry.source = self.storage.read(extent, buffer, priority=priority, what=self._name(chunk, kind))
                self._settler.push(functools.partial(self._note_read, entry, (chunk.index, kind), start))
            except BaseException as error:
                self._forget_read(cache, chunk, error)
                if not isinstance(error, Exception):
                    raise
                request.refuse(error)
                return True
        if request.pin:
            entry.pin()
        request.result = entry  # right before `finish`: an interrupt finds both or none, and `_withdraw` takes both back
        request.finish()
        return True

    def _forget_read(self, cache: HostCache, chunk: ChunkState, error: BaseException) -> None:
        """A read could not begin: leave no entry."""
        entry = cache.remove(chunk)
        if entry is not None and isinstance(error, Exception):
            entry.memory.release()  # after an interrupt, an unknown read may still fill the slot: the slot stays lost

    def _note_read(self, entry: Entry, what: tuple[int, str], start: float) -> None:
        transfer = entry.source
        transfer.wait()  # the lane notes an error: perhaps no thread has asked for the copy yet, and the slot is lost
        self.events.moved("nvme_read", what, transfer.nbytes, start, now())
        with self.lock:
            if entry.state is HostState.READING:
                entry.become(HostState.CLEAN)
                self.lock.notify_all()

    def _read_loop(self) -> None:
        with self.lock:
            while True:
                if self._waiting.take_next(self._grant_unless_failed) is not None:
                    continue
                if self._closing:
                    for request in self._waiting:
                        request.refuse(UsageError("the engine was closed before this could be read"))
                    return
                self.lock.wait()

    def _grant_unless_failed(self, request: Request) -> bool:
        if self.failure.error is None:
            return self._grant(request)
        request.refuse(self.failure.error)
        return True
