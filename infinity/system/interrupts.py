"""An interrupt (SIGINT) comes between what the engine does, not inside of it.

Knows signals and the main thread, in which alone Python runs their handlers. Must not know what is to be left whole.

# [Note: interrupts]
# A handler runs between any two steps of Python, so that KeyboardInterrupt could come after a slot was taken and before anybody knows of
# it. While an `uninterrupted` function runs, it is kept back until the outermost one returns; the second one comes at once, for who will
# not wait that long. Where the program has a handler of its own, that stays: what it raises comes wherever it comes. But handlers run in
# the main thread only. What must stay whole whatever they raise, and takes too long to keep them waiting, is `shielded`: it runs in another
# thread, the main one waits, and what is raised there meanwhile asks the work to stop, and goes on once it has.
"""

from __future__ import annotations

import functools
import queue
import signal
import threading
from collections.abc import Callable

SHIELD = "infinity shield"  # the name of the thread in which it runs
_MAIN = threading.main_thread().ident

_depth = 0  # of uninterrupted functions, in the main thread
_is_kept = False  # one has come inside of them
num_raised = 0


def uninterrupted(function):
    """The function, inside of which no interrupt is raised."""

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
    """Work that runs in a thread of its own; `asked_to_stop` is for it to look at where it may end early, by raising something.

    Waits with bare locks: Python's events and conditions, and the start of a thread, take an interrupt for an error of their own.
    """

    def __init__(self, work: Callable[[Shield], object]):
        self.asked_to_stop = False
        self._work = work
        self._claim = threading.Lock()  # of who runs it, or of who gives it up before that
        self._is_over, self._gate = False, threading.Lock()  # held until it is over
        self._gate.acquire()
        self._result: object = None
        self._error: BaseException | None = None

    def run(self) -> object:
        """What it returns, or raises, once it is over; whatever a handler raises meanwhile comes instead."""
        if threading.get_ident() != _MAIN:
            return self._work(self)
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
            self._result = self._work(self)
        except BaseException as error:  # for who waits
            self._error = error
        self._work, self._is_over = None, True
        self._gate.release()


_line: queue.SimpleQueue[Shield] = queue.SimpleQueue()  # one after the other, also where a second interrupt did not wait for the first's
_runner: threading.Thread | None = None


def prepare() -> None:
    """Have the thread for what is shielded."""
    global _runner
    if _runner is None or not _runner.is_alive():  # as in a forked child
        _runner = threading.Thread(target=_run_each, name=SHIELD, daemon=True)
        _runner.start()


def _run_each() -> None:
    while True:
        _line.get()._run()


def shielded(work: Callable[[Shield], object]) -> object:
    """What it returns, or raises; see [Note: interrupts]."""
    return Shield(work).run()


def guard() -> None:
    """Have interrupts handled here, if the program has no handler of its own. A notebook brings the usual one back for each cell."""
    if threading.get_ident() == _MAIN and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def unguard() -> None:
    """Bring the usual handler back."""
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
