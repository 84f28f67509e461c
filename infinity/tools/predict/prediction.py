"""The prediction of a model's steps on a machine: the engine itself trains the model there, without bytes.

Knows simulated runs, and the parts of an engine with sizes. Must not know command lines, how results are shown, or decisions of an engine.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity.config import Config
from infinity.engine.description import expected_step
from infinity.engine.trace_file import trace_of
from infinity.errors import BudgetError, SwapError
from infinity.plan import traffic
from infinity.plan.packing import Layout
from infinity.plan.placement import Placement
from infinity.plan.tiers import DEVICE, HOST, NVME, Tier
from infinity.simulation.world import World
from infinity.sizes import format_bytes
from infinity.system.events import COMPUTE, LINKS, STALL
from infinity.tools.machine import Machine
from infinity.tools.measure.breakdown import breakdown
from infinity.tools.meta_models import Subject
from infinity.tools.predict.simulated_run import Mark, TrainingStep, num_counted, require_places, train, usable_nbytes, world_of

COARSE_FROM, COARSE_CHUNKS = 250e9, 1000  # a larger model has about so many chunks here, because a prediction takes time for each chunk
COARSEST_SHARE = 32  # a chunk takes at most 1/32 of a device, because several must fit at once


@dataclass(frozen=True)
class Need:
    """Bytes of a tier. needed: for the run, of which `activations` are for activations. there: of the machine, None if unknown."""

    needed: int
    there: int | None
    activations: int = 0


@dataclass(frozen=True)
class Use:
    """The use of a link by a rank in a step. stall_seconds: waits of the step for the link."""

    nbytes: float
    busy_seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for one rank, from the last steps of a run. layout, placement: of the engine. tokens: of a step of one rank. compute_seconds:
    of the products alone. compresses_nvme: NVMe holds coded bytes. memory: by tier, of a device or of a node.

    more_nbytes: bytes that each further micro-batch of a step moves over each link, if micro-batches follow one after the other."""

    machine: Machine
    layout: Layout
    placement: Placement
    tokens: int
    step_seconds: float
    compute_seconds: float
    uses: Mapping[str, Use]
    memory: Mapping[Tier, Need]
    compresses_nvme: bool
    more_nbytes: Mapping[str, int]

    @property
    def bottleneck(self) -> str:
        """The link with the longest busy time."""
        return max(self.uses, key=lambda link: self.uses[link].busy_seconds)

    @property
    def hiding_tokens(self) -> float:
        """Tokens per step and rank at which compute takes as long as the longest link.

        This holds for one micro-batch, and for several accumulated by layer: their transfers do not depend on the number of tokens."""
        longest = max(self._seconds({link: use.nbytes for link, use in self.uses.items()}).values())
        return self.tokens * longest / self.compute_seconds if self.compute_seconds else 0.0

    @property
    def hiding_tokens_in_turn(self) -> float:
        """The same for micro-batches one after the other: each micro-batch fetches again all data that was not kept.

        Infinite if a link needs more time for this than compute for a micro-batch."""
        found, compute = self.hiding_tokens, self.compute_seconds
        more_seconds = self._seconds(self.more_nbytes)
        for link, seconds in self._seconds({link: use.nbytes for link, use in self.uses.items()}).items():
            more = more_seconds[link]
            if seconds > compute:
                found = max(found, self.tokens * (seconds - more) / (compute - more) if compute > more else math.inf)
        return found

    def _seconds(self, nbytes: Mapping[str, float]) -> dict[str, float]:
        """The busy seconds of each link, scaled to these bytes. The drives count by reads, by writes, and by both."""
        gb = self.machine.devices / 1e9
        seconds = {
            link: use.busy_seconds * nbytes.get(link, 0) / use.nbytes
            for link, use in self.uses.items()
            if use.nbytes and link not in ("nvme_read", "nvme_write")
        }
        read, written = (nbytes.get(link, 0) * gb for link in ("nvme_read", "nvme_write"))
        for what, total in (("read", read), ("write", written), ("mixed", read + written)):
            seconds[what] = total / self.machine.drive_gbps(what) if total else 0.0
        return seconds


def predict(subject: Subject, machine: Machine, config: Config, step: TrainingStep = TrainingStep()) -> Prediction:
    """Train the model on the machine until its steps are steady. Raises BudgetError if a tier is too small, and ConfigError if a rate of the
    machine is unknown."""
    world, num = world_of(machine), sum(param.numel() for param in subject.model.parameters())
    if config.chunk_mib is None and num > COARSE_FROM:
        config = dataclasses.replace(config, chunk_mib=min(2 * num / COARSE_CHUNKS, machine.device_memory / COARSEST_SHARE) / 2**20)
    with _settings(world, machine, config) as settings:
        found = train(world, subject, settings, step, lambda engine, marks: _predicted(world, subject, machine, step, engine, marks))
    for tier, need in found.memory.items():
        _require(tier, need)
    return found


def require_room(subject: Subject, machine: Machine, config: Config, activation_nbytes: int) -> None:
    """Raise BudgetError if the machine has no room for the model beside activations of this size."""
    if machine.device == "cuda":
        if activation_nbytes >= machine.device_memory:
            raise BudgetError(_too_many(activation_nbytes, machine))
        machine = dataclasses.replace(machine, device_memory=machine.device_memory - activation_nbytes)
    world = world_of(machine)
    with _settings(world, machine, config) as settings:
        require_places(world, subject, settings)


@contextmanager
def _settings(world: World, machine: Machine, config: Config) -> Iterator[Config]:
    """The configuration for an engine in the world, inside the block."""
    there = machine.host_memory // machine.devices
    if config.host_memory != "auto" and config.host_memory > there:
        given, there = format_bytes(config.host_memory), format_bytes(there)
        raise BudgetError(f"host_memory={given} per rank is more than the machine has: {there} for each of {machine.devices} ranks")
    if machine.device == "cuda" and config.device_memory != "auto" and config.device_memory > machine.device_memory:
        given, there = format_bytes(config.device_memory), format_bytes(machine.device_memory)
        raise BudgetError(f"device_memory={given} is more than a device has: {there}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield dataclasses.replace(config, device="cpu", swap_dirs=[folder], verbose=False, trace=True)
        except torch.OutOfMemoryError:
            raise BudgetError(_too_many(world.memory.refused_nbytes, machine)) from None
        except SwapError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise BudgetError(_no_room(world, machine)) from None


def _require(tier: Tier, need: Need) -> None:
    """Raise BudgetError if the tier is too small."""
    if need.there is None or need.needed <= need.there:
        return
    where = {DEVICE: "a device has", HOST: "the machine has", NVME: "a node's drives have"}[tier]
    of_them = f" ({format_bytes(need.activations)} for activations)" if need.activations else ""
    text = f"{format_bytes(need.needed)} are needed{of_them}, but {where} {format_bytes(need.there)}: lower the batch, the sequence or host_memory"
    raise BudgetError(f"{tier.name}: {text}")


def _too_many(nbytes: int, machine: Machine) -> str:
    needed, there = format_bytes(nbytes), format_bytes(usable_nbytes(machine))
    what = f"activations and the engine need more than {needed}; a device has {there} beside CUDA itself"
    return f"device_memory: {what}: lower the batch or the sequence"


def _no_room(world: World, machine: Machine) -> str:
    needed = format_bytes(world.nvme_nbytes * machine.devices)
    if not machine.drives:
        return f"{NVME}: {needed} per node need a drive, but the machine has none"
    there = format_bytes(machine.total("capacity"))
    return f"{NVME.name}: {needed} are needed, but a node's drives have {there}: raise host_memory or device_memory"


def _predicted(world: World, subject: Subject, machine: Machine, step: TrainingStep, engine, marks: list[Mark]) -> Prediction:
    num_steps = len(marks) - 1
    num = num_counted(engine)  # fewer than all steps, see `train`
    lanes = breakdown([trace_of(engine)], num_warm_up=num_steps - num)["lanes"]
    first, last = marks[-1 - num], marks[-1]
    seconds = (last.seconds - first.seconds) / num
    nbytes = {link: (last.nbytes[link] - first.nbytes[link]) / num for link in LINKS} | {COMPUTE: 0.0}
    waited = _waited(world, engine, first.seconds, last.seconds)
    busy = {link: lanes[link]["busy_share"] * seconds for link in (COMPUTE, *LINKS)}
    if machine.device == "cuda":  # the trace of an op includes its waits
        busy[COMPUTE] = (last.compute_seconds - first.compute_seconds) / num
    uses = {link: Use(nbytes[link], busy[link], waited[link] / num) for link in (COMPUTE, *LINKS)}
    expected, records = expected_step(engine), [chunk.record for chunk in engine.registry.chunks]
    two, three = (
        traffic.step_nbytes(engine.layout, records, engine.placement, dataclasses.replace(expected, num_passes=n, by_layer=False)) for n in (2, 3)
    )
    return Prediction(
        machine,
        engine.layout,
        engine.placement,
        subject.tokens * step.num_micro_batches,
        seconds,
        world.product_seconds / num_steps,
        uses,
        _memory(world, machine, engine),
        engine.compressor is not None and engine.compressor.codes,
        {link: max(0, three[link] - two[link]) for link in two},
    )


def _waited(world: World, engine, begin: float, end: float) -> Counter[str]:
    """Seconds between two moments in which the step waited for each link. If the host waits while a GPU computes, the step does not wait."""
    idle = world.device.current().idle if world.device is not None else [(begin, end)]
    starts, found = [start for start, _ in idle], Counter()
    for event in engine.events.trace:
        if event.lane == STALL:
            first, last = max(begin, event.start), min(end, event.end)
            for start, stop in idle[max(0, bisect_right(starts, first) - 1) : bisect_right(starts, last)]:
                found[event.what[0]] += max(0.0, min(stop, last) - max(start, first))
    return found


def _memory(world: World, machine: Machine, engine) -> dict[Tier, Need]:
    """Needed and existing bytes of a device, and of a node's host memory and drives. If the device is the CPU, its tensors are in the node's
    memory. World.memory leaves out small tensors, the tier does not."""
    on_device, in_host, saved = max(world.memory.most_nbytes(), engine.tier.peak_nbytes), engine.arena.nbytes, 0
    # The engine does not measure activations if nothing can leave the device.
    activations = engine.device_budget.meter.activation_nbytes or on_device - engine.tier.peak_nbytes
    if machine.device == "cpu":
        in_host, saved = in_host + on_device, activations * machine.devices
    return {
        DEVICE: Need(on_device, machine.device_memory if machine.device == "cuda" else None, activations),
        HOST: Need(in_host * machine.devices, machine.host_memory, saved),
        NVME: Need(world.nvme_nbytes * machine.devices, (machine.total("capacity") or None) if machine.drives else 0),
    }
