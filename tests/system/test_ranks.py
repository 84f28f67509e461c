"""One, two and four ranks compute the same values. Each rank holds, reads and updates its shard of every chunk.

The ranks are processes (support/ranks.py) that live as long as the tests of this file, and run functions of this file at once. The file
is long because its tests share these processes and functions.
"""

import errno
import gc
import itertools
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.helpers import ScriptedGauge, on_gpu, run_micro_batches
from support.ranks import ON_NVME, SECONDS, World, gpt, launch, num_descriptors, ranks, settings, share, states_of, tokens, total
from torch import nn

import infinity
from aio_ext import _aio
from infinity.plan import placement as planner
from infinity.tiers.record_mover import RecordMover
from infinity.tiers.updates import Updater

KINDS = [(1, "weights"), (2, "states")]


# ---- functions that the ranks run ----


class Branches(nn.Module):
    """`bias` and `side` get gradients if the arguments say so, `never` gets none. All ranks run the same modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.side = nn.Linear(16, 64)
        self.bias = nn.Parameter(torch.randn(64))
        self.never = nn.Parameter(torch.randn(3000))
        self.second = nn.Linear(64, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x, with_bias, with_side):
        side, bias = self.side(x), self.bias
        h = self.first(x) + (side if with_side else side.detach()) + (bias if with_bias else bias.detach())
        return self.last(torch.tanh(self.second(torch.tanh(h))))


def made(folder, *, kind="AdamW", **changes):
    """(model, optimizer) of the GPT. kind: name of the optimizer's class."""
    torch.manual_seed(0)
    with infinity.init(settings(folder, **changes)):
        model = gpt()
    return model, getattr(infinity, kind)(model.parameters(), lr=1e-2)


def average(folder, **changes):
    """The average after three steps, the loss with it, and the weights afterwards."""
    torch.manual_seed(0)
    with infinity.init(settings(folder, **changes)):
        model = gpt()
    ema = infinity.EMA(model, 0.8)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with infinity.engine_of(model):
        for step in range(3):
            model(*tokens(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = ema.state_dict()
        with ema.weights(), torch.no_grad():
            loss = model(*tokens(3, 0)).item()
        return [loss, *(value.numpy().tobytes() for value in (*values.values(), *model.state_dict().values()))]


def train(folder, *, steps=3, checkpoint=False, evaluate=False, window=None, optimizer=None, **changes):
    """Train the GPT. Return mean losses over all ranks, norms, states, the order of collectives, reads, and more."""
    optimizer = {"lr": 1e-2, **(optimizer or {})}
    torch.manual_seed(0)
    with infinity.init(settings(folder, **changes), **({} if window is None else {"window": window})):
        model = gpt(checkpoint)
    adam = infinity.AdamW(model.parameters(), **optimizer)
    engine = infinity.engine_of(model)
    micros = optimizer.get("accumulation_steps", 1)
    losses, norms, evaluations = [], [], []
    with engine:
        for step in range(steps):
            loss = 0.0
            for micro in range(micros):
                x, y = map(share, tokens(step, micro))
                part = model(x, y) / micros
                part.backward()
                loss += part.item()
            adam.step()
            adam.zero_grad()
            losses.append(total(loss))
            norms.append(adam.grad_norm)
            if evaluate:
                with torch.no_grad():
                    evaluations.append(total(model(*map(share, tokens(99, 0)))))
        engine.flush()
        records = [(c.record.numel, c.record.weight_nbytes, c.record.states_nbytes) for c in engine.registry.chunks]
        return {
            "losses": losses,
            "norms": norms,
            "evaluations": evaluations,
            "states": states_of(engine, model),
            "collectives": [(e.lane, e.what) for e in engine.events.trace if e.lane in ("all_gather", "reduce_scatter")],
            "reads": [e.what for e in engine.events.trace if e.lane == "nvme_read"],
            "copies": [e.what for e in engine.events.trace if e.lane == "h2d"],
            "records": records,
            "nbytes": {"read": engine.stats()["links"]["nvme_read"]["nbytes"], "written": engine.stats()["nvme_write_nbytes"]},
            "chunks": [(c.numel, c.used) for c in engine.layout.chunks],
            "num_prefetch_plans": engine.stats()["num_prefetch_plans"],
            "num_promoted": len(engine.device_budget.promoted),
            "num_spans": len(engine.registry.spans),
            "pass": not any(engine.placement.on_nvme["gradients"]),
        }


def train_crowded(folder, drive_nbytes, **changes):
    """Like `train`, with drive_nbytes free on the drive. `at_home`: number of chunks whose home is the device."""
    homes = []

    def placed(*arguments, **options):
        homes.append(place(*arguments, **options))
        return homes[-1]

    place = planner.place
    with mock.patch("infinity.engine.build.room_nbytes", lambda paths: drive_nbytes), mock.patch("infinity.plan.placement.place", placed):
        return train(folder, **changes) | {"at_home": len([home for home in homes[-1].homes["states"] if home.is_device])}


def train_split(folder, every, **changes):
    """Like `train`. The drives of rank r seem busy at every `every[r]`-th update. `put_off`: indices of the postponed chunks."""
    asked, put_off = itertools.count(), []

    def noted(updater, chunk):
        put_off.append(chunk.index)
        return put_off_(updater, chunk)

    put_off_ = Updater.put_off
    crowded = lambda records, kind: next(asked) % every[dist.get_rank()] == 0
    with mock.patch.object(RecordMover, "is_crowded", crowded), mock.patch.object(Updater, "put_off", noted):
        return train(folder, **changes) | {"put_off": put_off}


def reference(*, steps=3, micros=1, max_grad_norm=None, lr=1e-2):
    """Losses and norms of plain PyTorch over the global batch."""
    torch.manual_seed(0)
    model = gpt()
    adam = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, norms = [], []
    for step in range(steps):
        loss = 0.0
        for micro in range(micros):
            part = model(*tokens(step, micro)) / micros
            part.backward()
            loss += part.item()
        if max_grad_norm:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item())
        adam.step()
        adam.zero_grad()
        losses.append(loss)
    return losses, norms


def grow(folder, capacity):
    """Train on a scripted device; the last rank's batch grows fourfold at step 3. Return states, (plans, promoted) per step, overflows."""
    rank, world = ranks()
    gauge = ScriptedGauge(capacity)
    with (
        mock.patch("infinity.engine.engine.gauge_of", lambda device: gauge),
        mock.patch("infinity.engine.memory.activation_meter.SLACK", 0.0),
        mock.patch("infinity.plan.placement.UNDER_WAY_NBYTES", 0),  # the budgets of this test are some hundred KiB
    ):
        model, adam = made(folder, device_memory="680KiB", chunk_mib=1 / 64)
        engine, found = infinity.engine_of(model), []
        gauge.tier = engine.tier
        with engine:
            for step in range(6):
                batch = 16 if step >= 3 and rank == world - 1 else 4
                gauge.activations = batch << 13
                model(*tokens(step, rank, batch)).backward()
                adam.step()
                adam.zero_grad()
                found.append((engine.follower.num_plans, len(engine.device_budget.promoted)))
            return states_of(engine, model), found, gauge.overflows


def keep_sums(folder, update, **places):
    """Train three steps of three passes on a scripted device, with slow copies of gradients. Return states; chunks whose gradients may stay on
    the device, by this rank's host memory and as agreed by all ranks; chunks whose gradients stay."""
    gauge, found = ScriptedGauge(480 << 10), []

    def placed(*arguments, **options):
        found.append(place(*arguments, **options))
        return found[-1]

    place = planner.place
    with (
        mock.patch("infinity.engine.engine.gauge_of", lambda device: gauge),
        mock.patch("infinity.plan.placement.UNDER_WAY_NBYTES", 0),
        mock.patch("infinity.plan.placement.place", placed),
    ):
        torch.manual_seed(0)
        with infinity.init(settings(folder, update=update, chunk_mib=1 / 64, dtype="bf16", **places)):
            model = gpt()
        adam, engine = infinity.AdamW(model.parameters(), lr=1e-2, accumulation_steps=3), infinity.engine_of(model)
        gauge.tier = engine.tier
        with engine:
            engine.gradients.gc.on_job = lambda: time.sleep(0.002)
            for step in range(3):
                for micro in range(3):
                    model(*map(share, tokens(step, micro))).backward()
                adam.step()
                adam.zero_grad()
            may_stay = sorted(found[-1].may_stay), sorted(engine.placement.may_stay)
            stay = [chunk.index for span in engine.device_budget.staying for chunk in engine.registry.chunks_in(engine.registry.spans[span])]
            return states_of(engine, model), may_stay, sorted(stay)


# ---- the same values ----


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "size, update",
    [(2, "backward"), (4, "deferred")]
    + [pytest.param(*case, marks=pytest.mark.long) for case in [(1, "backward"), (2, "deferred"), (4, "backward")]],
)
def test_losses_equal_those_of_one_process(worlds, tmp_path, size, update):
    found = worlds(size).run(train, tmp_path, steps=4, update=update, **ON_NVME)
    losses, _ = reference(steps=4)
    for rank in found:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["states"] == found[0]["states"]


@pytest.mark.slow
def test_micro_batches_and_clipping_match_one_process(worlds, tmp_path):
    options = {"accumulation_steps": 3, "max_grad_norm": 0.5}
    losses, norms = reference(micros=3, max_grad_norm=0.5)
    for rank in worlds(2).run(train, tmp_path, optimizer=options, **ON_NVME):
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["norms"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("micros", [1, 3])
def test_ranks_may_postpone_different_updates(worlds, tmp_path, micros):
    options = {"optimizer": {"accumulation_steps": micros}, "update": "backward", "steps": 5}
    expected = worlds(2).run(train, tmp_path, **options, **ON_NVME)
    found = worlds(2).run(train_split, tmp_path, [2, 3], **options, **ON_NVME)
    for one, other in zip(found, expected):
        assert (one["losses"], one["states"], one["collectives"]) == (other["losses"], other["states"], other["collectives"])
    assert found[0]["put_off"] and found[1]["put_off"] and found[0]["put_off"] != found[1]["put_off"]


PLACEMENTS = [
    {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none"},
    {"param_tier": "host", "optimizer_state_tier": "nvme"},
    {"param_tier": "host", "optimizer_state_tier": "host"},
    {"param_tier": "device", "optimizer_state_tier": "host"},
    {"param_tier": "device", "optimizer_state_tier": "nvme"},
    {"param_tier": "device", "optimizer_state_tier": "device"},
    {"param_tier": "nvme", "optimizer_state_tier": "nvme", "device_memory": "400KiB", "compression": "on"},
    {"param_tier": "nvme", "optimizer_state_tier": "nvme", "host_memory": "700KiB", "update": "backward"},
    {"param_tier": "nvme", "optimizer_state_tier": "nvme", "chunk_mib": 1 / 256},
    {"param_tier": "nvme", "optimizer_state_tier": "host", "chunk_mib": 1 / 32, "update": "deferred"},
    {"update": "backward"},
    {"device_memory": "600KiB"},
    {"device_memory": "640KiB", "host_memory": "700KiB", "update": "backward"},
]


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_placement_changes_no_bit(worlds, tmp_path, dtype):
    results = {}
    placements = PLACEMENTS if dtype == "fp32" else PLACEMENTS[::3]
    for index, placement in enumerate(placements):
        folder = tmp_path / str(index)
        folder.mkdir()
        options = {"chunk_mib": 1 / 64, "update": "deferred", **placement}
        results[index] = worlds(2).run(train, folder, dtype=dtype, evaluate=index % 2 == 0, **options)[0]
    for index, placement in enumerate(placements):
        assert results[index]["losses"] == results[0]["losses"], placement
        assert results[index]["states"] == results[0]["states"], placement
        assert results[index]["evaluations"] in ([], results[0]["evaluations"]), placement
    assert 0 < results[len(placements) - 1]["num_promoted"] < results[0]["num_spans"]


@pytest.mark.slow
def test_homes_on_the_device_for_lack_of_nvme_change_no_bit(worlds, tmp_path):
    options = {"dtype": "bf16", "chunk_mib": 1 / 64, "device_memory": "600KiB", "host_memory": "300KiB", "evaluate": True}
    found = [worlds(2).run(train_crowded, tmp_path, drive_nbytes, **options) for drive_nbytes in (1 << 30, 400 << 10, 200 << 10)]
    for ranks_ in found:
        assert [rank["at_home"] for rank in ranks_] == [ranks_[0]["at_home"]] * 2
        for name in ("losses", "states", "evaluations"):
            assert [rank[name] for rank in ranks_] == [found[0][0][name]] * 2, name
    counts = [ranks_[0]["at_home"] for ranks_ in found]
    assert counts[0] == 0 < counts[1] < counts[2], counts


@pytest.mark.long
def test_gradients_without_a_place_on_nvme_change_no_bit(worlds, tmp_path):
    options = {"dtype": "bf16", "chunk_mib": 1 / 512, "device_memory": "300KiB", "host_memory": "100KiB"}
    found = [worlds(2).run(train_crowded, tmp_path, drive_nbytes, **options) for drive_nbytes in (1 << 30, 300 << 10)]
    for ranks_ in found:
        for name in ("losses", "states"):
            assert [rank[name] for rank in ranks_] == [found[0][0][name]] * 2, name
    assert [[rank["pass"] for rank in ranks_] for ranks_ in found] == [[False, False], [True, True]]


@pytest.mark.slow
def test_records_leave_the_device_on_all_ranks_if_one_needs_room(worlds, tmp_path):
    ample, tight = (worlds(2).run(grow, tmp_path, capacity) for capacity in (1 << 30, 712 << 10))
    assert tight[0][0] == tight[1][0] == ample[0][0]
    assert tight[0][1] == tight[1][1]
    assert [overflows for *_, overflows in tight] == [0, 0]
    plans, counts = zip(*tight[0][1])
    assert plans == (1, 1, 1, 2, 2, 2)
    assert counts[0] == counts[2] > counts[3] == counts[5] > 0


@pytest.mark.long
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_gradient_sums_stay_on_the_device_if_one_rank_lacks_host_memory(worlds, tmp_path, update):
    """The last rank has the smallest shards. Sums sent with an update include all gradients of the last pass."""
    expected, *_ = worlds(2).run(keep_sums, tmp_path, update, param_tier="device", optimizer_state_tier="device")
    first, last = worlds(2).run(keep_sums, tmp_path, update, device_memory="600KiB", host_memory="360KiB")
    differ = set(first[1][0]) ^ set(last[1][0])
    assert differ and first[1][1] == last[1][1], (first[1:], last[1:])
    assert first[2] == last[2] and differ <= set(first[2]), (first[1:], last[1:])
    assert first[0] == last[0] == expected[0]


@pytest.mark.long
def test_the_norm_has_the_same_bits_for_every_chunk_size(worlds, tmp_path):
    norms = set()
    for chunk_mib in (1 / 256, 1 / 64, 1 / 16):
        options = {**ON_NVME, "chunk_mib": chunk_mib}
        for rank in worlds(2).run(train, tmp_path, optimizer={"max_grad_norm": 0.5}, **options):
            norms.add(tuple(rank["norms"]))
    assert len(norms) == 1


@pytest.mark.long
def test_checkpointed_activations_change_no_bit(worlds, tmp_path):
    plain, checkpointed = (worlds(2).run(train, tmp_path, checkpoint=on, **ON_NVME)[0] for on in (False, True))
    assert plain["losses"] == checkpointed["losses"]
    assert plain["states"] == checkpointed["states"]


# ---- each rank's part ----


@pytest.mark.long
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_every_rank_holds_and_reads_its_shard_of_every_chunk(worlds, tmp_path, size):
    found = worlds(size).run(train, tmp_path, steps=5, **ON_NVME)
    chunks = found[0]["chunks"]
    assert len(chunks) > 8
    for index, (numel, used) in enumerate(chunks):
        parts = [rank["records"][index][0] for rank in found]
        assert sum(parts) == used
        assert parts == [min(max(used - r * numel // size, 0), numel // size) for r in range(size)]
    for rank in found:
        holds = {index for index, (numel, _, _) in enumerate(rank["records"]) if numel}
        assert {index for index, _ in rank["reads"]} == holds
        assert set(rank["copies"]) >= holds
        # Every read is of this rank's own record, and each step writes the whole record once. The start writes no zeros, such as first
        # states. A read of zeros before the first step has written them transfers no bytes.
        sizes = {(index, kind): record[i] for index, record in enumerate(rank["records"]) for i, kind in KINDS}
        states = sum(size for (_, kind), size in sizes.items() if kind == "states")
        zeros = (5 + 1) * sum(sizes.values()) - rank["nbytes"]["written"]
        assert states <= zeros <= states + sum(size for (_, kind), size in sizes.items() if kind == "weights") / 4
        assert zeros <= sum(sizes[what] for what in rank["reads"]) - rank["nbytes"]["read"] <= 2 * zeros
    whole = sum(12 * used for _, used in chunks)
    parts = [sum(sum(record[1:]) for record in rank["records"]) for rank in found]
    assert max(parts) <= whole / size + 3 * 4096 * len(chunks)  # each segment is rounded up to 4096 bytes


@pytest.mark.slow
def test_collectives_have_one_order_on_all_ranks(worlds, tmp_path):
    for size, update in ((2, "backward"), (2, "deferred"), (4, "backward")):
        found = worlds(size).run(train, tmp_path, checkpoint=True, update=update, **ON_NVME)
        assert {lane for lane, _ in found[0]["collectives"]} == {"all_gather", "reduce_scatter"}
        assert all(rank["collectives"] == found[0]["collectives"] for rank in found)
        assert all(rank["num_prefetch_plans"] >= 1 for rank in found)


# ---- parameters that not every rank uses ----


def train_branches(folder, bias_on, side_on, *, steps=4, **changes):
    """Train Branches. `bias` and `side` get gradients only on the given ranks. Return states and the number of plans."""
    torch.manual_seed(0)
    with infinity.init(settings(folder, **changes)):
        model = Branches()
    adam = infinity.AdamW(model.parameters(), lr=1e-2)
    engine = infinity.engine_of(model)
    rank, world = ranks()
    with engine:
        for step in range(steps):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(share(x), rank in bias_on, rank in side_on).square().mean().backward()
            adam.step()
            adam.zero_grad()
        values = {name: engine.read_state(p) for name, p in model.named_parameters()}
        return {"values": values, "num_plans": engine.stats()["num_prefetch_plans"]}


def branches_reference(bias_on, side_on, world, steps=4):
    """Plain PyTorch. A rank without a gradient contributes zero. A parameter without any gradient is skipped."""
    torch.manual_seed(0)
    model = Branches()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        for rank, rows in enumerate(x.chunk(world)):
            (model(rows, rank in bias_on, rank in side_on).square().mean() / world).backward()
        adam.step()
        adam.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("bias_on, side_on", [((0,), (1,)), ((0, 1), ()), ((1,), (0, 1)), ((), ())])
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_a_gradient_missing_on_one_rank_counts_as_zero(worlds, tmp_path, bias_on, side_on, update):
    found = worlds(2).run(train_branches, tmp_path, bias_on, side_on, update=update, **{**ON_NVME, "chunk_mib": 1 / 256})
    expected = branches_reference(bias_on, side_on, 2)
    torch.manual_seed(0)
    initial = dict(Branches().named_parameters())
    for rank in found:
        for name, state in rank["values"].items():
            torch.testing.assert_close(state["weight"], expected[name], rtol=1e-4, atol=1e-6)
            assert all(torch.equal(state[kind], found[0]["values"][name][kind]) for kind in state)
        unused = ["never"] + ["bias"] * (not bias_on) + ["side.weight", "side.bias"] * (not side_on)
        for name in unused:
            assert torch.equal(rank["values"][name]["weight"], initial[name])
            assert not rank["values"][name]["momentum"].any()
        assert rank["num_plans"] >= 1


# ---- building and changing ----


@pytest.mark.slow
def test_models_built_in_init_equal_plain_construction(worlds, tmp_path):
    torch.manual_seed(0)
    plain = {name: param.detach().clone() for name, param in gpt().named_parameters()}
    for rank in worlds(2).run(built, tmp_path):
        assert rank.keys() == plain.keys()
        assert all(torch.equal(rank[name], plain[name]) for name in plain)


def built(folder):
    torch.manual_seed(0)
    with infinity.init(settings(folder, **ON_NVME), window=0):
        model = gpt()
    with infinity.engine_of(model) as engine:
        return {name: engine.read_state(param)["weight"] for name, param in model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("moments", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_two_ranks_with_the_same_data_have_the_bits_of_one_rank(worlds, tmp_path, moments, one_thread):
    """Gradients are doubled and halved exactly. So only positions of elements and their random bits could differ."""
    changes = {"dtype": "bf16", "optimizer_state_dtype": moments}
    expected = twins(tmp_path, **changes)
    for number, places in enumerate((ON_NVME, {"param_tier": "host", "optimizer_state_tier": "host", "chunk_mib": 1 / 16})):
        for found in worlds(2).run(twins, tmp_path, **changes, **places):
            assert found == expected, number


@pytest.mark.long
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_that_orthogonalize_matrices_have_the_bits_of_one_rank(worlds, tmp_path, size, one_thread):
    """Each matrix is in one shard, so that the rank of this shard can orthogonalize the whole matrix."""
    expected = twins(tmp_path, kind="Muon", dtype="bf16")
    for number, places in enumerate((ON_NVME, {"param_tier": "host", "optimizer_state_tier": "host", "chunk_mib": 1 / 16})):
        for found in worlds(size).run(twins, tmp_path, kind="Muon", dtype="bf16", **places):
            assert found == expected, number


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["nvme", "device"])
def test_the_average_of_weights_has_the_bits_of_one_rank(worlds, tmp_path, place, one_thread):
    changes = ON_NVME if place == "nvme" else {}
    alone = average(tmp_path, **changes)
    assert worlds(2).run(average, tmp_path, **changes) == [alone, alone]


@pytest.mark.long
@pytest.mark.parametrize("part", ["blocks.0", "bias"])
def test_parameters_can_be_frozen_for_some_steps(worlds, tmp_path, part, one_thread):
    """Some frozen parameters share a chunk with trainable parameters."""
    expected = twins(tmp_path, frozen=part, update="deferred")
    for number, places in enumerate((ON_NVME, {"chunk_mib": 1 / 16}, {"param_tier": "nvme", "optimizer_state_tier": "nvme"})):
        for found in worlds(2).run(twins, tmp_path, frozen=part, **places):
            assert found == expected, number


def twins(folder, frozen=None, **changes):
    """States after six steps. Parameters with `frozen` in their names train only in the first two and the last two steps."""
    model, adam = made(folder, **changes)
    for_some = [param for name, param in model.named_parameters() if frozen is not None and frozen in name]
    with infinity.engine_of(model) as engine:
        for step in range(6):
            for param in for_some:
                param.requires_grad_(step not in (2, 3))
            model(*tokens(step, 0)).backward()
            adam.step()
            adam.zero_grad()
        return states_of(engine, model)


@pytest.mark.slow
@pytest.mark.parametrize("nonfinite", ["skip", pytest.param("raise", marks=pytest.mark.long)])
def test_a_nan_on_one_rank_is_found_on_all_before_states_change(worlds, tmp_path, nonfinite):
    for rank, (before, after, raised, end) in enumerate(worlds(2).run(poisoned, tmp_path, nonfinite)):
        assert after == before and end != before
        if nonfinite == "raise":
            assert f"rank {rank} of 2" in raised and "No state was changed" in raised
        else:
            assert raised is None


def poisoned(folder, nonfinite):
    model, adam = made(folder, nonfinite=nonfinite, **ON_NVME)
    raised = None
    with infinity.engine_of(model) as engine:
        for step in range(4):
            if step == 2:
                before = states_of(engine, model)
            loss = model(*map(share, tokens(step, 0)))
            if step == 2 and dist.get_rank() == 1:
                loss = loss * float("nan")
            loss.backward()
            try:
                adam.step()
                adam.zero_grad()
            except infinity.NonFiniteError as error:
                raised = str(error)
            adam.zero_grad()
            if step == 2:
                after = states_of(engine, model)
        return before, after, raised, states_of(engine, model)


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_accumulation_by_layer_has_the_bits_of_the_ordinary_loop(worlds, tmp_path, dtype):
    by_layer, by_batch = (worlds(2).run(accumulated, tmp_path, way, dtype) for way in (True, False))
    assert by_layer == by_batch


@pytest.mark.long
def test_steps_by_layer_and_ordinary_steps_may_alternate(worlds, tmp_path):
    expected = worlds(2).run(accumulated, tmp_path, False, "fp32")[0][1]
    for found in worlds(2).run(accumulated, tmp_path, None, "fp32"):
        assert found[1] == expected


@pytest.mark.long
@pytest.mark.parametrize("bad", [pytest.param((0, 0), marks=pytest.mark.long), (0, 1), pytest.param((2, 1), marks=pytest.mark.long)], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks(worlds, tmp_path, bad):
    first, second = worlds(2).run(overflowing, tmp_path, bad)
    assert first == second
    scales, unchanged = zip(*first[0])
    assert unchanged == tuple(step == bad[0] for step in range(4))
    assert scales == tuple(2.0**11 if step >= bad[0] else 2.0**12 for step in range(4))


def overflowing(folder, bad):
    """Train in fp16; the last rank's loss is infinite once. Return (loss scale, whether all bytes are unchanged) per step, and states."""
    rank, world = ranks()
    torch.manual_seed(0)
    with infinity.init(settings(folder, dtype="fp16", **ON_NVME)):
        model = gpt()
    scale = infinity.LossScale(initial=2.0**12)
    adam = infinity.AdamW(model.parameters(), lr=1e-2, loss_scale=scale, accumulation_steps=2, max_grad_norm=0.5)
    with infinity.engine_of(model) as engine:
        found, before = [], states_of(engine, model)
        for step in range(4):
            for micro in range(2):
                loss = model(*map(share, tokens(step, micro))) / 2
                (loss * math.inf if (step, micro) == bad and rank == world - 1 else loss).backward()
            adam.step()
            adam.zero_grad()
            after = states_of(engine, model)
            found.append((engine.stats()["loss_scale"], before == after))
            before = after
        return found, before


def accumulated(folder, by_layer, dtype, micros=3):
    """Losses and states of four steps, by layer or not (None: alternately)."""
    torch.manual_seed(0)
    with infinity.init(settings(folder, dtype=dtype, **ON_NVME)):
        model = nn.Sequential(nn.Embedding(61, 48), *(nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(4)))
    adam = infinity.AdamW(model.parameters(), lr=1e-2, accumulation_steps=micros)
    loss_of = lambda output, target: output.float().logsumexp(-1).mean() / micros + output.float().square().mean()
    losses = []
    with infinity.engine_of(model) as engine:
        for step in range(4):
            batch = [tuple(map(share, tokens(step, micro))) for micro in range(micros)]
            losses += run_micro_batches(model, batch, loss_of, step % 2 if by_layer is None else by_layer)
            adam.step()
            adam.zero_grad()
        return losses, states_of(engine, model)


def test_a_rank_may_hold_nothing_but_padding(worlds, tmp_path):
    """The first rank's shards hold the whole tiny model, or all its trainable parameters."""
    for first, second in [worlds(2).run(tiny, tmp_path, frozen, choice) for frozen in (False, True) for choice in ("off", "on")]:
        assert first == second and first[-1] < first[0]


def test_ranks_agree_on_compression_buffers_before_chunk_sizes(worlds, tmp_path):
    assert worlds(2).run(reserved, tmp_path) == [0, 0]


def reserved(folder):
    """Compression would pay off on rank 0 only."""
    model = nn.Linear(64, 64)
    with mock.patch("infinity.engine.build.may_compress", lambda *_: dist.get_rank() == 0):
        with infinity.offload(model, settings(folder, param_tier="nvme", optimizer_state_tier="nvme")) as engine:
            infinity.AdamW(model.parameters())
            return engine.placement.compression_nbytes


def tiny(folder, frozen, compression):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 8))
    if frozen:
        model[0].requires_grad_(False)
        model[1].weight.requires_grad_(False)
    losses = []
    with infinity.offload(model, settings(folder, param_tier="nvme", optimizer_state_tier="nvme", compression=compression)):
        adam = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(4):
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.long
def test_closed_engines_leave_no_descriptors_or_threads(worlds, tmp_path):
    for after_two, after_six in worlds(2).run(opened, tmp_path):
        assert after_six == after_two


def opened(folder):
    found = []
    for number in range(6):
        train(folder, steps=1, **ON_NVME)
        gc.collect()
        found.append((num_descriptors(), len(os.listdir("/proc/self/task"))))
    return found[1], found[5]


@pytest.mark.long
def test_engines_dropped_on_all_ranks_end(worlds, tmp_path):
    """Ranks drop an engine at different times, and no rank waits for the others."""
    for after_two, after_six in worlds(2).run(dropped, tmp_path):
        assert after_six == after_two


def dropped(folder):
    found = []
    for number in range(6):
        model, adam = made(folder, **ON_NVME)
        for step in range(2):
            model(*tokens(step, 0)).backward()
            adam.step()
            adam.zero_grad()
        del model
        if number % 2 != dist.get_rank():
            gc.collect()
            dist.barrier()
        else:
            dist.barrier()
            gc.collect()
        dist.barrier()
        found.append((num_descriptors(), len(os.listdir("/proc/self/task"))))
    return found[1], found[5]


@pytest.mark.long
def test_changes_of_rank_0_in_gathered_reach_all_ranks(worlds, tmp_path):
    for size in (2, 4):
        for rank in worlds(size).run(changed, tmp_path):
            assert torch.equal(rank["token"], torch.full((61, 48), 0.5))
            assert torch.equal(rank["norm"], torch.arange(48.0))
            assert rank["seen"] == rank["token"].sum() and rank["output"] == rank["expected"]


def changed(folder):
    model, adam = made(folder, **ON_NVME)
    with infinity.engine_of(model) as engine:
        for step in range(2):
            model(*map(share, tokens(step, 0))).backward()
            adam.step()
            adam.zero_grad()
        with infinity.gathered([model.token.weight, model.norm.weight]), torch.no_grad():
            if dist.get_rank() == 0:
                model.token.weight.fill_(0.5)
                model.norm.weight.copy_(torch.arange(48.0))
            else:
                model.token.weight.fill_(7.0)
        with infinity.gathered(model.token.weight):
            seen = model.token.weight.detach().sum()
        weights = {name: engine.read_state(param)["weight"] for name, param in model.named_parameters()}
        plain = gpt()
        plain.load_state_dict(weights)
        with torch.no_grad():
            output, expected = (m(*tokens(7, 0)).item() for m in (model, plain))
        model(*map(share, tokens(3, 0))).backward()
        adam.step()
        adam.zero_grad()
        return {
            "token": weights["token.weight"],
            "norm": weights["norm.weight"],
            "seen": seen,
            "output": output,
            "expected": expected,
        }


# ---- launchers, and ranks that run different modules ----


@pytest.mark.long
def test_two_torchrun_nodes_train_as_one_process(tmp_path):
    source = """
        import json, sys
        from pathlib import Path
        import torch.distributed as dist
        import test_ranks

        folder = Path(sys.argv[1])
        dist.init_process_group("gloo")
        mine = folder / f"node{dist.get_rank()}"  # each node has a swap directory
        mine.mkdir()
        found = test_ranks.train(mine, steps=4, **test_ranks.ON_NVME)
        (folder / f"losses{dist.get_rank()}").write_text(json.dumps(found["losses"]))
        dist.destroy_process_group()
    """
    nodes = launch(tmp_path, source, nodes=2, per_node=1)
    assert [status for status, _ in nodes] == [0, 0], nodes
    losses, _ = reference(steps=4)
    for rank in range(2):
        assert eval((tmp_path / f"losses{rank}").read_text()) == pytest.approx(losses, rel=1e-5)


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_nccl_ranks_make_no_context_on_another_ranks_device(tmp_path):
    source = """
        import os, sys
        from pathlib import Path
        import torch
        import torch.distributed as dist
        import infinity

        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        with infinity.init(infinity.Config(swap_dirs=sys.argv[1], dtype="fp32", chunk_mib=0.25, param_tier="nvme", optimizer_state_tier="nvme")):
            model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
        adam = infinity.AdamW(model.parameters(), max_grad_norm=1.0)
        losses = []
        for step in range(4):
            loss = model(torch.ones(4, 256, device="cuda")).square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
            losses.append(loss.item())
        found = [torch._C._cuda_hasPrimaryContext(1 - rank)]
        infinity.save(Path(sys.argv[1], "saved"), model, adam)
        found.append(torch._C._cuda_hasPrimaryContext(1 - rank))
        assert torch._C._cuda_hasPrimaryContext(rank) and losses[-1] < losses[0]
        assert not any(found), found
        dist.destroy_process_group()
    """
    ((status, output),) = launch(tmp_path, source)
    assert status == 0, output


@pytest.mark.few(1)
@pytest.mark.parametrize("update, when", [("backward", 0), pytest.param("deferred", 1, marks=pytest.mark.long), ("backward", 4)])
def test_ranks_that_run_modules_in_different_orders_end_in_errors(tmp_path, update, when):
    world = World(2, tmp_path)  # a new one, because the test breaks the groups
    try:
        for good, answer in world.attempt(parted, tmp_path, when, update):
            assert not good and "of 2" in answer, answer
            assert "the same modules in the same order" in answer or "runs other modules or in another order" in answer, answer
    finally:
        world.close()


def parted(folder, when, update):
    """In step `when`, rank 1 runs the layers in reverse order."""
    infinity.system.ranks.CONTROL_TIMEOUT_S = 2
    with infinity.init(settings(folder, update=update, **ON_NVME)):
        layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
    adam = infinity.AdamW(layers.parameters())
    for step in range(when + 3):
        x = torch.ones(2, 128)
        for layer in reversed(layers) if step == when and dist.get_rank() else layers:
            x = layer(x)
        x.sum().backward()
        adam.step()
        adam.zero_grad()


# ---- one rank's failure ----

STAGES = ["nc", "cn", "cg", "gg", "reduce", "update", "program"]
BY_DEFAULT = [("cg", 1, "backward"), ("reduce", 0, "deferred")]
LOSSES = [
    pytest.param(stage, loser, update, marks=[] if (stage, loser, update) in BY_DEFAULT else pytest.mark.long)
    for stage in STAGES
    for loser in (0, 1)
    for update in ("backward", "deferred")
]


def losing(folder, stage, loser, update):
    """Train until `stage` fails on one rank in the third step, and raise the engine's exception."""
    model, adam = made(folder, update=update, **ON_NVME)
    with infinity.engine_of(model) as engine:
        for step in range(8):
            if step == 2 and dist.get_rank() == loser:
                fail_at(engine, stage)
            model(*tokens(step, 0)).backward()
            adam.step()
            adam.zero_grad()


def fail_at(engine, stage):
    def fail(*arguments, **options):
        raise MemoryError(f"no memory for {stage}")

    if stage in ("nc", "cn"):
        _aio._inject("read" if stage == "nc" else "write", 2, -1, -errno.EIO)
    elif stage == "cg":
        engine.weights.lanes._finish_copy = engine.weights.lanes._run_copy = fail
    elif stage == "gg":
        engine.ranks.gather = fail
    elif stage == "reduce":
        engine.ranks.reduce_scatter = fail
    elif stage == "update":
        engine.updater._update_on_host = fail
    else:
        fail()


@pytest.mark.few(1)
@pytest.mark.parametrize("stage, loser, update", LOSSES)
def test_one_ranks_failure_ends_all_and_names_rank_and_chunk(tmp_path, stage, loser, update):
    world = World(2, tmp_path)
    try:
        world.run(losing, tmp_path, "none", -1, update)  # the time of imports must not count
        start = time.monotonic()
        answers = world.attempt(losing, tmp_path, stage, loser, update)
        seconds = time.monotonic() - start
        print(f"{stage}, rank {loser}: {seconds:.1f} s")
        assert seconds < 30
        for rank, (good, answer) in enumerate(answers):
            assert not good
            assert "no memory for" in answer or "Input/output error" in answer, answer
            assert f"rank {loser} of 2" in answer or rank == loser, answer
            if stage in ("nc", "cn"):
                assert re.search(rf"rank {loser} of 2, chunk \d+ \((weights|states|gradients)\)", answer), answer
            elif stage != "program" and rank != loser:
                assert re.search(rf"rank {loser} of 2 failed: chunk \d+", answer), answer
    finally:
        world.close()


def refused(folder):
    """Messages of the refusals, and the numbers of threads and groups that are left."""
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    groups, said, left = dist.distributed_c10d._world.pg_map, [], []
    before = len(groups)
    for model in (wrapped, empty, nn.ReLU()):
        try:
            infinity.offload(model, settings(folder)).close()
        except (ValueError, infinity.UsageError) as error:
            said.append(str(error))
        left.append((len(groups) - before, sum(thread.name == "infinity-watch" for thread in threading.enumerate())))
    return said, left


def test_a_refused_model_leaves_no_thread_or_group(worlds, tmp_path):
    for said, left in worlds(2).run(refused, tmp_path):
        assert left == [(0, 0)] * len(left), left
        for text, words in zip(said, ("DistributedDataParallel", "meta device", "nothing to offload"), strict=True):
            assert words in text


def in_barrier(file):
    """On rank 0: the watch's text about a thread in a barrier called by `file`, before rank 1 enters the barrier."""
    store, call = dist.distributed_c10d._get_default_store(), compile("dist.barrier()", file, "exec")
    if dist.get_rank():
        store.wait([file])
        dist.barrier()
        return None
    thread = threading.Thread(target=exec, args=(call, {"dist": dist}))
    thread.start()
    deadline = time.monotonic() + SECONDS
    while sys._current_frames()[thread.ident].f_code.co_filename != dist.distributed_c10d.__file__ and time.monotonic() < deadline:
        time.sleep(0.001)
    found = infinity.system.ranks._programs_collective(thread.ident)
    store.set(file, "")
    thread.join(SECONDS)
    return found


def test_collectives_outside_the_package_belong_to_the_program(worlds):
    assert worlds(2).run(in_barrier, "/there/train.py")[0].endswith("barrier (train.py:1)")
    assert worlds(2).run(in_barrier, f"{Path(infinity.__file__).parent}/checkpoints/dcp.py")[0] == ""


def slowly(num_rounds):
    """Agree num_rounds times. Rank 1 arrives about when rank 0's wait of WATCH_S ends."""
    ranks = infinity.system.ranks.Ranks(torch.device("cpu"))
    agreed = 0
    for number in range(num_rounds):
        if ranks.rank:
            time.sleep(infinity.system.failure_watch.WATCH_S - 0.003 + 0.0002 * (number % 30))
        agreed += ranks.agree(number)
    ranks.close()
    return agreed


def asking_for_other_numbers(here, there):
    ranks = infinity.system.ranks.Ranks(torch.device("cpu"))
    numbers = [here, there][ranks.rank]
    said = ""
    try:
        ranks.agree(*numbers) if isinstance(numbers, tuple) else ranks.most(numbers)
    except infinity.UsageError as error:
        said = str(error)
    ranks.close()
    return said


@pytest.mark.parametrize("here, there", [([1], [2, 3]), ([4], list(range(1000))), ((5,), [6]), ([], [0.5, 1.5]), ([True] * 63, [7] * 62)])
def test_ranks_that_exchange_different_counts_each_get_an_error(here, there, worlds):
    """With gloo, a peer that sends more than expected aborts the process."""
    for said in worlds(2).run(asking_for_other_numbers, here, there):
        assert "the ranks have parted" in said and "the same modules in the same order" in said


def asking(numbers):
    ranks = infinity.system.ranks.Ranks(torch.device("cpu"))
    mine = [[number * (1 - 2 * ranks.rank) for number in each] for each in numbers]
    found = ranks.most(mine), ranks.least(mine), ranks.agree(*numbers[0]), ranks.agree(ranks.rank)
    ranks.close()
    return found


@pytest.mark.parametrize("columns", [0, 1, 31, 32, 500])
def test_ranks_find_the_largest_and_smallest_of_many_numbers(columns, worlds):
    numbers = [list(range(columns)), [-number for number in range(columns)]]
    most, least = [list(range(columns))] * 2, [[-number for number in range(columns)]] * 2
    assert worlds(2).run(asking, numbers) == [(most, least, True, False)] * 2


@pytest.mark.long
@pytest.mark.parametrize("num_rounds", [10, pytest.param(60, marks=pytest.mark.long)])
def test_a_late_rank_is_no_failure(worlds, num_rounds):
    assert worlds(2).run(slowly, num_rounds) == [num_rounds] * 2


def awaited(key):
    """On rank 0: the text of the wait for rank 1, once rank 0 knows the place of rank 1."""
    ranks, store = infinity.system.ranks.Ranks(torch.device("cpu")), dist.distributed_c10d._get_default_store()
    said = ""
    if ranks.rank:
        store.wait([key])
        ranks.agree(1)
    else:
        thread = threading.Thread(target=ranks.agree, args=(1,))
        thread.start()
        deadline = time.monotonic() + SECONDS
        while "in step" not in said and time.monotonic() < deadline:
            time.sleep(0.001)
            said = str(infinity.system.waits.of_the_program())
        store.set(key, "")
        thread.join(SECONDS)
    ranks.close()
    return said


def test_a_wait_for_another_rank_names_that_rank(worlds):
    assert worlds(2).run(awaited, "said") == ["rank 1 (in step 1) in an agreement between the training threads", ""]


def starting(folder, loser):
    if dist.get_rank() == loser:
        infinity.system.swap.Swap.reserve = mock.Mock(side_effect=infinity.SwapError(errno.ENOSPC, "no space for swap", "/there"))
    model, adam = made(folder, **ON_NVME)
    for _ in range(3):
        model(*tokens(0, 0)).backward()
        adam.step()
        adam.zero_grad()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("loser", [0, 1])
def test_a_rank_that_cannot_start_ends_all_ranks(tmp_path, loser):
    world = World(2, tmp_path)
    try:
        start = time.monotonic()
        answers = world.attempt(starting, tmp_path, loser)
        assert time.monotonic() - start < 30
        assert all(not good and "no space for swap" in answer for good, answer in answers), answers
    finally:
        world.close()
