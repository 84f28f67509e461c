"""Host copies and their slots: the order of grants, the choice of the copy that loses a slot, and the states that are read ahead of step().

Pure policy, used by an engine's records. Knows chunks by their index, and distances to their next use. Must not know
bytes, links or locks: the owner calls one method at a time.
"""

# [Note: host copies]
# A chunk has up to three entries in host memory: weights, states (residual, momentum, variance) and the gradient. Weights are separate
# because the forward pass needs only weights. An entry whose tier is the host stays permanently. Other entries borrow a slot:
#
#     READING --read over--> CLEAN --update--> DIRTY --write submitted--> WRITING --write over--> CLEAN
#
# Pins count the users of an entry. A slot is taken from an entry that is CLEAN and has no pins, farthest next use first (Belady). One
# condition, the records' `lock`, guards all entries, and is notified when a pin or slot is freed. An update makes an entry DIRTY and writes
# it at once; the entry stays pinned until the write is over. A gradient stays DIRTY and unpinned until the update. The gradient is written
# only if the slot is needed before.
#
# `Idle` has the entries without pins by state, so that a claim looks at few entries. An interrupt may end a call between two statements.
# Therefore an entry comes to a state's list before it is idle, and leaves the list after it is no longer idle. Readers check each entry.
#
# [Note: order of grants]
# A request that has an entry keeps the slot until the work is done, and the lanes that wait for grants work first in, first out. Pinned
# requests of one kind are therefore granted in their order. If a later request were served first, because the copy is there or because of
# urgency, that request could hold the last slot. The earlier request, for which the lane waits, would then get no slot. An urgent request
# makes the earlier requests urgent, too: urgency is a number, and all requests of a kind up to this number are urgent.

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS

MOST_READS = 2  # of states ahead of step(), at a time


class HostState(enum.Enum):
    """State of a host copy, see [Note: host copies]."""

    READING = "reading"
    CLEAN = "clean"
    DIRTY = "dirty"
    WRITING = "writing"


_HOST_MOVES = {
    (HostState.READING, HostState.CLEAN),
    (HostState.CLEAN, HostState.DIRTY),
    (HostState.DIRTY, HostState.CLEAN),
    (HostState.DIRTY, HostState.WRITING),
    (HostState.WRITING, HostState.CLEAN),
}


class Entry:
    """A host copy of a chunk's weights, states or gradient. memory: the slot or resident area. source: the waitable that fills the copy.
    idle: lists the copy while the copy has no pins."""

    __slots__ = ("chunk", "idle", "memory", "pins", "resident", "source", "state")

    def __init__(self, chunk, memory, idle: Idle, resident: bool = False):
        self.chunk = chunk
        self.memory = memory
        self.idle = idle
        self.resident = resident
        self.state = HostState.CLEAN if resident else HostState.READING
        self.pins = 0
        self.source = None
        idle.add(self, self.state)

    def become(self, state: HostState) -> None:
        before = self.state
        assert (before, state) in _HOST_MOVES, f"{self}: {state} from {before}"
        if not self.pins:
            self.idle.add(self, state)
        self.state = state
        self.idle.remove(self, before)

    def pin(self) -> None:
        """Add one user."""
        self.pins += 1
        self.idle.remove(self, self.state)

    def unpin(self) -> None:
        """Remove one user."""
        assert self.pins > 0, self
        if self.pins == 1:
            self.idle.add(self, self.state)
        self.pins -= 1

    def __repr__(self):
        return f"Entry({self.chunk.index}, {self.state.value}, {self.pins} pins{', resident' if self.resident else ''})"


class Idle:
    """Host copies without pins, by state: see [Note: host copies]."""

    def __init__(self):
        self._listed: dict[HostState, dict[int, Entry]] = {state: {} for state in HostState}

    def add(self, entry: Entry, state: HostState) -> None:
        self._listed[state][entry.chunk.index] = entry

    def remove(self, entry: Entry, state: HostState) -> None:
        self._listed[state].pop(entry.chunk.index, None)

    def of(self, *states: HostState) -> list[Entry]:
        """The copies without pins in these states."""
        return [entry for state in states for entry in self._listed[state].values() if not entry.pins and entry.state is state]


class HostCache:
    """The host copies of one kind: weights, states or gradients.

    slots: a pool with `count` and `num_free`. `try_acquire()` returns an object with `release()`, or None if no slot is free.
    next_use(chunk): in any unit that grows with distance. has_extent(chunk): whether the copy can be written to storage.
    """

    def __init__(self, kind: str, slots, next_use: Callable[[object], float], has_extent: Callable[[object], bool] = lambda chunk: True):
        self.kind = kind
        self.has_extent = has_extent
        self.slots = slots
        self.next_use = next_use
        self.entries: dict[int, Entry] = {}  # entries that borrow a slot
        self.residents: dict[int, Entry] = {}
        self._idle, self._idle_residents = Idle(), Idle()
        self.users: deque = deque()  # in order: the waitable after which each user frees the slot; None for a user that frees none

    def add_resident(self, chunk, memory) -> None:
        self.residents[chunk.index] = Entry(chunk, memory, self._idle_residents, resident=True)

    def frees_soon(self) -> bool:
        """Whether the first user's wait is over, so that a slot becomes free in any case. Users that overtake have slots already."""
        first = self.users[0] if self.users else None
        return first is not None and first.done

    def is_crowded(self) -> bool:
        """Whether at least two thirds of the slots, and at least two, are pinned: earlier requests are far from done."""
        num_pinned = len(self.entries) - len(self._unpinned(*HostState))
        return num_pinned >= max(2, 2 / 3 * self.slots.count)

    def find(self, chunk) -> Entry | None:
        return self.entries.get(chunk.index) or self.residents.get(chunk.index)

    def claim(self, chunk, *, urgent: bool) -> Entry | None:
        """A slot for a chunk without an entry: a free one, or that of the clean, unpinned entry with the farthest next use.

        Unless urgent, no entry with an earlier next use than the chunk's is taken. Returns None if the caller must wait for a free slot.
        """
        slot = self.slots.try_acquire()
        if slot is None:
            victim = self.farthest(HostState.CLEAN)
            if victim is None or (not urgent and self.next_use(victim.chunk) <= self.next_use(chunk)):
                return None
            self.remove(victim.chunk)
            slot = victim.memory
        entry = self.entries[chunk.index] = Entry(chunk, slot, self._idle)
        return entry

    def remove(self, chunk) -> Entry | None:
        """The chunk's entry, which gives up its slot. The caller takes or frees the slot. None if the chunk has no slot."""
        entry = self.entries.get(chunk.index)
        if entry is not None:
            del self.entries[chunk.index]
            self._idle.remove(entry, entry.state)
        return entry

    def farthest(self, state: HostState, counts: Callable[[object], bool] = lambda chunk: True) -> Entry | None:
        """The entry with the farthest next use among unpinned entries of this state that borrow a slot. counts(chunk): a condition."""
        found = farthest = None
        for entry in self._unpinned(state):
            if counts(entry.chunk):
                use = self.next_use(entry.chunk)
                if found is None or use > farthest:
                    found, farthest = entry, use
        return found

    def _unpinned(self, *states: HostState) -> list[Entry]:
        """The entries without pins in these states."""
        return [entry for entry in self._idle.of(*states) if self.entries.get(entry.chunk.index) is entry]

    def to_write(self) -> Entry | None:
        """If no slot can be freed, the dirty entry with the farthest next use, for writing. None if another entry will become free anyway."""
        if self.slots.num_free or len(self._unpinned(HostState.CLEAN, HostState.DIRTY)) < len(self.entries):
            return None
        return self.farthest(HostState.DIRTY, self.has_extent)

    def unpin(self, entry: Entry, *, keep: bool) -> None:
        """Remove one user. Without `keep`, a clean entry without users frees the slot."""
        entry.unpin()
        if not keep:
            self.drop(entry)

    def drop(self, entry: Entry) -> bool:
        """Free the slot of an entry that is clean, unpinned and not resident. Returns whether a slot was freed."""
        if entry.pins or entry.state is not HostState.CLEAN or self.entries.get(entry.chunk.index) is not entry:
            return False
        self.remove(entry.chunk)
        entry.memory.release()
        return True


def keeps(kind: str, *, keep: bool, weights_wanted: bool) -> bool:
    """Whether a clean copy without users stays until the slot is needed. keep: all copies stay. weights_wanted: a copy to the device or an
    update needs the weights soon.
    """
    return keep or kind == GRADIENTS or (kind == WEIGHTS and weights_wanted)


class Requests:
    """Requests that wait for a host copy: see [Note: order of grants]. Each has a `chunk` and a `kind`. `pin` is false for read-ahead.
    `number` is the order of asking, and `is_dropped` tells that nothing grants the request any more; `ask` sets both.
    """

    def __init__(self):
        self._pinned: dict[str, deque] = {kind: deque() for kind in KINDS}  # in order of asking, like _ahead
        self._ahead: dict[str, deque] = {kind: deque() for kind in KINDS}
        self._urgent_until = dict.fromkeys(KINDS, -1)  # number up to which pinned requests of the kind are waited for
        self._num_asked = 0

    def __iter__(self) -> Iterator:
        for line in (*self._pinned.values(), *self._ahead.values()):
            yield from line

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def ask(self, request, *, urgent: bool) -> None:
        """Number a request. A waiting read-ahead of the same copy is dropped: read later, nobody would use it."""
        request.number = self._num_asked
        self._num_asked += 1
        if request.pin:
            for dropped in [each for each in self._ahead[request.kind] if each.chunk == request.chunk]:
                self._ahead[request.kind].remove(dropped)
                dropped.is_dropped = True
            if urgent:
                self._urgent_until[request.kind] = request.number

    def put(self, request) -> None:
        """Add a request that must wait."""
        self._line_of(request).append(request)

    def withdraw(self, request) -> None:
        line = self._line_of(request)
        if request in line:
            line.remove(request)

    def hurry(self, request) -> None:
        """A thread waits for this request: the request and all earlier ones of the kind overtake read-ahead."""
        self._urgent_until[request.kind] = max(self._urgent_until[request.kind], request.number)

    def hurry_all(self) -> None:
        """All requests so far, in their order, overtake read-ahead."""
        self._urgent_until = dict.fromkeys(KINDS, self._num_asked - 1)

    def is_urgent(self, request) -> bool:
        return request.pin and request.number <= self._urgent_until[request.kind]

    def take_next(self, grant: Callable[[object], bool]):
        """The first request for which grant(request) is true, removed from the waiting requests; None if there is none."""
        blocked: set[str] = set()  # kinds whose first pinned request waits
        for request in self._in_order():
            if request.kind not in blocked and grant(request):
                self.withdraw(request)
                return request
            if request.pin:
                blocked.add(request.kind)
        return None

    def _in_order(self) -> list:
        """The candidates for the next grant: of each kind the first pinned request, and the first read-ahead, which is used first."""
        waiting = [line[0] for line in (*self._pinned.values(), *self._ahead.values()) if line]
        return sorted(waiting, key=lambda request: (not self.is_urgent(request), request.number))

    def _line_of(self, request) -> deque:
        return (self._pinned if request.pin else self._ahead)[request.kind]


class StatesAhead:
    """Reads the states of chunks ahead of step(), in the order of their next use, as far as there are slots, and few at a time.

    request(chunk, STATES, pin=False): begins a read and returns an object with `is_read`. See [Note: states read ahead of step()] in
    chunk_updates.py.
    """

    def __init__(self, chunks: Iterable, cache: HostCache, request: Callable):
        self._left = deque(sorted(chunks, key=cache.next_use)[: cache.slots.count if cache.slots is not None else 0])
        self._reading: list = []
        self._cache, self._request = cache, request

    def advance(self) -> None:
        """Begin reads in place of those that are over."""
        self._reading = [request for request in self._reading if not request.is_read]
        while self._left and len(self._reading) < MOST_READS and not self._is_in_use(self._left[0]):
            self._reading.append(self._request(self._left.popleft(), STATES, pin=False))

    def _is_in_use(self, chunk) -> bool:
        """Whether the last update of the chunk still has the copy, which may leave after the write."""
        entry = self._cache.find(chunk)
        return entry is not None and entry.pins > 0


def farthest_first(spans: Iterable[int], next_use: Callable[[int], float]) -> list[int]:
    """Spans on the device, farthest next use first (Belady)."""
    return sorted(spans, key=lambda span: (-next_use(span), span))


def victims(span: int, others: Iterable[int], next_use: Callable[[int], float], *, needed: bool) -> Iterator[int]:
    """The spans that leave the device in turn to make room. Unless `needed` by an op now, no span with an earlier next use leaves."""
    mine = next_use(span)
    for other in farthest_first(others, next_use):
        if not needed and next_use(other) <= mine:
            return
        yield other
