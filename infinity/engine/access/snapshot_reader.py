"""The reader of an engine's snapshot, from the creation to the end of the snapshot.

Knows the snapshot, and the engine's duties while a reader is active. Must not know the calling code, or the destination of the bytes.
"""

from __future__ import annotations

import threading

from infinity.system.staging_buffers import StagingBuffers
from infinity.tiers.snapshot import Snapshot


class SnapshotReader:
    """A context manager for the reader's thread: an error that leaves the block ends the snapshot, and `wait` raises this error.

    The engine waits for the reader before it saves again, loads or closes.
    """

    def __init__(self, engine, *, target: str, purpose: str, host_nbytes: int):
        """target, purpose and host_nbytes: of the `StagingBuffers`."""
        chunks = engine.registry.chunks
        largest = max((s.nbytes(chunk.record.numel) for chunk in chunks for s in chunk.record.segments), default=0)
        pin = engine.device.type == "cuda" and any(chunk.on_device for chunk in chunks)
        buffers = StagingBuffers(target, host_nbytes=host_nbytes, largest_nbytes=largest, pin=pin, purpose=purpose)
        self.snapshot = Snapshot(chunks, engine.records, engine.updater, buffers)
        self.error: BaseException | None = None
        self.was_told = False  # whether the error was raised somewhere
        self.over = threading.Event()
        self.step_passed = threading.Event()  # or a thread waits for the reader: the reader waits for no further step
        self._engine = engine

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, kind, error, trace) -> bool:
        if error is not None:
            self.snapshot.give_up(error)
        self.snapshot.close()
        self.error = self.snapshot.error
        self.over.set()
        return True

    def cancel(self) -> None:
        """The reader will not begin. No error is raised anywhere."""
        self.was_told = True
        self.snapshot.give_up(RuntimeError("the snapshot was cancelled"))
        self.snapshot.close()
        self.over.set()

    # Calls from the engine.

    def wait(self) -> None:
        """Wait until the reader has ended, and raise the error that ended it."""
        self.hurry()
        while not self.over.wait(0.5):
            pass
        self.tell()

    def hurry(self) -> None:
        """A thread waits for the reader: begin the updates that the reader needs. Only the training thread can do this."""
        if not self.over.is_set() and not self._engine.lifecycle.trains_elsewhere:
            self.pass_step()

    def tell(self) -> None:
        """Raise the error that ended the reader, if one did."""
        self.was_told = True
        self._engine.freed.give_back()
        if self.error is not None:
            raise self.error

    def pass_step(self) -> None:
        """A step passes, in the training thread: begin the updates that the reader needs. Records wait for no further step."""
        if self.over.is_set():
            return
        engine = self._engine
        for index in self.snapshot.awaited_updates:
            if (chunk := engine.registry.chunks[index]).update.is_announced:
                engine.updater.begin_announced(chunk)
        self.step_passed.set()

    def abandon(self, error: BaseException) -> None:
        """The training has failed with this error. The reader fails, too."""
        if not self.over.is_set():
            self.snapshot.give_up(error)
            self.step_passed.set()
            self.over.wait(5)
