"""What has arrived of a chunk's gradient, and where it is.

Knows one chunk's gradient. Must not know how gradients are reduced or copied.
"""

from __future__ import annotations

import math

import torch


class GradientState:
    """What has arrived of a chunk's gradient. tiers/gradients.py alone writes it; others call what it has."""

    __slots__ = ("device_shard", "flat", "is_there", "job", "made", "missing", "number", "received", "squares", "stays", "used", "was_sent")

    def __init__(self):
        self.is_there = False  # in its shard, from the first arrival until the update
        self.job = None  # the last transfer into the shard
        self.made = None  # on CUDA the event behind the last arrival of what stays
        self.number = 0  # of the last arrival, counted over all chunks
        self.squares = None  # the job that sums them, if their norm is asked for
        self.received: set[int] = set()  # parameters with data in the shard, of any rank
        self.missing: float = 0  # parameters that lack gradients in this backward pass, infinite if nobody knows
        self.stays = False  # on the device until its update begins, though the record is not there
        self.was_sent = False  # what has arrived is not there all the same: it has followed the record, or came before it was to stay
        self.device_shard: torch.Tensor | None = None  # the shard of a record on the device, or what stays; its memory stays, too
        self.flat: torch.Tensor | None = None  # device buffer of the whole chunk, more than one rank
        self.used: set[int] = set()  # parameters with a gradient on this rank, of which that has some

    def expect(self, num_params: int) -> None:
        """A backward pass begins that brings gradients of so many parameters."""
        self.missing = num_params

    def complete_one(self) -> bool:
        """All that was expected of one parameter is there. Returns whether it was the last of the chunk's."""
        self.missing -= 1
        return not self.missing

    def exceed(self) -> None:
        """More came of a parameter than was expected: nobody knows when the chunk's gradient is complete."""
        self.missing = math.inf

    def hand_over(self):
        """The job after which an update has all of it; what comes later is of another."""
        job, self.job = self.job, None
        return job

    def sum_by(self, job) -> None:
        """What is there now has its squares summed by this job."""
        self.squares = job

    def come_by(self, job) -> None:
        """All that has come so far is in the shard after this job."""
        self.job = job

    def stay(self, *, here: bool = False) -> None:
        """From now on what arrives stays on the device until its update begins. here: what has arrived already is there, too."""
        self.stays, self.was_sent = True, self.is_there and not here

    def follow(self) -> None:
        """What stayed is on its way to the record."""
        self.is_there, self.was_sent = False, True

    def leave(self) -> tuple[torch.Tensor | None, bool]:
        """It does not stay any more. Returns the memory that it had on the device, and whether there is something in it, which is now to
        be put elsewhere."""
        memory, self.device_shard, self.stays = self.device_shard, None, False
        has_data = self.is_there and not self.was_sent
        if has_data:
            self.is_there = False
        return memory, has_data

    def free_device(self) -> None:
        self.device_shard = self.flat = None
