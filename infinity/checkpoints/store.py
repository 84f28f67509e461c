"""A checkpoint's files: made so that a checkpoint is the old one or the new one, whole; read so that damage is found.

Knows directories, files, records' places and checksums. Must not know engines, tensors' meaning or torch.distributed: how many
ranks share the work is told. What the files hold is [Note: the format of a checkpoint] in manifest.py.

# [Note: old or new]
# Rank 0 locks the directory, fsyncs those that lead to it, and makes a new folder in it; each rank makes its files there, at their full
# size, writes and fsyncs them. When all have, rank 0 fsyncs the folder and the directory, writes the manifest aside, fsyncs it, and
# renames it over the old one: the one moment at which the new checkpoint is there. Then the old folder goes. Whatever fails before, also
# an fsync, which is never tried again, ends that checkpoint and leaves the old one; the folder that a killed process leaves goes with
# the next checkpoint.
# What is made is its owner's alone, as swap is: files 0600, directories 0700, but for a directory that was there.
# A reader opens all files before it reads: those it has open stay whole if a new checkpoint replaces them meanwhile.
#
# Over 400 lines because who writes and who reads must agree on what is there when.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import os
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import aio_ext
from infinity.checkpoints import manifest as manifests
from infinity.checkpoints.manifest import File, Manifest, StoredTensor
from infinity.errors import NO_DESCRIPTORS, CheckpointError, SwapError, refuses_direct
from infinity.plan.record import Record
from infinity.sizes import format_bytes
from infinity.system.arena import Arena, Region
from infinity.system.drives import Drive
from infinity.tiers.state import TORCH_DTYPES

FILE_NBYTES = 1 << 30  # about: what has not changed since the last checkpoint is linked file by file
SLACK_NBYTES = 1 << 20  # for the manifest and the filesystem's own
QUEUE = Drive(inflight_write_nbytes=8 << 20)  # nobody waits for reads behind these writes
_TEMPORARY = ".manifest.new"
_ALIGNMENT = 4096
_NUM_RECORDS_IN_MEMORY = 3

Progress = Callable[[int, int], None]  # called with (done, total), in bytes

REMEDIES = {
    errno.ENOSPC: "free space there, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EROFS: "the filesystem is read-only: save elsewhere",
    errno.EACCES: "choose a directory that this user may write",
    errno.EIO: "the drive failed: see dmesg, and save elsewhere",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    **NO_DESCRIPTORS,
}


def lay_out(records: Sequence[Record], trainable: Sequence[bool], rank: int) -> tuple[list[File], list[tuple[int, int]]]:
    """The files of one rank's records, and (file, offset) of each. Frozen and trainable ones lie apart."""
    sizes: list[int] = []
    places: list[tuple[int, int]] = []
    filling: dict[bool, int] = {}
    for record, trains in zip(records, trainable, strict=True):
        file = filling.get(trains)
        if file is None or sizes[file] >= FILE_NBYTES:
            file = filling[trains] = len(sizes)
            sizes.append(0)
        places.append((file, sizes[file]))
        sizes[file] += record.nbytes
    return [File(f"rank{rank}-{index}.records", nbytes) for index, nbytes in enumerate(sizes)], places


class Directory:
    """A checkpoint's directory while a new checkpoint is made in it, by rank 0. Raises CheckpointError or SwapError.

    Making one locks the directory, removes what killed processes left, and makes the new folder.
    """

    def __init__(self, path: Path):
        self.path = path = path.absolute()  # the program may go elsewhere
        self._fd = -1
        self.folder = f"data-{os.urandom(6).hex()}"
        self._is_new = not path.exists()
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(self.close)
                self._claim()
                undo.pop_all()
        except BlockingIOError:
            raise CheckpointError(f"{path}: another process is writing a checkpoint there; wait for it or save elsewhere") from None
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(f"{path} is not a directory: name one for the checkpoint") from None
        except FileNotFoundError:
            raise CheckpointError(f"{path}: its parent directory does not exist; create it (mkdir -p)") from None
        except OSError as error:
            raise failed("the checkpoint's directory cannot be written", path, error) from error

    def _claim(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        for parent in ancestors(self.path):  # who made the directory, just now or before, may not have brought it to the disk
            with contextlib.suppress(PermissionError):  # where it may not be read
                sync_directory(parent)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._remove_folders(keep=_current_folder(self.path))
        os.mkdir(self.path / self.folder, 0o700)

    def check_space(self, nbytes: int) -> None:
        """Raise CheckpointError if so many bytes have no room there."""
        status = os.fstatvfs(self._fd)
        available = status.f_bavail * status.f_frsize
        if nbytes + SLACK_NBYTES > available:
            raise CheckpointError(
                f"{self.path}: the checkpoint needs {nbytes + SLACK_NBYTES:,} bytes and {available:,} are available; free space there or "
                f"save elsewhere. (A checkpoint that is replaced goes only when the new one is whole.)"
            )

    def commit(self, manifest: Manifest) -> None:
        """Make the folder, whose files are on the disk, the checkpoint; see [Note: old or new]."""
        try:
            for path in (self.path / self.folder, self.path):
                sync_directory(path)
            data = manifest.to_json()
            Manifest.from_json(data, str(self.path / manifests.NAME))  # what could not be read again must not take a place
            new = self.path / _TEMPORARY
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(new, flags, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(new, self.path / manifests.NAME)
        except CheckpointError:
            self.abort()
            raise
        except OSError as error:
            self.abort()
            raise failed("the checkpoint could not be completed", self.path, error) from error
        try:
            os.fsync(self._fd)
        except OSError as error:  # whether the old or the new one is there after a crash now is unknown: both stay
            self.close()
            raise failed("the checkpoint is there, but may not outlive a crash of the machine", self.path, error) from error
        with contextlib.suppress(OSError):
            self._remove_folders(keep=self.folder)
        self.close()

    def abort(self) -> None:
        """Leave the checkpoint that was there, if any. Idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.path / self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(self.path / _TEMPORARY)
            if self._is_new:
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for children forked meanwhile
            os.close(self._fd)
            self._fd = -1

    def _remove_folders(self, keep: str | None) -> None:
        for name in os.listdir(self._fd):
            if manifests.FOLDER_NAME.fullmatch(name) and name != keep:
                shutil.rmtree(self.path / name, ignore_errors=True)


@dataclass(frozen=True)
class Linked:
    """A file of an earlier checkpoint that holds what this one's would, the checksums of its records, and for how many saves it has not
    been read."""

    path: Path
    crcs: dict[int, tuple[int, ...]]
    age: int = 0


class Writer:
    """One rank's files of a new checkpoint. folder exists. linked: files, by index, that need not be written again.

    Raises SwapError, with the files that it made removed.
    """

    def __init__(self, folder: Path, records: Sequence[Record], files: list[File], places, linked: dict[int, Linked], queue=None):
        self.folder = folder
        self._shared = queue  # of whoever makes many writers
        self.records = records
        self.files = files
        self.places = places
        self.linked: set[int] = set()  # those that could be
        self._fds: dict[int, int] = {}
        self._replaced: list[int] = []  # descriptors from which may still be read
        self._queue = None
        self._made: list[Path] = []
        try:
            for index, file in enumerate(files):
                fd = self._link(linked[index].path, folder / file.name) if index in linked else None
                if fd is not None:
                    self.linked.add(index)
                self._fds[index] = self._make(folder / file.name, file.nbytes) if fd is None else fd
            self._queue = queue or QUEUE.queue()
        except OSError as error:
            self.abort()
            raise failed("the checkpoint's files cannot be made", folder, error) from error

    def write(self, chunk: int, offset: int, buffer: memoryview) -> aio_ext.Ticket:
        """Write a part of a chunk's record, multiples of 4096 bytes; the buffer must not change until the ticket is done."""
        file, start = self.places[chunk]
        return self._queue.write(self._fds[file], buffer, start + offset)

    def read(self, chunk: int, offset: int, buffer: memoryview) -> aio_ext.Ticket:
        """Read a part of a record of a linked file, as `write`."""
        file, start = self.places[chunk]
        return self._queue.read(self._fds[file], buffer, start + offset)

    def renew(self, file: int) -> None:
        """A linked file is to be written after all. Raises SwapError; whoever made this must `abort` then."""
        path = self.folder / self.files[file].name
        try:
            os.unlink(path)
            self._made.remove(path)
            self.linked.discard(file)
            fd = self._make(path, self.files[file].nbytes)
        except OSError as error:
            raise failed("the checkpoint's files cannot be made", self.folder, error) from error
        self._replaced.append(self._fds[file])
        self._fds[file] = fd

    def finish(self) -> None:
        """Wait for the disk: what was written is there to stay. Every ticket must have been waited for."""
        try:
            for index, fd in self._fds.items():
                if index not in self.linked:
                    os.fsync(fd)
        except OSError as error:
            self.abort()
            raise failed("a file of the checkpoint could not be brought to the disk", self.folder, error) from error
        self._close()
        self._made.clear()  # whether they stay is the directory's business now

    def abort(self) -> None:
        """Remove the files, unless they were finished; idempotent."""
        self._close()
        while self._made:
            with contextlib.suppress(OSError):
                os.unlink(self._made.pop())

    def _link(self, old: Path, new: Path) -> int | None:
        """A descriptor that reads it."""
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:  # it went meanwhile, or the filesystem has no links, or no more of them
            return None
        self._made.append(new)
        fd = os.open(new, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return _direct(fd, new, os.O_RDONLY)
        except BaseException:
            os.close(fd)
            raise

    def _make(self, path: Path, nbytes: int) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._made.append(path)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            return _direct(fd, path, os.O_RDWR)
        except BaseException:
            os.close(fd)
            raise

    def _close(self) -> None:
        if self._queue is not None and self._queue is not self._shared:
            self._queue.close()
        self._queue = None
        while self._fds:
            os.close(self._fds.popitem()[1])
        while self._replaced:
            os.close(self._replaced.pop())


class Tensors:
    """The small tensors of a new checkpoint, on rank 0; `put` is what `manifest.encode` calls."""

    def __init__(self):
        self.entries: list[StoredTensor] = []
        self._values: list[torch.Tensor] = []
        self.nbytes = 0

    def put(self, tensor: torch.Tensor) -> int:
        """Take a copy, on the CPU; returns its index. Raises CheckpointError for a kind of tensor that the format does not have."""
        if str(tensor.dtype).removeprefix("torch.") not in manifests.TENSOR_DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            where = "the meta device" if tensor.is_meta else f"layout {tensor.layout}"
            raise CheckpointError(f"tensors of {tensor.dtype} and {where} cannot be saved")
        value = tensor.detach().to("cpu", copy=True).contiguous()
        data = as_bytes(value)
        dtype = str(value.dtype).removeprefix("torch.")
        self.entries.append(StoredTensor(dtype, tuple(value.shape), self.nbytes, len(data), aio_ext.crc32c(data)))
        self._values.append(value)
        self.nbytes += len(data)
        return len(self.entries) - 1

    def write(self, folder: Path) -> None:
        path = folder / manifests.TENSORS_NAME
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
                for value in self._values:
                    file.write(as_bytes(value))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise failed("the checkpoint's small tensors could not be written", path, error) from error


class Checkpoint:
    """A checkpoint open for reading. Raises CheckpointError for what is missing, damaged or none, SwapError for a failing disk."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._fds: dict[int, int] = {}
        self._tensors_fd = -1
        self._queue = None
        self._arena = Arena()
        self._cached: OrderedDict[tuple[int, int], Region] = OrderedDict()
        self._index: list[list[tuple[int, int, int, int]]] | None = None
        self.manifest = read_manifest(self.path)
        while True:
            self.folder = self.path / self.manifest.folder
            try:
                self._open()
                return
            except OSError:
                self.close()
                raise
            except CheckpointError:
                self.close()
                before, self.manifest = self.manifest, read_manifest(self.path)
                if self.manifest.folder == before.folder:
                    raise  # else another checkpoint has taken its place meanwhile

    def _open(self) -> None:
        missing = []
        try:
            folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise failed("the checkpoint cannot be opened", self.folder, error) from error
            raise CheckpointError(f"{self.folder}: the checkpoint's folder is missing or cannot be read ({error.strerror})") from None
        try:
            wanted = [(index, file.name, file.nbytes) for index, file in enumerate(self.manifest.files)]
            if self.manifest.tensors:
                wanted.append((-1, manifests.TENSORS_NAME, sum(tensor.nbytes for tensor in self.manifest.tensors)))
            for index, name, nbytes in wanted:
                try:
                    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
                except OSError as error:
                    if error.errno in NO_DESCRIPTORS:
                        raise failed("the checkpoint cannot be opened", self.folder / name, error) from error
                    missing.append(f"{name} ({error.strerror})")
                    continue
                if index < 0:
                    self._tensors_fd = fd
                else:
                    self._fds[index] = fd
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
                    missing.append(f"{name} (has {status.st_size:,} bytes instead of {nbytes:,})")
            if missing:
                more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
                raise CheckpointError(f"{self.folder}: missing or cut: {', '.join(missing[:5])}{more}; use another checkpoint")
            for index in self._fds:
                name = self.manifest.files[index].name
                self._fds[index] = _direct(self._fds[index], name, os.O_RDONLY, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
        self._queue = QUEUE.queue()

    def read(self, chunk: int, rank: int, offset: int, buffer: memoryview) -> aio_ext.Ticket:
        """Read a part of a record, multiples of 4096 bytes, into page-aligned memory; nothing is checked yet."""
        place = self.manifest.places[chunk][rank]
        return self._queue.read(self._fds[place.file], buffer, place.offset + offset)

    def settle(self, chunk: int, rank: int, tickets: Sequence[aio_ext.Ticket]) -> None:
        """Wait until the record's parts have been read."""
        failure = None
        for ticket in tickets:
            try:
                ticket.wait()
            except OSError as error:
                failure = failure or error
        if failure is not None:
            text = f"chunk {chunk} of rank {rank} cannot be read from the checkpoint"
            raise failed(text, self.folder / self.manifest.files[self.manifest.places[chunk][rank].file].name, failure)

    def check(self, chunk: int, rank: int, segments: dict[str, memoryview]) -> None:
        """Compare bytes that were read with the manifest. segments: some of the record's, by name, each without its padding."""
        place, record = self.manifest.places[chunk][rank], self.manifest.record(chunk, rank)
        for segment, crc in zip(record.segments, place.crcs):
            if segment.name in segments and aio_ext.crc32c(segments[segment.name]) != crc:
                names = [self.manifest.parameters[piece.param].name for piece in self.manifest.chunks[chunk].shard_pieces(rank)]
                raise CheckpointError(
                    f"{self.folder / self.manifest.files[place.file].name}: chunk {chunk} of rank {rank} "
                    f"({', '.join(names[:2])}{', ...' if len(names) > 2 else ''}), {segment.name}, is damaged: its checksum is not that of "
                    f"the manifest; use another checkpoint"
                )

    def record(self, chunk: int, rank: int) -> dict[str, torch.Tensor]:
        """The segments of a record by name, checked, 1-D, on the CPU; valid until three others were asked for."""
        key, layout = (chunk, rank), self.manifest.record(chunk, rank)
        region = self._cached.pop(key, None)
        if region is None:
            region = self._memory()
            if layout.nbytes:
                self.settle(chunk, rank, [self.read(chunk, rank, 0, region.buffer[: layout.nbytes])])
            self.check(chunk, rank, segment_bytes(layout, region.buffer))
        self._cached[key] = region
        return {
            segment.name: region.tensor(TORCH_DTYPES[segment.dtype], offset, layout.numel)
            for segment, offset in zip(layout.segments, layout.offsets)
        }

    def values(self, param: int, start: int, numel: int) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """The segments of elements [start, start + numel) of a parameter, in parts: (number of elements, segments by name)."""
        end = start + numel
        for param_start, chunk, at, count in self._pieces_of(param):
            first, last = max(start, param_start), min(end, param_start + count)
            while first < last:
                shard_numel = self.manifest.chunks[chunk].shard_numel
                inside = at + first - param_start
                rank, begin = divmod(inside, shard_numel)
                part = min(last - first, shard_numel - begin)
                yield part, {name: tensor[begin : begin + part] for name, tensor in self.record(chunk, rank).items()}
                first += part

    def copy(self, shard: dict[str, torch.Tensor], at: int, param: int, start: int, numel: int) -> None:
        """Fill elements [at, at + numel) of a shard's segments with elements [start, start + numel) of a parameter.

        Segments that the checkpoint has not are left as they are, but a master is the weight then.
        """
        for count, found in self.values(param, start, numel):
            for name, segment in shard.items():
                source = found.get(name, found["weight"] if name == "master" else None)
                if source is not None:
                    segment[at : at + count].copy_(source)
            at += count

    def buffers(self) -> dict[str, int]:
        """The index of each buffer's tensor, by name."""
        saved = self.manifest.model.get("buffers", {})
        if not isinstance(saved, dict):
            raise CheckpointError(f"{self.path}: its buffers are no object")
        found = {name: value.get("$tensor") if isinstance(value, dict) else None for name, value in saved.items()}
        for name, index in found.items():
            if type(index) is not int or not 0 <= index < len(self.manifest.tensors):
                raise CheckpointError(f"{self.path}: buffer {name} is none of its tensors")
        return found

    def tensor(self, index: int) -> torch.Tensor:
        """One of the small tensors, checked."""
        if index >= len(self.manifest.tensors):
            raise CheckpointError(f"{self.path}: there is no small tensor {index}")
        entry = self.manifest.tensors[index]
        try:
            data = bytearray(entry.nbytes)
        except MemoryError:
            raise CheckpointError(f"{self.path}: there is no memory for tensor {index} of {format_bytes(entry.nbytes)}") from None
        view, done = memoryview(data), 0
        while done < entry.nbytes:
            count = os.preadv(self._tensors_fd, [view[done : done + (1 << 24)]], entry.offset + done)
            if not count:
                break
            done += count
        if done < entry.nbytes or aio_ext.crc32c(data) != entry.crc32c:
            raise CheckpointError(f"{self.folder / manifests.TENSORS_NAME}: tensor {index} is damaged; use another checkpoint")
        dtype = manifests.TENSOR_DTYPES[entry.dtype]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(entry.shape)

    def verify(self, progress: Progress | None = None) -> int:
        """Read and check everything; returns the number of bytes."""
        manifest, done = self.manifest, 0
        jobs = [(chunk.index, rank) for chunk in manifest.chunks for rank in range(manifest.world)]
        regions = [self._region() for _ in range(2)]
        tickets: dict[int, list[aio_ext.Ticket]] = {}

        def begin(number: int) -> None:
            if number < len(jobs):
                nbytes = manifest.record(*jobs[number]).nbytes
                buffer = regions[number % 2].buffer[:nbytes]
                tickets[number] = [self.read(*jobs[number], 0, buffer)] if nbytes else []

        try:
            begin(0)
            for number, job in enumerate(jobs):
                begin(number + 1)
                self.settle(*job, tickets.pop(number))
                layout = manifest.record(*job)
                self.check(*job, segment_bytes(layout, regions[number % 2].buffer))
                done += layout.nbytes
                if progress is not None:
                    progress(done, manifest.nbytes)
        finally:
            for left in tickets.values():
                with contextlib.suppress(OSError):
                    left[0].wait() if left else None
            for region in regions:
                self._arena.give_back(region)
        for index in range(len(manifest.tensors)):
            done += self.tensor(index).nbytes
        return done

    def decode(self, value):
        """A value of the manifest as it was given."""
        try:
            return manifests.decode(value, self.tensor)
        except CheckpointError as error:
            raise error if str(self.path) in str(error) else CheckpointError(f"{self.path}: {error}") from None

    def close(self) -> None:
        """Idempotent."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        while self._fds:
            os.close(self._fds.popitem()[1])
        if self._tensors_fd >= 0:
            os.close(self._tensors_fd)
            self._tensors_fd = -1
        self._cached.clear()
        self._arena.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path}, step {self.manifest.step}, {format_bytes(self.manifest.nbytes)})"

    @functools.cached_property
    def _largest(self) -> int:
        sizes = (self.manifest.record(chunk.index, rank).nbytes for chunk in self.manifest.chunks for rank in range(self.manifest.world))
        return max(sizes, default=0) or _ALIGNMENT

    def _memory(self) -> Region:
        """Room for one record: that which was used longest ago."""
        if len(self._cached) == _NUM_RECORDS_IN_MEMORY:
            return self._cached.popitem(last=False)[1]
        return self._region()

    def _region(self) -> Region:
        try:
            return self._arena.region(self._largest)
        except (MemoryError, OSError):
            raise CheckpointError(f"{self.path}: there is no memory for a record of {format_bytes(self._largest)}") from None

    def _pieces_of(self, param: int) -> list[tuple[int, int, int, int]]:
        """(start in the parameter, chunk, start in the chunk, number of elements), in order."""
        if self._index is None:
            self._index = [[] for _ in self.manifest.parameters]
            for chunk in self.manifest.chunks:
                for piece in chunk.pieces:
                    self._index[piece.param].append((piece.param_start, chunk.index, piece.start, piece.numel))
            for pieces in self._index:
                pieces.sort()
        return self._index[param]


def read_manifest(path: Path) -> Manifest:
    """The checkpoint's manifest, checked. Raises CheckpointError if there is none, or none that can be believed."""
    where = path / manifests.NAME
    try:
        fd = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_why_none(path)) from None
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read ({error.strerror})") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > manifests.LARGEST_NBYTES:
        os.close(fd)
        raise CheckpointError(f"{where} is no file of at most {format_bytes(manifests.LARGEST_NBYTES)}")
    with open(fd, "rb") as file:
        data = file.read(status.st_size + 1)
    return Manifest.from_json(data, str(where))


def _why_none(path: Path) -> str:
    if not path.is_dir():
        return f"{path} is no directory: name that of a checkpoint"
    names = os.listdir(path)
    if any(manifests.FOLDER_NAME.fullmatch(name) for name in names):
        return f"{path}: a checkpoint is being written there, or its writing was interrupted; there is no earlier one. Use another one"
    inside = sorted(name for name in names if (path / name / manifests.NAME).is_file())
    hint = f"; did you mean {path / inside[-1]}?" if inside else ""
    return f"{path} holds no checkpoint: there is no {manifests.NAME}{hint}"


def _current_folder(path: Path) -> str | None:
    """Of the checkpoint that is there; a manifest that cannot be read protects whatever it may name."""
    if not os.path.lexists(path / manifests.NAME):
        return None
    try:
        return read_manifest(path).folder
    except CheckpointError as error:
        raise CheckpointError(f"{path / manifests.NAME} cannot be replaced: move it away or save elsewhere ({error})") from None


def segment_bytes(record: Record, buffer: memoryview) -> dict[str, memoryview]:
    """A record's segments by name, without their padding, in memory that holds all of it."""
    return {
        segment.name: buffer[offset : offset + record.numel * segment.itemsize]
        for segment, offset in zip(record.segments, record.offsets)
    }


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")


def ancestors(path: Path) -> list[Path]:
    """The directories that lead to a directory, on its filesystem."""
    path = path.resolve()
    device = path.stat().st_dev
    return list(itertools.takewhile(lambda parent: parent.stat().st_dev == device, path.parents))


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def failed(text: str, path, error: OSError) -> SwapError:
    remedy = REMEDIES.get(error.errno)
    return SwapError(error.errno, f"{text} ({error.strerror}){f'; {remedy}' if remedy else ''}", str(error.filename or path))


def _direct(fd: int, path, flags: int, dir_fd: int | None = None) -> int:
    """The file opened once more, past the page cache, if that works there; else as it is."""
    try:
        direct = os.open(path, flags | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if not refuses_direct(error):
            raise
        return fd
    memory, offset = aio_ext.direct_alignment(direct)
    if not memory or _ALIGNMENT % memory or _ALIGNMENT % offset:
        os.close(direct)
        return fd
    os.close(fd)
    return direct
