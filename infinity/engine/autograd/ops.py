"""Ops, the modules of a model that have parameters, and frames, the running calls of ops.

Knows modules, and the states of parameters and spans. Must not know autograd, hooks, or how a span is fetched.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence

from torch import nn
from torch._C import _current_graph_task_id

from infinity.model.compiled import is_wrapper
from infinity.model.leaf_modules import inside_leaves, is_leaf
from infinity.model.module_tree import modules_with
from infinity.tiers.chunk_state import Registry
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import SpanState

FORWARD, RECOMPUTE, BACKWARD, ATTRIBUTE = "forward", "recompute", "backward", "attribute"  # reasons of a fetch


@dataclasses.dataclass(frozen=True)
class Op:
    """A module with parameters, or with children that have parameters.

    spans, params: the module's own. whole: an infinity.leaf or a compiled module. Then spans and params include the children's, and are
    fetched together, also for backward.
    """

    index: int
    name: str
    spans: tuple[SpanState, ...] = ()
    params: tuple[ParameterState, ...] = ()
    whole: bool = False


def ops_of(model: nn.Module, registry: Registry) -> Iterator[tuple[nn.Module, Op]]:
    """Each op with its module. The first is the model, or the module that torch.compile has wrapped."""
    inside, with_params, index = inside_leaves(model), modules_with(model, registry.by_param), 0
    for name, module in model.named_modules():
        if module in inside or is_wrapper(module):
            continue
        if module is model or module in with_params:
            yield module, op_of(module, Op(index, name or type(model).__name__), registry)
            index += 1


def op_of(module: nn.Module, op: Op, registry: Registry) -> Op:
    """The op with the current parameters of the module."""
    params = module.parameters() if is_leaf(module) else module._parameters.values()
    states = [state for p in params if p is not None and (state := registry.find(p)) is not None]
    spans = dict.fromkeys(registry.span_of(state) for state in states)
    return Op(op.index, op.name, tuple(spans), tuple(states), is_leaf(module))


class Frame:
    """A running call of an op.

    spans, params: held until the call ends. viewed: spans held while views of them are alive. packed: spans that autograd has saved. read:
    parameters of other ops that the call has read. scales: the outputs are those of an fp16 model.
    """

    __slots__ = ("module", "op", "outermost", "packed", "params", "pushed", "read", "scales", "spans", "task", "thread", "viewed")

    def __init__(self, module: nn.Module, op: Op, *, outermost: bool, scales: bool):
        self.module = module
        self.op = op
        self.outermost = outermost
        self.scales = scales
        self.spans: list[SpanState] = []
        self.viewed: list[SpanState] = []
        self.params: Sequence[ParameterState] = ()
        self.packed: set[int] = set()
        self.read: set[int] = set()
        self.pushed = False  # whether saved-tensor hooks were pushed, in graph task `task`. Autograd removes them when the task ends
        self.task, self.thread = _current_graph_task_id(), threading.get_ident()

    def hold(self, params: Sequence[ParameterState]) -> None:
        for state in params:
            state.hold()
        self.params = params

    def release(self) -> None:
        for state in self.params:
            state.release()
        self.params = ()
