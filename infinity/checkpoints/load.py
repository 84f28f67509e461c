"""Loading the training state of an engine: `infinity.load`.

Knows which of a checkpoint's values make up each record of an engine. Must not know how files are read (reader.py) or when records
are saved (save.py).

# [Note: another world size]
# Where ranks, chunks and tiles are as they were, records are read as they lie into the places where they belong. Else each
# shard is put together from the pieces of the records that were saved, checked, of which a few are held at a time.
"""

from __future__ import annotations

import contextlib
import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import aio_ext
from infinity.checkpoints.contents import checked_generators, loose_tensors, parameters_of, set_generators, with_extra_state
from infinity.checkpoints.files import Progress, read_manifest
from infinity.checkpoints.manifest import Whole
from infinity.checkpoints.reader import Checkpoint, padded_segments, segment_tensors
from infinity.config import checked_path
from infinity.engine.access import save_window as pause
from infinity.engine.engine import Engine
from infinity.engine.engines import engine_of
from infinity.errors import CheckpointError, ConfigError
from infinity.optim.optimizers import follow_references_by
from infinity.optim.shard import Shard
from infinity.plan.record import STATES, WEIGHTS
from infinity.sizes import listed
from infinity.system.interrupts import Shield
from infinity.tiers.chunk_state import ChunkState


def load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler=None,
    progress: Progress | None = None,
) -> Loaded:
    """Bring a model and its optimizer to the state of a checkpoint, whatever world size, chunks or tiers it was saved with;
    layers may be cut into other tiles of rows. Make the optimizer before: this starts the engine.

    Without an optimizer the weights (and masters) and buffers are loaded, and moments begin anew. Generators' states are set if
    the world size is that of the checkpoint. Call it on all ranks. Runs no code from the checkpoint. progress(done, total): in
    bytes of this rank.

    Raises CheckpointError for a checkpoint that is missing, damaged or of another model, naming what differs or where the
    damage is; what is found before the first byte is changed leaves the model as it is, and after what is found later it must
    be loaded again.
    """
    engine = engine_of(model)
    with engine.turn, engine.ranks.at("infinity.load"):
        pause.ready_to_load(engine, optimizer)
        return pause.shielded(engine.device, lambda shield: _load(engine, path, optimizer, scheduler, progress, shield))


def _follow(reference: dict, model: nn.Module, optimizer) -> None:
    """Load what a state_dict refers to. Raises CheckpointError where that is gone, or another checkpoint has taken its place."""
    path = reference["checkpoint"]

    def check() -> None:
        if read_manifest(Path(path)).folder != reference["folder"]:
            raise CheckpointError(
                f"{path} is not the checkpoint that the state_dict refers to: another one has been saved there since; load it by infinity.load, "
                f"or keep one folder a checkpoint"
            )

    engine_of(model).ranks.together(check)
    load(path, model, optimizer)


follow_references_by(_follow)


def _load(engine: Engine, path: str | os.PathLike, optimizer, scheduler, progress: Progress | None, shield: Shield) -> Loaded:
    checked_path(path)
    checkpoint = engine.ranks.together(lambda: Checkpoint(path), undo=Checkpoint.close)
    try:
        loading = engine.ranks.together(lambda: _Load(engine, checkpoint, optimizer, scheduler))
        digest = int.from_bytes(bytes.fromhex(checkpoint.manifest.folder.removeprefix("data-")), "big")
        if not engine.ranks.agree(digest):
            raise CheckpointError(f"{path}: the ranks read different checkpoints; all must see the same directory")
        with pause.loading(engine):
            engine.ranks.together(lambda: loading.run(progress, shield))
        if optimizer is not None:  # else its moments begin anew
            engine.optimizer.refer_to({"checkpoint": os.path.abspath(path), "folder": checkpoint.manifest.folder})
        return Loaded(checkpoint.manifest.step, loading.extra, checkpoint.manifest.world)
    finally:
        checkpoint.close()
        engine.freed.give_back()


@dataclass(frozen=True)
class Loaded:
    """What `load` found: the number of optimizer steps, what was given as `extra`, and the world size that saved it."""

    step: int
    extra: object
    world: int


class _Load:
    """Filling an engine's records from a checkpoint. Raises CheckpointError, before anything changes, if the two do not match."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, optimizer, scheduler):
        self.engine = engine
        self.checkpoint = checkpoint
        self.optimizer, self.scheduler = optimizer, scheduler
        self.with_states = optimizer is not None
        self.manifest = checkpoint.manifest
        self._wrong: list[str] = []
        self.parameters, _ = parameters_of(engine)
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
        self._total_nbytes = sum(chunk.record.nbytes for chunk in self.engine.registry.chunks)
        self._done_nbytes, self._progress = 0, progress
        if self._is_as_it_lies():
            self._read_as_it_lies()
        else:
            for chunk in self.engine.registry.chunks:
                with self.engine.values.filled(chunk) as shard:
                    self._put_together(chunk, shard)
                self._note(chunk)
        self.engine.records.flush()
        for state in self.engine.registry.params:
            step = self.manifest.parameters[self._sources[state.index][0][1]].step if self.with_states else 0
            for chunk in self.engine.registry.chunks_of(state):
                chunk.steps[state.index] = step
        if self.with_states and self.engine.updater.seed is not None:
            self.engine.updater.seed = self.manifest.seed
        try:
            self._set_rest()
        except CheckpointError:
            raise
        except Exception as error:  # of the program's own: what it makes of a state is not known here
            what = f"a buffer, an extra state or the scheduler did not take its state ({type(error).__name__}: {error})"
            remedy = "load into a model and a scheduler that were made as those were"
            raise CheckpointError(f"{self.checkpoint.path}: {what}; {remedy}") from error

    # Does it fit?

    def _match_parameters(self) -> None:
        engine, manifest = self.engine, self.manifest
        saved: dict[str, list[tuple[Whole, int]]] = {}
        for index, parameter in enumerate(manifest.parameters):
            saved.setdefault(parameter.canonical.name, []).append((parameter.canonical, index))
        wanted = {parameter.canonical.name for parameter in self.parameters}
        for name in [name for name in saved if name not in wanted]:  # tied, and another of its names comes first here
            other = next((alias for alias, first in manifest.aliases.items() if first == name and alias in wanted), None)
            if other is not None:
                saved[other] = saved.pop(name)
        cast: dict[tuple[str, ...], list[str]] = {}  # names by the dtypes there and here
        missing = sorted(wanted - saved.keys())
        unexpected = sorted(saved.keys() - wanted)
        self._wrong += [f"missing in the checkpoint: {listed(missing)}"] if missing else []
        self._wrong += [f"unknown to the model: {listed(unexpected)}"] if unexpected else []
        self._sources: list[list[tuple[int, int, int]]] = []  # of each parameter: (start in the whole one, saved parameter, numel)
        for parameter in self.parameters:
            whole = parameter.canonical
            found = saved.get(whole.name, [])
            dtype, own = {manifest.dtype_of(manifest.parameters[index]) for _, index in found}, self.dtype_of(parameter)
            if dtype - {own}:
                cast.setdefault((*dtype, own), []).append(whole.name)
            if found and found[0][0].shape != whole.shape:
                self._wrong.append(f"{whole.name} has shape {list(found[0][0].shape)} there and {list(whole.shape)} here")
                found = []
            same = [index for box, index in found if box.begin == whole.begin and manifest.parameters[index].shape == parameter.shape]
            if same:
                self._sources.append([(parameter.begin, same[0], parameter.numel)])
            elif parameter.is_rows and all(manifest.parameters[index].is_rows for _, index in found):
                rows = sorted((manifest.parameters[i].begin, i, manifest.parameters[i].numel) for _, i in found)
                ends = [0, *(begin + numel for begin, _, numel in rows)]
                if [begin for begin, _, _ in rows] + [math.prod(whole.shape)] != ends and found:
                    self._wrong.append(f"{whole.name} lacks rows there, or has some twice")
                self._sources.append(rows)
            else:
                self._wrong.append(f"{whole.name} is cut into other tiles along in_features; export it to safetensors and load these")
                self._sources.append([])

        for (*there, here), names in cast.items():
            which = "it" if len(names) == len(wanted) else listed(names)
            there = " and ".join(map(repr, there))
            self._wrong.append(f"{which} was saved with dtype={there}, this is {here!r}: export it to safetensors and load these")

    def dtype_of(self, parameter: Parameter) -> str:
        """The storage of a parameter of the engine, by name."""
        return parameter.dtype or self.engine.layout.main_storage

    def _match_optimizer(self) -> None:
        engine, manifest = self.engine, self.manifest
        if manifest.moments != engine.moments or manifest.moments_dtype != engine.config.moments:
            pairs = (engine.moments, engine.config.moments), (manifest.moments, manifest.moments_dtype)
            here, there = (f"{', '.join(moments) or 'none'} in {dtype}" for moments, dtype in pairs)
            self._wrong.append(f"the optimizer has moments {here}, there are {there}; load without the optimizer to begin anew")
            return
        if manifest.optimizer is None:
            self._wrong.append("it was saved without an optimizer; load without one to begin anew")
            return
        here, there = type(engine.optimizer.rule).__name__, manifest.optimizer.get("rule")
        if there != here:
            self._wrong.append(f"it was saved by {there}, this is {here}; load without the optimizer to begin anew")
        self._groups = self._decoded_list(manifest.optimizer.get("groups"))
        num_groups = len(engine.optimizer.param_groups)
        if len(self._groups) != num_groups:
            self._wrong.append(f"{len(self._groups)} parameter groups there, {num_groups} here")
        for index, (group, found) in enumerate(zip(engine.optimizer.param_groups, self._groups)):
            try:
                if not isinstance(found, dict) or "params" in found or not all(isinstance(name, str) for name in found):
                    raise ConfigError("they are no hyper-parameters")
                engine.optimizer.hyper_parameters({**group, **found})
            except ConfigError as error:
                self._wrong.append(f"parameter group {index} there: {error}")
        for state, parameter, sources in zip(engine.registry.params, self.parameters, self._sources):
            if not sources:
                continue
            there = manifest.parameters[sources[0][1]]
            if there.trainable != state.trainable:
                self._wrong.append(f"{parameter.name} is {'trained' if there.trainable else 'frozen'} there and not here")
            elif there.group != state.group:
                self._wrong.append(f"{parameter.name} is in parameter group {there.group} there, in {state.group} here")

    def _match_loose(self) -> None:
        """Buffers, and parameters that no engine manages."""
        self._loose = loose_tensors(self.engine)
        saved = self.checkpoint.buffers()
        for name in sorted(self._loose.keys() ^ saved.keys()):
            self._wrong.append(f"buffer {name} is only {'in the model' if name in self._loose else 'in the checkpoint'}")
        self._values: dict[str, torch.Tensor] = {}
        for name, index in saved.items():
            here = self._loose.get(name)
            shape = self.manifest.tensors[index].shape  # before it is read: memory is taken for what the model has, no more
            if here is not None and shape != tuple(here.shape):
                self._wrong.append(f"buffer {name} has shape {list(shape)} there and {list(here.shape)} here")
            elif here is not None:
                self._values[name] = self.checkpoint.tensor(index)

    def _match_rest(self) -> None:
        """What is neither a weight nor a moment; decoded before anything changes."""
        manifest, decode = self.manifest, self.checkpoint.decode
        if self.scheduler is not None and manifest.scheduler is None:
            self._wrong.append("it was saved without a scheduler: give none here, or `scheduler=` to infinity.save")
        self._scheduler = decode(manifest.scheduler)
        self._extra_state = decode(manifest.model.get("extra_state", {}))
        if not isinstance(self._extra_state, dict):
            raise CheckpointError(f"{self.checkpoint.path}: its extra state is no object")
        here = {name for name, _ in with_extra_state(self.engine.model)}
        for name in sorted(here ^ self._extra_state.keys()):
            self._wrong.append(f"extra state of {name or 'the model'} is only {'in the model' if name in here else 'in the checkpoint'}")
        self.extra = decode(manifest.extra)
        rank, world = self.engine.ranks.rank, self.engine.ranks.world
        self._generators = None
        if len(manifest.rng) == world:
            with self.checkpoint.named():
                self._generators = checked_generators(decode(manifest.rng[rank]), self.engine.device)
        self._scale = None
        if self.with_states and self.engine.cycle.scaler is not None and manifest.scaler is not None:
            scale, num_clean = manifest.scaler.get("scale"), manifest.scaler.get("num_clean")
            if not isinstance(scale, (int, float)) or not 0 < scale < math.inf or type(num_clean) is not int or num_clean < 0:
                self._wrong.append(f"its loss scale {scale!r} makes no sense")
            self._scale = scale, num_clean

    def _decoded_list(self, value) -> list:
        found = self.checkpoint.decode(value)
        return found if isinstance(found, list) else []

    def _set_rest(self) -> None:
        with torch.no_grad():
            for name, here in self._loose.items():
                here.copy_(self._values[name])
        for name, module in with_extra_state(self.engine.model):
            if name in self._extra_state:
                module.set_extra_state(self._extra_state[name])
        if self.with_states:
            for group, found in zip(self.optimizer.param_groups, self._groups, strict=True):
                group.update(found)
        if self._scale is not None:
            self.engine.cycle.scaler.scale, self.engine.cycle.scaler.num_clean = float(self._scale[0]), self._scale[1]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(self._scheduler)
        if self._generators is not None:
            set_generators(self._generators, self.engine.device)

    # Bytes.

    def _is_as_it_lies(self) -> bool:
        """Whether every record of this rank is one of the checkpoint's."""
        engine, manifest = self.engine, self.manifest
        here = [(c.numel, c.trainable, c.pieces) for c in engine.layout.chunks]
        there = [(c.numel, c.trainable, c.pieces) for c in manifest.chunks]
        same = all(sources == [(p.begin, i, p.numel)] for i, (p, sources) in enumerate(zip(self.parameters, self._sources)))
        formats = (engine.moments, engine.config.moments) == (manifest.moments, manifest.moments_dtype)
        return self.with_states and manifest.world == engine.ranks.world and here == there and same and formats

    def _read_as_it_lies(self) -> None:
        """Straight into the records' places, a few at a time."""
        engine, rank = self.engine, self.engine.ranks.rank
        under_way: deque[tuple[ChunkState, object, list[aio_ext.Ticket]]] = deque()
        bound = pause.num_records_in_memory(engine.placement, 4)

        def settle() -> None:
            chunk, into, tickets = under_way.popleft()
            try:
                self.checkpoint.settle(chunk.index, rank, tickets)
                self.checkpoint.check(chunk.index, rank, into.segments())
            finally:
                into.finish()
            self._note(chunk)

        try:
            for chunk in engine.registry.chunks:
                if len(under_way) == bound:
                    settle()
                into = _Destination(engine, chunk)
                tickets: list[aio_ext.Ticket] = []
                under_way.append((chunk, into, tickets))
                for offset, buffer in into.parts:
                    if buffer.nbytes:  # each at once in the list: what was begun is waited for, also if the next one fails
                        tickets.append(self.checkpoint.read(chunk.index, rank, offset, buffer))
            while under_way:
                settle()
        finally:
            for _, into, tickets in under_way:
                for ticket in tickets:
                    try:
                        ticket.wait()
                    except OSError:
                        pass
                into.finish()

    def _put_together(self, chunk: ChunkState, shard: Shard) -> None:
        """Fill the segments of a shard, which are zero, from whatever records hold its pieces."""
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
        """(saved parameter, start in it, number of elements) that make up elements [start, start + numel) of a parameter."""
        sources = self._sources[param]
        begin = self.parameters[param].begin + start
        end = begin + numel
        at = max(bisect_right(sources, begin, key=lambda source: source[0]) - 1, 0)
        while begin < end:
            first, index, count = sources[at]
            part = min(end, first + count) - begin
            yield index, begin - first, part
            begin, at = begin + part, at + 1

    def _note(self, chunk: ChunkState) -> None:
        if self._shield.asked_to_stop:
            raise CheckpointError(f"{self.checkpoint.path}: loading was interrupted")  # for the other ranks; here the interrupt is raised
        self._done_nbytes += chunk.record.nbytes
        if self._progress is not None:
            self._progress(self._done_nbytes, self._total_nbytes)


class _Destination:
    """Where a record of the checkpoint is read to: host memory of the chunk, or an area whose bytes then go to the device. parts: each with
    its offset in the record."""

    def __init__(self, engine: Engine, chunk: ChunkState):
        self.engine, self.chunk = engine, chunk
        self.record = record = chunk.record
        self.region, self._end = None, contextlib.ExitStack()
        if chunk.on_device:
            self.region = engine.arena.region(max(record.nbytes, 1))
            self._end.callback(engine.arena.give_back, self.region)
            self._end.callback(self._to_device)
            self.parts = [(0, self.region.buffer[: record.nbytes])]
            return
        lease = self._end.enter_context(engine.records.lease(chunk, write=True, fresh=True))
        sizes = {WEIGHTS: (0, record.weight_nbytes), STATES: (record.states_offset, record.states_nbytes)}
        self.parts = [(sizes[kind][0], entry.memory.buffer[: sizes[kind][1]]) for kind, entry in lease.entries.items()]

    def segments(self) -> dict[str, memoryview]:
        """By name, each with its padding."""
        return {name: found for begin, buffer in self.parts for name, found in padded_segments(self.record, buffer, begin).items()}

    def finish(self) -> None:
        """The bytes are there, right or wrong: hand them on."""
        self._end.close()

    def _to_device(self) -> None:
        with self.engine.values.filled(self.chunk) as shard, torch.no_grad():
            for name, segment in segment_tensors(self.record, self.region).items():
                shard[name].copy_(segment)
