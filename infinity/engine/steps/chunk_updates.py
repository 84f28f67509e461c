"""The start of each chunk's update: during the backward pass, in step(), or later.

Knows complete gradients, and the parts that move weights and records. Must not know how bytes move, plans, hooks, or when a step begins and
ends.
"""

# [Note: when a chunk is updated]
# Deferred: step() begins a chunk's update if its record and its gradient are in memory. For all other chunks with a gradient, step()
# announces the update ([Note: life of an update] in update_state.py) and remembers the hyper-parameters. The update begins when the next
# forward pass fetches the chunk, or earlier if the next gradient or a read needs the record.
# Backward: the last backward pass before step() begins the update when all gradients of the chunk are there. No op and no saved view may need
# the weights then. step() begins the remaining updates. Both ways compute the same bits, see updates.py.
#
# [Note: the split update]
# A step moves 26 bytes a parameter from and to drives: 24 in the backward pass, 2 in the forward pass. If drives are slower than compute, the
# backward pass alone is too short for them. Updates fall behind, the first layers are updated last, and the next forward pass waits for these
# layers. So the engine puts some of the updates off: step() announces them, as if updates were deferred, and the next forward pass begins
# them. No plan chooses these updates, because a plan would have to know the drives' speed. Instead, the engine looks at the slots for states
# when the plan reads the states of a chunk ahead. If updates still pin two thirds of the slots, drives are behind, and the update of this
# chunk is put off. So the updates that are put off lie between the others. Their number follows from the drives' speed, and is zero if
# compute hides all transfers. The gradient of such a chunk waits in its own place, or in a slot that would be free otherwise ([Note: how
# budgets are spent] in placement.py). Without a place the update begins at once. Ranks may differ in their choice, because the device copy is
# stale in both cases. (Simulation: 3.4 B parameters on one drive, with equal times for drives and compute. A step takes 1.02 to 1.06 times
# this time, and 1.13 to 1.21 times if no update is put off. The forward pass is 1/4 to 1/3 of compute.)
#
# [Note: states read ahead of step()]
# If updates follow step(), the forward pass alone is too short for the states of all records on NVMe. So the backward pass reads the states
# of the first updates ahead, as far as slots are free. At most two reads run at a time, because the weights for this pass come from the same
# drives. If the configuration puts all records on NVMe, the planner uses the rest of host memory for slots. The drives then write updated
# records during the whole step. (64 layers of 2.4 M parameters, 1.28 s of compute and 1.03 s of drive: a step takes 1.41 s. If the forward
# pass reads the states, it takes 1.89 s.)

from __future__ import annotations

import torch

from infinity.engine.steps.gradient_norm import GradientNorm
from infinity.engine.steps.joined_optimizers import JoinedOptimizers
from infinity.engine.steps.refusals import too_late_to_clip
from infinity.errors import UsageError
from infinity.plan.host_memory import MIN_GRADIENT_SLOTS
from infinity.plan.record import GRADIENTS, STATES
from infinity.plan.schedule import Moment
from infinity.plan.slots import StatesAhead
from infinity.tiers.arithmetic import Hyper
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import Presence
from infinity.tiers.updates import Updater
from infinity.tiers.weights import Weights


class ChunkUpdates:
    """Updates of the current step.

    early_hyper: hyper-parameters of the updates that the current backward pass begins; None without such updates.
    ready: chunks whose update is READY.
    behind: chunks whose next update in a backward pass is put off. step() marks the first ones for the next step, so no reset clears the set.
    """

    def __init__(self, weights: Weights, gradients: Gradients, updater: Updater, norm: GradientNorm):
        self.registry, self.records = weights.registry, weights.records
        self.weights = weights
        self.gradients = gradients
        self.updater = updater
        self.norm = norm
        self._all_on_device = all(chunk.on_device for chunk in self.registry.chunks if chunk.trainable)  # these homes never change
        self.behind: set[ChunkState] = set()
        self.reset()

    def reset(self) -> None:
        """Prepare for the next step, after step() or after gradients were dropped."""
        self.early_hyper: Hyper | None = None
        self.norm.expect(False)
        self.ready: list[ChunkState] = []
        self._states_ahead: StatesAhead | None = None  # of step(); None before the first gradient
        self.updater.end_step()

    def expect(self, early_hyper: Hyper | None) -> None:
        """The current backward pass begins updates with these hyper-parameters, or none before step()."""
        self.early_hyper = early_hyper

    @property
    def are_early(self) -> bool:
        """Whether the backward pass has begun an update whose step() has not come."""
        return any(chunk.update.is_early for chunk in self.registry.chunks)

    # During a backward pass.

    def gradient_complete(self, chunk: ChunkState) -> None:
        """Note that the chunk's gradient is complete, on all ranks."""
        if self.early_hyper is not None and self.updater.moment(chunk) is Moment.GRADIENT:
            self.updater.ready(chunk)
            self.ready.append(chunk)
            self.begin_ready()
        else:
            self.norm.add_complete(chunk)
            self._read_ahead_of_step()

    def begin_ready(self) -> None:
        """Begin the updates of chunks whose gradient is complete and whose weights no op needs any more."""
        if not self.ready:
            return
        self.weights.drain_dropped()
        for chunk in list(self.ready):
            if not chunk.span.holds and not chunk.span.handles:
                self.ready.remove(chunk)
                is_behind = chunk in self.behind
                self.behind.discard(chunk)
                if is_behind and self._may_wait(chunk):
                    self.make_stale(chunk)
                    self.updater.put_off(chunk)
                else:
                    self.begin(chunk, self.early_hyper, early=True)

    def _may_wait(self, chunk: ChunkState) -> bool:
        """Whether the chunk's gradient has a place until the next forward pass."""
        if chunk.homes[GRADIENTS].is_host or chunk.gradient_on_device:
            return True
        return not chunk.gradient_passes and self.records.caches[GRADIENTS].slots.num_free > MIN_GRADIENT_SLOTS

    def read_states(self, chunk: ChunkState) -> None:
        """The plan reads the optimizer states ahead, because the chunk's update comes soon."""
        if chunk.states_home.is_storage and chunk.trainable and not (chunk.update.is_early or chunk.update.is_announced):
            if self.records.is_crowded(STATES):
                self.behind.add(chunk)
            else:
                self.behind.discard(chunk)
                self.records.request(chunk, STATES, pin=False)

    def _read_ahead_of_step(self) -> None:
        """A gradient is complete that waits for step(): read states of the first updates that will follow."""
        if not self.updater.deferred or self.weights.course.route is None:  # in the first step, the order of the updates is unknown
            return
        if self._states_ahead is None:
            chunks = [chunk for chunk in self.registry.chunks if chunk.trainable and chunk.states_home.is_storage]
            self._states_ahead = StatesAhead(chunks, self.records.caches[STATES], self.records.request)
        self._states_ahead.advance()

    # In step().

    def begin_or_announce(self, ready: list[ChunkState], hyper: Hyper) -> None:
        """Begin the updates of these chunks, and announce those that wait for a fetch."""
        for chunk in ready:
            if self.updater.moment(chunk) is Moment.FETCH:
                self.announce(chunk, hyper)
            else:
                self.gradients.wait_for(chunk)
                self.begin(chunk, hyper)
        self._announce_put_off(hyper)

    def _announce_put_off(self, hyper: Hyper) -> None:
        """Announce the updates that the backward pass has put off.

        Old weights may have come to the device meanwhile, if the pass has left its plan. If one rank put an update off, old weights may have
        come to all ranks. So all ranks also invalidate the spans that were updated early.
        """
        for chunk in self.registry.chunks:
            if chunk.update.is_early and chunk.span.presence is not Presence.AWAY:
                self.make_stale(chunk)
            if chunk.update.is_put_off:
                self.updater.announce(chunk, hyper)

    def announce(self, chunk: ChunkState, hyper: Hyper) -> None:
        """The update runs at the next use of the chunk. Until then the device copy is stale."""
        self.make_stale(chunk)  # before the announcement: this may adopt a write of the forward pass, which would wait for an announced update
        self.updater.announce(chunk, hyper)

    def begin(self, chunk: ChunkState, hyper: Hyper, *, early: bool = False) -> None:
        """Begin an update that was not announced. early: before step()."""
        self.make_stale(chunk)
        self.updater.begin(chunk, hyper, early=early)

    def make_stale(self, chunk: ChunkState) -> None:
        """The chunk's weights change, or have changed: invalidate the device copy."""
        self.weights.invalidate(chunk.span)
        for param in chunk.whole_pieces:
            note_change(self.registry.params[param])

    # Gradients that no update has used.

    def pending(self) -> list[ChunkState]:
        """Chunks with a gradient that no update has taken."""
        found = [chunk for chunk in self.registry.chunks if chunk.gradient.job is not None]
        return [chunk for chunk in found if not (chunk.update.is_early or chunk.update.is_announced)]

    def drop_pending(self) -> None:
        """Drop all gradients that no update has taken."""
        dropped = [
            chunk
            for chunk in self.registry.chunks
            if chunk.update.is_put_off or not (chunk.update.is_early or chunk.update.is_announced)
            if chunk.gradient.has_arrived
            if not chunk.update.is_running
        ]
        if dropped:
            self.gradients.drain()
            self.updater.drain()  # sums of squares
        for chunk in dropped:
            self.gradients.drop(chunk)

    def leave_out(self, ready: list[ChunkState], groups: set[int]) -> list[ChunkState]:
        """Drop the gradients of some parameter groups, whose optimizers skip the step. Returns the chunks with other gradients."""
        if not groups:
            return ready
        self.updater.drain()  # sums of squares
        found = []
        for chunk in ready:
            self.gradients.wait_for(chunk)
            params = {param for param in chunk.gradient.received if self.registry.params[param].group in groups}
            if params == chunk.gradient.received:
                self.gradients.drop(chunk)
            else:
                chunk.gradient.leave_out(params)
                found.append(chunk)
        return found

    # Refusals.

    def refuse_late(self, optimizers: JoinedOptimizers) -> None:
        """Raise UsageError if updates may have begun: the norm of all gradients must be known before the first update."""
        if self.early_hyper is not None and not self._all_on_device:
            raise UsageError(too_late_to_clip(optimizers.kind, optimizers.made_at))

    def refuse_changed(self, hyper: Hyper) -> None:
        """Raise UsageError if the backward pass has begun updates with other hyper-parameters than these."""
        if self.early_hyper is not None and self.early_hyper.groups != hyper.groups:
            raise UsageError(
                "hyper-parameters changed between the backward pass, which has begun to update, and step(). Change them after "
                "step(), or use update='deferred'."
            )


def note_change(state: ParameterState) -> None:
    """Invalidate the views of the parameter that autograd has saved. The engine already has the new value."""
    torch.autograd.graph.increment_version(state.counter)
    state.version = state.counter._version
