"""Places on NVMe for gradients that seldom leave host memory. Chunks take extents when their gradients leave, and share them.

Knows extents of one size, and chunks by their index. Must not know when a gradient leaves. One lock of the owner guards all calls.
ExtentPool in activation_store.py has extents of many sizes, and rounds them up.
"""

from __future__ import annotations

from collections.abc import Callable

from infinity.system.storage import Extent


class ExtentsOnDemand:
    """make(): an extent for the largest gradient. It raises SwapError if the drive has no room."""

    def __init__(self, make: Callable[[], Extent]):
        self._make = make
        self._free: list[Extent] = []
        self._taken: dict[int, Extent] = {}

    def of(self, chunk: int) -> Extent:
        """The extent of a chunk: the same one until `give_back`. Raises SwapError."""
        if chunk not in self._taken:
            self._taken[chunk] = self._free.pop() if self._free else self._make()
        return self._taken[chunk]

    def give_back(self, chunk: int) -> None:
        """No transfer of the chunk's extent is under way, and its bytes are not needed."""
        if (extent := self._taken.pop(chunk, None)) is not None:
            self._free.append(extent)
