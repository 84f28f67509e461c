"""Threads that carry out one link's work, in the order in which it was given, but for what somebody waits for.

Knows jobs and their order, the CUDA device that a lane's thread runs on, and what guards what threads share (Monitor). Must not know what a
job moves. A lane exists so that the
training thread never waits for a transfer that its op does not need; waiting, copying and computing inside a job drop the GIL.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from infinity.system.failure import FirstFailure
from infinity.system.slow_steps import look
from infinity.system.waits import THREADS, waits

_GLANCE_S = 0.5  # how often who waits looks whether the lane was abandoned, and whether a step takes long
_GRACE_S = 5.0  # how long the end of a lane that was is waited for: what it waits for itself, it gives up soon


class Monitor(type(threading.RLock())):
    """A threading.Condition that an interrupt cannot leave locked: entering and leaving it is C code, into which none comes."""

    def __init__(self):
        self._condition = threading.Condition(self)
        self.wait = self._condition.wait
        self.wait_for = self._condition.wait_for
        self.notify = self._condition.notify
        self.notify_all = self._condition.notify_all


class Need(weakref.ref):
    """What an object needs while it lives: `Need(object, line.append)` lies in that line once the object is gone.

    C code puts it there: an interrupt that comes inside of a `__del__` is lost, and what that was to do. Somebody must keep it until then.
    """

    __slots__ = ()


def _on_this_device(run: Callable[[], None]) -> Callable[[], None]:
    """For a thread: run with the CUDA device that is current here. A new thread has the node's first one, and goes back to it from another
    one's stream, which makes a context there, of some hundred MiB: of each rank."""
    if not torch.cuda.is_initialized():
        return run
    here = torch.cuda.current_device()

    def run_here() -> None:
        torch.cuda.set_device(here)
        run()

    return run_here


class Job:
    """A piece of work handed to a lane. `wait` returns once it is over and raises what it raised, every time."""

    __slots__ = ("_error", "_gate", "_work", "done", "lane", "result", "what")

    def __init__(self, work: Callable[[], object] | None):
        self.done = False
        self._gate = threading.Lock()  # held until it is over: thousands of jobs a second would pay for Events
        self._gate.acquire()
        self._error: BaseException | None = None
        self._work = work
        self.lane: Lane | None = None
        self.what = ""
        self.result: object = None

    @classmethod
    def over(cls, result: object = None) -> Job:
        """One that is over already."""
        job = cls(None)
        job.result = result
        job.finish()
        return job

    @property
    def error(self) -> BaseException | None:
        """What it raised."""
        return self._error

    @property
    def worker(self) -> int | None:
        """The number of the thread that it is done by."""
        return self.lane.ident if self.lane is not None else None

    def in_words(self) -> str:
        """What somebody waits for who waits for it."""
        return self.lane.in_words(self) if self.lane is not None else self.what

    def wait(self) -> object:
        if not self.done:
            if self.lane is not None:
                self.lane.wake()
            with waits(self.in_words, self.worker):
                while not self.done:
                    if self._gate.acquire(timeout=_GLANCE_S):
                        self._gate.release()  # to whoever else waits
                    elif self.lane is not None and self.lane.abandoned is not None:
                        raise self.lane.abandoned
                    else:
                        look()
        if self._error is not None:
            raise self._error
        return self.result

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # reaches whoever waits, in the thread that waits
            self._error = error
            if self.lane.failure is not None:  # before who waits goes on: it may ask for that
                self.lane.failure.note(error, f"{self.what} ({self.lane.name}): " if self.what else "")
        finally:
            self._work = None  # drops what the work held, such as gradients
            self.finish()

    def finish(self) -> None:
        """It is over: who waits goes on. Idempotent, for one thread at a time."""
        if not self.done:
            self.done = True
            self._gate.release()


class Lane:
    """One daemon thread that runs jobs first in, first out; those that were hurried pass others once they are ready.

    does: what a job is, in words, such as "an update".
    """

    def __init__(self, name: str, failure: FirstFailure | None = None, does: str = ""):
        self.name = name
        self.does = does or f"the {name} lane"
        self.failure = failure  # told, in the lane, what a job raised, and its `what`
        self.on_job: Callable[[], None] | None = None  # runs before each job, in the lane; tests inject delays here
        self.abandoned: BaseException | None = None
        self._ended = False
        self._line: dict[Job, Callable[[], bool]] = {}  # jobs in their order, and whether they are ready
        self._hurried: list[Job] = []  # of the line, in the order in which they were hurried
        self._changed = Monitor()  # over the line and whether the lane has ended
        self._thread = threading.Thread(target=_on_this_device(self._loop), name=f"{THREADS}{name}", daemon=True)
        self._thread.start()

    def push(
        self, work: Callable[[], object], what: str = "", *, ready: Callable[[], bool] = lambda: False, quiet: bool = False
    ) -> Job:
        """ready(): whether it could run without waiting for anything; called in the lane, of a job that is hurried. quiet: nothing waits
        for it yet, so the lane need not wake for it alone: it runs before the next that is not quiet, or once somebody waits for it."""
        job = Job(work)
        job.lane, job.what = self, what
        with self._changed:
            if self._ended:  # asked here: the lane may end, and never run what comes behind that
                raise RuntimeError(f"nothing can be given to lane {self.name} any more: the engine is closed")
            self._line[job] = ready
            if not quiet:
                self._changed.notify()
        return job

    @property
    def ident(self) -> int:
        """Its thread's number."""
        return self._thread.ident

    def in_words(self, job: Job) -> str:
        """What a job is, and how many come before it; from any thread."""
        line = list(self._line)
        num_before = line.index(job) + 1 if job in line else 0  # with the one that runs
        behind = f", after {num_before} other{'s' if num_before > 1 else ''}" if num_before else ""
        return f"{self.does}{f' of {job.what}' if job.what else ''}{behind}"

    def wake(self) -> None:
        """Let what was pushed quietly run now."""
        with self._changed:
            self._changed.notify()

    def hurry(self, job: Job) -> None:
        """Let a job run before those pushed earlier, as soon as it is ready; after those hurried earlier that are ready, too."""
        with self._changed:
            if job in self._line and job not in self._hurried:
                self._hurried.append(job)

    def drain(self) -> None:
        """Wait until all that was pushed so far is over, whether it succeeded or not."""
        self.push(lambda: None).wait()

    def abandon(self, error: BaseException) -> None:
        """Whatever is not done soon may never be: who waits for it gets the error, and `close` waits for some seconds only."""
        self.abandoned = error

    @property
    def is_stuck(self) -> bool:
        """Closed, and still inside a job: it was abandoned there."""
        return self._ended and self._thread.is_alive()

    def close(self) -> None:
        """Finish what was pushed and end the thread; idempotent."""
        if not self._ended:
            with self._changed:
                self._ended = True
                self._changed.notify()
            while self._thread.is_alive() and self.abandoned is None:
                self._thread.join(_GLANCE_S)
            self._thread.join(_GRACE_S)

    def _loop(self) -> None:
        while self._has_more():
            if self.on_job is not None:
                self.on_job()
            job = self._next()
            job.run()
            del job  # else the last job's result lives until the next one arrives

    def _has_more(self) -> bool:
        """Wait for a job; false once the lane has ended and there is none."""
        while not self._line and not self._ended:
            with self._changed:  # an interrupt in who pushes may come before its notice
                is_idle = not self._line and not self._ended and not self._changed.wait(_GLANCE_S)
            if is_idle:
                look()
        return bool(self._line)

    def _next(self) -> Job:
        with self._changed:
            job = next((job for job in self._hurried if self._line[job]()), None) or next(iter(self._line))
            del self._line[job]
            if job in self._hurried:
                self._hurried.remove(job)
            return job
