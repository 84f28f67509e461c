"""The packing of parameters whose updates need whole matrices: no shard cuts a unit, and the shards of a chunk are nearly equal."""

import random

import pytest

from infinity.formats.format import Format
from infinity.plan.packing import ParameterSpec, layout
from infinity.plan.partition import BLOCK_NUMEL

MATRICES = Format("bf16", moments=("momentum",), unit="matrix")


def specs_of(*numels, unit=None):
    return [ParameterSpec(f"p{i}", numel, MATRICES, unit or numel) for i, numel in enumerate(numels)]


def assert_whole(got):
    """Asserts that each shard has whole units, and that each element has exactly one place."""
    found = dict.fromkeys(range(len(got.specs)), 0)
    for chunk in got.chunks:
        for rank in range(got.partition.world):
            for piece in chunk.shard_pieces(rank):
                unit = got.specs[piece.param].unit_numel
                assert piece.param_start % unit == 0 and piece.numel % unit == 0, piece
                assert piece.start + piece.numel <= chunk.shard_used(rank)
                found[piece.param] += piece.numel
    assert found == {index: spec.numel for index, spec in enumerate(got.specs)}


def test_matrices_fill_the_shards_in_order():
    got = layout(specs_of(3000, 2000, 5000, 5000), chunk_numel=20 * BLOCK_NUMEL, world=4)
    assert [chunk.numel for chunk in got.chunks] == [4 * 5 * BLOCK_NUMEL]
    shards = [[(piece.param, piece.start) for piece in got.chunks[0].shard_pieces(rank)] for rank in range(4)]
    assert shards == [[(0, 0), (1, 3 * BLOCK_NUMEL)], [(2, 0)], [(3, 0)], []]  # 3,072 + 2,000 elements are less than five blocks
    assert_whole(got)


def test_a_chunk_is_larger_than_asked_for_if_a_matrix_is():
    got = layout(specs_of(9 * BLOCK_NUMEL, 100), chunk_numel=2 * BLOCK_NUMEL, world=2)
    assert [chunk.numel for chunk in got.chunks] == [18 * BLOCK_NUMEL]
    assert len(got.spans) == 1 and got.homes[1].offset == 9 * BLOCK_NUMEL
    assert_whole(got)


def test_a_stack_of_matrices_is_cut_between_matrices():
    got = layout(specs_of(10 * BLOCK_NUMEL, unit=BLOCK_NUMEL), chunk_numel=8 * BLOCK_NUMEL, world=2)
    assert [chunk.numel // BLOCK_NUMEL for chunk in got.chunks] == [6, 4]  # five units for each rank: three and two
    assert [span.params for span in got.spans] == [(0,)]
    assert got.chunks_of(0) == (0, 1)
    assert_whole(got)


def test_a_stack_whose_matrices_are_not_whole_blocks_stays_together():
    got = layout(specs_of(10 * 1000, unit=1000), chunk_numel=2 * BLOCK_NUMEL, world=2)
    assert [piece.numel for piece in got.chunks[0].shard_pieces(0)] == [10_000]
    assert not got.chunks[0].shard_pieces(1)


def test_other_parameters_keep_their_packing():
    vectors = [ParameterSpec(f"v{i}", numel, Format("bf16")) for i, numel in enumerate((100, 5000, 300))]
    alone = layout(vectors, chunk_numel=4096, world=1)
    both = layout([*vectors, *specs_of(3000)], chunk_numel=4096, world=1)
    assert [home.offset for home in both.homes[:3]] == [home.offset for home in alone.homes]
    assert len(both.chunks) == len(alone.chunks) + 1


LAYER = [16, 4, 4, 16, 56, 56, 56]  # the matrices of a block of Llama 3.1 8B, in units of 2^20 elements


@pytest.mark.parametrize("world, most", [(1, 1.0), (2, 1.08), (4, 1.16), (8, 1.16)])
def test_shards_are_nearly_equal(world, most):
    numels = [size * 1024 for size in LAYER * 16]
    got = layout(specs_of(*numels), chunk_numel=world * 64 * 1024, world=world)
    assert_whole(got)
    assert sum(chunk.numel for chunk in got.chunks) <= most * sum(numels)


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_cut_no_unit(seed):
    rng = random.Random(seed)
    world, specs = rng.choice([1, 2, 3, 4, 8]), []
    for index in range(rng.randint(1, 40)):
        unit = rng.choice([rng.randint(1, 6000), rng.randint(1, 4) * BLOCK_NUMEL])
        numel = unit * rng.choice([1, 1, rng.randint(2, 9)])
        specs.append(ParameterSpec(f"p{index}", numel, rng.choice([MATRICES, MATRICES, Format("fp32", unit="parameter")]), unit))
    got = layout(specs, chunk_numel=rng.choice([1, 2, 8]) * world * BLOCK_NUMEL, world=world)
    assert_whole(got)
    for span in got.spans:
        assert sum(got.chunks[index].numel for index in span.chunks) == span.numel
        assert len({got.chunks[index].numel for index in span.chunks[:-1]}) <= 1
        assert list(span.params) == sorted(span.params)
    for index, spec in enumerate(specs):
        chunks = [chunk.index for chunk in got.chunks if index in {piece.param for piece in chunk.pieces}]
        assert tuple(chunks) == got.chunks_of(index)
    assert [span.params[0] for span in got.spans] == sorted(span.params[0] for span in got.spans)
