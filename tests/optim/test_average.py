"""infinity.EMA: the averages of torch's AveragedModel in every placement, and weights that the average replaces for an evaluation."""

import contextlib

import pytest
import torch
from helpers import NVME, assert_same_bits, assert_same_states, states_of, training
from test_ranks import settings as ranks_settings
from test_ranks import worlds  # noqa: F401: a fixture
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import infinity
from infinity.optim import average
from infinity.optim.shard import CODECS

pytestmark = pytest.mark.usefixtures("one_thread")

DECAY = 0.8
HOST = {"param_tier": "host", "optimizer_state_tier": "host", "residency": "none"}
DEVICE = {"param_tier": "device", "optimizer_state_tier": "device"}


class Branches(nn.Module):
    """A model with a frozen layer, a buffer, and a branch that some steps leave out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.sometimes = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x, branch):
        x = self.second(F.relu(self.first(self.frozen(x)))) + self.shift
        return self.sometimes(x) if branch else x


def step(model, optimizer, number, branch=None):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)
    loss = model(x, number % 3 == 2 if branch is None else branch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def reference(num_steps, make_optimizer, decay=DECAY):
    """(averaged values, weights) of plain PyTorch, by name."""
    torch.manual_seed(0)
    model = Branches()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = make_optimizer([param for param in model.parameters() if param.requires_grad])
    for number in range(num_steps):
        step(model, optimizer, number)
        averaged.update_parameters(model)
    return averaged.module.state_dict(), model.state_dict()


@contextlib.contextmanager
def averaging(directory, *, optimizer=infinity.AdamW, make=Branches, decay=DECAY, **options):
    """Yields (model, engine, optimizer, EMA)."""
    found = []

    def make_optimizer(params, **options):
        found.append(infinity.EMA(engine_model[0], decay))
        return optimizer(params, **options)

    engine_model = []

    def make_model():
        engine_model.append(make())
        return engine_model[0]

    with training(make_model, directory, optimizer=make_optimizer, **options) as (model, engine, made):
        yield model, engine, made, found[0]


OPTIMIZERS = {
    "adamw": (infinity.AdamW, lambda params: torch.optim.AdamW(params, lr=1e-2), {}),
    "sgd": (infinity.SGD, lambda params: torch.optim.SGD(params, lr=1e-2), {}),
    "clipped": (infinity.AdamW, lambda params: Clipped(params, lr=1e-2), {"max_grad_norm": 0.5}),
}


class Clipped(torch.optim.AdamW):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.5)
        return super().step(closure)


@pytest.mark.few(6)
@pytest.mark.parametrize("update", ["auto", "deferred"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", [NVME, HOST, DEVICE, {}], ids=["nvme", "host", "device", "auto"])
def test_the_average_is_that_of_torchs_averaged_model(place, optimizer, update, tmp_path):
    kind, plain, options = OPTIMIZERS[optimizer]
    expected, weights = reference(8, plain)
    with averaging(tmp_path, optimizer=kind, options={"lr": 1e-2} | options, update=update, **place) as (model, _, ours, ema):
        for number in range(8):
            step(model, ours, number)
        found, here = ema.state_dict(), model.state_dict()
        assert ema.num_averaged == 8
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(here[name], weights[name], rtol=0, atol=2e-6)
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)
