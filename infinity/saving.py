"""Saving and loading the training state of an engine: `infinity.save` and `infinity.load`.

Knows which state a checkpoint holds, and when each record may be taken. Must not know how files are made whole (store.py) or what
a manifest looks like on the disk (manifest.py).

# [Note: when a record is saved]
# A checkpoint is of the moment at which `save` was called, between two steps. Every record is copied, in parts, into one of a few
# areas of host memory, summed and written from there, once:
#   - where an update was announced by the last step() and has not run: by the update lane, right after it ran;
#   - else before the record next changes or moves, by whoever is about to change it: it is in host memory then, at no further read;
#   - what has not changed when a step has passed, or somebody waits: by the thread of the checkpoint. Records that need no read from
#     NVMe, of frozen weights, in host memory or on the device, it takes at once.
# Who wants an area waits until the write from it is over: that is all that training ever waits for. A file of records that have not
# changed since the last checkpoint on the same filesystem is linked.
# Collectives are made in `save` alone; afterwards the ranks tell each other by `Ranks.post` how it went.
#
# [Note: another world size]
# Where ranks, chunks and tiles are as they were, records are read as they lie into the places where they belong. Else each
# shard is put together from the pieces of the records that were saved, checked, of which a few are held at a time.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import aio_ext
from infinity import manifest as manifests
from infinity import tiling
from infinity.arena import PAGE_NBYTES, Arena, Region
from infinity.chunks import STATES, WEIGHTS, record_layout
from infinity.config import parse_bytes
from infinity.engine import Engine, engine_of
from infinity.errors import CheckpointError, PeerError, SwapError, UsageError
from infinity.lanes import THREADS
from infinity.manifest import Manifest, Parameter, Place, Whole
from infinity.residency import TORCH_DTYPES, ChunkState, ParameterState
from infinity.store import Checkpoint, Directory, Linked, Tensors, Writer, lay_out
from infinity.updater import segments

AREA_NBYTES = 16 << 20  # at most; of one segment
LEAST_AREAS = 2  # one is filled while the other is written
_BLOCK_NBYTES = 256 << 10  # copied and summed while it is in the processor's cache
_POLL_S = 0.02

Progress = Callable[[int, int], None]


def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler=None,
    extra: object = None,
    wait: bool = True,
    host_memory: int | str = "64MiB",
    progress: Progress | None = None,
) -> Saving:
    """Save all of the training state in a directory: the checkpoint there is the old one or the new one, whole, at any moment.

    Holds weights, masters, moments, step counts, buffers, hyper-parameters, the loss scale, the scheduler's state_dict() and the
    generators' states (torch, CUDA, numpy, random) of every rank; extra: anything made of numbers, strings, bytes, tensors, arrays,
    lists, tuples and dicts, such as the state of a data loader. Call it between step() and the next forward pass, on all ranks, which
    must see the same directory. wait=False goes on training while it is written, and the result's `wait()` tells how it went. A record
    that is about to change waits until it has been copied into host_memory (of each rank, bytes or "4GiB"), from where it is written:
    with as much as the checkpoint has, training waits for no write; with less, for those that are needed to go on.
    progress(done, total), in bytes of this rank, is called while it waits.

    Raises CheckpointError for what cannot be saved or has no room, SwapError (an OSError) where the disk fails; the old checkpoint is
    there then.
    """
    engine = engine_of(model)
    engine.ready_to_save(optimizer)
    saving = Saving(engine, Path(path), scheduler, extra, parse_bytes(host_memory))
    engine.saving = saving
    if wait:
        saving.wait(progress)
    return saving


def load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler=None,
    progress: Progress | None = None,
) -> Loaded:
    """Bring a model and its optimizer to the state of a checkpoint, whatever world size, chunks or tiers it was saved with.

    Without an optimizer the weights (and masters) and buffers are loaded, and moments begin anew. Generators' states are set if the
    world size is that of the checkpoint. Call it on all ranks. Runs no code from the checkpoint. progress(done, total): in bytes of
    this rank.

    Raises CheckpointError for a checkpoint that is missing, damaged or of another model, naming what differs or where the damage is;
    what is found before the first byte is changed leaves the model as it is, and after what is found later it must be loaded again.
    """
    engine = engine_of(model)
    engine.ready_to_load(optimizer)
    checkpoint = _together(engine.ranks, lambda: Checkpoint(path))
    try:
        loading = _together(engine.ranks, lambda: _Loading(engine, checkpoint, with_states=optimizer is not None))
        digest = int.from_bytes(bytes.fromhex(checkpoint.manifest.folder.removeprefix("data-")), "big")
        if not engine.ranks.agree(digest):
            raise CheckpointError(f"{path}: the ranks read different checkpoints; all must see the same directory")
        with engine.loading():
            _together(engine.ranks, lambda: loading.run(progress))
        manifest = checkpoint.manifest
        if optimizer is not None and manifest.optimizer is not None:
            for group, saved in zip(optimizer.param_groups, manifest.optimizer["groups"], strict=True):
                group.update(checkpoint.decode(saved))
        if optimizer is not None and engine.scaler is not None and manifest.scaler is not None:
            engine.scaler.scale, engine.scaler.num_clean = float(manifest.scaler["scale"]), int(manifest.scaler["num_clean"])
        if scheduler is not None:
            if manifest.scheduler is None:
                raise CheckpointError(f"{path} was saved without a scheduler: give none, or `scheduler=` to infinity.save")
            scheduler.load_state_dict(checkpoint.decode(manifest.scheduler))
        loaded = Loaded(manifest.step, checkpoint.decode(manifest.extra), manifest.world)
        if len(manifest.rng) == engine.ranks.world:
            _set_generators(checkpoint.decode(manifest.rng[engine.ranks.rank]), engine.device)
        return loaded
    finally:
        checkpoint.close()


@dataclass(frozen=True)
class Loaded:
    """What `load` found: the number of optimizer steps, what was given as `extra`, and the world size that saved it."""

    step: int
    extra: object
    world: int


class Saving:
    """A checkpoint under way; see [Note: when a record is saved]. Made by `save`."""

    def __init__(self, engine: Engine, path: Path, scheduler, extra, host_nbytes: int):
        self.path = path
        self.error: BaseException | None = None
        self.was_told = False  # the error was raised somewhere
        self._engine = engine
        self._ranks = engine.ranks
        self._lock = threading.Condition()
        self._left: set[int] = set()  # chunks whose record is still to be taken
        self._busy: set[int] = set()  # being taken
        self._crcs: dict[int, tuple[int, ...]] = {}
        self._changes: dict[int, int] = {}  # of each chunk, when it was taken
        self._steps: dict[int, int] = {}  # updates of each parameter
        self._passed = threading.Event()  # a step, or somebody waits
        self._over = threading.Event()
        on_device = any(chunk.on_device for chunk in engine.registry.chunks)
        self._arena = Arena(pin=on_device and engine.device.type == "cuda")
        self._areas: deque[tuple[Region, list[aio_ext.Ticket]]] = deque()  # nobody fills them; written longest ago comes first
        self._num_areas = 0
        self._host_nbytes = host_nbytes
        self._directory: Directory | None = None
        self._done_nbytes = 0
        self._thread = threading.Thread(target=self._run, name=f"{THREADS}save", daemon=True)
        self._prepare(scheduler, extra)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, progress: Progress | None = None) -> None:
        """Until the checkpoint is whole. Raises what went wrong; the one that was there before is there then. Training thread only."""
        if not self._over.is_set():
            self.pass_step()
        while not self._over.wait(_POLL_S if progress is not None else 0.5):
            if progress is not None:
                progress(self._done_nbytes, self._total_nbytes)
        if progress is not None and self.error is None:
            progress(self._total_nbytes, self._total_nbytes)
        self.was_told = True
        if self.error is not None:
            raise self.error

    def pass_step(self) -> None:
        """A step has passed: whatever is left is taken now. Training thread only."""
        if self._over.is_set():
            return
        for chunk in self._engine.registry.chunks:
            if chunk.after_update is not None and chunk.pending is not None:
                self._engine.begin_announced(chunk)
        self._passed.set()

    def abandon(self, error: BaseException) -> None:
        """The training has failed: leave the old checkpoint."""
        self._fail(error)
        self._thread.join(5)

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else f"{len(self._left)} records left"
        return f"Saving({self.path}, {state})"

    # In `save`.

    def _prepare(self, scheduler, extra) -> None:
        engine, ranks = self._engine, self._ranks
        chunks = engine.registry.chunks
        tensors = Tensors()
        what = _together(ranks, lambda: self._describe(tensors, scheduler, extra))
        self._rng = [json.loads(state) for state in ranks.exchange(json.dumps(_generators(engine.device)).encode())]
        self._content, self._tensors = what, tensors
        self._parameters, self._aliases = parameters_of(engine)
        try:
            self._directory = _together(ranks, lambda: Directory(self.path) if not ranks.rank else None)
            self._name = ranks.exchange(self._directory.folder.encode() if self._directory else b"")[0].decode()
            folder = self.path / self._name
            files, self._places = lay_out([chunk.record for chunk in chunks], [chunk.trainable for chunk in chunks], ranks.rank)
            linked = self._unchanged(files)
            fresh = sum(file.nbytes for index, file in enumerate(files) if index not in linked)
            everyone = sum(int(nbytes) for nbytes in ranks.exchange(str(fresh).encode())) + tensors.nbytes

            def make() -> Writer:
                if self._directory is not None:
                    self._directory.check_space(everyone)
                if not folder.is_dir():
                    raise CheckpointError(f"{folder} is not there for {ranks.name}: all ranks must see the same directory")
                return Writer(folder, [chunk.record for chunk in chunks], files, self._places, linked)

            self._writer = _together(ranks, make)
        except BaseException:
            if self._directory is not None:
                self._directory.abort()
            raise
        self._files = files
        largest = max((chunk.record.numel * s.itemsize for chunk in chunks for s in chunk.record.segments), default=0)
        self._area_nbytes = min(AREA_NBYTES, -(-max(largest, 1) // PAGE_NBYTES) * PAGE_NBYTES)
        self._most_areas = max(LEAST_AREAS, self._host_nbytes // self._area_nbytes)
        if engine.device.type == "cuda":  # what the checkpoint's own thread copies comes after all that was queued until now
            self._copies = torch.cuda.Stream(engine.device)
            self._copies.wait_stream(torch.cuda.current_stream(engine.device))
        self._total_nbytes = fresh
        for chunk in chunks:
            if self._places[chunk.index][0] in linked:
                self._note(chunk, linked[self._places[chunk.index][0]].crcs[chunk.index])
                continue
            self._left.add(chunk.index)
            if chunk.pending is not None:
                chunk.after_update = self._take
            else:
                chunk.before_change = self._take
            if chunk.on_device and any(state.written_in_forward for state in chunk.span.params):
                self._take(chunk)  # the next forward pass changes it where it is

    def _describe(self, tensors: Tensors, scheduler, extra) -> dict:
        """What is not in records, as of now; on rank 0, the others' are not looked at."""
        engine, model = self._engine, self._engine.model
        states = {id(state.param): state for state in engine.registry.params}
        buffers = {
            name: {"$tensor": tensors.put(value)} for name, value in _loose(model, states).items() if not self._ranks.rank
        }
        extra_state = {name: module.get_extra_state() for name, module in _with_extra_state(model)}
        found = {
            "model": {"buffers": buffers, "extra_state": manifests.encode(extra_state, tensors.put, "extra state of the model")},
            "optimizer": None,
            "scheduler": manifests.encode(None if scheduler is None else scheduler.state_dict(), tensors.put, "scheduler"),
            "scaler": None,
            "extra": manifests.encode(extra, tensors.put, "extra"),
        }
        if engine.optimizer is not None:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
            groups = manifests.encode(groups, tensors.put, "a parameter group")
            found["optimizer"] = {"rule": type(engine.optimizer.rule).__name__, "groups": groups}
        if engine.scaler is not None:
            found["scaler"] = {"scale": engine.scaler.scale, "num_clean": engine.scaler.num_clean}
        return found

    def _unchanged(self, files) -> dict[int, Linked]:
        """Files of the last checkpoint of this engine that hold what this one's would."""
        last = self._engine.last_save
        if last is None or [file.nbytes for file in last.files] != [file.nbytes for file in files]:
            return {}
        inside: dict[int, list[ChunkState]] = {}
        for chunk in self._engine.registry.chunks:
            inside.setdefault(self._places[chunk.index][0], []).append(chunk)
        found = {}
        for index, chunks in inside.items():
            path = last.folder / last.files[index].name
            still = all(
                chunk.pending is None
                and (chunk.updating is None or chunk.updating.done)
                and last.changes.get(chunk.index) == chunk.num_changes
                for chunk in chunks
            )
            if still and _is_file(path, files[index].nbytes, self.path):
                found[index] = Linked(path, {chunk.index: last.crcs[chunk.index] for chunk in chunks})
        return found

    # Taking a record: in the training thread, the update lane or the checkpoint's own.

    def _take(self, chunk: ChunkState, entries: dict | None = None) -> None:
        """Copy the record and begin to write it, unless somebody else has done it meanwhile.

        Who waits here for another waits for a copy and the disk only: nobody claims a record before he has it in memory.
        """
        records, borrowed = self._engine.records, {}
        try:
            if entries is None and not chunk.on_device:
                entries = borrowed = records.obtain_all(chunk, (WEIGHTS, STATES) if chunk.trainable else (WEIGHTS,))
            with self._lock:
                while chunk.index in self._busy:
                    self._lock.wait()
                if chunk.index not in self._left:
                    return
                self._busy.add(chunk.index)
            try:
                self._copy(chunk, entries)
            finally:
                with self._lock:
                    self._left.discard(chunk.index)
                    self._busy.discard(chunk.index)
                    chunk.before_change = chunk.after_update = None
                    self._lock.notify_all()
        except BaseException as error:  # the checkpoint is lost, not the training
            self._fail(error)
        finally:
            for kind, entry in borrowed.items():
                records.unpin(chunk, kind, entry)

    def _copy(self, chunk: ChunkState, entries: dict | None) -> None:
        """Copy and sum the record an area at a time, and begin to write each."""
        record = chunk.record
        if entries is None:
            state = self._engine.updater.device_state(chunk)
        else:
            state = segments(chunk, entries[WEIGHTS].memory, entries[STATES].memory if chunk.trainable else None)
        crcs = []
        for segment, offset in zip(record.segments, record.offsets):
            nbytes, crc = record.numel * segment.itemsize, 0
            for begin in range(0, nbytes, self._area_nbytes):
                count = min(self._area_nbytes, nbytes - begin)
                crc = self._copy_part(chunk, state[segment.name], offset, begin, count, crc)
            crcs.append(crc)
        self._note(chunk, tuple(crcs))

    def _copy_part(self, chunk: ChunkState, segment: torch.Tensor, offset: int, begin: int, count: int, crc: int) -> int:
        """`count` bytes of a segment at `offset` of its record, from byte `begin` of it; returns the sum so far."""
        region, tickets = self._borrow()
        begun: list[aio_ext.Ticket] = []
        try:
            self._settle(tickets)
            padded = -(-count // PAGE_NBYTES) * PAGE_NBYTES
            ctypes.memset(region.address + count, 0, padded - count)  # the same state has the same file
            if segment.device.type == "cpu":
                crc = _copy_and_sum(segment.data_ptr() + begin, region, count, crc)
            else:
                part = slice(begin // segment.itemsize, (begin + count) // segment.itemsize)
                self._copy_from_device(segment[part], region.tensor(segment.dtype, 0, count // segment.itemsize))
                crc = aio_ext.crc32c(region.buffer[:count], crc)
            begun.append(self._writer.write(chunk.index, offset + begin, region.buffer[:padded]))
            self._done_nbytes += padded
            return crc
        finally:
            with self._lock:
                self._areas.append((region, begun))
                self._lock.notify_all()

    def _borrow(self) -> tuple[Region, list[aio_ext.Ticket]]:
        """An area, with what is still being written from it; a new one only if all others are in use."""
        with self._lock:
            while True:
                self._raise_error()
                is_full = self._num_areas == self._most_areas
                if self._areas and (is_full or all(ticket.done for ticket in self._areas[0][1])):
                    return self._areas.popleft()
                if not is_full:
                    self._num_areas += 1
                    break
                self._lock.wait()
        return self._arena.region(self._area_nbytes), []

    def _copy_from_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        mine = threading.current_thread() is self._thread
        copies = self._copies if mine else torch.cuda.current_stream(self._engine.device)
        with torch.cuda.stream(copies):
            target.copy_(source, non_blocking=True)
            copies.record_event().synchronize()

    def _note(self, chunk: ChunkState, crcs: tuple[int, ...]) -> None:
        with self._lock:
            self._crcs[chunk.index] = crcs
            self._changes[chunk.index] = chunk.num_changes
            self._steps.update(chunk.steps)

    def _settle(self, tickets: list[aio_ext.Ticket]) -> None:
        for ticket in tickets:
            try:
                ticket.wait()
            except OSError as error:
                raise SwapError(error.errno, f"a write of the checkpoint failed ({error.strerror})", str(self.path)) from error

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self.error = self.error or error
            for chunk in self._engine.registry.chunks:
                chunk.before_change = chunk.after_update = None
            self._left -= self._left - self._busy
            self._lock.notify_all()
        self._passed.set()

    # The checkpoint's own thread.

    def _run(self) -> None:
        try:
            self._take_the_rest()
            for _, tickets in self._areas:
                self._settle(tickets)
            self._raise_error()
            self._writer.finish()
            self._publish()
        except BaseException as error:
            self._fail(error)
            self._writer.abort()
            self._report(error)
            if self._directory is not None:
                self._directory.abort()
        finally:
            with self._lock:
                while self._busy:
                    self._lock.wait()
            self._arena.close()
            self._over.set()

    def _take_the_rest(self) -> None:
        chunks = [chunk for chunk in self._engine.registry.chunks if chunk.index in self._left]
        for chunk in chunks:
            if chunk.before_change is not None and not (chunk.trainable and "nvme" in (chunk.weights_home, chunk.states_home)):
                self._take(chunk)
        with self._lock:
            while self._left and not self._passed.is_set():
                self._lock.wait(_POLL_S)
        for chunk in chunks:
            if chunk.before_change is not None:
                self._take(chunk)
        with self._lock:
            while self._left:
                self._lock.wait(0.5)
                if self._engine.records.failure is not None:
                    raise self._engine.records.failure
                self._check_ranks()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _check_ranks(self) -> None:
        if self._ranks.failure is not None:
            raise self._ranks.failure

    def _publish(self) -> None:
        """Tell rank 0 what was written here; it makes the manifest and tells all how that went."""
        ranks = self._ranks
        mine = {"crcs": [self._crcs[index] for index in range(len(self._crcs))]}
        if ranks.rank:
            ranks.post(f"{self._name}/{ranks.rank}", json.dumps(mine).encode())
            text = self._look(f"{self._name}/result").decode()
            if text:
                raise CheckpointError(text)
        else:
            everyone = [mine] + [json.loads(self._look(f"{self._name}/{rank}")) for rank in range(1, ranks.world)]
            if failed := [f"rank {rank}: {found['error']}" for rank, found in enumerate(everyone) if "error" in found]:
                raise CheckpointError(f"{self.path}: the checkpoint was given up: {'; '.join(failed)}")
            self._tensors.write(self.path / self._name)
            self._directory.commit(self._manifest([found["crcs"] for found in everyone]))
            for rank in range(1, ranks.world):
                ranks.forget(f"{self._name}/{rank}")
            ranks.post(f"{self._name}/result", b"")
        self._engine.last_save = LastSave(self.path / self._name, self._files, dict(self._crcs), dict(self._changes))

    def _report(self, error: BaseException) -> None:
        """Let the other ranks know."""
        text = str(error) or type(error).__name__
        try:
            if self._ranks.rank:
                self._ranks.post(f"{self._name}/{self._ranks.rank}", json.dumps({"error": text}).encode())
            else:
                self._ranks.post(f"{self._name}/result", f"rank 0: {text}".encode())
        except Exception:  # they are gone
            pass

    def _look(self, key: str) -> bytes:
        while (value := self._ranks.look(key)) is None:
            self._raise_error()
            time.sleep(_POLL_S)
        return value

    def _manifest(self, crcs: list[list[list[int]]]) -> Manifest:
        engine, config, layout = self._engine, self._engine.config, self._engine.layout
        world, moments = self._ranks.world, engine.moments
        files, places = [], [[] for _ in layout.chunks]
        for rank in range(world):
            records = [record_layout(c.shard_used(rank), config.dtype, c.trainable, moments, config.moments) for c in layout.chunks]
            own, at = lay_out(records, [chunk.trainable for chunk in layout.chunks], rank)
            for index, (file, offset) in enumerate(at):
                places[index].append(Place(len(files) + file, offset, tuple(crcs[rank][index])))
            files += own
        return Manifest(
            folder=self._name,
            world=world,
            dtype=config.dtype,
            moments_dtype=config.moments,
            moments=moments,
            seed=config.seed if engine.updater.seed is None else engine.updater.seed,
            parameters=tuple(replace(parameter, step=self._steps[index]) for index, parameter in enumerate(self._parameters)),
            aliases=self._aliases,
            chunks=layout.chunks,
            places=tuple(map(tuple, places)),
            files=tuple(files),
            tensors=tuple(self._tensors.entries),
            rng=tuple(self._rng),
            **self._content,
        )


@dataclass(frozen=True)
class LastSave:
    """What this rank wrote of the last checkpoint: its files, checksums, and how often each record had changed."""

    folder: Path
    files: list[manifests.File]
    crcs: dict[int, tuple[int, ...]]
    changes: dict[int, int]


class _Loading:
    """Filling an engine's records from a checkpoint. Raises CheckpointError, before anything changes, if the two do not match."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, *, with_states: bool):
        self.engine = engine
        self.checkpoint = checkpoint
        self.with_states = with_states
        self.manifest = checkpoint.manifest
        self._wrong: list[str] = []
        self.parameters, _ = parameters_of(engine)
        self._match_parameters()
        self._match_loose()
        if with_states:
            self._match_optimizer()
        if self._wrong:
            more = f"; and {len(self._wrong) - 20} more" if len(self._wrong) > 20 else ""
            raise CheckpointError(f"{checkpoint.path} does not fit the model: {'; '.join(self._wrong[:20])}{more}")

    def run(self, progress: Progress | None) -> None:
        self._total_nbytes = sum(chunk.record.nbytes for chunk in self.engine.registry.chunks)
        self._done_nbytes, self._progress = 0, progress
        if self._is_as_it_lies():
            self._read_as_it_lies()
        else:
            for chunk in self.engine.registry.chunks:
                with self._filled(chunk) as shard:
                    self._put_together(chunk, shard)
                self._note(chunk)
        self.engine.records.flush()
        for state in self.engine.registry.params:
            step = self.manifest.parameters[self._sources[state.index][0][1]].step if self.with_states else 0
            for chunk in self.engine.registry.chunks_of(state):
                chunk.steps[state.index] = step
        if self.with_states and self.engine.updater.seed is not None:
            self.engine.updater.seed = self.manifest.seed
        self._set_loose()

    # Does it fit?

    def _match_parameters(self) -> None:
        engine, manifest = self.engine, self.manifest
        config = engine.config
        saved: dict[str, list[tuple[Whole, int]]] = {}
        for index, parameter in enumerate(manifest.parameters):
            saved.setdefault(parameter.canonical.name, []).append((parameter.canonical, index))
        names = {old: new for new, old in manifest.aliases.items()} | manifest.aliases
        wanted = {parameter.canonical.name for parameter in self.parameters}
        for name in list(saved):
            if name not in wanted and names.get(name) in wanted:  # tied the other way round
                saved[names[name]] = saved.pop(name)
        if config.dtype != manifest.dtype:
            self._wrong.append(
                f"it was saved with dtype={manifest.dtype!r}, this is {config.dtype!r}: export it to safetensors and load these"
            )
        missing = sorted(wanted - saved.keys())
        unexpected = sorted(saved.keys() - wanted)
        self._wrong += [f"missing in the checkpoint: {', '.join(missing[:8])}{' ...' if missing[8:] else ''}"] if missing else []
        self._wrong += [f"unknown to the model: {', '.join(unexpected[:8])}{' ...' if unexpected[8:] else ''}"] if unexpected else []
        self._sources: list[list[tuple[int, int, int]]] = []  # of each parameter: (start in the whole one, saved parameter, numel)
        for parameter in self.parameters:
            whole = parameter.canonical
            found = saved.get(whole.name, [])
            if found and found[0][0].shape != whole.shape:
                self._wrong.append(f"{whole.name} has shape {list(found[0][0].shape)} there and {list(whole.shape)} here")
                found = []
            same = [index for box, index in found if box.begin == whole.begin and manifest.parameters[index].shape == parameter.shape]
            if same:
                self._sources.append([(parameter.begin, same[0], parameter.numel)])
            elif parameter.is_rows and all(manifest.parameters[index].is_rows for _, index in found):
                rows = sorted((manifest.parameters[i].begin, i, manifest.parameters[i].numel) for _, i in found)
                self._sources.append(rows)
            else:
                self._wrong.append(f"{whole.name} is cut into other tiles along in_features; export it to safetensors and load these")
                self._sources.append([])

    def _match_optimizer(self) -> None:
        engine, manifest = self.engine, self.manifest
        if manifest.moments != engine.moments or manifest.moments_dtype != engine.config.moments:
            here, there = (f"{', '.join(m) or 'none'} in {d}" for m, d in ((engine.moments, engine.config.moments),
                                                                          (manifest.moments, manifest.moments_dtype)))
            self._wrong.append(f"the optimizer has moments {here}, there are {there}; load without the optimizer to begin anew")
            return
        if manifest.optimizer is None:
            self._wrong.append("it was saved without an optimizer; load without one to begin anew")
            return
        num_groups = len(engine.optimizer.param_groups)
        if len(manifest.optimizer.get("groups", ())) != num_groups:
            self._wrong.append(f"{len(manifest.optimizer.get('groups', ()))} parameter groups there, {num_groups} here")
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
        model = self.manifest.model
        states = {id(state.param): state for state in self.engine.registry.params}
        self._loose = _loose(self.engine.model, states)
        saved = model.get("buffers", {})
        if not isinstance(saved, dict):
            raise CheckpointError("buffers of the manifest are no object")
        for name in sorted(self._loose.keys() ^ saved.keys()):
            self._wrong.append(f"buffer {name} is only {'in the model' if name in self._loose else 'in the checkpoint'}")
        self._values = {name: self.checkpoint.decode(value) for name, value in saved.items()}
        for name, value in self._values.items():
            here = self._loose.get(name)
            if here is not None and (not isinstance(value, torch.Tensor) or value.shape != here.shape):
                self._wrong.append(f"buffer {name} has shape {list(getattr(value, 'shape', ()))} there and {list(here.shape)} here")

    def _set_loose(self) -> None:
        with torch.no_grad():
            for name, here in self._loose.items():
                here.copy_(self._values[name])
        saved = self.checkpoint.decode(self.manifest.model.get("extra_state", {}))
        for name, module in _with_extra_state(self.engine.model):
            if name in saved:
                module.set_extra_state(saved[name])

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
        bound = engine.num_records_in_memory(4)

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
                into = _Into(engine, chunk)
                tickets: list[aio_ext.Ticket] = []
                under_way.append((chunk, into, tickets))
                tickets += [self.checkpoint.read(chunk.index, rank, offset, buffer) for offset, buffer in into.parts if buffer.nbytes]
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

    def _filled(self, chunk: ChunkState):
        return self.engine.values.filled(chunk)

    def _put_together(self, chunk: ChunkState, shard: dict[str, torch.Tensor]) -> None:
        """Fill the segments of a shard, which are zero, from whatever records hold its pieces."""
        names = shard.keys() if self.with_states else shard.keys() & {"weight", "residual", "master"}
        for piece in chunk.pieces:
            at = piece.start
            for param, start, numel in self._locate(piece.param, piece.param_start, piece.numel):
                for count, found in self.checkpoint.values(param, start, numel):
                    for name in names:
                        if name in found:
                            shard[name][at : at + count].copy_(found[name])
                        elif name == "master":
                            shard[name][at : at + count].copy_(found["weight"])
                    at += count

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
        self._done_nbytes += chunk.record.nbytes
        if self._progress is not None:
            self._progress(self._done_nbytes, self._total_nbytes)


class _Into:
    """Where a record of the checkpoint is read to: host entries of the chunk, or an area whose bytes then go to the device."""

    def __init__(self, engine: Engine, chunk: ChunkState):
        self.engine, self.chunk = engine, chunk
        self.record = chunk.record
        self.entries = self.region = None
        if chunk.on_device:
            self.region = engine.arena.region(max(self.record.nbytes, 1))
            self.parts = [(0, self.region.buffer[: self.record.nbytes])]
            return
        kinds = (WEIGHTS, STATES) if chunk.trainable else (WEIGHTS,)
        self.entries = {kind: engine.records.fresh(chunk, kind) for kind in kinds}
        engine.records.begin_update(chunk, self.entries)
        sizes = {WEIGHTS: (0, self.record.weight_nbytes), STATES: (self.record.states_offset, self.record.states_nbytes)}
        self.parts = [(sizes[kind][0], entry.memory.buffer[: sizes[kind][1]]) for kind, entry in self.entries.items()]

    def segments(self) -> dict[str, memoryview]:
        found = {}
        for segment, offset in zip(self.record.segments, self.record.offsets):
            begin, buffer = next((b, m) for b, m in reversed(self.parts) if b <= offset)
            found[segment.name] = buffer[offset - begin : offset - begin + self.record.numel * segment.itemsize]
        return found

    def finish(self) -> None:
        """The bytes are there, right or wrong: hand them on."""
        if self.entries is not None:
            self.engine.records.write_back(self.chunk, self.entries)
            return
        state = self.engine.updater.device_state(self.chunk)
        self.chunk.begin_change()
        with torch.no_grad():
            for segment, offset in zip(self.record.segments, self.record.offsets):
                state[segment.name].copy_(self.region.tensor(TORCH_DTYPES[segment.dtype], offset, self.record.numel))
        self.engine.updater.take_snapshot(self.chunk)
        self.engine.arena.give_back(self.region)


def parameters_of(engine: Engine) -> tuple[list[Parameter], dict[str, str]]:
    """The engine's parameters as a manifest has them, but for their steps, and the other names of tied ones."""
    places = tiling.places(engine.model)
    found, names = [], {}
    for state in engine.registry.params:
        place = places.get(state.param)
        whole = Whole(place.name, place.shape, place.begin) if place is not None else None
        found.append(Parameter(state.name, tuple(state.shape), state.trainable, state.group, whole=whole))
        names[id(state.param)] = state.name
    everything = engine.model.named_parameters(remove_duplicate=False)
    aliases = {name: names[id(param)] for name, param in everything if id(param) in names and names[id(param)] != name}
    return found, aliases


def _loose(model: nn.Module, states: dict[int, ParameterState]) -> dict[str, torch.Tensor]:
    """What of a state_dict is in no record: persistent buffers, and parameters that are no floating-point numbers or empty."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        own = {name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}
        own |= {name: param for name, param in dict.items(module._parameters) if id(param) not in states}
        found |= {f"{prefix}.{name}" if prefix else name: value for name, value in own.items() if value is not None}
    return found


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(name, module) for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def _generators(device: torch.device) -> dict:
    """The states of the random number generators of this process, in JSON."""
    kind, keys, *rest = np.random.get_state()
    found = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None,
        "numpy": (kind, keys.tobytes(), *rest),
        "python": random.getstate(),
    }
    return manifests.encode(found, lambda tensor: 0, "generators")


def _set_generators(found: dict, device: torch.device) -> None:
    try:
        torch.set_rng_state(torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8))
        if found["cuda"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(found["cuda"]), dtype=torch.uint8), device)
        kind, keys, *rest = found["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        random.setstate(found["python"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the generators' states in the checkpoint make no sense ({error})") from None


def _copy_and_sum(address: int, region: Region, nbytes: int, crc: int) -> int:
    """Copy bytes from an address to the start of a region; returns their CRC32C, continued."""
    for begin in range(0, nbytes, _BLOCK_NBYTES):
        count = min(_BLOCK_NBYTES, nbytes - begin)
        ctypes.memmove(region.address + begin, address + begin, count)
        crc = aio_ext.crc32c(region.buffer[begin : begin + count], crc)
    return crc


def _is_file(path: Path, nbytes: int, beside: Path) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
        return status.st_size == nbytes and status.st_dev == os.stat(beside).st_dev
    except OSError:
        return False


def _together(ranks, work: Callable[[], object]):
    """Do it on every rank; if it fails on any, raise on all."""
    result, error = None, None
    try:
        result = work()
    except (CheckpointError, SwapError, UsageError, PeerError) as failure:
        error = failure
    texts = ranks.exchange((str(error) or "failed").encode() if error is not None else b"")
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {text.decode()}" for rank, text in enumerate(texts) if text]:
        raise CheckpointError("; ".join(failed))
    return result
