"""A simulated drive that keeps bytes, and finds buffers that are used while a transfer has them."""

import contextlib
import errno

import aio_ext
from infinity.errors import SwapError
from infinity.simulation.drives import SimulatedDrives, SimulatedExtent
from infinity.simulation.links import Links
from infinity.simulation.threads import SimulatedThreads
from infinity.system.storage import use_storage
from infinity.system.threads import now, using

UNREAD = 0xA5  # fills the buffer of a read until the end of the read


class ExtentWithBytes(SimulatedExtent):
    def __init__(self, nbytes):
        super().__init__(nbytes)
        self.memory = bytearray(self.nbytes)


class SimulatedStorage(SimulatedDrives):
    """fails(number): whether transfer `number` fails. latency(): seconds after a transfer."""

    def __init__(self, world, *, fails=lambda number: False, rate=1e9, latency=lambda: 1e-4):
        super().__init__(world, Links(world), read=rate, write=rate, latency=latency)
        self.fails, self.num_transfers = fails, 0
        self.log = []  # (what, op, bytes, end) of each transfer

    def extent(self, nbytes):
        return ExtentWithBytes(nbytes)

    def read(self, extent, buffer, *, offset=0, priority=aio_ext.PREFETCH, what=""):
        buffer[:] = bytes([UNREAD]) * len(buffer)

        def move():
            assert bytes(buffer) == bytes([UNREAD]) * len(buffer), f"{what}the buffer of a read was changed before the read was over"
            buffer[:] = extent.memory[offset : offset + len(buffer)]

        self.read_nbytes += len(buffer)
        return self._begin("read", extent, buffer, what, move, priority)

    def write(self, extent, buffer, *, offset=0, priority=aio_ext.WRITE, what=""):
        given = bytes(buffer)

        def move():
            assert bytes(buffer) == given, f"{what}the buffer of a write was changed before the write was over"
            extent.memory[offset : offset + len(buffer)] = given

        self.write_nbytes += len(buffer)
        return self._begin("write", extent, buffer, what, move, priority)

    def _begin(self, op, extent, buffer, what, move, priority):
        number, fails = self.num_transfers, self.fails(self.num_transfers)
        self.num_transfers += 1

        def finish():
            self.log.append((what, op, len(buffer), now()))
            if fails:
                return SwapError(errno.EIO, f"{what}transfer {number} fails", "simulated")
            try:
                move()
            except AssertionError as error:
                return error
            return None

        return self.begin(op, extent, len(buffer), finish, priority)


@contextlib.contextmanager
def simulated_world(seed, **drive):
    """Inside the block, engines use simulated threads and a simulated drive. Yields (threads, the drives of the engines so far)."""
    world, made = SimulatedThreads(seed), []
    before = use_storage(lambda *arguments, **options: made.append(SimulatedStorage(world, **drive)) or made[-1])
    try:
        with using(world):
            yield world, made
    finally:
        use_storage(before)
