"""Checks of a swap directory: whether the filesystem and the drive can serve the engine.

Knows paths, mounts, block devices, and how to measure them. Must not know models, devices or swap files. As in system.py, functions that
interpret take texts and numbers.

# [Note: truly asynchronous]
# io_submit promises to return at once, but may sleep. It sleeps for buffered files and for writes that extend a file. The check measures
# the share of a transfer's time in io_submit. One ext4 drive with O_DIRECT had 0.04 for reads, 0.02 to 0.25 for writes, and 0.96 for writes
# that extend the file. Through the page cache or on tmpfs the share was at least 0.7. First writes to reserved space had 0.04 on the ext4
# drive, but up to 0.84 while other programs kept the filesystem's journal busy: twelve trials in a row gave 0.02 to 0.83. The check
# therefore uses the median of some trials. First writes may reach APPENDING_SHARE, because each byte of a swap file has only one first write.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aio_ext
from infinity.errors import NO_DESCRIPTORS, refuses_direct
from infinity.sizes import format_bytes
from infinity.system import drives, swap_paths
from infinity.system.arena import Arena
from infinity.system.mounts import MEMORY_FILESYSTEMS, Mount, block_devices, mount_at
from infinity.system.swap_directory import ALIGNMENT
from infinity.tools.doctor.findings import Finding, Verdict, absent, attention, ok

NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "beegfs", "gpfs", "glusterfs", "9p", "virtiofs", "afs")
SCRATCH_PREFIX = ".infinity-doctor-"
LEAST_FREE_NBYTES = 12 * 10**9  # the states of a model of 10^9 parameters
PROBE_NBYTES = 128 << 20
SYNCHRONOUS_SHARE, APPENDING_SHARE = 0.5, 0.9  # see [Note: truly asynchronous]
ROTATING_GBPS = 0.6  # more than a rotating drive's cable carries

_REQUEST_NBYTES = 4 << 20
_NUM_REQUESTS = 8
_TRIES = 5
_REMEDIES = {
    errno.ENOENT: "mkdir -p {path}",
    errno.ENOTDIR: "name a directory",
    errno.EACCES: "name a directory that this user may write, or: sudo chown $USER {path}",
    errno.EPERM: "name a directory that this user may write, or: sudo chown $USER {path}",
    errno.EROFS: "name another directory, or: sudo mount -o remount,rw $(findmnt -no TARGET -T {path})",
    errno.ENOSPC: "free space there, or name another directory",
    errno.EDQUOT: "raise the quota, or name another directory",
    **NO_DESCRIPTORS,
}


@dataclass(frozen=True)
class Pass:
    """One pass over a file: the rate, and the share of the time in io_submit."""

    gbps: float
    submit_share: float


def filesystem(mount: Mount) -> Finding:
    detail = f"{mount.kind} on {mount.source}, mounted at {mount.point}"
    if mount.kind in MEMORY_FILESYSTEMS:
        return attention("filesystem", f"{detail}: files stay in memory", "name a directory on a local drive")
    if mount.kind == "overlay":
        remedy = "give the container a directory on a drive of the host (docker: -v /ssd0/swap:/swap) and name this directory"
        return attention("filesystem", f"{detail}: a layer of a container", remedy)
    if mount.kind in NETWORK_FILESYSTEMS or mount.kind.startswith("fuse"):
        return attention("filesystem", f"{detail}: not a local drive", "name a directory on ext4 or xfs on a local drive")
    return ok("filesystem", detail)


def drive(name: str, rotational: str | None, scheduler: str | None, gbps: float) -> list[Finding]:
    """rotational, scheduler: texts in queue/ of a block device. gbps: the highest measured rate, 0 if none was measured."""
    if rotational is None:
        return [absent("drive", f"{name}; the kernel does not report the type")]
    findings = []
    if rotational.strip() == "0":
        findings.append(ok("drive", f"{name}, not rotational"))
    elif gbps > ROTATING_GBPS:
        findings.append(ok("drive", f"{name}, reported as rotational, but too fast for a rotating drive"))
    elif name.startswith(("vd", "xvd")):  # the rate may change from call to call, the type does not
        findings.append(absent("drive", f"{name}, a virtual drive: the kernel does not know the type"))
    else:
        remedy = f"name a directory on an SSD; if this drive is an SSD: echo 0 | sudo tee /sys/block/{name}/queue/rotational"
        findings.append(attention("drive", f"{name} is reported as rotational", remedy))
    chosen = re.search(r"\[([\w-]+)\]", scheduler or "")
    mode = chosen[1] if chosen else (scheduler or "none").strip()
    if mode in ("bfq", "cfq"):
        remedy = f"echo none | sudo tee /sys/block/{name}/queue/scheduler"
        findings.append(attention("scheduler", f"{mode} on {name} reorders requests and makes them slower", remedy))
    else:
        findings.append(ok("scheduler", f"{mode} on {name}"))
    return findings


def together(folders: dict[Path, Path]) -> list[Finding]:
    """folders: a scratch folder of each directory. Checks whether directories share a drive, and whether one is slow."""
    found = [attention("one drive", remark.text, remark.remedy) for remark in swap_paths.shared_drives(list(folders))]
    found = found or [ok("one drive", "each directory is on a separate drive, as far as the kernel reports")]
    with contextlib.ExitStack() as stack:
        probes = {path: stack.enter_context(_probe(folder)) for path, folder in folders.items()}
        buffered = [path for path, probe in probes.items() if probe.direct().status is not Verdict.OK]
        if buffered:
            return [*found, absent("slow directory", f"not compared: {', '.join(map(str, buffered))} without O_DIRECT")]
        for probe in probes.values():
            os.posix_fallocate(probe.fd, 0, drives.COMPARED_NBYTES)
        rates = drives.compare({path: probe.fd for path, probe in probes.items()})
    slow = [attention("slow directory", remark.text, remark.remedy) for remark in swap_paths.slow_directories(rates)]
    each = ", ".join(f"{path} {rate / 1e6:,.0f} MB/s" for path, rate in rates.items())
    return [*found, *(slow or [ok("slow directory", f"none: {each}")])]


def space(free_nbytes: int, total_nbytes: int) -> Finding:
    room = f"{free_nbytes / 12e9:,.1f} B parameters at 12 bytes"
    detail = f"{format_bytes(free_nbytes)} of {format_bytes(total_nbytes)} free: room for the states of {room}"
    if free_nbytes < LEAST_FREE_NBYTES:
        return attention("space", detail, "free space there, or name another directory")
    return ok("space", detail)


def direct(memory: int, offset: int, refusal: str = "") -> Finding:
    """memory, offset: alignment from aio_ext.direct_alignment, in bytes. refusal: the reason if a direct write failed."""
    remedy = "name a directory on ext4 or xfs on a local drive"
    if refusal or not memory:
        return attention("O_DIRECT", f"refused{f' ({refusal})' if refusal else ''}: swap would go through the page cache", remedy)
    detail = f"works; memory aligned to {memory} bytes, offsets to {offset}"
    if ALIGNMENT % memory or ALIGNMENT % offset:
        return attention("O_DIRECT", f"{detail}: the engine aligns to {ALIGNMENT} bytes only", remedy)
    return ok("O_DIRECT", detail)


def preallocation(failure: int) -> Finding:
    """failure: the errno of fallocate, 0 if it worked."""
    if not failure:
        return ok("fallocate", "works")
    if failure in (errno.ENOSPC, errno.EDQUOT):
        return attention("fallocate", f"no space for a trial of {format_bytes(PROBE_NBYTES)}", _REMEDIES[failure])
    detail = f"refused ({os.strerror(failure)}): the engine writes the whole swap file once to create it"
    return attention("fallocate", detail, "name a directory on ext4 or xfs on a local drive")


def asynchronous(firsts: Sequence[Pass], agains: Sequence[Pass], reads: Sequence[Pass]) -> list[Finding]:
    """firsts: first writes to reserved space. agains: second writes. One pass of each kind per trial; see [Note: truly asynchronous]."""
    remedy = "name a directory on ext4 or xfs on a local drive; if it is on such a drive, repeat the check when no other program writes there"
    findings = []
    (reading, read_text), (writing, written_text), (beginning, first_text) = map(_shares, (reads, agains, firsts))
    detail = f"io_submit took {read_text} of the time of reads, {written_text} of writes"
    if max(reading, writing) < SYNCHRONOUS_SHARE:
        findings.append(ok("asynchronous", detail))
    else:
        findings.append(attention("asynchronous", f"{detail}: it waits for the drive", remedy))
    first_gbps, again_gbps = (statistics.median(each.gbps for each in passes) for passes in (firsts, agains))
    detail = f"{first_gbps:.2f} GB/s, second writes {again_gbps:.2f} GB/s; io_submit took {first_text} of the time"
    if beginning < APPENDING_SHARE:
        findings.append(ok("first writes", detail))
    else:
        findings.append(attention("first writes", f"{detail}: it waits for the drive", remedy))
    return findings


def _shares(passes: Sequence[Pass]) -> tuple[float, str]:
    """The median share of the time in io_submit, and a text with the range."""
    shares = [each.submit_share for each in passes]
    return (median := statistics.median(shares)), f"{median:.0%} ({min(shares):.0%} to {max(shares):.0%})"


def refused(path: Path, error: OSError) -> Finding:
    """The finding for a directory in which the process cannot create a folder."""
    remedy = _REMEDIES.get(error.errno, "name another directory").format(path=path)
    return attention("directory", f"{path}: {(error.strerror or str(error)).lower()}", remedy)


@contextlib.contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A temporary folder in a directory, removed at the end. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=path, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def checks(path: Path, folder: Path, others: Sequence[Path] = ()) -> Iterator[tuple[str, Callable[[], Finding | list[Finding]]]]:
    """The checks of a directory in order, by name. folder: from `scratch`. others: directories that were checked before."""
    yield "filesystem", lambda: filesystem(read_mount(path))
    yield "space", lambda: _space(path, others)
    with _probe(folder) as probe:
        yield "O_DIRECT", probe.direct
        yield "fallocate", lambda: preallocation(probe.fallocate())
        yield "asynchronous", lambda: asynchronous(*probe.passes())
        yield "drive", lambda: _drive(read_mount(path), probe.gbps)


def rates(path: Path, folder: Path, seconds: float) -> Finding:
    """The drive's rates with default settings, from and to the arena. Takes about `seconds`, and at least one pass over the file per mix."""
    with _probe(folder) as probe:
        probe.direct()
        measured = probe.rates(seconds)
    each = ", ".join(f"{name} {gbps:.2f}" for name, gbps in measured.items())
    return ok("rates", f"{path}: {each} GB/s (14 reads to 12 writes)")


def read_mount(path: Path) -> Mount:
    return mount_at(path)


def _space(path: Path, others: Sequence[Path]) -> Finding:
    for other in others:
        if os.stat(other).st_dev == os.stat(path).st_dev:
            return absent("space", f"the same free space as {other}: both are on one filesystem")
    status = os.statvfs(path)
    return space(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)


def _drive(mount: Mount, gbps: float) -> Finding | list[Finding]:
    devices = block_devices(mount)
    if not devices:
        return absent("drive", f"{mount.source} is no block device of this system")
    texts = [[_text(device / "queue" / name) for name in ("rotational", "scheduler")] for device in devices]
    return [finding for device, both in zip(devices, texts) for finding in drive(device.name, *both, gbps / len(devices))]


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text()
    return None


@contextlib.contextmanager
def _probe(folder: Path) -> Iterator[_Probe]:
    """A probe of an unlinked file: the kernel frees the file when the process ends, for any reason."""
    fd, name = tempfile.mkstemp(dir=folder)
    probe = _Probe(fd)
    try:
        os.unlink(name)
        yield probe
    finally:
        probe.close()


class _Probe:
    """A file of PROBE_NBYTES for trials, and memory of the arena. gbps: the highest rate at which a trial of `passes` wrote and read."""

    gbps = 0.0

    def __init__(self, fd: int):
        self.fd = fd
        self._arena = Arena()
        memory = self._arena.region(_NUM_REQUESTS * _REQUEST_NBYTES).buffer
        noise = os.urandom(1 << 20)  # some drives are faster with zeros
        for start in range(0, len(memory), len(noise)):
            memory[start : start + len(noise)] = noise
        self._buffers = [memory[i * _REQUEST_NBYTES : (i + 1) * _REQUEST_NBYTES] for i in range(_NUM_REQUESTS)]

    def close(self) -> None:
        os.close(self.fd)
        self._buffers.clear()
        self._arena.close()

    def direct(self) -> Finding:
        """Try direct I/O. If it works, the probe uses direct I/O from then on."""
        try:
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if not refuses_direct(error):
                raise
            return direct(0, 0, error.strerror)
        try:
            memory, offset = aio_ext.direct_alignment(fd)
            with mmap.mmap(-1, ALIGNMENT) as page:
                os.pwrite(fd, page, 0)
        except OSError as error:
            os.close(fd)
            if not refuses_direct(error):
                raise
            return direct(0, 0, error.strerror)
        os.close(self.fd)
        self.fd = fd
        return direct(memory, offset)

    def fallocate(self) -> int:
        """The errno of fallocate, or 0. os.posix_fallocate would write zeros if the filesystem cannot reserve space."""
        libc = ctypes.CDLL(None, use_errno=True)
        os.ftruncate(self.fd, 0)
        return ctypes.get_errno() if libc.fallocate(self.fd, 0, ctypes.c_int64(0), ctypes.c_int64(PROBE_NBYTES)) else 0

    def passes(self) -> tuple[list[Pass], list[Pass], list[Pass]]:
        """First writes, second writes and reads, one pass of each per trial."""
        tries = []
        for _ in range(_TRIES):
            os.ftruncate(self.fd, 0)
            os.posix_fallocate(self.fd, 0, PROBE_NBYTES)
            tries.append([self._pass(op) for op in ("write", "write", "read")])
        self.gbps = max(min(again.gbps, read.gbps) for _, again, read in tries)  # one fast trial is proof of a fast drive
        firsts, agains, reads = map(list, zip(*tries))
        return firsts, agains, reads

    def rates(self, seconds: float) -> dict[str, float]:
        """GB/s of each mix in drives.MIXES."""
        os.posix_fallocate(self.fd, 0, PROBE_NBYTES)
        self._pass("write")
        return {mix: self._pass(mix, seconds / len(drives.MIXES)).gbps for mix in drives.MIXES}

    def _pass(self, mix: str, seconds: float = 0.0) -> Pass:
        """Pass over the file once, and continue until `seconds` have passed."""
        tickets, number = [], 0
        with drives.Drive().queue() as queue:
            start = time.perf_counter()
            while number * _REQUEST_NBYTES < PROBE_NBYTES or time.perf_counter() - start < seconds:
                if number >= _NUM_REQUESTS:
                    tickets[number - _NUM_REQUESTS].wait()
                submit = queue.read if drives.is_read(mix, number) else queue.write
                offset = number * _REQUEST_NBYTES % PROBE_NBYTES
                tickets.append(submit(self.fd, self._buffers[number % _NUM_REQUESTS], offset))
                number += 1
            for ticket in tickets:
                ticket.wait()
            taken = time.perf_counter() - start
            return Pass(number * _REQUEST_NBYTES / taken / 1e9, queue.stats()["submit_seconds"] / taken)
