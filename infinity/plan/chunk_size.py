"""Chooses the chunk size, and the way to keep records on NVMe, with the shortest predicted step.

Pure arithmetic over placements. Must not know how placements are made: the caller makes one of each size.
"""

# [Note: what a chunk's size costs]
# Small chunks cost thread time, about CHUNK_SECONDS each per step, and padding. Large chunks leave room for fewer slots, and stages then
# wait for each other. Large chunks also leave less host memory for resident copies, and the last update, which nothing hides, takes longer.
# The rates below are those of a small host with one drive. Only their proportions matter, and the sum is flat around its minimum.
# (bench/chunks.py compares the choice with the best size of a grid.)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.plan.packing import Layout
from infinity.plan.partition import Partition
from infinity.plan.placement import Placement
from infinity.plan.record import KINDS, STATES, WEIGHTS
from infinity.plan.tiers import in_storage

CHUNK_SECONDS = 1e-3
NVME_RATE, HOST_RATE, LINK_RATE = 3.5e9, 40e9, 20e9  # bytes per second
MIN_CHUNK_NUMEL, MAX_CHUNK_NUMEL, MAX_NUM_CHUNKS = 128 << 10, 32 << 20, 20_000
FAR_FROM_BEST = 1.25  # relative to the shortest step so far: the search for a chunk size ends there


@dataclass(frozen=True)
class Way:
    """How records are kept on NVMe. compresses: buffers for compression exist. late: moments may be late."""

    compresses: bool
    late: bool


def chunk_numels(num_parameters: int, *, world: int) -> list[int]:
    """Chunk sizes to choose from, ascending: multiples of the unit of the partition, in factors of about the square root of 2."""
    unit = Partition(world).unit_numel
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
    """The way and the chunk size with the shortest step. The first rank's shards are the largest, so all ranks choose the same.

    place(way, numel) raises BudgetError if the model does not fit. compressions: tried in turn, the next one only if nothing fits. If
    nothing fits at all, the most useful BudgetError is raised.
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
                break  # without late moments the same holds, because late moments need more memory
        if plans:
            _, is_whole, numel = min(plans)
            return Way(compresses, not is_whole), numel
    raise _least(refusals)


def best_numel(place: Callable[[int], tuple[Layout, Placement]], candidates: Sequence[int], nvme_nbytes: int | None) -> int:
    """The size with the shortest step that fits NVMe, or, if none fits, the size that lacks the least. candidates: ascending."""
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
            break  # smaller chunks only take more thread time, and cost most of the time of this search
    if not seconds:
        raise _least(refusals)
    return min(seconds, key=lambda numel: (lacking[numel], seconds[numel]))


def step_seconds(layout: Layout, placement: Placement) -> float:
    """Predicted seconds of a step of one rank, as far as the chunk size matters: see [Note: what a chunk's size costs]."""
    weights, states, _ = (placement.sizes[kind] for kind in KINDS)
    moving = [i for i, home in enumerate(placement.homes[STATES]) if not home.is_device and i not in placement.visitors]

    def on_nvme(kind: str) -> int:
        return sum(placement.sizes[kind][index] for index in moving if placement.homes[kind][index].is_storage)

    record = max(w + s for w, s in zip(weights, states))
    moved = 3 * on_nvme(WEIGHTS) + 2 * on_nvme(STATES)
    if late := placement.num_late:
        away = [i for i in moving if placement.homes[STATES][i].is_storage]
        moments = sum(states[i] - weights[i] for i in away)  # all segments except the residual
        in_slots = placement.in_slots[STATES] if not placement.pool_nbytes else states
        gradients = sum(in_slots[i] - states[i] for i in away)  # bytes written, and read if the gradients are not in memory
        moved -= (moments * late - 2 * gradients) / (late + 1)
    drive = moved / NVME_RATE
    if slots := placement.slots[STATES]:
        drive *= 1 + 1 / slots  # with fewer records in flight, the drive waits more often
    host = 2 * sum(weights[index] + states[index] for index in moving) / HOST_RATE
    largest = max(chunk.nbytes for chunk in layout.chunks)
    link = 2 * sum(span.nbytes for span in layout.spans) / LINK_RATE
    overlapped = max(drive, host, link)
    if not placement.pinned and placement.device_nbytes - placement.least_nbytes < 2 * largest:
        overlapped += link  # no room to copy ahead
    last = 2 * record / HOST_RATE + 2 * largest / LINK_RATE  # the update that nothing hides, and the preceding gradient
    return overlapped + last + len(layout.chunks) * CHUNK_SECONDS


def _fits_late(placement: Placement, nvme_nbytes: int | None) -> bool:
    """Whether a placement that was made for late moments has late moments, and NVMe has room for it; or no states are on NVMe."""
    has_room = nvme_nbytes is None or (placement.nvme_nbytes <= nvme_nbytes and not placement.num_crowded_out)
    return (placement.num_late > 0 and has_room) or not in_storage(placement.homes[STATES])


def _least(refusals: list[BudgetError]) -> BudgetError:
    """The refusal to raise. Of the refusals that lack only host memory, the one that needs the least, which is enough. Otherwise the last
    refusal, which needs about the least device memory.
    """
    return min((error for error in refusals if error.least_host_nbytes), key=lambda error: error.least_host_nbytes, default=refusals[-1])
