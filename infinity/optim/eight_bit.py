"""Moments of 8 bits: fp32 values as one byte each and one scale for 128 values, and back, in operations of torch.

Knows flat tensors. Must not know rules, chunks or tiers. _eight_bit.h and _adam_triton.py have the same arithmetic, bit for bit.
"""

# [Note: 8-bit moments]
# A value is a small float: of a momentum the sign, 4 bits of exponent and 3 of mantissa; of a variance, which is never negative, 5 bits of
# exponent and 3 of mantissa. A block is 128 values of one parameter, counted from its start. Its scale is the exponent E of the largest
# value, as in the bits of fp32 (0 for a block of zeros). The code c of a magnitude x stands for
#
#     0 if c is 0, otherwise 2^(E - 127 - TOP + (c >> 3)) * (1 + (c & 7) / 8)          TOP: 14 for a momentum, 30 for a variance
#
# The largest value has the exponent field TOP. One more exponent is free, because rounding may carry into it. The smallest value besides 0
# is 1.125 * 2^-14 times the power of two of the largest value, and 1.125 * 2^-30 for a variance. Values are rounded stochastically, as in
# [Note: bf16 moments] of _adam.c: the 16 random bits are added below the 3 bits of mantissa. A value below the smallest one is rounded up with
# the probability value / smallest. Only a variance is always rounded up there: a variance of 0 beside a momentum would make a huge step. A
# value that is not finite gets the largest code. This code means NaN. The scale ignores such values. E is at least TOP + 17, so that all
# powers of two here are normal.

from __future__ import annotations

import torch

from infinity.formats.format import SCALE_BLOCK as BLOCK

_TOPS = {True: 14, False: 30}  # by whether values have a sign
_NAN = {True: 0x7F, False: 0xFF}
LEAST_EXPONENT = 17  # of the code 0


def is_signed(name: str) -> bool:
    """Whether the moment of this name may be negative."""
    return name != "variance"


@torch.no_grad()
def decoded(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """uint8 [numel], uint8 [numel / 128, rounded up] -> fp32 [numel]."""
    codes = codes.int()
    base = (scales.int() - _TOPS[signed] << 23).repeat_interleave(BLOCK)[: codes.numel()]
    magnitude = codes & 0x7F if signed else codes
    bits = torch.where(magnitude == 0, 0, (magnitude << 20) + base)
    bits = torch.where(magnitude == _NAN[signed], 0x7FC00000, bits)
    if signed:
        bits |= (codes & 0x80) << 24
    return bits.view(torch.float32)


@torch.no_grad()
def encode(values: torch.Tensor, random: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> None:
    """fp32 [numel], 16 random bits each as int64 [numel] -> codes uint8 [numel] and scales uint8 [numel / 128, rounded up]."""
    top, numel = _TOPS[signed], values.numel()
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    largest = torch.nn.functional.pad(torch.where(finite, magnitude, 0), (0, -numel % BLOCK)).view(-1, BLOCK).amax(dim=1)
    exponents = (largest >> 23).clamp(min=top + LEAST_EXPONENT)
    least = (exponents - top << 23).repeat_interleave(BLOCK)[:numel]  # the bits of the code 0, if it were not zero
    random = random.int()
    rounded = magnitude - least + (random << 4) >> 20
    if signed:
        scale = (270 - (exponents - top) << 23).repeat_interleave(BLOCK)[:numel].view(torch.float32)  # exact: a power of two
        few = (random.float() * 1.125 < magnitude.view(torch.float32) * scale).int()
    else:
        few = (magnitude > 0).int()
    found = torch.where(magnitude < least + (1 << 20), few, rounded)
    found = torch.where(finite, found, _NAN[signed])
    if signed:
        found |= bits >> 24 & 0x80
    codes.copy_(found)
    scales.copy_(torch.where(largest == 0, 0, exponents))

