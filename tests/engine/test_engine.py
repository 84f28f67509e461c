"""The engine as a whole: the numbers of plain PyTorch, in every tier and at every budget.

Long because all tests of a step share one small model and its reference.
"""

import itertools
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from support import helpers
from support.helpers import (
    NVME,
    assert_equals_reference,
    assert_nothing_held,
    assert_same_bits,
    assert_same_states,
    plain,
    states_of,
    training,
)
from support.models import TRAITS, H, Model, gpt_step, inputs, loss_of, mlp, tiny_gpt, tokens
from support.traffic import traffic, traffic_gpt
from torch import nn

import infinity
from infinity.engine import build
from infinity.errors import BudgetError, ConfigError, UsageError
from infinity.model.gpt import GPT
from infinity.model.state_dict import DepartedGradient
from infinity.plan.record import GRADIENTS
from infinity.tiers.span_state import Presence

pytestmark = pytest.mark.usefixtures("one_thread")


class ReentrantGPT(GPT):
    """Every block in a reentrant checkpoint."""

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


ON_HOST = {"param_tier": "host", "optimizer_state_tier": "host"}

MODELS = {
    "plain": tiny_gpt,
    "checkpointed": lambda: tiny_gpt(checkpoint_activations=True),
    "reentrant": lambda: ReentrantGPT(hidden=32, layers=2, heads=4, vocab=61, seq=12),
    "tied": lambda: tiny_gpt(tie=True),
}

# Equality with plain PyTorch


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["AdamW", pytest.param("Adam", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_fp32_losses_are_those_of_torch_optim(name, kind, tmp_path):
    options = {"lr": 3e-3, "weight_decay": 0.1}
    torch.manual_seed(0)
    plain_model = MODELS[name]()
    torch_optimizer = getattr(torch.optim, kind)(plain_model.parameters(), **options)
    expected = [gpt_step(plain_model, torch_optimizer, step) for step in range(20)]
    kind = getattr(infinity, kind)
    with training(MODELS[name], tmp_path, optimizer=kind, options=options, **NVME) as (model, engine, optimizer):
        got = [gpt_step(model, optimizer, step) for step in range(20)]
    assert got == pytest.approx(expected, rel=1e-6)
    assert got[-1] < got[0]


@pytest.mark.slow
@pytest.mark.parametrize("update", [pytest.param("deferred", marks=pytest.mark.long), "backward"])
def test_bf16_has_the_bits_of_the_reference_loop_after_50_steps(update, tmp_path):
    options = {"lr": 1e-2, "weight_decay": 0.1}
    reference_model, reference = plain(tiny_gpt, dtype="bf16", options=options)
    with training(tiny_gpt, tmp_path, dtype="bf16", options=options, update=update, **NVME) as (model, engine, optimizer):
        for step in range(50):
            expected = gpt_step(reference_model, reference, step)
            assert gpt_step(model, optimizer, step) == expected
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_coupled_weight_decay_has_the_bits_of_the_reference(dtype, tmp_path):
    options = {"weight_decay": 0.3}
    reference_model, reference = plain(tiny_gpt, dtype=dtype, options=options | {"decoupled": False})
    with training(tiny_gpt, tmp_path, dtype=dtype, optimizer=infinity.Adam, options=options) as (model, engine, optimizer):
        for step in range(5):
            assert gpt_step(model, optimizer, step) == gpt_step(reference_model, reference, step)
        assert_equals_reference(engine, model, reference_model, reference)


# Placement (RELIABILITY 13 and 20)

TRAININGS = {  # options that change the mathematics
    "plain": {},
    "clip": {"max_grad_norm": 0.5},
    "accumulate": {"accumulation_steps": 3},
    "clip, accumulate": {"max_grad_norm": 0.5, "accumulation_steps": 3},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """States after 20 steps with everything on the device, by (training, dtype)."""
    found = {}

    def of(name, dtype):
        if (name, dtype) not in found:
            found[name, dtype] = run(TRAININGS[name], tmp_path_factory.mktemp("expected"), dtype=dtype)
        return found[name, dtype]

    return of


def run(options, directory, num_steps=20, **config):
    """Losses, the last norm and states of some steps. Asserts that peaks stay within the budgets."""
    make = MODELS["plain"]
    with training(make, directory, options=options, **config) as (model, engine, optimizer):
        losses = [gpt_step(model, optimizer, step, optimizer.accumulation_steps) for step in range(num_steps)]
        norm = optimizer.grad_norm
        states = states_of(engine, model)
        stats = engine.stats()
        if isinstance(config.get("device_memory"), int):
            assert stats["peak_device_nbytes"] <= config["device_memory"]
        if isinstance(config.get("host_memory"), int):
            assert stats["pinned_host_nbytes"] <= config["host_memory"]
    return losses, norm, states


def cases():
    """Yields (training, dtype, weights, states, residency, update, chunk_mib, budget)."""
    for name, dtype, tiers, residency, update, chunk_mib, budget in itertools.product(
        TRAININGS,
        ("bf16", "fp32"),
        (("auto", "auto"), ("nvme", "nvme"), ("host", "nvme"), ("nvme", "host"), ("host", "host"), ("device", "nvme"))
        + (("device", "host"), ("device", "device"), ("auto", "nvme"), ("nvme", "auto")),
        ("auto", "none"),
        ("deferred", "backward"),
        (1 / 512, 1 / 64, 1),
        ("ample", "device", "host", "both"),
    ):
        if update == "backward" and "clip" in name:
            continue
        yield name, dtype, *tiers, residency, update, chunk_mib, budget


CASES = list(cases())
SAMPLE = random.Random(0).sample(CASES, 8)


def check_placement(case, directory, expected):
    name, dtype, weights, states, residency, update, chunk_mib, budget = case
    config = {"dtype": dtype, "param_tier": weights, "optimizer_state_tier": states, "residency": residency, "update": update}
    config |= {"chunk_mib": chunk_mib}
    for field, least in (("device_memory", helpers.least_device_memory), ("host_memory", helpers.least_host_memory)):
        if budget in (field.split("_")[0], "both"):
            config[field] = least(MODELS["plain"], directory, options=TRAININGS[name], **config)
    losses, norm, got = run(TRAININGS[name], directory, **config)
    expected_losses, expected_norm, expected_states = expected(name, dtype)
    assert losses == expected_losses
    assert norm == expected_norm
    assert_same_states(got, expected_states)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: "-".join(map(str, case)))
def test_placement_never_changes_a_bit(case, tmp_path, expected):
    check_placement(case, tmp_path, expected)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_placement_never_changes_a_bit_in_all_mixes(case, tmp_path, expected):
    check_placement(case, tmp_path, expected)


@pytest.mark.slow
def test_records_in_separate_regions_have_the_same_bits(tmp_path, expected, monkeypatch):
    monkeypatch.setattr(build, "REGION_NBYTES", 1)
    check_placement(("accumulate", "bf16", "host", "host", "auto", "deferred", 1 / 64, "ample"), tmp_path, expected)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("divisor", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long), 20])
def test_peaks_stay_within_budgets(divisor, update, tmp_path):
    config = NVME | {"update": update}
    least_device = helpers.least_device_memory(tiny_gpt, tmp_path, **config)
    least_host = helpers.least_host_memory(tiny_gpt, tmp_path, **config)
    config |= {"device_memory": least_device * 20 // divisor, "host_memory": least_host * 20 // divisor}
    for residency in ("auto", "none"):
        for tier in ("auto", "nvme"):
            run({}, tmp_path, 4, **config | {"residency": residency, "param_tier": tier, "optimizer_state_tier": tier})


@pytest.mark.slow
def test_accumulation_sums_in_fp32(tmp_path):
    """Three micro-batches in bf16 have the bits of gradients that are summed in fp32 and never rounded."""
    options = {"accumulation_steps": 3}
    reference_model, reference = plain(tiny_gpt, dtype="bf16")
    with training(tiny_gpt, tmp_path, dtype="bf16", options=options, **NVME) as (model, engine, optimizer):
        for step in range(6):
            sums = {}
            for micro in range(3):
                loss = reference_model(*tokens(step, micro)) / 3
                loss.backward()
                for p in reference_model.parameters():
                    sums[p] = sums[p] + p.grad.float() if p in sums else p.grad.float()
                    p.grad = None
            with torch.no_grad():
                for p, total in sums.items():
                    reference._update(p, reference.state[p], reference.param_groups[0], grad=total)
            gpt_step(model, optimizer, step, 3)
        assert_equals_reference(engine, model, reference_model, reference)


# Groups, schedulers, skipped parameters


def two_groups(model):
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.2, "lr": 3e-3}, {"params": rest, "weight_decay": 0.0, "betas": (0.8, 0.99)}]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("chunk_mib", [1 / 512, 1])
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_groups_inside_chunks_and_a_scheduler_have_the_reference_bits(update, chunk_mib, tmp_path):
    """Biases and matrices alternate in every chunk. The learning rate changes after every step."""
    reference_model, reference = plain(tiny_gpt, groups=two_groups)
    config = NVME | {"groups": two_groups, "update": update, "chunk_mib": chunk_mib}
    with training(tiny_gpt, tmp_path, **config) as (model, engine, optimizer):
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 3e-2], total_steps=20, cycle_momentum=False)
            for o in (reference, optimizer)
        ]
        for step in range(6):
            assert gpt_step(model, optimizer, step) == gpt_step(reference_model, reference, step)
            for scheduler in schedulers:
                scheduler.step()
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.few(2)
@pytest.mark.parametrize("where", [NVME, NVME | {"update": "deferred"}, {}], ids=["nvme", "deferred", "auto"])
@pytest.mark.parametrize("when", ["before forward", "before step", "after step"])
def test_parameters_may_be_frozen_and_thawed_as_in_pytorch(when, where, tmp_path):
    make = lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 8))

    def train(model, optimizer):
        for number in range(8):
            for moment in ("before forward", "before step", "after step"):
                if moment == "before step":
                    (model(torch.full((4, 32), 0.1 * number)) - 1).square().mean().backward()
                if moment == "after step":
                    optimizer.step()
                    optimizer.zero_grad()
                if moment == when:
                    model[2].requires_grad_(number not in (2, 3, 6))
                    model[0].bias.requires_grad_(number % 2 == 1)
        return model.state_dict()

    torch.manual_seed(0)
    reference = make()
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2))
    with training(make, tmp_path, **where) as (model, _, optimizer):
        for name, value in train(model, optimizer).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_parameters_that_are_frozen_or_in_no_group_keep_their_values(update, tmp_path):
    def make():
        model = tiny_gpt()
        model.token.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        return model

    def groups(model):
        in_a_group = [p for n, p in model.named_parameters() if "blocks.0" not in n and p.requires_grad]
        return [{"params": in_a_group + list(model.blocks[1].parameters())}]

    torch.manual_seed(0)
    before = {name: p.detach().clone() for name, p in make().named_parameters()}
    reference_model, reference = plain(make, groups=groups)
    with training(make, tmp_path, groups=groups, update=update, **NVME) as (model, engine, optimizer):
        for step in range(4):
            assert gpt_step(model, optimizer, step) == gpt_step(reference_model, reference, step)
            for p in reference_model.parameters():
                p.grad = None
        assert_equals_reference_weights(engine, model, reference_model)
        for name in ("token.weight", "blocks.1.mlp.0.weight", "blocks.0.mlp.0.weight"):
            assert_same_bits(engine.read_state(dict(model.named_parameters())[name])["weight"], before[name], name)
        assert set(engine.read_state(model.token.weight)) == {"weight"}


def assert_equals_reference_weights(engine, model, reference_model):
    for (name, p), theirs in zip(model.named_parameters(), reference_model.parameters(), strict=True):
        assert_same_bits(engine.read_state(p)["weight"], theirs.detach(), name)


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_a_parameter_without_a_gradient_is_skipped(update, tmp_path):
    """As in torch.optim: no weight decay, no decay of the moments, and an unchanged step count."""
    options = {"weight_decay": 0.5}
    torch.manual_seed(0)
    torch_model = TRAITS["unused"]()
    torch_optimizer = torch.optim.AdamW(torch_model.parameters(), lr=1e-2, **options)
    with training(TRAITS["unused"], tmp_path, options=options, update=update, **NVME) as (model, engine, optimizer):
        for step in range(7):
            for m, o in ((torch_model, torch_optimizer), (model, optimizer)):
                loss_of(m(inputs(m, step))).backward()
                o.step()
                o.zero_grad()
        engine.flush()
        registry = engine.registry
        for (name, p), theirs in zip(model.named_parameters(), torch_model.parameters(), strict=True):
            state, kept = registry.find(p), torch_optimizer.state.get(theirs)
            steps = {chunk.steps[state.index] for chunk in registry.chunks_of(state)}
            assert steps == {int(kept["step"]) if kept else 0}, name
            assert steps == {0 if "never" in name else 3 if "sometimes" in name else 7}, name
            torch.testing.assert_close(engine.read_state(p)["weight"], theirs.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_clipping_uses_the_norm_of_torch(dtype, tmp_path):
    """The norm is equal to a relative error of 1e-6. The update has the bits of the reference that clips by the engine's norm."""
    reference_model, reference = plain(tiny_gpt, dtype=dtype)
    with training(tiny_gpt, tmp_path, dtype=dtype, options={"max_grad_norm": 0.25}, **NVME) as (model, engine, optimizer):
        for step in range(10):
            gpt_step(model, optimizer, step)
            reference_model(*tokens(step)).backward()
            expected = torch.nn.utils.get_total_norm([p.grad.double() for p in reference_model.parameters()]).item()
            assert optimizer.grad_norm == pytest.approx(expected, rel=1e-6)
            assert optimizer.grad_norm > 0.25
            reference.step(grad_scale=0.25 / (optimizer.grad_norm + 1e-6))
            reference.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


# The order of calls


def test_step_without_backward_is_refused(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        with pytest.raises(UsageError, match="without a finished backward"):
            optimizer.step()
        model(inputs(model, 0))
        with pytest.raises(UsageError, match="without a finished backward"):
            optimizer.step()
        loss_of(model(inputs(model, 0))).backward()
        optimizer.step()
        with pytest.raises(UsageError, match="without a finished backward"):
            optimizer.step()


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_a_second_backward_pass_that_was_not_declared_is_refused(update, tmp_path):
    with training(mlp, tmp_path, update=update, **NVME) as (model, engine, optimizer):
        loss_of(model(inputs(model, 0))).backward()
        loss = loss_of(model(inputs(model, 1))) if update == "deferred" else None
        if loss is not None:
            with pytest.raises(UsageError, match="accumulation_steps=1. Declare it"):
                loss.backward()
        optimizer.step()


def test_hyper_parameters_may_change_before_step_only_if_deferred(tmp_path):
    """A change is refused if updates have begun. Deferred updates use the new values."""
    with training(mlp, tmp_path / "backward", update="backward", **NVME) as (model, engine, optimizer):
        loss_of(model(inputs(model, 0))).backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(UsageError, match="hyper-parameters changed"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.step()
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path / "deferred", update="deferred", **NVME) as (model, engine, optimizer):
        for m, o in ((reference_model, reference), (model, optimizer)):
            loss_of(m(inputs(m, 0))).backward()
            o.param_groups[0]["lr"] = 0.5
            o.step()
            o.param_groups[0]["lr"] = 0.25  # a value of the next step, which a late update does not use
        assert_equals_reference(engine, model, reference_model, reference)


def test_zero_grad_drops_only_gradients_that_no_step_has_used(tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, update="deferred", **NVME) as (model, engine, optimizer):
        for m, o in ((reference_model, reference), (model, optimizer)):
            loss_of(m(inputs(m, 0))).backward()
            o.zero_grad()  # drops the gradients
            loss_of(m(inputs(m, 1))).backward()
            o.step()
            o.zero_grad()  # the update of these gradients is pending and stays
            o.zero_grad()
            loss_of(m(inputs(m, 2))).backward()
            o.step()
        assert_equals_reference(engine, model, reference_model, reference)
    with training(mlp, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        loss_of(model(inputs(model, 0))).backward()
        with pytest.raises(UsageError, match="has begun to update"):
            optimizer.zero_grad()
        optimizer.step()


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_after_backward_param_grad_is_only_a_placeholder(update, tmp_path):
    with training(mlp, tmp_path, update=update, **NVME) as (model, engine, optimizer):
        loss_of(model(inputs(model, 0))).backward()
        assert all(type(p.grad) is DepartedGradient and not any(p.grad.stride()) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


# Values


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gathered_values_may_be_read_and_written(dtype, update, tmp_path):
    """Also while updates are pending. The master of a changed element is its new weight. The other elements keep their residuals."""
    reference_model, reference = plain(tiny_gpt, dtype=dtype)
    with training(tiny_gpt, tmp_path, dtype=dtype, update=update, **NVME) as (model, engine, optimizer):
        gpt_step(model, optimizer, 0)
        gpt_step(reference_model, reference, 0)
        with infinity.gathered(model.parameters()):
            for p, theirs in zip(model.parameters(), reference_model.parameters(), strict=True):
                assert_same_bits(p.detach(), theirs.detach(), "gathered")
        weight, theirs = model.blocks[1].mlp[0].weight, reference_model.blocks[1].mlp[0].weight
        gpt_step(model, optimizer, 1)
        gpt_step(reference_model, reference, 1)
        for w in (weight, theirs):
            with infinity.gathered(w) if w is weight else torch.no_grad(), torch.no_grad():
                w[3, 5:7] = 0.125
        reference.state[theirs]["master"][3, 5:7] = 0.125
        assert_equals_reference(engine, model, reference_model, reference)
        for step in (2, 3):
            assert gpt_step(model, optimizer, step) == gpt_step(reference_model, reference, step)
        assert_equals_reference(engine, model, reference_model, reference)


def test_gathered_writes_nothing_if_values_are_only_read(tmp_path):
    with training(tiny_gpt, tmp_path, dtype="bf16", **NVME) as (model, engine, optimizer):
        gpt_step(model, optimizer, 0)
        before = states_of(engine, model)
        written = engine.stats()["nvme_write_nbytes"]
        with infinity.gathered(model.parameters()):
            pass
        engine.flush()
        assert engine.stats()["nvme_write_nbytes"] == written
        assert_same_states(states_of(engine, model), before)


def test_closing_the_engine_inside_gathered_is_refused(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    engine = infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", host_memory="64MiB"))
    with pytest.raises(infinity.UsageError, match="the engine is closed"), infinity.gathered(model.weight):
        engine.close()


def test_gathered_values_are_kept_when_the_block_raises(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        with pytest.raises(KeyError), infinity.gathered(model.layers[0].weight), torch.no_grad():
            model.layers[0].weight.fill_(3.0)
            raise KeyError
        assert_nothing_held(engine)
        assert (engine.read_state(model.layers[0].weight)["weight"] == 3.0).all()


# Budgets


def test_a_budget_below_the_minimum_leaves_no_file(tmp_path):
    with pytest.raises(BudgetError, match="host_memory=.* is too small: this model needs"):
        with training(mlp, tmp_path, host_memory=4096, **NVME):
            pass
    assert list(tmp_path.iterdir()) == []
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        assert list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_gradients_that_complete_late_pass_through_two_slots(tmp_path):
    """A chain of shared layers completes every chunk's gradient late. The gradients wait on NVMe."""

    def make():
        def build(self):
            self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(12))

        def run(self, x):
            for _ in range(2):
                for layer in self.layers:
                    x = torch.utils.checkpoint.checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
            return x

        return Model(build, lambda self, x: run(self, x.requires_grad_()))

    config = NVME | {"update": "backward"}
    config["host_memory"] = helpers.least_host_memory(make, tmp_path, **config)
    reference_model, reference = plain(make)
    with training(make, tmp_path, **config) as (model, engine, optimizer):
        assert engine.placement.slots[GRADIENTS] == 2
        for step in range(4):
            for each, opt in ((model, optimizer), (reference_model, reference)):
                loss_of(each(inputs(each, step))).backward()
                opt.step()
                opt.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


# Bytes moved, by the counters of the engine and of the kernel


@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["backward", pytest.param("deferred", marks=pytest.mark.long)])
@pytest.mark.parametrize("compression, expected", [("off", 12.0), ("auto", 4 + 8 / 3)])
def test_a_step_moves_26_bytes_a_parameter_or_about_21_with_late_moments(update, compression, expected, tmp_path):
    read, written, _ = traffic(traffic_gpt, tmp_path, update=update, compression=compression)
    assert 13 < read < 14.0 * 1.03  # less than 14: some weights of forward are still there in backward
    assert written == pytest.approx(expected, rel=0.03)


@pytest.mark.long
def test_gradients_without_room_in_host_memory_cost_4_bytes_more(tmp_path):
    num_parameters = sum(p.numel() for p in traffic_gpt().parameters())
    read, written, arena = traffic(traffic_gpt, tmp_path, update="deferred", host_memory=int(1.9 * num_parameters))
    assert arena < 2
    assert read == pytest.approx(16.0, rel=0.03)
    assert written == pytest.approx(14.0, rel=0.03)


# Prefetch and order of updates


@pytest.mark.few(2)
@pytest.mark.parametrize("delayed", [None, "read", "copy", "update", "all"])
def test_copies_and_reads_run_ahead_of_the_ops(delayed, tmp_path):
    """From the second step on, the copy of i+2 and the read of i+3 are requested before op i ends. The bits are right."""
    make = lambda: mlp(12)
    reference_model, reference = plain(make)
    with training(make, tmp_path, update="deferred", trace=True, **NVME) as (model, engine, optimizer):
        weights, pause = engine.weights, threading.Event()
        delay = lambda: pause.wait(0.002)
        if delayed in ("read", "all"):
            engine.records.on_read = delay
        if delayed in ("copy", "all"):
            weights.lanes.cg.on_job = delay
        if delayed in ("update", "all"):
            engine.updater.lane.on_job = delay
        log = []
        for name in ("read", "copy"):

            def noting(span, *args, inner=getattr(weights, name), name=name, **kwargs):
                away = span.presence is Presence.AWAY
                inner(span, *args, **kwargs)
                if away:
                    log.append((name, span.index))

            setattr(weights, name, noting)
        for step in range(4):
            plain_loss = loss_of(reference_model(inputs(model, 0)))
            plain_loss.backward()
            reference.step()
            reference.zero_grad()
            loss = loss_of(noted_forward(model, inputs(model, 0), log))
            home = {span.index for span in engine.registry.spans if span.presence is not Presence.AWAY}
            loss.backward()
            assert_same_bits(loss.detach(), plain_loss.detach(), f"loss of step {step}")
            if step:
                check_ahead(log, home, engine, model)
            del log[:]
            optimizer.step()
            optimizer.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)
        lanes = {event.lane for event in engine.events.trace}
        assert {"nvme_read", "h2d", "d2h", "update", "nvme_write"} <= lanes
        assert all(event.start <= event.end for event in engine.events.trace)


@pytest.mark.few(1)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_updates_run_in_the_order_of_the_next_forward_pass(tier, tmp_path):
    """Updates that begin after the backward pass run in the order in which the next forward pass needs them. The bits are right."""
    make = lambda: mlp(12)
    reference_model, reference = plain(make)
    with training(make, tmp_path, update="backward", trace=True, param_tier=tier, optimizer_state_tier=tier) as (model, engine, optimizer):
        gate, hurry = threading.Event(), engine.updater.hurry

        def opening(chunk):
            hurry(chunk)
            if chunk.index == 2:  # the first op of the next forward pass is going to wait
                engine.gradients.drain()
                gate.set()

        engine.updater.hurry = opening
        engine.updater.lane.on_job = lambda: gate.wait(60)
        for step in range(4):
            plain_loss = loss_of(reference_model(inputs(model, 0)))
            plain_loss.backward()
            reference.step()
            reference.zero_grad()
            loss = loss_of(model(inputs(model, 0)))
            if tier == "host":  # on NVMe, updates must free slots for later updates
                gate.clear()
            loss.backward()
            assert_same_bits(loss.detach(), plain_loss.detach(), f"loss of step {step}")
            optimizer.step()
            optimizer.zero_grad()
        gate.set()
        assert_equals_reference(engine, model, reference_model, reference)
        order = [event.what for event in engine.events.trace if event.lane == "update"]
    num = len({*order})
    assert len(order) == 4 * num
    for step in range(1, 3):
        updated = order[step * num : (step + 1) * num]
        assert sorted(updated) == list(range(num))
        if tier == "host":
            assert updated[:3] == [0, 1, 2]  # their gradients are complete last


def noted_forward(model, x, log):
    """Logs the end of each layer's forward. The backward of a layer ends when the gradient of the layer before is known."""

    def note(i, output):
        log.append(("end", i))
        output.register_hook(lambda grad: log.append(("backward end", i + 1)))

    handles = [
        layer.register_forward_hook(lambda module, args, output, i=i: note(i, output), prepend=True)
        for i, layer in enumerate(model.layers)
    ]
    try:
        return model(x)
    finally:
        for handle in handles:
            handle.remove()


def check_ahead(log, home, engine, model):
    """In order of use: before the ops of span k end, the copies of spans k+1 and k+2 and the read of k+3 are requested."""
    span_of = [engine.registry.span_of(engine.registry.find(layer.weight)).index for layer in model.layers]
    order = list(dict.fromkeys(span_of))
    assert len(order) >= 6
    for k, span in enumerate(order[:-3]):
        done = log[: log.index(("end", span_of.index(span)))]
        assert ("copy", order[k + 1]) in done, (k, log)
        assert ("copy", order[k + 2]) in done, (k, log)
        assert ("read", order[k + 3]) in done, (k, log)
    order.reverse()
    for k, span in enumerate(order[:-4]):  # the first layer needs no weights in backward
        now = log.index(("backward end", span_of.index(span)))
        for what, ahead in (("copy", order[k + 1]), ("copy", order[k + 2]), ("read", order[k + 3])):
            assert ahead in home or (what, ahead) in log[log.index(("end", span_of.index(ahead))) : now], (k, what, ahead, log)


@pytest.mark.parametrize("place", ["device", "host"])
def test_closing_gives_device_memory_back(place, tmp_path):
    with training(tiny_gpt, tmp_path, param_tier=place, optimizer_state_tier=place) as (model, engine, optimizer):
        gpt_step(model, optimizer, 0)
        loss = model(*tokens(1))
    assert all(span.storage.nbytes() == 0 for span in engine.registry.spans)
    with torch._C.DisableTorchFunctionSubclass():
        assert all(param.isnan().all() for param in model.parameters())
    with pytest.raises(UsageError, match="the engine is closed and .* is only a placeholder"):
        next(model.parameters()).isnan()
    assert all(chunk.device_states is None for chunk in engine.registry.chunks)
    with pytest.raises(UsageError, match="the engine is closed"):
        loss.backward()


def test_closing_an_engine_that_never_started_restores_the_model(tmp_path):
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", host_memory="64MiB")
    model, batch = tiny_gpt(), tokens(0)[0]
    expected, values = model(batch), {name: value.clone() for name, value in model.state_dict().items()}
    infinity.offload(model, config).close()
    assert torch.equal(model(batch), expected)
    assert_same_bits_by_name(model.state_dict(), values)
    model.load_state_dict({name: value + 1 for name, value in values.items()})
    assert_same_bits_by_name(model.state_dict(), {name: value + 1 for name, value in values.items()})
    model.load_state_dict(values)
    with pytest.raises(ConfigError, match="is in no engine"):
        infinity.engine_of(model)
    with infinity.offload(model, config):
        assert torch.equal(model(batch), expected)
        gpt_step(model, infinity.AdamW(model.parameters()), 0)


def test_parameters_away_at_close_of_an_unstarted_engine_are_refused(tmp_path):
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", host_memory="64MiB")
    with infinity.init(config, window=0):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    infinity.engine_of(model).close()
    for use in (lambda: model(torch.ones(2, 16)), model.state_dict):
        with pytest.raises(UsageError, match="the engine is closed and .*weight is only a placeholder"):
            use()
    values = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
    model.load_state_dict(values)
    assert_same_bits_by_name(model.state_dict(), values)
    model(torch.ones(2, 16))


def assert_same_bits_by_name(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("queued", [True, False])
def test_an_interrupt_while_a_gradient_leaves_spoils_no_later_gradient(tmp_path, monkeypatch, queued, layers):
    def run(interrupted):
        def make():
            return nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))

        with training(make, tmp_path, update="deferred", **ON_HOST) as (model, engine, optimizer):
            assert len(engine.registry.chunks) > 2
            push = engine.gradients.gc.push

            def interrupt(*arguments, **options):
                monkeypatch.undo()
                if queued:
                    push(*arguments, **options)
                raise KeyboardInterrupt

            if interrupted:
                monkeypatch.setattr(engine.gradients.gc, "push", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    model(torch.ones(4, 16)).sum().backward()
                optimizer.zero_grad()
            hidden = torch.ones(4, 16)
            for layer in list(model)[:layers]:
                hidden = layer(hidden)
            hidden.square().sum().backward()
            optimizer.step()
            return states_of(engine, model)

    assert_same_states(run(True), run(False))


def test_after_close_zero_grad_returns_and_lanes_refuse_work(tmp_path):
    with training(tiny_gpt, tmp_path) as (model, engine, optimizer):
        model(*tokens(0)).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.gradients.drain()


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["forward", "read_state", "gathered"])
def test_weights_of_two_steps_are_never_shown(what, tmp_path):
    with training(tiny_gpt, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        gpt_step(model, optimizer, 0)
        model(*tokens(1)).backward()
        with pytest.raises(UsageError, match="between a backward pass that has begun to update and its step"):
            if what == "forward":
                with torch.no_grad():
                    model(*tokens(2))
            elif what == "read_state":
                engine.read_state(next(model.parameters()))
            else:
                with infinity.gathered(list(model.parameters())):
                    pass
        optimizer.step()
        optimizer.zero_grad()
        gpt_step(model, optimizer, 2)


def test_a_refused_zero_grad_drops_nothing(tmp_path):
    with training(tiny_gpt, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        model(*tokens(1)).backward()
        with pytest.raises(UsageError, match="zero_grad.* between a backward pass that has begun to update"):
            optimizer.zero_grad()
        assert all(param.grad is not None for param in model.parameters())
        optimizer.step()
        with pytest.raises(UsageError, match="still has the gradients of the last step"):
            model(*tokens(2)).backward()  # zero_grad() is missing after step()


# ---- a second optimizer ----


def test_a_second_optimizer_replaces_one_that_has_trained_nothing(tmp_path):
    """A notebook cell that runs again makes a second optimizer."""
    plain_model, plain_optimizer = plain(mlp)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        with torch.no_grad():
            model(inputs(model, 0))
        second = infinity.AdamW(list(model.parameters()), lr=1e-2)
        for call in (optimizer.step, optimizer.zero_grad):
            with pytest.raises(UsageError, match="an optimizer that was replaced by the one of .*test_engine.py:"):
                call()
        for step in range(3):
            loss_of(model(inputs(model, step))).backward()
            second.step()
            second.zero_grad()
            loss_of(plain_model(inputs(plain_model, step))).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        assert_equals_reference(engine, model, plain_model, plain_optimizer)


@pytest.mark.parametrize("moment", ["after backward", "after a step", "after loading"])
def test_a_second_optimizer_is_refused_once_the_first_has_trained(moment, tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        loss_of(model(inputs(model, 0))).backward()
        if moment == "after backward":
            assert_refuses_another(model, optimizer)
        optimizer.step()
        infinity.save(tmp_path / "saved", model, optimizer)
        assert_refuses_another(model, optimizer)
    if moment == "after loading":
        with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
            infinity.load(tmp_path / "saved", model, optimizer)
            assert_refuses_another(model, optimizer)


def assert_refuses_another(model, optimizer):
    with pytest.raises(UsageError, match=r"has an optimizer already, made at .*helpers.py:\d+, and has been trained"):
        infinity.AdamW(model.parameters())
    assert infinity.engine_of(model).optimizer is optimizer


def test_a_second_optimizer_that_needs_other_memory_is_refused(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        for options in ({"max_grad_norm": 1.0}, {"accumulation_steps": 2}):
            with pytest.raises(UsageError, match="for which the engine has planned no memory"):
                infinity.AdamW(model.parameters(), **options)
        with pytest.raises(UsageError, match="for which the engine has planned no memory"):
            infinity.Lion(model.parameters())
        loss_of(model(inputs(model, 0))).backward()
        optimizer.step()
