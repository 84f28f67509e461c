"""Where a model can be cut: its blocks, which of them begin a segment, and that their calls come to whoever cuts.

Knows modules. Must not know who runs them, graphs or engines.
"""

# [Note: what is a segment]
# Blocks are the members, with parameters, of lists of modules (ModuleList, Sequential) of which two or more are of one class, of the
# outermost such lists. Small blocks are a group. A segment begins as the first block of a group is called, or another one while one of
# another group was the last, and goes on until the next one begins: so whatever lies between, before the first and after the last, such as
# embeddings, norms, a head and the loss, is of a segment, too.

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from infinity.model.leaves import is_leaf
from infinity.system.interrupts import uninterrupted


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """In registration order, each once."""
    return list(dict.fromkeys(_blocks_of(model)))


def groups_of(blocks: list[nn.Module], least_nbytes: int) -> list[list[nn.Module]]:
    """Runs of blocks that are a segment together: each but the last has weights of so many bytes or more."""
    groups, nbytes = [], least_nbytes
    for block in blocks:
        if nbytes >= least_nbytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(block)
        nbytes += sum(param.numel() * param.element_size() for param in block.parameters())
    return groups


@contextlib.contextmanager
def called_by(blocks: list[nn.Module], call: Callable) -> Iterator[None]:
    """Inside the block, whoever calls one of these calls call(module, what torch would call, *args, **kwargs), without its hooks. Neither
    their classes nor their `forward` change."""
    names = {module: "_call_impl" if module._compiled_call_impl is None else "_compiled_call_impl" for module in blocks}
    before = {module: module.__dict__.get(name) for module, name in names.items()}
    try:
        for module, name in names.items():
            module.__dict__[name] = functools.partial(call, module, getattr(module, name))
        yield
    finally:
        _give_back(before, names)


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Inside the block no model of transformers fills a cache of keys and values, which it does in training, too, and which a block that
    runs again would fill again."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    filling = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    try:
        for config in filling:
            config.use_cache = False
        yield
    finally:
        _fill(filling)


class Buffers:
    """Of a module that runs twice: the second run finds them as the first one did, and leaves them as they are. Such as the statistics of a
    batch norm, or the vectors of a spectral norm."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._changed: list[tuple[nn.Module, str, torch.Tensor]] = []  # by the first run; what they were before it

    @contextlib.contextmanager
    def first_run(self) -> Iterator[None]:
        places = list(_places(self.module))
        before = {buffer: (buffer._version, buffer.detach().clone()) for *_, buffer in places}
        yield
        for owner, name, buffer in places:
            version, value = before[buffer]
            if owner._buffers.get(name) is not buffer or buffer._version != version:
                self._changed.append((owner, name, value))

    @contextlib.contextmanager
    def second_run(self) -> Iterator[None]:
        places = list(_places(self.module))
        for owner, name, value in self._changed:
            owner._buffers[name] = value
        others = {buffer: buffer.clone() for *_, buffer in _places(self.module)}  # written to in a way that torch does not count
        try:
            yield
        finally:
            for owner, name, buffer in places:
                owner._buffers[name] = buffer
            with torch.no_grad():
                for buffer, value in others.items():
                    with torch.autograd._unsafe_preserve_version_counter(buffer):
                        buffer.copy_(value)


@uninterrupted
def _give_back(calls: dict[nn.Module, Callable | None], names: dict[nn.Module, str]) -> None:
    for module, call in calls.items():
        module.__dict__.pop(names[module], None)
        if call is not None:
            module.__dict__[names[module]] = call


@uninterrupted
def _fill(configs: list) -> None:
    for config in configs:
        config.use_cache = True


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_inference():
                yield owner, name, buffer


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = [member for member in module if any(True for _ in member.parameters())]
        if len(members) > len({type(member) for member in members}):
            yield from members
            return
    if not is_leaf(module):
        for child in module.children():
            yield from _blocks_of(child)
