import pytest
import torch
from torch import nn

import infinity
from infinity import Config
from infinity.model.gpt import GPT
from infinity.model.tiled_layers import TiledLinear
from infinity.plan import schedule
from infinity.tools.predict.workload import workload

HIDDEN, LAYERS, HEADS, VOCAB, SEQ = 64, 3, 2, 96, 16


def on_meta(make):
    with torch.device("meta"):
        return make()


def gpt_workload(batch=2, recompute=False, **options):
    model = on_meta(lambda: GPT(HIDDEN, LAYERS, HEADS, VOCAB, SEQ, **options))
    tokens = torch.empty(batch, SEQ, dtype=torch.int64, device="meta")
    return model, workload(model, lambda: model(tokens, tokens), tokens=batch * SEQ, recompute=recompute)


def test_ops_are_in_the_order_of_execution_with_their_own_parameters():
    model, load = gpt_workload()
    names = [name for name, _ in model.named_parameters()]
    assert [op.name for op in load.ops[:5]] == ["token", "position", "blocks.0.attention_norm", "blocks.0.attention.qkv", "blocks.0.attention.projection"]
    assert load.ops[-1].name == "head"
    for op in load.ops:
        assert [names[param] for param in op.params] == [name for name in names if name.rpartition(".")[0] == op.name]


def test_flops_are_those_of_the_matrix_products():
    _, load = gpt_workload(batch=2)
    tokens = 2 * SEQ
    by_name = {op.name: op.flops for op in load.ops}
    attention = 2 * 2 * 2 * SEQ * SEQ * HIDDEN  # two products (queries by keys, scores by values), batch 2
    assert by_name["blocks.1.attention.qkv"] == 2 * tokens * HIDDEN * 3 * HIDDEN + attention
    assert by_name["blocks.1.mlp.0"] == by_name["blocks.1.mlp.2"] == 2 * tokens * HIDDEN * 4 * HIDDEN
    assert by_name["head"] == 2 * tokens * HIDDEN * VOCAB
    assert by_name["token"] == 0
    assert load.step_flops == 3 * load.forward_flops


def test_recomputation_adds_the_flops_of_the_blocks():
    _, plain = gpt_workload()
    _, load = gpt_workload(recompute=True)
    blocks = sum(op.flops for op in load.ops if op.block is not None)
    assert load.step_flops == plain.step_flops + blocks
    assert {op.block for op in load.ops} == {None, 0, 1, 2}


def test_activation_checkpoints_keep_block_inputs_and_the_largest_block():
    _, plain = gpt_workload()
    _, load = gpt_workload(recompute=True)
    block_input = 4 * 2 * SEQ * HIDDEN
    per_block = (plain.saved_nbytes - load.saved_nbytes + LAYERS * block_input) / (LAYERS - 1)  # bytes that each further block keeps
    assert load.saved_nbytes < plain.saved_nbytes
    assert 4 * block_input < per_block < 40 * block_input  # q, k, v, attention's output, norms, four wide activations ...


def test_autograd_keeps_weights_of_linears_and_nothing_of_embeddings():
    model, load = gpt_workload()
    names = [name for name, _ in model.named_parameters()]
    kept = {op.name: [names[param] for param in op.kept] for op in load.ops}
    assert kept["token"] == []
    assert kept["blocks.0.mlp.0"] == ["blocks.0.mlp.0.weight"]


def test_a_gradient_is_complete_at_the_first_use_of_its_parameter():
    model, load = gpt_workload(tie=True)
    names = [name for name, _ in model.named_parameters()]
    complete = {names[param]: phase.key for phase in load.phases() for param in phase.grads}
    assert complete["token.weight"] == ("backward", 0)  # the part of the output layer came first
    assert set(complete) == set(names)


@pytest.mark.few(2)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("chunk_mib", [0.03125, 0.25])
def test_the_trace_is_the_one_that_the_engine_records(tmp_path, checkpointed, tie, chunk_mib):
    memory = {"device_memory": "4MiB", "host_memory": "16MiB", "optimizer_state_tier": "host"}
    config = Config(swap_dirs=tmp_path, dtype="fp32", device="cpu", chunk_mib=chunk_mib, **memory)
    torch.manual_seed(0)
    with infinity.init(config):
        model = GPT(HIDDEN, LAYERS, HEADS, VOCAB, SEQ, checkpoint_activations=checkpointed, tie=tie)
    optimizer = infinity.AdamW(model.parameters())
    tokens = torch.randint(0, VOCAB, (2, SEQ))
    with infinity.engine_of(model) as engine:
        for _ in range(2):
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        recorded = [use.spans for use in engine.course.routes[-1].uses]
        span_of = [home.span for home in engine.layout.homes]
    _, load = gpt_workload(recompute=checkpointed, tie=tie)
    uses, flops, grads = load.trace(span_of)
    assert len(uses) == len(flops) == len(grads)
    assert all(isinstance(use, schedule.Use) for use in uses)
    assert in_turn([use.spans for use in uses]) == in_turn(recorded)
    assert sum(flops) == load.step_flops


def in_turn(spans):
    """Removes repetitions: the engine records each saved tensor of an op as a use."""
    return [each for number, each in enumerate(spans) if not number or each != spans[number - 1]]


class Branches(nn.Module):
    """Own parameters around those of a child, a layer that is used twice, and an unused one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return (self.inner(self.inner(x)) * self.scale).sum()


def test_the_workload_of_any_model_on_the_meta_device_is_found():
    model = on_meta(Branches)
    load = workload(model, lambda: model(torch.empty(4, 8, device="meta")), tokens=4)
    assert [op.name for op in load.ops] == ["", "inner", "inner"]
    assert load.ops[1].held == (0,)
    names = [name for name, _ in model.named_parameters()]
    complete = [names[param] for phase in load.phases() for param in phase.grads]
    assert sorted(complete) == ["inner.bias", "inner.weight", "scale"]


def test_tiles_do_not_count_as_blocks():
    model = on_meta(lambda: GPT(HIDDEN, LAYERS, HEADS, VOCAB, SEQ))
    with torch.device("meta"):
        model.head = TiledLinear.from_linear(model.head, 3)
    tokens = torch.empty(2, SEQ, dtype=torch.int64, device="meta")
    load = workload(model, lambda: model(tokens, tokens), tokens=2 * SEQ, recompute=True)
    assert {op.block for op in load.ops if op.name.startswith("head")} == {None}
    assert {op.block for op in load.ops if op.name.startswith("blocks.")} == set(range(LAYERS))
