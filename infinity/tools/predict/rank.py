"""A simulated rank: spans, chunks, the plan of a step, and the distances to the next uses.

Knows the engine's data about a chunk, but no bytes. Must not know when a step is over, or how its time is shown. The methods of the lanes are
in simulated_updates.py and simulated_weights.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan import schedule
from infinity.plan.host_memory import MIN_GRADIENT_SLOTS
from infinity.plan.packing import Layout
from infinity.plan.placement import Placement, look_ahead
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.route import Route, to_gradient
from infinity.plan.schedule import Moment, Use
from infinity.plan.tiers import DEVICE, Tier, in_storage
from infinity.tools.predict.clock import Clock, Flag
from infinity.tools.predict.host import PlayedRecords, PlayedRequest
from infinity.tools.predict.links import LINKS, Links


@dataclass(frozen=True)
class Step:
    """The work of a step on a rank. uses: the trace. seconds: of compute, by position. gradients: parameters whose gradients are complete
    after a position. backward: the first position after forward. deferred: updates follow step()."""

    uses: Sequence[Use]
    seconds: Sequence[float]
    gradients: Sequence[Sequence[int]]
    backward: int
    deferred: bool
    keep: bool


class PlayedChunk:
    """The part of ChunkState that the simulation needs."""

    def __init__(self, index: int, span: PlayedSpan, record: Record, homes: dict[str, Tier], trainable: bool, nbytes: int, num_params: int):
        self.index = index
        self.span = span
        self.record = record
        self.homes = homes
        self.trainable = trainable
        self.nbytes = nbytes  # of the weights of all ranks
        self.num_params = num_params
        self.request: PlayedRequest | None = None  # of the last copy
        self.copied = self.gathered = self.gradient = self.updating = Flag(True)
        self.pending = self.update_expected = self.weights_expected = False
        self.has_gradient = self.updated = self.reduced = self.received = self.behind = False
        self.missing = self.gradient_number = 0

    @property
    def weights_wanted(self) -> bool:
        return self.update_expected or self.weights_expected


class PlayedSpan:
    def __init__(self, index: int, nbytes: int):
        self.index = index
        self.nbytes = nbytes
        self.chunks: list[PlayedChunk] = []
        self.presence = "away"
        self.pinned = False


class Rank:
    """The shared parts of a simulated rank: spans, chunks, the plan with the current position, links, and host copies."""

    def __init__(
        self, layout: Layout, records, placement: Placement, step: Step, links: Links, on_device: frozenset[int], compresses: bool
    ):
        self.layout, self.placement, self.step, self.links = layout, placement, step, links
        self.spans = [PlayedSpan(span.index, span.nbytes) for span in layout.spans]
        self.chunks: list[PlayedChunk] = []
        for chunk, record in zip(layout.chunks, records):
            homes = {kind: placement.homes[kind][chunk.index] for kind in KINDS}
            if chunk.span in on_device:
                homes = dict.fromkeys(KINDS, DEVICE)
            span, params = self.spans[chunk.span], {piece.param for piece in chunk.pieces}
            made = PlayedChunk(chunk.index, span, record, homes, chunk.trainable, chunk.nbytes, len(params))
            self.chunks.append(made)
            span.chunks.append(made)
        for span in self.spans:
            span.pinned = placement.pinned or span.index in on_device
            span.presence = "home" if span.pinned else "away"
        self.budget = placement.device_nbytes - placement.fixed_nbytes
        self.used = self.peak = 0
        self.held: frozenset[int] = frozenset()
        self.num_updates_begun = 0
        self.complete = self._completions()
        self._plan()
        self.clock = Clock(links.speeds)
        self.stalls = dict.fromkeys(LINKS, 0.0)
        next_uses = dict(zip(KINDS, (self._next_weights_use, self._next_states_use, self._next_gradient_use)))
        self.records = PlayedRecords(self.clock, links, placement, self.chunks, next_uses, keep=step.keep, compresses=compresses)

    def moment(self, chunk: PlayedChunk) -> Moment:
        on_device, in_memory = chunk.homes[STATES].is_device, not in_storage(chunk.homes.values())
        return schedule.moment(deferred=self.step.deferred, on_device=on_device, in_memory=in_memory)

    def may_wait(self, chunk: PlayedChunk) -> bool:
        """Like ChunkUpdates._may_wait."""
        return not chunk.homes[GRADIENTS].is_storage or self.records.caches[GRADIENTS].slots.num_free > MIN_GRADIENT_SLOTS

    def begin_step(self) -> None:
        self.route.cursor.restart()
        self.num_updates_begun = 0
        self.release()

    def hold(self, use: Use) -> None:
        """An op begins and holds spans."""
        self.route.cursor.advance(use.key)
        self.held = frozenset({*use.spans, *use.held})

    def release(self) -> None:
        self.held = frozenset()

    def wait(self, link: str, *flags: Flag):
        """The training thread waits for the flags. The time counts as a stall of the link."""
        start = self.clock.now
        yield from flags
        self.stalls[link] += self.clock.now - start

    def leave(self, span: PlayedSpan) -> None:
        span.presence = "away"
        self.used -= span.nbytes

    def _completions(self) -> dict[int, list[int]]:
        """Chunks whose gradients are complete after a position. The ops decide this, as they decide reductions and updates in the engine."""
        left = {chunk.index: {piece.param for piece in chunk.pieces} for chunk in self.layout.chunks if chunk.trainable}
        complete: dict[int, list[int]] = {}
        for position, params in enumerate(self.step.gradients):
            for param in params:
                for chunk in self.layout.chunks_of(param):
                    if chunk in left:
                        left[chunk].discard(param)
                        if not left[chunk]:
                            complete.setdefault(position, []).append(chunk)
        return complete

    def _plan(self) -> None:
        completed = [(position, chunk) for position, chunks in self.complete.items() for chunk in chunks]
        early = [(p, c) for p, c in completed if self.moment(self.chunks[c]) is Moment.GRADIENT]
        slots_ahead, states_ahead = look_ahead(self.placement)
        actions = schedule.plan(
            self.step.uses,
            nbytes={span.index: 0 if span.pinned else span.nbytes for span in self.spans},
            budget=self.budget,
            slots_ahead=slots_ahead,
            slots_of={span.index: sum(chunk.homes[WEIGHTS].is_storage for chunk in span.chunks) for span in self.spans},
            keep=self.step.keep,
            reductions=completed if self.layout.partition.is_shared else (),
            updates=early,
            span_of={chunk.index: chunk.span for chunk in self.layout.chunks},
            states_ahead=states_ahead,
        )
        self.route = Route(self.step.uses, actions, early)

    def _next_weights_use(self, chunk: PlayedChunk) -> float:
        update_comes = chunk.update_expected or not chunk.updating.raised
        return self.route.to_weights(chunk.index, chunk.span.index, update_comes=update_comes)

    def _next_states_use(self, chunk: PlayedChunk) -> float:
        return self.route.to_states(chunk.index, chunk.span.index, num_begun=self.num_updates_begun)

    def _next_gradient_use(self, chunk: PlayedChunk) -> float:
        in_use = bool(chunk.missing) or not chunk.updating.raised
        return to_gradient(self.route, chunk.index, chunk.span.index, num_begun=self.num_updates_begun, in_use=in_use)
