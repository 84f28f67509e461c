"""Checkpoints of torch.distributed.checkpoint: plain PyTorch, FSDP2 and the engine load each other's checkpoints with the same bits.

Long because all directions share the same worlds, models and checkpoints.
"""

import contextlib
import itertools
import os
import pickle
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.helpers import NVME, assert_same_bits, assert_same_states, on_gpu, states_of, training
from support.models import mlp
from support.ranks import share
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.checkpoints import dcp_load, dcp_save
from infinity.checkpoints.dcp_load import load_dcp
from infinity.checkpoints.dcp_names import boxes
from infinity.checkpoints.dcp_save import save_dcp
from infinity.errors import CheckpointError, ConfigError
from infinity.model import tiling
from infinity.optim.adam import join_master

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WIDTH, WORDS = 24, 74
LR = 1e-2


class Net(nn.Module):
    """A tied head, a frozen layer, buffers, a convolution, a scalar, and a parameter without a gradient."""

    def __init__(self, scalar=True):
        super().__init__()
        self.scale = nn.Parameter(torch.full(() if scalar else (1,), 0.5))  # FSDP2 refuses scalars
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 131)
        self.down = nn.Linear(131, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(WIDTH))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.offset.to(h.dtype)
        h = h + self.down(torch.tanh(self.up(h)))
        h = h + self.mix(h.transpose(-1, -2)).transpose(-1, -2)
        return self.head(self.frozen(h) * self.scale)


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def in_groups(model):
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0, "lr": LR / 2},
    ]


def loss(model, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(WORDS, (4, 9), generator=generator)
    x, y = share(x), share((5 * x + 3) % WORDS)
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def train(model, optimizer, *steps):
    for step in steps:
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def engine_states(engine, model):
    """Same as `plain_states`: keys are the plain model's names, values are fp32."""
    places, found = tiling.places(model), {}
    names = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
    for name, param in model.named_parameters():
        state, registered = engine.read_state(param), engine.registry.find(param)
        if "residual" in state:
            state["weight"] = join_master(state["weight"].view(-1), state.pop("residual").view(-1)).view(param.shape)
        state["weight"] = state.pop("master", state["weight"])
        steps = {chunk.steps[registered.index] for chunk in engine.registry.chunks_of(registered)}
        assert len(steps) == 1
        place = places.get(param)
        whole = found.setdefault(place.name if place else name, {})
        for kind, value in state.items():
            value = value.float()
            if place:
                target = whole.setdefault(names.get(kind, kind), torch.zeros(place.shape))
                target[tuple(slice(a, a + b) for a, b in zip(place.begin, param.shape))] = value
            else:
                whole[names.get(kind, kind)] = value
        if registered.group is not None:
            whole["step"] = torch.tensor(float(*steps))
    return found


def plain_states(model, optimizer):
    """{first name: {weight, exp_avg, exp_avg_sq, step}} of a plain or FSDP2 model. Tensors are whole, not sharded."""
    weights, optim = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert dist.is_initialized() or not any(hasattr(value, "full_tensor") for value in weights.values())
    return {name: {"weight": weights[name], **optim["state"].get(name, {})} for name, _ in model.named_parameters() if name in weights}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        assert got[name].keys() == expected[name].keys(), (name, got[name].keys(), expected[name].keys())
        for kind in got[name]:
            assert_same_bits(torch.as_tensor(got[name][kind]), torch.as_tensor(expected[name][kind]), f"{name} {kind}")


def plain(seed=0, kind=torch.optim.AdamW, options=None, **of_net):
    model = net(seed, **of_net)
    return model, kind(in_groups(model), lr=LR, **(options or {}))


def save_plain(path, model, optimizer):
    weights, optim = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=path, no_dist=not dist.is_initialized())


def load_plain(path, model, optimizer):
    weights, optim = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": optim}, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)


def load_plain_weights(path, model):
    weights = model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=path, no_dist=True)
    model.load_state_dict(weights)


@contextlib.contextmanager
def trained(directory, steps=3, make=net, **config):
    """Yields (model, engine, optimizer) with the seed 0, after some steps."""
    options = {"groups": in_groups, "options": {"lr": LR}} | config
    with training(make, directory, **options) as (model, engine, optimizer):
        train(model, optimizer, *range(steps))
        yield model, engine, optimizer


def other(directory, **config):
    """Same as `trained`, with other values: the target of a load."""
    return trained(directory, 1, lambda: net(seed=9), **config)


def everything(path, folder):
    """The whole checkpoint as one nested dict, read without a model."""
    dcp_to_torch_save(path, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=True)


# ---- boxes ----


def test_boxes_of_an_interval():
    assert [*boxes((3, 4), 0, 12)] == [((0, 0), (3, 4))]
    assert [*boxes((3, 4), 2, 11)] == [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
    assert [*boxes((3, 4), 5, 7)] == [((1, 1), (1, 2))]
    assert [*boxes((), 0, 1)] == [((), ())]
    assert [*boxes((7,), 2, 2)] == []


def test_boxes_are_in_order_few_and_make_up_the_interval():
    chance = random.Random(0)
    for _ in range(300):
        shape = tuple(chance.randint(1, 5) for _ in range(chance.randint(1, 4)))
        flat = torch.arange(torch.Size(shape).numel())
        begin, end = sorted(chance.choices(range(len(flat) + 1), k=2))
        found = [*boxes(shape, begin, end)]
        parts = [flat.view(shape)[tuple(slice(a, a + b) for a, b in zip(*box))].reshape(-1) for box in found]
        assert torch.cat([flat[:0], *parts]).tolist() == [*range(begin, end)]
        assert len(found) <= 2 * len(shape) - 1


# ---- save_dcp ----


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config, dtype",
    [
        pytest.param(config, dtype, id=f"{where}-{dtype}", marks=pytest.mark.long if is_long else ())
        for where, config, dtype, is_long in [
            ("memory", {}, "fp32", False),
            ("memory", {}, "bf16", True),
            ("memory", {}, "fp16", True),
            ("nvme", NVME, "fp32", True),
            ("nvme", NVME, "bf16", False),
            ("nvme", NVME, "fp16", True),
        ]
    ],
)
def test_plain_pytorch_continues_from_a_checkpoint_of_the_engine(tmp_path, dtype, config):
    with trained(tmp_path / "swap", dtype=dtype, **config) as (model, engine, optimizer):
        optimizer.param_groups[0]["lr"] = LR / 3
        save_dcp(tmp_path / "saved", model, optimizer)
        there, adam = plain(seed=1)
        load_plain(tmp_path / "saved", there, adam)
        expected = engine_states(engine, model)
        assert_same(plain_states(there, adam), {name: state for name, state in expected.items()})
        assert [group["lr"] for group in adam.param_groups] == [LR / 3, LR / 2]
        assert [group["weight_decay"] for group in adam.param_groups] == [1e-2, 0.0]
        assert torch.equal(there.offset, model.offset) and there.head.weight is there.embed.weight
        if dtype == "fp32":
            train(model, optimizer, 3)
            train(there, adam, 3)
            for name, state in engine_states(engine, model).items():
                torch.testing.assert_close(there.get_parameter(name).data, state["weight"], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("ours", "torchs", "options"),
    [
        (infinity.AdamW, torch.optim.AdamW, {}),
        pytest.param(infinity.Adam, torch.optim.Adam, {}, marks=pytest.mark.long),
        (infinity.SGD, torch.optim.SGD, {"momentum": 0.9}),
        pytest.param(infinity.SGD, torch.optim.SGD, {}, marks=pytest.mark.long),
    ],
    ids=["AdamW", "Adam", "SGD with momentum", "SGD"],
)
def test_names_sizes_and_dtypes_are_those_of_dcp(tmp_path, ours, torchs, options):
    with trained(tmp_path / "swap", optimizer=ours, options={"lr": LR, **options}) as (model, engine, optimizer):
        save_dcp(tmp_path / "ours", model, optimizer)
        there, theirs = plain(1, torchs, options)
        load_plain(tmp_path / "ours", there, theirs)
        save_plain(tmp_path / "theirs", there, theirs)
    got, expected = (dcp.FileSystemReader(tmp_path / which).read_metadata() for which in ("ours", "theirs"))

    def described(metadata):
        entries = metadata.state_dict_metadata.items()
        return {name: (entry.size, entry.properties) if hasattr(entry, "size") else None for name, entry in entries}

    assert {name for name in described(got) if not name.endswith(".step")} >= {"model.offset", "model.count", "model.head.weight"}
    if torchs is torch.optim.SGD and options:  # the engine counts steps of SGD, torch does not
        got.state_dict_metadata = {n: e for n, e in got.state_dict_metadata.items() if not n.endswith(".step")}
        got.planner_data = {n: e for n, e in got.planner_data.items() if not n.endswith(".step")}
    assert described(got) == described(expected)
    assert got.planner_data == expected.planner_data


@pytest.mark.slow
def test_lion_momentum_is_saved_as_exp_avg_and_loaded(tmp_path):
    with trained(tmp_path / "a", optimizer=infinity.Lion) as (model, engine, optimizer):
        save_dcp(tmp_path / "saved", model, optimizer)
        expected = engine_states(engine, model)
    found = everything(tmp_path / "saved", tmp_path)
    assert set(found["optim"]["state"]["up.weight"]) == {"exp_avg", "step"}
    assert set(found["optim"]["param_groups"][0]) == {"lr", "betas", "weight_decay", "params"}
    with other(tmp_path / "b", optimizer=infinity.Lion) as (model, engine, optimizer):
        load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        assert_same(engine_states(engine, model), expected)


@pytest.mark.slow
def test_dcp_loads_after_a_state_dict_was_loaded(tmp_path):
    """torch.optim adds keys to an optimizer's defaults in load_state_dict."""
    with trained(tmp_path) as (model, engine, optimizer):
        infinity.save_dcp(tmp_path / "dcp", model, optimizer)
        expected = engine_states(engine, model)
        with pytest.warns(UserWarning, match="no moments"):
            found = optimizer.state_dict()
        optimizer.load_state_dict({"state": {}, "param_groups": found["param_groups"]})
        train(model, optimizer, 3)
        infinity.load_dcp(tmp_path / "dcp", model, optimizer, trust_pickle=True)
        assert_same(engine_states(engine, model), expected)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_without_an_optimizer_only_the_model_is_written(tmp_path, dtype):
    with trained(tmp_path / "a", dtype=dtype) as (model, engine, optimizer):
        save_dcp(tmp_path / "saved", model)
        expected = engine_states(engine, model)
    found = everything(tmp_path / "saved", tmp_path)
    assert found.keys() == {"model"}
    for name, state in expected.items():
        assert_same_bits(found["model"][name], state["weight"], name)
    with other(tmp_path / "b", dtype=dtype) as (model, engine, optimizer):
        load_dcp(tmp_path / "saved", model, trust_pickle=True)
        for name, state in engine_states(engine, model).items():
            assert_same_bits(state["weight"], expected[name]["weight"], name)
            assert state.get("step", 0) == 0 and not state.get("exp_avg", torch.zeros(1)).any()


@pytest.mark.slow
def test_bf16_moments_are_saved_in_fp32_and_loaded_with_the_same_bits(tmp_path):
    with trained(tmp_path / "a", dtype="bf16", optimizer_state_dtype="bf16") as (model, engine, optimizer):
        save_dcp(tmp_path / "saved", model, optimizer)
        expected = engine_states(engine, model)
    assert everything(tmp_path / "saved", tmp_path)["optim"]["state"]["up.weight"]["exp_avg"].dtype is torch.float32
    with other(tmp_path / "b", dtype="bf16", optimizer_state_dtype="bf16") as (model, engine, optimizer):
        load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        assert_same(engine_states(engine, model), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "from_tiles, to_tiles",
    [pytest.param(True, False, marks=pytest.mark.long), pytest.param(False, True, marks=pytest.mark.long), (True, True)],
)
def test_tiled_layers_are_saved_under_the_names_of_plain_layers(tmp_path, from_tiles, to_tiles):
    def make(tiled, in_tiles=2, seed=0):
        model = net(seed)
        if tiled:
            model.down = infinity.TiledLinear.from_linear(model.down, 2, in_tiles)
            tiling.tile_large_layers(model, above_nbytes=7000, tile_nbytes=2500, itemsize=4)
            assert isinstance(model.embed, infinity.TiledEmbedding) and isinstance(model.head, infinity.TiledLinear)
        return model

    with trained(tmp_path / "a", make=lambda: make(from_tiles)) as (model, engine, optimizer):
        save_dcp(tmp_path / "saved", model, optimizer)
        expected = engine_states(engine, model)
    there, adam = plain(seed=1)
    load_plain(tmp_path / "saved", there, adam)
    assert_same(plain_states(there, adam), expected)
    with trained(tmp_path / "b", 1, lambda: make(to_tiles, 3, seed=9)) as (model, engine, optimizer):
        load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        assert_same(engine_states(engine, model), expected)


# ---- load_dcp ----


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config", [pytest.param({}, marks=pytest.mark.long), NVME, {"update": "backward"}], ids=["memory", "nvme", "backward"]
)
def test_the_engine_continues_from_a_checkpoint_of_plain_pytorch(tmp_path, config):
    there, adam = plain()
    train(there, adam, 0, 1, 2)
    adam.param_groups[1]["betas"] = (0.8, 0.99)
    save_plain(tmp_path / "saved", there, adam)
    expected = plain_states(there, adam)
    expected["unused"] |= {"exp_avg": torch.zeros(5), "exp_avg_sq": torch.zeros(5), "step": torch.tensor(0.0)}
    with other(tmp_path / "swap", **config) as (model, engine, optimizer):
        load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        assert_same(engine_states(engine, model), expected)
        assert model.count.item() == 7 and torch.equal(model.offset, there.offset)
        assert optimizer.param_groups[1]["betas"] == (0.8, 0.99) and optimizer.param_groups[1]["lr"] == LR / 2
        assert "amsgrad" not in optimizer.param_groups[0]
        train(model, optimizer, 3)
        train(there, adam, 3)
        for name, state in engine_states(engine, model).items():
            torch.testing.assert_close(there.get_parameter(name).data, state["weight"], atol=1e-6, rtol=0)


def test_fp32_values_become_masters_of_a_bf16_engine(tmp_path):
    there, adam = plain()
    train(there, adam, 0, 1)
    save_plain(tmp_path / "saved", there, adam)
    with other(tmp_path / "swap", dtype="bf16") as (model, engine, optimizer):
        load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        states = engine_states(engine, model)
        for name, expected in plain_states(there, adam).items():
            weight = expected["weight"]
            weight = weight if there.get_parameter(name).requires_grad else weight.bfloat16().float()
            assert_same_bits(states[name]["weight"], weight, name)


def test_load_ignores_other_entries_and_converts_dtypes(tmp_path):
    there, adam = plain()
    train(there, adam, 0)
    weights, optim = get_state_dict(there, adam)
    weights = {name: value.double() if value.is_floating_point() else value for name, value in weights.items()}
    saved = {"model": weights, "optim": optim, "lr_scheduler": {"last": 3}, "loader": torch.ones(3)}
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    with other(tmp_path / "swap") as (model, engine, optimizer):
        load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        assert_same_bits(engine_states(engine, model)["up.weight"]["weight"], there.up.weight.detach(), "up.weight")


def test_load_restores_the_momentum_of_sgd(tmp_path):
    there, sgd = plain(0, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1})
    train(there, sgd, 0, 1)
    save_plain(tmp_path / "saved", there, sgd)
    options = {"lr": 1.0, "momentum": 0.5}
    with other(tmp_path / "swap", optimizer=infinity.SGD, options=options) as (model, engine, optimizer):
        load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        train(model, optimizer, 3)
        train(there, sgd, 3)
        for name, state in engine_states(engine, model).items():
            torch.testing.assert_close(there.get_parameter(name).data, state["weight"], atol=1e-6, rtol=0)


# ---- several ranks ----


def arrays(states):
    return {name: {kind: torch.as_tensor(value).numpy().copy() for kind, value in state.items()} for name, state in states.items()}


def fsdp(seed):
    model = net(seed, scalar=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.up, model.down, model.mix):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(in_groups(model), lr=LR)


def fsdp_saves(path):
    model, adam = fsdp(0)
    train(model, adam, 0, 1)
    save_plain(path, model, adam)
    return arrays(plain_states(model, adam))


def fsdp_loads(path):
    model, adam = fsdp(1)
    load_plain(path, model, adam)
    return arrays(plain_states(model, adam))


@contextlib.contextmanager
def on_ranks(folder, seed, **config):
    """Same as `trained`, but all ranks share a folder."""
    options = {"swap_dirs": folder, "device": "cpu", "chunk_mib": 1 / 256, "host_memory": "64MiB", "dtype": "fp32"} | config
    model = net(seed, scalar=False)
    with infinity.offload(model, infinity.Config(**options)) as engine:
        yield model, engine, infinity.AdamW(in_groups(model), lr=LR)


def engine_saves(folder, path, **config):
    with on_ranks(folder, 0, **config) as (model, engine, optimizer):
        train(model, optimizer, 0, 1)
        save_dcp(path, model, optimizer)
        return arrays(engine_states(engine, model))


def engine_loads(folder, path, **config):
    with on_ranks(folder, 9, **config) as (model, engine, optimizer):
        train(model, optimizer, 0)
        load_dcp(path, model, optimizer, trust_pickle=True)
        with torch.no_grad():
            output = model(torch.arange(WORDS).view(2, -1))
        found = arrays(engine_states(engine, model))
        train(model, optimizer, 5)
        return found, output.float().numpy()


def assert_same_arrays(got, expected):
    for name, state in expected.items():
        if "exp_avg" not in state:  # torch has no state of a parameter without a gradient
            got[name] = {"weight": got[name]["weight"]}
    assert_same(got, expected)


@pytest.mark.long
def test_engines_of_one_and_two_ranks_load_a_checkpoint_of_fsdp2(tmp_path, worlds):
    expected = worlds(2).run(fsdp_saves, tmp_path / "saved")[0]
    there = net(seed=1, scalar=False)
    load_plain_weights(tmp_path / "saved", there)
    output = there(torch.arange(WORDS).view(2, -1)).detach()
    for found, at_once in [*worlds(2).run(engine_loads, tmp_path, tmp_path / "saved"), engine_loads(tmp_path, tmp_path / "saved")]:
        assert_same_arrays(found, expected)
        torch.testing.assert_close(torch.as_tensor(at_once), output, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [pytest.param({}, marks=pytest.mark.long), NVME, pytest.param({"dtype": "bf16"}, marks=pytest.mark.long)],
    ids=["memory", "nvme", "bf16"],
)
def test_fsdp2_plain_pytorch_and_one_rank_load_a_checkpoint_of_two_ranks(tmp_path, worlds, config):
    expected = worlds(2).run(engine_saves, tmp_path, tmp_path / "saved", **config)[0]
    for found in worlds(2).run(fsdp_loads, tmp_path / "saved"):
        assert_same(found, expected)
    there, adam = plain(seed=1, scalar=False)
    load_plain(tmp_path / "saved", there, adam)
    assert_same(plain_states(there, adam), expected)
    assert_same(engine_loads(tmp_path, tmp_path / "saved", **config)[0], expected)


def test_two_ranks_load_a_checkpoint_of_one_rank(tmp_path, worlds):
    expected = engine_saves(tmp_path, tmp_path / "saved")
    for found, _ in worlds(2).run(engine_loads, tmp_path, tmp_path / "saved"):
        assert_same(found, expected)


def each_loads_its_own(folder, paths):
    with on_ranks(folder, 0) as (model, engine, optimizer):
        before = arrays(engine_states(engine, model))
        try:
            load_dcp(paths[dist.get_rank()], model, optimizer, trust_pickle=True)
        except infinity.CheckpointError as error:
            assert_same(arrays(engine_states(engine, model)), before)
            train(model, optimizer, 0)
            return str(error)


def test_all_ranks_report_that_their_checkpoints_differ_or_one_is_missing(tmp_path, worlds):
    for name in ("a", "b"):
        save_plain(tmp_path / name, *plain(scalar=False))
    for text in worlds(2).run(each_loads_its_own, tmp_path, [tmp_path / "a", tmp_path / "b"]):
        assert "the ranks read different checkpoints" in text
    for text in worlds(2).run(each_loads_its_own, tmp_path, [tmp_path / "a", tmp_path / "c"]):
        assert f"{tmp_path / 'c'}: there is no checkpoint of torch.distributed.checkpoint" in text


# ---- checkpoints that load_dcp refuses ----


def rename(old, new):
    def change(saved):
        for part in (saved["model"], saved["optim"]["state"]):
            if old in part:
                part[new] = part.pop(old)

    return change


def put(*path, value):
    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        if value is None:
            del saved[path[-1]]
        else:
            saved[path[-1]] = value

    return change


GROUPS = ("optim", "param_groups")
WRONG = {
    "missing": (put("model", "up.weight", value=None), ["missing: model.up.weight"]),
    "unexpected": (put("model", "more", value=torch.ones(2)), ["unexpected: model.more"]),
    "renamed": (
        rename("up.weight", "top.weight"),
        ["missing: model.up.weight", "unexpected: model.top.weight, optim.state.top.weight.exp_avg"],
    ),
    "shape": (put("model", "up.weight", value=torch.ones(3, 4)), ["model.up.weight has shape [3, 4] in the checkpoint and [131, 24] in"]),
    "buffer": (put("model", "offset", value=torch.ones(3)), ["model.offset has shape [3] in the checkpoint and [24] in the model"]),
    "missing buffer": (put("model", "count", value=None), ["missing: model.count"]),
    "integers": (put("model", "up.bias", value=torch.ones(131, dtype=torch.int32)), ["model.up.bias is not a tensor of floating-point"]),
    "moment": (put("optim", "state", "up.bias", "exp_avg", value=None), ["missing: optim.state.up.bias.exp_avg"]),
    "moment's shape": (
        put("optim", "state", "up.bias", "exp_avg", value=torch.ones(2)),
        ["optim.state.up.bias.exp_avg has shape [2] in the checkpoint and [131] in the model"],
    ),
    "amsgrad": (put(*GROUPS, 0, "amsgrad", value=True), ["parameter group 0 has amsgrad=True, which AdamW lacks"]),
    "Adam": (put(*GROUPS, 0, "decoupled_weight_decay", value=False), ["parameter group 0 has decoupled_weight_decay=False"]),
    "hyper-parameter": (put(*GROUPS, 1, "lr", value=-1.0), ["parameter group 1: lr=-1.0: expected 0 or more"]),
    "step": (put("optim", "state", "up.bias", "step", value=torch.tensor(-1.0)), ["optim.state.up.bias.step is -1.0"]),
    "trained": (
        put("optim", "state", "frozen.bias", value={"exp_avg": torch.ones(24), "exp_avg_sq": torch.ones(24), "step": torch.tensor(1.0)}),
        ["frozen.bias is trained in the checkpoint and frozen in the model"],
    ),
    "groups": (put("optim", "param_groups", value=[]), ["0 parameter groups in the checkpoint, 2 in the optimizer"]),
    "group": (
        put(*GROUPS, 1, "params", value=["scale", "up.bias"]),
        ["down.bias is in no parameter group in the checkpoint, in group 1 of the optimizer", "unused is in no"],
    ),
    "no optimizer": (put("optim", value=None), ["the checkpoint has no optimizer state"]),
}


def test_a_mismatched_checkpoint_is_refused_before_anything_changes(tmp_path):
    there, adam = plain()
    train(there, adam, 0)
    with other(tmp_path / "swap") as (model, engine, optimizer):
        before = states_of(engine, model)
        for number, (what, (change, expected)) in enumerate(WRONG.items()):
            weights, optim = get_state_dict(there, adam)
            saved = {"model": dict(weights), "optim": {**optim, "state": {name: dict(s) for name, s in optim["state"].items()}}}
            saved["optim"]["param_groups"] = [dict(group) for group in optim["param_groups"]]
            change(saved)
            dcp.save(saved, checkpoint_id=tmp_path / f"saved{number}", no_dist=True)
            with pytest.raises(infinity.CheckpointError) as error:
                load_dcp(tmp_path / f"saved{number}", model, optimizer, trust_pickle=True)
            for text in expected:
                assert text in str(error.value), (what, str(error.value))
            assert str(error.value).count(" in the checkpoint") + str(error.value).count(":") < 8, (what, str(error.value))
        assert_same_states(states_of(engine, model), before)
        assert optimizer.param_groups[0]["lr"] == LR
        train(model, optimizer, 1)


def _remove_metadata(path):
    (path / ".metadata").unlink()


def _spoil_metadata(path):
    (path / ".metadata").write_bytes(b"no pickle")


def _remove_file(path):
    (path / "__0_0.distcp").unlink()


def _cut_file(path):
    with open(path / "__0_0.distcp", "r+b") as file:
        file.truncate(1000)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_remove_metadata, ".metadata is missing"),
        (_spoil_metadata, ".metadata is damaged: UnpicklingError"),
        (_remove_file, "missing or cut: __0_0.distcp (No such file or directory)"),
        (_cut_file, "missing or cut: __0_0.distcp (has 1,000 bytes, "),
    ],
)
def test_damaged_files_are_found_before_anything_changes(tmp_path, damage, expected):
    there, adam = plain()
    save_plain(tmp_path / "saved", there, adam)
    damage(tmp_path / "saved")
    with other(tmp_path / "swap") as (model, engine, optimizer):
        before = states_of(engine, model)
        with pytest.raises(infinity.CheckpointError) as error:
            load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        assert expected in str(error.value)
        assert_same_states(states_of(engine, model), before)


def test_damage_inside_a_file_is_reported_and_requires_another_load(tmp_path):
    there, adam = plain()
    train(there, adam, 0)
    save_plain(tmp_path / "good", there, adam)
    save_plain(tmp_path / "bad", there, adam)
    saved = dcp.FileSystemReader(tmp_path / "bad").read_metadata().storage_data
    place = next(info for index, info in saved.items() if index.fqn == "model.up.weight")
    with open(tmp_path / "bad" / place.relative_path, "r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))
    with other(tmp_path / "swap") as (model, engine, optimizer):
        with pytest.raises(infinity.CheckpointError, match="model.up.weight is damaged: "):
            load_dcp(tmp_path / "bad", model, optimizer, trust_pickle=True)
        with pytest.raises(infinity.UsageError):
            train(model, optimizer, 1)
        load_dcp(tmp_path / "good", model, optimizer, trust_pickle=True)
        train(model, optimizer, 1)


def test_save_dcp_does_not_replace_a_checkpoint(tmp_path):
    with trained(tmp_path / "swap", 1) as (model, engine, optimizer):
        save_dcp(tmp_path / "saved", model, optimizer)
        with pytest.raises(infinity.CheckpointError, match="holds a checkpoint already"):
            save_dcp(tmp_path / "saved", model, optimizer)


def test_a_failing_disk_raises_an_os_error_and_training_continues(tmp_path):
    (tmp_path / "saved").write_text("a file")
    with trained(tmp_path / "swap", 1) as (model, engine, optimizer):
        with pytest.raises(infinity.SwapError, match="the checkpoint's directory cannot be made"):
            save_dcp(tmp_path / "saved", model, optimizer)
        train(model, optimizer, 1)


def test_extra_state_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return 1

        def set_extra_state(self, state):
            pass

    with training(lambda: nn.Sequential(Extra(4, 4)), tmp_path / "swap") as (model, engine, optimizer):
        for function in (save_dcp, partial(load_dcp, trust_pickle=True)):
            with pytest.raises(infinity.CheckpointError):
                function(tmp_path / "saved", model, optimizer)


def test_a_model_without_an_optimizer_is_saved_and_loaded(tmp_path):
    save_plain(tmp_path / "saved", *plain())
    model = net(seed=9)
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, host_memory="64MiB")
    with infinity.offload(model, config) as engine:
        load_dcp(tmp_path / "saved", model, trust_pickle=True)
        save_dcp(tmp_path / "again", model)
        assert_same_bits(engine.read_state(model.up.weight)["weight"], net().up.weight.detach(), "up.weight")
    assert_same_bits(everything(tmp_path / "again", tmp_path)["model"]["head.weight"], net().head.weight.detach(), "head.weight")


@on_gpu
@pytest.mark.parametrize("config", [{}, NVME | {"device_memory": "1MiB"}], ids=["on the device", "nvme"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_save_and_load_on_a_gpu(tmp_path, dtype, config):
    def gpu_step(model, optimizer):
        model(torch.arange(WORDS, device="cuda").view(2, -1)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with trained(tmp_path / "a", 0, device="cuda", dtype=dtype, **config) as (model, engine, optimizer):
        gpu_step(model, optimizer)
        gpu_step(model, optimizer)
        assert any(chunk.on_device for chunk in engine.registry.chunks) == (not config)
        save_dcp(tmp_path / "saved", model, optimizer)
        expected = engine_states(engine, model)
    there, adam = plain(seed=1)
    load_plain(tmp_path / "saved", there, adam)
    assert_same(plain_states(there, adam), expected)
    with trained(tmp_path / "b", 0, lambda: net(seed=9), device="cuda", dtype=dtype, **config) as (model, engine, optimizer):
        gpu_step(model, optimizer)
        load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        assert_same(engine_states(engine, model), expected)
        gpu_step(model, optimizer)


# ---- memory ----


def test_one_part_of_one_record_is_in_memory_at_a_time(tmp_path, monkeypatch):
    resolved, live, asked = [], [], []
    resolve = dcp_save._Planner.resolve_data

    def noted(planner, item):
        value = resolve(planner, item)
        if isinstance(value, torch.Tensor) and item.index in planner._sources:
            asked.append(planner._sources[item.index])
            resolved.append(value)
            live.append(sum(tensor.untyped_storage().nbytes() for tensor in resolved))
        return value

    monkeypatch.setattr(dcp_save._Planner, "resolve_data", noted)
    with trained(tmp_path / "a", **NVME) as (model, engine, optimizer):
        save_dcp(tmp_path / "saved", model, optimizer)
        largest = max(chunk.record.numel for chunk in engine.registry.chunks)
        num_chunks = len(engine.registry.chunks)
    assert max(live) == 4 * max(torch.Size(source.sizes).numel() for source in asked) <= 4 * largest == 4096
    changes = [chunk for chunk, _ in itertools.groupby(asked, key=lambda source: source.chunk.index)]
    assert changes == [*range(num_chunks)]  # each record is read once


def test_load_keeps_one_saved_piece_of_each_state_in_memory(tmp_path, monkeypatch):
    there, adam = plain()
    train(there, adam, 0)
    save_plain(tmp_path / "saved", there, adam)
    live, read = [], []
    piece = dcp_load._Saved.piece

    def noted(saved, kind, name, chunk, dtype):
        before = saved._cached.get(kind)
        value = piece(saved, kind, name, chunk, dtype)
        live.append(sum(tensor.nbytes for _, tensor in saved._cached.values()))
        if before is None or before[1] is not value:
            read.append(name)
        return value

    monkeypatch.setattr(dcp_load._Saved, "piece", noted)
    with other(tmp_path / "swap", **NVME) as (model, engine, optimizer):
        load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
    assert max(live) == 3 * there.up.weight.nbytes
    counts = {name: len([*found]) for name, found in itertools.groupby(sorted(read))}
    assert set(counts.values()) == {1}, counts  # each tensor is read once, also if several records hold parts of the tensor


class Runs:
    """Reading a pickle of this class makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_load_dcp_reads_a_pickle_only_with_trust_pickle_true(tmp_path):
    with training(mlp, tmp_path) as (model, engine, optimizer):
        save_dcp(tmp_path / "saved", model, optimizer)
        (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
        for options in ({}, {"trust_pickle": False}, {"trust_pickle": 1}):
            with pytest.raises(ConfigError, match=r"reading one may run any code .* load_dcp\(..., trust_pickle=True\)"):
                load_dcp(tmp_path / "saved", model, optimizer, **options)
        assert not (tmp_path / "ran").exists()
        with pytest.raises(CheckpointError, match="is damaged"):
            load_dcp(tmp_path / "saved", model, optimizer, trust_pickle=True)
        assert (tmp_path / "ran").exists(), "reading the pickle ran no code: this test proves nothing"
        save_dcp(tmp_path / "other", model, optimizer)
        load_dcp(tmp_path / "other", model, optimizer, trust_pickle=True)
