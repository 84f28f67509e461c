"""The position of a step in the plan, and the distance to the next use of each copy. Slots and device memory are granted by these distances.

Pure; for an engine. Must not know tensors, threads or tiers.
"""

# [Note: distances are read without a lock]
# The thread that grants slots reads distances while the training thread advances along the route, begins updates or takes another route. No
# lock protects them. A route's tables are replaced, never changed in place, and a reader takes each table once. A distance may therefore
# belong to the previous op or the previous plan, and a different copy may lose its slot. Nothing else depends on a distance: a copy's state
# and pins, which the records' lock guards, decide whether the copy may lose its slot at all.

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence

from infinity.plan.schedule import NEVER, Action, Copy, NextUse, Run, Use


class Route:
    """A trace, the plan made from the trace, and the present position in both.

    updates: the argument of `plan`. successor: the route that the step after a step of this kind took last.
    """

    def __init__(self, uses: list[Use], actions: list[Action], updates: Sequence[tuple[int, int]]):
        self.uses = uses
        self.next_use = NextUse(uses)
        self.cursor = Cursor(uses)
        self.successor: Route | None = None
        self.num_completions = 0  # gradients whose completion the plan knows
        self.become(actions, updates)

    def become(self, actions: list[Action], updates: Sequence[tuple[int, int]]) -> None:
        """Replace the plan."""
        runs: list[int] = []
        copied: dict[int, list[int]] = {}
        for index, action in enumerate(actions):
            if isinstance(action, Run):
                runs.append(index)
            elif isinstance(action, Copy):
                copied.setdefault(action.span, []).append(len(runs) - 1)
        self.actions, self.runs = actions, runs
        self._copied = copied  # positions at which each span's copies are issued
        self.update_order = {chunk: (index, position) for index, (position, chunk) in enumerate(updates)}

    # Distances grow with the distance to the next use, see [Note: distances are read without a lock].

    def to_span(self, span: int) -> float:
        """Distance of a span, in ops."""
        return self.next_use.cyclic(span, self.cursor.position, len(self.uses))

    def to_weights(self, chunk: int, span: int, *, update_comes: bool) -> float:
        """Distance of the host copy of a chunk's weights. The chunk's update counts as a use. update_comes: in this pass, or already begun."""
        distance, due = self.to_span(span), self.update_order.get(chunk)
        if due is not None and update_comes:
            distance = min(distance, max(due[1], self.cursor.position))
        return distance

    def to_states(self, chunk: int, span: int, *, num_begun: int) -> float:
        """Distance of a chunk's states: the number of earlier updates. num_begun: updates begun in this step."""
        order = self.update_order
        if chunk not in order:  # deferred: updates follow the forward pass
            first = self.next_use.after(span, -1)
            return first if first > self.cursor.position else first + len(self.uses)
        index = order[chunk][0] - num_begun
        return index if index >= 0 else index + len(order)

    # Uses of a host copy after the copy to the device.

    def wants_weights(self, chunk: int, span: int, *, in_backward: bool) -> bool:
        """Whether weights that are being copied to the device are needed again in host memory before they would be read again. The next use is
        either another copy in this backward pass or their update.
        """
        return (in_backward and self.copied_again(span)) or self.updated_next(chunk, span)

    def copied_again(self, span: int) -> bool:
        """Whether the step needs the span once more after the use of this copy."""
        following = self.next_use.after(span, self.cursor.position)
        return self.next_use.after(span, following) != NEVER

    def updated_next(self, chunk: int, span: int) -> bool:
        """Whether a chunk's update comes before the next copy of the span. This holds for spans that forward already copies for backward."""
        if chunk not in self.update_order:
            return False
        copied = self._copied.get(span, ())
        index = bisect_right(copied, self.cursor.position)
        return index == len(copied) or self.update_order[chunk][1] <= copied[index]


class Recency:
    """Distances without a known route: the most recently used span is expected next."""

    def __init__(self):
        self._used: dict[int, int] = {}
        self._tick = 0

    def note(self, span: int) -> None:
        """Record a use of the span."""
        self._tick += 1
        self._used[span] = self._tick

    def to_span(self, span: int) -> float:
        return -self._used.get(span, 0)

    def to_weights(self, chunk: int, span: int, *, update_comes: bool) -> float:
        return self.to_span(span)

    def to_states(self, chunk: int, span: int, *, num_begun: int) -> float:
        return self.to_span(span)


def to_gradient(distances: Route | Recency, chunk: int, span: int, *, num_begun: int, in_use: bool) -> float:
    """Distance of a chunk's gradient, like that of the states. in_use: this backward pass adds to it, or the update has begun."""
    return -math.inf if in_use else distances.to_states(chunk, span, num_begun=num_begun)


class Cursor:
    """Follows a running step through the trace, and finds a position again after the step has left the trace."""

    def __init__(self, uses: Sequence[Use]):
        self.uses = uses
        self.position = -1
        self._positions: dict[Hashable, list[int]] = {}
        for position, use in enumerate(uses):
            self._positions.setdefault(use.key, []).append(position)

    def restart(self) -> None:
        self.position = -1

    def expects(self, key: Hashable) -> bool:
        """Whether the step follows the trace if `key` comes next."""
        following = self.position + 1
        return following < len(self.uses) and self.uses[following].key == key

    def find(self, previous: Hashable | None, key: Hashable, near: int) -> int | None:
        """The position closest to `near` at which `key` follows `previous`. If previous is None, `key` must begin the trace."""
        if previous is None:
            return 0 if self.uses[0].key == key else None
        found = [p for p in self._positions.get(key, ()) if p and self.uses[p - 1].key == previous]
        return min(found, key=lambda position: abs(position - near), default=None)

    def advance(self, key: Hashable) -> int | None:
        """Advance to `key` and return its position: the next position if the step follows the trace, otherwise the next occurrence,
        cyclically.

        Returns None, and keeps the position, if the trace does not contain the key.
        """
        if self.expects(key):
            self.position += 1
            return self.position
        positions = self._positions.get(key)
        if not positions:
            return None
        index = bisect_right(positions, self.position)
        self.position = positions[index] if index < len(positions) else positions[0]
        return self.position
