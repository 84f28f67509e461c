"""The rates of swap paths while they work: finds a path that has become slow.

Knows bytes, busy seconds and weights of paths. Must not know queues or extents.
"""

# [Note: a path that becomes slow]
# A step waits for its slowest path. The first measurement of a run gives each path a rate to compare with. Later, a path has become slow if its
# rate has fallen, and by more than twice as much as that of the path that has kept most: its drive is worn, hot, full, or used by another
# program. A change of all paths together is no fault of a drive. Two measurements in a row must agree, because a drive may pause. New extents
# then give the path fewer bytes, until it recovers. Old extents stay where they are.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity.system.swap_paths import SLOW_RATIO, Remark

MEASURED_NBYTES = 4 << 30  # per path, between two measurements


class PathRates:
    """weights: bytes a second of the paths, or equal numbers. The attribute `weights` has lower numbers for paths that are slow now."""

    def __init__(self, paths: Sequence[Path], weights: Sequence[float]):
        self.weights = list(weights)
        self._paths, self._given = paths, tuple(weights)
        self._before = [(0, 0.0)] * len(paths)
        self._first: dict[int, float] = {}  # bytes a second in the first measurement
        self._suspects: set[int] = set()
        self._named: set[int] = set()
        self._next_nbytes = MEASURED_NBYTES * len(paths)

    def is_due(self, moved_nbytes: int) -> bool:
        """Whether to measure again. moved_nbytes: of all paths so far."""
        return len(self._paths) > 1 and moved_nbytes >= self._next_nbytes

    def measure(self, counters: Sequence[tuple[int, float]]) -> list[tuple[int, Remark]]:
        """(path, remark) of each path that has become slow, once for each. counters: (bytes moved, busy seconds) of each path so far."""
        rates = {}
        for path, ((nbytes, seconds), (nbytes0, seconds0)) in enumerate(zip(counters, self._before)):
            if nbytes > nbytes0 and seconds > seconds0:
                rates[path] = (nbytes - nbytes0) / (seconds - seconds0)
        self._before = list(counters)
        self._next_nbytes = sum(nbytes for nbytes, _ in counters) + MEASURED_NBYTES * len(self._paths)
        kept = {path: rate / self._first.setdefault(path, rate) for path, rate in rates.items()}
        best = max(kept.values(), default=1.0)
        slow = {path for path, share in kept.items() if share * SLOW_RATIO < min(best, 1.0)}
        found, self._suspects = slow & self._suspects, slow
        for path in kept:
            self.weights[path] = self._given[path] * (kept[path] / best if path in found else 1.0)
        new, self._named = found - self._named, self._named | found
        return [(path, self._remark(path, rates)) for path in sorted(new)]

    def _remark(self, path: int, rates: dict[int, float]) -> Remark:
        now, before, share = rates[path] / 1e6, self._first[path] / 1e6, self.weights[path] / sum(self.weights)
        return Remark(
            f"swap directory {self._paths[path]} has become slow: {now:,.0f} MB/s while it works, and {before:,.0f} MB/s at the start",
            f"new extents have {share:.0%} of their bytes there, and the next start measures its drive again; "
            f"try `infinity doctor {self._paths[path]}`",
        )
