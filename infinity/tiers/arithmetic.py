"""Computes the update of one shard: finds the runs of elements with equal hyper-parameters, and applies the optimizer's rule to each run.

Knows the pieces of a chunk, the parameters that had a gradient, and which rules have kernels for a device. Must not know the place of the
shard, or the time of the update.
"""

# [Note: inputs of an update]
# Hyper is a snapshot of the hyper-parameters. Changes by a scheduler after step() apply to the next step. If no rank had a gradient of a
# parameter, the update skips the parameter: no weight decay, no new moments, and the same step count. Each chunk counts the steps of each
# parameter.

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from infinity.formats.dtypes import TORCH_DTYPES
from infinity.formats.format import Format
from infinity.optim import average
from infinity.optim.adam import BLOCK_NUMEL, Dither, NormAccumulator
from infinity.optim.average import AverageStep
from infinity.optim.rules import AdamRule, Rule, unit_shape
from infinity.optim.shard import Shard
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.unit_updates import Unit, UnitUpdates


@dataclass
class Hyper:
    """Hyper-parameters of one step: the rule and a copy of each parameter group, and the factor of all gradients. average: the step of the
    average of the weights, if records have one."""

    rules: list[Rule]
    groups: list[dict]
    grad_scale: float = 1.0
    average: AverageStep | None = None
    _scalars: dict[tuple[int, int], object] = field(default_factory=dict)

    def scalars(self, group: int, step: int) -> object:
        key = (group, step)
        if key not in self._scalars:
            self._scalars[key] = self.rules[group].scalars(self.groups[group], step)
        return self._scalars[key]

    def have_two_parts(self, params: Iterable[ParameterState]) -> bool:
        """Whether the rules of all these parameters have `apply_weights` and `apply_moments`."""
        return all(self.rules[group].has_two_parts for group in {param.group for param in params} - {None})


@dataclass(frozen=True)
class Processor:
    """The means of an update. threads: of the host kernel. units: for rules of whole matrices or parameters."""

    threads: int
    units: UnitUpdates


def update(
    chunk: ChunkState,
    params: list[ParameterState],
    state: Shard,
    gradient: torch.Tensor,
    hyper: Hyper,
    processor: Processor,
    *,
    seed: int | None,
    keeps_moments: bool = False,
) -> Generator[None, None, Computed]:
    """Update a shard in place: a generator, which yields while the device updates units of host memory. state: segments of the shard.
    gradient: 1-D [shard_used], bf16, fp16 or fp32. seed: of `Updater`. keeps_moments: change only weights. The caller then calls
    `Computed.update_moments`. The rules must have two parts."""
    if hyper.average is not None:
        advance_average(chunk, state, hyper.average.before)
    computed = yield from _update(chunk, params, state, gradient, hyper, processor, seed, keeps_moments)
    if hyper.average is not None:
        advance_average(chunk, state, hyper.average)
    return computed


def advance_average(chunk: ChunkState, state: Shard, step: AverageStep) -> None:
    """Bring the average of a shard to a step, see [Note: the average of the weights] in optim/average.py."""
    if chunk.num_averaged < step.number:
        average.advance(state, step, num_done=chunk.num_averaged)
        chunk.note_average(step.number)


def _update(chunk, params, state, gradient, hyper, processor, seed, keeps_moments) -> Generator[None, None, Computed]:
    is_elementwise = chunk.record.format.unit == "element"
    computed = Computed(runs(chunk, params, merge=seed is None and is_elementwise), hyper, params, seed)
    if not is_elementwise:
        yield from processor.units.update(unit for run in computed.runs for unit in _units(run, state, gradient, computed))
        return computed
    for run, part, dither in computed.parts():
        rule, shard, scalars = hyper.rules[run.group], state.part(part.start, part.stop), hyper.scalars(run.group, run.step)
        apply = rule.apply_weights if keeps_moments else rule.apply
        apply(shard, gradient[part], scalars, hyper.grad_scale, dither=dither, threads=processor.threads)
    return computed


def _units(run: Run, state: Shard, gradient: torch.Tensor, computed: Computed) -> Iterator[Unit]:
    """The units of a run. If units do not begin at block borders of the storage, the whole run is one."""
    hyper, param = computed.hyper, computed.params[run.param]
    rule, scalars = hyper.rules[run.group], hyper.scalars(run.group, run.step)
    shape = unit_shape(rule.unit, param.shape)
    numel = math.prod(shape)
    if numel % state.format.block:
        numel = run.end - run.start
    for begin in range(run.start, run.end, numel):
        index = run.param_start + begin - run.start
        dither = None if computed.seed is None else Dither.of(computed.seed, param.name, run.step, index)
        part = state.part(begin, begin + numel)
        yield Unit(part, gradient[begin : begin + numel], rule, scalars, hyper.grad_scale, dither, shape)


@dataclass(frozen=True, slots=True)
class Computed:
    """The inputs of an update of a shard. A replay of the update needs them. seed: see `Updater`."""

    runs: list[Run]
    hyper: Hyper
    params: list[ParameterState]
    seed: int | None

    @property
    def can_advance(self) -> bool:
        """Whether `advance` can replay the update of each parameter."""
        return all(self.hyper.rules[run.group].can_advance for run in self.runs)

    def parts(self) -> Iterator[tuple[Run, slice, Dither | None]]:
        """The runs, each with its slice of the shard and the random bits. A run of more than 2^32 elements has several slices."""
        for run in self.runs:
            for start, end, dither in _dithered(run, self.params, self.seed):
                yield run, slice(start, end), dither

    def advance(self, moments: dict[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """Replay the update on moments in place. moments: by name, 1-D [shard_used]. gradient: of the update."""
        self._on_moments("advance", moments, gradient)

    def update_moments(self, moments: dict[str, torch.Tensor], gradient: torch.Tensor, *, threads: int) -> None:
        """Finish an update that has changed only weights. Arguments as of `advance`. threads: of `Updater`."""
        self._on_moments("apply_moments", moments, gradient, threads=threads)

    def _on_moments(self, change: str, moments: dict[str, torch.Tensor], gradient: torch.Tensor, **how: int) -> None:
        """Call the method `change` of each run's rule."""
        for run, part, dither in self.parts():
            shard = {name: segment[part] for name, segment in moments.items()}
            scalars = self.hyper.scalars(run.group, run.step)
            getattr(self.hyper.rules[run.group], change)(shard, gradient[part], scalars, self.hyper.grad_scale, dither=dither, **how)


@dataclass(slots=True)
class Run:
    """Elements [start, end) of a shard with equal hyper-parameters. The first of them is element `param_start` of `param`."""

    start: int
    end: int
    group: int
    step: int
    param: int
    param_start: int


def runs(chunk: ChunkState, params: list[ParameterState], *, merge: bool) -> list[Run]:
    """Cut the shard into runs and count the steps. A run ends where the parameter group, the step count or the use of parameters changes.

    merge: a run may contain several parameters. The padding between them is zeros, and an update of zeros gives zeros.
    """
    for param in chunk.gradient.received:
        if params[param].group is not None:
            chunk.steps[param] += 1
    found: list[Run] = []
    adjoins = False  # whether the last run ends with the previous piece
    for piece in chunk.pieces:
        group = params[piece.param].group
        if group is None or piece.param not in chunk.gradient.received:
            adjoins = False
            continue
        step, end = chunk.steps[piece.param], piece.start + piece.numel
        if merge and adjoins and (found[-1].group, found[-1].step) == (group, step):
            found[-1].end = end
        else:
            found.append(Run(piece.start, end, group, step, piece.param, piece.param_start))
        adjoins = True
    return found


def _dithered(run: Run, params: list[ParameterState], seed: int | None) -> Iterator[tuple[int, int, Dither | None]]:
    """The parts of a run, each with one Dither. A run has one part, unless the parameter has more than 2^32 elements."""
    if seed is None:
        yield run.start, run.end, None
        return
    start = run.start
    while start < run.end:
        index = run.param_start + start - run.start
        end = min(run.end, start + (1 << 32) - index % (1 << 32))
        yield start, end, Dither.of(seed, params[run.param].name, run.step, index)
        start = end


def rehearse(formats: Iterable[Format], rules: list[tuple[Rule, dict]], device: torch.device) -> None:
    """Sum the squares of a small gradient of each format on a device and, with a rule of Adam, update a small shard: the first use of a kernel
    compiles the kernel. Other rules have no kernels. Frozen formats are decoded. rules: each with a parameter group.
    """
    adam = next(((rule, group) for rule, group in rules if isinstance(rule, AdamRule)), None)
    for format in formats:
        segments = {
            segment.name: torch.zeros(segment.count(BLOCK_NUMEL), dtype=TORCH_DTYPES[segment.dtype], device=device) for segment in format.segments
        }
        if not format.trainable:
            shard = Shard(format, segments)
            shard.codec.weights(shard)
            continue
        gradient = torch.zeros(BLOCK_NUMEL, dtype=TORCH_DTYPES[format.gradient], device=device)
        NormAccumulator(device).add(gradient)
        if adam is not None and format.moments == adam[0].moments:
            rule, group = adam
            dither = Dither(0, 0, 0) if format.rounds else None
            rule.apply(Shard(format, segments), gradient, rule.scalars(group, 1), 1.0, dither=dither)


def add_norm(chunk: ChunkState, gradient: torch.Tensor, total: NormAccumulator) -> None:
    """Add the squares of a shard's gradient. Each piece begins on a block border of a parameter."""
    for piece in chunk.pieces:
        if piece.param in chunk.gradient.received:
            total.add(gradient[piece.start : piece.start + piece.numel])
