"""Modules whose parameters are fetched together, whichever submodules run: `infinity.leaf`, and compiled regions.

Knows modules. Must not know how parameters are fetched.
"""

from __future__ import annotations

import weakref

import torch

from infinity.errors import UsageError
from infinity.model.parameters import owner_of

_leaves: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_regions: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def leaf(module: torch.nn.Module) -> torch.nn.Module:
    """Let the engine fetch all parameters below a module as one op, whichever submodules run. Returns the module.

    For modules that choose submodules at run time, such as a mixture of experts: ranks may then choose differently. The device must hold
    all these parameters. Call this before the optimizer is created; raises UsageError after the engine's start.
    """
    if any(getattr(owner_of(param), "has_started", False) for param in module.parameters()):
        raise UsageError(f"infinity.leaf({type(module).__name__}) after the engine started; call it before the optimizer is made")
    _leaves.add(module)
    return module


def note_region(module: torch.nn.Module) -> None:
    """Note that a module is compiled as one, see [Note: compiled regions] in compiled.py."""
    _regions.add(module)


def is_region(module: torch.nn.Module) -> bool:
    return module in _regions


def is_leaf(module: torch.nn.Module) -> bool:
    return module in _leaves or module in _regions


def inside_leaves(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules below a model that are fetched with a leaf above them."""
    return {below for module in model.modules() if is_leaf(module) for below in module.modules() if below is not module}
