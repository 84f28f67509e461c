"""The redo log: updates that a record's moments on NVMe lack, and host memory in which their gradients wait.

Knows when an update may be left to the log, and how it is done again. Must not know drives, or how bytes are compressed.
"""

# [Note: late moments]
# What an update does to Adam's moments can be done again with its gradient. So most updates of a record leave the moments on NVMe as they
# are, and keep the gradient instead: the moments are late there, and whoever reads them brings them up to date. That is done in lanes of
# its own: never in the main thread, where an interrupt could leave it half done, and never twice. Where host memory is left over, gradients
# of up to MOST_LATE updates in a row wait there; else one update's lie on NVMe behind the states, if they are coded. Records take turns, so
# that each step writes the moments of as many: whose turn it is, their logs know. Bytes a parameter of a record's states, with fp32 moments
# that are coded:
#
#     whole               residual 2.0 | momentum 3.3 | variance 3.3                      8.6 are written, and read for the next update
#     late, on NVMe       residual 2.0 |              |              | gradient 1.3       3.3 written, 9.9 read
#     late, in memory     residual 2.0 |              |              |                    2.0 written, 8.6 read

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from infinity.plan.record import ADAM_MOMENTS, STATES, Record
from infinity.plan.late_moments import BLOCK_NBYTES
from infinity.system.arena import Arena, Slot, Slots
from infinity.tiers.arithmetic import Computed
from infinity.formats.dtypes import TORCH_DTYPES


class RedoLog:
    """Of one record's moments on NVMe: the updates that they lack, and whose turn it is to write them. See [Note: late moments].

    late: in their order. num_late: updates in a row that may leave moments late; left: of these, before the next one that writes them.
    """

    def __init__(self, num_late: int = 0, left: int = 0):
        self.late: tuple[LateUpdate, ...] = ()
        self.num_late = num_late
        self._left = left
        self._lock = threading.Lock()  # a record may move to the device while it is written

    def catch_up(self, record: Record, states: memoryview, gradient: torch.Tensor, computed: Computed, *, was_clean: bool) -> CatchUp | None:
        """An update was computed in host memory of the states: what does it to moments that lack it, with its gradient, which is kept
        behind the states; None where this one writes them. was_clean: whether NVMe has what that memory held before."""
        may_be_late = self._left > 0
        self._left = self._left - 1 if may_be_late else self.num_late
        if not (may_be_late and was_clean and computed.hyper.rule.can_advance):
            return None
        late_gradient(record, states).copy_(gradient)
        return CatchUp(record, computed)

    def add(self, update: Late) -> None:
        """It was written without its moments."""
        with self._lock:
            self.late += (update,)

    def forget(self) -> None:
        """Moments on NVMe lack nothing any more, or are of no use."""
        with self._lock:
            late, self.late = self.late, ()
        release(pooled for update in late for pooled in update.pooled or ())


def redo_logs(late_nbytes: Sequence[int], num_late: int) -> list[RedoLog | None]:
    """Of records, of which each step writes the moments of as many. late_nbytes: what those of each take that may be late, else 0."""
    turns_nbytes = [0] * (num_late + 1)  # written in the first step, the second, ..., and again in turn
    found: list[RedoLog | None] = []
    for nbytes in late_nbytes:
        turn = turns_nbytes.index(min(turns_nbytes))
        turns_nbytes[turn] += nbytes
        found.append(RedoLog(num_late, turn) if nbytes else None)
    return found


def late_gradient(record: Record, buffer: memoryview) -> torch.Tensor:
    """bf16 [shard_used]: the gradient behind a record's states, where these have room for one."""
    _, offset, _ = record.late_gradient
    return torch.frombuffer(buffer, dtype=torch.bfloat16, count=record.numel, offset=offset)


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Does an update to moments that lack it, in memory that holds a record's states and the update's gradient behind them."""

    record: Record
    computed: Computed

    def __call__(self, states: memoryview) -> None:
        moments = {
            segment.name: torch.frombuffer(states, dtype=TORCH_DTYPES[segment.dtype], count=self.record.numel, offset=offset)
            for segment, offset, _ in self.record.of(STATES)
            if segment.name in ADAM_MOMENTS
        }
        self.computed.advance(moments, late_gradient(self.record, states))


@dataclass(frozen=True, slots=True)
class PooledGradient:
    """nbytes of a section of a gradient, compressed if they are fewer than the section's, in blocks."""

    nbytes: int
    blocks: list[Slot]

    def release(self) -> None:
        for block in self.blocks:
            block.release()


@dataclass(frozen=True, slots=True)
class LateUpdate:
    """An update that the moments on NVMe lack. catch_up: does it to those in memory that holds a record's states and, behind them, its
    gradient. pooled: the sections of this one, None where it is on NVMe."""

    catch_up: Callable[[memoryview], None]
    pooled: list[PooledGradient] | None


class GradientPool:
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

    def put(self, data: memoryview) -> PooledGradient | None:
        """Keep a copy; None, and nothing kept, where there is no room."""
        blocks: list[Slot] = []
        for start in range(0, len(data), BLOCK_NBYTES):
            block = self._slots.try_acquire()
            if block is None:
                PooledGradient(0, blocks).release()
                return None
            part = data[start : start + BLOCK_NBYTES]
            block.buffer[: len(part)] = part
            blocks.append(block)
        return PooledGradient(len(data), blocks)

    def copy(self, pooled: PooledGradient, target: memoryview) -> None:
        """Fill target, of its nbytes."""
        for start, block in zip(range(0, pooled.nbytes, BLOCK_NBYTES), pooled.blocks, strict=True):
            part = target[start : start + BLOCK_NBYTES]
            part[:] = block.buffer[: len(part)]


def release(parts: Iterable[PooledGradient]) -> None:
    for part in parts:
        part.release()
