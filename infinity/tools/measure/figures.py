"""Whether a figure of this machine repeats, and how much other processes work meanwhile.

Knows values by round, and processor times. Must not know what a figure is of, nor how it is measured.

# [Note: a figure that repeats]
# Every figure is measured in three rounds, each of which measures all figures once: work beside calibrate seldom hits all rounds alike. The
# median counts if the three lie within a factor of 1.5, or, of a small time, within 20 us. Other figures are named and not written. The file
# keeps the figure that it had; without one, readers take it as not measured. An overhead is a difference of two measurements, so noise takes it
# below zero: the rounds are compared before that is cut off. On two cores that other processes kept busy, products differed by a factor of
# 4 and copies by a factor of 6. Work that goes on through all rounds can make every round slow alike, so calibrate also says how many cores other
# processes kept busy.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import psutil

MOST_RATIO = 1.5  # of the largest value to the least, of a figure that repeats
LEAST_SECONDS = 20e-6  # values of a time that differ by less repeat


@dataclass(frozen=True)
class Figure:
    """A measured figure: its value in each round; see [Note: a figure that repeats]. is_time: seconds; otherwise units a second."""

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
        """In this unit, not below zero, to four digits, for people to read; None for a figure that does not repeat."""
        return float(f"{max(0.0, self.value) / unit:.4g}") if self.repeats else None


class OtherProcesses:
    """How many of this process's cores others keep busy, from now on. Knows /proc/stat, which counts a container's neighbours, too."""

    def __init__(self):
        self._began, self._before = time.monotonic(), self._busy_seconds()

    def num_cores(self) -> float:
        return max(0.0, self._busy_seconds() - self._before) / max(1e-3, time.monotonic() - self._began)

    def _busy_seconds(self) -> float:
        """Of all processes but this one."""
        cores, times = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
        mine = time.process_time()
        return sum(each.user + each.system + getattr(each, "steal", 0.0) for number, each in enumerate(times) if number in cores) - mine
