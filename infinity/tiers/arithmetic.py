"""What an update computes of one shard: which of its elements are updated alike, with which hyper-parameters and random bits.

Knows a chunk's pieces and which of its parameters had a gradient. Must not know where the shard is, or when this is done.
"""

# [Note: what an update depends on]
# The hyper-parameters are a snapshot (Hyper), so whatever a scheduler does after step() is of the next step. A parameter
# that no rank had a gradient for is skipped: no decay, no moments, and its step count, kept a chunk and parameter, stays.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from infinity.optim.adam import Dither, NormAccumulator
from infinity.optim.rules import Rule
from infinity.optim.shard import Shard
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.parameter_state import ParameterState


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


def update(
    chunk: ChunkState,
    params: list[ParameterState],
    state: Shard,
    gradient: torch.Tensor,
    hyper: Hyper,
    *,
    threads: int,
    seed: int | None,
) -> Computed:
    """Update a shard in place. state: its segments; gradient: 1-D [shard_used], bf16, fp16 or fp32. threads, seed: as of `Updater`."""
    computed = Computed(runs(chunk, params, merge=seed is None), hyper, params, seed)
    for part, scalars, dither in computed.parts():
        shard = state.part(part.start, part.stop)
        hyper.rule.apply(shard, gradient[part], scalars, hyper.grad_scale, dither=dither, threads=threads)
    return computed


@dataclass(frozen=True, slots=True)
class Computed:
    """What an update did to a shard, so that it can be done again. seed: as of `update`."""

    runs: list[Run]
    hyper: Hyper
    params: list[ParameterState]
    seed: int | None

    def parts(self) -> Iterator[tuple[slice, object, Dither | None]]:
        """Elements of the shard that are updated alike, with their scalars and their random bits."""
        for run in self.runs:
            for start, end, dither in _dithered(run, self.params, self.seed):
                yield slice(start, end), self.hyper.scalars(run.group, run.step), dither

    def advance(self, moments: dict[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """Do to moments by name, in place, what it did to the shard's."""
        for part, scalars, dither in self.parts():
            shard = {name: segment[part] for name, segment in moments.items()}
            self.hyper.rule.advance(shard, gradient[part], scalars, self.hyper.grad_scale, dither=dither)


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
    for param in chunk.gradient.received:
        if params[param].group is not None:
            chunk.steps[param] += 1
    found: list[Run] = []
    adjoins = False  # whether the last run ends with the piece before
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
        if piece.param in chunk.gradient.received:
            total.add(gradient[piece.start : piece.start + piece.numel])
