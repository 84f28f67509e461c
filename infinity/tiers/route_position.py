"""The position of the current step on its route, and the distance from there to the next use of each copy.

Knows routes, and the update and the gradient of a chunk. Must not know how bytes move. Only the training thread changes the position. Other
threads read distances.
"""

# [Note: steps that differ]
# A step may leave the expected route. The step then continues on another known route, at a position where the last two ops follow each other.
# If no known route has such a position, the step continues at the next position of the same op on its own route. The plan there assumes
# that some spans were fetched earlier. The engine fetches these spans when an op needs them. After the step, the engine knows the new route
# and the order of the two routes. So the engine expects the right route if a model alternates between routes.

from __future__ import annotations

from collections.abc import Hashable

from infinity.plan.route import Recency, Route, to_gradient
from infinity.plan.schedule import Use
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.span_state import SpanState

MAX_ROUTES = 8  # known at a time; the least recently used route is forgotten


class Course:
    """The known routes, and the position of the current step on one of them."""

    def __init__(self):
        self.trace: list[Use] = []  # of the current step
        self.routes: list[Route] = []  # known routes; the most recently used one comes last
        self.route: Route | None = None  # of the current step; None if no route is known
        self.off_plan = True  # this step has left its plan, or has no plan
        self.in_backward = False  # a backward pass of the engine runs
        self.num_updates_begun = 0  # in this step
        self._last_key: Hashable | None = None  # of the previous op in this step
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
        """An update of this step has begun, or is put off."""
        self.num_updates_begun += 1

    @property
    def has_begun(self) -> bool:
        """Whether an op has run since `begin_step`, or the step is off plan, as after a use of spans outside the ops."""
        return self.off_plan or (self.route is not None and self.route.cursor.position >= 0)

    def advance(self, key: Hashable) -> int | None:
        """The position of the next op. This may change the route. Returns None if no known route fits."""
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
            self.routes[-1].successor = route  # may be the same route
        self.routes = [known for known in self.routes if known is not route][1 - MAX_ROUTES :] + [route]
        self.route = route

    def forget(self) -> None:
        """Forget all routes. The engine runs without a plan until it makes the next one."""
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
        """Whether a chunk's host copy of the weights is needed again after the running copy to the device."""
        return self.route is not None and self.route.wants_weights(chunk.index, chunk.span.index, in_backward=self.in_backward)
