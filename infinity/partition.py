"""Ranks: how shards become chunks and gradients become shards.

The one module that talks to torch.distributed, beside the training command, which starts and ends it, and dcp.py. Knows flat tensors and
ranks; must not know parameters, plans or tiers. Two calls have no public name there: the store, and a group's abort.
Device collectives are called by one thread only, in the plan's order: two gathers of equal size that are issued in
different orders on two ranks do not fail, they deliver each other's data.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from infinity import lanes
from infinity.errors import CheckpointError, PeerError, UsageError
from infinity.lanes import THREADS

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CONTROL_TIMEOUT_S = 600
WATCH_S = 0.5  # how often each rank looks whether another one has failed
SILENCE_S = 20.0  # after which a rank that should beat is taken for dead

_numbers = itertools.count()

Result = TypeVar("Result")

# [Note: how a failure reaches the other ranks]
# A rank that fails writes why into the store that the launcher made, where the first word stands; each rank has a thread that looks
# there. Who finds another's failure tells its engine, whose threads stop waiting for each other, and aborts the device's collectives,
# which would wait for the lost rank until their timeout. So all ranks end with the first error of any, also while the one that failed
# still lives. gloo has no abort: small collectives are waited for in steps of WATCH_S; a lane inside a large one is left behind.


# [Note: how ranks that run different modules are found]
# They end up waiting in different collectives, for ever. A rank whose training thread has been in one collective, or has waited for
# a lane that is in one, for WAITS polls says so in the store. If all do and name different ones, none of them can go on.

WAITS = 4
REMEDY = (
    "All ranks must run the same modules in the same order; look for branches that depend on the rank or on its data. Where they are "
    "meant, as in a mixture of experts, call infinity.leaf(module) on the module that branches; a layer that a rank skips must be "
    "called with an empty batch instead."
)


class Ranks:
    """This process among its peers. One process without torch.distributed is rank 0 of 1 and never communicates.

    Makes groups of its own: `data` (nccl on CUDA, gloo on the CPU) moves chunks; `control` (gloo) carries what the training
    threads must agree on, `order` (gloo) what the threads that call `data` must. Every rank must construct it at the
    same point of the program.
    """

    def __init__(self, device: torch.device):
        self.rank, self.world = 0, 1
        self.data = self.control = self.order = None
        self.name = "this process"
        self._num_users = 0
        self._store = None
        self._posted: dict[str, bytes] = {}  # where there is no other rank
        self._beating = 0
        self._beats: dict[int, tuple[bytes | None, float]] = {}  # of other ranks: the last beat, and when it was first seen
        self._closing = threading.Event()
        self._listeners: list[weakref.WeakMethod] = []
        self.failure: BaseException | None = None  # of this rank, or a PeerError
        self._inside: dict[str, str] = {}  # the collective that the training thread ("control"), or the lane, is in
        self._num_collectives = {"control": 0, "lane": 0}
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            timeout = datetime.timedelta(seconds=CONTROL_TIMEOUT_S)
            self.data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
            self.control = dist.new_group(backend="gloo", timeout=timeout)
            self.order = dist.new_group(backend="gloo", timeout=timeout)
            self.name = f"rank {self.rank} of {self.world}"
            self._store = dist.PrefixStore(f"infinity-{next(_numbers)}", dist.distributed_c10d._get_default_store())
            threading.Thread(target=self._watch, name="infinity-watch", daemon=True).start()

    @property
    def num_local(self) -> int:
        """Ranks on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))

    def report(self, error: BaseException, what: str = "") -> None:
        """Tell the other ranks that this one cannot go on, and at what; see [Note: how a failure reaches the other ranks]."""
        if self._store is not None and self.failure is None:
            self.failure = error
            with contextlib.suppress(Exception):  # the store may be gone, and everyone with it
                self._store.compare_set("failure", "", f"{self.rank} {self.name} failed: {what}{type(error).__name__}: {error}")
                atexit.register(time.sleep, 3 * WATCH_S)  # the store may end with this process: let the others look

    def listen(self, listener: Callable[[BaseException], None]) -> None:
        """Have a method told of the first failure of any rank, from a thread of its own."""
        self._listeners.append(weakref.WeakMethod(listener))

    def _watch(self) -> None:
        board = _Board(self)
        for number in itertools.count():
            if self._closing.wait(WATCH_S):
                return
            try:
                if self._beating:
                    self._store.set(f"beat{self.rank}", str(number))
                if (parted := board.look()) is not None:
                    self.report(parted)
                found = self._store.check(["failure"]) and self._store.get("failure").decode()
            except Exception:
                found = "-1 the rank that keeps the launcher's store is gone"
            if not found:
                continue
            rank, _, text = found.partition(" ")
            if int(rank) != self.rank and self.failure is None:
                self.failure = PeerError(f"{self.name} ends because {text}")
            for listener in self._listeners:
                if (method := listener()) is not None:
                    method(self.failure)
            with contextlib.suppress(Exception):  # close() may have been faster
                if dist.get_backend(data := self.data) == "nccl":
                    data._get_backend(torch.device("cuda")).abort()
            return

    def gather(self, chunk: torch.Tensor, what: str) -> None:
        """All-gather in place: chunk is 1-D [world * shard_numel], this rank's shard already in its place. what: for errors."""
        self._check()
        shard_numel = chunk.numel() // self.world
        shard = chunk[self.rank * shard_numel : (self.rank + 1) * shard_numel]
        with self._in("lane", f"the all-gather of {what}"), self._explained(f"the all-gather of weights, {what},"):
            _all_gather(chunk, shard, group=self.data)

    def reduce_scatter(self, chunk: torch.Tensor, what: str) -> torch.Tensor:
        """Sum a 1-D [world * n] tensor over the ranks; returns this rank's [n]. what: for errors."""
        self._check()
        shard = torch.empty(chunk.numel() // self.world, dtype=chunk.dtype, device=chunk.device)
        with self._in("lane", f"the reduce-scatter of {what}"), self._explained(f"the reduce-scatter of gradients, {what},"):
            _reduce_scatter(shard, chunk, group=self.data)
        return shard

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a small host tensor up over the ranks, in place."""
        if self.world > 1:
            self._wait(dist.all_reduce(tensor, group=self.control, async_op=True), f"a sum of {tensor.numel()} numbers")
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the maximum of a small host tensor over the ranks, in place."""
        if self.world > 1:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
            self._wait(work, f"a maximum of {tensor.numel()} numbers")
        return tensor

    def min_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the minimum of a small host tensor over the ranks, in place."""
        if self.world > 1:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.control, async_op=True)
            self._wait(work, f"a minimum of {tensor.numel()} numbers")
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Give every rank the source's host tensor, in place."""
        if self.world > 1:
            work = dist.broadcast(tensor, src=source, group=self.control, async_op=True)
            self._wait(work, f"a broadcast of {tensor.numel()} numbers")
        return tensor

    def all_gather_slices(self, piece: torch.Tensor) -> torch.Tensor:
        """Concatenate equal 1-D host tensors of all ranks."""
        if self.world == 1:
            return piece
        whole = torch.empty(self.world * piece.numel(), dtype=piece.dtype)
        self._wait(_all_gather(whole, piece, group=self.control, async_op=True), f"a gather of {whole.numel()} numbers")
        return whole

    def exchange(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank."""
        if self.world == 1:
            return [mine]
        sizes = self.all_gather_slices(torch.tensor([len(mine)])).tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        whole = self.all_gather_slices(padded).view(self.world, -1)
        return [whole[rank, :size].numpy().tobytes() for rank, size in enumerate(sizes)]

    def together(self, work: Callable[[], Result], undo: Callable[[Result], None] | None = None) -> Result:
        """Do it on every rank; where it fails on any, raise on all. undo: what is done with the result then, where it did not fail.

        Who has not failed himself raises CheckpointError, with what the others said.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # each rank waits for what the others say
            error = failure
        told = (str(error) or type(error).__name__) if error is not None else ""
        texts = self.exchange(told.encode(errors="backslashreplace"))
        if error is not None:
            raise error
        if failed := [f"rank {rank}: {text.decode(errors='replace')}" for rank, text in enumerate(texts) if text]:
            if undo is not None:
                undo(result)
            raise CheckpointError("; ".join(failed))
        return result

    def post(self, key: str, value: bytes) -> None:
        """Let the other ranks find the value. As `look` and `forget`, from any thread: nobody waits for anybody."""
        if self._store is None:
            self._posted[key] = value
        else:
            self._store.set(key, value)

    def look(self, key: str, rank: int = 0) -> bytes | None:
        """What a rank has posted, if it has. Raises what ended another rank, PeerError if that one has stopped beating."""
        self._check()
        if self._store is None:
            return self._posted.get(key)
        if self._store.check([key]):
            return self._store.get(key)
        beat = self._store.get(f"beat{rank}") if self._store.check([f"beat{rank}"]) else b""
        last, since = self._beats.get(rank, (None, 0.0))
        if beat != last:
            self._beats[rank] = beat, time.monotonic()
        elif time.monotonic() - since > SILENCE_S:
            raise PeerError(f"{self.name}: rank {rank} has not been heard of for {SILENCE_S:.0f} s")
        return None

    def beat(self, on: bool) -> None:
        """While it is on, the others hear that this rank lives; see `look`. Whoever switched it on switches it off again."""
        self._beating += 1 if on else -1
        if on:
            self._beats.clear()

    def forget(self, key: str) -> None:
        """Nobody looks for it any more."""
        if self._store is None:
            self._posted.pop(key, None)
        else:
            self._store.delete_key(key)

    def agree(self, *values: int, group=None, what: str = "an agreement between the training threads") -> bool:
        """Whether every rank gave the same integers. what: for errors."""
        if self.world == 1:
            return True
        self._check()
        low = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64)
        with self._explained("the exchange of what comes next"):
            where = "control" if group is None else "lane"
            self._wait(dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group or self.control, async_op=True), what, where)
        return all(low[i].item() == -low[len(values) + i].item() for i in range(len(values)))

    def require_order(self, what: str, *values: int) -> None:
        """Raise UsageError, on every rank, where the ranks are about to issue different collectives."""
        if not self.agree(*values, group=self.order, what=f"the exchange about {what}"):
            raise UsageError(f"{self.name}: the ranks disagree about {what} (here: {values}). {REMEDY}")

    @contextlib.contextmanager
    def _in(self, where: str, what: str):
        """For the others to know, if it takes long."""
        self._num_collectives[where] += 1
        self._inside[where] = f"{what} (number {self._num_collectives[where]})"
        try:
            yield
        finally:
            del self._inside[where]

    def waits_in(self) -> str:
        """The collective that keeps the training thread from going on, if one does."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        waiting = [names.get(ident, "") for ident in list(lanes.waiting)]  # autograd's threads have no name
        if f"{THREADS}gg" in waiting:
            return ""  # the lane waits for what this rank does alone, such as a slow read, and then joins the others
        waits = any(not name.startswith(THREADS) for name in waiting)
        return self._inside.get("control") or (self._inside.get("lane", "") if waits else "")

    @contextlib.contextmanager
    def _explained(self, what: str):
        try:
            yield
        except RuntimeError as error:
            self._closing.wait(2 * WATCH_S)  # it may be about to hear why
            if self.failure is not None:
                raise self.failure from error
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RuntimeError(
                f"{self.name}: {what} failed: another rank has failed, or runs other modules or in another order. See the first "
                f"error of the other ranks ({reason})"
            ) from error

    def _check(self) -> None:
        """A rank that failed has left out a collective: with its next one it would meet the others in that."""
        if self.failure is not None:
            raise self.failure

    def _wait(self, work: dist.Work, what: str, where: str = "control") -> None:
        """Until it is done, unless a rank has failed."""
        with self._in(where, what):
            while True:
                try:
                    work.wait(datetime.timedelta(seconds=WATCH_S))
                    return
                except RuntimeError:
                    if self.failure is not None:
                        raise self.failure from None
                    if work.is_completed():  # since the time was over; or this raises what went wrong
                        work.wait()
                        return

    def barrier(self) -> None:
        if self.world > 1:
            self._wait(dist.barrier(group=self.control, async_op=True), "a barrier")

    def join(self) -> None:
        """One engine more uses the groups: all that are built in one `infinity.init` share them."""
        self._num_users += 1

    def leave(self) -> None:
        """One less; the last one gives the groups back."""
        self._num_users -= 1
        if not self._num_users:
            self.close()

    def close(self) -> None:
        self._closing.set()
        if self.failure is not None:
            return  # a thread may be inside a collective, which would end the process; the groups go with it
        for group in (self.data, self.control, self.order):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self.data = self.control = self.order = None


class _Board:
    """What the ranks say of where they wait, see [Note: how ranks that run different modules are found]. Of the watching thread."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._text, self._num_polls, self._num_parted = "", 0, 0

    def look(self) -> UsageError | None:
        """Say where this rank waits, if it does; an error if all ranks wait, and not in the same collective."""
        text, store = self.ranks.waits_in(), self.ranks._store
        if text != self._text:
            if self._num_polls >= WAITS:
                store.set(f"waits{self.ranks.rank}", "")
            self._text, self._num_polls, self._num_parted = text, 0, 0
        if not text:
            return None
        self._num_polls += 1
        if self._num_polls < WAITS:
            return None
        if self._num_polls == WAITS:
            store.set(f"waits{self.ranks.rank}", text)
        keys = [f"waits{rank}" for rank in range(self.ranks.world)]
        texts = [store.get(key).decode() for key in keys] if store.check(keys) else [""]
        self._num_parted = self._num_parted + 1 if all(texts) and len(set(texts)) > 1 else 0
        if self._num_parted < 2:
            return None
        each = "; ".join(f"rank {rank} in {text}" for rank, text in enumerate(texts[:8]))
        return UsageError(f"{self.ranks.name}: the ranks wait for each other in different collectives: {each}. {REMEDY}")
