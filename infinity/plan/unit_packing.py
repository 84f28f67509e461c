"""The packing of parameters whose update needs whole matrices or whole parameters: no shard and no chunk cuts such a unit.

Pure arithmetic over sizes. Must not know names, formats, tiers or files. Offsets and sizes are in elements.
"""

# [Note: how units are packed]
# Parameters lie in registration order. Each shard takes parameters in this order until the next one does not fit. The chunk ends when its
# last shard is full. Then all shards of the chunk shrink to the smallest size that still fits. So ranks have nearly equal work. The rest of
# a shard stays empty, and is zeros in records.
#
# A stack of matrices, such as the weights of experts, has its own span without gaps, because a parameter is contiguous on the device. Shards
# have whole matrices. Each matrix must then be a multiple of 1,024 elements. A stack of other matrices is one unit.
#
# A chunk can be larger than the usual chunk: each rank needs room for the largest unit.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infinity.plan.partition import BLOCK_NUMEL, Partition
from infinity.sizes import round_up


@dataclass(frozen=True)
class Packed:
    """A span: parameters by index, each with its offset in the span, and the sizes of the span's chunks."""

    params: list[int]
    offsets: list[int]
    chunk_sizes: list[int]


def pack_units(numels: Sequence[int], units: Sequence[int], *, chunk_numel: int, partition: Partition) -> Iterator[Packed]:
    """Pack parameters as [Note: how units are packed] says.

    numels, units: elements of each parameter, and of each of its units. Parameters are numbered by their place in these lists.
    """
    stacks = [unit < numel and unit % BLOCK_NUMEL == 0 for numel, unit in zip(numels, units)]
    largest = max((numel for numel, is_stack in zip(numels, stacks) if not is_stack), default=1)
    room, waiting = max(chunk_numel // partition.world, round_up(largest, BLOCK_NUMEL)), []
    num_shards, shard, used = partition.world, 0, 0  # used: elements of the shard that has the last waiting parameter
    for param, (numel, is_stack) in enumerate(zip(numels, stacks)):
        if is_stack:
            yield _stack(param, numel, units[param], chunk_numel, partition)
            continue
        if used + numel > room:
            shard, used = shard + 1, 0
        if shard == num_shards:
            yield _chunk(waiting, numels, room, partition)
            waiting, shard = [], 0
        waiting.append(param)
        used += round_up(numel, BLOCK_NUMEL)
    if waiting:
        yield _chunk(waiting, numels, room, partition)


def _stack(param: int, numel: int, unit: int, chunk_numel: int, partition: Partition) -> Packed:
    """A span for a parameter of several units."""
    num_left, sizes = numel // unit, []
    most = max(1, chunk_numel // (partition.world * unit))  # units of a shard
    num_chunks = -(-num_left // (most * partition.world))
    of_shard = -(-num_left // (num_chunks * partition.world))
    while num_left > 0:
        in_shard = min(of_shard, -(-num_left // partition.world))
        sizes.append(partition.world * in_shard * unit)
        num_left -= in_shard * partition.world
    return Packed([param], [0], sizes)


def _chunk(params: list[int], numels: Sequence[int], room: int, partition: Partition) -> Packed:
    """A span of one chunk, with the smallest shards that hold these parameters in order. room: elements of a shard that are enough."""
    sizes = [numels[param] for param in params]
    low, high = max(max(sizes), sum(sizes) // partition.world) // BLOCK_NUMEL, room // BLOCK_NUMEL  # in blocks
    while low < high:
        middle = (low + high) // 2
        if _offsets(sizes, middle * BLOCK_NUMEL, partition.world) is None:
            low = middle + 1
        else:
            high = middle
    return Packed(params, _offsets(sizes, high * BLOCK_NUMEL, partition.world), [partition.world * high * BLOCK_NUMEL])


def _offsets(sizes: Sequence[int], room: int, num_shards: int) -> list[int] | None:
    """The offset of each parameter, if shards of `room` elements take the parameters in order. None if they do not fit."""
    found, shard, used = [], 0, 0
    for size in sizes:
        if used + size > room:
            shard, used = shard + 1, 0
        if shard == num_shards or size > room:
            return None
        found.append(shard * room + used)
        used += round_up(size, BLOCK_NUMEL)
    return found
