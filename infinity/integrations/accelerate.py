"""Accelerator of accelerate over engines: `offloaded`.

Knows what Accelerator does with models and optimizers, and when. Must not know how an engine works.
"""

# [Note: what an Accelerator must leave to engines]
# As [Note: what a Trainer must leave to the engine] in transformers.py: a model that is in an engine counts as prepared, so it is neither
# moved, nor wrapped, nor run under autocast. An optimizer of torch becomes ours in its place, with the schedulers that were made over it.
# save_state puts a folder of infinity.save beside what it saves of the rest, instead of the model's weights.

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


def offloaded(accelerator: type[Kind] = Accelerator, config: infinity.Config | None = None) -> type[Kind]:
    """The class of an Accelerator that trains with engines: `offloaded(Accelerator, config)(gradient_accumulation_steps=4)`.

    What `prepare` is given then trains so: a model that has anything to train is in an engine, with these settings where it is in none yet,
    and its optimizer (torch's AdamW, Adam or SGD) is infinity's of the same kind. Give both over in one call, or the model first. backward,
    accumulate, clip_grad_norm_, save_state and load_state do what they do; call the latter two on all ranks. Raises ConfigError for a
    mixed_precision that is not the engine's dtype, and for an optimizer that has no counterpart.
    """
    made = type(accelerator.__name__, (_Offloaded, accelerator), {"_config": config})
    made.__module__, made.__qualname__ = accelerator.__module__, accelerator.__qualname__
    return made


class _Offloaded:
    """Mixed into a class of Accelerator; see [Note: what an Accelerator must leave to engines]."""

    _config: infinity.Config | None
    _saves = False

    def __init__(self, *args, mixed_precision=None, **options):
        self._in_engines: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wanted = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        super().__init__(*args, mixed_precision="no" if self._wanted == "fp16" else mixed_precision, **options)  # engines scale losses
        self.register_save_state_pre_hook(self._save_engines)
        self.register_load_state_pre_hook(self._load_engines)

    # What is prepared.

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
    """One of an engine, whose states come with the model's."""

    def load_state_dict(self, state_dict) -> None:
        self.optimizer.load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})


def _states(folder: str, index: int) -> str:
    return os.path.join(folder, f"infinity_{index}" if index else "infinity")
