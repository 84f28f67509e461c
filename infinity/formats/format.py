"""How one parameter is stored, computed with and trained: the value that decides the bytes of its record and of its gradient.

Knows names and sizes of dtypes. Must not know torch, chunks, tiers or ranks.
"""

# [Note: formats]
# A format is made once for each parameter, from the parameter's dtype and the optimizer's rule. Parameters of one format are packed
# together, so every chunk has one format. All other modules ask the format; none compares a dtype.
#
#   compute dtype  segments of a trainable record          bytes an element, without moments
#   bf16           weight bf16, residual int16             4
#   fp16           weight fp16, master fp32                6
#   fp32           weight fp32                             4
#   fp8            (frozen only) weight                    1
#
# A bf16 weight and its residual are one fp32 master: `fp32 bits = (weight bits << 16) + residual`.

from __future__ import annotations

import functools
from dataclasses import dataclass

DTYPE_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of an element, by dtype."""

TRAINABLE = ("bf16", "fp16", "fp32")
"""Compute dtypes of parameters that an optimizer can update."""

FROZEN = ("fp8_e4m3", "fp8_e5m2")
"""Compute dtypes of parameters that must be frozen."""

ADAM_MOMENTS = ("momentum", "variance")


@dataclass(frozen=True)
class Segment:
    """One stored value of every element of a record."""

    name: str
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPE_NBYTES[self.dtype]


_MASTERS = {"bf16": (Segment("residual", "int16"),), "fp16": (Segment("master", "fp32"),)}
MASTERS = tuple(segment.name for segments in _MASTERS.values() for segment in segments)
"""Names of the segments that hold the part of the fp32 master which the weight does not hold."""


@dataclass(frozen=True)
class Format:
    """The format of a parameter, and of the chunks that hold the parameter. See [Note: formats].

    compute: the dtype on the device, a key of DTYPE_NBYTES. moments: names of the optimizer's states. moments_dtype: "fp32", or "bf16" with
    stochastic rounding; only bf16 parameters have bf16 moments. accumulates: gradients of several backward passes add up, in fp32.
    A frozen parameter has no moments and no gradient.
    """

    compute: str
    trainable: bool = True
    moments: tuple[str, ...] = ADAM_MOMENTS
    moments_dtype: str = "fp32"
    accumulates: bool = False

    def __post_init__(self):
        if not self.trainable:
            object.__setattr__(self, "moments", ())
            object.__setattr__(self, "accumulates", False)
        if not self.moments or self.compute != "bf16":
            object.__setattr__(self, "moments_dtype", "fp32")

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of a record, in the order in which they lie: weight, the rest of the master, moments."""
        weight = Segment("weight", self.compute)
        if not self.trainable:
            return (weight,)
        moments = tuple(Segment(name, self.moments_dtype) for name in self.moments)
        return (weight, *_MASTERS.get(self.compute, ()), *moments)

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of an element on the device, of the weight and of a gradient that has just been made."""
        return DTYPE_NBYTES[self.compute]

    @property
    def gradient(self) -> str:
        """The dtype in which a gradient waits for its update."""
        return "fp32" if self.accumulates else self.compute

    @functools.cached_property
    def gradient_itemsize(self) -> int:
        """Bytes of an element of a gradient that waits for its update; 0 for a frozen parameter."""
        return DTYPE_NBYTES[self.gradient] if self.trainable else 0

    @property
    def has_master(self) -> bool:
        """Whether the record holds more bits of the weight than the device does."""
        return self.trainable and self.compute in _MASTERS

    @property
    def rounds_moments(self) -> bool:
        """Whether moments are stored with stochastic rounding."""
        return self.moments_dtype == "bf16"

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients may underflow without a loss scale."""
        return self.trainable and self.compute == "fp16"

    @property
    def may_be_late(self) -> bool:
        """Whether a gradient can wait beside late moments: [Note: late moments] in tiers/late_moments.py. Such gradients are bf16."""
        return self.trainable and self.gradient == "bf16"

    def __str__(self) -> str:
        return self.compute if self.trainable else f"frozen {self.compute}"
