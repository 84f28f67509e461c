"""What is due for a chunk now: that its gradient is reduced, that its squares are summed, that its update begins or is announced.

Knows where a step is, and who moves weights and gradients and updates records. Must not know how they do, plans, hooks, or when a step
begins and ends: passes and steps say that, and how far a backward pass is.
"""

# [Note: when a chunk is updated]
# Deferred: where all of a chunk's record and its gradient are in memory, step() begins its update. Of the other chunks that have a gradient
# it announces the update ([Note: life of an update] in update_state.py) and remembers the hyper-parameters; this begins when the next forward
# fetches the chunk, or when something else needs it: its next gradient, a read.
# Backward: in the last backward pass before step(), a chunk is updated as soon as all its gradients are there and no op and no saved view
# needs its weights any more; step() updates the rest. Both compute the same, see updates.py.
#
# [Note: the split update]
# Where drives are slower than compute, backward alone asks too much of them, 24 of a parameter's 26 bytes, and forward 2: updates fall
# behind, those of the first layers come last, and the next forward waits for just these. So of the updates of a backward pass some are put
# off: step() announces them, as all are where updates are deferred, and the next forward begins them as it comes to them. Which, no plan
# says, for it would have to know how fast drives are: where two thirds of the slots for states are still pinned by updates when the plan
# wants those of a chunk read ahead, drives are behind, and its update is one of them. So they lie between the others, as many as drives are
# too slow for, none where compute hides all. Its gradient must have a place to wait in, of its own or in slots that would else be free
# ([Note: how budgets are spent] in placement.py): else its update begins all the same. Ranks may differ in it, since the device's copy is
# stale either way. (Simulated, 3.4 B parameters on one drive, where drives and compute need the same time: 1.02 to 1.06 times this time, and
# 1.13 to 1.21 if none is put off; forward is 1/4 to 1/3 of compute.)

from __future__ import annotations

import torch

from infinity.engine.steps.refusals import too_late_to_clip
from infinity.errors import UsageError
from infinity.optim.adam import NormAccumulator
from infinity.plan.host_memory import MIN_GRADIENT_SLOTS
from infinity.plan.record import GRADIENTS, STATES
from infinity.plan.schedule import Moment
from infinity.system.lanes import Job
from infinity.system.waits import waits
from infinity.system.failure_watch import REMEDY
from infinity.tiers.arithmetic import Hyper, add_norm
from infinity.tiers.gradients import Gradients
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import Presence
from infinity.tiers.updates import Updater
from infinity.tiers.weights import Weights


class Due:
    """Gradients and updates of the step under way.

    early_hyper: of the updates that the backward pass under way begins, None if it begins none. sums_squares: it adds up those of complete
    gradients, because their norm is asked for. all_on_device: the device is the home of all records, so no update begins before step().
    """

    def __init__(self, weights: Weights, gradients: Gradients, updater: Updater, *, all_on_device: bool):
        self.registry, self.records, self.course = weights.registry, weights.records, weights.course
        self.ranks, self.events = weights.ranks, weights.events
        self.weights = weights
        self.gradients = gradients
        self.updater = updater
        self._all_on_device = all_on_device
        # Whose next update in a backward pass is to be put off. Not for `reset`: the plan marks the first ones as step() ends, before
        # zero_grad() comes.
        self.behind: set[ChunkState] = set()
        self.reset()

    def reset(self) -> None:
        """Nothing has happened since the last step."""
        self.early_hyper: Hyper | None = None
        self.sums_squares = False
        self.waiting: list[ChunkState] = []  # whose update is READY
        self.updater.end_step()

    def expect_no_update(self) -> None:
        """No update begins before step()."""
        self.early_hyper = None

    # Gradients.

    def reduce(self, chunk: ChunkState) -> None:
        """The plan says that it is the chunk's turn; all ranks are at this point.

        In a step that has left the plan the chunk's gradient may not be complete here.
        """
        if self.course.backward_task is None or chunk.update.is_early or self.course.off_plan:
            return
        self.gradients.reduce(chunk)
        self.gradient_ready(chunk)

    def reduce_unplanned(self) -> None:
        """Where no plan says when, all ranks meet at each acquire: reduce what is complete on all of them.

        A gradient that some rank never gets is thus left to the end of the pass, in one order everywhere; so is one of a span that
        autograd still needs on some rank, for the op may bring more of it.
        """
        if self.ranks.world == 1 or self.course.backward_task is None:
            return
        chunks = self.registry.chunks
        complete = [not chunk.gradient.missing and not chunk.span.handles for chunk in chunks]
        empty = [chunk.gradient.flat is None for chunk in chunks]
        for chunk, is_complete, is_empty in zip(chunks, *self._agree(complete, empty, is_over=False)):
            if is_complete and not is_empty:
                self.gradients.reduce(chunk)
                self.gradient_ready(chunk)

    def reduce_all(self, came: bool) -> tuple[bool, list[ChunkState]]:
        """The pass, or a part of it, is over, on several ranks: reduce whatever gradients any of them has gathered since the last
        reduction. Returns whether any rank came with a gradient, and the chunks."""
        chunks = self.registry.chunks
        empty, none_came = self._agree([chunk.gradient.flat is None for chunk in chunks], [not came] * len(chunks), is_over=True)
        found = [chunk for chunk, is_empty in zip(chunks, empty) if not is_empty]
        for chunk in found:
            self.gradients.reduce(chunk)
        return not none_came[0], found

    def _agree(self, *told: list[bool], is_over: bool) -> list[list[int]]:
        """What all ranks tell, of two lists. Raises UsageError, on every rank, unless all are at one place of the pass: with as many
        reductions behind them, and all at its end or none. Else one would be given the sum of another chunk's gradient."""
        number = self.gradients.num_reductions
        place = number % (1 << 24) * 2 + is_over
        agreed = self.ranks.least([[told_ + sign * 2 * place for told_ in each] for each, sign in zip(told, (1, -1), strict=True)])
        first, last = ([sign * (number >> 1) for number in each] for each, sign in zip(agreed, (1, -1)))  # of the places where ranks are
        if first != last:
            where = "it is over" if is_over else "an op of it begins"
            error = UsageError(
                f"{self.ranks.name}: the ranks have parted in this backward pass; here {where} after {number} reductions of gradients, "
                f"elsewhere not. {REMEDY}"
            )
            self.ranks.report(error)  # a lane may be in a reduction that the others never join
            raise error
        return [[number & 1 for number in each] for each in agreed]

    def gradient_ready(self, chunk: ChunkState) -> None:
        """It is complete, on all ranks."""
        if self.early_hyper is not None and self.updater.moment(chunk) is Moment.GRADIENT:
            self.updater.ready(chunk)
            self.waiting.append(chunk)
            self.update_waiting()
        else:
            self.sum_squares(chunk)

    # Updates.

    def update_waiting(self) -> None:
        """Update chunks whose gradients are complete and whose weights nobody needs any more."""
        if not self.waiting:
            return
        self.weights.drain_dropped()
        for chunk in list(self.waiting):
            if not chunk.span.holds and not chunk.span.handles:
                self.waiting.remove(chunk)
                is_behind = chunk in self.behind
                self.behind.discard(chunk)
                if is_behind and self._may_wait(chunk):
                    self.make_stale(chunk)
                    self.updater.put_off(chunk)
                else:
                    self.begin_update(chunk, self.early_hyper, early=True)

    def _may_wait(self, chunk: ChunkState) -> bool:
        """Whether its gradient has a place until the next forward pass."""
        if chunk.extents[GRADIENTS] is None or chunk.gradient_on_device:
            return True
        return self.records.caches[GRADIENTS].slots.num_free > MIN_GRADIENT_SLOTS

    def announce_put_off(self, hyper: Hyper) -> None:
        """step() has come: what the backward pass has put off follows it. Old weights may have come to the device meanwhile, where the pass
        has left its plan; of a rank that has put it off to all of them, so that all send away what was updated early, too."""
        for chunk in self.registry.chunks:
            if chunk.update.is_early and chunk.span.presence is not Presence.AWAY:
                self.make_stale(chunk)
            if chunk.update.is_put_off:
                self.updater.announce(chunk, hyper)

    def announce(self, chunk: ChunkState, hyper: Hyper) -> None:
        """The chunk is updated when it is next needed; until then its device copy is stale."""
        self.make_stale(chunk)  # first: it may adopt what forward wrote, which waits for an update that is announced
        self.updater.announce(chunk, hyper)

    def begin_update(self, chunk: ChunkState, hyper: Hyper, *, early: bool = False) -> None:
        """Update it now; none is announced. early: before step()."""
        self.make_stale(chunk)
        self.updater.begin(chunk, hyper, early=early)

    def make_stale(self, chunk: ChunkState) -> None:
        """Its weights change, or have changed: what the device has of them is old."""
        self.weights.invalidate(chunk.span)
        for param in chunk.whole_pieces:
            note_change(self.registry.params[param])

    def read_states(self, chunk: ChunkState) -> None:
        """The plan says that its update comes soon."""
        if chunk.states_home.is_storage and chunk.trainable and not (chunk.update.is_early or chunk.update.is_announced):
            if self.records.is_crowded(STATES):
                self.behind.add(chunk)
            else:
                self.behind.discard(chunk)
                self.records.request(chunk, STATES, pin=False)

    # What has come of gradients.

    def pending(self) -> list[ChunkState]:
        """Chunks whose gradient no update has taken."""
        found = [chunk for chunk in self.registry.chunks if chunk.gradient.job is not None]
        return [chunk for chunk in found if not (chunk.update.is_early or chunk.update.is_announced)]

    def drop_pending(self) -> None:
        """The program wants none of them."""
        dropped = [
            chunk
            for chunk in self.registry.chunks
            if chunk.update.is_put_off or not (chunk.update.is_early or chunk.update.is_announced)
            if chunk.gradient.job or chunk.gradient.flat is not None or chunk.gradient.received  # the last alone after an interrupt on the way
            if not chunk.update.is_running
        ]
        if dropped:
            self.gradients.drain()
            self.updater.drain()  # sums of their squares
        for chunk in dropped:
            self.gradients.drop(chunk)

    def refuse_late(self, optimizer) -> None:
        """Raise UsageError if updates may have begun: a norm of all gradients must be known before the first update."""
        if self.early_hyper is not None and not self._all_on_device:
            raise UsageError(too_late_to_clip(type(optimizer).__name__, optimizer.made_at))

    def first_nonfinite(self, chunks: list[ChunkState]) -> str:
        """Where the first gradient of these is that is not finite, in words."""
        for chunk in chunks:
            with self.gradients.shard(chunk) as gradient:
                for piece in chunk.pieces:
                    part = gradient[piece.start : piece.start + piece.numel]
                    if piece.param in chunk.gradient.received and not part.isfinite().all():
                        return f"the first is of {self.registry.params[piece.param].name}"
        return "they lie in the shards of other ranks"

    def sum_squares(self, chunk: ChunkState) -> None:
        """Add up the squares of a complete gradient behind the backward pass, if the norm is asked for."""
        if self.sums_squares:
            self._begin_sum(chunk)

    def _begin_sum(self, chunk: ChunkState) -> None:
        job, total = chunk.gradient.job, NormAccumulator()

        def add() -> NormAccumulator:  # may be queued still
            stream = job.wait()
            if stream is not None:  # of a gradient that stays on the device
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            with self.gradients.shard(chunk) as gradient:
                add_norm(chunk, gradient, total)
            return total

        # On the device it is one pass at its speed, in the order of this thread's stream; the lane would wait for all that lies before.
        chunk.gradient.sum_by(Job.over(add()) if chunk.gradient_on_device and job.done else self.updater.sum_squares(lambda: add().settled()))

    def norm(self, chunks: list[ChunkState]) -> float:
        """The global norm of the summed gradients, the same bits for every placement and chunk size."""
        total = NormAccumulator()
        for chunk in chunks:
            if chunk.gradient.squares is None:
                self._begin_sum(chunk)
            with waits("the norm of all gradients"):
                total.merge(self.events.wait("gc", chunk.gradient.squares, chunk.index))
        self.ranks.sum_(total.limbs)
        return total.value()


def note_change(state: ParameterState) -> None:
    """What autograd has saved of the parameter is old; the engine knows its value."""
    torch.autograd.graph.increment_version(state.counter)
    state.version = state.counter._version
