"""The places of a chunk's gradient, see [Note: places of a gradient] in gradient_state.py."""

import itertools

import pytest
import torch
from support.helpers import assert_moves, training
from support.models import inputs, mlp

from infinity.tiers.gradient_state import _GRADIENT_MOVES, DeviceShard, GradientPlace, GradientState

ABSENT, ON_DEVICE, OFFLOADING, OFFLOADED = GradientPlace


@pytest.mark.parametrize("before, after", list(itertools.product(GradientPlace, repeat=2)))
def test_a_gradient_moves_only_as_its_table_allows(before, after):
    gradient = GradientState()
    message = "a gradient is {after} after it was {before}"
    assert_moves(gradient, "place", _GRADIENT_MOVES, gradient.become, before, after, message)


def stays_here(gradient):
    return gradient.stays and not gradient.is_offloaded


def test_a_gradient_that_stays_leaves_the_device_with_its_update():
    gradient = GradientState()
    gradient.stay()
    assert stays_here(gradient) and not gradient.is_there
    gradient.arrive(on_device=True)
    gradient.arrive(on_device=True)
    assert stays_here(gradient) and gradient.is_there
    gradient.offload()
    assert not stays_here(gradient) and not gradient.is_there
    gradient.arrive(on_device=False)
    assert not stays_here(gradient) and gradient.is_there
    gradient.clear()
    assert stays_here(gradient) and not gradient.is_there


def test_a_gradient_in_host_memory_stays_from_the_next_step_on():
    gradient = GradientState()
    gradient.arrive(on_device=False)
    gradient.stay()
    assert not stays_here(gradient)
    gradient.clear()
    assert stays_here(gradient)


def test_a_gradient_that_was_copied_to_the_device_stays_at_once():
    gradient = GradientState()
    gradient.arrive(on_device=False)
    gradient.stay_here()
    assert stays_here(gradient) and gradient.is_there


def test_the_end_of_a_stay_hands_out_the_device_memory():
    gradient = GradientState()
    assert gradient.leave() == (None, False)
    gradient.stay()
    shard = gradient.device_shard = DeviceShard(torch.zeros(3))
    gradient.arrive(on_device=True)
    assert gradient.leave() == (shard, True)
    assert gradient.place is OFFLOADING and gradient.device_shard is None and not gradient.stays
    assert gradient.leave() == (None, False)


@pytest.mark.parametrize("home, places", [("host", [OFFLOADED, ABSENT]), ("device", [ON_DEVICE, ABSENT])])
def test_a_step_takes_a_gradient_through_its_places(home, places, tmp_path, monkeypatch):
    moves = []
    become = GradientState.become
    monkeypatch.setattr(GradientState, "become", lambda self, place: (become(self, place), moves.append((self, place))))
    with training(lambda: mlp(4), tmp_path, param_tier=home, optimizer_state_tier=home) as (model, engine, optimizer):
        for _ in range(3):
            model(inputs(model, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        for chunk in engine.registry.chunks:
            assert [place for gradient, place in moves if gradient is chunk.gradient] == 3 * places
