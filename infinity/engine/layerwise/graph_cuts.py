"""The cut of a forward pass's autograd graph into segments. They go backward one by one, and give the gradients of the whole graph.

Knows graphs and tensors. Must not know modules, threads or engines.
"""

# [Note: how a graph is cut]
# A segment gets a tensor of an earlier segment through a `_SegmentInput` node. The segment's graph ends at this node, whose backward stores
# the gradient. Later, backward of the segment that made the tensor starts from this tensor with the stored gradient as one of its roots.
#
#     forward     segment 1: x ... y      segment 2: input(y) ... z      segment 3: input(y), input(z) ... loss
#     backward    3: from the loss; y.gradient = a, z.gradient = b
#                 2: from z with b, and from its input(y) with a; y.gradient = a + the gradient that segment 2 adds
#                 1: from y
#
# Autograd adds the gradients from several users of a tensor in backward order, the last user first. The cut graph keeps this order.
# At the input(y) of an earlier segment, the stored gradient of later segments is the first term of the sum. So the bits are the same. The same
# holds for a parameter that several segments use.
#
# The sequence number of a node shows which segment made the node. Autograd counts nodes in each thread, and each forward pass has its own
# thread. A `_SegmentInput` saves nothing, and shares memory and version counter with its tensor.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from infinity.engine.steps.refusals import refuse_in_loss
from infinity.model.parameters import is_metadata


class CutTensor:
    """A tensor that later segments use: its edge in the graph of its own segment, and the sum of its gradients so far."""

    __slots__ = ("edge", "gradient")

    def __init__(self, edge: GradientEdge):
        self.edge = edge
        self.gradient: torch.Tensor | None = None


class Segment:
    """The part of a graph between two borders.

    position: number of the segment, common to all forward passes. first_node: sequence number of its first node.
    """

    def __init__(self, name: str, position: int, first_node: int):
        self.name, self.position, self.first_node = name, position, first_node
        self.outputs: dict[tuple, CutTensor] = {}  # made here and used by later segments
        self.inputs: list[tuple[GradientEdge, CutTensor]] = []  # made by earlier segments and used here
        self.touched: set = set()  # parameters of ops that the segment has called

    def roots(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Edges at which the segment's backward pass starts, each with a gradient."""
        outputs = [(cut.edge, cut.gradient) for cut in self.outputs.values() if cut.gradient is not None]
        return outputs + [(edge, cut.gradient) for edge, cut in self.inputs if cut.gradient is not None]

    def leaves(self, loss: torch.Tensor | None = None) -> tuple[set[torch.Tensor], Node | None]:
        """The leaves of the graph, such as parameters, and the first node of an earlier segment that the graph reaches, or None.

        loss: the end of the whole graph, if this segment is the last one.
        """
        stack, seen, found, reached = [cut.edge.node for cut in self.outputs.values()], set(), set(), None
        if loss is not None and loss.grad_fn is not None:
            stack.append(loss.grad_fn)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, torch._C._functions.AccumulateGrad):
                found.add(node.variable)
            elif node._sequence_nr() < self.first_node:
                reached = min(filter(None, (reached, node)), key=lambda node: node._sequence_nr())
                continue
            stack += [following for following, _ in node.next_functions if following is not None]
        return found, reached


class GraphCutter:
    """Cuts the graph of one forward pass, in the thread of that pass. segments: those begun so far."""

    def __init__(self):
        self.segments = [Segment("", 0, 0)]
        self.is_over = False  # whether the forward pass is over
        self._inputs: dict[tuple, torch.Tensor] = {}  # inputs of the current segment
        self._handle = torch.empty(0, requires_grad=True, device="cpu")

    def begin_segment(self, name: str, position: int) -> None:
        self.segments.append(Segment(name, position, torch.autograd._get_sequence_nr()))
        self._inputs = {}

    def is_earlier(self, value: object) -> bool:
        """Whether the value is a tensor with a gradient that an earlier segment has made."""
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or not value.requires_grad:
            return False
        node = value.grad_fn
        return node is not None and node._sequence_nr() < self.segments[-1].first_node

    def as_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of an earlier segment, for use in the current segment."""
        edge = get_gradient_edge(tensor)
        key = (edge.node, edge.output_nr)
        if key not in self._inputs:
            cut = self.segment_of(edge.node).outputs.setdefault(key, CutTensor(edge))
            self._inputs[key] = _SegmentInput.apply(self._handle, tensor.detach(), cut, self)
            self.segments[-1].inputs.append((get_gradient_edge(self._inputs[key]), cut))
        return self._inputs[key]

    def segment_of(self, node: Node) -> Segment:
        number = node._sequence_nr()
        return next(segment for segment in reversed(self.segments) if segment.first_node <= number)

    def end(self) -> None:
        """End the forward pass."""
        self._inputs, self.is_over = {}, True


class _SegmentInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle, tensor, cut, cutter):
        ctx.cut, ctx.cutter = cut, cutter
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        refuse_in_loss("backward() or torch.autograd.grad()", runs=not ctx.cutter.is_over)  # the program's graph would end here
        ctx.cut.gradient = grad
        return None, None, None, None


class CutMode(TorchFunctionMode):
    """While active, passes tensors of earlier segments to torch's functions as segment inputs.

    note_change(name): the function of this name has changed such a tensor in place.
    """

    def __init__(self, cutter: GraphCutter, note_change: Callable[[str], None]):
        self.cutter, self.note_change = cutter, note_change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if len(self.cutter.segments) == 1 or is_metadata(func, args, kwargs):
            return func(*args, **kwargs)
        earlier = [tensor for tensor in _tensors((args, kwargs)) if self.cutter.is_earlier(tensor)]
        if not earlier:
            return func(*args, **kwargs)
        versions = [tensor._version for tensor in earlier]
        if torch.is_grad_enabled():  # otherwise no gradient flows back
            args, kwargs = self._as_inputs(args), self._as_inputs(kwargs)
        result = func(*args, **kwargs)
        if versions != [tensor._version for tensor in earlier]:
            self.note_change(getattr(func, "__name__", str(func)))
        return result

    @contextlib.contextmanager
    def paused(self):
        """The mode is not active inside the context, unless another mode was entered after this one."""
        if (*[None], *_get_current_function_mode_stack())[-1] is not self:
            yield
            return
        _pop_mode()
        try:
            yield
        finally:
            _push_mode(self)

    def _as_inputs(self, value):
        if isinstance(value, (tuple, list)):
            items = [self._as_inputs(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self._as_inputs(item) for key, item in value.items()}
        return self.cutter.as_input(value) if self.cutter.is_earlier(value) else value


def _tensors(value) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
