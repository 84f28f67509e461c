"""The search for the checkpoint from which a restarted program continues: `infinity.latest`.

Knows directories, and whether a checkpoint is complete. Must not know engines, or the values in a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from infinity.checkpoints import manifest as manifests
from infinity.checkpoints.files import failed, read_manifest
from infinity.checkpoints.reader import Checkpoint
from infinity.config import checked_path
from infinity.errors import CheckpointError
from infinity.system.ranks import Ranks


def latest(path: str | os.PathLike) -> Path | None:
    """Return the directory of the newest complete checkpoint, or None. `infinity.load` takes the result.

    path: a checkpoint's directory, or a directory that holds checkpoints' directories. The path may be missing. The newest checkpoint has
    the largest optimizer step. Among equal steps, the newest has the manifest that was written last. An interrupted save leaves the previous
    checkpoint; if there is none, the result is None. The function reads only manifests and file sizes; `infinity.load` finds damaged bytes.
    With several ranks, call latest on all ranks after `torch.distributed.init_process_group`. All ranks return the result of rank 0.

    Raises CheckpointError if the newest checkpoint was complete and is damaged now, OSError if a directory cannot be read.
    """
    path = checked_path(path)
    with Ranks(torch.device("cpu")).joined() as ranks:
        found = ranks.together(lambda: _newest(path) if ranks.is_first else None)
        name = ranks.exchange(b"" if found is None else os.fsencode(found))[0]
    return Path(os.fsdecode(name)) if name else None


def _newest(path: Path) -> Path | None:
    checkpoints = [path] if _has_manifest(path) else [inside for inside in _directories(path) if _has_manifest(inside)]
    newest = max(checkpoints, key=_age, default=None)
    if newest is not None:
        with _remedy(newest):
            Checkpoint(newest).close()
    return newest


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(path / entry.name for entry in os.scandir(path) if os.path.isdir(entry.path))  # False for a link that leads nowhere
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file: name a checkpoint's directory, or a directory that holds checkpoints") from None
    except OSError as error:
        raise failed("the directory of the checkpoints cannot be read", path, error) from error


def _has_manifest(path: Path) -> bool:
    return os.path.lexists(path / manifests.NAME)


def _age(path: Path) -> tuple[int, int]:
    """A sort key: (optimizer step, time of the manifest in ns), larger for newer checkpoints."""
    with _remedy(path):
        return read_manifest(path).step, os.lstat(path / manifests.NAME).st_mtime_ns


@contextlib.contextmanager
def _remedy(path: Path):
    """Add a remedy to a CheckpointError. A damaged checkpoint is not skipped, because the program would lose steps silently."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; move {path} away to continue from an earlier checkpoint, or to start anew") from None
