"""The counterparts of torch's optimizers in infinity, and the conversion of an optimizer object.

Knows names of classes and arguments. Must not know the arithmetic of an optimizer.
"""

from __future__ import annotations

import torch

import infinity

_KINDS = {torch.optim.AdamW: infinity.AdamW, torch.optim.Adam: infinity.Adam, torch.optim.SGD: infinity.SGD}
_OF_KERNELS = {"foreach", "fused", "capturable", "differentiable"}  # options that choose a kernel of torch
_OFF = {"amsgrad", "maximize", "decoupled_weight_decay"}  # options that are off, or follow from the class


def counterpart(kind: type[torch.optim.Optimizer], options: dict) -> tuple[type[infinity.Optimizer], dict]:
    """Return infinity's class and arguments for a class and options of torch. Raises ConfigError if there is no counterpart."""
    if issubclass(kind, infinity.Optimizer):
        return kind, dict(options)
    if kind is torch.optim.Adam and options.get("decoupled_weight_decay"):
        kind = torch.optim.AdamW
    if kind not in _KINDS or options.get("amsgrad") or options.get("maximize"):
        known = ", ".join(known.__name__ for known in _KINDS)
        raise infinity.ConfigError(
            f"{kind.__module__}.{kind.__name__}({', '.join(options)}) has no counterpart in infinity. Choose one of {known} "
            f"(optim='adamw_torch' or 'sgd' of TrainingArguments), or make an infinity.Optimizer with your own rule"
        )
    return _KINDS[kind], {name: value for name, value in options.items() if name not in _OF_KERNELS | _OFF}


def convert(optimizer: torch.optim.Optimizer, **options) -> infinity.Optimizer:
    """Turn an unused optimizer of torch over an engine's parameters into its counterpart. The object stays the same for its schedulers.

    options: arguments of `infinity.Optimizer`. An optimizer of infinity is returned unchanged. Raises ConfigError if the optimizer has
    states, or no counterpart.
    """
    if isinstance(optimizer, infinity.Optimizer):
        return optimizer
    kind, defaults = counterpart(type(optimizer), optimizer.defaults)
    for group in optimizer.param_groups:
        counterpart(type(optimizer), group)  # a group may have options without a counterpart
    if optimizer.state:
        raise infinity.ConfigError(
            f"{type(optimizer).__name__} has states already. Pass the optimizer and its model to the trainer before the first step"
        )
    unknown = optimizer.defaults.keys() - defaults.keys()
    groups = [{name: value for name, value in group.items() if name not in unknown} for group in optimizer.param_groups]
    is_watched = vars(optimizer).pop("step", None) is not None
    optimizer.__class__ = kind
    optimizer.__init__(groups, **defaults, **options)
    if is_watched:
        _watch(optimizer)
    return optimizer


def _watch(optimizer: torch.optim.Optimizer) -> None:
    """Wrap step() like a scheduler of torch does. The existing scheduler checks by this wrapper whether step() was called."""
    step = optimizer.step

    def watched(*args, **kwargs):
        optimizer._opt_called = True
        return step(*args, **kwargs)

    watched._wrapped_by_lr_sched = True
    optimizer.step = watched
