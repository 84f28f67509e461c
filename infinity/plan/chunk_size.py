"""How large chunks are: the size, and the way to keep records on NVMe, by which a step is predicted to be shortest.

Pure arithmetic over placements. Must not know how these are made: whoever asks makes one of each size.
"""

# [Note: what a chunk's size costs]
# Small chunks cost time of the engine's threads, some CHUNK_SECONDS each a step, and padding. Large ones leave room for fewer
# slots, so that stages wait for each other, leave less host memory to what could stay there, and make the last update,
# which nothing hides, longer. The rates are those of a small host with one drive; only their proportions matter, and little
# of these: around its minimum the sum is flat. (bench/chunks.py measures how far from the best of a grid the choice is.)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.plan.packing import BLOCK_NUMEL, Layout
from infinity.plan.placement import Placement
from infinity.plan.record import KINDS, STATES, WEIGHTS
from infinity.plan.tiers import in_storage

CHUNK_SECONDS = 1e-3
NVME_RATE, HOST_RATE, LINK_RATE = 3.5e9, 40e9, 20e9  # bytes a second
MIN_CHUNK_NUMEL, MAX_CHUNK_NUMEL, MAX_NUM_CHUNKS = 128 << 10, 32 << 20, 20_000
FAR_FROM_BEST = 1.25  # of the shortest step found, where the search for a chunk size ends


@dataclass(frozen=True)
class Way:
    """How records are kept on NVMe. compresses: there are buffers for it. late: their moments may be late."""

    compresses: bool
    late: bool


def chunk_numels(num_parameters: int, *, world: int) -> list[int]:
    """Chunk sizes to choose from, ascending: multiples of world * BLOCK_NUMEL, by factors of about the square root of 2."""
    unit = world * BLOCK_NUMEL
    least = max(MIN_CHUNK_NUMEL, num_parameters // MAX_NUM_CHUNKS)
    most = max(least, min(MAX_CHUNK_NUMEL * world, num_parameters))
    steps = math.ceil(2 * math.log2(most / least))
    return sorted({max(round(least * 2 ** (step / 2) / unit), 1) * unit for step in range(steps + 1)})


def choose(
    place: Callable[[Way, int], tuple[Layout, Placement]],
    numels: Sequence[int],
    compressions: Sequence[bool],
    *,
    may_be_late: bool,
    nvme_nbytes: int | None,
) -> tuple[Way, int]:
    """The way and the chunk size with the shortest step, by the first rank's shards, which are the largest: so the same on all ranks.

    place(way, numel) raises BudgetError for what does not fit. compressions: to be tried in turn, the next one only where nothing fits.
    Raises the BudgetError that says most where nothing does.
    """
    refusals: list[BudgetError] = []
    for compresses in compressions:
        plans = []
        for late in (True, False) if may_be_late else (False,):
            way = Way(compresses, late)
            try:
                numel = best_numel(functools.partial(place, way), numels, nvme_nbytes)
            except BudgetError as error:
                refusals.append(error)
                continue
            layout, placement = place(way, numel)
            if not late or _fits_late(placement, nvme_nbytes):
                plans.append((step_seconds(layout, placement), not late, numel))
            if not in_storage(placement.homes[STATES]):
                break  # nor without late moments, which need more
        if plans:
            _, is_whole, numel = min(plans)
            return Way(compresses, not is_whole), numel
    raise _least(refusals)


def best_numel(place: Callable[[int], tuple[Layout, Placement]], candidates: Sequence[int], nvme_nbytes: int | None) -> int:
    """The size with the shortest step of those for which NVMe has room, else that which needs least of it. candidates: ascending."""
    seconds, refusals, lacking = {}, [], {}
    for numel in reversed(candidates):
        try:
            layout, placement = place(numel)
        except BudgetError as error:
            refusals.append(error)
            continue
        seconds[numel] = step_seconds(layout, placement)
        lacking[numel] = max(0, placement.nvme_nbytes - nvme_nbytes) if nvme_nbytes is not None else 0
        if not lacking[numel] and seconds[numel] > FAR_FROM_BEST * min(s for numel, s in seconds.items() if not lacking[numel]):
            break  # still smaller chunks only take more of the threads' time, and are most of the time of this search
    if not seconds:
        raise _least(refusals)
    return min(seconds, key=lambda numel: (lacking[numel], seconds[numel]))


def step_seconds(layout: Layout, placement: Placement) -> float:
    """What a step of one rank takes, as far as the chunks' size matters: see [Note: what a chunk's size costs]."""
    weights, states, _ = (placement.sizes[kind] for kind in KINDS)
    moving = [i for i, home in enumerate(placement.homes[STATES]) if not home.is_device and i not in placement.visitors]

    def on_nvme(kind: str) -> int:
        return sum(placement.sizes[kind][index] for index in moving if placement.homes[kind][index].is_storage)

    record = max(w + s for w, s in zip(weights, states))
    moved = 3 * on_nvme(WEIGHTS) + 2 * on_nvme(STATES)
    if late := placement.num_late:
        away = [i for i in moving if placement.homes[STATES][i].is_storage]
        moments = sum(states[i] - weights[i] for i in away)  # all but the residual
        gradients = sum(placement.on_nvme[STATES][i] - states[i] for i in away)  # written, and read, if not in memory
        moved -= (moments * late - 2 * gradients) / (late + 1)
    drive = moved / NVME_RATE
    if slots := placement.slots[STATES]:
        drive *= 1 + 1 / slots  # the fewer records are under way, the more often the drive waits for one
    host = 2 * sum(weights[index] + states[index] for index in moving) / HOST_RATE
    largest = max(chunk.nbytes for chunk in layout.chunks)
    link = 2 * sum(span.nbytes for span in layout.spans) / LINK_RATE
    overlapped = max(drive, host, link)
    if not placement.pinned and placement.device_nbytes - placement.least_nbytes < 2 * largest:
        overlapped += link  # no room to copy ahead
    last = 2 * record / HOST_RATE + 2 * largest / LINK_RATE  # an update that nothing hides, and the gradient before it
    return overlapped + last + len(layout.chunks) * CHUNK_SECONDS


def _fits_late(placement: Placement, nvme_nbytes: int | None) -> bool:
    """Whether moments of a placement that was made for it are late, and NVMe has room for it, or has nothing of states to hold."""
    has_room = nvme_nbytes is None or (placement.nvme_nbytes <= nvme_nbytes and not placement.num_crowded_out)
    return (placement.num_late > 0 and has_room) or not in_storage(placement.homes[STATES])


def _least(refusals: list[BudgetError]) -> BudgetError:
    """Of the ways that were tried: that which lacks host memory alone and needs the least of it, which is enough; else the last, which
    needs about the least of the device."""
    return min((error for error in refusals if error.least_host_nbytes), key=lambda error: error.least_host_nbytes, default=refusals[-1])
