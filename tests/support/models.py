"""Small models, each with one property that an engine must support. All except Chain take the float tensors of `inputs(model)`."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.model.gpt import GPT

H = 24  # a width that is no multiple of an alignment


def tiny_gpt(**options):
    return GPT(hidden=32, layers=2, heads=4, vocab=61, seq=12, **options)


class Model(nn.Module):
    """`build(self)` makes the modules, `run(self, x)` is the forward pass. The loss is the mean square of the float outputs."""

    def __init__(self, build, run, shape=(3, H)):
        super().__init__()
        build(self)
        self.run = run
        self.shape = shape

    def forward(self, x):
        return self.run(self, x)


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Blocks of one class between an embedding and a head; takes [rows, tokens] below 50, returns [rows, tokens, 50]."""

    def __init__(self, hidden=32, num_blocks=5):
        super().__init__()
        self.first, self.last = nn.Embedding(50, hidden), nn.Linear(hidden, 50)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(num_blocks))

    def forward(self, x):
        for segment in self.segments():
            x = segment(x)
        return x

    def segments(self):
        return [self.first, *self.blocks, self.last]


def mlp(depth=4):
    def build(self):
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(depth))

    def run(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    return Model(build, run)


def attention():
    """nn.MultiheadAttention reads the weight of a child without calling the child."""

    def build(self):
        self.first = nn.Linear(H, H)
        self.attention = nn.MultiheadAttention(H, 4, batch_first=True)
        self.last = nn.Linear(H, H)

    def run(self, x):
        x = self.first(x)
        return self.last(self.attention(x, x, x, need_weights=False)[0])

    return Model(build, run, (2, 5, H))


def tied_head():
    """The root module uses the weight of a child, the embedding."""

    def build(self):
        self.token = nn.Embedding(40, H)
        self.layer = nn.Linear(H, H)

    def run(self, x):
        tokens = (x.flatten().abs() * 100).long() % 40
        return F.linear(torch.tanh(self.layer(self.token(tokens))), self.token.weight)

    return Model(build, run)


def tied_module():
    """Two modules own one parameter."""

    def build(self):
        self.token = nn.Embedding(40, H)
        self.layer = nn.Linear(H, H)
        self.head = nn.Linear(H, 40, bias=False)
        self.head.weight = self.token.weight

    def run(self, x):
        tokens = (x.flatten().abs() * 100).long() % 40
        return self.head(torch.tanh(self.layer(self.token(tokens))))

    return Model(build, run)


def repeated():
    """One module is called three times."""

    def build(self):
        self.first, self.again, self.last = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)

    def run(self, x):
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.last(x)

    return Model(build, run)


def shared_by_reentrant():
    """One layer is in three reentrant checkpoints: the gradient arrives in three parts."""

    def build(self):
        self.first, self.shared, self.own = nn.Linear(H, H), nn.Linear(H, H), nn.ModuleList(nn.Linear(H, H) for _ in range(3))

    def run(self, x):
        x = self.first(x)
        for own in self.own:
            x = checkpoint(lambda y, own=own: torch.tanh(own(self.shared(y))), x, use_reentrant=True)
        return x

    return Model(build, run)


def checkpointed(use_reentrant):
    def build(self):
        self.first = nn.Linear(H, H)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Linear(2 * H, H)) for _ in range(3))

    def run(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return Model(build, run)


def nested_checkpoint():
    def build(self):
        self.first = nn.Linear(H, H)
        self.blocks = nn.ModuleList(nn.Linear(H, H) for _ in range(4))

    def run(self, x):
        def outer(x, first, second):
            x = checkpoint(first, x, use_reentrant=False)
            return torch.tanh(checkpoint(second, x, use_reentrant=False))

        x = self.first(x)
        for i in (0, 2):
            x = checkpoint(outer, x, self.blocks[i], self.blocks[i + 1], use_reentrant=False)
        return x

    return Model(build, run)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict


class InContainers(nn.Module):
    """Every module returns the output in another kind of container."""

    def __init__(self):
        super().__init__()
        make = lambda wrap: Model(lambda m: m.add_module("linear", nn.Linear(H, H)), lambda m, x: wrap(m.linear(x)))
        self.one = make(lambda y: (y, None))
        self.two = make(lambda y: {"y": [y], "n": 3})
        self.three = make(lambda y: Output(y, {"more": (y * 2,)}))
        self.shape = (3, H)

    def forward(self, x):
        x = self.one(x)[0]
        x = self.two(x)["y"][0]
        out = self.three(x)
        return Output(out.hidden, {"more": out.extra["more"][0]})


def lstm():
    def build(self):
        self.lstm = nn.LSTM(H, H, num_layers=2, batch_first=True)
        self.last = nn.Linear(H, H)

    return Model(build, lambda self, x: self.last(self.lstm(x)[0]), (2, 5, H))


def convolution():
    def build(self):
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())

    return Model(build, lambda self, x: self.net(x), (2, 3, 8, 8))


def max_norm():
    """An embedding that changes the weight in forward."""

    def build(self):
        self.token = nn.Embedding(40, H, max_norm=0.5)
        self.last = nn.Linear(H, H)

    return Model(build, lambda self, x: self.last(self.token((x.flatten().abs() * 100).long() % 40)))


def weight_norm():
    def build(self):
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(H, H))
        self.last = nn.Linear(H, H)

    return Model(build, lambda self, x: self.last(torch.tanh(self.first(x))))


def spectral_norm():
    def build(self):
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(H, H))
        self.last = nn.Linear(H, H)

    return Model(build, lambda self, x: self.last(torch.tanh(self.first(x))))


def old_weight_norm():
    def build(self):
        self.first = nn.utils.weight_norm(nn.Linear(H, H))
        self.last = nn.Linear(H, H)

    return Model(build, lambda self, x: self.last(torch.tanh(self.first(x))))


def parameter_list():
    """Parameters in a list and in a dict, which the parent indexes."""

    def build(self):
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(H, H) / H) for _ in range(3))
        self.more = nn.ParameterDict({"scale": nn.Parameter(torch.ones(H)), "shift": nn.Parameter(torch.zeros(H))})

    def run(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.more["scale"] + self.more["shift"]

    return Model(build, run)


def scalars():
    """Parameters of one element, with and without a dimension."""

    def build(self):
        self.first = nn.Linear(H, H)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))

    return Model(build, lambda self, x: self.first(x) * self.scale + self.shift)


def buffers():
    def build(self):
        self.first = nn.Linear(H, H)
        self.register_buffer("seen", torch.zeros(H))
        self.register_buffer("calls", torch.tensor(0))

    def run(self, x):
        y = self.first(x)
        self.seen = self.seen * 0.9 + y.detach().mean(0)
        self.calls += 1
        return y + self.seen

    return Model(build, run)


def deepcopied():
    encoder = nn.TransformerEncoderLayer(H, 4, 2 * H, dropout=0.1, batch_first=True)

    def build(self):
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)

    return Model(build, lambda self, x: self.encoder(x), (2, 5, H))


class Stash(torch.autograd.Function):
    """Keeps the weight on ctx, out of reach of saved-tensor hooks."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.t() @ x


class StashLinear(nn.Linear):
    def forward(self, x):
        return Stash.apply(x, self.weight)


def stashing():
    def build(self):
        self.layers = nn.Sequential(nn.Linear(H, H), StashLinear(H, H, bias=False), nn.Tanh(), nn.Linear(H, H))

    return Model(build, lambda self, x: self.layers(x))


def root_parameters():
    """The root module has own parameters and children with parameters."""

    def build(self):
        self.weight = nn.Parameter(torch.randn(H, H) / H)
        self.layer = nn.Linear(H, H)

    return Model(build, lambda self, x: self.layer(torch.tanh(x @ self.weight)) @ self.weight)


def unused():
    """One layer is never called, another only for batches of 4."""

    def build(self):
        self.first, self.never, self.sometimes, self.last = (nn.Linear(H, H) for _ in range(4))

    def run(self, x):
        x = self.first(x)
        if x.shape[0] == 4:
            x = torch.tanh(self.sometimes(x))
        return self.last(x)

    return Model(build, run)


def large_layers():
    """Parameters much larger than a chunk, and a bilinear form of three dimensions."""

    def build(self):
        self.wide, self.back = nn.Linear(H, 40 * H), nn.Linear(40 * H, H)
        self.bilinear = nn.Bilinear(H, H, H)

    def run(self, x):
        x = self.back(torch.tanh(self.wide(x)))
        return self.bilinear(x, x)

    return Model(build, run)


TRAITS = {
    "mlp": mlp,
    "attention": attention,
    "tied_head": tied_head,
    "tied_module": tied_module,
    "repeated": repeated,
    "shared_by_reentrant": shared_by_reentrant,
    "checkpoint_reentrant": lambda: checkpointed(True),
    "checkpoint": lambda: checkpointed(False),
    "nested_checkpoint": nested_checkpoint,
    "containers": InContainers,
    "lstm": lstm,
    "convolution": convolution,
    "max_norm": max_norm,
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "old_weight_norm": old_weight_norm,
    "parameter_list": parameter_list,
    "scalars": scalars,
    "buffers": buffers,
    "deepcopied": deepcopied,
    "stashing": stashing,
    "root_parameters": root_parameters,
    "unused": unused,
    "large_layers": large_layers,
}


def inputs(model, step):
    """Inputs for a model of TRAITS in a step. The first dimension is 4 in every third step, else 3."""
    shape = (4 if step % 3 == 0 else 3, *model.shape[1:])
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def loss_of(output):
    from infinity.engine.autograd.trees import tensors_in

    return sum(tensor.float().square().mean() for tensor in tensors_in(output) if tensor.is_floating_point())


def tokens(step, micro=0, vocab=61, batch=3, seq=12):
    generator = torch.Generator().manual_seed(1000 * step + micro)
    rows = torch.randint(vocab, (batch, seq + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def gpt_step(model, optimizer, step, accumulate=1):
    for micro in range(accumulate):
        loss = model(*tokens(step, micro)) / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def gpt_step_by_layer(model, optimizer, step, num_micro):
    """As `gpt_step`, with infinity.accumulate. Returns the loss of each micro-batch."""
    batches = [tokens(step, micro) for micro in range(num_micro)]
    losses = infinity.accumulate(model, batches, lambda model, batch: model(*batch) / num_micro)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item() for loss in losses]
