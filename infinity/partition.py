"""Ranks: how shards become chunks and gradients become shards.

The one module that talks to torch.distributed, beside the command line, which starts and ends it. Knows flat tensors and ranks; must not know parameters, plans or tiers.
Device collectives are called by one thread only, in the plan's order: two gathers of equal size that are issued in
different orders on two ranks do not fail, they deliver each other's data.
"""

from __future__ import annotations

import contextlib
import datetime

import torch
import torch.distributed as dist

from infinity.errors import UsageError

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CONTROL_TIMEOUT_S = 600


class Ranks:
    """This process among its peers. One process without torch.distributed is rank 0 of 1 and never communicates.

    Makes groups of its own: `data` (nccl on CUDA, gloo on the CPU) moves chunks; `control` (gloo) carries what the training
    threads must agree on, `order` (gloo) what the threads that call `data` must. Every rank must construct it at the
    same point of the program.
    """

    def __init__(self, device: torch.device):
        self.rank, self.world = 0, 1
        self.data = self.control = self.order = None
        self._num_users = 0
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            timeout = datetime.timedelta(seconds=CONTROL_TIMEOUT_S)
            self.data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
            self.control = dist.new_group(backend="gloo", timeout=timeout)
            self.order = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, chunk: torch.Tensor) -> None:
        """All-gather in place: chunk is 1-D [world * shard_numel], this rank's shard already in its place."""
        shard_numel = chunk.numel() // self.world
        shard = chunk[self.rank * shard_numel : (self.rank + 1) * shard_numel]
        with self._explained("an all-gather of weights"):
            _all_gather(chunk, shard, group=self.data)

    def reduce_scatter(self, chunk: torch.Tensor) -> torch.Tensor:
        """Sum a 1-D [world * n] tensor over the ranks; returns this rank's [n]."""
        shard = torch.empty(chunk.numel() // self.world, dtype=chunk.dtype, device=chunk.device)
        with self._explained("a reduce-scatter of gradients"):
            _reduce_scatter(shard, chunk, group=self.data)
        return shard

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a small host tensor up over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, group=self.control)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the maximum of a small host tensor over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return tensor

    def min_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the minimum of a small host tensor over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.control)
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Give every rank the source's host tensor, in place."""
        if self.world > 1:
            dist.broadcast(tensor, src=source, group=self.control)
        return tensor

    def all_gather_slices(self, piece: torch.Tensor) -> torch.Tensor:
        """Concatenate equal 1-D host tensors of all ranks."""
        if self.world == 1:
            return piece
        whole = torch.empty(self.world * piece.numel(), dtype=piece.dtype)
        _all_gather(whole, piece, group=self.control)
        return whole

    def agree(self, *values: int, group=None) -> bool:
        """Whether every rank gave the same integers."""
        if self.world == 1:
            return True
        low = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64)
        with self._explained("the exchange of what comes next"):
            dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group or self.control)
        return all(low[i].item() == -low[len(values) + i].item() for i in range(len(values)))

    def require_order(self, what: str, *values: int) -> None:
        """Raise UsageError, on every rank, where the ranks are about to issue different collectives."""
        if not self.agree(*values, group=self.order):
            raise UsageError(
                f"rank {self.rank} of {self.world}: the ranks disagree about {what} (here: {values}). All ranks must "
                f"run the same modules in the same order; look for branches that depend on the rank or on its data."
            )

    @contextlib.contextmanager
    def _explained(self, what: str):
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RuntimeError(
                f"rank {self.rank} of {self.world}: {what} failed: another rank has failed, or runs other modules or in another "
                f"order. See the first error of the other ranks ({reason})"
            ) from error

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.control)

    def join(self) -> None:
        """One engine more uses the groups: all that are built in one `infinity.init` share them."""
        self._num_users += 1

    def leave(self) -> None:
        """One less; the last one gives the groups back."""
        self._num_users -= 1
        if not self._num_users:
            self.close()

    def close(self) -> None:
        for group in (self.data, self.control, self.order):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self.data = self.control = self.order = None
