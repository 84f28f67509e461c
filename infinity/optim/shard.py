"""A shard: the segments of some elements of a record, and how the fp32 master of a weight lies in them.

Knows formats and flat tensors. Must not know chunks, ranks, tiers or the engine.
"""

# [Note: codecs]
# Each storage of infinity/formats/format.py has a codec of the same name here. A codec has these operations:
#
#   masters  segments -> fp32 values                     before an update, for exports
#   store    fp32 values -> segments                     after an update
#   put      values of any dtype -> segments             first values, loaded values
#   is_exact whether the weight alone holds such values  first values
#   rounded  values -> weight on the device              loaded values of a chunk whose other shards lie on other ranks
#   adopt    the program has changed weights in place    the rest of the master follows
#   decode   segments -> weight on the device            each copy to the device, of a coded storage only
#   exchange weights and average change places           infinity.EMA; a second call restores all bits
#
# The bits of `masters` after `store` are those that were stored. That is what makes an update independent of the tier.

from __future__ import annotations

import torch

from infinity.config import CHOICES
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.formats.format import AVERAGE, ROUNDED, STORAGES, Format, Storage, scale_name
from infinity.optim import eight_bit
from infinity.optim.adam import WEIGHT_PAIR, Dither, join_master, split_master, store_dithered
from infinity.optim.block_codes import CODES, BlockCode


class Shard(dict):
    """Segments by name, 1-D, on one device. Not every segment of the format need be there."""

    __slots__ = ("format",)

    def __init__(self, format: Format, segments: dict[str, torch.Tensor]):
        super().__init__(segments)
        self.format = format

    @property
    def codec(self) -> Codec:
        return codec_of(self.format)

    def part(self, begin: int, end: int) -> Shard:
        """The segments of elements [begin, end). begin is a multiple of the storage's block."""
        if self.format.block == 1:
            return Shard(self.format, {name: segment[begin:end] for name, segment in self.items()})
        blocks = {segment.name: segment.block for segment in self.format.segments}
        return Shard(self.format, {name: segment[begin // blocks[name] : -(-end // blocks[name])] for name, segment in self.items()})

    def cpu(self) -> Shard:
        return Shard(self.format, {name: segment.cpu() for name, segment in self.items()})

    def masters(self, threads: int = 0) -> torch.Tensor:
        """fp32 [numel]: the values. It may be a segment itself. threads: of the host; 0 is one for each CPU."""
        return self.codec.masters(self, threads)

    def in_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """[numel]: the weights as they are if they have this dtype, otherwise rounded from the masters."""
        weights = self.codec.weights(self)
        return weights if weights.dtype is dtype else self.masters().to(dtype)

    def store(self, masters: torch.Tensor, moments: dict[str, torch.Tensor], dither: Dither | None) -> None:
        """The result of an update becomes the segments. masters, moments: fp32 [numel], as `masters` and `moment` gave them and changed in
        place. dither: of a format that rounds."""
        if self.format.rounds_weights:
            self.codec.store(self, masters, dither.of_pair(WEIGHT_PAIR).bits(masters.numel(), masters.device) & 0xFFFF)
        else:
            self.codec.store(self, masters)
        rounded = [name for name in moments if self.format.rounds_moments and self[name].dtype is not torch.float32]
        for index, name in enumerate(rounded):
            if index % 2 == 0:  # 32 bits serve two moments
                random = dither.of_pair(index // 2).bits(moments[name].numel(), moments[name].device)
            self.store_moment(name, moments[name], random >> 16 * (index % 2) & 0xFFFF)
        for name in moments.keys() - set(rounded):
            self.store_moment(name, moments[name])

    def moment(self, name: str) -> torch.Tensor:
        """fp32 [numel]: a moment. It may be the segment itself."""
        if scale_name(name) in self:
            return eight_bit.decoded(self[name], self[scale_name(name)], signed=eight_bit.is_signed(name))
        return self[name].float()

    def store_moment(self, name: str, values: torch.Tensor, random: torch.Tensor | None = None) -> None:
        """fp32 [numel] becomes a moment. random: int64 [numel], 16 bits that round each value; None rounds to the nearest."""
        segment = self[name]
        if scale_name(name) in self:
            half = torch.full_like(values, 1 << 15, dtype=torch.int64) if random is None else random
            eight_bit.encode(values, half, segment, self[scale_name(name)], signed=eight_bit.is_signed(name))
        elif random is not None:
            store_dithered(segment, values, random)
        elif segment is not values:
            segment.copy_(values)

    def put(self, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Values in any dtype, on any device, become the weights and their masters. scales: of the blocks of quantised values, if known."""
        if scales is None:
            self.codec.put(self, values)
        else:
            self.codec.put(self, values, scales)


class Codec:
    """The weight is the value: fp32, and whatever is frozen."""

    def masters(self, shard: Shard, threads: int) -> torch.Tensor:
        return shard["weight"].float()

    def store(self, shard: Shard, values: torch.Tensor) -> None:
        """values: fp32, as `masters` gave them, and changed in place."""
        if shard["weight"] is not values:
            shard["weight"].copy_(values)

    def put(self, shard: Shard, values: torch.Tensor) -> None:
        shard["weight"].copy_(values)

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Whether `put` stores values of this dtype in the weight segments, and zeros in the rest of the master."""
        return False

    def adopt(self, shard: Shard, new: torch.Tensor, changed: torch.Tensor) -> None:
        """new: weights as the device has them, of which `changed`, a mask, are the program's."""
        if shard["weight"].data_ptr() != new.data_ptr():
            shard["weight"].copy_(new)

    def weights(self, shard: Shard) -> torch.Tensor:
        """The weights as the device has them, in its dtype."""
        return shard["weight"]

    def exchange(self, shard: Shard) -> None:
        """The average becomes the weights and their masters, and the masters become the average."""
        masters = self.masters(shard, 0).clone()
        self.put(shard, shard[AVERAGE])
        shard[AVERAGE].copy_(masters)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Values as the device has them after `put`, or values that a copy to the device's dtype rounds so."""
        return values

    def decode(self, shard: Shard, out: torch.Tensor) -> None:
        """Weight segments -> weights on the device, 1-D in its dtype. Both are on one device."""
        out.copy_(self.weights(shard))


class SplitCodec(Codec):
    """A bf16 weight and an int16 residual are one fp32 master. [Note: weight and residual] in _adam.c."""

    def masters(self, shard, threads):
        return join_master(shard["weight"].contiguous(), shard["residual"].contiguous(), threads=threads)

    def store(self, shard, values):
        split_master(values, out=(shard["weight"], shard["residual"]), threads=1)

    def is_exact(self, dtype):
        return dtype is torch.bfloat16

    def put(self, shard, values):
        if self.is_exact(values.dtype):
            shard["weight"].copy_(values)
            if "residual" in shard:
                shard["residual"].zero_()
            return
        there = shard["weight"], shard["residual"]
        out = there if values.device == there[0].device else tuple(torch.empty_like(tensor, device=values.device) for tensor in there)
        split_master(values.float().contiguous(), out=out)
        if out is not there:
            for tensor, new in zip(there, out):
                tensor.copy_(new)

    def rounded(self, values):
        return split_master(values.float().contiguous())[0]

    def adopt(self, shard, new, changed):
        super().adopt(shard, new, changed)
        shard["residual"].masked_fill_(changed.to(shard["residual"].device), 0)


class RoundedCodec(Codec):
    """A bf16 weight without a master."""

    def store(self, shard, values, random=None):
        """random: int64 [numel], 16 bits that round each value."""
        store_dithered(shard["weight"], values, random)

    def exchange(self, shard):
        """The weight has no room for all bits of the average. The average's segment keeps the lower half of them below the old weight.

        All numbers are integers here, because some pairs of a weight and a lower half are the bits of NaN.
        """
        weight, average = shard["weight"].view(torch.int16), shard[AVERAGE].view(torch.int32)
        nearest = (average + 0x8000) >> 16
        average.copy_((weight.int() << 16) + average.to(torch.int16))
        weight.copy_(nearest)


class MasterCodec(Codec):
    """A whole fp32 master beside the weight that is rounded from it."""

    def masters(self, shard, threads):
        return shard["master"]

    def store(self, shard, values):
        shard["weight"].copy_(values)

    def put(self, shard, values):
        shard["master"].copy_(values)
        shard["weight"].copy_(values)

    def adopt(self, shard, new, changed):
        super().adopt(shard, new, changed)
        master = shard["master"]
        master.copy_(torch.where(changed.to(master.device), shard["weight"].to(master.device).float(), master))


class BlockCodec(Codec):
    """A frozen weight in blocks of codes and scales: [Note: quantised weights] in block_codes.py."""

    def __init__(self, code: BlockCode):
        self.code = code

    def masters(self, shard, threads):
        return self._decoded(shard, torch.float32)

    def weights(self, shard):
        return self._decoded(shard, TORCH_DTYPES[shard.format.compute])

    def _decoded(self, shard, dtype):
        codes = shard["weight"]
        out = torch.empty(codes.numel() * self.code.per_byte, dtype=dtype, device=codes.device)
        self.decode(shard, out)
        return out

    def decode(self, shard, out):
        self.code.decode(shard["weight"], shard["scale"], out)

    def put(self, shard, values, scales=None):
        segments = [shard["weight"], shard["scale"]]
        here = [segment.to(values.device) for segment in segments]
        self.code.encode(values, *here, known=None if scales is None else scales.to(values.device))
        for segment, new in zip(segments, here):
            if segment is not new:
                segment.copy_(new)

    def adopt(self, shard, new, changed):
        values, device = self.masters(shard, 0), shard["weight"].device
        self.put(shard, torch.where(changed.to(device), new.to(device).float(), values))


FROZEN = Codec()
CODECS = {"bf16": SplitCodec(), ROUNDED: RoundedCodec(), "fp16": MasterCodec(), "fp32": Codec()}
CODECS |= {name: BlockCodec(code) for name, code in CODES.items()}
"""Codecs of the storages that train, and of all coded storages, by name."""


def codec_of(format: Format) -> Codec:
    return CODECS[format.name] if format.trainable or format.is_coded else FROZEN


def states_stay_zero(format: Format, dtype: torch.dtype) -> bool:
    """Whether the states of a record are zeros after `put` of values of this dtype. The moments always are."""
    return not format.trainable or not format.storage.master or codec_of(format).is_exact(dtype)


def register(name: str, storage: Storage, codec: Codec) -> None:
    """Make a storage known by a new name, so that `infinity.Config(dtype=name)` stores the weights of a model in it.

    Every process registers the same storages, before it makes an engine or reads a checkpoint. Raises ValueError for a name that is taken.
    """
    if name in STORAGES:
        raise ValueError(f"a storage {name!r} exists already")
    STORAGES[name], CODECS[name] = storage, codec
    if storage.trains:
        CHOICES["dtype"] = (*CHOICES["dtype"], name)
