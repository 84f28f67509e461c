"""The NVMe tier of one rank: preallocated swap files, one per path, with direct I/O.

Knows extents, and transfers over several directories. Must not know records, chunks, tensors, devices or torch.distributed. Buffers are
any contiguous memory, and the caller passes the number of ranks that share the directories. Order of the file: public classes (Extent,
Transfer, Swap), then exit, fork and SIGTERM.

[Note: checksums]
Host memory holds the CRC-32C of each 4096 written bytes, a thousandth of the bytes on NVMe. The first wait for a read compares the
checksums, see aio_ext, and no byte from a drive is used before. This detects flipped bits, zeroed blocks, and blocks of another place or
an earlier write. The unit is a page, because all reads are whole pages, whatever the size of the write.
"""

import atexit
import contextlib
import errno
import gc
import hashlib
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aio_ext
from infinity.errors import ConfigError, SwapError, UsageError
from infinity.output import if_several, say
from infinity.sizes import format_bytes
from infinity.system import drives, swap_paths
from infinity.system.path_rates import PathRates
from infinity.system.swap_directory import ALIGNMENT, Directory, Stripe, check_paths
from infinity.system.swap_errors import swap_error
from infinity.system.swap_owner import guard, run_name
from infinity.system.waits import waits

STRIPE_UNIT = 1 << 20
MEASURE_FROM_NBYTES = 1 << 30  # of swap per path: for less, defaults suffice, and measuring would take longer than the run


@dataclass(frozen=True)
class Extent:
    """A range of swap, nbytes a multiple of 4096: its stripes, one after the other."""

    nbytes: int
    stripes: tuple[Stripe, ...]


class Transfer:
    """An active read or write: one ticket per stripe."""

    __slots__ = ("_parts", "nbytes", "op", "what")

    def __init__(self, op: str, parts: list[tuple[aio_ext.Ticket, Path]], nbytes: int, what: str = ""):
        self.op = op  # "read" or "write"
        self._parts = parts
        self.nbytes = nbytes
        self.what = what  # begins the text of an error

    def wait(self, timeout: float | None = None) -> bool:
        """True once all is moved, False after `timeout` seconds. Raises SwapError if a stripe failed, at each call.

        Even then no stripe is in flight any more: the buffer is free.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        failure = None
        with waits(self.in_words):
            for ticket, path in self._parts:
                try:
                    if not ticket.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                        return False
                except OSError as error:
                    failure = failure or swap_error(error.errno, self.what + error.strerror, path)
        if failure:
            raise failure
        return True

    def in_words(self) -> str:
        """The awaited transfer, in words."""
        what = f", {self.what.removesuffix(': ')}" if self.what else ""
        return f"a {self.op} of {format_bytes(self.nbytes)} {'from' if self.op == 'read' else 'to'} NVMe{what}"

    @property
    def done(self) -> bool:
        """Whether the transfer is over, successful or not."""
        return all(ticket.done for ticket, _ in self._parts)

    def promote(self, priority: int = aio_ext.DEMAND) -> None:
        """Overtake requests of lower priority, together with the writes that this transfer waits for."""
        for ticket, _ in self._parts:
            ticket.promote(priority)

    def __repr__(self) -> str:
        return f"Transfer({self.nbytes / 2**20:.1f} MiB, {'done' if self.done else 'under way'})"


class Swap:
    """The swap files of one rank. Call `allocate` for all extents, then `reserve` once, then `read`, `write` and `extend`.

    paths: existing directories, ideally one per drive. rank, world: this rank among the ranks that share the directories on this node.
    run: a name that all ranks of this run pass, and no other run; by default from the launcher's environment. expected_nbytes:
    approximate sum of all extents. From 1 GiB per path on, new drives are measured, in seconds, and the results stay in
    infinity-drive.json. Below, several paths are compared with each other, in some tens of milliseconds. checksums: whether reads are
    compared with the written bytes, see [Note: checksums].

    Rank 0 warns of paths on one drive, and of a path with less than half of the fastest one's rate. It prints a line if a path becomes slow
    later.

    Raises ConfigError for paths that do not exist or are named twice. Raises SwapError (an OSError with errno and filename) for paths
    that are no directory, not writable, or in use by another run. Files of a dead run are removed.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike],
        *,
        rank: int = 0,
        world: int = 1,
        run: str | None = None,
        expected_nbytes: int = 0,
        checksums: bool = True,
    ):
        if not 0 <= rank < world:
            raise ConfigError(f"rank={rank} of world={world}: expected 0 <= rank < world")
        paths = [Path(path) for path in paths]
        check_paths(paths)
        self.world = world
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closing = threading.RLock()
        self._growing = threading.Lock()
        self._moved = {"read": 0, "write": 0}
        self._reserved = self._closed = False
        self._directories: list[Directory] = []
        run = run_name(world) if run is None else hashlib.sha256(run.encode()).hexdigest()[:12]
        must_measure = expected_nbytes >= MEASURE_FROM_NBYTES * len(paths)
        _live.add(self)
        _clean_up_on_sigterm()
        try:
            for path in paths:
                self._directories.append(Directory(path, run, rank, checksums))
                if self._is_held_here(path):
                    gc.collect()  # perhaps by a dropped object of this program, as after a notebook's cell runs again
                self._directories[-1].claim(must_measure)
            self._rates = PathRates(paths, self._weigh(warns=rank == 0))
            self._says = rank == 0
        except BaseException:
            self.close()
            raise

    def _is_held_here(self, path: Path) -> bool:
        """Whether another Swap of this process has the directory."""
        status = os.stat(path)
        others = [directory for swap in list(_live) if swap is not self for directory in swap._directories]
        return (status.st_dev, status.st_ino) in [directory.identity for directory in others if directory.is_claimed]

    def _weigh(self, *, warns: bool) -> list[float]:
        """Bytes a second of each path, if all were measured, or if the comparison finds a slow path; otherwise equal weights."""
        rates = {directory.path: directory.drive.nbytes_per_s for directory in self._directories}
        if len(rates) > 1 and not all(rates.values()):
            rates = self._compare()
        slow = swap_paths.slow_directories(rates) if len(rates) > 1 and all(rates.values()) else []
        for remark in [*swap_paths.shared_drives(list(rates)), *slow] if warns else ():
            warnings.warn_explicit(str(remark), RuntimeWarning, "infinity", 0, registry=_warned)  # no line of the engine is at fault
        is_measured = all(directory.drive.nbytes_per_s for directory in self._directories)
        return list(rates.values()) if is_measured or slow else [1.0] * len(rates)

    def _compare(self) -> dict[Path, float]:
        """Bytes a second of each path; 0 for all if a path has no direct I/O or no room. One rank at a time."""
        with contextlib.ExitStack() as stack:
            for directory in sorted(self._directories, key=lambda directory: directory.identity):
                stack.enter_context(guard(directory.path))
            fds = {directory.path: stack.enter_context(directory.scratch(drives.COMPARED_NBYTES)) for directory in self._directories}
            if None in fds.values():
                return dict.fromkeys(fds, 0.0)
            try:
                return drives.compare(fds)
            except OSError as error:
                raise swap_error(error.errno, f"measuring the drive failed ({error.strerror})", error.filename) from error

    def allocate(self, nbytes: int) -> Extent:
        """Plan a range of at least nbytes, rounded up to 4096; nothing is written yet. Raises UsageError after `reserve`.

        From 1 MiB per path on, the range is striped over the paths in whole MiB, in proportion to the measured bandwidth. Smaller ranges
        are not striped. In both cases the path that is farthest behind its share comes first.
        """
        if self._reserved or self._closed:
            raise UsageError("Swap.allocate after reserve() or close(): the file size is fixed; allocate all extents before, or use extend()")
        return self._lay_out(nbytes)

    def extend(self, nbytes: int) -> Extent:
        """Like `allocate`, after `reserve`: the files grow. Raises SwapError if a disk is full; the range is then lost."""
        self._check_usable(reserved=True)
        with self._growing:
            extent = self._lay_out(nbytes)
            for stripe in extent.stripes:
                self._directories[stripe.path].grow(stripe, num_sharers=self.world)
        return extent

    def _lay_out(self, nbytes: int) -> Extent:
        if nbytes <= 0:
            raise ValueError(f"an extent of {nbytes} bytes: expected a positive number")
        nbytes = _round_up(nbytes, ALIGNMENT)
        held = [directory.nbytes / STRIPE_UNIT for directory in self._directories]
        num_units = -(-nbytes // STRIPE_UNIT) if nbytes >= STRIPE_UNIT * len(held) else 1
        units = drives.shares(num_units, self._rates.weights, held)
        paths = sorted((path for path in range(len(held)) if units[path]), key=lambda path: held[path] / self._rates.weights[path])
        stripes, left = [], nbytes
        for path in paths:
            share = left if path == paths[-1] else units[path] * STRIPE_UNIT
            stripes.append(Stripe(path, self._directories[path].append(share), share))
            left -= share
        return Extent(nbytes, tuple(stripes))

    def reserve(self) -> None:
        """Create the files at their full size. Raises SwapError before any write if the ranks do not all fit.

        Warns if a filesystem has no direct I/O; the page cache is then used.
        """
        self._check_usable(reserved=False)
        with contextlib.ExitStack() as guards:
            for directory in sorted(self._directories, key=lambda directory: directory.identity):
                guards.enter_context(guard(directory.path))
            self._check_space()
            try:
                for directory in self._directories:
                    directory.make_file(num_sharers=self.world)
            except BaseException:
                for directory in self._directories:
                    directory.remove_file()
                raise
        self._reserved = True

    def read(
        self, extent: Extent, buffer, *, offset: int = 0, priority: int = aio_ext.PREFETCH, what: str = ""
    ) -> Transfer:
        """Fill the buffer (contiguous, writable) from the extent. Offset and the buffer's size are multiples of 4096.

        A read that overlaps an earlier write waits for the write, whatever the priorities. The text of an error begins with `what`. The
        caller must wait for the transfer before using any byte: the wait compares checksums.
        """
        return Transfer("read", *self._submit("read", extent, buffer, offset, priority, what), what)

    def write(self, extent: Extent, buffer, *, offset: int = 0, priority: int = aio_ext.WRITE, what: str = "") -> Transfer:
        """Write the buffer (contiguous) to the extent. The buffer must not change until the transfer is done."""
        return Transfer("write", *self._submit("write", extent, buffer, offset, priority, what), what)

    def path_of(self, extent: Extent) -> Path:
        """The file in which the extent begins."""
        return self._directories[extent.stripes[0].path].file_path

    @property
    def nbytes_per_s(self) -> float:
        """Rate of all paths together, measured with mixed reads and writes; 0 if a path was never measured."""
        rates = [directory.drive.nbytes_per_s for directory in self._directories]
        return sum(rates) if all(rates) else 0.0

    @property
    def read_nbytes(self) -> int:
        """Bytes requested from the disks so far."""
        return self._moved["read"]

    @property
    def write_nbytes(self) -> int:
        """Bytes given to the disks so far."""
        return self._moved["write"]

    def stats(self) -> dict[str, dict]:
        """By path, the sums of its queues' counters (see aio_ext); empty before `reserve` and after `close`."""
        return {str(directory.path): directory.stats() for directory in self._directories if directory.queues}

    def close(self) -> None:
        """Finish all requests, remove the files and release the directories. Idempotent. Also called at exit. Called on SIGTERM if the
        program has no handler of its own and the first Swap was created in the main thread.
        """
        if self._pid == os.getpid():
            with self._closing:
                for directory in self._directories:
                    directory.release()
        self._closed = True
        _live.discard(self)

    def __enter__(self) -> "Swap":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __del__(self):
        if hasattr(self, "_directories"):
            self.close()

    def __repr__(self) -> str:
        nbytes = sum(directory.nbytes for directory in self._directories)
        return f"Swap({', '.join(str(directory.path) for directory in self._directories)}: {nbytes / 2**30:.1f} GiB)"

    def _check_usable(self, *, reserved: bool) -> None:
        if self._pid != os.getpid():
            raise UsageError(f"this Swap belongs to process {self._pid}, not to its forked child {os.getpid()}")
        if self._closed:
            raise UsageError("this Swap is closed")
        if self._reserved != reserved:
            raise UsageError("call Swap.reserve() once, before the first read or write")

    def _submit(self, op: str, extent: Extent, buffer, offset: int, priority: int, what: str) -> tuple[list[tuple[aio_ext.Ticket, Path]], int]:
        """Hand a read or a write to the queues. Returns a ticket and a path for each stripe, and the number of bytes."""
        self._check_usable(reserved=True)
        self._measure_paths()  # before this transfer begins, because it takes a moment
        view = memoryview(buffer)
        if view.ndim != 1 or view.format != "B":
            view = view.cast("B")
        end = offset + view.nbytes
        if offset % ALIGNMENT or view.nbytes % ALIGNMENT or not 0 <= offset <= end <= extent.nbytes:
            raise ValueError(
                f"{op} of {view.nbytes} bytes at {offset} of an extent of {extent.nbytes}: expected multiples of {ALIGNMENT} "
                "within the extent"
            )
        parts, start = [], 0
        for stripe in extent.stripes:
            directory = self._directories[stripe.path]
            low, high = max(offset, start), min(end, start + stripe.nbytes)
            if low < high:
                queue, sums = directory.queue_of(stripe), directory.sums_of(stripe, low - start, high - low)
                submit = queue.read if op == "read" else queue.write
                try:
                    piece = view[low - offset : high - offset]
                    ticket = submit(directory.file, piece, stripe.offset + low - start, priority=priority, sums=sums)
                except OSError as error:
                    for ticket, _ in parts:  # no other code would wait until these release the buffer
                        with contextlib.suppress(OSError):
                            ticket.wait()
                    raise swap_error(error.errno, what + error.strerror, directory.file_path) from error
                parts.append((ticket, directory.file_path))
            start += stripe.nbytes
        with self._lock:
            self._moved[op] += view.nbytes
        return parts, view.nbytes

    def _measure_paths(self) -> None:
        """See [Note: a path that becomes slow] in path_rates.py. A path's queues work side by side. Rank 0 speaks for all ranks."""
        with self._lock:
            if not self._rates.is_due(sum(self._moved.values())):
                return
            counters = []
            for directory in self._directories:
                each = [queue.stats() for queue in directory.queues]
                nbytes = sum(stats["read_nbytes"] + stats["write_nbytes"] for stats in each)
                counters.append((nbytes, max((stats["busy_seconds"] for stats in each), default=0.0)))
            slow = self._rates.measure(counters)
        for path, remark in slow if self._says else ():
            self._directories[path].forget_drive()
            with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed: no reason to fail a transfer
                say(str(remark))

    def _check_space(self) -> None:
        """Check that all ranks of this node fit, each with as much as this one. Space that other ranks have reserved counts as available."""
        filesystems: dict[int, list[Directory]] = {}
        for directory in self._directories:
            filesystems.setdefault(directory.identity[0], []).append(directory)
        for directories in filesystems.values():
            status = os.statvfs(directories[0].path)
            available = status.f_bavail * status.f_frsize + sum(directory.reserved_nbytes() for directory in directories)
            needed = self.world * sum(_round_up(directory.nbytes, ALIGNMENT) for directory in directories)
            if needed > available:
                ranks = if_several(self.world, f" ({self.world} ranks)")
                raise SwapError(
                    errno.ENOSPC,
                    f"swap needs {needed:,} bytes{ranks} on this filesystem and {available:,} are available: free space there, "
                    "name another directory in `swap_dirs`, or raise host_memory or device_memory",
                    ", ".join(str(directory.path) for directory in directories),
                )


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


_live: "weakref.WeakSet[Swap]" = weakref.WeakSet()
_warned: dict = {}  # warnings that were shown, as the module `warnings` keeps them


def _close_all() -> None:
    for swap in list(_live):
        swap.close()


def _disown_all() -> None:
    for swap in list(_live):
        for directory in swap._directories:
            directory.disown()
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _clean_up_on_sigterm() -> None:
    """Remove the swap on SIGTERM, which ends the process. A handler of the program's own stays."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame) -> None:
    """Remove files without raising: an exception could be swallowed at any point of the program, or interrupt a change.

    Python calls this handler once the main thread is back from C, such as a collective. If the process is killed before, files remain,
    and the next run removes them.
    """
    for swap in [swap for swap in _live if swap._pid == os.getpid()]:  # a child may be here before it has disowned the parent's swap
        for directory in swap._directories:
            directory.remove_names()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
