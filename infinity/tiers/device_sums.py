"""Gradients of several micro-batches that add up on the device, and leave for host memory once for all that pass together.

Knows chunks, their gradients, and the device's budget. Must not know micro-batches or segments: it is told which parameters have gradients
soon, when a chunk has all of its, and when all come once more. The training thread calls it, on several ranks at the same places of all.
"""

# [Note: room for sums]
# Sums lie in what the device has for spans that come and go, as far as this has room for them beside all that the ops of the moment may
# need: what has no room adds up in host memory. Their room is spans' again once they have left, which is looked at when more is wanted.
# Where micro-batches take turns, on one rank, the sums of earlier turns come back, and the next gradients are added to them: 8 bytes a
# parameter and turn over the link, where gradients that leave one by one are 2 or 4 for each micro-batch, and host memory that has no place
# for all sums would read and write them for each.
#
# [Note: sums on several ranks]
# What adds up there is a rank's shard, of gradients that were reduced one micro-batch after the other, as in the ordinary loop: a reduction
# of sums is another number than the sum of reductions, in bf16 by the rounding of each of these, in fp32 by the order of additions. So links
# between devices carry each micro-batch's gradients, the one to the host carries a shard once. Room for spans must be the same on all ranks,
# which gather and leave out together: they agree on what adds up and on room for it, a shard counts as if none were shorter, and room is
# given back when the next but one has left, not whenever a copy happens to end.

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from infinity.plan.slots import farthest_first
from infinity.system.lanes import Job
from infinity.tiers.gradients import Gradients
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.weights import Weights


class DeviceSums:
    """Those of one step."""

    def __init__(self, gradients: Gradients, weights: Weights):
        self.gradients, self.weights = gradients, weights
        self.registry, self.tier, self.ranks = weights.registry, weights.tier, weights.ranks
        self._here: dict[ChunkState, int] = {}  # bytes of those that add up
        self._earlier: set[ChunkState] = set()  # that have sums of earlier turns
        self._leaving: deque[tuple[Job, int, int]] = deque()  # with bytes of room, and of memory
        self._nbytes = 0  # of both

    def begin_round(self) -> None:
        """All gradients come once more, after those that have."""
        self._earlier = {chunk for chunk in self.registry.chunks if chunk.gradient.job is not None}

    def begin(self, params: Collection[ParameterState], following: Iterable[ParameterState]) -> None:
        """Gradients of these parameters come; ops use them meanwhile, and `following`."""
        self.weights.drain_dropped()
        spans = {self.registry.span_of(state) for state in (*params, *following)}.union(self.weights.held.values())
        room = self.tier.budget_nbytes - sum(span.nbytes for span in spans if not span.pinned)
        chunks = dict.fromkeys(chunk for state in params for chunk in self.registry.chunks_of(state))
        if self.ranks.world > 1:
            least, *come = self.ranks.most([-room, *(chunk in chunks for chunk in self.registry.chunks)])
            room, chunks = -least, [chunk for chunk, comes in zip(self.registry.chunks, come, strict=True) if comes]
        self._settle()
        if self._nbytes > room:
            self.end(list(self._here))
            self._settle(room)
        back: list[ChunkState] = []
        for chunk in chunks:
            gradient, nbytes = chunk.gradient, chunk.chunk.shard_numel * self.gradients.dtype(chunk).itemsize
            if chunk in self._here or not chunk.trainable or chunk.gradient_on_device:
                continue
            if gradient.job is not None and chunk not in self._earlier:
                continue
            self._settle(room - nbytes)
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

    def end(self, chunks: Iterable[ChunkState]) -> None:
        """All that was to come of these has: it leaves, where it has added up here."""
        if self.ranks.world > 1:
            self._settle(0)
        for chunk in chunks:
            if (nbytes := self._here.pop(chunk, None)) is None:
                continue
            arrived = chunk.gradient.job
            if arrived is not None and self.ranks.world > 1:
                self.gradients.wait_for(chunk)  # what is reduced is put there by a lane
            memory, _ = chunk.gradient.leave()
            if memory is None:  # nothing came
                self._take(-nbytes)
            else:
                job = self.gradients.send(chunk, arrived, memory)
                chunk.gradient.come_by(job)
                self._leaving.append((job, nbytes, memory.nbytes))

    def close(self) -> None:
        """No more gradients come in this step."""
        self.end(list(self._here))
        self._settle(0)

    def abandon(self) -> None:
        """None that came is wanted."""
        self.gradients.drain()
        self._settle(0)
        while self._here:
            chunk, nbytes = self._here.popitem()
            memory, _ = chunk.gradient.leave()
            self._take(-nbytes)
            if memory is not None:
                self.tier.book(-memory.nbytes)

    def _settle(self, room: int | None = None) -> None:
        """Give back the room of what has left; wait for what is leaving where more than `room` is taken."""
        while self._leaving and ((self.ranks.world == 1 and self._leaving[0][0].done) or (room is not None and self._nbytes > room)):
            job, room_nbytes, nbytes = self._leaving.popleft()
            try:
                job.wait()
            finally:
                self._take(-room_nbytes)
                self.tier.book(-nbytes)

    def _evict(self) -> None:
        """Spans that are used last make way for what was taken."""
        for index in farthest_first(self.weights.evictable(), self.weights.course.next_use):
            if self.tier.fits(0):
                return
            self.weights.evict(self.registry.spans[index])

    def _take(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self.tier.lend(nbytes)
