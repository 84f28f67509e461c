"""Exchanged homes: a record that stays at home on NVMe takes the host memory of a record that visits the device."""

import pytest
import torch
from support.helpers import ScriptedGauge, assert_same_states, states_of, training
from support.models import gpt_step, tiny_gpt, tokens

import infinity
from infinity.engine.memory import activation_meter
from infinity.plan import host_memory
from infinity.plan import placement as planner
from infinity.plan.host_memory import Guests
from infinity.plan.record import KINDS, STATES, WEIGHTS
from infinity.plan.tiers import HOST, NVME
from infinity.tiers.values import Values

pytestmark = pytest.mark.usefixtures("one_thread")

IN_HOST = {"param_tier": "host", "optimizer_state_tier": "host"}
DEVICE_MEMORY = "224KiB"  # beside all weights, for the records of some spans
VISITORS = {STATES: frozenset(), WEIGHTS: frozenset(range(20, 39))}  # kind that is exchanged -> visitors that the plan expects


@pytest.fixture(autouse=True)
def few_gradients_under_way(monkeypatch):
    """The budgets of these tests are kilobytes."""
    monkeypatch.setattr(planner, "UNDER_WAY_NBYTES", 0)


@pytest.fixture
def config_for(monkeypatch, tmp_path):
    """A function that finds a config with host memory for a part of one kind, the first chunks included. The first spans visit the device,
    although the plan expects other visitors.
    """

    def find(kind, **config):
        guests = Guests(visitors=VISITORS[kind])
        monkeypatch.setattr(planner, "_guests", lambda first, needs, budgets, _: (guests, host_memory.share_out(first, needs, budgets, (), guests)))
        for name in ("WEIGHT_SLOTS", "STATE_SLOTS"):  # fewer slots than chunks, as with a large model
            monkeypatch.setattr(host_memory, name, 3)
        for host_kib in range(100, 600, 16):
            config |= {"device_memory": DEVICE_MEMORY, "host_memory": f"{host_kib}KiB"}
            try:
                with training(tiny_gpt, tmp_path, **config) as (_, engine, _):
                    homes = engine.placement.homes[kind]
                    if homes[0] == HOST and 6 < homes.count(NVME) < 33:
                        return config
            except infinity.BudgetError:
                continue
        pytest.fail(f"expected host memory for a part of the {kind}, found none below 600 KiB")

    return find


@pytest.fixture
def gauge(monkeypatch):
    gauge = ScriptedGauge(1 << 40)
    monkeypatch.setattr(activation_meter, "SLACK", 0.0)
    monkeypatch.setattr("infinity.engine.engine.gauge_of", lambda device: gauge)
    return gauge


def expected_states(directory, num_steps=4, **config):
    with training(tiny_gpt, directory, **IN_HOST | config) as (model, engine, optimizer):
        for step in range(num_steps):
            gpt_step(model, optimizer, step)
        return states_of(engine, model)


def homes_of(engine):
    return {kind: [chunk.homes[kind] for chunk in engine.registry.chunks] for kind in KINDS}


def assert_exchanged(engine, before, kind):
    """Asserts the homes after an exchange. Chunks exchange only with chunks of an equal record.

    Visitors keep a home in host memory only if no other chunk is on NVMe, and of the others the first ones are in host memory.
    """
    after = homes_of(engine)
    assert after[kind] != before[kind]
    for each in KINDS:
        assert after[each].count(HOST) == before[each].count(HOST)
    for record in {chunk.record for chunk in engine.registry.chunks}:
        chunks = [chunk for chunk in engine.registry.chunks if chunk.record == record]
        visitors, others = ([chunk.homes[kind] for chunk in chunks if chunk.on_device is on_device] for on_device in (True, False))
        assert HOST not in visitors or NVME not in others
        if kind == STATES:  # in the plan, too, the first chunks have homes in host memory
            assert others == sorted(others, key=[HOST, NVME].index)
    for chunk in engine.registry.chunks:
        for each in (WEIGHTS, STATES):
            assert (chunk.extents[each] is not None) == chunk.homes[each].is_storage, (chunk, each)
            assert (chunk.index in engine.records.caches[each].residents) == chunk.homes[each].is_host, (chunk, each)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", VISITORS)
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("numbers", [{"dtype": "fp32"}, {"dtype": "bf16"}], ids=str)
def test_records_at_home_take_the_host_memory_of_visitors(numbers, update, kind, config_for, tmp_path):
    expected = expected_states(tmp_path, update=update, **numbers)
    with training(tiny_gpt, tmp_path, **config_for(kind, update=update, **numbers)) as (model, engine, optimizer):
        before = homes_of(engine)
        gpt_step(model, optimizer, 0)
        assert 0 < len(engine.device_budget.promoted) < len(engine.registry.spans)
        assert_exchanged(engine, before, kind)
        after = homes_of(engine)
        for step in range(1, 4):
            gpt_step(model, optimizer, step)
        assert homes_of(engine) == after
        assert_same_states(states_of(engine, model), expected)


@pytest.mark.slow
def test_an_exchange_saves_the_nvme_bytes_of_the_records_that_stay(config_for, monkeypatch, tmp_path):
    config = config_for(STATES, compression="off")
    written = {}
    for exchanges in (True, False):
        if not exchanges:
            monkeypatch.setattr(Values, "exchange_homes", lambda self, visitors: None)
        with training(tiny_gpt, tmp_path, **config) as (model, engine, optimizer):
            for step in range(2):
                gpt_step(model, optimizer, step)
            engine.flush()
            before = engine.stats()["nvme_write_nbytes"]
            for step in range(2, 4):
                gpt_step(model, optimizer, step)
            engine.flush()
            written[exchanges] = engine.stats()["nvme_write_nbytes"] - before
            stay = [chunk for chunk in engine.registry.chunks if not chunk.on_device and chunk.homes[STATES] == NVME]
            expected = 2 * sum(chunk.record.states_nbytes for chunk in stay)  # an update that is put off writes in the next step
            assert written[exchanges] == pytest.approx(expected, rel=0.15)
    assert written[True] < written[False], written


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", VISITORS)
def test_visitors_whose_homes_were_exchanged_go_home_when_inputs_grow(kind, config_for, gauge, tmp_path):
    """Then the batch becomes smaller, and records visit again."""
    sizes = [16, 16, 64, 16, 16]

    def run(**config):
        counts = []
        with training(tiny_gpt, tmp_path, **config) as (model, engine, optimizer):
            gauge.tier = engine.tier
            before = homes_of(engine)
            for step, batch in enumerate(sizes):
                gauge.activations = batch << 10
                loss = model(*tokens(step, batch=batch))
                counts.append(len(engine.device_budget.promoted))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1 and config.keys() != IN_HOST.keys():
                    assert_exchanged(engine, before, kind)
            for chunk in engine.registry.chunks:
                if not chunk.on_device and config.keys() != IN_HOST.keys():
                    assert (chunk.weights_home, chunk.states_home) == (chunk.homes[WEIGHTS], chunk.homes[STATES])
            return states_of(engine, model), counts

    expected, _ = run(**IN_HOST)
    config = config_for(kind)
    gauge.capacity = (224 << 10) + (16 << 10)
    states, counts = run(**config)
    assert counts[0] == 0 < counts[1] and counts[2] == 0
    assert gauge.overflows == 0
    assert_same_states(states, expected)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", VISITORS)
def test_a_checkpoint_of_exchanged_homes_resumes(kind, config_for, tmp_path):
    """In the same engine, where homes are exchanged already, and in a new engine that exchanges homes after the load."""
    expected = expected_states(tmp_path)
    config = config_for(kind)
    with training(tiny_gpt, tmp_path, **config) as (model, engine, optimizer):
        for step in range(2):
            gpt_step(model, optimizer, step)
        infinity.save(tmp_path / "saved", model, optimizer)
        homes = homes_of(engine)
        gpt_step(model, optimizer, 7)
        infinity.load(tmp_path / "saved", model, optimizer)
        for step in range(2, 4):
            gpt_step(model, optimizer, step)
        assert homes_of(engine) == homes
        assert_same_states(states_of(engine, model), expected, "same engine")
    with training(tiny_gpt, tmp_path / "new", seed=1, **config) as (model, engine, optimizer):
        before = homes_of(engine)
        infinity.load(tmp_path / "saved", model, optimizer)
        gpt_step(model, optimizer, 2)
        assert_exchanged(engine, before, kind)
        gpt_step(model, optimizer, 3)
        assert_same_states(states_of(engine, model), expected, "new engine")


@pytest.mark.slow
def test_a_snapshot_taken_before_the_exchange_has_the_old_values(config_for, tmp_path):
    config = config_for(STATES)
    with training(tiny_gpt, tmp_path, **config) as (model, engine, optimizer):
        before = homes_of(engine)
        saving = infinity.save(tmp_path / "saved", model, optimizer, wait=False)
        gpt_step(model, optimizer, 0)
        assert_exchanged(engine, before, STATES)
        saving.wait()
    with training(tiny_gpt, tmp_path / "new", seed=1, **IN_HOST) as (model, engine, optimizer):
        infinity.load(tmp_path / "saved", model, optimizer)
        found = states_of(engine, model)
    assert_same_states(found, expected_states(tmp_path / "fresh", num_steps=0))


@pytest.mark.slow
def test_a_host_copy_that_a_thread_uses_keeps_its_home(config_for, monkeypatch, tmp_path):
    expected = expected_states(tmp_path)
    config = config_for(STATES)
    exchange, used = Values.exchange_homes, []

    def with_users(values, visitors):
        residents, entries = (values.records.caches[STATES].residents, values.records.caches[STATES].entries)
        used[:] = [residents[chunk.index] for chunk in visitors if chunk.index in residents][:1]
        used.extend(entry for entry in list(entries.values())[-1:])
        for entry in used:
            entry.pin()
        exchange(values, visitors)
        for entry in used:
            values.records.unpin(entry.chunk, STATES, entry)

    monkeypatch.setattr(Values, "exchange_homes", with_users)
    with training(tiny_gpt, tmp_path, **config) as (model, engine, optimizer):
        before = homes_of(engine)[STATES]
        gpt_step(model, optimizer, 0)
        assert used and before != homes_of(engine)[STATES]
        assert all(entry.chunk.homes[STATES] == before[entry.chunk.index] for entry in used)
        for step in range(1, 4):
            gpt_step(model, optimizer, step)
        assert_same_states(states_of(engine, model), expected)
