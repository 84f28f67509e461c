"""Work on the bytes of host memory: copies, fills and kernels of the CPU.

Knows sizes. Must not know the meaning of the bytes. A simulation without bytes (infinity/simulation/) leaves this work out.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 has no name for it


class HostBytes:
    """Host memory that holds bytes."""

    map_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def work(self, nbytes: int, function: Callable[..., Result], *arguments) -> Result:
        return function(*arguments)


class NoHostBytes(HostBytes):
    """Addresses without pages. Work on more than kept_nbytes is left out."""

    map_flags = HostBytes.map_flags | _MAP_NORESERVE

    def __init__(self, kept_nbytes: int):
        self.kept_nbytes = kept_nbytes

    def work(self, nbytes, function, *arguments):
        return function(*arguments) if nbytes <= self.kept_nbytes else None


_current = HostBytes()


def map_flags() -> int:
    """The flags of mmap for a region of host memory."""
    return _current.map_flags


def work(nbytes: int, function: Callable[..., Result], *arguments) -> Result | None:
    """function(*arguments). nbytes: of the tensors and buffers that it reads or writes. Returns None if the work is left out."""
    return _current.work(nbytes, function, *arguments)


@contextlib.contextmanager
def using(other: HostBytes) -> Iterator[None]:
    """Inside the block, host memory is another one. No engine may be open."""
    global _current
    before, _current = _current, other
    try:
        yield
    finally:
        _current = before
