"""A folder of checkpoints, one per saved step: `step-00000100`, `step-00000200`, ... Finds the latest checkpoint and removes the oldest.

Knows paths, and whether a checkpoint is whole. Must not know engines, the contents of a checkpoint, or when a run saves.

# [Note: removal of checkpoints]
# A checkpoint exists as long as its manifest exists. `prune` removes the manifest first. A folder without a manifest is therefore no
# checkpoint: a kill interrupted the removal or the first save. The next `prune` removes this folder. A process that writes in a folder
# locks the folder ([Note: old or new] in checkpoints/files.py), and `prune` leaves locked folders alone. `prune` removes only files with
# the engine's names. A folder with other files stays, with these files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from pathlib import Path

from infinity.checkpoints import manifest as manifests
from infinity.checkpoints.files import failed, sync_directory
from infinity.checkpoints.reader import Checkpoint
from infinity.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})")
_OURS = re.compile(rf"{manifests.FOLDER_NAME.pattern}|\.manifest\.new")


class Rotation:
    """The checkpoints in one directory. The directory may be missing; `make` creates the directory in an existing parent."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)

    def make(self) -> None:
        """Create the directory if missing. Raises SwapError on failure."""
        try:
            if not self.path.is_dir():
                self.path.mkdir(exist_ok=True)
                sync_directory(self.path.absolute().parent)
        except OSError as error:
            raise failed("the directory of the checkpoints cannot be made", self.path, error) from error

    def path_of(self, step: int) -> Path:
        """The path of the checkpoint after `step` steps."""
        return self.path / f"step-{step:08d}"

    def paths(self) -> list[Path]:
        """The paths of all checkpoints that have a manifest, oldest first."""
        return [path for path in self._folders() if _has_manifest(path)]

    def latest(self) -> Path | None:
        """The checkpoint with the highest step, or None without checkpoints.

        Raises CheckpointError if the manifest or other files are damaged or missing. The error names this checkpoint and the next older one.
        """
        paths = self.paths()
        if not paths:
            return None
        try:
            Checkpoint(paths[-1]).close()
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self.remedy(paths[-1])}") from None
        return paths[-1]

    def remedy(self, damaged: Path) -> str:
        """The remedy for a checkpoint that cannot be read: the end of an error message."""
        older = [path for path in self.paths() if _step_of(path) < _step_of(damaged)]
        return f"move {damaged} away to use {older[-1]}" if older else f"there is no older checkpoint: move {damaged} away to start from step 1"

    def prune(self, keep: int, written: Path) -> None:
        """Remove all checkpoints except the `keep` >= 1 newest and `written`, and the remains of interrupted saves.

        Call this once `written` is whole. Raises SwapError on failure.
        """
        old = self.paths()[:-keep]
        for path in self._folders():
            if path != written and (path in old or not _has_manifest(path)):
                try:
                    _remove(path)
                except OSError as error:
                    raise failed("an old checkpoint cannot be removed", path, error) from error

    def __repr__(self) -> str:
        return f"Rotation({self.path}, {len(self.paths())} checkpoints)"

    def _folders(self) -> list[Path]:
        """All directories with a checkpoint's name, whole or not, oldest first."""
        try:
            found = [entry.name for entry in os.scandir(self.path) if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise failed("the directory of the checkpoints cannot be read", self.path, error) from error
        paths = sorted((self.path / name for name in found), key=_step_of)
        return [path for path in paths if path == self.path_of(_step_of(path))]


def _step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def _has_manifest(path: Path) -> bool:
    return os.path.lexists(path / manifests.NAME)


def _remove(path: Path) -> None:
    """See [Note: removal of checkpoints]."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(manifests.NAME, dir_fd=fd)
            os.fsync(fd)
        for name in filter(_OURS.fullmatch, os.listdir(fd)):
            if name.startswith("."):
                os.unlink(name, dir_fd=fd)
            else:
                shutil.rmtree(path / name)
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    except BlockingIOError:
        pass  # another process is writing there
    finally:
        os.close(fd)
