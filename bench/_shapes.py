"""Models of transformers by name, with random weights, as (tokens, next tokens) -> loss; and their sizes.

Knows dimensions and the loss. Must not know engines, or speeds.
"""

import contextlib
import dataclasses
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.errors import UsageError

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
SHAPES = {  # values by NAMES, whether the head is the embedding, and other options of the model's configuration
    "tiny": ("Llama", (64, 128, 2, 4, 2, 256), False),
    "1b": ("Llama", (2048, 8192, 16, 32, 8, 128256), True),
    "3b": ("Llama", (3072, 8192, 28, 24, 8, 128256), True),
    "8b": ("Llama", (4096, 14336, 32, 32, 8, 128256), False),
    "14b": ("Llama", (5120, 13824, 48, 40, 8, 152064), False),
    "22b": ("Llama", (6144, 16384, 56, 48, 8, 32768), False),
    "24b": ("Mistral", (5120, 32768, 40, 32, 8, 131072), False, {"head_dim": 128}),
    "32b": ("Qwen2", (5120, 27648, 64, 40, 8, 152064), False),
    "70b": ("Llama", (8192, 28672, 80, 64, 8, 128256), False),
    "qwen7b": ("Qwen2", (3584, 18944, 28, 28, 4, 152064), False),
    "mixtral7b": ("Mixtral", (2048, 5632, 24, 16, 8, 32000), False),  # 8 experts, 2 a token
    "mixtral7b-modules": ("Mixtral", (2048, 5632, 24, 16, 8, 32000), False),  # the same, a module an expert
    "mixtral7b-leaves": ("Mixtral", (2048, 5632, 24, 16, 8, 32000), False),  # the same, the experts of a layer fetched together
    "qwen30b": (  # 8 experts a token
        *("Qwen3Moe", (2048, 6144, 48, 32, 4, 151936), False),
        {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128},
    ),
}


@dataclasses.dataclass(frozen=True)
class Size:
    num_parameters: int
    flops_a_token: int
    """Floating-point operations of forward and backward: 6 per parameter that a token uses, without embeddings and with the head, and causal
    attention."""


def size_of(name: str, sequence: int) -> Size:
    with torch.device("meta"):
        model = Causal(name, sequence).model
    config, num = model.config, sum(param.numel() for param in model.parameters())
    embedding = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    idle = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    if idle:
        num_experts = getattr(config, "num_local_experts", None) or config.num_experts
        idle -= idle * config.num_experts_per_tok // num_experts
    return Size(num, 6 * (num - embedding - idle) + 6 * config.num_hidden_layers * config.hidden_size * sequence)


def vocab_of(name: str) -> int:
    return SHAPES[name][1][NAMES.index("vocab_size")]


def draw_tokens(name: str, batch: int, tokens: int, seed: int) -> torch.Tensor:
    """int64 [batch, tokens + 1] on the CPU. A quarter of the vocabulary gets half of the tokens."""
    drawn = torch.rand(batch, tokens + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn.square() * vocab_of(name)).long()


def make(name: str, sequence: int, loss_tokens: int, device: torch.device) -> nn.Module:
    """The model in bf16 on the device, each time with the same weights."""
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Causal(name, sequence, loss_tokens)
    finally:
        torch.set_default_dtype(usual)


class Expert(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@contextlib.contextmanager
def modules_for_experts():
    """Inside the context, a Mixtral is made with one module an expert."""
    from transformers.models.mixtral import modeling_mixtral

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.gate = modeling_mixtral.MixtralTopKRouter(config)
            sizes = config.hidden_size, config.intermediate_size
            self.experts = nn.ModuleList(Expert(*sizes) for _ in range(config.num_local_experts))

        def forward(self, hidden):
            flat = hidden.flatten(0, -2)
            _, weights, chosen = self.gate(flat)
            out = torch.zeros_like(flat)
            for number in chosen.unique().tolist():
                token, place = (chosen == number).nonzero(as_tuple=True)
                found = self.experts[number](flat[token]) * weights[token, place, None]
                out = out.index_add(0, token, found.to(out.dtype))
            return out.view_as(hidden)

    usual = modeling_mixtral.MixtralSparseMoeBlock
    modeling_mixtral.MixtralSparseMoeBlock = Experts
    try:
        yield
    finally:
        modeling_mixtral.MixtralSparseMoeBlock = usual


class Causal(nn.Module):
    """(tokens [B, S], next tokens [B, S]) -> loss. Logits exist for at most loss_tokens at a time; 0: for all."""

    def __init__(self, name: str, sequence: int, loss_tokens: int = 0):
        super().__init__()
        try:
            import transformers
        except ImportError:
            raise UsageError("these models need transformers: pip install transformers") from None
        family, values, is_tied, *others = SHAPES[name]
        told = {"max_position_embeddings": sequence, "tie_word_embeddings": is_tied, "use_cache": False}
        told |= dict(*others)
        config = getattr(transformers, f"{family}Config")(**dict(zip(NAMES, values)), **told, attn_implementation="sdpa")
        with modules_for_experts() if name.endswith(("-modules", "-leaves")) else contextlib.nullcontext():
            self.model = getattr(transformers, f"{family}ForCausalLM")(config)
        if name.endswith("-leaves"):
            for layer in self.model.model.layers:
                infinity.leaf(layer.mlp)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers is renaming this name
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.loss_tokens = loss_tokens

    def forward(self, tokens, following):
        if not self.loss_tokens:
            return F.cross_entropy(self.model(input_ids=tokens).logits.flatten(0, 1).float(), following.flatten())
        hidden = self.model.model(input_ids=tokens).last_hidden_state.flatten(0, 1)
        pieces = zip(hidden.split(self.loss_tokens), following.flatten().split(self.loss_tokens))
        sums = [infinity.linear_cross_entropy(each, self.model.lm_head, targets, reduction="sum") for each, targets in pieces]
        return torch.stack(sums).sum() / following.numel()
