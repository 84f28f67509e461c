"""Quantised weights in safetensors files, as bitsandbytes and compressed-tensors write them: each appears as one tensor of fp32 values.

Knows names, layouts and arithmetic of such files. Must not know engines or models. Trusts no byte, as safetensors.py does.

# [Note: 4-bit weights of bitsandbytes]
# The file has these tensors for a weight. A byte has two codes, the first one in the upper half.
#
#   X                                    codes, uint8
#   X.quant_state.bitsandbytes__nf4      a JSON text, uint8: shape, blocksize, and nested_blocksize and nested_offset of nested scales
#   X.quant_map                          the number of each code, fp32 [16]
#   X.absmax                             a scale for each block: fp32, or nested: uint8
#   X.nested_quant_map, X.nested_absmax  of nested scales: the number of each code, fp32 [256], and a scale for each nested block, fp32
#
#   value = number * scale          a nested scale = nested number * nested absmax + nested offset
#
# The values go to a record as fp32. The largest value of a block has the number 1 or -1, so coding them as nf4 gives the same codes and scales.
#
# [Note: scaled weights of compressed-tensors]
# value = number * scale. A scale is for the whole weight, for a row, for a part of a row, or for a tile of 128 rows and 128 columns.
#
#   X.weight         int8 or fp8 [rows, columns]         X.weight_scale  a floating dtype: [1], [rows, 1], [rows, groups], or a scale a tile
#   X.weight_packed  uint8 [rows, columns / 2]: mxfp4.   X.weight_scale  uint8 [rows, columns / 32]: E8M0
#                    The first code is in the lower half of a byte.
#
# X.weight_scale_inv is another name of a scale a tile. If each block of a record has one scale here, `scales` gives these scales to the codec,
# so that the record gets the codes of the file.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Collection, Iterator, Sequence

import torch

from infinity.checkpoints.safetensors import TensorFiles
from infinity.checkpoints.safetensors_format import TensorInfo, TensorSpec, UnreadableInfo, is_sizes, show
from infinity.errors import CheckpointError
from infinity.optim.block_codes import CODES, BlockCode

_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE_NBYTES = 4096
_BLOCKS = frozenset(2**exponent for exponent in range(5, 13))  # sizes of a block that bitsandbytes has


class DecodedFiles:
    """The tensors of safetensors files. A quantised weight and its tensors become one tensor of fp32. Methods, attributes and errors: those of
    `TensorFiles` with the same names.

    own: names of the model's tensors. A weight whose scale the model has itself, such as a weight of a layer that computes in fp8, is not decoded.
    """

    def __init__(self, path: str | os.PathLike, own: Collection[str] = ()):
        self._files = TensorFiles(path)
        try:
            self.path = self._files.path
            states: dict[str, list[str]] = {}  # by the name of the weight
            for name in self._files.names:
                if _STATE in name:
                    states.setdefault(name.partition(_STATE)[0], []).append(name)
            self._quantised: dict[str, _FourBit | _Scaled] = {name: _FourBit(self._files, name, found) for name, found in states.items()}
            self._quantised |= {each.name: each for each in _scaled(self._files, own)}
        except BaseException:
            self._files.close()
            raise
        parts = {part for each in self._quantised.values() for part in each.parts}
        self.names: dict[str, TensorInfo | TensorSpec] = {name: info for name, info in self._files.names.items() if name not in parts}
        self.names |= {name: TensorSpec(name, torch.float32, each.shape) for name, each in self._quantised.items()}

    @property
    def unreadable(self) -> dict[str, UnreadableInfo]:
        return self._files.unreadable

    def is_decoded(self, name: str) -> bool:
        """Whether the values of a tensor are decoded from a quantised weight."""
        return name in self._quantised

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """A new 1-D CPU tensor of elements [start, start + numel), row-major."""
        return self._quantised[name].read(start, numel) if name in self._quantised else self._files.read(name, start, numel)

    def scales(self, name: str, storage: str, start: int, numel: int) -> torch.Tensor | None:
        """The stored scales of elements [start, start + numel), for each block of a storage of frozen weights. None if the file has none."""
        return self._quantised[name].scales(storage, start, numel) if name in self._quantised else None

    def close(self) -> None:
        self._files.close()


class _FourBit:
    """One weight: see [Note: 4-bit weights of bitsandbytes]. states: names of the tensors with the JSON text. Raises CheckpointError if its
    tensors do not fit together."""

    def __init__(self, files: TensorFiles, name: str, states: Sequence[str]):
        self.files, self.name = files, name
        self.parts = {name, *states, *(part for each in _PARTS if (part := f"{name}.{each}") in files.names)}
        state = self._state(states[0])
        self.shape = tuple(state["shape"])
        self.numel, self.block = math.prod(self.shape), state["blocksize"]
        self.is_nested = "nested_blocksize" in state
        num_scales = -(-self.numel // self.block)
        self._require("", torch.uint8, -(-self.numel // 2))
        self._require("quant_map", torch.float32, 16)
        self._require("absmax", torch.uint8 if self.is_nested else torch.float32, num_scales)
        if self.is_nested:
            self.nested_block, self.offset = state["nested_blocksize"], state["nested_offset"]
            self._require("nested_quant_map", torch.float32, 256)
            self._require("nested_absmax", torch.float32, -(-num_scales // self.nested_block))

    def read(self, start: int, numel: int) -> torch.Tensor:
        """fp32 elements [start, start + numel)."""
        begin, end = start // self.block * self.block, min(-(-(start + numel) // self.block) * self.block, self.numel)
        codes = self.files.read(self.name, begin // 2, -(-end // 2) - begin // 2)
        values = torch.empty(end - begin, dtype=torch.float32, device="cpu")
        self._code.decode(codes, self._scales(begin // self.block, -(-end // self.block)), values)
        return values[start - begin : start - begin + numel]

    def scales(self, storage: str, start: int, numel: int) -> None:
        return None  # coding the values finds them

    def _scales(self, begin: int, end: int) -> torch.Tensor:
        scales = self.files.read(f"{self.name}.absmax", begin, end - begin)
        if not self.is_nested:
            return scales
        numbers, nested = self._nested
        return numbers[scales.int()] * nested[torch.arange(begin, end, device="cpu") // self.nested_block] + self.offset

    @functools.cached_property
    def _code(self) -> BlockCode:
        return BlockCode(tuple(self.files.read(f"{self.name}.quant_map").tolist()), self.block)

    @functools.cached_property
    def _nested(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.files.read(f"{self.name}.nested_quant_map"), self.files.read(f"{self.name}.nested_absmax")

    def _state(self, name: str) -> dict:
        """The content of the tensor with the JSON text."""
        info, state = self.files.names[name], None
        if info.nbytes <= _MAX_STATE_NBYTES and not info.dtype.is_floating_point:
            try:
                state = json.loads(bytes(self.files.read(name).view(torch.uint8).tolist()))
            except (ValueError, RecursionError):
                pass
        expected = {"shape": is_sizes, "blocksize": _is_block}
        if isinstance(state, dict) and "nested_blocksize" in state:
            expected |= {"nested_blocksize": _is_block, "nested_offset": lambda value: isinstance(value, float)}
        wrong = not isinstance(state, dict) or [key for key, is_right in expected.items() if not is_right(state.get(key))]
        if wrong:
            raise CheckpointError(f"{self.files.path}: {show(name)} does not describe a 4-bit weight of bitsandbytes; download the file again")
        return state

    def _require(self, part: str, dtype: torch.dtype, numel: int) -> None:
        name = f"{self.name}.{part}" if part else self.name
        info = self.files.names.get(name)
        if info is None or (info.dtype, info.numel) != (dtype, numel):
            found = "is missing" if info is None else f"has {info.numel:,} elements of {info.dtype}"
            raise CheckpointError(f"{self.files.path}: {show(name)} {found}, expected {numel:,} of {dtype}, as bitsandbytes saves 4-bit weights")


_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def _is_block(value: object) -> bool:
    return type(value) is int and value in _BLOCKS


_TILE = 128  # rows and columns
_SCALES = ("weight_scale", "weight_scale_inv")
_PACKED = {torch.uint8}
_STORAGE_OF = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


_UNSUPPORTED = ("weight_zero_point", "weight_g_idx")
_OF_ACTIVATIONS = ("input_scale", "output_scale")


def _scaled(files: TensorFiles, own: Collection[str]) -> Iterator[_Scaled]:
    """The weights whose scale is not among the model's own tensors."""
    for name, info in files.names.items():
        base, _, last = name.rpartition(".")
        scale = next((each for part in _SCALES if (each := f"{base}.{part}") in files.names), None)
        if scale is None or scale in own:
            continue
        if last == "weight" and info.dtype in _STORAGE_OF:
            yield _Scaled(files, name, name, scale, _STORAGE_OF[info.dtype])
        elif last == "weight_packed" and info.dtype in _PACKED and files.names[scale].dtype in _PACKED:
            yield _Scaled(files, f"{base}.weight", name, scale, "mxfp4")


class _Scaled:
    """One weight: see [Note: scaled weights of compressed-tensors]. Raises CheckpointError if the two tensors do not fit together."""

    def __init__(self, files: TensorFiles, name: str, codes: str, scale: str, storage: str):
        self.files, self.name, self.codes, self.scale, self.storage = files, name, codes, scale, storage
        base = name.rpartition(".")[0]
        if wrong := next((part for each in _UNSUPPORTED if (part := f"{base}.{each}") in files.names), None):
            raise CheckpointError(f"{files.path}: {show(wrong)}: weights with zero points or groups of chosen columns cannot be read")
        self.parts = {codes, scale, *(part for each in _OF_ACTIVATIONS if (part := f"{base}.{each}") in files.names)}
        self.code = CODES[storage]
        info, of_scale = files.names[codes], files.names[scale]
        self.grid = of_scale.shape if len(of_scale.shape) == 2 else (1, 1) if of_scale.numel == 1 else (0, 0)
        self.shape = (*info.shape[:-1], info.shape[-1] * self.code.per_byte) if info.shape else ()
        self.numel = math.prod(self.shape)
        self.cell = self._cell() if len(self.shape) == 2 else (0, 0)
        if not all(self.cell) or not self._has_scale_dtype(of_scale.dtype):
            what = f"{show(codes)} has shape {list(info.shape)}, and {show(scale)} has shape {list(of_scale.shape)} and dtype {of_scale.dtype}"
            raise CheckpointError(f"{files.path}: {what}; expected two dimensions, and scales of rows, groups or tiles")

    def _cell(self) -> tuple[int, int]:
        """Rows and columns that share a scale; 0 if scales and weight do not fit together."""
        (rows, columns), (num_rows, num_columns) = self.shape, self.grid
        is_tile = [number == -(-size // _TILE) for size, number in zip(self.shape, self.grid)]
        height = {rows: 1, 1: rows}.get(num_rows, _TILE if is_tile[0] else 0)
        if height != 1 and all(is_tile):
            return _TILE, _TILE
        return height, columns // num_columns if num_columns and columns % num_columns == 0 else 0

    def _has_scale_dtype(self, dtype: torch.dtype) -> bool:
        return not dtype.is_floating_point if self.code.has_power_scale else dtype.is_floating_point

    def read(self, start: int, numel: int) -> torch.Tensor:
        """fp32 elements [start, start + numel)."""
        per = self.code.per_byte
        begin, end = start // per * per, -(-(start + numel) // per) * per
        codes = self.files.read(self.codes, begin // per, (end - begin) // per).view(torch.uint8)
        if per == 2:
            codes = codes << 4 | codes >> 4
        numbers = self.code.numbers_of(codes)[start - begin : start - begin + numel]
        return numbers * self.code.factors(self._scales(torch.arange(start, start + numel, device="cpu")))

    def scales(self, storage: str, start: int, numel: int) -> torch.Tensor | None:
        is_whole = all(size % self.code.block == 0 for size in (self.shape[1], self.cell[1])) and start % self.code.block == 0
        if storage not in {self.storage} or not is_whole:
            return None
        return self._scales(torch.arange(start, start + numel, self.code.block, device="cpu"))

    def _scales(self, elements: torch.Tensor) -> torch.Tensor:
        """The scales of elements, by their numbers."""
        rows, columns = elements // self.shape[1] // self.cell[0], elements % self.shape[1] // self.cell[1]
        return self._all_scales[rows * self.grid[1] + columns]

    @functools.cached_property
    def _all_scales(self) -> torch.Tensor:
        scales = self.files.read(self.scale)
        return scales.float() if scales.is_floating_point() else scales
