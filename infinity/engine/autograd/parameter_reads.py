"""Reads of parameters that no running op holds, such as `other.weight` in a module's forward.

Knows the running calls, and whether a result is a view of a parameter. Must not know hooks, plans or steps.

A parameter is held for one function, or until the current op ends if the result is a view of the parameter's storage. The hold also ends
when an op needs room and the views are gone.
"""

from __future__ import annotations

import contextlib
import threading

import torch
from torch._C import DisableTorchFunctionSubclass

from infinity.engine.autograd.ops import ATTRIBUTE
from infinity.engine.autograd.saved_tensors import WeightHandle
from infinity.engine.autograd.trees import parts_of
from infinity.model.autograd_state import autograd_runs
from infinity.system.interrupts import uninterrupted
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.saved_storage import SavedTensor
from infinity.tiers.span_state import SpanState


class ParameterReads:
    """calls: the `Calls` of the engine."""

    def __init__(self, calls):
        self.calls = calls
        self.registry, self.weights = calls.registry, calls.weights

    def may_compute(self, states: list[ParameterState]) -> bool:
        """Whether the program may read these parameters: in an op of this thread, in a backward pass, or if the model has returned them."""
        if autograd_runs():
            return True
        return self.calls.thread == threading.get_ident() and (bool(self.calls.frames) or self.calls.was_returned(states))

    @torch._dynamo.disable
    def compute(self, states: list[ParameterState], func, args, kwargs):
        """Call func(*args, **kwargs), which reads these parameters."""
        held, keep = self._hold(states), True
        by_address = func is torch.Tensor.data_ptr
        try:
            outside = not self.calls.frames and not autograd_runs()
            with self.calls.saved_tensors() if outside else contextlib.nullcontext():
                result = func(*args, **kwargs)
            keep = any(map(self._may_be_view, parts_of(result)))
        finally:
            self._release(states, held, keep=keep or by_address, viewed=not by_address)
        return result

    @uninterrupted
    def _hold(self, states: list[ParameterState]) -> list[SpanState]:
        in_backward = autograd_runs()
        if self.calls.recording and not in_backward:
            for state in states:
                self._count(state)
        held = list(dict.fromkeys(map(self.registry.span_of, states)))
        lacking = [span for span in held if not (span.attached and span.holds)]
        for state in states if in_backward else ():
            if (span := self.registry.span_of(state)) in lacking:
                self.calls.refuse_updated(state.name, "read", [span])
        there = [span for span in held if span not in lacking]
        for span in there:
            self.weights.hold(span)
        try:
            if lacking:
                self.calls.acquire((ATTRIBUTE, *(span.index for span in lacking)), lacking)
        except BaseException:
            for span in there:
                self.weights.release(span)
            raise
        for state in states:
            state.hold()
        return held

    @uninterrupted
    def _release(self, states: list[ParameterState], held: list[SpanState], *, keep: bool, viewed: bool) -> None:
        for state in states:
            state.release()
        frames = self.calls.frames
        if keep and frames:
            (frames[-1].viewed if viewed else frames[-1].spans).extend(held)
        elif keep and autograd_runs():
            self.calls.backward.hold_until_next(held)
        elif keep:
            self.calls.hold_escaped(held)
        else:
            for span in held:
                self.weights.release(span)

    def _may_be_view(self, value) -> bool:
        """Whether a value may be a view of a parameter's storage. The parameter itself is no view."""
        if isinstance(value, torch.Tensor):
            return self.registry.find(value) is None and self.registry.owner(value) is not None
        return not isinstance(value, _PLAIN)

    def _count(self, state: ParameterState) -> None:
        """Expect one gradient more of a parameter, unless the current op or an outer op has counted this use."""
        frames, touched = self.calls.frames, self.calls.touched
        if not any(state in frame.op.params or state.index in frame.read for frame in reversed(frames)):
            if frames:
                frames[-1].read.add(state.index)
            with DisableTorchFunctionSubclass():
                state.touched += state.param.requires_grad
            if touched is not None:
                touched.add(state)


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None), WeightHandle, SavedTensor)
