"""The engine of a model that a library's trainer was given.

Knows which dtypes go together. Must not know what the library does with the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import infinity
from infinity.engine.refused_trainers import note_integration
from infinity.formats.assignment import ParameterDtypes
from infinity.output import say

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def has_engine(model: nn.Module) -> bool:
    try:
        infinity.engine_of(model)
    except infinity.ConfigError:
        return False
    return True


def taken(
    model: nn.Module, config: infinity.Config | None, precision: str, *, told: str, asked: Callable[[str], str]
) -> infinity.Engine:
    """The engine that the model is in, or else a new one with these settings.

    precision: "no" without autocast, or the dtype of the library's autocast. told: the program's words for this precision, for messages.
    asked(dtype): the argument that asks the library for autocast in this dtype. Raises ConfigError for a precision that is not the dtype of
    the engine. Without autocast, an engine of bf16 or fp16 takes a model of another dtype: rank 0 then prints one line that says so.
    """
    engine = infinity.engine_of(model) if has_engine(model) else None
    named = [(name, param) for name, param in model.named_parameters() if param.is_floating_point() and param.numel()]
    dtype = (engine.dtypes if engine is not None else ParameterDtypes.of(named, (config or infinity.Config()).dtype)).main
    if precision not in ("no", dtype):
        change = f"use infinity.Config(dtype={precision!r}), which keeps fp32 masters, or " if precision in _DTYPES else ""
        raise infinity.ConfigError(
            f"{told} over an engine of dtype {dtype!r}: {change}leave the precision out. Some trainers, as TRL's, have bf16=True where "
            f"nothing is said."
        )
    found = {param.dtype for _, param in named}
    keeps_dtypes = engine is None and (len(found) > 1 or found == {_DTYPES[dtype]})
    if engine is None:
        engine = infinity.offload(model, config)
    if note_integration(engine) and precision == "no" and dtype != "fp32" and not keeps_dtypes and engine.ranks.rank == 0:
        say(
            f"{told} over an engine of dtype {dtype!r}: the model computes in {dtype}, with fp32 masters. If this is meant, add "
            f"{asked(dtype)}; else use infinity.Config(dtype='fp32')"
        )
    return engine
