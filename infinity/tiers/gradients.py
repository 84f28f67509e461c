"""Collects gradients: from autograd to the place where the update finds them, on the device or in host memory.

Knows chunks and when they are complete. Must not know when or how gradients are used. On one rank, each parameter's gradient goes to the
chunk's shard at once; the gc lane copies it. On several ranks, a flat buffer of the chunk is reduce-scattered first (gradient_reduction.py).
The gradient of a record on the device stays there. A gradient that waits for step() also stays, if host memory has no place and the device
has room.
"""

# [Note: who holds gradients]
# The gc lane pins a chunk's gradient shard during an addition. The update lane pins the shard during the update. Between the two, the shard
# may leave for NVMe if another chunk needs the slot. A lane that pins a shard never waits for the other lane or for the training thread. An
# update that has begun takes the slots of records that were only read ahead. Two slots are therefore enough, even if a pass completes all
# chunks late. If the next update in the lane needs nothing more from the gc lane, the gc lane waits for the slot which that update frees.
# Otherwise the gc lane writes the gradient with the farthest use to NVMe. (If that update must then read back its own gradient, another
# gradient is written.)
# A gradient that has no extent on NVMe cannot leave a slot. So the update lane brings such a gradient from the device itself, right before
# the update, and no other gradient of this kind is in a slot meanwhile.

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from infinity.formats.dtypes import TORCH_DTYPES
from infinity.plan.host_memory import MIN_GRADIENT_SLOTS
from infinity.plan.record import GRADIENTS
from infinity.system.events import now
from infinity.system.lanes import Job, Lane
from infinity.system.streams import current_stream, keep_for
from infinity.system.threads import monitor
from infinity.tiers.bytes_in_flight import BytesInFlight
from infinity.tiers.chunk_state import ChunkState, Registry
from infinity.tiers.gradient_adder import GradientAdder
from infinity.tiers.gradient_memory import GradientMemory
from infinity.tiers.gradient_reduction import ReduceScatter
from infinity.tiers.gradient_state import DeviceShard
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.record_mover import Lease, RecordMover

MAX_BATCH_NBYTES = 4 << 20  # of a batch, unless a single gradient is larger
SMALL_NBYTES = 256 << 10  # a smaller gradient is not worth a change of threads, and leaves together with the next one


@dataclasses.dataclass
class Batch:
    """Parts of one chunk's gradient that leave the device together.

    parts: (gradient, start in the shard, whether the parameter has no earlier gradient there, CUDA event after which the gradient is complete).
    sent_nbytes: device bytes that are free when all parts have left.
    """

    chunk: ChunkState
    parts: list[tuple[torch.Tensor, int, bool, object]] = dataclasses.field(default_factory=list)
    nbytes: int = 0
    sent_nbytes: int = 0
    job: Job | None = None


class Gradients:
    """Collects gradients, in each chunk's own dtype. accumulate: in fp32, since micro-batches add up.

    spill: write gradients to NVMe before their slots are wanted, because gradients wait for step() and slots are fewer than chunks.
    limit_nbytes: if more device bytes are on their way to host memory, the training thread waits.
    """

    def __init__(
        self,
        registry: Registry,
        records: RecordMover,
        reduce_scatter: ReduceScatter,
        *,
        staging: torch.Tensor | None,
        accumulate: bool,
        spill: bool,
        limit_nbytes: int,
    ):
        self.registry = registry
        self.records = records
        self.reduce_scatter = reduce_scatter
        self.ranks, self.tier = reduce_scatter.ranks, reduce_scatter.tier
        self.device, self.events = reduce_scatter.device, reduce_scatter.events
        self.spill = spill
        self.failure = records.failure  # shared with the gc lane: without a failed transfer's bytes, no update may run
        self.gc = Lane("gc", self.failure, "the copy to host memory of the gradient")
        self.adder = GradientAdder(self.device, self.events, staging=staging, accumulate=accumulate)
        self.memory = GradientMemory(self.tier, self.device, self.adder.stream)
        self.in_flight = BytesInFlight(limit_nbytes, self.tier, self.gc, self.events, self.failure)
        self._num_arrivals = 0
        self._lock = monitor()
        self._batch: Batch | None = None  # the last batch in the gc lane's queue, until the lane begins with it; guarded by the lock

    def dtype(self, chunk: ChunkState) -> torch.dtype:
        return TORCH_DTYPES[chunk.chunk.format.gradient]

    @contextlib.contextmanager
    def shard(self, chunk: ChunkState):
        """The gradient shard of a chunk, 1-D [shard_used], in memory inside the block."""
        if chunk.gradient_on_device:
            yield chunk.gradient.device_shard.memory
            return
        with self.records.lease(chunk, GRADIENTS) as lease:
            yield self._tensor(lease)

    def arrive(self, state: ParameterState, grad: torch.Tensor) -> None:
        """Take the gradient of a whole parameter, and begin the transfer to host memory, unless the gradient stays on the device."""
        if self.ranks.are_several:
            self.in_flight.wait_for_room()  # the copy in the flat buffer takes as many bytes again
        flat = grad.detach().reshape(-1)
        chunks = self.registry.chunks_of(state)
        if not self.ranks.are_several:
            for chunk in chunks:
                if chunk.gradient_on_device:
                    self._keep(chunk, state, flat)
            chunks = [chunk for chunk in chunks if not chunk.gradient_on_device]
            if not chunks:
                return
        nbytes = flat.numel() * flat.element_size()
        self.in_flight.add(nbytes)
        ready = stream.record_event() if (stream := current_stream(self.device)) is not None else None
        for chunk in chunks:
            piece = chunk.whole_pieces[state.index]
            last = chunk is chunks[-1]
            if not self.ranks.are_several:
                first = state.index not in chunk.gradient.received
                chunk.gradient.received.add(state.index)
                part = flat[piece.param_start : piece.param_start + piece.numel]
                self._put(chunk, (part, piece.start, first, ready), nbytes if last else 0)
            else:
                self.reduce_scatter.insert(chunk, piece, flat)
            self._note_arrival(chunk)
        if self.ranks.are_several:
            self.in_flight.add(-nbytes)

    def reduce(self, chunk: ChunkState) -> None:
        """Reduce-scatter the chunk's gradient, and move this rank's shard to its place. All ranks must make this call at the same point."""
        if chunk.must_wait and not chunk.gradient.is_there and not chunk.gradient_on_device:
            self.wait_on_device(chunk)
        scattered, nbytes = self.reduce_scatter.begin(chunk)
        self.in_flight.add(nbytes, is_booked=True)
        params = list(chunk.whole_pieces)
        collect = lambda: self._collect_shard(chunk, scattered, params)
        chunk.gradient.job = self.gc.push(lambda: self._transfer(nbytes, collect, []), chunk.title)
        chunk.gradient.squares = None

    def drop(self, chunk: ChunkState) -> None:
        """Drop the gradient of a chunk. No transfer of this gradient may be running."""
        self.release(chunk)
        self.reduce_scatter.drop(chunk)

    def release(self, chunk: ChunkState) -> None:
        """The gradient was used: free the memory. The next arrival is a first one."""
        if not chunk.gradient_on_device:
            self.records.discard(chunk, GRADIENTS)  # also after a transfer to the device that failed: the shard is still here
        self.memory.free_for_step(chunk)
        chunk.gradient.clear()

    def wait_on_device(self, chunk: ChunkState) -> None:
        """The chunk's next gradient waits on the device until its update begins, in memory that is freed then. Called by the training thread."""
        if not chunk.on_device:
            chunk.gradient.stay(for_step=True)
        if chunk.gradient.device_shard is None:
            self.memory.make(chunk, for_step=True)

    def forget_unused(self, chunk: ChunkState) -> None:
        """A gradient that should wait on the device has not come: free the memory. A gradient that has come is dropped as any other."""
        if not (chunk.gradient.has_arrived or chunk.update.is_running):  # an update has taken the gradient that has come
            self.memory.free_for_step(chunk)
            chunk.gradient.clear()

    def send(self, chunk: ChunkState, arrived: Job, left: DeviceShard | None = None) -> Job:
        """Copy a gradient that stayed on the device to host memory, after the job `arrived`, because the update begins.

        left: the shard that `GradientState.leave` returned, for a gradient that leaves without an update.
        """
        shard = left or chunk.gradient.device_shard
        ready = shard and shard.made  # an event, not the end of the stream: the next forward pass may have begun

        def work() -> None:
            arrived.wait()
            self._copy_out(chunk, left, ready)

        return self.gc.push(work, chunk.title)

    def bring(self, chunk: ChunkState) -> None:
        """As `send`, at once and in the thread of the caller, for a gradient that has arrived."""
        self._copy_out(chunk, None, chunk.gradient.device_shard.made)

    def _copy_out(self, chunk: ChunkState, left: DeviceShard | None, ready) -> None:
        if left is None:
            chunk.gradient.offload()  # not earlier: on several ranks, the last arrival may add to the device shard
        with self._open(chunk) as target:
            begin = now()
            marks = self.adder.put(target, (left or chunk.gradient.device_shard).memory, True, ready, on_device=chunk.gradient_on_device)
        if left is not None:
            self.memory.free_left(left)
        self.memory.free_for_step(chunk)
        self.events.moved("d2h", chunk.index, target.nbytes, begin, now(), marks)

    def stay_on_device(self, chunks: Sequence[ChunkState]) -> None:
        """From now on, gradients of this step add up on the device. Data that has arrived is copied there. No transfer is running."""
        for index, chunk in enumerate(chunks):
            for following in chunks[index + 1 : index + MIN_GRADIENT_SLOTS]:
                if following.gradient.is_there and not following.gradient_on_device:
                    self.records.request(following, GRADIENTS, pin=False)
            if chunk.gradient.is_there and not chunk.gradient_on_device:
                with self.records.lease(chunk, GRADIENTS) as lease:
                    self.memory.make(chunk)
                    self.adder.put(chunk.gradient.device_shard.memory, self._tensor(lease), True, None, on_device=True)
                self.records.discard(chunk, GRADIENTS)
            chunk.gradient.stay_here()

    def leave_device(self, chunk: ChunkState) -> None:
        """Move a gradient off the device, because the record has left or the room is needed. No transfer is running."""
        if chunk.has_no_room_elsewhere and chunk.gradient.is_there:
            chunk.gradient.stay(for_step=True)
            return self.memory.set_for_step(chunk.gradient.device_shard, True)
        last = self._last_stream(chunk)
        shard, has_data = chunk.gradient.leave()
        if shard is None:
            return
        if has_data:
            if last is not None:
                last.synchronize()
            with self._open(chunk) as target:
                target.copy_(shard.memory)
        self.memory.free_left(shard)

    def wait_for(self, chunk: ChunkState) -> None:
        """Wait until every transfer of the chunk's gradient is over. Raises the error of a failed one."""
        self.events.wait("d2h", chunk.gradient.job, chunk.index)
        self.failure.check()

    def hurry(self) -> None:
        """Begin the transfer of small gradients, which wait for the next gradient."""
        self.gc.wake()

    def drain(self) -> None:
        """Wait until all transfers are over, with or without success."""
        self.gc.drain()

    def close(self) -> None:
        self.gc.close()

    def _put(self, chunk: ChunkState, part: tuple, sent_nbytes: int) -> None:
        """On one rank: queue a part in the gc lane. The part joins the chunk's last batch, unless the lane has begun with that batch."""
        nbytes = part[0].numel() * part[0].element_size()
        with self._lock:
            batch = self._batch
            joins = batch is not None and batch.job is not None and batch.job is chunk.gradient.job
            if not joins or batch.nbytes + nbytes > MAX_BATCH_NBYTES:
                batch = self._batch = Batch(chunk)
            batch.parts.append(part)
            batch.nbytes += nbytes
            batch.sent_nbytes += sent_nbytes
        many = 2 * self.in_flight.nbytes > self.in_flight.limit_nbytes
        more_comes = chunk.gradient.missing > 1 and nbytes <= SMALL_NBYTES and not many
        if batch.job is None:
            batch.job = chunk.gradient.job = self.gc.push(lambda: self._run_batch(batch), chunk.title, quiet=more_comes)
        elif not more_comes:
            self.hurry()

    def _run_batch(self, batch: Batch) -> None:
        with self._lock:
            if self._batch is batch:
                self._batch = None
        self._transfer(batch.sent_nbytes, lambda: self._collect(batch), batch.parts)

    def _note_arrival(self, chunk: ChunkState) -> None:
        chunk.gradient.squares = None
        chunk.gradient.number = self._num_arrivals = self._num_arrivals + 1

    def _keep(self, chunk: ChunkState, state: ParameterState, flat: torch.Tensor) -> None:
        """On one rank: add a parameter's part to the gradient on the device, in the stream that computed the part."""
        piece = chunk.whole_pieces[state.index]
        stream = current_stream(self.device)
        if chunk.gradient.device_shard is None:
            self.memory.make_for_arrival(chunk)
            if stream is not None:
                stream.wait_stream(self.adder.stream)
        if (last := self._last_stream(chunk)) not in (None, stream):
            stream.wait_stream(last)
        shard = chunk.gradient.device_shard
        target = shard.memory[piece.start : piece.start + piece.numel]
        part = flat if piece.numel == state.numel else flat[piece.param_start : piece.param_start + piece.numel]
        if state.index in chunk.gradient.received:
            target.add_(part)
        else:
            target.copy_(part)
        chunk.gradient.received.add(state.index)
        chunk.gradient.arrive(on_device=True)
        if chunk.gradient.job is None or last != stream:
            chunk.gradient.job = Job.over(stream)
        if chunk.gradient.stays and stream is not None:
            shard.made = stream.record_event()
        self._note_arrival(chunk)

    @staticmethod
    def _last_stream(chunk: ChunkState):
        """The CUDA stream of the last arrival of a gradient on the device; otherwise None."""
        return chunk.gradient.job.wait() if chunk.gradient.job is not None else None

    @contextlib.contextmanager
    def _open(self, chunk: ChunkState):
        """The chunk's gradient shard for writing. The gaps between parameters are zero. Waits for a slot."""
        if chunk.gradient_on_device:
            if chunk.gradient.device_shard is None:
                self.memory.make(chunk)
            chunk.gradient.arrive(on_device=True)
            yield chunk.gradient.device_shard.memory
            return
        with self.records.lease(chunk, GRADIENTS, write=True, fresh=not chunk.gradient.is_there) as lease:
            tensor = self._tensor(lease)
            if not chunk.gradient.is_there:
                for start, end in chunk.gaps:
                    tensor[start:end].zero_()
            chunk.gradient.arrive(on_device=False)
            yield tensor
        if self.spill:
            self.records.clean_ahead(GRADIENTS)

    def _tensor(self, lease: Lease) -> torch.Tensor:
        return lease.entries[GRADIENTS].memory.tensor(self.dtype(lease.chunk), 0, lease.chunk.record.numel)

    def _transfer(self, nbytes: int, work: Callable[[], None], parts: list) -> None:
        """Run a transfer in the gc lane. Afterwards `nbytes` bytes have left the device, those of `parts`, also if the transfer fails."""
        try:
            work()
        finally:
            parts.clear()
            self.in_flight.add(-nbytes)

    def _collect(self, batch: Batch) -> None:
        """On one rank: copy the parts into the chunk's gradient shard, or add them."""
        with self._open(batch.chunk) as memory:
            begin = now()
            put = functools.partial(self.adder.put, on_device=batch.chunk.gradient_on_device)
            moves = [put(memory[start : start + part.numel()], part, first, ready) for part, start, first, ready in batch.parts]
        marks = (moves[0][0], moves[-1][1]) if self.adder.stream is not None else None
        self.events.moved("d2h", batch.chunk.index, batch.nbytes, begin, now(), marks)

    def _collect_shard(self, chunk: ChunkState, scattered: Job, params: list[int]) -> None:
        """On several ranks: add this rank's shard to the chunk's gradient, and note which parameters have a gradient on any rank."""
        shard, done = scattered.wait()
        scattered.result = None
        first = not chunk.gradient.is_there
        numel = chunk.chunk.shard_numel
        with self._open(chunk) as memory:
            begin = now()
            if self.adder.stream is not None:
                self.adder.stream.wait_event(done)
                keep_for(self.adder.stream, shard)
            stays = chunk.gradient_on_device
            marks = self.adder.put(memory, shard[: memory.numel()], first, done, on_device=stays)
        flags = shard[numel:].tolist()
        chunk.gradient.received.update(param for param, flag in zip(params, flags, strict=True) if flag > 0)
        if not stays:
            self.events.moved("d2h", chunk.index, chunk.record.numel * shard.element_size(), begin, now(), marks)
