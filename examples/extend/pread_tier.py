"""A storage tier of ordinary files: one file per extent, read with preadv and written with pwritev by one thread.

The files replace the engine's swap files where direct I/O is not possible. `use_storage(FileStorage)` hands the class to all engines that
start later. Each page has a checksum, because a storage answers for the bytes that it returns.
"""

import errno
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import infinity
import torch
from infinity.engine.stats import EngineStats
from infinity.system.storage import use_storage
from torch import nn

PAGE_NBYTES = 4096
Move = Callable[[int, list[memoryview], int], int]  # os.preadv and os.pwritev: descriptor, buffers, offset


@dataclass(frozen=True)
class FileExtent:
    path: Path
    nbytes: int


class FileTransfer:
    """A read or a write in the thread."""

    def __init__(self, job: Future[None], words: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._job, self._words = job, words

    @property
    def done(self) -> bool:
        return self._job.done()

    def wait(self) -> None:
        self._job.result()

    def promote(self, priority: int = 0) -> None:
        """The thread works in the order of submission."""

    def in_words(self) -> str:
        return self._words


class FileStorage:
    """One thread keeps the order: a read returns the bytes of every earlier write."""

    nbytes_per_s = 0.0

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, rank: int = 0, checksums: bool = True, **options: Any) -> None:
        self.read_nbytes = self.write_nbytes = 0
        self._checks = checksums
        self._folders = [Path(tempfile.mkdtemp(prefix=f"rank{rank}-", dir=path)) for path in paths]
        self._extents: list[FileExtent] = []
        self._extending = threading.Lock()
        self._sums: dict[tuple[Path, int], int] = {}  # checksum of a page, by its file and offset
        self._thread = ThreadPoolExecutor(1, "file-storage")

    def allocate(self, nbytes: int) -> FileExtent:
        number = len(self._extents)
        path = self._folders[number % len(self._folders)] / f"{number}.bin"
        path.touch(0o600, exist_ok=False)
        self._extents.append(FileExtent(path, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES))
        return self._extents[-1]

    def reserve(self) -> None:
        """Give each file its full size, so that a full disk is an error at the start and not during the training."""
        for extent in self._extents:
            self._allocate(extent)

    def extend(self, nbytes: int) -> FileExtent:
        with self._extending:  # several threads may call
            extent = self.allocate(nbytes)
        self._allocate(extent)
        return extent

    def read(self, extent: Any, buffer: memoryview, *, offset: int = 0, priority: int = 0, what: str = "") -> FileTransfer:
        self.read_nbytes += len(buffer)
        return self._submit("read", os.preadv, extent, buffer, offset, what)

    def write(self, extent: Any, buffer: memoryview, *, offset: int = 0, priority: int = 0, what: str = "") -> FileTransfer:
        self.write_nbytes += len(buffer)
        return self._submit("write", os.pwritev, extent, buffer, offset, what)

    def path_of(self, extent: Any) -> Any:
        return extent.path

    def close(self) -> None:
        self._thread.shutdown()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _submit(self, op: str, move: Move, extent: FileExtent, buffer: memoryview, offset: int, what: str) -> FileTransfer:
        job = self._thread.submit(self._run, op, move, extent, buffer, offset, what)
        return FileTransfer(job, f"a {op} of {len(buffer)} bytes, {extent.path.name}", len(buffer))

    def _run(self, op: str, move: Move, extent: FileExtent, buffer: memoryview, offset: int, what: str) -> None:
        moved = self._call(extent, what, lambda file: move(file, [buffer], offset))
        if moved != len(buffer):
            raise infinity.SwapError(errno.EIO, f"{what}short {op}, {moved} of {len(buffer)} bytes", str(extent.path))
        for begin in range(0, len(buffer) if self._checks else 0, PAGE_NBYTES):
            page, found = (extent.path, offset + begin), zlib.crc32(buffer[begin : begin + PAGE_NBYTES])
            if self._sums.setdefault(page, found) != found:
                if op == "read":
                    raise infinity.SwapError(errno.EIO, f"{what}wrong checksum at offset {offset + begin}", str(extent.path))
                self._sums[page] = found

    def _allocate(self, extent: FileExtent) -> None:
        if extent.nbytes:
            self._call(extent, "", lambda file: os.posix_fallocate(file, 0, extent.nbytes))

    def _call(self, extent: FileExtent, what: str, call: Callable[[int], Any]) -> Any:
        """The result of `call` with a descriptor, which is open only meanwhile: a process may have fewer descriptors than extents."""
        try:
            file = os.open(extent.path, os.O_RDWR)
            try:
                return call(file)
            finally:
                os.close(file)
        except OSError as error:
            raise infinity.SwapError(error.errno, f"{what}{error.strerror}", str(extent.path)) from error


def train(directory: str | os.PathLike[str], num_steps: int = 4, **config: Any) -> tuple[list[float], list[torch.Tensor], EngineStats]:
    """Train a small model whose weights and optimizer states are in the storage tier. Returns the losses and the trained weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    options: dict[str, Any] = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none", "dtype": "fp32"}
    options |= {"host_memory": "8MiB", "chunk_mib": 0.0625}
    engine = infinity.offload(model, infinity.Config(swap_dirs=directory, device="cpu", verbose=False, **options | config))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(2, 16, 128).to(next(model.parameters()).dtype)
    losses = []
    with engine:
        for _ in range(num_steps):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = [weight.clone() for weight in model.state_dict().values()]
        stats = engine.stats()
    return losses, weights, stats


if __name__ == "__main__":
    use_storage(FileStorage)
    with tempfile.TemporaryDirectory() as directory:
        print(train(directory)[0])
