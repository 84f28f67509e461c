"""Loading the training state of an engine: `infinity.load`.

Knows which values of a checkpoint make up each record of an engine. Must not know how files are read (reader.py) or when records
are saved (save.py).

# [Note: another world size]
# If the engine has the ranks, chunks and tiles of the checkpoint, the loader reads each record in one piece into its place. Otherwise the
# loader assembles each shard from pieces of saved records, after a check of their checksums, with a few saved records in memory.
"""

from __future__ import annotations

import contextlib
import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aio_ext
from infinity.checkpoints.contents import checked_generators, loose_tensors, parameters_of, set_generators, with_extra_state
from infinity.checkpoints.files import Progress, read_manifest
from infinity.checkpoints.manifest import Whole
from infinity.checkpoints.reader import Checkpoint, padded_segments
from infinity.config import checked_path
from infinity.engine.access.training_state import ChunkInfo, TrainingState, training_state_of
from infinity.errors import CheckpointError, ConfigError
from infinity.formats.format import Format, setting_of
from infinity.optim.optimizers import follow_references_by
from infinity.optim.shard import Shard
from infinity.sizes import listed
from infinity.system.interrupts import Shield


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    scheduler: Any = None,
    progress: Progress | None = None,
) -> Loaded:
    """Bring a model and its optimizer to the state of a checkpoint.

    The checkpoint may have another number of ranks, other chunks and tiers, and layers in other tiles of rows. Make the optimizer before
    this call, because the call starts the engine. Call load on all ranks. The call runs no code from the checkpoint.
    optimizer: of the model; a list of all if there are several, in any order.
    Without an optimizer, weights, masters and buffers are loaded, and moments start at zero. The states of random number generators are set
    if the number of ranks equals that of the checkpoint. progress(done, total) counts bytes of this rank.

    Raises UsageError if an optimizer of the model is missing.
    Raises CheckpointError for a checkpoint that is missing, damaged or from another model. The message names the differences or the
    damaged file. If the error comes before the first byte has changed, the model is unchanged. After a later error, load again.
    """
    state = training_state_of(model)
    with state.turn, state.ranks.at("infinity.load"):
        state.ready_to_load(optimizer)
        return state.shielded(lambda shield: _load(state, path, optimizer, scheduler, progress, shield))


def _follow(reference: dict, model: nn.Module, optimizer) -> None:
    """Load the checkpoint that a state_dict refers to. Raises CheckpointError if another checkpoint has replaced this checkpoint."""
    path = reference["checkpoint"]

    def check() -> None:
        if read_manifest(Path(path)).folder != reference["folder"]:
            raise CheckpointError(
                f"{path} is not the checkpoint that the state_dict refers to: a later save has replaced it; load the new one with "
                f"infinity.load, or save each checkpoint in a directory of its own"
            )

    training_state_of(model).ranks.together(check)
    load(path, model, optimizer)


follow_references_by(_follow)


def _load(state: TrainingState, path: str | os.PathLike, optimizer, scheduler, progress: Progress | None, shield: Shield) -> Loaded:
    checked_path(path)
    checkpoint = state.ranks.together(lambda: Checkpoint(path), undo=Checkpoint.close)
    try:
        loading = state.ranks.together(lambda: _Load(state, checkpoint, optimizer, scheduler))
        digest = int.from_bytes(bytes.fromhex(checkpoint.manifest.folder.removeprefix("data-")), "big")
        if not state.ranks.agree(digest):
            raise CheckpointError(f"{path}: the ranks read different checkpoints; all must see the same directory")
        with state.loading():
            state.ranks.together(lambda: loading.run(progress, shield))
        if optimizer is not None:  # without an optimizer, the moments are not those of the checkpoint
            state.optimizers.refer_to({"checkpoint": os.path.abspath(path), "folder": checkpoint.manifest.folder})
        return Loaded(checkpoint.manifest.step, loading.extra, checkpoint.manifest.world)
    finally:
        checkpoint.close()
        state.free_memory()


@dataclass(frozen=True)
class Loaded:
    """The result of `load`. step: number of optimizer steps. extra: as given to `save`. world: number of ranks that saved."""

    step: int
    extra: object
    world: int


class _Load:
    """Fills the records of an engine from a checkpoint. Raises CheckpointError, before any change, if model and checkpoint differ."""

    def __init__(self, state: TrainingState, checkpoint: Checkpoint, optimizer, scheduler):
        self.state = state
        self.chunks = state.chunks
        self.checkpoint = checkpoint
        self.scheduler = scheduler
        self.with_states = optimizer is not None
        self.manifest = checkpoint.manifest
        self._wrong: list[str] = []
        self.parameters, _ = parameters_of(state)
        self._match_parameters()
        self._match_loose()
        if self.with_states:
            self._match_optimizer()
        self._match_rest()
        if self._wrong:
            more = f"; and {len(self._wrong) - 20} more" if len(self._wrong) > 20 else ""
            raise CheckpointError(f"{checkpoint.path} does not fit the model: {'; '.join(self._wrong[:20])}{more}")

    def run(self, progress: Progress | None, shield: Shield) -> None:
        self._shield = shield
        self._total_nbytes = sum(chunk.record.nbytes for chunk in self.chunks)
        self._done_nbytes, self._progress = 0, progress
        if self._is_as_it_lies():
            self._read_as_it_lies()
        else:
            for chunk in self.chunks:
                with self.state.filled(chunk.index) as shard:
                    self._put_together(chunk, shard)
                self._note(chunk)
        self.state.finish_writes()
        num_averaged = self.manifest.num_averaged if self.with_states else 0
        for index, sources in enumerate(self._sources):
            step = self.manifest.parameters[sources[0][1]].step if self.with_states else 0
            self.state.set_num_updates(index, step, num_averaged=num_averaged)
        self.state.averaging.load(num_averaged)
        if self.with_states and self.state.seed is not None:
            self.state.seed = self.manifest.seed
        try:
            self._set_rest()
        except CheckpointError:
            raise
        except Exception as error:  # the program's own code may raise any type
            what = f"a buffer, an extra state or the scheduler did not take its state ({type(error).__name__}: {error})"
            remedy = "load into a model and a scheduler made like those that were saved"
            raise CheckpointError(f"{self.checkpoint.path}: {what}; {remedy}") from error

    # Checks before any change.

    def _match_parameters(self) -> None:
        manifest = self.manifest
        saved: dict[str, list[tuple[Whole, int]]] = {}
        for index, parameter in enumerate(manifest.parameters):
            saved.setdefault(parameter.canonical.name, []).append((parameter.canonical, index))
        wanted = {parameter.canonical.name for parameter in self.parameters}
        for name in [name for name in saved if name not in wanted]:  # a tied parameter may have another first name in this model
            other = next((alias for alias, first in manifest.aliases.items() if first == name and alias in wanted), None)
            if other is not None:
                saved[other] = saved.pop(name)
        cast: dict[tuple[str, ...], list[str]] = {}  # parameter names by (dtypes in the checkpoint, dtype in the engine)
        missing = sorted(wanted - saved.keys())
        unexpected = sorted(saved.keys() - wanted)
        self._wrong += [f"missing in the checkpoint: {listed(missing)}"] if missing else []
        self._wrong += [f"unknown to the model: {listed(unexpected)}"] if unexpected else []
        self._sources: list[list[tuple[int, int, int]]] = []  # per parameter: [(start in the whole parameter, saved parameter, numel)]
        for parameter in self.parameters:
            whole = parameter.canonical
            found = saved.get(whole.name, [])
            dtype, own = {manifest.dtype_of(manifest.parameters[index]) for _, index in found}, self.dtype_of(parameter)
            if dtype - {own}:
                cast.setdefault((*dtype, own), []).append(whole.name)
            if found and found[0][0].shape != whole.shape:
                self._wrong.append(f"{whole.name} has shape {list(found[0][0].shape)} in the checkpoint and {list(whole.shape)} in the model")
                found = []
            same = [index for box, index in found if box.begin == whole.begin and manifest.parameters[index].shape == parameter.shape]
            if same:
                self._sources.append([(parameter.begin, same[0], parameter.numel)])
            elif parameter.is_rows and all(manifest.parameters[index].is_rows for _, index in found):
                rows = sorted((manifest.parameters[i].begin, i, manifest.parameters[i].numel) for _, i in found)
                ends = [0, *(begin + numel for begin, _, numel in rows)]
                if [begin for begin, _, _ in rows] + [math.prod(whole.shape)] != ends and found:
                    self._wrong.append(f"{whole.name} in the checkpoint lacks rows, or has rows twice")
                block = self._block_of(parameter)
                if any(begin % block for begin in (parameter.begin, *(begin for begin, _, _ in rows))):
                    self._wrong.append(
                        f"{whole.name} has other tiles, whose borders cut blocks of {block} elements with one scale; use the tile_above of the "
                        f"checkpoint, or export the checkpoint to safetensors and load these files"
                    )
                self._sources.append(rows)
            else:
                self._wrong.append(f"{whole.name} has other tiles along in_features; export the checkpoint to safetensors and load these files")
                self._sources.append([])

        for (*there, here), names in cast.items():
            which = "the model" if len(names) == len(wanted) else listed(names)
            there = " or ".join(map(setting_of, there))
            self._wrong.append(f"{which} was saved with {there}, expected {setting_of(here)}: export to safetensors and load these files")

    def dtype_of(self, parameter: Parameter) -> str:
        """The name of the storage of a parameter of the engine."""
        return parameter.dtype or self.state.layout.main_storage

    def _block_of(self, parameter: Parameter) -> int:
        """Elements of a parameter that are stored together; they are counted from the parameter's begin."""
        format = Format(self.dtype_of(parameter), parameter.trainable, moments_dtype=self.state.config.optimizer_state_dtype)
        return format.block

    def _match_optimizer(self) -> None:
        state, manifest = self.state, self.manifest
        pairs = (state.moments, state.config.optimizer_state_dtype), (manifest.moments, manifest.moments_dtype)
        if pairs[0] != pairs[1]:
            here, there = (f"{', '.join(moments) or 'none'} in {dtype}" for moments, dtype in pairs)
            self._wrong.append(f"the optimizer has moments {here}, the checkpoint has {there}; load without the optimizer to reset moments")
            return
        if manifest.optimizer is None:
            self._wrong.append("the checkpoint has no optimizer state; load without the optimizer, and moments start at zero")
            return
        self._match_rules()
        self._groups = self._decoded_list(manifest.optimizer.get("groups"))
        num_groups = len(state.optimizers.param_groups)
        if len(self._groups) != num_groups:
            self._wrong.append(f"{len(self._groups)} parameter groups in the checkpoint, {num_groups} in the optimizer")
        for index, (group, found) in enumerate(zip(state.optimizers.param_groups, self._groups)):
            try:
                if not isinstance(found, dict) or "params" in found or not all(isinstance(name, str) for name in found):
                    raise ConfigError("expected a dict of hyper-parameters")
                state.optimizers.owner_of(group).hyper_parameters({**group, **found})
            except ConfigError as error:
                self._wrong.append(f"parameter group {index} of the checkpoint: {error}")
        for here, sources in zip(self.parameters, self._sources):
            if not sources:
                continue
            there = manifest.parameters[sources[0][1]]
            if there.trainable != here.trainable:
                self._wrong.append(f"{here.name} is {'trained' if there.trainable else 'frozen'} in the checkpoint and not in the model")
            elif here.trainable and (mine := state.moments if here.moments is None else here.moments) != manifest.moments_of(there):
                names = [", ".join(moments) or "none" for moments in (mine, manifest.moments_of(there))]
                self._wrong.append(f"{here.name} has moments {names[0]} in the optimizer and {names[1]} in the checkpoint")
            elif there.group != here.group:
                self._wrong.append(f"{here.name} is in parameter group {there.group} in the checkpoint, in {here.group} in the optimizer")

    def _match_rules(self) -> None:
        """Compare the rules of all groups if the checkpoint has them, and otherwise the rule of the only optimizer."""
        optimizers, saved = self.state.optimizers, self.manifest.optimizer
        here, there = [type(optimizers.rule).__name__], [saved.get("rule")]
        if "rules" in saved:
            here, there = optimizers.names_of_rules, self._decoded_list(saved["rules"])
        if there != here:
            names = [", ".join(dict.fromkeys(map(str, each))) for each in (there, here)]
            self._wrong.append(f"the checkpoint was saved by {names[0]}, expected {names[1]}; load without the optimizer to reset the moments")

    def _match_loose(self) -> None:
        """Compare buffers, and parameters that the engine does not manage."""
        self._loose = loose_tensors(self.state)
        saved = self.checkpoint.buffers()
        for name in sorted(self._loose.keys() ^ saved.keys()):
            self._wrong.append(f"buffer {name} is only {'in the model' if name in self._loose else 'in the checkpoint'}")
        self._values: dict[str, torch.Tensor] = {}
        for name, index in saved.items():
            here = self._loose.get(name)
            shape = self.manifest.tensors[index].shape  # compared before the read: so a tensor takes no more memory than the model's buffer
            if here is not None and shape != tuple(here.shape):
                self._wrong.append(f"buffer {name} has shape {list(shape)} in the checkpoint and {list(here.shape)} in the model")
            elif here is not None:
                self._values[name] = self.checkpoint.tensor(index)

    def _match_rest(self) -> None:
        """Decode all other values before any change: the scheduler, extra states, generators and the loss scale."""
        manifest, decode = self.manifest, self.checkpoint.decode
        if self.scheduler is not None and manifest.scheduler is None:
            self._wrong.append("the checkpoint was saved without a scheduler: omit scheduler=, or pass scheduler= to infinity.save")
        self._scheduler = decode(manifest.scheduler)
        self._extra_state = decode(manifest.model.get("extra_state", {}))
        if not isinstance(self._extra_state, dict):
            raise CheckpointError(f"{self.checkpoint.path}: the extra state is not an object")
        here = {name for name, _ in with_extra_state(self.state.model)}
        for name in sorted(here ^ self._extra_state.keys()):
            self._wrong.append(f"extra state of {name or 'the model'} is only {'in the model' if name in here else 'in the checkpoint'}")
        self.extra = decode(manifest.extra)
        rank, world = self.state.ranks.rank, self.state.ranks.world
        self._generators = None
        if len(manifest.rng) == world:
            with self.checkpoint.named():
                self._generators = checked_generators(decode(manifest.rng[rank]), self.state.device)
        self._scale = None
        if self.with_states and self.state.loss_scale is not None and manifest.scaler is not None:
            scale, num_clean = manifest.scaler.get("scale"), manifest.scaler.get("num_clean")
            if not isinstance(scale, (int, float)) or not 0 < scale < math.inf or type(num_clean) is not int or num_clean < 0:
                self._wrong.append(f"the loss scale {scale!r} of the checkpoint is not valid")
            self._scale = scale, num_clean

    def _decoded_list(self, value) -> list:
        found = self.checkpoint.decode(value)
        return found if isinstance(found, list) else []

    def _set_rest(self) -> None:
        with torch.no_grad():
            for name, here in self._loose.items():
                here.copy_(self._values[name])
        for name, module in with_extra_state(self.state.model):
            if name in self._extra_state:
                module.set_extra_state(self._extra_state[name])
        if self.with_states:
            for group, found in zip(self.state.optimizers.param_groups, self._groups, strict=True):
                group.update(found)
        if self._scale is not None:
            self.state.loss_scale = float(self._scale[0]), self._scale[1]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(self._scheduler)
        if self._generators is not None:
            set_generators(self._generators, self.state.device)

    # Bytes.

    def _is_as_it_lies(self) -> bool:
        """Whether the checkpoint has each record of this rank in one piece, with the bytes in the same order."""
        state, manifest = self.state, self.manifest
        here, there = ([(c.partition, c.numel, c.trainable, c.pieces, c.format.averaged) for c in each.chunks] for each in (state.layout, manifest))
        same = all(sources == [(p.begin, i, p.numel)] for i, (p, sources) in enumerate(zip(self.parameters, self._sources)))
        return self.with_states and here == there and same  # _match_optimizer has checked that the moments are equal

    def _read_as_it_lies(self) -> None:
        """Read each record into its place, a few records at a time."""
        under_way: deque[_RecordRead] = deque()
        bound = self.state.num_records_in_memory(4)
        try:
            for chunk in self.chunks:
                if len(under_way) == bound:
                    self._finish(under_way)
                under_way.append(_RecordRead(self.state, self.checkpoint, chunk))
                under_way[-1].begin()
            while under_way:
                self._finish(under_way)
        finally:
            for read in under_way:
                read.give_up()

    def _finish(self, under_way: deque[_RecordRead]) -> None:
        read = under_way.popleft()
        read.finish()
        self._note(read.chunk)

    def _put_together(self, chunk: ChunkInfo, shard: Shard) -> None:
        """Fill the segments of a shard from the saved records that hold its pieces. The segments are zero before."""
        if not self.with_states:
            storage = shard.format.storage
            kept = {segment.name for segment in (*storage.weight, *storage.master)}
            shard = Shard(shard.format, {name: segment for name, segment in shard.items() if name in kept})
        for piece in chunk.pieces:
            at = piece.start
            for param, start, numel in self._locate(piece.param, piece.param_start, piece.numel):
                self.checkpoint.copy(shard, at, param, start, numel)
                at += numel

    def _locate(self, param: int, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Where elements [start, start + numel) of a parameter were saved: parts (saved parameter, start in that parameter, numel)."""
        sources = self._sources[param]
        begin = self.parameters[param].begin + start
        end = begin + numel
        at = max(bisect_right(sources, begin, key=lambda source: source[0]) - 1, 0)
        while begin < end:
            first, index, count = sources[at]
            part = min(end, first + count) - begin
            yield index, begin - first, part
            begin, at = begin + part, at + 1

    def _note(self, chunk: ChunkInfo) -> None:
        if self._shield.asked_to_stop:
            raise CheckpointError(f"{self.checkpoint.path}: loading was interrupted")  # the other ranks raise this, this rank the interrupt
        self._done_nbytes += chunk.record.nbytes
        if self._progress is not None:
            self._progress(self._done_nbytes, self._total_nbytes)


class _RecordRead:
    """The read of one record from a checkpoint into the record's memory."""

    def __init__(self, state: TrainingState, checkpoint: Checkpoint, chunk: ChunkInfo):
        self.chunk = chunk
        self._checkpoint, self._rank = checkpoint, state.ranks.rank
        self._memory = contextlib.ExitStack()
        self._parts = self._memory.enter_context(state.record_memory(chunk.index))
        self._tickets: list[aio_ext.Ticket] = []

    def begin(self) -> None:
        for offset, buffer in self._parts:
            if buffer.nbytes:  # each ticket joins the list at once: `give_up` waits for every read that began, also if the next one fails
                self._tickets.append(self._checkpoint.read(self.chunk.index, self._rank, offset, buffer))

    def finish(self) -> None:
        """Wait for the bytes and compare checksums. Raises CheckpointError; the record has changed then, too."""
        with self._memory:
            self._checkpoint.settle(self.chunk.index, self._rank, self._tickets)
            record, segments = self.chunk.record, {}
            for begin, buffer in self._parts:
                segments |= padded_segments(record, buffer, begin)
            self._checkpoint.check(self.chunk.index, self._rank, segments)

    def give_up(self) -> None:
        with self._memory:
            for ticket in self._tickets:
                with contextlib.suppress(OSError):
                    ticket.wait()
