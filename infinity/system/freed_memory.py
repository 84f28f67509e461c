"""Freed memory that the C library keeps: it counts as this process's, until it goes back to the system.

Knows malloc, the resident bytes of this process, and the part that the engine holds as device memory. Must not know chunks.
"""

# [Note: memory that is freed]
# The C library keeps freed blocks for later allocations. On the CPU, spans come and go with every op. With kept blocks, the kernel need not
# zero pages again. A step of a GPT of 101 M parameters from NVMe took 0.57 s of CPU time. The step took 0.80 s when blocks of 1 MiB and
# more went back at once. The engine therefore tells the C library to keep more blocks than by default.
#
# But kept blocks are not always used again. PyTorch asks for memory that is aligned to 64 bytes. glibc then looks for 96 bytes more, cuts
# them off the block, and gives the pieces to small objects, such as the nodes of autograd's graph. A freed span lacks these 96 bytes, so
# the next span of this size does not fit there. In a forward pass the heap grows by every span (glibc 2.36: 200 allocations of 4 MiB, at
# most four at a time, take 800 MiB; without the alignment, 16 MiB). Memory that was freed after construction or a checkpoint lies in such
# pieces, too. Spans then go through all of them and touch new pages each time.
#
# The engine therefore checks resident memory while spans are allocated, at the end of a step, and at the end of the start or of a
# checkpoint. If resident memory has grown by more than the budget of spans, all kept blocks go back to the system, which takes about 0.02
# s. If this happens within a pass, kept blocks are not used again. From then on they go back as soon as a pass takes more than the most
# that the engine has held, plus some slack. A pass of any model thus stays within its budgets and 120 MiB.

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

SHARE = 1 / 10  # slack as a share of the budgets
LEAST_NBYTES, MOST_NBYTES = 16 << 20, 64 << 20  # limits of the slack: less is not worth the time, more is too much of the 120 MiB
LOOK_NBYTES = 16 << 20  # bytes of spans allocated between two checks

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Let the C library keep large freed blocks; see [Note: memory that is freed]."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # glibc's maximum
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Freed:
    """Gives kept blocks back to the system when resident memory has grown too large. Called by the training thread, or by a thread that the
    training thread waits for.

    budget_nbytes: all host memory that an engine may take; span_nbytes: the part of it that is device memory. held(): (bytes of spans
    held now, the most so far).
    """

    def __init__(self, budget_nbytes: int, span_nbytes: int, held: Callable[[], tuple[int, int]]):
        self._slack_nbytes = min(MOST_NBYTES, max(LEAST_NBYTES, int(SHARE * budget_nbytes)))
        self._step_slack_nbytes = max(self._slack_nbytes, span_nbytes)
        self._held = held
        self._end_nbytes = 0  # resident bytes beside spans after blocks went back at an end, or less
        self._pass_nbytes = 0  # the same within a pass, activations included
        self._unseen_nbytes = 0  # bytes allocated since the last check
        self._scatters = False  # a pass took more than the budget of spans: kept blocks are not used again

    def note_allocated(self, nbytes: int) -> None:
        """Report a span that was allocated in host memory, within a pass."""
        self._unseen_nbytes += nbytes
        if self._unseen_nbytes < LOOK_NBYTES:
            return
        self._unseen_nbytes = 0
        slack_nbytes = self._held()[1] + self._slack_nbytes if self._scatters else self._step_slack_nbytes
        self._pass_nbytes, went_back = self._give_back_beyond(self._pass_nbytes, slack_nbytes)
        self._scatters |= went_back

    def give_back(self) -> None:
        """Check at the end of the start or of a checkpoint."""
        self._end_nbytes, _ = self._give_back_beyond(self._end_nbytes, self._slack_nbytes)
        self._pass_nbytes = self._end_nbytes

    def give_back_after_step(self) -> None:
        """Check at the end of a step. Blocks up to the budget of spans stay, because the next step needs them."""
        self._end_nbytes, _ = self._give_back_beyond(self._end_nbytes, self._step_slack_nbytes)

    def _give_back_beyond(self, rest_nbytes: int, slack_nbytes: int) -> tuple[int, bool]:
        """Returns (resident bytes beside spans, at most rest_nbytes if no block went back; whether blocks went back)."""
        with contextlib.suppress(OSError):  # no descriptor is left, or no /proc: a later check comes
            nbytes = resident_nbytes()
            if nbytes <= rest_nbytes + slack_nbytes:
                return min(nbytes - self._held()[0], rest_nbytes), False
            libc = ctypes.CDLL(None)
            if hasattr(libc, "malloc_trim"):
                libc.malloc_trim(0)
            return resident_nbytes() - self._held()[0], True
        return rest_nbytes, False
