"""The content of `param.grad`. A gradient that has left for its tier is replaced there by a sign, which can be scaled and has a norm.

Knows parameters. Must not know tiers, how a norm is summed, or when a step begins and ends.
"""

# [Note: what may be done with gradients that have left]
# What torch.nn.utils.clip_grad_norm_ does, which is all that tools ask for: the norm of all of them together, and one factor for all of
# them. The norm is the engine's own, as of max_grad_norm, and the same on all ranks; the factor waits for step(), whose updates multiply
# each gradient by it. So both are exact, in whatever tier the gradients are. Of some of them alone neither is known. What finds no gradient
# clips nothing and says nothing: so each stays in place from its backward pass to step(), but while another pass runs, forward or backward.
#
# [Note: gradients of the last step]
# In PyTorch a gradient stays after step(), and the next one is added to it. The engine has given its memory to others by then. So the sign
# in `param.grad` stays after step(), too, until the program drops it. A gradient that arrives while one is still there is refused.

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable

from torch._C import DisableTorchFunctionSubclass

from infinity.errors import UsageError
from infinity.model.parameters import get_grad, set_grad
from infinity.model.state_dict import DepartedGradient
from infinity.system.ranks import Ranks
from infinity.tiers.parameter_state import ParameterState

_ALL = "{what} of {some} gradients, of {all}: the engine has one for all of them. Give it all parameters of the model in one call, each once"

_NO_FACTOR, _GIVEN = -1, -2  # their bits, as a float, are of NaNs that no arithmetic makes

NOT_DROPPED = (
    "a gradient arrives while param.grad still has the gradients of the last step, to which plain PyTorch would add it. The engine keeps no "
    "gradient after step(): call optimizer.zero_grad() before the next backward pass. To sum the gradients of several backward passes, call "
    "step() once after them, and declare their number: infinity.AdamW(..., accumulation_steps=...)."
)


class ParamGrads:
    """Of the parameters of one engine. norm(): of all gradients of the step under way, before step()."""

    def __init__(self, states: Iterable[ParameterState], norm: Callable[[], float], ranks: Ranks):
        self._states = list(states)
        for state in self._states:
            state.departed.answer_by(self)
        self._norm, self._ranks = norm, ranks
        self._departed: dict[ParameterState, None] = {}  # parameters whose gradients have left in this step, or in the last step without being dropped
        self._hidden = False  # from autograd, which else would add to them, and torch.compile, which would look at them
        self._wait = False  # for a step() or zero_grad()
        self._factors: dict[DepartedGradient, float] = {}  # by which those of the last pass were multiplied
        self.factor = 1.0  # by which step() multiplies all
        self.norm_was_asked = False

    def depart(self, states: Iterable[ParameterState]) -> None:
        """A backward pass is over that has brought gradients of these."""
        self._departed |= dict.fromkeys(states)
        self._wait = True
        self.show()

    def show(self) -> None:
        """A pass is over: gradients that have left are named in `param.grad` again."""
        self._hidden = False
        with DisableTorchFunctionSubclass():
            for state in self._departed:
                set_grad(state.param, state.departed)

    def end_step(self) -> None:
        """step() has used them. Their signs stay, see [Note: gradients of the last step]."""
        self._wait = False
        self._factors.clear()
        self.factor = 1.0

    def drop(self) -> None:
        """Forget all gradients, including those that the program has put into `param.grad`."""
        self.end_step()
        self._take_away()
        self._departed.clear()
        with DisableTorchFunctionSubclass():
            for state in self._states:
                if get_grad(state.param) is not None:
                    set_grad(state.param, None)

    @property
    def are_of_last_step(self) -> bool:
        """Whether gradients of the last step were not dropped."""
        return bool(self._departed) and not self._wait

    def departed(self, state: ParameterState) -> DepartedGradient | None:
        """The sign of a gradient that has left, in this backward pass or before."""
        return state.departed if state.arrivals or state in self._departed else None

    def take_given(self) -> list[tuple[ParameterState, torch.Tensor]]:
        """Take the gradients that the program has put into `param.grad`. Either all ranks have such gradients, or none has.

        Raises UsageError where ranks differ; see also `were_dropped`.
        """
        given = []
        with DisableTorchFunctionSubclass():
            for state in self._states:
                if (grad := get_grad(state.param)) is not None and grad is not state.departed:
                    given.append((state, grad))
            if given and not self._ranks.agree(_GIVEN):
                raise UsageError(
                    f"{self._ranks.name} has a gradient in {given[0][0].name}.grad that no backward pass has brought, and another rank has "
                    f"none. Put gradients into param.grad on all ranks."
                )
            for state, _ in given:
                set_grad(state.param, None)
                self._departed.pop(state, None)
        return given

    # What they answer, see [Note: what may be done with gradients that have left].

    def norm(self, gradients: Collection[DepartedGradient]) -> float:
        """Of all gradients, which these must be."""
        self._require_waiting()
        self._require_all(gradients, "the norm")
        self._agree_on_norm()
        self.norm_was_asked = True
        return self._norm() * self.settled_factor()

    def scale(self, gradient: DepartedGradient, factor: float) -> None:
        """Multiply it once step() uses it."""
        self._require_waiting()
        self._factors[gradient] = self._factors.get(gradient, 1.0) * factor

    def settled_factor(self) -> float:
        """By which step() multiplies all gradients. Raises UsageError where the program has scaled some only, or by other factors."""
        if self._factors:
            self._require_all(self._factors, "a factor")
            factors = {str(factor) for factor in self._factors.values()}  # no NaN equals another one
            if len(factors) > 1:
                raise UsageError(f"gradients were multiplied by {len(factors)} different factors; the engine has one for all of them")
            self.factor *= next(iter(self._factors.values()))
            self._factors.clear()
        return self.factor

    def agreed_factor(self) -> float:
        """As `settled_factor`; raises UsageError where ranks would multiply by different ones."""
        factor = self.settled_factor()
        if not self._ranks.agree(*struct.unpack("q", struct.pack("d", factor))):
            raise UsageError(
                f"{self._ranks.name} multiplies gradients by {factor}. Another rank has another factor, is about to clip, or has put gradients "
                f"into param.grad: clip on all ranks alike, and put gradients there on all ranks or on none"
            )
        return factor

    def _agree_on_norm(self) -> None:
        """Raises UsageError where another rank has come to `agreed_factor`."""
        if not self._ranks.agree(_NO_FACTOR):
            raise UsageError(
                f"{self._ranks.name} asks for the norm of all gradients, another rank does not, but calls step(): clip on all ranks alike"
            )

    def _require_waiting(self) -> None:
        if not self._wait:
            raise UsageError("there are no gradients: step() has used them. Clip, or ask for their norm, after backward() and before step()")

    def _require_all(self, gradients: Collection[DepartedGradient], what: str) -> None:
        if not len(set(map(id, gradients))) == len(gradients) == len(self._departed):
            raise UsageError(_ALL.format(what=what, some=len(gradients), all=len(self._departed)))

    def were_dropped(self) -> bool:
        """Whether the program has dropped all gradients of this step, as model.zero_grad() does.

        Raises UsageError where it has dropped some of them, or put others in their place.
        """
        if self._hidden or not self._wait:
            return False
        with DisableTorchFunctionSubclass():
            found = [(state, get_grad(state.param)) for state in self._departed]
        given = [state.name for state, grad in found if grad is not None and grad is not state.departed]
        if given:
            raise UsageError(
                f"{given[0]}.grad was given a value, which the engine would not use: gradients have left for its tiers. Change them as "
                f"they arrive, with param.register_hook(...)."
            )
        dropped = [state.name for state, grad in found if grad is None]
        if dropped and len(dropped) < len(self._departed):
            raise UsageError(
                f"the gradient of {dropped[0]} was dropped and others were not; the engine can only drop all: call "
                f"optimizer.zero_grad(). To train a part of the model, freeze the others with requires_grad_(False)."
            )
        return bool(dropped)

    def clear(self) -> None:
        """Take the signs out of `param.grad` until `show`. Gradients of the last step that the program has dropped or replaced are forgotten."""
        self.settled_factor()
        with DisableTorchFunctionSubclass():
            if self.are_of_last_step and not self._hidden:
                self._departed = {state: None for state in self._departed if get_grad(state.param) is state.departed}
        self._take_away()
        self._hidden = True

    def close(self) -> None:
        self._take_away()
        self._departed.clear()

    def _take_away(self) -> None:
        with DisableTorchFunctionSubclass():
            for state in self._departed:
                if get_grad(state.param) is state.departed:
                    set_grad(state.param, None)


def drop_half_arrived(states: Iterable[ParameterState]) -> None:
    """Of a backward pass that failed: what came, but its hook did not."""
    with DisableTorchFunctionSubclass():
        for state in states:
            if state.trainable and get_grad(state.param) is not state.departed:
                set_grad(state.param, None)
