"""Records on their way between NVMe and host memory: the nc and cn links.

A request asks for a chunk's weights, states or gradient in host memory and is granted when a slot is there; the reader
picks, by the policy of plan/slots.py, the first that can be granted, so what waits for one kind of slot never holds up the others.
Must not know the device, plans or arithmetic.
"""

# [Note: order of reads and writes]
# An update pins its entry from before it computes until its write is over, and an entry leaves host memory only when it
# is clean. So whoever asks for a chunk with an update under way is given that very entry and waits for the update;
# whoever finds no entry reads what a completed write left. (aio_ext keeps overlapping reads and writes in order, too, but not those that
# compression.py has not yet given to it.)

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

import aio_ext
from infinity.errors import UsageError
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS, Record
from infinity.plan.slots import Entry, HostCache, HostState, Requests, keeps
from infinity.system.events import Events, now
from infinity.system.failure import FirstFailure
from infinity.system.lanes import Job, Lane, Monitor
from infinity.system.waits import waits
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.tiers.chunk_state import ChunkState


class Request(Job):
    """A wish for one kind of segments of a chunk in host memory. Its result is the entry, pinned for the asker."""

    __slots__ = ("_writer", "chunk", "kind", "number", "pin")

    def __init__(self, chunk: ChunkState, kind: str, pin: bool, writer: Lane):
        """writer: what it writes makes room."""
        super().__init__(None)
        self.chunk = chunk
        self.kind = kind
        self.pin = pin
        self._writer = writer

    @property
    def worker(self) -> int | None:
        return self._writer.ident

    def in_words(self) -> str:
        return _room(self.chunk, self.kind)

    def refuse(self, error: BaseException) -> None:
        self._error = error
        self.finish()


class Lease:
    """Copies of a chunk in host memory, by kind, pinned for whoever has them, until they are written or given back."""

    __slots__ = ("chunk", "entries", "records")

    def __init__(self, records: Records, chunk: ChunkState, entries: dict[str, Entry]):
        self.records = records
        self.chunk = chunk
        self.entries = entries

    @property
    def shard(self) -> dict[str, torch.Tensor]:
        """The record's segments in them, by name, 1-D [shard_used]; none in a gradient."""
        return {
            name: segment
            for kind, entry in self.entries.items()
            for name, segment in segments(self.chunk.record, kind, entry.memory.tensor).items()
        }

    def begin_change(self) -> bool:
        """The chunk's gradient, or all of its record, is about to change. Returns whether the copies were clean."""
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
        """Send dirty copies to NVMe, and give them back once they are there; resident ones stay. catch_up: moments may be late there, see
        `Compressor.write`."""
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
                transfer = records.swap.write(*records._place(chunk, kind, entry), what=records._name(chunk, kind), **how)
                started.append((kind, entry, transfer, now()))
            if started:
                records._writer.push(lambda: records._finish_writes(chunk, started))
        except BaseException as error:  # an interrupt, too: else who wants such an entry would wait for a write that nobody ends
            records.failure.note(error)
            raise

    def give_back(self) -> None:
        """As they are."""
        for kind, entry in self.entries.items():
            self.records.unpin(self.chunk, kind, entry)


def segments(record: Record, kind: str, view: Callable[[torch.dtype, int, int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy's, by name, 1-D [shard_used]. view: makes a tensor of its memory, from a dtype, an offset in bytes and a number of
    elements."""
    return {segment.name: view(TORCH_DTYPES[segment.dtype], offset, record.numel) for segment, offset, _ in record.of(kind)}


def _room(chunk: ChunkState, kind: str) -> str:
    """What who has no slot waits for."""
    return f"room in host memory for the {kind} of {chunk.title}"


class Records:
    """Moves records between the swap and host memory. `keep` leaves clean copies in their slots until these are needed."""

    def __init__(
        self,
        swap,
        caches: dict[str, HostCache],
        lock: Monitor,
        events: Events,
        failure: FirstFailure,
        *,
        keep: bool,
        who: str = "",
    ):
        self.swap = swap  # or what compresses for it; None if nothing lives on NVMe
        self.caches = caches
        self.lock = lock
        self.events = events
        self.keep = keep
        self.who = who  # begins the text of errors, such as "rank 1 of 2, "
        self.on_read = None  # runs before each read, in the reader; tests inject delays here
        self.failure = failure  # a write or an update was lost, its slots with it: who waits for one must learn of it
        failure.wakes(lock)
        self._waiting = Requests()
        self._closing = False
        self._writer = Lane("cn", failure)
        self._settler = Lane("nc-settle", failure)
        self._reader = threading.Thread(target=self._read_loop, name="infinity-nc", daemon=True)
        self._reader.start()

    def request(self, chunk: ChunkState, kind: str, *, urgent: bool = False, pin: bool = True) -> Request:
        """Ask for a copy. `pin=False` reads ahead: the copy may be taken back while unused."""
        with self.lock:
            request = Request(chunk, kind, pin, self._writer)
            self._waiting.ask(request, urgent=urgent)
            entry = self.caches[kind].find(chunk)
            try:
                if entry is not None and entry.resident:  # takes nobody's slot
                    self._grant(request)
                elif self._waiting or self.on_read is not None or not self._try(request):
                    self._waiting.put(request)
                    self.lock.notify_all()
            except BaseException:
                self._withdraw(request)
                raise
        return request

    def hurry(self, request: Request) -> None:
        """Somebody waits for it: let it, and what was asked for of its kind before it, pass whatever is read ahead."""
        with self.lock:
            self._waiting.hurry(request)
            self.lock.notify_all()
        source = request.result.source if request.done and request.result is not None else None
        if source is not None:
            source.promote()

    def hurry_all(self) -> None:
        """The training thread waits for updates: let all that was asked for, in its order, pass what is read ahead."""
        with self.lock:
            self._waiting.hurry_all()
            self.lock.notify_all()

    def settle(self, entry: Entry) -> None:
        """Wait until the entry's bytes are there."""
        source = entry.source
        if source is not None:
            source.wait()
        with self.lock:
            if entry.state is HostState.READING:
                entry.become(HostState.CLEAN)
                self.lock.notify_all()

    @contextlib.contextmanager
    def lease(self, chunk: ChunkState, *kinds: str, write: bool = False, fresh: bool = False):
        """Copies, by default of all of the record, pinned and with their bytes there inside the block. fresh: their bytes are of no use.

        write: the block changes them. What it leaves goes to NVMe, also when it raises; a gradient, when its slot is wanted.
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
        """A pinned, clean entry to be filled by the caller; nothing is read."""
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
        """Copies of several kinds. Asked for at once: two who ask for the same kinds are granted them in one order."""
        requests: list[Request] = []
        try:
            with self.lock:
                for kind in kinds:
                    requests.append(self.request(chunk, kind, urgent=True))
            for request in requests:
                self.hurry(request)
            return self.granted(requests)
        except BaseException:  # after an interrupt others go on
            for request in requests:
                self._withdraw(request)
            raise

    def granted(self, requests: Sequence[Request]) -> Lease:
        """What was asked for of one chunk, once its bytes are there. It stays pinned, if that was asked, until it is written or given
        back."""
        entries = {request.kind: request.wait() for request in requests}
        for entry in entries.values():
            self.settle(entry)
        return Lease(self, requests[0].chunk, entries)

    def _withdraw(self, request: Request) -> None:
        """Nobody waits for a request any more, nor, if it is pinned, for what it was granted."""
        with self.lock:
            if request.pin and request.result is not None:
                self.unpin(request.chunk, request.kind, request.result)
            else:
                self._waiting.withdraw(request)
                self.lock.notify_all()

    def clean_ahead(self, kind: str) -> None:
        """Have a dirty copy written before its slot is wanted, if none can be had otherwise."""
        with self.lock:
            cache = self.caches[kind]
            if cache.farthest(HostState.CLEAN) is None and not cache.frees_soon():
                self._make_clean(kind)

    def discard(self, chunk: ChunkState, kind: str) -> None:
        """The copy's value is of no use any more, nor is what NVMe holds of it."""
        with self.lock:
            entry = self.caches[kind].find(chunk)
            if entry is not None and entry.state is HostState.DIRTY:
                entry.become(HostState.CLEAN)
            if entry is not None and self.caches[kind].drop(entry):
                self.lock.notify_all()
            self._forget_late(chunk, kind)

    def unpin(self, chunk: ChunkState, kind: str, entry: Entry) -> None:
        with self.lock:
            self.caches[kind].unpin(entry, keep=self._keeps(chunk, kind))
            self.lock.notify_all()

    def drop(self, chunk: ChunkState, kind: str) -> None:
        """Give up a copy that is not needed after all, unless it is kept anyway."""
        with self.lock:
            entry = self.caches[kind].find(chunk)
            if entry is not None and not self._keeps(chunk, kind) and self.caches[kind].drop(entry):
                self.lock.notify_all()

    def notify_readers(self) -> None:
        """Whether a slot frees itself has changed."""
        with self.lock:
            self.lock.notify_all()

    def is_crowded(self, kind: str) -> bool:
        with self.lock:
            return self.caches[kind].is_crowded()

    def slots_in_use(self) -> dict[str, int]:
        """Of each kind that has slots."""
        return {kind: cache.slots.count - cache.slots.num_free for kind, cache in self.caches.items() if cache.slots is not None}

    def flush(self) -> None:
        """Wait until every write that was begun is over."""
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
        """The extent of an entry that borrows a slot, and its bytes; what has none is resident."""
        extent = chunk.extents[kind]
        return extent, entry.memory.buffer[: extent.nbytes]

    def _make_clean(self, kind: str) -> None:
        """No slot of the kind can be had: write the dirty copy that is used last, unless one is becoming free anyway."""
        if (entry := self.caches[kind].to_write()) is not None:
            entry.pin()
            Lease(self, entry.chunk, {kind: entry}).write_back()

    def _finish_writes(self, chunk: ChunkState, started) -> None:
        for kind, entry, transfer, start in started:
            transfer.wait()
            self.events.moved("cn", (chunk.index, kind), transfer.nbytes, start, now())
            with self.lock:
                entry.become(HostState.CLEAN)
                self.unpin(chunk, kind, entry)
                self._forget_late(chunk, kind)

    def _forget_late(self, chunk: ChunkState, kind: str) -> None:
        """A record that has moved to the device leaves nothing behind. A write of it that is under way comes here again when it ends."""
        if kind == STATES and chunk.on_device and chunk.redo is not None:
            chunk.redo.forget()

    def _name(self, chunk: ChunkState, kind: str) -> str:
        return f"{self.who}chunk {chunk.index} ({kind}): "

    def _grant(self, request: Request) -> bool:
        """Give the request its entry if one is there or a slot can be had. Called with the lock held."""
        entry = self.caches[request.kind].find(request.chunk) or self._begin_read(request)
        if entry is None:
            return False
        if request.pin:
            entry.pin()
        request.result = entry  # right behind: an interrupt finds both or none, and `_withdraw` takes both back
        request.finish()
        return True

    def _begin_read(self, request: Request) -> Entry | None:
        """Into a slot, if one can be had; what fails leaves no entry."""
        cache, chunk = self.caches[request.kind], request.chunk
        try:
            entry = cache.claim(chunk, urgent=self._waiting.is_urgent(request))
            if entry is not None:
                self._submit(request, entry)
            elif request.pin:
                self._make_clean(request.kind)
            return entry
        except BaseException as error:
            entry = cache.entries.pop(chunk.index, None)
            if entry is not None and isinstance(error, Exception):
                entry.memory.release()  # after an interrupt a read may be on its way there that nobody knows of: it stays lost
            raise

    def _submit(self, request: Request, entry: Entry) -> None:
        if self.on_read is not None:
            self.on_read()
        extent, buffer = self._place(request.chunk, request.kind, entry)
        start = now()
        priority = aio_ext.DEMAND if self._waiting.is_urgent(request) else aio_ext.PREFETCH
        entry.source = self.swap.read(extent, buffer, priority=priority, what=self._name(request.chunk, request.kind))
        what = (request.chunk.index, request.kind)
        self._settler.push(lambda: self._note_read(entry, entry.source, what, start))

    def _note_read(self, entry: Entry, transfer, what, start: float) -> None:
        transfer.wait()  # what it raises is noted: nobody may have asked for it yet, and its slot is lost
        self.events.moved("nc", what, transfer.nbytes, start, now())
        with self.lock:
            if entry.state is HostState.READING:
                entry.become(HostState.CLEAN)
                self.lock.notify_all()

    def _read_loop(self) -> None:
        with self.lock:
            while True:
                if self._waiting.take_next(self._try_unless_failed) is not None:
                    continue
                if self._closing:
                    for request in self._waiting:
                        request.refuse(UsageError("the engine was closed before this could be read"))
                    return
                self.lock.wait()

    def _try_unless_failed(self, request: Request) -> bool:
        if self.failure.error is None:
            return self._try(request)
        request.refuse(self.failure.error)
        return True

    def _try(self, request: Request) -> bool:
        """As `_grant`, but an error goes to who waits for the request; an interrupt does not, it is the caller's."""
        try:
            return self._grant(request)
        except Exception as error:
            request.refuse(error)
            return True
