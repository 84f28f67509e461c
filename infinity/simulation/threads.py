"""Simulated threads: one runs at a time, in an order that a seed decides, on a virtual clock.

Knows threads that wait for monitors, locks and times, and the settings of the process that slow a run down. Must not know lanes or their
work. See `using` in infinity/system/threads.py.
"""

# [Note: simulated threads]
# Each simulated thread is a thread of the operating system with a baton. Only the thread that has been given the baton runs. A thread gives the
# baton away when waiting, and before entering a monitor. The next thread is drawn from those that can run. If none can run, the clock goes
# on to the next time for which a thread waits. If there is no such time, the threads wait for each other forever: `Deadlock`. So a race is
# found in a test without delays, and the seed repeats it exactly.

from __future__ import annotations

import contextlib
import functools
import gc
import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterator

import torch

GC_THRESHOLDS = 50_000, 50, 100


class Deadlock(RuntimeError):
    """All simulated threads wait for each other."""


class SimulatedThread:
    """Has the methods of threading.Thread that lanes use."""

    def __init__(self, owner: SimulatedThreads, name: str):
        self.name = name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.waits_for = ""
        self._owner, self._is_alive, self._joining = owner, True, _Line(owner)
        self._thread: threading.Thread | None = None
        self._creator = threading.get_ident()

    @property
    def ident(self) -> int:
        return self._thread.ident if self._thread is not None else self._creator  # main runs in the thread of its creator

    def begin(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=functools.partial(self._run, run), name=self.name, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._is_alive

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, or for so many virtual seconds."""
        if self._is_alive:
            self._joining.block(f"the end of {self.name}", timeout)

    def _run(self, run: Callable[[], None]) -> None:
        self.baton.acquire()
        try:
            with self._owner.around():
                run()
        finally:
            self._is_alive = False
            self._joining.wake_all()
            self._owner.hand_over()


class SimulatedThreads:
    """seed: of the order in which threads run; None: in the order in which threads become able to run. around(): a context in which each started
    thread works. begin_job(): called before each piece of work of a thread.

        with using(simulated):
            simulated.run(main)
    """

    glance_s = None  # no notification is lost

    def __init__(
        self,
        seed: int | None = 0,
        around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        begin_job: Callable[[], object] = lambda: None,
    ):
        self.around, self.begin_job = around, begin_job
        self.running: SimulatedThread | None = None
        self._random = random.Random(seed) if seed is not None else None
        self._now, self._numbers = 0.0, itertools.count()
        self._ready: list[SimulatedThread] = []
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._all: list[SimulatedThread] = []
        self._main: SimulatedThread | None = None
        self._deadlock = ""
        self._is_over = False

    def run(self, main: Callable[[], object]) -> object:
        """Run a function as the first simulated thread, in the thread of the caller. Returns the result. Raises Deadlock."""
        self.running = self._main = SimulatedThread(self, "main")
        self._all.append(self._main)
        with _little_overhead():
            try:
                return main()
            finally:
                self._is_over = True

    def now(self) -> float:
        return self._now

    def monitor(self) -> SimulatedMonitor:
        return SimulatedMonitor(self)

    def lock(self) -> SimulatedLock:
        return SimulatedLock(self)

    def start(self, run: Callable[[], None], name: str) -> SimulatedThread:
        thread = SimulatedThread(self, name)
        self._all.append(thread)
        thread.begin(run)
        self._ready.append(thread)
        return thread

    def sleep(self, seconds: float) -> None:
        """Wait for so many virtual seconds."""
        end = self._now + seconds
        if not self._ready and (not self._timers or self._timers[0][0] > end):
            self._now = end  # nothing else happens before
            return
        self.call_after(seconds, functools.partial(self.wake, self.running))
        self.block(f"{seconds} s")

    def call_after(self, seconds: float, work: Callable[[], object]) -> None:
        """Call a function, which must not wait, after so many virtual seconds."""
        heapq.heappush(self._timers, (self._now + seconds, next(self._numbers), work))

    def pause(self) -> None:
        """Other threads may run before this one goes on."""
        if self._random is None or not self._ready:
            return
        self._ready.append(self.running)
        self.block("")

    def wake(self, thread: SimulatedThread) -> None:
        """The thread can run again."""
        self._ready.append(thread)

    def block(self, what: str) -> None:
        """Wait until `wake` is called for this thread. what: the awaited thing, in words. Raises RuntimeError after the end of `run`."""
        if self._is_over:
            raise RuntimeError(f"waits for {what}, but the simulation has ended: close every engine inside")
        me, me.waits_for = self.running, what
        self.hand_over()
        me.baton.acquire()
        me.waits_for = ""
        if self._deadlock and me is self._main:
            raise Deadlock(self._deadlock)

    def hand_over(self) -> None:
        """Give the baton to a thread that can run."""
        while not self._ready and self._timers:
            self._now, _, work = heapq.heappop(self._timers)
            work()
        if not self._ready:
            waits = [f"{thread.name} waits for {thread.waits_for}" for thread in self._all if thread.is_alive()]
            self._deadlock = "; ".join(waits)
            self._ready.append(self._main)
        index = self._random.randrange(len(self._ready)) if self._random is not None else 0
        self.running = self._ready.pop(index)
        self.running.baton.release()


@contextlib.contextmanager
def _little_overhead() -> Iterator[None]:
    """Small tensors are real, but too small for threads of PyTorch, which would spin between operations. Garbage is collected less often, because
    a run keeps most objects."""
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        undo.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(*GC_THRESHOLDS)
        yield


class _Line:
    """Threads that wait for one thing."""

    def __init__(self, threads: SimulatedThreads):
        self._threads = threads
        self._places: list[list[SimulatedThread]] = []  # each wait has a place of its own, so that an old timer ends no later wait

    def block(self, what: str, timeout: float | None = None) -> bool:
        """Wait until `wake` is called, or for so many virtual seconds. Returns false after that time."""
        place = [self._threads.running]
        self._places.append(place)
        in_time = True

        def end() -> None:
            nonlocal in_time
            if any(each is place for each in self._places):
                in_time = False
                self._let_go(place)

        if timeout is not None:
            self._threads.call_after(timeout, end)
        self._threads.block(what)
        return in_time

    def wake(self) -> None:
        """Wake the thread that has waited longest, if any."""
        if self._places:
            self._let_go(self._places[0])

    def wake_all(self) -> None:
        while self._places:
            self.wake()

    def _let_go(self, place: list[SimulatedThread]) -> None:
        self._places = [each for each in self._places if each is not place]
        self._threads.wake(place[0])


class SimulatedLock:
    """Has the methods of threading.Lock that lanes use."""

    def __init__(self, threads: SimulatedThreads):
        self._threads, self._is_held = threads, False
        self._line = _Line(threads)

    def acquire(self, timeout: float = -1) -> bool:
        """As of threading.Lock, in virtual seconds."""
        end = self._threads.now() + timeout if timeout >= 0 else None
        while self._is_held:
            left = None if end is None else end - self._threads.now()
            if left is not None and left <= 0:
                return False
            self._line.block("a lock", left)
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        self._line.wake()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception) -> None:
        self.release()


class SimulatedMonitor:
    """Has the methods of Monitor."""

    def __init__(self, threads: SimulatedThreads):
        self._threads, self._owner, self._depth = threads, None, 0
        self._entering, self._waiting = _Line(threads), _Line(threads)

    def __enter__(self) -> SimulatedMonitor:
        if self._owner is not self._threads.running:
            self._threads.pause()
            self._enter()
        self._depth += 1
        return self

    def __exit__(self, *exception) -> None:
        self._depth -= 1
        if not self._depth:
            self._leave()

    def wait(self, timeout: float | None = None) -> bool:
        """As of threading.Condition, in virtual seconds."""
        assert self._owner is self._threads.running, "a thread waits without the monitor"
        depth = self._depth
        self._leave()
        in_time = self._waiting.block("a notification", timeout)
        self._enter()
        self._depth = depth
        return in_time

    def wait_for(self, holds: Callable[[], object], timeout: float | None = None) -> object:
        """As of threading.Condition, in virtual seconds."""
        end = None if timeout is None else self._threads.now() + timeout
        while not (found := holds()):
            left = None if end is None else end - self._threads.now()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, count: int = 1) -> None:
        for _ in range(count):
            self._waiting.wake()

    def notify_all(self) -> None:
        self._waiting.wake_all()

    def _enter(self) -> None:
        while self._owner is not None:
            self._entering.block(f"a monitor that {self._owner.name} has")
        self._owner = self._threads.running

    def _leave(self) -> None:
        self._owner, self._depth = None, 0
        self._entering.wake()
