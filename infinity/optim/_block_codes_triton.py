"""A Triton kernel that decodes blocks of codes in one pass over memory, with the bits of `block_codes.BlockCode.decode`.

Knows flat tensors on a CUDA device. Must not know chunks, tiers or ranks. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl

_BYTES = 1024  # of codes, for one program


def decode(codes: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor) -> None:
    """Write number * scale, computed in fp32, to out [numel], in a floating dtype.

    codes: uint8 [bytes]. numbers: fp32 [256, codes in a byte], by byte. scales: fp32 [blocks], or uint8 E8M0 codes. block: values a scale.
    """
    per_byte, numel = numbers.shape[1], out.numel()
    with torch.cuda.device_of(out):
        _decode[(triton.cdiv(numel, _BYTES * per_byte),)](
            codes,
            numbers,
            scales,
            out.view(torch.int16) if out.dtype == torch.bfloat16 else out,
            numel,
            PER_BYTE=per_byte,
            BLOCK=block,
            BYTES=_BYTES,
            enable_fp_fusion=False,
        )


@triton.jit
def _decode(
    codes_ptr,
    numbers_ptr,
    scales_ptr,
    out_ptr,
    numel,
    PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    mask = at * PER_BYTE < numel
    row = tl.load(codes_ptr + at, mask=mask, other=0).to(tl.int32) * PER_BYTE
    scale = tl.load(scales_ptr + at * PER_BYTE // BLOCK, mask=mask, other=0)
    if scales_ptr.dtype.element_ty == tl.uint8:
        scale = _power(scale)
    if PER_BYTE == 1:
        value = tl.load(numbers_ptr + row) * scale
        tl.store(out_ptr + at, _rounded(value, out_ptr.dtype.element_ty), mask=mask)
    else:
        value = tl.interleave(tl.load(numbers_ptr + row) * scale, tl.load(numbers_ptr + row + 1) * scale)
        place = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
        tl.store(out_ptr + place, _rounded(value, out_ptr.dtype.element_ty), mask=place < numel)


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    """fp32 in another dtype; int16: the bits of the nearest bf16. Triton's interpreter does not round to the nearest bf16 by itself."""
    if dtype == tl.int16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value == value, nearest, 0x7FC0).to(tl.int16)
    return value.to(dtype)


@triton.jit
def _power(code):
    """An E8M0 code, 2^(code - 127), as fp32. Code 0 is a denormal number, and 255 is NaN."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, tl.where(code == 255, 0x7FC00000, code << 23))
    return bits.to(tl.float32, bitcast=True)
