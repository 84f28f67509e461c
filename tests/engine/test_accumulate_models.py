"""infinity.accumulate with models of transformers and diffusers has the losses and states of the ordinary loop, bit by bit."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from support.accumulation import PLACES, Boxed, Odd, Stashing, assert_as_the_ordinary_loop, changing, one_step, run, scaled, tokens
from support.accumulation import loss_of as loss_of_tokens
from support.helpers import NVME, assert_same_states, states_of, training
from support.models import Chain
from support.transformer_cases import ADAPTED, CASES

import infinity

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = pytest.mark.long
SHORT = {"Llama": ["fp32", "bf16", "fp16"], "GPT-2": ["fp32"], "T5": ["bf16"], "Whisper": ["bf16"], "ViT": ["fp32"], "Mixtral": ["bf16"]}
NAMES = [name for name in CASES if "dropout" not in name]
WAYS = [
    pytest.param(name, dtype, marks=() if dtype in SHORT.get(name, ()) else LONG)
    for name in NAMES
    for dtype in ("fp32", "bf16", "fp16")
    if name != "ResNet" or dtype == "fp32"  # ResNet's batch norms have statistics in fp32, which other dtypes do not accept
]


def batches_of(case, dtype="fp32"):
    def batches(step, n):
        made = [case.batch(torch.Generator().manual_seed(10 * step + number)) for number in range(n)]
        sized = [{key: value[: 1 + number % 4] if number else value for key, value in batch.items()} for number, batch in enumerate(made)]
        return [{key: value.to(_DTYPES[dtype]) if value.is_floating_point() else value for key, value in batch.items()} for batch in sized]

    return batches


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loss_of(model, batch):
    return model(**batch).loss / 3


def how(case, dtype="fp32", **config):
    found = {"batches": batches_of(case, dtype), "loss": loss_of, "dtype": dtype, "make": case.build}
    return found | scaled(dtype) | config


def told_of_limits(capfd):
    """The lines that say why a part of a model is not cut. The line about the cache is not one of them."""
    lines = capfd.readouterr().err.splitlines()
    return [line for line in lines if "infinity.accumulate: " in line and "the cache of the model" not in line]


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name, dtype", WAYS)
def test_losses_and_states_are_those_of_the_ordinary_loop(name, dtype, tmp_path, capfd):
    assert_as_the_ordinary_loop(tmp_path, **how(CASES[name], dtype), **NVME)
    assert not told_of_limits(capfd)


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("places", [name for name in PLACES if name != "nvme"])
def test_every_placement_has_the_bits_of_the_ordinary_loop(places, n, tmp_path):
    assert_as_the_ordinary_loop(tmp_path, **how(CASES["Llama"], "bf16"), **PLACES[places], n=n)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, dtype",
    [("Llama", "bf16"), ("GPT-2", "fp32"), ("T5", "fp32"), ("Whisper", "bf16"), ("ViT", "fp16"), ("Mixtral", "bf16")],
)
def test_sixteen_micro_batches_have_the_bits_of_the_ordinary_loop(name, dtype, tmp_path):
    options = {"max_grad_norm": 0.05} | scaled(dtype).get("options", {})
    assert_as_the_ordinary_loop(tmp_path, **how(CASES[name], dtype) | {"options": options, "num_steps": 2}, n=16, **NVME)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name, dtype", [("T5", "fp32"), ("Llama", "bf16"), pytest.param("GPT-2", "fp16", marks=LONG)])
def test_clipping_is_that_of_the_ordinary_loop(name, dtype, tmp_path):
    options = {"max_grad_norm": 0.05} | scaled(dtype).get("options", {})
    assert_as_the_ordinary_loop(tmp_path, **how(CASES[name], dtype) | {"options": options}, **NVME)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train_on_a_frozen_model(name, tmp_path, capfd):
    peft = pytest.importorskip("peft")

    def build():
        options = {"target_modules": ADAPTED[name], "fan_in_fan_out": name == "GPT-2", "task_type": "CAUSAL_LM"}
        return peft.get_peft_model(CASES[name].build(), peft.LoraConfig(r=4, lora_alpha=8, **options))

    assert_as_the_ordinary_loop(tmp_path, **how(CASES[name], "bf16") | {"make": build}, **NVME)
    assert not told_of_limits(capfd)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["Llama", pytest.param("GPT-2", marks=LONG), pytest.param("T5", marks=LONG)])
def test_gradient_checkpointing_changes_nothing(name, use_reentrant, tmp_path):
    def build():
        model = CASES[name].build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model

    assert_as_the_ordinary_loop(tmp_path, **how(CASES[name]) | {"make": build}, **NVME)


def small_t5(use_cache):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, use_cache=use_cache, decoder_start_token_id=0, pad_token_id=0)
    ).train()


def token_ids(step, n):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(1, 61, (2, 3 + 2 * number), generator=generator) for number in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize("in_config, given", [(True, {}), (False, {"use_cache": True}), (False, {})])
def test_a_message_says_that_the_cache_of_the_configuration_is_off(in_config, given, tmp_path, capfd):
    def loss(model, ids):
        return model(input_ids=ids, labels=ids, **given).loss / 3

    told = "infinity.accumulate: the cache of the model (config.use_cache=True) is turned off"
    how = {"make": functools.partial(small_t5, in_config), "batches": token_ids, "loss": loss, "num_steps": 2}
    if in_config:  # without the cache, T5 rounds otherwise than the ordinary loop, which keeps the cache
        run(tmp_path, True, **how, **NVME)
        assert capfd.readouterr().err.count(told) == 1
    else:
        assert_as_the_ordinary_loop(tmp_path, **how, **NVME)
        assert told not in capfd.readouterr().err


def unet():
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 16, 32),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def noisy(dtype):
    def batches(step, n):
        generator, found = torch.Generator().manual_seed(step), []
        for _ in range(n):
            sample, noise, text = (torch.randn(shape, generator=generator) for shape in ((2, 3, 8, 8), (2, 3, 8, 8), (2, 5, 16)))
            found.append((sample.to(_DTYPES[dtype]), torch.randint(1000, (2,), generator=generator), text.to(_DTYPES[dtype]), noise))
        return found

    return batches


def loss_of_noise(model, batch):
    sample, times, text, noise = batch
    return F.mse_loss(model(sample, times, text).sample.float(), noise) / 3


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=LONG)])
def test_a_unet_is_cut_in_spite_of_its_skip_connections(dtype, tmp_path, capfd):
    assert_as_the_ordinary_loop(tmp_path, make=unet, batches=noisy(dtype), loss=loss_of_noise, dtype=dtype, chunk_mib=1 / 64, **NVME)
    assert "infinity.accumulate" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["Llama", "T5", "Mixtral"])
def test_weights_are_read_as_often_as_for_one_micro_batch(name, tmp_path):
    case = CASES[name]
    config = how(case) | NVME | {"chunk_mib": 1 / 64, "num_steps": 4}
    *_, once = run(tmp_path, False, n=1, **config | {"options": {"accumulation_steps": 1}})
    for n in (2, 6):
        *_, found = run(tmp_path, True, n=n, **config | {"options": {"accumulation_steps": 2}})
        assert found <= 1.02 * once, (n, found / once)


def train_by_layer(name, by_layer, dtype, folder):
    """Runs on every rank, with batches of the rank."""
    import torch.distributed as dist

    case, rank = CASES[name], dist.get_rank()
    batches = lambda step, n: batches_of(case, dtype)(2 * step + rank + 1, n)
    config = how(case, dtype) | NVME | {"batches": batches}
    torch.set_num_threads(1)
    losses, states, *_ = run(folder, by_layer, **config)
    return losses, {key: {segment: tensor.clone() for segment, tensor in state.items()} for key, state in states.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", [("Llama", "bf16"), pytest.param("T5", "fp32", marks=LONG), pytest.param("GPT-2", "fp16", marks=LONG)])
def test_two_ranks_have_the_bits_of_the_ordinary_loop(name, dtype, two_ranks, tmp_path):
    (losses, states), (others, _) = two_ranks.run(train_by_layer, name, True, dtype, tmp_path)
    (expected_losses, expected_states), (expected_others, _) = two_ranks.run(train_by_layer, name, False, dtype, tmp_path)
    assert (losses, others) == (expected_losses, expected_others)
    assert_same_states(states, expected_states)


def train_uncut(make, by_layer, folder):
    """Runs on every rank: a model that cannot be cut everywhere. All batches have one row."""
    import torch.distributed as dist

    rank = dist.get_rank()
    batches = lambda step, n: [(x[:1], y[:1]) for x, y in tokens(2 * step + rank, n)]
    torch.set_num_threads(1)
    losses, states, *_ = run(folder, by_layer, make=make, batches=batches, num_steps=2, **NVME)
    return losses, {key: {segment: tensor.clone() for segment, tensor in state.items()} for key, state in states.items()}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("make", [Boxed, Stashing, changing], ids=["joined", "whole", "in place"])
def test_two_ranks_have_the_bits_of_the_loop_for_an_uncut_model(make, two_ranks, tmp_path):
    make = functools.partial(make, *{Boxed: (2,), Stashing: ("mask",)}.get(make, ()))
    (losses, states), (others, _) = two_ranks.run(train_uncut, make, True, tmp_path)
    (expected_losses, expected_states), (expected_others, _) = two_ranks.run(train_uncut, make, False, tmp_path)
    assert (losses, others) == (expected_losses, expected_others)
    assert_same_states(states, expected_states)


def train_tightly(by_layer, update, nbytes, folder):
    """Runs on every rank. nbytes: device memory, which sums of gradients share with spans."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    losses, config = [], NVME | {"dtype": "bf16", "update": update, "device_memory": nbytes, "options": {"accumulation_steps": 4}}
    with training(Odd, folder, **config) as (model, engine, optimizer):
        for step in range(3):
            losses += one_step(model, tokens(2 * step + dist.get_rank(), 4), loss_of_tokens, by_layer)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.stats()["peak_device_nbytes"] <= nbytes or not by_layer
        return losses, {key: {segment: tensor.clone() for segment, tensor in state.items()} for key, state in states_of(engine, model).items()}


@LONG
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_two_ranks_have_the_bits_of_the_loop_with_little_device_memory(update, two_ranks, tmp_path):
    expected = two_ranks.run(train_tightly, False, update, 1 << 20, tmp_path)
    for nbytes in (30_000, 40_000, 80_000):
        for (losses, states), (expected_losses, expected_states) in zip(two_ranks.run(train_tightly, True, update, nbytes, tmp_path), expected):
            assert losses == expected_losses
            assert_same_states(states, expected_states, nbytes)


def leaves_once(dtype, update, folder):
    """Runs on every rank. Returns the bytes to host memory of each step, and the elements of the gradients of a rank."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = []
    config = NVME | {"dtype": dtype, "update": update, "options": {"accumulation_steps": 2}}
    with training(Chain, folder, **config) as (model, engine, optimizer):
        for step, n in enumerate((2, 5)):
            before = engine.stats()["links"]["d2h"]["nbytes"]
            infinity.accumulate(model, tokens(2 * step + dist.get_rank(), n), loss_of_tokens)
            optimizer.step()
            optimizer.zero_grad()
            for chunk in engine.registry.chunks:
                engine.updater.finish(chunk)
            found.append(engine.stats()["links"]["d2h"]["nbytes"] - before)
        assert engine.tier.held_nbytes == sum(span.nbytes for span in engine.registry.spans if span.allocated)
        return found, sum(chunk.record.numel for chunk in engine.registry.chunks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, update", [("bf16", "deferred"), pytest.param("fp32", "backward", marks=LONG)])
def test_shards_of_two_ranks_add_up_on_the_device_and_leave_once(dtype, update, two_ranks, tmp_path):
    for found, num_parameters in two_ranks.run(leaves_once, dtype, update, tmp_path):
        assert found == [4 * num_parameters] * 2
