"""Where in a plan a step is, and how far from there everything is used next: the distances by which slots and device memory are given.

Pure; an engine and the simulator of a run both ask it. Must not know tensors, threads or tiers.
"""

# [Note: distances are read without a lock]
# The thread that grants slots asks for distances while the training thread goes on along the route, begins updates or takes another route.
# No lock is between them: a route's tables are replaced, never changed in place, and who asks takes each of them once. A
# distance may so be that of an op earlier, or of the plan before, and another copy may make room than would a moment later. Nothing else
# depends on it: that a copy may go at all is told by its state and pins, which the records' lock guards.

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence

from infinity.plan.schedule import NEVER, Action, Copy, NextUse, Run, Use


class Route:
    """A trace, the plan made from it, and where in both a step is.

    updates: as for `plan`, which makes actions from them. successor: the route that the step after one of this kind took last.
    """

    def __init__(self, uses: list[Use], actions: list[Action], updates: Sequence[tuple[int, int]]):
        self.uses = uses
        self.next_use = NextUse(uses)
        self.cursor = Cursor(uses)
        self.successor: Route | None = None
        self.num_completions = 0  # gradients of which the plan knows when they are complete
        self.become(actions, updates)

    def become(self, actions: list[Action], updates: Sequence[tuple[int, int]]) -> None:
        """Take another plan."""
        runs: list[int] = []
        copied: dict[int, list[int]] = {}
        for index, action in enumerate(actions):
            if isinstance(action, Run):
                runs.append(index)
            elif isinstance(action, Copy):
                copied.setdefault(action.span, []).append(len(runs) - 1)
        self.actions, self.runs = actions, runs
        self._copied = copied  # a span's copies, by the position at which they are issued
        self.update_order = {chunk: (index, position) for index, (position, chunk) in enumerate(updates)}

    # Distances: numbers that grow with the distance to the next use, see [Note: distances are read without a lock].

    def to_span(self, span: int) -> float:
        """Of a span, by ops."""
        return self.next_use.cyclic(span, self.cursor.position, len(self.uses))

    def to_weights(self, chunk: int, span: int, *, update_comes: bool) -> float:
        """Of the host copy of a chunk's weights: its update needs them, too. update_comes: in this backward pass, or it has begun."""
        distance, due = self.to_span(span), self.update_order.get(chunk)
        if due is not None and update_comes:
            distance = min(distance, max(due[1], self.cursor.position))
        return distance

    def to_states(self, chunk: int, span: int, *, num_begun: int) -> float:
        """Of a chunk's states: how many updates come before its own. num_begun: updates in this step."""
        order = self.update_order
        if chunk not in order:  # deferred: updates follow the forward pass
            first = self.next_use.after(span, -1)
            return first if first > self.cursor.position else first + len(self.uses)
        index = order[chunk][0] - num_begun
        return index if index >= 0 else index + len(order)

    # What a host copy is wanted for once its bytes are on the device.

    def wants_weights(self, chunk: int, span: int, *, in_backward: bool) -> bool:
        """Whether weights that are being copied to the device are wanted in host memory again before they would be read again: by another
        copy in this backward pass, or by their update."""
        return (in_backward and self.copied_again(span)) or self.updated_next(chunk, span)

    def copied_again(self, span: int) -> bool:
        """Whether the step will want the span once more after the use that it is copied for."""
        following = self.next_use.after(span, self.cursor.position)
        return self.next_use.after(span, following) != NEVER

    def updated_next(self, chunk: int, span: int) -> bool:
        """Whether a chunk's update comes before the next copy of its span: so it is with what forward already copies for backward."""
        if chunk not in self.update_order:
            return False
        copied = self._copied.get(span, ())
        index = bisect_right(copied, self.cursor.position)
        return index == len(copied) or self.update_order[chunk][1] <= copied[index]


class Recency:
    """Distances where no route is known: what was used last is taken to be used next."""

    def __init__(self):
        self._used: dict[int, int] = {}
        self._tick = 0

    def note(self, span: int) -> None:
        """It is used now."""
        self._tick += 1
        self._used[span] = self._tick

    def to_span(self, span: int) -> float:
        return -self._used.get(span, 0)

    def to_weights(self, chunk: int, span: int, *, update_comes: bool) -> float:
        return self.to_span(span)

    def to_states(self, chunk: int, span: int, *, num_begun: int) -> float:
        return self.to_span(span)


def to_gradient(distances: Route | Recency, chunk: int, span: int, *, num_begun: int, in_use: bool) -> float:
    """Of a chunk's gradient, as of its states. in_use: more is added to it in this backward pass, or its update has begun."""
    return -math.inf if in_use else distances.to_states(chunk, span, num_begun=num_begun)


class Cursor:
    """Follows a running step through the plan's trace and finds its way back when the two part."""

    def __init__(self, uses: Sequence[Use]):
        self.uses = uses
        self.position = -1
        self._positions: dict[Hashable, list[int]] = {}
        for position, use in enumerate(uses):
            self._positions.setdefault(use.key, []).append(position)

    def restart(self) -> None:
        self.position = -1

    def expects(self, key: Hashable) -> bool:
        """Whether the step keeps to the trace if `key` comes next."""
        following = self.position + 1
        return following < len(self.uses) and self.uses[following].key == key

    def find(self, previous: Hashable | None, key: Hashable, near: int) -> int | None:
        """The position closest to `near` at which `key` follows `previous`, or begins the trace if that is None."""
        if previous is None:
            return 0 if self.uses[0].key == key else None
        found = [p for p in self._positions.get(key, ()) if p and self.uses[p - 1].key == previous]
        return min(found, key=lambda position: abs(position - near), default=None)

    def advance(self, key: Hashable) -> int | None:
        """The position of `key`: the next one if the step keeps to the trace, else its next occurrence, cyclically.

        None, and the position stays, when the trace does not hold the key at all.
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
