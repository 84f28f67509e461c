"""One micro-batch of a layer-wise step: its forward pass in a thread, its cut graph, and gradients that wait for earlier segments.

Knows blocks, graphs and saved tensors. Must not know other micro-batches, groups of blocks, or how bytes move.
"""

# [Note: parts that are not cut]
# The cut does not see a tensor of an earlier segment that a custom function or a block's closure uses. The graph then reaches into the
# earlier segment, which goes backward later. `_examine_graph` looks for this after each forward pass. From then on, all segments
# from the tensor's maker to its user are joined.
# A tensor that is changed in place has another value when a block runs again in backward. A model that changes block inputs in place runs
# as in the ordinary loop. In both cases the values of the forward pass are right. So on several ranks the pass goes on to the end, where ranks
# exchange their findings.
# Other micro-batches see the attributes that a module sets during a forward pass. If an attribute differs for each micro-batch,
# micro-batches run as in the ordinary loop. The same holds for a buffer that several segments write. The first step looks for both. The
# search does not find a buffer that one segment writes and others read.
# A parameter that several segments use gets its gradient in parts, and hooks of the program must not see parts.
# A step that finds one of these cases restarts, with the same random numbers and the old buffers. Later steps know the limit (limits.py).

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import get_gradient_edge

from infinity.engine.autograd.module_calls import CallState
from infinity.engine.autograd.saved_tensors import SavedTensors
from infinity.engine.autograd.trees import containers_in, copy_of_cache, flatten, is_cache, write_back
from infinity.engine.layerwise.buffer_snapshots import RecomputeBuffers
from infinity.engine.layerwise.graph_cuts import CutMode, GraphCutter
from infinity.engine.layerwise.pausable_thread import PausableThread
from infinity.engine.layerwise.rng_streams import RngState
from infinity.errors import BudgetError
from infinity.model.recompute import checkpoint
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.saved_storage import SavedTensor


class MicroBatch:
    """step: the `LayerwiseStep` of the micro-batch. number: the place in the round."""

    def __init__(self, step, work: Callable[[], torch.Tensor], number: int, rng: RngState):
        self.step, self.number, self.rng = step, number, rng
        self.cutter = GraphCutter()
        self.cut_mode = CutMode(self.cutter, self._note_change)
        self.thread = PausableThread(work, self._thread_context, f"micro-batch-{number}")
        self.first_use: dict[ParameterState, int] = {}  # the position of the first segment that uses a parameter
        self._waiting: dict[ParameterState, torch.Tensor | SavedTensor] = {}  # gradients of parameters that earlier segments also use
        self._inputs: list[tuple[weakref.ref, int, str]] = []  # tensors that blocks were given, with version and the block's class
        self._call_state = CallState([], threading.get_ident(), touched=self.cutter.segments[0].touched)
        self._in_block = False
        self._backward_position = 0

    @property
    def position(self) -> int:
        """The current segment in forward, the last segment left in backward, -1 if none is left."""
        return self.cutter.segments[-1].position if self.cutter.segments else -1

    def run_segment(self) -> None:
        """Run the forward pass to the end of the current segment."""
        calls, device = self.step.engine.calls, self.step.engine.device
        before = calls.swap(self._call_state)
        self.rng.restore(device)
        try:
            with self.step.saving(self), calls.loss:
                self.thread.resume()
        finally:
            self.rng = RngState.current(device)
            self._call_state = calls.swap(before)._replace(touched=self.cutter.segments[-1].touched)
        if self.thread.is_over:
            self._examine_graph()

    def stop(self) -> None:
        """End the forward pass at any point, and drop graph and gradients."""
        before = self.step.engine.calls.swap(self._call_state)
        self.thread.stop()
        self.step.engine.calls.swap(before)
        self.thread.take_result()
        self.cutter.segments.clear()
        self._waiting.clear()

    @contextlib.contextmanager
    def _thread_context(self):
        self.step.engine.calls.thread = threading.get_ident()  # calls of any other thread are refused from here on
        try:
            with self.step.thread_state.applied(), self.cut_mode:
                yield
        finally:
            self.cutter.end()
            self.step.engine.calls.end_all()

    def call(self, block: nn.Module, inner: Callable, args: tuple, kwargs: dict):
        """The program calls a block, in the thread of this micro-batch. inner: runs the block without its hooks."""
        if self._in_block or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        self._in_block = True
        try:
            with self.cut_mode.paused():
                position = self.step.position(block, self.position)
                if position != self.position:
                    self.cutter.begin_segment(type(block).__name__, position)
                    self.thread.pause()
                return self._call(block, inner, args, kwargs)
        finally:
            self._in_block = False

    def _call(self, block, inner, args, kwargs):
        self._check_inputs()
        self.step.check_params(block)
        flat, build = flatten((args, kwargs))
        inputs = [(x, x._version) for x in flat if isinstance(x, torch.Tensor) and not x.is_inference()]
        flat = [self.cutter.as_input(x) if self.cutter.is_earlier(x) else x for x in flat]
        caches = {index: copy_of_cache(x) for index, x in enumerate(flat) if is_cache(x)}  # copies, because the first run fills the caches
        first = [(args, kwargs)]  # the program may look into these containers after the first run
        buffers, name = RecomputeBuffers(block), type(block).__name__

        def run(*flat):
            if not first:
                flat = [copy_of_cache(caches[index]) if index in caches else x for index, x in enumerate(flat)]
            own = args, kwargs = build(flat)
            containers, run_of = (containers_in(first.pop(), own), buffers.first_run) if first else ([], buffers.second_run)
            with run_of():
                output = inner(*args, **kwargs)
            write_back(containers)
            return output

        try:
            output = run(*flat) if _is_checkpointed(block) else checkpoint(run, *flat)
        finally:
            self.step.buffers.note(buffers)
        if any(x._version != version for x, version in inputs):
            self._note_change(name)
        self._inputs += [(weakref.ref(x), version, name) for x, version in inputs]
        return output

    def _note_change(self, name: str) -> None:
        self.step.limits.note(f"{name} changes its inputs in place, but blocks run again in backward and need the old values")

    def _examine_graph(self) -> None:
        """The forward pass is over: find the first segment that uses each parameter, and the places that cannot be cut."""
        registry, last = self.step.engine.registry, self.cutter.segments[-1]
        for segment in self.cutter.segments:
            leaves, reached = segment.leaves(self.thread.result if segment is last else None)
            if reached is not None:
                self.step.note_reach(segment, self.cutter.segment_of(reached), reached.name())
            segment.touched.update(state for leaf in leaves if (state := registry.find(leaf)) is not None)
            for state in segment.touched:
                if self.first_use.setdefault(state, segment.position) < segment.position and state.has_hooks:
                    self.step.limits.note(
                        f"{state.name} has a hook, which must see the whole gradient, but several parts of the model use the parameter"
                    )
        self._check_inputs()

    def _check_inputs(self) -> None:
        """Look for tensors that were changed in place after a block was called with them."""
        self._inputs = [each for each in self._inputs if each[0]() is not None]
        for tensor, version, name in self._inputs:
            if tensor()._version != version and not self.step.limits.found_whole:
                self.step.limits.note(f"an input of {name} is changed in place after the call, but {name} runs again in backward")

    def backward(self, position: int) -> None:
        """Run the backward pass of the segment at this position, if that segment is the last one left."""
        if position != self.position:
            return
        segments = self.cutter.segments
        segment, self._backward_position = segments[-1], position
        loss = self.thread.take_result()  # None after the first segment
        roots = ([(loss, None)] if loss is not None else []) + segment.roots()
        with DisableTorchFunctionSubclass():
            roots += [(get_gradient_edge(state.param), self._take_waiting(state)) for state in segment.touched & self._waiting.keys()]
        segments.pop()
        if roots:
            torch.autograd.backward(*zip(*roots))

    def params_of_last_segment(self) -> set[ParameterState]:
        """The parameters whose gradients are complete when the last segment left has gone backward. No earlier segment uses them."""
        last = self.cutter.segments[-1]
        return {state for state in last.touched if self._is_first_use(state, last.position)}

    def _is_first_use(self, state: ParameterState, position: int) -> bool:
        return self.first_use.get(state, position) >= position

    def withhold(self, state: ParameterState, gradient: torch.Tensor) -> bool:
        """Keep a parameter's gradient if an earlier segment will add to the gradient. Returns whether the gradient is kept."""
        if self._is_first_use(state, self._backward_position):
            return False
        saved = None
        if self.step.is_away:
            with contextlib.suppress(BudgetError):  # host memory may have room for block inputs only
                saved = self.step.engine.activations.save(gradient)
        self._waiting[state] = saved or gradient
        return True

    def _take_waiting(self, state: ParameterState) -> torch.Tensor:
        gradient = self._waiting.pop(state)
        return self.step.engine.activations.restore(gradient) if isinstance(gradient, SavedTensor) else gradient


def _is_checkpointed(block: nn.Module) -> bool:
    """Whether the program checkpoints the block: other hooks for saved tensors are active, or the block does so by itself."""
    hooks = _top_saved_tensors_default_hooks(True)
    by_caller = hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), SavedTensors)
    return by_caller or getattr(block, "gradient_checkpointing", False) is True
