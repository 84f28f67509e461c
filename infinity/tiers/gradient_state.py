"""The places of a chunk's gradient, the legal moves between these places, and the record of one gradient.

Knows one chunk's gradient. Must not know how gradients are reduced or copied.
"""

# [Note: places of a gradient]
# A gradient shard is in one place at a time. tiers/gradients.py alone moves it, in the training thread or in the gc lane:
#
#     ABSENT --first arrival--> ON_DEVICE  --update begins, or device memory is wanted--> OFFLOADING --gc lane--> OFFLOADED
#     ABSENT --first arrival--> OFFLOADED  --more gradients of this step shall add up on the device--> ON_DEVICE
#
# Every place goes back to ABSENT when the update has used the gradient, or the program drops the gradient.
# ON_DEVICE: the record is on the device, or the gradient stays on the device until its update begins.
# OFFLOADED: the gradient is in host memory, or on NVMe.

from __future__ import annotations

import dataclasses
import enum
import math

import torch


class GradientPlace(enum.Enum):
    """The place of a gradient shard, see [Note: places of a gradient]."""

    ABSENT = "absent"
    ON_DEVICE = "on the device"
    OFFLOADING = "offloading"
    OFFLOADED = "offloaded"


ABSENT, ON_DEVICE, OFFLOADING, OFFLOADED = GradientPlace

_GRADIENT_MOVES = {
    (ABSENT, ON_DEVICE),
    (ABSENT, OFFLOADED),
    (ON_DEVICE, OFFLOADING),
    (OFFLOADING, OFFLOADED),
    (OFFLOADED, ON_DEVICE),
    (ON_DEVICE, ABSENT),
    (OFFLOADING, ABSENT),  # the transfer failed, and the program drops the gradient
    (OFFLOADED, ABSENT),
}


@dataclasses.dataclass(slots=True, eq=False)
class Unreduced:
    """One rank's contribution before the reduce-scatter. Used on several ranks only.

    flat: device buffer of the whole chunk, None before the first arrival. used: indices of the parameters with a gradient in the buffer.
    """

    flat: torch.Tensor | None = None
    used: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class DeviceShard:
    """Device memory of a gradient shard.

    made: CUDA event after the last arrival, recorded only for a gradient that stays; otherwise None. for_step: the memory is freed together
    with the gradient. Otherwise the memory outlives the gradient, and the next step uses it again.
    """

    memory: torch.Tensor
    made: torch.cuda.Event | None = None
    for_step: bool = False

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


class GradientState:
    """The gradient of one chunk. Only tiers/gradients.py writes the fields; other modules call the methods."""

    __slots__ = ("device_shard", "for_step", "job", "missing", "number", "place", "received", "squares", "stays", "unreduced")

    def __init__(self):
        self.place = ABSENT
        self.stays = False  # the next first arrival stays on the device until its update begins, although the record is elsewhere
        self.for_step = False  # stays in this step only
        self.device_shard: DeviceShard | None = None
        self.unreduced = Unreduced()
        self.job = None  # the last transfer into the shard
        self.squares = None  # the job that sums the squares, if the norm is asked for
        self.number = 0  # of the last arrival, counted over all chunks
        self.received: set[int] = set()  # indices of the parameters that have data in the shard, from any rank
        self.missing: float = 0  # parameters without a gradient in this backward pass; infinite if unknown

    def become(self, place: GradientPlace) -> None:
        assert (self.place, place) in _GRADIENT_MOVES, f"a gradient is {place.value} after it was {self.place.value}"
        self.place = place

    @property
    def is_there(self) -> bool:
        """Whether the shard has data. The next arrival is then added to the data."""
        return self.place is ON_DEVICE or self.place is OFFLOADED

    @property
    def has_arrived(self) -> bool:
        """Whether any data of this gradient is in the engine. After an interrupt during the arrival, only `received` shows this."""
        return self.job is not None or self.unreduced.flat is not None or bool(self.received)

    @property
    def is_offloaded(self) -> bool:
        """Whether the gradient is off the device, or on the way to host memory. The next arrival is then added in host memory."""
        return self.place is OFFLOADED or self.place is OFFLOADING

    # Arrivals.

    def expect(self, num_params: float) -> None:
        """A backward pass begins that brings gradients of `num_params` parameters; infinite if unknown."""
        self.missing = num_params

    def complete_one(self) -> bool:
        """All expected gradients of one parameter are there. Returns whether the chunk is complete."""
        self.missing -= 1
        return not self.missing

    def exceed(self) -> None:
        """A parameter received more gradients than expected: the chunk is complete only at the end of the pass."""
        self.missing = math.inf

    def arrive(self, *, on_device: bool) -> None:
        """Data is in the shard, or is about to be written there."""
        place = ON_DEVICE if on_device else OFFLOADED
        if self.place is not place:
            self.become(place)

    def come_by(self, job) -> None:
        """All data that has arrived so far is in the shard after this job."""
        self.job = job

    def hand_over(self):
        """Give the last transfer to the update. Later arrivals belong to the next update."""
        job, self.job = self.job, None
        return job

    def sum_by(self, job) -> None:
        """This job sums the squares of the present gradient."""
        self.squares = job

    def leave_out(self, params: set[int]) -> None:
        """The update changes none of these parameters, although their gradients have arrived."""
        self.received -= params

    def clear(self) -> None:
        """The gradient was used or dropped. The next arrival is a first one."""
        if self.place is not ABSENT:
            self.become(ABSENT)
        self.job = self.squares = None
        self.received = set()
        if self.for_step:
            self.stays = self.for_step = False

    # Between device and host.

    def stay(self, *, for_step: bool = False) -> None:
        """From the next first arrival on, the gradient stays on the device until its update begins. for_step: only the next gradient does."""
        self.stays, self.for_step = True, for_step

    def stay_here(self) -> None:
        """As `stay`; data that has arrived has been copied to the device."""
        self.stays, self.for_step = True, False
        if self.place is OFFLOADED:
            self.become(ON_DEVICE)

    def offload(self) -> None:
        """The gradient that stayed on the device is on the way to host memory."""
        self.become(OFFLOADING)

    def leave(self) -> tuple[DeviceShard | None, bool]:
        """End the stay on the device. Returns the device memory, and whether this memory has data that the caller must offload."""
        shard, self.device_shard = self.device_shard, None
        self.stays = self.for_step = False
        has_data = self.place is ON_DEVICE
        if has_data:
            self.offload()
        return shard, has_data

    def take(self, shard: DeviceShard | None) -> None:
        """Use this device memory, or none."""
        self.device_shard = shard

    def free_device(self) -> None:
        self.device_shard, self.unreduced = None, Unreduced()
