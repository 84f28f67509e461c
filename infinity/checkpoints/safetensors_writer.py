"""Writing safetensors files, and folders of them, in pieces: the format is [Note: what a safetensors file is] in safetensors_format.py.

Knows files, names, dtypes and shapes. Must not know where values come from.

# [Note: a folder is whole or absent]
# Files are written under temporary names, which no reader takes for tensors, then renamed together, the index last. A crash
# between two renames leaves some of the numbered files and no index, which TensorFiles refuses.
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
_METADATA_NBYTES = 1 << 20  # of a header, kept for the metadata
_PIECE_NBYTES = 16 << 20  # of one write
_FLUSH_NBYTES = 64 << 20  # the kernel begins to write these
_SETTLE_NBYTES = 256 << 20  # and at most these are only in memory


def plan_files(specs: Iterable[TensorSpec], *, max_file_nbytes: int = MAX_FILE_NBYTES) -> list[tuple[str, list[TensorSpec]]]:
    """Which file holds what: (file name, its specs), in the order of the specs; max_file_nbytes bounds the tensors of a file.

    A file has at most MAX_TENSORS tensors, and a header of at most MAX_HEADER_NBYTES, as TensorFiles reads no more. A larger tensor has a
    file of its own. One file is model.safetensors, several are model-00001-of-00003.safetensors.
    Raises ValueError for a name that is taken or not a text, a shape or a dtype that the format does not have.
    """
    if max_file_nbytes < 1:
        raise ValueError(f"max_file_nbytes={max_file_nbytes}: expected at least 1")
    groups, nbytes, header_nbytes, names = [[]], 0, 0, {"__metadata__"}
    for spec in specs:
        _check_spec(spec)
        if spec.name in names:
            raise ValueError(f"the name {show(spec.name)} is taken; each tensor of a model needs its own")
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
    """Write tensors into files as `plan_files` says, and an index if there are several. Returns the bytes written.

    parts(spec) gives 1D CPU tensors of spec.dtype that, one behind the other, are the tensor's elements, row-major; it is called
    once a tensor, file by file, those of wider dtypes first. Each is written before the next is asked for.
    progress(done_nbytes, total_nbytes) is called as bytes are written, headers included. `metadata` joins {"format": "pt"}.

    The directory is made if it is missing, in a parent that exists; unlike a checkpoint, which is private, what is made for others has
    the modes of the umask. All or nothing: see [Note: a folder is whole or absent].
    Raises CheckpointError if the directory holds tensors or the disk has no room, ValueError for a spec that has no place in a
    file or parts that are not what the spec says, OSError with the path. After an error nothing is left of what was written.
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
    """What a file will hold: `head`, then the tensors of `specs`."""

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
    """At most so many bytes of a header are taken by a tensor's entry, wherever its data lies."""
    entry = {spec.name: {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [10**19, 10**19]}}
    return len(json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode())


def _contents(plan, metadata):
    """The files of a plan, the index last. All but the tensors is made here, so that it can fail before anything is written."""
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
                f"{name} needs a header of {len(text)} bytes, readers take {MAX_HEADER_NBYTES}; lower max_file_nbytes"
            )
        contents.append(_Content(name, len(text).to_bytes(8, "little") + text, tuple(specs)))
    if len(plan) > 1:
        total = sum(spec.nbytes for _, specs in plan for spec in specs)
        weight_map = {spec.name: name for name, specs in plan for spec in specs}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
        if len(text) > MAX_HEADER_NBYTES:
            raise ValueError(f"the index needs {len(text)} bytes, readers take {MAX_HEADER_NBYTES}; use shorter names")
        contents.append(_Content(INDEX, text))
    return contents


def _check_vacant(directory):
    suffixes = (SUFFIX, SUFFIX + ".index.json")
    suffixes += tuple(suffix + TEMPORARY for suffix in suffixes)
    taken = sorted(name for name in os.listdir(directory) if name.endswith(suffixes))
    if taken:
        raise CheckpointError(
            f"{directory} already holds {show(*taken)}; name another directory, or remove them (*{TEMPORARY} is of a write "
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
    """Write one file and wait until it is on the drive; removes it if that fails. Returns its path."""
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
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()  # a lone element may have any stride, but not for view()


class _Sink:
    """Writes a file from its start. What lies in the page cache is bounded, as it would push out what training needs.

    After _FLUSH_NBYTES the kernel is asked to drop them, so it begins to write; after _SETTLE_NBYTES we wait for those.
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
