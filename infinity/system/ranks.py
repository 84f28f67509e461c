"""Ranks: how shards become chunks and gradients become shards.

The one module that talks to torch.distributed, beside the training command, which starts and ends it, and dcp.py. Knows flat tensors and
ranks; must not know parameters, plans or tiers. Two calls have no public name there: the store, and a group's abort.
Device collectives are called by one thread only, in the plan's order: two gathers of equal size that are issued in
different orders on two ranks do not fail, they deliver each other's data.

Over 400 lines because how a collective ends when a rank does not join it is one protocol.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import datetime
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from infinity.errors import CheckpointError, PeerError, UsageError
from infinity.system import interrupts, lanes
from infinity.system.lanes import THREADS
from infinity.system.peers import Peer, Peers

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CONTROL_TIMEOUT_S = 600
WATCH_S = 0.5  # how often each rank looks whether another one has failed
SILENCE_S = 20.0  # after which a rank of another machine that somebody waits for is taken for dead
BROKEN_S = 4.0  # the same, once a connection is
LINGER_S = 10.0  # how long a process that ends looks whether the others end, too

_numbers = itertools.count()

Result = TypeVar("Result")

# [Note: how a failure reaches the other ranks]
# A rank that fails writes why into the store that the launcher made, where the first word stands; each rank has a thread that looks
# there. Who finds another's failure tells its engine, whose threads stop waiting for each other, and aborts the device's collectives,
# which would wait for the lost rank until their timeout. So all ranks end with the first error of any, also while the one that failed
# still lives. gloo has no abort: its collectives are waited for in steps of WATCH_S, and one that was given up may write to its
# tensors until the process ends, which keeps them, and its group, until then.
# A rank that ends without a word, or leaves while another one waits for it, cannot say so: the others find it missing (peers.py), and
# the first that does writes it down for all. What a collective itself says of a lost connection names nobody, and is nobody's error.
#
# [Note: how a process ends]
# A thread of Python's that is in C++ code when the interpreter ends takes the process along (SIGABRT). So whoever has an engine closes it
# first, which ends its threads; on several ranks the process then looks for some seconds whether the others leave as well, for the
# program may have ended here because it had less to do than there.


# [Note: how ranks that run different modules are found]
# They end up waiting in different collectives, for ever. A rank whose training thread has been in one collective, or has waited for
# a lane that is in one, for WAITS polls says so in the store. If all do and name different ones, none of them can go on. One of all
# ranks that the program itself calls, such as a barrier behind the loop, counts as well: the thread's stack shows it.

WAITS = 4
PROGRAM = "a collective of the program's own"  # begins the text of where a thread waits that is in one
REMEDY = (
    "All ranks must run the same modules in the same order; look for branches that depend on the rank or on its data. Where they are "
    "meant, as in a mixture of experts, call infinity.leaf(module) on the module that branches; a layer that a rank skips must be "
    "called with an empty batch instead. All ranks need the same number of batches and of steps, too."
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
        self.num_steps = 0  # of the optimizer; for the others to know
        self.has_left_behind = False  # a collective that may still write to its tensors
        self._num_users = 0
        self._store = None
        self._posted: dict[str, bytes] = {}  # where there is no other rank
        self._stages: list[str] = []  # what the engine does now beside steps
        self._broken = ""  # the collective that failed
        self._was_printed = False  # its failure
        self._store_is_gone = False  # and with it who kept it, which may have ended well
        self._closing = threading.Event()
        self._has_failed = threading.Event()
        self._listeners: list[weakref.WeakMethod] = []
        self.failure: BaseException | None = None  # of this rank, or a PeerError
        self._inside: dict[str, str] = {}  # the collective that the training thread ("control"), or the lane, is in
        self._num_collectives = {"control": 0, "lane": 0}
        self._training = threading.get_ident()
        grouped = dist.is_available() and dist.is_initialized()
        if not grouped and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            backend = "nccl" if device.type == "cuda" else "gloo"
            raise UsageError(
                f"this is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), which do not know of each other: each would train a "
                f'model of its own. Add the line torch.distributed.init_process_group("{backend}") before infinity.init or '
                f"infinity.offload; where one process is meant, unset WORLD_SIZE."
            )
        if grouped and dist.get_world_size() > 1:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.name = f"rank {self.rank} of {self.world}"
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"infinity-{next(_numbers)}", store)
            self._peers = Peers(self._store, self.rank, self.world)
            with self.at("the making of the engine"):
                self._meet(store)
                timeout = datetime.timedelta(seconds=CONTROL_TIMEOUT_S)
                self.data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
                self.control = dist.new_group(backend="gloo", timeout=timeout)
                self.order = dist.new_group(backend="gloo", timeout=timeout)
            self._watcher = threading.Thread(target=self._watch, name="infinity-watch", daemon=True)
            self._watcher.start()

    def _meet(self, store: dist.Store) -> None:
        """Wait until all ranks are here; groups that lack one would wait for it in C++ code, where nothing reaches them."""
        deadline = time.monotonic() + CONTROL_TIMEOUT_S
        missing = [rank for rank in range(self.world) if rank != self.rank]
        for number in itertools.count():
            missing = [rank for rank in missing if not self._peers.has_come(rank)]
            if not missing:
                return
            if number % 50 == 49:  # some of the others may not live to see the last one come
                come = [rank for rank in range(self.world) if rank not in missing]
                for rank, peer in zip(come, self._peers.look(*come)):
                    if peer.has_ended:
                        raise PeerError(f"{self.name} ends because {self._gone(rank, peer)}")
                for rank in missing:
                    if store.check([f"infinity-ended{rank}"]):
                        how = store.get(f"infinity-ended{rank}").decode()
                        raise PeerError(f"{self.name} ends because rank {rank} of {self.world} ended {how} before it made this engine")
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing[:8]))
                raise PeerError(
                    f"{self.name} has waited {CONTROL_TIMEOUT_S} s for rank {ranks} of {self.world}: all ranks must make the same engines, "
                    f"with infinity.init or infinity.offload"
                )
            time.sleep(min(0.01, 0.0005 * (number + 1)))

    @property
    def num_local(self) -> int:
        """Ranks on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))

    @contextlib.contextmanager
    def at(self, stage: str):
        """For the others to know where this rank is; else it is in a step."""
        self._stages.append(stage)
        try:
            if self.world > 1:
                with contextlib.suppress(Exception):  # the watch finds out what is wrong with the store
                    self._peers.say(self._where())  # at once: the first thing that goes wrong here may be the last
            yield
        finally:
            self._stages.pop()

    def _where(self) -> str:
        inside = self._inside.get("control") or self._inside.get("lane") or _programs_collective(self._training)
        after = inside.startswith(PROGRAM)
        stage = f"in {self._stages[-1]}" if self._stages else self._passed if after else f"in step {self.num_steps + 1}"
        return f"{stage}{f', in {inside}' if inside else ''}"

    @property
    def _passed(self) -> str:
        return f"after step {self.num_steps}" if self.num_steps else "before its first step"

    def report(self, error: BaseException, what: str = "") -> None:
        """Tell the other ranks that this one cannot go on, and at what; see [Note: how a failure reaches the other ranks]."""
        if self._store is not None and self.failure is None:
            self.failure = error
            self._has_failed.set()
            self._post_failure(self.rank, f"{self.name} failed: {what}{type(error).__name__}: {error}")

    def _post_failure(self, rank: int, text: str) -> None:
        with contextlib.suppress(Exception):  # the store may be gone, and everyone with it
            self._store.compare_set("failure", "", f"{rank} {text}")

    def _posted_failure(self) -> str:
        return self._store.get("failure").decode() if self._store.check(["failure"]) else ""

    def listen(self, listener: Callable[[BaseException], None]) -> None:
        """Have a method told of the first failure of any rank, from a thread of its own."""
        self._listeners.append(weakref.WeakMethod(listener))

    def _watch(self) -> None:
        board = _Board(self)
        for number in itertools.count():
            if self._closing.wait(WATCH_S):
                return
            try:
                self._peers.say(self._where())
                if (parted := board.look()) is not None:
                    self.report(parted)
                found = self._posted_failure()
                if not found and (self._broken or number % max(1, self.world // 32) == 0):
                    found = self._find_missing(board.waits_long)
            except Exception:
                found = "-1 the rank that keeps the launcher's store is gone"
                self._store_is_gone = True
            if found:
                self._end_with(found)
                return

    def _end_with(self, found: str) -> None:
        rank, _, text = found.partition(" ")
        if self.failure is None:
            self.failure = PeerError(f"{self.name} ends because {text}")
        if place := _programs_collective(self._training):  # which fails once another process has ended, and cannot say why
            print(f"infinity: {type(self.failure).__name__}: {self.failure} (this rank is in {place})", file=sys.stderr, flush=True)
            self._was_printed = True
        self._has_failed.set()
        for listener in self._listeners:
            if (method := listener()) is not None:
                method(self.failure)
        with contextlib.suppress(Exception):  # close() may have been faster
            if dist.get_backend(data := self.data) == "nccl":
                data._get_backend(torch.device("cuda")).abort()

    def _find_missing(self, waits: str) -> str:
        """Write down which rank is gone, if one is; waits: for whom this one waits, and where."""
        waits = self._broken or waits
        for rank, peer in enumerate(self._peers.look()):
            if rank == self.rank:
                continue
            if not peer.left and peer.has_ended:
                (peer,) = self._peers.look(rank)  # its last word may be newer than what was seen
                text = "" if peer.left else self._gone(rank, peer)
            elif not peer.left and waits and peer.silent_s > (BROKEN_S if self._broken else SILENCE_S):
                text = self._gone(rank, peer)
            else:
                text = ""
            if peer.left and waits:
                text = (
                    f"rank {rank} of {self.world} has left {peer.where}, and rank {self.rank} waits for it {self._where()}"
                    f"{'' if waits in self._where() else f', in {waits}'}: all ranks must make the same steps and close their engines "
                    f"together. Give each the same number of batches, such as with a DistributedSampler and drop_last=True, or end the "
                    f"loop on all ranks as soon as one of them has no batch left"
                )
            if text:
                self._post_failure(rank, text)
                return self._posted_failure()
        return ""

    def _gone(self, rank: int, peer: Peer) -> str:
        how = "ended without a word" if peer.has_ended else f"has not been heard of for {peer.silent_s:.0f} s"
        return (
            f"rank {rank} of {self.world} {how}, last {peer.where}: was it killed, as the kernel does when memory runs out (see dmesg), or "
            f"is its machine gone? Lower host_memory or the number of ranks a machine where it was memory"
        )

    def gather(self, chunk: torch.Tensor, what: str) -> None:
        """All-gather in place: chunk is 1-D [world * shard_numel], this rank's shard already in its place. what: for errors."""
        shard_numel = chunk.numel() // self.world
        shard = chunk[self.rank * shard_numel : (self.rank + 1) * shard_numel]
        self._move(lambda **options: _all_gather(chunk, shard, group=self.data, **options), chunk, f"the all-gather of {what}")

    def reduce_scatter(self, chunk: torch.Tensor, what: str) -> torch.Tensor:
        """Sum a 1-D [world * n] tensor over the ranks; returns this rank's [n]. what: for errors."""
        shard = torch.empty(chunk.numel() // self.world, dtype=chunk.dtype, device=chunk.device)
        self._move(lambda **options: _reduce_scatter(shard, chunk, group=self.data, **options), chunk, f"the reduce-scatter of {what}")
        return shard

    def _move(self, begin: Callable, chunk: torch.Tensor, what: str) -> None:
        if chunk.is_cuda:  # nccl's are in the stream's order, and can be aborted
            self._run(begin, what, "lane")
        else:
            self._run(lambda: begin(async_op=True), what, "lane")

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a small host tensor up over the ranks, in place."""
        if self.world > 1:
            self._run(lambda: dist.all_reduce(tensor, group=self.control, async_op=True), f"a sum of {tensor.numel()} numbers")
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the maximum of a small host tensor over the ranks, in place."""
        if self.world > 1:
            begin = lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
            self._run(begin, f"a maximum of {tensor.numel()} numbers")
        return tensor

    def min_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the minimum of a small host tensor over the ranks, in place."""
        if self.world > 1:
            begin = lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.control, async_op=True)
            self._run(begin, f"a minimum of {tensor.numel()} numbers")
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Give every rank the source's host tensor, in place."""
        if self.world > 1:
            begin = lambda: dist.broadcast(tensor, src=source, group=self.control, async_op=True)
            self._run(begin, f"a broadcast of {tensor.numel()} numbers")
        return tensor

    def all_gather_slices(self, piece: torch.Tensor) -> torch.Tensor:
        """Concatenate equal 1-D host tensors of all ranks."""
        if self.world == 1:
            return piece
        whole = torch.empty(self.world * piece.numel(), dtype=piece.dtype)
        self._run(lambda: _all_gather(whole, piece, group=self.control, async_op=True), f"a gather of {whole.numel()} numbers")
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
        """What a rank has posted, if it has. Raises what ended another rank, PeerError if that one is not heard of."""
        self._check()
        if self._store is None:
            return self._posted.get(key)
        if self._store.check([key]):
            return self._store.get(key)
        if (peer := self._peers.known(rank)).silent_s > SILENCE_S:
            raise PeerError(f"{self.name} ends because {self._gone(rank, peer)}")
        return None

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
        low = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64)
        begin = lambda: dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group or self.control, async_op=True)
        self._run(begin, what, "control" if group is None else "lane")
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
        return self._inside.get("control") or (self._inside.get("lane", "") if waits else "") or _programs_collective(self._training)

    def said(self) -> list[str]:
        """Where each rank is, as far as it has said."""
        return [peer.where.partition(", in ")[0] for peer in self._peers.look()]

    def _run(self, begin: Callable[[], dist.Work | None], what: str, where: str = "control") -> None:
        """A collective, until it is done unless a rank has failed; one that fails by itself does for what ended another rank.

        A rank that failed has left one out: with its next one it would meet the others in that.
        """
        self._check()
        if where == "control" and threading.current_thread().name != interrupts.SHIELD:
            self._training = threading.get_ident()
        with self._in(where, what):
            try:
                work, is_over = begin(), False
                while work is not None and not is_over:
                    is_over = self._waited(work)
            except RuntimeError as error:
                if self.failure is not None and (type(error), error.args) == (type(self.failure), self.failure.args):
                    raise
                reason = self._explain(what, error)
                raise reason from (error if self.failure is None else None)

    def _waited(self, work: dist.Work) -> bool:
        """Whether it is over, after WATCH_S at most."""
        try:
            work.wait(datetime.timedelta(seconds=WATCH_S))
        except RuntimeError:
            if not work.is_completed():
                if self.failure is not None:
                    self.has_left_behind = True
                    raise _copy(self.failure) from None
                return False
            work.wait()  # it was over since; or this raises what went wrong
        return True

    def _explain(self, what: str, error: RuntimeError) -> BaseException:
        """Why a collective has failed, which the watch is about to hear or to find out."""
        self._broken = what
        self._has_failed.wait(BROKEN_S + 4 * WATCH_S)
        if self.failure is not None:
            return _copy(self.failure)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return PeerError(
            f"{self.name}: {what} failed: another rank has failed, or runs other modules or in another order. See the first error of the "
            f"other ranks ({reason})"
        )

    def _check(self) -> None:
        if self.failure is not None:
            raise _copy(self.failure)

    def barrier(self) -> None:
        if self.world > 1:
            self._run(lambda: dist.barrier(group=self.control, async_op=True), "a barrier")

    @contextlib.contextmanager
    def joined(self):
        """Whoever builds engines uses the groups, too: where none is made in the end, they go."""
        self.join()
        try:
            yield self
        finally:
            self.leave()

    def join(self) -> None:
        """One engine more uses the groups: all that are built in one `infinity.init` share them."""
        self._num_users += 1

    def leave(self) -> None:
        """One less; the last one gives the groups back."""
        self._num_users -= 1
        if not self._num_users:
            self.close()

    def close(self) -> None:
        """Leave the others; idempotent. Waits for nobody."""
        if self._closing.is_set() or self._store is None:
            self._closing.set()
            return
        self._closing.set()
        if self._watcher is not threading.current_thread():
            self._watcher.join(2 * SILENCE_S)  # it is in the store, if anywhere
        with contextlib.suppress(Exception):  # the store may be gone
            # Where it failed the others may still be about to tell.
            self._peers.say(self._passed if self.failure is None else self._peers.where, left=True)
        groups = [group for group in (self.data, self.control, self.order) if group is not None]
        self.data = self.control = self.order = None
        for group in groups:
            if self.has_left_behind or self.failure is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # its end would wait for what it has begun, and for ever
            elif dist.is_initialized():
                with contextlib.suppress(ValueError):  # the program may have destroyed all groups
                    dist.destroy_process_group(group)
        _closed.append(self)

    @property
    def is_stuck(self) -> bool:
        """Closed, and its thread is still in the store."""
        return self._store is not None and self._closing.is_set() and self._watcher.is_alive()

    def _others_end(self) -> bool:
        """Whether all others have left this engine or are gone."""
        if self.failure is None and (found := self._posted_failure()):
            self.failure = PeerError(f"{self.name} ends because {found.partition(' ')[2]}")
        return all(peer.left or peer.has_ended for rank, peer in enumerate(self._peers.look()) if rank != self.rank)


def _copy(error: BaseException) -> BaseException:
    """For each thread that meets it one, else its traceback would be all of theirs."""
    try:
        return copy.copy(error)
    except Exception:  # one of the program's, made in its own way
        return error


def end_process(error: BaseException | None) -> bool:
    """All engines are closed and the process ends; error: what it ends with, which nobody caught.

    Prints what another rank failed with, where the program ends otherwise; whether one has. See [Note: how a process ends].
    """
    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not _is_parents
    if grouped:
        with contextlib.suppress(Exception):  # whoever is to make an engine with this rank
            how = "well" if error is None else f"with {type(error).__name__}: {error}"
            dist.distributed_c10d._get_default_store().set(f"infinity-ended{dist.get_rank()}", how)
    deadline = time.monotonic() + LINGER_S
    for ranks in _closed:
        with contextlib.suppress(Exception):  # the store is gone, and who kept it has ended
            while not ranks._others_end() and time.monotonic() < deadline - (LINGER_S - 6 * WATCH_S if ranks.failure is not None else 0):
                time.sleep(WATCH_S / 5)
    if grouped and not dist.get_rank() and _closed:
        time.sleep(WATCH_S)  # the store may end with this process, and others look
    failed = [ranks for ranks in _closed if isinstance(ranks.failure, PeerError) and not ranks._store_is_gone]
    if failed and not failed[0]._was_printed and (type(error), str(error)) != (PeerError, str(failed[0].failure)):
        print(f"infinity: PeerError: {failed[0].failure}", file=sys.stderr)
    return bool(failed)


def _forget_parents() -> None:
    """In a forked child: the parent's engines and its connection to the store are not to be touched."""
    global _is_parents
    _closed.clear()
    _is_parents = dist.is_available() and dist.is_initialized()


_closed: collections.deque[Ranks] = collections.deque(maxlen=8)
_is_parents = False  # the process group
os.register_at_fork(after_in_child=_forget_parents)


class _Board:
    """What the ranks say of where they wait, see [Note: how ranks that run different modules are found]. Of the watching thread."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._text, self._num_polls, self._num_parted = "", 0, 0

    @property
    def waits_long(self) -> str:
        """Where this rank waits, if it has for so long that it may be for a rank that never comes."""
        return self._text if self._num_polls >= WAITS and not self._text.startswith(PROGRAM) else ""

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
        places = {PROGRAM if text.startswith(PROGRAM) else text for text in texts}  # its own are called from various lines
        self._num_parted = self._num_parted + 1 if all(texts) and len(places) > 1 else 0
        if self._num_parted < 2:
            return None
        each = "; ".join(f"rank {rank} {where}, in {text}" for rank, (where, text) in enumerate(zip(self.ranks.said(), texts[:8])))
        return UsageError(f"{self.ranks.name}: the ranks wait for each other in different collectives: {each}. {REMEDY}")


def _programs_collective(ident: int) -> str:
    """The collective of all ranks that a thread is in and that the program itself called; empty if there is none."""
    frame = sys._current_frames().get(ident)
    if frame is None or frame.f_code.co_filename != dist.distributed_c10d.__file__:
        return ""
    if frame.f_locals.get("group") not in (None, dist.group.WORLD):
        return ""  # of some ranks only, whose others may still come
    name = frame.f_code.co_name
    while frame is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
        name, frame = frame.f_code.co_name if frame.f_code.co_name != "wrapper" else name, frame.f_back
    if frame is None or os.path.dirname(frame.f_code.co_filename) == os.path.dirname(__file__):
        return ""  # the engine's
    return f"{PROGRAM}, {name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
