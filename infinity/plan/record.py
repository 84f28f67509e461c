"""What is stored of a shard: its record, segment behind segment, the same bytes in every tier.

Pure arithmetic. Must not know tiers or files. Offsets and sizes are in bytes, but for `numel`.
"""

import functools
from dataclasses import dataclass

from infinity.formats.format import Format, Segment
from infinity.sizes import round_up

SEGMENT_ALIGNMENT_NBYTES = 4096


KINDS = WEIGHTS, STATES, GRADIENTS = "weights", "states", "gradients"
"""What a host copy or an extent holds of a shard: its weight segment, its other segments, its gradient."""

LATE_GRADIENT = Segment("gradient", "bf16")
"""What lies behind a record's states where their moments may be late: [Note: late moments] in late_moments.py."""


@dataclass(frozen=True)
class Record:
    """Byte layout of one shard's record, the same in every tier. Segments start on 4096-byte borders.

    `numel` elements. A forward pass reads [0, weight_nbytes); the states are [states_offset, nbytes).
    """

    numel: int
    format: Format
    offsets: tuple[int, ...]
    nbytes: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.format.segments

    @property
    def weight_nbytes(self) -> int:
        """The segments that a forward pass reads, with their padding."""
        num = len(self.format.weight_segments)
        return self.offsets[num] if len(self.offsets) > num else self.nbytes

    @property
    def states_offset(self) -> int:
        return self.weight_nbytes

    @property
    def states_nbytes(self) -> int:
        return self.nbytes - self.states_offset

    @property
    def moments_nbytes(self) -> int:
        """The optimizer's states, without padding."""
        return sum(segment.nbytes(self.numel) for segment in self.format.moment_segments)

    @property
    def late_gradient(self) -> tuple[Segment, int, int]:
        """LATE_GRADIENT, its offset behind the states and its bytes, padding included; no bytes where moments are never late."""
        numel = self.numel if self.format.may_be_late else 0
        return LATE_GRADIENT, self.states_nbytes, round_up(numel * LATE_GRADIENT.itemsize, SEGMENT_ALIGNMENT_NBYTES)

    def of(self, kind: str, *, late: bool = False) -> list[tuple[Segment, int, int]]:
        """The segments that a kind of copy holds, each with its offset there and its bytes, padding included; none of a gradient's. late:
        with what lies behind them where moments may be late."""
        ends = (*self.offsets[1:], self.nbytes)
        found = [(segment, offset, end - offset) for segment, offset, end in zip(self.segments, self.offsets, ends)]
        num = len(self.format.weight_segments)
        if kind == STATES:
            states = [(segment, offset - self.states_offset, nbytes) for segment, offset, nbytes in found[num:]]
            return [*states, self.late_gradient] if late else states
        return found[:num] if kind == WEIGHTS else []

    def offset_of(self, name: str) -> int:
        """Byte offset of the named segment. Raises KeyError if the record has none."""
        for segment, offset in zip(self.segments, self.offsets):
            if segment.name == name:
                return offset
        raise KeyError(name)


@functools.lru_cache(maxsize=None)
def record_layout(shard_used: int, format: Format) -> Record:
    """The record of a shard of which `shard_used` elements (maybe none) hold parameters."""
    offsets, nbytes = [], 0
    for segment in format.segments:
        offsets.append(nbytes)
        nbytes += round_up(segment.nbytes(shard_used), SEGMENT_ALIGNMENT_NBYTES)
    return Record(shard_used, format, tuple(offsets), nbytes)
