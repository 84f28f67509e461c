"""Simulates moves of records between NVMe and host memory: tiers/record_mover.py on a virtual clock, with the policy of plan/slots.py.

Knows slots, links and sizes. Must not know ops, or the reason of a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from infinity.plan.placement import Placement
from infinity.plan.record import KINDS
from infinity.plan.slots import Entry, HostCache, HostState, Requests, keeps
from infinity.plan.traffic import nvme_nbytes
from infinity.tools.predict.clock import Clock, Flag, PlayedLane
from infinity.tools.predict.links import Links


class PlayedRequest:
    """A request for a host copy. `entry` is set when the request is granted."""

    __slots__ = ("chunk", "entry", "granted", "is_dropped", "kind", "number", "pin")

    def __init__(self, chunk, kind: str, pin: bool):
        self.chunk, self.kind, self.pin = chunk, kind, pin
        self.granted, self.is_dropped = Flag(), False
        self.entry: Entry | None = None

    @property
    def is_read(self) -> bool:
        source = self.entry.source if self.entry is not None else None
        return self.is_dropped or (self.granted.raised and (source is None or source.raised))


class _Slots:
    """Counts slots. Has the interface of the slots of an arena."""

    def __init__(self, count: int):
        self.count = self.num_free = count

    def try_acquire(self) -> _Slots | None:
        if not self.num_free:
            return None
        self.num_free -= 1
        return self

    def release(self) -> None:
        self.num_free += 1


class PlayedRecords:
    """Simulates RecordMover. next_uses: distance to the next use, by kind. entry.source: flag of a read. compresses: NVMe holds coded bytes.

    A chunk has `index`, `record`, `homes` by kind, and `weights_wanted`: the host copy of the weights is worth a slot."""

    def __init__(
        self,
        clock: Clock,
        links: Links,
        placement: Placement,
        chunks: list,
        next_uses: dict[str, Callable[[object], float]],
        *,
        keep: bool,
        compresses: bool,
    ):
        self.clock, self.links, self.placement = clock, links, placement
        self.keep, self.compresses = keep, compresses
        self.caches = {kind: HostCache(kind, _Slots(placement.slots[kind]), next_uses[kind]) for kind in KINDS}
        for chunk in chunks:
            for kind in KINDS:
                if chunk.homes[kind].is_host:
                    self.caches[kind].add_resident(chunk, None)
        self.changed = Flag()  # raised at the next change, and then replaced by a new flag
        self._waiting = Requests()
        self._reads, self._demands, self._more = deque(), deque(), Flag()  # demands, which a process waits for, go first
        self._writer = PlayedLane(clock)
        clock.start(self._reader())

    def request(self, chunk, kind: str, *, urgent: bool = False, pin: bool = True) -> PlayedRequest:
        request = PlayedRequest(chunk, kind, pin)
        self._waiting.ask(request, urgent=urgent)
        entry = self.caches[kind].find(chunk)
        if entry is not None and entry.resident:
            self._grant(request)
        else:
            self._waiting.put(request)
            self._grant_all()
        return request

    def hurry(self, request: PlayedRequest) -> None:
        self._waiting.hurry(request)
        read = (request.chunk, request.kind, request.entry)
        if read in self._reads:
            self._reads.remove(read)
            self._demands.append(read)
        self._grant_all()

    def hurry_all(self) -> None:
        self._waiting.hurry_all()
        self._grant_all()

    def obtain(self, chunk, kind: str):
        request = self.request(chunk, kind, urgent=True)
        self.hurry(request)
        yield request.granted
        yield from self.settle(request.entry)
        return request.entry

    def fresh(self, chunk, kind: str):
        cache = self.caches[kind]
        while (entry := cache.find(chunk) or cache.claim(chunk, urgent=True)) is None:
            if not cache.frees_soon():
                self._make_clean(kind)
            yield self.changed
        entry.pin()
        if entry.state is HostState.READING and entry.source is None:
            entry.become(HostState.CLEAN)
        yield from self.settle(entry)
        return entry

    def settle(self, entry: Entry):
        if entry.source is not None:
            yield entry.source

    def begin_update(self, entries: dict[str, Entry]):
        for entry in entries.values():
            while entry.state is HostState.WRITING:
                yield self.changed
            if entry.state is not HostState.DIRTY:
                entry.become(HostState.DIRTY)

    def write_back(self, chunk, entries: dict[str, Entry]) -> None:
        for kind, entry in entries.items():
            if entry.resident:
                entry.become(HostState.CLEAN)
                self.unpin(chunk, kind, entry)
            else:
                entry.become(HostState.WRITING)
                self._writer.push(self._run_write(chunk, kind, entry))

    def clean_ahead(self, kind: str) -> None:
        cache = self.caches[kind]
        if cache.farthest(HostState.CLEAN) is None and not cache.frees_soon():
            self._make_clean(kind)

    def discard(self, chunk, kind: str) -> None:
        entry = self.caches[kind].find(chunk)
        if entry is not None and entry.state is HostState.DIRTY:
            entry.become(HostState.CLEAN)
        if entry is not None and self.caches[kind].drop(entry):
            self.notify()

    def unpin(self, chunk, kind: str, entry: Entry) -> None:
        self.caches[kind].unpin(entry, keep=self._keeps(chunk, kind))
        self.notify()

    def drop(self, chunk, kind: str) -> None:
        entry = self.caches[kind].find(chunk)
        if entry is not None and not self._keeps(chunk, kind) and self.caches[kind].drop(entry):
            self.notify()

    def notify(self) -> None:
        """After a change: grant requests, and wake the processes that wait for a change."""
        self._grant_all()
        changed, self.changed = self.changed, Flag()
        self.clock.happen(changed)

    def _keeps(self, chunk, kind: str) -> bool:
        return keeps(kind, keep=self.keep, weights_wanted=chunk.weights_wanted)

    def _grant_all(self) -> None:
        while self._waiting.take_next(self._grant) is not None:
            pass

    def _grant(self, request: PlayedRequest) -> bool:
        entry = self.caches[request.kind].find(request.chunk) or self._begin_read(request)
        if entry is None:
            return False
        if request.pin:
            entry.pin()
        request.entry = entry
        self.clock.happen(request.granted)
        return True

    def _begin_read(self, request: PlayedRequest) -> Entry | None:
        is_urgent = self._waiting.is_urgent(request)
        entry = self.caches[request.kind].claim(request.chunk, urgent=is_urgent)
        if entry is not None:
            entry.source = Flag()
            (self._demands if is_urgent else self._reads).append((request.chunk, request.kind, entry))
            self.clock.happen(self._more)
        elif request.pin:
            self._make_clean(request.kind)
        return entry

    def _make_clean(self, kind: str) -> None:
        if (entry := self.caches[kind].to_write()) is not None:
            entry.pin()
            self.write_back(entry.chunk, {kind: entry})

    def _reader(self):
        while True:
            while not (self._demands or self._reads):
                self._more = Flag()
                yield self._more
            chunk, kind, entry = (self._demands or self._reads).popleft()
            yield self._transfer("nvme_read", chunk, kind)
            entry.become(HostState.CLEAN)
            self.clock.happen(entry.source)
            self.notify()

    def _run_write(self, chunk, kind: str, entry: Entry):
        yield self._transfer("nvme_write", chunk, kind)
        entry.become(HostState.CLEAN)
        self.unpin(chunk, kind, entry)

    def _transfer(self, link: str, chunk, kind: str):
        read, written = nvme_nbytes(self.placement, chunk.record, kind, chunk.index, compresses=self.compresses)
        nbytes = read if link == "nvme_read" else written
        return (link, self.links.drive_seconds(link, nbytes), (chunk.index, kind), nbytes)
