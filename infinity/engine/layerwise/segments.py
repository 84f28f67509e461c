"""Where a model can be cut: its blocks, which of them begin a segment, and that their calls come to whoever cuts.

Knows modules. Must not know who runs them, graphs or engines.
"""

# [Note: what is a segment]
# Blocks are the members, with parameters, of lists of modules (ModuleList, Sequential) of which two or more are of one class, of the
# outermost such lists. Very small ones are a group. A segment begins as the first block of a group is called, or another one while one of
# another group was the last, and goes on until the next one begins: so whatever lies between, before the first and after the last, such as
# embeddings, norms, a head and the loss, is of a segment, too. A block that is joined to what comes before it begins none.
#
# [Note: how many blocks a segment has]
# One, unless blocks are so small that changes of threads count. What is kept for each micro-batch are the inputs of blocks, however many
# of these a segment has, so that a larger one saves nothing but such changes, of 0.03 ms. It costs time: while the first micro-batch passes
# it, the plan goes on with every op; while the others do, reads wait for the next segment's first op. And it costs room: what the segment
# fetches stays for all. Where room is short it is fetched again for each: 19 and 26 bytes a parameter with 4 and 8 blocks, 13 with one.
# Seconds a step in proportion to those of one block a segment, all on NVMe, on a CPU whose blocks sleep 1 to 8 ms, so that compute takes
# about as long as the drive; medians of 4 to 44 steps each, that scatter by a third, as others used the machine:
#
#     micro-batches, chunk, block      2     4     8    as many as a chunk has
#     2, 1.4 MiB, 1.5 MiB            1.10  1.22  1.28
#     8, 1.4 MiB, 1.5 MiB            1.40  1.47  1.34
#     4, 4 MiB, 1.5 MiB              1.03  1.16  1.00    1.36
#     8, 4 MiB, 1.5 MiB                                  1.02
#     4, 8 MiB, 3.4 MiB                                  1.29
#     4, 23 MiB, 14 MiB                    1.46  1.41    1.38

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator

from torch import nn

from infinity.model.leaf_modules import is_leaf
from infinity.system.interrupts import uninterrupted

LEAST_NBYTES = 1 << 20  # of a run of blocks: see [Note: how many blocks a segment has]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """In registration order, each once."""
    return list(dict.fromkeys(_blocks_of(model)))


def groups_of(blocks: list[nn.Module], least_nbytes: int, joined: Container[nn.Module] = ()) -> list[list[nn.Module | None]]:
    """Runs of blocks that are a segment together: each but the last has weights of so many bytes or more, and none begins with a block that
    is `joined` to what comes before it. What comes before the first block is None, where that is joined to it."""
    groups, nbytes = [[None]] if blocks and blocks[0] in joined else [], least_nbytes
    for block in blocks:
        if nbytes >= least_nbytes and block not in joined:
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
def without_caches(blocks: list[nn.Module], model: nn.Module, tell: Callable[[], None]) -> Iterator[None]:
    """Inside the block no model of transformers fills a cache of keys and values: a block that runs again would fill the cache twice.

    A model of transformers fills one in training, too. tell(): a cache is turned off. Without blocks, nothing runs again, and caches stay.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None} if blocks else {}
    filling = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    if filling:
        tell()
    try:
        for config in filling:
            config.use_cache = False
        yield
    finally:
        _fill(filling)


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


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = [member for member in module if any(True for _ in member.parameters())]
        if len(members) > len({type(member) for member in members}):
            yield from members
            return
    if not is_leaf(module):
        for child in module.children():
            yield from _blocks_of(child)
