"""Which of our optimizers computes what one of torch's does, and how one becomes ours.

Knows names of classes and arguments. Must not know what they compute.
"""

from __future__ import annotations

import torch

import infinity

_KINDS = {torch.optim.AdamW: infinity.AdamW, torch.optim.Adam: infinity.Adam, torch.optim.SGD: infinity.SGD}
_OF_KERNELS = {"foreach", "fused", "capturable", "differentiable"}  # which choose among kernels of torch's
_OFF = {"amsgrad", "maximize", "decoupled_weight_decay"}  # which are off, or said by the class


def counterpart(kind: type[torch.optim.Optimizer], options: dict) -> tuple[type[infinity.Elementwise], dict]:
    """(class, arguments) of ours for those of torch. Raises ConfigError where there is none."""
    if issubclass(kind, infinity.Elementwise):
        return kind, dict(options)
    if kind is torch.optim.Adam and options.get("decoupled_weight_decay"):
        kind = torch.optim.AdamW
    if kind not in _KINDS or options.get("amsgrad") or options.get("maximize"):
        known = ", ".join(known.__name__ for known in _KINDS)
        raise infinity.ConfigError(
            f"{kind.__module__}.{kind.__name__}({', '.join(options)}) has no counterpart whose states live in an engine's tiers. Choose one "
            f"of {known} (optim='adamw_torch' or 'sgd' of TrainingArguments), or make an infinity.Elementwise with a rule of your own"
        )
    return _KINDS[kind], {name: value for name, value in options.items() if name not in _OF_KERNELS | _OFF}


def convert(optimizer: torch.optim.Optimizer, **options) -> infinity.Elementwise:
    """Make one of torch's, over parameters of an engine and not used yet, ours: the same object, so that schedulers go on with it.

    options: of `infinity.Elementwise`. One that is ours is left as it is. Raises ConfigError where it has no counterpart or has states.
    """
    if isinstance(optimizer, infinity.Elementwise):
        return optimizer
    kind, defaults = counterpart(type(optimizer), optimizer.defaults)
    for group in optimizer.param_groups:
        counterpart(type(optimizer), group)  # which may have asked for what there is not
    if optimizer.state:
        raise infinity.ConfigError(f"{type(optimizer).__name__} has states already; give it over, with its model, before the first step")
    unknown = optimizer.defaults.keys() - defaults.keys()
    groups = [{name: value for name, value in group.items() if name not in unknown} for group in optimizer.param_groups]
    is_watched = vars(optimizer).pop("step", None) is not None
    optimizer.__class__ = kind
    optimizer.__init__(groups, **defaults, **options)
    if is_watched:
        _watch(optimizer)
    return optimizer


def _watch(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler was made over it, which looks whether step() has been called, in this way."""
    step = optimizer.step

    def watched(*args, **kwargs):
        optimizer._opt_called = True
        return step(*args, **kwargs)

    watched._wrapped_by_lr_sched = True
    optimizer.step = watched
