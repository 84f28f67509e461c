"""Measured figures of this machine: whether a figure repeats, and the load of other processes during the measurement.

Knows values by round, and processor times. Must not know the meaning of a figure, or how it is measured.

# [Note: a figure that repeats]
# calibrate measures in three rounds, and each round measures every figure once, because other work seldom disturbs all rounds alike. A figure
# repeats if its values differ by at most 5 % of the median, or, for a small time, by 20 us. From five values on, the lowest and the highest do
# not count. A figure that does not repeat is measured in up to four more rounds. If it does not repeat after these either, the figure is
# unsure: the file has the median and names the figure, unless the file already has a sure value. An overhead is a difference of two
# measurements, and noise can make it negative. The rounds are therefore compared before negative values become zero. Steady work of other
# processes can slow all rounds alike, so calibrate also counts the cores that they kept busy. If these are many, every figure is unsure.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil

NUM_ROUNDS, MOST_ROUNDS = 3, 7  # of all figures, and of a figure that does not repeat
NUM_REPEATS = 3  # of one transfer in a round
MOST_SPREAD = 0.05  # of the median, for a figure that repeats
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
        out = (len(self.values) - 1) // 4
        middle = sorted(self.values)[out : len(self.values) - out]
        spread = middle[-1] - middle[0]
        return 0 < self.value and spread <= MOST_SPREAD * self.value or self.is_time and spread <= LEAST_SECONDS

    def written(self, unit: float) -> float:
        """The value in this unit, at least zero, with four digits."""
        return float(f"{max(0.0, self.value) / unit:.4g}")


def in_rounds(names: Iterable[str], measure: Callable[[str, int], Sequence[float]]) -> dict[str, list[Figure]]:
    """The figures of each name. measure(name, round) measures them once; names that end with "_s" are times."""
    values: dict[str, list[Sequence[float]]] = {name: [] for name in names}
    found: dict[str, list[Figure]] = {}
    for number in range(MOST_ROUNDS):
        for name, rounds in values.items():
            if number < NUM_ROUNDS or not all(figure.repeats for figure in found[name]):
                rounds.append(measure(name, number))
                found[name] = [Figure(each, is_time=name.endswith("_s")) for each in zip(*rounds)]
    return found


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
