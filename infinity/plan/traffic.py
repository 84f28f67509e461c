"""Counts the bytes that one step moves over each link, before the first step.

Knows a layout, records and their placement. Must not know ops, clocks, threads or files.
"""

# [Note: how the bytes of a step are counted]
# No op has run yet. The count simulates a step: forward uses each span once, in registration order, and backward uses each span once, in
# the opposite order. Neighbouring spans of a large model count as one. `schedule.plan`, which orders real steps, tells how often each span
# of this trace is copied and gathered. A model that runs a layer several times, skips a layer, or shares weights moves other numbers of
# bytes. `Engine.stats()` has the bytes that were moved. `infinity plan` runs the model's own ops, and simulates slots of host memory as
# well.

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.plan import schedule
from infinity.plan.compression import moved_nbytes
from infinity.plan.packing import Layout
from infinity.plan.placement import Placement, keeps_frozen, share_device
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.schedule import Use
from infinity.plan.tiers import in_storage

MOST_GROUPS = 128  # groups of spans in the simulated trace
LINKS = ("nvme_read", "h2d", "all_gather", "reduce_scatter", "d2h", "nvme_write")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Properties of a step that change the bytes. num_passes: backward passes a step. device_nbytes: expected device budget, in bytes.
    deferred: updates follow step(). keep: copies stay while there is room. may_visit: records may come to the device. compresses: floats on
    NVMe are coded. by_layer: the micro-batches of a step pass each layer together, and count as one pass. Sums leave the device once.
    """

    num_passes: int
    device_nbytes: int
    deferred: bool
    keep: bool
    may_visit: bool
    compresses: bool
    by_layer: bool = False


def step_nbytes(layout: Layout, records: Sequence[Record], placement: Placement, step: Step) -> dict[str, int]:
    """Bytes that a rank moves in one step, by link; see [Note: how the bytes of a step are counted]."""
    visiting, staying = _guests(layout, records, placement, step)
    copies, gathers = _fetches(layout, placement, step, visiting, staying)
    stay = {index for span in staying for index in layout.spans[span].chunks}
    num_kept = _num_kept(layout, placement, step, visiting)
    found = dict.fromkeys(LINKS, 0)
    for chunk, record in zip(layout.chunks, records):
        whole, shard = (numel * chunk.format.itemsize for numel in (chunk.numel, record.numel))  # of weights, and of gradients
        homes = {kind: placement.homes[kind][chunk.index] for kind in KINDS}
        if layout.partition.is_shared:
            found["all_gather"] += gathers[chunk.span] * whole
            found["reduce_scatter"] += step.num_passes * whole if chunk.trainable else 0
        if chunk.span in visiting or homes[STATES].is_device or (placement.pinned and not chunk.trainable):
            continue  # the record needs no other tier
        found["h2d"] += copies[chunk.span] * (record.weight_nbytes if chunk.format.is_coded else shard)
        if chunk.trainable:
            leaves_once = step.by_layer or chunk.index in stay
            found["d2h"] += record.numel * chunk.format.gradient_itemsize if leaves_once else step.num_passes * shard
        for kind, num_reads in ((WEIGHTS, copies[chunk.span]), (STATES, 1), (GRADIENTS, step.num_passes)):
            if not homes[kind].is_storage or (kind == GRADIENTS and (not _spills(step) or chunk.index in stay)):
                continue
            if kind == WEIGHTS and chunk.trainable:
                num_reads = max(num_reads, 1)  # the update needs the weights
            num_writes = num_reads if kind == GRADIENTS else int(chunk.trainable)
            if num_kept[kind]:
                num_kept[kind] -= 1
                num_reads, num_writes = 0, 0 if kind == GRADIENTS else num_writes
            read, written = nvme_nbytes(placement, record, kind, chunk.index, compresses=step.compresses)
            found["nvme_read"] += num_reads * read
            found["nvme_write"] += num_writes * written
    return found


def _spills(step: Step) -> bool:
    """Whether gradients wait for a later pass or for step(), and may therefore go to NVMe meanwhile."""
    return step.deferred or step.num_passes > 1


def _num_kept(layout: Layout, placement: Placement, step: Step, visiting: Mapping[int, int]) -> dict[str, int]:
    """By kind, the number of chunks without a place in host memory whose copy is still in a slot at the next use."""
    found, reads_at_once = {}, step.deferred and not in_storage(placement.homes[WEIGHTS])  # all updates begin in step(), see `moment`
    for kind in KINDS:
        num = sum(home.is_storage and chunk.span not in visiting for home, chunk in zip(placement.homes[kind], layout.chunks))
        slots = placement.slots[kind]
        if slots < num:  # two slots are always used for the next chunks; weights, used twice or more, pass through all slots
            slots = 0 if kind == WEIGHTS or (kind == STATES and reads_at_once) else max(0, slots - 2)
        found[kind] = min(slots, num)
    return found if step.keep else dict.fromkeys(KINDS, 0)


def nvme_nbytes(placement: Placement, record: Record, kind: str, index: int, *, compresses: bool) -> tuple[int, int]:
    """Bytes that one read and one write of a chunk's copy of this kind move between host memory and NVMe. The mean is over late and full
    updates.
    """
    nbytes = placement.sizes[kind][index]
    if kind == GRADIENTS or not (compresses or placement.pool_nbytes):
        return nbytes, nbytes
    late = placement.in_slots[kind][index] > nbytes
    return _moved_nbytes(record, kind, late, placement.num_late, compresses, placement.pool_nbytes > 0)


@functools.lru_cache(4096)  # a model has few different records
def _moved_nbytes(record: Record, kind: str, late: bool, num_late: int, codes: bool, pools: bool) -> tuple[int, int]:
    return moved_nbytes(record.of(kind, late=late), num_late, codes=codes, pools=pools)


def _guests(
    layout: Layout, records: Sequence[Record], placement: Placement, step: Step
) -> tuple[dict[int, int], dict[int, int]]:
    """Two dicts from a span to its device bytes, weights excluded. First: spans with records on the device, and frozen spans that stay.
    Second: spans with waiting gradients there."""
    room_nbytes = step.device_nbytes - placement.gradient_limit_nbytes
    if not step.may_visit:
        return {}, {}
    is_early = schedule.updates_visitors_early(deferred=step.deferred, is_shared=layout.partition.is_shared)
    found = share_device(
        layout,
        records,
        placement.homes[STATES],
        room_nbytes=room_nbytes,
        window_nbytes=placement.window_nbytes,
        may_stay=range(len(records)) if step.num_passes > 1 else placement.may_stay,
        waiting=() if is_early and step.num_passes == 1 else None,
    )
    visiting, staying = map(dict, found)
    if keeps_frozen(layout, found, room_nbytes=room_nbytes):
        visiting |= {span.index: 0 for span in layout.spans if not span.trainable}
    return visiting, staying


def _fetches(
    layout: Layout, placement: Placement, step: Step, visiting: Mapping[int, int], staying: Mapping[int, int]
) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """How often each span is copied to the device in a step, and how often gathered. The second pass of a step and all later ones are
    equal."""
    nbytes = {span.index: 0 if placement.pinned else span.nbytes for span in layout.spans}
    taken = placement.fixed_nbytes + sum(visiting.values()) + sum(staying.values()) + sum(nbytes[span] for span in visiting)
    nbytes |= dict.fromkeys(visiting, 0)
    groups = _groups(list(nbytes))
    planned = functools.partial(_planned, [sum(map(nbytes.get, group)) for group in groups], step.device_nbytes - taken, step.keep)
    found, more = planned(1), step.num_passes - 1
    if more:
        found = [[one + more * (two - one) for one, two in zip(*counts)] for counts in zip(found, planned(2))]
    return tuple({span: num for group, num in zip(groups, counts) for span in group} for counts in found)


def _groups(spans: Sequence[int]) -> list[Sequence[int]]:
    """Groups of neighbouring spans, so that the count takes milliseconds for any model size."""
    size = math.ceil(len(spans) / MOST_GROUPS)
    return [spans[start : start + size] for start in range(0, len(spans), size)]


def _planned(nbytes: Sequence[int], budget: int, keep: bool, num_passes: int) -> tuple[list[int], list[int]]:
    """How often each group is copied and gathered in a step of num_passes passes. nbytes: of each group."""
    forward = [Use(("forward", group), (group,)) for group in range(len(nbytes))]
    backward = [Use(("backward", group), (group,)) for group in reversed(range(len(nbytes)))]
    copies, gathers = [0] * len(nbytes), [0] * len(nbytes)
    for action in schedule.plan((forward + backward) * num_passes, nbytes=dict(enumerate(nbytes)), budget=budget, keep=keep):
        if isinstance(action, schedule.Copy):
            copies[action.span] += 1
        elif isinstance(action, schedule.Gather):
            gathers[action.span] += 1
    return copies, gathers
