"""The trace of a step, the next-use table, and the plan made from both. route.py knows the position of a step in the plan.

Pure: integers and keys in, a list of actions out. Must not know tensors, threads or tiers. The executor of a plan decides how an action
runs. A plan is a value: tests compare plans literally.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NEVER = 1 << 62  # the next use of a span without further uses
READ_AHEAD = 3  # fetches of weights, also with fewer slots


class Use(NamedTuple):
    """One step of the schedule: an op, named by its key, acquires spans. `held`: spans kept by enclosing ops."""

    key: Hashable
    spans: tuple[int, ...]
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Run:
    """Op number `position` begins. The following actions, up to the next Run, are issued at this moment."""

    position: int


@dataclass(frozen=True, slots=True)
class Read:
    """nc: bring the weights of a span to host memory."""

    span: int


@dataclass(frozen=True, slots=True)
class Copy:
    """cg: allocate a span on the device and copy this rank's shards into their places."""

    span: int


@dataclass(frozen=True, slots=True)
class Gather:
    """gg: all-gather a span in place."""

    span: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Free a span's device memory."""

    span: int


@dataclass(frozen=True, slots=True)
class ReadStates:
    """nc: bring the optimizer segments of a chunk to host memory."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """rs: reduce-scatter the gradient of a chunk."""

    chunk: int


Action = Run | Read | Copy | Gather | Evict | ReadStates | Reduce


def may_take_two_jobs(*, in_host_memory: bool, gradient: str, whole: bool = False) -> bool:
    """Whether an update after step() may change weights before moments: [Note: weights before moments] in updates.py. in_host_memory: host
    memory is the home of the record and the gradient. gradient: the dtype. whole: the kernel changes weights and moments at once, as
    for 8-bit moments. The arithmetic of moments alone takes no fp16 gradient."""
    return in_host_memory and gradient != "fp16" and not whole


class Moment(enum.Enum):
    """When a chunk is updated."""

    GRADIENT = "as soon as its gradient is complete and nobody needs its weights, by step() at the latest"
    STEP = "by step(), or begun there"
    FETCH = "when its weights are next fetched, or something else needs it"


def moment(*, deferred: bool, by_step: bool, in_memory: bool) -> Moment:
    """The moment of a chunk's update. by_step: the record is on the device, and step() updates it. in_memory: neither the weights nor the
    gradient need a slot. If states do, the drives begin in step(), and read them in the order of the next step's ops. deferred: updates
    follow step(), see `Config.update`. Other weights and gradients get their slots one after the other, when ops need them.
    """
    if by_step or (deferred and in_memory):
        return Moment.STEP
    return Moment.FETCH if deferred else Moment.GRADIENT


def updates_visitors_early(*, deferred: bool, is_shared: bool) -> bool:
    """Whether visitors of the device are updated as soon as their gradients are complete, so that no gradient waits there for step().
    deferred: see `moment`. is_shared: several ranks share each chunk. They gather the weights after an update, so step() updates all of them.
    """
    return not (deferred or is_shared)


def may_pass(*, gradient_stays: bool, there: Iterable[bool]) -> bool:
    """Whether an update that a fetch waits for may overtake updates that began earlier. The update may if nothing delays it: the gradient
    cannot leave host memory, and the other inputs are there. See [Note: order of updates] in updates.py.
    """
    return gradient_stays and all(there)


class NextUse:
    """The next-use table of a trace: for a span and a position, the first later use."""

    def __init__(self, uses: Sequence[Use]):
        self._positions: dict[int, list[int]] = {}
        for position, use in enumerate(uses):
            for span in {*use.spans, *use.held}:
                self._positions.setdefault(span, []).append(position)

    def after(self, span: int, position: int) -> int:
        """First use of `span` at a position greater than `position`, or NEVER."""
        positions = self._positions.get(span, ())
        index = bisect_right(positions, position)
        return positions[index] if index < len(positions) else NEVER

    def cyclic(self, span: int, position: int, period: int) -> int:
        """Like `after`, in an endless repetition of the trace."""
        following = self.after(span, position)
        if following != NEVER:
            return following
        first = self.after(span, -1)
        return first if first == NEVER else first + period


class _Ordered:
    """Spans ordered by their keys. A key ends with the span."""

    def __init__(self):
        self.keys: list[tuple[int, ...]] = []
        self._key_of: dict[int, tuple[int, ...]] = {}

    def put(self, key: tuple[int, ...]) -> None:
        self.discard(key[-1])
        self._key_of[key[-1]] = key
        insort(self.keys, key)

    def discard(self, span: int) -> None:
        key = self._key_of.pop(span, None)
        if key is not None:
            del self.keys[bisect_left(self.keys, key)]


def within(spans: Iterable[int], read_ahead: int, slots_ahead: int, slots_of: Mapping[int, int]) -> Iterator[int]:
    """The spans to read ahead, in the order of their fetches: the next `read_ahead` spans, and more while slots_ahead slots hold all of them.

    slots_of: slots that a span takes. A span counts as one slot at least, even in host memory, and the iteration therefore ends.
    """
    for number, span in enumerate(spans):
        slots_ahead -= max(1, slots_of.get(span, 1))
        if number >= read_ahead and slots_ahead < 0:
            return
        yield span


def plan(
    uses: Sequence[Use],
    *,
    nbytes: Mapping[int, int],
    budget: int,
    read_ahead: int = READ_AHEAD,
    slots_ahead: int = 0,
    slots_of: Mapping[int, int] | None = None,
    keep: bool = True,
    reductions: Sequence[tuple[int, int]] = (),
    updates: Sequence[tuple[int, int]] = (),
    span_of: Mapping[int, int] | None = None,
    states_ahead: int = 2,
) -> list[Action]:
    """Order the actions of one step. Gather, copy and read run one, two and `read_ahead` fetches ahead, and reads run further ahead if
    slots are free: see `within`.

    uses: the trace. nbytes: device bytes of each span (0 for a span that never leaves). budget: device bytes for all spans. keep: leave
    a span on the device until the room is needed (farthest next use goes first, Belady 1966). Otherwise evict a span as soon as no op
    and no stage needs it. reductions: (position, chunk), in order, of the gradients that are complete after that position. updates: the
    reductions that are followed by an update, which makes the device copy stale. Gradients that are complete only after the last use are
    left to the end of the pass. span_of: a chunk's span. states_ahead: number of chunks whose states are read before their update. At
    the start the device holds only spans of 0 bytes.

    A fetch runs ahead only if the room costs no span that is needed sooner. Spans of the current op are fetched even beyond the budget:
    the executor waits for memory, or reports the missing amount.
    """
    planner = _Planner(uses, nbytes, budget, reductions, updates, span_of or {})
    for position in range(-1, len(uses)):
        needed = planner.begin_op(position)
        planner.note_gradients(position, needed)
        if not keep:
            planner.evict_unneeded(position, needed)
        planner.fetch(position, needed)
        planner.read(read_ahead, slots_ahead, slots_of or {})
        planner.read_states(states_ahead)
    return planner.actions


class _Planner:
    """A plan in the making: the spans on the device, and the actions up to the current position. See `plan` for the arguments."""

    def __init__(self, uses, nbytes, budget, reductions, updates, span_of):
        self.uses, self.nbytes, self.budget, self.reductions, self.updates = uses, nbytes, budget, reductions, updates
        self.next_use = NextUse(uses)
        self.fetches: dict[int, list[tuple[int, int, int]]] = {}  # a span's uses by own ops: (position, place in the op, span)
        for position, use in enumerate(uses):
            for place, span in enumerate(dict.fromkeys(use.spans)):
                self.fetches.setdefault(span, []).append((position, place, span))
        self.resident: set[int] = set()
        self.reads: set[int] = set()  # read, not yet copied
        self.gathered: set[int] = set()
        self.stale: list[tuple[int, int]] = sorted((position, span_of[chunk]) for position, chunk in updates)
        self.num_stale = self.num_states = self.num_updated = self.num_reduced = 0
        self.actions: list[Action] = []
        self.used = 0
        self.coming = _Ordered()  # by the next fetch: spans that are not on the device, or copied and not yet used
        self.leaving = _Ordered()  # by the next use, farthest first: resident spans
        for first, *_ in self.fetches.values():
            self.coming.put(first)

    def begin_op(self, position: int) -> set[int]:
        """The op at a position runs; before the first op, position is -1. Returns the spans that the op needs."""
        if position < 0:
            return set()
        self.actions.append(Run(position))
        needed = {*self.uses[position].spans, *self.uses[position].held}
        for span in needed:
            if span in self.resident:
                self.leaving.put((-self.next_use.after(span, position), span))
                self.coming.discard(span)
            else:
                self._expect(span, position)
        return needed

    def note_gradients(self, position: int, needed: Collection[int]) -> None:
        """Reduce gradients that earlier ops have completed, and evict spans whose device copy an update has made stale."""
        while self.num_reduced < len(self.reductions) and self.reductions[self.num_reduced][0] < position:
            self.actions.append(Reduce(self.reductions[self.num_reduced][1]))
            self.num_reduced += 1
        while self.num_updated < len(self.updates) and self.updates[self.num_updated][0] < position:
            self.num_updated += 1
        while self.num_stale < len(self.stale) and self.stale[self.num_stale][0] < position:
            span = self.stale[self.num_stale][1]
            self.num_stale += 1
            if span in self.resident and self.nbytes[span] and span not in needed:
                self._evict(span, position)

    def evict_unneeded(self, position: int, needed: Collection[int]) -> None:
        """Evict all spans with later uses than the next three fetches."""
        horizon = max((later for later, _ in self._upcoming(3)), default=position)
        beyond = self.leaving.keys[: bisect_left(self.leaving.keys, (-horizon,))]
        for span in sorted(span for _, span in beyond if self.nbytes[span] and span not in needed):
            self._evict(span, position)

    def fetch(self, position: int, needed: Collection[int]) -> None:
        """Copy and gather the spans of the current op. Copy the next two fetches, and gather the next one, if there is room."""
        for span in self.uses[position].spans if position >= 0 else ():
            if span not in self.resident:
                self._make_room(span, position, position, needed)
                self._copy(span, position)
                self.coming.discard(span)
            self._gather(span)
        for distance in (1, 2):
            following = self._upcoming(distance)  # computed again: the victim of the first fetch may now be the second
            if len(following) < distance:
                break
            later, span = following[-1]
            if span not in self.resident:
                if not self._make_room(span, position, later, needed):
                    break
                self._copy(span, position)
            if distance == 1:
                self._gather(span)

    def read(self, read_ahead: int, slots_ahead: int, slots_of: Mapping[int, int]) -> None:
        """Read the spans of later fetches."""
        for span in within((span for *_, span in self.coming.keys), read_ahead, slots_ahead, slots_of):
            if span not in self.resident and span not in self.reads:
                self.reads.add(span)
                self.actions.append(Read(span))

    def read_states(self, states_ahead: int) -> None:
        """Read the states of the next updates."""
        while self.num_states < len(self.updates) and self.num_states < self.num_updated + states_ahead:
            self.actions.append(ReadStates(self.updates[self.num_states][1]))
            self.num_states += 1

    def _expect(self, span: int, position: int) -> None:
        """Note the next fetch of a span."""
        later = self.fetches.get(span, ())
        index = bisect_left(later, (position + 1,))
        if index < len(later):
            self.coming.put(later[index])
        else:
            self.coming.discard(span)

    def _evict(self, span: int, position: int) -> None:
        self.leaving.discard(span)
        self._expect(span, position)
        self.resident.discard(span)
        self.gathered.discard(span)
        self.used -= self.nbytes[span]
        self.actions.append(Evict(span))

    def _copy(self, span: int, position: int) -> None:
        self.leaving.put((-self.next_use.after(span, position), span))
        if span not in self.reads:
            self.actions.append(Read(span))
        self.reads.discard(span)
        self.resident.add(span)
        self.used += self.nbytes[span]
        self.actions.append(Copy(span))

    def _gather(self, span: int) -> None:
        if span not in self.gathered:
            self.gathered.add(span)
            self.actions.append(Gather(span))

    def _make_room(self, span: int, position: int, before: int, needed: Collection[int]) -> bool:
        """Evict spans with uses later than `before`, farthest first, until `span` fits. Returns False, and evicts nothing, if that is not
        enough.
        """
        missing = self.used + self.nbytes[span] - self.budget
        if missing <= 0:
            return True
        victims = []
        for minus_later, victim in self.leaving.keys:
            if missing <= 0 or -minus_later <= before:
                break
            if self.nbytes[victim] and victim not in needed:
                victims.append(victim)
                missing -= self.nbytes[victim]
        if missing > 0:
            return False
        for victim in victims:
            self._evict(victim, position)
        return True

    def _upcoming(self, count: int) -> list[tuple[int, int]]:
        """The next `count` fetches as (position, span): uses of spans that are not on the device, or copied and not yet used."""
        return [(later, span) for later, _, span in self.coming.keys[:count]]
