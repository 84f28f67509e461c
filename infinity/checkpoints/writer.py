"""The files of a new checkpoint: files of records, which may be links to files of an earlier checkpoint, and small tensors.

Knows the places of records in files, and checksums. Must not know how files become a checkpoint (`files.Directory`), or when a record is
copied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import aio_ext
from infinity.checkpoints.files import QUEUE, failed, open_direct, write_whole
from infinity.checkpoints.manifest import TENSORS_NAME, TENSOR_DTYPES, File, StoredTensor
from infinity.errors import CheckpointError

Places = Sequence[tuple[int, int]] | Mapping[object, tuple[int, int]]  # (file, offset in bytes) of each record


class Writer:
    """The record files of a new checkpoint, in an existing folder. linked: the paths of files to link, by index of the file.

    The constructor and `finish` remove the new files before they raise SwapError.
    """

    def __init__(self, folder: Path, files: Sequence[File], places: Places, linked: Mapping[int, Path] | None = None):
        self.folder = folder
        self.files = files
        self.places = places
        self.linked: set[int] = set()  # files, by index, whose link succeeded
        self._fds: dict[int, int] = {}
        self._replaced: list[int] = []  # descriptors that a thread may still read from
        self._queue = None
        self._made: list[Path] = []
        try:
            for index, file in enumerate(files):
                fd = self._link(linked[index], folder / file.name) if linked and index in linked else None
                if fd is not None:
                    self.linked.add(index)
                self._fds[index] = self._make(folder / file.name, file.nbytes) if fd is None else fd
            self._queue = QUEUE.queue()
        except OSError as error:
            self.abort()
            raise failed("the checkpoint's files cannot be made", folder, error) from error

    def write(self, record, offset: int, buffer: memoryview) -> aio_ext.Ticket:
        """Begin to write a part of a record, in multiples of 4096 bytes. The buffer must not change until the ticket is done."""
        file, start = self.places[record]
        return self._queue.write(self._fds[file], buffer, start + offset)

    def read(self, record, offset: int, buffer: memoryview) -> aio_ext.Ticket:
        """Begin to read a part of a record from a linked file. The rules of `write` apply."""
        file, start = self.places[record]
        return self._queue.read(self._fds[file], buffer, start + offset)

    def renew(self, file: int) -> None:
        """Replace a linked file by a new file for writing. Raises SwapError; the caller must `abort` then."""
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
        """Fsync all new files. The caller must have waited for all tickets."""
        try:
            for index, fd in self._fds.items():
                if index not in self.linked:
                    os.fsync(fd)
        except OSError as error:
            self.abort()
            raise failed("fsync of a file of the checkpoint failed", self.folder, error) from error
        self._close()
        self._made.clear()  # from now on `files.Directory` removes these files

    def abort(self) -> None:
        """Remove the files, unless `finish` has returned. Idempotent."""
        self._close()
        while self._made:
            with contextlib.suppress(OSError):
                os.unlink(self._made.pop())

    def _link(self, old: Path, new: Path) -> int | None:
        """Link a file. Returns a descriptor for reading, or None if the link failed."""
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:  # the file was removed, or the filesystem allows no link or no further link of this file
            return None
        self._made.append(new)
        fd = os.open(new, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return open_direct(fd, new, os.O_RDONLY)
        except BaseException:
            os.close(fd)
            raise

    def _make(self, path: Path, nbytes: int) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._made.append(path)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            return open_direct(fd, path, os.O_RDWR)
        except BaseException:
            os.close(fd)
            raise

    def _close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self._queue = None
        while self._fds:
            os.close(self._fds.popitem()[1])
        while self._replaced:
            os.close(self._replaced.pop())


class Tensors:
    """The small tensors of a new checkpoint. `encoding.encode` calls `put` on all ranks; rank 0 writes the file."""

    def __init__(self):
        self.entries: list[StoredTensor] = []
        self._values: list[torch.Tensor] = []
        self.nbytes = 0

    def put(self, tensor: torch.Tensor) -> int:
        """Copy a tensor to the CPU and return the copy's index. Raises CheckpointError for a dtype or layout that the format lacks."""
        if str(tensor.dtype).removeprefix("torch.") not in TENSOR_DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
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
        path = folder / TENSORS_NAME
        try:
            write_whole(path, map(as_bytes, self._values), os.O_EXCL)
        except OSError as error:
            raise failed("the checkpoint's small tensors could not be written", path, error) from error


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")
