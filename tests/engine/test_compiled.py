"""Modules that torch.compile compiles as one: one graph each, without a break, with the bits of plain PyTorch compiled in the same way."""

from pathlib import Path

import pytest
import torch
from support import helpers
from support.helpers import NVME, assert_equals_reference, assert_nothing_held, assert_same_bits, plain, training
from support.models import H, inputs, loss_of, mlp, tokens
from support.ranks import World
from torch import nn
from torch._dynamo.utils import counters

import infinity
from infinity.errors import BudgetError
from infinity.model.compiled import compiled_call_of
from infinity.model.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

PLACES = {
    "device": {"param_tier": "device", "optimizer_state_tier": "device", "residency": "auto", "device_memory": "auto"},
    "host": {"param_tier": "host", "optimizer_state_tier": "host", "residency": "auto", "device_memory": "auto"},
    "nvme": NVME | {"device_memory": "auto"},
}


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def wrap_blocks(model, **options):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **options)
    return model


def compile_blocks(model, **options):
    for block in model.blocks:
        block.compile(**options)
    return model


def compile_forwards(model, **options):
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **options)
    return model


def compile_model(model, **options):
    model.compile(**options)
    return model


WAYS = {
    "wrappers": wrap_blocks,
    "in place": compile_blocks,
    "forward": compile_forwards,
    "model": torch.compile,
    "model in place": compile_model,
}


def gpt(**options):
    return GPT(hidden=16, layers=3, heads=2, vocab=61, seq=12, **options)


def gpt_loss(model, step):
    return model(*tokens(step))


def train(called, optimizer, steps=4, loss=gpt_loss):
    """The losses, and the numbers of graphs and graph breaks after each step."""
    torch._dynamo.reset()
    counters.clear()
    losses, counts = [], []
    for step in range(steps):
        value = loss(called, step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
        counts.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return losses, counts


def assert_as_plain(make, directory, way, *, before=False, options=None, dtype="fp32", loss=gpt_loss, counts=((1, 0),) * 4, **config):
    """A model that is compiled before or after the engine starts has the bits of plain PyTorch. After each step, the numbers of graphs and
    breaks are equal too."""
    options = {"backend": "aot_eager", "fullgraph": True} | (options or {})
    reference_model, reference = plain(make, dtype=dtype)
    expected, found = train(WAYS[way](reference_model, **options), reference, loss=loss)
    assert found == list(counts)
    made, num_frames = {}, dict(counters["frames"])  # how many functions were compiled

    def make_compiled():
        made["called"] = WAYS[way](model := make(), **options)
        return model

    with training(make_compiled if before else make, directory, dtype=dtype, **config) as (model, engine, optimizer):
        called = made["called"] if before else WAYS[way](model, **options)
        losses, found = train(called, optimizer, loss=loss)
        for step, pair in enumerate(zip(losses, expected, strict=True)):
            assert_same_bits(*pair, f"loss of step {step}")
        assert found == list(counts) and dict(counters["frames"]) == num_frames
        assert_nothing_held(engine)
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_compiled_before_or_after_the_start_is_one_graph(way, before, tmp_path):
    assert_as_plain(gpt, tmp_path, way, before=before, **PLACES["nvme"])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("way", ["wrappers", "in place", "forward"])
def test_compiled_modules_train_in_device_and_host_memory(way, place, tmp_path):
    assert_as_plain(gpt, tmp_path, way, **PLACES[place])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["wrappers", "in place", "model"])
def test_checkpoints_may_be_around_or_inside_compiled_modules(way, tmp_path):
    assert_as_plain(lambda: gpt(checkpoint_activations=True), tmp_path, way, before=True, **PLACES["nvme"])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["wrappers", "model in place"])
def test_tied_weights_may_be_inside_and_outside_a_compiled_module(way, tmp_path):
    assert_as_plain(lambda: gpt(tie=True), tmp_path, way, **PLACES["nvme"])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["wrappers", "in place"])
def test_the_least_memory_is_enough_for_compiled_blocks(way, tmp_path):
    """Each compiled block is one op. The planner's least memory for these is enough, and one byte less is refused."""
    make = lambda: WAYS[way](gpt(), backend="aot_eager")
    nbytes = helpers.least_device_memory(make, tmp_path, **NVME)
    assert nbytes > helpers.least_device_memory(gpt, tmp_path, **NVME)
    assert_as_plain(gpt, tmp_path, way, before=True, **NVME, device_memory=nbytes)


def mlp_loss(model, step):
    return loss_of(model(inputs(getattr(model, "_orig_mod", model), 0)))


def wrap_layers(model, **options):
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, **options)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_compiled_layers_of_torch_are_one_graph_each(before, tmp_path, monkeypatch):
    """torch.compile wraps torch's own layers in another function, so hooks of the layer would be compiled too."""
    monkeypatch.setitem(WAYS, "layers", wrap_layers)
    assert_as_plain(mlp, tmp_path, "layers", before=before, loss=mlp_loss, counts=[(2, 0)] * 4, **PLACES["nvme"])


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.shape = nn.Linear(H, H), nn.Linear(H, H), (3, H)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.second(x))


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["model", "model in place"])
def test_a_module_with_a_graph_break_gets_no_other_breaks(way, tmp_path):
    assert_as_plain(Broken, tmp_path, way, options={"fullgraph": False}, loss=mlp_loss, counts=[(2, 1)] * 4, **PLACES["nvme"])


@pytest.mark.slow
def test_a_compiled_function_that_calls_a_model_breaks_at_its_ops(tmp_path):
    """A function has no entry that the engine can hook. Weights are fetched inside, as without torch.compile."""
    reference_model, reference = plain(mlp)
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        function = torch.compile(lambda model, step: model(inputs(model, step)).square().mean(), backend="aot_eager")
        for step in range(3):
            for m, o, f in ((reference_model, reference, lambda m, step: m(inputs(m, step)).square().mean()), (model, optimizer, function)):
                f(m, step).backward()
                o.step()
                o.zero_grad()
        for (name, p), theirs in zip(model.named_parameters(), reference_model.parameters(), strict=True):
            torch.testing.assert_close(engine.read_state(p)["weight"], theirs.detach(), msg=name)


@pytest.mark.long
def test_compiled_layers_of_llama_are_one_graph_each(tmp_path):
    """Llama's layers call checkpoint() in `__call__`. layer.compile() does not compile this call, torch.compile(layer) does."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}

    def make():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, use_cache=False, tie_word_embeddings=True, **sizes))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.blocks = model.model.layers  # the name that compile_blocks uses
        return model.train()

    def loss(model, step):
        return model(input_ids=tokens(step)[0], labels=tokens(step)[0]).loss

    for way in ("wrappers", "in place"):
        assert_as_plain(make, tmp_path, way, loss=loss, **PLACES["nvme"])


@pytest.mark.slow
def test_inductor_compiles_a_model_as_one_graph(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        losses, found = train(torch.compile(model, fullgraph=True), optimizer, loss=mlp_loss)
    assert found == [(1, 0)] * 4
    for got, expected in zip(losses, train(*plain(mlp), loss=mlp_loss)[0], strict=True):
        torch.testing.assert_close(got, expected)


# Other calls


@pytest.mark.slow
def test_calls_that_bypass_compilation_have_the_same_bits(tmp_path):
    reference_model, reference = plain(gpt)
    with training(gpt, tmp_path, **NVME) as (model, engine, optimizer):
        called = torch.compile(model, backend="eager", fullgraph=True)
        for step in range(4):
            reference_value = gpt_loss(reference_model, step)
            with torch.compiler.set_stance("force_eager" if step % 2 else "default"):
                value = gpt_loss(called, step)
            with torch.no_grad():
                for each in (model, called):
                    assert_same_bits(gpt_loss(each, step), reference_value.detach(), f"evaluation of step {step}")
            for loss, o in ((value, optimizer), (reference_value, reference)):
                loss.backward()
                o.step()
                o.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


def test_a_module_with_compilation_disabled_is_planned_by_op(tmp_path):
    with training(gpt, tmp_path, **NVME) as (model, engine, optimizer):
        train(torch.compiler.disable(model), optimizer, steps=2)
        uses = [use.key for use in engine.course.route.uses if use.key[0] == "forward"]
        assert len(uses) == 2 + 3 * 6 + 2, "expected one use of each module that has parameters"


def test_after_close_modules_are_compiled_as_before(tmp_path):
    with training(lambda: WAYS["in place"](gpt(), backend="eager"), tmp_path, **NVME) as (model, engine, optimizer):
        assert all("compile" in vars(block) for block in model.blocks)
    for module in model.modules():
        assert "compile" not in vars(module) and compiled_call_of(module) is None
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules() if module is not model)


# Other settings


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["wrappers", "model in place"])
def test_the_loss_scale_is_applied_outside_the_compiled_module(way, tmp_path):
    found = []
    for compiles in (False, True):
        with training(gpt, tmp_path, **NVME, dtype="fp16") as (model, engine, optimizer):
            called = WAYS[way](model, backend="aot_eager", fullgraph=True) if compiles else model
            found.append((train(called, optimizer)[0], engine.stats()["loss_scale"]))
    (expected, scale), (losses, scale_compiled) = found
    assert scale_compiled == scale
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_activations_of_compiled_modules_leave_the_device(tmp_path):
    assert_as_plain(gpt, tmp_path, "in place", dtype="bf16", activation_tier="host", **PLACES["nvme"])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["wrappers", "model"])
def test_a_module_may_be_compiled_inside_init(way, tmp_path):
    options = {"backend": "aot_eager", "fullgraph": True}
    reference_model, reference = plain(gpt)
    expected, _ = train(WAYS[way](reference_model, **options), reference)
    torch.manual_seed(0)
    with infinity.init(infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", host_memory="64MiB", **NVME)):
        called = WAYS[way](gpt(), **options)
    with infinity.engine_of(called):
        losses, found = train(called, infinity.AdamW(called.parameters(), lr=1e-2))
    assert found == [(1, 0)] * 4
    for step, pair in enumerate(zip(losses, expected, strict=True)):
        assert_same_bits(*pair, f"loss of step {step}")


@pytest.mark.few(1)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("way", ["model", "model in place"])
def test_a_compiled_model_may_be_evaluated_before_the_optimizer_exists(way, before, tmp_path):
    """The engine then starts inside the compiled module. Only this call may have a graph break."""
    reference_model, _ = plain(gpt)
    torch.manual_seed(0)
    model = gpt()
    called = WAYS[way](model, backend="eager") if before else None
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", host_memory="64MiB", **NVME)) as engine:
        called = called if before else WAYS[way](model, backend="eager")
        for _ in range(2):
            with torch.no_grad():
                assert_same_bits(gpt_loss(called, 0), gpt_loss(reference_model, 0).detach(), "loss")
            assert_nothing_held(engine)
        _, found = train(called, infinity.AdamW(model.parameters(), lr=1e-2))
    assert found == [(1, 0)] * 4


def train_on_a_rank(folder, way):
    torch.set_num_threads(1)
    make = lambda: WAYS[way](gpt(), backend="aot_eager", fullgraph=True) if way else gpt()
    with training(make, Path(folder), **NVME) as (model, engine, optimizer):
        losses, found = train(model, optimizer)
        return [loss.item() for loss in losses], found


@pytest.mark.long
def test_two_ranks_have_one_graph_and_equal_losses(tmp_path):
    world = World(2, tmp_path)
    try:
        expected = world.run(train_on_a_rank, tmp_path / "plain", None)
        got = world.run(train_on_a_rank, tmp_path / "compiled", "in place")
    finally:
        world.close()
    assert [losses for losses, _ in got] == [losses for losses, _ in expected]
    assert all(found == [(1, 0)] * 4 for _, found in got)


# Interrupts and refusals


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["wrappers", "in place", "forward"])
def test_an_interrupt_in_a_compiled_module_leaves_no_weights_held(way, tmp_path):
    interrupts = []

    def backend(graph, examples):
        def run(*args):
            if interrupts:
                raise interrupts.pop()
            return graph(*args)

        return run

    reference_model, reference = plain(lambda: WAYS[way](gpt(), backend="eager"))
    with training(gpt, tmp_path, **PLACES["nvme"]) as (model, engine, optimizer):
        WAYS[way](model, backend=backend)
        for step in range(4):
            if step in (1, 2):
                interrupts.append(KeyboardInterrupt() if step == 1 else ValueError())
                with pytest.raises((KeyboardInterrupt, ValueError)):
                    gpt_loss(model, step)
            for m, o in ((model, optimizer), (reference_model, reference)):
                gpt_loss(m, step).backward()
                o.step()
                o.zero_grad()
            assert_nothing_held(engine)
        assert_equals_reference(engine, model, reference_model, reference)


def test_a_compiled_module_that_is_too_large_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(BudgetError, match="Raise device_memory, or compile smaller modules"):
        with training(lambda: WAYS["model in place"](gpt(), backend="eager"), tmp_path, **NVME, device_memory="32KiB"):
            pass
    with training(gpt, tmp_path, **NVME, device_memory="32KiB") as (model, engine, optimizer):
        refusal = r"GPT is compiled as one region, and needs all its weights at once: .* Compile smaller modules"
        with pytest.raises(BudgetError, match=refusal):
            model.compile(backend="eager")
        called = torch.compile(model, backend="eager")
        with pytest.raises(BudgetError, match=refusal):
            gpt_loss(called, 0)
        assert_nothing_held(engine)
        losses, _ = train(model, optimizer, steps=2)
    reference_model, reference = plain(gpt)
    for got, expected in zip(losses, train(reference_model, reference, steps=2)[0], strict=True):
        assert_same_bits(got, expected, "loss")
