"""The rates of swap paths while they work: finds a path that has become slow.

Knows bytes, busy seconds and weights of paths. Must not know queues or extents.
"""

# [Note: a path that becomes slow]
# A step waits for the slowest path. Each path has bytes in proportion to its weight, so all paths are busy for about the same time. A path that
# works at less than half of the pace of another one, by its weight, has become slow: its drive is worn, hot, full, or used by another program.
# Two looks in a row must find this, because a drive may pause. New extents then give the path fewer bytes. Old extents stay where they are.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity.system.swap_paths import SLOW_RATIO, Remark

LOOK_NBYTES = 4 << 30  # between two looks, per path


class PathRates:
    """weights: of the paths, in any unit. They change when a path has become slow."""

    def __init__(self, paths: Sequence[Path], weights: Sequence[float]):
        self.weights = list(weights)
        self._paths = paths
        self._before = [(0, 0.0)] * len(paths)
        self._suspects: set[int] = set()
        self._next_nbytes = LOOK_NBYTES * len(paths)

    def is_due(self, moved_nbytes: int) -> bool:
        """Whether to look again. moved_nbytes: of all paths so far."""
        return len(self._paths) > 1 and moved_nbytes >= self._next_nbytes

    def look(self, counters: Sequence[tuple[int, float]]) -> list[tuple[int, Remark]]:
        """(path, remark) of each path that has become slow. counters: (bytes moved, busy seconds) of each path so far."""
        moved = [(nbytes - nbytes0, seconds - seconds0) for (nbytes, seconds), (nbytes0, seconds0) in zip(counters, self._before)]
        self._before = list(counters)
        self._next_nbytes = sum(nbytes for nbytes, _ in counters) + LOOK_NBYTES * len(self._paths)
        if not all(nbytes and seconds > 0 for nbytes, seconds in moved):
            return []
        rates = [nbytes / seconds for nbytes, seconds in moved]
        paces = [rate / weight for rate, weight in zip(rates, self.weights)]
        slow = {path for path, pace in enumerate(paces) if pace * SLOW_RATIO < max(paces)}
        found, self._suspects = slow & self._suspects, slow
        for path in found:
            self.weights[path] *= paces[path] / max(paces)
        return [(path, self._remark(path, rates)) for path in sorted(found)]

    def _remark(self, path: int, rates: list[float]) -> Remark:
        share = self.weights[path] / sum(self.weights)
        others = max(rate for other, rate in enumerate(rates) if other != path)
        text = f"swap directory {self._paths[path]} has become slow: {rates[path] / 1e6:,.0f} MB/s, and another one has {others / 1e6:,.0f} MB/s"
        remedy = f"new extents give it {share:.0%} of the bytes, and the next start measures its drive again; see `infinity doctor {self._paths[path]}`"
        return Remark(text, remedy)
