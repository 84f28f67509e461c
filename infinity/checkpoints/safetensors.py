"""A reader of safetensors files, and of folders of such files, as Hugging Face models have. The reader trusts no byte of a file.

Knows files, names, dtypes and shapes. Must not know engines, chunks or ranks.

    with TensorFiles("llama") as source:
        specs = [TensorSpec(info.name, info.dtype, info.shape) for info in source.names.values()]
        write_files("copy", specs, lambda spec: source.pieces(spec.name, numel=2**20))

# [Note: nothing in a header is believed]
# Files come from strangers. The reader compares each size with the file before an allocation of this size. A text is only compared, or
# printed as a short repr. A file name in an index never leaves the folder. [Note: bounded memory for JSON] in json_text.py describes the
# parser. Therefore a damaged file takes at most the bytes of its header and 100 MiB.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from operator import itemgetter

import torch

from infinity.checkpoints.json_text import Budget, Text
from infinity.checkpoints.safetensors_format import (
    BITS_WITHOUT_DTYPE,
    DTYPES,
    INDEX,
    MAX_NUMEL,
    SUFFIX,
    TensorInfo,
    UnreadableInfo,
    is_sizes,
    is_text,
    show,
)
from infinity.errors import CheckpointError
from infinity.system.garbage_collector import without_collections

MAX_HEADER_NBYTES = 32 << 20  # 256 bytes for each of MAX_TENSORS; such a header is read in less than 1 s
MAX_TENSORS = 1 << 17  # of one file
MAX_INDEX_NBYTES = 100_000_000
_LISTS_NBYTES = 96 << 20  # memory for the lists of all files of one folder: about 250,000 tensors
_METADATA_NBYTES = 8 << 20
_INFO_NBYTES, _NAME_NBYTES = 320, 150  # approximate memory of a tensor's description, and of a name without its characters

_NOWHERE = UnreadableInfo("", "", "", 0, 0)


class TensorFiles:
    """The tensors of one safetensors file or of a folder. Of a folder, the files named by the index, or without an index all *.safetensors.

    names: file by file, in the order of their data. Reads in this order go forwards in each file.
    unreadable: tensors of dtypes that this version of torch lacks.
    metadata: "__metadata__" of all files. If files differ in a value, the first file's value is kept.

    The index is model.safetensors.index.json, or the only *.safetensors.index.json. The constructor reads and checks all headers. The files
    stay open until `close()`. Several threads may read at a time, but not while another thread calls `close()`.

    Raises CheckpointError if a file or the index is damaged or incomplete, or if index and files differ; OSError if a read fails.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fsdecode(path)
        self.names: dict[str, TensorInfo] = {}
        self.unreadable: dict[str, UnreadableInfo] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, _File] = {}
        paths, index = _paths_of(self.path)
        budget = Budget(_LISTS_NBYTES, f"{self.path}: the lists of its files", "the files are not from one model, or damaged")
        with contextlib.ExitStack() as stack, without_collections():
            for path in paths:
                file = self._files[path] = _File(path)
                stack.callback(file.close)
                self._add(*_read_header(file, budget))
            if index is not None:
                self._check_index(*index)
            self._open = stack.pop_all()

    def read(self, name: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Return a new 1-D CPU tensor of elements [start, start + numel), row-major; by default all elements from `start` on.

        Raises KeyError for an unknown name, and ValueError for elements outside of the tensor or after `close()`. Raises CheckpointError for an
        `unreadable` name, or if the file has changed since it was opened. Raises OSError with the path if the read fails.
        """
        if name in self.unreadable:
            raise CheckpointError(self.unreadable[name].refusal)
        info = self.names[name]
        if numel is None:
            numel = info.numel - start
        if not 0 <= start <= start + numel <= info.numel:
            raise ValueError(f"elements {start} to {start + numel} of {show(name)}, which has {info.numel}")
        if info.file not in self._files:
            raise ValueError(f"{self.path} is closed; read before close()")
        out = torch.empty(numel, dtype=info.dtype, device="cpu")
        self._files[info.file].read_into(out.view(torch.uint8).numpy(), info.offset + start * info.dtype.itemsize)
        return out

    def pieces(self, name: str, numel: int) -> Iterator[torch.Tensor]:
        """The whole tensor, `numel` elements at a time, in the form that `write_files` takes. Raises the errors of `read`."""
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
                    f"{show(info.name)} is in {twin.file} and in {info.file}; expected in one file. Move files of other models away."
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
                f"{path} names tensors that the files do not have: {show(*absent)}. Index and files are from different models or "
                "versions; download or copy the folder again."
            )


@contextlib.contextmanager
def naming(path):
    """Add the path to an OSError of a call on a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


class _File:
    """An open file. A read raises CheckpointError if another program has changed the file."""

    _fd = -1

    def __init__(self, path):
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without O_NONBLOCK, a pipe would block
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{path} is a directory or device; expected a safetensors file")
        self.nbytes = status.st_size
        self._changed_ns = status.st_mtime_ns

    def read_into(self, memory, offset):
        """Fill a flat buffer with the bytes of the file from `offset` on."""
        memory = memoryview(memory)
        done = 0
        with naming(self.path):
            while done < len(memory):
                nbytes = os.preadv(self._fd, [memory[done:]], offset + done)
                if not nbytes:
                    break
                done += nbytes
            status = os.fstat(self._fd)
        if done < len(memory) or (status.st_size, status.st_mtime_ns) != (self.nbytes, self._changed_ns):
            raise CheckpointError(
                f"{self.path} was changed while it was read: {self.nbytes} bytes when opened, {status.st_size} bytes now. "
                f"Read again when no program writes to the file."
            )

    def close(self):
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close


def _damaged(path, what):
    return CheckpointError(f"{path}: {what}. The file is damaged, incomplete or of another type; download or copy it again.")


def _read_header(file, budget):
    """Return ([TensorInfo or UnreadableInfo] in the order of their data, metadata); [Note: nothing in a header is believed]."""
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
    if (num := text.count(b'"data_offsets"')) > MAX_TENSORS:  # checked first: parsing them could take 1 s
        raise _damaged(file.path, f"lists {num:,} tensors, expected at most {MAX_TENSORS:,}")
    entries, metadata = {}, None
    with _reading(file.path, "header"):
        json = Text(memoryview(text))
        for name in json.members():
            if name in entries or (name == "__metadata__" and metadata is not None):
                raise ValueError(f"the key {show(name)} appears twice")
            if name == "__metadata__":
                metadata = json.value(Budget(_METADATA_NBYTES, f"{file.path}: its __metadata__", "expected a safetensors file"))
                if not isinstance(metadata, dict) or not all(is_text(value) for item in metadata.items() for value in item):
                    raise _damaged(file.path, "__metadata__ is not a map of texts to texts")
                continue
            budget.take(_INFO_NBYTES + len(name))
            if len(entries) == MAX_TENSORS:
                raise _damaged(file.path, f"lists more than {MAX_TENSORS:,} tensors")
            entries[name] = _parse_tensor(name, json.value(), file, 8 + length)
        json.end()
    spans = sorted(entries.values(), key=itemgetter(0, 1))
    last = 8 + length
    for begin, end, info in spans:
        if begin != last:
            problem = "overlaps the tensor before it" if begin < last else f"follows {begin - last} bytes of no tensor"
            raise _damaged(file.path, f"tensor {show(info.name)} {problem}")
        last = end
    if last != file.nbytes:
        raise _damaged(file.path, f"{file.nbytes - last} bytes behind the last tensor")
    return [info for _, _, info in spans], metadata or {}


def _parse_tensor(name, entry, file, data):
    """Return (begin, end, TensorInfo or UnreadableInfo) of an entry of a header. begin, end, data: offsets in the file, in bytes."""

    def refuse(what):
        return _damaged(file.path, f"tensor {show(name)} {what}")

    if not name.isascii() and not is_text(name):
        raise refuse("has a name that is not Unicode")
    if not isinstance(entry, dict):
        raise refuse(f"is {show(entry)}, expected dtype, shape and data_offsets")
    code, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(code, str) or (code not in DTYPES and code not in BITS_WITHOUT_DTYPE):
        raise refuse(f"has dtype {show(code)}, expected one of {', '.join(DTYPES)}")
    dtype = DTYPES.get(code)
    if not is_sizes(shape):
        raise refuse(f"has shape {show(shape)}, expected a list of sizes")
    if not is_sizes(span) or len(span) != 2 or not span[0] <= span[1] <= file.nbytes - data:
        raise refuse(f"has data_offsets {show(span)}, expected a begin and an end in {file.nbytes - data} bytes of data")
    numel = 1
    for size in shape:
        numel *= size
        if numel > MAX_NUMEL:  # checked after each factor, because the product of many factors takes long
            raise refuse(f"has shape {show(shape)}, which is larger than any memory")
    bits = numel * (8 * dtype.itemsize if dtype is not None else BITS_WITHOUT_DTYPE[code])
    if bits != 8 * (span[1] - span[0]):
        raise refuse(f"has {span[1] - span[0]} bytes, expected {bits / 8:g} for {code} {show(shape)}")
    begin, end = data + span[0], data + span[1]
    info = UnreadableInfo(name, code, file.path, begin, end - begin) if dtype is None else TensorInfo(name, dtype, tuple(shape), file.path, begin)
    return begin, end, info


def _paths_of(path):
    """Return ([path] of the files to read, (path, weight_map) of their index or None)."""
    if not os.path.isdir(path):
        return [path], None
    listing = sorted(name for name in os.listdir(path) if not name.startswith("."))
    indices = [name for name in listing if name.endswith(SUFFIX + ".index.json")]
    if INDEX in indices:
        indices = [INDEX]
    if len(indices) > 1:
        raise CheckpointError(f"{path} has several indices: {show(*indices)}; expected one. Move the indices of other models away.")
    if indices:
        index = os.path.join(path, indices[0])
        weight_map = _read_index(index)
        files = sorted(set(weight_map.values()))
        missing = [name for name in files if not os.path.exists(os.path.join(path, name))]
        if missing:
            raise CheckpointError(f"{path} lacks {len(missing)} of {len(files)} files: {show(*missing)}. Download or copy them.")
        return [os.path.join(path, name) for name in files], (index, weight_map)
    files = [name for name in listing if name.endswith(SUFFIX)]
    if not files:
        raise CheckpointError(f"{path} has no *{SUFFIX} file; name a safetensors file, or a folder with safetensors files")
    _check_numbered(path, files)
    return [os.path.join(path, name) for name in files], None


def _check_numbered(path, files):
    """Raise CheckpointError if a file of a numbered series is missing. Without an index, only the file names tell the number of files."""
    series = {}
    for name in files:
        match = re.fullmatch(r"(.*)-\d+-of-(\d{1,9})" + re.escape(SUFFIX), name, re.ASCII | re.DOTALL)
        if match:
            series.setdefault(match.groups(), []).append(name)
    for (_, number), names in series.items():
        if len(names) != int(number):
            raise CheckpointError(
                f"{path} has {len(names)} of {int(number)} files and no index: {show(*names)}. Download or copy the others."
            )


def _read_index(path):
    """Return the weight_map of an index, {tensor: file in the same folder}."""
    file = _File(path)
    try:
        if file.nbytes > MAX_INDEX_NBYTES:
            raise _damaged(path, f"has {file.nbytes} bytes, expected at most {MAX_INDEX_NBYTES}")
        text = bytearray(file.nbytes)
        file.read_into(text, 0)
    finally:
        file.close()
    weight_map, files = None, {}
    budget = Budget(_LISTS_NBYTES, f"{path}: the weight_map", "the index is not from one model, or damaged")
    with _reading(path, "index"):
        json = Text(memoryview(text))
        for key in json.members():
            if key != "weight_map":
                json.value(Budget(_METADATA_NBYTES, f"{path}: the keys beside weight_map", "expected the index of a model"))
                continue
            if weight_map is not None:
                raise ValueError("the key 'weight_map' appears twice")
            if json.peek() != "{":
                raise _damaged(path, "has no weight_map of tensors to files")
            weight_map = {}
            for name in json.members():
                value = json.value()
                if name in weight_map:
                    raise ValueError(f"the key {show(name)} appears twice")
                if not is_text(value) or value in ("", ".", "..") or any(char in value for char in "/\\\0"):
                    raise _damaged(path, f"tensor {show(name)} is in {show(value)}, expected the name of a file in the same folder")
                budget.take(_NAME_NBYTES + len(name) + (len(value) + _NAME_NBYTES if value not in files else 0))
                weight_map[name] = files.setdefault(value, value)
        json.end()
    if weight_map is None:
        raise _damaged(path, "has no weight_map of tensors to files")
    return weight_map


@contextlib.contextmanager
def _reading(path, what):
    """Turn an error of the JSON parser into a CheckpointError for a damaged file."""
    try:
        with without_collections():
            yield
    except CheckpointError as error:
        raise error if path in str(error) else _damaged(path, f"its {what}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its {what} is not valid JSON of this format: {error}") from None
