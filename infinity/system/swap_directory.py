"""One swap directory: a rank's file there, and queues.

Knows names, locks, files and queues of one path. Must not know extents, which span several paths.
"""

import collections
import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aio_ext
from infinity.errors import ConfigError, SwapError, refuses_direct, warn
from infinity.system import drives
from infinity.system.mounts import MEMORY_FILESYSTEMS, mount_at
from infinity.system.swap_errors import REMEDIES, swap_error
from infinity.system.swap_owner import LOCK_NAME, guard, living_ranks, remove_dead

ALIGNMENT = 4096  # of extents, offsets and sizes: accepted by every drive in use, see aio_ext.direct_alignment
SUM_NBYTES = 4  # of a checksum, one for each ALIGNMENT bytes, as in aio_ext


@dataclass(frozen=True)
class Stripe:
    """A run of bytes in the swap file of one path: index of the path, offset and size in bytes."""

    path: int
    offset: int
    nbytes: int


class Directory:
    """One path. The lock and the folder exist from the start, the file and the queue from `make_file` on."""

    def __init__(self, path: Path, run: str, rank: int, checksums: bool):
        self.path = path
        self.run, self.rank = run, rank
        self.drive = drives.Drive()
        self.nbytes = 0  # size of the file, as allocated so far
        self.queues: list[aio_ext.Queue] = []
        self.file = -1
        self._lock_fd = self._folder_fd = -1
        self._lock_path = path / f"infinity-rank{rank}.lock"
        self._folder = path / f"infinity-{run}"
        self.file_path = self._folder / f"rank{rank}.swap"
        self._stripe_numbers: dict[int, int] = {}  # by offset
        self._sums: dict[int, memoryview] | None = {} if checksums else None  # by a stripe's offset, see [Note: checksums]

    @property
    def is_claimed(self) -> bool:
        return self._lock_fd >= 0

    def claim(self, must_measure: bool) -> None:
        """Take the directory, remove files of dead runs, and get the drive's settings."""
        try:
            status = os.stat(self.path)
            self.identity = (status.st_dev, status.st_ino)
            with guard(self.path):
                runs = self._refuse_or_runs(self.run, self.rank)
                remove_dead(self.path, runs)
                self._take(self.run)
            try:
                with guard(self.path):  # the first rank measures, the others read the result
                    self.drive = self._known_drive(must_measure)
            except BaseException:
                self.release()
                raise
        except BaseException as error:
            self._close_descriptors()
            if isinstance(error, OSError) and not isinstance(error, SwapError):
                raise swap_error(error.errno, f"the swap directory cannot be used ({error.strerror})", error.filename or self.path) from error
            raise

    @contextlib.contextmanager
    def scratch(self, nbytes: int) -> Iterator[int | None]:
        """The descriptor of a file for measurements, removed at the end; None without direct I/O or without room. Raises SwapError."""
        try:
            try:
                refusal = self._open_file(nbytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                refusal = error.strerror  # reserve() reports the missing amount
            yield self.file if refusal is None else None
        except OSError as error:
            raise swap_error(error.errno, f"measuring the drive failed ({error.strerror})", self.file_path) from error
        finally:
            self.remove_file()

    def append(self, nbytes: int) -> int:
        """Append a stripe; returns the offset."""
        offset = self.nbytes
        self._stripe_numbers[offset] = len(self._stripe_numbers)
        if self._sums is not None:
            self._sums[offset] = memoryview(bytearray(nbytes // ALIGNMENT * SUM_NBYTES))
        self.nbytes += nbytes
        return offset

    def make_file(self, num_sharers: int) -> None:
        if not self.nbytes:
            return
        try:
            refusal = self._open_file(self.nbytes)
            if refusal:
                warn(
                    f"swap in {self.path}: {refusal}; it works through the page cache, slower and with more memory. Name a "
                    "directory on a local ext4 or xfs drive."
                )
            for _ in range(self.drive.num_queues):
                self.queues.append(self.drive.queue(num_sharers))
        except OSError as error:
            text = f"the swap file of {_gib(self.nbytes)} cannot be made ({error.strerror})"
            raise swap_error(error.errno, text, self.file_path) from error

    def grow(self, stripe: Stripe, num_sharers: int) -> None:
        """Extend the file to contain an appended stripe."""
        if self.file < 0:
            try:
                self.make_file(num_sharers)
            except BaseException:
                self.remove_file()  # otherwise a file without queues would exist
                raise
            return
        try:
            os.posix_fallocate(self.file, stripe.offset, stripe.nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.file, stripe.offset)  # frees the blocks that the filesystem has allocated before the error
            text = f"the swap file cannot grow by {_gib(stripe.nbytes)} ({error.strerror})"
            raise swap_error(error.errno, text, self.file_path) from error

    def queue_of(self, stripe: Stripe) -> aio_ext.Queue:
        """The queue of a stripe, always the same: a queue keeps requests for the same bytes in order."""
        return self.queues[self._stripe_numbers[stripe.offset] % len(self.queues)]

    def sums_of(self, stripe: Stripe, offset: int, nbytes: int) -> memoryview | None:
        """The checksums of a piece of a stripe; None without checksums."""
        if self._sums is None:
            return None
        return self._sums[stripe.offset][offset // ALIGNMENT * SUM_NBYTES : (offset + nbytes) // ALIGNMENT * SUM_NBYTES]

    def stats(self) -> dict:
        each = [queue.stats() for queue in self.queues]
        return {name: sum(stats[name] for stats in each) for name in each[0]}

    def forget_drive(self) -> None:
        """The next start measures the drive again."""
        with contextlib.suppress(OSError), guard(self.path):  # a person may have removed the file, or may not let us
            os.unlink(self.path / drives.CACHE_NAME)

    def remove_file(self) -> None:
        while self.queues:
            self.queues.pop().close()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
            with contextlib.suppress(OSError):  # a temporary file, which another process may have removed
                os.unlink(self.file_path.name, dir_fd=self._folder_fd)

    def reserved_nbytes(self) -> int:
        """Bytes that the ranks of this run hold in this directory."""
        total = 0
        for name in os.listdir(self._folder_fd):
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(name, dir_fd=self._folder_fd, follow_symlinks=False).st_blocks * 512
        return total

    def release(self) -> None:
        if self._lock_fd < 0:
            return
        for queue in self.queues:
            queue.close()  # before the guard: this may take a while
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # the directory may be gone, and needs no guard then
                stack.enter_context(guard(self.path))
            self.remove_file()
            with contextlib.suppress(OSError):
                locks = [name for name in os.listdir(self.path) if LOCK_NAME.fullmatch(name)]
                if locks == [self._lock_path.name]:  # another rank may be about to create a file there
                    os.rmdir(self._folder)
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._lock_fd), os.stat(self._lock_path, follow_symlinks=False)):
                    os.unlink(self._lock_path)
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)  # also for children that could not close the descriptor
            self._close_descriptors()

    def remove_names(self) -> None:
        """Remove the names only. The file's contents and the lock go with this process, which is about to end."""
        if self._lock_fd >= 0:
            for remove, path in ((os.unlink, self.file_path), (os.rmdir, self._folder), (os.unlink, self._lock_path)):
                with contextlib.suppress(OSError):
                    remove(path)

    def disown(self) -> None:
        """In a forked child: close the parent's lock and files."""
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in (self._lock_fd, self._folder_fd, self.file):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._lock_fd = self._folder_fd = self.file = -1

    def _refuse_or_runs(self, run: str, rank: int) -> set[str]:
        """The runs of the living ranks here, at most this run. Removes the locks of dead ranks."""
        living = living_ranks(self.path)
        for its_rank, pid, its_run in living:
            if its_rank == rank or its_run != run:
                text = f"the swap directory is in use by rank {its_rank} of a run with process {pid}: end that run, or name "
                text += "another directory in `swap_dirs`"
                if pid == str(os.getpid()):
                    text += "; that is this process: close() the engine that has it, infinity.engine_of(its_model).close(), or give each "
                    text += "model a Config with directories of its own"
                raise SwapError(errno.EBUSY, text, str(self.path))
        return {its_run for _, _, its_run in living}

    def _take(self, run: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock_fd = os.open(self._lock_path, flags, 0o600)
        os.fchmod(self._lock_fd, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._lock_fd, f"{os.getpid()} {run}\n".encode())
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                self._folder_fd = os.open(self._folder, flags)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    text = "a symlink or file is in the place of this run's swap folder: remove it"
                    raise SwapError(error.errno, text, str(self._folder)) from None
                raise
            if os.fstat(self._folder_fd).st_uid != os.geteuid():
                text = "the swap folder of this run belongs to another user: remove it or name another directory"
                raise SwapError(errno.EPERM, text, str(self._folder))
            os.fchmod(self._folder_fd, 0o700)
            with contextlib.suppress(FileNotFoundError):  # of an earlier run with the same name and number
                os.unlink(self.file_path.name, dir_fd=self._folder_fd)
        except BaseException:
            os.unlink(self._lock_path)
            raise

    def _known_drive(self, must_measure: bool) -> drives.Drive:
        """The drive as measured in this directory, now or earlier."""
        with contextlib.ExitStack() as stack:
            directory_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, directory_fd)
            drive = drives.load(directory_fd)
            if drive is not None or not must_measure:
                return drive or drives.Drive()
            try:
                stack.callback(self.remove_file)
                if self._open_file(drives.SCRATCH_NBYTES) is not None:
                    return drives.Drive()  # otherwise the page cache would be measured
                drive = drives.measure(self.file, drives.SCRATCH_NBYTES)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return drives.Drive()  # the swap has no room either, and reserve() reports the missing amount
                raise swap_error(error.errno, f"measuring the drive failed ({error.strerror})", self.file_path) from error
            drives.store(directory_fd, drive)
            return drive

    def _open_file(self, nbytes: int) -> str | None:
        """Create the swap file with nbytes. Returns why direct I/O does not work, or None."""
        # Created without O_DIRECT: a filesystem that refuses O_DIRECT may create the file nevertheless.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.file = os.open(self.file_path.name, flags, 0o600, dir_fd=self._folder_fd)
        os.fchmod(self.file, 0o600)
        os.posix_fallocate(self.file, 0, nbytes)
        return self._go_direct()

    def _go_direct(self) -> str | None:
        """Reopen the file with O_DIRECT. Returns why that does not work, or None. Raises OSError for other errors, such as missing
        descriptors.
        """
        filesystem = _filesystem_of(self.path)
        refusal = f"{filesystem} keeps files in memory" if filesystem in MEMORY_FILESYSTEMS else None
        if not refusal:
            try:
                direct = _open_direct(self.file_path.name, self._folder_fd)
            except OSError as error:
                if not refuses_direct(error):
                    raise
                refusal = f"{filesystem} refuses O_DIRECT ({error.strerror})"
            else:
                try:
                    refusal = _direct_refusal(direct, filesystem)
                except BaseException:  # an open descriptor would keep the space of the removed file
                    os.close(direct)
                    raise
                os.close(self.file if refusal is None else direct)
                self.file = direct if refusal is None else self.file
        return refusal


def room_nbytes(paths: Sequence[str | os.PathLike]) -> int:
    """The most bytes that equal parts on all paths can take together. Filesystems keep a hundredth of their room for themselves. For a path
    that does not exist yet, the nearest existing folder above counts.
    """
    room, sharers = {}, collections.Counter()  # by filesystem
    for path in map(Path, paths):
        here = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))
        status, filesystem = os.statvfs(here), os.stat(here).st_dev
        room[filesystem] = status.f_bavail * status.f_frsize * 99 // 100
        sharers[filesystem] += 1
    return min(len(paths) * nbytes // sharers[filesystem] for filesystem, nbytes in room.items())


def check_paths(paths: list[Path]) -> None:
    if not paths:
        raise ConfigError("no swap directory: name at least one in `swap_dirs`")
    seen = {}
    for path in paths:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise ConfigError(f"swap directory {path} does not exist: create it (mkdir -p), ideally one on each drive") from None
        except OSError as error:
            raise swap_error(error.errno, f"the swap directory cannot be used ({error.strerror})", path) from None
        if not stat.S_ISDIR(status.st_mode):
            raise SwapError(errno.ENOTDIR, "the swap path is not a directory: name a directory in `swap_dirs`", str(path))
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise SwapError(errno.EACCES, f"the swap directory is not writable; {REMEDIES[errno.EACCES]}", str(path))
        twin = seen.setdefault((status.st_dev, status.st_ino), path)
        if twin is not path:
            raise ConfigError(f"swap directories {twin} and {path} are the same one: name it once")


def _open_direct(name: str, folder_fd: int) -> int:
    return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)


def _direct_refusal(fd: int, filesystem: str) -> str | None:
    """Why direct I/O does not work on this file, which has no data yet; or None. Raises OSError for other errors."""
    memory, offset = aio_ext.direct_alignment(fd)
    if not memory:
        return f"{filesystem} has no O_DIRECT"
    if ALIGNMENT % memory or ALIGNMENT % offset:
        return f"{filesystem} wants O_DIRECT aligned to {memory} and {offset} bytes"
    with mmap.mmap(-1, ALIGNMENT) as page:
        try:
            os.pwrite(fd, page, 0)
        except OSError as error:
            if not refuses_direct(error):
                raise
            return f"{filesystem} refuses O_DIRECT writes ({error.strerror})"
    return None


def _filesystem_of(path: Path) -> str:
    """The type, such as ext4."""
    try:
        return mount_at(path).kind
    except (OSError, LookupError):
        return "this filesystem"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
