"""The exponential moving average of the weights of a shard, in fp32.

Knows the segments of a shard. Must not know chunks, tiers, ranks, or the rule that updates the weights.
"""

# [Note: the average of the weights]
# After step n, average = average + (weight - average) * (1 - decay), with one rounding of fp32 per operation. So the average has the same bits
# in every tier. The weight is the fp32 master. The average begins as a copy of the weight after the first step. This is the average of
# torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay).
#
# The update of a chunk moves the average in the same visit. A chunk without a gradient has no visit, and its weights stay. The next visit, read
# or save repeats the missing steps in one formula: k steps with the same weight multiply the distance to the weight by decay ** k. The result
# differs from k single steps by roundings only. A step that the loss scale or a non-finite gradient skips does not count.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from infinity.formats.format import AVERAGE
from infinity.optim.shard import Shard

_BLOCK_NUMEL = {"cpu": 1 << 16}  # a multiple of the block of every storage; the values of a block fit the processor's cache
_DEVICE_BLOCK_NUMEL = 1 << 22


@dataclass(frozen=True)
class AverageStep:
    """The average after step `number`, which counts from 1."""

    decay: float
    number: int

    @property
    def before(self) -> AverageStep:
        """The average after the step before."""
        return AverageStep(self.decay, self.number - 1)


@torch.no_grad()
def advance(shard: Shard, step: AverageStep, *, num_done: int) -> None:
    """Bring the average from step `num_done` to a later step, with the present weights in all of these steps. 0: there is no average yet."""
    factor = 1 - step.decay ** (step.number - num_done)
    for part in _blocks(shard):
        average, weight = part[AVERAGE], part.masters(threads=1)
        if num_done:
            average += (weight - average) * factor
        else:
            average.copy_(weight)


@torch.no_grad()
def exchange(shard: Shard) -> None:
    """Weights and average change places. A second call restores all bits."""
    for part in _blocks(shard):
        part.codec.exchange(part)


def _blocks(shard: Shard) -> Iterator[Shard]:
    numel = shard[AVERAGE].numel()
    size = _BLOCK_NUMEL.get(shard[AVERAGE].device.type, _DEVICE_BLOCK_NUMEL)
    for begin in range(0, numel, size):
        yield shard.part(begin, min(begin + size, numel))
