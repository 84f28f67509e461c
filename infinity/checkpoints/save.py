"""Saving the training state of an engine: `infinity.save`.

Knows when each record may be taken, and by whom. Must not know how files are made whole (files.py) or what a manifest looks like on
the disk (manifest.py).

# [Note: when a record is saved]
# A checkpoint is of the moment at which `save` was called, between two steps. Every record is copied, in parts, into one of a few
# areas of host memory, summed and written from there, once:
#   - where an update was announced by the last step() and has not run: by the update lane, right after it ran;
#   - else before the record next changes or moves, by whoever is about to change it: it is in host memory then, at no further read;
#   - what has not changed when a step has passed, or somebody waits, or after PATIENCE_S: by the thread of the checkpoint. Records
#     that need no read from NVMe, or are of frozen weights, it takes at once;
#   - on the device in `save`, before it returns: whatever runs there next may write to the record itself.
# Who wants an area waits until the write from it is over: that is all that training ever waits for.
# What has not changed since the last checkpoint may be linked instead: [Note: what is linked] in linked.py.
#
# Collectives are made in `save` alone; afterwards the ranks tell each other by `Ranks.post` how it went.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import aio_ext
from infinity.checkpoints.areas import Areas
from infinity.checkpoints.contents import digest_of, draft, generators, values_of
from infinity.checkpoints.files import Directory, Progress, lay_out, lay_out_all
from infinity.checkpoints.linked import LastSave, Linked, is_whole, to_read, unchanged
from infinity.checkpoints.manifest import RecordPlace
from infinity.checkpoints.publish import POLL_S, Publication
from infinity.checkpoints.writer import Tensors, Writer
from infinity.config import checked_path
from infinity.engine.access import save_window as pause
from infinity.engine.engine import Engine
from infinity.engine.engines import engine_of
from infinity.errors import CheckpointError, warn
from infinity.plan.tiers import in_storage
from infinity.sizes import parse_budget, parse_bytes
from infinity.system.arena import PAGE_NBYTES
from infinity.system.lanes import Monitor
from infinity.system.waits import THREADS
from infinity.tiers.record_mover import Lease
from infinity.tiers.chunk_state import ChunkState

MOST_THREADS = 8  # that copy what is in host memory: half of the processors
PATIENCE_S = 10.0  # of the checkpoint's thread with records that a step would bring into host memory


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

    Holds weights, masters, moments, step counts, hyper-parameters, the loss scale, the generators' states (torch, CUDA, numpy,
    random) of every rank, and of rank 0 the buffers and the scheduler's state_dict(). extra: anything made of numbers, strings,
    bytes, tensors, arrays, lists, tuples and dicts, long lists as tensors or arrays, the same on every rank, such as the states of
    all ranks' data loaders. Call it between step() and the next forward pass, on all ranks, which must see the same directory.
    wait=False goes on training while it is written, and the result's `wait()` tells how it went. A record that is about to change
    waits until it has been copied into host_memory (of each rank, bytes or "4GiB"), from where it is written: with as much as the
    checkpoint has, training waits for no write; with less, for those that are needed to go on. Two areas of at most 16 MiB are taken
    in any case. Updates that the last step() announced are saved as the next forward pass, `wait()` or close() runs them.
    progress(done, total), in bytes of this rank, is called while it waits.

    Raises CheckpointError for what cannot be saved or has no room, SwapError (an OSError) where the disk fails; the old
    checkpoint is there then.
    """
    engine = engine_of(model)
    with engine.turn, engine.ranks.at("infinity.save"):
        pause.ready_to_save(engine, optimizer)
        nbytes = parse_budget(host_memory) if parse_bytes(host_memory) else 0
        saving = pause.shielded(engine.device, lambda shield: Saving(engine, checked_path(path), scheduler, extra, nbytes))
        if engine.optimizer is not None:
            engine.optimizer.refer_to({"checkpoint": str(saving.path.absolute()), "folder": saving.folder}, saving.wait)
        if wait:
            saving.wait(progress)
    return saving


class Saving:
    """A checkpoint under way; see [Note: when a record is saved]. Made by `save`."""

    def __init__(self, engine: Engine, path: Path, scheduler, extra, host_nbytes: int):
        self.path = path
        self._root = path.absolute()  # the program may go elsewhere
        self.error: BaseException | None = None
        self.was_told = False  # the error was raised somewhere
        self._pid = os.getpid()
        self._engine = engine
        self._ranks = engine.ranks
        self._lock = Monitor()
        self._left: set[int] = set()  # chunks whose record is still to be taken, or read where it is linked
        self._unread: dict[int, Linked] = {}  # linked files that are to be read first
        self._busy: set[int] = set()  # being taken
        self._crcs: dict[int, tuple[int, ...]] = {}
        self._changes: dict[int, int] = {}  # of each chunk, when it was taken
        self._steps: dict[int, int] = {}  # updates of each parameter
        self._passed = threading.Event()  # a step, or somebody waits
        self._over = threading.Event()
        self._directory: Directory | None = None
        self._done_nbytes = 0
        self._thread = threading.Thread(target=self._run, name=f"{THREADS}save", daemon=True)
        self._prepare(scheduler, extra)
        self._begin(host_nbytes)
        atexit.register(self._at_exit)
        self._thread.start()
        engine.saving = self

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, progress: Progress | None = None) -> None:
        """Until the checkpoint is whole. Raises what went wrong; the one that was there before is there then. In another thread than the
        one that trains, the updates that step() had announced are waited for until that one makes them."""
        if not self._over.is_set() and not self._engine.lifecycle.trains_elsewhere:
            self.pass_step()
        while not self._over.wait(POLL_S if progress is not None else 0.5):
            if progress is not None:
                progress(self._done_nbytes, self._total_nbytes)
        if progress is not None and self.error is None:
            progress(self._total_nbytes, self._total_nbytes)
        self.was_told = True
        self._engine.freed.give_back()
        if self.error is not None:
            raise self.error

    def pass_step(self) -> None:
        """A step has passed: whatever is left is taken now. Training thread only."""
        if self._over.is_set():
            return
        for chunk in self._engine.registry.chunks:
            if chunk.after_update is not None and chunk.update.is_announced:
                self._engine.updater.begin_announced(chunk)
        self._passed.set()

    def _at_exit(self) -> None:
        """The program ends without having waited."""
        if os.getpid() != self._pid:  # a forked child, which has none of the threads
            return
        try:
            self.wait()
        except Exception as error:
            print(f"infinity: the checkpoint {self.path} was not completed: {error}", file=sys.stderr)

    def abandon(self, error: BaseException) -> None:
        """The training has failed: leave the old checkpoint."""
        self._fail(error)
        self._thread.join(5)

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else f"{len(self._left)} records left"
        return f"Saving({self.path}, {state})"

    # In `save`.

    def _prepare(self, scheduler, extra) -> None:
        """All that may be refused: what is not in records, the directory, room in it, and the files."""
        engine, ranks = self._engine, self._ranks
        chunks = engine.registry.chunks
        self._tensors = tensors = Tensors()
        values = ranks.together(lambda: values_of(engine, tensors.put, scheduler, extra))
        rng = tuple(json.loads(state) for state in ranks.exchange(json.dumps(generators(engine.device)).encode()))
        if len(set(ranks.exchange(digest_of(values["extra"], [entry.crc32c for entry in tensors.entries])))) > 1:
            raise CheckpointError(
                "extra: the ranks gave different ones, and a checkpoint keeps one for all: gather what each of them needs into it, for "
                "instance a list by rank (torch.distributed.all_gather_object)"
            )
        try:
            self._directory = ranks.together(lambda: Directory(self._root) if not ranks.rank else None, undo=_abort)
            name = ranks.exchange(self._directory.folder.encode() if self._directory else b"")[0].decode()
            self.folder = name  # below the path, of this checkpoint alone
            self._draft = draft(engine, folder=name, tensors=tuple(tensors.entries), rng=rng, **values)
            self._publication = Publication(ranks, self.path, name, self._raise_error)
            folder = self._root / name
            self._files, self._places = lay_out([chunk.record for chunk in chunks], [chunk.trainable for chunk in chunks], ranks.rank)
            self._number = 0 if engine.last_save is None else engine.last_save.number + 1
            self._linked = unchanged(engine.last_save, self._number, chunks, self._files, self._places, self._root)
            fresh = sum(file.nbytes for index, file in enumerate(self._files) if index not in self._linked)
            everyone = sum(int(nbytes) for nbytes in ranks.exchange(str(fresh).encode())) + tensors.nbytes

            def make() -> Writer:
                if self._directory is not None:
                    self._directory.check_space(everyone)
                if not folder.is_dir():
                    raise CheckpointError(f"{folder} is not there for {ranks.name}: all ranks must see the same directory")
                return Writer(folder, self._files, self._places, {index: file.path for index, file in self._linked.items()})

            self._writer = ranks.together(make, undo=Writer.abort)
        except BaseException:
            if self._directory is not None:
                self._directory.abort()
            raise

    def _begin(self, host_nbytes: int) -> None:
        """From here on, whoever is about to change a record takes it before."""
        engine, files, linked = self._engine, self._files, self._linked
        chunks, kept = engine.registry.chunks, self._writer.linked
        unread = to_read(linked, files)
        self._total_nbytes = sum(file.nbytes for index, file in enumerate(files) if index not in kept)
        largest = max((s.nbytes(chunk.record.numel) for chunk in chunks for s in chunk.record.segments), default=0)
        pin = engine.device.type == "cuda" and any(chunk.on_device for chunk in chunks)
        self._areas = Areas(self.path, host_nbytes=host_nbytes, largest_nbytes=largest, pin=pin)
        self._unread = {file: linked[file] for file in unread if file in kept}
        self._ages = {file: linked[file].age + 1 if file in kept and file not in unread else 0 for file in range(len(files))}
        for chunk in chunks:
            file = self._places[chunk.index][0]
            if file in kept and file not in self._unread:
                self._note(chunk, linked[file].crcs[chunk.index])
                continue
            self._left.add(chunk.index)
            if chunk.update.is_announced:
                chunk.after_update = self._take
            else:
                chunk.before_change = self._take
        for chunk in chunks:
            if chunk.on_device and chunk.index in self._left and self._places[chunk.index][0] not in self._unread:
                self._take(chunk)

    # Taking a record: in the training thread, the update lane or the checkpoint's own.

    def _take(self, chunk: ChunkState, lease: Lease | None = None) -> None:
        """Copy the record and begin to write it, unless somebody else has done it meanwhile.

        Who waits here for another waits for a copy and the disk only: nobody claims a record before he has it in memory.
        """
        try:
            has_it = lease is not None or chunk.on_device
            with contextlib.nullcontext(lease) if has_it else self._engine.records.lease(chunk) as lease:
                with self._lock:
                    while chunk.index in self._busy:
                        self._lock.wait()
                    if chunk.index not in self._left:
                        return
                    self._busy.add(chunk.index)
                try:
                    self._unlink(self._places[chunk.index][0])
                    self._copy(chunk, lease)
                finally:
                    with self._lock:
                        self._left.discard(chunk.index)
                        self._busy.discard(chunk.index)
                        chunk.before_change = chunk.after_update = None
                        self._lock.notify_all()
        except BaseException as error:  # the checkpoint is lost, not the training
            self._fail(error)

    def _unlink(self, file: int) -> None:
        """A file that was linked and is not read yet is written instead."""
        with self._lock:
            if self._unread.pop(file, None) is not None:
                self._writer.renew(file)
                self._total_nbytes += self._files[file].nbytes

    def _copy(self, chunk: ChunkState, lease: Lease | None) -> None:
        """Copy and sum the record an area at a time, and begin to write each."""
        record = chunk.record
        state = self._engine.updater.device_state(chunk) if chunk.on_device else lease.shard
        crcs = []
        for segment, offset in zip(record.segments, record.offsets):
            nbytes, crc = segment.nbytes(record.numel), 0
            for begin in range(0, nbytes, self._areas.nbytes):
                count = min(self._areas.nbytes, nbytes - begin)
                crc = self._copy_part(chunk, state[segment.name], offset, begin, count, crc)
            crcs.append(crc)
        self._note(chunk, tuple(crcs))

    def _copy_part(self, chunk: ChunkState, segment: torch.Tensor, offset: int, begin: int, count: int, crc: int) -> int:
        """`count` bytes of a segment at `offset` of its record, from byte `begin` of it; returns the sum so far."""
        with self._areas.area() as (region, begun):
            padded = -(-count // PAGE_NBYTES) * PAGE_NBYTES
            ctypes.memset(region.address + count, 0, padded - count)  # the same state has the same file
            part = segment[begin // segment.itemsize : (begin + count) // segment.itemsize]
            if part.device.type == "cpu":
                # Not part.numpy(): the storage could not be resized any more, and the engine does.
                crc = aio_ext.crc32c((ctypes.c_char * count).from_address(part.data_ptr()), crc, into=region.buffer[:count])
            else:
                region.tensor(part.dtype, 0, part.numel()).copy_(part)  # in the order of the compute stream
                crc = aio_ext.crc32c(region.buffer[:count], crc)
            begun.append(self._writer.write(chunk.index, offset + begin, region.buffer[:padded]))
            self._done_nbytes += padded
            return crc

    def _note(self, chunk: ChunkState, crcs: tuple[int, ...]) -> None:
        with self._lock:
            self._crcs[chunk.index] = crcs
            self._changes[chunk.index] = chunk.num_changes
            self._steps.update(chunk.steps)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self.error = self.error or error
            self._areas.fail(error)
            for chunk in self._engine.registry.chunks:
                chunk.before_change = chunk.after_update = None
            self._left &= self._busy
            self._lock.notify_all()
        self._passed.set()

    # The checkpoint's own thread.

    def _run(self) -> None:
        try:
            self._take_the_rest()
            self._areas.settle()
            self._raise_error()
            self._writer.finish()
            self._publish()
        except BaseException as error:
            self._fail(error)
            self._writer.abort()
            self._publication.give_up(error)
            if self._directory is not None:
                self._directory.abort()
        finally:
            with self._lock:
                while self._busy:
                    self._lock.wait()
            self._areas.close()
            self._over.set()
            atexit.unregister(self._at_exit)

    def _take_the_rest(self) -> None:
        reader = threading.Thread(target=self._read_linked, name=f"{THREADS}save-reader", daemon=True)
        reader.start()
        try:
            self._take_unlinked()
        except BaseException as error:
            self._fail(error)  # which ends the reader at its next area
            raise
        finally:
            reader.join()

    def _read_linked(self) -> None:
        """Compare what is linked with its sums, file by file, and take what lies in a damaged one as if it had never been saved."""
        try:
            for file, linked in list(self._unread.items()):
                chunks = [chunk for chunk in self._engine.registry.chunks if chunk.index in linked.crcs]
                wrong = next(
                    (c for c in chunks if file in self._unread and not is_whole(c, linked.crcs[c.index], self._writer, self._areas)), None
                )
                with self._lock:
                    if file not in self._unread:  # a record of it was about to change
                        wrong = None
                    elif wrong is None:
                        del self._unread[file]
                        for chunk in chunks:
                            self._note(chunk, linked.crcs[chunk.index])
                            self._left.discard(chunk.index)
                            chunk.before_change = None
                        self._lock.notify_all()
                    else:
                        self._unlink(file)
                if wrong is not None:
                    names = [param.name for param in wrong.span.params]
                    told = f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''}"
                    warn(
                        f"{linked.path} has changed since it was saved ({told}): the checkpoint {self.path} has its records anew, from the "
                        f"engine. Earlier checkpoints share the damaged file, and the drive may not be sound: infinity checkpoint verify "
                        f"names those that are whole."
                    )
                for chunk in chunks:
                    self._take(chunk)
        except BaseException as error:
            self._fail(error)

    def _take_unlinked(self) -> None:
        with self._lock:
            chunks = [c for c in self._engine.registry.chunks if c.index in self._left and self._places[c.index][0] not in self._unread]
        at_once = deque(
            chunk
            for chunk in chunks
            if chunk.before_change is not None and not (chunk.trainable and in_storage((chunk.weights_home, chunk.states_home)))
        )
        helpers = [  # no pool: none can be used once the program ends, which waits for its checkpoint
            threading.Thread(target=self._take_each, args=(at_once,), name=f"{THREADS}save-helper", daemon=True)
            for _ in range(min(MOST_THREADS, self._engine.updater.threads // 2) - 1)
        ]
        for helper in helpers:
            helper.start()
        self._take_each(at_once)
        for helper in helpers:
            helper.join()
        with self._lock:
            deadline = time.monotonic() + PATIENCE_S
            while self._left and not self._passed.is_set() and time.monotonic() < deadline:
                self._lock.wait(POLL_S)
        for chunk in chunks:
            if chunk.before_change is not None:
                self._take(chunk)
        with self._lock:
            while self._left:
                self._lock.wait(0.5)
                self._engine.records.failure.check()
                if self._ranks.failure is not None:
                    raise self._ranks.failure

    def _take_each(self, chunks: deque[ChunkState]) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._take(chunks.popleft())

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _publish(self) -> None:
        self._publication.publish([self._crcs[index] for index in range(len(self._crcs))], self._commit)
        folder = self._root / self._draft.folder
        self._engine.last_save = LastSave(folder, self._files, dict(self._crcs), dict(self._changes), self._number, dict(self._ages))

    def _commit(self, crcs: list[list[list[int]]]) -> None:
        """Rank 0 makes the manifest. crcs: by rank and chunk."""
        self._tensors.write(self._root / self._draft.folder)
        files, places = lay_out_all(self._draft)
        rows = [tuple(RecordPlace(*at, tuple(crcs[rank][index])) for rank, at in enumerate(row)) for index, row in enumerate(places)]
        parameters = [replace(parameter, step=self._steps[index]) for index, parameter in enumerate(self._draft.parameters)]
        self._directory.commit(replace(self._draft, parameters=tuple(parameters), files=tuple(files), places=tuple(rows)))


def _abort(directory: Directory | None) -> None:
    if directory is not None:
        directory.abort()
