"""Detects layers that do not mix the buffers' dtype with the engine's parameter dtype.

Knows layers of torch.nn and tries them. Must not know engines.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from infinity.errors import ConfigError

_CASTS = {torch.bfloat16: "bfloat16", torch.float16: "half", torch.float32: "float"}


def refuse_unmixed(model: nn.Module, dtypes: Mapping[int, torch.dtype], device: torch.device) -> None:
    """Raise ConfigError if a batch norm does not mix the dtypes of statistics and parameters on this device.

    dtypes: of the parameters in an engine, by `id`.

    All other layers of torch.nn promote mixed dtypes, or have integer buffers. Rotary tables promote as well.
    """
    fails: dict[tuple[torch.dtype, torch.dtype], bool] = {}
    for name, module in model.named_modules():
        mean = getattr(module, "running_mean", None)
        if type(module).forward is not nn.modules.batchnorm._BatchNorm.forward or mean is None or module.weight is None:
            continue
        dtype = dtypes.get(id(module.weight), module.weight.dtype)
        pair = dtype, mean.dtype
        if pair not in fails:
            fails[pair] = not _mixes(*pair, device)
        if fails[pair]:
            kind, name = type(module).__name__, f"{name}.running_mean".lstrip(".")
            raise ConfigError(
                f"the buffer {name} is of {mean.dtype} and the engine's parameters are of {dtype}, and {kind} does not mix these dtypes on "
                f'{device.type}, as in plain PyTorch. Call `model.{_CASTS[dtype]}()` before infinity.offload, or inside '
                f'infinity.init; or use infinity.Config(dtype="fp32") with a model of float32.'
            )


def _mixes(dtype: torch.dtype, other: torch.dtype, device: torch.device) -> bool:
    x, affine = (torch.ones(*shape, dtype=dtype, device=device) for shape in ((2, 1), (1,)))
    try:
        nn.functional.batch_norm(x, *torch.ones(2, 1, dtype=other, device=device), affine, affine)
    except RuntimeError:
        return False
    return True
