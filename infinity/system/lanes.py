"""Threads that carry out one link's work in the given order; work that a thread waits for may go first.

Knows jobs and their order, and the CUDA device of a lane's thread. Must not know the contents of a job, or whether threads are simulated.
Because of lanes, the training thread never waits for a transfer that the op does not need. Waits, copies and computations inside a job drop
the GIL.
"""

# [Note: jobs of two parts]
# The work of a job may be a generator that yields once. Its first part gives work to the device, and its second part waits for the device.
# If the next job is such a job, too, and ready, the lane runs the first part of the next job before this second part. So the device
# need not wait between the jobs. A job that is not ready could wait for memory which the earlier job frees in its second part.

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from types import GeneratorType

import torch

from infinity.system.failure import FirstFailure
from infinity.system.slow_steps import look
from infinity.system.threads import monitor, threads
from infinity.system.waits import THREADS, waits

_ENDED = object()  # a generator has no more parts
_GRACE_S = 5.0  # longest wait for the end of an abandoned lane, whose own waits end soon


class Need(weakref.ref):
    """Signals the end of an object: after `Need(object, line.append)`, the Need is in `line` once the object is gone.

    C code appends the Need. An interrupt inside a `__del__` would be lost, together with the work of that `__del__`. The caller must
    keep the Need until then.
    """

    __slots__ = ()


def _on_this_device(run: Callable[[], None]) -> Callable[[], None]:
    """Wrap a thread's function so that it runs with the CUDA device that is current here. A new thread has the node's first device. Another
    device's stream resets the thread to that first device, which makes a context of some hundred MiB there, for each rank.
    """
    if not torch.cuda.is_initialized():
        return run
    here = torch.cuda.current_device()

    def run_here() -> None:
        torch.cuda.set_device(here)
        run()

    return run_here


class Job:
    """A piece of work in a lane. `wait` returns once the work is over, and raises the work's error every time."""

    __slots__ = ("_error", "_gate", "_second", "_work", "done", "lane", "overlaps", "result", "what")

    def __init__(self, work: Callable[[], object] | None):
        self.done = False
        self._gate = threads().lock()  # held until the work is over: Events would be slow for thousands of jobs a second
        self._gate.acquire()
        self._error: BaseException | None = None
        self._work = work
        self._second: Generator | None = None  # the rest of the work, after its first part
        self.overlaps = False
        self.lane: Lane | None = None
        self.what = ""
        self.result: object = None

    @classmethod
    def over(cls, result: object = None) -> Job:
        """A job that is over already."""
        job = cls(None)
        job.result = result
        job.finish()
        return job

    @property
    def error(self) -> BaseException | None:
        """The work's error."""
        return self._error

    @property
    def worker(self) -> int | None:
        """The number of the thread that does the work."""
        return self.lane.ident if self.lane is not None else None

    def in_words(self) -> str:
        """The awaited work, in words."""
        return self.lane.in_words(self) if self.lane is not None else self.what

    def wait(self) -> object:
        if not self.done:
            if self.lane is not None:
                self.lane.wake()
            with waits(self.in_words, self.worker):
                while not self.done:
                    if self._gate.acquire(timeout=-1 if (glance_s := threads().glance_s) is None else glance_s):
                        self._gate.release()  # for other waiting threads
                    elif self.lane is not None and self.lane.abandoned is not None:
                        raise self.lane.abandoned
                    else:
                        look()
        if self._error is not None:
            raise self._error
        return self.result

    def begin(self) -> None:
        """Run the work, or its first part. Then the job is done, unless a second part is left."""
        try:
            threads().begin_job()
            found = self._work()
            if not isinstance(found, GeneratorType):
                self.result = found
            elif next(found, _ENDED) is not _ENDED:
                self._second = found
                return
        except BaseException as error:
            self._fail(error)
        self._end()

    def complete(self) -> None:
        """Run the second part of the work."""
        try:
            for _ in self._second:
                pass
        except BaseException as error:
            self._fail(error)
        self._end()

    def _fail(self, error: BaseException) -> None:
        self._error = error  # raised in every thread that waits
        if self.lane.failure is not None:  # before waiting threads continue: they may read the failure
            self.lane.failure.note(error, f"{self.what} ({self.lane.name}): " if self.what else "")

    def _end(self) -> None:
        self._work = self._second = None  # frees the work's data, such as gradients
        self.finish()

    def finish(self) -> None:
        """Mark the job as over and wake waiting threads. Idempotent, for one thread at a time."""
        if not self.done:
            self.done = True
            self._gate.release()


class Lane:
    """One daemon thread that runs jobs first in, first out. Hurried jobs overtake others once they are ready. Idle jobs run while no other job
    waits, the newest first.

    does: a job's kind, in words, such as "an update".
    """

    def __init__(self, name: str, failure: FirstFailure | None = None, does: str = ""):
        self.name = name
        self.does = does or f"the {name} lane"
        self.failure = failure  # told, in the lane, a job's error and `what`
        self.on_job: Callable[[], None] | None = None  # runs in the lane, before each job and each second part; tests inject delays here
        self.abandoned: BaseException | None = None
        self._ended = False
        self._line: dict[Job, Callable[[], bool]] = {}  # jobs in order, each with a ready function
        self._idle: dict[Job, Callable[[], bool]] = {}  # idle jobs in order, likewise
        self._has_had_idle_jobs = False
        self._hurried: list[Job] = []  # waiting jobs in the order of `hurry`
        self._changed = monitor()  # guards the line and the end of the lane
        self._thread = threads().start(_on_this_device(self._loop), f"{THREADS}{name}")

    def push(
        self,
        work: Callable[[], object],
        what: str = "",
        *,
        ready: Callable[[], bool] = lambda: False,
        quiet: bool = False,
        idle: bool = False,
        overlaps: bool = False,
    ) -> Job:
        """Add a job. ready(): whether the job could run without waiting; called in the lane, for hurried and overlapping jobs. quiet: no
        thread waits for the job yet, so the lane need not wake. The job then runs before the next job that is not quiet, or once a thread
        waits for the job. idle: see the class. overlaps: the job may begin before the second part of the job before it.
        """
        job = Job(work)
        job.lane, job.what, job.overlaps = self, what, overlaps
        with self._changed:
            if self._ended and threading.get_ident() != self.ident:  # checked under the lock: the lane may end, and never run a later job
                raise RuntimeError(f"lane {self.name} accepts no more jobs: the engine is closed")
            (self._idle if idle else self._line)[job] = ready
            self._has_had_idle_jobs |= idle
            if not quiet:
                self._changed.notify()
        return job

    @property
    def ident(self) -> int:
        """The number of the lane's thread."""
        return self._thread.ident

    def in_words(self, job: Job) -> str:
        """The job's kind and the number of jobs before it; from any thread."""
        line = [*self._line, *reversed(self._idle)]
        num_before = line.index(job) + 1 if job in line else 0  # including the running job
        behind = f", after {num_before} other{'s' if num_before > 1 else ''}" if num_before else ""
        return f"{self.does}{f' of {job.what}' if job.what else ''}{behind}"

    def wake(self) -> None:
        """Run quiet jobs now."""
        with self._changed:
            self._changed.notify()

    def hurry(self, job: Job) -> None:
        """Run a job before earlier ones as soon as it is ready. Jobs hurried earlier go first if they are ready."""
        with self._changed:
            if (job in self._line or job in self._idle) and job not in self._hurried:
                self._hurried.append(job)

    def drain(self) -> None:
        """Wait until all jobs so far are over, whether they succeeded or not."""
        self.push(lambda: None).wait()
        if self._has_had_idle_jobs:  # the jobs may have pushed idle jobs
            last = Job(lambda: None)
            last.lane = self
            with self._changed:
                has_ended = self._ended
                if not has_ended:
                    self._idle = {last: lambda: False} | self._idle  # as the oldest one, the job runs last
                    self._changed.notify()
            if has_ended:
                self._join()  # the lane finishes all jobs
            else:
                last.wait()

    def abandon(self, error: BaseException) -> None:
        """Unfinished jobs may never end: waiting threads get the error, and `close` waits only some seconds."""
        self.abandoned = error

    @property
    def is_stuck(self) -> bool:
        """Whether the lane is closed and still inside an abandoned job."""
        return self._ended and self._thread.is_alive()

    def close(self) -> None:
        """Finish all jobs and end the thread. Idempotent."""
        if not self._ended:
            with self._changed:
                self._ended = True
                self._changed.notify()
            self._join()

    def _join(self) -> None:
        while self._thread.is_alive() and self.abandoned is None:
            self._thread.join(threads().glance_s)
        self._thread.join(_GRACE_S)

    def _loop(self) -> None:
        while self._has_more():
            self._pause()
            job = _begun(self._next())
            while job is not None:  # see [Note: jobs of two parts]
                self._pause()
                following = _begun(self._next_overlapping())
                job.complete()
                job = following

    def _pause(self) -> None:
        if self.on_job is not None:
            self.on_job()

    def _has_more(self) -> bool:
        """Wait for a job. Returns false once the lane has ended and no job is left."""
        while not self._waiting and not self._ended:
            with self._changed:  # an interrupt in the pushing thread may prevent the notification
                is_idle = not self._waiting and not self._ended and not self._changed.wait(threads().glance_s)
            if is_idle:
                look()
        return self._waiting

    @property
    def _waiting(self) -> bool:
        return bool(self._line or self._idle)

    def _next(self) -> Job:
        with self._changed:
            return self._take(self._first())

    def _next_overlapping(self) -> Job | None:
        """The next job, if it may begin before the second part of the job before it."""
        with self._changed:
            job = self._first() if self._waiting else None
            return self._take(job) if job is not None and job.overlaps and self._line_of(job)[job]() else None

    def _first(self) -> Job:
        job = next((job for job in self._hurried if self._line_of(job)[job]()), None)
        return job or next(iter(self._line), None) or next(reversed(self._idle))

    def _take(self, job: Job) -> Job:
        del self._line_of(job)[job]
        if job in self._hurried:
            self._hurried.remove(job)
        return job

    def _line_of(self, job: Job) -> dict[Job, Callable[[], bool]]:
        return self._line if job in self._line else self._idle


def _begun(job: Job | None) -> Job | None:
    """Begin a job. Returns it if its second part is left."""
    if job is not None:
        job.begin()
    return job if job is not None and not job.done else None
