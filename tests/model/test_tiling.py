"""Tiled layers have the function, initial values and state dicts of plain layers. An engine holds one tile at a time.

This file is long because all tests run for each kind of layer.
"""

import copy
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from support.helpers import NVME, assert_nothing_held, least_device_memory, on_gpu, training
from support.models import Model
from support.ranks import ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import TiledEmbedding, TiledLinear, linear_cross_entropy, tile_large_layers
from infinity.errors import BudgetError, ConfigError
from infinity.model.tiling import tile_to_fit

pytestmark = pytest.mark.usefixtures("one_thread")

CUTS = [(1, 1), (3, 1), (1, 3), (3, 2), (4, 5), (7, 5)]  # out_tiles, in_tiles of a layer 5 -> 7
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def plain_and_tiled(out_tiles, in_tiles=1, *, shape=(5, 7), bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    linear = nn.Linear(*shape, bias=bias, dtype=dtype)
    return linear, TiledLinear.from_linear(linear, out_tiles, in_tiles)


def gradients(module):
    """Gradients under the names of the plain layer."""
    if not hasattr(module, "tiles"):
        return {name: p.grad for name, p in module.named_parameters()}
    found = {}
    for name, grid in module.grids().items():
        rows = [torch.cat([getattr(module.tiles[index], name).grad for index in row], dim=-1) for row in grid]
        found[name] = torch.cat(rows)
    return found


def assert_close(got, expected, **tolerance):
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], **tolerance)


# The function


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_tiled_linear_has_the_plain_layers_output_and_gradients(cut, bias, shape):
    linear, tiled = plain_and_tiled(*cut, bias=bias)
    x = torch.randn(shape, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [linear(inputs[0]), tiled(inputs[1])]
    assert outputs[1].shape == (*shape[:-1], 7)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-13, atol=1e-14)
    for output in outputs:
        output.sin().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-13, atol=1e-14)
    assert_close(gradients(tiled), gradients(linear), rtol=1e-13, atol=1e-14)


def test_non_contiguous_input_and_a_single_feature_work():
    linear, tiled = plain_and_tiled(3, 2)
    x = torch.randn(5, 4, dtype=torch.float64).t()
    torch.testing.assert_close(tiled(x), linear(x), rtol=1e-13, atol=1e-14)
    linear, tiled = plain_and_tiled(4, 1, shape=(1, 7))
    assert torch.equal(tiled(x[:, :1]), linear(x[:, :1]))


def test_tiles_are_even_and_the_first_column_has_the_bias():
    tiled = TiledLinear(5, 7, out_tiles=3, in_tiles=2)
    assert [tuple(tile.weight.shape) for tile in tiled.tiles] == [(3, 3), (3, 2), (2, 3), (2, 2), (2, 3), (2, 2)]
    assert [tile.bias is not None for tile in tiled.tiles] == [True, False] * 3
    assert tiled.weight.shape == (7, 5) and tiled.bias.shape == (7,)
    assert repr(tiled).startswith("TiledLinear(\n  in_features=5, out_features=7, bias=True, out_tiles=3, in_tiles=2\n")
    assert TiledLinear(5, 7, bias=False, out_tiles=2).bias is None


def test_out_tiles_in_fp32_are_close():
    linear, tiled = plain_and_tiled(6, shape=(300, 500), dtype=torch.float32)
    x = torch.randn(64, 300)
    torch.testing.assert_close(tiled(x), linear(x), rtol=1e-6, atol=1e-6)


def test_joined_weights_are_differentiable():
    linear, tiled = plain_and_tiled(3, 2)
    x = torch.randn(4, 5, dtype=torch.float64)
    F.linear(x, tiled.weight, tiled.bias).square().sum().backward()
    linear(x).square().sum().backward()
    assert_close(gradients(tiled), gradients(linear), rtol=1e-13, atol=1e-14)


def test_from_linear_takes_flags_dtype_and_device_and_copies():
    linear = nn.Linear(5, 7, dtype=torch.bfloat16).eval()
    linear.weight.requires_grad_(False)
    tiled = TiledLinear.from_linear(linear, 2, 2)
    assert not tiled.training and not any(module.training for module in tiled.modules())
    assert [tile.weight.requires_grad for tile in tiled.tiles] == [False] * 4
    assert tiled.tiles[0].bias.requires_grad and tiled.weight.dtype == torch.bfloat16
    assert torch.equal(tiled.weight, linear.weight) and torch.equal(tiled.bias, linear.bias)
    linear.weight.zero_()
    assert tiled.weight.count_nonzero()
    assert TiledLinear.from_linear(nn.Linear(5, 7, device="meta"), 3).tiles[2].weight.is_meta


# First values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [(1, 1), (3, 1), (1, 3), (5, 4)], ids=str)
@pytest.mark.parametrize("shape", [(33, 50), (1, 9), (300, 301)], ids=str)
def test_a_tiled_linear_draws_the_plain_layers_values(shape, cut, dtype):
    cut = [min(tiles, size) for tiles, size in zip(cut, reversed(shape))]
    torch.manual_seed(0)
    linear, after = nn.Linear(*shape, dtype=dtype), torch.get_rng_state()
    torch.manual_seed(0)
    tiled = TiledLinear(*shape, out_tiles=cut[0], in_tiles=cut[1], dtype=dtype)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(tiled.weight, linear.weight) and torch.equal(tiled.bias, linear.bias)
    linear.reset_parameters()
    torch.set_rng_state(after)
    tiled.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    assert torch.equal(tiled.weight, linear.weight) and torch.equal(tiled.bias, linear.bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(7, 1), (7, 2), (8, 2), (7, 5), (64, 16), (7, 16), (33, 31), (700, 301)], ids=str)
def test_a_tiled_embedding_draws_the_plain_layers_values(shape, tiles, dtype):
    """Shapes have fewer than 16 elements, tiles whose sizes are no multiple of 16, and tails of every length."""
    torch.manual_seed(0)
    embedding, after = nn.Embedding(*shape, padding_idx=-2, dtype=dtype), torch.get_rng_state()
    torch.manual_seed(0)
    tiled = TiledEmbedding(*shape, padding_idx=-2, tiles=tiles, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(tiled.weight, embedding.weight)


class Sizes(TorchDispatchMode):
    """`largest`: number of elements of the largest tensor created under this mode."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        self.largest = max([self.largest, *(tensor.numel() for tensor in made if isinstance(tensor, torch.Tensor))])
        return result


@pytest.mark.parametrize(
    "make, largest",
    [
        (lambda: TiledLinear(64, 96, out_tiles=8), 64 * 12),
        (lambda: TiledLinear(64, 96, out_tiles=8, in_tiles=4), 64 * 12),
        (lambda: TiledEmbedding(96, 64, tiles=8), 64 * 12),
    ],
)
def test_at_most_one_stripe_is_drawn_at_once(make, largest):
    with Sizes() as sizes:
        make()
    assert sizes.largest == largest


# Embeddings


@pytest.mark.parametrize("tiles", [1, 2, 3, 10])
@pytest.mark.parametrize("padding", [None, 0, 4, 9])
@pytest.mark.parametrize("shape", [(), (6,), (3, 4), (0,)], ids=str)
def test_a_tiled_embedding_has_the_plain_layers_bits_and_gradients(shape, padding, tiles):
    embedding = nn.Embedding(10, 3, padding_idx=padding)
    with torch.no_grad():
        embedding.weight[::2, 0] = -0.0
        embedding.weight[3, 1] = float("inf")
    tiled = TiledEmbedding.from_embedding(embedding, tiles)
    indices = torch.randint(10, shape)
    outputs = [embedding(indices), tiled(indices)]
    assert outputs[1].shape == (*shape, 3)
    assert torch.equal(outputs[0].view(torch.int32), outputs[1].view(torch.int32))
    weight = torch.randn(*shape, 3)
    for output in outputs:
        (output * weight).sum().backward()
    assert torch.equal(gradients(tiled)["weight"], embedding.weight.grad)


@pytest.mark.parametrize("index", [-1, 10, 13])
def test_an_index_out_of_range_is_refused_as_by_the_plain_embedding(index):
    with pytest.raises(IndexError):
        TiledEmbedding(10, 3, tiles=3)(torch.tensor([2, index]))


# Checkpointing


@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
def test_gradients_are_equal_under_every_kind_of_checkpointing(outer, inner):
    """Checkpoint around the block (outer) and around the layer (inner): None, non-reentrant (False) or reentrant (True)."""
    if inner and outer is False:
        pytest.skip("PyTorch has no reentrant checkpoint inside a non-reentrant one")
    linear, tiled = plain_and_tiled(3, 2)
    x = torch.randn(4, 5, dtype=torch.float64)
    results = []
    for layer in (linear, tiled):

        def block(x, layer=layer):
            y = layer(x) if inner is None else checkpoint(layer, x, use_reentrant=inner)
            return torch.tanh(y)

        mine = x.clone().requires_grad_()
        (block(mine) if outer is None else checkpoint(block, mine, use_reentrant=outer)).square().sum().backward()
        results.append(gradients(layer) | {"input": mine.grad})
    assert_close(results[1], results[0], rtol=1e-13, atol=1e-14)


# State dicts


class Both(nn.Module):
    def __init__(self, tiled):
        super().__init__()
        self.token = TiledEmbedding(10, 6, tiles=3) if tiled else nn.Embedding(10, 6)
        self.inner = nn.Sequential(TiledLinear(6, 7, out_tiles=3, in_tiles=2) if tiled else nn.Linear(6, 7), nn.LayerNorm(7))
        self.last = TiledLinear(7, 4, bias=False, out_tiles=2) if tiled else nn.Linear(7, 4, bias=False)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_equal_those_of_the_plain_model(assign):
    torch.manual_seed(0)
    plain = Both(False)
    torch.manual_seed(0)
    tiled = Both(True)
    theirs, ours = plain.state_dict(), tiled.state_dict()
    assert list(ours) == list(theirs) and list(ours._metadata) == list(theirs._metadata)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for source, target in ((Both(False), tiled), (Both(True), plain)):
        state = source.state_dict()
        assert target.load_state_dict(state, assign=assign) == ([], [])
        assert all(torch.equal(target.state_dict()[name], value) for name, value in source.state_dict().items())
        assert list(state) == list(theirs)  # the caller's state is unchanged
    layer = TiledLinear(6, 7, out_tiles=3, in_tiles=2)
    assert layer.load_state_dict(tiled.inner[0].state_dict(), assign=assign) == ([], [])
    assert torch.equal(layer.weight, tiled.inner[0].weight) and all(tile.weight.is_contiguous() for tile in layer.tiles)
    assert [isinstance(p, nn.Parameter) and p.requires_grad for p in layer.parameters()] == [True] * 9


WRONG_STATES = [  # damage to a good state, expected message of load_state_dict
    (lambda state: state.pop("inner.0.weight"), r'Missing key\(s\) in state_dict: "inner.0.weight".\s*$'),
    (lambda state: state.pop("inner.0.bias"), r'Missing key\(s\) in state_dict: "inner.0.bias".\s*$'),
    (lambda state: state.pop("token.weight"), r'Missing key\(s\) in state_dict: "token.weight".\s*$'),
    (lambda state: state.update({"last.bias": torch.zeros(4)}), r'Unexpected key\(s\) in state_dict: "last.bias".\s*$'),
    (lambda state: state.update({"last.tiles.0.weight": 0}), r'Unexpected key\(s\) in state_dict: "last.tiles.0.weight".\s*$'),
    (
        lambda state: state.update({"inner.0.weight": torch.zeros(6, 7)}),
        r"size mismatch for inner.0.weight: \(6, 7\).*\(7, 6\)",
    ),
    (lambda state: state.update({"inner.0.bias": torch.zeros(8)}), r"size mismatch for inner.0.bias: \(8,\).*\(7,\)"),
    (lambda state: state.update({"token.weight": "no"}), r"size mismatch for token.weight: str.*\(10, 6\)"),
]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("damage, expected", WRONG_STATES)
def test_errors_of_a_state_dict_have_the_plain_names(damage, expected, assign):
    model = Both(True)
    before = copy.deepcopy(model.state_dict())
    state = {name: value + 1 for name, value in before.items()}
    damage(state)
    with pytest.raises(RuntimeError, match=expected) as raised:
        model.load_state_dict(state, assign=assign)
    assert "tiles" not in str(raised.value) or "tiles" in expected
    result = None
    try:
        result = model.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:
        assert "size mismatch" in str(error)
    if result is not None and result.missing_keys:
        (name,) = result.missing_keys
        assert torch.equal(model.state_dict()[name], before[name])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_are_complete_and_independent(clone):
    model = Both(True)
    twin = clone(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(torch.equal(twin.state_dict()[name], value) for name, value in expected.items())
    twin.load_state_dict(model.state_dict())
    assert not any(p.count_nonzero() for p in twin.parameters())
    tokens = torch.randint(10, (4,))
    assert twin.last(twin.inner(twin.token(tokens))).shape == (4, 4)


# The loss of a tiled head


def heads():
    torch.manual_seed(0)
    linear = nn.Linear(16, 50)
    return {"linear": linear} | {f"{tiles} tiles": TiledLinear.from_linear(linear, tiles) for tiles in (1, 3, 50)}


LABELS = {
    "all": torch.arange(24) % 50,
    "some ignored": torch.arange(24).masked_fill(torch.arange(24) % 3 == 0, -100),
    "all ignored": torch.full((24,), -100),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("head", ["linear", "1 tiles", "3 tiles", "50 tiles"])
def test_the_loss_by_tiles_equals_the_loss_of_all_logits(head, labels, reduction):
    head, reference, labels = heads()[head], heads()["linear"], LABELS[labels].view(2, 12)
    x = 3 * torch.randn(2, 12, 16)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got = linear_cross_entropy(mine, head, labels, reduction=reduction)
    expected = F.cross_entropy(reference(theirs).flatten(0, 1), labels.flatten(), reduction=reduction)
    torch.testing.assert_close(got.flatten(), expected.flatten(), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert got.shape == (labels.shape if reduction == "none" else ())
    got.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert_close(gradients(head), gradients(reference), rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_bf16_head_is_computed_in_fp32():
    head = nn.Linear(16, 50, dtype=torch.bfloat16)
    x, labels = torch.randn(24, 16, dtype=torch.bfloat16), LABELS["all"]
    got = linear_cross_entropy(x, TiledLinear.from_linear(head, 7), labels)
    torch.testing.assert_close(got, F.cross_entropy(head(x).float(), labels), rtol=1e-6, atol=1e-6)


def test_an_ignored_class_an_empty_batch_and_no_graph_work():
    head, labels = heads()["3 tiles"], LABELS["all"]
    x = torch.randn(24, 16)
    expected = F.cross_entropy(head(x), labels, ignore_index=17)
    torch.testing.assert_close(linear_cross_entropy(x, head, labels, ignore_index=17), expected, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, head, labels, ignore_index=17), expected, rtol=1e-6, atol=1e-6)
    assert linear_cross_entropy(x[:0], head, labels[:0]).isnan()
    assert linear_cross_entropy(x[:0], head, labels[:0], reduction="sum") == 0


@pytest.mark.parametrize("label", [-1, 50, 10_000])
@pytest.mark.parametrize("head", ["linear", "3 tiles"])
def test_a_label_out_of_range_is_refused(head, label):
    labels = LABELS["all"].clone()
    labels[5] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(torch.randn(24, 16), heads()[head], labels)


@pytest.mark.parametrize("tiles", [1, 2, 8])
def test_at_most_one_tile_of_logits_exists(tiles):
    """With 64 tokens, 256 classes and width 16, weights and inputs are smaller than the logits of a tile."""
    head = TiledLinear(16, 256, out_tiles=tiles)
    x, labels = torch.randn(64, 16, requires_grad=True), torch.arange(64)
    with Sizes() as sizes:
        linear_cross_entropy(x, head, labels).backward()
    assert sizes.largest == 64 * 256 // tiles
    assert x.grad is not None


# Replacing layers


def cut(model, above=100, tile=100, itemsize=4):
    return tile_large_layers(model, above_nbytes=above, tile_nbytes=tile, itemsize=itemsize)


def test_large_layers_are_split_in_place_and_small_ones_are_not():
    torch.manual_seed(0)
    model = nn.ModuleDict({"token": nn.Embedding(20, 4, padding_idx=3), "up": nn.Linear(4, 9), "down": nn.Linear(3, 5)}).eval()
    model["up"].weight.requires_grad_(False)
    model["up"].weight.no_decay = model["up"].init_std = 0.02
    twin, up = copy.deepcopy(model), model["up"]
    assert cut(model) == [("token", 4), ("up", 2)]
    assert up is model["up"] and type(up) is TiledLinear and type(model["down"]) is nn.Linear
    assert [tuple(tile.weight.shape) for tile in model["token"].tiles] == [(5, 4)] * 4
    assert [tile.padding_idx for tile in model["token"].tiles] == [3, None, None, None]
    assert not any(module.training for module in model.modules())
    assert [p.requires_grad for tile in up.tiles for p in (tile.weight, tile.bias)] == [False, True] * 2
    assert up.init_std == up.tiles[1].weight.no_decay == 0.02
    assert list(model.state_dict()) == list(twin.state_dict())
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    x = torch.randn(3, 4)
    torch.testing.assert_close(up(x), twin["up"](x), rtol=1e-6, atol=1e-6)
    assert cut(model) == []
    copy.deepcopy(model).load_state_dict(twin.state_dict())


@pytest.mark.parametrize(
    "above, tile, itemsize, rows",
    [
        (360, 80, 4, None),
        (359, 360, 4, None),
        (359, 359, 4, [5, 4]),
        (359, 80, 4, [2, 2, 2, 2, 1]),
        (359, 79, 4, [1] * 9),
        (359, 1, 4, [1] * 9),
        (0, 10**9, 4, None),
        (180, 80, 2, None),
        (179, 80, 2, [3, 3, 3]),
    ],
)
def test_tiles_are_whole_rows_within_the_limit(above, tile, itemsize, rows):
    """The layer 10 -> 9 has rows of 40 bytes in fp32."""
    layer = nn.Linear(10, 9)
    assert cut(layer, above, tile, itemsize) == ([("", len(rows))] if rows else [])
    assert [part.out_features for part in getattr(layer, "tiles", ())] == (rows or [])


@pytest.mark.parametrize("num_rows, most", [(1000, 300), (1000, 128), (129, 128), (4096, 1024), (2000, 200), (1000, 999)])
def test_borders_of_large_tiles_keep_blocks_of_one_scale_whole(num_rows, most):
    model = nn.Sequential(nn.Linear(4, num_rows))
    infinity.tile_large_layers(model, above_nbytes=4, tile_nbytes=most * 16, itemsize=4)
    rows = [tile.weight.shape[0] for tile in model[0].tiles]
    assert sum(rows) == num_rows and max(rows) <= most
    assert len(rows) > 1 and not any(each % 128 for each in rows[:-1])


@pytest.mark.parametrize("reduces, frozen, is_cut", [(False, False, False), (True, False, True), (True, True, False)])
def test_a_reduced_gradient_counts_as_much_as_weight_and_gradient(reduces, frozen, is_cut):
    model = nn.Linear(256, 1024, bias=False).requires_grad_(not frozen)
    found = tile_to_fit(model, "auto", device_nbytes=4 * 256 * 1024 * 4, itemsize=4, reduces=reduces)  # the weight takes a quarter
    assert bool(found) == is_cut


def test_a_layer_with_several_names_is_split_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model.again, model.unregistered = model[0], [model[2]]
    assert cut(model) == [("0", 3), ("2", 3)]
    assert model.again is model[0] and model.unregistered[0] is model[2]
    assert type(model[0]) is type(model[2]) is TiledLinear


def test_tied_weights_are_split_once():
    model = nn.ModuleList([nn.Embedding(20, 6), nn.Linear(6, 20), nn.Linear(6, 20, bias=False), nn.Linear(6, 20)])
    model[1].weight = model[2].weight = model[0].weight
    assert cut(model) == [("0", 5), ("1", 5), ("2", 5), ("3", 5)]
    for tiles in zip(*(layer.tiles for layer in model)):
        assert tiles[0].weight is tiles[1].weight is tiles[2].weight is not tiles[3].weight
    assert len(list(model.parameters())) == 5 + 5 + 5 + 5  # tied weights, weights of layer 3, biases of layers 1 and 3
    state = model.state_dict()
    assert torch.equal(state["0.weight"], state["1.weight"])


def owned_elsewhere():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model.mine = model[0].weight
    return model


def bias_shared():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model[0].bias = model[1].bias
    return model


def in_a_list():
    model = nn.ModuleList([nn.Linear(8, 8)])
    model.groups = [{"params": [model[0].weight]}]
    return model


def tied_to_a_subclass():
    model = nn.ModuleList([nn.Linear(8, 8), nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8)])
    model[0].weight = model[1].weight
    return model


def with_a_child():
    model = nn.ModuleList([nn.Linear(8, 8)])
    model[0].adapter = nn.Identity()
    return model


def hooked():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
    model[0].register_forward_hook(lambda module, args, output: None)
    model[1].weight.register_hook(lambda grad: None)
    model[2].forward = lambda x: x
    return model


LEFT_ALONE = {  # a model, and the layers that are split
    "a weight that another module owns": (owned_elsewhere, [("1", 4)]),
    "a bias of two layers": (bias_shared, []),
    "a weight in a list": (in_a_list, []),
    "a weight tied to a subclass": (tied_to_a_subclass, []),
    "hooks": (hooked, []),
    "a parametrization": (lambda: nn.ModuleList([nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))]), []),
    "an old normalisation": (lambda: nn.ModuleList([nn.utils.spectral_norm(nn.Linear(8, 8))]), []),
    "attention": (lambda: nn.ModuleList([nn.MultiheadAttention(8, 2)]), []),
    "max_norm": (lambda: nn.ModuleList([nn.Embedding(8, 8, max_norm=1.0)]), []),
    "sparse": (lambda: nn.ModuleList([nn.Embedding(8, 8, sparse=True)]), []),
    "scaled": (lambda: nn.ModuleList([nn.Embedding(8, 8, scale_grad_by_freq=True)]), []),
    "a child": (with_a_child, []),
}


def test_layers_on_the_meta_device_are_split_for_plans():
    model = nn.ModuleList([nn.Linear(8, 8, device="meta")])
    assert cut(model, tile=80) == [("0", 4)]
    assert [tuple(tile.weight.shape) for tile in model[0].tiles] == [(2, 8)] * 4 and model[0].tiles[0].weight.is_meta


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_layers_that_tiles_cannot_replace_are_not_split(what):
    make, expected = LEFT_ALONE[what]
    model = make()
    before = dict(model.named_parameters(remove_duplicate=False))
    assert cut(model, tile=80) == expected
    after = dict(model.named_parameters(remove_duplicate=False))
    kept = [name for name in before if not any(name.startswith(f"{layer}.") for layer, _ in expected)]
    assert kept and all(after[name] is before[name] for name in kept)


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: TiledLinear(5, 7, out_tiles=8), "out_tiles=8: expected an integer from 1 to 7"),
        (lambda: TiledLinear(5, 7, in_tiles=6), "in_tiles=6: expected an integer from 1 to 5"),
        (lambda: TiledLinear(5, 7, out_tiles=0), "out_tiles=0"),
        (lambda: TiledLinear(5, 7, out_tiles=2.0), "out_tiles=2.0"),
        (lambda: TiledLinear.from_linear(nn.Linear(5, 7), 8), "out_tiles=8"),
        (lambda: TiledEmbedding(5, 7, tiles=6), "tiles=6: expected an integer from 1 to 5"),
        (lambda: TiledEmbedding(5, 7, padding_idx=5), "padding_idx=5"),
        (
            lambda: TiledEmbedding.from_embedding(nn.Embedding(5, 7, max_norm=1), 2),
            "an embedding with max_norm cannot be tiled",
        ),
        (lambda: TiledEmbedding.from_embedding(nn.Embedding(5, 7, sparse=True), 2), "an embedding with sparse"),
        (lambda: TiledEmbedding.from_embedding(nn.Embedding(5, 7, scale_grad_by_freq=True), 2), "with scale_grad_by_freq"),
        (lambda: linear_cross_entropy(torch.zeros(3, 5), TiledLinear(5, 7, in_tiles=2), torch.zeros(3).long()), "in_tiles=1"),
        (lambda: linear_cross_entropy(torch.zeros(3, 5), nn.Embedding(5, 7), torch.zeros(3).long()), "nn.Linear"),
        (lambda: linear_cross_entropy(torch.zeros(3, 5), nn.Linear(5, 7), torch.zeros(4).long()), r"expected \(3,\)"),
        (
            lambda: linear_cross_entropy(torch.zeros(3, 5), nn.Linear(5, 7), torch.zeros(3).long(), reduction="max"),
            "reduction='max'",
        ),
    ],
)
def test_refusals_name_the_given_and_the_expected_values(make, expected):
    with pytest.raises(ConfigError, match=expected):
        make()


# In an engine


def lookup(tie=False, head_loss=False):
    """Tokens to classes through 96 features. The two large layers have 460,800 bytes each in fp32."""

    def build(self):
        self.token = nn.Embedding(1200, 96)
        self.layer = nn.Linear(96, 96)
        self.head = nn.Linear(96, 1200, bias=not tie)
        if tie:
            self.head.weight = self.token.weight

    def run(self, x):
        hidden = torch.tanh(self.layer(self.token(x)))
        labels = (7 * x + 1) % 1200
        return linear_cross_entropy(hidden, self.head, labels) if head_loss else F.cross_entropy(self.head(hidden), labels)

    return Model(build, run)


LAYER_NBYTES = 1200 * 96 * 4


def train(model, optimizer, steps=5, world=1, rank=0, device="cpu"):
    """Losses of this rank's part of each batch of 8 tokens."""
    losses = []
    for step in range(steps):
        tokens = torch.randint(1200, (8,), generator=torch.Generator().manual_seed(step))
        loss = model(tokens[rank * 8 // world : (rank + 1) * 8 // world].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_losses(**options):
    torch.manual_seed(0)
    model = lookup(**options)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


TILINGS = {  # configuration, number of tiles per large layer
    "auto": ({"device_memory": "512KiB"}, 10),
    "bytes": ({"tile_above": "32KiB", "device_memory": 200_000}, 15),
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{}, {"tie": True}, {"head_loss": True}], ids=str)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("built", ["init", "offload"])
def test_a_layer_larger_than_the_device_trains_as_in_plain_pytorch(built, tiling, options, tmp_path):
    changes, num_tiles = TILINGS[tiling]
    config = {"swap_dirs": tmp_path, "device": "cpu", "dtype": "fp32", "chunk_mib": 1 / 64} | NVME | changes
    config = infinity.Config(**config)
    assert config.device_memory < 2 * LAYER_NBYTES
    torch.manual_seed(0)
    if built == "init":
        with infinity.init(config, window=0):
            model = lookup(**options)
        engine = infinity.engine_of(model)
    else:
        model = lookup(**options)
        engine = infinity.offload(model, config)
    with engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        assert [len(layer.tiles) for layer in (model.token, model.head)] == [num_tiles] * 2
        assert type(model.layer) is nn.Linear or tiling == "bytes"
        assert train(model, optimizer) == pytest.approx(plain_losses(**options), rel=1e-5)
        assert engine.stats()["peak_device_nbytes"] <= config.device_memory
        assert_nothing_held(engine)


def test_without_tiling_the_same_budget_is_refused(tmp_path):
    with pytest.raises(BudgetError, match="split the largest layer"):
        with training(lookup, tmp_path, device_memory="512KiB", tile_above=None):
            pass


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [0, 1 << 30])
def test_layers_tiled_after_init_have_the_plain_models_values(window, tmp_path):
    def make():
        model = lookup()
        model.apply(lambda module: nn.init.xavier_uniform_(module.weight) if hasattr(module, "weight") else None)
        return model

    torch.manual_seed(0)
    expected = [make() for _ in range(2)]
    drawn = torch.rand(3)
    torch.manual_seed(0)
    with infinity.init(infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", tile_above="64KiB"), window=window):
        models = [make() for _ in range(2)]
        assert torch.equal(torch.rand(3), drawn)
        whole = weakref.ref(models[0].head.weight)
    assert whole() is None
    for model, plain in zip(models, expected):
        with infinity.engine_of(model) as engine:
            for name in ("token", "head"):
                tiles = getattr(model, name).tiles
                assert len(tiles) == 10
                got = torch.cat([engine.read_state(tile.weight)["weight"] for tile in tiles])
                assert torch.equal(got, getattr(plain, name).weight)


def test_auto_splits_a_layer_above_seven_sixteenths_of_the_device(tmp_path):
    """Exception: one eighth of the device memory is less than 64 KiB."""
    fits = LAYER_NBYTES * 16 // 7 + 1
    for budget, num_tiles in ((fits, 0), (fits - 1, 5), (512 << 10, 10), ((512 << 10) - 1, 0)):
        model = lookup()
        config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", device_memory=budget)
        with infinity.offload(model, config):
            assert len(getattr(model.head, "tiles", ())) == num_tiles, budget


def one_layer(out_tiles):
    """512 KiB of weights in fp32: 16 chunks of 32 KiB."""

    def build(self):
        self.layer = TiledLinear(128, 1024, bias=False, out_tiles=out_tiles)

    return Model(build, lambda self, x: self.layer(x.requires_grad_()))


def backward(model, optimizer):
    model(torch.randn(3, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("factor", [1, 2, 4, 8, 16])
def test_the_peak_on_the_device_is_a_tile_and_its_gradient(factor, update, tmp_path):
    """The device holds one weight [out / factor, in] and its gradient. Without room there is no prefetch."""
    config = NVME | {"chunk_mib": 1 / 64, "update": update, "tile_above": None}
    least = least_device_memory(lambda: one_layer(factor), tmp_path, **config)
    assert least == 2 * (512 << 10) // factor
    with training(lambda: one_layer(factor), tmp_path, device_memory=least, **config) as (model, engine, optimizer):
        for _ in range(3):
            backward(model, optimizer)
        assert engine.stats()["peak_device_nbytes"] == pytest.approx(least, rel=0.05)
        assert engine.stats()["peak_device_nbytes"] <= least


def test_the_gradient_of_a_tile_leaves_before_the_next_one(tmp_path, monkeypatch):
    config = NVME | {"chunk_mib": 1 / 64, "tile_above": None}
    least = least_device_memory(lambda: one_layer(16), tmp_path, **config)
    with training(lambda: one_layer(16), tmp_path, device_memory=least, **config) as (model, engine, optimizer):
        backward(model, optimizer)
        trace, moved = [], engine.events.moved

        def note(link, what, *more):
            if link == "d2h":
                trace.append(("left", what))
            moved(link, what, *more)

        monkeypatch.setattr(engine.events, "moved", note)
        for index, tile in enumerate(model.layer.tiles):
            tile.weight.register_hook(lambda grad, index=index: trace.append(("made", index)))
        backward(model, optimizer)
        order = [index for what, index in trace if what == "made"]
        assert sorted(order) == list(range(16))
        assert trace == [(what, index) for index in order for what in ("made", "left")]


@on_gpu
@pytest.mark.parametrize("options", [{"tie": True}, {"head_loss": True}], ids=str)
def test_a_layer_larger_than_the_gpu_budget_trains_as_in_pytorch(options, tmp_path):
    config = {"swap_dirs": tmp_path, "device": "cuda", "dtype": "fp32", "chunk_mib": 1 / 64, "device_memory": "512KiB"}
    config = infinity.Config(**config | NVME)
    torch.manual_seed(0)
    with infinity.init(config, window=0):
        model = lookup(**options)
    with infinity.engine_of(model) as engine:
        got = train(model, infinity.AdamW(model.parameters(), lr=1e-2), device="cuda")
        assert len(model.head.tiles) == 10 and engine.stats()["peak_device_nbytes"] <= 512 << 10
    assert got == pytest.approx(plain_losses(**options), rel=1e-5)


@on_gpu
@pytest.mark.parametrize("factor", [1, 4, 16])
def test_the_gpus_own_peak_falls_with_the_tiles(factor, tmp_path):
    """The allocator's peak above the engine's fixed buffers is two tiles plus 2 MiB of activations."""
    torch.manual_seed(0)
    config = NVME | {"device": "cuda", "chunk_mib": 0.5, "tile_above": None, "device_memory": 2 * (32 << 20) // factor}

    def make():
        layer = TiledLinear(1024, 8192, bias=False, out_tiles=factor)
        return Model(lambda self: self.add_module("layer", layer), lambda self, x: self.layer(x.requires_grad_()))

    with training(make, tmp_path, **config | {"host_memory": "auto"}) as (model, engine, optimizer):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(torch.randn(3, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.stats()["peak_device_nbytes"] <= 2 * (32 << 20) // factor
        assert torch.cuda.max_memory_allocated() - before <= 2 * (32 << 20) // factor + (2 << 20)


# More than one rank


def train_rank(folder, built, changes, options):
    """Train on this rank. Return losses and the number of tiles."""
    config = infinity.Config(**{"swap_dirs": folder, "device": "cpu", "dtype": "fp32", "chunk_mib": 1 / 64} | NVME | changes)
    torch.manual_seed(0)
    if built == "init":
        with infinity.init(config, window=0):
            model = lookup(**options)
    else:
        model = lookup(**options)
        infinity.offload(model, config)
    with infinity.engine_of(model):
        losses = train(model, infinity.AdamW(model.parameters(), lr=1e-2), world=ranks()[1], rank=ranks()[0])
    return losses, len(model.head.tiles)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "built, tiling, options",
    [
        ("init", "auto", {"tie": True}),
        ("offload", "bytes", {"head_loss": True}),
        pytest.param("init", "auto", {"head_loss": True}, marks=pytest.mark.long),
        pytest.param("offload", "bytes", {"tie": True}, marks=pytest.mark.long),
    ],
)
def test_two_ranks_make_equal_tiles_and_train_as_plain_pytorch(worlds, built, tiling, options, tmp_path):
    changes, num_tiles = TILINGS[tiling]
    got = worlds(2).run(train_rank, tmp_path, built, changes, options)
    assert [tiles for _, tiles in got] == [num_tiles] * 2
    losses = [sum(parts) / 2 for parts in zip(*(losses for losses, _ in got))]
    assert losses == pytest.approx(plain_losses(**options), rel=1e-5)


def test_a_layer_without_elements_is_not_split(tmp_path):
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 0), nn.Linear(0, 4), nn.Embedding(0, 4))
    assert tile_large_layers(model, above_nbytes=1, tile_nbytes=16, itemsize=4) == [("0", 4)]
