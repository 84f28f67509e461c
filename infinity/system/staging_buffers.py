"""Host memory between a source of bytes and a file: a few buffers that threads fill, write from, and fill again.

Knows memory, and when a write from a buffer is over. Must not know which bytes are written, or where.
"""

from __future__ import annotations

from collections import deque

import aio_ext
from infinity.errors import SwapError
from infinity.system.arena import PAGE_NBYTES, Arena, Region
from infinity.system.threads import monitor

BUFFER_NBYTES = 16 << 20  # the largest size of one buffer
LEAST_BUFFERS = 2  # a thread fills one buffer while the drive writes from the other


class StagingBuffer:
    """One buffer. The thread that took it fills its memory; `release` gives it back."""

    __slots__ = ("_owner", "region", "tickets")

    def __init__(self, owner: StagingBuffers, region: Region):
        self._owner = owner
        self.region = region
        self.tickets: tuple[aio_ext.Ticket, ...] = ()  # of the writes that still read this memory

    def release(self, *tickets: aio_ext.Ticket) -> None:
        """Give the buffer back. The next thread that takes it waits for these tickets first."""
        self.tickets = tickets
        self._owner.put_back(self)


class StagingBuffers:
    """Buffers that any thread may take. target: the path that errors name. purpose: the thing that is written, for errors."""

    def __init__(self, target: str, *, host_nbytes: int, largest_nbytes: int, pin: bool, purpose: str):
        """host_nbytes: of all buffers together; two buffers are made in any case. largest_nbytes: of the largest content of a buffer."""
        self.nbytes = min(BUFFER_NBYTES, -(-max(largest_nbytes, 1) // PAGE_NBYTES) * PAGE_NBYTES)
        self._target = target
        self._purpose = purpose
        self._most = max(LEAST_BUFFERS, host_nbytes // self.nbytes)
        self._arena = Arena(pin=pin)
        self._lock = monitor()
        self._free: deque[StagingBuffer] = deque()  # the buffer whose write began first comes first
        self._num = 0
        self._error: BaseException | None = None

    def take(self) -> StagingBuffer:
        """Return a buffer that no write reads any more. Wait for one if all are in use.

        Raises the error that `fail` was given, or SwapError if the last write from the buffer failed.
        """
        buffer = self._take()
        try:
            self._wait_for(buffer)
        except BaseException:
            buffer.release()
            raise
        return buffer

    def put_back(self, buffer: StagingBuffer) -> None:
        with self._lock:
            self._free.append(buffer)
            self._lock.notify_all()

    def settle(self) -> None:
        """Wait for all writes that have begun. No thread takes a buffer meanwhile. Raises SwapError."""
        for buffer in self._free:
            self._wait_for(buffer)

    def fail(self, error: BaseException) -> None:
        """Raise this error in every thread that waits for a buffer, now and later."""
        with self._lock:
            self._error = self._error or error
            self._lock.notify_all()

    def close(self) -> None:
        self._arena.close()

    def _take(self) -> StagingBuffer:
        """Return a free buffer, which a write may still read. A new buffer is made only while all others are in use."""
        with self._lock:
            while True:
                if self._error is not None:
                    raise self._error
                is_full = self._num == self._most
                if self._free and (is_full or all(ticket.done for ticket in self._free[0].tickets)):
                    return self._free.popleft()
                if not is_full:
                    self._num += 1
                    break
                self._lock.wait()
        return StagingBuffer(self, self._arena.region(self.nbytes))

    def _wait_for(self, buffer: StagingBuffer) -> None:
        for ticket in buffer.tickets:
            try:
                ticket.wait()
            except OSError as error:
                raise SwapError(error.errno, f"a write of {self._purpose} failed ({error.strerror})", self._target) from error
