"""Strategies of Lightning over an engine: `EngineStrategy` for Trainer, `EngineFabricStrategy` for Fabric. `LogStats` logs statistics.

Knows the methods of a strategy that Lightning's loops call, and when. Must not know how an engine works.
"""

# [Note: a strategy with an engine]
# The strategies inherit from Lightning's DDP strategies, and start and join processes in the same way. They omit the DDP wrapper, because
# the engine slices the model over all ranks. An optimizer of torch becomes its counterpart in infinity, and the optimizer's schedulers keep
# working. A step of a LightningModule runs as the module's forward, because the engine must see one call of the model. While Lightning
# blocks the synchronisation of gradients, a backward pass is not the last of its step. A checkpoint PATH has a folder PATH.infinity of
# infinity.save beside it.

from __future__ import annotations

import contextlib
import math
import os
import shutil
import warnings
from typing import Any

from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

import infinity
from infinity.integrations.engines import has_engine, taken
from infinity.integrations.optimizers import convert
from infinity.integrations.stats import flattened

_DTYPES = {"32-true": "no", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}  # by Lightning's precision
_MIXED = {"bf16": "precision='bf16-mixed'", "fp16": "precision='16-mixed'"}


class EngineStrategy(DDPStrategy):
    """`Trainer(strategy=EngineStrategy(config))` trains the model of fit() with an engine.

    config: for a model without an engine. A model that configure_model builds in infinity.init has an engine already. Raises ConfigError if
    a mixed precision differs from the engine's dtype, and for an optimizer without a counterpart. options: process options of DDPStrategy.
    """

    strategy_name = "infinity"

    def __init__(self, config: infinity.Config | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._config = config

    @classmethod
    def register_strategies(cls, registry) -> None:
        pass

    def setup(self, trainer) -> None:
        fits = trainer.state.fn == TrainerFn.FITTING
        if self.world_size == 1:  # DDPStrategy would add a distributed sampler
            trainer._accelerator_connector.use_distributed_sampler = False
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if fits or has_engine(self.model):
            precision = self.precision_plugin.precision
            told = f"Trainer(precision={precision!r})"
            taken(self.model, self._config, _DTYPES.get(precision, precision), told=told, asked=_MIXED.get)
            if isinstance(self.precision_plugin, MixedPrecision):
                _leave_scaling(self.precision_plugin)
        else:
            self.model_to_device()
        if fits:
            self._num_passes = max(2 if _changes_accumulation(trainer) else 1, trainer.accumulate_grad_batches)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            convert(optimizer, max_grad_norm=math.inf, accumulation_steps=self._num_passes)

    # Passes.

    def training_step(self, *args, **options):
        with self.precision_plugin.train_step_context():
            return self._as_forward("training_step", *args, **options)

    def validation_step(self, *args, **options):
        with self.precision_plugin.val_step_context():
            return self._as_forward("validation_step", *args, **options)

    def test_step(self, *args, **options):
        with self.precision_plugin.test_step_context():
            return self._as_forward("test_step", *args, **options)

    def predict_step(self, *args, **options):
        with self.precision_plugin.predict_step_context():
            return self._as_forward("predict_step", *args, **options)

    def _as_forward(self, step: str, *args, **options):
        return self._forward_redirection(self.model, self.lightning_module, step, *args, **options)

    @contextlib.contextmanager
    def block_backward_sync(self):
        with infinity.no_sync(self.model):
            yield

    # Checkpoints.

    def optimizer_state(self, optimizer) -> dict:
        return _hyper_parameters(optimizer)

    def save_checkpoint(self, checkpoint, filepath, storage_options=None) -> None:
        if has_engine(self.model):
            os.makedirs(os.path.dirname(os.path.abspath(filepath)), exist_ok=True)
            infinity.save(_folder(filepath), self.model, infinity.engine_of(self.model).optimizer)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path, weights_only=None) -> dict:
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint) -> None:
        infinity.load(_folder(self._loaded_from), self.model, infinity.engine_of(self.model).optimizer)

    def remove_checkpoint(self, filepath) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_folder(filepath), ignore_errors=True)

    def teardown(self) -> None:
        if not has_engine(self.model):
            super().teardown()
            return
        self.cluster_environment.teardown()
        for part in (self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()


class EngineFabricStrategy(FabricDDPStrategy):
    """`Fabric(strategy=EngineFabricStrategy(config))` works like `EngineStrategy`.

    accumulation_steps: the largest number of backward passes per step. Any number from 2 on is enough if `fabric.no_backward_sync` marks all
    passes except the last. Pass model and optimizer to one call of setup, or the model first.
    """

    def __init__(self, config: infinity.Config | None = None, *, accumulation_steps: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self._config, self._num_passes = config, accumulation_steps
        self._backward_sync_control = _Passes()

    @classmethod
    def register_strategies(cls, registry) -> None:
        pass

    @property
    def distributed_sampler_kwargs(self) -> dict | None:
        return super().distributed_sampler_kwargs if self.world_size > 1 else None

    def module_to_device(self, module: nn.Module) -> None:
        if not _trains(module):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        if _trains(module):
            precision = self.precision.precision
            told = f"Fabric(precision={precision!r})"
            taken(module, self._config, _DTYPES.get(precision, precision), told=told, asked=_MIXED.get)
            if isinstance(self.precision, FabricMixedPrecision):
                _leave_scaling(self.precision)
        return module

    def setup_optimizer(self, optimizer):
        return convert(optimizer, max_grad_norm=math.inf, accumulation_steps=self._num_passes)

    def get_optimizer_state(self, optimizer) -> dict:
        return _hyper_parameters(optimizer)

    def save_checkpoint(self, path, state, storage_options=None, filter=None) -> None:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        for number, module in enumerate(_in_engines(state)):
            infinity.save(_folder(path, number), module, infinity.engine_of(module).optimizer)
        super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(self, path, state=None, strict=True, weights_only=None) -> dict:
        found = super().load_checkpoint(path, state, strict, weights_only)
        for number, module in enumerate(_in_engines(state)):
            infinity.load(_folder(path, number), module, infinity.engine_of(module).optimizer)
        return found


class LogStats(Callback):
    """`Trainer(callbacks=[LogStats()])` logs the engine's stats() after each batch, with the trainer's loggers."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        module.log_dict({name: float(value) for name, value in flattened(infinity.engine_of(module).stats()).items()})


class _Passes(_BackwardSyncControl):
    """Fabric's no_backward_sync for a model in an engine."""

    def no_backward_sync(self, module: nn.Module, enabled: bool):
        return infinity.no_sync(module) if enabled else contextlib.nullcontext()


def _leave_scaling(precision) -> None:
    """Switch off Lightning's loss scale, because the engine scales the loss."""
    precision.scaler = None


def _trains(module: nn.Module) -> bool:
    return has_engine(module) or any(param.requires_grad for param in module.parameters())


def _in_engines(state) -> list[nn.Module]:
    """The modules with an engine in the saved state, in the order of their names."""
    named = sorted(state.items()) if isinstance(state, dict) else [("", state)]
    return [each for _, each in named if isinstance(each, nn.Module) and has_engine(each)]


def _changes_accumulation(trainer) -> bool:
    return any(hasattr(callback, "going_to_accumulate_grad_batches") for callback in trainer.callbacks)


def _folder(path, number: int = 0) -> str:
    return f"{path}.infinity{number or ''}"


def _hyper_parameters(optimizer) -> dict:
    """The optimizer's parameter groups as plain data. The folder of infinity.save has the optimizer states."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # state_dict() warns that it has no states
        return {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
