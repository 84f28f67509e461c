"""The waits of threads, in words.

Knows threads. Must not know lanes, chunks or ranks: the waiting code passes the text, and the thread that works on the awaited work.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from infinity.system.threads import now

THREADS = "infinity-"  # begins the names of the engine's own threads
_MOST_TEXTS = 8  # in a chain of waits

class Wait:
    """A wait of a thread: the awaited work, and the start in seconds of `now`.

    what: words, or a function that returns words in any thread. worker: the number of the thread that does the work, if it is one of
    this process. outer: the enclosing wait.
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
        """The awaited work, the work that this one waits for, and so on, as known now: ("an update of chunk 3", "a read from NVMe")."""
        texts, wait = [], self
        while wait is not None and len(texts) < _MOST_TEXTS:
            texts += wait._own_texts()
            wait = waiting.get(wait.worker)
        return tuple(dict.fromkeys(texts))

    def _own_texts(self) -> list[str]:
        """From the outermost wait to this one."""
        outer = self.outer._own_texts() if self.outer is not None else []
        return [*outer, self.what if isinstance(self.what, str) else self.what()]

    def __str__(self) -> str:
        return ": ".join(self.texts)


waiting: dict[int, Wait] = {}  # by thread number
os.register_at_fork(after_in_child=waiting.clear)


@contextlib.contextmanager
def waits(what: str | Callable[[], str], worker: int | None = None):
    """Record that the thread waits inside the block; see Wait."""
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
    """The longest wait of a thread outside the engine, such as the training thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}  # autograd's threads have no names
    found = [wait for ident, wait in list(waiting.items()) if not names.get(ident, "").startswith(THREADS)]
    return min(found, key=lambda wait: wait.since, default=None)
