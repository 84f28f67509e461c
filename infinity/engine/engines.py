"""The registry of the engines of this process: their models, their lifetimes, and their end when the process exits.

Knows modules. Knows that an engine can close, report an error and be stuck. Must not know any other work of an engine.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Container
from typing import Any

from torch import nn

# This import registers an exit handler that closes open swap files. Exit handlers run in reverse order: the files close after `_end_all`.
import infinity.system.swap  # noqa: F401
from infinity.errors import ConfigError, UsageError
from infinity.model.module_tree import modules_with
from infinity.system import dropped_objects as dropped
from infinity.system.ranks import end_process

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref] = weakref.WeakKeyDictionary()
_LIFE = "_infinity_life"
_open: weakref.WeakSet = weakref.WeakSet()
_stuck: list = []  # engines with a stuck thread when they were closed
os.register_at_fork(after_in_child=lambda: (_open.clear(), _stuck.clear()))  # a forked child has none of the threads


def add(engine, model: nn.Module) -> None:
    _engines[model] = weakref.ref(engine)
    _open.add(engine)


def find(model: nn.Module):
    """The engine of a model, or of the only model with an engine inside a wrapper. Otherwise None."""
    if (reference := _engines.get(model)) is None:
        inside = [reference for module in model.modules() if (reference := _engines.get(module)) is not None]
        reference = inside[0] if len(inside) == 1 else None
    return reference() if reference is not None else None


def engine_of(model: nn.Module) -> Any:
    """The engine of a model. Raises ConfigError if the model has none."""
    engine = find(model)
    if engine is None:
        raise ConfigError(f"{type(model).__name__} is in no engine: build it inside infinity.init or call infinity.offload")
    return engine


def forget(model: nn.Module) -> None:
    _engines.pop(model, None)


def note_end(engine) -> None:
    _open.discard(engine)


def keep_stuck(engine) -> None:
    """Note a closed engine with a stuck thread. `_end_all` checks the thread again when the process ends."""
    _stuck.append(engine)


def are_others_open(engine) -> bool:
    return any(other is not engine for other in _open)


@atexit.register
def _end_all() -> None:
    """Close all engines that the program has left open; see [Note: how a process ends]."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # at a prompt, the error of an earlier command
    engines = list(_open)
    if error is not None:
        for engine in engines:
            engine.ranks.report(error)
    for engine in engines:
        try:
            engine.close()
        except Exception as failure:
            print(f"infinity: {type(failure).__name__}: {failure}", file=sys.stderr)
    dropped.finish()  # engines that the end of the program has dropped
    failed = end_process(error)
    is_stuck = any(engine.is_stuck for engine in _stuck)
    if is_stuck or (failed and error is None):  # the only way to set this exit status, and to end while a thread is in C++ code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class Life:
    """A reference to the model, in each module with parameters of an engine, own or its children's. When no such module is reachable, the
    engine closes. So the program may use a part of the model alone. The optimizer, graphs and the engine's threads hold no module."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __deepcopy__(self, memo):
        return None  # a copy made before the engine starts does not belong to the model

    def __reduce__(self):
        return type(None), ()


def put_life(model: nn.Module, params: Container[int], life: Life) -> None:
    """Each module above these parameters keeps the life. params: by id."""
    for module in modules_with(model, params):
        module.__dict__[_LIFE] = life


def take_life(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop(_LIFE, None)


def guard_before_start(model: nn.Module, begin: Callable) -> None:
    """The first forward pass calls `begin`, which starts the engine if no optimizer was made before."""
    model.__dict__["_infinity_start"] = model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)


def disarm_guard(model: nn.Module) -> None:
    handle = model.__dict__.pop("_infinity_start", None)
    if handle is not None:
        handle.remove()


def guard_after_close(model: nn.Module | None, away: dict[int, str]) -> None:
    """Refuse forward passes until the program has given values to all placeholders. away: names of parameters, by placeholder address."""

    def refuse(module, args):
        for param in module.parameters():
            if (name := away.get(param.data_ptr())) is not None:
                raise UsageError(f"the engine is closed and {name} is only a placeholder. Read the values that you need before close()")

    if model is not None and away:
        model.register_forward_pre_hook(refuse, prepend=True)
