"""The content of `param.grad`: placeholders for gradients that have left for their tier. Programs may ask for a norm, or set a factor.

Knows parameters. Must not know tiers, how a norm is summed, or when a step begins and ends.
"""

# [Note: operations on gradients that have left]
# A program may use the placeholders as torch.nn.utils.clip_grad_norm_ does. It asks for the norm of all gradients together, and multiplies all
# gradients by one factor. The norm is the engine's own norm, as for max_grad_norm, and the same on all ranks. The factor waits for step(). The
# updates then multiply each gradient by the factor. So both are exact in every tier. The engine knows no norm of some gradients alone, and
# applies no factor to some of them. A tool that finds no gradient would silently clip nothing. So a placeholder stays in place from the
# backward pass to step(), except while another forward or backward pass runs.
#
# [Note: gradients of the last step]
# In PyTorch a gradient stays after step(), and autograd adds the next gradient. The engine has used the memory for other data by then. So the
# placeholder also stays after step(), until the program drops it. The engine refuses a gradient that arrives before.

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable

from torch._C import DisableTorchFunctionSubclass

from infinity.errors import UsageError
from infinity.model.parameters import get_grad, set_grad
from infinity.model.state_dict import DepartedGradient
from infinity.system.ranks import Ranks
from infinity.tiers.parameter_state import ParameterState

_ALL = "{what} of {some} gradients, of {all}: the engine has one for all gradients. Pass all parameters of the model in one call, each once"

_NO_FACTOR, _GIVEN = -1, -2  # as float bits, these are NaNs that no arithmetic makes

NOT_DROPPED = (
    "a gradient arrives while param.grad still has the gradients of the last step. Plain PyTorch would add the two. The engine keeps no "
    "gradient after step(): call optimizer.zero_grad() before the next backward pass. To sum the gradients of several backward passes, call "
    "step() once after them, and declare their number: infinity.AdamW(..., accumulation_steps=...)."
)


class ParamGrads:
    """`param.grad` of all parameters of one engine. norm(): the norm of all gradients of the current step, before step()."""

    def __init__(self, states: Iterable[ParameterState], norm: Callable[[], float], ranks: Ranks):
        self._states = list(states)
        for state in self._states:
            state.departed.answer_by(self)
        self._norm, self._ranks = norm, ranks
        self._departed: dict[ParameterState, None] = {}  # parameters whose gradients have left in this step, or in the last one without a drop
        self._hidden = False  # `param.grad` has no placeholders: autograd would add to them, and torch.compile would see them
        self._wait = False  # the gradients wait for step() or zero_grad()
        self._factors: dict[DepartedGradient, float] = {}  # factors that `common_factor` has not seen yet
        self.factor = 1.0  # step() multiplies all gradients by this factor
        self.norm_was_asked = False

    def depart(self, states: Iterable[ParameterState]) -> None:
        """Note the end of a backward pass that has brought gradients of these parameters."""
        self._departed |= dict.fromkeys(states)
        self._wait = True
        self.show()

    def show(self) -> None:
        """A pass is over: put the placeholders into `param.grad` again."""
        self._hidden = False
        with DisableTorchFunctionSubclass():
            for state in self._departed:
                set_grad(state.param, state.departed)

    def end_step(self) -> None:
        """step() has used the gradients. The placeholders stay, see [Note: gradients of the last step]."""
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
        """The placeholder of a gradient that has left in this backward pass or before; otherwise None."""
        return state.departed if state.arrivals or state in self._departed else None

    def take_given(self) -> list[tuple[ParameterState, torch.Tensor]]:
        """Take the gradients that the program has put into `param.grad`.

        Raises UsageError if some ranks have such gradients and others have none; see also `were_dropped`.
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

    # Calls from placeholders, see [Note: operations on gradients that have left].

    def norm(self, gradients: Collection[DepartedGradient]) -> float:
        """The norm of all gradients. Raises UsageError unless `gradients` are all of them."""
        self._require_waiting()
        self._require_all(gradients, "the norm")
        self._agree_on_norm()
        self.norm_was_asked = True
        return self._norm() * self.common_factor()

    def scale(self, gradient: DepartedGradient, factor: float) -> None:
        """step() will multiply this gradient by the factor."""
        self._require_waiting()
        self._factors[gradient] = self._factors.get(gradient, 1.0) * factor

    def common_factor(self) -> float:
        """The factor of all gradients. Raises UsageError if the program has multiplied only some, or by different factors."""
        if self._factors:
            self._require_all(self._factors, "a factor")
            factors = {str(factor) for factor in self._factors.values()}  # no NaN equals another one
            if len(factors) > 1:
                raise UsageError(f"gradients were multiplied by {len(factors)} different factors. Multiply all gradients by one factor")
            self.factor *= next(iter(self._factors.values()))
            self._factors.clear()
        return self.factor

    def agreed_factor(self) -> float:
        """As `common_factor`; also raises UsageError if the ranks have different factors."""
        factor = self.common_factor()
        if not self._ranks.agree(*struct.unpack("q", struct.pack("d", factor))):
            raise UsageError(
                f"{self._ranks.name} multiplies gradients by {factor}. Another rank has another factor, is about to clip, or has put gradients "
                f"into param.grad. Clip on all ranks alike, and put gradients into param.grad on all ranks or on none"
            )
        return factor

    def _agree_on_norm(self) -> None:
        """Raise UsageError if another rank is in `agreed_factor`."""
        if not self._ranks.agree(_NO_FACTOR):
            raise UsageError(
                f"{self._ranks.name} asks for the norm of all gradients, but another rank calls step(). Clip on all ranks alike"
            )

    def _require_waiting(self) -> None:
        if not self._wait:
            raise UsageError("there are no gradients: step() has used them. Clip, or ask for their norm, after backward() and before step()")

    def _require_all(self, gradients: Collection[DepartedGradient], what: str) -> None:
        if not len(set(map(id, gradients))) == len(gradients) == len(self._departed):
            raise UsageError(_ALL.format(what=what, some=len(gradients), all=len(self._departed)))

    def were_dropped(self) -> bool:
        """Whether the program has dropped all gradients of this step, as model.zero_grad() does.

        Raises UsageError if the program has dropped only some of them, or has put others in their place.
        """
        if self._hidden or not self._wait:
            return False
        with DisableTorchFunctionSubclass():
            found = [(state, get_grad(state.param)) for state in self._departed]
        given = [state.name for state, grad in found if grad is not None and grad is not state.departed]
        if given:
            raise UsageError(
                f"{given[0]}.grad was given a value, which the engine would not use: the gradient has left for its tier. Change gradients "
                f"when they arrive, with param.register_hook(...)."
            )
        dropped = [state.name for state, grad in found if grad is None]
        if dropped and len(dropped) < len(self._departed):
            raise UsageError(
                f"the gradient of {dropped[0]} was dropped and others were not; the engine can only drop all: call "
                f"optimizer.zero_grad(). To train a part of the model, freeze the others with requires_grad_(False)."
            )
        return bool(dropped)

    def clear(self) -> None:
        """Take placeholders out of `param.grad` until `show`. Forget gradients of the last step that the program has dropped or replaced."""
        self.common_factor()
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
    """After a failed backward pass, drop gradients in `param.grad` whose hook was not called."""
    with DisableTorchFunctionSubclass():
        for state in states:
            if state.trainable and get_grad(state.param) is not state.departed:
                set_grad(state.param, None)
