"""The plan of a step: made from the trace of an earlier step, and issued as ops begin.

Knows the route of a step, and the parts that move weights and gradients. Must not know how these move bytes, modules, autograd or
optimizers. Called by the training thread. See [Note: who waits for whom] in weights.py and [Note: steps that differ] in route_position.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Sequence

from infinity.engine.steps.chunk_updates import ChunkUpdates
from infinity.engine.steps.gradient_reductions import GradientReductions
from infinity.plan import schedule
from infinity.plan.route import Route
from infinity.plan.schedule import Use
from infinity.plan.slots import farthest_first
from infinity.tiers.span_state import Presence, SpanState
from infinity.tiers.weights import Weights

_LOOK_AHEAD = 64  # uses after a jump in which `catch_up` looks for spans


class PlanFollower:
    """Issues the actions of a plan. keep: spans stay on the device while there is room. slots_ahead: number of slots for weights that are read
    ahead. states_ahead: number of chunks whose states are read ahead."""

    def __init__(
        self,
        weights: Weights,
        updates: ChunkUpdates,
        reductions: GradientReductions,
        *,
        keep: bool,
        slots_ahead: int,
        states_ahead: int,
    ):
        self.registry, self.tier, self.ranks = weights.registry, weights.tier, weights.ranks
        self.course = weights.course
        self.weights = weights
        self.updates, self.reductions = updates, reductions
        self.keep = keep
        self.read_ahead = schedule.READ_AHEAD
        self.slots_ahead = slots_ahead
        self.states_ahead = states_ahead
        self.num_plans = 0
        self._pointer = 0  # in the route's actions
        self._jumped = False

    def advance(self, key: Hashable, spans: Sequence[SpanState], *, record: bool) -> bool:
        """An op that needs these spans begins: find the op on the route. Returns whether `issue` has actions to issue there.

        record: the op's use belongs to the trace of this step. A step that has left its route reduces gradients without a plan, and evicts
        all spans that no op holds unless `keep` is set.
        """
        course, before = self.course, self.course.route
        if record:
            course.trace.append(Use(key, tuple([s.index for s in spans]), frozenset(self.weights.held)))
        position = course.advance(key)
        if course.off_plan:
            self.reductions.reduce_unplanned()
        if position is None:
            course.off_plan = True
            if not self.keep:
                self._evict_idle()
            return False
        run = course.route.runs[position]
        if self._pointer != run or course.route is not before:
            course.off_plan = self._jumped = True
            self._pointer = run
        self._pointer += 1
        return True

    def issue(self) -> None:
        """Issue the plan's actions up to the next op."""
        spans, chunks = self.registry.spans, self.registry.chunks
        actions = self.course.route.actions
        while self._pointer < len(actions):
            match actions[self._pointer]:
                case schedule.Run():
                    return
                case schedule.Read(index):
                    self.weights.read(spans[index])
                case schedule.Copy(index):
                    self.weights.copy(spans[index], needed=False)
                case schedule.Gather(index):
                    self.weights.gather(spans[index])
                case schedule.Evict(index):
                    self.weights.evict(spans[index])
                case schedule.ReadStates(index):
                    self.updates.read_states(chunks[index])
                case schedule.Reduce(index):
                    self.reductions.reduce_planned(chunks[index])
            self._pointer += 1

    def catch_up(self) -> None:
        """If the step has jumped to another place of a plan, fetch the spans that the plan counts as fetched when this op begins."""
        if not self._jumped:
            return
        self._jumped = False
        start = self.course.route.cursor.position + 1
        coming = [index for use in self.course.route.uses[start : start + _LOOK_AHEAD] for index in use.spans]
        away = [index for index in dict.fromkeys(coming) if self.registry.spans[index].presence is Presence.AWAY]
        for distance, index in enumerate(schedule.within(away, self.read_ahead, self.slots_ahead, self._slots_of(away))):
            span = self.registry.spans[index]
            self.weights.read(span)
            if distance < 2:
                self.weights.copy(span, needed=False)
            if distance < 1:
                self.weights.gather(span)

    def begin_step(self) -> None:
        """A step begins: evict all spans that no op holds, and issue the first fetches."""
        self.weights.drain_dropped()
        self.weights.evict_idle()
        self._pointer, self._jumped = 0, False
        self.course.begin_step()
        if self.course.routes:
            self.issue()

    def read_so_far_ahead(self, num_uses: int) -> None:
        """From the next plan on, read so many uses ahead, whatever room memory has. For benchmarks that compare distances."""
        self.read_ahead, self.slots_ahead = num_uses, 0
        self.forget()

    def forget(self) -> None:
        """Run without a plan until the next one is made."""
        self.course.forget()

    def adopt(self, reductions: Sequence[tuple[int, int]], updates: Sequence[tuple[int, int]], *, anew: bool = False) -> None:
        """Make the plan of the trace that was recorded since the last call, unless that plan is in force. anew: budgets have changed."""
        course = self.course
        trace, course.trace = course.trace, []
        if not trace:
            return
        if self.ranks.are_several:
            digest = zlib.crc32(repr((trace, reductions, updates)).encode())
            if not self.ranks.agree(digest):
                course.forget()
                return
            anew = any(self.ranks.most([anew]))
        if anew:
            course.forget()
        route = next((route for route in course.routes if route.uses == trace), None)
        if route is None or len(reductions) > route.num_completions:
            actions = self._plan(trace, reductions, updates)
            if route is None:
                route = Route(trace, actions, updates)
            else:
                route.become(actions, updates)  # this step has shown more about when gradients are complete
            route.num_completions = len(reductions)
            self.num_plans += 1
        course.take(route)

    def _evict_idle(self) -> None:
        for index in farthest_first(self.weights.evictable(), self.course.next_use):
            if (span := self.registry.spans[index]).presence is Presence.HOME:
                self.weights.evict(span)

    def _plan(self, trace: list[Use], reductions, updates) -> list[schedule.Action]:
        pinned = {span.index for span in self.registry.spans if span.pinned}
        return schedule.plan(
            trace,
            nbytes={s.index: 0 if s.index in pinned else s.nbytes for s in self.registry.spans},
            budget=self.tier.budget_nbytes,
            read_ahead=self.read_ahead,
            slots_ahead=self.slots_ahead,
            slots_of=self._slots_of(range(len(self.registry.spans))),
            keep=self.keep,
            reductions=reductions if self.ranks.are_several else (),
            updates=updates,
            span_of={chunk.index: chunk.span.index for chunk in self.registry.chunks},
            states_ahead=self.states_ahead,
        )

    def _slots_of(self, spans: Iterable[int]) -> dict[int, int]:
        """The number of slots for the weights of each span, by span."""
        chunks_in = self.registry.chunks_in
        return {span: sum(c.weights_home.is_storage for c in chunks_in(self.registry.spans[span])) for span in spans}
