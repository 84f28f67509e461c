"""A temporary file for data that leaves memory for a while. The file has no name, so the end of the process always removes the file.

Knows a directory and bytes. Must not know their meaning.
"""

from __future__ import annotations

import collections
import errno
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

import aio_ext
from infinity.errors import SwapError
from infinity.sizes import format_bytes
from infinity.system.swap_errors import changed_error

_MOST_A_CALL = 1 << 30  # bytes


class Place(NamedTuple):
    """[offset, offset + nbytes) of the file, and the checksum of the contents if checksums are on."""

    offset: int
    nbytes: int
    crc32c: int | None


class Scratch:
    """path: a directory. creates: make the directory at the first write. A freed place is used again for data of the same size."""

    def __init__(self, path: Path, *, creates: bool, checksums: bool):
        self.path, self.file = path, None
        self.written_nbytes = self.read_nbytes = 0  # so far
        self._creates, self._checksums = creates, checksums
        self._nbytes = 0
        self._free = collections.defaultdict(list)  # offsets, by size in bytes

    def write(self, part: torch.Tensor, nbytes: int) -> Place:
        """Write a 1-D CPU tensor of at most nbytes to a place of nbytes."""
        if not (offsets := self._free[nbytes]):
            offsets.append(self._nbytes)
            self._nbytes += nbytes
        place = Place(offsets[-1], nbytes, aio_ext.crc32c(_memory(part)) if self._checksums else None)
        try:
            self._transfer("write", place.offset, part)
        except OSError as error:
            raise SwapError(
                error.errno,
                f"the scratch file for parameters under construction could not take {format_bytes(part.nbytes)} more; free "
                f"some space or name another directory in `swap_dirs`",
                str(self.path),
            ) from error
        offsets.pop()
        self.written_nbytes += part.nbytes
        return place

    def read(self, place: Place, part: torch.Tensor, what: str) -> None:
        """Fill a 1-D tensor of the written size. what: begins the text of an error."""
        try:
            self._transfer("readinto", place.offset, part)
        except OSError as error:
            text = f"{what}its scratch file could not be read ({error.strerror}); see dmesg, and name another directory in `swap_dirs`"
            raise SwapError(error.errno, text, str(self.path)) from error
        if place.crc32c not in (None, aio_ext.crc32c(_memory(part))):
            raise changed_error(what, f", from offset {place.offset} of a scratch file on", self.path)
        self.read_nbytes += part.nbytes

    def free(self, place: Place) -> None:
        """Free a place. The bytes stay readable until the next write of that size."""
        self._free[place.nbytes].append(place.offset)

    def close(self) -> None:
        """Free the file's space and contents. Idempotent."""
        if self.file is not None:
            self.file.close()
            self.file, self._nbytes = None, 0
            self._free.clear()

    def _transfer(self, what: str, offset: int, part: torch.Tensor) -> None:
        """`write` all of part to the unbuffered file, or `readinto` from it: the kernel moves at most 2 GiB per call."""
        memory, file = _memory(part), self._opened()
        file.seek(offset)
        while memory:
            moved = getattr(file, what)(memory[:_MOST_A_CALL])
            if not moved:
                raise OSError(errno.ENOSPC if what == "write" else errno.EIO, f"{what} of {len(memory)} bytes moved none")
            memory = memory[moved:]

    def _opened(self):
        if self.file is None:
            if self._creates:
                self.path.mkdir(exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=self.path, buffering=0)
        return self.file


def _memory(part: torch.Tensor) -> memoryview:
    """The bytes of a 1-D tensor."""
    return memoryview(part.view(torch.uint8).numpy())
