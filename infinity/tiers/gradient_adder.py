"""Copies a part of a gradient into a shard, or adds the part to earlier gradients there.

Knows memory and the stream of the gc link. Must not know chunks, or which part comes first.
"""

from __future__ import annotations

import ctypes

import torch

from infinity.optim.adam import accumulate_
from infinity.system import host_bytes
from infinity.system.events import Events
from infinity.system.streams import new_stream, on_stream


class GradientAdder:
    """staging: pinned memory with room for the largest part, for gradients that are added in host memory; None on the CPU.

    accumulate: add in fp32.
    """

    def __init__(self, device: torch.device, events: Events, *, staging: torch.Tensor | None, accumulate: bool):
        self.stream = new_stream(device)  # None on the CPU
        self.events = events
        self.staging = staging
        self.accumulate = accumulate

    def put(self, target: torch.Tensor, source: torch.Tensor, first: bool, ready, *, on_device: bool):
        """target = source if first, otherwise target += source. The copy is over on return. on_device: the target is in device memory. Returns
        the marks on CUDA, otherwise None."""
        if self.stream is None:
            if self.accumulate:
                accumulate_(target, source, first, threads=1)
            elif first:
                source = source.contiguous()
                host_bytes.work(source.nbytes, ctypes.memmove, target.data_ptr(), source.data_ptr(), source.nbytes, kind=host_bytes.COPY)
            else:
                target.add_(source)
            return None
        direct = first and target.dtype == source.dtype
        with on_stream(self.stream, "" if on_device else "d2h"):
            if ready is not None:
                self.stream.wait_event(ready)
            begin = self.events.device_mark()
            if on_device:
                target.copy_(source) if first else target.add_(source)
            elif direct:
                target.copy_(source, non_blocking=True)
            else:
                staged = self.staging.view(source.dtype)[: source.numel()]
                staged.copy_(source, non_blocking=True)
            marks = begin, self.events.device_mark()
            self.stream.record_event().synchronize()
        if not on_device and not direct:
            if self.accumulate:
                accumulate_(target, staged, first)
            else:
                target.add_(staged)
        return marks
