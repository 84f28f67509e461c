"""Gradients on their way to the records: reduce-scatter and the gc link.

A gradient that autograd has accumulated leaves the device at once, a small one together with what follows: on one rank straight
into the host memory of its chunk's shard; on several into a flat buffer of the chunk, which is reduce-scattered when all its gradients
are there. What belongs to a record on the device stays there; so does, until its update begins, what waits for step() and has no place in
host memory, as far as the device has room.
Knows chunks and when they are complete. Must not know when or how they are used. Over 400 lines because a gradient's way differs
with the ranks and with the home of its record, and all ways end in one place.
"""

# [Note: which parameters were used]
# A parameter without a gradient on any rank is skipped by the update. So each rank sends, behind each slice of a chunk's
# gradient, one number a parameter: 1 where it had a gradient. Their sums arrive with the gradient's.
#
# [Note: who holds gradients]
# A chunk's gradient shard is pinned by the gc lane while it adds to it, and by the update lane while it uses it; between the
# two it may leave for NVMe if its slot is wanted. Neither lane waits for anything that the other, or the training thread,
# must do while it pins one: an update that has begun takes its record's slots from whatever was read ahead for ops. So two
# slots are enough, however late a pass completes its chunks. While the update at the head of its lane has all that it needs
# of the gc lane, this one waits for the slot that it will free; else it has the gradient written that is used last. (The
# update itself may have to read its gradient back: then another one is written for it.)

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch

from infinity.plan.host_memory import MIN_GRADIENT_SLOTS
from infinity.plan.packing import Piece
from infinity.plan.record import GRADIENTS
from infinity.system.events import Events, now
from infinity.system.lanes import Job, Lane, Monitor
from infinity.system.ranks import Ranks
from infinity.system.waits import waits
from infinity.tiers.gradient_adder import GradientAdder
from infinity.tiers.record_mover import Lease, RecordMover
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.tiers.chunk_state import ChunkState, Registry
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import DeviceTier

MAX_BATCH_NBYTES = 4 << 20  # that leave the device together, where a parameter's gradient is not larger
SMALL_NBYTES = 256 << 10  # so few are not worth a change of threads: they leave with what comes next


@dataclasses.dataclass
class Batch:
    """Parts of one chunk's gradient that leave the device together: each with its start in the shard, whether it is its parameter's first,
    and the event after which it is made. sent_nbytes: of the device, free once all of them have left."""

    chunk: ChunkState
    parts: list[tuple[torch.Tensor, int, bool, object]] = dataclasses.field(default_factory=list)
    nbytes: int = 0
    sent_nbytes: int = 0
    job: Job | None = None


class Gradients:
    """Collects gradients, in each chunk's own dtype. accumulate: in fp32, since micro-batches add up.

    spill: gradients wait for step() and there are fewer slots than chunks, so write some before their slots are wanted.
    limit_nbytes: device bytes of gradients under way; past it the training thread waits.
    """

    def __init__(
        self,
        registry: Registry,
        records: RecordMover,
        ranks: Ranks,
        tier: DeviceTier,
        gather_lane: Lane,
        gather_stream,
        device: torch.device,
        events: Events,
        *,
        staging: torch.Tensor | None,
        accumulate: bool,
        spill: bool,
        limit_nbytes: int,
    ):
        self.registry = registry
        self.records = records
        self.ranks = ranks
        self.tier = tier
        self.gg, self.gather_stream = gather_lane, gather_stream
        self.device = device
        self.events = events
        self.accumulate = accumulate
        self.spill = spill
        self.limit_nbytes = limit_nbytes
        self.failure = records.failure  # of a transfer in the gc lane, too: an update would miss its bytes
        self.gc = Lane("gc", self.failure, "the copy to host memory of the gradient")
        self.cuda = device.type == "cuda"
        self.adder = GradientAdder(device, events, staging=staging, accumulate=accumulate)
        self._changed = Monitor()
        self._under_way_nbytes = 0
        self.num_reductions = 0  # on several ranks
        self._num_arrivals = 0
        self._batch: Batch | None = None  # the last one that the gc lane was given, until it begins with it

    def dtype(self, chunk: ChunkState) -> torch.dtype:
        return TORCH_DTYPES[chunk.chunk.format.gradient]

    @contextlib.contextmanager
    def shard(self, chunk: ChunkState):
        """The gradient shard of a chunk, 1-D [shard_used], in memory inside the block."""
        if chunk.gradient_on_device:
            yield chunk.gradient.device_shard
            return
        with self.records.lease(chunk, GRADIENTS) as lease:
            yield self._tensor(lease)

    def arrive(self, state: ParameterState, grad: torch.Tensor) -> None:
        """Take a whole parameter's gradient; what can be sent is sent."""
        if self.ranks.world > 1:
            self.wait_for_room()  # the buffers that it is copied to take as much again
        flat = grad.detach().reshape(-1)
        chunks = self.registry.chunks_of(state)
        if self.ranks.world == 1:
            for chunk in chunks:
                if chunk.gradient_on_device:
                    self._keep(chunk, state, flat)
            chunks = [chunk for chunk in chunks if not chunk.gradient_on_device]
            if not chunks:
                return
        nbytes = flat.numel() * flat.element_size()
        self._send(nbytes)
        ready = torch.cuda.current_stream(self.device).record_event() if self.cuda else None
        for chunk in chunks:
            piece = chunk.whole_pieces[state.index]
            last = chunk is chunks[-1]
            if self.ranks.world == 1:
                first = state.index not in chunk.gradient.received
                chunk.gradient.received.add(state.index)
                part = flat[piece.param_start : piece.param_start + piece.numel]
                self._put(chunk, (part, piece.start, first, ready), nbytes if last else 0)
            else:
                self._insert(chunk, piece, flat)
                chunk.gradient.used.add(state.index)
            self._note_arrival(chunk)
        if self.ranks.world > 1:
            self._send(-nbytes)

    def reduce(self, chunk: ChunkState) -> None:
        """Reduce-scatter what has arrived of a chunk, zeros for the rest. All ranks must call it at the same point."""
        numel = chunk.chunk.shard_numel
        flat = chunk.gradient.flat
        if flat is None:
            flat = self._flat(chunk)
        view = flat.view(self.ranks.world, -1)
        params = list(chunk.whole_pieces)
        for index, param in enumerate(params):
            if param in chunk.gradient.used:
                view[:, numel + index] = 1
        chunk.gradient.flat = None
        chunk.gradient.used = set()
        ready = torch.cuda.current_stream(self.device).record_event() if self.cuda else None
        self.num_reductions += 1
        scattered = self.gg.push(lambda: self._run_reduce(chunk, flat, ready), chunk.title)
        nbytes = flat.numel() * flat.element_size()
        self.tier.book(-nbytes)
        self._send(nbytes)
        collect = lambda: self._collect_shard(chunk, scattered, params)
        chunk.gradient.job = self.gc.push(lambda: self._transfer(nbytes, collect), chunk.title)
        chunk.gradient.squares = None

    def drop(self, chunk: ChunkState) -> None:
        """Forget what has arrived of a chunk; nothing of it may be under way."""
        self.release(chunk)
        if chunk.gradient.flat is not None:
            self.tier.book(-chunk.gradient.flat.numel() * chunk.gradient.flat.element_size())
        chunk.gradient.flat = None
        chunk.gradient.used = set()

    def release(self, chunk: ChunkState) -> None:
        """The gradient was used: its memory is free, the next arrival is a first one."""
        if not chunk.gradient_on_device:
            self.records.discard(chunk, GRADIENTS)  # also what has broken off on its way to the device has left there
        chunk.gradient.is_there = chunk.gradient.was_sent = False
        chunk.gradient.job = chunk.gradient.squares = None
        chunk.gradient.received = set()

    def send(self, chunk: ChunkState, arrived: Job, memory: torch.Tensor | None = None) -> Job:
        """The update of a record that is not on the device begins: have the gradient that stayed there, with this job, follow it. memory:
        of one that stays no more, and leaves whether or not its update begins."""
        ready = chunk.gradient.made  # not what the stream is to do by now: the next forward pass may have begun

        def work() -> None:
            arrived.wait()
            if memory is None:
                chunk.gradient.follow()  # not before: on several ranks its last part may be on the way to what stayed
            with self._open(chunk) as shard:
                begin = now()
                marks = self.adder.put(shard, chunk.gradient.device_shard if memory is None else memory, True, ready)
            self.events.moved("gc", chunk.index, shard.nbytes, begin, now(), marks)

        return self.gc.push(work, chunk.title)

    def stay_on_device(self, chunks: Sequence[ChunkState]) -> None:
        """More will arrive of these gradients in this step: from now on that stays on the device, and what has arrived comes there. Nothing
        is under way."""
        for index, chunk in enumerate(chunks):
            for following in chunks[index + 1 : index + MIN_GRADIENT_SLOTS]:
                if following.gradient.is_there and not following.gradient_on_device:
                    self.records.request(following, GRADIENTS, pin=False)
            if chunk.gradient.is_there and not chunk.gradient_on_device:
                with self.records.lease(chunk, GRADIENTS) as lease:
                    self._make_device_gradient(chunk)
                    self.adder.put(chunk.gradient.device_shard, self._tensor(lease), True, None)
                self.records.discard(chunk, GRADIENTS)
            chunk.gradient.stay(here=True)

    def leave_device(self, chunk: ChunkState) -> None:
        """The record has gone back to its home, or there is no room for gradients that stay: send what has arrived of its gradient after
        it. Nothing is under way."""
        last = self._last_stream(chunk)
        gradient, has_data = chunk.gradient.leave()
        if gradient is None:
            return
        if has_data:
            if last is not None:
                last.synchronize()
            with self._open(chunk) as memory:
                memory.copy_(gradient)
        self.tier.book(-gradient.nbytes)

    def wait_for_room(self) -> None:
        """Hold the training thread while too many gradients are on the device."""
        if self._under_way_nbytes <= self.limit_nbytes:  # only this thread makes it larger
            return
        with self._changed:
            start = now()
            self.hurry()
            with waits("room for gradients on the device", self.gc.ident):
                while self._under_way_nbytes > self.limit_nbytes:
                    self.failure.check()
                    self._changed.wait(1.0)
            self.events.stalled("gc", "room for gradients", start, now())

    def wait_for(self, chunk: ChunkState) -> None:
        """Wait until all that was sent of a chunk has arrived."""
        self.events.wait("gc", chunk.gradient.job, chunk.index)
        self.failure.check()

    def hurry(self) -> None:
        """Let small parts that wait for company leave."""
        self.gc.wake()

    def drain(self) -> None:
        """Wait until nothing is under way, whether it succeeded or not."""
        self.gc.drain()

    def close(self) -> None:
        self.gc.close()

    def _put(self, chunk: ChunkState, part: tuple, sent_nbytes: int) -> None:
        """On one rank: have the gc lane move a part, together with those before it of the same chunk that it has not begun with."""
        nbytes = part[0].numel() * part[0].element_size()
        with self._changed:
            batch = self._batch
            joins = batch is not None and batch.job is not None and batch.job is chunk.gradient.job
            if not joins or batch.nbytes + nbytes > MAX_BATCH_NBYTES:
                batch = self._batch = Batch(chunk)
            batch.parts.append(part)
            batch.nbytes += nbytes
            batch.sent_nbytes += sent_nbytes
        more_comes = chunk.gradient.missing > 1 and nbytes <= SMALL_NBYTES and 2 * self._under_way_nbytes <= self.limit_nbytes
        if batch.job is None:
            batch.job = chunk.gradient.job = self.gc.push(lambda: self._run_batch(batch), chunk.title, quiet=more_comes)
        elif not more_comes:
            self.hurry()

    def _run_batch(self, batch: Batch) -> None:
        with self._changed:
            if self._batch is batch:
                self._batch = None
        self._transfer(batch.sent_nbytes, lambda: self._collect(batch))

    def _note_arrival(self, chunk: ChunkState) -> None:
        chunk.gradient.squares = None
        chunk.gradient.number = self._num_arrivals = self._num_arrivals + 1

    def _keep(self, chunk: ChunkState, state: ParameterState, flat: torch.Tensor) -> None:
        """On one rank: put a parameter's part into the gradient on the device, by the stream that made it."""
        piece = chunk.whole_pieces[state.index]
        stream = torch.cuda.current_stream(self.device) if self.cuda else None
        if chunk.gradient.device_shard is None:
            self._make_device_gradient(chunk)
            if self.cuda:
                stream.wait_stream(self.adder.stream)
        if (last := self._last_stream(chunk)) not in (None, stream):
            stream.wait_stream(last)
        target = chunk.gradient.device_shard[piece.start : piece.start + piece.numel]
        part = flat if piece.numel == state.numel else flat[piece.param_start : piece.param_start + piece.numel]
        if state.index in chunk.gradient.received:
            target.add_(part)
        else:
            target.copy_(part)
        chunk.gradient.received.add(state.index)
        chunk.gradient.is_there = True
        if chunk.gradient.job is None or last != stream:
            chunk.gradient.job = Job.over(stream)
        if chunk.gradient.stays and self.cuda:
            chunk.gradient.made = stream.record_event()
        self._note_arrival(chunk)

    @staticmethod
    def _last_stream(chunk: ChunkState):
        """Which brought what arrived last for a record on a CUDA device, else None."""
        return chunk.gradient.job.wait() if chunk.gradient.job is not None else None

    def _make_device_gradient(self, chunk: ChunkState) -> None:
        """By a stream of its own: what stays must not lie between activations, which come and go in the memory of the ops' stream."""
        with torch.cuda.stream(self.adder.stream):
            chunk.gradient.device_shard = torch.zeros(chunk.record.numel, dtype=self.dtype(chunk), device=self.device)
        self.tier.book(chunk.gradient.device_shard.nbytes)

    def _send(self, nbytes: int) -> None:
        """Count device bytes that are on their way to the host, and again when they have left."""
        with self._changed:
            self._under_way_nbytes += nbytes
            self.tier.book(nbytes)
            self._changed.notify_all()

    @contextlib.contextmanager
    def _open(self, chunk: ChunkState):
        """The chunk's gradient shard, to be written to; its gaps are zero. Waits for a slot."""
        if chunk.gradient_on_device:
            if chunk.gradient.device_shard is None:
                self._make_device_gradient(chunk)
            chunk.gradient.is_there = True
            yield chunk.gradient.device_shard
            return
        with self.records.lease(chunk, GRADIENTS, write=True, fresh=not chunk.gradient.is_there) as lease:
            tensor = self._tensor(lease)
            if not chunk.gradient.is_there:
                for start, end in chunk.gaps:
                    tensor[start:end].zero_()
            chunk.gradient.is_there = True
            yield tensor
        if self.spill:
            self.records.clean_ahead(GRADIENTS)

    def _tensor(self, lease: Lease) -> torch.Tensor:
        return lease.entries[GRADIENTS].memory.tensor(self.dtype(lease.chunk), 0, lease.chunk.record.numel)

    def _transfer(self, nbytes: int, work: Callable[[], None]) -> None:
        """Run a transfer of the gc lane; `nbytes` of the device have left with it, also if it fails."""
        try:
            work()
        finally:
            self._send(-nbytes)

    def _collect(self, batch: Batch) -> None:
        """On one rank: move parts of parameters into the chunk's gradient shard."""
        with self._open(batch.chunk) as memory:
            begin = now()
            moves = [self.adder.put(memory[start : start + part.numel()], part, first, ready) for part, start, first, ready in batch.parts]
        marks = (moves[0][0], moves[-1][1]) if self.cuda else None
        self.events.moved("gc", batch.chunk.index, batch.nbytes, begin, now(), marks)

    # More than one rank.

    def _flat(self, chunk: ChunkState) -> torch.Tensor:
        numel = self.ranks.world * (chunk.chunk.shard_numel + len(chunk.whole_pieces))
        flat = torch.zeros(numel, dtype=TORCH_DTYPES[chunk.chunk.format.compute], device=self.device)
        self.tier.book(flat.numel() * flat.element_size())
        return flat

    def _insert(self, chunk: ChunkState, piece: Piece, flat_grad: torch.Tensor) -> None:
        """Add a parameter's part to the chunk's flat buffer, each rank's slice in its place."""
        if chunk.gradient.flat is None:
            chunk.gradient.flat = self._flat(chunk)
        view = chunk.gradient.flat.view(self.ranks.world, -1)
        numel = chunk.chunk.shard_numel
        done = 0
        while done < piece.numel:
            rank, start = divmod(piece.start + done, numel)
            count = min(numel - start, piece.numel - done)
            begin = piece.param_start + done
            view[rank, start : start + count] += flat_grad[begin : begin + count]
            done += count

    def _run_reduce(self, chunk: ChunkState, flat: torch.Tensor, ready):
        start, marks = now(), None
        if self.cuda:
            with torch.cuda.stream(self.gather_stream):
                self.gather_stream.wait_event(ready)
                first = self.events.device_mark()
                shard = self.ranks.reduce_scatter(flat, chunk.title)
                marks = first, self.events.device_mark()
                flat.record_stream(self.gather_stream)
                done = self.gather_stream.record_event()
        else:
            shard, done = self.ranks.reduce_scatter(flat, chunk.title), None
        self.events.moved("rs", chunk.index, flat.numel() * flat.element_size(), start, now(), marks)
        return shard, done

    def _collect_shard(self, chunk: ChunkState, scattered, params: list[int]) -> None:
        shard, done = scattered.wait()
        scattered.result = None
        first = not chunk.gradient.is_there
        numel = chunk.chunk.shard_numel
        with self._open(chunk) as memory:
            begin = now()
            if self.cuda:
                self.adder.stream.wait_event(done)
                shard.record_stream(self.adder.stream)
            marks = self.adder.put(memory, shard[: memory.numel()], first, done)
            stays = chunk.gradient_on_device
        flags = shard[numel:].tolist()
        chunk.gradient.received.update(param for param, flag in zip(params, flags, strict=True) if flag > 0)
        if not stays:
            self.events.moved("gc", chunk.index, chunk.record.numel * shard.element_size(), begin, now(), marks)
