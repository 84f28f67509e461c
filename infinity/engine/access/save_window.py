"""The pause between two steps in which an engine's state is saved or loaded: what it asks for, and what an engine does in it.

Knows an engine's parts. Must not know what a checkpoint is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from infinity.errors import UsageError
from infinity.plan.placement import Placement
from infinity.plan.record import STATES, WEIGHTS
from infinity.plan.tiers import in_storage
from infinity.system.interrupts import Shield
from infinity.system.interrupts import shielded as run_shielded


def ready_to_save(engine, optimizer) -> None:
    """The state is that between two steps from here on until the next one; a checkpoint under way is finished first."""
    _enter(engine, optimizer, "infinity.save")
    cycle = engine.cycle
    cycle.raise_failure()
    cycle.check_gradients()
    if cycle.torn:
        raise UsageError("infinity.save after a backward pass that failed half-way: weights are of two steps; see step()")
    cycle.refuse_half_updated("infinity.save")
    if cycle.num_backwards or cycle.backward_task is not None:
        raise UsageError("infinity.save between backward() and step(): gradients are not saved. Save after step().")
    if (failure := finish_saving(engine.saving)) is not None:
        raise failure
    for chunk in engine.registry.chunks:
        if not chunk.update.is_announced:
            engine.updater.finish(chunk)  # that a backward pass or step() has begun
    for span in engine.registry.spans:
        engine.values.keep_written(span)


def ready_to_load(engine, optimizer) -> None:
    _enter(engine, optimizer, "infinity.load")
    if engine.cycle.backward_task is not None:
        engine.cycle.abandon_backward()
    if (failure := finish_saving(engine.saving)) is not None:
        raise failure


@contextlib.contextmanager
def loading(engine):
    """All records are replaced inside the block; gradients and updates of before are forgotten."""
    engine.flush()
    engine.updater.end_step()
    engine.cycle.torn = False
    engine.zero_grad()
    for chunk in engine.registry.chunks:
        engine.cycle.due.make_stale(chunk)
    engine.last_save = None
    if engine.optimizer is not None:
        engine.optimizer.refer_to(None)
    with engine.cycle.replacing():
        yield


def shielded(device: torch.device, work: Callable[[Shield], object]) -> object:
    """Do what no interrupt may leave half done, and the training thread waits for; on its stream."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run(shield: Shield) -> object:
        if stream is None:
            return work(shield)
        with torch.cuda.device(device), torch.cuda.stream(stream):  # the thread's own device has no context, and is to have none
            return work(shield)

    return run_shielded(run)


def num_records_in_memory(placement: Placement, most: int) -> int:
    """How many chunks' records may be asked for before one is given back, up to `most`."""
    kinds = [kind for kind in (WEIGHTS, STATES) if in_storage(placement.homes[kind])]
    return max(1, min([most, *(placement.slots[kind] for kind in kinds)]))


def finish_saving(saving) -> BaseException | None:
    """Wait for a checkpoint under way, if there is one; what went wrong with it, if nobody was told."""
    if saving is None or saving.was_told:
        return None
    try:
        saving.wait()
    except Exception as error:
        return error
    return None


def _enter(engine, optimizer, what: str) -> None:
    engine.lifecycle.check_access(what)
    if optimizer is not None and optimizer is not engine.optimizer:
        raise UsageError(f"{what}: the optimizer is not that of this model")
    engine.start()
    engine.calls.refuse_running(what)
