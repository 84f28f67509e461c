"""Small models of transformers, with all records on NVMe and less than a quarter of the weights on the device.
Their losses and states are those of plain PyTorch, bit by bit.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
from helpers import NVME, ReferenceAdamW, assert_equals_reference, assert_nothing_held, assert_same_bits
from test_ranks import World, share, total
from torch import nn

import infinity

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 5
SHARE = 0.24  # device memory as a share of the weights' bytes
SHARE_OF_TWO = 0.36  # the same for two ranks: each has gradient buffers of two ops on the device
OPTIONS = {"lr": 5e-4, "weight_decay": 0.1}
VOCAB, ROWS, LENGTH = 96, 4, 16


# ---- the models ----


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and its batches as keyword arguments. Every tensor has ROWS rows."""

    build: Callable[..., nn.Module]
    batch: Callable[[torch.Generator], dict]


def token_ids(generator, length=LENGTH):
    return torch.randint(3, VOCAB, (ROWS, length), generator=generator)


def text(generator):
    tokens = token_ids(generator)
    return {"input_ids": tokens, "labels": tokens}


def text_of_a_class(generator):
    return {"input_ids": token_ids(generator), "labels": torch.randint(4, (ROWS,), generator=generator)}


def text_pair(generator):
    return {"input_ids": token_ids(generator), "labels": token_ids(generator, 10)}


def image(generator, size):
    pixels = torch.randn(ROWS, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(4, (ROWS,), generator=generator)}


def sound(generator):
    features = torch.randn(ROWS, 8, 2 * LENGTH, generator=generator)
    return {"input_features": features, "labels": token_ids(generator, 10)}


DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = DECODER | {"hidden_size": 48, "intermediate_size": 48, "head_dim": 12, "num_hidden_layers": 9, "num_experts_per_tok": 2}


def gpt2(dropout=0.0, **changes):
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=6,
        n_head=4,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, num_hidden_layers=6, **changes))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, num_hidden_layers=6, sliding_window=8))


def gemma():
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER, num_hidden_layers=6))


def mixtral(**changes):
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS, num_local_experts=4, **changes))


def qwen3_moe(**changes):
    config = {"num_experts": 4, "moe_intermediate_size": 48, "decoder_sparse_step": 1, "output_router_logits": True}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EXPERTS, **config | changes))


def t5(**changes):
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=4,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,  # infinity.accumulate turns the cache off, and attention with a cache rounds differently
        decoder_start_token_id=0,
        **changes,
    )
    return transformers.T5ForConditionalGeneration(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=4,
    )
    return transformers.BertForSequenceClassification(config)


def vit():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=4))


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=64,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config)


def resnet():
    sizes = {"embedding_size": 16, "hidden_sizes": [24, 32, 32, 32], "depths": [2, 2, 2, 2], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, num_labels=4))


CASES = {
    "GPT-2": Case(gpt2, text),
    "GPT-2, dropout 0.1": Case(lambda: gpt2(dropout=0.1), text),
    "Llama": Case(llama, text),
    "Mistral": Case(mistral, text),
    "Mixtral": Case(mixtral, text),
    "Qwen3-MoE, auxiliary loss": Case(qwen3_moe, text),
    "Gemma": Case(gemma, text),
    "T5": Case(t5, text_pair),
    "BERT": Case(bert, text_of_a_class),
    "ViT": Case(vit, lambda generator: image(generator, 16)),
    "Whisper": Case(whisper, sound),
    "ResNet": Case(resnet, lambda generator: image(generator, 32)),
}


# ---- training them ----

HAS_TILES = "tile_above" in {field.name for field in dataclasses.fields(infinity.Config)}


def settings(folder, weights_nbytes, share=SHARE, **changes):
    """All records on NVMe, no resident weights, device memory for a share of the weights."""
    tiles = {"tile_above": None} if HAS_TILES else {}  # the layers are small enough without tiles
    options = {"device": "cpu", "dtype": "fp32", "chunk_mib": 1 / 128, "host_memory": "32MiB"}
    budget = int(share * weights_nbytes)
    return infinity.Config(swap_dirs=folder, device_memory=budget, **options | NVME | tiles | changes)


def nbytes_of(model):
    return sum(param.numel() * 4 for param in model.parameters())


@contextlib.contextmanager
def offloaded(build, folder, *, options=OPTIONS, **changes):
    """(model, engine, optimizer). The model is built with seed 0 inside infinity.init, in a window of a quarter of the weights' bytes."""
    torch.manual_seed(0)
    weights_nbytes = nbytes_of(build())
    torch.manual_seed(0)
    with infinity.init(settings(folder, weights_nbytes, **changes), window=weights_nbytes // 4):
        model = build()
    optimizer = infinity.AdamW([param for param in model.parameters() if param.requires_grad], **options)
    with infinity.engine_of(model) as engine:
        yield model, engine, optimizer
        assert_nothing_held(engine)


def plain(build, optimizer=ReferenceAdamW):
    """(model, optimizer) in plain PyTorch."""
    torch.manual_seed(0)
    model = build()
    return model, optimizer([param for param in model.parameters() if param.requires_grad], **OPTIONS)


def loss_of(model, batch, step, part=lambda rows: rows):
    generator = torch.Generator().manual_seed(step)
    torch.manual_seed(step)  # seed of dropout
    return model(**{name: part(rows) for name, rows in batch(generator).items()}).loss


def train(model, optimizer, batch, first=0, steps=STEPS):
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, batch, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate(model, batch):
    model.eval()
    loss = loss_of(model, batch, 99).item()
    model.train()
    return loss


def assert_within_budget(engine, model):
    stats = engine.stats()
    weights_nbytes = 4 * stats["num_parameters"]
    assert stats["num_parameters"] == sum(param.numel() for param in model.parameters())
    assert stats["peak_device_nbytes"] <= stats["device_budget_nbytes"] < weights_nbytes / 4
    assert stats["num_chunks_on_device"] == 0
    return stats


# ---- equality with plain PyTorch ----

TABLE = []


@pytest.fixture(scope="module", autouse=True)
def table(request):
    """Print one line per model after the tests of this file."""
    yield
    if not TABLE:
        return
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{'model':28}{'parameters':>11}{'state bytes':>13}{'budget':>8}{'peak':>7}   loss difference")
        for name, stats, difference in TABLE:
            weights_nbytes = 4 * stats["num_parameters"]
            budget, peak = (stats[key] / weights_nbytes for key in ("device_budget_nbytes", "peak_device_nbytes"))
            sizes = f"{stats['num_parameters']:11,}{stats['model_state_nbytes']:13,}{budget:8.1%}{peak:7.1%}"
            print(f"{name:28}{sizes}   {difference:.1e} to torch.optim.AdamW, 0 to the same arithmetic")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_states_are_those_of_plain_pytorch(name, tmp_path):
    """Losses equal torch.optim.AdamW within a relative error of 1e-5, and the engine's documented arithmetic bit by bit."""
    case = CASES[name]
    expected = train(*plain(case.build, torch.optim.AdamW), case.batch)
    reference_model, reference = plain(case.build)
    same = train(reference_model, reference, case.batch)
    with offloaded(case.build, tmp_path) as (model, engine, optimizer):
        losses = train(model, optimizer, case.batch)
        assert losses == same
        assert losses == pytest.approx(expected, rel=1e-5)
        assert evaluate(model, case.batch) == evaluate(reference_model, case.batch)
        assert_equals_reference(engine, model, reference_model, reference)
        buffers = dict(reference_model.named_buffers())
        for key, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[key]), key
        stats = assert_within_budget(engine, model)
    TABLE.append((name, stats, max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))))


@pytest.mark.few(3)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "T5"])
def test_gradient_checkpointing_changes_no_bit(name, use_reentrant, tmp_path):
    case = CASES[name]

    def build():
        model = case.build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames the option
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model

    reference_model, reference = plain(build)
    with offloaded(build, tmp_path) as (model, engine, optimizer):
        assert train(model, optimizer, case.batch) == train(reference_model, reference, case.batch)
        assert_equals_reference(engine, model, reference_model, reference)
        assert_within_budget(engine, model)


@pytest.mark.parametrize("name", ["GPT-2", "T5"])
def test_generated_tokens_are_those_of_the_plain_model(name, tmp_path):
    case = CASES[name]
    reference_model, reference = plain(case.build)
    with offloaded(case.build, tmp_path) as (model, engine, optimizer):
        found = []
        for each, optimizer_ in ((model, optimizer), (reference_model, reference)):
            train(each, optimizer_, case.batch)
            each.eval()
            prompt = token_ids(torch.Generator().manual_seed(7))
            with torch.no_grad():
                tokens = each.generate(input_ids=prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
            each.train()
            found.append((tokens.tolist(), train(each, optimizer_, case.batch, first=STEPS, steps=1)))
        assert found[0] == found[1]
        assert len(found[0][0][0]) >= 12
        assert_within_budget(engine, model)


# ---- low-rank adapters ----

ADAPTED = {"GPT-2": ["c_attn", "c_fc"], "Llama": ["q_proj", "v_proj", "down_proj"]}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train_on_a_frozen_model_that_is_never_written(name, tmp_path):
    peft = pytest.importorskip("peft")
    case = CASES[name]

    def build():
        options = {"target_modules": ADAPTED[name], "fan_in_fan_out": name == "GPT-2", "task_type": "CAUSAL_LM"}
        return peft.get_peft_model(case.build(), peft.LoraConfig(r=4, lora_alpha=8, **options))

    reference_model, reference = plain(build)
    initial = {key: param.detach().clone() for key, param in reference_model.named_parameters()}
    with offloaded(build, tmp_path) as (model, engine, optimizer):
        trained = [chunk for chunk in engine.registry.chunks if chunk.trainable]
        assert 0 < len(trained) < len(engine.registry.chunks) / 4
        before = engine.stats()["nvme_write_nbytes"]
        for step in range(STEPS):
            assert train(model, optimizer, case.batch, step, 1) == train(reference_model, reference, case.batch, step, 1)
            engine.flush()
            written = engine.stats()["nvme_write_nbytes"]
            assert written - before == sum(chunk.record.nbytes for chunk in trained)
            before = written
        for key, param in model.named_parameters():
            state = engine.read_state(param)
            assert ("momentum" in state) == param.requires_grad == ("lora_" in key), key
            if not param.requires_grad:
                assert set(state) == {"weight"}
                assert_same_bits(state["weight"], initial[key], key)
        assert_equals_reference(engine, model, reference_model, reference)
        assert_within_budget(engine, model)


# ---- two ranks ----


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    world = World(2, tmp_path_factory.mktemp("world"))
    yield world
    world.close()


def train_share(name, folder):
    """Runs on every rank: trains on the rank's rows of each batch. Returns losses over all ranks and the number of plans."""
    case = CASES[name]
    with offloaded(case.build, folder, share=SHARE_OF_TWO) as (model, engine, optimizer):
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, case.batch, step, share)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total(loss.item()))
        return losses, engine.stats()["num_prefetch_plans"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["GPT-2", "Mixtral", "T5"])
def test_two_ranks_have_the_losses_of_one_process_on_the_whole_batch(name, two_ranks, tmp_path):
    expected = train(*plain(CASES[name].build), CASES[name].batch)
    for losses, num_plans in two_ranks.run(train_share, name, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert num_plans >= 1
