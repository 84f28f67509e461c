"""A batch norm cannot mix parameters of the engine's dtype with buffers of another dtype: it is refused by name, with remedies."""

import contextlib
import re

import pytest
import torch
from support.helpers import NVME
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.model.buffers import refuse_unmixed

CPU = torch.device("cpu")


class Convolutions(nn.Sequential):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def config_of(directory, dtype):
    return infinity.Config(swap_dirs=directory, device="cpu", dtype=dtype, chunk_mib=1 / 512, host_memory="64MiB", **NVME)


def train(model, dtype, steps=3):
    optimizer = infinity.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for _ in range(steps):
        loss = model(torch.randn(2, 3, 8, 8, dtype=dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isfinite()


def taken(how, config, prepare=lambda model: None):
    if how == "init":
        with infinity.init(config, window=0):
            model = Convolutions()
            prepare(model)
    else:
        model = Convolutions()
        prepare(model)
        infinity.offload(model, config)
    return model


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["offload", "init"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_fp32_batch_norm_is_refused_and_both_remedies_work(dtype, how, tmp_path):
    with pytest.raises(ConfigError, match=r"the buffer 1\.running_mean is of torch\.float32") as refusal:
        taken(how, config_of(tmp_path, dtype))
    line = re.search(r"`(model\.\w+\(\))`", str(refusal.value))[1]
    assert 'infinity.Config(dtype="fp32")' in str(refusal.value)
    model = taken(how, config_of(tmp_path, dtype), lambda model: eval(line))
    train(model, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    assert model[1].running_mean.abs().sum() > 0
    infinity.engine_of(model).close()
    model = taken(how, config_of(tmp_path, "fp32"))
    train(model, torch.float32)
    infinity.engine_of(model).close()


def test_a_bf16_batch_norm_in_an_fp32_engine_is_refused(tmp_path):
    model = Convolutions().bfloat16()
    with pytest.raises(ConfigError, match=r"`model\.float\(\)`"):
        infinity.offload(model, config_of(tmp_path, "fp32"))
    model.float()
    infinity.offload(model, config_of(tmp_path, "fp32"))
    train(model, torch.float32)
    infinity.engine_of(model).close()


def instance(width):
    return nn.InstanceNorm2d(width, affine=True, track_running_stats=True)


MIXED = {
    "without affine": lambda: Convolutions(lambda width: nn.BatchNorm2d(width, affine=False)),
    "without statistics": lambda: Convolutions(lambda width: nn.BatchNorm2d(width, track_running_stats=False)),
    "instance norm": lambda: Convolutions(instance),
    "group norm": lambda: Convolutions(lambda width: nn.GroupNorm(2, width)),
}


@pytest.mark.parametrize("kind", MIXED)
def test_layers_that_accept_mixed_dtypes_are_not_refused(kind, tmp_path):
    model = MIXED[kind]()
    with infinity.offload(model, config_of(tmp_path, "bf16")), plain_mixes(kind):
        train(model, torch.bfloat16)


def plain_mixes(kind):
    """Expect PyTorch's error if this version, such as 2.8, has no bf16 instance norm with statistics in fp32."""
    one, fp32 = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    try:
        torch.instance_norm(one.expand(1, 1, 2), one, one, fp32, fp32.clone(), True, 0.1, 1e-5, False)
    except RuntimeError as error:
        if kind == "instance norm":
            return pytest.raises(RuntimeError, match=re.escape(str(error)))
    return contextlib.nullcontext()


class Own(nn.BatchNorm2d):
    """A batch norm that always computes in fp32."""

    def forward(self, x):
        affine = self.weight.float(), self.bias.float()
        return nn.functional.batch_norm(x.float(), self.running_mean, self.running_var, *affine, self.training).to(x.dtype)


def test_a_batch_norm_with_its_own_forward_is_not_refused(tmp_path):
    model = Convolutions(Own)
    with infinity.offload(model, config_of(tmp_path, "bf16")):
        train(model, torch.bfloat16)


def test_position_and_frequency_tables_are_not_refused():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, more in {"Llama": {"vocab_size": 50}, "Bert": {"vocab_size": 50}, "ViT": {"image_size": 8, "patch_size": 4}}.items():
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**small, **more))
        assert [*model.buffers()] or name == "ViT"
        refuse_unmixed(model, torch.bfloat16, CPU)
