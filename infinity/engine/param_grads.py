"""What a program finds in `param.grad`: where a gradient has left for its tier, something that says so.

Knows parameters. Must not know tiers, or when a step begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch._C import DisableTorchFunctionSubclass

from infinity.errors import UsageError
from infinity.model.parameters import get_grad, set_grad
from infinity.tiers.state import ParameterState


class ParamGrads:
    """Of the parameters of one engine."""

    def __init__(self):
        self._departed: list[ParameterState] = []  # whose gradients have left
        self._wait = False  # for a step() or zero_grad()

    def depart(self, states: Iterable[ParameterState]) -> None:
        """A backward pass is over that has brought gradients of these."""
        with DisableTorchFunctionSubclass():
            for state in states:
                set_grad(state.param, state.departed)
                self._departed.append(state)
        self._wait = True

    def end_step(self) -> None:
        """They were used, or given up."""
        self._wait = False

    def were_dropped(self) -> bool:
        """Whether the program has dropped all of them, as model.zero_grad() does; raises UsageError where it dropped some only, or too
        late."""
        with DisableTorchFunctionSubclass():
            found = [(state, get_grad(state.param)) for state in self._departed]
        given = [state.name for state, grad in found if grad is not None and grad is not state.departed]
        if given:
            raise UsageError(
                f"{given[0]}.grad was given a value, which the engine would not use: gradients have left for its tiers. Change them as "
                f"they arrive, with param.register_hook(...)."
            )
        dropped = [state.name for state, grad in found if grad is None] if self._wait else []
        if dropped and len(dropped) < len(self._departed):
            raise UsageError(
                f"the gradient of {dropped[0]} was dropped and others were not; the engine can only drop all: call "
                f"optimizer.zero_grad(). To train a part of the model, freeze the others with requires_grad_(False)."
            )
        return bool(dropped)

    def clear(self) -> None:
        """Autograd is to find no gradient to add to."""
        with DisableTorchFunctionSubclass():
            for state in self._departed:
                set_grad(state.param, None)
        self._departed.clear()


def drop_half_arrived(states: Iterable[ParameterState]) -> None:
    """Of a backward pass that failed: what came, but its hook did not."""
    with DisableTorchFunctionSubclass():
        for state in states:
            if state.trainable and get_grad(state.param) is not state.departed:
                set_grad(state.param, None)
