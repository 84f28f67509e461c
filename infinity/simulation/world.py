"""The world in which an engine runs without bytes: threads on a virtual clock, drives, ranks, and the rates of the links.

Knows the replaceable parts of system/. Must not know plans or tiers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
from collections.abc import Callable
from dataclasses import dataclass

from infinity.simulation.drives import SimulatedDrives
from infinity.simulation.no_bytes import KEPT_NBYTES, NoBytes
from infinity.simulation.ranks import SimulatedRanks
from infinity.simulation.threads import SimulatedThreads
from infinity.system.host_bytes import HostBytes, use_host_bytes
from infinity.system.ranks import use_ranks
from infinity.system.storage import use_storage
from infinity.system.threads import using


@dataclass(frozen=True)
class Rates:
    """Rates of one rank. flops: floating-point operations/s of the device. The others are bytes/s. device: of an operation in device memory. host:
    of work in host memory, such as updates and copies to the device. collective: of an exchange between ranks. drive: of a rank's share of
    the drives.
    """

    flops: float = 400e12
    device: float = 2e12
    host: float = 20e9
    collective: float = 100e9
    drive: float = 3e9

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)!r}: expected a number above 0")


class World:
    """A simulated machine. num_ranks: all on one node. room_nbytes: of the node's drives. seed: of the order of threads; None: in the order in
    which threads become able to run. kept_nbytes: tensors up to this size hold their bytes.

    `run(main)` runs one program, once. The program makes and trains a model as usual, on the CPU, and closes its engines. Tensors have no
    bytes: losses are arbitrary. Checkpoints are not simulated, because their threads are real.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        num_ranks: int = 1,
        room_nbytes: int = 1 << 50,
        seed: int | None = None,
        kept_nbytes: int = KEPT_NBYTES,
    ):
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}: expected 1 or more")
        self.rates, self.num_ranks = rates, num_ranks
        self.room_nbytes, self.kept_nbytes = room_nbytes, kept_nbytes
        self.threads = SimulatedThreads(seed, around=self._host_operations)
        self.drives: list[SimulatedDrives] = []  # of each engine so far
        self.compute_seconds = 0.0  # of the training thread's operations on the device

    def run(self, main: Callable[[], object]) -> object:
        """main() in this world, as the training thread. Returns the result. Raises `Deadlock`."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(using(self.threads))
            undo.callback(use_host_bytes, use_host_bytes(_NoHostBytes(self)))
            undo.callback(use_storage, use_storage(_Drives(self)))
            make_ranks = functools.partial(SimulatedRanks, world=self.num_ranks, spend=self._exchange)
            undo.callback(use_ranks, use_ranks(make_ranks))
            with NoBytes(self._compute, self.kept_nbytes):
                return self.threads.run(main)

    def _host_operations(self) -> NoBytes:
        return NoBytes(lambda flops, nbytes: self.threads.sleep(nbytes / self.rates.host), self.kept_nbytes)

    def _compute(self, flops: int, nbytes: int) -> None:
        seconds = max(flops / self.rates.flops, nbytes / self.rates.device)
        self.compute_seconds += seconds
        self.threads.sleep(seconds)

    def _exchange(self, nbytes: int) -> None:
        self.threads.sleep(nbytes / self.rates.collective)


class _NoHostBytes(HostBytes):
    """Addresses without pages. Work on many bytes takes time and is left out."""

    map_flags = HostBytes.map_flags | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 has no name for it

    def __init__(self, world: World):
        self._world = world

    def work(self, nbytes, function, *arguments):
        if nbytes <= self._world.kept_nbytes:
            return function(*arguments)
        self._world.threads.sleep(nbytes / self._world.rates.host)


class _Drives:
    """Makes the drives of an engine, see `use_storage`."""

    def __init__(self, world: World):
        self._world = world

    def __call__(self, paths, **options) -> SimulatedDrives:
        world, num_local = self._world, self._world.num_ranks
        room_nbytes = world.room_nbytes // num_local
        drives = SimulatedDrives(world.threads, rate=world.rates.drive, num_local=num_local, room_nbytes=room_nbytes)
        self._world.drives.append(drives)
        return drives

    def room_nbytes(self, paths) -> int:
        return self._world.room_nbytes
