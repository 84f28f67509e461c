"""Free device memory: records and waiting gradients use the memory that weights and activations leave free, and leave when these grow.

No split of device memory changes a bit. Long because budgets and a scripted gauge produce every split.
"""

import itertools
import math

import pytest
import torch
from support.helpers import (
    ScriptedGauge,
    assert_equals_reference,
    assert_same_states,
    least_host_memory,
    on_gpu,
    plain,
    states_of,
    training,
)
from support.models import TRAITS, gpt_step, inputs, loss_of, tiny_gpt, tokens
from torch import nn

import infinity
from infinity.engine import build
from infinity.engine.memory import allocation_trial as trial
from infinity.engine.memory import activation_meter
from infinity.model.gpt import GPT
from infinity.plan import placement as planner
from infinity.plan.record import STATES, WEIGHTS
from infinity.plan.tiers import DEVICE, HOST, NVME
from infinity.tiers.gradients import Gradients
from infinity.tiers.updates import Updater

pytestmark = pytest.mark.usefixtures("one_thread")

HOMES = {
    "host": {"host_memory": "64MiB"},
    "nvme": {"host_memory": "320KiB"},
}
FEW_SLOTS = {"host_memory": "48KiB"}  # about the least budget: waiting gradients have no place in host memory


def budgets(make, directory, with_gradients=False, **config):
    """Device bytes for all weights without records, and a list of the additional bytes of each span's records. with_gradients: the records need
    memory for their gradients, although a backward pass updates visitors."""
    with training(make, directory, param_tier="device", optimizer_state_tier="host", **config) as (_, engine, _):
        found, _ = planner.share_device(
            engine.layout,
            [chunk.record for chunk in engine.registry.chunks],
            engine.placement.homes[STATES],
            room_nbytes=1 << 40,
            waiting=None if with_gradients or engine.device_budget.keeps_gradients else (),
            snapshots={span.index for span in engine.registry.spans if engine.values.keeps_snapshot(span)},
        )
        return engine.placement.least_nbytes, [nbytes for _, nbytes in found]


def num_that_fit(engine, records):
    """The number of spans, from the first one on, whose records fit on the device. records: bytes of each span.

    All weights are there, too. If records are on NVMe, it may also be the weights of these spans and a window for the others.
    """
    room = engine.device_budget.budget_nbytes - engine.placement.gradient_limit_nbytes
    weights, window = [span.nbytes for span in engine.registry.spans], engine.placement.window_nbytes
    beside_all = sum(total <= room - sum(weights) for total in itertools.accumulate(records))
    pairs = itertools.accumulate(map(sum, zip(records, weights, strict=True)))
    return max(beside_all, 0 if window is None else sum(total <= room - window for total in pairs))


def train_both(*pairs):
    """Four steps of each (model, optimizer), on the inputs of the last model."""
    for step in range(4):
        for model, optimizer in pairs:
            torch.manual_seed(step)  # of dropout
            loss_of(model(inputs(pairs[-1][0], step))).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(autouse=True)
def few_gradients_under_way(monkeypatch):
    """The budgets of these tests are kilobytes."""
    monkeypatch.setattr(planner, "UNDER_WAY_NBYTES", 0)


# Splits of device memory


@pytest.mark.few(1)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"accumulation_steps": 2}], ids=["plain", "clip", "accumulate"])
@pytest.mark.parametrize(
    "numbers",
    [
        {"dtype": "fp32"},
        pytest.param({"dtype": "bf16"}, marks=pytest.mark.long),
        {"dtype": "bf16", "optimizer_state_dtype": "bf16"},
        pytest.param({"dtype": "fp16"}, marks=pytest.mark.long),
    ],
)
def test_every_split_of_device_memory_has_the_same_bits(numbers, options, home, tmp_path):
    def run(**config):
        with training(tiny_gpt, tmp_path, options=options, **numbers, **config) as (model, engine, optimizer):
            for step in range(4):
                gpt_step(model, optimizer, step, accumulate=options.get("accumulation_steps", 1))
            whole = engine.placement.homes[STATES][0] == DEVICE
            total = len(engine.registry.spans)
            margin, may_stay = engine.device_budget, {engine.registry.chunks[index].span.index for index in engine.placement.may_stay}
            if not whole and margin.promoted:  # waiting gradients without a place in host memory come before records
                assert may_stay <= {span.index for span, _ in margin.promoted} | set(margin.staying)
            stay.append(len(margin.staying))
            expected_counts.append(total if whole else num_that_fit(engine, records))
            return states_of(engine, model), total if whole else len(margin.promoted), total

    stay, expected_counts = [], []
    least, records = budgets(tiny_gpt, tmp_path, options=options, **numbers)
    expected, *_ = run(param_tier="host", optimizer_state_tier="host")
    counts = []
    for some in (0, 1, len(records) // 2, len(records) - 1, 2 * len(records)):
        states, count, total = run(device_memory=least + sum((2 * records)[:some]), **(FEW_SLOTS if home == "nvme" else HOMES[home]))
        assert_same_states(states, expected, f"{count} of {total} spans")
        counts.append(count)
    if home == "nvme" and (options or numbers["dtype"] == "fp16"):  # gradients wait for step()
        assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == total and 0 < max(stay) <= total
    elif options.get("accumulation_steps"):  # sums come before records
        assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == total and 0 < max(stay) <= total
    else:
        assert counts == expected_counts[1:] and not any(stay)
        assert home == "nvme" or counts == [0, 1, len(records) // 2, len(records) - 1, total]


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("name, dtype", [*((name, "fp32") for name in TRAITS), ("max_norm", "bf16")])
def test_every_trait_with_some_records_on_the_device_has_the_same_bits(name, dtype, update, tmp_path):
    make = TRAITS[name]
    reference_model, reference = plain(make, dtype=dtype)
    least, records = budgets(make, tmp_path, dtype=dtype, update=update)
    with training(make, tmp_path, dtype=dtype, update=update, device_memory=least + sum(records[: len(records) // 2 + 1])) as (model, engine, optimizer):
        train_both((model, optimizer), (reference_model, reference))
        assert engine.device_budget.promoted or engine.placement.homes[STATES][0] == DEVICE
        assert_equals_reference(engine, model, reference_model, reference)


def test_records_come_to_the_device_only_if_all_weights_fit(tmp_path):
    least, records = budgets(tiny_gpt, tmp_path)
    for budget, some in ((least - 4096, False), (least + records[0], True)):
        with training(tiny_gpt, tmp_path, device_memory=budget) as (model, engine, optimizer):
            for step in range(2):
                gpt_step(model, optimizer, step)
            assert bool(engine.device_budget.promoted) is some
            assert engine.stats()["peak_device_nbytes"] <= budget


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["auto", "deferred"])
@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"accumulation_steps": 3}], ids=["clip", "accumulate"])
def test_waiting_gradients_without_room_in_host_memory_stay_on_the_device(options, update, tmp_path):
    """A step in the steady state then moves no byte to or from NVMe. A dropped backward pass changes nothing."""
    least, records = budgets(tiny_gpt, tmp_path, options=options)
    num_micro = options.get("accumulation_steps", 1)
    expected = None
    for host_kib in (64 << 10, *range(320, 2000, 20)):
        config = {"host_memory": f"{host_kib}KiB", "device_memory": least + sum(records[:6]), "update": update}
        with training(tiny_gpt, tmp_path, options=options, **config) as (model, engine, optimizer):
            homes = engine.placement.homes
            if NVME in (*homes[WEIGHTS], *homes[STATES]):
                continue
            for step in range(2):
                gpt_step(model, optimizer, step, num_micro)
            before = engine.stats()
            for step in range(2, 4):
                if num_micro == 1:
                    (model(*tokens(7)) * 3).backward()
                    optimizer.zero_grad()
                gpt_step(model, optimizer, step, num_micro)
            states = states_of(engine, model)
            moved = [engine.stats()[name] - before[name] for name in ("nvme_read_nbytes", "nvme_write_nbytes")]
            assert moved == [0, 0]
            if expected is None:
                expected = states
                continue
            assert_same_states(states, expected, f"{host_kib} KiB")
            assert 0 < len(engine.device_budget.staying) and len(engine.device_budget.promoted) < len(records)
            return
    pytest.fail("expected a host memory budget that holds all records but no gradient, found none below 2000 KiB")


@pytest.mark.slow
def test_device_and_host_memory_that_hold_all_records_need_no_nvme(tmp_path):
    least, records = budgets(tiny_gpt, tmp_path)
    config = {"device_memory": least + sum(records[: len(records) // 2])}
    for host_kib in range(320, 2000, 20):  # until host memory holds all records that do not visit the device
        with training(tiny_gpt, tmp_path, host_memory=f"{host_kib}KiB", **config) as (model, engine, optimizer):
            placement = engine.placement
            stays = [index for index in range(len(engine.layout.chunks)) if index not in placement.visitors]
            if {placement.homes[kind][index] for kind in (WEIGHTS, STATES) for index in stays} != {HOST}:
                continue
            assert placement.nvme_nbytes > sum(records[:4])
            for step in range(2):
                gpt_step(model, optimizer, step)
            before = engine.stats()
            for step in range(2, 5):
                gpt_step(model, optimizer, step)
            engine.flush()
            assert 0 < len(engine.device_budget.promoted) < len(records)
            assert [engine.stats()[name] - before[name] for name in ("nvme_read_nbytes", "nvme_write_nbytes")] == [0, 0]
            return
    pytest.fail("expected a host memory budget that holds the records that stay off the device, found none below 2000 KiB")


@pytest.mark.few(2)
@pytest.mark.parametrize("config", [{"optimizer_state_tier": "host"}, {"param_tier": "host"}, {"optimizer_state_tier": "nvme"}, {"residency": "none"}], ids=str)
def test_records_with_a_configured_tier_stay_there(config, tmp_path):
    least, records = budgets(tiny_gpt, tmp_path)
    with training(tiny_gpt, tmp_path, device_memory=least + sum(records[:3]), **config) as (model, engine, optimizer):
        for step in range(2):
            gpt_step(model, optimizer, step)
        assert engine.device_budget.promoted == []


# Records on the device because no other tier has room


@pytest.fixture
def small_drive(monkeypatch):
    """A function that limits the free bytes on every drive."""
    return lambda nbytes: monkeypatch.setattr(build, "room_nbytes", lambda paths: nbytes)


CROWDED = {"host_memory": "320KiB"}


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"accumulation_steps": 2}], ids=["plain", "clip", "accumulate"])
@pytest.mark.parametrize("numbers", [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "optimizer_state_dtype": "bf16"}, {"dtype": "fp16"}], ids=str)
def test_records_without_room_on_nvme_are_on_the_device(numbers, options, small_drive, tmp_path):
    def run(**config):
        with training(tiny_gpt, tmp_path, options=options, **numbers, **config) as (model, engine, optimizer):
            for step in range(4):
                gpt_step(model, optimizer, step, accumulate=options.get("accumulation_steps", 1))
            stats, placement = engine.stats(), engine.placement
            assert stats["peak_device_nbytes"] <= stats["device_budget_nbytes"]
            return states_of(engine, model), placement.homes[STATES].count(DEVICE), stats["num_chunks_on_device"], placement.nvme_nbytes

    least, records = budgets(tiny_gpt, tmp_path, with_gradients=True, options=options, **numbers)
    expected, *_ = run(param_tier="host", optimizer_state_tier="host")
    *_, nvme_nbytes = run(device_memory=least + sum(records[:-1]), **CROWDED)
    counts = []
    for share in (1, 3 / 4, 1 / 2, 1 / 4):
        small_drive(int(share * nvme_nbytes))
        states, at_home, on_device, found = run(device_memory=least + sum(records[:-1]), **CROWDED)
        assert_same_states(states, expected, f"{at_home} of {on_device} on the device")
        assert found <= share * nvme_nbytes
        counts.append(at_home)
        assert on_device > at_home  # free device memory holds further records
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] > 0, counts  # gradients that wait on the device need no place on NVMe


class WithMoreLayers(nn.Module):
    """A model and layers with the same input. They make more chunks than the smallest number of slots."""

    def __init__(self, model):
        super().__init__()
        self.model, self.shape = model, model.shape
        self.others = nn.ModuleList(nn.Linear(self.shape[-1], 1024 // self.shape[-1], bias=False) for _ in range(5))

    def forward(self, x):
        return [self.model(x), *(other(x.to(other.weight.dtype)) for other in self.others)]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("name, dtype", [*((name, "fp32") for name in TRAITS), ("max_norm", "bf16")])
def test_every_trait_trains_with_some_records_only_on_the_device(name, dtype, update, small_drive, tmp_path):
    make = lambda: WithMoreLayers(TRAITS[name]())
    reference_model, reference = plain(make, dtype=dtype)
    least, records = budgets(make, tmp_path, dtype=dtype)
    on_nvme = {"dtype": dtype, "update": update, "device_memory": least}
    on_nvme["host_memory"] = least_host_memory(make, tmp_path, param_tier="nvme", optimizer_state_tier="nvme", **on_nvme)
    with training(make, tmp_path, **on_nvme) as (_, engine, _):
        small_drive(engine.placement.nvme_nbytes * 2 // 3)
    with training(make, tmp_path, **on_nvme | {"device_memory": least + sum(records) - 4096}) as (model, engine, optimizer):
        train_both((model, optimizer), (reference_model, reference))
        assert DEVICE in engine.placement.homes[STATES]
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.slow
def test_a_checkpoint_of_records_in_three_tiers_resumes_in_other_tiers(small_drive, tmp_path):
    least, records = budgets(tiny_gpt, tmp_path)
    crowded = {"device_memory": least + sum(records[:-1])} | CROWDED
    with training(tiny_gpt, tmp_path, **crowded) as (_, engine, _):
        small_drive(engine.placement.nvme_nbytes // 2)
    places = [crowded, {"param_tier": "host", "optimizer_state_tier": "host"}, crowded]
    for number, config in enumerate(places):
        with training(tiny_gpt, tmp_path / str(number), seed=number, **config) as (model, engine, optimizer):
            assert (DEVICE in engine.placement.homes[STATES]) == (config is crowded)
            if number:
                infinity.load(tmp_path / f"saved{number - 1}", model, optimizer)
            for step in range(2 * number, 2 * number + 2):
                gpt_step(model, optimizer, step)
            infinity.save(tmp_path / f"saved{number}", model, optimizer)
            states = states_of(engine, model)
    with training(tiny_gpt, tmp_path, param_tier="host", optimizer_state_tier="host") as (model, engine, optimizer):
        for step in range(6):
            gpt_step(model, optimizer, step)
        assert_same_states(states, states_of(engine, model))


@pytest.mark.slow
def test_records_whose_tier_is_the_device_stay_when_inputs_grow(small_drive, gauge, tmp_path):
    least, records = budgets(tiny_gpt, tmp_path)
    gauge.capacity = 1 << 40
    sizes = [[16]] * 3 + [[64]] * 2
    with training(tiny_gpt, tmp_path, param_tier="host", optimizer_state_tier="host") as (model, engine, optimizer):
        train(model, engine, optimizer, sizes, gauge)
        expected = states_of(engine, model)
    config = {"device_memory": least + sum(records[:-1])} | CROWDED
    with training(tiny_gpt, tmp_path, **config) as (_, engine, _):
        small_drive(engine.placement.nvme_nbytes // 2)  # not enough for records, even without places for gradients
    gauge.capacity = config["device_memory"] + (16 << 10)
    with training(tiny_gpt, tmp_path, **config) as (model, engine, optimizer):
        at_home = engine.placement.homes[STATES].count(DEVICE)
        found = train(model, engine, optimizer, sizes, gauge)
        visitors = sum(len(engine.registry.chunks_in(span)) for span, _ in engine.device_budget.promoted)
        assert engine.stats()["num_chunks_on_device"] == at_home + visitors
        assert_same_states(states_of(engine, model), expected)
    assert at_home > 0 and gauge.overflows == 0
    assert found[2][1] > found[4][1], found  # some of the visiting records left


# Activations


@pytest.fixture
def gauge(monkeypatch):
    gauge = ScriptedGauge(0)
    monkeypatch.setattr(activation_meter, "SLACK", 0.0)
    monkeypatch.setattr("infinity.engine.engine.gauge_of", lambda device: gauge)
    return gauge


def train(model, engine, optimizer, sizes, gauge):
    """One step for each list of micro-batch sizes, 1 KiB per sample. Returns (plans, promoted spans) after each step."""
    gauge.tier, found = engine.tier, []
    for step, micro_batches in enumerate(sizes):
        for micro, batch in enumerate(micro_batches):
            gauge.activations = batch << 10
            (model(*tokens(step, micro, batch=batch)) / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((engine.follower.num_plans, len(engine.device_budget.promoted)))
    return found


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("num_micro", [1, 2])
def test_records_leave_before_a_larger_batch_and_the_plan_changes_once(num_micro, home, gauge, clock, tmp_path):
    options = {"accumulation_steps": num_micro}
    least, records = budgets(tiny_gpt, tmp_path, options=options)
    sizes = [[16] * num_micro] * 3 + [[16, 64][-num_micro:]] + [[64] * num_micro] * 3 + [[3] * num_micro]
    gauge.capacity = 1 << 40
    with training(tiny_gpt, tmp_path, options=options, param_tier="host", optimizer_state_tier="host") as (model, engine, optimizer):
        train(model, engine, optimizer, sizes, gauge)
        expected = states_of(engine, model)
    gauge.capacity = least + sum(records[:6]) + (48 << 10)
    config = {"device_memory": least + sum(records[:8])} | HOMES[home]
    with training(tiny_gpt, tmp_path, options=options, **config) as (model, engine, optimizer):
        found = train(model, engine, optimizer, sizes, gauge)
        assert_same_states(states_of(engine, model), expected)
    plans, counts = zip(*found)
    assert gauge.overflows == 0
    assert plans == (1, 1, 1, 2, 2, 2, 2, 2)
    assert counts[0] == counts[2] >= counts[3] == counts[-1], counts
    assert counts[0] > counts[-1] or (home == "nvme" and counts[0] > 0), counts  # weights leave before records whose home is NVMe


@pytest.mark.parametrize("home", HOMES)
def test_updates_that_need_no_drive_begin_in_step(home, tmp_path):
    """The next forward pass needs the first ops' weights at once. Updates whose records are read from NVMe follow in the order of the ops."""
    with training(tiny_gpt, tmp_path, options={"max_grad_norm": 0.5}, device_memory="256KiB", **HOMES[home]) as (model, engine, optimizer):
        model(*tokens(0)).backward()
        optimizer.step()
        chunks = [chunk for chunk in engine.registry.chunks if chunk.trainable and not chunk.on_device]
        announced = [chunk for chunk in chunks if chunk.update.is_announced]
        assert all(chunk.update.job is not None for chunk in chunks if chunk not in announced)
        assert home in {engine.placement.homes[STATES][chunk.index].name for chunk in chunks}
        assert (not announced) if home == "host" else len(announced) > 2


def test_updates_begin_in_the_order_of_the_next_forward_pass(monkeypatch, tmp_path):
    class Backwards(nn.Sequential):
        def forward(self, x):
            for layer in reversed(self):
                x = layer(x)
            return x

    make = lambda: Backwards(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    begun, begin = [], Updater.begin
    monkeypatch.setattr(Updater, "begin", lambda self, chunk, *args, **options: (begun.append(chunk.index), begin(self, chunk, *args, **options)))
    with training(make, tmp_path, options={"max_grad_norm": 0.5}, param_tier="host", optimizer_state_tier="host", residency="none") as (model, engine, optimizer):
        assert len(engine.registry.chunks) == 6
        for _ in range(3):
            model(torch.ones(2, 32)).sum().backward()
            begun.clear()
            optimizer.step()
            optimizer.zero_grad()
    assert begun == [5, 4, 3, 2, 1, 0]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("first_sizes", [[16] * 4, [16, 64, 16, 16]], ids=["alike", "one that grows"])
def test_sums_of_gradients_come_to_the_device_after_the_first_pass(first_sizes, gauge, monkeypatch, tmp_path):
    """Host memory has no place for the sums. Without this, each pass of the first step would read and write them on NVMe."""
    options = {"accumulation_steps": 4}
    sizes = [first_sizes, [16] * 4]
    gauge.capacity = 1 << 40
    with training(tiny_gpt, tmp_path, options=options, param_tier="host", optimizer_state_tier="host") as (model, engine, optimizer):
        train(model, engine, optimizer, sizes, gauge)
        expected = states_of(engine, model)
    came = []
    bring = Gradients.stay_on_device
    monkeypatch.setattr(Gradients, "stay_on_device", lambda self, chunks: (came.append(len(chunks)), bring(self, chunks)))
    least, records = budgets(tiny_gpt, tmp_path, options=options)
    gauge.capacity = least + sum(records[:8]) - (48 << 10)
    with training(tiny_gpt, tmp_path, options=options, device_memory=least + sum(records[:8]), **HOMES["nvme"]) as (model, engine, optimizer):
        train(model, engine, optimizer, sizes, gauge)
        assert_same_states(states_of(engine, model), expected)
        assert came[0] > 8 and gauge.overflows == 0
        assert engine.device_budget.meter.op_nbytes[None] == max(first_sizes) << 10  # the sums do not count as memory of an op
        assert len(came) == (1 if first_sizes == sizes[1] else 2), came  # a larger micro-batch makes sums leave, then some return


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "seconds, steps_back",
    [
        ([5.1, 4.9, 6.6, 8.0, 4.9, 4.9], 1),  # two longer steps in a row
        ([5.1, 9.9, 4.0, 4.5, 4.9, 4.9], 0),  # not longer than the step before the division
        ([5.1, 4.9, 6.6, 6.5, 7.0, 7.0], 0),  # no two longer steps in a row
        ([5.1, 3.0, 5.0, 6.0, 6.0], 0),  # the first step after the division does not count
        ([5.1, 3.0, 3.0, 5.0, 6.0, 6.0], 1),
    ],
)
def test_a_division_that_makes_steps_longer_is_undone(seconds, steps_back, gauge, monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(trial, "now", lambda: clock[0])
    with training(tiny_gpt, tmp_path, param_tier="host", optimizer_state_tier="host") as (model, engine, optimizer):
        gauge.capacity = 1 << 40
        train(model, engine, optimizer, [[16]] * len(seconds), gauge)
        expected = states_of(engine, model)
    least, records = budgets(tiny_gpt, tmp_path)
    gauge.capacity = least + sum(records[:6]) + (16 << 10)
    with training(tiny_gpt, tmp_path, device_memory=gauge.capacity) as (model, engine, optimizer):
        gauge.tier, gauge.activations, counts = engine.tier, 16 << 10, []
        for step, duration in enumerate(seconds):
            model(*tokens(step, 0, batch=16)).backward()
            clock[0] += duration
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(engine.device_budget.promoted))
        assert engine.stats()["num_placement_rollbacks"] == steps_back
        assert counts[0] > 0 and (counts[-1] == 0) == bool(steps_back), counts
        assert_same_states(states_of(engine, model), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "after, count", [([20.0, 20.0, 9.0, 9.5, 10.0, 12.0, 15.0], 1), ([9.0, 5.5, 5.5, 5.5, 5.5], 1), ([20.0, 5.2, 20.0, 20.0, 20.0], 0)]
)
def test_an_undone_division_comes_back_if_steps_stay_longer(after, count, gauge, clock, tmp_path):
    """Steps took 5.1 s before the division. The second step without the division decides. The division that comes back is not on trial."""
    least, records = budgets(tiny_gpt, tmp_path)
    gauge.capacity, counts = least + sum(records[:6]) + (16 << 10), []
    with training(tiny_gpt, tmp_path, device_memory=gauge.capacity) as (model, engine, optimizer):
        gauge.tier, gauge.activations = engine.tier, 16 << 10
        for seconds in (*LONGER_AND_LONGER, *after):
            timed_step(model, optimizer, clock, seconds)
            counts.append(len(engine.device_budget.promoted))
        assert engine.stats()["num_placement_rollbacks"] == 1
    before = counts[0]
    assert before > 0 and counts[: 4 + 2] == [before, before, before, 0, 0, before * count]
    assert set(counts[6:]) == {before * count}


@pytest.fixture
def clock(monkeypatch):
    """The clock of allocation trials: a list with one time in seconds."""
    clock = [0.0]
    monkeypatch.setattr(trial, "now", lambda: clock[0])
    return clock


def timed_step(model, optimizer, clock, seconds, batch=16):
    model(*tokens(0, batch=batch)).backward()
    clock[0] += seconds
    optimizer.step()
    optimizer.zero_grad()


LONGER_AND_LONGER = [5.1, 6.6, 8.0, 9.7]


@pytest.mark.slow
def test_every_new_division_of_device_memory_is_on_trial(gauge, clock, tmp_path):
    """A division follows larger inputs or a failed allocation, long after the previous trial is over."""
    least, records = budgets(tiny_gpt, tmp_path)
    gauge.capacity, found = least + sum(records[:6]) + (64 << 10), []
    with training(tiny_gpt, tmp_path, device_memory=gauge.capacity) as (model, engine, optimizer):
        gauge.tier, gauge.activations = engine.tier, 16 << 10
        for batch in (8, 16):
            for _ in range(trial.NUM_STEPS + 3):
                timed_step(model, optimizer, clock, 1.0, batch)
            assert not engine.device_budget.trial.is_on
            for seconds in LONGER_AND_LONGER:
                timed_step(model, optimizer, clock, seconds, batch + 4)
            found.append((engine.stats()["num_placement_rollbacks"], len(engine.device_budget.promoted)))
        model(*tokens(0, batch=20))  # this pass finds no room and takes 100 s
        clock[0] += 100.0
        gauge.failures += 1
        optimizer.zero_grad()
        for seconds in LONGER_AND_LONGER:
            timed_step(model, optimizer, clock, seconds, 20)
        found.append((engine.stats()["num_placement_rollbacks"], len(engine.device_budget.promoted)))
    assert found == [(1, 0), (2, 0), (3, 0)]


def test_no_division_is_on_trial_before_the_optimizer_exists(gauge, clock, tmp_path):
    """The time between two evaluations is not a step time. Evaluations do not belong to the first step."""
    least, records = budgets(tiny_gpt, tmp_path)
    gauge.capacity = least + sum(records[:6]) + (16 << 10)
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, device_memory=gauge.capacity)
    model = tiny_gpt()
    with infinity.offload(model, config) as engine, torch.no_grad():
        engine.start()
        gauge.tier, gauge.activations = engine.tier, 16 << 10
        for seconds in (0.0, *LONGER_AND_LONGER, 0.0):
            model(*tokens(0, batch=16))
            clock[0] += seconds
        assert engine.device_budget.budget_nbytes > engine.placement.least_nbytes and not engine.device_budget.trial.is_on
        optimizer = infinity.AdamW(model.parameters())
        with torch.enable_grad():
            for seconds in LONGER_AND_LONGER:
                timed_step(model, optimizer, clock, seconds)
        assert engine.stats()["num_placement_rollbacks"] == 1


def test_after_a_failed_allocation_all_records_leave_and_are_placed_anew(gauge, tmp_path):
    """Memory may grow with equal inputs, for example if experts have unequal shares. The step that is repeated has all memory."""
    sizes = [[16]] * 3
    with training(tiny_gpt, tmp_path, param_tier="host", optimizer_state_tier="host") as (model, engine, optimizer):
        gauge.capacity = 1 << 40
        train(model, engine, optimizer, sizes, gauge)
        expected = states_of(engine, model)
    least, records = budgets(tiny_gpt, tmp_path)
    gauge.capacity = least + sum(records[:6]) + (16 << 10)
    with training(tiny_gpt, tmp_path, device_memory=gauge.capacity) as (model, engine, optimizer):
        counts = [train(model, engine, optimizer, sizes[:1], gauge)[0][1]]
        gauge.failures += 1  # in the first attempt of the second step
        before = model(*tokens(1, 0, batch=16))
        counts.append(len(engine.device_budget.promoted))
        del before
        optimizer.zero_grad()
        gauge.activations = 200 << 10
        for step in (1, 2):
            model(*tokens(step, 0, batch=16)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(engine.device_budget.promoted))
        assert_same_states(states_of(engine, model), expected)
    first, failed, again, settled = counts
    assert first > 0 == failed and again == settled < first and gauge.overflows == 0, counts


def test_ops_may_hold_more_than_the_least_memory_in_the_first_step(gauge, tmp_path):
    """A layer-wise step holds a whole segment, which the least budget does not include."""
    gauge.capacity = 1 << 30
    options = {"accumulation_steps": 2}

    class Block(torch.nn.Sequential):
        def __init__(self):
            super().__init__(*(torch.nn.Linear(24, 24) for _ in range(8)))

    def run(**config):
        with training(lambda: torch.nn.Sequential(Block(), Block()), tmp_path, options=options, **config) as (model, engine, optimizer):
            gauge.tier = engine.tier
            batches = [(torch.full((2, 24), 0.1 * i), None) for i in range(2)]
            for _ in range(2):
                infinity.accumulate(model, batches, lambda model, batch: model(batch[0]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return states_of(engine, model)

    with training(Block, tmp_path, options=options, param_tier="nvme", optimizer_state_tier="nvme", residency="none") as (_, engine, _):
        assert engine.placement.least_nbytes < engine.registry.spans[0].nbytes * len(engine.registry.spans)
    assert_same_states(run(param_tier="nvme", optimizer_state_tier="nvme", residency="none"), run(param_tier="device", optimizer_state_tier="device"))


def test_weights_written_in_forward_leave_the_device_with_their_record(gauge, tmp_path):
    """An evaluation scales rows of the embedding on the device. Then the record leaves the device before step()."""
    make = TRAITS["max_norm"]
    least, records = budgets(make, tmp_path, dtype="bf16")

    def run(capacity, **config):
        gauge.capacity, gauge.activations, counts = capacity, 1 << 10, []
        with training(make, tmp_path, dtype="bf16", options={"lr": 0.5}, **config) as (model, engine, optimizer):
            gauge.tier = engine.tier
            for step in range(3):
                loss_of(model(inputs(model, step))).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for x in (inputs(model, 99), torch.cat([inputs(model, 98)] * 30)):
                    counts.append(len(engine.device_budget.promoted))
                    model(x)
            counts.append(len(engine.device_budget.promoted))
            return states_of(engine, model), counts

    expected, _ = run(1 << 30, param_tier="host", optimizer_state_tier="host")
    states, counts = run(least + sum(records), device_memory=least + sum(records[:1]))
    assert counts == [1, 1, 0]
    assert_same_states(states, expected)


@pytest.mark.slow
@pytest.mark.parametrize("builds_graph", [True, False])
def test_an_evaluation_does_not_change_the_memory_planned_for_training(builds_graph, gauge, tmp_path):
    least, records = budgets(tiny_gpt, tmp_path)
    gauge.capacity = least + sum(records[:6]) + (16 << 10)
    with training(tiny_gpt, tmp_path, device_memory=least + sum(records[:8])) as (model, engine, optimizer):
        train(model, engine, optimizer, [[16]] * 2, gauge)
        before = len(engine.device_budget.promoted)
        with torch.set_grad_enabled(builds_graph):
            gauge.activations = 8 << 10
            model(*tokens(9, batch=64))
        train(model, engine, optimizer, [[16]], gauge)
        assert len(engine.device_budget.promoted) == before
        gauge.activations = 64 << 10
        model(*tokens(3, batch=64))  # if the first pass had a graph, this batch is known to fit
        assert len(engine.device_budget.promoted) == (before if builds_graph else 0)


def test_records_whose_weights_are_held_leave_too(gauge, tmp_path):
    least, records = budgets(tiny_gpt, tmp_path)
    gauge.capacity = least + sum(records[:6]) + (64 << 10)

    def run(**config):
        with training(tiny_gpt, tmp_path, **config) as (model, engine, optimizer):
            train(model, engine, optimizer, [[16]] * 2, gauge)
            before = len(engine.device_budget.promoted)
            with infinity.gathered(list(model.parameters())):
                gauge.activations = 64 << 10
                model(*tokens(2, batch=64)).backward()
            after = len(engine.device_budget.promoted)
            optimizer.step()
            optimizer.zero_grad()
            train(model, engine, optimizer, [[16]], gauge)
            return states_of(engine, model), before, after

    states, before, after = run(device_memory=least + sum(records[:8]))
    assert before > after == 0
    gauge.capacity = 1 << 40
    assert_same_states(states, run(param_tier="host", optimizer_state_tier="host")[0])


def test_records_come_to_the_device_after_evaluations_without_optimizer(tmp_path):
    least, records = budgets(tiny_gpt, tmp_path)
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, device_memory=least + sum(records[:6]))
    model = tiny_gpt()
    with infinity.offload(model, config) as engine:
        for _ in range(2):
            with torch.no_grad():
                model(*tokens(0))
        assert engine.device_budget.promoted == []
        optimizer = infinity.AdamW(model.parameters())
        gpt_step(model, optimizer, 0)
        assert engine.device_budget.promoted


@pytest.mark.parametrize(
    "shapes, seen, growth",
    [
        (((8, 128), (8, 128)), ((4, 128), (4, 128)), 2),
        (((8, 256),), ((4, 128),), 4),
        (((4, 64),), ((4, 128),), 1),
        (((8, 64),), ((4, 128),), 2),
        (((4, 128), (4,)), ((4, 128),), math.inf),
        ((), (), 1),
    ],
)
def test_growth_is_the_largest_growth_of_any_input(shapes, seen, growth):
    assert activation_meter._growth(shapes, seen) == growth


# A real device


def sized_gpt():
    """0.17 B parameters, 2.3 GB with states and gradients in bf16."""
    return GPT(hidden=1024, layers=8, heads=16, vocab=32000, seq=512, checkpoint_activations=True)


def step_on_device(model, optimizer, step, batch):
    x = torch.randint(32000, (batch, 512), generator=torch.Generator().manual_seed(step)).cuda()
    loss = model(x, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@on_gpu
def test_every_split_on_a_gpu_has_the_same_bits(deterministic, tmp_path):
    found, counts = [], []
    for config in ({"param_tier": "host", "optimizer_state_tier": "host"}, {"device_memory": "1GiB"}, {"device_memory": "2GiB"}, {"device_memory": "8GiB"}):
        options = {"device": "cuda", "dtype": "bf16", "chunk_mib": 4, "host_memory": "8GiB", "options": {"lr": 1e-3}}
        with training(sized_gpt, tmp_path, **options, **config) as (model, engine, optimizer):
            losses = [step_on_device(model, optimizer, step, 2) for step in range(4)]
            counts.append(len(engine.device_budget.promoted))
            found.append((losses, states_of(engine, model)))
    for losses, states in found[1:]:
        assert losses == found[0][0]
        assert_same_states(states, found[0][1])
    assert 0 == counts[0] == counts[3] < counts[1] < counts[2]  # with 8 GiB the whole model fits, and the device is the tier of all records


@on_gpu
@pytest.mark.parametrize("remains", [False, True], ids=["", "remains"])
@pytest.mark.parametrize("home", [{"host_memory": "8GiB"}, {"host_memory": "400MiB"}], ids=["host", "nvme"])
def test_a_gpu_that_is_almost_full_trains_with_twice_the_batch(home, remains, deterministic, tmp_path):
    """The process may use 3.5 GiB. All records do not fit beside a batch of 4, and most do not fit beside a batch of 8. With `remains`, 400 MiB
    are free in a block of the allocator, of which the program still uses a part."""

    def run(**config):
        found = []
        options = {"device": "cuda", "dtype": "bf16", "chunk_mib": 4, "options": {"lr": 1e-3}}
        with training(sized_gpt, tmp_path, **options, **config) as (model, engine, optimizer):
            for step, batch in enumerate([4] * 4 + [8] * 4):
                loss = step_on_device(model, optimizer, step, batch)
                found.append((loss, engine.follower.num_plans, len(engine.device_budget.promoted)))
            print(f"activations {engine.device_budget.meter.activation_nbytes >> 20} MiB, {found}")
        return zip(*found)

    expected, *_ = run(param_tier="host", optimizer_state_tier="host", host_memory="8GiB")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(3.5 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    if remains:
        torch.empty(450 << 20, dtype=torch.uint8, device="cuda")  # the allocator keeps this block
        used = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")  # noqa: F841, from the same block
    try:
        losses, plans, counts = run(**home)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert losses == expected
    assert plans == (1,) * 4 + (2,) * 4
    assert counts[3] > counts[4] == counts[7], counts
