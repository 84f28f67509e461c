"""Measures the device memory of activations and workspaces, op by op, for inputs of new shapes.

Knows the gauge of a device, the bytes of the engine there, and shapes. Must not know how the rest of the device is divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from infinity.engine.memory.allocation_trial import Shapes
from infinity.tiers.span_state import DeviceTier

SLACK, MOST_SLACK_NBYTES = 0.05, 5 << 30  # share of the device memory, and most bytes, for gaps between the allocator's blocks
GROWTH_EXPONENT = 2  # an op's memory grows with this power of the input size, as for attention


class ActivationMeter:
    """op_nbytes: most bytes that each op has allocated, by key.

    gauge: measures device memory; None on the CPU. bound_nbytes: most bytes of the engine; None if only activations bound them. on_op(nbytes):
    called at the end of each measured op.
    """

    def __init__(self, gauge, tier: DeviceTier, bound_nbytes: int | None, on_op: Callable[[int], None]):
        self.gauge, self.tier, self.bound_nbytes, self.on_op = gauge, tier, bound_nbytes, on_op
        self.op_nbytes: dict[Hashable, int] = {}
        self._measured: dict[bool, list[Shapes]] = {True: [], False: []}  # inputs that fit; by whether the pass builds a graph
        self._growing: list[tuple[bool, Shapes]] = []  # new inputs of the current step
        self._op: Hashable = None
        self._taken_nbytes = 0  # most bytes beside those of the engine since the op began
        self._capacity_nbytes: int | None = None  # of the device, until `forget_capacity`
        self._num_failures = gauge.num_failures() if gauge is not None else 0  # failed allocations so far

    @property
    def is_on(self) -> bool:
        """Whether the current step is measured."""
        return self.tier.before_change is not None

    @property
    def activation_nbytes(self) -> int:
        """Most bytes that any op has allocated."""
        return max(self.op_nbytes.values(), default=0)

    @property
    def has_measured(self) -> bool:
        """Whether any inputs are measured."""
        return any(self._measured.values())

    def has_failed(self) -> bool:
        """Whether an allocation has failed since the last call. If so, nothing counts as measured."""
        failed = self.gauge.num_failures() > self._num_failures
        if failed:
            self._num_failures = self.gauge.num_failures()
            self._measured, self._growing = {True: [], False: []}, []
            self.forget_capacity()
        return failed

    def growth(self, shapes: Shapes, builds_graph: bool) -> float:
        """The growth of inputs compared with the most similar measured inputs; infinite without such inputs. Notes new inputs."""
        known = self._measured[True] + ([] if builds_graph else self._measured[False])
        found = min((_growth(shapes, seen) for seen in known), default=math.inf)
        if found > 1 and all(_growth(shapes, seen) > 1 for graph, seen in self._growing if graph or not builds_graph):
            self._growing.append((builds_graph, shapes))
        return found

    def room_for(self, growth: float) -> float:
        """Device bytes for the engine if inputs grow."""
        return self.room(self.activation_nbytes * growth**GROWTH_EXPONENT)

    def room(self, activation_nbytes: float) -> float:
        """Device bytes for the engine beside activations of this size."""
        if self._capacity_nbytes is None:
            self._capacity_nbytes = self.gauge.capacity_nbytes()
        room = self._capacity_nbytes - int(min(self._capacity_nbytes * SLACK, MOST_SLACK_NBYTES)) - activation_nbytes
        return room if self.bound_nbytes is None else min(room, self.bound_nbytes)

    def forget_capacity(self) -> None:
        """Measure the device's capacity again at the next use: the program, or gaps between blocks, may take more than before."""
        self._capacity_nbytes = None

    def begin(self) -> None:
        """Measure the ops from here on."""
        self.rebase()
        self._op, self.tier.before_change = None, self._note_peak

    def end(self) -> None:
        """Measure no longer."""
        self.tier.before_change = None

    def note_op(self, key: Hashable) -> None:
        """An op begins: if the step is measured, the allocator's peak belongs to the op before."""
        if self.is_on:
            self.end_op()
        self._op = key

    def end_op(self) -> None:
        """The peak so far belongs to the last op."""
        taken = self.tier.between_changes(self._take_peak)
        self.op_nbytes[self._op] = max(taken, self.op_nbytes.get(self._op, 0))
        self.on_op(taken)

    def _note_peak(self) -> None:
        """Called before the engine's bytes change, in any thread. Between two changes these bytes are constant, so the peak minus these bytes is
        the op's."""
        taken = self.gauge.peak_nbytes() - self.tier.held_nbytes
        self._taken_nbytes = max(self._taken_nbytes, taken)

    def _take_peak(self) -> int:
        self._note_peak()
        taken, self._taken_nbytes = self._taken_nbytes, 0
        return taken

    def rebase(self) -> None:
        """Allocations since the last op's end are the engine's, and belong to no op."""
        self.tier.between_changes(self._take_peak)

    def note_measured(self) -> None:
        """The new inputs of the step are measured."""
        self.end_op()
        self._op = None
        for builds_graph, shapes in self._growing:
            known = self._measured[builds_graph]
            known[:] = [seen for seen in known if _growth(seen, shapes) > 1] + [shapes]
        self._growing = []


def _growth(shapes: Shapes, seen: Shapes) -> float:
    """The largest growth of any input, as the product over the dimensions that grew. Infinite if inputs differ in number or dimensions."""
    if [len(shape) for shape in shapes] != [len(shape) for shape in seen]:
        return math.inf
    pairs = zip(shapes, seen)
    return max((math.prod(max(1.0, size / max(known, 1)) for size, known in zip(*pair)) for pair in pairs), default=1.0)
