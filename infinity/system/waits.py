"""What threads wait for, in words.

Knows threads. Must not know lanes, chunks or ranks: whoever waits says for what, and which thread works on that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

THREADS = "infinity-"  # begins the names of the engine's own
_MOST_TEXTS = 8  # one behind the other

now = time.perf_counter


class Wait:
    """What a thread waits for, and since when, in seconds of `now`.

    what: words, or gives them, in whatever thread asks. worker: the number of the thread that works on it, if one of this process does.
    outer: the wait that this one is a part of.
    """

    __slots__ = ("outer", "since", "what", "worker")

    def __init__(self, what: str | Callable[[], str], worker: int | None, outer: Wait | None):
        self.what = what
        self.worker = worker
        self.outer = outer
        self.since = outer.since if outer is not None else now()

    @property
    def seconds(self) -> float:
        return now() - self.since

    @property
    def texts(self) -> tuple[str, ...]:
        """What is waited for, what that waits for, and so on, as far as it is known now: ("an update of chunk 3", "a read from NVMe")."""
        texts, wait = [], self
        while wait is not None and len(texts) < _MOST_TEXTS:
            texts += wait._own_texts()
            wait = waiting.get(wait.worker)
        return tuple(dict.fromkeys(texts))

    def _own_texts(self) -> list[str]:
        """From the outermost to this one."""
        outer = self.outer._own_texts() if self.outer is not None else []
        return [*outer, self.what if isinstance(self.what, str) else self.what()]

    def __str__(self) -> str:
        return ": ".join(self.texts)


waiting: dict[int, Wait] = {}  # by the threads' numbers
os.register_at_fork(after_in_child=waiting.clear)


@contextlib.contextmanager
def waits(what: str | Callable[[], str], worker: int | None = None):
    """The thread waits inside the block; see Wait."""
    ident = threading.get_ident()
    outer = waiting.get(ident)
    waiting[ident] = Wait(what, worker, outer)
    try:
        yield
    finally:
        if outer is None:
            waiting.pop(ident, None)
        else:
            waiting[ident] = outer


def of_the_program() -> Wait | None:
    """The longest wait of a thread that is none of the engine's, as the training thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}  # autograd's threads have none
    found = [wait for ident, wait in list(waiting.items()) if not names.get(ident, "").startswith(THREADS)]
    return min(found, key=lambda wait: wait.since, default=None)
