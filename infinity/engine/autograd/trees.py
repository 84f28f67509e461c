"""Inputs and outputs of modules: tensors in nested tuples, lists, dicts and dataclasses.

Knows containers. Must not know the use of the tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.utils import _pytree as pytree


def parts_of(value) -> list:
    """The items of nested tuples, lists and dicts. Any other value is one item."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return [value]
    return [part for item in value for part in parts_of(item)]


def tensors_in(value) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, or a tensor alone."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def map_tensors(value, function):
    """A copy of an output in which every tensor is function(tensor). Containers keep their types."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(item, function)
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(mapped, field.name, map_tensors(getattr(value, field.name), function))
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def flatten(value) -> tuple[list, Callable[[Sequence], object]]:
    """The leaves of a value, and a function that builds the same containers around other leaves.

    Containers: those that torch's pytree knows, and dataclasses, nested. The function may live longer than the leaves, and holds none of them.
    """
    if _is_record(value):
        names = [field.name for field in dataclasses.fields(value)]
        flat, build = flatten([getattr(value, name) for name in names])
        empty = _with(value, [(name, None) for name in names])
        return flat, lambda flat: _with(empty, zip(names, build(flat)))
    leaves, structure = pytree.tree_flatten(value)
    parts = [flatten(leaf) if _is_record(leaf) else ([leaf], _only) for leaf in leaves]
    makers = [(len(part), make) for part, make in parts]

    def build(flat):
        rest = iter(flat)
        return pytree.tree_unflatten([make(list(itertools.islice(rest, number))) for number, make in makers], structure)

    return [item for part, _ in parts for item in part], build


def containers_in(value, copied) -> list[tuple]:
    """All nested lists, dicts and dataclasses, as (container, its counterpart in the copy, a shallow copy of the counterpart)."""
    if type(value) is not type(copied) or not (isinstance(value, (tuple, list, dict)) or _is_record(value)):
        return []
    found = [(value, copied, copy.copy(copied))] if type(value) in _FILLED or _is_record(value) else []
    return found + [pair for both in zip(_items(value), _items(copied)) for pair in containers_in(*both)]


def is_cache(value) -> bool:
    """Whether the value is a cache of keys and values of transformers."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def copy_of_cache(value):
    """A cache that holds the same tensors, and does not change with the original."""
    return copy.deepcopy(value, {id(tensor): tensor for tensor in _tensors_of_object(value)})


def _tensors_of_object(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else getattr(value, "__dict__", {}).values()
    return [tensor for item in items for tensor in _tensors_of_object(item)]


def write_back(containers: list[tuple]) -> None:
    """Apply changes of the copies to the originals. containers: from `containers_in`, called before the changes."""
    for value, copied, before in containers:
        if _held_by(copied) == _held_by(before):
            continue
        if _is_record(value):
            value.__dict__.update(copied.__dict__)
            continue
        value.clear()
        value.update(copied) if isinstance(value, dict) else value.extend(copied)


_FILLED = (list, dict, OrderedDict, defaultdict)


def _held_by(container) -> list:
    """Two containers hold the same objects if these lists are equal."""
    if isinstance(container, list):
        return [id(item) for item in container]
    return [(key, id(item)) for key, item in (container if isinstance(container, dict) else vars(container)).items()]


def _items(value) -> Iterable:
    if isinstance(value, dict):
        return value.values()
    return vars(value).values() if _is_record(value) else value


def _is_record(value) -> bool:
    """Whether the value is a dataclass with tensors and a `__dict__` that torch's pytree does not know."""
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, dict, torch.nn.Module)) or type(value) in pytree.SUPPORTED_NODES:
        return False
    return hasattr(value, "__dict__") and bool(tensors_in(value))


def _with(value, fields: Iterable[tuple[str, object]]):
    """A copy of a dataclass with some fields changed."""
    made = copy.copy(value)
    made.__dict__.update(fields)
    return made


def _only(flat):
    return flat[0]
