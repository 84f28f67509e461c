"""How many gradients of each parameter a backward pass is expected to bring: so it is known when all of a chunk's are there.

Knows parameters, and what the last step's passes brought. Must not know what is done with gradients.
"""

# [Note: expected gradients]
# How many gradients a parameter receives in one backward pass is known from the same one of the last step, if as many forward passes came
# before that and as many ops used the parameter: several if reentrant checkpoints share it, none if it is unused. In the first step, or if
# others run than in the last one or parameters are frozen or thawed, a parameter of an op that ran once is expected to receive one, of an
# op that did not run none. With anything else, such as a backward pass over a graph that is older than the last one, the chunk waits for
# the end of the pass. So it does once it has received more than was expected, and where one of several forward passes uses a parameter that
# had no gradient in the last step: the one that goes backward may be another this time.

from __future__ import annotations

import math
from collections.abc import Sequence

from infinity.tiers.parameter_state import ParameterState


class Expectations:
    """Of the parameters of one engine. Backward passes have numbers, from one step to the next."""

    def __init__(self, params: Sequence[ParameterState]):
        self.params = params
        self._forwards_last: dict[int, int] = {}  # in the step before, by backward pass

    def begin_pass(self, number: int, forwards: int, *, known: bool, later: bool) -> None:
        """forwards: forward passes that came before it. known: the last step was of this kind. later: forward passes are still to come."""
        as_before = known and forwards and forwards == self._forwards_last.get(number)
        self._forwards_last[number] = forwards
        for state in self.params:
            if as_before and state.touched == state.touched_last.get(number):
                arrived = state.arrived_last.get(number, math.inf)
                state.expect(arrived if arrived or not state.touched or forwards <= 1 else math.inf)
            else:
                state.expect(state.touched if forwards and not later and state.touched <= 1 else math.inf)
            state.touched_last[number] = state.touched

    def expect_nothing(self) -> None:
        """A backward pass begins that only passes through, as far as is known."""
        for state in self.params:
            state.arrivals = 0

    def expect_anything(self) -> None:
        """Gradients come that no backward pass brings, of whichever parameters."""
        for state in self.params:
            state.expect(math.inf)

    def forget(self) -> None:
        """The last step's passes say nothing of the next ones."""
        self._forwards_last.clear()

    def end_pass(self, number: int) -> list[ParameterState]:
        """Remember what it brought. Returns the parameters that had a gradient."""
        for state in self.params:
            state.arrived_last[number] = state.arrivals
            state.touched = 0
        return [state for state in self.params if state.arrivals]
