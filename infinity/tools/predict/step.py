"""The work of a training step, as the simulator takes it.

Pure values. Must not know links, lanes or a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.schedule import Use


@dataclass(frozen=True)
class Step:
    """The work of a step on a rank. uses: the trace. seconds: of compute, by position. gradients: parameters whose gradients are complete
    after a position. backward: the first position after forward. deferred: updates follow step(). moments_follow: of `Updater`."""

    uses: Sequence[Use]
    seconds: Sequence[float]
    gradients: Sequence[Sequence[int]]
    backward: int
    deferred: bool
    keep: bool
    moments_follow: bool = False
