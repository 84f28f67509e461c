"""Reduce-scatter of gradients on several ranks, one chunk at a time.

Knows a chunk's flat device buffer and the gather lane. Must not know when a chunk is complete, or how a shard is used.
"""

# [Note: which parameters were used]
# The update skips a parameter that has no gradient on any rank. So each rank appends one number a parameter to each slice of a chunk's
# gradient: 1 if the parameter has a gradient on this rank, otherwise 0. The reduce-scatter sums these numbers together with the gradient.

from __future__ import annotations

import torch

from infinity.formats.dtypes import TORCH_DTYPES
from infinity.plan.packing import Piece
from infinity.system.events import Events, now
from infinity.system.lanes import Job, Lane
from infinity.system.ranks import Ranks
from infinity.system.streams import current_stream, keep_for, on_stream
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradient_state import Unreduced
from infinity.tiers.span_state import DeviceTier


class ReduceScatter:
    """num_begun: reductions since the start, the same number on all ranks."""

    def __init__(self, ranks: Ranks, tier: DeviceTier, lane: Lane, stream, device: torch.device, events: Events):
        self.ranks = ranks
        self.tier = tier
        self.lane, self.stream = lane, stream
        self.device = device
        self.events = events
        self.num_begun = 0
        self._chunks: dict[int, ChunkState] = {}  # with a flat buffer, by index

    def insert(self, chunk: ChunkState, piece: Piece, flat_grad: torch.Tensor) -> None:
        """Add a parameter's gradient to the chunk's flat buffer. Each rank's slice has its own place there."""
        unreduced = chunk.gradient.unreduced
        if unreduced.flat is None:
            unreduced.flat, self._chunks[chunk.index] = self._flat(chunk), chunk
        view = chunk.chunk.partition.rows(unreduced.flat)
        numel = chunk.chunk.shard_numel
        done = 0
        while done < piece.numel:
            rank, start = divmod(piece.start + done, numel)
            left, begin = piece.numel - done, piece.param_start + done
            if start or left < numel:  # a part of one slice
                count = min(numel - start, left)
                view[rank, start : start + count].add_(flat_grad[begin : begin + count])
            else:  # whole slices, in one kernel
                count = left - left % numel
                view[rank : rank + left // numel, :numel].add_(flat_grad[begin : begin + count].view(-1, numel))
            done += count
        unreduced.used.add(piece.param)

    def waiting(self) -> list[int]:
        """Indices of the chunks with a gradient of this rank that is not reduced."""
        self._chunks = {index: chunk for index, chunk in self._chunks.items() if chunk.gradient.unreduced.flat is not None}
        return list(self._chunks)

    def begin(self, chunk: ChunkState) -> tuple[Job, int]:
        """Begin the reduce-scatter of a chunk; a rank without a gradient contributes zeros. All ranks must make this call at the same point.

        Returns the job, whose result is (shard, event), and the number of bytes of the flat buffer, which stay booked.
        """
        unreduced, chunk.gradient.unreduced = chunk.gradient.unreduced, Unreduced()
        flat, used = unreduced.flat, unreduced.used
        if flat is None:
            flat = self._flat(chunk)
        view = chunk.chunk.partition.rows(flat)
        for index, param in enumerate(chunk.whole_pieces):
            if param in used:
                view[:, chunk.chunk.shard_numel + index] = 1
        ready = stream.record_event() if (stream := current_stream(self.device)) is not None else None
        self.num_begun += 1
        job = self.lane.push(lambda: self._run(chunk, flat, ready), chunk.title)
        return job, flat.numel() * flat.element_size()

    def drop(self, chunk: ChunkState) -> None:
        """Forget this rank's contribution."""
        unreduced, chunk.gradient.unreduced = chunk.gradient.unreduced, Unreduced()
        if unreduced.flat is not None:
            self.tier.book(-unreduced.flat.numel() * unreduced.flat.element_size())

    def _flat(self, chunk: ChunkState) -> torch.Tensor:
        numel = chunk.chunk.partition.world * (chunk.chunk.shard_numel + len(chunk.whole_pieces))
        dtype = TORCH_DTYPES[chunk.chunk.format.compute]
        with self.tier.booked(numel * dtype.itemsize):
            return torch.zeros(numel, dtype=dtype, device=self.device)

    def _run(self, chunk: ChunkState, flat: torch.Tensor, ready):
        start, marks = now(), None
        if self.stream is not None:
            with on_stream(self.stream, "reduce_scatter"):
                self.stream.wait_event(ready)
                first = self.events.device_mark()
                shard = self.ranks.reduce_scatter(flat, chunk.title)
                marks = first, self.events.device_mark()
                keep_for(self.stream, flat)
                done = self.stream.record_event()
        else:
            shard, done = self.ranks.reduce_scatter(flat, chunk.title), None
        self.events.moved("reduce_scatter", chunk.index, flat.numel() * flat.element_size(), start, now(), marks)
        return shard, done
