"""Merging of PEFT adapters over an engine: `merge_and_unload`. A program may add adapters before or after it makes the engine.

Knows which modules are adapted. Must not know how an engine works, or how an adapter is merged.
"""

from __future__ import annotations

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

import infinity


def merge_and_unload(model: PeftModel, *, safe_merge: bool = False, adapter_names: list[str] | None = None) -> nn.Module:
    """Return the base model with merged adapters, like `model.merge_and_unload(...)`. Merges one layer at a time, on the device.

    The base model stays in the engine, and can be run and saved. With dtype bf16, the masters change to the merged weights, too. Call this
    function on all ranks, between two steps.
    """
    for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
        with infinity.gathered(layer.parameters()):
            layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
    return model.base_model.unload()
