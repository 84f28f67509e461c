"""LoRA adapters of PEFT over a quantised base, whose weights may come from a 4-bit checkpoint of bitsandbytes."""

import json
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402
from support.helpers import NVME, ReferenceAdamW  # noqa: E402
from support.trainers import engine_config, llama, rows  # noqa: E402

import infinity  # noqa: E402
from infinity.optim.block_codes import CODES  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES = {"host": {"param_tier": "host", "optimizer_state_tier": "host", "residency": "none"}, "nvme": NVME}


def adapted(base):
    torch.manual_seed(3)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def train(model, optimizer, steps=4):
    losses = []
    for step in range(steps):
        tokens = torch.stack([row["input_ids"] for row in rows(4, seed=step)])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def quantised_layers(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and "layers." in name}


def four_bits(weight):
    """Codes and scales of nf4."""
    codes, scales = torch.zeros(weight.numel() // 2, dtype=torch.uint8), torch.zeros(weight.numel() // 64)
    CODES["nf4"].encode(weight.detach().flatten(), codes, scales)
    return codes, scales


def expanded(codes, scales, shape):
    out = torch.empty(shape.numel(), dtype=torch.bfloat16)
    CODES["nf4"].decode(codes, scales, out)
    return out.view(shape)


@pytest.mark.slow
def test_adapters_over_nf4_have_the_losses_of_plain_pytorch(tmp_path):
    """Adapters in fp32 over a base in bf16, as PEFT makes them, with the base in host memory and on NVMe."""
    plain = llama().bfloat16()
    for layer in quantised_layers(plain).values():
        layer.weight.data = expanded(*four_bits(layer.weight), layer.weight.shape)
    plain = adapted(plain)
    expected = train(plain, ReferenceAdamW(trainable(plain), lr=1e-2, dtype=None))
    for place, options in PLACES.items():
        (tmp_path / place).mkdir()
        model = adapted(llama().bfloat16())
        with infinity.offload(model, engine_config(tmp_path / place, dtype="bf16", frozen_dtype="nf4", **options)) as engine:
            assert train(model, infinity.AdamW(trainable(model), lr=1e-2)) == expected, place
            formats = {spec.name.removeprefix("base_model.model.model."): str(spec.format) for spec in engine.layout.specs}
            assert formats["layers.0.self_attn.q_proj.base_layer.weight"] == formats["layers.1.mlp.up_proj.base_layer.weight"] == "frozen nf4"
            assert formats["embed_tokens.weight"] == formats["norm.weight"] == "frozen bf16"


def save_four_bits(model, path, *, nested):
    """Save a model as bitsandbytes does, and return its codes and scales by the names of weights."""
    tensors, found = dict(model.state_dict()), {}
    for name, layer in quantised_layers(model).items():
        key = f"{name}.weight"
        codes, scales = four_bits(layer.weight)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(layer.weight.shape)}
        if nested:
            offset, numbers = scales.mean().item(), torch.linspace(-1, 1, 256)
            largest = (scales - offset).abs().max()
            nearest = ((scales - offset)[:, None] / largest - numbers).abs().argmin(1)
            scales = numbers[nearest] * largest + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {f"{key}.nested_quant_map": numbers, f"{key}.nested_absmax": largest[None], f"{key}.absmax": nearest.to(torch.uint8)}
        else:
            tensors[f"{key}.absmax"] = scales
        tensors |= {key: codes[:, None], f"{key}.quant_map": torch.tensor(CODES["nf4"].numbers)}
        tensors[f"{key}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        found[key] = codes, scales
    save_file(tensors, path)
    return found


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("window", [0, 1 << 30])
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_of_bitsandbytes_keeps_its_bits(nested, window, tmp_path):
    expected = save_four_bits(llama().bfloat16(), tmp_path / "model.safetensors", nested=nested)
    config = engine_config(tmp_path, dtype="bf16", frozen_dtype="nf4", **PLACES["host"])
    with infinity.init(config, window=window):
        base = transformers.LlamaForCausalLM(llama().config).bfloat16()
    infinity.load_safetensors(base, tmp_path / "model.safetensors")
    layers = quantised_layers(base)
    model = adapted(base)
    with infinity.engine_of(model) as engine:
        infinity.AdamW(trainable(model))
        for name, layer in layers.items():
            codes, scales = expected[f"{name}.weight"]
            state = engine.read_state(layer.weight)
            assert torch.equal(state["weight"], codes) and torch.equal(state["scale"], scales), name
            weight = model.state_dict()[f"base_model.model.{name}.base_layer.weight"]
            assert torch.equal(weight, expanded(codes, scales, layer.weight.shape))


@pytest.mark.parametrize("damage", ["absmax", "quant_map", "quant_state"])
def test_a_damaged_checkpoint_of_bitsandbytes_is_refused(damage, tmp_path):
    save_four_bits(llama().bfloat16(), tmp_path / "model.safetensors", nested=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if f".weight.{damage}" in name)
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    infinity.offload(base := llama(), engine_config(tmp_path))
    with pytest.raises(infinity.CheckpointError, match=re.escape(name)):
        infinity.load_safetensors(base, tmp_path / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_adapters_over_a_checkpoint_have_the_losses_of_bitsandbytes(nested, tmp_path):
    pytest.importorskip("bitsandbytes")
    llama().bfloat16().save_pretrained(tmp_path / "whole")
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_use_double_quant": nested}
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
    )
    theirs.save_pretrained(tmp_path / "quantised")
    theirs = adapted(theirs)
    expected = train(theirs, torch.optim.AdamW(trainable(theirs), lr=1e-2))
    with infinity.init(engine_config(tmp_path, dtype="bf16", frozen_dtype="nf4")):
        base = transformers.LlamaForCausalLM(llama().config).bfloat16()
    infinity.load_safetensors(base, tmp_path / "quantised")
    model = adapted(base)
    with infinity.engine_of(model):
        assert train(model, infinity.AdamW(trainable(model), lr=1e-2)) == pytest.approx(expected, rel=2e-3)
