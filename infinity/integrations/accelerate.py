"""An integration with Accelerator of accelerate: `offloaded`.

Knows the methods of Accelerator, and when they run. Must not know how an engine works.
"""

# [Note: an Accelerator with engines]
# A model in an engine is marked as prepared, as in [Note: a Trainer with an engine] in transformers.py. Therefore accelerate does not move
# or wrap the model, and does not use autocast. An optimizer of torch becomes its counterpart in infinity, and the optimizer's schedulers
# keep working. save_state writes a folder of infinity.save in place of the model's weights.

from __future__ import annotations

import contextlib
import math
import os
import weakref
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

import infinity
from infinity.integrations.engines import has_engine, taken
from infinity.integrations.optimizers import convert

Kind = TypeVar("Kind", bound=Accelerator)

def offloaded(accelerator: type[Accelerator] = Accelerator, config: infinity.Config | None = None) -> type[Accelerator]:
    """Return a subclass of Accelerator that trains with engines: `offloaded(Accelerator, config)(gradient_accumulation_steps=4)`.

    `prepare` puts each model with trainable parameters into an engine with this configuration, if the model has no engine yet. The
    optimizer (torch's AdamW, Adam or SGD) becomes infinity's counterpart. Pass both in one call of `prepare`, or the model first. backward,
    accumulate, clip_grad_norm_, save_state and load_state work as before. Call save_state and load_state on all ranks. Raises ConfigError if
    mixed_precision differs from the engine's dtype, and for an optimizer without a counterpart.
    """
    made = type(accelerator.__name__, (_Offloaded, accelerator), {"_config": config})
    made.__module__, made.__qualname__ = accelerator.__module__, accelerator.__qualname__
    return made


class _Offloaded:
    """A mixin for classes of Accelerator; see [Note: an Accelerator with engines]."""

    _config: infinity.Config | None
    _saves = False

    def __init__(self, *args, mixed_precision=None, **options):
        self._in_engines: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wanted = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        super().__init__(*args, mixed_precision="no" if self._wanted == "fp16" else mixed_precision, **options)  # engines scale losses
        self.register_save_state_pre_hook(self._save_engines)
        self.register_load_state_pre_hook(self._load_engines)

    # Models and optimizers.

    def prepare(self, *args, **options):
        for model in args:
            if isinstance(model, nn.Module) and any(param.requires_grad for param in model.parameters()):
                told = f"Accelerator(mixed_precision={self._wanted!r})"
                taken(model, self._config, self._wanted, told=told, asked="mixed_precision={!r}".format)
                model._is_accelerate_prepared = True
                self._in_engines.add(model)
        return super().prepare(*args, **options)

    def prepare_optimizer(self, optimizer, device_placement=None):
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if self._trains_in_engine(optimizer):
            convert(optimizer, max_grad_norm=math.inf, accumulation_steps=self.gradient_accumulation_steps)
            wrapped = super().prepare_optimizer(optimizer, device_placement=False)
            wrapped.__class__ = _Optimizer
            return wrapped
        return super().prepare_optimizer(optimizer, device_placement)

    def _trains_in_engine(self, optimizer: torch.optim.Optimizer) -> bool:
        own = {id(param) for model in self._in_engines for param in model.parameters()}
        return any(id(param) in own for group in optimizer.param_groups for param in group["params"])

    @contextlib.contextmanager
    def no_sync(self, model):
        with infinity.no_sync(model) if has_engine(model) else super().no_sync(model):
            yield

    # States.

    def save_state(self, *args, **options):
        self._saves = True
        try:
            return super().save_state(*args, **options)
        finally:
            self._saves = False

    def get_state_dict(self, model, *args, **options):
        return {} if self._saves and has_engine(model) else super().get_state_dict(model, *args, **options)

    def _save_engines(self, models, weights, folder) -> None:
        for index, model in enumerate(filter(has_engine, models)):
            infinity.save(_states(folder, index), model, infinity.engine_of(model).optimizer)
        weights[:] = [each for model, each in zip(models, weights, strict=True) if not has_engine(model)]

    def _load_engines(self, models, folder) -> None:
        for index, model in enumerate(filter(has_engine, models)):
            infinity.load(_states(folder, index), model, infinity.engine_of(model).optimizer)
        models[:] = [model for model in models if not has_engine(model)]


class _Optimizer(AcceleratedOptimizer):
    """Accelerate's wrapper of an engine's optimizer. infinity.load restores the optimizer states with the model."""

    def load_state_dict(self, state_dict) -> None:
        self.optimizer.load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})


def _states(folder: str, index: int) -> str:
    return os.path.join(folder, f"infinity_{index}" if index else "infinity")
