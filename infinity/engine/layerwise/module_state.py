"""What the modules of a model keep beside parameters, as forward passes run in turns and blocks run twice: buffers, and attributes.

Knows modules. Must not know who runs them, graphs or engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator

import torch
from torch import nn


class Buffers:
    """Of a module that runs twice: the second run finds them as the first one did, and leaves them as they are. Such as the statistics of a
    batch norm, or the vectors of a spectral norm."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.changed: list[tuple[nn.Module, str, torch.Tensor]] = []  # by the first run; what they were before it

    @contextlib.contextmanager
    def first_run(self) -> Iterator[None]:
        places = list(_places(self.module))
        before = {buffer: (buffer._version, buffer.detach().clone()) for *_, buffer in places}
        try:
            yield
        finally:
            for owner, name, buffer in places:
                version, value = before[buffer]
                if owner._buffers.get(name) is not buffer or buffer._version != version:
                    self.changed.append((owner, name, value))

    @contextlib.contextmanager
    def second_run(self) -> Iterator[None]:
        places = list(_places(self.module))
        for owner, name, value in self.changed:
            owner._buffers[name] = value
        others = {buffer: buffer.clone() for *_, buffer in _places(self.module)}  # written to in a way that torch does not count
        try:
            yield
        finally:
            for owner, name, buffer in places:
                owner._buffers[name] = buffer
            with torch.no_grad():
                for buffer, value in others.items():
                    with torch.autograd._unsafe_preserve_version_counter(buffer):
                        buffer.copy_(value)


class BuffersOfModel:
    """What a model's buffers are as a step begins, to be so once more. Blocks tell which of theirs that are no floating-point numbers, such
    as quantised weights, their first runs have changed: torch does not count all writes to statistics."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]):
        inside = {id(buffer) for block in blocks for *_, buffer in _places(block)}
        self._begin = {(owner, name): buffer for owner, name, buffer in _places(model)} if blocks else {}
        taken = {key: buffer for key, buffer in self._begin.items() if buffer.is_floating_point() or id(buffer) not in inside}
        self._values = {key: buffer.detach().clone() for key, buffer in taken.items()}

    def note(self, buffers: Buffers) -> None:
        """A block has run for the first time, or has raised."""
        for owner, name, value in buffers.changed:
            if (owner, name) in self._begin:
                self._values.setdefault((owner, name), value)

    def bring_back(self) -> None:
        with torch.no_grad():
            for (owner, name), value in self._values.items():
                owner._buffers[name] = self._begin[owner, name]
                owner._buffers[name].copy_(value)

    def forget(self) -> None:
        self._begin, self._values = {}, {}


class Attributes:
    """What modules keep in attributes, as forward passes take turns: those of their own, and buffers that have a gradient. What each pass
    puts there anew is of none of them: others find it before it is read. What stands in for a parameter for a while is found at once."""

    def __init__(self, model: nn.Module):
        self._modules = list(model.modules())
        self._params = {(module, name): param for module in self._modules for name, param in module._parameters.items()}
        self._before = self._now()
        self._changed: dict[tuple[nn.Module, str], object] = {}  # by whom first

    def look(self, who: object) -> tuple[nn.Module, str] | None:
        """A turn of a forward pass is over. A module, and its attribute, that has changed in a turn of another one, too, and in this one."""
        if (replaced := next(self._replaced(), None)) is not None:
            return replaced
        before, self._before = self._before, self._now()
        changed = [place for place, value in self._before.items() if before.get(place) != value]
        return next((place for place in changed if self._changed.setdefault(place, who) is not who), None)

    def replaced_in(self, block: nn.Module) -> tuple[nn.Module, str] | None:
        """A block is called. A module of it, and the name of a parameter in whose place something else stands."""
        inside = ((module, name) for module in block.modules() for name in module._parameters)
        return next((place for place in inside if self._params.get(place) is not place[0]._parameters[place[1]]), None)

    def bring_back(self) -> None:
        """Parameters that passes which took turns have given back in another order than they put something in their place."""
        for module, name in self._replaced():
            module._parameters[name] = self._params[module, name]

    def _replaced(self) -> Iterator[tuple[nn.Module, str]]:
        return ((module, name) for (module, name), param in self._params.items() if module._parameters.get(name) is not param)

    def _now(self) -> dict[tuple[nn.Module, str], Hashable]:
        return {
            (module, name): _identity(value)
            for module in self._modules
            for name, value in (*vars(module).items(), *_with_gradient(module._buffers))
            if isinstance(value, _LOOKED_AT) and name not in _TORCHS
        }


class BuffersInTurns:
    """A model's buffers, as forward passes take turns. What passes write in one turn each, they write in their order; what they write in
    several, such as a batch norm that several parts of the model share, in another one than if each were over before the next begins."""

    def __init__(self, model: nn.Module):
        self._owners = [module for module in model.modules() if module._buffers]
        self._before = self._now()
        self._written: set[tuple[object, nn.Module, str]] = set()

    def look(self, who: object) -> tuple[nn.Module, str] | None:
        """A turn of a forward pass is over. A module, and its buffer, that it has written to, as in an earlier turn."""
        before, self._before = self._before, self._now()
        written = [(who, *place) for place, value in self._before.items() if before.get(place) != value]
        found = next((place for who, *place in written if (who, *place) in self._written), None)
        self._written.update(written)
        return found

    def _now(self) -> dict[tuple[nn.Module, str], Hashable]:
        return {(owner, name): _identity(buffer) for module in self._owners for owner, name, buffer in _own_places(module)}


_LOOKED_AT = (torch.Tensor, int, float, str, tuple, list, dict)
_TORCHS = vars(nn.Module()).keys()  # attributes of every module


def _with_gradient(buffers: dict[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in buffers.items() if buffer is not None and buffer.requires_grad]


def _identity(value) -> Hashable:
    """By which two values of an attribute are told to be the same."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, dict):
        return tuple(map(_identity, value.values()))
    if isinstance(value, (tuple, list)):
        return tuple(map(_identity, value))
    return value if isinstance(value, (int, float, str)) else id(value)


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        yield from _own_places(owner)


def _own_places(owner: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for name, buffer in owner._buffers.items():
        if buffer is not None and not buffer.is_inference():
            yield owner, name, buffer
