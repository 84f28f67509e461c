"""From what modules and autograd do to acquire and release: any nn.Module, a plain `loss.backward()`.

Knows modules, hooks and saved tensors. Must not know tiers or plans: it names the spans that an op needs and when it no
longer does, and passes gradients on. Over 400 lines because what forward holds, backward must find in the same state.
"""

# [Note: when an op needs its weights]
# Forward (and the forward that activation checkpointing repeats): from the pre-hook to the post-hook of a module that owns
# parameters. A parameter that another op reads is fetched for each function of it (`compute`), and held until the op ends, or room is needed
# and they are gone, where views of it come of that.
#
# Backward: autograd asks for what it saved. Under our saved-tensor hooks a view of an engine storage is saved as a Handle;
# unpacking it fetches the span, and the handle's death, when autograd lets go of the node's saved tensors, releases it. So
# an embedding, which saves no weights, is not fetched for its backward. The hooks are pushed anew inside every checkpointed
# region, on top of the checkpoint's own, and pass on to those whatever is not ours: weights are never "recomputed", and the
# region saves the same number of tensors in both forwards. An op whose output comes from a custom autograd function may
# have stashed a parameter where no hook sees it: its spans are fetched when the gradient of that output is known. So are all
# spans of an infinity.leaf, whatever ran of it, and they stay until something else is unpacked: ranks whose data chose other
# parts of it fetch the same, in the same order.
#
# Saved-tensor hooks switch off autograd's check for in-place changes; ours make it, for weights and activations.
#
# Post-hooks are called also when a forward raises or a recomputation stops early: nothing stays held. They are not after an interrupt:
# whoever next asks something of the engine looks whether the calls under way still are (`end_interrupted_calls`).
#
# A model of one rank that lives on the device whole has nothing to fetch: the first op after a step brings all its parameters home, until
# the next step, and autograd saves them itself. Then an op's hooks only look whether an outermost module runs.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass, _current_graph_task_id
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch.autograd.function import BackwardCFunction

from infinity.engine.trees import map_tensors, parts_of, tensors_in
from infinity.errors import UsageError
from infinity.model.leaves import inside_leaves, is_leaf
from infinity.model.parameters import NO_COPY, get_grad, set_grad
from infinity.system import interrupts
from infinity.system.interrupts import uninterrupted
from infinity.system.lanes import Need
from infinity.tiers.activations import Saved
from infinity.tiers.state import ParameterState, Registry, SpanState
from infinity.tiers.weights import Weights

FORWARD, RECOMPUTE, BACKWARD, ATTRIBUTE = "forward", "recompute", "backward", "attribute"


@dataclasses.dataclass(frozen=True)
class Op:
    """A module with parameters, its own or its children's; `spans` and `params` are its own, unless they are always home."""

    index: int
    name: str
    spans: tuple[SpanState, ...] = ()
    params: tuple[ParameterState, ...] = ()
    whole: bool = False  # infinity.leaf: they are its children's, too, and are fetched for backward all at once


class Frame:
    """One call of an op under way. `spans` and `params` are held for it, `viewed` as long as views of them are alive, `packed` were saved by
    autograd, `read` are other ops' parameters that it has read by name."""

    __slots__ = ("module", "op", "outermost", "packed", "params", "pushed", "read", "scales", "spans", "task", "thread", "viewed")

    def __init__(self, module: nn.Module, op: Op, outermost: bool, scales: bool):
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


class Hold(Need):
    """What a handle needs of its span, which keeps it: that nothing changes there and, while it is `holding`, that it is home."""

    __slots__ = ("holding", "node", "span")

    def __init__(self, handle: Handle, callback: Callable[[Hold], None]):
        super().__init__(handle, callback)
        self.holding = False
        self.node: tuple[int, int] | None = None  # (backward pass, node of the graph) that unpacked it last


class Handle:
    """A view of an engine storage that autograd saved."""

    __slots__ = ("__weakref__", "hold", "leaf", "op", "span", "tensor", "version")

    def __init__(self, dropped: deque[Hold], op: int, span: SpanState, tensor: torch.Tensor, leaf: Op | None):
        self.op = op
        self.leaf = leaf  # that it is fetched with
        self.span = span
        with DisableTorchFunctionSubclass():
            self.tensor = tensor.detach()
        self.version = self.tensor._version
        self.hold = Hold(self, dropped.append)
        self.hold.span = span
        span.handles.add(self.hold)


class SavedTensors:
    """The pair of hooks that is in force while ops run. `outer` is what was in force before, such as a checkpoint's."""

    def __init__(self, hooks: Hooks, outer):
        self.hooks = hooks
        self.outer_pack, self.outer_unpack = outer if outer else (None, None)

    @torch._dynamo.disable
    def pack(self, tensor: torch.Tensor):
        state = self.hooks.registry.find(tensor)
        if state is not None and not state.num_holders:  # given to a function whose forward did not look at it
            return self.hooks.compute([state], self.pack, (tensor,), {})
        span = self.hooks.registry.owner(tensor)
        if span is not None:
            return self.hooks.save(span, tensor)
        if self.outer_pack is not None:
            return self.outer_unpack, self.outer_pack(tensor)
        return self.hooks.save_activation(tensor) or (tensor._version, tensor.detach())

    @torch._dynamo.disable
    def unpack(self, saved):
        if isinstance(saved, Handle):
            return self.hooks.restore(saved)
        if isinstance(saved, Saved):
            if len(set(saved.versions)) > 1:
                raise _modified(f"a saved tensor of shape {saved.shape}", *saved.versions)
            return self.hooks.cycle.activations.restore(saved)
        first, second = saved
        if callable(first):
            return first(second)
        if second._version != first:
            raise _modified(f"a saved tensor of shape {tuple(second.shape)}", first, second._version)
        return second


class Anchored(torch.autograd.Function):
    """The tensor, with a node in the graph that runs in backward whatever the tensor depends on."""

    @staticmethod
    def forward(ctx, anchor, tensor):
        ctx.save_for_backward(anchor)
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # inside a checkpoint: runs the forward pass again, as it does where something was computed
        return None, grad


class Hooks:
    """All hooks of one model. `cycle` is told of begin_forward, begin_backward, end_backward and gradients.

    Holds no module: graphs hold this, and a loss that is kept would keep the model.
    """

    def __init__(self, cycle, model: nn.Module, registry: Registry, pipeline: Weights):
        self.cycle = cycle
        self.registry = registry
        self.pipeline = pipeline
        self.frames: list[Frame] = []
        self.kept: dict[int, SpanState] | None = None  # held until the segment under way ends, if there is one
        self.thread: int | None = None  # that called the model last
        self.recording = False  # the outermost forward under way, or the last one, builds a graph
        self._holding: list[Hold] = []  # those, and some that did
        self._num_interrupts = 0  # after which the calls under way were looked at
        self._aside: list[Hold] = []  # those that held, and will again when what is recomputed for their node is there
        self._loose: list[SpanState] = []  # held for a custom function's or a leaf's backward, until the next event
        self._loose_params: list[ParameterState] = []  # likewise
        self._loose_leaf: Op | None = None  # for whose backward they are
        self._escaped: list[SpanState] = []  # of views that the outermost module returned, until backward ends
        self._returned: set[ParameterState] = set()  # parameters that it returned, until then: they are read as its other outputs are
        self._handles = []
        self._anchor = torch.zeros((), device=pipeline.device, requires_grad=True)
        self.timeline = pipeline.events.timeline  # None without tracing
        self._model = weakref.ref(model)
        pipeline.make_way = self._make_way
        pipeline.all_stay = self._all_stay()
        self._attach(model)

    def _all_stay(self) -> bool:
        """Whether no op of the model needs more of the engine than that its parameters are home."""
        return (
            self.pipeline.ranks.world == 1
            and all(span.pinned for span in self.registry.spans)
            and all(chunk.on_device for chunk in self.registry.chunks)
            and not any(state.written_in_forward for state in self.registry.params)
            and self.cycle.activations is None
            and self.cycle.config.dtype != "fp16"  # whose outermost module is scaled, also where it is recomputed
            and self.timeline is None
        )

    def _attach(self, model: nn.Module) -> None:
        self.ops: dict[int, Op] = {}  # by the identity of the module
        inside = inside_leaves(model)
        for name, module in model.named_modules():
            if module in inside:
                continue
            params = module.parameters() if is_leaf(module) else module._parameters.values()
            states = [state for p in params if p is not None and (state := self.registry.find(p)) is not None]
            if not states and module is not model and not any(self.registry.find(param) for param in module.parameters()):
                continue
            op = Op(len(self.ops), name or type(model).__name__)
            if not self.pipeline.all_stay:
                spans = dict.fromkeys(self.registry.span_of(state) for state in states)
                op = dataclasses.replace(op, spans=tuple(spans), params=tuple(states), whole=is_leaf(module))
            self.ops[id(module)] = op
            self._handles.append(module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))
        self.names = {op.index: op.name for op in self.ops.values()}
        for state in self.registry.params:
            if state.trainable:
                self._handles.append(state.param.register_hook(functools.partial(self._expect_gradient, state)))
                self._handles.append(state.param.register_post_accumulate_grad_hook(functools.partial(self._gradient, state)))

    def __deepcopy__(self, memo):
        raise UsageError(NO_COPY)

    def __reduce_ex__(self, protocol):
        raise UsageError(NO_COPY)

    def remove(self) -> None:
        """Leave the modules as they were; parameters keep whatever they point to."""
        for handle in self._handles:
            handle.remove()

    # Forward and recomputed forward.

    @torch._dynamo.disable
    @uninterrupted
    def _before(self, module, args, kwargs):
        phase = RECOMPUTE if _current_graph_task_id() != -1 else FORWARD
        if phase == RECOMPUTE:
            self.cycle.await_end()  # now: what a reentrant checkpoint starts inside is no backward pass of its own
        elif self.thread not in (None, threading.get_ident()):
            self._refuse_beside(module)
        if self.frames and (self._num_interrupts != interrupts.num_raised or self.frames[0].module is module):
            self.end_interrupted_calls(begun=module)
        if self.pipeline.all_home and self.frames and self.frames[-1].module is not module:
            return None
        if (op := self.ops.get(id(module))) is None:
            raise UsageError(f"this {type(module).__name__} is a copy, by copy.copy, that has an engine's hooks without being in it. {NO_COPY}")
        outermost = not self.frames and phase == FORWARD
        if outermost:
            self.thread = threading.get_ident()
            self.recording = torch.is_grad_enabled() or self.kept is not None
            self.release_escaped()
            self.cycle.begin_forward(self._model(), (args, kwargs))
        if self.pipeline.all_stay and not self.pipeline.all_home:
            self.pipeline.bring_all()
        if phase == RECOMPUTE and self._loose_leaf not in (None, op):
            self.release_loose()  # what a checkpoint runs again has room for one leaf
        whole = module is self._model()
        scales = self.cycle.scaler is not None and not self.frames and self.kept is None and torch.is_grad_enabled()
        if scales and outermost and not whole:
            raise UsageError(
                f"{op.name} was called by itself: the loss scale of dtype='fp16' is that of the whole model's outputs. Call the "
                f"model, or use dtype='bf16', which needs none."
            )
        scales = scales and whole
        frame = Frame(module, op, outermost, scales)
        if self.pipeline.all_stay and not self.frames:
            frame.hold(self.registry.params)
        self.frames.append(frame)
        if self.timeline is not None:
            self.timeline.end()
        if op.spans:
            if phase == FORWARD and self.recording:
                with DisableTorchFunctionSubclass():
                    for state in op.params:
                        state.touched += state.param.requires_grad
            self.cycle.acquire((phase, op.index), op.spans)
            frame.spans.extend(op.spans)
            frame.hold(op.params)
        if self.timeline is not None:
            self.timeline.begin(phase, op.name)
        frame.pushed = torch.is_grad_enabled() and self._push_saved_tensors()
        return map_tensors((args, kwargs), self._unscaled) if scales else None

    def _refuse_beside(self, module: nn.Module) -> None:
        """Raise UsageError where the thread that called the model last is still in that call, or in a backward pass."""
        in_forward = any(frame.module is module and frame.thread != threading.get_ident() for frame in self.frames)
        if in_forward or (not self.frames and self.cycle.backward_task is not None):
            if any(thread.ident == self.thread for thread in threading.enumerate()):
                raise UsageError(
                    f"{type(module).__name__} is called while another thread is in a forward or backward pass of the model. Passes of a model "
                    f"come one after the other: hold one threading.Lock around each training step and around each evaluation."
                )

    def _push_saved_tensors(self) -> bool:
        """Put ours in force, unless they are or none is needed. Those of another engine, whose model calls this one, come after ours."""
        if self.pipeline.all_stay:
            return False
        top = _top_saved_tensors_default_hooks(True)
        owner = getattr(top[0], "__self__", None) if top else None
        if isinstance(owner, SavedTensors) and owner.hooks is self:
            return False
        saved = SavedTensors(self, top)
        _push_saved_tensors_default_hooks(saved.pack, saved.unpack)
        return True

    @contextlib.contextmanager
    def saved_tensors(self):
        """What autograd saves inside the block is as if an op had saved it."""
        pushed = self._push_saved_tensors()
        try:
            yield
        finally:
            if pushed:
                _pop_saved_tensors_default_hooks()

    def _unscaled(self, value: torch.Tensor) -> torch.Tensor:
        """An input of an fp16 model; what it depends on gets gradients that are not scaled."""
        return self.cycle.scaler.unapply(value) if value.is_floating_point() and value.requires_grad else value

    @torch._dynamo.disable
    @uninterrupted
    def _after(self, module, args, output, *, of_any_thread=False):
        here = threading.get_ident()  # a call that was refused, since another thread's was under way, has no frame
        if not any(frame.module is module and (of_any_thread or frame.thread == here) for frame in reversed(self.frames)):
            return
        while True:
            frame = self.frames.pop()
            frame.release()
            if frame.pushed and frame.task == _current_graph_task_id():
                _pop_saved_tensors_default_hooks()
            if frame.op.whole and frame.spans and self.kept is None and _current_graph_task_id() != -1:
                self._keep_loose(frame.op)  # its backward follows, on each rank with what it has chosen
            escaping = self._escaping(output) if (frame.spans or frame.viewed) and frame.module is module else ()
            for span in (*frame.spans, *frame.viewed):
                if span in escaping:
                    (self.frames[-1].spans if self.frames else self._escaped).append(span)
                elif self.kept is not None and span.index not in self.kept:
                    self.kept[span.index] = span
                else:
                    self.pipeline.release(span)
            if frame.module is module:
                break
        if not self.frames:
            self._returned.update(filter(None, map(self.registry.find, tensors_in(output))))
        if self._aside and not self.frames:
            self._hold_again()
        if self.timeline is not None:
            self._goes_on(frame.op)
        if output is None:
            return None
        whole = module is self._model() and not self.frames and self.kept is None
        if whole:
            output = self.cycle.scaled(output)
        anchored = output
        if torch.is_grad_enabled():
            if frame.op.whole:
                anchored = self._anchored(frame.op, args, output)
            self._watch(frame, anchored)
        return anchored if whole or anchored is not output else None

    def end_interrupted_calls(self, begun: nn.Module | None = None) -> None:
        """End the calls of modules that an interrupt has ended, in this thread. begun: one of it is under way that has no frame yet."""
        if not self.frames or self.thread != threading.get_ident():
            return
        self._num_interrupts = interrupts.num_raised
        under_way = _calls()
        if under_way is None:
            return
        under_way[begun] -= 1
        while self.frames and under_way[module := self.frames[-1].module] < sum(frame.module is module for frame in self.frames):
            self._after(module, (), None, of_any_thread=True)

    def _goes_on(self, op: Op) -> None:
        """For the trace: what the device works for after a call of the op."""
        in_backward = _current_graph_task_id() != -1
        if self.frames:
            self.timeline.begin(RECOMPUTE if in_backward else FORWARD, self.frames[-1].op.name)
        elif in_backward:
            self.timeline.begin(BACKWARD, op.name)
        else:
            self.timeline.end()

    def _anchored(self, op: Op, args, output):
        """A leaf's output of which every tensor has a gradient of its own, also where the leaf has computed nothing on this rank."""
        inputs = tensors_in(args)
        if not any(state.param.requires_grad for state in op.params) and not any(x.requires_grad for x in inputs):
            return output

        def loose(tensor):
            return tensor.is_floating_point() and (not tensor.requires_grad or any(tensor is x for x in inputs))

        if not any(map(loose, tensors_in(output))):
            return output
        return map_tensors(output, lambda tensor: Anchored.apply(self._anchor, tensor) if loose(tensor) else tensor)

    def _escaping(self, output) -> set[SpanState]:
        """The spans that an output looks into. A parameter itself is fetched again by whoever computes with it; a view of it cannot be."""
        views = [tensor for tensor in tensors_in(output) if not isinstance(tensor, nn.Parameter)]
        return {span for tensor in views if (span := self.registry.owner(tensor)) is not None}

    def _watch(self, frame: Frame, output) -> None:
        """Learn when gradients of an output are known."""
        unseen = frame.op.whole or any(span.index not in frame.packed for span in frame.op.spans)
        begins, seen = frame.outermost or frame.scales, set()
        if not begins and not unseen:
            return
        for tensor in tensors_in(output):
            if not tensor.requires_grad or tensor.grad_fn is None:
                continue
            if begins and (tensor.is_floating_point() or not frame.scales):
                tensor.register_hook(self._backward_begins)
                self.cycle.graph_built()
            if frame.op.whole:
                tensor.register_hook(lambda grad: self._before_leaf_backward(frame.op, seen))
            elif unseen and isinstance(tensor.grad_fn, BackwardCFunction):
                tensor.register_hook(lambda grad, op=frame.op: self._before_custom_backward(op))

    @uninterrupted
    def _before_leaf_backward(self, op: Op, seen: set[int]) -> None:
        """Once a pass, whichever of its outputs is first: which of them have gradients depends on what it computed."""
        if (task := _current_graph_task_id()) not in seen:
            seen.add(task)
            self._before_custom_backward(op)

    def _keep_loose(self, leaf: Op) -> None:
        self.release_loose()
        for span in leaf.spans:
            self.pipeline.hold(span)
        self._hold_loose(leaf)
        self._loose_leaf = leaf

    def _hold_loose(self, op: Op) -> None:
        self._loose.extend(op.spans)
        for state in op.params:
            state.hold()
        self._loose_params.extend(op.params)

    def may_compute(self, states: list[ParameterState]) -> bool:
        """Whether parameters may be read: by an op of this thread, in a backward pass, or since the outermost module returned them."""
        if _current_graph_task_id() != -1:
            return True
        return self.thread == threading.get_ident() and (bool(self.frames) or self._returned.issuperset(states))

    @torch._dynamo.disable
    def compute(self, states: list[ParameterState], func, args, kwargs):
        """func(*args, **kwargs) of parameters that are held for no op under way: for as long as it takes, or for as long as that op does
        where what comes of it looks into their storage."""
        held, keep = self._hold_read(states), True
        by_address = func is torch.Tensor.data_ptr
        try:
            returned = not self.frames and _current_graph_task_id() == -1
            with self.saved_tensors() if returned else contextlib.nullcontext():
                result = func(*args, **kwargs)
            keep = any(map(self._looks_inside, parts_of(result)))
        finally:
            self._release_read(states, held, keep=keep or by_address, viewed=not by_address)
        return result

    @uninterrupted
    def _hold_read(self, states: list[ParameterState]) -> list[SpanState]:
        """A parameter is read by name."""
        in_backward = _current_graph_task_id() != -1
        if self.recording and not in_backward:
            for state in states:
                self._count(state)
        held = list(dict.fromkeys(map(self.registry.span_of, states))) if not self.pipeline.all_home else []
        lacking = [span for span in held if not (span.attached and span.holds)]
        for state in states if in_backward and not self.frames else ():
            if self.registry.span_of(state) in lacking and any(chunk.update.is_early for chunk in self.registry.chunks_of(state)):
                raise UsageError(
                    f"{state.name} is read in a backward pass that has updated it already. Use update='deferred' for hooks that look at "
                    f"weights in backward."
                )
        there = [span for span in held if span not in lacking]
        for span in there:
            self.pipeline.hold(span)
        try:
            if lacking:
                self.cycle.acquire((ATTRIBUTE, *(span.index for span in lacking)), lacking)
        except BaseException:
            for span in there:
                self.pipeline.release(span)
            raise
        for state in states:
            state.hold()
        return held

    @uninterrupted
    def _release_read(self, states: list[ParameterState], held: list[SpanState], *, keep: bool, viewed: bool) -> None:
        for state in states:
            state.release()
        if keep and self.frames:
            (self.frames[-1].viewed if viewed else self.frames[-1].spans).extend(held)
        elif keep:
            (self._loose if _current_graph_task_id() != -1 else self._escaped).extend(held)
        else:
            for span in held:
                self.pipeline.release(span)

    def _looks_inside(self, value) -> bool:
        """Whether a value may look into the storage of a parameter, without being one."""
        if isinstance(value, torch.Tensor):
            return self.registry.find(value) is None and self.registry.owner(value) is not None
        return not isinstance(value, _PLAIN)

    def _count(self, state: ParameterState) -> None:
        """One use more, by the op under way, unless that or one around it has counted it: its gradient is one to wait for, also where its
        span is held for others."""
        if not any(state in frame.op.params or state.index in frame.read for frame in reversed(self.frames)):
            if self.frames:
                self.frames[-1].read.add(state.index)
            with DisableTorchFunctionSubclass():
                state.touched += state.param.requires_grad

    def begin_segment(self) -> None:
        self.kept = {}

    @uninterrupted
    def end_segment(self) -> None:
        for span in self.kept.values():
            self.pipeline.release(span)
        self.kept = None

    # Backward.

    @uninterrupted
    def save(self, span: SpanState, tensor: torch.Tensor) -> Handle:
        frame = self.frames[-1] if self.frames else None
        if frame is not None:
            frame.packed.add(span.index)
        leaf = frame.op if frame is not None and frame.op.whole and span in frame.op.spans else None
        return Handle(self.pipeline.dropped, frame.op.index if frame else -1, span, tensor, leaf)

    def save_activation(self, tensor: torch.Tensor) -> Saved | None:
        """None: it stays where it is, such as what a backward pass, or a segment that goes backward next, computes anew."""
        activations = self.cycle.activations
        if activations is None or self.kept is not None or _current_graph_task_id() != -1:
            return None
        return activations.save(tensor)

    @uninterrupted
    def restore(self, handle: Handle) -> torch.Tensor:
        if handle.tensor._version != handle.version:
            raise _modified(f"a weight of {handle.span.params[0].name}'s span", handle.version, handle.tensor._version)
        if handle.leaf is not None:
            if handle.span not in self._loose:
                self._before_custom_backward(handle.leaf)
            return handle.tensor
        node = (_current_graph_task_id(), _current_node())
        hold = handle.hold
        if not hold.holding:
            self.release_loose()
            self._release_earlier(*node)
            self._acquire_for_backward(handle.op, handle.span.index, (handle.span,))
            hold.holding = True
            self._holding.append(hold)
        hold.node = node
        return handle.tensor

    def release_all(self) -> None:
        """A backward pass is over: what a retained graph still refers to is held no longer."""
        if self.timeline is not None:
            self.timeline.end()
        self.release_loose()
        self.release_escaped()
        self._release_where(lambda hold: True)
        self._aside = []

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
                self.pipeline.release(hold.span)
            else:
                self._holding.append(hold)

    def _make_way(self) -> bool:
        """An op finds no room: give up what is held for views that are gone and, where it is recomputed, what backward holds until that is
        over. Whether there was any.

        Autograd may have unpacked a weight of the node for which it is recomputed: that is brought back to the same storage.
        """
        gone = [(frame, span) for frame in self.frames for span in frame.viewed if not span.has_escaped]
        for frame, span in gone:
            frame.viewed.remove(span)
            self.pipeline.release(span)
        if gone:
            return True
        if not self.frames or _current_graph_task_id() == -1:
            return False
        held = [hold for hold in self._holding if hold() is not None and hold.holding]
        self._release_where(lambda hold: True)
        self._aside += held
        return bool(held)

    def _hold_again(self) -> None:
        aside, self._aside = self._aside, []
        for hold in aside:
            handle = hold()
            if handle is not None and not hold.holding and hold.node == (_current_graph_task_id(), _current_node()):
                self._acquire_for_backward(handle.op, hold.span.index, (hold.span,))
                hold.holding = True
                self._holding.append(hold)

    def refuse_running(self, what: str) -> None:
        """Raise UsageError where an op, or infinity.gathered, needs weights that are about to change or be saved. What the outermost module
        has returned needs none of the engine any more: views of weights that an evaluation has returned, the program has."""
        runs = bool(self.frames) or _current_graph_task_id() != -1
        if not runs:
            self.release_escaped()
        self.pipeline.drain_dropped()
        if runs or any(span.holds for span in self.registry.spans):
            raise UsageError(f"{what} while the model runs or inside infinity.gathered: end that first")

    def release_escaped(self) -> None:
        self._returned.clear()
        while self._escaped:
            self.pipeline.release(self._escaped.pop())

    def release_loose(self) -> None:
        self._loose_leaf = None
        while self._loose_params:
            self._loose_params.pop().release()
        while self._loose:
            self.pipeline.release(self._loose.pop())

    @uninterrupted
    def _before_custom_backward(self, op: Op) -> None:
        self.release_loose()
        self._acquire_for_backward(op.index, -1, op.spans)
        self._hold_loose(op)
        self._loose_leaf = op if op.whole else None

    def _acquire_for_backward(self, op: int, span: int, spans) -> None:
        if self.timeline is not None:
            self.timeline.end()
        self.cycle.acquire((BACKWARD, op, span), spans)
        if self.timeline is not None:
            self.timeline.begin(BACKWARD, self.names.get(op, "outside of all modules"))

    @uninterrupted
    def _backward_begins(self, grad) -> None:
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True: a graph of the backward pass would keep weights that leave the device. Gradients of gradients "
                "are not supported."
            )
        self.cycle.begin_backward()
        if self.timeline is not None:
            self.timeline.begin(BACKWARD, self.names[0])

    @torch._dynamo.disable
    @uninterrupted
    def _expect_gradient(self, state: ParameterState, grad: torch.Tensor) -> None:
        self.cycle.expect_gradient(state)

    @torch._dynamo.disable
    @uninterrupted
    def _gradient(self, state: ParameterState, param: torch.Tensor) -> None:
        with DisableTorchFunctionSubclass():
            grad = get_grad(param)
            set_grad(param, None)
        if grad is None:  # somebody's hook was first, and dropped it
            return
        if grad.dtype is not state.placeholder.dtype:
            raise UsageError(
                f"{state.name} has a gradient in {grad.dtype}, but the engine keeps it in {state.placeholder.dtype}. Choose the dtype in "
                f"infinity.Config, not with model.to() or model.float()."
            )
        if grad.is_sparse:
            raise UsageError(f"{state.name} has a sparse gradient, which no tier can hold; build its module with sparse=False")
        self.cycle.gradient(state, grad)


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None), Handle, Saved)


def _calls() -> Counter[nn.Module] | None:
    """How many calls of each module are under way in this thread; None where a compiled one does not say of what it is."""
    found: Counter[nn.Module] = Counter()
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if "_call_impl" in name and "_wrapped_call_impl" not in name:  # which calls it
            called = frame.f_locals.get("self")
            if called is None:
                return None
            found[called] += 1
        frame = frame.f_back
    return found


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
