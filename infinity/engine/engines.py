"""The engines of this process: which model is in which, what lies in a model for its engine, and how they end with the process.

Knows modules, and of an engine that it is closed, reports and may be stuck. Must not know what it does.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

# Closes at exit what is open still: registered before `_end_all`, whose lanes write there, it runs after that.
import infinity.system.swap  # noqa: F401
from infinity.errors import ConfigError, UsageError
from infinity.system import dropped_objects as dropped
from infinity.system.ranks import end_process

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref] = weakref.WeakKeyDictionary()
_LIFE = "_infinity_life"
_open: weakref.WeakSet = weakref.WeakSet()
_stuck: list = []  # when they were closed
os.register_at_fork(after_in_child=lambda: (_open.clear(), _stuck.clear()))  # a child has none of the threads


def add(engine, model: nn.Module) -> None:
    _engines[model] = weakref.ref(engine)
    _open.add(engine)


def find(model: nn.Module):
    """The engine that a model is in, or the only model that it wraps, or None."""
    if (reference := _engines.get(model)) is None:
        inside = [reference for module in model.modules() if (reference := _engines.get(module)) is not None]
        reference = inside[0] if len(inside) == 1 else None
    return reference() if reference is not None else None


def engine_of(model: nn.Module) -> Any:
    """The engine that trains a model. Raises ConfigError if none does."""
    engine = find(model)
    if engine is None:
        raise ConfigError(f"{type(model).__name__} is in no engine: build it inside infinity.init or call infinity.offload")
    return engine


def forget(model: nn.Module) -> None:
    _engines.pop(model, None)


def note_end(engine) -> None:
    _open.discard(engine)


def keep_stuck(engine) -> None:
    """It is closed, and a thread of it still inside of what it does: that is looked at again when the process ends."""
    _stuck.append(engine)


def are_others_open(engine) -> bool:
    return any(other is not engine for other in _open)


@atexit.register
def _end_all() -> None:
    """Close what the program has left open; see [Note: how a process ends]."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # at a prompt it may be an old one
    engines = list(_open)
    if error is not None:
        for engine in engines:
            engine.ranks.report(error)
    for engine in engines:
        try:
            engine.close()
        except Exception as failure:
            print(f"infinity: {type(failure).__name__}: {failure}", file=sys.stderr)
    dropped.finish()  # an engine that the program's end has dropped
    failed = end_process(error)
    is_stuck = any(engine.is_stuck for engine in _stuck)
    if is_stuck or (failed and error is None):  # no other way leads to this status, or past a thread in C++ code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class Life:
    """Lies in each module that has parameters of an engine, or children that have: the engine ends once none of them is reachable. So the
    model stays whole while a part of it is used; neither the optimizer, nor a graph, nor a thread of the engine holds one."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __deepcopy__(self, memo):
        return None  # a copy that is made before the start is no part of the model

    def __reduce__(self):
        return type(None), ()


def put_life(model: nn.Module, manages: Callable[[nn.Parameter], bool], life: Life) -> None:
    for module in model.modules():
        if any(manages(param) for param in module.parameters()):
            module.__dict__[_LIFE] = life


def take_life(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop(_LIFE, None)


def guard_before_start(model: nn.Module, begin: Callable) -> None:
    """Start the engine when the model runs before an optimizer was made."""
    model.__dict__["_infinity_start"] = model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)


def disarm_guard(model: nn.Module) -> None:
    handle = model.__dict__.pop("_infinity_start", None)
    if handle is not None:
        handle.remove()


def guard_after_close(model: nn.Module | None, away: dict[int, str]) -> None:
    """Refuse to run a model whose parameters are placeholders; it runs again once the user has given them values. away: their names by
    address."""

    def refuse(module, args):
        for param in module.parameters():
            if (name := away.get(param.data_ptr())) is not None:
                raise UsageError(f"the engine is closed and {name} is only a placeholder; read what is to be kept before close()")

    if model is not None and away:
        model.register_forward_pre_hook(refuse, prepend=True)
