"""The optimizers of one engine, used as one optimizer.

Knows parameter groups and options. Must not know chunks or gradients, or the calls of step() and zero_grad(): optimizer_calls.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infinity.engine.steps.refusals import described, different_options, shared_parameter
from infinity.errors import ConfigError, UsageError
from infinity.optim.loss_scale import LossScale
from infinity.optim.rules import Rule

_COMMON = ("max_grad_norm", "accumulation_steps", "loss_scale")


class JoinedOptimizers:
    """The optimizers of one engine, as one optimizer with all their parameter groups. False if there are none.

    members: in the order of their creation; their groups follow each other in this order.
    """

    def __init__(self, members: Iterable = ()):
        self.members = tuple(members)

    def __bool__(self) -> bool:
        return bool(self.members)

    # The interface of one optimizer.

    @property
    def param_groups(self) -> list[dict]:
        return [group for each in self.members for group in each.param_groups]

    @property
    def rule(self) -> Rule:
        """The rule of parameters that are in no group: that of the first optimizer."""
        return self.members[0].rule

    def owner_of(self, group: dict):
        """The optimizer that has a parameter group."""
        return next(each for each in self.members if any(own is group for own in each.param_groups))

    def rule_of(self, group: dict) -> Rule:
        return self.owner_of(group).rule_of(group)

    @property
    def rules(self) -> list[Rule]:
        """The rule of each group, in order."""
        return [each.rule_of(group) for each in self.members for group in each.param_groups]

    @property
    def names_of_rules(self) -> list[str]:
        """The class of each group's rule."""
        return [type(rule).__name__ for rule in self.rules]

    @property
    def max_grad_norm(self) -> float | None:
        return self._common("max_grad_norm")

    @property
    def accumulation_steps(self) -> int:
        return self._common("accumulation_steps")

    @property
    def loss_scale(self) -> LossScale | None:
        return self._common("loss_scale")

    @property
    def made_at(self) -> str:
        """Files and lines where the program makes the optimizers."""
        return " and ".join(each.made_at for each in self.members)

    @property
    def kind(self) -> str:
        """The class of the first optimizer."""
        return type(self.members[0]).__name__

    def note_norm(self, norm: float) -> None:
        for each in self.members:
            each.grad_norm = norm

    def refer_to(self, checkpoint: dict | None, wait: Callable[[], object] = lambda: None) -> None:
        """As the method of `Optimizer`, for all."""
        for each in self.members:
            each.refer_to(checkpoint, wait)

    def _common(self, name: str) -> Any:
        """An option that all optimizers share. Raises ConfigError if they differ in it."""
        first = self.members[0]
        for other in self.members[1:]:
            if getattr(other, name) != getattr(first, name):
                raise ConfigError(different_options(name, first, other))
        return getattr(first, name)

    # Members.

    def joined_by(self, optimizer, trained: Mapping[int, str]) -> tuple[JoinedOptimizers, list]:
        """Returns these optimizers with a new one, and those that leave because the new one has all their parameters.

        trained: names of the parameters that train, by id. Raises ConfigError if the new one has some parameters of another optimizer.
        """
        new, replaced = _ids(optimizer), []
        for each in self.members:
            if new & _ids(each):
                if trained.keys() & _ids(each) - new:
                    _refuse_shared(new, each, trained)
                replaced.append(each)
        return JoinedOptimizers([*(each for each in self.members if each not in replaced), optimizer]), replaced

    def refuse_shared(self, optimizer, trained: Mapping[int, str]) -> None:
        """Raise ConfigError if another optimizer has a parameter of this one. trained: as of `joined_by`."""
        for each in self.members:
            if each is not optimizer:
                _refuse_shared(_ids(optimizer), each, trained)

    def check_options(self) -> None:
        """Raise ConfigError unless the options of all gradients are equal in all optimizers."""
        for name in _COMMON:
            self._common(name)

    def require_all(self, what: str, given: object) -> None:
        """Raise UsageError unless `given` is the only optimizer, or a list or tuple of all. what: the call that needs all."""
        named = list(given) if isinstance(given, (list, tuple)) else [given]
        if any(all(each is not other for other in self.members) for each in named) or not named:
            raise UsageError(f"{what}: the optimizer is not that of this model")
        if missing := [each for each in self.members if all(each is not other for other in named)]:
            raise UsageError(
                f"{what} with some of the model's optimizers: their states form one checkpoint. Pass all of them as a list, such as "
                f"[{', '.join(type(each).__name__.lower() for each in self.members)}]. Missing: {', '.join(described(missing))}"
            )


def _ids(optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _refuse_shared(new: set[int], other, trained: Mapping[int, str]) -> None:
    """Raise ConfigError if another optimizer has one of these parameters, by id."""
    if shared := new & _ids(other):
        names = sorted(trained[param] for param in shared if param in trained)
        raise ConfigError(shared_parameter(names[0] if names else "a parameter", other))
