"""Remembers SIGTERM until the current step ends.

Knows this process, and whether the job has other processes. Must not know how the run reacts to the signal.

# [Note: SIGTERM]
# On the first SIGTERM a run with --save finishes the current step, saves and ends with success. On the second SIGTERM the previous handler
# runs, which may remove swap files. Once per step the ranks agree whether any rank received the signal, so that all ranks stop after the
# same step. If a scheduler signals all processes of a job, each rank receives the signal twice: directly, and from the launcher. With
# several ranks, a signal within ECHO_SECONDS of the first is therefore not the second signal.
"""

import os
import signal
import threading
import time

ECHO_SECONDS = 1.0  # see [Note: SIGTERM]


class Sigterm:
    """A context that records the first SIGTERM, if `listens`. waits: a second signal follows soon, as with several ranks. See [Note: SIGTERM]."""

    def __init__(self, *, waits, listens):
        self.received = False
        self._echo_seconds = ECHO_SECONDS if waits else 0.0
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
            # Not print: the signal may have interrupted a print.
            os.write(2, b"SIGTERM: the run ends after this step, with a checkpoint; a second SIGTERM ends it at once\n")
        elif now >= self._ends:
            signal.signal(number, self._before)
            signal.raise_signal(number)
