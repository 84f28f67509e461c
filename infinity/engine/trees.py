"""What modules take and return: tensors in tuples, lists, dicts and dataclasses, however nested.

Knows containers. Must not know what the tensors are for.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

import torch


def parts_of(value) -> list:
    """A value, or what is in a tuple, list or dict, however nested."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return [value]
    return [part for item in value for part in parts_of(item)]


def tensors_in(value) -> list[torch.Tensor]:
    """The tensors of an output: itself, or those in tuples, lists, dicts and dataclasses, however nested."""
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
    """A copy of an output in which every tensor is function(tensor); its containers are of the types they were."""
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


def containers_in(value, copied) -> list[tuple]:
    """(list or dict, the one at its place in a copy, what this holds now) of all those in tuples, lists and dicts, however nested."""
    if type(value) is not type(copied) or not isinstance(value, (tuple, list, dict)):
        return []
    found = [(value, copied, copy.copy(copied))] if type(value) in _FILLED else []
    pairs = zip(value.values(), copied.values()) if isinstance(value, dict) else zip(value, copied)
    return found + [pair for both in pairs for pair in containers_in(*both)]


def write_back(containers: list[tuple]) -> None:
    """What has been changed in the copies, `containers_in` says since when, changes in what they are copies of."""
    for value, copied, before in containers:
        if _held_by(copied) == _held_by(before):
            continue
        value.clear()
        value.update(copied) if isinstance(value, dict) else value.extend(copied)


_FILLED = (list, dict, OrderedDict, defaultdict)


def _held_by(container: list | dict) -> list:
    """By which two are told to hold the very same."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(item)) for key, item in items]
