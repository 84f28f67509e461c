"""Decides which record goes to which tier, and the memory of the pipeline's slots.

Pure arithmetic over sizes and budgets: the device's here, the host's in host_memory.py. Must not know torch, files or threads.
"""

# [Note: how budgets are spent]
# The necessary memory comes first. On the device this is the most that one op and the ops around it hold. In host memory this is the fewest
# slots with which a record can be read, updated and written. A smaller budget is refused, and the error names the needed number. Next come
# slots that let stages overlap.
#
# The rest of host memory keeps copies, in this order. Weights save three bytes of NVMe traffic per byte: read forward, read backward,
# written. Gradients that wait for step() save two: written, read. States also save two. Homes of records that will visit the device
# ([Note: the device budget] in device_memory.py) come after all others, because visitors seldom move. Gradients of visitors lie on the
# device and come last. If all of these homes fit, they come before gradients that do not wait. Larger inputs, which send visitors home,
# then need nothing of NVMe. Waiting gradients without a place stay on the device until their update begins, if the device has room.
#
# Backward passes compute the gradients of the last spans first, while activations fill the device. Therefore gradients stay on the device from
# the first span on. Host memory has places for those of the last spans. (14.8 B parameters by layer, 32 micro-batches of 4,096 tokens, 80 GB:
# with places for the first spans instead, each micro-batch read the sums of the head and the last layer from NVMe and wrote them.)
#
# More gradients on the device mean fewer visitors. 4 bytes of a sum in host memory make room on the device for a third of a record, whose
# sum and weights then need no host memory. The visitors and the staying gradients are therefore found by turns, beginning with all possible
# visitors. One case comes first: host memory can hold all records, and the device can hold the gradients that then have no place. Records
# with homes on NVMe are written at the start, in the first step and when inputs grow, and more visitors gain nothing. (8.0 B parameters, 4
# micro-batches, on 80 GB: the host then updates 4.9 B instead of 6.5 B and adds up their gradients. A step takes 9.50 s, and 9.45 s with
# all records in host memory.) The last copies of a kind cost nothing: they take the place of the slots that they would have shared.
#
# Gradients without a place of their own share slots, and have room on NVMe for times when their slots are needed. If updates run in
# backward, slots exist for a quarter of the chunks whose records move. As many updates may be put off ([Note: the split update] in
# chunk_updates.py). The remaining memory is a pool for gradients of late moments ([Note: late moments] in late_moments.py). The pool must
# hold one gradient of each record that stays on NVMe. Without coded floats the pool saves four bytes per byte for the first update in a
# row, and comes before states, which share the rest with the pool. If NVMe is too small for the rest, the first records are crowded out:
# they live on the device, because nothing there could hide their update. If half of the device is too small for this, the plan is made
# again with more of it (`_choose` in sizing.py). If the configuration puts records on NVMe and updates follow step(), the memory that is left
# goes to slots for these records ([Note: states read ahead of step()] in chunk_updates.py).
#
# [Note: gradients that pass]
# If updates run in backward, few gradients wait at a time. If NVMe is too small for a place for each gradient, no gradient has a planned place.
# Host memory then has slots for the gradients of the two largest ops, and of parameters that several ops read. If all slots are taken, the
# backward pass waits for an update. If no update can free a slot, a gradient leaves for NVMe, as far as the drive has room beside the records
# (extents_on_demand.py). This happens if gradients are complete late: several forward passes before one backward pass, retain_graph=True.
# (30.5 B parameters with 8-bit states, 80 GB, 125 GiB, a drive of 64 GB: places for all gradients take 57 GiB, 15 of them on the device.)
#
# Sums of several micro-batches need no place if a step is by layer. A layer's sum is complete before the next layer's sum begins. If no tier
# has room for sums, the engine trains by layer only, and refuses several backward passes.

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.formats.format import Format
from infinity.plan.host_memory import Guests, Shared, exact, share_out
from infinity.plan.memory_needs import PAGE_NBYTES, Budgets, Candidate, Needs, gradient_nbytes
from infinity.plan.packing import Chunk, Layout, Span
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.schedule import updates_visitors_early
from infinity.plan.tiers import DEVICE, HOST, Tier, in_storage
from infinity.sizes import format_bytes, round_up

WINDOW_OPS = 3  # if records come before weights, the device has room for the weights of so many of the largest ops
GUEST_ROUNDS = 8  # after so many rounds the last answer counts: the device is divided again once activations are known
UNDER_WAY_NBYTES = 64 << 20  # of gradients leaving the device, if room is ample: with less, small ops wait for the device and for threads


@dataclass(frozen=True)
class Placement:
    """The home of each kind and chunk, the bytes of each copy at home, in a slot and on NVMe, the number of shared slots, and the
    total memory.

    pinned: gathered weights stay permanently on the device; their homes are those of the copies for updates. device_nbytes: the device
    budget. expected_nbytes: the likely one after activations are measured. Of the budget, fixed_nbytes stay taken, gradient_limit_nbytes of
    them by gradients; the rest is for spans that come and go. least_nbytes: the least budget that works. Of host_nbytes, compression_nbytes
    are for buffers, and pool_nbytes for gradients of late moments. Of nvme_nbytes, overflow_nbytes are for codes that exceed their extents; both
    assume that floats are coded if compression_nbytes > 0. num_late: late updates in a row. num_crowded_out: trainable spans, from
    the first on, whose records live on the device because nothing else has room. visitors: chunks whose records usually have room on the
    device. may_stay: chunks whose gradients wait for step() without a place in host memory. These gradients stay on the device as far as
    there is room. In an engine's placement, may_stay has the chunks of all ranks. under_way_nbytes: the training thread waits while more
    bytes of gradients are on their way to the host. window_nbytes: see `share_device`. must_wait, of all ranks: chunks whose gradients have
    no place but the device. gradients_pass: see [Note: gradients that pass]. only_by_layer: sums of gradients have no place, so a step has one
    backward pass or is by layer.
    """

    homes: dict[str, tuple[Tier, ...]]
    sizes: dict[str, tuple[int, ...]]
    in_slots: dict[str, tuple[int, ...]]
    on_nvme: dict[str, tuple[int, ...]]
    slots: dict[str, int]
    pinned: bool
    device_nbytes: int
    expected_nbytes: int
    fixed_nbytes: int
    least_nbytes: int
    gradient_limit_nbytes: int
    under_way_nbytes: int
    host_nbytes: int
    compression_nbytes: int
    pool_nbytes: int
    num_late: int
    nvme_nbytes: int
    overflow_nbytes: int
    num_crowded_out: int
    visitors: frozenset[int]
    may_stay: frozenset[int]
    window_nbytes: int | None = None
    must_wait: frozenset[int] = frozenset()
    gradients_pass: bool = False
    only_by_layer: bool = False

    def uncoded(self) -> Placement:
        """The placement if floats are not coded. Late gradients then have no room on NVMe: see `Candidate.late_on_nvme`."""
        on_nvme = self.sizes | {GRADIENTS: self.on_nvme[GRADIENTS]}
        nbytes = sum(n for kind, homes in self.homes.items() for n, home in zip(on_nvme[kind], homes) if home.is_storage)
        return dataclasses.replace(self, on_nvme=on_nvme, nvme_nbytes=nbytes, overflow_nbytes=0)


def place(
    candidate: Candidate, needs: Needs, budgets: Budgets, *, first: Candidate | None = None, least_crowded_out: int = 0
) -> Placement:
    """Place all copies. first: the candidate of the first rank, whose shards are the largest, so that all ranks expect the same on the
    device. least_crowded_out: so many spans' records live on the device whatever this rank needs, because another rank needs this.

    Raises BudgetError if the device or host budget is below the least that works.
    """
    may_choose = needs.weights is needs.states is None and needs.keep and needs.on_device
    needs = _settled(candidate, needs, budgets)
    layout, gradient_limit = candidate.layout, candidate.op_gradient_nbytes + candidate.buffers_nbytes
    pinned = sum(span.nbytes for span in layout.spans) if needs.weights == DEVICE else 0
    on_device = _all_on_device(candidate, needs) if needs.states == DEVICE else 0
    needed = pinned + on_device + (0 if pinned else candidate.held_nbytes) + gradient_limit
    if budgets.device_nbytes < needed:
        raise _too_small(candidate, budgets, needed, pinned, on_device)

    guests, sizes = Guests(), candidate.sizes()
    may_visit = records_may_visit(weights=needs.weights, states=needs.states, keep=needs.keep)
    crowded_out: list[tuple[int, int]] = []  # (span, its bytes on the device)
    if needs.states == DEVICE:
        homes = dict.fromkeys(KINDS, (DEVICE,) * len(layout.chunks))
        shared = Shared(homes, on_nvme=sizes, slots=dict.fromkeys(KINDS, 0))
    else:
        taken = gradient_limit + candidate.snapshot_nbytes if may_visit else None
        needs, guests, shared = _guests_and_needs(candidate, first or candidate, needs, budgets, taken)
        if may_choose and budgets.nvme_nbytes is not None:
            room = budgets.device_nbytes - needed - candidate.snapshot_nbytes
            shared, crowded_out = _crowd_out(candidate, needs, budgets, guests, shared, room_nbytes=room, least=least_crowded_out)
        on_device = candidate.snapshot_nbytes + sum(nbytes for _, nbytes in crowded_out) if crowded_out else 0
        needed += on_device

    slack = budgets.device_nbytes - needed  # at least two thirds of the slack are for spans
    extra = max(min(candidate.op_gradient_nbytes, slack // 3), min(UNDER_WAY_NBYTES, slack // 64))
    _require_room(candidate, budgets, shared, needed)
    return Placement(
        homes=shared.homes,
        sizes=sizes,
        in_slots=candidate.in_slots(sizes),
        on_nvme=shared.on_nvme,
        slots=shared.slots,
        pinned=bool(pinned),
        device_nbytes=budgets.device_nbytes,
        expected_nbytes=max(budgets.device_nbytes, budgets.expected_nbytes),
        fixed_nbytes=pinned + on_device + gradient_limit + extra,
        least_nbytes=needed + extra,
        gradient_limit_nbytes=gradient_limit + extra,
        under_way_nbytes=extra,
        host_nbytes=shared.host_nbytes,
        compression_nbytes=shared.compression_nbytes,
        pool_nbytes=shared.pool_nbytes,
        num_late=shared.num_late,
        nvme_nbytes=shared.nvme_nbytes,
        overflow_nbytes=shared.overflow_nbytes,
        num_crowded_out=len(crowded_out),
        visitors=guests.visitors,
        gradients_pass=needs.gradients_pass,
        window_nbytes=WINDOW_OPS * candidate.held_nbytes if in_storage(shared.homes[STATES]) else None,
        may_stay=frozenset(shared.without_host_memory if may_visit and needs.deferred else ()),
    )


def _settled(candidate: Candidate, needs: Needs, budgets: Budgets) -> Needs:
    """The needs with the device chosen, if everything fits there or must be there. Raises BudgetError if states must be there and do not
    fit.
    """
    gradients = candidate.op_gradient_nbytes + candidate.buffers_nbytes
    whole_nbytes = sum(span.nbytes for span in candidate.layout.spans) + _all_on_device(candidate, needs) + gradients
    weights, states = needs.weights, needs.states
    if not needs.on_device:
        return needs
    if weights is None and states in (None, DEVICE) and needs.keep and budgets.holds_all and whole_nbytes <= budgets.device_nbytes:
        weights = states = DEVICE
    if states == DEVICE and weights != DEVICE:
        _require_whole(whole_nbytes, budgets.device_nbytes)
        weights = DEVICE
    return dataclasses.replace(needs, weights=weights, states=states)


def _require_room(candidate: Candidate, budgets: Budgets, shared: Shared, needed: int) -> None:
    """Raise BudgetError if the device has no room for gradients that have no other place. needed: device bytes of everything else."""
    sizes, homes = candidate.sizes()[GRADIENTS], shared.homes[GRADIENTS]
    gradients_nbytes = sum(sizes[index] for index in shared.without_host_memory if homes[index].is_device)
    device_nbytes = max(budgets.device_nbytes, budgets.expected_nbytes)
    if gradients_nbytes and needed + gradients_nbytes > device_nbytes:
        records = sum(record.nbytes for record in candidate.records)
        gradients = sum(sizes)
        raise BudgetError(
            f"this model needs {format_bytes(records)} for records and {format_bytes(gradients)} for gradients that wait for step(). Host memory "
            f"holds {format_bytes(shared.host_nbytes)} and NVMe {format_bytes(shared.nvme_nbytes)} of them. {format_bytes(gradients_nbytes)} of "
            f"gradients are left for the device, which has about {format_bytes(max(0, device_nbytes - needed))}. Raise host_memory, add a "
            f"directory to swap_dirs, or train without max_grad_norm and with one micro-batch a step, so that no gradient waits"
        )


def _all_on_device(candidate: Candidate, needs: Needs) -> int:
    """Bytes of all records on the device, weights excluded."""
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


def _guests_and_needs(
    candidate: Candidate, first: Candidate, needs: Needs, budgets: Budgets, taken_nbytes: int | None
) -> tuple[Needs, Guests, Shared]:
    """The needs, the chunks with room on the device, and the division of the candidate's host memory. The first two are the same on all ranks.
    Gradients pass if NVMe is too small for them: [Note: gradients that pass]. taken_nbytes: as of `_guests`."""
    guests, shared = _guests(first, needs, budgets, taken_nbytes)
    if not needs.deferred and budgets.nvme_nbytes is not None and shared.nvme_nbytes > budgets.nvme_nbytes:
        passing = dataclasses.replace(needs, gradients_pass=True)
        with contextlib.suppress(BudgetError):  # host memory is too small for the slots
            guests, shared = _guests(first, passing, budgets, taken_nbytes)
            needs = passing
    return needs, guests, shared if candidate is first else share_out(candidate, needs, budgets, (), guests)


def _guests(first: Candidate, needs: Needs, budgets: Budgets, taken_nbytes: int | None) -> tuple[Guests, Shared]:
    """Chunks that usually have room on the device: as many visitors as possible. If host memory holds all records, and host memory and
    device together hold all waiting gradients, then only as many visitors as keep this true. Also returns the division of host memory.
    taken_nbytes: device memory of everything before visitors; None if no record may visit the device.
    """
    if taken_nbytes is None:
        return Guests(), share_out(first, needs, budgets, (), Guests())
    has_room_for_all = sum(record.nbytes for record in first.records) <= budgets.host_nbytes * budgets.host_share
    room_nbytes = budgets.device_nbytes
    if not has_room_for_all:  # these bytes are on NVMe in any case: too many visitors cost nothing
        room_nbytes = max(room_nbytes, budgets.expected_nbytes)
    room_nbytes -= taken_nbytes
    window_nbytes = None if has_room_for_all else WINDOW_OPS * first.held_nbytes
    most = _guests_by_turns(first, needs, budgets, room_nbytes, records_first=False, window_nbytes=window_nbytes)
    if not needs.deferred or not _has_records_on_nvme(most[1]) or not has_room_for_all:
        return most
    fewer, shared = _guests_by_turns(first, needs, budgets, room_nbytes, records_first=True)
    gradients = {index for index, home in enumerate(shared.homes[GRADIENTS]) if not home.is_host}
    return most if _has_records_on_nvme(shared) or gradients - fewer.visitors - fewer.staying else (fewer, shared)


def _guests_by_turns(
    first: Candidate, needs: Needs, budgets: Budgets, room_nbytes: int, *, records_first: bool, window_nbytes: int | None = None
) -> tuple[Guests, Shared]:
    """Waiting gradients without a place in host memory stay on the device. They are found by turns, because more staying gradients mean
    fewer visiting records. Also returns the division of host memory.
    """
    layout = first.layout
    waiting = () if updates_visitors_early(deferred=needs.deferred, is_shared=layout.partition.is_shared) else None
    options = {"room_nbytes": room_nbytes, "window_nbytes": window_nbytes, "waiting": waiting}
    at_home = (HOST,) * len(first.records)
    may_stay = frozenset(range(len(first.records))) if needs.accumulates else frozenset()
    for _ in range(GUEST_ROUNDS):
        found = share_device(layout, first.records, at_home, may_stay=may_stay, **options)
        visitors, staying = (frozenset(index for span, _ in spans for index in layout.spans[span].chunks) for spans in found)
        guests = Guests(visitors, staying & may_stay, records_first)
        shared = share_out(first, needs, budgets, (), guests)
        waiting = enumerate(shared.homes[GRADIENTS]) if needs.deferred else ()
        lacking = {index for index, home in waiting if not home.is_host and index not in visitors}
        if lacking <= may_stay:
            break
        may_stay |= lacking
    return guests, shared


def _has_records_on_nvme(shared: Shared) -> bool:
    """Whether weights or states of any chunk have their home on NVMe."""
    return any(in_storage(shared.homes[kind]) for kind in (WEIGHTS, STATES))


def _crowd_out(
    candidate: Candidate, needs: Needs, budgets: Budgets, guests: Guests, shared: Shared, *, room_nbytes: int, least: int
) -> tuple[Shared, list[tuple[int, int]]]:
    """If NVMe is too small for the rest of host memory, put the first spans' records on the device, as far as the device has room.

    shared: the division without this. Returns the new division, and the spans with their bytes on the device.
    """
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
            break  # the drive refuses the excess
    return shared, crowded_out


def late_chunks(placement: Placement) -> list[int]:
    """Chunks whose gradients may use the pool: those that stay on NVMe."""
    return [index for index, home in enumerate(placement.homes[STATES]) if home.is_storage and index not in placement.visitors]


def look_ahead(placement: Placement) -> tuple[int, int]:
    """(slots of weights for read-ahead, number of chunks whose states are read ahead). The first excludes the slots of updates, and of
    chunks whose gradients wait for an update. All slots count if each chunk has one.
    """
    weights, states, gradients = (placement.slots[kind] for kind in KINDS)
    is_enough = weights == len(in_storage(placement.homes[WEIGHTS]))
    return weights if is_enough else max(0, weights - states - gradients), max(1, states - 2)


def records_may_visit(*, weights: Tier | None, states: Tier | None, keep: bool) -> bool:
    """Whether records may leave their homes and visit the device: [Note: the device budget] in device_memory.py. Arguments: see `Needs`."""
    return keep and states is None and weights in (None, DEVICE)


def share_device(
    layout: Layout,
    records: Sequence[Record],
    homes: Sequence[Tier],
    *,
    room_nbytes: int,
    window_nbytes: int | None = None,
    snapshots: Collection[int] = (),
    may_stay: Collection[int] = (),
    waiting: Collection[int] | None = None,
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Divide the device memory: (spans whose records fit, from the first on; spans of the rest whose gradients fit, from the first on), each
    with its bytes, weights excluded. Gradients come before records. Records that live on the device in any case come first, and are in
    neither list.

    homes: of the states, by chunk. window_nbytes: device memory for weights that come and go, enough if records come before other weights;
    None: all weights come before records. may_stay: chunks, see `Placement`. snapshots: spans that need their weights twice. waiting: chunks
    whose gradients need memory if their records visit; None: all chunks. The result is the same on all ranks.
    """
    divide = functools.partial(_divide, layout, records, homes, snapshots, may_stay, waiting)
    found = divide(room_nbytes - sum(span.nbytes for span in layout.spans), weights_of=lambda span: 0)
    if window_nbytes is None:
        return found
    before_weights = divide(room_nbytes - window_nbytes, weights_of=lambda span: layout.spans[span].nbytes)
    return max(found, before_weights, key=lambda each: sum(nbytes for spans in each for _, nbytes in spans))


def keeps_frozen(layout: Layout, found: tuple[list[tuple[int, int]], list[tuple[int, int]]], *, room_nbytes: int) -> bool:
    """Whether frozen weights stay on the device from step to step: it can hold all weights beside these records and gradients. found: the
    result of `share_device` for the same room_nbytes."""
    taken = sum(nbytes for both in found for _, nbytes in both) + sum(span.nbytes for span in layout.spans)
    return taken <= room_nbytes


def _divide(
    layout: Layout,
    records: Sequence[Record],
    homes: Sequence[Tier],
    snapshots: Collection[int],
    may_stay: Collection[int],
    waiting: Collection[int] | None,
    room_nbytes: int,
    *,
    weights_of: Callable[[int], int],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """As `share_device`, with room for records, gradients, and the weights that `weights_of` counts for a record's span."""
    states = []
    for span, nbytes in _states_on_device(layout, records):
        nbytes += span.nbytes if span.index in snapshots else 0
        if homes[span.chunks[0]].is_device:
            room_nbytes -= nbytes + weights_of(span.index)
        else:
            passing = [index for index in span.chunks if waiting is not None and index not in waiting]
            states.append((span.index, nbytes - sum(_gradient_on_device(layout.chunks[index]) for index in passing)))
    staying = {}
    for span in layout.spans:
        chunks = [index for index in span.chunks if index in may_stay and not homes[index].is_device]
        nbytes = sum(_gradient_on_device(layout.chunks[index]) for index in chunks)
        if nbytes > room_nbytes:
            break
        if nbytes:
            staying[span.index] = nbytes
            room_nbytes -= nbytes
    visiting = []
    for span, nbytes in states:
        taken = nbytes + weights_of(span) - staying.get(span, 0)
        if taken > room_nbytes:
            break
        room_nbytes -= taken
        staying.pop(span, None)
        visiting.append((span, nbytes))
    return visiting, list(staying.items())


def _states_on_device(layout: Layout, records: Sequence[Record]) -> Iterator[tuple[Span, int]]:
    """Each trainable span that is not coded, with the bytes of its records on the device, weights excluded. The same on all ranks."""
    for span in layout.spans:
        if span.trainable and not span.format.is_coded:
            yield span, sum(_largest_on_device(layout.chunks[index], records[index]) for index in span.chunks)


def _largest_on_device(chunk: Chunk, record: Record) -> int:
    """Bytes of states and gradient of the largest shard: all ranks decide alike about the device."""
    if not chunk.trainable:
        return 0
    return _states_nbytes(record.format, chunk.shard_used(0)) + _gradient_on_device(chunk)


@functools.lru_cache(4096)  # a model has few different chunks
def _states_nbytes(format: Format, numel: int) -> int:
    """Bytes of the states of so many elements on the device."""
    return sum(round_up(segment.nbytes(numel), PAGE_NBYTES) for segment in format.state_segments)


def _gradient_on_device(chunk: Chunk) -> int:
    return gradient_nbytes(chunk, chunk.shard_used(0))


def _require_whole(needed: int, budget: int) -> None:
    """Raise BudgetError where the device has no room for all that states on the device need."""
    if needed > budget:
        raise BudgetError(
            f"optimizer_state_tier='device' needs {exact(needed)} for weights, states, gradients and their buffers on the device, but "
            f"device_memory={format_bytes(budget)}. Raise device_memory or choose optimizer_state_tier='host'."
        )
