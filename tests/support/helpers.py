"""Shared by tests of the engine: the reference optimizer with the expected bits, and functions that build, limit and compare engines."""

import contextlib
import mmap
import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import infinity
from aio_ext import _aio
from infinity.engine.sizing import Training, arrange
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.optim.rules import AdamRule
from infinity.plan import placement as planner
from infinity.plan.compression import NUM_BUFFERS, NUM_LANES
from infinity.plan.memory_needs import Budgets, Candidate, Needs
from infinity.plan.tiers import choice_of
from infinity.system import drives
from infinity.system.arena import Arena
from infinity.system.swap import Swap
from infinity.tiers.compressed_extents import OverflowArea
from infinity.tiers.compression import Compressor

NVME = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none"}


def on_gpu(test):
    """Marks a test that needs CUDA. `make test-gpu` runs these tests."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def memory(nbytes, fill=None):
    """Page-aligned memory, filled with the byte `fill` or with random bytes."""
    pages = mmap.mmap(-1, max(nbytes, 1))
    pages[:nbytes] = random.randbytes(nbytes) if fill is None else bytes([fill]) * nbytes
    return memoryview(pages)[:nbytes]


def everything_in(*paths):
    """Sorted relative paths of all entries below these directories."""
    return sorted(str(found.relative_to(path)) for path in paths for found in path.rglob("*"))


def start_python(source, *arguments, variables=None, **options):
    """A process that runs the source, with pipes for stdout and stderr. The package and the tests are on PYTHONPATH. variables: more of the
    environment."""
    environment = {**os.environ, **(variables or {}), "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes, **options)


def without_gloo(text):
    """The output of a program, without the lines that gloo of PyTorch 2.8 prints."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))


def run_python(source, *arguments, **options):
    """Same as `start_python`, but waits for the end. Returns a CompletedProcess with the output and the exit status."""
    with start_python(source, *arguments, **options) as process:
        try:
            output, errors = process.communicate(timeout=300)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


class ReferenceAdamW(torch.optim.Optimizer):
    """The update of [Note: the fixed arithmetic] in _adam.c, op by op, over plain PyTorch parameters.

    dtype: with bf16 and fp16, the optimizer keeps fp32 masters and writes rounded weights to the model. With fp32, the optimizer updates
    the model directly. None takes the dtype of each parameter.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, dtype="fp32", decoupled=True):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.dtype, self.decoupled = dtype, decoupled
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": 0, "master": p.detach().float().clone()}
                self.state[p] |= {"m": torch.zeros_like(self.state[p]["master"]), "v": torch.zeros_like(self.state[p]["master"])}

    def dtype_of(self, param):
        return self.dtype or {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[param.dtype]

    def rounded(self, param, master):
        """The weight that the model computes with."""
        dtype = self.dtype_of(param)
        return split(master)[0] if dtype == "bf16" else master.to(TORCH_DTYPES[dtype])

    @torch.no_grad()
    def step(self, grad_scale=1.0):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group, grad_scale)

    def _update(self, param, s, group, grad_scale=1.0, grad=None):
        def fp32(number):
            return torch.tensor(number, dtype=torch.float64).float()

        s["step"] += 1
        written = torch.where(param == self.rounded(param, s["master"]), s["master"], param.float())
        s["master"] = written.detach().clone()  # an embedding with max_norm writes weights in forward
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        p, g = s["master"], (param.grad if grad is None else grad).float() * fp32(grad_scale)
        if self.decoupled:
            p = p * fp32(1 - lr * decay)
        else:
            g = g + fp32(decay) * p
        m = s["m"] = s["m"] * fp32(beta1) + g * fp32(1 - beta1)
        v = s["v"] = s["v"] * fp32(beta2) + (g * g) * fp32(1 - beta2)
        root = v.double().sqrt().float()  # torch's fp32 square root is not correctly rounded on the CPU
        d = root * fp32((1 - beta2 ** s["step"]) ** -0.5) + fp32(group["eps"])
        quotient = (m.double() / d.double()).float()
        s["master"] = p - fp32(lr / (1 - beta1 ** s["step"])) * quotient
        param.copy_(self.rounded(param, s["master"]))


def run_interpreted(program):
    """Run a program in a new Python process, with Triton's interpreter. It can import the test modules."""
    done = run_python(program, variables={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr


def split(master):
    """fp32 -> (weight bf16, residual int16): weight = (bits + 0x8000) >> 16, residual = bits - (weight << 16)."""
    bits = master.contiguous().view(torch.int32)
    weight = (bits + 0x8000) >> 16
    return weight.to(torch.int16).view(torch.bfloat16), (bits - (weight << 16)).to(torch.int16)


def to_bf16(model):
    for p in model.parameters():
        p.data = split(p.data)[0]


def bits(tensor):
    return tensor.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same_bits(got, expected, what):
    assert got.dtype == expected.dtype and got.shape == expected.shape, (what, got.dtype, expected.dtype, got.shape)
    wrong = (bits(got) != bits(expected)).sum().item()
    assert not wrong, f"{what}: {wrong} of {got.numel()} elements differ"


def assert_equals_reference(engine, model, reference_model, reference):
    """Asserts the same bits in every segment of every parameter."""
    theirs = dict(reference_model.named_parameters())
    for name, param in model.named_parameters():
        state, expected = engine.read_state(param), reference.state.get(theirs[name])
        if not expected:
            assert_same_bits(state["weight"], theirs[name].detach(), f"{name} weight")
            continue
        assert_same_bits(state["weight"], reference.rounded(theirs[name], expected["master"]), f"{name} weight")
        if "residual" in state:
            assert_same_bits(state["residual"], split(expected["master"])[1], f"{name} residual")
        if "master" in state:
            assert_same_bits(state["master"], expected["master"], f"{name} master")
        if "momentum" in state:
            assert_same_bits(state["momentum"], expected["m"], f"{name} momentum")
            assert_same_bits(state["variance"], expected["v"], f"{name} variance")
        registered = engine.registry.find(param)
        for chunk in engine.registry.chunks_of(registered):
            assert chunk.steps.get(registered.index, 0) == expected["step"], f"{name} step"


def assert_moves(state, attribute, moves, become, before, after, message):
    """Asserts that `become` makes a move of the table `moves`, and raises AssertionError for any other move."""
    setattr(state, attribute, before)
    if (before, after) in moves:
        become(after)
        assert getattr(state, attribute) is after
        return
    with pytest.raises(AssertionError, match=message.format(before=before.value, after=after.value)):
        become(after)
    assert getattr(state, attribute) is before


def states_of(engine, model):
    return {name: engine.read_state(param) for name, param in model.named_parameters()}


def assert_same_states(got, expected, what=""):
    assert got.keys() == expected.keys()
    for name, segments in got.items():
        for segment, tensor in segments.items():
            assert_same_bits(tensor, expected[name][segment], f"{what} {name} {segment}")


def assert_nothing_held(engine):
    engine.weights.drain_dropped()
    assert engine.weights.held == {}, engine.weights.held
    assert all(span.holds == 0 for span in engine.registry.spans)
    assert engine.calls.frames == []


@contextlib.contextmanager
def training(make, directory, *, seed=0, optimizer=infinity.AdamW, groups=None, options=None, **config):
    """Yields (model, engine, optimizer) of a model made with a seed. Asserts at the end that no span is held, and closes the engine."""
    torch.manual_seed(seed)
    model = make()
    directory.mkdir(exist_ok=True)
    config = {"swap_dirs": directory, "device": "cpu", "dtype": "fp32", "chunk_mib": 1 / 512, "host_memory": "64MiB"} | config
    engine = infinity.offload(model, infinity.Config(**config))
    try:
        params = groups(model) if groups else [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizer(params, **({"lr": 1e-2} | (options or {})))
        yield model, engine, optimizer
        assert_nothing_held(engine)
    finally:
        engine.close()


def plain(make, *, seed=0, dtype="fp32", groups=None, options=None):
    """(model, optimizer) of plain PyTorch with the stated arithmetic."""
    torch.manual_seed(seed)
    model = make()
    masters = {p: p.detach().clone() for p in model.parameters()}
    if dtype == "bf16":
        to_bf16(model)
    params = groups(model) if groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = ReferenceAdamW(params, dtype=dtype, **({"lr": 1e-2} | (options or {})))
    for p, state in optimizer.state.items():
        state["master"] = masters[p].float()
    return model, optimizer


def least_device_memory(make, directory, *, trained=True, **config):
    """The least budget in bytes, from the refusal of a tiny budget. Asserts that one byte less is refused."""
    return _least(make, directory, "device_memory", config, trained)


def least_host_memory(make, directory, *, trained=True, **config):
    return _least(make, directory, "host_memory", config, trained)


def _least(make, directory, field, config, trained):
    options = config.pop("options", None)
    groups = config.pop("groups", None)
    try:
        with training(make, directory, groups=groups, options=options, **config | {field: 1024}):  # Config refuses smaller numbers
            return 1024
    except infinity.BudgetError as error:
        match = re.search(r"needs (\d+) bytes", str(error))
        assert match, f"the message names no number of bytes: {error}"
    nbytes = int(match[1])
    try:
        with training(make, directory, groups=groups, options=options, **config | {field: nbytes - 1}):
            raise AssertionError(f"{field}={nbytes - 1} was accepted, one byte below {nbytes}")
    except infinity.BudgetError as error:
        assert f"needs {nbytes} bytes" in str(error)
    return nbytes


class ScriptedGauge:
    """A device of `capacity` bytes. A pass allocates `activations` bytes beside the spans of the engine. Counts overflows."""

    def __init__(self, capacity):
        self.capacity, self.activations, self.tier, self.overflows, self.failures = capacity, 0, None, 0, 0

    def capacity_nbytes(self):
        return self.capacity

    def peak_nbytes(self):
        peak = self.tier.held_nbytes + self.activations
        self.overflows += peak > self.capacity
        return peak

    def most_nbytes(self):
        return self.peak_nbytes()

    def num_failures(self):
        return self.failures


def run_micro_batches(model, batches, loss_of, by_layer):
    """Runs all backward passes of a step, layer-wise or in an ordinary loop. Returns the losses."""
    if by_layer:
        return [loss.item() for loss in infinity.accumulate(model, batches, lambda model, batch: loss_of(model(batch[0]), batch[1]))]
    losses = []
    for x, y in batches:
        loss = loss_of(model(x), y)
        loss.backward()
        losses.append(loss.item())
    return losses


class OnDrive:
    """A compressor with small sections, over a swap with extents of `sizes` bytes. Has a pool for gradients if pool_nbytes > 0, and an overflow
    area of area_nbytes at the start."""

    def __init__(self, paths, sizes, section_nbytes, pool_nbytes=0, area_nbytes=0):
        self.arena, self.swap = Arena(), Swap(paths)
        self.extents = [self.swap.allocate(nbytes) for nbytes in sizes]
        area = OverflowArea(self.swap, self.swap.allocate(area_nbytes) if area_nbytes else None)
        self.swap.reserve()
        self.compressor = Compressor(self.swap, self.arena, NUM_LANES * NUM_BUFFERS * section_nbytes, pool_nbytes, area)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.compressor.close()
        self.swap.close()
        self.arena.close()


def place(whole, records, *, first=None, least_crowded_out=0, **options):
    """A placement. Options are the fields of Needs, of Candidate and of Budgets (`device_budget` for the device). `first` has the records of
    the first rank."""
    options = {name.replace("_budget", "_nbytes"): value for name, value in options.items()}
    candidate = {name: value for name, value in options.items() if name in Candidate.__dataclass_fields__}
    needs, budgets = ({name: options[name] for name in kind.__dataclass_fields__ if name in options} for kind in (Needs, Budgets))
    assert not options.keys() - candidate.keys() - needs.keys() - budgets.keys()
    needs |= {kind: choice_of(needs[kind]) for kind in ("weights", "states")}
    made, of_first = (Candidate(layout=whole, records=own, **candidate) for own in (records, first or records))
    return planner.place(made, Needs(**needs), Budgets(**budgets), first=of_first, least_crowded_out=least_crowded_out)


def arranged(model, config, *, compresses=False, **options):
    """(layout, records, placement) of one rank. Options are the fields of Training and of Budgets (`device_budget` for the device)."""
    budgets = {name.replace("_budget", "_nbytes"): options.pop(name) for name in list(options) if name.endswith("_budget")}
    rule = AdamRule(decoupled=options.pop("can_advance", False))  # coupled Adam has the same moments, and they are never late
    how = Training(**{"deferred": False, "accumulating": False, "rule": rule} | options)
    return arrange(model, list(model.named_parameters()), config, Budgets(**budgets), how, (0, 1), compresses=compresses)


def slow_down(monkeypatch, delays):
    """Delays each block of a directory by this many seconds while drives.compare measures; one delay per directory."""
    real = drives.compare

    def compare(fds):
        for fd, delay in zip(fds.values(), delays):
            for op in ("read", "write"):
                _aio._inject(op, 0, -1, None, delay=delay, fd=fd)
        try:
            return real(fds)
        finally:
            _aio._inject()

    monkeypatch.setattr(drives, "compare", compare)
