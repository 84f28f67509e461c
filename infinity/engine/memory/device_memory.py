"""What the device has room for beside the activations: measures these, and gives what they leave free to weights, records and waiting gradients.

Knows budgets, spans and where records live. Must not know ops, what gradients are worth or what an update computes. The
training thread calls it, on every rank at the same point.
"""

# [Note: the device budget]
# What ops allocate for themselves, activations and workspaces, is known only once they ran. So the first step, and a step
# whose inputs are so much larger than those before that they might not fit, runs on the least that the engine needs, while the
# allocator's peak in each op is read; what the engine did not hold of it is the op's. After the step, the engine takes what
# this leaves free. The plan keeps weights there; if there is room for all of them, records follow, those of the first spans
# first: their gradients come last and their weights are needed first, so nothing else could hide their update. They are
# updated on the device. Each keeps its place in its home, host memory or NVMe, to which it returns when inputs grow. Gradients that wait
# for step(), and have no place of their own in host memory, come before records: they stay until their update begins; in
# a step of several passes that is measured, what has arrived comes to the device behind the first of them. So that more records visit,
# host memory has places for gradients before it has homes for visitors ([Note: how budgets are spent] in placement.py). Only where host
# memory and NVMe are too small for the model do the first records live on the device from the start, and stay.
#
# An allocation that fails, whoever asked, says that ops need more than they were seen to take: before the next pass all goes home, and
# that step is measured anew. So a program that catches the error and runs the step again has all the memory that there is.
# All goes home, too, where the division made steps longer ([Note: when a division has failed] in allocation_trial.py), until inputs grow.
#
# Sending records of the host to the device for their update alone does not pay where the host's memory is what bounds both:
# on a host of 175 GB/s with links of 50 GB/s, the best split had 1.05 times the rate of the host alone.

from __future__ import annotations

import math
from collections.abc import Hashable

from infinity.engine.memory.allocation_trial import Shapes, AllocationTrial
from infinity.plan import placement as planner
from infinity.plan.memory_needs import gradient_nbytes
from infinity.plan.placement import Placement
from infinity.plan.record import STATES, WEIGHTS
from infinity.tiers.gradients import Gradients
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.span_state import SpanState
from infinity.tiers.weights import Weights

SLACK = 0.05  # of what the device has for this process: left to the gaps between the allocator's blocks
GROWTH_EXPONENT = 2  # how fast an op's memory may grow with a dimension of the inputs: attention's does


class DeviceBudget:
    """Divides the engine's device memory between spans, records, and gradients that wait.

    bound_nbytes: the most that the engine may hold there; None where only activations bound it.
    """

    def __init__(self, weights: Weights, gradients: Gradients, placement: Placement, gauge, *, bound_nbytes: int | None):
        self.registry, self.tier, self.ranks = weights.registry, weights.tier, weights.ranks
        self.weights, self.values, self.updater = weights, weights.values, weights.updater
        self.gradients = gradients
        self.placement = placement
        self.gauge = gauge
        self.bound_nbytes = bound_nbytes
        self.holds_records = False
        self.op_nbytes: dict[Hashable, int] = {}  # the most that each op was seen to allocate, by its key
        self.promoted: list[tuple[SpanState, int]] = []  # whose records are on the device, and what these take there
        self.staying: dict[int, int] = {}  # spans whose gradients wait on the device, and what these take there
        self.movable = set(placement.homes[STATES]) != {"device"}  # else all lives on the device and has no other home
        self.budget_nbytes = placement.least_nbytes if self.movable and gauge is not None else placement.device_nbytes
        self._measured: dict[bool, list[Shapes]] = {True: [], False: []}  # inputs known to fit, of passes that build a graph or not
        self._growing: list[tuple[bool, Shapes]] = []  # those of the step under way that none of them covers
        self._measures = False  # what ops allocate
        self._op: Hashable = None
        self._held_nbytes = 0  # by the engine when the op began
        self._unsettled = True
        self._num_failures = gauge.num_failures() if gauge is not None else 0  # of allocations that are known
        self.trial = AllocationTrial()
        self._divide()

    @property
    def activation_nbytes(self) -> int:
        """The most that was allocated beside the engine's own."""
        return max(self.op_nbytes.values(), default=0)

    def hold_records(self) -> None:
        """From now on records may leave their homes for the device."""
        self.holds_records = self._unsettled = True
        self.trial.drop_passes()  # the model ran without an optimizer

    def begin_forward(self, shapes: Shapes, builds_graph: bool) -> None:
        """A pass over inputs of these shapes begins: measure it if it is larger than those before, make room if it may not fit.

        Inputs in which no shape is to be seen are measured every time, but no room is made for them.
        """
        if self.gauge is None or not self.movable:  # nothing to measure, or nothing to give back
            return
        if failed := self.gauge.num_failures() > self._num_failures:
            self._num_failures = self.gauge.num_failures()
            self._measured, self._growing = {True: [], False: []}, []
            self.trial.drop_passes()  # the program has given them up
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
            self._retreat()
        if grows and not self._measures:
            self._unsettled = True
            self._measure_on()
            self._measures = True

    def settle(self, *, by_step: bool) -> bool:
        """A step is over: divide what its activations left free. by_step: step() has just ended it, so it is known how long it took. Returns
        whether another plan is due."""
        is_longer = self.trial.step_done()
        if not self._unsettled:
            return self.trial.is_on and self._undo(is_longer)
        self._unsettled = False
        if self._measures:
            self._look()
            self._measures = False
        budget = self._budget()
        before = self.tier.budget_nbytes, len(self.promoted), list(self.staying)
        visiting, staying = self._guests(budget)
        while len(self.promoted) > len(visiting):
            self._demote()
        guests = {index for index, _ in (*visiting, *staying)}
        self._send_gradients([span for span in self.staying if span not in guests])
        self.budget_nbytes = budget
        self._divide()
        for index, nbytes in visiting[len(self.promoted) :]:
            self._promote(self.registry.spans[index], nbytes)
        for index, nbytes in staying:
            if index not in self.staying:
                self._keep_gradients(index, nbytes)
        self._divide()
        has_changed = before != (self.tier.budget_nbytes, len(self.promoted), list(self.staying))
        self.trial.begin(has_changed and by_step and self.movable and self.gauge is not None)
        return has_changed

    def _undo(self, is_longer: bool) -> bool:
        """All goes home if the division made steps longer, on any rank. Returns whether it does."""
        if not any(self.ranks.most([is_longer])):
            return False
        self.trial.fail()
        self._retreat()
        return True

    def pass_done(self) -> None:
        """A backward pass is over, and another one of the step will add to its gradients: those that have no place in host memory come to
        the device now, where its activations leave room. Else each pass would read their sums and write them again."""
        if not self._measures or not self.placement.may_stay:
            return
        self._look()
        visiting, staying = self._guests(self._budget())
        nbytes = dict(staying) | {index: self._gradient_nbytes(index) for index, _ in visiting}
        promoted = {span.index for span, _ in self.promoted}
        new = {index: taken for index, taken in nbytes.items() if taken and index not in self.staying and index not in promoted}
        if new:
            self.gradients.drain()
            self.budget_nbytes += sum(new.values())
            self.staying |= new
            self._divide()
            self.gradients.stay_on_device([chunk for index in new for chunk in self._may_stay(index)])
            self._measure_on()  # no op has allocated what came

    def _measure_on(self) -> None:
        """What was allocated so far is no op's."""
        self.gauge.peak_nbytes()
        self._op, self._held_nbytes = None, self.tier.held_nbytes

    def _look(self) -> None:
        """Ops were measured: what they took of the device is known, and for which inputs."""
        self.note_op(None)
        for builds_graph, shapes in self._growing:
            known = self._measured[builds_graph]
            known[:] = [seen for seen in known if _growth(seen, shapes) > 1] + [shapes]
        self._growing = []

    def _budget(self) -> int:
        """Device bytes for the engine, on every rank the same."""
        budget = self.placement.device_nbytes
        if self.movable and self.gauge is not None:
            budget = max(self._room(self.activation_nbytes), self.placement.least_nbytes)
        return int(self.ranks.least([budget])[0])

    def _guests(self, budget: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Spans whose records, and those whose gradients alone, are to be on the device, each with its bytes there."""
        return planner.share_device(
            self.registry.layout,
            [chunk.record for chunk in self.registry.chunks],
            self.placement.homes[STATES],
            room_nbytes=budget - self.placement.gradient_limit_nbytes if self.holds_records and self.movable else 0,
            gradient_itemsize=self._gradient_itemsize,
            snapshots={span.index for span in self.registry.spans if self.values.keeps_snapshot(span)},
            may_stay=self.placement.may_stay,
        )

    @property
    def _gradient_itemsize(self) -> int | None:
        return 4 if self.gradients.accumulate else None

    def _gradient_nbytes(self, span: int) -> int:
        return sum(gradient_nbytes(chunk.chunk, chunk.chunk.shard_used(0), self._gradient_itemsize) for chunk in self._may_stay(span))

    def _room(self, activation_nbytes: float) -> float:
        """Device bytes for the engine beside activations of that many."""
        room = int(self.gauge.capacity_nbytes() * (1 - SLACK)) - activation_nbytes
        return room if self.bound_nbytes is None else min(room, self.bound_nbytes)

    def note_op(self, key: Hashable) -> None:
        """An op begins: where ops are measured, the allocator's peak was that of the one before."""
        if not self._measures:
            return
        held = self.tier.held_nbytes
        taken = self.gauge.peak_nbytes() - min(held, self._held_nbytes)
        self.op_nbytes[self._op] = max(taken, self.op_nbytes.get(self._op, 0))
        self._op, self._held_nbytes = key, held

    def _divide(self) -> None:
        """What records on the device do not take is for spans that come and go."""
        taken = self.placement.fixed_nbytes + sum(nbytes for _, nbytes in self.promoted) + sum(self.staying.values())
        if not self.placement.pinned:
            taken += sum(span.nbytes for span, _ in self.promoted)
        self.tier.budget_nbytes = max(self.budget_nbytes - taken, self.placement.least_nbytes - self.placement.fixed_nbytes)
        self.tier.limit_nbytes = max(self.placement.device_nbytes - taken, self.tier.budget_nbytes)

    def _retreat(self) -> None:
        """Leave to the activations all but the least."""
        while self.promoted:
            self._demote()
        self._send_gradients(list(self.staying))
        self.budget_nbytes = self.placement.least_nbytes
        self._divide()
        self.weights.evict_idle()

    def _promote(self, span: SpanState, nbytes: int) -> None:
        """Bring a span's records to the device, for good or until `_demote`."""
        for chunk in self.registry.chunks_in(span):
            self.updater.finish(chunk)
            chunk.save_first()
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

    def _keep_gradients(self, span: int, nbytes: int) -> None:
        """From now on those that wait for step() stay on the device."""
        for chunk in self._may_stay(span):
            chunk.gradient.stay()
        self.staying[span] = nbytes

    def _send_gradients(self, spans: list[int]) -> None:
        """Those of these spans do not stay on the device any more."""
        if spans:
            self.gradients.drain()
            self.updater.drain()  # it may be summing the squares of one
        for span in spans:
            for chunk in self._may_stay(span):
                self.gradients.leave_device(chunk)
            del self.staying[span]

    def _may_stay(self, span: int) -> list[ChunkState]:
        chunks = self.registry.chunks_in(self.registry.spans[span])
        return [chunk for chunk in chunks if chunk.index in self.placement.may_stay]

    def _demote(self) -> None:
        """Send the records that were promoted last back to their homes; weights that an op holds stay as long as it does."""
        span, _ = self.promoted[-1]
        self.gradients.drain()
        self.updater.drain()
        self.values.keep_written(span)
        for chunk in self.registry.chunks_in(span):
            self.values.to_home(chunk, self.placement.homes[WEIGHTS][chunk.index], self.placement.homes[STATES][chunk.index])
            self.gradients.leave_device(chunk)
        self.values.drop_snapshot(span)
        if not self.placement.pinned:
            self.tier.unpin(span)
            if not span.holds:
                self.weights.invalidate(span)
        self.promoted.pop()
        self._divide()


def _growth(shapes: Shapes, seen: Shapes) -> float:
    """By how much one of the inputs exceeds its like, as the product over its dimensions that do; infinite for others in kind."""
    if [len(shape) for shape in shapes] != [len(shape) for shape in seen]:
        return math.inf
    pairs = zip(shapes, seen)
    return max((math.prod(max(1.0, size / max(known, 1)) for size, known in zip(*pair)) for pair in pairs), default=1.0)
