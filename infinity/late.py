"""Updates that a record's moments on NVMe lack, and host memory in which their gradients wait.

Knows bytes in blocks, and sizes. Must not know drives, how bytes are compressed, or what an update computes.
"""

# [Note: late moments]
# What an update does to Adam's moments can be done again with its gradient. So most updates of a record leave the moments on NVMe as they
# are and keep the gradient, a fifth of their bytes: these are late there, and whoever reads them brings them up to date. Where host
# memory is left over, gradients of up to MOST_LATE updates in a row wait there; else one update's lie on NVMe behind the states. Records take
# turns, so that each step writes the moments of as many. Bytes a parameter of a record's states, with fp32 moments:
#
#     whole               residual 2.0 | momentum 3.3 | variance 3.3                      8.6 are written, and read for the next update
#     late, on NVMe       residual 2.0 |              |              | gradient 1.3       3.3 written, 9.9 read
#     late, in memory     residual 2.0 |              |              |                    2.0 written, 8.6 read
#
# That is done in lanes of its own: never in the main thread, where an interrupt could leave it half done, and never twice.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.arena import Arena, Slot, Slots
from infinity.chunks import round_up

BLOCK_NBYTES = 128 << 10  # so small that half of one a section is little, and a copy short that holds the GIL
MOST_LATE = 2  # updates in a row; a third would save half a byte a parameter more and have each read do half an update more
SLACK = 1.1  # gradients take up to so much more than they should


@dataclass(frozen=True, slots=True)
class Held:
    """nbytes of a section of a gradient, compressed if they are fewer than the section's, in blocks."""

    nbytes: int
    blocks: list[Slot]


@dataclass(frozen=True, slots=True)
class Late:
    """An update that the moments on NVMe lack. catch_up: does it to those in memory that holds a record's states and, behind them, its
    gradient. held: the sections of this one, None where it is on NVMe."""

    catch_up: Callable[[memoryview], None]
    held: list[Held] | None


class Pool:
    """Blocks of host memory for gradients. Any thread may call."""

    def __init__(self, arena: Arena, nbytes: int):
        self._slots = Slots(arena, "late gradients", BLOCK_NBYTES, nbytes // BLOCK_NBYTES)

    @property
    def num_free(self) -> int:
        """Of blocks."""
        return self._slots.num_free

    def put(self, data: memoryview) -> Held | None:
        """Hold a copy; None, and nothing held, where there is no room."""
        blocks: list[Slot] = []
        for start in range(0, len(data), BLOCK_NBYTES):
            block = self._slots.try_acquire()
            if block is None:
                self.release(Held(0, blocks))
                return None
            part = data[start : start + BLOCK_NBYTES]
            block.buffer[: len(part)] = part
            blocks.append(block)
        return Held(len(data), blocks)

    def copy(self, held: Held, target: memoryview) -> None:
        """Fill target, of its nbytes."""
        for start, block in zip(range(0, held.nbytes, BLOCK_NBYTES), held.blocks, strict=True):
            part = target[start : start + BLOCK_NBYTES]
            part[:] = block.buffer[: len(part)]

    def release(self, held: Held) -> None:
        for block in held.blocks:
            block.release()


def pool_nbytes(gradients_nbytes: Sequence[int], left_nbytes: int) -> tuple[int, int]:
    """(bytes for a pool, how many updates in a row may be late by it), of what is left of host memory; (0, 0) where that is too little.

    gradients_nbytes: about what a gradient of each record takes in a pool.
    """
    found = num_late(gradients_nbytes, left_nbytes)
    return _needed_nbytes(gradients_nbytes, found), found


def num_late(gradients_nbytes: Sequence[int], nbytes: int) -> int:
    """How many updates in a row may be late by a pool of nbytes. gradients_nbytes: as of `pool_nbytes`."""
    fitting = (number for number in range(MOST_LATE, 0, -1) if 0 < _needed_nbytes(gradients_nbytes, number) <= nbytes)
    return next(fitting, 0)


def _needed_nbytes(gradients_nbytes: Sequence[int], num_late: int) -> int:
    mean = SLACK * sum(gradients_nbytes) * num_late / 2  # over the records' turns
    more = num_late * max(gradients_nbytes, default=0)  # who takes may come before who gives back
    return round_up(int(mean + more), BLOCK_NBYTES)
