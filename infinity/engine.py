"""The engine of one model: builds the rest, and decides when gradients, updates and plans are due.

Knows every other part by its face. Must not know how bytes move, what a kernel computes, or what hooks a module has. The
user meets it through `infinity.init`, `infinity.offload` and the optimizers. Far longer than others because the rules for what may
happen between forward, backward and step() hang together: each guards the state that another one changes.
"""

# [Note: when a chunk is updated]
# Deferred: step() announces the update of each chunk that has a gradient (`pending`) and remembers the hyper-parameters;
# the update begins when the next forward fetches the chunk, or when something else needs it: its next gradient, a read.
# Backward: in the last backward pass before step(), a chunk is updated as soon as all its gradients are there and no op
# and no saved view needs its weights any more; step() updates the rest. Both compute the same, see updater.py.
#
# [Note: expected gradients]
# How many gradients a parameter receives in one backward pass is known from the last step in which as many ops used it:
# several if reentrant checkpoints share it, none if it is unused. In the first step, or if other ops run than in the last one, a
# parameter of an op that ran once is expected to receive one, of an op that did not run none; with anything else the chunk waits
# for the end of the pass.

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from infinity import planner
from infinity.adam import NormAccumulator
from infinity.assembly import assemble, budgets
from infinity.chunks import ADAM_MOMENTS, STATES, WEIGHT_NBYTES, WEIGHTS
from infinity.config import Config
from infinity.errors import ConfigError, NonFiniteError, UsageError
from infinity.events import Events
from infinity.facade import NO_COPY, Facade
from infinity.gauge import device_of, gauge_of
from infinity.hooks import Hooks, map_tensors, tensors_in
from infinity.lanes import Lane
from infinity.margin import Margin
from infinity.partition import Ranks
from infinity.residency import (
    TORCH_DTYPES,
    ChunkState,
    ParameterState,
    Presence,
    owner_of,
    set_owner,
)
from infinity.scaling import LossScale, Scaler
from infinity.schedule import NEVER
from infinity.tiling import tile_to_fit
from infinity.timeline import timeline_of
from infinity.updater import Hyper, add_norm
from infinity.values import Values

_MANY_GRAPHS = -2  # instead of one graph's number: a backward pass of `one_backward`
_EPS_OF_CLIPPING = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Engine:
    """Trains one model from device, host and NVMe memory. A context manager: leaving it closes it.

    initial: gives a parameter's initial value, `initial(index, param) -> 1-D tensor on any device`. Nothing is built or
    written until an optimizer is attached or the model runs for the first time.
    """

    def __init__(self, model: nn.Module, config: Config, initial=None, ranks: Ranks | None = None):
        self.config = config
        self.device = device_of(config.device)
        self.ranks = ranks or Ranks(self.device)
        self.events = Events(tracing=config.trace)
        if config.trace:
            self.events.timeline = timeline_of(self.device, self.events)
        self.optimizer = None
        self.scaler: Scaler | None = None  # of fp16 training
        self._model = weakref.ref(model)
        self._initial = initial or (lambda index, param: param.detach().reshape(-1))
        self._named = _parameters(model)
        if not self._named:
            raise ConfigError(f"{type(model).__name__} has no floating-point parameters; there is nothing to offload")
        if meta := [name for name, param in self._named if param.is_meta]:
            raise ConfigError(f"parameters on the meta device have no values: {', '.join(meta[:3])}; build them on the CPU")
        self._started = self._closed = False
        self.num_skipped = 0  # steps whose gradients were not finite
        self.by_layer: bool | None = None  # whether the step under way, or the last one, is one of infinity.vertical
        self.ranks.join()
        self._departed: list[ParameterState] = []  # whose gradients have left, and param.grad says so
        self._gradients_wait = False  # for a step() or zero_grad()
        self.saving = None  # the checkpoint under way, or the last one
        self.last_save = None  # of what a checkpoint that is whole holds
        self._half_loaded = False
        self._reset_step()
        self._indices = {id(param): index for index, (_, param) in enumerate(self._named)}
        self._loaded: dict[int, torch.Tensor] = {}  # values that were asked for or given before the start, by index
        for _, param in self._named:
            set_owner(param, self)
        _engines[model] = weakref.ref(self)
        _guard_before_start(self, model)
        self._facade = Facade(self, model)

    # The user's face.

    def stats(self) -> dict:
        """Sizes in bytes, and what has happened so far on this rank, by link."""
        self._start()
        links = {
            link: {"nbytes": m.nbytes, "busy_seconds": m.busy_seconds, "stall_seconds": m.stall_seconds}
            for link, m in self.events.meters.items()
        }
        return {
            "num_parameters": self.layout.num_parameters,
            "state_nbytes": sum(chunk.record.nbytes for chunk in self.registry.chunks),
            "device_budget_nbytes": self.margin.budget_nbytes,
            "device_nbytes": self.tier.held_nbytes,
            "peak_device_nbytes": self.tier.peak_nbytes,
            "peak_activation_nbytes": self.margin.activation_nbytes,  # all that is not the engine's; 0 on the CPU
            "num_chunks_on_device": sum(chunk.on_device for chunk in self.registry.chunks),
            "host_arena_nbytes": self.arena.nbytes,
            "nvme_read_nbytes": self.swap.read_nbytes if self.swap else 0,
            "nvme_write_nbytes": self.swap.write_nbytes if self.swap else 0,
            "num_plans": self.pipeline.num_plans,
            "num_fetches_ahead": self.pipeline.num_ahead,  # to the device, before an op needed them
            "num_fetches_late": self.pipeline.num_late,
            "loss_scale": self.scaler.scale if self.scaler is not None else None,
            "num_skipped_steps": self.num_skipped,
            "activations": self.activations.stats() if self.activations is not None else None,
            "links": links,
        }

    def flush(self) -> None:
        """Begin and finish every update that step() has announced, and its writes."""
        self._check_open()
        self._start()
        for chunk in self.registry.chunks:
            if chunk.pending is not None:
                self._begin_update(chunk, chunk.pending)
        for chunk in self.registry.chunks:
            self._finish_announced(chunk)
        self.records.flush()

    def read_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's segments by name (weight, residual, momentum, variance), whole, on the CPU, as they are stored.

        Every rank must call it. Raises ConfigError for a parameter that is not the engine's.
        """
        self._check_open()
        self._start()
        self._refuse_half_updated("read_state()")
        state = self.registry.find(param)
        if state is None:
            raise ConfigError("the parameter is not one of this engine's")
        return self.values.read(state)

    def manages(self, param: torch.Tensor) -> bool:
        """Whether the parameter is one of this engine's."""
        return id(param) in self._indices

    def is_held(self, param: torch.Tensor) -> bool:
        """Whether the parameter is whole on the device now, as inside `gathered` or its module's forward."""
        if not self._started:
            return False
        span = self.registry.span_of(self.registry.params[self._indices[id(param)]])
        return span.attached and span.holds > 0

    def read_weight(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter's value, whole, on the CPU, in the dtype that the model computes in. Every rank must call it."""
        self._check_open()
        index = self._indices[id(param)]
        if not self._started:
            if index not in self._loaded:
                if _is_here(param):
                    return param.detach().to("cpu", TORCH_DTYPES[self.config.dtype], copy=True)
                self._loaded[index] = self._initial(index, param).cpu()
            return self._loaded[index].to(TORCH_DTYPES[self.config.dtype], copy=True).reshape(param.shape)
        if self.is_held(param):
            return param.detach().to("cpu", copy=True)
        self._refuse_half_updated("state_dict()")
        return self.values.read(self.registry.params[index], weight_only=True)["weight"]

    def write_weight(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Give a parameter a value, of its shape; moments stay. Every rank must call it; rank 0's value counts."""
        value = value.detach().reshape(-1).to("cpu", copy=True)
        self.ranks.broadcast_(value.view(torch.uint8))
        self.give(param, value)

    def give(self, param: torch.Tensor, value) -> None:
        """As `write_weight`, of what is the same on every rank: anything whose slices are 1-D tensors on the CPU."""
        self._check_open()
        index = self._indices[id(param)]
        if not self._started:
            if _is_here(param):  # what the program changes afterwards counts
                with torch.no_grad():
                    param.copy_(value[: param.numel()].view(param.shape))
            else:
                self._loaded[index] = value
            return
        self._refuse_half_updated("new weights")
        state = self.registry.params[index]
        if self.registry.span_of(state).holds:
            raise UsageError(f"{state.name} is given a value while the model runs or inside infinity.gathered")
        self.values.write_weight(state, value)
        for chunk in self.registry.chunks_of(state):
            if chunk.weights_home != "device" and not chunk.on_device:
                self._make_stale(chunk)
        self._note_change(state)

    @contextlib.contextmanager
    def gathered(self, params: Iterable[torch.Tensor]):
        """The parameters are whole on the device inside the block; what it changes is kept, on every rank as on rank 0."""
        self._check_open()
        self._start()
        self._refuse_half_updated("infinity.gathered")
        states = [self.registry.find(param) for param in params if param.numel() and param.is_floating_point()]
        if None in states:
            raise ConfigError("infinity.gathered: a parameter is not one of this engine's")
        spans = list(dict.fromkeys(self.registry.span_of(state) for state in states))
        self.pipeline.acquire_aside(spans)
        for span in spans:
            self.values.keep_written(span)
        before = {span: span.flat.clone() for span in spans}
        try:
            with self.hooks.saved_tensors():
                yield
        finally:
            for span in spans:
                span.take_replaced()
                for state in span.params:
                    state.version = state.param._version
                self.values.adopt(span, before[span])
                self.pipeline.release(span)

    def close(self) -> None:
        """Finish what is under way, end the threads and give back memory and swap files. Idempotent.

        The parameters are placeholders afterwards: read what is to be kept before.
        """
        if self._closed:
            return
        failure = self._finish_saving()
        self._closed = True
        if not self._started:
            self.ranks.leave()
            return
        for state in self._departed:
            state.param.grad = None
        self._departed.clear()
        with contextlib.ExitStack() as parts:  # from the last to the first, also where one of them raises
            parts.callback(_guard_after_close, self._model(), self.registry.params)
            parts.callback(self._facade.close, {state.placeholder.data_ptr(): state.name for state in self.registry.params})
            parts.callback(self.ranks.leave)
            parts.callback(self.hooks.remove)
            parts.callback(self._close_parts)
        if failure is not None:
            raise failure

    def _finish_saving(self) -> BaseException | None:
        """Wait for a checkpoint under way; what went wrong with it, if nobody was told."""
        if self.saving is None or self.saving.was_told:
            return None
        try:
            self.saving.wait()
        except Exception as error:
            return error
        return None

    def _close_parts(self) -> None:
        with contextlib.ExitStack() as parts:  # from the last to the first
            parts.callback(self._free_memory)
            if self.swap is not None:
                parts.callback(self.swap.close)
            for part in (self.records, self.updater, self.gradients, self.pipeline, self.activations):
                if part is not None:
                    parts.callback(part.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.ranks.report(error)
            if self.saving is not None:
                self.saving.abandon(error)
                self.saving.was_told = True
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._started else "not started"
        return f"Engine({len(self._named)} parameters, {self.device}, {self.ranks.name}, {state})"

    # What the optimizer calls.

    def attach(self, optimizer) -> None:
        """Learn who updates which parameter. One optimizer an engine."""
        if self.optimizer is not None:
            raise UsageError("the model has an optimizer already; use its parameter groups for several settings")
        self.optimizer = optimizer
        try:
            planned = (self._deferred(), optimizer.accumulation_steps > 1, optimizer.rule.moments)
            if self._started and planned != (self.deferred, self.accumulating, self.moments):
                raise UsageError(
                    "the model ran before its optimizer was made, and now needs other memory than was planned; make the "
                    "optimizer before the first forward pass"
                )
            if optimizer.loss_scale is not None and self.config.dtype != "fp16":
                raise ConfigError(f"loss_scale with dtype={self.config.dtype!r}: only fp16 gradients need one; leave it out")
            if self.config.dtype == "fp16":
                self.scaler = Scaler(optimizer.loss_scale or LossScale(), self.ranks.world)
            self._start()
        except BaseException:
            self.optimizer = self.scaler = None
            raise
        config = self.config
        if planner.records_may_visit(weights=config.weights, states=config.states, keep=config.residency == "auto"):
            self.margin.hold_records()
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if (state := self.registry.find(param)) is not None:
                    state.group = index

    @torch.no_grad()
    def step(self) -> None:
        self._check_open()
        self._check_gradients()
        if self.saving is not None:
            self.saving.pass_step()
        if self.backward_task is not None:
            self._abandon_backward()
        if self.torn:
            raise UsageError(
                "the last backward pass failed after some chunks had been updated: weights are of two steps. Start again from "
                "a checkpoint; with update='deferred' a failed backward pass can be repeated."
            )
        if self.failed:
            raise UsageError("step() after a backward pass that raised; call zero_grad() and run it again")
        if not self.num_backwards:
            raise UsageError("step() without a finished backward pass since the last step")
        self.raise_failure()
        hyper = self._hyper()
        if self.early_hyper is not None and self.early_hyper.groups != hyper.groups:
            raise UsageError(
                "hyper-parameters changed between the backward pass, which has begun to update, and step(). Change them after "
                "step(), or use update='deferred'."
            )
        ready = [chunk for chunk in self.registry.chunks if chunk.gradient_job is not None and not chunk.updated]
        ready = [chunk for chunk in ready if chunk.pending is None]
        if not self.deferred:
            ready.sort(key=lambda chunk: chunk.gradient_number)  # in the order in which their gradients came
        if self._sums_squares():
            norm = self._norm(ready) * hyper.grad_scale
            overflow = self.config.watches_nonfinite and not math.isfinite(norm)
            if self.scaler is not None:
                self.scaler.update(overflow)
            if self.optimizer.max_grad_norm is not None:
                self.optimizer.grad_norm = norm
            if overflow:
                self._skip(ready)
                return
            if self.optimizer.max_grad_norm is not None:
                clip = self.optimizer.max_grad_norm / (norm + _EPS_OF_CLIPPING)
                hyper.grad_scale *= 1.0 if clip >= 1 else clip  # a norm that is no number makes every gradient none, as in PyTorch
        for chunk in ready:
            if self.deferred and not chunk.on_device:
                self._announce(chunk, hyper)
            else:
                self.gradients.wait_for(chunk)
                self._begin_update(chunk, hyper)
        self._end_step()

    def _end_step(self) -> None:
        for state in self.registry.params:
            state.expected = state.arrived_last
        completions = self._completions()
        self.pipeline.adopt(*completions, anew=self.margin.settle())
        self._reset_step()
        self._gradients_wait = False
        self.events.step_done()
        self.pipeline.begin_cycle()

    def _skip(self, ready: list[ChunkState]) -> None:
        """Forget the step's gradients, which are not finite on some rank: no state changes, on any rank."""
        self.num_skipped += 1
        raises = self.config.nonfinite == "raise"
        found = self._first_nonfinite(ready) if raises else None
        for chunk in ready:
            self.gradients.wait_for(chunk)
            self.gradients.drop(chunk)
        self._end_step()
        if raises:
            raise NonFiniteError(
                f"{self.ranks.name}: gradients of this step are not finite; {found}. No state was "
                f"changed; a lower learning rate or max_grad_norm may help, nonfinite='skip' goes on without the step."
            )

    def _first_nonfinite(self, ready: list[ChunkState]) -> str:
        for chunk in ready:
            with self.gradients.shard(chunk) as gradient:
                for piece in chunk.pieces:
                    part = gradient[piece.start : piece.start + piece.numel]
                    if piece.param in chunk.received and not part.isfinite().all():
                        return f"the first is of {self.registry.params[piece.param].name}"
        return "they lie in the shards of other ranks"

    def zero_grad(self) -> None:
        if not self._started or self._closed:
            return
        self._gradients_wait = False
        self._clear_gradients()
        if self.backward_task is not None:
            self._abandon_backward()
        if any(chunk.updated for chunk in self.registry.chunks) and not self.torn:
            raise UsageError(
                "zero_grad() between a backward pass that has begun to update and its step(). Call it after step(), or use "
                "update='deferred'."
            )
        dropped = [
            chunk
            for chunk in self.registry.chunks
            if chunk.pending is None and not chunk.updated
            if chunk.gradient_job or chunk.flat_gradient is not None or chunk.received  # the last alone after an interrupt on the way
            if chunk.updating is None or chunk.updating.done
        ]
        if dropped:
            self.gradients.drain()
        for chunk in dropped:
            self.gradients.drop(chunk)
        self.pipeline.trace.clear()
        self._reset_step(torn=self.torn)

    # What the hooks call.

    def begin_forward(self, inputs: object) -> None:
        """An outermost module is called; inputs: whatever it is called with."""
        self._check_open()
        if torch._C._are_functorch_transforms_active():
            raise UsageError(
                "torch.func transforms (grad, vjp, vmap, ...) do not see when weights come and go. Use loss.backward() or "
                "torch.autograd.grad."
            )
        if torch.is_autocast_enabled(self.device.type) and self.config.dtype == "fp32":
            raise UsageError(
                "torch.autocast over an fp32 engine casts weights that come and go, and caches the casts. Use "
                'infinity.Config(dtype="bf16") instead, which keeps fp32 masters.'
            )
        self.raise_failure()
        if self.backward_task not in (None, _MANY_GRAPHS) and not self._in_backward():
            self._abandon_backward()
        self._refuse_half_updated("a forward pass")
        if not self._in_backward():
            self._clear_gradients()
            self._check_frozen()
        if self.backward_task is None and self.optimizer is not None and torch.is_grad_enabled():
            self._begin_step_of(by_layer=False)
        if self.optimizer is None and not torch.is_grad_enabled():
            self.hooks.recording = True  # without an optimizer a forward pass is the whole cycle
            self.pipeline.adopt((), (), anew=bool(self.pipeline.trace) and self.margin.settle())
            self.pipeline.begin_cycle()
        if self.activations is not None:
            self.activations.begin_forward(self._model().buffers())
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(inputs))
        self.margin.begin_forward(shapes, self.hooks.recording)

    def _begin_step_of(self, *, by_layer: bool) -> None:
        """An ordinary step and one of `infinity.vertical` have nothing to learn from each other: trace, gradients, plan."""
        if self.by_layer is not None and self.by_layer != by_layer:
            self.first_step = True
            self.pipeline.forget()
        self.by_layer = by_layer
        if not self.num_backwards and not self.pipeline.trace and self.pipeline.has_begun:
            self.pipeline.begin_cycle()  # evaluations have run since the last step

    def scaled(self, output):
        """The whole model's outputs: of an fp16 model in fp32, and their gradients loss-scaled."""
        scaler = self.scaler
        if scaler is None:
            return output
        return map_tensors(output, lambda tensor: scaler.apply(tensor) if tensor.is_floating_point() else tensor)

    def begin_backward(self) -> None:
        """The gradient of an outermost output is known; once a backward pass."""
        if self.backward_task is not None:
            return
        self._clear_gradients()
        self._check_open()
        if self.optimizer is None:
            raise UsageError("a backward pass needs an optimizer: make infinity.AdamW(model.parameters()) before it")
        self._refuse_torn()
        if self.num_backwards >= self.optimizer.accumulation_steps:
            raise UsageError(
                f"backward pass {self.num_backwards + 1} since the last step, but accumulation_steps="
                f"{self.optimizer.accumulation_steps}. Declare it: infinity.AdamW(..., accumulation_steps=...)."
            )
        self.backward_task = torch._C._current_graph_task_id()
        self.hooks.recording = True  # an evaluation may have run since the forward pass
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self._expect_gradients()

    def _refuse_half_updated(self, what: str) -> None:
        """Between a backward pass that updates and step(), weights are of two steps, which would go unnoticed."""
        self._refuse_half_loaded()
        if self.backward_task is None and not self.torn and any(chunk.updated for chunk in self.registry.chunks):
            raise UsageError(
                f"{what} between a backward pass that has begun to update and its step(): some weights are new already. Call "
                f"step() first, or use update='deferred'. Where several backward passes make a step, declare it: "
                f"infinity.AdamW(..., accumulation_steps=...)."
            )

    def _refuse_half_loaded(self) -> None:
        if self._half_loaded:
            raise UsageError("the last infinity.load failed half-way: weights are of two states. Load one that is whole.")

    def _refuse_torn(self) -> None:
        if self.torn:
            raise UsageError("a backward pass after one that failed half-way and had begun to update; see step()")

    def _expect_gradients(self) -> None:
        last = self.num_backwards + 1 == self.optimizer.accumulation_steps
        self.early_hyper = self._hyper() if last and not self.deferred else None
        for state in self.registry.params:
            state.arrivals = 0
            if self.first_step or state.touched != state.touched_last.get(self.num_backwards):
                known = self.backward_task != _MANY_GRAPHS and state.touched <= 1  # there, forward is still to come
                state.expected = state.touched if known else math.inf
            state.touched_last[self.num_backwards] = state.touched
        for chunk in self.registry.chunks:
            chunk.missing = sum(self.registry.params[param].expected > 0 for param in chunk.whole_pieces)
            chunk.update_expected = self.early_hyper is not None and chunk.trainable and chunk.missing > 0

    def expect_gradient(self, state: ParameterState) -> None:
        """Autograd is about to add to `param.grad`."""
        if self.backward_task is None:
            if self.scaler is not None:
                raise UsageError(
                    f"{state.name} has a gradient that comes from no output of the model, so it is not loss-scaled, as dtype='fp16' "
                    f"needs it. Return what the loss is made of as tensors, in tuples, lists, dicts or dataclasses; or use bf16."
                )
            self.begin_backward()

    def gradient(self, state: ParameterState, grad: torch.Tensor) -> None:
        """A parameter's gradient of this backward pass, or of one region of it."""
        self.expect_gradient(state)
        if state.group is None:
            return
        chunks = self.registry.chunks_of(state)
        for chunk in chunks:
            if chunk.updated:
                raise UsageError(
                    f"{state.name} received a gradient after it was updated in this backward pass, which the last step did "
                    f"not show. Use update='deferred' for a model whose gradients come in changing numbers."
                )
            self._finish_announced(chunk)
        self.gradients.arrive(state, grad)
        del grad
        state.arrivals += 1
        if state.arrivals == state.expected:
            for chunk in chunks:
                chunk.missing -= 1
                if not chunk.missing:
                    self._complete(chunk)
        self._update_waiting()
        self.gradients.wait_for_room()

    def end_backward(self) -> None:
        """The backward pass has succeeded."""
        if self.backward_task is None:
            return
        self.backward_task = None
        self.gradients.hurry()
        self.hooks.release_all()
        self.pipeline.drain_dropped()
        if self.activations is not None:
            self.activations.drain()
        for chunk in self.reduce_all():
            self._sum_squares(chunk)
        self.num_backwards += 1
        for state in self.registry.params:
            state.arrived_last = state.arrivals
            state.touched = 0
            if state.arrivals:
                state.param.grad = state.departed
                self._departed.append(state)
        self._gradients_wait = True
        self._update_waiting()

    def _check_gradients(self) -> None:
        """Drop what model.zero_grad() did; raises UsageError where it dropped some only, or too late."""
        given = [s.name for s in self._departed if s.param.grad is not None and s.param.grad is not s.departed]
        if given:
            raise UsageError(
                f"{given[0]}.grad was given a value, which the engine would not use: gradients have left for its tiers. Change them as "
                f"they arrive, with param.register_hook(...)."
            )
        dropped = [state.name for state in self._departed if state.param.grad is None] if self._gradients_wait else []
        if dropped and len(dropped) == len(self._departed):
            self.zero_grad()
        elif dropped:
            raise UsageError(
                f"the gradient of {dropped[0]} was dropped and others were not; the engine can only drop all: call "
                f"optimizer.zero_grad(). To train a part of the model, freeze the others with requires_grad_(False)."
            )

    def _clear_gradients(self) -> None:
        """Autograd is to find no gradient to add to."""
        self._check_gradients()
        for state in self._departed:
            state.param.grad = None
        self._departed.clear()

    def _check_frozen(self) -> None:
        for state in self._frozen:
            if state.param.requires_grad:
                raise UsageError(
                    f"{state.name} was frozen when the engine started and has no optimizer states. Call requires_grad_() before the "
                    f"optimizer is made; parameters that train may be frozen, and thawed again, at any time."
                )

    def reduce_all(self) -> list[ChunkState]:
        """Reduce whatever gradients any rank has gathered since the last reduction; every rank must call it."""
        if self.ranks.world == 1:
            return []
        waiting = torch.tensor([chunk.flat_gradient is not None for chunk in self.registry.chunks], dtype=torch.int32)
        found = [chunk for chunk, waits in zip(self.registry.chunks, self.ranks.max_(waiting).tolist()) if waits]
        for chunk in found:
            self.gradients.reduce(chunk)
        return found

    # What saving and loading call.

    @property
    def model(self) -> nn.Module:
        return self._model()

    def ready_to_save(self, optimizer) -> None:
        """The state is that between two steps from here on until the next one; a checkpoint under way is finished first."""
        self._check_optimizer(optimizer, "infinity.save")
        self.raise_failure()
        if self.torn:
            raise UsageError("infinity.save after a backward pass that failed half-way: weights are of two steps; see step()")
        self._refuse_half_updated("infinity.save")
        if self.num_backwards or self.backward_task is not None:
            raise UsageError("infinity.save between backward() and step(): gradients are not saved. Save after step().")
        if (failure := self._finish_saving()) is not None:
            raise failure
        for chunk in self.registry.chunks:
            if chunk.pending is None:
                self._finish_announced(chunk)  # the last ones of a backward pass that updates
        for span in self.registry.spans:
            span.take_replaced()
            self.values.keep_written(span)

    def ready_to_load(self, optimizer) -> None:
        self._check_optimizer(optimizer, "infinity.load")
        if self.backward_task is not None:
            self._abandon_backward()
        if (failure := self._finish_saving()) is not None:
            raise failure

    @contextlib.contextmanager
    def loading(self):
        """All records are replaced inside the block; gradients and updates of before are forgotten."""
        self.flush()
        for chunk in self.registry.chunks:
            chunk.updated = False
        self.torn = False
        self.zero_grad()
        for chunk in self.registry.chunks:
            self._make_stale(chunk)
        self._half_loaded, self.last_save = True, None
        yield
        self._half_loaded = False

    def begin_announced(self, chunk: ChunkState) -> None:
        """Begin the update that the last step() announced."""
        self._begin_update(chunk, chunk.pending)

    def num_records_in_memory(self, most: int) -> int:
        """How many chunks' records may be asked for before one is given back, up to `most`."""
        kinds = [kind for kind in (WEIGHTS, STATES) if "nvme" in self.placement.homes[kind]]
        return max(1, min([most, *(self.placement.slots[kind] for kind in kinds)]))

    def _check_optimizer(self, optimizer, what: str) -> None:
        self._check_open()
        if optimizer is not None and optimizer is not self.optimizer:
            raise UsageError(f"{what}: the optimizer is not that of this model")
        self._start()
        if self.hooks.frames or self._in_backward() or any(span.holds for span in self.registry.spans):
            raise UsageError(f"{what} while the model runs or inside infinity.gathered")

    # What vertical accumulation calls.

    @contextlib.contextmanager
    def one_backward(self, num_micro_batches: int):
        """All backward passes of a step are one inside the block, however many graphs it runs."""
        self._check_open()
        if self.backward_task is not None:
            raise UsageError("infinity.vertical inside a backward pass or another infinity.vertical")
        if self.failed:
            raise UsageError("infinity.vertical after a backward pass that raised; call zero_grad() first")
        if self.optimizer is None or num_micro_batches != self.optimizer.accumulation_steps or self.num_backwards:
            declared = "no optimizer" if self.optimizer is None else f"accumulation_steps={self.optimizer.accumulation_steps}"
            raise UsageError(
                f"infinity.vertical takes all {num_micro_batches} micro-batches of a step at once, but there is {declared} and "
                f"{self.num_backwards} backward passes were made since the last step. Give them to the optimizer's constructor."
            )
        self._refuse_torn()
        self._begin_step_of(by_layer=True)
        self.backward_task, self.num_backwards = _MANY_GRAPHS, num_micro_batches - 1
        self._expect_gradients()
        try:
            yield
        except BaseException:
            self._abandon_backward()
            raise
        self.end_backward()

    @contextlib.contextmanager
    def one_segment(self):
        """What the block's ops fetch stays until it ends."""
        self.hooks.begin_segment()
        try:
            yield
        finally:
            self.hooks.end_segment()

    def raise_failure(self) -> None:
        """Raise what went wrong in a lane, if anything did."""
        self._refuse_half_loaded()
        failure = self.records.failure or self.updater.failure or self.gradients.failure
        if self.activations is not None:
            failure = failure or self.activations.failure
        if failure is not None:
            raise failure

    def _free_memory(self) -> None:
        if not any(lane.is_stuck for lane in self._lanes()):  # what a collective or a copy may still write to stays
            self.registry.free_device()
            self.arena.close()

    def _lanes(self) -> list[Lane]:
        lanes = [self.pipeline.cg, self.pipeline.gg, self.gradients.gc, self.updater.lane]
        return lanes + ([self.activations.copies, self.activations.writer] if self.activations is not None else [])

    def _give_up(self, error: BaseException) -> None:
        """A rank has failed: nobody here waits any longer for what needs all of them."""
        for lane in self._lanes():
            lane.abandon(error)
        self.records.fail(error)

    # Gradients and updates.

    def _complete(self, chunk: ChunkState) -> None:
        """All gradients that are expected of a chunk have arrived: no op of this pass wants its weights again."""
        chunk.copy_expected = False
        if chunk.span.presence is not Presence.FETCHING:
            self.records.drop(chunk, WEIGHTS)
        self.completed.append((self.num_backwards, max(len(self.pipeline.trace) - 1, 0), chunk.index))
        if self.ranks.world == 1:
            self._gradient_ready(chunk)

    def _reduce(self, chunk: ChunkState) -> None:
        """The plan says that it is the chunk's turn; all ranks are at this point.

        In a step that has left the plan the chunk's gradient may not be complete here.
        """
        if self.backward_task is None or chunk.updated or self.pipeline.off_plan:
            return
        self.gradients.reduce(chunk)
        self._gradient_ready(chunk)

    def _reduce_unplanned(self) -> None:
        """Where no plan says when, all ranks meet at each acquire: reduce what is complete on all of them.

        A gradient that some rank never gets is thus left to the end of the pass, in one order everywhere.
        """
        if self.ranks.world == 1 or self.backward_task is None:
            return
        chunks = self.registry.chunks
        complete = torch.tensor([not chunk.missing for chunk in chunks], dtype=torch.int32)
        empty = torch.tensor([chunk.flat_gradient is None for chunk in chunks], dtype=torch.int32)
        self.ranks.min_(agreed := torch.stack([complete, empty]))
        for chunk, is_complete, is_empty in zip(chunks, *agreed.tolist()):
            if is_complete and not is_empty:
                self.gradients.reduce(chunk)
                self._gradient_ready(chunk)

    def _gradient_ready(self, chunk: ChunkState) -> None:
        if self.early_hyper is not None and not chunk.on_device:
            self.waiting.append(chunk)
            self._update_waiting()
        else:
            self._sum_squares(chunk)

    def _update_waiting(self) -> None:
        """Update chunks whose gradients are complete and whose weights nobody needs any more."""
        if not self.waiting:
            return
        self.pipeline.drain_dropped()
        for chunk in list(self.waiting):
            if not chunk.span.holds and not chunk.span.handles:
                self.waiting.remove(chunk)
                chunk.updated = True
                self._begin_update(chunk, self.early_hyper)

    def _announce(self, chunk: ChunkState, hyper: Hyper) -> None:
        """The chunk is updated when it is next needed; until then its device copy is stale."""
        self._make_stale(chunk)  # first: it may adopt what forward wrote, which waits for an update that is pending
        chunk.pending = hyper

    def _begin_update(self, chunk: ChunkState, hyper: Hyper) -> None:
        if chunk.pending is None:
            self._make_stale(chunk)
        self.updater.begin(chunk, hyper, urgent=not self.deferred)
        self.pipeline.num_updates_begun += 1  # only now: what it asks for must not look like the last to be used again

    def _make_stale(self, chunk: ChunkState) -> None:
        self.pipeline.invalidate(chunk.span)
        for param in chunk.whole_pieces:
            self._note_change(self.registry.params[param])

    @staticmethod
    def _note_change(state: ParameterState) -> None:
        """What autograd has saved of the parameter is old; the engine knows its value."""
        torch.autograd.graph.increment_version(state.param)
        state.version = state.param._version

    def _finish_announced(self, chunk: ChunkState) -> None:
        """Wait for the chunk's update: before its next gradient arrives, or its record is read."""
        if chunk.pending is not None:
            self._begin_update(chunk, chunk.pending)
        if chunk.updating is not None:
            if not chunk.updating.done:
                self.records.hurry_all()
            self.events.wait("update", chunk.updating, chunk.index)

    def _sum_squares(self, chunk: ChunkState) -> None:
        """Add up the squares of a complete gradient behind the backward pass, if the norm is asked for."""
        if not self._sums_squares() or self.num_backwards + 1 < self.optimizer.accumulation_steps:
            return
        job = chunk.gradient_job

        def work() -> NormAccumulator:
            stream = job.wait()
            if stream is not None:  # of a gradient that stays on the device
                stream.synchronize()
            total = NormAccumulator()
            with self.gradients.shard(chunk) as gradient:
                add_norm(chunk, gradient, total)
            return total

        chunk.norm_job = self.updater.lane.push(work)

    def _sums_squares(self) -> bool:
        return self.optimizer.max_grad_norm is not None or self.config.watches_nonfinite

    def _norm(self, chunks: list[ChunkState]) -> float:
        """The global norm of the summed gradients, the same bits for every placement and chunk size."""
        total = NormAccumulator()
        for chunk in chunks:
            if chunk.norm_job is None:
                self._sum_squares_now(chunk)
            total.merge(self.events.wait("gc", chunk.norm_job, chunk.index))
        self.ranks.sum_(total.limbs)
        return total.value()

    def _sum_squares_now(self, chunk: ChunkState) -> None:
        backwards, self.num_backwards = self.num_backwards, self.optimizer.accumulation_steps
        self._sum_squares(chunk)
        self.num_backwards = backwards

    def _completions(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(position, chunk), in order, of gradients that were complete on every rank, and those of them due for an update."""
        completed = self.completed
        if self.ranks.world > 1:
            positions = torch.full((self.optimizer.accumulation_steps, len(self.registry.chunks)), NEVER)
            for backward, position, chunk in completed:
                positions[backward, chunk] = position
            last = self.ranks.max_(positions).tolist()
            completed = [(b, p, c) for b, row in enumerate(last) for c, p in reversed([*enumerate(row)]) if p < NEVER]
            completed.sort(key=lambda entry: entry[1])
        final = -1 if self.deferred else self.optimizer.accumulation_steps - 1
        early = [(p, c) for b, p, c in completed if b == final and not self.registry.chunks[c].on_device]
        return [(p, c) for _, p, c in completed], early

    def _hyper(self) -> Hyper:
        scale = self.scaler.scale if self.scaler is not None else self.ranks.world
        return Hyper(self.optimizer.rule, self.optimizer.snapshot(), 1.0 / scale)

    def _abandon_backward(self) -> None:
        """The last backward pass raised."""
        self.backward_task = None
        self.failed = True
        self.gradients.hurry()
        self.hooks.release_all()
        self.torn = self.torn or any(chunk.updated for chunk in self.registry.chunks)

    def _reset_step(self, torn: bool = False) -> None:
        """Nothing has happened since the last step."""
        self.backward_task: int | None = None
        self.num_backwards = 0
        self.early_hyper: Hyper | None = None
        self.torn = torn
        self.failed = False  # a backward pass raised
        self.waiting: list[ChunkState] = []
        self.completed: list[tuple[int, int, int]] = []  # (backward pass, position in the trace, chunk)
        if self._started:
            self.first_step = False
            for chunk in self.registry.chunks:
                chunk.updated = False
                chunk.update_expected = False

    @staticmethod
    def _in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed")

    # Start.

    def _deferred(self) -> bool:
        optimizer, update = self.optimizer, self.config.update
        if update == "auto":
            return self.config.watches_nonfinite or (optimizer is not None and optimizer.max_grad_norm is not None)
        if update == "backward" and optimizer is not None and optimizer.max_grad_norm is not None:
            raise ConfigError(
                "update='backward' with max_grad_norm: the norm is known only after the backward pass. Use update='deferred' "
                "or 'auto', or leave out max_grad_norm."
            )
        return update == "deferred"

    @torch.inference_mode(False)
    def _start(self) -> None:
        """Lay out, place, reserve and write the initial records; then let the parameters go."""
        if self._started:
            return
        self._check_open()
        try:
            self._set_up()
        except (ConfigError, UsageError):  # mistakes of the program or its settings, which all ranks share as a rule
            raise
        except BaseException as error:
            self.ranks.report(error, "start: ")
            raise

    def _set_up(self) -> None:
        model = self._model()
        self.deferred = self._deferred()
        self.accumulating = self.optimizer is not None and self.optimizer.accumulation_steps > 1
        self.moments = self.optimizer.rule.moments if self.optimizer is not None else ADAM_MOMENTS
        parts = assemble(
            model,
            self._named,
            self.config,
            self.device,
            self.ranks,
            self.events,
            moments=self.moments,
            deferred=self.deferred,
            accumulating=self.accumulating,
        )
        self.layout, self.placement = parts.layout, parts.placement
        self.registry, self.tier, self.arena, self.swap = parts.registry, parts.tier, parts.arena, parts.swap
        self.records, self.pipeline, self.gradients, self.updater = parts.records, parts.pipeline, parts.gradients, parts.updater
        self.activations = parts.activations
        self.events.count_slots = self.records.slots_in_use
        self.values = Values(self.registry, self.records, self.updater, self.tier, self.ranks, self._finish_announced)
        config = self.config
        self.margin = Margin(
            self.registry,
            self.records,
            self.pipeline,
            self.gradients,
            self.updater,
            self.values,
            self.tier,
            self.ranks,
            self.placement,
            gauge_of(self.device),
            bound_nbytes=None if config.device_memory == "auto" else config.device_memory,
            finish=self._finish_announced,
        )
        self.gradients.raise_failure = self.raise_failure
        self.records.on_failure = self.ranks.report
        for lane in self._lanes():
            lane.on_error = lambda error, what, ranks=self.ranks: ranks.report(error, f"{what}: ")
        self.ranks.listen(self._give_up)
        self.pipeline.begin_update = lambda chunk: self._begin_update(chunk, chunk.pending)
        self.pipeline.hurry_update = self.updater.hurry
        self.pipeline.in_backward = lambda: self.backward_task is not None
        self.pipeline.reduce = self._reduce
        self.pipeline.reduce_unplanned = self._reduce_unplanned
        self.pipeline.read_states = self._read_states
        self.pipeline.write_back = self.values.adopt
        try:
            self._let_go(model)
        except BaseException:
            self._close_parts()
            raise
        self._started = True

    def _begin(self, module, args, kwargs):
        """The model's first pre-hook."""
        self._start()
        return self.hooks._before(module, args, kwargs)

    def __deepcopy__(self, memo):
        raise UsageError(NO_COPY)

    def __reduce_ex__(self, protocol):
        raise UsageError(NO_COPY)

    def _let_go(self, model: nn.Module) -> None:
        """Give the parameters' values to their records, and the modules to the hooks."""
        self.values.write_initial(self._initial_value)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        self.hooks = Hooks(self, model, self.registry, self.pipeline)
        _disarm_guard(model)
        self._reset_step()
        self.first_step = True
        self._frozen = [state for state in self.registry.params if not state.trainable]

    def _initial_value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        return self._loaded.pop(index) if index in self._loaded else self._initial(index, param)

    def _read_states(self, chunk: ChunkState) -> None:
        if chunk.states_home == "nvme" and chunk.trainable and not chunk.updated and chunk.pending is None:
            self.records.request(chunk, STATES, pin=False)


def engine_of(model: nn.Module) -> Engine:
    """The engine that trains a model. Raises ConfigError if none does."""
    reference = _engines.get(model)
    engine = reference() if reference is not None else None
    if engine is None:
        raise ConfigError(f"{type(model).__name__} is in no engine: build it inside infinity.init or call infinity.offload")
    return engine


def offload(model: nn.Module, config: Config | None = None) -> Engine:
    """Take a model that already exists: its parameters leave for the tiers once an optimizer is made or it first runs."""
    if any(owner_of(param) is not None for param in model.parameters()):
        raise UsageError(f"{type(model).__name__} is in an engine already")
    config = config or Config()
    ranks = Ranks(device_of(config.device))
    cut_large_layers(model, config, ranks)
    return Engine(model, config, ranks=ranks)


def cut_large_layers(model: nn.Module, config: Config, ranks: Ranks) -> list[tuple[str, int]]:
    """Tile what `config.tile_above` says, before the model has an engine: (name, number of tiles). Every rank must call it."""
    budget = config.device_memory
    if config.tile_above == budget == "auto":
        budget, _ = budgets(config, device_of(config.device), ranks)
    return tile_to_fit(model, config.tile_above, device_nbytes=budget, itemsize=WEIGHT_NBYTES[config.dtype])


@contextlib.contextmanager
def gathered(params: torch.Tensor | Iterable[torch.Tensor]):
    """Parameters of one engine are whole, on the device, inside the block; changes made there are kept.

    Every rank must enter it; rank 0's values count. A change of a bf16 weight sets its fp32 master to that weight.
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if not params:
        yield
        return
    engine = owner_of(next((param for param in params if param.numel() and param.is_floating_point()), params[0]))
    if engine is None:
        raise ConfigError("infinity.gathered: the parameter is in no engine")
    with engine.gathered(params):
        yield


_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref] = weakref.WeakKeyDictionary()


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every floating-point parameter with elements, once, in registration order."""
    return [(name, p) for name, p in model.named_parameters() if p.is_floating_point() and p.numel()]


def _is_here(param: nn.Parameter) -> bool:
    """Whether it has elements of its own; those that `infinity.init` has sent away share one, which is no number."""
    here = param.untyped_storage().nbytes() >= param.numel() * param.element_size()
    return here and (param.numel() > 1 or not param.isnan().item())


def _guard_before_start(engine: Engine, model: nn.Module) -> None:
    """Start the engine when the model runs before an optimizer was made."""
    model.__dict__["_infinity_start"] = model.register_forward_pre_hook(engine._begin, prepend=True, with_kwargs=True)


def _guard_after_close(model: nn.Module | None, params: list[ParameterState]) -> None:
    """Refuse to run a model whose parameters are placeholders; it runs again once the user has given them values."""
    away = {state.placeholder.data_ptr(): state.name for state in params}

    def refuse(module, args):
        for param in module.parameters():
            if (name := away.get(param.data_ptr())) is not None:
                raise UsageError(f"the engine is closed and {name} is only a placeholder; read what is to be kept before close()")

    if model is not None:
        model.register_forward_pre_hook(refuse, prepend=True)


def _disarm_guard(model: nn.Module) -> None:
    handle = model.__dict__.pop("_infinity_start", None)
    if handle is not None:
        handle.remove()
