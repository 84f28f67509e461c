"""A checkpoint's directory and files: made so that a checkpoint is the old one or the new one, whole.

Knows directories, names, syncs and which record lies in which file. Must not know engines, records' bytes or torch.distributed: how
many ranks share the work is told. What the files hold is [Note: the format of a checkpoint] in manifest.py.

# [Note: old or new]
# Rank 0 locks the directory, fsyncs those that lead to it, and makes a new folder in it; each rank makes its files there, at their full
# size, writes and fsyncs them. When all have, rank 0 fsyncs the folder and the directory, writes the manifest aside, fsyncs it, and
# renames it over the old one: the one moment at which the new checkpoint is there. Then the old folder goes. Whatever fails before, also
# an fsync, which is never tried again, ends that checkpoint and leaves the old one; the folder that a killed process leaves goes with
# the next checkpoint.
# What is made is its owner's alone, as swap is: files 0600, directories 0700, but for a directory that was there.
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

FILE_NBYTES = 1 << 30  # about: what has not changed since the last checkpoint is linked file by file
SLACK_NBYTES = 1 << 20  # for the manifest and the filesystem's own
QUEUE = Drive(inflight_write_nbytes=8 << 20)  # nobody waits for reads behind these writes
_TEMPORARY = ".manifest.new"

_BEFORE_ONE = "a program that starts before its first checkpoint is whole gets None from infinity.latest(path)"

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


def lay_out_all(manifest: Manifest) -> tuple[list[File], list[list[tuple[int, int]]]]:
    """The files of all ranks' records, and (file, offset) of each, by chunk and rank. The manifest has neither yet."""
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
            manifest_from_json(data, str(self.path / manifests.NAME))  # what could not be read again must not take a place
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
    return manifest_from_json(data, str(where))


def _why_none(path: Path) -> str:
    if not path.is_dir():
        return f"{path} is no directory: name that of a checkpoint; {_BEFORE_ONE}"
    names = os.listdir(path)
    if any(manifests.FOLDER_NAME.fullmatch(name) for name in names):
        return f"{path} holds no checkpoint: its first save was interrupted, or is under way. Training may begin anew; {_BEFORE_ONE}"
    inside = sorted(name for name in names if (path / name / manifests.NAME).is_file())
    hint = f"did you mean {path / inside[-1]}?" if inside else _BEFORE_ONE
    return f"{path} holds no checkpoint: there is no {manifests.NAME}; {hint}"


def _current_folder(path: Path) -> str | None:
    """Of the checkpoint that is there; a manifest that cannot be read protects whatever it may name."""
    if not os.path.lexists(path / manifests.NAME):
        return None
    try:
        return read_manifest(path).folder
    except CheckpointError as error:
        raise CheckpointError(f"{path / manifests.NAME} cannot be replaced: move it away or save elsewhere ({error})") from None


def write_whole(path: Path, parts: Iterable, flags: int) -> None:
    """Make a file of the owner's alone, of these bytes, on the disk. flags: of open, beside those of any file here."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600), "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def ancestors(path: Path) -> list[Path]:
    """The directories that lead to a directory, on its filesystem."""
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
    """The file opened once more, past the page cache, if that works there; else as it is."""
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
