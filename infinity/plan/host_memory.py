"""Divides the host-memory budget into shared slots, resident copies and gradients of late moments. The rest goes to NVMe.

Pure arithmetic over the sizes of copies and a budget. Must not know the device, except which chunks live there in any case. See
[Note: how budgets are spent] in placement.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.plan.compression import area_nbytes
from infinity.plan.late_moments import needed_nbytes, pool_for
from infinity.plan.memory_needs import Budgets, Candidate, Needs
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS
from infinity.plan.tiers import DEVICE, HOST, NVME, Tier, in_storage
from infinity.sizes import format_bytes

MIN_WEIGHT_SLOTS, MIN_STATE_SLOTS, MIN_GRADIENT_SLOTS = 2, 2, 2
WEIGHT_SLOTS, STATE_SLOTS, GRADIENT_SLOTS = 64, 12, 8
PUT_OFF_SHARE = 1 / 4  # largest share of the updates of a backward pass that may be put off: forward's share of compute


@dataclass(frozen=True)
class Shared:
    """The part of a placement that concerns host memory and NVMe. overflow_nbytes: of nvme_nbytes, for codes that exceed their extents."""

    homes: dict[str, tuple[Tier, ...]]
    on_nvme: dict[str, tuple[int, ...]]
    slots: dict[str, int]
    host_nbytes: int = 0
    compression_nbytes: int = 0
    pool_nbytes: int = 0
    num_late: int = 0
    nvme_nbytes: int = 0
    overflow_nbytes: int = 0

    @property
    def without_host_memory(self) -> list[int]:
        """Chunks whose records are not on the device in any case, and whose gradients have no place in host memory."""
        return _without_host_memory(self.homes)


@dataclass(frozen=True)
class Guests:
    """Chunks that usually have room on the device. visitors: with their records. staying: only with gradients that wait for step().

    records_first: homes of visitors' records come before all gradients.
    """

    visitors: frozenset[int] = frozenset()
    staying: frozenset[int] = frozenset()
    records_first: bool = False


def share_out(candidate: Candidate, needs: Needs, budgets: Budgets, crowded_out: Collection[int], guests: Guests) -> Shared:
    """Divide host memory; the rest goes to NVMe. Chunks in crowded_out need no place. Visitors of the device rarely need their homes, and
    gradients that stay on the device rarely need theirs, so both come last. Raises BudgetError if the budget is too small for the fewest
    slots.
    """
    sharing = _Sharing(candidate, needs, budgets, crowded_out, guests)
    sharing.require_least()
    sharing.settle_gradients()
    sharing.grow_slots()
    sharing.add_gradient_slots()
    sharing.keep_copies()
    return sharing.found()


class _Sharing:
    """One division in progress. homes: of each kind and chunk, as far as decided. counts: number of slots of each kind."""

    def __init__(self, candidate: Candidate, needs: Needs, budgets: Budgets, crowded_out: Collection[int], guests: Guests):
        self.candidate, self.needs, self.budgets, self.guests = candidate, needs, budgets, guests
        self.sizes = candidate.sizes()
        self.in_slots = candidate.in_slots(self.sizes)
        self.budget = int(budgets.host_nbytes * budgets.host_share)
        self.counts = [MIN_WEIGHT_SLOTS, MIN_STATE_SLOTS, MIN_GRADIENT_SLOTS]
        if needs.gradients_pass:
            self.counts[2] += candidate.num_incomplete
        self.left = self.reserved = 0  # bytes for resident copies, and bytes for a pool
        num_chunks = len(candidate.records)
        self.homes = {
            WEIGHTS: [needs.weights if needs.weights == HOST else NVME] * num_chunks,
            STATES: [needs.states if needs.states == HOST else NVME] * num_chunks,
            GRADIENTS: [NVME] * num_chunks,
        }
        if needs.weights == DEVICE:  # a record needs its weights beside the states
            self.homes[WEIGHTS] = list(self.homes[STATES])
        for kind in KINDS:  # empty copies have a home in memory: a frozen chunk's states, a shard of padding
            self.homes[kind] = [HOST if not nbytes else home for home, nbytes in zip(self.homes[kind], self.sizes[kind])]
            for index in crowded_out:
                self.homes[kind][index] = DEVICE

    def slots(self, counts: Sequence[int]) -> dict[str, int]:
        """Slots of each kind: at most the counts given, and no more than the chunks that share them."""
        return {kind: min(count, self._num_sharing(kind)) for kind, count in zip(KINDS, counts)}

    def _num_sharing(self, kind: str) -> int:
        """Chunks that share the slots of a kind. A gradient that waits on the device passes through a slot to an update in host memory."""
        return len(_without_host_memory(self.homes) if kind == GRADIENTS else in_storage(self.homes[kind]))

    def nbytes_in(self, tier: Tier, there: dict[str, tuple[int, ...]]) -> int:
        return sum(nbytes for kind in KINDS for nbytes, home in zip(there[kind], self.homes[kind]) if home == tier)

    def buffers_nbytes(self) -> int:
        return self.candidate.compression_nbytes if in_storage((*self.homes[WEIGHTS], *self.homes[STATES])) else 0

    def host_nbytes(self, counts: Sequence[int]) -> int:
        return self.with_slots()(counts)

    def with_slots(self) -> Callable[[Sequence[int]], int]:
        """A function of the slots' counts: the bytes of host memory with the present homes. One pass over all chunks serves many counts."""
        resident = self.buffers_nbytes() + self.nbytes_in(HOST, self.sizes)
        slots = [(self._num_sharing(kind), max(self.in_slots[kind])) for kind in KINDS]
        return lambda counts: resident + sum(min(count, most) * nbytes for count, (most, nbytes) in zip(counts, slots))

    def require_least(self) -> None:
        """Raise BudgetError if the fewest slots exceed the budget."""
        least, share = self.host_nbytes(self.counts), self.budgets.host_share
        if self.budget >= least:
            return
        held = ", ".join(f"{count} for {kind}" for kind, count in self.slots(self.counts).items() if count)
        enough = math.ceil(least / share)
        raise BudgetError(
            f"host_memory={format_bytes(self.budgets.host_nbytes)} is too small: this model needs {exact(enough)} to make "
            f"progress (slots: {held or 'none'}; resident: {format_bytes(self.nbytes_in('host', self.sizes))}"
            f"{'; buffers: ' + format_bytes(self.buffers_nbytes()) if self.buffers_nbytes() else ''}"
            f"{f'; for activations: {1 - share:.0%}' if share < 1 else ''}). Raise host_memory or lower chunk_mib.",
            least_host_nbytes=enough,
        )

    def settle_gradients(self) -> None:
        """Give a home in host memory to gradients that wait for step(), if all fit. Gradients on the device are excluded."""
        if self.guests.records_first:
            return
        sizes, homes = self.sizes[GRADIENTS], self.homes[GRADIENTS]
        on_device = self.guests.visitors | self.guests.staying
        away = [index for index, home in enumerate(homes) if home.is_storage and index not in on_device]
        if self.needs.deferred and self.host_nbytes(self.counts) + sum(sizes[index] for index in away) <= self.budget:
            for index in away:
                homes[index] = HOST

    def grow_slots(self) -> None:
        """Enlarge all pools together, by a tenth at a time."""
        most, host_nbytes = [WEIGHT_SLOTS, STATE_SLOTS, max(GRADIENT_SLOTS, self.counts[2])], self.with_slots()
        while self.counts != most:
            wanted = [min(high, max(low + 1, low + high // 10)) for low, high in zip(self.counts, most)]
            if host_nbytes(wanted) > self.budget:
                break
            self.counts = wanted
        self.left = self.budget - host_nbytes(self.counts)

    def add_gradient_slots(self) -> None:
        """Add slots for gradients of put-off updates, for records without a home in memory."""
        sizes, order = self.sizes, self.order()
        updated = [index for index in self._stays() if sizes[GRADIENTS][index]]
        away = {k: sum(sizes[k][i] for i in updated if self.homes[k][i].is_storage) for k in (WEIGHTS, STATES)}
        moving = sum(away.values()) - min(self.left, sum(nbytes for kind, nbytes in away.items() if kind in order))
        if moving > 0 and not (self.needs.deferred or self.needs.gradients_pass):
            wanted = math.ceil(PUT_OFF_SHARE * len(updated) * moving / sum(away.values()))
            self.counts[2] += max(0, min(wanted - self.counts[2], self.left // max(self.in_slots[GRADIENTS])))
            self.left = self.budget - self.host_nbytes(self.counts)

    def order(self) -> list[str]:
        """The kinds whose copies become resident if there is room, most valuable first."""
        needs = self.needs
        some_on_nvme = any(in_storage(self.homes[kind]) for kind in (WEIGHTS, STATES))
        order = [kind for kind, choice in ((WEIGHTS, needs.weights), (STATES, needs.states)) if needs.keep and choice is None]
        if needs.deferred:
            order.insert(order.count(WEIGHTS), GRADIENTS)
        elif (needs.keep or not some_on_nvme) and not needs.gradients_pass:
            order.append(GRADIENTS)
        return order

    def keep_copies(self) -> None:
        """Give resident copies the remaining memory. A pool that comes before states takes its part first."""
        order = self.order()
        sharing, shared = {kind: len(in_storage(self.homes[kind])) for kind in order}, self.slots(self.counts)
        stays, visitors = self._stays(), sorted(self.guests.visitors, reverse=True)
        self._reserve(order, stays)
        self.left -= self.reserved
        turns = [(kind, [i for i in stays if kind != GRADIENTS or i not in self.guests.staying]) for kind in order]
        turns += [(kind, visitors) for kind in order if kind != GRADIENTS]
        turns += [(GRADIENTS, indices) for indices in (visitors, sorted(self.guests.staying, reverse=True)) if GRADIENTS in order]
        if self.guests.records_first or (order[-1:] == [GRADIENTS] and self._has_room_for_all(order[:-1])):
            turns.sort(key=lambda turn: turn[0] == GRADIENTS)  # visitors share slots, and no visitor causes a read from NVMe
        for kind, indices in turns:
            for index in reversed(indices) if kind == STATES else indices:  # the last chunks' updates have the most time for drives
                if not self.homes[kind][index].is_storage:
                    continue
                slot = max(self.in_slots[kind]) if sharing[kind] <= shared[kind] else 0  # a slot that no chunk shares any more
                if self.sizes[kind][index] - slot <= self.left:
                    self.homes[kind][index] = HOST
                    self.left -= self.sizes[kind][index] - slot
                    sharing[kind] -= 1

    def _has_room_for_all(self, kinds: Sequence[str]) -> bool:
        """Whether all copies of these kinds can be resident, beside the pool and the present slots."""
        before = dict(self.homes)
        self.homes.update({kind: [HOST if home.is_storage else home for home in before[kind]] for kind in kinds})
        nbytes = self.host_nbytes(self.counts) + self.reserved
        self.homes = before
        return nbytes <= self.budget

    def _stays(self) -> list[int]:
        return [index for index in reversed(range(len(self.candidate.records))) if index not in self.guests.visitors]

    def _late_gradients(self, stays: list[int]) -> list[int]:
        return [self.candidate.late_nbytes[index] for index in stays if self.homes[STATES][index].is_storage]

    def _reserve(self, order: list[str], stays: list[int]) -> None:
        if self.candidate.late_nbytes is None:
            return
        homes, sizes = self.homes, self.sizes
        first = [(WEIGHTS, index) for index in stays if WEIGHTS in order]
        if self.needs.deferred and not self.guests.records_first:
            first += [(GRADIENTS, index) for index in stays if index not in self.guests.staying]
        room = max(0, self.left - sum(sizes[kind][index] for kind, index in first if homes[kind][index].is_storage))
        gradients = self._late_gradients(stays)
        if STATES not in order:
            self.reserved, _ = pool_for(gradients, room)
        elif self.candidate.late_first:
            states = sum(sizes[STATES][index] for index in stays if homes[STATES][index].is_storage)
            self.reserved = _pool_beside_states(gradients, states, room)

    def found(self) -> Shared:
        pool_nbytes, num_late, is_late_on_nvme = 0, 0, False
        if self.candidate.late_nbytes is not None:
            pool_nbytes, num_late = pool_for(self._late_gradients(self._stays()), self.left + self.reserved)
            if not num_late and self.candidate.late_on_nvme and in_storage(self.homes[STATES]):
                is_late_on_nvme, num_late = True, 1
        on_nvme = self.candidate.on_nvme(self.sizes, late=is_late_on_nvme)
        if self.needs.gradients_pass:
            on_nvme[GRADIENTS] = (0,) * len(self.sizes[GRADIENTS])
        whole = self.in_slots if is_late_on_nvme else self.sizes
        pairs = [(on_nvme[kind][i], whole[kind][i]) for kind in (WEIGHTS, STATES) for i in in_storage(self.homes[kind])]
        overflow_nbytes = area_nbytes(pairs)
        if self.needs.updates_follow and not self.needs.accumulates and self.budgets.host_share == 1:  # otherwise activations may need the rest
            self._add_record_slots(self.left + self.reserved - pool_nbytes)
        if self.needs.deferred and self.budgets.nvme_nbytes is not None:
            self._leave_on_device(self.budgets.nvme_nbytes - self.nbytes_in(NVME, on_nvme) - overflow_nbytes)
        return Shared(
            homes={kind: tuple(found) for kind, found in self.homes.items()},
            on_nvme=on_nvme,
            slots=self.slots(self.counts),
            host_nbytes=self.host_nbytes(self.counts) + pool_nbytes,
            compression_nbytes=self.buffers_nbytes(),
            pool_nbytes=pool_nbytes,
            num_late=num_late,
            nvme_nbytes=self.nbytes_in(NVME, on_nvme) + overflow_nbytes,
            overflow_nbytes=overflow_nbytes,
        )

    def _add_record_slots(self, left_nbytes: int) -> None:
        """Add slots for records whose homes the configuration has put on NVMe: [Note: states read ahead of step()] in chunk_updates.py."""
        for kinds in ((WEIGHTS, STATES), (STATES,)):  # an update needs both; at last, all weights have slots
            counts = self.slots(self.counts)
            lacking = [self._num_sharing(kind) - counts[kind] for kind in kinds]
            nbytes = sum(max(self.in_slots[kind]) for kind in kinds)
            more = min(left_nbytes // max(1, nbytes), *lacking)
            for kind in kinds:
                self.counts[KINDS.index(kind)] = counts[kind] + more
            left_nbytes -= more * nbytes

    def _leave_on_device(self, left_nbytes: int) -> None:
        """If NVMe is full, gradients that usually wait on the device have no other place. left_nbytes: free bytes on NVMe, perhaps negative."""
        homes, sizes = self.homes[GRADIENTS], self.sizes[GRADIENTS]
        for index in sorted(self.guests.visitors | self.guests.staying):
            if left_nbytes >= 0:
                return
            if homes[index].is_storage:
                homes[index] = DEVICE
                left_nbytes += sizes[index]


def _without_host_memory(homes: Mapping[str, Sequence[Tier]]) -> list[int]:
    """See `Shared.without_host_memory`."""
    pairs = enumerate(zip(homes[GRADIENTS], homes[STATES]))
    return [index for index, (gradient, states) in pairs if not gradient.is_host and not states.is_device]


def _pool_beside_states(gradients_nbytes: Sequence[int], states_nbytes: int, room_nbytes: int) -> int:
    """The part of the room for one update's gradients of the records whose states do not fit. 0 if the room cannot hold these gradients."""
    needed = needed_nbytes(gradients_nbytes, 1)
    lacking = states_nbytes - room_nbytes
    if lacking <= 0 or needed >= states_nbytes:
        return 0
    found = math.ceil(needed * lacking / (states_nbytes - needed)) + max(gradients_nbytes)  # the last states may leave a gap
    return found if found <= room_nbytes else 0


def exact(nbytes: int) -> str:
    """A budget in bytes, for a user to copy from a message into the configuration."""
    return f"{nbytes} bytes ({format_bytes(nbytes)})"
