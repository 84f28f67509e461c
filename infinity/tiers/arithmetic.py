"""Computes the update of one shard: finds the runs of elements with equal hyper-parameters, and applies the optimizer's rule to each run.

Knows the pieces of a chunk, the parameters that had a gradient, and which rules have kernels for a device. Must not know the place of the
shard, or the time of the update.
"""

# [Note: inputs of an update]
# Hyper is a snapshot of the hyper-parameters. Changes by a scheduler after step() apply to the next step. If no rank had a gradient of a
# parameter, the update skips the parameter: no weight decay, no new moments, and the same step count. Each chunk counts the steps of each
# parameter.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from infinity.formats.dtypes import TORCH_DTYPES
from infinity.formats.format import Format
from infinity.optim.adam import BLOCK_NUMEL, Dither, NormAccumulator
from infinity.optim.rules import AdamRule, Rule
from infinity.optim.shard import Shard
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.parameter_state import ParameterState


@dataclass
class Hyper:
    """Hyper-parameters of one step: the rule, a copy of each parameter group, and the factor of all gradients."""

    rule: Rule
    groups: list[dict]
    grad_scale: float = 1.0
    _scalars: dict[tuple[int, int], object] = field(default_factory=dict)

    def scalars(self, group: int, step: int) -> object:
        key = (group, step)
        if key not in self._scalars:
            self._scalars[key] = self.rule.scalars(self.groups[group], step)
        return self._scalars[key]


def update(
    chunk: ChunkState,
    params: list[ParameterState],
    state: Shard,
    gradient: torch.Tensor,
    hyper: Hyper,
    *,
    threads: int,
    seed: int | None,
    keeps_moments: bool = False,
) -> Computed:
    """Update a shard in place. state: segments of the shard. gradient: 1-D [shard_used], bf16, fp16 or fp32. threads, seed: of `Updater`.
    keeps_moments: change only weights. The caller then calls `Computed.update_moments`. The rule must have two parts."""
    computed = Computed(runs(chunk, params, merge=seed is None), hyper, params, seed)
    apply = hyper.rule.apply_weights if keeps_moments else hyper.rule.apply
    for part, scalars, dither in computed.parts():
        shard = state.part(part.start, part.stop)
        apply(shard, gradient[part], scalars, hyper.grad_scale, dither=dither, threads=threads)
    return computed


@dataclass(frozen=True, slots=True)
class Computed:
    """The inputs of an update of a shard. A replay of the update needs them. seed: see `Updater`."""

    runs: list[Run]
    hyper: Hyper
    params: list[ParameterState]
    seed: int | None

    def parts(self) -> Iterator[tuple[slice, object, Dither | None]]:
        """Slices of the shard with equal hyper-parameters, each with the scalars of the rule and the random bits."""
        for run in self.runs:
            for start, end, dither in _dithered(run, self.params, self.seed):
                yield slice(start, end), self.hyper.scalars(run.group, run.step), dither

    def advance(self, moments: dict[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """Replay the update on moments in place. moments: by name, 1-D [shard_used]. gradient: of the update."""
        self._on_moments(self.hyper.rule.advance, moments, gradient)

    def update_moments(self, moments: dict[str, torch.Tensor], gradient: torch.Tensor, *, threads: int) -> None:
        """Finish an update that has changed only weights. Arguments as of `advance`. threads: of `Updater`."""
        self._on_moments(functools.partial(self.hyper.rule.apply_moments, threads=threads), moments, gradient)

    def _on_moments(self, change: Callable, moments: dict[str, torch.Tensor], gradient: torch.Tensor) -> None:
        for part, scalars, dither in self.parts():
            shard = {name: segment[part] for name, segment in moments.items()}
            change(shard, gradient[part], scalars, self.hyper.grad_scale, dither=dither)


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


def rehearse(formats: Iterable[Format], rule: Rule, group: dict, device: torch.device) -> None:
    """Sum the squares of a small gradient of each format on a device and, with the rule of Adam, update a small shard: the first use of a kernel
    compiles the kernel. Other rules have no kernels. group: a parameter group of the rule.
    """
    for format in formats:
        segments = {
            segment.name: torch.zeros(segment.count(BLOCK_NUMEL), dtype=TORCH_DTYPES[segment.dtype], device=device) for segment in format.segments
        }
        gradient = torch.zeros(BLOCK_NUMEL, dtype=TORCH_DTYPES[format.gradient], device=device)
        NormAccumulator(device).add(gradient)
        if isinstance(rule, AdamRule):
            dither = Dither(0, 0, 0) if format.rounds_moments else None
            rule.apply(Shard(format, segments), gradient, rule.scalars(group, 1), 1.0, dither=dither)


def add_norm(chunk: ChunkState, gradient: torch.Tensor, total: NormAccumulator) -> None:
    """Add the squares of a shard's gradient. Each piece begins on a block border of a parameter."""
    for piece in chunk.pieces:
        if piece.param in chunk.gradient.received:
            total.add(gradient[piece.start : piece.start + piece.numel])
