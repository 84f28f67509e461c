"""A writer of safetensors files, and of folders of such files, in pieces. See [Note: the safetensors format] in safetensors_format.py.

Knows files, names, dtypes and shapes. Must not know where values come from.

# [Note: a folder is whole or absent]
# The writer gives all files temporary names, which readers ignore. Then the writer renames all files, the index last. A crash between two
# renames leaves some numbered files and no index. TensorFiles refuses such a folder.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from infinity.checkpoints.files import Progress, sync_directory
from infinity.checkpoints.safetensors import MAX_HEADER_NBYTES, MAX_TENSORS, naming
from infinity.checkpoints.safetensors_format import CODES, DTYPES, INDEX, SUFFIX, TEMPORARY, TensorSpec, is_sizes, is_text, show
from infinity.errors import CheckpointError

MAX_FILE_NBYTES = 5 * 10**9
_METADATA_NBYTES = 1 << 20  # of a header, reserved for the metadata
_PIECE_NBYTES = 16 << 20  # of one write
_FLUSH_NBYTES = 64 << 20  # after each of these, the writer asks the kernel to write and drop them
_SETTLE_NBYTES = 256 << 20  # most bytes in the page cache that are not on the drive


def plan_files(specs: Iterable[TensorSpec], *, max_file_nbytes: int = MAX_FILE_NBYTES) -> list[tuple[str, list[TensorSpec]]]:
    """Distribute tensors over files, in the order of the specs. Returns [(file name, specs)]. max_file_nbytes: of the tensors of a file.

    A file has at most MAX_TENSORS tensors and a header of at most MAX_HEADER_NBYTES, because TensorFiles reads no more. A tensor of more
    than max_file_nbytes gets a file of its own. One file is named model.safetensors, several model-00001-of-00003.safetensors.
    Raises ValueError for a name that is taken or not a text, and for a shape or dtype that the format lacks.
    """
    if max_file_nbytes < 1:
        raise ValueError(f"max_file_nbytes={max_file_nbytes}: expected at least 1")
    groups, nbytes, header_nbytes, names = [[]], 0, 0, {"__metadata__"}
    for spec in specs:
        _check_spec(spec)
        if spec.name in names:
            raise ValueError(f"the name {show(spec.name)} is taken; give each tensor a different name")
        names.add(spec.name)
        entry_nbytes = _most_entry_nbytes(spec)
        is_full = len(groups[-1]) == MAX_TENSORS or header_nbytes + entry_nbytes > MAX_HEADER_NBYTES - _METADATA_NBYTES
        if groups[-1] and (is_full or nbytes + spec.nbytes > max_file_nbytes):
            groups.append([])
            nbytes = header_nbytes = 0
        groups[-1].append(spec)
        nbytes += spec.nbytes
        header_nbytes += entry_nbytes
    if len(groups) == 1:
        return [("model" + SUFFIX, groups[0])]
    return [(f"model-{number:05}-of-{len(groups):05}{SUFFIX}", group) for number, group in enumerate(groups, 1)]


def write_files(
    directory: str | os.PathLike,
    specs: Iterable[TensorSpec],
    parts: Callable[[TensorSpec], Iterable[torch.Tensor]],
    *,
    max_file_nbytes: int = MAX_FILE_NBYTES,
    metadata: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write tensors into the files of `plan_files`, and an index for several files. Returns the number of bytes written.

    parts(spec) returns the tensor's elements, row-major, as a sequence of 1-D CPU tensors of spec.dtype. write_files calls parts once per
    tensor, file by file, wider dtypes first within a file. Each part is written before the next part is requested.
    progress(done_nbytes, total_nbytes) counts headers, too. metadata: added to {"format": "pt"}.

    A missing directory is made if the parent exists. New files and the directory have the modes of the umask, because others may read an
    export; a checkpoint is private. An error leaves none of the new files: see [Note: a folder is whole or absent].
    Raises CheckpointError if the directory already holds tensors or the disk has no room. Raises ValueError for an invalid spec, or for parts
    that do not match the spec. Raises OSError with the path.
    """
    directory = os.fsdecode(directory)
    contents = _contents(plan_files(specs, max_file_nbytes=max_file_nbytes), {"format": "pt", **(metadata or {})})
    is_new = not os.path.exists(directory)
    parent = os.path.dirname(os.path.abspath(directory))
    if not is_new:
        _check_vacant(directory)
    _check_space(parent if is_new else directory, contents)

    total = sum(content.nbytes for content in contents)
    meter = _Meter(total, progress)
    paths = [os.path.join(directory, content.name) for content in contents]
    made = []
    if is_new:
        os.mkdir(directory)
    try:
        for path, content in zip(paths, contents):
            made.append(_write(path + TEMPORARY, content, parts, meter))
        for path in paths:
            made.append(path)
            os.rename(path + TEMPORARY, path)
        for synced in (directory, parent) if is_new else (directory,):
            with naming(synced):
                sync_directory(synced)
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        raise
    assert meter.done_nbytes == total, (meter.done_nbytes, total)
    return total


@dataclass(frozen=True)
class _Content:
    """The planned content of a file: `head`, then the tensors of `specs`."""

    name: str
    head: bytes
    specs: tuple[TensorSpec, ...] = ()

    @property
    def nbytes(self):
        return len(self.head) + sum(spec.nbytes for spec in self.specs)


@dataclass
class _Meter:
    total_nbytes: int
    progress: Progress | None
    done_nbytes: int = 0

    def add(self, nbytes):
        self.done_nbytes += nbytes
        if self.progress is not None:
            self.progress(self.done_nbytes, self.total_nbytes)


def _check_spec(spec):
    if not is_text(spec.name):
        raise ValueError(f"a tensor's name is {show(spec.name)}, expected a text in Unicode")
    if spec.dtype not in CODES:
        raise ValueError(f"tensor {show(spec.name)} has dtype {spec.dtype}, expected one of {', '.join(DTYPES)}")
    if not is_sizes(spec.shape):
        raise ValueError(f"tensor {show(spec.name)} has shape {show(spec.shape)}, expected sizes")


def _most_entry_nbytes(spec):
    """An upper bound of the bytes of a tensor's entry in a header, for any offsets of the data."""
    entry = {spec.name: {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [10**19, 10**19]}}
    return len(json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode())


def _contents(plan, metadata):
    """The files of a plan, the index last. Headers and index are made before the first write, because both may raise ValueError."""
    if not all(is_text(value) for item in metadata.items() for value in item):
        raise ValueError(f"metadata={show(metadata)}: expected texts for keys and values")
    contents = []
    for name, specs in plan:
        specs = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        header, end = {"__metadata__": metadata}, 0
        for spec in specs:
            begin, end = end, end + spec.nbytes
            header[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_NBYTES:
            raise ValueError(
                f"{name} needs a header of {len(text)} bytes, readers accept {MAX_HEADER_NBYTES}; lower max_file_nbytes"
            )
        contents.append(_Content(name, len(text).to_bytes(8, "little") + text, tuple(specs)))
    if len(plan) > 1:
        total = sum(spec.nbytes for _, specs in plan for spec in specs)
        weight_map = {spec.name: name for name, specs in plan for spec in specs}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
        if len(text) > MAX_HEADER_NBYTES:
            raise ValueError(f"the index needs {len(text)} bytes, readers accept {MAX_HEADER_NBYTES}; use shorter names")
        contents.append(_Content(INDEX, text))
    return contents


def _check_vacant(directory):
    suffixes = (SUFFIX, SUFFIX + ".index.json")
    suffixes += tuple(suffix + TEMPORARY for suffix in suffixes)
    taken = sorted(name for name in os.listdir(directory) if name.endswith(suffixes))
    if taken:
        raise CheckpointError(
            f"{directory} already holds {show(*taken)}; name another directory, or remove these files (*{TEMPORARY} are from a write "
            "that is under way or was killed)"
        )


def _check_space(directory, contents):
    status = os.statvfs(directory)
    needed = sum(-(-content.nbytes // status.f_frsize) * status.f_frsize for content in contents)
    available = status.f_bavail * status.f_frsize
    if needed > available:
        raise CheckpointError(
            f"{directory} has {available} bytes available, the files need {needed}; free {needed - available} bytes or name "
            "another directory"
        )


def _write(path, content, parts, meter):
    """Write and fsync one file. Returns its path. After an error the file is removed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        sink = _Sink(fd, path, meter)
        sink.write(content.head)
        for spec in content.specs:
            done = 0
            for part in parts(spec):
                _check_part(spec, part, done)
                sink.write(_bytes_of(part))
                done += part.numel()
            if done != spec.numel:
                raise ValueError(f"the parts of {show(spec.name)} have {done} elements, expected {spec.numel}")
        sink.sync()
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return path


def _check_part(spec, part, done):
    if not isinstance(part, torch.Tensor):
        raise ValueError(f"a part of {show(spec.name)} is of {type(part)}, expected a tensor")
    if part.dtype != spec.dtype or part.dim() != 1 or part.device.type != "cpu":
        raise ValueError(
            f"a part of {show(spec.name)} is {part.dim()}D {part.dtype} on {part.device}, expected 1D {spec.dtype} on cpu"
        )
    if done + part.numel() > spec.numel:
        raise ValueError(f"the parts of {show(spec.name)} have {done + part.numel()} elements or more, expected {spec.numel}")


def _bytes_of(part):
    flat = part.detach().contiguous()
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()  # view() needs stride 1, which a lone element may lack


class _Sink:
    """Writes a file from the start. Bounds the file's bytes in the page cache, because they would evict pages that training needs.

    After each _FLUSH_NBYTES, the sink asks the kernel to drop these pages, which starts their writes. After each _SETTLE_NBYTES, the sink
    waits for the writes.
    """

    def __init__(self, fd, path, meter):
        self.fd, self.path, self.meter = fd, path, meter
        self.position = self.flushed = self.settled = 0

    def write(self, data):
        """data: a flat buffer of bytes."""
        data = memoryview(data)
        while len(data):
            with naming(self.path):
                nbytes = os.write(self.fd, data[:_PIECE_NBYTES])
                self.position += nbytes
                self._bound()
            data = data[nbytes:]
            self.meter.add(nbytes)

    def sync(self):
        with naming(self.path):
            os.fsync(self.fd)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _bound(self):
        if self.position - self.settled >= _SETTLE_NBYTES:
            os.fdatasync(self.fd)
            os.posix_fadvise(self.fd, self.settled, self.position - self.settled, os.POSIX_FADV_DONTNEED)
            self.settled = self.flushed = self.position
        elif self.position - self.flushed >= _FLUSH_NBYTES:
            os.posix_fadvise(self.fd, self.flushed, self.position - self.flushed, os.POSIX_FADV_DONTNEED)
            self.flushed = self.position
