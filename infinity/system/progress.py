"""Reports long work to the user: lines on standard error, none if the work is short.

Knows bytes and a clock. Must not know the work.
"""

from __future__ import annotations

from collections.abc import Callable

from infinity.output import say
from infinity.sizes import format_bytes
from infinity.system.events import now

PAUSE_S = 5.0  # before the first line, and between lines


class Progress:
    """One piece of work. what: the work in words, such as "reserves host memory". total_nbytes: of all its parts. One thread at a time calls it."""

    def __init__(self, what: str, total_nbytes: int, tell: Callable[[str], None] = say):
        self.what, self.total_nbytes, self._tell = what, total_nbytes, tell
        self.nbytes = 0
        self._began = self._told = now()

    def add(self, nbytes: int) -> None:
        """A part of so many bytes is done."""
        self.nbytes += nbytes
        time = now()
        if time - self._told >= PAUSE_S:
            self._told = time
            done = format_bytes(min(self.nbytes, self.total_nbytes))
            self._tell(f"{self.what}: {done} of {format_bytes(self.total_nbytes)} after {time - self._began:.0f} s")


def ignore(nbytes: int) -> None:
    """In the place of `Progress.add`: no line, because another rank reports."""
