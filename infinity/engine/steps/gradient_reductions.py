"""The reduction of each chunk's gradient on several ranks, at the same point of the backward pass on all ranks.

Knows the ranks, and the progress of a backward pass. Must not know how gradients move, plans, or when a step begins and ends.
"""

from __future__ import annotations

from infinity.engine.steps.chunk_updates import ChunkUpdates
from infinity.errors import UsageError
from infinity.system.failure_watch import REMEDY
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.route_position import Course


class GradientReductions:
    def __init__(self, gradients: Gradients, updates: ChunkUpdates, course: Course):
        self.gradients, self.updates = gradients, updates
        self.chunks, self.ranks = gradients.registry.chunks, gradients.ranks
        self.course = course

    def reduce_planned(self, chunk: ChunkState) -> None:
        """The plan reduces the chunk now; all ranks are at this point.

        If the step has left the plan, the chunk's gradient may not be complete here. The reduction then comes later.
        """
        if not self.course.in_backward or chunk.update.is_early or self.course.off_plan:
            return
        self._reduce(chunk)
        self.updates.gradient_complete(chunk)

    def reduce_unplanned(self) -> None:
        """Without a plan, all ranks meet as each op begins: reduce the chunks that are complete on all ranks.

        A gradient that some rank never gets is left to the end of the pass, where all ranks have one order. The same holds for a chunk whose
        span autograd still needs on some rank, because the op may bring more of the gradient.
        """
        if not self.ranks.are_several or not self.course.in_backward:
            return
        complete = [not chunk.gradient.missing and not chunk.span.handles for chunk in self.chunks]
        for chunk, is_complete, is_empty in zip(self.chunks, *self._agree(complete, self._empty(), is_over=False)):
            if is_complete and not is_empty:
                self._reduce(chunk)
                self.updates.gradient_complete(chunk)

    def reduce_all(self, has_gradients: bool) -> tuple[bool, list[ChunkState]]:
        """The pass, or one micro-batch, is over: reduce all gradients that any rank has gathered since the last reduction.

        has_gradients: this rank has brought a gradient. Returns whether any rank has, and the reduced chunks. For several ranks.
        """
        empty, none_came = self._agree(self._empty(), [not has_gradients] * len(self.chunks), is_over=True)
        found = [chunk for chunk, is_empty in zip(self.chunks, empty) if not is_empty]
        for chunk in found:
            self._reduce(chunk)
        return not none_came[0], found

    def _reduce(self, chunk: ChunkState) -> None:
        self.updates.updater.finish(chunk)  # the new gradient may be of other ranks only: then no arrival has finished the last update
        self.gradients.reduce(chunk)

    def _empty(self) -> list[bool]:
        return [chunk.gradient.unreduced.flat is None for chunk in self.chunks]

    def _agree(self, *told: list[bool], is_over: bool) -> list[list[int]]:
        """Returns the logical AND over all ranks of two lists, element by element.

        Raises UsageError on every rank unless all ranks are at one place of the pass. At one place, they have begun equally many reductions,
        and all or none are at the end. From another place, a rank would get the sum of another chunk's gradient.
        """
        number = self.gradients.reduce_scatter.num_begun
        place = number % (1 << 24) * 2 + is_over
        agreed = self.ranks.least([[told_ + sign * 2 * place for told_ in each] for each, sign in zip(told, (1, -1), strict=True)])
        first, last = ([sign * (number >> 1) for number in each] for each, sign in zip(agreed, (1, -1)))  # the ranks' places
        if first != last:
            where = "at the end" if is_over else "before an op"
            error = UsageError(
                f"{self.ranks.name}: the ranks have parted in this backward pass. This rank is {where} after {number} reductions of gradients, "
                f"another rank is not. {REMEDY}"
            )
            self.ranks.report(error)  # a lane may be in a reduction that the other ranks never join
            raise error
        return [[number & 1 for number in each] for each in agreed]
