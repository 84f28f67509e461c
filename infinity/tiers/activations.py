"""Saved activations away from the device: to host memory during forward, past the budget to NVMe, and back before backward needs them.

Knows storages on the device, a store of host memory and NVMe, and parts of a graph by key. Must not know modules, autograd's graph or
weights: the saved-tensor hooks call this file, in the training thread.
"""

# [Note: which activations move]
# The unit is a storage, which plain PyTorch keeps alive as a whole. Views of one storage are moved once, whatever their shapes and strides,
# and are views of one storage again afterwards. Three kinds of tensors stay on the device: small tensors, small parts of a storage, and model
# buffers. A small part may be a slice of a data set. Model buffers stay on the device anyway.
#
# Backward fetches storages in reverse order, and reads ahead as far as host memory allows. Parts of the graph may go backward in another
# order, such as micro-batches that pass a layer together. The caller then names the saved part and the parts that follow (graph_parts.py).

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections import deque
from collections.abc import Iterable

import torch

import aio_ext
from infinity.errors import BudgetError, UsageError
from infinity.model.autograd_state import share_version
from infinity.sizes import format_bytes
from infinity.system import host_bytes
from infinity.system.arena import Area, Arena
from infinity.system.failure import FirstFailure
from infinity.system.interrupts import uninterrupted
from infinity.system.lanes import Lane
from infinity.system.streams import current_stream, new_stream, on_stream
from infinity.tiers.activation_store import ActivationStore
from infinity.tiers.graph_parts import GraphParts
from infinity.tiers.saved_storage import DeviceCopy, SavedStorage, SavedTensor, StorageState, TensorNeed

MIN_NBYTES = 64 << 10  # smaller storages stay: a copy would cost more than it frees
MIN_PART = 1 / 4  # a tensor that is a smaller part of its storage stays
NUM_LEAVING = 2  # storages on their way to the host: one is copied while the next is filled
NUM_COMING = 2  # storages on the device ahead of their use
LOOK_AHEAD = 32  # storages that are examined for this


class Activations:
    """Keeps saved activations in host memory, at most budget_nbytes, and the rest on NVMe.

    swap: None if nothing may go to NVMe. to_nvme: write all storages; host memory only passes them on. who: prefix of errors, such as "rank 1
    of 2, ". on_demand: nothing is saved until `switched`, and then a storage without room in host memory stays on the device.
    """

    def __init__(self, arena: Arena, swap, device: torch.device, budget_nbytes: int, *, to_nvme: bool, on_demand: bool = False,
                 who: str = "", failure: FirstFailure | None = None):
        self.is_on = not on_demand
        self.on_demand = on_demand
        self.has_refused = False  # a storage stayed on the device since the last switch
        self.device = device
        self.to_nvme = to_nvme
        self.failure = failure or FirstFailure()
        self.store = ActivationStore(arena, swap, budget_nbytes, who=who, failure=self.failure)
        self.stream = new_stream(device)  # None on the CPU
        self.copies = Lane("activations", self.failure, "the copy of a saved activation")  # on the CPU, in place of the stream
        self.parts = GraphParts()
        self._by_key: dict[tuple[int, int], SavedStorage] = {}
        self._staying: dict[int, torch.UntypedStorage] = {}  # by number, oldest first
        self._leaving: dict[int, torch.UntypedStorage] = {}  # being copied to the host
        self._coming: dict[int, SavedStorage] = {}  # fetched ahead
        self._dropped: deque[TensorNeed] = deque()  # any thread appends
        self._buffers: set[int] = set()  # addresses of storages that stay
        self._num_stored = self._largest_nbytes = self._saved_nbytes = self._moved_nbytes = 0
        self._closed = False

    @contextlib.contextmanager
    def switched(self, is_on: bool):
        """Saving is on or off inside the context. Saved tensors are restored in either case."""
        before, self.is_on, self.has_refused = self.is_on, is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def keep_on_device(self, buffers: Iterable[torch.Tensor]) -> None:
        """buffers: those of the model, which stay on the device."""
        self.drain()
        self._buffers = {buffer.untyped_storage()._cdata for buffer in buffers}

    @uninterrupted
    def save(self, tensor: torch.Tensor) -> SavedTensor | None:
        """Save a tensor's bytes. Returns None if the tensor stays on the device. Raises SwapError, or BudgetError if no memory has room."""
        if type(tensor) is not torch.Tensor or tensor.device != self.device or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_NBYTES:
            return None
        if storage._cdata in self._buffers or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return None
        self.drain()
        key = (storage._cdata, tensor._version)
        stored = self._by_key.get(key)
        if stored is None or stored.nbytes != storage.nbytes() or not share_version(stored.watch, tensor):
            if tensor.numel() * tensor.element_size() < MIN_PART * storage.nbytes():
                return None
            stored = self._by_key[key] = self._add(tensor, key)
        return SavedTensor(stored, tensor, self._dropped)

    @uninterrupted
    def restore(self, saved: SavedTensor) -> torch.Tensor:
        """The tensor on the device. Also fetches storages that backward needs next. Raises SwapError."""
        self.drain()
        stored = saved.stored
        storage = stored.original()
        if storage is None:
            if self._closed:
                raise UsageError("a backward pass after close(): the engine is closed, and its saved activations are gone")
            while stored.state is StorageState.LEAVING:
                self._let_go()
            if stored.state is StorageState.DEVICE or stored.was_cut:
                raise UsageError(f"the storage of a saved tensor of shape {saved.shape} was cut before it left the device")
            if stored.state is not StorageState.HOME:
                self._to_host(stored)
                self._to_device(stored)
            self._coming.pop(stored.number, None)
            stored.copy.wait_on_device()
            storage = stored.home
        self._fetch_ahead(stored)
        return saved.view_of(storage)

    def stats(self) -> dict[str, int]:
        """Bytes moved to the host so far, host memory in use now and at most, and space on NVMe."""
        return {
            "moved_nbytes": self._moved_nbytes,
            "host_nbytes": self.store.heap.nbytes,
            "host_peak_nbytes": self.store.heap.peak_nbytes,
            "nvme_nbytes": self.store.extents.nbytes,
        }

    @uninterrupted
    def shrink(self) -> None:
        """Give unused host memory back."""
        self.drain()
        self.store.shrink()

    def drain(self) -> None:
        """Forget storages that no saved tensor needs."""
        while self._dropped:
            need = self._dropped.popleft()
            need.stored.needs.discard(need)
            if not need.stored.needs:
                self._forget(need.stored)

    def close(self) -> None:
        self._closed = True
        self.copies.close()
        self.store.writer.close()
        if self.stream is not None:
            self.stream.synchronize()
        self._staying.clear()
        self._leaving.clear()
        self._coming.clear()

    # Forward: to the host.

    def _add(self, tensor: torch.Tensor, key: tuple[int, int]) -> SavedStorage:
        storage = tensor.untyped_storage()
        self._largest_nbytes = max(self._largest_nbytes, storage.nbytes())
        self._saved_nbytes += storage.nbytes()
        stored = SavedStorage(self._num_stored, self._saved_nbytes, self.parts.current, key, tensor)
        self._num_stored += 1
        self.store.storages[stored.number] = stored
        self.parts.add(stored)
        self._staying[stored.number] = storage
        try:
            self._send_all()
        except BaseException:  # the storage is not saved then
            self._forget(stored)
            raise
        return stored

    def _send_all(self) -> None:
        """Send every storage after which enough bytes were saved. With on_demand, a storage without room in host memory stays."""
        refused_nbytes, moved_nbytes = self._saved_nbytes + 1, self._moved_nbytes
        for number in list(self._staying):
            stored = self.store.storages[number]
            if stored.nbytes >= refused_nbytes or self._saved_nbytes - stored.saved_until < stored.nbytes:
                continue
            try:
                self._send(stored)
            except BudgetError:
                if not self.on_demand:
                    raise
                refused_nbytes, self.has_refused = stored.nbytes, True
        if self._leaving and refused_nbytes <= self._saved_nbytes and self._moved_nbytes == moved_nbytes:
            self._let_go()  # no later storage would trigger this

    def _send(self, stored: SavedStorage) -> None:
        """Begin the copy to host memory."""
        memory = self._take(stored.nbytes)
        storage = self._leaving[stored.number] = self._staying.pop(stored.number)
        copy = self._copy(memory, storage, min(stored.nbytes, storage.nbytes()), out=True)
        stored.leave(memory, copy, was_cut=storage.nbytes() < stored.nbytes)
        self._moved_nbytes += stored.nbytes
        if len(self._leaving) > NUM_LEAVING:
            self._let_go()
        if self.store.heap.free_nbytes < 2 * self._largest_nbytes:  # so that the next storages need not wait for a write
            self.store.write_oldest()

    def _let_go(self) -> None:
        """Drop the reference to the storage that left first. Later work of the device may overwrite the memory."""
        number = next(iter(self._leaving))
        stored = self.store.storages[number]
        stored.copy.wait_on_device()
        del self._leaving[number]
        stored.become(StorageState.HOST)
        if self.to_nvme:
            self.store.write(stored)

    def _take(self, nbytes: int) -> Area:
        """Host memory. Raises BudgetError if nothing more can be written to NVMe."""
        while (memory := self.store.take(nbytes)) is None:
            if self.store.swap is None or not self._leaving:
                raise BudgetError(
                    f"{self.store.who}a saved activation of {format_bytes(nbytes)} does not fit into the host_memory left for "
                    f"activations, {format_bytes(self.store.heap.budget_nbytes)}. Raise host_memory, or use activation_tier='device'."
                )
            self._let_go()  # afterwards a write to NVMe can begin
        return memory

    # Backward: back to the device.

    def _to_host(self, stored: SavedStorage) -> None:
        """Bring the bytes into host memory."""
        self.store.await_write(stored)
        if stored.state is StorageState.NVME:
            self.store.read(stored, self._take(stored.nbytes), aio_ext.DEMAND)
        if stored.state is StorageState.READING:
            self.store.await_read(stored)

    def _to_device(self, stored: SavedStorage) -> None:
        home = torch.UntypedStorage(stored.nbytes, device=self.device)
        copy = self._copy(stored.memory, home, stored.nbytes, out=False)
        self.store.free_after(copy, stored.come_home(home, copy))

    def _fetch_ahead(self, stored: SavedStorage) -> None:
        """Bring the storages that backward needs next to the device, or to host memory if there is room."""
        room = NUM_COMING - len(self._coming)
        reads = True
        self.store.reclaim()
        for number in list(itertools.islice(self.parts.needed_after(stored), LOOK_AHEAD)):
            following = self.store.storages.get(number)
            if following is None or following.state in _ON_DEVICE or following.original() is not None:
                continue
            if self.store.want(following):
                continue
            if following.state is StorageState.NVME and reads:
                memory = self.store.heap.take(following.nbytes)
                reads = memory is not None
                if reads:
                    self.store.read(following, memory, aio_ext.PREFETCH)
            if following.state is StorageState.READING and following.read.done:
                self._to_host(following)
            if following.state is StorageState.HOST and room > 0:
                self._to_device(following)
                self._coming[number] = following
                room -= 1
            elif not reads:
                break

    def _copy(self, memory: Area, storage: torch.UntypedStorage, nbytes: int, *, out: bool) -> DeviceCopy:
        """Copy between host memory and a storage on the device, after all work that is queued on the device."""
        if self.stream is None:
            ends = (memory.address, storage.data_ptr()) if out else (storage.data_ptr(), memory.address)

            def copy(_alive=(memory, storage)) -> None:
                host_bytes.work(nbytes, ctypes.memmove, *ends, nbytes, kind=host_bytes.COPY)

            return DeviceCopy(job=self.copies.push(copy))
        on_host = torch.frombuffer(memory.buffer, dtype=torch.uint8, count=nbytes)
        on_device = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (nbytes,), (1,))
        self.stream.wait_event(current_stream(self.device).record_event())
        with on_stream(self.stream, "d2h" if out else "h2d"):
            if out:
                on_host.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(on_host, non_blocking=True)
            return DeviceCopy(event=self.stream.record_event(), device=self.device)

    def _forget(self, stored: SavedStorage) -> None:
        del self.store.storages[stored.number]
        self.parts.remove(stored)
        if self._by_key.get(stored.key) is stored:
            del self._by_key[stored.key]
        self._staying.pop(stored.number, None)
        if self._leaving.pop(stored.number, None) is not None or self._coming.pop(stored.number, None) is not None:
            stored.copy.wait_on_device()  # the device memory is free for later work
        self.store.discard(stored)


_ON_DEVICE = (StorageState.DEVICE, StorageState.LEAVING, StorageState.HOME)
