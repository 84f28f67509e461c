"""One rank among equal ones: the peers are always at the same point, and only the time of an exchange is simulated.

Knows flat tensors and ranks. Must not know parameters or plans.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from infinity.system.ranks import Ranks


class SimulatedRanks(Ranks):
    """Rank 0 of `world` equal ranks, num_local of them on its node. spend(nbytes): called with the bytes that this rank receives in a collective.

    Peers post nothing, so no checkpoint of several ranks is simulated.
    """

    def __init__(self, device: torch.device, *, world: int, num_local: int, spend: Callable[[int], object]):
        super().__init__(device)
        self.world, self.name = world, f"rank 0 of {world}"
        self._num_local, self._spend = num_local, spend

    @property
    def num_local(self) -> int:
        return self._num_local

    def gather(self, flat, what):
        self._spend(flat.nbytes * (self.world - 1) // self.world)

    def reduce_scatter(self, flat, what):
        self._spend(flat.nbytes * (self.world - 1) // self.world)
        return flat.view(self.world, -1)[self.rank]  # with the numbers that tell which parameters have gradients

    def sum_(self, tensor):
        return tensor.mul_(self.world)

    def most(self, numbers, group=None, what=""):
        return numbers

    def broadcast_(self, tensor, source=0):
        return tensor

    def all_gather_slices(self, piece):
        return torch.from_numpy(np.tile(piece.numpy(), self.world))  # numbers to agree on: these have bytes

    def barrier(self):
        """Equal ranks are at one point."""
