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
#
# [Note: what is linked]
# A file of records that have not changed since the last checkpoint on the same filesystem is linked: one inode then lies in several
# checkpoints, and what damages it damages all of them. So
#   - what is linked is read and summed meanwhile, in a thread of its own: as much as the save writes, and CHECK_NBYTES in any case, what
#     was not for longest first, so that the reading is hidden; all of it once in CHECK_EVERY saves. Where the sums are others, the file is
#     written anew, as the engine still has what belongs there, and a warning names it;
#   - once in RENEW_EVERY saves, by turns, a file is written anew: so many checkpoints share one, at most.
# A record of a linked file that is about to change before it was read is taken as any other, and the file is written.
#
# Collectives are made in `save` alone; afterwards the ranks tell each other by `Ranks.post` how it went.
#
# Over 400 lines because who may take a record when is one protocol.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import json
import os
import sys
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import aio_ext
from infinity.checkpoints.contents import generators, loose_tensors, parameters_of, with_extra_state
from infinity.checkpoints.encoding import encode
from infinity.checkpoints.files import Directory, Progress, lay_out, lay_out_all
from infinity.checkpoints.manifest import File, Manifest, RecordPlace
from infinity.checkpoints.writer import Linked, Tensors, Writer
from infinity.config import checked_path
from infinity.engine.engine import Engine, engine_of
from infinity.errors import CheckpointError, SwapError
from infinity.sizes import parse_bytes
from infinity.system.arena import PAGE_NBYTES, Arena, Region
from infinity.system.lanes import THREADS, Monitor
from infinity.tiers.records import Lease
from infinity.tiers.state import ChunkState

AREA_NBYTES = 16 << 20  # at most; of one segment
LEAST_AREAS = 2  # one is filled while the other is written
MOST_THREADS = 8  # that copy what is in host memory: half of the processors
CHECK_NBYTES = 4 << 30  # of what is linked, in each save: a few seconds of one drive
CHECK_EVERY = 4
RENEW_EVERY = 8
PATIENCE_S = 10.0  # of the checkpoint's thread with records that a step would bring into host memory
_POLL_S = 0.02


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
    bytes, tensors, arrays, lists, tuples and dicts, long lists as tensors or arrays, the same on every rank, such as the states of all ranks' data loaders. Call
    it between step() and the next forward pass, on all ranks, which must see the same directory. wait=False goes on training
    while it is written, and the result's `wait()` tells how it went. A record that is about to change waits until it has been
    copied into host_memory (of each rank, bytes or "4GiB"), from where it is written: with as much as the checkpoint has,
    training waits for no write; with less, for those that are needed to go on. Two areas of at most 16 MiB are taken in any
    case. Updates that the last step() announced are saved as the next forward pass, `wait()` or close() runs them.
    progress(done, total), in bytes of this rank, is called while it waits.

    Raises CheckpointError for what cannot be saved or has no room, SwapError (an OSError) where the disk fails; the old
    checkpoint is there then.
    """
    engine = engine_of(model)
    with engine.turn, engine.ranks.at("infinity.save"):
        engine.ready_to_save(optimizer)
        saving = engine.shielded(lambda shield: Saving(engine, checked_path(path), scheduler, extra, parse_bytes(host_memory)))
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
        on_device = any(chunk.on_device for chunk in engine.registry.chunks)
        self._arena = Arena(pin=on_device and engine.device.type == "cuda")
        self._areas: deque[tuple[Region, list[aio_ext.Ticket]]] = deque()  # nobody fills them; written longest ago comes first
        self._num_areas = 0
        self._host_nbytes = host_nbytes
        self._directory: Directory | None = None
        self._done_nbytes = 0
        self._thread = threading.Thread(target=self._run, name=f"{THREADS}save", daemon=True)
        self._prepare(scheduler, extra)
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
        if not self._over.is_set() and not self._engine.trains_elsewhere:
            self.pass_step()
        while not self._over.wait(_POLL_S if progress is not None else 0.5):
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
                self._engine.begin_announced(chunk)
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
        engine, ranks = self._engine, self._ranks
        chunks = engine.registry.chunks
        tensors = Tensors()
        what = ranks.together(lambda: self._describe(tensors, scheduler, extra))
        self._rng = [json.loads(state) for state in ranks.exchange(json.dumps(generators(engine.device)).encode())]
        self._check_alike(what, tensors)
        self._content, self._tensors = what, tensors
        self._parameters, self._aliases = parameters_of(engine)
        try:
            self._directory = ranks.together(lambda: Directory(self._root) if not ranks.rank else None, undo=_abort)
            self._name = ranks.exchange(self._directory.folder.encode() if self._directory else b"")[0].decode()
            folder = self._root / self._name
            files, self._places = lay_out([chunk.record for chunk in chunks], [chunk.trainable for chunk in chunks], ranks.rank)
            linked, unread = self._unchanged(files)
            fresh = sum(file.nbytes for index, file in enumerate(files) if index not in linked)
            everyone = sum(int(nbytes) for nbytes in ranks.exchange(str(fresh).encode())) + tensors.nbytes

            def make() -> Writer:
                if self._directory is not None:
                    self._directory.check_space(everyone)
                if not folder.is_dir():
                    raise CheckpointError(f"{folder} is not there for {ranks.name}: all ranks must see the same directory")
                return Writer(folder, files, self._places, linked)

            self._writer = ranks.together(make, undo=Writer.abort)
        except BaseException:
            if self._directory is not None:
                self._directory.abort()
            raise
        self._files = files
        self._total_nbytes = sum(file.nbytes for index, file in enumerate(files) if index not in self._writer.linked)
        largest = max((chunk.record.numel * s.itemsize for chunk in chunks for s in chunk.record.segments), default=0)
        self._area_nbytes = min(AREA_NBYTES, -(-max(largest, 1) // PAGE_NBYTES) * PAGE_NBYTES)
        self._most_areas = max(LEAST_AREAS, self._host_nbytes // self._area_nbytes)
        self._unread = {file: linked[file] for file in unread if file in self._writer.linked}
        self._ages = {file: linked[file].age + 1 if file in self._writer.linked and file not in unread else 0 for file in range(len(files))}
        for chunk in chunks:
            file = self._places[chunk.index][0]
            if file in self._writer.linked and file not in self._unread:
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

    def _check_alike(self, what: dict, tensors: Tensors) -> None:
        """Refuse an `extra` that is not the same on every rank; buffers may differ, and those of rank 0 are kept."""
        values = {index: entry.crc32c for index, entry in enumerate(tensors.entries)}
        mine = hashlib.sha256(json.dumps([what["extra"], _sums(what["extra"], values)]).encode()).digest()
        if len(set(self._ranks.exchange(mine))) > 1:
            raise CheckpointError(
                "extra: the ranks gave different ones, and a checkpoint keeps one for all: gather what each of them needs into it, for "
                "instance a list by rank (torch.distributed.all_gather_object)"
            )

    def _describe(self, tensors: Tensors, scheduler, extra) -> dict:
        """What is not in records, as of now. Rank 0's is saved."""
        engine, model = self._engine, self._engine.model

        def put(tensor: torch.Tensor) -> int:
            if engine.manages(tensor):
                raise CheckpointError("a parameter of the model is only a placeholder outside of it; it is saved anyway")
            return tensors.put(tensor)

        extra = encode(extra, put, "extra")  # first: its tensors' indices are those of other ranks, which have no buffers
        loose = {} if self._ranks.rank else loose_tensors(engine)
        buffers = {name: encode(value, put, f"buffer {name}") for name, value in loose.items()}
        extra_state = {name: module.get_extra_state() for name, module in with_extra_state(model)}
        found = {
            "model": {"buffers": buffers, "extra_state": encode(extra_state, put, "extra state of the model")},
            "optimizer": None,
            "scheduler": encode(None if scheduler is None else scheduler.state_dict(), put, "scheduler"),
            "scaler": None,
            "extra": extra,
        }
        if engine.optimizer is not None:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
            groups = encode(groups, put, "a parameter group")
            found["optimizer"] = {"rule": type(engine.optimizer.rule).__name__, "groups": groups}
        if engine.cycle.scaler is not None:
            found["scaler"] = {"scale": engine.cycle.scaler.scale, "num_clean": engine.cycle.scaler.num_clean}
        return found

    def _unchanged(self, files) -> tuple[dict[int, Linked], list[int]]:
        """Files of the last checkpoint of this engine that hold what this one's would, and which to read; see [Note: what is linked]."""
        last = self._engine.last_save
        self._number = 0 if last is None else last.number + 1
        if last is None or [file.nbytes for file in last.files] != [file.nbytes for file in files]:
            return {}, []
        inside: dict[int, list[ChunkState]] = {}
        for chunk in self._engine.registry.chunks:
            inside.setdefault(self._places[chunk.index][0], []).append(chunk)
        found = {}
        for index, chunks in inside.items():
            path = last.folder / last.files[index].name
            still = all(
                not chunk.update.is_announced
                and not chunk.update.is_running
                and last.changes.get(chunk.index) == chunk.num_changes
                for chunk in chunks
            )
            in_turn = (self._number + index) % RENEW_EVERY == 0
            if still and not in_turn and _is_file(path, files[index].nbytes, self._root):
                found[index] = Linked(path, {chunk.index: last.crcs[chunk.index] for chunk in chunks}, last.ages[index])
        left = max(sum(file.nbytes for index, file in enumerate(files) if index not in found), CHECK_NBYTES)
        unread = []
        for index in sorted(found, key=lambda index: -found[index].age):
            if left > 0 or found[index].age + 1 >= CHECK_EVERY:
                unread.append(index)
                left -= files[index].nbytes
        return found, unread

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
            self._left &= self._busy
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
                wrong = next((chunk for chunk in chunks if file in self._unread and not self._is_whole(chunk, linked.crcs[chunk.index])), None)
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
                    warnings.warn(
                        f"{linked.path} has changed since it was saved ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''}): the checkpoint "
                        f"{self.path} has its records anew, from the engine. Earlier checkpoints share the damaged file, and the drive may not be "
                        f"sound: infinity checkpoint verify names those that are whole.",
                        RuntimeWarning,
                    )
                for chunk in chunks:
                    self._take(chunk)
        except BaseException as error:
            self._fail(error)

    def _is_whole(self, chunk: ChunkState, crcs: tuple[int, ...]) -> bool:
        """Whether a record of a linked file has its sums still."""
        record = chunk.record
        for segment, offset, expected in zip(record.segments, record.offsets, crcs):
            nbytes, crc = record.numel * segment.itemsize, 0
            for begin in range(0, nbytes, self._area_nbytes):
                count = min(self._area_nbytes, nbytes - begin)
                region, tickets = self._borrow()
                try:
                    self._settle(tickets)
                    self._writer.read(chunk.index, offset + begin, region.buffer[: -(-count // PAGE_NBYTES) * PAGE_NBYTES]).wait()
                    crc = aio_ext.crc32c(region.buffer[:count], crc)
                except SwapError:  # of what was written from the area
                    raise
                except OSError:  # the drive has lost it
                    return False
                finally:
                    with self._lock:
                        self._areas.append((region, []))
                        self._lock.notify_all()
            if crc != expected:
                return False
        return True

    def _take_unlinked(self) -> None:
        with self._lock:
            chunks = [c for c in self._engine.registry.chunks if c.index in self._left and self._places[c.index][0] not in self._unread]
        at_once = deque(
            chunk
            for chunk in chunks
            if chunk.before_change is not None and not (chunk.trainable and "nvme" in (chunk.weights_home, chunk.states_home))
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
                self._lock.wait(_POLL_S)
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
        """Tell rank 0 what was written here; it makes the manifest and tells all how that went."""
        ranks = self._ranks
        mine = {"crcs": [self._crcs[index] for index in range(len(self._crcs))]}
        if ranks.rank:
            ranks.post(f"{self._name}/{ranks.rank}", json.dumps(mine).encode())
            text = self._look(f"{self._name}/result", 0).decode()
            if text:
                raise CheckpointError(text)
        else:
            everyone = [mine] + [json.loads(self._look(f"{self._name}/{rank}", rank)) for rank in range(1, ranks.world)]
            if failed := [f"rank {rank}: {found['error']}" for rank, found in enumerate(everyone) if "error" in found]:
                raise CheckpointError(f"{self.path}: the checkpoint was given up: {'; '.join(failed)}")
            self._tensors.write(self._root / self._name)
            self._directory.commit(self._manifest([found["crcs"] for found in everyone]))
            for rank in range(1, ranks.world):
                ranks.forget(f"{self._name}/{rank}")
            ranks.post(f"{self._name}/result", b"")
        self._engine.last_save = LastSave(
            self._root / self._name, self._files, dict(self._crcs), dict(self._changes), self._number, dict(self._ages)
        )

    def _report(self, error: BaseException) -> None:
        """Let the other ranks know."""
        text = str(error) or type(error).__name__
        try:
            if self._ranks.rank:
                self._ranks.post(f"{self._name}/{self._ranks.rank}", json.dumps({"error": text}).encode())
            else:
                self._ranks.post(f"{self._name}/result", f"rank 0: {text}".encode(errors="backslashreplace"))
        except Exception:  # they are gone
            pass

    def _look(self, key: str, rank: int) -> bytes:
        while (value := self._ranks.look(key, rank)) is None:
            self._raise_error()
            time.sleep(_POLL_S)
        return value

    def _manifest(self, crcs: list[list[list[int]]]) -> Manifest:
        engine, config, layout = self._engine, self._engine.config, self._engine.layout
        manifest = Manifest(
            folder=self._name,
            world=self._ranks.world,
            dtype=config.dtype,
            moments_dtype=config.moments,
            moments=engine.moments,
            seed=config.seed if engine.updater.seed is None else engine.updater.seed,
            parameters=tuple(replace(parameter, step=self._steps[index]) for index, parameter in enumerate(self._parameters)),
            aliases=self._aliases,
            chunks=layout.chunks,
            tensors=tuple(self._tensors.entries),
            rng=tuple(self._rng),
            **self._content,
        )
        files, places = lay_out_all(manifest)
        rows = [
            tuple(RecordPlace(*place, tuple(crcs[rank][index])) for rank, place in enumerate(row)) for index, row in enumerate(places)
        ]
        return replace(manifest, files=tuple(files), places=tuple(rows))


@dataclass(frozen=True)
class LastSave:
    """What this rank wrote of the last checkpoint: its files, checksums, and how often each record had changed.

    number: how many this engine had saved before. ages: saves since each file was written or read.
    """

    folder: Path
    files: list[File]
    crcs: dict[int, tuple[int, ...]]
    changes: dict[int, int]
    number: int
    ages: dict[int, int]


def _sums(value, crcs: dict[int, int]) -> list[int]:
    """Of the tensors that an encoded value refers to, in order."""
    if isinstance(value, list):
        return [crc for item in value for crc in _sums(item, crcs)]
    if not isinstance(value, dict):
        return []
    own = [crcs[value[name]] for name in ("$tensor", "$array") if type(value.get(name)) is int]
    return own or [crc for item in value.values() for crc in _sums(item, crcs)]


def _abort(directory: Directory | None) -> None:
    if directory is not None:
        directory.abort()


def _is_file(path: Path, nbytes: int, beside: Path) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
        return status.st_size == nbytes and status.st_dev == os.stat(beside).st_dev
    except OSError:
        return False
