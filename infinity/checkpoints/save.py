"""Saving the training state of an engine: `infinity.save`.

Knows a snapshot of the state, and which records the last checkpoint already has on the disk. Must not know how files replace each other
(files.py), or the JSON of a manifest (manifest.py).

# [Note: when a record is saved]
# A checkpoint holds the state between two steps at the call of `save`: the engine's snapshot. The snapshot copies each record once, part by
# part, before the record changes ([Note: copies on write] in infinity/tiers/snapshot.py). The thread of the checkpoint, `infinity-save`,
# writes each part and makes the manifest. Other threads ask the snapshot for records:
#   - `infinity-save-helper` threads ask at once for records of frozen weights, and for records that no step brings into host memory.
#   - One of these helpers asks for the other records after a step, after PATIENCE_S, or when a thread waits for the checkpoint.
#   - The training thread asks for records on the device before `save` returns, because the next kernels may write to the record itself.
# The save may instead link a file whose records have not changed since the last checkpoint: [Note: linked files] in linked.py.
#
# Only `save` itself runs collectives. Later the ranks exchange the outcome by `Ranks.post`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoints.contents import digest_of, draft, generators, values_of
from infinity.checkpoints.files import Directory, Progress, lay_out, lay_out_all
from infinity.checkpoints.linked import LastSave, Linked, is_whole, to_read, unchanged
from infinity.checkpoints.manifest import RecordPlace
from infinity.checkpoints.publish import POLL_S, Publication
from infinity.checkpoints.writer import Tensors, Writer
from infinity.config import checked_path
from infinity.engine.access.training_state import ChunkInfo, TrainingState, training_state_of
from infinity.errors import CheckpointError, warn
from infinity.sizes import parse_budget, parse_bytes
from infinity.system.waits import THREADS

MOST_THREADS = 8  # threads that copy records from host memory; also at most half of the processors
PATIENCE_S = 10.0  # the longest time that a checkpoint waits for a step to bring records into host memory


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    scheduler: Any = None,
    extra: object = None,
    wait: bool = True,
    host_memory: int | str = "64MiB",
    progress: Progress | None = None,
) -> Saving:
    """Save the whole training state in a directory. At any moment the directory holds the complete old or the complete new checkpoint.

    A checkpoint holds weights, masters, moments, step counts, hyper-parameters, the loss scale, and all ranks' random number generators
    (torch, CUDA, numpy, random). Buffers and the scheduler's state_dict() come from rank 0.
    optimizer: of the model; a list of all if there are several, in any order.
    extra: numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts of them; pass long lists as tensors or arrays. All ranks
    must pass the same value, such as the states of all ranks' data loaders.

    Call save between step() and the next forward pass, on all ranks, which must see the same directory. With wait=False training continues
    while the checkpoint is written; call `wait()` of the result to learn the outcome. If the last step() announced updates, they are saved
    when the next forward pass, `wait()` or close() runs them.
    host_memory: per rank, in bytes or such as "4GiB". A record that is about to change is copied into this memory, and written from there.
    If host_memory holds the whole checkpoint, training never waits for a write. Otherwise training waits for writes that free memory. The
    least memory is two buffers of at most 16 MiB.
    progress(done, total), in bytes of this rank, is called during `wait`.

    Raises UsageError between backward() and step(), or if an optimizer of the model is missing.
    Raises CheckpointError for a value that cannot be saved, or for a full disk; SwapError (an OSError) if the disk fails. The old
    checkpoint stays then.
    """
    state = training_state_of(model)
    with state.turn, state.ranks.at("infinity.save"):
        state.ready_to_save(optimizer)
        nbytes = parse_budget(host_memory) if parse_bytes(host_memory) else 0
        saving = state.shielded(lambda shield: Saving(state, checked_path(path), scheduler, extra, nbytes))
        state.optimizers.refer_to({"checkpoint": str(saving.path.absolute()), "folder": saving.folder}, saving.reader.wait)
        if wait:
            saving.wait(progress)
    return saving


class Saving:
    """A running save, made by `save`; see [Note: when a record is saved]."""

    def __init__(self, state: TrainingState, path: Path, scheduler, extra, host_nbytes: int):
        self.path = path
        self._root = path.absolute()  # the program may change its working directory
        self._pid = os.getpid()
        self._state, self._ranks = state, state.ranks
        self._chunks = state.chunks
        self._lock = threading.Lock()  # guards _unread and the writer's set of linked files
        self._unread: dict[int, Linked] = {}  # linked files that a thread has yet to read
        self._crcs: dict[int, tuple[int, ...]] = {}  # checksums of records in linked files, by chunk
        self._directory: Directory | None = None
        self._done_nbytes = 0
        self._thread = threading.Thread(target=self._run, name=f"{THREADS}save", daemon=True)
        self.reader = state.snapshot(target=str(path), purpose="the checkpoint", host_nbytes=host_nbytes)
        self._snapshot = self.reader.snapshot
        try:
            self._prepare(scheduler, extra)
            self._skip_linked()
        except BaseException:
            self.reader.cancel()
            raise
        atexit.register(self._at_exit)
        self._thread.start()
        for chunk in self._chunks:
            if self._snapshot.is_copied_here(chunk.index) and self._places[chunk.index][0] not in self._unread:
                self._snapshot.read(chunk.index)

    @property
    def done(self) -> bool:
        """Whether the checkpoint has ended, with or without success."""
        return self.reader.over.is_set()

    @property
    def error(self) -> BaseException | None:
        return self.reader.error

    def wait(self, progress: Progress | None = None) -> None:
        """Wait until the checkpoint is complete. Raises the error that ended the save; the old checkpoint stays then.

        In a thread other than the training thread, the call also waits until the training thread begins the updates that step() announced.
        """
        reader = self.reader
        if progress is not None:
            reader.hurry()
            while not reader.over.wait(POLL_S):
                progress(self._done_nbytes, self._total_nbytes)
            if reader.error is None:
                progress(self._total_nbytes, self._total_nbytes)
        reader.wait()

    def _at_exit(self) -> None:
        """Wait at the end of a program that has not waited."""
        if os.getpid() != self._pid:  # a forked child has none of the threads
            return
        try:
            self.wait()
        except Exception as error:
            print(f"infinity: the checkpoint {self.path} was not completed: {error}", file=sys.stderr)

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else f"{self._snapshot.num_left} records left"
        return f"Saving({self.path}, {state})"

    # In `save`.

    def _prepare(self, scheduler, extra) -> None:
        """Do everything that may raise an error: encode values, claim the directory, check free space, and make the files."""
        state, ranks = self._state, self._ranks
        self._tensors = tensors = Tensors()
        values = ranks.together(lambda: values_of(state, tensors.put, scheduler, extra))
        rng = tuple(json.loads(text) for text in ranks.exchange(json.dumps(generators(state.device)).encode()))
        if len(set(ranks.exchange(digest_of(values["extra"], [entry.crc32c for entry in tensors.entries])))) > 1:
            raise CheckpointError(
                "extra: the ranks gave different values, and a checkpoint stores one value for all ranks. Pass one value that has the data of "
                "each rank, such as a list by rank (torch.distributed.all_gather_object)"
            )
        try:
            self._directory = ranks.together(lambda: Directory(self._root) if ranks.is_first else None, undo=_abort)
            name = ranks.exchange(self._directory.folder.encode() if self._directory else b"")[0].decode()
            self.folder = name  # a folder in the directory, used by this checkpoint alone
            self._draft = draft(state, folder=name, tensors=tuple(tensors.entries), rng=rng, **values)
            self._publication = Publication(ranks, self.path, name, self._snapshot.check)
            self._lay_out()
            self._writer = ranks.together(self._writer_for(self._root / name), undo=Writer.abort)
        except BaseException:
            if self._directory is not None:
                self._directory.abort()
            raise

    def _lay_out(self) -> None:
        """Lay out the files of this rank, and find the files that may be linked."""
        chunks, last = self._chunks, self._state.last_save
        self._files, self._places = lay_out([c.record for c in chunks], [c.trainable for c in chunks], self._ranks.rank)
        self._number = 0 if last is None else last.number + 1
        self._linked = unchanged(last, self._number, self._snapshot.versions, self._files, self._places, self._root)

    def _writer_for(self, folder: Path):
        """Return a function that makes this rank's files."""
        fresh_nbytes = sum(file.nbytes for index, file in enumerate(self._files) if index not in self._linked)
        everyone = sum(int(nbytes) for nbytes in self._ranks.exchange(str(fresh_nbytes).encode())) + self._tensors.nbytes

        def make() -> Writer:
            if self._directory is not None:
                self._directory.check_space(everyone)
            if not folder.is_dir():
                raise CheckpointError(f"{folder} does not exist for {self._ranks.name}: all ranks must see the same directory")
            return Writer(folder, self._files, self._places, {index: file.path for index, file in self._linked.items()})

        return make

    def _skip_linked(self) -> None:
        """Choose the linked files that this save reads. The snapshot skips the records of the other linked files."""
        files, kept = self._files, self._writer.linked
        unread = to_read(self._linked, files)
        self._total_nbytes = sum(file.nbytes for index, file in enumerate(files) if index not in kept)
        self._unread = {file: self._linked[file] for file in unread if file in kept}
        self._ages = {file: self._linked[file].age + 1 if file in kept and file not in unread else 0 for file in range(len(files))}
        for file in kept - self._unread.keys():
            self._skip(self._linked[file])

    def _skip(self, linked: Linked) -> bool:
        if not self._snapshot.skip(linked.crcs):
            return False
        self._crcs |= linked.crcs
        return True

    # The checkpoint's own thread.

    def _run(self) -> None:
        with self.reader:
            askers = [threading.Thread(target=self._read_linked, name=f"{THREADS}save-reader", daemon=True), *self._helpers()]
            try:
                for asker in askers:
                    asker.start()
                self._write_parts()
                for asker in askers:
                    asker.join()
                self._snapshot.buffers.settle()
                self._snapshot.check()
                self._writer.finish()
                self._publish()
            except BaseException as error:
                self._snapshot.give_up(error)
                for asker in askers:
                    if asker.ident is not None:
                        asker.join()
                self._writer.abort()
                self._publication.give_up(error)
                if self._directory is not None:
                    self._directory.abort()
                raise
            finally:
                atexit.unregister(self._at_exit)

    def _write_parts(self) -> None:
        """Write the parts of records in the order in which the snapshot copies them."""
        snapshot = self._snapshot
        while not snapshot.is_complete:
            part = snapshot.next_part(0.5)
            if part is None:
                if self._ranks.failure is not None:
                    raise self._ranks.failure
                continue
            tickets = ()
            try:
                self._unlink(self._places[part.index][0])
                tickets = (self._writer.write(part.index, part.offset, part.data),)
                self._done_nbytes += len(part.data)
            finally:
                part.buffer.release(*tickets)

    def _unlink(self, file: int) -> None:
        """If the file is linked and not read yet, replace the link by a new file."""
        with self._lock:
            if self._unread.pop(file, None) is not None:
                self._writer.renew(file)
                self._total_nbytes += self._files[file].nbytes

    def _publish(self) -> None:
        crcs = self._crcs | self._snapshot.checksums
        self._publication.publish([crcs[index] for index in range(len(crcs))], self._commit)
        versions = dict(enumerate(self._snapshot.versions))
        folder = self._root / self._draft.folder
        self._state.last_save = LastSave(folder, self._files, crcs, versions, self._number, dict(self._ages))

    def _commit(self, crcs: list[list[list[int]]]) -> None:
        """On rank 0: make the manifest and commit the checkpoint. crcs: by rank and chunk."""
        self._tensors.write(self._root / self._draft.folder)
        files, places = lay_out_all(self._draft)
        rows = [tuple(RecordPlace(*at, tuple(crcs[rank][index])) for rank, at in enumerate(row)) for index, row in enumerate(places)]
        steps = self._snapshot.steps
        parameters = tuple(replace(parameter, step=steps[index]) for index, parameter in enumerate(self._draft.parameters))
        self._directory.commit(replace(self._draft, parameters=parameters, files=tuple(files), places=tuple(rows)))

    # Threads that ask the snapshot for records.

    def _helpers(self) -> list[threading.Thread]:
        """Threads that ask for records outside of linked files. Not a thread pool, because a pool starts no thread at exit."""
        snapshot = self._snapshot
        indices = [c.index for c in self._chunks if self._places[c.index][0] not in self._unread and not snapshot.is_copied_here(c.index)]
        at_once = deque(index for index in indices if not snapshot.waits_for_step(index))
        num_threads = max(1, min(MOST_THREADS, self._state.num_copying_threads))
        return [
            threading.Thread(target=self._read, args=(at_once, indices if not number else ()), name=f"{THREADS}save-helper", daemon=True)
            for number in range(num_threads)
        ]

    def _read(self, at_once: deque[int], later: Sequence[int]) -> None:
        """Ask for the records of `at_once`, a deque that several threads share; then, in one thread, for the records of `later`."""
        try:
            while at_once:
                self._snapshot.read(at_once.popleft())
        except IndexError:  # another thread took the last record
            pass
        if later:
            deadline = time.monotonic() + PATIENCE_S
            while self._snapshot.num_left and time.monotonic() < deadline and not self.reader.step_passed.wait(POLL_S):
                pass
            for index in later:
                self._snapshot.read(index)

    def _read_linked(self) -> None:
        """Compare linked files with their checksums. Records of a damaged file are saved again from the engine."""
        try:
            for file, linked in list(self._unread.items()):
                chunks = [self._chunks[index] for index in linked.crcs]
                wrong = next((c for c in chunks if file in self._unread and not self._is_whole(c, linked)), None)
                with self._lock:
                    if file not in self._unread:  # a record of the file was about to change, so the save writes the file anyway
                        wrong = None
                    elif wrong is None and self._skip(linked):
                        del self._unread[file]
                self._unlink(file)
                if wrong is not None:
                    self._warn(linked, wrong)
                for chunk in chunks:
                    self._snapshot.read(chunk.index)
        except BaseException as error:
            self._snapshot.give_up(error)

    def _is_whole(self, chunk: ChunkInfo, linked: Linked) -> bool:
        return is_whole(chunk.index, chunk.record, linked.crcs[chunk.index], self._writer, self._snapshot.buffers)

    def _warn(self, linked: Linked, wrong: ChunkInfo) -> None:
        told = f"{', '.join(wrong.names[:2])}{', ...' if len(wrong.names) > 2 else ''}"
        warn(
            f"{linked.path} has changed since it was saved ({told}): the checkpoint {self.path} gets these records from the "
            f"engine. Earlier checkpoints share the damaged file, and the drive may be failing: infinity checkpoint verify "
            f"finds the checkpoints that are not damaged."
        )


def _abort(directory: Directory | None) -> None:
    if directory is not None:
        directory.abort()
