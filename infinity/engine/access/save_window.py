"""Saving and loading between two steps: the conditions, and the work of the engine before a snapshot or a load.

Knows the parts of an engine. Must not know checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from infinity.engine.access.average import settle
from infinity.engine.access.snapshot_reader import SnapshotReader
from infinity.errors import UsageError
from infinity.system.interrupts import Shield
from infinity.system.interrupts import shielded as run_shielded


def ready_to_save(engine, optimizer) -> None:
    """Raise UsageError unless the engine is between two steps. First wait for the reader of the last snapshot, and for updates that run."""
    _enter(engine, optimizer, "infinity.save")
    cycle = engine.cycle
    cycle.raise_failure()
    cycle.check_gradients()
    if cycle.torn:
        raise UsageError("infinity.save after a backward pass that failed half-way: weights are of two steps. Load a checkpoint first")
    cycle.refuse_half_updated("infinity.save")
    if cycle.state.num_backwards or cycle.state.in_backward or cycle.optimizer_calls.wait:
        raise UsageError("infinity.save between backward() and step(): gradients are not saved. Save after step().")
    if (failure := finish_reading(engine.saving)) is not None:
        raise failure
    for chunk in engine.registry.chunks:
        if not chunk.update.is_announced:
            engine.updater.finish(chunk)  # an update that a backward pass or step() has begun
    for span in engine.registry.spans:
        engine.values.keep_written(span)
    settle(engine)


def ready_to_load(engine, optimizer) -> None:
    _enter(engine, optimizer, "infinity.load")
    if engine.cycle.state.in_backward:
        engine.cycle.backward.abandon()
    if (failure := finish_reading(engine.saving)) is not None:
        raise failure


@contextlib.contextmanager
def loading(engine):
    """All records are replaced inside the block. The engine forgets gradients and updates from before."""
    engine.flush()
    engine.updater.end_step()
    engine.cycle.zero_grad()
    for chunk in engine.registry.chunks:
        engine.cycle.updates.make_stale(chunk)
    engine.averaging.load(0)
    engine.last_save = None
    engine.optimizers.refer_to(None)
    with engine.cycle.replacing():
        yield


def shielded(device: torch.device, work: Callable[[Shield], object]) -> object:
    """Run work(shield), which no interrupt may leave half done, in another thread, on the stream of this thread. This thread waits."""
    if device.type != "cuda":
        return run_shielded(work)
    return run_shielded(work, functools.partial(_on_stream, device, torch.cuda.current_stream(device)))


@contextlib.contextmanager
def _on_stream(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.device(device), torch.cuda.stream(stream):  # the thread's own device may have no context, and needs none
        yield


def finish_reading(reader: SnapshotReader | None) -> BaseException | None:
    """Wait for the reader of a snapshot, if any. Return the error that ended the reader, if this error was not raised before."""
    if reader is None or reader.was_told:
        return None
    try:
        reader.wait()
    except Exception as error:
        return error
    return None


def _enter(engine, optimizer, what: str) -> None:
    engine.lifecycle.check_access(what)
    if optimizer is not None:
        engine.optimizers.require_all(what, optimizer)
    engine.averaging.refuse_exchanged(what)
    engine.start()
    engine.calls.refuse_running(what)
