"""Who has which part of a chunk: the value `Partition`.

Pure arithmetic. Must not know torch, collectives, or which rank this process is.
"""

from dataclasses import dataclass

from infinity.sizes import round_up

BLOCK_NUMEL = 1024  # elements; no shard ends within a block: see [Note: how parameters are packed] in packing.py


@dataclass(frozen=True)
class Partition:
    """Every chunk is cut into `world` equal shards, one for each rank, in the order of ranks.

    The cut follows elements and not parameters, because most update rules change elements one by one. If an update needs a whole matrix, the
    packing puts matrices where no cut is: see unit_packing.py. So each rank updates its own shard alone. An all-gather of the shards makes
    the chunk whole. A reduce-scatter of the chunk's gradient gives each rank its shard of the sum.
    """

    world: int = 1

    def __post_init__(self):
        if self.world < 1:
            raise ValueError(f"world={self.world}: expected at least 1 rank")

    @property
    def is_shared(self) -> bool:
        """Whether more than one rank has a part."""
        return self.world > 1

    @property
    def unit_numel(self) -> int:
        """The number of elements of a chunk is a multiple of this number."""
        return self.world * BLOCK_NUMEL

    def padded(self, numel: int) -> int:
        """Elements of the smallest chunk that holds `numel` elements."""
        return round_up(numel, self.unit_numel)

    def shard_numel(self, chunk_numel: int) -> int:
        """Elements of each shard, padding included."""
        return chunk_numel // self.world

    def shard(self, rank: int, chunk_numel: int, used: int) -> slice:
        """The elements of a chunk that a rank stores: its shard, without the padding from element `used` on. May be empty."""
        numel = self.shard_numel(chunk_numel)
        begin = rank * numel
        return slice(begin, max(begin, min(begin + numel, used)))

    def rows(self, flat):
        """A flat tensor [world * n] as [world, n]: a row for each rank."""
        return flat.view(self.world, -1)

    def __str__(self):
        return f"{self.world} equal shards" if self.is_shared else "1 shard, the whole chunk"
