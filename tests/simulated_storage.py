"""A storage tier on the virtual clock of simulated threads. It finds buffers that are used while a transfer has them."""

import contextlib
import errno
from pathlib import Path

from infinity.errors import SwapError
from infinity.system.simulated_threads import SimulatedThreads
from infinity.system.storage import use_storage
from infinity.system.threads import now, threads, using

UNREAD = 0xA5  # fills the buffer of a read until the end of the read


class SimulatedExtent:
    def __init__(self, nbytes):
        self.nbytes = -(-nbytes // 4096) * 4096
        self.memory = bytearray(self.nbytes)


class SimulatedTransfer:
    """finish(): moves the bytes. Returns an error or None."""

    def __init__(self, nbytes, words, finish):
        self.nbytes, self._words, self._finish = nbytes, words, finish
        self.done, self._error = False, None
        self._gate = threads().lock()
        self._gate.acquire()

    def end(self):
        self._error = self._finish()
        self.done = True
        self._gate.release()

    def wait(self):
        if not self.done:
            self._gate.acquire()
            self._gate.release()
        if self._error is not None:
            raise self._error

    def promote(self, priority=0):
        pass

    def in_words(self):
        return self._words


class SimulatedStorage:
    """One drive, which works in order, at a rate in bytes/s. world: the simulated threads. fails(number): whether transfer `number` fails."""

    nbytes_per_s = 0.0

    def __init__(self, world, *, fails=lambda number: False, rate=1e9, latency_s=1e-4):
        self.world, self.fails, self.rate, self.latency_s = world, fails, rate, latency_s
        self.read_nbytes = self.write_nbytes = self.num_transfers = 0
        self.log = []  # (what, op, bytes, end) of each transfer
        self._free_at = 0.0

    def allocate(self, nbytes):
        return SimulatedExtent(nbytes)

    extend = allocate

    def reserve(self):
        pass

    def read(self, extent, buffer, *, offset=0, priority=0, what=""):
        buffer[:] = bytes([UNREAD]) * len(buffer)

        def move():
            assert bytes(buffer) == bytes([UNREAD]) * len(buffer), f"{what}the buffer of a read was changed before the read was over"
            buffer[:] = extent.memory[offset : offset + len(buffer)]

        self.read_nbytes += len(buffer)
        return self._begin("read", buffer, what, move)

    def write(self, extent, buffer, *, offset=0, priority=0, what=""):
        given = bytes(buffer)

        def move():
            assert bytes(buffer) == given, f"{what}the buffer of a write was changed before the write was over"
            extent.memory[offset : offset + len(buffer)] = given

        self.write_nbytes += len(buffer)
        return self._begin("write", buffer, what, move)

    def path_of(self, extent):
        return Path("simulated")

    def close(self):
        pass

    def _begin(self, op, buffer, what, move):
        number, fails = self.num_transfers, self.fails(self.num_transfers)
        self.num_transfers += 1

        def finish():
            if fails:
                return SwapError(errno.EIO, f"{what}transfer {number} fails", "simulated")
            try:
                move()
            except AssertionError as error:
                return error
            return None

        transfer = SimulatedTransfer(len(buffer), f"a {op} of {len(buffer)} bytes", finish)
        self._free_at = max(self._free_at, now()) + self.latency_s + len(buffer) / self.rate
        self.world.call_after(self._free_at - now(), transfer.end)
        self.log.append((what, op, len(buffer), self._free_at))
        return transfer


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
