"""What a checkpoint's manifest says, and how it is written.

Knows names, sizes and JSON. Must not know engines, tensors' bytes or how files are read and written.

# [Note: the format of a checkpoint]
# A directory with `manifest.json` and one folder `data-<12 hexadecimal digits>`. The manifest is replaced as a whole, by a rename,
# once all files of its folder are on the disk: what it does not name does not belong to the checkpoint. It is a JSON object, in ASCII,
# of at most 128 MiB, with these keys in this order:
#
#   format, version   "infinity checkpoint"; 1, or 2 where a parameter has a dtype of its own
#   folder            of the files below
#   step              of the optimizer: the greatest of all parameters'
#   world, dtype, moments_dtype, moments, seed     ranks, "bf16", "fp32", the names of the moments; the seed of rounding
#   parameters        in registration order: name, shape, trainable, group (of the optimizer, or null), step (updates received)
#                     and its dtype, where that is another than `dtype`; and, for a tile of a layer, whole: the layer's parameter (name, shape) and where the tile begins in it
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
# of 4096 bytes, little endian. A trainable one has weight (in the dtype of its parameters); residual (int16) for bf16 or master (fp32)
# for fp16; then the moments, in moments_dtype for bf16 and in fp32 for all others. A frozen one has the weight alone. Each holds the elements up to the end of the chunk's last piece, and no more. The bytes from
# the end of a segment to the next multiple of 4096 are zero, and readers check that.
# fp32 bits of a bf16 weight's master: (weight bits << 16) + residual.
#
# manifest_check.py reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from infinity.formats.format import Format
from infinity.plan.packing import Chunk
from infinity.plan.record import Record, record_layout

FORMAT = "infinity checkpoint"
VERSIONS = ONE_DTYPE, MIXED_DTYPES = 1, 2
NAME = "manifest.json"
FOLDER_NAME = re.compile(r"data-[0-9a-f]{12}")
FILE_NAME = re.compile(r"rank\d{1,6}-\d{1,6}\.records")
TENSORS_NAME = "tensors"
MOMENTS_DTYPES = ("fp32", "bf16")
LARGEST_NBYTES = 128 << 20  # of a manifest
LARGEST_WORLD = 1 << 14
ALIGNMENT = 4096  # of records and their segments, in bytes

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
    """`step` counts the updates that it received; `group` is the index of its parameter group. dtype: on the device; None for the
    manifest's."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    group: int | None = None
    step: int = 0
    whole: Whole | None = None
    dtype: str | None = None

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
class RecordPlace:
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

    def __getitem__(self, rank: int) -> RecordPlace:
        file, offset, crcs = self.table[rank]
        return RecordPlace(int(file), int(offset), tuple(crcs.tolist()))


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
    places: tuple[Sequence[RecordPlace], ...] = ()
    files: tuple[File, ...] = ()
    tensors: tuple[StoredTensor, ...] = ()
    model: dict = field(default_factory=dict)
    optimizer: dict | None = None
    scheduler: object = None
    scaler: dict | None = None
    rng: tuple = ()
    extra: object = None

    @property
    def version(self) -> int:
        """Of the format. Version 2 has parameters of different dtypes; all else is the same."""
        return MIXED_DTYPES if any(parameter.dtype for parameter in self.parameters) else ONE_DTYPE

    @property
    def step(self) -> int:
        return max((parameter.step for parameter in self.parameters), default=0)

    @property
    def nbytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.nbytes for file in self.files) + sum(tensor.nbytes for tensor in self.tensors)

    def record(self, chunk: int, rank: int) -> Record:
        chunk = self.chunks[chunk]
        return record_layout(chunk.shard_used(rank), chunk.format)

    def dtype_of(self, parameter: Parameter) -> str:
        """The storage of one of its parameters, by name: for most storages the dtype on the device."""
        return parameter.dtype or self.dtype

    def format_of(self, parameter: Parameter) -> Format:
        """The format in which one of its parameters is stored."""
        return Format(self.dtype_of(parameter), parameter.trainable, self.moments, self.moments_dtype)

    def to_json(self) -> bytes:
        """The file's bytes."""
        content = {"format": FORMAT, "version": self.version, "folder": self.folder, "step": self.step}
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
        return text + f',"sha256":"{hashlib.sha256(text).hexdigest()}"}}\n'.encode()


def _parameter_to_json(parameter: Parameter) -> dict:
    found = dataclasses.asdict(parameter)
    return {name: value for name, value in found.items() if value is not None or name not in ("whole", "dtype")}
