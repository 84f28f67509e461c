"""Updates in two jobs, weights before moments: the next forward pass waits only for weights, and not a bit changes."""

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from support.helpers import assert_same_states, run_micro_batches, states_of, training
from support.mixtures import CHOICES, MIXTURES, ON_RANKS, Mixture, batch, chosen
from support.models import Chain, tiny_gpt, tokens
from support.ranks import ranks, share

import infinity
from infinity.tiers.arithmetic import Computed

SECONDS = 20  # a thread that takes longer counts as hung
IN_HOST = {"param_tier": "host", "optimizer_state_tier": "host"}
OPTIONS = {"max_grad_norm": 0.5}


def train(model, optimizer, steps=4, num_micro=1, between=lambda step: None, first=0):
    for step in range(first, first + steps):
        for micro in range(num_micro):
            (model(*tokens(step, micro)) / num_micro).backward()
        optimizer.step()
        between(step)
        optimizer.zero_grad()


def run(directory, *, moments_follow, between=lambda engine, step: None, make=tiny_gpt, **config):
    """The states after four steps, and the number of updates in two jobs."""
    num_micro = config.get("options", OPTIONS).get("accumulation_steps", 1)
    with training(make, directory, **{"options": OPTIONS} | IN_HOST | config) as (model, engine, optimizer):
        engine.updater.moments_follow = moments_follow
        train(model, optimizer, num_micro=num_micro, between=lambda step: between(engine, step))
        return states_of(engine, model)


@pytest.fixture
def advanced(monkeypatch):
    """The second jobs so far, and an event that lets them run, set at first."""
    seen, gate, advance = [], threading.Event(), Computed.update_moments
    gate.set()

    def noted(self, moments, gradient, **options):
        assert gate.wait(SECONDS)
        seen.append(self)
        return advance(self, moments, gradient, **options)

    monkeypatch.setattr(Computed, "update_moments", noted)
    yield seen, gate
    gate.set()


WAYS = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "bf16 moments": {"dtype": "bf16", "optimizer_state_dtype": "bf16"},
    "accumulation": {"dtype": "bf16", "options": OPTIONS | {"accumulation_steps": 3}},
    "fp16 accumulation": {"dtype": "fp16", "options": OPTIONS | {"accumulation_steps": 3}},
    "decay by group": {"groups": lambda model: [{"params": [p], "weight_decay": 0.1 * k} for k, p in enumerate(model.parameters())]},
    "pinned weights": {"param_tier": "device"},
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("delays", ["none", "lane"])
@pytest.mark.parametrize("way", WAYS)
def test_two_jobs_give_the_bits_of_one(way, delays, advanced, tmp_path):
    def between(engine, step):
        if delays == "lane":
            engine.updater.lane.on_job = lambda: time.sleep(3e-4)

    expected = run(tmp_path / "one", moments_follow=False, **WAYS[way])
    assert not advanced[0]
    assert_same_states(run(tmp_path / "two", moments_follow=True, between=between, **WAYS[way]), expected)
    assert advanced[0]


def test_a_forward_pass_waits_for_weights_only(advanced, monkeypatch, tmp_path):
    seen, gate = advanced
    with training(tiny_gpt, tmp_path, update="deferred", dtype="bf16", **IN_HOST) as (model, engine, optimizer):
        engine.updater.moments_follow = True
        train(model, optimizer, steps=2)
        engine.flush()
        gate.clear()
        del seen[:]
        loss = model(*tokens(2))
        loss.backward()
        release = threading.Event()
        engine.updater.lane.push(lambda: release.wait(SECONDS))  # until all jobs are in the lane
        optimizer.step()
        release.set()
        optimizer.zero_grad()
        loss = model(*tokens(3))  # on the new weights of every layer
        assert not seen and all(chunk.update.job.done for chunk in engine.registry.chunks)
        assert all(chunk.update.is_running for chunk in engine.registry.chunks)
        wait, waited = engine.events.wait, []

        def opened(link, job, what):
            waited.append(job)
            gate.set()
            return wait(link, job, what)

        monkeypatch.setattr(engine.events, "wait", opened)
        loss.backward()
        assert seen and any(chunk.update.moments_job in waited for chunk in engine.registry.chunks)
        assert not any(chunk.update.is_running for chunk in engine.registry.chunks)
        optimizer.step()
        found = states_of(engine, model)
    with training(tiny_gpt, tmp_path, update="deferred", dtype="bf16", **IN_HOST) as (model, engine, optimizer):
        train(model, optimizer)
        assert_same_states(found, states_of(engine, model))


def test_moments_of_the_last_layers_come_first(monkeypatch, tmp_path):
    with training(tiny_gpt, tmp_path, update="deferred", **IN_HOST) as (model, engine, optimizer):
        engine.updater.moments_follow = True
        train(model, optimizer, steps=1)
        engine.flush()
        order, end = [], engine.updater._end_update
        monkeypatch.setattr(engine.updater, "_end_update", lambda chunk, lease: (order.append(chunk.index), end(chunk, lease)))
        release = threading.Event()
        engine.updater.lane.push(lambda: release.wait(SECONDS))
        model(*tokens(1)).backward()
        optimizer.step()
        release.set()
        engine.updater.drain()
        assert order == sorted(order, reverse=True) and len(order) == len(engine.registry.chunks)


BETWEEN = {
    "flush": lambda engine, model, path: engine.flush(),
    "read": lambda engine, model, path: [engine.read_state(param) for param in model.parameters()],
    "save": lambda engine, model, path: infinity.save(path, model),
    "state dict": lambda engine, model, path: model.state_dict(),
    "eval": lambda engine, model, path: model.eval()(*tokens(9)) and model.train(),
    "drain": lambda engine, model, path: engine.updater.drain(),
    "write": lambda engine, model, path: [_unchanged(param) for param in model.parameters()],
}


def _unchanged(param):
    with infinity.gathered([param]), torch.no_grad():
        param.add_(0)


@pytest.mark.few(1)
@pytest.mark.parametrize("what", BETWEEN)
def test_calls_between_the_two_jobs_see_the_whole_update(what, tmp_path):
    """Each job of the update lane is slow, and the call comes right after step()."""

    def trained(directory, moments_follow):
        with training(tiny_gpt, directory, options=OPTIONS, dtype="bf16", **IN_HOST) as (model, engine, optimizer):
            engine.updater.moments_follow = moments_follow
            engine.updater.lane.on_job = lambda: time.sleep(5e-4) if moments_follow else None
            for step in range(3):
                train(model, optimizer, steps=1, first=step, between=lambda step: BETWEEN[what](engine, model, directory / f"saved{step}"))
            return states_of(engine, model)

    assert_same_states(trained(tmp_path / "two", True), trained(tmp_path / "one", False), what)


@pytest.mark.long
def test_a_checkpoint_between_the_two_jobs_continues_with_the_same_bits(tmp_path):
    def resumed(name, moments_follow):
        with training(tiny_gpt, tmp_path / name, options=OPTIONS, dtype="bf16", **IN_HOST) as (model, engine, optimizer):
            engine.updater.moments_follow = moments_follow
            engine.updater.lane.on_job = lambda: time.sleep(5e-4)
            train(model, optimizer, steps=2, between=lambda step: step and infinity.save(tmp_path / f"{name}.saved", model))
        with training(tiny_gpt, tmp_path / name, seed=1, options=OPTIONS, dtype="bf16", **IN_HOST) as (model, engine, optimizer):
            infinity.load(tmp_path / f"{name}.saved", model)
            train(model, optimizer, steps=2, first=2)
            return states_of(engine, model)

    assert_same_states(resumed("two", True), resumed("one", False))


def test_closing_an_engine_ends_the_second_jobs(advanced, tmp_path):
    with training(tiny_gpt, tmp_path, options=OPTIONS, **IN_HOST) as (model, engine, optimizer):
        engine.updater.moments_follow = True
        engine.updater.lane.on_job = lambda: time.sleep(1e-3)
        train(model, optimizer, steps=1)
        num_chunks = len(engine.registry.chunks)
    assert len(advanced[0]) == num_chunks


def test_an_error_in_a_second_job_reaches_the_program(monkeypatch, tmp_path):
    def fail(self, *args, **options):
        raise ArithmeticError("no moments")

    with pytest.raises(ArithmeticError, match="no moments"), training(tiny_gpt, tmp_path, options=OPTIONS, **IN_HOST) as (model, engine, optimizer):
        engine.updater.moments_follow = True
        train(model, optimizer, steps=1)
        monkeypatch.setattr(Computed, "update_moments", fail)
        train(model, optimizer, steps=2, first=1)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config",
    [
        {"optimizer_state_tier": "nvme"},  # states borrow a slot
        {"options": {}},  # updates in the backward pass
        {"optimizer": infinity.Adam},  # moments need the weight decay of weights
        {"optimizer": infinity.SGD, "options": OPTIONS | {"momentum": 0.9}},
        {"dtype": "fp16"},
    ],
    ids=["nvme", "not deferred", "Adam", "SGD", "fp16"],
)
def test_other_updates_take_one_job(config, advanced, tmp_path):
    with training(tiny_gpt, tmp_path, **{"options": OPTIONS} | IN_HOST | config) as (model, engine, optimizer):
        engine.updater.moments_follow = True
        train(model, optimizer)
    assert not advanced[0]


@pytest.mark.long
def test_records_that_visit_the_device_and_records_at_home_train_together(advanced, tmp_path):
    def trained(name, **config):
        with training(tiny_gpt, tmp_path / name, options=OPTIONS, **config) as (model, engine, optimizer):
            engine.updater.moments_follow = name == "two"
            train(model, optimizer)
            return states_of(engine, model), len(engine.device_budget.promoted)

    found, num_visitors = trained("two", device_memory="256KiB", host_memory="16MiB")
    assert num_visitors and advanced[0]
    assert_same_states(found, trained("one", **IN_HOST)[0])


@pytest.mark.long
def test_layer_wise_steps_have_the_same_bits(advanced, tmp_path):
    def trained(name):
        with training(Chain, tmp_path / name, options=OPTIONS | {"accumulation_steps": 3}, **IN_HOST) as (model, engine, optimizer):
            engine.updater.moments_follow = name == "two"
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                batch = [tuple(torch.randint(50, (3, 7), generator=generator) for _ in range(2)) for _ in range(3)]
                run_micro_batches(model, batch, lambda out, target: F.cross_entropy(out.float().flatten(0, 1), target.flatten()) / 3, True)
                optimizer.step()
                optimizer.zero_grad()
            return states_of(engine, model)

    assert_same_states(trained("two"), trained("one"))
    assert advanced[0]


def test_a_wait_for_moments_overtakes_those_of_other_chunks(monkeypatch, tmp_path):
    with training(tiny_gpt, tmp_path, update="deferred", **IN_HOST) as (model, engine, optimizer):
        engine.updater.moments_follow = True
        lane, order, end = engine.updater.lane, [], engine.updater._end_update
        release, started, gate = threading.Event(), threading.Event(), threading.Event()

        def ended(chunk, lease):
            started.set()
            assert gate.wait(SECONDS)
            order.append(chunk.index)
            end(chunk, lease)

        monkeypatch.setattr(engine.updater, "_end_update", ended)
        lane.push(lambda: release.wait(SECONDS))
        model(*tokens(0)).backward()
        optimizer.step()
        release.set()
        assert started.wait(SECONDS)  # of the last chunk
        hurry = lane.hurry
        monkeypatch.setattr(lane, "hurry", lambda job: (hurry(job), gate.set()))
        engine.updater.finish(engine.registry.chunks[0])
        engine.updater.drain()
        last = len(engine.registry.chunks) - 1
        assert order[:3] == [last, 0, last - 1]


class OwnRule(infinity.Rule):
    """Momentum without weights, so that the moments follow from the gradient alone."""

    moments = ("velocity",)
    can_advance = True

    def update(self, p, g, moments, scalars):
        velocity = moments["velocity"]
        velocity *= 0.9
        velocity += g
        p -= velocity * scalars["lr"]

    def advance(self, shard, grad, scalars, grad_scale, *, dither=None):
        velocity = shard["velocity"]
        velocity *= 0.9
        velocity += grad.float() * grad_scale


def test_a_rule_of_the_program_takes_one_job(advanced, tmp_path):
    own = lambda params, lr, **options: infinity.Optimizer(params, OwnRule(), {"lr": lr}, **options)
    with training(tiny_gpt, tmp_path, optimizer=own, options=OPTIONS, **IN_HOST) as (model, engine, optimizer):
        engine.updater.moments_follow = True
        train(model, optimizer, steps=2)
    assert not advanced[0]


def train_mixture(directory, options, choice, moments_follow):
    """Run by each of two ranks: the states after six steps. Each second job takes long."""
    torch.manual_seed(0)
    model = Mixture(leaf=True, **options)
    engine = infinity.offload(model, infinity.Config(swap_dirs=directory, **ON_RANKS | IN_HOST | {"update": "deferred"}))
    optimizer = infinity.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    with engine:
        engine.updater.moments_follow = moments_follow
        second = engine.updater._update_moments_on_host
        engine.updater._update_moments_on_host = lambda *args: (time.sleep(0.01), second(*args))
        for step in range(6):
            model(share(batch(step)), chosen(step, ranks()[0], choice)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return states_of(engine, model)


@pytest.mark.long
@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_of_other_ranks_only_wait_for_moments(choice, two_ranks, tmp_path):
    """This rank has no gradient for an expert that another rank has chosen, so no arrival waits for the last update."""
    options = MIXTURES["unused output"]
    one, two = (two_ranks.run(train_mixture, tmp_path, options, choice, moments_follow) for moments_follow in (False, True))
    for states, expected in zip(two, one, strict=True):
        assert_same_states(states, expected)
