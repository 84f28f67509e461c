"""The interface of a storage tier, such as files on NVMe, and the function by which a program replaces the engine's own tier.

Knows extents and transfers. Must not know chunks, tensors or tiers. `Swap` in swap.py is the engine's own storage, over direct I/O.

# [Note: what storage promises]
# - The engine calls `allocate` for every extent, then `reserve` once, then `read`, `write` and `extend` from several threads. `extend` is for
#   saved activations, and for floats that save fewer bytes than planned.
# - `read` and `write` return at once. The buffer belongs to the transfer until `wait` has returned or raised.
# - A read that overlaps an earlier write returns the bytes of that write.
# - A transfer that fails raises SwapError, an OSError with errno, text and path, in each call of `wait`. The text begins with `what`:
#   the rank, the chunk and the kind, with ": " at the end, or nothing.
# - The storage answers for the bytes: if a read finds other bytes than were written, the read fails with EIO.
# - After `close` nothing of the run is left in the directories.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import aio_ext
from infinity.system import swap_directory
from infinity.system.swap import Swap


class Extent(Protocol):
    """A range of storage."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, a multiple of 4096."""


class Transfer(Protocol):
    """A read or a write under way. nbytes: its size in bytes."""

    nbytes: int

    @property
    def done(self) -> bool:
        """Whether it is over, with or without an error."""

    def wait(self) -> object:
        """Return once it is over. Raises SwapError, in each call, if it failed."""

    def promote(self, priority: int = aio_ext.DEMAND) -> None:
        """A thread waits for the transfer: run it before transfers of lower priority. A storage may ignore this."""

    def in_words(self) -> str:
        """A phrase for reports about threads that wait, such as "a read of 16.0 MiB from NVMe"."""


class StorageTier(Protocol):
    """The storage of one rank, see [Note: what storage promises].

    read_nbytes, write_nbytes: bytes of all reads and writes so far. nbytes_per_s: measured rate of both together, 0 without a measurement.
    """

    read_nbytes: int
    write_nbytes: int
    nbytes_per_s: float

    def allocate(self, nbytes: int) -> Extent:
        """Plan a range of at least nbytes; nothing is written yet."""

    def reserve(self) -> None:
        """Make room for all extents. Raises SwapError before anything is written if there is none."""

    def extend(self, nbytes: int) -> Extent:
        """Make one more range, after `reserve`. Raises SwapError if there is no room."""

    def read(self, extent: Extent, buffer: memoryview, *, offset: int = 0, priority: int = aio_ext.PREFETCH, what: str = "") -> Transfer:
        """Fill a buffer from an extent. The offset and the buffer's size in bytes are multiples of 4096."""

    def write(self, extent: Extent, buffer: memoryview, *, offset: int = 0, priority: int = aio_ext.WRITE, what: str = "") -> Transfer:
        """Write a buffer to an extent."""

    def path_of(self, extent: Extent) -> Path:
        """The file to name in errors about an extent."""

    def close(self) -> None:
        """Finish all transfers and remove everything. Idempotent."""


_make: Callable[..., StorageTier] = Swap


def use_storage(make: Callable[..., StorageTier]) -> Callable[..., StorageTier]:
    """Let engines of this process that start later keep their storage tier in make(...). Returns the function that was in use before.

    make(paths, *, rank, world, run, expected_nbytes, checksums) -> StorageTier, with the arguments of `Swap`: paths are the directories of the
    configuration.
    """
    global _make
    before, _make = _make, make
    return before


def room_nbytes(paths) -> int:
    """The most bytes that the storage can have in these directories: make.room_nbytes(paths), if the function that makes it has this, otherwise
    the room of their filesystems."""
    return getattr(_make, "room_nbytes", swap_directory.room_nbytes)(paths)


def make_storage(paths, **options) -> StorageTier:
    """The storage of one rank in these directories."""
    return _make(paths, **options)
