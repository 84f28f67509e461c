"""Small models of transformers with their batches, and their training in plain PyTorch."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from support.helpers import ReferenceAdamW
from torch import nn

transformers = pytest.importorskip("transformers")

STEPS = 5
OPTIONS = {"lr": 5e-4, "weight_decay": 0.1}
VOCAB, ROWS, LENGTH = 96, 4, 16


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


ADAPTED = {"GPT-2": ["c_attn", "c_fc"], "Llama": ["q_proj", "v_proj", "down_proj"]}
