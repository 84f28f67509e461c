"""Trains a model that has only shapes, with the engine itself, on a simulated machine.

Knows models on the meta device, machines, and the simulated world. Must not know the decisions of an engine.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from infinity.config import Config
from infinity.engine.build import assemble
from infinity.engine.engine import managed_parameters
from infinity.engine.layerwise.accumulate import accumulate
from infinity.engine.offload import cut_large_layers, offload
from infinity.engine.sizing import Training
from infinity.optim.optimizers import AdamW
from infinity.simulation.world import Rates, SimulatedHost, World
from infinity.system.capacity import device_of
from infinity.system.events import Events
from infinity.system.ranks import Ranks, make_ranks
from infinity.system.threads import now
from infinity.tools.machine import Machine
from infinity.tools.meta_models import Subject, few_tensors, outer_blocks, unchecked_values

UPDATE_NBYTES = 26  # a parameter of the measured update rate: a bf16 record, read and written, and a gradient
OPERATIONS_PER_OP = 2.5  # of PyTorch, in forward or backward of a linear layer, by which the overhead of an op is measured
KERNEL_S = 3e-6  # of a GPU, for an operation without bytes
CONTEXT_NBYTES, CONTEXT_SHARE = 1 << 29, 1 / 64  # of a GPU's memory, for CUDA itself; at most this share
SYSTEM_NBYTES, SYSTEM_SHARE = 5 << 29, 1 / 32  # of host memory, for the system and other programs; at most this share of it
KEPT_NBYTES = 256 << 10  # small tensors have values: positions, masks, losses
LEAST_STEPS, MOST_STEPS, STEADY = 4, 10, 0.03
LAST_STEPS = 2  # whose mean counts: two steps may put off different updates


@dataclass(frozen=True)
class TrainingStep:
    """What a program does in a step. num_micro_batches: with a backward pass each. by_layer: with `infinity.accumulate`. max_grad_norm: clipping.
    recompute: each module of an outer ModuleList is checkpointed. make_optimizer: a class with the arguments of AdamW."""

    num_micro_batches: int = 1
    by_layer: bool = False
    max_grad_norm: float | None = None
    recompute: bool = False
    make_optimizer: Callable = AdamW


class Mark(NamedTuple):
    """A moment. So far: the bytes that each link has moved, and the seconds in which the device has computed."""

    seconds: float
    nbytes: dict[str, int]
    compute_seconds: float


def world_of(machine: Machine) -> World:
    """The machine as one of its ranks sees it. Raises ConfigError if a rate is unknown."""
    machine.require_rates()
    share, alone = machine.devices, "" if machine.devices == 1 else "_all"
    exchanges = [rate for rate, is_used in ((machine.gather_gbps, share > 1), (machine.network_gbps, machine.nodes > 1)) if is_used]
    drives = {name: machine.drive_gbps(name) * 1e9 / share or 1.0 for name in ("mixed", "read", "write")}
    on_cpu = machine.device == "cpu"
    rates = Rates(
        flops=machine.device_tflops * 1e12,
        attention=(machine.attention_tflops or machine.device_tflops) * 1e12,
        device=machine.device_gbps * 1e9 if machine.device_gbps else float("inf"),
        device_update=machine.device_update_gparams * 1e9 * UPDATE_NBYTES,
        host=machine.update_gparams * 1e9 * UPDATE_NBYTES / share,
        h2d=getattr(machine, f"h2d{alone}_gbps") * 1e9,
        d2h=getattr(machine, f"d2h{alone}_gbps") * 1e9,
        collective=min(exchanges, default=1e3) * 1e9,
        drive=drives["mixed"],
        read=drives["read"],
        write=drives["write"],
        copy_s=machine.copy_latency_us * 1e-6,
        collective_s=machine.gather_latency_us * 1e-6,
        kernel_s=0.0 if on_cpu else KERNEL_S,
        copy=machine.h2d_gbps * 1e9 if on_cpu else Rates.copy,  # a CPU device copies in host memory, with one thread
        beside_drives=machine.beside_drives,
        launch_s=machine.op_overhead_us * 1e-6 / OPERATIONS_PER_OP,
        job_s=machine.job_overhead_us * 1e-6,
    )
    return World(
        rates,
        num_ranks=machine.world,
        num_local=share,
        device_nbytes=None if on_cpu else usable_nbytes(machine),
        host=SimulatedHost(machine.host_memory - min(SYSTEM_NBYTES, int(machine.host_memory * SYSTEM_SHARE)), machine.cores),
        room_nbytes=(machine.total("capacity") or 1 << 60) if machine.drives else 0,
        kept_nbytes=KEPT_NBYTES,
    )


def usable_nbytes(machine: Machine) -> int:
    """Bytes of a device for tensors."""
    return machine.device_memory - min(CONTEXT_NBYTES, int(machine.device_memory * CONTEXT_SHARE))


def train(world: World, subject: Subject, config: Config, step: TrainingStep, look: Callable[[object, list[Mark]], object]) -> object:
    """Train until two steps in a row take about the same time. look(engine, marks) gives the result, before the engine closes. marks: of
    the start of the first step, and of the end of each step.

    Raises BudgetError if the model does not fit, and torch.OutOfMemoryError if activations do not."""

    def main() -> object:
        with started(world, subject, config, step) as (engine, model, optimizer, inputs):
            marks, settled = [Mark(now(), {}, 0.0)], 0
            while not _is_steady(marks) or len(marks) <= settled + num_counted(engine):
                _passes(model, inputs, step)
                optimizer.step()
                optimizer.zero_grad()
                world.finish()
                nbytes = {link: meter.nbytes for link, meter in engine.events.meters.items()}
                marks.append(Mark(now(), nbytes, world.compute_seconds))
                if engine.device_budget.trial.has_just_failed:  # an undone division of the device may come back
                    settled = len(marks) - 1
            return look(engine, marks)

    with unchecked_values():
        return world.run(main)


def num_counted(engine) -> int:
    """The number of last steps whose mean counts. Moments that are late are written once in so many steps."""
    return max(LAST_STEPS, engine.placement.num_late + 1)


def require_places(world: World, subject: Subject, config: Config) -> None:
    """Raise BudgetError if the tiers have no place for the records, the slots and the least device memory of the model."""

    def main() -> None:
        device = device_of(config.device)
        with make_ranks(device).joined() as ranks:
            model, _ = _cut_model(world, subject, config, TrainingStep(), ranks)
            training = Training.of((), config, scales_loss=False)
            parts = assemble(model, managed_parameters(model), config, device, ranks, Events(), training)
            parts.ahead.close()
            parts.close(keeps_memory=lambda: False)

    world.run(main)


@contextlib.contextmanager
def started(world: World, subject: Subject, config: Config, step: TrainingStep):
    """In a simulated program: (engine, model, optimizer, inputs) inside the block."""
    with make_ranks(device_of(config.device)).joined() as ranks:
        model, inputs = _cut_model(world, subject, config, step, ranks)
    engine = offload(model, config)
    with engine:
        limits = {"accumulation_steps": step.num_micro_batches, "max_grad_norm": step.max_grad_norm}
        optimizer = step.make_optimizer([param for param in model.parameters() if param.requires_grad], **limits)
        yield engine, model, optimizer, inputs


def _cut_model(world: World, subject: Subject, config: Config, step: TrainingStep, ranks: Ranks) -> tuple[nn.Module, dict]:
    """The model with its tiles, which take no device memory before the engine has them, and inputs."""
    with world.outside_the_device(), few_tensors():  # tiles count, too
        model, inputs = _with_values(subject, step)
        with world.without_addresses():
            cut_large_layers(model, config, ranks)
    return model, inputs


def _is_steady(marks: list[Mark]) -> bool:
    """Whether the last two steps took the same time. Writes need some steps until their delay is steady."""
    seconds = [after.seconds - before.seconds for before, after in zip(marks, marks[1:])]
    alike = len(seconds) >= LEAST_STEPS and abs(seconds[-1] - seconds[-2]) <= STEADY * seconds[-1]
    return alike or len(seconds) >= MOST_STEPS


def _passes(model: nn.Module, inputs: dict, step: TrainingStep) -> None:
    """The forward and backward passes of a step."""
    num = step.num_micro_batches
    if step.by_layer:
        accumulate(model, [inputs] * num, lambda model, inputs: _loss_of(model(**inputs)) / num)
        return
    for _ in range(num):
        (_loss_of(model(**inputs)) / num).backward()


def _loss_of(output) -> torch.Tensor:
    """The loss that a model returns, or a mean in its place."""
    found = output.get("loss") if isinstance(output, dict) else output
    if found is None:
        found = next(value for value in output.values() if isinstance(value, torch.Tensor))
    return found if not found.dim() else found.float().mean()


def _with_values(subject: Subject, step: TrainingStep) -> tuple[nn.Module, dict]:
    """A copy of the model, whose parameters take no memory, and inputs on the CPU."""
    model = copy.deepcopy(subject.model)
    shared: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = shared.setdefault(id(param), _without_memory(param))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    if step.recompute:
        for block in outer_blocks(model):
            vars(block).update(forward=functools.partial(checkpoint, block.forward, use_reentrant=False))
    return model.train(), {name: _input(value) for name, value in subject.inputs.items()}


def _without_memory(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.zeros((), dtype=param.dtype).expand(param.shape), requires_grad=param.requires_grad)


def _input(value):
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
