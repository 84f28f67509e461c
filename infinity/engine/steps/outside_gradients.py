"""Gradients outside of backward passes: torch.autograd.grad returns them, or the program puts them into `param.grad`.

Knows an engine's steps. Must not know how gradients reach their tier, or what an update computes.
"""

# [Note: gradients outside of backward passes]
# torch.autograd.grad only looks: no gradient arrives, and the backward pass that it runs belongs to no step.
# Gradients that the program has put into `param.grad` arrive at step(), as if one more backward pass had brought them. The mean over all
# ranks is used, as of any gradient. If a backward pass of this step has brought a parameter's gradient, that gradient has left for its tier.
# Another one in its place is refused.

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch._C import DisableTorchFunctionSubclass

from infinity.engine.steps.param_grads import NOT_DROPPED
from infinity.engine.steps.refusals import GIVEN_LATE, GIVEN_SCALED, LOOK_SCALED, refuse_sparse
from infinity.errors import UsageError
from infinity.tiers.parameter_state import ParameterState


class Looks:
    """Whether the backward pass under way only returns gradients to the program."""

    def __init__(self):
        self.are_under_way = False

    def refuse_scaled(self, scaled: bool) -> None:
        """Raise UsageError if a loss scale multiplies the gradients that are returned."""
        if scaled:
            raise UsageError(LOOK_SCALED)

    @contextlib.contextmanager
    def look(self, *, scaled: bool) -> Iterator[None]:
        """Backward passes inside the block return gradients. scaled: these would be multiplied by a loss scale. Raises UsageError then."""
        self.refuse_scaled(scaled)
        before, self.are_under_way = self.are_under_way, True
        try:
            yield
        finally:
            self.are_under_way = before


def is_returned(param: torch.nn.Parameter) -> bool:
    """Whether the backward pass under way returns this parameter's gradient to the program, instead of adding it to `param.grad`.

    Needed for parameters that are held. For other parameters `Looks` is told before the backward pass begins.
    """
    with DisableTorchFunctionSubclass():
        accumulates = torch.autograd.graph.get_gradient_edge(param).node
    try:
        torch._C._will_engine_execute_node(accumulates)
    except RuntimeError:  # torch cannot tell for a parameter that is among the inputs of autograd.grad
        return True
    return False


def bring(cycle, given: list[tuple[ParameterState, torch.Tensor]]) -> None:
    """Pass gradients that the program has put into `param.grad` to the engine, at the beginning of step(). Every rank must call it.

    given: parameters with their gradients, of the parameter's shape, dtype and device. Raises UsageError before anything has changed.
    """
    for state, grad in given:
        refuse_sparse(state, grad)
    if cycle.torn or cycle.failed:
        cycle.require_gradients("step()")
    if cycle.param_grads.are_of_last_step:
        raise UsageError(NOT_DROPPED)
    if cycle.scaler is not None:
        raise UsageError(GIVEN_SCALED)
    if any(chunk.update.is_early for chunk in cycle.registry.chunks):
        raise UsageError(GIVEN_LATE)
    cycle.due.expect_no_update()
    cycle.expectations.expect_anything()
    for chunk in cycle.registry.chunks:
        chunk.gradient.expect(math.inf)
    for state, grad in given:
        cycle.arrive(state, grad.clone())  # a copy: the program may write to its tensor during the transfer
    cycle.end_pass()
    cycle.expectations.forget()
    cycle.param_grads.depart(state for state, _ in given)
