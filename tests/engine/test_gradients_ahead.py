"""Gradients that wait on the device for the norm leave for host memory in the backward pass that completes them."""

import pytest
from helpers import ScriptedGauge, assert_same_states, states_of, training
from models import gpt_step, tiny_gpt, tokens

from infinity.engine.memory import activation_meter
from infinity.plan import placement as planner

pytestmark = pytest.mark.usefixtures("one_thread")

PASSES = 3


@pytest.fixture(autouse=True)
def small_budgets(monkeypatch):
    """The budgets of these tests are kilobytes."""
    monkeypatch.setattr(planner, "UNDER_WAY_NBYTES", 0)
    monkeypatch.setattr(activation_meter, "SLACK", 0.0)


@pytest.fixture
def gauge(monkeypatch):
    gauge = ScriptedGauge(600 << 10)
    monkeypatch.setattr("infinity.engine.engine.gauge_of", lambda device: gauge)
    return gauge


def trained(directory, gauge, **options):
    options = {"accumulation_steps": PASSES} | options
    return training(tiny_gpt, directory, options=options, dtype="bf16", device_memory=gauge.capacity, host_memory="64MiB")


def waiting(engine):
    """Gradients that stay on the device until step(), of records in host memory."""
    return [chunk.gradient for chunk in engine.registry.chunks if chunk.gradient.stays and not chunk.on_device]


@pytest.mark.parametrize("clips", [True, False])
def test_only_the_last_pass_before_a_norm_sends_them(clips, gauge, tmp_path):
    with trained(tmp_path, gauge, max_grad_norm=1.0 if clips else None) as (model, engine, optimizer):
        gauge.tier = engine.tier
        gpt_step(model, optimizer, 0, PASSES)
        assert 0 < len(engine.device_budget.promoted) < len(engine.registry.spans) and len(waiting(engine)) > 5
        for chunk in engine.registry.chunks:
            engine.updater.finish(chunk)
        for micro in range(PASSES):
            assert not any(gradient.is_offloaded for gradient in waiting(engine))
            (model(*tokens(1, micro)) / PASSES).backward()
        engine.gradients.drain()
        assert not clips or all(gradient.is_offloaded for gradient in waiting(engine))
        optimizer.step()
        optimizer.zero_grad()
        if not clips:  # the backward pass has updated these records
            assert all(gradient.job is None for gradient in waiting(engine))


def test_states_are_those_without_room_on_the_device(gauge, tmp_path):
    found = []
    for capacity in (600 << 10, 80 << 10):
        gauge.capacity = capacity
        with trained(tmp_path, gauge, max_grad_norm=0.1) as (model, engine, optimizer):
            gauge.tier = engine.tier
            for step in range(4):
                gpt_step(model, optimizer, step, PASSES)
            assert bool(waiting(engine)) is (capacity > 100 << 10)
            found.append((states_of(engine, model), optimizer.grad_norm))
    assert found[0][1] == found[1][1] > 0.1
    assert_same_states(found[0][0], found[1][0])


def test_gradients_that_have_left_are_dropped_as_others(gauge, tmp_path):
    states = []
    for drops in (True, False):
        with trained(tmp_path, gauge, max_grad_norm=1.0) as (model, engine, optimizer):
            gauge.tier = engine.tier
            for step in range(4):
                if drops and step % 2:
                    for micro in range(PASSES):
                        (model(*tokens(100, micro)) / PASSES).backward()
                    optimizer.zero_grad()
                gpt_step(model, optimizer, step, PASSES)
            states.append(states_of(engine, model))
    assert_same_states(*states)
