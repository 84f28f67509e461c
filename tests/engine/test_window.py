"""Steps of any number of backward passes, told one by one: what plain PyTorch computes."""

import contextlib

import pytest
import torch
from helpers import NVME, training
from models import inputs, loss_of, mlp

import infinity
from infinity.engine.steps.passes_per_step import PassesPerStep
from infinity.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = [3, 3, 3, 1, 1, 5, 5, 2, 3]


def run(model, optimizer, no_sync, seen=lambda: None):
    """Losses of all passes; what was seen before each step."""
    losses, found, step = [], [], 0
    for num_passes in WINDOWS:
        for number in range(num_passes):
            with no_sync(model) if number + 1 < num_passes else contextlib.nullcontext():
                loss = loss_of(model(inputs(model, step)))
                loss.backward()
            losses.append(loss.item())
            step += 1
        found.append(seen())
        optimizer.step()
        optimizer.zero_grad()
    return losses, found


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_windows_of_any_length_are_those_of_plain_pytorch(update, tmp_path):
    torch.manual_seed(0)
    plain = mlp()
    expected, _ = run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), lambda model: contextlib.nullcontext())
    with training(mlp, tmp_path, update=update, options={"accumulation_steps": 2}, **NVME) as (model, engine, optimizer):
        begun = lambda: any(chunk.update.is_early for chunk in engine.registry.chunks)
        losses, early = run(model, optimizer, infinity.no_sync, begun)
    assert losses == pytest.approx(expected, rel=1e-5)
    # The last pass is known for what it is, and updates begin in it, but for one that nothing has told from the first of two.
    assert early == [update == "backward" and num_passes > 1 for num_passes in WINDOWS]


def test_a_pass_outside_is_the_last_and_one_inside_is_not():
    passes = PassesPerStep()
    passes.begin_pass(0)
    assert passes.num_passes(4) == 4
    with passes.no_sync():
        passes.begin_pass(0)
        assert passes.num_passes(4) > 1
    passes.begin_pass(1)
    assert passes.num_passes(4) == 2
    passes.end_step()
    assert passes.num_passes(4) == 4


def test_sums_that_have_no_place_are_refused(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer), pytest.raises(UsageError, match="accumulation_steps=2"):
        with infinity.no_sync(model):
            pass
