"""The owner of a swap directory: locks of living ranks, and files of dead runs.

Knows names, locks and folders of one path. Must not know the content of files, or queues.

[Note: whose directory it is]
In each directory a rank holds `infinity-rank<rank>.lock` with flock for life. The file contains pid and run. Swap files are
`infinity-<run>/rank<rank>.swap`. Code that reads or changes these names holds a short flock on the directory itself, so no intermediate
state is visible. An arriving rank is refused if a living rank has the same number, or belongs to another run. The rank removes lock
files that no process holds, and folders of runs without a living rank. Locks belong to the open file, and a forked child (a data
loader's worker) would keep them after the parent's death. Children therefore close them at once. Ranks of one run get the run's name
from the launcher's environment, without communication.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity.errors import SwapError

LOCK_NAME = re.compile(r"infinity-rank(\d+)\.lock")
FOLDER_NAME = re.compile(r"infinity-[0-9a-f]{12}")
FILE_NAME = re.compile(r"rank\d+\.swap")
GUARD_SECONDS = 60.0

# Common to the ranks of one run under torchrun, Slurm and manual start.
RUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")


def reclaim(paths: Sequence[str | os.PathLike]) -> None:
    """Remove files of dead runs in directories, like each Swap does. Skips directories that are busy or that a Swap would refuse."""
    for path in map(Path, paths):
        with contextlib.suppress(OSError), guard(path, patience=0.0):
            remove_dead(path, {run for _, _, run in living_ranks(path)})


def run_name(world: int) -> str:
    """Twelve hexadecimal digits, the same on all ranks of a run."""
    words = [os.environ.get(variable, "") for variable in RUN_VARIABLES]
    if world == 1:
        words = [str(os.getpid()), os.urandom(16).hex()]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


@contextlib.contextmanager
def guard(path: Path, patience: float | None = None) -> Iterator[None]:
    """Held while names in the directory are read or changed; see [Note: whose directory it is]. Raises SwapError if another process holds
    the guard for `patience` seconds, by default GUARD_SECONDS.
    """
    patience = GUARD_SECONDS if patience is None else patience
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"another process has locked this directory for {patience:.0f} s to set up swap: end that process"
                    raise SwapError(errno.EBUSY, text, str(path)) from None
                time.sleep(0.002)
        yield
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough if a child was forked meanwhile
    finally:
        os.close(fd)


def living_ranks(path: Path) -> list[tuple[int, str, str]]:
    """The holders of locks in the directory: rank, pid and run. Removes the locks of dead ranks."""
    living = []
    for name in os.listdir(path):
        match = LOCK_NAME.fullmatch(name)
        if not match:
            continue
        fd = os.open(path / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path / name)
        except BlockingIOError:
            pid, _, run = os.pread(fd, 256, 0).decode(errors="replace").strip().partition(" ")
            living.append((int(match[1]), pid, run))
        finally:
            os.close(fd)
    return living


def remove_dead(path: Path, living_runs: set[str]) -> None:
    """Remove the swap of dead runs: only folders with the engine's names, owner and kind, and only files with the engine's names."""
    for name in os.listdir(path):
        if not FOLDER_NAME.fullmatch(name) or name.removeprefix("infinity-") in living_runs:
            continue
        try:
            fd = os.open(path / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                for file in filter(FILE_NAME.fullmatch, os.listdir(fd)):
                    os.unlink(file, dir_fd=fd)
                with contextlib.suppress(OSError):
                    os.rmdir(path / name)
        finally:
            os.close(fd)
