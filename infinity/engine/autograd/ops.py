"""Ops: the modules of a model that have parameters, with what each needs; and one call of one.

Knows modules, and the states of parameters and spans. Must not know autograd, hooks, or how a span comes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence

from torch import nn
from torch._C import _current_graph_task_id

from infinity.model.compiled import is_wrapper
from infinity.model.leaf_modules import inside_leaves, is_leaf
from infinity.tiers.chunk_state import Registry
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import SpanState

FORWARD, RECOMPUTE, BACKWARD, ATTRIBUTE = "forward", "recompute", "backward", "attribute"  # what an op is fetched for


@dataclasses.dataclass(frozen=True)
class Op:
    """A module with parameters, its own or its children's; `spans` and `params` are its own."""

    index: int
    name: str
    spans: tuple[SpanState, ...] = ()
    params: tuple[ParameterState, ...] = ()
    whole: bool = False  # infinity.leaf, or compiled: they are its children's, too, and are fetched for backward all at once


def ops_of(model: nn.Module, registry: Registry) -> Iterator[tuple[nn.Module, Op]]:
    """The model is the first, or what torch.compile has made it of."""
    inside, index = inside_leaves(model), 0
    for name, module in model.named_modules():
        if module in inside or is_wrapper(module):
            continue
        if module is model or any(registry.find(param) for param in module.parameters()):
            yield module, op_of(module, Op(index, name or type(model).__name__), registry)
            index += 1


def op_of(module: nn.Module, op: Op, registry: Registry) -> Op:
    """The op with what the module needs now, its own or, of a leaf, all."""
    params = module.parameters() if is_leaf(module) else module._parameters.values()
    states = [state for p in params if p is not None and (state := registry.find(p)) is not None]
    spans = dict.fromkeys(registry.span_of(state) for state in states)
    return dataclasses.replace(op, spans=tuple(spans), params=tuple(states), whole=is_leaf(module))


class Frame:
    """One call of an op under way. `spans` and `params` are held for it, `viewed` as long as views of them are alive, `packed` were
    saved by autograd, `read` are other ops' parameters that it has read by name."""

    __slots__ = ("module", "op", "outermost", "packed", "params", "pushed", "read", "scales", "spans", "task", "thread", "viewed")

    def __init__(self, module: nn.Module, op: Op, *, outermost: bool, scales: bool):
        self.module = module
        self.op = op
        self.outermost = outermost
        self.scales = scales  # its outputs are an fp16 model's
        self.spans: list[SpanState] = []
        self.viewed: list[SpanState] = []
        self.params: Sequence[ParameterState] = ()
        self.packed: set[int] = set()
        self.read: set[int] = set()
        self.pushed = False  # our saved-tensor hooks, in the graph task `task`, with whose end autograd takes them back by itself
        self.task, self.thread = _current_graph_task_id(), threading.get_ident()

    def hold(self, params: Sequence[ParameterState]) -> None:
        for state in params:
            state.hold()
        self.params = params

    def release(self) -> None:
        for state in self.params:
            state.release()
        self.params = ()
