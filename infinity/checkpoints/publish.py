"""The commit of a checkpoint on several ranks: each rank posts checksums, and rank 0 commits the checkpoint.

Knows ranks, and sends messages by `Ranks.post`, because the thread of a checkpoint runs no collective. Must not know records or manifests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from infinity.errors import CheckpointError
from infinity.system.ranks import Ranks

POLL_S = 0.02


class Publication:
    """The messages between ranks about one checkpoint. name: unique to this checkpoint. raise_error: raises the checkpoint's error, if any."""

    def __init__(self, ranks: Ranks, path: Path, name: str, raise_error: Callable[[], None]):
        self.ranks, self.path, self.name = ranks, path, name
        self._raise_error = raise_error

    def publish(self, crcs: list, commit: Callable[[list], None]) -> None:
        """Return when the checkpoint is committed. crcs: of this rank's records. commit: called on rank 0 with the checksums of all ranks.

        Raises CheckpointError with the error that another rank has posted.
        """
        ranks = self.ranks
        if not ranks.is_first:
            ranks.post(f"{self.name}/{ranks.rank}", json.dumps({"crcs": crcs}).encode())
            text = self._look(f"{self.name}/result", 0).decode()
            if text:
                raise CheckpointError(text)
            return
        others = [json.loads(self._look(f"{self.name}/{rank}", rank)) for rank in range(1, ranks.world)]
        if failed := [f"rank {rank}: {found['error']}" for rank, found in enumerate(others, 1) if "error" in found]:
            raise CheckpointError(f"{self.path}: the checkpoint was abandoned: {'; '.join(failed)}")
        commit([crcs, *(found["crcs"] for found in others)])
        for rank in range(1, ranks.world):
            ranks.forget(f"{self.name}/{rank}")
        ranks.post(f"{self.name}/result", b"")

    def give_up(self, error: BaseException) -> None:
        """Post the error for the other ranks."""
        text = str(error) or type(error).__name__
        try:
            if not self.ranks.is_first:
                self.ranks.post(f"{self.name}/{self.ranks.rank}", json.dumps({"error": text}).encode())
            else:
                self.ranks.post(f"{self.name}/result", f"rank 0: {text}".encode(errors="backslashreplace"))
        except Exception:  # the other ranks have ended
            pass

    def _look(self, key: str, rank: int) -> bytes:
        while (value := self.ranks.look(key, rank)) is None:
            self._raise_error()
            time.sleep(POLL_S)
        return value
