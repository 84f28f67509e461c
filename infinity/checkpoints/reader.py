"""A reader of a checkpoint's files that finds damage.

Knows a checked manifest, the places of records, and checksums. Must not know engines, or the tensors of a model.

The reader opens all files before the first read. Open files stay readable if a new checkpoint replaces the old one meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import aio_ext
from infinity.checkpoints.encoding import decode
from infinity.checkpoints.files import QUEUE, Progress, failed, open_direct, read_manifest
from infinity.checkpoints.manifest import ALIGNMENT, TENSORS_NAME, TENSOR_DTYPES
from infinity.errors import NO_DESCRIPTORS, CheckpointError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.optim.shard import Shard
from infinity.plan.record import Record
from infinity.sizes import format_bytes
from infinity.system.arena import Arena, Region

_NUM_RECORDS_IN_MEMORY = 3


class Checkpoint:
    """An open checkpoint. Raises CheckpointError for missing, damaged or invalid files, SwapError if the disk fails."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._fds: dict[int, int] = {}
        self._tensors_fd = -1
        self._queue = None
        self._arena = Arena()
        self._cached: OrderedDict[tuple[int, int], Region] = OrderedDict()
        self._index: list[list[tuple[int, int, int, int]]] | None = None
        self.manifest = read_manifest(self.path)
        while True:
            self.folder = self.path / self.manifest.folder
            try:
                self._open()
                return
            except OSError:
                self.close()
                raise
            except CheckpointError:
                self.close()
                before, self.manifest = self.manifest, read_manifest(self.path)
                if self.manifest.folder == before.folder:
                    raise  # with another folder, a new checkpoint has replaced the old one: open the new one

    def _open(self) -> None:
        missing = []
        try:
            folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise failed("the checkpoint cannot be opened", self.folder, error) from error
            raise CheckpointError(f"{self.folder}: the checkpoint's folder is missing or cannot be read ({error.strerror})") from None
        try:
            wanted = [(index, file.name, file.nbytes) for index, file in enumerate(self.manifest.files)]
            if self.manifest.tensors:
                wanted.append((-1, TENSORS_NAME, sum(tensor.nbytes for tensor in self.manifest.tensors)))
            for index, name, nbytes in wanted:
                try:
                    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
                except OSError as error:
                    if error.errno in NO_DESCRIPTORS:
                        raise failed("the checkpoint cannot be opened", self.folder / name, error) from error
                    missing.append(f"{name} ({error.strerror})")
                    continue
                if index < 0:
                    self._tensors_fd = fd
                else:
                    self._fds[index] = fd
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
                    missing.append(f"{name} (has {status.st_size:,} bytes instead of {nbytes:,})")
            if missing:
                more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
                raise CheckpointError(f"{self.folder}: missing or cut: {', '.join(missing[:5])}{more}; use another checkpoint")
            for index in self._fds:
                name = self.manifest.files[index].name
                self._fds[index] = open_direct(self._fds[index], name, os.O_RDONLY, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
        self._queue = QUEUE.queue()

    def read(self, chunk: int, rank: int, offset: int, buffer: memoryview) -> aio_ext.Ticket:
        """Begin to read a part of a record into page-aligned memory. offset, size: multiples of 4096 bytes. Nothing is checked."""
        place = self.manifest.places[chunk][rank]
        return self._queue.read(self._fds[place.file], buffer, place.offset + offset)

    def settle(self, chunk: int, rank: int, tickets: Sequence[aio_ext.Ticket]) -> None:
        """Wait for all reads of a record's parts. Raises SwapError with the first failure, after all reads are over."""
        failure = None
        for ticket in tickets:
            try:
                ticket.wait()
            except OSError as error:
                failure = failure or error
        if failure is not None:
            text = f"chunk {chunk} of rank {rank} cannot be read from the checkpoint"
            raise failed(text, self.folder / self.manifest.files[self.manifest.places[chunk][rank].file].name, failure)

    def check(self, chunk: int, rank: int, segments: dict[str, memoryview]) -> None:
        """Compare bytes with the manifest's checksums. segments: some segments of the record by name, with the padding of zeros."""
        place, record = self.manifest.places[chunk][rank], self.manifest.record(chunk, rank)
        for segment, crc in zip(record.segments, place.crcs):
            if segment.name not in segments:
                continue
            whole, nbytes = segments[segment.name], segment.nbytes(record.numel)
            if aio_ext.crc32c(whole[:nbytes]) != crc:
                wrong = "the checksum differs from that in the manifest"
            elif not is_zero(whole[nbytes:]):
                wrong = "the padding behind the segment is not zero"
            else:
                continue
            names = [self.manifest.parameters[piece.param].name for piece in self.manifest.chunks[chunk].shard_pieces(rank)]
            raise CheckpointError(
                f"{self.folder / self.manifest.files[place.file].name}: chunk {chunk} of rank {rank} "
                f"({', '.join(names[:2])}{', ...' if len(names) > 2 else ''}), {segment.name}, is damaged: {wrong}; use another checkpoint"
            )

    def record(self, chunk: int, rank: int) -> Shard:
        """Read and check the segments of a record: 1-D CPU tensors by name. They are valid until three other records were read."""
        key, layout = (chunk, rank), self.manifest.record(chunk, rank)
        region = self._cached.pop(key, None)
        if region is None:
            region = self._memory()
            if layout.nbytes:
                self.settle(chunk, rank, [self.read(chunk, rank, 0, region.buffer[: layout.nbytes])])
            self.check(chunk, rank, padded_segments(layout, region.buffer))
        self._cached[key] = region
        return segment_tensors(layout, region)

    def values(self, param: int, start: int, numel: int) -> Iterator[tuple[int, Shard]]:
        """Yield elements [start, start + numel) of a parameter in parts: (number of elements, segments by name)."""
        end = start + numel
        for param_start, chunk, at, count in self._pieces_of(param):
            first, last = max(start, param_start), min(end, param_start + count)
            while first < last:
                shard_numel = self.manifest.chunks[chunk].shard_numel
                inside = at + first - param_start
                rank, begin = divmod(inside, shard_numel)
                part = min(last - first, shard_numel - begin)
                yield part, self.record(chunk, rank).part(begin, begin + part)
                first += part

    def copy(self, shard: Shard, at: int, param: int, start: int, numel: int) -> None:
        """Fill elements [at, at + numel) of a shard's segments with elements [start, start + numel) of a parameter.

        Both formats have the same storage. Segments that the checkpoint lacks do not change. If the parameter was frozen in the checkpoint,
        the weight becomes the master.
        """
        for count, found in self.values(param, start, numel):
            into = shard.part(at, at + count)
            if into.format.trainable and not found.format.trainable:
                into.put(found.codec.weights(found))
            else:
                for name in into.keys() & found.keys():
                    into[name].copy_(found[name])
            at += count

    def buffers(self) -> dict[str, int]:
        """The index of each buffer in `manifest.tensors`, by name."""
        saved = self.manifest.model.get("buffers", {})
        if not isinstance(saved, dict):
            raise CheckpointError(f"{self.path}: the buffers in the manifest are not an object")
        found = {name: value.get("$tensor") if isinstance(value, dict) else None for name, value in saved.items()}
        for name, index in found.items():
            if type(index) is not int or not 0 <= index < len(self.manifest.tensors):
                raise CheckpointError(f"{self.path}: buffer {name} is not one of the tensors in the manifest")
        return found

    def tensor(self, index: int) -> torch.Tensor:
        """Read and check one of the small tensors. On the CPU."""
        if index >= len(self.manifest.tensors):
            raise CheckpointError(f"{self.path}: there is no small tensor {index}")
        entry = self.manifest.tensors[index]
        try:
            data = bytearray(entry.nbytes)
        except MemoryError:
            raise CheckpointError(f"{self.path}: not enough memory for tensor {index} of {format_bytes(entry.nbytes)}") from None
        view, done = memoryview(data), 0
        while done < entry.nbytes:
            count = os.preadv(self._tensors_fd, [view[done : done + (1 << 24)]], entry.offset + done)
            if not count:
                break
            done += count
        if done < entry.nbytes or aio_ext.crc32c(data) != entry.crc32c:
            raise CheckpointError(f"{self.folder / TENSORS_NAME}: tensor {index} is damaged; use another checkpoint")
        dtype = TENSOR_DTYPES[entry.dtype]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(entry.shape)

    def verify(self, progress: Progress | None = None) -> int:
        """Read and check all records and tensors. Returns the number of bytes."""
        manifest, done = self.manifest, 0
        jobs = [(chunk.index, rank) for chunk in manifest.chunks for rank in range(manifest.world)]
        regions = [self._region() for _ in range(2)]
        tickets: dict[int, list[aio_ext.Ticket]] = {}

        def begin(number: int) -> None:
            if number < len(jobs):
                nbytes = manifest.record(*jobs[number]).nbytes
                buffer = regions[number % 2].buffer[:nbytes]
                tickets[number] = [self.read(*jobs[number], 0, buffer)] if nbytes else []

        try:
            begin(0)
            for number, job in enumerate(jobs):
                begin(number + 1)
                self.settle(*job, tickets.pop(number))
                layout = manifest.record(*job)
                self.check(*job, padded_segments(layout, regions[number % 2].buffer))
                done += layout.nbytes
                if progress is not None:
                    progress(done, manifest.nbytes)
        finally:
            for left in tickets.values():
                with contextlib.suppress(OSError):
                    left[0].wait() if left else None
            for region in regions:
                self._arena.give_back(region)
        for index in range(len(manifest.tensors)):
            done += self.tensor(index).nbytes
        return done

    def decode(self, value):
        """Decode a value of the manifest."""
        with self.named():
            return decode(value, self.tensor)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Add the checkpoint's path to a CheckpointError without it."""
        try:
            yield
        except CheckpointError as error:
            raise error if str(self.path) in str(error) else CheckpointError(f"{self.path}: {error}") from None

    def close(self) -> None:
        """Idempotent."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        while self._fds:
            os.close(self._fds.popitem()[1])
        if self._tensors_fd >= 0:
            os.close(self._tensors_fd)
            self._tensors_fd = -1
        self._cached.clear()
        self._arena.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path}, step {self.manifest.step}, {format_bytes(self.manifest.nbytes)})"

    @functools.cached_property
    def _largest(self) -> int:
        sizes = (self.manifest.record(chunk.index, rank).nbytes for chunk in self.manifest.chunks for rank in range(self.manifest.world))
        return max(sizes, default=0) or ALIGNMENT

    def _memory(self) -> Region:
        """Memory for one record: a new region, or the region of the record that was used longest ago."""
        if len(self._cached) == _NUM_RECORDS_IN_MEMORY:
            return self._cached.popitem(last=False)[1]
        return self._region()

    def _region(self) -> Region:
        try:
            return self._arena.region(self._largest)
        except (MemoryError, OSError):
            raise CheckpointError(f"{self.path}: not enough memory for a record of {format_bytes(self._largest)}") from None

    def _pieces_of(self, param: int) -> list[tuple[int, int, int, int]]:
        """The pieces of a parameter, in order: (start in the parameter, chunk, start in the chunk, number of elements)."""
        if self._index is None:
            self._index = [[] for _ in self.manifest.parameters]
            for chunk in self.manifest.chunks:
                for piece in chunk.pieces:
                    self._index[piece.param].append((piece.param_start, chunk.index, piece.start, piece.numel))
            for pieces in self._index:
                pieces.sort()
        return self._index[param]


def segment_bytes(record: Record, buffer: memoryview) -> dict[str, memoryview]:
    """A record's segments by name, without padding. buffer: memory of the whole record."""
    return {
        segment.name: buffer[offset : offset + segment.nbytes(record.numel)]
        for segment, offset in zip(record.segments, record.offsets)
    }


def is_zero(padding: memoryview) -> bool:
    return bytes(padding) == bytes(len(padding))


def padded_segments(record: Record, buffer: memoryview, begin: int = 0) -> dict[str, memoryview]:
    """The record's segments inside `buffer`, by name, with padding. buffer: memory of the record from byte `begin` on."""
    ends = (*record.offsets[1:], record.nbytes)
    return {
        segment.name: buffer[offset - begin : end - begin]
        for segment, offset, end in zip(record.segments, record.offsets, ends)
        if begin <= offset and end - begin <= len(buffer)
    }


def segment_tensors(record: Record, region: Region) -> Shard:
    """A record's segments as tensors. region: memory of the whole record."""
    pairs = zip(record.segments, record.offsets)
    found = {segment.name: region.tensor(TORCH_DTYPES[segment.dtype], offset, segment.count(record.numel)) for segment, offset in pairs}
    return Shard(record.format, found)
