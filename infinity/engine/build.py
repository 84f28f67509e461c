"""Building an engine's parts: from a model, a configuration and the machine's memory to tiers, lanes and slots.

Knows every part's constructor and nothing of what happens afterwards. Nothing is written before all budgets, directories
and the space on them have been found sufficient. Over 400 lines because what fits where depends on every part.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from infinity.config import Config
from infinity.errors import BudgetError
from infinity.model.leaves import inside_leaves, is_leaf
from infinity.plan import compression
from infinity.plan import placement as planner
from infinity.plan.packing import Layout, ParameterSpec, default_chunk_numel, layout
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record, record_layout
from infinity.plan.redo import most_late
from infinity.plan.slots import HostCache
from infinity.system.arena import PAGE_NBYTES, Arena, Slots
from infinity.system.capacity import gauge_of, host_free_nbytes
from infinity.system.events import Events
from infinity.system.failure import FirstFailure
from infinity.system.freed_memory import keep_freed_memory
from infinity.system.lanes import Lane, Monitor
from infinity.system.ranks import Ranks
from infinity.system.swap import MEASURE_FROM_NBYTES, Swap
from infinity.system.swap_directory import reclaim, room_nbytes
from infinity.tiers.activations import Activations
from infinity.tiers.compression import Compressor
from infinity.tiers.course import Course
from infinity.tiers.gradients import Gradients
from infinity.tiers.records import Records
from infinity.tiers.redo import redo_logs
from infinity.tiers.state import TORCH_DTYPES, ChunkState, DeviceTier, ParameterState, Registry, Resident, SpanState
from infinity.tiers.updates import Updater
from infinity.tiers.values import Values
from infinity.tiers.weights import Weights

ACTIVATION_SHARE = 1 / 4  # of host memory, where they live there
FAR_FROM_BEST = 1.25  # of the shortest step found, where the search for a chunk size ends
HOST_SHARES = {"cuda": 0.8, "cpu": 0.5}  # of what is free, for host_memory="auto"
DEVICE_SHARES = {"cuda": 0.5, "cpu": 0.25}  # likewise for device_memory="auto", as long as activations are not known
MOST_OF_FREE = 0.95  # of what is free while parameters still have their memory

Named = list[tuple[str, nn.Parameter]]


@dataclass
class Assembly:
    """The parts of one engine. swap is None where nothing lives on NVMe, compressor where all its bytes are moved each time, activations
    where they stay on the device."""

    layout: Layout
    placement: planner.Placement
    swap: Swap | None
    compressor: Compressor | None
    arena: Arena
    registry: Registry
    tier: DeviceTier
    course: Course
    records: Records
    gradients: Gradients
    updater: Updater
    values: Values
    weights: Weights
    activations: Activations | None


def assemble(
    model: nn.Module,
    named: Named,
    config: Config,
    device: torch.device,
    ranks: Ranks,
    events: Events,
    *,
    moments: tuple[str, ...],
    can_advance: bool,
    deferred: bool,
    accumulating: bool,
) -> Assembly:
    """named: the parameters to manage, in registration order. moments, can_advance: of the optimizer's rule. deferred, accumulating:
    what their gradients' memory must do.

    Raises BudgetError, ConfigError or SwapError where something does not fit.
    """
    device_budget, host_budget = budgets(config, device, ranks, [param for _, param in named])
    reclaim(config.nvme)
    compresses = may_compress(config, device.type, sum(param.numel() for _, param in named) * ranks.num_local // ranks.world)
    nvme_budget, compresses = ranks.min_(torch.tensor([room_nbytes(config.nvme) // ranks.num_local, int(compresses)])).tolist()
    layout_, records, placement = arrange(
        model,
        named,
        config,
        world=ranks.world,
        rank=ranks.rank,
        device_budget=device_budget,
        host_budget=host_budget,
        nvme_budget=nvme_budget,
        moments=moments,
        can_advance=can_advance,
        deferred=deferred,
        accumulating=accumulating,
        compresses=bool(compresses),
        most=lambda number: int(ranks.max_(torch.tensor([number])).item()),
    )
    num_cores = max(1, len(os.sched_getaffinity(0)) // ranks.num_local)
    swap, extents, compresses = _make_swap(config, ranks, placement, num_cores)
    with contextlib.ExitStack() as undo:  # what is made is closed again if something after it cannot be made
        if swap is not None:
            undo.callback(swap.close)
        made = _connect(
            named,
            _written_in_forward(model, named),
            config,
            device,
            ranks,
            events,
            accumulating,
            deferred,
            layout_,
            records,
            placement,
            int(host_budget * ACTIVATION_SHARE) // PAGE_NBYTES * PAGE_NBYTES,  # a region has whole pages
            swap,
            extents,
            compresses,
            num_cores,
            undo,
        )
        undo.pop_all()
    return made


def arrange(
    model: nn.Module,
    named: Named,
    config: Config,
    *,
    world: int,
    rank: int,
    device_budget: int,
    host_budget: int,
    nvme_budget: int | None,
    moments: tuple[str, ...],
    deferred: bool,
    accumulating: bool,
    can_advance: bool = False,
    compresses: bool = False,
    most: Callable[[int], int] = lambda number: number,
) -> tuple[Layout, list[Record], planner.Placement]:
    """Where everything of a model goes, which may be on the meta device: its layout, the records of a rank, their placement.

    Arguments as of `assemble`; budgets in bytes, of a rank, that of NVMe None where it is not known. compresses:
    have buffers for what is compressed on NVMe, but for "auto" where nothing else fits beside them. most(number) is the largest of all
    ranks' numbers. Raises BudgetError.
    """
    written = _written_in_forward(model, named)
    specs = [ParameterSpec(name, p.numel(), config.dtype, p.requires_grad) for name, p in named]
    itemsize = TORCH_DTYPES[config.dtype].itemsize

    def at(chunk_numel: int, rank: int, least_crowded_out: int = 0) -> tuple[Layout, list[Record], planner.Placement]:
        layout_ = layout(specs, chunk_numel=chunk_numel, world=world)
        records = [record_layout(c.shard_used(rank), config.dtype, c.trainable, moments, config.moments) for c in layout_.chunks]
        placement = planner.place(
            layout_,
            records,
            weights=config.weights,
            states=config.states,
            keep=config.residency == "auto",
            deferred=deferred or accumulating,
            gradient_itemsize=4 if accumulating else None,
            device_budget=device_budget,
            host_budget=host_budget,
            host_share=1 - ACTIVATION_SHARE if config.activations in ("host", "nvme") else 1.0,
            compression_nbytes=compression.buffers_nbytes(records) if compresses else 0,
            late_nbytes=[compression.pooled_nbytes(record, codes=bool(compresses)) for record in records] if late else None,
            late_on_nvme=bool(compresses) and config.moments == "fp32",  # else it saves little or nothing
            late_first=not compresses and config.moments == "fp32",  # else states save as much
            nvme_budget=nvme_budget,
            least_crowded_out=least_crowded_out,
            held_nbytes=_held_nbytes(model, [p for _, p in named], layout_, itemsize),
            op_gradient_nbytes=max((p.numel() * itemsize for _, p in named if p.requires_grad), default=0),
            buffers_nbytes=_buffers_nbytes(model, [p for _, p in named], layout_, itemsize) if world > 1 else 0,
            snapshot_nbytes=sum(
                layout_.spans[span].numel * itemsize
                for span in {layout_.homes[index].span for index in written}
                if config.dtype != "fp32" and layout_.spans[span].trainable
            ),
        )
        return layout_, records, placement

    def chunk_numel() -> int:
        if config.chunk_mib is not None:
            numel = default_chunk_numel(config.chunk_mib, world)
            at(numel, 0)  # needs the most: what it refuses, all ranks must refuse before they agree on anything
            return numel
        return _best_chunk_numel(at, planner.chunk_numels(sum(spec.numel for spec in specs), world=world), nvme_budget)

    may_be_late = can_advance and not accumulating and config.dtype == "bf16" and config.compression != "off"
    refusals: list[BudgetError] = []
    for compresses in (True, False) if compresses and config.compression != "on" else (compresses,):
        plans = []
        for late in (True, False) if may_be_late else (False,):
            try:
                numel = chunk_numel()
            except BudgetError as error:
                refusals.append(error)
                continue
            layout_, _, placement = at(numel, 0)
            if not late or _fits_late(placement, nvme_budget):
                plans.append((planner.step_seconds(layout_, placement), not late, numel))
            if "nvme" not in placement.homes[STATES]:
                break  # nor without late moments, which need more
        if plans:
            break
    else:
        raise _least(refusals)
    _, is_whole, numel = min(plans)
    late = not is_whole
    found, agreed = at(numel, rank), 0
    while (number := most(found[2].num_crowded_out)) > agreed:  # the same spans on all ranks, whose shards differ a little
        agreed = number
        found = at(numel, rank, agreed)
    return found


def _fits_late(placement: planner.Placement, nvme_budget: int | None) -> bool:
    """Whether moments of a placement that was made for it are late, and NVMe has room for it, or has nothing of states to hold."""
    has_room = nvme_budget is None or (placement.nvme_nbytes <= nvme_budget and not placement.num_crowded_out)
    return (placement.num_late > 0 and has_room) or "nvme" not in placement.homes[STATES]


def _best_chunk_numel(arrange, candidates: list[int], nvme_budget: int | None) -> int:
    """The size with the shortest step of those for which NVMe has room, else that which needs least of it. The same on all ranks: by the
    first one's shards, which are the largest."""
    seconds, refusals, lacking = {}, [], {}
    for numel in reversed(candidates):
        try:
            layout_, _, placement = arrange(numel, 0)
        except BudgetError as error:
            refusals.append(error)
            continue
        seconds[numel] = planner.step_seconds(layout_, placement)
        lacking[numel] = max(0, placement.nvme_nbytes - nvme_budget) if nvme_budget is not None else 0
        if not lacking[numel] and seconds[numel] > FAR_FROM_BEST * min(s for numel, s in seconds.items() if not lacking[numel]):
            break  # still smaller chunks only take more of the threads' time, and are most of the time of this search
    if not seconds:
        raise _least(refusals)
    return min(seconds, key=lambda numel: (lacking[numel], seconds[numel]))


def _least(refusals: list[BudgetError]) -> BudgetError:
    """Of the ways that were tried: that which lacks host memory alone and needs the least of it, which is enough; else the last, which needs
    about the least of the device."""
    return min((error for error in refusals if error.least_host_nbytes), key=lambda error: error.least_host_nbytes, default=refusals[-1])


def _connect(
    named: Named,
    written: set[int],
    config: Config,
    device: torch.device,
    ranks: Ranks,
    events: Events,
    accumulating: bool,
    deferred: bool,
    layout_: Layout,
    records: list[Record],
    placement: planner.Placement,
    activation_nbytes: int,
    swap: Swap | None,
    extents: dict[str, list],
    compresses: bool,
    num_cores: int,
    undo: contextlib.ExitStack,
) -> Assembly:
    cuda, keep, course = device.type == "cuda", config.residency == "auto", Course()
    if not cuda:
        keep_freed_memory()
    dtype = TORCH_DTYPES[config.dtype]
    bank = torch.full((len(named),), float("nan"), dtype=dtype, device=device)
    params = [ParameterState(index, name, param, bank) for index, (name, param) in enumerate(named)]
    for index in written:
        params[index].written_in_forward = True
    spans = [SpanState(s, [params[i] for i in s.params], device, s.numel * dtype.itemsize) for s in layout_.spans]
    pairs = zip(layout_.chunks, records)
    chunks = [ChunkState(chunk, record, chunk.shard_pieces(ranks.rank), spans[chunk.span]) for chunk, record in pairs]
    for index, chunk in enumerate(chunks):
        chunk.weights_home = placement.homes[WEIGHTS][index]
        chunk.states_home = placement.homes[STATES if chunk.trainable else WEIGHTS][index]
    registry = Registry(layout_, params, spans, chunks)
    tier = DeviceTier(placement.device_nbytes - placement.fixed_nbytes)
    for span in spans:
        span.pinned = placement.pinned or chunks[span.span.chunks[0]].states_home == "device"
        if span.pinned:
            tier.book(span.nbytes)
            tier.allocate(span)

    arena, lock = Arena(pin=cuda), Monitor()
    undo.callback(arena.close)
    compressor_ = None
    buffers_nbytes, pool_nbytes, num_late = placement.compression_nbytes, placement.pool_nbytes, placement.num_late
    if not compresses:  # buffers may have been planned, and a pool for gradients that are coded
        late = [records[index] for index in planner.late_chunks(placement) if num_late]
        buffers_nbytes, pool_nbytes = 0, pool_nbytes + buffers_nbytes
        num_late = most_late([compression.pooled_nbytes(record, codes=False) for record in late], pool_nbytes)
    if compresses or num_late:
        compressor_ = Compressor(swap, arena, buffers_nbytes, pool_nbytes)
        undo.callback(compressor_.close)
    rooms = zip(placement.in_slots[STATES], placement.sizes[STATES], extents[STATES])
    late_nbytes = [in_slot - nbytes if num_late and extent is not None else 0 for in_slot, nbytes, extent in rooms]
    for index, (chunk, redo) in enumerate(zip(chunks, redo_logs(late_nbytes, num_late))):
        chunk.redo = redo
        chunk.extents = {kind: extents[kind][index] for kind in KINDS}
        for kind, extent in chunk.extents.items():
            if compressor_ is not None and extent is not None:
                log = redo if kind == STATES else None
                chunk.extents[kind] = compressor_.compressed(extent, chunk.record.of(kind, late=log is not None), log)
    caches: dict[str, HostCache] = {}
    who = f"{ranks.name}, " if ranks.world > 1 else ""
    failure = FirstFailure(ranks.report)
    records_ = Records(compressor_ or swap, caches, lock, events, failure, keep=keep, who=who)
    undo.callback(records_.close)
    next_uses = (course.next_weights_use, course.next_states_use, course.next_gradient_use)
    for kind, next_use in zip(KINDS, next_uses):
        sizes, count = placement.sizes[kind], placement.slots[kind]
        caches[kind] = HostCache(kind, Slots(arena, kind, max(placement.in_slots[kind]), count) if count else None, next_use)
        resident = {index: nbytes for index, nbytes in enumerate(sizes) if placement.homes[kind][index] == "host"}
        for index, area in _areas(arena, resident).items():
            caches[kind].add_resident(chunks[index], area)

    staging = None
    if cuda:
        largest = max(chunk.record.numel for chunk in chunks) * dtype.itemsize
        staging = arena.region(max(largest, 1)).tensor(torch.uint8, 0, largest)
    gather_lane, gather_stream = Lane("gg", failure), torch.cuda.Stream(device) if cuda else None
    undo.callback(gather_lane.close)
    gradients = Gradients(
        registry,
        records_,
        ranks,
        tier,
        gather_lane,
        gather_stream,
        device,
        events,
        staging=staging,
        accumulate=accumulating,
        spill=placement.slots[GRADIENTS] > 0 and (deferred or accumulating),
        limit_nbytes=placement.under_way_nbytes,
    )
    undo.callback(gradients.close)
    threads = num_cores - (num_cores // 8 if cuda else 0)  # these are for whoever gives the device its work
    seed = config.seed if config.moments == "bf16" else None
    updater = Updater(records_, gradients, course, ranks.rank, events, deferred=deferred, threads=threads, seed=seed)
    undo.callback(updater.close)
    values = Values(registry, records_, updater, tier, ranks)
    weights = Weights(values, course, gather_lane, gather_stream, device, events)
    undo.callback(weights.close)
    activations = None
    if config.activations in ("host", "nvme"):
        to_nvme = config.activations == "nvme"
        activations = Activations(arena, swap, device, activation_nbytes, to_nvme=to_nvme, who=who, failure=failure)
    return Assembly(
        layout_, placement, swap, compressor_, arena, registry, tier, course, records_, gradients, updater, values, weights, activations
    )


def _make_swap(
    config: Config, ranks: Ranks, placement: planner.Placement, num_cores: int
) -> tuple[Swap | None, dict[str, list], bool]:
    """The swap, at its full size, the extents by kind and chunk, None where there are no bytes, and whether records are compressed."""
    total = int(ranks.max_(torch.tensor([placement.nvme_nbytes])).item())
    if not total and config.activations not in ("host", "nvme"):
        return None, {kind: [None] * len(homes) for kind, homes in placement.homes.items()}, False
    if config.creates_nvme:
        for path in config.nvme:
            path.mkdir(exist_ok=True)
    local_world = ranks.num_local
    local_rank = int(os.environ.get("LOCAL_RANK", ranks.rank % local_world))
    run = None
    if ranks.world > 1:
        token = torch.tensor(list(os.urandom(8)), dtype=torch.int64)
        run = bytes(ranks.broadcast_(token).tolist()).hex()
    # Activations make their room on NVMe when it is known how large they are.
    expected_nbytes = total * local_world
    swap = Swap(config.nvme, rank=local_rank, world=local_world, run=run, expected_nbytes=expected_nbytes, checksums=config.checksums)
    rate = swap.nbytes_per_s / local_world
    compresses = placement.compression_nbytes > 0 and compression.pays(config.compression, rate, num_cores)
    sizes = placement.on_nvme if compresses else placement.sizes
    extents: dict[str, list] = {kind: [None] * len(homes) for kind, homes in placement.homes.items()}
    for index in range(len(placement.homes[WEIGHTS])):  # what is read together lies together
        for kind in KINDS:
            nbytes = sizes[kind][index]
            if placement.homes[kind][index] == "nvme" and nbytes:
                extents[kind][index] = swap.allocate(nbytes)
    try:
        swap.reserve()
    except BaseException:
        swap.close()
        raise
    return swap, extents, compresses


def _areas(arena: Arena, nbytes: dict[int, int]) -> dict[int, Resident]:
    """Fixed places, page-aligned, of one region."""
    offsets, total = {}, 0
    for index, size in nbytes.items():
        offsets[index] = total
        total += -(-size // PAGE_NBYTES) * PAGE_NBYTES
    region = arena.region(max(total, 1)) if nbytes else None
    return {index: Resident(region, offset, nbytes[index]) for index, offset in offsets.items()}


def budgets(config: Config, device: torch.device, ranks: Ranks, params: Iterable[nn.Parameter] = ()) -> tuple[int, int]:
    """Device and host bytes of this rank: as configured, else a share of what is free, the same on all ranks. params: whose memory will
    be free soon after all else is allocated."""
    free_host, taken = host_free_nbytes() // ranks.num_local, _taken(params)
    on_host, on_device = HOST_SHARES[device.type], DEVICE_SHARES[device.type]
    if device.type == "cuda":
        device_share = _share(on_device, gauge_of(device).free_nbytes(), taken["cuda"])
        host_share = _share(on_host, free_host, taken["cpu"])
    else:  # both are of one memory
        both = _share(on_host + on_device, free_host, taken["cpu"])
        host_share = int(both * on_host / (on_host + on_device))
        device_share = both - host_share
    auto = ranks.min_(torch.tensor([device_share, host_share], dtype=torch.int64)).tolist()
    given = (config.device_memory, config.host_memory)
    return tuple(share if value == "auto" else value for value, share in zip(given, auto))


def may_compress(config: Config, device: str, num_parameters: int) -> bool:
    """Whether records on NVMe may take fewer bytes, whatever the drives are. num_parameters: of a node's ranks. "auto" takes drives that
    are measured, and cores that do not compute."""
    if config.compression == "auto":
        return device == "cuda" and 12 * num_parameters >= MEASURE_FROM_NBYTES * len(config.nvme)
    return config.compression == "on"


def _share(share: float, free: int, taken: int) -> int:
    """Of what will be free; what is free before that bounds it, since memory is taken first."""
    return min(int(share * (free + taken)), int(MOST_OF_FREE * free))


def _taken(params: Iterable[nn.Parameter]) -> collections.Counter:
    """Bytes of memory that holds parameters' values, by kind of device."""
    by_storage, limits = collections.Counter(), {}
    for param in params:
        storage, nbytes = param.untyped_storage(), param.numel() * param.element_size()
        if param.numel() > 1 and storage.nbytes() >= nbytes:  # placeholders have one element
            key = param.device.type, storage._cdata
            by_storage[key] += nbytes
            limits[key] = storage.nbytes()
    taken = collections.Counter()
    for key, nbytes in by_storage.items():
        taken[key[0]] += min(nbytes, limits[key])  # parameters may share it
    return taken


def _held_nbytes(model: nn.Module, params, layout_, itemsize: int) -> int:
    """The most that an op and the ops around it hold: spans of a module's own parameters and of its ancestors'. What lies in lists of
    parameters, and in other modules that cannot be called, is its parent's, which reads one after another."""
    index = {id(param): i for i, param in enumerate(params)}
    nbytes = {span.index: span.numel * itemsize for span in layout_.spans}
    most = 0

    def visit(module: nn.Module, held: frozenset[int]) -> None:
        nonlocal most
        params = module.parameters() if is_leaf(module) else _own(module)
        held = held | {layout_.homes[index[id(p)]].span for p in params if p is not None and id(p) in index}
        most = max(most, sum(nbytes[span] for span in held))
        for child in () if is_leaf(module) else module._modules.values():
            if child is not None:
                visit(child, held)

    visit(model, frozenset())
    return most


def _buffers_nbytes(model: nn.Module, params, layout_: Layout, itemsize: int) -> int:
    """The most that buffers of chunks take, on several ranks, each with a number a parameter and rank: those of the spans of one op's
    gradients, beside those of the op before, which may be reduced only then."""
    index = {id(param): i for i, param in enumerate(params)}
    inside = inside_leaves(model)
    of_ops = {}
    for module in model.modules():
        if module not in inside:
            own = module.parameters() if is_leaf(module) else _own(module)
            spans = frozenset(layout_.homes[index[id(p)]].span for p in own if p is not None and id(p) in index)
            chunks = [layout_.chunks[chunk] for span in spans for chunk in layout_.spans[span].chunks]
            of_ops[spans] = sum((chunk.numel + layout_.world * len(chunk.pieces)) * itemsize for chunk in chunks if chunk.trainable)
    return sum(sorted(of_ops.values())[-2:])


def _own(module: nn.Module) -> Iterator[nn.Parameter | None]:
    yield from module._parameters.values()
    for child in module._modules.values():
        if child is not None and type(child).forward is nn.Module.forward:
            yield from _own(child)


def _written_in_forward(model: nn.Module, named: Named) -> set[int]:
    """Parameters that their module writes to in forward: embeddings with max_norm."""
    index = {id(param): i for i, (_, param) in enumerate(named)}
    writers = [module for module in model.modules() if getattr(module, "max_norm", None) is not None]
    return {index[id(p)] for module in writers for p in module._parameters.values() if p is not None and id(p) in index}
