"""The engine on simulated threads and a simulated drive: each seed is one order of the threads, and no order changes a bit or hangs."""

import random

import pytest
from support.helpers import NVME, assert_same_states, training
from support.models import tiny_gpt
from support.simulated_orders import SMALL, TRAININGS, simulated, train

import infinity
from infinity.engine import build
from infinity.plan.record import GRADIENTS

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = [pytest.param(range(1), id="short"), pytest.param(range(1, 60), id="long", marks=pytest.mark.long)]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("seeds", SEEDS)
def test_no_order_of_threads_changes_a_bit(seeds, name, tmp_path):
    losses, states = train(tmp_path, **TRAININGS[name])
    for seed in seeds:
        (found, after), storage = simulated(lambda: train(tmp_path, **TRAININGS[name]), seed)
        assert found == losses, seed
        assert_same_states(after, states, f"seed {seed}")
        assert storage.num_transfers > 20


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS)
def test_no_order_of_threads_changes_a_bit_if_gradients_pass(seeds, tmp_path, monkeypatch):
    """The drive has no room for gradients."""
    losses, states = train(tmp_path)
    with training(tiny_gpt, tmp_path, **SMALL | NVME) as (_, engine, _):
        placement = engine.placement
    monkeypatch.setattr(build, "room_nbytes", lambda paths: placement.nvme_nbytes - sum(placement.on_nvme[GRADIENTS]))
    for seed in seeds:
        (found, after), storage = simulated(lambda: train(tmp_path), seed)
        assert found == losses, seed
        assert_same_states(after, states, f"seed {seed}")
        assert not any("gradients" in what for what, *_ in storage.log)


@pytest.mark.slow
def test_a_seed_repeats_every_transfer(tmp_path):
    logs = [simulated(lambda: train(tmp_path), seed)[1].log for seed in (3, 3, 4)]
    assert logs[0] == logs[1] != logs[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["backward", "clipped"])
@pytest.mark.parametrize("seeds", SEEDS)
def test_a_failed_transfer_in_any_order_is_an_error_and_no_hang(seeds, name, tmp_path):
    num_transfers = simulated(lambda: train(tmp_path, **TRAININGS[name]), 0)[1].num_transfers
    for seed in seeds:
        failing = random.Random(seed).randrange(num_transfers * 3 // 4)  # another order has another number of transfers
        with pytest.raises(infinity.SwapError, match=f"transfer {failing} fails"):
            simulated(lambda: train(tmp_path, **TRAININGS[name]), seed, lambda number: number == failing)
