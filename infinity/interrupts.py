"""An interrupt (SIGINT) comes between what the engine does, not inside of it.

Knows signals and the main thread, in which alone Python runs their handlers. Must not know what is to be left whole.

# [Note: interrupts]
# A handler runs between any two steps of Python, so that KeyboardInterrupt could come after a slot was taken and before anybody knows of
# it. While an `uninterrupted` function runs, it is kept back until the outermost one returns; the second one comes at once, for who will
# not wait that long. Where the program has a handler of its own, that stays: what it raises comes wherever it comes.
"""

from __future__ import annotations

import functools
import signal
import threading

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
