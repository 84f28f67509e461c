"""SIGTERM, kept in mind until a step is over.

Knows one process, and whether it has others beside it. Must not know what is done when it came.

# [Note: SIGTERM]
# A run that saves finishes its step on SIGTERM, saves and ends well. What SIGTERM did before, such as removing the swap, it does the
# second time. Once a step the ranks agree whether any of them was told, so that a signal to one stops all after the same step. Where
# a job's processes are all signalled, each rank hears of it twice, directly and from its launcher: what comes within
# ECHO_SECONDS is no second time there.
"""

import os
import signal
import threading
import time

ECHO_SECONDS = 1.0  # see [Note: SIGTERM]


class Sigterm:
    """While entered, keeps the first SIGTERM in mind, if it listens; see [Note: SIGTERM]."""

    def __init__(self, world, *, listens):
        self.received = False
        self._echo_seconds = ECHO_SECONDS if world > 1 else 0.0
        self._listens = listens and threading.current_thread() is threading.main_thread()

    def __enter__(self):
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._receive) or signal.SIG_DFL
        return self

    def __exit__(self, *_):
        if self._listens:
            signal.signal(signal.SIGTERM, self._before)

    def _receive(self, number, frame):
        now = time.monotonic()
        if not self.received:
            self.received, self._ends = True, now + self._echo_seconds
            # Not print: the signal may have come in the middle of one.
            os.write(2, b"SIGTERM: ending after this step and a checkpoint; a second one quits at once\n")
        elif now >= self._ends:
            signal.signal(number, self._before)
            signal.raise_signal(number)
