"""Sizes: what goes to which tier, and how much memory the pipeline's own slots take.

Pure arithmetic over the layout's sizes and the budgets. Must not know torch, files or threads. Over 400 lines because every tier's
share depends on the others'.
"""

# [Note: how budgets are spent]
# First what training cannot do without: the most that one op and those around it hold on the device, and the fewest slots
# with which a record can be read, updated and written. A budget below that is refused with the number that it needs. Then
# slots that let stages overlap. What is then left of the host keeps weights (each byte saves three of NVMe traffic: read
# forward, read backward, written), then gradients if they wait for step() (two: written, read), then states (two); those of
# records that will visit the device ([Note: the device margin] in budget.py) come after all others, since they seldom move. The last
# ones of a kind cost nothing: they take the place of the slots that they would have shared.
# Gradients that have no place of their own share slots, and have room on NVMe for when their slots are wanted. A pool for those of late
# moments ([Note: late moments] in redo.py) gets what is left over, if it holds one of each record that stays on NVMe. Where floats are not
# coded it saves four for the first update in a row, and comes before states, which share what is left with it. Where NVMe is
# too small for what is left, the first records are crowded out: they live on the device, where nothing else could hide their update.

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.plan.packing import BLOCK_NUMEL, WEIGHT_NBYTES, Chunk, Layout, Span
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.redo import needed_nbytes, pool_for
from infinity.sizes import format_bytes

# [Note: what a chunk's size costs]
# Small chunks cost time of the engine's threads, some CHUNK_SECONDS each a step, and padding. Large ones leave room for fewer
# slots, so that stages wait for each other, leave less host memory to what could stay there, and make the last update,
# which nothing hides, longer. The rates are those of a small host with one drive; only their proportions matter, and little
# of these: around its minimum the sum is flat. (bench/chunks.py measures how far from the best of a grid the choice is.)

CHUNK_SECONDS = 1e-3
NVME_RATE, HOST_RATE, LINK_RATE = 3.5e9, 40e9, 20e9  # bytes a second
MIN_CHUNK_NUMEL, MAX_CHUNK_NUMEL, MAX_NUM_CHUNKS = 128 << 10, 32 << 20, 20_000

MIN_WEIGHT_SLOTS, MIN_STATE_SLOTS, MIN_GRADIENT_SLOTS = 2, 2, 2
WEIGHT_SLOTS, STATE_SLOTS, GRADIENT_SLOTS = 64, 12, 8
UNDER_WAY_NBYTES = 4 << 20  # of gradients that leave the device, where there is ample room: fewer make small ops wait for threads


@dataclass(frozen=True)
class Placement:
    """Homes a kind and chunk ("device", "host" or "nvme"), the bytes of each copy there, of one in a slot, and on NVMe; the slots that
    these share; and the bytes that all this takes.

    pinned: gathered weights stay on the device for good; their homes are those of the copies that updates are made from.
    device_nbytes: the device budget; of it, fixed_nbytes stay taken, gradient_limit_nbytes of them by gradients, and the rest is for
    spans that come and go; least_nbytes is the least budget that works. Of host_nbytes, compression_nbytes are for buffers, and pool_nbytes
    for gradients of late moments, of which there are num_late updates in a row. num_crowded_out: trainable spans, from the first on, whose
    records live on the device because nothing else has room for them. visitors: chunks whose records the device has room for as a rule.
    With more than under_way_nbytes of gradients on their way to the host, the training thread waits.
    """

    homes: dict[str, tuple[str, ...]]
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


def place(
    layout: Layout,
    records: Sequence[Record],
    *,
    weights: str,
    states: str,
    keep: bool,
    deferred: bool,
    gradient_itemsize: int | None,
    device_budget: int,
    host_budget: int,
    host_share: float = 1.0,
    compression_nbytes: int = 0,
    late_nbytes: Sequence[int] | None = None,
    late_on_nvme: bool = False,
    late_first: bool = False,
    nvme_budget: int | None = None,
    least_crowded_out: int = 0,
    held_nbytes: int,
    op_gradient_nbytes: int,
    buffers_nbytes: int = 0,
    snapshot_nbytes: int = 0,
) -> Placement:
    """records: of this rank, by chunk. weights, states: auto, device, host or nvme. keep: use what budgets leave over.

    deferred: all gradients wait for step(). gradient_itemsize: bytes of an accumulated gradient element, None for the
    weight's own. nvme_budget: past it, where places are for us to choose, records live on the device; None where it is not known.
    least_crowded_out: so many do whatever this rank needs, since another one does.
    held_nbytes: the most that nested ops hold of spans; op_gradient_nbytes: the largest parameter's gradient; buffers_nbytes: the
    most that gradients take before they are reduced, on several ranks;
    snapshot_nbytes: more that records on the device take, see [Note: weights written in forward] in state.py. host_share:
    of the host budget that is for records, and for the compression_nbytes that these need if some are on NVMe. late_nbytes: of
    each record, about what a gradient takes in a pool, where moments may be late: slots of states have room for one then; late_on_nvme: so
    has NVMe, where there is no pool; late_first: a pool comes before states.
    Raises BudgetError where the device or host budget is below the least that works.
    """
    chunks = layout.chunks
    span_nbytes = sum(span.numel * WEIGHT_NBYTES[span.dtype] for span in layout.spans)
    largest = sum(_largest_on_device(chunk, record, gradient_itemsize) for chunk, record in zip(chunks, records))
    gradient_limit = op_gradient_nbytes + buffers_nbytes

    whole_nbytes = span_nbytes + largest + gradient_limit + snapshot_nbytes
    may_choose = weights == states == "auto" and keep
    if weights == "auto" and states in ("auto", "device") and keep and whole_nbytes <= device_budget:
        weights = states = "device"
    if states == "device" and weights != "device":
        states = _only_whole(states, whole_nbytes, device_budget)
        weights = "device"
    pinned = span_nbytes if weights == "device" else 0
    on_device = largest + snapshot_nbytes if states == "device" else 0
    needed = pinned + on_device + (0 if pinned else held_nbytes) + gradient_limit
    if device_budget < needed:
        raise BudgetError(
            f"device_memory={format_bytes(device_budget)} is too small: this model needs {_exact(needed)} to make "
            f"progress (largest op {format_bytes(held_nbytes)}, its gradients {format_bytes(gradient_limit)}"
            f"{', weights ' + format_bytes(pinned) if pinned else ''}{', states ' + format_bytes(on_device) if on_device else ''}"
            f"). Raise device_memory{' or leave more to the host' if pinned else ', or split the largest layer'}."
        )

    sizes = {
        WEIGHTS: tuple(record.weight_nbytes for record in records),
        STATES: tuple(record.states_nbytes for record in records),
        GRADIENTS: tuple(
            _page(record.numel * (gradient_itemsize or WEIGHT_NBYTES[chunk.dtype])) if chunk.trainable else 0
            for chunk, record in zip(chunks, records)
        ),
    }
    in_slots = sizes
    if late_nbytes is not None:
        in_slots = sizes | {STATES: tuple(n and n + record.late_gradient[2] for n, record in zip(sizes[STATES], records))}
    crowded_out: list[tuple[int, int]] = []  # span, and its bytes on the device
    visitors: frozenset[int] = frozenset()
    if states == "device":
        beside = Beside(dict.fromkeys(KINDS, ("device",) * len(chunks)), on_nvme=sizes, slots=dict.fromkeys(KINDS, 0))
    else:

        def share_out() -> Beside:
            return _beside(
                sizes,
                in_slots,
                {index for span, _ in crowded_out for index in layout.spans[span].chunks},
                visitors,
                weights=weights,
                states=states,
                keep=keep,
                deferred=deferred,
                host_budget=host_budget,
                host_share=host_share,
                compression_nbytes=compression_nbytes,
                late_nbytes=late_nbytes,
                late_on_nvme=late_on_nvme,
                late_first=late_first,
            )

        if records_may_visit(weights=weights, states=states, keep=keep):
            room = device_budget - gradient_limit - snapshot_nbytes
            spans = records_on_device(
                layout, records, ("host",) * len(chunks), room_nbytes=room, gradient_itemsize=gradient_itemsize, snapshots=()
            )
            visitors = frozenset(index for span, _ in spans for index in layout.spans[span].chunks)
        beside = share_out()
        if may_choose and nvme_budget is not None:
            left = deque(
                (span.index, span.numel * WEIGHT_NBYTES[span.dtype] + nbytes)
                for span, nbytes in _states_on_device(layout, records, gradient_itemsize)
            )
            room = device_budget - needed - snapshot_nbytes
            while (lacking := beside.nvme_nbytes - nvme_budget) > 0 or len(crowded_out) < least_crowded_out:
                while left and left[0][1] <= room and (lacking > 0 or len(crowded_out) < least_crowded_out):
                    span, nbytes = left.popleft()
                    room -= nbytes
                    lacking -= sum(beside.on_nvme[kind][index] for kind in KINDS for index in layout.spans[span].chunks)
                    crowded_out.append((span, nbytes))
                beside = share_out()
                if not left or left[0][1] > room:
                    break  # the drive refuses what is too much for it
        if crowded_out:
            on_device = snapshot_nbytes + sum(nbytes for _, nbytes in crowded_out)
            needed += on_device

    slack = device_budget - needed
    extra = max(min(op_gradient_nbytes, slack // 3), min(UNDER_WAY_NBYTES, slack // 64))  # the rest, two thirds and more, is for spans
    gradient_limit += extra
    return Placement(
        homes=beside.homes,
        sizes=sizes,
        in_slots=in_slots,
        on_nvme=beside.on_nvme,
        slots=beside.slots,
        pinned=bool(pinned),
        device_nbytes=device_budget,
        fixed_nbytes=pinned + on_device + gradient_limit,
        least_nbytes=needed + extra,
        gradient_limit_nbytes=gradient_limit,
        under_way_nbytes=gradient_limit - op_gradient_nbytes - buffers_nbytes,
        host_nbytes=beside.host_nbytes,
        compression_nbytes=beside.compression_nbytes,
        pool_nbytes=beside.pool_nbytes,
        num_late=beside.num_late,
        nvme_nbytes=beside.nvme_nbytes,
        num_crowded_out=len(crowded_out),
        visitors=visitors,
    )


@dataclass(frozen=True)
class Beside:
    """What a placement says of host memory and NVMe."""

    homes: dict[str, tuple[str, ...]]
    on_nvme: dict[str, tuple[int, ...]]
    slots: dict[str, int]
    host_nbytes: int = 0
    compression_nbytes: int = 0
    pool_nbytes: int = 0
    num_late: int = 0
    nvme_nbytes: int = 0


def _beside(
    sizes: dict[str, tuple[int, ...]],
    in_slots: dict[str, tuple[int, ...]],
    crowded_out: Collection[int],
    visitors: Collection[int],
    *,
    weights: str,
    states: str,
    keep: bool,
    deferred: bool,
    host_budget: int,
    host_share: float,
    compression_nbytes: int,
    late_nbytes: Sequence[int] | None,
    late_on_nvme: bool,
    late_first: bool,
) -> Beside:
    """Share out host memory, the rest goes to NVMe. Chunks that are crowded out need no place; visitors of the device seldom need theirs, so
    they come last. sizes, in_slots: see Placement; other arguments as of `place`."""
    num_chunks = len(sizes[WEIGHTS])
    homes = {
        WEIGHTS: ["host" if weights == "host" else "nvme"] * num_chunks,
        STATES: ["host" if states == "host" else "nvme"] * num_chunks,
        GRADIENTS: ["nvme"] * num_chunks,
    }
    if weights == "device":  # the record needs its weights beside the states
        homes[WEIGHTS] = list(homes[STATES])
    for kind in KINDS:  # nothing has a home in memory: a frozen chunk's states, a shard that is all padding
        homes[kind] = ["host" if not nbytes else home for home, nbytes in zip(homes[kind], sizes[kind])]
        for index in crowded_out:
            homes[kind][index] = "device"

    def slots(counts: Sequence[int]) -> dict[str, int]:
        """Slots of each kind: at most the counts given, and no more than there are chunks to share them."""
        return {kind: min(count, homes[kind].count("nvme")) for kind, count in zip(homes, counts)}

    def nbytes_in(tier: str, there: dict[str, tuple[int, ...]]) -> int:
        return sum(nbytes for kind in homes for nbytes, home in zip(there[kind], homes[kind]) if home == tier)

    def buffers_nbytes() -> int:
        return compression_nbytes if "nvme" in (*homes[WEIGHTS], *homes[STATES]) else 0

    def host_nbytes(counts: Sequence[int]) -> int:
        shared = sum(count * max(in_slots[kind]) for kind, count in slots(counts).items())
        return buffers_nbytes() + nbytes_in("host", sizes) + shared

    fewest = (MIN_WEIGHT_SLOTS, MIN_STATE_SLOTS, MIN_GRADIENT_SLOTS)
    least = host_nbytes(fewest)
    given, host_budget = host_budget, int(host_budget * host_share)
    if host_budget < least:
        held = ", ".join(f"{count} for {kind}" for kind, count in slots(fewest).items() if count)
        enough = math.ceil(least / host_share)
        raise BudgetError(
            f"host_memory={format_bytes(given)} is too small: this model needs {_exact(enough)} to make "
            f"progress (slots: {held or 'none'}; resident: {format_bytes(nbytes_in('host', sizes))}"
            f"{'; buffers: ' + format_bytes(buffers_nbytes()) if buffers_nbytes() else ''}"
            f"{f'; for activations: {1 - host_share:.0%}' if host_share < 1 else ''}). Raise host_memory or lower chunk_mib.",
            least_host_nbytes=enough,
        )
    if deferred and least + sum(n for n, home in zip(sizes[GRADIENTS], homes[GRADIENTS]) if home == "nvme") <= host_budget:
        homes[GRADIENTS] = ["host" if home == "nvme" else home for home in homes[GRADIENTS]]
    low, high = list(fewest), [WEIGHT_SLOTS, STATE_SLOTS, GRADIENT_SLOTS]
    while low != high:  # grow the pools together, a tenth at a time
        wanted = [min(h, max(l + 1, l + h // 10)) for l, h in zip(low, high)]
        if host_nbytes(wanted) > host_budget:
            break
        low = wanted
    some_on_nvme = any("nvme" in homes[kind] for kind in (WEIGHTS, STATES))
    order = [kind for kind, choice in ((WEIGHTS, weights), (STATES, states)) if keep and choice == "auto"]
    if deferred:
        order.insert(order.count(WEIGHTS), GRADIENTS)
    elif keep or not some_on_nvme:
        order.append(GRADIENTS)
    left = host_budget - host_nbytes(low)
    stays = [index for index in reversed(range(num_chunks)) if index not in visitors]
    sharing = {kind: homes[kind].count("nvme") for kind in order}
    shared = slots(low)
    reserved = 0
    if late_nbytes is not None:
        first = [kind for kind in order if kind == WEIGHTS or (kind == GRADIENTS and deferred)]
        room = max(0, left - sum(sizes[kind][index] for kind in first for index in stays if homes[kind][index] == "nvme"))
        late = [index for index in stays if homes[STATES][index] == "nvme"]
        gradients = [late_nbytes[index] for index in late]
        if STATES not in order:
            reserved, _ = pool_for(gradients, room)
        elif late_first:
            reserved = _pool_beside_states(gradients, sum(sizes[STATES][index] for index in late), room)
        left -= reserved
    for indices in (stays, sorted(visitors, reverse=True)):
        for kind in order:
            for index in indices:
                if homes[kind][index] != "nvme":
                    continue
                slot = max(in_slots[kind]) if sharing[kind] <= shared[kind] else 0  # that nobody shares any more
                if sizes[kind][index] - slot <= left:
                    homes[kind][index] = "host"
                    left -= sizes[kind][index] - slot
                    sharing[kind] -= 1
    pool_nbytes, num_late, on_nvme = 0, 0, sizes
    if late_nbytes is not None:
        gradients = [late_nbytes[index] for index in stays if homes[STATES][index] == "nvme"]
        pool_nbytes, num_late = pool_for(gradients, left + reserved)
        if not num_late and late_on_nvme and "nvme" in homes[STATES]:
            on_nvme, num_late = in_slots, 1
    return Beside(
        homes={kind: tuple(found) for kind, found in homes.items()},
        on_nvme=on_nvme,
        slots=slots(low),
        host_nbytes=host_nbytes(low) + pool_nbytes,
        compression_nbytes=buffers_nbytes(),
        pool_nbytes=pool_nbytes,
        num_late=num_late,
        nvme_nbytes=nbytes_in("nvme", on_nvme),
    )


def _pool_beside_states(gradients_nbytes: Sequence[int], states_nbytes: int, room_nbytes: int) -> int:
    """Of the room, for one update's gradients of the records whose states find none beside them; 0 where it cannot hold these."""
    needed = needed_nbytes(gradients_nbytes, 1)
    lacking = states_nbytes - room_nbytes
    if lacking <= 0 or needed >= states_nbytes:
        return 0
    found = math.ceil(needed * lacking / (states_nbytes - needed)) + max(gradients_nbytes)  # the last states may leave a gap
    return found if found <= room_nbytes else 0


def late_chunks(placement: Placement) -> list[int]:
    """Whose gradients a pool is for: those that stay on NVMe."""
    return [index for index, home in enumerate(placement.homes[STATES]) if home == "nvme" and index not in placement.visitors]


def look_ahead(placement: Placement) -> tuple[int, int]:
    """How many slots of weights are read into ahead: all but those that updates, and chunks whose gradients wait for one, take, or all
    if there is one for each chunk. And how many chunks' states are read ahead."""
    weights, states, gradients = (placement.slots[kind] for kind in KINDS)
    is_enough = weights == placement.homes[WEIGHTS].count("nvme")
    return weights if is_enough else max(0, weights - states - gradients), max(1, states - 2)


def records_may_visit(*, weights: str, states: str, keep: bool) -> bool:
    """Whether records may leave their homes for what the device has room for: [Note: the device margin] in budget.py. Arguments as of `place`."""
    return keep and states == "auto" and weights in ("auto", "device")


def records_on_device(
    layout: Layout,
    records: Sequence[Record],
    homes: Sequence[str],
    *,
    room_nbytes: int,
    gradient_itemsize: int | None,
    snapshots: Collection[int],
) -> list[tuple[int, int]]:
    """The spans whose records fit on the device when all weights do, from the first on, with the bytes of each span's. Those that live
    there anyway come before, and are not among them.

    homes: of the states, by chunk. gradient_itemsize: as in `place`. snapshots: spans that need their weights twice. The same on all ranks.
    """
    found = []
    room_nbytes -= sum(span.numel * WEIGHT_NBYTES[span.dtype] for span in layout.spans)
    for span, nbytes in _states_on_device(layout, records, gradient_itemsize):
        if span.index in snapshots:
            nbytes += span.numel * WEIGHT_NBYTES[span.dtype]
        if nbytes > room_nbytes:
            break
        room_nbytes -= nbytes
        if homes[span.chunks[0]] != "device":
            found.append((span.index, nbytes))
    return found


def _states_on_device(layout: Layout, records: Sequence[Record], gradient_itemsize: int | None) -> Iterator[tuple[Span, int]]:
    """Each trainable span, with what its records take on the device beside their weights, the same on all ranks."""
    for span in layout.spans:
        if span.trainable:
            yield span, sum(_largest_on_device(layout.chunks[index], records[index], gradient_itemsize) for index in span.chunks)


def _largest_on_device(chunk: Chunk, record: Record, gradient_itemsize: int | None) -> int:
    """Bytes of states and gradient of the largest shard: what lies on the device is decided alike on all ranks."""
    if not chunk.trainable:
        return 0
    numel = chunk.shard_used(0)
    states = sum(_page(numel * segment.itemsize) for segment in record.segments[1:])
    return states + _page(numel * (gradient_itemsize or WEIGHT_NBYTES[chunk.dtype]))


def chunk_numels(num_parameters: int, *, world: int) -> list[int]:
    """Chunk sizes to choose from, ascending: multiples of world * BLOCK_NUMEL, by factors of about the square root of 2."""
    unit = world * BLOCK_NUMEL
    least = max(MIN_CHUNK_NUMEL, num_parameters // MAX_NUM_CHUNKS)
    most = max(least, min(MAX_CHUNK_NUMEL * world, num_parameters))
    steps = math.ceil(2 * math.log2(most / least))
    return sorted({max(round(least * 2 ** (step / 2) / unit), 1) * unit for step in range(steps + 1)})


def step_seconds(layout: Layout, placement: Placement) -> float:
    """What a step of one rank takes, as far as the chunks' size matters: see [Note: what a chunk's size costs]."""
    weights, states, _ = (placement.sizes[kind] for kind in KINDS)
    moving = [i for i, home in enumerate(placement.homes[STATES]) if home != "device" and i not in placement.visitors]

    def on_nvme(kind: str) -> int:
        return sum(placement.sizes[kind][index] for index in moving if placement.homes[kind][index] == "nvme")

    record = max(w + s for w, s in zip(weights, states))
    moved = 3 * on_nvme(WEIGHTS) + 2 * on_nvme(STATES)
    if late := placement.num_late:
        away = [i for i in moving if placement.homes[STATES][i] == "nvme"]
        moments = sum(states[i] - weights[i] for i in away)  # all but the residual
        gradients = sum(placement.on_nvme[STATES][i] - states[i] for i in away)  # written, and read, if not in memory
        moved -= (moments * late - 2 * gradients) / (late + 1)
    drive = moved / NVME_RATE
    if slots := placement.slots[STATES]:
        drive *= 1 + 1 / slots  # the fewer records are under way, the more often the drive waits for one
    host = 2 * sum(weights[index] + states[index] for index in moving) / HOST_RATE
    largest = max(chunk.numel * WEIGHT_NBYTES[chunk.dtype] for chunk in layout.chunks)
    link = 2 * sum(span.numel * WEIGHT_NBYTES[span.dtype] for span in layout.spans) / LINK_RATE
    overlapped = max(drive, host, link)
    if not placement.pinned and placement.device_nbytes - placement.least_nbytes < 2 * largest:
        overlapped += link  # no room to copy ahead
    last = 2 * record / HOST_RATE + 2 * largest / LINK_RATE  # an update that nothing hides, and the gradient before it
    return overlapped + last + len(layout.chunks) * CHUNK_SECONDS


def _only_whole(states: str, needed: int, budget: int) -> str:
    if needed > budget:
        raise BudgetError(
            f"states='device' needs {_exact(needed)} for weights, states, gradients and their buffers on the device, but "
            f"device_memory={format_bytes(budget)}. Raise device_memory or choose states='host'."
        )
    return states


def _exact(nbytes: int) -> str:
    """A budget that can be copied from a message to the configuration."""
    return f"{nbytes} bytes ({format_bytes(nbytes)})"


def _page(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096
