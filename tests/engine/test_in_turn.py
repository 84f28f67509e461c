"""Layer-wise steps on a device with room for all weights and gradients: micro-batches run one after the other, because nothing moves again."""

import pytest
import torch
from support.helpers import ScriptedGauge, assert_same_states, run_micro_batches, states_of, training
from support.models import Chain

from infinity.engine.layerwise.layerwise_step import LayerwiseStep
from infinity.engine.memory import activation_meter, allocation_trial
from infinity.engine.memory.division_sizes import DivisionSizes
from infinity.plan import placement as planner
from support.micro_batches import MICROS, loss_of, micro_batches

pytestmark = pytest.mark.usefixtures("one_thread")

FOR_ALL = 400 << 10  # device bytes for all weights, all fp32 gradients and some other states
FOR_SOME = 200 << 10  # not for all gradients
IN_HOST = {"host_memory": "64MiB"}
ON_NVME = {"host_memory": "320KiB"}


@pytest.fixture(autouse=True)
def few_gradients_under_way(monkeypatch):
    """The budgets of these tests are kilobytes."""
    monkeypatch.setattr(planner, "UNDER_WAY_NBYTES", 0)


@pytest.fixture
def gauge(monkeypatch):
    gauge = ScriptedGauge(FOR_ALL)
    monkeypatch.setattr(activation_meter, "SLACK", 0.0)
    monkeypatch.setattr(allocation_trial, "now", lambda: 0.0)  # no division is undone because steps of a busy machine take longer
    monkeypatch.setattr("infinity.engine.engine.gauge_of", lambda device: gauge)
    return gauge


@pytest.fixture
def num_pauses(monkeypatch):
    """The number of pauses of micro-batches in each step so far."""
    counts = []
    init, check = LayerwiseStep.__init__, LayerwiseStep._check

    def begin(self, *args):
        counts.append(0)
        init(self, *args)

    def count(self, micro):
        counts[-1] += not micro.thread.is_over
        check(self, micro)

    monkeypatch.setattr(LayerwiseStep, "__init__", begin)
    monkeypatch.setattr(LayerwiseStep, "_check", count)
    return counts


def train(directory, gauge, *, by_layer=True, sizes=(1,) * 5, max_grad_norm=1.0, **config):
    """Steps whose inputs are repeated `size` times. Returns (losses, states, for each step: whether the next runs one after the other)."""
    options = {"accumulation_steps": MICROS, "max_grad_norm": max_grad_norm}
    losses, found = [], []
    with training(Chain, directory, options=options, dtype="bf16", device_memory=gauge.capacity, **IN_HOST | config) as (model, engine, optimizer):
        gauge.tier = engine.tier
        for step, size in enumerate(sizes):
            gauge.activations = (size - 1) << 16
            batches = [(x.repeat(size, 1), y.repeat(size, 1)) for x, y in micro_batches(step)]
            losses += run_micro_batches(model, batches, loss_of, by_layer)
            optimizer.step()
            optimizer.zero_grad()
            found.append(engine.device_budget.in_turn)
        return losses, states_of(engine, model), found


@pytest.fixture
def expected(gauge, tmp_path):
    """Losses and states of the ordinary loop."""
    return train(tmp_path, gauge, by_layer=False)


def test_micro_batches_run_one_after_the_other_with_the_same_bits(expected, gauge, num_pauses, monkeypatch, tmp_path):
    divisions = []
    hold = DivisionSizes.hold_weights_and_gradients
    monkeypatch.setattr(DivisionSizes, "hold_weights_and_gradients", lambda self: (divisions.append(len(num_pauses)), hold(self))[1])
    losses, states, found = train(tmp_path, gauge)
    assert num_pauses[0] > 0 and num_pauses[1:] == [0] * 4
    assert divisions == [1]  # the first step alone divides the device
    assert losses == expected[0] and found == [True] * 5
    assert_same_states(states, expected[1])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "capacity, config",
    [
        (FOR_ALL, {"max_grad_norm": None}),  # updates begin in the backward pass
        (FOR_ALL, ON_NVME),
        (FOR_SOME, {}),
    ],
    ids=["updates in backward", "states on NVMe", "no room for all gradients"],
)
def test_other_steps_run_by_layer(capacity, config, gauge, num_pauses, tmp_path):
    gauge.capacity = capacity
    _, _, found = train(tmp_path, gauge, **config)
    assert min(num_pauses) > 0 and not any(found)


@pytest.mark.slow
def test_a_step_without_memory_begins_anew_and_later_steps_run_by_layer(expected, gauge, num_pauses, monkeypatch, tmp_path):
    backward = LayerwiseStep._go_back

    def fail_once(self, micro, position):
        if self.is_in_turn and not gauge.failures:
            gauge.failures += 1
            raise torch.OutOfMemoryError
        backward(self, micro, position)

    monkeypatch.setattr(LayerwiseStep, "_go_back", fail_once)
    losses, states, found = train(tmp_path, gauge)
    assert gauge.failures == 1
    assert [number > 0 for number in num_pauses] == [True, False, True, True, True, True]  # the second step begins anew, and all others stay
    assert found == [True] + [False] * 4
    assert losses == expected[0]
    assert_same_states(states, expected[1])


@pytest.mark.slow
def test_inputs_that_grow_bring_steps_by_layer_back(gauge, num_pauses, tmp_path):
    _, _, found = train(tmp_path, gauge, sizes=(1, 1, 4, 4, 1))
    assert found == [True, True, False, False, False]
    assert [number > 0 for number in num_pauses] == [True, False, False, True, True]


@pytest.mark.slow
def test_ordinary_steps_in_between_change_nothing(gauge, num_pauses, tmp_path):
    options = {"accumulation_steps": MICROS, "max_grad_norm": 1.0}
    states = []
    for kinds in ([True, False, True, False, True], [False] * 5):
        with training(Chain, tmp_path, options=options, dtype="bf16", device_memory=gauge.capacity, **IN_HOST) as (model, engine, optimizer):
            gauge.tier = engine.tier
            for step, by_layer in enumerate(kinds):
                run_micro_batches(model, micro_batches(step), loss_of, by_layer)
                optimizer.step()
                optimizer.zero_grad()
            states.append(states_of(engine, model))
            assert engine.device_budget.in_turn is any(kinds)
    assert num_pauses[0] > 0 and num_pauses[1:] == [0, 0]
    assert_same_states(*states)


@pytest.mark.slow
def test_the_reason_is_reported_once(gauge, tmp_path, caplog):
    caplog.set_level("INFO", logger="infinity")
    options = {"accumulation_steps": MICROS, "max_grad_norm": 1.0}
    with training(Chain, tmp_path, options=options, dtype="bf16", device_memory=gauge.capacity, **IN_HOST) as (model, engine, optimizer):
        gauge.tier = engine.tier
        for step in range(3):
            run_micro_batches(model, micro_batches(step), loss_of, True)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.stats()["layerwise_unsplit_reasons"] == ["the device has room for all weights and gradients"]
