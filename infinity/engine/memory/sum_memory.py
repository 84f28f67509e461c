"""Device memory for the sums of layer-wise steps: they take the place of activations, one segment after the other.

Pure arithmetic over chunks in the order of their sums, and the bytes of ops. Knows which sums have a place in host memory. Must not know the
device, or how sums move.
"""

# [Note: sums in the place of activations]
# A layer-wise step has the most activations at the end of the forward passes: the inputs of all blocks for each micro-batch. The backward
# passes free them, segment by segment, and bring a sum of gradients for each segment. Sums that wait for step() therefore need hardly more
# memory than the activations have left when they come. The next forward pass begins the updates in its own order, so the same holds in the
# other direction. (14.8 B parameters, 8 micro-batches of 16,384 tokens: 64 GB of inputs, then 59 GB of sums.)
#
# The gradients of the last chunks come first, while most activations are on the device. These gradients have places in host memory. Such a
# gradient waits on the device only if there is also room for all later gradients without a place in host memory.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from infinity.engine.memory.op_forecast import OpForecast
from infinity.tiers.chunk_state import ChunkState


class SumMemory:
    """Notes the sums of each layer-wise step, and, while a step is measured, the bytes of its ops.

    nbytes_of(chunk): bytes of a chunk's sum on the device. chunks: all chunks of the engine.
    """

    def __init__(self, nbytes_of: Callable[[ChunkState], int], chunks: Iterable[ChunkState]):
        self.nbytes_of = nbytes_of
        self.forecast = OpForecast()  # of the measured step
        self._may_forecast = True  # until an allocation fails
        self.coming: dict[ChunkState, int] = {}  # chunks whose sums came in this step, in order -> number of measured ops before
        self._without_host_place = [chunk for chunk in chunks if chunk.trainable and not chunk.has_host_place]
        self._op_nbytes: list[int] = []  # of the measured step, in order
        self._segment_nbytes = 0  # most bytes of the sums of one segment
        self.in_rounds = False  # whether the last step ran in rounds
        self._has_rounds = False  # the current one
        self._later_nbytes: dict[ChunkState, int] = {}  # most bytes of any op after the chunk's sum came
        self._peak_with_sums_nbytes: dict[ChunkState, int] = {}  # most bytes of later ops and later sums without a host place, at any time

    def note_op(self, nbytes: int) -> None:
        """An op of a measured step has allocated so many bytes."""
        self._op_nbytes.append(nbytes)
        self.forecast.note_op(nbytes)

    def note_sums(self, chunks: Iterable[ChunkState]) -> None:
        """Sums of these chunks come next, some of them perhaps not for the first time."""
        trainable = [chunk for chunk in chunks if chunk.trainable]
        self._segment_nbytes = max(self._segment_nbytes, sum(map(self.nbytes_of, trainable)))
        for chunk in trainable:
            self.coming.setdefault(chunk, len(self._op_nbytes))

    def end_step(self, *, is_measured: bool) -> list[ChunkState]:
        """End a step. Returns the chunks of its sums, in order."""
        coming, self.coming = self.coming, {}
        self.in_rounds, self._has_rounds = self._has_rounds, False
        if is_measured:
            peaks = list(itertools.accumulate(reversed(self._op_nbytes), max))[::-1]
            for chunk, position in coming.items():
                later = peaks[position] if position < len(peaks) else 0
                self._later_nbytes[chunk] = max(later, self._later_nbytes.get(chunk, 0))
        self._op_nbytes, self.forecast = [], OpForecast()
        peak = 0
        for chunk in reversed(coming):
            self._peak_with_sums_nbytes[chunk] = peak = max(peak, self._later_nbytes.get(chunk, 0))
            peak += 0 if chunk.has_host_place else self.nbytes_of(chunk)
        return list(coming)

    def later_nbytes(self, chunks: Iterable[ChunkState], most: int) -> int:
        """The most bytes of any op after the first sums of these chunks come. most: of any op, for chunks that were not measured."""
        return max((self._later_nbytes.get(chunk, most) for chunk in chunks if chunk.gradient.job is None), default=most)

    def end_forecasts(self) -> None:
        """An allocation has failed: from now on any later op of a measured step may be as large as the largest one so far."""
        self._may_forecast = False

    def peaks_of_later(self, chunks: Iterable[ChunkState], position: int | None, most: int, *, is_measured: bool) -> tuple[int, int]:
        """(Peak of later ops, peak of these ops together with later sums that have no place in host memory). chunks: whose sums come next.
        position: of the segment that goes backward next, None if another round follows. most: bytes of the largest op so far.
        """
        chunks = list(chunks)
        self._has_rounds |= position is None
        if not is_measured:
            ops = self.later_nbytes(chunks, most)
        else:
            ops = self.forecast.begin_backward(position) if self._may_forecast and position is not None else most
        return ops, self.peak_with_sums_nbytes(chunks, ops)

    def peak_with_sums_nbytes(self, chunks: Iterable[ChunkState], most: int) -> int:
        """The peak of later ops together with those later sums that have no place in host memory. chunks: whose sums come next. most: bytes of
        the largest op, if no step has had some of these chunks.
        """
        chunks = [chunk for chunk in chunks if chunk.gradient.job is None]
        if all(chunk in self._peak_with_sums_nbytes for chunk in chunks):
            return max((self._peak_with_sums_nbytes[chunk] for chunk in chunks), default=most)
        later = set(self._without_host_place).difference(self.coming, chunks)
        return most + sum(map(self.nbytes_of, later))

    def needed_nbytes(self, sums: Iterable[ChunkState], activation_nbytes: int, *, wait: bool = True) -> tuple[int, int]:
        """(bytes that these sums, in order, need beside the largest activations, the most bytes of sums at a time). wait: all sums wait for
        step(). Otherwise the sums of two segments are there, because the updates of one may still run when the next segment goes backward.
        In rounds all sums wait for the last round.
        """
        most, waiting, limit = 0, 0, math.inf if wait or self.in_rounds else 2 * self._segment_nbytes
        for chunk in sums:
            waiting = min(waiting + self.nbytes_of(chunk), limit)
            most = max(most, self._later_nbytes.get(chunk, activation_nbytes) + waiting)
        return max(0, most - activation_nbytes), waiting
