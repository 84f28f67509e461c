"""Which filesystem a path lies on.

Knows the text of /proc/self/mountinfo. Must not know what anybody does with a filesystem.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo: kind is the filesystem's type, device "major:minor"."""

    point: str
    kind: str
    source: str
    options: str
    device: str


def mount_at(path: str | os.PathLike) -> Mount:
    """That of a path as it is now. Raises OSError, LookupError."""
    return mount_of(os.path.realpath(path), Path("/proc/self/mountinfo").read_text())


def mount_of(path: str, mountinfo: str) -> Mount:
    """The mount that a real path lies on. Raises LookupError if the text has none."""
    best = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(), after.split()
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if path == point or path.startswith(point.rstrip("/") + "/"):
            if best is None or len(point) >= len(best.point):  # of several on one point the last is what is seen
                best = Mount(point, kind, source, fields[5], fields[2])
    if best is None:
        raise LookupError(f"/proc/self/mountinfo has no mount above {path}")
    return best
