"""The Adam update of one shard, the split master, and the exact gradient norm, over _adam.c.

Knows flat tensors, and the parameter name that seeds the random bits. Must not know chunks, ranks or tiers. On the CPU the C kernel
works on the tensors' own memory. On CUDA a Triton kernel works, or elementwise torch operations if Triton is missing. All give equal bits:
see [Note: the fixed arithmetic] in _adam.c.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.optim import _adam, eight_bit
from infinity.system import host_bytes

NUM_LIMBS = 72
BLOCK_NUMEL = 1024
_LANES = 32
_FALLBACK_NUMEL = 1 << 22  # elements of a gradient that are squared in float64 at a time
_GRAD_DTYPES = (torch.bfloat16, torch.float32)
_WEIGHTS, _MOMENTS = 1, 2  # parts that a call of the kernel changes
WEIGHT_PAIR = 255  # of the random bits that round weights without a master: no rule has so many moments


@dataclass(frozen=True, kw_only=True)
class AdamScalars:
    """The factors of one update of one parameter group. Doubles; the kernel rounds each to fp32 once."""

    grad_scale: float
    decay_or_l2: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_sqrt_bias2: float
    eps: float
    step_size: float
    decoupled: bool

    @classmethod
    def of(
        cls,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float = 1.0,
        decoupled: bool = True,
    ) -> AdamScalars:
        """step counts from 1. grad_scale multiplies the gradient first (clipping, 1 / loss scale, 1 / accumulation).

        decoupled: AdamW (Loshchilov & Hutter 2019, Algorithm 2); otherwise Adam with weight_decay as an L2 term.
        """
        if step < 1:
            raise ValueError(f"step is {step}, expected 1 or more: steps count from 1")
        beta1, beta2 = betas
        return cls(
            grad_scale=grad_scale,
            decay_or_l2=1 - lr * weight_decay if decoupled else weight_decay,
            beta1=beta1,
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            inv_sqrt_bias2=1 / math.sqrt(1 - beta2**step),
            eps=eps,
            step_size=lr / (1 - beta1**step),
            decoupled=decoupled,
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        """The factors, in the order of the kernels' arguments."""
        return tuple(getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "decoupled")

    def scaled(self, grad_scale: float) -> AdamScalars:
        """The scalars for a gradient that is multiplied by grad_scale first."""
        return dataclasses.replace(self, grad_scale=self.grad_scale * grad_scale)


@dataclass(frozen=True)
class Dither:
    """Random bits for elements index, index + 1, ... of a parameter, drawn from two 32-bit keys."""

    key0: int
    key1: int
    index: int

    @classmethod
    def of(cls, seed: int, name: str, step: int, index: int) -> Dither:
        """The bits for a seed, a parameter's name, the optimizer step and the first element. Chunk and rank have no influence.

        One value serves up to the next multiple of 2^32 of the index.
        """
        text = f"{seed} {step} {index >> 32} {name}".encode()
        key = hashlib.blake2b(text, digest_size=8).digest()
        return cls(int.from_bytes(key[:4], "little"), int.from_bytes(key[4:], "little"), index & 0xFFFFFFFF)

    def after(self, numel: int) -> Dither:
        """The bits for the elements after the next numel."""
        return Dither(self.key0, self.key1, self.index + numel)

    def of_pair(self, number: int) -> Dither:
        """The bits for moments 2 * number and 2 * number + 1 of a rule with more than two moments."""
        return Dither(self.key0, (self.key1 + 0x9E3779B9 * number) & 0xFFFFFFFF, self.index)

    def bits(self, numel: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """32 random bits per element, int64 [numel], as in [Note: bf16 moments] in _adam.c."""
        x = torch.arange(self.index + self.key0, self.index + self.key0 + numel, device=device) & 0xFFFFFFFF
        x = x * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 15 ^ self.key1) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16


def adam_step(
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    moments: Sequence[torch.Tensor],
    grad: torch.Tensor,
    scalars: AdamScalars,
    *,
    dither: Dither | None = None,
    threads: int = 0,
    isa: str | None = None,
    keeps_moments: bool = False,
) -> None:
    """Update one shard in place. All 1-D contiguous [numel] on one device; grad bf16 or fp32. moments: momentum and variance; for 8-bit
    moments, uint8 each, also their scales ([Note: 8-bit moments] in eight_bit.py, with `dither`).

    weight bf16 and residual int16 are a split master ([Note: weight and residual] in _adam.c); weight fp32 and residual None are the
    master itself. A bf16 weight without a residual, beside 8-bit moments, is rounded stochastically. Other moments are fp32, or, with
    `dither` and a split master, bf16 with stochastic rounding ([Note: bf16 moments] in _adam.c). threads: 0 means one for each CPU of the
    calling thread. isa: one of `_adam.isas()`, "triton" or "torch" forces a variant. All give equal bits; every resulting NaN is
    0x7FC00000. keeps_moments: change only weight and residual. `adam_moments` does the rest, for a decoupled update in host memory.
    Raises ValueError if lengths, dtypes or devices differ, or if the CPU lacks isa.
    """
    is_rounded = residual is None and len(moments) == 4
    _check(weight, "weight", torch.float32 if residual is None and not is_rounded else torch.bfloat16)
    if residual is not None:
        _check(residual, "residual", torch.int16, like=weight)
    if dither is not None and residual is None and not is_rounded:
        raise ValueError("dither goes with a split master, or 8-bit moments; an fp32 master has fp32 moments")
    _check_moments(moments, grad, dither, like=weight)
    if keeps_moments:
        _check_can_split(grad, scalars)
    elif isa == "triton" or (isa is None and weight.is_cuda and _device_kernels() is not None):
        return _device_kernels().adam(weight, residual, moments, grad, scalars.numbers, scalars.decoupled, _keys(dither))
    elif isa == "torch" or weight.device.type != "cpu":
        return _adam_torch(weight, residual, moments, grad, scalars, dither)
    stores = _WEIGHTS if keeps_moments else _WEIGHTS | _MOMENTS
    _call_kernel((weight, residual), moments, grad, scalars, dither, threads, isa, stores)


def adam_moments(
    moments: Sequence[torch.Tensor],
    grad: torch.Tensor,
    scalars: AdamScalars,
    *,
    dither: Dither | None = None,
    threads: int = 0,
    isa: str | None = None,
) -> None:
    """The rest of an update after `adam_step` with keeps_moments. Arguments and errors are the same."""
    _check_moments(moments, grad, dither)
    _check_can_split(grad, scalars)
    _call_kernel((None, None), moments, grad, scalars, dither, threads, isa, _MOMENTS)


def _call_kernel(
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    moments: Sequence[torch.Tensor],
    grad: torch.Tensor,
    scalars: AdamScalars,
    dither: Dither | None,
    threads: int,
    isa: str | None,
    stores: int,
) -> None:
    """Call the kernel in C. weights: weight and residual. stores: the parts that change."""
    tensors = (*weights, *moments, *([None, None] if len(moments) == 2 else []), grad)
    moved = (*tensors, *(weights if stores & _WEIGHTS else ()), *(moments if stores & _MOMENTS else ()))
    host_bytes.work(
        sum(tensor.nbytes for tensor in moved if tensor is not None),
        _adam.adam,
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        grad.numel(),
        grad.dtype == torch.float32,
        scalars.numbers,
        scalars.decoupled,
        _keys(dither),
        threads,
        isa,
        stores,
    )


def _keys(dither: Dither | None) -> tuple[int, int, int] | None:
    return None if dither is None else (dither.key0, dither.key1, dither.index)


def _check_moments(moments: Sequence[torch.Tensor], grad: torch.Tensor, dither: Dither | None, like: torch.Tensor | None = None) -> None:
    momentum, variance, *scales = moments
    dtype = torch.float32 if dither is None else torch.uint8 if scales else torch.bfloat16
    for scale in scales:
        _check(scale, "scale", torch.uint8)
        if dither is None or scale.numel() != -(-momentum.numel() // eight_bit.BLOCK) or scale.device != momentum.device:
            raise ValueError("8-bit moments need dither, and one scale beside them for each 128 elements")
    _check(momentum, "momentum", dtype, like=like)
    _check(variance, "variance", dtype, like=momentum)
    _check(grad, "grad", *_GRAD_DTYPES, like=momentum)


def _check_can_split(tensor: torch.Tensor, scalars: AdamScalars) -> None:
    if tensor.device.type != "cpu" or not scalars.decoupled:
        raise ValueError("only a decoupled update in host memory can change weights and moments separately")


@functools.cache
def _device_kernels():
    """The module of the Triton kernels, or None without Triton."""
    try:
        from infinity.optim import _adam_triton
    except ImportError:
        return None
    return _adam_triton


def split_master(
    master: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor] | None = None, threads: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [numel] -> (weight bf16 [numel], residual int16 [numel]), into `out` if given.

    Exact, except that a NaN becomes the quiet NaN of its sign.
    """
    _check(master, "master", torch.float32)
    if out is None:
        out = (torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16))
    weight, residual = out
    _check(weight, "weight", torch.bfloat16, like=master)
    _check(residual, "residual", torch.int16, like=master)
    if master.device.type == "cpu":
        pointers = master.data_ptr(), weight.data_ptr(), residual.data_ptr()
        host_bytes.work(2 * master.nbytes, _adam.split, *pointers, master.numel(), threads)
    else:
        _split_torch(master, weight, residual)
    return weight, residual


def join_master(
    weight: torch.Tensor, residual: torch.Tensor, *, out: torch.Tensor | None = None, threads: int = 0
) -> torch.Tensor:
    """(weight bf16 [numel], residual int16 [numel]) -> fp32 [numel], into `out` if given."""
    _check(weight, "weight", torch.bfloat16)
    _check(residual, "residual", torch.int16, like=weight)
    if out is None:
        out = torch.empty_like(weight, dtype=torch.float32)
    _check(out, "out", torch.float32, like=weight)
    if weight.device.type == "cpu":
        pointers = weight.data_ptr(), residual.data_ptr(), out.data_ptr()
        host_bytes.work(4 * weight.nbytes, _adam.join, *pointers, weight.numel(), threads)
    else:
        out.copy_(_join_torch(weight, residual))
    return out


def accumulate_(dst: torch.Tensor, src: torch.Tensor, first: bool, *, threads: int = 0) -> torch.Tensor:
    """dst fp32 [numel] = src (bf16, fp16 or fp32 [numel]) if first, else += src. Returns dst."""
    _check(dst, "dst", torch.float32)
    _check(src, "src", *_GRAD_DTYPES, torch.float16, like=dst)
    if dst.device.type == "cpu" and src.dtype != torch.float16:
        is_fp32 = src.dtype == torch.float32
        host_bytes.work(dst.nbytes + src.nbytes, _adam.accumulate, dst.data_ptr(), src.data_ptr(), dst.numel(), is_fp32, first, threads)
        return dst
    return dst.copy_(src) if first else dst.add_(src)


class NormAccumulator:
    """The L2 norm of gradients that arrive in pieces. Order, split, thread count and rank count do not change the bits.

    Sufficient for 2^41 elements. Additions on a CUDA device are queued there, and nothing waits for them until `limbs` is read.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._limbs = torch.zeros(NUM_LIMBS, dtype=torch.int64, device=device)
        self._block_sums: list[torch.Tensor] = []  # not yet in the limbs, all on one device

    @property
    def limbs(self) -> torch.Tensor:
        """int64 [72], the sum of squares as a fixed-point number ([Note: sums without an order] in _adam.c). The integer sum of the limbs
        of two accumulators is their common sum: all_reduce the limbs with SUM, in place.
        """
        return self.settled()._limbs

    def settled(self) -> NormAccumulator:
        """Adds all queued sums and returns self."""
        if self._block_sums:
            self._limbs += _limbs_torch(torch.cat(self._block_sums)).to(self._limbs.device)
            self._block_sums = []
        return self

    def add(self, grad: torch.Tensor, *, threads: int = 0, isa: str | None = None) -> None:
        """grad: bf16, fp16 or fp32, 1-D contiguous, beginning at a multiple of 1,024 elements of its parameter. isa: "triton" or "torch"
        forces a variant.
        """
        _check(grad, "grad", *_GRAD_DTYPES, torch.float16)
        if grad.dtype == torch.float16:
            for part in grad.split(_FALLBACK_NUMEL):
                self.add(part.float(), threads=threads, isa=isa)
            return
        if grad.device.type == "cpu" and self._limbs.device.type == "cpu" and isa not in ("torch", "triton"):
            is_fp32 = grad.dtype == torch.float32
            host_bytes.work(grad.nbytes, _adam.sum_squares, grad.data_ptr(), grad.numel(), is_fp32, self._limbs.data_ptr(), threads)
            return
        if isa == "triton" or (isa is None and grad.is_cuda and _device_kernels() is not None):
            self._block_sums.append(_device_kernels().block_sums(grad.detach()))
            return
        self._block_sums += map(_block_sums_torch, grad.detach().split(_FALLBACK_NUMEL))

    def merge(self, other: NormAccumulator) -> None:
        self._limbs += other._limbs.to(self._limbs.device)
        self._block_sums += other._block_sums

    @property
    def nonfinite(self) -> bool:
        return bool(self.limbs[-2:].any())

    def value(self) -> float:
        """The square root of the sum, correctly rounded; NaN or infinity if a block's sum was."""
        *digits, num_infinite, num_nan = self.limbs.tolist()
        if num_nan or num_infinite:
            return math.nan if num_nan else math.inf
        # Units of 2^-1126, shifted so that the root has over 53 bits. The last bit stands for all bits that are cut off.
        total = sum(digit << (32 * k) for k, digit in enumerate(digits)) << 128
        root = math.isqrt(total)
        root = 2 * root + (root * root != total)
        return math.ldexp(root, -(1126 + 128) // 2 - 1)


def _check(tensor: torch.Tensor, name: str, *dtypes: torch.dtype, like: torch.Tensor | None = None) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected 1-D contiguous. "
            "Pass a flat shard."
        )
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if like is not None and tensor.numel() != like.numel():
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {like.numel()} as in the others")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {like.device} as the others")


@torch.no_grad()
def _adam_torch(weight, residual, moments, grad, s: AdamScalars, dither: Dither | None) -> None:
    # One torch operation per rounding: addcmul_, lerp_ and alpha= would be contracted. No division by a scalar, because on CUDA that is a
    # multiplication by the reciprocal. torch's own fp32 square root is MKL's on the CPU and 1 ulp off in one case of six. A float64 root
    # within 1 ulp always rounds to the right fp32, because no root of an fp32 is so close to the middle of two fp32 values.
    is_rounded = weight.dtype is torch.bfloat16 and residual is None
    p = weight.float().clone() if residual is None else _join_torch(weight, residual)
    g = grad.float() * s.grad_scale
    if s.decoupled:
        p = p * s.decay_or_l2
    else:
        g = g + p * s.decay_or_l2
    momentum, variance, *scales = moments
    m, v = momentum, variance
    if scales:
        m, v = (eight_bit.decoded(codes, scale, signed=signed) for codes, scale, signed in zip((m, v), scales, (True, False)))
    m = m.float() * s.beta1 + g * s.one_minus_beta1
    v = v.float() * s.beta2 + (g * g) * s.one_minus_beta2
    d = v.double().sqrt().float() * s.inv_sqrt_bias2 + s.eps
    p = p - (m / d) * s.step_size
    m.masked_fill_(m.isnan(), math.nan)
    v.masked_fill_(v.isnan(), math.nan)
    if dither is None:
        momentum.copy_(m)
        variance.copy_(v)
    elif scales:
        random = dither.bits(m.numel(), m.device)
        eight_bit.encode(m, random & 0xFFFF, momentum, scales[0], signed=True)
        eight_bit.encode(v, random >> 16, variance, scales[1], signed=False)
    else:
        random = dither.bits(m.numel(), m.device)
        store_dithered(momentum, m, random & 0xFFFF)
        store_dithered(variance, v, random >> 16)
    p.masked_fill_(p.isnan(), math.nan)
    if is_rounded:
        store_dithered(weight, p, dither.of_pair(WEIGHT_PAIR).bits(p.numel(), p.device) & 0xFFFF)
    elif residual is None:
        weight.copy_(p)
    else:
        _split_torch(p, weight, residual)


@torch.no_grad()
def store_dithered(target: torch.Tensor, value: torch.Tensor, random: torch.Tensor) -> None:
    """target bf16 [numel] = value fp32 [numel], rounded by adding 16 random bits per element (int64 [numel])."""
    target.view(torch.int16).copy_((value.view(torch.int32) + random.int()) >> 16)


@torch.no_grad()
def _split_torch(master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), bits & -0x80000000 | 0x7FC00000, bits)
    weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
    residual.copy_(bits)


@torch.no_grad()
def _join_torch(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return ((weight.view(torch.int16).int() << 16) + residual).view(torch.float32)


@torch.no_grad()
def _block_sums_torch(grad: torch.Tensor) -> torch.Tensor:
    """float64 [num_blocks], each block summed in the order of [Note: sums without an order]."""
    padding = -grad.numel() % BLOCK_NUMEL
    squares = torch.nn.functional.pad(grad.double(), (0, padding)).square_().view(-1, BLOCK_NUMEL // _LANES, _LANES)
    lanes = squares[:, 0]
    for row in range(1, squares.shape[1]):
        lanes = lanes + squares[:, row]
    while lanes.shape[1] > 1:
        low, high = lanes.split(-(-lanes.shape[1] // 2), dim=1)
        lanes = low + high
    return lanes.squeeze(1)


@torch.no_grad()
def _limbs_torch(sums: torch.Tensor) -> torch.Tensor:
    """The exact sum of non-negative float64 values, as limbs."""
    bits = sums.view(torch.int64)
    exponent = bits >> 52 & 0x7FF
    mantissa = bits & 0xFFFFFFFFFFFFF | (exponent != 0).long() << 52
    mantissa = torch.where(exponent == 0x7FF, 0, mantissa)
    position = exponent.clamp(1, 0x7FE) + 51
    limb, shift = position >> 5, position & 31
    limbs = torch.zeros(NUM_LIMBS, dtype=torch.int64, device=sums.device)
    limbs.index_add_(0, limb, mantissa << shift & 0xFFFFFFFF)
    limbs.index_add_(0, limb + 1, mantissa >> (32 - shift) & 0xFFFFFFFF)
    limbs.index_add_(0, limb + 2, mantissa >> (63 - shift) >> 1)
    limbs[-2] = sums.isinf().sum()
    limbs[-1] = sums.isnan().sum()
    return limbs
