"""Spans that stay on the device from step to step: those whose records visit it, and frozen ones.

Knows spans, records and their homes. Must not know how many bytes the device has for them.
"""

from __future__ import annotations

from infinity.plan.placement import Placement
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.span_state import SpanState
from infinity.tiers.weights import Weights


class KeptSpans:
    """Changes which spans are kept on the device. All calls come from the training thread, on all ranks at the same points."""

    def __init__(self, weights: Weights, gradients: Gradients, placement: Placement):
        self.registry, self.tier = weights.registry, weights.tier
        self.weights, self.values, self.updater = weights, weights.values, weights.updater
        self.gradients, self.placement = gradients, placement
        self.promoted: list[tuple[SpanState, int]] = []  # spans with records on the device, and bytes
        self.frozen: list[SpanState] = []  # spans without records to update

    @property
    def nbytes(self) -> int:
        """Device bytes of all of them."""
        found = sum(nbytes for _, nbytes in self.promoted) + sum(span.nbytes for span in self.frozen)
        return found if self.placement.pinned else found + sum(span.nbytes for span, _ in self.promoted)

    @property
    def promoted_chunks(self) -> list[ChunkState]:
        return [chunk for span, _ in self.promoted for chunk in self.registry.chunks_in(span)]

    def promote(self, span: SpanState, nbytes: int, *, keeps_gradient: bool) -> None:
        """Bring a span's records, and gradients that wait for step(), to the device, until `demote`. keeps_gradient: the
        memory of gradients stays from step to step."""
        chunks = self.registry.chunks_in(span)
        for chunk in chunks:
            self.updater.finish(chunk)
            chunk.copy_for_snapshot()
            if chunk.gradient.job is not None:
                self.gradients.wait_for(chunk)
        if offloaded := [chunk for chunk in chunks if chunk.gradient.is_offloaded]:
            self.gradients.stay_on_device(offloaded)
            for chunk in offloaded if not keeps_gradient else ():
                self.gradients.memory.set_for_step(chunk.gradient.device_shard, True)
        self.weights.acquire_aside([span])
        self.values.keep_written(span)
        if not span.pinned:
            self.tier.pin(span)
        for chunk in chunks:
            self.values.to_device(chunk)
        self.values.make_snapshot(span)
        self.weights.release(span)
        self.promoted.append((span, nbytes))

    def demote(self) -> None:
        """Send the records that were promoted last back to their homes. Weights that an op holds stay until the op ends."""
        span, _ = self.promoted[-1]
        self.gradients.drain()
        self.updater.drain()
        self.values.keep_written(span)
        for chunk in self.registry.chunks_in(span):
            self.values.to_home(chunk)
            self.gradients.leave_device(chunk)
        self.values.drop_snapshot(span)
        if not self.placement.pinned:
            self.tier.unpin(span)
            if not span.holds:
                self.weights.invalidate(span)
        self.promoted.pop()

    def keep_frozen(self) -> None:
        """From now on frozen spans stay, until `release_frozen`. Spans that forward passes write to, such as embeddings with max_norm, come and
        go: their records get the new values when they go."""
        for span in self.registry.spans:
            is_written = any(state.written_in_forward for state in span.params)
            if not span.span.trainable and not span.pinned and not is_written:
                self.weights.acquire_aside([span])
                self.tier.pin(span)
                self.weights.release(span)
                self.frozen.append(span)

    def release_frozen(self) -> None:
        """Frozen spans come and go again."""
        while self.frozen:
            self.tier.unpin(span := self.frozen.pop())
            self.weights.evict(span)
