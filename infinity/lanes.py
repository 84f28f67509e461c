"""Threads that carry out one link's work, in the order in which it was given.

Knows jobs and their order. Must not know what a job moves. A lane exists so that the training thread never waits for a
transfer that its op does not need; waiting, copying and computing inside a job drop the GIL.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

THREADS = "infinity-"  # begins the names of the engine's own
_GLANCE_S = 0.5  # how often who waits looks whether the lane was abandoned

waiting: set[int] = set()  # threads that wait for a lane


@contextlib.contextmanager
def waits():
    """The thread waits for a lane inside the block."""
    waiting.add(threading.get_ident())
    try:
        yield
    finally:
        waiting.discard(threading.get_ident())


class Job:
    """A piece of work handed to a lane. `wait` returns once it is over and raises what it raised, every time."""

    __slots__ = ("_done", "_error", "_work", "lane", "result", "what")

    def __init__(self, work: Callable[[], object]):
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._work: Callable[[], object] | None = work
        self.lane: Lane | None = None
        self.what = ""
        self.result: object = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """What it raised."""
        return self._error

    def wait(self) -> object:
        if not self._done.is_set():
            with waits():
                while not self._done.wait(_GLANCE_S):
                    if self.lane is not None and self.lane.abandoned is not None:
                        raise self.lane.abandoned
        if self._error is not None:
            raise self._error
        return self.result

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # reaches whoever waits, in the thread that waits
            self._error = error
        finally:
            self._work = None  # drops what the work held, such as gradients
            self._done.set()


class Lane:
    """One daemon thread that runs jobs first in, first out."""

    def __init__(self, name: str):
        self.name = name
        self.on_job: Callable[[], None] | None = None  # runs before each job, in the lane; tests inject delays here
        self.on_error: Callable[[BaseException, str], None] | None = None  # told, in the lane, what a job raised, and its `what`
        self.abandoned: BaseException | None = None
        self._ended = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"{THREADS}{name}", daemon=True)
        self._thread.start()

    def push(self, work: Callable[[], object], what: str = "") -> Job:
        if self._ended:
            raise RuntimeError(f"nothing can be given to lane {self.name} any more: the engine is closed")
        job = Job(work)
        job.lane, job.what = self, what
        self._jobs.put(job)
        return job

    def drain(self) -> None:
        """Wait until all that was pushed so far is over, whether it succeeded or not."""
        self.push(lambda: None).wait()

    def abandon(self, error: BaseException) -> None:
        """Whatever is not done soon may never be: who waits for it gets the error, and `close` no longer waits."""
        self.abandoned = error

    @property
    def is_stuck(self) -> bool:
        """Closed, and still inside a job: it was abandoned there."""
        return self._ended and self._thread.is_alive()

    def close(self) -> None:
        """Finish what was pushed and end the thread; idempotent."""
        if not self._ended:
            self._ended = True
            self._jobs.put(None)
            self._thread.join(_GLANCE_S)
            while self._thread.is_alive() and self.abandoned is None:
                self._thread.join(_GLANCE_S)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self.on_job is not None:
                self.on_job()
            job.run()
            if job.error is not None and self.on_error is not None:
                self.on_error(job.error, f"{job.what} ({self.name})")
            del job  # else the last job's result lives until the next one arrives
