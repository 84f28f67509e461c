"""Checksums of bytes on NVMe: changed, exchanged or lost bytes raise an error that names them. The engine never uses them.

Long because each kind of damage meets each kind of data.
"""

import contextlib
import errno
import os
import random
import re
import threading

import pytest
import torch
from support.faults import chain_step, no_hang, shared_chain
from support.helpers import NVME, assert_same_states, everything_in, least_host_memory, memory, run_python, states_of, training
from torch import nn

import aio_ext
import infinity
from aio_ext import _aio
from infinity.plan.record import STATES
from infinity.system.swap import Extent, Swap

pytestmark = pytest.mark.usefixtures("one_thread")

KIB, MIB, PAGE = 1 << 10, 1 << 20, 4096


# ---- kinds of damage ----


class SwapFiles:
    """The files of a swap, opened outside the swap."""

    def __init__(self, swap, paths):
        self.swap = swap
        self.paths = [next(path.glob("infinity-*/*.swap")) for path in paths]

    def place(self, extent, offset):
        """(path, offset in the file, bytes of the extent from there on in this file) of a byte of an extent."""
        for stripe in extent.stripes:
            if offset < stripe.nbytes:
                return self.paths[stripe.path], stripe.offset + offset, stripe.nbytes - offset
            offset -= stripe.nbytes


@contextlib.contextmanager
def damaged(path, offset, data):
    """Replaces bytes of a file for a while. The new bytes must differ from the old ones."""
    with open(path, "r+b", buffering=0) as file:
        before = os.pread(file.fileno(), len(data), offset)
        assert data != before
        os.pwrite(file.fileno(), data, offset)
        yield
        os.pwrite(file.fileno(), before, offset)


@contextlib.contextmanager
def cut(path, offset, data):
    """Cuts the file at the offset for a while."""
    with open(path, "r+b", buffering=0) as file:
        end = os.pread(file.fileno(), 1 << 30, offset)
        os.ftruncate(file.fileno(), offset)
        yield
        os.pwrite(file.fileno(), end, offset)


def flipped(page):
    bit = random.randrange(8 * len(page))
    return page[: bit // 8] + bytes([page[bit // 8] ^ 1 << bit % 8]) + page[bit // 8 + 1 :]


def flipped_64(page):
    for _ in range(64):
        page = flipped(page)
    return page


def swapped(page):
    return page[PAGE : 2 * PAGE] + page[:PAGE] + page[2 * PAGE :]


# name: (bytes of up to 64 KiB from a page on, bytes of an earlier write there) -> damaged bytes
WAYS = {
    "a flipped bit": lambda now, before: flipped(now[:PAGE]),
    "64 flipped bits": lambda now, before: flipped_64(now[:PAGE]),
    "a page of zeros": lambda now, before: bytes(PAGE),
    "64 KiB of zeros": lambda now, before: bytes(len(now)),
    "a sector of ones": lambda now, before: b"\xff" * 512 + now[512:PAGE],
    "an earlier write's page": lambda now, before: before[:PAGE],
    "half an earlier write's page": lambda now, before: before[: PAGE // 2] + now[PAGE // 2 : PAGE],
    "two pages swapped": lambda now, before: swapped(now),
    "the page behind": lambda now, before: now[PAGE : 2 * PAGE],
    "an end": None,
}


def assert_told(caught, what, path, offset):
    """Asserts that the error names the reader, the file, the offset and the remedy."""
    error = caught.value
    assert error.errno == errno.EIO and error.filename == str(path)
    changed = rf"{re.escape(what)}the drive returned other bytes than were written: read of fd \d+ at file offset {offset};"
    assert re.match(changed, error.strerror), (error.strerror, what, offset)
    assert "name another directory in `swap_dirs`" in error.strerror and "the last checkpoint" in error.strerror


def damage_swap(paths, num_cases):
    with Swap(paths) as swap:
        extents = [swap.allocate(nbytes) for nbytes in (PAGE, 64 * KIB, 300 * KIB, 3 * MIB, 5 * MIB + PAGE)]
        swap.reserve()
        stale, datas = ([memory(extent.nbytes) for extent in extents] for _ in range(2))
        for values in (stale, datas):
            for transfer in [swap.write(extent, data) for extent, data in zip(extents, values)]:
                transfer.wait()
        files = SwapFiles(swap, paths)
        for case in range(num_cases):
            way = random.choice([*WAYS, *list(WAYS)[:-1] * 20])  # the last way is slow
            number = random.randrange(len(extents))
            extent, data = extents[number], datas[number]
            start, end = sorted(random.sample(range(extent.nbytes // PAGE + 1), 2))
            page = random.randrange(start, end) * PAGE
            path, offset, left = files.place(extent, page)
            run = slice(page, page + min(64 * KIB, left))
            if way in ("two pages swapped", "the page behind") and left < 2 * PAGE:
                continue
            if way == "an end":
                harm = cut(path, offset, None)
            else:
                harm = damaged(path, offset, WAYS[way](bytes(data[run]), bytes(stale[number][run])))
            back = memory((end - start) * PAGE, 0)
            with harm:
                transfer = swap.read(extent, back, offset=start * PAGE, what=f"case {case}: ")
                for _ in range(2):
                    with pytest.raises(infinity.SwapError) as caught:
                        transfer.wait()
                    if way != "an end":
                        assert_told(caught, f"case {case}: ", path, offset)
                    assert caught.value.errno == errno.EIO and caught.value.filename == str(path)
                    assert caught.value.strerror.startswith(f"case {case}: ") and "dmesg" in caught.value.strerror
                assert transfer.done
            assert swap.read(extent, back, offset=start * PAGE).wait() and back == data[start * PAGE : end * PAGE]


def test_any_damage_of_a_page_is_an_error_that_names_the_page(paths):
    damage_swap(paths, 300)


@pytest.mark.long
def test_any_damage_of_10_000_pages_is_an_error_that_names_the_page(paths):
    damage_swap(paths, 10_000)


# ---- in an engine: every read of every mode ----

WIDE = {"chunk_mib": 0.5, "host_memory": "24MiB"}
MODES = {  # mode: (model, settings, kinds of data that are read)
    "fp32": (lambda: linears(4, 512), NVME | WIDE, {"weights", "states"}),
    "bf16": (lambda: linears(4, 512), NVME | WIDE | {"dtype": "bf16", "compression": "off"}, {"weights", "states"}),
    "coded, late in memory": (lambda: linears(4, 512), NVME | WIDE | {"dtype": "bf16", "compression": "on"}, {"weights", "states"}),
    "coded, late on NVMe": (lambda: linears(16, 512), NVME | WIDE | {"dtype": "bf16", "compression": "on"}, {"weights", "states", "redo"}),
    "gradients": (shared_chain, NVME | {"update": "backward", "host_memory": "least"}, {"weights", "states", "gradients"}),
    "activations": (lambda: linears(12, 512), NVME | WIDE | {"activation_tier": "nvme"}, {"weights", "states", "activation"}),
}


def linears(depth, width):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def train(mode, directory, num_steps, tap=None, losses=None):
    """Returns (losses, states). `tap(engine)` returns a function that replaces the read of the swap."""
    losses = [] if losses is None else losses
    make, config, _ = MODES[mode]
    directory.mkdir(exist_ok=True)
    if config.get("host_memory") == "least":
        config = config | {"host_memory": least_host_memory(make, directory, **config | {"host_memory": 1})}
    with no_hang(600), training(make, directory, **config) as (model, engine, optimizer):
        if tap is not None:
            engine.swap.read = tap(engine)
        for step in range(num_steps):
            if mode == "gradients":
                losses.append(chain_step(model, optimizer, step))
                continue
            x = torch.full((128, 512), 0.1 + step, dtype=next(model.parameters()).dtype)
            loss = model(x.requires_grad_()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        engine.flush()
        return losses, states_of(engine, model)


class EveryRead:
    """Before each read of the engine, damages a page and asserts that the same read raises."""

    def __init__(self, engine, directory):
        self.read = engine.swap.read
        self.files = SwapFiles(engine.swap, [directory])
        self.redo = {}  # extent: offsets that gradients of late moments have there
        for chunk in engine.registry.chunks:
            if engine.compressor is not None and chunk.extents[STATES] is not None:
                compressed = chunk.extents[STATES]
                late = [region for region in compressed.regions if region.late]
                self.redo[compressed.extent] = range(late[0].offset, late[0].offset + late[0].room) if late else ()
        self.told = {}

    def __call__(self, extent, buffer, *, offset=0, what="", **options):
        nbytes = memoryview(buffer).nbytes
        scratch = memory(nbytes, 0)
        self.read(extent, scratch, offset=offset).wait()
        page = random.randrange(nbytes // PAGE) * PAGE
        path, place, left = self.files.place(extent, offset + page)
        now = bytes(scratch[page : page + min(left, 64 * KIB)])
        with damaged(path, place, random.choice([flipped(now[:PAGE]), flipped_64(now[:PAGE]), flipped(now)])):
            with pytest.raises(infinity.SwapError) as caught:
                self.read(extent, scratch, offset=offset, what=what, **options).wait()
        assert caught.value.strerror.startswith(f"{what}the drive returned other bytes") and caught.value.filename == str(path)
        kind = "redo" if offset in self.redo.get(extent, ()) else re.match(r"chunk \d+ \((\w+)\): |(activation) \d+: ", what)
        kind = kind if kind == "redo" else kind[1] or kind[2]
        self.told[kind] = self.told.get(kind, 0) + 1
        return self.read(extent, buffer, offset=offset, what=what, **options)


def damage_every_read(mode, directory, num_steps):
    expected = train(mode, directory / "plain", num_steps)
    taps = []

    def tap(engine):
        taps.append(EveryRead(engine, directory / "tapped"))
        return taps[0]

    losses, states = train(mode, directory / "tapped", num_steps, tap)
    assert losses == expected[0]
    assert_same_states(states, expected[1])
    assert set(taps[0].told) >= MODES[mode][2], taps[0].told
    return taps[0].told


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_every_read_of_an_engine_is_checked(mode, tmp_path):
    damage_every_read(mode, tmp_path, 3)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_reads_of_an_engine_are_checked(mode, tmp_path):
    assert sum(damage_every_read(mode, tmp_path, 300).values()) > 2000


class DamageBefore:
    """Flips bits of a page right before the engine's read with this number, and does not repair them."""

    def __init__(self, engine, directory, number):
        self.read = engine.swap.read
        self.files = SwapFiles(engine.swap, [directory])
        self.left = number
        self.lock = threading.Lock()
        self.done = None

    def __call__(self, extent, buffer, *, offset=0, what="", **options):
        with self.lock:
            is_it, self.left = self.left == 0, self.left - 1
        if is_it:
            self.read(extent, memory(memoryview(buffer).nbytes, 0), offset=offset).wait()  # waits for writes of these bytes
            page = random.randrange(memoryview(buffer).nbytes // PAGE) * PAGE
            path, place, _ = self.files.place(extent, offset + page)
            with open(path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), flipped_64(os.pread(file.fileno(), PAGE, place)), place)
            self.done = what, path, place
        return self.read(extent, buffer, offset=offset, what=what, **options)


def damage_once(mode, directory, numbers):
    expected = train(mode, directory / "plain", 3)
    for number in numbers:
        taps, losses = [], []

        def tap(engine, number=number):
            taps.append(DamageBefore(engine, directory / "harmed", number))
            return taps[0]

        try:
            train(mode, directory / "harmed", 3, tap, losses)
            assert taps[0].done is None
            return
        except infinity.SwapError as error:
            what, path, place = taps[0].done
            assert re.match(r"(chunk|activation) \d+", what)
            assert error.errno == errno.EIO and error.filename == str(path)
            assert error.strerror.startswith(f"{what}the drive returned other bytes") and f"at file offset {place};" in error.strerror
            assert losses == expected[0][: len(losses)]
        assert [name for name in everything_in(directory / "harmed") if "/" in name or name.endswith("lock")] == []


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_read_ends_a_run_before_the_bytes_are_used(mode, tmp_path):
    damage_once(mode, tmp_path, [0, *random.sample(range(1, 40), 4)])


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_every_damaged_read_ends_a_run_before_the_bytes_are_used(mode, tmp_path):
    damage_once(mode, tmp_path, range(1 << 20))


def test_the_remedy_is_another_directory_and_the_last_checkpoint(tmp_path):
    def steps(engine, model, optimizer, numbers):
        losses = []
        for step in numbers:
            loss = model(torch.full((2, 48), 1.0 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    make = lambda: linears(3, 48)
    with training(make, tmp_path / "whole", **NVME) as (model, engine, optimizer):
        expected = steps(engine, model, optimizer, range(4)), states_of(engine, model)
    with pytest.raises(infinity.SwapError, match="name another directory in `swap_dirs`; the last checkpoint does not depend on swap files"):
        with training(make, tmp_path / "bad", **NVME) as (model, engine, optimizer):
            assert steps(engine, model, optimizer, range(2)) == expected[0][:2]
            infinity.save(tmp_path / "checkpoint", model, optimizer)
            engine.flush()
            (path,) = (tmp_path / "bad").glob("*/*.swap")
            with open(path, "r+b", buffering=0) as file:
                for page in range(0, os.fstat(file.fileno()).st_size, PAGE):
                    os.pwrite(file.fileno(), flipped(os.pread(file.fileno(), PAGE, page)), page)
            steps(engine, model, optimizer, range(2, 4))
    with training(make, tmp_path / "good", seed=1, **NVME) as (model, engine, optimizer):
        infinity.load(tmp_path / "checkpoint", model, optimizer)
        assert steps(engine, model, optimizer, range(2, 4)) == expected[0][2:]
        assert_same_states(states_of(engine, model), expected[1])


def test_without_checksums_nothing_is_compared(tmp_path):
    """A read with `checksums=False` returns damaged bytes without an error."""
    with training(lambda: linears(3, 48), tmp_path, checksums=False, **NVME) as (_, engine, _):
        extent = engine.registry.chunks[0].extents["weights"].extent
        path, place, _ = SwapFiles(engine.swap, [tmp_path]).place(extent, 0)
        engine.flush()
        with damaged(path, place, bytes(PAGE)):
            engine.swap.read(extent, back := memory(PAGE)).wait()
            assert not any(back)


# ---- order ----


def schedule(paths, num_requests):
    """Submits random reads and writes. Each read must return the last write before the read, and use the write's checksum."""
    with Swap(paths) as swap:
        extent = swap.allocate(2 * MIB + 5 * PAGE)
        swap.reserve()
        swap.write(extent, first := memory(extent.nbytes))
        model = bytearray(first)
        reads = []
        for _ in range(num_requests):
            start, end = sorted(random.sample(range(extent.nbytes // PAGE + 1), 2))
            part = slice(start * PAGE, end * PAGE)
            priority = random.randrange(3)
            if random.random() < 0.5:
                model[part] = data = memory(part.stop - part.start, random.randrange(256))
                swap.write(extent, data, offset=part.start, priority=priority)
            else:
                back = memory(part.stop - part.start, 0)
                reads.append((swap.read(extent, back, offset=part.start, priority=priority), back, bytes(model[part])))
            if reads and random.random() < 0.1:
                random.choice(reads)[0].promote()
        random.shuffle(reads)
        for read, back, expected in reads:
            assert read.wait() and back == expected


def schedules(paths, number):
    for _ in range(number):
        for op in ("read", "write"):
            if random.random() < 0.5:
                _aio._inject(op, random.randrange(4), -1, None, every=random.randint(1, 5), delay=random.choice([1e-4, 1e-3]))
        schedule(paths[: random.randint(1, 3)], 20)
        _aio._inject()


@pytest.mark.long
def test_a_read_is_checked_against_the_last_write_before_it(paths):
    schedules(paths, 30)


@pytest.mark.long
def test_reads_are_checked_against_the_last_write_in_1000_orders(paths):
    schedules(paths, 1000)


def test_a_failed_write_makes_its_range_unreadable(paths):
    with Swap(paths[:1]) as swap:
        extent = swap.allocate(MIB)
        swap.reserve()
        swap.write(extent, memory(MIB, 1)).wait()
        _aio._inject("write", 0, 1, -errno.EIO)
        with pytest.raises(infinity.SwapError):
            swap.write(extent, memory(MIB, 2)).wait()
        with pytest.raises(infinity.SwapError, match="other bytes than were written"):
            swap.read(extent, memory(MIB)).wait()
        assert swap.write(extent, memory(MIB, 3)).wait() and swap.read(extent, back := memory(MIB)).wait() and back == bytes([3]) * MIB


def test_a_range_that_was_never_written_is_not_read(paths):
    with Swap(paths[:1]) as swap:
        extent = swap.allocate(MIB)
        swap.reserve()
        swap.write(extent, memory(PAGE), offset=PAGE).wait()
        assert swap.read(extent, memory(PAGE), offset=PAGE).wait()
        for offset, nbytes in ((0, PAGE), (PAGE, 2 * PAGE)):
            with pytest.raises(infinity.SwapError, match=f"chunk 3: nothing was written yet .* at file offset {2 * offset}") as caught:
                swap.read(extent, memory(nbytes), offset=offset, what="chunk 3: ").wait()
            assert caught.value.errno == errno.ENODATA


# ---- aio_ext ----


@pytest.fixture
def file(tmp_path):
    with open(tmp_path / "file", "w+b", buffering=0) as opened:
        opened.truncate(MIB)
        yield opened


def sums_of(data):
    return b"".join((aio_ext.crc32c(data[start : start + PAGE]) or 1).to_bytes(4, "little") for start in range(0, len(data), PAGE))


def test_each_page_has_a_checksum(file):
    with aio_ext.Queue() as queue:
        data, sums = memory(5 * PAGE), bytearray(20)
        queue.write(file.fileno(), data, 0, sums=sums).wait()
        assert sums == sums_of(data)
        assert queue.read(file.fileno(), memory(2 * PAGE), PAGE, sums=memoryview(sums)[4:12]).wait()
        assert queue.read(file.fileno(), bytearray(0), 0, sums=b"").wait()
        ticket = queue.read(file.fileno(), memory(5 * PAGE), 0, sums=sums_of(data[: 4 * PAGE]) + b"\x01\0\0\0")
        with pytest.raises(OSError, match=f"at file offset {4 * PAGE}") as caught:
            ticket.wait()
        assert caught.value.errno == errno.EBADMSG and queue.stats()["num_errors"] == 1


@pytest.mark.parametrize(
    "op, buffer, sums, error",
    [
        ("read", 2 * PAGE, bytearray(4), "expected 4 bytes for each 4096"),
        ("write", 2 * PAGE, bytearray(12), "expected 4 bytes for each 4096"),
        ("read", PAGE + 1, bytearray(4), "expected 4 bytes for each 4096"),
        ("write", PAGE, bytes(4), "writable|read-only"),
        ("read", PAGE, 4, "bytes-like"),
    ],
)
def test_checksums_of_a_wrong_size_or_type_are_refused(file, op, buffer, sums, error):
    with aio_ext.Queue() as queue:
        with pytest.raises((ValueError, TypeError, BufferError), match=error):
            getattr(queue, op)(file.fileno(), bytearray(buffer), 0, sums=sums)
        assert queue.stats()["num_reads"] == queue.stats()["num_writes"] == 0


def test_a_buffer_is_held_until_it_is_checked(file):
    with aio_ext.Queue() as queue:
        sums = bytearray(4 * 16)
        queue.write(file.fileno(), memory(16 * PAGE), 0, sums=sums).wait()
        back = bytearray(16 * PAGE)
        ticket = queue.read(file.fileno(), back, 0, sums=sums)
        while not ticket.done:
            pass
        with pytest.raises(BufferError):
            back.clear()
        assert ticket.wait()
        back.clear()
        back = bytearray(16 * PAGE)
        ticket = queue.read(file.fileno(), back, 0, sums=sums)
        while not ticket.done:
            pass
        del ticket
        back.clear()


def test_all_threads_that_wait_for_a_damaged_read_get_the_error(file):
    with aio_ext.Queue() as queue:
        sums = bytearray(4 * 256)
        queue.write(file.fileno(), memory(MIB, 1), 0, sums=sums).wait()
        for is_harmed in (False, True) * 10:
            back, told = memory(MIB), []
            os.pwrite(file.fileno(), bytes([2 if is_harmed else 1]), 700_000)
            ticket = queue.read(file.fileno(), back, 0, sums=sums)

            def wait(ticket=ticket, told=told):
                try:
                    told.append(ticket.wait())
                except OSError as error:
                    told.append(error.errno)

            threads = [threading.Thread(target=wait) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert told == [errno.EBADMSG if is_harmed else True] * 8


@pytest.mark.long
def test_a_forked_child_does_not_disturb_inherited_requests(tmp_path):
    source = """
        import mmap, os, sys
        from infinity.system.swap import Swap
        swap = Swap(sys.argv[1:2])
        extent = swap.allocate(1 << 20)
        swap.reserve()
        swap.write(extent, mmap.mmap(-1, 1 << 20)).wait()
        back = mmap.mmap(-1, 1 << 20)
        read = swap.read(extent, back)
        if not os.fork():
            del read, swap
            os._exit(0)
        print(os.wait()[1], read.wait(), swap.read(extent, back).wait())
        swap.close()
    """
    done = run_python(source, tmp_path)
    assert done.stdout == "0 True True\n", done.stderr
