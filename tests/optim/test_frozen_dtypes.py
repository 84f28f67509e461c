"""Quantised frozen weights: their codes, their bits in every tier, and training of adapters over them."""

import copy

import pytest
import torch
from support.helpers import NVME, assert_same_bits, assert_same_states, on_gpu, run_interpreted, states_of, training
from torch import nn

import infinity
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.formats.format import STORAGES, Format
from infinity.model.hidden_matrices import hidden_linear_weights
from infinity.optim.block_codes import CODES
from infinity.optim.shard import Shard

pytestmark = pytest.mark.usefixtures("one_thread")

BITS = {"nf4": 4.5, "int8": 8.25, "fp8": 8.25, "mxfp4": 4.25}
PLACES = {"host": {"param_tier": "host", "optimizer_state_tier": "host", "residency": "none"}, "nvme": NVME, "auto": {}}


def coded(name, values):
    """A shard with these values."""
    format = Format(name, trainable=False)
    shard = Shard(format, {each.name: torch.zeros(each.count(len(values)), dtype=TORCH_DTYPES[each.dtype]) for each in format.segments})
    shard.put(values)
    return shard


def nearest(name, values):
    """The definition: of all numbers times the scale of the block, the nearest one."""
    code, found = CODES[name], []
    numbers = torch.tensor(sorted(number for number in code.numbers if number == number))  # of two as near, the lower one
    for block in values.float().split(code.block):
        largest = block.abs().max()
        scale = 2.0 ** (largest.log2().floor() - 2) if code.has_power_scale else largest / numbers.max()
        found.append((numbers[(block[:, None] * (1 / scale) - numbers).abs().argmin(1)] * scale) if largest else block)
    return torch.cat(found).bfloat16()


@pytest.mark.parametrize("name", CODES)
def test_a_value_gets_the_nearest_number_of_its_block(name):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 3, 1000)
    values[256:384] = 0
    shard = coded(name, values)
    found = shard.codec.weights(shard)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, nearest(name, values))
    codes = {key: segment.clone() for key, segment in shard.items()}
    shard.put(shard.masters())  # decoded values that are written back
    shard.put(torch.cat([found[:500].float(), shard.masters()[500:]]))
    for key, segment in shard.part(512, 1000).items():
        assert torch.equal(segment.view(torch.uint8), Shard(shard.format, codes).part(512, 1000)[key].view(torch.uint8))


def decoded_both_ways(name, numel, dtype, device):
    """Values by the kernel, and in operations of torch on the CPU. Bytes are random, so that every code and every scale occurs."""
    from infinity.optim import _block_codes_triton  # needs Triton

    code, generator = CODES[name], torch.Generator().manual_seed(numel)
    codes = torch.randint(256, (-(-numel // code.per_byte),), dtype=torch.uint8, generator=generator)
    scales = torch.randint(256, (-(-numel // code.block),), dtype=torch.uint8, generator=generator)
    if not code.has_power_scale:
        scales = torch.exp2(scales.float() / 2 - 100)
    expected, found = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device=device)
    code.decode_in_torch(codes, scales, expected)
    numbers = code.tables(found.device)[0]
    _block_codes_triton.decode(codes.to(device), numbers, scales.to(device), code.block, found)
    return found.cpu(), expected


def check_kernel(device):
    for name in CODES:
        for numel in (1, 31, 2048, 20_003):
            for dtype in (torch.bfloat16, torch.float32):
                found, expected = decoded_both_ways(name, numel, dtype, device)
                assert torch.equal(found.isnan(), expected.isnan()), (name, numel, dtype)
                assert_same_bits(found.nan_to_num(0.0), expected.nan_to_num(0.0), f"{name}, {numel} values, {dtype}")


@on_gpu
def test_the_kernel_of_the_gpu_decodes_the_same_bits():
    check_kernel("cuda")


def test_the_interpreted_kernel_decodes_the_same_bits():
    """A new process, because Triton interprets all kernels of a process or none."""
    pytest.importorskip("triton")
    run_interpreted("import test_frozen_dtypes; test_frozen_dtypes.check_kernel('cpu')")


@pytest.mark.parametrize("shape", [(50, 64), (7, 30)])
def test_nf4_has_the_bits_of_bitsandbytes(shape):
    functional = pytest.importorskip("bitsandbytes").functional
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() / 50
    theirs, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    shard = coded("nf4", values.view(-1))
    assert torch.equal(shard["weight"], theirs.view(-1))
    assert torch.equal(shard["scale"], state.absmax)
    assert torch.equal(shard.codec.weights(shard), functional.dequantize_4bit(theirs, state).view(-1))


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank matrix beside it."""

    def __init__(self, hidden):
        super().__init__()
        self.base = nn.Linear(hidden, hidden).requires_grad_(False)
        self.a, self.b = nn.Linear(hidden, 4, bias=False), nn.Linear(4, hidden, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


def adapted(hidden=96, layers=3, vocab=40):
    model = nn.Sequential(nn.Embedding(vocab, hidden), *(Adapted(hidden) for _ in range(layers)), nn.LayerNorm(hidden), nn.Linear(hidden, vocab))
    for module in (model[0], model[-2], model[-1]):
        module.requires_grad_(False)
    return model


def step(model, optimizer, number):
    tokens = torch.randint(40, (2, 17), generator=torch.Generator().manual_seed(number))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def expanded(model, name):
    """A copy of the model in plain PyTorch, with the decoded weights of its frozen layers."""
    model = copy.deepcopy(model).bfloat16()
    for module in model.modules():
        if isinstance(module, Adapted):
            module.base.weight.data = nearest(name, module.base.weight.flatten()).view_as(module.base.weight)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CODES)
def test_adapters_train_over_a_quantised_base(name, place, tmp_path):
    torch.manual_seed(0)
    base = adapted().bfloat16()
    reference = expanded(base, name)
    with training(lambda: copy.deepcopy(base), tmp_path, dtype="bf16", frozen_dtype=name, **PLACES[place]) as (model, engine, ours):
        losses = [step(model, ours, number) for number in range(3)]
        formats = {spec.name: str(spec.format) for spec in engine.layout.specs}
        assert formats["1.base.weight"] == f"frozen {name}"
        assert {formats[each] for each in ("0.weight", "1.base.bias", "4.weight", "5.weight")} == {"frozen bf16"}
        assert formats["1.a.weight"] == "bf16"
        records = [chunk.record for chunk in engine.registry.chunks if chunk.record.format.name == name]
        numel = sum(record.numel for record in records)
        stored = sum(segment.nbytes(record.numel) for record in records for segment in record.segments)
        assert stored == numel * BITS[name] / 8
        assert f"frozen {name} ({numel:,} parameters)" in " ".join(str(infinity.describe(model)).split())
        trained = states_of(engine, model)
        weights = model.state_dict()
    with training(lambda: reference, tmp_path / "plain", dtype="bf16") as (model, engine, ours):
        assert [step(model, ours, number) for number in range(3)] == losses
        states = states_of(engine, model)
        adapters = [key for key in states if ".a." in key or ".b." in key]
        assert_same_states({key: states[key] for key in adapters}, {key: trained[key] for key in adapters})
        for key, value in model.state_dict().items():
            assert torch.equal(value, weights[key]), key


def test_a_quantised_base_needs_frozen_bf16_matrices(tmp_path):
    with pytest.raises(infinity.ConfigError, match="frozen_dtype='nf4': no weight of a hidden linear layer is frozen"):
        with training(lambda: nn.Linear(64, 64), tmp_path, dtype="bf16", frozen_dtype="nf4") as (model, _, ours):
            step(model, ours, 0)
    with pytest.raises(infinity.ConfigError, match="frozen_dtype='nf4' with dtype='fp16'"):
        infinity.Config(dtype="fp16", frozen_dtype="nf4")


def saved_or_loaded(folder, path, name, seed, chunk_mib):
    """The states after a load of the checkpoint, or if there is none, after three steps and a save."""
    options = {"dtype": "bf16", "frozen_dtype": name, "chunk_mib": chunk_mib}
    with training(adapted, folder, seed=seed, **options | PLACES["nvme"]) as (model, engine, ours):
        if not path.exists():
            for number in range(3):
                step(model, ours, number)
            infinity.save(path, model, ours)
        infinity.load(path, model, ours)
        return states_of(engine, model)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("saved_on, loaded_on", [(2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("name", CODES)
def test_a_quantised_base_resumes_on_other_ranks(worlds, name, saved_on, loaded_on, tmp_path):
    def on(size, *arguments):
        return worlds(size).run(saved_or_loaded, *arguments) if size > 1 else [saved_or_loaded(*arguments)]

    path = tmp_path / "checkpoint"
    saved = on(saved_on, tmp_path, path, name, 0, 1 / 512)
    for states in on(loaded_on, tmp_path, path, name, 1, 1 / 128):
        assert states["1.base.weight"]["weight"].dtype == TORCH_DTYPES[STORAGES[name].weight[0].dtype]
        assert_same_states(states, saved[0])


def moved_by(engine, work):
    """Bytes to the device and from it while the work runs."""
    before = engine.stats()["links"]
    work()
    after = engine.stats()["links"]
    return [after[link]["nbytes"] - before[link]["nbytes"] for link in ("h2d", "d2h")]


def test_a_frozen_base_and_its_adapters_stay_on_a_device_with_room(tmp_path):
    """After the first step nothing moves. A new value of a frozen weight is used, and without room everything comes and goes again."""
    config = {"dtype": "bf16", "frozen_dtype": "nf4", "device_memory": "64MiB"}
    with (
        training(adapted, tmp_path / "auto", **config) as (model, engine, optimizer),
        training(adapted, tmp_path / "host", **config | PLACES["host"]) as (other, _, other_optimizer),
    ):
        def both():
            assert step(model, optimizer, number) == step(other, other_optimizer, number)

        for number in range(2):
            both()
        assert moved_by(engine, both) == [0, 0]
        for each in (model, other):
            with infinity.gathered([each[1].base.weight]):
                each[1].base.weight.data.mul_(2)
        both()
        assert moved_by(engine, both) == [0, 0]
        for each in (model, other):  # a block inside another one, whose change the outer block takes back
            weight = each[2].base.weight
            with infinity.gathered([weight]):
                with infinity.gathered([weight]):
                    weight.data.mul_(3)
                weight.data.div_(3)
        both()
        assert moved_by(engine, both) == [0, 0]
        engine.device_budget._retreat()
        assert not engine.device_budget.kept.frozen and not any(span.pinned for span in engine.registry.spans)
        assert moved_by(engine, both)[0] > 0
        both()
        assert_same_states(states_of(engine, model), states_of(infinity.engine_of(other), other))


class Shrinking(Adapted):
    """Its forward pass writes to the frozen weight."""

    def forward(self, x):
        with torch.no_grad():
            self.base.weight.mul_(0.9)
        return super().forward(x)


def test_a_frozen_weight_that_forward_writes_has_the_same_bits(tmp_path):
    def make():
        model = adapted()
        model[2] = Shrinking(96)
        model[2].base.requires_grad_(False)
        return model

    found = []
    for place in ({"device_memory": "110KiB"}, PLACES["host"]):
        with training(make, tmp_path / str(len(found)), dtype="bf16", **place) as (model, engine, optimizer):
            losses = [step(model, optimizer, number) for number in range(5)]
            assert bool(engine.device_budget.kept.frozen) == (not found)
            found.append((losses, states_of(engine, model)))
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", CODES)
def test_a_block_with_a_value_that_is_not_finite_is_not_finite(name, wrong):
    values = torch.linspace(-1, 1, 256)
    values[3] = wrong
    found = (shard := coded(name, values)).codec.weights(shard)
    assert not found[3].isfinite() and found[128:].isfinite().all()


def test_biases_of_experts_and_numbers_beside_a_layer_are_not_quantised():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.experts = nn.Linear(64, 64, bias=False), nn.Parameter(torch.randn(4, 64, 64))
            self.biases, self.exponents = nn.Parameter(torch.randn(4, 64)), nn.Parameter(torch.randn(64, 16))

    layer = Layer()
    assert {id(param) for param in hidden_linear_weights(layer)} == {id(layer.linear.weight), id(layer.experts)}
