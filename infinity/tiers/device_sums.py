"""Sums of gradients on the device: several micro-batches add up there, and the sum leaves for host memory once.

Knows chunks, their gradients, and the device's budget. Must not know micro-batches or segments. The caller names the parameters that get
gradients next, the complete chunks, and the begin of a round. The training thread calls this file, on all ranks at the same points.
"""

# [Note: room for sums]
# A sum waits on the device until its update begins, if activations of earlier ops have left room. Other sums leave when they are complete.
# Until then they use the device memory for spans that come and go, if the spans of the current ops leave room there, and the rest of the
# room that activations leave. If all sums of a segment have room, none of its gradients is on its way to host memory. So these sums also use
# the memory that is reserved for such gradients. A gradient without any room adds up in host memory. The room of a sum is free again after
# the sum has left. The engine checks this when more room is needed.
#
# The reserve matters most where memory is short. (14.8 B parameters, 32 micro-batches of 4,096 tokens, 80 GB: without the reserve, a tenth
# of the sums had no room, because they come while most activations are there. Host memory had no place for them. So each micro-batch read
# these sums from NVMe and wrote them, which took 165 of the 220 s of a step.)
#
# If micro-batches run in rounds, on one rank, the sums of earlier rounds come back, and the next gradients are added to them. This moves
# 8 bytes a parameter and round over the link. Gradients that leave one by one move 2 or 4 bytes for each micro-batch. If host memory has no
# place for all sums, such gradients would also be read from NVMe and written for each micro-batch.
#
# [Note: sums on several ranks]
# The device adds up a rank's shard. Each micro-batch's gradient is reduced before the addition, as in the ordinary loop. A reduction of sums
# would differ from a sum of reductions: in bf16 by rounding, in fp32 by the order of additions. The links between devices therefore carry
# the gradients of each micro-batch, and the link to the host carries each shard once. Room for spans must be equal on all ranks, which gather
# and evict together. So ranks agree on the sums and on the room for them, and all shards count with the full size. Room is given back at
# fixed points of the step, before other sums leave or need the room, and not whenever a copy ends.

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from infinity.plan.slots import farthest_first
from infinity.system.lanes import Job
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.weights import Weights


class SumRoom(NamedTuple):
    """Device bytes for sums. reserved: in the memory for gradients on their way to host memory. of_spans: in the memory for spans that come
    and go. beside: more, which activations leave. waiting: of `beside`, for sums that wait for their updates.
    """

    reserved: int
    of_spans: int
    beside: int
    waiting: int

    @property
    def nbytes(self) -> int:
        return self.reserved + self.of_spans + self.beside


class DeviceSums:
    """The sums of one step."""

    def __init__(self, gradients: Gradients, weights: Weights):
        self.gradients, self.weights = gradients, weights
        self.registry, self.tier, self.ranks = weights.registry, weights.tier, weights.ranks
        self._here: dict[ChunkState, int] = {}  # sums on the device -> their bytes
        self._earlier: set[ChunkState] = set()  # have sums of earlier rounds in host memory
        self._leaving: deque[tuple[Job, int]] = deque()  # (job, bytes of room)
        self._waiting: list[ChunkState] = []  # chunks with memory for a gradient that waits
        self._room = SumRoom(0, 0, 0, 0)
        self._nbytes = self._of_spans_nbytes = self._beside_nbytes = 0  # taken of the room, also by sums that leave

    def begin_round(self) -> None:
        """All gradients come once more."""
        self._earlier = {chunk for chunk in self.registry.chunks if chunk.gradient.job is not None}

    def chunks_of(self, params: Iterable[ParameterState]) -> list[ChunkState]:
        """The chunks of these parameters on this rank."""
        return list(dict.fromkeys(chunk for state in params for chunk in self.registry.chunks_of(state)))

    def begin(self, params: Collection[ParameterState], following: Iterable[ParameterState], room: SumRoom) -> list[ChunkState]:
        """Gradients of these parameters come next. following: parameters that the ops of the next segment use. room: without the part of spans.
        Returns the chunks of all ranks.
        """
        self.weights.drain_dropped()
        spans = {self.registry.span_of(state) for state in (*params, *following)}.union(self.weights.held.values())
        room = room._replace(of_spans=self.tier.budget_nbytes - sum(span.nbytes for span in spans if not span.pinned))
        chunks = self.chunks_of(params)
        if self.ranks.are_several:
            in_chunks = set(chunks)
            found = self.ranks.most([*(-nbytes for nbytes in room), *(chunk in in_chunks for chunk in self.registry.chunks)])
            room, come = SumRoom(*(-nbytes for nbytes in found[:4])), found[4:]
            chunks = [chunk for chunk, comes in zip(self.registry.chunks, come, strict=True) if comes]
        self._free_room()
        sums = {chunk: self._sum_nbytes(chunk) for chunk in chunks if self._needs_room(chunk)}
        waiting = self._those_that_wait(sums, room)
        here = {chunk: nbytes for chunk, nbytes in sums.items() if not (chunk in waiting or chunk.gradient_on_device)}
        self._make_room(room._replace(beside=max(0, room.beside - sum(waiting.values()))), here)
        for chunk in waiting:
            self._wait(chunk)
        back: list[ChunkState] = []
        for chunk, nbytes in here.items():
            self._free_room(self._room.nbytes - nbytes)
            if self._nbytes + nbytes <= self._room.nbytes:
                self._here[chunk] = nbytes
                self._take(nbytes)
                if chunk.gradient.job is None:
                    chunk.gradient.stay()
                else:
                    back.append(chunk)
        self._evict()
        for chunk in back:
            self.gradients.wait_for(chunk)
        self.gradients.stay_on_device(back)
        self._earlier.difference_update(back)
        return chunks

    def _sum_nbytes(self, chunk: ChunkState) -> int:
        return chunk.chunk.shard_numel * self.gradients.dtype(chunk).itemsize

    def _needs_room(self, chunk: ChunkState) -> bool:
        """Whether the chunk's sum begins on the device, or comes back."""
        return chunk not in self._here and chunk.trainable and (chunk.gradient.job is None or chunk in self._earlier)

    def _those_that_wait(self, sums: dict[ChunkState, int], room: SumRoom) -> dict[ChunkState, int]:
        """The sums that wait on the device, as many as there is room for beside the sums of one segment: those of the next segment may be
        as large as these.
        """
        left = room.waiting - max(0, sum(sums.values()) - room.reserved - room.of_spans)
        waiting = {}
        for chunk, nbytes in sums.items():
            may_wait = chunk.gradient.job is None and (chunk.on_device or not chunk.gradient_on_device)
            if may_wait and (chunk.on_device or chunk.must_wait or nbytes <= left):
                waiting[chunk] = nbytes
                left -= nbytes
        return waiting

    def _make_room(self, room: SumRoom, here: dict[ChunkState, int]) -> None:
        """Use this room from now on, also for sums that come `here`. If the room is too small, earlier sums leave."""
        if sum(self._here.values()) + sum(here.values()) > room.nbytes:  # some gradients will be on their way to host memory
            room = room._replace(reserved=0)
        self._room = room
        self._take(0)
        if self._nbytes > room.nbytes:
            self.end(list(self._here))
            self._free_room(room.nbytes)

    def _wait(self, chunk: ChunkState) -> None:
        """Let the next gradient of a chunk wait on the device."""
        if chunk.gradient.device_shard is None:
            self.weights.updater.finish(chunk)
            self.gradients.wait_on_device(chunk)
            self._waiting.append(chunk)

    def _forget_unused(self) -> None:
        """Free the memory of gradients that have not come."""
        while self._waiting:
            self.gradients.forget_unused(self._waiting.pop())

    def end(self, chunks: Iterable[ChunkState]) -> None:
        """These chunks have all their gradients: their sums leave for host memory."""
        if self.ranks.are_several:
            self._free_room(0)
        for chunk in chunks:
            if (nbytes := self._here.pop(chunk, None)) is None:
                continue
            arrived = chunk.gradient.job
            if arrived is not None and self.ranks.are_several:
                self.gradients.wait_for(chunk)  # a lane adds reduced gradients
            memory, _ = chunk.gradient.leave()
            if memory is None:  # no gradient came
                self._take(-nbytes)
            else:
                job = self.gradients.send(chunk, arrived, memory)
                chunk.gradient.come_by(job)
                self._leaving.append((job, nbytes))

    def close(self) -> None:
        """The step brings no more gradients."""
        self.end(list(self._here))
        self._free_room(0)
        self._forget_unused()

    def abandon(self) -> None:
        """Drop all sums."""
        self.gradients.drain()
        self._free_room(0)
        while self._here:
            chunk, nbytes = self._here.popitem()
            memory, _ = chunk.gradient.leave()
            self._take(-nbytes)
            if memory is not None:
                self.gradients.memory.free_left(memory)
        self._forget_unused()

    def _free_room(self, most: int | None = None) -> None:
        """Give back the room of sums that have left. Wait for sums that are leaving until at most `most` bytes are taken."""
        while self._leaving and ((not self.ranks.are_several and self._leaving[0][0].done) or (most is not None and self._nbytes > most)):
            job, nbytes = self._leaving.popleft()
            try:
                job.wait()
            finally:
                self._take(-nbytes)

    def _evict(self) -> None:
        """Evict the spans with the farthest next use until the sums fit."""
        for index in farthest_first(self.weights.evictable(), self.weights.course.next_use):
            if self.tier.fits(0):
                return
            self.weights.evict(self.registry.spans[index])

    def _take(self, nbytes: int) -> None:
        """Sums take so many bytes more: of the reserve, then of the memory for spans, then beside."""
        self._nbytes += nbytes
        over = max(0, self._nbytes - self._room.reserved)
        of_spans = min(over, max(0, self._room.of_spans))
        self.tier.lend(of_spans - self._of_spans_nbytes)
        self.tier.note_sums(over - of_spans - self._beside_nbytes)
        self._of_spans_nbytes, self._beside_nbytes = of_spans, over - of_spans
