"""The dtypes of the engine by name, as torch has them.

Knows torch's dtypes. Must not know which parameter has which dtype.
"""

import torch

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, as integers of the same size and shape. NaNs with the same bits are equal there."""
    return tensor.view(_INTEGERS[tensor.itemsize])
