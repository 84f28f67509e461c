"""Measured figures of this machine: whether a figure repeats, and the load of other processes during the measurement.

Knows values by round, and processor times. Must not know the meaning of a figure, or how it is measured.

# [Note: a figure that repeats]
# calibrate measures in three rounds, and each round measures every figure once, because other work seldom disturbs all rounds alike. A figure
# repeats if the three values lie within a factor of 1.5, or, for a small time, within 20 us. The median of a figure that repeats is written
# to the file. Other figures are reported, and the file keeps the earlier value. Without an earlier value, readers treat the figure as not
# measured. An overhead is a difference of two measurements, and noise can make the difference negative. The rounds are therefore compared
# before negative values become zero. On two cores that other processes kept busy, products differed by a factor of 4 and copies by a factor
# of 6. Steady work of other processes can slow all rounds alike, so calibrate also reports the number of cores that they kept busy.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import psutil

NUM_ROUNDS, NUM_REPEATS = 3, 3  # rounds of all figures, and repeats of one transfer in each round
MOST_RATIO = 1.5  # of the largest value to the smallest, for a figure that repeats
LEAST_SECONDS = 20e-6  # a time repeats if the values differ by less


@dataclass(frozen=True)
class Figure:
    """A measured figure with the value of each round, see [Note: a figure that repeats]. is_time: in seconds; otherwise in units per second."""

    values: tuple[float, ...]
    is_time: bool = False

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def repeats(self) -> bool:
        least, most = min(self.values), max(self.values)
        return least > 0 and most <= MOST_RATIO * least or self.is_time and most - least <= LEAST_SECONDS

    def written(self, unit: float) -> float | None:
        """The value in this unit, at least zero, with four digits; None for a figure that does not repeat."""
        return float(f"{max(0.0, self.value) / unit:.4g}") if self.repeats else None


class OtherProcesses:
    """Counts the cores of this process that other processes keep busy from now on. /proc/stat also includes processes of other containers."""

    def __init__(self):
        self._began, self._before = time.monotonic(), self._busy_seconds()

    def num_cores(self) -> float:
        return max(0.0, self._busy_seconds() - self._before) / max(1e-3, time.monotonic() - self._began)

    def _busy_seconds(self) -> float:
        """Seconds of all processes except this one."""
        cores, times = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
        mine = time.process_time()
        return sum(each.user + each.system + getattr(each, "steal", 0.0) for number, each in enumerate(times) if number in cores) - mine
