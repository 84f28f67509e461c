"""Steps of several micro-batches, layer by layer and as in an ordinary loop, and models with unusual values between blocks."""

import itertools
import threading

import torch
import torch.nn.functional as F
from support.helpers import NVME, assert_nothing_held, assert_same_states, states_of, training
from support.models import Block, Chain
from torch import nn

import infinity
from infinity.optim.loss_scale import LossScale

SIZES = [3, 1, 4, 2, 3]  # rows of each micro-batch, repeated for more than five


def tokens(step, n=3):
    generator, sizes = torch.Generator().manual_seed(step), itertools.islice(itertools.cycle(SIZES), n)
    return [(torch.randint(50, (rows, 7), generator=generator), torch.randint(50, (rows, 7), generator=generator)) for rows in sizes]


def loss_of(model, batch):
    x, y = batch
    output = model(x)
    return F.cross_entropy(output.float().flatten(0, 1), y.flatten()) / 3


def one_step(model, batches, loss, by_layer):
    if by_layer:
        before = {thread.ident for thread in threading.enumerate()}
        losses = [value.item() for value in infinity.accumulate(model, batches, loss)]
        begun = {thread.name for thread in threading.enumerate() if thread.ident not in before}
        assert len(begun - {"infinity-activations", "infinity-activations-cn"}) <= 1, begun  # the engine may have started another thread
        return losses
    losses = []
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        losses.append(value.item())
    return losses


def run(directory, by_layer, *, make=Chain, batches=tokens, loss=loss_of, n=3, num_steps=3, **config):
    """Returns losses, states and buffers after some steps, and the bytes that the last step read from NVMe."""
    options = {"accumulation_steps": n} | config.pop("options", {})
    losses = []
    with training(make, directory, options=options, **config) as (model, engine, optimizer):
        for step in range(num_steps):
            begin = engine.stats()["nvme_read_nbytes"]
            losses += one_step(model, batches(step, n), loss, by_layer)
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
            assert_nothing_held(engine)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return losses, states_of(engine, model), buffers, engine.stats()["nvme_read_nbytes"] - begin


def assert_as_the_ordinary_loop(directory, **how):
    losses, states, buffers, _ = run(directory, True, **how)
    expected_losses, expected_states, expected_buffers, _ = run(directory, False, **how)
    assert losses == expected_losses
    assert_same_states(states, expected_states)
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected_buffers.items())


PLACES = {
    "nvme": NVME,
    "host": {"param_tier": "host", "optimizer_state_tier": "host"},
    "device": {"param_tier": "device", "optimizer_state_tier": "device"},
    "states on nvme": {"param_tier": "host", "optimizer_state_tier": "nvme"},
    "as it comes": {},
}


def scaled(dtype):
    return {"options": {"loss_scale": LossScale(initial=256.0)}} if dtype == "fp16" else {}


class Odd(nn.Module):
    """Unusual uses of blocks: a value of the first layer after each block, a list of outputs, a tensor as keyword argument.
    Also a frozen block, an unused block, a block that is called twice, and tied weights."""

    def __init__(self, hidden=32):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, hidden), nn.Linear(hidden, 50, bias=False)
        self.blocks = nn.ModuleList(Gated(hidden) for _ in range(5))
        self.bias, self.norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.tail = nn.ModuleList(Block(hidden) for _ in range(2))
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        x = first = self.embed(x)
        bias, found = self.bias(first.mean(1, keepdim=True)), []
        for number in (0, 1, 2, 4, 2):
            x, bias = self.blocks[number](x, bias=bias)
            found.append(x)
            x = x + 0.1 * first
        x = self.norm(torch.stack(found).mean(0) + x)
        for block in self.tail:
            x = block(x)
        return self.head(x + bias)


class Gated(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.block = Block(hidden)

    def forward(self, x, *, bias):
        return self.block(x) * torch.sigmoid(bias), bias


class Box:
    """An object of the program that holds the output of the first layer or of a block."""


class Boxed(Chain):
    def __init__(self, made_by):
        super().__init__(num_blocks=6)
        self.made_by = made_by
        self.blocks[4] = Looking(32)

    def forward(self, x):
        box = Box()
        for number, segment in enumerate(self.segments()):
            x = segment(x, box) if number == 5 else segment(x)
            if number == self.made_by:
                box.kept = x
        return x


class Looking(Block):
    def forward(self, x, box):
        return super().forward(x) + box.kept


class Stashing(Chain):
    """Keeps a value in an attribute, which a block reads. kind: the type of the value."""

    def __init__(self, kind):
        super().__init__(num_blocks=4)
        self.kind = kind
        self.blocks[2] = Reading(32)
        self.blocks[2].model = [self]
        self.found = []

    def forward(self, x):
        x = self.first(x)
        if self.kind == "tensor":
            self.kept = 0.1 * x
        elif self.kind == "mask":
            self.kept = (x > 0).detach().float()
        elif self.kind == "list":
            self.found[:] = [x.square()]
        else:
            self.kept = float(len(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Reading(Block):
    def forward(self, x):
        (model,) = self.model
        return super().forward(x) + (model.found[0] if model.kind == "list" else model.kept)


class Changing(Block):
    def forward(self, x):
        return super().forward(x.mul_(2))


def changing():
    model = Chain()
    model.blocks[2] = Changing(32)
    return model
