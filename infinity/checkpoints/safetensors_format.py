"""The format of safetensors files: names, dtypes, and descriptions of tensors.

Knows the format. Must not know files: safetensors.py reads them, safetensors_writer.py writes them.

# [Note: the safetensors format]
#
#   | N: 8 bytes, little endian | header: N bytes of JSON, padded with spaces | data |
#
# The header maps each name to {"dtype", "shape", "data_offsets": [begin, end)}. Offsets count from the start of the data. The header also maps
# "__metadata__" to a map of texts. Tensors are row-major and cover the data without gaps or overlaps, in any order. The writer keeps the
# order of the specs but puts wider dtypes first, to align each tensor. A folder of several files has an index. The index's "weight_map"
# maps each tensor's name to a file name. Source: the format section of safetensors' README.
"""

import math
import reprlib
from dataclasses import dataclass

import torch

MAX_DIMENSIONS = 64  # of a tensor of PyTorch
MAX_NUMEL = 2**63 - 1

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
BITS_WITHOUT_DTYPE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}

CODES = {dtype: code for code, dtype in DTYPES.items()}
SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
TEMPORARY = ".part"

_SHORT = reprlib.Repr()  # limits the depth, too
_SHORT.maxstring = 120
_SHORT.maxlist = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written to a file."""

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
    """A tensor in the file with path `file`: row-major, little endian, from byte `offset` of the file on."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class UnreadableInfo:
    """A tensor in a file, with a dtype that this version of torch lacks. code: the format's name of the dtype."""

    name: str
    code: str
    file: str
    offset: int
    nbytes: int

    @property
    def refusal(self) -> str:
        what = f"{self.file}: tensor {show(self.name)} is of {self.code}"
        return f"{what}, for which PyTorch {torch.__version__} has no dtype; convert it, or upgrade"


def is_text(value):
    """Whether the value is a str that UTF-8 can encode. JSON can contain half of a surrogate pair, which UTF-8 cannot encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_sizes(value):
    """Whether the value is a list of sizes that a tensor may have."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_DIMENSIONS:
        return False
    for size in value:  # all() takes twice as long, and a header holds many sizes
        if type(size) is not int or not 0 <= size <= MAX_NUMEL:
            return False
    return True


def show(*values, limit=10):
    """Untrusted values in printable form, shortened for a message."""
    return ", ".join(map(_SHORT.repr, values[:limit])) + (f" and {len(values) - limit} more" if len(values) > limit else "")
