"""Modules whose parameters are fetched together, whatever of them runs: `infinity.leaf`, and what is compiled as one.

Knows modules. Must not know how anything is fetched.
"""

from __future__ import annotations

import weakref

import torch

from infinity.errors import UsageError
from infinity.model.parameters import owner_of

_leaves: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_regions: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def leaf(module: torch.nn.Module) -> torch.nn.Module:
    """Let the engine fetch all parameters below a module as one op, whatever of it runs; returns the module.

    For modules that choose at run time what they compute with, such as a mixture of experts: then ranks may choose differently.
    The device must hold all of it. Call it before the optimizer is made; raises UsageError after the engine's start.
    """
    if any(getattr(owner_of(param), "has_started", False) for param in module.parameters()):
        raise UsageError(f"infinity.leaf({type(module).__name__}) after the engine started; call it before the optimizer is made")
    _leaves.add(module)
    return module


def note_region(module: torch.nn.Module) -> None:
    """It is compiled as one, see [Note: compiled regions] in compiled.py."""
    _regions.add(module)


def is_region(module: torch.nn.Module) -> bool:
    return module in _regions


def is_leaf(module: torch.nn.Module) -> bool:
    return module in _leaves or module in _regions


def inside_leaves(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules below a model that are fetched with a leaf above them."""
    return {below for module in model.modules() if is_leaf(module) for below in module.modules() if below is not module}
