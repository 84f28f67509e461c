"""Logarithms of sums of exponentials with torch's values and gradients, and the memory of their backward pass."""

import pytest
import torch
from support.helpers import assert_same_bits
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.model import log_sum_exp
from infinity.model.log_sum_exp import LogSumExpAtLabels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
N, V = 6, 97


def by_torch(logits, labels):
    wide = logits.float()
    return torch.logsumexp(wide, dim=-1), wide.gather(1, labels.unsqueeze(1)).squeeze(1)


def drawn(dtype, *, seed=0):
    """(logits [N, V], labels [N], gradients of both outputs). Two rows have the same label."""
    torch.manual_seed(seed)
    logits, labels = (torch.randn(N, V) * 8).to(dtype), torch.randint(V, (N,))
    labels[1] = labels[0]
    return logits, labels, (torch.rand(N), torch.randn(N))


def outcome(func, logits, labels, grads):
    """[both outputs, gradient of the logits]. grads: of the outputs; None for an output without a gradient."""
    leaf = logits.detach().requires_grad_()
    outputs = func(leaf, labels)
    used = [(output, grad) for output, grad in zip(outputs, grads) if grad is not None]
    torch.autograd.backward(*zip(*used))
    return [output.detach() for output in outputs] + [leaf.grad]


def assert_as_torch(logits, labels, grads):
    found, expected = (outcome(func, logits, labels, grads) for func in (LogSumExpAtLabels.apply, by_torch))
    for what, got, wanted in zip(("logsumexp", "logits at labels", "gradient"), found, expected):
        assert_same_bits(got, wanted, what)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_have_the_bits_of_torch(dtype):
    for seed in range(5):
        assert_as_torch(*drawn(dtype, seed=seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0.5, 1, 4, 5, 6, 7])
def test_blocks_of_rows_have_the_bits_of_torch(num_rows, dtype, monkeypatch):
    monkeypatch.setattr(log_sum_exp, "BLOCK_NBYTES", int(num_rows * 4 * V))
    logits, labels, (of_sums, at_labels) = drawn(dtype)
    for grads in ((of_sums, at_labels), (None, at_labels), (of_sums, None)):
        assert_as_torch(logits, labels, grads)


def test_no_rows_have_an_empty_gradient():
    found = outcome(LogSumExpAtLabels.apply, torch.zeros(0, V), torch.zeros(0, dtype=torch.int64), (torch.zeros(0), torch.zeros(0)))
    assert [tensor.shape for tensor in found] == [(0,), (0,), (0, V)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("without", [0, 1])
def test_an_output_without_a_gradient_adds_nothing(without, dtype):
    logits, labels, grads = drawn(dtype)
    grads = [None if number == without else grad for number, grad in enumerate(grads)]
    *_, grad = assert_as_torch(logits, labels, grads)
    assert without == 1 or grad.count_nonzero() == N


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negative_gradients_have_the_bits_of_torch(dtype):
    logits, labels, (of_sums, at_labels) = drawn(dtype)
    assert_as_torch(logits, labels, (-of_sums, at_labels))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number, where", [(-torch.inf, "one"), (-torch.inf, "label"), (-torch.inf, "row"), (torch.inf, "one"), (torch.nan, "one")])
def test_infinite_logits_have_the_values_of_torch(number, where, dtype):
    logits, labels, grads = drawn(dtype)
    columns = {"one": (labels[2] + 1) % V, "label": labels[2], "row": slice(None)}[where]
    logits[2, columns] = number
    found, expected = (outcome(func, logits, labels, grads) for func in (LogSumExpAtLabels.apply, by_torch))
    for got, wanted in zip(found, expected):
        assert got.dtype == wanted.dtype and torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_that_are_not_contiguous_have_the_bits_of_torch(dtype):
    logits, labels, grads = drawn(dtype)
    wide = torch.zeros(N, 2 * V, dtype=dtype)
    wide[:, ::2] = logits
    for view in (logits.t().contiguous().t(), wide[:, ::2]):
        assert not view.is_contiguous()
        assert_as_torch(view, labels, grads)


def test_logits_are_not_changed():
    logits, labels, grads = drawn(torch.float32)
    before = logits.clone()
    outcome(LogSumExpAtLabels.apply, logits, labels, grads)
    assert_same_bits(logits, before, "logits")


class LiveBuffers(TorchDispatchMode):
    """Counts the fp32 buffers of at least [N, V] that ops have made and that live at the same time. most: the largest number so far."""

    def __init__(self):
        super().__init__()
        self.storages, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.storages = {number: storage for number, storage in self.storages.items() if not storage.expired()}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32 and tensor.untyped_storage().nbytes() >= 4 * N * V:
                storage = StorageWeakRef(tensor.untyped_storage())
                self.storages[storage.cdata] = storage
        self.most = max(self.most, len(self.storages))
        return made


def test_a_forward_pass_has_one_fp32_buffer_of_the_logits_size():
    logits, labels, _ = drawn(torch.bfloat16)
    with LiveBuffers() as buffers, torch.no_grad():
        LogSumExpAtLabels.apply(logits, labels)
    assert buffers.most == 1


def test_a_backward_pass_of_several_blocks_has_no_buffer_of_that_size(monkeypatch):
    monkeypatch.setattr(log_sum_exp, "BLOCK_NBYTES", 2 * 4 * V)
    logits, labels, grads = drawn(torch.bfloat16)
    outputs = LogSumExpAtLabels.apply(logits.requires_grad_(), labels)
    with LiveBuffers() as buffers:
        torch.autograd.backward(outputs, grads)
    assert buffers.most == 0


@pytest.mark.parametrize("func, most", [(LogSumExpAtLabels.apply, 1), (by_torch, 5)])
def test_a_backward_pass_has_one_fp32_buffer_of_the_logits_size(func, most):
    """The graph of torch's operations keeps the fp32 logits, too. Its backward pass makes four buffers beside them."""
    logits, labels, grads = drawn(torch.bfloat16)
    with LiveBuffers() as buffers:
        outputs = func(logits.requires_grad_(), labels)
        buffers.most = 0
        torch.autograd.backward(outputs, grads)
    assert buffers.most == most
