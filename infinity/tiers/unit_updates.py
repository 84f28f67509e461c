"""Updates whole matrices or parameters on the device of the training, wherever the record is.

Knows segments, rules and CUDA streams. Must not know chunks, the place of a record, or when an update is due.
"""

# [Note: three units on the device]
# If the record is in host memory, a unit (a matrix or a parameter) goes to the device, is updated there, and comes back. Three streams let
# both links and the device work at once: while one unit is updated, the next one arrives and the last one leaves. So the device holds three
# units, or fewer if these are large. The thread that gives out the work waits only when another unit would exceed this. A second call of `update`
# may give out its units before the first call ends, so no gap separates them ([Note: jobs of two parts] in lanes.py). (1.24 B parameters, host
# memory, calls with five and with two matrices in turn: 30 ms for both calls with gaps, 19 ms without.)

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from infinity.formats.format import AVERAGE
from infinity.optim.adam import Dither
from infinity.optim.rules import Rule
from infinity.optim.shard import Shard
from infinity.system.streams import has_streams, new_stream, on_stream

_UNITS_ON_DEVICE = 3
_MOST_NBYTES = 2 << 30  # of the units on the device, unless one alone has more


class Unit(NamedTuple):
    """A part of a shard that a rule updates as a whole. shard: 1-D segments. gradient: 1-D. shape: of a matrix or a parameter."""

    shard: Shard
    gradient: torch.Tensor
    rule: Rule
    scalars: object
    grad_scale: float
    dither: Dither | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in (*self.shard.values(), self.gradient))

    def apply(self, shard: Shard, gradient: torch.Tensor) -> None:
        """Update a copy of the shard. gradient: on the device of the copy."""
        self.rule.apply(shard, gradient, self.scalars, self.grad_scale, dither=self.dither, shape=self.shape)


class UnitUpdates:
    """Updates units on a device. Used by one thread at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams = [new_stream(device) for _ in range(3)] if has_streams(device) else []
        self._there: deque[_Copy] = deque()

    def update(self, units: Iterable[Unit]) -> Iterator[None]:
        """Update all units in place, in order: a generator. All are either on the device or in host memory. For units on the device, the
        current stream computes the new values. Units of host memory are under way when the generator yields, and have their new values at
        the end of the generator. Other generators may begin before this end."""
        units = iter(units)
        first = next(units, None)
        if first is None:
            return
        if first.gradient.device.type == self.device.type:
            for unit in (first, *units):
                unit.apply(_of_rule(unit.shard), unit.gradient)
            return
        try:
            for unit in itertools.chain([first], units):
                self._make_room(unit.nbytes)
                self._there.append(self._send(unit))
            last = self._there[-1]
            yield
            last.left.synchronize()
        except BaseException:  # copies to and from slots of host memory are under way
            for stream in self._streams:
                stream.synchronize()
            raise
        finally:
            while self._there and self._there[0].left.query():
                self._there.popleft()

    def _make_room(self, nbytes: int) -> None:
        """Wait until a unit of this size may arrive."""
        there = self._there
        while there and (len(there) == _UNITS_ON_DEVICE or nbytes + sum(copy.nbytes for copy in there) > _MOST_NBYTES):
            there[0].left.synchronize()
            there.popleft()

    def _send(self, unit: Unit) -> _Copy:
        """Give out the work of a unit."""
        arrives, computes, leaves = self._streams
        here = _of_rule(unit.shard)
        with on_stream(arrives, "h2d"):
            there = Shard(here.format, {name: segment.to(self.device, non_blocking=True) for name, segment in here.items()})
            gradient = unit.gradient.to(self.device, non_blocking=True)
        computes.wait_stream(arrives)
        with on_stream(computes):
            unit.apply(there, gradient)
        leaves.wait_stream(computes)
        with on_stream(leaves, "d2h"):
            for name, segment in here.items():
                segment.copy_(there[name], non_blocking=True)
        return _Copy(leaves.record_event(), there, gradient, unit.nbytes)


class _Copy(NamedTuple):
    """A unit on its way. The tensors live until the event, because three streams use them."""

    left: torch.cuda.Event
    shard: Shard
    gradient: torch.Tensor
    nbytes: int


def _of_rule(shard: Shard) -> Shard:
    """The segments that a rule may change."""
    return Shard(shard.format, {name: segment for name, segment in shard.items() if name != AVERAGE})
