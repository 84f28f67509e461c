"""The states of a chunk's update, and which state may follow which.

Knows the stages of an update. Must not know when an update is due, or what it computes.
"""

# [Note: life of an update]
# What is due for a chunk's record. updates.py alone moves it on, in the training thread or in one that this waits for, as while a
# checkpoint is loaded; lanes look at it:
#
#     backward:  IDLE --a backward pass begins--> EXPECTED --its gradients are there--> READY --nobody needs its weights-->
#                EARLY (begun, weights are of the next step) --step()--> IDLE
#     deferred:  IDLE --step(), of what is on NVMe in part--> ANNOUNCED --begun, by what needs it--> IDLE
#     split:     READY --updates are behind--> PUT_OFF --step()--> ANNOUNCED
#
# step() also begins at once what is neither EARLY nor to be announced, such as what waits for no drive; what is given up is IDLE.
# Whether an update that has begun is over, its job knows.

from __future__ import annotations

import enum


class UpdateStage(enum.Enum):
    """Of a chunk's update, see [Note: life of an update]."""

    IDLE = "idle"
    EXPECTED = "expected"
    READY = "ready"
    EARLY = "early"
    PUT_OFF = "put off"
    ANNOUNCED = "announced"


_UPDATE_MOVES = {
    (UpdateStage.IDLE, UpdateStage.EXPECTED),
    (UpdateStage.EXPECTED, UpdateStage.IDLE),  # no gradient came, or step() began it
    (UpdateStage.IDLE, UpdateStage.READY),  # other ranks have brought gradients
    (UpdateStage.EXPECTED, UpdateStage.READY),
    (UpdateStage.READY, UpdateStage.EARLY),
    (UpdateStage.READY, UpdateStage.IDLE),  # its weights were needed until step(), or the step was given up
    (UpdateStage.EARLY, UpdateStage.IDLE),
    (UpdateStage.READY, UpdateStage.PUT_OFF),
    (UpdateStage.PUT_OFF, UpdateStage.ANNOUNCED),
    (UpdateStage.PUT_OFF, UpdateStage.IDLE),  # the step was given up
    (UpdateStage.IDLE, UpdateStage.ANNOUNCED),
    (UpdateStage.ANNOUNCED, UpdateStage.IDLE),
}


class UpdateState:
    """The update of a chunk that is due, or the last one; see [Note: life of an update]. tiers/updates.py alone writes it."""

    __slots__ = ("hyper", "job", "stage")

    def __init__(self):
        self.stage = UpdateStage.IDLE
        self.hyper = None  # of the update that is announced
        self.job = None  # of the last one that has begun, but on the device

    def become(self, stage: UpdateStage) -> None:
        assert (self.stage, stage) in _UPDATE_MOVES, f"an update is {stage.value} after it was {self.stage.value}"
        self.stage = stage

    @property
    def is_expected(self) -> bool:
        """Whether it follows in this backward pass."""
        return self.stage in (UpdateStage.EXPECTED, UpdateStage.READY)

    @property
    def is_early(self) -> bool:
        """Whether the backward pass has begun it, before the step() that it belongs to, or has put it off: what is refused from then on does
        not depend on how fast drives are."""
        return self.stage in (UpdateStage.EARLY, UpdateStage.PUT_OFF)

    @property
    def is_put_off(self) -> bool:
        """Whether it was to begin in this backward pass, and is to be announced by step() instead."""
        return self.stage is UpdateStage.PUT_OFF

    @property
    def is_announced(self) -> bool:
        return self.stage is UpdateStage.ANNOUNCED

    @property
    def is_running(self) -> bool:
        return self.job is not None and not self.job.done
