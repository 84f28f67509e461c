"""The partition of chunks over ranks, without an engine."""

import pytest
import torch

from infinity.formats.format import Format
from infinity.plan.packing import ParameterSpec, layout
from infinity.plan.partition import BLOCK_NUMEL, Partition


@pytest.mark.parametrize("world, numel, used", [(1, 1024, 1000), (2, 4096, 4096), (3, 6144, 2049), (4, 8192, 1), (4, 8192, 8192)])
def test_the_shards_of_all_ranks_are_the_used_part_of_the_chunk(world, numel, used):
    partition = Partition(world)
    shards = [partition.shard(rank, numel, used) for rank in range(world)]
    assert [index for shard in shards for index in range(shard.start, shard.stop)] == list(range(used))
    assert {shard.start for shard in shards} == {rank * numel // world for rank in range(world)}
    assert all(shard.start % BLOCK_NUMEL == 0 for shard in shards)  # no block of a norm is cut


def test_chunks_are_padded_to_equal_shards_of_whole_blocks():
    assert [Partition(3).padded(numel) for numel in (1, 3072, 3073)] == [3072, 3072, 6144]
    assert Partition(3).shard_numel(6144) == 2048


def test_a_chunk_asks_its_partition():
    chunk = layout([ParameterSpec("a", 3000, Format("bf16"))], chunk_numel=4096, world=4).chunks[0]
    assert chunk.partition == Partition(4) and chunk.shard_numel == 1024
    assert [chunk.shard_used(rank) for rank in range(4)] == [1024, 1024, 952, 0]
    assert [chunk.shard_in_span(rank) for rank in (0, 2, 3)] == [slice(0, 1024), slice(2048, 3000), slice(3072, 3072)]


def test_rows_have_one_row_for_each_rank():
    assert Partition(2).rows(torch.arange(6)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_partition_says_itself_in_one_line():
    assert (str(Partition()), str(Partition(8))) == ("1 shard, the whole chunk", "8 equal shards")
    assert not Partition().is_shared and Partition(2).is_shared
    with pytest.raises(ValueError, match="world=0: expected at least 1 rank"):
        Partition(0)
