"""Mixtures of experts: losses and weights of plain PyTorch, auxiliary losses, and reads of the experts that tokens have chosen."""

import pytest
import torch
from support.helpers import NVME, assert_equals_reference, plain, training
from torch import nn
from torch.nn import functional as F

import infinity

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, NUM_EXPERTS, NUM_LAYERS, VOCAB = 64, 8, 3, 64


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A module an expert. A token's expert is the best of the router, or, without a router, the remainder of the token's number."""

    def __init__(self, has_router):
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False) if has_router else None
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))

    def forward(self, x, numbers):
        if self.router is None:
            chosen, share = numbers % NUM_EXPERTS, x.new_ones(len(x))
        else:
            share, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            at = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, at, self.experts[number](x[at]) * share[at, None])
        return x + out


class Mixture(nn.Module):
    def __init__(self, has_router=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Experts(has_router) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, numbers):
        x = self.embedding(numbers)
        for layer in self.layers:
            x = layer(x, numbers)
        return F.cross_entropy(self.head(x), numbers.roll(1))


def batches(step, count=3, tokens=5):
    """So few tokens that each step leaves experts without a token, and so without a gradient."""
    return [torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(100 * step + micro)) for micro in range(count)]


def passes(model, step_batches, by_layer):
    """All forward and backward passes of a step."""
    if by_layer:
        infinity.accumulate(model, step_batches, lambda model, batch: model(batch) / len(step_batches))
    else:
        for batch in step_batches:
            (model(batch) / len(step_batches)).backward()


@pytest.mark.long
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("places", [NVME, {"param_tier": "host", "optimizer_state_tier": "host"}, {}], ids=["nvme", "host", "auto"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_experts_without_a_token_are_those_of_plain_pytorch(places, by_layer, clip, tmp_path):
    expected, reference = plain(Mixture)
    options = {"accumulation_steps": 3, "max_grad_norm": clip}
    skipped = 0
    with training(Mixture, tmp_path, options=options, **places) as (model, engine, optimizer):
        for step in range(4):
            passes(expected, batches(step), False)
            skipped += sum(param.grad is None for param in expected.parameters())
            if clip:
                nn.utils.clip_grad_norm_(expected.parameters(), clip)
            reference.step()
            reference.zero_grad()
            passes(model, batches(step), by_layer)
            optimizer.step()
            optimizer.zero_grad()
        if clip:
            for (name, param), other in zip(model.state_dict().items(), expected.state_dict().values()):
                torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-5, msg=name)
        else:
            assert_equals_reference(engine, model, expected, reference)
    assert skipped > 20


@pytest.mark.parametrize("by_layer", [False, True])
def test_only_chosen_experts_are_read_and_updated(by_layer, tmp_path):
    """Without a router, all steps choose two of eight experts. By layer, the micro-batches of a step read them together."""
    weights = 4 * (2 * NUM_LAYERS * 3 * HIDDEN * HIDDEN + 2 * VOCAB * HIDDEN + VOCAB)  # bytes of the chosen experts and all other modules
    numbers = torch.tensor([0, 1, 8, 9, 16, 17])
    config = NVME | {"residency": "none", "chunk_mib": HIDDEN * HIDDEN / (1 << 20)}
    with training(lambda: Mixture(has_router=False), tmp_path, options={"accumulation_steps": 3}, **config) as (model, engine, optimizer):
        for step in range(6):
            if step == 1:
                begin = engine.stats()
            before = engine.stats()["nvme_read_nbytes"]
            passes(model, [numbers, numbers + 8, numbers + 24], by_layer)
            optimizer.step()
            optimizer.zero_grad()
            if step:  # weights for each forward and backward pass, and once more with their moments for the update
                assert engine.stats()["nvme_read_nbytes"] - before <= ((2 if by_layer else 6) + 3) * weights, step
        written = engine.stats()["nvme_write_nbytes"] - begin["nvme_write_nbytes"]
        assert 4 * 3 * weights <= written <= 5.3 * 3 * weights  # weights, momenta and variances of five steps, less what is still in a slot


AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
OF_DEEPSEEK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 2, "topk_group": 1}
MODELS = {
    "Mixtral": {"num_local_experts": 4, **AUXILIARY},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, **AUXILIARY},
    "Qwen2Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, **AUXILIARY},
    "DeepseekV3": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, **OF_DEEPSEEK},
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_experts_and_auxiliary_losses_are_those_of_plain_pytorch(name, by_layer, tmp_path):
    transformers = pytest.importorskip("transformers")

    def make():
        config = getattr(transformers, f"{name}Config")(**SIZES, use_cache=False, **MODELS[name])
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def step(model, optimizer, number):
        def loss_of(model, rows):
            return model(input_ids=rows, labels=rows).loss / 3

        rows = [each.view(2, 20) for each in batches(number, tokens=40)]
        if by_layer and optimizer is not reference:
            losses = infinity.accumulate(model, rows, loss_of)
        else:
            losses = [loss_of(model, each) for each in rows]
            for loss in losses:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    expected, reference = plain(make, options={"lr": 1e-3})
    options = {"lr": 1e-3, "accumulation_steps": 3}
    with training(make, tmp_path, options=options, **NVME, chunk_mib=1 / 64) as (model, engine, optimizer):
        for number in range(3):
            assert step(model, optimizer, number) == pytest.approx(step(expected, reference, number), rel=1e-6)
        assert not by_layer or not engine.stats()["layerwise_unsplit_reasons"]
