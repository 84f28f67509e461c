"""Streams of a device that works while the host goes on: those of CUDA, or simulated ones.

Knows how streams and events are made. Must not know what a stream carries.
"""

from __future__ import annotations

import contextlib

import torch


class CudaStreams:
    """The streams and events of PyTorch's CUDA devices."""

    def are_on(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def new(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)

    def current(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def on(self, stream: torch.cuda.Stream | None, link: str) -> contextlib.AbstractContextManager:
        return torch.cuda.stream(stream)

    def timed_event(self, device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def keep_for(self, stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
        tensor.record_stream(stream)


_current = CudaStreams()


def has_streams(device: torch.device) -> bool:
    """Whether work on the device goes on while the host does other work. False for the CPU."""
    return _current.are_on(device)


def kind_of(device: torch.device) -> str:
    """ "cuda", or "cpu" if the device has no streams."""
    return "cuda" if has_streams(device) else "cpu"


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A further stream; None if the device has no streams."""
    return _current.new(device) if has_streams(device) else None


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which this thread's work runs; None if the device has no streams."""
    return _current.current(device) if has_streams(device) else None


def on_stream(stream: torch.cuda.Stream | None, link: str = "") -> contextlib.AbstractContextManager:
    """Inside the block, this thread's work runs on the stream. link: the link that this work uses, if it is a copy or a collective. With None,
    nothing changes."""
    return _current.on(stream, link) if stream is not None else contextlib.nullcontext()


def timed_event(device: torch.device) -> torch.cuda.Event:
    """An event with a time, recorded on the current stream. The device has streams."""
    return _current.timed_event(device)


def keep_for(stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
    """The tensor's memory serves nothing else before the present work of the stream is over."""
    _current.keep_for(stream, tensor)


def use_streams(other: CudaStreams) -> CudaStreams:
    """Devices from now on have other streams. No engine may be open. Returns the earlier ones."""
    global _current
    before, _current = _current, other
    return before
