"""Updates that a record's moments on NVMe lack, and host memory in which their gradients wait.

Knows bytes in blocks, and sizes. Must not know drives, how bytes are compressed, or what an update computes.
"""

# [Note: late moments]
# What an update does to Adam's moments can be done again with its gradient. So most updates of a record leave the moments on NVMe as they
# are, and keep the gradient instead: the moments are late there, and whoever reads them brings them up to date. That is done in lanes of its
# own: never in the main thread, where an interrupt could leave it half done, and never twice. Where host memory is left over, gradients of
# up to MOST_LATE updates in a row wait there; else one update's lie on NVMe behind the states, if they are coded. Records take turns, so that
# each step writes the moments of as many. Bytes a parameter of a record's states, with fp32 moments that are coded:
#
#     whole               residual 2.0 | momentum 3.3 | variance 3.3                      8.6 are written, and read for the next update
#     late, on NVMe       residual 2.0 |              |              | gradient 1.3       3.3 written, 9.9 read
#     late, in memory     residual 2.0 |              |              |                    2.0 written, 8.6 read

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infinity.plan.redo import BLOCK_NBYTES
from infinity.system.arena import Arena, Slot, Slots


@dataclass(frozen=True, slots=True)
class Held:
    """nbytes of a section of a gradient, compressed if they are fewer than the section's, in blocks."""

    nbytes: int
    blocks: list[Slot]

    def release(self) -> None:
        for block in self.blocks:
            block.release()


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

    @property
    def used_nbytes(self) -> int:
        return (self._slots.count - self.num_free) * BLOCK_NBYTES

    def put(self, data: memoryview) -> Held | None:
        """Hold a copy; None, and nothing held, where there is no room."""
        blocks: list[Slot] = []
        for start in range(0, len(data), BLOCK_NBYTES):
            block = self._slots.try_acquire()
            if block is None:
                Held(0, blocks).release()
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
