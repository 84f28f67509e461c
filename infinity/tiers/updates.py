"""The update of one chunk's record, in the place where it was read to: obtain it, compute, hand it to the writer.

Knows a chunk's segments, its gradient shard and the hyper-parameters of the step. Must not know when a chunk is due: its
callers decide that.
"""

# [Note: what an update depends on]
# The hyper-parameters are a snapshot (Hyper), so whatever a scheduler does after step() is of the next step. A parameter
# that no rank had a gradient for is skipped: no decay, no moments, and its step count, kept a chunk and parameter, stays.
#
# [Note: order of updates]
# They are begun as gradients complete: those of the last ops first. The next forward pass wants the first ops' first, and where
# updates take longer than the backward pass, it would wait for all of them. So a fetch hurries the update that it waits for:
# it passes the others, if its gradient and its record have their places in host memory already. What waits for a slot keeps its turn
# ([Note: order of grants] in records.py).

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from infinity.optim.adam import Dither, NormAccumulator
from infinity.optim.rules import Rule
from infinity.plan.record import ADAM_MOMENTS, GRADIENTS, STATES, WEIGHTS, Record
from infinity.system.events import Events, now
from infinity.system.lanes import Job, Lane
from infinity.tiers.gradients import Gradients
from infinity.tiers.records import Records
from infinity.tiers.state import TORCH_DTYPES, ChunkState, ParameterState


@dataclass
class Hyper:
    """Hyper-parameters of one step: the rule, a copy of each parameter group's, and what every gradient is multiplied by."""

    rule: Rule
    groups: list[dict]
    grad_scale: float = 1.0
    _scalars: dict[tuple[int, int], object] = field(default_factory=dict)

    def scalars(self, group: int, step: int) -> object:
        key = (group, step)
        if key not in self._scalars:
            self._scalars[key] = self.rule.scalars(self.groups[group], step)
        return self._scalars[key]


class Updater:
    """Updates chunks in one lane, in the order in which they are begun, but for those that are hurried.

    threads: of the host kernel. seed: of the random bits that round bf16 moments; None where moments are fp32. num_late: updates of a
    record in a row that may leave its moments on NVMe late.
    """

    def __init__(
        self,
        records: Records,
        gradients: Gradients,
        params: list[ParameterState],
        rank: int,
        events: Events,
        *,
        threads: int,
        seed: int | None,
        num_late: int = 0,
    ):
        self.records = records
        self.gradients = gradients
        self.params = params
        self.rank = rank
        self.events = events
        self.threads = threads
        self.seed = seed
        self.num_late = num_late
        self.lane = Lane("update")
        self._begun: deque[Job | None] = deque()  # the last gradient job of each update in the lane, in their order; None: no update
        self.failure: BaseException | None = None

    def begin(self, chunk: ChunkState, hyper: Hyper, *, urgent: bool) -> None:
        """Update a chunk once its record and gradient are in host memory; nobody holds its device copy.

        urgent: its record may take the slot of what is needed sooner, because gradients wait for this update.
        """
        copy_job = chunk.copy_job
        gradient_job, chunk.gradient_job = chunk.gradient_job, None  # handed over: step() sees what came after
        chunk.update_expected = False
        if chunk.on_device:  # in the training thread: on CUDA the compute stream orders it, on the CPU it has all cores
            gradient_job.wait()
            chunk.begin_change()
            with self.gradients.shard(chunk) as gradient:
                self._compute(chunk, self.device_state(chunk), gradient, hyper)
            self.take_snapshot(chunk)
            self.gradients.release(chunk)
            chunk.pending = None
            return
        with self.records.lock:  # at once, see Records.obtain_all
            weights = self.records.request(chunk, WEIGHTS, urgent=urgent)
            states = self.records.request(chunk, STATES, urgent=True)

        def work() -> None:
            self._update_on_host(chunk, weights, states, gradient_job, copy_job, hyper)

        def ready() -> bool:
            return gradient_stays and gradient_job.done and weights.done and states.done and (copy_job is None or copy_job.done)

        gradient_stays = chunk.extents[GRADIENTS] is None
        if gradient_job.done:
            self.records.request(chunk, GRADIENTS, pin=False)  # it may have left for NVMe
        with self.records.lock:
            self._begun.append(gradient_job)
        chunk.updating = self.lane.push(lambda: self._run(work, chunk.title, gradient_job), chunk.title, ready=ready)
        chunk.pending = None

    def hurry(self, chunk: ChunkState) -> None:
        """A fetch waits for the chunk's update: see [Note: order of updates]."""
        if chunk.updating is not None and not chunk.updating.done:
            self.lane.hurry(chunk.updating)

    def frees_gradient_soon(self) -> bool:
        """Whether what is at the head of the lane is an update that has all of its gradient, so that it goes on whatever the gc lane does.
        Those that pass it have theirs. Called with the records' lock held."""
        first = self._begun[0] if self._begun else None
        return first is not None and first.done

    def sum_squares(self, work: Callable[[], object]) -> Job:
        """Run in the lane what needs a gradient and leaves it where it is."""

        def run() -> object:
            try:
                return work()
            finally:
                self._over(None)

        with self.records.lock:
            self._begun.append(None)
        return self.lane.push(run)

    def drain(self) -> None:
        """Wait until every update that was begun is over, whether it succeeded or not."""
        self.lane.drain()

    def close(self) -> None:
        self.lane.close()

    def _run(self, work, what: str, gradient_job: Job) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = self.failure or error
            self.records.fail(error, f"{what} (update): ")
            raise
        finally:
            self._over(gradient_job)

    def _over(self, gradient_job: Job | None) -> None:
        with self.records.lock:
            self._begun.remove(gradient_job)
        self.records.look_again()

    def _update_on_host(self, chunk, weights, states, gradient_job, copy_job, hyper) -> None:
        gradient_job.wait()
        with self.gradients.shard(chunk) as gradient:  # see [Note: who holds gradients]
            self.records.hurry(weights)
            entries = {WEIGHTS: weights.wait(), STATES: states.wait()}
            for entry in entries.values():
                self.records.settle(entry)
            if copy_job is not None:
                event = copy_job.wait()
                if event is not None:
                    event.synchronize()
            clean = self.records.begin_update(chunk, entries)
            found = self._compute(chunk, segments(chunk, entries[WEIGHTS].memory, entries[STATES].memory), gradient, hyper)
            catch_up = None
            if chunk.late_left and clean and hyper.rule.can_advance:
                late_gradient(chunk.record, entries[STATES].memory.buffer).copy_(gradient)
                catch_up = CatchUp(chunk.record, found, hyper, self.params, self.seed)
            if chunk.late_left is not None:
                chunk.late_left = chunk.late_left - 1 if chunk.late_left else self.num_late
        self.gradients.release(chunk)
        if chunk.after_update is not None:
            chunk.after_update(chunk, entries)
        self.records.write_back(chunk, entries, catch_up)

    def device_state(self, chunk: ChunkState) -> dict[str, torch.Tensor]:
        return {"weight": chunk.span.flat[self._shard(chunk)], **chunk.device_states}

    def take_snapshot(self, chunk: ChunkState) -> None:
        """Remember the shard's weights on the device, where that is asked for."""
        if chunk.span.snapshot is not None:
            chunk.span.snapshot[self._shard(chunk)] = chunk.span.flat[self._shard(chunk)]

    def _shard(self, chunk: ChunkState) -> slice:
        begin = chunk.chunk.offset + self.rank * chunk.chunk.shard_numel
        return slice(begin, begin + chunk.record.numel)

    def _compute(self, chunk: ChunkState, state: dict[str, torch.Tensor], gradient: torch.Tensor, hyper: Hyper) -> list[Run]:
        start, on_device = now(), gradient.is_cuda
        first = self.events.device_mark() if on_device else None
        found = update(chunk, self.params, state, gradient, hyper, threads=self.threads, seed=self.seed)
        marks = (first, self.events.device_mark()) if on_device else None
        self.events.moved("update", chunk.index, chunk.record.nbytes, start, now(), marks)
        return found


@dataclass(slots=True)
class Run:
    """Neighbouring elements [start, end) of a shard that are updated alike; the first is element `param_start` of `param`."""

    start: int
    end: int
    group: int
    step: int
    param: int
    param_start: int


def runs(chunk: ChunkState, params: list[ParameterState], *, merge: bool) -> list[Run]:
    """Cut the shard where the parameter group, the step count or the use changes, and count the steps.

    merge: let a run go on over several parameters. What lies between these is padding: zeros, which an update leaves zeros.
    """
    for param in chunk.received:
        if params[param].group is not None:
            chunk.steps[param] += 1
    found: list[Run] = []
    adjoins = False  # whether the last run ends with the piece before
    for piece in chunk.pieces:
        group = params[piece.param].group
        if group is None or piece.param not in chunk.received:
            adjoins = False
            continue
        step, end = chunk.steps[piece.param], piece.start + piece.numel
        if merge and adjoins and (found[-1].group, found[-1].step) == (group, step):
            found[-1].end = end
        else:
            found.append(Run(piece.start, end, group, step, piece.param, piece.param_start))
        adjoins = True
    return found


def segments(chunk: ChunkState, weights, states) -> dict[str, torch.Tensor]:
    """The shard's segments by name, 1-D [shard_used], over the memory of two host entries, or of one where the other is None."""
    record = chunk.record
    found = {}
    for segment, offset in zip(record.segments, record.offsets, strict=True):
        dtype = TORCH_DTYPES[segment.dtype]
        if segment.name == "weight":
            if weights is not None:
                found["weight"] = weights.tensor(dtype, 0, record.numel)
        elif states is not None:
            found[segment.name] = states.tensor(dtype, offset - record.states_offset, record.numel)
    return found


def update(
    chunk: ChunkState,
    params: list[ParameterState],
    state: dict[str, torch.Tensor],
    gradient: torch.Tensor,
    hyper: Hyper,
    *,
    threads: int,
    seed: int | None,
) -> list[Run]:
    """Update a shard in place. state: its segments; gradient: 1-D [shard_used], bf16, fp16 or fp32. Returns what was updated."""
    found = runs(chunk, params, merge=seed is None)
    for run in found:
        for start, end, dither in _dithered(run, params, seed):
            shard = {name: segment[start:end] for name, segment in state.items()}
            scalars = hyper.scalars(run.group, run.step)
            hyper.rule.apply(shard, gradient[start:end], scalars, hyper.grad_scale, dither=dither, threads=threads)
    return found


def late_gradient(record: Record, buffer: memoryview) -> torch.Tensor:
    """bf16 [shard_used]: the gradient behind a record's states, where these have room for one."""
    _, offset, _ = record.late_gradient
    return torch.frombuffer(buffer, dtype=torch.bfloat16, count=record.numel, offset=offset)


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Does an update to moments that lack it, in memory that holds a record's states and the update's gradient behind them."""

    record: Record
    runs: list[Run]
    hyper: Hyper
    params: list[ParameterState]
    seed: int | None  # as of Updater

    def __call__(self, buffer: memoryview) -> None:
        gradient = late_gradient(self.record, buffer)
        moments = {
            segment.name: torch.frombuffer(buffer, dtype=TORCH_DTYPES[segment.dtype], count=self.record.numel, offset=offset)
            for segment, offset, _ in self.record.of(STATES)
            if segment.name in ADAM_MOMENTS
        }
        rule, grad_scale = self.hyper.rule, self.hyper.grad_scale
        for run in self.runs:
            for start, end, dither in _dithered(run, self.params, self.seed):
                shard = {name: segment[start:end] for name, segment in moments.items()}
                rule.advance(shard, gradient[start:end], self.hyper.scalars(run.group, run.step), grad_scale, dither=dither)


def _dithered(run: Run, params: list[ParameterState], seed: int | None) -> Iterator[tuple[int, int, Dither | None]]:
    """The parts of a run that one Dither serves: all of it, but for parameters of over 2^32 elements."""
    if seed is None:
        yield run.start, run.end, None
        return
    start = run.start
    while start < run.end:
        index = run.param_start + start - run.start
        end = min(run.end, start + (1 << 32) - index % (1 << 32))
        yield start, end, Dither.of(seed, params[run.param].name, run.step, index)
        start = end


def add_norm(chunk: ChunkState, gradient: torch.Tensor, total: NormAccumulator) -> None:
    """Add the squares of a shard's gradient; each piece begins on a block border of its parameter."""
    for piece in chunk.pieces:
        if piece.param in chunk.received:
            total.add(gradient[piece.start : piece.start + piece.numel])
