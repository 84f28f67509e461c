"""How many backward passes make the step under way: as many as were declared, or as the program tells pass by pass.

Knows numbers of passes. Must not know what a pass brings, or what is done with it.
"""

# [Note: windows that are told]
# A pass inside `infinity.no_sync` is not the last of its step, and the first one outside is: so updates that may begin in the last pass
# begin in it, and sums of squares with it. A step that has had a pass inside is told, and takes any number of them; of another one the
# optimizer's accumulation_steps counts. step() may come before the last one of either, as at the end of an epoch.

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Window:
    def __init__(self):
        self._more_come = False
        self._told: int | None = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block are not the last of their step."""
        before, self._more_come = self._more_come, True
        try:
            yield
        finally:
            self._more_come = before

    def begin_pass(self, num_backwards: int) -> None:
        """A backward pass begins, after so many of its step."""
        if self._more_come:
            self._told = num_backwards + 2  # at least
        elif self._told is not None:
            self._told = num_backwards + 1

    def end_step(self) -> None:
        self._told = None

    def num_passes(self, declared: int) -> int:
        """Of the step under way, as far as is known. declared: by the optimizer."""
        return declared if self._told is None else self._told
