"""What a checkpoint's manifest says, and the proof that it may be believed.

Knows names, sizes and JSON. Must not know engines, tensors' bytes or how files are read and written. Whatever a manifest
says is checked before anything is done with it: what is read here may be damaged, or made to do harm.

# [Note: the format of a checkpoint]
# A directory with `manifest.json` and one folder `data-<12 hexadecimal digits>`. The manifest is replaced as a whole, by a rename,
# once all files of its folder are on the disk: what it does not name does not belong to the checkpoint. It is a JSON object:
#
#   format, version   "infinity checkpoint", 1
#   folder            of the files below
#   step              of the optimizer: the greatest of all parameters'
#   world, dtype, moments_dtype, moments, seed     ranks, "bf16", "fp32", the names of the moments; the seed of rounding
#   parameters        in registration order: name, shape, trainable, group (of the optimizer, or null), step (updates received)
#                     and, for a tile of a layer, whole: the layer's parameter (name, shape) and where the tile begins in it
#   aliases           {other name of a tied parameter (of a tile: of the layer's): its name above}
#   chunks            in order: numel, trainable, pieces [[parameter, start in the chunk, start in the parameter, numel], ...] and
#                     records: for each rank [file, offset, CRC32C of each segment ...]
#   files             [name, nbytes]: "rank0-0.records", ...
#   tensors           small ones, in the file "tensors": dtype, shape, offset, nbytes, crc32c
#   model             {buffers: {name: tensor}, extra_state: {name: value}}
#   optimizer, scheduler, scaler, rng, extra       rng: one a rank; values as [Note: values in JSON] says
#   sha256            last, of all bytes of the file before `,"sha256"`
#
# Rank r holds elements [r, r + 1) * numel / world of a chunk, in a record: segments one behind the other, each starting at a multiple
# of 4096 bytes, little endian. A trainable one has weight (in dtype); residual (int16) for bf16 or master (fp32) for fp16; then the
# moments. A frozen one has the weight alone. Each holds the elements up to the end of the chunk's last piece, and no more.
# fp32 bits of a bf16 weight's master: (weight bits << 16) + residual.
#
# [Note: values in JSON]
# Numbers, strings, true, false, null, lists and objects stand for themselves. Else an object of one key: $float "nan" | "inf" |
# "-inf"; $tuple [items]; $dict [[key, value], ...] where keys are not strings; $counter the same; $bytes base64; $tensor and
# $array an index of `tensors`. Subclasses of dict come back as dict, a deque as a list, numpy's numbers as Python's.
#
# Over 400 lines for the checks, one a rule above.
"""

from __future__ import annotations

import base64
import binascii
import collections
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from infinity.chunks import BLOCK_NUMEL, FORMATS, Chunk, Piece, Record, record_layout
from infinity.errors import CheckpointError

FORMAT, VERSION = "infinity checkpoint", 1
NAME = "manifest.json"
FOLDER_NAME = re.compile(r"data-[0-9a-f]{12}")
FILE_NAME = re.compile(r"rank\d{1,6}-\d{1,6}\.records")
TENSORS_NAME = "tensors"
MOMENTS_DTYPES = ("fp32", "bf16")
LARGEST_NBYTES = 1 << 30  # of a manifest
_LARGEST = 1 << 62  # of any number of elements or bytes
_MOST_BITS = 4096  # of a number in `extra`
_ALIGNMENT = 4096
_DIGEST = ',"sha256":"'
_DIGEST_NBYTES = len(_DIGEST) + 64 + len('"}\n')

TENSOR_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128 "
        "float8_e4m3fn float8_e5m2"
    ).split()
    if hasattr(torch, name)
}


@dataclass(frozen=True)
class Whole:
    """The parameter of the plain layer that a tile is a part of, and where the tile begins in it, one number a dimension."""

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """`step` counts the updates that it received; `group` is the index of its parameter group."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    group: int | None = None
    step: int = 0
    whole: Whole | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def canonical(self) -> Whole:
        """What it is a part of, which may be itself."""
        return self.whole or Whole(self.name, self.shape, (0,) * len(self.shape))

    @property
    def is_rows(self) -> bool:
        """Whether its elements lie in a row in the whole one."""
        return self.shape[1:] == self.canonical.shape[1:]

    @property
    def begin(self) -> int:
        """Where its first element lies in the whole one, in elements."""
        begin = 0
        for at, size in zip(self.canonical.begin, self.canonical.shape):
            begin = begin * size + at
        return begin


@dataclass(frozen=True)
class Place:
    """Where a record lies: index of the file, offset in bytes, and the CRC32C of each segment."""

    file: int
    offset: int
    crcs: tuple[int, ...]


@dataclass(frozen=True)
class File:
    name: str
    nbytes: int


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """See [Note: the format of a checkpoint]. places[c][r] is where rank r's record of chunk c lies."""

    folder: str
    world: int
    dtype: str
    moments_dtype: str
    moments: tuple[str, ...]
    seed: int
    parameters: tuple[Parameter, ...]
    aliases: dict[str, str]
    chunks: tuple[Chunk, ...]
    places: tuple[tuple[Place, ...], ...]
    files: tuple[File, ...]
    tensors: tuple[StoredTensor, ...] = ()
    model: dict = field(default_factory=dict)
    optimizer: dict | None = None
    scheduler: object = None
    scaler: dict | None = None
    rng: tuple = ()
    extra: object = None

    @property
    def step(self) -> int:
        return max((parameter.step for parameter in self.parameters), default=0)

    @property
    def nbytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.nbytes for file in self.files) + sum(tensor.nbytes for tensor in self.tensors)

    def record(self, chunk: int, rank: int) -> Record:
        chunk = self.chunks[chunk]
        return record_layout(chunk.shard_used(rank), self.dtype, chunk.trainable, self.moments, self.moments_dtype)

    def to_json(self) -> bytes:
        """The file's bytes."""
        content = {"format": FORMAT, "version": VERSION, "folder": self.folder, "step": self.step}
        for name in ("world", "dtype", "moments_dtype", "moments", "seed"):
            content[name] = getattr(self, name)
        content["parameters"] = [_parameter_to_json(parameter) for parameter in self.parameters]
        content["aliases"] = self.aliases
        content["chunks"] = [
            {
                "numel": chunk.numel,
                "trainable": chunk.trainable,
                "pieces": [[piece.param, piece.start, piece.param_start, piece.numel] for piece in chunk.pieces],
                "records": [[place.file, place.offset, *place.crcs] for place in places],
            }
            for chunk, places in zip(self.chunks, self.places, strict=True)
        ]
        content["files"] = [[file.name, file.nbytes] for file in self.files]
        content["tensors"] = [dataclasses.asdict(tensor) for tensor in self.tensors]
        for name in ("model", "optimizer", "scheduler", "scaler", "rng", "extra"):
            content[name] = getattr(self, name)
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)[:-1].encode()
        return text + f'{_DIGEST}{hashlib.sha256(text).hexdigest()}"}}\n'.encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Raises CheckpointError that names `where` for anything but a whole, consistent manifest."""
        content = _signed(data, where)
        try:
            return _Checked(content).manifest()
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError, IndexError) as error:
            raise CheckpointError(f"{where}: the manifest makes no sense ({type(error).__name__}: {error})") from None


def _parameter_to_json(parameter: Parameter) -> dict:
    found = dataclasses.asdict(parameter)
    if parameter.whole is None:
        del found["whole"]
    return found


def _signed(data: bytes, where: str) -> dict:
    """The object that the bytes stand for, once their digest is found right."""
    body, tail = data[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    try:
        match = re.fullmatch(rb',"sha256":"([0-9a-f]{64})"}\n', tail)
        if match is None or hashlib.sha256(body).hexdigest().encode() != match[1]:
            raise CheckpointError(f"{where}: the manifest is damaged or cut: its digest is not that of its bytes; use another checkpoint")
        content = json.loads(body + b"}", object_pairs_hook=_unique, parse_constant=_no_constant)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: the manifest is no JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{where}: this is no manifest of an infinity checkpoint")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{where}: format version {content.get('version')!r}, expected {VERSION}: read it with the release of infinity that "
            f"wrote it"
        )
    return content


def _unique(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_constant(name):
    raise ValueError(f"{name} is no JSON number")


class _Checked:
    """Turns a JSON object into a Manifest; raises CheckpointError or what a wrong type makes Python raise."""

    def __init__(self, content: dict):
        self.content = content

    def manifest(self) -> Manifest:
        content = self.content
        self.world = _number(content["world"], "world", 1, 1 << 20)
        self.dtype = _choice(content["dtype"], "dtype", FORMATS)
        self.moments_dtype = _choice(content["moments_dtype"], "moments_dtype", MOMENTS_DTYPES)
        self.moments = tuple(_text(name, "moments") for name in _list(content["moments"], "moments", 64))
        if len(set(self.moments)) < len(self.moments) or any(not name.isidentifier() for name in self.moments):
            raise CheckpointError(f"moments {self.moments} are no names, or the same one twice")
        folder = _text(content["folder"], "folder")
        if not FOLDER_NAME.fullmatch(folder):
            raise CheckpointError(f"folder {folder!r} is no name of a checkpoint's folder")
        self.parameters = self._parameters()
        self.files = self._files()
        chunks, places = self._chunks()
        self._check_pieces(chunks)
        self._check_places(chunks, places)
        manifest = Manifest(
            folder=folder,
            world=self.world,
            dtype=self.dtype,
            moments_dtype=self.moments_dtype,
            moments=self.moments,
            seed=_number(content["seed"], "seed", 0, (1 << 64) - 1),
            parameters=self.parameters,
            aliases=self._aliases(),
            chunks=chunks,
            places=places,
            files=self.files,
            tensors=self._tensors(),
            model=_object(content["model"], "model"),
            optimizer=content["optimizer"] if content["optimizer"] is None else _object(content["optimizer"], "optimizer"),
            scheduler=content["scheduler"],
            scaler=content["scaler"] if content["scaler"] is None else _object(content["scaler"], "scaler"),
            rng=tuple(_list(content["rng"], "rng", self.world)),
            extra=content["extra"],
        )
        if content["step"] != manifest.step:
            raise CheckpointError(f"step {content['step']!r}, but the parameters say {manifest.step}")
        return manifest

    def _parameters(self) -> tuple[Parameter, ...]:
        found, names = [], set()
        for entry in _list(self.content["parameters"], "parameters"):
            name = _text(_object(entry, "a parameter")["name"], "a parameter's name")
            if name in names:
                raise CheckpointError(f"parameter {name} stands there twice")
            names.add(name)
            shape = _shape(entry["shape"], name)
            if not 0 < math.prod(shape) < _LARGEST:
                raise CheckpointError(f"parameter {name} of shape {shape} has no or too many elements")
            whole = _whole(entry["whole"], name, shape) if "whole" in entry else None
            group = entry["group"] if entry["group"] is None else _number(entry["group"], f"{name}: group", 0, 1 << 32)
            trainable, step = _flag(entry["trainable"], name), _number(entry["step"], f"{name}: step")
            found.append(Parameter(name, shape, trainable, group, step, whole))
        return tuple(found)

    def _aliases(self) -> dict[str, str]:
        names = {parameter.canonical.name for parameter in self.parameters}
        aliases = _object(self.content["aliases"], "aliases")
        for alias, name in aliases.items():
            if alias in names or _text(name, "aliases") not in names:
                raise CheckpointError(f"alias {alias!r} of {name!r}: expected another name of a parameter")
        return aliases

    def _files(self) -> tuple[File, ...]:
        found, names = [], set()
        for entry in _list(self.content["files"], "files"):
            name, nbytes = _list(entry, "a file", 2)
            if not FILE_NAME.fullmatch(_text(name, "a file's name")) or name in names:
                raise CheckpointError(f"file {name!r}: expected a name such as rank0-0.records, once")
            names.add(name)
            found.append(File(name, _number(nbytes, f"size of {name}")))
        return tuple(found)

    def _chunks(self) -> tuple[tuple[Chunk, ...], tuple[tuple[Place, ...], ...]]:
        chunks, places = [], []
        for index, entry in enumerate(_list(self.content["chunks"], "chunks")):
            what = f"chunk {index}"
            numel, trainable = _number(_object(entry, what)["numel"], what, 1), _flag(entry["trainable"], what)
            if numel % (self.world * BLOCK_NUMEL):
                raise CheckpointError(f"{what} of {numel} elements cannot be shared by {self.world} ranks")
            pieces, end = [], 0
            for piece in _list(entry["pieces"], what):
                param, start, param_start, count = (_number(value, what) for value in _list(piece, what, 4))
                if param >= len(self.parameters) or not end <= start < end + BLOCK_NUMEL or count < 1 or start + count > numel:
                    raise CheckpointError(f"{what}: a piece is out of order or bounds")
                if self.parameters[param].trainable != trainable:
                    raise CheckpointError(f"{what} mixes frozen and trainable parameters")
                pieces.append(Piece(param, start, param_start, count))
                end = start + count
            chunks.append(Chunk(index, 0, 0, numel, end, tuple(pieces), self.dtype, trainable, self.world))
            if not pieces:
                raise CheckpointError(f"{what} is empty")
            records = _list(entry["records"], what, self.world)
            if len(records) != self.world:
                raise CheckpointError(f"{what} has records of {len(records)} ranks of {self.world}")
            num_segments = len(record_layout(0, self.dtype, trainable, self.moments, self.moments_dtype).segments)
            places.append(tuple(self._place(record, what, num_segments) for record in records))
        return tuple(chunks), tuple(places)

    def _place(self, record, what: str, num_segments: int) -> Place:
        file, offset, *crcs = (_number(value, what) for value in _list(record, what, 2 + num_segments))
        if file >= len(self.files) or offset % _ALIGNMENT or len(crcs) != num_segments or max(crcs) >= 1 << 32:
            raise CheckpointError(f"{what}: a record's place makes no sense")
        return Place(file, offset, tuple(crcs))

    def _check_pieces(self, chunks: tuple[Chunk, ...]) -> None:
        """Every element of every parameter lies in one piece."""
        held: list[list[tuple[int, int]]] = [[] for _ in self.parameters]
        for chunk in chunks:
            for piece in chunk.pieces:
                held[piece.param].append((piece.param_start, piece.numel))
        for parameter, parts in zip(self.parameters, held):
            end = 0
            for start, numel in sorted(parts):
                if start != end:
                    raise CheckpointError(f"{parameter.name}: elements from {min(start, end)} on are missing or there twice")
                end = start + numel
            if end != parameter.numel:
                raise CheckpointError(f"{parameter.name} has {parameter.numel} elements, and pieces of {end}")

    def _check_places(self, chunks, places) -> None:
        """Records lie inside their files, and not on one another."""
        held: list[list[tuple[int, int, int]]] = [[] for _ in self.files]
        for chunk, records in zip(chunks, places):
            for rank, place in enumerate(records):
                layout = record_layout(chunk.shard_used(rank), self.dtype, chunk.trainable, self.moments, self.moments_dtype)
                if layout.nbytes:
                    held[place.file].append((place.offset, layout.nbytes, chunk.index))
        for file, records in zip(self.files, held):
            end = 0
            for offset, nbytes, index in sorted(records):
                if offset < end or offset + nbytes > file.nbytes:
                    raise CheckpointError(f"{file.name}: the record of chunk {index} overlaps another one or the file's end")
                end = offset + nbytes

    def _tensors(self) -> tuple[StoredTensor, ...]:
        found, end = [], 0
        for entry in _list(self.content["tensors"], "tensors"):
            dtype = _choice(_object(entry, "a tensor")["dtype"], "a tensor's dtype", TENSOR_DTYPES)
            shape = _shape(entry["shape"], "a tensor")
            offset, nbytes, crc = (_number(entry[name], "a tensor") for name in ("offset", "nbytes", "crc32c"))
            if offset != end or nbytes != math.prod(shape) * TENSOR_DTYPES[dtype].itemsize:
                raise CheckpointError(f"a tensor of shape {shape} and {nbytes} bytes at {offset}: expected them in a row")
            found.append(StoredTensor(dtype, shape, offset, nbytes, crc))
            end = offset + nbytes
        return tuple(found)


def _number(value, what: str, least: int = 0, most: int = _LARGEST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise CheckpointError(f"{what}: expected a whole number from {least} to {most}, got {_short(value)}")
    return value


def _text(value, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise CheckpointError(f"{what}: expected a text, got {_short(value)}")
    return value


def _flag(value, what: str) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{what}: expected true or false, got {_short(value)}")
    return value


def _choice(value, what: str, choices) -> str:
    if not isinstance(value, str) or value not in choices:
        raise CheckpointError(f"{what}: expected one of {', '.join(choices)}, got {_short(value)}")
    return value


def _list(value, what: str, most: int = 1 << 26) -> list:
    if not isinstance(value, list) or len(value) > most:
        raise CheckpointError(f"{what}: expected a list of at most {most}, got {_short(value)}")
    return value


def _object(value, what: str) -> dict:
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected an object, got {_short(value)}")
    return value


def _shape(value, what: str) -> tuple[int, ...]:
    shape = tuple(_number(size, f"{what}: shape") for size in _list(value, f"{what}: shape", 64))
    if math.prod(max(size, 1) for size in shape) > _LARGEST:
        raise CheckpointError(f"{what}: shape {shape} is too large")
    return shape


def _whole(value, name: str, shape: tuple[int, ...]) -> Whole:
    whole = _object(value, name)
    found = Whole(_text(whole["name"], name), _shape(whole["shape"], name), _shape(whole["begin"], name))
    inside = len(found.shape) == len(found.begin) == len(shape)
    if not inside or any(begin + size > end for begin, size, end in zip(found.begin, shape, found.shape)):
        raise CheckpointError(f"{name} of shape {shape} is no part of {found.name} of shape {found.shape} at {found.begin}")
    return found


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Values of the program's, see [Note: values in JSON].


def encode(value, put: Callable[[torch.Tensor], int], what: str = "extra"):
    """A value as JSON has it. put: takes a tensor and returns its index. Raises CheckpointError, naming what cannot be kept."""
    try:
        return _encode(value, put, what)
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply, or holds itself") from None


def _encode(value, put: Callable[[torch.Tensor], int], what: str):
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise CheckpointError(f"{what}: a number of {value.bit_length()} bits cannot be saved")
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        try:
            return {"$tensor": put(value)}
        except CheckpointError as error:
            raise CheckpointError(f"{what}: {error}") from None
    if type(value) in (np.ndarray, np.memmap):
        try:
            return {"$array": put(torch.from_numpy(np.array(value, order="C")))}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{what}: {error}") from None
    if type(value) is tuple:
        return {"$tuple": [_encode(item, put, f"{what}[{i}]") for i, item in enumerate(value)]}
    if type(value) in (list, collections.deque):
        return [_encode(item, put, f"{what}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and type(value) in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        name = "$counter" if type(value) is collections.Counter else "$dict"
        if name == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, put, f"{what}[{key!r}]") for key, item in value.items()}
        return {name: [[_encode(key, put, f"{what}: key"), _encode(item, put, f"{what}[{key!r}]")] for key, item in value.items()]}
    raise CheckpointError(
        f"{what} is of type {type(value).__name__}, which a checkpoint does not hold: give numbers, strings, bytes, tensors, arrays, "
        f"and lists, tuples and dicts of these"
    )


def decode(value, get: Callable[[int], torch.Tensor]):
    """What `encode` was given. get: a tensor by its index. Raises CheckpointError for what it did not make."""
    try:
        return _decode(value, get)
    except (TypeError, ValueError, KeyError, IndexError, binascii.Error, RecursionError) as error:
        raise CheckpointError(f"a value of the manifest makes no sense ({type(error).__name__}: {error})") from None


def _decode(value, get):
    if isinstance(value, list):
        return [_decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value), "")
    if not name.startswith("$"):
        return {key: _decode(item, get) for key, item in value.items()}
    (content,) = value.values()
    if name == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if name == "$bytes":
        return base64.b64decode(content, validate=True)
    if name == "$tuple":
        return tuple(_decode(item, get) for item in _list(content, name))
    if name in ("$dict", "$counter"):
        pairs = {_decode(key, get): _decode(item, get) for key, item in _list(content, name)}
        return collections.Counter(pairs) if name == "$counter" else pairs
    if name in ("$tensor", "$array"):
        tensor = get(_number(content, name))
        return tensor if name == "$tensor" else tensor.numpy()
    raise CheckpointError(f"a value of unknown kind {name!r}")
