"""Refusal of parts of PyTorch that would do the engine's work: replicas of a model, tensors made of other tensors, optimizers of torch.

Knows these classes of torch, and the owner of a parameter. Must not know how an engine works.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Collection

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from infinity.errors import ConfigError, UsageError
from infinity.model.parameters import owner_of
from infinity.optim.optimizers import Optimizer


def refuse_optimizers(named: Collection[tuple[str, nn.Parameter]]) -> None:
    """Raise UsageError if torch's own optimizer was made over one of these trainable parameters, which have no other optimizer."""
    names = {id(param): name for name, param in named}
    if not _optimizer_over(names):
        return
    gc.collect()  # unreachable optimizers do not count
    if found := _optimizer_over(names):
        kind, name = found
        raise UsageError(
            f"torch.optim.{kind} was made over {name}, which is in an engine: the engine stores the gradients and the optimizer states of "
            f"{name}. Make infinity.{kind if kind in _OURS else 'AdamW'}(model.parameters(), ...) instead, before the first forward pass."
        )


_OURS = {kind.__name__ for kind in Optimizer.__subclasses__()}


def _optimizer_over(names: dict[int, str]) -> tuple[str, str] | None:
    """The class of such an optimizer and a parameter's name. Only the garbage collector knows all optimizers."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.optim.Optimizer) and not isinstance(thing, Optimizer):
            for group in vars(thing).get("param_groups", ()):
                for param in group["params"]:
                    if id(param) in names:
                        return type(thing).__name__, names[id(param)]
    return None


def refuse_wrappers(model: nn.Module) -> None:
    """Raise ConfigError for a parameter that is made of other tensors, such as a DTensor or a quantized tensor, without memory of its own."""
    for name, param in model.named_parameters():
        if is_traceable_wrapper_subclass(param):
            kind = type(param).__name__
            if kind == "DTensor":
                cure = "give the plain model, without fully_shard or distribute_tensor: the engine shards the parameters over all ranks"
            else:
                cure = "give the model with plain tensors"
            raise ConfigError(f"{name} is a {kind}, a tensor made of other tensors, which an engine cannot move; {cure}")


def refuse_replicas(model: nn.Module) -> None:
    """Raise UsageError if a model for an engine is, or contains, a wrapper that copies modules to devices or ranks."""
    for module in model.modules():
        if isinstance(module, _REPLICAS) and _copies(module):
            raise UsageError(_refusal(module, "give the engine the wrapped model, `.module`"))


@functools.cache
def watch_replicas() -> None:
    """From now on, refuse a new wrapper around a model that is in an engine."""
    register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(parent, _REPLICAS) and child is not None and _copies(parent):
        if any(owner_of(param) is not None for param in child.parameters()):
            raise UsageError(_refusal(parent, "call the model itself"))


_REPLICAS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def _copies(wrapper: nn.Module) -> bool:
    """Whether the wrapper makes copies. DataParallel without a second device does not."""
    return not isinstance(wrapper, nn.DataParallel) or torch.cuda.device_count() > 1


def _refusal(wrapper: nn.Module, remedy: str) -> str:
    return (
        f"{type(wrapper).__name__} copies a whole model for each device or rank, but an engine slices the parameters over all ranks and sums "
        f"their gradients. Leave the wrapper out: {remedy}. With several GPUs, start one process for each GPU with torchrun."
    )
