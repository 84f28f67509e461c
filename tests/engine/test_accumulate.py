"""infinity.accumulate: the losses and weights of the ordinary loop. Each weight is read once in forward and once in backward.

test_accumulate_models.py has the classes of transformers and diffusers. This file is long because each case at a border between segments
needs a small model of its own.
"""

import contextlib
import dataclasses
import gc
import itertools
import re
import signal
import threading
import typing
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from support.accumulation import (
    PLACES,
    SIZES,
    Boxed,
    Changing,
    Odd,
    Stashing,
    assert_as_the_ordinary_loop,
    changing,
    loss_of,
    one_step,
    run,
    scaled,
    tokens,
)
from support.helpers import (
    NVME,
    assert_nothing_held,
    assert_same_states,
    least_device_memory,
    least_host_memory,
    on_gpu,
    states_of,
    training,
)
from support.models import Block, Chain
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import infinity
from infinity.engine.autograd.trees import flatten
from infinity.engine.layerwise import layerwise_step
from infinity.engine.layerwise.state_conflicts import AttributeConflicts
from infinity.engine.memory.device_memory import DeviceBudget
from infinity.errors import BudgetError
from infinity.optim.loss_scale import LossScale
from infinity.plan.record import GRADIENTS
from infinity.plan.slots import HostState
from infinity.system.arena import Arena
from infinity.system.lanes import Lane
from infinity.tiers import activations
from infinity.tiers.gradient_adder import GradientAdder
from infinity.tiers.gradients import Gradients
from infinity.tiers.saved_storage import StorageState

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = pytest.mark.long
WAYS = [("fp32", "backward"), ("fp32", "deferred"), ("bf16", "backward"), ("bf16", "deferred"), ("fp16", "deferred")]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("n", [pytest.param(2, marks=LONG), 3, pytest.param(5, marks=LONG), pytest.param(16, marks=LONG)])
@pytest.mark.parametrize("dtype, update", WAYS)
def test_losses_and_states_are_those_of_the_ordinary_loop(update, dtype, n, tmp_path):
    config = scaled(dtype)
    assert_as_the_ordinary_loop(tmp_path, dtype=dtype, update=update, n=n, **NVME, **config)


@pytest.mark.parametrize("options", [pytest.param({}, marks=LONG), {"max_grad_norm": 0.1}], ids=["", "clipping"])
def test_sixteen_micro_batches_have_the_bits_of_the_ordinary_loop(options, tmp_path):
    assert_as_the_ordinary_loop(tmp_path, make=Odd, dtype="bf16", n=16, num_steps=2, options=options, **NVME)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_placement_has_the_bits_of_the_ordinary_loop(dtype, places, tmp_path):
    assert_as_the_ordinary_loop(tmp_path, dtype=dtype, **PLACES[places])


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("places", ["nvme", "device"])
def test_clipping_is_that_of_the_ordinary_loop(places, dtype, tmp_path):
    options = {"max_grad_norm": 0.1} | ({"loss_scale": LossScale(initial=256.0)} if dtype == "fp16" else {})
    assert_as_the_ordinary_loop(tmp_path, dtype=dtype, options=options, **PLACES[places])


@pytest.mark.slow
def test_a_step_that_overflows_is_skipped_as_in_the_ordinary_loop(tmp_path):
    options = {"loss_scale": LossScale(initial=2.0**40)}
    assert_as_the_ordinary_loop(tmp_path, dtype="fp16", options=options, num_steps=2, **NVME)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("places", ["nvme", pytest.param("device", marks=LONG)])
@pytest.mark.parametrize("dtype, update", WAYS)
def test_values_between_blocks_may_be_used_anywhere(update, places, dtype, tmp_path):
    assert_as_the_ordinary_loop(tmp_path, make=Odd, dtype=dtype, update=update, **PLACES[places], **scaled(dtype))


class Measured(Chain):
    """Reads the outputs of earlier blocks without a graph, between blocks."""

    def forward(self, x):
        x = first = self.first(x)
        for block in self.blocks:
            x = block(x)
            with torch.no_grad():
                size = first.norm() + x.norm()
            x = x + first / size
        return self.last(x)


@pytest.mark.slow
def test_code_between_blocks_may_build_no_graph(tmp_path):
    assert_as_the_ordinary_loop(tmp_path, make=Measured, **NVME)


class Noting(Block):
    def forward(self, state, found, *, by_name):
        state["x"] = super().forward(state["x"])
        found.append(state["x"].mean())
        by_name["inner"][len(found)] = state.pop("last", None)
        state["last"] = state["x"].square()


class Filling(Chain):
    """Blocks return nothing. They fill the lists and dicts that they are given."""

    def __init__(self):
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(Noting(32) for _ in range(4))

    def forward(self, x):
        state, found, by_name = {"x": self.first(x)}, [], {"inner": {}}
        for block in self.blocks:
            block(state, found, by_name=by_name)
        assert by_name["inner"].pop(1) is None
        return self.last(state["x"] + sum(by_name["inner"].values())) + sum(found)


@pytest.mark.slow
def test_blocks_may_fill_containers_that_they_are_given(tmp_path):
    assert_as_the_ordinary_loop(tmp_path, make=Filling, **NVME)


class Skipping(Chain):
    """Micro-batches of few rows take fewer blocks."""

    def forward(self, x):
        rows, x = len(x), self.first(x)
        for number, block in enumerate(self.blocks):
            if rows > 2 or number % 2 == 0:
                x = block(x)
        return self.last(x)


@pytest.mark.few(2)
@pytest.mark.parametrize("chunk_mib", [1 / 512, 1 / 32])  # a segment is one block, or several
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_micro_batches_may_call_different_blocks(update, n, chunk_mib, tmp_path):
    make = lambda: Skipping(num_blocks=7)
    assert_as_the_ordinary_loop(tmp_path, make=make, n=n, update=update, chunk_mib=chunk_mib, **NVME)


class Normed(nn.Module):
    """Batch norms count their forward passes."""

    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.blocks, self.head = nn.Sequential(block(), block(), block()), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.blocks(x))


def rows(step, n=3):
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(4, 16, generator=generator), torch.randint(4, (4,), generator=generator)) for _ in range(n)]


def loss_of_rows(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def test_each_buffer_is_written_once_per_micro_batch(tmp_path):
    assert_as_the_ordinary_loop(tmp_path, make=Normed, batches=rows, loss=loss_of_rows, **NVME)


class Centred(Block):
    """Uses statistics of earlier passes, and writes them: one in place, the other by a new tensor."""

    def __init__(self, hidden):
        super().__init__(hidden)
        self.register_buffer("mean", torch.zeros(hidden))
        self.register_buffer("size", torch.ones(()))
        self.mix = nn.utils.parametrizations.spectral_norm(nn.Linear(hidden, hidden))

    def forward(self, x):
        output = super().forward(torch.tanh(self.mix(x - self.mean)) / self.size)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            self.size = 0.9 * self.size + 0.1 * x.square().mean().sqrt()
        return output


@pytest.mark.slow
def test_a_block_that_runs_again_finds_the_buffers_of_its_first_run(tmp_path):
    def make():
        model = Chain(num_blocks=0)
        model.blocks = nn.ModuleList(Centred(32) for _ in range(3))
        return model

    assert_as_the_ordinary_loop(tmp_path, make=make, **NVME)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("n", [2, 6])
def test_weights_are_read_as_often_as_for_one_micro_batch(n, tmp_path):
    make = lambda: Chain(hidden=64, num_blocks=12)
    batches = lambda step, n: tokens(step, 1) * n
    config = NVME | {"dtype": "bf16", "chunk_mib": 1 / 64, "make": make, "batches": batches, "num_steps": 4}
    *_, once = run(tmp_path, False, n=1, **config | {"options": {"accumulation_steps": 1}})
    config["options"] = {"accumulation_steps": 2}
    *_, found = run(tmp_path, True, n=n, **config)
    assert found <= 1.02 * once, found / once


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("make", [Chain, Odd])
def test_every_number_of_micro_batches_has_the_same_plan(make, tmp_path):
    with training(make, tmp_path, options={"accumulation_steps": 2}, **NVME) as (model, engine, optimizer):
        for step, n in enumerate((2, 5, 3, 2, 4)):
            infinity.accumulate(model, tokens(step, n), loss_of)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                late = engine.stats()["num_prefetch_misses"]
        assert engine.stats()["num_prefetch_plans"] == 1
        assert engine.stats()["num_prefetch_misses"] == late


@pytest.mark.long
def test_the_number_of_micro_batches_and_the_kind_of_step_may_change(tmp_path):
    order = [(True, 2), (True, 5), (False, 3), (True, 3), (False, 3), (True, 1)]
    found = []
    for by_layer in (True, False):
        losses = []
        with training(Odd, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
            for step, (layered, n) in enumerate(order):
                if by_layer:
                    losses += one_step(model, tokens(step, n), loss_of, layered)
                else:
                    batches = tokens(step, n)
                    with contextlib.ExitStack() as stack:
                        optimizer.accumulation_steps = n
                        losses += one_step(model, batches, loss_of, False)
                        stack.callback(setattr, optimizer, "accumulation_steps", 3)
                        optimizer.step()
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                optimizer.zero_grad()
            found.append((losses, states_of(engine, model)))
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])


@pytest.mark.long
@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("make", [Chain, Odd])
def test_the_least_memory_is_enough(make, update, tmp_path):
    """With this memory, a segment's weights are not held for all micro-batches, and sums of gradients have no room on the device."""
    config = NVME | {"dtype": "bf16", "update": update}
    device = least_device_memory(make, tmp_path, **config, options={"accumulation_steps": 2})
    host = least_host_memory(make, tmp_path, **config, options={"accumulation_steps": 2})
    expected = run(tmp_path, False, make=make, **config)
    for budgets in ({"device_memory": device, "host_memory": host}, {"device_memory": 2 * device}, {"device_memory": 5 * device}):
        with training(make, tmp_path, options={"accumulation_steps": 3}, **config | budgets) as (model, engine, optimizer):
            losses = []
            for step in range(3):
                losses += one_step(model, tokens(step), loss_of, True)
                optimizer.step()
                optimizer.zero_grad()
            assert losses == expected[0]
            assert_same_states(states_of(engine, model), expected[1])
            assert engine.stats()["peak_device_nbytes"] <= budgets["device_memory"]


def test_tensors_of_a_block_are_freed_before_the_next_block_begins(tmp_path):
    with training(Chain, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        made, alive = [], []
        for block in model.blocks:
            block.up.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
            block.register_forward_pre_hook(lambda module, args: alive.append(sum(output() is not None for output in made)))
        infinity.accumulate(model, tokens(0), loss_of)
        optimizer.step()
        assert len(made) == 2 * 3 * 5 and max(alive) == 0


def test_a_segment_is_one_block_even_if_a_chunk_holds_several(tmp_path):
    make = lambda: Chain(hidden=384, num_blocks=4)  # blocks of 2.3 MiB
    options = {"accumulation_steps": 2}
    with training(make, tmp_path, options=options, chunk_mib=8, host_memory="512MiB", **NVME) as (model, engine, optimizer):
        engine.start()
        assert len(engine.registry.chunks) < 4
        came = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: came.append(threading.current_thread().name[-1]))
        infinity.accumulate(model, tokens(0, 2), loss_of)
        optimizer.step()
        assert "".join(came[:7]) == "0101010"


def test_updates_begin_while_earlier_segments_run_backward(tmp_path):
    with training(Chain, tmp_path, options={"accumulation_steps": 3}, update="backward", **NVME) as (model, engine, optimizer):
        early = []
        model.blocks[0].register_forward_pre_hook(lambda *_: early.append(sum(chunk.update.is_early for chunk in engine.registry.chunks)))
        for _ in range(2):
            infinity.accumulate(model, tokens(0), loss_of)
            optimizer.step()
            optimizer.zero_grad()
        assert early[:3] == early[6:9] == [0, 0, 0]
        assert all(found > len(engine.registry.chunks) / 2 for found in (*early[3:6], *early[9:]))


# ---- dropout ----


class Dropping(Chain):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(32), nn.Dropout(0.5)) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_dropout_repeats_in_the_second_forward_and_differs_by_micro_batch(tmp_path):
    with training(Dropping, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        seen = {}
        for index, block in enumerate(model.blocks):
            block[1].register_forward_pre_hook(lambda module, args, i=index: seen.setdefault(i, []).append(bytes(torch.get_rng_state())))
        batches = tokens(0, 1) * 3
        infinity.accumulate(model, batches, loss_of)
        optimizer.step()
        for states in seen.values():
            assert sorted(Counter(states).values()) == [2, 2, 2]


def checkpointing(base, *, use_reentrant):
    """Returns a class of models that checkpoint their own blocks."""

    class Checkpointing(base):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)
            return self.last(x)

    return Checkpointing


@pytest.mark.few(1)
@pytest.mark.parametrize("wraps", [False, True])
def test_gradients_use_the_dropout_masks_of_the_forward_pass(wraps, tmp_path):
    """The reference runs each micro-batch alone with the same random state. If wraps, the program checkpoints the blocks."""

    make = checkpointing(Dropping, use_reentrant=False) if wraps else Dropping
    states, found = [], []

    def noting(model, batch):
        states.append(torch.get_rng_state())
        return loss_of(model, batch)

    with training(make, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        losses = infinity.accumulate(model, tokens(0), noting)
        optimizer.step()
        found.append(([loss.item() for loss in losses], states_of(engine, model)))

    def restoring(model, batch):
        torch.set_rng_state(states.pop(0))
        return loss_of(model, batch)

    with training(make, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        losses = one_step(model, tokens(0), restoring, False)
        optimizer.step()
        found.append((losses, states_of(engine, model)))
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])


@pytest.mark.slow
def test_random_draws_depend_on_neither_placement_nor_segments(tmp_path):
    expected = run(tmp_path, True, make=Dropping, **NVME)
    for places in (PLACES["device"], NVME | {"chunk_mib": 1 / 32}, NVME | {"device_memory": "1MiB"}):
        losses, states, *_ = run(tmp_path, True, make=Dropping, **places)
        assert losses == expected[0]
        assert_same_states(states, expected[1])


def test_the_random_state_changes_only_if_the_model_draws(tmp_path):
    with training(Chain, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        before = torch.get_rng_state()
        infinity.accumulate(model, tokens(0), loss_of)
        assert torch.equal(torch.get_rng_state(), before)
        optimizer.step()
    with training(Dropping, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        infinity.accumulate(model, tokens(0), loss_of)
        assert not torch.equal(torch.get_rng_state(), before)
        optimizer.step()


# ---- checkpoints, activations, compiled blocks ----


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_blocks_that_the_program_checkpoints_are_not_checkpointed_again(use_reentrant, tmp_path):
    make = checkpointing(Chain, use_reentrant=use_reentrant)
    assert_as_the_ordinary_loop(tmp_path, make=make, **NVME)
    with training(make, tmp_path, options={"accumulation_steps": 2}, **NVME) as (model, engine, optimizer):
        calls = []
        model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(None))
        infinity.accumulate(model, tokens(0, 2), loss_of)
        optimizer.step()
        assert len(calls) == 4


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("activations", ["host", "nvme"])
@pytest.mark.parametrize("make", [Chain, Odd])
def test_activations_may_leave_the_device(make, activations, tmp_path, monkeypatch):
    monkeypatch.setattr("infinity.tiers.activations.MIN_NBYTES", 64)
    assert_as_the_ordinary_loop(tmp_path, make=make, activation_tier=activations, **NVME)
    with training(make, tmp_path, options={"accumulation_steps": 3}, activation_tier=activations, **NVME) as (model, engine, optimizer):
        infinity.accumulate(model, tokens(0), loss_of)
        optimizer.step()
        assert engine.stats()["activation_offload"]["moved_nbytes"] > 0


@pytest.mark.slow
def test_compiled_blocks_are_cut_like_others(tmp_path):
    def make():
        model = Chain(num_blocks=3)
        for block in model.blocks[:2]:
            block.compile(backend="eager")
        model.blocks[2] = torch.compile(model.blocks[2], backend="eager")
        return model

    assert_as_the_ordinary_loop(tmp_path, make=make, **NVME)


# ---- failures ----


def test_an_exception_in_a_loss_leaves_the_engine_usable(tmp_path):
    def failing(model, batch):
        value = loss_of(model, batch)
        if len(batch[0]) == SIZES[1]:
            raise ZeroDivisionError
        return value

    expected = run(tmp_path, True, num_steps=1, **NVME)
    with training(Chain, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        before = threading.active_count()
        with pytest.raises(ZeroDivisionError):
            infinity.accumulate(model, tokens(0), failing)
        assert threading.active_count() <= before + 1
        with pytest.raises(infinity.UsageError, match="zero_grad"):
            optimizer.step()
        optimizer.zero_grad()
        assert_nothing_held(engine)
        losses = [value.item() for value in infinity.accumulate(model, tokens(0), loss_of)]
        optimizer.step()
        assert losses == expected[0]
        assert_same_states(states_of(engine, model), expected[1])
        assert "_call_impl" not in vars(model.blocks[0])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["first", "blocks.2", "last"])
def test_an_exception_in_a_block_leaves_the_engine_usable(place, tmp_path):
    expected = run(tmp_path, True, num_steps=1, **NVME)
    with training(Chain, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        calls = []

        def fail(module, args, output):
            calls.append(None)
            if len(calls) == 2:
                raise ZeroDivisionError

        handle = model.get_submodule(place).register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            infinity.accumulate(model, tokens(0), loss_of)
        handle.remove()
        optimizer.zero_grad()
        assert_nothing_held(engine)
        assert [value.item() for value in infinity.accumulate(model, tokens(0), loss_of)] == expected[0]
        optimizer.step()
        assert_same_states(states_of(engine, model), expected[1])


class Crowding(Block):
    """A block on a device that has room for `room` block inputs. Autograd keeps four such tensors of a block that is not checkpointed."""

    room: typing.ClassVar[int] = 12
    kept: typing.ClassVar[list[StorageWeakRef]] = []

    def forward(self, x):
        up = self.up(normed := self.norm(x))
        output = x + self.down(middle := F.gelu(up))
        self.kept[:] = [each for each in self.kept if not each.expired()]
        if len(self.kept) >= self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.kept.extend(StorageWeakRef(each.untyped_storage()) for each in (x, normed, up, middle))
        return output


class Crowded(Chain):
    def __init__(self):
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(Crowding(32) for _ in range(5))


@dataclasses.dataclass
class Record:
    value: torch.Tensor


def test_flatten_keeps_no_reference_to_the_first_containers():
    given = {"a": [torch.zeros(1)], "b": Record(torch.ones(1))}
    refs = [weakref.ref(x) for x in (given["a"][0], given["b"].value, given["b"])]
    flat, build = flatten(given)
    del given, flat
    assert [ref() for ref in refs] == [None, None, None]
    made = build([torch.ones(1), torch.zeros(1)])
    assert made == {"a": [torch.ones(1)], "b": Record(torch.zeros(1))}


def away(engine):
    """Bytes of block inputs that have left the device."""
    return (engine.stats()["activation_offload"] or {}).get("moved_nbytes", 0)


def three_steps(model, engine, optimizer, loss=loss_of, batches=tokens):
    """Yields the losses of each step."""
    for step in range(3):
        losses = [value.item() for value in infinity.accumulate(model, batches(step), loss)]
        optimizer.step()
        optimizer.zero_grad()
        engine.flush()
        assert_nothing_held(engine)
        yield losses


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("place", ["device", "auto"])
def test_micro_batches_without_room_run_one_after_the_other(place, update, tmp_path, monkeypatch, capfd):
    """With "auto", tensors below MIN_NBYTES stay on the device. So the device is full again."""
    looks = []
    monkeypatch.setattr(Crowding, "room", 8)
    monkeypatch.setattr(layerwise_step, "AttributeConflicts", lambda model: looks.append(model) or AttributeConflicts(model))
    config = {"activation_tier": place, "options": {"accumulation_steps": 3}, "update": update}
    expected = run(tmp_path, False, update=update, **NVME)
    with pytest.raises(torch.OutOfMemoryError):  # the whole graph of one micro-batch does not fit
        run(tmp_path, False, make=Crowded, update=update, **NVME)
    Crowding.kept.clear()
    calls = []
    with training(Crowded, tmp_path, **config, **NVME) as (model, engine, optimizer):
        assert sum(three_steps(model, engine, optimizer, counting(loss_of, calls)), []) == expected[0]
        assert_same_states(states_of(engine, model), expected[1])
        reasons = [f"the device has no room for {num} micro-batches in a layer-wise step" for num in (3, 2)]
        assert engine.stats()["layerwise_unsplit_reasons"] == reasons
    num_tries = 1 + (place == "auto")
    assert len(calls) == 3 * num_tries + 2 + 3 * 3  # of three micro-batches the third had no room, of two the second
    assert len(looks) == num_tries + 2  # the engine looks for conflicts until one step has completed all forward passes
    said = capfd.readouterr().err
    assert said.count("Config(activation_tier='host')") == 2 and said.count("rounds of 2") == said.count("one after the other") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        {"update": "backward", "dtype": "fp32"},
        {"update": "backward", "dtype": "bf16"},
        {"update": "deferred", "dtype": "bf16", "options": {"max_grad_norm": 0.1}},
        {"update": "deferred", "dtype": "fp16"},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
@pytest.mark.parametrize("num", [3, 5, 8])
def test_micro_batches_without_room_run_in_rounds(num, how, tmp_path):
    """The device has room for the block inputs of two micro-batches. Weights are read once per round and pass."""
    config = how | NVME
    for plain, crowded in ((Chain, Crowded), (lambda: tied(Chain()), lambda: tied(Crowded()))):
        losses, states, _, nbytes = run(tmp_path, False, make=plain, n=num, **config)
        calls = []
        found = run(tmp_path, True, make=crowded, n=num, loss=counting(loss_of, calls), activation_tier="device", **config)
        assert found[0] == losses
        assert_same_states(found[1], states)
        assert found[3] < nbytes
        assert len(calls) > 3 * num


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update, dtype", [("backward", "fp32"), ("deferred", "bf16"), ("deferred", "fp16")])
def test_block_inputs_without_room_on_the_device_go_to_host_memory(dtype, update, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(activations, "MIN_NBYTES", 1)
    expected = run(tmp_path, False, update=update, dtype=dtype, **NVME)
    calls, config = [], {"options": {"accumulation_steps": 3}, "update": update, "dtype": dtype}
    with training(Crowded, tmp_path, **config, **NVME) as (model, engine, optimizer):
        losses, moved = [], [0]
        for each in three_steps(model, engine, optimizer, counting(loss_of, calls)):
            losses += each
            moved.append(away(engine))
        assert losses == expected[0]
        assert_same_states(states_of(engine, model), expected[1])
        assert moved[0] < moved[1] < moved[2] < moved[3] and engine.stats()["layerwise_unsplit_reasons"] == []
        infinity.accumulate(model, tokens(3, 2), loss_of)  # the device has room for two
        assert away(engine) == moved[3] and not engine.activations.is_on
    assert len(calls) == 3 + 3 * 3  # one forward pass had no room
    told = r"no room for the block inputs of \d+ micro-batches: they go to host memory, which has [\d.]+ MiB for them"
    assert re.findall(told, capfd.readouterr().err)


def leave_room(monkeypatch, num):
    """All block inputs may leave the device. Host memory has room for num of them."""
    monkeypatch.setattr(activations, "MIN_NBYTES", 1)
    begin = activations.Activations.__init__

    def with_little(self, arena, swap, device, budget_nbytes, **options):
        begin(self, arena, swap, device, num * 4096, **options)

    monkeypatch.setattr(activations.Activations, "__init__", with_little)


def tied(model):
    model.last.weight = model.first.weight
    return model


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("num_in_host_memory", [4, 7, 12])
def test_block_inputs_without_room_in_host_memory_stay_on_the_device(num_in_host_memory, tmp_path, monkeypatch):
    """There are fifteen block inputs, and the gradients of a tied embedding. Freed host memory is used again."""
    leave_room(monkeypatch, num_in_host_memory)
    for plain, crowded in ((Chain, Crowded), (lambda: tied(Chain()), lambda: tied(Crowded()))):
        expected = run(tmp_path, False, make=plain, **NVME)
        with training(crowded, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
            assert sum(three_steps(model, engine, optimizer), []) == expected[0]
            assert_same_states(states_of(engine, model), expected[1])
            assert away(engine) and engine.stats()["layerwise_unsplit_reasons"] == []
            assert engine.activations.store.heap.peak_nbytes == num_in_host_memory * 4096


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_zero_grad_after_a_failed_step_frees_saved_block_inputs(where, tmp_path, monkeypatch):
    leave_room(monkeypatch, 4)

    def fail(gradient):
        raise ZeroDivisionError

    config = {"options": {"accumulation_steps": 3}, "update": "deferred"} | NVME
    expected = run(tmp_path, False, update="deferred", **NVME)
    with training(Crowded, tmp_path, **config) as (model, engine, optimizer):
        steps = three_steps(model, engine, optimizer)
        losses = next(steps)
        begin = threading.active_count()
        fails = (lambda module, args, output: output.register_hook(fail) and None) if where == "backward" else lambda *_: fail(None)
        handle = model.blocks[3].register_forward_hook(fails)
        with pytest.raises(ZeroDivisionError):
            infinity.accumulate(model, tokens(1), loss_of)
        handle.remove()
        assert threading.active_count() <= begin and engine.activations._staying
        gc.collect()
        optimizer.zero_grad()
        assert engine.activations.store.storages == engine.activations._staying == {}
        assert sum(steps, losses) == expected[0]
        assert_same_states(states_of(engine, model), expected[1])


def test_block_inputs_leave_the_device_if_the_configuration_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "MIN_NBYTES", 1)
    calls, config = [], {"activation_tier": "host", "options": {"accumulation_steps": 3}}
    with training(Crowded, tmp_path, **config, **NVME) as (model, engine, optimizer):
        infinity.accumulate(model, tokens(0), counting(loss_of, calls))
        optimizer.step()
        assert len(calls) == 3 and engine.stats()["layerwise_unsplit_reasons"] == []


@pytest.mark.slow
def test_saved_inputs_are_on_the_device_before_a_micro_batch_needs_them(tmp_path, monkeypatch):
    """In backward, layers run in reverse order, and micro-batches run through each layer in forward order."""
    monkeypatch.setattr(activations, "MIN_NBYTES", 1)
    late, restore = [], activations.Activations.restore

    def restored(self, saved):
        if saved.stored.original() is None and saved.stored.state is not StorageState.HOME:
            late.append(saved.stored.number)
        return restore(self, saved)

    monkeypatch.setattr(activations.Activations, "restore", restored)
    assert_as_the_ordinary_loop(tmp_path, activation_tier="host", n=6, num_steps=2, **NVME)
    late.clear()
    run(tmp_path, True, activation_tier="host", n=6, num_steps=2, **NVME)
    assert late == []


def test_activation_tier_host_without_room_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "MIN_NBYTES", 1)
    with training(Crowded, tmp_path, activation_tier="host", options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        engine.activations.store.heap.budget_nbytes = 0
        with pytest.raises(BudgetError, match="does not fit into the host_memory left"):
            infinity.accumulate(model, tokens(0), loss_of)
        assert engine.stats()["layerwise_unsplit_reasons"] == []


@pytest.mark.slow
def test_a_waiting_gradient_without_room_in_host_memory_stays_on_device(tmp_path, monkeypatch):
    refused, save = [], activations.Activations.save

    def refuse_gradients(self, tensor):
        if tensor.grad_fn is None and tensor.shape == (50, 32):
            refused.append(tensor)
            raise BudgetError("no room")
        return save(self, tensor)

    monkeypatch.setattr(activations.Activations, "save", refuse_gradients)
    assert_as_the_ordinary_loop(tmp_path, make=Odd, activation_tier="host", **NVME)
    assert refused


@pytest.mark.slow
def test_host_memory_without_room_for_block_inputs_is_given_back(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(activations, "MIN_NBYTES", 1)
    least = activations.Activations.__init__

    def with_little(self, arena, swap, device, budget_nbytes, **options):
        least(self, arena, swap, device, 2 * 4096, **options)

    monkeypatch.setattr(Crowding, "room", 8)
    monkeypatch.setattr(activations.Activations, "__init__", with_little)
    expected = run(tmp_path, False, **NVME)
    with training(Crowded, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        before, losses = engine.arena.nbytes, []
        for each in three_steps(model, engine, optimizer):
            losses += each
            assert engine.arena.nbytes == before and engine.activations.store.heap.peak_nbytes == 2 * 4096
        assert losses == expected[0]
        assert_same_states(states_of(engine, model), expected[1])
        reasons = [f"the device has no room for {num} micro-batches in a layer-wise step" for num in (3, 2)]
        assert engine.stats()["layerwise_unsplit_reasons"] == reasons
    said = capfd.readouterr().err
    assert "8.0 KiB for them" in said and said.count("one after the other") == 1


def test_an_interrupt_as_the_activation_lanes_start_leaves_no_thread(tmp_path, monkeypatch):
    class Interrupted(Lane):
        def __init__(self, name, *args):
            super().__init__(name, *args)
            if name == "activations":
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(activations, "Lane", Interrupted)
    with training(Crowded, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        with pytest.raises(KeyboardInterrupt):
            infinity.accumulate(model, tokens(0), loss_of)
    assert not [thread for thread in threading.enumerate() if "activations" in thread.name]


def test_an_interrupt_while_host_memory_is_given_back_loses_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "MIN_NBYTES", 1)
    give_back = Arena.give_back

    def interrupted(self, region):
        signal.raise_signal(signal.SIGINT)
        give_back(self, region)

    with training(Crowded, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        before = engine.stats()["pinned_host_nbytes"]
        infinity.accumulate(model, tokens(0), loss_of)
        assert engine.arena.nbytes == before + engine.activations.store.heap.nbytes > before
        monkeypatch.setattr(Arena, "give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.activations.shrink()
        assert engine.arena.nbytes == before and engine.activations.store.heap.nbytes == 0
        optimizer.step()


def full_once(make, place, number=0):
    """Returns make for a model that fills the device once: at the end of call `number` (from 0) of the submodule `place`."""

    def made():
        model, calls = make(), itertools.count()

        def fail(*_):
            if next(calls) == number:
                raise torch.OutOfMemoryError("CUDA out of memory")

        model.get_submodule(place).register_forward_hook(fail)
        return model

    return made


def centred():
    model = Chain()
    model.blocks[1], model.blocks[3] = Centred(32), Centred(32)
    return model


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("number", [1, 3, 5, 6])
def test_a_full_device_in_a_later_round_begins_the_step_anew(number, tmp_path):
    """In the first round, and in forward of the second, the step begins anew with the first buffers. In the last backward pass, which has
    begun to update, a full device is an error."""
    losses, states, buffers, _ = run(tmp_path, False, make=centred, n=4, num_steps=1, **NVME)
    options = {"accumulation_steps": 4}
    with training(full_once(centred, "blocks.2.up", number), tmp_path, activation_tier="device", options=options, **NVME) as (model, engine, optimizer):
        engine.cycle.layerwise_limits.most = 2
        if number == 6:
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as found:
                infinity.accumulate(model, tokens(0, 4), loss_of)
            assert "has 2 micro-batches on the device" in found.value.__notes__[0]
            return
        assert [value.item() for value in infinity.accumulate(model, tokens(0, 4), loss_of)] == losses
        optimizer.step()
        assert_same_states(states_of(engine, model), states)
        assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
        assert engine.cycle.layerwise_limits.most == 1


@pytest.mark.few(1)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ZeroDivisionError])
def test_a_checkpoint_that_raises_keeps_the_programs_saved_tensor_hooks(error, tmp_path):
    """Torch before 2.13 removes the hooks when the frame of the checkpoint ends, in whichever thread that happens."""

    def loss(model, batch):
        loss = loss_of(model, batch)
        if not raised and batch[0] is batches[1][0]:
            raised.append(error("CUDA out of memory"))
            torch.utils.checkpoint.checkpoint(raise_it, loss, use_reentrant=False)
        return loss

    def raise_it(_):
        raise raised[0]

    batches, raised, packed = tokens(0), [], []
    with training(Chain, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
            with pytest.raises(ZeroDivisionError) if error is ZeroDivisionError else contextlib.nullcontext():
                infinity.accumulate(model, batches, loss)
            raised.clear()
            gc.collect()
            packed.clear()
            torch.ones(2, requires_grad=True).square()
            assert packed
        optimizer.step() if error is torch.OutOfMemoryError else optimizer.zero_grad()


class WritingTwice(Block):
    """Checkpoints itself. Both runs write to a buffer."""

    gradient_checkpointing = True

    def __init__(self, hidden):
        super().__init__(hidden)
        self.register_buffer("mean", torch.zeros(hidden))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.run, x, use_reentrant=False)

    def run(self, x):
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x)


@pytest.mark.slow
def test_buffers_written_in_backward_are_no_conflict_between_rounds(tmp_path):
    def make():
        model = Chain(num_blocks=0)
        model.blocks = nn.ModuleList(WritingTwice(32) for _ in range(4))
        return model

    losses, states, *_ = run(tmp_path, False, make=make, n=4, num_steps=1, **NVME)
    with training(make, tmp_path, options={"accumulation_steps": 4}, **NVME) as (model, engine, optimizer):
        engine.cycle.layerwise_limits.most = 2
        assert [value.item() for value in infinity.accumulate(model, tokens(0, 4), loss_of)] == losses
        optimizer.step()
        assert_same_states(states_of(engine, model), states)
        assert engine.stats()["layerwise_unsplit_reasons"] == []


class ChangingSingle(Block):
    def forward(self, x):
        return super().forward(x.mul_(2) if len(x) == 1 else x)


@pytest.mark.slow
def test_a_place_that_cannot_be_cut_is_found_in_a_later_round(tmp_path):
    def make():
        model = Chain()
        model.blocks[3] = ChangingSingle(32)
        return model

    def batches(step, n):
        found = tokens(step, n)
        return [*found[:-1], tuple(each[:1] for each in found[-1])]

    expected = run(tmp_path, False, make=make, batches=batches, n=4, num_steps=1, **NVME)
    with training(make, tmp_path, options={"accumulation_steps": 4}, **NVME) as (model, engine, optimizer):
        engine.cycle.layerwise_limits.most = 2
        assert [value.item() for value in infinity.accumulate(model, batches(0, 4), loss_of)] == expected[0]
        optimizer.step()
        assert_same_states(states_of(engine, model), expected[1])
        (reason,) = engine.stats()["layerwise_unsplit_reasons"]
        assert "changes its inputs in place" in reason


class ChangingNormed(Chain):
    """A block changes its input in place. The step finds this in the round in which the device has no room."""

    def __init__(self):
        super().__init__()
        self.norm, self.blocks[4] = nn.BatchNorm1d(7), Changing(32)

    def segments(self):
        first, *rest = super().segments()
        return [first, self.norm, *rest]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make, place, batches, loss",
    [(Normed, "blocks.0.2", rows, loss_of_rows), (ChangingNormed, "last", tokens, loss_of)],
    ids=["a block counts", "found in that turn"],
)
def test_each_buffer_is_written_once_even_if_the_device_is_full(make, place, batches, loss, tmp_path):
    losses, states, buffers, _ = run(tmp_path, True, make=full_once(make, place), batches=batches, loss=loss, **NVME)
    expected_losses, expected_states, expected_buffers, _ = run(tmp_path, False, make=make, batches=batches, loss=loss, **NVME)
    assert losses == expected_losses
    assert_same_states(states, expected_states)
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected_buffers.items())


@pytest.mark.slow
def test_the_first_step_with_room_finds_the_module_that_prevents_cutting(tmp_path):
    make, config = lambda: Stashing("number"), {"update": "deferred"} | NVME
    expected = run(tmp_path, False, make=make, n=2, num_steps=1, **config)
    with training(full_once(make, "first"), tmp_path, options={"accumulation_steps": 2}, **config) as (model, engine, optimizer):
        infinity.accumulate(model, tokens(0, 3), loss_of)
        optimizer.zero_grad()
        losses = [value.item() for value in infinity.accumulate(model, tokens(0, 2), loss_of)]
        optimizer.step()
        assert losses == expected[0]
        assert_same_states(states_of(engine, model), expected[1])


@pytest.mark.slow
def test_a_model_that_turns_out_uncut_keeps_activations_on_the_device(tmp_path, monkeypatch):
    """Host memory has room for some block inputs, but not for a whole graph."""
    monkeypatch.setattr(activations, "MIN_NBYTES", 1)
    make, config = lambda: Stashing("number"), {"options": {"accumulation_steps": 3}, "host_memory": 512 << 10} | NVME
    expected = run(tmp_path, False, make=make, **NVME)
    with training(full_once(make, "first"), tmp_path, **config) as (model, engine, optimizer):
        losses = []
        for step in range(3):
            losses += [value.item() for value in infinity.accumulate(model, tokens(step), loss_of)]
            optimizer.step()
            optimizer.zero_grad()
        assert losses == expected[0] and away(engine) == 0
        assert_same_states(states_of(engine, model), expected[1])
        (reason,) = engine.stats()["layerwise_unsplit_reasons"]
        assert "another value for each micro-batch" in reason


def test_a_full_device_in_backward_is_an_error_that_names_a_remedy(tmp_path):
    def fail(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with training(Chain, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as found:
            infinity.accumulate(model, tokens(0), loss_of)
        assert ["Config(activation_tier='host')" in note for note in found.value.__notes__] == [True]


@pytest.mark.few(1)
@pytest.mark.parametrize("num_in_host_memory", [4, 100])
def test_a_full_device_in_backward_advises_nvme_if_host_memory_is_full(num_in_host_memory, tmp_path, monkeypatch):
    leave_room(monkeypatch, num_in_host_memory)

    def fail(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with training(Crowded, tmp_path, options={"accumulation_steps": 3}, update="deferred", **NVME) as (model, engine, optimizer):
        infinity.accumulate(model, tokens(0), loss_of)
        optimizer.step()
        optimizer.zero_grad()
        model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with pytest.raises(torch.OutOfMemoryError) as found:
            infinity.accumulate(model, tokens(1), loss_of)
        notes = getattr(found.value, "__notes__", [])
        assert ["Config(activation_tier='nvme')" in note for note in notes] == [True] * (num_in_host_memory == 4)
        assert engine.stats()["layerwise_unsplit_reasons"] == []


def test_no_remedy_is_named_if_the_device_keeps_no_block_inputs(tmp_path, capfd):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    config = {"options": {"accumulation_steps": 3}, "activation_tier": "host"} | NVME
    with training(full_once(Chain, "blocks.2"), tmp_path, **config) as (model, engine, optimizer):
        infinity.accumulate(model, tokens(0), loss_of)
        optimizer.step()
        optimizer.zero_grad()
        model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with pytest.raises(torch.OutOfMemoryError) as found:
            infinity.accumulate(model, tokens(0, 2), loss_of)
        assert not hasattr(found.value, "__notes__")
    assert "layer-wise step: they run in rounds of 2\n" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("place", ["blocks.3", "blocks.3.up"])
@pytest.mark.parametrize("calls_before", [1, 2, 4, 6])
def test_an_interrupt_ends_all_threads(calls_before, place, tmp_path):
    """In a forward pass, and in one that runs again in backward. Before a block, and inside a block."""
    expected = run(tmp_path, True, num_steps=1, update="deferred", **NVME)
    with training(Chain, tmp_path, options={"accumulation_steps": 3}, update="deferred", **NVME) as (model, engine, optimizer):
        calls = []

        def interrupt(module, args):
            calls.append(None)
            if len(calls) == calls_before:
                signal.raise_signal(signal.SIGINT)

        handle = model.get_submodule(place).register_forward_pre_hook(interrupt)
        before = threading.active_count()
        with pytest.raises(KeyboardInterrupt):
            infinity.accumulate(model, tokens(0), loss_of)
        assert threading.active_count() <= before + 1
        handle.remove()
        optimizer.zero_grad()
        assert_nothing_held(engine)
        assert [value.item() for value in infinity.accumulate(model, tokens(0), loss_of)] == expected[0]
        optimizer.step()
        assert_same_states(states_of(engine, model), expected[1])


def test_an_interrupt_at_the_end_restores_the_model(tmp_path):
    given_back = []

    class Switch:
        value = True

        @property
        def use_cache(self):
            return self.value

        @use_cache.setter
        def use_cache(self, value):
            self.value = value
            given_back.append(value)
            if value and given_back.count(True) == 1:
                signal.raise_signal(signal.SIGINT)

    with training(Chain, tmp_path, options={"accumulation_steps": 3}, update="deferred", **NVME) as (model, engine, optimizer):
        for block in model.blocks:
            block.config = Switch()
        with pytest.raises(KeyboardInterrupt):
            infinity.accumulate(model, tokens(0), loss_of)
        optimizer.zero_grad()
        assert all(block.config.use_cache and "_call_impl" not in vars(block) for block in model.blocks)


# ---- models that cannot be cut ----


def counting(loss, calls):
    def counted(model, batch):
        calls.append(len(batch[0]))
        return loss(model, batch)

    return counted


def assert_runs_as_one(directory, capfd, match, *, whole, make, most=3, **how):
    """Asserts the bits of the ordinary loop. The first step begins anew, and its reason is reported once. most: limit of additional calls
    of the loss."""
    expected_losses, expected_states, expected_buffers, _ = run(directory, False, make=make, **NVME, **how)
    capfd.readouterr()
    losses, calls = [], []
    options = {"accumulation_steps": 3} | how.pop("options", {})
    loss, batches = counting(how.pop("loss", loss_of), calls), how.pop("batches", tokens)
    with training(make, directory, options=options, **NVME, **how) as (model, engine, optimizer):
        for step in range(3):
            losses += one_step(model, batches(step, 3), loss, True)
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
            assert_nothing_held(engine)
        assert losses == expected_losses
        assert_same_states(states_of(engine, model), expected_states)
        assert all(torch.equal(buffer, expected_buffers[name]) for name, buffer in model.named_buffers())
        reasons = engine.stats()["layerwise_unsplit_reasons"]
        assert len(reasons) == 1 and match in reasons[0], reasons
        assert engine.cycle.layerwise_limits.whole is whole
        assert capfd.readouterr().err.count(reasons[0]) == 1
        assert 3 * 3 < len(calls) <= 3 * 3 + most  # with the calls before the step began anew


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("made_by", [0, 2])
def test_a_block_that_reads_a_hidden_tensor_joins_the_blocks_before_it(made_by, tmp_path, capfd):
    make = lambda: Boxed(made_by)
    assert_runs_as_one(tmp_path, capfd, "the part of the model after Looking reaches", whole=False, make=make)
    with training(make, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        came = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: came.append(threading.current_thread().name[-1]))
        for _ in range(2):
            came.clear()
            infinity.accumulate(model, tokens(0), loss_of)
            optimizer.step()
            optimizer.zero_grad()
        alone = max(made_by - 1, 0)  # blocks before those that run as one
        joined = 5 - alone
        assert "".join(came[: 3 * 5]) == "012" * alone + "0" * joined + "1" * joined + "2" * joined


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["tensor", "mask", "list", "number"])
def test_an_attribute_that_differs_by_micro_batch_prevents_cutting(kind, tmp_path, capfd):
    name = "found" if kind == "list" else "kept"
    assert_runs_as_one(tmp_path, capfd, f"Stashing.{name} has another value for each", whole=True, make=lambda: Stashing(kind))


class Averaging(Chain):
    """Centres each block's input by an average that all blocks write."""

    def __init__(self):
        super().__init__(num_blocks=3)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            x = block(x - self.mean)
        return self.last(x)


class Buffering(Block):
    """Keeps a tensor with a graph in a buffer."""

    def __init__(self, hidden):
        super().__init__(hidden)
        self.register_buffer("level", None, persistent=False)

    def forward(self, x):
        self.level = x.square().mean()
        return super().forward(x)


class Buffered(Chain):
    def __init__(self):
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(Buffering(32) for _ in range(3))

    def forward(self, x):
        return super().forward(x) * sum(block.level for block in self.blocks)


class Swapping(Chain):
    """Replaces a parameter of each block by another tensor during the call."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            name, param = next((name, param) for name, param in block.named_parameters() if param.dim() == 1)
            x = torch.func.functional_call(block, {name: 0.5 * param}, (x,))
        return self.last(x)


class SwappingOne(Chain):
    """Replaces a parameter of a block that begins no segment by another tensor during the call."""

    def forward(self, x):
        *others, block = self.blocks
        x = nn.Sequential(*others)(self.first(x))
        return self.last(torch.func.functional_call(block, {"up.weight": 2 * block.up.weight}, (x,)))


class Hooked(Chain):
    """Two parts of the model use one weight, which has a hook that is not linear."""

    def __init__(self):
        super().__init__(num_blocks=3)
        self.last.weight = self.first.weight
        self.first.weight.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "make, match",
    [
        (Averaging, "Averaging.mean is written in several parts"),
        (Buffered, "Buffering.level has another value for each"),
        (Swapping, "has another value for each"),
        (Hooked, "first.weight has a hook"),
    ],
)
def test_state_that_micro_batches_would_mix_up_prevents_cutting(make, match, tmp_path, capfd):
    assert_runs_as_one(tmp_path, capfd, match, whole=True, make=make)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("wraps", [lambda make: make, lambda make: full_once(make, "first")], ids=["", "no room"])
def test_a_replaced_parameter_inside_a_segment_has_the_bits_of_the_loop(wraps, tmp_path):
    losses, states, *_ = run(tmp_path, True, make=wraps(SwappingOne), chunk_mib=1 / 16, **NVME)
    expected_losses, expected_states, *_ = run(tmp_path, False, make=SwappingOne, chunk_mib=1 / 16, **NVME)
    assert losses == expected_losses
    assert_same_states(states, expected_states)


class Caching(Chain):
    """Keeps a table that the first call makes."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(32)
        x = self.first(x)
        for block in self.blocks:
            x = block(x) * self.table
        return self.last(x)


@pytest.mark.slow
def test_an_attribute_that_is_made_once_does_not_prevent_cutting(tmp_path, capfd):
    assert_as_the_ordinary_loop(tmp_path, make=Caching, **NVME)
    assert "infinity.accumulate" not in capfd.readouterr().err


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class WithFunction(Chain):
    """A custom function between blocks gets the output of the first layer."""

    def forward(self, x):
        x = first = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = x + Scaling.apply(first)
        return self.last(x)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_a_custom_function_between_blocks_joins_the_blocks_before_it(update, tmp_path, capfd):
    assert_runs_as_one(tmp_path, capfd, "reaches EmbeddingBackward0", whole=False, make=WithFunction, update=update)


class Turning(Chain):
    """Two passes through the blocks. In the second, a custom function gets the output of the first layer, or of the first pass if `between`."""

    def __init__(self, between):
        super().__init__()
        self.between = between

    def forward(self, x):
        x = first = self.first(x)
        for block in self.blocks:
            x = block(x)
        x, seen = self.blocks[0](x), x
        x = x + Scaling.apply(seen if self.between else first)
        for block in self.blocks[1:]:
            x = block(x)
        return self.last(x)


@pytest.mark.long
@pytest.mark.parametrize("between, match, most", [(False, "reaches EmbeddingBackward0", 3), (True, "reaches AddBackward0", 6)])
def test_a_model_that_cannot_be_cut_runs_as_in_the_ordinary_loop(between, match, most, tmp_path, capfd):
    assert_runs_as_one(tmp_path, capfd, match, whole=between, most=most, make=lambda: Turning(between))


def test_a_model_without_blocks_is_reported_as_one_segment(tmp_path, capfd):
    def make():
        return nn.Sequential(nn.Embedding(50, 32), Block(32), nn.Linear(32, 50))

    assert_as_the_ordinary_loop(tmp_path, make=make, **NVME)
    assert capfd.readouterr().err.count("the model has no list of modules") == 1


class ChangingBetween(Chain):
    def __init__(self, builds_graph):
        super().__init__()
        self.builds_graph = builds_graph

    def forward(self, x):
        first = self.first(x)
        x = 1.0 * first
        for block in self.blocks:
            x = block(x)
            with torch.set_grad_enabled(self.builds_graph):
                first.add_(1.0)
        return self.last(x + first)


class Adding(nn.Module):
    """The gradient of this block does not need the input."""

    def __init__(self, hidden):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        return x + self.bias


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make, match",
    [
        (changing, "Changing changes its inputs in place"),
        (lambda: ChangingBetween(True), "add_ changes its inputs in place"),
        (lambda: ChangingBetween(False), "add_ changes its inputs in place"),
    ],
    ids=["block", "between", "between without a graph"],
)
def test_an_input_that_is_changed_in_place_prevents_cutting(make, match, tmp_path, capfd):
    assert_runs_as_one(tmp_path, capfd, match, whole=True, make=make)


class Late(Chain):
    """The input of a block is changed after the block, in the same segment."""

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            given, x = x, block(x)
            if number == 3:
                given.mul_(2)
        return self.last(x)


@pytest.mark.slow
def test_an_input_that_is_changed_after_its_block_prevents_cutting(tmp_path, capfd):
    def make():
        model = Late(num_blocks=6)
        for number in (2, 3, 4, 5):
            model.blocks[number] = Adding(32)
        return model

    assert_runs_as_one(tmp_path, capfd, "is changed in place after", whole=True, make=make, chunk_mib=1 / 64)


class Drawing(Boxed):
    """Writes counters and statistics in the step that begins anew. The loss of the test empties the batch."""

    def __init__(self):
        super().__init__(0)
        self.begin, self.blocks[2] = nn.BatchNorm1d(7), nn.Sequential(Centred(32), nn.BatchNorm1d(7))

    def segments(self):
        first, *rest = super().segments()
        return [nn.Sequential(first, self.begin), *rest]


@pytest.mark.long
def test_a_step_that_begins_anew_finds_the_first_buffers_and_batches(tmp_path, capfd):
    def loss(model, batch):
        if isinstance(batch, list):
            batch = batch.pop(), batch.pop()
        return loss_of(model, batch)

    batches = lambda step, n: [list(reversed(batch)) for batch in tokens(step, n)]
    assert_as_the_ordinary_loop(tmp_path, make=Drawing, batches=batches, loss=loss, **NVME)
    assert capfd.readouterr().err.count("the part of the model after Looking reaches") == 1


@pytest.mark.slow
def test_a_step_that_begins_anew_draws_the_same_random_numbers(tmp_path):
    class DroppingBoxed(Boxed):
        def __init__(self):
            super().__init__(2)
            self.blocks[1] = nn.Sequential(Block(32), nn.Dropout(0.5))

    found = []
    for steps in (1, 2):
        with training(DroppingBoxed, tmp_path, options={"accumulation_steps": 3}, update="deferred", **NVME) as (model, engine, optimizer):
            if steps == 2:  # the first step finds the place that cannot be cut, and is dropped
                state = torch.get_rng_state()
                infinity.accumulate(model, tokens(0), loss_of)
                optimizer.zero_grad()
                torch.set_rng_state(state)
            losses = one_step(model, tokens(0), loss_of, True)
            optimizer.step()
            found.append((losses, torch.get_rng_state(), states_of(engine, model)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert_same_states(found[0][2], found[1][2])


@dataclasses.dataclass
class Stream:
    x: torch.Tensor
    inner: dict
    scale: float = 1.0
    found: torch.Tensor | None = None


class Recorded(Block):
    def forward(self, state):
        y = super().forward(state.scale * state.x) + state.inner["first"].x
        state.found = y.mean() if state.found is None else state.found + y.mean()
        return Stream(y, state.inner, state.scale, state.found)


class Records(Chain):
    """Blocks take dataclasses, return them, and fill them."""

    def __init__(self):
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(Recorded(32) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        state = Stream(x, {"first": Stream(x.tanh(), {})}, scale=0.5)
        found = []
        for block in self.blocks:
            given, state = state, block(state)
            found.append(given.found)
        return self.last(state.x) + sum(found)


@pytest.mark.slow
def test_blocks_may_take_and_fill_dataclasses(tmp_path, capfd):
    assert_as_the_ordinary_loop(tmp_path, make=Records, **NVME)
    assert "infinity.accumulate" not in capfd.readouterr().err  # no message: every block is cut


# ---- calls that are refused ----


def test_calls_that_cannot_begin_are_refused_with_a_reason(tmp_path):
    with pytest.raises(infinity.ConfigError, match="parameters of one engine"):
        infinity.accumulate(nn.Linear(2, 2), [1], loss_of)
    with pytest.raises(infinity.ConfigError, match="expected a torch.nn.Module"):
        infinity.accumulate(len, [1], loss_of)
    with training(Chain, tmp_path, dtype="bf16", update="deferred", **NVME) as (model, engine, optimizer):
        with pytest.raises(infinity.UsageError, match="accumulation_steps=2"):
            infinity.accumulate(model, tokens(0, 2), loss_of)
        with pytest.raises(infinity.ConfigError, match="no micro-batches"):
            infinity.accumulate(model, [], loss_of)
        for wrong, kind in ((None, "NoneType"), (3, "int"), ({"x": tokens(0, 1)}, "dict"), ("xy", "str")):
            with pytest.raises(infinity.ConfigError, match=f"micro_batches is a {kind}, expected a list"):
                infinity.accumulate(model, wrong, loss_of)
        for wrong, kind in ((None, "NoneType"), (torch.zeros(()), "Tensor")):
            with pytest.raises(infinity.ConfigError, match=f"loss is a {kind}, expected a function"):
                infinity.accumulate(model, tokens(0, 1), wrong)
        optimizer.zero_grad()
        infinity.accumulate(model, tokens(0, 1), loss_of)
        with pytest.raises(infinity.UsageError, match="brings all gradients of a step"):
            loss_of(model, tokens(0, 1)[0]).backward()
        with pytest.raises(infinity.UsageError, match="brings all gradients of a step"):
            infinity.accumulate(model, tokens(0, 1), loss_of)
        optimizer.zero_grad()


WRONG_LOSSES = {
    "a float": (lambda loss, optimizer: loss.item(), "a float, expected a tensor"),
    "nothing": (lambda loss, optimizer: None, "a NoneType, expected a tensor"),
    "a tuple": (lambda loss, optimizer: (loss, 1), "a tuple, expected a tensor"),
    "a vector": (lambda loss, optimizer: torch.stack([loss, loss]), r"shape \[2\], expected a scalar"),
    "integer": (lambda loss, optimizer: loss.long(), "torch.int64, expected a floating-point scalar"),
    "complex": (lambda loss, optimizer: loss * 1j, "torch.complex64, expected a floating-point scalar"),
    "no gradient": (lambda loss, optimizer: loss.detach(), "a tensor without a gradient"),
    "backward": (lambda loss, optimizer: loss.backward(), r"backward\(\) inside the loss function"),
    "backward twice": (lambda loss, optimizer: loss.backward(retain_graph=True) or loss, r"backward\(\) inside the loss function"),
    "step": (lambda loss, optimizer: optimizer.step() or loss, r"step\(\) inside the loss function"),
    "zero_grad": (lambda loss, optimizer: optimizer.zero_grad() or loss, r"zero_grad\(\) inside the loss function"),
}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("places", [NVME, {}], ids=["by layer", "on the device"])
def test_a_wrong_loss_is_refused_and_training_continues(places, tmp_path):
    with training(Chain, tmp_path / "expected", options={"accumulation_steps": 2}, update="deferred", **places) as (model, engine, optimizer):
        expected = [loss.item() for loss in infinity.accumulate(model, tokens(0, 2), loss_of)]
        optimizer.step()
        states = states_of(engine, model)
    with training(Chain, tmp_path / "wrong", options={"accumulation_steps": 2}, update="deferred", **places) as (model, engine, optimizer):
        for change, told in WRONG_LOSSES.values():
            with pytest.raises(infinity.UsageError, match=told):
                infinity.accumulate(model, tokens(0, 2), lambda model, batch: change(loss_of(model, batch), optimizer))
            optimizer.zero_grad()
        returned = []
        with pytest.raises(infinity.UsageError, match="for micro-batch 1, loss returned the loss of micro-batch 0 again"):
            infinity.accumulate(model, tokens(0, 2), lambda model, batch: returned.append(loss_of(model, batch)) or returned[0])
        returned.clear()
        optimizer.zero_grad()
        assert [loss.item() for loss in infinity.accumulate(model, tokens(0, 2), loss_of)] == expected
        optimizer.step()
        assert_same_states(states_of(engine, model), states)


def test_backward_inside_the_loss_is_refused_below_frozen_blocks(tmp_path):
    """No parameter of the last segment has a gradient. The engine finds the pass when the pass reaches the segment before."""

    def build():
        model = Chain()
        model.last.requires_grad_(False)
        model.blocks[-1].requires_grad_(False)
        return model

    with training(build, tmp_path, options={"accumulation_steps": 2}, update="deferred", **NVME) as (model, engine, optimizer):
        with pytest.raises(infinity.UsageError, match="inside the loss function"):
            infinity.accumulate(model, tokens(0, 2), lambda model, batch: loss_of(model, batch).backward())
        optimizer.zero_grad()


def test_accumulate_is_refused_inside_gathered_and_inside_itself(tmp_path):
    with training(Chain, tmp_path, options={"accumulation_steps": 2}, **NVME) as (model, engine, optimizer):
        with infinity.gathered(model.parameters()):
            with pytest.raises(infinity.UsageError, match="infinity.accumulate while the model runs or inside infinity.gathered"):
                infinity.accumulate(model, tokens(0, 2), loss_of)
        with pytest.raises(infinity.UsageError, match="infinity.accumulate inside .* another infinity.accumulate"):
            infinity.accumulate(model, tokens(0, 2), lambda model, batch: infinity.accumulate(model, [batch], loss_of)[0])
        optimizer.zero_grad()


@pytest.mark.slow
def test_an_evaluation_in_another_thread_is_refused(tmp_path):
    """The evaluation comes before a micro-batch calls the model, and after."""
    found = []

    def evaluate(model, batch):
        try:
            with torch.no_grad():
                found.append(model(batch[0]))
        except infinity.UsageError as error:
            found.append("another thread is in a forward or backward pass" in str(error))

    def loss(model, batch):
        for is_over in (False, True):
            value = loss_of(model, batch) if is_over else None
            beside = threading.Thread(target=evaluate, args=(model, batch))
            beside.start()
            beside.join()
        return value

    expected = run(tmp_path, False, num_steps=1, update="deferred", **NVME)
    with training(Chain, tmp_path, options={"accumulation_steps": 3}, update="deferred", **NVME) as (model, engine, optimizer):
        losses = [value.item() for value in infinity.accumulate(model, tokens(0), loss)]
        optimizer.step()
        assert found == [True] * 6
        assert losses == expected[0]
        assert_same_states(states_of(engine, model), expected[1])


@pytest.mark.slow
def test_an_evaluation_in_another_thread_that_came_first_is_kept(tmp_path):
    """The evaluation begins after accumulate has found the model idle, and still runs when the step begins."""
    goes_on, is_inside, found = threading.Event(), threading.Event(), []

    class Looked(Chain):
        """Another thread evaluates the model while accumulate looks for blocks."""

        evaluates = False

        def children(self):
            if self.evaluates:
                self.evaluates = False
                beside.start()
                assert is_inside.wait(60)
            return super().children()

    def wait(module, args):
        if threading.current_thread() is beside:
            is_inside.set()
            assert goes_on.wait(60)

    def evaluate():
        with torch.no_grad():
            found.append(model(tokens(0)[0][0]))

    beside = threading.Thread(target=evaluate)
    expected = run(tmp_path, True, make=Looked, num_steps=1, **NVME)
    with training(Looked, tmp_path, options={"accumulation_steps": 3}, **NVME) as (model, engine, optimizer):
        with torch.no_grad():
            output = model(tokens(0)[0][0])
        model.blocks[2].register_forward_pre_hook(wait)
        model.evaluates = True
        with pytest.raises(infinity.UsageError, match="infinity.accumulate is called while another thread is in a forward"):
            infinity.accumulate(model, tokens(0), loss_of)
        goes_on.set()
        beside.join()
        assert torch.equal(found[0], output)
        assert_nothing_held(engine)
        assert [value.item() for value in infinity.accumulate(model, tokens(0), loss_of)] == expected[0]
        optimizer.step()
        assert_same_states(states_of(engine, model), expected[1])


def test_a_loss_finds_the_thread_local_state_of_torch(tmp_path):
    seen = []

    def loss(model, batch):
        modes = [type(mode).__name__ for mode in torch.overrides._get_current_function_mode_stack()]
        seen.append((modes[0], torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return loss_of(model, batch)

    with training(Chain, tmp_path, options={"accumulation_steps": 2}, dtype="bf16", **NVME) as (model, engine, optimizer):
        with torch.device("cpu"), torch.autocast("cpu", torch.bfloat16):
            infinity.accumulate(model, tokens(0, 2), loss)
        assert torch.utils._device.CURRENT_DEVICE is None
        optimizer.step()
    assert seen == [("DeviceContext", True, torch.bfloat16)] * 2


@pytest.mark.slow
def test_a_traced_step_has_the_bits_of_the_ordinary_loop(tmp_path):
    assert_as_the_ordinary_loop(tmp_path, trace=True, **NVME)


@pytest.mark.long
def test_a_reference_model_may_run_inside_the_loss(tmp_path):
    """The program changes an attribute for the reference pass only, in the way in which programs turn adapters off."""

    class Switched(Chain):
        scale = 1.0

        def forward(self, x):
            return self.scale * super().forward(x)

    def loss(model, batch):
        with torch.no_grad():
            model.scale = 0.5
            reference = model(batch[0])
            model.scale = 1.0
        return loss_of(model, batch) + F.mse_loss(model(batch[0]), reference)

    assert_as_the_ordinary_loop(tmp_path, make=Switched, loss=loss, **NVME)


@on_gpu
@pytest.mark.parametrize("places", ["nvme", "device"])
@pytest.mark.parametrize("dtype, update", [("fp32", "backward"), ("bf16", "deferred"), ("bf16", "backward"), ("fp16", "deferred")])
def test_on_a_gpu_losses_and_states_are_those_of_the_ordinary_loop(dtype, update, places, deterministic, tmp_path):
    batches = lambda step, n: [(x.cuda(), y.cuda()) for x, y in tokens(step, n)]
    config = {"device": "cuda", "dtype": dtype, "update": update, "make": Odd, "batches": batches, "chunk_mib": 1 / 64}
    assert_as_the_ordinary_loop(tmp_path, **config, **PLACES[places])


@on_gpu
@pytest.mark.parametrize("num_in_host_memory", [4, 100])
@pytest.mark.parametrize("dtype, update", [("bf16", "deferred"), ("fp32", "backward")])
def test_on_a_gpu_rounds_have_the_bits_of_the_ordinary_loop(dtype, update, num_in_host_memory, deterministic, tmp_path, monkeypatch):
    batches = lambda step, n=5: [(x.cuda(), y.cuda()) for x, y in tokens(step, n)]
    config = {"device": "cuda", "dtype": dtype, "update": update, **NVME}
    losses, states, _, _ = run(tmp_path, False, make=lambda: tied(Chain()), batches=batches, n=5, **config)
    leave_room(monkeypatch, num_in_host_memory)
    make = full_once(lambda: tied(Chain()), "blocks.2.up")
    with training(make, tmp_path, options={"accumulation_steps": 5}, **config) as (model, engine, optimizer):
        engine.cycle.layerwise_limits.most = 2
        assert sum(three_steps(model, engine, optimizer, batches=batches), []) == losses
        assert_same_states(states_of(engine, model), states)
        assert away(engine) and engine.cycle.layerwise_limits.most == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("n, num_turns", [(2, 1), (5, 1), (5, 3)])
@pytest.mark.parametrize("make, dtype", [(Chain, "bf16"), (Odd, "fp32")])
def test_gradients_leave_the_device_once_per_round(make, dtype, n, num_turns, nothing_waits, tmp_path):
    with training(make, tmp_path, options={"accumulation_steps": 2}, dtype=dtype, **NVME) as (model, engine, optimizer):
        engine.cycle.layerwise_limits.most = -(-n // num_turns)
        for step in range(3):
            before = engine.stats()["links"]["d2h"]["nbytes"]
            infinity.accumulate(model, tokens(step, n), loss_of)
            optimizer.step()
            optimizer.zero_grad()
        trained = sum(chunk.record.numel for chunk in engine.registry.chunks if chunk.trainable and any(chunk.steps.values()))
        assert engine.stats()["links"]["d2h"]["nbytes"] - before == 4 * num_turns * trained
        assert engine.tier.held_nbytes == sum(span.nbytes for span in engine.registry.spans if span.allocated)


@pytest.fixture
def nothing_waits(monkeypatch):
    """Sums of gradients leave the device when they are complete."""
    monkeypatch.setattr(DeviceBudget, "sum_room", lambda *_, **__: (0, 0))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["auto", "deferred"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("n, num_turns", [(2, 1), (5, 1), (5, 3)])
def test_gradients_that_wait_on_the_device_leave_once_per_step(n, num_turns, clip, update, tmp_path):
    """After the first step the device has room for all sums. The memory of a sum is free after the update."""
    config = NVME | {"dtype": "bf16", "update": update, "options": {"accumulation_steps": n, "max_grad_norm": clip}}
    expected = run(tmp_path, False, n=n, **config)
    with training(Chain, tmp_path, **config) as (model, engine, optimizer):
        engine.cycle.layerwise_limits.most = -(-n // num_turns)
        losses, sent, waited = [], [], []
        for step in range(3):
            before = engine.stats()["links"]["d2h"]["nbytes"]
            losses += [loss.item() for loss in infinity.accumulate(model, tokens(step, n), loss_of)]
            waited.append(engine.tier.waiting_nbytes)
            optimizer.step()
            optimizer.zero_grad()
            for chunk in engine.registry.chunks:
                engine.updater.finish(chunk)
            sent.append(engine.stats()["links"]["d2h"]["nbytes"] - before)
            assert engine.tier.waiting_nbytes == 0
        trained = sum(chunk.record.numel for chunk in engine.registry.chunks if chunk.trainable and any(chunk.steps.values()))
        assert sent[1:] == [4 * trained] * 2
        assert waited[0] == 0 and (waited[2] >= 4 * trained if clip or update == "deferred" else True), (waited, trained)
        assert losses == expected[0]
        assert_same_states(states_of(engine, model), expected[1])


@pytest.mark.slow
def test_a_sum_that_left_the_device_adds_up_in_host_memory_in_its_round(nothing_waits, tmp_path):
    """Updates of the step before that are still announced make no difference. Ranks may differ in such updates."""
    config = NVME | {"dtype": "bf16", "update": "deferred", "options": {"accumulation_steps": 3}}
    host_memory = least_host_memory(Chain, tmp_path, **config)  # so the updates of the last layers wait
    with training(Chain, tmp_path, host_memory=host_memory, **config) as (model, engine, optimizer):
        budget, calls, sent = engine.tier.budget_nbytes, itertools.count(), []

        def leave_no_room(*_):
            engine.tier.budget_nbytes = 0 if next(calls) % 3 == 1 else budget

        model.last.register_forward_hook(leave_no_room)
        for step in range(3):
            before = engine.stats()["links"]["d2h"]["nbytes"]
            infinity.accumulate(model, tokens(step), loss_of)
            optimizer.step()
            optimizer.zero_grad()
            sent.append(engine.stats()["links"]["d2h"]["nbytes"] - before)
        assert sent == [sent[0]] * 3


def test_a_sum_whose_return_is_interrupted_is_not_kept_for_nvme(tmp_path, monkeypatch):
    config = NVME | {"update": "deferred", "options": {"accumulation_steps": 4}}
    host_memory = least_host_memory(Chain, tmp_path, **config)
    with training(Chain, tmp_path, host_memory=host_memory, **config) as (model, engine, optimizer):
        engine.cycle.layerwise_limits.most = 2
        comes_back = Gradients.stay_on_device

        def break_off(gradients, chunks):
            gradients.drain()
            with monkeypatch.context() as patch:
                if engine.registry.chunks[0] in chunks:  # chunk 0 left last: the sum is still in host memory
                    patch.setattr(GradientAdder, "put", interrupt)
                comes_back(gradients, chunks)

        def interrupt(*_, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(Gradients, "stay_on_device", break_off)
        with pytest.raises(KeyboardInterrupt):
            infinity.accumulate(model, tokens(0, 4), loss_of)
        optimizer.zero_grad()
        engine.records.flush()
        entries = [engine.records.caches[GRADIENTS].find(chunk) for chunk in engine.registry.chunks]
        assert not [entry.chunk.title for entry in entries if entry is not None and entry.state is HostState.DIRTY]
