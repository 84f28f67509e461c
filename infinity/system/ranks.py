"""Communication between ranks: gathers shards into chunks, reduces gradients into shards, and lets ranks agree.

Only this module, the training command and dcp_*.py call torch.distributed. Knows flat tensors and ranks. Must not know parameters, plans or
tiers. Two calls have no public name in torch.distributed: the launcher's store, and the abort of a group.
Only one thread calls device collectives, in the plan's order. If two ranks issue two gathers of equal size in different orders, the
gathers do not fail: each delivers the other's data.

[Note: how a process ends]
A Python thread that is in C++ code when the interpreter ends aborts the process (SIGABRT). The engine is therefore closed first, which
ends its threads. On several ranks the process then waits some seconds for the other ranks to leave, because this program may have had
less work than the others.

[Note: what ranks agree on]
Ranks that disagree meet in different exchanges, and gloo ends a process whose peer sends more than expected. All exchanges of few
numbers therefore have one size, FRAME_NUMEL, and begin with the count of numbers. If the counts differ, every rank gets an error.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import datetime
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from infinity.errors import CheckpointError, PeerError, UsageError
from infinity.system import failure_watch as watch
from infinity.system.collectives import Collectives
from infinity.system.failure_watch import PROGRAM, REMEDY, Place, Watch

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CONTROL_TIMEOUT_S = 600
FRAME_NUMEL = 64
LINGER_S = 10.0  # how long an ending process waits for the others to end

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_numbers = itertools.count()

Result = TypeVar("Result")


class Ranks:
    """This process among its peers. One process without torch.distributed is rank 0 of 1 and never communicates.

    Creates three groups: `data` (nccl on CUDA, gloo on the CPU) moves chunks; `control` (gloo) is for agreements of the training
    threads, and `order` (gloo) for those of the threads that call `data`. Every rank must construct this object at the same point of the
    program. alone: the ranks are this process only, although there are others; then each process may construct it at any time.
    """

    def __init__(self, device: torch.device, *, alone: bool = False):
        self.rank, self.world = 0, 1
        self.data = self.control = self.order = None
        self.name = "this process"
        self._num_users = 0
        self._store = None
        self._posted: dict[str, bytes] = {}  # used without other ranks
        self._place = Place(_programs_collective)
        self._watch: Watch | None = None  # used with other ranks
        self._collectives = Collectives(self.name, self._place, None)
        grouped = dist.is_available() and dist.is_initialized() and not alone
        if not grouped and not alone and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            backend = "nccl" if device.type == "cuda" else "gloo"
            raise UsageError(
                f"this is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE) that are not connected: each would train a "
                f'separate model. Add the line torch.distributed.init_process_group("{backend}") before infinity.init or '
                f"infinity.offload; for a single process, unset WORLD_SIZE."
            )
        if grouped and dist.get_world_size() > 1:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.name = f"rank {self.rank} of {self.world}"
            launchers = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"infinity-{next(_numbers)}", launchers)
            self._watch = Watch(self._store, _keeper_of(launchers), self.rank, self.world, self.name, self._place, self._abort)
            self._collectives = Collectives(self.name, self._place, self._watch)
            with self.at("the making of the engine"):
                self._watch.meet(launchers, CONTROL_TIMEOUT_S)
                timeout = datetime.timedelta(seconds=CONTROL_TIMEOUT_S)
                self.data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
                self.control = dist.new_group(backend="gloo", timeout=timeout)
                self.order = dist.new_group(backend="gloo", timeout=timeout)
            self._watch.start()

    @property
    def are_several(self) -> bool:
        """Whether this process has peers. Without peers nothing communicates."""
        return self.world > 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports, and whose values count where ranks may differ."""
        return self.rank == 0

    @property
    def label(self) -> str:
        """The beginning of a message: "rank 0 of 2, ", or nothing without peers."""
        return f"{self.name}, " if self.are_several else ""

    @property
    def num_local(self) -> int:
        """Number of ranks on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))

    @property
    def failure(self) -> BaseException | None:
        """The failure of this rank, or a PeerError."""
        return self._collectives.failure

    @property
    def has_left_behind(self) -> bool:
        """Whether an abandoned collective may still write to its tensors."""
        return self._collectives.has_left_behind

    @contextlib.contextmanager
    def at(self, stage: str):
        """Tell the other ranks this rank's activity; without a stage, the rank is in a step."""
        with self._place.at(stage):
            if self._watch is not None:
                self._watch.say()  # at once: an error here may end this rank
            yield

    def count_step(self) -> None:
        """Count one optimizer step, for the other ranks to see."""
        self._place.num_steps += 1

    def report(self, error: BaseException, what: str = "") -> None:
        """Tell the other ranks that this rank has failed, and in which work; see [Note: how a failure reaches the other ranks] in
        failure_watch.py.
        """
        if self._watch is not None:
            self._watch.failure.note(error, what)

    def listen(self, listener: Callable[[BaseException], None]) -> None:
        """Call a method with the first failure of any rank, from another thread."""
        if self._watch is not None:
            self._watch.listen(listener)

    def _abort(self) -> None:
        if dist.get_backend(data := self.data) == "nccl":
            data._get_backend(torch.device("cuda")).abort()

    def gather(self, flat: torch.Tensor, what: str) -> None:
        """All-gather in place. flat: 1-D [world * shard_numel] with this rank's shard in place. what: for errors."""
        shard_numel = flat.numel() // self.world
        shard = flat[self.rank * shard_numel : (self.rank + 1) * shard_numel]
        self._move(lambda **options: _all_gather(flat, shard, group=self.data, **options), flat, f"the all-gather of {what}")

    def reduce_scatter(self, flat: torch.Tensor, what: str) -> torch.Tensor:
        """Sum a 1-D [world * n] tensor over the ranks; returns this rank's [n]. what: for errors."""
        shard = torch.empty(flat.numel() // self.world, dtype=flat.dtype, device=flat.device)
        self._move(lambda **options: _reduce_scatter(shard, flat, group=self.data, **options), flat, f"the reduce-scatter of {what}")
        return shard

    def _move(self, begin: Callable, flat: torch.Tensor, what: str) -> None:
        if flat.is_cuda:  # nccl's collectives follow the stream's order, and can be aborted
            self._collectives.run(begin, what, "lane")
        else:
            self._collectives.run(lambda: begin(async_op=True), what, "lane")

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a small host tensor over the ranks, in place."""
        if self.are_several:
            self._collectives.run(lambda: dist.all_reduce(tensor, group=self.control, async_op=True), f"a sum of {tensor.numel()} numbers")
        return tensor

    def most(self, numbers: list, group=None, what: str = "") -> list:
        """The maximum over all ranks of each number; numbers may be nested lists. See [Note: what ranks agree on]. what: for errors; group:
        `control` if None. Raises UsageError on every rank if a rank passes another count of numbers.
        """
        if not self.are_several:
            return numbers
        mine = np.array(numbers) + 0  # int64 or float64, whatever PyTorch's defaults
        count, what = mine.size, what or f"a maximum of {mine.size} numbers"
        framed = np.concatenate([[count, -count], mine.ravel(), np.zeros(max(0, FRAME_NUMEL - 2 - count), mine.dtype)])
        framed = torch.from_numpy(framed).clone()  # freeing NumPy's memory needs Python, and gloo may hold this memory after Python has ended
        for part in (framed[:FRAME_NUMEL], framed[FRAME_NUMEL:]):
            if part.numel():
                begin = functools.partial(dist.all_reduce, part, dist.ReduceOp.MAX, group or self.control, async_op=True)
                self._collectives.run(begin, what, "control" if group is None else "lane")
            if framed[:2].tolist() != [count, -count]:
                where = f"this rank waits for all in {what}, and another rank in a different exchange"
                raise UsageError(f"{self.name}: the ranks have parted: {where}. {REMEDY}")
        return framed[2 : 2 + count].view(mine.shape).tolist()

    def least(self, numbers: list) -> list:
        """Like `most`, the minimum."""
        return _negated(self.most(_negated(numbers)))

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Copy the source's host tensor to every rank, in place."""
        if self.are_several:
            begin = lambda: dist.broadcast(tensor, src=source, group=self.control, async_op=True)
            self._collectives.run(begin, f"a broadcast of {tensor.numel()} numbers")
        return tensor

    def all_gather_slices(self, piece: torch.Tensor) -> torch.Tensor:
        """Concatenate equal 1-D host tensors of all ranks."""
        if not self.are_several:
            return piece
        whole = torch.empty(self.world * piece.numel(), dtype=piece.dtype, device="cpu")
        self._collectives.run(lambda: _all_gather(whole, piece, group=self.control, async_op=True), f"a gather of {whole.numel()} numbers")
        return whole

    def exchange(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, in order of rank."""
        if not self.are_several:
            return [mine]
        sizes = self.all_gather_slices(torch.tensor([len(mine)], device="cpu")).tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.uint8, device="cpu")
        whole = self.all_gather_slices(padded).view(self.world, -1)
        return [whole[rank, :size].numpy().tobytes() for rank, size in enumerate(sizes)]

    def together(self, work: Callable[[], Result], undo: Callable[[Result], None] | None = None) -> Result:
        """Run `work` on every rank; if it fails on any rank, raise on all. undo: called with the result of each rank that succeeded.

        A rank that succeeded raises CheckpointError with the errors of the others.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # each rank waits for the others' answers
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
        """Publish a value for the other ranks. Like `look` and `forget`, callable from any thread, and without waits."""
        if self._store is None:
            self._posted[key] = value
        else:
            self._store.set(key, value)

    def look(self, key: str, rank: int = 0) -> bytes | None:
        """The value that a rank has posted, or None. Raises the failure of another rank, or PeerError if `rank` is silent."""
        self._collectives.check()
        if self._store is None:
            return self._posted.get(key)
        if self._store.check([key]):
            return self._store.get(key)
        self._watch.check_is_heard(rank)
        return None

    def forget(self, key: str) -> None:
        """Remove a value that no rank needs any more."""
        if self._store is None:
            self._posted.pop(key, None)
        else:
            self._store.delete_key(key)

    def agree(self, *values: int, group=None, what: str = "an agreement between the training threads") -> bool:
        """Whether every rank passed the same integers. what: for errors."""
        if not self.are_several:
            return True
        numbers = [*values, *(-value for value in values)]
        return self.most(numbers, group, what) == numbers

    def require_order(self, what: str, *values: int) -> None:
        """Raise UsageError on every rank if the ranks are about to issue different collectives."""
        if not self.agree(*values, group=self.order, what=f"the exchange about {what}"):
            raise UsageError(f"{self.name}: the ranks disagree about {what} (here: {values}). {REMEDY}")

    def barrier(self) -> None:
        if self.are_several:
            self._collectives.run(lambda: dist.barrier(group=self.control, async_op=True), "a barrier")

    @contextlib.contextmanager
    def joined(self):
        """Use the groups while engines are built. If no engine results, the groups are freed."""
        self.join()
        try:
            yield self
        finally:
            self.leave()

    def join(self) -> None:
        """One more engine uses the groups: all engines of one `infinity.init` share them."""
        self._num_users += 1

    def leave(self) -> None:
        """One engine less uses the groups; the last one frees them."""
        self._num_users -= 1
        if not self._num_users:
            self.close()

    def close(self) -> None:
        """Leave the other ranks; idempotent. Waits for no rank."""
        if self._watch is None or self._watch.is_closed:
            return
        self._watch.close()
        groups = [group for group in (self.data, self.control, self.order) if group is not None]
        self.data = self.control = self.order = None
        for group in groups:
            if self.has_left_behind or self.failure is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # the destructor would wait for collectives without end
            elif dist.is_initialized():
                with contextlib.suppress(ValueError):  # the program may have destroyed all groups
                    dist.destroy_process_group(group)
        _closed.append(self._watch)

    @property
    def is_stuck(self) -> bool:
        """Whether this object is closed and the watch's thread is still in the store."""
        return self._watch is not None and self._watch.is_stuck


_make: Callable[[torch.device], Ranks] = Ranks


def make_ranks(device: torch.device) -> Ranks:
    """The ranks of a new engine."""
    return _make(device)


def use_ranks(make: Callable[[torch.device], Ranks]) -> Callable[[torch.device], Ranks]:
    """Let engines of this process that start later have other ranks, such as simulated ones. Returns the function that was in use before."""
    global _make
    before, _make = _make, make
    return before


def _keeper_of(store) -> int | None:
    """The rank whose process keeps the launcher's store. None if no rank does: torchrun's agent, or a directory."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not is_agents else None


def _negated(numbers: list) -> list:
    return (-(np.array(numbers) + 0)).tolist()  # + 0: for booleans, too


def end_process(error: BaseException | None) -> bool:
    """Called when all engines are closed and the process ends. error: the uncaught exception, or None.

    If the program ends without an own error, prints the failure of another rank. Returns whether another rank has failed. See
    [Note: how a process ends].
    """
    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not _is_parents
    if grouped:
        with contextlib.suppress(Exception):  # for ranks that are about to create an engine with this rank
            how = "well" if error is None else f"with {type(error).__name__}: {error}"
            dist.distributed_c10d._get_default_store().set(f"infinity-ended{dist.get_rank()}", how)
    deadline = time.monotonic() + LINGER_S
    for each in _closed:
        with contextlib.suppress(Exception):  # the store is gone, and the keeper has ended
            while not each.others_end() and time.monotonic() < deadline - (LINGER_S - 6 * watch.WATCH_S if each.failure.error else 0):
                time.sleep(watch.WATCH_S / 5)
    if grouped and not dist.get_rank() and _closed:
        time.sleep(watch.WATCH_S)  # the store may end with this process while others still look
    failed = [each for each in _closed if isinstance(each.failure.error, PeerError) and not each.store_is_gone]
    if failed and not failed[0].was_printed and (error is None or type(error) is RuntimeError or isinstance(error, dist.DistError)):
        print(f"infinity: PeerError: {failed[0].failure.error}", file=sys.stderr)
    return bool(failed)


def _forget_parents() -> None:
    """In a forked child: do not touch the parent's engines and connection to the store."""
    global _is_parents
    _closed.clear()
    _is_parents = dist.is_available() and dist.is_initialized()


_closed: collections.deque[Watch] = collections.deque(maxlen=8)
_is_parents = False  # whether the process group belongs to the parent process
os.register_at_fork(after_in_child=_forget_parents)


def _programs_collective(ident: int) -> str:
    """The collective over all ranks that the program called directly and that the thread is in; "" if there is none."""
    frame = sys._current_frames().get(ident)
    if frame is None or frame.f_code.co_filename != dist.distributed_c10d.__file__:
        return ""
    if frame.f_locals.get("group") not in (None, dist.group.WORLD):
        return ""  # a group of some ranks, whose other members may still come
    name = frame.f_code.co_name
    while frame is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename:
        name, frame = frame.f_code.co_name if frame.f_code.co_name != "wrapper" else name, frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_PACKAGE):
        return ""  # the engine's own collective
    return f"{PROGRAM}, {name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
