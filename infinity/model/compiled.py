"""Modules that torch.compile compiles as one, and the interception of their calls.

Knows modules and torch.compile. Must not know engines, or the hooks that run around a call.
"""

# [Note: compiled regions]
# A region is code that is compiled as one graph. It cannot pause for a fetch, and a hook inside would break the graph. So a compiled module is
# one op, like an infinity.leaf: all parameters below it are held during the call, and the modules inside have no hooks. The hooks of the
# compiled module itself fetch weights, so they must not be compiled either. They run at the entry of the region, which is not compiled:
#
#     torch.compile(module)                             the wrapper. The module keeps hooks for callers that bypass the wrapper. They do
#                                                       nothing while the module is traced, or after the wrapper's hook has run
#     module.compile()                                  a CompiledCall, which replaces the compiled function that torch would call
#     module.forward = torch.compile(module.forward)    the module. Torch calls its hooks before `forward`
#
# A module may be compiled at any time. At the start, the engine looks for compiled modules and plans them. Afterwards it sees a new wrapper
# when the wrapper is made, and hooks it at its first call. Each module that is an op has its own `compile` attribute. A compiled `forward` is
# seen when the op begins.

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator

from torch import nn
from torch._dynamo.eval_frame import DisableContext, OptimizedModule
from torch.nn.modules.module import register_module_module_registration_hook


class CompiledCall:
    """Replaces the compiled function of a module on which `compile()` was called.

    Calls before(self, args, kwargs), the compiled function, and after(self, args, output), with the conventions of module hooks.
    """

    def __init__(self, module: nn.Module, before: Callable, after: Callable):
        self.module, self.compiled = module, module._compiled_call_impl
        self.before, self.after = before, after
        module._compiled_call_impl = self._call_impl

    def _call_impl(self, *args, **kwargs):  # live_calls looks for torch's own name
        output = None
        try:
            changed = self.before(self, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
            output = self.compiled(*args, **kwargs)
        finally:
            changed = self.after(self, args, output)
        return output if changed is None else changed

    def remove(self) -> None:
        if compiled_call_of(self.module) is self:
            self.module._compiled_call_impl = self.compiled


def compiled_call_of(module: nn.Module) -> CompiledCall | None:
    call = getattr(module._compiled_call_impl, "__self__", None)
    return call if isinstance(call, CompiledCall) else None


def module_of(module: nn.Module | CompiledCall) -> nn.Module:
    """The module itself, of a CompiledCall or a wrapper the compiled module."""
    return module.module if isinstance(module, CompiledCall) else module._orig_mod if is_wrapper(module) else module


def is_wrapper(module: nn.Module) -> bool:
    """Whether torch.compile has made it from a module."""
    return isinstance(module, OptimizedModule)


def compiles(wrapper: OptimizedModule) -> bool:
    """Whether the wrapper compiles. torch.compiler.disable makes wrappers, too."""
    return not isinstance(wrapper.dynamo_ctx, DisableContext)


def has_compiled_forward(module: nn.Module) -> bool:
    forward = module.forward
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


def find_wrappers(model: nn.Module) -> list[OptimizedModule]:
    """The wrappers that torch.compile has made from the model or its modules."""
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
    """Find the wrappers made before this module was imported. Only the garbage collector knows them. Takes a tenth of a second."""
    _wrappers.update(thing for thing in gc.get_objects() if type(thing) is OptimizedModule)


def watch_wrappers(noticed: Callable[[nn.Module, OptimizedModule], None]) -> None:
    """From now on, call noticed(module, wrapper) for each new wrapper, in its constructor."""
    if noticed not in _noticed:
        _noticed.append(noticed)


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if type(parent) is OptimizedModule and child is not None:
        _wrappers.add(parent)
        for noticed in _noticed:
            noticed(child, parent)


register_module_module_registration_hook(_registered)
