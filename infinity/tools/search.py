"""The fastest settings of a drive: a grid of them, and a search that needs a tenth of the grid's measurements.

Knows settings and a function that measures one of them, never twice with the same result. Must not know files or queues.

# [Note: how the search goes]
# One factor at a time from the settings that serve most drives: first every other value of it, then the neighbours of what is best so
# far, until none is better. A measurement is noisy, so what was fastest once was also lucky: the leaders are measured anew, in
# alternation, so that a slow moment of the drive meets all (medians count, for there are short ones, too), and those that are clearly
# slower drop out, until one is left, or the rest are told apart by less than matters, or the measurements are used up.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import replace

from infinity.drives import Drive

_MIB = 1 << 20

AXES = {
    "inflight_nbytes": [n * _MIB for n in (2, 3, 4, 6, 8, 12, 16, 24, 32)],
    "block_nbytes": [n << 10 for n in (256, 512, 1024, 2048, 4096)],
    "num_queues": [1, 2, 3, 4],
}
GRID_ROUNDS = 3  # measurements of each point of a full grid, of which the search has a tenth
NUM_LEADERS = 6
SAME = 0.005  # differences below this are none
_LOYALTY = 0.25  # of the doubt that is left counts for the settings to start with: on an unsteady drive they are a fair guess


def grid(start: Drive) -> list[Drive]:
    """Every possible combination."""
    points = [replace(start, **dict(zip(AXES, values))) for values in itertools.product(*AXES.values())]
    return [point for point in points if is_possible(point)]


def search(start: Drive, rate: Callable[[Drive], float]) -> Drive:
    """Settings about as fast as the best of the grid; those to start with unless others are faster. See [Note: how the search goes].

    rate: measures settings once. It is called for at most a tenth as often as the whole grid needs.
    """
    left = GRID_ROUNDS * len(grid(start)) // 10
    seen: dict[Drive, float] = {}

    def best_of(points: list[Drive]) -> Drive:
        nonlocal left
        for point in points:
            if point not in seen and left > NUM_LEADERS * 2:
                seen[point] = rate(point)
                left -= 1
        return max((point for point in points if point in seen), key=seen.__getitem__)

    here = best_of([start])
    for name, values in AXES.items():
        here = best_of([here, *_varied(here, name, values[::2])])
    before = None
    while here != before:
        before = here
        for name, values in AXES.items():
            place = values.index(getattr(here, name)) if getattr(here, name) in values else 0
            here = best_of([here, *_varied(here, name, values[max(0, place - 1) : place + 2])])
    others = sorted((point for point in seen if point != start), key=seen.__getitem__, reverse=True)
    return _decide([start, *others[: NUM_LEADERS - 1]], rate, left)


def is_possible(point: Drive) -> bool:
    """Whether each queue has two blocks in the kernel or more, so that settings mean what they say."""
    return 2 * point.block_nbytes * point.num_queues <= point.inflight_nbytes


def _decide(leaders: list[Drive], rate: Callable[[Drive], float], num_measurements: int) -> Drive:
    """The fastest by measurements in alternation; the first if it is about as fast."""
    first, doubt = leaders[0], 0.0
    rates: dict[Drive, list[float]] = {point: [] for point in leaders}
    while num_measurements >= len(leaders) > 1:
        for point in leaders:
            rates[point].append(rate(point))
        num_measurements -= len(leaders)
        num_rounds = len(rates[leaders[0]])
        if num_rounds < 2:
            continue
        medians = {point: statistics.median(rates[point]) for point in leaders}
        # How much the difference of two of these varies: rounds are fast and slow as a whole, which says nothing about a point.
        pace = [statistics.fmean(rates[point][i] for point in leaders) for i in range(num_rounds)]
        spread = [rates[point][i] / pace[i] - medians[point] / statistics.fmean(pace) for point in leaders for i in range(num_rounds)]
        degrees = (len(leaders) - 1) * (num_rounds - 1)
        doubt = 2 * math.sqrt(sum(value * value for value in spread) / degrees * 2 / num_rounds)
        leaders = [point for point in leaders if medians[point] >= max(medians.values()) * (1 - doubt)]
        if doubt < SAME:
            break
    medians = {point: statistics.median(rates[point]) for point in leaders}
    best = max(leaders, key=medians.__getitem__)
    return first if medians.get(first, 0.0) >= medians[best] * (1 - max(SAME, doubt * _LOYALTY)) else best


def _varied(point: Drive, name: str, values: list[int]) -> list[Drive]:
    varied = [replace(point, **{name: value}) for value in values if value != getattr(point, name)]
    return [point for point in varied if is_possible(point)]
