"""The engine of one model: construction of all parts, start and end.

Depends on every other part. Must not know how bytes move, the arithmetic of a kernel, the hooks of a module, or when an update begins.
Programs use an engine through `infinity.init`, `infinity.offload` and the optimizers.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.config import Config
from infinity.engine import engines, optimizer_changes
from infinity.engine.access.lifecycle import Lifecycle
from infinity.engine.access.parameter_values import InitialValues, ParameterValues
from infinity.engine.access.save_window import finish_reading
from infinity.engine.autograd.resident_model import hooks_for
from infinity.engine.build import assemble
from infinity.engine.description import tell_start
from infinity.engine.memory.device_memory import DeviceBudget
from infinity.engine.refused_trainers import refuse_trainers
from infinity.engine.refused_wrappers import refuse_optimizers, refuse_wrappers, watch_replicas
from infinity.engine.sizing import Training
from infinity.engine.stats import EngineStats, stats_of
from infinity.engine.steps.averaging import Averaging
from infinity.engine.steps.joined_optimizers import JoinedOptimizers
from infinity.engine.steps.optimizer_calls import step_of, zero_grad_of
from infinity.engine.steps.step_cycle import StepCycle
from infinity.errors import ConfigError, UsageError
from infinity.formats.assignment import ParameterDtypes, floating_parameters
from infinity.model.compiled import find_compiled, watch_wrappers
from infinity.model.leaf_modules import note_region
from infinity.model.parameters import NotCopied, is_open, owner_of, set_owner
from infinity.model.shared_parameters import part_versions, refuse_shared
from infinity.model.state_dict import Facade
from infinity.system import interrupts
from infinity.system.capacity import device_of, gauge_of
from infinity.system.dropped_objects import close_with
from infinity.system.events import Events
from infinity.system.garbage_collector import without_collections
from infinity.system.interrupts import uninterrupted
from infinity.system.mapped import ReadAhead
from infinity.system.progress import Progress, ignore
from infinity.system.ranks import Ranks, make_ranks
from infinity.system.timeline import timeline_of
from infinity.tiers.activations import Activations


_NO_MODEL = (
    "the model has it. infinity.offload changes the model in place and returns an engine. Therefore write `infinity.offload(model, config)` "
    "without `model = `, and go on with the model."
)


class NotAModule:
    """Explains the mistake `model = infinity.offload(model)`: an engine has no attributes of a module, and is not called."""

    if not TYPE_CHECKING:  # type checkers find these mistakes by themselves

        def __getattr__(self, name: str):
            """Raise AttributeError, and explain the mistake `model = infinity.offload(model)` if a model has this attribute."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(nn.Module, name) or (not name.startswith("_") and hasattr(self.__dict__.get("_model", lambda: None)(), name)):
                message += f": {_NO_MODEL}"
            raise AttributeError(message, name=name, obj=self)

        def __call__(self, *args, **kwargs):
            raise UsageError(f"an Engine is not called: {_NO_MODEL}")


class Engine(NotAModule, NotCopied):
    """Trains one model from device, host and NVMe memory. A context manager that closes the engine.

    first: the parameters' initial values. The engine builds and writes nothing until an optimizer is attached or the model first runs.
    """

    def __init__(self, model: nn.Module, config: Config, first: InitialValues | None = None, ranks: Ranks | None = None):
        self.config = config
        self.device = device_of(config.device)
        self.events = Events(tracing=config.trace)
        if config.trace:
            self.events.timeline = timeline_of(self.device, self.events)
        self.optimizers, self.averaging = JoinedOptimizers(), Averaging()
        self._model = weakref.ref(model)
        self._named = managed_parameters(model)
        self.lifecycle = Lifecycle(self._model)
        self.ranks = ranks or make_ranks(self.device)  # after all checks that may refuse the model: Ranks has a thread and process groups
        self.ranks.join()
        self.turn = threading.RLock()  # a step, save or load holds it: forward passes of other threads wait
        self.saving = None  # the last SnapshotReader, active or over
        self.last_save = None  # data that the last reader has left for the next one
        self.parameter_values = ParameterValues(self.lifecycle, self.ranks, self._named, first or InitialValues())
        engines.add(self, model)
        watch_replicas()
        watch_wrappers(_note_wrapper)
        life = engines.Life(model)
        self._life = weakref.ref(life)
        self._dropped = close_with(life, self)
        interrupts.prepare()
        engines.guard_before_start(model, self._begin)
        self._facade = Facade(self.parameter_values)
        self.adopt()

    # Public methods.

    def stats(self) -> EngineStats:
        """Sizes in bytes, and counts since the start, of this rank."""
        self.start()
        return stats_of(self)

    @uninterrupted
    def flush(self) -> None:
        """Run every update that step() has announced, and wait for all writes of records."""
        self.lifecycle.check_access("flush()")
        self.start()
        for chunk in self.registry.chunks:
            if chunk.update.is_announced:
                self.updater.begin_announced(chunk)
        for chunk in self.registry.chunks:
            self.updater.finish(chunk)
        self.records.flush()

    @uninterrupted
    def read_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """The whole segments of a parameter by name (weight, residual, momentum, variance), on the CPU, in their stored dtypes.

        All ranks must make this call. Raises ConfigError for a parameter that the engine does not manage.
        """
        self.lifecycle.check_access("read_state()")
        self.start()
        return self.parameter_values.read_state(param)

    def manages(self, param: torch.Tensor) -> bool:
        """Whether the engine manages this parameter."""
        return self.parameter_values.manages(param)

    @property
    def is_closed(self) -> bool:
        return self.lifecycle.is_closed

    @property
    def has_started(self) -> bool:
        return self.lifecycle.has_started

    @contextlib.contextmanager
    def gathered(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside the block the whole parameters are on the device. Changes of the block are kept: all ranks take the values of rank 0."""
        self.lifecycle.check_access("infinity.gathered")
        with self.parameter_values.gathered(params) if self.has_started else self.parameter_values.gathered_first(params, self.device):
            yield

    def close(self) -> None:
        """Finish active work, end the threads, and free memory and swap files. Idempotent.

        Afterwards the parameters are placeholders: read the values that you need before this call.
        """
        if self.is_closed:
            return
        failure = finish_reading(self.saving)
        self.lifecycle.note_close(was_dropped=not self._dropped.detach())
        engines.note_end(self)
        if (model := self.model) is not None:
            engines.take_life(model)
        if not self.has_started:
            self._give_back(model)
            self.ranks.leave()
            return
        self.cycle.close()
        away = {state.placeholder.data_ptr(): state.name for state in self.registry.params}
        with contextlib.ExitStack() as parts:  # calls the last one first, and goes on after an error
            parts.callback(interrupts.unguard)
            parts.callback(engines.guard_after_close, model, away)
            parts.callback(self._facade.close, away)
            parts.callback(self.ranks.leave)
            parts.callback(self.hooks.remove)
            parts.callback(self._close_parts)
        if self.is_stuck:
            engines.keep_stuck(self)
        if failure is not None:
            raise failure

    def _give_back(self, model: nn.Module | None) -> None:
        """Restore the model of an engine that never started. Parameters that `infinity.init` has moved away stay placeholders."""
        away = self.parameter_values.give_back()
        self._facade.close(away)
        if model is not None:
            engines.disarm_guard(model)
            engines.guard_after_close(model, away)
            engines.forget(model)

    def _close_parts(self) -> None:
        self.parts.close(keeps_memory=lambda: self.ranks.is_stuck or self.ranks.has_left_behind)

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
        state = "closed" if self.is_closed else "running" if self.has_started else "not started"
        return f"Engine({len(self._named)} parameters, {self.device}, {self.ranks.name}, {state})"

    # Calls from the optimizer.

    def attach(self, optimizer) -> None:
        """Take an optimizer: see `optimizer_changes.attach`."""
        optimizer_changes.attach(self, optimizer)

    def add_groups(self, optimizer, groups: list[dict]) -> None:
        """Take new parameter groups of an optimizer: see `optimizer_changes.add_groups`."""
        optimizer_changes.add_groups(self, optimizer, groups)

    def set_optimizers(self, optimizers: JoinedOptimizers) -> None:
        self.optimizers = optimizers

    def adopt(self) -> None:
        """Take all parameters that the model has now, also later ones such as adapters. Only before the start."""
        model = self._model()
        self._named = [(name, param) for name, param in managed_parameters(model) if owner_of(param) in (None, self)]
        for _, param in self._named:
            set_owner(param, self)
        self.dtypes = ParameterDtypes.of(self._named, self.config.dtype, master=self.config.master)
        self.parameter_values.renew(self._named, self.dtypes.of_torch)
        engines.put_life(model, {id(param) for _, param in self._named}, self._life())
        self._facade.attach(model)

    @uninterrupted
    @torch.no_grad()
    def step(self, optimizer) -> None:
        """step() of one optimizer: [Note: one step of several optimizers] in optimizer_calls.py."""
        self.lifecycle.check_open()
        self.start()
        self.calls.loss.refuse("step()")
        if not self.cycle.has_stepped:
            refuse_trainers(self)
        self.lifecycle.note_step()
        life = self._life()  # keeps the model alive: the engine must not close during the step
        interrupts.guard()
        if self.saving is not None:
            self.saving.pass_step()
        with self.turn:  # no forward pass of another thread begins during the step
            is_over = step_of(self.cycle, optimizer)
        del life
        if is_over:
            self._note_end_of_step()

    @uninterrupted
    @torch.no_grad()
    def zero_grad(self, optimizer) -> None:
        """zero_grad() of one optimizer. If others have called step(), this optimizer skips the step."""
        if self.has_started and not self.is_closed:
            self.calls.loss.refuse("zero_grad()")
            with self.turn if self.cycle.optimizer_calls.wait else contextlib.nullcontext():
                is_over = zero_grad_of(self.cycle, optimizer)
            if is_over:
                self._note_end_of_step()

    def _note_end_of_step(self) -> None:
        self.optimizers.refer_to(None)
        self.freed.give_back_after_step()
        self.ranks.count_step()

    @property
    def optimizer(self):
        """The optimizer, a tuple of several, or None without one. `infinity.save` and `infinity.load` take all three."""
        members = self.optimizers.members
        return members if len(members) > 1 else members[0] if members else None

    @property
    def activations(self) -> Activations | None:
        return self.parts.activations

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    @property
    def is_stuck(self) -> bool:
        """Whether a thread of the closed engine still works."""
        return self.ranks.is_stuck or (self.has_started and self.parts.is_stuck)

    # Start.

    @torch.inference_mode(False)
    def start(self) -> None:
        """Make the layout and the placement, reserve memory, write the initial records, and replace the parameters by placeholders."""
        if self.has_started:
            return
        self.lifecycle.check_open()
        try:
            with self.ranks.at("the start of the engine"), without_collections():  # for 25,600 tensors, collections took 3.6 of 8.4 s
                self._set_up()
        except (ConfigError, UsageError):  # mistakes of the program or its settings, usually the same on all ranks
            raise
        except BaseException as error:
            self.ranks.report(error, "start: ")
            raise
        optimizer_changes.give(self)

    def _set_up(self) -> None:
        model = self._model()
        if engines.are_others_open(self):
            gc.collect()  # frees models that the program has dropped, such as those of a notebook cell that runs again
        refuse_shared(model)  # the program may have changed the model since the engine was made
        self.adopt()
        part_versions([param for _, param in self._named])
        for module in find_compiled(model):
            note_region(module)
        scales_loss, averages = self.dtypes.needs_loss_scale, self.averaging.is_kept
        self.training = training = Training.of(self.optimizers, self.config, scales_loss=scales_loss, averages=averages)
        parts = self.parts = assemble(model, self._named, self.config, self.device, self.ranks, self.events, training)
        self.layout, self.placement = parts.layout, parts.placement
        self.registry, self.tier, self.arena, self.swap = parts.registry, parts.tier, parts.arena, parts.swap
        self.records, self.gradients, self.updater = parts.records, parts.gradients, parts.updater
        self.values, self.weights, self.course = parts.values, parts.weights, parts.course
        self.compressor, self.freed = parts.compressor, parts.freed
        self.events.count_slots = self.records.slots_in_use
        try:
            bound_nbytes = None if self.config.device_memory == "auto" else self.config.device_memory
            self.device_budget = DeviceBudget(self.weights, self.gradients, self.placement, gauge_of(self.device), bound_nbytes=bound_nbytes)
            self.cycle = StepCycle(self.config, self.ranks, self.events, parts, self.device_budget, self.turn, self.averaging)
            self.follower, self.calls = self.cycle.follower, self.cycle.calls
            self.ranks.listen(parts.give_up)
            if self.optimizers:
                self.updater.rehearse(self.optimizers)
            self._let_go(model, parts.ahead)
        except BaseException as error:
            self.lifecycle.note_failed_start(error)
            parts.ahead.close()
            self._close_parts()
            raise
        self.parameter_values.begin(parts, self.cycle)
        self.lifecycle.note_start(self.cycle)  # from here on `has_started` is true
        self.freed.give_back()
        tell_start(self)

    @torch._dynamo.disable(reason="the engine starts here. Make the optimizer before the first call of a compiled module")
    def _begin(self, module, args, kwargs):
        """The hook before the first forward pass of the model."""
        if torch.is_grad_enabled():
            refuse_trainers(self)
            ours = {id(param) for group in self.optimizers.param_groups for param in group["params"]}
            refuse_optimizers([(name, param) for name, param in self._named if param.requires_grad and id(param) not in ours])
        self.start()
        self.hooks.op_hooks.end_call(module)
        return self.hooks._before(module, args, kwargs)

    def _let_go(self, model: nn.Module, ahead: ReadAhead) -> None:
        """Write the parameters' values to their records, and register the hooks of the modules."""
        spans = self.registry.spans
        progress = Progress(f"{self.ranks.label}writes the first records", sum(span.nbytes for span in spans))
        tell = progress.add if self.ranks.is_first and self.config.verbose else ignore
        with ahead:  # reads mapped files ahead, in the order of the parameters
            for span in spans:
                ahead.reach(min(state.index for state in span.params))
                self.values.write_first(span, {s.index: self.parameter_values.initial_value(s.index, s.param) for s in span.params})
                tell(span.nbytes)
        self.records.flush()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        self.hooks = hooks_for(self.cycle, model)
        engines.disarm_guard(model)



def _note_wrapper(module: nn.Module, wrapper: nn.Module) -> None:
    """torch.compile has made a wrapper of a module. An engine finds earlier wrappers when it starts."""
    for engine in {owner_of(param) for param in module.parameters()}:
        if is_open(engine) and engine.has_started:
            engine.hooks.op_hooks.note_wrapper(module, wrapper)


def managed_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the engine manages. Raises ConfigError for those that cannot be offloaded."""
    refuse_wrappers(model)
    named = floating_parameters(model)
    if not named:
        raise ConfigError(f"{type(model).__name__} has no floating-point parameters; there is nothing to offload")
    if meta := [name for name, param in named if param.is_meta]:
        raise ConfigError(f"parameters on the meta device have no values: {', '.join(meta[:3])}; build them on the CPU")
    return named
