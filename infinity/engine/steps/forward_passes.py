"""Counts of forward passes: passes with a possible backward pass, and passes that no step() will end.

Knows numbers. Must not know modules or the result of a pass.
"""

from __future__ import annotations

import dataclasses

MAX_OPEN = 16  # more graphs than this never go backward


@dataclasses.dataclass
class ForwardPasses:
    """Forward passes of one engine.

    num_training: passes with a graph and trainable parameters, since the last backward pass that brought gradients.
    num_open: passes without an optimizer, or without trainable parameters, whose graph may still go backward. One plan fetches the weights
    of all these passes. 0: the next such pass begins a new plan.
    are_checked: the engine has looked for other optimizers and trainers before the first training pass.
    """

    num_training: int = 0
    num_open: int = 0
    are_checked: bool = False

    def count(self, trains: bool) -> None:
        """Count a forward pass that begins. trains: the pass has a graph and trainable parameters."""
        self.num_training += trains

    def end_training(self) -> None:
        """Note that a backward pass has brought gradients."""
        self.num_training = 0

    def note_checked(self) -> None:
        self.are_checked = True

    def begin_open(self) -> bool:
        """Count a forward pass that begins and that no step() will end. Returns whether this pass begins a new plan."""
        if self.num_open in (0, MAX_OPEN):
            self.num_open = 0
            return True
        self.num_open += 1
        return False

    def graph_built(self) -> None:
        """Note that an outermost forward pass returned a tensor that requires a gradient: its backward pass follows the same plan."""
        self.num_open = max(self.num_open, 1)

    def end_open(self) -> None:
        """Note the end of a backward pass."""
        self.num_open = 0
