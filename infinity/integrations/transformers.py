"""Trainer of transformers, and what is made from it, as TRL's trainers, over an engine: `offloaded`.

Knows what Trainer calls, and when. Must not know how an engine works.
"""

# [Note: what a Trainer must leave to the engine]
# The place of the model, its replicas and its dtype: so Trainer does not move it, and accelerate is told that it is prepared already, which
# spares it DistributedDataParallel and a forward under autocast. The optimizer: of the kind and with the numbers that the arguments say. The
# norm is asked for in each step, so updates follow step(); torch's own clip_grad_norm_, which Trainer calls, does the rest. States: a
# checkpoint has a folder of infinity.save beside the model's files, and resuming loads it after them.

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


def offloaded(trainer: type[Kind], config: infinity.Config | None = None, *, log_stats: bool = False) -> type[Kind]:
    """The class of a Trainer whose model is trained by an engine: `offloaded(Trainer, config)(model=model, args=args, ...)`.

    trainer: Trainer or a class made from it, such as those of TRL. config: of the engine; None where the model is in one already, as after
    infinity.init, or for the defaults. log_stats: what is logged of training has the engine's stats(), too, for TensorBoard and the like.
    The optimizer is infinity's of the kind that `args.optim` names, unless the program gives one: `optimizers=(infinity.AdamW(...), None)`.
    Call train, evaluate, predict and save_model on all ranks. Raises ConfigError for `bf16=True` or `fp16=True` over an engine of another
    dtype, and for an optimizer that has no counterpart. Without both, an engine of bf16 or fp16 says in one line what it computes in.
    """
    made = type(trainer.__name__, (_Offloaded, trainer), {"_config": config, "_log_stats": log_stats})
    made.__module__, made.__qualname__ = trainer.__module__, trainer.__qualname__
    return made


class _Offloaded:
    """Mixed into a class of Trainer; see [Note: what a Trainer must leave to the engine]."""

    _config: infinity.Config | None
    _log_stats: bool

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.args._n_gpu = min(self.args.n_gpu, 1)  # else the model would be replicated over the GPUs of this process
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
        """The engine of the model as it is now, adapters included."""
        self.callback_handler.model = self.model  # instead of one that was made before, whose engine ends so
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
            self.create_optimizer()  # the engine plans with it, and starts with the first pass
        return super().evaluation_loop(*args, **options)

    # Checkpoints.

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        self._whole = self.model.state_dict()  # by all ranks: some versions of Trainer come to _save on the first alone
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

    # What is logged.

    def log(self, logs, *args, **options) -> None:
        if self._log_stats and "loss" in logs:
            logs |= flattened(infinity.engine_of(self.model).stats())
        super().log(logs, *args, **options)


def _own(optimizer) -> torch.optim.Optimizer:
    """What accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _quiet():
    """accelerate passes an optimizer's state_dict through, and back."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
