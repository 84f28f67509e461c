"""Files that are mapped into memory, as those of safetensors are: which memory is theirs, and reading them before it is used.

Knows addresses and files. Must not know what is in them.
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

LEAST_AHEAD_NBYTES = 2 << 30  # as much as a fast drive reads in a second or less; what is free of memory holds it
PIECE_NBYTES = 64 << 20  # who asks for so much waits some hundredths of a second
ADVICE_NBYTES = 128 << 10  # of more the kernel takes what a drive reads ahead or at once, by default so much, and forgets the rest

_MAPS = Path("/proc/self/maps")
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it, and mmap.madvise keeps its lock
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class Part(NamedTuple):
    """Bytes of a file, nbytes from offset on, and the address where they are mapped."""

    path: str
    offset: int
    nbytes: int
    address: int

    def pieces(self) -> Iterator[Part]:
        """Of PIECE_NBYTES each, the last of what is left: whoever closes waits for those that are being read."""
        for begin in range(0, self.nbytes, PIECE_NBYTES):
            yield Part(self.path, self.offset + begin, min(PIECE_NBYTES, self.nbytes - begin), self.address + begin)


class MappedFiles:
    """Those of this process, as they are now."""

    def __init__(self):
        self._begins, self._files = [], []
        with contextlib.suppress(OSError), _MAPS.open(errors="surrogateescape") as lines:
            for line in lines:
                span, _, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
                if inode != "0" and path and path[0].startswith("/") and not path[0].startswith(("/dev/", "/memfd:")):  # these are memory
                    begin, end = (int(number, 16) for number in span.split("-"))
                    self._begins.append(begin)
                    self._files.append((end, int(offset, 16), path[0]))

    def find(self, address: int, nbytes: int) -> Part | None:
        """What lies at an address, if all of it is a file's."""
        index = bisect.bisect_right(self._begins, address) - 1
        if index < 0 or nbytes < 1:
            return None
        begin, (end, offset, path) = self._begins[index], self._files[index]
        return Part(path, offset + address - begin, nbytes, address) if address + nbytes <= end else None


class ReadAhead:
    """Has the kernel read what of some memory, (address, nbytes) in the order of its use, is mapped files'. A context manager.

    The kernel itself reads some 100 KiB ahead of who touches mapped memory, and nothing while nobody does; and who touches it first takes
    a fault every 64 KiB, 0.4 s a gigabyte, which are taken here. ahead_nbytes: so much is read before it is used, if it is more than the
    least.
    """

    def __init__(self, memory: Iterable[tuple[int, int]], ahead_nbytes: int = 0):
        self._ahead_nbytes = max(ahead_nbytes, LEAST_AHEAD_NBYTES)
        files = MappedFiles()
        self._parts: Sequence[Part | None] = [files.find(*place) for place in memory]
        self._begins = [0, *itertools.accumulate(part.nbytes if part is not None else 0 for part in self._parts)]
        self._num_asked = 0
        self._pool = ThreadPoolExecutor(2, "infinity-ahead")  # one asks for more while the other waits for bytes

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Ask for nothing any more. Idempotent."""
        self._pool.shutdown(cancel_futures=True)

    def reach(self, index: int) -> None:
        """The memory of that number is used now."""
        while self._num_asked < len(self._parts) and self._begins[self._num_asked] <= self._begins[index] + self._ahead_nbytes:
            if (part := self._parts[self._num_asked]) is not None:
                for piece in part.pieces():
                    self._pool.submit(_ask, piece)
            self._num_asked += 1


class FilesAhead:
    """Has the kernel read files from that moment on when something of them is met, in the order in which they are, until all that it has
    read is most_nbytes. A context manager."""

    def __init__(self, most_nbytes: int):
        self._left_nbytes = max(most_nbytes, LEAST_AHEAD_NBYTES)
        self._files, self._met, self._num_missed = None, set(), 0
        self._pool = ThreadPoolExecutor(1, "infinity-ahead")

    def __enter__(self) -> FilesAhead:
        return self

    def __exit__(self, *exception) -> None:
        self._pool.shutdown(cancel_futures=True)

    def meet(self, address: int) -> None:
        """A file may be mapped there. Nothing is asked for any more once the block has ended."""
        part = self._files.find(address, 1) if self._files is not None else None
        if part is None:  # it may have been mapped since; of memory that is no file's, such as NumPy's, this is asked less and less often
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
        with contextlib.suppress(OSError, RuntimeError):  # the second where the block has ended, or no thread can begin
            nbytes = min(os.path.getsize(part.path), self._left_nbytes)
            self._left_nbytes -= nbytes
            for offset in range(0, nbytes, PIECE_NBYTES):
                self._pool.submit(_will_need, part.path, offset, min(PIECE_NBYTES, nbytes - offset))


def _will_need(path: str, offset: int, nbytes: int) -> None:
    with contextlib.suppress(OSError):  # it is read all the same, later
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
