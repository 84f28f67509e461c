"""Simulates weights on their way to the ops, by the actions of the plan.

Plays tiers/weights.py on a virtual clock. Must not know when an update begins: rank.py decides.
"""

from __future__ import annotations

from infinity.plan import schedule, slots
from infinity.plan.record import STATES, WEIGHTS
from infinity.tools.predict.clock import Flag, PlayedLane
from infinity.tools.predict.host import PlayedRequest
from infinity.tools.predict.rank import PlayedChunk, PlayedSpan, Rank, Updates


class Weights:
    """The lanes cg and gg of a rank. `issue` and `bring` return the number of fetched chunks."""

    def __init__(self, rank: Rank, updates: Updates, cg: PlayedLane, gg: PlayedLane):
        self.rank, self.updates, self.cg, self.gg = rank, updates, cg, gg
        self.records, self.links, self.route = rank.records, rank.links, rank.route

    def issue(self, start: int):
        """Carry out the plan's actions from number `start` up to the next Run."""
        spans, chunks, num_fetched = self.rank.spans, self.rank.chunks, 0
        for number in range(start, len(self.route.actions)):
            match self.route.actions[number]:
                case schedule.Run():
                    break
                case schedule.Read(index):
                    self._read(spans[index])
                case schedule.Copy(index):
                    num_fetched += yield from self._copy(spans[index], needed=False)
                case schedule.Gather(index):
                    self._gather(spans[index])
                case schedule.Evict(index):
                    yield from self.evict(spans[index])
                case schedule.ReadStates(index):
                    chunk = chunks[index]
                    if chunk.homes[STATES].is_storage and chunk.trainable and not chunk.updated and not chunk.pending:
                        if self.records.caches[STATES].is_crowded():
                            chunk.fall_behind()
                        else:
                            self.records.request(chunk, STATES, pin=False)
                case schedule.Reduce(index):
                    self.updates.reduce(chunks[index])
        return num_fetched

    def bring(self, span: PlayedSpan):
        """Bring a span that an op needs now."""
        num_fetched = 0
        if span.presence == "away":
            num_fetched = yield from self._copy(span, needed=True)
        if span.presence == "fetching":
            self._gather(span)
            yield from self._settle(span)
            self.rank.arrive(span)
        return num_fetched

    def evict(self, span: PlayedSpan):
        if span.pinned or span.presence == "away" or span.index in self.rank.held:
            return
        if span.presence == "fetching":
            yield from self._settle(span)
        self.rank.leave(span)

    def _read(self, span: PlayedSpan) -> None:
        if span.presence != "away":
            return
        for chunk in span.chunks:
            if chunk.homes[WEIGHTS].is_device:
                continue
            chunk.expect_weights()
            if chunk.pending:
                self.updates.begin(chunk)
            elif not chunk.is_updating:
                self.records.request(chunk, WEIGHTS, pin=False)

    def _copy(self, span: PlayedSpan, *, needed: bool):
        rank = self.rank
        if span.presence != "away" or not (yield from self._make_room(span, needed)):
            return 0
        rank.fetch(span)
        in_backward = self.route.cursor.position >= rank.step.backward
        for chunk in span.chunks:
            if chunk.pending:
                self.updates.begin(chunk)
            self.updates.hurry(chunk)
            request = None if chunk.homes[WEIGHTS].is_device else self.records.request(chunk, WEIGHTS, urgent=needed)
            copied = self.cg.push(self._run_copy(chunk, request, chunk.updating))
            chunk.begin_copy(request, copied, weights_expected=self.route.wants_weights(chunk.index, span.index, in_backward=in_backward))
        return len(span.chunks)

    def _run_copy(self, chunk: PlayedChunk, request: PlayedRequest | None, updating: Flag):
        if request is not None:
            if not request.granted.raised:  # others wait for this lane
                self.records.hurry(request)
            yield request.granted
            yield from self.records.settle(request.entry)
        yield updating
        if request is not None:
            nbytes = chunk.record.weight_nbytes
            yield ("h2d", self.links.copy_seconds("h2d", nbytes), chunk.index, nbytes)
            self.records.unpin(chunk, WEIGHTS, request.entry)

    def _gather(self, span: PlayedSpan) -> None:
        if not self.rank.layout.partition.is_shared or span.presence != "fetching":
            return
        for chunk in span.chunks:
            if chunk.gathered.raised:
                chunk.begin_gather(self.gg.push(self._run_gather(chunk, chunk.copied)))

    def _run_gather(self, chunk: PlayedChunk, copied: Flag):
        yield copied
        yield ("all_gather", self.links.collective_seconds(chunk.nbytes), chunk.index, chunk.nbytes)

    def _settle(self, span: PlayedSpan):
        for chunk in span.chunks:
            if chunk.request is not None and not chunk.copied.raised:
                self.records.hurry(chunk.request)
        for chunk in span.chunks:
            if not chunk.copied.raised:
                yield from self.rank.wait("update", chunk.updating)
                if chunk.request is not None:
                    yield from self.rank.wait("nvme_read", chunk.request.granted)
                    yield from self.rank.wait("nvme_read", *self.records.settle(chunk.request.entry))
                yield from self.rank.wait("h2d", chunk.copied)
            yield from self.rank.wait("all_gather", chunk.gathered)

    def _make_room(self, span: PlayedSpan, needed: bool):
        rank = self.rank
        if rank.used + span.nbytes <= rank.budget:
            return True
        others = [s.index for s in rank.spans if s.presence != "away" and not s.pinned and s.index not in rank.held]
        for victim in slots.victims(span.index, others, self.route.to_span, needed=needed):
            yield from self.evict(rank.spans[victim])
            if rank.used + span.nbytes <= rank.budget:
                return True
        return needed
