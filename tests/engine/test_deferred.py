"""Deferred updates: a late update is not lost, repeated, or mixed with values that a forward pass wrote."""

import threading
import time

import pytest
import torch
from support import helpers
from support.helpers import NVME, assert_same_states, states_of, training
from support.models import inputs, loss_of, mlp
from torch import nn

import infinity
from infinity.errors import UsageError
from infinity.plan.record import GRADIENTS, WEIGHTS
from infinity.system.lanes import Job
from infinity.tiers import updates

PLACES = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "update": "deferred", "device": "cpu", "dtype": "fp32"}
BUDGETS = {"device_memory": "64MiB", "host_memory": "64MiB"}


class Renormalising(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.last = nn.Embedding(40, 24, max_norm=0.5), nn.Linear(24, 5)

    def forward(self, x):
        return self.last(self.token(x)).square().mean()


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(400, 400) for _ in range(3))

    def forward(self, x, also_c):
        x = self.b(self.a(x).tanh()).tanh()
        return (self.c(x) if also_c else x).square().mean()


def train(model, optimizer, inputs):
    for arguments in inputs:
        model(*arguments).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_values_written_in_forward_are_kept_by_a_deferred_update(tmp_path):
    """The embedding's span is still on the device at step(). The record takes the renormalised rows, which are then updated."""
    inputs = [(torch.randint(0, 40, (16,), generator=torch.Generator().manual_seed(i)),) for i in range(5)]
    torch.manual_seed(0)
    plain = Renormalising()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), inputs)
    torch.manual_seed(0)
    model = Renormalising()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, **PLACES, **BUDGETS)) as engine:
        train(model, infinity.AdamW(model.parameters(), lr=0.1), inputs)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(engine.read_state(ours)["weight"], theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("max_grad_norm", [None, 1e6])
def test_an_update_that_outlasts_the_next_step_runs_exactly_once(tmp_path, monkeypatch, max_grad_norm):
    """The first update of layer c waits until the next step, in which c has no gradient, is over."""
    flags = (1, 0, 0, 1, 1)
    torch.manual_seed(0)
    model = Conditional()
    config = infinity.Config(swap_dirs=tmp_path, chunk_mib=0.25, **PLACES, **BUDGETS)
    with infinity.offload(model, config) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=0.01, max_grad_norm=max_grad_norm)
        go_on = threading.Event()
        compute = updates.update

        def held(chunk, *arguments, **options):
            if any(engine.registry.params[param].name == "c.weight" for param in chunk.whole_pieces):
                go_on.wait(5)
            return compute(chunk, *arguments, **options)

        monkeypatch.setattr(updates, "update", held)
        train(model, optimizer, [(torch.ones(4, 400), flag) for flag in flags[:1]])
        releases = threading.Timer(0.5, go_on.set)
        releases.start()
        train(model, optimizer, [(torch.ones(4, 400), flag) for flag in flags[1:]])
        releases.join()
        engine.flush()
        for param, expected in ((model.a.weight, 5), (model.b.weight, 5), (model.c.weight, 3)):
            state = engine.registry.find(param)
            assert {chunk.steps[state.index] for chunk in engine.registry.chunks_of(state)} == {expected}


@pytest.mark.long
def test_closing_with_few_slots_finishes_updates_that_have_begun(tmp_path):
    """Host copies that were prefetched for the next ops hold the last slots. No op will use these copies."""
    make = lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)])
    config = {"update": "deferred", "residency": "none", "param_tier": "nvme", "optimizer_state_tier": "nvme"}
    config["host_memory"] = helpers.least_host_memory(make, tmp_path, **config)
    with helpers.training(make, tmp_path, **config) as (model, engine, optimizer):
        for _ in range(5):
            model(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


@pytest.mark.long
def test_gradients_are_dropped_only_after_their_squares_are_summed(tmp_path):
    """Otherwise the sum would read a gradient from NVMe that was never written."""
    make = lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    config = {"update": "deferred", "param_tier": "nvme", "optimizer_state_tier": "nvme", "options": {"max_grad_norm": 1.0}}
    config["host_memory"] = helpers.least_host_memory(make, tmp_path, **config)
    found = []
    for num_dropped in (0, 3):
        with helpers.training(make, tmp_path, **config) as (model, engine, optimizer):
            engine.start()
            engine.updater.lane.on_job = lambda: time.sleep(0.005)
            for _ in range(num_dropped):
                model(torch.ones(4, 64)).square().mean().backward()
                optimizer.zero_grad()
            train(nn.Sequential(model, Mean()), optimizer, [(torch.ones(4, 64),)] * 2)
            found.append(helpers.states_of(engine, model))
    helpers.assert_same_states(*found)


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


class Stack(nn.Module):
    """Ten layers. A call uses the first `count` of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(10))

    def forward(self, x, count):
        for layer in self.layers[:count]:
            x = layer(x).tanh()
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("max_grad_norm", [None, 1e6])
def test_updates_of_layers_that_a_pass_skips_block_no_fetch(tmp_path, max_grad_norm):
    """At the least budget, such an update needs slots that hold prefetched weights of the next ops, and these ops wait for the update."""
    config = {"update": "deferred", "param_tier": "nvme", "optimizer_state_tier": "nvme", "chunk_mib": 1 / 32}
    options = {"max_grad_norm": max_grad_norm}
    inputs = [(torch.ones(4, 128), count) for count in (10, 10, 10, 3, 4, 5, 6, 7, 8, 1, 2, 10, 3, 8, 10)]
    states = []
    for host_memory in ("64MiB", helpers.least_host_memory(Stack, tmp_path, options=options, **config)):
        with helpers.training(Stack, tmp_path, options=options, host_memory=host_memory, **config) as (model, engine, optimizer):
            work = threading.Thread(target=train, args=(model, optimizer, inputs), daemon=True)
            work.start()
            work.join(30)
            assert not work.is_alive()
            states.append(helpers.states_of(engine, model))
    helpers.assert_same_states(*states)


def test_a_sum_of_squares_at_the_head_of_its_lane_frees_no_gradient_slot(tmp_path):
    """The sum waits for its gradient, which may wait for a slot. So a gradient must go to NVMe, even if a job behind the sum is ready."""
    with helpers.training(Stack, tmp_path, update="deferred", param_tier="nvme", optimizer_state_tier="nvme") as (_, engine, _):
        gradients, gate, ready = engine.records.caches[GRADIENTS], threading.Event(), Job.over()
        total = engine.updater.sum_squares(lambda: gate.wait(20))
        with engine.records.lock:
            gradients.users.append(ready)
            assert not gradients.frees_soon()
        gate.set()
        assert total.wait()
        with engine.records.lock:
            assert gradients.frees_soon()
            gradients.users.remove(ready)


@pytest.mark.slow
def test_a_copy_at_the_head_of_its_lane_takes_a_prefetched_slot(tmp_path):
    """Gathers and close() wait for the lane. Only the training thread uses up the weights that were prefetched for earlier ops."""
    config = {"update": "backward", "residency": "none", "param_tier": "nvme", "optimizer_state_tier": "nvme", "chunk_mib": 1 / 32}
    config["host_memory"] = helpers.least_host_memory(Stack, tmp_path, **config)
    with helpers.training(Stack, tmp_path, **config) as (model, engine, optimizer):
        train(model, optimizer, [(torch.ones(4, 128), 10)] * 3)
        engine.flush()
        spans = engine.registry.spans
        for part in [part for span in spans for part in span.fetch or ()]:
            part.copy.wait()
        away = sorted((span for span in spans if not span.allocated), key=lambda span: engine.course.next_use(span.index))
        soon, last = [engine.registry.chunks[span.span.chunks[0]] for span in away[:2]], away[-1]
        for chunk in soon:
            with engine.records.lease(chunk, WEIGHTS):
                chunk.weights_expected = True
        assert not engine.records.caches[WEIGHTS].slots.num_free
        engine.weights.copy(last, needed=False)
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


@pytest.mark.slow
def test_max_grad_norm_may_be_set_while_updates_begin_in_backward(tmp_path):
    """From the next backward pass on, updates wait for the norm."""

    def run(update):
        norms = []
        with training(mlp, tmp_path, update=update, **NVME) as (model, engine, optimizer):
            for step in range(6):
                optimizer.max_grad_norm = 1e-3 if step in (2, 3) else None
                loss_of(model(inputs(model, step))).backward()
                optimizer.step()
                optimizer.zero_grad()
                norms.append(optimizer.grad_norm)
            return norms, states_of(engine, model)

    expected_norms, expected_states = run("deferred")
    norms, states = run("backward")
    assert norms == expected_norms and norms[3] > 1e-3
    assert_same_states(states, expected_states)


def test_max_grad_norm_is_refused_after_updates_have_begun(tmp_path):
    with training(mlp, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        for step in range(2):
            loss_of(model(inputs(model, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model(inputs(model, 2))).backward()
        optimizer.max_grad_norm = 1.0
        with pytest.raises(UsageError, match="already updates weights during the backward pass. Change the line .*helpers.py:"):
            optimizer.step()
        optimizer.max_grad_norm = None
        optimizer.step()
