"""Records on NVMe in fewer bytes, without loss: between the records and the swap.

Knows extents, the sections that they are cut into, and which of these can be done again. Must not know chunks, devices, or when anything is
due.
"""

# [Note: compressed extents]
# An extent keeps its size: what is compressed lies at the start of each section's place, and the rest of the place stays unused. So
# drives that an extent is striped over have the same share of the bytes as before, and nothing ever has to move. How long each
# section is now is known here alone: a section of zeros takes no bytes at all, as a record's moments before the first step.
#
#     in memory   | weight ........................ |     | residual ... | momentum ...................... |
#     sections    | 2 MiB    | 2 MiB     | 2 MiB    |     | as it is     | 2 MiB    | 2 MiB    | 2 MiB     |
#     on NVMe     | 1.3 |    | 1.3 |     | 1.3 |    |     | ............ | 1.7   |  | 1.7   |  | 1.7   |   |
#
# A write is compressed in one of a few lanes, into a buffer, from which it is written: the copy in host memory stays whole for whoever
# asks for it meanwhile. A read comes to the end of each section's place in host memory and becomes, in place, what it was: in one of
# a few lanes, or by whoever cannot wait for its turn there.

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import aio_ext
from infinity.errors import SwapError
from infinity.plan.compression import NUM_BUFFERS, NUM_LANES, Section, cut
from infinity.plan.record import Segment
from infinity.system.arena import Arena
from infinity.system.lanes import Job, Lane
from infinity.system.swap import Extent, Swap, Transfer
from infinity.system.swap_errors import changed_error
from infinity.system.waits import waits
from infinity.tiers import _huffman
from infinity.tiers.late_moments import GradientPool, LateUpdate, PooledGradient, RedoLog, release


@dataclass
class CompressedExtent:
    """An extent, its sections, and how many bytes of each are on NVMe: all, until they are first written, and as many as each write left.

    redo: what moments there lack, see [Note: late moments] in late_moments.py. is_new: nothing was written yet; what is zero then, as the states of
    a record are that has made no step, is not written, coded or not.
    """

    extent: Extent
    sections: tuple[Section, ...]
    stored: list[int]
    redo: RedoLog
    is_new: bool = True

    @functools.cached_property
    def nbytes(self) -> int:
        """Of memory, with room for a gradient where moments may be late."""
        return max(section.offset + section.nbytes for section in self.sections)

    @functools.cached_property
    def gradient(self) -> list[Section]:
        """The sections of a gradient."""
        return [section for section in self.sections if section.late]


class Write:
    """A write that is compressed and submitted in the lane. `nbytes` of the disks are known once it was waited for."""

    __slots__ = ("_job", "nbytes")

    def __init__(self, job: Job):
        self._job = job
        self.nbytes = 0

    def wait(self) -> None:
        """Raises SwapError if a part failed, once none is in flight any more."""
        transfers = self._job.wait()
        _wait_for(transfers)
        self.nbytes = sum(transfer.nbytes for transfer in transfers)


class Read:
    """A read under way; whoever waits brings the sections, as they come, back to what they were.

    left: memory of each section, the itemsize of its floats and how many bytes are read, as `_huffman.decode_last` takes them; what is not
    compressed has itemsize 0. transfers: of each, None where there is nothing to read. catch_up: what is then done, once, in the lane, or
    None. what, path: of errors.
    """

    __slots__ = ("_catch_up", "_error", "_failure", "_lane", "_left", "_lock", "_path", "_transfers", "_what", "nbytes")

    def __init__(
        self,
        left: list[tuple[memoryview, int, int]],
        transfers: list[Transfer | None],
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
        self._lock = threading.Lock()
        self._failure: tuple[int, str, str] | None = None
        self._error: BaseException | None = None  # of catch_up

    def wait(self) -> None:
        """Raises, each time, SwapError if a part failed or is not what was written, or what catch_up raised; no part is in flight then."""
        with waits(self.in_words), self._lock:  # another thread may have it, and wait for a part
            while self._left and self._failure is None:
                transfer = self._transfers[len(self._left) - 1]
                try:
                    if transfer is not None:
                        transfer.wait()
                    _huffman.decode_last(self._left)
                except OSError as error:
                    _wait_for(self._transfers, quietly=True)
                    self._failure = (error.errno, error.strerror, error.filename)
                except ValueError:
                    _wait_for(self._transfers, quietly=True)
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
        transfer = next(filter(None, self._transfers), None)
        return transfer.in_words() if transfer is not None else f"the catch-up of {self._what}"

    def give_up(self) -> None:
        """Nothing comes to the memory any more; what it holds is of no use."""
        with self._lock:
            self._catch_up = None
        _wait_for([self], quietly=True)

    def _bring_up_to_date(self) -> None:
        if self._catch_up is not None:  # else an interrupt let somebody ask twice
            try:
                self._catch_up()
            except BaseException as error:  # what the memory holds is neither what was read nor what it should be
                self._error = error
            self._catch_up = None

    @property
    def done(self) -> bool:
        """Finished, well or not."""
        return self._failure is not None or not (self._left or self._catch_up)

    def promote(self, priority: int = aio_ext.DEMAND) -> None:
        """As `Transfer.promote`."""
        for transfer in self._transfers:
            if transfer is not None:
                transfer.promote(priority)


class Compressor:
    """Moves fewer bytes of a swap's extents: floats are coded, moments may be late, and zeros of a first record are not written. arena:
    gives nbytes for buffers, see `buffers_nbytes`, with 0 nothing is coded; and pool_nbytes for gradients of late moments."""

    def __init__(self, swap: Swap, arena: Arena, nbytes: int, pool_nbytes: int = 0):
        self.swap = swap
        self.pool = GradientPool(arena, pool_nbytes) if pool_nbytes else None
        self.section_nbytes = nbytes // (NUM_LANES * NUM_BUFFERS)
        buffer = arena.region(nbytes).buffer if nbytes else memoryview(b"")
        buffers = [buffer[start : start + self.section_nbytes] for start in range(0, nbytes, self.section_nbytes or 1)]
        self.presses = [_Press(swap, self.pool, buffers[number::NUM_LANES]) for number in range(NUM_LANES)]
        self.expanders = [Lane("expand") for _ in range(NUM_LANES)]
        self.catchers = [Lane("catch-up") for _ in range(NUM_LANES)]
        self._presses, self._expanders, self._catchers = map(itertools.cycle, (self.presses, self.expanders, self.catchers))

    @property
    def codes(self) -> bool:
        """Whether floats take fewer bytes."""
        return self.section_nbytes > 0

    def compressed(
        self, extent: Extent, segments: Sequence[tuple[Segment, int, int]], redo: RedoLog | None = None
    ) -> CompressedExtent:
        """segments: those that lie in the extent, each with its offset and nbytes, multiples of 4096; without any it stays as it is. With
        LATE_GRADIENT among them, moments may be late; with a pool, the extent has no room for it. redo: the record's log, if it has one."""
        sections = cut(tuple(segments), self.section_nbytes) if segments else (Section(0, extent.nbytes, 0),)
        return CompressedExtent(extent, sections, [section.nbytes for section in sections], redo or RedoLog())

    def read(self, compressed: CompressedExtent, buffer: memoryview, *, priority: int = aio_ext.PREFETCH, what: str = "") -> Read:
        """Read all of an extent, once what was written to it is over, but for a gradient of no use. As `Swap.read` otherwise."""
        left, transfers, read, late = [], [], None, compressed.redo.late
        try:
            for section, stored in zip(compressed.sections, compressed.stored):
                if section.late and (self.pool is not None or not late):
                    continue
                memory = buffer[section.offset : section.offset + section.nbytes]
                left.append((memory, (section.itemsize or 4) if stored < section.nbytes else 0, stored))
                transfer = None
                if stored:
                    target = memory[section.nbytes - stored :]
                    transfer = self.swap.read(compressed.extent, target, offset=section.offset, priority=priority, what=what)
                transfers.append(transfer)
            finish = functools.partial(self._bring_up_to_date, compressed.gradient, late, buffer) if late else None
            read = Read(left[::-1], transfers[::-1], finish, next(self._catchers), what, self.swap.path_of(compressed.extent))
            next(self._expanders).push(read.wait)
            return read
        except BaseException:  # nobody else would wait until they let the memory go
            _wait_for(transfers, quietly=True)
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
        """Write all of an extent; the buffer must not change, and nothing else be written there, until the write is over.

        catch_up: given where moments may be late and NVMe holds those from before the last update, so that they need not be written. It is
        called with what is read from there, and makes of these what the buffer holds. They are written all the same where there is no room
        for the gradient.
        """
        press = next(self._presses)
        return Write(press.lane.push(lambda: press.write(compressed, buffer, catch_up, what), what))

    def _bring_up_to_date(self, gradient: Sequence[Section], late: Sequence[LateUpdate], buffer: memoryview) -> None:
        """Do to the moments in a buffer the updates that they lack; the gradient's sections are one's after the other's."""
        for update in late:
            for section, pooled in zip(gradient, update.pooled or ()):
                memory = buffer[section.offset : section.offset + section.nbytes]
                self.pool.copy(pooled, memory[section.nbytes - pooled.nbytes :])
                _huffman.decode_last([(memory, section.itemsize if pooled.nbytes < section.nbytes else 0, pooled.nbytes)])
            update.catch_up(buffer)

    def close(self) -> None:
        """Nothing is read or written any more. Idempotent."""
        for part in (*self.expanders, *self.presses, *self.catchers):
            part.close()


class _Press:
    """A lane that compresses writes, into buffers of its own, and submits them."""

    def __init__(self, swap: Swap, pool: GradientPool | None, buffers: list[memoryview]):
        self.swap = swap
        self.pool = pool
        self.lane = Lane("compress")
        self._free = buffers
        self._used: collections.deque[tuple[Transfer, memoryview]] = collections.deque()  # that are being written from

    def write(
        self, compressed: CompressedExtent, buffer: memoryview, catch_up: Callable[[memoryview], None] | None, what: str
    ) -> list[Transfer]:
        pooled, is_late = None, catch_up is not None and not compressed.redo.late  # NVMe has room for one gradient
        if catch_up is not None and self.pool is not None:
            pooled = self._put_gradient(compressed, buffer)
            is_late = pooled is not None
        left_out = {not is_late} if self.pool is None else {not is_late, True}  # of what sections' `late` may be
        transfers: list[Transfer] = []
        try:
            for number, section in enumerate(compressed.sections):
                if section.late in left_out:
                    continue
                source = buffer[section.offset : section.offset + section.nbytes]
                if section.itemsize:
                    compressed.stored[number] = self._write_floats(compressed.extent, section, source, what, transfers)
                elif compressed.is_new and not np.frombuffer(source, np.uint64).any():
                    compressed.stored[number] = 0
                else:
                    transfers.append(self.swap.write(compressed.extent, source, offset=section.offset, what=what))
                    compressed.stored[number] = section.nbytes
        except BaseException:  # nobody else would wait until they let the buffer go
            _wait_for(transfers, quietly=True)
            release(pooled or ())
            raise
        compressed.is_new = False
        if is_late:
            compressed.redo.add(LateUpdate(catch_up, pooled))
        else:
            compressed.redo.forget()
        return transfers

    def _put_gradient(self, compressed: CompressedExtent, buffer: memoryview) -> list[PooledGradient] | None:
        """The gradient behind the states, compressed, in the pool; None where that has no room."""
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
            stored = _huffman.encode(source, section.itemsize, target)
            return self.pool.put(target[:stored] if stored < section.nbytes else source)
        finally:
            self._free.append(target)

    def _write_floats(self, extent: Extent, section: Section, source: memoryview, what: str, transfers: list[Transfer]) -> int:
        """Adds what is under way to transfers; returns how many bytes are stored."""
        target, stored = self._buffer(), 0
        try:
            stored = _huffman.encode(source, section.itemsize, target)
            if stored:
                chosen = target[:stored] if stored < section.nbytes else source
                transfers.append(self.swap.write(extent, chosen, offset=section.offset, what=what))
                if chosen is not source:
                    self._used.append((transfers[-1], target))
                    target = None
        finally:
            if target is not None:
                self._free.append(target)
        return stored

    def close(self) -> None:
        self.lane.close()
        _wait_for((transfer for transfer, _ in self._used), quietly=True)
        self._used.clear()
        self._free.clear()

    def _buffer(self) -> memoryview:
        if not self._free:
            transfer, buffer = self._used.popleft()
            _wait_for([transfer], quietly=True)  # who asked for the write is told
            self._free.append(buffer)
        return self._free.pop()


def _wait_for(transfers: Iterable[Transfer | Read | None], *, quietly: bool = False) -> None:
    """For all of them, whatever becomes of one."""
    failure = None
    for transfer in filter(None, transfers):
        try:
            transfer.wait()
        except OSError as error:
            failure = failure or error
    if failure is not None and not quietly:
        raise failure
