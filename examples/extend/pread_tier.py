"""A storage tier of ordinary files: one file per extent, read with preadv and written with pwrite by one thread.

It replaces the engine's swap files where direct I/O is not possible. `use_storage(FileStorage)` hands it to all engines that start later.
"""

import errno
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import infinity
import torch
from infinity.system.storage import use_storage
from torch import nn

PAGE_NBYTES = 4096


@dataclass(frozen=True)
class FileExtent:
    path: Path
    nbytes: int


class FileTransfer:
    """A read or a write in the thread."""

    def __init__(self, job, words, nbytes):
        self.nbytes = nbytes
        self._job, self._words = job, words

    @property
    def done(self):
        return self._job.done()

    def wait(self):
        self._job.result()

    def promote(self, priority=0):
        """The thread works in the order of submission."""

    def in_words(self):
        return self._words


class FileStorage:
    """One thread keeps the order: a read returns the bytes of every earlier write."""

    nbytes_per_s = 0.0

    def __init__(self, paths, *, rank=0, world=1, run=None, expected_nbytes=0, checksums=True):
        self.read_nbytes = self.write_nbytes = 0
        self._folders = [Path(tempfile.mkdtemp(prefix=f"rank{rank}-", dir=path)) for path in paths]
        self._files = {}  # descriptors, by path
        self._thread = ThreadPoolExecutor(1, "file-storage")

    def allocate(self, nbytes):
        number = len(self._files)
        path = self._folders[number % len(self._folders)] / f"{number}.bin"
        self._files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        return FileExtent(path, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES)

    def reserve(self):
        """Files grow as they are written."""

    def extend(self, nbytes):
        return self.allocate(nbytes)

    def read(self, extent, buffer, *, offset=0, priority=0, what=""):
        self.read_nbytes += len(buffer)
        return self._submit("read", os.preadv, extent, [buffer], offset, what)

    def write(self, extent, buffer, *, offset=0, priority=0, what=""):
        self.write_nbytes += len(buffer)
        return self._submit("write", os.pwritev, extent, [buffer], offset, what)

    def path_of(self, extent):
        return extent.path

    def close(self):
        self._thread.shutdown()
        while self._files:
            os.close(self._files.popitem()[1])
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _submit(self, op, move, extent, buffers, offset, what):
        nbytes = len(buffers[0])
        job = self._thread.submit(self._run, op, move, extent, buffers, offset, what)
        return FileTransfer(job, f"a {op} of {nbytes} bytes, {extent.path.name}", nbytes)

    def _run(self, op, move, extent, buffers, offset, what):
        try:
            moved = move(self._files[extent.path], buffers, offset)
        except OSError as error:
            raise infinity.SwapError(error.errno, f"{what}{error.strerror}", str(extent.path)) from error
        if moved != len(buffers[0]):
            raise infinity.SwapError(errno.EIO, f"{what}short {op}, {moved} of {len(buffers[0])} bytes", str(extent.path))


def train(directory, num_steps=4, **config):
    """Train a small model whose weights and optimizer states are in the storage tier. Returns the losses and the trained weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    options = {"weights": "nvme", "states": "nvme", "residency": "none", "host_memory": "8MiB", "chunk_mib": 0.0625, "dtype": "fp32"}
    engine = infinity.offload(model, infinity.Config(nvme=directory, device="cpu", verbose=False, **options | config))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(2, 16, 128).to(model[0].weight.dtype)
    losses = []
    with engine:
        for _ in range(num_steps):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
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
