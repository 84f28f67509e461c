"""Compresses records on their way to storage, without loss. Stands between the record mover and the storage.

Knows sections, and the moments that an update can be replayed on; their places are in compressed_extents.py. Must not know chunks, devices,
or the time of an update.
"""

# [Note: compression on the way]
# One of a few lanes compresses a write into a buffer, and the storage writes from there. So the copy in host memory stays whole for other
# requests. A read fills the end of each section's place in host memory. One of a few lanes, or a thread that waits for the read, expands the
# section in place.

from __future__ import annotations

import collections
import functools
import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

import aio_ext
from infinity.errors import SwapError
from infinity.plan.compression import NUM_BUFFERS, NUM_LANES, Region, Section, expected_nbytes, regions
from infinity.plan.record import Segment
from infinity.system import host_bytes
from infinity.system.arena import Arena
from infinity.system.host_bytes import CODEC, least_section_nbytes, map_flags
from infinity.system.lanes import Job, Lane
from infinity.system.storage import Extent, StorageTier, Transfer
from infinity.system.swap_errors import changed_error
from infinity.system.threads import threads
from infinity.system.waits import waits
from infinity.tiers import _huffman
from infinity.tiers.compressed_extents import CompressedExtent, OverflowArea, Place
from infinity.tiers.late_moments import GradientPool, LateUpdate, PooledGradient, RedoLog, release


class Write:
    """A write that a lane compresses and submits. `nbytes`, the bytes that storage received, is known after `wait`."""

    __slots__ = ("_job", "nbytes")

    def __init__(self, job: Job):
        self._job = job
        self.nbytes = 0

    def wait(self) -> None:
        """Raises SwapError if a part failed, after all parts are over."""
        transfers = self._job.wait()
        _wait_for(transfers)
        self.nbytes = sum(transfer.nbytes for transfer in transfers)


class Read:
    """A running read. A thread that waits for the read expands the sections as they arrive.

    left: for each section the memory, the itemsize of the floats (0 if not compressed) and the number of bytes to read, as
    `_huffman.decode_last` takes them. transfers: those of each section, none for a section without bytes to read. catch_up: None, or runs once,
    in the lane, after all sections. what, path: for errors.
    """

    __slots__ = ("_catch_up", "_error", "_failure", "_lane", "_left", "_lock", "_path", "_transfers", "_what", "nbytes")

    def __init__(
        self,
        left: list[tuple[memoryview, int, int]],
        transfers: list[list[Transfer]],
        catch_up: Callable[[], None] | None,
        lane: Lane,
        what: str,
        path: Path,
    ):
        self.nbytes = sum(nbytes for _, _, nbytes in left)
        self._left = left
        self._transfers = transfers
        self._catch_up = catch_up
        self._lane = lane
        self._what = what
        self._path = path
        self._lock = threads().lock()
        self._failure: tuple[int, str, str] | None = None
        self._error: BaseException | None = None  # of catch_up

    def wait(self) -> None:
        """Each call raises, after all parts are over, SwapError if a part failed or has changed bytes, or the error of catch_up."""
        with waits(self.in_words), self._lock:  # another thread may hold the lock, and wait for a part
            while self._left and self._failure is None:
                try:
                    last = len(self._left) - 1
                    for transfer in self._transfers[last]:
                        transfer.wait()
                    _decode_last(self._left)
                    del self._left[last:]  # decode_last has taken it, if there are bytes
                except OSError as error:
                    _wait_for(self._all, quietly=True)
                    self._failure = (error.errno, error.strerror, error.filename)
                except ValueError:
                    _wait_for(self._all, quietly=True)
                    error = changed_error(self._what, "", self._path)
                    self._failure = (error.errno, error.strerror, error.filename)
            if self._failure is None and self._catch_up is not None:
                self._lane.push(self._bring_up_to_date).wait()
        if self._failure is not None:
            raise SwapError(*self._failure)
        if self._error is not None:
            raise self._error

    def in_words(self) -> str:
        """As `Transfer.in_words`."""
        transfer = next(self._all, None)
        return transfer.in_words() if transfer is not None else f"the catch-up of {self._what}"

    def give_up(self) -> None:
        """End all transfers; the contents of the memory are of no use."""
        with self._lock:
            self._catch_up = None
        _wait_for([self], quietly=True)

    def _bring_up_to_date(self) -> None:
        if self._catch_up is not None:  # None if an interrupt has made a thread ask twice
            try:
                self._catch_up()
            except BaseException as error:  # the memory holds neither the bytes of the read nor the moments after the update
                self._error = error
            self._catch_up = None

    @property
    def done(self) -> bool:
        """Whether the read is over, with or without an error."""
        return self._failure is not None or not (self._left or self._catch_up)

    def promote(self, priority: int = aio_ext.DEMAND) -> None:
        """As `Transfer.promote`."""
        for transfer in self._all:
            transfer.promote(priority)

    @property
    def _all(self) -> Iterator[Transfer]:
        return itertools.chain.from_iterable(self._transfers)


class Compressor:
    """Moves fewer bytes to and from storage: floats are compressed, moments may be late, and zeros of a new record are not written.

    nbytes: size of the buffers, from the arena; with 0 nothing is compressed. pool_nbytes: of the arena, for gradients of late moments. area:
    for codes that exceed the room of their extents.
    """

    def __init__(self, storage: StorageTier, arena: Arena, nbytes: int, pool_nbytes: int = 0, area: OverflowArea | None = None):
        self.storage = storage
        self.area = area or OverflowArea(storage)
        self.pool = GradientPool(arena, pool_nbytes) if pool_nbytes else None
        buffer = arena.region(nbytes).buffer if nbytes else memoryview(b"")
        if nbytes and NUM_LANES * NUM_BUFFERS * least_section_nbytes() > nbytes:
            nbytes = NUM_LANES * NUM_BUFFERS * least_section_nbytes()
            buffer = memoryview(mmap.mmap(-1, nbytes, flags=map_flags()))
        self.section_nbytes = nbytes // (NUM_LANES * NUM_BUFFERS)
        buffers = [buffer[start : start + self.section_nbytes] for start in range(0, nbytes, self.section_nbytes or 1)]
        self.presses = [_Press(storage, self.pool, buffers[number::NUM_LANES]) for number in range(NUM_LANES)]
        self.expanders = [Lane("expand") for _ in range(NUM_LANES)]
        self.catchers = [Lane("catch-up") for _ in range(NUM_LANES)]
        self._presses, self._expanders, self._catchers = map(itertools.cycle, (self.presses, self.expanders, self.catchers))

    @property
    def codes(self) -> bool:
        """Whether floats are compressed."""
        return self.section_nbytes > 0

    def compressed(
        self, extent: Extent, segments: Sequence[tuple[Segment, int, int]], redo: RedoLog | None = None
    ) -> CompressedExtent:
        """An extent with its sections.

        segments: of the extent, see `Segments`; without any, nothing is compressed. With LATE_GRADIENT among them, moments may be late; with a
        pool, the extent has no room for that gradient. redo: the record's log, if any.
        """
        whole = Region((Section(0, extent.nbytes, 0),), 0, extent.nbytes)
        found = regions(tuple(segments), self.section_nbytes) if segments else (whole,)
        needed = sum(region.room for region in found if not (region.late and self.pool))
        assert needed <= extent.nbytes, f"{extent} has no room for {needed} bytes"
        self.area.admit(found)
        return CompressedExtent(extent, found, self.area, redo or RedoLog())

    def read(self, compressed: CompressedExtent, buffer: memoryview, *, priority: int = aio_ext.PREFETCH, what: str = "") -> Read:
        """Read the whole extent after all its writes are over, without an unneeded gradient. Otherwise as `StorageTier.read`."""
        left, transfers, read, late = [], [], None, compressed.redo.late
        left_out = {True} if self.pool is not None or not late else ()
        try:
            for number, section, place in compressed.places(left_out):
                stored = compressed.stored[number]
                memory = buffer[section.offset : section.offset + section.nbytes]
                left.append((memory, (section.itemsize or 4) if stored < section.nbytes else 0, stored))
                transfers.append([])
                start = section.nbytes - stored
                for extent, offset, nbytes in place.ranges(stored):
                    transfers[-1].append(self.storage.read(extent, memory[start : start + nbytes], offset=offset, priority=priority, what=what))
                    start += nbytes
            finish = functools.partial(self._bring_up_to_date, compressed.gradient, late, buffer) if late else None
            read = Read(left[::-1], transfers[::-1], finish, next(self._catchers), what, self.storage.path_of(compressed.extent))
            next(self._expanders).push(read.wait)
            return read
        except BaseException:  # no other thread waits until the transfers release the memory
            _wait_for(itertools.chain.from_iterable(transfers), quietly=True)
            if read is not None:
                read.give_up()
            raise

    def write(
        self,
        compressed: CompressedExtent,
        buffer: memoryview,
        *,
        catch_up: Callable[[memoryview], None] | None = None,
        what: str = "",
    ) -> Write:
        """Write the whole extent. Until the write is over, the buffer must not change, and no other write may begin there.

        catch_up: given if moments may be late, and storage holds the moments from before the last update. This write may then skip the
        moments. A later read calls catch_up with the bytes of the read, to replay the update on the moments there. If the gradient finds no
        room, the moments are written. `Write.wait` raises SwapError, before any byte is overwritten, if storage has no room for the record.
        """
        press = next(self._presses)
        return Write(press.lane.push(lambda: press.write(compressed, buffer, catch_up, what), what))

    def _bring_up_to_date(self, gradient: Sequence[Section], late: Sequence[LateUpdate], buffer: memoryview) -> None:
        """Replay the updates that the moments in a buffer lack, in order. All use the same sections for their gradients."""
        for update in late:
            for section, pooled in zip(gradient, update.pooled or ()):
                memory = buffer[section.offset : section.offset + section.nbytes]
                self.pool.copy(pooled, memory[section.nbytes - pooled.nbytes :])
                part = (memory, section.itemsize if pooled.nbytes < section.nbytes else 0, pooled.nbytes)
                _decode_last([part])
            update.catch_up(buffer)

    def close(self) -> None:
        """End the lanes, after the last read and write. Idempotent."""
        for part in (*self.expanders, *self.presses, *self.catchers):
            part.close()


class _Press:
    """A lane that compresses writes into its own buffers, and submits them."""

    def __init__(self, storage: StorageTier, pool: GradientPool | None, buffers: list[memoryview]):
        self.storage = storage
        self.pool = pool
        self.lane = Lane("compress")
        self._free = buffers
        self._used: collections.deque[tuple[list[Transfer], memoryview]] = collections.deque()  # buffers that a write uses

    def write(
        self, compressed: CompressedExtent, buffer: memoryview, catch_up: Callable[[memoryview], None] | None, what: str
    ) -> list[Transfer]:
        pooled, is_late = None, catch_up is not None and not compressed.redo.late  # storage has room for one gradient
        if catch_up is not None and self.pool is not None:
            pooled = self._put_gradient(compressed, buffer)
            is_late = pooled is not None
        left_out = {not is_late} if self.pool is None else {not is_late, True}  # values of `late` of the sections that are left out
        transfers: list[Transfer] = []
        must_settle = False
        try:
            must_settle = compressed.borrow(left_out, what)
            for number, section, place in compressed.places(left_out):
                source = buffer[section.offset : section.offset + section.nbytes]
                if section.itemsize:
                    compressed.stored[number] = self._write_floats(place, section, source, what, transfers)
                elif compressed.is_new and host_bytes.work(section.nbytes, _is_zero, source):
                    compressed.stored[number] = 0
                else:
                    transfers += self._submit(place, source, what)
                    compressed.stored[number] = section.nbytes
        except BaseException:  # no other thread waits until the transfers release the buffer
            _wait_for(transfers, quietly=True)
            release(pooled or ())
            raise
        finally:
            if must_settle:
                compressed.settle()
        compressed.is_new = False
        if is_late:
            compressed.redo.add(LateUpdate(catch_up, pooled))
        else:
            compressed.redo.forget()
        return transfers

    def _put_gradient(self, compressed: CompressedExtent, buffer: memoryview) -> list[PooledGradient] | None:
        """Compress the gradient behind the states into the pool. Returns None if the pool has no room."""
        found: list[PooledGradient] = []
        for section in compressed.gradient:
            pooled = self._put_section(section, buffer[section.offset : section.offset + section.nbytes])
            if pooled is None:
                release(found)
                return None
            found.append(pooled)
        return found

    def _put_section(self, section: Section, source: memoryview) -> PooledGradient | None:
        if not section.itemsize:
            return self.pool.put(source)
        target = self._buffer()
        try:
            stored = _encode(section, source, target)
            return self.pool.put(target[:stored] if stored < section.nbytes else source)
        finally:
            self._free.append(target)

    def _submit(self, place: Place, source: memoryview, what: str) -> list[Transfer]:
        """Write a section's stored bytes. If a part cannot be submitted, the transfers of the other parts are over."""
        found: list[Transfer] = []
        start = 0
        try:
            for extent, offset, nbytes in place.ranges(len(source)):
                found.append(self.storage.write(extent, source[start : start + nbytes], offset=offset, what=what))
                start += nbytes
        except BaseException:
            _wait_for(found, quietly=True)
            raise
        return found

    def _write_floats(self, place: Place, section: Section, source: memoryview, what: str, transfers: list[Transfer]) -> int:
        """Compress and write a section, and append the transfers to the list. Returns the number of stored bytes."""
        target, stored = self._buffer(), 0
        try:
            stored = _encode(section, source, target)
            if stored:
                chosen = target[:stored] if stored < section.nbytes else source
                submitted = self._submit(place, chosen, what)
                transfers += submitted
                if chosen is not source:
                    self._used.append((submitted, target))
                    target = None
        finally:
            if target is not None:
                self._free.append(target)
        return stored

    def close(self) -> None:
        self.lane.close()
        for transfers, _ in self._used:
            _wait_for(transfers, quietly=True)
        self._used.clear()
        self._free.clear()

    def _buffer(self) -> memoryview:
        if not self._free:
            transfers, buffer = self._used.popleft()
            _wait_for(transfers, quietly=True)  # `Write.wait` raises the error
            self._free.append(buffer)
        return self._free.pop()


def _decode_last(parts: list[tuple[memoryview, int, int]]) -> None:
    """Decode the last part and remove it. A part without code, of itemsize 0, is in its place already, and takes no time of the codec in a
    simulation. A part of zeros has no bytes to decode."""
    memory, itemsize, nbytes = parts[-1]
    host_bytes.work(len(memory) if itemsize else 0, _huffman.decode_last, parts, kind=CODEC if nbytes else "")


def _encode(section: Section, source: memoryview, target: memoryview) -> int:
    """Write the code of a section's floats to the target. Returns the number of bytes; the section's own number if the code is no shorter."""
    arguments = source, section.itemsize, target
    return host_bytes.work(section.nbytes, _huffman.encode, *arguments, kind=CODEC, otherwise=expected_nbytes(section))


def _is_zero(source: memoryview) -> bool:
    return not np.frombuffer(source, np.uint64).any()


def _wait_for(transfers: Iterable[Transfer | Read], *, quietly: bool = False) -> None:
    """Wait for all transfers, also after one has failed. Raises the first error unless `quietly`."""
    failure = None
    for transfer in transfers:
        try:
            transfer.wait()
        except OSError as error:
            failure = failure or error
    if failure is not None and not quietly:
        raise failure
