"""The engine on a virtual clock: a step takes the time of its slowest part, because transfers and updates hide behind it."""

import pytest
import torch
from support.helpers import NVME, training
from support.simulated_storage import simulated_world
from torch import nn

import infinity
from infinity.engine import build
from infinity.plan.record import GRADIENTS
from infinity.system.threads import now

pytestmark = pytest.mark.usefixtures("one_thread")

MS = 1e-3
NUM_LAYERS, NUM_MICRO, H = 16, 4, 64
OP_S = 2 * MS  # of a layer's forward pass; the backward pass takes twice as long
COMPUTE_S = NUM_LAYERS * 3 * OP_S
PLACES = NVME | {"chunk_mib": 2 * H * H / (1 << 20), "host_memory": "1MiB", "device_memory": "160KiB"}


class Work(torch.autograd.Function):
    """An op that takes virtual time."""

    @staticmethod
    def forward(ctx, x, world):
        ctx.world = world
        world.sleep(OP_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.world.sleep(2 * OP_S)
        return grad, None


class Layer(nn.Module):
    def __init__(self, world):
        super().__init__()
        self.linear, self.world = nn.Linear(H, H, bias=False), world

    def forward(self, x):
        return torch.tanh(Work.apply(self.linear(x), self.world))


def by_layer(model, x):
    infinity.accumulate(model, [(x,)] * NUM_MICRO, lambda model, batch: model(*batch).square().mean())


def in_one_pass(model, x):
    model(x).square().mean().backward()


def play(directory, *, rate=1e12, link_s=MS, steps=5, backward=in_one_pass, **config):
    """(seconds of each step, bytes of the drive in each step). rate: of the drive, bytes/s. link_s: of each copy to the device and back, and
    of each update. A chunk is a layer. Host memory holds all weights and three quarters of the states at a time."""
    with simulated_world(0, rate=rate, latency=lambda: 0.0) as (world, drives):

        def main():
            make = lambda: nn.Sequential(*(Layer(world) for _ in range(NUM_LAYERS)))
            with training(make, directory, **PLACES | config) as (model, engine, optimizer):
                engine.events.before_end = lambda link, *_: (link in ("h2d", "d2h", "update") and world.sleep(link_s)) or now()
                x, seconds, nbytes = torch.randn(2, H), [], []
                for _ in range(steps):
                    start, moved = now(), drives[-1].read_nbytes + drives[-1].write_nbytes
                    backward(model, x)
                    optimizer.step()
                    optimizer.zero_grad()
                    seconds.append(now() - start)
                    nbytes.append(drives[-1].read_nbytes + drives[-1].write_nbytes - moved)
                return seconds, nbytes

        return world.run(main)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_compute_hides_the_drive_and_the_links(update, tmp_path):
    """The drive works in 90 % of the time, and each link in a sixth to a third."""
    _, nbytes = play(tmp_path, update=update)
    seconds, again = play(tmp_path, update=update, rate=nbytes[-1] / (0.9 * COMPUTE_S))
    assert again[-1] <= 1.02 * nbytes[-1]
    assert all(COMPUTE_S < each < 1.04 * COMPUTE_S for each in seconds[2:])


@pytest.mark.slow
def test_a_slow_drive_is_the_only_limit(tmp_path):
    _, nbytes = play(tmp_path)
    rate = nbytes[-1] / (1.7 * COMPUTE_S)
    seconds, found = play(tmp_path, rate=rate, steps=8)
    assert sum(seconds[2:]) < 1.03 * sum(found[2:]) / rate


FEW_SLOTS = {"host_memory": "420KiB"}  # four states at a time, and no home for a gradient


def test_gradients_that_pass_hardly_slow_a_step(tmp_path, monkeypatch):
    """The drive has room for records only. It works in 90 % of the time."""
    with training(lambda: nn.Sequential(*(Layer(None) for _ in range(NUM_LAYERS))), tmp_path, **PLACES | FEW_SLOTS) as (_, engine, _):
        placement = engine.placement
    assert not any(home.is_host for home in placement.homes[GRADIENTS])
    monkeypatch.setattr(build, "room_nbytes", lambda paths: placement.nvme_nbytes - sum(placement.on_nvme[GRADIENTS]))
    _, nbytes = play(tmp_path, **FEW_SLOTS)
    seconds, again = play(tmp_path, rate=nbytes[-1] / (0.9 * COMPUTE_S), **FEW_SLOTS)
    assert again[-1] <= 1.02 * nbytes[-1]
    assert all(each < 1.15 * COMPUTE_S for each in seconds[2:])


@pytest.mark.slow
def test_a_step_by_layer_takes_the_time_of_compute_or_of_the_drive(tmp_path):
    """Each micro-batch computes each layer once more in backward."""
    options, compute_s = {"options": {"accumulation_steps": NUM_MICRO}, "backward": by_layer} | FEW_SLOTS, NUM_MICRO * 4 / 3 * COMPUTE_S
    _, nbytes = play(tmp_path, **options)
    for share in (0.9, 2.5):
        rate = nbytes[-1] / (share * compute_s)
        seconds, found = play(tmp_path, rate=rate, **options)
        assert sum(seconds[2:]) < 1.1 * sum(max(compute_s, moved / rate) for moved in found[2:])


@pytest.mark.slow
def test_a_slow_link_to_the_device_is_the_only_limit(tmp_path):
    """A layer is copied twice a step at most: for the forward and for the backward pass."""
    seconds, _ = play(tmp_path, link_s=5 * MS)
    assert all(each < 1.08 * 2 * NUM_LAYERS * 5 * MS for each in seconds[2:])


def test_the_first_step_without_a_plan_takes_longer(tmp_path):
    seconds, _ = play(tmp_path)
    assert seconds[0] > 1.2 * seconds[1]
