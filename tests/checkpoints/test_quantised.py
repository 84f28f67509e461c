"""Quantised weights in safetensors files: the values and codes that an engine takes from them. bitsandbytes: tests/integrations."""

import pytest
import torch
from helpers import NVME
from safetensors.torch import save_file
from torch import nn

import infinity

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, COLUMNS = 160, 256
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


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
    save_file({f"0.{name}": value.contiguous() for name, value in tensors.items()} | last, folder / "file.safetensors")
    config = infinity.Config(swap_dirs=folder, device="cpu", frozen_dtype=frozen_dtype, host_memory="64MiB", chunk_mib=1 / 32, **NVME)
    with infinity.init(config, window=window):
        model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(COLUMNS, 8)).bfloat16()
        model[0].weight.requires_grad_(False)
    if not started:
        infinity.load_safetensors(model, folder / "file.safetensors")
    with infinity.engine_of(model) as engine:
        infinity.AdamW([param for param in model.parameters() if param.requires_grad])
        if started:
            infinity.load_safetensors(model, folder / "file.safetensors")
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
    save_file({"0.weight": torch.ones(ROWS, COLUMNS, dtype=torch.int8), "0.weight_scale": wrong}, tmp_path / "file.safetensors")
    infinity.offload(model := nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False)), infinity.Config(swap_dirs=tmp_path, device="cpu"))
    with pytest.raises(infinity.CheckpointError, match="0.weight_scale"):
        infinity.load_safetensors(model, tmp_path / "file.safetensors")
