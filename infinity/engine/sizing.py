"""Sizes of an engine before its construction: the memory budgets, and the placement of a model within these budgets.

Knows models, configurations and the planner. Must not know the parts that will hold the bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from infinity.config import Config
from infinity.errors import BudgetError, ConfigError
from infinity.formats.assignment import ParameterDtypes
from infinity.formats.format import STORAGES, Format
from infinity.model.hidden_matrices import hidden_linear_weights
from infinity.model.leaf_modules import inside_leaves, is_leaf, is_region
from infinity.optim.rules import AdamRule, Rule, planned_moments, unit_shape
from infinity.plan import chunk_size, compression
from infinity.plan import placement as planner
from infinity.plan.chunk_size import Way
from infinity.plan.memory_needs import Budgets, Candidate, Needs
from infinity.plan.packing import Layout, ParameterSpec, default_chunk_numel, layout
from infinity.plan.record import Record, record_layout
from infinity.plan.tiers import DEVICE, choice_of, leaves_device
from infinity.system.capacity import gauge_of, host_free_nbytes
from infinity.system.mapped import MappedFiles
from infinity.system.ranks import Ranks
from infinity.system.streams import kind_of
from infinity.system.swap import MEASURE_FROM_NBYTES

ACTIVATION_SHARE = 1 / 4  # least share of host memory for activations, if they live there
HOST_SHARES = {"cuda": 0.92, "cpu": 0.5}  # largest share of free host memory for host_memory="auto"
PROGRAM_NBYTES, PROGRAM_SHARE = 8 << 30, 0.13  # host memory that a rank leaves to the program beside CUDA: the smaller of the two
DEVICE_SHARES = {"cuda": 0.5, "cpu": 0.25}  # share of free device memory for device_memory="auto", until activations are measured
EXPECTED_DEVICE_SHARES = {False: 0.8, True: 0.72}  # share of free CUDA memory that most steps leave to the engine; by `accumulating`
LARGEST_DEVICE_SHARE = 0.84  # share of free CUDA memory to plan with if the other tiers are too small: activations have the rest
MOST_OF_FREE = 0.95  # largest share of the memory that is free while the parameters still hold their own

Named = list[tuple[str, nn.Parameter]]


_ADAMW = AdamRule(decoupled=True)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Properties of a training that determine records and gradients. rules: the rule of each parameter, by its id; `rule` is that of all
    others. deferred: updates wait for step(). accumulating: gradients of several backward passes add up. averages: records have the average of
    the weights."""

    deferred: bool
    accumulating: bool
    rule: Rule = _ADAMW
    rules: Mapping[int, Rule] = dataclasses.field(default_factory=dict)
    averages: bool = False

    def rule_of(self, param: nn.Parameter) -> Rule:
        """The rule of a parameter. One that no optimizer has needs no whole units."""
        return self.rules.get(id(param)) or (self.rule if self.rule.unit == "element" else _ADAMW)

    def has_the_records_of(self, other: Training, params: Iterable[nn.Parameter]) -> bool:
        """Whether records, gradients and the time of updates are those of another training. params: of the model."""
        if (self.deferred, self.accumulating) != (other.deferred, other.accumulating):
            return False
        trained = [param for param in params if param.requires_grad]
        here, there = ([(planned_moments(rule, p.shape), rule.unit) for p in trained for rule in [of.rule_of(p)]] for of in (self, other))
        return here == there

    @property
    def can_advance(self) -> bool:
        """Whether each elementwise rule has moments that can be late."""
        return all(rule.can_advance for rule in {self.rule, *self.rules.values()} if rule.unit == "element")

    @classmethod
    def of(cls, optimizer, config: Config, *, scales_loss: bool, averages: bool = False) -> Training:
        """The properties for joined optimizers; for AdamW if there is no optimizer yet. Raises ConfigError as `is_deferred` does."""
        deferred = is_deferred(optimizer, config, scales_loss=scales_loss)
        if not optimizer:
            return cls(deferred=deferred, accumulating=False, averages=averages)
        rules = {id(param): rule for group, rule in zip(optimizer.param_groups, optimizer.rules) for param in group["params"]}
        accumulating = optimizer.accumulation_steps > 1
        return cls(deferred=deferred, accumulating=accumulating, rule=optimizer.rule, rules=rules, averages=averages)


def is_deferred(optimizer, config: Config, *, scales_loss: bool) -> bool:
    """Whether updates wait for step(). Raises ConfigError if they must wait, but the configuration has update="backward"."""
    clips = bool(optimizer) and optimizer.max_grad_norm is not None
    if config.update == "auto":
        return scales_loss or config.watches_nonfinite or clips
    if config.update == "backward" and clips:
        raise ConfigError(
            "update='backward' with max_grad_norm: the norm is known only after the backward pass. Use update='deferred' "
            "or 'auto', or leave out max_grad_norm."
        )
    if config.update == "backward" and scales_loss:
        raise ConfigError(
            "update='backward' with fp16 parameters: the engine skips a step whose gradients overflow, and detects this only in step(). Use "
            "update='deferred' or 'auto', or train these parameters in bf16 or fp32."
        )
    return config.update == "deferred"


def arrange(
    model: nn.Module,
    named: Named,
    config: Config,
    budgets: Budgets,
    training: Training,
    ranks: tuple[int, int],
    *,
    compresses: bool = False,
    most: Callable[[int], int] = lambda number: number,
) -> tuple[Layout, list[Record], planner.Placement]:
    """The layout of a model, the records of one rank, and their placement. The model may be on the meta device.

    named: the parameters to manage, in registration order. ranks: (rank, world). compresses: plan buffers for compression on NVMe, unless
    compression is "auto" and nothing fits beside them. most(number): the largest number of any rank. Raises BudgetError.
    """
    rank, world = ranks
    cuts = _Cuts(model, named, config, training, world)
    share = 1 - ACTIVATION_SHARE if leaves_device(config.activation_tier) else 1.0
    budgets = dataclasses.replace(budgets, host_share=share)
    way, numel, budgets = _choose_with_sums(cuts, config, budgets, training, compresses=compresses)
    first, candidate, agreed = cuts.candidate(way, numel, 0), cuts.candidate(way, numel, rank), 0
    found = planner.place(candidate, cuts.needs, budgets, first=first)
    while (number := most(found.num_crowded_out)) > agreed:  # equal on all ranks, although shards differ a little
        agreed = number
        found = planner.place(candidate, cuts.needs, budgets, first=first, least_crowded_out=agreed)
    return candidate.layout, candidate.records, dataclasses.replace(found, only_by_layer=cuts.only_by_layer)


def _choose_with_sums(cuts: _Cuts, config: Config, budgets: Budgets, training: Training, *, compresses: bool) -> tuple[Way, int, Budgets]:
    """As `_choose`. If no tier has room for sums of gradients, and updates need not follow step(), the plan has no places for sums. The model
    then trains by layer only."""
    may_do_without = training.accumulating and not training.deferred
    try:
        way, numel, chosen = _choose(cuts, config, budgets, training, compresses=compresses)
        if not may_do_without or chosen.nvme_nbytes is None:
            return way, numel, chosen
        nvme_nbytes = planner.place(cuts.candidate(way, numel, 0), cuts.needs, chosen).nvme_nbytes
        if nvme_nbytes <= chosen.nvme_nbytes:
            return way, numel, chosen
    except BudgetError:
        if not may_do_without:
            raise
    cuts.train_only_by_layer()
    return _choose(cuts, config, budgets, training, compresses=compresses)


def _choose(cuts: _Cuts, config: Config, budgets: Budgets, training: Training, *, compresses: bool) -> tuple[Way, int, Budgets]:
    """The way to store records, the chunk size, and the budgets: with more of the device if the other tiers are too small otherwise."""
    numels = chunk_size.chunk_numels(cuts.num_parameters, world=cuts.world)
    if config.chunk_mib is not None:
        numels = [default_chunk_numel(config.chunk_mib, cuts.world)]
    some_may_be_late = any(spec.format.may_be_late for spec in cuts.specs)
    may_be_late = training.can_advance and some_may_be_late and config.compression != "off"
    ways = (True, False) if compresses and config.compression != "on" else (compresses,)
    tries, largest, needs = [budgets], budgets.largest_nbytes, cuts.needs
    if largest and needs.keep and needs.on_device and needs.weights is needs.states is None:  # records may move to the device
        expected = max(largest, budgets.expected_nbytes)
        tries.append(dataclasses.replace(budgets, device_nbytes=largest, expected_nbytes=expected, holds_all=False))
    for each in tries:
        is_last, nvme_nbytes = each is tries[-1], each.nvme_nbytes

        def place(way: Way, numel: int) -> tuple[Layout, planner.Placement]:  # for rank 0, which needs the most memory
            candidate = cuts.candidate(way, numel, 0)
            return candidate.layout, planner.place(candidate, cuts.needs, each)

        try:
            way, numel = chunk_size.choose(place, numels, ways, may_be_late=may_be_late, nvme_nbytes=nvme_nbytes)
            if is_last or nvme_nbytes is None or place(way, numel)[1].nvme_nbytes <= nvme_nbytes:
                break
        except BudgetError:
            if is_last:
                raise
    return way, numel, each


def _specs(model: nn.Module, named: Named, config: Config, training: Training) -> list[ParameterSpec]:
    """Name, size and format of each parameter."""
    matrices = {id(param) for param in hidden_linear_weights(model)} if config.frozen_dtype in STORAGES else ()

    @functools.cache  # a model may have 100,000 parameters of few formats
    def format_of(dtype: str, trainable: bool, rule: Rule, moments: tuple[str, ...]) -> Format:
        options = {"moments_dtype": config.optimizer_state_dtype, "accumulates": training.accumulating, "averaged": training.averages}
        format = Format(dtype, trainable, moments, unit=rule.unit, **options)
        if format.has_coded_moments and not rule.allows_eight_bit:
            raise ConfigError(
                f"optimizer_state_dtype='8bit' with {type(rule).__name__}: set allows_eight_bit = True in this class if an update divides by no "
                f"moment but one named 'variance', which is never negative. Otherwise use 'bf16'"
            )
        return format

    dtypes = ParameterDtypes.of(named, config.dtype, master=config.master, frozen=config.frozen_dtype, matrices=matrices)
    pairs, found = zip(named, dtypes.names), []
    for (name, param), dtype in pairs:
        rule = training.rule_of(param)
        unit_numel = math.prod(unit_shape(rule.unit, param.shape)) if param.requires_grad else 1
        format = format_of(dtype, param.requires_grad, rule, planned_moments(rule, param.shape))
        found.append(ParameterSpec(name, param.numel(), format, unit_numel))
    used = {spec.format.name for spec in found}
    if config.frozen_dtype in STORAGES and config.frozen_dtype not in used:
        raise ConfigError(
            f"frozen_dtype={config.frozen_dtype!r}: no weight of a hidden linear layer is frozen and computes in bf16. Load the base model with "
            f"dtype=torch.bfloat16 and without a quantization_config. Set requires_grad=False on it, as PEFT's get_peft_model does, before the "
            f"optimizer is made"
        )
    return found


class _Cuts:
    """The ways to cut one model into chunks."""

    def __init__(self, model: nn.Module, named: Named, config: Config, training: Training, world: int):
        self.config, self.training, self.world = config, training, world
        self.params = [param for _, param in named]
        self.specs = _specs(model, named, config, training)
        self.num_parameters = sum(spec.numel for spec in self.specs)
        self._layout = functools.lru_cache(32)(functools.partial(layout, self.specs, world=world))  # a search asks for some sizes again
        modules = list(model.modules())
        self.has_regions = any(map(is_region, modules))
        self.held_together = _held_together(model, self.params)
        self.params_of_ops = list(_params_of_ops(model, self.params))
        self.op_gradient_nbytes = _op_gradient_nbytes(modules, self.params, self.specs)
        self.written = written_in_forward(modules, named)
        is_coded = any(spec.format.is_coded for spec in self.specs)
        if is_coded and any(choice_of(choice) == DEVICE for choice in (config.param_tier, config.optimizer_state_tier)):
            tiers = "param_tier='device' or optimizer_state_tier='device'"
            coded = ", ".join(sorted({spec.format.name for spec in self.specs if spec.format.is_coded}))
            raise ConfigError(f"{tiers} with weights in {coded}: coded weights live in host memory or on NVMe. Use 'host', 'nvme' or 'auto'")
        self.needs = Needs(
            on_device=not is_coded,
            weights=choice_of(config.param_tier),
            states=choice_of(config.optimizer_state_tier),
            keep=config.residency == "auto",
            deferred=training.deferred or training.accumulating,
            updates_follow=training.deferred,
            accumulates=training.accumulating,
        )
        self.only_by_layer = False

    def train_only_by_layer(self) -> None:
        """Plan no places for sums of gradients: in a step by layer, a layer's sum is complete before the layer's update."""
        self.needs = dataclasses.replace(self.needs, deferred=False, accumulates=False)
        self.only_by_layer = True

    def candidate(self, way: Way, chunk_numel: int, rank: int) -> Candidate:
        cut = self._layout(chunk_numel=chunk_numel)
        records = [record_layout(chunk.shard_used(rank), chunk.format) for chunk in cut.chunks]
        pooled = {record: compression.pooled_nbytes(record, codes=way.compresses) for record in set(records) if way.late}  # few different ones
        spans = [cut.spans[index] for index in {cut.homes[index].span for index in self.written}]
        return Candidate(
            layout=cut,
            records=records,
            held_nbytes=_held_nbytes(self.held_together, cut),
            op_gradient_nbytes=self.op_gradient_nbytes,
            num_incomplete=_num_incomplete(self.params_of_ops, cut),
            has_regions=self.has_regions,
            buffers_nbytes=_buffers_nbytes(self.params_of_ops, cut) if cut.partition.is_shared else 0,
            snapshot_nbytes=sum(span.nbytes for span in spans if span.format.has_master),
            compression_nbytes=compression.buffers_nbytes(records) if way.compresses else 0,
            late_nbytes=[pooled[record] for record in records] if way.late else None,
            late_on_nvme=way.compresses and not cut.rounds_moments,  # otherwise this saves little or nothing
            late_first=not way.compresses and not cut.rounds_moments,  # otherwise states save as many bytes
        )


def budgets(config: Config, device: torch.device, ranks: Ranks, params: Iterable[nn.Parameter] = ()) -> tuple[int, int]:
    """Returns (device bytes, host bytes) for this rank: as configured, or a share of free memory that is equal on all ranks. params:
    parameters whose memory becomes free soon after the engine has allocated its own."""
    free_host, taken, kind = host_free_nbytes() // ranks.num_local, _taken(params), kind_of(device)
    on_host, on_device = host_share(kind, free_host + taken["cpu"]), DEVICE_SHARES[kind]
    if kind == "cuda":
        device_nbytes = _share(on_device, gauge_of(device).free_nbytes(), taken["cuda"])
        host_nbytes = _share(on_host, free_host, taken["cpu"])
    else:  # both budgets are parts of host memory
        both = _share(on_host + on_device, free_host, taken["cpu"])
        host_nbytes = int(both * on_host / (on_host + on_device))
        device_nbytes = both - host_nbytes
    auto = ranks.least([device_nbytes, host_nbytes])
    given = (config.device_memory, config.host_memory)
    return tuple(share if value == "auto" else value for value, share in zip(given, auto))


def host_share(kind: str, free_nbytes: int) -> float:
    """The share of free host memory for host_memory="auto", beside a device of this kind."""
    if kind != "cuda" or not free_nbytes:
        return HOST_SHARES[kind]
    return min(HOST_SHARES[kind], 1 - min(PROGRAM_SHARE, PROGRAM_NBYTES / free_nbytes))


def expected_device_nbytes(config: Config, device: str, device_nbytes: int, *, accumulating: bool = False) -> int:
    """Device bytes that the engine probably has once activations are measured. Until then the engine plans with device_nbytes. 0 if this
    number will not change: with a configured budget, and on the CPU. accumulating: micro-batches that pass the model together need more for
    activations."""
    return _auto_nbytes(config, device, device_nbytes, EXPECTED_DEVICE_SHARES[accumulating])


def largest_device_nbytes(config: Config, device: str, device_nbytes: int) -> int:
    """Device bytes to plan with if host memory and NVMe are too small beside device_nbytes; 0 if only device_nbytes is possible."""
    return _auto_nbytes(config, device, device_nbytes, LARGEST_DEVICE_SHARE)


def _auto_nbytes(config: Config, device: str, device_nbytes: int, share: float) -> int:
    """Another share of the free CUDA memory of which device_nbytes is the usual one; 0 with a configured budget, and on the CPU."""
    chosen = config.device_memory == "auto" and device == "cuda"
    return int(device_nbytes * share / DEVICE_SHARES["cuda"]) if chosen else 0


def records_may_visit(config: Config, layout: Layout) -> bool:
    """Whether records of this layout may leave their homes and visit the device: [Note: the device budget] in device_memory.py."""
    weights, states = choice_of(config.param_tier), choice_of(config.optimizer_state_tier)
    return planner.records_may_visit(weights=weights, states=states, keep=config.residency == "auto")


def may_compress(config: Config, device: str, num_parameters: int) -> bool:
    """Whether records on NVMe may be compressed, before the drives are known. num_parameters: of all ranks of this node. "auto" needs a model
    so large that the engine measures the drives, and a GPU that leaves CPU cores free."""
    if config.compression == "auto":
        return device == "cuda" and 12 * num_parameters >= MEASURE_FROM_NBYTES * len(config.swap_dirs)
    return config.compression == "on"


def _share(share: float, free: int, taken: int) -> int:
    """A share of the memory that will be free. The present free memory is the bound, because the engine allocates first."""
    return min(int(share * (free + taken)), int(MOST_OF_FREE * free))


def _taken(params: Iterable[nn.Parameter]) -> collections.Counter:
    """Bytes of memory that parameter values take, by kind of device. Memory of mapped files counts as free already."""
    by_storage, limits, files = collections.Counter(), {}, MappedFiles()
    for param in params:
        storage, nbytes = param.untyped_storage(), param.numel() * param.element_size()
        is_mapped = param.device.type == "cpu" and files.find(storage.data_ptr(), 1)
        if param.numel() > 1 and storage.nbytes() >= nbytes and not is_mapped:  # placeholders have one element
            key = param.device.type, storage._cdata
            by_storage[key] += nbytes
            limits[key] = storage.nbytes()
    taken = collections.Counter()
    for key, nbytes in by_storage.items():
        taken[key[0]] += min(nbytes, limits[key])  # parameters may share a storage
    return taken


def _held_together(model: nn.Module, params) -> list[frozenset[int]]:
    """Indices of the parameters that an op and the ops around it hold: a module's own and those of its ancestors, for each module without
    further ones below. Parameters in a child that cannot be called, such as a ParameterList, count as the parent's own: the parent reads them
    one after another."""
    index = {id(param): i for i, param in enumerate(params)}
    found = []

    def visit(module: nn.Module, held: frozenset[int]) -> None:
        whole = is_leaf(module)
        own = module.parameters() if whole else _own(module)
        held = held.union(index[id(p)] for p in own if p is not None and id(p) in index)
        children = () if whole else [child for child in module._modules.values() if child is not None]
        for child in children:
            visit(child, held)
        if held and not children:  # a module with children holds no more than each of them
            found.append(held)

    visit(model, frozenset())
    return found


def _held_nbytes(held_together: list[frozenset[int]], layout_: Layout) -> int:
    """The most bytes of spans that an op and the ops around it hold."""
    spans = [home.span for home in layout_.homes]
    nbytes = [span.nbytes for span in layout_.spans]
    return max((sum(nbytes[span] for span in {spans[param] for param in held}) for held in held_together), default=0)


def _op_gradient_nbytes(modules: list[nn.Module], params, specs: list[ParameterSpec]) -> int:
    """The most bytes of gradients that exist at once: the gradient of one parameter, or all gradients of one compiled module."""
    ours = {id(param): spec.numel * spec.format.itemsize for param, spec in zip(params, specs) if spec.trainable}
    regions = (sum(ours.get(id(param), 0) for param in module.parameters()) for module in modules if is_region(module))
    return max((*ours.values(), *regions), default=0)


def _params_of_ops(model: nn.Module, params) -> Iterator[list[int]]:
    """Indices of the parameters that each op reads itself."""
    index = {id(param): i for i, param in enumerate(params)}
    inside = inside_leaves(model)
    for module in model.modules():
        if module not in inside:
            own = module.parameters() if is_leaf(module) else _own(module)
            yield [index[id(p)] for p in own if p is not None and id(p) in index]


def _buffers_nbytes(params_of_ops: list[list[int]], layout_: Layout) -> int:
    """The most bytes of the chunks' flat gradient buffers, on several ranks. Each buffer also has one number per parameter and rank. The
    buffers of one op exist beside those of the previous op, whose reduction may come only then."""
    of_ops = {}
    for own in params_of_ops:
        spans = frozenset(layout_.homes[param].span for param in own)
        chunks = [layout_.chunks[chunk] for span in spans for chunk in layout_.spans[span].chunks]
        of_ops[spans] = sum(
            (chunk.numel + layout_.partition.world * len(chunk.pieces)) * chunk.format.itemsize for chunk in chunks if chunk.trainable
        )
    return sum(sorted(of_ops.values())[-2:])


def _num_incomplete(params_of_ops: list[list[int]], layout_: Layout) -> int:
    """See `Candidate`: the trainable chunks of the two largest ops, and those of parameters that several ops read."""
    num_ops, numbers, shared = collections.Counter(), [], set()
    for own in params_of_ops:
        num_ops.update(own)
        chunks = {chunk for param in own for chunk in layout_.chunks_of(param)}
        numbers.append(sum(layout_.chunks[chunk].trainable for chunk in chunks))
    for param, number in num_ops.items():
        if number > 1:
            shared.update(layout_.chunks_of(param))
    return sum(sorted(numbers)[-2:]) + sum(layout_.chunks[chunk].trainable for chunk in shared)


def _own(module: nn.Module) -> Iterator[nn.Parameter | None]:
    yield from module._parameters.values()
    for child in module._modules.values():
        if child is not None and type(child).forward is nn.Module.forward:
            yield from _own(child)


def written_in_forward(modules: Iterable[nn.Module], named: Named) -> set[int]:
    """Indices of the parameters that their module changes in forward: embeddings with max_norm."""
    index = {id(param): i for i, (_, param) in enumerate(named)}
    writers = [module for module in modules if getattr(module, "max_norm", None) is not None]
    return {index[id(p)] for module in writers for p in module._parameters.values() if p is not None and id(p) in index}
