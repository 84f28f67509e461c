"""How one parameter is stored, computed with and trained: the value that decides the bytes of a record and of a gradient.

Knows names and sizes of dtypes. Must not know torch, chunks, tiers or ranks.
"""

# [Note: formats]
# A format is made once for each parameter, from the dtype of the parameter and the rule of the optimizer. Parameters of one format are packed
# together, so every chunk has one format. All other modules ask the format; none compares a dtype.
#
# A storage says how the weight lies in a record. infinity/optim/shard.py has the arithmetic of each storage, by the same name.
#
#   name       computes in   segments of the weight      rest of the fp32 master
#   bf16       bf16          weight bf16                 residual int16
#   bf16_rounded  bf16       weight bf16                 -; an update is rounded stochastically
#   fp16       fp16          weight fp16                 master fp32
#   fp32       fp32          weight fp32                 -
#   fp8_e4m3   fp8           weight fp8, frozen only     -
#   nf4, ...   bf16          codes and scales, frozen only: [Note: quantised weights] in infinity/optim/block_codes.py
#
# Moments follow behind. An 8-bit moment has two segments: codes, and scales. A moment "name/n" has one fp32 value for n elements. A frozen
# parameter has only the segments of the weight. A bf16 weight and its residual are one fp32 master:
# `fp32 bits = (weight bits << 16) + residual`. The last segment is the average of the weight, in fp32 for every storage, if the program keeps
# one (infinity.EMA).

from __future__ import annotations

import functools
from dataclasses import dataclass

DTYPE_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1}
"""Bytes of an element, by dtype."""

ADAM_MOMENTS = ("momentum", "variance")

ROUNDED = "bf16_rounded"
"""The storage of trained bf16 weights without a master."""

SAME = "same"
"""The value of `Config.frozen_dtype` without quantised weights."""

EIGHT_BIT = "8bit"
MOMENTS_DTYPES = ("fp32", "bf16", EIGHT_BIT)
"""Values of `Format.moments_dtype`."""

SCALE_BLOCK = 128
"""Values of an 8-bit moment that share a scale."""


AVERAGE = "average"
"""The name of the segment with the average of the weights."""


def scale_name(moment: str) -> str:
    """The name of the segment with the scales of an 8-bit moment."""
    return f"{moment}_scale"


@dataclass(frozen=True)
class Segment:
    """One kind of values in a record: one value for each element, or for each `block` elements."""

    name: str
    dtype: str
    block: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return DTYPE_NBYTES[self.dtype]

    def count(self, numel: int) -> int:
        """Values of so many elements."""
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """Bytes of the values of so many elements."""
        return self.count(numel) * self.itemsize


@dataclass(frozen=True)
class Storage:
    """How a weight is stored: the segments that a forward pass reads, and the rest of the fp32 master of a trained weight.

    compute: the dtype on the device. trains: an optimizer can update such weights.
    """

    compute: str
    weight: tuple[Segment, ...]
    master: tuple[Segment, ...] = ()
    trains: bool = True

    @property
    def is_coded(self) -> bool:
        """Whether the device needs other bytes than the record has."""
        return self.weight != (Segment("weight", self.compute),)


def _plain(dtype: str, *master: Segment, trains: bool = True) -> Storage:
    return Storage(dtype, (Segment("weight", dtype),), master, trains)


def _quantised(codes: Segment, scale: Segment) -> Storage:
    return Storage("bf16", (codes, scale), trains=False)


STORAGES = {
    "bf16": _plain("bf16", Segment("residual", "int16")),
    ROUNDED: _plain("bf16"),
    "fp16": _plain("fp16", Segment("master", "fp32")),
    "fp32": _plain("fp32"),
    "fp8_e4m3": _plain("fp8_e4m3", trains=False),
    "fp8_e5m2": _plain("fp8_e5m2", trains=False),
    "nf4": _quantised(Segment("weight", "uint8", 2), Segment("scale", "fp32", 64)),
    "int8": _quantised(Segment("weight", "int8"), Segment("scale", "fp32", 128)),
    "fp8": _quantised(Segment("weight", "fp8_e4m3"), Segment("scale", "fp32", 128)),
    "mxfp4": _quantised(Segment("weight", "uint8", 2), Segment("scale", "uint8", 32)),
}
"""All storages by name. A name is a value of `Config.dtype` if the storage trains."""


def storage_of(dtype: str, master: str, *, trainable: bool = True, frozen: str = SAME) -> str:
    """The storage of a weight. dtype, master: as in the configuration. frozen: the storage of a frozen weight that computes in the same dtype."""
    if not trainable:
        return frozen if frozen != SAME and STORAGES[frozen].compute == dtype else dtype
    return ROUNDED if dtype == "bf16" and master == "none" else dtype


def setting_of(storage: str) -> str:
    """The storage as the fields of the configuration give it, for messages."""
    if storage == ROUNDED:
        return "dtype='bf16' and master='none'"
    field = "frozen_dtype" if STORAGES[storage].is_coded and not STORAGES[storage].trains else "dtype"
    return f"{field}={storage!r}"


def trainable_names() -> tuple[str, ...]:
    """Names of the storages whose weights an optimizer can update."""
    return tuple(name for name, storage in STORAGES.items() if storage.trains)


@dataclass(frozen=True)
class Format:
    """The format of a parameter, and of the chunks that hold the parameter. See [Note: formats].

    name: of the storage. moments: names of the optimizer's states, with "/n" for one value for n elements. moments_dtype: "fp32", or "bf16" or
    "8bit" with stochastic rounding, which only parameters in the storages "bf16" and "bf16_rounded" have. accumulates: gradients of several
    backward passes add up, in fp32. unit: the elements that no shard cuts, see [Note: units of a rule] in optim/rules.py; "element" for a
    frozen parameter. averaged: the record has the average of the weights over the steps.
    """

    name: str
    trainable: bool = True
    moments: tuple[str, ...] = ADAM_MOMENTS
    moments_dtype: str = "fp32"
    accumulates: bool = False
    unit: str = "element"
    averaged: bool = False

    def __post_init__(self):
        if not self.trainable:
            object.__setattr__(self, "unit", "element")
            object.__setattr__(self, "moments", ())
            object.__setattr__(self, "accumulates", False)
            object.__setattr__(self, "averaged", False)
        if not self.moments or self.name not in ("bf16", ROUNDED):
            object.__setattr__(self, "moments_dtype", "fp32")

    @functools.cached_property
    def storage(self) -> Storage:
        return STORAGES[self.name]

    @functools.cached_property
    def compute(self) -> str:
        """The dtype on the device, of the weight and of a gradient that has just been made."""
        return self.storage.compute

    @functools.cached_property
    def weight_segments(self) -> tuple[Segment, ...]:
        """The segments that a forward pass reads."""
        return self.storage.weight

    @functools.cached_property
    def state_segments(self) -> tuple[Segment, ...]:
        """The segments that only an update needs: the rest of the master, the moments, and the average."""
        average = (Segment(AVERAGE, "fp32"),) if self.averaged else ()
        return (*self.storage.master, *self.moment_segments, *average) if self.trainable else ()

    @functools.cached_property
    def moment_segments(self) -> tuple[Segment, ...]:
        """The segments of the optimizer's states."""
        return tuple(segment for moment in self.moments for segment in self._segments_of(moment))

    def _segments_of(self, moment: str) -> tuple[Segment, ...]:
        name, _, block = moment.partition("/")
        if block:
            return (Segment(name, "fp32", int(block)),)
        if self.has_coded_moments:
            return Segment(name, "uint8"), Segment(scale_name(name), "uint8", SCALE_BLOCK)
        return (Segment(name, self.moments_dtype),)

    @property
    def has_coded_moments(self) -> bool:
        """Whether moments have 8 bits and scales."""
        return self.moments_dtype == EIGHT_BIT

    @functools.cached_property
    def block(self) -> int:
        """Elements that are stored together; parameters begin at a multiple of this number."""
        return max(segment.block for segment in self.segments)

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments of a record, in the order in which they lie."""
        return self.weight_segments + self.state_segments

    @functools.cached_property
    def is_coded(self) -> bool:
        """Whether the device needs other bytes of the weight than the record has. A coded weight has no home on the device."""
        return self.storage.is_coded

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of an element on the device."""
        return DTYPE_NBYTES[self.compute]

    @property
    def gradient(self) -> str:
        """The dtype in which a gradient waits for the update."""
        return "fp32" if self.accumulates else self.compute

    @functools.cached_property
    def gradient_itemsize(self) -> int:
        """Bytes of an element of a gradient that waits for the update; 0 for a frozen parameter."""
        return DTYPE_NBYTES[self.gradient] if self.trainable else 0

    @functools.cached_property
    def has_master(self) -> bool:
        """Whether the record holds more bits of the weight than the device does."""
        return self.trainable and bool(self.storage.master)

    @property
    def rounds_moments(self) -> bool:
        """Whether moments are stored with stochastic rounding."""
        return self.moments_dtype != "fp32"

    @property
    def rounds_weights(self) -> bool:
        """Whether weights have no master, and are stored with stochastic rounding."""
        return self.trainable and self.name == ROUNDED

    @property
    def rounds(self) -> bool:
        """Whether an update needs random bits."""
        return self.rounds_moments or self.rounds_weights

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients may underflow without a loss scale."""
        return self.trainable and self.compute == "fp16"

    @property
    def may_be_late(self) -> bool:
        """Whether a gradient can wait beside late moments: [Note: late moments] in tiers/late_moments.py. Such gradients are bf16."""
        is_plain = not (self.is_coded or self.has_coded_moments or self.averaged) and self.unit == "element"
        return self.trainable and self.gradient == "bf16" and is_plain

    @property
    def changes_at_once(self) -> bool:
        """Whether an update changes all segments of an element at once, and cannot leave the moments for later."""
        return self.has_coded_moments or self.rounds_weights or self.averaged

    def __str__(self) -> str:
        return self.name if self.trainable else f"frozen {self.name}"
