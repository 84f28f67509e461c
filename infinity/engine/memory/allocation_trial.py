"""Whether a division of the device has made steps longer: it is on trial for a few steps.

Knows clocks and the shapes of inputs. Must not know what was divided.
"""

# [Note: when a division has failed]
# Steps vary. So it takes two in a row that are longer than the one before, the second of them also longer than the one before the
# division, all with the same inputs. What is on the device by choice can do that where it pushes out what then has to be read from a drive
# that tires: 5.1, 6.6, 8.0, 9.7 s were seen. A step lasts from its first pass to step(): where no step() ends passes, as of a model that
# is only evaluated, how long one lasts is not known, and nothing is on trial.

from __future__ import annotations

from infinity.system.events import now

NUM_STEPS = 8  # of a trial
LONGER = 1.05  # a step that takes so many times what the one before took

Shapes = tuple[tuple[int, ...], ...]


class AllocationTrial:
    """Of the last division. num_failed: divisions that made steps longer."""

    def __init__(self):
        self.num_failed = 0
        self._began: float | None = None  # the step under way, with its first pass
        self._inputs = 0  # of its passes, a digest: they may be many, and no step() follow
        self._last = 0, 0.0  # the inputs of the last step, and its seconds
        self._steps: list[tuple[int, float]] = []  # that before the division, and those after it

    @property
    def is_on(self) -> bool:
        return bool(self._steps)

    def begin_pass(self, shapes: Shapes) -> None:
        """A pass that builds a graph begins, over inputs of these shapes."""
        self._inputs = hash((self._inputs, shapes))
        if self._began is None:
            self._began = now()

    def drop_passes(self) -> None:
        """Those so far are none of the step under way."""
        self._inputs, self._began = 0, None

    def step_done(self) -> bool:
        """Returns whether steps have become longer."""
        self._last = self._inputs, 0.0 if self._began is None else now() - self._began
        self.drop_passes()
        if len(self._steps) > NUM_STEPS:
            self._steps = []
        if not self._steps:
            return False
        self._steps.append(self._last)
        inputs, seconds = zip(*self._steps)
        is_longer = len(seconds) > 2 and seconds[-2] > LONGER * seconds[-3] and seconds[-1] > LONGER * max(seconds[-2], seconds[0])
        return is_longer and all(each == inputs[0] for each in inputs[-3:])

    def begin(self, is_new: bool) -> None:
        """The device was divided after the last step, or nothing of it has changed."""
        self._steps = [self._last] if is_new else []

    def fail(self) -> None:
        self.num_failed += 1
        self._steps = []
