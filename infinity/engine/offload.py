"""How a program makes an engine, finds an engine, and asks for whole parameters.

Knows models, configurations and engines. Must not know the parts of an engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from infinity.config import Config
from infinity.engine import engines
from infinity.engine.engine import Engine, managed_parameters
from infinity.engine.refused_wrappers import refuse_replicas
from infinity.engine.sizing import budgets
from infinity.errors import ConfigError, UsageError
from infinity.formats.assignment import ParameterDtypes, floating_parameters
from infinity.formats.format import DTYPE_NBYTES, STORAGES
from infinity.model.buffers import refuse_unmixed
from infinity.model.parameters import owner_of
from infinity.model.shared_parameters import refuse_shared
from infinity.model.tiling import tile_to_fit
from infinity.system.capacity import device_of
from infinity.system.ranks import Ranks, make_ranks


def offload(model: nn.Module, config: Config | None = None) -> Engine:
    """Let an engine manage an existing model. The parameters move to the tiers when an optimizer is made, or when the model first runs.
    Raises ConfigError or UsageError for a model that no engine can train."""
    if any(owner_of(param) is not None for param in model.parameters()):
        raise UsageError(f"{type(model).__name__} is in an engine already: call infinity.offload once for each model")
    config = config or Config()
    _refuse_untrainable(model, config)
    managed_parameters(model)
    with make_ranks(device_of(config.device)).joined() as ranks:
        cut_large_layers(model, config, ranks)
        return Engine(model, config, ranks=ranks)


def cut_large_layers(model: nn.Module, config: Config, ranks: Ranks) -> list[tuple[str, int]]:
    """Cut layers into tiles as `config.tile_above` says, before the model has an engine. Returns (layer name, number of tiles) of each.

    All ranks must make this call. Raises ConfigError or UsageError for a model that no engine can train, and changes nothing then.
    """
    with torch._C.DisableTorchFunction():  # inside infinity.init each getter would call `__torch_function__`
        _refuse_untrainable(model, config)
    budget = config.device_memory
    if config.tile_above == budget == "auto":
        budget, _ = budgets(config, device_of(config.device), ranks)
    itemsize = DTYPE_NBYTES[STORAGES[config.dtype].compute]
    return tile_to_fit(model, config.tile_above, device_nbytes=budget, itemsize=itemsize, reduces=ranks.are_several)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model. Raises ConfigError if the model has none."""
    return engines.engine_of(model)


@contextlib.contextmanager
def gathered(params: torch.Tensor | Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside the block, the whole parameters of one engine are on the device. Changes of the block are kept.

    All ranks must enter the block, and take the values of rank 0. A changed bf16 weight also becomes the new value of the fp32 master.
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if not params:
        yield
        return
    engine = owner_of(next((param for param in params if param.numel() and param.is_floating_point()), params[0]))
    if engine is None:
        raise ConfigError("infinity.gathered: the parameter is in no engine. Build its model inside infinity.init, or call infinity.offload")
    with engine.gathered(params):
        yield


def _refuse_untrainable(model: nn.Module, config: Config) -> None:
    """Raise ConfigError or UsageError for a model that no engine can train."""
    refuse_replicas(model)
    refuse_shared(model)
    named = floating_parameters(model)
    dtypes = zip(named, ParameterDtypes.of(named, config.dtype).of_torch)
    refuse_unmixed(model, {id(param): dtype for (_, param), dtype in dtypes}, device_of(config.device))
