"""Which parameters an engine manages, and the compute dtype of each.

Knows torch's dtypes and the parameters of a model. Must not know configurations, chunks or tiers.
"""

# [Note: dtypes of a model]
# A model whose parameters all have one dtype computes in the dtype of the configuration. A program that gives parameters different dtypes
# has a reason: an fp32 router, fp32 norms, fp32 adapters over a bf16 base, an fp8 base. So in such a model no parameter changes its dtype,
# and the dtype of the configuration is not used.
#
# `Config.frozen_dtype` changes the storage of frozen weights of hidden linear layers that compute in bf16, and no compute dtype.

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from infinity.errors import ConfigError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.formats.format import SAME, STORAGES, Format, storage_of, trainable_names

_NAMES = {TORCH_DTYPES[storage.compute]: name for name, storage in reversed(STORAGES.items())}  # the first one of each compute dtype


def floating_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Every floating-point parameter with elements, once, with the name, in registration order. An engine manages these parameters."""
    return [(name, param) for name, param in model.named_parameters() if param.is_floating_point() and param.numel()]


@dataclass(frozen=True)
class ParameterDtypes:
    """The compute dtypes of the parameters of one model; see [Note: dtypes of a model].

    names: the storage of each parameter, in order. main: the storage that most elements have. needs_loss_scale: some gradients may underflow.
    """

    names: tuple[str, ...]
    main: str
    needs_loss_scale: bool

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, torch.Tensor]],
        default: str,
        *,
        master: str = "fp32",
        frozen: str = SAME,
        matrices: Collection[int] = (),
    ) -> ParameterDtypes:
        """named: names and floating-point parameters. default: "bf16", "fp16" or "fp32". master: "none" if trained bf16 weights have none.
        frozen: the storage of the parameters with ids in `matrices`, if they are frozen, compute in bf16, and fill whole bytes of codes.

        Raises ConfigError for a dtype that the engine cannot store, and for a trainable parameter of a dtype that no optimizer can update.
        """
        keeps_own = len({param.dtype for _, param in named}) > 1
        names = tuple(_own_dtype(name, param) if keeps_own else default for name, param in named)
        block = STORAGES[frozen].weight[0].block if matrices else 1  # elements of a byte of codes

        def stored(name: str, param: torch.Tensor) -> str:
            is_coded = id(param) in matrices and param.numel() % block == 0
            return storage_of(name, master, trainable=param.requires_grad, frozen=frozen if is_coded else SAME)

        names = tuple(stored(name, param) for name, (_, param) in zip(names, named))
        totals: Counter[str] = Counter()
        for name, (_, param) in zip(names, named):
            totals[name] += param.numel()
        main = max(totals, key=totals.__getitem__, default=default)
        formats = {(name, param.requires_grad) for name, (_, param) in zip(names, named)}  # few, of perhaps 100,000 parameters
        scales = any(Format(*each).needs_loss_scale for each in formats)
        return cls(names, main, scales)

    @property
    def of_torch(self) -> list[torch.dtype]:
        """The compute dtype of each parameter, as a dtype of torch."""
        return [TORCH_DTYPES[STORAGES[name].compute] for name in self.names]


def _own_dtype(name: str, param: torch.Tensor) -> str:
    """The storage of a parameter in a model of several dtypes."""
    dtype, allowed = _NAMES.get(param.dtype), trainable_names() if param.requires_grad else tuple(_NAMES.values())
    if dtype in allowed:
        return dtype
    raise ConfigError(
        f"{name} is {'trainable' if param.requires_grad else 'frozen'} and of {param.dtype}, in a model whose parameters have different "
        f"dtypes and keep them. Expected one of {', '.join(str(dtype) for dtype, known in _NAMES.items() if known in allowed)}. Cast it before "
        f"infinity.offload(model, config)."
    )
