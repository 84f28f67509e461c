"""Random models, each made from a seed: stacks of random blocks, for tests that compare the engine with plain PyTorch."""

import random

import torch
import torch.nn.functional as F
from support.models import Block
from torch import nn

from infinity.model.recompute import checkpoint

VOCAB = 37


class Attention(nn.Module):
    def __init__(self, hidden, draw):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, 1, batch_first=True, bias=draw.random() < 0.5)

    def forward(self, x, step):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Convolution(nn.Module):
    def __init__(self, hidden, draw):
        super().__init__()
        self.layer = nn.Conv1d(hidden, hidden, 3, padding=1, bias=draw.random() < 0.5)

    def forward(self, x, step):
        return x + torch.tanh(self.layer(x.transpose(1, 2)).transpose(1, 2))


class Experts(nn.Module):
    """The batch decides which experts run."""

    def __init__(self, hidden, draw):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(draw.choice([2, 3])))

    def forward(self, x, step):
        return x + self.experts[int(x.detach().float().sum().abs() * 100) % len(self.experts)](x)


class Sometimes(nn.Module):
    """Runs in some steps only."""

    def __init__(self, hidden, draw):
        super().__init__()
        self.layer, self.period = nn.Linear(hidden, hidden), draw.choice([2, 3])

    def forward(self, x, step):
        return x if step % self.period else x + torch.sigmoid(self.layer(x))


class Twice(nn.Module):
    def __init__(self, hidden, draw):
        super().__init__()
        self.layer = nn.Linear(hidden, hidden)

    def forward(self, x, step):
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Direct(nn.Module):
    """Has own parameters, one of them a scalar."""

    def __init__(self, hidden, draw):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(hidden, hidden) / hidden), nn.Parameter(torch.ones(()))

    def forward(self, x, step):
        return x + (x @ self.weight) * self.scale


class Plain(nn.Module):
    def __init__(self, hidden, draw):
        super().__init__()
        self.inner = Block(hidden)

    def forward(self, x, step):
        return self.inner(x)


KINDS = [Attention, Convolution, Experts, Sometimes, Twice, Direct, Plain, Plain]


class Stack(nn.Module):
    """An embedding, random blocks and a head. Takes [rows, tokens] below VOCAB and the number of the step; returns the logits.

    At least `same` blocks have the same class.
    """

    def __init__(self, seed, same=0):
        super().__init__()
        draw = random.Random(seed)
        hidden = draw.choice([1, 3, 8, 17, 24, 33])
        kinds = [draw.choice(KINDS)] * same + [draw.choice(KINDS) for _ in range(draw.randrange(1, 5))]
        draw.shuffle(kinds)
        self.first = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(kind(hidden, draw) for kind in kinds)
        self.last = nn.Linear(hidden, VOCAB, bias=draw.random() < 0.5)
        self.checkpointed = {index for index in range(len(kinds)) if draw.random() < 0.2}
        if draw.random() < 0.3:
            self.last.weight = self.first.weight
        for block in self.blocks:
            if draw.random() < 0.15:
                block.requires_grad_(False)

    def forward(self, x, step=0):
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, step) if index in self.checkpointed else block(x, step)
        return self.last(x)


def batch(seed):
    """(rows of tokens, next token of each)."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = 1 + seed % 3, 1 + seed % 7
    return torch.randint(VOCAB, (rows, length), generator=generator), torch.randint(VOCAB, (rows, length), generator=generator)


def loss_of(logits, targets, parts):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / parts
