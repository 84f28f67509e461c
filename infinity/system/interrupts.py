"""Raises an interrupt (SIGINT) between the engine's operations, not inside them.

Knows signals and the main thread, the only one in which Python runs handlers. Must not know which work is protected.

[Note: interrupts]
A handler runs between any two steps of Python. KeyboardInterrupt could therefore come after a slot was taken and before any object
refers to the slot. While an `uninterrupted` function runs, the interrupt is kept until the outermost such function returns. A second
interrupt is raised at once, for users who do not want to wait. A program's own handler stays in place, and exceptions of that handler
come at any point. But handlers run only in the main thread. Work that must stay whole in any case, and takes too long to delay a
handler, is `shielded`: the work runs in another thread while the main thread waits. An exception of a handler then asks the work to
stop, and is raised after the work has ended.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import signal
import threading
from collections.abc import Callable

SHIELD = "infinity shield"  # the name of the thread of shielded work
_MAIN = threading.main_thread().ident

_depth = 0  # of uninterrupted functions, in the main thread
_is_kept = False  # an interrupt has come inside them
num_raised = 0


def uninterrupted(function):
    """Decorate a function inside which no interrupt is raised."""

    @functools.wraps(function)
    def whole(*args, **kwargs):
        global _depth
        if threading.get_ident() != _MAIN:
            return function(*args, **kwargs)
        _depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1
            if _is_kept and not _depth:
                _raise()

    return whole


class Shield:
    """Work that runs in a thread of its own. The work reads `asked_to_stop` at points where an early end is possible, by an exception.

    context(): returns a context manager, which the work's thread enters around the work. Waits with bare locks: Python's events and conditions,
    and the start of a thread, treat an interrupt as their own error.
    """

    def __init__(self, work: Callable[[Shield], object], context: Callable[[], contextlib.AbstractContextManager]):
        self.asked_to_stop = False
        self._work, self._context = work, context
        self._claim = threading.Lock()  # taken by the thread that runs the work, or by the one that gives up before
        self._is_over, self._gate = False, threading.Lock()  # held until the work is over
        self._gate.acquire()
        self._result: object = None
        self._error: BaseException | None = None

    def run(self) -> object:
        """Wait for the work; return the result or raise the error. An exception of a handler during the wait is raised instead."""
        if threading.get_ident() != _MAIN:
            return self._call()
        prepare()
        raised = None
        try:
            _line.put(self)
        except BaseException as error:
            if self._claim.acquire(blocking=False):
                raise
            raised, self.asked_to_stop = error, True
        while not self._is_over:
            try:
                self._gate.acquire(timeout=0.5)
            except BaseException as error:
                raised, self.asked_to_stop = error, True
        if raised is not None:
            raise raised
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._result = self._call()
        except BaseException as error:  # for the waiting thread
            self._error = error
        self._work, self._is_over = None, True
        self._gate.release()

    def _call(self) -> object:
        with self._context():
            return self._work(self)


_line: queue.SimpleQueue[Shield] = queue.SimpleQueue()  # one after the other, even if a second interrupt did not wait for the first
_runner: threading.Thread | None = None


def prepare() -> None:
    """Start the thread for shielded work."""
    global _runner
    if _runner is None or not _runner.is_alive():  # as in a forked child
        _runner = threading.Thread(target=_run_each, name=SHIELD, daemon=True)
        _runner.start()


def _run_each() -> None:
    while True:
        _line.get()._run()


def shielded(work: Callable[[Shield], object], context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext) -> object:
    """Return the work's result, or raise the work's error; see [Note: interrupts]. context: see `Shield`."""
    return Shield(work, context).run()


def guard() -> None:
    """Handle interrupts here, if the program has no handler of its own. A notebook restores the default handler for each cell."""
    if threading.get_ident() == _MAIN and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def unguard() -> None:
    """Restore the default handler."""
    if threading.get_ident() == _MAIN and signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _on_interrupt(number: int, frame) -> None:
    global _is_kept
    if not _depth or _is_kept:
        _raise()
    _is_kept = True


def _raise() -> None:
    global _is_kept, num_raised
    _is_kept = False
    num_raised += 1
    raise KeyboardInterrupt
