"""From one step to the next: decides when gradients, updates and plans are due, and what may not happen in between.

Depends on: the parts of an engine, and the optimizer. Must not know how bytes move, what a kernel computes, what hooks a module
has, or how an engine starts and ends. Over 500 lines because the rules for what may happen between forward, backward and step() hang
together: each guards the state that another one changes.
"""

# [Note: backward passes that only pass through]
# A frozen model hands gradients on to what it was given: a critic, a teacher, a base under adapters that are not the engine's. So a
# backward pass belongs to a step only once it brings a gradient to one of the engine's parameters, on any rank; before that, it is taken to
# if a forward pass since the last such one had anything to train. One that brings none needs no optimizer, counts as none of
# `accumulation_steps`, and a step() after it changes nothing, as in plain PyTorch. With no step() to end it, a cycle of the pipeline ends
# there, or where a forward pass has built no graph.

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.memory.advice import LayerwiseAdvice
from infinity.engine.build import Assembly
from infinity.engine.autograd.module_calls import Calls
from infinity.engine.steps.completed_gradients import Completions
from infinity.engine.steps.due_updates import Due
from infinity.engine.steps.expected_gradients import Expectations
from infinity.engine.steps.plan_follower import Follower
from infinity.engine.refused_wrappers import refuse_optimizers
from infinity.engine.memory.device_memory import DeviceBudget
from infinity.engine.steps.outside_gradients import Looks, bring, is_returned
from infinity.engine.steps.param_grads import NOT_DROPPED, ParamGrads, drop_half_arrived
from infinity.engine.steps.refusals import SCALED, no_more_passes, no_optimizer, refuse_by_layer, refuse_modes, refuse_thawed, sums_in_hook
from infinity.engine.steps.skipped_steps import skip
from infinity.engine.refused_trainers import refuse_trainers
from infinity.engine.autograd.trees import tensors_in
from infinity.engine.layerwise.limits import LayerwiseLimits
from infinity.engine.steps.accumulation import Window
from infinity.errors import UsageError
from infinity.model.parameters import owner_of
from infinity.optim.loss_scale import Scaler
from infinity.plan.placement import look_ahead
from infinity.plan.schedule import Moment, moment
from infinity.system import interrupts
from infinity.system.events import Events
from infinity.system.interrupts import uninterrupted
from infinity.system.slow_steps import Pace
from infinity.system.ranks import Ranks
from infinity.tiers.arithmetic import Hyper
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.parameter_state import ParameterState

_MANY_GRAPHS = -2  # instead of one graph's number: a backward pass of `one_backward`
_TORN = "a backward pass after one that failed half-way and had begun to update; see step()"
_EPS_OF_CLIPPING = 1e-6  # as torch.nn.utils.clip_grad_norm_
_MOST_FORWARDS = 16  # in a cycle that no step() ends: graphs may be built that never go backward


class Cycle:
    """The steps of an engine that has started. turn, optimizer and, for fp16, scaler are given after construction."""

    turn: contextlib.AbstractContextManager

    def __init__(self, config: Config, ranks: Ranks, events: Events, parts: Assembly, device_budget: DeviceBudget):
        self.config = config
        self.ranks = ranks
        self.events = events
        self.registry, self.records, self.weights, self.course = parts.registry, parts.records, parts.weights, parts.course
        self.gradients, self.updater = parts.gradients, parts.updater
        all_on_device = all(chunk.on_device for chunk in self.registry.chunks if chunk.trainable)  # these homes never change
        self.due = Due(self.weights, self.gradients, self.updater, all_on_device=all_on_device)
        slots_ahead, states_ahead = look_ahead(parts.placement)
        self.follower = Follower(
            self.weights, self.due, keep=config.residency == "auto", slots_ahead=slots_ahead, states_ahead=states_ahead
        )
        self.device_budget = device_budget
        self.calls = Calls(self.follower, device_budget, parts)
        self.optimizer = None
        self.scaler: Scaler | None = None
        self.closed = self.has_stepped = False
        self.half_loaded = False  # a checkpoint's records are not all there
        self.num_skipped = 0  # steps whose gradients were not finite
        self._awaits_end = False  # a backward pass under way will call end_backward
        self.num_forwards = 0  # that built a graph and had something to train, since the last backward pass that counts
        self._num_passing = 0  # forward passes of a cycle of the pipeline that no step() ends
        self._looked = False  # for optimizers of torch's own and trainers of other libraries, before the first forward pass that trains
        self._cycle_is_over = True  # the next such pass begins another
        self.expectations = Expectations(self.registry.params)
        self.by_layer: bool | None = None  # whether the step under way, or the last one, is of `one_backward`
        self.num_together = 1  # micro-batches that are on the device at once
        self._withhold: Callable[[ParameterState, torch.Tensor], bool] = _withhold_nothing
        self.looks = Looks()
        self._frozen = [state for state in self.registry.params if not state.trainable]
        self._trainable = [state for state in self.registry.params if state.trainable]
        self.window = Window()
        self.param_grads = ParamGrads(self._trainable, self._norm, ranks)
        self.completions = Completions(self.course, self.updater, self.registry, ranks)
        who = f"{ranks.name}, " if ranks.world > 1 else ""
        self.pace, self.advice, self.layerwise_limits = Pace(events, who), LayerwiseAdvice(events, who), LayerwiseLimits(who)
        self._reset()
        self.first_step = True

    def close(self) -> None:
        """Nothing may follow."""
        self.closed = True
        self.pace.end()
        self.param_grads.close()

    @property
    def has_trained(self) -> bool:
        """Whether the step under way has gradients, or there was a step, be it before a checkpoint that was loaded."""
        return self.came or self.num_backwards > 0 or self.has_stepped or any(any(chunk.steps.values()) for chunk in self.registry.chunks)

    @property
    def backward_task(self) -> int | None:
        """Autograd's number of the backward pass under way, if it is the engine's."""
        return self.course.backward_task

    # What the hooks call.

    def begin_forward(self, model: nn.Module, inputs: object) -> None:
        """An outermost module of the model is called; inputs: whatever it is called with."""
        with self.turn:  # after what another thread saves or loads; that sees by the hooks' thread that this one has begun
            pass
        self._check_open()
        interrupts.guard()
        refuse_modes(self.weights.device.type, self.registry.layout.main_dtype)
        self.raise_failure()
        self.end_interrupted()
        self.refuse_half_updated("a forward pass")
        if not in_backward():
            self._awaits_end = False  # of a backward pass that failed
            self._clear_gradients()
            refuse_thawed(self._frozen)
            trains = torch.is_grad_enabled() and any(state.param.requires_grad for state in self._trainable)
            self.num_forwards += trains
            if trains and self.optimizer is not None and not self.num_backwards:
                self.pace.begin()
                self.advice.begin()
            if trains and not self._looked:
                self._refuse_others()
                self._looked = True
            if self.optimizer is None or (torch.is_grad_enabled() and not (self.num_forwards or self.num_backwards)):
                self._begin_passing()
        if self.course.backward_task is None and self.optimizer is not None and torch.is_grad_enabled():
            self._begin_step_of(by_layer=False)
        if self.calls.activations is not None:
            self.calls.activations.begin_forward(model.buffers())
        shapes = (*(tuple(tensor.shape) for tensor in tensors_in(inputs)), *([(self.num_together,)] if self.num_together > 1 else []))
        self.device_budget.begin_forward(shapes, self.calls.recording)

    def _begin_passing(self) -> None:
        """A forward pass of a cycle that no step() will end; see [Note: backward passes that only pass through]."""
        self.calls.recording = True
        self._num_passing += 1
        if self._cycle_is_over or self._num_passing > _MOST_FORWARDS:
            if self.course.trace:
                self.follower.adopt((), (), anew=self.optimizer is None and self.device_budget.redivide(by_step=False))
                self.follower.begin_step()
            self._cycle_is_over, self._num_passing = True, 1

    def graph_built(self) -> None:
        """The outermost forward pass returned something that has a gradient: its backward pass belongs to the cycle."""
        self._cycle_is_over = False

    def _begin_step_of(self, *, by_layer: bool) -> None:
        """An ordinary step and one by layer have nothing to learn from each other: trace, gradients, plan."""
        if self.num_backwards:
            return
        if self.by_layer is not None and self.by_layer != by_layer:
            self.first_step = True
            self.follower.forget()
        self.by_layer = by_layer
        if not self.course.trace and self.course.has_begun:
            self.follower.begin_step()  # evaluations have run since the last step

    def begin_backward(self) -> None:
        """The gradient of an outermost output is known; once a backward pass."""
        if self.course.backward_task is not None:
            return
        self._clear_gradients()
        self._check_open()
        self.await_end()
        self.course.backward_task = torch._C._current_graph_task_id()
        self.calls.recording = True  # an evaluation may have run since the forward pass
        self.window.begin_pass(self.num_backwards)
        self.trains, self.came = self.num_forwards > 0 and not self.looks.are_under_way and self._why_not_train() is None, False
        if self.trains:
            self._expect_gradients()
        else:
            self.expectations.expect_nothing()

    def _why_not_train(self, state: ParameterState | None = None) -> str | None:
        """What is wrong with gradients now, if anything is, or with this parameter's."""
        if self.optimizer is None:
            return no_optimizer(state.name if state else "a parameter")
        if self.torn:
            return _TORN
        if self.param_grads.are_of_last_step:
            return NOT_DROPPED
        if self.param_grads.factor != 1.0:
            return SCALED
        if self.num_backwards >= self.num_passes:
            return no_more_passes(self.num_backwards, self.num_passes, by_layer=self.by_layer)
        return None

    def _refuse_others(self) -> None:
        refuse_trainers(owner_of(self.registry.params[0].param))
        if self.optimizer is None:
            refuse_optimizers([(state.name, state.param) for state in self._trainable if state.param.requires_grad])

    def await_end(self) -> None:
        """Have end_backward called when the backward pass under way is over, ours or not: of nested ones that from which this is called
        first."""
        if self.course.backward_task is None and not self._awaits_end:
            self._awaits_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    @property
    def num_passes(self) -> int:
        """Backward passes that make the step under way."""
        return 1 if self.by_layer else self.window.num_passes(self.optimizer.accumulation_steps)

    def _expect_gradients(self) -> None:
        last = self.num_backwards + 1 == self.num_passes
        in_backward = moment(deferred=self.updater.deferred, on_device=False, in_memory=False) is Moment.GRADIENT
        self.due.early_hyper = self._hyper() if last and in_backward and not self._needs_norm else None
        self.due.sums_squares = last and (self._needs_norm or self.param_grads.norm_was_asked)
        later = self.course.backward_task == _MANY_GRAPHS  # forward passes are still to come
        self.expectations.begin_pass(self.num_backwards, self.num_forwards, known=not (self.first_step or later), later=later)
        for chunk in self.registry.chunks:
            chunk.gradient.expect(sum(self.registry.params[param].expected > 0 for param in chunk.whole_pieces))
            self.updater.expect(chunk, self.due.early_hyper is not None and chunk.trainable and chunk.gradient.missing > 0)

    def expect_gradient(self, state: ParameterState) -> None:
        """Autograd is about to add to `param.grad`, or to return the gradient to the program."""
        if self.looks.are_under_way or ((self.scaler or not self.trains) and is_returned(state.param)):
            return self.looks.refuse_scaled(self.scaler is not None)
        if self.course.backward_task is None:
            if self.scaler is not None:
                raise UsageError(
                    f"{state.name} has a gradient that comes from no output of the model, so it is not loss-scaled, as dtype='fp16' "
                    f"needs it. Return what the loss is made of as tensors, in tuples, lists, dicts or dataclasses; or use bf16."
                )
            self.begin_backward()
        if not self.trains:
            if (refusal := self._why_not_train(state)) is not None:
                self.course.backward_task, self._awaits_end = None, False  # nothing of the step has changed
                self.param_grads.show()
                self.calls.release_all()
                self.weights.drain_dropped()
                self._refuse_others()
                raise UsageError(refusal)
            self.trains = True
            self._expect_gradients()
        if (self.num_backwards or state.arrivals) and state.has_gradient_hooks:
            raise UsageError(sums_in_hook(state.name))

    def gradient(self, state: ParameterState, grad: torch.Tensor) -> None:
        """A parameter's gradient of this backward pass, or of one region of it."""
        self.expect_gradient(state)
        self.arrive(state, grad)

    def arrive(self, state: ParameterState, grad: torch.Tensor) -> None:
        """A gradient of a parameter is there."""
        self.came = True
        if state.group is None:
            return
        chunks = self.registry.chunks_of(state)
        for chunk in chunks:
            if chunk.update.is_early or (self.ranks.world > 1 and chunk in self.due.waiting):  # other ranks may not have waited
                raise UsageError(
                    f"{state.name} received a gradient after it was updated in this backward pass, which the last step did "
                    f"not show. Use update='deferred' for a model whose gradients come in changing numbers."
                )
            self.updater.finish(chunk)
        if self._withhold(state, grad):
            return
        self.gradients.arrive(state, grad)
        del grad
        state.arrivals += 1
        if state.arrivals == state.expected:
            for chunk in chunks:
                if chunk.gradient.complete_one():  # no op of this pass wants its weights again
                    self.weights.expect_no_copy(chunk)
                    self.completions.note(self.num_backwards, chunk)
                    if self.ranks.world == 1:
                        self.due.gradient_ready(chunk)
        elif state.arrivals > state.expected:
            for chunk in chunks:
                chunk.gradient.exceed()
        self.due.update_waiting()
        self.gradients.wait_for_room()

    @uninterrupted
    def end_backward(self) -> None:
        """The backward pass has succeeded."""
        self._awaits_end = False
        if self.course.backward_task is None:
            return
        self.course.backward_task = None
        self.gradients.hurry()
        self.calls.release_all()
        self.calls.drain_dropped()
        self.end_pass()
        if not self.came:
            self.due.expect_no_update()
            return self.param_grads.show()
        number = self.num_backwards
        self.completions.end_pass(number)
        self.num_backwards += 1
        self.num_forwards = 0
        self.param_grads.depart(self.expectations.end_pass(number))
        self.due.update_waiting()
        self.advice.pass_done()
        if self.num_backwards < self.num_passes:
            self.device_budget.pass_done()

    def end_pass(self) -> None:
        """No more gradients come of a pass; every rank must call it."""
        for chunk in self.reduce_all():
            self.due.sum_squares(chunk)
        self._cycle_is_over, self.has_passed = True, True

    @uninterrupted
    def reduce_all(self) -> list[ChunkState]:
        """Reduce whatever gradients any rank has gathered since the last reduction; every rank must call it."""
        if self.ranks.world == 1:
            return []
        self.came, found = self.due.reduce_all(self.came)
        return found

    # What accumulation by layer calls.

    @contextlib.contextmanager
    def one_backward(self, *, num_together: int = 1, withhold: Callable | None = None):
        """All backward passes of a step are one inside the block, however many graphs it runs; `complete` says when a chunk has all
        gradients. withhold(parameter, gradient): whether one is to come once more, with what is still missing in it."""
        self._check_open()
        refuse_by_layer(runs=self.course.backward_task is not None, failed=self.failed, begun=self.num_backwards > 0)
        self._clear_gradients()
        if (refusal := self._why_not_train()) is not None:
            raise UsageError(refusal)
        self._begin_step_of(by_layer=True)
        self.pace.begin()
        self.course.backward_task, self.trains, self.came = _MANY_GRAPHS, True, True
        self.num_together, self._withhold = num_together, withhold or _withhold_nothing
        self._expect_gradients()
        try:
            yield
        except BaseException:
            self.abandon_backward()
            raise
        finally:
            self.num_together, self._withhold = 1, _withhold_nothing
        self.end_backward()

    def complete(self, chunks: list[ChunkState]) -> None:
        """No graph that is left brings gradients of these."""
        for chunk in chunks:
            chunk.gradient.expect(0)
            if chunk.gradient.job is not None:
                self.weights.expect_no_copy(chunk)
                if self.ranks.world == 1:  # else the plan would reduce what each micro-batch has reduced
                    self.completions.note(self.num_backwards, chunk)
                self.due.gradient_ready(chunk)
        self.due.update_waiting()

    # What loading and the optimizer call.

    @contextlib.contextmanager
    def replacing(self):
        """A checkpoint's records are not all there until the block has ended well."""
        self.half_loaded = True
        yield
        self.half_loaded = False

    def step(self) -> None:
        """Ends a step; called without gradients."""
        self.check_gradients()
        if given := self.param_grads.take_given():
            bring(self, given)
        self.require_gradients("step()")
        if (factor := self.param_grads.agreed_factor()) != 1.0 or self._needs_norm:
            self.due.refuse_late(self.optimizer)
        hyper = self._hyper(factor)
        if self.due.early_hyper is not None and self.due.early_hyper.groups != hyper.groups:
            raise UsageError(
                "hyper-parameters changed between the backward pass, which has begun to update, and step(). Change them after "
                "step(), or use update='deferred'."
            )
        ready = self.due.pending()
        if not self.updater.deferred:
            ready.sort(key=lambda chunk: chunk.gradient.number)  # in the order in which their gradients came
        if self._needs_norm:
            norm = self.due.norm(ready) * abs(hyper.grad_scale)  # a factor may be negative
            overflow = self.config.watches_nonfinite and not math.isfinite(norm)
            if self.scaler is not None:
                self.scaler.update(overflow)
            if self.optimizer.max_grad_norm is not None:
                self.optimizer.grad_norm = norm
            if overflow:
                self.num_skipped += 1
                skip(self, ready)
                return
            if self.optimizer.max_grad_norm is not None:
                clip = self.optimizer.max_grad_norm / (norm + _EPS_OF_CLIPPING)
                hyper.grad_scale *= 1.0 if clip >= 1 else clip  # a norm that is no number makes every gradient none, as in PyTorch
        if self.updater.deferred:
            ready.sort(key=lambda chunk: self.course.next_use(chunk.span.index))  # the next pass wants them in this order
        for chunk in ready:
            if self.updater.moment(chunk) is Moment.FETCH:
                self.due.announce(chunk, hyper)
            else:
                self.gradients.wait_for(chunk)
                self.due.begin_update(chunk, hyper)
        self.due.announce_put_off(hyper)
        self.end_step()

    def require_gradients(self, what: str) -> None:
        """Those of whole backward passes since the last step, between two of which this is asked for."""
        if self.course.backward_task is not None:
            self.abandon_backward()
        if self.torn:
            raise UsageError(
                "the last backward pass failed after some chunks had been updated: weights are of two steps. Start again from "
                "a checkpoint; with update='deferred' a failed backward pass can be repeated."
            )
        if self.failed:
            raise UsageError(f"{what} after a backward pass that raised; call zero_grad() and run it again")
        if not (self.num_backwards or self.has_passed):
            raise UsageError(f"{what} without a finished backward pass since the last step")
        self.calls.refuse_running(what)
        self.raise_failure()

    @property
    def _needs_norm(self) -> bool:
        return self.optimizer.max_grad_norm is not None or self.config.watches_nonfinite

    @uninterrupted
    @torch.no_grad()
    def _norm(self) -> float:
        """Of all gradients that have come since the last step; every rank must call it."""
        self.require_gradients("the norm of all gradients")
        self.due.refuse_late(self.optimizer)
        return self.due.norm(self.due.pending()) * self._hyper().grad_scale

    def end_step(self) -> None:
        completions = self.completions.for_plan(self.num_passes)
        self.follower.adopt(*completions, anew=self.device_budget.redivide(by_step=True))
        self._reset()
        self.param_grads.end_step()
        self.has_stepped = True
        self.events.step_done()
        self.pace.step_done()
        self.advice.step_done()
        self.follower.begin_step()

    def zero_grad(self) -> None:
        self.param_grads.drop()
        self.calls.end_interrupted()
        self.calls.drain_dropped()  # by a step that failed
        self._clear_gradients()
        if self.course.backward_task is not None:
            self.abandon_backward()
        if any(chunk.update.is_early for chunk in self.registry.chunks) and not self.torn:
            raise UsageError(
                "zero_grad() between a backward pass that has begun to update and its step(). Call it after step(), or use "
                "update='deferred'."
            )
        self.due.drop_pending()
        self.course.trace.clear()
        self._reset(torn=self.torn)

    # What is refused.

    def raise_failure(self) -> None:
        """Raise what went wrong in a lane, if anything did."""
        self._refuse_half_loaded()
        self.records.failure.check()

    def refuse_half_updated(self, what: str, *, change: bool = False) -> None:
        """Raise UsageError between a backward pass that updates and step(): weights are of two steps then. change: those that stay on
        the device are not, yet; but what a program may change then must not depend on where they are."""
        self._refuse_half_loaded()
        updates = change and self.due.early_hyper is not None or any(chunk.update.is_early for chunk in self.registry.chunks)
        if self.course.backward_task is None and not self.torn and updates:
            raise UsageError(
                f"{what} between a backward pass that has begun to update and its step(): some weights are new already. Call "
                f"step() first, or use update='deferred'. Where several backward passes make a step, declare it: "
                f"infinity.AdamW(..., accumulation_steps=...)."
            )

    def _refuse_half_loaded(self) -> None:
        if self.half_loaded:
            raise UsageError("the last infinity.load failed half-way: weights are of two states. Load one that is whole.")

    def check_gradients(self) -> None:
        """Drop what model.zero_grad() did; raises UsageError where it dropped some only, or too late."""
        if self.param_grads.were_dropped():
            self.zero_grad()

    def _clear_gradients(self) -> None:
        """Autograd is to find no gradient to add to, and torch.compile none to look at."""
        self.check_gradients()
        self.param_grads.clear()

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("the engine is closed")

    # Steps and passes.

    def _hyper(self, factor: float = 1.0) -> Hyper:
        """factor: by which the program has multiplied gradients."""
        scale = self.scaler.scale if self.scaler is not None else self.ranks.world
        return Hyper(self.optimizer.rule, self.optimizer.snapshot(), factor / scale)

    def end_interrupted(self) -> None:
        """Calls of modules and backward passes that an interrupt or an error has ended, in this thread, are over."""
        self.calls.end_interrupted()
        if self.course.backward_task not in (None, _MANY_GRAPHS) and not in_backward():
            self.abandon_backward()

    @uninterrupted
    def abandon_backward(self) -> None:
        """The last backward pass raised."""
        self.course.backward_task, self._awaits_end = None, False
        self.failed = True
        drop_half_arrived(self.registry.params)
        self.param_grads.show()
        self.gradients.hurry()
        self.calls.release_all()
        self.torn = self.torn or any(chunk.update.is_early for chunk in self.registry.chunks)

    def _reset(self, torn: bool = False) -> None:
        """Nothing has happened since the last step."""
        self.course.backward_task = None
        self.num_backwards = 0  # that brought gradients
        self.trains = False  # the backward pass under way, or the last one, is taken to be one of the step
        self.came = False  # it has brought a gradient: until it is over on this rank, then on any
        self.has_passed = False  # a backward pass is over
        self.due.reset()
        self.window.end_step()
        self.torn = torn
        self.failed = False  # a backward pass raised
        self.completions.reset()
        self.first_step = False


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _withhold_nothing(state: ParameterState, grad: torch.Tensor) -> bool:
    return False
