"""A mixture of experts whose experts are chosen by step and rank, and its kinds."""

import dataclasses
import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity

H = 32
LAYER_NBYTES = 4 * (H * H + H)


def batch(step, micro=0, rows=4):
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(100 * step + micro))


NUM_EXPERTS, NUM_BLOCKS = 4, 3


@dataclasses.dataclass
class Chosen:
    y: torch.Tensor
    weights: torch.Tensor


class Experts(nn.Module):
    """A router and experts. The experts in `hit` run, each for all rows. The type of the output depends on `kind`."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.router = nn.Linear(H, NUM_EXPERTS)
        if kind == "slices":
            self.up, self.down = (nn.Parameter(torch.randn(NUM_EXPERTS, H, H) / H) for _ in range(2))
        else:
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H)) for _ in range(NUM_EXPERTS))
        if kind == "frozen":
            self.experts[1].requires_grad_(False)

    def forward(self, x, hit):
        weights = torch.softmax(self.router(x), -1)
        y = torch.zeros_like(x)
        for index in hit:
            if self.kind == "slices":
                part = torch.tanh(x @ self.up[index]) @ self.down[index]
            else:
                part = self.experts[index](x)
            y = y + (part if self.kind == "unrouted" else part * weights[:, index, None])
        if self.kind == "dataclass":
            return Chosen(y, weights)
        return (y, weights) if self.kind in ("outputs", "unused output") else y


class Mixture(nn.Module):
    def __init__(self, kind="list", checkpoint=None, leaf=True):
        super().__init__()
        self.kind, self.checkpoint = kind, checkpoint
        self.first, self.last = nn.Linear(H, H), nn.Linear(H, H)
        self.blocks = nn.ModuleList(Experts(kind) for _ in range(NUM_BLOCKS))
        for block in self.blocks if leaf else ():
            infinity.leaf(block)
            if kind == "nested":
                for expert in block.experts:
                    infinity.leaf(expert)
        if leaf and kind == "root":
            infinity.leaf(self)

    def forward(self, x, hits):
        x, extra = self.first(x), 0.0
        for block, hit in zip(self.blocks, hits):
            if self.checkpoint is None:
                output = block(x, hit)
            else:
                output = checkpoint(block, x, hit, use_reentrant=self.checkpoint == "reentrant")
            if self.kind == "dataclass":
                output, extra = output.y, extra + output.weights.square().sum()
            elif self.kind in ("outputs", "unused output"):
                output, weights = output
                extra = extra + (weights.square().sum() if self.kind == "outputs" else 0.0)
            x = x + output
        return self.last(x).square().mean() + extra


def chosen(step, rank, choice):
    """The experts that run in each block."""
    choose = random.Random(1000 * step + rank)
    hits = [sorted(choose.sample(range(NUM_EXPERTS), choose.randint(1, NUM_EXPERTS))) for _ in range(NUM_BLOCKS)]
    if choice == "none on rank 1" and rank == 1 and step % 2:
        hits[1] = []
    if choice == "none on rank 1 from the start" and rank == 1:
        hits[1] = []
    if choice == "the same":
        hits = [[0, 1, 2, 3]] * NUM_BLOCKS
    return hits


ON_RANKS = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none", "chunk_mib": 1 / 512, "host_memory": "16MiB"}
ON_RANKS |= {"device": "cpu", "dtype": "fp32", "device_memory": 64 * LAYER_NBYTES}

MIXTURES = {
    "list": {},
    "slices": {"kind": "slices"},
    "nested": {"kind": "nested"},
    "root": {"kind": "root"},
    "frozen": {"kind": "frozen"},
    "outputs": {"kind": "outputs"},
    "unused output": {"kind": "unused output"},
    "dataclass": {"kind": "dataclass"},
    "checkpointed": {"checkpoint": "plain"},
    "checkpointed slices": {"kind": "slices", "checkpoint": "plain"},
    "reentrant": {"checkpoint": "reentrant"},
    "reentrant slices": {"kind": "slices", "checkpoint": "reentrant"},
}
CHOICES = ["differ", "none on rank 1", "none on rank 1 from the start"]
