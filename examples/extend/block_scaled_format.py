"""A storage format of a program's own: 16-bit integers with one fp32 scale for every 128 elements.

    weight = integer * scale,   scale = largest magnitude of the block / 32767

The model computes in bf16. The optimizer keeps an fp32 master beside the coded weight. Four bytes of scale for 128 elements make 2.03 bytes
an element. `register()` makes the format known as `infinity.Config(dtype="int16_block128")`.
"""

from __future__ import annotations

import torch

from infinity.formats.format import Segment, Storage
from infinity.optim.shard import Codec, Shard, register

BLOCK = 128
LARGEST = 32767
STORAGE = Storage(
    compute="bf16",
    weight=(Segment("weight", "int16"), Segment("scale", "fp32", block=BLOCK)),
    master=(Segment("master", "fp32"),),
)


class BlockScaled(Codec):
    """A weight of int16 and scales; a trained one also has its fp32 master."""

    def masters(self, shard: Shard, threads: int) -> torch.Tensor:
        return shard["master"] if "master" in shard else self._values(shard)

    def store(self, shard: Shard, values: torch.Tensor) -> None:
        padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        scale = padded.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / LARGEST
        integers = (padded / scale[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int16)
        shard["scale"].copy_(scale)
        shard["weight"].copy_(integers.view(-1)[: len(values)])

    def put(self, shard: Shard, values: torch.Tensor) -> None:
        values = values.float()
        if "master" in shard:
            shard["master"].copy_(values)
        self.store(shard, values)

    def adopt(self, shard: Shard, new: torch.Tensor, changed: torch.Tensor) -> None:
        values, device = self.masters(shard, 0), shard["weight"].device
        self.put(shard, torch.where(changed.to(device), new.to(device).float(), values))

    def weights(self, shard: Shard) -> torch.Tensor:
        return self._values(shard).bfloat16()

    def _values(self, shard: Shard) -> torch.Tensor:
        values: torch.Tensor = shard["weight"].float() * shard["scale"].repeat_interleave(BLOCK)[: len(shard["weight"])]
        return values


def register_format() -> None:
    register("int16_block128", STORAGE, BlockScaled())
