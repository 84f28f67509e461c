"""The engine of a model that another library's trainer drives.

Knows which dtypes fit together. Must not know how the library trains the model.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

import infinity
from infinity.engine.refused_trainers import note_integration
from infinity.formats.assignment import ParameterDtypes, floating_parameters
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.formats.format import STORAGES
from infinity.output import say

_DTYPES = ("bf16", "fp16", "fp32")  # values of Config.dtype that are precisions, too


def has_engine(model: nn.Module) -> bool:
    try:
        infinity.engine_of(model)
    except infinity.ConfigError:
        return False
    return True


def taken(
    model: nn.Module, config: infinity.Config | None, precision: str, *, told: str, asked: Callable[[str], str]
) -> infinity.Engine:
    """Return the engine of the model, or a new engine with this configuration.

    precision: dtype of the library's autocast, "no" without autocast. told: the precision as the program wrote it, for messages.
    asked(dtype): the library's argument for autocast in this dtype. Raises ConfigError if the precision differs from the engine's dtype.
    Without autocast, an engine of bf16 or fp16 accepts a model of another dtype, and rank 0 prints one line.
    """
    engine = infinity.engine_of(model) if has_engine(model) else None
    named = floating_parameters(model)
    dtype = (engine.dtypes if engine is not None else ParameterDtypes.of(named, (config or infinity.Config()).dtype)).main
    computes_in = STORAGES[dtype].compute
    if precision not in ("no", computes_in):
        change = f"use infinity.Config(dtype={precision!r}), which keeps fp32 masters, or " if precision in _DTYPES else ""
        raise infinity.ConfigError(
            f"{told} over an engine of dtype {dtype!r}: {change}omit the precision. Some trainers, such as those of TRL, set bf16=True by "
            f"default."
        )
    found = {param.dtype for _, param in named}
    keeps_dtypes = engine is None and (len(found) > 1 or found == {TORCH_DTYPES[computes_in]})
    if engine is None:
        engine = infinity.offload(model, config)
    if note_integration(engine) and precision == "no" and STORAGES[dtype].master and not keeps_dtypes and engine.ranks.is_first:
        say(
            f"{told} over an engine of dtype {dtype!r}: the model computes in {computes_in}, with fp32 masters. If this is intended, add "
            f"{asked(computes_in)}. If not, use infinity.Config(dtype='fp32')"
        )
    return engine
