"""Cutting autograd's graph of a forward pass into segments that go backward one by one, with the gradients of the whole.

Knows graphs and tensors. Must not know modules, threads or engines.
"""

# [Note: how a graph is cut]
# What a segment uses of an earlier one, it gets by an `_Enter`: a node that the graph of the segment ends with, whose backward notes the
# gradient. Later, backward of the segment that made the tensor begins with that gradient, among others, as one of its roots.
#
#     forward     segment 1: x ... y      segment 2: enter(y) ... z      segment 3: enter(y), enter(z) ... loss
#     backward    3: from the loss; y.gradient = a, z.gradient = b
#                 2: from z with b, and from its enter(y) with a; y.gradient = a + what 2 adds
#                 1: from y
#
# Autograd adds up what a tensor gets from several users in the order in which these go backward, the last first. So it does here: what
# later segments brought is given to the enter(y) of an earlier one, to be the first term of the sum there. The same bits come of it, and
# so they do for a parameter that several segments use.
#
# Which segment has made a tensor tells the sequence number of its node: they are counted up in each thread, and a forward pass has a
# thread of its own. An `_Enter` saves nothing, and shares the memory and the version counter of what it lets in.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from infinity.engine.steps.refusals import refuse_in_loss
from infinity.model.parameters import is_metadata


class Cut:
    """A tensor that later segments use, by its place in the graph of its own, and what its gradient is so far."""

    __slots__ = ("edge", "gradient")

    def __init__(self, edge: GradientEdge):
        self.edge = edge
        self.gradient: torch.Tensor | None = None


class Segment:
    """The part of a graph between two borders. position: among those of all forward passes; begin: the number that its first node has."""

    def __init__(self, name: str, position: int, begin: int):
        self.name, self.position, self.begin = name, position, begin
        self.made: dict[tuple, Cut] = {}  # by it, and used later
        self.entered: list[tuple[GradientEdge, Cut]] = []  # what it uses
        self.touched: set = set()  # parameters of ops that it has called

    def roots(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Where its backward pass begins, with which gradients."""
        begin = [(cut.edge, cut.gradient) for cut in self.made.values() if cut.gradient is not None]
        return begin + [(edge, cut.gradient) for edge, cut in self.entered if cut.gradient is not None]

    def leaves(self, last: torch.Tensor | None = None) -> tuple[set[torch.Tensor], Node | None]:
        """The leaves of its graph, such as parameters, and the first node of earlier segments that it reaches, if it does. last: that the
        whole graph ends with, if it is the last one."""
        stack, seen, found, reached = [cut.edge.node for cut in self.made.values()], set(), set(), None
        if last is not None and last.grad_fn is not None:
            stack.append(last.grad_fn)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, torch._C._functions.AccumulateGrad):
                found.add(node.variable)
            elif node._sequence_nr() < self.begin:
                reached = min(filter(None, (reached, node)), key=lambda node: node._sequence_nr())
                continue
            stack += [following for following, _ in node.next_functions if following is not None]
        return found, reached


class Cutter:
    """Cuts the graph of one forward pass, in the thread in which it runs. segments: so far."""

    def __init__(self):
        self.segments = [Segment("", 0, 0)]
        self._known: dict[tuple, torch.Tensor] = {}  # what has been let into the segment under way
        self.is_over = False  # the forward pass
        self._handle = torch.empty(0, requires_grad=True, device="cpu")

    def begin(self, name: str, position: int) -> None:
        """A segment begins here."""
        self.segments.append(Segment(name, position, torch.autograd._get_sequence_nr()))
        self._known = {}

    def is_earlier(self, value: object) -> bool:
        """Whether it is a tensor that an earlier segment has made, and that has a gradient."""
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or not value.requires_grad:
            return False
        node = value.grad_fn
        return node is not None and node._sequence_nr() < self.segments[-1].begin

    def let_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, made by an earlier segment, for use in this one."""
        edge = get_gradient_edge(tensor)
        key = (edge.node, edge.output_nr)
        if key not in self._known:
            cut = self.maker(edge.node).made.setdefault(key, Cut(edge))
            self._known[key] = _Enter.apply(self._handle, tensor.detach(), cut, self)
            self.segments[-1].entered.append((get_gradient_edge(self._known[key]), cut))
        return self._known[key]

    def maker(self, node: Node) -> Segment:
        """The segment that a node is of."""
        number = node._sequence_nr()
        return next(segment for segment in reversed(self.segments) if segment.begin <= number)

    def end(self) -> None:
        """No more comes."""
        self._known, self.is_over = {}, True

    def drop(self) -> None:
        """Nobody wants the graph."""
        self.segments.clear()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle, tensor, cut, cutter):
        ctx.cut, ctx.cutter = cut, cutter
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        refuse_in_loss("backward() or torch.autograd.grad()", runs=not ctx.cutter.is_over)  # its graph ends here
        ctx.cut.gradient = grad
        return None, None, None, None


class Glue(TorchFunctionMode):
    """While it is in force, functions of torch get what earlier segments have made by `cutter.let_in`. note(function): one changes that
    in place."""

    def __init__(self, cutter: Cutter, note: Callable[[str], None]):
        self.cutter, self.note = cutter, note

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if len(self.cutter.segments) == 1 or is_metadata(func, args, kwargs):
            return func(*args, **kwargs)
        changed = [tensor for tensor in _tensors((args, kwargs)) if self.cutter.is_earlier(tensor)]
        if not changed:
            return func(*args, **kwargs)
        versions = [tensor._version for tensor in changed]
        if torch.is_grad_enabled():  # else nothing comes back to what it is given
            args, kwargs = self._let_in(args), self._let_in(kwargs)
        result = func(*args, **kwargs)
        if versions != [tensor._version for tensor in changed]:
            self.note(getattr(func, "__name__", str(func)))
        return result

    @contextlib.contextmanager
    def paused(self):
        """It is not in force inside the block, unless another mode was put over it."""
        if (*[None], *_get_current_function_mode_stack())[-1] is not self:
            yield
            return
        _pop_mode()
        try:
            yield
        finally:
            _push_mode(self)

    def _let_in(self, value):
        if isinstance(value, (tuple, list)):
            items = [self._let_in(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self._let_in(item) for key, item in value.items()}
        return self.cutter.let_in(value) if self.cutter.is_earlier(value) else value


def _tensors(value) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
