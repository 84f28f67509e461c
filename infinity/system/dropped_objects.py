"""What a program drops without closing it: a thread closes that.

Knows finalizers and a queue. Must not know what is closed.

# [Note: what is dropped]
# A finalizer runs wherever the last reference goes, or the collector comes by: between any two steps of Python, in any thread, whatever
# that holds. What takes locks and waits for threads must not run there. So it only hands over, by a queue that may be entered at any
# time, and waits for some seconds until the thread has closed it: who drops a thing finds it gone, as with any other object. A thread of
# the engine's own, which closing waits for, does not wait.
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
    """Close it once the owner, which it must not refer to, is gone; until then it lives. `detach()` of the result if somebody else has."""
    global _closer
    if _closer is None or not _closer.is_alive():  # as in a forked child
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
    """Wait until all that was handed over is closed: who dropped it may have been a thread that does not wait, or have no patience left."""
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
        except Exception as error:  # nobody else is there to be told
            print(f"infinity: {closable!r} was dropped and could not be closed: {type(error).__name__}: {error}", file=sys.stderr)
        over.release()
        del closable, over
