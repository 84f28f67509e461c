"""Finds modules that torch.compile runs as one, and hooks the calls of these modules.

Knows modules and torch.compile. Must not know engines, or the purpose of a hook.
"""

# [Note: compiled regions]
# A compiled module, the region, cannot stop inside to wait for a parameter, and an engine's hook inside would break the graph. A compiled
# module is therefore one op, like an infinity.leaf. All parameters below are on the device before the call and until the end of the call.
# The modules inside have no hooks. The region's own hooks, which fetch, must not be compiled either. They are at the region's *door*, which
# uncompiled code calls.
#
#     torch.compile(module)                             the wrapper that this returns. The module keeps hooks for callers that
#                                                       bypass the door; traced, or behind the open door, they do nothing
#     module.compile()                                  a Door, in the place of the function that torch calls instead of `_call_impl`
#     module.forward = torch.compile(module.forward)    the module, whose hooks torch calls before `forward`
#
# A module may be compiled at any time. Earlier compilations are found at the engine's start, and planned. Afterwards a wrapper is noticed
# when it is created, and becomes a door at the first call. `compile` is an attribute of each module that is an op, and `forward` is checked
# when the op begins.

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator

from torch import nn
from torch._dynamo.eval_frame import DisableContext, OptimizedModule
from torch.nn.modules.module import register_module_module_registration_hook


class Door:
    """The callable that torch calls in the place of a module with `compile()`. The door calls before(door, args, kwargs), the compiled
    function, and after(door, args, output), like hooks.
    """

    def __init__(self, module: nn.Module, before: Callable, after: Callable):
        self.module, self.compiled = module, module._compiled_call_impl
        self.before, self.after = before, after
        module._compiled_call_impl = self._call_impl

    def _call_impl(self, *args, **kwargs):  # torch's own name, by which an active call is recognised
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
    """The module behind a door or wrapper; any other module is returned."""
    return module.module if isinstance(module, Door) else module._orig_mod if is_wrapper(module) else module


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is torch.compile's wrapper of another module."""
    return isinstance(module, OptimizedModule)


def compiles(wrapper: OptimizedModule) -> bool:
    """Whether a wrapper compiles; torch.compiler.disable makes wrappers, too."""
    return not isinstance(wrapper.dynamo_ctx, DisableContext)


def has_compiled_forward(module: nn.Module) -> bool:
    forward = module.forward
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


def find_wrappers(model: nn.Module) -> list[OptimizedModule]:
    """torch.compile's wrappers of the model or of modules in the model."""
    _note_early_wrappers()
    modules = set(model.modules())
    return [wrapper for wrapper in list(_wrappers) if wrapper._modules.get("_orig_mod") in modules and compiles(wrapper)]


def find_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """The compiled modules of the model."""
    yield from (wrapper._orig_mod for wrapper in find_wrappers(model))
    for module in model.modules():
        if module._compiled_call_impl is not None or (not is_wrapper(module) and has_compiled_forward(module)):
            yield module


_noticed: list[Callable] = []
_wrappers: weakref.WeakSet[OptimizedModule] = weakref.WeakSet()


@functools.cache
def _note_early_wrappers() -> None:
    """Register wrappers from before the import of this module. Only the garbage collector knows them, which takes a tenth of a second."""
    _wrappers.update(thing for thing in gc.get_objects() if type(thing) is OptimizedModule)


def watch_wrappers(noticed: Callable[[nn.Module, OptimizedModule], None]) -> None:
    """From now on, call noticed(module, wrapper) for each new wrapper, before the end of its construction."""
    if noticed not in _noticed:
        _noticed.append(noticed)


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if type(parent) is OptimizedModule and child is not None:
        _wrappers.add(parent)
        for noticed in _noticed:
            noticed(child, parent)


register_module_module_registration_hook(_registered)
