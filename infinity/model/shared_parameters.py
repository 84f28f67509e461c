"""Tensors of a model that share memory: separates those whose separation changes no result, and refuses the others.

Knows modules, tensors and their addresses. Must not know engines, which give each parameter memory of its own.
"""

# [Note: parameters that share memory]
# Parameters that come and go each have memory of their own, in every tier.
#
# - One nn.Parameter under several names is one parameter: tied, as in plain PyTorch.
# - Parameters that were cut from one tensor without overlap lose only their common version counter. Autograd would take an update of one
#   for a change of the others, so each gets a separate counter. The object stays the same, with its hooks.
# - Two parameters with a common element (`head.weight.data = embedding.weight.data`) would silently separate. A buffer or an attribute over
#   a parameter's memory would keep old values. Both are refused, and the message names the line to write.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from infinity.errors import ConfigError

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # dicts of parameters, modules and hooks, and flags


class _Place(NamedTuple):
    """The memory of a tensor: bytes [start, end). number: position among all, parameters first. kind: "parameter", "buffer" or "attribute".
    leaves: whether an engine takes the tensor.
    """

    number: int
    kind: str
    name: str
    leaves: bool
    device: str
    start: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def refuse_shared(model: nn.Module) -> None:
    """Raise ConfigError if a parameter of the model shares an element with another parameter, a buffer or a module's attribute."""
    with torch._C.DisableTorchFunction():  # an address must not fetch a parameter under construction
        places = sorted(_places(model), key=lambda place: (place.device, place.start))
    near: list[_Place] = []  # earlier places that may overlap the present one
    for place in places:
        near = [other for other in near if other.device == place.device and other.end > place.start]
        for other in near:
            if (place.leaves or other.leaves) and _overlap(place, other):
                raise ConfigError(_refusal(*sorted((place, other))))
        near.append(place)


def part_versions(params: Iterable[nn.Parameter]) -> None:
    """Give each parameter a separate version counter, if several share one; see [Note: parameters that share memory]."""
    before = [(param, param._version) for param in params]
    for param, _ in before:
        torch.autograd.graph.increment_version(param)
    for param, version in before:
        if param._version != version + 1:
            _renew_version(param)


def _renew_version(param: nn.Parameter) -> None:
    """Replace the tensor behind the object by a new one over the same memory. Hooks and gradient belong to that tensor and are copied."""
    fresh = nn.Parameter(param.data, requires_grad=param.requires_grad)
    hooks, last_hooks, grad = param._backward_hooks, param._post_accumulate_grad_hooks, param.grad
    torch._C._swap_tensor_impl(param, fresh)
    param._backward_hooks, param._post_accumulate_grad_hooks, param.grad = hooks, last_hooks, grad


def _places(model: nn.Module) -> Iterator[_Place]:
    """The places of parameters, buffers and attributes, each tensor once."""
    known = set()
    for kind, name, tensor in (
        *(("parameter", *named) for named in model.named_parameters()),
        *(("buffer", *named) for named in model.named_buffers()),
        *(("attribute", *named) for named in _attributes(model)),
    ):
        if id(tensor) not in known and _has_memory(tensor):
            leaves = kind == "parameter" and tensor.is_floating_point()
            start, stride = tensor.data_ptr(), tensor.stride()
            num = tensor.numel() if tensor.is_contiguous() else 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride))
            place = (start, start + num * tensor.element_size(), tuple(tensor.shape), stride, tensor.dtype)
            yield _Place(len(known), kind, name, leaves, str(tensor.device), *place)
        known.add(id(tensor))


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in plain attributes of modules, or in lists, tuples or dicts there. Excludes tensors that a hook makes again before each
    forward pass, like torch.nn.utils.spectral_norm.
    """
    for prefix, module in model.named_modules():
        added = vars(module).keys() - _OF_EVERY_MODULE
        if added and (hooks := module._forward_pre_hooks):
            added.difference_update(getattr(hook, "name", None) for hook in hooks.values())
        for name in sorted(added):
            value = vars(module)[name]
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
            for suffix, item in [("", value), *((f"[{key!r}]", item) for key, item in items)]:
                if isinstance(item, torch.Tensor):
                    yield f"{prefix}.{name}{suffix}".lstrip("."), item


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements and strided values."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided or not torch._C._has_storage(tensor):
        return False
    return tensor.numel() > 0


def _overlap(a: _Place, b: _Place) -> bool:
    """Whether two tensors have a common byte. Interleaved tensors without a common byte do not overlap."""
    return max(a.start, b.start) < min(a.end, b.end) and np.shares_memory(_Addresses(a), _Addresses(b))


class _Addresses:
    """A tensor as a NumPy array, on any device: the memory is never read."""

    def __init__(self, place: _Place):
        strides = tuple(stride * place.dtype.itemsize for stride in place.stride)
        memory = {"data": (place.start, True), "typestr": f"|V{place.dtype.itemsize}", "version": 3}
        self.__array_interface__ = memory | {"shape": place.shape, "strides": strides}


def _refusal(a: _Place, b: _Place) -> str:
    """The message for two overlapping places. a: a parameter."""
    if b.kind != "parameter":
        line = f"{_path(b.name)} = {_path(b.name)}.detach().clone()"
        return (
            f"the {b.kind} {b.name} lies in the memory of the parameter {a.name}, whose values move to the engine's tiers. The {b.kind} "
            f"would keep old values. Read {a.name} in forward instead; or copy the {b.kind} before the engine takes the model: `{line}`."
        )
    where = "before infinity.offload, or inside infinity.init"
    if a[-5:] == b[-5:]:  # the same elements
        return (
            f"{a.name} and {b.name} are two parameters in the same memory, as after `{_path(b.name)}.data = {_path(a.name)}.data`. The "
            f"engine gives each parameter memory of its own, so they would come apart. Tie them as one parameter, {where}: "
            f"`{_path(b.name)} = {_path(a.name)}`."
        )
    return (
        f"{a.name} and {b.name} are two parameters that share a part of their memory. The engine gives each parameter memory of its own, so "
        f"they would come apart. Keep one of them and take a view of it in forward; or separate them, {where}: "
        f"`{_path(b.name)}.data = {_path(b.name)}.data.clone()`."
    )


def _path(name: str) -> str:
    """A name as a program writes it: numbers are indices."""
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in name.split("."))
