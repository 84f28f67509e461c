"""Random training programs have the bits of plain PyTorch: a machine draws a program, and runs it on an engine and on a twin.

A rule of the machine is one call of a program, such as a backward pass, step() or a save. The twin is a plain model with the update of
`ReferenceAdamW`, which has the stated arithmetic of the engine. torch.optim.AdamW rounds in another order.

Long because the long form runs hundreds of programs.
"""

import contextlib
import copy
import functools
import math
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.faults import no_hang, nothing_left
from support.helpers import NVME, assert_equals_reference, assert_nothing_held, assert_same_bits, plain, training
from torch import nn

import infinity
from infinity.model.recompute import checkpoint

hypothesis = pytest.importorskip("hypothesis")
stateful = pytest.importorskip("hypothesis.stateful")
st = pytest.importorskip("hypothesis.strategies")
initialize, invariant, precondition, rule = stateful.initialize, stateful.invariant, stateful.precondition, stateful.rule

pytestmark = pytest.mark.usefixtures("one_thread")

MOST_PASSES = 4  # of a step with infinity.no_sync
HOST_AND_NVME = {"param_tier": "host", "optimizer_state_tier": "nvme"}
PLACES = {"nvme": NVME, "host and nvme": HOST_AND_NVME, "host and nvme, not kept": HOST_AND_NVME | {"residency": "none"}, "auto": {}}
SPARE = [0, 2048, 10_000, 40_000, 2**26]  # bytes above the least budget
configs = st.fixed_dictionaries(
    {
        "place": st.sampled_from(sorted(PLACES)),
        "host_spare": st.sampled_from(SPARE),
        "device_spare": st.sampled_from(SPARE),
        "chunk_mib": st.sampled_from([1 / 512, 1 / 256, None]),
        "update": st.sampled_from(["auto", "deferred", "backward"]),
        "compression": st.sampled_from(["auto", "off", "on"]),
        "activation_tier": st.sampled_from(["auto", "host", "nvme"]),
        "max_grad_norm": st.sampled_from([None, None, 0.05, math.inf]),
        "accumulation_steps": st.sampled_from([1, 1, 2, 3]),
    }
)
setups = st.fixed_dictionaries(
    {"kind": st.sampled_from(["AdamW", "Adam"]), "dtype": st.sampled_from(["fp32", "fp32", "bf16"]), "two_groups": st.booleans()}
)
micro_batches = st.tuples(st.integers(0, 99), st.integers(1, 4), st.booleans())
LAYERS = ["first", "up", "down", "maybe", "last"]


class Uneven(nn.Module):
    """Five linear layers of different sizes. A call may leave out one of them, which then gets no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.up, self.down = nn.Linear(7, 33), nn.Linear(33, 48), nn.Linear(48, 33, bias=False)
        self.maybe, self.last = nn.Linear(33, 33), nn.Linear(33, 5)

    def inner(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x, with_maybe):
        x = torch.tanh(self.first(x))
        x = x + checkpoint(self.inner, x)
        if with_maybe:
            x = x + torch.tanh(self.maybe(x))
        return self.last(x)


def output_of(model, batch):
    seed, rows, with_maybe = batch
    x = torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed))
    return model(x.to(next(model.parameters()).dtype), with_maybe)


def loss_of(model, batch):
    return output_of(model, batch).float().square().mean()


def groups_of(model):
    params = list(model.parameters())
    return [{"params": params[::2], "weight_decay": 0.05}, {"params": params[1::2], "lr": 3e-3}]


@contextlib.contextmanager
def within_limits(swap, how, host_spare, device_spare):
    """Same as `training`. The budgets are the least ones, which the engine's refusals name, and so many bytes more."""
    limits, spare = {"host_memory": 1024, "device_memory": 1024}, {"host_memory": host_spare, "device_memory": device_spare}
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            try:
                made = stack.enter_context(training(Uneven, swap, **how, **limits))
                break
            except infinity.BudgetError as error:
                field, nbytes = re.search(r"(host_memory|device_memory).*needs (\d+) bytes", str(error)).groups()
                limits[field] = int(nbytes) + spare[field]
        else:
            raise AssertionError(f"the engine refuses the budgets that it names: {limits}")
        yield made


class Twin:
    """A plain model, its optimizer, and the sums of the gradients since the last step."""

    def __init__(self, kind, dtype, two_groups):
        options = {"decoupled": kind == "AdamW", "weight_decay": 0.01}
        self.model, self.reference = plain(Uneven, dtype=dtype, groups=groups_of if two_groups else None, options=options)
        self.sums = {}

    def backward(self, loss):
        loss.backward()
        for param in self.model.parameters():
            if param.grad is not None:
                self.sums[param] = param.grad.float() if param not in self.sums else self.sums[param] + param.grad.float()
                param.grad = None

    def norm(self):
        return torch.linalg.vector_norm(torch.stack([gradient.double().norm() for gradient in self.sums.values()])).item()

    @torch.no_grad()
    def step(self, factor):
        for group in self.reference.param_groups:
            for param in group["params"]:
                if param in self.sums:
                    self.reference._update(param, self.reference.state[param], group, factor, self.sums[param])
        self.sums = {}

    @torch.no_grad()
    def change(self, name, factor):
        """Multiply a parameter. A changed element is also the new value of the master."""
        param = self.model.get_parameter(name)
        param.mul_(factor)
        state = self.reference.state[param]
        same = param == self.reference.rounded(param, state["master"])
        state["master"] = torch.where(same, state["master"], param.float()).detach().clone()

    def saved(self):
        weights = [param.detach().clone() for param in self.model.parameters()]
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.reference.param_groups]
        states = [copy.deepcopy(self.reference.state[param]) for param in self.model.parameters()]
        return weights, copy.deepcopy(groups), states

    @torch.no_grad()
    def load(self, saved):
        weights, groups, states = copy.deepcopy(saved)
        for param, weight, state in zip(self.model.parameters(), weights, states, strict=True):
            param.copy_(weight)
            self.reference.state[param] = state
        for group, values in zip(self.reference.param_groups, groups, strict=True):
            group.update(values)
        self.sums = {}


class Program(stateful.RuleBasedStateMachine):
    """A training program on an engine, beside its twin."""

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.stack.enter_context(no_hang(300))
        self.running = contextlib.ExitStack()  # the engine
        self.saved = self.saving = self.graphs = None

    @initialize(setup=setups, config=configs)
    def begin(self, setup, config):
        self.setup = setup
        self.twin = Twin(**setup)
        self.start(config)

    def start(self, config):
        """Make an engine in an empty swap directory."""
        swap = self.folder / "swap"
        swap.mkdir(exist_ok=True)
        options = {name: config[name] for name in ("max_grad_norm", "accumulation_steps")} | {"weight_decay": 0.01}
        how = {name: config[name] for name in ("chunk_mib", "compression", "activation_tier", "update")} | PLACES[config["place"]]
        if config["max_grad_norm"] is not None and config["update"] == "backward":
            how["update"] = "deferred"
        self.is_late = how["update"] == "deferred" or config["max_grad_norm"] is not None  # no update begins before step()
        self.accumulation_steps, self.max_grad_norm = config["accumulation_steps"], config["max_grad_norm"]
        how |= {"optimizer": getattr(infinity, self.setup["kind"]), "groups": groups_of if self.setup["two_groups"] else None}
        how |= {"options": options, "dtype": self.setup["dtype"], "verbose": False}
        self.running.enter_context(nothing_left(swap))
        made = within_limits(swap, how, config["host_spare"], config["device_spare"])
        self.model, self.engine, self.optimizer = self.running.enter_context(made)
        for name, param in self.twin.model.named_parameters():  # an engine that takes over has the same frozen parameters
            self.model.get_parameter(name).requires_grad_(param.requires_grad)
        self.forget_passes()

    def forget_passes(self):
        """The step has no gradients, and those of the last step are cleared."""
        self.num_passes, self.has_no_sync, self.was_last, self.is_cleared = 0, False, False, True

    @property
    def may_have_updated(self):
        """Whether updates may have begun with the gradients of a step that has not come."""
        return self.was_last and not self.is_late

    def makes(self, call):
        """Whether the engine makes a call that needs weights of one step. Once updates have begun in backward, the engine may refuse."""
        if not self.may_have_updated:
            call()
            return True
        try:
            call()
        except infinity.UsageError as error:
            assert "begun to update" in str(error)
            return False
        return True

    @property
    def may_pass(self):
        """Whether another backward pass may follow in this step."""
        most = MOST_PASSES if self.has_no_sync else self.accumulation_steps
        return self.num_passes < most and not self.may_have_updated

    # Passes.

    @precondition(lambda self: self.graphs is None and self.may_pass)
    @rule(batch=micro_batches)
    def forward(self, batch):
        losses = loss_of(self.model, batch), loss_of(self.twin.model, batch)
        assert_same_bits(losses[0].detach(), losses[1].detach(), "loss")
        self.graphs = losses if losses[1].requires_grad else None

    @precondition(lambda self: self.graphs is not None)
    @rule(more_come=st.booleans())
    def backward(self, more_come):
        ours, theirs = self.graphs
        self.graphs = None
        if not self.is_cleared:
            with pytest.raises(infinity.UsageError, match="gradients of the last step"):
                ours.backward()
            return
        more_come = more_come and self.accumulation_steps > 1
        with infinity.no_sync(self.model) if more_come else contextlib.nullcontext():
            ours.backward()
        del ours
        self.twin.backward(theirs)
        self.num_passes += 1
        self.has_no_sync |= more_come
        self.was_last |= not more_come and (self.has_no_sync or self.num_passes == self.accumulation_steps)

    @precondition(lambda self: self.graphs is None and self.may_pass)
    @rule(batch=micro_batches, more_come=st.booleans())
    def forward_and_backward(self, batch, more_come):
        self.forward(batch)
        if self.graphs is not None:
            self.backward(more_come)

    @precondition(lambda self: self.graphs is not None)
    @rule()
    def drop_the_graph(self):
        self.graphs = None

    @precondition(lambda self: self.graphs is None and self.num_passes == self.accumulation_steps and self.is_late and not self.has_no_sync)
    @rule(batch=micro_batches)
    def one_pass_too_many(self, batch):
        """The engine refuses the pass. The gradients of the passes before stay."""
        loss = loss_of(self.model, batch)
        if loss.requires_grad:
            with pytest.raises(infinity.UsageError, match="accumulation_steps"):
                loss.backward()

    @rule(batch=micro_batches)
    def evaluate(self, batch):
        outputs = []
        with torch.no_grad():
            if self.makes(lambda: outputs.append(output_of(self.model, batch))):
                assert_same_bits(outputs[0], output_of(self.twin.model, batch), "output")

    @precondition(lambda self: self.graphs is None and not self.may_have_updated)
    @rule(batch=micro_batches)
    def forward_without_backward(self, batch):
        assert_same_bits(loss_of(self.model, batch).detach(), loss_of(self.twin.model, batch).detach(), "loss")

    # Steps.

    @precondition(lambda self: self.graphs is None and self.num_passes)
    @rule(clears=st.booleans())
    def step(self, clears):
        self.optimizer.step()
        factor = 1.0
        if self.max_grad_norm is not None:
            assert self.optimizer.grad_norm == pytest.approx(self.twin.norm(), rel=1e-6)
            factor = min(1.0, self.max_grad_norm / (self.optimizer.grad_norm + 1e-6))
        self.twin.step(factor)
        self.forget_passes()
        self.is_cleared = False
        if clears:
            self.zero_grad()

    @precondition(lambda self: self.graphs is None and not self.num_passes)
    @rule(batch=micro_batches, num_steps=st.integers(1, 4))
    def train(self, batch, num_steps):
        """Whole steps, so that the engine's plan comes into use."""
        for _ in range(num_steps):
            self.zero_grad()
            while self.may_pass and any(param.requires_grad for param in self.twin.model.parameters()):
                self.forward_and_backward(batch, False)
                if not self.num_passes:  # no trained layer runs with this batch
                    return
            if self.num_passes:
                self.step(True)

    @precondition(lambda self: self.graphs is None and not self.num_passes)
    @rule()
    def step_without_gradients(self):
        with pytest.raises(infinity.UsageError, match="without a finished backward pass"):
            self.optimizer.step()

    @rule()
    def zero_grad(self):
        """Drop the gradients, or make the step if the engine refuses because updates have begun. So the next rules do not depend on threads."""
        if self.makes(self.optimizer.zero_grad):
            self.twin.sums = {}
            self.forget_passes()
        else:
            self.step(True)

    @precondition(lambda self: not self.may_have_updated)
    @rule(index=st.integers(0, 1), lr=st.sampled_from([1e-4, 3e-3, 1e-2]), decay=st.sampled_from([0.0, 0.1]))
    def change_the_learning_rate(self, index, lr, decay):
        for optimizer in (self.optimizer, self.twin.reference):
            optimizer.param_groups[index % len(optimizer.param_groups)].update(lr=lr, weight_decay=decay)

    @precondition(lambda self: self.graphs is None)
    @rule(layer=st.sampled_from(LAYERS), trains=st.booleans())
    def freeze_or_thaw(self, layer, trains):
        for model in (self.model, self.twin.model):
            model.get_submodule(layer).requires_grad_(trains)

    # Values.

    @rule(layer=st.sampled_from(LAYERS))
    def read_a_layer(self, layer):
        found = {}

        def read():
            with infinity.gathered(self.model.get_submodule(layer).parameters()):
                found.update((name, param.detach().clone()) for name, param in self.model.get_submodule(layer).named_parameters())

        if self.makes(read):
            for name, value in found.items():
                assert_same_bits(value, self.twin.model.get_parameter(f"{layer}.{name}").detach(), f"{layer}.{name}")

    @precondition(lambda self: self.graphs is None)
    @rule(layer=st.sampled_from(LAYERS), factor=st.sampled_from([0.5, 1.25, -1.0]))
    def change_a_weight(self, layer, factor):
        def change():
            weight = self.model.get_submodule(layer).weight
            with torch.no_grad(), infinity.gathered(weight):
                weight.mul_(factor)

        if self.makes(change):
            self.twin.change(f"{layer}.weight", factor)

    @rule()
    def read_all_weights(self):
        found = {}
        if self.makes(lambda: found.update(self.model.state_dict())):
            assert list(found) == list(self.twin.model.state_dict())
            for name, value in self.twin.model.state_dict().items():
                assert_same_bits(found[name], value, name)

    @precondition(lambda self: self.graphs is None and not self.num_passes)
    @rule()
    def compare_all_states(self):
        assert_equals_reference(self.engine, self.model, self.twin.model, self.twin.reference)

    @rule()
    def flush(self):
        self.engine.flush()

    # Checkpoints.

    @precondition(lambda self: self.graphs is None)
    @rule(wait=st.booleans())
    def save(self, wait):
        save = functools.partial(infinity.save, self.folder / "checkpoint", self.model, self.optimizer)
        if self.num_passes:
            with pytest.raises(infinity.UsageError):
                save()
            return
        self.saving = save(wait=wait)
        self.saved = self.twin.saved()

    def end_saving(self):
        if self.saving is not None:
            self.saving.wait()
        self.saving = None

    @precondition(lambda self: self.graphs is None and self.saved is not None)
    @rule()
    def load(self):
        self.end_saving()
        infinity.load(self.folder / "checkpoint", self.model, self.optimizer)
        self.twin.load(self.saved)
        self.forget_passes()

    @precondition(lambda self: self.graphs is None and self.saved is not None)
    @rule(config=configs)
    def resume_on_another_engine(self, config):
        """Close the engine, also between backward() and step(), and load the checkpoint into an engine with other settings."""
        self.end_saving()
        self.running.close()
        self.start(config)
        self.load()

    # Checks.

    @invariant()
    def the_engine_keeps_its_limits(self):
        if self.graphs is None and hasattr(self, "engine"):
            assert_nothing_held(self.engine)
            stats = self.engine.stats()
            assert stats["pinned_host_nbytes"] <= self.engine.config.host_memory
            assert stats["peak_device_nbytes"] <= self.engine.config.device_memory

    def teardown(self):
        try:
            self.graphs = None
            self.end_saving()
            if sys.exc_info()[1] is None and hasattr(self, "engine") and not self.num_passes:
                self.compare_all_states()
        finally:
            try:
                self.running.close()  # asserts that the swap directory and the engine's threads are gone
            finally:
                self.stack.close()


def run(num_programs, num_calls):
    checks = list(hypothesis.HealthCheck)
    how = hypothesis.settings(deadline=None, derandomize=True, database=None, suppress_health_check=checks, print_blob=False)
    stateful.run_state_machine_as_test(Program, settings=hypothesis.settings(how, max_examples=num_programs, stateful_step_count=num_calls))


def test_a_random_program_has_the_bits_of_plain_pytorch():
    run(6, 15)


@pytest.mark.long
def test_many_random_programs_have_the_bits_of_plain_pytorch():
    run(400, 40)
