"""Ranks: how shards become chunks and gradients become shards.

The one module that talks to torch.distributed, beside the training command, which starts and ends it, and dcp_*.py. Knows flat tensors and
ranks; must not know parameters, plans or tiers. Two calls have no public name there: the store, and a group's abort.
Device collectives are called by one thread only, in the plan's order: two gathers of equal size that are issued in
different orders on two ranks do not fail, they deliver each other's data.

# [Note: how a process ends]
# A thread of Python's that is in C++ code when the interpreter ends takes the process along (SIGABRT). So whoever has an engine closes it
# first, which ends its threads; on several ranks the process then looks for some seconds whether the others leave as well, for the
# program may have ended here because it had less to do than there.

# [Note: what ranks agree on]
# Ranks that have parted meet in exchanges that are not each other's, and gloo ends a process whose peer sends more than it awaits. So all
# exchanges of few numbers are of one size, FRAME_NUMEL, and begin with how many they are: where ranks differ in that, each has an error.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import datetime
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from infinity.errors import CheckpointError, PeerError, UsageError
from infinity.system import interrupts
from infinity.system import failure_watch as watch
from infinity.system.waits import waits
from infinity.system.failure_watch import PROGRAM, REMEDY, Place, Watch

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CONTROL_TIMEOUT_S = 600
FRAME_NUMEL = 64
LINGER_S = 10.0  # how long a process that ends looks whether the others end, too

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_numbers = itertools.count()

Result = TypeVar("Result")


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
        self.has_left_behind = False  # a collective that may still write to its tensors
        self._num_users = 0
        self._store = None
        self._posted: dict[str, bytes] = {}  # where there is no other rank
        self._place = Place(_programs_collective)
        self._watch: Watch | None = None  # where there are others
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
            launchers = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"infinity-{next(_numbers)}", launchers)
            self._watch = Watch(self._store, _keeper_of(launchers), self.rank, self.world, self.name, self._place, self._abort)
            with self.at("the making of the engine"):
                self._watch.meet(launchers, CONTROL_TIMEOUT_S)
                timeout = datetime.timedelta(seconds=CONTROL_TIMEOUT_S)
                self.data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
                self.control = dist.new_group(backend="gloo", timeout=timeout)
                self.order = dist.new_group(backend="gloo", timeout=timeout)
            self._watch.start()

    @property
    def num_local(self) -> int:
        """Ranks on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))

    @property
    def failure(self) -> BaseException | None:
        """Of this rank, or a PeerError."""
        return self._watch.failure.error if self._watch is not None else None

    @contextlib.contextmanager
    def at(self, stage: str):
        """For the others to know where this rank is; else it is in a step."""
        with self._place.at(stage):
            if self._watch is not None:
                self._watch.say()  # at once: the first thing that goes wrong here may be the last
            yield

    def count_step(self) -> None:
        """The optimizer has made one more; for the others to know."""
        self._place.num_steps += 1

    def report(self, error: BaseException, what: str = "") -> None:
        """Tell the other ranks that this one cannot go on, and at what; see [Note: how a failure reaches the other ranks] in failure_watch.py."""
        if self._watch is not None:
            self._watch.failure.note(error, what)

    def listen(self, listener: Callable[[BaseException], None]) -> None:
        """Have a method told of the first failure of any rank, from a thread of its own."""
        if self._watch is not None:
            self._watch.listen(listener)

    def _abort(self) -> None:
        if dist.get_backend(data := self.data) == "nccl":
            data._get_backend(torch.device("cuda")).abort()

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

    def most(self, numbers: list, group=None, what: str = "") -> list:
        """Each number, or number in lists of them, as it is largest on any rank; see [Note: what ranks agree on]. what: for errors; group:
        `control` if None. Raises UsageError, on every rank, where one asks for another count of them."""
        if self.world == 1:
            return numbers
        mine = np.array(numbers) + 0  # int64 or float64, whatever PyTorch's defaults are
        count, what = mine.size, what or f"a maximum of {mine.size} numbers"
        framed = np.concatenate([[count, -count], mine.ravel(), np.zeros(max(0, FRAME_NUMEL - 2 - count), mine.dtype)])
        framed = torch.from_numpy(framed).clone()  # NumPy's memory needs Python to be freed, and gloo may have it when that has ended
        for part in (framed[:FRAME_NUMEL], framed[FRAME_NUMEL:]):
            if part.numel():
                begin = functools.partial(dist.all_reduce, part, dist.ReduceOp.MAX, group or self.control, async_op=True)
                self._run(begin, what, "control" if group is None else "lane")
            if framed[:2].tolist() != [count, -count]:
                raise UsageError(f"{self.name}: the ranks have parted; here all are waited for in {what}, elsewhere in another. {REMEDY}")
        return framed[2 : 2 + count].view(mine.shape).tolist()

    def least(self, numbers: list) -> list:
        """As `most`, the smallest."""
        return _negated(self.most(_negated(numbers)))

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
        whole = torch.empty(self.world * piece.numel(), dtype=piece.dtype, device="cpu")
        self._run(lambda: _all_gather(whole, piece, group=self.control, async_op=True), f"a gather of {whole.numel()} numbers")
        return whole

    def exchange(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank."""
        if self.world == 1:
            return [mine]
        sizes = self.all_gather_slices(torch.tensor([len(mine)], device="cpu")).tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8, device="cpu")
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
        self._watch.check_is_heard(rank)
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
        numbers = [*values, *(-value for value in values)]
        return self.most(numbers, group, what) == numbers

    def require_order(self, what: str, *values: int) -> None:
        """Raise UsageError, on every rank, where the ranks are about to issue different collectives."""
        if not self.agree(*values, group=self.order, what=f"the exchange about {what}"):
            raise UsageError(f"{self.name}: the ranks disagree about {what} (here: {values}). {REMEDY}")

    def _run(self, begin: Callable[[], dist.Work | None], what: str, where: str = "control") -> None:
        """A collective, until it is done unless a rank has failed; one that fails by itself does for what ended another rank.

        A rank that failed has left one out: with its next one it would meet the others in that.
        """
        self._check()
        if where == "control" and threading.current_thread().name != interrupts.SHIELD:
            self._place.training = threading.get_ident()
        with self._place.inside(where, what), waits(lambda: f"{self._watch.late()} in {what}"):
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
            work.wait(datetime.timedelta(seconds=watch.WATCH_S))
        except RuntimeError:
            if not work.is_completed():
                if self.failure is not None:
                    self.has_left_behind = True
                    raise _copy(self.failure) from None
                return False
            work.wait()  # it was over since; or this raises what went wrong
        return True

    def _explain(self, what: str, error: RuntimeError) -> BaseException:
        """Why a collective has failed."""
        if (reason := self._watch.reason_of(what)) is not None:
            return _copy(reason)
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
        if self._watch is None or self._watch.is_closed:
            return
        self._watch.close()
        groups = [group for group in (self.data, self.control, self.order) if group is not None]
        self.data = self.control = self.order = None
        for group in groups:
            if self.has_left_behind or self.failure is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # its end would wait for what it has begun, and for ever
            elif dist.is_initialized():
                with contextlib.suppress(ValueError):  # the program may have destroyed all groups
                    dist.destroy_process_group(group)
        _closed.append(self._watch)

    @property
    def is_stuck(self) -> bool:
        """Closed, and its thread is still in the store."""
        return self._watch is not None and self._watch.is_stuck


def _keeper_of(store) -> int | None:
    """The rank whose process keeps the launcher's store, None if no rank does: torchrun's agent, or a directory."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not is_agents else None


def _negated(numbers: list) -> list:
    return (-(np.array(numbers) + 0)).tolist()  # + 0: of what is true or false, too


def _copy(error: BaseException) -> BaseException:
    """For each thread that meets it one, else its traceback would be all of theirs."""
    try:
        return copy.copy(error)
    except Exception:  # one of the program's, made in its own way
        return error


def end_process(error: BaseException | None) -> bool:
    """All engines are closed and the process ends; error: what it ends with, which nobody caught.

    Prints what another rank failed with, where the program ends otherwise and not with an error of its own; whether one has. See
    [Note: how a process ends].
    """
    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not _is_parents
    if grouped:
        with contextlib.suppress(Exception):  # whoever is to make an engine with this rank
            how = "well" if error is None else f"with {type(error).__name__}: {error}"
            dist.distributed_c10d._get_default_store().set(f"infinity-ended{dist.get_rank()}", how)
    deadline = time.monotonic() + LINGER_S
    for each in _closed:
        with contextlib.suppress(Exception):  # the store is gone, and who kept it has ended
            while not each.others_end() and time.monotonic() < deadline - (LINGER_S - 6 * watch.WATCH_S if each.failure.error else 0):
                time.sleep(watch.WATCH_S / 5)
    if grouped and not dist.get_rank() and _closed:
        time.sleep(watch.WATCH_S)  # the store may end with this process, and others look
    failed = [each for each in _closed if isinstance(each.failure.error, PeerError) and not each.store_is_gone]
    if failed and not failed[0].was_printed and (error is None or type(error) is RuntimeError or isinstance(error, dist.DistError)):
        print(f"infinity: PeerError: {failed[0].failure.error}", file=sys.stderr)
    return bool(failed)


def _forget_parents() -> None:
    """In a forked child: the parent's engines and its connection to the store are not to be touched."""
    global _is_parents
    _closed.clear()
    _is_parents = dist.is_available() and dist.is_initialized()


_closed: collections.deque[Watch] = collections.deque(maxlen=8)
_is_parents = False  # the process group
os.register_at_fork(after_in_child=_forget_parents)


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
    if frame is None or frame.f_code.co_filename.startswith(_PACKAGE):
        return ""  # the engine's
    return f"{PROGRAM}, {name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
