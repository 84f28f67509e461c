"""The engine of one model: builds the rest, starts and ends it, and answers for its parameters' values.

Knows every other part by its face. Must not know how bytes move, what a kernel computes, what hooks a module has, or when an update is
due. The user meets it through `infinity.init`, `infinity.offload` and the optimizers. Over 400 lines because what is asked of an engine has to be
right before its start, between two steps and after its end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from infinity.config import Config
from infinity.engine.budget import Margin
from infinity.engine.build import assemble
from infinity.engine.due import note_change
from infinity.engine.foreign import refuse_optimizers, refuse_replicas, watch_replicas
from infinity.engine.resident import hooks_for
from infinity.engine.sizing import budgets
from infinity.engine.steps import Cycle
from infinity.errors import ConfigError, UsageError
from infinity.model.buffers import refuse_unmixed
from infinity.model.parameters import NO_COPY, forget_owner, owner_of, set_owner
from infinity.model.sharing import part_versions, refuse_shared
from infinity.model.state_dict import Facade
from infinity.model.tiling import tile_to_fit
from infinity.optim.loss_scale import LossScale, Scaler
from infinity.plan import placement as planner
from infinity.plan.packing import WEIGHT_NBYTES
from infinity.plan.record import ADAM_MOMENTS, STATES, WEIGHTS
from infinity.system import interrupts
from infinity.system import ranks as partition
from infinity.system.capacity import device_of, gauge_of
from infinity.system.dropped import close_with
from infinity.system.events import Events
from infinity.system.freed_memory import Freed
from infinity.system.interrupts import Shield, shielded, uninterrupted
from infinity.system.lanes import THREADS, Lane
from infinity.system.ranks import Ranks
from infinity.system.timeline import timeline_of
from infinity.tiers.state import TORCH_DTYPES, ChunkState, SpanState


class Engine:
    """Trains one model from device, host and NVMe memory. A context manager: leaving it closes it.

    initial: gives a parameter's initial value, `initial(index, param) -> 1-D tensor on any device`. Nothing is built or
    written until an optimizer is attached or the model runs for the first time.
    """

    def __init__(self, model: nn.Module, config: Config, initial=None, ranks: Ranks | None = None):
        self.config = config
        self.device = device_of(config.device)
        self.events = Events(tracing=config.trace)
        if config.trace:
            self.events.timeline = timeline_of(self.device, self.events)
        self.optimizer = None
        self._model = weakref.ref(model)
        self._initial = initial or (lambda index, param: param.detach().reshape(-1))
        self._named = _parameters(model)
        self._started = self._closed = False
        self.ranks = ranks or Ranks(self.device)  # after what may refuse the model: it has a thread and groups
        self.ranks.join()
        self._trains: int | None = None  # the thread that made the last step
        self.turn = threading.RLock()  # of who saves or loads: a forward pass of another thread begins before that, or after it
        self.saving = None  # the checkpoint under way, or the last one
        self.last_save = None  # of what a checkpoint that is whole holds
        self._indices = {id(param): index for index, (_, param) in enumerate(self._named)}
        self._loaded: dict[int, torch.Tensor] = {}  # values that were asked for or given before the start, by index
        for _, param in self._named:
            set_owner(param, self)
        _engines[model] = weakref.ref(self)
        _open.add(self)
        watch_replicas()
        life = _Life(model)
        for module in model.modules():
            if any(self.manages(param) for param in module.parameters()):
                module.__dict__[_LIFE] = life
        self._life = weakref.ref(life)
        self._dropped = close_with(life, self)
        interrupts.prepare()
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
            "peak_allocated_nbytes": self.margin.gauge.most_nbytes() if self.margin.gauge else 0,  # by the process; 0 on the CPU
            "num_chunks_on_device": sum(chunk.on_device for chunk in self.registry.chunks),
            "host_arena_nbytes": self.arena.nbytes,
            "nvme_read_nbytes": self.swap.read_nbytes if self.swap else 0,
            "nvme_write_nbytes": self.swap.write_nbytes if self.swap else 0,
            "compresses_nvme": self.compressor is not None and self.compressor.codes,
            "late_gradients_nbytes": self.compressor.pool.used_nbytes if self.compressor and self.compressor.pool else 0,
            "num_plans": self.follower.num_plans,
            "num_fetches_ahead": self.weights.num_ahead,  # to the device, before an op needed them
            "num_fetches_late": self.weights.num_late,
            "loss_scale": self.cycle.scaler.scale if self.cycle.scaler is not None else None,
            "num_skipped_steps": self.cycle.num_skipped,
            "activations": self.activations.stats() if self.activations is not None else None,
            "links": links,
        }

    @uninterrupted
    def flush(self) -> None:
        """Begin and finish every update that step() has announced, and its writes."""
        self._check_open()
        self._check_thread("flush()")
        self._start()
        for chunk in self.registry.chunks:
            if chunk.update.is_announced:
                self.updater.begin_announced(chunk)
        for chunk in self.registry.chunks:
            self.updater.finish(chunk)
        self.records.flush()

    @uninterrupted
    def read_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's segments by name (weight, residual, momentum, variance), whole, on the CPU, as they are stored.

        Every rank must call it. Raises ConfigError for a parameter that is not the engine's.
        """
        self._check_open()
        self._check_thread("read_state()")
        self._start()
        self.cycle.refuse_half_updated("read_state()")
        state = self.registry.find(param)
        if state is None:
            raise ConfigError("the parameter is not one of this engine's")
        return self.values.read(state)

    def manages(self, param: torch.Tensor) -> bool:
        """Whether the parameter is one of this engine's."""
        return id(param) in self._indices

    def is_held(self, param: torch.Tensor) -> bool:
        """Whether the program may read and change the parameter now, as inside `gathered` or its module's forward."""
        return self._started and self.registry.params[self._indices[id(param)]].num_holders > 0

    @uninterrupted
    def read_weight(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter's value, whole, on the CPU, in the dtype that the model computes in. Every rank must call it."""
        self._check_open()
        self._check_thread("state_dict()")
        index = self._indices[id(param)]
        if not self._started:
            if index not in self._loaded:
                if _is_here(param):
                    return param.detach().to("cpu", TORCH_DTYPES[self.config.dtype], copy=True)
                self._loaded[index] = self._initial(index, param).cpu()
            return self._loaded[index].to(TORCH_DTYPES[self.config.dtype], copy=True).reshape(param.shape)
        if self.is_held(param):
            return param.detach().to("cpu", copy=True)
        self.cycle.refuse_half_updated("state_dict()")
        return self.values.read(self.registry.params[index], weight_only=True)["weight"]

    @uninterrupted
    def write_weight(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Give a parameter a value, of its shape; moments stay. Every rank must call it; rank 0's value counts."""
        value = value.detach().reshape(-1).to("cpu", copy=True)
        self.ranks.broadcast_(value.view(torch.uint8))
        self.give(param, value)

    @uninterrupted
    def give(self, param: torch.Tensor, value) -> None:
        """As `write_weight`, of what is the same on every rank: anything whose slices are 1-D tensors on the CPU."""
        self._check_open()
        self._check_thread("a new value of a weight")
        index = self._indices[id(param)]
        if not self._started:
            if _is_here(param):  # what the program changes afterwards counts
                with torch.no_grad():
                    param.copy_(value[: param.numel()].view(param.shape))
            else:
                self._loaded[index] = value
            return
        self.cycle.refuse_half_updated("new weights", change=True)
        state = self.registry.params[index]
        if not self.calls.frames and not self.cycle.in_backward():
            self.calls.release_escaped()
        if self.weights.is_held(self.registry.span_of(state)):
            raise UsageError(f"{state.name} is given a value while the model runs or inside infinity.gathered")
        self.values.write_weight(state, value)
        for chunk in self.registry.chunks_of(state):
            if chunk.weights_home != "device" and not chunk.on_device:
                self.cycle.due.make_stale(chunk)
        note_change(state)

    @contextlib.contextmanager
    def gathered(self, params: Iterable[torch.Tensor]):
        """The parameters are whole on the device inside the block; what it changes is kept, on every rank as on rank 0."""
        self._check_open()
        self._check_thread("infinity.gathered")
        self._start()
        self.cycle.refuse_half_updated("infinity.gathered", change=True)
        states = [self.registry.find(param) for param in params if param.numel() and param.is_floating_point()]
        if None in states:
            raise ConfigError("infinity.gathered: a parameter is not one of this engine's")
        before: dict[SpanState, torch.Tensor] = {}
        try:
            self._gather(dict.fromkeys(self.registry.span_of(state) for state in states), before)
            with self.calls.saved_tensors():
                yield
        finally:
            self._adopt(before)

    @uninterrupted
    def _gather(self, spans: Iterable[SpanState], before: dict[SpanState, torch.Tensor]) -> None:
        """Hold them, and note what they are before the program changes them."""
        self.weights.acquire_aside(list(spans))
        for span in spans:
            self.values.keep_written(span)
        before.update({span: span.flat.clone() for span in spans})
        for span in spans:
            for state in span.params:
                state.hold()

    @uninterrupted
    def _adopt(self, before: dict[SpanState, torch.Tensor]) -> None:
        for span, value in before.items():
            try:
                span.written()
            finally:
                for state in span.params:
                    state.version = state.counter._version
                    state.release()
                self.values.adopt(span, (), value)
                self.weights.release(span)

    # What parameters call: [Note: parameters with two classes] in parameters.py.

    @property
    def is_closed(self) -> bool:
        return self._closed

    def name_of(self, param: nn.Parameter) -> str:
        return self.registry.find(param).name

    def may_compute(self, params: list[nn.Parameter]) -> bool:
        """Whether the program is where it may read parameters that nothing holds: in one of this engine's ops."""
        return self.calls.may_compute(list(map(self.registry.find, params)))

    def compute(self, params: list[nn.Parameter], func, args: tuple, kwargs: dict):
        """func(*args, **kwargs), for which these parameters are held."""
        return self.calls.compute(list(map(self.registry.find, params)), func, args, kwargs)

    def take(self, param: nn.Parameter, data: torch.Tensor) -> None:
        """The program puts other data into a parameter that is held."""
        state = self.registry.find(param)
        state.put(data)

    def close(self) -> None:
        """Finish what is under way, end the threads and give back memory and swap files. Idempotent.

        The parameters are placeholders afterwards: read what is to be kept before.
        """
        if self._closed:
            return
        failure = self._finish_saving()
        self._closed = True
        _open.discard(self)
        self._was_dropped = not self._dropped.detach()
        for module in self._model().modules() if self._model() is not None else ():
            module.__dict__.pop(_LIFE, None)
        if not self._started:
            self._give_back()
            self.ranks.leave()
            return
        self.cycle.close()
        away = {state.placeholder.data_ptr(): state.name for state in self.registry.params}
        with contextlib.ExitStack() as parts:  # from the last to the first, also where one of them raises
            parts.callback(interrupts.unguard)
            parts.callback(_guard_after_close, self._model(), away)
            parts.callback(self._facade.close, away)
            parts.callback(self.ranks.leave)
            parts.callback(self.hooks.remove)
            parts.callback(self._close_parts)
        if self.is_stuck:
            _stuck.append(self)
        if failure is not None:
            raise failure

    def _give_back(self) -> None:
        """The model of an engine that never started is what it was before, but for what `infinity.init` has sent away."""
        away = {}
        with torch._C.DisableTorchFunctionSubclass():
            for name, param in self._named:
                if _is_here(param):
                    forget_owner(param)
                else:
                    away[param.data_ptr()] = name
        self._facade.close(away)
        if (model := self._model()) is not None:
            _disarm_guard(model)
            _guard_after_close(model, away)
            _engines.pop(model, None)

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
            for part in (self.compressor, self.records, self.updater, self.gradients, self.weights, self.activations):
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

    def __getattr__(self, name: str):
        """Only for what an engine has not: as of `model = infinity.offload(model)`, after which nothing else may know the model."""
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if hasattr(nn.Module, name) or (not name.startswith("_") and hasattr(self.__dict__.get("_model", lambda: None)(), name)):
            message += f": {_NO_MODEL}"
        raise AttributeError(message, name=name, obj=self)

    def __call__(self, *args, **kwargs):
        raise UsageError(f"an Engine is not called: {_NO_MODEL}")

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
            if self._started and planned != (self.cycle.deferred, self.accumulating, self.moments):
                raise UsageError(
                    "the model ran before its optimizer was made, and now needs other memory than was planned; make the "
                    "optimizer before the first forward pass"
                )
            if optimizer.loss_scale is not None and self.config.dtype != "fp16":
                raise ConfigError(f"loss_scale with dtype={self.config.dtype!r}: only fp16 gradients need one; leave it out")
            scaler = Scaler(optimizer.loss_scale or LossScale(), self.ranks.world) if self.config.dtype == "fp16" else None
            self._start()
        except BaseException:
            self.optimizer = None
            raise
        self.cycle.optimizer, self.cycle.scaler = optimizer, scaler
        config = self.config
        if planner.records_may_visit(weights=config.weights, states=config.states, keep=config.residency == "auto"):
            self.margin.hold_records()
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if (state := self.registry.find(param)) is not None:
                    state.group = index

    @uninterrupted
    @torch.no_grad()
    def step(self) -> None:
        self._check_open()
        self._trains = threading.get_ident()
        life = self._life()  # else the collector may find the model gone in between
        interrupts.guard()
        if self.saving is not None:
            self.saving.pass_step()
        with self.turn:  # no forward pass of another thread begins meanwhile
            self.cycle.step()
        del life
        self.freed.give_back_after_step()
        self.ranks.count_step()

    @uninterrupted
    def zero_grad(self) -> None:
        if self._started and not self._closed:
            self.cycle.zero_grad()

    # What saving and loading call.

    @property
    def model(self) -> nn.Module:
        return self._model()

    def ready_to_save(self, optimizer) -> None:
        """The state is that between two steps from here on until the next one; a checkpoint under way is finished first."""
        self._check_optimizer(optimizer, "infinity.save")
        self.cycle.raise_failure()
        self.cycle.check_gradients()
        if self.cycle.torn:
            raise UsageError("infinity.save after a backward pass that failed half-way: weights are of two steps; see step()")
        self.cycle.refuse_half_updated("infinity.save")
        if self.cycle.num_backwards or self.cycle.backward_task is not None:
            raise UsageError("infinity.save between backward() and step(): gradients are not saved. Save after step().")
        if (failure := self._finish_saving()) is not None:
            raise failure
        for chunk in self.registry.chunks:
            if not chunk.update.is_announced:
                self.updater.finish(chunk)  # the last ones of a backward pass that updates
        for span in self.registry.spans:
            self.values.keep_written(span)

    def shielded(self, work: Callable[[Shield], object]) -> object:
        """Do what no interrupt may leave half done, and the training thread waits for; on its stream."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def run(shield: Shield) -> object:
            with torch.cuda.stream(stream):
                return work(shield)

        return shielded(run)

    def ready_to_load(self, optimizer) -> None:
        self._check_optimizer(optimizer, "infinity.load")
        if self.cycle.backward_task is not None:
            self.cycle.abandon_backward()
        if (failure := self._finish_saving()) is not None:
            raise failure

    @contextlib.contextmanager
    def loading(self):
        """All records are replaced inside the block; gradients and updates of before are forgotten."""
        self.flush()
        self.updater.end_step()
        self.cycle.torn = False
        self.zero_grad()
        for chunk in self.registry.chunks:
            self.cycle.due.make_stale(chunk)
        self.cycle.half_loaded, self.last_save = True, None
        yield
        self.cycle.half_loaded = False

    def begin_announced(self, chunk: ChunkState) -> None:
        """Begin the update that the last step() announced."""
        self.updater.begin_announced(chunk)

    def num_records_in_memory(self, most: int) -> int:
        """How many chunks' records may be asked for before one is given back, up to `most`."""
        kinds = [kind for kind in (WEIGHTS, STATES) if "nvme" in self.placement.homes[kind]]
        return max(1, min([most, *(self.placement.slots[kind] for kind in kinds)]))

    def _check_optimizer(self, optimizer, what: str) -> None:
        self._check_open()
        self._check_thread(what)
        if optimizer is not None and optimizer is not self.optimizer:
            raise UsageError(f"{what}: the optimizer is not that of this model")
        self._start()
        self.calls.refuse_running(what)

    # The end.

    def _free_memory(self) -> None:
        if not self.is_stuck and not self.ranks.has_left_behind:  # what a collective or a copy may still write to stays
            self.registry.free_device()
            self.arena.close()

    def _lanes(self) -> list[Lane]:
        lanes = [self.weights.cg, self.weights.gg, self.gradients.gc, self.updater.lane]
        return lanes + ([self.activations.copies, self.activations.writer] if self.activations is not None else [])

    @property
    def is_stuck(self) -> bool:
        """Closed, and a thread of it is still inside of what it does."""
        return self.ranks.is_stuck or (self._started and any(lane.is_stuck for lane in self._lanes()))

    def _give_up(self, error: BaseException) -> None:
        """A rank has failed: nobody here waits any longer for what needs all of them."""
        for lane in self._lanes():
            lane.abandon(error)
        self.records.failure.note(error)

    def _check_open(self) -> None:
        if self._closed:
            dropped = ": it ended with its model, which nobody holds any more; keep the model as long as you use its optimizer or graphs"
            raise UsageError(f"the engine is closed{dropped if self._was_dropped else ''}")
        if self._started and self.calls.thread == threading.get_ident():
            self.cycle.end_interrupted()

    def _check_thread(self, what: str) -> None:
        """Only the thread that trains knows when it is between two steps; others may run the model, but neither read nor change its state."""
        if self.trains_elsewhere:
            raise UsageError(
                f"{what} from another thread than the one that trains, which may be in the middle of a step: it would see the state of no "
                f"step. Call it in the thread that calls step(), after step(); infinity.save(..., wait=False) writes while that goes on training"
            )

    @property
    def trains_elsewhere(self) -> bool:
        """Whether another thread than this one made the last step, or began the first, and may make more."""
        here = threading.current_thread()
        trains = self.calls.thread if self._trains is None and self._started and self.optimizer is not None else self._trains
        if self._model() is None:  # dropped: none can, and who closes it waits for nobody
            return False
        if trains in (None, here.ident) or here.name.startswith((THREADS, interrupts.SHIELD)):
            return False
        return any(thread.ident == trains for thread in threading.enumerate())

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
            with self.ranks.at("the start of the engine"):
                self._set_up()
        except (ConfigError, UsageError):  # mistakes of the program or its settings, which all ranks share as a rule
            raise
        except BaseException as error:
            self.ranks.report(error, "start: ")
            raise

    def _set_up(self) -> None:
        model = self._model()
        if any(engine is not self for engine in _open):
            gc.collect()  # what the program has dropped, such as a notebook's cell that is run again, gives its memory back first
        refuse_shared(model)  # the program may have changed the model since the engine was made
        part_versions(param for _, param in self._named)
        deferred = self._deferred()
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
            can_advance=self.optimizer is None or self.optimizer.rule.can_advance,
            deferred=deferred,
            accumulating=self.accumulating,
        )
        self.layout, self.placement = parts.layout, parts.placement
        self.registry, self.tier, self.arena, self.swap = parts.registry, parts.tier, parts.arena, parts.swap
        self.records, self.gradients, self.updater = parts.records, parts.gradients, parts.updater
        self.values, self.weights, self.course = parts.values, parts.weights, parts.course
        self.activations, self.compressor = parts.activations, parts.compressor
        self.events.count_slots = self.records.slots_in_use
        config = self.config
        self.margin = Margin(
            self.registry,
            self.records,
            self.weights,
            self.gradients,
            self.updater,
            self.values,
            self.tier,
            self.ranks,
            self.placement,
            gauge_of(self.device),
            bound_nbytes=None if config.device_memory == "auto" else config.device_memory,
        )
        self.cycle = Cycle(config, self.ranks, self.events, parts, self.margin, deferred=deferred)
        self.cycle.turn = self.turn
        self.follower, self.calls = self.cycle.follower, self.cycle.calls
        self.ranks.listen(self._give_up)
        try:
            self._let_go(model)
        except BaseException:
            self._close_parts()
            raise
        self._started = True
        span_nbytes = self.placement.device_nbytes if self.device.type == "cpu" else 0
        self.freed = Freed(self.placement.host_nbytes + span_nbytes, span_nbytes)
        self.freed.give_back()

    def _begin(self, module, args, kwargs):
        """The model's first pre-hook."""
        if torch.is_grad_enabled():
            refuse_optimizers([(name, param) for name, param in self._named if param.requires_grad])
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
        self.hooks = hooks_for(self.cycle, model)
        _disarm_guard(model)

    def _initial_value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        return self._loaded.pop(index) if index in self._loaded else self._initial(index, param)


_NO_MODEL = (
    "the model has it. infinity.offload changes the model that it is given and returns its engine, so write `infinity.offload(model, config)` "
    "without `model = `, and go on with the model."
)


class _Life:
    """Lies in each module that has parameters of an engine, or children that have: the engine ends once none of them is reachable. So the model
    stays whole while a part of it is used; neither the optimizer, nor a graph, nor a thread of the engine holds one."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __deepcopy__(self, memo):
        return None  # a copy that is made before the start is no part of the model

    def __reduce__(self):
        return type(None), ()


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
    _refuse_untrainable(model, config)
    _parameters(model)
    with Ranks(device_of(config.device)).joined() as ranks:
        cut_large_layers(model, config, ranks)
        return Engine(model, config, ranks=ranks)


def cut_large_layers(model: nn.Module, config: Config, ranks: Ranks) -> list[tuple[str, int]]:
    """Tile what `config.tile_above` says, before the model has an engine: (name, number of tiles). Every rank must call it.

    Raises ConfigError, before anything is changed, for a model that no engine can train.
    """
    _refuse_untrainable(model, config)
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
_LIFE = "_infinity_life"
_open: weakref.WeakSet[Engine] = weakref.WeakSet()
_stuck: list[Engine] = []  # when they were closed
os.register_at_fork(after_in_child=lambda: (_open.clear(), _stuck.clear()))  # a child has none of the threads


@atexit.register
def _end_all() -> None:
    """Close what the program has left open; see [Note: how a process ends]."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # at a prompt it may be an old one
    engines = list(_open)
    if error is not None:
        for engine in engines:
            engine.ranks.report(error)
    for engine in engines:
        try:
            engine.close()
        except Exception as failure:
            print(f"infinity: {type(failure).__name__}: {failure}", file=sys.stderr)
    failed = partition.end_process(error)
    is_stuck = any(engine.is_stuck for engine in _stuck)
    if is_stuck or (failed and error is None):  # no other way leads to this status, or past a thread in C++ code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _refuse_untrainable(model: nn.Module, config: Config) -> None:
    """Raise ConfigError or UsageError for a model that no engine can train."""
    refuse_replicas(model)
    refuse_shared(model)
    refuse_unmixed(model, TORCH_DTYPES[config.dtype], device_of(config.device))


def _refuse_wrappers(model: nn.Module) -> None:
    """Raise ConfigError for a parameter that is made of other tensors, as DTensors and quantized ones are: it has no memory of its own."""
    for name, param in model.named_parameters():
        if is_traceable_wrapper_subclass(param):
            kind = type(param).__name__
            if kind == "DTensor":
                cure = "give the plain model, without fully_shard or distribute_tensor: the engine shards it itself, over all ranks"
            else:
                cure = "give the model with plain tensors"
            raise ConfigError(f"{name} is a {kind}, a tensor made of other tensors, which an engine cannot move; {cure}")


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every floating-point parameter with elements, once, in registration order. Raises ConfigError for those that cannot be offloaded."""
    _refuse_wrappers(model)
    named = [(name, param) for name, param in model.named_parameters() if param.is_floating_point() and param.numel()]
    if not named:
        raise ConfigError(f"{type(model).__name__} has no floating-point parameters; there is nothing to offload")
    if meta := [name for name, param in named if param.is_meta]:
        raise ConfigError(f"parameters on the meta device have no values: {', '.join(meta[:3])}; build them on the CPU")
    return named


def _is_here(param: nn.Parameter) -> bool:
    """Whether it has elements of its own; those that `infinity.init` has sent away share one, which is no number."""
    here = param.untyped_storage().nbytes() >= param.numel() * param.element_size()
    return here and (param.numel() > 1 or not param.isnan().item())


def _guard_before_start(engine: Engine, model: nn.Module) -> None:
    """Start the engine when the model runs before an optimizer was made."""
    model.__dict__["_infinity_start"] = model.register_forward_pre_hook(engine._begin, prepend=True, with_kwargs=True)


def _guard_after_close(model: nn.Module | None, away: dict[int, str]) -> None:
    """Refuse to run a model whose parameters are placeholders; it runs again once the user has given them values. away: their names by
    address."""

    def refuse(module, args):
        for param in module.parameters():
            if (name := away.get(param.data_ptr())) is not None:
                raise UsageError(f"the engine is closed and {name} is only a placeholder; read what is to be kept before close()")

    if model is not None and away:
        model.register_forward_pre_hook(refuse, prepend=True)


def _disarm_guard(model: nn.Module) -> None:
    handle = model.__dict__.pop("_infinity_start", None)
    if handle is not None:
        handle.remove()
