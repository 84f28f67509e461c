"""Operations of torch without bytes: results have shapes and addresses, and an operation takes virtual time instead of work.

Knows operations of torch. Must not know the engine.
"""

# [Note: tensors without bytes]
# Tensors stay on the CPU, so the engine sees addresses, storages and views as usual. Their memory comes from malloc or mmap and is never
# touched, so no pages exist. An operation with a large operand runs on the meta device, which tells the shapes of the results. Views run as
# usual, and so do operations whose operands are all small: losses, flags, norms, hyper-parameters. Small results of large operands are zeros.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

KEPT_NBYTES = 16 << 10  # tensors up to this size hold their bytes

_aten = torch.ops.aten
_FACTORIES = {
    getattr(packet, name)
    for packet in (_aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn, _aten.randint, _aten.arange)
    for name in packet.overloads()
    if not name.endswith("out")
}


class NoBytes(TorchDispatchMode):
    """Leaves out the work of large operations, in one thread. spend(flops, nbytes): called for each one, with the bytes of operands and
    results. flops: of products and convolutions, otherwise 0. kept_nbytes: tensors up to this size hold their bytes."""

    def __init__(self, spend: Callable[[int, int], object], kept_nbytes: int = KEPT_NBYTES):
        super().__init__()
        self._spend, self._kept_nbytes = spend, kept_nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FACTORIES:
            return self._made(func, args, kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        if not any(map(self._is_large, tensors)):
            return func(*args, **kwargs)
        results = _written(func, args, kwargs)
        if results is None:
            results = self._results(func, args, kwargs, tensors)
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=results) if formula is not None else 0
        used = {id(tensor): tensor.nbytes for tensor in (*tensors, *_tensors((results,)))}
        self._spend(flops, sum(used.values()))
        return results

    def _is_large(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() > self._kept_nbytes  # also a small view of a large tensor

    def _results(self, func, args: tuple, kwargs: dict, tensors: list[torch.Tensor]):
        """New tensors of the shapes that an operation returns. A result that is an operand is the operand itself."""
        shadows = {id(tensor): _shadow(tensor) for tensor in tensors}
        on_meta, options = tree_map_only(torch.Tensor, lambda tensor: shadows[id(tensor)], (args, kwargs))
        if "device" in options:
            options["device"] = torch.device("meta")
        operands = {id(shadows[id(tensor)]): tensor for tensor in tensors}

        def real(shadow: torch.Tensor) -> torch.Tensor:
            return operands[id(shadow)] if id(shadow) in operands else self._empty_as(shadow)

        return tree_map_only(torch.Tensor, real, func(*on_meta, **options))

    def _made(self, func, args: tuple, kwargs: dict) -> torch.Tensor:
        """The result of a factory."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return func(*args, **kwargs)
        shadow = func(*args, **kwargs | {"device": torch.device("meta")})
        return func(*args, **kwargs) if shadow.nbytes <= self._kept_nbytes else self._empty_as(shadow)

    def _empty_as(self, shadow: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape on the CPU: zeros if small, otherwise without bytes."""
        if shadow.nbytes <= self._kept_nbytes:
            return torch.zeros(shadow.shape, dtype=shadow.dtype, device="cpu")
        return torch.empty_strided(shadow.shape, shadow.stride(), dtype=shadow.dtype, device="cpu")


def _written(func, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The tensor that an operation such as add_, or one with out=, returns. None for other operations."""
    returns = func._schema.returns
    if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return None
    return kwargs.get("out", args[0])


def _tensors(values: Iterable) -> Iterator[torch.Tensor]:
    """The tensors of nested lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
