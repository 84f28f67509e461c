import random
from collections import Counter

import pytest

from infinity.formats.format import DTYPE_NBYTES, Format, trainable_names
from infinity.plan.packing import Home, ParameterSpec, Piece, default_chunk_numel, layout
from infinity.plan.partition import BLOCK_NUMEL
from infinity.plan.record import record_layout


def specs_of(*numels, dtype="bf16", trainable=True):
    return [ParameterSpec(f"p{i}", numel, Format(dtype, trainable)) for i, numel in enumerate(numels)]


def gpt_specs(hidden, layers, vocab, seq, dtype="bf16"):
    block = [hidden, hidden, 3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden]
    block += [hidden, hidden, 4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden]
    return specs_of(vocab * hidden, seq * hidden, *block * layers, hidden, hidden, vocab * hidden, dtype=dtype)


# Literal layouts


def test_small_parameters_are_packed_next_fit():
    got = layout(specs_of(2000, 1500, 600, 3000), chunk_numel=4096, world=1)
    assert got.homes == (Home(0, 0), Home(0, 2048), Home(1, 0), Home(1, 1024))
    assert [(c.numel, c.used) for c in got.chunks] == [(4096, 3548), (4096, 4024)]
    assert [c.pieces for c in got.chunks] == [
        (Piece(0, 0, 0, 2000), Piece(1, 2048, 0, 1500)),
        (Piece(2, 0, 0, 600), Piece(3, 1024, 0, 3000)),
    ]
    assert [s.chunks for s in got.spans] == [(0,), (1,)]


def test_tiny_parameters_share_a_block_at_128_byte_borders():
    bf16 = layout(specs_of(100, 100, 700, 200), chunk_numel=4096, world=1)
    assert [home.offset for home in bf16.homes] == [0, 128, 256, 1024]  # 956 + 200 would cross a block border
    fp32 = layout(specs_of(100, 100, 700, 100, dtype="fp32"), chunk_numel=4096, world=1)
    assert [home.offset for home in fp32.homes] == [0, 128, 256, 1024]
    assert [home.offset for home in layout(specs_of(2, 2, dtype="fp32"), chunk_numel=1024, world=1).homes] == [0, 32]


def test_a_full_block_is_filled_to_its_last_element():
    got = layout(specs_of(512, 512, 512), chunk_numel=4096, world=1)
    assert [home.offset for home in got.homes] == [0, 512, 1024]
    assert got.chunks[0].numel == 2048


def test_a_parameter_larger_than_a_chunk_becomes_a_span_of_equal_chunks():
    got = layout(specs_of(500, 9 * 1024 + 10, 700), chunk_numel=4096, world=1)
    # The large parameter leaves room in its third chunk, but 700 is more than an eighth of a chunk.
    assert [s.params for s in got.spans] == [(0,), (1,), (2,)]
    assert [c.numel for c in got.chunks] == [1024, 4096, 4096, 2048, 1024]
    assert got.spans[1].chunks == (1, 2, 3)
    assert got.chunks[3].pieces == (Piece(1, 0, 8192, 1034),)
    assert (got.chunks[3].offset, got.chunks[3].used) == (8192, 1034)
    assert got.chunks_of(1) == (1, 2, 3)


def test_a_span_takes_a_bounded_tail():
    got = layout(specs_of(9 * 1024, 1000, 1024, 1024, 100), chunk_numel=8192, world=1)
    # The tail has room up to 16 blocks. Each parameter may have an eighth of a chunk.
    assert [s.params for s in got.spans] == [(0, 1, 2, 3, 4)]
    assert [c.numel for c in got.chunks] == [7 * 1024, 6 * 1024]
    full = layout(specs_of(16 * 1024, 600, 600), chunk_numel=8192, world=1)
    # No block is free. The tail may extend the span by an eighth of a chunk, into one more chunk.
    assert [s.params for s in full.spans] == [(0, 1), (2,)]
    assert [c.numel for c in full.chunks] == [6 * 1024, 6 * 1024, 5 * 1024, 1024]
    assert full.chunks_of(0) == (0, 1, 2)
    assert full.chunks_of(1) == (2,)


def test_a_tail_ends_before_larger_parameters_of_other_formats():
    """Norms between quantised layers do not ride behind the embedding, but the bias beside it does."""
    plain, coded = Format("bf16", False), Format("nf4", False)
    specs = [ParameterSpec("embed", 9 * 1024, plain), ParameterSpec("embed.scale", 100, plain)]
    for layer in range(3):
        specs += [ParameterSpec(f"{layer}.weight", 4096, coded), ParameterSpec(f"{layer}.norm", 100, plain)]
    got = layout(specs, chunk_numel=8192, world=1)
    assert [span.params for span in got.spans] == [(0, 1), (2, 4), (3, 5, 7), (6,)]


def test_frozen_parameters_and_other_dtypes_have_separate_chunks():
    specs = [
        ParameterSpec("a", 3000, Format("bf16", False)),
        ParameterSpec("a.lora", 50, Format("bf16", True)),
        ParameterSpec("b", 1000, Format("bf16", False)),
        ParameterSpec("b.lora", 50, Format("bf16", True)),
        ParameterSpec("scale", 1024, Format("fp32", True)),
    ]
    got = layout(specs, chunk_numel=4096, world=1)
    assert [(s.format.compute, s.trainable, s.params) for s in got.spans] == [
        ("bf16", False, (0, 2)),
        ("bf16", True, (1, 3)),
        ("fp32", True, (4,)),
    ]
    assert [c.index for c in got.chunks] == [0, 1, 2]


def named(**numels):
    return [ParameterSpec(name.replace("_", "."), numel, Format("bf16", True)) for name, numel in numels.items()]


def spans_by_name(specs, chunk_numel):
    return [[specs[param].name for param in span.params] for span in layout(specs, chunk_numel=chunk_numel, world=1).spans]


def test_small_parameters_lie_with_the_large_one_nearest_by_name():
    specs = named(
        token_weight=9 * 1024, position_weight=900, h_0_norm_weight=10, h_0_norm_bias=10, h_0_qkv_weight=9 * 1024, h_0_qkv_bias=30,
        h_0_ln_weight=10, h_0_mlp_weight=9 * 1024, h_0_mlp_bias=10, h_1_norm_weight=10, h_1_qkv_weight=9 * 1024, norm_weight=10,
        head_weight=9 * 1024, head_bias=10,
    )  # fmt: skip
    assert spans_by_name(specs, 8192) == [
        ["token.weight", "position.weight"],
        ["h.0.norm.weight", "h.0.norm.bias", "h.0.qkv.weight", "h.0.qkv.bias", "h.0.ln.weight"],  # h.0.ln is equally near to qkv and mlp
        ["h.0.mlp.weight", "h.0.mlp.bias"],
        ["h.1.norm.weight", "h.1.qkv.weight", "norm.weight"],
        ["head.weight", "head.bias"],
    ]


def test_small_parameters_follow_the_next_one_into_a_shared_chunk():
    specs = named(h_0_mlp_weight=6000, h_1_norm_weight=10, h_1_qkv_weight=3000, h_1_mlp_weight=4000, h_2_norm_weight=10, h_2_qkv_weight=2000)
    assert spans_by_name(specs, 8192) == [
        ["h.0.mlp.weight"],
        ["h.1.norm.weight", "h.1.qkv.weight", "h.1.mlp.weight"],
        ["h.2.norm.weight", "h.2.qkv.weight"],
    ]


def test_a_parameter_that_fills_a_chunk_has_no_small_ones_before_it():
    specs = named(token_weight=9 * 1024, h_0_ln_weight=64, h_0_qkv_weight=8192, h_0_mlp_weight=8192)
    assert spans_by_name(specs, 8192) == [["token.weight", "h.0.ln.weight"], ["h.0.qkv.weight"], ["h.0.mlp.weight"]]


def test_small_parameters_before_a_large_one_are_at_most_a_tail():
    specs = named(token_weight=9 * 1024, **{f"h_0_scale{i}": 400 for i in range(5)}, h_0_qkv_weight=9 * 1024)
    assert spans_by_name(specs, 8192) == [
        ["token.weight", "h.0.scale0", "h.0.scale1", "h.0.scale2"],
        ["h.0.scale3", "h.0.scale4", "h.0.qkv.weight"],
    ]


def test_small_parameters_and_their_large_one_make_equal_chunks():
    specs = named(h_0_norm_weight=1000, h_0_qkv_weight=16 * 1024, h_0_qkv_bias=900, h_0_ln_weight=3000)
    got = layout(specs, chunk_numel=8192, world=1)
    assert [span.params for span in got.spans] == [(0, 1, 2), (3,)]
    assert [chunk.numel for chunk in got.chunks] == [6 * 1024, 6 * 1024, 6 * 1024, 3 * 1024]
    assert got.homes[1] == Home(0, 1024) and got.chunks_of(0) == (0,) and got.chunks_of(1) == (0, 1, 2)


def test_shards_are_equal_and_cut_pieces_at_block_borders():
    got = layout(specs_of(1500, 200, 3000), chunk_numel=8192, world=4)
    (chunk,) = got.chunks
    assert (chunk.numel, chunk.shard_numel, chunk.used) == (8192, 2048, 5048)
    assert [chunk.shard_used(rank) for rank in range(4)] == [2048, 2048, 952, 0]
    assert [chunk.shard_pieces(rank) for rank in range(4)] == [
        (Piece(0, 0, 0, 1500), Piece(1, 1536, 0, 200)),
        (Piece(2, 0, 0, 2048),),
        (Piece(2, 0, 2048, 952),),
        (),
    ]


def test_reprs_are_short():
    got = layout(specs_of(9000, 10), chunk_numel=4096, world=1)
    assert repr(got) == "Layout(2 parameters, 9010 elements, 3 chunks in 1 spans, world 1)"
    assert repr(got.chunks[2]) == "Chunk(2, 3072 bf16, parameters 0-1)"
    assert repr(got.spans[0]) == "Span(0, chunks 0-2, 9216 bf16)"
    assert repr(got.chunks[0].pieces[0]) == "Piece(0[0:3072] at 0)"


@pytest.mark.parametrize("chunk_numel", [0, -1024, 1000, 1024, 3 * 1024])
def test_a_chunk_size_that_ranks_cannot_divide_is_refused(chunk_numel):
    with pytest.raises(ValueError, match="multiple of 2048"):
        layout(specs_of(10), chunk_numel=chunk_numel, world=2)


def test_empty_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match="p1"):
        layout(specs_of(10, 0), chunk_numel=1024, world=1)


def test_no_parameters_make_no_chunks():
    got = layout([], chunk_numel=1024, world=1)
    assert (got.chunks, got.spans, got.homes, got.num_parameters) == ((), (), (), 0)


@pytest.mark.parametrize(
    "chunk_mib, world, expected",
    [(1, 1, 2**19), (1, 3, 2**19 // 3072 * 3072), (0.0001, 4, 4096), (None, 1, 2**22), (0.5, 2, 2**18)],
)
def test_default_chunk_numel_is_divisible_by_ranks(chunk_mib, world, expected):
    assert default_chunk_numel(chunk_mib, world) == expected


# Limits of padding


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk_mib", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("vocab", [256, 32000, 50257])
def test_padding_at_hidden_4096_is_at_most_a_thousandth(world, chunk_mib, vocab):
    got = layout(gpt_specs(4096, 4, vocab, 1024), chunk_numel=default_chunk_numel(chunk_mib, world), world=world)
    assert got.num_allocated - got.num_parameters <= 0.001 * got.num_parameters


@pytest.mark.parametrize("hidden", [1024, 4096])
def test_records_waste_at_most_a_hundredth(hidden):
    got = layout(gpt_specs(hidden, 4, 32000, 1024), chunk_numel=default_chunk_numel(8, 2), world=2)
    stored = sum(record_layout(c.shard_used(r), Format("bf16", True)).nbytes for c in got.chunks for r in range(2))
    assert 12 * got.num_parameters <= stored <= 1.01 * 12 * got.num_parameters


# Random layouts, checked by brute force


def random_specs(rng, chunk_numel):
    sizes = [
        lambda: rng.randint(1, 100),
        lambda: rng.choice([64, 256, 512, 768, 1024, 2048]),
        lambda: rng.randint(1, chunk_numel // 4),
        lambda: rng.randint(1, chunk_numel),
        lambda: rng.randint(chunk_numel, 6 * chunk_numel),
        lambda: rng.randint(1, 6) * chunk_numel,
    ]
    formats = [Format("bf16")] * 4 + [Format("bf16", trainable=False), Format("fp32"), Format("fp8_e4m3", trainable=False)]
    return [ParameterSpec(f"p{i}", rng.choice(sizes)(), rng.choice(formats)) for i in range(rng.randint(1, 30))]


@pytest.mark.parametrize("seed", range(150))
def test_random_layouts_keep_all_invariants(seed):
    rng = random.Random(seed)
    world = rng.choice([1, 2, 3, 4, 8])
    unit = world * BLOCK_NUMEL
    chunk_numel = rng.choice([1, 2, 3, 8, 10]) * unit
    specs = random_specs(rng, chunk_numel)
    got = layout(specs, chunk_numel=chunk_numel, world=world)

    # Chunks tile spans in order, separately for each format.
    assert [i for span in got.spans for i in span.chunks] == list(range(len(got.chunks)))
    for span in got.spans:
        offset = 0
        for index in span.chunks:
            chunk = got.chunks[index]
            assert (chunk.index, chunk.span, chunk.offset) == (index, span.index, offset)
            assert chunk.format == span.format
            assert 0 < chunk.used <= chunk.numel <= chunk_numel and chunk.numel % unit == 0
            assert chunk.numel - chunk.used < unit + BLOCK_NUMEL
            offset += chunk.numel
        assert offset == span.numel
        assert len({got.chunks[index].numel for index in span.chunks[:-1]}) <= 1
        assert {specs[p].format for p in span.params} == {span.format}
        largest = max(specs[p].numel for p in span.params)
        assert len(span.chunks) <= -(-largest // chunk_numel) + (largest > chunk_numel)
        assert list(span.params) == sorted(span.params)
    assert [span.params[0] for span in got.spans] == sorted(span.params[0] for span in got.spans)

    # Every element lies once at its home, counted by chunks and by shards.
    by_shard = Counter()
    for chunk in got.chunks:
        assert chunk.used == max(piece.start + piece.numel for piece in chunk.pieces)
        assert sum(chunk.shard_used(rank) for rank in range(world)) == chunk.used
        end = 0
        for piece in chunk.pieces:
            assert piece.start >= end and piece.numel > 0
            end = piece.start + piece.numel
            home = got.homes[piece.param]
            assert (chunk.span, chunk.offset + piece.start) == (home.span, home.offset + piece.param_start)
        for rank in range(world):
            end = 0
            for piece in chunk.shard_pieces(rank):
                assert end <= piece.start < piece.start + piece.numel <= chunk.shard_used(rank)
                end = piece.start + piece.numel
                home = got.homes[piece.param]
                place = chunk.offset + rank * chunk.shard_numel + piece.start
                assert place == home.offset + piece.param_start
                by_shard[piece.param] += piece.numel
    assert by_shard == {i: spec.numel for i, spec in enumerate(specs)}
    for param, spec in enumerate(specs):
        parts = sorted((p.param_start, p.numel) for c in got.chunks for p in c.pieces if p.param == param)
        position = 0
        for start, numel in parts:
            assert start == position
            position += numel
        assert position == spec.numel
        assert got.chunks_of(param) == tuple(c.index for c in got.chunks if any(p.param == param for p in c.pieces))
        if spec.numel <= chunk_numel and len(got.spans[got.homes[param].span].chunks) == 1:
            assert len(parts) == 1

    # Offsets are aligned, and no shard border cuts a block of the norm.
    for param, spec in enumerate(specs):
        offset = got.homes[param].offset
        assert offset * spec.format.itemsize % 128 == 0
        span = got.spans[got.homes[param].span]
        shard_of = {}
        for index in span.chunks:
            chunk = got.chunks[index]
            for block in range(chunk.numel // BLOCK_NUMEL):
                shard_of[chunk.offset // BLOCK_NUMEL + block] = (index, block * BLOCK_NUMEL // chunk.shard_numel)
        for start in range(0, spec.numel, BLOCK_NUMEL):
            first = (offset + start) // BLOCK_NUMEL
            last = (offset + min(start + BLOCK_NUMEL, spec.numel) - 1) // BLOCK_NUMEL
            assert shard_of[first] == shard_of[last]


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(20))
def test_each_element_is_covered_exactly_once(seed):
    rng = random.Random(1000 + seed)
    world = rng.choice([1, 2, 4])
    specs = random_specs(rng, 2048 * world)
    got = layout(specs, chunk_numel=2048 * world, world=world)
    seen = Counter()
    for chunk in got.chunks:
        places = Counter()
        for rank in range(world):
            for piece in chunk.shard_pieces(rank):
                seen.update((piece.param, piece.param_start + i) for i in range(piece.numel))
                places.update(rank * chunk.shard_numel + piece.start + i for i in range(piece.numel))
        assert set(places.values()) == {1}
    assert set(seen.values()) == {1}
    assert len(seen) == got.num_parameters


@pytest.mark.parametrize("seed", range(30))
def test_a_tail_is_bounded(seed):
    rng = random.Random(2000 + seed)
    chunk_numel = 8 * 1024 * rng.choice([1, 2, 4])
    specs = specs_of(*[rng.choice([rng.randint(2, 2000), rng.randint(chunk_numel, 3 * chunk_numel)]) for _ in range(40)])
    got = layout(specs, chunk_numel=chunk_numel, world=1)
    for span in got.spans:
        head, *tail = (specs[p].numel for p in span.params)
        if head > chunk_numel:
            assert all(numel <= chunk_numel // 8 for numel in tail)
            last = span.params[-1]
            reach = got.homes[last].offset + specs[last].numel - head
            assert reach <= max(-head % chunk_numel, chunk_numel // 8)


# Records


def test_a_trainable_bf16_record_has_four_aligned_segments():
    record = record_layout(5000, Format("bf16", True))
    assert [segment.name for segment in record.segments] == ["weight", "residual", "momentum", "variance"]
    assert record.offsets == (0, 12288, 24576, 45056)
    assert (record.weight_nbytes, record.states_offset, record.states_nbytes, record.nbytes) == (12288, 12288, 53248, 65536)
    assert record.offset_of("variance") == 45056


def test_a_trainable_fp32_record_has_no_residual():
    record = record_layout(1024, Format("fp32", True))
    assert [segment.name for segment in record.segments] == ["weight", "momentum", "variance"]
    assert (record.offsets, record.nbytes) == ((0, 4096, 8192), 12288)
    with pytest.raises(KeyError):
        record.offset_of("residual")


@pytest.mark.parametrize("format", trainable_names())
def test_a_frozen_record_has_only_the_weight(format):
    record = record_layout(4096, Format(format, False))
    assert len(record.segments) == 1
    assert record.nbytes == record.weight_nbytes == 4096 * Format(format, False).itemsize
    assert record.states_nbytes == 0


@pytest.mark.parametrize("format", trainable_names())
def test_an_empty_shard_has_an_empty_record(format):
    record = record_layout(0, Format(format, True))
    assert (record.nbytes, record.weight_nbytes, record.states_nbytes) == (0, 0, 0)


@pytest.mark.parametrize(
    "format, moments, moments_dtype, nbytes",
    [
        ("bf16", ("momentum", "variance"), "fp32", 12),
        ("bf16", ("momentum", "variance"), "bf16", 8),
        ("fp16", ("momentum", "variance"), "fp32", 14),
        ("fp32", ("momentum", "variance"), "fp32", 12),
        ("bf16", ("momentum",), "fp32", 8),
        ("bf16", (), "fp32", 4),
        ("fp32", (), "fp32", 4),
    ],
)
def test_bytes_per_parameter_of_a_record(format, moments, moments_dtype, nbytes):
    assert record_layout(2**20, Format(format, True, moments, moments_dtype)).nbytes == nbytes * 2**20
    assert record_layout(2**20, Format(format, False, moments, moments_dtype)).nbytes == DTYPE_NBYTES[format] * 2**20
