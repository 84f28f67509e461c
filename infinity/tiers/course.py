"""Where a step is on the route that it is expected to take, and how far it is from there to the next use of what has a copy somewhere.

Knows routes, and what is under way for a chunk. Must not know how anything is moved: it is told where the step is, and answers. Only the training
thread tells; other threads ask for distances.
"""

# [Note: steps that differ]
# A step that leaves the route on which it was expected goes on along another known one where the last two ops follow each
# other, else at the next place of its own route that has the op. What the plan there takes for fetched already is fetched
# then. After the step its route is known, too, and which one followed which: models that alternate are expected right.

from __future__ import annotations

from collections.abc import Hashable

from infinity.plan import schedule
from infinity.plan.schedule import Route, Use
from infinity.tiers.state import ChunkState, SpanState

MAX_ROUTES = 8  # known at a time; the one that was taken longest ago is forgotten


class Course:
    """The routes that steps have taken, and the step under way on one of them."""

    def __init__(self):
        self.trace: list[Use] = []  # of the step under way
        self.routes: list[Route] = []  # the one that was taken last comes last
        self.route: Route | None = None  # of the step under way, as far as is known
        self.off_plan = True  # this step has left what was planned, or nothing was
        self.backward_task: int | None = None  # autograd's number of the backward pass under way, if it is the engine's
        self.num_updates_begun = 0  # in this step
        self._last_key: Hashable | None = None  # of the op before, in this step
        self._last_used: dict[int, int] = {}
        self._tick = 0

    def begin_step(self) -> None:
        self.num_updates_begun = 0
        self.off_plan = not self.routes
        self._last_key = None
        if self.routes:
            self.route = self.routes[-1].successor or self.routes[-1]
            self.route.cursor.restart()

    @property
    def has_begun(self) -> bool:
        """Whether ops ran since `begin_step`, or something else interfered with what it had issued."""
        return self.off_plan or (self.route is not None and self.route.cursor.position >= 0)

    def advance(self, key: Hashable) -> int | None:
        """The op's position in a route, which may be another one from here on; None if no known one fits."""
        previous, self._last_key = self._last_key, key
        route = self.route
        if route is None or route.cursor.expects(key):
            return route.cursor.advance(key) if route is not None else None
        for other in reversed(self.routes):
            position = other.cursor.find(previous, key, near=route.cursor.position + 1)
            if position is not None and other is not route:
                self.route, other.cursor.position = other, position
                return position
        return route.cursor.advance(key)

    def take(self, route: Route) -> None:
        """A step has taken this route."""
        if self.routes:
            self.routes[-1].successor = route  # which it may be itself
        self.routes = [known for known in self.routes if known is not route][1 - MAX_ROUTES :] + [route]
        self.route = route

    def forget(self) -> None:
        """Do without a plan until the next one is made."""
        self.routes, self.route, self.off_plan = [], None, True

    def note_use(self, span: SpanState) -> None:
        self._tick += 1
        self._last_used[span.index] = self._tick

    # The distances below are asked for by other threads, too, while the training thread may change routes.

    def next_use(self, span: int) -> float:
        """A number that grows with the distance to the next use of a span; without a plan, with the time since the last."""
        route = self.route
        if route is None:
            return -self._last_used.get(span, 0)
        return route.next_use.cyclic(span, route.cursor.position, len(route.uses))

    def next_weights_use(self, chunk: ChunkState) -> float:
        """As `next_use`, for the host copy of a chunk's weights: its update needs them, too, also one that has begun and waits for them."""
        distance, route = self.next_use(chunk.span.index), self.route
        due = route.update_order.get(chunk.index) if route is not None else None
        if due is not None and (chunk.update.is_expected or chunk.update.is_running):
            distance = min(distance, max(due[1], route.cursor.position))
        return distance

    def next_states_use(self, chunk: ChunkState) -> float:
        """As `next_use`, for the states of a chunk: how many updates come before its own."""
        route = self.route
        if route is None:
            return self.next_use(chunk.span.index)
        order = route.update_order
        if chunk.index not in order:  # deferred: updates follow the forward pass
            first = route.next_use.after(chunk.span.index, -1)
            return first if first > route.cursor.position else first + len(route.uses)
        index = order[chunk.index][0] - self.num_updates_begun
        return index if index >= 0 else index + len(order)

    def next_gradient_use(self, chunk: ChunkState) -> float:
        """As `next_states_use`; what more is added to in this backward pass, or whose update has begun, comes first."""
        return -1 if chunk.gradient.missing or chunk.update.is_running else self.next_states_use(chunk)

    def wants_again(self, chunk: ChunkState) -> bool:
        """Whether a host copy of a chunk's weights will be wanted after the copy to the device that is under way."""
        return self._copied_again(chunk.span) or self._updated_next(chunk)

    def _copied_again(self, span: SpanState) -> bool:
        """Whether this backward pass will want the span once more after the use that it is copied for."""
        route = self.route
        if route is None or self.backward_task is None:
            return False
        following = route.next_use.after(span.index, route.cursor.position)
        return route.next_use.after(span.index, following) != schedule.NEVER

    def _updated_next(self, chunk: ChunkState) -> bool:
        """Whether its update comes before the next copy of its span: so it is with what forward already copies for backward."""
        route = self.route
        return route is not None and route.updated_next(chunk.index, chunk.span.index, route.cursor.position)
