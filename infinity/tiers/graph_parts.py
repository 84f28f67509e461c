"""Parts of a graph whose backward order is not the reverse order of saving, such as segments that all micro-batches pass together.

Knows parts by keys that the caller gives, and saved storages. Must not know modules or autograd's graph.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable

from infinity.tiers.saved_storage import SavedStorage


class GraphParts:
    """Which saved storage belongs to which part."""

    def __init__(self):
        self.current: Hashable = None  # the part that is being saved, if any
        self._parts_after: Callable[[Hashable], Iterable[Hashable]] = lambda part: ()
        self._numbers: dict[Hashable, list[int]] = {}

    @contextlib.contextmanager
    def saving(self, part: Hashable, parts_after: Callable[[Hashable], Iterable[Hashable]]):
        """Storages saved inside the context belong to this part. parts_after(part): the parts that go backward after it, in order."""
        self.current, self._parts_after = part, parts_after
        try:
            yield
        finally:
            self.current = None

    def add(self, stored: SavedStorage) -> None:
        if stored.part is not None:
            self._numbers.setdefault(stored.part, []).append(stored.number)

    def remove(self, stored: SavedStorage) -> None:
        if stored.part is not None:
            self._numbers[stored.part].remove(stored.number)
            if not self._numbers[stored.part]:
                del self._numbers[stored.part]

    def needed_after(self, stored: SavedStorage) -> Iterable[int]:
        """Numbers of the storages that backward needs after this one, the next one first."""
        if stored.part is None:
            return range(stored.number - 1, -1, -1)
        own = (earlier for earlier in reversed(self._numbers[stored.part]) if earlier < stored.number)
        others = (reversed(self._numbers.get(part, ())) for part in self._parts_after(stored.part))
        return itertools.chain(own, itertools.chain.from_iterable(others))
