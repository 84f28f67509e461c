"""The engine of a model that a library's trainer was given.

Knows which dtypes go together. Must not know what the library does with the model.
"""

from __future__ import annotations

from torch import nn

import infinity


def has_engine(model: nn.Module) -> bool:
    try:
        infinity.engine_of(model)
    except infinity.ConfigError:
        return False
    return True


def taken(model: nn.Module, config: infinity.Config | None, precision: str, *, told: str) -> infinity.Engine:
    """The engine that the model is in, or else a new one with these settings.

    precision: "no", "bf16" or "fp16", that of the library's autocast. told: how the program says that, for the error. Raises ConfigError for
    a precision that is not the dtype of the engine.
    """
    engine = infinity.engine_of(model) if has_engine(model) else None
    dtype = engine.config.dtype if engine is not None else (config or infinity.Config()).dtype
    if precision not in ("no", dtype):
        raise infinity.ConfigError(
            f"{told} over an engine of dtype {dtype!r}: use infinity.Config(dtype={precision!r}), which keeps fp32 masters, or leave the "
            f"precision out. Some trainers, as TRL's, have bf16=True where nothing is said."
        )
    return engine if engine is not None else infinity.offload(model, config)
