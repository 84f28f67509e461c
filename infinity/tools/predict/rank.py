"""A simulated rank: spans, chunks, the plan of a step, gradients and updates.

Knows the engine's data about a chunk, but no bytes. Must not know how weights come to the device, when a step is over, or how times are shown.
"""

from __future__ import annotations

from infinity.plan import schedule
from infinity.plan.host_memory import MIN_GRADIENT_SLOTS
from infinity.plan.packing import Layout
from infinity.plan.placement import Placement, look_ahead
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.route import Route, to_gradient
from infinity.plan.schedule import Moment, Use
from infinity.plan.slots import Entry, StatesAhead
from infinity.plan.tiers import DEVICE, Tier, in_storage
from infinity.tools.predict.clock import Clock, Flag, PlayedLane
from infinity.tools.predict.host import PlayedRecords, PlayedRequest
from infinity.tools.predict.links import LINKS, Links
from infinity.tools.predict.step import Step


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
        self.copied = self.gathered = self.gradient = self.updating = self.updating_moments = Flag(True)
        self.pending = self.update_expected = self.weights_expected = False
        self.has_gradient = self.updated = self.reduced = self.received = self.behind = False
        self.missing = self.gradient_number = 0

    @property
    def weights_wanted(self) -> bool:
        return self.update_expected or self.weights_expected

    @property
    def is_updating(self) -> bool:
        return not (self.updating.raised and self.updating_moments.raised)

    def expect_weights(self) -> None:
        self.weights_expected = True

    def begin_copy(self, request: PlayedRequest | None, copied: Flag, *, weights_expected: bool) -> None:
        self.request, self.copied, self.gathered = request, copied, Flag(True)
        self.weights_expected = weights_expected

    def begin_gather(self, gathered: Flag) -> None:
        self.gathered = gathered

    def fall_behind(self) -> None:
        """The drives are too slow to read the states ahead: the update may wait for step()."""
        self.behind = True


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
        on_device, in_memory = chunk.homes[STATES].is_device, not in_storage((chunk.homes[WEIGHTS], chunk.homes[GRADIENTS]))
        return schedule.moment(deferred=self.step.deferred, by_step=on_device, in_memory=in_memory)

    def may_wait(self, chunk: PlayedChunk) -> bool:
        """Like ChunkUpdates._may_wait."""
        if not chunk.homes[GRADIENTS].is_storage:
            return True
        return not self.placement.gradients_pass and self.records.caches[GRADIENTS].slots.num_free > MIN_GRADIENT_SLOTS

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

    def fetch(self, span: PlayedSpan) -> None:
        span.presence = "fetching"
        self.used += span.nbytes
        self.peak = max(self.peak, self.used)

    def arrive(self, span: PlayedSpan) -> None:
        span.presence = "home"

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
        update_comes = chunk.update_expected or chunk.is_updating
        return self.route.to_weights(chunk.index, chunk.span.index, update_comes=update_comes)

    def _next_states_use(self, chunk: PlayedChunk) -> float:
        return self.route.to_states(chunk.index, chunk.span.index, num_begun=self.num_updates_begun)

    def _next_gradient_use(self, chunk: PlayedChunk) -> float:
        in_use = bool(chunk.missing) or chunk.is_updating
        return to_gradient(self.route, chunk.index, chunk.span.index, num_begun=self.num_updates_begun, in_use=in_use)


class Updates:
    """Simulates gradients on their way to host memory, and updates: gradients.py, updates.py, and the decisions in engine/steps."""

    def __init__(self, rank: Rank, gg: PlayedLane):
        self.rank, self.gg = rank, gg
        self.step, self.clock, self.records, self.links = rank.step, rank.clock, rank.records, rank.links
        self.gc, self.lane = PlayedLane(self.clock), PlayedLane(self.clock)
        self.under_way = self._num_arrivals = 0
        self.waiting: list[PlayedChunk] = []
        self._states_ahead: StatesAhead | None = None
        self._users = self.records.caches[GRADIENTS].users  # the gradient of each update in the lane
        self._spill = rank.placement.slots[GRADIENTS] > 0 and self.step.deferred

    def expect_gradients(self) -> None:
        for chunk in self.rank.chunks:
            chunk.missing = chunk.num_params if chunk.trainable else 0
            chunk.update_expected = chunk.trainable and self.rank.moment(chunk) is Moment.GRADIENT

    def gradients_arrive(self, position: int):
        rank = self.rank
        for param in self.step.gradients[position]:
            if rank.layout.specs[param].trainable:
                for index in rank.layout.chunks_of(param):
                    yield from self._arrive(rank.chunks[index], param)
        for index in rank.complete.get(position, ()):
            chunk = rank.chunks[index]
            chunk.weights_expected = False
            if chunk.span.presence != "fetching":
                self.records.drop(chunk, WEIGHTS)
            if not rank.layout.partition.is_shared:
                self._ready(chunk)
        self.update_waiting()
        while self.under_way > rank.placement.under_way_nbytes:
            yield from rank.wait("d2h", self.records.changed)

    def _arrive(self, chunk: PlayedChunk, param: int):
        chunk.received = True
        yield from self._finish_announced(chunk)
        chunk.missing -= 1
        self._num_arrivals += 1
        chunk.gradient_number = self._num_arrivals
        if self.rank.layout.partition.is_shared:
            return
        if chunk.homes[STATES].is_device:
            chunk.gradient = Flag(True)
            return
        piece = next(piece for piece in self.rank.layout.chunks[chunk.index].pieces if piece.param == param)
        nbytes = piece.numel * self.rank.layout.chunks[chunk.index].format.itemsize
        self.under_way += nbytes
        chunk.gradient = self.gc.push(self._run_collect(chunk, nbytes, nbytes, Flag(True)))

    def reduce(self, chunk: PlayedChunk) -> None:
        def work():
            yield ("reduce_scatter", self.links.collective_seconds(chunk.nbytes), chunk.index, chunk.nbytes)

        self.under_way += chunk.nbytes
        chunk.reduced = True
        scattered = self.gg.push(work())
        chunk.gradient = self.gc.push(self._run_collect(chunk, chunk.nbytes // self.rank.layout.partition.world, chunk.nbytes, scattered))
        self._ready(chunk)

    def _run_collect(self, chunk: PlayedChunk, nbytes: int, leaving: int, before: Flag):
        yield before
        if not chunk.homes[STATES].is_device:
            take = self.records.obtain if chunk.has_gradient else self.records.fresh
            entry = yield from take(chunk, GRADIENTS)
            yield from self.records.begin_update({GRADIENTS: entry})
            chunk.has_gradient = True
            yield ("d2h", self.links.copy_seconds("d2h", nbytes), chunk.index, nbytes)
            self.records.unpin(chunk, GRADIENTS, entry)
            if self._spill:
                self.records.clean_ahead(GRADIENTS)
        self.under_way -= leaving
        self.records.notify()

    def _ready(self, chunk: PlayedChunk) -> None:
        if self.rank.moment(chunk) is Moment.GRADIENT:
            self.waiting.append(chunk)
        elif self.step.deferred:
            if self._states_ahead is None:
                chunks = [chunk for chunk in self.rank.chunks if chunk.trainable and chunk.homes[STATES].is_storage]
                self._states_ahead = StatesAhead(chunks, self.records.caches[STATES], self.records.request)
            self._states_ahead.advance()

    def update_waiting(self) -> None:
        for chunk in list(self.waiting):
            if chunk.span.index not in self.rank.held:
                self.waiting.remove(chunk)
                chunk.updated = True
                self._make_stale(chunk)
                if chunk.behind and self.rank.may_wait(chunk):
                    chunk.pending, chunk.update_expected = True, False
                else:
                    self.begin(chunk, early=True)
                self.rank.num_updates_begun += 1  # counted only now: until then the requested record must not look like a victim

    def _make_stale(self, chunk: PlayedChunk) -> None:
        if not chunk.span.pinned and chunk.span.presence != "away":
            self.rank.leave(chunk.span)

    def begin(self, chunk: PlayedChunk, *, early: bool = False) -> None:
        chunk.pending = chunk.update_expected = False
        weights = self.records.request(chunk, WEIGHTS, urgent=self.rank.moment(chunk) is not Moment.FETCH)
        states = self.records.request(chunk, STATES, urgent=True)
        gradient, copied = chunk.gradient, chunk.copied
        there = (gradient, weights.granted, states.granted, copied)
        gradient_stays = not chunk.homes[GRADIENTS].is_storage
        if gradient.raised:
            self.records.request(chunk, GRADIENTS, pin=False)  # the gradient may have left for NVMe
        self._users.append(gradient)
        at_home = all(home.is_host for home in chunk.homes.values())
        may_take_two = schedule.may_take_two_jobs(in_host_memory=at_home, gradient=chunk.record.format.gradient)
        in_two = self.step.moments_follow and not early and may_take_two
        chunk.updating_moments = Flag(True)
        chunk.updating = self.lane.push(
            self._run_update(chunk, weights, states, gradient, copied, in_two),
            lambda: schedule.may_pass(gradient_stays=gradient_stays, there=(flag.raised for flag in there)),
        )

    def hurry(self, chunk: PlayedChunk) -> None:
        self.lane.hurry(chunk.updating)

    def _run_update(
        self, chunk: PlayedChunk, weights: PlayedRequest, states: PlayedRequest, gradient: Flag, copied: Flag, in_two: bool
    ):
        """in_two: only weights change here."""
        yield gradient
        gradient_entry = yield from self.records.obtain(chunk, GRADIENTS)
        self.records.hurry(weights)
        for request in (weights, states):
            yield request.granted
        entries = {WEIGHTS: weights.entry, STATES: states.entry}
        for entry in entries.values():
            yield from self.records.settle(entry)
        yield copied
        yield from self.records.begin_update(entries)
        entries[GRADIENTS] = gradient_entry
        changed = chunk.record.nbytes - (chunk.record.moments_nbytes if in_two else 0)
        yield self._update_of(chunk, chunk.record.nbytes, changed)
        if in_two:
            chunk.updating_moments = self.lane.push(self._run_moments(chunk, entries), lambda: True, idle=True)
        else:
            self._end_update(chunk, entries)
        self._users.remove(gradient)
        self.records.notify()

    def _run_moments(self, chunk: PlayedChunk, entries: dict[str, Entry]):
        yield self._update_of(chunk, chunk.record.moments_nbytes, chunk.record.moments_nbytes)
        self._end_update(chunk, entries)
        self.records.notify()

    def _update_of(self, chunk: PlayedChunk, read: int, changed: int):
        """The work of an update that reads and changes so many bytes of the record."""
        nbytes = read + changed + self.rank.placement.sizes[GRADIENTS][chunk.index]
        return "update", self.links.update_seconds(nbytes), chunk.index, changed

    def _end_update(self, chunk: PlayedChunk, entries: dict[str, Entry]) -> None:
        self.records.unpin(chunk, GRADIENTS, entries[GRADIENTS])
        self.records.discard(chunk, GRADIENTS)
        chunk.has_gradient = False
        self.records.write_back(chunk, {kind: entries[kind] for kind in (WEIGHTS, STATES)})

    def _finish_announced(self, chunk: PlayedChunk):
        if chunk.pending:
            self.begin(chunk)
        if chunk.is_updating:
            self.records.hurry_all()
        yield from self.rank.wait("update", chunk.updating)
        self.lane.hurry(chunk.updating_moments)
        yield from self.rank.wait("update", chunk.updating_moments)

    def finish_step(self):
        rank = self.rank
        for chunk in rank.chunks:
            if rank.layout.partition.is_shared and chunk.trainable and not chunk.reduced:  # gradients that were complete only after the last op
                self.reduce(chunk)
            chunk.reduced = False
        self.update_waiting()
        numel = sum(chunk.record.numel for chunk in rank.chunks if chunk.trainable and chunk.homes[STATES].is_device)
        if numel:
            yield ("compute", numel / (self.links.machine.device_update_gparams * 1e9), "update", 0)
        left = [chunk for chunk in rank.chunks if not chunk.homes[STATES].is_device and chunk.received and not chunk.updated]
        if not self.step.deferred:  # some parameter had no gradient
            left.sort(key=lambda chunk: chunk.gradient_number)
        for chunk in left:
            self._make_stale(chunk)
            chunk.pending = True
            if rank.moment(chunk) is not Moment.FETCH:
                self.begin(chunk)
        for chunk in rank.chunks:
            chunk.updated = chunk.received = chunk.behind = False
        self._states_ahead = None
