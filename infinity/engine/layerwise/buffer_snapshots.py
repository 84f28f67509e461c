"""Earlier values of buffers, for the second run of a block and for the restart of a step.

Knows modules and their buffers. Must not know threads, graphs or engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class RecomputeBuffers:
    """Buffers of a block that runs twice, such as the statistics of a batch norm or the vectors of a spectral norm.

    The second run sees the buffers as the first run saw them, and leaves them unchanged.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.changed: list[tuple[nn.Module, str, torch.Tensor]] = []  # owner, name and earlier value of each buffer that the first run changed

    @contextlib.contextmanager
    def first_run(self) -> Iterator[None]:
        buffers = list(buffers_in(self.module))
        before = {buffer: (buffer._version, buffer.detach().clone()) for *_, buffer in buffers}
        try:
            yield
        finally:
            for owner, name, buffer in buffers:
                version, value = before[buffer]
                if owner._buffers.get(name) is not buffer or buffer._version != version:
                    self.changed.append((owner, name, value))

    @contextlib.contextmanager
    def second_run(self) -> Iterator[None]:
        buffers = list(buffers_in(self.module))
        for owner, name, value in self.changed:
            owner._buffers[name] = value
        others = {buffer: buffer.clone() for *_, buffer in buffers_in(self.module)}  # torch does not count every write to a buffer
        try:
            yield
        finally:
            for owner, name, buffer in buffers:
                owner._buffers[name] = buffer
            with torch.no_grad():
                for buffer, value in others.items():
                    with torch.autograd._unsafe_preserve_version_counter(buffer):
                        buffer.copy_(value)


class BufferSnapshot:
    """All buffers of a model at the beginning of a step, so that the step can restart.

    Floating-point buffers are copied at once, because torch does not count every write to statistics. Other buffers of blocks, such as
    quantised weights, are taken from `RecomputeBuffers` after a block has changed them.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module]):
        inside = {id(buffer) for block in blocks for *_, buffer in buffers_in(block)}
        self._begin = {(owner, name): buffer for owner, name, buffer in buffers_in(model)} if blocks else {}
        copied = {key: buffer for key, buffer in self._begin.items() if buffer.is_floating_point() or id(buffer) not in inside}
        self._values = {key: buffer.detach().clone() for key, buffer in copied.items()}

    def note(self, buffers: RecomputeBuffers) -> None:
        """Take the earlier values of buffers that a first run has changed. The run has ended or raised."""
        for owner, name, value in buffers.changed:
            if (owner, name) in self._begin:
                self._values.setdefault((owner, name), value)

    def restore(self) -> None:
        with torch.no_grad():
            for (owner, name), value in self._values.items():
                owner._buffers[name] = self._begin[owner, name]
                owner._buffers[name].copy_(value)

    def discard(self) -> None:
        self._begin, self._values = {}, {}


def buffers_in(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Owner, name and buffer of each buffer of a module and its children. Inference tensors are left out: they never change."""
    for owner in module.modules():
        yield from own_buffers(owner)


def own_buffers(owner: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Owner, name and buffer of each buffer of the module itself, as in `buffers_in`."""
    for name, buffer in owner._buffers.items():
        if buffer is not None and not buffer.is_inference():
            yield owner, name, buffer
