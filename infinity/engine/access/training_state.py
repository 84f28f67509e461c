"""The training state of an engine, for saving and loading: the interface that `infinity/checkpoints/` uses.

Knows every part of an engine that has state. Must not know checkpoints, files or formats of files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from infinity.engine.access import save_window
from infinity.engine.access.snapshot_reader import SnapshotReader
from infinity.engine.engines import engine_of
from infinity.engine.steps.joined_optimizers import JoinedOptimizers
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.optim.rules import Rule
from infinity.optim.shard import Shard
from infinity.plan.packing import Layout, Piece
from infinity.plan.record import STATES, WEIGHTS, Record
from infinity.plan.tiers import in_storage
from infinity.system.interrupts import Shield


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter. group: the index of its parameter group, counted over all optimizers, or None."""

    index: int
    name: str
    param: nn.Parameter
    shape: torch.Size
    trainable: bool
    group: int | None


@dataclass(frozen=True)
class ChunkInfo:
    """One chunk. pieces: the parts of parameters in this rank's shard. names: of all parameters in the chunk's span."""

    index: int
    record: Record
    pieces: tuple[Piece, ...]
    trainable: bool
    names: tuple[str, ...]


class TrainingState:
    """The state of one engine between two steps. `ready_to_save` or `ready_to_load` comes first."""

    def __init__(self, engine):
        self._engine = engine
        self.turn, self.ranks, self.device, self.config = engine.turn, engine.ranks, engine.device, engine.config
        self.manages, self.averaging = engine.manages, engine.averaging

    # Conditions.

    def ready_to_save(self, optimizer) -> None:
        """Raise UsageError unless the engine is between two steps. Afterwards the state is constant until the next step begins."""
        save_window.ready_to_save(self._engine, optimizer)

    def ready_to_load(self, optimizer) -> None:
        save_window.ready_to_load(self._engine, optimizer)

    def loading(self) -> contextlib.AbstractContextManager:
        """All records are replaced inside the block."""
        return save_window.loading(self._engine)

    def shielded(self, work: Callable[[Shield], object]) -> object:
        """Run work(shield), which no interrupt may leave half done, in another thread, on the stream of this thread."""
        return save_window.shielded(self.device, work)

    # Parameters and chunks.

    @property
    def model(self) -> nn.Module:
        return self._engine.model

    @property
    def optimizers(self) -> JoinedOptimizers:
        """All optimizers of the engine, as one with all their parameter groups. False without an optimizer."""
        return self._engine.optimizers

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments of most parameters: of the optimizer's own rule. A parameter group may have another rule."""
        return self._engine.training.rule.moments

    def rule_of(self, group: int) -> Rule:
        """The update rule of a parameter group. Groups are counted over all optimizers."""
        return self.optimizers.rule_of(self.optimizers.param_groups[group])

    @property
    def parameters(self) -> list[ParameterInfo]:
        return [
            ParameterInfo(state.index, state.name, state.param, state.shape, state.trainable, state.group)
            for state in self._engine.registry.params
        ]

    @property
    def chunks(self) -> list[ChunkInfo]:
        return [
            ChunkInfo(chunk.index, chunk.record, chunk.pieces, chunk.trainable, tuple(state.name for state in chunk.span.params))
            for chunk in self._engine.registry.chunks
        ]

    # Numbers beside the records.

    def num_updates(self, index: int) -> int:
        """The number of updates of a parameter."""
        registry = self._engine.registry
        return max(chunk.steps[index] for chunk in registry.chunks_of(registry.params[index]))

    def set_num_updates(self, index: int, number: int, *, num_averaged: int = 0) -> None:
        """num_averaged: the steps in the average of the weights; 0: no average yet."""
        registry = self._engine.registry
        for chunk in registry.chunks_of(registry.params[index]):
            chunk.steps[index] = number
            chunk.note_average(num_averaged)

    @property
    def seed(self) -> int | None:
        """The seed of the random bits that round bf16 moments; None if moments are fp32."""
        return self._engine.updater.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._engine.updater.seed = seed

    @property
    def loss_scale(self) -> tuple[float, int] | None:
        """The loss scale, and the number of steps since it last changed; None without a loss scale."""
        scaler = self._engine.cycle.scaler
        return None if scaler is None else (scaler.scale, scaler.num_clean)

    @loss_scale.setter
    def loss_scale(self, value: tuple[float, int]) -> None:
        self._engine.cycle.scaler.scale, self._engine.cycle.scaler.num_clean = value

    @property
    def last_save(self):
        """Data that the reader of the last snapshot has left for the next one. A load deletes the data."""
        return self._engine.last_save

    @last_save.setter
    def last_save(self, note) -> None:
        self._engine.last_save = note

    # Saving of records.

    def snapshot(self, *, target: str, purpose: str, host_nbytes: int) -> SnapshotReader:
        """A lease of all records as they are now. `ready_to_save` has waited for the previous reader."""
        reader = SnapshotReader(self._engine, target=target, purpose=purpose, host_nbytes=host_nbytes)
        self._engine.saving = reader
        return reader

    @property
    def num_copying_threads(self) -> int:
        """Threads that may copy records beside the training."""
        return self._engine.updater.processor.threads // 2

    def flush(self) -> None:
        """Finish every update that step() has announced, and its writes."""
        self._engine.flush()

    def shard(self, index: int, *, weight_only: bool = False) -> contextlib.AbstractContextManager[Shard]:
        """The segments of a record by name, 1-D on the host, inside the block."""
        return self._engine.values.shard(self._engine.registry.chunks[index], weight_only=weight_only)

    # Replacement of records.

    def filled(self, index: int) -> contextlib.AbstractContextManager[Shard]:
        """The segments of a record by name, all zero: the block fills them."""
        return self._engine.values.filled(self._engine.registry.chunks[index])

    @contextlib.contextmanager
    def record_memory(self, index: int) -> Iterator[list[tuple[int, memoryview]]]:
        """Memory for the bytes of a record, as [(offset in the record, buffer)]. The block fills the memory, which replaces the record."""
        engine = self._engine
        chunk, record = engine.registry.chunks[index], engine.registry.chunks[index].record
        if not chunk.on_device:
            with engine.records.lease(chunk, write=True, fresh=True) as lease:
                sizes = {WEIGHTS: (0, record.weight_nbytes), STATES: (record.states_offset, record.states_nbytes)}
                yield [(sizes[kind][0], entry.memory.buffer[: sizes[kind][1]]) for kind, entry in lease.entries.items()]
            return
        region = engine.arena.region(max(record.nbytes, 1))
        try:
            yield [(0, region.buffer[: record.nbytes])]
            with engine.values.filled(chunk) as shard, torch.no_grad():
                for segment, offset in zip(record.segments, record.offsets):
                    shard[segment.name].copy_(region.tensor(TORCH_DTYPES[segment.dtype], offset, segment.count(record.numel)))
        finally:
            engine.arena.give_back(region)

    def num_records_in_memory(self, most: int) -> int:
        """How many records may be in host memory at a time, up to `most`."""
        placement = self._engine.placement
        kinds = [kind for kind in (WEIGHTS, STATES) if in_storage(placement.homes[kind])]
        return max(1, min([most, *(placement.slots[kind] for kind in kinds)]))

    def finish_writes(self) -> None:
        """Wait until every write of a record is over."""
        self._engine.records.flush()

    def give_weight(self, param: nn.Parameter, value) -> None:
        """Set a parameter's value, equal on all ranks. value: any object whose slices are 1-D tensors on the CPU."""
        self._engine.parameter_values.give(param, value)

    def free_memory(self) -> None:
        """Give memory that was freed back to the system."""
        self._engine.freed.give_back()


def training_state_of(model: nn.Module) -> TrainingState:
    """The state of the engine that a model is in. Raises ConfigError if there is none."""
    return TrainingState(engine_of(model))
