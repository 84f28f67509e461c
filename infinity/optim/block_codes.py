"""Quantised weights: blocks of values as codes of 4 or 8 bits and one scale a block, and back, in operations of torch.

Knows flat tensors. Must not know chunks, tiers or ranks. `CODES` has a description of each storage of quantised weights, by its name.
"""

# [Note: quantised weights]
# A block is a fixed number of values of one parameter, counted from its start. A code stands for a number of a table, and
#
#     value = number * scale          in fp32. The device gets this value, rounded to bf16.
#
#   name    codes   numbers                                   block  scale                                    bits a value
#   nf4     4 bits  16 quantiles of the normal distribution   64     fp32, the largest magnitude              4.5
#   int8    8 bits  -128 to 127                               128    fp32, the largest magnitude / 127        8.25
#   fp8     8 bits  E4M3                                      128    fp32, the largest magnitude / 448        8.25
#   mxfp4   4 bits  E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, signed  32     E8M0, a power of two                     4.25
#
# Values get the nearest number. A byte holds two codes of 4 bits, the first one in the upper half. Sources: NF4 is data type and block of
# Dettmers et al. 2023, QLoRA, appendix E, in the layout of bitsandbytes. Its double quantisation of scales would save 0.37 bits, and the saved
# scales would span the borders of shards, so that bits would depend on the number of ranks. MXFP4 is of the OCP Microscaling Formats
# specification 1.0, section 6.3, whose scale is 2^(floor(log2(largest magnitude)) - 2).
#
# A block whose values do not change keeps its codes and its scale. So a decoded weight that is written back changes no bit.

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

_STEP = 1 << 22  # values that are coded at a time: a multiple of every block. It bounds temporary memory.

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).tolist()
_E8M0 = (*(2.0 ** (code - 127) for code in range(255)), math.nan)
_E8M0_BIAS = 127


class BlockCode:
    """One way to code blocks. numbers: by code, 16 or 256; NaN for codes that no value gets. block: values that share a scale.
    has_power_scale: scales are E8M0, not fp32."""

    def __init__(self, numbers: tuple[float, ...], block: int, *, has_power_scale: bool = False):
        self.numbers, self.block, self.has_power_scale = numbers, block, has_power_scale
        self.per_byte = 2 if len(numbers) == 16 else 1
        codes: dict[float, int] = {}
        for code, number in enumerate(numbers):
            if math.isfinite(number):
                codes.setdefault(number, code)  # 0 and -0 are one number
        self.sorted = sorted(codes)
        self.code_of = [codes[number] for number in self.sorted]
        self.tables = functools.cache(self._tables)

    @torch.no_grad()
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Codes, 1-D, in their dtype, and scales -> out [numel], in a floating dtype. All are on one device."""
        if out.is_cuda and (kernels := _device_kernels()) is not None:
            numbers = self.tables(out.device)[0]
            kernels.decode(codes.view(torch.uint8), numbers, scales, self.block, out)
        else:
            self.decode_in_torch(codes, scales, out)

    @torch.no_grad()
    def decode_in_torch(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """`decode` in operations of torch, which any device has."""
        block = self.block
        for begin, end in self._parts(out.numel()):
            bytes_ = codes.view(torch.uint8)[begin // self.per_byte : -(-end // self.per_byte)]
            numbers = self.numbers_of(bytes_)
            factors = self.factors(scales[begin // block : -(-end // block)])
            whole = (end - begin) // block
            middle = begin + whole * block
            if whole:
                torch.mul(numbers[: whole * block].view(-1, block), factors[:whole, None], out=out[begin:middle].view(-1, block))
            if middle < end:
                torch.mul(numbers[whole * block : end - begin], factors[-1], out=out[middle:end])

    @torch.no_grad()
    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, known: torch.Tensor | None = None) -> None:
        """Values [numel], in a floating dtype, replace the codes and scales of those blocks that stand for other values. known: the new scales,
        if the values come from codes."""
        codes, block = codes.view(torch.uint8), self.block
        for begin, end in self._parts(values.numel()):
            bytes_ = codes[begin // self.per_byte : -(-end // self.per_byte)]
            scale = scales[begin // block : -(-end // block)]
            new = values[begin:end].float()
            old = torch.empty_like(new)
            self.decode(bytes_, scale, old)
            changed = self._blocks(new != old).any(1)
            blocks = self._blocks(new)
            new_scale = self._scales(blocks)
            if known is not None:  # not for blocks with NaN, for which a table may have no code
                new_scale = torch.where(blocks.isfinite().all(1), known[begin // block : -(-end // block)], new_scale)
            new_bytes = self._codes(blocks, new_scale)
            scale.copy_(torch.where(changed, new_scale, scale))
            each = changed.repeat_interleave(block // self.per_byte)[: bytes_.numel()]
            bytes_.copy_(torch.where(each, new_bytes[: bytes_.numel()], bytes_))

    def _scales(self, blocks: torch.Tensor) -> torch.Tensor:
        """fp32 [number, block] -> scales [number]."""
        largest = blocks.abs().amax(1)
        if not self.has_power_scale:
            return largest / self.sorted[-1]
        top = math.frexp(self.sorted[-1])[1]
        codes = (torch.frexp(largest).exponent - top + _E8M0_BIAS).clamp(0, len(_E8M0) - 2)
        return torch.where(largest.isfinite(), codes, len(_E8M0) - 1).to(torch.uint8)  # a block with NaN or infinity becomes NaN

    def _codes(self, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """fp32 [number, block], [number] -> bytes, 1-D."""
        _, edges, code_of = self.tables(blocks.device)
        factors = self.factors(scales)[:, None]
        scaled = torch.where(factors != 0, blocks * (1 / factors), 0)
        codes = code_of[torch.bucketize(scaled, edges, out_int32=True)].view(-1)
        return codes[::2] << 4 | codes[1::2] if self.per_byte == 2 else codes

    def numbers_of(self, bytes_: torch.Tensor) -> torch.Tensor:
        """The numbers of codes: uint8 [n] -> fp32 [n * per_byte]."""
        return self.tables(bytes_.device)[0].index_select(0, bytes_.int()).view(-1)

    def factors(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales in fp32."""
        return _powers(scales.device).index_select(0, scales.int()) if self.has_power_scale else scales

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, -values.numel() % self.block)).view(-1, self.block)

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers of each byte, fp32 [256, codes in a byte]; the values between two neighbouring numbers; their codes, uint8."""
        numbers = torch.tensor(self.numbers, dtype=torch.float32, device="cpu")
        if self.per_byte == 2:
            of_byte = torch.cartesian_prod(numbers, numbers)
        else:
            of_byte = numbers[:, None]
        ordered = torch.tensor(self.sorted, dtype=torch.float32, device="cpu")
        edges, code_of = (ordered[1:] + ordered[:-1]) / 2, torch.tensor(self.code_of, dtype=torch.uint8, device="cpu")
        return of_byte.to(device), edges.to(device), code_of.to(device)

    @staticmethod
    def _parts(numel: int) -> Iterator[tuple[int, int]]:
        return ((begin, min(begin + _STEP, numel)) for begin in range(0, numel, _STEP))


@functools.cache
def _device_kernels():
    """The module of the Triton kernel, or None without Triton."""
    try:
        from infinity.optim import _block_codes_triton
    except ImportError:
        return None
    return _block_codes_triton


@functools.cache
def _powers(device: torch.device) -> torch.Tensor:
    return torch.tensor(_E8M0, dtype=torch.float32, device=device)


CODES = {
    "nf4": BlockCode(_NF4, 64),
    "int8": BlockCode((*map(float, range(128)), *map(float, range(-128, 0))), 128),
    "fp8": BlockCode(tuple(_E4M3), 128),
    "mxfp4": BlockCode((*_E2M1, *(-number for number in _E2M1)), 32, has_power_scale=True),
}
