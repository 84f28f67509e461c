"""Work on the bytes of host memory: copies, fills and kernels of the CPU.

Knows sizes. Must not know the meaning of the bytes. A simulation without bytes (infinity/simulation/) leaves this work out.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

CODEC, COPY = "codec", "copy"


class HostBytes:
    """Host memory that holds bytes."""

    map_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    least_section_nbytes = 0  # of the codec: a simulation takes few large sections

    def work(self, nbytes: int, function: Callable[..., Result], *arguments, kind: str = "", otherwise: object = None) -> Result:
        return function(*arguments)


_current = HostBytes()


def map_flags() -> int:
    """The flags of mmap for a region of host memory."""
    return _current.map_flags


def least_section_nbytes() -> int:
    """The least size of a section that the codec takes at once; 0 for the size that is best for caches."""
    return _current.least_section_nbytes


def work(nbytes: int, function: Callable[..., Result], *arguments, kind: str = "", otherwise: object = None) -> Result:
    """function(*arguments). nbytes: read from tensors and buffers, and written. kind: CODEC for work that one thread does at the speed of
    the codec, COPY for a copy by one thread, whose bytes are counted once. otherwise: returned if the work is left out."""
    return _current.work(nbytes, function, *arguments, kind=kind, otherwise=otherwise)


def use_host_bytes(other: HostBytes) -> HostBytes:
    """Let work from now on go to another host memory. No engine may be open. Returns the earlier one."""
    global _current
    before, _current = _current, other
    return before
