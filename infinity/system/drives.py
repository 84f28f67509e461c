"""The speed and the best settings of a drive: measured once per path, and kept in a file beside the swap files.

Knows file descriptors, queues, seconds, and shares in proportion to bandwidth. Must not know swap files, extents or ranks.

    drive = load(directory_fd) or measure(fd, nbytes)

[Note: how much goes to the kernel]
A request in the kernel cannot be overtaken, so a read that an op waits for comes behind all of them. More requests keep the drive
busier. Writes, for which nobody waits, are about as fast with few bytes in the kernel. The limit for writes is the largest with which a
demand read takes at most 2.5 times the time of a lone read. While reads wait, writes have at most half of all bytes. On two drives (2-3
GB/s, 0.7 ms a block) the limit is 2-6 MiB; with 8 MiB a demand read takes 5 to 8 times as long. Reads and writes together were 8 and 12
% faster with 8 MiB than with 2 MiB, in one run on each drive, so they have a larger limit.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aio_ext
from infinity.system.arena import Arena

CACHE_NAME = "infinity-drive.json"
SCRATCH_NBYTES = 128 << 20  # size of the file for measurements
COMPARED_NBYTES = 4 << 20  # size of each file in a comparison

_MIB = 1 << 20
_REQUEST_NBYTES = 4 * _MIB
_NUM_REQUESTS = 16  # in flight
_NUM_SOURCES = 5  # write buffers: the number does not divide the file's number of places, so a place gets other bytes each time
_NUM_BEFORE = 7  # writes before a demand read
_WRITES_NBYTES = [n * _MIB for n in (2, 3, 4, 6, 8, 12, 16, 24, 32)]  # limits for writes in the kernel
_PATIENCE = 2.5  # largest ratio of a demand read's time to a lone read's
_SECONDS = 0.07  # duration of one measurement of bandwidth
_SLOW_NBYTES_PER_S = 200e6  # for slower drives, trying settings would take a minute and gain little
_ROUNDS = 3
_ALIKE = 2.0  # if the fastest is more than so many times as fast as the slowest, the comparison is repeated
_FASTER = 1.05  # another setting must be so many times as fast in each round

MIXES = {"read": (1, 0), "write": (0, 1), "mixed": (14, 12)}  # (reads, writes); "mixed" is the ratio of a training step


def is_read(mix: str, number: int) -> bool:
    """Whether request `number` is a read; reads and writes are spread evenly."""
    reads, writes = MIXES[mix]
    return (number + 1) * reads // (reads + writes) > number * reads // (reads + writes)


@dataclass(frozen=True)
class Drive:
    """Settings of the queues of one path, and their measured speed. Fields 1 to 4: see aio_ext.Queue. num_queues: queues per path.
    nbytes_per_s: rate with 14 reads to 12 writes. block_s: seconds of a lone block. Both are 0 if not measured.
    """

    block_nbytes: int = _MIB
    inflight_nbytes: int = 8 * _MIB
    inflight_write_nbytes: int = 3 * _MIB
    depth: int = 64
    num_queues: int = 1
    nbytes_per_s: float = 0.0
    block_s: float = 0.0

    def queue(self, num_sharers: int = 1) -> aio_ext.Queue:
        """A queue with its share of the bytes in the kernel, if num_sharers ranks share the drive."""
        whole, writes = (
            max(2 * self.block_nbytes, nbytes // (self.num_queues * num_sharers))
            for nbytes in (self.inflight_nbytes, self.inflight_write_nbytes)
        )
        return aio_ext.Queue(
            block_nbytes=self.block_nbytes, inflight_nbytes=whole, inflight_write_nbytes=writes, depth=self.depth
        )

    def measured(self, nbytes_per_s: float, block_s: float) -> Drive:
        """The same settings with the measured speed, and with the depth that they need."""
        depth = max(32, 4 * self.inflight_nbytes // self.block_nbytes)  # small requests make small blocks
        return replace(self, depth=depth, nbytes_per_s=nbytes_per_s, block_s=block_s)


def measure(fd: int, nbytes: int) -> Drive:
    """Try settings on an O_DIRECT file of nbytes, at least 64 MiB, whose contents are lost. Takes some seconds. Raises OSError."""
    probe = Probe(fd, nbytes)
    try:
        start = time.perf_counter()
        probe.fill()
        is_slow = nbytes / (time.perf_counter() - start) < _SLOW_NBYTES_PER_S
        block_s = probe.read_seconds()
        if is_slow:
            return Drive(nbytes_per_s=probe.rate("mixed", Drive(), least=5 * _NUM_REQUESTS), block_s=block_s)
        drive = Drive(inflight_write_nbytes=probe.patient_write_nbytes(block_s))
        drive = probe.choose([drive, *(replace(drive, inflight_nbytes=nbytes) for nbytes in (16 * _MIB, 32 * _MIB))])
        blocks = [replace(drive, block_nbytes=nbytes) for nbytes in (512 << 10, 2 * _MIB)]
        drive = probe.choose([drive, *blocks])
        drive = probe.choose([drive, replace(drive, num_queues=2)])
        rate = statistics.median(probe.rate("mixed", drive) for _ in range(_ROUNDS))
        probe.check()
        return drive.measured(rate, block_s)
    finally:
        probe.close()


def compare(fds: dict[Path, int]) -> dict[Path, float]:
    """Bytes a second of O_DIRECT files of COMPARED_NBYTES each, whose contents are lost: half reads, half writes, the best of three rounds.

    All files take turns in each round. If they differ by more than a factor of two, three more rounds follow, because other work may
    have slowed the first rounds. Moves 16 to 28 MiB a file: about 50 ms on an SSD of 2 GB/s, half a second at 60 MB/s. Raises OSError
    with the path.
    """
    request, rates = COMPARED_NBYTES // 8, dict.fromkeys(fds, 0.0)
    noise = os.urandom(request)  # some drives are faster with zeros
    with contextlib.ExitStack() as stack:
        memory = memoryview(stack.enter_context(mmap.mmap(-1, COMPARED_NBYTES)))
        stack.callback(memory.release)
        buffers = [memory[start : start + request] for start in range(0, COMPARED_NBYTES, request)]
        stack.callback(lambda: [buffer.release() for buffer in buffers])
        queues = {path: stack.enter_context(Drive().queue()) for path in fds}

        def move(path: Path, num_reads: int) -> float:
            start = time.perf_counter()
            try:
                tickets = [
                    (queues[path].read if number % 2 < num_reads else queues[path].write)(fds[path], buffer, number * request)
                    for number, buffer in enumerate(buffers)
                ]
                for ticket in tickets:
                    ticket.wait()
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error
            return COMPARED_NBYTES / (time.perf_counter() - start)

        for buffer in buffers:
            buffer[:] = noise
        for path in fds:
            move(path, 0)  # reads of unwritten bytes do not reach the drive
        for number in range(2 * _ROUNDS):
            if number == _ROUNDS and max(rates.values()) <= _ALIKE * min(rates.values()):
                break
            for path in fds:
                rates[path] = max(rates[path], move(path, 1))
    return rates


def load(directory_fd: int) -> Drive | None:
    """The earlier measurement in this directory, on the same device; None if the file is missing or not sensible."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError), contextlib.ExitStack() as stack:
        fd = os.open(CACHE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
        stack.callback(os.close, fd)
        content = json.loads(os.read(fd, 4096))
        drive = Drive(**content["drive"])
        if content["device"] == os.fstat(directory_fd).st_dev and _is_sensible(drive):
            return drive
    return None


def store(directory_fd: int, drive: Drive) -> None:
    """Keep a measurement for the next run. A directory that refuses the file is measured each time."""
    content = {
        "about": "measured by infinity; delete to measure again, or edit",
        "device": os.fstat(directory_fd).st_dev,
        "drive": asdict(drive),
    }
    aside = f".{CACHE_NAME}.{os.getpid()}"
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(aside, flags, 0o600, dir_fd=directory_fd), "w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
        os.replace(aside, CACHE_NAME, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)


def shares(num_units: int, weights: list[float], held: list[float]) -> list[int]:
    """Units for each path in proportion to its weight. The remainder goes to the path that is farthest behind with the units so far."""
    weights = [max(weight, max(weights) / 256) for weight in weights]
    given = [int(num_units * weight / sum(weights)) for weight in weights]
    for _ in range(num_units - sum(given)):
        least = min(range(len(weights)), key=lambda path: (held[path] + given[path]) / weights[path])
        given[least] += 1
    return given


def _is_sensible(drive: Drive) -> bool:
    """Whether the settings can make a queue; a person may have edited the file."""
    whole = (drive.block_nbytes, drive.inflight_nbytes, drive.inflight_write_nbytes, drive.depth, drive.num_queues)
    return (
        all(type(value) is int and value > 0 for value in whole)
        and drive.block_nbytes % 4096 == 0
        and drive.block_nbytes <= drive.inflight_nbytes <= 1 << 30
        and drive.inflight_write_nbytes <= 1 << 30
        and drive.depth <= 4096
        and drive.num_queues <= 16
        and all(isinstance(value, (int, float)) and 0 <= value < 1e15 for value in (drive.nbytes_per_s, drive.block_s))
    )


class Probe:
    """A written O_DIRECT file of nbytes, at least 64 MiB, and measurement memory on huge pages.

    The last read into each buffer is compared with the written bytes, outside the timed part. All methods raise OSError.
    """

    def __init__(self, fd: int, nbytes: int):
        self.fd = fd
        self.num_requests = nbytes // _REQUEST_NBYTES
        self._arena = Arena()
        memory = self._arena.region((_NUM_SOURCES + _NUM_REQUESTS) * _REQUEST_NBYTES).buffer
        buffers = [memory[start : start + _REQUEST_NBYTES] for start in range(0, len(memory), _REQUEST_NBYTES)]
        self._sources, self._buffers = buffers[:_NUM_SOURCES], buffers[_NUM_SOURCES:]
        for source in self._sources:
            source[:] = os.urandom(_REQUEST_NBYTES)  # some drives are faster with zeros
        self._sums = [aio_ext.crc32c(source) for source in self._sources]
        self._holds: dict[int, int] = {}  # by place in the file: the source of the last write
        self._num_writes = 0

    def close(self) -> None:
        self._sources, self._buffers = [], []
        self._arena.close()

    def fill(self) -> None:
        """Write every place, because reads of unwritten bytes do not reach the drive."""
        with Drive(inflight_nbytes=32 * _MIB).queue() as queue:
            for ticket in [self._write(queue, place) for place in range(self.num_requests)]:
                ticket.wait()

    def read_seconds(self, writes_nbytes: int = 0, nbytes: int = _MIB) -> float:
        """Seconds of a demand read, alone or behind queued writes with writes_nbytes of them in the kernel."""
        seconds = []
        with Drive(inflight_write_nbytes=writes_nbytes or _MIB).queue() as queue:
            for i in range(11):
                writes = [self._write(queue, 1 + place) for place in range(_NUM_BEFORE if writes_nbytes else 0)]
                time.sleep(0.002)  # until the writes are in the kernel
                start = time.perf_counter()
                place = i % 4 if writes else i * 7 % (4 * self.num_requests)
                queue.read(self.fd, self._buffers[0][:nbytes], place * _MIB, priority=aio_ext.DEMAND).wait()
                seconds.append(time.perf_counter() - start)
                for ticket in writes:
                    ticket.wait()
        return statistics.median(seconds)

    def patient_write_nbytes(self, block_s: float) -> int:
        """The limit for writes in the kernel, see [Note: how much goes to the kernel]. block_s: seconds of a lone read."""
        patient = itertools.takewhile(lambda nbytes: self.read_seconds(nbytes) <= _PATIENCE * block_s, _WRITES_NBYTES[1:])
        return max(patient, default=_WRITES_NBYTES[0])

    def rate(self, mix: str, drive: Drive, *, least: int = _NUM_REQUESTS) -> float:
        """Bytes a second, from the first request to the end of the last, over at least `least` requests. With few requests, the last ones
        may all be reads or all be writes.
        """
        tickets: list[aio_ext.Ticket] = []
        read: dict[int, int] = {}  # by number of a buffer: the expected source
        with contextlib.ExitStack() as stack:
            queues = [stack.enter_context(drive.queue()) for _ in range(drive.num_queues)]
            start, number = time.perf_counter(), 0
            while number < least or time.perf_counter() - start < _SECONDS:
                if number >= _NUM_REQUESTS:
                    tickets[number - _NUM_REQUESTS].wait()
                place = number % self.num_requests
                queue = queues[place % len(queues)]
                if is_read(mix, number):
                    read[number % _NUM_REQUESTS] = self._holds[place]
                    tickets.append(queue.read(self.fd, self._buffers[number % _NUM_REQUESTS], place * _REQUEST_NBYTES))
                else:
                    tickets.append(self._write(queue, place))
                number += 1
            for ticket in tickets[-_NUM_REQUESTS:]:
                ticket.wait()
            seconds = time.perf_counter() - start
        for buffer, source in read.items():
            self._compare(self._buffers[buffer], source)
        return number * _REQUEST_NBYTES / seconds

    def check(self) -> None:
        """Read the whole file and compare it with the written bytes."""
        with Drive().queue() as queue:
            for place, source in self._holds.items():
                queue.read(self.fd, self._buffers[0], place * _REQUEST_NBYTES).wait()
                self._compare(self._buffers[0], source)

    def choose(self, drives: list[Drive]) -> Drive:
        """The first drive, unless others are clearly faster in every round; then the fastest of those."""
        rates = [[self.rate("mixed", drive) for drive in drives] for _ in range(_ROUNDS)]
        gains = [min(rate[i] / rate[0] for rate in rates) for i in range(len(drives))]
        best = max(range(len(drives)), key=lambda i: gains[i])
        return drives[best] if gains[best] > _FASTER else drives[0]

    def _write(self, queue: aio_ext.Queue, place: int) -> aio_ext.Ticket:
        source = self._holds[place] = self._num_writes % _NUM_SOURCES
        self._num_writes += 1
        return queue.write(self.fd, self._sources[source], place * _REQUEST_NBYTES)

    def _compare(self, buffer: memoryview, source: int) -> None:
        if aio_ext.crc32c(buffer) != self._sums[source]:
            raise OSError(errno.EIO, "the read bytes differ from the written bytes")
