"""The engine's share of device memory: measured activations, and the division of the rest among spans, records and waiting gradients.

Knows budgets, spans and the homes of records. Must not know ops, the value of a gradient, or the arithmetic of an update. All calls
come from the training thread, on all ranks at the same points.
"""

# [Note: the device budget]
# The memory of activations and workspaces is known only after ops have run. So the first step runs on the least memory that the engine
# needs, and so does a step whose inputs are much larger than before. Meanwhile the engine reads the allocator's peak in each op and
# subtracts its own bytes. After the step, the engine takes the memory that the ops leave free.
# The plan keeps weights in this memory. If there is more room, records visit the device, beginning with the first spans. No other work could
# hide the update of these records: their gradients come last, and their weights are needed first. The device updates them. Each visiting
# record keeps a place at home, in host memory or on NVMe, and returns there when inputs grow. On one rank, if updates run in backward, the
# device updates a visitor as soon as its gradient is complete. The gradient then needs no memory until step(), and more records can visit.
# Frozen weights never change. They stay from step to step if the device can hold all weights beside these records and gradients. Otherwise a
# step fetches them again. (8.2 B parameters, adapters over an nf4 base on an H200: with fetches, a forward pass waited 40 ms for them.)
# Gradients that wait for step() come before records, if they have no place in host memory or several passes add to them. They stay until
# their update begins. In a step of several passes, gradients that have arrived come to the device after the first pass. In host memory, places
# for gradients come before homes of visiting records, so that more records can visit ([Note: how budgets are spent] in placement.py). Only if
# host memory and NVMe are too small for the model, the first records live on the device from the start. If records have homes on NVMe, weights
# that no op needs soon leave the device to more visitors.
#
# Sums of layer-wise steps take the place of activations ([Note: sums in the place of activations] in sum_memory.py). The engine frees the
# memory of a sum after the update, for visitors, too. In the first step, a gradient waits on the device if half of the free memory is enough.
# If the device has room for all weights and all sums, an ordinary loop transfers each weight and each sum once. A layer-wise step transfers no
# less, and changes threads at each segment. So the micro-batches of such a step run in turn, forward and backward. (7.1 B parameters, a mixture
# of experts, 16 micro-batches of 4,096 tokens: by layer, a step takes 9.2 s on a host where the loop takes 7.8 s. In turn, the step takes 7.3
# to 8.8 s on another host, where the loop takes 7.4 to 8.3 s.) This holds if updates wait for step(). If they do not, a layer-wise step is
# better, because its backward passes hide the updates.
#
# step() divides the device before the updates, so that the device updates the records that come. Their gradients may be there already.
# Visitors with homes in host memory exchange these homes with records that stay on NVMe. Therefore no host memory is idle.
#
# A failed allocation, of the engine or the program, shows that ops need more than was measured. Before the next pass all records and
# gradients go home, and that step is measured again. So a program that catches the error and repeats the step has all the memory.
# The same happens, until inputs grow, if the division made steps longer ([Note: when a division has failed] in allocation_trial.py).
#
# Sending records from the host to the device only for their update saves no time if the host's memory bandwidth limits both the transfer and
# the update on the host. On a host of 175 GB/s with links of 50 GB/s, the best split had 1.05 times the rate of the host alone.

from __future__ import annotations

from collections.abc import Iterable

from infinity.engine.memory.activation_meter import ActivationMeter
from infinity.engine.memory.allocation_trial import AllocationTrial, Shapes
from infinity.engine.memory.division_sizes import DivisionSizes, SpansOnDevice
from infinity.engine.memory.kept_spans import KeptSpans
from infinity.engine.memory.sum_memory import SumMemory
from infinity.plan.memory_needs import gradient_nbytes
from infinity.plan.placement import Placement
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.span_state import SpanState
from infinity.tiers.weights import Weights


class DeviceBudget:
    """Divides the engine's device memory among spans, records, and gradients that wait for step().

    meter: measures activations. sums: the memory of sums in layer-wise steps.
    """

    def __init__(self, weights: Weights, gradients: Gradients, placement: Placement, gauge, *, bound_nbytes: int | None):
        self.registry, self.tier, self.ranks = weights.registry, weights.tier, weights.ranks
        self.weights, self.values, self.updater = weights, weights.values, weights.updater
        self.gradients = gradients
        self.placement = placement
        self.kept = KeptSpans(weights, gradients, placement)
        self.gauge = gauge
        self.sums = SumMemory(_gradient_nbytes, self.registry.chunks)
        self.meter = ActivationMeter(gauge, self.tier, bound_nbytes, self.sums.note_op)
        self.holds_records = False
        self._waited: set[int] = set()  # chunks whose gradients usually wait for step() although updates run in backward
        self._last_waited, self._has_had_visitors = set[int](), False  # those of the last step; whether any record has ever visited
        self.staying: dict[int, int] = {}  # spans with gradients that wait on the device -> bytes
        trainable = frozenset(chunk.index for chunk in self.registry.chunks if chunk.trainable and not chunk.on_device)
        self.stayable = trainable if gradients.adder.accumulate else placement.may_stay  # chunks whose gradients may stay, see `Placement`
        self.sizes = DivisionSizes(weights, placement, self.meter, self.sums, self.stayable)
        self.budget_nbytes = placement.least_nbytes if self.sizes.movable and gauge is not None else placement.device_nbytes
        self._by_layer = False  # whether the current division is for layer-wise steps
        self.in_turn = False  # whether micro-batches of layer-wise steps run in turn, forward and backward
        self._may_be_in_turn = True
        self._needs_division = True
        self.trial = AllocationTrial()
        self._divide()

    def hold_records(self) -> None:
        """From now on records may visit the device."""
        self.holds_records = self._needs_division = True
        self.trial.drop_passes()  # the model ran without an optimizer

    def begin_forward(self, shapes: Shapes, builds_graph: bool) -> None:
        """A pass with inputs of these shapes begins: measure new shapes, and make room for activations if they may not fit.

        Inputs without any shape are measured every time, but no room is made for them.
        """
        if self.gauge is None or not self.sizes.movable:  # the device has nothing to measure, or nothing can leave
            return
        meter = self.meter
        if failed := meter.has_failed():
            self.trial.drop_passes()  # the program has abandoned them
        if builds_graph:
            self.trial.begin_pass(shapes)
        growth = meter.growth(shapes, builds_graph)
        first = not meter.has_measured  # the budget is still the least
        room = self.budget_nbytes
        if not first and growth > 1:
            if meter.room_for(growth) < self.budget_nbytes + self.tier.waiting_nbytes:
                self._end_waiting()
            room = max(self.placement.least_nbytes, meter.room_for(growth) - self.sizes.beside_nbytes)  # the least also for a NaN
        grows, failed, lacking = self.ranks.most([growth > 1 or not shapes, failed, int(max(0, self.budget_nbytes - room))])
        if failed:
            self.sums.end_forecasts()
            self._retreat()
        elif lacking:
            self._shrink(self.budget_nbytes - lacking)
        if grows and not meter.is_on:
            self._needs_division = True
            meter.begin()

    # The end of a step or a pass.

    def redivide(self, *, by_step: bool) -> bool:
        """A step is over: divide the memory that activations left free. Returns whether a new plan is needed.

        by_step: step() has ended the step, so the length is known.
        """
        is_longer, meter = self.trial.step_done(), self.meter
        if meter.is_on:
            meter.note_measured()
        sums = self.sums.end_step(is_measured=meter.is_on)
        meter.forget_capacity()
        self._needs_division |= by_step and self._by_layer != bool(sums)  # equal on all ranks
        returns = self.trial.has_just_failed and any(self.ranks.most([self.trial.was_wrong]))
        if not (self._needs_division or returns):
            return self.trial.is_on and self._undo(is_longer)
        self._needs_division = False
        meter.end()
        if by_step:
            may_be = self._may_be_in_turn and self.updater.deferred and not self.trial.num_failed
            self.in_turn = may_be and bool(sums or self.in_turn) and self.sizes.hold_weights_and_gradients()
            sums = () if self.in_turn else sums
            self._by_layer = bool(sums)
        budget = self.sizes.budget_nbytes(sums, wait=self.updater.deferred)
        before = self._division
        visiting, staying = self._visitors(budget)
        self._leave(budget, visiting, staying)
        for index, nbytes in visiting[len(self.promoted) :]:
            self.staying.pop(index, None)
            self.kept.promote(self.registry.spans[index], nbytes, keeps_gradient=self.keeps_gradients)
            self._has_had_visitors = True
            self._divide()
        self._stay(staying)
        if self.holds_records and not self.kept.frozen and self.sizes.keeps_frozen(budget, (visiting, staying)):
            self.kept.keep_frozen()
            self._divide()
        self.weights.lanes.drain()  # copies of visitors' weights still pin their homes
        self.values.exchange_homes(self.kept.promoted_chunks)
        has_changed = before != self._division
        self.trial.begin(has_changed and by_step and self.sizes.movable and self.gauge is not None and not returns)
        return has_changed

    def note_waited(self, chunks: Iterable[ChunkState]) -> None:
        """Gradients of these chunks have waited for step(), as with retain_graph or with layers that run twice. If such records visit, they need
        memory for their gradients. A single step may be an exception, for example because the program still held the graph of an evaluation.
        """
        waited = {chunk.index for chunk in chunks} if self.updater.visitors_are_early else set()
        usual = waited & self._last_waited if self._has_had_visitors else waited
        self._last_waited = waited
        self._needs_division |= not usual <= self._waited
        self._waited |= usual

    def forbid_in_turn(self) -> None:
        """The device had no room for micro-batches in turn: from now on they pass each segment together."""
        self.in_turn = self._may_be_in_turn = False

    def pass_done(self) -> None:
        """A backward pass is over, and later passes of the step add to its gradients.

        Gradients come to the device if the activations leave room. Otherwise each pass would add to sums in host memory, or read sums from NVMe
        and write them. Later passes keep weights in the rest of the room.
        """
        if not self.meter.is_on or not self.stayable:
            return
        self.meter.note_measured()
        budget = self.sizes.budget_nbytes()
        visiting, staying = self._visitors(budget)
        nbytes = dict(staying) | {index: sum(map(_gradient_nbytes, self._may_stay(index))) for index, _ in visiting}
        promoted = {span.index for span, _ in self.promoted}
        new = {index: taken for index, taken in nbytes.items() if taken and index not in self.staying and index not in promoted}
        if new:
            self.gradients.drain()
            self.budget_nbytes = max(budget, self.budget_nbytes)
            self.staying |= new
            self._divide()
            self.gradients.stay_on_device([chunk for index in new for chunk in self._may_stay(index)])
            self.meter.rebase()

    def _undo(self, is_longer: bool) -> bool:
        """If the division made steps longer on any rank, records and gradients go home. Returns whether they do."""
        if not any(self.ranks.most([is_longer])):
            return False
        self.trial.fail()
        self._retreat()
        return True

    def _visitors(self, budget: int) -> SpansOnDevice:
        waiting = None if self.keeps_gradients else self._waited
        return self.sizes.on_device(budget, holds_records=self.holds_records, by_layer=self._by_layer, waiting=waiting)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of visitors have memory of their own from step to step. They need none if a backward pass updates the visitors. They
        also need none if all sums of a layer-wise step wait for step(), because sums take the place of activations."""
        if self.updater.visitors_are_early:
            return not self._by_layer and self.gradients.adder.accumulate
        return not (self._by_layer and self.updater.deferred)

    @property
    def _division(self) -> tuple:
        return self.tier.budget_nbytes, len(self.promoted), list(self.staying), len(self.kept.frozen)

    @property
    def promoted(self) -> list[tuple[SpanState, int]]:
        """Spans with records on the device, and the bytes of these records."""
        return self.kept.promoted

    def _divide(self) -> None:
        """Give spans that come and go the memory that records, waiting gradients and frozen weights leave."""
        taken = self.placement.fixed_nbytes + self.kept.nbytes + sum(self.staying.values())
        self.tier.budget_nbytes = max(self.budget_nbytes - taken, self.placement.least_nbytes - self.placement.fixed_nbytes)
        self.tier.limit_nbytes = max(self.placement.device_nbytes - taken, self.tier.budget_nbytes)

    # Gradients that wait for step() in one step only.

    def waiting_room(self) -> int:
        """In a measured step: device bytes that are free for a gradient that arrives next and waits for its update."""
        if not self.sizes.movable:
            return 0
        self.meter.end_op()  # before the gradient takes memory
        return self._room_beside(self.meter.activation_nbytes)

    def sum_room(self, chunks: Iterable[ChunkState], position: int | None) -> tuple[int, int]:
        """(Device bytes for sums of these chunks, which come next and wait for their updates; the part that later sums without a place in host
        memory leave). position: of the segment that goes backward next, None if another round follows."""
        if not self.sizes.movable:
            return 0, 0
        if self.meter.is_on:
            self.meter.end_op()
        ops, with_sums = self.sums.peaks_of_later(chunks, position, self.meter.activation_nbytes, is_measured=self.meter.is_on)
        room = self._room_beside(ops)
        return room, room - max(0, with_sums - ops)

    def end_forward_segment(self, position: int) -> None:
        """All forward passes of a layer-wise step have left the segment at this position."""
        if self.meter.is_on:
            self.meter.end_op()
            self.sums.forecast.end_forward(position)

    def _room_beside(self, activation_nbytes: int) -> int:
        room = self.placement.device_nbytes if self.gauge is None else int(self.meter.room(activation_nbytes))
        room -= self.budget_nbytes + self.tier.waiting_nbytes
        return room // 2 if self.meter.is_on else room  # the next op may be the largest one so far

    def note_sums(self, chunks: list[ChunkState]) -> None:
        """In a layer-wise step, sums of these chunks come next. Their memory is allocated."""
        if self.meter.is_on:
            self.meter.rebase()
        self.sums.note_sums(chunks)

    def let_wait(self, chunks: Iterable[ChunkState]) -> None:
        """Gradients of these chunks arrive in an ordinary step on one rank. They wait on the device if no other tier has room. Before the first
        division, gradients without a place in host memory also wait there if the device has room.
        """
        is_first = self.meter.is_on and not self.meter.has_measured
        for chunk in chunks:
            if chunk.gradient_on_device or chunk.gradient.has_arrived:
                continue
            may_wait = is_first and chunk.index in self.stayable and _gradient_nbytes(chunk) <= self.waiting_room()
            if may_wait or chunk.must_wait:
                self.gradients.wait_on_device(chunk)

    def _end_waiting(self) -> None:
        """Remove gradients that wait on the device in this step only. If the update has begun or is announced, it is finished first."""
        for chunk in self.registry.chunks:
            if chunk.gradient.for_step:
                self.updater.finish(chunk)
            if chunk.gradient.for_step and chunk.gradient.device_shard is not None and not chunk.has_no_room_elsewhere:
                self.gradients.drain()
                self.updater.drain()
                self.gradients.leave_device(chunk)

    # Records, and gradients that stay in every step.

    def _leave(self, budget: int, visiting: list[tuple[int, int]], staying: list[tuple[int, int]]) -> None:
        """Reduce the engine to this budget: records and gradients that are not chosen leave. The lists are those of `_visitors`."""
        if not self.sizes.keeps_frozen(budget, (visiting, staying)):
            self.kept.release_frozen()
        while len(self.promoted) > len(visiting):
            self._demote()
        self.promoted[:] = [(span, nbytes) for (span, _), (_, nbytes) in zip(self.promoted, visiting)]
        self.gradients.memory.keep_for_visitors(self.keeps_gradients)
        for chunk in self.kept.promoted_chunks if not self.keeps_gradients else ():
            self.gradients.memory.free_idle(chunk)
        chosen = {index for index, _ in (*visiting, *staying)}
        self._send_gradients([span for span in self.staying if span not in chosen])
        self.budget_nbytes = budget
        self._divide()

    def _stay(self, staying: list[tuple[int, int]]) -> None:
        """From now on gradients of these spans that wait for step() stay on the device."""
        for span, nbytes in staying:
            if span not in self.staying:
                for chunk in self._may_stay(span):
                    if chunk.gradient.job is not None:
                        self.gradients.wait_for(chunk)  # lane gc decides by `stays` where the next part goes
                    chunk.gradient.stay()
                self.staying[span] = nbytes
        self._divide()

    def _shrink(self, budget: int) -> None:
        """Leave device memory to larger activations. The records and gradients that were chosen last leave first."""
        visiting, staying = self._visitors(budget)
        self._leave(budget, visiting, [(span, nbytes) for span, nbytes in staying if span in self.staying])
        self.weights.evict_idle()

    def _retreat(self) -> None:
        """Reduce the engine to the least device memory that works. Activations get the rest."""
        self.meter.forget_capacity()
        self.in_turn = False
        self.kept.release_frozen()
        while self.promoted:
            self._demote()
        self._send_gradients(list(self.staying))
        self._end_waiting()
        self.budget_nbytes = self.placement.least_nbytes
        self._divide()
        self.weights.evict_idle()

    def _demote(self) -> None:
        self.kept.demote()
        self._divide()

    def _send_gradients(self, spans: list[int]) -> None:
        """From now on gradients of these spans leave the device."""
        if spans:
            self.gradients.drain()
            self.updater.drain()  # the update lane may sum the squares of such a gradient
        for span in spans:
            for chunk in self._may_stay(span):
                self.gradients.leave_device(chunk)
            del self.staying[span]

    def _may_stay(self, span: int) -> list[ChunkState]:
        chunks = self.registry.chunks_in(self.registry.spans[span])
        return [chunk for chunk in chunks if chunk.index in self.stayable]


def _gradient_nbytes(chunk: ChunkState) -> int:
    """Bytes of the largest shard of the chunk's gradient, equal on all ranks."""
    return gradient_nbytes(chunk.chunk, chunk.chunk.shard_used(0))
