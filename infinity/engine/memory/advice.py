"""Whether accumulating by layer would make steps shorter, and how much: told once.

Knows clocks and the meters of links. Must not know modules, chunks or plans.
"""

# [Note: what a step by layer would take]
# In an ordinary step of several micro-batches each pass reads the weights that nothing keeps. A pass between the first and the last reads
# nothing else, so the fewest bytes of any pass are these; by layer, one pass of a step reads them. What the others take of the drives' time
# is saved, as far as the step has waited for the drives.

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from infinity.output import say
from infinity.sizes import format_bytes
from infinity.system.events import Events, now

WORTH = 1.2  # so many times as fast
NUM_STEPS = 3  # of which each would be
_DRIVES = ("nvme_read", "nvme_write")


class Advice:
    """Of one engine. speedup: how many times as fast steps by layer are expected to be, once that is known. who: begins its line."""

    def __init__(self, events: Events, who: str = "", tell: Callable[[str], None] = say):
        self._meters, self._who, self._tell = events.meters, who, tell
        self._began: tuple[float, list[tuple[int, float, float]]] | None = None  # a step: when, and the meters of the drives
        self._read_nbytes = 0  # when the last pass ended
        self._passes: list[int] = []  # bytes that each of the step read
        self._speedups: deque[float] = deque(maxlen=NUM_STEPS)
        self._has_told = False

    @property
    def speedup(self) -> float | None:
        return statistics.median(self._speedups) if len(self._speedups) == NUM_STEPS else None

    def begin(self) -> None:
        """The first pass of an ordinary step begins."""
        self._began = now(), self._drives()
        self._read_nbytes, self._passes = self._meters["nvme_read"].nbytes, []

    def pass_done(self) -> None:
        """A pass, forward and backward, is over."""
        before, self._read_nbytes = self._read_nbytes, self._meters["nvme_read"].nbytes
        self._passes.append(self._read_nbytes - before)

    def step_done(self) -> None:
        """The step is over."""
        began, self._began, num_passes = self._began, None, len(self._passes)
        if began is None or num_passes < 2:
            return
        seconds = now() - began[0]
        drives = zip(began[1], self._drives())
        (read, reading, waits_r), (_, _, waits_w) = ([after - before for before, after in zip(*each)] for each in drives)
        if not read:
            return
        again = min(self._passes) * (num_passes - 1)
        by_layer = seconds - min(waits_r + waits_w, reading * again / read)
        self._speedups.append(seconds / by_layer)
        if not self._has_told and self.speedup is not None and min(self._speedups) >= WORTH:
            self._has_told = True
            self._tell(
                f"{self._who}a step reads {format_bytes(read)} from NVMe, {format_bytes(again)} of them weights that it has read before, for "
                f"{num_passes} micro-batches one after the other. By layer it would read them once, and take some {by_layer:.3g} s instead of "
                f"{seconds:.3g}: infinity.accumulate(model, micro_batches, loss)"
            )

    def _drives(self) -> list[tuple[int, float, float]]:
        return [(meter.nbytes, meter.busy_seconds, meter.stall_seconds) for meter in map(self._meters.get, _DRIVES)]

