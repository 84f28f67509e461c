"""Several swap directories together: finds directories on one drive, and slow directories.

Knows paths, the drives below them and rates. Must not know swap files or ranks, nor the place where a remark is shown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.system.mounts import block_devices, mount_at

SLOW_RATIO = 2.0  # ratio of the fastest directory's rate to a slow one's


@dataclass(frozen=True)
class Remark:
    """A line about some directories, and the remedy."""

    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


def shared_drives(paths: Sequence[Path]) -> list[Remark]:
    """A remark for each group of directories on one filesystem, or on several filesystems of one drive. Raises OSError for a path that does
    not exist.
    """
    groups: list[tuple[list[Path], set[str]]] = []
    for path in paths:
        together, places = [path], _places(path)
        for group in [group for group in groups if group[1] & places]:
            groups.remove(group)
            together, places = group[0] + together, group[1] | places
        groups.append((together, places))
    return [_on_one(together) for together, _ in groups if len(together) > 1]


def slow_directories(rates: Mapping[Path, float]) -> list[Remark]:
    """A remark for each directory with less than half of the fastest one's rate. rates: bytes a second, above zero."""
    fastest = max(rates, key=lambda path: rates[path])
    return [
        Remark(
            f"swap directory {path} is slow: {rate / 1e6:,.0f} MB/s, and {fastest} reaches {rates[fastest] / 1e6:,.0f} MB/s. It gets "
            f"{rate / sum(rates.values()):.0%} of the bytes",
            f"leave it out of `swap_dirs` if a step waits for it, and check its drive with `infinity doctor {path}`",
        )
        for path, rate in rates.items()
        if rate * SLOW_RATIO < rates[fastest]
    ]


def _places(path: Path) -> set[str]:
    """The filesystem's number, and the names of the whole drives, as far as the kernel tells."""
    places = {f"filesystem {os.stat(path).st_dev}"}
    with contextlib.suppress(OSError, LookupError):
        places |= {device.name for device in block_devices(mount_at(path))}
    return places


def _on_one(paths: list[Path]) -> Remark:
    each = [_places(path) for path in paths]
    names = sorted(name for name in set().union(*each) if not name.startswith("filesystem"))
    where = f"one drive ({', '.join(names)})" if names else "one filesystem"
    shared = "its bandwidth and its free space" if len({os.stat(path).st_dev for path in paths}) == 1 else "its bandwidth"
    return Remark(
        f"swap directories {', '.join(map(str, paths[:-1]))} and {paths[-1]} lie on {where}: they share {shared}",
        "name one directory a drive in `swap_dirs`",
    )
