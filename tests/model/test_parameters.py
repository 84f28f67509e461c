"""Unusual parameters, and changes of parameters, modules and hooks, give the bits of plain PyTorch or an error with a remedy.

test_hooks.py tests unusual models; this file tests unusual parameters and changes after the start. The file is long because each
kind and each change needs a small model.
"""

import contextlib
import copy
import re

import pytest
import torch
import torch.nn.functional as F
from support import helpers
from support.helpers import NVME, ReferenceAdamW, assert_equals_reference, assert_same_bits, plain, training
from support.models import TRAITS, H, Model, inputs, loss_of, mlp, tied_module
from support.parameters import PLACES, assert_alike
from support.ranks import World
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils import checkpoint as checkpointing

import infinity
from infinity.errors import ConfigError, UsageError
from infinity.model.parameters import owner_of

pytestmark = pytest.mark.usefixtures("one_thread")

LEAST = "the least"  # the least sufficient device memory


def output_loss(model, step):
    return loss_of(model(inputs(model, step)))


def one_step(model, optimizer, step=0, loss=output_loss):
    torch.manual_seed(step)
    value = loss(model, step)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def train_both(make, directory, *, steps=4, edit=None, loss=output_loss, device_memory=LEAST, dtype="fp32", groups=None, **config):
    """Train on NVMe and in plain PyTorch, with edit(model, step, gathered) before each step. Losses, states and gradients must be equal."""
    config = NVME | {"dtype": dtype, "groups": groups} | config
    if device_memory is LEAST:
        device_memory = helpers.least_device_memory(make, directory, **config)
    reference_model, reference = plain(make, dtype=dtype, groups=groups)
    with training(make, directory, device_memory=device_memory, **config) as (model, engine, optimizer):
        nothing = lambda params: contextlib.nullcontext()
        for step in range(steps):
            losses = []
            for m, o, gathered in ((reference_model, reference, nothing), (model, optimizer, infinity.gathered)):
                if edit is not None:
                    edit(m, step, gathered)
                losses.append(one_step(m, o, step, loss))
            assert_same_bits(losses[1], losses[0], f"loss of step {step}")
            helpers.assert_nothing_held(engine)
        assert_alike(engine, model, reference_model, reference)


# Kinds of parameters and buffers


def several_names():
    """One parameter with seven names: two attributes, a child's bias, two list items, two dict items."""

    def build(self):
        self.one = self.other = nn.Parameter(torch.randn(H))
        self.layer = nn.Linear(H, H)
        self.layer.bias = self.one
        self.listed = nn.ParameterList([self.one, self.one])
        self.named = nn.ParameterDict({"x": self.one, "y": self.other})

    return Model(build, lambda self, x: self.layer(x) * self.one + self.other * self.listed[1] + self.named["y"])


def lazy():
    """A forward pass before the engine initializes the lazy layers."""

    def build(self):
        self.net = nn.Sequential(nn.LazyLinear(2 * H), nn.LazyLinear(H))

    model = Model(build, lambda self, x: self.net(x))
    model(torch.ones(1, H))
    return model


def without_elements():
    def build(self):
        self.layer = nn.Linear(H, H)
        self.none, self.rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0))

    return Model(build, lambda self, x: self.layer(x) + self.none.sum() + self.rows.sum())


def integers():
    def build(self):
        self.layer = nn.Linear(H, H)
        self.order = nn.Parameter(torch.arange(H - 1, -1, -1), requires_grad=False)

    return Model(build, lambda self, x: self.layer(x)[:, self.order])


def complex_numbers():
    def build(self):
        self.layer = nn.Linear(H, H)
        self.phases = nn.Parameter(torch.randn(H, dtype=torch.complex64), requires_grad=False)

    return Model(build, lambda self, x: self.layer(x) * self.phases.abs())


def wide_buffers():
    """A buffer larger than many chunks, a non-persistent buffer that forward changes in place, and a buffer that is None."""

    def build(self):
        self.layer = nn.Linear(H, H)
        self.register_buffer("table", torch.randn(3000, H))
        self.register_buffer("mean", torch.ones(H), persistent=False)
        self.register_buffer("nothing", None)

    def run(self, x):
        y = self.layer(x)
        self.mean.mul_(0.5).add_(y.detach().mean(0))
        return y * self.mean + (y @ self.table.t()).mean()

    return Model(build, run)


class Prompt(nn.Module):
    """Returns its parameter."""

    def __init__(self, wrap):
        super().__init__()
        self.weight, self.wrap = nn.Parameter(torch.randn(H, H) / H), wrap

    def forward(self):
        return self.wrap(self.weight)


def returned(wrap, use):
    def build(self):
        self.prompt, self.layer = Prompt(wrap), nn.Linear(H, H)

    return lambda: Model(build, lambda self, x: self.layer(use(x, self.prompt())))


def returned_by_the_root():
    def build(self):
        self.weight = nn.Parameter(torch.randn(H, H) / H)
        self.layers = nn.Sequential(nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H))

    return Model(build, lambda self, x: (self.layers(x @ self.weight), self.weight, self.layers[0].bias))


def copied():
    """A layer and deep copies of layers, one of them a tied pair."""

    def build(self):
        self.first = nn.Linear(H, H)
        self.second, self.third = copy.deepcopy(self.first), copy.deepcopy(self.first)
        self.pair = nn.ModuleDict({"a": self.second, "b": nn.Linear(H, H)})
        self.pair["b"].weight = self.second.weight
        self.again = copy.deepcopy(self.pair)

    def run(self, x):
        for layer in (self.first, self.second, self.third, self.pair["b"], self.again["a"], self.again["b"]):
            x = torch.tanh(layer(x))
        return x

    return Model(build, run)


def half_frozen():
    model = mlp()
    model.layers[1].requires_grad_(False)
    model.layers[2].bias.requires_grad_(False)
    return model


def parametrized():
    model = mlp()
    parametrize.register_parametrization(model.layers[1], "weight", Skew())
    return model


def parametrized_and_cached():
    model = parametrized()
    run = model.run

    def cached(self, x):
        with parametrize.cached():
            return run(self, run(self, x))

    model.run = cached
    return model


def pruned():
    model = mlp()
    prune.l1_unstructured(model.layers[1], "weight", 0.5)
    return model


class Codebook(nn.Module):
    """A frozen parameter that forward changes: a moving average of the inputs."""

    def __init__(self):
        super().__init__()
        self.center = nn.Parameter(torch.randn(H), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.center.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * self.center.clone()


def codebook():
    def build(self):
        self.first, self.codebook, self.last = nn.Linear(H, H), Codebook(), nn.Linear(H, H)

    return Model(build, lambda self, x: self.last(self.codebook(torch.tanh(self.first(x)))))


def clamped():
    """The root changes a child's weight in every forward pass."""
    model = mlp()

    def run(self, x):
        with torch.no_grad():
            self.layers[1].weight.clamp_(-0.1, 0.1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    model.run = run
    return model


class Skew(nn.Module):
    def forward(self, weight):
        return weight.triu(1) - weight.triu(1).t()


KINDS = {
    "several_names": several_names,
    "lazy": lazy,
    "without_elements": without_elements,
    "integers": integers,
    "complex_numbers": complex_numbers,
    "wide_buffers": wide_buffers,
    "returned": returned(lambda w: w, lambda x, w: x @ w),
    "returned_in_a_tuple": returned(lambda w: (w, 1), lambda x, pair: x @ pair[0]),
    "returned_a_view": returned(lambda w: w.t()[:, :4], lambda x, w: F.pad(x @ w, (0, H - 4))),
    "returned_by_the_root": returned_by_the_root,
    "copied": copied,
    "half_frozen": half_frozen,
    "parametrized": parametrized,
    "parametrized_and_cached": parametrized_and_cached,
    "pruned": pruned,
    "codebook": codebook,
    "clamped": clamped,
}


def with_elements(model):
    return [p for p in model.parameters() if p.numel() and p.requires_grad]


@pytest.mark.slow
@pytest.mark.few(7)
@pytest.mark.parametrize("kind", KINDS)
def test_unusual_parameters_train_to_the_bits_of_plain_pytorch(kind, tmp_path):
    """Runs with the least device memory. Exception: the least size does not count a returned view that another op uses."""
    train_both(KINDS[kind], tmp_path, groups=with_elements, device_memory="auto" if kind == "returned_a_view" else LEAST)


@pytest.mark.few(2)
@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:1], lambda w: w.expand(2, H, H), lambda w: w.detach()])
def test_a_view_returned_by_a_module_outlives_later_ops(view, tmp_path):
    """The storage must stay while the caller holds the view."""

    def build(self):
        self.prompt, self.layers = Prompt(view), nn.ModuleList(nn.Linear(H, H) for _ in range(4))

    def run(self, x):
        weight = self.prompt()
        for layer in self.layers:
            x = layer(x)
        return x @ (weight.mean(0).mean() * torch.eye(H))

    train_both(lambda: Model(build, run), tmp_path, device_memory="24KiB")


@pytest.mark.parametrize("place", [{}, NVME])
def test_views_returned_by_an_evaluation_block_no_change_of_weights(place, tmp_path):
    """The program keeps the views between backward and step, during a save, and while other weights are loaded."""

    def build(self):
        self.layer, self.head = nn.Linear(H, H), nn.Linear(H, H)

    def run(self, x):
        return self.head(self.layer(x)), self.layer.weight.t(), self.layer.weight

    def evaluate(model):
        with torch.no_grad():
            return model(inputs(model, 0))

    reference_model, reference = plain(lambda: Model(build, run))
    with training(lambda: Model(build, run), tmp_path, update="deferred", **place) as (model, engine, optimizer):
        for step in range(3):
            for each, its_optimizer in ((reference_model, reference), (model, optimizer)):
                each(inputs(each, step))[0].square().mean().backward()
                kept = evaluate(each)
                its_optimizer.step()
                its_optimizer.zero_grad()
            kept = evaluate(model)
            infinity.save(tmp_path / "saved", model, optimizer)
            kept = evaluate(model)
            model.load_state_dict(model.state_dict())
            assert torch.equal(kept[1], reference_model.layer.weight.t())
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.parametrize("place", [{}, NVME, NVME | {"update": "deferred"}])
def test_a_step_inside_gathered_is_refused_and_works_after_it(place, tmp_path):
    reference_model, reference = plain(half_frozen)
    with training(half_frozen, tmp_path, **place) as (model, engine, optimizer):
        for _ in range(2):
            with infinity.gathered(model.parameters()):
                loss_of(model(inputs(model, 0))).backward()
                with pytest.raises(UsageError, match=r"^step\(\) while the model runs or inside infinity\.gathered: end that first$"):
                    optimizer.step()
            optimizer.step()
            loss_of(reference_model(inputs(reference_model, 0))).backward()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


def test_a_model_of_one_dtype_is_cast_and_mixed_dtypes_are_kept(tmp_path):
    """Config.dtype applies to a model of one dtype. Buffers always keep their dtypes."""

    def build(self):
        self.layer, self.norm = nn.Linear(H, H), nn.LayerNorm(H)
        self.register_buffer("scale", torch.ones(H))
        self.register_buffer("count", torch.tensor(0))

    def run(self, x):
        self.count += 1
        return self.norm(self.layer(x.bfloat16())) * self.scale

    def mixed():
        model = Model(build, run)
        model.layer.bfloat16()
        torch.nn.init.constant_(model.norm.weight, 1 / 3)
        return model

    def made_in_fp64():
        return Model(build, run).double()

    train_both(lambda: Model(build, run), tmp_path, dtype="bf16")
    with training(mixed, tmp_path, dtype="bf16") as (model, engine, optimizer):
        assert (model.layer.weight.dtype, model.norm.weight.dtype) == (torch.bfloat16, torch.float32)
        assert (model.scale.dtype, model.count.dtype) == (torch.float32, torch.int64)
        assert (engine.read_state(model.norm.weight)["weight"] == torch.tensor(1 / 3)).all()
    with training(made_in_fp64, tmp_path, dtype="bf16") as (model, engine, optimizer):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert (model.scale.dtype, model.count.dtype) == (torch.float64, torch.int64)
        one_step(model, optimizer)


def test_frozen_chunks_have_no_optimizer_states_and_are_never_written(tmp_path):
    with training(half_frozen, tmp_path, **NVME) as (model, engine, optimizer):
        frozen = [chunk for chunk in engine.registry.chunks if not chunk.trainable]
        assert frozen and all([segment.name for segment in chunk.record.segments] == ["weight"] for chunk in frozen)
        trained_nbytes = sum(chunk.record.nbytes for chunk in engine.registry.chunks if chunk.trainable)
        for step in range(3):
            engine.flush()
            before = engine.stats()["nvme_write_nbytes"]
            one_step(model, optimizer, step)
            engine.flush()
            assert engine.stats()["nvme_write_nbytes"] - before == trained_nbytes


def test_properties_of_a_parameter_stay_correct_while_it_is_away(tmp_path):
    reference_model, _ = plain(half_frozen)
    with training(half_frozen, tmp_path, **NVME) as (model, engine, optimizer):
        one_step(model, optimizer)
        for (name, p), (other, theirs) in zip(model.named_parameters(), reference_model.named_parameters(), strict=True):
            assert name == other
            for what in ("shape", "dtype", "device", "ndim", "nbytes", "requires_grad", "is_leaf"):
                assert getattr(p, what) == getattr(theirs, what), (name, what)
            assert p.numel() == theirs.numel() and p.element_size() == theirs.element_size() and len(p) == len(theirs)
            assert isinstance(p, nn.Parameter) and p.type() == p.data.type() == theirs.type() == torch.typename(p)
            assert p.grad is None or p.grad.type() == theirs.type()
        assert repr(model) == repr(reference_model)
        assert repr(nn.ParameterDict({"0": p})) == repr(nn.ParameterDict({"0": theirs}))


# Changes after the start


class Adapter(nn.Module):
    """Wraps a layer, reads the layer's weight, and has a parameter."""

    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.full((H,), 1 / 3))

    def forward(self, x):
        return self.base(x) + x * self.scale + x @ self.base.weight


def at(when, change):
    """Return an edit that runs before step `when`."""

    def edit(model, step, gathered):
        if step == when:
            torch.manual_seed(99)
            change(model)

    return edit


def tie(model):
    model.layers[3].weight = model.layers[0].weight


def replace_parameter(model):
    model.layers[1].weight = nn.Parameter(torch.ones(H, H) / H)


def register_parameter(model):
    run = model.run
    model.late = nn.Parameter(torch.full((H,), 2.0))
    model.run = lambda self, x: run(self, x) * self.late


def replace_module(model):
    model.layers[1] = nn.Linear(H, H)


def add_module(model):
    model.layers.append(nn.Linear(H, H))


def remove_module(model):
    del model.layers[1]


def wrap_module(model):
    model.layers[1] = Adapter(model.layers[1])


def swap_modules(model):
    model.layers[0], model.layers[2] = model.layers[2], model.layers[0]


def add_buffers(model):
    model.apply(lambda module: module.register_buffer("late", torch.ones(3)))


CHANGES = [tie, replace_parameter, register_parameter, replace_module, add_module, remove_module, wrap_module, swap_modules]


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("change", [*CHANGES, add_buffers], ids=lambda change: change.__name__)
def test_a_model_changed_after_the_start_trains_as_in_plain_pytorch(change, tmp_path):
    """Parameters outside the optimizer get gradients and are not updated."""
    train_both(mlp, tmp_path, edit=at(2, change), device_memory="auto")


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("chunk_mib", [1 / 512, 1])
@pytest.mark.parametrize("part", ["layers.0", "layers.1", "layers.1.bias"])
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_parameters_can_be_frozen_for_some_steps(update, part, chunk_mib, tmp_path):
    def edit(model, step, gathered):
        if step in (2, 4):
            found = [param for name, param in model.named_parameters() if name.startswith(part)]
            assert found
            for param in found:
                param.requires_grad_(step == 4)

    train_both(mlp, tmp_path, steps=6, edit=edit, update=update, chunk_mib=chunk_mib)


def test_a_tie_made_between_offload_and_the_optimizer_works(tmp_path):
    reference_model, _ = plain(mlp)
    tie(reference_model)
    reference = ReferenceAdamW(reference_model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    model = mlp()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, **NVME)) as engine:
        tie(model)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            assert_same_bits(one_step(model, optimizer, step), one_step(reference_model, reference, step), f"loss of step {step}")
        assert_equals_reference(engine, model, reference_model, reference)


def test_parameters_unfrozen_before_the_optimizer_are_trained(tmp_path):
    def edited():
        model = half_frozen()
        model.requires_grad_(True)
        return model

    reference_model, reference = plain(edited)
    torch.manual_seed(0)
    model = half_frozen()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, **NVME)) as engine:
        model.requires_grad_(True)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            assert_same_bits(one_step(model, optimizer, step), one_step(reference_model, reference, step), f"loss of step {step}")
        assert_equals_reference(engine, model, reference_model, reference)


def test_parametrizations_can_be_removed_after_the_start(tmp_path):
    remove = at(2, lambda model: parametrize.remove_parametrizations(model.layers[1], "weight", leave_parametrized=False))
    train_both(parametrized, tmp_path, edit=remove)


def test_weights_can_be_replaced_for_one_call(tmp_path):
    """torch.func.functional_call with the caller's tensors, and gradients of these tensors."""
    reference_model, _ = plain(mlp)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        found = []
        for m in (model, reference_model):
            given = {name: (torch.ones(p.shape) / H).requires_grad_() for name, p in m.named_parameters()}
            output = torch.func.functional_call(m, given, (inputs(m, 0),))
            found.append((output, *torch.autograd.grad(loss_of(output), list(given.values()))))
        for got, expected in zip(*found, strict=True):
            assert_same_bits(got.detach(), expected.detach(), "output or gradient")


def test_autograd_grad_gives_gradients_of_parameters(tmp_path):
    reference_model, _ = plain(mlp)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        got, expected = (torch.autograd.grad(output_loss(m, 0), list(m.parameters())) for m in (model, reference_model))
        for (name, _), ours, theirs in zip(model.named_parameters(), got, expected, strict=True):
            assert_same_bits(ours, theirs, name)
        optimizer.zero_grad()


# Values


def initialise(model):
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    nn.init.orthogonal_(model.layers[0].weight)
    nn.init.constant_(model.layers[1].bias, 0.25)
    model.layers[2].weight.data.mul_(0.5)
    with torch.no_grad():
        model.layers[3].weight[:, 3] = model.layers[0].weight[3] * 2


def reset(model):
    model.apply(lambda module: isinstance(module, nn.Linear) and module.reset_parameters())


def load(model):
    assert str(model.load_state_dict(mlp().state_dict())) == "<All keys matched successfully>"


def load_some(model):
    found = model.load_state_dict({"layers.1.weight": torch.eye(H), "more": torch.ones(1)}, strict=False)
    assert len(found.missing_keys) == 7 and found.unexpected_keys == ["more"]
    with pytest.raises(RuntimeError, match="size mismatch for layers.1.weight"):
        model.load_state_dict({"layers.1.weight": torch.eye(3)}, strict=False)


def interpolate(model):
    with torch.no_grad():
        torch._foreach_lerp_(list(model.parameters()), [torch.ones(p.shape) / H for p in model.parameters()], 0.1)


def prune_layer(model):
    prune.l1_unstructured(model.layers[1], "weight", 0.5)


def parametrize_layer(model):
    parametrize.register_parametrization(model.layers[1], "weight", Skew())


EDITS = [initialise, reset, load, load_some, interpolate, prune_layer, parametrize_layer]


@pytest.mark.few(3)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_gathered_parameters_are_changed_as_in_plain_pytorch(edit, tmp_path):
    def gathering(model, step, gathered):
        if step == 2:
            torch.manual_seed(99)
            with gathered(model.parameters()):
                edit(model)

    train_both(mlp, tmp_path, edit=gathering, device_memory="auto")


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_block_may_take_back_what_a_block_inside_it_has_changed(place, tmp_path):
    with training(mlp, tmp_path, param_tier=place, optimizer_state_tier=place) as (model, engine, _):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        weight = next(iter(model.parameters()))
        with infinity.gathered([weight]):
            with infinity.gathered([weight]):
                weight.data.mul_(2)
            assert not torch.equal(next(iter(model.state_dict().values())), next(iter(before.values())))
            weight.data.div_(2)
        for name, value in model.state_dict().items():
            assert_same_bits(value, before[name], name)


def test_gathered_parameters_are_read_as_in_plain_pytorch(tmp_path):
    """State dict, vector, deep copy and moving average have the updated values before the updates are written."""
    reference_model, reference = plain(mlp)
    averages = []
    with training(mlp, tmp_path, update="deferred", **NVME) as (model, engine, optimizer):
        average, expected_average = ([torch.zeros(p.shape) for p in model.parameters()] for _ in range(2))
        for step in range(3):
            one_step(reference_model, reference, step)
            one_step(model, optimizer, step)
            expected = [p.detach() for p in reference_model.parameters()]
            with infinity.gathered(model.parameters()), torch.no_grad():
                assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), nn.utils.parameters_to_vector(expected))
                assert all(map(torch.equal, copy.deepcopy(list(model.parameters())), expected))
                assert all(torch.equal(value, reference_model.state_dict()[name]) for name, value in model.state_dict().items())
                torch._foreach_lerp_(average, list(model.parameters()), 0.1)
            torch._foreach_lerp_(expected_average, expected, 0.1)
            averages.append(all(map(torch.equal, average, expected_average)))
    assert all(averages)


@pytest.mark.parametrize("inside", [True, False])
def test_initialisers_may_run_between_construction_and_the_optimizer(inside, tmp_path):
    """Between `infinity.init` or `infinity.offload` and the optimizer, parameters have their values (if they fit into init's window)."""
    reference_model, _ = plain(mlp)
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, **NVME)
    torch.manual_seed(0)
    if inside:
        with infinity.init(config):
            model = mlp()
    else:
        model = mlp()
        infinity.offload(model, config)
    for m in (model, reference_model):
        torch.manual_seed(1)
        initialise(m)
        reset(m.layers[2])
    reference = ReferenceAdamW(reference_model.parameters(), lr=1e-2)
    with infinity.engine_of(model) as engine:
        assert all(map(torch.equal, model.state_dict().values(), reference_model.state_dict().values()))
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            assert_same_bits(one_step(model, optimizer, step), one_step(reference_model, reference, step), f"loss of step {step}")
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.parametrize("change", ["normal_", "setitem"])
def test_parameters_on_the_device_are_changed_in_place(change, tmp_path):
    """The device has room for all parameters, so they are on the device after an evaluation."""

    def edit(model, step, gathered):
        with torch.no_grad():
            model(inputs(model, step))
        if step == 2:
            torch.manual_seed(99)
            with gathered(model.layers[1].weight), torch.no_grad():
                if change == "normal_":
                    nn.init.normal_(model.layers[1].weight, std=0.1)
                else:
                    model.layers[1].weight[0] = 0.5

    for place in ("device", "host"):
        (tmp_path / place).mkdir()
        config = {"param_tier": "device", "optimizer_state_tier": place, "residency": "auto"}
        train_both(mlp, tmp_path / place, edit=edit, device_memory="auto", **config)


def test_a_layer_can_be_copied_before_the_start(tmp_path):
    model = mlp()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME)):
        twin = copy.deepcopy(model.layers[0])
        assert torch.equal(twin.weight, model.layers[0].weight)
        infinity.AdamW(model.parameters())
        assert not twin(torch.ones(1, H)).isnan().any()


# The user's hooks


def halve(model):
    model.layers[1].weight.register_hook(lambda grad: grad * 0.5)


def before_forward(model):
    model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * module.weight.mean(),))


def first_before_forward(model):
    model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * module.weight.mean(),), prepend=True)


def after_forward(model):
    model.layers[1].register_forward_hook(lambda module, args, output: output * module.weight.mean())


def of_the_root(model):
    model.register_forward_pre_hook(lambda module, args: (args[0] * module.layers[2].weight.mean(),))
    model.register_forward_hook(lambda module, args, output: output * 2)


def before_backward(model):
    scale = lambda module, grads: (grads[0] * module.weight.detach().abs().mean(),)
    model.layers[1].register_full_backward_pre_hook(scale)


def after_backward(model):
    model.layers[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    model.register_full_backward_hook(lambda module, inputs, outputs: None)


def of_an_output(model):
    scale = lambda module, grad: grad * module.weight.detach().abs().mean()
    model.layers[1].register_forward_hook(lambda m, args, output: output.register_hook(lambda grad: scale(m, grad)) and None)


HOOKS = [halve, before_forward, first_before_forward, after_forward, of_the_root, before_backward, after_backward, of_an_output]


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_hooks_see_weights_and_change_values_and_gradients(hook, started, tmp_path):
    def make():
        model = mlp()
        if not started:
            hook(model)
        return model

    train_both(make, tmp_path, edit=at(1, hook) if started else None, device_memory="auto")


def test_an_earlier_hook_changes_the_accumulated_gradient(tmp_path):
    def make():
        model = mlp()

        def halve(param):
            param.grad.mul_(0.5)

        model.layers[1].weight.register_post_accumulate_grad_hook(halve)
        return model

    train_both(make, tmp_path)


def test_a_backward_hook_reads_old_weights_with_deferred_updates(tmp_path):
    def hook(model):
        scale = lambda module, inputs, outputs: (inputs[0] * module.weight.detach().abs().mean(),)
        model.layers[1].register_full_backward_hook(scale)

    train_both(mlp, tmp_path, edit=at(1, hook), device_memory="auto", update="deferred")


# Calls


def submodules(model, step):
    x = inputs(model, step)
    for layer in model.layers:
        x = torch.tanh(layer(x))
    return loss_of(x)


def a_half_and_the_rest(model, step):
    x = torch.tanh(model.layers[0](inputs(model, step)))
    with torch.no_grad():
        model(inputs(model, step))
    return loss_of(model(x))


def twice(model, step):
    with_grad, target = model(inputs(model, step)), model(inputs(model, step + 50))
    return loss_of(target) + (with_grad[:3] - target[:3].detach()).square().mean()


def on_its_own_output(model, step):
    return loss_of(model(model(inputs(model, step))))


def evaluated_between(model, step):
    loss = output_loss(model, step)
    model.eval()
    with torch.inference_mode():
        model(inputs(model, step + 1))
    model.train()
    return loss


def recomputed(model, step, use_reentrant=False):
    return loss_of(checkpointing.checkpoint(model, inputs(model, step).requires_grad_(), use_reentrant=use_reentrant))


def recomputed_reentrant(model, step):
    return recomputed(model, step, True)


CALLS = [submodules, a_half_and_the_rest, twice, on_its_own_output, evaluated_between, recomputed, recomputed_reentrant]


@pytest.mark.few(6)
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_unusual_calls_train_to_the_bits_of_plain_pytorch(call, update, tmp_path):
    train_both(mlp, tmp_path, loss=call, update=update)


def test_a_loss_term_may_read_all_gathered_weights(tmp_path):
    """The term is the last part of the forward pass. So its backward runs before other ops need the memory."""

    def loss(model, step):
        main = output_loss(model, step)
        with infinity.gathered(model.parameters()) if owner_of(model.layers[0].weight) else contextlib.nullcontext():
            return main + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())

    train_both(mlp, tmp_path, loss=loss, device_memory="auto")


def blocks(run):
    """Return a model of blocks with dropout, which `run(self, x)` calls under checkpoints."""

    def build(self):
        self.first = nn.Linear(H, H)
        block = lambda: nn.Sequential(nn.Linear(H, 2 * H), nn.Dropout(0.2), nn.GELU(), nn.Linear(2 * H, H))
        self.blocks = nn.ModuleList(block() for _ in range(3))

    return lambda: Model(build, lambda self, x: run(self, self.first(x)))


def each(self, x, **options):
    for block in self.blocks:
        x = x + checkpointing.checkpoint(block, x, **{"use_reentrant": False} | options)
    return x


def without_early_stop(self, x):
    with checkpointing.set_checkpoint_early_stop(False):
        return each(self, x)


def by_name(self, x, use_reentrant=False):
    """Checkpointed regions that call no module and read weights by name."""
    for block in self.blocks:
        region = lambda y, block=block: F.gelu(F.linear(y, block[0].weight)) @ block[3].weight.t()
        x = x + checkpointing.checkpoint(region, x, use_reentrant=use_reentrant)
    return x


def matrix_products_kept():
    return checkpointing.create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


CHECKPOINTS = {
    "sequential": lambda self, x: checkpointing.checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False),
    "sequential_reentrant": lambda self, x: checkpointing.checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=True),
    "without_early_stop": without_early_stop,
    "unchecked": lambda self, x: each(self, x, determinism_check="none"),
    "selective": lambda self, x: each(self, x, context_fn=matrix_products_kept),
    "by_name": by_name,
    "by_name_reentrant": lambda self, x: by_name(self, x, True),
}


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_each_kind_of_checkpoint_has_the_bits_of_plain_pytorch(kind, tmp_path):
    train_both(blocks(CHECKPOINTS[kind]), tmp_path, device_memory="auto" if "by_name" in kind else LEAST)


def fused():
    """The root reads weights of several children in one op."""

    def build(self):
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(6))
        self.wide = nn.Linear(H, 4 * H)

    def run(self, x):
        x = x + F.linear(x, torch.cat([layer.weight for layer in self.layers[:2]])).sum(-1, keepdim=True)
        x = x + F.linear(x, torch.cat([layer.weight for layer in self.layers])).sum(-1, keepdim=True)
        return self.wide(x)

    return Model(build, run)


@pytest.mark.slow
def test_an_op_without_room_names_a_sufficient_number_of_bytes(tmp_path):
    """The error has two numbers: bytes that this op lacks, and bytes enough for all ops. After the first number a later op may raise again."""
    least = helpers.least_device_memory(fused, tmp_path, **NVME)
    given, refusals = least, []
    while len(refusals) < 9:
        try:
            train_both(fused, tmp_path, device_memory=given)
            break
        except infinity.BudgetError as error:
            found = re.search(r"Raise device_memory by (\d+) bytes or more: (\d+) bytes more are enough for any op", str(error))
            refusals.append(tuple(map(int, found.groups())))
            given += refusals[-1][0]
    assert 1 <= len(refusals) <= 2
    train_both(fused, tmp_path, device_memory=least + refusals[0][1])


class Keeper(nn.Module):
    """Keeps a view of its weight after the op."""

    def __init__(self, view):
        super().__init__()
        self.weight, self.view, self.kept = nn.Parameter(torch.randn(H, H) / H), view, None

    def forward(self, x):
        self.kept = self.view(self.weight)
        return x @ self.weight


@pytest.mark.few(6)
@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w.data, lambda w: w.detach().numpy(), lambda w: w[1:]])
@pytest.mark.parametrize("place", PLACES)
def test_a_view_kept_by_the_program_can_be_read_at_any_time(place, view, tmp_path):
    def make():
        return Model(lambda self: setattr(self, "layers", nn.ModuleList(Keeper(view) for _ in range(2))), run_layers)

    def read(model, step, gathered):
        for layer in model.layers:
            assert layer.kept is None or float(abs(layer.kept).max()) < 10

    train_both(make, tmp_path, edit=read, **PLACES[place] | {"device_memory": "64KiB"})


def run_layers(self, x):
    for layer in self.layers:
        x = torch.tanh(layer(x))
    return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_part_of_a_forward_pass_may_run_without_a_graph(mode, tmp_path):
    def run(self, x):
        with mode():
            scale = self.layers[0](x).square().mean().item()
        return self.layers[0](self.layers[1](x)) * scale

    def build(self):
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(2))

    train_both(lambda: Model(build, run), tmp_path)


# Refused


CONVERSIONS = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "to a type": lambda model: model.to(torch.bfloat16),
    "to a device": lambda model: model.to("meta"),
    "type": lambda model: model.type(torch.float64),
    "one": lambda model: model.layers[0].weight.half(),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("change", CONVERSIONS)
@pytest.mark.parametrize("place", PLACES)
def test_another_dtype_or_device_is_refused_before_any_copy(place, change, tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **PLACES[place]) as (model, engine, optimizer):
        for step in range(2):
            with pytest.raises(UsageError, match=r"would make .* the engine has torch.float32 on cpu.*Config\(dtype=.*device=.*state_dict"):
                CONVERSIONS[change](model)
            assert_same_bits(one_step(model, optimizer, step), one_step(reference_model, reference, step), f"loss of step {step}")
        assert all(value.half().dtype is torch.float16 for value in model.state_dict().values())
        with pytest.raises(UsageError, match=r"layers\.0\.weight has no value here \(data = ...\).*infinity\.gathered"):
            model.to_empty(device="cpu")


@pytest.mark.few(2)
@pytest.mark.parametrize("place", PLACES)
def test_a_conversion_to_the_same_dtype_and_device_changes_nothing(place, tmp_path):
    """This also holds between step() and zero_grad(), when param.grad stands for gradients that have left."""

    def same(model):
        return model.float().cpu().to("cpu", torch.float32).to(torch.zeros(1)).type(torch.FloatTensor)

    train_both(mlp, tmp_path, edit=lambda model, step, gathered: same(model), **PLACES[place])
    (tmp_path / "again").mkdir()
    with training(mlp, tmp_path / "again", **PLACES[place]) as (model, engine, optimizer):
        before = [id(param) for param in model.parameters()]
        loss_of(model(inputs(model, 0))).backward()
        optimizer.step()
        assert same(model) is model and before == [id(param) for param in model.parameters()]
        optimizer.zero_grad()
        one_step(model, optimizer)


@pytest.mark.parametrize("started", [False, True])
def test_an_optimizer_of_torch_is_refused(started, tmp_path):
    model = mlp()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME)):
        if started:
            with torch.no_grad():
                model(inputs(model, 0))
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(UsageError, match=r"torch.optim.AdamW was made over .*Make infinity.AdamW"):
            model(inputs(model, 0))
        del optimizer
        one_step(model, infinity.AdamW(model.parameters()))


def test_a_module_added_before_the_optimizer_is_managed(tmp_path):
    expected_model, expected = plain(mlp)
    add_module(expected_model)
    model = plain(mlp)[0]
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME)) as engine:
        add_module(model)
        model.load_state_dict(expected_model.state_dict())
        optimizer, expected = infinity.AdamW(model.parameters(), lr=1e-2), ReferenceAdamW(expected_model.parameters(), lr=1e-2)
        for step in range(2):
            one_step(model, optimizer, step)
            one_step(expected_model, expected, step)
        assert_equals_reference(engine, model, expected_model, expected)


def test_a_module_copied_from_values_that_are_away_is_refused(tmp_path):
    with infinity.init(infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME), window=0):
        model = mlp()
    with infinity.engine_of(model):
        model.layers.append(copied := nn.Linear(H, H))
        with torch.no_grad():
            copied.weight.copy_(model.layers[0].weight)
        with pytest.raises(UsageError, match="layers.4.weight has joined the model with NaN values"):
            infinity.AdamW(model.parameters())


def test_a_module_added_after_the_start_is_refused(tmp_path):
    model = mlp()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME)):
        with torch.no_grad():
            model(inputs(model, 0))
        add_module(model)
        with pytest.raises(ConfigError, match=r"layers.4.weight, of shape .* became the model's after .* before infinity.offload"):
            infinity.AdamW(model.parameters())


def test_a_group_with_a_parameter_from_after_the_start_is_refused(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        register_parameter(model)
        with pytest.raises(ConfigError, match=r"late, of shape .* became the model's after .* before infinity.offload"):
            optimizer.add_param_group({"params": [model.late]})
        assert len(optimizer.param_groups) == 1


def test_uninitialized_lazy_modules_are_refused(tmp_path):
    model = nn.Sequential(nn.LazyLinear(H), nn.Linear(H, H))
    with pytest.raises(ValueError, match="uninitialized parameter.*Call `forward` with a dummy batch"):
        infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME))


# Two ranks


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a function that returns a World of two ranks."""
    made = []

    def get():
        if not made or not made[0].pipes:
            made[:] = [World(2, tmp_path_factory.mktemp("world-"))]
        return made[0]

    yield get
    for one in made:
        one.close()


def freeze_for_a_step(model, step, gathered):
    if step in (1, 2):
        model.layers[1].requires_grad_(step == 2)


def initialise_gathered(model, step, gathered):
    if step == 1:
        torch.manual_seed(99)
        with gathered(model.parameters()):
            initialise(model)


ON_RANKS = {
    "several_names": (several_names, {}),
    "tied_module": (tied_module, {}),
    "half_frozen": (half_frozen, {}),
    "wide_buffers": (wide_buffers, {}),
    "scalars": (TRAITS["scalars"], {}),
    "codebook": (codebook, {}),
    "frozen_for_a_step": (mlp, {"edit": freeze_for_a_step}),
    "tied_late": (mlp, {"edit": at(2, tie), "device_memory": "auto"}),
    "gathered": (mlp, {"edit": initialise_gathered, "device_memory": "auto"}),
    "submodules": (mlp, {"loss": submodules}),
    "twice": (mlp, {"loss": twice}),
    "checkpointed": (blocks(CHECKPOINTS["without_early_stop"]), {}),
}


def train_on_ranks(case, directory):
    """All ranks train on the same batch, so the mean of the gradients has the bits of one rank."""
    make, options = ON_RANKS[case]
    train_both(make, directory, **options)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("case", ON_RANKS)
def test_two_ranks_train_to_the_bits_of_plain_pytorch(case, world, tmp_path):
    world().run(train_on_ranks, case, tmp_path)


CASTS = {
    "float": lambda weight: weight.float(),
    "double": lambda weight: weight.double(),
    "to dtype": lambda weight: weight.to(torch.float32),
    "to device and dtype": lambda weight: weight.to("cpu", torch.float32),
    "to like": lambda weight: weight.to(torch.zeros(1)),
    "type": lambda weight: weight.type(torch.float32),
    "type by name": lambda weight: weight.type("torch.FloatTensor"),
    "half": lambda weight: weight.half(),
    "copied": lambda weight: weight.to(weight.dtype, copy=True),
    "detached": lambda weight: weight.detach().float(),
    "data": lambda weight: weight.data.float(),
}


class CastsChild(nn.Module):
    """Reads and casts a child's weight in forward."""

    def __init__(self, cast):
        super().__init__()
        self.first, self.router, self.cast = nn.Linear(16, 16), nn.Linear(16, 4, bias=False), cast

    def forward(self, x):
        weight = self.cast(self.router.weight)
        return nn.functional.linear(self.first(x).to(weight.dtype), weight).float()


@pytest.mark.few(4)
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_parent_may_cast_the_weight_of_a_child(cast, tmp_path):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()

    def run(take):
        torch.manual_seed(0)
        model = CastsChild(cast).bfloat16()
        take(model)
        loss = model(x).square().mean()
        loss.backward()
        return loss.item()

    config = infinity.Config(swap_dirs=tmp_path, device="cpu", host_memory="64MiB", param_tier="nvme", optimizer_state_tier="nvme", residency="none")
    ours = run(lambda model: infinity.offload(model, config) and infinity.AdamW(model.parameters(), lr=1e-3))
    assert ours == run(lambda model: None)


def test_a_cast_outside_of_forward_names_the_configuration(tmp_path):
    model = nn.Linear(16, 4)
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32")):
        infinity.AdamW(model.parameters())
        with pytest.raises(UsageError, match="Choose these with infinity.Config"):
            model.weight.half()
