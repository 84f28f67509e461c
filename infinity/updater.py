"""The update of one chunk's record, in the place where it was read to: obtain it, compute, hand it to the writer.

Knows a chunk's segments, its gradient shard and the hyper-parameters of the step. Must not know when a chunk is due: its
callers decide that.
"""

# [Note: what an update depends on]
# The hyper-parameters are a snapshot (Hyper), so whatever a scheduler does after step() is of the next step. A parameter
# that no rank had a gradient for is skipped: no decay, no moments, and its step count, kept a chunk and parameter, stays.

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from infinity.adam import AdamScalars, NormAccumulator, adam_step
from infinity.events import Events, now
from infinity.gradients import Gradients
from infinity.lanes import Job, Lane
from infinity.records import STATES, WEIGHTS, Records
from infinity.residency import TORCH_DTYPES, ChunkState, ParameterState


@dataclass
class Hyper:
    """Hyper-parameters of one step: a copy of each parameter group's, and what every gradient is multiplied by."""

    groups: list[dict]
    decoupled: bool
    grad_scale: float = 1.0
    _scalars: dict[tuple[int, int], AdamScalars] = field(default_factory=dict)

    def scalars(self, group: int, step: int) -> AdamScalars:
        key = (group, step)
        if key not in self._scalars:
            self._scalars[key] = AdamScalars.of(
                **self.groups[group], step=step, grad_scale=self.grad_scale, decoupled=self.decoupled
            )
        return self._scalars[key]


class Updater:
    """Updates chunks in one lane, in the order in which they are begun. threads: of the host kernel."""

    def __init__(
        self,
        records: Records,
        gradients: Gradients,
        params: list[ParameterState],
        rank: int,
        events: Events,
        *,
        threads: int,
    ):
        self.records = records
        self.gradients = gradients
        self.params = params
        self.rank = rank
        self.events = events
        self.threads = threads
        self.lane = Lane("update")
        self._awaited: set[Job] = set()  # the last gradient job of each update that was begun and is not over
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
            self._compute(chunk, self.device_state(chunk), hyper)
            chunk.pending = None
            return
        weights = self.records.request(chunk, WEIGHTS, urgent=urgent)
        states = self.records.request(chunk, STATES, urgent=True)

        def work() -> None:
            self._update_on_host(chunk, weights, states, gradient_job, copy_job, hyper)

        self._awaited.add(gradient_job)
        chunk.updating = self.lane.push(lambda: self._run(work, gradient_job))
        chunk.pending = None

    def will_free_gradients(self) -> bool:
        """Whether an update is under way that waits for no more of its gradient."""
        return any(job.done for job in list(self._awaited))

    def close(self) -> None:
        self.lane.close()

    def _run(self, work, gradient_job: Job) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = self.failure or error
            self.records.fail(error)
            raise
        finally:
            self._awaited.discard(gradient_job)
            self.gradients.note_progress()

    def _update_on_host(self, chunk, weights, states, gradient_job, copy_job, hyper) -> None:
        entries = {WEIGHTS: weights.wait(), STATES: states.wait()}
        for entry in entries.values():
            self.records.settle(entry)
        gradient_job.wait()
        if copy_job is not None:
            event = copy_job.wait()
            if event is not None:
                event.synchronize()
        self.records.begin_update(*entries.values())
        self._compute(chunk, segments(chunk, entries[WEIGHTS].memory, entries[STATES].memory), hyper)
        self.records.write_back(chunk, entries)

    def device_state(self, chunk: ChunkState) -> dict[str, torch.Tensor]:
        begin = chunk.chunk.offset + self.rank * chunk.chunk.shard_numel
        weight = chunk.span.flat[begin : begin + chunk.record.numel]
        return {"weight": weight, **chunk.device_states}

    def _compute(self, chunk: ChunkState, state: dict[str, torch.Tensor], hyper: Hyper) -> None:
        start = now()
        update(chunk, self.params, state, self.gradients.tensor(chunk), hyper, threads=self.threads)
        self.gradients.release(chunk)
        self.events.moved("update", chunk.index, chunk.record.nbytes, start, now())


@dataclass(frozen=True)
class Run:
    """Neighbouring elements [start, end) of a shard that are updated alike."""

    start: int
    end: int
    group: int
    step: int


def runs(chunk: ChunkState, params: list[ParameterState]) -> list[Run]:
    """Cut the shard where the parameter group, the step count or the use changes, and count the steps.

    What lies between two parameters of one run is padding: zeros, which an update leaves zeros.
    """
    for param in chunk.received:
        if params[param].group is not None:
            chunk.steps[param] += 1
    found: list[Run] = []
    for piece in chunk.pieces:
        group = params[piece.param].group
        if group is None or piece.param not in chunk.received:
            continue
        step, end = chunk.steps[piece.param], piece.start + piece.numel
        last = found[-1] if found else None
        if last and (last.group, last.step) == (group, step) and not _between(chunk, last.end, piece.start):
            found[-1] = Run(last.start, end, group, step)
        else:
            found.append(Run(piece.start, end, group, step))
    return found


def _between(chunk: ChunkState, begin: int, end: int) -> bool:
    """Whether a parameter lies in [begin, end) of the shard."""
    return any(piece.start < end and piece.start + piece.numel > begin for piece in chunk.pieces)


def segments(chunk: ChunkState, weights, states) -> dict[str, torch.Tensor]:
    """The shard's segments by name, 1-D [shard_used], over two host entries' memory."""
    record = chunk.record
    found = {}
    for segment, offset in zip(record.segments, record.offsets, strict=True):
        dtype = TORCH_DTYPES[segment.dtype]
        if segment.name == "weight":
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
) -> None:
    """Update a shard in place. state: its segments; gradient: 1-D [shard_used], bf16 or fp32."""
    for run in runs(chunk, params):
        part = slice(run.start, run.end)
        adam_step(
            state["weight"][part],
            state["residual"][part] if "residual" in state else None,
            state["momentum"][part],
            state["variance"][part],
            gradient[part],
            hyper.scalars(run.group, run.step),
            threads=threads,
        )


def add_norm(chunk: ChunkState, gradient: torch.Tensor, total: NormAccumulator) -> None:
    """Add the squares of a shard's gradient; each piece begins on a block border of its parameter."""
    for piece in chunk.pieces:
        if piece.param in chunk.received:
            total.add(gradient[piece.start : piece.start + piece.numel])
