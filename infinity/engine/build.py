"""Construction of an engine's parts, such as tiers, lanes and slots, from a model, a configuration and the memory of the machine.

Knows the constructor of every part. Must not know the later work of the parts, except that memory for saved activations may come later. Writes
nothing before all budgets, directories and their free space are known to be sufficient. sizing.py computes all sizes.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from infinity.config import Config
from infinity.engine.sizing import Named, Training, arrange, budgets, expected_device_nbytes, largest_device_nbytes, may_compress, written_in_forward
from infinity.errors import SwapError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.plan import compression
from infinity.plan import placement as planner
from infinity.plan.late_moments import most_late
from infinity.plan.memory_needs import Budgets
from infinity.plan.packing import Layout
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.slots import HostCache
from infinity.plan.tiers import Tier, leaves_device, tier_of, with_capacities
from infinity.system import capacity
from infinity.system.arena import PAGE_NBYTES, Arena, Slots
from infinity.system.events import Events
from infinity.system.failure import FirstFailure
from infinity.system.freed_memory import Freed, keep_freed_memory
from infinity.system.interrupts import uninterrupted
from infinity.system.lanes import Lane
from infinity.system.mapped import ReadAhead
from infinity.system.progress import Progress, ignore
from infinity.system.ranks import Ranks
from infinity.system.storage import Extent, StorageTier, make_storage, room_nbytes
from infinity.system.streams import has_streams, kind_of, new_stream
from infinity.system.swap_owner import reclaim
from infinity.system.threads import monitor
from infinity.tiers.activations import Activations
from infinity.tiers.chunk_state import ChunkState, Registry, Resident
from infinity.tiers.compressed_extents import OverflowArea
from infinity.tiers.compression import Compressor
from infinity.tiers.extents_on_demand import ExtentsOnDemand
from infinity.tiers.gradient_reduction import ReduceScatter
from infinity.tiers.gradients import Gradients
from infinity.tiers.late_moments import redo_logs
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.record_mover import RecordMover
from infinity.tiers.route_position import Course
from infinity.tiers.span_state import DeviceTier, SpanState
from infinity.tiers.updates import Updater
from infinity.tiers.values import Values
from infinity.tiers.weights import Weights

REGION_NBYTES = 4 << 30  # a region for records that stay in host memory: one region is pinned while the next one is touched


@dataclass
class Assembly:
    """The parts of one engine. swap: None without data on NVMe. compressor: None without records on NVMe. activations: None if they stay on
    the device. host_nbytes: the budget of host memory. ahead: reads mapped files with the parameters' initial values. tiers: the
    fastest first, with the capacity for this rank."""

    layout: Layout
    placement: planner.Placement
    swap: StorageTier | None
    compressor: Compressor | None
    arena: Arena
    registry: Registry
    tier: DeviceTier
    course: Course
    records: RecordMover
    gradients: Gradients
    updater: Updater
    values: Values
    weights: Weights
    activations: Activations | None
    host_nbytes: int
    freed: Freed
    ahead: ReadAhead | None = None
    tiers: tuple[Tier, ...] = ()

    def lanes(self) -> list[Lane]:
        """The lanes that may wait for other ranks, or for a device."""
        lanes = [self.weights.lanes.cg, self.weights.lanes.gg, self.gradients.gc, self.updater.lane]
        return lanes + ([self.activations.copies, self.activations.store.writer] if self.activations is not None else [])

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still works after the end of the engine."""
        return any(lane.is_stuck for lane in self.lanes())

    def give_up(self, error: BaseException) -> None:
        """A rank has failed: all threads of this rank stop waiting for work that needs all ranks."""
        for lane in self.lanes():
            lane.abandon(error)
        self.records.failure.note(error)

    def close(self, *, keeps_memory: Callable[[], bool]) -> None:
        """End the threads, and free memory and swap files. keeps_memory: whether an abandoned collective may still write to memory."""
        with contextlib.ExitStack() as parts:  # calls the last one first, and goes on after an error
            parts.callback(self._free_memory, keeps_memory)
            if self.swap is not None:
                parts.callback(self.swap.close)
            for part in (self.compressor, self.records, self.updater, self.gradients, self.weights, self.activations):
                if part is not None:
                    parts.callback(part.close)

    def _free_memory(self, keeps_memory: Callable[[], bool]) -> None:
        if not self.is_stuck and not keeps_memory():  # an abandoned copy may still write there
            self.registry.free_device()
            self.arena.close()

    @uninterrupted
    def keep_activations(self, tier: Tier | None = None) -> Activations:
        """Reserve host memory for saved activations. tier: the configured tier; None: activations leave on demand, and never for NVMe."""
        left, swap = max(0, self.host_nbytes - self.arena.nbytes), self.swap if tier else None
        how = {"to_nvme": tier is not None and tier.is_storage, "on_demand": tier is None}
        how |= {"who": self.records.who, "failure": self.records.failure}
        self.activations = Activations(self.arena, swap, self.weights.device, left, **how)
        return self.activations


def assemble(
    model: nn.Module,
    named: Named,
    config: Config,
    device: torch.device,
    ranks: Ranks,
    events: Events,
    training: Training,
) -> Assembly:
    """Build all parts. named: the parameters to manage, in registration order.

    Meanwhile, threads read parameter values from mapped files into the page cache. Raises BudgetError, ConfigError or SwapError if the
    model does not fit.
    """
    device_budget, host_budget = budgets(config, device, ranks, [param for _, param in named])
    found = Budgets(
        device_nbytes=device_budget,
        expected_nbytes=expected_device_nbytes(config, kind_of(device), device_budget, accumulating=training.accumulating),
        largest_nbytes=largest_device_nbytes(config, kind_of(device), device_budget),
        host_nbytes=host_budget,
    )
    with contextlib.ExitStack() as undo:  # if a later part fails, the earlier parts are closed
        ahead = _read_ahead(named, capacity.host_free_nbytes() // ranks.num_local - host_budget)
        undo.callback(ahead.close)
        reclaim(config.swap_dirs)
        compresses = may_compress(config, kind_of(device), sum(param.numel() for _, param in named) * ranks.num_local // ranks.world)
        nvme_budget, compresses = ranks.least([room_nbytes(config.swap_dirs) // ranks.num_local, compresses])
        layout_, records, placement = arrange(
            model,
            named,
            config,
            replace(found, nvme_nbytes=nvme_budget),
            training,
            (ranks.rank, ranks.world),
            compresses=bool(compresses),
            most=lambda number: ranks.most([number])[0],
        )
        placement = _agreed(placement, ranks)
        num_cores = max(1, capacity.num_cores() // ranks.num_local)
        swap, placement, extents, area = _make_swap(config, ranks, placement, num_cores, nvme_budget)
        if swap is not None:
            undo.callback(swap.close)
        parts = (layout_, records, placement, host_budget, swap, extents, area, num_cores)
        capacities = with_capacities((placement.device_nbytes, host_budget, nvme_budget))
        made = _connect(_Inputs(named, config, device, ranks, events, training, *parts), written_in_forward(model.modules(), named), undo)
        made = replace(made, ahead=ahead, tiers=capacities)
        undo.pop_all()
    return made


def _agreed(placement: planner.Placement, ranks: Ranks) -> planner.Placement:
    """The placement of this rank, with the same answers on all ranks where they must divide the device alike, although shards differ."""
    pairs = enumerate(zip(placement.homes[GRADIENTS], placement.homes[STATES]))
    must_wait = {index for index, (gradient, states) in pairs if gradient.is_device and not states.is_device}
    chunks = [(index in placement.may_stay, index in must_wait) for index in range(len(placement.homes[STATES]))]
    window, *found = ranks.most([placement.window_nbytes or 0, *(int(each) for both in chunks for each in both)])
    may_stay, must_wait = (frozenset(index for index, each in enumerate(found[start::2]) if each) for start in (0, 1))
    return replace(placement, window_nbytes=int(window) or None, may_stay=may_stay, must_wait=must_wait)


def _read_ahead(named: Named, free_nbytes: int) -> ReadAhead:
    """Let the kernel read mapped files of parameters into the page cache, while the engine's parts are built. free_nbytes: host memory beside
    the engine's budget. The read-ahead may fill half of this memory."""
    with torch._C.DisableTorchFunctionSubclass():
        memory = [(param.data_ptr(), param.numel() * param.element_size()) for _, param in named]
    ahead = ReadAhead(memory, free_nbytes // 2)
    ahead.reach(0)
    return ahead


@dataclass(frozen=True)
class _Inputs:
    """The decisions before the first part is built. extents: on NVMe, by kind and chunk. area: for codes that exceed their extents; None if
    floats are not coded."""

    named: Named
    config: Config
    device: torch.device
    ranks: Ranks
    events: Events
    training: Training
    layout: Layout
    records: list[Record]
    placement: planner.Placement
    host_budget: int
    swap: StorageTier | None
    extents: dict[str, list[Extent | None]]
    area: OverflowArea | None
    num_cores: int

    @property
    def has_streams(self) -> bool:
        return has_streams(self.device)


def update_threads(num_cores: int, *, has_device: bool) -> int:
    """Threads of an update in host memory. has_device: some cores are left to threads that launch kernels."""
    return num_cores - (num_cores // 8 if has_device else 0)


def _connect(given: _Inputs, written: set[int], undo: contextlib.ExitStack) -> Assembly:
    """Build the parts. written: indices of parameters that forward passes write."""
    config, device, events, placement, course = given.config, given.device, given.events, given.placement, Course()
    if not given.has_streams:
        keep_freed_memory()
    registry = _registry(given, written)
    tier, freed = _device_tier(placement, given.has_streams, counts_waiting=not given.ranks.are_several)
    for span in registry.spans:
        span.pinned = placement.pinned or registry.chunks[span.span.chunks[0]].states_home.is_device
        if span.pinned:
            tier.book(span.nbytes)
            tier.allocate(span)

    progress = Progress(f"{given.ranks.label}reserves host memory", placement.host_nbytes)
    arena = Arena(pin=device.type == "cuda", on_region=progress.add if given.ranks.is_first and config.verbose else ignore)
    undo.callback(arena.close)
    compressor_ = _compressor(given, registry.chunks, arena, undo)
    caches: dict[str, HostCache] = {}
    failure = FirstFailure(given.ranks.report)
    keep = config.residency == "auto"
    records_ = RecordMover(compressor_ or given.swap, caches, monitor(), events, failure, keep=keep, who=given.ranks.label)
    undo.callback(records_.close)
    staging = _fill_caches(given, caches, registry.chunks, arena, course)

    gather_lane, gather_stream = Lane("gg", failure, "the exchange between ranks"), new_stream(device)
    undo.callback(gather_lane.close)
    gradients = Gradients(
        registry,
        records_,
        ReduceScatter(given.ranks, tier, gather_lane, gather_stream, device, events),
        staging=staging,
        accumulate=given.training.accumulating,
        spill=placement.slots[GRADIENTS] > 0 and (given.training.deferred or (given.training.accumulating and not placement.only_by_layer)),
        limit_nbytes=placement.under_way_nbytes,
    )
    undo.callback(gradients.close)
    threads = update_threads(given.num_cores, has_device=given.has_streams)
    seed = config.seed if given.layout.rounds else None
    deferred = given.training.deferred
    updater = Updater(records_, gradients, course, events, deferred=deferred, moments_follow=given.has_streams, threads=threads, seed=seed)
    undo.callback(updater.close)
    values = Values(registry, records_, updater, tier, given.ranks)
    weights = Weights(values, course, gather_lane, gather_stream, device, events)
    undo.callback(weights.close)
    parts = (given.layout, placement, given.swap, compressor_, arena, registry, tier, course, records_, gradients, updater, values, weights)
    made = Assembly(*parts, activations=None, host_nbytes=given.host_budget, freed=freed)
    if leaves_device(config.activation_tier):
        made.keep_activations(tier_of(config.activation_tier))
    return made


def _registry(given: _Inputs, written: set[int]) -> Registry:
    """The states of all parameters, spans and chunks. Placeholders of one dtype share a bank of NaNs."""
    layout_, homes, device = given.layout, given.placement.homes, given.device
    names = {spec.format.compute for spec in layout_.specs}
    banks = {name: torch.full((len(given.named),), float("nan"), device=device).to(TORCH_DTYPES[name]) for name in names}
    pairs = zip(given.named, layout_.specs)
    params = [ParameterState(i, name, param, banks[s.format.compute], trainable=s.trainable) for i, ((name, param), s) in enumerate(pairs)]
    for index in written:
        params[index].written_in_forward = True
    spans = [SpanState(s, [params[i] for i in s.params], device) for s in layout_.spans]
    pairs = zip(layout_.chunks, given.records)
    chunks = [ChunkState(chunk, record, given.ranks.rank, spans[chunk.span]) for chunk, record in pairs]
    for index, chunk in enumerate(chunks):
        must_wait, has_host_place = index in given.placement.must_wait, index not in given.placement.may_stay
        chunk.set_homes({kind: homes[kind][index] for kind in KINDS}, must_wait=must_wait, has_host_place=has_host_place)
    return Registry(layout_, params, spans, chunks)


def _compressor(given: _Inputs, chunks: list[ChunkState], arena: Arena, undo: contextlib.ExitStack) -> Compressor | None:
    """Give each chunk its extents and its log of late updates. Returns the compressor that reads and writes the extents, if there are any."""
    placement, extents = given.placement, given.extents
    buffers_nbytes, pool_nbytes, num_late = placement.compression_nbytes, placement.pool_nbytes, placement.num_late
    if given.area is None:  # the plan may have buffers, and a pool for compressed gradients: use both as a pool for whole gradients
        late = [given.records[index] for index in planner.late_chunks(placement) if num_late]
        buffers_nbytes, pool_nbytes = 0, pool_nbytes + buffers_nbytes
        num_late = most_late([compression.pooled_nbytes(record, codes=False) for record in late], pool_nbytes)
    made = None
    if any(map(any, extents.values())):  # also without codes and late moments: the compressor leaves out writes of zeros
        made = Compressor(given.swap, arena, buffers_nbytes, pool_nbytes if given.area is not None or num_late else 0, given.area)
        undo.callback(made.close)
    rooms = zip(placement.in_slots[STATES], placement.sizes[STATES], extents[STATES])
    late_nbytes = [in_slot - nbytes if num_late and extent is not None else 0 for in_slot, nbytes, extent in rooms]
    for index, (chunk, redo) in enumerate(zip(chunks, redo_logs(late_nbytes, num_late))):
        chunk.redo = redo
        chunk.extents = {kind: extents[kind][index] for kind in KINDS}
        for kind, extent in chunk.extents.items():
            if made is not None and extent is not None:
                log = redo if kind == STATES else None
                chunk.extents[kind] = made.compressed(extent, chunk.record.of(kind, late=log is not None), log)
    if placement.gradients_pass:
        on_demand = ExtentsOnDemand(functools.partial(_extent_on_demand, given.swap, max(placement.in_slots[GRADIENTS]), made))
        for chunk in chunks:
            if chunk.homes[GRADIENTS].is_storage:
                chunk.extents[GRADIENTS] = on_demand
    return made


def _extent_on_demand(swap: StorageTier, nbytes: int, compressor: Compressor | None) -> Extent:
    """An extent for a gradient that no slot has room for."""
    try:
        extent = swap.extend(nbytes)
    except SwapError as error:
        raise SwapError(error.errno, f"NVMe has no room for a gradient that waits for others: {error.strerror}", error.filename) from error
    return compressor.compressed(extent, ()) if compressor is not None else extent


def _fill_caches(given: _Inputs, caches: dict[str, HostCache], chunks: list[ChunkState], arena: Arena, course: Course) -> torch.Tensor | None:
    """Reserve host memory: slots, and areas of records that stay there. Returns a staging buffer for gradients on CUDA: uint8, pinned."""
    placement = given.placement
    next_uses = (course.next_weights_use, course.next_states_use, course.next_gradient_use)
    with arena.together():
        for kind, next_use in zip(KINDS, next_uses):
            sizes, count = placement.sizes[kind], placement.slots[kind]
            slots = Slots(arena, kind, max(placement.in_slots[kind]), count) if count else None
            caches[kind] = HostCache(kind, slots, next_use, has_extent=functools.partial(_has_extent, kind))
            resident = {index: nbytes for index, nbytes in enumerate(sizes) if placement.homes[kind][index].is_host}
            for index, area in _areas(arena, resident).items():
                caches[kind].add_resident(chunks[index], area)
        if not given.has_streams:
            return None
        largest = max(chunk.record.numel * chunk.chunk.format.itemsize for chunk in chunks)
        return arena.region(max(largest, 1)).tensor(torch.uint8, 0, largest)


def _has_extent(kind: str, chunk: ChunkState) -> bool:
    return chunk.extents[kind] is not None


def _make_swap(
    config: Config, ranks: Ranks, placement: planner.Placement, num_cores: int, room_nbytes: int
) -> tuple[StorageTier | None, planner.Placement, dict[str, list[Extent | None]], OverflowArea | None]:
    """Returns the storage at its full size, the placement as it is stored, the extents by kind and chunk (None without bytes there), and the
    area for codes that exceed their extents (None if floats are not coded). room_nbytes: of a rank, on the drives."""
    (total,) = ranks.most([placement.nvme_nbytes])
    if not total and not leaves_device(config.activation_tier) and not placement.gradients_pass:
        return None, placement, {kind: [None] * len(homes) for kind, homes in placement.homes.items()}, None
    if config.creates_swap_dir:
        for path in config.swap_dirs:
            path.mkdir(exist_ok=True)
    local_world = ranks.num_local
    local_rank = int(os.environ.get("LOCAL_RANK", ranks.rank % local_world))
    run = None
    if ranks.are_several:
        token = torch.tensor(list(os.urandom(8)), dtype=torch.int64, device="cpu")
        run = bytes(ranks.broadcast_(token).tolist()).hex()
    # The engine reserves space for activations later, when their size is known.
    expected_nbytes = total * local_world
    sharing = {"rank": local_rank, "world": local_world, "run": run}
    swap = make_storage(config.swap_dirs, **sharing, expected_nbytes=expected_nbytes, checksums=config.checksums)
    try:
        rate = swap.nbytes_per_s / local_world
        codes, whole = placement.compression_nbytes > 0, placement.uncoded()
        if codes and not compression.pays(config.compression, rate, num_cores) and whole.nvme_nbytes <= room_nbytes:
            codes, placement = False, whole  # code that the processors have no time for is of use only if whole records do not fit
        extents: dict[str, list] = {kind: [None] * len(homes) for kind, homes in placement.homes.items()}
        for index in range(len(placement.homes[WEIGHTS])):  # all kinds of a chunk lie together, because they are read together
            for kind in KINDS:
                nbytes = placement.on_nvme[kind][index]
                if placement.homes[kind][index].is_storage and nbytes:
                    extents[kind][index] = swap.allocate(nbytes)
        first = swap.allocate(placement.overflow_nbytes) if placement.overflow_nbytes else None
        swap.reserve()
    except BaseException:
        swap.close()
        raise
    return swap, placement, extents, OverflowArea(swap, first) if codes else None


def _device_tier(placement: planner.Placement, cuda: bool, *, counts_waiting: bool) -> tuple[DeviceTier, Freed]:
    """The device tier, and the watch over freed memory. On the CPU, spans lie in host memory."""
    span_nbytes = 0 if cuda else placement.device_nbytes
    held = lambda: (0, 0) if cuda else (tier.held_nbytes, tier.peak_nbytes)
    freed = Freed(placement.host_nbytes + span_nbytes, span_nbytes, held)
    tier = DeviceTier(placement.device_nbytes - placement.fixed_nbytes, None if cuda else freed.note_allocated, counts_waiting=counts_waiting)
    return tier, freed


def _areas(arena: Arena, nbytes: dict[int, int]) -> dict[int, Resident]:
    """Fixed places for these sizes, page-aligned, in regions of about REGION_NBYTES."""
    areas, offsets, total = {}, {}, 0
    for index, size in nbytes.items():
        offsets[index] = total
        total += -(-size // PAGE_NBYTES) * PAGE_NBYTES
        if total >= REGION_NBYTES or len(areas) + len(offsets) == len(nbytes):
            region = arena.region(max(total, 1))
            areas |= {each: Resident(region, offset, nbytes[each]) for each, offset in offsets.items()}
            offsets, total = {}, 0
    return areas
