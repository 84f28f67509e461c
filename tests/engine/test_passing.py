"""Gradients that pass through a frozen model, as in plain PyTorch: critics, teachers, bases, and models that are frozen for some steps."""

import pytest
import torch
from support.helpers import NVME, ReferenceAdamW, assert_nothing_held, assert_same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import UsageError

H = 32
CONFIG = {"device": "cpu", "dtype": "fp32", "chunk_mib": 1 / 512, "host_memory": "64MiB"}
PLACES = {"roomy": {}, "nvme": NVME, "device": {"param_tier": "device", "optimizer_state_tier": "device"}}


class Net(nn.Sequential):
    use_reentrant = None  # True or False: each layer is a checkpoint of that kind

    def forward(self, x):
        for layer in self:
            x = layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def net(outputs=H):
    sizes = [H, H, H, H, outputs]
    return Net(*(layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair), nn.Tanh())))


def made(seed, make=net):
    torch.manual_seed(seed)
    return make()


def inputs(step, *shape):
    return torch.randn(*(shape or (5, H)), generator=torch.Generator().manual_seed(step))


class Engines:
    """The models of a program: in plain PyTorch, or each in an engine with a separate directory."""

    def __init__(self, directory=None, config=None):
        self.directory, self.config, self.engines = directory, config, []

    def take(self, model):
        if self.directory is not None:
            nvme = self.directory / f"swap{len(self.engines)}"
            nvme.mkdir(exist_ok=True)  # another rank may have made the directory
            self.engines.append(infinity.offload(model, infinity.Config(swap_dirs=nvme, **CONFIG | self.config)))
        return model

    def optimizer(self, model, accumulation_steps=1):
        if self.directory is None:
            return ReferenceAdamW(model.parameters(), lr=0.01)
        return infinity.AdamW(model.parameters(), lr=0.01, accumulation_steps=accumulation_steps)

    def close(self):
        for engine in self.engines:
            if engine.has_started:
                assert_nothing_held(engine)
            engine.close()


# Programs: each yields tensors, step by step. `engines` takes their models.


def a_prompt_before_a_frozen_critic(engines, mode):
    critic = engines.take(made(0).requires_grad_(False))
    critic.use_reentrant = {"checkpoints": False, "reentrant checkpoints": True}.get(mode)
    prompt = nn.Parameter(torch.zeros(H))
    optimizer = torch.optim.AdamW([prompt], lr=0.1)
    for step in range(5):
        x = inputs(step) + prompt
        if mode in ("whole checkpoint", "whole reentrant checkpoint"):
            y = checkpoint(critic, x, use_reentrant=mode == "whole reentrant checkpoint")
        else:
            y = critic(x)
        loss = (y - 1).square().mean()
        if mode == "looked at":
            with torch.no_grad():
                yield critic(inputs(step + 50)).sum()
        if mode == "twice":
            loss = loss + critic(prompt * x).sum()
        if mode == "many":
            for _ in range(20):
                critic(x)  # these graphs are never used
        loss.backward(retain_graph=mode == "retained")
        if mode == "retained":
            loss.backward()
        yield loss
        yield prompt.grad.clone()
        optimizer.step()
        optimizer.zero_grad()


def a_frozen_teacher(engines, mode):
    """Distillation of outputs. If `mode` is "perceptual", the student's output also passes through the teacher."""
    teacher, student, head = engines.take(made(0).requires_grad_(False)), engines.take(made(1)), nn.Linear(H, H)
    optimizer = engines.optimizer(student)
    for step in range(4):
        x = inputs(step)
        if mode == "no_grad":
            with torch.no_grad():
                goal = teacher(x)
        else:
            goal = teacher(x)
        y = student(x)
        loss = (y - goal).square().mean()
        if mode == "perceptual":
            loss = loss + (teacher(y) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def two_that_play_against_each_other(engines, mode):
    """Each model is frozen while the other one trains."""
    generator, critic = engines.take(made(0)), engines.take(made(1, lambda: net(outputs=1)))
    ours, theirs = engines.optimizer(generator), engines.optimizer(critic, 2 if mode == "accumulated" else 1)
    for step in range(5):
        if mode != "generator first":
            yield from improve_critic(generator, critic, theirs, step, mode)
        critic.requires_grad_(False)
        for repeat in range(3 if mode == "several" else 1):
            loss = -critic(generator(inputs(100 + step + repeat))).mean()
            loss.backward()
            ours.step()
            ours.zero_grad()
            yield loss
        critic.requires_grad_(True)
        if mode == "generator first":
            yield from improve_critic(generator, critic, theirs, step, mode)


def improve_critic(generator, critic, optimizer, step, mode):
    generator.requires_grad_(False)
    if mode == "accumulated":
        for x, sign in ((inputs(step), -1), (generator(inputs(200 + step)), 1)):
            loss = sign * critic(x).mean()
            loss.backward()
            yield loss
    else:
        loss = critic(generator(inputs(200 + step))).mean() - critic(inputs(step)).mean()
        loss.backward()
        yield loss
    optimizer.step()
    optimizer.zero_grad()
    generator.requires_grad_(True)


def between_backward_and_step(engines, mode):
    """Gradients pass through a model that is frozen for this pass, before the model's own backward pass, or between this and step()."""
    critic, prompt = engines.take(made(0)), nn.Parameter(torch.zeros(H))
    optimizer = engines.optimizer(critic)
    for step in range(4):
        own = critic(inputs(step)).square().mean()
        if mode == "after":
            own.backward()
        critic.requires_grad_(False)
        through = critic(inputs(50 + step) + prompt).mean()
        if mode == "thawed":
            critic.requires_grad_(True)
        through.backward()
        critic.requires_grad_(True)
        if mode != "after":
            own.backward()
        yield own
        yield prompt.grad
        optimizer.step()
        optimizer.zero_grad()


def adapters_beside_a_frozen_base(engines, mode):
    """Layers that were added after the engine took the base. The engine does not manage them."""
    base = engines.take(made(0).requires_grad_(False))
    torch.manual_seed(1)
    adapters = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
    if mode == "inside":
        for index, adapter in zip((0, 4), adapters):
            base[index].register_forward_hook(lambda module, args, output, adapter=adapter: output + adapter(args[0]))
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=0.01)
    for step in range(4):
        x = inputs(step)
        y = base(x) if mode == "inside" else adapters[1](base(adapters[0](x)))
        loss = (y - 1).square().mean()
        loss.backward()
        yield loss
        optimizer.step()
        optimizer.zero_grad()


CHECKPOINTS = ["checkpoints", "reentrant checkpoints", "whole checkpoint", "whole reentrant checkpoint"]
PROGRAMS = {
    a_prompt_before_a_frozen_critic: ["plain", "looked at", "twice", "many", "retained", *CHECKPOINTS],
    a_frozen_teacher: ["plain", "no_grad", "perceptual"],
    two_that_play_against_each_other: ["plain", "several", "generator first", "accumulated"],
    between_backward_and_step: ["after", "before", "thawed"],
    adapters_beside_a_frozen_base: ["inside", "around"],
}


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "program, mode", [pytest.param(p, m, id=f"{p.__name__}-{m}") for p, modes in PROGRAMS.items() for m in modes]
)
def test_gradients_pass_through_frozen_models_as_in_plain_pytorch(program, mode, place, tmp_path):
    shown = {"update": "deferred"} if program is between_backward_and_step else {}  # an update in backward would mix weights of two steps
    engines = Engines(tmp_path, PLACES[place] | shown)
    expected = [value.detach().clone() for value in program(Engines(), mode)]
    got = [value.detach().clone() for value in program(engines, mode)]
    assert len(got) == len(expected)
    for index, values in enumerate(zip(got, expected)):
        assert_same_bits(*values, f"value {index}")
    engines.close()


@pytest.mark.slow
def test_a_frozen_model_is_fetched_ahead_and_keeps_a_bounded_trace(tmp_path):
    critic, prompt, late = made(0).requires_grad_(False), torch.zeros(5, H, requires_grad=True), []
    with infinity.offload(critic, infinity.Config(swap_dirs=tmp_path, **CONFIG | NVME)) as engine:
        for _ in range(5):
            critic(prompt).sum().backward()
            late.append(engine.stats()["num_prefetch_misses"])
        assert engine.stats()["num_prefetch_plans"] == 1
        assert late[1:] == late[1:2] * 4  # from the second pass on, every fetch was ahead of its op
        uses = len(engine.course.trace)
        for step in range(200):
            critic(prompt)
        assert len(engine.course.trace) <= 16 * uses


def test_a_step_after_passes_without_gradients_changes_nothing(tmp_path):
    model = made(0)
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, **CONFIG)) as engine:
        optimizer = infinity.AdamW(model.parameters())
        before = model.state_dict()
        model.requires_grad_(False)
        model(torch.zeros(5, H, requires_grad=True)).sum().backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        with pytest.raises(UsageError, match="without a finished backward pass"):
            optimizer.step()


@pytest.mark.parametrize("through", [False, True])
def test_training_without_an_optimizer_is_refused_with_a_remedy(through, tmp_path):
    model = made(0)
    x = torch.zeros(5, H, requires_grad=through)
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, **CONFIG)):
        with pytest.raises(UsageError, match="infinity.AdamW"):
            model(x).sum().backward()
        if through:
            model.requires_grad_(False)
            model(x).sum().backward()
            assert x.grad.abs().sum() > 0
        else:
            optimizer = infinity.AdamW(model.parameters())
            model(x).sum().backward()
            optimizer.step()


# Two ranks with the same inputs, so their gradients are equal.


def values_of(program, mode, directory, config):
    """Runs on every rank."""
    engines = Engines(directory, config)
    values = [value.detach().clone() for value in globals()[program](engines, mode)]
    engines.close()
    return values


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["roomy", "nvme"])
@pytest.mark.parametrize("program, mode", [(two_that_play_against_each_other, "plain"), (a_frozen_teacher, "perceptual")])
def test_gradients_pass_through_frozen_models_on_two_ranks_as_on_one(program, mode, place, two_ranks, one_thread, tmp_path):
    expected = [value.detach().clone() for value in program(Engines(), mode)]
    for got in two_ranks.run(values_of, program.__name__, mode, tmp_path, PLACES[place]):
        for index, values in enumerate(zip(got, expected, strict=True)):
            assert_same_bits(*values, f"value {index}")
