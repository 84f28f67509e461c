"""Calls of step() and zero_grad() of each of an engine's optimizers, until the engine makes the step of all.

Knows the optimizers, and an engine's steps. Must not know how gradients are kept, or how updates begin.
"""

# [Note: one step of several optimizers]
# Several optimizers may share one engine, each with parameters of its own. Gradients, their norm and the passes of a step are common to all.
# Therefore the engine makes one step, when each optimizer has called step(). Each call notes a snapshot of the optimizer's hyper-parameters,
# because a scheduler may change them before the last call comes. Three rules follow for zero_grad():
#   - After the optimizer's step(), zero_grad() changes nothing: the gradients belong to the step that is due.
#   - Without a step(), while others call it, zero_grad() means that the optimizer skips the step. Its parameters, moments and step counts
#     stay. The norm of all gradients includes its gradients, as if the program had clipped before.
#   - If all optimizers call zero_grad() and none calls step(), the engine drops all gradients.
# A zero_grad() from before the first backward pass of a step says nothing about this step, and is forgotten there.

from __future__ import annotations

from infinity.engine.steps.joined_optimizers import JoinedOptimizers
from infinity.engine.steps.outside_gradients import take_gradients
from infinity.engine.steps.refusals import described, step_is_missing, stepped_twice, zero_grad_is_missing
from infinity.errors import UsageError


class OptimizerCalls:
    """The calls of the current step, see [Note: one step of several optimizers]."""

    def __init__(self, optimizers: JoinedOptimizers):
        self._members = optimizers.members
        self._stepped: dict[int, list[dict]] = {}  # snapshots of the groups, by the id of an optimizer that has called step()
        self._dropped: set[int] = set()  # ids of the optimizers that have called zero_grad()

    # Notes.

    def begin_gradients(self) -> None:
        """The first backward pass of a step begins."""
        self._dropped.clear()

    def note_step(self, optimizer) -> None:
        """Note step() of one optimizer. After its zero_grad(), the optimizer has no gradients, and skips the step."""
        if id(optimizer) in self._stepped:
            raise UsageError(stepped_twice(optimizer, self._missing()))
        if id(optimizer) not in self._dropped:
            self._stepped[id(optimizer)] = optimizer.snapshot()

    def note_zero_grad(self, optimizer) -> None:
        self._dropped.add(id(optimizer))

    def forget(self, optimizer) -> None:
        """A call of this optimizer has raised before the end of the step, and may be repeated."""
        if self._stepped:
            self._stepped.pop(id(optimizer), None)
            self._dropped.discard(id(optimizer))

    def forget_all(self) -> None:
        """All gradients were dropped."""
        self._stepped.clear()
        self._dropped.clear()

    def end_step(self) -> None:
        """The engine has made a step. Notes of zero_grad() stay: the engine forgets the gradients of this step after that of all optimizers."""
        self._stepped.clear()

    # Questions.

    def has_stepped(self, optimizer) -> bool:
        """Whether the optimizer has called step(), and others have not."""
        return id(optimizer) in self._stepped

    @property
    def wait(self) -> bool:
        """Whether some optimizers have called step(), and the engine has not made the step."""
        return bool(self._stepped)

    @property
    def are_complete(self) -> bool:
        """Whether at least one optimizer has called step(), and all others have, or skip the step."""
        return self.wait and not self._missing()

    @property
    def all_drop(self) -> bool:
        return len(self._dropped) == len(self._members)

    def is_last_to_drop(self, optimizer) -> bool:
        """Whether all other optimizers have called zero_grad(), and none has called step()."""
        return not self.wait and len(self._dropped | {id(optimizer)}) == len(self._members)

    def snapshot(self) -> list[dict]:
        """The hyper-parameters of each group. Those of an optimizer that has called step() are from that call."""
        return [hyper for each in self._members for hyper in self._stepped.get(id(each)) or each.snapshot()]

    def skipped_groups(self) -> set[int]:
        """Indices of the parameter groups whose optimizer skips the step."""
        owners = [each for each in self._members for _ in each.param_groups]
        return {index for index, owner in enumerate(owners) if id(owner) not in self._stepped}

    def why_no_pass(self, *, has_gradients: bool) -> str | None:
        """The message that refuses a pass because only some optimizers have called step() or zero_grad(). has_gradients: of this step."""
        if self.wait:
            return step_is_missing(self._missing())
        return zero_grad_is_missing(self._missing()) if has_gradients and self._dropped else None

    def refuse(self) -> None:
        """Raise UsageError if only some optimizers have called step()."""
        if self.wait:
            raise UsageError(step_is_missing(self._missing()))

    def _missing(self) -> list[str]:
        """The optimizers that have called neither step() nor zero_grad(), described."""
        return described(each for each in self._members if id(each) not in self._stepped and id(each) not in self._dropped)


def step_of(cycle, optimizer) -> bool:
    """Note step() of one optimizer. The last of these calls makes the step. Returns whether the step was made."""
    calls = cycle.optimizer_calls
    take_gradients(cycle)
    if not (cycle.state.num_backwards or calls.wait):  # the program itself has set all gradients, after any zero_grad()
        calls.begin_gradients()
    calls.note_step(optimizer)
    return _go_on(cycle, optimizer)


def zero_grad_of(cycle, optimizer) -> bool:
    """Note zero_grad() of one optimizer. The last of these calls drops all gradients, or makes the step that this optimizer skips.

    Returns whether a step was made. Raises UsageError if a backward pass has begun to update.
    """
    calls = cycle.optimizer_calls
    if calls.has_stepped(optimizer):
        calls.note_zero_grad(optimizer)
        return False
    if calls.is_last_to_drop(optimizer):
        cycle.zero_grad()
        return False
    cycle.refuse_early()
    calls.note_zero_grad(optimizer)
    return _go_on(cycle, optimizer)


def _go_on(cycle, optimizer) -> bool:
    """Make the step if the last call for it has come. optimizer: of the call."""
    calls = cycle.optimizer_calls
    if not calls.are_complete:
        return False
    try:
        cycle.step()
    except BaseException:
        calls.forget(optimizer)
        raise
    if calls.all_drop:
        cycle.zero_grad()
    return True
