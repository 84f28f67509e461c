"""A plain GPT and its data: the model of the command line.

An ordinary PyTorch model that does not know the engine, and that the engine does not know. Text is read as bytes, so a vocabulary of 256
needs no tokenizer.
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import ConfigError
from infinity.ordinary_file import open_ordinary

INIT_STD = 0.02


class GPT(nn.Module):
    """Pre-norm decoder of `layers` blocks with learned positions.

    checkpoint_activations: keep only each block's input and compute the block again in backward. tie: the output layer is the token
    embedding. Source: Radford et al. 2019, section 2.3.
    """

    def __init__(self, hidden, layers, heads, vocab, seq, checkpoint_activations=False, tie=False):
        super().__init__()
        self.seq = seq
        self.checkpoint_activations = checkpoint_activations
        self.token = _normal(nn.Embedding(vocab, hidden))
        self.position = _normal(nn.Embedding(seq, hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads, residual_std=INIT_STD / (2 * layers) ** 0.5) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = _normal(nn.Linear(hidden, vocab, bias=False))
        if tie:
            self.head.weight = self.token.weight

    def forward(self, tokens, targets=None):
        """tokens, targets: int64 [batch, length], length <= seq. Returns logits [batch, length, vocab] in the model's dtype or, given
        targets, their mean cross entropy in fp32.
        """
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to the unnormalised input."""

    def __init__(self, hidden, heads, residual_std):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, residual_std)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            _normal(nn.Linear(hidden, 4 * hidden)),
            nn.GELU(),
            _normal(nn.Linear(4 * hidden, hidden), residual_std),
        )

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention of `heads` heads over [batch, length, hidden]."""

    def __init__(self, hidden, heads, residual_std):
        super().__init__()
        self.heads = heads
        self.qkv = _normal(nn.Linear(hidden, 3 * hidden))
        self.projection = _normal(nn.Linear(hidden, hidden), residual_std)

    def forward(self, x):
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(batch, length, hidden))


def _normal(module, std=INIT_STD):
    """Initialise a module directly after construction, so that no later pass over the model is needed."""
    nn.init.normal_(module.weight, std=std)
    if getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)
    return module


class Batches:
    """Micro-batches by number: the same (seed, step, micro) always gives the same tokens, whatever the earlier calls.

    tokens: uint8 [n] to cut sequences from, or None for uniformly random ones below `vocab`. `batch` counts the sequences of all ranks
    together. Each rank gets batch / world of them, so a run on more ranks sees the same data. Raises ConfigError if the ranks cannot
    share the batch equally, or the text is shorter than a sequence plus target.
    """

    def __init__(self, tokens, *, vocab, batch, seq, seed, rank=0, world=1):
        if batch % world:
            raise ConfigError(f"batch={batch} cannot be shared by {world} ranks; use a multiple of {world}")
        if tokens is not None and len(tokens) < seq + 1:
            raise ConfigError(f"data: {len(tokens)} bytes are too few for seq={seq}; give at least {seq + 1}")
        if tokens is not None and vocab < 256:
            raise ConfigError(f"vocab={vocab}: expected at least 256 for text, which is read as bytes")
        self.tokens = tokens
        self.vocab = vocab
        self.batch = batch
        self.seq = seq
        self.seed = seed
        self.rows = slice(rank * (batch // world), (rank + 1) * (batch // world))

    def __call__(self, step, micro=0):
        """The rank's inputs and targets, int64 [batch / world, seq] each, on the CPU."""
        generator = np.random.default_rng([self.seed, step, micro])
        if self.tokens is None:
            rows = generator.integers(self.vocab, size=(self.batch, self.seq + 1))[self.rows]
        else:
            starts = generator.integers(len(self.tokens) - self.seq, size=self.batch)[self.rows]
            rows = self.tokens[starts[:, None] + np.arange(self.seq + 1)]
        rows = torch.from_numpy(rows.astype(np.int64, copy=False))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def read_bytes(paths: Sequence[str | Path]) -> np.ndarray:
    """The files' bytes, concatenated: uint8 [n]. Raises ConfigError naming a file that cannot be read."""
    parts = []
    for path in paths:
        try:
            with open_ordinary(path) as file:
                parts.append(np.fromfile(file, dtype=np.uint8))
        except OSError as error:
            raise ConfigError(f"data: cannot read {path}: {error.strerror or error}; name a readable file") from None
    return np.concatenate(parts)


def standard_library_paths() -> list[Path]:
    """The sources of Python's standard library, sorted: a text that every machine has. Excludes installed packages and the library's own
    tests, which some systems leave out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in sorted(paths) if skipped.isdisjoint(path.parts)]
