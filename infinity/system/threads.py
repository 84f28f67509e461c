"""Threads, monitors and time: those of the operating system, or simulated ones.

Knows what the engine's threads need of each other. Must not know lanes or their work.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_GLANCE_S = 0.5  # interval in which a waiting thread checks for an abandoned lane and a slow step


class Monitor(type(threading.RLock())):
    """A threading.Condition that an interrupt cannot leave locked: enter and exit are C code, which no interrupt splits."""

    def __init__(self):
        self._condition = threading.Condition(self)
        self.wait = self._condition.wait
        self.wait_for = self._condition.wait_for
        self.notify = self._condition.notify
        self.notify_all = self._condition.notify_all


class SystemThreads:
    """Threads of the operating system. glance_s: a waiting thread looks around after so many seconds; None: it need not."""

    glance_s: float | None = _GLANCE_S
    now = staticmethod(time.perf_counter)  # on Linux the monotonic clock, which all processes of a machine share
    monitor = Monitor
    lock = threading.Lock  # one thread may release the lock of another one

    def begin_job(self) -> None:
        """The current thread begins a piece of work of the engine. A simulation lets the work take time."""

    def start(self, run: Callable[[], None], name: str) -> threading.Thread:
        """A daemon thread that has begun to run the function."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


_current = SystemThreads()


def threads() -> SystemThreads:
    """The threads of new lanes and monitors."""
    return _current


def monitor() -> Monitor:
    return _current.monitor()


def now() -> float:
    """Seconds of a monotonic clock. Only differences have a meaning."""
    return _current.now()


@contextlib.contextmanager
def using(other) -> Iterator[None]:
    """Inside the block, new lanes and monitors use other threads, such as `SimulatedThreads`. No engine may be open."""
    global _current
    before, _current = _current, other
    try:
        yield
    finally:
        _current = before
