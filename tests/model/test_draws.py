"""Values drawn later have torch's bits for all stripes and numbers of threads. The generator ends in the state of a plain draw."""

import pytest
import torch
from support.helpers import assert_same_bits, on_gpu
from torch import nn

from infinity.model import _mt19937

from infinity.model import deferred_init as draws
from infinity.model.deferred_init import drawn_by

INITIALISERS = {
    "kaiming": nn.init.kaiming_uniform_,
    "normal": lambda tensor: nn.init.normal_(tensor, 0.5, 0.02),
    "xavier": nn.init.xavier_normal_,
    "method": lambda tensor: tensor.detach().uniform_(-3, 2),
    "constant": lambda tensor: nn.init.constant_(tensor, 0.1),
    "zeros": nn.init.zeros_,
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", INITIALISERS)
def test_values_drawn_later_have_the_bits_of_torch(name, dtype, monkeypatch):
    monkeypatch.setattr(draws, "STRIPE_NUMEL", 1 << 10)
    for numel in (16, 17, 31, 1023, 1024, 1039, 1040, 3 * 1024 + 15, 3 * 1024 + 16, 10_001):
        torch.manual_seed(1)
        expected = torch.empty(numel, 1, dtype=dtype)
        INITIALISERS[name](expected)
        next_numbers = torch.rand(3)
        torch.manual_seed(1)
        found = torch.full((numel, 1), 7.0, dtype=dtype)
        result, drawn = drawn_by(INITIALISERS[name], (found,), {}, found)
        assert torch.equal(torch.rand(3), next_numbers)
        assert result.data_ptr() == found.data_ptr() and found.eq(7).all()  # no value is drawn yet
        for num_threads in (1, 3):
            values = torch.empty(numel, dtype=dtype)
            drawn.write(values, num_threads)
            assert_same_bits(values.view(-1, 1), expected, (numel, num_threads))


@pytest.mark.parametrize("func", [nn.init.trunc_normal_, nn.init.orthogonal_, lambda tensor: nn.init.normal_(tensor).mul_(2)])
def test_an_initialiser_that_changes_drawn_values_draws_at_once(func):
    torch.manual_seed(1)
    expected = torch.empty(40, 50)
    func(expected)
    torch.manual_seed(1)
    found = torch.empty(40, 50)
    assert drawn_by(func, (found,), {}, found)[1] is None
    assert_same_bits(found, expected, "found")


@pytest.mark.parametrize(
    "draw",
    [
        lambda tensor: tensor.normal_(generator=torch.Generator().manual_seed(3)),
        lambda tensor: tensor[1:].normal_(),
        lambda tensor: tensor.t().normal_(),
        lambda tensor: tensor.bernoulli_(0.5),
    ],
    ids=["its own generator", "a part", "another order", "another distribution"],
)
def test_unsupported_draws_happen_at_once(draw):
    def made(run):
        torch.manual_seed(1)
        tensor = torch.ones(40, 50)
        return tensor, run(tensor), torch.rand(3)

    expected, _, numbers = made(draw)
    found, (_, drawn), then = made(lambda tensor: drawn_by(draw, (tensor,), {}, tensor))
    assert drawn is None and torch.equal(then, numbers)
    assert_same_bits(found, expected, "found")


def test_double_precision_is_drawn_at_once():
    tensor = torch.zeros(1000, dtype=torch.float64)
    assert drawn_by(nn.init.normal_, (tensor,), {}, tensor)[1] is None and tensor.ne(0).any()


def test_invalid_arguments_raise_as_in_torch_and_draw_nothing():
    tensor, before = torch.ones(100), torch.get_rng_state()
    for func, args in ((nn.init.normal_, (0.0, -1.0)), (nn.init.uniform_, (2.0, 1.0))):
        with pytest.raises(RuntimeError):
            drawn_by(func, (tensor, *args), {}, tensor)
    assert torch.equal(torch.get_rng_state(), before) and tensor.eq(1).all()


def test_an_initialiser_that_fails_after_its_draw_keeps_the_values():
    def draw(tensor):
        nn.init.normal_(tensor)
        raise KeyError

    torch.manual_seed(1)
    expected = torch.empty(100).normal_()
    torch.manual_seed(1)
    tensor = torch.ones(100)
    with pytest.raises(KeyError):
        drawn_by(draw, (tensor,), {}, tensor)
    assert_same_bits(tensor, expected, "tensor")


def test_with_an_unknown_torch_values_are_drawn_at_once(monkeypatch):
    monkeypatch.setattr(draws, "_is_as_torch", lambda dtype: False)
    tensor = torch.ones(100)
    assert drawn_by(nn.init.normal_, (tensor,), {}, tensor)[1] is None and tensor.ne(1).all()


def test_this_torch_draws_as_the_note_describes():
    assert all(map(draws._is_as_torch, draws._DTYPES))


@pytest.mark.parametrize("before", [0, 1, 3, 623, 624, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, 622, 623, 624, 625, 1247, 1248, 1249, 100_000])
def test_advance_moves_a_generator_as_draws_do(before, count):
    generator = torch.Generator().manual_seed(3)
    torch.empty(before).uniform_(generator=generator)
    state = generator.get_state()
    torch.empty(count).uniform_(generator=generator)
    _mt19937.advance(state.numpy(), count)
    assert torch.equal(state, generator.get_state())


def test_a_wrong_generator_state_is_refused():
    state = torch.Generator().get_state()
    for wrong in (bytearray(100), bytearray(5056), bytearray(b"\xff" * 5056)):
        with pytest.raises(ValueError, match="not the state of a generator"):
            _mt19937.advance(wrong, 1)
    with pytest.raises(ValueError, match="fewer than 0"):
        _mt19937.advance(state.numpy(), -1)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_on_the_device_can_be_drawn_again(dtype):
    for shape in ((1000, 333), (7,), (4096, 4096)):
        torch.manual_seed(1)
        tensor = torch.empty(shape, dtype=dtype, device="cuda")
        _, drawn = drawn_by(nn.init.normal_, (tensor,), {}, tensor)
        next_numbers = torch.rand(3, device="cuda")
        again = torch.empty(tensor.numel(), dtype=dtype, device="cuda")
        drawn.write(again, 4)
        assert_same_bits(again.view(shape).cpu(), tensor.cpu(), shape)
        torch.manual_seed(1)
        expected = torch.empty(shape, dtype=dtype, device="cuda").normal_()
        assert torch.equal(expected, tensor) and torch.equal(torch.rand(3, device="cuda"), next_numbers)
