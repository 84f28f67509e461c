"""What the C library keeps of freed memory, which counts as this process's, and when it goes back to the system.

Knows malloc and the resident bytes of this process. Must not know what was allocated or freed.
"""

# [Note: memory that is freed]
# The C library keeps freed blocks for those that come next. On the CPU, where spans come and go with every op, that spares the kernel
# zeroing their pages: a step of a GPT of 101 M parameters from NVMe took 0.57 s of the processors, and 0.80 s where blocks of 1 MiB and
# more went back at once. So it is told to keep more than it would. But what it keeps lies in pieces, between others that are in use, and
# grows with every step; and what was freed after construction, the start or a checkpoint would stay. So where one of these ends, resident
# memory is looked at, and if it has grown by a share of the budgets since blocks went back last, they go back again: 0.02 s then. What
# steps free they need again, up to the budget of spans, and pages that went back cost 4 % of a step: so they may grow by that first.

from __future__ import annotations

import contextlib
import ctypes
import os

SHARE = 1 / 10  # of the budgets, by which memory may grow
LEAST_NBYTES = 16 << 20  # of growth that is worth the time

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Let the C library keep large freed blocks; see [Note: memory that is freed]."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Freed:
    """budget_nbytes: of all host memory that an engine may take. span_nbytes: of it, for spans, which come and go within a step."""

    def __init__(self, budget_nbytes: int, span_nbytes: int = 0):
        self._slack_nbytes = max(LEAST_NBYTES, int(SHARE * budget_nbytes))
        self._step_slack_nbytes = max(self._slack_nbytes, span_nbytes)
        self._settled_nbytes = 0  # resident when blocks went back last, or less

    def give_back(self) -> None:
        """The start or a checkpoint has ended: what the C library keeps goes back if it is much."""
        self._give_back_beyond(self._slack_nbytes)

    def give_back_after_step(self) -> None:
        """The same, if it is more than steps need."""
        self._give_back_beyond(self._step_slack_nbytes)

    def _give_back_beyond(self, slack_nbytes: int) -> None:
        with contextlib.suppress(OSError):  # no descriptor is left, or no /proc: a later end comes
            nbytes = resident_nbytes()
            if nbytes > self._settled_nbytes + slack_nbytes:
                libc = ctypes.CDLL(None)
                if hasattr(libc, "malloc_trim"):
                    libc.malloc_trim(0)
                nbytes = self._settled_nbytes = resident_nbytes()
            self._settled_nbytes = min(nbytes, self._settled_nbytes)
