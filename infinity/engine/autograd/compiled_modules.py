"""The hooks around each op of a model, also around modules that torch.compile has compiled.

Knows modules, ops, and compiled modules. Must not know the work of a hook.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch.utils.hooks import RemovableHandle

from infinity.engine.autograd.ops import Op, op_of, ops_of
from infinity.errors import BudgetError, UsageError
from infinity.model.compiled import CompiledCall, compiled_call_of, compiles, find_wrappers, has_compiled_forward, is_wrapper
from infinity.model.leaf_modules import note_region
from infinity.model.parameters import NO_COPY, NotCopied
from infinity.sizes import format_bytes
from infinity.tiers.chunk_state import Registry
from infinity.tiers.span_state import DeviceTier


_KEY = "infinity"  # key of traced hooks. A number per module would make torch.compile guard the number, and compile each module separately
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_always_called")


class Hooked(NamedTuple):
    module: weakref.ref
    handles: list[RemovableHandle]


class OpHooks(NotCopied):
    """Calls before(module, args, kwargs) and after(module, args, output) around each call of an op. Holds no module.

    For a compiled module, both get the CompiledCall or the wrapper instead of the module: [Note: compiled regions] in compiled.py.
    """

    def __init__(self, registry: Registry, tier: DeviceTier, before: Callable, after: Callable):
        self.registry, self.tier = registry, tier
        self.before, self.after = before, after
        self._ops: dict[int, Op] = {}  # by the id of a module, CompiledCall or wrapper
        self._hooked: dict[int, Hooked] = {}

    def attach(self, model: nn.Module) -> None:
        for module, op in ops_of(model, self.registry):
            self._hook(module, op)
        for wrapper in find_wrappers(model):
            self.note_wrapper(wrapper._orig_mod, wrapper)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for hooked in list(self._hooked.values()):
            if (module := hooked.module()) is not None:
                self._unhook(module)

    def op_of(self, module: nn.Module | CompiledCall) -> Op | None:
        """The op of a module, CompiledCall or wrapper. None for a wrapper that does not compile, or without an op."""
        op = self._ops.get(id(module))
        if op is not None:
            return self._compiled(module, op) if not op.whole and "forward" in vars(module) and has_compiled_forward(module) else op
        if not is_wrapper(module):
            kind = type(module).__name__
            raise UsageError(f"this {kind} is a copy, by copy.copy, that has the hooks of an engine but is not in the engine. {NO_COPY}")
        inner = module._orig_mod
        if not compiles(module) or (op := self._ops.get(id(inner))) is None:
            return None
        self._ops[id(module)] = op = op if op.whole else self._compiled(inner, op)
        return op

    def note_wrapper(self, module: nn.Module, wrapper: nn.Module) -> None:
        """Note a wrapper that torch.compile makes for a module."""
        if id(module) in self._ops:
            self._put(wrapper, self.before, self.after)

    def end_call(self, module: nn.Module) -> None:
        """A compiled module was called before it had a CompiledCall. Make sure that `after` runs for this call."""

        @torch._dynamo.disable
        def end(module, args, output):
            handle.remove()
            return self.after(module, args, output)

        if compiled_call_of(module) is not None:
            handle = module.register_forward_hook(end, always_call=True)

    def _hook(self, module: nn.Module, op: Op) -> None:
        self._ops[id(module)] = op
        if module._compiled_call_impl is not None:
            self._ops[id(CompiledCall(module, self.before, self.after))] = op
            self._put(module)
        elif op.whole:
            self._put(module)
            for name, value in zip(_HOOKS, (self._before_traced, True, self._after_traced, True), strict=True):
                getattr(module, name)[_KEY] = value
            module._forward_pre_hooks.move_to_end(_KEY, last=False)
        else:
            self._put(module, self.before, self.after)
        module.__dict__["compile"] = functools.partial(self._compile, weakref.ref(module))

    def _put(self, module: nn.Module, before: Callable | None = None, after: Callable | None = None) -> None:
        handles = []
        if before is not None:
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after, always_call=True))
        self._hooked[id(module)] = Hooked(weakref.ref(module), handles)

    def _unhook(self, module: nn.Module) -> None:
        hooked = self._hooked.pop(id(module), None)
        if hooked is None:
            return
        for handle in hooked.handles:
            handle.remove()
        for name in _HOOKS:
            getattr(module, name).pop(_KEY, None)
        self._ops.pop(id(module), None)
        module.__dict__.pop("compile", None)
        if (call := compiled_call_of(module)) is not None:
            self._ops.pop(id(call), None)
            call.remove()

    def _before_traced(self, module, args, kwargs):
        """Hook of a compiled module, for calls that bypass the wrapper."""
        return None if torch.compiler.is_compiling() else self.before(module, args, kwargs)

    def _after_traced(self, module, args, output):
        return None if torch.compiler.is_compiling() else self.after(module, args, output)

    def _compile(self, reference: weakref.ref, *args, **kwargs) -> None:
        """Replaces `module.compile`."""
        module = reference()
        self._check_room(module, self._ops[id(module)].name)
        type(module).compile(module, *args, **kwargs)
        self._compiled(module, self._ops[id(module)])

    def _compiled(self, module: nn.Module, op: Op) -> Op:
        """The module is compiled as one region from now on. Returns the new op."""
        self._check_room(module, op.name)
        note_region(module)
        op = op_of(module, op, self.registry)
        for below in module.modules():
            self._unhook(below)
        self._hook(module, op)
        return op

    def _check_room(self, module: nn.Module, name: str) -> None:
        """Raise BudgetError if the device has no room for all parameters of the module at once."""
        spans = {self.registry.span_of(state) for param in module.parameters() if (state := self.registry.find(param)) is not None}
        nbytes = sum(span.nbytes for span in spans if not span.pinned)
        if nbytes > self.tier.limit_nbytes:
            raise BudgetError(
                f"{name} is compiled as one region, and needs all its weights at once: {format_bytes(nbytes)}. But device_memory has "
                f"{format_bytes(self.tier.limit_nbytes)} for weights. Compile smaller modules, such as each block by itself, or raise "
                f"device_memory. The engine plans room for modules that are compiled before the optimizer is made."
            )


for _function in (OpHooks._before_traced, OpHooks._after_traced):
    skip_code(_function.__code__)  # they are traced inside the caller's graph, and not compiled separately
