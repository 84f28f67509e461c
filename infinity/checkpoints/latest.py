"""The checkpoint from which a restarted program goes on: `infinity.latest`.

Knows directories and whether a checkpoint is whole. Must not know engines, or the values in a checkpoint.
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
    """Return the directory of the newest whole checkpoint, or None if there is none. `infinity.load` takes the result.

    path: a checkpoint's directory, or a directory that holds such directories. The path need not exist. The newest checkpoint has the
    largest optimizer step; if steps are equal, its manifest was written last. A save that was interrupted leaves the checkpoint before
    it, or none: training begins anew then. Only manifests and file sizes are read; `infinity.load` finds damaged bytes.
    With several ranks, call it on all ranks after `torch.distributed.init_process_group`. Rank 0 looks, and all ranks return its result.

    Raises CheckpointError if the newest checkpoint was whole and is damaged now, OSError if a directory cannot be read.
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
    """The later a checkpoint, the larger."""
    with _remedy(path):
        return read_manifest(path).step, os.lstat(path / manifests.NAME).st_mtime_ns


@contextlib.contextmanager
def _remedy(path: Path):
    """A damaged checkpoint is not passed over: the program would lose steps without a word."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; move {path} away to go on from an earlier checkpoint, or to begin anew") from None
