"""The settings and rates of each drive, and of all drives at once.

Knows swap directories, probes and settings of drives. Must not know links, or the files of calibrate.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from infinity.errors import ConfigError, SwapError
from infinity.sizes import format_bytes
from infinity.system import drives
from infinity.system.drives import Drive
from infinity.system.mounts import MEMORY_FILESYSTEMS, mount_at
from infinity.tools.measure import figures, search
from infinity.tools.progress import Progress

LEAST_NBYTES = drives.SCRATCH_NBYTES  # of the measured file
MOST_NBYTES = 1 << 30


@dataclass
class TunedDrive:
    """A directory with a probe and figures. seen: rates of settings around the chosen setting. alone, together: figures by mix."""

    path: Path
    probe: drives.Probe
    drive: Drive = Drive()
    seen: dict[tuple[str, int], dict[str, float]] | None = None
    alone: dict[str, figures.Figure] | None = None
    together: dict[str, figures.Figure] | None = None


@contextlib.contextmanager
def probe_in(path: Path) -> Iterator[drives.Probe]:
    """A probe on a written file without a name: the kernel frees the file when the process ends. Errors name the directory."""
    with _named(path), contextlib.ExitStack() as stack:
        status = os.statvfs(path)
        free = status.f_bavail * status.f_frsize
        nbytes = min(MOST_NBYTES, free // 4) // LEAST_NBYTES * LEAST_NBYTES
        if not nbytes:
            needed, has = format_bytes(4 * LEAST_NBYTES), format_bytes(free)
            raise ConfigError(f"{path}: calibrate needs {needed} of free space, {has} are free: free space there or name another directory")
        fd, name = tempfile.mkstemp(prefix=".infinity-tune-", dir=path)
        stack.callback(os.close, fd)
        try:
            direct = _open_direct(path, name)
        finally:
            os.unlink(name)
        if direct is not None:
            stack.callback(os.close, direct)
        fd = fd if direct is None else direct
        os.posix_fallocate(fd, 0, nbytes)
        probe = stack.enter_context(contextlib.closing(drives.Probe(fd, nbytes)))
        probe.fill()
        yield probe


def _open_direct(path: Path, name: str) -> int | None:
    """Open the file for direct I/O. Returns None, with a warning, if direct I/O does not work."""
    kind = mount_at(path).kind
    reason = f"{kind} keeps files in memory"
    if kind not in MEMORY_FILESYSTEMS:
        try:
            return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            reason = f"{kind} refuses O_DIRECT ({error.strerror})"
    print(f"infinity: warning: {path}: {reason}: rates there are those of memory, not of a drive", file=sys.stderr)
    return None


@contextlib.contextmanager
def _named(path: Path):
    try:
        yield
    except OSError as error:
        if isinstance(error, SwapError):
            raise
        raise SwapError(error.errno, f"measuring failed: {error.strerror}", str(path)) from error


def tune_drives(found: list[TunedDrive], progress: Progress) -> None:
    """Find the settings of each drive alone, then measure all drives at once."""
    for each in found:
        with _named(each.path):
            _tune_drive(each, progress)
    progress.show("all drives at once" if len(found) > 1 else f"{found[0].path}: reading and writing", last=True)
    if len(found) > 1:
        together = figures.in_rounds(drives.MIXES, lambda mix, number: _rates_together(found, mix))
        for number, each in enumerate(found):
            each.together = {mix: rates[number] for mix, rates in together.items()}
    else:
        found[0].together = found[0].alone
    for each in found:
        with _named(each.path):
            each.probe.check()


def _tune_drive(each: TunedDrive, progress: Progress) -> None:
    probe, number = each.probe, 0

    def rate(drive: Drive) -> float:
        nonlocal number
        number += 1
        nbytes_per_s = probe.rate("mixed", drive)
        progress.show(f"{each.path}: setting {number}  {nbytes_per_s / 1e9:.2f} GB/s")
        return nbytes_per_s

    progress.show(f"{each.path}: read time during writes", last=True)
    block_s = probe.read_seconds()
    start = Drive(inflight_write_nbytes=probe.patient_write_nbytes(block_s))
    progress.show(f"{each.path}: settings", last=True)
    chosen = search.search(start, rate)
    progress.show(f"{each.path}: settings around the best of {number} measurements", last=True)
    each.seen = {}
    for name, values in search.AXES.items():
        for value in values:
            point = replace(chosen, **{name: value})
            if search.is_possible(point):
                each.seen[name, value] = {mix: probe.rate(mix, point) for mix in drives.MIXES}
    alone = figures.in_rounds(drives.MIXES, lambda mix, number: [_median_rate(probe, mix, chosen)])
    each.alone = {mix: rate for mix, (rate,) in alone.items()}
    each.drive = chosen.measured(each.alone["mixed"].value, block_s)


def _median_rate(probe: drives.Probe, mix: str, drive: Drive) -> float:
    return statistics.median(probe.rate(mix, drive) for _ in range(figures.NUM_REPEATS))


def _rates_together(found: list[TunedDrive], mix: str) -> list[float]:
    """Bytes per second of each drive while all drives work."""
    starts = threading.Barrier(len(found))

    def rate(each: TunedDrive) -> float:
        rates = []
        for _ in range(figures.NUM_REPEATS):
            starts.wait()
            rates.append(each.probe.rate(mix, each.drive))
        return statistics.median(rates)

    with ThreadPoolExecutor(len(found)) as pool:
        tasks = [pool.submit(_abort_on_error, starts, rate, each) for each in found]
        errors = [task.exception() for task in tasks]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error  # the first error; in the other threads it broke the barrier
        return [task.result() for task in tasks]


def _abort_on_error(starts: threading.Barrier, rate: Callable[[TunedDrive], float], each: TunedDrive) -> float:
    """Measure one drive. On an error, release the threads that wait at the barrier."""
    try:
        with _named(each.path):
            return rate(each)
    except BaseException:
        starts.abort()
        raise
