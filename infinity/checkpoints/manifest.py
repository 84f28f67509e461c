"""What a checkpoint's manifest says, and the proof that it may be believed.

Knows names, sizes and JSON. Must not know engines, tensors' bytes or how files are read and written. Whatever a manifest
says is checked before anything is done with it: what is read here may be damaged, or made to do harm.

# [Note: the format of a checkpoint]
# A directory with `manifest.json` and one folder `data-<12 hexadecimal digits>`. The manifest is replaced as a whole, by a rename,
# once all files of its folder are on the disk: what it does not name does not belong to the checkpoint. It is a JSON object, in ASCII, of at
# most 128 MiB, with these keys in this order:
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
# How it is read: [Note: nothing is made of JSON before it is known to be small] in json_text.py. Tables are bounded by what a model of over
# 100,000 parameters needs. What goes past a bound is refused, and when it is saved, too, as `Directory.commit` reads what it has written.
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
import functools
import hashlib
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from infinity.checkpoints.json_text import Budget, Text
from infinity.errors import CheckpointError
from infinity.plan.packing import BLOCK_NUMEL, Chunk, Piece
from infinity.plan.record import FORMATS, Record, record_layout

FORMAT, VERSION = "infinity checkpoint", 1
NAME = "manifest.json"
FOLDER_NAME = re.compile(r"data-[0-9a-f]{12}")
FILE_NAME = re.compile(r"rank\d{1,6}-\d{1,6}\.records")
TENSORS_NAME = "tensors"
MOMENTS_DTYPES = ("fp32", "bf16")
LARGEST_NBYTES = 128 << 20  # of a manifest
LARGEST_WORLD = 1 << 14
_ENTRIES_NBYTES = 56 << 20  # of memory, for everything that is listed
_VALUES_NBYTES = 8 << 20  # for what the program gave
_PARAMETER_NBYTES, _PIECE_NBYTES, _CHUNK_NBYTES = 184, 128, 400  # of memory, about, without names
_MOST_ALIKE = 16  # keys of a dict with one hash
_MOST_DEEP = 300  # lists and objects inside of each other, in a value of the program's
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


@dataclass(frozen=True, slots=True)
class Whole:
    """The parameter of the plain layer that a tile is a part of, and where the tile begins in it, one number a dimension."""

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]


@dataclass(frozen=True, slots=True)
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


class Row:
    """The places of a chunk's records by rank, in a table: there may be a million of them."""

    __slots__ = ("table",)

    def __init__(self, table: np.ndarray):
        self.table = table

    @staticmethod
    @functools.cache  # one for all rows: each would take more than a row does
    def dtype(num_segments: int) -> np.dtype:
        return np.dtype([("file", np.uint32), ("offset", np.uint64), ("crcs", np.uint32, (num_segments,))])

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, rank: int) -> Place:
        file, offset, crcs = self.table[rank]
        return Place(int(file), int(offset), tuple(crcs.tolist()))


@dataclass(frozen=True, slots=True)
class File:
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
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
    places: tuple[Sequence[Place], ...]
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
        body = _signed(data, where)
        try:
            return _Checked(Text(body, is_open=True)).manifest()
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError, IndexError) as error:
            raise CheckpointError(f"{where}: the manifest makes no sense ({type(error).__name__}: {error})") from None


def _parameter_to_json(parameter: Parameter) -> dict:
    found = dataclasses.asdict(parameter)
    if parameter.whole is None:
        del found["whole"]
    return found


def _signed(data: bytes, where: str) -> memoryview:
    """The JSON text before the digest, once that is found right; the brace that closes it is missing."""
    body, tail = memoryview(data)[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    match = re.fullmatch(rb',"sha256":"([0-9a-f]{64})"}\n', tail)
    if match is None or hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise CheckpointError(f"{where}: the manifest is damaged or cut: its digest is not that of its bytes; use another checkpoint")
    return body


class _Checked:
    """Turns the text of a manifest into a Manifest; raises CheckpointError or what a wrong type makes Python raise."""

    def __init__(self, text: Text):
        self.text = text
        self._names = text.members()
        self._entries = Budget(_ENTRIES_NBYTES, "the list of parameters, pieces and records", "save with fewer and larger chunks (chunk_mib)")
        self._values = Budget(_VALUES_NBYTES, "what beside weights was saved", "give long lists in extra= as tensors or arrays")
        self._numbers: dict[int, int] = {}  # one object for equal ones

    def manifest(self) -> Manifest:
        value = self.text.value
        if next(self._names, None) != "format" or value() != FORMAT:
            raise CheckpointError("this is no manifest of an infinity checkpoint")
        self._goto("version")
        if (version := value()) != VERSION or type(version) is not int:
            raise CheckpointError(f"format version {_short(version)}, expected {VERSION}: read it with the release of infinity that wrote it")
        self._goto("folder")
        folder = _text(value(), "folder")
        if not FOLDER_NAME.fullmatch(folder):
            raise CheckpointError(f"folder {_short(folder)} is no name of a checkpoint's folder")
        self._goto("step")
        step = value()
        self._goto("world")
        self.world = _number(value(), "world", 1, LARGEST_WORLD)
        self._goto("dtype")
        self.dtype = _choice(value(), "dtype", FORMATS)
        self._goto("moments_dtype")
        self.moments_dtype = _choice(value(), "moments_dtype", MOMENTS_DTYPES)
        self._goto("moments")
        self.moments = tuple(_text(name, "moments") for name in _list(value(), "moments", 64))
        if len(set(self.moments)) < len(self.moments) or any(not name.isidentifier() for name in self.moments):
            raise CheckpointError(f"moments {_short(self.moments)} are no names, or the same one twice")
        self._goto("seed")
        seed = _number(value(), "seed", 0, (1 << 64) - 1)
        self._goto("parameters")
        self.parameters = self._parameters()
        self._goto("aliases")
        aliases = self._aliases()
        self._goto("chunks")
        chunks, places = self._chunks()
        self._goto("files")
        self.files = self._files()
        self._check_pieces(chunks)
        self._check_places(chunks, places)
        self._goto("tensors")
        tensors = self._tensors()
        self._goto("model")
        model = self._model()
        rest = {}
        for name in ("optimizer", "scheduler", "scaler"):
            self._goto(name)
            rest[name] = value(self._values)
        self._goto("rng")
        rng = self._rng()
        self._goto("extra")
        rest["extra"] = value(self._values)
        for _ in self._names:
            value(self._values)
        self.text.end()
        for name in ("optimizer", "scaler"):
            if rest[name] is not None:
                _object(rest[name], name)
        manifest = Manifest(
            folder=folder,
            world=self.world,
            dtype=self.dtype,
            moments_dtype=self.moments_dtype,
            moments=self.moments,
            seed=seed,
            parameters=self.parameters,
            aliases=aliases,
            chunks=chunks,
            places=places,
            files=self.files,
            tensors=tensors,
            model=model,
            rng=rng,
            **rest,
        )
        if step != manifest.step or type(step) is not int:
            raise CheckpointError(f"step {_short(step)}, but the parameters say {manifest.step}")
        return manifest

    def _goto(self, name: str) -> None:
        """The next key must be this one: all are there, in the order of the note."""
        found = next(self._names, None)
        if found != name:
            raise CheckpointError(f"expected {name!r}, got {'the end' if found is None else _short(found)}")

    def _parameters(self) -> tuple[Parameter, ...]:
        found, names = [], set()
        for _ in self.text.items():
            entry = self.text.value()
            name = _text(_object(entry, "a parameter")["name"], "a parameter's name")
            if name in names:
                raise CheckpointError(f"parameter {_short(name)} stands there twice")
            names.add(name)
            shape = _shape(entry["shape"], name)
            self._entries.take(_PARAMETER_NBYTES + len(name) + 40 * len(shape))
            if not 0 < math.prod(shape) < _LARGEST:
                raise CheckpointError(f"parameter {_short(name)} of shape {shape} has no or too many elements")
            whole = _whole(entry["whole"], name, shape) if "whole" in entry else None
            if whole is not None:
                self._entries.take(_PARAMETER_NBYTES + len(whole.name) + 80 * len(shape))
            group = entry["group"] if entry["group"] is None else _number(entry["group"], "a parameter's group", 0, 1 << 32)
            trainable, step = _flag(entry["trainable"], name), self._same(_number(entry["step"], "a parameter's step"))
            found.append(Parameter(name, shape, trainable, group, step, whole))
        return tuple(found)

    def _aliases(self) -> dict[str, str]:
        names = {parameter.canonical.name for parameter in self.parameters}
        aliases = {}
        for alias in self.text.members():
            name = _text(self.text.value(), "aliases")
            self._entries.take(_PARAMETER_NBYTES + len(alias) + len(name))
            if alias in names or alias in aliases or name not in names:
                raise CheckpointError(f"alias {_short(alias)} of {_short(name)}: expected another name of a parameter")
            aliases[alias] = name
        return aliases

    def _files(self) -> tuple[File, ...]:
        found, names = [], set()
        for _ in self.text.items():
            name, nbytes = _list(self.text.value(), "a file", 2)
            if not FILE_NAME.fullmatch(_text(name, "a file's name")) or name in names:
                raise CheckpointError(f"file {_short(name)}: expected a name such as rank0-0.records, once")
            names.add(name)
            self._entries.take(_PARAMETER_NBYTES)
            found.append(File(name, _number(nbytes, "size of a file")))
        return tuple(found)

    def _chunks(self) -> tuple[tuple[Chunk, ...], tuple[Row, ...]]:
        chunks, rows = [], []
        for _ in self.text.items():
            what = f"chunk {len(chunks)}"
            self._entries.take(_CHUNK_NBYTES)
            entry = _object(self.text.value(self._entries.rest()), what)
            numel, trainable = self._same(_number(entry["numel"], what, 1)), _flag(entry["trainable"], what)
            if numel % (self.world * BLOCK_NUMEL):
                raise CheckpointError(f"{what} of {numel} elements cannot be shared by {self.world} ranks")
            pieces, end = self._pieces(_list(entry["pieces"], what), numel, trainable, what)
            chunks.append(Chunk(len(chunks), 0, 0, numel, end, pieces, self.dtype, trainable, self.world))
            rows.append(self._row(_list(entry["records"], what, self.world), trainable, what))
        return tuple(chunks), tuple(rows)

    def _pieces(self, values: list, numel: int, trainable: bool, what: str) -> tuple[tuple[Piece, ...], int]:
        pieces, end = [], 0
        self._entries.take(_PIECE_NBYTES * len(values))
        for value in values:
            param, start, param_start, count = [_number(number, what) for number in _list(value, what, 4)]
            if param >= len(self.parameters) or not end <= start < end + BLOCK_NUMEL or count < 1 or start + count > numel:
                raise CheckpointError(f"{what}: a piece is out of order or bounds")
            if self.parameters[param].trainable != trainable:
                raise CheckpointError(f"{what} mixes frozen and trainable parameters")
            pieces.append(Piece(param, start, param_start, count))
            end = start + count
        if not pieces:
            raise CheckpointError(f"{what} is empty")
        return tuple(pieces), end

    def _row(self, values: list, trainable: bool, what: str) -> Row:
        """Of every rank, the place of its record."""
        if len(values) != self.world:
            raise CheckpointError(f"{what} has records of {len(values)} ranks of {self.world}")
        row = Row.dtype(len(record_layout(0, self.dtype, trainable, self.moments, self.moments_dtype).segments))
        self._entries.take(row.itemsize * len(values) + 100)
        numbers = np.array(values)
        if numbers.dtype != np.int64 or numbers.shape != (len(values), 2 + row["crcs"].shape[0]) or numbers.min() < 0:
            raise CheckpointError(f"{what}: its records are not whole numbers, {2 + row['crcs'].shape[0]} each")
        if max(numbers[:, 0].max(), numbers[:, 2:].max()) >= 1 << 32 or (numbers[:, 1] % _ALIGNMENT).any():
            raise CheckpointError(f"{what}: a record's place makes no sense")
        table = np.empty(len(values), row)
        table["file"], table["offset"], table["crcs"] = numbers[:, 0], numbers[:, 1], numbers[:, 2:]
        return Row(table)

    def _model(self) -> dict:
        """Its buffers, of which there may be many, and the rest of it."""
        model: dict = {}
        for name in self.text.members():
            if name in model:
                raise CheckpointError(f"model: {_short(name)} stands there twice")
            if name != "buffers":
                model[name] = self.text.value(self._values)
                continue
            buffers = model["buffers"] = {}
            for buffer in self.text.members():
                self._entries.take(_PARAMETER_NBYTES + len(buffer))
                entry = self.text.value()
                if buffer in buffers or not isinstance(entry, dict) or entry.keys() != {"$tensor"} or type(entry["$tensor"]) is not int:
                    raise CheckpointError(f"buffer {_short(buffer)} is none of its tensors, or stands there twice")
                buffers[buffer] = entry
        return model

    def _rng(self) -> tuple:
        """Of every rank, its generators' states as they were saved; what they say is checked by who sets them."""
        found = []
        for _ in self.text.items():
            if len(found) == self.world:
                raise CheckpointError(f"generators' states of more than {self.world} ranks")
            found.append(self.text.value(self._values, texts_are_free=True))
        return tuple(found)

    def _same(self, number: int) -> int:
        return self._numbers.setdefault(number, number) if len(self._numbers) < 4096 else self._numbers.get(number, number)

    def _check_pieces(self, chunks: tuple[Chunk, ...]) -> None:
        """Every element of every parameter lies in one piece."""
        flat = array("Q")
        for chunk in chunks:
            for piece in chunk.pieces:
                flat.extend((piece.param, piece.param_start, piece.numel))
        param, start, numel = np.frombuffer(flat, dtype=np.int64).reshape(-1, 3).T if flat else np.empty((3, 0), np.int64)
        order = np.lexsort((start, param))
        param, start, end = param[order], start[order], start[order] + numel[order]
        is_first = np.diff(param, prepend=-1) != 0
        expected = np.where(is_first, 0, np.concatenate(([0], end))[: len(end)])
        if len(wrong := np.flatnonzero(start != expected)):
            at = wrong[0]
            raise CheckpointError(
                f"{_short(self.parameters[param[at]].name)}: elements from {min(start[at], expected[at])} on are missing or there twice"
            )
        ends = np.zeros(len(self.parameters), np.int64)
        ends[param] = end  # of several, the last one's
        for parameter, end in zip(self.parameters, ends.tolist()):
            if end != parameter.numel:
                raise CheckpointError(f"{_short(parameter.name)} has {parameter.numel} elements, and pieces of {end}")

    def _check_places(self, chunks, places) -> None:
        """Records lie inside their files, and not on one another."""
        held: list[array] = [array("Q") for _ in self.files]  # (offset, bytes, chunk) one behind the other
        sizes = {
            trainable: [segment.itemsize for segment in record_layout(0, self.dtype, trainable, self.moments, self.moments_dtype).segments]
            for trainable in (True, False)
        }
        for chunk, row in zip(chunks, places):
            own = enumerate(zip(row.table["file"].tolist(), row.table["offset"].tolist()))
            for rank, (file, offset) in own:
                used = chunk.shard_used(rank)
                nbytes = sum([-(-used * size // _ALIGNMENT) * _ALIGNMENT for size in sizes[chunk.trainable]])
                if file >= len(held):
                    raise CheckpointError(f"chunk {chunk.index}: a record lies in file {file} of {len(held)}")
                if nbytes > self.files[file].nbytes or offset > self.files[file].nbytes - nbytes:
                    raise CheckpointError(f"{self.files[file].name}: the record of chunk {chunk.index} goes past the file's end")
                if nbytes:
                    held[file].extend((offset, nbytes, chunk.index))
        for file, records in zip(self.files, held):
            table = np.frombuffer(records, dtype=np.uint64).reshape(-1, 3) if records else np.empty((0, 3), np.uint64)
            table = table[np.argsort(table[:, 0], kind="stable")]
            overlaps = np.flatnonzero(table[:-1, 0] + table[:-1, 1] > table[1:, 0])
            if len(overlaps):
                raise CheckpointError(f"{file.name}: the record of chunk {table[overlaps[0] + 1, 2]} overlaps another one")

    def _tensors(self) -> tuple[StoredTensor, ...]:
        found, end = [], 0
        for _ in self.text.items():
            entry = self.text.value()
            self._entries.take(_PARAMETER_NBYTES)
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
        raise CheckpointError(f"{_short(what)}: expected true or false, got {_short(value)}")
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
    shape = tuple([_number(size, "a size of a shape") for size in _list(value, "a shape", 64)])
    if math.prod(filter(None, shape)) > _LARGEST:
        raise CheckpointError(f"{_short(what)}: shape {_short(shape)} is too large")
    return shape


def _whole(value, name: str, shape: tuple[int, ...]) -> Whole:
    whole = _object(value, name)
    found = Whole(_text(whole["name"], name), _shape(whole["shape"], name), _shape(whole["begin"], name))
    inside = len(found.shape) == len(found.begin) == len(shape)
    if not inside or any(begin + size > end for begin, size, end in zip(found.begin, shape, found.shape)):
        raise CheckpointError(f"{_short(name)} of shape {shape} is no part of {_short(found.name)} of shape {found.shape} at {found.begin}")
    return found


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Values of the program's, see [Note: values in JSON].


def encode(value, put: Callable[[torch.Tensor], int], what: str = "extra"):
    """A value as JSON has it. put: takes a tensor and returns its index. Raises CheckpointError, naming what cannot be kept."""
    try:
        encoded = _encode(value, put, what)
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply, or holds itself") from None
    _check_depth(encoded, what)
    return encoded


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
        _check_keys(value, what)
        if name == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, put, f"{what}[{key!r}]") for key, item in value.items()}
        return {name: [[_encode(key, put, f"{what}: key"), _encode(item, put, f"{what}[{key!r}]")] for key, item in value.items()]}
    raise CheckpointError(
        f"{what} is of type {type(value).__name__}, which a checkpoint does not hold: give numbers, strings, bytes, tensors, arrays, "
        f"and lists, tuples and dicts of these"
    )


def decode(value, get: Callable[[int], torch.Tensor]):
    """What `encode` was given. get: a tensor by its index. Raises CheckpointError for what it did not make."""
    seen: set[int] = set()

    def once(index: int) -> torch.Tensor:  # else a few bytes could ask for one a million times
        if index in seen:
            raise CheckpointError(f"small tensor {index} stands for two values")
        seen.add(index)
        return get(index)

    _check_depth(value, "a value of the manifest")
    try:
        return _decode(value, once)
    except (TypeError, ValueError, KeyError, IndexError, binascii.Error, RecursionError) as error:
        raise CheckpointError(f"a value of the manifest makes no sense ({type(error).__name__}: {error})") from None


def _check_depth(value, what: str) -> None:
    """Refuse, as it lies in JSON, what the interpreter may have no stack for: how deep that is differs by version and caller."""
    level = [value]
    for _ in range(_MOST_DEEP):
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for items in inside for item in items]
        if not level:
            return
    raise CheckpointError(f"{what} is nested more than {_MOST_DEEP} deep")


def _check_keys(keys: Iterable, what: str) -> None:
    """Refuse keys that were made to collide, such as multiples of 2**61 - 1: a dict of n of them takes n * n / 2 comparisons."""
    alike = collections.Counter(map(hash, keys))
    if alike and max(alike.values()) > _MOST_ALIKE:
        raise CheckpointError(f"{what}: more than {_MOST_ALIKE} keys of a dict have the same hash; give a list of pairs")


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
        pairs = [(_decode(key, get), _decode(item, get)) for key, item in _list(content, name)]
        _check_keys((key for key, _ in pairs), name)
        return collections.Counter(dict(pairs)) if name == "$counter" else dict(pairs)
    if name in ("$tensor", "$array"):
        tensor = get(_number(content, name))
        return tensor if name == "$tensor" else tensor.numpy()
    raise CheckpointError(f"a value of unknown kind {name!r}")
