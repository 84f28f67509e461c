"""Searches the tree of a model's modules, and looks at each module once.

Knows modules and their parameters. Must not know why a module is wanted.
"""

from __future__ import annotations

from collections.abc import Container

from torch import nn


def modules_with(model: nn.Module, params: Container[int]) -> set[nn.Module]:
    """The modules of a model, itself included, that have some of these parameters, or children with some. params: by id."""
    found: dict[nn.Module, bool] = {}

    def visit(module: nn.Module) -> bool:
        if module not in found:
            found[module] = False  # a module may contain itself
            has_some = any(id(param) in params for param in module._parameters.values())
            for child in module._modules.values():
                has_some |= child is not None and visit(child)
            found[module] = has_some
        return found[module]

    visit(model)
    return {module for module, has_some in found.items() if has_some}
