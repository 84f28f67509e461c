"""Simulates gradients on their way to host memory, and updates, with the decisions of the engine's steps about both.

Plays tiers/gradients.py and tiers/updates.py on a virtual clock. Must not know how weights come to the device.
"""

from __future__ import annotations

from infinity.plan import schedule
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS
from infinity.plan.schedule import Moment
from infinity.tools.predict.clock import Flag, PlayedLane
from infinity.tools.predict.host import PlayedRequest
from infinity.tools.predict.rank import PlayedChunk, Rank


class Updates:
    """The lanes gc and update of a rank. `gg` also reduces gradients."""

    def __init__(self, rank: Rank, gg: PlayedLane):
        self.rank, self.gg = rank, gg
        self.step, self.clock, self.records, self.links = rank.step, rank.clock, rank.records, rank.links
        self.gc, self.lane = PlayedLane(self.clock), PlayedLane(self.clock)
        self.under_way = self._num_arrivals = 0
        self.waiting: list[PlayedChunk] = []
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

    def update_waiting(self) -> None:
        for chunk in list(self.waiting):
            if chunk.span.index not in self.rank.held:
                self.waiting.remove(chunk)
                chunk.updated = True
                self._make_stale(chunk)
                if chunk.behind and self.rank.may_wait(chunk):
                    chunk.pending, chunk.update_expected = True, False
                else:
                    self.begin(chunk)
                self.rank.num_updates_begun += 1  # counted only now: until then the requested record must not look like a victim

    def _make_stale(self, chunk: PlayedChunk) -> None:
        if not chunk.span.pinned and chunk.span.presence != "away":
            self.rank.leave(chunk.span)

    def begin(self, chunk: PlayedChunk) -> None:
        chunk.pending = chunk.update_expected = False
        weights = self.records.request(chunk, WEIGHTS, urgent=self.rank.moment(chunk) is not Moment.FETCH)
        states = self.records.request(chunk, STATES, urgent=True)
        gradient, copied = chunk.gradient, chunk.copied
        there = (gradient, weights.granted, states.granted, copied)
        gradient_stays = not chunk.homes[GRADIENTS].is_storage
        if gradient.raised:
            self.records.request(chunk, GRADIENTS, pin=False)  # the gradient may have left for NVMe
        self._users.append(gradient)
        chunk.updating = self.lane.push(
            self._run_update(chunk, weights, states, gradient, copied),
            lambda: schedule.may_pass(gradient_stays=gradient_stays, there=(flag.raised for flag in there)),
        )

    def hurry(self, chunk: PlayedChunk) -> None:
        self.lane.hurry(chunk.updating)

    def _run_update(self, chunk: PlayedChunk, weights: PlayedRequest, states: PlayedRequest, gradient: Flag, copied: Flag):
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
        nbytes = 2 * chunk.record.nbytes + self.rank.placement.sizes[GRADIENTS][chunk.index]
        yield ("update", self.links.update_seconds(nbytes), chunk.index, chunk.record.nbytes)
        self.records.unpin(chunk, GRADIENTS, gradient_entry)
        self.records.discard(chunk, GRADIENTS)
        chunk.has_gradient = False
        self.records.write_back(chunk, entries)
        self._users.remove(gradient)
        self.records.notify()

    def _finish_announced(self, chunk: PlayedChunk):
        if chunk.pending:
            self.begin(chunk)
        if not chunk.updating.raised:
            self.records.hurry_all()
        yield from self.rank.wait("update", chunk.updating)

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
