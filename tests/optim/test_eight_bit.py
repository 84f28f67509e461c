"""Moments of 8 bits: the bits of every kernel, the error of a code, and trainings in every placement."""

import pytest
import torch
from support.helpers import NVME, assert_same_bits, assert_same_states, on_gpu, states_of, training
from support.models import gpt_step, tiny_gpt
from support.muon import DEVICE, HOST, load_dcp, resumed
from torch import nn

import infinity
from infinity.formats.format import SCALE_BLOCK, Format
from infinity.optim import _adam, eight_bit
from infinity.optim.adam import AdamScalars, Dither, adam_step, split_master

pytestmark = pytest.mark.usefixtures("one_thread")

SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["momentum", "variance"])
BF16 = {"dtype": "bf16", "optimizer_state_dtype": "8bit"}


def coded(values, random, signed):
    """(codes, scales)"""
    codes, scales = (torch.empty(count, dtype=torch.uint8) for count in (len(values), -(-len(values) // SCALE_BLOCK)))
    eight_bit.encode(values, random, codes, scales, signed=signed)
    return codes, scales


def back(values, random, signed):
    return eight_bit.decoded(*coded(values, random, signed), signed=signed)


def samples(numel, signed, *, lowest=-6.0):
    generator = torch.Generator().manual_seed(0)
    powers = torch.empty(numel).uniform_(lowest, 2, generator=generator)
    values = torch.randn(numel, generator=generator) * 10**powers
    return values if signed else values.abs()


def draws(numel, seed):
    return torch.randint(1 << 16, (numel,), generator=torch.Generator().manual_seed(seed))


def largest_of_block(values):
    blocks = torch.nn.functional.pad(values.abs(), (0, -len(values) % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    return blocks.amax(1).repeat_interleave(SCALE_BLOCK)[: len(values)]


@SIGNS
def test_a_code_is_within_an_eighth_of_the_value(signed):
    values = samples(50_003, signed, lowest=-3.0 if signed else -6.0)
    normal = values.abs() > largest_of_block(values) * 2.0 ** (-13 if signed else -29)
    assert normal.float().mean() > 0.7
    for seed in range(3):
        found = back(values, draws(len(values), seed), signed)
        assert ((found - values).abs() <= values.abs() / 8)[normal].all()
        assert (found.sign() * values.sign() >= 0).all()


@pytest.mark.long
@SIGNS
def test_rounding_has_no_bias(signed):
    values = samples(4096, signed, lowest=-9.0)
    known = values.abs() > largest_of_block(values) * 2.0 ** (-24 if signed else -29)
    mean = torch.stack([back(values, draws(len(values), seed), signed) for seed in range(2000)]).mean(0)
    error = (mean - values) / torch.maximum(values.abs(), largest_of_block(values) * 2.0**-14 if signed else values.abs())
    assert error[known].abs().mean() < 2e-3 and error[known].mean().abs() < 2e-4


def test_a_variance_is_never_rounded_to_zero():
    values = torch.tensor([1.0, 1e-12, 1e-30, 0.0])
    found = back(values, torch.zeros(4, dtype=torch.int64), False)
    assert found[:3].min() > 0 and found[3] == 0


@SIGNS
def test_zeros_have_zero_bytes(signed):
    codes, scales = coded(torch.zeros(300), draws(300, 0), signed)
    assert not codes.any() and not scales.any()
    assert not eight_bit.decoded(codes, scales, signed=signed).any()


@SIGNS
def test_a_nan_or_infinity_changes_no_other_value_of_its_block(signed):
    values = samples(256, signed, lowest=-1.0)
    expected = coded(torch.where(torch.arange(256) == 7, 0, values), draws(256, 0), signed)
    for wrong in (float("nan"), float("inf")):
        values[7] = wrong
        codes, scales = coded(values, draws(256, 0), signed)
        assert eight_bit.decoded(codes, scales, signed=signed).isnan().nonzero().flatten().tolist() == [7]
        codes[7] = expected[0][7]
        assert_same_bits(codes, expected[0], "codes")
        assert_same_bits(scales, expected[1], "scales")


@SIGNS
@pytest.mark.parametrize("power", [-149, -126, -100, 0, 120])
def test_values_of_any_size_keep_their_order(signed, power):
    values = torch.tensor([2.0**power, 2.0 ** (power - 1), 2.0 ** (power - 2), 0.0])
    found = back(values, torch.full((4,), 1 << 15), signed)
    assert (found.diff() <= 0).all() and found[-1] == 0
    if power >= -100:
        assert_same_bits(found, values, "powers of two are exact")


# ---- kernels ----


def updated(numel, isa, device="cpu", cuts=(), coupled=False, master=True):
    """All segments of a shard after five updates. cuts: borders of parts that are updated alone. master: weights have a residual."""
    generator = torch.Generator().manual_seed(numel)
    weight, residual = split_master(torch.randn(numel, generator=generator))
    blocks = -(-numel // SCALE_BLOCK)
    shard = [weight, residual, *(torch.zeros(count, dtype=torch.uint8) for count in (numel, numel, blocks, blocks))]
    shard = [segment.to(device) for segment in shard]
    for step in range(1, 6):
        powers = torch.empty(numel).uniform_(-14, 4, generator=generator)
        grad = (torch.randn(numel, generator=generator) * 10**powers).to(torch.bfloat16 if step % 2 else torch.float32)
        if step == 3 and numel > 200:
            grad[7], grad[150] = float("nan"), float("inf")
        if step == 4:
            grad.zero_()
        scalars = AdamScalars.of(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step, decoupled=not coupled)
        for begin, end in zip((0, *cuts), (*cuts, numel)):
            of_codes, of_scales = slice(begin, end), slice(begin // SCALE_BLOCK, -(-end // SCALE_BLOCK))
            part = [segment[of_codes] for segment in shard[:4]] + [segment[of_scales] for segment in shard[4:]]
            dither = Dither.of(0, "w", step, begin)
            adam_step(part[0], part[1] if master else None, part[2:], grad[of_codes].to(device), scalars, dither=dither, threads=1, isa=isa)
    return [segment.cpu() for segment in shard]


@pytest.mark.few(9)
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 511, 512, 5000, 100_003])
@pytest.mark.parametrize("how", [{}, {"coupled": True}, {"master": False}], ids=str)
def test_every_kernel_gives_the_same_bits(numel, how):
    expected = updated(numel, "torch", **how)
    for isa in _adam.isas():
        for cuts in ((), tuple(range(3 * 1024, numel, 3 * 1024))):
            for number, (found, wanted) in enumerate(zip(updated(numel, isa, cuts=cuts, **how), expected)):
                assert_same_bits(found, wanted, f"segment {number} of {isa}")


@on_gpu
@pytest.mark.parametrize("numel", [1, 129, 5000, 100_003])
@pytest.mark.parametrize("master", [True, False])
def test_the_kernel_of_the_gpu_gives_the_same_bits(numel, master):
    expected = updated(numel, None, master=master)
    for isa in ("triton", "torch"):
        for number, (found, wanted) in enumerate(zip(updated(numel, isa, "cuda", master=master), expected)):
            assert_same_bits(found, wanted, f"segment {number} of {isa}")


def test_moments_that_do_not_fit_are_refused():
    weight, residual = split_master(torch.zeros(256))
    codes, scales = torch.zeros(256, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    scalars = AdamScalars.of(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=1)
    for moments, dither in (([codes, codes, scales[:1], scales], Dither(0, 0, 0)), ([codes, codes, scales, scales], None)):
        with pytest.raises(ValueError, match="8-bit moments need dither, and one scale beside them for each 128 elements"):
            adam_step(weight, residual, moments, torch.zeros(256), scalars, dither=dither)


# ---- trainings ----


def test_a_record_has_6_bytes_a_parameter():
    shares = {}
    for dtype in ("fp32", "bf16", "8bit"):
        shares[dtype] = sum(segment.nbytes(1 << 20) for segment in Format("bf16", moments_dtype=dtype).segments) / (1 << 20)
    assert shares == {"fp32": 12, "bf16": 8, "8bit": 6 + 2 / 128}
    least = Format("bf16_rounded", moments_dtype="8bit")
    assert sum(segment.nbytes(1 << 20) for segment in least.segments) / (1 << 20) == 4 + 2 / 128
    assert not Format("fp32", moments_dtype="8bit").has_coded_moments


def trained(directory, *, optimizer=infinity.AdamW, options=None, steps=4, **config):
    with training(tiny_gpt, directory, optimizer=optimizer, options=options, **BF16 | config) as (model, engine, ours):
        losses = [gpt_step(model, ours, step, ours.accumulation_steps) for step in range(steps)]
        return losses, states_of(engine, model)


KINDS = {
    "adamw": {},
    "adam": {"optimizer": infinity.Adam},
    "lion": {"optimizer": infinity.Lion, "options": {"lr": 1e-3}},
    "muon": {"optimizer": infinity.Muon, "options": {"lr": 0.02}},
    "clipped": {"options": {"max_grad_norm": 0.5}},
    "accumulated": {"options": {"accumulation_steps": 2}},
    "compressed": {"compression": "on"},
    "no-master": {"master": "none"},
    "no-master-fp32-moments": {"master": "none", "optimizer_state_dtype": "fp32"},
    "no-master-bf16-moments": {"master": "none", "optimizer_state_dtype": "bf16"},
    "no-master-late-moments": {"master": "none", "optimizer_state_dtype": "fp32", "compression": "auto"},
    "no-master-lion": {"master": "none", "optimizer": infinity.Lion, "options": {"lr": 1e-3}},
    "no-master-muon": {"master": "none", "optimizer": infinity.Muon, "options": {"lr": 0.02}},
    "no-master-sgd": {"master": "none", "optimizer": infinity.SGD, "options": {"lr": 0.1}},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_same_bits_in_every_placement(kind, tmp_path):
    expected, states = trained(tmp_path, **DEVICE | KINDS[kind])
    for places in (HOST, NVME, NVME | {"chunk_mib": 1 / 8}, {"param_tier": "host", "optimizer_state_tier": "nvme"}):
        losses, found = trained(tmp_path, **places | KINDS[kind])
        assert losses == expected, places
        assert_same_states(found, states, str(places))


@pytest.mark.slow
def test_losses_are_near_those_of_fp32_moments(tmp_path):
    found = {}
    for dtype, master in (("fp32", "fp32"), ("8bit", "fp32"), ("8bit", "none")):
        config = DEVICE | {"dtype": "bf16", "optimizer_state_dtype": dtype, "master": master, "chunk_mib": None}
        with training(tiny_gpt, tmp_path, **config, options={"lr": 3e-3}) as (model, engine, ours):
            found[dtype, master] = [gpt_step(model, ours, step % 4) for step in range(60)]
    exact, *others = (sum(losses[-8:]) / 8 for losses in found.values())
    assert exact < 0.8 * found["fp32", "fp32"][0]
    assert others == pytest.approx([exact, exact], rel=0.02)


@pytest.mark.long
def test_small_changes_of_a_weight_without_a_master_add_up(tmp_path):
    """Each update is a hundredth of the distance of two bf16 values: rounding to the nearest would lose all of them."""

    def make():
        model = nn.Linear(256, 256, bias=False)
        nn.init.ones_(model.weight)
        return model

    config = HOST | {"dtype": "bf16", "master": "none"}
    with training(make, tmp_path, optimizer=infinity.SGD, options={"lr": 1e-4}, **config) as (model, engine, ours):
        for _ in range(40):
            model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
            ours.step()
            ours.zero_grad()
        weight = engine.read_state(model.weight)["weight"].float()
    assert weight.mean().item() == pytest.approx(0.996, abs=1e-4) and len(weight.unique()) > 1


def test_a_frozen_weight_is_the_same_without_a_master(tmp_path):
    def make():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[0].requires_grad_(False)
        return model

    with training(make, tmp_path, **NVME | BF16 | {"master": "none"}) as (model, engine, ours):
        assert {chunk.record.format.name for chunk in engine.registry.chunks} == {"bf16", "bf16_rounded"}
        assert engine.read_state(model[0].weight).keys() == {"weight"}
        assert engine.read_state(model[1].weight).keys() == {"weight", "momentum", "variance"}


@pytest.mark.long
@pytest.mark.parametrize("master", ["fp32", "none"])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(master, tmp_path):
    with training(tiny_gpt, tmp_path, **NVME | BF16 | {"master": master}) as (model, engine, ours):
        for step in range(2):
            gpt_step(model, ours, step)
        infinity.save(tmp_path / "checkpoint", model, ours)
        infinity.save_dcp(tmp_path / "dcp", model, ours)
        for step in (2, 3):
            gpt_step(model, ours, step)
        expected = states_of(engine, model)
    how = {"optimizer": infinity.AdamW, "options": {}, "master": master} | BF16
    for places in (NVME, HOST | {"chunk_mib": 1 / 8}):
        assert_same_states(resumed(tmp_path, tmp_path / "checkpoint", infinity.load, **places, **how), expected)
    for name, state in resumed(tmp_path, tmp_path / "dcp", load_dcp, **how).items():  # has the values in fp32, whose blocks may get other scales
        assert torch.allclose(state["weight"].float(), expected[name]["weight"].float(), atol=2e-3), name


def test_a_checkpoint_with_other_moments_is_refused(tmp_path):
    with training(tiny_gpt, tmp_path, **BF16) as (model, engine, ours):
        gpt_step(model, ours, 0)
        infinity.save(tmp_path / "checkpoint", model, ours)
    with training(tiny_gpt, tmp_path, dtype="bf16") as (model, engine, ours):
        with pytest.raises(infinity.CheckpointError, match="moments momentum, variance in fp32, the checkpoint has momentum, variance in 8bit"):
            infinity.load(tmp_path / "checkpoint", model, ours)


def test_a_checkpoint_with_a_master_is_refused_without_one(tmp_path):
    with training(tiny_gpt, tmp_path, **BF16) as (model, engine, ours):
        gpt_step(model, ours, 0)
        infinity.save(tmp_path / "checkpoint", model, ours)
    with training(tiny_gpt, tmp_path, **BF16, master="none") as (model, engine, ours):
        with pytest.raises(infinity.CheckpointError, match="was saved with dtype='bf16', expected dtype='bf16' and master='none'"):
            infinity.load(tmp_path / "checkpoint", model, ours)


def test_a_rule_of_a_program_allows_8_bit_moments_itself(tmp_path):
    class Adagrad(infinity.Rule):
        moments = ("sum",)

        def update(self, p, g, moments, scalars):
            moments["sum"] += g * g
            p -= g / (moments["sum"].sqrt() + 1e-10) * scalars["lr"]

    with pytest.raises(infinity.ConfigError, match="optimizer_state_dtype='8bit' with Adagrad: set allows_eight_bit = True in this class if"):
        with training(tiny_gpt, tmp_path, optimizer=lambda params, lr: infinity.Optimizer(params, Adagrad(), {"lr": lr}), **BF16):
            pass


def test_8_bit_moments_need_bf16():
    with pytest.raises(infinity.ConfigError, match="master='none' with dtype='fp16': this value goes with dtype='bf16' only"):
        infinity.Config(dtype="fp16", master="none")
    with pytest.raises(infinity.ConfigError, match="optimizer_state_dtype='8bit' with dtype='fp32': this value goes with dtype='bf16' only"):
        infinity.Config(dtype="fp32", optimizer_state_dtype="8bit")
