"""The calls of a model's ops that are under way in a thread, what is held for each, and how they end.

Knows spans, and who brings them. Must not know when a step begins, what comes of gradients, or what hooks a module has.
"""

# [Note: when a call needs a weight]
# In forward, and the forward that activation checkpointing repeats: from the pre-hook to the post-hook of a module that owns it. A
# parameter that another op reads is fetched for each function of it (`compute`), and held until the op ends, or room is needed and
# they are gone, where views of it come of that. In backward: see [Note: when backward needs a weight] in saved_tensors.py.
#
# [Note: calls that are over]
# Post-hooks are called also when a forward raises or a recomputation stops early: nothing stays held. They are not after an
# interrupt: whoever next asks something of the engine looks whether the calls under way still are (`end_interrupted`). A call is
# live while torch's function that runs a module's hooks and its forward is on this thread's stack. It is known by its name: under
# another one no call would look live, and all would end.

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass, _current_graph_task_id
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)

from infinity.engine.build import Assembly
from infinity.engine.steps.plan_follower import Follower
from infinity.engine.memory.device_memory import DeviceBudget
from infinity.engine.autograd.ops import ATTRIBUTE, BACKWARD, FORWARD, RECOMPUTE, Frame, Op
from infinity.engine.steps.refusals import LossFunction
from infinity.engine.autograd.saved_tensors import BackwardHolds, Handle, SavedTensors
from infinity.engine.autograd.trees import parts_of, tensors_in
from infinity.errors import UsageError
from infinity.system import interrupts
from infinity.system.interrupts import uninterrupted
from infinity.tiers.activations import Activations
from infinity.tiers.saved_storage import SavedTensor
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import SpanState

_CALL = "_call_impl"  # of nn.Module, and in the name of what torch.compile makes of it
_CALLS_IT = "_wrapped_call_impl"
assert {_CALL, _CALLS_IT} <= vars(nn.Module).keys(), f"this torch has no nn.Module.{_CALL}: see [Note: calls that are over]"


class CallState(NamedTuple):
    """What of `Calls` is one thread's, where several take turns."""

    frames: list[Frame]
    thread: int | None = None
    recording: bool = True
    touched: set[ParameterState] | None = None


class Calls:
    """The stack of `frames`; `kept` is held until the segment under way ends, if there is one, or an op finds no room."""

    def __init__(self, follower: Follower, device_budget: DeviceBudget, parts: Assembly):
        self.follower, self.device_budget, self._parts = follower, device_budget, parts
        self.registry, self.weights = follower.registry, follower.weights
        self.timeline = follower.weights.events.timeline  # None without tracing
        self.frames: list[Frame] = []
        self.kept: dict[int, SpanState] | None = None
        self.touched: set[ParameterState] | None = None  # of the ops that a micro-batch has called in a segment, where that is asked for
        self.thread: int | None = None  # that called the model last
        self.loss = LossFunction()
        self.recording = False  # the outermost forward under way, or the last one, builds a graph
        self.backward = BackwardHolds(self)
        self._num_interrupts = 0  # after which the calls under way were looked at
        self._escaped: list[SpanState] = []  # of views that the outermost module returned, until backward ends
        self._returned: set[ParameterState] = set()  # parameters that it returned, until then: they are read as its other outputs are
        self.weights.make_way = self._make_way

    @property
    def activations(self) -> Activations | None:
        return self._parts.activations

    def acquire(self, key: Hashable, spans: Sequence[SpanState]) -> None:
        """An op begins that needs these spans: hold them, once they are on the device."""
        self.weights.drain_dropped()
        self.device_budget.note_op(key)
        if self.kept is not None and all(span.index in self.kept for span in spans):
            self.weights.hold_all(spans)  # the plan has one use, however many micro-batches come
            return
        self.follower.acquire(key, spans, record=self.recording)
        if self.kept is not None:
            self._keep(spans)

    def _keep(self, spans: Sequence[SpanState]) -> None:
        for span in spans:
            if span.index not in self.kept:
                self.kept[span.index] = span
                self.weights.hold(span)

    # What hooks call.

    def begin_outermost(self) -> None:
        """Nothing is under way, and a forward pass of this thread comes."""
        self.thread = threading.get_ident()
        self.recording = torch.is_grad_enabled()
        self.release_escaped()

    def begin(self, frame: Frame, phase: str) -> None:
        """A call begins: what its op needs comes, and is held until it ends."""
        op = frame.op
        if phase == RECOMPUTE:
            self._refuse_updated(op.name, "called", op.spans)
        self.frames.append(frame)
        if self.timeline is not None:
            self.timeline.end()
        if op.spans:
            if phase == FORWARD and self.recording:
                with DisableTorchFunctionSubclass():
                    for state in op.params:
                        state.touched += state.param.requires_grad
                if self.touched is not None:
                    self.touched.update(op.params)
            self.acquire((phase, op.index), op.spans)
            frame.spans.extend(op.spans)
            frame.hold(op.params)
        if self.timeline is not None:
            self.timeline.begin(phase, op.name)
        frame.pushed = torch.is_grad_enabled() and self._push_saved_tensors()

    @uninterrupted
    def end(self, module: nn.Module, output, *, of_any_thread: bool = False) -> Frame | None:
        """The last call of the module is over, with those inside of it; returns its frame. None if it has none, as one that was refused,
        since another thread's was under way."""
        here = threading.get_ident()
        if not any(frame.module is module and (of_any_thread or frame.thread == here) for frame in reversed(self.frames)):
            return None
        while True:
            frame = self.frames.pop()
            frame.release()
            if frame.pushed and frame.task == _current_graph_task_id():
                _pop_saved_tensors_default_hooks()
            if frame.op.whole and frame.spans and _current_graph_task_id() != -1:
                self.backward.keep_loose(frame.op)  # its backward follows, on each rank with what it has chosen
            self._let_go(frame, self._escaping(output) if (frame.spans or frame.viewed) and frame.module is module else ())
            if frame.module is module:
                break
        if not self.frames:
            self._returned.update(filter(None, map(self.registry.find, tensors_in(output))))
            self.backward.hold_again()
        if self.timeline is not None:
            self._goes_on(frame.op)
        return frame

    def _let_go(self, frame: Frame, escaping: set[SpanState]) -> None:
        for span in (*frame.spans, *frame.viewed):
            if span in escaping:
                (self.frames[-1].spans if self.frames else self._escaped).append(span)
            else:
                self.weights.release(span)

    def _escaping(self, output) -> set[SpanState]:
        """The spans that an output looks into. A parameter itself is fetched again by whoever computes with it; a view of it cannot be."""
        views = [tensor for tensor in tensors_in(output) if not isinstance(tensor, nn.Parameter)]
        return {span for tensor in views if (span := self.registry.owner(tensor)) is not None}

    def _goes_on(self, op: Op) -> None:
        """For the trace: what the device works for after a call of the op."""
        in_backward = _current_graph_task_id() != -1
        if self.frames:
            self.timeline.begin(RECOMPUTE if in_backward else FORWARD, self.frames[-1].op.name)
        elif in_backward:
            self.timeline.begin(BACKWARD, op.name)
        else:
            self.timeline.end()

    def end_interrupted_before(self, module: nn.Module) -> None:
        """A call of the module comes: look whether others were interrupted, if there was an interrupt, or it is the outermost one again."""
        if self.frames and (self._num_interrupts != interrupts.num_raised or self.frames[0].module is module):
            self.end_interrupted(begun=module)

    def end_interrupted(self, begun: nn.Module | None = None) -> None:
        """End the calls of modules that an interrupt has ended, in this thread. begun: one of it is under way that has no frame yet."""
        if not self.frames or self.thread != threading.get_ident():
            return
        self._num_interrupts = interrupts.num_raised
        live = live_calls()
        if live is None:
            return
        live[begun] -= 1
        while self.frames and live[module := self.frames[-1].module] < sum(frame.module is module for frame in self.frames):
            self.end(module, None, of_any_thread=True)

    # SavedTensor tensors.

    def drain_dropped(self) -> None:
        """Let go of what was kept for saved tensors that autograd has dropped."""
        self.weights.drain_dropped()
        if self.activations is not None:
            self.activations.drain()

    def _push_saved_tensors(self) -> bool:
        """Put ours in force, unless they are. Those of another engine, whose model calls this one, come after ours."""
        top = _top_saved_tensors_default_hooks(True)
        owner = getattr(top[0], "__self__", None) if top else None
        if isinstance(owner, SavedTensors) and owner.calls is self:
            return False
        saved = SavedTensors(self, top)
        _push_saved_tensors_default_hooks(saved.pack, saved.unpack)
        return True

    @contextlib.contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """What autograd saves inside the block is as if an op had saved it."""
        pushed = self._push_saved_tensors()
        try:
            yield
        finally:
            if pushed:
                _pop_saved_tensors_default_hooks()

    # Parameters that are read by name.

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
        held = list(dict.fromkeys(map(self.registry.span_of, states)))
        lacking = [span for span in held if not (span.attached and span.holds)]
        for state in states if in_backward else ():
            if (span := self.registry.span_of(state)) in lacking:
                self._refuse_updated(state.name, "read", [span])
        there = [span for span in held if span not in lacking]
        for span in there:
            self.weights.hold(span)
        try:
            if lacking:
                self.acquire((ATTRIBUTE, *(span.index for span in lacking)), lacking)
        except BaseException:
            for span in there:
                self.weights.release(span)
            raise
        for state in states:
            state.hold()
        return held

    def _refuse_updated(self, name: str, how: str, spans: Iterable[SpanState]) -> None:
        """Raise UsageError where weights of the next step would be taken for those of this one, in a backward pass."""
        if any(chunk.update.is_early for span in spans for chunk in self.registry.chunks_in(span)):
            raise UsageError(
                f"{name} is {how} in a backward pass that has updated it already. Use update='deferred' for hooks, or checkpoints, that "
                f"look at weights in backward when their gradients are complete."
            )

    @uninterrupted
    def _release_read(self, states: list[ParameterState], held: list[SpanState], *, keep: bool, viewed: bool) -> None:
        for state in states:
            state.release()
        if keep and self.frames:
            (self.frames[-1].viewed if viewed else self.frames[-1].spans).extend(held)
        elif keep:
            (self.backward.loose if _current_graph_task_id() != -1 else self._escaped).extend(held)
        else:
            for span in held:
                self.weights.release(span)

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
            if self.touched is not None:
                self.touched.add(state)

    # What steps call.

    @contextlib.contextmanager
    def segment(self) -> Iterator[None]:
        """What the block's ops fetch stays until it ends."""
        self.kept = {}
        try:
            yield
        finally:
            self._let_kept_go()
            self.kept = None

    @uninterrupted
    def _let_kept_go(self) -> None:
        while self.kept:
            self.weights.release(self.kept.popitem()[1])

    def swap(self, turn: CallState) -> CallState:
        """From now on another thread's calls are those under way. Returns whose were."""
        before = CallState(self.frames, self.thread, self.recording, self.touched)
        self.frames, self.thread, self.recording, self.touched = turn
        return before

    def end_all(self) -> None:
        """What the thread had called is over, whatever has ended it."""
        while self.frames:
            self.end(self.frames[-1].module, None, of_any_thread=True)

    def release_all(self) -> None:
        """A backward pass is over: what a retained graph still refers to is held no longer."""
        if self.timeline is not None:
            self.timeline.end()
        self.release_escaped()
        self.backward.release_all()

    def release_escaped(self) -> None:
        self._returned.clear()
        while self._escaped:
            self.weights.release(self._escaped.pop())

    def refuse_running(self, what: str) -> None:
        """Raise UsageError where an op, or infinity.gathered, needs weights that are about to change or be saved. What the outermost module
        has returned needs none of the engine any more: views of weights that an evaluation has returned, the program has."""
        runs = bool(self.frames) or _current_graph_task_id() != -1
        if not runs:
            self.release_escaped()
        self.weights.drain_dropped()
        if runs or any(span.holds for span in self.registry.spans):
            raise UsageError(f"{what} while the model runs or inside infinity.gathered: end that first")

    def _make_way(self) -> bool:
        """An op finds no room: give up what is kept for other micro-batches, what is held for views that are gone and, where it is
        recomputed, what backward holds until that is over, for autograd may have unpacked a weight of the node for which it is recomputed.
        Whether there was any."""
        was_kept = bool(self.kept)
        self._let_kept_go()
        gone = [(frame, span) for frame in self.frames for span in frame.viewed if not span.has_escaped]
        for frame, span in gone:
            frame.viewed.remove(span)
            self.weights.release(span)
        recomputes = bool(self.frames) and _current_graph_task_id() != -1
        return was_kept or bool(gone) or (recomputes and self.backward.set_aside())


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None), Handle, SavedTensor)


def live_calls() -> Counter[nn.Module] | None:
    """How many calls of each module are under way in this thread; None where a compiled one does not say of what it is."""
    found: Counter[nn.Module] = Counter()
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if _CALL in name and _CALLS_IT not in name:
            called = frame.f_locals.get("self")
            if called is None:
                return None
            found[called] += 1
        frame = frame.f_back
    return found
