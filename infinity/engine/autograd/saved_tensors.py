"""Weights among autograd's saved tensors: the handles that replace weights, and the spans that a backward pass holds.

Knows autograd's saved tensors, spans and handles. Must not know modules, plans or tiers.
"""

# [Note: when backward needs a weight]
# Under this engine's saved-tensor hooks, autograd saves a WeightHandle in place of a view of a weight. When autograd unpacks the handle, the
# span is fetched. When autograd drops the node's saved tensors, the handle dies, and its death releases the span. So an embedding, which
# saves no weight, is not fetched for backward.
# The hooks are pushed again inside every checkpointed region, above the hooks of the checkpoint, and pass other tensors on to those. So
# weights are never recomputed, and the region saves the same number of tensors in both forwards.
# The backward of a custom autograd function may read a parameter that no hook has seen. So the spans of an op whose output comes from such a
# function are fetched when the gradient of that output is known. The same holds for an infinity.leaf: all its spans are fetched, and stay
# until the next fetch. So ranks whose data took different paths through the leaf fetch the same spans in the same order.
#
# Saved-tensor hooks switch off autograd's check for in-place changes. The hooks of this file do that check, for weights and activations.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch._C import DisableTorchFunctionSubclass, _current_graph_task_id

from infinity.engine.autograd.ops import BACKWARD, Op
from infinity.model.autograd_state import autograd_runs
from infinity.system.interrupts import uninterrupted
from infinity.system.lanes import Need
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.saved_storage import SavedTensor
from infinity.tiers.span_state import SpanState


class HandleNeed(Need):
    """A handle's need of its span: nothing may change there. While `holding`, the span must also be on the device."""

    __slots__ = ("holding", "node", "span")

    def __init__(self, handle: WeightHandle, callback: Callable[[HandleNeed], None]):
        super().__init__(handle, callback)
        self.span = handle.span
        self.holding = False
        self.node: tuple[int, int] | None = None  # the last (backward pass, graph node) that has unpacked the handle


class WeightHandle:
    """A view of an engine storage that autograd has saved. op: the op that ran, if any."""

    __slots__ = ("__weakref__", "leaf", "need", "op", "span", "tensor", "version")

    def __init__(self, dropped: deque[HandleNeed], op: Op | None, span: SpanState, tensor: torch.Tensor):
        self.op = op
        self.leaf = op if op is not None and op.whole and span in op.spans else None  # backward fetches all spans of a leaf
        self.span = span
        with DisableTorchFunctionSubclass():
            self.tensor = tensor.detach()
        self.version = self.tensor._version
        self.need = HandleNeed(self, dropped.append)
        span.handles.add(self.need)


class SavedTensors:
    """The pair of saved-tensor hooks while calls run. outer: the pair that was active before, such as a checkpoint's."""

    def __init__(self, calls, outer):
        self.calls = calls
        self.outer_pack, self.outer_unpack = outer if outer else (None, None)

    @torch._dynamo.disable
    def pack(self, tensor: torch.Tensor):
        state = self.calls.registry.find(tensor)
        if state is not None and not state.num_holders:  # a function saves a parameter that its forward did not read
            return self.calls.reads.compute([state], self.pack, (tensor,), {})
        span = self.calls.registry.owner(tensor)
        if span is not None:
            return self._handle(span, tensor)
        if self.outer_pack is not None:
            return self.outer_unpack, self.outer_pack(tensor)
        return self._activation(tensor) or (tensor._version, tensor.detach())

    @torch._dynamo.disable
    def unpack(self, saved):
        if isinstance(saved, WeightHandle):
            return self.calls.backward.restore(saved)
        if isinstance(saved, SavedTensor):
            if len(set(saved.versions)) > 1:
                raise _modified(f"a saved tensor of shape {saved.shape}", *saved.versions)
            return self.calls.activations.restore(saved)
        first, second = saved
        if callable(first):
            return first(second)
        if second._version != first:
            raise _modified(f"a saved tensor of shape {tuple(second.shape)}", first, second._version)
        return second

    @uninterrupted
    def _handle(self, span: SpanState, tensor: torch.Tensor) -> WeightHandle:
        frame = self.calls.frames[-1] if self.calls.frames else None
        if frame is not None:
            frame.packed.add(span.index)
        return WeightHandle(self.calls.weights.dropped, frame.op if frame is not None else None, span, tensor)

    def _activation(self, tensor: torch.Tensor) -> SavedTensor | None:
        """None if the tensor stays on the device, as recomputed tensors do."""
        activations = self.calls.activations
        if activations is None or not activations.is_on or autograd_runs():
            return None
        return activations.save(tensor)


class BackwardHolds:
    """Spans that backward passes hold.

    A span that autograd has unpacked is held until autograd drops the handle or a later node needs a weight. Until the next event, the engine
    also holds the spans that the backward of a custom function or a leaf may read.
    """

    def __init__(self, calls):
        self.calls = calls
        self.weights, self.timeline = calls.weights, calls.timeline
        self.leaf: Op | None = None  # the leaf whose backward comes next
        self._until_next: list[SpanState] = []  # held until the next event
        self._params_until_next: list[ParameterState] = []
        self._needs: list[HandleNeed] = []  # all needs that hold spans, and some that no longer hold one
        self._aside: list[HandleNeed] = []  # these hold again when the recomputation for their node is over

    @uninterrupted
    def restore(self, handle: WeightHandle) -> torch.Tensor:
        """The tensor of a handle that autograd unpacks, on the device."""
        if handle.tensor._version != handle.version:
            raise _modified(f"a weight of {handle.span.params[0].name}'s span", handle.version, handle.tensor._version)
        if handle.leaf is not None:
            if handle.span not in self._until_next:
                self.fetch_op(handle.leaf)
            return handle.tensor
        node = (_current_graph_task_id(), _current_node())
        need = handle.need
        if not need.holding:
            self.release_until_next()
            self._release_earlier(*node)
            self._hold(handle)
        need.node = node
        return handle.tensor

    @uninterrupted
    def fetch_op(self, op: Op) -> None:
        """Fetch all spans of the op, because its backward comes next and may read any of the op's parameters."""
        self.release_until_next()
        self._acquire(op, -1, op.spans)
        self._hold_op(op)

    def keep_leaf(self, leaf: Op) -> None:
        """Keep the spans of a leaf whose recomputed call ends, because backward of the leaf comes next."""
        self.release_until_next()
        for span in leaf.spans:
            self.weights.hold(span)
        self._hold_op(leaf)

    def _hold_op(self, op: Op) -> None:
        self._until_next.extend(op.spans)
        for state in op.params:
            state.hold()
        self._params_until_next.extend(op.params)
        self.leaf = op if op.whole else None

    def hold_until_next(self, spans: Iterable[SpanState]) -> None:
        """Keep the hold on these spans until the next event."""
        self._until_next.extend(spans)

    def release_until_next(self) -> None:
        """Release the spans and parameters that were held until the next event."""
        self.leaf = None
        while self._params_until_next:
            self._params_until_next.pop().release()
        while self._until_next:
            self.weights.release(self._until_next.pop())

    def release_all(self) -> None:
        """A backward pass is over: release spans that a retained graph still refers to."""
        self.release_until_next()
        self._release_where(lambda need: True)
        self._aside = []

    def set_aside(self) -> bool:
        """Release the unpacked spans until `hold_again`. Returns whether there were any. Each comes back to the same storage."""
        held = [need for need in self._needs if need() is not None and need.holding]
        self._release_where(lambda need: True)
        self._aside += held
        return bool(held)

    def hold_again(self) -> None:
        """The recomputation for the current node is over: hold the spans again that the node had unpacked before."""
        aside, self._aside = self._aside, []
        for need in aside:
            handle = need()
            if handle is not None and not need.holding and need.node == (_current_graph_task_id(), _current_node()):
                self._hold(handle)

    def _hold(self, handle: WeightHandle) -> None:
        self._acquire(handle.op, handle.span.index, (handle.span,))
        handle.need.holding = True
        self._needs.append(handle.need)

    def _acquire(self, op: Op | None, span: int, spans: Iterable[SpanState]) -> None:
        if self.timeline is not None:
            self.timeline.end()
        self.calls.acquire((BACKWARD, op.index if op is not None else -1, span), spans)
        if self.timeline is not None:
            self.timeline.begin(BACKWARD, op.name if op is not None else "outside of all modules")

    def _release_earlier(self, task: int, node: int) -> None:
        """Release spans that earlier nodes of this backward pass have unpacked. A retained graph keeps their handles alive."""
        if self._needs:
            self._release_where(lambda need: need.node[0] == task and need.node[1] != node)

    def _release_where(self, is_over: Callable[[HandleNeed], bool]) -> None:
        needs, self._needs = self._needs, []
        for need in needs:
            if need() is None or not need.holding:
                continue
            if is_over(need):
                need.holding = False
                self.weights.release(need.span)
            else:
                self._needs.append(need)


def _current_node() -> int:
    """The number of the graph node that autograd runs in this thread, -1 outside of backward passes."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else -1


def _modified(what: str, expected: int, got: int) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {got}; expected version {expected}. A backward pass cannot run through a graph that is older than the "
        f"last optimizer step."
    )
