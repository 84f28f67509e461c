"""The filesystem and the drives under a path, and whether a path is valid.

Knows the text of /proc/self/mountinfo, /sys/dev/block, and the system's limits. Must not know the use of a filesystem.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_LARGEST_NAME_NBYTES, _LARGEST_PATH_NBYTES = 255, 4095  # limits of Linux
_ROOM_NBYTES = 100  # for the names of files below the path


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo: kind is the filesystem's type, device "major:minor"."""

    point: str
    kind: str
    source: str
    options: str
    device: str


def mount_at(path: str | os.PathLike) -> Mount:
    """The present mount of a path. Raises OSError, LookupError."""
    return mount_of(os.path.realpath(path), Path("/proc/self/mountinfo").read_text())


def mount_of(path: str, mountinfo: str) -> Mount:
    """The mount of a real path. Raises LookupError if the text has none."""
    best = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(), after.split()
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if path == point or path.startswith(point.rstrip("/") + "/"):
            if best is None or len(point) >= len(best.point):  # of several mounts on one point, the last is visible
                best = Mount(point, kind, source, fields[5], fields[2])
    if best is None:
        raise LookupError(f"/proc/self/mountinfo has no mount above {path}")
    return best


def block_devices(mount: Mount) -> list[Path]:
    """Folders in /sys of the whole drives under a mount, also below a RAID or a logical volume. Empty for a filesystem without a drive."""
    numbers = mount.device
    with contextlib.suppress(OSError):  # btrfs has its own mount numbers
        real = os.stat(mount.source).st_rdev
        numbers = f"{os.major(real)}:{os.minor(real)}" if real else numbers
    device = Path("/sys/dev/block", numbers)
    return whole_drives(Path(os.path.realpath(device))) if device.exists() else []


def whole_drives(device: Path) -> list[Path]:
    """Folders in /sys of the whole drives of a block device. device: the folder of a drive, a partition, a RAID or a logical volume."""
    if (device / "partition").exists():
        device = device.parent
    slaves = sorted((device / "slaves").glob("*"))
    return [drive for slave in slaves for drive in whole_drives(Path(os.path.realpath(slave)))] or [device]


def why_no_path(path: str | os.PathLike) -> str:
    """Why a path is not valid for a file or directory of the engine, with the remedy; "" if the path is valid."""
    raw = os.fsencode(path)
    if not raw:
        return "the path is empty, as after an unset shell variable; name a path, such as '.' for the current directory"
    if b"\0" in raw:
        return f"{os.fsdecode(raw)!r:.80} has a zero byte in it; name another"
    if len(os.path.abspath(raw)) > _LARGEST_PATH_NBYTES - _ROOM_NBYTES:
        return f"{os.fsdecode(raw)!r:.60}... has {len(raw):,} bytes. A path may have {_LARGEST_PATH_NBYTES:,} bytes, files below it included; name a shorter one"
    if (longest := max(map(len, raw.split(b"/")))) > _LARGEST_NAME_NBYTES:
        return f"{os.fsdecode(raw)!r:.60}... contains a name of {longest:,} bytes. A name may have {_LARGEST_NAME_NBYTES} bytes; name a shorter one"
    return ""
