"""Values of parameters: writes the first records, reads and changes values, and adopts values that a program wrote on the device.

Knows segments of records in host or device memory. Must not know the time of a call. All ranks make each call at the same point.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch

from infinity.formats.dtypes import TORCH_DTYPES, as_integers
from infinity.formats.format import AVERAGE, Format, Segment, scale_name
from infinity.optim import average
from infinity.optim.average import AverageStep
from infinity.optim.shard import Shard, codec_of, states_stay_zero
from infinity.plan.packing import Piece
from infinity.plan.record import STATES, WEIGHTS, Record
from infinity.plan.tiers import DEVICE
from infinity.system.ranks import Ranks
from infinity.tiers.arithmetic import advance_average
from infinity.tiers.chunk_state import ChunkState, Registry
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.record_mover import RecordMover, segments
from infinity.tiers.span_state import DeviceTier, SpanState
from infinity.tiers.updates import Updater


Change = Callable[[torch.Tensor, dict[str, torch.Tensor]], object]


class Values:
    """Reads and writes whole parameters. Each method first finishes the chunk's announced or running update."""

    def __init__(
        self,
        registry: Registry,
        records: RecordMover,
        updater: Updater,
        tier: DeviceTier,
        ranks: Ranks,
    ):
        self.registry = registry
        self.records = records
        self.updater = updater
        self.tier = tier
        self.ranks = ranks
        self._last_average: Callable[[], AverageStep | None] = lambda: None

    def follow_average(self, last_average: Callable[[], AverageStep | None]) -> None:
        """Bring averages up to date before the program changes weights. last_average(): the average after the last step, None without one."""
        self._last_average = last_average

    def read(self, state: ParameterState, *, weight_only: bool = False) -> dict[str, torch.Tensor]:
        """The segments of the whole parameter by name, on the CPU, in the dtypes of the record; 8-bit moments in fp32. A segment with one value
        for each element has the parameter's shape. Other segments are 1-D. weight_only: only the entry "weight", in the compute dtype."""
        found: dict[str, list[torch.Tensor]] = {}
        for chunk in self.registry.chunks_of(state):
            self.updater.finish(chunk)
            self.keep_written(chunk.span)
            piece = chunk.whole_pieces[state.index]
            with self.shard(chunk, weight_only=weight_only) as shard:
                if weight_only and not chunk.on_device:
                    shard = {"weight": shard.codec.weights(shard)}
                for segment in chunk.record.segments if not weight_only else (Segment("weight", chunk.record.format.compute),):
                    dtype, block = TORCH_DTYPES[segment.dtype], segment.block
                    part = torch.zeros(segment.count(chunk.chunk.shard_numel), dtype=dtype, device="cpu")
                    part[: segment.count(chunk.record.numel)] = shard[segment.name]
                    whole = self.ranks.all_gather_slices(part.view(torch.uint8)).view(dtype)
                    mine = whole[piece.start // block : -(-(piece.start + piece.numel) // block)]
                    found.setdefault(segment.name, []).append(mine.clone())
        values = {name: torch.cat(parts) for name, parts in found.items()}
        if not weight_only and (format := self.registry.chunks_of(state)[0].record.format).has_coded_moments:
            coded = Shard(format, values)
            values |= {name: coded.moment(name) for name in format.moments if "/" not in name}
            values = {name: value for name, value in values.items() if name not in map(scale_name, format.moments)}
        return {name: value.reshape(state.shape) if value.numel() == state.numel else value for name, value in values.items()}

    @torch.no_grad()
    def write_weight(self, state: ParameterState, value: torch.Tensor) -> None:
        """Set the weight and the master of a parameter. Moments stay. value: 1-D [numel] on the CPU, of any floating dtype. If value has the
        dtype of the weight, the elements that do not change keep their masters."""
        for chunk in self.registry.chunks_of(state):
            self.updater.finish(chunk)
            self.keep_written(chunk.span)
            with self.shard(chunk, change=True) as shard:
                self._advance_average(chunk, shard)
                for piece in chunk.pieces:
                    if piece.param == state.index:
                        part = value[piece.param_start : piece.param_start + piece.numel]
                        there = shard.part(piece.start, piece.start + piece.numel)
                        on_cpu = there.cpu()
                        weights = on_cpu.codec.weights(on_cpu)
                        if part.dtype is weights.dtype:
                            same = as_integers(weights) == as_integers(part.contiguous())
                            part = torch.where(same, on_cpu.masters(), part.float())
                        there.put(part, _stored_scales(value, piece, shard.format))
            self.updater.take_snapshot(chunk)
            if chunk.on_device and self.ranks.are_several:
                piece = chunk.whole_pieces[state.index]
                part = value[piece.param_start : piece.param_start + piece.numel]
                there = chunk.span.flat[chunk.chunk.offset + piece.start :][: piece.numel]
                there.copy_(codec_of(chunk.record.format).rounded(part))

    def change_masters(self, chunk: ChunkState, params: set[int], change: Change) -> None:
        """Call change(master, moments) for the elements of some parameters in a chunk; see `Optimizer.change_weights`. params: by index. The
        device copy is stale, or the record is on the device."""
        with self._shard_without_copy(chunk) as shard:
            self._advance_average(chunk, shard)
            for piece in chunk.pieces:
                if piece.param in params:
                    part = shard.part(piece.start, piece.start + piece.numel)
                    segments = part.format.moment_segments
                    masters = part.masters().clone()
                    names = [each.name for each in segments if each.name not in map(scale_name, part.format.moments)]
                    change(masters, {name: part.moment(name).clone() for name in names})
                    part.put(masters)
        self.updater.take_snapshot(chunk)

    def read_average(self, state: ParameterState, step: AverageStep) -> torch.Tensor:
        """The average of a parameter after the last step: fp32, in its shape, on the CPU. Without an average, the weight in fp32."""
        chunks = self.registry.chunks_of(state)
        if (format := chunks[0].record.format).averaged and step.number:
            for chunk in chunks:
                self.settle_average(chunk, step)
            return self.read(state)[AVERAGE]
        return Shard(format, {name: value.reshape(-1) for name, value in self.read(state).items()}).masters().clone().reshape(state.shape)

    def settle_average(self, chunk: ChunkState, step: AverageStep) -> None:
        """Bring the average of a chunk up to the last step, if the chunk had no update meanwhile."""
        self.updater.finish(chunk)
        if chunk.num_averaged < step.number:
            self.keep_written(chunk.span)
            with self.shard(chunk, change=True) as shard:
                advance_average(chunk, shard, step)

    def _advance_average(self, chunk: ChunkState, shard: Shard) -> None:
        """The program changes weights: bring the average up to the last step with the old ones."""
        if chunk.record.format.averaged and (step := self._last_average()) is not None:
            advance_average(chunk, shard, step)

    def exchange_average(self, chunk: ChunkState) -> None:
        """Weights and average of a chunk change places. The device copy is stale, or the record is on the device."""
        with self._shard_without_copy(chunk) as shard:
            average.exchange(shard)
        self.updater.take_snapshot(chunk)

    @contextlib.contextmanager
    def _shard_without_copy(self, chunk: ChunkState):
        """Like `shard` with change=True, after the last copy to the device: ops that were launched before may still wait for this copy."""
        if chunk.copy_job is not None and (event := chunk.copy_job.wait()) is not None:
            event.synchronize()
        with self.shard(chunk, change=True) as shard:
            yield shard

    def keep_written(self, span: SpanState) -> bool:
        """Adopt the values that forward passes wrote to parameters of a HOME span. Returns whether there were any."""
        if written := span.written():
            self.adopt(span, written)
            for state in written:
                state.version = state.counter._version
        return bool(written)

    @torch.no_grad()
    def adopt(self, span: SpanState, written: Sequence[ParameterState], before: torch.Tensor | None = None) -> bool:
        """Copy the contents of a span's device storage to the records. The new value of a changed element is also its master. before: the
        contents before the write. Without `before`, a snapshot and a host copy, all elements of `written` count as changed. Returns whether
        there was anything to copy."""
        if self.ranks.are_several:
            values = span.flat.cpu()
            self.ranks.broadcast_(values)
            span.flat.copy_(values)
        if before is not None and torch.equal(before.view(torch.uint8), span.flat.view(torch.uint8)):
            return False
        for index in span.span.chunks:
            chunk = self.registry.chunks[index]
            self.updater.finish(chunk)
            new = chunk.weights_on_device
            with self.shard(chunk, change=True) as shard:
                self._advance_average(chunk, shard)
                before_here = before if before is not None else span.snapshot
                if before_here is None and chunk.on_device:
                    changed = self._parts_of(chunk, written)
                else:
                    old = before_here[chunk.shard] if before_here is not None else shard.codec.weights(shard).to(new.device)
                    changed = as_integers(new) != as_integers(old)
                shard.codec.adopt(shard, new, changed)
            self.updater.take_snapshot(chunk)
        return True

    def _parts_of(self, chunk: ChunkState, params: Sequence[ParameterState]) -> torch.Tensor:
        """A mask of the shard's elements that belong to these parameters: bool [shard_used] on the device."""
        found = torch.zeros(chunk.record.numel, dtype=torch.bool, device=chunk.span.flat.device)
        indices = {state.index for state in params}
        for piece in chunk.pieces:
            if piece.param in indices:
                found[piece.start : piece.start + piece.numel] = True
        return found

    @torch.no_grad()
    def write_first(self, span: SpanState, values: dict[int, torch.Tensor]) -> None:
        """Write the first records of a span's chunks, and make the parameters placeholders. values: by parameter, 1-D, any floating dtype."""
        for chunk in self.registry.chunks_in(span):
            kinds: tuple[str, ...] = ()
            if chunk.on_device:
                self._place_states(chunk, torch.empty(chunk.record.states_nbytes, dtype=torch.uint8, device=span.flat.device))
            elif all(states_stay_zero(chunk.record.format, values[piece.param].dtype) for piece in chunk.pieces):
                kinds = (WEIGHTS,)  # bytes that nothing has written count as zeros
            with self.filled(chunk, *kinds, is_first=True) as shard:
                for piece in chunk.pieces:
                    value = values[piece.param][piece.param_start : piece.param_start + piece.numel]
                    if chunk.record.format.is_coded:
                        value = value.to(span.storage.device)  # the device codes faster
                    scales = _stored_scales(values[piece.param], piece, shard.format)
                    shard.part(piece.start, piece.start + piece.numel).put(value, scales)
        if chunk.on_device:
            self.make_snapshot(span)
        for state in span.params:
            state.leave()

    @contextlib.contextmanager
    def filled(self, chunk: ChunkState, *kinds: str, is_first: bool = False):
        """The segments of the shard, set to zero. The caller fills them inside the block. kinds: of a record off the device; by default all.
        is_first: this is the first record, and resident memory is still zero."""
        if chunk.on_device:
            chunk.begin_change()
            shard = self.updater.device_state(chunk)
            for tensor in shard.values():
                tensor.zero_()
            yield shard
            self.updater.take_snapshot(chunk)
            return
        with self.records.lease(chunk, *kinds, write=True, fresh=True) as lease:
            shard, format = lease.shard, chunk.record.format
            kind_of = {segment.name: WEIGHTS if segment in format.weight_segments else STATES for segment in format.segments}
            for name, tensor in shard.items():
                if not (is_first and lease.entries[kind_of[name]].resident):
                    tensor.zero_()
            yield shard

    def to_device(self, chunk: ChunkState) -> None:
        """Move a record, which no update is using, to the device. The weights are there already. The old home keeps the place, but no value."""
        with self.records.lease(chunk, STATES) as lease:
            states = lease.entries[STATES].memory.tensor(torch.uint8, 0, chunk.record.states_nbytes).to(chunk.span.flat.device, copy=True)
        self._place_states(chunk, states)
        chunk.weights_home = chunk.states_home = DEVICE
        for kind in (WEIGHTS, STATES):
            self.records.discard(chunk, kind)

    def to_home(self, chunk: ChunkState) -> None:
        """Move a record from the device back to its homes. A copy of the weights may stay on the device."""
        state = self.updater.device_state(chunk)
        with self.records.lease(chunk, write=True, fresh=True) as lease:
            for name, segment in lease.shard.items():
                segment.copy_(state[name])
        chunk.return_home()
        chunk.device_states = None
        self.tier.book(-chunk.record.states_nbytes)

    def exchange_homes(self, visitors: Iterable[ChunkState]) -> None:
        """Records that stay at home on NVMe take the host memory of visitors, which take the extents instead.

        The first chunks come first, because their updates have the least time. All records of a pair have the same bytes in each tier. A copy
        that another thread uses keeps its home.
        """
        found: list[tuple[ChunkState, ChunkState, str]] = []
        for kind in (WEIGHTS, STATES):
            spare: dict[Record, list[ChunkState]] = {}
            for chunk in visitors:
                if chunk.trainable and chunk.homes[kind].is_host:
                    spare.setdefault(chunk.record, []).append(chunk)
            away = [chunk for chunk in self.registry.chunks if chunk.trainable and not chunk.on_device and chunk.homes[kind].is_storage]
            found += [(spare[chunk.record].pop(), chunk, kind) for chunk in away if spare.get(chunk.record)]
        for _, chunk, _ in found:
            self.updater.finish(chunk)
            chunk.copy_for_snapshot()
        if found:
            self.records.flush()  # copies that are still written keep their slots
        for visitor, chunk, kind in found:
            cache = self.records.caches[kind]
            with self.records.lock:
                if cache.residents[visitor.index].pins:
                    continue
                area = cache.residents.pop(visitor.index).memory  # from here on, no other thread finds it
            nbytes = chunk.record.weight_nbytes if kind == WEIGHTS else chunk.record.states_nbytes
            with self.records.lease(chunk, kind) as lease:
                area.buffer[:nbytes] = lease.entries[kind].memory.buffer[:nbytes]
            with self.records.lock:
                borrowed = cache.entries.get(chunk.index)
                if borrowed is None or cache.drop(borrowed):
                    cache.add_resident(chunk, area)
                    chunk.exchange_homes(visitor, kind)
                else:
                    cache.add_resident(visitor, area)
            self.records.discard(visitor, kind)  # late updates in the redo log, which has come with the extent

    def _place_states(self, chunk: ChunkState, memory: torch.Tensor) -> None:
        """Make device memory the place of a record's states. memory: uint8 [states_nbytes], one block for all states."""
        chunk.device_states = segments(
            chunk.record, STATES, lambda dtype, offset, numel: memory[offset : offset + numel * dtype.itemsize].view(dtype)
        )
        self.tier.book(chunk.record.states_nbytes)

    def keeps_snapshot(self, span: SpanState) -> bool:
        """Whether the span needs a snapshot while its records are on the device: [Note: weights written in forward] in span_state.py."""
        masters = {segment.name for chunk in self.registry.chunks_in(span) for segment in chunk.record.segments}
        return bool(masters & {"residual", "master"}) and any(state.written_in_forward for state in span.params)

    def make_snapshot(self, span: SpanState) -> None:
        """Make the first snapshot after the span's records have moved to the device, if the span needs one."""
        if self.keeps_snapshot(span):
            span.snapshot = span.flat.clone()
            self.tier.book(span.nbytes)

    def drop_snapshot(self, span: SpanState) -> None:
        """Free the snapshot after the span's records have left the device."""
        if span.snapshot is not None:
            span.snapshot = None
            self.tier.book(-span.nbytes)

    @contextlib.contextmanager
    def shard(self, chunk: ChunkState, *, change: bool = False, weight_only: bool = False):
        """The segments of the shard. change: the record keeps changes that the block makes. Only such segments may be on the device."""
        if chunk.on_device:
            if change:
                chunk.begin_change()
            state = self.updater.device_state(chunk)
            yield state if change else state.cpu()
            return
        with self.records.lease(chunk, *((WEIGHTS,) if weight_only else ()), write=change) as lease:
            yield lease.shard


def _stored_scales(source, piece: Piece, format: Format) -> torch.Tensor | None:
    """The scales with which a file stores a quantised piece. None if the piece is no part of such a file, or the format is another one."""
    find = getattr(source, "scales", None)
    return find(format.name, piece.param_start, piece.numel) if find is not None and format.is_coded else None
