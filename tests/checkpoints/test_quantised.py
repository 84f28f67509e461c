"""Quantised weights in safetensors files: the values and codes that an engine takes from them. bitsandbytes: tests/integrations."""

import pytest
import torch
from support.helpers import NVME
from torch import nn

import infinity
from infinity.checkpoints.safetensors_format import TensorSpec
from infinity.checkpoints.safetensors_writer import write_files

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, COLUMNS = 160, 256
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def save_files(tensors, folder):
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    write_files(folder, specs, lambda spec: [tensors[spec.name].reshape(-1)])


def random(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) / 100 + 0.001


def spread(scales, rows, columns):
    """A scale for each element."""
    return scales.repeat_interleave(rows, 0)[:ROWS].repeat_interleave(columns, 1)[:, :COLUMNS].float()


def layouts():
    """For each layout of a file: (dtype of a storage, tensors of the file, values)."""
    codes = torch.randint(-90, 90, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    floats = codes.float().to(torch.float8_e4m3fn)
    row, whole, tile, group = random(ROWS, 1).bfloat16(), random(1), random(2, 2), random(ROWS, 2)
    yield "int8", {"weight": codes, "weight_scale": row}, codes * spread(row, 1, COLUMNS)
    yield "int8", {"weight": codes, "weight_scale": whole}, codes * whole
    yield "int8", {"weight": codes, "weight_scale": group}, codes * spread(group, 1, 128)
    yield "fp8", {"weight": floats, "weight_scale": row}, floats.float() * spread(row, 1, COLUMNS)
    yield "fp8", {"weight": floats, "weight_scale_inv": tile}, floats.float() * spread(tile, 128, 128)
    packed = torch.randint(256, (ROWS, COLUMNS // 2), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    powers = torch.randint(110, 125, (ROWS, COLUMNS // 32), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    numbers = torch.stack([E2M1[(packed & 15).int()], E2M1[(packed >> 4).int()]], -1).view(ROWS, COLUMNS)
    yield "mxfp4", {"weight_packed": packed, "weight_scale": powers}, numbers * spread(2.0 ** (powers.float() - 127), 1, 32)


LAYOUTS = list(layouts())


def loaded(folder, tensors, frozen_dtype, *, window, started):
    """The state of the frozen weight, and the weight that the model computes with, of an engine that has loaded the tensors from a file."""
    last = {"1.weight": torch.zeros(8, COLUMNS), "1.bias": torch.zeros(8)}
    save_files({f"0.{name}": value.contiguous() for name, value in tensors.items()} | last, folder / "files")
    config = infinity.Config(swap_dirs=folder, device="cpu", frozen_dtype=frozen_dtype, host_memory="64MiB", chunk_mib=1 / 32, **NVME)
    with infinity.init(config, window=window):
        model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(COLUMNS, 8)).bfloat16()
        model[0].weight.requires_grad_(False)
    if not started:
        infinity.load_safetensors(model, folder / "files")
    with infinity.engine_of(model) as engine:
        infinity.AdamW([param for param in model.parameters() if param.requires_grad])
        if started:
            infinity.load_safetensors(model, folder / "files")
        return engine.read_state(model[0].weight), model.state_dict()["0.weight"]


@pytest.mark.few(6)
@pytest.mark.parametrize("window, started", [(0, False), (1 << 30, False), (0, True)])
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_scaled_weights_keep_their_codes(number, window, started, tmp_path):
    name, tensors, values = LAYOUTS[number]
    state, weight = loaded(tmp_path, tensors, name, window=window, started=started)
    assert torch.equal(weight, values.bfloat16())
    if "weight" in tensors:
        assert torch.equal(state["weight"].view(torch.uint8).view(-1), tensors["weight"].view(torch.uint8).view(-1))


def test_a_quantised_file_loads_into_other_storages(tmp_path):
    for name, tensors, values in LAYOUTS[3:]:
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        _, weight = loaded(folder, tensors, "same", window=0, started=False)
        assert torch.equal(weight, values.bfloat16()), name
        (folder / "nf4").mkdir()
        _, weight = loaded(folder / "nf4", tensors, "nf4", window=0, started=False)
        assert (weight.float() - values).norm() < 0.15 * values.norm(), name


@pytest.mark.parametrize("wrong", [torch.ones(3, 1), torch.ones(ROWS, 1, 1), torch.ones(ROWS, 1, dtype=torch.int32)])
def test_scales_that_do_not_fit_their_weight_are_refused(wrong, tmp_path):
    save_files({"0.weight": torch.ones(ROWS, COLUMNS, dtype=torch.int8), "0.weight_scale": wrong}, tmp_path / "files")
    infinity.offload(model := nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False)), infinity.Config(swap_dirs=tmp_path, device="cpu"))
    with pytest.raises(infinity.CheckpointError, match="0.weight_scale"):
        infinity.load_safetensors(model, tmp_path / "files")


def test_a_scale_of_the_model_itself_is_no_scale_of_a_file(tmp_path):
    """A layer that computes in fp8 has its weight and its scale as two tensors."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float8_e4m3fn), requires_grad=False)
            self.weight_scale_inv = nn.Parameter(torch.zeros(2, 2))

        def forward(self, x):
            return x @ self.weight.to(x.dtype).T

    tensors = LAYOUTS[4][1]
    save_files({f"0.{name}": value for name, value in tensors.items()}, tmp_path / "files")
    model = nn.Sequential(Layer())
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu")):
        infinity.load_safetensors(model, tmp_path / "files")
        assert torch.equal(model.state_dict()["0.weight"].view(torch.uint8), tensors["weight"].view(torch.uint8))
        assert torch.equal(model.state_dict()["0.weight_scale_inv"], tensors["weight_scale_inv"])


def test_zero_points_are_refused_and_scales_of_activations_are_left_out(tmp_path):
    tensors = {f"0.{name}": value for name, value in LAYOUTS[0][1].items()}
    save_files(tensors | {"0.input_scale": torch.ones(1)}, tmp_path / "files")
    save_files(tensors | {"0.weight_zero_point": torch.ones(ROWS, 1, dtype=torch.int8)}, tmp_path / "shifted")
    infinity.offload(model := nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False)), infinity.Config(swap_dirs=tmp_path, device="cpu"))
    infinity.load_safetensors(model, tmp_path / "files")
    with pytest.raises(infinity.CheckpointError, match="0.weight_zero_point.*: weights with zero points"):
        infinity.load_safetensors(model, tmp_path / "shifted", strict=False)


def test_tiles_whose_borders_cut_blocks_are_refused(tmp_path):
    def made(folder, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 150, bias=False), nn.Linear(150, 8)).bfloat16()
        model[0].weight.requires_grad_(False)
        config = infinity.Config(swap_dirs=folder, device="cpu", frozen_dtype="nf4", host_memory="64MiB", **NVME, **options)
        return infinity.offload(model, config), model

    engine, model = made(tmp_path)
    with engine:
        infinity.save(tmp_path / "checkpoint", model, infinity.AdamW([p for p in model.parameters() if p.requires_grad]))
    engine, model = made(tmp_path, tile_above="8KiB")
    with engine:
        optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad])
        with pytest.raises(infinity.CheckpointError, match="other tiles, whose borders cut blocks of 64 elements"):
            infinity.load(tmp_path / "checkpoint", model, optimizer)
