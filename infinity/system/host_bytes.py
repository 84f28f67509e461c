"""Work on the bytes of host memory: copies, fills and kernels of the CPU.

Knows sizes. Must not know the meaning of the bytes. A simulation without bytes (infinity/simulation/) leaves this work out.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class HostBytes:
    """Host memory that holds bytes."""

    map_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def work(self, nbytes: int, function: Callable[..., Result], *arguments) -> Result:
        return function(*arguments)


_current = HostBytes()


def map_flags() -> int:
    """The flags of mmap for a region of host memory."""
    return _current.map_flags


def work(nbytes: int, function: Callable[..., Result], *arguments) -> Result | None:
    """function(*arguments). nbytes: of the tensors and buffers that it reads or writes. Returns None if the work is left out."""
    return _current.work(nbytes, function, *arguments)


def use_host_bytes(other: HostBytes) -> HostBytes:
    """Let work from now on go to another host memory. No engine may be open. Returns the one that was in use before."""
    global _current
    before, _current = _current, other
    return before
