"""Where a step is on the route that it is expected to take, and how far it is from there to the next use of what has a copy somewhere.

Knows routes, and what is under way for a chunk. Must not know how anything is moved: it is told where the step is, and answers. Only the
training thread tells; other threads ask for distances.
"""

# [Note: steps that differ]
# A step that leaves the route on which it was expected goes on along another known one where the last two ops follow each
# other, else at the next place of its own route that has the op. What the plan there takes for fetched already is fetched
# then. After the step its route is known, too, and which one followed which: models that alternate are expected right.

from __future__ import annotations

from collections.abc import Hashable

from infinity.plan.route import Recency, Route, to_gradient
from infinity.plan.schedule import Use
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.span_state import SpanState

MAX_ROUTES = 8  # known at a time; the one that was taken longest ago is forgotten


class Course:
    """The routes that steps have taken, and the step under way on one of them."""

    def __init__(self):
        self.trace: list[Use] = []  # of the step under way
        self.routes: list[Route] = []  # the one that was taken last comes last
        self.route: Route | None = None  # of the step under way, as far as is known
        self.off_plan = True  # this step has left what was planned, or nothing was
        self.in_backward = False  # a backward pass of the engine runs
        self.num_updates_begun = 0  # in this step
        self._last_key: Hashable | None = None  # of the op before, in this step
        self._recency = Recency()

    def begin_step(self) -> None:
        self.num_updates_begun = 0
        self.off_plan = not self.routes
        self._last_key = None
        if self.routes:
            self.route = self.routes[-1].successor or self.routes[-1]
            self.route.cursor.restart()

    def set_in_backward(self, in_backward: bool) -> None:
        self.in_backward = in_backward

    def note_update(self) -> None:
        """One of this step has begun, or its turn is over."""
        self.num_updates_begun += 1

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
        self._recency.note(span.index)

    # Distances to the next use: see [Note: distances are read without a lock] in route.py.

    @property
    def _distances(self) -> Route | Recency:
        return self.route or self._recency

    def next_use(self, span: int) -> float:
        return self._distances.to_span(span)

    def next_weights_use(self, chunk: ChunkState) -> float:
        update_comes = chunk.update.is_expected or chunk.update.is_running
        return self._distances.to_weights(chunk.index, chunk.span.index, update_comes=update_comes)

    def next_states_use(self, chunk: ChunkState) -> float:
        return self._distances.to_states(chunk.index, chunk.span.index, num_begun=self.num_updates_begun)

    def next_gradient_use(self, chunk: ChunkState) -> float:
        in_use = bool(chunk.gradient.missing) or chunk.update.is_running
        return to_gradient(self._distances, chunk.index, chunk.span.index, num_begun=self.num_updates_begun, in_use=in_use)

    def wants_again(self, chunk: ChunkState) -> bool:
        """Whether a host copy of a chunk's weights will be wanted after the copy to the device that is under way."""
        return self.route is not None and self.route.wants_weights(chunk.index, chunk.span.index, in_backward=self.in_backward)
