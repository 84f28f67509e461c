"""Clipping by torch.nn.utils over gradients that the engine has taken: the result of plain PyTorch, or an error with the remedy."""

import math
import re
import sys

import pytest
import torch
from support.helpers import NVME, training
from support.models import inputs, loss_of, mlp
from support.ranks import World, gpt, settings, share, tokens
from torch import nn

import infinity
from infinity.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
PLACES = {"nvme": NVME, "resident": {}, "host": {"param_tier": "host", "optimizer_state_tier": "host"}}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = World(2, tmp_path_factory.mktemp("two"))
    yield made
    made.close()


SGD = {"optimizer": infinity.SGD, "options": {"lr": 1.0}}  # an update of AdamW hardly depends on the length of gradients


def plainly(make=mlp):
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def steps(model, optimizer, clip, micros=1):
    """Losses and norms of STEPS steps."""
    found = []
    for step in range(STEPS):
        for micro in range(micros):
            loss = loss_of(model(inputs(model, step * micros + micro)))
            loss.backward()
        found += [loss.item(), clip(model, optimizer).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


CLIPS = {
    "clip_grad_norm_": lambda bound: lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), bound),
    "foreach": lambda bound: lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), bound, foreach=True),
    "generator": lambda bound: lambda model, _: nn.utils.clip_grad_norm_((p for p in model.parameters()), bound),
    "in two": lambda bound: lambda model, _: in_two(model, bound),
    "twice": lambda bound: lambda model, _: twice(model, bound),
}


def in_two(model, bound):
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), bound, norm)
    return norm


def twice(model, bound):
    nn.utils.clip_grad_norm_(model.parameters(), 2 * bound)
    return nn.utils.clip_grad_norm_(model.parameters(), bound)


@pytest.mark.few(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bound", [1e-3, 0.02, math.inf])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_by_torch_has_the_result_of_plain_pytorch(clip, bound, place, tmp_path):
    expected = steps(*plainly(), CLIPS[clip](bound))
    with training(mlp, tmp_path, update="deferred", **SGD, **PLACES[place]) as (model, engine, optimizer):
        assert steps(model, optimizer, CLIPS[clip](bound)) == pytest.approx(expected, rel=1e-5)


def evaluation(model):
    with torch.no_grad():
        model(inputs(model, 9))


def gradient_of_inputs(model):
    given = inputs(model, 9).requires_grad_()
    torch.autograd.grad(loss_of(model(given)), given)


BETWEEN = {"evaluation": evaluation, "a forward pass": lambda model: loss_of(model(inputs(model, 9))), "a passing backward": gradient_of_inputs}


@pytest.mark.parametrize("between", BETWEEN)
def test_passes_between_backward_and_clipping_keep_the_gradients(between, tmp_path):
    def clip(model, _):
        BETWEEN[between](model)
        return nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    expected = steps(*plainly(), clip)
    with training(mlp, tmp_path, update="deferred", **SGD, **NVME) as (model, engine, optimizer):
        assert steps(model, optimizer, clip) == pytest.approx(expected, rel=1e-5)


def test_model_zero_grad_after_an_evaluation_drops_the_gradients(tmp_path):
    def run(model, optimizer):
        for step in range(2):
            loss_of(model(inputs(model, step))).backward()
            evaluation(model)
            model.zero_grad()
        loss_of(model(inputs(model, 2))).backward()
        optimizer.step()
        return loss_of(model(inputs(model, 3))).item()

    expected = run(*plainly())
    sgd = {"optimizer": infinity.SGD, "options": {"lr": 1.0, "accumulation_steps": 3}}
    with training(mlp, tmp_path, **sgd, **NVME) as (model, engine, optimizer):
        assert run(model, optimizer) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("micros", [2, 3])
def test_gradients_of_several_passes_are_clipped_together(micros, tmp_path):
    clip = CLIPS["clip_grad_norm_"](1e-3)
    expected = steps(*plainly(), clip, micros)
    sgd = {"optimizer": infinity.SGD, "options": {"lr": 1.0, "accumulation_steps": 3, "max_grad_norm": math.inf}}
    with training(mlp, tmp_path, **sgd, **NVME) as (model, engine, optimizer):
        assert steps(model, optimizer, clip, micros) == pytest.approx(expected, rel=1e-5)


def test_a_negative_factor_of_gradients_keeps_the_norm_positive(tmp_path):
    def run(model, optimizer):
        for step in range(STEPS):
            loss_of(model(inputs(model, step))).backward()
            for param in model.parameters():
                param.grad.mul_(-0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss_of(model(inputs(model, STEPS))).item()

    expected = run(*plainly())
    sgd = {"optimizer": infinity.SGD, "options": {"lr": 1.0, "max_grad_norm": math.inf}}
    with training(mlp, tmp_path, **sgd, **NVME) as (model, engine, optimizer):
        assert run(model, optimizer) == pytest.approx(expected, rel=1e-5)
        assert optimizer.grad_norm > 0


def test_the_optimizer_clips_gradients_that_the_program_has_clipped(tmp_path):
    clip = CLIPS["clip_grad_norm_"](1e-3)
    with training(mlp, tmp_path, options={"max_grad_norm": 0.01}, **NVME) as (model, engine, optimizer):
        steps(model, optimizer, clip)
        assert optimizer.grad_norm == pytest.approx(1e-3, rel=1e-4)


def test_parameters_without_an_engine_count_in_the_norm(tmp_path):
    """The head has no engine."""
    clip = CLIPS["clip_grad_norm_"](1e-3)

    def run(model, optimizer):
        torch.manual_seed(5)
        head = nn.Linear(inputs(model, 0).shape[-1], 3)
        own, norms = torch.optim.AdamW(head.parameters(), lr=1e-2), []
        for step in range(STEPS):
            head(model(inputs(model, step))).square().mean().backward()
            norms.append(clip(nn.ModuleList([model, head]), None).item())
            for each in (optimizer, own):
                each.step()
                each.zero_grad()
        return norms

    expected = run(*plainly())
    with training(mlp, tmp_path, update="deferred", **SGD, **NVME) as (model, engine, optimizer):
        assert run(model, optimizer) == pytest.approx(expected, rel=1e-5)


def test_after_a_norm_request_squares_are_summed_in_backward(tmp_path):
    with training(mlp, tmp_path, update="deferred", **NVME) as (model, engine, optimizer):
        found = []
        for step in range(2):
            loss_of(model(inputs(model, step))).backward()
            found.append([chunk.gradient.squares is not None for chunk in engine.registry.chunks])
            nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            optimizer.step()
            optimizer.zero_grad()
        assert not any(found[0]) and all(found[1])


def test_a_norm_that_is_nan_makes_every_weight_nan(tmp_path):
    with training(mlp, tmp_path, update="deferred", **NVME) as (model, engine, optimizer):
        handle = next(model.parameters()).register_hook(lambda grad: grad * math.nan)
        loss_of(model(inputs(model, 0))).backward()
        assert math.isnan(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        handle.remove()
        assert all(engine.read_state(param)["weight"].isnan().all() for param in model.parameters())


def test_clipping_that_is_too_late_or_unknown_is_refused(tmp_path):
    with training(mlp, tmp_path, update="backward", **NVME) as (model, engine, optimizer):
        loss_of(model(inputs(model, 0))).backward()
        with pytest.raises(UsageError, match=r"max_grad_norm=.*math.inf"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with training(mlp, tmp_path, update="deferred", options={"accumulation_steps": 2}, **NVME) as (model, engine, optimizer):
        params = list(model.parameters())
        loss_of(model(inputs(model, 0))).backward()
        with pytest.raises(UsageError, match="the norm of 2 gradients"):
            nn.utils.clip_grad_norm_(params[:2], 1.0)
        with pytest.raises(UsageError, match="the norm of 8 gradients, of 8: .* each once"):
            nn.utils.clip_grad_norm_([params[0], *params[:-1]], 1.0)
        parts = torch.stack([torch.linalg.vector_norm(param.grad) for param in params])
        assert parts.shape == (8,)
        for read in (parts.max, parts.sum, parts.tolist, lambda: torch.linalg.vector_norm(parts, math.inf), lambda: parts[0]):
            with pytest.raises(UsageError, match="norm of one gradient"):
                read()
        with pytest.raises(UsageError, match="norm of one gradient"):
            torch.linalg.vector_norm(params[0].grad).item()
        with pytest.raises(UsageError, match="param.grad"):
            nn.utils.clip_grad_norm_(params, 1.0, norm_type=math.inf)
        params[0].grad.mul_(0.5)
        with pytest.raises(UsageError, match="a factor of 1 gradients"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model(inputs(model, 0))).backward()
        nn.utils.clip_grad_norm_(params, 1e-3)
        with pytest.raises(UsageError, match="Clip after the last"):
            loss_of(model(inputs(model, 1))).backward()
        optimizer.zero_grad()
        loss_of(model(inputs(model, 0))).backward()
        optimizer.step()
        with pytest.raises(UsageError, match="after backward"):
            nn.utils.clip_grad_norm_(params, 1.0)


def clipped(folder, bound):
    """Trains the GPT on the rank's share of the batch. Returns the norms and the last weights."""
    torch.manual_seed(0)
    model, norms = gpt(), []
    infinity.offload(model, settings(folder, update="deferred", param_tier="nvme", optimizer_state_tier="nvme"))
    optimizer = infinity.SGD(model.parameters(), lr=0.5)
    with infinity.engine_of(model):
        for step in range(STEPS):
            model(*map(share, tokens(step, 0))).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), bound).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms, model.state_dict()


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("bound", [0.5, math.inf])
def test_two_ranks_have_the_norm_and_clipping_of_one_process(world, tmp_path, bound):
    torch.manual_seed(0)
    model, norms = gpt(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        model(*tokens(step, 0)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), bound).item())
        optimizer.step()
        optimizer.zero_grad()
    for found, weights in world.run(clipped, tmp_path, bound):
        assert found == pytest.approx(norms, rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def clipped_alone(folder, ask):
    """Asserts the error of each rank if one rank clips differently."""
    model = gpt()
    infinity.offload(model, settings(folder, update="deferred", param_tier="nvme", optimizer_state_tier="nvme"))
    optimizer = infinity.SGD(model.parameters(), lr=0.5)
    with infinity.engine_of(model) as engine:
        model(*map(share, tokens(0, 0))).backward()
        with pytest.raises(UsageError, match="Clip on all ranks alike"):
            if ask == "other bounds" or engine.ranks.rank == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (1 + engine.ranks.rank))
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("ask", ["one rank", "other bounds"])
def test_ranks_that_clip_differently_are_refused(world, tmp_path, ask):
    world.run(clipped_alone, tmp_path, ask)


@pytest.mark.parametrize("bound", [1e-3, math.inf])
def test_clipping_needs_no_declaration_if_the_device_holds_all_records(bound, tmp_path):
    expected = steps(*plainly(), CLIPS["clip_grad_norm_"](bound))
    with training(mlp, tmp_path, **SGD) as (model, engine, optimizer):
        assert not engine.updater.deferred and all(chunk.on_device for chunk in engine.registry.chunks)
        assert steps(model, optimizer, CLIPS["clip_grad_norm_"](bound)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("place", ["nvme", "host"])
def test_clipping_that_comes_too_late_names_the_line_to_change(place, tmp_path):
    torch.manual_seed(0)
    model = mlp()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", host_memory="64MiB", **PLACES[place])):
        line = sys._getframe().f_lineno + 1
        infinity.Lion(model.parameters())
        loss_of(model(inputs(model, 0))).backward()
        with pytest.raises(UsageError, match=rf"{re.escape(__file__)}:{line}: infinity.Lion\(\.\.\., max_grad_norm=1.0\)"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
