"""Stages of one common time: jobs that sleep after their work. For `bench overlap --balance`.

Knows reads of a swap and events of links. Must not know layers, or how times are measured.
"""

# [Note: balanced stages]
# If link times are very different, hiding the small ones proves little. On the CPU, --balance extends every job to one common time, longer
# than any job needs. The job first moves its bytes, then sleeps, and never sleeps before the input has arrived. The result shows order,
# threads and waits, not bandwidth. Two hooks of the engine do not work here. Lane.on_job runs before a copy waits for its read.
# RecordMover.on_read runs under a lock that the other stages need. PacedSwap extends reads, `Events.before_end` extends copies and gathers.

from __future__ import annotations

from time import sleep

from infinity.system.events import now
from infinity.system.lanes import Lane


class Pace:
    """Extends jobs to `seconds` by sleeping."""

    seconds = 0.0

    def lengthen(self, start: float) -> None:
        sleep(max(0.0, start + self.seconds - now()))

    def end_of(self, link: str, start: float, end: float) -> float:
        """For Events.before_end: extends copies and gathers."""
        if link not in ("h2d", "all_gather"):
            return end
        self.lengthen(start)
        return now()


class PacedSwap:
    """A swap or a compressor whose reads end one after the other, each extended."""

    def __init__(self, swap, pace: Pace):
        self.swap = swap
        self.pace = pace
        self.lane = Lane("nc-pace")

    def read(self, extent, buffer, **options) -> PacedRead:
        transfer = self.swap.read(extent, buffer, **options)

        def wait():
            start = now()
            transfer.wait()
            self.pace.lengthen(start)

        return PacedRead(transfer, self.lane.push(wait))

    def close(self) -> None:
        self.lane.close()


class PacedRead:
    """Has the interface of a Transfer."""

    def __init__(self, transfer, job):
        self.nbytes = transfer.nbytes
        self.promote = transfer.promote
        self.wait = job.wait
        self._job = job

    @property
    def done(self) -> bool:
        return self._job.done
