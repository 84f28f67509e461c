"""Rates of links and processors, measured with real bytes through the parts that the engine uses.

A probe moves chunks in rounds. After each round, outside the timed part, the probe compares the received bytes. Each round moves other
bytes than the round before, so that a missing transfer shows. Knows buffers, devices, ranks and seconds. Must not know the use of the
numbers, or settings of drives, which drives.Probe measures.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import aio_ext
from infinity.engine.build import update_threads
from infinity.errors import SwapError
from infinity.model.gpt import Block
from infinity.optim.adam import AdamScalars, adam_step
from infinity.system.arena import Arena
from infinity.system.capacity import device_of, num_cores
from infinity.system.ranks import Ranks
from infinity.system.swap import Swap
from infinity.tools.measure import gpu_rates

ROUND_NBYTES = 256 << 20  # moved in a round, but at most MAX_CHUNKS chunks
MIN_CHUNKS, MAX_CHUNKS = 4, 64
AHEAD = 8  # chunks in flight to and from NVMe
NUM_ROUNDS = 5  # of a processor measurement, of which the median counts
UPDATE_NUMEL, UPDATE_RECORDS = 4 << 20, 32  # parameters of a record; all records together exceed the caches of processors
GPU_RECORD_FACTOR = 8  # a GPU updates a record of UPDATE_NUMEL in less time than the host needs for the next call
BESIDE_NBYTES = 16 << 20  # of a chunk on the drives beside products
CPU_BLOCK = (512, 8, 4, 128)  # hidden, heads, batch, length

_SCALARS = AdamScalars.of(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3)
_SMALL_NBYTES = 4096


@contextlib.contextmanager
def launched(name: str | None) -> Iterator[tuple[torch.device, Ranks]]:
    """The device of a name, by default CUDA if available, and the ranks that torchrun has started."""
    device = device_of(name)
    makes_group = "RANK" in os.environ and not dist.is_initialized()
    if makes_group:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks = Ranks(device)
    try:
        yield device, ranks
    except BaseException as error:
        ranks.report(error)
        raise
    finally:
        ranks.close()
    if makes_group:  # not after an error: the call could wait for ranks that wait for this rank
        dist.destroy_process_group()


class SwapTransfers:
    """Moves chunks between NVMe and host memory, through the swap files and queues of an engine in these directories."""

    def __init__(self, paths: Sequence[str | os.PathLike], chunk_nbytes: int, *, write: bool, checksums: bool = False):
        self.chunk_nbytes, self._write, self.num_chunks = chunk_nbytes, write, _num_chunks(chunk_nbytes)
        self._arena = Arena()
        memory = _random(self._arena, (self.num_chunks + 1) * chunk_nbytes)
        buffers = [memory[start : start + chunk_nbytes] for start in range(0, len(memory), chunk_nbytes)]
        self._spare, self._buffers = buffers[-1], buffers[:-1]
        self._sums = [aio_ext.crc32c(buffer) for buffer in self._buffers]
        self._swap = Swap(paths, checksums=checksums)  # `check` compares all bytes, outside the timed part
        try:
            self._extents = [self._swap.allocate(chunk_nbytes) for _ in range(self.num_chunks)]
            self._swap.reserve()
            self._run(self._swap.write, 0)
        except BaseException:
            self.close()
            raise

    def move(self, round_: int) -> float:
        """Seconds."""
        return self._run(self._swap.write if self._write else self._swap.read, 1 + round_)

    def move_back(self, round_: int) -> float:
        """Seconds of the same bytes in the other direction."""
        return self._run(self._swap.read if self._write else self._swap.write, 1 + round_)

    def check(self, round_: int) -> None:
        for index, extent in enumerate(self._extents):
            buffer = (index + 1 + round_) % self.num_chunks
            if self._write:
                self._swap.read(extent, self._spare).wait()
            found = aio_ext.crc32c(self._spare if self._write else self._buffers[buffer])
            _require(found == self._sums[buffer if self._write else index], index, "NVMe")

    def close(self) -> None:
        self._swap.close()
        self._buffers, self._spare = [], None
        self._arena.close()

    def _run(self, start, shift: int) -> float:
        began, transfers = time.perf_counter(), []
        for index, extent in enumerate(self._extents):
            if index >= AHEAD:
                transfers[index - AHEAD].wait()
            transfers.append(start(extent, self._buffers[(index + shift) % self.num_chunks]))
        for transfer in transfers[-AHEAD:]:
            transfer.wait()
        return time.perf_counter() - began


class Copies:
    """Copies chunks between pinned host memory and a device, on a separate stream. On the CPU, copies within host memory."""

    def __init__(self, device: torch.device, chunk_nbytes: int, *, to_device: bool):
        self.chunk_nbytes, self.num_chunks, self._device = chunk_nbytes, _num_chunks(chunk_nbytes), device
        self._arena = Arena(pin=device.type == "cuda")
        nbytes = self.num_chunks * chunk_nbytes
        host = torch.frombuffer(_random(self._arena, nbytes), dtype=torch.uint8)
        away = host.clone() if device.type == "cpu" else host.to(device)
        source, target = (host, away) if to_device else (away, host)
        target.zero_()
        self._sources, self._targets = source.split(chunk_nbytes), target.split(chunk_nbytes)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        gpu_rates.wait_for(device)

    def begin(self, round_: int) -> None:
        with torch.cuda.stream(self._stream):
            for index, source in enumerate(self._sources):
                target = self._targets[(index + round_) % self.num_chunks]
                if self._stream is None:  # with one thread, like the engine
                    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
                else:
                    target.copy_(source, non_blocking=True)

    def move(self, round_: int) -> float:
        """Seconds."""
        began = time.perf_counter()
        self.begin(round_)
        gpu_rates.wait_for(self._device)
        return time.perf_counter() - began

    def check(self, round_: int) -> None:
        for index, source in enumerate(self._sources):
            target = self._targets[(index + round_) % self.num_chunks]
            _require(torch.equal(source.to(self._device), target.to(self._device)), index, self._device)

    def close(self) -> None:
        self._sources = self._targets = ()
        self._arena.close()


class BothWays:
    """Copies to and from a device at the same time, chunk_nbytes in each direction."""

    def __init__(self, device: torch.device, chunk_nbytes: int):
        self._ways = [Copies(device, chunk_nbytes, to_device=to_device) for to_device in (True, False)]
        self.chunk_nbytes, self.num_chunks, self._device = chunk_nbytes, 2 * self._ways[0].num_chunks, device

    def move(self, round_: int) -> float:
        """Seconds."""
        began = time.perf_counter()
        for way in self._ways:
            way.begin(round_)
        gpu_rates.wait_for(self._device)
        return time.perf_counter() - began

    def check(self, round_: int) -> None:
        for way in self._ways:
            way.check(round_)

    def close(self) -> None:
        for way in self._ways:
            way.close()


class Collectives:
    """All-gathers or reduce-scatters of chunks of `nbytes` over all ranks. All ranks take part together.

    chunk_nbytes counts the bytes of a chunk that a rank receives from the others, or sends to them.
    """

    def __init__(self, ranks: Ranks, device: torch.device, nbytes: int, *, reduce: bool):
        self._ranks, self._device, self._reduce = ranks, device, reduce
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._shard_numel = max(1, nbytes // ranks.world // dtype.itemsize)
        self.chunk_nbytes = self._shard_numel * (ranks.world - 1) * dtype.itemsize
        self.num_chunks = MIN_CHUNKS
        # The numbers are integers, small enough for an exact sum over the ranks in every dtype and order.
        self._span = max(2, min(61, 512 // ranks.world))
        self._numbers = torch.arange(self._shard_numel, device=device, dtype=torch.int32)
        self._chunks = torch.zeros(self.num_chunks, ranks.world * self._shard_numel, device=device, dtype=dtype)
        self._sums: list[torch.Tensor] = []

    def move(self, round_: int) -> float:
        """Seconds of the slowest rank."""
        for index, chunk in enumerate(self._chunks):
            for rank, shard in enumerate(chunk.split(self._shard_numel)):
                if self._reduce:
                    shard.copy_(self._content(self._ranks.rank, rank, index, round_))
                elif rank == self._ranks.rank:
                    shard.copy_(self._content(rank, 0, index, round_))
        gpu_rates.wait_for(self._device)
        self._ranks.barrier()
        began = time.perf_counter()
        if self._reduce:
            self._sums = [self._ranks.reduce_scatter(chunk, f"chunk {index}") for index, chunk in enumerate(self._chunks)]
        else:
            for index, chunk in enumerate(self._chunks):
                self._ranks.gather(chunk, f"chunk {index}")
        gpu_rates.wait_for(self._device)
        seconds = time.perf_counter() - began
        return self._ranks.most([seconds])[0]

    def check(self, round_: int) -> None:
        world, mine = range(self._ranks.world), self._ranks.rank
        for index, chunk in enumerate(self._chunks):
            if self._reduce:
                sums = sum(self._content(rank, mine, index, round_).to(chunk.dtype) for rank in world)
                _require(torch.equal(self._sums[index], sums), index, self._device)
                continue
            for rank, shard in enumerate(chunk.split(self._shard_numel)):
                _require(torch.equal(shard, self._content(rank, 0, index, round_).to(chunk.dtype)), index, self._device)

    def close(self) -> None:
        self._chunks, self._sums = None, []

    def _content(self, rank: int, shard: int, index: int, round_: int) -> torch.Tensor:
        """The content of a shard that a rank sends. The content differs by rank, shard, chunk and round."""
        return (self._numbers + 7 * rank + 11 * shard + 3 * index + 5 * round_) % self._span - self._span // 2


def rates(probe, num_rounds: int, together: Ranks | None = None) -> list[float]:
    """Bytes per second of each round, after one round for warm-up. together: these ranks begin each round at the same time.

    Raises SwapError if received bytes differ from the sent bytes.
    """
    nbytes, found = probe.chunk_nbytes * probe.num_chunks, []
    for round_ in range(1 + num_rounds):
        if together is not None:
            together.barrier()
        found.append(nbytes / probe.move(round_))
        probe.check(round_)
    return found[1:]


def memory_rate() -> float:
    """Bytes per second that this process reads and writes in host memory, with all processors."""
    source = torch.arange(ROUND_NBYTES // 8)
    target = torch.empty_like(source)
    seconds = _median_seconds(lambda: target.copy_(source), source.device)
    _require(torch.equal(source, target), 0, "host memory")
    return 2 * ROUND_NBYTES / seconds


def copy_seconds(device: torch.device) -> float:
    """Seconds from the call to the end of the copy of one page to the device."""
    with contextlib.closing(Copies(device, _SMALL_NBYTES, to_device=True)) as copies:
        return _median_seconds(lambda: copies._targets[0].copy_(copies._sources[0], non_blocking=True), device)


def gather_seconds(ranks: Ranks, device: torch.device) -> float:
    """Seconds of an all-gather of very few bytes. All ranks take part."""
    chunk = torch.zeros(ranks.world * 8, device=device)
    return _median_seconds(lambda: ranks.gather(chunk, "a page"), device)


def _update(record: list[torch.Tensor], **how) -> None:
    weight, residual, momentum, variance, grad = record
    adam_step(weight, residual, (momentum, variance), grad, _SCALARS, **how)


def update_rate(device: torch.device, *, beside_gpu: bool = False) -> float:
    """Parameters per second that AdamW updates, with bf16 records in host memory or on the device. beside_gpu: with as many threads as an engine
    has for that beside a GPU."""
    threads = update_threads(num_cores(), has_device=beside_gpu)
    arena, on_host = Arena(), device.type == "cpu"
    numel, num_records = (UPDATE_NUMEL, UPDATE_RECORDS) if on_host else (GPU_RECORD_FACTOR * UPDATE_NUMEL, UPDATE_RECORDS // GPU_RECORD_FACTOR)

    def segment(dtype: torch.dtype) -> torch.Tensor:
        tensor = arena.region(numel * dtype.itemsize).tensor(dtype, 0, numel) if on_host else torch.empty(numel, dtype=dtype, device=device)
        return tensor.random_(-1000, 1000) if not tensor.is_floating_point() else tensor.uniform_(0.5, 1)

    kinds = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    records = [[segment(dtype) for dtype in kinds] for _ in range(num_records)]
    compared = slice(min(numel, 1 << 16))
    expected = [tensor[compared].clone() for tensor in records[0]]
    _update(expected, isa="torch")
    _update(records[0])
    for got, wanted in zip(records[0], expected):
        _require(torch.equal(got[compared], wanted), 0, f"the update on {device}")
    found = []
    for _ in range(NUM_ROUNDS):
        gpu_rates.wait_for(device)
        began = time.perf_counter()
        for record in records:
            _update(record, threads=threads)
        gpu_rates.wait_for(device)
        found.append(len(records) * numel / (time.perf_counter() - began))
    arena.close()
    return statistics.median(found)


def product_rate(device: torch.device) -> float:
    """Floating-point operations per second: on a GPU, in matrix products; on the CPU, in the forward and backward pass of a transformer block."""
    return gpu_rates.product_rate(device) if device.type == "cuda" else _block_rate(device)


def product_rate_beside_drives(paths: Sequence[str | os.PathLike]) -> float:
    """As `product_rate` on the CPU, while another thread reads and writes on all drives, as an engine does: checksums take processor time."""
    over = threading.Event()

    def move(transfers: SwapTransfers) -> None:
        for round_ in itertools.count():
            if over.is_set():
                return
            transfers.move(2 * round_)
            transfers.move_back(2 * round_ + 1)

    with contextlib.closing(SwapTransfers(paths, BESIDE_NBYTES, write=True, checksums=True)) as transfers, ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move, transfers)
        try:
            return _block_rate(torch.device("cpu"))
        finally:
            over.set()
            moving.result()


def _block_rate(device: torch.device) -> float:
    hidden, heads, batch, length = CPU_BLOCK
    torch.manual_seed(0)
    block, x = Block(hidden, heads, 0.02), torch.randn(batch, length, hidden, requires_grad=True)

    def step():
        block.zero_grad()
        x.grad = None
        block(x).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    if not all(parameter.grad.isfinite().all() for parameter in (x, *block.parameters())):
        what = "gradients of a block are not finite: do not train on this machine before you know the reason"
        raise SwapError(errno.EIO, what, str(device))
    return counter.get_total_flops() / _median_seconds(step, device)


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(1 + NUM_ROUNDS):
        began = time.perf_counter()
        work()
        gpu_rates.wait_for(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _num_chunks(nbytes: int) -> int:
    return min(max(ROUND_NBYTES // nbytes, MIN_CHUNKS), MAX_CHUNKS)


def _random(arena: Arena, nbytes: int) -> memoryview:
    """Host memory with random bytes, because some drives are faster with zeros."""
    region = arena.region(nbytes)
    region.tensor(torch.int64, 0, region.nbytes // 8).random_()
    return region.buffer[:nbytes]


def _require(is_right: bool, index: int, where) -> None:
    if not is_right:
        text = f"chunk {index} differs from the sent bytes: do not train on this machine before you know the reason"
        raise SwapError(errno.EIO, text, str(where))
