"""Triton kernels of the arithmetic in _adam.c: the Adam update of one shard, and the squares of a gradient, each in one pass over memory.

Knows only flat tensors and numbers. Importing this module needs Triton. 16-bit floats come in as int16, so their conversion to fp32 and
back is integer arithmetic, as in _adam.c.
"""

# [Note: contraction]
# A fused multiplication and addition rounds once instead of twice. enable_fp_fusion=False forbids the fusion. Division and square root are
# the correctly rounded ones, and Triton flushes no denormals unasked.

import torch
import triton
import triton.language as tl

from infinity.formats.format import SCALE_BLOCK

_BLOCK_NUMEL = 1024  # also of the norm
_BLOCKS_AT_ONCE = 4  # blocks of the norm, one warp each
_ROWS = 8  # blocks of 8-bit moments
_WEIGHT_KEY = 255 * 0x9E3779B9  # as in _adam.c
_UNSPECIALIZED = ["key0", "key1", "index", "weight_key1"]  # a version for each multiple of 16 would cause many compilations


def adam(weight, residual, moments, grad, scalars, decoupled: bool, dither) -> None:
    """Update one shard. All tensors 1-D [numel], contiguous, on one CUDA device, in the dtypes of `adam.adam_step`.

    moments: momentum and variance, and the scales of both if they have 8 bits. scalars: 9 doubles, each rounded to fp32 once. dither: (key0,
    key1, index) for bf16 and 8-bit moments, or None.
    """
    numel = weight.numel()
    key0, key1, index = (_signed(value) for value in dither or (0, 0, 0))
    split = residual is not None
    momentum, variance, *scales = moments
    with torch.cuda.device_of(weight):
        if scales:
            _adam_coded[(triton.cdiv(numel, _ROWS * SCALE_BLOCK),)](
                _bits(weight),
                residual if split else _bits(weight),
                momentum,
                variance,
                *scales,
                _bits(grad),
                numel,
                *scalars,
                key0,
                key1,
                index,
                _signed((key1 + _WEIGHT_KEY) & 0xFFFFFFFF),
                SPLIT=split,
                NARROW_GRAD=grad.dtype == torch.bfloat16,
                DECOUPLED=decoupled,
                ROWS=_ROWS,
                BLOCK=SCALE_BLOCK,
                enable_fp_fusion=False,
            )
            return
        _adam[(triton.cdiv(numel, _BLOCK_NUMEL),)](
            _bits(weight),
            _bits(residual) if split else _bits(weight),
            _bits(momentum),
            _bits(variance),
            _bits(grad),
            numel,
            *scalars,
            key0,
            key1,
            index,
            SPLIT=split,
            NARROW_GRAD=grad.dtype == torch.bfloat16,
            DITHER=dither is not None,
            DECOUPLED=decoupled,
            BLOCK=_BLOCK_NUMEL,
            enable_fp_fusion=False,
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _signed(value: int) -> int:
    """The int32 with the same 32 bits."""
    return value - (1 << 32) if value >= 1 << 31 else value


@triton.jit
def _widen(bits):
    """int16 bits of a bf16 to fp32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _one_nan(value):
    """The int32 bits of an fp32 value, with 0x7FC00000 for every NaN."""
    return tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _updated(
    p, g, m, v, grad_scale, decay_or_l2, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, step_size, DECOUPLED: tl.constexpr
):
    """fp32 values -> the int32 bits of weight, momentum and variance after the update, with one NaN for every NaN."""
    g = g * grad_scale
    if DECOUPLED:
        p = p * decay_or_l2
    else:
        g = g + p * decay_or_l2
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    d = tl.sqrt_rn(v) * inv_sqrt_bias2 + eps
    return _one_nan(p - tl.div_rn(m, d) * step_size), _one_nan(m), _one_nan(v)


@triton.jit
def _random(at, key0, key1, index):
    """32 random bits for each element, as in [Note: bf16 moments] in _adam.c."""
    x = (at.to(tl.uint32) + index.to(tl.uint32, bitcast=True) + key0.to(tl.uint32, bitcast=True)) * 0x85EBCA6B
    x = (x ^ (x >> 15) ^ key1.to(tl.uint32, bitcast=True)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _adam(
    weight_ptr,
    residual_ptr,
    momentum_ptr,
    variance_ptr,
    grad_ptr,
    numel,
    grad_scale,
    decay_or_l2,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    inv_sqrt_bias2,
    eps,
    step_size,
    key0,
    key1,
    index,
    SPLIT: tl.constexpr,
    NARROW_GRAD: tl.constexpr,
    DITHER: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    weight = tl.load(weight_ptr + at, mask=mask)
    momentum = tl.load(momentum_ptr + at, mask=mask)
    variance = tl.load(variance_ptr + at, mask=mask)
    grad = tl.load(grad_ptr + at, mask=mask)
    if SPLIT:
        residual = tl.load(residual_ptr + at, mask=mask)
        p = ((weight.to(tl.int32) << 16) + residual.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        p = weight
    g = _widen(grad) if NARROW_GRAD else grad
    m = _widen(momentum) if DITHER else momentum
    v = _widen(variance) if DITHER else variance
    p, m, v = _updated(
        p, g, m, v, grad_scale, decay_or_l2, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, step_size, DECOUPLED
    )
    if DITHER:
        x = _random(at, key0, key1, index)
        tl.store(momentum_ptr + at, ((m + (x & 0xFFFF).to(tl.int32)) >> 16).to(tl.int16), mask=mask)
        tl.store(variance_ptr + at, ((v + (x >> 16).to(tl.int32)) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(momentum_ptr + at, m.to(tl.float32, bitcast=True), mask=mask)
        tl.store(variance_ptr + at, v.to(tl.float32, bitcast=True), mask=mask)
    if SPLIT:
        narrow = (p + 0x8000) >> 16
        tl.store(weight_ptr + at, narrow.to(tl.int16), mask=mask)
        tl.store(residual_ptr + at, (p - (narrow << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(weight_ptr + at, p.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def _decoded(code, scale, TOP: tl.constexpr, NAN: tl.constexpr):
    """8-bit codes and the scales of their blocks -> fp32: [Note: 8-bit moments] in eight_bit.py."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F if NAN == 0x7F else code
    bits = tl.where(magnitude == 0, 0, (magnitude << 20) + ((scale.to(tl.int32) - TOP) << 23))
    bits = tl.where(magnitude == NAN, 0x7FC00000, bits)
    if NAN == 0x7F:
        bits = bits | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encoded(bits, draw, mask, TOP: tl.constexpr, NAN: tl.constexpr):
    """int32 bits of fp32 values [rows, block], 16 random bits each -> int32 codes [rows, block] and scales [rows]. TOP, NAN: see _decoded."""
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    largest = tl.max(tl.where(finite & mask, magnitude, 0), axis=1)
    exponent = tl.maximum(largest >> 23, TOP + 17)
    least = ((exponent - TOP) << 23)[:, None]
    rounded = (magnitude - least + (draw << 4)) >> 20
    if NAN == 0x7F:
        scale = ((270 - (exponent - TOP)) << 23)[:, None].to(tl.float32, bitcast=True)  # exact: a power of two
        few = (draw.to(tl.float32) * 1.125 < magnitude.to(tl.float32, bitcast=True) * scale).to(tl.int32)
    else:
        few = (magnitude > 0).to(tl.int32)
    code = tl.where(finite, tl.where(magnitude < least + (1 << 20), few, rounded), NAN)
    if NAN == 0x7F:
        code = code | ((bits >> 24) & 0x80)
    return code, tl.where(largest == 0, 0, exponent)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _adam_coded(
    weight_ptr,
    residual_ptr,
    momentum_ptr,
    variance_ptr,
    momentum_scale_ptr,
    variance_scale_ptr,
    grad_ptr,
    numel,
    grad_scale,
    decay_or_l2,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    inv_sqrt_bias2,
    eps,
    step_size,
    key0,
    key1,
    index,
    weight_key1,
    SPLIT: tl.constexpr,
    NARROW_GRAD: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, has_scale = at < numel, row * BLOCK < numel
    weight = tl.load(weight_ptr + at, mask=mask, other=0)
    grad = tl.load(grad_ptr + at, mask=mask, other=0)
    p = _widen(weight)
    if SPLIT:
        residual = tl.load(residual_ptr + at, mask=mask, other=0)
        p = ((weight.to(tl.int32) << 16) + residual.to(tl.int32)).to(tl.float32, bitcast=True)
    g = _widen(grad) if NARROW_GRAD else grad
    m_scale = tl.load(momentum_scale_ptr + row, mask=has_scale, other=0)[:, None]
    v_scale = tl.load(variance_scale_ptr + row, mask=has_scale, other=0)[:, None]
    m = _decoded(tl.load(momentum_ptr + at, mask=mask, other=0), m_scale, 14, 0x7F)
    v = _decoded(tl.load(variance_ptr + at, mask=mask, other=0), v_scale, 30, 0xFF)
    p, m, v = _updated(
        p, g, m, v, grad_scale, decay_or_l2, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, step_size, DECOUPLED
    )
    x = _random(at, key0, key1, index)
    code, scale = _encoded(m, (x & 0xFFFF).to(tl.int32), mask, 14, 0x7F)
    tl.store(momentum_ptr + at, code.to(tl.uint8), mask=mask)
    tl.store(momentum_scale_ptr + row, scale.to(tl.uint8), mask=has_scale)
    code, scale = _encoded(v, (x >> 16).to(tl.int32), mask, 30, 0xFF)
    tl.store(variance_ptr + at, code.to(tl.uint8), mask=mask)
    tl.store(variance_scale_ptr + row, scale.to(tl.uint8), mask=has_scale)
    if SPLIT:
        narrow = (p + 0x8000) >> 16
        tl.store(weight_ptr + at, narrow.to(tl.int16), mask=mask)
        tl.store(residual_ptr + at, (p - (narrow << 16)).to(tl.int16), mask=mask)
    else:
        x = _random(at, key0, weight_key1, index)
        tl.store(weight_ptr + at, ((p + (x & 0xFFFF).to(tl.int32)) >> 16).to(tl.int16), mask=mask)


def block_sums(grad) -> torch.Tensor:
    """The sums of squares of a gradient's blocks, float64 [num_blocks], in the order of [Note: sums without an order] in _adam.c."""
    num_blocks = triton.cdiv(grad.numel(), _BLOCK_NUMEL)
    sums = torch.empty(num_blocks, dtype=torch.float64, device=grad.device)
    with torch.cuda.device_of(grad):
        _block_sums[(triton.cdiv(num_blocks, _BLOCKS_AT_ONCE),)](
            _bits(grad),
            sums,
            grad.numel(),
            num_blocks,
            NARROW_GRAD=grad.dtype == torch.bfloat16,
            BLOCK=_BLOCK_NUMEL,
            NUM=_BLOCKS_AT_ONCE,
            num_warps=_BLOCKS_AT_ONCE,
            enable_fp_fusion=False,
        )
    return sums


@triton.jit
def _block_sums(grad_ptr, sums_ptr, numel, num_blocks, NARROW_GRAD: tl.constexpr, BLOCK: tl.constexpr, NUM: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)
    at = block[:, None] * BLOCK + tl.arange(0, 32)[None, :]
    lanes = tl.zeros((NUM, 32), dtype=tl.float64)
    for row in range(BLOCK // 32):
        grad = tl.load(grad_ptr + at + row * 32, mask=at + row * 32 < numel, other=0)
        wide = (_widen(grad) if NARROW_GRAD else grad).to(tl.float64)
        lanes += wide * wide
    lanes = tl.sum(tl.reshape(lanes, (NUM, 2, 16)), axis=1)  # a sum of two values has one order
    lanes = tl.sum(tl.reshape(lanes, (NUM, 2, 8)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (NUM, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (NUM, 2, 2)), axis=1)
    tl.store(sums_ptr + block, tl.sum(lanes, axis=1), mask=block < num_blocks)
