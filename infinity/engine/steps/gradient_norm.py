"""The norm of all gradients of a step, and the first gradient that is not finite.

Knows chunks and the place of a gradient. Must not know when a step begins or ends, or how the norm is used.
"""

from __future__ import annotations

from infinity.optim.adam import NormAccumulator
from infinity.system.events import Events
from infinity.system.lanes import Job
from infinity.system.ranks import Ranks
from infinity.system.streams import current_stream
from infinity.system.waits import waits
from infinity.tiers.arithmetic import add_norm
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.updates import Updater


class GradientNorm:
    """is_expected: the norm is needed after this backward pass, so squares are summed as gradients become complete."""

    def __init__(self, gradients: Gradients, updater: Updater, ranks: Ranks, events: Events):
        self.gradients, self.updater = gradients, updater
        self.params = gradients.registry.params
        self.ranks, self.events = ranks, events
        self.is_expected = False

    def expect(self, is_expected: bool) -> None:
        self.is_expected = is_expected

    def add_complete(self, chunk: ChunkState) -> None:
        """Sum the squares of a complete gradient during the backward pass, if the norm is expected."""
        if self.is_expected:
            self._begin_sum(chunk)

    def of(self, chunks: list[ChunkState]) -> float:
        """The global norm of the summed gradients, the same bits for every placement and chunk size. All ranks must make this call."""
        total = NormAccumulator()
        for chunk in chunks:
            if chunk.gradient.squares is None:
                self._begin_sum(chunk)
            with waits("the norm of all gradients"):
                total.merge(self.events.wait("d2h", chunk.gradient.squares, chunk.index))
        self.ranks.sum_(total.limbs)
        return total.value()

    def first_nonfinite(self, chunks: list[ChunkState]) -> str:
        """Describes the first gradient that is not finite."""
        for chunk in chunks:
            with self.gradients.shard(chunk) as gradient:
                for piece in chunk.pieces:
                    part = gradient[piece.start : piece.start + piece.numel]
                    if piece.param in chunk.gradient.received and not part.isfinite().all():
                        return f"the first is of {self.params[piece.param].name}"
        return "they lie in the shards of other ranks"

    def _begin_sum(self, chunk: ChunkState) -> None:
        job, total = chunk.gradient.job, NormAccumulator()

        def add() -> NormAccumulator:  # the transfer may still be in its lane's queue
            stream = job.wait()
            if stream is not None:  # of a gradient that stays on the device
                current_stream(self.gradients.device).wait_stream(stream)
            with self.gradients.shard(chunk) as gradient:
                add_norm(chunk, gradient, total)
            return total

        # On the device, this thread's stream sums at once, in one pass at the device's speed. The lane would wait for all earlier work.
        chunk.gradient.sum_by(Job.over(add()) if chunk.gradient_on_device and job.done else self.updater.sum_squares(lambda: add().settled()))
