"""The reduction of each chunk's gradient on several ranks, at the same point of the backward pass on all ranks.

Knows the ranks, and the progress of a backward pass. Must not know how gradients move, plans, or when a step begins and ends.
"""

from __future__ import annotations

import torch

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
        waiting, _ = self._waiting_on_any_rank(is_over=False)
        complete = [not chunk.gradient.missing and not chunk.span.handles for chunk in waiting]
        for chunk, is_complete in zip(waiting, self.ranks.least(complete) if complete else ()):
            if is_complete:
                self._reduce(chunk)
                self.updates.gradient_complete(chunk)

    def reduce_all(self, has_gradients: bool) -> tuple[bool, list[ChunkState]]:
        """The pass, or one micro-batch, is over: reduce all gradients that any rank has gathered since the last reduction.

        has_gradients: this rank has brought a gradient. Returns whether any rank has, and the reduced chunks. For several ranks.
        """
        found, any_came = self._waiting_on_any_rank(has_gradients, is_over=True)
        for chunk in found:
            self._reduce(chunk)
        return any_came, found

    def _reduce(self, chunk: ChunkState) -> None:
        self.updates.updater.finish(chunk)  # the new gradient may be of other ranks only: then no arrival has finished the last update
        self.gradients.reduce(chunk)

    def _waiting_on_any_rank(self, has_gradients: bool = False, *, is_over: bool) -> tuple[list[ChunkState], bool]:
        """Returns the chunks with a gradient on any rank that is not reduced, in order, and whether any rank has gradients.

        Raises UsageError on every rank unless all ranks are at one place of the pass. At one place, they have begun equally many reductions,
        and all or none are at the end. From another place, a rank would get the sum of another chunk's gradient.
        """
        number, waiting = self.gradients.reduce_scatter.num_begun, self.gradients.reduce_scatter.waiting()
        place = number * 2 + is_over
        last, first, count, any_has = self.ranks.most([place, -place, len(waiting), has_gradients])
        if last != -first:
            where = "at the end" if is_over else "before an op"
            error = UsageError(
                f"{self.ranks.name}: the ranks have parted in this backward pass. This rank is {where} after {number} reductions of gradients, "
                f"another rank is not. {REMEDY}"
            )
            self.ranks.report(error)  # a lane may be in a reduction that the other ranks never join
            raise error
        return [self.chunks[index] for index in self._indices_of_all_ranks(waiting, count)], bool(any_has)

    def _indices_of_all_ranks(self, mine: list[int], count: int) -> list[int]:
        """The numbers that any rank has, ascending. count: the most numbers of a rank."""
        if not count:
            return []
        padded = torch.tensor(mine + [-1] * (count - len(mine)), device="cpu")
        return sorted(set(self.ranks.all_gather_slices(padded).tolist()) - {-1})
