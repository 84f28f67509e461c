"""Moves the weights of spans: read, copied to the device, gathered from the ranks, evicted.

The training thread calls this file, and the lanes of fetch_lanes.py run the jobs. Knows the places of a span's bytes. Must not know modules,
autograd or optimizers. engine/steps/plan_follower.py decides the next move.
"""

# [Note: who waits for whom]
#
#     training thread   acquire(i) ........ op i ......... acquire(i+1)
#                        | issue: evict, read(i+3...), copy(i+2), gather(i+1); then wait for the spans of i
#     nc reader          |--read i+3-->
#     cg lane            |--copy i+2------->      waits for the read (or update) of i+2
#     gg lane            |--gather i+1---->       waits for the copy of i+1
#
# The training thread allocates and frees the memory of spans, on the compute stream, before the op is queued. While a checkpoint is loaded, a
# thread that the training thread waits for does this. A copy waits for the event recorded at the allocation. The op waits for the event
# recorded after the copy or the gather. (Lanes allocate some memory of gradients on their own streams: gg the shard of a reduction, gc the
# gradient of a record on the device.) The training thread issues jobs in the order of the plan, and each lane keeps this order. Collectives
# therefore have one order on all ranks. A job waits only for jobs that were issued earlier. So there is no circle of waits.

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import torch

from infinity.plan.record import WEIGHTS
from infinity.plan.slots import victims
from infinity.system.events import Events
from infinity.system.lanes import Lane
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.fetch_lanes import ChunkFetch, FetchLanes
from infinity.tiers.route_position import Course
from infinity.tiers.span_state import Presence, SpanState, no_room
from infinity.tiers.values import Values


class Weights:
    """Moves spans to the device and frees them there. Before the read, an announced update of the span begins. Before the span leaves, values
    that the program wrote to parameters are adopted.

    gather_lane, gather_stream: see `FetchLanes`. make_way(): set after construction, called if an op finds no room, releases holds that can be
    taken again later.
    """

    def __init__(
        self,
        values: Values,
        course: Course,
        gather_lane: Lane,
        gather_stream,
        device: torch.device,
        events: Events,
    ):
        self.registry, self.tier, self.ranks = values.registry, values.tier, values.ranks
        self.values, self.updater, self.records = values, values.updater, values.records
        self.course = course
        self.device = device
        self.events = events
        self.make_way: Callable[[], bool] = lambda: False  # returns whether a hold was released
        self.lanes = FetchLanes(self.records, self.ranks, gather_lane, gather_stream, device, events)
        self.num_ahead = self.num_late = 0  # fetches issued before an op needed them, and fetches that the op issued itself
        self.dropped: deque = deque()  # holds of handles that died, in any thread
        self.held: dict[int, SpanState] = {}
        self._postponed: list[SpanState] = []  # evictions that wait for a release
        self._num_collectives = 0

    def close(self) -> None:
        self.lanes.close()

    # Holds: the needs of ops and saved tensors.

    def hold(self, span: SpanState) -> None:
        span.holds += 1
        self.held[span.index] = span
        self.course.note_use(span)

    def release(self, span: SpanState) -> None:
        """One hold less. Does not evict the span: the next acquire does."""
        span.holds -= 1
        assert span.holds >= 0, span
        if not span.holds:
            self.held.pop(span.index, None)

    def hold_all(self, spans: Sequence[SpanState]) -> None:
        for span in spans:
            self.hold(span)

    def release_all(self, spans: Sequence[SpanState]) -> None:
        for span in spans:
            self.release(span)

    def is_held(self, span: SpanState) -> bool:
        """Whether an op or a saved tensor needs the span on the device. Holds of dropped graphs do not count."""
        self.drain_dropped()
        return span.holds > 0

    def drain_dropped(self) -> None:
        """Release the holds of dropped graphs, and carry out the evictions that waited for a release."""
        while self.dropped:
            hold = self.dropped.popleft()
            hold.span.handles.discard(hold)
            if hold.holding:
                self.release(hold.span)
        if self._postponed:
            postponed, self._postponed = self._postponed, []
            for span in postponed:
                if span.evict_pending:
                    self.evict(span)

    # Whole spans, at once.

    def acquire_aside(self, spans: Sequence[SpanState]) -> None:
        """Hold spans and bring them, for a use that is not in the plan."""
        self.drain_dropped()
        self.course.off_plan = True
        self.hold_all(spans)
        try:
            for span in spans:
                self.bring(span)
        except BaseException:
            self.release_all(spans)
            raise

    def bring(self, span: SpanState) -> None:
        """Bring all bytes of the span to the device, and let the parameters point there."""
        if span.presence is Presence.AWAY:
            self.copy(span, needed=True)
        if span.presence is Presence.FETCHING:
            self.gather(span)
            self.settle(span)
        span.attach(self.registry.layout)
        span.count_aliases()

    def bring_all(self) -> None:
        """Bring all spans, and let all parameters point to them."""
        for span in self.registry.spans:
            if not span.attached:
                self.bring(span)

    def evict_idle(self) -> None:
        """Free all spans without holds. Records of frozen spans that stay get what forward passes have written."""
        for span in self.registry.spans:
            if not span.allocated or span.holds:
                continue
            if not span.pinned:
                self.evict(span)
            elif not span.span.trainable and not self._stays(span) and self.values.keep_written(span):
                self.note_rounded(span)

    def note_rounded(self, span: SpanState) -> None:
        """A span without holds has given its values to the records. Codes round these values, so the next use must read the codes."""
        if span.span.format.is_coded:
            self.invalidate(span)

    def evictable(self) -> list[int]:
        """Indices of spans that are home or on the way, without holds, not pinned."""
        return [span.index for span in self.registry.spans if span.allocated and not span.pinned and not span.holds]

    # Moves that the plan issues.

    def read(self, span: SpanState) -> None:
        """Read the shards of the span to host memory, unless they are on the device or an update reads them."""
        if span.presence is not Presence.AWAY:
            return
        for chunk in self.registry.chunks_in(span):
            if chunk.weights_home.is_device:
                continue
            chunk.weights_expected = True
            if chunk.update.is_announced:
                self.updater.begin_announced(chunk)
            elif not chunk.update.is_running:
                self.records.request(chunk, WEIGHTS, pin=False)

    def copy(self, span: SpanState, *, needed: bool) -> None:
        """Allocate the span and copy the shards there. A copy ahead without room is skipped.

        With several ranks, the plan may count a span as evicted that an op still holds on this rank. Such a span is fetched again: other ranks
        may have freed the span, and gather the span next. The span receives the same bytes.
        """
        again = span.evict_pending and span.presence is Presence.HOME and self.ranks.are_several
        span.evict_pending = False
        if span.presence is not Presence.AWAY and not again:
            return
        if not span.allocated and not self._make_room(span, needed):
            return
        self.tier.allocate(span)
        self.num_late += needed
        self.num_ahead += not needed
        ready, span.fetch = self.lanes.allocated(), []
        span.become(Presence.FETCHING)
        try:
            for chunk in self.registry.chunks_in(span):
                if chunk.update.is_announced:
                    self.updater.begin_announced(chunk)
                self.updater.hurry(chunk)
                update, request = chunk.update.job, None
                if not chunk.weights_home.is_device:
                    request = self.records.request(chunk, WEIGHTS, urgent=needed)
                chunk.weights_expected = self.course.wants_again(chunk)
                fetch = ChunkFetch(chunk, request, update)
                self.lanes.copy(fetch, ready)
                span.fetch.append(fetch)
        except BaseException:
            self._abandon(span)
            raise

    def expect_no_copy(self, chunk: ChunkState) -> None:
        """No op of this pass needs the weights again: drop the host copy, unless the policy keeps it."""
        chunk.weights_expected = False
        if chunk.span.presence is not Presence.FETCHING:
            self.records.drop(chunk, WEIGHTS)

    def gather(self, span: SpanState) -> None:
        """With several ranks, all-gather the shards of the span."""
        if not self.ranks.are_several or span.presence is not Presence.FETCHING:
            return
        for fetch in span.fetch:
            if fetch.gather is None:
                self._num_collectives += 1
                order = (0, self._num_collectives, fetch.chunk.index) if self.course.off_plan else None
                fetch.gather = self.lanes.gather(fetch, order)

    def evict(self, span: SpanState) -> None:
        """Free the span. A span with holds is freed after the last release. From now on, the plan counts the span as evicted."""
        if span.holds:
            span.evict_pending = True
            self._postponed.append(span)
            return
        if span.pinned or not span.allocated:
            return
        if span.presence is Presence.FETCHING:
            self.settle(span)
        span.evict_pending = False
        self._detach(span)
        if span.presence is not Presence.AWAY:  # an AWAY span may keep its storage, if other tensors need it
            span.become(Presence.AWAY)
        self.tier.free(span)

    def _detach(self, span: SpanState) -> None:
        written = span.detach()
        if written:
            self.values.adopt(span, written)

    def _make_room(self, span: SpanState, needed: bool) -> bool:
        if self.tier.fits(span.nbytes):
            return True
        for victim in victims(span.index, self.evictable(), self.course.next_use, needed=needed):
            self.evict(self.registry.spans[victim])
            if self.tier.fits(span.nbytes):
                return True
        if needed and not self.tier.allows(span.nbytes):
            if self.make_way():
                return self._make_room(span, needed)
            raise no_room(self.registry.spans, self.tier)
        return needed

    def invalidate(self, span: SpanState) -> None:
        """An update makes the device copy stale. The span has no holds. A record on the device is updated in place."""
        assert not span.holds, f"{span} is updated while an op holds it"
        if span.presence is Presence.FETCHING:
            self.settle(span)
        if span.presence is not Presence.AWAY:
            self._detach(span)
            if not self._stays(span):
                span.become(Presence.AWAY)
        if not span.pinned:
            self.tier.free(span)

    def _stays(self, span: SpanState) -> bool:
        """Whether all bytes of the span stay on the device after an update."""
        return not self.ranks.are_several and all(chunk.on_device for chunk in self.registry.chunks_in(span))

    # Waiting.

    def settle(self, span: SpanState) -> None:
        """Wait until the fetch of the span is over. Each wait is counted by link."""
        for fetch in span.fetch:
            if fetch.request is not None and not fetch.copy.done:
                self.records.hurry(fetch.request)
        try:
            for fetch in span.fetch:
                self.lanes.wait(fetch)
        except BaseException:
            self._abandon(span)
            raise
        span.fetch = None
        span.become(Presence.HOME)

    def _abandon(self, span: SpanState) -> None:
        """An error has ended the fetch of the span."""
        jobs = [job for fetch in span.fetch for job in (fetch.copy, fetch.gather) if job is not None]
        for job in jobs:
            with contextlib.suppress(Exception):  # the first error is raised; no job may outlive the storage
                job.wait()
        if all(job.done for job in jobs):  # an abandoned lane may still write to this memory
            span.fetch = None
            span.become(Presence.AWAY)
            if not span.pinned:
                self.tier.free(span)
