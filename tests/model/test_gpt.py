import numpy as np
import pytest
import torch
import torch.nn.functional as F

from infinity.errors import ConfigError
from infinity.model.gpt import GPT, Batches, read_bytes, standard_library_paths

TEXT = np.arange(1000, dtype=np.uint32).view(np.uint8)


def build(**options):
    torch.manual_seed(0)
    return GPT(**{"hidden": 32, "layers": 2, "heads": 4, "vocab": 50, "seq": 16} | options)


def tokens_of(shape, vocab=50):
    return torch.from_numpy(np.random.default_rng(1).integers(vocab, size=shape))


def test_number_of_parameters_and_shapes():
    model = build()
    block = 12 * 32 * 32 + 13 * 32
    assert sum(p.numel() for p in model.parameters()) == 2 * block + 50 * 32 + 16 * 32 + 2 * 32 + 32 * 50
    assert model(tokens_of((3, 16))).shape == (3, 16, 50)
    assert model(tokens_of((3, 5))).shape == (3, 5, 50)


def test_loss_is_the_mean_cross_entropy_in_fp32():
    model = build().to(torch.bfloat16)
    x, y = tokens_of((3, 16)), tokens_of((3, 16)).flip(0)
    loss = model(x, y)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(model(x).float().reshape(-1, 50), y.reshape(-1))
    assert torch.equal(loss, expected)
    assert abs(loss.item() - np.log(50)) < 0.1  # an untrained model predicts all tokens alike


def test_a_token_sees_only_earlier_tokens():
    model = build()
    x = tokens_of((1, 16))
    other = x.clone()
    other[0, 9] = (x[0, 9] + 1) % 50
    before, after = model(x), model(other)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


def test_attention_is_scaled_dot_product_per_head():
    attention = build().blocks[0].attention
    x = torch.randn(2, 7, 32)
    query, key, value = (part.view(2, 7, 4, 8).transpose(1, 2) for part in attention.qkv(x).split(32, dim=-1))
    scores = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    expected = attention.projection((scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 7, 32))
    assert torch.allclose(attention(x), expected, atol=1e-6)


def test_checkpointing_changes_no_gradient():
    x, y = tokens_of((3, 16)), tokens_of((3, 16)).flip(0)
    gradients = []
    for checkpoint_activations in (False, True):
        model = build(checkpoint_activations=checkpoint_activations)
        model(x, y).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_a_tied_model_shares_one_parameter():
    model = build(tie=True)
    assert model.head.weight is model.token.weight
    assert sum(p.numel() for p in build().parameters()) - sum(p.numel() for p in model.parameters()) == 50 * 32


# Data


def test_a_batch_depends_only_on_its_number():
    batches = Batches(TEXT, vocab=256, batch=4, seq=8, seed=7)
    first = batches(3, 1)
    batches(0)
    again = Batches(TEXT, vocab=256, batch=4, seq=8, seed=7)(3, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    others = [batches(3, 0), batches(4, 1), Batches(TEXT, vocab=256, batch=4, seq=8, seed=8)(3, 1)]
    assert not any(torch.equal(first[0], other[0]) for other in others)


@pytest.mark.parametrize("tokens", [TEXT, None])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_global_batch(tokens, world):
    options = {"vocab": 256, "batch": 8, "seq": 8, "seed": 0}
    whole = Batches(tokens, **options)(5)
    parts = [Batches(tokens, **options, rank=rank, world=world)(5) for rank in range(world)]
    for i in range(2):
        assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))


def test_targets_are_the_next_tokens():
    for tokens in (TEXT, None):
        x, y = Batches(tokens, vocab=256, batch=4, seq=8, seed=0)(0)
        assert (x.dtype, y.dtype, x.shape, y.shape) == (torch.int64, torch.int64, (4, 8), (4, 8))
        assert torch.equal(x[:, 1:], y[:, :-1])


def test_text_just_long_enough_gives_its_only_sequence():
    x, y = Batches(TEXT[:9], vocab=256, batch=3, seq=8, seed=0)(0)
    assert x.tolist() == [TEXT[:8].tolist()] * 3
    assert y.tolist() == [TEXT[1:9].tolist()] * 3


def test_random_tokens_fill_the_vocabulary():
    x, _ = Batches(None, vocab=5, batch=64, seq=64, seed=0)(0)
    assert sorted(set(x.flatten().tolist())) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"batch": 3, "world": 2}, "batch=3 cannot be shared by 2 ranks; use a multiple of 2"),
        ({"seq": len(TEXT)}, f"{len(TEXT)} bytes are too few for seq={len(TEXT)}; give at least {len(TEXT) + 1}"),
        ({"vocab": 255}, "vocab=255: expected at least 256"),
    ],
)
def test_data_that_does_not_fit_is_refused(options, expected):
    with pytest.raises(ConfigError, match=expected):
        Batches(TEXT, **{"vocab": 256, "batch": 4, "seq": 8, "seed": 0} | options)


def test_files_are_read_in_order(tmp_path):
    (tmp_path / "a").write_bytes(b"hello ")
    (tmp_path / "b").write_bytes(b"")
    (tmp_path / "c").write_bytes(b"world")
    assert read_bytes([tmp_path / name for name in "abc"]).tobytes() == b"hello world"
    for missing in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read {missing}"):
            read_bytes([missing])


@pytest.mark.long
def test_the_standard_librarys_files_are_found_in_order():
    paths = standard_library_paths()
    assert paths == sorted(paths) == standard_library_paths()
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in paths}
    assert not any("site-packages" in path.parts for path in paths)
    assert sum(path.stat().st_size for path in paths) > 5e6
