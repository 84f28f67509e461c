"""The fastest settings of a drive: a grid of them, and a search that needs a tenth of the time that measuring them takes.

Knows settings and a function that measures one of them, never twice with the same result. Must not know files or queues.

# [Note: how the search goes]
# Settings that are neighbours in the grid are about equally fast, and each measurement is noisy: so it says something about all
# points, and least of all which one is best. The logarithms of the rates are taken for a Gaussian process over the grid, a smooth function
# plus noise. How much either varies is not known: what makes the measurements likeliest is assumed. First come points spread over
# the grid, then always the one that may be fastest, by its mean and a few deviations; it may be one that was measured before. In the
# end the highest mean counts, for what was fastest once was also lucky.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from infinity.system.drives import Drive

_MIB = 1 << 20

AXES = {
    "inflight_nbytes": [n * _MIB for n in (2, 3, 4, 6, 8, 12, 16, 24, 32)],
    "block_nbytes": [n << 10 for n in (256, 512, 1024, 2048, 4096)],
    "num_queues": [1, 2, 3, 4],
}
GRID_ROUNDS = 3  # measurements of each point of a full grid
SHARE = 1 / 12  # of them, that the search has: a tenth of the time, for those that spread over the grid take longer
SAME = 1e-6  # differences of logarithms below this are rounding
_NUM_SPREAD = 12  # points that are measured before any is favoured
_HOPE = 1.5  # deviations above its mean that a point may be worth
_REACH = 3.0, 2.5, 2.5  # steps of the grid along each axis, over which rates are alike
# By how much rates may vary over the grid, relative, and those of one point: all pairs of them, each [pairs, 1, 1].
_SCALES, _NOISES = np.array([*itertools.product((0.06, 0.2, 0.6, 2.0), (0.001, 0.01, 0.03, 0.06, 0.1, 0.2))]).T[:, :, None, None]
_LEVEL = 1.0  # how far off all rates may be from the first one measured


def grid(start: Drive) -> list[Drive]:
    """Every possible combination."""
    points = [replace(start, **dict(zip(AXES, values))) for values in itertools.product(*AXES.values())]
    return [point for point in points if is_possible(point)]


def search(start: Drive, rate: Callable[[Drive], float]) -> Drive:
    """Settings about as fast as the best of the grid; those to start with unless others are faster. See [Note: how the search goes].

    rate: measures settings once, positive. It is called for SHARE as often as the whole grid needs.
    """
    points = [start, *(point for point in grid(start) if point != start)]
    places = np.array([_place(point) for point in points]) / _REACH
    distances = np.square(places[:, None] - places[None]).sum(-1)
    likeness = np.exp(-distances / 2)
    measured, logs = [], []
    for number in range(max(1, int(SHARE * GRID_ROUNDS * len(grid(start))))):
        if not number:
            point = 0
        elif number < _NUM_SPREAD:
            point = int(distances[:, measured].min(1).argmax())
        else:
            mean, deviation = _estimate(likeness, measured, logs)
            point = int((mean + _HOPE * deviation).argmax())
        logs.append(math.log(rate(points[point])))
        measured.append(point)
    mean, _ = _estimate(likeness, measured, logs)
    best = int(mean.argmax())
    return points[best] if mean[best] - mean[0] > SAME else start


def is_possible(point: Drive) -> bool:
    """Whether each queue has two blocks in the kernel or more, so that settings mean what they say."""
    return 2 * point.block_nbytes * point.num_queues <= point.inflight_nbytes


def _place(point: Drive) -> tuple[float, float, float]:
    """In about the steps of each axis."""
    return 2 * math.log2(point.inflight_nbytes), math.log2(point.block_nbytes), point.num_queues


def _estimate(likeness: np.ndarray, measured: list[int], logs: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of every point's log rate, relative to the first one's, by likeness [points, points]."""
    values = np.array(logs) - logs[0]
    near = likeness[np.ix_(measured, measured)]
    covariances = _SCALES**2 * near + _LEVEL**2 + _NOISES**2 * np.eye(len(measured))
    factors = np.linalg.cholesky(covariances)
    residues = np.linalg.solve(factors, np.broadcast_to(values[:, None], (len(factors), len(values), 1)))
    likelihoods = -np.square(residues).sum((1, 2)) / 2 - np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(1)
    likeliest = likelihoods.argmax()
    scale = _SCALES[likeliest, 0, 0]
    spread = np.linalg.solve(factors[likeliest], (scale**2 * likeness[:, measured] + _LEVEL**2).T)
    variances = scale**2 + _LEVEL**2 - np.square(spread).sum(0)
    return spread.T @ residues[likeliest, :, 0], np.sqrt(np.maximum(variances, 0))
