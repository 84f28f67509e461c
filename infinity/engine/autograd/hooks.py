"""Hooks of modules and parameters: before and after forward, before a gradient is accumulated, and after.

Knows modules, hooks, and inputs and outputs of the outermost module. Must not know tiers or plans: the hooks report calls and gradients to
the step cycle.
"""

from __future__ import annotations

import functools
import threading
import weakref

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass, _current_graph_task_id
from torch.autograd.function import BackwardCFunction

from infinity.engine.autograd.compiled_modules import OpHooks
from infinity.engine.autograd.ops import BACKWARD, FORWARD, RECOMPUTE, Frame, Op
from infinity.engine.autograd.trees import map_tensors, tensors_in
from infinity.engine.steps.refusals import beside, refuse_sparse
from infinity.engine.steps.step_cycle import StepCycle
from infinity.errors import UsageError
from infinity.model.autograd_state import autograd_runs
from infinity.model.compiled import module_of
from infinity.model.parameters import LastHook, NotCopied, get_grad, set_grad
from infinity.system.interrupts import uninterrupted
from infinity.tiers.parameter_state import ParameterState


class Hooks(NotCopied):
    """All hooks of one model. They hold no module: graphs hold the hooks, and a loss would keep the model alive."""

    def __init__(self, cycle: StepCycle, model: nn.Module):
        self.cycle = cycle
        self.calls = cycle.calls
        self.registry = cycle.registry
        self.weights = cycle.weights
        self.timeline = cycle.events.timeline  # None without tracing
        self._handles = []  # of hooks of parameters
        self._anchor = torch.zeros((), device=self.weights.device, requires_grad=True)
        self._model, self._name = weakref.ref(model), type(model).__name__
        self.op_hooks = OpHooks(self.registry, self.weights.tier, self._before, self._after)
        self.op_hooks.attach(model)
        for state in self.registry.params:
            if state.trainable:
                self._handles.append(state.param.register_hook(functools.partial(self._expect_gradient, state)))
                self._handles.append(state.param.register_post_accumulate_grad_hook(LastHook(self._gradient, state)))

    def remove(self) -> None:
        """Remove all hooks."""
        self.op_hooks.remove()
        for handle in self._handles:
            handle.remove()

    # Forward and recomputed forward.

    @torch._dynamo.disable
    @uninterrupted
    def _before(self, module, args, kwargs):
        phase, calls = self._next_phase(module), self.calls
        op = self.op_hooks.op_of(module)
        if op is None or (calls.frames and calls.frames[-1].op is op and calls.frames[-1].module is not module):
            return None  # the hook of the module's wrapper or CompiledCall has run
        outermost = not calls.frames and phase == FORWARD
        if outermost:
            self._begin_forward(args, kwargs)
        if phase == RECOMPUTE and calls.backward.leaf not in (None, op):
            calls.backward.release_until_next()  # a recomputed region has room for one leaf
        scales = self._scales(op, outermost)
        frame = Frame(module, op, outermost=outermost, scales=scales)
        calls.begin(frame, phase)
        if op.spans:
            calls.acquire((phase, op.index), op.spans)
        calls.begun(frame, phase)
        return map_tensors((args, kwargs), self._unscaled) if scales else None

    def _next_phase(self, module: nn.Module) -> str:
        """The phase of a call of the module that begins. Ends calls that were interrupted."""
        phase = RECOMPUTE if autograd_runs() else FORWARD
        if phase == RECOMPUTE:
            self.cycle.backward.await_end()  # before a reentrant checkpoint starts an inner backward pass
        elif self.calls.thread not in (None, threading.get_ident()):
            self._refuse_beside(module)
        self.calls.end_interrupted_before(module)
        return phase

    def _begin_forward(self, args, kwargs) -> None:
        """Begin the forward call of an outermost module."""
        self.calls.begin_outermost()
        self.cycle.begin_forward(self._model(), (args, kwargs))

    def _scales(self, op: Op, outermost: bool) -> bool:
        """Whether the outputs of the call are those of an fp16 model."""
        if self.cycle.scaler is None or self.calls.frames or not torch.is_grad_enabled():
            return False
        whole = op.index == 0
        if outermost and not whole:
            raise UsageError(
                f"{op.name} was called by itself, but dtype='fp16' scales the outputs of the whole model. Call the model, or use "
                f"dtype='bf16', which needs no loss scale."
            )
        return whole

    def _refuse_beside(self, module: nn.Module) -> None:
        """Raise UsageError if another thread is in a call of the model or in a backward pass."""
        in_forward = any(frame.module is module and frame.thread != threading.get_ident() for frame in self.calls.frames)
        if in_forward or (not self.calls.frames and self.cycle.state.in_backward):
            if any(thread.ident == self.calls.thread for thread in threading.enumerate()):
                raise UsageError(beside(type(module_of(module)).__name__))

    def _scaled(self, output):
        """Outputs of the whole model. For fp16: in fp32, with a loss scale on their gradients."""
        scaler = self.cycle.scaler
        if scaler is None:
            return output
        return map_tensors(output, lambda tensor: scaler.apply(tensor) if tensor.is_floating_point() else tensor)

    def _unscaled(self, value: torch.Tensor) -> torch.Tensor:
        """An input of an fp16 model. Tensors that it depends on get unscaled gradients."""
        return self.cycle.scaler.unapply(value) if value.is_floating_point() and value.requires_grad else value

    @torch._dynamo.disable
    @uninterrupted
    def _after(self, module, args, output):
        frame = self.calls.end(module, output)
        if frame is not None and frame.outermost:
            self.cycle.param_grads.show()
        if frame is None or output is None:
            return None
        whole = frame.op.index == 0 and not self.calls.frames
        if whole:
            output = self._scaled(output)
        anchored = output
        if torch.is_grad_enabled():
            if frame.op.whole:
                anchored = self._anchored(frame.op, args, output)
            self._watch(frame, anchored)
        return anchored if whole or anchored is not output else None

    def _anchored(self, op: Op, args, output):
        """A leaf's output in which every tensor has its own graph node, even if the leaf has computed nothing on this rank."""
        inputs = tensors_in(args)
        if not any(state.param.requires_grad for state in op.params) and not any(x.requires_grad for x in inputs):
            return output

        def loose(tensor):
            return tensor.is_floating_point() and (not tensor.requires_grad or any(tensor is x for x in inputs))

        if not any(map(loose, tensors_in(output))):
            return output
        return map_tensors(output, lambda tensor: Anchored.apply(self._anchor, tensor) if loose(tensor) else tensor)

    def _watch(self, frame: Frame, output) -> None:
        """Register hooks that run when gradients of an output are known."""
        op, scales = frame.op, frame.scales  # graphs must not hold the frame, which holds a module
        unseen = op.whole or any(span.index not in frame.packed for span in op.spans)
        begins, seen = frame.outermost or scales, set()
        if not begins and not unseen:
            return
        for tensor in tensors_in(output):
            if not tensor.requires_grad or tensor.grad_fn is None:
                continue
            if begins and (tensor.is_floating_point() or not scales):
                tensor.register_hook(self._backward_begins)
                self.cycle.forward.graph_built()
            if op.whole:
                tensor.register_hook(lambda grad: self._before_leaf_backward(op, seen))
            elif unseen and isinstance(tensor.grad_fn, BackwardCFunction):
                tensor.register_hook(lambda grad: self.calls.backward.fetch_op(op))

    @uninterrupted
    def _before_leaf_backward(self, op: Op, seen: set[int]) -> None:
        """The first gradient of the leaf's outputs in this pass is known. Which outputs have gradients depends on the data."""
        if (task := _current_graph_task_id()) not in seen:
            seen.add(task)
            self.calls.backward.fetch_op(op)

    # Backward.

    @uninterrupted
    def _backward_begins(self, grad) -> None:
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True: a graph of the backward pass would keep weights that leave the device. Gradients of gradients "
                "are not supported."
            )
        self.cycle.backward.begin()
        if self.timeline is not None:
            self.timeline.begin(BACKWARD, self._name)

    @torch._dynamo.disable
    @uninterrupted
    def _expect_gradient(self, state: ParameterState, grad: torch.Tensor) -> None:
        self.cycle.backward.expect_gradient(state)

    @torch._dynamo.disable
    @uninterrupted
    def _gradient(self, state: ParameterState, param: torch.Tensor) -> None:
        with DisableTorchFunctionSubclass():
            grad = get_grad(param)
            set_grad(param, None)
        if grad is None:  # an earlier hook of the program has dropped the gradient
            return
        if grad.dtype is not state.placeholder.dtype:
            raise UsageError(
                f"{state.name} has a gradient in {grad.dtype}, but the engine keeps this gradient in {state.placeholder.dtype}. Choose the "
                f"dtype in infinity.Config, not with model.to() or model.float()."
            )
        refuse_sparse(state, grad)
        self.cycle.backward.gradient(state, grad)


class Anchored(torch.autograd.Function):
    """The tensor, with a graph node that runs in every backward pass."""

    @staticmethod
    def forward(ctx, anchor, tensor):
        ctx.save_for_backward(anchor)
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # inside a checkpoint this runs the forward again, as on ranks whose leaf has computed something
        return None, grad
