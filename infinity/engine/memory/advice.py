"""An estimate of the step time with layer-wise accumulation, and a message that reports the estimate once.

Knows clocks and the meters of links. Must not know modules, chunks or plans.
"""

# [Note: the time of a layer-wise step]
# In an ordinary step of several micro-batches, each pass reads the weights that no faster tier keeps. A pass between the first and the last one
# reads nothing else. So the fewest bytes of any pass are the bytes of these weights. Layer-wise, only one pass of a step reads them. The step
# saves the drive time of the other passes, but at most the time that the training thread has waited for drives.

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from infinity.output import say
from infinity.sizes import format_bytes
from infinity.system.events import Events, now

WORTH = 1.2  # least speedup that is reported
NUM_STEPS = 3  # consecutive steps with this speedup
_DRIVES = ("nvme_read", "nvme_write")


class LayerwiseAdvice:
    """One engine's estimate. who: prefix of the message, such as "rank 1 of 2, "."""

    def __init__(self, events: Events, who: str = "", tell: Callable[[str], None] = say):
        self._meters, self._who, self._tell = events.meters, who, tell
        self._began: tuple[float, list[tuple[int, float, float]]] | None = None  # start of the step, meters of the drives
        self._read_nbytes = 0  # at the end of the last pass
        self._passes: list[int] = []  # bytes read by each pass of the step
        self._speedups: deque[float] = deque(maxlen=NUM_STEPS)
        self._has_told = False

    @property
    def speedup(self) -> float | None:
        """Expected speed of layer-wise steps relative to ordinary ones. None until NUM_STEPS steps are measured."""
        return statistics.median(self._speedups) if len(self._speedups) == NUM_STEPS else None

    def begin(self) -> None:
        """Note the beginning of an ordinary step, at its first pass."""
        self._began = now(), self._drives()
        self._read_nbytes, self._passes = self._meters["nvme_read"].nbytes, []

    def pass_done(self) -> None:
        """Note the end of a forward and backward pass."""
        before, self._read_nbytes = self._read_nbytes, self._meters["nvme_read"].nbytes
        self._passes.append(self._read_nbytes - before)

    def step_done(self) -> None:
        """End the step: renew the estimate, and report a large speedup once."""
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
                f"{self._who}a step reads {format_bytes(read)} from NVMe for {num_passes} micro-batches one after the other. "
                f"{format_bytes(again)} of them are weights that the step has read before. infinity.accumulate(model, micro_batches, loss) "
                f"would read each weight once, and take about {by_layer:.3g} s instead of {seconds:.3g} s"
            )

    def _drives(self) -> list[tuple[int, float, float]]:
        return [(meter.nbytes, meter.busy_seconds, meter.stall_seconds) for meter in map(self._meters.get, _DRIVES)]

