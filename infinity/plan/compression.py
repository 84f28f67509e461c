"""What compressing records on NVMe takes and saves: the sections that are coded, and sums over them, see [Note: compressed extents] in
tiers/compression.py.

Knows sizes, and what may be expected of floats and drives. Must not know memory, or how floats are coded.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infinity.formats.format import ADAM_MOMENTS, DTYPE_NBYTES, Segment
from infinity.plan.record import LATE_GRADIENT, STATES, WEIGHTS, Record
from infinity.plan.late_moments import BLOCK_NBYTES
from infinity.sizes import round_up

CODED = {"bf16", "fp16", "fp32"}  # dtypes that the codec takes
LARGEST_SECTION_NBYTES = 2 << 20
NUM_LANES = 4
NUM_BUFFERS = 2  # of a lane: one is written from while the other is filled
SAVED_BITS = 5.2  # of a float, while a model trains
SECONDS_PER_NBYTE = 0.4e-9  # that a drive moves, of a thread: a quarter more than by the codec's rates beside a GPU
CORES_SHARE, LANES_SHARE = 1 / 4, 1 / 2  # of their time, at most


@dataclass(frozen=True)
class Section:
    """Bytes of an extent; itemsize of its floats, 0 where they are stored as they are. late: whether it is written where moments are late
    (the gradient), or where they are not (the moments); None: always."""

    offset: int
    nbytes: int
    itemsize: int
    late: bool | None = None


@functools.cache  # extents are many, their layouts few
def cut(segments: tuple[tuple[Segment, int, int], ...], most_nbytes: int) -> tuple[Section, ...]:
    """most_nbytes: of a section of floats that are coded; 0 where none are."""
    sections = []
    late: dict[str, bool] = {}
    if any(segment == LATE_GRADIENT for segment, _, _ in segments):
        late = dict.fromkeys(ADAM_MOMENTS, False) | {LATE_GRADIENT.name: True}
    for segment, offset, nbytes in segments:
        itemsize = DTYPE_NBYTES[segment.dtype] if most_nbytes and segment.dtype in CODED else 0
        size = most_nbytes if itemsize else nbytes
        for start in range(offset, offset + nbytes, size or 1):
            sections.append(Section(start, min(size, offset + nbytes - start), itemsize, late.get(segment.name)))
    return tuple(sections)


def buffers_nbytes(records: Iterable[Record]) -> int:
    """Of host memory, for a rank with these records: no section is larger than their largest segment of floats."""
    segments = (segment for record in records for kind in (WEIGHTS, STATES) for segment in record.of(kind))
    largest = max((nbytes for segment, _, nbytes in segments if segment.dtype in CODED), default=0)
    return NUM_LANES * NUM_BUFFERS * min(largest, LARGEST_SECTION_NBYTES)


def pays(choice: str, nbytes_per_s: float, num_cores: int) -> bool:
    """Whether to compress what may be. choice: that of Config; "auto" asks whether a rank with so many cores has time for what drives move
    for it that fast; 0 is not known."""
    busy = nbytes_per_s * SECONDS_PER_NBYTE
    return choice == "on" or 0 < busy <= min(CORES_SHARE * num_cores, LANES_SHARE * 2 * NUM_LANES)


def pooled_nbytes(record: Record, *, codes: bool) -> int:
    """About what a gradient of a record takes in a pool."""
    sections = cut((record.late_gradient,), LARGEST_SECTION_NBYTES if codes else 0)
    return sum(round_up(_about(section), BLOCK_NBYTES) for section in sections)


def moved_nbytes(
    segments: Sequence[tuple[Segment, int, int]], num_late: int = 0, *, codes: bool = True, pools: bool = False
) -> tuple[int, int]:
    """About how many bytes are read and written of an extent, in the mean of some updates, of which num_late in a row are late. Other
    arguments as of `Compressor.compressed`. pools: whether gradients wait in host memory."""
    stored: collections.Counter[bool | None] = collections.Counter()
    for section in cut(tuple(segments), LARGEST_SECTION_NBYTES if codes else 0):
        stored[section.late] += _about(section)
    always, whole, late = stored[None], stored[False], 0 if pools else stored[True]
    written = (whole + num_late * late) / (num_late + 1)
    return int(always + whole + late * num_late / (num_late + 1)), int(always + written)


def _about(section: Section) -> int:
    """How many bytes it takes compressed."""
    return int(section.nbytes * (1 - SAVED_BITS / 8 / section.itemsize)) if section.itemsize else section.nbytes
