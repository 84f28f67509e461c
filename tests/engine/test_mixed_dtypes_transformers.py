"""Published models whose parameters have different dtypes: 20 steps with the bits of the same arithmetic in plain PyTorch."""

import sys

import pytest
import torch
from support.helpers import NVME, ReferenceAdamW, assert_equals_reference, run_micro_batches, states_of, training
from support.ranks import ranks
from support.transformer_cases import DECODER, EXPERTS

import infinity

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 20
VOCAB = 96


def in_fp32(module):
    """Mixtures of experts call their routers in this way: weight and input are fp32."""
    module.float()
    module.register_forward_pre_hook(lambda module, args: (args[0].float(), *args[1:]))


def mixtral():
    config = transformers.MixtralConfig(**EXPERTS, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config).bfloat16()
    for layer in model.model.layers:
        in_fp32(layer.mlp.gate)
    return model


def deepseek():
    """DeepSeek-V3's gate computes in fp32 for any weight dtype. Here the weight is fp32, as in the published model."""
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    options = DECODER | {"num_key_value_heads": 4, "head_dim": 8} | ranks | experts
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**options, moe_intermediate_size=32, num_hidden_layers=3)).bfloat16()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.float()
    return model


def llama_with_fp32_norms():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, num_hidden_layers=3)).bfloat16()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            in_fp32(module)
            module.register_forward_hook(lambda module, args, output: output.bfloat16())
    return model


def llama_with_adapters():
    sys.modules.setdefault("torchvision", None)
    peft = pytest.importorskip("peft")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, num_hidden_layers=3)).bfloat16()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


MODELS = {"Mixtral": mixtral, "DeepSeek-V3": deepseek, "Llama, norms": llama_with_fp32_norms, "Llama, adapters": llama_with_adapters}


def tokens(step):
    return torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(step))


def logits_of(model, x):
    return model(input_ids=x, use_cache=False).logits


def loss_of(logits, targets):
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(model, optimizer, steps, by_layer=False, every=1):
    for step in steps:
        if by_layer:
            batches = [tokens(step)] * every
            infinity.accumulate(model, batches, lambda model, x: loss_of(logits_of(model, x)[:, :-1], x[:, 1:]) / every)
        else:
            for _ in range(every):
                x = tokens(step)
                (loss_of(logits_of(model, x)[:, :-1], x[:, 1:]) / every).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(make, steps):
    torch.manual_seed(0)
    model = make()
    optimizer = ReferenceAdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3, dtype=None)
    train(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_have_the_bits_of_plain_pytorch(name, tmp_path):
    reference, optimizer = plain(MODELS[name], STEPS)
    with training(MODELS[name], tmp_path, dtype="bf16", options={"lr": 1e-3}, **NVME) as (model, engine, ours):
        assert len({param.dtype for param in model.parameters()}) == 2
        train(model, ours, range(STEPS))
        assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in reference.named_parameters()}
        assert_equals_reference(engine, model, reference, optimizer)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("steps", [2, pytest.param(STEPS, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_layer_wise_accumulation_has_the_bits_of_the_ordinary_loop(name, steps, tmp_path):
    found = []
    for by_layer in (False, True):
        options = {"lr": 1e-3, "accumulation_steps": 2}
        with training(MODELS[name], tmp_path / str(by_layer), dtype="bf16", options=options, **NVME) as (model, engine, ours):
            train(model, ours, range(2 * steps), by_layer=by_layer, every=2)
            found.append(states_of(engine, model))
    for param, states in found[0].items():
        for key, value in states.items():
            assert torch.equal(value, found[1][param][key]), (param, key)


def on_ranks(folder, name, steps, save=None, load=None):
    rank, _ = ranks()
    with training(MODELS[name], folder.with_name(f"{folder.name}-{rank}"), dtype="bf16", options={"lr": 1e-3}, **NVME) as (model, engine, ours):
        if load is not None:
            infinity.load(load, model, ours)
        train(model, ours, steps)
        if save is not None:
            infinity.save(save, model, ours)
        return {param: {key: value.float().numpy() for key, value in states.items()} for param, states in states_of(engine, model).items()}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("steps", [4, pytest.param(STEPS, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_resumes_the_checkpoint_of_two_ranks(name, steps, worlds, tmp_path):
    worlds(2).run(on_ranks, tmp_path / "two", name, range(steps // 2), save=tmp_path / "checkpoint")
    resumed = on_ranks(tmp_path / "one", name, range(steps // 2, steps), load=tmp_path / "checkpoint")
    expected = on_ranks(tmp_path / "all", name, range(steps))
    for param, states in expected.items():
        for key, value in states.items():
            assert (value == resumed[param][key]).all(), (param, key)
