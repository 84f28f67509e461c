"""The fastest settings of a drive: a grid of settings, and a search that takes a tenth of the time of measuring the whole grid.

Knows settings, and a noisy function that measures the rate of one setting. Must not know files or queues.

# [Note: how the search goes]
# Neighbours in the grid are about equally fast, and each measurement is noisy. One measurement therefore informs about all points near it,
# but cannot show which point is best. The search models the logarithm of the rate as a Gaussian process over the grid: a smooth function plus
# noise. The variances of function and noise are unknown, so the search takes the pair with the highest likelihood. The first points are
# spread over the grid. After these the search measures the point with the highest mean plus _HOPE deviations, also if the point was measured
# before. The result is the point with the highest mean, because the single fastest measurement was also lucky.
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
SHARE = 1 / 12  # of these measurements, for the search: a tenth of the time, because spread points take longer
SAME = 1e-6  # smaller differences of logarithms are rounding errors
_NUM_SPREAD = 12  # spread points, measured first
_HOPE = 1.5  # deviations above the mean, in the optimistic estimate of a point
_REACH = 3.0, 2.5, 2.5  # length scales: steps of the grid along each axis over which rates are similar
# Candidates for the relative deviation of rates over the grid, and of measurements of one point: all pairs, each [pairs, 1, 1].
_SCALES, _NOISES = np.array([*itertools.product((0.06, 0.2, 0.6, 2.0), (0.001, 0.01, 0.03, 0.06, 0.1, 0.2))]).T[:, :, None, None]
_LEVEL = 1.0  # deviation of the common level of all rates from the first measurement


def grid(start: Drive) -> list[Drive]:
    """All possible combinations of settings."""
    points = [replace(start, **dict(zip(AXES, values))) for values in itertools.product(*AXES.values())]
    return [point for point in points if is_possible(point)]


def search(start: Drive, rate: Callable[[Drive], float]) -> Drive:
    """Settings about as fast as the best of the grid. `start` wins a tie. See [Note: how the search goes].

    rate: measures settings once and returns a positive rate. The search calls `rate` for SHARE of the measurements of a full grid.
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
    """Whether each queue can have two blocks or more in the kernel. Otherwise the settings would not take effect."""
    return 2 * point.block_nbytes * point.num_queues <= point.inflight_nbytes


def _place(point: Drive) -> tuple[float, float, float]:
    """The coordinates of a setting, in about the steps of each axis."""
    return 2 * math.log2(point.inflight_nbytes), math.log2(point.block_nbytes), point.num_queues


def _estimate(likeness: np.ndarray, measured: list[int], logs: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of the log rate of every point, relative to the first measurement. likeness: covariances [points, points]."""
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
