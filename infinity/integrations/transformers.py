"""An integration with Trainer of transformers and its subclasses, such as those of TRL: `offloaded`.

Knows the methods that Trainer calls, and when. Must not know how an engine works.
"""

# [Note: a Trainer with an engine]
# The engine takes over three tasks of Trainer:
# - Device, replicas and dtype of the model. Trainer does not move the model. The model is marked as prepared. Therefore accelerate does not
#   wrap the model in DistributedDataParallel, and does not use autocast.
# - The optimizer. The class and the numbers come from the arguments. Trainer reads the gradient norm in each step, so updates run after
#   step(). Trainer calls torch's clip_grad_norm_, which works with the engine's gradients.
# - The states. A checkpoint has a folder of infinity.save beside the files of the model. Resuming loads the folder after these files.

from __future__ import annotations

import math
import os
import warnings
from typing import TypeVar

import torch
from transformers import Trainer

import infinity
from infinity.integrations.engines import taken
from infinity.integrations.optimizers import counterpart
from infinity.integrations.stats import flattened

Kind = TypeVar("Kind", bound=Trainer)
STATES = "infinity"  # the folder of infinity.save in a checkpoint of Trainer


def offloaded(trainer: type[Trainer], config: infinity.Config | None = None, *, log_stats: bool = False) -> type[Trainer]:
    """Return a subclass of Trainer that trains its model with an engine: `offloaded(Trainer, config)(model=model, args=args, ...)`.

    trainer: Trainer or a subclass, such as those of TRL. config: of the engine. Pass None for the defaults, or if the model has an engine
    already, as after infinity.init. log_stats: add the engine's stats() to the training logs, for example of TensorBoard.
    The optimizer is infinity's counterpart of `args.optim`, unless the program gives one: `optimizers=(infinity.AdamW(...), None)`.
    Call train, evaluate, predict and save_model on all ranks. Raises ConfigError for `bf16=True` or `fp16=True` over an engine of another
    dtype, and for an optimizer without a counterpart. Without both arguments, an engine of bf16 or fp16 prints one line about its dtype.
    """
    made = type(trainer.__name__, (_Offloaded, trainer), {"_config": config, "_log_stats": log_stats})
    made.__module__, made.__qualname__ = trainer.__module__, trainer.__qualname__
    return made


class _Offloaded:
    """A mixin for classes of Trainer; see [Note: a Trainer with an engine]."""

    _config: infinity.Config | None
    _log_stats: bool

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.args._n_gpu = min(self.args.n_gpu, 1)  # otherwise Trainer replicates the model over the GPUs of this process
        self._train_batch_size = self.args.train_batch_size
        self._take_model()

    # The model.

    def _move_model_to_device(self, model, device) -> None:
        pass

    def _build_accelerator_args(self, **options) -> dict:
        found = super()._build_accelerator_args(**options)
        if found["mixed_precision"] == "fp16":
            found["mixed_precision"] = "no"  # the engine scales losses
        return found

    def _take_model(self) -> infinity.Engine:
        """The engine of the current model, adapters included."""
        self.callback_handler.model = self.model  # frees an earlier model, and with that model its engine
        wanted = self.args.mixed_precision
        told = f"TrainingArguments({wanted}=True)" if wanted != "no" else "TrainingArguments without bf16=True or fp16=True"
        engine = taken(self.model, self._config, wanted, told=told, asked="{}=True".format)
        if self.args.torch_compile and not getattr(self.model, "_is_accelerate_prepared", False):
            self.model.compile(backend=self.args.torch_compile_backend or "inductor", mode=self.args.torch_compile_mode)
        self.model._is_accelerate_prepared = True
        return engine

    # The optimizer.

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self._take_model()
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            kind, options = counterpart(*chosen)
            options |= {"max_grad_norm": math.inf, "accumulation_steps": self.args.gradient_accumulation_steps}
            self.optimizer_cls_and_kwargs = kind, options
        return super().create_optimizer(model)

    def _prepare_for_training(self, *args, **options):
        with _quiet():
            return super()._prepare_for_training(*args, **options)

    def evaluation_loop(self, *args, **options):
        if any(param.requires_grad for param in self.model.parameters()):
            self.create_optimizer()  # the engine plans with the optimizer, and starts with the first pass
        return super().evaluation_loop(*args, **options)

    # Checkpoints.

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        self._whole = self.model.state_dict()  # on all ranks: some versions of Trainer call _save on rank 0 only
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            del self._whole

    def _save(self, output_dir=None, state_dict=None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir) -> None:
        infinity.save(os.path.join(output_dir, STATES), self.model, _own(self.optimizer))
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        if checkpoint is None:
            return
        infinity.load(os.path.join(checkpoint, STATES), self.model, _own(self.optimizer))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True))

    # Logs.

    def log(self, logs, *args, **options) -> None:
        if self._log_stats and "loss" in logs:
            logs |= flattened(infinity.engine_of(self.model).stats())
        super().log(logs, *args, **options)


def _own(optimizer) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _quiet():
    """Suppress a warning: accelerate saves and loads the optimizer's state_dict, which warns that it has no states."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
