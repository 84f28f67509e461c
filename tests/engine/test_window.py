"""Steps with any number of backward passes, marked by `infinity.no_sync`, have the results of plain PyTorch."""

import contextlib

import pytest
import torch
from support.helpers import NVME, training
from support.models import inputs, loss_of, mlp

import infinity
from infinity.engine.steps.passes_per_step import PassesPerStep
from infinity.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = [3, 3, 3, 1, 1, 5, 5, 2, 3]


def run(model, optimizer, no_sync, seen=lambda: None):
    """Losses of all passes, and the values of `seen` before each step."""
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
def test_steps_of_any_number_of_passes_are_those_of_plain_pytorch(update, tmp_path):
    torch.manual_seed(0)
    plain = mlp()
    expected, _ = run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), lambda model: contextlib.nullcontext())
    with training(mlp, tmp_path, update=update, options={"accumulation_steps": 2}, **NVME) as (model, engine, optimizer):
        begun = lambda: any(chunk.update.is_early for chunk in engine.registry.chunks)
        losses, early = run(model, optimizer, infinity.no_sync, begun)
    assert losses == pytest.approx(expected, rel=1e-5)
    # Updates begin in the last pass, which no_sync makes known. With a single pass, the engine expects a second one: accumulation_steps is 2.
    assert early == [update == "backward" and num_passes > 1 for num_passes in WINDOWS]


def test_a_pass_outside_no_sync_is_the_last_of_its_step():
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


def test_no_sync_without_planned_accumulation_is_refused(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer), pytest.raises(UsageError, match="accumulation_steps=2"):
        with infinity.no_sync(model):
            pass
