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


class Moment(enum.Enum):
    """When a chunk is updated."""

    GRADIENT = "as soon as its gradient is complete and nobody needs its weights, by step() at the latest"
    STEP = "by step(), or begun there"
    FETCH = "when its weights are next fetched, or something else needs it"


def moment(*, deferred: bool, on_device: bool, in_memory: bool) -> Moment:
    """The moment of a chunk's update. on_device: the record is on the device. in_memory: no part of the record is on NVMe. deferred: updates
    follow step(), see `Config.update`. Updates that wait for no drive begin in step(), because the first ops soon need their weights. For
    the others, slots are filled in the order of the next step's ops.
    """
    if on_device or (deferred and in_memory):
        return Moment.STEP
    return Moment.FETCH if deferred else Moment.GRADIENT


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
    next_use = NextUse(uses)
    fetches: dict[int, list[tuple[int, int, int]]] = {}  # a span's uses by own ops: (position, place in the op, span)
    for position, use in enumerate(uses):
        for place, span in enumerate(dict.fromkeys(use.spans)):
            fetches.setdefault(span, []).append((position, place, span))
    span_of, slots_of = span_of or {}, slots_of or {}
    resident: set[int] = set()
    reads: set[int] = set()  # read, not yet copied
    ahead: set[int] = set()  # copied, not yet used
    gathered: set[int] = set()
    stale: list[tuple[int, int]] = sorted((position, span_of[chunk]) for position, chunk in updates)
    num_stale = num_states = num_updated = num_reduced = 0
    actions: list[Action] = []
    used = 0
    coming = _Ordered()  # by the next fetch: spans that are not on the device, or copied and not yet used
    leaving = _Ordered()  # by the next use, farthest first: resident spans
    for first, *_ in fetches.values():
        coming.put(first)

    def expect(span: int, position: int) -> None:
        later = fetches.get(span, ())
        index = bisect_left(later, (position + 1,))
        if index < len(later):
            coming.put(later[index])
        else:
            coming.discard(span)

    def evict(span: int, position: int) -> None:
        nonlocal used
        leaving.discard(span)
        expect(span, position)
        resident.discard(span)
        gathered.discard(span)
        ahead.discard(span)
        used -= nbytes[span]
        actions.append(Evict(span))

    def copy(span: int, position: int) -> None:
        nonlocal used
        leaving.put((-next_use.after(span, position), span))
        if span not in reads:
            actions.append(Read(span))
        reads.discard(span)
        resident.add(span)
        ahead.add(span)
        used += nbytes[span]
        actions.append(Copy(span))

    def gather(span: int) -> None:
        if span not in gathered:
            gathered.add(span)
            actions.append(Gather(span))

    def make_room(span: int, position: int, before: int, needed: Collection[int]) -> bool:
        """Evict spans with uses later than `before`, farthest first, until `span` fits. Returns False, and evicts nothing, if that is not
        enough.
        """
        missing = used + nbytes[span] - budget
        if missing <= 0:
            return True
        victims = []
        for minus_later, victim in leaving.keys:
            if missing <= 0 or -minus_later <= before:
                break
            if nbytes[victim] and victim not in needed:
                victims.append(victim)
                missing -= nbytes[victim]
        if missing > 0:
            return False
        for victim in victims:
            evict(victim, position)
        return True

    def upcoming(count: int) -> list[tuple[int, int]]:
        """The next `count` fetches as (position, span): uses of spans that are not on the device, or copied and not yet used."""
        return [(later, span) for later, _, span in coming.keys[:count]]

    for position in range(-1, len(uses)):
        needed: set[int] = set()
        if position >= 0:
            actions.append(Run(position))
            needed = {*uses[position].spans, *uses[position].held}
            ahead -= needed
            for span in needed:
                if span in resident:
                    leaving.put((-next_use.after(span, position), span))
                    coming.discard(span)
                else:
                    expect(span, position)
        while num_reduced < len(reductions) and reductions[num_reduced][0] < position:
            actions.append(Reduce(reductions[num_reduced][1]))
            num_reduced += 1
        while num_updated < len(updates) and updates[num_updated][0] < position:
            num_updated += 1
        while num_stale < len(stale) and stale[num_stale][0] < position:
            span = stale[num_stale][1]
            num_stale += 1
            if span in resident and nbytes[span] and span not in needed:
                evict(span, position)
        if not keep:
            horizon = max((later for later, _ in upcoming(3)), default=position)
            beyond = leaving.keys[: bisect_left(leaving.keys, (-horizon,))]
            for span in sorted(span for _, span in beyond if nbytes[span] and span not in needed):
                evict(span, position)
        for span in uses[position].spans if position >= 0 else ():
            if span not in resident:
                make_room(span, position, position, needed)
                copy(span, position)
                ahead.discard(span)
                coming.discard(span)
            gather(span)
        for distance in (1, 2):
            following = upcoming(distance)  # computed again: the victim of the first fetch may now be the second
            if len(following) < distance:
                break
            later, span = following[-1]
            if span not in resident:
                if not make_room(span, position, later, needed):
                    break
                copy(span, position)
            if distance == 1:
                gather(span)
        for span in within((span for *_, span in coming.keys), read_ahead, slots_ahead, slots_of):
            if span not in resident and span not in reads:
                reads.add(span)
                actions.append(Read(span))
        while num_states < len(updates) and num_states < num_updated + states_ahead:
            actions.append(ReadStates(updates[num_states][1]))
            num_states += 1
    return actions
