"""Tiny models of common architectures at the least device memory that the planner states.

They have the losses and generated tokens of plain PyTorch. One byte less is refused at the start."""

import pytest
import torch
from support.helpers import NVME, assert_nothing_held
from support.transformer_cases import CASES, DECODER, LENGTH, OPTIONS, ROWS, VOCAB, Case, image, plain, text, token_ids, train

import infinity

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")


def causal(name, config=DECODER, **changes):
    """A function that builds the decoder transformers.<name>ForCausalLM."""
    kind = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, f"{name}ForCausalLM")(kind(**config | {"num_hidden_layers": 3} | changes))


def deepseek():
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(
        **DECODER | {"num_key_value_heads": 4, "head_dim": 8} | ranks | experts, moe_intermediate_size=32, num_hidden_layers=3
    )
    return transformers.DeepseekV3ForCausalLM(config)


def gemma3():
    config = transformers.Gemma3TextConfig(**DECODER, num_hidden_layers=3, sliding_window=8, query_pre_attn_scalar=16)
    return transformers.Gemma3ForCausalLM(config)


def gpt_neox():
    return causal("GPTNeoX", {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")})()


def opt():
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 64, "dropout": 0.0}
    return causal("OPT", {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0} | sizes)()


def bloom():
    return causal("Bloom", {"vocab_size": VOCAB, "hidden_size": 64, "n_head": 4}, n_layer=3)()


def mamba2():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2, "chunk_size": 8}
    return causal("Mamba2", sizes | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})()


def falcon_mamba():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "time_step_rank": 4}
    return causal("FalconMamba", sizes | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})()


def rwkv():
    return causal("Rwkv", {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "context_length": 64, "bos_token_id": 1})()


def bart():
    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=64,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config)


def wav2vec2():
    quiet = {name: 0.0 for name in ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop", "mask_time_prob")}
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        conv_dim=(32, 32),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        **quiet,
    )
    return transformers.Wav2Vec2ForCTC(config)


TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = TOWER | {"image_size": 16, "patch_size": 4}


def clip():
    words = TOWER | {"vocab_size": VOCAB, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=words, vision_config=VISION, projection_dim=16))


def llava():
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**DECODER, num_hidden_layers=2),
        image_token_index=VOCAB - 1,
        image_seq_length=16,
    )
    return transformers.LlavaForConditionalGeneration(config)


def convnext():
    config = transformers.ConvNextConfig(hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 2, 1], num_labels=4)
    return transformers.ConvNextForImageClassification(config)


def efficientnet():
    blocks = {"in_channels": [32, 16], "out_channels": [16, 24], "depthwise_padding": [], "strides": [1, 2], "num_block_repeats": [1, 8]}
    sizes = {"expand_ratios": [1, 2], "kernel_sizes": [3, 3], "hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 1.0}
    config = transformers.EfficientNetConfig(image_size=32, num_labels=4, dropout_rate=0.0, drop_connect_rate=0.0, **blocks | sizes)
    return transformers.EfficientNetForImageClassification(config)


def swin():
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0}
    return transformers.SwinForImageClassification(transformers.SwinConfig(**sizes, num_labels=4))


def regnet():
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 24, 32, 32], "depths": [1, 1, 2, 1], "groups_width": 8}
    return transformers.RegNetForImageClassification(transformers.RegNetConfig(**sizes, num_labels=4))


class Denoising(torch.nn.Module):
    """A diffusion model with its training loss."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, sample, noise, **inputs):
        found = self.net(sample, **inputs).sample
        return transformers.utils.ModelOutput(loss=(found[:, : noise.shape[1]] - noise).square().mean())


def dit():
    DiTTransformer2DModel = pytest.importorskip("diffusers").DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 3, "sample_size": 8, "num_embeds_ada_norm": 10}
    return Denoising(DiTTransformer2DModel(**sizes))


def unet():
    UNet2DConditionModel = pytest.importorskip("diffusers").UNet2DConditionModel

    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    sizes = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "cross_attention_dim": 16, "norm_num_groups": 4}
    return Denoising(UNet2DConditionModel(**blocks, **sizes, attention_head_dim=4))


def noisy(**more):
    def batch(generator):
        sample, noise = (torch.randn(ROWS, 4, 8, 8, generator=generator) for _ in range(2))
        return {"sample": sample, "noise": noise, "timestep": torch.randint(10, (ROWS,), generator=generator)} | {
            name: make(generator) for name, make in more.items()
        }

    return batch


def waves(generator):
    return {"input_values": torch.randn(ROWS, 400, generator=generator), "labels": torch.randint(1, 32, (ROWS, 6), generator=generator)}


def captions(generator):
    return {"input_ids": token_ids(generator), "pixel_values": image(generator, 16)["pixel_values"], "return_loss": torch.ones(1)}


def image_and_text(generator):
    tokens = torch.cat([torch.full((ROWS, 16), VOCAB - 1), torch.randint(3, VOCAB - 1, (ROWS, LENGTH), generator=generator)], 1)
    return {"input_ids": tokens, "pixel_values": image(generator, 16)["pixel_values"], "labels": tokens}


ARCHITECTURES = CASES | {
    "Qwen3": Case(causal("Qwen3"), text),
    "DeepSeek-V3": Case(deepseek, text),
    "Gemma 3": Case(gemma3, text),
    "GPT-NeoX": Case(gpt_neox, text),
    "OPT": Case(opt, text),
    "Bloom": Case(bloom, text),
    "Phi-3": Case(causal("Phi3", {k: v for k, v in DECODER.items() if k != "head_dim"}), text),
    "Mamba 2": Case(mamba2, text),
    "Falcon-Mamba": Case(falcon_mamba, text),
    "RWKV": Case(rwkv, text),
    "BART": Case(bart, lambda generator: {"input_ids": token_ids(generator), "labels": token_ids(generator, 10)}),
    "Wav2Vec2": Case(wav2vec2, waves),
    "CLIP": Case(clip, captions),
    "LLaVA": Case(llava, image_and_text),
    "ConvNeXt": Case(convnext, lambda generator: image(generator, 32)),
    "EfficientNet": Case(efficientnet, lambda generator: image(generator, 32)),
    "Swin": Case(swin, lambda generator: image(generator, 32)),
    "RegNet": Case(regnet, lambda generator: image(generator, 32)),
    "DiT": Case(dit, noisy(class_labels=lambda generator: torch.randint(10, (ROWS,), generator=generator))),
    "U-Net": Case(unet, noisy(encoder_hidden_states=lambda generator: torch.randn(ROWS, 5, 16, generator=generator))),
}
QUICK = ("ViT", "Qwen3", "BART")


@torch.no_grad()
def generated(model, batch):
    """The tokens that a model generates after a batch, or the loss of a model that cannot generate."""
    model.eval()
    inputs = batch(torch.Generator().manual_seed(99))
    if getattr(model, "can_generate", lambda: False)():
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        found = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False).tolist()
    else:
        found = model(**inputs).loss.item()
    model.train()
    return found


def with_budget(case, folder, nbytes):
    torch.manual_seed(0)
    model = case.build()
    options = {"device": "cpu", "dtype": "fp32", "chunk_mib": 1 / 128, "host_memory": "32MiB", "tile_above": None}
    engine = infinity.offload(model, infinity.Config(swap_dirs=folder, device_memory=nbytes, **options | NVME))
    return model, engine, infinity.AdamW([param for param in model.parameters() if param.requires_grad], **OPTIONS)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ARCHITECTURES])
def test_an_architecture_trains_and_generates_at_the_least_device_memory(name, tmp_path):
    case = ARCHITECTURES[name]
    with pytest.raises(infinity.BudgetError, match=r"needs \d+ bytes") as refusal:
        with_budget(case, tmp_path, 1024)
    least = int(str(refusal.value).split("needs ")[1].split(" bytes")[0])
    with pytest.raises(infinity.BudgetError, match=f"needs {least} bytes"):
        with_budget(case, tmp_path, least - 1)
    reference_model, reference = plain(case.build, torch.optim.AdamW)
    expected = train(reference_model, reference, case.batch, steps=3), generated(reference_model, case.batch)
    model, engine, optimizer = with_budget(case, tmp_path, least)
    with engine:
        losses = train(model, optimizer, case.batch, steps=3), generated(model, case.batch)
        assert losses[0] == pytest.approx(expected[0], rel=1e-5)
        assert losses[1] == (expected[1] if isinstance(expected[1], list) else pytest.approx(expected[1], rel=1e-4))
        stats = engine.stats()
        assert stats["peak_device_nbytes"] <= least < 4 * stats["num_parameters"]
        assert_nothing_held(engine)
