"""Gradients that the program computes, sets, keeps or reads itself: the result of plain PyTorch, or a refusal that names the remedy."""

import pytest
import torch
from support.helpers import NVME, assert_same_states, states_of, training
from support.models import inputs, loss_of, mlp
from support.ranks import World, gpt, settings, share, tokens
from torch import nn

import infinity
from infinity.engine.steps.step_state import StepPhase
from infinity.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
PLACES = {
    "device": {},
    "host": {"param_tier": "host", "optimizer_state_tier": "host"},
    "nvme, updates in backward": NVME | {"update": "backward"},
    "nvme, updates after step": NVME | {"update": "deferred"},
}
SGD = {"optimizer": infinity.SGD, "options": {"lr": 0.5}}


def plainly():
    torch.manual_seed(0)
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def loss(model, step):
    return loss_of(model(inputs(model, step)))


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def assert_as_plain(program, tmp_path, **config):
    """Asserts that program(model, optimizer) ends with the weights of plain PyTorch."""
    expected = plainly()
    program(*expected)
    with training(mlp, tmp_path, **SGD, **config) as (model, engine, optimizer):
        program(model, optimizer)
        assert_close(weights(model), weights(expected[0]))


# ---- torch.autograd.grad, and param.grad = ... ----


def set_by_hand(model, optimizer, first=0):
    """Gradients of all parameters, or of those from number `first` on."""
    for step in range(STEPS):
        params = list(model.parameters())[first:]
        for param, grad in zip(params, torch.autograd.grad(loss(model, step), params)):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()


def set_for_some(model, optimizer):
    set_by_hand(model, optimizer, first=1)


def set_anew_without_zero_grad(model, optimizer):
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.01 * (step + 1))
        optimizer.step()


def set_and_overwritten_after_step(model, optimizer):
    memory = [torch.ones_like(param) for param in model.parameters()]
    for _ in range(STEPS):
        for param, grad in zip(model.parameters(), memory):
            param.grad = grad.fill_(0.01)
        optimizer.step()
        optimizer.zero_grad()
        for grad in memory:
            grad.fill_(100.0)


def set_and_clipped(model, optimizer):
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = torch.full_like(param, float(step + 1))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def set_before_backward(model, optimizer):
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.01)
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def set_and_dropped(model, optimizer):
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = torch.full_like(param, 100.0)
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def looked_at(model, optimizer):
    for step in range(STEPS):
        value = loss(model, step)
        torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.autograd.grad(loss(model, step), list(model.parameters()))
        optimizer.step()


def by_hand_and_by_backward_in_turn(model, optimizer):
    set_by_hand(model, optimizer)
    set_before_backward(model, optimizer)
    set_for_some(model, optimizer)
    looked_at(model, optimizer)


@pytest.mark.few(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "program",
    [
        set_by_hand,
        set_for_some,
        set_anew_without_zero_grad,
        set_and_overwritten_after_step,
        set_and_clipped,
        set_before_backward,
        set_and_dropped,
        looked_at,
        by_hand_and_by_backward_in_turn,
    ],
    ids=lambda program: program.__name__,
)
def test_gradients_set_by_the_program_train_as_in_plain_pytorch(program, place, tmp_path):
    assert_as_plain(program, tmp_path, **PLACES[place])


@pytest.mark.parametrize("place", PLACES)
def test_autograd_grad_returns_gradients_and_changes_no_state(place, tmp_path):
    plain, _ = plainly()
    expected = torch.autograd.grad(loss(plain, 0), list(plain.parameters()))
    with training(mlp, tmp_path, **PLACES[place]) as (model, engine, optimizer):
        before = states_of(engine, model)
        for found, wanted in zip(torch.autograd.grad(loss(model, 0), list(model.parameters())), expected):
            torch.testing.assert_close(found, wanted)
        optimizer.step()
        assert_same_states(states_of(engine, model), before)
        assert all(param.grad is None for param in model.parameters())


def test_autograd_grad_needs_no_optimizer(tmp_path):
    torch.manual_seed(0)
    model = mlp()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32")):
        assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(loss(model, 0), list(model.parameters())))


@pytest.mark.parametrize("place", PLACES)
def test_autograd_grad_inside_gathered_returns_gradients(place, tmp_path):
    plain, _ = plainly()
    expected = torch.autograd.grad(loss(plain, 0), list(plain.parameters()))
    torch.manual_seed(0)
    model = mlp()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", host_memory="64MiB", **PLACES[place])):
        model(inputs(model, 0))  # starts the engine without an optimizer
        for optimizer in (None, infinity.AdamW(model.parameters(), lr=1e-30)):
            with infinity.gathered(list(model.parameters())):
                found = torch.autograd.grad(loss(model, 0), list(model.parameters()))
            for ours, wanted in zip(found, expected):
                torch.testing.assert_close(ours, wanted)
        loss(model, 0).backward()
        optimizer.step()  # without zero_grad()
        with infinity.gathered(list(model.parameters())):
            torch.autograd.grad(loss(model, 0), list(model.parameters()))


def test_autograd_grad_inside_gathered_with_a_loss_scale_is_refused(tmp_path):
    with training(mlp, tmp_path, dtype="fp16", **NVME) as (model, engine, optimizer):
        with pytest.raises(UsageError, match="autograd.grad of parameters with dtype='fp16'"), infinity.gathered(list(model.parameters())):
            torch.autograd.grad(loss_of(model(inputs(model, 0).half())), list(model.parameters()))
        optimizer.zero_grad()
        loss_of(model(inputs(model, 0).half())).backward()
        optimizer.step()


def test_a_gradient_that_replaces_one_of_the_engine_is_refused(tmp_path):
    with training(mlp, tmp_path, update="deferred", **NVME) as (model, engine, optimizer):
        before = states_of(engine, model)
        loss(model, 0).backward()
        param = next(model.parameters())
        param.grad = torch.ones_like(param)
        with pytest.raises(UsageError, match="was given a value"):
            optimizer.step()
        optimizer.zero_grad()
        assert_same_states(states_of(engine, model), before)


def test_gradients_set_after_updates_have_begun_are_refused(tmp_path):
    with training(mlp, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        first, *others = model.parameters()
        first.requires_grad_(False)
        loss(model, 0).backward()
        first.requires_grad_(True)
        first.grad = torch.ones_like(first)
        with pytest.raises(UsageError, match="after a backward pass that has begun to update"):
            optimizer.step()


def test_gradients_outside_backward_are_refused_with_a_loss_scale(tmp_path):
    with training(mlp, tmp_path, dtype="fp16", **NVME) as (model, engine, optimizer):
        with pytest.raises(UsageError, match="autograd.grad of parameters with dtype='fp16'"):
            torch.autograd.grad(loss_of(model(inputs(model, 0).half())), list(model.parameters()))
        param = next(model.parameters())
        param.grad = torch.ones_like(param)
        with pytest.raises(UsageError, match="param.grad was given a gradient with dtype='fp16'"):
            optimizer.step()


def test_autograd_grad_that_one_engine_refuses_ends_for_all_engines(tmp_path):
    with training(mlp, tmp_path, **SGD, **NVME) as (model, engine, optimizer), training(mlp, tmp_path, dtype="fp16") as (other, *_):
        with pytest.raises(UsageError, match="autograd.grad of parameters with dtype='fp16'") as refusal:
            torch.autograd.grad(loss(model, 0) + loss_of(other(inputs(other, 0).half())), [*model.parameters(), *other.parameters()])
        assert refusal.tb is not None  # a notebook keeps the traceback alive
        loss(model, 0).backward()
        optimizer.step()
        with pytest.raises(UsageError, match="zero_grad"):
            loss(model, 1).backward()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = World(2, tmp_path_factory.mktemp("two"))
    yield made
    made.close()


def set_on_each_rank(folder, update):
    torch.manual_seed(0)
    model = gpt()
    with infinity.offload(model, settings(folder, update=update, param_tier="nvme", optimizer_state_tier="nvme")):
        optimizer = infinity.SGD(model.parameters(), lr=0.5)
        for step in range(STEPS):
            params = list(model.parameters())
            value = model(*map(share, tokens(step, 0)))
            grads = torch.autograd.grad(value, params, retain_graph=True)
            if step % 2:
                value.backward()
            else:
                for param, grad in zip(params, grads):
                    param.grad = grad
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_ranks_take_the_mean_of_gradients_that_the_program_sets(update, world, tmp_path):
    torch.manual_seed(0)
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        model(*tokens(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in world.run(set_on_each_rank, tmp_path, update):
        for name, value in weights(model).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def set_on_one_rank(folder):
    model = gpt()
    with infinity.offload(model, settings(folder, update="deferred", param_tier="nvme", optimizer_state_tier="nvme")) as engine:
        optimizer = infinity.SGD(model.parameters(), lr=0.5)
        model(*map(share, tokens(0, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters() if engine.ranks.rank else ():
            param.grad = torch.ones_like(param)
        if not engine.ranks.rank:
            model(*map(share, tokens(0, 0)))
            engine.cycle.state.become(StepPhase.PASSING)  # the state after a backward pass without gradients of parameters
            engine.cycle.state.end_pass()
        with pytest.raises(UsageError, match="on all ranks"):
            optimizer.step()


def test_a_gradient_set_on_one_rank_only_is_refused_on_all_ranks(world, tmp_path):
    world.run(set_on_one_rank, tmp_path)


# ---- gradients of the last step ----


def drop_by_optimizer(model, optimizer):
    optimizer.zero_grad()


def drop_by_model(model, optimizer):
    model.zero_grad()


def drop_one_by_one(model, optimizer):
    for param in model.parameters():
        param.grad = None


def delete_one_by_one(model, optimizer):
    for param in model.parameters():
        del param.grad


@pytest.mark.few(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("drop", [drop_by_optimizer, drop_by_model, drop_one_by_one, delete_one_by_one], ids=lambda drop: drop.__name__)
def test_gradients_may_be_dropped_before_forward_or_backward(drop, place, tmp_path):
    def program(model, optimizer):
        for step in range(2 * STEPS):
            if step % 2:
                drop(model, optimizer)
            value = loss(model, step)
            if not step % 2:
                drop(model, optimizer)
            value.backward()
            optimizer.step()

    assert_as_plain(program, tmp_path, **PLACES[place])


@pytest.mark.few(3)
@pytest.mark.parametrize("dropped", [0, 1], ids=["none dropped", "one dropped"])
@pytest.mark.parametrize("place", PLACES)
def test_a_backward_pass_that_would_add_to_the_last_step_is_refused(place, dropped, tmp_path):
    with training(mlp, tmp_path, **PLACES[place]) as (model, engine, optimizer):
        loss(model, 0).backward()
        optimizer.step()
        for param in list(model.parameters())[:dropped]:
            param.grad = None
        before = states_of(engine, model)
        with pytest.raises(UsageError, match="still has the gradients of the last step"):
            loss(model, 1).backward()
        assert_same_states(states_of(engine, model), before)
        optimizer.zero_grad()
        loss(model, 1).backward()
        optimizer.step()


def test_layer_wise_accumulation_without_zero_grad_before_is_refused(tmp_path):
    with training(mlp, tmp_path, options={"accumulation_steps": 2}, **NVME) as (model, engine, optimizer):
        batches = [inputs(model, step) for step in range(2)]
        infinity.accumulate(model, batches, lambda model, x: loss_of(model(x)))
        optimizer.step()
        with pytest.raises(UsageError, match="still has the gradients of the last step"):
            infinity.accumulate(model, batches, lambda model, x: loss_of(model(x)))
        optimizer.zero_grad()
        infinity.accumulate(model, batches, lambda model, x: loss_of(model(x)))
        optimizer.step()


# ---- hooks on gradients ----


def note_accumulated(model, found):
    def note(param):
        found.append(param.grad.clone())
        param.grad.mul_(0.5)

    return [param.register_post_accumulate_grad_hook(note) for param in model.parameters()]


def note_each(model, found):
    def note(grad):
        found.append(grad.clone())
        return grad * 0.5

    return [param.register_hook(note) for param in model.parameters()]


def note_all(model, found):
    return [torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda grads: found.extend(grads))]


@pytest.mark.few(5)
@pytest.mark.parametrize("when", ["before the engine", "before the optimizer", "after the optimizer", "in the second step"])
@pytest.mark.parametrize("register", [note_accumulated, note_each, note_all], ids=lambda register: register.__name__)
def test_hooks_get_the_gradients_of_plain_pytorch(register, when, tmp_path):
    def program(make_optimizer, take=lambda model: None):
        torch.manual_seed(0)
        model, found, handles = mlp(), [], []
        if when == "before the engine":
            handles = register(model, found)
        take(model)
        if when == "before the optimizer":
            handles = register(model, found)
        optimizer = make_optimizer(model.parameters(), lr=0.5)
        if when == "after the optimizer":
            handles = register(model, found)
        for step in range(STEPS):
            if step == 1 and when == "in the second step":
                handles = register(model, found)
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        loss(model, STEPS).backward()
        optimizer.step()
        return found, weights(model)

    expected, weights_of_plain = program(torch.optim.SGD)
    engines = []
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", host_memory="64MiB", **NVME)
    found, weights_of_ours = program(infinity.SGD, lambda model: engines.append(infinity.offload(model, config)))
    engines[0].close()
    assert len(found) == len(expected) > 0
    for ours, plain in zip(sorted(found, key=lambda g: (g.shape, g.norm())), sorted(expected, key=lambda g: (g.shape, g.norm()))):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    assert_close(weights_of_ours, weights_of_plain)


@pytest.mark.parametrize("by_layer", [False, True], ids=["loop", "by layer"])
def test_a_hook_on_sums_of_several_passes_is_refused(by_layer, tmp_path):
    with training(mlp, tmp_path, options={"accumulation_steps": 2}, **NVME) as (model, engine, optimizer):
        next(model.parameters()).register_post_accumulate_grad_hook(lambda param: None)
        with pytest.raises(UsageError, match="this is not the first backward pass of its step"):
            if by_layer:
                infinity.accumulate(model, [inputs(model, step) for step in range(2)], lambda model, x: loss_of(model(x)))
            for step in range(2):
                loss(model, step).backward()


@pytest.mark.parametrize("view", [torch.Tensor.expand_as, torch.Tensor.view_as], ids=["expand_as", "view_as"])
def test_a_hook_after_the_accumulation_finds_a_placeholder(view, tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        param, found = next(model.parameters()), []
        like = view(param, param)
        with pytest.raises(UsageError, match="has no value here"):
            like.sum()
        accumulates = like.grad_fn.next_functions[0][0]
        accumulates.register_hook(lambda *_: found.append(param.grad))
        loss(model, 0).backward()
        with pytest.raises(UsageError, match="the engine moves each gradient from param.grad"):
            found[0].norm(p=1)
