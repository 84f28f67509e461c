"""Backward passes: the gradients of a pass, the way of an arriving gradient, and the end of a pass, with or without an error.

Knows chunks, the phase of a step and the parts of an engine. Must not know how bytes move, hooks of modules, or step().
"""

# [Note: backward passes that only pass through]
# A frozen model only passes gradients on to its inputs: a critic, a teacher, a base under adapters that are in no engine. So a backward pass
# belongs to a step only once any rank has a gradient of a parameter of the engine. Before, the engine expects a pass to belong to the step if
# a forward pass with trainable parameters has run since the last backward pass with gradients. A pass without a gradient needs no optimizer,
# and does not count for `accumulation_steps`. A step() after such a pass changes nothing, as in plain PyTorch. No step() ends the plan of such
# passes. The plan ends with the backward pass, or with a forward pass that has built no graph.

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch

from infinity.engine.steps.outside_gradients import is_returned
from infinity.engine.steps.param_grads import NOT_DROPPED, drop_half_arrived
from infinity.engine.steps.refusals import (
    NO_PLACE_FOR_SUMS,
    SCALED,
    TORN,
    late_gradient,
    no_more_passes,
    no_optimizer,
    not_scaled,
    refuse_by_layer,
    sums_in_hook,
)
from infinity.engine.steps.step_state import EXPECTING, LAYERWISE, PASSING, RECEIVING, Damage, StepKind
from infinity.errors import UsageError
from infinity.plan.schedule import Moment, moment
from infinity.system.interrupts import uninterrupted
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.parameter_state import ParameterState


def _withhold_nothing(state: ParameterState, grad: torch.Tensor) -> bool:
    return False


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of infinity.accumulate.

    num_together: micro-batches for which the device must have room at once. withhold(parameter, gradient): whether this gradient is only a
    part, and will come once more as a whole.
    """

    num_together: int = 1
    withhold: Callable[[ParameterState, torch.Tensor], bool] = _withhold_nothing


class BackwardPasses:
    """The backward passes of one engine. micro_batches: of a running infinity.accumulate, otherwise one."""

    def __init__(self, cycle):
        self.cycle, self.state = cycle, cycle.state
        self.registry, self.ranks, self.calls = cycle.registry, cycle.ranks, cycle.calls
        self.weights, self.gradients, self.updater = cycle.weights, cycle.gradients, cycle.updater
        self.updates, self.norm, self.reductions = cycle.updates, cycle.norm, cycle.reductions
        self.expected, self.completed, self.param_grads = cycle.expected, cycle.completed, cycle.param_grads
        self.micro_batches = MicroBatches()
        self._end_is_queued = False  # autograd will call end_backward

    # Calls from hooks.

    def begin(self) -> None:
        """Begin a backward pass when the gradient of an outermost output is known. Further calls in the same pass do nothing."""
        if self.state.in_backward:
            return
        self.cycle.clear_gradients()
        self.cycle.check_open()
        self.await_end()
        self.calls.recording = True  # an evaluation may have run since the forward pass
        self.cycle.passes.begin_pass(self.state.num_backwards)
        if self.cycle.forward.num_training and not self.cycle.autograd_grad.is_running and self._why_not_train() is None:
            self.state.become(EXPECTING)
            self._expect_gradients()
        else:
            self.state.become(PASSING)
            self.expected.expect_nothing()

    def await_end(self) -> None:
        """Have autograd call `end_backward` after the current backward pass, of the engine or not.

        Of nested backward passes, this is the pass in which await_end was called first.
        """
        if not self.state.in_backward and not self._end_is_queued:
            self._end_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def forget_end(self) -> None:
        """Note that no backward pass runs: autograd has dropped the call of `end_backward` together with a pass that failed."""
        self._end_is_queued = False

    def expect_gradient(self, state: ParameterState) -> None:
        """Autograd is about to add to `param.grad`, or to return the gradient to the program."""
        cycle, phase = self.cycle, self.state.phase
        trains = phase is RECEIVING or phase is EXPECTING or phase is LAYERWISE
        if cycle.autograd_grad.is_running or ((cycle.scaler or not trains) and is_returned(state.param)):
            return cycle.autograd_grad.refuse_scaled(cycle.scaler is not None)
        if not trains:
            self._begin_to_train(state)
        if (self.state.num_backwards or state.arrivals) and state.has_gradient_hooks:
            raise UsageError(sums_in_hook(state.name))

    def _begin_to_train(self, state: ParameterState) -> None:
        """A backward pass brings the first gradient that belongs to the step. Raises UsageError if gradients are not allowed now."""
        if not self.state.in_backward:
            if self.cycle.scaler is not None:
                raise UsageError(not_scaled(state.name))
            self.begin()
        if self.state.phase is PASSING:
            if (refusal := self._why_not_train(state)) is not None:
                self.state.cancel_pass()
                self.forget_end()
                self.param_grads.show()
                self.calls.release_all()
                self.weights.drain_dropped()
                self.cycle.refuse_others()
                raise UsageError(refusal)
            self.state.become(EXPECTING)
            self._expect_gradients()

    def gradient(self, state: ParameterState, grad: torch.Tensor) -> None:
        """Take a parameter's gradient of this backward pass, or of one region of the pass."""
        self.expect_gradient(state)
        self.arrive(state, grad)

    def arrive(self, state: ParameterState, grad: torch.Tensor) -> None:
        """Add a parameter's gradient to the gradients of the chunks that hold the parameter."""
        if self.state.phase is not RECEIVING:
            self.state.receive()
        if state.group is None:
            return
        chunks = self.registry.chunks_of(state)
        for chunk in chunks:
            if chunk.update.is_early or (self.ranks.are_several and chunk in self.updates.ready):  # other ranks may have updated the chunk
                raise UsageError(late_gradient(state.name))
            self.updater.finish(chunk)
        if self.micro_batches.withhold(state, grad):
            return
        if not self.ranks.are_several:
            self.cycle.device_budget.let_wait(chunks)
        self.gradients.arrive(state, grad)
        del grad
        state.arrivals += 1
        if state.arrivals == state.expected:
            for chunk in chunks:
                if chunk.gradient.complete_one():  # no op of this pass needs the weights again
                    self.weights.expect_no_copy(chunk)
                    self.completed.note(self.state.num_backwards, chunk)
                    if not self.ranks.are_several:
                        self.updates.gradient_complete(chunk)
        elif state.arrivals > state.expected:
            for chunk in chunks:
                chunk.gradient.exceed()
        self.updates.begin_ready()
        self.gradients.in_flight.wait_for_room()

    @uninterrupted
    def end_backward(self) -> None:
        """End a backward pass without an error."""
        self._end_is_queued = False
        if not self.state.in_backward:
            return
        self.gradients.hurry()
        self.calls.release_all()
        self.calls.drain_dropped()
        if not self._end_pass():
            self.updates.expect(None)
            return self.param_grads.show()
        number = self.state.count_backward()
        self.completed.end_pass(number)
        self.cycle.forward.end_training()
        self.param_grads.depart(self.expected.end_pass(number))
        self.updates.begin_ready()
        self.cycle.advice.pass_done()
        if self.state.num_backwards < self.num_passes:
            self.cycle.device_budget.pass_done()

    @uninterrupted
    def abandon(self) -> None:
        """End a backward pass that has raised."""
        self.forget_end()
        self.state.fail_pass(has_updated=self.updates.are_early)
        drop_half_arrived(self.registry.params)
        self.param_grads.show()
        self.gradients.hurry()
        self.calls.release_all()

    # Calls from infinity.accumulate.

    @contextlib.contextmanager
    def one_backward(self, *, num_together: int = 1, withhold: Callable[[ParameterState, torch.Tensor], bool] | None = None) -> Iterator[None]:
        """All backward passes inside the block count as one. Call `complete` for chunks with all gradients. See MicroBatches."""
        self.cycle.check_open()
        torn = self.state.damage is Damage.WEIGHTS
        failed, begun = self.state.damage is Damage.GRADIENTS, self.state.num_backwards > 0 and not torn
        refuse_by_layer(runs=self.state.in_backward, failed=failed, begun=begun)
        self.cycle.clear_gradients()
        if (refusal := self._why_not_train(by_layer=True)) is not None:
            raise UsageError(refusal)
        self.cycle.begin_step_of(StepKind.ACCUMULATE)
        self.cycle.pace.begin()
        self.state.become(LAYERWISE)
        self.micro_batches = MicroBatches(num_together, withhold or _withhold_nothing)
        self._expect_gradients()
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self.micro_batches = MicroBatches()
        self.end_backward()

    def complete(self, chunks: list[ChunkState]) -> None:
        """Note that no further backward pass brings gradients of these chunks."""
        for chunk in chunks:
            chunk.gradient.expect(0)
            if chunk.gradient.job is not None:
                self.weights.expect_no_copy(chunk)
                if not self.ranks.are_several:  # on several ranks, micro-batches reduce gradients: the plan must not
                    self.completed.note(self.state.num_backwards, chunk)
                self.updates.gradient_complete(chunk)
        self.updates.begin_ready()

    @uninterrupted
    def reduce_all(self) -> list[ChunkState]:
        """Reduce all gradients that any rank has gathered since the last reduction. Returns the reduced chunks.

        All ranks must make this call.
        """
        if not self.ranks.are_several:
            return []
        has_gradients, found = self.reductions.reduce_all(self.state.has_gradients)
        if has_gradients:
            self.state.receive()
        return found

    # Calls from step().

    def receive(self, given: Iterable[tuple[ParameterState, torch.Tensor]]) -> None:
        """Gradients that no backward pass has brought arrive, as if a backward pass brought them. All ranks must make this call."""
        self.state.receive()
        for state, grad in given:
            self.arrive(state, grad)
        self._end_pass()

    @property
    def num_passes(self) -> int:
        """Backward passes of the current step."""
        return 1 if self.state.kind is StepKind.ACCUMULATE else self.cycle.passes.num_passes(self.cycle.optimizers.accumulation_steps)

    def _why_not_train(self, state: ParameterState | None = None, *, by_layer: bool = False) -> str | None:
        """The message that refuses a gradient now, or a gradient of this parameter; None if gradients are allowed."""
        if not self.cycle.optimizers:
            return no_optimizer(state.name if state else "a parameter")
        if self.state.damage is Damage.WEIGHTS:
            return TORN
        if (refusal := self.cycle.optimizer_calls.why_no_pass(has_gradients=self.state.num_backwards > 0)) is not None:
            return refusal
        if not by_layer and self.num_passes > 1 and not self.cycle.passes.may_be_several:
            return NO_PLACE_FOR_SUMS
        if self.param_grads.are_of_last_step:
            return NOT_DROPPED
        if self.param_grads.factor != 1.0:
            return SCALED
        if self.state.num_backwards >= self.num_passes:
            return no_more_passes(self.state.num_backwards, self.num_passes, by_layer=self.state.kind is StepKind.ACCUMULATE)
        return None

    def _expect_gradients(self) -> None:
        """The backward pass belongs to the step: predict the gradients, and the updates that begin in this pass."""
        cycle, number = self.cycle, self.state.num_backwards
        if not number:
            cycle.optimizer_calls.begin_gradients()
        last = number + 1 == self.num_passes
        in_backward = moment(deferred=self.updater.deferred, by_step=False, in_memory=False) is Moment.GRADIENT
        self.updates.expect(cycle.hyper() if last and in_backward and not cycle.needs_norm else None)
        self.norm.expect(last and (cycle.needs_norm or self.param_grads.norm_was_asked))
        self.expected.begin_pass(number, cycle.forward.num_training, later=self.state.phase is LAYERWISE)
        for chunk in self.registry.chunks:
            chunk.gradient.expect(sum(self.registry.params[param].expected > 0 for param in chunk.whole_pieces))
            self.updater.expect(chunk, self.updates.early_hyper is not None and chunk.trainable and chunk.gradient.missing > 0)

    def _end_pass(self) -> bool:
        """No more gradients come from this pass. All ranks must make this call. Returns whether any rank has brought a gradient."""
        for chunk in self.reduce_all():
            self.norm.add_complete(chunk)
        has_gradients = self.state.has_gradients
        self.cycle.forward.end_open()
        self.state.end_pass()
        return has_gradients
