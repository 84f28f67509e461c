"""Objects that a program drops without closing them: a thread closes them.

Knows finalizers and a queue. Must not know the closed objects.

[Note: what is dropped]
A finalizer runs when the last reference goes, or during garbage collection: between any two steps of Python, in any thread, whatever
locks that thread holds. Code that takes locks and waits for threads must not run there. The finalizer therefore only puts the object
into a queue, which accepts entries at any time, and waits for some seconds until the thread has closed the object. The program then
finds the object gone, as with any other object. The engine's own threads do not wait, because closing waits for these threads.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import weakref

from infinity.system.waits import THREADS

PATIENCE_S = 10.0

_line: queue.SimpleQueue = queue.SimpleQueue()
_closer: threading.Thread | None = None


def close_with(owner: object, closable) -> weakref.finalize:
    """Close `closable` when the owner is gone. `closable` must not refer to the owner. `detach()` the result if other code has closed it."""
    global _closer
    if _closer is None or not _closer.is_alive():  # a forked child has no such thread
        _closer = threading.Thread(target=_run, name="infinity dropped", daemon=True)
        _closer.start()
    finalizer = weakref.finalize(owner, _hand_over, closable, os.getpid())
    finalizer.atexit = False
    return finalizer


def _hand_over(closable, pid: int) -> None:
    if pid != os.getpid():  # a forked child has none of the threads
        return
    over = threading.Lock()
    over.acquire()
    _line.put((closable, over))
    if not threading.current_thread().name.startswith(THREADS) and threading.current_thread() is not _closer:
        over.acquire(timeout=PATIENCE_S)


def finish() -> None:
    """Wait until all queued objects are closed: the dropping thread may not have waited, or not long enough."""
    if _closer is not None and _closer.is_alive() and threading.current_thread() is not _closer:
        over = threading.Lock()
        over.acquire()
        _line.put((None, over))
        over.acquire()


def _run() -> None:
    while True:
        closable, over = _line.get()
        try:
            if closable is not None:
                closable.close()
        except Exception as error:  # nobody waits who could be told
            print(f"infinity: {closable!r} was dropped and could not be closed: {type(error).__name__}: {error}", file=sys.stderr)
        over.release()
        del closable, over
