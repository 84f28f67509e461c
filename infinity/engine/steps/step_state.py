"""The phase of a training step, the legal transitions between phases, and the damage that an error has left.

Knows enums and counters. Must not know gradients, modules or optimizers.
"""

# [Note: phases of a step]
#
#     EMPTY --backward pass begins--> PASSING ---gradient for the step---> EXPECTING --gradient is there--> RECEIVING --pass is over--> BETWEEN
#       ^                        \--> EXPECTING, if gradients are expected                                                                |
#       |                        \--> LAYERWISE, in infinity.accumulate --all micro-batches are over------------------------------------> |
#       '---------------------------------------------- step() or zero_grad() ------------------------------------------------------------'
#
# A further backward pass of the same step begins in BETWEEN. A pass that brings no gradient ends in BETWEEN, too.
# A pass that raises, or that the engine refuses, goes back to the phase in which the pass began: EMPTY or BETWEEN.
#
# [Note: damage]
# An error in a backward pass or in infinity.load leaves damage. The damage stays while later passes run:
#
#     NONE --backward pass raises--> GRADIENTS --zero_grad()--> NONE
#     NONE --backward pass raises, and has begun to update--> WEIGHTS --infinity.load--> NONE
#     any --infinity.load begins to replace records--> RECORDS --infinity.load succeeds--> NONE

from __future__ import annotations

import enum

from infinity.tiers.route_position import Course


class StepPhase(enum.Enum):
    """See [Note: phases of a step]."""

    EMPTY = "empty"  # no backward pass since the last step
    PASSING = "passing"  # a backward pass runs; no gradient for the step is expected
    EXPECTING = "expecting"  # a backward pass of the step runs; no gradient has come
    RECEIVING = "receiving"  # a backward pass of the step runs; a gradient has come, at the end of the pass on any rank
    LAYERWISE = "layerwise"  # infinity.accumulate runs; all its backward passes count as one
    BETWEEN = "between passes"  # a backward pass is over, and no other one runs
    CLOSED = "closed"


EMPTY, PASSING, EXPECTING, RECEIVING, LAYERWISE, BETWEEN, CLOSED = StepPhase

_STEP_MOVES = {
    *((before, after) for before in (EMPTY, BETWEEN) for after in (PASSING, EXPECTING, RECEIVING, LAYERWISE)),  # a backward pass begins
    (PASSING, EXPECTING),
    (PASSING, RECEIVING),  # the pass is over, and another rank has brought a gradient
    (EXPECTING, RECEIVING),
    *((before, after) for before in (PASSING, EXPECTING, RECEIVING, LAYERWISE) for after in (BETWEEN, EMPTY)),
    (BETWEEN, EMPTY),
    *((before, CLOSED) for before in StepPhase if before is not CLOSED),
}

_IN_BACKWARD = PASSING, EXPECTING, RECEIVING, LAYERWISE
_WITH_GRADIENTS = RECEIVING, LAYERWISE


class Damage(enum.Enum):
    """See [Note: damage]."""

    NONE = "none"
    GRADIENTS = "gradients"  # a backward pass has raised: some gradients are missing
    WEIGHTS = "weights"  # a backward pass that had begun to update has raised: weights are of two steps
    RECORDS = "records"  # infinity.load has replaced some of the records


_DAMAGE_MOVES = {
    (Damage.NONE, Damage.GRADIENTS),
    (Damage.NONE, Damage.WEIGHTS),
    (Damage.GRADIENTS, Damage.WEIGHTS),
    *((before, Damage.RECORDS) for before in Damage if before is not Damage.RECORDS),
    (Damage.GRADIENTS, Damage.NONE),
    (Damage.RECORDS, Damage.NONE),
}


class StepKind(enum.Enum):
    """How the program brings the gradients of a step."""

    BACKWARD = "backward()"
    ACCUMULATE = "infinity.accumulate"


class StepState:
    """Phase and damage of an engine's current step. The class also counts backward passes and steps.

    num_backwards: backward passes of this step that have brought gradients. kind: of this step, or of the last one before the first pass.
    """

    def __init__(self, course: Course):
        self.phase = EMPTY
        self.damage = Damage.NONE
        self.kind: StepKind | None = None
        self.num_backwards = 0
        self.num_steps = 0
        self.num_skipped = 0  # steps with gradients that were not finite
        self._course = course
        self._began_in = EMPTY  # phase before the backward pass

    def become(self, phase: StepPhase) -> None:
        assert (self.phase, phase) in _STEP_MOVES, f"a step is {phase.value} after it was {self.phase.value}"
        if self.phase not in _IN_BACKWARD:
            self._began_in = self.phase
        self.phase = phase
        self._course.set_in_backward(phase in _IN_BACKWARD)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass of the engine runs."""
        return self.phase in _IN_BACKWARD

    @property
    def has_gradients(self) -> bool:
        """Whether the backward pass that runs has brought a gradient."""
        return self.phase in _WITH_GRADIENTS

    def receive(self) -> None:
        """Note that a gradient has arrived."""
        if self.phase not in _WITH_GRADIENTS:
            self.become(RECEIVING)

    def set_kind(self, kind: StepKind) -> None:
        self.kind = kind

    def end_pass(self) -> None:
        """End the backward pass."""
        self.become(BETWEEN)

    def count_backward(self) -> int:
        """Count the last backward pass, which has brought gradients. Returns the number of the pass in the step, from zero."""
        self.num_backwards += 1
        return self.num_backwards - 1

    def cancel_pass(self) -> None:
        """End a backward pass that has changed nothing of the step."""
        self.become(self._began_in)

    def fail_pass(self, *, has_updated: bool) -> None:
        """End a backward pass that has raised. has_updated: some weights are of the next step already."""
        if self.in_backward:
            self.cancel_pass()
        if self.damage is Damage.NONE:
            self.become_damaged(Damage.GRADIENTS)
        if has_updated and self.damage is Damage.GRADIENTS:
            self.become_damaged(Damage.WEIGHTS)

    def end_step(self) -> None:
        self.num_steps += 1
        self._empty()

    def count_skipped(self) -> None:
        self.num_skipped += 1

    def _empty(self) -> None:
        self.num_backwards = 0
        if self.phase is BETWEEN:
            self.become(EMPTY)

    def become_damaged(self, damage: Damage) -> None:
        assert (self.damage, damage) in _DAMAGE_MOVES, f"damage: {damage.value} after {self.damage.value}"
        self.damage = damage

    def forget_gradients(self) -> None:
        """Note that zero_grad() has dropped all gradients, including those of a pass that raised."""
        self._empty()
        if self.damage is Damage.GRADIENTS:
            self.become_damaged(Damage.NONE)

    def begin_load(self) -> None:
        """Note that infinity.load begins to replace records."""
        if self.damage is not Damage.RECORDS:
            self.become_damaged(Damage.RECORDS)

    def end_load(self) -> None:
        """Note that infinity.load has replaced all records."""
        self.become_damaged(Damage.NONE)

    @property
    def is_closed(self) -> bool:
        return self.phase is CLOSED

    def close(self) -> None:
        if not self.is_closed:
            self.become(CLOSED)
