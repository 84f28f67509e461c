"""`infinity.save` and `infinity.load`: a resumed run has the bits of the uninterrupted run.

Long because every mix of tiers, dtypes, optimizers and models runs the same test. The quick tests run a sample of these mixes.
"""

import collections
import contextlib
import copy
import errno
import functools
import gc
import inspect
import itertools
import json
import math
import os
import random
import re
import shutil
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import PLACES, frozen_half, record_files, train_trait
from support.faults import no_hang, our_threads
from support.helpers import (
    NVME,
    assert_same_states,
    least_device_memory,
    least_host_memory,
    on_gpu,
    run_micro_batches,
    run_python,
    states_of,
    training,
)
from support.micro_batches import micro_batches
from support.micro_batches import loss_of as loss_of_chain
from support.models import TRAITS, Chain, H, Model, gpt_step, inputs, loss_of, mlp, tiny_gpt
from support.ranks import gpt, num_descriptors, ranks, settings, share, tokens
from support.ranks import states_of as bytes_of
from torch import nn
from torch.optim import lr_scheduler

import infinity
import infinity.checkpoints.manifest
import infinity.checkpoints.reader
import infinity.checkpoints.save
import infinity.system.staging_buffers
from aio_ext import _aio
from infinity.model.gpt import GPT
from infinity.optim.loss_scale import LossScale
from infinity.system.arena import PAGE_NBYTES, Arena

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = pytest.mark.long
ON_DEVICE = {"param_tier": "device", "optimizer_state_tier": "device"}


def sample(cases, default):
    """pytest parameters of a dict, or of values with their text as id. All cases except `default` are long."""
    cases = cases if isinstance(cases, dict) else {str(case): case for case in cases}
    assert set(default) <= cases.keys(), set(default) - cases.keys()
    return [pytest.param(case, id=name, marks=() if name in default else LONG) for name, case in cases.items()]


def assert_alike(got, expected, what=""):
    """Asserts equal types, values and bits at every level. NaN equals NaN; -0.0 does not equal 0.0."""
    assert type(got) is type(expected), (what, type(got), type(expected))
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        assert got.dtype == expected.dtype and got.shape == expected.shape, (what, got, expected)
        assert to_bytes(got) == to_bytes(expected), (what, got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected) or all(key != key for key in expected), (what, list(got), list(expected))
        for mine, (key, value) in zip(got.items(), expected.items(), strict=True):
            assert_alike(mine[0], key, f"{what}: key")
            assert_alike(mine[1], value, f"{what}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), (what, got, expected)
        for index, (mine, value) in enumerate(zip(got, expected)):
            assert_alike(mine, value, f"{what}[{index}]")
    elif isinstance(expected, float):
        assert (math.isnan(got) and math.isnan(expected)) or got.hex() == expected.hex(), (what, got, expected)
    else:
        assert got == expected, (what, got, expected)


def to_bytes(value):
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).tobytes()
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# ---- resume equals uninterrupted ----

NUM_STEPS, SAVED_AFTER = 6, 3


def train_gpt(model, optimizer, step):
    return gpt_step(model, optimizer, step, optimizer.accumulation_steps)


def train_by_layer(model, optimizer, step):
    losses = run_micro_batches(model, micro_batches(step), loss_of_chain, by_layer=True)
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses)


@dataclass
class Case:
    make: object = tiny_gpt
    train: object = train_gpt
    optimizer: object = infinity.AdamW
    options: dict = field(default_factory=dict)
    groups: object = None
    schedule: object = None  # optimizer -> scheduler
    tweak: object = None  # changes the optimizer before the second step
    config: dict = field(default_factory=lambda: dict(NVME))


def everything(model, engine, optimizer, scheduler=None):
    """All values that a training step depends on. Draws from the generators."""
    scaler = engine.cycle.scaler
    found = {
        "states": {name: engine.read_state(param) for name, param in model.named_parameters() if engine.manages(param)},
        "unmanaged": {name: param.detach().clone() for name, param in model.named_parameters() if not engine.manages(param)},
        "steps": {s.name: [c.steps[s.index] for c in engine.registry.chunks_of(s)][:1] for s in engine.registry.params},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "groups": [{k: v for k, v in sorted(group.items()) if k != "params"} for group in optimizer.param_groups],
        "scheduler": None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
        "scaler": None if scaler is None else (scaler.scale, scaler.num_clean),
        "drawn": (torch.rand(3), np.random.rand(3), np.random.standard_normal(1), random.random(), random.gauss(0, 1)),
    }
    return found


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    np.random.standard_normal()  # the generator keeps a second value for the next call
    random.gauss(0, 1)


def run(case, folder, steps, *, load=None, save=None, seed=0, wait=True):
    """Trains the steps. Returns (losses, `everything` at the end); None for the latter if the run saves."""
    with training(
        case.make, folder, seed=seed, optimizer=case.optimizer, groups=case.groups, options=case.options, **case.config
    ) as (model, engine, optimizer):
        scheduler = case.schedule(optimizer) if case.schedule else None
        seed_all(seed)
        losses = []
        if load is not None:
            loaded = infinity.load(load, model, optimizer, scheduler=scheduler)
            assert loaded.extra == {"next": steps[0]} and loaded.world == 1
        for step in steps:
            if case.tweak is not None and step == 1:
                case.tweak(optimizer)
            losses.append(case.train(model, optimizer, step))
            if scheduler is not None:
                plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([losses[-1]] if plateau else []))
        if save is not None:
            infinity.save(save, model, optimizer, scheduler=scheduler, extra={"next": steps[-1] + 1}, wait=wait)
        return losses, everything(model, engine, optimizer, scheduler) if save is None else None


def assert_resumes(case, folder, other=None):
    """`other`: the Case in which the run resumes; its mathematics are the same."""
    expected_losses, expected = run(case, folder, range(NUM_STEPS))
    losses, _ = run(case, folder, range(SAVED_AFTER), save=folder / "checkpoint")
    more, got = run(other or case, folder, range(SAVED_AFTER, NUM_STEPS), load=folder / "checkpoint", seed=1)
    assert losses + more == expected_losses
    assert_same_states(got.pop("states"), expected.pop("states"))
    if case.train is train_by_layer and other is not None:
        del got["drawn"], expected["drawn"]
    assert_alike(got, expected)


PLACED = {
    f"{places['param_tier']}-{places['optimizer_state_tier']}-{residency}-{update}-{dtype}": places
    | {"residency": residency, "update": update, "dtype": dtype, "chunk_mib": chunk_mib}
    for (index, places), residency, update, dtype in itertools.product(
        enumerate(PLACES), ("auto", "none"), ("deferred", "backward"), ("fp32", "bf16", "fp16")
    )
    if not (dtype == "fp16" and update == "backward")
    for chunk_mib in ((1 / 512, 1 / 64, 1)[index % 3],)
}
PLACED_SAMPLE = [
    "device-device-auto-backward-bf16",
    "device-host-none-deferred-fp32",
    "host-host-auto-deferred-fp16",
    "nvme-nvme-none-deferred-bf16",
]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("config", sample(PLACED, PLACED_SAMPLE))
def test_a_resumed_run_equals_the_uninterrupted_run_in_every_placement(config, tmp_path):
    assert_resumes(Case(config=config), tmp_path)


class Adagrad(infinity.Rule):
    moments = ("sum", "count")

    def update(self, p, g, moments, scalars):
        moments["sum"] += g * g
        moments["count"] += 1
        p -= g / (moments["sum"].sqrt() + 1e-10) * scalars["lr"]


def own_rule(params, lr, **options):
    return infinity.Optimizer(params, Adagrad(), {"lr": lr}, **options)


def two_groups(model):
    plain = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": plain}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 3e-2}]


def change_groups(optimizer):
    first, second = optimizer.param_groups
    first["lr"], second["weight_decay"] = 7e-3, 0.25
    first["betas"] = (0.8, 0.95)


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.3, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.7)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


class Halves:
    """A callable with state, which LambdaLR saves."""

    def __init__(self):
        self.factor = 0.5

    def __call__(self, epoch):
        return self.factor**epoch


MOMENTS = {"dtype": "bf16", "optimizer_state_dtype": "bf16"} | NVME
CASES = {
    "adam": Case(optimizer=infinity.Adam, options={"weight_decay": 0.1}),
    "sgd-momentum": Case(optimizer=infinity.SGD, options={"momentum": 0.9, "nesterov": True}),
    "sgd-dampening": Case(optimizer=infinity.SGD, options={"momentum": 0.9, "dampening": 0.5}),
    "sgd": Case(optimizer=infinity.SGD),
    "lion": Case(optimizer=infinity.Lion, options={"lr": 1e-3}),
    "own-rule": Case(optimizer=own_rule),
    "bf16-moments": Case(config=MOMENTS),
    "bf16-moments-lion": Case(optimizer=infinity.Lion, options={"lr": 1e-3}, config=MOMENTS),
    "bf16-moments-own-rule": Case(optimizer=own_rule, config=MOMENTS),
    "clipping": Case(options={"max_grad_norm": 0.1}),
    "accumulation": Case(options={"accumulation_steps": 2}),
    "accumulation-clipping-bf16-backward": Case(options={"accumulation_steps": 2}, config=NVME | {"dtype": "bf16", "update": "backward"}),
    "groups": Case(groups=two_groups, tweak=change_groups),
    "multistep": Case(schedule=lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4], gamma=0.3)),
    "onecycle": Case(schedule=lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=10)),
    "lambda": Case(schedule=lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)),
    "lambda-object": Case(schedule=lambda o: lr_scheduler.LambdaLR(o, Halves())),
    "sequential": Case(schedule=sequential),
    "plateau": Case(schedule=lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0)),
    "cosine-restarts": Case(schedule=lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2)),
    "cyclic": Case(schedule=lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=False)),
    "fp16-overflow": Case(
        options={"loss_scale": LossScale(initial=2.0**32, interval=2)}, config=NVME | {"dtype": "fp16", "update": "deferred"}
    ),
    "by-layer": Case(make=Chain, train=train_by_layer, options={"accumulation_steps": 8}),
    "by-layer-bf16-host": Case(
        make=Chain, train=train_by_layer, options={"accumulation_steps": 8}, config={"dtype": "bf16", "param_tier": "host", "optimizer_state_tier": "nvme"}
    ),
    "tight": Case(config=NVME | {"device_memory": "tight", "host_memory": "tight"}),
}
CASES_SAMPLE = [
    "sgd-momentum",
    "bf16-moments-own-rule",
    "groups",
    "sequential",
    "fp16-overflow",
]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", sample(CASES, CASES_SAMPLE))
def test_a_resumed_run_equals_the_uninterrupted_run_for_every_optimizer(case, tmp_path):
    if "tight" in case.config.values():
        case = copy.copy(case)
        config = {k: v for k, v in case.config.items() if v != "tight"}
        device = least_device_memory(case.make, tmp_path, **config)
        config["device_memory"] = device
        case.config = config | {"host_memory": least_host_memory(case.make, tmp_path, **config)}
    assert_resumes(case, tmp_path)


class Counts(nn.Module):
    """The module's extra state is not a tensor."""

    def __init__(self):
        super().__init__()
        self.calls, self.layer = {"calls": 0, "at": (1, 2.5)}, nn.Linear(H, H)

    def forward(self, x):
        self.calls["calls"] += 1
        return self.layer(x) * self.calls["calls"]

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


def counting():
    def build(self):
        self.first, self.counts = nn.Linear(H, H), Counts()

    return Model(build, lambda self, x: self.counts(self.first(x)))


def partly_frozen():
    model = mlp(5)
    for layer in (0, 2):
        model.layers[layer].requires_grad_(False)
    model.layers[3].bias.requires_grad_(False)
    return model


def small_and_odd():
    """Parameters that the engine does not manage (integers, no elements), and buffers of several dtypes."""

    def build(self):
        self.first = nn.Linear(H, H)
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("wave", torch.tensor([1 + 2j]))
        self.register_buffer("nothing", None)
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def run(self, x):
        with torch.no_grad():
            self.table += 1
            self.halves *= 1.5
            self.wave *= 1j
            self.flags.logical_not_()
        return self.first(x) * self.table.sum() * self.halves.float().mean() * (1 + self.flags[0].float())

    return Model(build, run)


MODELS = TRAITS | {"extra_state": counting, "partly_frozen": partly_frozen, "small_and_odd": small_and_odd}
MODELS_SAMPLE = ["tied_module", "max_norm", "extra_state", "partly_frozen", "small_and_odd"]
ODD_CONFIGS = {"nvme": NVME, "device-bf16": ON_DEVICE | {"dtype": "bf16"}, "auto-bf16-backward": {"dtype": "bf16", "update": "backward"}}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "model, config",
    [
        pytest.param(make, config, id=f"{name}-{where}", marks=() if name in MODELS_SAMPLE and where == "nvme" else LONG)
        for (name, make), (where, config) in itertools.product(MODELS.items(), ODD_CONFIGS.items())
    ]
    + [pytest.param(TRAITS["max_norm"], ON_DEVICE | {"dtype": "bf16"}, id="max_norm-device-default")],
)
def test_unusual_models_resume_with_the_same_bits(model, config, tmp_path):
    dtype = torch.bfloat16 if config.get("dtype") == "bf16" else torch.float32

    def train(model, optimizer, step):
        loss = loss_of(model(inputs(model, step).to(dtype)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if dtype is torch.bfloat16 and model in (small_and_odd, MODELS["convolution"], MODELS["spectral_norm"]):
        pytest.skip("the model computes with two dtypes, which PyTorch refuses")
    assert_resumes(Case(make=model, train=train, config=config), tmp_path)


@pytest.mark.slow
def test_the_seed_of_rounding_survives_two_resumptions(tmp_path):
    """Resumed runs use the seed of the first run, not the seed of their own configuration."""

    def go(steps, seed, load=None, save=None):
        torch.manual_seed(seed)
        model = tiny_gpt()
        with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", seed=seed, **MOMENTS)) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            if load is not None:
                infinity.load(load, model, optimizer)
            for step in steps:
                train_gpt(model, optimizer, step)
            if save is not None:
                infinity.save(save, model, optimizer)
            return states_of(engine, model)

    expected = go(range(6), 5)
    go(range(2), 5, save=tmp_path / "a")
    go(range(2, 4), 9, load=tmp_path / "a", save=tmp_path / "b")
    assert_same_states(go(range(4, 6), 0, load=tmp_path / "b"), expected)


ELSEWHERE = {
    "chunks": (NVME, NVME | {"chunk_mib": 1 / 32}),
    "to-device": (NVME, ON_DEVICE | {"chunk_mib": 1 / 128}),
    "from-device": (ON_DEVICE | {"dtype": "bf16"}, NVME | {"dtype": "bf16"}),
    "bf16-moments": (MOMENTS, ON_DEVICE | {"dtype": "bf16", "optimizer_state_dtype": "bf16", "chunk_mib": 1}),
    "fp16": (NVME | {"dtype": "fp16"}, {"dtype": "fp16", "param_tier": "host", "optimizer_state_tier": "host", "chunk_mib": 1 / 100}),
    "update": (NVME | {"update": "backward"}, NVME | {"update": "deferred", "residency": "auto", "chunk_mib": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", sample(ELSEWHERE, ["from-device"]))
def test_a_run_resumes_in_another_placement(change, tmp_path):
    before, after = change
    assert_resumes(Case(config=before), tmp_path, Case(config=after))


@LONG
@pytest.mark.parametrize("before, after", [*itertools.product(range(9), range(9))])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_resumes_in_every_other_placement(before, after, dtype, tmp_path):
    chunk_mib = 1 / 512 if (before + after) % 2 else 1 / 77
    assert_resumes(
        Case(config=PLACES[before] | {"dtype": dtype}),
        tmp_path,
        Case(config=PLACES[after] | {"dtype": dtype, "chunk_mib": chunk_mib}),
    )


# ---- saves while training continues ----


def deep():
    return mlp(8)


def train_deep(model, optimizer, step):
    """One step with `accumulation_steps` micro-batches."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[infinity.engine_of(model).config.dtype]
    total = 0.0
    for micro in range(optimizer.accumulation_steps):
        loss = loss_of(model(inputs(model, 10 * step + micro).to(dtype)))
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


DELAYS = ("write", "read", "update", "cg", "gc", "cn", "lanes")


@contextlib.contextmanager
def delayed(engine, what, seconds=0.004):
    """Slows one link down: `what` is a lane, "lanes", "read" or "write"."""
    lanes = {lane.name: lane for lane in (*engine.parts.lanes(), engine.records._writer)}
    chosen = lanes.values() if what == "lanes" else [lanes[what]] if what in lanes else []
    for lane in chosen:
        lane.on_job = lambda: time.sleep(seconds)
    if what == "read":
        engine.records.on_read = lambda: time.sleep(seconds)
    if what == "write":
        _aio._inject("write", 0, -1, None, delay=5 * seconds)
    try:
        yield
    finally:
        for lane in chosen:
            lane.on_job = None
        engine.records.on_read = None
        _aio._inject()


def loaded_states(path, make, folder, **config):
    """`everything` of another engine after a load of the checkpoint, without draws."""
    with training(make, folder, seed=77, **config) as (model, engine, optimizer):
        infinity.load(path, model, optimizer)
        found = everything(model, engine, optimizer)
        del found["drawn"]
        return found


def expected_states(make, folder, num_steps, **config):
    with training(make, folder, **config) as (model, engine, optimizer):
        for step in range(num_steps):
            train_deep(model, optimizer, step)
        found = everything(model, engine, optimizer)
        del found["drawn"]
        return found


def goes_on(folder, what, make=deep, **config):
    """Saves after two steps and trains three more during the save. The checkpoint has two steps, the engine five."""
    at_call = expected_states(make, folder, 2, **config)
    at_end = expected_states(make, folder, 5, **config)
    with no_hang(60), training(make, folder, **config) as (model, engine, optimizer):
        for step in range(2):
            train_deep(model, optimizer, step)
        with delayed(engine, what):
            saving = infinity.save(folder / "checkpoint", model, optimizer, wait=False)
            for step in range(2, 5):
                train_deep(model, optimizer, step)
            saving.wait()
        assert saving.done and saving.error is None
        end = everything(model, engine, optimizer)
        del end["drawn"]
    assert_alike(end, at_end)
    relaxed = {k: v for k, v in config.items() if not k.endswith("_memory")}
    assert_alike(loaded_states(folder / "checkpoint", make, folder, **relaxed), at_call)


GOING = {
    f"{config['param_tier']}-{config['optimizer_state_tier']}-{config['residency']}-{config['update']}-{config['dtype']}-{delay}": (config, delay)
    for config in PLACED.values()
    for delay in DELAYS
}
GOING_SAMPLE = [
    "device-device-auto-deferred-bf16-write",
    "host-nvme-auto-backward-bf16-read",
    "nvme-nvme-none-deferred-bf16-update",
]


@pytest.mark.few(1)
@pytest.mark.parametrize("config, delay", [pytest.param(*p.values[0], id=p.id, marks=p.marks) for p in sample(GOING, GOING_SAMPLE)])
def test_a_checkpoint_has_the_states_of_the_call_while_training_continues(config, delay, tmp_path):
    goes_on(tmp_path, delay, **config | {"chunk_mib": 1 / 512})


TIGHT = [{**places, "residency": "none", "update": update} for places in PLACES for update in ("deferred", "backward")]
TIGHT_SAMPLE = [str(NVME | {"residency": "none", "update": "deferred"})]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize("delay", ["write", *(pytest.param(lane, marks=LONG) for lane in ("lanes", "read", "update"))])
@pytest.mark.parametrize("config", sample(TIGHT, TIGHT_SAMPLE))
def test_the_least_memory_is_enough_while_a_checkpoint_is_written(config, delay, accumulate, tmp_path):
    options = {"options": {"accumulation_steps": accumulate}}
    device = least_device_memory(deep, tmp_path, **config, **options)
    host = least_host_memory(deep, tmp_path, **config | {"device_memory": device}, **options)
    goes_on(tmp_path, delay, **config | {"device_memory": device, "host_memory": host}, **options)


def evaluate(model, engine, optimizer, folder):
    with torch.no_grad():
        for step in range(3):
            model(inputs(model, step))


def evaluate_in_inference_mode(model, engine, optimizer, folder):
    with torch.inference_mode():
        model(inputs(model, 0))


def write_gathered(model, engine, optimizer, folder):
    with infinity.gathered(list(model.parameters())), torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)


def write_in_forward(model, engine, optimizer, folder):
    def clamp(module, arguments):
        with torch.no_grad():
            module.weight.clamp_(-1e-3, 1e-3)

    handles = [layer.register_forward_pre_hook(clamp) for layer in model.layers]
    model(inputs(model, 0))
    for handle in handles:
        handle.remove()


def read_states(model, engine, optimizer, folder):
    model.state_dict()
    states_of(engine, model)


def load_zeros(model, engine, optimizer, folder):
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


def drop_gradients(model, engine, optimizer, folder):
    optimizer.zero_grad()
    loss_of(model(inputs(model, 0))).backward()
    try:
        optimizer.zero_grad()
    except infinity.UsageError:  # updates run in backward: the step must be finished
        optimizer.step()


def save_again(model, engine, optimizer, folder):
    infinity.save(folder / "another", model, optimizer, wait=False)
    train_deep(model, optimizer, 7)
    infinity.save(folder / "a third", model, optimizer)


def load_another(model, engine, optimizer, folder):
    infinity.load(folder / "zeroth", model, optimizer)


def close(model, engine, optimizer, folder):
    engine.close()


def fail_in_backward(model, engine, optimizer, folder):
    def bomb(*_):
        raise ZeroDivisionError

    handle = model.layers[2].register_full_backward_hook(bomb)
    with pytest.raises(ZeroDivisionError):
        loss_of(model(inputs(model, 0))).backward()
    handle.remove()
    with contextlib.suppress(infinity.UsageError):
        optimizer.step()


def not_a_number(model, engine, optimizer, folder):
    dtype = torch.float16 if engine.cycle.scaler is not None else torch.float32
    loss_of(model((inputs(model, 0) * math.nan).to(dtype))).backward()
    optimizer.step()
    optimizer.zero_grad()


def flush(model, engine, optimizer, folder):
    engine.flush()


def change_hyper_parameters(model, engine, optimizer, folder):
    optimizer.param_groups[0]["lr"] = 1.0
    train_deep(model, optimizer, 5)


def draw(model, engine, optimizer, folder):
    seed_all(99)
    train_deep(model, optimizer, 5)


MEANWHILE = [
    evaluate,
    evaluate_in_inference_mode,
    write_gathered,
    write_in_forward,
    read_states,
    load_zeros,
    drop_gradients,
    save_again,
    load_another,
    close,
    fail_in_backward,
    not_a_number,
    flush,
    change_hyper_parameters,
    draw,
]
WHERE = {
    "nvme": NVME | {"update": "deferred"},
    "nvme-backward": NVME | {"update": "backward"},
    "host": {"param_tier": "host", "optimizer_state_tier": "host", "residency": "none", "update": "deferred"},
    "device": ON_DEVICE,
    "device-none": ON_DEVICE | {"residency": "none", "update": "backward"},
    "weights-on-device": {"param_tier": "device", "optimizer_state_tier": "nvme"},
}


ON_NVME_SAMPLE = (evaluate, load_zeros, save_again, fail_in_backward)
ON_DEVICE_SAMPLE = (write_gathered, write_in_forward, load_zeros)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("delay", ["write", pytest.param("lanes", marks=LONG), pytest.param("read", marks=LONG)])
@pytest.mark.parametrize(
    "then, where",
    [
        pytest.param(then, where, id=f"{then.__name__}-{where}", marks=() if is_default else LONG)
        for then, where in itertools.product(MEANWHILE, WHERE)
        for is_default in [(where == "nvme" and then in ON_NVME_SAMPLE) or (where == "device" and then in ON_DEVICE_SAMPLE)]
    ],
)
def test_a_checkpoint_has_the_states_of_the_call_after_any_other_call(then, where, delay, tmp_path):
    config = WHERE[where]
    at_call = expected_states(deep, tmp_path, 1, **config)
    with no_hang(60), training(deep, tmp_path, **config) as (model, engine, optimizer):
        infinity.save(tmp_path / "zeroth", model, optimizer)
        train_deep(model, optimizer, 0)
        with delayed(engine, delay):
            saving = infinity.save(tmp_path / "checkpoint", model, optimizer, wait=False)
            then(model, engine, optimizer, tmp_path)
            saving.wait()
    assert_alike(loaded_states(tmp_path / "checkpoint", deep, tmp_path, **config), at_call)


@pytest.mark.slow
def test_an_overflow_right_after_a_save_does_not_change_the_checkpoint(tmp_path):
    options = {"loss_scale": LossScale(initial=1024.0, interval=2)}
    config = NVME | {"dtype": "fp16", "options": options}
    at_call = expected_states(deep, tmp_path, 2, **config)
    with training(deep, tmp_path, **config) as (model, engine, optimizer):
        for step in range(2):
            train_deep(model, optimizer, step)
        with delayed(engine, "write"):
            saving = infinity.save(tmp_path / "checkpoint", model, optimizer, wait=False)
            not_a_number(model, engine, optimizer, tmp_path)
            assert engine.cycle.num_skipped == 1
            train_deep(model, optimizer, 2)
            saving.wait()
    assert_alike(loaded_states(tmp_path / "checkpoint", deep, tmp_path, **config), at_call)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("where", ["nvme", "device"])
def test_an_exception_that_ends_the_engine_keeps_the_last_checkpoint(where, wait, tmp_path):
    config = WHERE[where]
    before = our_threads()
    path, at_call = tmp_path / "checkpoint", expected_states(deep, tmp_path, 1, **config)
    with no_hang(60), pytest.raises(KeyError, match="the program's"):
        with training(deep, tmp_path, **config) as (model, engine, optimizer):
            train_deep(model, optimizer, 0)
            infinity.save(path, model, optimizer)
            train_deep(model, optimizer, 1)
            with delayed(engine, "write", 0.1), engine:
                saving = infinity.save(path, model, optimizer, wait=False)
                if wait:
                    raise KeyError("the program's")
                train_deep(model, optimizer, 2)
                raise KeyError("the program's")
    assert saving.done
    assert len(os.listdir(path)) == 2, os.listdir(path)
    assert_alike(loaded_states(path, deep, tmp_path, **config), at_call)
    assert our_threads() <= before


@pytest.mark.slow
def test_a_normal_exit_of_the_engine_finishes_the_checkpoint(tmp_path):
    at_call = expected_states(deep, tmp_path, 1, **NVME)
    for end in (lambda: None, lambda: exec("raise SystemExit(0)")):
        with contextlib.suppress(SystemExit), training(deep, tmp_path, **NVME) as (model, engine, optimizer):
            train_deep(model, optimizer, 0)
            with engine, delayed(engine, "write"):
                infinity.save(tmp_path / "checkpoint", model, optimizer, wait=False)
                end()
        assert_alike(loaded_states(tmp_path / "checkpoint", deep, tmp_path, **NVME), at_call)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("wait", [True, False])
def test_a_failed_write_is_reported_once_and_training_continues(wait, code, tmp_path):
    at_end = expected_states(deep, tmp_path, 4, **ON_DEVICE)
    path = tmp_path / "checkpoint"
    with no_hang(60), training(deep, tmp_path, **ON_DEVICE) as (model, engine, optimizer):
        train_deep(model, optimizer, 0)
        infinity.save(path, model, optimizer, extra="old")
        train_deep(model, optimizer, 1)
        _aio._inject("write", 2, 1, -code)
        with pytest.raises(infinity.SwapError) as caught:
            infinity.save(path, model, optimizer, extra="new", wait=wait)
            train_deep(model, optimizer, 2)
            infinity.save(path, model, optimizer, extra="new")
        _aio._inject()
        assert caught.value.errno == code and str(path) in str(caught.value.filename)
        if wait:
            train_deep(model, optimizer, 2)
        train_deep(model, optimizer, 3)
        end = everything(model, engine, optimizer)
        del end["drawn"]
        assert_alike(end, at_end)
        assert len(os.listdir(path)) == 2
        assert infinity.load(path, model, optimizer).extra == "old"
        infinity.save(path, model, optimizer, extra="newer")
        assert infinity.load(path, model, optimizer).extra == "newer"


# ---- other numbers of ranks ----


def built_on_ranks(folder, seed, tie=False, **changes):
    torch.manual_seed(seed)
    with infinity.init(settings(folder, **changes)):
        model = gpt(tie=tie)
    return model, infinity.AdamW(model.parameters(), lr=1e-2)


def train_on_ranks(model, optimizer, steps):
    for step in steps:
        x, y = map(share, tokens(step, 0))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def save_on_ranks(folder, path, wait=True, **changes):
    """Trains two steps and saves. Returns (states then, states two steps later, a random number); states are bytes."""
    model, optimizer = built_on_ranks(folder, 0, **changes)
    with infinity.engine_of(model) as engine:
        train_on_ranks(model, optimizer, range(2))
        if wait:
            infinity.save(path, model, optimizer, extra={"two": 2})
            at_save = bytes_of(engine, model)
        else:
            with delayed(engine, "write"):
                saving = infinity.save(path, model, optimizer, extra={"two": 2}, wait=False)
                train_on_ranks(model, optimizer, range(2, 4))
                saving.wait()
            infinity.load(path, model, optimizer)
            at_save = bytes_of(engine, model)
        train_on_ranks(model, optimizer, range(2, 4))
        return at_save, bytes_of(engine, model), torch.rand(1).item()


def load_on_ranks(folder, path, **changes):
    model, optimizer = built_on_ranks(folder, 1, **changes)
    with infinity.engine_of(model) as engine:
        loaded = infinity.load(path, model, optimizer)
        at_load = bytes_of(engine, model)
        steps = {step for chunk in engine.registry.chunks for step in chunk.steps.values()}
        assert steps == {2} and loaded.step == 2 and loaded.extra == {"two": 2}
        train_on_ranks(model, optimizer, range(2, 4))
        return at_load, bytes_of(engine, model), torch.rand(1).item(), loaded.world


def on(worlds, size, function, *arguments, **options):
    return worlds(size).run(function, *arguments, **options) if size > 1 else [function(*arguments, **options)]


RANKS_NVME = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none", "chunk_mib": 1 / 64}
RANKS_HOST = {"param_tier": "host", "optimizer_state_tier": "nvme", "chunk_mib": 1 / 100}
RANKS_DEVICE = {"param_tier": "device", "optimizer_state_tier": "device", "chunk_mib": 1 / 32}
CHANGES = {"same": {}, "chunks": {"chunk_mib": 1 / 24}, "host": RANKS_HOST, "device": RANKS_DEVICE}
BY_RANKS = [
    pytest.param(
        *pair,
        dtype,
        change,
        id=f"{pair[0]}-to-{pair[1]}-{dtype}-{change}",
        marks=()
        if (pair, dtype, change) in (((1, 2), "bf16", "same"), ((2, 1), "fp32", "chunks"))
        else LONG,
    )
    for pair in itertools.product((1, 2, 4), (1, 2, 4))
    for dtype in ("fp32", "bf16")
    for change in CHANGES
]


@pytest.mark.few(1)
@pytest.mark.parametrize("saved_on, loaded_on, dtype, change", BY_RANKS)
def test_every_number_of_ranks_loads_the_same_bits(worlds, saved_on, loaded_on, dtype, change, tmp_path):
    path = tmp_path / "checkpoint"
    saved = on(worlds, saved_on, save_on_ranks, tmp_path, path, dtype=dtype, **RANKS_NVME)
    got = on(worlds, loaded_on, load_on_ranks, tmp_path, path, dtype=dtype, **RANKS_NVME | CHANGES[change])
    for at_load, later, drawn, world in got:
        assert at_load == saved[0][0] and world == saved_on
        if saved_on == loaded_on and (change == "same" or saved_on < 4):
            assert later == saved[0][1]
    if saved_on == loaded_on:
        assert [rank[2] for rank in got] == [rank[2] for rank in saved]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=LONG)])
@pytest.mark.parametrize("places", [RANKS_NVME, pytest.param(RANKS_HOST, marks=LONG), pytest.param(RANKS_DEVICE, marks=LONG)], ids=str)
def test_ranks_train_on_while_the_checkpoint_is_written(worlds, places, size, tmp_path):
    expected = on(worlds, size, save_on_ranks, tmp_path, tmp_path / "a", dtype="bf16", **places)
    got = on(worlds, size, save_on_ranks, tmp_path, tmp_path / "b", wait=False, dtype="bf16", **places)
    assert [rank[:2] for rank in got] == [rank[:2] for rank in expected]


def descriptors_after_failures(folder, how):
    """Open descriptors before and after saves and loads that fail on one rank only."""
    model, optimizer = built_on_ranks(folder, 0, **RANKS_NVME)
    rank = ranks()[0]
    with infinity.engine_of(model):
        train_on_ranks(model, optimizer, range(1))
        infinity.save(folder / "good", model, optimizer)
        found, texts = [], []
        for attempt in range(4):
            train_on_ranks(model, optimizer, range(1, 2))  # changes the records: otherwise save links the files
            statvfs = os.fstatvfs
            try:
                if how == "full" and rank == 0:
                    os.fstatvfs = lambda fd: os.statvfs_result((4096, 4096, 9, 0, 0, 9, 9, 9, 0, 255))
                if how == "load elsewhere":
                    infinity.load(folder / ("good" if rank == 0 else "missing"), model, optimizer)
                elif how == "save elsewhere":
                    (folder / "other").mkdir(exist_ok=True)
                    infinity.save(folder / ("good" if rank == 0 else "other"), model, optimizer)
                else:
                    infinity.save(folder / "good", model, optimizer)
            except infinity.CheckpointError as error:
                texts.append(str(error))
            finally:
                os.fstatvfs = statvfs
            gc.collect()
            found.append((num_descriptors(), len(os.listdir("/proc/self/task"))))
        train_on_ranks(model, optimizer, range(2, 3))
        infinity.save(folder / "good", model, optimizer)
        infinity.load(folder / "good", model, optimizer)
        return found, texts


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", pytest.param("save elsewhere", marks=LONG), pytest.param("load elsewhere", marks=LONG)])
def test_a_failure_on_one_rank_fails_all_ranks_and_leaks_nothing(worlds, how, tmp_path):
    for found, texts in worlds(2).run(descriptors_after_failures, tmp_path, how):
        assert len(texts) == 4, texts
        assert found[-1] == found[0], f"(descriptors, threads) after each failure: {found}"


# ---- tiles ----


def two_large_layers(order=("token", "head"), tie=False):
    def build(self):
        for name in order:
            setattr(self, name, nn.Embedding(90, H) if name == "token" else nn.Linear(H, 90, bias=not tie))
        self.layer = nn.Linear(H, H)
        if tie:
            self.head.weight = self.token.weight

    def run(self, x):
        return self.head(torch.tanh(self.layer(self.token((x.flatten().abs() * 100).long() % 90))))

    return lambda: Model(build, run)


def joined(states):
    """Concatenates the tiles of a layer, which are rows here, under the layer's name."""
    found = {}
    for name, segments in states.items():
        whole = re.sub(r"\.tiles\.\d+\.", ".", name)
        for segment, tensor in segments.items():
            found.setdefault((whole, segment), []).append(tensor)
    return {key: torch.cat(parts) if len(parts) > 1 else parts[0] for key, parts in found.items()}


TILINGS = [None, 1024, 2500, 5000]
TILING_PAIRS = [
    pytest.param(*pair, marks=() if pair in ((None, 1024), (1024, None), (1024, 2500)) else LONG)
    for pair in itertools.product(TILINGS, TILINGS)
]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=LONG)])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("above, later", TILING_PAIRS)
def test_tiles_are_loaded_into_other_tiles(above, later, tie, dtype, tmp_path):
    make = two_large_layers(tie=tie)
    with training(make, tmp_path, tile_above=above, dtype=dtype, **NVME) as (model, engine, optimizer):
        for step in range(2):
            train_trait(model, optimizer, step)
        infinity.save(tmp_path / "checkpoint", model, optimizer)
        expected = joined(states_of(engine, model))
        num_params = len(engine.registry.params)
    with training(make, tmp_path, seed=1, tile_above=later, dtype=dtype, **NVME) as (model, engine, optimizer):
        cut_by = [limit if limit and 90 * 24 * (2 if dtype == "bf16" else 4) > limit else None for limit in (above, later)]
        assert (len(engine.registry.params) == num_params) == (cut_by[0] == cut_by[1])
        infinity.load(tmp_path / "checkpoint", model, optimizer)
        got = joined(states_of(engine, model))
        assert {step for chunk in engine.registry.chunks for step in chunk.steps.values()} == {2}
    assert got.keys() == expected.keys()
    for key in expected:
        assert_alike(got[key], expected[key], key)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("above, later", TILING_PAIRS + [pytest.param(None, None, id="plain")])
def test_a_tied_layer_is_loaded_under_its_other_name(above, later, tmp_path):
    config = {**NVME, "chunk_mib": 1 / 512}
    with training(two_large_layers(tie=True), tmp_path, tile_above=above, **config) as (model, engine, optimizer):
        train_trait(model, optimizer, 0)
        infinity.save(tmp_path / "checkpoint", model, optimizer)
        expected = model.state_dict()
        moments = joined(states_of(engine, model))["token.weight", "variance"]
    make = two_large_layers(("head", "token"), tie=True)
    with training(make, tmp_path, seed=1, tile_above=later, **config) as (model, engine, optimizer):
        infinity.load(tmp_path / "checkpoint", model, optimizer)
        got = model.state_dict()
        assert_alike({name: got[name] for name in expected}, dict(expected))
        assert_alike(joined(states_of(engine, model))["head.weight", "variance"], moments)


@pytest.mark.few(2)
@pytest.mark.parametrize("order", list(map("".join, itertools.permutations("abc"))))
def test_a_parameter_with_three_names_is_loaded_under_any_of_them(order, tmp_path):
    def make(order):
        def build(self):
            weight = nn.Parameter(torch.randn(H, H))
            for name in order:
                setattr(self, name, nn.Linear(H, H, bias=False))
                getattr(self, name).weight = weight

        return lambda: Model(build, lambda self, x: self.a(self.b(self.c(x))))

    with training(make("abc"), tmp_path) as (model, engine, optimizer):
        infinity.save(tmp_path / "checkpoint", model, optimizer)
        expected = engine.read_state(model.a.weight)
    with training(make(order), tmp_path, seed=1) as (model, engine, optimizer):
        infinity.load(tmp_path / "checkpoint", model, optimizer)
        assert_alike(engine.read_state(model.b.weight), expected)


# ---- linked files ----


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("places", PLACES[::4], ids=str)
def test_only_files_of_frozen_records_are_linked(places, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    with training(frozen_half, tmp_path, **places) as (model, engine, optimizer):
        train_trait(model, optimizer, 0)
        infinity.save(here, model, optimizer)
        first = record_files(here)
        train_trait(model, optimizer, 1)
        infinity.save(here, model, optimizer)
        second = record_files(here)
        assert second[False] == first[False] and not second[True] & first[True]
        train_trait(model, optimizer, 2)
        infinity.save(there, model, optimizer)
        third = record_files(there)
        assert third[False] == first[False] and not third[True] & second[True]
        assert {os.stat(file).st_nlink for file in there.rglob("*.records")} == {1, 2}
        expected = states_of(engine, model)
        model.load_state_dict({"layers.1.weight": torch.full((H, H), 3.0)}, strict=False)
        infinity.save(here, model, optimizer)
        assert not record_files(here)[False] & first[False]
        with infinity.gathered(model.layers[5].weight), torch.no_grad():
            model.layers[5].weight.zero_()
        fourth = record_files(here)
        infinity.save(here, model, optimizer)
        assert not record_files(here)[False] & fourth[False]
        changed = states_of(engine, model)
        infinity.load(there, model, optimizer)
        assert_same_states(states_of(engine, model), expected)
        infinity.load(here, model, optimizer)
        assert_same_states(states_of(engine, model), changed)
        train_trait(model, optimizer, 3)
        infinity.save(there, model, optimizer)  # the loaded checkpoint is not the last saved one
        later = states_of(engine, model)
    with training(frozen_half, tmp_path, seed=1, **places) as (model, engine, optimizer):
        infinity.load(there, model, optimizer)
        assert_same_states(states_of(engine, model), later)


def test_a_second_checkpoint_of_the_same_step_is_linked_and_whole(tmp_path):
    with training(deep, tmp_path, **NVME) as (model, engine, optimizer):
        train_deep(model, optimizer, 0)
        infinity.save(tmp_path / "a", model, optimizer)
        infinity.save(tmp_path / "b", model, optimizer)
        assert record_files(tmp_path / "a") == record_files(tmp_path / "b")
        expected = states_of(engine, model)
        optimizer.param_groups[0]["lr"] = 0.5
        infinity.save(tmp_path / "b", model, optimizer)
        infinity.load(tmp_path / "a", model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        infinity.load(tmp_path / "b", model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert_same_states(states_of(engine, model), expected)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK], ids=lambda code: errno.errorcode[code])
def test_a_file_that_cannot_be_linked_is_written(code, tmp_path, monkeypatch):
    """Cases: no links on the filesystem, a filesystem mounted twice, too many links, the old checkpoint removed meanwhile."""

    def link(*_, **__):
        raise OSError(code, os.strerror(code))

    with training(frozen_half, tmp_path) as (model, engine, optimizer):
        infinity.save(tmp_path / "checkpoint", model, optimizer)
        monkeypatch.setattr(os, "link", link)
        infinity.save(tmp_path / "checkpoint", model, optimizer, extra="second")
        assert infinity.load(tmp_path / "checkpoint", model, optimizer).extra == "second"


def test_save_works_after_the_last_checkpoint_was_removed(tmp_path):
    with training(frozen_half, tmp_path) as (model, engine, optimizer):
        infinity.save(tmp_path / "checkpoint", model, optimizer)
        shutil.rmtree(tmp_path / "checkpoint")
        infinity.save(tmp_path / "checkpoint", model, optimizer, extra="second")
        assert infinity.load(tmp_path / "checkpoint", model, optimizer).extra == "second"


# ---- refusals ----


def saved(tmp_path, make=mlp, **config):
    """The path of a checkpoint after one step."""
    scheduler = config.pop("schedule", None)
    with training(make, tmp_path, **config) as (model, engine, optimizer):
        train_trait(model, optimizer, 0)
        infinity.save(tmp_path / "checkpoint", model, optimizer, scheduler=scheduler and scheduler(optimizer))
    return tmp_path / "checkpoint"


def mlp_of(change):
    def make():
        model = mlp(3)
        change(model)
        return model

    return make


def several_differences(model):
    del model.layers[2]
    model.layers[1] = nn.Linear(H, 2 * H)
    model.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    model.register_buffer("count", torch.zeros(1))


def one_group_each(model):
    return [{"params": [param]} for param in model.parameters()]


def frozen_first(model):
    model.layers[0].requires_grad_(False)


def groups_turned(model):
    return two_groups(model)[::-1]


REFUSED = {  # difference: (changes of the engine that loads, words of the error). The checkpoint is of an mlp(3) of fp32 and AdamW
    "model": (
        {"make": mlp_of(several_differences)},
        ["missing in the checkpoint: extra", "unknown to the model: layers.2.bias, layers.2.weight", "layers.1.weight has shape [24, 24] in"]
        + ["and [48, 24] in the model", "layers.1.bias has shape [24] in the checkpoint and [48] in", "buffer count is only in the model"],
    ),
    "dtype": ({"dtype": "bf16"}, ["saved with dtype='fp32', expected dtype='bf16'", "safetensors"]),
    "moments": (
        {"optimizer": infinity.SGD, "options": {"momentum": 0.9}},
        ["has moments momentum in fp32", "momentum, variance", "load without the optimizer"],
    ),
    "no moments": ({"optimizer": infinity.SGD}, ["has moments none", "momentum, variance"]),
    "groups": ({"groups": two_groups}, ["1 parameter groups in the checkpoint, 2 in the optimizer"]),
    "frozen": ({"make": mlp_of(frozen_first)}, ["layers.0.weight is trained in the checkpoint and not in", "layers.0.bias is trained"]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_another_run_is_refused_and_nothing_changes(case, tmp_path):
    changes, words = REFUSED[case]
    path = saved(tmp_path, mlp_of(lambda model: None))
    with training(**{"make": mlp_of(lambda model: None), "directory": tmp_path, "seed": 1} | changes) as (model, engine, optimizer):
        seed_all(4)
        before = everything(model, engine, optimizer)
        seed_all(4)
        with pytest.raises(infinity.CheckpointError) as caught:
            infinity.load(path, model, optimizer)
        for word in words:
            assert word in str(caught.value), (word, str(caught.value))
        assert_alike(everything(model, engine, optimizer), before)
        if case in ("moments", "no moments", "groups"):
            weights = {name: state["weight"] for name, state in states_of(engine, model).items()}
            assert infinity.load(path, model).step == 1
            assert any(not torch.equal(state["weight"], weights[name]) for name, state in states_of(engine, model).items())
            assert all(not tensor.any() for s in states_of(engine, model).values() for key, tensor in s.items() if key == "momentum")


def test_moments_in_bf16_and_in_fp32_are_not_mixed(tmp_path):
    path = tmp_path / "checkpoint"
    with training(tiny_gpt, tmp_path, dtype="bf16") as (model, engine, optimizer):
        train_gpt(model, optimizer, 0)
        infinity.save(path, model, optimizer)
    with training(tiny_gpt, tmp_path, **MOMENTS) as (model, engine, optimizer):
        with pytest.raises(infinity.CheckpointError, match="momentum, variance in bf16, the checkpoint has momentum, variance in fp32"):
            infinity.load(path, model, optimizer)
        infinity.load(path, model)


def test_frozen_records_of_trained_parameters_load_without_the_optimizer(tmp_path):
    path = saved(tmp_path, mlp_of(frozen_first))
    with training(mlp_of(lambda model: None), tmp_path, seed=1) as (model, engine, optimizer):
        with pytest.raises(infinity.CheckpointError, match="layers.0.weight is frozen in the checkpoint and not in the model"):
            infinity.load(path, model, optimizer)
        infinity.load(path, model)
        got = model.state_dict()
    with training(mlp_of(frozen_first), tmp_path, seed=2) as (model, engine, optimizer):
        infinity.load(path, model, optimizer)
        assert_alike(dict(model.state_dict()), dict(got))


def test_a_checkpoint_of_another_optimizer_with_equal_moments_is_refused(tmp_path):
    with training(mlp, tmp_path, optimizer=infinity.Lion, options={"lr": 1e-3}) as (model, engine, optimizer):
        train_trait(model, optimizer, 0)
        infinity.save(tmp_path / "checkpoint", model, optimizer)
    with training(mlp, tmp_path, optimizer=infinity.SGD, options={"momentum": 0.9}) as (model, engine, optimizer):
        with pytest.raises(infinity.CheckpointError, match="Lion"):
            infinity.load(tmp_path / "checkpoint", model, optimizer)


def test_a_scheduler_that_was_not_saved_is_refused_before_anything_changes(tmp_path):
    path = saved(tmp_path)
    with training(mlp, tmp_path, seed=1) as (model, engine, optimizer):
        scheduler = lr_scheduler.StepLR(optimizer, 2)
        before = everything(model, engine, optimizer, scheduler)
        with pytest.raises(infinity.CheckpointError, match="saved without a scheduler"):
            infinity.load(path, model, optimizer, scheduler=scheduler)
        after = everything(model, engine, optimizer, scheduler)
        del before["drawn"], after["drawn"]
        assert_alike(after, before)


def no_place(kind, tmp_path):
    if kind == "file":
        (tmp_path / "place").write_text("a file")
    if kind == "empty":
        (tmp_path / "place").mkdir()
    if kind == "parent":
        return tmp_path / "none" / "place"
    if kind == "below a file":
        (tmp_path / "a file").write_text("")
        return tmp_path / "a file" / "place"
    return tmp_path / "place"


@pytest.mark.parametrize(
    "kind, words",
    [("missing", "not a directory"), ("empty", "holds no checkpoint"), ("file", "[Nn]ot a directory"), ("parent", "not a directory")],
)
def test_load_without_a_checkpoint_changes_nothing(kind, words, tmp_path):
    with training(mlp, tmp_path / "swap") as (model, engine, optimizer):
        before = states_of(engine, model)
        with pytest.raises(infinity.CheckpointError, match=words):
            infinity.load(no_place(kind, tmp_path), model, optimizer)
        assert_same_states(states_of(engine, model), before)


@pytest.mark.parametrize(
    "kind, error, words",
    [
        ("file", infinity.CheckpointError, "is not a directory"),
        ("parent", infinity.CheckpointError, "parent directory does not exist"),
        ("below a file", infinity.CheckpointError, "is not a directory"),
    ],
)
def test_training_continues_after_a_save_to_an_impossible_path(kind, error, words, tmp_path):
    at_end = expected_states(deep, tmp_path / "swap", 2)
    with training(deep, tmp_path / "swap") as (model, engine, optimizer):
        train_deep(model, optimizer, 0)
        path, before = no_place(kind, tmp_path), set(tmp_path.rglob("*"))
        with pytest.raises(error, match=words):
            infinity.save(path, model, optimizer)
        assert set(tmp_path.rglob("*")) == before
        train_deep(model, optimizer, 1)
        end = everything(model, engine, optimizer)
        del end["drawn"]
        assert_alike(end, at_end)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every directory")
def test_save_refuses_a_directory_without_write_permission(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with training(mlp, tmp_path / "swap") as (model, engine, optimizer):
        with pytest.raises(infinity.SwapError, match="may write"):
            infinity.save(tmp_path / "closed" / "checkpoint", model, optimizer)


def test_save_keeps_a_foreign_manifest_and_unlocks_the_directory(tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "manifest.json").write_text('{"of": "something else"}')
    with training(mlp, tmp_path / "swap") as (model, engine, optimizer):
        for _ in range(2):
            with pytest.raises(infinity.CheckpointError, match="manifest.json cannot be replaced: move it away or save elsewhere"):
                infinity.save(path, model, optimizer)
        assert (path / "manifest.json").read_text() == '{"of": "something else"}'
        (path / "manifest.json").unlink()
        infinity.save(path, model, optimizer)
        infinity.load(path, model, optimizer)


def test_two_engines_cannot_save_to_one_directory_at_once(tmp_path):
    path = tmp_path / "checkpoint"
    with training(deep, tmp_path / "a", **NVME) as (model, engine, optimizer), training(deep, tmp_path / "b") as (other, _, adam):
        with delayed(engine, "write", 0.05):
            saving = infinity.save(path, model, optimizer, extra="first", wait=False)
            with pytest.raises(infinity.CheckpointError, match="another process is writing a checkpoint there"):
                infinity.save(path, other, adam, extra="second")
            saving.wait()
        assert infinity.load(path, other, adam).extra == "first"
        infinity.save(path, other, adam, extra="second")
        assert infinity.load(path, model, optimizer).extra == "second"


def test_save_is_refused_during_a_step(tmp_path):
    path = tmp_path / "checkpoint"

    def refused(words):
        with pytest.raises(infinity.UsageError, match=words):
            infinity.save(path, model, optimizer)
        assert not path.exists()

    for update in ("deferred", "backward"):
        options = {"accumulation_steps": 2}
        with training(mlp, tmp_path / "swap", update=update, options=options, **NVME) as (model, engine, optimizer):
            with infinity.gathered(model.layers[0].weight):
                refused("inside infinity.gathered")
                with pytest.raises(infinity.UsageError, match="inside infinity.gathered"):
                    infinity.load(path, model, optimizer)
            for micro in range(2):
                loss_of(model(inputs(model, micro))).backward()
                refused("between backward\\(\\) and step|between a backward pass")
            optimizer.step()
            infinity.save(path, model, optimizer)
            shutil.rmtree(path)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", [infinity.save, infinity.load], ids=["save", "load"])
def test_save_and_load_are_refused_while_the_model_runs(call, where, tmp_path):
    caught = []

    def inside(*_):
        with pytest.raises(infinity.UsageError) as error:
            call(tmp_path / "checkpoint", model, optimizer)
        caught.append(str(error.value))

    with training(mlp, tmp_path / "swap") as (model, engine, optimizer):
        train_trait(model, optimizer, 0)
        infinity.save(tmp_path / "checkpoint", model, optimizer)
        layer = model.layers[1]
        handle = layer.register_full_backward_hook(inside) if where == "backward" else layer.register_forward_hook(inside)
        loss_of(model(inputs(model, 0))).backward()
        handle.remove()
        assert len(caught) == 1
        optimizer.step()
        infinity.save(tmp_path / "checkpoint", model, optimizer)


def test_save_works_after_gradients_were_dropped(tmp_path):
    with training(mlp, tmp_path / "swap", update="deferred", **NVME) as (model, engine, optimizer):
        loss_of(model(inputs(model, 0))).backward()
        model.zero_grad()
        infinity.save(tmp_path / "checkpoint", model, optimizer)
        train_trait(model, optimizer, 0)


def test_load_repairs_a_torn_engine(tmp_path):
    path = tmp_path / "checkpoint"
    at_end = expected_states(deep, tmp_path, 3, update="backward", **NVME)
    with training(deep, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        for step in range(2):
            train_deep(model, optimizer, step)
        infinity.save(path, model, optimizer, wait=False)

        def bomb(*_):
            raise ZeroDivisionError

        handle = model.layers[1].register_full_backward_hook(bomb)
        with pytest.raises(ZeroDivisionError):
            loss_of(model(inputs(model, 0))).backward()
        handle.remove()
        optimizer.zero_grad()
        assert engine.cycle.torn
        with pytest.raises(infinity.UsageError, match="failed half-way"):
            infinity.save(tmp_path / "torn", model, optimizer)
        with pytest.raises(infinity.UsageError, match="half-way"):
            train_deep(model, optimizer, 2)
        infinity.load(path, model, optimizer)
        train_deep(model, optimizer, 2)
        end = everything(model, engine, optimizer)
        del end["drawn"]
        assert_alike(end, at_end)
        infinity.save(tmp_path / "cured", model, optimizer)


def test_load_drops_accumulated_gradients(tmp_path):
    path, options = tmp_path / "checkpoint", {"accumulation_steps": 2}
    at_end = expected_states(deep, tmp_path, 2, options=options, **NVME)
    with training(deep, tmp_path, options=options, **NVME) as (model, engine, optimizer):
        train_deep(model, optimizer, 0)
        infinity.save(path, model, optimizer)
        loss_of(model(inputs(model, 5))).backward()
        infinity.load(path, model, optimizer)
        train_deep(model, optimizer, 1)
        end = everything(model, engine, optimizer)
        del end["drawn"]
        assert_alike(end, at_end)


def test_a_closed_engine_a_foreign_optimizer_and_a_plain_model_are_refused(tmp_path):
    with training(mlp, tmp_path) as (model, engine, optimizer), training(mlp, tmp_path) as (other, _, adam):
        for call in (infinity.save, infinity.load):
            with pytest.raises(infinity.UsageError, match="the optimizer is not that of this model"):
                call(tmp_path / "checkpoint", model, adam)
            with pytest.raises(infinity.ConfigError, match="is in no engine"):
                call(tmp_path / "checkpoint", nn.Linear(2, 2), adam)
        infinity.save(tmp_path / "checkpoint", model)
        infinity.load(tmp_path / "checkpoint", other, adam)
        engine.close()
        for call in (infinity.save, infinity.load):
            with pytest.raises(infinity.UsageError, match="the engine is closed"):
                call(tmp_path / "checkpoint", model, optimizer)


def test_a_failed_load_stops_training_until_another_load_succeeds(tmp_path):
    path = saved(tmp_path, deep)
    with training(deep, tmp_path, seed=1, **NVME) as (model, engine, optimizer):
        train_deep(model, optimizer, 0)
        infinity.save(tmp_path / "whole", model, optimizer)
        content = json.loads((path / "manifest.json").read_text())
        with open(path / content["folder"] / content["files"][0][0], "r+b") as file:
            file.seek(-4097, os.SEEK_END)
            file.seek(content["chunks"][-1]["records"][0][1])
            file.write(b"damage")
        with pytest.raises(infinity.CheckpointError, match="is damaged"):
            infinity.load(path, model, optimizer)
        for attempt in (lambda: train_deep(model, optimizer, 1), lambda: infinity.save(tmp_path / "half", model, optimizer)):
            with pytest.raises(infinity.UsageError, match="infinity.load failed half-way"):
                attempt()
        assert not (tmp_path / "half").exists()
        infinity.load(tmp_path / "whole", model, optimizer)
        train_deep(model, optimizer, 1)


@pytest.mark.slow
def test_load_without_an_optimizer_resets_the_moments(tmp_path):
    for dtype in ("bf16", "fp16"):
        folder = tmp_path / dtype
        folder.mkdir()
        with training(tiny_gpt, folder, dtype=dtype, **NVME) as (model, engine, optimizer):
            train_gpt(model, optimizer, 0)
            optimizer.param_groups[0]["lr"] = 0.125
            infinity.save(folder / "checkpoint", model, optimizer)
            expected = states_of(engine, model)
        with training(tiny_gpt, folder, seed=1, dtype=dtype, **NVME) as (model, engine, optimizer):
            train_gpt(model, optimizer, 1)
            assert infinity.load(folder / "checkpoint", model).step == 1
            assert optimizer.param_groups[0]["lr"] == 1e-2
            for name, state in states_of(engine, model).items():
                for segment, tensor in state.items():
                    if segment in ("momentum", "variance"):
                        assert not tensor.any()
                    else:
                        assert_alike(tensor, expected[name][segment], (name, segment))
            assert not any(step for chunk in engine.registry.chunks for step in chunk.steps.values())
            train_gpt(model, optimizer, 2)


# ---- memory, open files, threads ----


class Watched(Arena):
    made = None

    def __init__(self, **options):
        super().__init__(**options)
        self.most_nbytes = 0
        Watched.made.append(self)

    def region(self, nbytes):
        region = super().region(nbytes)
        self.most_nbytes = max(self.most_nbytes, self.nbytes)
        return region


@pytest.mark.few(2)
@pytest.mark.parametrize("most", [PAGE_NBYTES, infinity.system.staging_buffers.BUFFER_NBYTES])
@pytest.mark.parametrize("places", PLACES[::4], ids=str)
def test_two_staging_buffers_are_enough_for_records_of_any_size(places, most, tmp_path, monkeypatch):
    """The staging memory is two buffers of the largest segment's size, at most `most` bytes each."""
    monkeypatch.setattr(Watched, "made", [])
    monkeypatch.setattr(infinity.system.staging_buffers, "BUFFER_NBYTES", most)
    for module in (infinity.system.staging_buffers, infinity.checkpoints.reader):
        monkeypatch.setattr(module, "Arena", Watched)
    config = {"chunk_mib": 1 / 32, **places}
    at_call = expected_states(deep, tmp_path, 1, **config)
    Watched.made.clear()
    with training(deep, tmp_path, **config) as (model, engine, optimizer):
        train_deep(model, optimizer, 0)
        engines_nbytes = engine.arena.nbytes
        records = [chunk.record for chunk in engine.registry.chunks]
        largest = max(-(-record.numel * segment.itemsize // PAGE_NBYTES) * PAGE_NBYTES for record in records for segment in record.segments)
        assert largest > PAGE_NBYTES
        with delayed(engine, "write"):
            saving = infinity.save(tmp_path / "checkpoint", model, optimizer, wait=False, host_memory=0)
            train_deep(model, optimizer, 1)
            saving.wait()
        assert [arena.most_nbytes for arena in Watched.made] == [2 * min(largest, most)]
        assert [arena.nbytes for arena in Watched.made] == [0] and engine.arena.nbytes == engines_nbytes
        Watched.made.clear()
        infinity.load(tmp_path / "checkpoint", model, optimizer)  # load reads directly into the records of the engine
        assert [arena.most_nbytes for arena in Watched.made] == [0] and engine.arena.nbytes == engines_nbytes
        found = everything(model, engine, optimizer)
        del found["drawn"]
        assert_alike(found, at_call)
    Watched.made.clear()
    with training(deep, tmp_path, **places) as (model, engine, optimizer):
        engines_nbytes = engine.arena.nbytes
        infinity.load(tmp_path / "checkpoint", model, optimizer)
        assert 0 < Watched.made[0].most_nbytes <= 3 * max(record.nbytes for record in records)
        assert Watched.made[0].nbytes == 0 and engine.arena.nbytes == engines_nbytes


@LONG
def test_a_failed_engine_ends_an_update_that_waits_for_a_save(tmp_path):
    """In its own process: the bug was a use of freed memory."""
    source = """
    import sys, time
    from pathlib import Path
    import infinity
    from aio_ext import _aio
    from support.helpers import NVME, least_host_memory, training
    from test_save import deep, train_deep

    def is_taken_by_its_update(saving, chunk):
        return chunk.index in saving.reader.snapshot._busy and chunk.update.is_running

    folder, first = Path(sys.argv[1]), []
    least = least_host_memory(deep, folder, update="deferred", **NVME)  # least memory: a thread waits for a slot and gets the error
    try:
        with training(deep, folder, update="deferred", host_memory=least, **NVME) as (model, engine, optimizer):
            train_deep(model, optimizer, 0)
            train_deep(model, optimizer, 1)
            engine.updater.lane.on_job = lambda: first or (first.append(1), time.sleep(6))
            _aio._inject("write", 0, -1, None, delay=1.5)
            saving = infinity.save(folder / "checkpoint", model, optimizer, wait=False, host_memory=0)
            saving.reader.pass_step()
            deadline = time.monotonic() + 40
            while not any(is_taken_by_its_update(saving, chunk) for chunk in engine.registry.chunks) and time.monotonic() < deadline:
                time.sleep(0.01)
            engine.records.failure.note(OSError(5, "the swap is gone"))
            try:
                saving.wait()
            except OSError as error:
                print("told", error)
            time.sleep(3)
            print("no checkpoint:", not (folder / "checkpoint").exists())
    except OSError as error:
        print("ended", error)
    """
    done = run_python(source, tmp_path)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-2000:])
    assert "told" in done.stdout and "no checkpoint: True" in done.stdout, done.stdout


def left():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(our_threads())


@pytest.mark.slow
@pytest.mark.parametrize("wait", [pytest.param(True, marks=LONG), False])
def test_saves_and_loads_leave_no_open_files_and_no_threads(wait, tmp_path):
    def attempt(path, **options):
        saving = infinity.save(path, model, optimizer, wait=wait, **options)
        train_deep(model, optimizer, 1)
        saving.wait()

    with training(deep, tmp_path, **NVME) as (model, engine, optimizer):
        train_deep(model, optimizer, 0)
        infinity.save(tmp_path / "good", model, optimizer)
        infinity.load(tmp_path / "good", model, optimizer)
        (tmp_path / "file").write_text("")
        before = left()
        for _ in range(2):
            attempt(tmp_path / "good")
            infinity.load(tmp_path / "good", model, optimizer)
            infinity.load(tmp_path / "good", model)
            for path, options in ((tmp_path / "file", {}), (tmp_path / "no" / "parent", {}), (tmp_path / "good", {"extra": {1, 2}})):
                with pytest.raises(infinity.CheckpointError):
                    attempt(path, **options)
            with pytest.raises(infinity.CheckpointError):
                infinity.load(tmp_path / "swap", model, optimizer)
            for op, nth in (("write", 0), ("write", 3), ("write", 7)):
                _aio._inject(op, nth, 1, -errno.EIO)
                with contextlib.suppress(infinity.SwapError):
                    saving = infinity.save(tmp_path / "good", model, optimizer, wait=False)
                    saving.wait()
                assert _aio._inject() == 1
                assert len(os.listdir(tmp_path / "good")) == 2
        deadline = time.monotonic() + 5  # threads end a moment later
        while left() != before and time.monotonic() < deadline:
            os.sched_yield()
        assert left() == before


def test_progress_counts_to_the_end(tmp_path):
    with training(deep, tmp_path, **NVME) as (model, engine, optimizer):
        train_deep(model, optimizer, 0)
        seen = []
        infinity.save(tmp_path / "checkpoint", model, optimizer, progress=lambda *now: seen.append(now))
        total = sum(chunk.record.nbytes for chunk in engine.registry.chunks)
        assert seen[-1] == (total, total) and seen == sorted(seen)
        seen.clear()
        infinity.load(tmp_path / "checkpoint", model, optimizer, progress=lambda *now: seen.append(now))
        assert seen[-1] == (total, total) and len(seen) == len(engine.registry.chunks) and seen == sorted(seen)


# ---- values of the program ----

VALUES = {
    "floats": [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 0.1, 1e22],
    "integers": [0, -1, 2**53 + 1, 2**64, -(10**100), True, False],
    "strings": ["", "$tensor", "a\0b", "\ud800", "\U0001f600", '"\\'],
    "none": None,
    "bytes": [b"", b"\0\xff" * 100],
    "tuples": ((), (1,), ((2.0, [3]), {"a": (4,)})),
    "keys": {1: "a", "1": "b", (1, 2.5): "c", None: "d", b"e": "f", -0.5: "g", False: "h", math.inf: "i"},
    "dollars": [{"$tensor": 0}, {"$dict": []}, {"$": {"$float": "nan"}}, {"$tuple": [1]}, {"a": 1, "$b": 2}, {"": 1}],
    "empty": [{}, [], (), [{}], {"a": {}}],
    "counter": collections.Counter({1: 2, 3: -4, "a": 0}),
    "order": {"b": 1, "a": 2, "c": 3},
    "nested": {"a": [{"b": ({"c": [torch.arange(3), None]},)}]},
    "parameter": torch.arange(3.0),
    "deep": functools.reduce(lambda inner, _: [{"a": (inner,)}], range(50), 1),
}


def tensors_of_all_dtypes():
    random_bytes = torch.randint(0, 2, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for dtype in infinity.checkpoints.manifest.TENSOR_DTYPES.values():
        whole = random_bytes.view(dtype) if dtype is not torch.bool else random_bytes.bool()
        yield from (whole, whole[:0], whole[1], whole[: len(whole) // 2 * 2].view(2, -1), whole[: len(whole) // 2 * 2].view(2, -1).t())
        yield whole[::2]
    yield torch.empty(0, 3, 0)
    yield torch.tensor([math.nan, -0.0, math.inf])
    yield torch.tensor([1 + 2j, 3 - 4j]).conj()
    yield torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    yield torch.ones(3).expand(4, 3)
    yield torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)


def arrays_of_all_dtypes():
    for dtype in "?bBhHiIlLqefdFD":
        whole = np.arange(12).astype(dtype)
        yield from (whole, whole[:0], whole.reshape(3, 4), whole.reshape(3, 4).T, whole[::-1], np.array(whole[1]))
    yield np.frombuffer(b"12345678", dtype=np.int64)  # read-only


@pytest.fixture
def roundtrip(tmp_path):
    """Saves a value as `extra` and returns the loaded value."""
    with training(mlp, tmp_path / "swap") as (model, engine, optimizer):

        def there_and_back(value):
            infinity.save(tmp_path / "checkpoint", model, optimizer, extra=value)
            return infinity.load(tmp_path / "checkpoint", model, optimizer).extra

        yield there_and_back


@pytest.mark.filterwarnings("error")
def test_values_are_loaded_unchanged(roundtrip):
    assert_alike(roundtrip(VALUES), VALUES)
    for value in (None, 1, math.nan, (1, 2), {}, VALUES["counter"], b"x"):
        assert_alike(roundtrip(value), value)


def test_tensors_are_loaded_unchanged(roundtrip):
    values = list(tensors_of_all_dtypes())
    assert_alike(roundtrip(values), values)
    back = roundtrip({"parameter": nn.Parameter(torch.ones(2)), "part": torch.arange(10)[3:5]})
    assert type(back["parameter"]) is torch.Tensor and back["part"].untyped_storage().nbytes() == 16
    back["part"] += 1  # a loaded tensor is writable


@pytest.mark.filterwarnings("error")
def test_arrays_are_loaded_unchanged(roundtrip):
    values = list(arrays_of_all_dtypes())
    back = roundtrip(values)
    assert_alike(back, values)
    back[0][:] = 1  # loaded arrays are writable
    big = np.arange(3, dtype=">i4")
    try:
        back = roundtrip([big])[0]
    except infinity.CheckpointError:
        pass
    else:
        assert (back == big).all()


def test_numbers_and_containers_of_other_types_are_loaded_as_equals(roundtrip):
    value = {
        "numpy": [np.float32(0.1), np.int64(7), np.bool_(True), np.str_("a"), np.float64("nan")],
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(int, a=2),
        "deque": collections.deque([1, 2]),
        "bytearray": bytearray(b"ab"),
    }
    back = roundtrip(value)
    assert back["numpy"][:4] == [float(np.float32(0.1)), 7, True, "a"] and math.isnan(back["numpy"][4])
    assert list(back["ordered"].items()) == [("b", 1), ("a", 2)] and back["default"] == {"a": 2}
    assert back["deque"] == [1, 2] and back["bytearray"] == b"ab"


class Unknown:
    pass


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize(
    "value, where",
    [
        ({"a": [0, 1, 2, Unknown()]}, "extra['a'][3] is of type Unknown"),
        ({"a": {"b": ({1},)}}, "extra['a']['b'][0] is of type set"),
        (Pair(1, 2), "extra is of type Pair"),
        ([1j], "extra[0] is of type complex"),
        ({(1, Unknown): 2}, "extra: key"),
        ({1: {2: print}}, "extra[1][2] is of type builtin_function_or_method"),
        ([torch.eye(2).to_sparse()], "extra[0]"),
        ([torch.empty(2, device="meta")], "extra[0]"),
        ({"a": np.array(["text"])}, "extra['a']"),
        ({"a": np.array([None])}, "extra['a']"),
        ({"a": np.arange(3, dtype=">i4")}, "extra['a']"),
        ({"a": np.ma.array([1, 2], mask=[0, 1])}, "extra['a']"),
        ({"a": np.datetime64("2020-01-01")}, "extra['a']"),
        ([10**5000], "extra[0]"),
    ],
    ids=lambda value: value.split("]")[0] if isinstance(value, str) else "",
)
def test_the_error_names_a_value_that_cannot_be_saved(value, where, tmp_path):
    with training(mlp, tmp_path / "swap") as (model, engine, optimizer):
        train_trait(model, optimizer, 0)
        before = set(tmp_path.rglob("*"))
        with pytest.raises(infinity.CheckpointError) as caught:
            infinity.save(tmp_path / "checkpoint", model, optimizer, extra=value)
        assert where in str(caught.value), str(caught.value)
        assert set(tmp_path.rglob("*")) == before
        infinity.save(tmp_path / "checkpoint", model, optimizer)


def test_a_value_that_holds_itself_is_refused(tmp_path):
    value = []
    value.append(value)
    with training(mlp, tmp_path) as (model, engine, optimizer), pytest.raises(infinity.CheckpointError):
        infinity.save(tmp_path / "checkpoint", model, optimizer, extra=value)


def test_a_value_may_change_once_save_has_returned(tmp_path):
    with training(deep, tmp_path, **NVME) as (model, engine, optimizer):
        value = {"a": [1], "t": torch.zeros(3), "n": np.zeros(3)}
        with delayed(engine, "write"):
            saving = infinity.save(tmp_path / "checkpoint", model, optimizer, extra=value, wait=False)
            value["a"].append(2)
            value["t"] += 1
            value["n"] += 1
            saving.wait()
        assert_alike(infinity.load(tmp_path / "checkpoint", model, optimizer).extra, {"a": [1], "t": torch.zeros(3), "n": np.zeros(3)})


def test_generators_continue_after_a_load(tmp_path):
    with training(mlp, tmp_path) as (model, engine, optimizer):
        seed_all(3)
        infinity.save(tmp_path / "checkpoint", model, optimizer)

        def draws():
            numbers = [random.random(), random.gauss(0, 1), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]
            return [*numbers, torch.rand(700), torch.randn(17), torch.randperm(9), np.random.permutation(700)]

        expected = draws()
        infinity.load(tmp_path / "checkpoint", model, optimizer)
        assert_alike(draws(), expected)
        infinity.load(tmp_path / "checkpoint", model)
        assert_alike(draws(), expected)


def test_the_signatures_are_the_documented_ones():
    assert list(inspect.signature(infinity.save).parameters)[:6] == ["path", "model", "optimizer", "scheduler", "extra", "wait"]
    assert list(inspect.signature(infinity.load).parameters)[:4] == ["path", "model", "optimizer", "scheduler"]


def test_a_path_may_be_a_text_relative_or_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    os.symlink("real", tmp_path / "link")
    with training(mlp, tmp_path / "swap") as (model, engine, optimizer):
        train_trait(model, optimizer, 0)
        for path in ("relative", Path("link"), "real", str(tmp_path / "absolute")):
            infinity.save(path, model, optimizer, extra=str(path))
            assert infinity.load(path, model, optimizer).extra == str(path)


# ---- on a GPU ----


@on_gpu
@pytest.mark.parametrize("memory", [0, "1GiB"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "place", [NVME, {"param_tier": "host", "optimizer_state_tier": "host"}, {"device_memory": "40MiB"}, {}], ids=["nvme", "host", "margin", "device"]
)
def test_a_resumed_run_equals_the_uninterrupted_run_on_a_gpu(place, dtype, memory, tmp_path, deterministic):
    def make():
        return GPT(hidden=256, layers=4, heads=4, vocab=1000, seq=64)

    def step(model, optimizer, number):
        batch = torch.randint(1000, (4, 65), generator=torch.Generator().manual_seed(number)).cuda()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    config = {"device": "cuda", "dtype": dtype, "chunk_mib": 0.5, "options": {"lr": 1e-3}, **place}
    with training(make, tmp_path, **config) as (model, engine, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        saving = infinity.save(tmp_path / "checkpoint", model, optimizer, wait=False, host_memory=memory)
        losses = [step(model, optimizer, number) for number in range(3, 6)]
        saving.wait()
        stats = engine.stats()
        expected = states_of(engine, model)
    if place in ({}, {"device_memory": "40MiB"}):  # on a busy machine steps take longer, and the engine rolls its placement back
        assert stats["num_chunks_on_device"] or stats["num_placement_rollbacks"]
    else:
        assert not stats["num_chunks_on_device"]
    with training(make, tmp_path, seed=1, **config) as (model, engine, optimizer):
        assert infinity.load(tmp_path / "checkpoint", model, optimizer).step == 3
        assert [step(model, optimizer, number) for number in range(3, 6)] == losses
        assert_same_states(states_of(engine, model), expected)


# ---- found in a review ----


def test_the_error_names_a_buffer_or_extra_that_cannot_be_saved(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        for strange in (torch.zeros(4, dtype=torch.float8_e5m2fnuz), torch.eye(3).to_sparse(), torch.empty(2, device="meta")):
            model.register_buffer("strange", strange)
            with pytest.raises(infinity.CheckpointError, match="buffer strange: tensors of .* cannot be saved"):
                infinity.save(tmp_path / "checkpoint", model, optimizer)
            del model._buffers["strange"]
        for extra in ({"w": [next(model.parameters())]}, [list(model.parameters())]):
            with pytest.raises(infinity.CheckpointError, match=r"extra\[.*a parameter of the model is only a placeholder"):
                infinity.save(tmp_path / "checkpoint", model, optimizer, extra=extra)
        assert not (tmp_path / "checkpoint").exists()


def test_a_relative_path_is_resolved_at_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        saving = infinity.save("checkpoint", model, optimizer, wait=False)
        monkeypatch.chdir("/")
        saving.wait()
        assert infinity.load(tmp_path / "checkpoint", model, optimizer).step == 0


@pytest.mark.long
def test_a_program_that_ends_finishes_its_checkpoint(tmp_path):
    source = """
        import os, sys, torch, infinity
        from infinity.model.gpt import GPT
        config = infinity.Config(swap_dirs=sys.argv[1], device="cpu", dtype="fp32", param_tier="nvme", optimizer_state_tier="nvme", residency="none", chunk_mib=0.02)
        with infinity.init(config):
            model = GPT(32, 2, 2, 64, 16)
        optimizer = infinity.AdamW(model.parameters())
        tokens = torch.arange(16).view(1, 16)
        model(tokens, tokens).backward()
        optimizer.step()
        infinity.save(sys.argv[1] + "/checkpoint", model, optimizer, wait=False)
        child = os.fork()
        if not child:
            sys.exit(3)  # runs the atexit functions
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    """
    run_python(textwrap.dedent(source), tmp_path)
    with infinity.checkpoints.reader.Checkpoint(tmp_path / "checkpoint") as checkpoint:
        assert checkpoint.verify() and checkpoint.manifest.step == 1


def test_a_checkpoint_ends_without_a_further_step(tmp_path, monkeypatch):
    monkeypatch.setattr(infinity.checkpoints.save, "PATIENCE_S", 0.1)
    with training(mlp, tmp_path, **NVME, update="backward") as (model, engine, optimizer):
        train_mlp = loss_of(model(inputs(model, 0)))
        train_mlp.backward()
        optimizer.step()
        saving = infinity.save(tmp_path / "checkpoint", model, optimizer, wait=False)
        assert saving.reader.over.wait(60) and saving.error is None


def test_a_scheduler_that_refuses_its_state_is_a_checkpoint_error(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        plain = lr_scheduler.StepLR(optimizer, 1)
        infinity.save(tmp_path / "checkpoint", model, optimizer, scheduler=plain)
        other = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.StepLR(optimizer, 1), lr_scheduler.StepLR(optimizer, 2)], [1])
        with pytest.raises(infinity.CheckpointError, match="did not take its state"):
            infinity.load(tmp_path / "checkpoint", model, optimizer, scheduler=other)
        infinity.load(tmp_path / "checkpoint", model, optimizer, scheduler=plain)


def own_extra(folder):
    with infinity.init(settings(folder, **NVME)):
        model = gpt()
    optimizer = infinity.AdamW(model.parameters())
    with infinity.engine_of(model):
        try:
            infinity.save(folder / "checkpoint", model, optimizer, extra={"rank": ranks()[0]})
        except infinity.CheckpointError as error:
            return str(error)


@pytest.mark.long
def test_an_extra_that_differs_between_ranks_is_refused(worlds, tmp_path):
    assert all("the ranks gave different values" in text for text in worlds(2).run(own_extra, tmp_path))
