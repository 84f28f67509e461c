"""Access to values and gradients that are away gives correct values, or an error with a remedy."""

import contextlib
import copy
import io

import pytest
import torch
from support import helpers
from support.helpers import NVME, assert_equals_reference, assert_same_bits, plain, split, training
from support.models import H, inputs, loss_of, mlp, tied_module
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")  # of conftest.py

PLACES = {"nvme": NVME, "resident": {}, "host": {"param_tier": "host", "optimizer_state_tier": "host"}}


def backward(model, step=0):
    loss = loss_of(model(inputs(model, step)))
    loss.backward()
    return loss.detach()


def one_step(model, optimizer, step=0):
    loss = backward(model, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def cast(model, dtype="fp32"):
    """Make the model cast its input to `dtype`."""
    if dtype != "fp32":
        run = model.run
        model.run = lambda self, x: run(self, x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]))
    return model


def other(make=mlp):
    torch.manual_seed(77)
    return make().state_dict()


# state_dict


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("make", [mlp, tied_module])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_a_state_dict_holds_complete_trained_values_on_the_cpu(place, dtype, make, tmp_path):
    """Names and dtypes are the model's, also while updates are pending. The values have separate memory."""
    reference_model, reference = plain(lambda: cast(make(), dtype), dtype=dtype)
    with training(lambda: cast(make(), dtype), tmp_path, dtype=dtype, **PLACES[place]) as (model, engine, optimizer):
        for step in range(3):
            got, expected = model.state_dict(), reference_model.state_dict()
            assert list(got) == list(expected)
            for name, value in got.items():
                assert value.device.type == "cpu" and not value.requires_grad, name
                assert_same_bits(value, expected[name], name)
            kept = {name: value.clone() for name, value in got.items()}
            one_step(model, optimizer, step)
            one_step(reference_model, reference, step)
            assert all(torch.equal(value, kept[name]) for name, value in got.items())  # no views of trained weights


def test_a_state_dict_is_saved_and_loaded_into_a_plain_model(tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        one_step(model, optimizer)
        one_step(reference_model, reference)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = mlp()
    fresh.load_state_dict(torch.load(file))
    assert all(map(torch.equal, fresh.parameters(), reference_model.parameters()))


def test_a_state_dict_of_a_part_and_with_a_prefix(tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        one_step(model, optimizer)
        one_step(reference_model, reference)
        got, expected = (m.layers[1].state_dict(prefix="it.") for m in (model, reference_model))
        assert list(got) == list(expected) == ["it.weight", "it.bias"]
        assert all(torch.equal(got[name], expected[name]) for name in got)


def test_a_state_dict_with_buffers_and_frozen_parts(tmp_path):
    def make():
        model = mlp()
        model.layers[1].requires_grad_(False)
        model.register_buffer("kept", torch.arange(3))
        model.register_buffer("left", torch.ones(2), persistent=False)
        return model

    reference_model, _ = plain(make)
    with training(make, tmp_path, **NVME) as (model, engine, optimizer):
        got, expected = model.state_dict(), reference_model.state_dict()
        assert list(got) == list(expected) and "left" not in got
        assert all(torch.equal(got[name], expected[name]) for name in got)


def test_a_state_dict_after_close_raises(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        one_step(model, optimizer)
    with pytest.raises(UsageError, match="closed"):
        model.state_dict()


def test_a_state_dict_between_an_updating_backward_and_step_raises(tmp_path):
    with training(mlp, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        backward(model)
        with pytest.raises(UsageError, match="begun to update"):
            model.state_dict()
        optimizer.step()


# load_state_dict


@pytest.mark.slow
@pytest.mark.few(7)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("when", ["before the optimizer", "before the first step", "after steps"])
@pytest.mark.parametrize("place", PLACES)
def test_loaded_values_are_trained_on(place, when, assign, tmp_path):
    """Momenta stay. Parameters stay the same objects, so the optimizer still has them."""
    reference_model, reference = plain(mlp)
    torch.manual_seed(0)
    model = mlp()
    params = list(model.parameters())
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, **PLACES[place])
    with infinity.offload(model, config) as engine:
        if when == "before the optimizer":
            assert str(model.load_state_dict(other(), assign=assign)) == "<All keys matched successfully>"
        optimizer = infinity.AdamW(params, lr=1e-2)
        if when == "after steps":
            for step in range(2):
                one_step(model, optimizer, step)
                one_step(reference_model, reference, step)
        if when != "before the optimizer":
            model.load_state_dict(other(), assign=assign)
        reference_model.load_state_dict(other())
        assert all(map(torch.equal, model.state_dict().values(), other().values()))
        assert all(ours is p for ours, p in zip(model.parameters(), params, strict=True))
        for step in range(2, 5):
            assert_same_bits(one_step(model, optimizer, step), one_step(reference_model, reference, step), f"loss of step {step}")
        assert_equals_reference(engine, model, reference_model, reference)


def test_a_bf16_engine_takes_loaded_fp32_values_as_its_masters(tmp_path):
    with training(lambda: cast(mlp(), "bf16"), tmp_path, dtype="bf16", **NVME) as (model, engine, optimizer):
        one_step(model, optimizer)
        model.load_state_dict(other())
        for name, p in model.named_parameters():
            weight, residual = split(other()[name])
            state = engine.read_state(p)
            assert_same_bits(state["weight"], weight, name)
            assert_same_bits(state["residual"], residual, name)
        halves = {name: value.bfloat16() + 1 for name, value in other().items()}
        model.load_state_dict(halves)
        for name, p in model.named_parameters():
            assert_same_bits(engine.read_state(p)["weight"], halves[name], name)
            assert not engine.read_state(p)["residual"].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("place", PLACES)
def test_a_model_that_loads_its_own_state_dict_keeps_its_masters(place, dtype, tmp_path):
    with training(lambda: cast(mlp(), dtype), tmp_path, dtype=dtype, **PLACES[place]) as (model, engine, optimizer):
        for step in range(3):
            one_step(model, optimizer, step)
        before = helpers.states_of(engine, model)
        model.load_state_dict(model.state_dict())
        helpers.assert_same_states(helpers.states_of(engine, model), before)


def test_missing_and_mismatched_keys_are_reported_as_by_pytorch(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        before = model.state_dict()
        with pytest.raises(RuntimeError, match="Missing key.*layers.0.weight"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match="size mismatch for layers.1.weight"):
            model.load_state_dict({"layers.1.weight": torch.ones(3, 3)}, strict=False)
        found = model.load_state_dict({"layers.1.weight": torch.eye(H), "more": torch.ones(1)}, strict=False)
        assert len(found.missing_keys) == 7 and found.unexpected_keys == ["more"]
        after = model.state_dict()
        assert torch.equal(after.pop("layers.1.weight"), torch.eye(H))
        assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_a_closed_model_can_load_values_and_run_without_an_engine(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        one_step(model, optimizer)
        kept = model.state_dict()
    model.load_state_dict(kept, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.layers[0].weight.detach().clone()
    one_step(model, optimizer)
    assert not torch.equal(before, model.layers[0].weight)


# Gradients


USES = {
    "norm": lambda grad: grad.norm(),
    "add_": lambda grad: grad.add_(2),
    "arithmetic": lambda grad: grad + 1,
    "index": lambda grad: grad[0],
    "item": lambda grad: grad.sum().item(),
    "function": lambda grad: torch.isfinite(grad),
    "data": lambda grad: grad.data.clone(),
    "detach": lambda grad: grad.detach().clone(),
    "numpy": lambda grad: grad.numpy(),
}


@pytest.mark.slow
@pytest.mark.few(7)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_every_use_of_a_gradient_that_has_left_raises(update, use, tmp_path):
    with training(mlp, tmp_path, update=update, **NVME) as (model, engine, optimizer):
        backward(model)
        assert model.layers[1].weight.grad is not None
        with pytest.raises(UsageError, match="max_grad_norm.*grad_norm"):
            USES[use](model.layers[1].weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert model.layers[1].weight.grad is None


def test_clipping_by_value_raises(tmp_path):
    with training(mlp, tmp_path, update="deferred", **NVME) as (model, engine, optimizer):
        backward(model)
        with pytest.raises(UsageError, match="max_grad_norm"):
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.parametrize("place", PLACES)
def test_zero_grad_of_the_model_drops_gradients(place, tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **PLACES[place] | {"update": "deferred"}) as (model, engine, optimizer):
        for m, o in ((reference_model, reference), (model, optimizer)):
            one_step(m, o)
            backward(m, 1)
            m.zero_grad()
            backward(m, 2)
            o.step()
        assert_equals_reference(engine, model, reference_model, reference)


def test_the_model_cannot_drop_gradients_already_used(tmp_path):
    with training(mlp, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        backward(model)
        model.zero_grad()
        with pytest.raises(UsageError, match="has begun to update"):
            optimizer.step()


def test_dropping_only_some_gradients_is_refused(tmp_path):
    with training(mlp, tmp_path, update="deferred", **NVME) as (model, engine, optimizer):
        backward(model)
        model.layers[0].zero_grad()
        with pytest.raises(UsageError, match="layers.0.weight was dropped and others were not"):
            optimizer.step()


def test_a_step_after_zero_grad_of_the_model_uses_no_dropped_gradient(tmp_path):
    with training(mlp, tmp_path, update="deferred", **NVME) as (model, engine, optimizer):
        before = helpers.states_of(engine, model)
        backward(model)
        model.zero_grad()
        with pytest.raises(UsageError, match="without a finished backward pass"):
            optimizer.step()
        helpers.assert_same_states(helpers.states_of(engine, model), before)


def test_unfrozen_parameters_without_states_are_refused(tmp_path):
    def make():
        model = mlp()
        model.layers[1].requires_grad_(False)
        return model

    with training(make, tmp_path, groups=lambda model: list(model.parameters()), **NVME) as (model, engine, optimizer):
        one_step(model, optimizer)
        model.layers[1].requires_grad_(True)
        with pytest.raises(UsageError, match="layers.1.weight was frozen when the engine started"):
            one_step(model, optimizer, 1)


@pytest.mark.parametrize("how", ["data", "vector"])
def test_replaced_values_are_kept(how, tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, param_tier="device", optimizer_state_tier="host") as (model, engine, optimizer):
        for m, o in ((reference_model, reference), (model, optimizer)):
            one_step(m, o)
            with torch.no_grad():
                m(inputs(m, 0))  # the weights are on the device now
            weight = m.layers[1].weight
            with infinity.gathered(weight) if m is model else contextlib.nullcontext():
                match how:
                    case "data":
                        weight.data = torch.eye(H)
                    case "vector":
                        nn.utils.vector_to_parameters(torch.ones(H * H) / H, [weight])
            for step in (1, 2):
                one_step(m, o, step)
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.parametrize("dtype, place", [("fp32", "nvme")])
@pytest.mark.parametrize("through", ["no_grad"])
def test_a_weight_written_in_forward_is_kept(through, dtype, place, tmp_path):
    """Some models clip weights in forward."""

    def run(self, x):
        weight = self.layers[1].weight
        with torch.no_grad():
            (weight.data if through == "data" else weight).mul_(0.5)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def make():
        model = mlp()
        model.run = run
        return cast(model, dtype)

    places = {"param_tier": place, "optimizer_state_tier": place, "residency": "auto"}
    reference_model, reference = plain(make, dtype=dtype)
    with training(make, tmp_path, dtype=dtype, **places) as (model, engine, optimizer):
        for step in range(3):
            one_step(reference_model, reference, step)
            one_step(model, optimizer, step)
        assert_equals_reference(engine, model, reference_model, reference)


def test_a_backward_hook_cannot_read_weights_of_the_next_step(tmp_path):
    def hook(model):
        scale = lambda module, inputs, outputs: (inputs[0] * module.weight.detach().abs().mean(),)
        model.layers[1].register_full_backward_hook(scale)

    with training(mlp, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        hook(model)
        with pytest.raises(UsageError, match="layers.1.weight is read in a backward pass that has updated .* already.*deferred"):
            for step in range(3):
                one_step(model, optimizer, step)


@pytest.mark.parametrize("read", ["called", "read by name"])
def test_a_recomputed_checkpoint_cannot_read_weights_of_the_next_step(read, tmp_path):
    """An earlier layer reads a later layer's weight without a gradient and without a saved tensor. So only the read itself can be refused."""

    class First(nn.Linear):
        def forward(self, x, later):
            y = super().forward(x)
            with torch.no_grad():
                factor = later[0](x) if read == "called" else later[0].weight.norm()
            return y * factor

    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layers = First(32, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            x = checkpoint(self.first, x, [self.layers[2]], use_reentrant=False)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    x = torch.ones(2, 32)
    with training(Looking, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        with pytest.raises(UsageError, match="layers.2.* is (called|read) in a backward pass that has updated .* already.*deferred"):
            for _ in range(3):
                loss_of(model(x)).backward()
                optimizer.step()
                optimizer.zero_grad()


def test_a_term_over_gathered_weights_before_forward_has_gradients(tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        for step in range(3):
            for m, o in ((reference_model, reference), (model, optimizer)):
                with infinity.gathered(model.parameters()):
                    term = 1e-3 * sum(p.pow(2).sum() for p in m.parameters())
                (loss_of(m(inputs(m, step))) + term).backward()
                o.step()
                o.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


def test_optimizers_accept_every_kind_of_parameter(tmp_path):
    """Also parameters without elements, and frozen integer parameters, as in torch.optim."""

    def make():
        model = mlp()
        model.empty = nn.Parameter(torch.empty(0))
        model.order = nn.Parameter(torch.arange(3), requires_grad=False)
        return model

    with training(make, tmp_path, groups=lambda model: list(model.parameters()), **NVME) as (model, engine, optimizer):
        one_step(model, optimizer)
        with infinity.gathered(model.parameters()):
            pass


@pytest.mark.parametrize("started", [False, True])
def test_a_copy_of_a_model_is_refused(started, tmp_path):
    model = mlp()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME)):
        if started:
            one_step(model, infinity.AdamW(model.parameters()))
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            copy.deepcopy(model)


@pytest.mark.slow
@pytest.mark.few(7)
@pytest.mark.parametrize("dtype, master", [("bf16", "residual"), ("fp16", "master")])
@pytest.mark.parametrize("then", ["load_state_dict", "write_weight", "save"])
@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_a_failed_backward_pass_holds_nothing_after_its_graph(place, then, dtype, master, tmp_path):
    """A weight that is loaded or written with its old value keeps the master, in every tier."""
    places = {"param_tier": place, "optimizer_state_tier": place, "trace": True, "dtype": dtype, "update": "deferred"}
    with training(lambda: cast(mlp(), dtype), tmp_path / "swap", **places) as (model, engine, optimizer):
        one_step(model, optimizer)
        before = helpers.states_of(engine, model)
        handle = model.layers[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
        loss = loss_of(model(inputs(model, 1)))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        del loss
        optimizer.zero_grad()
        if then == "load_state_dict":
            model.load_state_dict(model.state_dict())
        elif then == "write_weight":
            for param in model.parameters():
                engine.parameter_values.write_weight(param, engine.parameter_values.read_weight(param))
        else:
            infinity.save(tmp_path / "checkpoint", model, optimizer)
        helpers.assert_same_states(helpers.states_of(engine, model), before)
        assert any(state[master].any() for state in before.values())
