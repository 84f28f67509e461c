"""Host copies and the slots that they borrow: who is granted one, in which order, and whose copy makes room.

Pure policy, which an engine's records and the simulator of a run both play. Knows chunks by their index, and distances to their next
use. Must not know bytes, links or locks: whoever owns it calls one method at a time.
"""

# [Note: host copies]
# What is in host memory of a chunk is up to three entries: weights, states (residual, momentum, variance), because the
# forward pass needs only the first, and the gradient. An entry whose tier is the host stays for good; others borrow a slot:
#
#     READING --read over--> CLEAN --update--> DIRTY --write submitted--> WRITING --write over--> CLEAN
#
# Pins count those who still need an entry. A slot is taken from an entry that is CLEAN and has no pins, farthest next
# use first (Belady). All of it is guarded by one condition, the records' `lock`, which is notified when a pin or slot is freed.
# An update writes what it made DIRTY at once, pinned until then. A gradient stays DIRTY and unpinned until it is used: that
# needs no write, unless its slot is wanted before.
#
# [Note: order of grants]
# Who is granted an entry keeps its slot until done, and the lanes that wait for grants work first in, first out. So
# pinned requests of one kind are granted in their order: were a later one served first because its copy happens to be
# there, or because it is urgent, it could hold the last slot while the one before it, which its lane waits for, gets none.
# An urgent request makes those before it urgent, too: what is urgent is a number, up to which all of a kind are.

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from infinity.plan.record import GRADIENTS, KINDS, WEIGHTS


class HostState(enum.Enum):
    """Of a host copy, see [Note: host copies]."""

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
    """A host copy of a chunk's weights, states or gradient. memory: the slot or resident area. source: what fills it, waitable."""

    __slots__ = ("chunk", "memory", "pins", "resident", "source", "state")

    def __init__(self, chunk, memory, resident: bool = False):
        self.chunk = chunk
        self.memory = memory
        self.resident = resident
        self.state = HostState.CLEAN if resident else HostState.READING
        self.pins = 0
        self.source = None

    def become(self, state: HostState) -> None:
        assert (self.state, state) in _HOST_MOVES, f"{self}: {state} from {self.state}"
        self.state = state

    def pin(self) -> None:
        """One more needs it."""
        self.pins += 1

    def __repr__(self):
        return f"Entry({self.chunk.index}, {self.state.value}, {self.pins} pins{', resident' if self.resident else ''})"


class HostCache:
    """The host copies of one kind, weights, states or gradients.

    slots: a pool with `count` and `num_free`, whose `try_acquire()` gives what has a `release()`, or None if all is resident.
    next_use(chunk): in any unit that grows with distance.
    """

    def __init__(self, kind: str, slots, next_use: Callable[[object], float]):
        self.kind = kind
        self.slots = slots
        self.next_use = next_use
        self.entries: dict[int, Entry] = {}  # that borrow a slot
        self.residents: dict[int, Entry] = {}
        self.users: deque = deque()  # in their order, what each waits for that gives its entry's slot back then; None: who gives back none

    def add_resident(self, chunk, memory) -> None:
        self.residents[chunk.index] = Entry(chunk, memory, resident=True)

    def frees_soon(self) -> bool:
        """Whether the first user has what it waits for, so that it gives a slot back whatever else happens. Those that pass it have
        theirs."""
        first = self.users[0] if self.users else None
        return first is not None and first.done

    def is_crowded(self) -> bool:
        """Whether two thirds of the slots, and two at least, are pinned: what was asked for before is far from done."""
        num_pinned = sum(entry.pins > 0 for entry in self.entries.values())
        return num_pinned >= max(2, 2 / 3 * self.slots.count)

    def find(self, chunk) -> Entry | None:
        return self.entries.get(chunk.index) or self.residents.get(chunk.index)

    def claim(self, chunk, *, urgent: bool) -> Entry | None:
        """A slot for a chunk that has no entry: a free one, else that of the clean, unpinned entry used last.

        Unless urgent, nothing is taken that is used before the chunk is. None: wait until something is freed.
        """
        slot = self.slots.try_acquire()
        if slot is None:
            victim = self.farthest(HostState.CLEAN)
            if victim is None or (not urgent and self.next_use(victim.chunk) <= self.next_use(chunk)):
                return None
            del self.entries[victim.chunk.index]
            slot = victim.memory
        entry = self.entries[chunk.index] = Entry(chunk, slot)
        return entry

    def farthest(self, state: HostState) -> Entry | None:
        """Of the entries in a state that borrow a slot and that nobody needs now, the one used last."""
        found = [entry for entry in self.entries.values() if not entry.pins and entry.state is state]
        return max(found, key=lambda entry: self.next_use(entry.chunk), default=None)

    def to_write(self) -> Entry | None:
        """Where no slot can be had, the dirty entry used last, to be written, unless one is becoming free anyway."""
        passing = (HostState.READING, HostState.WRITING)
        if self.slots.num_free or any(entry.pins or entry.state in passing for entry in self.entries.values()):
            return None
        return self.farthest(HostState.DIRTY)

    def unpin(self, entry: Entry, *, keep: bool) -> None:
        """One need less. Without `keep`, a clean entry nobody needs gives its slot back."""
        entry.pins -= 1
        assert entry.pins >= 0, entry
        if not keep:
            self.drop(entry)

    def drop(self, entry: Entry) -> bool:
        """Give the slot back if the entry is clean, unpinned and not resident. Returns whether one is free by that."""
        if entry.pins or entry.state is not HostState.CLEAN or self.entries.get(entry.chunk.index) is not entry:
            return False
        del self.entries[entry.chunk.index]
        entry.memory.release()
        return True


def keeps(kind: str, *, keep: bool, weights_wanted: bool) -> bool:
    """Whether a clean copy that nobody needs now stays until its slot is wanted. keep: as all do; weights_wanted: soon, by a copy to the
    device or an update."""
    return keep or kind == GRADIENTS or (kind == WEIGHTS and weights_wanted)


class Requests:
    """Those that wait for a host copy: see [Note: order of grants]. Each has the `chunk` and `kind` that it is for; `pin`, unless it only
    reads ahead; and `number`, in order of asking, once it has asked."""

    def __init__(self):
        self._pinned: dict[str, deque] = {kind: deque() for kind in KINDS}  # both in order of asking
        self._ahead: list = []
        self._urgent_until = dict.fromkeys(KINDS, -1)  # pinned requests of the kind up to this number are waited for
        self._num_asked = 0

    def __iter__(self) -> Iterator:
        for line in (*self._pinned.values(), self._ahead):
            yield from line

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def ask(self, request, *, urgent: bool) -> None:
        """Number a request. What was to be read ahead is needed now; read later, it would be read once more for nobody."""
        request.number = self._num_asked
        self._num_asked += 1
        if request.pin:
            self._ahead = [r for r in self._ahead if (r.chunk, r.kind) != (request.chunk, request.kind)]
            if urgent:
                self._urgent_until[request.kind] = request.number

    def put(self, request) -> None:
        """It has asked and must wait."""
        (self._pinned[request.kind] if request.pin else self._ahead).append(request)

    def withdraw(self, request) -> None:
        line = self._pinned[request.kind] if request.pin else self._ahead
        if request in line:
            line.remove(request)

    def hurry(self, request) -> None:
        """Somebody waits for it: let it, and what was asked for of its kind before it, pass whatever is read ahead."""
        self._urgent_until[request.kind] = max(self._urgent_until[request.kind], request.number)

    def hurry_all(self) -> None:
        """Let all that was asked for, in its order, pass what is read ahead."""
        self._urgent_until = dict.fromkeys(KINDS, self._num_asked - 1)

    def is_urgent(self, request) -> bool:
        return request.pin and request.number <= self._urgent_until[request.kind]

    def take_next(self, grant: Callable[[object], bool]):
        """The first for which grant(request) is true, which waits no longer; None if there is none."""
        blocked: set[str] = set()  # kinds whose first pinned request waits
        full: set[str] = set()  # kinds that have no slot for what is read ahead: what was asked for first is used first
        for request in self._in_order():
            if request.kind in blocked or (request.kind in full and not request.pin) or not grant(request):
                (blocked if request.pin else full).add(request.kind)
                continue
            self.withdraw(request)
            return request
        return None

    def _in_order(self) -> list:
        """What may be granted next: of each kind the first pinned one, and all that is read ahead."""
        waiting = [*(requests[0] for requests in self._pinned.values() if requests), *self._ahead]
        return sorted(waiting, key=lambda request: (not self.is_urgent(request), request.number))


def farthest_first(spans: Iterable[int], next_use: Callable[[int], float]) -> list[int]:
    """Spans on the device in Belady's order."""
    return sorted(spans, key=lambda span: (-next_use(span), span))


def victims(span: int, others: Iterable[int], next_use: Callable[[int], float], *, needed: bool) -> Iterator[int]:
    """Which of the others leave the device in turn to make room for a span: unless an op needs it now, none that is used sooner."""
    mine = next_use(span)
    for other in farthest_first(others, next_use):
        if not needed and next_use(other) <= mine:
            return
        yield other
