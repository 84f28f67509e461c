"""Adapters of PEFT over an engine: they may come before or after it is made; `merge_and_unload` puts them into the base.

Knows which modules are adapted. Must not know how an engine works, or how an adapter is merged.
"""

from __future__ import annotations

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

import infinity


def merge_and_unload(model: PeftModel, *, safe_merge: bool = False, adapter_names: list[str] | None = None) -> nn.Module:
    """The base model with its adapters merged into it, as `model.merge_and_unload(...)`, a layer at a time: each is whole on the device
    meanwhile. The base stays in its engine, to be run and saved; in bf16 its masters are the merged weights. Call it on all ranks, between
    two steps."""
    for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
        with infinity.gathered(layer.parameters()):
            layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
    return model.base_model.unload()
