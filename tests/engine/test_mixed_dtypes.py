"""Models whose parameters have different dtypes: each parameter keeps its dtype in every tier, on any number of ranks, in checkpoints.

The engine's states equal the same arithmetic in plain PyTorch, bit by bit.
"""

import json
import subprocess
import sys

import pytest
import torch
from support.helpers import (
    NVME,
    ReferenceAdamW,
    assert_equals_reference,
    assert_same_bits,
    assert_same_states,
    on_gpu,
    run_micro_batches,
    states_of,
    training,
)
from support.ranks import ranks
from torch import nn
from torch.nn import functional as F

import infinity
from infinity.formats.assignment import ParameterDtypes

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES = {
    "device": {},
    "host": {"param_tier": "host", "optimizer_state_tier": "host", "residency": "none"},
    "nvme": NVME,
    "states on nvme": {"param_tier": "host", "optimizer_state_tier": "nvme", "residency": "none", "compression": "on"},
    "few slots": NVME | {"host_memory": "200KiB", "device_memory": "60KiB", "activation_tier": "device"},
}
WIDTH = 48


class Block(nn.Module):
    """An fp32 norm, an fp32 router, bf16 experts, and fp32 adapters over a frozen base."""

    base_dtype = torch.bfloat16

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).bfloat16()
        self.base = nn.Parameter((torch.randn(WIDTH, WIDTH) / 8).to(self.base_dtype), requires_grad=False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x.float())
        gates = self.router(h).softmax(-1).to(x.dtype)
        mixed = sum(gates[..., i : i + 1] * expert(h.to(x.dtype)) for i, expert in enumerate(self.experts))
        return x + mixed + F.linear(x, self.base.to(x.dtype)) + self.up(self.down(h)).to(x.dtype)


class Fp8Block(Block):
    base_dtype = torch.float8_e4m3fn


class Model(nn.Module):
    def __init__(self, block=Block, num=3):
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH).bfloat16()
        self.blocks = nn.ModuleList(block() for _ in range(num))
        self.head = nn.Linear(WIDTH, 32, bias=False).bfloat16()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fp8_model():
    return Model(Fp8Block)


def batch(step, rows=4):
    return torch.randint(32, (rows, 8), generator=torch.Generator().manual_seed(step))


def loss_of_logits(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def loss_of(model, tokens):
    return loss_of_logits(model(tokens[:, :-1]), tokens[:, 1:])


def dtypes_of(model):
    return {name: param.dtype for name, param in model.named_parameters()}


def reference(make, steps, every=1):
    """(model, optimizer) after `steps` steps of `every` micro-batches in plain PyTorch."""
    torch.manual_seed(0)
    model = make()
    optimizer = ReferenceAdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, dtype=None)
    for step in range(steps):
        totals = {}
        for micro in range(every):
            loss_of(model, batch(step * every + micro)).div(every).backward()
            for param in optimizer.state:  # the engine adds gradients up in fp32
                totals[param] = totals.get(param, 0) + param.grad.float()
                param.grad = None
        for param, total in totals.items():
            param.grad_fp32 = total
        for group in optimizer.param_groups:
            for param in group["params"]:
                with torch.no_grad():
                    optimizer._update(param, optimizer.state[param], group, grad=param.grad_fp32)
    return model, optimizer


@pytest.mark.few(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_each_parameter_trains_in_its_own_dtype(update, place, tmp_path):
    plain, optimizer = reference(Model, 4)
    with training(Model, tmp_path / "swap", dtype="bf16", update=update, **PLACES[place]) as (model, engine, ours):
        assert dtypes_of(model) == dtypes_of(plain)
        for step in range(4):
            loss_of(model, batch(step)).backward()
            ours.step()
            ours.zero_grad()
        assert dtypes_of(model) == dtypes_of(plain)
        assert_equals_reference(engine, model, plain, optimizer)
        assert {name: value.dtype for name, value in model.state_dict().items()} == dtypes_of(plain)


@pytest.mark.slow
def test_the_frozen_base_may_be_fp8(tmp_path):
    plain, optimizer = reference(fp8_model, 4)
    with training(fp8_model, tmp_path / "swap", dtype="bf16", **NVME) as (model, engine, ours):
        for step in range(4):
            loss_of(model, batch(step)).backward()
            ours.step()
            ours.zero_grad()
        assert_equals_reference(engine, model, plain, optimizer)
        assert model.blocks[0].base.dtype is torch.float8_e4m3fn
        frozen = [chunk for chunk in engine.registry.chunks if chunk.chunk.format.compute == "fp8_e4m3"]
        assert frozen and all(chunk.record.nbytes < chunk.record.numel + 4096 for chunk in frozen)


@pytest.mark.few(1)
@pytest.mark.parametrize("by_layer", [False, True])
def test_gradients_of_micro_batches_add_up_in_fp32(by_layer, tmp_path):
    plain, optimizer = reference(Model, 3, every=3)
    options = {"accumulation_steps": 3}
    with training(Model, tmp_path / "swap", dtype="bf16", options=options, **NVME) as (model, engine, ours):
        for step in range(3):
            batches = [batch(3 * step + micro) for micro in range(3)]
            run_micro_batches(model, [(tokens[:, :-1], tokens[:, 1:]) for tokens in batches], lambda *pair: loss_of_logits(*pair) / 3, by_layer)
            ours.step()
            ours.zero_grad()
        assert_equals_reference(engine, model, plain, optimizer)


def test_a_model_of_one_dtype_takes_the_dtype_of_the_configuration(tmp_path):
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with training(make, tmp_path, dtype="bf16") as (model, _, _):
        assert set(dtypes_of(model).values()) == {torch.bfloat16}
    with training(lambda: make().bfloat16(), tmp_path, dtype="fp32") as (model, _, _):
        assert set(dtypes_of(model).values()) == {torch.float32}


@pytest.mark.parametrize("dtype, trains", [(torch.float64, True), (torch.float64, False), (torch.float8_e5m2, True)])
def test_an_unsupported_dtype_is_refused_with_the_parameter_name(dtype, trains, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].bias = nn.Parameter(model[1].bias.detach().to(dtype), requires_grad=trains)
    with pytest.raises(infinity.ConfigError, match=f"1.bias is {'trainable' if trains else 'frozen'} and of {dtype}"):
        infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu"))


def test_an_fp16_part_has_a_loss_scale(tmp_path):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16).half()

        def forward(self, x):
            return self.b(self.a(x).relu().half()).float()

    def steps(model, optimizer):
        for step in range(4):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    plain = Half()
    optimizer = ReferenceAdamW(plain.parameters(), lr=1e-2, dtype=None)
    steps(plain, optimizer)
    with training(Half, tmp_path, dtype="bf16", **NVME) as (model, engine, ours):
        steps(model, ours)
        assert engine.stats()["loss_scale"] == 2.0**16 and not engine.stats()["num_skipped_steps"]
        assert dtypes_of(model) == dtypes_of(plain)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(engine.read_state(dict(model.named_parameters())[name])["weight"], param.detach(), rtol=2e-2, atol=2e-4)
    with pytest.raises(infinity.ConfigError, match="update='backward' with fp16 parameters"):
        with training(Half, tmp_path, dtype="bf16", update="backward"):
            pass


def test_autocast_to_the_main_dtype_is_as_in_plain_pytorch(tmp_path):
    """Trainers call fp32 adapters over a bf16 base in this way."""
    torch.manual_seed(0)
    plain = Model()
    optimizer = ReferenceAdamW([param for param in plain.parameters() if param.requires_grad], lr=1e-2, dtype=None)
    with training(Model, tmp_path, dtype="bf16", **NVME) as (model, engine, ours):
        for step in range(3):
            for each, update in ((plain, optimizer), (model, ours)):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(each, batch(step))
                loss.backward()
                update.step()
                update.zero_grad()
        assert_equals_reference(engine, model, plain, optimizer)
        with torch.autocast("cpu", dtype=torch.float16), pytest.raises(infinity.UsageError, match="torch.autocast"):
            model(batch(0))


@pytest.mark.few(1)
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_checkpoint_keeps_every_dtype(moments, tmp_path):
    options = {"dtype": "bf16", "optimizer_state_dtype": moments}
    path = tmp_path / "checkpoint"
    with training(Model, tmp_path / "a", **options, **NVME) as (model, engine, ours):
        for step in range(2):
            loss_of(model, batch(step)).backward()
            ours.step()
            ours.zero_grad()
        infinity.save(path, model, ours)
        saved = states_of(engine, model)
        loss_of(model, batch(2)).backward()
        ours.step()
        ours.zero_grad()
        expected = states_of(engine, model)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["version"] == 2 and manifest["dtype"] == "bf16"
    own = {entry["name"]: entry.get("dtype") for entry in manifest["parameters"]}
    assert own["blocks.0.router.weight"] == "fp32" and own["blocks.0.experts.0.weight"] is None
    with training(Model, tmp_path / "b", seed=1, **options, chunk_mib=1 / 128) as (model, engine, ours):
        infinity.load(path, model, ours)
        assert_same_states(states_of(engine, model), saved)
        loss_of(model, batch(2)).backward()
        ours.step()
        ours.zero_grad()
        assert_same_states(states_of(engine, model), expected)


@pytest.mark.slow
def test_safetensors_have_every_dtype(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    with training(fp8_model, tmp_path / "a", dtype="bf16", **NVME) as (model, engine, ours):
        loss_of(model, batch(0)).backward()
        ours.step()
        ours.zero_grad()
        infinity.save(tmp_path / "checkpoint", model, ours)
        expected = model.state_dict()
    subprocess.run([sys.executable, "-m", "infinity", "checkpoint", "export", tmp_path / "checkpoint", tmp_path / "out"], check=True, timeout=120)
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= safetensors.load_file(file)
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)
    with training(fp8_model, tmp_path / "b", seed=1, dtype="bf16") as (model, engine, _):
        infinity.load_safetensors(model, tmp_path / "out")
        for name, value in model.state_dict().items():
            assert_same_bits(value, expected[name], name)


def test_a_checkpoint_of_other_dtypes_is_refused_with_the_parameter_name(tmp_path):
    with training(Model, tmp_path / "a", dtype="bf16") as (model, engine, ours):
        infinity.save(tmp_path / "checkpoint", model, ours)
    with training(lambda: Model().bfloat16(), tmp_path / "b", dtype="bf16") as (model, engine, ours):
        with pytest.raises(infinity.CheckpointError, match="blocks.0.norm.weight.* saved with dtype='fp32', expected dtype='bf16'"):
            infinity.load(tmp_path / "checkpoint", model, ours)


@on_gpu
@pytest.mark.parametrize("make", [Model, fp8_model])
def test_on_cuda_every_tier_has_the_same_bits(make, tmp_path):
    found = {}
    for place in ("device", "host", "nvme"):
        options = {"dtype": "bf16", "device": "cuda"} | PLACES[place]
        with training(make, tmp_path / place, **options) as (model, engine, ours):
            for step in range(4):
                loss_of(model, batch(step).cuda()).backward()
                ours.step()
                ours.zero_grad()
            found[place] = states_of(engine, model)
            assert dtypes_of(model) == dtypes_of(make())
    assert_same_states(found["host"], found["device"])
    assert_same_states(found["nvme"], found["device"])
    plain, optimizer = reference(make, 4)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found["nvme"][name]["weight"].float(), param.detach().float(), rtol=0.05, atol=0.02)


# ---- ranks ----


def trained_on_ranks(folder, path=None, load=None, steps=range(3)):
    """Trains on the same batch on every rank. So the mean of the gradients is the gradient of each rank."""
    rank, _ = ranks()
    settings = {"dtype": "bf16", "optimizer_state_dtype": "fp32"} | NVME
    with training(Model, folder.with_name(f"{folder.name}-{rank}"), seed=0, **settings) as (model, engine, ours):
        if load is not None:
            infinity.load(load, model, ours)
        for step in steps:
            loss_of(model, batch(step)).backward()
            ours.step()
            ours.zero_grad()
        if path is not None:
            infinity.save(path, model, ours)
        return {name: {key: value.float() for key, value in states.items()} for name, states in states_of(engine, model).items()}


@pytest.mark.long
def test_two_ranks_have_the_bits_of_one_rank_and_resume_on_one(worlds, tmp_path):
    first, second = worlds(2).run(trained_on_ranks, tmp_path, path=tmp_path / "checkpoint")
    alone = trained_on_ranks(tmp_path / "alone")
    for name, states in alone.items():
        for key, value in states.items():
            assert torch.equal(first[name][key], value) and torch.equal(second[name][key], value), (name, key)
    resumed = trained_on_ranks(tmp_path / "again", load=tmp_path / "checkpoint", steps=range(3, 5))
    expected = trained_on_ranks(tmp_path / "through", steps=range(5))
    for name, states in expected.items():
        for key, value in states.items():
            assert torch.equal(resumed[name][key], value), (name, key)


def test_parameter_dtypes_follow_from_the_parameters_and_the_default():
    named = [("a", torch.empty(4, 4)), ("b", torch.empty(30, dtype=torch.bfloat16)), ("c", nn.Parameter(torch.empty(2, dtype=torch.float16)))]
    assert ParameterDtypes.of(named, "fp32") == ParameterDtypes(("fp32", "bf16", "fp16"), "bf16", True)
    assert ParameterDtypes.of(named[:1], "bf16") == ParameterDtypes(("bf16",), "bf16", False)
    assert ParameterDtypes.of([], "bf16") == ParameterDtypes((), "bf16", False)
