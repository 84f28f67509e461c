"""Forecasts the memory of ops in the backward passes of a measured layer-wise step, from the ops of the step so far.

Pure arithmetic over positions of segments and bytes of ops. Must not know the device, or who needs the memory.
"""

# [Note: ops that are left]
# Backward passes free the activations of one segment after the other. So later ops usually need no more memory than those of the last segment.
# An earlier segment may have larger ops, as a vision tower or a wide first layer has. Its forward pass was measured in the same step. The
# backward pass of a segment takes more than the forward pass, because it also holds gradients. The largest such difference of the step so far
# is added. An op may still take more than the forecast. If an allocation fails, the engine makes no more forecasts.

from __future__ import annotations


class OpForecast:
    """The ops of one round of micro-batches."""

    def __init__(self):
        self._forward: dict[int, int] = {}  # most bytes of any op in the forward passes, by the segment's position
        self._taken = 0  # most bytes of any op since the last segment began
        self._position: int | None = None  # of the segment that went backward last
        self._more = 0  # the most that a backward pass took in addition to the forward pass of the segment

    def note_op(self, nbytes: int) -> None:
        """An op has allocated so many bytes."""
        self._taken = max(self._taken, nbytes)

    def end_forward(self, position: int) -> None:
        """All forward passes have left the segment at this position. The first segment begins a new round, or repeats a step that has failed."""
        if position <= min(self._forward, default=position):
            self._forward, self._position, self._more = {}, None, 0
        self._forward[position] = self._take()

    def begin_backward(self, position: int) -> int:
        """The segment at this position goes backward next. Returns the most bytes that any op will probably take from now on."""
        taken = self._take()
        if self._position is not None:
            self._more = max(self._more, taken - self._forward.get(self._position, taken))
        self._position = position
        left = max((nbytes for at, nbytes in self._forward.items() if at <= position), default=0)
        return max(taken, left + self._more)

    def _take(self) -> int:
        taken, self._taken = self._taken, 0
        return taken
