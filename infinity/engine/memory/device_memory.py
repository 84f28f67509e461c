"""The engine's share of device memory: measured activations, and the division of the rest among spans, records and waiting gradients.

Knows budgets, spans and the homes of records. Must not know ops, the value of a gradient, or the arithmetic of an update. All calls
come from the training thread, on all ranks at the same points.
"""

# [Note: the device budget]
# The memory of activations and workspaces is known only after ops have run. So the first step runs on the least memory that the engine
# needs, and so does a step whose inputs are much larger than before. Meanwhile the engine reads the allocator's peak in each op and
# subtracts its own bytes. After the step, the engine takes the memory that the ops leave free.
# The plan keeps weights in this memory. If all weights fit, records visit the device, beginning with the first spans. No other work could hide
# the update of these records: their gradients come last, and their weights are needed first. The device updates them. Each visiting record
# keeps its place at home, in host memory or on NVMe, and returns there when inputs grow.
# Gradients that wait for step(), and have no place in host memory, come before records, and stay until their update begins. In a step of
# several passes, gradients that have arrived come to the device after the first pass. In host memory, places for gradients come before homes
# of visiting records, so that more records can visit ([Note: how budgets are spent] in placement.py). Only if host memory and NVMe are too
# small for the model, the first records live on the device from the start.
#
# A failed allocation, of the engine or the program, shows that ops need more than was measured. Before the next pass all records and
# gradients go home, and that step is measured again. So a program that catches the error and repeats the step has all the memory.
# The same happens, until inputs grow, if the division made steps longer ([Note: when a division has failed] in allocation_trial.py).
#
# Sending records from the host to the device only for their update saves no time if the host's memory bandwidth limits both the transfer and
# the update on the host. On a host of 175 GB/s with links of 50 GB/s, the best split had 1.05 times the rate of the host alone.

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable

from infinity.engine.memory.allocation_trial import AllocationTrial, Shapes
from infinity.plan import placement as planner
from infinity.plan.memory_needs import gradient_nbytes
from infinity.plan.placement import Placement
from infinity.plan.record import STATES, WEIGHTS, Record
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.span_state import SpanState
from infinity.tiers.weights import Weights

SLACK, MOST_SLACK_NBYTES = 0.05, 5 << 30  # part of the device memory, at most so much, that is left to gaps between the allocator's blocks
GROWTH_EXPONENT = 2  # an op's memory grows with this power of the input size, as for attention


class DeviceBudget:
    """Divides the engine's device memory among spans, records, and gradients that wait for step().

    gauge: measures device memory; None on the CPU. bound_nbytes: most bytes of the engine; None if only activations bound them.
    """

    def __init__(self, weights: Weights, gradients: Gradients, placement: Placement, gauge, *, bound_nbytes: int | None):
        self.registry, self.tier, self.ranks = weights.registry, weights.tier, weights.ranks
        self.weights, self.values, self.updater = weights, weights.values, weights.updater
        self.gradients = gradients
        self.placement = placement
        self.gauge = gauge
        self.bound_nbytes = bound_nbytes
        self.holds_records = False
        self.op_nbytes: dict[Hashable, int] = {}  # most bytes that each op has allocated, by key
        self.promoted: list[tuple[SpanState, int]] = []  # spans with records on the device, and bytes
        self.staying: dict[int, int] = {}  # spans with gradients that wait on the device -> bytes
        trainable = frozenset(chunk.index for chunk in self.registry.chunks if chunk.trainable and not chunk.on_device)
        self.stayable = trainable if gradients.adder.accumulate else placement.may_stay  # chunks whose gradients may stay, see `Placement`
        self.movable = not all(home.is_device for home in placement.homes[STATES])  # otherwise no record has another home
        self.budget_nbytes = placement.least_nbytes if self.movable and gauge is not None else placement.device_nbytes
        self._sequence: list[int] = []  # bytes of each op of the measured step, in order
        self._sums: dict[ChunkState, int] = {}  # chunks whose sums came in this layer-wise step, in order -> number of ops before
        self._later_nbytes: dict[ChunkState, int] = {}  # most bytes of any op after the chunk's sum came, in the step that was measured
        self._by_layer = False  # whether the current division is for layer-wise steps
        self._measured: dict[bool, list[Shapes]] = {True: [], False: []}  # inputs that fit; by whether the pass builds a graph
        self._growing: list[tuple[bool, Shapes]] = []  # new inputs of the current step
        self._measures = False  # whether the current step is measured
        self._op: Hashable = None
        self._capacity_nbytes: int | None = None  # of the device, measured once a step
        self._held_nbytes = 0  # bytes of the engine when the op began
        self._needs_division = True
        self._num_failures = gauge.num_failures() if gauge is not None else 0  # failed allocations so far
        self.trial = AllocationTrial()
        self._divide()
        gradients.may_wait = self._may_wait

    @property
    def activation_nbytes(self) -> int:
        """Most bytes that any op has allocated."""
        return max(self.op_nbytes.values(), default=0)

    def hold_records(self) -> None:
        """From now on records may visit the device."""
        self.holds_records = self._needs_division = True
        self.trial.drop_passes()  # the model ran without an optimizer

    def begin_forward(self, shapes: Shapes, builds_graph: bool) -> None:
        """A pass with inputs of these shapes begins: measure new shapes, and make room for activations if they may not fit.

        Inputs without any shape are measured every time, but no room is made for them.
        """
        if self.gauge is None or not self.movable:  # the device has nothing to measure, or nothing can leave
            return
        if failed := self.gauge.num_failures() > self._num_failures:
            self._num_failures = self.gauge.num_failures()
            self._measured, self._growing = {True: [], False: []}, []
            self.trial.drop_passes()  # the program has abandoned them
        if builds_graph:
            self.trial.begin_pass(shapes)
        known = self._measured[True] + ([] if builds_graph else self._measured[False])
        growth = min((_growth(shapes, seen) for seen in known), default=math.inf)
        if growth > 1 and all(_growth(shapes, seen) > 1 for graph, seen in self._growing if graph or not builds_graph):
            self._growing.append((builds_graph, shapes))
        first = not any(self._measured.values())  # the budget is still the least
        fits = first or growth <= 1 or self._room(self.activation_nbytes * growth**GROWTH_EXPONENT) >= self.budget_nbytes
        grows, lacks = self.ranks.most([growth > 1 or not shapes, failed or not fits])
        if lacks:
            self._capacity_nbytes = None
            self._retreat()
        if grows and not self._measures:
            self._needs_division = True
            self._reset_peak()
            self._measures = True

    def redivide(self, *, by_step: bool) -> bool:
        """A step is over: divide the memory that activations left free. Returns whether a new plan is needed.

        by_step: step() has ended the step, so the length is known.
        """
        is_longer = self.trial.step_done()
        sums, self._sums, self._capacity_nbytes = self._sums, {}, None
        if by_step and self._by_layer != bool(sums):  # equal on all ranks
            self._by_layer, self._needs_division = bool(sums), True
        if not self._needs_division:
            return self.trial.is_on and self._undo(is_longer)
        self._needs_division = False
        if self._measures:
            self._note_measured()
            self._note_later(sums)
            self._measures, self._sequence = False, []
        budget = self._budget(sums)
        before = self.tier.budget_nbytes, len(self.promoted), list(self.staying)
        visiting, staying = self._visitors(budget)
        while len(self.promoted) > len(visiting):
            self._demote()
        self.promoted = [(span, nbytes) for (span, _), (_, nbytes) in zip(self.promoted, visiting)]
        for span, _ in self.promoted if self._by_layer else ():
            for chunk in self.registry.chunks_in(span):
                self.gradients.free_idle(chunk)
        chosen = {index for index, _ in (*visiting, *staying)}
        self._send_gradients([span for span in self.staying if span not in chosen])
        self.budget_nbytes = budget
        self._divide()
        for index, nbytes in visiting[len(self.promoted) :]:
            self._promote(self.registry.spans[index], nbytes)
        for index, nbytes in staying:
            if index not in self.staying:
                self._keep_gradients(index, nbytes)
        self._divide()
        self._exchange_homes()
        has_changed = before != (self.tier.budget_nbytes, len(self.promoted), list(self.staying))
        self.trial.begin(has_changed and by_step and self.movable and self.gauge is not None)
        return has_changed

    def _undo(self, is_longer: bool) -> bool:
        """If the division made steps longer on any rank, records and gradients go home. Returns whether they do."""
        if not any(self.ranks.most([is_longer])):
            return False
        self.trial.fail()
        self._retreat()
        return True

    def pass_done(self) -> None:
        """A backward pass is over, and later passes of the step add to its gradients.

        Gradients without a place in host memory come to the device, if the activations leave room. Otherwise each pass would read and write
        their sums.
        """
        if not self._measures or not self.stayable:
            return
        self._note_measured()
        budget = self._budget()
        visiting, staying = self._visitors(budget)
        nbytes = dict(staying) | {index: self._gradient_nbytes(index) for index, _ in visiting}
        promoted = {span.index for span, _ in self.promoted}
        new = {index: taken for index, taken in nbytes.items() if taken and index not in self.staying and index not in promoted}
        if new:
            self.gradients.drain()
            self.budget_nbytes = max(budget, self.budget_nbytes)  # later passes of this step keep weights in the rest
            self.staying |= new
            self._divide()
            self.gradients.stay_on_device([chunk for index in new for chunk in self._may_stay(index)])
            self._reset_peak()  # no op has allocated these gradients

    def _reset_peak(self) -> None:
        """Allocations so far belong to no op."""
        self.gauge.peak_nbytes()
        self._op, self._held_nbytes = None, self.tier.held_nbytes

    def _note_measured(self) -> None:
        """The new inputs of the step are measured."""
        self.note_op(None)
        for builds_graph, shapes in self._growing:
            known = self._measured[builds_graph]
            known[:] = [seen for seen in known if _growth(seen, shapes) > 1] + [shapes]
        self._growing = []

    def _note_later(self, sums: dict[ChunkState, int]) -> None:
        """A layer-wise step is measured: note the memory that ops after each sum need."""
        coming = list(itertools.accumulate(reversed(self._sequence), max))[::-1]
        for chunk, position in sums.items():
            later = coming[position] if position < len(coming) else 0
            self._later_nbytes[chunk] = max(later, self._later_nbytes.get(chunk, 0))

    def _budget(self, sums: Iterable[ChunkState] = ()) -> int:
        """Device bytes for the engine without sums that wait for step(), equal on all ranks. sums: of a layer-wise step, in order."""
        if not self.movable:
            return self.placement.device_nbytes
        budget = int(self.placement.device_nbytes if self.gauge is None else self._room(self.activation_nbytes))
        beside = self._lacking_nbytes(sums) if sums else 0
        held = self.placement.least_nbytes - self.placement.fixed_nbytes
        least = self.placement.least_nbytes + ((planner.WINDOW_OPS - 1) * held if beside else 0)  # a sum may leave, weights always come
        budget = max(min(budget, least), budget - beside, self.placement.least_nbytes)
        return int(self.ranks.least([budget])[0])

    def _lacking_nbytes(self, sums: Iterable[ChunkState]) -> int:
        """Device bytes that all sums of a layer-wise step need beside the memory that activations leave to them one after the other."""
        most, waiting = 0, 0
        for chunk in sums:
            waiting += self._gradient_nbytes_of(chunk)
            most = max(most, self._later_nbytes.get(chunk, self.activation_nbytes) + waiting)
        beside = max(0, most - self.activation_nbytes)
        return beside if self.bound_nbytes is None else max(beside, waiting)

    def waiting_room(self, chunks: Iterable[ChunkState]) -> int:
        """Device bytes that are free for gradients of these chunks, which arrive next and wait for their updates."""
        if not self.movable:
            return 0
        self.note_op(self._op)  # the last op ends before the sums take memory
        if self.gauge is None:
            room = self.placement.device_nbytes
        else:
            later = self.activation_nbytes
            if not self._measures:
                later = max((self._later_nbytes.get(chunk, later) for chunk in chunks if chunk.gradient.job is None), default=later)
            room = int(self._room(later))
        room -= self.budget_nbytes + self.tier.waiting_nbytes
        return room // 2 if self._measures else room  # the next op may be the largest one so far

    def note_sums(self, chunks: list[ChunkState]) -> None:
        """In a layer-wise step, sums of these chunks come next."""
        if self._measures:  # no op has allocated these sums
            self.gauge.peak_nbytes()
            self._held_nbytes = self.tier.held_nbytes
        for chunk in chunks:
            if chunk.trainable:
                self._sums.setdefault(chunk, len(self._sequence))

    def _may_wait(self, chunk: ChunkState) -> bool:
        """Whether a gradient of an ordinary step stays until its update, before the first division has decided this."""
        if chunk.has_no_room_elsewhere:
            return True
        unknown = self._measures and not any(self._measured.values()) and self.gauge is not None and not self.ranks.are_several
        return unknown and chunk.index in self.stayable and self._gradient_nbytes_of(chunk) <= self.waiting_room([chunk])

    def _visitors(self, budget: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(Spans whose records will be on the device, other spans whose gradients will be there), each with the bytes there."""
        return planner.share_device(
            self.registry.layout,
            [chunk.record for chunk in self.registry.chunks],
            self.placement.homes[STATES],
            room_nbytes=budget - self.placement.gradient_limit_nbytes if self.holds_records and self.movable else 0,
            window_nbytes=self.placement.window_nbytes,
            snapshots={span.index for span in self.registry.spans if self.values.keeps_snapshot(span)},
            may_stay=() if self._by_layer else self.stayable,
            with_gradients=not self._by_layer,
        )

    def _gradient_nbytes(self, span: int) -> int:
        return sum(map(self._gradient_nbytes_of, self._may_stay(span)))

    @staticmethod
    def _gradient_nbytes_of(chunk: ChunkState) -> int:
        return gradient_nbytes(chunk.chunk, chunk.chunk.shard_used(0))

    def _room(self, activation_nbytes: float) -> float:
        """Device bytes for the engine beside activations of this size."""
        if self._capacity_nbytes is None:
            self._capacity_nbytes = self.gauge.capacity_nbytes()
        room = self._capacity_nbytes - int(min(self._capacity_nbytes * SLACK, MOST_SLACK_NBYTES)) - activation_nbytes
        return room if self.bound_nbytes is None else min(room, self.bound_nbytes)

    def note_op(self, key: Hashable) -> None:
        """An op begins: if the step is measured, the allocator's peak belongs to the op before."""
        if self._measures:
            held = self.tier.held_nbytes
            taken = self.gauge.peak_nbytes() - min(held, self._held_nbytes)
            self.op_nbytes[self._op] = max(taken, self.op_nbytes.get(self._op, 0))
            self._sequence.append(taken)
            self._held_nbytes = held
        self._op = key

    def _divide(self) -> None:
        """Give spans that come and go the memory that records and waiting gradients leave."""
        taken = self.placement.fixed_nbytes + sum(nbytes for _, nbytes in self.promoted) + sum(self.staying.values())
        if not self.placement.pinned:
            taken += sum(span.nbytes for span, _ in self.promoted)
        self.tier.budget_nbytes = max(self.budget_nbytes - taken, self.placement.least_nbytes - self.placement.fixed_nbytes)
        self.tier.limit_nbytes = max(self.placement.device_nbytes - taken, self.tier.budget_nbytes)

    def _retreat(self) -> None:
        """Reduce the engine to the least device memory that works. Activations get the rest."""
        while self.promoted:
            self._demote()
        self._send_gradients(list(self.staying))
        self._end_waiting()
        self.budget_nbytes = self.placement.least_nbytes
        self._divide()
        self.weights.evict_idle()

    def _promote(self, span: SpanState, nbytes: int) -> None:
        """Bring a span's records, and gradients that wait for step(), to the device, until `_demote`."""
        chunks = self.registry.chunks_in(span)
        for chunk in chunks:
            self.updater.finish(chunk)
            chunk.copy_for_snapshot()
            if chunk.gradient.job is not None:
                self.gradients.wait_for(chunk)
        if offloaded := [chunk for chunk in chunks if chunk.gradient.is_offloaded]:
            self.gradients.stay_on_device(offloaded)
        self.staying.pop(span.index, None)
        self.weights.acquire_aside([span])
        self.values.keep_written(span)
        if not span.pinned:
            self.tier.pin(span)
        for chunk in self.registry.chunks_in(span):
            self.values.to_device(chunk)
        self.values.make_snapshot(span)
        self.weights.release(span)
        self.promoted.append((span, nbytes))
        self._divide()

    def _exchange_homes(self) -> None:
        """Records that stay at home on NVMe take the host memory of visitors, those of the first spans first: their updates have the least time."""
        found: list[tuple[ChunkState, ChunkState, str]] = []
        for kind in (WEIGHTS, STATES):
            spare: dict[Record, list[ChunkState]] = {}
            for span, _ in self.promoted:
                for chunk in self.registry.chunks_in(span):
                    if chunk.homes[kind].is_host and chunk.record.of(kind):
                        spare.setdefault(chunk.record, []).append(chunk)
            away = [chunk for chunk in self.registry.chunks if chunk.trainable and not chunk.on_device and chunk.homes[kind].is_storage]
            found += [(spare[chunk.record].pop(), chunk, kind) for chunk in away if spare.get(chunk.record)]
        for _, chunk, _ in found:
            self.updater.finish(chunk)
        if found:
            self.updater.records.flush()  # copies that are still written keep their slots
        for visitor, chunk, kind in found:
            if self.values.give_home(visitor, chunk, kind):
                chunk.weights_home, chunk.states_home = chunk.homes[WEIGHTS], chunk.homes[STATES]

    def _keep_gradients(self, span: int, nbytes: int) -> None:
        """From now on gradients of this span that wait for step() stay on the device."""
        for chunk in self._may_stay(span):
            chunk.gradient.stay()
        self.staying[span] = nbytes

    def _send_gradients(self, spans: list[int]) -> None:
        """From now on gradients of these spans leave the device."""
        if spans:
            self.gradients.drain()
            self.updater.drain()  # the update lane may sum the squares of such a gradient
        for span in spans:
            for chunk in self._may_stay(span):
                self.gradients.leave_device(chunk)
            del self.staying[span]

    def _end_waiting(self) -> None:
        """Gradients that wait on the device in this step only leave it, by their update if this has begun or is announced."""
        for chunk in self.registry.chunks:
            if chunk.gradient.for_step:
                self.updater.finish(chunk)
            if chunk.gradient.for_step and chunk.gradient.device_shard is not None and not chunk.has_no_room_elsewhere:
                self.gradients.drain()
                self.updater.drain()
                self.gradients.leave_device(chunk)

    def _may_stay(self, span: int) -> list[ChunkState]:
        chunks = self.registry.chunks_in(self.registry.spans[span])
        return [chunk for chunk in chunks if chunk.index in self.stayable]

    def _demote(self) -> None:
        """Send the records that were promoted last back to their homes. Weights that an op holds stay until the op ends."""
        span, _ = self.promoted[-1]
        self.gradients.drain()
        self.updater.drain()
        self.values.keep_written(span)
        for chunk in self.registry.chunks_in(span):
            self.values.to_home(chunk)
            self.gradients.leave_device(chunk)
        self.values.drop_snapshot(span)
        if not self.placement.pinned:
            self.tier.unpin(span)
            if not span.holds:
                self.weights.invalidate(span)
        self.promoted.pop()
        self._divide()


def _growth(shapes: Shapes, seen: Shapes) -> float:
    """The largest growth of any input, as the product over the dimensions that grew. Infinite if inputs differ in number or dimensions."""
    if [len(shape) for shape in shapes] != [len(shape) for shape in seen]:
        return math.inf
    pairs = zip(shapes, seen)
    return max((math.prod(max(1.0, size / max(known, 1)) for size, known in zip(*pair)) for pair in pairs), default=1.0)
