"""The engine of one model: builds the rest, and decides when gradients, updates and plans are due.

Knows every other part by its face. The user meets it through `infinity.init`, `infinity.offload` and the optimizers.
"""

# [Note: when a chunk is updated]
# Deferred: step() announces the update of each chunk that has a gradient (`pending`) and remembers the hyper-parameters;
# the update begins when the next forward fetches the chunk, or when something else needs it: its next gradient, a read.
# Backward: in the last backward pass before step(), a chunk is updated as soon as all its gradients are there and no op
# and no saved view needs its weights any more; step() updates the rest. Both compute the same, see updater.py.
#
# [Note: expected gradients]
# How many gradients a parameter receives in one backward pass is known from the last step: several if reentrant
# checkpoints share it, none if it is unused. In the first step a parameter of an op that ran once is expected to receive
# one, of an op that did not run none; with anything else the chunk waits for the end of the pass.

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import weakref
from collections.abc import Iterable

import psutil
import torch
from torch import nn

from infinity import planner
from infinity.adam import NormAccumulator, split_master
from infinity.arena import Arena, Slots
from infinity.chunks import BLOCK_NUMEL, ParameterSpec, default_chunk_numel, layout, record_layout
from infinity.config import Config, format_bytes
from infinity.errors import BudgetError, ConfigError, UsageError
from infinity.events import Events
from infinity.gradients import Gradients
from infinity.hooks import Hooks
from infinity.partition import Ranks
from infinity.pipeline import Pipeline
from infinity.records import STATES, WEIGHTS, Records
from infinity.residency import (
    TORCH_DTYPES,
    Area,
    ChunkState,
    DeviceTier,
    HostCache,
    ParameterState,
    Presence,
    Registry,
    SpanState,
    owner_of,
    set_owner,
)
from infinity.schedule import NEVER
from infinity.tiers import Swap
from infinity.updater import Hyper, Updater, add_norm, segments

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_EPS_OF_CLIPPING = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Engine:
    """Trains one model from device, host and NVMe memory. A context manager: leaving it closes it.

    initial: gives a parameter's initial value, `initial(index, param) -> 1-D tensor on the CPU`. Nothing is built or
    written until an optimizer is attached or the model runs for the first time.
    """

    def __init__(self, model: nn.Module, config: Config, initial=None, ranks: Ranks | None = None):
        self.config = config
        self.device = _device(config)
        self.ranks = ranks or Ranks(self.device)
        self.events = Events(tracing=config.trace)
        self.optimizer = None
        self._model = weakref.ref(model)
        self._initial = initial or (lambda index, param: param.detach().reshape(-1).cpu())
        self._named = _parameters(model)
        if not self._named:
            raise ConfigError(f"{type(model).__name__} has no floating-point parameters; there is nothing to offload")
        if meta := [name for name, param in self._named if param.is_meta]:
            raise ConfigError(f"parameters on the meta device have no values: {', '.join(meta[:3])}; build them on the CPU")
        self._started = self._closed = False
        self._reset_step()
        for _, param in self._named:
            set_owner(param, self)
        _engines[model] = weakref.ref(self)
        _guard_before_start(self, model)

    # The user's face.

    def stats(self) -> dict:
        """Sizes in bytes, and what has happened so far on this rank, by link."""
        self._start()
        links = {
            link: {"nbytes": m.nbytes, "busy_seconds": m.busy_seconds, "stall_seconds": m.stall_seconds}
            for link, m in self.events.meters.items()
        }
        return {
            "num_parameters": self.layout.num_parameters,
            "state_nbytes": sum(chunk.record.nbytes for chunk in self.registry.chunks),
            "device_budget_nbytes": self.device_budget,
            "peak_device_nbytes": self.tier.peak_nbytes,
            "host_arena_nbytes": self.arena.nbytes,
            "nvme_read_nbytes": self.swap.read_nbytes if self.swap else 0,
            "nvme_write_nbytes": self.swap.write_nbytes if self.swap else 0,
            "num_plans": self.pipeline.num_plans,
            "links": links,
        }

    def flush(self) -> None:
        """Begin and finish every update that step() has announced, and its writes."""
        self._check_open()
        self._start()
        for chunk in self.registry.chunks:
            if chunk.pending is not None:
                self._begin_update(chunk, chunk.pending)
        for chunk in self.registry.chunks:
            self._finish_announced(chunk)
        self.records.flush()

    def read_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's segments by name (weight, residual, momentum, variance), whole, on the CPU, as they are stored.

        Every rank must call it. Raises ConfigError for a parameter that is not the engine's.
        """
        self._check_open()
        self._start()
        state = self.registry.find(param)
        if state is None:
            raise ConfigError("the parameter is not one of this engine's")
        found: dict[str, list[torch.Tensor]] = {}
        for chunk in self.registry.chunks_of(state):
            self._finish_announced(chunk)
            self._keep_written(chunk.span)
            piece = chunk.whole_pieces[state.index]
            with self._host_segments(chunk) as shard:
                for segment in chunk.record.segments:
                    dtype = TORCH_DTYPES[segment.dtype]
                    part = torch.zeros(chunk.chunk.shard_numel, dtype=dtype)
                    part[: chunk.record.numel] = shard[segment.name]
                    whole = self.ranks.all_gather_slices(part.view(torch.uint8)).view(dtype)
                    found.setdefault(segment.name, []).append(whole[piece.start : piece.start + piece.numel].clone())
        return {name: torch.cat(parts).reshape(state.shape) for name, parts in found.items()}

    @contextlib.contextmanager
    def gathered(self, params: Iterable[torch.Tensor]):
        """The parameters are whole on the device inside the block; what it changes is kept, on every rank as on rank 0."""
        self._check_open()
        self._start()
        states = [self.registry.find(param) for param in params]
        if None in states:
            raise ConfigError("infinity.gathered: a parameter is not one of this engine's")
        spans = list(dict.fromkeys(self.registry.span_of(state) for state in states))
        self.pipeline.acquire_aside(spans)
        for span in spans:
            self._keep_written(span)
        before = {span: span.flat.clone() for span in spans}
        try:
            yield
        finally:
            for span in spans:
                for state in span.params:
                    state.version = state.param._version
                self._adopt_values(span, before[span])
                self.pipeline.release(span)

    def close(self) -> None:
        """Finish what is under way, end the threads and give back memory and swap files. Idempotent.

        The parameters are placeholders afterwards: read what is to be kept before.
        """
        if self._closed:
            return
        self._closed = True
        if not self._started:
            return
        try:
            self.pipeline.close()
            self.gradients.close()
            self.updater.close()
            self.records.close()
        finally:
            if self.swap is not None:
                self.swap.close()
            self.hooks.remove()
            self.arena.close()
            _guard_after_close(self._model(), self.registry.params)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._started else "not started"
        return f"Engine({len(self._named)} parameters, {self.device}, rank {self.ranks.rank} of {self.ranks.world}, {state})"

    # What the optimizer calls.

    def attach(self, optimizer) -> None:
        """Learn who updates which parameter. One optimizer an engine."""
        if self.optimizer is not None:
            raise UsageError("the model has an optimizer already; use its parameter groups for several settings")
        self.optimizer = optimizer
        try:
            deferred = self._deferred()
            if self._started and (deferred, optimizer.accumulation_steps > 1) != (self.deferred, self.accumulating):
                raise UsageError(
                    "the model ran before its optimizer was made, and now needs other memory than was planned; make the "
                    "optimizer before the first forward pass"
                )
            self._start()
        except BaseException:
            self.optimizer = None
            raise
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                self.registry.find(param).group = index

    @torch.no_grad()
    def step(self) -> None:
        self._check_open()
        if self.backward_task is not None:
            self._abandon_backward()
        if self.torn:
            raise UsageError(
                "the last backward pass failed after some chunks had been updated: weights are of two steps. Start again from "
                "a checkpoint; with update='deferred' a failed backward pass can be repeated."
            )
        if self.failed:
            raise UsageError("step() after a backward pass that raised; call zero_grad() and run it again")
        if not self.num_backwards:
            raise UsageError("step() without a finished backward pass since the last step")
        self.raise_failure()
        hyper = self._hyper()
        if self.early_hyper is not None and self.early_hyper.groups != hyper.groups:
            raise UsageError(
                "hyper-parameters changed between the backward pass, which has begun to update, and step(). Change them after "
                "step(), or use update='deferred'."
            )
        ready = [chunk for chunk in self.registry.chunks if chunk.gradient_job is not None and not chunk.updated]
        ready = [chunk for chunk in ready if chunk.pending is None]
        if not self.deferred:
            ready.sort(key=lambda chunk: chunk.gradient_number)  # others may wait for the memory of what came first
        if self.optimizer.max_grad_norm is not None:
            self.optimizer.grad_norm = norm = self._norm(ready) / self.ranks.world
            hyper.grad_scale *= min(1.0, self.optimizer.max_grad_norm / (norm + _EPS_OF_CLIPPING))
        for chunk in ready:
            if self.deferred and not chunk.on_device:
                self._announce(chunk, hyper)
            else:
                self.gradients.wait_for(chunk)
                self._begin_update(chunk, hyper)
        for state in self.registry.params:
            state.expected = state.arrived_last
        self.pipeline.adopt(*self._completions())
        self._reset_step()
        self.pipeline.begin_cycle()

    def zero_grad(self) -> None:
        if not self._started:
            return
        if self.backward_task is not None:
            self._abandon_backward()
        if any(chunk.updated for chunk in self.registry.chunks) and not self.torn:
            raise UsageError(
                "zero_grad() between a backward pass that has begun to update and its step(). Call it after step(), or use "
                "update='deferred'."
            )
        dropped = [
            chunk
            for chunk in self.registry.chunks
            if chunk.pending is None and not chunk.updated and (chunk.gradient_job or chunk.flat_gradient is not None)
            if chunk.updating is None or chunk.updating.done
        ]
        if dropped:
            self.gradients.abandon()
        for chunk in dropped:
            self.gradients.drop(chunk)
        self.pipeline.trace.clear()
        self._reset_step(torn=self.torn)

    # What the hooks call.

    def begin_forward(self) -> None:
        self._check_open()
        if torch._C._are_functorch_transforms_active():
            raise UsageError(
                "torch.func transforms (grad, vjp, vmap, ...) do not see when weights come and go. Use loss.backward() or "
                "torch.autograd.grad."
            )
        if torch.is_autocast_enabled(self.device.type) and self.config.dtype == "fp32":
            raise UsageError(
                "torch.autocast over an fp32 engine casts weights that come and go, and caches the casts. Use "
                'infinity.Config(dtype="bf16") instead, which keeps fp32 masters.'
            )
        self.raise_failure()
        if self.backward_task is not None and not self._in_backward():
            self._abandon_backward()
        if self.optimizer is None and not torch.is_grad_enabled():
            self.hooks.recording = True  # without an optimizer a forward pass is the whole cycle
            self.pipeline.adopt((), ())
            self.pipeline.begin_cycle()

    def begin_backward(self) -> None:
        """The gradient of an outermost output is known; once a backward pass."""
        if self.backward_task is not None:
            return
        if self.optimizer is None:
            raise UsageError("a backward pass needs an optimizer: make infinity.AdamW(model.parameters()) before it")
        if self.torn:
            raise UsageError("a backward pass after one that failed half-way and had begun to update; see step()")
        if self.num_backwards >= self.optimizer.accumulation_steps:
            raise UsageError(
                f"backward pass {self.num_backwards + 1} since the last step, but accumulation_steps="
                f"{self.optimizer.accumulation_steps}. Declare it: infinity.AdamW(..., accumulation_steps=...)."
            )
        self.backward_task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        last = self.num_backwards + 1 == self.optimizer.accumulation_steps
        self.early_hyper = self._hyper() if last and not self.deferred else None
        for state in self.registry.params:
            state.arrivals = 0
            if self.first_step:
                state.expected = state.touched if state.touched <= 1 else math.inf
        for chunk in self.registry.chunks:
            chunk.missing = sum(self.registry.params[param].expected > 0 for param in chunk.whole_pieces)
            chunk.update_expected = self.early_hyper is not None and chunk.trainable and chunk.missing > 0

    def gradient(self, state: ParameterState, grad: torch.Tensor) -> None:
        """A parameter's gradient of this backward pass, or of one region of it."""
        if self.backward_task is None:
            self.begin_backward()
        if state.group is None:
            return
        chunks = self.registry.chunks_of(state)
        for chunk in chunks:
            if chunk.updated:
                raise UsageError(
                    f"{state.name} received a gradient after it was updated in this backward pass, which the last step did "
                    f"not show. Use update='deferred' for a model whose gradients come in changing numbers."
                )
            self._finish_announced(chunk)
        self.gradients.arrive(state, grad)
        del grad
        state.arrivals += 1
        if state.arrivals == state.expected:
            for chunk in chunks:
                chunk.missing -= 1
                if not chunk.missing:
                    self._complete(chunk)
        elif state.arrivals > state.expected and self.ranks.world > 1:
            self.late = True
        self._update_waiting()
        self.gradients.wait_for_room()

    def end_backward(self) -> None:
        """The backward pass has succeeded."""
        if self.backward_task is None:
            return
        self.backward_task = None
        self.hooks.release_all()
        self.pipeline.drain_dropped()
        if self.ranks.world > 1:
            waiting = torch.tensor([chunk.flat_gradient is not None for chunk in self.registry.chunks], dtype=torch.int32)
            for chunk, waits in zip(self.registry.chunks, self.ranks.max_(waiting).tolist()):
                if waits:
                    self.gradients.reduce(chunk)
                    self._sum_squares(chunk)
        self.num_backwards += 1
        for state in self.registry.params:
            state.arrived_last = state.arrivals
            state.touched = 0
        self._update_waiting()

    def raise_failure(self) -> None:
        """Raise what went wrong in a lane, if anything did."""
        failure = self.records.failure or self.updater.failure
        if failure is not None:
            raise failure

    # Gradients and updates.

    def _complete(self, chunk: ChunkState) -> None:
        """All gradients that are expected of a chunk have arrived: no op of this pass wants its weights again."""
        chunk.copy_expected = False
        if chunk.span.presence is not Presence.FETCHING:
            self.records.drop(chunk, WEIGHTS)
        self.completed.append((self.num_backwards, max(len(self.pipeline.trace) - 1, 0), chunk.index))
        if self.ranks.world == 1:
            self._gradient_ready(chunk)

    def _reduce(self, chunk: ChunkState) -> None:
        """The plan says that it is the chunk's turn; all ranks are at this point."""
        if self.backward_task is None or chunk.updated:
            return
        self.gradients.reduce(chunk)
        self._gradient_ready(chunk)

    def _reduce_unplanned(self) -> None:
        """Before there is a plan, all ranks meet at each acquire: reduce what is complete on all of them.

        A gradient that some rank never gets is thus left to the end of the pass, in one order everywhere.
        """
        if self.ranks.world == 1 or self.backward_task is None:
            return
        chunks = self.registry.chunks
        complete = torch.tensor([not chunk.missing for chunk in chunks], dtype=torch.int32)
        empty = torch.tensor([chunk.flat_gradient is None for chunk in chunks], dtype=torch.int32)
        self.ranks.min_(agreed := torch.stack([complete, empty]))
        for chunk, is_complete, is_empty in zip(chunks, *agreed.tolist()):
            if is_complete and not is_empty:
                self.gradients.reduce(chunk)
                self._gradient_ready(chunk)

    def _gradient_ready(self, chunk: ChunkState) -> None:
        if self.early_hyper is not None and not chunk.on_device:
            self.waiting.append(chunk)
            self._update_waiting()
        else:
            self._sum_squares(chunk)

    def _update_waiting(self) -> None:
        """Update chunks whose gradients are complete and whose weights nobody needs any more."""
        if not self.waiting:
            return
        self.pipeline.drain_dropped()
        for chunk in list(self.waiting):
            if not chunk.span.holds and not chunk.span.handles:
                self.waiting.remove(chunk)
                chunk.updated = True
                self._begin_update(chunk, self.early_hyper)

    def _announce(self, chunk: ChunkState, hyper: Hyper) -> None:
        """The chunk is updated when it is next needed; until then its device copy is stale."""
        chunk.pending = hyper
        self._make_stale(chunk)

    def _begin_update(self, chunk: ChunkState, hyper: Hyper) -> None:
        if chunk.pending is None:
            self._make_stale(chunk)
        self.pipeline.num_updates_begun += 1
        self.updater.begin(chunk, hyper, urgent=not self.deferred)

    def _make_stale(self, chunk: ChunkState) -> None:
        self.pipeline.invalidate(chunk.span)
        for param in chunk.whole_pieces:
            state = self.registry.params[param]
            torch.autograd.graph.increment_version(state.param)
            state.version = state.param._version

    def _finish_announced(self, chunk: ChunkState) -> None:
        """Wait for the chunk's update: before its next gradient arrives, or its record is read."""
        if chunk.pending is not None:
            self._begin_update(chunk, chunk.pending)
        if chunk.updating is not None:
            if not chunk.updating.done:
                self.records.hurry_all()
            chunk.updating.wait()

    def _sum_squares(self, chunk: ChunkState) -> None:
        """Add up the squares of a complete gradient behind the backward pass, if the norm is asked for."""
        if self.optimizer.max_grad_norm is None or self.num_backwards + 1 < self.optimizer.accumulation_steps:
            return
        job = chunk.gradient_job

        def work() -> NormAccumulator:
            job.wait()
            total = NormAccumulator()
            add_norm(chunk, self.gradients.tensor(chunk), total)
            return total

        chunk.norm_job = self.updater.lane.push(work)

    def _norm(self, chunks: list[ChunkState]) -> float:
        """The global norm of the summed gradients, the same bits for every placement and chunk size."""
        total = NormAccumulator()
        for chunk in chunks:
            if chunk.norm_job is None:
                self._sum_squares_now(chunk)
            total.merge(chunk.norm_job.wait())
        self.ranks.sum_(total.limbs)
        return total.value()

    def _sum_squares_now(self, chunk: ChunkState) -> None:
        backwards, self.num_backwards = self.num_backwards, self.optimizer.accumulation_steps
        self._sum_squares(chunk)
        self.num_backwards = backwards

    def _completions(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(position, chunk), in order, of gradients that were complete on every rank, and those of them due for an update."""
        completed = self.completed
        if self.ranks.world > 1:
            positions = torch.full((self.optimizer.accumulation_steps, len(self.registry.chunks)), NEVER)
            for backward, position, chunk in completed:
                positions[backward, chunk] = position
            last = self.ranks.max_(positions).tolist()
            completed = [(b, p, c) for b, row in enumerate(last) for c, p in reversed([*enumerate(row)]) if p < NEVER]
            completed.sort(key=lambda entry: entry[1])
        final = -1 if self.deferred else self.optimizer.accumulation_steps - 1
        return [(p, c) for _, p, c in completed], [(p, c) for b, p, c in completed if b == final]

    def _hyper(self) -> Hyper:
        return Hyper(self.optimizer.snapshot(), self.optimizer.decoupled, 1.0 / self.ranks.world)

    def _abandon_backward(self) -> None:
        """The last backward pass raised."""
        self.backward_task = None
        self.failed = True
        self.hooks.release_all()
        self.torn = self.torn or any(chunk.updated for chunk in self.registry.chunks)

    def _reset_step(self, torn: bool = False) -> None:
        """Nothing has happened since the last step."""
        self.backward_task: int | None = None
        self.num_backwards = 0
        self.early_hyper: Hyper | None = None
        self.torn = torn
        self.failed = False  # a backward pass raised
        self.late = False
        self.waiting: list[ChunkState] = []
        self.completed: list[tuple[int, int, int]] = []  # (backward pass, position in the trace, chunk)
        if self._started:
            self.first_step = False
            for chunk in self.registry.chunks:
                chunk.updated = False
                chunk.update_expected = False

    @staticmethod
    def _in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed")

    # Values.

    @contextlib.contextmanager
    def _host_segments(self, chunk: ChunkState, *, change: bool = False):
        """The shard's segments as host tensors; with `change` they are written back."""
        if chunk.on_device:
            state = self.updater.device_state(chunk)
            yield {name: tensor if change else tensor.cpu() for name, tensor in state.items()}
            return
        kinds = (WEIGHTS, STATES) if chunk.trainable else (WEIGHTS,)
        entries = {}
        for kind in kinds:
            request = self.records.request(chunk, kind, urgent=True)
            self.records.hurry(request)
            entries[kind] = request.wait()
            self.records.settle(entries[kind])
        if change:
            self.records.begin_update(*entries.values())
        memory = [entry.memory for entry in entries.values()]
        try:
            yield segments(chunk, memory[0], memory[1] if len(memory) > 1 else None)
        finally:
            if change:
                self.records.write_back(chunk, entries)
            else:
                for kind, entry in entries.items():
                    self.records.unpin(chunk, kind, entry)

    def _keep_written(self, span: SpanState) -> None:
        """Make what forward passes wrote to a span that is still home its value."""
        written = span.written()
        if written:
            self._adopt_values(span)
            for state in written:
                state.version = state.param._version

    @torch.no_grad()
    def _adopt_values(self, span: SpanState, before: torch.Tensor | None = None) -> None:
        """Make what is in a span's device storage its value; an element that changed loses its residual."""
        if self.ranks.world > 1:
            values = span.flat.cpu()
            self.ranks.broadcast_(values)
            span.flat.copy_(values)
        if before is not None and torch.equal(before.view(torch.uint8), span.flat.view(torch.uint8)):
            return
        for index in span.span.chunks:
            chunk = self.registry.chunks[index]
            self._finish_announced(chunk)
            begin = chunk.chunk.offset + self.ranks.rank * chunk.chunk.shard_numel
            here = slice(begin, begin + chunk.record.numel)
            new = span.flat[here]
            with self._host_segments(chunk, change=True) as shard:
                old = before[here] if before is not None else shard["weight"].to(new.device)
                changed = new.view(torch.int16 if new.element_size() == 2 else torch.int32) != old.view(
                    torch.int16 if new.element_size() == 2 else torch.int32
                )
                if shard["weight"].data_ptr() != new.data_ptr():
                    shard["weight"].copy_(new)
                if "residual" in shard:
                    shard["residual"].masked_fill_(changed.to(shard["residual"].device), 0)

    # Start.

    def _deferred(self) -> bool:
        optimizer, update = self.optimizer, self.config.update
        if update == "auto":
            return optimizer is not None and optimizer.max_grad_norm is not None
        if update == "backward" and optimizer is not None and optimizer.max_grad_norm is not None:
            raise ConfigError(
                "update='backward' with max_grad_norm: the norm is known only after the backward pass. Use update='deferred' "
                "or 'auto', or leave out max_grad_norm."
            )
        return update == "deferred"

    @torch.inference_mode(False)
    def _start(self) -> None:
        """Lay out, place, reserve and write the initial records; then let the parameters go."""
        if self._started:
            return
        self._check_open()
        model = self._model()
        config, device, ranks = self.config, self.device, self.ranks
        self.deferred = self._deferred()
        self.accumulating = self.optimizer is not None and self.optimizer.accumulation_steps > 1
        self.device_budget, host_budget = _budgets(config, device, ranks)
        specs = [ParameterSpec(name, p.numel(), config.dtype, p.requires_grad) for name, p in self._named]
        unit = ranks.world * BLOCK_NUMEL
        if config.chunk_mib is None:
            numel = planner.chunk_numel(
                sum(spec.numel for spec in specs),
                host_budget=host_budget,
                device_budget=self.device_budget,
                world=ranks.world,
                unit=unit,
            )
        else:
            numel = default_chunk_numel(config.chunk_mib, ranks.world)
        self.layout = layout(specs, chunk_numel=numel, world=ranks.world)
        records = [record_layout(c.shard_used(ranks.rank), config.dtype, c.trainable) for c in self.layout.chunks]
        itemsize = TORCH_DTYPES[config.dtype].itemsize
        trainable = [spec.numel * itemsize for spec in specs if spec.trainable]
        self.placement = planner.place(
            self.layout,
            records,
            weights=config.weights,
            states=config.states,
            keep=config.residency == "auto",
            deferred=self.deferred or self.accumulating,
            gradient_itemsize=4 if self.accumulating else None,
            device_budget=self.device_budget,
            host_budget=host_budget,
            held_nbytes=_held_nbytes(model, [p for _, p in self._named], self.layout, itemsize),
            op_gradient_nbytes=max(trainable, default=0),
        )
        self.swap = self._make_swap(records)
        try:
            self._build(model, records)
        except BaseException:
            if self.swap is not None:
                self.swap.close()
            raise
        self._started = True
        self.first_step = True
        self._reset_step()
        self.first_step = True

    def _make_swap(self, records) -> Swap | None:
        placement, ranks = self.placement, self.ranks
        total = int(ranks.max_(torch.tensor([placement.nvme_nbytes])).item())
        if not total:
            return None
        if self.config.creates_nvme:
            for path in self.config.nvme:
                path.mkdir(exist_ok=True)
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
        local_rank = int(os.environ.get("LOCAL_RANK", ranks.rank % local_world))
        run = None
        if ranks.world > 1:
            token = torch.tensor(list(os.urandom(8)), dtype=torch.int64)
            run = bytes(ranks.broadcast_(token).tolist()).hex()
        swap = Swap(self.config.nvme, rank=local_rank, world=local_world, run=run)
        self.extents = []
        for record, weights, states in zip(records, placement.weights, placement.states):
            pair = []
            for home, nbytes in ((weights, record.weight_nbytes), (states, record.states_nbytes)):
                pair.append(swap.allocate(nbytes) if home == "nvme" and nbytes else None)
            self.extents.append(pair)
        try:
            swap.reserve()
        except BaseException:
            swap.close()
            raise
        return swap

    def _build(self, model: nn.Module, records) -> None:
        config, device, ranks, placement = self.config, self.device, self.ranks, self.placement
        cuda = device.type == "cuda"
        if not cuda:
            _keep_freed_memory()
        bank = torch.full((len(self._named),), float("nan"), dtype=TORCH_DTYPES[config.dtype], device=device)
        params = [
            ParameterState(index, name, param, bank[index].expand(param.shape))
            for index, (name, param) in enumerate(self._named)
        ]
        itemsize = TORCH_DTYPES[config.dtype].itemsize
        spans = [SpanState(s, [params[i] for i in s.params], device, s.numel * itemsize) for s in self.layout.spans]
        chunks = [
            ChunkState(chunk, record, chunk.shard_pieces(ranks.rank), spans[chunk.span])
            for chunk, record in zip(self.layout.chunks, records)
        ]
        self.registry = Registry(self.layout, params, spans, chunks)
        self.tier = DeviceTier(placement.span_budget_nbytes)
        self.arena = Arena(pin=cuda)
        self.lock = threading.Condition()
        keep = config.residency == "auto"

        next_uses = {
            WEIGHTS: lambda chunk: self.pipeline.next_weights_use(chunks[chunk]),
            STATES: lambda chunk: self.pipeline.next_states_use(chunks[chunk]),
        }
        caches = {}
        for kind, count, homes in (
            (WEIGHTS, placement.weight_slots, placement.weights),
            (STATES, placement.state_slots, placement.states),
        ):
            sizes = [r.weight_nbytes if kind == WEIGHTS else r.states_nbytes for r in records]
            slots = Slots(self.arena, kind, max(sizes) or 1, count) if count else None
            caches[kind] = HostCache(kind, slots, self.lock, next_uses[kind])
            for index, area in self._areas({i: n for i, n in enumerate(sizes) if homes[i] == "host"}).items():
                caches[kind].add_resident(index, area)
        for chunk, weights, states in zip(chunks, placement.weights, placement.states):
            chunk.weights_home, chunk.states_home = weights, states if chunk.trainable else weights
            if self.swap is not None:
                chunk.weights_extent, chunk.states_extent = self.extents[chunk.index]
        self.records = Records(self.swap, caches, self.lock, self.events, keep)
        self.pipeline = Pipeline(self.registry, self.tier, self.records, ranks, device, self.events, keep=keep)
        gradient_itemsize = 4 if self.accumulating else itemsize
        gradient_nbytes = {c.index: c.record.numel * gradient_itemsize for c in chunks if c.trainable and not c.on_device}
        pool = None
        if gradient_nbytes and not placement.gradient_areas:
            pool = Slots(self.arena, "gradient", max(gradient_nbytes.values()) or 1, placement.gradient_slots)
        staging = None
        if cuda:
            largest = max(chunk.record.numel for chunk in chunks) * itemsize
            staging = self.arena.region(max(largest, 1)).tensor(torch.uint8, 0, largest)
        self.gradients = Gradients(
            self.registry,
            ranks,
            self.tier,
            self.pipeline.gg,
            self.pipeline.gather_stream if cuda else None,
            device,
            self.events,
            slots=pool,
            areas=self._areas(gradient_nbytes) if placement.gradient_areas else {},
            staging=staging,
            accumulate=self.accumulating,
            limit_nbytes=placement.gradient_limit_nbytes - max((p.numel * itemsize for p in params if p.trainable), default=0),
        )
        self.updater = Updater(self.records, self.gradients, params, ranks.rank, self.events, threads=0)
        self.gradients.updates_will_free = self.updater.will_free_gradients
        self.gradients.raise_failure = self.raise_failure
        self.pipeline.begin_update = lambda chunk: self._begin_update(chunk, chunk.pending)
        self.pipeline.in_backward = lambda: self.backward_task is not None
        self.pipeline.reduce = self._reduce
        self.pipeline.reduce_unplanned = self._reduce_unplanned
        self.pipeline.read_states = self._read_states
        self.pipeline.write_back = self._adopt_values
        per_span = max(1, round(len(chunks) / len(spans)))
        self.pipeline.read_ahead = max(4, placement.weight_slots // per_span - 2) if keep else 4
        self.pipeline.states_ahead = max(1, placement.state_slots - 2)
        for span in spans:
            span.pinned = placement.pinned
            if placement.pinned:
                self.tier.book(span.nbytes)
                self.tier.allocate(span)
        self._write_initial()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self.hooks = Hooks(self, model, self.registry, self.pipeline)
        _disarm_guard(model)

    def _areas(self, nbytes: dict[int, int]) -> dict[int, Area]:
        """Fixed places, page-aligned, of one region."""
        offsets, total = {}, 0
        for index, size in nbytes.items():
            offsets[index] = total
            total += -(-size // 4096) * 4096
        if not total:
            return {index: Area(self.arena.region(1), 0, 0) for index in nbytes}
        region = self.arena.region(total)
        return {index: Area(region, offset, nbytes[index]) for index, offset in offsets.items()}

    @torch.no_grad()
    def _write_initial(self) -> None:
        """Write every chunk's first record, one span's parameters at a time, and let these go."""
        for span in self.registry.spans:
            values = {state.index: self._initial(state.index, state.param) for state in span.params}
            for index in span.span.chunks:
                chunk = self.registry.chunks[index]
                if chunk.on_device:
                    self._fill_on_device(chunk, values)
                    continue
                kinds = (WEIGHTS, STATES) if chunk.trainable else (WEIGHTS,)
                entries = {kind: self.records.fresh(chunk, kind) for kind in kinds}
                self.records.begin_update(*entries.values())
                memory = [entry.memory for entry in entries.values()]
                self._fill(chunk, segments(chunk, memory[0], memory[1] if len(memory) > 1 else None), values)
                self.records.write_back(chunk, entries)
            del values
            for state in span.params:
                state.param.data = state.placeholder
                state.version = state.param._version
        self.records.flush()

    def _fill(self, chunk: ChunkState, shard: dict[str, torch.Tensor], values: dict[int, torch.Tensor]) -> None:
        """A shard's first record: weights, their residuals, and moments of zero."""
        for tensor in shard.values():
            tensor.zero_()
        for piece in chunk.pieces:
            part = slice(piece.start, piece.start + piece.numel)
            value = values[piece.param][piece.param_start : piece.param_start + piece.numel]
            if "residual" in shard:
                split_master(value.float().contiguous(), out=(shard["weight"][part], shard["residual"][part]))
            else:
                shard["weight"][part].copy_(value)

    def _fill_on_device(self, chunk: ChunkState, values) -> None:
        numel = chunk.record.numel
        segments_ = {s.name: torch.zeros(numel, dtype=TORCH_DTYPES[s.dtype]) for s in chunk.record.segments}
        self._fill(chunk, segments_, values)
        begin = chunk.chunk.offset + self.ranks.rank * chunk.chunk.shard_numel
        chunk.span.flat[begin : begin + numel].copy_(segments_.pop("weight"))
        chunk.device_states = {name: tensor.to(self.device) for name, tensor in segments_.items()}
        self.tier.book(chunk.record.states_nbytes)

    def _read_states(self, chunk: ChunkState) -> None:
        if chunk.states_home == "nvme" and chunk.trainable and not chunk.updated and chunk.pending is None:
            self.records.request(chunk, STATES, pin=False)


def engine_of(model: nn.Module) -> Engine:
    """The engine that trains a model. Raises ConfigError if none does."""
    reference = _engines.get(model)
    engine = reference() if reference is not None else None
    if engine is None:
        raise ConfigError(f"{type(model).__name__} is in no engine: build it inside infinity.init or call infinity.offload")
    return engine


def offload(model: nn.Module, config: Config | None = None) -> Engine:
    """Take a model that already exists: its parameters leave for the tiers once an optimizer is made or it first runs."""
    if any(owner_of(param) is not None for param in model.parameters()):
        raise UsageError(f"{type(model).__name__} is in an engine already")
    return Engine(model, config or Config())


@contextlib.contextmanager
def gathered(params: torch.Tensor | Iterable[torch.Tensor]):
    """Parameters of one engine are whole, on the device, inside the block; changes made there are kept.

    Every rank must enter it; rank 0's values count. A change of a bf16 weight sets its fp32 master to that weight.
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if not params:
        yield
        return
    engine = owner_of(params[0])
    if engine is None:
        raise ConfigError("infinity.gathered: the parameter is in no engine")
    with engine.gathered(params):
        yield


_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref] = weakref.WeakKeyDictionary()


def _device(config: Config) -> torch.device:
    name = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={name!r}: there is no CUDA device here; use device='cpu'")
        index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every floating-point parameter with elements, once, in registration order."""
    return [(name, p) for name, p in model.named_parameters() if p.is_floating_point() and p.numel()]


def _budgets(config: Config, device: torch.device, ranks: Ranks) -> tuple[int, int]:
    """Device and host bytes of this rank: as configured, else a share of what is free, the same on all ranks."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
    free_host = psutil.virtual_memory().available // local_world
    if device.type == "cuda":
        free_device = torch.cuda.mem_get_info(device)[0]
        device_share, host_share = free_device // 2, int(free_host * 0.8)
    else:
        device_share, host_share = free_host // 4, free_host // 2
    auto = ranks.min_(torch.tensor([device_share, host_share], dtype=torch.int64)).tolist()
    given = (config.device_memory, config.host_memory)
    return tuple(share if value == "auto" else value for value, share in zip(given, auto))


def _held_nbytes(model: nn.Module, params, layout_, itemsize: int) -> int:
    """The most that an op and the ops around it hold: spans of a module's own parameters and of its ancestors'."""
    index = {id(param): i for i, param in enumerate(params)}
    nbytes = {span.index: span.numel * itemsize for span in layout_.spans}
    most = 0

    def visit(module: nn.Module, held: frozenset[int]) -> None:
        nonlocal most
        own = {layout_.homes[index[id(p)]].span for p in module._parameters.values() if p is not None and id(p) in index}
        held = held | own
        most = max(most, sum(nbytes[span] for span in held))
        for child in module._modules.values():
            if child is not None:
                visit(child, held)

    visit(model, frozenset())
    return most


def _guard_before_start(engine: Engine, model: nn.Module) -> None:
    """Start the engine when the model runs before an optimizer was made."""

    def begin(module, args):
        engine._start()
        engine.hooks._before(module, args)

    model.__dict__["_infinity_start"] = model.register_forward_pre_hook(begin, prepend=True)


def _guard_after_close(model: nn.Module | None, params: list[ParameterState]) -> None:
    """Refuse to run a model whose parameters are placeholders; it runs again once the user has given them values."""
    away = [(state.name, state.param, state.placeholder.data_ptr()) for state in params]

    def refuse(module, args):
        for name, param, address in away:
            if param.data_ptr() == address:
                raise UsageError(f"the engine is closed and {name} is only a placeholder; read what is to be kept before close()")

    if model is not None:
        model.register_forward_pre_hook(refuse, prepend=True)


def _disarm_guard(model: nn.Module) -> None:
    handle = model.__dict__.pop("_infinity_start", None)
    if handle is not None:
        handle.remove()


def _keep_freed_memory() -> None:
    """Let the C library keep large freed blocks: spans come and go, and the kernel would zero their pages each time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
