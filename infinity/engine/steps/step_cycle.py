"""The cycle of training steps: forward passes, backward passes, step(), and the calls that are allowed between them.

Knows the parts of an engine, and the optimizer. Must not know how bytes move, kernels, hooks of modules, or how an engine
starts and ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.autograd.module_calls import Calls
from infinity.engine.autograd.trees import tensors_in
from infinity.engine.build import Assembly
from infinity.engine.layerwise.limits import LayerwiseLimits
from infinity.engine.memory.advice import LayerwiseAdvice
from infinity.engine.memory.device_memory import DeviceBudget
from infinity.engine.refused_trainers import refuse_trainers
from infinity.engine.refused_wrappers import refuse_optimizers
from infinity.engine.steps.averaging import Averaging
from infinity.engine.steps.backward_passes import BackwardPasses
from infinity.engine.steps.chunk_updates import ChunkUpdates
from infinity.engine.steps.completed_gradients import CompletedGradients
from infinity.engine.steps.expected_gradients import ExpectedGradients
from infinity.engine.steps.forward_passes import ForwardPasses
from infinity.engine.steps.gradient_norm import GradientNorm
from infinity.engine.steps.gradient_reductions import GradientReductions
from infinity.engine.steps.joined_optimizers import JoinedOptimizers
from infinity.engine.steps.optimizer_calls import OptimizerCalls
from infinity.engine.steps.outside_gradients import AutogradGrad
from infinity.engine.steps.param_grads import ParamGrads
from infinity.engine.steps.passes_per_step import PassesPerStep
from infinity.engine.steps.plan_follower import PlanFollower
from infinity.engine.steps.refusals import FAILED, HALF_LOADED, WEIGHTS_OF_TWO_STEPS, half_updated, refuse_modes, refuse_thawed
from infinity.engine.steps.skipped_steps import skip
from infinity.engine.steps.step_state import BETWEEN, LAYERWISE, Damage, StepKind, StepState
from infinity.errors import UsageError
from infinity.model.autograd_state import autograd_runs
from infinity.model.parameters import owner_of
from infinity.optim.loss_scale import Scaler
from infinity.plan.placement import look_ahead
from infinity.system import interrupts
from infinity.system.events import Events
from infinity.system.interrupts import uninterrupted
from infinity.system.ranks import Ranks
from infinity.system.slow_steps import Pace
from infinity.tiers.arithmetic import Hyper
from infinity.tiers.chunk_state import ChunkState

Turn = contextlib.AbstractContextManager
_EPS_OF_CLIPPING = 1e-6  # as torch.nn.utils.clip_grad_norm_


class StepCycle:
    """The steps of an engine that has started. `attach` gives the optimizer.

    turn: the lock under which another thread saves or loads. averaging: of the weights. state: phase of the step. backward: backward passes.
    """

    def __init__(self, config: Config, ranks: Ranks, events: Events, parts: Assembly, margin: DeviceBudget, turn: Turn, averaging: Averaging):
        self.config, self.ranks, self.events, self.device_budget, self.turn, self.averaging = config, ranks, events, margin, turn, averaging
        self.registry, self.records, self.weights, self.course = parts.registry, parts.records, parts.weights, parts.course
        self.gradients, self.updater = parts.gradients, parts.updater
        self.attach(JoinedOptimizers(), None)
        self.state = StepState(self.course)
        self.forward = ForwardPasses()
        self.passes = PassesPerStep(may_be_several=not parts.placement.only_by_layer)
        self.autograd_grad = AutogradGrad()
        self.norm = GradientNorm(self.gradients, self.updater, ranks, events)
        self.updates = ChunkUpdates(self.weights, self.gradients, self.updater, self.norm)
        self.reductions = GradientReductions(self.gradients, self.updates, self.course)
        slots_ahead, states_ahead = look_ahead(parts.placement)
        ahead = {"slots_ahead": slots_ahead, "states_ahead": states_ahead}
        self.follower = PlanFollower(self.weights, self.updates, self.reductions, keep=config.residency == "auto", **ahead)
        self.calls = Calls(self.follower, margin, parts)
        self._frozen = [state for state in self.registry.params if not state.trainable]
        self._trainable = [state for state in self.registry.params if state.trainable]
        self.param_grads = ParamGrads(self._trainable, self._norm_of_all, ranks)
        self.expected = ExpectedGradients(self.registry.params)
        self.completed = CompletedGradients(self.course, self.updater, self.registry, ranks)
        who = ranks.label
        self.pace, self.advice, self.layerwise_limits = Pace(events, who), LayerwiseAdvice(events, who), LayerwiseLimits(who)
        self.backward = BackwardPasses(self)

    def attach(self, optimizers: JoinedOptimizers, scaler: Scaler | None) -> None:
        """Give the optimizers of all later steps. scaler: the loss scale for fp16."""
        self.optimizers, self.scaler = optimizers, scaler
        self.optimizer_calls = OptimizerCalls(optimizers)

    def close(self) -> None:
        """End the cycle. No call may follow."""
        self.state.close()
        self.pace.end()
        self.param_grads.close()

    @property
    def has_stepped(self) -> bool:
        return self.state.num_steps > 0

    @property
    def num_skipped(self) -> int:
        """Steps whose gradients were not finite."""
        return self.state.num_skipped

    @property
    def has_trained(self) -> bool:
        """Whether this step has gradients, or any step has ended, including steps before a checkpoint that was loaded."""
        if self.state.has_gradients or self.state.num_backwards or self.has_stepped:
            return True
        return any(chunk.gradient.has_arrived or any(chunk.steps.values()) for chunk in self.registry.chunks)

    @property
    def torn(self) -> bool:
        """Whether weights are of two steps, because a backward pass that had begun to update has raised."""
        return self.state.damage is Damage.WEIGHTS

    # Forward passes.

    def begin_forward(self, model: nn.Module, inputs: object) -> None:
        """An outermost module of the model is called. inputs: all arguments of the call."""
        with self.turn:  # wait until another thread has saved or loaded. A later save or load finds this pass by its thread
            pass
        self.check_open()
        interrupts.guard()
        refuse_modes(self.weights.device.type, self.registry.layout.main_dtype)
        self.raise_failure()
        self.end_interrupted()
        self.refuse_half_updated("a forward pass")
        self.optimizer_calls.refuse()
        if not autograd_runs():
            self.backward.forget_end()
            self.clear_gradients()
            refuse_thawed(self._frozen)
            self._count_forward()
        if not self.state.in_backward and self.optimizers and torch.is_grad_enabled():
            self.begin_step_of(StepKind.BACKWARD)
        if self.calls.activations is not None:
            self.calls.activations.keep_on_device(model.buffers())
        num_together = self.backward.micro_batches.num_together
        shapes = (*(tuple(tensor.shape) for tensor in tensors_in(inputs)), *([(num_together,)] if num_together > 1 else []))
        self.device_budget.begin_forward(shapes, self.calls.recording)

    def _count_forward(self) -> None:
        trains = torch.is_grad_enabled() and any(state.param.requires_grad for state in self._trainable)
        self.forward.count(trains)
        if trains:
            self.averaging.refuse_exchanged("a forward pass that builds a graph", "Use torch.no_grad() there, or train after the block")
        if trains and self.optimizers and not self.state.num_backwards:
            self.pace.begin()
            self.advice.begin()
        if trains and not self.forward.are_checked:
            self.refuse_others()
            self.forward.note_checked()
        if not self.optimizers or (torch.is_grad_enabled() and not (self.forward.num_training or self.state.num_backwards)):
            self._begin_open_forward()

    def _begin_open_forward(self) -> None:
        """A forward pass that no step() will end; see [Note: backward passes that only pass through]."""
        self.calls.recording = True
        if self.forward.begin_open() and self.course.trace:
            self.follower.adopt((), (), anew=not self.optimizers and self.device_budget.redivide(by_step=False))
            self.follower.begin_step()

    def begin_step_of(self, kind: StepKind) -> None:
        """A pass of this kind begins. After a step of the other kind, the trace, the expected gradients and the plan do not fit."""
        if self.state.num_backwards:
            return
        if self.state.kind not in (None, kind):
            self.expected.forget()
            self.follower.forget()
        self.state.set_kind(kind)
        if not self.course.trace and self.course.has_begun:
            self.follower.begin_step()  # evaluations have run since the last step

    def refuse_others(self) -> None:
        """Raise UsageError if a trainer of another library, or an optimizer of torch, has the engine's parameters."""
        refuse_trainers(owner_of(self.registry.params[0].param))
        if not self.optimizers:
            refuse_optimizers([(state.name, state.param) for state in self._trainable if state.param.requires_grad])

    # step() and zero_grad().

    def step(self) -> None:
        """End a step, also one without a gradient. `take_gradients` comes before."""
        self.require_gradients("step()")
        factor = self.param_grads.agreed_factor()
        if factor != 1.0 or self.needs_norm:
            self.updates.refuse_late(self.optimizers)
        hyper = self.hyper(factor)
        self.updates.refuse_changed(hyper)
        ready = self.updates.pending()
        if not self.updater.deferred:
            ready.sort(key=lambda chunk: chunk.gradient.number)  # in the order in which the gradients came
            self.device_budget.note_waited(ready)
        if self.needs_norm and not self._clip(ready, hyper):
            return skip(self, ready)
        ready = self.updates.leave_out(ready, self.optimizer_calls.skipped_groups())
        is_divided = None
        if self.updater.deferred:
            ready.sort(key=lambda chunk: self.course.next_use(chunk.span.index))  # in the order of the next forward pass
            is_divided = self.device_budget.redivide(by_step=True)  # before the updates: the device updates records that come there
        self.updates.begin_or_announce(ready, hyper)
        self.averaging.end_step()
        self.end_step(is_divided=is_divided)

    def _clip(self, ready: list[ChunkState], hyper: Hyper) -> bool:
        """Compute the norm, and lower `hyper.grad_scale` accordingly. Returns False if the step must be skipped."""
        limit = self.optimizers.max_grad_norm
        norm = self.norm.of(ready) * abs(hyper.grad_scale)  # the program may have multiplied gradients by a negative factor
        overflow = self.config.watches_nonfinite and not math.isfinite(norm)
        if self.scaler is not None:
            self.scaler.update(overflow)
        if limit is not None:
            self.optimizers.note_norm(norm)
        if limit is not None and not overflow:
            clip = limit / (norm + _EPS_OF_CLIPPING)
            hyper.grad_scale *= 1.0 if clip >= 1 else clip  # with a NaN as norm every gradient becomes NaN, as in PyTorch
        return not overflow

    def require_gradients(self, what: str) -> None:
        """Raise UsageError unless a backward pass is over and none has raised. `what` is the call that needs gradients."""
        if self.state.in_backward:
            self.backward.abandon()
        self._refuse_half_loaded()
        self.averaging.refuse_exchanged(what)
        if self.torn:
            raise UsageError(WEIGHTS_OF_TWO_STEPS)
        if self.state.damage is Damage.GRADIENTS:
            raise UsageError(f"{what} {FAILED}")
        if self.state.phase is not BETWEEN:
            raise UsageError(f"{what} without a finished backward pass since the last step. Call loss.backward() first")
        self.calls.refuse_running(what)
        self.raise_failure()

    @property
    def needs_norm(self) -> bool:
        return self.optimizers.max_grad_norm is not None or self.config.watches_nonfinite

    @uninterrupted
    @torch.no_grad()
    def _norm_of_all(self) -> float:
        """The norm of all gradients since the last step. All ranks must make this call."""
        self.require_gradients("the norm of all gradients")
        if self.optimizer_calls.wait:
            raise UsageError("gradients are clipped, or asked for their norm, after step() of an optimizer. Do this before the first step()")
        self.updates.refuse_late(self.optimizers)
        return self.norm.of(self.updates.pending()) * self.hyper().grad_scale

    def hyper(self, factor: float = 1.0) -> Hyper:
        """Hyper-parameters of the current step. factor: the number by which the program has multiplied gradients."""
        scale = self.scaler.scale if self.scaler is not None else self.ranks.world
        return Hyper(self.optimizers.rules, self.optimizer_calls.snapshot(), factor / scale, self.averaging.next_step)

    def end_step(self, *, is_divided: bool | None = None) -> None:
        """End a step. is_divided: whether the division of device memory has changed. None: the division comes here."""
        completed = self.completed.for_plan(self.backward.num_passes)
        self.follower.adopt(*completed, anew=self.device_budget.redivide(by_step=True) if is_divided is None else is_divided)
        self.state.end_step()
        self.optimizer_calls.end_step()
        self._forget_passes()
        self.param_grads.end_step()
        self.events.step_done()
        self.pace.step_done()
        self.advice.step_done()
        self.follower.begin_step()

    def zero_grad(self) -> None:
        """Drop all gradients since the last step. Raises UsageError if updates have begun with them."""
        self.calls.end_interrupted()
        self.calls.drain_dropped()  # handles of a failed step
        self.refuse_early()  # before anything is dropped
        self.param_grads.drop()
        self.clear_gradients()
        self.optimizer_calls.forget_all()
        self.updates.drop_pending()
        self.course.trace.clear()
        self.state.forget_gradients()
        self._forget_passes()

    def refuse_early(self) -> None:
        """Raise UsageError if updates have begun with the gradients that zero_grad() is to drop. First end a backward pass that has raised."""
        if self.state.in_backward:
            self.backward.abandon()
        if self.updates.are_early and not self.torn:
            raise UsageError(
                "zero_grad() between a backward pass that has begun to update and its step(). Call it after step(), or use "
                "update='deferred'."
            )

    def _forget_passes(self) -> None:
        self.updates.reset()
        self.passes.end_step()
        self.completed.reset()

    # Refusals.

    def raise_failure(self) -> None:
        """Raise the error of a lane, if there was one, or of a load that has failed."""
        self._refuse_half_loaded()
        self.records.failure.check()

    def refuse_half_updated(self, what: str, *, change: bool = False) -> None:
        """Raise UsageError between a backward pass that updates and step(): weights are of two steps then.

        change: the call changes weights. Such a call is refused as soon as an update may begin, whatever tier the weights are in.
        """
        self._refuse_half_loaded()
        if change:
            self.averaging.refuse_exchanged(what)
        updates = (change and self.updates.early_hyper is not None) or self.updates.are_early
        if not self.state.in_backward and not self.torn and updates:
            raise UsageError(half_updated(what))

    def _refuse_half_loaded(self) -> None:
        if self.state.damage is Damage.RECORDS:
            raise UsageError(HALF_LOADED)

    def check_gradients(self) -> None:
        """Drop all gradients if model.zero_grad() has dropped them. Raises UsageError if only some are dropped, or too late."""
        if self.param_grads.were_dropped():
            self.optimizer_calls.refuse()
            self.zero_grad()

    def clear_gradients(self) -> None:
        """Take gradients out of `param.grad`, so that autograd adds to none, and torch.compile sees none."""
        self.check_gradients()
        self.param_grads.clear()

    def check_open(self) -> None:
        if self.state.is_closed:
            raise UsageError("the engine is closed")

    def end_interrupted(self) -> None:
        """End the calls of modules and the backward pass that an interrupt or an error has ended in this thread."""
        self.calls.end_interrupted()
        if self.state.in_backward and self.state.phase is not LAYERWISE and not autograd_runs():
            self.backward.abandon()

    # Calls from loading.

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """All records are replaced inside the block. If the block raises, the engine refuses to train until another load succeeds."""
        self.state.begin_load()
        yield
        self.state.end_load()
