"""A file for what leaves memory for a while: it has no name, so that nothing is left of it whatever ends the process.

Knows a directory and bytes. Must not know what they are.
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
    """[offset, offset + nbytes) of the file, and the checksum of what is there, where they are wanted."""

    offset: int
    nbytes: int
    crc32c: int | None


class Scratch:
    """path: of a directory; creates: it is made when something goes there. What is freed, the next of that size takes."""

    def __init__(self, path: Path, *, creates: bool, checksums: bool):
        self.path, self.file = path, None
        self.written_nbytes = self.read_nbytes = 0  # so far
        self._creates, self._checksums = creates, checksums
        self._nbytes = 0
        self._free = collections.defaultdict(list)  # offsets, by size in bytes

    def write(self, part: torch.Tensor, nbytes: int) -> Place:
        """Keep a 1-D tensor of the CPU, of at most nbytes, in a place of nbytes."""
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
        """Fill a 1-D tensor as large as what was written. what: begins the text of an error."""
        try:
            self._transfer("readinto", place.offset, part)
        except OSError as error:
            text = f"{what}its scratch file could not be read ({error.strerror}); see dmesg, and name another directory in `swap_dirs`"
            raise SwapError(error.errno, text, str(self.path)) from error
        if place.crc32c not in (None, aio_ext.crc32c(_memory(part))):
            raise changed_error(what, f", from offset {place.offset} of a scratch file on", self.path)
        self.read_nbytes += part.nbytes

    def free(self, place: Place) -> None:
        """Until the next one is written, its bytes can still be read there."""
        self._free[place.nbytes].append(place.offset)

    def close(self) -> None:
        """Give its space back; nothing is kept in it any more. Idempotent."""
        if self.file is not None:
            self.file.close()
            self.file, self._nbytes = None, 0
            self._free.clear()

    def _transfer(self, what: str, offset: int, part: torch.Tensor) -> None:
        """`write` to the file, which has no buffer, or `readinto` from it, all of part: the kernel moves at most 2 GiB a call."""
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
