"""A snapshot: all records as of one moment, for a reader that copies the records while training changes them.

Knows records, and the thread that is about to change a record. Must not know the reader, or the destination of the bytes.

# [Note: copies on write]
# A snapshot shows the records at its creation, between two steps. Each record is copied once, part by part, into staging buffers:
#   - step() announced an update that has not begun: this update belongs to the snapshot. The update lane copies the updated record.
#   - A thread is about to change or to move the record: this thread copies the record first. The record is in host memory then, so the
#     copy needs no read.
#   - Otherwise the reader asks for the record (`read`), in a separate thread.
# A part stays in its buffer until the reader has written it. A thread that copies waits for a free buffer, and training has no other wait.
# The reader takes parts with `next_part`. The thread that takes parts requests no record, so this thread never waits for a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

import aio_ext
from infinity.plan.tiers import in_storage
from infinity.system.arena import PAGE_NBYTES
from infinity.system.staging_buffers import StagingBuffer, StagingBuffers
from infinity.system.threads import monitor
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.record_mover import Lease, RecordMover
from infinity.tiers.updates import Updater


class Part(NamedTuple):
    """Bytes of the record of chunk `index`, from byte `offset` of the record on. The reader releases the buffer."""

    index: int
    offset: int
    data: memoryview  # whole pages: zeros fill the last one
    buffer: StagingBuffer


class Snapshot:
    """See [Note: copies on write]. A chunk has at most one snapshot at a time.

    versions: by chunk, the number of changes that the record has had in this snapshot. Equal versions of a record have equal bytes.
    checksums: one CRC-32C a segment, by chunk, after the copy. steps: the number of updates, by parameter, after the copy.
    """

    def __init__(self, chunks: Sequence[ChunkState], records: RecordMover, updater: Updater, buffers: StagingBuffers):
        self.versions = [chunk.num_changes + chunk.update.is_announced for chunk in chunks]
        self.checksums: dict[int, tuple[int, ...]] = {}
        self.steps: dict[int, int] = {}
        self.buffers = buffers
        self.error: BaseException | None = None  # the first one, which ended the snapshot
        self._chunks, self._records, self._updater = chunks, records, updater
        self._lock = monitor()
        self._left = {chunk.index for chunk in chunks}  # records that are still to be copied or skipped
        self._busy: set[int] = set()  # records that a thread copies now
        self._after_update = {chunk.index for chunk in chunks if chunk.update.is_announced}
        self._parts: deque[Part] = deque()
        for chunk in chunks:
            assert chunk.snapshot is None, chunk
            chunk.snapshot = self

    # The reader calls these.

    @property
    def num_left(self) -> int:
        return len(self._left)

    @property
    def is_complete(self) -> bool:
        """Whether the reader has every part."""
        with self._lock:
            return not self._left and not self._parts

    def waits_for_step(self, index: int) -> bool:
        """Whether the next step brings the record into host memory. A copy before that step would cost a read from NVMe."""
        chunk = self._chunks[index]
        return index in self._after_update or (chunk.trainable and in_storage((chunk.weights_home, chunk.states_home)))

    def is_copied_here(self, index: int) -> bool:
        """Whether only the training thread may copy the record: the record is on the device."""
        return self._chunks[index].on_device

    @property
    def awaited_updates(self) -> list[int]:
        """Chunks whose announced update belongs to the snapshot and is not over."""
        with self._lock:
            return sorted(self._after_update)

    def read(self, index: int) -> None:
        """Copy a record in this thread, unless the record was copied or skipped, or the announced update has not run."""
        if index in self._left and index not in self._after_update:
            self._copy(self._chunks[index])

    def skip(self, indices: Iterable[int]) -> bool:
        """The reader has these records already. Returns False, and skips none, if one of them is being copied or was copied."""
        indices = set(indices)
        with self._lock:
            if self.error is not None or not indices <= self._left - self._busy:
                return False
            for index in indices:
                self._let_go(self._chunks[index])
            self._lock.notify_all()
            return True

    def next_part(self, timeout_s: float) -> Part | None:
        """Return the oldest part, or None if no part came in time. Raises the error that ended the snapshot."""
        with self._lock:
            if not self._parts and self._left and self.error is None:
                self._lock.wait(timeout_s)
            self.check()
            if self._parts:
                return self._parts.popleft()
        self._records.failure.check()
        return None

    def check(self) -> None:
        """Raise the error that ended the snapshot, if any."""
        if self.error is not None:
            raise self.error

    def give_up(self, error: BaseException) -> None:
        """From now on, no thread copies for this snapshot. `next_part` raises the first error."""
        with self._lock:
            self.error = self.error or error
            self.buffers.fail(error)
            for chunk in self._chunks:
                if chunk.snapshot is self:
                    chunk.snapshot = None
            self._left &= self._busy
            self._lock.notify_all()

    def close(self) -> None:
        """Wait until no thread copies, then free the buffers. The snapshot is complete or given up."""
        with self._lock:
            while self._busy:
                self._lock.wait()
        self.buffers.close()

    # The thread that changes a record calls these, by way of ChunkState.

    def before_change(self, chunk: ChunkState, lease: Lease | None) -> None:
        """The record is about to change or to move. lease: of the whole record, if the caller has one."""
        if chunk.index not in self._after_update:
            self._copy(chunk, lease)

    def after_update(self, chunk: ChunkState, lease: Lease) -> None:
        """An update of the record is over."""
        self._copy(chunk, lease)

    def _copy(self, chunk: ChunkState, lease: Lease | None = None) -> None:
        """Copy the record, unless another thread has. An error ends the snapshot, not the training.

        A thread that waits here for another thread waits only for a copy and for buffers. No thread claims a record before the record is in
        memory.
        """
        try:
            has_it = lease is not None or chunk.on_device
            with contextlib.nullcontext(lease) if has_it else self._records.lease(chunk) as lease:
                if not self._claim(chunk):
                    return
                try:
                    self._copy_segments(chunk, lease)
                except BaseException as error:
                    self.give_up(error)  # before the record counts as copied
                finally:
                    with self._lock:
                        self._busy.discard(chunk.index)
                        self._let_go(chunk)
                        self._lock.notify_all()
        except BaseException as error:
            self.give_up(error)

    def _claim(self, chunk: ChunkState) -> bool:
        with self._lock:
            while chunk.index in self._busy:
                self._lock.wait()
            if chunk.index not in self._left:
                return False
            self._busy.add(chunk.index)
            return True

    def _let_go(self, chunk: ChunkState) -> None:
        """Under the lock: the record may change from now on."""
        self._left.discard(chunk.index)
        self._after_update.discard(chunk.index)
        self.steps.update(chunk.steps)
        if chunk.snapshot is self:
            chunk.snapshot = None

    def _copy_segments(self, chunk: ChunkState, lease: Lease | None) -> None:
        record = chunk.record
        state = self._updater.device_state(chunk) if chunk.on_device else lease.shard
        checksums = []
        for segment, offset in zip(record.segments, record.offsets):
            nbytes, crc = segment.nbytes(record.numel), 0
            for begin in range(0, nbytes, self.buffers.nbytes):
                count = min(self.buffers.nbytes, nbytes - begin)
                part = state[segment.name][begin // segment.itemsize : (begin + count) // segment.itemsize]
                crc = self._copy_part(chunk.index, part, offset + begin, count, crc)
            checksums.append(crc)
        self.checksums[chunk.index] = tuple(checksums)

    def _copy_part(self, index: int, part: torch.Tensor, offset: int, count: int, crc: int) -> int:
        """Copy `count` bytes into a buffer, for byte `offset` of the record. Returns the checksum of the segment so far."""
        buffer = self.buffers.take()
        region = buffer.region
        try:
            padded = -(-count // PAGE_NBYTES) * PAGE_NBYTES
            ctypes.memset(region.address + count, 0, padded - count)  # so that equal states have equal files
            if part.device.type == "cpu":
                # Not part.numpy(): the engine resizes the storage later, which a NumPy array would forbid.
                crc = aio_ext.crc32c((ctypes.c_char * count).from_address(part.data_ptr()), crc, into=region.buffer[:count])
            else:
                region.tensor(part.dtype, 0, part.numel()).copy_(part)  # in the order of the compute stream
                crc = aio_ext.crc32c(region.buffer[:count], crc)
        except BaseException:
            buffer.release()
            raise
        with self._lock:
            self._parts.append(Part(index, offset, region.buffer[:padded], buffer))
            self._lock.notify_all()
        return crc
