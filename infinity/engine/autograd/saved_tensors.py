"""What autograd saves of weights, and what it is given in their place; and what a backward pass holds of them.

Knows autograd's saved tensors, spans and handles. Must not know modules, plans or tiers: it names what it needs and when it no longer does.
"""

# [Note: when backward needs a weight]
# Autograd asks for what it saved. Under our saved-tensor hooks a view of an engine storage is saved as a Handle;
# unpacking it fetches the span, and the handle's death, when autograd lets go of the node's saved tensors, releases it. So
# an embedding, which saves no weights, is not fetched for its backward. The hooks are pushed anew inside every checkpointed
# region, on top of the checkpoint's own, and pass on to those whatever is not ours: weights are never "recomputed", and the
# region saves the same number of tensors in both forwards. An op whose output comes from a custom autograd function may
# have stashed a parameter where no hook sees it: its spans are fetched when the gradient of that output is known. So are all
# spans of an infinity.leaf, whatever ran of it, and they stay until something else is unpacked: ranks whose data chose other
# parts of it fetch the same, in the same order.
#
# SavedTensor-tensor hooks switch off autograd's check for in-place changes; ours make it, for weights and activations.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch._C import DisableTorchFunctionSubclass, _current_graph_task_id

from infinity.engine.autograd.ops import BACKWARD, Op
from infinity.system.interrupts import uninterrupted
from infinity.system.lanes import Need
from infinity.tiers.saved_storage import SavedTensor
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import SpanState


class Hold(Need):
    """What a handle needs of its span, which keeps it: that nothing changes there and, while it is `holding`, that it is home."""

    __slots__ = ("holding", "node", "span")

    def __init__(self, handle: Handle, callback: Callable[[Hold], None]):
        super().__init__(handle, callback)
        self.holding = False
        self.node: tuple[int, int] | None = None  # (backward pass, node of the graph) that unpacked it last


class Handle:
    """A view of an engine storage that autograd saved, in a call of `op` if there was one."""

    __slots__ = ("__weakref__", "hold", "leaf", "op", "span", "tensor", "version")

    def __init__(self, dropped: deque[Hold], op: Op | None, span: SpanState, tensor: torch.Tensor):
        self.op = op
        self.leaf = op if op is not None and op.whole and span in op.spans else None  # that it is fetched with
        self.span = span
        with DisableTorchFunctionSubclass():
            self.tensor = tensor.detach()
        self.version = self.tensor._version
        self.hold = Hold(self, dropped.append)
        self.hold.span = span
        span.handles.add(self.hold)


class SavedTensors:
    """The pair of hooks that is in force while calls are under way. `outer` is what was in force before, such as a checkpoint's."""

    def __init__(self, calls, outer):
        self.calls = calls
        self.outer_pack, self.outer_unpack = outer if outer else (None, None)

    @torch._dynamo.disable
    def pack(self, tensor: torch.Tensor):
        state = self.calls.registry.find(tensor)
        if state is not None and not state.num_holders:  # given to a function whose forward did not look at it
            return self.calls.compute([state], self.pack, (tensor,), {})
        span = self.calls.registry.owner(tensor)
        if span is not None:
            return self._handle(span, tensor)
        if self.outer_pack is not None:
            return self.outer_unpack, self.outer_pack(tensor)
        return self._activation(tensor) or (tensor._version, tensor.detach())

    @torch._dynamo.disable
    def unpack(self, saved):
        if isinstance(saved, Handle):
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
    def _handle(self, span: SpanState, tensor: torch.Tensor) -> Handle:
        frame = self.calls.frames[-1] if self.calls.frames else None
        if frame is not None:
            frame.packed.add(span.index)
        return Handle(self.calls.weights.dropped, frame.op if frame is not None else None, span, tensor)

    def _activation(self, tensor: torch.Tensor) -> SavedTensor | None:
        """None: it stays where it is, such as what a backward pass computes anew."""
        activations = self.calls.activations
        if activations is None or not activations.is_on or _current_graph_task_id() != -1:
            return None
        return activations.save(tensor)


class BackwardHolds:
    """What backward passes hold: what autograd has unpacked, until it lets go of it or a later node needs something; and, until the next
    event, what the backward of a custom function or a leaf may read."""

    def __init__(self, calls):
        self.calls = calls
        self.weights, self.timeline = calls.weights, calls.timeline
        self.loose: list[SpanState] = []  # held until the next event
        self.loose_leaf: Op | None = None  # for whose backward they are
        self._loose_params: list[ParameterState] = []
        self._holding: list[Hold] = []  # those, and some that did
        self._aside: list[Hold] = []  # those that held, and will again when what is recomputed for their node is there

    @uninterrupted
    def restore(self, handle: Handle) -> torch.Tensor:
        if handle.tensor._version != handle.version:
            raise _modified(f"a weight of {handle.span.params[0].name}'s span", handle.version, handle.tensor._version)
        if handle.leaf is not None:
            if handle.span not in self.loose:
                self.fetch_loose(handle.leaf)
            return handle.tensor
        node = (_current_graph_task_id(), _current_node())
        hold = handle.hold
        if not hold.holding:
            self.release_loose()
            self._release_earlier(*node)
            self._hold(handle)
        hold.node = node
        return handle.tensor

    @uninterrupted
    def fetch_loose(self, op: Op) -> None:
        """The backward of the op comes next, and may read any of its parameters."""
        self.release_loose()
        self._acquire(op, -1, op.spans)
        self._hold_loose(op)

    def keep_loose(self, leaf: Op) -> None:
        """As `fetch_loose`, of what a call of the leaf, which has run again, holds."""
        self.release_loose()
        for span in leaf.spans:
            self.weights.hold(span)
        self._hold_loose(leaf)

    def _hold_loose(self, op: Op) -> None:
        self.loose.extend(op.spans)
        for state in op.params:
            state.hold()
        self._loose_params.extend(op.params)
        self.loose_leaf = op if op.whole else None

    def release_loose(self) -> None:
        self.loose_leaf = None
        while self._loose_params:
            self._loose_params.pop().release()
        while self.loose:
            self.weights.release(self.loose.pop())

    def release_all(self) -> None:
        """A backward pass is over: what a retained graph still refers to is held no longer."""
        self.release_loose()
        self._release_where(lambda hold: True)
        self._aside = []

    def set_aside(self) -> bool:
        """Give up, until `hold_again`, what autograd has unpacked; whether there was anything. It is brought back to the same storage."""
        held = [hold for hold in self._holding if hold() is not None and hold.holding]
        self._release_where(lambda hold: True)
        self._aside += held
        return bool(held)

    def hold_again(self) -> None:
        """What was recomputed for the node under way is there: so is to be what it had unpacked before."""
        aside, self._aside = self._aside, []
        for hold in aside:
            handle = hold()
            if handle is not None and not hold.holding and hold.node == (_current_graph_task_id(), _current_node()):
                self._hold(handle)

    def _hold(self, handle: Handle) -> None:
        self._acquire(handle.op, handle.span.index, (handle.span,))
        handle.hold.holding = True
        self._holding.append(handle.hold)

    def _acquire(self, op: Op | None, span: int, spans: Iterable[SpanState]) -> None:
        if self.timeline is not None:
            self.timeline.end()
        self.calls.acquire((BACKWARD, op.index if op is not None else -1, span), spans)
        if self.timeline is not None:
            self.timeline.begin(BACKWARD, op.name if op is not None else "outside of all modules")

    def _release_earlier(self, task: int, node: int) -> None:
        """What earlier nodes of this backward pass unpacked and a retained graph keeps alive is needed no longer."""
        if self._holding:
            self._release_where(lambda hold: hold.node[0] == task and hold.node[1] != node)

    def _release_where(self, is_due: Callable[[Hold], bool]) -> None:
        holds, self._holding = self._holding, []
        for hold in holds:
            if hold() is None or not hold.holding:
                continue
            if is_due(hold):
                hold.holding = False
                self.weights.release(hold.span)
            else:
                self._holding.append(hold)


def _current_node() -> int:
    """A number of the graph's node that autograd runs in this thread, -1 outside of backward passes."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else -1


def _modified(what: str, expected: int, got: int) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {got}; expected version {expected}. A backward pass cannot run through a graph that is older than the "
        f"last optimizer step."
    )
