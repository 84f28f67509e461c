"""Device bytes of gradients on their way to host memory: each byte counts once, until its memory is free."""

import threading

import pytest
from support.helpers import training
from support.models import tiny_gpt, tokens

import infinity
from infinity.tiers.bytes_in_flight import BytesInFlight
from infinity.tiers.gradient_memory import GradientMemory
from infinity.tiers.span_state import DeviceTier


@pytest.mark.parametrize("is_booked", [False, True])
def test_bytes_count_once_and_never_twice_or_not_at_all(is_booked):
    tier, held = DeviceTier(0), []
    tier.book(64 if is_booked else 0)  # such as a buffer before its reduction
    flight = BytesInFlight(100, tier, lane=None, events=None, failure=None)
    tier.before_change = lambda: held.append(tier.held_nbytes)
    flight.add(64, is_booked=is_booked)
    assert (tier.held_nbytes, flight.nbytes) == (64, 64)
    flight.add(-64)
    assert (tier.held_nbytes, flight.nbytes) == (0, 0)
    assert held == ([64] if is_booked else [0, 64]), "no interval without the bytes"


@pytest.mark.few(1)
@pytest.mark.parametrize("device_memory", ["96KiB", "256KiB"])
def test_a_sum_that_has_left_the_device_is_no_longer_counted(device_memory, monkeypatch, tmp_path):
    """The lane that copies the sum to host memory gives its bytes back, and not the training thread at the next segment."""
    threads, free = [], GradientMemory.free_left
    monkeypatch.setattr(GradientMemory, "free_left", lambda self, shard: (threads.append(threading.current_thread().name), free(self, shard)))
    options = {"accumulation_steps": 3, "max_grad_norm": 0.5}
    places = {"param_tier": "host", "optimizer_state_tier": "host", "device_memory": device_memory}
    with training(tiny_gpt, tmp_path, options=options, **places) as (model, engine, optimizer):
        for step in range(3):
            infinity.accumulate(model, [tokens(step, micro) for micro in range(3)], lambda model, batch: model(*batch) / 3)
            optimizer.step()
            optimizer.zero_grad()
            engine.gradients.drain()
            engine.updater.drain()
            assert engine.tier.other_nbytes == 0
    assert len(threads) > 9 and set(threads) == {"infinity-gc"}
