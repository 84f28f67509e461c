"""Modules that torch.compile makes one of: which these are, and the doors by which they are called.

Knows modules and torch.compile. Must not know engines, or what is done at a door.
"""

# [Note: compiled regions]
# What is compiled as one, the region, cannot stop inside for a parameter to come, and a hook of ours inside would break its graph.
# So a compiled module is one op, as an infinity.leaf is: all parameters below it are there before it is called, and until it ends;
# the modules inside have no hooks. Nor may its own be compiled, which fetch: they are at its *door*, which is called by what is not.
#
#     torch.compile(module)                             the wrapper that this gives. The module keeps hooks for whoever calls it
#                                                       past its door; traced, or behind the open door, they do nothing
#     module.compile()                                  a Door, in the place of what torch calls instead of the module's `_call_impl`
#     module.forward = torch.compile(module.forward)    the module itself, whose hooks torch calls before `forward`
#
# A module may be compiled at any time. What was before the engine's start is looked for then, and planned; afterwards a wrapper is
# noticed as it is made, and becomes a door when it is first called; `compile` is an attribute of each module that is an op; and
# `forward` is looked at as the op begins.

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator

from torch import nn
from torch._dynamo.eval_frame import DisableContext, OptimizedModule
from torch.nn.modules.module import register_module_module_registration_hook


class Door:
    """What torch calls in the place of a module that was compiled by `compile()`: before(door, args, kwargs), what was compiled, and
    after(door, args, output), as hooks are called."""

    def __init__(self, module: nn.Module, before: Callable, after: Callable):
        self.module, self.compiled = module, module._compiled_call_impl
        self.before, self.after = before, after
        module._compiled_call_impl = self._call_impl

    def _call_impl(self, *args, **kwargs):  # named as torch's own, by which a call that is under way is known
        output = None
        try:
            changed = self.before(self, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
            output = self.compiled(*args, **kwargs)
        finally:
            changed = self.after(self, args, output)
        return output if changed is None else changed

    def remove(self) -> None:
        if door_of(self.module) is self:
            self.module._compiled_call_impl = self.compiled


def door_of(module: nn.Module) -> Door | None:
    door = getattr(module._compiled_call_impl, "__self__", None)
    return door if isinstance(door, Door) else None


def behind(module: nn.Module | Door) -> nn.Module:
    """The module of which this is the door, or that is its own."""
    return module.module if isinstance(module, Door) else module._orig_mod if is_wrapper(module) else module


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is what torch.compile has made of a module."""
    return isinstance(module, OptimizedModule)


def compiles(wrapper: OptimizedModule) -> bool:
    """torch.compiler.disable makes wrappers, too."""
    return not isinstance(wrapper.dynamo_ctx, DisableContext)


def has_compiled_forward(module: nn.Module) -> bool:
    forward = module.forward
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


def find_wrappers(model: nn.Module) -> list[OptimizedModule]:
    """What torch.compile has made of the model or of modules in it."""
    _note_early_wrappers()
    modules = set(model.modules())
    return [wrapper for wrapper in list(_wrappers) if wrapper._modules.get("_orig_mod") in modules and compiles(wrapper)]


def find_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of the model that are compiled."""
    yield from (wrapper._orig_mod for wrapper in find_wrappers(model))
    for module in model.modules():
        if module._compiled_call_impl is not None or (not is_wrapper(module) and has_compiled_forward(module)):
            yield module


_noticed: list[Callable] = []
_wrappers: weakref.WeakSet[OptimizedModule] = weakref.WeakSet()


@functools.cache
def _note_early_wrappers() -> None:
    """Those that were made before this module was imported, which nobody else knows but the garbage collector: a tenth of a second."""
    _wrappers.update(thing for thing in gc.get_objects() if type(thing) is OptimizedModule)


def watch_wrappers(noticed: Callable[[nn.Module, OptimizedModule], None]) -> None:
    """From now on, call noticed(module, wrapper) for each that is made, before it is whole."""
    if noticed not in _noticed:
        _noticed.append(noticed)


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if type(parent) is OptimizedModule and child is not None:
        _wrappers.add(parent)
        for noticed in _noticed:
            noticed(child, parent)


register_module_module_registration_hook(_registered)
