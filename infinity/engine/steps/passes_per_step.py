"""The number of backward passes in a step: declared by accumulation_steps, or marked pass by pass with `infinity.no_sync`.

Knows numbers of passes. Must not know gradients.
"""

# [Note: the number of passes with no_sync]
# A pass inside `infinity.no_sync` is not the last one of its step. The first pass outside is the last one. So the updates and sums of squares
# that may begin in a last pass begin in this pass. Once a step has had a pass inside `no_sync`, any number of passes may follow. In other
# steps, the optimizer's accumulation_steps counts. The program may call step() before the last pass, for example at the end of an epoch.

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class PassesPerStep:
    """may_be_several: whether an ordinary step may have several passes."""

    def __init__(self, *, may_be_several: bool = True):
        self.may_be_several = may_be_several
        self._more_come = False
        self._told: int | None = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block are not the last of their step."""
        before, self._more_come = self._more_come, True
        try:
            yield
        finally:
            self._more_come = before

    def begin_pass(self, num_backwards: int) -> None:
        """A backward pass begins. num_backwards: passes of the same step before this one."""
        if self._more_come:
            self._told = num_backwards + 2  # at least
        elif self._told is not None:
            self._told = num_backwards + 1

    def end_step(self) -> None:
        self._told = None

    def num_passes(self, declared: int) -> int:
        """Backward passes of the current step, as far as is known. declared: the optimizer's accumulation_steps."""
        return declared if self._told is None else self._told
