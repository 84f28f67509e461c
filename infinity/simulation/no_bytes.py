"""Operations of torch without bytes: results have shapes and addresses, and an operation takes virtual time instead of work.

Knows operations of torch. Must not know the engine.
"""

# [Note: tensors without bytes]
# Tensors stay on the CPU, so the engine sees addresses, storages and views as usual. Their memory comes from malloc or mmap and is never
# touched, so no pages exist. An operation with a large operand runs on the meta device, which tells the shapes of the results. Views run as
# usual, and so do operations whose operands are all small: losses, flags, norms, hyper-parameters. A small view of a large tensor is small.
# Small results of large operands are zeros. Not simulated: an operation that asks a large tensor for a value, and out= of another shape.

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from infinity.errors import BudgetError
from infinity.sizes import format_bytes
from infinity.system.host_bytes import map_flags

KEPT_NBYTES = 16 << 10  # tensors up to this size hold their bytes
_MAPPED_NBYTES = 1 << 30

_aten = torch.ops.aten
_FACTORIES = {
    getattr(packet, name)
    for packet in (_aten.zeros, _aten.ones, _aten.full, _aten.rand, _aten.randn, _aten.randint, _aten.arange)
    for name in packet.overloads()
    if not name.endswith("out")
}


_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}  # operations of the CPU, and those of a GPU with as many floating-point operations


ATTENTION, UPDATE = "attention", "update"


class Spent(NamedTuple):
    """The work of an operation. flops: of products, attention and convolutions; otherwise 0. nbytes: of operands and results. kind: ATTENTION, or
    UPDATE for a kernel of the engine."""

    flops: int
    nbytes: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A result of an operation. operand: the index of the operand that it is, or None."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    operand: int | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, operand: int | None = None) -> _Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.nbytes, operand)


class NoBytes(TorchDispatchMode):
    """Leaves out the work of large operations, in one thread.

    spend(work): called for each operation, small ones included. kept_nbytes: tensors up to this size hold their bytes. allocated(storage):
    called for each new large storage. read(): called before the program reads a value."""

    def __init__(
        self,
        spend: Callable[[Spent], object],
        kept_nbytes: int = KEPT_NBYTES,
        *,
        allocated: Callable[[torch.UntypedStorage], object] = lambda storage: None,
        read: Callable[[], object] = lambda: None,
    ):
        super().__init__()
        self._spend, self._kept_nbytes, self._allocated, self._read = spend, kept_nbytes, allocated, read
        self._has_addresses = True
        self._known: dict[tuple, tuple[object, int]] = {}  # nested `_Shape`s and floating-point operations of earlier operations

    @contextlib.contextmanager
    def without_addresses(self) -> Iterator[None]:
        """Inside the block, new large tensors are one expanded element, such as those of a model before an engine has the model."""
        self._has_addresses = False
        try:
            yield
        finally:
            self._has_addresses = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        does = _what(func)
        if does.views:
            return func(*args, **kwargs)
        if does.makes:
            return self._made(func, args, kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        if not any(map(self._is_large, tensors)):
            return self._small(func, does, args, kwargs, tensors)
        if does.writes:  # not remembered: scalars differ in each call
            results = kwargs.get("out", args[0])
            flops = does.flops(*args, **kwargs, out_val=results)
        else:
            key = func, _key_of(args), _key_of(tuple(kwargs.items()))
            shapes, flops = self._known.get(key) or (_on_meta(func, args, kwargs, tensors), None)
            results = self._results(shapes, tensors)
            if flops is None:
                flops = does.flops(*args, **kwargs, out_val=results)
                self._known[key] = (shapes, flops)
        used = {id(tensor): tensor.nbytes for tensor in (*tensors, *_tensors((results,)))}
        self._spend(Spent(flops, sum(used.values()), does.kind))
        return results

    def _small(self, func, does: _Does, args: tuple, kwargs: dict, tensors: list[torch.Tensor]):
        """An operation without a large operand."""
        if func is _aten._local_scalar_dense.default:
            self._read()
        found = func(*args, **kwargs)
        if tensors:
            self._spend(Spent(does.flops(*args, **kwargs, out_val=found), sum(tensor.nbytes for tensor in tensors), does.kind))
        for tensor in _tensors((found,)):
            if self._is_large(tensor):
                self._allocated(tensor.untyped_storage())
        return found

    def _is_large(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes > self._kept_nbytes and tensor.device.type == "cpu"

    def _results(self, shapes, tensors: list[torch.Tensor]):
        """New tensors of these shapes. A result that is an operand is the operand itself."""
        if type(shapes) is _Shape:
            return self._empty(shapes) if shapes.operand is None else tensors[shapes.operand]
        return type(shapes)([self._results(shape, tensors) for shape in shapes]) if type(shapes) in (tuple, list) else shapes

    def _made(self, func, args: tuple, kwargs: dict) -> torch.Tensor:
        """The result of a factory."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return func(*args, **kwargs)
        shadow = func(*args, **kwargs | {"device": torch.device("meta")})
        return func(*args, **kwargs) if shadow.nbytes <= self._kept_nbytes else self._empty(_Shape.of(shadow))

    def _empty(self, shape: _Shape) -> torch.Tensor:
        """A tensor on the CPU: zeros if small, otherwise without bytes."""
        if shape.nbytes > self._kept_nbytes and not self._has_addresses:
            return torch.zeros((), dtype=shape.dtype).expand(shape.sizes)
        if shape.nbytes > _MAPPED_NBYTES:
            made = _mapped(shape)
        else:
            made = torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype, device="cpu")
        if shape.nbytes <= self._kept_nbytes:
            return made.zero_()
        self._allocated(made.untyped_storage())
        return made


def _mapped(shape: _Shape) -> torch.Tensor:
    """A tensor whose addresses are reserved and never used. malloc refuses more bytes than the machine has. Raises BudgetError if the process has
    too few addresses."""
    numel = 1 + sum((size - 1) * stride for size, stride in zip(shape.sizes, shape.strides))
    try:
        memory = mmap.mmap(-1, numel * shape.dtype.itemsize, flags=map_flags())
    except OSError:
        size = format_bytes(numel * shape.dtype.itemsize)
        raise BudgetError(f"a tensor of {size} is larger than a process can address: lower the batch or the sequence") from None
    return torch.frombuffer(memory, dtype=shape.dtype).as_strided(shape.sizes, shape.strides)


class _Does(NamedTuple):
    """views: the result is a view. makes: the operation is a factory. writes: the one result is `out`, or the first argument, as of add_.
    flops(*arguments, out_val=results): floating-point operations. kind: see `Spent`."""

    views: bool
    makes: bool
    writes: bool
    flops: Callable[..., int]
    kind: str


@functools.cache
def _what(func) -> _Does:
    packet, returns = func.overloadpacket, func._schema.returns
    writes = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    flops = flop_registry.get(_ATTENTION.get(packet, packet), lambda *args, **kwargs: 0)
    if packet is _aten._grouped_mm:
        flops = lambda *args, **kwargs: 2 * args[0].numel() * args[1].shape[-1]
    views = func.is_view or torch.Tag.inplace_view in func.tags
    return _Does(views, func in _FACTORIES, writes, flops, ATTENTION if packet in _ATTENTION else "")


def _tensors(values: Iterable) -> Iterator[torch.Tensor]:
    """The tensors of nested lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _on_meta(func, args: tuple, kwargs: dict, tensors: list[torch.Tensor]):
    """The results of an operation as `_Shape`s, found on the meta device. tensors: the operands."""
    shadows = {id(tensor): torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta") for tensor in tensors}
    on_meta, options = tree_map_only(torch.Tensor, lambda tensor: shadows[id(tensor)], (args, kwargs))
    if "device" in options:
        options["device"] = torch.device("meta")
    operands = {id(shadows[id(tensor)]): index for index, tensor in enumerate(tensors)}
    return tree_map_only(torch.Tensor, lambda shadow: _Shape.of(shadow, operands.get(id(shadow))), func(*on_meta, **options))


def _key_of(value) -> object:
    """A value that is equal for arguments with results of equal shapes."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key_of, value))
    return type(value), value
