"""When the gradients of a step were complete: from this the plan has its reductions and updates.

Knows the trace of a step and the ranks. Must not know how gradients arrive, or what becomes of them.
"""

from __future__ import annotations

from infinity.plan.schedule import NEVER, Moment
from infinity.system.ranks import Ranks
from infinity.tiers.route_position import Course
from infinity.tiers.chunk_state import ChunkState, Registry
from infinity.tiers.updates import Updater

Positions = list[tuple[int, int]]  # in the trace, each with a chunk


class Completions:
    """Of the step under way."""

    def __init__(self, course: Course, updater: Updater, registry: Registry, ranks: Ranks):
        self.course = course
        self.updater = updater
        self.registry = registry
        self.ranks = ranks
        self.reset()

    def reset(self) -> None:
        self._found: list[tuple[int, int, int]] = []  # (backward pass, position in the trace, chunk)
        self._ends: dict[int, int] = {}  # of backward passes, in the trace

    def note(self, backward: int, chunk: ChunkState) -> None:
        """All gradients that are expected of a chunk have arrived, in this backward pass of the step."""
        self._found.append((backward, max(len(self.course.trace) - 1, 0), chunk.index))

    def end_pass(self, backward: int) -> None:
        self._ends[backward] = len(self.course.trace)

    def for_plan(self, num_backwards: int) -> tuple[Positions, Positions]:
        """(position, chunk), in order, of gradients that were complete on every rank, and those of them due for an update then.
        num_backwards: that may make a step."""
        found, chunks = self._found if self.ranks.world == 1 else self._on_all(num_backwards), self.registry.chunks
        early = [(p, c) for b, p, c in found if b == num_backwards - 1 and self.updater.moment(chunks[c]) is Moment.GRADIENT]
        return [(p, c) for _, p, c in found], early

    def _on_all(self, num_backwards: int) -> list[tuple[int, int, int]]:
        """On several ranks: not before the pass's last use of their span, for which of an op's parameters have gradients may
        differ between ranks and steps. What is complete only after the last use of a pass is reduced with the rest: it comes last."""
        trace, found = self.course.trace, []
        positions = [[NEVER] * len(self.registry.chunks) for _ in range(num_backwards)]
        for backward, position, chunk in self._found:
            positions[backward][chunk] = position
        agreed = self.ranks.most(positions)
        for backward, end in self._ends.items():
            last_uses = {span: position for position, use in enumerate(trace[:end]) for span in use.spans}
            for chunk, position in reversed([*enumerate(agreed[backward])]):
                if position < NEVER:
                    position = max(position, last_uses.get(self.registry.chunks[chunk].span.index, 0))
                    found.append((backward, position if position + 1 < end else len(trace), chunk))
        return sorted(found, key=lambda entry: entry[1])
