"""A simulated device that works while the host goes on: streams, events, links, and its memory.

Knows seconds and bytes. Must not know tensors' values, chunks or tiers.
"""

# [Note: simulated streams]
# A stream is a line of work, of waits for events, and of records of events. Work takes a link for some seconds, see [Note: links]. All of this
# happens in timers of the virtual clock, so a stream needs no thread. Streams share the device's processors and links.

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch

from infinity.simulation.links import Links
from infinity.simulation.threads import SimulatedThreads


class SimulatedEvent:
    """A point in a stream. Has the methods of torch.cuda.Event that the engine uses."""

    def __init__(self, threads: SimulatedThreads):
        self._threads = threads
        self.done, self.time = False, 0.0
        self.followers: list[Callable[[], object]] = []

    def happen(self) -> None:
        self.done, self.time = True, self._threads.now()
        for follow in self.followers:
            follow()
        self.followers.clear()

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        if not self.done:
            gate = self._threads.lock()
            gate.acquire()
            self.followers.append(gate.release)
            gate.acquire()

    def elapsed_time(self, other: SimulatedEvent) -> float:
        """Milliseconds from this event to the other one."""
        return (other.time - self.time) * 1e3


class SimulatedStream:
    """Has the methods of torch.cuda.Stream that the engine uses."""

    def __init__(self, owner: SimulatedDevice):
        self._owner = owner
        self._line: deque[object] = deque()
        self._is_working = self._is_waiting = False
        self._free_since = 0.0
        self.idle: list[tuple[float, float]] = []  # intervals between pieces of work

    def spend(self, seconds: float, link: str) -> None:
        """Work for so many seconds, after all that is in the stream."""
        self._put((seconds, link))

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self._owner.threads)
        self._put(event)
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        """Later work of this stream begins after the event."""
        if not event.done:
            self._put([event])

    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def _put(self, item: object) -> None:
        self._line.append(item)
        if not (self._is_working or self._is_waiting):
            self._advance()

    def _advance(self) -> None:
        line = self._line
        while line:
            if isinstance(line[0], SimulatedEvent):
                line.popleft().happen()
            elif isinstance(line[0], list):
                (event,) = line[0]
                if not event.done:
                    self._is_waiting = True
                    event.followers.append(self._go_on)
                    return
                line.popleft()
            else:
                seconds, link = line.popleft()
                while line and isinstance(line[0], tuple) and line[0][1] == link:  # one timer for work without an event between
                    seconds += line.popleft()[0]
                self._is_working = True
                if (now := self._owner.threads.now()) > self._free_since:
                    self.idle.append((self._free_since, now))
                self._owner.links.begin(link, seconds, self._go_on)
                return

    def _go_on(self) -> None:
        if self._is_working:
            self._free_since = self._owner.threads.now()
        self._is_working = self._is_waiting = False
        self._advance()


class SimulatedDevice:
    """The CPU's tensors as those of a device with streams. See `use_streams`."""

    def __init__(self, threads: SimulatedThreads, links: Links):
        self.threads, self.links = threads, links
        self._of_thread = threading.local()
        self._default = SimulatedStream(self)

    def are_on(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def new(self, device: torch.device) -> SimulatedStream:
        return SimulatedStream(self)

    def current(self, device: torch.device | None = None) -> SimulatedStream:
        return getattr(self._of_thread, "stream", self._default)

    @property
    def current_link(self) -> str:
        """The link that this thread's work uses: "" for none."""
        return getattr(self._of_thread, "link", "")

    @property
    def is_in_stream(self) -> bool:
        """Whether this thread is inside `on`."""
        return hasattr(self._of_thread, "stream")

    @contextlib.contextmanager
    def on(self, stream: SimulatedStream, link: str) -> Iterator[None]:
        here = self._of_thread
        before = dict(vars(here))
        vars(here).update(stream=stream, link=link)
        try:
            yield
        finally:
            vars(here).clear()
            vars(here).update(before)

    def timed_event(self, device: torch.device) -> SimulatedEvent:
        return self.current().record_event()

    def keep_for(self, stream: SimulatedStream, tensor: torch.Tensor) -> None:
        """Memory has no bytes that later work could overwrite."""


class DeviceMemory:
    """The memory of tensors without bytes. Has the methods of CudaGauge. capacity_nbytes: None for no limit."""

    def __init__(self, capacity_nbytes: int | None):
        self._capacity_nbytes = capacity_nbytes
        self._allocated_nbytes = self._peak_nbytes = self._most_nbytes = self._num_failures = 0
        self.refused_nbytes = 0  # of all tensors, including the last one that did not fit

    def note(self, storage: torch.UntypedStorage) -> None:
        """The storage is new, and takes memory as long as it lives. Raises torch.OutOfMemoryError, as PyTorch does."""
        nbytes = storage.nbytes()
        self.take(nbytes)
        weakref.finalize(storage, self._change, -nbytes).atexit = False

    def take(self, nbytes: int) -> None:
        """Take memory, or give a negative number of bytes back. Raises torch.OutOfMemoryError, as PyTorch does."""
        if self._capacity_nbytes is not None and self._allocated_nbytes + nbytes > self._capacity_nbytes:
            self.refuse(nbytes, f"{nbytes} bytes, but {self.free_nbytes()} are free")
        self._change(nbytes)

    def refuse(self, nbytes: int, why: str) -> None:
        self._num_failures += 1
        self.refused_nbytes = self._allocated_nbytes + nbytes
        raise torch.OutOfMemoryError(f"simulated device: {why}")

    def capacity_nbytes(self) -> int:
        return self._capacity_nbytes

    def free_nbytes(self) -> int:
        return self._capacity_nbytes - self._allocated_nbytes

    def peak_nbytes(self) -> int:
        peak, self._peak_nbytes = self._peak_nbytes, self._allocated_nbytes
        return peak

    def num_failures(self) -> int:
        return self._num_failures

    def most_nbytes(self) -> int:
        return self._most_nbytes

    def _change(self, nbytes: int) -> None:
        self._allocated_nbytes += nbytes
        self._peak_nbytes = max(self._peak_nbytes, self._allocated_nbytes)
        self._most_nbytes = max(self._most_nbytes, self._allocated_nbytes)
