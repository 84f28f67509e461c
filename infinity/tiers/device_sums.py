"""Sums of gradients on the device: several micro-batches add up there, and the sum leaves for host memory once.

Knows chunks, their gradients, and the device's budget. Must not know micro-batches or segments. The caller names the parameters that get
gradients next, the complete chunks, and the begin of a round. The training thread calls this file, on all ranks at the same points.
"""

# [Note: room for sums]
# A sum waits on the device until its update begins, if activations of earlier ops have left room. If the sum has a place in host
# memory, the device must also have room for all later sums without such a place. Sums that do not wait leave when they are complete. Until
# then they use the device memory for spans that come and go, if the spans of the current ops leave room there. A gradient without any room
# adds up in host memory. The room of a sum is free again after the sum has left. The engine checks this when more room is needed.
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
from collections.abc import Iterable

from infinity.plan.slots import farthest_first
from infinity.system.lanes import Job
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.weights import Weights


class DeviceSums:
    """The sums of one step."""

    def __init__(self, gradients: Gradients, weights: Weights):
        self.gradients, self.weights = gradients, weights
        self.registry, self.tier, self.ranks = weights.registry, weights.tier, weights.ranks
        self._here: dict[ChunkState, int] = {}  # sums on the device -> their bytes
        self._earlier: set[ChunkState] = set()  # have sums of earlier rounds in host memory
        self._leaving: deque[tuple[Job, int]] = deque()  # (job, bytes of room)
        self._waiting: list[ChunkState] = []  # chunks with memory for a gradient that waits
        self._nbytes = 0  # room of all sums, those that leave included

    def begin_round(self) -> None:
        """All gradients come once more."""
        self._earlier = {chunk for chunk in self.registry.chunks if chunk.gradient.job is not None}

    def chunks_of(self, params: Iterable[ParameterState]) -> list[ChunkState]:
        """The chunks of these parameters on this rank."""
        return list(dict.fromkeys(chunk for state in params for chunk in self.registry.chunks_of(state)))

    def begin(
        self, params: Iterable[ParameterState], used: Iterable[ParameterState], waiting_room: int, room_with_host_place: int
    ) -> list[ChunkState]:
        """Gradients of these parameters come next. used: all parameters that the ops of this segment and the next one use. waiting_room: device
        bytes beside spans and records, for sums that wait for their updates. room_with_host_place: the part of them that sums with a place in
        host memory may take. Returns the chunks of all ranks.
        """
        self.weights.drain_dropped()
        spans = {self.registry.span_of(state) for state in used}.union(self.weights.held.values())
        room = self.tier.budget_nbytes - sum(span.nbytes for span in spans if not span.pinned)
        chunks = self.chunks_of(params)
        if self.ranks.are_several:
            in_chunks = set(chunks)
            rooms, come = (room, waiting_room, room_with_host_place), (chunk in in_chunks for chunk in self.registry.chunks)
            found = self.ranks.most([*(-nbytes for nbytes in rooms), *come])
            room, waiting_room, room_with_host_place = (-nbytes for nbytes in found[:3])
            chunks = [chunk for chunk, comes in zip(self.registry.chunks, found[3:], strict=True) if comes]
        self._free_room()
        if self._nbytes > room:
            self.end(list(self._here))
            self._free_room(room)
        back: list[ChunkState] = []
        for chunk in chunks:
            gradient, nbytes = chunk.gradient, chunk.chunk.shard_numel * self.gradients.dtype(chunk).itemsize
            if chunk in self._here or not chunk.trainable or (gradient.job is not None and chunk not in self._earlier):
                continue
            may_wait = chunk.on_device or not chunk.gradient_on_device
            free = room_with_host_place if chunk.has_host_place else waiting_room
            if may_wait and gradient.job is None and (chunk.on_device or chunk.must_wait or nbytes <= free):
                self._wait(chunk)
                waiting_room -= nbytes
                room_with_host_place -= nbytes
            if chunk.gradient_on_device:
                continue
            self._free_room(room - nbytes)
            if self._nbytes + nbytes <= room:
                self._here[chunk] = nbytes
                self._take(nbytes)
                if gradient.job is None:
                    gradient.stay()
                else:
                    back.append(chunk)
        self._evict()
        for chunk in back:
            self.gradients.wait_for(chunk)
        self.gradients.stay_on_device(back)
        self._earlier.difference_update(back)
        return chunks

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
        self._nbytes += nbytes
        self.tier.lend(nbytes)
