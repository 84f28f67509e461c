"""Blocks of a model, groups of blocks that are one segment, and the interception of their calls.

Knows modules. Must not know threads, graphs or engines.
"""

# [Note: blocks, groups and segments]
# Blocks are the members with parameters of an outermost ModuleList or Sequential, if two or more members have one class. Very small blocks
# form a group. A segment begins with a call of a group's first block, or of any block whose group differs from the last block's. The segment
# ends where the next one begins. So embeddings, norms, a head and the loss belong to the segment in which they run. Joined blocks begin none.
#
# [Note: how many blocks a segment has]
# A segment has one block, unless blocks are so small that thread switches (0.03 ms each) count. The engine keeps the inputs of every block
# for each micro-batch, so a larger segment saves only thread switches. A larger segment costs time: reads for the next segment wait until
# the last micro-batch has passed this one. A larger segment costs memory: its weights stay for all micro-batches. Without that memory each
# micro-batch fetches the weights again: 19 and 26 bytes a parameter with 4 and 8 blocks, 13 with one. The table shows seconds a step
# relative to one block a segment, all on NVMe, on a CPU whose blocks sleep 1 to 8 ms. Compute takes about as long as the drive. The numbers
# are medians of 4 to 44 steps, which scatter by a third:
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

MIN_GROUP_NBYTES = 1 << 20  # weights of a group of blocks: see [Note: how many blocks a segment has]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks in registration order, each once."""
    return list(dict.fromkeys(_blocks_of(model)))


def groups_of(blocks: list[nn.Module], least_nbytes: int, joined: Container[nn.Module] = ()) -> list[list[nn.Module | None]]:
    """Runs of blocks that form one segment each. All but the last have weights of least_nbytes or more.

    No group begins with a `joined` block. None stands for the modules before the first block, if that block is joined to them.
    """
    groups, nbytes = [[None]] if blocks and blocks[0] in joined else [], least_nbytes
    for block in blocks:
        if nbytes >= least_nbytes and block not in joined:
            groups.append([])
            nbytes = 0
        groups[-1].append(block)
        nbytes += sum(param.numel() * param.element_size() for param in block.parameters())
    return groups


@contextlib.contextmanager
def intercept_calls(blocks: list[nn.Module], call: Callable) -> Iterator[None]:
    """Inside the context, a call of a block becomes call(block, original, *args, **kwargs), without the block's hooks.

    Neither the class of the block nor its `forward` changes.
    """
    names = {block: "_call_impl" if block._compiled_call_impl is None else "_compiled_call_impl" for block in blocks}
    before = {block: vars(block).get(name) for block, name in names.items()}
    try:
        for block, name in names.items():
            vars(block)[name] = functools.partial(call, block, getattr(block, name))
        yield
    finally:
        _restore_calls(before, names)


@contextlib.contextmanager
def without_kv_caches(model: nn.Module, tell: Callable[[], None]) -> Iterator[None]:
    """Inside the context no model of transformers fills a cache of keys and values: a block that runs again would fill the cache twice.

    A model of transformers fills a cache in training, too. tell() is called if a cache is turned off.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    filling = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    if filling:
        tell()
    try:
        for config in filling:
            config.use_cache = False
        yield
    finally:
        _use_caches(filling)


@uninterrupted
def _restore_calls(calls: dict[nn.Module, Callable | None], names: dict[nn.Module, str]) -> None:
    for block, call in calls.items():
        vars(block).pop(names[block], None)
        if call is not None:
            vars(block)[names[block]] = call


@uninterrupted
def _use_caches(configs: list) -> None:
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
