"""The world in which an engine runs without bytes: threads on a virtual clock, drives, ranks, and the rates of the links.

Knows the replaceable parts of system/. Must not know plans or tiers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from infinity.simulation.device import DeviceMemory, SimulatedDevice
from infinity.simulation.drives import SimulatedDrives
from infinity.simulation.links import Links
from infinity.simulation.no_bytes import ATTENTION, KEPT_NBYTES, UPDATE, NoBytes, Spent
from infinity.simulation.ranks import SimulatedRanks
from infinity.simulation.threads import SimulatedThreads
from infinity.system.capacity import Host, use_gauge, use_host
from infinity.system.host_bytes import CODEC, COPY, HostBytes, use_host_bytes
from infinity.system.ranks import use_ranks
from infinity.system.storage import use_storage
from infinity.system.streams import use_streams
from infinity.system.threads import using

READ_SHARE = 0.6  # of the bytes that drives move while they read and write
OWED_S = 1e-3  # of short work for which a thread waits at once
_PYTHON = "python"  # the interpreter: one thread at a time runs Python


@dataclass(frozen=True)
class Rates:
    """Rates of one rank. flops, attention: floating-point operations/s of the device in products, and in attention. The others are bytes/s.

    device: of an operation in device memory. device_update: of an update there. host: of work in host memory with all processors, such as
    updates. codec: of one thread that codes or decodes floats. copy: of one thread that copies within host memory. h2d, d2h: of copies to and
    from a device with streams. collective: of an exchange between ranks. drive: of a rank's share of the drives, while there are reads and
    writes. read, write: while there are only these; by default as drive.

    beside_drives: share of their speed that processors keep while the drives work, if the device is the CPU.

    copy_s, collective_s, kernel_s: seconds of a copy, an exchange, or an operation on the device, without bytes. launch_s: of the host, for an
    operation that the device runs later. job_s: of the host, for a lane's job.
    """

    flops: float = 400e12
    attention: float = 400e12
    device: float = 2e12
    device_update: float = 2e12
    host: float = 20e9
    codec: float = 2.5e9
    copy: float = 10e9
    h2d: float = 50e9
    d2h: float = 50e9
    collective: float = 100e9
    drive: float = 3e9
    read: float | None = None
    write: float | None = None
    beside_drives: float = 1.0
    copy_s: float = 1e-5
    collective_s: float = 2e-5
    kernel_s: float = 0.0
    launch_s: float = 1e-5
    job_s: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not (value > 0 or (value == 0 and field.name.endswith("_s"))):
                raise ValueError(f"{field.name}={value!r}: expected a number above 0")

    @property
    def of_drives(self) -> dict[str, float]:
        """bytes/s of reads alone, and of writes alone."""
        return {"nvme_read": self.read or self.drive, "nvme_write": self.write or self.drive}

    def of_kind(self, kind: str) -> tuple[float, float]:
        """(floating-point operations/s, bytes/s) of an operation on the device."""
        return {ATTENTION: (self.attention, self.device), UPDATE: (self.flops, self.device_update)}.get(kind, (self.flops, self.device))

    def speeds(self, links: frozenset[str], *, shares_processors: bool) -> dict[str, float]:
        """The speed of each link, at most 1, while all of them are busy. shares_processors: the device is the CPU."""
        speeds, drives = dict.fromkeys(links, 1.0), self.of_drives
        if links >= drives.keys():
            for link, share in (("nvme_read", READ_SHARE), ("nvme_write", 1 - READ_SHARE)):
                speeds[link] = min(1.0, share * self.drive / drives[link])
        if shares_processors:
            busy = links & {"compute", "host", _PYTHON}
            speed = (1 / len(busy) if busy else 1.0) * (self.beside_drives if links & drives.keys() else 1.0)
            speeds |= dict.fromkeys(busy, speed)
        elif "host" in links and not shares_processors:  # work alone uses all of the memory's bandwidth
            sharing = links & {"host", "h2d", "d2h"}
            speeds |= dict.fromkeys(sharing, self.host / sum(getattr(self, link) for link in sharing))
        return speeds


class World:
    """A simulated machine.

    num_ranks: of which num_local are on one node, by default all. device_nbytes: memory of a device that works while the host goes on, as a GPU
    does; None: the device is the CPU. host: of the node; None: this machine's memory and cores. room_nbytes: of the node's drives. seed: of
    the order of threads; None: in the order in which threads become able to run. kept_nbytes: tensors up to this size hold their bytes.

    `run(main)` runs one program, once. The program makes and trains a model as usual, on the CPU, and closes its engines. Tensors have no
    bytes: losses are arbitrary. Checkpoints are not simulated, because their threads are real.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        num_ranks: int = 1,
        num_local: int | None = None,
        device_nbytes: int | None = None,
        host: Host | None = None,
        room_nbytes: int = 1 << 50,
        seed: int | None = None,
        kept_nbytes: int = KEPT_NBYTES,
    ):
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}: expected 1 or more")
        self.rates, self.num_ranks, self.num_local = rates, num_ranks, num_local or num_ranks
        self.room_nbytes, self.kept_nbytes = room_nbytes, kept_nbytes
        self.host = host or SimulatedHost(Host().free_nbytes())
        self.threads = SimulatedThreads(seed, around=self._host_operations, begin_job=lambda: self.spend_soon(_PYTHON, rates.job_s))
        speeds = functools.partial(rates.speeds, shares_processors=device_nbytes is None)
        self.links = Links(self.threads, speeds, side_by_side=("host",))
        self.drives: list[SimulatedDrives] = []  # of each engine so far
        self.compute_seconds = self.product_seconds = 0.0  # of the operations on the device, and of their floating-point operations alone
        self.memory = DeviceMemory(device_nbytes)  # of the device, or of tensors in the memory of the CPU
        self.device = SimulatedDevice(self.threads, self.links) if device_nbytes is not None else None
        self._is_counting = True
        self._of_training = self._operations(self._compute)  # also of the threads of micro-batches
        self._owed = threading.local()  # seconds of each link, of each thread

    def run(self, main: Callable[[], object]) -> object:
        """main() in this world, as the training thread. Returns the result. Raises `Deadlock`."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(using(self.threads))
            undo.callback(use_host_bytes, use_host_bytes(_NoHostBytes(self)))
            undo.callback(use_host, use_host(self.host))
            undo.callback(use_storage, use_storage(_Drives(self)))
            make_ranks = functools.partial(SimulatedRanks, world=self.num_ranks, num_local=self.num_local, spend=self._exchange)
            undo.callback(use_ranks, use_ranks(make_ranks))
            undo.callback(lambda before: use_gauge(*before), use_gauge(lambda device: self.memory, self._note_more))
            if self.device is not None:
                undo.callback(use_streams, use_streams(self.device))
            with self._of_training:
                return self.threads.run(main)

    @property
    def nvme_nbytes(self) -> int:
        """Bytes of all extents of this rank."""
        return sum(drives.allocated_nbytes for drives in self.drives)

    @contextlib.contextmanager
    def outside_the_device(self) -> Iterator[None]:
        """Inside the block, new tensors take no device memory, such as those of a model before the engine has the model."""
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before

    def without_addresses(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, new large tensors are one expanded element, such as tiles before the engine has them."""
        return self._of_training.without_addresses()

    def finish(self) -> None:
        """Wait until the device has done its work."""
        if self.device is not None:
            self.device.current().synchronize()

    def spend(self, work: Spent) -> None:
        """The time of an operation of the current thread."""
        if self._is_on_device:
            self._compute(work)
        else:
            self.spend_soon("host", work.nbytes / self.rates.host)

    def spend_soon(self, link: str, seconds: float) -> None:
        """This thread works on a link, codes floats, or runs Python. It waits once there are OWED_S of such work: a wait takes more time here than
        all the rest."""
        owed = vars(self._owed).get(link, 0.0) + seconds
        if owed > OWED_S:
            self.threads.sleep(owed) if link == CODEC else self.links.spend(link, owed)
            owed = 0.0
        setattr(self._owed, link, owed)

    @property
    def _is_on_device(self) -> bool:
        """Whether operations of the current thread run on a device with streams."""
        if self.device is None:
            return False
        return self.device.is_in_stream or self._of_training in _get_current_dispatch_mode_stack()

    def _operations(self, spend: Callable[[Spent], object]) -> NoBytes:
        return NoBytes(spend, self.kept_nbytes, allocated=self._note_allocated, read=self._read)

    def _host_operations(self) -> NoBytes:
        return self._operations(self.spend)

    def _compute(self, work: Spent) -> None:
        link = self.device.current_link if self.device is not None else ""
        if link in ("h2d", "d2h"):  # the operands are the source and the target of a copy
            self._take(self.rates.copy_s + work.nbytes / 2 / getattr(self.rates, link), link)
        else:
            flops, nbytes = self.rates.of_kind(work.kind)
            self.product_seconds += work.flops / flops
            seconds = self.rates.kernel_s + max(work.flops / flops, work.nbytes / nbytes)
            self.compute_seconds += seconds
            self._take(seconds, "compute")

    def _exchange(self, nbytes: int) -> None:
        self._take(self.rates.collective_s + nbytes / self.rates.collective, "collective")

    def _take(self, seconds: float, link: str) -> None:
        if self.device is None:
            self.links.spend(link, seconds + self.rates.launch_s)
        else:
            self.device.current().spend(seconds, link)
            self.spend_soon(_PYTHON, self.rates.launch_s)

    def _note_allocated(self, storage: torch.UntypedStorage) -> None:
        if self._is_counting:
            self.memory.note(storage)

    def _note_more(self, nbytes: int) -> None:
        if self._is_counting:
            self.memory.take(nbytes)

    def _read(self) -> None:
        if self._is_on_device:
            self.finish()


class SimulatedHost(Host):
    """Another host, with so much free memory. num_cores: 0 for as many as this machine has. See `use_host`."""

    def __init__(self, free_nbytes: int, num_cores: int = 0):
        self._free_nbytes, self._num_cores = free_nbytes, num_cores or Host().num_cores()

    def free_nbytes(self) -> int:
        return self._free_nbytes

    def num_cores(self) -> int:
        return self._num_cores


class _NoHostBytes(HostBytes):
    """Addresses without pages. Work on many bytes takes time and is left out."""

    least_section_nbytes = 256 << 20
    map_flags = HostBytes.map_flags | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 has no name for it

    def __init__(self, world: World):
        self._world = world

    def work(self, nbytes, function, *arguments, kind="", otherwise=None):
        if nbytes <= KEPT_NBYTES:
            return function(*arguments)
        if kind == CODEC:
            self._world.spend_soon(CODEC, nbytes / self._world.rates.codec)
        elif kind == COPY:
            self._world.spend_soon("host", nbytes / self._world.rates.copy)
        else:
            self._world.spend(Spent(0, nbytes, UPDATE))
        return otherwise


class _Drives:
    """Makes the drives of an engine, see `use_storage`."""

    def __init__(self, world: World):
        self._world = world

    def __call__(self, paths, **options) -> SimulatedDrives:
        world, rates = self._world, self._world.rates.of_drives
        drives = SimulatedDrives(
            world.threads,
            world.links,
            read=rates["nvme_read"],
            write=rates["nvme_write"],
            nbytes_per_s=world.rates.drive * world.num_local,
            room_nbytes=world.room_nbytes // world.num_local,
        )
        world.drives.append(drives)
        return drives

    def room_nbytes(self, paths) -> int:
        return self._world.room_nbytes
