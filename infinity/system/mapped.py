"""Files that are mapped into memory, such as those of safetensors: finds the file of an address, and reads files ahead.

Knows addresses and files. Must not know the contents.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

LEAST_AHEAD_NBYTES = 2 << 30  # a fast drive reads this in a second or less, and free memory holds it
PIECE_NBYTES = 64 << 20  # one request takes some hundredths of a second
ADVICE_NBYTES = 128 << 10  # the kernel shortens larger requests to the drive's read-ahead size, by default this size, and drops the rest

_MAPS = Path("/proc/self/maps")
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it, and mmap.madvise holds the GIL
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class Part(NamedTuple):
    """Bytes of a file, nbytes from offset on, and the address of their mapping."""

    path: str
    offset: int
    nbytes: int
    address: int

    def pieces(self) -> Iterator[Part]:
        """Parts of PIECE_NBYTES each, and the rest. Small pieces keep close() short, which waits for active reads."""
        for begin in range(0, self.nbytes, PIECE_NBYTES):
            yield Part(self.path, self.offset + begin, min(PIECE_NBYTES, self.nbytes - begin), self.address + begin)


class MappedFiles:
    """The mapped files of this process at the time of construction."""

    def __init__(self):
        self._begins, self._files = [], []
        with contextlib.suppress(OSError), _MAPS.open(errors="surrogateescape") as lines:
            for line in lines:
                span, _, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
                if inode != "0" and path and path[0].startswith("/") and not path[0].startswith(("/dev/", "/memfd:")):  # memory
                    begin, end = (int(number, 16) for number in span.split("-"))
                    self._begins.append(begin)
                    self._files.append((end, int(offset, 16), path[0]))

    def find(self, address: int, nbytes: int) -> Part | None:
        """The file part at an address, if all nbytes belong to one file."""
        index = bisect.bisect_right(self._begins, address) - 1
        if index < 0 or nbytes < 1:
            return None
        begin, (end, offset, path) = self._begins[index], self._files[index]
        return Part(path, offset + address - begin, nbytes, address) if address + nbytes <= end else None


class ReadAhead:
    """Lets the kernel read the mapped files' part of some memory, (address, nbytes) in the order of use. A context manager.

    The kernel itself reads about 100 KiB ahead of a touched page, and nothing without a touch. The first touch takes a fault every 64
    KiB, 0.4 s a gigabyte. Here other threads take these faults. ahead_nbytes: bytes to read before their use, if more than the minimum.
    """

    def __init__(self, memory: Iterable[tuple[int, int]], ahead_nbytes: int = 0):
        self._ahead_nbytes = max(ahead_nbytes, LEAST_AHEAD_NBYTES)
        files = MappedFiles()
        self._parts: Sequence[Part | None] = [files.find(*place) for place in memory]
        self._begins = [0, *itertools.accumulate(part.nbytes if part is not None else 0 for part in self._parts)]
        self._num_asked = 0
        self._pool = ThreadPoolExecutor(2, "infinity-ahead")  # one requests while the other waits for bytes

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Make no further requests. Idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def reach(self, index: int) -> None:
        """Report that the memory with this index is in use now."""
        while self._num_asked < len(self._parts) and self._begins[self._num_asked] <= self._begins[index] + self._ahead_nbytes:
            if (part := self._parts[self._num_asked]) is not None:
                for piece in part.pieces():
                    self._pool.submit(_ask, piece)
            self._num_asked += 1


class FilesAhead:
    """Lets the kernel read a file when the first address in the file is met, files in this order, up to most_nbytes in total. A context
    manager.
    """

    def __init__(self, most_nbytes: int):
        self._left_nbytes = max(most_nbytes, LEAST_AHEAD_NBYTES)
        self._files, self._met, self._num_missed = None, set(), 0
        self._pool = ThreadPoolExecutor(1, "infinity-ahead")

    def __enter__(self) -> FilesAhead:
        return self

    def __exit__(self, *exception) -> None:
        self._pool.shutdown(cancel_futures=True)

    def meet(self, address: int) -> None:
        """Report an address where a file may be mapped. Makes no requests after the block has ended."""
        part = self._files.find(address, 1) if self._files is not None else None
        if part is None:  # the file may be newly mapped; for memory without a file, such as NumPy's, the check becomes rarer and rarer
            self._num_missed += 1
            if self._num_missed & (self._num_missed - 1):
                return
            self._files = MappedFiles()
            part = self._files.find(address, 1)
        if part is None:
            return
        self._num_missed = 0
        if part.path in self._met:
            return
        self._met.add(part.path)
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the block has ended, or no thread can start
            nbytes = min(os.path.getsize(part.path), self._left_nbytes)
            self._left_nbytes -= nbytes
            for offset in range(0, nbytes, PIECE_NBYTES):
                self._pool.submit(_will_need, part.path, offset, min(PIECE_NBYTES, nbytes - offset))


def _will_need(path: str, offset: int, nbytes: int) -> None:
    with contextlib.suppress(OSError):  # the file is read later in any case
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for begin in range(offset, offset + nbytes, ADVICE_NBYTES):
                os.posix_fadvise(file, begin, min(ADVICE_NBYTES, offset + nbytes - begin), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)


def _ask(part: Part) -> None:
    begin = part.address // mmap.PAGESIZE * mmap.PAGESIZE
    if _madvise(begin, part.address + part.nbytes - begin, _MADV_POPULATE_READ):  # an older kernel refuses
        _will_need(part.path, part.offset, part.nbytes)
