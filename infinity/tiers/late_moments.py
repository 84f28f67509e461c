"""The redo log: updates that a record's moments on NVMe do not contain yet, and host memory for the gradients of these updates.

Knows when an update may go to the log, and how an update is replayed. Must not know drives, or how bytes are compressed.
"""

# [Note: late moments]
# An update of Adam's moments can be replayed from the gradient. Most updates of a record therefore do not write the moments to NVMe, and keep
# the gradient instead: the moments on NVMe are late. A read of the moments replays the missing updates, exactly once, in a lane. The main
# thread never replays, because an interrupt could leave a replay half done. If host memory is left over, gradients of up to MOST_LATE updates
# in a row wait there. Otherwise the gradient of one update is stored on NVMe behind the states, if the states are compressed. Records take
# turns, so each step writes the moments of about as many records. Bytes a parameter of a record's states, with compressed fp32 moments:
#
#     whole               residual 2.0 | momentum 3.3 | variance 3.3                      8.6 written, 8.6 read for the next update
#     late, on NVMe       residual 2.0 |              |              | gradient 1.3       3.3 written, 9.9 read
#     late, in memory     residual 2.0 |              |              |                    2.0 written, 8.6 read

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from infinity.formats.dtypes import TORCH_DTYPES
from infinity.formats.format import ADAM_MOMENTS
from infinity.plan.late_moments import BLOCK_NBYTES
from infinity.plan.record import STATES, Record
from infinity.system import host_bytes
from infinity.system.arena import Arena, Slot, Slots
from infinity.tiers.arithmetic import Computed


class RedoLog:
    """The missing updates of one record's moments on NVMe, see [Note: late moments].

    late: missing updates in order. num_late: updates in a row that need not write moments. left: such updates before the next write.
    """

    def __init__(self, num_late: int = 0, left: int = 0):
        self.late: tuple[LateUpdate, ...] = ()
        self.num_late = num_late
        self._left = left
        self._lock = threading.Lock()  # a record may move to the device during a write

    def catch_up(self, record: Record, states: memoryview, gradient: torch.Tensor, computed: Computed, *, was_clean: bool) -> CatchUp | None:
        """An update has changed the states in host memory. Returns the replay of this update, or None if this update writes the moments.

        Copies the gradient behind the states. was_clean: host memory and NVMe were equal before the update.
        """
        may_be_late = self._left > 0
        self._left = self._left - 1 if may_be_late else self.num_late
        if not (may_be_late and was_clean and computed.can_advance):
            return None
        late_gradient(record, states).copy_(gradient)
        return CatchUp(record, computed)

    def add(self, update: LateUpdate) -> None:
        """The record was written without the moments of this update."""
        with self._lock:
            self.late += (update,)

    def forget(self) -> None:
        """The moments on NVMe are complete, or no longer used."""
        with self._lock:
            late, self.late = self.late, ()
        release(pooled for update in late for pooled in update.pooled or ())


def redo_logs(late_nbytes: Sequence[int], num_late: int) -> list[RedoLog | None]:
    """A log for each record, so that each step writes about as many bytes of moments.

    late_nbytes: bytes of each record's moments that may be late, 0 if none: then the record has no log.
    """
    nbytes_by_step = [0] * (num_late + 1)  # written in step i, and again every num_late + 1 steps
    found: list[RedoLog | None] = []
    for nbytes in late_nbytes:
        step = nbytes_by_step.index(min(nbytes_by_step))
        nbytes_by_step[step] += nbytes
        found.append(RedoLog(num_late, step) if nbytes else None)
    return found


def late_gradient(record: Record, buffer: memoryview) -> torch.Tensor:
    """bf16 [shard_used]: the gradient behind a record's states, if the record has room for one."""
    _, offset, _ = record.late_gradient
    return torch.frombuffer(buffer, dtype=torch.bfloat16, count=record.numel, offset=offset)


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The replay of one update, in memory that holds a record's states and, behind them, the gradient of the update."""

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
    """One section of a gradient in blocks of host memory. nbytes: compressed if fewer than the section has."""

    nbytes: int
    blocks: list[Slot]

    def release(self) -> None:
        for block in self.blocks:
            block.release()


@dataclass(frozen=True, slots=True)
class LateUpdate:
    """A missing update. catch_up: replays the update. pooled: sections of the gradient in host memory, None if the gradient is on NVMe."""

    catch_up: Callable[[memoryview], None]
    pooled: list[PooledGradient] | None


class GradientPool:
    """Blocks of host memory for gradients. Any thread may call the methods."""

    def __init__(self, arena: Arena, nbytes: int):
        self._slots = Slots(arena, "late gradients", BLOCK_NBYTES, nbytes // BLOCK_NBYTES)

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return self._slots.num_free

    @property
    def used_nbytes(self) -> int:
        return (self._slots.count - self.num_free) * BLOCK_NBYTES

    def put(self, data: memoryview) -> PooledGradient | None:
        """Store a copy of the data. Returns None, and stores nothing, if there is no room."""
        blocks: list[Slot] = []
        for start in range(0, len(data), BLOCK_NBYTES):
            block = self._slots.try_acquire()
            if block is None:
                PooledGradient(0, blocks).release()
                return None
            part = data[start : start + BLOCK_NBYTES]
            host_bytes.work(len(part), _copy, block.buffer, part, kind=host_bytes.COPY)
            blocks.append(block)
        return PooledGradient(len(data), blocks)

    def copy(self, pooled: PooledGradient, target: memoryview) -> None:
        """Copy the stored bytes to target, which has pooled.nbytes."""
        for start, block in zip(range(0, pooled.nbytes, BLOCK_NBYTES), pooled.blocks, strict=True):
            part = target[start : start + BLOCK_NBYTES]
            host_bytes.work(len(part), _copy, part, block.buffer[: len(part)], kind=host_bytes.COPY)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy the source to the begin of the target."""
    target[: len(source)] = source


def release(parts: Iterable[PooledGradient]) -> None:
    for part in parts:
        part.release()
