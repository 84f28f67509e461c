"""Device memory of gradient shards: allocated for one gradient, or kept for the gradients of later steps.

Knows chunks, streams and the device's tier. Must not know how gradients arrive, or why one waits. The training thread allocates, except for
records on the device of several ranks, where the gc lane does. Any thread may free.
"""

from __future__ import annotations

import torch

from infinity.formats.dtypes import TORCH_DTYPES
from infinity.system.streams import current_stream, keep_for, on_stream
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradient_state import DeviceShard
from infinity.tiers.span_state import DeviceTier


class GradientMemory:
    """stream: of the gc link; None on the CPU."""

    def __init__(self, tier: DeviceTier, device: torch.device, stream):
        self.tier, self.device, self.stream = tier, device, stream
        self._keeps_for_visitors = True

    def keep_for_visitors(self, keeps: bool) -> None:
        """Set whether the memory for gradients of visitors stays from step to step."""
        self._keeps_for_visitors = keeps

    def make_for_arrival(self, chunk: ChunkState) -> None:
        """Allocate a shard for the first part of a gradient."""
        self.make(chunk, for_step=chunk.is_visitor and not self._keeps_for_visitors)

    def make(self, chunk: ChunkState, *, for_step: bool = False) -> None:
        """Allocate a shard of zeros. Memory for one step is on the stream of the ops, because activations use it before and after. Other memory
        is on the stream of the gc link, where it does not lie between activations.
        """
        dtype = TORCH_DTYPES[chunk.chunk.format.gradient]
        with self.tier.booked(chunk.record.numel * dtype.itemsize), on_stream(None if for_step else self.stream):
            memory = torch.zeros(chunk.record.numel, dtype=dtype, device=self.device)
        chunk.gradient.take(DeviceShard(memory))
        self.set_for_step(chunk.gradient.device_shard, for_step)

    def set_for_step(self, shard: DeviceShard, for_step: bool) -> None:
        """Set whether the memory is freed together with the gradient."""
        self.tier.note_waiting((for_step - shard.for_step) * shard.nbytes)
        shard.for_step = for_step

    def free_for_step(self, chunk: ChunkState) -> None:
        """The gradient was used: free the memory if it is for one step. No copy or kernel of another stream uses the memory."""
        shard = chunk.gradient.device_shard
        if shard is not None and shard.for_step:
            if self.stream is not None and chunk.on_device:  # the update may run on another stream than the op that came first
                keep_for(current_stream(self.device), shard.memory)
            self._free(chunk)

    def free_idle(self, chunk: ChunkState) -> None:
        """Free memory that is kept for later steps, if no gradient is there."""
        if chunk.gradient.device_shard is not None and not chunk.gradient.is_there:
            self._free(chunk)

    def free_left(self, shard: DeviceShard) -> None:
        """Free the memory of a gradient that has left the device."""
        self.set_for_step(shard, False)
        nbytes = shard.nbytes
        del shard.memory
        self.tier.book(-nbytes)

    def _free(self, chunk: ChunkState) -> None:
        shard = chunk.gradient.device_shard
        chunk.gradient.take(None)
        self.free_left(shard)
