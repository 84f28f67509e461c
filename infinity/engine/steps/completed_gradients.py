"""The positions in a step at which each chunk's gradient was complete. The next plan places reductions and updates there.

Knows the trace of a step, and the ranks. Must not know how gradients arrive, or how they are used.
"""

from __future__ import annotations

from infinity.plan.schedule import NEVER, Moment
from infinity.system.ranks import Ranks
from infinity.tiers.chunk_state import ChunkState, Registry
from infinity.tiers.route_position import Course
from infinity.tiers.updates import Updater

Positions = list[tuple[int, int]]  # (position in the trace, chunk)


class CompletedGradients:
    """Completed gradients of the current step."""

    def __init__(self, course: Course, updater: Updater, registry: Registry, ranks: Ranks):
        self.course = course
        self.updater = updater
        self.registry = registry
        self.ranks = ranks
        self.reset()

    def reset(self) -> None:
        self._found: list[tuple[int, int, int]] = []  # (backward pass, position in the trace, chunk)
        self._ends: dict[int, int] = {}  # position in the trace where a backward pass ended

    def note(self, backward: int, chunk: ChunkState) -> None:
        """Note that all expected gradients of a chunk have arrived, in backward pass number `backward`."""
        self._found.append((backward, max(len(self.course.trace) - 1, 0), chunk.index))

    def end_pass(self, backward: int) -> None:
        self._ends[backward] = len(self.course.trace)

    def for_plan(self, num_backwards: int) -> tuple[Positions, Positions]:
        """Returns two lists of (position, chunk), in order of position.

        The first list has the gradients that were complete on every rank. The second list has those whose update begins at once, without records
        on the device. num_backwards: number of passes of a step.
        """
        found, chunks = self._on_all(num_backwards) if self.ranks.are_several else self._found, self.registry.chunks
        last = [(p, c) for b, p, c in found if b == num_backwards - 1 and not chunks[c].on_device]
        return [(p, c) for _, p, c in found], [(p, c) for p, c in last if self.updater.moment(chunks[c]) is Moment.GRADIENT]

    def _on_all(self, num_backwards: int) -> list[tuple[int, int, int]]:
        """On several ranks, a gradient counts as complete only after the last use of the span in the pass.

        The reason: the parameters of an op that get gradients may differ between ranks and steps. A gradient that is complete only after the
        last op of the pass is reduced at the end, with the rest.
        """
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
