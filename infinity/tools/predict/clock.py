"""A virtual clock: processes wait for each other, and work on links. Work on several links at once can slow these links down.

A process is a generator. The generator yields a Flag, which another process raises, or the work of a link: (link, seconds, `what`, nbytes).
Pure. Must not know the engine.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Work that a link has done. `what` is as in the engine's trace, start and end are in seconds."""

    link: str
    what: object
    start: float
    end: float
    nbytes: float


class Flag:
    """An event that happens once. Processes wait for it."""

    __slots__ = ("raised", "waiting")

    def __init__(self, raised: bool = False):
        self.raised = raised
        self.waiting: list[Generator] = []

    @property
    def done(self) -> bool:
        return self.raised


@dataclass(eq=False, slots=True)
class _Load:
    link: str
    left: float  # seconds at full speed
    what: object
    nbytes: float
    start: float
    flag: Flag


class Clock:
    """Runs processes. speeds(links): the speed of each link, at most 1, while all these links work."""

    def __init__(self, speeds: Callable[[frozenset[str]], dict[str, float]]):
        self.now = 0.0
        self.works: list[Work] = []
        self._speeds = functools.lru_cache(maxsize=None)(speeds)
        self._ready: deque[Generator] = deque()
        self._loads: list[_Load] = []

    def start(self, process: Generator) -> None:
        self._ready.append(process)

    def happen(self, flag: Flag) -> None:
        if not flag.raised:
            flag.raised = True
            self._ready.extend(flag.waiting)
            flag.waiting.clear()

    def run(self) -> None:
        """Run until no process is ready and no work is left."""
        while True:
            while self._ready:
                self._advance(self._ready.popleft())
            if not self._loads:
                return
            speeds = self._speeds(frozenset(load.link for load in self._loads))
            passed = min(load.left / speeds[load.link] for load in self._loads)
            self.now += passed
            for load in self._loads:
                load.left -= passed * speeds[load.link]
            over = [load for load in self._loads if load.left <= 1e-12]
            self._loads = [load for load in self._loads if load.left > 1e-12]
            for load in over:
                self.works.append(Work(load.link, load.what, load.start, self.now, load.nbytes))
                self.happen(load.flag)

    def _advance(self, process: Generator) -> None:
        for wish in process:
            if isinstance(wish, Flag):
                if not wish.raised:
                    wish.waiting.append(process)
                    return
            else:
                link, seconds, what, nbytes = wish
                load = _Load(link, max(seconds, 1e-12), what, nbytes, self.now, Flag())
                load.flag.waiting.append(process)
                self._loads.append(load)
                return


class PlayedLane:
    """One process that runs jobs (generators) in order. Hurried jobs that are ready go first. Idle jobs run while no other job waits, the
    newest first. Each job has a flag for its end."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self._jobs: dict[Flag, tuple[Generator, Callable[[], bool]]] = {}
        self._idle: list[Flag] = []  # of the jobs
        self._hurried: list[Flag] = []
        self._more = Flag()
        clock.start(self._loop())

    def push(self, job: Generator, ready: Callable[[], bool] = lambda: False, *, idle: bool = False) -> Flag:
        done = Flag()
        self._jobs[done] = job, ready
        if idle:
            self._idle.append(done)
        self.clock.happen(self._more)
        return done

    def hurry(self, done: Flag) -> None:
        if done in self._jobs and done not in self._hurried:
            self._hurried.append(done)

    def _loop(self):
        while True:
            while not self._jobs:
                self._more = Flag()
                yield self._more
            done = next((flag for flag in self._hurried if self._jobs[flag][1]()), None)
            done = done or next((flag for flag in self._jobs if flag not in self._idle), None) or self._idle[-1]
            job, _ = self._jobs.pop(done)
            for flags in (self._hurried, self._idle):
                if done in flags:
                    flags.remove(done)
            yield from job
            self.clock.happen(done)
