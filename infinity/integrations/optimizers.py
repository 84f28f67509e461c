"""Which of our optimizers computes what one of torch's does, with the same arguments.

Knows names of classes and arguments. Must not know what they compute.
"""

from __future__ import annotations

import torch

import infinity

_KINDS = {torch.optim.AdamW: infinity.AdamW, torch.optim.Adam: infinity.Adam, torch.optim.SGD: infinity.SGD}
_OF_KERNELS = {"foreach", "fused", "capturable", "differentiable"}  # which choose among kernels of torch's


def counterpart(kind: type[torch.optim.Optimizer], options: dict) -> tuple[type[infinity.Elementwise], dict]:
    """(class, arguments) of ours for those of torch. Raises ConfigError where there is none."""
    if issubclass(kind, infinity.Elementwise):
        return kind, dict(options)
    if kind not in _KINDS or options.get("amsgrad") or options.get("maximize"):
        known = ", ".join(known.__name__ for known in _KINDS)
        raise infinity.ConfigError(
            f"{kind.__module__}.{kind.__name__}({', '.join(options)}) has no counterpart whose states live in an engine's tiers. Choose one of "
            f"{known} (optim='adamw_torch' or 'sgd' of TrainingArguments), or make an infinity.Elementwise with a rule of your own"
        )
    return _KINDS[kind], {name: value for name, value in options.items() if name not in _OF_KERNELS | {"amsgrad", "maximize"}}
