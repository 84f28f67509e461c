"""All implementations of the update give the same bits. The split master is exact. The norm does not depend on the order.

Long because each implementation runs the same tests on each kind of record.
"""

import dataclasses
import itertools
import math
import os
import random
import signal
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.helpers import on_gpu, run_interpreted

from infinity.optim import _adam
from infinity.optim.adam import (
    NUM_LIMBS,
    AdamScalars,
    Dither,
    NormAccumulator,
    _block_sums_torch,
    accumulate_,
    adam_moments,
    adam_step,
    join_master,
    split_master,
)

VARIANTS = [*_adam.isas(), "torch"]
LAYOUTS = list(itertools.product(["split", "dithered", "fp32"], [torch.bfloat16, torch.float32], [True, False]))
HYPER = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3, "grad_scale": 0.7}
SPECIAL_BITS = [
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000),  # zeros, denormals, least normal
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000),  # largest finite numbers, infinities
    *(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF),  # quiet and signalling NaNs
    *(0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001, 0x7F7F8000),  # halfway between two bf16 numbers, and next to that
]


def bits(tensor):
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def from_bits(values):
    return torch.from_numpy(np.asarray(values, dtype=np.uint32).view(np.float32).copy())


def hard_values(numel, seed):
    """One third ordinary numbers, one third random bit patterns, one third special values."""
    rng = np.random.default_rng(seed)
    ordinary = rng.normal(0, 0.02, numel).astype(np.float32).view(np.uint32)
    pattern = rng.integers(0, 2**32, numel, dtype=np.uint32)
    special = rng.choice(np.array(SPECIAL_BITS, dtype=np.uint32), numel)
    return from_bits(np.choose(rng.integers(0, 3, numel), [ordinary, pattern, special]))


def faint_values(numel, seed):
    """Random shares of: zeros, multiples of 2^-149, denormals, smallest normal numbers, numbers with denormal squares, ordinary numbers."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet([0.3] * 6)
    units = rng.integers(0, 20, numel, dtype=np.uint32)
    binades = [rng.integers(low, high, numel, dtype=np.uint32) << 23 for low, high in ((0, 1), (0, 4), (1, 70), (110, 135))]
    fraction = rng.integers(0, 1 << 23, numel, dtype=np.uint32)
    kinds = [np.zeros(numel, np.uint32), units, *(binade | fraction for binade in binades)]
    return from_bits(np.choose(rng.choice(6, numel, p=share), kinds) | rng.integers(0, 2, numel, dtype=np.uint32) << np.uint32(31))


def faint_vectors(numel, seed):
    """faint_values, each 32 times in a row, so that all lanes of a vector are alike."""
    return faint_values(numel // 32, seed).repeat_interleave(32)


class Shard:
    """The tensors of one update. `bits`: the state after the update."""

    def __init__(self, numel, layout, seed=0, values=hard_values):
        form, grad_dtype, self.decoupled = layout
        self.master, grad, self.momentum, variance = (values(numel, seed + k) for k in range(4))
        self.variance = variance.abs()
        self.grad = grad.to(grad_dtype)
        self.weight, self.residual = (self.master.clone(), None) if form == "fp32" else split_master(self.master)
        self.dither = Dither(0xDEADBEEF, 0x12345678, 0xFFFFFFFF - numel // 2 * 2) if form == "dithered" else None
        if self.dither:
            self.momentum, self.variance = self.momentum.bfloat16(), self.variance.bfloat16()

    def clone(self):
        copy = object.__new__(Shard)
        copy.__dict__ = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.__dict__.items()}
        return copy

    def update(self, begin=0, end=None, hyper=HYPER, **how):
        tensors = (self.weight, self.residual, self.momentum, self.variance, self.grad)
        part = [t if t is None else t[begin:end] for t in tensors]
        dither = self.dither and self.dither.after(begin)
        adam_step(*part[:2], part[2:4], part[4], AdamScalars.of(**hyper, decoupled=self.decoupled), dither=dither, **how)
        return self

    @property
    def bits(self):
        state = (self.weight, self.residual, self.momentum, self.variance)
        return [bits(t) for t in state if t is not None]

    def equals(self, other):
        return all(torch.equal(mine, its) for mine, its in zip(self.bits, other.bits, strict=True))


@np.errstate(all="ignore")
def spelled_out(shard):
    """The fixed arithmetic in numpy, one operation per line."""
    f = np.float32
    lr, (beta1, beta2), step = HYPER["lr"], HYPER["betas"], HYPER["step"]
    p = (join_master(shard.weight, shard.residual) if shard.residual is not None else shard.weight).numpy()
    m, v = shard.momentum.float().numpy(), shard.variance.float().numpy()
    g = shard.grad.float().numpy()
    g = g * f(HYPER["grad_scale"])
    if shard.decoupled:
        p = p * f(1 - lr * HYPER["weight_decay"])
    else:
        decay = f(HYPER["weight_decay"]) * p
        g = g + decay
    m = m * f(beta1)
    fresh = g * f(1 - beta1)
    m = m + fresh
    v = v * f(beta2)
    square = g * g
    fresh = square * f(1 - beta2)
    v = v + fresh
    d = np.sqrt(v)
    d = d * f(1 / math.sqrt(1 - beta2**step))
    d = d + f(HYPER["eps"])
    q = m / d
    q = f(lr / (1 - beta1**step)) * q
    p = p - q
    nan = from_bits([0x7FC00000])
    expected = shard.clone()
    p, m, v = (np.where(np.isnan(x), nan, x) for x in (p, m, v))
    if shard.dither:
        x = np.arange(len(p), dtype=np.uint32) + np.uint32(shard.dither.index) + np.uint32(shard.dither.key0)
        x = x * np.uint32(0x85EBCA6B)
        x = (x ^ x >> np.uint32(15) ^ np.uint32(shard.dither.key1)) * np.uint32(0xC2B2AE35)
        x = x ^ x >> np.uint32(16)
        for name, value, random in (("momentum", m, x & np.uint32(0xFFFF)), ("variance", v, x >> np.uint32(16))):
            cut = (value.view(np.uint32) + random) >> np.uint32(16)
            setattr(expected, name, torch.from_numpy(cut.astype(np.uint16).view(np.int16)).view(torch.bfloat16))
    else:
        expected.momentum, expected.variance = torch.from_numpy(m), torch.from_numpy(v)
    p = torch.from_numpy(p)
    if shard.residual is None:
        expected.weight = p
    else:
        expected.weight, expected.residual = split_master(p)
    return expected


@pytest.mark.slow
@pytest.mark.few(7)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_update_has_the_bits_of_the_arithmetic_in_numpy(layout, variant):
    shard = Shard(200_001, layout)
    assert shard.clone().update(isa=variant).equals(spelled_out(shard))


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("isa", _adam.isas())
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout[2]], ids=lambda layout: "-".join(map(str, layout)))
@pytest.mark.parametrize("values", [hard_values, faint_values, faint_vectors])
def test_weights_and_then_moments_have_the_bits_of_one_update(values, layout, isa):
    for seed in range(3):
        before = Shard(100_032, layout, 10 * seed, values)
        shard, expected = before.clone(), before.clone().update(isa=isa)
        scalars, how = AdamScalars.of(**HYPER), {"dither": shard.dither, "isa": isa, "threads": 2}
        adam_step(shard.weight, shard.residual, (shard.momentum, shard.variance), shard.grad, scalars, keeps_moments=True, **how)
        assert_equal_bits(shard, before, ["momentum", "variance"])
        assert_equal_bits(shard, expected, ["weight", "residual"])
        adam_moments((shard.momentum, shard.variance), shard.grad, scalars, **how)
        assert shard.equals(expected), seed


def assert_equal_bits(shard, other, names):
    pairs = {name: (getattr(shard, name), getattr(other, name)) for name in names}
    for name, (mine, its) in pairs.items():
        assert mine is its is None or torch.equal(bits(mine), bits(its)), name


def test_only_a_decoupled_update_changes_weights_and_moments_separately():
    shard, scalars = Shard(64, ("split", torch.bfloat16, False)), AdamScalars.of(**HYPER, decoupled=False)
    with pytest.raises(ValueError, match="weights and moments separately"):
        adam_step(shard.weight, shard.residual, (shard.momentum, shard.variance), shard.grad, scalars, keeps_moments=True)
    with pytest.raises(ValueError, match="weights and moments separately"):
        adam_moments((shard.momentum, shard.variance), shard.grad, scalars)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["split", "dithered"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_update_of_a_range_changes_only_that_range(variant, form):
    layout = (form, torch.bfloat16, True)
    before = Shard(3100, layout)
    after = spelled_out(before)
    for numel in range(1, 3001, 97 if variant == "torch" else 1):
        begin = numel % 37
        shard = before.clone().update(begin, begin + numel, isa=variant)
        for got, old, new in zip(shard.bits, before.bits, after.bits):
            expected = old.clone()
            expected[begin : begin + numel] = new[begin : begin + numel]
            assert torch.equal(got, expected), (numel, begin)


@pytest.mark.parametrize("isa", _adam.isas())
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_all_pairs_of_special_values_give_the_right_bits(layout, isa):
    """All pairs of special values of gradient and master, at every lane."""
    table = from_bits(SPECIAL_BITS)
    shard = Shard(len(table) ** 2 * 3, layout)
    shard.grad = table.repeat(len(table) * 3).to(shard.grad.dtype)
    master = table.repeat_interleave(len(table)).repeat(3)
    shard.weight, shard.residual = split_master(master) if shard.residual is not None else (master, None)
    assert shard.clone().update(isa=isa).equals(spelled_out(shard))


@pytest.mark.slow
@pytest.mark.few(14)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_denormals_from_any_operation_are_kept(layout, variant):
    for seed in range(20):
        shard = Shard(8192, layout, 10 * seed, faint_vectors if seed % 2 else faint_values)
        assert shard.clone().update(isa=variant).equals(spelled_out(shard)), seed


@pytest.mark.parametrize("isa", _adam.isas()[1:])
@pytest.mark.parametrize("number", [20, pytest.param(3000, marks=pytest.mark.long)])
def test_denormals_are_kept_with_any_hyperparameters(number, isa):
    choices = {
        "lr": [1e-5, 3e-4, 0.1, 1.0],
        "betas": list(itertools.product([0.0, 0.5, 0.9, 0.99], [0.5, 0.9, 0.999, 0.9999, 0.999999])),
        "eps": [1e-8, 1e-6, 1e-3, 1e-10, 1e-12, 0.0],
        "weight_decay": [0.0, 0.1, 0.5],
        "step": [1, 2, 100, 10_000],
        "grad_scale": [1.0, 1 / 3, 1 / 65536, 4.0, 1e-20],
    }
    for seed in range(number):
        rng = random.Random(seed)
        hyper = {name: rng.choice(values) for name, values in choices.items()}
        layout = rng.choice(LAYOUTS)
        for values in (faint_values, faint_vectors):
            shard = Shard(16384, layout, 10 * seed, values)
            assert shard.clone().update(isa=isa, hyper=hyper).equals(shard.clone().update(isa="scalar", hyper=hyper)), (seed, hyper)


@pytest.mark.parametrize("isa", _adam.isas()[1:])
@pytest.mark.parametrize(
    "scalars, momentum, variance, grad",
    [
        ({"grad_scale": 2.0**100}, 1e-3, 1e-6, 2.0**-127),  # a denormal gradient becomes an ordinary number
        ({"grad_scale": 2.0**-127}, 1e-3, 1e-6, 2.0**110),
        ({"one_minus_beta1": 2.0**-127}, 2.0**-60, 1e-6, 2.0**63),
        ({"step_size": 2.0**-127}, 2.0**120, 1e-6, 0.0),
        ({"inv_sqrt_bias2": math.inf, "eps": math.inf}, 1e-3, 1e-39, 0.0),
        ({"beta2": 0.5, "one_minus_beta2": 0.5}, 1e-3, -(2.0**-122) - 2.0**-145, 2.0**-61),  # the sum is -2^-146
        ({"beta1": 0.0, "one_minus_beta1": 1.0}, -(2.0**-149), 1e-6, 0.0),  # -0 + 0 is 0
    ],
)
def test_flushing_never_shows_in_the_result(scalars, momentum, variance, grad, isa):
    scalars = dataclasses.replace(AdamScalars.of(**HYPER | {"grad_scale": 1.0}), **scalars)
    states = []
    for variant in (isa, "scalar"):
        tensors = [torch.full((64,), value) for value in (0.02, momentum, variance, grad)]
        adam_step(tensors[0], None, tensors[1:3], tensors[3], scalars, isa=variant)
        states.append([bits(tensor) for tensor in tensors])
    assert all(map(torch.equal, *states))


@pytest.mark.few(2)
@pytest.mark.parametrize("threads", [0, 1, 2, 3, 16])
def test_the_number_of_threads_changes_no_bit(threads):
    shard = Shard(1_000_003, ("split", torch.bfloat16, True))
    assert shard.clone().update(threads=threads).equals(shard.clone().update(threads=1, isa="scalar"))


def test_every_nan_is_stored_as_the_same_nan():
    shard = Shard(1000, ("split", torch.float32, True))
    shard.grad[500] = from_bits([0xFFFFFFFF])
    shard.update()
    assert bits(shard.momentum)[500] == bits(shard.variance)[500] == 0x7FC00000
    assert (bits(shard.weight)[500], shard.residual[500]) == (0x7FC0, 0)


def test_callers_denormal_mode_is_neither_used_nor_changed():
    shard = Shard(4096, ("split", torch.bfloat16, True))
    tiny = {**HYPER, "eps": 1e-40}
    expected = shard.clone().update(hyper=tiny)
    denormal = from_bits([1])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        for threads in (1, 2):
            assert shard.clone().update(hyper=tiny, threads=threads).equals(expected)
        assert (denormal * 1.0).view(torch.int32).item() == 0  # the caller's mode still flushes
    finally:
        torch.set_flush_denormal(False)
    assert (expected.momentum.view(torch.int32).abs() - 1 < 0x7FFFFF).any()  # the test had denormals to flush


@pytest.mark.parametrize("decoupled, optimizer", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fp32_update_follows_torch_within_1e_6(decoupled, optimizer):
    torch.manual_seed(0)
    weight, momentum, variance = torch.randn(10_000), torch.zeros(10_000), torch.zeros(10_000)
    param = torch.nn.Parameter(weight.clone())
    hyper = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.05}
    reference = optimizer([param], **hyper)
    for step in range(1, 21):
        grad = torch.randn(10_000)
        param.grad = grad.clone()
        reference.step()
        scalars = AdamScalars.of(**hyper, step=step, grad_scale=0.5, decoupled=decoupled)
        adam_step(weight, None, (momentum, variance), grad * 2, scalars)
    scale = param.detach().abs().clamp_min(0.1)
    assert ((weight - param.detach()).abs() / scale).max() < 1e-6


def test_a_split_master_trains_like_an_fp32_master():
    split, whole = Shard(5000, ("split", torch.float32, True)), Shard(5000, ("fp32", torch.float32, True))
    for _ in range(5):
        split.update()
        whole.update()
    assert torch.equal(bits(join_master(split.weight, split.residual)), bits(whole.weight))


@pytest.mark.parametrize(
    "master, weight, residual",
    [
        (0x3F800000, 0x3F80, 0),
        (0x3F807FFF, 0x3F80, 0x7FFF),
        (0x3F808000, 0x3F81, -0x8000),  # ties round up
        (0xBF808001, 0xBF81, -0x7FFF),
        (0x7F7FFFFF, 0x7F80, -1),  # an infinite weight with a finite master
        (0x80000001, 0x8000, 1),
        (0x7FFFFFFF, 0x7FC0, 0),
        (0xFF800001, 0xFFC0, 0),
    ],
)
@pytest.mark.parametrize("numel", [1, 33])
def test_split_of_single_values(master, weight, residual, numel):
    got_weight, got_residual = split_master(from_bits([master] * numel))
    assert {w & 0xFFFF for w in bits(got_weight).tolist()} == {weight}
    assert set(got_residual.tolist()) == {residual}


def test_join_undoes_split_on_four_million_patterns():
    rng = np.random.default_rng(0)
    master = from_bits(rng.integers(0, 2**32, 4_000_000, dtype=np.uint32))
    weight, residual = split_master(master)
    joined = join_master(weight, residual)
    number = ~master.isnan()
    assert torch.equal(bits(joined)[number], bits(master)[number])
    assert weight.isnan().equal(master.isnan())
    # The weight is rounded to nearest, except in half of the ties.
    differs = bits(weight)[number] != bits(master.bfloat16())[number]
    assert (residual[number][differs] == -0x8000).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 1000, 100_001])
def test_accumulate_copies_the_first_and_adds_the_next(dtype, numel):
    first, second = (torch.randn(numel, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(2))
    total = torch.full((numel,), math.nan)
    assert accumulate_(total, first, True) is total
    assert torch.equal(total, first.float())
    accumulate_(total, second, False)
    assert torch.equal(total, first.float() + second.float())


def norm_limbs(*parts, **how):
    norm = NormAccumulator()
    for part in parts:
        norm.add(part, **how)
    return norm.limbs


def gradient(numel, dtype=torch.float32, seed=0):
    """Finite values of many magnitudes."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.normal(size=numel) * 10.0 ** rng.integers(-40, 18, numel)).astype(np.float32)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 200_000])
def test_norm_has_equal_bits_from_c_and_from_torch(dtype, numel):
    grad = gradient(numel, dtype)
    assert torch.equal(norm_limbs(grad), norm_limbs(grad, isa="torch"))
    assert torch.equal(norm_limbs(grad[:-1]), norm_limbs(grad[:-1].clone(), isa="torch"))


def test_norm_does_not_depend_on_parts_order_or_threads():
    grad = gradient(1_000_000)
    whole = norm_limbs(grad, threads=1)
    assert torch.equal(whole, norm_limbs(grad, threads=7))
    for seed in range(5):
        shuffle = random.Random(seed)
        cuts = sorted(shuffle.sample(range(1024, len(grad), 1024), 20))
        parts = list(torch.tensor_split(grad, cuts))
        shuffle.shuffle(parts)
        assert torch.equal(whole, norm_limbs(*parts))
        first, second = NormAccumulator(), NormAccumulator()
        for norm, some in ((first, parts[:7]), (second, parts[7:])):
            for part in some:
                norm.add(part)
        first.merge(second)
        assert torch.equal(whole, first.limbs)


def test_norm_is_the_correctly_rounded_root_of_the_exact_sum():
    for seed in range(20):
        grad = gradient(50_000, seed=seed)
        norm = NormAccumulator()
        norm.add(grad)
        sums = _block_sums_torch(grad).tolist()
        total = sum(map(Fraction, sums))
        value = norm.value()
        low, high = (Fraction(math.nextafter(value, to)) for to in (0, math.inf))
        assert ((low + Fraction(value)) / 2) ** 2 <= total <= ((high + Fraction(value)) / 2) ** 2
        assert value == pytest.approx(math.sqrt(math.fsum(sums)), rel=1e-15)


def test_norm_of_one_sets_one_digit():
    limbs = norm_limbs(torch.tensor([1.0]))
    assert {k: v for k, v in enumerate(limbs.tolist()) if v} == {1126 // 32: 1 << 1126 % 32}


@pytest.mark.parametrize("isa", [None, "torch"])
@pytest.mark.parametrize(
    "values, expected",
    [
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([3.0, -4.0], 5.0),
        ([2.0**-149], 2.0**-149),
        ([3.4028234663852886e38], 3.4028234663852886e38),
        ([math.inf, 1.0], math.inf),
        ([-math.inf], math.inf),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_norm_of_few_values(values, expected, isa):
    norm = NormAccumulator()
    norm.add(torch.tensor(values), isa=isa)
    assert norm.value() == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    assert norm.nonfinite == (not math.isfinite(expected))
    assert norm.limbs.numel() == NUM_LIMBS


def test_threads_of_python_share_the_pool():
    layout = ("split", torch.bfloat16, True)
    expected = Shard(100_000, layout).update(threads=1)
    wrong = []

    def work():
        for _ in range(30):
            if not Shard.clone(start).update(threads=3).equals(expected):
                wrong.append(threading.current_thread().name)

    start = Shard(100_000, layout)
    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.slow
def test_a_forked_child_makes_its_own_pool():
    shard = Shard(200_000, ("split", torch.bfloat16, True))
    scalars = AdamScalars.of(**HYPER)
    expected = shard.clone().update(threads=4)
    for _ in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                adam_step(shard.weight, shard.residual, (shard.momentum, shard.variance), shard.grad, scalars, threads=4)
                same = all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(shard.bits, expected.bits))
                os._exit(0 if same else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.zeros(8, dtype=torch.float16)}, r"weight is torch.float16, expected torch.bfloat16"),
        ({"residual": None}, r"weight is torch.bfloat16, expected torch.float32"),
        ({"residual": torch.zeros(7, dtype=torch.int16)}, r"residual has 7 elements, expected 8"),
        ({"momentum": torch.zeros(8, dtype=torch.float64)}, r"momentum is torch.float64"),
        ({"variance": torch.zeros(9)}, r"variance has 9 elements, expected 8"),
        ({"grad": torch.zeros(16)[::2]}, r"grad has shape \(8,\) and strides \(2,\), expected 1-D contiguous"),
        ({"grad": torch.zeros(2, 4)}, r"grad has shape \(2, 4\)"),
        ({"grad": torch.zeros(8, device="meta")}, r"grad is on meta, expected cpu"),
        ({"isa": "avx1024"}, r"isa is 'avx1024', which this CPU does not have"),
    ],
)
def test_update_refuses_wrong_tensors(change, message):
    arguments = {
        "weight": torch.zeros(8, dtype=torch.bfloat16),
        "residual": torch.zeros(8, dtype=torch.int16),
        "momentum": torch.zeros(8),
        "variance": torch.zeros(8),
        "grad": torch.zeros(8),
        "scalars": AdamScalars.of(**HYPER),
        **change,
    }
    moments = arguments.pop("momentum"), arguments.pop("variance")
    with pytest.raises(ValueError, match=message):
        adam_step(moments=moments, **arguments)


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="step is 0, expected 1 or more"):
        AdamScalars.of(**{**HYPER, "step": 0})


def test_the_interpreted_triton_kernel_has_the_bits_of_the_c_kernel():
    """A new process, because Triton interprets all kernels of a process or none."""
    pytest.importorskip("triton")
    program = """
import test_adam
for layout in test_adam.LAYOUTS:
    for numel in (1, 1023, 5003):
        shard = test_adam.Shard(numel, layout)
        assert shard.clone().update(isa="triton").equals(shard.update()), (layout, numel)
for dtype in (test_adam.torch.bfloat16, test_adam.torch.float32):
    for numel in (1, 33, 1023, 1024, 7 * 1024 + 500):
        grad = test_adam.gradient(numel, dtype=dtype)
        assert test_adam.torch.equal(test_adam.norm_limbs(grad, isa="triton"), test_adam.norm_limbs(grad)), (dtype, numel)
    odd = test_adam.torch.tensor([float("inf"), float("nan"), 1.0, -0.0]).to(dtype)
    assert test_adam.torch.equal(test_adam.norm_limbs(odd, isa="triton"), test_adam.norm_limbs(odd))
"""
    run_interpreted(program)


@on_gpu
@pytest.mark.parametrize("isa", [None, "torch"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_device_has_the_bits_of_the_host(layout, isa):
    host = Shard(300_001, layout)
    device = host.clone()
    device.__dict__ = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in device.__dict__.items()}
    device.update(isa=isa)
    device.__dict__ = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in device.__dict__.items()}
    assert device.equals(host.update())
    grad = gradient(300_001)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        norm = NormAccumulator("cuda")
        norm.add(grad.to(dtype).cuda(), isa=isa)
        assert torch.equal(norm.limbs.cpu(), norm_limbs(grad.to(dtype)))
