"""The lanes of a fetch: cg copies a chunk's shard from host memory to the span, gg gathers the shards of all ranks there.

Knows host copies, spans, and the streams and events of a device. Must not know plans, holds or the order of fetches: weights.py issues the jobs.
See [Note: who waits for whom] in weights.py.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from infinity.optim.shard import Shard
from infinity.plan.record import WEIGHTS, Record
from infinity.plan.slots import Entry
from infinity.system import host_bytes
from infinity.system.events import Events, now
from infinity.system.lanes import Job, Lane
from infinity.system.ranks import Ranks
from infinity.system.streams import current_stream, new_stream, on_stream
from infinity.system.waits import waits
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.record_mover import RecordMover, Request, segments


class ChunkFetch:
    """The fetch of one chunk. request: for the host copy; None if the shard is on the device. update: the copy waits for this job. copy: the
    job that copies the shard to the device. gather: the job of the all-gather; None on one rank."""

    __slots__ = ("chunk", "copy", "gather", "request", "update")

    def __init__(self, chunk: ChunkState, request: Request | None, update: Job | None):
        self.chunk = chunk
        self.request = request
        self.update = update
        self.copy: Job | None = None
        self.gather: Job | None = None


class FetchLanes:
    """Runs the jobs of fetches, in the order of `copy` and `gather`. gather_lane, gather_stream: for all collectives, including those of
    gradients, in one order."""

    def __init__(self, records: RecordMover, ranks: Ranks, gather_lane: Lane, gather_stream, device: torch.device, events: Events):
        self.records, self.ranks, self.events, self.device = records, ranks, events, device
        self.gg, self.gather_stream = gather_lane, gather_stream
        self.cg = Lane("cg", records.failure, "the copy to the device")
        self.copy_stream = new_stream(device)  # None on the CPU
        if self.copy_stream is not None:
            self.settler = Lane("cg-settle", records.failure)

    def close(self) -> None:
        self.cg.close()
        self.gg.close()
        if self.copy_stream is not None:
            self.settler.close()
            self.gather_stream.synchronize()  # the memory of the spans is freed next

    def drain(self) -> None:
        """Wait until all copies are over, and have given their slots back."""
        self.cg.drain()
        if self.copy_stream is not None:
            self.settler.drain()

    def allocated(self) -> torch.cuda.Event | None:
        """An event on the compute stream after the allocation of a span; None on the CPU."""
        return stream.record_event() if (stream := current_stream(self.device)) is not None else None

    def copy(self, fetch: ChunkFetch, ready: torch.cuda.Event | None) -> None:
        """Copy the shard to the span. ready: the event after the allocation of the span."""
        fetch.copy = fetch.chunk.copy_job = self.cg.push(functools.partial(self._run_copy, fetch, ready), fetch.chunk.title)

    def gather(self, fetch: ChunkFetch, order: tuple[int, int, int] | None = None) -> Job:
        """All-gather the shards of the chunk. order: numbers of this collective, which all ranks compare; None if the plan sets the order."""
        return self.gg.push(functools.partial(self._run_gather, fetch, order), fetch.chunk.title)

    def wait(self, fetch: ChunkFetch) -> None:
        """Wait for the copy and the gather of a chunk. Each wait is counted by link. On CUDA the compute stream waits for the bytes."""
        if not fetch.copy.done:
            with waits(f"the weights of {fetch.chunk.title}"):
                self._wait_for_copy(fetch)
        else:
            fetch.copy.wait()
        if fetch.gather is not None:
            self.events.wait("all_gather", fetch.gather, fetch.chunk.index)
        if self.copy_stream is not None:
            event = (fetch.gather or fetch.copy).result
            if event is not None:
                since = self.events.device_mark()
                current_stream(self.device).wait_event(event)
                self.events.device_waited("all_gather" if fetch.gather else "h2d", fetch.chunk.index, since)

    def _wait_for_copy(self, fetch: ChunkFetch) -> None:
        if fetch.update is not None:
            self.events.wait("update", fetch.update, fetch.chunk.index)
        if fetch.request is not None:
            self.events.wait("nvme_read", fetch.request, fetch.chunk.index)
            source = fetch.request.result.source
            if source is not None and not source.done:
                self.events.wait("nvme_read", source, fetch.chunk.index)
        self.events.wait("h2d", fetch.copy, fetch.chunk.index)

    # Jobs.

    def _run_copy(self, fetch: ChunkFetch, ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Copy one shard to the span after its read or its update. Returns the event of the copy on CUDA."""
        chunk, request, update, entry = fetch.chunk, fetch.request, fetch.update, None
        if request is not None:
            if not request.done:  # other jobs wait for this lane, and only the training thread uses copies that were read ahead
                self.records.hurry(request)
            entry = request.wait()
            self.records.settle(entry)
        if update is not None:
            update.wait()
        if entry is None:
            return ready  # the compute stream wrote the shard in place: the gather waits for this event
        start = now()
        shard, format = chunk.weights_on_device, chunk.record.format
        nbytes = chunk.record.weight_nbytes if format.is_coded else shard.nbytes
        source = entry.memory.tensor(torch.uint8, 0, nbytes)
        if self.copy_stream is None:
            # Not copy_, which would use torch's threads: the training thread needs these threads.
            if format.is_coded:
                decode(chunk.record, source, shard)
            else:
                host_bytes.work(nbytes, ctypes.memmove, shard.data_ptr(), source.data_ptr(), nbytes, kind=host_bytes.COPY)
            self.events.moved("h2d", chunk.index, nbytes, start, now())
            self.records.unpin(chunk, WEIGHTS, entry)
            return None
        with on_stream(self.copy_stream, "h2d"):
            self.copy_stream.wait_event(ready)
            first = self.events.device_mark()
            if format.is_coded:
                decode(chunk.record, source.to(self.device, non_blocking=True), shard)
            else:
                shard.view(torch.uint8).copy_(source, non_blocking=True)
            marks = first, self.events.device_mark()
            event = self.copy_stream.record_event()
        self.settler.push(functools.partial(self._finish_copy, chunk, entry, event, nbytes, start, marks), chunk.title)
        return event

    def _finish_copy(self, chunk: ChunkState, entry: Entry, event: torch.cuda.Event, nbytes: int, start: float, marks) -> None:
        """Give the slot back after the device has read the slot."""
        event.synchronize()
        self.events.moved("h2d", chunk.index, nbytes, start, now(), marks)
        self.records.unpin(chunk, WEIGHTS, entry)

    def _run_gather(self, fetch: ChunkFetch, order: tuple[int, int, int] | None) -> torch.cuda.Event | None:
        """Gather the chunk after the copy. Returns the event of the gather on CUDA."""
        event = fetch.copy.wait()
        if order is not None:
            self.ranks.require_order(f"the next gather, of {fetch.chunk.title}", *order)
        start = now()
        chunk = fetch.chunk.chunk
        whole = fetch.chunk.span.flat[chunk.offset : chunk.offset + chunk.numel]
        done = marks = None
        if self.gather_stream is not None:
            with on_stream(self.gather_stream, "all_gather"):
                if event is not None:
                    self.gather_stream.wait_event(event)
                first = self.events.device_mark()
                self.ranks.gather(whole, fetch.chunk.title)
                marks = first, self.events.device_mark()
                done = self.gather_stream.record_event()
        else:
            self.ranks.gather(whole, fetch.chunk.title)
        self.events.moved("all_gather", chunk.index, whole.numel() * whole.element_size(), start, now(), marks)
        return done


def decode(record: Record, source: torch.Tensor, out: torch.Tensor) -> None:
    """Decode a coded weight. source: uint8 [weight_nbytes], as stored. out: [shard_used], the shard in the span, on the same device."""
    found = segments(record, WEIGHTS, lambda dtype, offset, count: source[offset : offset + count * dtype.itemsize].view(dtype))
    shard = Shard(record.format, found)
    shard.codec.decode(shard, out)
