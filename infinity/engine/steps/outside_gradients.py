"""Gradients outside of backward passes: torch.autograd.grad returns them, or the program puts them into `param.grad`.

Knows an engine's steps. Must not know how gradients reach their tier, or the arithmetic of an update.
"""

# [Note: gradients outside of backward passes]
# torch.autograd.grad returns gradients to the program. No gradient arrives in the engine, and the backward pass belongs to no step.
# Gradients that the program has put into `param.grad` arrive at step(), as if one more backward pass had brought them. The engine uses their
# mean over all ranks, as for any gradient. If a backward pass of this step has brought a gradient of the same parameter, that gradient has
# left for its tier. The engine refuses another gradient in its place.

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch._C import DisableTorchFunctionSubclass

from infinity.engine.steps.param_grads import NOT_DROPPED
from infinity.engine.steps.refusals import GIVEN_LATE, GIVEN_SCALED, LOOK_SCALED, refuse_sparse
from infinity.engine.steps.step_state import Damage
from infinity.errors import UsageError
from infinity.tiers.parameter_state import ParameterState


class AutogradGrad:
    """Calls of torch.autograd.grad, whose backward passes only return gradients to the program."""

    def __init__(self):
        self.is_running = False

    def refuse_scaled(self, scaled: bool) -> None:
        """Raise UsageError if a loss scale multiplies the returned gradients."""
        if scaled:
            raise UsageError(LOOK_SCALED)

    @contextlib.contextmanager
    def running(self, *, scaled: bool) -> Iterator[None]:
        """Backward passes inside the block return gradients. scaled: the engine has a loss scale. Raises UsageError then."""
        self.refuse_scaled(scaled)
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before


def is_returned(param: torch.nn.Parameter) -> bool:
    """Whether the backward pass under way returns this parameter's gradient to the program, instead of adding it to `param.grad`.

    Needed for parameters that are held. For other parameters, `AutogradGrad.running` begins before the backward pass.
    """
    with DisableTorchFunctionSubclass():
        accumulates = torch.autograd.graph.get_gradient_edge(param).node
    try:
        torch._C._will_engine_execute_node(accumulates)
    except RuntimeError:  # torch raises for a parameter that is among the inputs of autograd.grad
        return True
    return False


def take_gradients(cycle) -> None:
    """Take gradients that the program has put into `param.grad`. Raises UsageError unless the step has gradients and may be made."""
    cycle.check_gradients()
    if given := cycle.param_grads.take_given():
        receive_given(cycle, given)
    cycle.require_gradients("step()")


def receive_given(cycle, given: list[tuple[ParameterState, torch.Tensor]]) -> None:
    """Pass gradients that the program has put into `param.grad` to the engine, at the beginning of step(). All ranks must make this call.

    given: parameters with their gradients, of the parameter's shape, dtype and device. Raises UsageError before anything has changed.
    """
    for state, grad in given:
        refuse_sparse(state, grad)
    if cycle.state.damage is not Damage.NONE:
        cycle.require_gradients("step()")
    if cycle.param_grads.are_of_last_step:
        raise UsageError(NOT_DROPPED)
    if cycle.scaler is not None:
        raise UsageError(GIVEN_SCALED)
    if cycle.updates.are_early:
        raise UsageError(GIVEN_LATE)
    cycle.updates.expect(None)
    cycle.expected.expect_anything()
    for chunk in cycle.registry.chunks:
        chunk.gradient.expect(math.inf)
    cycle.backward.receive((state, grad.clone()) for state, grad in given)  # copies: the program may write to its tensors meanwhile
    cycle.expected.forget()
    cycle.param_grads.depart(state for state, _ in given)
