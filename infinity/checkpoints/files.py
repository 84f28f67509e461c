"""A checkpoint's directory and files: a new checkpoint replaces the old one atomically.

Knows directories, names, fsync, and the file of each record. Must not know engines, the bytes of records or torch.distributed.
[Note: the format of a checkpoint] in manifest.py describes the files.

# [Note: old or new]
# At any moment the directory holds the complete old checkpoint or the complete new one:
#   1. Rank 0 locks the directory, fsyncs its parent directories, and makes a new folder in the directory.
#   2. Each rank makes its files in this folder at full size, writes them and fsyncs them.
#   3. After all ranks, rank 0 fsyncs the folder and the directory, writes the manifest to a temporary file and fsyncs that file.
#   4. Rank 0 renames the temporary file over the old manifest. The rename replaces the checkpoint. Then rank 0 removes the old folder.
# An error before the rename, such as a failed fsync, ends the new checkpoint and keeps the old one. A failed fsync is never retried. The
# next save removes the folder of a killed process. Files have mode 0600, new directories 0700, as swap files have.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import aio_ext
from infinity.checkpoints import manifest as manifests
from infinity.checkpoints.manifest import ALIGNMENT, File, Manifest
from infinity.checkpoints.manifest_check import manifest_from_json
from infinity.errors import NO_DESCRIPTORS, CheckpointError, SwapError, refuses_direct
from infinity.plan.record import Record
from infinity.sizes import format_bytes
from infinity.system.drives import Drive

FILE_NBYTES = 1 << 30  # approximate size of a file: an unchanged file is linked from the last checkpoint as a whole
SLACK_NBYTES = 1 << 20  # free space for the manifest and the filesystem's metadata
QUEUE = Drive(inflight_write_nbytes=8 << 20)  # no read waits behind these writes
_TEMPORARY = ".manifest.new"

_BEFORE_ONE = "infinity.latest(path) returns None before the first checkpoint is complete"

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
    """The files of one rank, and (file, offset in bytes) of each record. Frozen and trainable records have separate files."""
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


def lay_out_all(manifest: Manifest) -> tuple[list[File], list[list[tuple[int, int]]]]:
    """The files of all ranks, and (file, offset in bytes) of each record, by chunk and rank. The manifest still lacks both."""
    files: list[File] = []
    places: list[list[tuple[int, int]]] = [[] for _ in manifest.chunks]
    for rank in range(manifest.world):
        records = [manifest.record(chunk.index, rank) for chunk in manifest.chunks]
        own, at = lay_out(records, [chunk.trainable for chunk in manifest.chunks], rank)
        for row, (file, offset) in zip(places, at, strict=True):
            row.append((len(files) + file, offset))
        files += own
    return files, places


class Directory:
    """A checkpoint's directory while rank 0 makes a new checkpoint. Raises CheckpointError or SwapError.

    The constructor locks the directory, removes folders that killed processes left, and makes the new folder.
    """

    def __init__(self, path: Path):
        self.path = path = path.absolute()  # the program may change its working directory
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
        for parent in ancestors(self.path):  # the entry of a new directory may not be on the disk yet, whoever made the directory
            with contextlib.suppress(PermissionError):  # a parent may not be readable
                sync_directory(parent)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._remove_folders(keep=_current_folder(self.path))
        os.mkdir(self.path / self.folder, 0o700)

    def check_space(self, nbytes: int) -> None:
        """Raise CheckpointError if the filesystem has no room for `nbytes`."""
        status = os.fstatvfs(self._fd)
        available = status.f_bavail * status.f_frsize
        if nbytes + SLACK_NBYTES > available:
            raise CheckpointError(
                f"{self.path}: the checkpoint needs {nbytes + SLACK_NBYTES:,} bytes and {available:,} are available; free space there or "
                f"save elsewhere. (The old checkpoint is removed only when the new one is complete.)"
            )

    def commit(self, manifest: Manifest) -> None:
        """Replace the old checkpoint by the new folder; see [Note: old or new]. All files of the folder have been fsynced."""
        try:
            for path in (self.path / self.folder, self.path):
                sync_directory(path)
            data = manifest.to_json()
            manifest_from_json(data, str(self.path / manifests.NAME))  # an unreadable manifest must not replace a readable one
            new = self.path / _TEMPORARY
            write_whole(new, [data], os.O_TRUNC)
            os.rename(new, self.path / manifests.NAME)
        except CheckpointError:
            self.abort()
            raise
        except OSError as error:
            self.abort()
            raise failed("the checkpoint could not be completed", self.path, error) from error
        try:
            os.fsync(self._fd)
        except OSError as error:  # after a crash the manifest may be the old or the new one: both folders stay
            self.close()
            raise failed("the checkpoint was written, but may be lost in a crash of the machine", self.path, error) from error
        with contextlib.suppress(OSError):
            self._remove_folders(keep=self.folder)
        self.close()

    def abort(self) -> None:
        """Remove the new folder and keep the old checkpoint, if any. Idempotent."""
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
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # a forked child shares the lock, so a close alone would not release it
            os.close(self._fd)
            self._fd = -1

    def _remove_folders(self, keep: str | None) -> None:
        for name in os.listdir(self._fd):
            if manifests.FOLDER_NAME.fullmatch(name) and name != keep:
                shutil.rmtree(self.path / name, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """Read and check the checkpoint's manifest. Raises CheckpointError if the manifest is missing or not valid."""
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
        raise CheckpointError(f"{where}: expected a file of at most {format_bytes(manifests.LARGEST_NBYTES)}")
    with open(fd, "rb") as file:
        data = file.read(status.st_size + 1)
    return manifest_from_json(data, str(where))


def _why_none(path: Path) -> str:
    if not path.is_dir():
        return f"{path} is not a directory: name the directory of a checkpoint; {_BEFORE_ONE}"
    names = os.listdir(path)
    if any(manifests.FOLDER_NAME.fullmatch(name) for name in names):
        return f"{path} holds no checkpoint: its first save was interrupted, or is under way. Training may start anew; {_BEFORE_ONE}"
    inside = sorted(name for name in names if (path / name / manifests.NAME).is_file())
    hint = f"did you mean {path / inside[-1]}?" if inside else _BEFORE_ONE
    return f"{path} holds no checkpoint: there is no {manifests.NAME}; {hint}"


def _current_folder(path: Path) -> str | None:
    """The folder of the current checkpoint, or None. Raises CheckpointError for an unreadable manifest: its folder must not be removed."""
    if not os.path.lexists(path / manifests.NAME):
        return None
    try:
        return read_manifest(path).folder
    except CheckpointError as error:
        raise CheckpointError(f"{path / manifests.NAME} cannot be replaced: move it away or save elsewhere ({error})") from None


def write_whole(path: Path, parts: Iterable, flags: int) -> None:
    """Write and fsync a file of mode 0600. parts: buffers of bytes. flags: for os.open, added to the flags of all files."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600), "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def ancestors(path: Path) -> list[Path]:
    """The parent directories of a directory, on the same filesystem."""
    path = path.resolve()
    device = path.stat().st_dev
    return list(itertools.takewhile(lambda parent: parent.stat().st_dev == device, path.parents))


def sync_directory(path: str | os.PathLike) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def failed(text: str, path, error: OSError) -> SwapError:
    remedy = REMEDIES.get(error.errno)
    return SwapError(error.errno, f"{text} ({error.strerror}){f'; {remedy}' if remedy else ''}", str(error.filename or path))


def open_direct(fd: int, path, flags: int, dir_fd: int | None = None) -> int:
    """Reopen the file with O_DIRECT (no page cache) and close `fd`. Returns `fd` itself if the filesystem lacks direct I/O."""
    try:
        direct = os.open(path, flags | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if not refuses_direct(error):
            raise
        return fd
    memory, offset = aio_ext.direct_alignment(direct)
    if not memory or ALIGNMENT % memory or ALIGNMENT % offset:
        os.close(direct)
        return fd
    os.close(fd)
    return direct
