"""The trial of a new division of device memory: a comparison of the step times before and after.

Knows clocks and the shapes of inputs. Must not know the parts of the division.
"""

# [Note: when a division has failed]
# Step times vary. So a division fails after two longer steps in a row, of which the second is also longer than the step before the division.
# The first step after a division does not count: the division has waited for updates that otherwise run in this step. All other steps have
# the same inputs. A record on the device can lengthen steps if the record displaces bytes that then come from a slow drive: consecutive
# steps of 5.1, 6.6, 8.0 and 9.7 s were measured. A step lasts from its first pass to step(). Without step(), as in an evaluation, the length
# of a step is unknown, and no division is on trial.
# Steps can also become longer for another reason, such as another process. In the first steps of a run, host memory still absorbs the writes to
# NVMe, and later steps are longer. In these cases a step without the division is longer than the step before the division, too. So the second
# step without the division decides, if its inputs are those of the last step with the division. If that step is longer than the step before the
# division, the division comes back, and is not on trial again. Two cases were measured. A mixture of experts of 7.1 B parameters took 7.7 s with
# the division, 12.6 s with one thread for updates, and 31.8 s after the division was undone for this. A model of 1.2 B parameters on NVMe took
# 6.1 s in the first step, 6.4, 7.5 and 9.0 s in the next ones, and 8.6 s in all later steps, with the division or without.

from __future__ import annotations

from infinity.system.events import now

NUM_STEPS = 8  # length of a trial
LONGER = 1.05  # a longer step takes at least this multiple of the step before

Shapes = tuple[tuple[int, ...], ...]


class AllocationTrial:
    """The trial of the last division. num_failed: divisions that made steps longer."""

    def __init__(self):
        self.num_failed = 0
        self._began: float | None = None  # start of the current step
        self._inputs = 0  # hash of the input shapes of the step's passes
        self._last = 0, 0.0  # (inputs, seconds) of the last step
        self._steps: list[tuple[int, float]] = []  # the step before the division, and the steps after the next one
        self._is_next = False  # the current step is the first one after the division
        self._failed: tuple[int, float] | None = None  # the step before a division that has just failed
        self._num_since = 0  # steps since then

    @property
    def is_on(self) -> bool:
        return bool(self._steps)

    @property
    def has_just_failed(self) -> bool:
        """Whether a division has failed at most two steps ago. Equal on all ranks."""
        return self._failed is not None

    @property
    def was_wrong(self) -> bool:
        """Whether a division has just failed, and the second step without the division is longer than the step before the division."""
        if self._failed is None or self._num_since != 2:
            return False
        inputs, seconds = self._failed
        return self._last[0] == inputs and self._last[1] > LONGER * seconds

    def begin_pass(self, shapes: Shapes) -> None:
        """Note the beginning of a pass that builds a graph, with inputs of these shapes."""
        self._inputs = hash((self._inputs, shapes))
        if self._began is None:
            self._began = now()

    def drop_passes(self) -> None:
        """Forget the passes so far, which do not belong to the current step."""
        self._inputs, self._began = 0, None

    def step_done(self) -> bool:
        """End the step. Returns whether the division has failed."""
        self._last = self._inputs, 0.0 if self._began is None else now() - self._began
        self._num_since += self._began is not None  # an evaluation is no step
        self.drop_passes()
        if self._num_since > 2:
            self._failed = None
        if len(self._steps) > NUM_STEPS:
            self._steps = []
        if not self._steps or self._is_next:
            self._is_next = False
            return False
        self._steps.append(self._last)
        inputs, seconds = zip(*self._steps)
        is_longer = len(seconds) > 2 and seconds[-2] > LONGER * seconds[-3] and seconds[-1] > LONGER * max(seconds[-2], seconds[0])
        return is_longer and all(each == inputs[0] for each in inputs[-3:])

    def begin(self, is_new: bool) -> None:
        """Note a division that was made after the last step. is_new: the division differs from the previous one."""
        self._steps, self._is_next = [self._last] if is_new else [], is_new

    def fail(self) -> None:
        self.num_failed += 1
        self._failed, self._num_since, self._steps = self._steps[0], 0, []
