"""Any nn.Module with a plain `loss.backward()`: every trait of models.py trains to the bits of plain PyTorch.

Long because each order of passes and each interruption is tried in every placement.
"""

import contextlib
import sys

import pytest
import torch
from support import helpers
from support.helpers import NVME, assert_equals_reference, assert_nothing_held, assert_same_states, plain, states_of, training
from support.models import TRAITS, H, Model, attention, inputs, loss_of, max_norm, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.engine.autograd.module_calls import live_calls
from infinity.engine.autograd.resident_model import ResidentHooks
from infinity.errors import UsageError
from infinity.formats.dtypes import TORCH_DTYPES

pytestmark = pytest.mark.usefixtures("one_thread")

# Where states are stored and when they are updated. "resident": the whole model stays on the device.
SETTINGS = {
    "backward": NVME | {"update": "backward"},
    "deferred": NVME | {"update": "deferred"},
    "resident": {"update": "auto"},
}


def forward_backward(model, step):
    torch.manual_seed(step)
    loss = loss_of(model(inputs(model, step)))
    loss.backward()
    return loss.detach()


def plain_step(model, optimizer, step):
    loss = forward_backward(model, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.few(10)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("trait", TRAITS)
def test_a_model_of_each_trait_trains_to_the_bits_of_plain_pytorch(trait, setting, tmp_path):
    make, config = TRAITS[trait], SETTINGS[setting]
    if setting != "resident":
        config = config | {"device_memory": helpers.least_device_memory(make, tmp_path, **config)}
    reference_model, reference = plain(make)
    with training(make, tmp_path, **config) as (model, engine, optimizer):
        for step in range(5):
            expected = plain_step(reference_model, reference, step)
            loss = forward_backward(model, step)
            helpers.assert_same_bits(loss, expected, f"loss of step {step}")
            optimizer.step()
            optimizer.zero_grad()
            assert_nothing_held(engine)
        assert_equals_reference(engine, model, reference_model, reference)
        for (name, buffer), expected in zip(model.named_buffers(), reference_model.buffers(), strict=True):
            assert torch.equal(buffer, expected), name
        if setting != "resident":
            assert engine.stats()["peak_device_nbytes"] <= config["device_memory"]


def test_a_parameter_that_a_parent_reads_has_values_only_inside_the_op(tmp_path):
    """nn.MultiheadAttention reads a weight of a child. The engine fetches the weight for that function. Other reads are refused."""
    with training(attention, tmp_path, **NVME) as (model, engine, optimizer):
        weight = model.attention.out_proj.weight
        forward_backward(model, 0)
        optimizer.step()
        assert weight.shape == (H, H)
        with pytest.raises(UsageError, match=r"attention\.out_proj\.weight has no value here \(isnan\).*infinity\.gathered"):
            weight.isnan()
        with torch._C.DisableTorchFunctionSubclass():
            assert weight.isnan().all()


# Passes


@pytest.mark.parametrize("setting", SETTINGS)
def test_several_forward_passes_may_come_before_one_backward(setting, tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **SETTINGS[setting]) as (model, engine, optimizer):
        for step in range(4):
            losses = []
            for m, o in ((reference_model, reference), (model, optimizer)):
                loss = loss_of(m(inputs(m, step))) + 2 * loss_of(m(inputs(m, step + 100)))
                loss.backward()
                o.step()
                o.zero_grad()
                losses.append(loss.detach())
            helpers.assert_same_bits(losses[1], losses[0], f"loss of step {step}")
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_evaluation_between_steps_uses_the_updated_weights(setting, mode, tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **SETTINGS[setting]) as (model, engine, optimizer):
        x = inputs(model, 50)
        for step in range(4):
            with mode():
                helpers.assert_same_bits(model(x).clone(), reference_model(x).clone(), "before the step")
            expected = plain_step(reference_model, reference, step)
            helpers.assert_same_bits(forward_backward(model, step), expected, f"loss of step {step}")
            optimizer.step()
            with mode():
                helpers.assert_same_bits(model(x).clone(), reference_model(x).clone(), "right after the step")
            optimizer.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.few(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_inference_inside_another_models_checkpoint_is_no_backward_pass(setting, use_reentrant, tmp_path):
    reference_model, reference = plain(mlp)
    torch.manual_seed(1)
    student = nn.Linear(H, H)
    with training(mlp, tmp_path, **SETTINGS[setting]) as (model, engine, optimizer):
        for step in range(3):
            x = torch.randn(4, H, requires_grad=True)
            checkpoint(lambda x: student(x) * model(x).detach(), x, use_reentrant=use_reentrant).sum().backward()
            for each, update in ((reference_model, reference), (model, optimizer)):
                forward_backward(each, step)
                update.step()
                update.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.parametrize("setting", ["deferred", "resident"])
def test_an_fp16_part_alone_in_a_reentrant_checkpoint_is_refused(setting, tmp_path):
    with training(mlp, tmp_path, dtype="fp16", **SETTINGS[setting]) as (model, engine, optimizer):
        x = torch.randn(4, H, dtype=torch.float16, requires_grad=True)
        with pytest.raises(UsageError, match="lacks the loss scale|called by itself"):
            checkpoint(model.layers[1], x, use_reentrant=True).float().sum().backward()
        optimizer.zero_grad()


class Sides(nn.Module):
    """The layer `side` runs only on request. The forward pass may fail."""

    def __init__(self):
        super().__init__()
        self.side, self.first, self.last = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x, side, fails=False):
        x = self.side(x) if side else x
        if fails:
            raise ZeroDivisionError
        return self.last(torch.tanh(self.first(torch.tanh(x)))).square().mean()


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["probe", "raise"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_forward_pass_without_backward_misleads_no_later_step(setting, how, tmp_path):
    reference_model, reference = plain(Sides)
    with training(Sides, tmp_path, **SETTINGS[setting]) as (model, engine, optimizer):
        for step, side in enumerate([True, True, False, True, True]):
            x = torch.randn(4, H, generator=torch.Generator().manual_seed(step))
            for each, update in ((reference_model, reference), (model, optimizer)):
                if step == 2 and how == "probe":
                    each(x, True)
                elif step == 2:
                    with pytest.raises(ZeroDivisionError):
                        each(x, True, fails=True)
                    update.zero_grad()
                each(x, side).backward()
                update.step()
                update.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("orders", ["pppp", "ffff", "lllll", "pffp"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_micro_batches_with_different_layers_mislead_no_later_step(setting, orders, tmp_path):
    """"p": forward and backward in turn. "f": all forward passes first. "l": as "f", with backward passes in reverse order."""
    sides = [(True, True), (True, True), (False, True), (True, False), (True, True)]
    reference_model, reference = plain(Sides)
    with training(Sides, tmp_path, options={"accumulation_steps": 2}, **SETTINGS[setting]) as (model, engine, optimizer):
        for step, (order, used) in enumerate(zip(orders, sides)):
            for each, update in ((reference_model, reference), (model, optimizer)):
                losses = []
                for micro, side in enumerate(used):
                    x = torch.randn(4, H, generator=torch.Generator().manual_seed(10 * step + micro))
                    losses.append(each(x, side))
                    if order == "p":
                        losses.pop().backward()
                for loss in reversed(losses) if order == "l" else losses:
                    loss.backward()
                update.step()
                update.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


def blocks_without_biases(recompute):
    """The backward pass of such a layer asks for the weight before the input. A checkpoint computes the input again."""

    def build(self):
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(H, 4 * H, bias=False), nn.GELU(), nn.Linear(4 * H, H, bias=False)) for _ in range(3)
        )

    def run(self, x):
        for block in self.blocks:
            x = x + recompute(block, x)
        return x

    return Model(build, run)


RECOMPUTE = {
    "infinity": infinity.checkpoint,
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "by parts": lambda block, x: checkpoint(lambda y: block[2](block[1](block[0](y))), x, use_reentrant=False),
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("how", RECOMPUTE)
@pytest.mark.parametrize("setting", ["backward", "deferred"])
def test_recomputed_blocks_fit_in_the_least_device_memory(setting, how, retain, tmp_path):
    def make():
        return blocks_without_biases(RECOMPUTE[how])

    config = SETTINGS[setting] | {"tile_above": None}
    least = helpers.least_device_memory(make, tmp_path / "least", trained=False, **config)
    reference_model, reference = plain(make)
    with training(make, tmp_path / "swap", device_memory=least, **config) as (model, engine, optimizer):
        for step in range(4):
            for each, update in ((reference_model, reference), (model, optimizer)):
                loss_of(each(inputs(each, step).requires_grad_())).backward(retain_graph=retain)
                update.step()
                update.zero_grad()
        assert engine.stats()["peak_device_nbytes"] <= least
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.few(2)
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_reentrant_checkpoints_outside_any_module_are_one_backward_pass(setting, tail, tmp_path):
    def loss_through(model, step):
        x = inputs(model, step).requires_grad_()
        for layer in model.layers[: 3 if tail else 4]:
            x = checkpoint(layer, x, use_reentrant=True)
        return loss_of(model.layers[3](x) if tail else x)

    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **SETTINGS[setting]) as (model, engine, optimizer):
        for step in range(3):
            for each, update in ((reference_model, reference), (model, optimizer)):
                (loss_through(each, step) + loss_through(each, step + 10)).backward()
                update.step()
                update.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


def test_an_evaluation_before_backward_does_not_change_the_graph(tmp_path):
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        for step in range(3):
            for m, o in ((reference_model, reference), (model, optimizer)):
                loss = loss_of(m(inputs(m, step)))
                with torch.no_grad():
                    m(inputs(m, 9))
                loss.backward()
                o.step()
                o.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.parametrize("setting", SETTINGS)
def test_evaluation_mode_does_not_change_later_training(setting, tmp_path):
    """After each step, model.eval() and a forward pass without a backward pass change nothing."""
    reference_model, reference = plain(TRAITS["convolution"])
    with training(TRAITS["convolution"], tmp_path, **SETTINGS[setting]) as (model, engine, optimizer):
        for step in range(4):
            plain_step(reference_model, reference, step)
            forward_backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            for m in (model, reference_model):
                m.eval()
                m(inputs(m, 30))  # the graph is dropped
                m.train()
        assert_equals_reference(engine, model, reference_model, reference)


def test_inference_needs_no_optimizer(tmp_path):
    reference_model, _ = plain(mlp)
    torch.manual_seed(0)
    model = mlp()
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, **NVME)
    with infinity.offload(model, config) as engine:
        for step in range(3):
            with torch.no_grad():
                helpers.assert_same_bits(model(inputs(model, step)), reference_model(inputs(model, step)), "output")
            assert_nothing_held(engine)
        with pytest.raises(UsageError, match="its engine has no optimizer. Make infinity.AdamW"):
            loss_of(model(inputs(model, 0))).backward()


@pytest.mark.parametrize("retain", [False, True])
def test_gradients_of_inputs_are_those_of_plain_pytorch(retain, tmp_path):
    reference_model, _ = plain(mlp)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        x, y = (inputs(model, 1).requires_grad_() for _ in range(2))
        for _ in range(2):
            (got,) = torch.autograd.grad(loss_of(model(x)), x, retain_graph=retain)
            (expected,) = torch.autograd.grad(loss_of(reference_model(y)), y)
            helpers.assert_same_bits(got, expected, "gradient of the input")
            optimizer.zero_grad()
            assert_nothing_held(engine)


def test_gradients_of_gradients_are_refused(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        x = inputs(model, 1).requires_grad_()
        with pytest.raises(UsageError, match="create_graph=True"):
            torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        optimizer.zero_grad()
        forward_backward(model, 1)
        optimizer.step()


@pytest.mark.few(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_retained_graph_gives_its_gradient_twice(setting, use_reentrant, tmp_path):
    make = TRAITS["checkpoint_reentrant" if use_reentrant else "mlp"]
    config = SETTINGS[setting] | {"options": {"accumulation_steps": 2}}
    if setting != "resident":
        config |= {"device_memory": helpers.least_device_memory(make, tmp_path, **config)}
    reference_model, reference = plain(make)
    with training(make, tmp_path, **config) as (model, engine, optimizer):
        for step in range(3):
            for m, o in ((reference_model, reference), (model, optimizer)):
                loss = loss_of(m(inputs(m, step)))
                loss.backward(retain_graph=True)
                loss.backward()
                o.step()
                o.zero_grad()
                del loss
            assert_nothing_held(engine)
        assert_equals_reference(engine, model, reference_model, reference)


def test_a_backward_pass_over_a_graph_older_than_the_step_raises(tmp_path):
    for name, setting in SETTINGS.items():
        with training(mlp, tmp_path / name, options={"accumulation_steps": 1}, **setting) as (model, engine, optimizer):
            loss = loss_of(model(inputs(model, 0)))
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            optimizer.zero_grad()
            forward_backward(model, 1)
            optimizer.step()


def test_a_saved_activation_changed_in_place_raises(tmp_path):
    def run(self, x):
        y = self.first(x).exp()
        z = y * y
        y.add_(1)
        return self.last(z)

    def build(self):
        self.first, self.last = nn.Linear(H, H), nn.Linear(H, H)

    class Inner(nn.Module):
        """An op, in which the engine's saved-tensor hooks are active."""

        def __init__(self):
            super().__init__()
            build(self)

        def forward(self, x):
            return run(self, x)

    with training(Inner, tmp_path, **NVME) as (model, engine, optimizer):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(torch.randn(3, H)).sum().backward()


# Failures


class Boom(Exception):
    pass


class Bomb(torch.autograd.Function):
    armed = None

    @staticmethod
    def forward(ctx, x):
        if Bomb.armed == "forward":
            raise Boom
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Bomb.armed == "backward":
            raise Boom
        return grad


def mined(depth=6):
    """A chain that raises in the middle layer if Bomb is armed."""

    def build(self):
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(depth))

    def run(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == depth // 2:
                x = Bomb.apply(x)
        return x

    return Model(build, run)


@pytest.fixture
def bomb():
    yield Bomb
    Bomb.armed = None


@pytest.mark.few(3)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("setting", ["deferred", "resident"])
def test_a_step_may_be_repeated_after_an_exception(setting, where, checkpoint, tmp_path, bomb):
    if checkpoint:
        make = lambda: Model(
            lambda m: m.add_module("inner", mined()),
            lambda m, x: torch.utils.checkpoint.checkpoint(m.inner, x, use_reentrant=False),
        )
    else:
        make = mined
    config = SETTINGS[setting] | {"update": "deferred"}
    reference_model, reference = plain(make)
    with training(make, tmp_path, **config) as (model, engine, optimizer):
        for step in range(4):
            plain_step(reference_model, reference, step)
            if step in (0, 2):
                bomb.armed = where
                with pytest.raises(Boom):
                    forward_backward(model, step)
                bomb.armed = None
                if where == "backward":
                    with pytest.raises(UsageError, match="raised; call zero_grad"):
                        optimizer.step()
                optimizer.zero_grad()
                assert_nothing_held(engine)
            forward_backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            assert_nothing_held(engine)
        assert_equals_reference(engine, model, reference_model, reference)


def test_a_backward_pass_that_fails_after_updates_forbids_training(tmp_path, bomb):
    with training(mined, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        forward_backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        bomb.armed = "backward"
        with pytest.raises(Boom):
            forward_backward(model, 1)
        bomb.armed = None
        with pytest.raises(UsageError, match="raised; call zero_grad|weights are of two steps"):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(UsageError, match="failed half-way and had begun to update"):
            forward_backward(model, 1)
        with pytest.raises(UsageError, match="weights are of two steps"):
            optimizer.step()
        with torch.no_grad():
            model(inputs(model, 0))


def test_a_backward_pass_that_fails_before_updates_may_be_repeated(tmp_path, bomb):
    """The last layer's gradient comes first. Backward raises before this gradient, so no update has begun."""

    def make():
        def build(self):
            self.first, self.last = nn.Linear(H, H), nn.Linear(H, H)

        return Model(build, lambda self, x: Bomb.apply(self.last(self.first(x))))

    reference_model, reference = plain(make)
    with training(make, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        bomb.armed = "backward"
        with pytest.raises(Boom):
            forward_backward(model, 0)
        bomb.armed = None
        optimizer.zero_grad()
        forward_backward(model, 0)
        optimizer.step()
        plain_step(reference_model, reference, 0)
        assert_equals_reference(engine, model, reference_model, reference)


# Refusals and detected writes


@pytest.mark.parametrize("dtype, wanted", [("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "bf16")])
def test_autocast_to_another_dtype_is_refused(tmp_path, dtype, wanted):
    with training(mlp, tmp_path, dtype=dtype, **NVME) as (model, engine, optimizer):
        with torch.autocast("cpu", dtype=TORCH_DTYPES[wanted]), pytest.raises(UsageError, match=f'dtype="{wanted}"'):
            model(inputs(model, 0).to(TORCH_DTYPES[dtype]))


def test_autocast_to_the_dtype_of_the_engine_changes_nothing(tmp_path, one_thread):
    def trained(context):
        with training(mlp, tmp_path, dtype="bf16", **NVME) as (model, engine, optimizer):
            for step in range(3):
                with context:
                    output = model(inputs(model, step).bfloat16())
                output.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return states_of(engine, model)

    assert_same_states(trained(torch.autocast("cpu", dtype=torch.bfloat16)), trained(contextlib.nullcontext()))


def test_functional_gradients_over_parameters_are_refused(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        x = inputs(model, 0)
        params = dict(model.named_parameters())
        with pytest.raises(UsageError, match="torch.func"):
            torch.func.grad(lambda p: loss_of(torch.func.functional_call(model, p, (x,))))(params)


@pytest.mark.parametrize("write", ["fill_", "zeros_", "index", "replace"])
def test_a_write_that_bypasses_the_parameter_class_is_detected(write, tmp_path):
    """Code in C writes in this way."""
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        forward_backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        weight = model.layers[1].weight
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            match write:
                case "fill_":
                    weight.fill_(1.0)
                case "zeros_":
                    nn.init.zeros_(weight)
                case "index":
                    weight[0, 0] = 2.0
                case "replace":
                    torch._C.TensorBase.data.__set__(weight, torch.ones(H, H))
        with pytest.raises(UsageError, match=r"layers\.1\.weight was .*infinity.gathered"):
            model(inputs(model, 0))
        model(inputs(model, 0))  # the error comes once. The stored value is unchanged
        assert_nothing_held(engine)


def test_closing_removes_all_hooks_from_the_modules(tmp_path):
    model = mlp()
    with training(lambda: model, tmp_path, **NVME) as (_, engine, optimizer):
        forward_backward(model, 0)
        optimizer.step()
    for name, module in model.named_modules():
        assert type(module._parameters) is dict
        assert not module._forward_hooks
        assert len(module._forward_pre_hooks) == (not name)  # the hook of the root reports that the engine is closed
    with pytest.raises(UsageError, match="closed"):
        model(inputs(model, 0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resident_model_has_values_from_the_first_op_until_the_step(dtype, tmp_path):
    """The engine fetches and traces no op of a resident model. Between steps, values are written, read and refused as in other placements."""
    reference_model, reference = plain(mlp, dtype=dtype)
    with training(mlp, tmp_path, dtype=dtype) as (model, engine, optimizer):
        assert isinstance(engine.hooks, ResidentHooks)
        weight_dtype = model.layers[0].weight.dtype
        for step in range(6):
            called = [each.layers[step % 4] if step % 3 == 1 else each for each in (reference_model, model)]
            x = inputs(model, step)
            losses = [loss_of(op(x.to(next(op.parameters()).dtype))) for op in called]
            with torch._C.DisableTorchFunctionSubclass():
                assert all(torch.equal(param, param) for param in model.parameters())
            assert not engine.course.trace
            for loss, update in zip(losses, (reference, optimizer)):
                loss.backward()
                update.step()
                update.zero_grad()
            with torch._C.DisableTorchFunctionSubclass():
                assert all(param.isnan().all() for param in called[1].parameters())
            assert_nothing_held(engine)
            helpers.assert_same_bits(losses[1].detach(), losses[0].detach(), f"loss of step {step}")
        assert_equals_reference(engine, model, reference_model, reference)
        with infinity.gathered(model.layers[0].weight):
            model.layers[0].weight.data.fill_(2.0)
        model.layers[1].load_state_dict({"weight": torch.eye(H), "bias": torch.ones(H)})
        for index, value in ((0, torch.full((H, H), 2.0)), (1, torch.eye(H))):
            assert torch.equal(engine.read_state(model.layers[index].weight)["weight"].float(), value)
        model(inputs(model, 0).to(weight_dtype))
        with infinity.gathered(model.parameters()):
            assert model.layers[0].weight.eq(2).all() and model.layers[1].bias.eq(1).all()


@pytest.mark.parametrize("write", ["in place", "replaced"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_write_to_a_device_record_before_step_becomes_its_master(dtype, write, tmp_path):
    reference_model, reference = plain(mlp, dtype=dtype)
    with training(mlp, tmp_path, dtype=dtype, update="deferred") as (model, engine, optimizer):
        assert isinstance(engine.hooks, ResidentHooks)
        for step in range(3):
            for each in (reference_model, model):
                loss_of(each(inputs(model, step).to(reference_model.layers[0].weight.dtype))).backward()
                first, second = each.layers[0].weight, each.layers[2].weight
                with torch.no_grad(), infinity.gathered([first, second]) if each is model else contextlib.nullcontext():
                    match write if step == 1 else None:
                        case "in place":
                            first.mul_(-0.0)
                            second.fill_(3.0)
                        case "replaced":
                            first.data = torch.full_like(first, 0.5)
                if step == 1 and each is reference_model:
                    for param in (first, second):
                        if write != "replaced" or param is first:
                            reference.state[param]["master"] = param.detach().float()
            for update in (reference, optimizer):
                update.step()
                update.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.parametrize("change", ["half", "numpy", "view"])
def test_an_engine_closes_after_any_use_of_gathered_weights(change, tmp_path):
    with training(mlp, tmp_path) as (model, engine, _):
        model(inputs(model, 0))
        weight = model.layers[0].weight
        with infinity.gathered(model.parameters()):
            expected = weight.detach().clone()
            match change:
                case "half":
                    with pytest.raises(UsageError, match="was given data of shape .*float16 on cpu, as by model.to"):
                        model.half()
                case "numpy":
                    kept = torch.from_numpy(weight.detach().numpy())
                case "view":
                    kept = weight.detach()
        engine.close()
        with torch._C.DisableTorchFunctionSubclass():
            assert all(param.isnan().all() for param in model.parameters())
        if change != "half":
            assert torch.equal(kept, expected)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_value_written_after_forward_is_detected_in_backward(setting, tmp_path):
    with training(mlp, tmp_path, **SETTINGS[setting]) as (model, engine, optimizer):
        loss = loss_of(model(inputs(model, 0)))
        model.layers[3].load_state_dict({"weight": torch.eye(H), "bias": torch.ones(H)})
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        del loss
        forward_backward(model, 1)
        optimizer.step()
        optimizer.zero_grad()


def test_resident_hooks_are_not_used_for_models_that_need_op_hooks(tmp_path):
    for name, config in {"traced": {"trace": True}, "host": {"optimizer_state_tier": "host"}, "activations": {"activation_tier": "host"}, "fp16": {"dtype": "fp16"}}.items():
        with training(mlp, tmp_path / name, **config) as (model, engine, _):
            assert not isinstance(engine.hooks, ResidentHooks)
    with training(max_norm, tmp_path / "writes", dtype="bf16") as (model, engine, _):
        assert not isinstance(engine.hooks, ResidentHooks)


def test_an_embedding_with_max_norm_keeps_rows_written_in_forward(tmp_path):
    """An evaluation writes too."""
    reference_model, _ = plain(max_norm)
    with training(max_norm, tmp_path, **NVME) as (model, engine, optimizer):
        with torch.no_grad():
            for step in range(3):
                helpers.assert_same_bits(model(inputs(model, step)), reference_model(inputs(model, step)), "output")
        helpers.assert_same_bits(engine.read_state(model.token.weight)["weight"], reference_model.token.weight.detach(), "weight")


@pytest.mark.parametrize("places", [NVME, {"param_tier": "device", "optimizer_state_tier": "device"}, {"param_tier": "device", "optimizer_state_tier": "host"}])
def test_rows_written_in_forward_lose_their_residual_in_every_tier(places, tmp_path):
    options = {"lr": 0.1}
    reference_model, reference = plain(max_norm, dtype="bf16", options=options)
    with training(max_norm, tmp_path, dtype="bf16", options=options, **places) as (model, engine, optimizer):
        for step in range(6):
            for each, opt in ((model, optimizer), (reference_model, reference)):
                loss_of(each(inputs(each, step))).backward()
                opt.step()
                opt.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


class Nested(nn.Module):
    """A module with `depth` nested calls. Returns the live calls of the innermost call."""

    def forward(self, depth):
        return self(depth - 1) if depth else live_calls()


def test_a_call_is_live_while_the_named_function_of_torch_runs():
    """Fails if torch renames the function, see [Note: calls that are over] in module_calls.py."""
    module = Nested()
    wrapper = nn.Sequential(module)
    assert wrapper(3) == {wrapper: 1, module: 4}
    module.register_forward_pre_hook(lambda module, args: None)  # torch calls modules with hooks in a different way
    assert wrapper(3) == {wrapper: 1, module: 4}
    with pytest.raises(TypeError):
        wrapper("no number")
    assert live_calls() == {}


class Interruptible(nn.Module):
    """A chain of five layers. recursive: a call first calls the module again. If `interrupt`, the innermost call raises after layer 3."""

    def __init__(self, recursive=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(5))
        self.recursive = recursive
        self.interrupt = False

    def forward(self, x, depth=1):
        if self.recursive and depth:
            x = self(x, depth - 1)
        for index, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if index == 2 and self.interrupt and depth == 0:
                raise KeyboardInterrupt
        return x


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("then", ["train", "zero_grad", "save", "read", "evaluate"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_after_an_interrupt_in_forward_training_has_the_same_bits(setting, then, recursive, tmp_path):
    def make():
        return Interruptible(recursive)

    def backward(model, step):
        model(torch.full((3, H), 1.0 + step), int(recursive)).square().mean().backward()

    reference_model, reference = plain(make)
    with training(make, tmp_path / "nvme", **SETTINGS[setting]) as (model, engine, optimizer):
        for step in range(6):
            if step in (2, 5):
                model.interrupt = True
                with pytest.raises(KeyboardInterrupt):
                    backward(model, step)
                model.interrupt = False
                if then == "zero_grad":
                    optimizer.zero_grad()
                elif then == "save":
                    infinity.save(tmp_path / f"saved{step}", model, optimizer)
                elif then == "read":
                    engine.read_state(model.layers[0].weight)
                elif then == "evaluate":
                    with torch.no_grad():
                        model(torch.ones(3, H))
            backward(model, step)
            backward(reference_model, step)
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
            assert_nothing_held(engine)
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.parametrize("what", ["weights", "activations"])
def test_a_dropped_graph_returns_its_tensors_without_python_code(what, tmp_path):
    """Python raises an interrupt between lines of Python code. In a finalizer, the interrupt and the rest of the finalizer would be lost."""
    config = NVME if what == "weights" else {"activation_tier": "host"}
    called = []

    def note(frame, event, _):
        if event == "call":
            called.append(frame.f_code.co_name)

    def make():
        return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))

    with training(make, tmp_path, **config) as (model, engine, _):
        graphs = [model(torch.ones(256, 256)).sum()]
        dropped = engine.weights.dropped if what == "weights" else engine.activations._dropped
        engine.weights.drain_dropped()
        before = len(dropped)
        sys.setprofile(note)
        graphs.clear()
        sys.setprofile(None)
        assert called == [] and len(dropped) > before
