"""Safetensors files, and folders of them as Hugging Face models have, read and written in pieces.

Knows files, names, dtypes and shapes. Must not know engines, chunks or ranks. Long, as the writer and a reader that trusts
nothing share the format.

    with TensorFiles("llama") as source:
        specs = [TensorSpec(info.name, info.dtype, info.shape) for info in source.names.values()]
        write_files("copy", specs, lambda spec: source.pieces(spec.name, numel=2**20))

# [Note: what a safetensors file is]
#
#   | N: 8 bytes, little endian | header: N bytes of JSON, padded with spaces | data |
#
# The header maps a name to {"dtype", "shape", "data_offsets": [begin, end)}, counted from the start of the data, and
# "__metadata__" to a map of texts. Tensors are row-major and cover the data without holes or overlaps, in any order. We keep the
# order of the specs but put wider dtypes first, so that each tensor is aligned. A folder of several files has an index, whose
# "weight_map" maps each name to the name of its file. Source: the format section of safetensors' README.

# [Note: nothing in a header is believed]
# Files come from strangers. Sizes are held against the file before memory is taken by them, a text is compared or printed as a
# repr cut short, a file name of an index never leaves its folder, and a header is read as [Note: nothing is made of JSON before it is
# known to be small] in json_text.py says. So a damaged file costs at most its header's bytes and 100 MiB.

# [Note: a folder is whole or absent]
# Files are written under temporary names, which no reader takes for tensors, then renamed together, the index last. A crash
# between two renames leaves some of the numbered files and no index, which TensorFiles refuses.
"""

import contextlib
import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from infinity.checkpoints.json_text import Budget, Text
from infinity.errors import CheckpointError

MAX_HEADER_NBYTES = 100_000_000  # what the safetensors package reads
_LISTS_NBYTES = 96 << 20  # of memory, for all that is listed in the files of one folder: some 250,000 tensors
_METADATA_NBYTES = 8 << 20
_INFO_NBYTES, _NAME_NBYTES = 320, 150  # of memory, about, for a tensor and for a name, without its text
MAX_FILE_NBYTES = 5 * 10**9

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
} | {
    code: getattr(torch, name)
    for code, name in {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}.items()
    if hasattr(torch, name)
}
_BITS_WITHOUT_DTYPE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"
_TEMPORARY = ".part"
_MAX_NUMEL = 2**63 - 1
_PIECE_NBYTES = 16 << 20  # of one write
_FLUSH_NBYTES = 64 << 20  # the kernel begins to write these
_SETTLE_NBYTES = 256 << 20  # and at most these are only in memory

_SHORT = reprlib.Repr()  # bounded in depth, too
_SHORT.maxstring = 120
_SHORT.maxlist = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorInfo(TensorSpec):
    """A tensor of a file: row-major, little endian, from byte `offset` of `file` on, which is a path."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class UnreadableInfo:
    """A tensor of a file, of a dtype (as the format calls it) that this version of torch has not."""

    name: str
    code: str
    file: str
    offset: int
    nbytes: int

    @property
    def refusal(self) -> str:
        return f"{self.file}: tensor {_show(self.name)} is of {self.code}, for which PyTorch {torch.__version__} has no dtype; convert it, or upgrade"


_NOWHERE = UnreadableInfo("", "", "", 0, 0)


class TensorFiles:
    """The tensors of one safetensors file, or of a folder: of the files that its index names, else of all its *.safetensors.

    names       file by file, in the order in which the data lies: reading in it is reading forwards
    unreadable  tensors of dtypes that this version of torch has not
    metadata    "__metadata__" of all files; of a key with several values, the first file's

    The index is model.safetensors.index.json, or the only *.safetensors.index.json. All headers are read and checked, and the
    files are held open until `close()`. Reads may come from several threads, not together with `close()`.

    Raises CheckpointError if a file or the index is damaged or incomplete or both disagree, OSError if it cannot be read.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fsdecode(path)
        self.names: dict[str, TensorInfo] = {}
        self.unreadable: dict[str, UnreadableInfo] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, _File] = {}
        paths, index = _paths_of(self.path)
        budget = Budget(_LISTS_NBYTES, f"{self.path}: what its files list", "they are not of one model, or damaged")
        with contextlib.ExitStack() as stack:
            for path in paths:
                file = self._files[path] = _File(path)
                stack.callback(file.close)
                self._add(*_read_header(file, budget))
            if index is not None:
                self._check_index(*index)
            self._open = stack.pop_all()

    def read(self, name: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Elements [start, start + numel) of the row-major tensor, to its end if numel is None: 1D [numel], fresh, on the CPU.

        Raises KeyError for a name that is in no file, CheckpointError for one that is `unreadable`, ValueError for elements outside the tensor or after `close()`,
        CheckpointError if the file was changed since it was opened, OSError with the path if it cannot be read.
        """
        if name in self.unreadable:
            raise CheckpointError(self.unreadable[name].refusal)
        info = self.names[name]
        if numel is None:
            numel = info.numel - start
        if not 0 <= start <= start + numel <= info.numel:
            raise ValueError(f"elements {start} to {start + numel} of {_show(name)}, which has {info.numel}")
        if info.file not in self._files:
            raise ValueError(f"{self.path} is closed; read from it before close()")
        out = torch.empty(numel, dtype=info.dtype, device="cpu")
        self._files[info.file].read_into(out.view(torch.uint8).numpy(), info.offset + start * info.dtype.itemsize)
        return out

    def pieces(self, name: str, numel: int) -> Iterator[torch.Tensor]:
        """The whole tensor, `numel` elements at a time: what `write_files` takes for its parts. Raises as `read` does."""
        whole = self.names[name].numel
        return (self.read(name, start, min(numel, whole - start)) for start in range(0, whole, numel))

    def close(self) -> None:
        self._files = {}
        self._open.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"TensorFiles({self.path!r}, {len(self.names)} tensors)"

    def _add(self, infos, metadata):
        for info in infos:
            twin = self.names.get(info.name) or self.unreadable.get(info.name)
            (self.names if isinstance(info, TensorInfo) else self.unreadable)[info.name] = info
            if twin is not None:
                raise CheckpointError(
                    f"{_show(info.name)} is in {twin.file} and in {info.file}; expected in one. Move files of other models away."
                )
        self.metadata = metadata | self.metadata

    def _check_index(self, path, weight_map):
        folder = os.path.dirname(path)
        absent = [
            name
            for name, file in weight_map.items()
            if (self.names.get(name) or self.unreadable.get(name, _NOWHERE)).file != os.path.join(folder, file)
        ]
        if absent:
            raise CheckpointError(
                f"{path} names tensors that their files do not have: {_show(*absent)}. Index and files are not of one model, or "
                "of different versions; download or copy the folder again."
            )


def plan_files(specs: Iterable[TensorSpec], *, max_file_nbytes: int = MAX_FILE_NBYTES) -> list[tuple[str, list[TensorSpec]]]:
    """Which file holds what: (file name, its specs), in the order of the specs; max_file_nbytes bounds the tensors of a file.

    A larger tensor has a file of its own. One file is model.safetensors, several are model-00001-of-00003.safetensors.
    Raises ValueError for a name that is taken or not a text, a shape or a dtype that the format does not have.
    """
    if max_file_nbytes < 1:
        raise ValueError(f"max_file_nbytes={max_file_nbytes}: expected at least 1")
    groups, nbytes, names = [[]], 0, {"__metadata__"}
    for spec in specs:
        _check_spec(spec)
        if spec.name in names:
            raise ValueError(f"the name {_show(spec.name)} is taken; each tensor of a model needs its own")
        names.add(spec.name)
        if groups[-1] and nbytes + spec.nbytes > max_file_nbytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(spec)
        nbytes += spec.nbytes
    if len(groups) == 1:
        return [("model" + _SUFFIX, groups[0])]
    return [(f"model-{number:05}-of-{len(groups):05}{_SUFFIX}", group) for number, group in enumerate(groups, 1)]


def write_files(
    directory: str | os.PathLike,
    specs: Iterable[TensorSpec],
    parts: Callable[[TensorSpec], Iterable[torch.Tensor]],
    *,
    max_file_nbytes: int = MAX_FILE_NBYTES,
    metadata: dict[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
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
            made.append(_write(path + _TEMPORARY, content, parts, meter))
        for path in paths:
            made.append(path)
            os.rename(path + _TEMPORARY, path)
        _sync_directory(directory)
        if is_new:
            _sync_directory(parent)
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


@contextlib.contextmanager
def _naming(path):
    """Calls on a descriptor raise an OSError that does not know the path."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


# ---- reading ----


class _File:
    """An open file that must stay what it was at first."""

    _fd = -1

    def __init__(self, path):
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{path} is not a file but a directory or device; expected a safetensors file")
        self.nbytes = status.st_size
        self._changed_ns = status.st_mtime_ns

    def read_into(self, memory, offset):
        """Fill a flat buffer of bytes from the file's byte `offset` on."""
        memory = memoryview(memory)
        done = 0
        with _naming(self.path):
            while done < len(memory):
                nbytes = os.preadv(self._fd, [memory[done:]], offset + done)
                if not nbytes:
                    break
                done += nbytes
            status = os.fstat(self._fd)
        if done < len(memory) or (status.st_size, status.st_mtime_ns) != (self.nbytes, self._changed_ns):
            raise CheckpointError(
                f"{self.path} was changed while it was read: it had {self.nbytes} bytes when it was opened, and has "
                f"{status.st_size} now. Begin again when nothing writes to it."
            )

    def close(self):
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close


def _damaged(path, what):
    return CheckpointError(f"{path}: {what}. It is damaged, incomplete or not what its name says; download or copy it again.")


def _read_header(file, budget):
    """([TensorInfo or UnreadableInfo] in the order of their data, metadata) of a file; [Note: nothing in a header is believed]."""
    if file.nbytes < 8:
        raise _damaged(file.path, f"has {file.nbytes} bytes, expected 8 for the length of a header")
    prefix = bytearray(8)
    file.read_into(prefix, 0)
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_NBYTES, file.nbytes - 8)
    if length > limit:
        raise _damaged(file.path, f"a header of {length} bytes, expected at most {limit} in a file of {file.nbytes}")
    text = bytearray(length)
    file.read_into(text, 8)
    entries, metadata = {}, None
    with _reading(file.path, "header"):
        json = Text(memoryview(text))
        for name in json.members():
            if name in entries or (name == "__metadata__" and metadata is not None):
                raise ValueError(f"the key {_show(name)} is there twice")
            if name == "__metadata__":
                metadata = json.value(Budget(_METADATA_NBYTES, f"{file.path}: its __metadata__", "it is no safetensors file's"))
                if not isinstance(metadata, dict) or not all(_is_text(value) for item in metadata.items() for value in item):
                    raise _damaged(file.path, "__metadata__ is not a map of texts to texts")
                continue
            budget.take(_INFO_NBYTES + len(name))
            entries[name] = _parse_tensor(name, json.value(), file, 8 + length)
        json.end()
    infos = sorted(entries.values(), key=lambda info: (info.offset, info.nbytes))
    end = 8 + length
    for info in infos:
        if info.offset != end:
            problem = "overlaps the one before it" if info.offset < end else f"lies behind {info.offset - end} bytes of no tensor"
            raise _damaged(file.path, f"tensor {_show(info.name)} {problem}")
        end += info.nbytes
    if end != file.nbytes:
        raise _damaged(file.path, f"{file.nbytes - end} bytes behind the last tensor")
    return infos, metadata or {}


def _parse_tensor(name, entry, file, data):
    """The TensorInfo of one entry of a header, where `data` is the offset of the data."""

    def refuse(what):
        return _damaged(file.path, f"tensor {_show(name)} {what}")

    if not _is_text(name):
        raise refuse("has a name that is not Unicode")
    if not isinstance(entry, dict):
        raise refuse(f"is {_show(entry)}, expected dtype, shape and data_offsets")
    code, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(code, str) or (code not in DTYPES and code not in _BITS_WITHOUT_DTYPE):
        raise refuse(f"has dtype {_show(code)}, expected one of {', '.join(DTYPES)}")
    dtype = DTYPES.get(code)
    if not _is_sizes(shape):
        raise refuse(f"has shape {_show(shape)}, expected a list of sizes")
    if not _is_sizes(span) or len(span) != 2 or not span[0] <= span[1] <= file.nbytes - data:
        raise refuse(f"has data_offsets {_show(span)}, expected a begin and an end in {file.nbytes - data} bytes of data")
    numel = 1
    for size in shape:
        numel *= size
        if numel > _MAX_NUMEL:  # at once: a product of many would take long
            raise refuse(f"has shape {_show(shape)}, which is more than any memory holds")
    bits = numel * (8 * dtype.itemsize if dtype is not None else _BITS_WITHOUT_DTYPE[code])
    if bits != 8 * (span[1] - span[0]):
        raise refuse(f"has {span[1] - span[0]} bytes, expected {bits / 8:g} for {code} {_show(shape)}")
    if dtype is None:
        return UnreadableInfo(name, code, file.path, data + span[0], span[1] - span[0])
    return TensorInfo(name, dtype, tuple(shape), file.path, data + span[0])


def _paths_of(path):
    """([path] of the files to read, (path, weight_map) of their index or None)."""
    if not os.path.isdir(path):
        return [path], None
    listing = sorted(name for name in os.listdir(path) if not name.startswith("."))
    indices = [name for name in listing if name.endswith(_SUFFIX + ".index.json")]
    if _INDEX in indices:
        indices = [_INDEX]
    if len(indices) > 1:
        raise CheckpointError(f"{path} has several indices: {_show(*indices)}; expected one. Move those of other models away.")
    if indices:
        index = os.path.join(path, indices[0])
        weight_map = _read_index(index)
        files = sorted(set(weight_map.values()))
        missing = [name for name in files if not os.path.exists(os.path.join(path, name))]
        if missing:
            raise CheckpointError(f"{path} lacks {len(missing)} of {len(files)} files: {_show(*missing)}. Download or copy them.")
        return [os.path.join(path, name) for name in files], (index, weight_map)
    files = [name for name in listing if name.endswith(_SUFFIX)]
    if not files:
        raise CheckpointError(f"{path} has no *{_SUFFIX} file; name a safetensors file or a folder of a model that has them")
    _check_numbered(path, files)
    return [os.path.join(path, name) for name in files], None


def _check_numbered(path, files):
    """Files that say how many they are must all be there; without an index nothing else tells."""
    series = {}
    for name in files:
        match = re.fullmatch(r"(.*)-\d+-of-(\d{1,9})" + re.escape(_SUFFIX), name, re.ASCII | re.DOTALL)
        if match:
            series.setdefault(match.groups(), []).append(name)
    for (_, number), names in series.items():
        if len(names) != int(number):
            raise CheckpointError(
                f"{path} has {len(names)} of {int(number)} files and no index: {_show(*names)}. Download or copy the others."
            )


def _read_index(path):
    """The weight_map of an index, {tensor: file in the same folder}."""
    file = _File(path)
    try:
        if file.nbytes > MAX_HEADER_NBYTES:
            raise _damaged(path, f"has {file.nbytes} bytes, expected at most {MAX_HEADER_NBYTES}")
        text = bytearray(file.nbytes)
        file.read_into(text, 0)
    finally:
        file.close()
    weight_map, files = None, {}
    budget = Budget(_LISTS_NBYTES, f"{path}: what it lists", "it is not of one model, or damaged")
    with _reading(path, "index"):
        json = Text(memoryview(text))
        for key in json.members():
            if key != "weight_map":
                json.value(Budget(_METADATA_NBYTES, f"{path}: what is not its weight_map", "it is no index"))
                continue
            if weight_map is not None:
                raise ValueError("the key 'weight_map' is there twice")
            if json.peek() != "{":
                raise _damaged(path, "has no weight_map of tensors to files")
            weight_map = {}
            for name in json.members():
                value = json.value()
                if name in weight_map:
                    raise ValueError(f"the key {_show(name)} is there twice")
                if not _is_text(value) or value in ("", ".", "..") or any(char in value for char in "/\\\0"):
                    raise _damaged(path, f"tensor {_show(name)} is in {_show(value)}, expected the name of a file in the same folder")
                budget.take(_NAME_NBYTES + len(name) + (len(value) + _NAME_NBYTES if value not in files else 0))
                weight_map[name] = files.setdefault(value, value)
        json.end()
    if weight_map is None:
        raise _damaged(path, "has no weight_map of tensors to files")
    return weight_map


@contextlib.contextmanager
def _reading(path, what):
    """What JSON's text makes Python raise says that the file is damaged."""
    try:
        yield
    except CheckpointError as error:
        raise error if path in str(error) else _damaged(path, f"its {what}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its {what} is not JSON, or none of ours: {error}") from None


def _is_text(value):
    """Whether it is a text with a UTF-8 form; JSON can write half of a surrogate pair, which has none."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_sizes(value):
    return isinstance(value, (list, tuple)) and all(type(size) is int and 0 <= size <= _MAX_NUMEL for size in value)


def _show(*values, limit=10):
    """Values of a stranger for a message: printable, not too many, none of them long."""
    return ", ".join(map(_SHORT.repr, values[:limit])) + (f" and {len(values) - limit} more" if len(values) > limit else "")


# ---- writing ----


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
    progress: Callable[[int, int], None] | None
    done_nbytes: int = 0

    def add(self, nbytes):
        self.done_nbytes += nbytes
        if self.progress is not None:
            self.progress(self.done_nbytes, self.total_nbytes)


def _check_spec(spec):
    if not _is_text(spec.name):
        raise ValueError(f"a tensor's name is {_show(spec.name)}, expected a text in Unicode")
    if spec.dtype not in _CODES:
        raise ValueError(f"tensor {_show(spec.name)} has dtype {spec.dtype}, expected one of {', '.join(DTYPES)}")
    if not _is_sizes(spec.shape):
        raise ValueError(f"tensor {_show(spec.name)} has shape {_show(spec.shape)}, expected sizes")


def _contents(plan, metadata):
    """The files of a plan, the index last. All but the tensors is made here, so that it can fail before anything is written."""
    if not all(_is_text(value) for item in metadata.items() for value in item):
        raise ValueError(f"metadata={_show(metadata)}: expected texts for keys and values")
    contents = []
    for name, specs in plan:
        specs = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        header, end = {"__metadata__": metadata}, 0
        for spec in specs:
            begin, end = end, end + spec.nbytes
            header[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
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
        contents.append(_Content(_INDEX, text))
    return contents


def _check_vacant(directory):
    suffixes = (_SUFFIX, _SUFFIX + ".index.json")
    suffixes += tuple(suffix + _TEMPORARY for suffix in suffixes)
    taken = sorted(name for name in os.listdir(directory) if name.endswith(suffixes))
    if taken:
        raise CheckpointError(
            f"{directory} already holds {_show(*taken)}; name another directory, or remove them (*{_TEMPORARY} is of a write "
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
                raise ValueError(f"the parts of {_show(spec.name)} have {done} elements, expected {spec.numel}")
        sink.sync()
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return path


def _check_part(spec, part, done):
    if not isinstance(part, torch.Tensor):
        raise ValueError(f"a part of {_show(spec.name)} is of {type(part)}, expected a tensor")
    if part.dtype != spec.dtype or part.dim() != 1 or part.device.type != "cpu":
        raise ValueError(
            f"a part of {_show(spec.name)} is {part.dim()}D {part.dtype} on {part.device}, expected 1D {spec.dtype} on cpu"
        )
    if done + part.numel() > spec.numel:
        raise ValueError(f"the parts of {_show(spec.name)} have {done + part.numel()} elements or more, expected {spec.numel}")


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
            with _naming(self.path):
                nbytes = os.write(self.fd, data[:_PIECE_NBYTES])
                self.position += nbytes
                self._bound()
            data = data[nbytes:]
            self.meter.add(nbytes)

    def sync(self):
        with _naming(self.path):
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


def _sync_directory(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)
