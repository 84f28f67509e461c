"""Refusal of other libraries' trainers that drive an engine's model without `infinity.integrations`, found on the call stack.

Knows module names of these libraries, and imports none of them. Must not know how a trainer or an engine works.
"""

# [Note: how a trainer is found]
# A trainer of another library moves models, skips optimizer steps and saves optimizer states. Without the integration, this fails late: at the
# second micro-batch, or at the first checkpoint, and leaves an incomplete checkpoint. So the engine looks once, before the first training
# forward pass. A Trainer of transformers or Lightning is on the call stack then. An Accelerator is not. But `prepare` has marked a module on
# the stack and has made a wrapper around the optimizer. If only the optimizer was given to `prepare`, the wrapper is on the stack of step().

from __future__ import annotations

import gc
import sys
import weakref

from torch import nn

from infinity.errors import UsageError
from infinity.model.parameters import owner_of

_ACCELERATE = "accelerate.optimizer"  # other modules of accelerate run functions of the program, such as notebook_launcher
_TRAINERS = {  # prefix of a module name, innermost library last: title of the trainer, and the lines to write instead
    "transformers.trainer": (
        "Trainer of transformers",
        "from infinity.integrations.transformers import offloaded",
        "trainer = offloaded(Trainer)(model=model, args=args, ...)",
    ),
    "lightning.pytorch": (
        "Trainer of Lightning",
        "from infinity.integrations.lightning import EngineStrategy",
        "trainer = Trainer(strategy=EngineStrategy(config), ...)",
    ),
    "lightning.fabric.wrappers": (
        "Fabric of Lightning",
        "from infinity.integrations.lightning import EngineFabricStrategy",
        "fabric = Fabric(strategy=EngineFabricStrategy(config), ...)",
    ),
    _ACCELERATE: (
        "Accelerator of accelerate",
        "from infinity.integrations.accelerate import offloaded",
        "accelerator = offloaded(Accelerator)(...)",
    ),
}
_SAME = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}  # older names of packages

_MODULE_CALLS = {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
_taken: weakref.WeakSet = weakref.WeakSet()


def note_integration(engine) -> bool:
    """An integration gives the engine's model to a trainer. Returns whether it is the first time."""
    is_new = engine not in _taken
    _taken.add(engine)
    return is_new


def refuse_trainers(engine) -> None:
    """Raise UsageError, with the two lines to write instead, if a trainer without integration drives the engine.

    See [Note: how a trainer is found].
    """
    if engine in _taken:
        return
    found, is_prepared = _on_stack()
    if is_prepared and _has_wrapped_optimizer(engine):
        found.add(_ACCELERATE)
    for module, (title, *lines) in _TRAINERS.items():
        if module in found:
            raise UsageError(
                f"{title} drives a model that is in an engine, but does not know of the engine: accumulation, clipping or its first checkpoint "
                f"would fail. Write instead:\n    " + "\n    ".join(lines)
            )


def _on_stack() -> tuple[set[str], bool]:
    """The trainers on the call stack of this thread, and whether accelerate has marked a module on the stack as prepared."""
    found, is_prepared, frame = set(), False, sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        for old, new in _SAME.items():
            if name == old or name.startswith(f"{old}."):
                name = f"{new}{name.removeprefix(old)}"
        found.update(module for module in _TRAINERS if name == module or name.startswith(f"{module}."))
        if frame.f_code in _MODULE_CALLS:  # of other frames, f_locals would keep the program's variables alive (before Python 3.13)
            is_prepared |= bool(vars(frame.f_locals["self"]).get("_is_accelerate_prepared"))
        frame = frame.f_back
    return found, is_prepared


def _has_wrapped_optimizer(engine) -> bool:
    """Whether accelerate has wrapped an optimizer over the engine's parameters. For an evaluation only the model is prepared."""
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    if wrapper is None:
        return False
    wrapped = [thing for thing in gc.get_objects() if issubclass(type(thing), wrapper) and "optimizer" in vars(thing)]
    return any(owner_of(param) is engine for each in wrapped for group in each.optimizer.param_groups for param in group["params"])
