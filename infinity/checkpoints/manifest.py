"""The content of a checkpoint's manifest, as a value and as JSON.

Knows names, sizes and JSON. Must not know engines, bytes of tensors, or how files are read and written. manifest_check.py reads a manifest.

# [Note: the format of a checkpoint]
# A directory with `manifest.json` and one folder `data-<12 hexadecimal digits>`. A rename replaces the manifest when all files of the new
# folder are on the disk. A file that the manifest does not name is not part of the checkpoint. The manifest is a JSON object in ASCII, of
# at most 128 MiB, with these keys in this order:
#
#   format, version   "infinity checkpoint"; 1, or 2 if any parameter has a dtype of its own, 3 if any has moments of its own, 4 if any has
#                     an average
#   folder            name of the folder with the files below
#   step              of the optimizer: the largest `step` of all parameters
#   world, dtype      number of ranks; dtype of the parameters, such as "bf16"
#   moments_dtype, moments, seed      such as "fp32"; names of the moments; seed of stochastic rounding
#   parameters        in registration order: name, shape, trainable, group (of the optimizer, or null), step (number of updates);
#                     dtype, moments, if not those above; averaged: the number of steps in the average of the weights, if there is one;
#                     for a tile of a layer, whole: name and shape of the layer's parameter, begin of the tile
#   aliases           {other name of a tied parameter, or of a tiled layer's parameter: its name above}
#   chunks            in order: numel, trainable, pieces [[parameter, start in the chunk, start in the parameter, numel], ...] and
#                     records: for each rank [file, offset, CRC32C of each segment ...]
#   files             [name, nbytes]: "rank0-0.records", ...
#   tensors           small tensors in the file "tensors": dtype, shape, offset, nbytes, crc32c
#   model             {buffers: {name: tensor}, extra_state: {name: value}}
#   optimizer, scheduler, scaler, rng, extra       values as in [Note: values in JSON]; rng: one value per rank
#   sha256            the last key: digest of all bytes of the file before `,"sha256"`
#
# Rank r has elements [r, r + 1) * numel / world of a chunk in a record. A record is a sequence of little-endian segments. Each segment
# starts at a multiple of 4096 bytes and holds no elements behind the chunk's last piece. Zeros fill the bytes up to the next multiple of
# 4096, and readers check these zeros. Segments of a trainable record, in order:
#   weight, in the dtype of the parameters;   residual (int16) for bf16, or master (fp32) for fp16;
#   the moments, in moments_dtype for bf16 and in fp32 for other dtypes. An 8-bit moment is two segments, uint8 each: codes, and one scale
#   for 128 elements, as [Note: 8-bit moments] in infinity/optim/eight_bit.py says. A moment "name/n" has one fp32 value for n elements;
#   the average of the weights (fp32), if there is one.
# A frozen record has only the weight: of a quantised one, the codes and the scales, as [Note: quantised weights] in
# infinity/optim/block_codes.py says. fp32 bits of a bf16 weight's master: (weight bits << 16) + residual.
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
VERSIONS = ONE_DTYPE, MIXED_DTYPES, MIXED_MOMENTS, AVERAGED = 1, 2, 3, 4
NAME = "manifest.json"
FOLDER_NAME = re.compile(r"data-[0-9a-f]{12}")
FILE_NAME = re.compile(r"rank\d{1,6}-\d{1,6}\.records")
TENSORS_NAME = "tensors"
LARGEST_NBYTES = 128 << 20  # of a manifest
LARGEST_WORLD = 1 << 14
ALIGNMENT = 4096  # of records and segments, in bytes

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
    """The parameter of the plain layer that contains a tile. begin: index of the tile's first element, one number per dimension."""

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """group: index of the parameter group. step: number of updates. dtype, moments: None for those of the manifest. averaged: the number of
    steps in the average of the weights; None without an average."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    group: int | None = None
    step: int = 0
    whole: Whole | None = None
    dtype: str | None = None
    moments: tuple[str, ...] | None = None
    averaged: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def canonical(self) -> Whole:
        """The parameter of the plain layer: the one that contains this tile, or this parameter."""
        return self.whole or Whole(self.name, self.shape, (0,) * len(self.shape))

    @property
    def is_rows(self) -> bool:
        """Whether the elements are consecutive in the canonical parameter."""
        return self.shape[1:] == self.canonical.shape[1:]

    @property
    def begin(self) -> int:
        """Position of the first element in the canonical parameter, in elements."""
        begin = 0
        for at, size in zip(self.canonical.begin, self.canonical.shape):
            begin = begin * size + at
        return begin


@dataclass(frozen=True)
class RecordPlace:
    """The place of a record: index of the file, offset in bytes, and CRC32C of each segment."""

    file: int
    offset: int
    crcs: tuple[int, ...]


class Row:
    """The places of a chunk's records, by rank. One numpy table, because a manifest may list a million records."""

    __slots__ = ("table",)

    def __init__(self, table: np.ndarray):
        self.table = table

    @staticmethod
    @functools.cache  # shared by all rows: a dtype takes more memory than a row
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
    """See [Note: the format of a checkpoint]. places[c][r]: the place of rank r's record of chunk c."""

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
        """Version of the format: the lowest that can say this. Version 2 adds parameters of different dtypes, version 3 of different moments,
        version 4 averages."""
        if any(parameter.averaged is not None for parameter in self.parameters):
            return AVERAGED
        if any(parameter.moments is not None for parameter in self.parameters):
            return MIXED_MOMENTS
        return MIXED_DTYPES if any(parameter.dtype for parameter in self.parameters) else ONE_DTYPE

    @property
    def step(self) -> int:
        return max((parameter.step for parameter in self.parameters), default=0)

    @property
    def num_averaged(self) -> int:
        """Steps in the average of the weights; 0 unless all trained parameters have an average."""
        return min((parameter.averaged or 0 for parameter in self.parameters if parameter.trainable), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(file.nbytes for file in self.files) + sum(tensor.nbytes for tensor in self.tensors)

    def record(self, chunk: int, rank: int) -> Record:
        chunk = self.chunks[chunk]
        return record_layout(chunk.shard_used(rank), chunk.format)

    def dtype_of(self, parameter: Parameter) -> str:
        """The name of a parameter's storage. For most storages this is the dtype on the device."""
        return parameter.dtype or self.dtype

    def moments_of(self, parameter: Parameter) -> tuple[str, ...]:
        """The names of a trainable parameter's moments."""
        return self.moments if parameter.moments is None else parameter.moments

    def format_of(self, parameter: Parameter) -> Format:
        """The format of a parameter's record."""
        averaged = parameter.averaged is not None
        return Format(self.dtype_of(parameter), parameter.trainable, self.moments_of(parameter), self.moments_dtype, averaged=averaged)

    def to_json(self) -> bytes:
        """The bytes of `manifest.json`."""
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
    return {name: value for name, value in found.items() if value is not None or name not in ("whole", "dtype", "moments", "averaged")}
