"""Sizes: what goes to which tier, and how much memory the pipeline's own slots take.

Pure arithmetic over sizes and budgets: the device's here, the host's in host_memory.py. Must not know torch, files or threads.
"""

# [Note: how budgets are spent]
# First what training cannot do without: the most that one op and those around it hold on the device, and the fewest slots
# with which a record can be read, updated and written. A budget below that is refused with the number that it needs. Then
# slots that let stages overlap. What is then left of the host keeps weights (each byte saves three of NVMe traffic: read
# forward, read backward, written), then gradients if they wait for step() (two: written, read), then states (two). Homes of records that
# will visit the device ([Note: the device budget] in device_memory.py) come after all others, since they seldom move, and their gradients, which
# lie there with them, last; but where all of them fit, before gradients that do not wait: so larger inputs, for which they return,
# need nothing of NVMe. Gradients that do wait and find no place stay on the device until their update begins, where it has room.
# The more stay, the fewer records visit: 4 bytes of a sum in host memory leave room to a third of a record there, whose sum and weights
# need none then. So what visits and what stays are found by turns, beginning with all that could visit. But where host memory can hold all
# records, and the device the gradients that then find no place, that comes first: records whose homes are on NVMe are written there at the
# start, in the first step and where inputs grow, and the more that visit gain nothing. (8.0 B parameters, 4 micro-batches, on 80 GB: the
# host updates 4.9 B instead of 6.5 B then, and adds up gradients for them; 9.50 s a step, 9.45 s with all records in host memory.) The last
# ones of a kind cost nothing: they take the place of the slots that they would have shared.
# Gradients that have no place of their own share slots, and have room on NVMe for when their slots are wanted. Where updates come in
# backward, there are slots for a quarter of the chunks whose records move: so many updates may be put off ([Note: the split update] in
# due_updates.py). A pool for those of late
# moments ([Note: late moments] in late_moments.py) gets what is left over, if it holds one of each record that stays on NVMe. Where floats are not
# coded it saves four for the first update in a row, and comes before states, which share what is left with it. Where NVMe is
# too small for what is left, the first records are crowded out: they live on the device, where nothing else could hide their update.

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.plan.host_memory import Guests, Shared, exact, share_out
from infinity.plan.memory_needs import PAGE_NBYTES, Budgets, Candidate, Needs, gradient_nbytes
from infinity.plan.packing import Chunk, Layout, Span
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.tiers import DEVICE, HOST, Tier, in_storage
from infinity.sizes import format_bytes, round_up

GUEST_ROUNDS = 8  # then the last answer is taken: the device is divided anew once activations are known
UNDER_WAY_NBYTES = 4 << 20  # of gradients that leave the device, where there is ample room: fewer make small ops wait for threads


@dataclass(frozen=True)
class Placement:
    """Homes a kind and chunk, the bytes of each copy there, of one in a slot, and on NVMe; the slots that
    these share; and the bytes that all this takes.

    pinned: gathered weights stay on the device for good; their homes are those of the copies that updates are made from.
    device_nbytes: the device budget; of it, fixed_nbytes stay taken, gradient_limit_nbytes of them by gradients, and the rest is for
    spans that come and go; least_nbytes is the least budget that works. Of host_nbytes, compression_nbytes are for buffers, and pool_nbytes
    for gradients of late moments, of which there are num_late updates in a row. num_crowded_out: trainable spans, from the first on, whose
    records live on the device because nothing else has room for them. visitors: chunks whose records the device has room for as a rule;
    may_stay: those whose gradients wait for step() and have no place of their own in host memory, so that they stay on the device as far
    as this has room; of an engine's placement, those of any rank.
    With more than under_way_nbytes of gradients on their way to the host, the training thread waits.
    """

    homes: dict[str, tuple[Tier, ...]]
    sizes: dict[str, tuple[int, ...]]
    in_slots: dict[str, tuple[int, ...]]
    on_nvme: dict[str, tuple[int, ...]]
    slots: dict[str, int]
    pinned: bool
    device_nbytes: int
    fixed_nbytes: int
    least_nbytes: int
    gradient_limit_nbytes: int
    under_way_nbytes: int
    host_nbytes: int
    compression_nbytes: int
    pool_nbytes: int
    num_late: int
    nvme_nbytes: int
    num_crowded_out: int
    visitors: frozenset[int]
    may_stay: frozenset[int]


def place(
    candidate: Candidate, needs: Needs, budgets: Budgets, *, first: Candidate | None = None, least_crowded_out: int = 0
) -> Placement:
    """first: the candidate of the first rank, whose shards are the largest, so that all expect the same on the device. least_crowded_out:
    so many spans' records live on the device whatever this rank needs, since another one needs that.

    Raises BudgetError where the device or host budget is below the least that works.
    """
    may_choose = needs.weights is needs.states is None and needs.keep
    needs = _settled(candidate, needs, budgets)
    layout, gradient_limit = candidate.layout, candidate.op_gradient_nbytes + candidate.buffers_nbytes
    pinned = sum(span.nbytes for span in layout.spans) if needs.weights == DEVICE else 0
    on_device = _all_on_device(candidate, needs) if needs.states == DEVICE else 0
    needed = pinned + on_device + (0 if pinned else candidate.held_nbytes) + gradient_limit
    if budgets.device_nbytes < needed:
        raise _too_small(candidate, budgets, needed, pinned, on_device)

    guests = Guests()
    may_visit = records_may_visit(weights=needs.weights, states=needs.states, keep=needs.keep)
    crowded_out: list[tuple[int, int]] = []  # span, and its bytes on the device
    if needs.states == DEVICE:
        homes, sizes = dict.fromkeys(KINDS, (DEVICE,) * len(layout.chunks)), candidate.sizes()
        shared = Shared(homes, on_nvme=sizes, slots=dict.fromkeys(KINDS, 0))
    else:
        if may_visit:
            guests = _guests(first or candidate, needs, budgets, taken_nbytes=gradient_limit + candidate.snapshot_nbytes)
        shared = share_out(candidate, needs, budgets, (), guests)
        if may_choose and budgets.nvme_nbytes is not None:
            room = budgets.device_nbytes - needed - candidate.snapshot_nbytes
            shared, crowded_out = _crowd_out(candidate, needs, budgets, guests, shared, room_nbytes=room, least=least_crowded_out)
        if crowded_out:
            on_device = candidate.snapshot_nbytes + sum(nbytes for _, nbytes in crowded_out)
            needed += on_device

    slack = budgets.device_nbytes - needed  # two thirds and more of it are for spans
    extra = max(min(candidate.op_gradient_nbytes, slack // 3), min(UNDER_WAY_NBYTES, slack // 64))
    sizes = candidate.sizes()
    waiting = enumerate(shared.homes[GRADIENTS]) if may_visit and needs.deferred else ()
    return Placement(
        homes=shared.homes,
        sizes=sizes,
        in_slots=candidate.in_slots(sizes),
        on_nvme=shared.on_nvme,
        slots=shared.slots,
        pinned=bool(pinned),
        device_nbytes=budgets.device_nbytes,
        fixed_nbytes=pinned + on_device + gradient_limit + extra,
        least_nbytes=needed + extra,
        gradient_limit_nbytes=gradient_limit + extra,
        under_way_nbytes=extra,
        host_nbytes=shared.host_nbytes,
        compression_nbytes=shared.compression_nbytes,
        pool_nbytes=shared.pool_nbytes,
        num_late=shared.num_late,
        nvme_nbytes=shared.nvme_nbytes,
        num_crowded_out=len(crowded_out),
        visitors=guests.visitors,
        may_stay=frozenset(index for index, home in waiting if home.is_storage),
    )


def _settled(candidate: Candidate, needs: Needs, budgets: Budgets) -> Needs:
    """With the device chosen where all has room there, or must have. Raises BudgetError where states are asked there and it has none."""
    gradients = candidate.op_gradient_nbytes + candidate.buffers_nbytes
    whole_nbytes = sum(span.nbytes for span in candidate.layout.spans) + _all_on_device(candidate, needs) + gradients
    weights, states = needs.weights, needs.states
    if weights is None and states in (None, DEVICE) and needs.keep and whole_nbytes <= budgets.device_nbytes:
        weights = states = DEVICE
    if states == DEVICE and weights != DEVICE:
        _require_whole(whole_nbytes, budgets.device_nbytes)
        weights = DEVICE
    return dataclasses.replace(needs, weights=weights, states=states)


def _all_on_device(candidate: Candidate, needs: Needs) -> int:
    """What all records take on the device beside their weights."""
    pairs = zip(candidate.layout.chunks, candidate.records)
    return candidate.snapshot_nbytes + sum(_largest_on_device(chunk, record) for chunk, record in pairs)


def _too_small(candidate: Candidate, budgets: Budgets, needed: int, pinned: int, on_device: int) -> BudgetError:
    gradient_limit = candidate.op_gradient_nbytes + candidate.buffers_nbytes
    smaller = ", or compile smaller modules, each of which is one op" if candidate.has_regions else ", or split the largest layer"
    return BudgetError(
        f"device_memory={format_bytes(budgets.device_nbytes)} is too small: this model needs {exact(needed)} to make "
        f"progress (largest op {format_bytes(candidate.held_nbytes)}, its gradients {format_bytes(gradient_limit)}"
        f"{', weights ' + format_bytes(pinned) if pinned else ''}{', states ' + format_bytes(on_device) if on_device else ''}"
        f"). Raise device_memory{' or leave more to the host' if pinned else smaller}."
    )


def _guests(first: Candidate, needs: Needs, budgets: Budgets, taken_nbytes: int) -> Guests:
    """What the device has room for as a rule: as many visitors as there can be; but where host memory holds all records, and both together
    all gradients that wait, as many as leave it at that. taken_nbytes: of the device, by what comes before visitors."""
    has_room_for_all = sum(record.nbytes for record in first.records) <= budgets.host_nbytes * budgets.host_share
    room_nbytes = budgets.device_nbytes
    if not has_room_for_all:  # so many bytes are on NVMe whoever visits: those of too many visitors cost nothing
        room_nbytes = max(room_nbytes, budgets.expected_nbytes)
    room_nbytes -= taken_nbytes
    most, shared = _guests_by_turns(first, needs, budgets, room_nbytes, records_first=False)
    if not needs.deferred or not _has_records_on_nvme(shared) or not has_room_for_all:
        return most
    fewer, shared = _guests_by_turns(first, needs, budgets, room_nbytes, records_first=True)
    gradients = {index for index, home in enumerate(shared.homes[GRADIENTS]) if home.is_storage}
    return most if _has_records_on_nvme(shared) or gradients - fewer.visitors - fewer.staying else fewer


def _guests_by_turns(
    first: Candidate, needs: Needs, budgets: Budgets, room_nbytes: int, *, records_first: bool
) -> tuple[Guests, Shared]:
    """Of the gradients that wait those stay on the device that find no place in host memory: found by turns, since the more stay the fewer
    records visit. Returns what is left to share of host memory, too."""
    layout, options = first.layout, {"room_nbytes": room_nbytes}
    at_home, may_stay = (HOST,) * len(first.records), frozenset()
    for _ in range(GUEST_ROUNDS):
        found = share_device(layout, first.records, at_home, may_stay=may_stay, **options)
        visitors, staying = (frozenset(index for span, _ in spans for index in layout.spans[span].chunks) for spans in found)
        guests = Guests(visitors, staying & may_stay, records_first)
        shared = share_out(first, needs, budgets, (), guests)
        waiting = enumerate(shared.homes[GRADIENTS]) if needs.deferred else ()
        lacking = {index for index, home in waiting if home.is_storage and index not in visitors}
        if lacking <= may_stay:
            break
        may_stay |= lacking
    return guests, shared


def _has_records_on_nvme(shared: Shared) -> bool:
    """Whether weights or states of any chunk have their home there."""
    return any(in_storage(shared.homes[kind]) for kind in (WEIGHTS, STATES))


def _crowd_out(
    candidate: Candidate, needs: Needs, budgets: Budgets, guests: Guests, shared: Shared, *, room_nbytes: int, least: int
) -> tuple[Shared, list[tuple[int, int]]]:
    """Where NVMe is too small for what host memory leaves to it, put the first spans' records on the device, as far as that has room.

    shared: without that. Returns what is left to share then; and the spans, with their bytes on the device."""
    layout, crowded_out = candidate.layout, []
    states = _states_on_device(layout, candidate.records)
    left = deque((span.index, span.nbytes + nbytes) for span, nbytes in states)
    while (lacking := shared.nvme_nbytes - budgets.nvme_nbytes) > 0 or len(crowded_out) < least:
        while left and left[0][1] <= room_nbytes and (lacking > 0 or len(crowded_out) < least):
            span, nbytes = left.popleft()
            room_nbytes -= nbytes
            lacking -= sum(shared.on_nvme[kind][index] for kind in KINDS for index in layout.spans[span].chunks)
            crowded_out.append((span, nbytes))
        chunks = {index for span, _ in crowded_out for index in layout.spans[span].chunks}
        shared = share_out(candidate, needs, budgets, chunks, guests)
        if not left or left[0][1] > room_nbytes:
            break  # the drive refuses what is too much for it
    return shared, crowded_out


def late_chunks(placement: Placement) -> list[int]:
    """Whose gradients a pool is for: those that stay on NVMe."""
    return [index for index, home in enumerate(placement.homes[STATES]) if home.is_storage and index not in placement.visitors]


def look_ahead(placement: Placement) -> tuple[int, int]:
    """How many slots of weights are read into ahead: all but those that updates, and chunks whose gradients wait for one, take, or all
    if there is one for each chunk. And how many chunks' states are read ahead."""
    weights, states, gradients = (placement.slots[kind] for kind in KINDS)
    is_enough = weights == len(in_storage(placement.homes[WEIGHTS]))
    return weights if is_enough else max(0, weights - states - gradients), max(1, states - 2)


def records_may_visit(*, weights: Tier | None, states: Tier | None, keep: bool) -> bool:
    """Whether records may leave their homes for what the device has room for: [Note: the device budget] in device_memory.py. Arguments as of
    `Needs`."""
    return keep and states is None and weights in (None, DEVICE)


def share_device(
    layout: Layout,
    records: Sequence[Record],
    homes: Sequence[Tier],
    *,
    room_nbytes: int,
    snapshots: Collection[int] = (),
    may_stay: Collection[int] = (),
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What the device has room for beside all weights: spans whose records fit, from the first on; and of the others those whose gradients
    do, which come before records, from the last on. Each with its bytes. Records that live there anyway come first, and are not among
    them.

    homes: of the states, by chunk. may_stay: chunks, see `Placement`. snapshots: spans that need their weights twice. The same on all ranks.
    """
    room_nbytes -= sum(span.nbytes for span in layout.spans)
    states = []
    for span, nbytes in _states_on_device(layout, records):
        if span.index in snapshots:
            nbytes += span.nbytes
        if homes[span.chunks[0]].is_device:
            room_nbytes -= nbytes
        else:
            states.append((span.index, nbytes))
    staying = {}
    for span in reversed(layout.spans):
        chunks = [index for index in span.chunks if index in may_stay and not homes[index].is_device]
        nbytes = sum(_gradient_on_device(layout.chunks[index]) for index in chunks)
        if nbytes > room_nbytes:
            break
        if nbytes:
            staying[span.index] = nbytes
            room_nbytes -= nbytes
    visiting = []
    for span, nbytes in states:
        if nbytes - staying.get(span, 0) > room_nbytes:
            break
        room_nbytes -= nbytes - staying.pop(span, 0)
        visiting.append((span, nbytes))
    return visiting, list(staying.items())


def _states_on_device(layout: Layout, records: Sequence[Record]) -> Iterator[tuple[Span, int]]:
    """Each trainable span, with what its records take on the device beside their weights, the same on all ranks."""
    for span in layout.spans:
        if span.trainable:
            yield span, sum(_largest_on_device(layout.chunks[index], records[index]) for index in span.chunks)


def _largest_on_device(chunk: Chunk, record: Record) -> int:
    """Bytes of states and gradient of the largest shard: what lies on the device is decided alike on all ranks."""
    if not chunk.trainable:
        return 0
    numel = chunk.shard_used(0)
    states = sum(round_up(numel * segment.itemsize, PAGE_NBYTES) for segment in record.segments[1:])
    return states + _gradient_on_device(chunk)


def _gradient_on_device(chunk: Chunk) -> int:
    return gradient_nbytes(chunk, chunk.shard_used(0))


def _require_whole(needed: int, budget: int) -> None:
    """Raise BudgetError where the device has no room for all that states on the device need."""
    if needed > budget:
        raise BudgetError(
            f"states='device' needs {exact(needed)} for weights, states, gradients and their buffers on the device, but "
            f"device_memory={format_bytes(budget)}. Raise device_memory or choose states='host'."
        )
