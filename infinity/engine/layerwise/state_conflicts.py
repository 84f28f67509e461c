"""Conflicts between interleaved forward passes over the state of modules: attributes, replaced parameters, buffers.

Knows modules, and which forward pass ran last. Must not know threads, graphs or engines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import nn

from infinity.engine.layerwise.buffer_snapshots import own_buffers

Attribute = tuple[nn.Module, str]  # a module and the name of one of its attributes


class AttributeConflicts:
    """Attributes of modules, and buffers with a gradient, that each forward pass sets to its own value.

    Another pass would read the value of the wrong pass. A parameter that is replaced for a while is a conflict at once.
    """

    def __init__(self, model: nn.Module):
        self._modules = list(model.modules())
        self._params = {(module, name): param for module in self._modules for name, param in module._parameters.items()}
        self._before = self._values()
        self._first_writer: dict[Attribute, object] = {}

    def check(self, forward: object) -> Attribute | None:
        """A forward pass pauses. Returns an attribute that this pass and another one have changed."""
        if (replaced := next(self._replaced(), None)) is not None:
            return replaced
        before, self._before = self._before, self._values()
        changed = [key for key, value in self._before.items() if before.get(key) != value]
        return next((key for key in changed if self._first_writer.setdefault(key, forward) is not forward), None)

    def replaced_in(self, block: nn.Module) -> Attribute | None:
        """A parameter of the block that something else has replaced."""
        inside = ((module, name) for module in block.modules() for name in module._parameters)
        return next((key for key in inside if self._params.get(key) is not key[0]._parameters[key[1]]), None)

    def restore(self) -> None:
        """Put the original parameters back. Interleaved passes may have replaced and restored parameters in different orders."""
        for module, name in self._replaced():
            module._parameters[name] = self._params[module, name]

    def _replaced(self) -> Iterator[Attribute]:
        return ((module, name) for (module, name), param in self._params.items() if module._parameters.get(name) is not param)

    def _values(self) -> dict[Attribute, Hashable]:
        return {
            (module, name): _identity(value)
            for module in self._modules
            for name, value in (*vars(module).items(), *_buffers_with_gradient(module))
            if isinstance(value, _CHECKED_TYPES) and name not in _TORCH_ATTRIBUTES
        }


class BufferConflicts:
    """Buffers that one forward pass writes in several segments, such as a batch norm that several parts of the model share.

    Interleaved passes write such a buffer in another order than passes that run one after the other. If each pass writes in one segment
    only, the order is the same.
    """

    def __init__(self, model: nn.Module):
        self._owners = [module for module in model.modules() if module._buffers]
        self._before = self._values()
        self._written: set[tuple[object, nn.Module, str]] = set()

    def check(self, forward: object) -> Attribute | None:
        """A forward pass pauses. Returns a buffer that this pass has also written in an earlier segment."""
        before, self._before = self._before, self._values()
        written = [(forward, *key) for key, value in self._before.items() if before.get(key) != value]
        found = next((key for _, *key in written if (forward, *key) in self._written), None)
        self._written.update(written)
        return found

    def _values(self) -> dict[Attribute, Hashable]:
        return {(owner, name): _identity(buffer) for module in self._owners for owner, name, buffer in own_buffers(module)}


_CHECKED_TYPES = (torch.Tensor, int, float, str, tuple, list, dict)
_TORCH_ATTRIBUTES = vars(nn.Module()).keys()  # every module has them


def _buffers_with_gradient(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None and buffer.requires_grad]


def _identity(value) -> Hashable:
    """Two values of an attribute are the same if their identities are equal."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, dict):
        return tuple(map(_identity, value.values()))
    if isinstance(value, (tuple, list)):
        return tuple(map(_identity, value))
    return value if isinstance(value, (int, float, str)) else id(value)
