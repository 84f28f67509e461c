"""One storage whose bytes autograd needs until backward: states, transfers, and the saved tensors that are views.

Knows storages, version counters and transfers. Must not know budgets, queues, or which storage moves next.
"""

# [Note: life of a saved storage]
#
#     DEVICE --copy begun--> LEAVING --let go--> HOST --copied back--> HOME
#                                                | ^
#                                         write  v | read
#                                WRITING --> NVME --> READING
#
# A storage of n bytes stays in DEVICE until n more bytes were saved, because the newest storage is needed first. With on_demand, a storage
# also stays until host memory has room, while smaller storages leave. At most NUM_LEAVING storages are LEAVING at a time. DEVICE and LEAVING
# hold a reference to the original. Before the engine drops the reference, the compute stream waits for the copy. New data therefore
# overwrites the memory after the copy has read the old data. HOME is a new storage, which lives until the last saved tensor is dropped.
# While the program keeps the original alive, the engine uses the original and copies nothing back. A tensor without bytes shares the version
# counter of the original, and shows whether the program has changed the original.

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable

import torch

from infinity.sizes import format_bytes
from infinity.system.arena import Area
from infinity.system.lanes import Job, Need
from infinity.system.streams import current_stream


class StorageState(enum.Enum):
    """The place of a storage's bytes, see [Note: life of a saved storage]."""

    DEVICE = "device"
    LEAVING = "leaving"
    HOST = "host"
    WRITING = "writing"
    NVME = "nvme"
    READING = "reading"
    HOME = "home"


_MOVES = {
    (StorageState.DEVICE, StorageState.LEAVING),
    (StorageState.LEAVING, StorageState.HOST),
    (StorageState.HOST, StorageState.HOME),
    (StorageState.HOST, StorageState.WRITING),
    (StorageState.WRITING, StorageState.NVME),
    (StorageState.WRITING, StorageState.HOST),  # wanted again, or the write failed
    (StorageState.NVME, StorageState.READING),
    (StorageState.READING, StorageState.HOST),
    (StorageState.READING, StorageState.NVME),  # another storage needs the memory first
}


class DeviceCopy:
    """A copy from or to the device: a lane's job on the CPU, an event on CUDA."""

    __slots__ = ("_device", "_event", "_job")

    def __init__(self, *, job: Job | None = None, event: torch.cuda.Event | None = None, device: torch.device | None = None):
        self._job, self._event, self._device = job, event, device

    @property
    def done(self) -> bool:
        return self._job.done if self._event is None else self._event.query()

    def wait_on_device(self) -> None:
        """Later work of the device runs after the copy."""
        if self._event is None:
            self._job.wait()
        else:
            current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """This thread waits for the copy."""
        if self._event is None:
            self._job.wait()
        else:
            self._event.synchronize()


class SavedStorage:
    """The bytes of one storage, needed until backward.

    number: in order of saving. saved_until: bytes of all storages saved up to and including this one. part: of the graph, see
    graph_parts.py. key: address and version of the storage.
    """

    def __init__(self, number: int, saved_until: int, part: Hashable, key: tuple[int, int], tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self.number, self.saved_until, self.part, self.key = number, saved_until, part, key
        self.nbytes = storage.nbytes()
        self.state = StorageState.DEVICE
        self.memory: Area | None = None  # host memory
        self.extent = None  # room on NVMe
        self.copy: DeviceCopy | None = None  # the last one
        self.read = None  # the transfer from NVMe
        self.read_number = 0  # in order of reading
        self.home: torch.UntypedStorage | None = None
        self.needs: set[TensorNeed] = set()
        self.wanted = False  # again, during a write
        self.was_cut = False  # resized before the copy
        self.watch = tensor.detach()
        self.watch.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._original = storage._weak_ref()

    def original(self) -> torch.UntypedStorage | None:
        """The storage that was saved, if still alive and whole."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._original)
        return storage if storage is not None and storage.nbytes() >= self.nbytes else None

    def leave(self, memory: Area, copy: DeviceCopy, *, was_cut: bool) -> None:
        """The copy to host memory begins."""
        self.become(StorageState.LEAVING)
        self.memory, self.copy, self.was_cut = memory, copy, was_cut

    def begin_write(self) -> None:
        self.become(StorageState.WRITING)
        self.wanted = False

    def want(self) -> bool:
        """Keep the host memory, also during a write. Returns whether a write is running."""
        self.wanted = True
        return self.state is StorageState.WRITING

    def begin_read(self, memory: Area, read, number: int) -> None:
        self.become(StorageState.READING)
        self.memory, self.read, self.read_number = memory, read, number

    def come_home(self, home: torch.UntypedStorage, copy: DeviceCopy) -> Area:
        """The copy back to the device begins. Returns the host memory, which is free after the copy."""
        self.become(StorageState.HOME)
        self.home, self.copy = home, copy
        return self.take_memory()

    def take_memory(self) -> Area:
        memory, self.memory = self.memory, None
        return memory

    def become(self, state: StorageState) -> None:
        assert (self.state, state) in _MOVES, f"{self}: {state} from {self.state}"
        self.state = state

    def __del__(self):
        torch.UntypedStorage._free_weak_ref(self._original)

    def __repr__(self):
        return f"SavedStorage({self.number}, {format_bytes(self.nbytes)}, {self.state.value})"


class TensorNeed(Need):
    """A saved tensor's need of a storage."""

    __slots__ = ("stored",)


class SavedTensor:
    """A tensor that autograd saved: a view of a SavedStorage."""

    __slots__ = ("__weakref__", "_dtype", "_layout", "_version", "stored")

    def __init__(self, stored: SavedStorage, tensor: torch.Tensor, dropped: deque[TensorNeed]):
        self.stored = stored
        self._layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self._version = tensor._version
        self._dtype = tensor.dtype
        need = TensorNeed(self, dropped.append)
        need.stored = stored
        stored.needs.add(need)

    @property
    def versions(self) -> tuple[int, int]:
        """The version when the tensor was saved, and the version now."""
        return self._version, self.stored.watch._version

    @property
    def shape(self) -> tuple[int, ...]:
        return self._layout[1]

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._layout)
