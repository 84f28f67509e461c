"""The sizes of a division of device memory: the bytes of the engine, and the spans whose records or gradients have room.

Knows budgets, spans and the homes of records. Must not know how records and gradients move, or when memory is divided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from infinity.engine.memory.activation_meter import ActivationMeter
from infinity.engine.memory.sum_memory import SumMemory
from infinity.plan import placement as planner
from infinity.plan.placement import Placement
from infinity.plan.record import STATES
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.weights import Weights

SpansOnDevice = tuple[list[tuple[int, int]], list[tuple[int, int]]]  # see `planner.share_device`


class DivisionSizes:
    """stayable: chunks whose gradients may stay on the device. movable: whether any record has another home. beside_nbytes: bytes that the sums
    of layer-wise steps need in addition to the largest activations.
    """

    def __init__(self, weights: Weights, placement: Placement, meter: ActivationMeter, sums: SumMemory, stayable: Collection[int]):
        self.registry, self.values, self.ranks = weights.registry, weights.values, weights.ranks
        self.placement, self.meter, self.sums, self.stayable = placement, meter, sums, stayable
        self.movable = not all(home.is_device for home in placement.homes[STATES])
        self.beside_nbytes = 0

    def budget_nbytes(self, sums: Iterable[ChunkState] = (), *, wait: bool = True) -> int:
        """Device bytes for the engine without sums of a layer-wise step, equal on all ranks. sums: their chunks, in order.
        wait: see `needed_nbytes`."""
        if not self.movable:
            return self.placement.device_nbytes
        budget, least, meter = self.placement.device_nbytes, self.placement.least_nbytes, self.meter
        if meter.gauge is not None:
            budget = int(meter.room(meter.activation_nbytes))
        self.beside_nbytes, total = self.sums.needed_nbytes(sums, meter.activation_nbytes, wait=wait)
        if total:  # a sum may leave, weights always come
            with_window = least + (planner.WINDOW_OPS - 1) * (least - self.placement.fixed_nbytes)
            bound = budget - self.beside_nbytes
            if meter.bound_nbytes is not None:
                bound = min(bound, meter.bound_nbytes - total)
            budget = max(min(budget, with_window), bound)
        return int(self.ranks.least([max(budget, least)])[0])

    def on_device(self, budget: int, *, holds_records: bool, by_layer: bool, waiting: Collection[int] | None) -> SpansOnDevice:
        """(Spans whose records will be on the device, other spans whose gradients will be there), each with the bytes there.
        waiting: see `share_device`."""
        return planner.share_device(
            self.registry.layout,
            [chunk.record for chunk in self.registry.chunks],
            self.placement.homes[STATES],
            room_nbytes=budget - self.placement.gradient_limit_nbytes if holds_records and self.movable else 0,
            window_nbytes=self.placement.window_nbytes,
            snapshots={span.index for span in self.registry.spans if self.values.keeps_snapshot(span)},
            may_stay=() if by_layer else self.stayable,
            waiting=waiting,
        )

    def keeps_frozen(self, budget: int, found: SpansOnDevice) -> bool:
        """Whether frozen weights stay on the device from step to step."""
        room_nbytes = budget - self.placement.gradient_limit_nbytes
        return self.movable and planner.keeps_frozen(self.registry.layout, found, room_nbytes=room_nbytes)

    def hold_weights_and_gradients(self) -> bool:
        """Whether the device can hold all weights and gradients of an ordinary step, and no states are on NVMe. Equal on all ranks."""
        found = self.on_device(self.budget_nbytes(), holds_records=True, by_layer=False, waiting=None)
        spans = {span for both in found for span, _ in both}
        needed = {self.registry.chunks[index].span.index for index in self.stayable}
        return self.placement.window_nbytes is None and bool(needed) and needed <= spans
