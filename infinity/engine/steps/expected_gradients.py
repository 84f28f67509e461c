"""A prediction of the number of gradients that a backward pass brings to each parameter, to detect complete chunks during the pass.

Knows parameters, and the gradients that the last step's passes brought. Must not know how gradients are used.
"""

# [Note: expected gradients]
# The prediction for a backward pass is the number of gradients that the same pass of the last step brought. The prediction holds if as many
# forward passes came before and as many ops used the parameter. The number is above one if reentrant checkpoints share the parameter. The
# number is zero for an unused parameter. There is no such prediction in the first step, after a change of the loop, and for parameters that
# the program has frozen or thawed. Then the engine expects one gradient if one op has used the parameter, and none without such an op. In all
# other cases the chunk waits for the end of the pass. An example is a backward pass over an older graph than the last one. A chunk with more
# gradients than expected also waits for the end. The same holds if one of several forward passes uses a parameter that had no gradient in the
# last step. Another forward pass may go backward this time.

from __future__ import annotations

import math
from collections.abc import Sequence

from infinity.tiers.parameter_state import ParameterState


class ExpectedGradients:
    """Expected gradients of one engine's parameters. The backward passes of a step are numbered from zero."""

    def __init__(self, params: Sequence[ParameterState]):
        self.params = params
        self._forwards_last: dict[int, int] = {}  # number of forward passes before a backward pass of the last step, by pass number

    def begin_pass(self, number: int, forwards: int, *, later: bool) -> None:
        """forwards: forward passes since the last backward pass. later: more forward passes will run during this backward pass."""
        as_before = not later and forwards and forwards == self._forwards_last.get(number)
        self._forwards_last[number] = forwards
        for state in self.params:
            if as_before and state.touched == state.touched_last.get(number):
                arrived = state.arrived_last.get(number, math.inf)
                state.expect(arrived if arrived or not state.touched or forwards <= 1 else math.inf)
            else:
                state.expect(state.touched if forwards and not later and state.touched <= 1 else math.inf)
            state.touched_last[number] = state.touched

    def expect_nothing(self) -> None:
        """Begin a backward pass that brings no gradient, as far as is known."""
        for state in self.params:
            state.arrivals = 0

    def expect_anything(self) -> None:
        """Expect gradients without a backward pass, of any parameters."""
        for state in self.params:
            state.expect(math.inf)

    def forget(self) -> None:
        """Forget the last step, whose passes do not predict the next passes."""
        self._forwards_last.clear()

    def end_pass(self, number: int) -> list[ParameterState]:
        """Remember the gradients of this pass for the next step. Returns the parameters that had a gradient."""
        for state in self.params:
            state.arrived_last[number] = state.arrivals
            state.touched = 0
        return [state for state in self.params if state.arrivals]
