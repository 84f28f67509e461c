"""How far the average of the weights has come, and the refusal of training while the average is in the weights' place.

Knows numbers of steps. Must not know records, or how an average is computed.
"""

from __future__ import annotations

from infinity.errors import UsageError
from infinity.optim.average import AverageStep


class Averaging:
    """The average of one engine's weights. decay: None if the program keeps no average. num_steps: steps that the average contains.
    is_exchanged: the average is in the weights' place."""

    def __init__(self) -> None:
        self.decay: float | None = None
        self.num_steps = 0
        self.is_exchanged = False

    @property
    def is_kept(self) -> bool:
        """Whether records have an average."""
        return self.decay is not None

    def begin(self, decay: float) -> None:
        """Keep an average. The engine has not started."""
        self.decay = decay

    @property
    def last_step(self) -> AverageStep | None:
        """The average after the last training step."""
        return None if self.decay is None else AverageStep(self.decay, self.num_steps)

    @property
    def next_step(self) -> AverageStep | None:
        """The average after the current training step."""
        return None if self.decay is None else AverageStep(self.decay, self.num_steps + 1)

    def end_step(self) -> None:
        """The updates of a training step have begun, or were announced."""
        self.num_steps += 1

    def load(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def exchange(self) -> None:
        self.is_exchanged = not self.is_exchanged

    def refuse_exchanged(self, what: str, remedy: str = "Do this after the block") -> None:
        """Raise UsageError inside `with ema.weights()`."""
        if self.is_exchanged:
            raise UsageError(f"{what} inside `with ema.weights()`: the model has the averaged weights there. {remedy}")
