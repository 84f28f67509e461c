"""Places of compressed records in storage: extents that are smaller than their records, and one area for codes that exceed their extent.

Knows sections, rooms and pieces. Must not know how floats are coded, or when a record is written.
"""

# [Note: compressed extents]
# An extent has room for a planned share of its bytes: see ROOM in plan/compression.py. Without coding this is all bytes. Sections that are
# always written together are a region. Their bytes lie one behind the other from the start of the region on, so a long code of one section
# uses the room that other codes leave. Only this file knows the stored size of each section. A section of zeros, such as a record's moments
# before the first step, takes no bytes.
#
#     in memory   | weight ........................ |     | residual ... | momentum ...................... |
#     sections    | 2 MiB    | 2 MiB     | 2 MiB    |     | as it is     | 2 MiB    | 2 MiB    | 2 MiB     |
#     on NVMe     | 1.3 | 1.3 | 1.3 | room |              | ............ | 1.7   | 1.7   | 1.7   |  --> | piece |
#
# The overflow area takes the part of a region that exceeds the room. The area consists of pieces of one size, which all extents share. So no
# gap is smaller than a piece, and nothing ever moves. A write first borrows the pieces for its largest possible size, which is that of the
# uncoded bytes. Without them, the write fails before it overwrites any byte. At its end the write gives back the pieces that the code did
# not need. Regions keep the pieces of the last write, so a code that fits its room again frees them. If the area is too small, writes wait
# for running writes, and then the area grows. Extents and area together never exceed the uncoded bytes by more than a piece a region.

# [Note: the planned room]
# Shares of the bytes that real records took, by a GPT of 76 M parameters on text, one number per step. Sections of one record differ by 1 %.
# The room is less than the largest share, because the first steps need that for a short time.
#
#                  1      2      3     20
#     weights  0.666  0.666  0.666  0.666
#     moments  0.288  0.567  0.845  0.838     (most records have no moments before step 2: late moments)

from __future__ import annotations

import functools
import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from infinity.errors import SwapError
from infinity.plan.compression import PIECE_NBYTES, Region, Section
from infinity.sizes import round_up
from infinity.system.storage import Extent, StorageTier
from infinity.system.threads import monitor
from infinity.system.waits import waits
from infinity.tiers.late_moments import RedoLog

GROWTHS = 512  # the area grows by this part of its limit or more at a time, if the drive has room


class OverflowArea:
    """Pieces of PIECE_NBYTES of storage, see [Note: compressed extents]. Pieces have numbers, in the order of the extents. Any thread may call
    the methods.

    extent: of the start, None if there is none.
    """

    def __init__(self, storage: StorageTier, extent: Extent | None = None):
        self._storage = storage
        self._limit_nbytes = 0
        self._extents: list[Extent] = []
        self._first: list[int] = []  # piece of each extent
        self._num_pieces = 0
        self._free: list[int] = []  # a heap: the first pieces come first, so that neighbours form one transfer
        self._num_writes = 0  # that may give pieces back
        self._changed = monitor()
        if extent is not None:
            self._add(extent)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self._extents)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def admit(self, regions: Sequence[Region]) -> None:
        """The regions share the area, which may grow as far as their floats without coding need."""
        self._limit_nbytes += PIECE_NBYTES * sum(region.num_pieces for region in regions)

    def borrow(self, count: int, what: str) -> list[int]:
        """Pieces for a write, which calls `settle` at its end. what: begins the text of an error.

        Raises SwapError if the drive has no room.
        """
        with self._changed:
            while len(self._free) < count:
                if not self._num_writes:
                    self._grow(count - len(self._free), what)
                    continue
                with waits("pieces that another write gives back"):
                    self._changed.wait()
            self._num_writes += 1
            return [heapq.heappop(self._free) for _ in range(count)]

    def settle(self, unused: Sequence[int]) -> None:
        """A write that has borrowed pieces is over, or has written all its bytes. unused: pieces that it needs no more."""
        with self._changed:
            self._num_writes -= 1
            for piece in unused:
                heapq.heappush(self._free, piece)
            self._changed.notify_all()

    def ranges(self, pieces: Sequence[int], start: int, nbytes: int) -> Iterator[tuple[Extent, int, int]]:
        """(extent, offset, size) of each run of bytes in `nbytes` bytes from `start` on, where the pieces lie one behind the other."""
        found: list[tuple[int, int, int]] = []
        while nbytes:
            number, inside = pieces[start // PIECE_NBYTES], start % PIECE_NBYTES
            extent = bisect_right(self._first, number) - 1
            offset, size = (number - self._first[extent]) * PIECE_NBYTES + inside, min(nbytes, PIECE_NBYTES - inside)
            if found and found[-1][0] == extent and sum(found[-1][1:]) == offset:
                found[-1] = (extent, found[-1][1], found[-1][2] + size)
            else:
                found.append((extent, offset, size))
            start, nbytes = start + size, nbytes - size
        return ((self._extents[index], offset, size) for index, offset, size in found)

    def _grow(self, count: int, what: str) -> None:
        """Called with the lock held."""
        needed, most = count * PIECE_NBYTES, self._limit_nbytes - self.nbytes
        assert needed <= most, f"{what}{needed} bytes beyond the limit of the overflow area, {self._limit_nbytes}"
        try:
            try:
                self._add(self._storage.extend(min(max(needed, round_up(self._limit_nbytes // GROWTHS, PIECE_NBYTES)), most)))
            except SwapError:
                self._add(self._storage.extend(needed))  # the last bytes of a drive
        except SwapError as error:
            text = f"{what}floats of this record save fewer bytes than planned, and {needed:,} more bytes are needed: {error.strerror}"
            remedy = "compression='off' reserves whole records at the start"
            raise SwapError(error.errno, f"{text}; or {remedy}", error.filename) from error

    def _add(self, extent: Extent) -> None:
        self._extents.append(extent)
        self._first.append(self._num_pieces)
        self._num_pieces += extent.nbytes // PIECE_NBYTES
        for piece in range(self._first[-1], self._num_pieces):
            heapq.heappush(self._free, piece)


@dataclass
class CompressedExtent:
    """An extent with its regions and their sections. stored: bytes of each section in storage. pieces: of each region, in the overflow area.

    redo: updates that the moments in storage lack, see [Note: late moments] in late_moments.py. is_new: no write has happened. A first write
    skips sections of zeros, such as the states of a record before the first step.
    """

    extent: Extent
    regions: tuple[Region, ...]
    area: OverflowArea
    redo: RedoLog
    is_new: bool = True
    stored: list[int] = field(init=False)
    pieces: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.stored = [0] * len(self.sections)  # before the first write, all bytes count as zeros
        self.pieces = [[] for _ in self.regions]

    @functools.cached_property
    def sections(self) -> list[Section]:
        return [section for region in self.regions for section in region.sections]

    @functools.cached_property
    def nbytes(self) -> int:
        """Size of a host copy in bytes, with room for a gradient if moments may be late."""
        return max(section.offset + section.nbytes for section in self.sections)

    @functools.cached_property
    def gradient(self) -> list[Section]:
        """The sections of the gradient behind the states."""
        return [section for section in self.sections if section.late]

    def places(self, left_out: Collection[bool | None] = ()) -> Iterator[tuple[int, Section, Place]]:
        """(number, section, place) of each section. left_out: values of `late` of the sections that are left out.

        While a region is written, the caller sets `stored` of a section before it asks for the next one.
        """
        number = 0
        for index, region in enumerate(self.regions):
            position = 0
            for section in region.sections:
                if section.late not in left_out:
                    yield number, section, Place(self, index, position)
                    position += self.stored[number]
                number += 1

    def borrow(self, left_out: Collection[bool | None], what: str) -> bool:
        """Before a write: add pieces for the largest possible code. Returns whether the write must call `settle`. Raises SwapError."""
        written = [0 if region.late in left_out else region.num_pieces for region in self.regions]
        if not any(written):
            return False
        lacking = [max(0, count - len(held)) for count, held in zip(written, self.pieces)]
        found = self.area.borrow(sum(lacking), what)
        for held, count in zip(self.pieces, lacking):
            held += found[:count]
            del found[:count]
        return True

    def settle(self) -> None:
        """After a write: give back the pieces that the stored bytes do not need."""
        unused, number = [], 0
        for region, held in zip(self.regions, self.pieces):
            stored = sum(self.stored[number : number + len(region.sections)])
            number += len(region.sections)
            num_used = max(0, -(-(stored - region.room) // PIECE_NBYTES))
            unused += held[num_used:]
            del held[num_used:]
        self.area.settle(unused)


@dataclass(frozen=True, slots=True)
class Place:
    """The first byte of a section in storage: a position in a region of an extent."""

    compressed: CompressedExtent
    region: int
    position: int

    def ranges(self, nbytes: int) -> Iterator[tuple[Extent, int, int]]:
        """(extent, offset, size) of each run of bytes in storage that the section's first `nbytes` bytes take."""
        region, pieces = self.compressed.regions[self.region], self.compressed.pieces[self.region]
        inside = max(0, min(nbytes, region.room - self.position))
        if inside:
            yield self.compressed.extent, region.offset + self.position, inside
        if nbytes > inside:
            yield from self.compressed.area.ranges(pieces, max(0, self.position - region.room), nbytes - inside)
