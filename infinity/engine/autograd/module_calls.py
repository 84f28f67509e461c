"""The running calls of a model's ops in a thread: the weights that each call holds, and the end of a call.

Knows spans, and the plan follower that fetches them. Must not know when a step begins, the use of gradients, or the hooks of a module.
"""

# [Note: when a call needs a weight]
# In forward, the call needs the weight from the pre-hook to the post-hook of the module that owns the weight. So does a repeated forward of
# activation checkpointing. A parameter that another op reads by name is fetched for each reading function (parameter_reads.py).
# In backward: see [Note: when backward needs a weight] in saved_tensors.py.
#
# [Note: calls that are over]
# Post-hooks also run when a forward raises or a recomputation stops early, so no weight stays held. After an interrupt they do not run.
# So the next caller of the engine checks whether the running calls are still live (`end_interrupted`). A call is live while torch's
# function that runs a module's hooks and forward is on this thread's stack. The engine finds the function by name. If torch renames it,
# no call appears live, and all calls would end.

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

from infinity.engine.autograd.ops import BACKWARD, FORWARD, RECOMPUTE, Frame, Op
from infinity.engine.autograd.parameter_reads import ParameterReads
from infinity.engine.autograd.saved_tensors import BackwardHolds, SavedTensors
from infinity.engine.autograd.trees import tensors_in
from infinity.engine.build import Assembly
from infinity.engine.memory.device_memory import DeviceBudget
from infinity.engine.steps.plan_follower import PlanFollower
from infinity.engine.steps.refusals import LossFunction
from infinity.errors import UsageError
from infinity.model.autograd_state import autograd_runs
from infinity.system import interrupts
from infinity.system.interrupts import uninterrupted
from infinity.tiers.activations import Activations
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import SpanState

_CALL = "_call_impl"  # in the name of nn.Module's function, and of the function that torch.compile makes of this function
_CALLS_IT = "_wrapped_call_impl"
assert {_CALL, _CALLS_IT} <= vars(nn.Module).keys(), f"this torch has no nn.Module.{_CALL}: see [Note: calls that are over]"


class CallState(NamedTuple):
    """The part of `Calls` that belongs to one thread. Interleaved threads swap it."""

    frames: list[Frame]
    thread: int | None = None
    recording: bool = True
    touched: set[ParameterState] | None = None


class Calls:
    """The stack of running calls, and the spans that are held for them."""

    def __init__(self, follower: PlanFollower, device_budget: DeviceBudget, parts: Assembly):
        self.follower, self.device_budget, self._parts = follower, device_budget, parts
        self.registry, self.weights = follower.registry, follower.weights
        self.timeline = follower.weights.events.timeline  # None without tracing
        self.frames: list[Frame] = []
        self.thread: int | None = None  # the thread that called the model last
        self.recording = False  # the current or last outermost forward builds a graph
        self.touched: set[ParameterState] | None = None  # parameters that a micro-batch has used in the current segment; None in ordinary steps
        self.loss = LossFunction()
        self.reads = ParameterReads(self)
        self.backward = BackwardHolds(self)
        self.segment_spans: dict[int, SpanState] | None = None  # held until the segment ends or an op finds no room; None without segment
        self._num_interrupts = 0  # interrupts so far, at the last check of the running calls
        self._escaped: list[SpanState] = []  # spans of views that the outermost module returned, held until backward ends
        self._returned: set[ParameterState] = set()  # parameters that the outermost module returned: the program may read them
        self.weights.make_way = self._make_way

    @property
    def activations(self) -> Activations | None:
        return self._parts.activations

    def acquire(self, key: Hashable, spans: Sequence[SpanState]) -> None:
        """An op begins: hold its spans, issue the plan's actions before the next op, and bring the op's own spans to the device."""
        self.weights.drain_dropped()
        self.device_budget.meter.note_op(key)
        self.weights.hold_all(spans)
        if self.segment_spans is not None and all(span.index in self.segment_spans for span in spans):
            return  # the plan counts one use for all micro-batches
        try:
            if self.follower.advance(key, spans, record=self.recording):
                self.follower.issue()
            for span in spans:
                self.weights.bring(span)
            self.follower.catch_up()
        except BaseException:
            self.weights.release_all(spans)
            raise
        for span in spans if self.segment_spans is not None else ():
            if span.index not in self.segment_spans:
                self.segment_spans[span.index] = span
                self.weights.hold(span)

    # Called by hooks.

    def begin_outermost(self) -> None:
        """Begin a forward pass in this thread."""
        self.thread = threading.get_ident()
        self.recording = torch.is_grad_enabled()
        self.release_escaped()

    def begin(self, frame: Frame, phase: str) -> None:
        """Begin a call. The caller acquires the op's spans next, and then calls `begun`."""
        op = frame.op
        if phase == RECOMPUTE:
            self.refuse_updated(op.name, "called", op.spans)
        self.frames.append(frame)
        if self.timeline is not None:
            self.timeline.end()
        if op.spans and phase == FORWARD and self.recording:
            with DisableTorchFunctionSubclass():
                for state in op.params:
                    state.touched += state.param.requires_grad
            if self.touched is not None:
                self.touched.update(op.params)

    def begun(self, frame: Frame, phase: str) -> None:
        """The op's spans are on the device; the call holds them until it ends."""
        op = frame.op
        if op.spans:
            frame.spans.extend(op.spans)
            frame.hold(op.params)
        if self.timeline is not None:
            self.timeline.begin(phase, op.name)
        frame.pushed = torch.is_grad_enabled() and self._push_saved_tensors()

    @uninterrupted
    def end(self, module: nn.Module, output, *, of_any_thread: bool = False) -> Frame | None:
        """End the last call of the module, and the calls inside that call. Returns the frame.

        Returns None if the call has no frame, because it was refused while a call of another thread was running.
        """
        here = threading.get_ident()
        if not any(frame.module is module and (of_any_thread or frame.thread == here) for frame in reversed(self.frames)):
            return None
        while True:
            frame = self.frames.pop()
            frame.release()
            if frame.pushed and frame.task == _current_graph_task_id():
                _pop_saved_tensors_default_hooks()
            if frame.op.whole and frame.spans and autograd_runs():
                self.backward.keep_leaf(frame.op)  # backward of the leaf follows, and ranks may use different parts of the leaf
            self._release_frame(frame, self._escaping(output) if (frame.spans or frame.viewed) and frame.module is module else ())
            if frame.module is module:
                break
        if not self.frames:
            self._returned.update(filter(None, map(self.registry.find, tensors_in(output))))
            self.backward.hold_again()
        if self.timeline is not None:
            self._trace_end(frame.op)
        return frame

    def _release_frame(self, frame: Frame, escaping: set[SpanState]) -> None:
        for span in (*frame.spans, *frame.viewed):
            if span in escaping:
                (self.frames[-1].spans if self.frames else self._escaped).append(span)
            else:
                self.weights.release(span)

    def _escaping(self, output) -> set[SpanState]:
        """Spans of which the output contains a view. A view, unlike a parameter, cannot be fetched again by the next function that reads it."""
        views = [tensor for tensor in tensors_in(output) if not isinstance(tensor, nn.Parameter)]
        return {span for tensor in views if (span := self.registry.owner(tensor)) is not None}

    def _trace_end(self, op: Op) -> None:
        """The trace shows the work that follows a call of the op."""
        in_backward = autograd_runs()
        if self.frames:
            self.timeline.begin(RECOMPUTE if in_backward else FORWARD, self.frames[-1].op.name)
        elif in_backward:
            self.timeline.begin(BACKWARD, op.name)
        else:
            self.timeline.end()

    def end_interrupted_before(self, module: nn.Module) -> None:
        """A call of the module begins: end interrupted calls, if there was an interrupt, or the outermost module is called again."""
        if self.frames and (self._num_interrupts != interrupts.num_raised or self.frames[0].module is module):
            self.end_interrupted(begun=module)

    def end_interrupted(self, begun: nn.Module | None = None) -> None:
        """End this thread's calls that an interrupt has broken off. begun: a module with a running call that has no frame yet."""
        if not self.frames or self.thread != threading.get_ident():
            return
        self._num_interrupts = interrupts.num_raised
        live = live_calls()
        if live is None:
            return
        live[begun] -= 1
        while self.frames and live[module := self.frames[-1].module] < sum(frame.module is module for frame in self.frames):
            self.end(module, None, of_any_thread=True)

    # Saved tensors.

    def drain_dropped(self) -> None:
        """Release the spans and activations of saved tensors that autograd has dropped."""
        self.weights.drain_dropped()
        if self.activations is not None:
            self.activations.drain()

    def _push_saved_tensors(self) -> bool:
        """Push this engine's saved-tensor hooks, unless they are active. Hooks of another engine, whose model calls this one, stay below."""
        top = _top_saved_tensors_default_hooks(True)
        owner = getattr(top[0], "__self__", None) if top else None
        if isinstance(owner, SavedTensors) and owner.calls is self:
            return False
        saved = SavedTensors(self, top)
        _push_saved_tensors_default_hooks(saved.pack, saved.unpack)
        return True

    @contextlib.contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """Inside the context, autograd saves tensors as inside an op."""
        pushed = self._push_saved_tensors()
        try:
            yield
        finally:
            if pushed:
                _pop_saved_tensors_default_hooks()

    def was_returned(self, states: Iterable[ParameterState]) -> bool:
        """Whether the outermost module has returned all these parameters."""
        return self._returned.issuperset(states)

    def hold_escaped(self, spans: Iterable[SpanState]) -> None:
        """Keep the hold on these spans until backward ends: the program has views of them."""
        self._escaped.extend(spans)

    def refuse_updated(self, name: str, how: str, spans: Iterable[SpanState]) -> None:
        """Raise UsageError if a backward pass would read weights that it has updated already."""
        if any(chunk.update.is_early for span in spans for chunk in self.registry.chunks_in(span)):
            raise UsageError(
                f"{name} is {how} in a backward pass that has updated {name} already. Use update='deferred' if hooks or checkpoints "
                f"read weights in backward after their gradients are complete."
            )

    # Called by steps.

    @contextlib.contextmanager
    def segment(self) -> Iterator[None]:
        """Spans that ops fetch inside the context stay until it ends."""
        self.segment_spans = {}
        try:
            yield
        finally:
            self._release_segment()
            self.segment_spans = None

    @uninterrupted
    def _release_segment(self) -> None:
        while self.segment_spans:
            self.weights.release(self.segment_spans.popitem()[1])

    def swap(self, state: CallState) -> CallState:
        """Install another thread's state. Returns the state before."""
        before = CallState(self.frames, self.thread, self.recording, self.touched)
        self.frames, self.thread, self.recording, self.touched = state
        return before

    def end_all(self) -> None:
        """End all calls of the thread, with or without an error."""
        while self.frames:
            self.end(self.frames[-1].module, None, of_any_thread=True)

    def release_all(self) -> None:
        """A backward pass is over: release spans that a retained graph still refers to."""
        if self.timeline is not None:
            self.timeline.end()
        self.release_escaped()
        self.backward.release_all()

    def release_escaped(self) -> None:
        self._returned.clear()
        while self._escaped:
            self.weights.release(self._escaped.pop())

    def refuse_running(self, what: str) -> None:
        """Raise UsageError if an op or infinity.gathered needs weights that are about to change or be saved.

        Views that an evaluation has returned are the program's own, and are released.
        """
        runs = bool(self.frames) or autograd_runs()
        if not runs:
            self.release_escaped()
        self.weights.drain_dropped()
        if runs or any(span.holds for span in self.registry.spans):
            raise UsageError(f"{what} while the model runs or inside infinity.gathered: end that first")

    def _make_way(self) -> bool:
        """An op finds no room: release spans that are held for convenience. Returns whether there were any.

        These are spans kept for other micro-batches, and spans whose views are gone. During recomputation they are also the weights that
        autograd has unpacked for the node that waits for the recomputation.
        """
        had_segment = bool(self.segment_spans)
        self._release_segment()
        gone = [(frame, span) for frame in self.frames for span in frame.viewed if not span.has_escaped]
        for frame, span in gone:
            frame.viewed.remove(span)
            self.weights.release(span)
        recomputes = bool(self.frames) and autograd_runs()
        return had_segment or bool(gone) or (recomputes and self.backward.set_aside())


def live_calls() -> Counter[nn.Module] | None:
    """The number of running calls of each module in this thread. None if a compiled call does not show its module."""
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
