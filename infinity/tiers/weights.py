"""Weights on their way to the ops: follows the plan, fetches ahead, evicts, and waits for what an op needs now.

The training thread calls it; the cg and gg lanes carry out what it issues. Must not know modules, autograd or optimizers.
Over 500 lines because following the plan, issuing its actions and waiting for them change one set of spans.
"""

# [Note: who waits for whom]
#
#     training thread   acquire(i) ........ op i ......... acquire(i+1)
#                        | issue: Evict, Read(i+3...), Copy(i+2), Gather(i+1); then wait for the spans of i
#     nc reader          |--read i+3-->
#     cg lane            |--copy i+2------->      waits for the read (or update) of i+2
#     gg lane            |--gather i+1---->       waits for the copy of i+1
#
# Device memory is allocated and freed by the training thread alone, on the compute stream, before it queues the op; a copy
# waits for the event recorded then, the op waits for the event recorded after the copy or gather. A lane runs its jobs in
# the order in which the training thread issued them, which is the plan's: so collectives have one order on all ranks.
# A job waits only for what was issued before it, hence never in a circle.
#
# [Note: steps that differ]
# A step that leaves the route on which it was expected goes on along another known one where the last two ops follow each
# other, else at the next place of its own route that has the op. What the plan there takes for fetched already is fetched
# then. After the step its route is known, too, and which one followed which: models that alternate are expected right.

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from infinity.plan import schedule
from infinity.plan.record import WEIGHTS
from infinity.plan.schedule import Route, Use
from infinity.system.events import Events, now
from infinity.system.lanes import Job, Lane
from infinity.system.ranks import Ranks
from infinity.tiers.records import Records, Request
from infinity.tiers.state import (
    ChunkState,
    DeviceTier,
    ParameterState,
    Presence,
    Registry,
    SpanState,
    farthest_first,
    no_room,
)

MAX_ROUTES = 8  # known at a time; the one that was taken longest ago is forgotten
_LOOK_AHEAD = 64  # uses that are searched for what to fetch after a jump


class Part:
    """What is under way to bring one chunk to the device. gather is None on one rank."""

    __slots__ = ("chunk", "copy", "gather", "request", "update")

    def __init__(self, chunk: ChunkState, request: Request | None, update: Job | None, copy: Job):
        self.chunk = chunk
        self.request = request
        self.update = update
        self.copy = copy
        self.gather: Job | None = None


class Pipeline:
    """Acquires spans for ops. `begin_update(chunk)` starts the pending update of a chunk that is about to be fetched, and
    `hurry_update(chunk)` lets one that was begun pass others;
    `reduce(chunk)` and `read_states(chunk)` are the plan's other actions, `reduce_unplanned()` is called at each acquire
    of a step that has no plan or has left it. `make_way()` releases what can be held later, where an op finds no room, and
    `write_back(span, written)` keeps what a program wrote to parameters that leave. All are given after construction."""

    def __init__(
        self,
        registry: Registry,
        tier: DeviceTier,
        records: Records,
        ranks: Ranks,
        device: torch.device,
        events: Events,
        *,
        keep: bool,
    ):
        self.registry = registry
        self.tier = tier
        self.records = records
        self.ranks = ranks
        self.device = device
        self.events = events
        self.keep = keep
        self.read_ahead = schedule.READ_AHEAD
        self.slots_ahead = 0
        self.states_ahead = 2
        self.begin_update: Callable[[ChunkState], None] = lambda chunk: None
        self.hurry_update: Callable[[ChunkState], None] = lambda chunk: None
        self.reduce: Callable[[ChunkState], None] = lambda chunk: None
        self.reduce_unplanned: Callable[[], None] = lambda: None
        self.read_states: Callable[[ChunkState], None] = lambda chunk: None
        self.make_way: Callable[[], bool] = lambda: False  # whether something that is held could be released
        self.on_acquire: Callable[[Hashable], None] | None = None  # told of each op that begins
        self.cg, self.gg = Lane("cg", records.failure), Lane("gg", records.failure)
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.copy_stream, self.gather_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.settler = Lane("cg-settle")
        self.trace: list[Use] = []
        self.num_plans = 0
        self.num_ahead = self.num_late = 0  # fetches issued before an op needed them, and those it had to ask for itself
        self.num_updates_begun = 0  # in this step
        self.in_backward: Callable[[], bool] = lambda: False
        self.dropped: deque = deque()  # the holds of handles that died, in whatever thread
        self._routes: list[Route] = []  # the one that was taken last comes last
        self._route: Route | None = None  # of the step under way, as far as is known
        self._pointer = 0  # in its actions
        self._last_key: Hashable | None = None  # of the op before, in this step
        self._jumped = False
        self._held: dict[int, SpanState] = {}
        self._postponed: list[SpanState] = []  # evictions that wait for a release
        self._last_used: dict[int, int] = {}
        self._tick = 0
        self._num_collectives = 0
        self.off_plan = True  # this step has left what was planned, or nothing was
        self.all_stay = False  # every span is on the device for good, and no op asks for one; set by whoever knows the ops
        self.all_home = False  # such spans, between the first op after a step and the next step

    # What the training thread calls.

    def acquire(self, key: Hashable, spans: Sequence[SpanState], *, record: bool) -> None:
        """Hold spans, make them whole on the device and let their parameters point there; issue what comes next."""
        self.drain_dropped()
        if self.on_acquire is not None:
            self.on_acquire(key)
        self._hold_all(spans)
        try:
            if record:
                self.trace.append(Use(key, tuple([s.index for s in spans]), frozenset(self._held)))
            self._follow(key)
            for span in spans:
                self._bring(span)
            if self._jumped:
                self._jumped = False
                self._catch_up()
        except BaseException:
            self._release_all(spans)
            raise

    def acquire_aside(self, spans: Sequence[SpanState]) -> None:
        """As `acquire`, for a use that is no part of the schedule."""
        self.drain_dropped()
        self.off_plan = True
        self._hold_all(spans)
        try:
            for span in spans:
                self._bring(span)
        except BaseException:
            self._release_all(spans)
            raise

    def bring_all(self) -> None:
        """Let all parameters point to their spans, which stay on the device."""
        for span in self.registry.spans:
            self._bring(span)
        self.all_home = True

    def _hold_all(self, spans: Sequence[SpanState]) -> None:
        for span in spans:
            self.hold(span)

    def _release_all(self, spans: Sequence[SpanState]) -> None:
        for span in spans:
            self.release(span)

    def hold(self, span: SpanState) -> None:
        span.holds += 1
        self._held[span.index] = span
        self._tick += 1
        self._last_used[span.index] = self._tick

    def release(self, span: SpanState) -> None:
        """One need less. Only marks: eviction is the next acquire's business."""
        span.holds -= 1
        assert span.holds >= 0, span
        if not span.holds:
            self._held.pop(span.index, None)

    def is_held(self, span: SpanState) -> bool:
        """Whether anybody needs it on the device. What a dropped graph needed, nobody does."""
        self.drain_dropped()
        return span.holds > 0

    def drain_dropped(self) -> None:
        """Give back what dropped graphs held, and carry out the evictions that waited for a release."""
        while self.dropped:
            hold = self.dropped.popleft()
            hold.span.handles.discard(hold)
            if hold.holding:
                self.release(hold.span)
        if self._postponed:
            postponed, self._postponed = self._postponed, []
            for span in postponed:
                if span.evict_pending:
                    self._evict(span)

    def begin_cycle(self) -> None:
        """A step begins: whatever is left on the device goes, and the first fetches are issued."""
        self.drain_dropped()
        self.evict_idle()
        self._pointer = 0
        self.num_updates_begun = 0
        self.off_plan = not self._routes
        self._last_key, self._jumped = None, False
        if self._routes:
            self._route = self._routes[-1].successor or self._routes[-1]
            self._route.cursor.restart()
            self._issue()

    @property
    def has_begun(self) -> bool:
        """Whether ops ran since `begin_cycle`, or something else interfered with what it had issued."""
        return self.off_plan or (self._route is not None and self._route.cursor.position >= 0)

    def evict_idle(self) -> None:
        """Free every span that no op holds."""
        for span in self.registry.spans:
            if span.allocated and not span.pinned and not span.holds:
                self._evict(span)

    def adopt(self, reductions: Sequence[tuple[int, int]], updates: Sequence[tuple[int, int]], *, anew: bool = False) -> None:
        """Make the plan of the trace recorded since the last call, unless it is the one in force. anew: budgets have changed."""
        trace, self.trace = self.trace, []
        if not trace:
            return
        if self.ranks.world > 1:
            digest = zlib.crc32(repr((trace, reductions, updates)).encode())
            if not self.ranks.agree(digest):
                self.forget()
                return
            anew = bool(self.ranks.max_(torch.tensor([int(anew)])).item())
        if anew:
            self.forget()
        route = next((route for route in self._routes if route.uses == trace), None)
        if route is None or len(reductions) > route.num_completions:
            actions = self._plan(trace, reductions, updates)
            if route is None:
                route = Route(trace, actions, updates)
            else:
                route.become(actions, updates)  # more is known now of when gradients are complete
            route.num_completions = len(reductions)
            self.num_plans += 1
        if self._routes:
            self._routes[-1].successor = route  # which it may be itself
        self._routes = [known for known in self._routes if known is not route][1 - MAX_ROUTES :] + [route]
        self._route = route

    def _plan(self, trace: list[Use], reductions, updates) -> list[schedule.Action]:
        pinned = {span.index for span in self.registry.spans if span.pinned}
        return schedule.plan(
            trace,
            nbytes={s.index: 0 if s.index in pinned else s.nbytes for s in self.registry.spans},
            budget=self.tier.budget_nbytes,
            read_ahead=self.read_ahead,
            slots_ahead=self.slots_ahead,
            slots_of=self._slots_of(range(len(self.registry.spans))),
            keep=self.keep,
            reductions=reductions if self.ranks.world > 1 else (),
            updates=updates,
            span_of={chunk.index: chunk.span.index for chunk in self.registry.chunks},
            states_ahead=self.states_ahead,
        )

    def _slots_of(self, spans: Iterable[int]) -> dict[int, int]:
        """How many slots the weights of each of these take."""
        chunks_in = self.registry.chunks_in
        return {span: sum(c.weights_home == "nvme" for c in chunks_in(self.registry.spans[span])) for span in spans}

    # The distances below are asked for by other threads, too, while the training thread may change routes.

    def next_use(self, span: int) -> float:
        """A number that grows with the distance to the next use of a span; without a plan, with the time since the last."""
        route = self._route
        if route is None:
            return -self._last_used.get(span, 0)
        return route.next_use.cyclic(span, route.cursor.position, len(route.uses))

    def next_weights_use(self, chunk: ChunkState) -> float:
        """As `next_use`, for the host copy of a chunk's weights: its update needs them, too, also one that has begun and waits for them."""
        distance, route = self.next_use(chunk.span.index), self._route
        due = route.update_order.get(chunk.index) if route is not None else None
        if due is not None and (chunk.update_expected or (chunk.updating is not None and not chunk.updating.done)):
            distance = min(distance, max(due[1], route.cursor.position))
        return distance

    def next_states_use(self, chunk: ChunkState) -> float:
        """As `next_use`, for the states of a chunk: how many updates come before its own."""
        route = self._route
        if route is None:
            return self.next_use(chunk.span.index)
        order = route.update_order
        if chunk.index not in order:  # deferred: updates follow the forward pass
            first = route.next_use.after(chunk.span.index, -1)
            return first if first > route.cursor.position else first + len(route.uses)
        index = order[chunk.index][0] - self.num_updates_begun
        return index if index >= 0 else index + len(order)

    def next_gradient_use(self, chunk: ChunkState) -> float:
        """As `next_states_use`; what more is added to in this backward pass, or whose update has begun, comes first."""
        updating = chunk.updating is not None and not chunk.updating.done
        return -1 if chunk.missing or updating else self.next_states_use(chunk)

    def invalidate(self, span: SpanState) -> None:
        """An update makes the device copy stale; nobody may hold it. What stays is updated where it is."""
        assert not span.holds, f"{span} is updated while an op holds it"
        if self.all_stay:
            self.all_home = False
            self._detach(span)
            return
        if span.presence is Presence.FETCHING:
            self._settle(span)
        if span.presence is not Presence.AWAY:
            self._detach(span)
            span.become(Presence.AWAY)
        if not span.pinned:
            self.tier.free(span)

    def close(self) -> None:
        self.cg.close()
        self.gg.close()
        if self.cuda:
            self.settler.close()
            self.gather_stream.synchronize()  # the spans' memory is given back next

    # Following the plan.

    def _follow(self, key: Hashable) -> None:
        position = self._advance(key)
        if self.off_plan:
            self.reduce_unplanned()
        if position is None:
            self.off_plan = True
            if not self.keep:
                for span in farthest_first(self.registry.spans, self.next_use):
                    if span.presence is Presence.HOME:
                        self._evict(span)
            return
        run = self._route.runs[position]
        if self._pointer != run:
            self.off_plan = self._jumped = True
            self._pointer = run
        self._pointer += 1
        self._issue()

    def _advance(self, key: Hashable) -> int | None:
        """The op's position in a route, which may be another one from here on; None if no known one fits."""
        previous, self._last_key = self._last_key, key
        route = self._route
        if route is None or route.cursor.expects(key):
            return route.cursor.advance(key) if route is not None else None
        for other in reversed(self._routes):
            position = other.cursor.find(previous, key, near=route.cursor.position + 1)
            if position is not None and other is not route:
                self._route, other.cursor.position, self._pointer = other, position, -1
                return position
        return route.cursor.advance(key)

    def _catch_up(self) -> None:
        """Fetch, after a jump, what the plan counts as fetched when an op begins."""
        start = self._route.cursor.position + 1
        coming = [index for use in self._route.uses[start : start + _LOOK_AHEAD] for index in use.spans]
        away = [index for index in dict.fromkeys(coming) if self.registry.spans[index].presence is Presence.AWAY]
        for distance, index in enumerate(schedule.within(away, self.read_ahead, self.slots_ahead, self._slots_of(away))):
            span = self.registry.spans[index]
            self._read(span)
            if distance < 2:
                self._copy(span, needed=False)
            if distance < 1:
                self._gather(span)

    def _issue(self) -> None:
        """Issue the plan's actions up to the next Run."""
        spans, chunks = self.registry.spans, self.registry.chunks
        actions = self._route.actions
        while self._pointer < len(actions):
            match actions[self._pointer]:
                case schedule.Run():
                    return
                case schedule.Read(index):
                    self._read(spans[index])
                case schedule.Copy(index):
                    self._copy(spans[index], needed=False)
                case schedule.Gather(index):
                    self._gather(spans[index])
                case schedule.Evict(index):
                    self._evict(spans[index])
                case schedule.ReadStates(index):
                    self.read_states(chunks[index])
                case schedule.Reduce(index):
                    self.reduce(chunks[index])
            self._pointer += 1

    def forget(self) -> None:
        """Do without a plan until the next one is made."""
        self._routes, self._route, self.off_plan = [], None, True

    # Actions.

    def _read(self, span: SpanState) -> None:
        if span.presence is not Presence.AWAY:
            return
        for chunk in self.registry.chunks_in(span):
            if chunk.weights_home == "device":
                continue
            chunk.weights_expected = True
            if chunk.pending is not None:
                self.begin_update(chunk)
            elif chunk.updating is None or chunk.updating.done:
                self.records.request(chunk, WEIGHTS, pin=False)

    def _copy(self, span: SpanState, *, needed: bool) -> None:
        """Allocate the span and send its shards; a copy ahead for which there is no room is left out.

        What the plan counts as gone, but an op still holds here, is fetched once more if there are other ranks: they may
        have freed it and are about to gather. It receives the bytes that it has.
        """
        again = span.evict_pending and span.presence is Presence.HOME and self.ranks.world > 1
        span.evict_pending = False
        if span.presence is not Presence.AWAY and not again:
            return
        if not span.allocated and not self._make_room(span, needed):
            return
        self.tier.allocate(span)
        self.num_late += needed
        self.num_ahead += not needed
        ready = torch.cuda.current_stream(self.device).record_event() if self.cuda else None
        span.fetch = []
        span.become(Presence.FETCHING)
        try:
            for chunk in self.registry.chunks_in(span):
                if chunk.pending is not None:
                    self.begin_update(chunk)
                self.hurry_update(chunk)
                update, request = chunk.updating, None
                if chunk.weights_home != "device":
                    request = self.records.request(chunk, WEIGHTS, urgent=needed)
                chunk.weights_expected = self._copied_again(span) or self._updated_next(chunk)
                job = self.cg.push(lambda c=chunk, r=request, u=update: self._run_copy(c, r, u, ready), chunk.title)
                chunk.copy_job = job
                span.fetch.append(Part(chunk, request, update, job))
        except BaseException:
            self._abandon(span)
            raise

    def _copied_again(self, span: SpanState) -> bool:
        """Whether this backward pass will want the span once more after the use that it is copied for."""
        route = self._route
        if route is None or not self.in_backward():
            return False
        following = route.next_use.after(span.index, route.cursor.position)
        return route.next_use.after(span.index, following) != schedule.NEVER

    def _updated_next(self, chunk: ChunkState) -> bool:
        """Whether its update comes before the next copy of its span: so it is with what forward already copies for backward."""
        route = self._route
        return route is not None and route.updated_next(chunk.index, chunk.span.index, route.cursor.position)

    def _gather(self, span: SpanState) -> None:
        if self.ranks.world == 1 or span.presence is not Presence.FETCHING:
            return
        for part in span.fetch:
            if part.gather is None:
                self._num_collectives += 1
                order = (0, self._num_collectives, part.chunk.index) if self.off_plan else None
                part.gather = self.gg.push(lambda p=part, o=order: self._run_gather(p, o), part.chunk.title)

    def _evict(self, span: SpanState) -> None:
        """Free the span, once nobody holds it; until then only note that the plan counts it as gone."""
        if span.holds:
            span.evict_pending = True
            self._postponed.append(span)
            return
        if span.pinned or not span.allocated:
            return
        if span.presence is Presence.FETCHING:
            self._settle(span)
        span.evict_pending = False
        self._detach(span)
        if span.presence is not Presence.AWAY:  # it may be away, and its storage still be there for the sake of others
            span.become(Presence.AWAY)
        self.tier.free(span)

    def _detach(self, span: SpanState) -> None:
        written = span.detach()
        if written:
            self.write_back(span, written)

    write_back: Callable[[SpanState, list[ParameterState]], None] = staticmethod(lambda span, written: None)

    def _make_room(self, span: SpanState, needed: bool) -> bool:
        if self.tier.fits(span.nbytes):
            return True
        mine = self.next_use(span.index)
        for victim in farthest_first(self.registry.spans, self.next_use):
            if not needed and self.next_use(victim.index) <= mine:
                return False
            self._evict(victim)
            if self.tier.fits(span.nbytes):
                return True
        if needed and not self.tier.allows(span.nbytes):
            if self.make_way():
                return self._make_room(span, needed)
            raise no_room(self.registry.spans, self.tier)
        return needed

    # Waiting.

    def _bring(self, span: SpanState) -> None:
        if span.presence is Presence.AWAY:
            self._copy(span, needed=True)
        if span.presence is Presence.FETCHING:
            self._gather(span)
            self._settle(span)
        span.attach(self.registry.layout)
        span.count_aliases()

    def _settle(self, span: SpanState) -> None:
        """Wait until nothing is under way to the span; what it waits for is charged to the link at fault."""
        for part in span.fetch:
            if part.request is not None and not part.copy.done:
                self.records.hurry(part.request)
        try:
            for part in span.fetch:
                if not part.copy.done:
                    if part.update is not None:
                        self.events.wait("update", part.update, part.chunk.index)
                    if part.request is not None:
                        self.events.wait("nc", part.request, part.chunk.index)
                        source = part.request.result.source
                        if source is not None and not source.done:
                            self.events.wait("nc", source, part.chunk.index)
                    self.events.wait("cg", part.copy, part.chunk.index)
                else:
                    part.copy.wait()
                if part.gather is not None:
                    self.events.wait("gg", part.gather, part.chunk.index)
                if self.cuda:
                    event = (part.gather or part.copy).result
                    if event is not None:
                        since = self.events.device_mark()
                        torch.cuda.current_stream(self.device).wait_event(event)
                        self.events.device_waited("gg" if part.gather else "cg", part.chunk.index, since)
        except BaseException:
            self._abandon(span)
            raise
        span.fetch = None
        span.become(Presence.HOME)

    def _abandon(self, span: SpanState) -> None:
        """An error has ended its fetch."""
        jobs = [job for part in span.fetch for job in (part.copy, part.gather) if job is not None]
        for job in jobs:
            with contextlib.suppress(Exception):  # the first error is the one to tell; no job may outlive the storage
                job.wait()
        if all(job.done for job in jobs):  # else the lane was abandoned: what it still writes to stays
            span.fetch = None
            span.become(Presence.AWAY)
            if not span.pinned:
                self.tier.free(span)

    # What the lanes run.

    def _run_copy(self, chunk: ChunkState, request: Request | None, update: Job | None, ready):
        entry = None
        if request is not None:
            if not request.done:  # others wait for this lane, and only the training thread would use up what is read ahead
                self.records.hurry(request)
            entry = request.wait()
            self.records.settle(entry)
        if update is not None:
            update.wait()
        if entry is None:
            return None
        start = now()
        numel = chunk.record.numel
        begin = chunk.chunk.offset + self.ranks.rank * chunk.chunk.shard_numel
        shard = chunk.span.flat[begin : begin + numel]
        source = entry.memory.tensor(shard.dtype, 0, numel)
        nbytes = numel * shard.element_size()
        if not self.cuda:
            # Not copy_: it would spread over torch's threads, which are the training thread's.
            ctypes.memmove(shard.data_ptr(), source.data_ptr(), nbytes)
            self.events.moved("cg", chunk.index, nbytes, start, now())
            self.records.unpin(chunk, WEIGHTS, entry)
            return None
        with torch.cuda.stream(self.copy_stream):
            self.copy_stream.wait_event(ready)
            first = self.events.device_mark()
            shard.copy_(source, non_blocking=True)
            marks = first, self.events.device_mark()
            event = self.copy_stream.record_event()
        self.settler.push(lambda: self._finish_copy(chunk, entry, event, nbytes, start, marks))
        return event

    def _finish_copy(self, chunk, entry, event, nbytes, start, marks) -> None:
        event.synchronize()
        self.events.moved("cg", chunk.index, nbytes, start, now(), marks)
        self.records.unpin(chunk, WEIGHTS, entry)

    def _run_gather(self, part: Part, order):
        event = part.copy.wait()
        if order is not None:
            self.ranks.require_order(f"the next gather, of {part.chunk.title}", *order)
        start = now()
        chunk = part.chunk.chunk
        whole = part.chunk.span.flat[chunk.offset : chunk.offset + chunk.numel]
        done = marks = None
        if self.cuda:
            with torch.cuda.stream(self.gather_stream):
                if event is not None:
                    self.gather_stream.wait_event(event)
                first = self.events.device_mark()
                self.ranks.gather(whole, part.chunk.title)
                marks = first, self.events.device_mark()
                done = self.gather_stream.record_event()
        else:
            self.ranks.gather(whole, part.chunk.title)
        self.events.moved("gg", chunk.index, whole.numel() * whole.element_size(), start, now(), marks)
        return done
