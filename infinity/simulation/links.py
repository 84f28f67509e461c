"""The links of a simulated machine: work on a link takes its time, and links that share memory, drives or processors slow each other down.

Knows seconds and names of links. Must not know what a link carries.
"""

# [Note: links]
# Work has the seconds that it takes on a link alone. A link does one piece of work after the other, by priority. Links in `side_by_side` do all
# pieces at once, each at an equal part of the speed. Whenever work begins or ends, the speeds of all busy links change. No thread waits for
# this: a timer of the virtual clock goes off at the next end.

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

from infinity.simulation.threads import SimulatedThreads

_ENDED_S = 1e-12  # the least work


class Work:
    """A piece of work. seconds: left, on the link alone. priority: lower goes first."""

    __slots__ = ("link", "number", "priority", "seconds", "then")

    def __init__(self, link: str, seconds: float, then: Callable[[], object], priority: int, number: int):
        self.link, self.seconds, self.then, self.priority, self.number = link, seconds, then, priority, number

    def __lt__(self, other: Work) -> bool:
        return (self.priority, self.number) < (other.priority, other.number)


class Links:
    """speeds(links): the speed of each of these links, at most 1, while all of them are busy."""

    def __init__(
        self,
        threads: SimulatedThreads,
        speeds: Callable[[frozenset[str]], Mapping[str, float]] = lambda links: dict.fromkeys(links, 1.0),
        side_by_side: Collection[str] = (),
    ):
        self._threads, self._speeds, self._side_by_side = threads, speeds, side_by_side
        self._speed_of = functools.lru_cache(maxsize=4096)(self._shared)
        self._waiting: dict[str, list[Work]] = defaultdict(list)  # heaps
        self._running: list[Work] = []
        self._speed: dict[str, float] = {}  # of a piece of work, by link, until work begins or ends
        self._numbers, self._timer, self._since = itertools.count(), 0, 0.0

    def begin(self, link: str, seconds: float, then: Callable[[], object], priority: int = 0) -> Work:
        """Work on a link after all waiting work of the same or of a lower number as priority. then(): called at the end; must not wait."""
        work = Work(link, max(seconds, _ENDED_S), then, priority, next(self._numbers))
        if link not in self._side_by_side and self._is_busy(link):
            heapq.heappush(self._waiting[link], work)
        else:
            self._pass()
            self._running.append(work)
            self._set_timer()
        return work

    def spend(self, link: str, seconds: float) -> None:
        """This thread works on a link, and waits for the end."""
        gate = self._threads.lock()
        gate.acquire()
        self.begin(link, seconds, gate.release)
        gate.acquire()

    def promote(self, work: Work, priority: int) -> None:
        """Lower the number that is the priority of work, which may have begun."""
        work.priority = min(priority, work.priority)
        heapq.heapify(self._waiting[work.link])

    def _is_busy(self, link: str) -> bool:
        return any(work.link == link for work in self._running)

    def _pass(self) -> None:
        """Take the time since the last call off the work that is running."""
        passed, self._since = self._threads.now() - self._since, self._threads.now()
        if passed:
            for work in self._running:
                work.seconds -= passed * self._speed[work.link]

    def _set_timer(self) -> None:
        self._timer += 1
        if self._running:
            counts: dict[str, int] = {}
            for work in self._running:
                counts[work.link] = counts.get(work.link, 0) + 1
            speed = self._speed = self._speed_of(tuple(counts.items()))
            seconds = min([work.seconds / speed[work.link] for work in self._running])
            self._threads.call_after(max(seconds, 0.0), functools.partial(self._go_off, self._timer))

    def _shared(self, counts: tuple[tuple[str, int], ...]) -> dict[str, float]:
        """The speed of each of so many pieces of work, by link."""
        speeds = self._speeds(frozenset(link for link, _ in counts))
        return {link: speeds[link] / count for link, count in counts}

    def _go_off(self, number: int) -> None:
        if number != self._timer:
            return  # a later timer has taken its place
        self._pass()
        ended_s = max(_ENDED_S, 4 * math.ulp(self._threads.now()))  # the clock cannot tell shorter times apart
        over = [work for work in self._running if work.seconds <= ended_s]
        self._running = [work for work in self._running if work.seconds > ended_s]
        for link in dict.fromkeys(work.link for work in over):
            if self._waiting[link] and not self._is_busy(link):
                self._running.append(heapq.heappop(self._waiting[link]))
        self._set_timer()
        for work in over:
            work.then()
