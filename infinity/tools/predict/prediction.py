"""The prediction of a model's step on a machine: layout and placement by the engine's own code, and a simulation of steps.

Knows models (on the meta device), configurations and machines. Must not know command lines or how results are shown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from infinity.config import Config
from infinity.engine.memory.activation_meter import SLACK
from infinity.engine.sizing import (
    DEVICE_SHARES,
    Training,
    arrange,
    expected_device_nbytes,
    host_share,
    largest_device_nbytes,
    may_compress,
    records_may_visit,
)
from infinity.errors import BudgetError, ConfigError
from infinity.plan import compression, traffic
from infinity.plan import placement as planner
from infinity.plan.memory_needs import Budgets
from infinity.plan.packing import Layout
from infinity.plan.placement import Placement
from infinity.plan.record import GRADIENTS, STATES, Record
from infinity.plan.schedule import updates_visitors_early
from infinity.plan.tiers import DEVICE, HOST, NVME, Tier, leaves_device
from infinity.sizes import format_bytes
from infinity.tools.predict.machine import Machine
from infinity.tools.predict.simulator import Simulation, simulate
from infinity.tools.predict.step import Step
from infinity.tools.predict.workload import Workload


@dataclass(frozen=True)
class Need:
    """Bytes of a tier. needed: for the run, of which `activations` are for activations. there: of the machine, None if unknown."""

    needed: int
    there: int | None
    activations: int = 0


@dataclass(frozen=True)
class Prediction:
    """The prediction for one rank. spans_on_device: spans with records on the device. compresses_nvme: NVMe holds coded bytes.

    more_nbytes: bytes that each further micro-batch of a step moves over each link, if micro-batches follow one after the other."""

    layout: Layout
    records: Sequence[Record]
    placement: Placement
    spans_on_device: tuple[int, ...]
    workload: Workload
    simulation: Simulation
    machine: Machine
    compresses_nvme: bool
    more_nbytes: Mapping[str, int]

    @property
    def step_seconds(self) -> float:
        return self.simulation.step_seconds

    @property
    def compute_seconds(self) -> float:
        return self.workload.step_flops / (self.machine.device_tflops * 1e12)

    @property
    def memory(self) -> dict[Tier, Need]:
        """Needed and existing bytes of each tier."""
        return memory(self.placement, self.simulation.peak_device_nbytes, self.workload.saved_nbytes, self.machine)

    @property
    def bottleneck(self) -> str:
        """The link with the longest busy time."""
        return max(self.simulation.busy_seconds, key=self.simulation.busy_seconds.get)

    @property
    def hiding_tokens(self) -> float:
        """Tokens per step and rank at which compute takes as long as the longest link.

        This holds for one micro-batch, and for several accumulated by layer: their transfers do not depend on the number of tokens."""
        longest = max(self._seconds(self.simulation.nbytes).values())
        return self.workload.tokens * longest / self.compute_seconds if self.compute_seconds else 0.0

    @property
    def hiding_tokens_in_turn(self) -> float:
        """The same for micro-batches one after the other: each micro-batch fetches again all data that was not kept.

        Infinite if a link needs more time for this than compute for a micro-batch."""
        found, compute = self.hiding_tokens, self.compute_seconds
        more_seconds = self._seconds(self.more_nbytes)
        for link, seconds in self._seconds(self.simulation.nbytes).items():
            more = more_seconds[link]
            if seconds > compute:
                found = max(found, self.workload.tokens * (seconds - more) / (compute - more) if compute > more else math.inf)
        return found

    def _seconds(self, nbytes: Mapping[str, float]) -> dict[str, float]:
        """The busy seconds of each link, scaled to these bytes. The drives count by reads, by writes, and by both."""
        busy, moved, gb = self.simulation.busy_seconds, self.simulation.nbytes, self.machine.devices / 1e9
        seconds = {link: busy[link] * nbytes.get(link, 0) / moved[link] for link in busy if moved[link] and link not in ("nvme_read", "nvme_write")}
        read, written = (nbytes.get(link, 0) * gb for link in ("nvme_read", "nvme_write"))
        for what, total in (("read", read), ("write", written), ("mixed", read + written)):
            seconds[what] = total / self.machine.drive_gbps(what) if total else 0.0
        return seconds


def predict(model: nn.Module, workload: Workload, machine: Machine, config: Config) -> Prediction:
    """Raises BudgetError if a tier is too small; all tiers of the returned Prediction are large enough. Raises ConfigError if a rate of the
    machine is unknown."""
    machine.require_rates()
    layout, records, placement = arrangement(model, workload, machine, config)
    compresses_nvme = placement.compression_nbytes > 0
    more_nbytes = _more_nbytes(layout, records, placement, config) if machine.drives else {}
    placement, on_device = _with_visitors(layout, records, placement, config)
    uses, flops, grads = workload.trace([home.span for home in layout.homes])
    seconds = [count / (machine.device_tflops * 1e12) for count in flops]
    first = len(workload.ops)  # position where backward begins
    follow = machine.device == "cuda"
    step = Step(uses, seconds, grads, first, _is_deferred(config), config.residency == "auto", moments_follow=follow)
    simulation = simulate(layout, records, placement, step, machine, on_device=on_device, compresses=compresses_nvme)
    prediction = Prediction(layout, records, placement, on_device, workload, simulation, machine, compresses_nvme, more_nbytes)
    for tier, need in prediction.memory.items():
        require(tier, need)
    return prediction


def memory(placement: Placement, device_nbytes: int, saved_nbytes: int, machine: Machine) -> dict[Tier, Need]:
    """Needed and existing bytes of a device, and of a node's host memory and drives. device_nbytes: of the engine on a device. saved_nbytes:
    of activations. If the device is the CPU, both also count in the node's memory."""
    on_device, in_host, saved = device_nbytes + saved_nbytes, placement.host_nbytes, 0
    if machine.device == "cpu":
        on_device, in_host, saved = device_nbytes, in_host + on_device, saved_nbytes * machine.devices
    return {
        DEVICE: Need(on_device, machine.device_memory, on_device - device_nbytes),
        HOST: Need(in_host * machine.devices, machine.host_memory, saved),
        NVME: Need(placement.nvme_nbytes * machine.devices, (machine.total("capacity") or None) if machine.drives else 0),
    }


def require(tier: Tier, need: Need) -> None:
    """Raise BudgetError if the tier is too small."""
    if need.there is None or need.needed <= need.there:
        return
    if not need.there:
        raise BudgetError(f"{tier}: {format_bytes(need.needed)} per node need a drive, but the machine has none")
    field, where, remedy = {
        DEVICE: ("device_memory", "a device has", "lower the batch, the sequence or device_memory"),
        HOST: ("host_memory", "the machine has", "lower the batch, the sequence, host_memory or device_memory"),
        NVME: (NVME.name, "a node's drives have", "raise host_memory or device_memory"),
    }[tier]
    of_them = f" ({format_bytes(need.activations)} for activations)" if need.activations else ""
    raise BudgetError(f"{field}: {format_bytes(need.needed)} are needed{of_them}, but {where} {format_bytes(need.there)}: {remedy}")


def _arranged(
    model: nn.Module, config: Config, machine: Machine, budgets: Budgets
) -> tuple[Layout, list[Record], Placement]:
    """As an engine arranges the model: with compressed records if this is faster, or if other records do not fit the drives."""
    named = list(model.named_parameters())
    training = Training(deferred=_is_deferred(config), accumulating=False)
    rate, num_cores = machine.drive_gbps("mixed") * 1e9 / machine.devices, machine.cores // machine.devices
    may = may_compress(config, machine.device, sum(param.numel() for _, param in named) // machine.nodes)
    pays = may and compression.pays(config.compression, rate, num_cores)
    found = arrange(model, named, config, budgets, training, (0, machine.world), compresses=may)
    whole = found[2].uncoded().nvme_nbytes
    if pays or not may or (budgets.nvme_nbytes is not None and whole > budgets.nvme_nbytes):
        return found
    return arrange(model, named, config, budgets, training, (0, machine.world), compresses=False)


def arrangement(
    model: nn.Module, workload: Workload, machine: Machine, config: Config
) -> tuple[Layout, list[Record], Placement]:
    """Layout, records of a rank, and the placement, with the device memory that activations leave. Raises BudgetError, and ConfigError for
    activations that leave the device: the simulation does not support them."""
    if leaves_device(config.activation_tier):
        raise ConfigError(f"activation_tier={config.activation_tier!r}: predictions support activations on the device only; leave it out")
    share = machine.devices
    host = machine.host_memory // share
    if config.host_memory == "auto":
        host_budget = int(host * host_share(machine.device, host))
    else:
        host_budget = config.host_memory
        if host_budget > host:
            given, there = format_bytes(host_budget), format_bytes(host)
            raise BudgetError(f"host_memory={given} per rank is more than the machine has: {there} for each of {share} ranks")
    free = machine.device_memory
    if machine.device == "cuda":
        free = int(free * (1 - SLACK)) - workload.saved_nbytes
        if free <= 0:
            taken, there = format_bytes(workload.saved_nbytes), format_bytes(machine.device_memory)
            raise BudgetError(f"device_memory: activations alone take {taken} of {there}: lower the batch or the sequence")
    bound = free if config.device_memory == "auto" else min(free, config.device_memory)
    device_budget = min(bound, auto_device_nbytes(machine)) if config.device_memory == "auto" else bound
    layout, records, placement = _arranged(
        model,
        config,
        machine,
        Budgets(
            device_nbytes=device_budget,
            expected_nbytes=expected_device_nbytes(config, machine.device, auto_device_nbytes(machine)),
            largest_nbytes=min(free, largest_device_nbytes(config, machine.device, auto_device_nbytes(machine))),
            host_nbytes=host_budget,
            nvme_nbytes=(machine.total("capacity") // share or None) if machine.drives else 0,
        ),
    )
    least = memory(placement, placement.least_nbytes, workload.saved_nbytes, machine)
    for tier in (HOST, NVME):  # the device budget is never above device memory
        require(tier, least[tier])
    if not all(home.is_device for home in placement.homes[STATES]):  # like DeviceBudget.redivide after the first step
        placement = dataclasses.replace(placement, device_nbytes=max(bound, placement.least_nbytes))
    return layout, records, placement


def _more_nbytes(layout: Layout, records: list[Record], placement: Placement, config: Config) -> dict[str, int]:
    """Bytes that each further micro-batch of a step moves, if micro-batches follow one after the other. The second one may move more, because
    gradients wait from then on: see plan/traffic.py."""
    may_visit = not all(home.is_device for home in placement.homes[STATES]) and records_may_visit(config, layout)

    def moved(num_passes: int) -> dict[str, int]:
        step = traffic.Step(
            num_passes=num_passes,
            device_nbytes=placement.device_nbytes,
            deferred=_is_deferred(config),
            keep=config.residency == "auto",
            may_visit=may_visit,
            compresses=placement.compression_nbytes > 0,
        )
        return traffic.step_nbytes(layout, records, placement, step)

    two = moved(2)
    return {link: max(0, nbytes - two[link]) for link, nbytes in moved(3).items()}


def _with_visitors(layout: Layout, records: list[Record], placement: Placement, config: Config) -> tuple[Placement, tuple[int, ...]]:
    """The placement after the first step, and the spans with records on the device."""
    homes = placement.homes[STATES]
    on_device = tuple(span.index for span in layout.spans if homes[span.chunks[0]].is_device)
    nbytes_of = [span.nbytes for span in layout.spans]
    if not all(home.is_device for home in homes) and records_may_visit(config, layout):
        room = placement.device_nbytes - placement.gradient_limit_nbytes
        is_early = updates_visitors_early(deferred=_is_deferred(config), is_shared=layout.partition.is_shared)
        visiting, staying = planner.share_device(
            layout,
            records,
            homes,
            room_nbytes=room,
            window_nbytes=placement.window_nbytes,
            may_stay=placement.may_stay,
            waiting=() if is_early else None,
        )
        if planner.keeps_frozen(layout, (visiting, staying), room_nbytes=room):
            visiting += [(span.index, 0) for span in layout.spans if not span.trainable]
        on_device += tuple(span for span, _ in visiting)
        taken = sum(nbytes + (0 if placement.pinned else nbytes_of[span]) for span, nbytes in visiting) + sum(n for _, n in staying)
        stay = placement.may_stay & {index for span, _ in staying for index in layout.spans[span].chunks}
        gradients = tuple(HOST if index in stay else home for index, home in enumerate(placement.homes[GRADIENTS]))  # none on NVMe
        homes = placement.homes | {GRADIENTS: gradients}
        placement = dataclasses.replace(placement, homes=homes, fixed_nbytes=placement.fixed_nbytes + taken)
    return placement, on_device


def auto_device_nbytes(machine: Machine) -> int:
    """Device memory that an engine plans with before it has measured activations, as in `sizing.budgets`. On the CPU, device_memory."""
    return int(machine.device_memory * DEVICE_SHARES["cuda"]) if machine.device == "cuda" else machine.device_memory


def device_budget_nbytes(machine: Machine, config: Config) -> int:
    """The device budget of an engine with this configuration, before it has measured activations."""
    return auto_device_nbytes(machine) if config.device_memory == "auto" else config.device_memory


def _is_deferred(config: Config) -> bool:
    return config.update == "deferred" or config.watches_nonfinite
