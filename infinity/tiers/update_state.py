"""The states of a chunk's update, and which state may follow which.

Knows the stages of an update. Must not know when an update is due, or the arithmetic of an update.
"""

# [Note: life of an update]
# updates.py alone changes the stage, in the training thread or in a thread that the training thread waits for. Lanes read the stage.
#
#     backward:  IDLE --a backward pass begins--> EXPECTED --gradients complete--> READY --weights not held--> EARLY --step()--> IDLE
#     deferred:  IDLE --step(), if the record is partly on NVMe--> ANNOUNCED --begun by a reader of the record--> IDLE
#     split:     READY --updates fall behind--> PUT_OFF --step()--> ANNOUNCED
#
# EARLY: the update has begun, and the weights are of the next step. step() begins other updates at once, such as those that wait for no
# drive. An abandoned update is IDLE. The job of a begun update knows whether the update is over.

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
    (UpdateStage.EXPECTED, UpdateStage.IDLE),  # no gradient came, or step() began the update
    (UpdateStage.IDLE, UpdateStage.READY),  # other ranks have brought gradients
    (UpdateStage.EXPECTED, UpdateStage.READY),
    (UpdateStage.READY, UpdateStage.EARLY),
    (UpdateStage.READY, UpdateStage.IDLE),  # the weights were needed until step(), or the step was abandoned
    (UpdateStage.EARLY, UpdateStage.IDLE),
    (UpdateStage.READY, UpdateStage.PUT_OFF),
    (UpdateStage.PUT_OFF, UpdateStage.ANNOUNCED),
    (UpdateStage.PUT_OFF, UpdateStage.IDLE),  # the step was given up
    (UpdateStage.IDLE, UpdateStage.ANNOUNCED),
    (UpdateStage.ANNOUNCED, UpdateStage.IDLE),
}


class UpdateState:
    """The update of a chunk that is due, or the last one, see [Note: life of an update]. Only tiers/updates.py writes the fields."""

    __slots__ = ("hyper", "job", "moments_job", "stage")

    def __init__(self):
        self.stage = UpdateStage.IDLE
        self.hyper = None  # Hyper of the announced update
        self.job = None  # the last update that has begun, unless the record is on the device: afterwards, the weights are new
        self.moments_job = None  # the rest of that update, if moments follow weights: `job` pushes it before its own end

    def become(self, stage: UpdateStage) -> None:
        assert (self.stage, stage) in _UPDATE_MOVES, f"an update is {stage.value} after it was {self.stage.value}"
        self.stage = stage

    @property
    def is_expected(self) -> bool:
        """Whether the update comes later in this backward pass."""
        return self.stage in (UpdateStage.EXPECTED, UpdateStage.READY)

    @property
    def is_early(self) -> bool:
        """Whether the backward pass has begun the update before step(), or has put the update off. Both count, because the engine must refuse
        the same calls at any speed of the drives."""
        return self.stage in (UpdateStage.EARLY, UpdateStage.PUT_OFF)

    @property
    def is_put_off(self) -> bool:
        """Whether the update was due in this backward pass, and step() will announce it."""
        return self.stage is UpdateStage.PUT_OFF

    @property
    def is_announced(self) -> bool:
        return self.stage is UpdateStage.ANNOUNCED

    @property
    def is_running(self) -> bool:
        if self.job is not None and not self.job.done:
            return True
        return self.moments_job is not None and not self.moments_job.done
