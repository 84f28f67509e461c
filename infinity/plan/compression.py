"""Sizes of compressed records on NVMe: the coded sections, their room, and sums over sections. See [Note: compressed extents] in
tiers/compressed_extents.py.

Knows sizes, and expected properties of floats and drives. Must not know memory, or how floats are coded.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infinity.formats.format import ADAM_MOMENTS, DTYPE_NBYTES, Segment
from infinity.plan.late_moments import BLOCK_NBYTES
from infinity.plan.record import LATE_GRADIENT, SEGMENT_ALIGNMENT_NBYTES, STATES, WEIGHTS, Record
from infinity.sizes import round_up

CODED = {"bf16", "fp16", "fp32"}  # dtypes that the codec takes
LARGEST_SECTION_NBYTES = 2 << 20
NUM_LANES = 4
NUM_BUFFERS = 2  # per lane: one buffer is written while the other is filled
SAVED_BITS = 5.2  # of each float, during training
ROOM = {2: 0.668, 4: 0.842}  # share of a section for which an extent has room, by itemsize: [Note: the planned room] in tiers/compressed_extents.py
PIECE_NBYTES = 128 << 10  # of an overflow area
AREA_SHARE = 1 / 200  # of the room of all extents: an overflow area at the start
SECONDS_PER_NBYTE = 0.4e-9  # thread time per byte that a drive moves: 25 % above the codec's measured rate beside a GPU
CORES_SHARE, LANES_SHARE = 1 / 4, 1 / 2  # largest share of their time


@dataclass(frozen=True)
class Section:
    """A byte range of an extent. itemsize: bytes of a float, 0 if the bytes are stored without coding. late: True for a section that is
    written only if moments are late (the gradient). False for one that is written only if they are not (the moments). None for one that
    is always written.
    """

    offset: int
    nbytes: int
    itemsize: int
    late: bool | None = None


@dataclass(frozen=True)
class Region:
    """Consecutive sections that are always written together. In storage, their bytes lie one behind the other.

    offset, room: the bytes of the extent that belong to the region. The part of the code that exceeds the room lies in an overflow area.
    """

    sections: tuple[Section, ...]
    offset: int
    room: int

    @property
    def late(self) -> bool | None:
        """As `Section.late`."""
        return self.sections[0].late

    @property
    def nbytes(self) -> int:
        """Size without coding, the largest possible one."""
        return sum(section.nbytes for section in self.sections)

    @property
    def num_pieces(self) -> int:
        """Pieces of an overflow area for the largest possible size."""
        return -(-(self.nbytes - self.room) // PIECE_NBYTES)


Segments = tuple[tuple[Segment, int, int], ...]
"""Segments of an extent, each with the offset in memory and the size in bytes, multiples of 4096."""


@functools.cache  # many extents share few layouts
def cut(segments: Segments, most_nbytes: int) -> tuple[Section, ...]:
    """Cut an extent into sections. most_nbytes: largest section of coded floats; 0 without coding."""
    sections = []
    late: dict[str, bool] = {}
    if any(segment == LATE_GRADIENT for segment, _, _ in segments):
        late = dict.fromkeys(ADAM_MOMENTS, False) | {LATE_GRADIENT.name: True}
    for segment, offset, nbytes in segments:
        itemsize = DTYPE_NBYTES[segment.dtype] if most_nbytes and segment.dtype in CODED else 0  # other dtypes are not floats
        size = most_nbytes if itemsize else nbytes
        for start in range(offset, offset + nbytes, size or 1):
            sections.append(Section(start, min(size, offset + nbytes - start), itemsize, late.get(segment.name)))
    return tuple(sections)


@functools.cache
def regions(segments: Segments, most_nbytes: int) -> tuple[Region, ...]:
    """The regions of an extent. most_nbytes: see `cut`. The room does not depend on the sizes of sections."""
    found, offset = [], 0
    for _, group in itertools.groupby(cut(segments, most_nbytes), key=lambda section: section.late):
        sections = tuple(group)
        found.append(Region(sections, offset, sum(map(_room, sections))))
        offset += found[-1].room
    return tuple(found)


@functools.cache
def room_nbytes(record: Record, kind: str, *, late: bool, codes: bool) -> int:
    """Bytes of the extent of a kind. late: with room for a gradient behind the states."""
    return sum(region.room for region in regions(tuple(record.of(kind, late=late)), LARGEST_SECTION_NBYTES if codes else 0))


def area_nbytes(extents: Sequence[tuple[int, int]]) -> int:
    """Bytes of an overflow area at the start. extents: for each the room, and the size without coding.

    The largest extent finds room for its uncoded bytes. Hence each write whose code fits its extent succeeds, and no write has to wait for
    more than the writes before.
    """
    excess = [nbytes - room for room, nbytes in extents if nbytes > room]
    if not excess:
        return 0
    wanted = max(max(excess), int(AREA_SHARE * sum(room for room, _ in extents)))
    return min(round_up(wanted, PIECE_NBYTES), sum(round_up(each, PIECE_NBYTES) for each in excess))


def buffers_nbytes(records: Iterable[Record]) -> int:
    """Host memory of the buffers for a rank with these records: no section is larger than the largest segment of floats."""
    segments = (segment for record in records for kind in (WEIGHTS, STATES) for segment in record.of(kind))
    largest = max((nbytes for segment, _, nbytes in segments if segment.dtype in CODED), default=0)
    return NUM_LANES * NUM_BUFFERS * min(largest, LARGEST_SECTION_NBYTES)


def pays(choice: str, nbytes_per_s: float, num_cores: int) -> bool:
    """Whether to compress. choice: the value of Config. "auto" asks whether a rank with num_cores has time for the bytes that its drives move
    per second. nbytes_per_s: 0 if unknown.
    """
    busy = nbytes_per_s * SECONDS_PER_NBYTE
    return choice == "on" or 0 < busy <= min(CORES_SHARE * num_cores, LANES_SHARE * 2 * NUM_LANES)


def pooled_nbytes(record: Record, *, codes: bool) -> int:
    """Approximate bytes of a record's gradient in a pool."""
    sections = cut((record.late_gradient,), LARGEST_SECTION_NBYTES if codes else 0)
    return sum(round_up(expected_nbytes(section), BLOCK_NBYTES) for section in sections)


def moved_nbytes(
    segments: Sequence[tuple[Segment, int, int]], num_late: int = 0, *, codes: bool = True, pools: bool = False
) -> tuple[int, int]:
    """Approximate bytes read and written per update of an extent. The mean is over a sequence of updates with num_late late ones in a row.
    Other arguments: see `Compressor.compressed`. pools: whether gradients wait in host memory.
    """
    stored: collections.Counter[bool | None] = collections.Counter()
    for section in cut(tuple(segments), LARGEST_SECTION_NBYTES if codes else 0):
        stored[section.late] += expected_nbytes(section)
    always, whole, late = stored[None], stored[False], 0 if pools else stored[True]
    written = (whole + num_late * late) / (num_late + 1)
    return int(always + whole + late * num_late / (num_late + 1)), int(always + written)


def _room(section: Section) -> int:
    """Bytes of a section's share of an extent."""
    return round_up(int(section.nbytes * ROOM[section.itemsize]), SEGMENT_ALIGNMENT_NBYTES) if section.itemsize else section.nbytes


def expected_nbytes(section: Section) -> int:
    """Approximate bytes of a section in code."""
    return int(section.nbytes * (1 - SAVED_BITS / 8 / section.itemsize)) if section.itemsize else section.nbytes
