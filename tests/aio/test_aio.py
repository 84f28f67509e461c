"""aio_ext: all bytes arrive, or one typed error gives the reason; also order, priorities, threads, fork, signals and exit.

The tests need a real filesystem below pytest's tmp_path, because tmpfs hides alignment errors. This file is long because all
tests need the same queue, file and injected faults.
"""

import ctypes
import errno
import gc
import mmap
import os
import platform
import random
import re
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
from support.helpers import memory, run_python

import aio_ext
from aio_ext import _aio

BLOCK = 64 << 10
SECONDS = 30  # a request that takes longer counts as lost
ROOT = Path(__file__).parents[2]


@pytest.fixture
def direct(tmp_path):
    """Return a function: nbytes -> (fd of a new O_DIRECT file with random bytes, these bytes)."""
    fds = []

    def make(nbytes=0):
        path = tmp_path / f"direct{len(fds)}"
        data = random.randbytes(nbytes)
        path.write_bytes(data)
        try:
            fds.append(os.open(path, os.O_RDWR | os.O_DIRECT))
        except OSError:
            pytest.skip("the filesystem of tmp_path refuses O_DIRECT")
        return fds[-1], data

    yield make
    for fd in fds:
        os.close(fd)


def content(fd, nbytes, offset=0):
    """Bytes of the file, read without aio."""
    plain = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        return os.pread(plain, nbytes, offset)
    finally:
        os.close(plain)


def plug(queue, fd, seconds=0.3):
    """Fill a queue that has room for one block, by a write that reaches the kernel `seconds` late."""
    _aio._inject("write", 0, 1, None, delay=seconds)
    return queue.write(fd, memory(4096), 1 << 30, priority=aio_ext.DEMAND)


# ---- bytes ----


@pytest.mark.parametrize("block_nbytes, inflight_nbytes, depth", [(4096, 1, 1), (4096, 64 << 10, 64), (1 << 20, 8 << 20, 64)])
def test_aligned_sizes_arrive_on_a_direct_file(direct, block_nbytes, inflight_nbytes, depth):
    fd, _ = direct()
    unit = max(aio_ext.direct_alignment(fd))
    with aio_ext.Queue(block_nbytes=block_nbytes, inflight_nbytes=inflight_nbytes, depth=depth) as queue:
        for size in [1, 2, 3, 7, 8, 9, 16, 255, 256, 257, *(random.randint(1, 600) for _ in range(60))]:
            data, back, offset = memory(size * unit), memory(size * unit, 0), random.randint(0, 100) * unit
            queue.write(fd, data, offset)
            assert queue.read(fd, back, offset).wait()
            assert back == data


def test_every_size_to_8193_arrives_on_a_buffered_file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    source = random.randbytes(2 * 8193)
    with aio_ext.Queue(block_nbytes=4096) as queue:
        for first in range(1, 8194, 512):
            sizes = range(first, min(first + 512, 8194))
            backs = [bytearray(size) for size in sizes]
            offsets = [sum(sizes[:i]) for i in range(len(sizes))]
            for size, offset in zip(sizes, offsets):
                queue.write(fd, source[size : 2 * size], offset)
            tickets = [queue.read(fd, back, offset) for back, offset in zip(backs, offsets)]
            assert all(ticket.wait() for ticket in tickets)
            assert all(back == source[size : 2 * size] for back, size in zip(backs, sizes))
    os.close(fd)


def test_random_sizes_and_offsets_arrive_on_a_buffered_file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    model = bytearray(1 << 20)
    os.pwrite(fd, model, 0)
    with aio_ext.Queue(block_nbytes=4096) as queue:
        for _ in range(2000):
            size = random.randint(1, 40000)
            offset = random.randint(0, len(model) - size)
            model[offset : offset + size] = data = random.randbytes(size)
            queue.write(fd, data, offset)
        back = bytearray(len(model))
        queue.read(fd, back, 0).wait()
    assert back == model
    os.close(fd)


def test_a_request_of_zero_bytes_is_done_at_once(direct):
    fd, _ = direct()
    with aio_ext.Queue() as queue:
        ticket = queue.read(fd, bytearray(), 12345)
        assert ticket.done and ticket.wait() and (ticket.nbytes, ticket.offset) == (0, 12345)
        assert queue.stats()["num_blocks"] == 0


def test_any_contiguous_buffer_is_accepted(tmp_path):
    numpy = pytest.importorskip("numpy")
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    data = numpy.arange(3000, dtype="int16").reshape(3, 10, 100)
    back = numpy.zeros((10, 300), dtype="int16")
    with aio_ext.Queue() as queue:
        queue.write(fd, data, 0)
        queue.read(fd, back, 0).wait()
    assert back.tobytes() == data.tobytes()
    os.close(fd)


def test_counters_are_exact(direct):
    fd, _ = direct(10 * BLOCK)
    with aio_ext.Queue(block_nbytes=BLOCK, inflight_nbytes=3 * BLOCK) as queue:
        queue.write(fd, memory(5 * BLOCK), 0)
        queue.read(fd, memory(10 * BLOCK), 0).wait()
        stats = queue.stats()
    expected = {"read_nbytes": 10 * BLOCK, "write_nbytes": 5 * BLOCK, "num_reads": 1, "num_writes": 1, "num_blocks": 15}
    assert {name: stats[name] for name in expected} == expected
    assert stats["queued_nbytes"] == stats["inflight_nbytes"] == stats["num_repeats"] == stats["num_errors"] == 0
    assert stats["peak_inflight_nbytes"] == 3 * BLOCK


@pytest.mark.parametrize("inflight_nbytes, peak", [(1, BLOCK), (2 * BLOCK - 1, BLOCK), (4 * BLOCK, 4 * BLOCK)])
def test_bytes_in_the_kernel_are_bounded(direct, inflight_nbytes, peak):
    fd, _ = direct(16 * BLOCK)
    with aio_ext.Queue(block_nbytes=BLOCK, inflight_nbytes=inflight_nbytes) as queue:
        for _ in range(4):
            queue.read(fd, memory(16 * BLOCK, 0), 0)
        queue.close()
        assert queue.stats()["peak_inflight_nbytes"] == peak


@pytest.mark.few(2)
@pytest.mark.parametrize("limit, most", [(1, 1), (2 * BLOCK, 2), (3 * BLOCK - 1, 2), (None, 6), (9 * BLOCK, 6)])
def test_writes_in_the_kernel_have_their_own_limit(direct, limit, most):
    """Injected delays keep writes in flight, where the test counts them. Reads still pass."""
    fd, data = direct(16 * BLOCK)
    with aio_ext.Queue(block_nbytes=BLOCK, inflight_nbytes=6 * BLOCK, inflight_write_nbytes=limit) as queue:
        assert queue.inflight_write_nbytes == min(limit or 6 * BLOCK, 6 * BLOCK)
        _aio._inject("write", 0, -1, None, delay=0.15)
        write = queue.write(fd, memory(8 * BLOCK), 0)
        time.sleep(0.05)
        assert queue.stats()["inflight_nbytes"] == most * BLOCK
        back = memory(BLOCK, 0)
        read = queue.read(fd, back, 12 * BLOCK, priority=aio_ext.DEMAND)
        assert read.wait(0.05) is (most < 6)
        _aio._inject()
        assert write.wait() and read.wait() and back == data[12 * BLOCK : 13 * BLOCK]


# ---- faults ----

NUM_BLOCKS = 5
FAULTS = {  # injected result, errno of one fault (None: the queue recovers), errno of a permanent fault
    "EIO": (-errno.EIO, errno.EIO, errno.EIO),
    "ENOSPC": (-errno.ENOSPC, errno.ENOSPC, errno.ENOSPC),
    "EINVAL": (-errno.EINVAL, errno.EINVAL, errno.EINVAL),
    "EAGAIN": (-errno.EAGAIN, None, errno.EAGAIN),
    "short by a sector": (512, None, errno.EIO),
    "short by half": (0.5, None, errno.EIO),
    "zero": (0.0, errno.EIO, errno.EIO),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("times", ["once", "always"])
@pytest.mark.parametrize("block", [0, NUM_BLOCKS // 2, NUM_BLOCKS - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_correct_bytes_or_in_one_typed_error(direct, fault, op, block, times):
    result, once, always = FAULTS[fault]
    expected = once if times == "once" else always
    fd, before = direct(NUM_BLOCKS * BLOCK)
    buffer = memory(NUM_BLOCKS * BLOCK)
    asked = bytes(buffer)
    with aio_ext.Queue(block_nbytes=BLOCK, inflight_nbytes=1) as queue:
        _aio._inject(op, block, 1 if times == "once" else -1, result)
        ticket = queue.read(fd, buffer, 0) if op == "read" else queue.write(fd, buffer, 0)
        if expected is None:
            assert ticket.wait()
            assert (bytes(buffer) == before) if op == "read" else (content(fd, len(before)) == asked)
        else:
            for _ in range(2):  # each wait raises the same error
                with pytest.raises(OSError) as caught:
                    ticket.wait()
                assert caught.value.errno == expected
                assert f"{op} of fd {fd} at file offset " in str(caught.value)
            offset = int(str(caught.value).split("file offset ")[1].split(":")[0])
            # EAGAIN is retried for a second and then meets every later block, too. Any of these blocks may fail first.
            last = NUM_BLOCKS - 1 if fault == "EAGAIN" else block
            assert block * BLOCK <= offset < (last + 1) * BLOCK
            assert ticket.done and queue.stats()["num_errors"] == 1
        assert _aio._inject() >= 1
        back = memory(BLOCK)  # the queue still transfers bytes
        queue.write(fd, buffer[:BLOCK], 0)
        assert queue.read(fd, back, 0).wait() and back == buffer[:BLOCK]


def test_the_failure_with_the_lowest_offset_is_reported(direct):
    fd, _ = direct(8 * BLOCK)
    with aio_ext.Queue(block_nbytes=BLOCK, inflight_nbytes=8 * BLOCK) as queue:
        _aio._inject("read", 3, 1, -errno.EIO, delay=0.05)  # completes last
        _aio._inject("read", 4, -1, -errno.EINVAL)
        with pytest.raises(OSError, match=f"file offset {3 * BLOCK}: asked for {BLOCK} bytes, got 0"):
            queue.read(fd, memory(8 * BLOCK), 0).wait()


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("missing", [1, 100, 511, 513, 4097, BLOCK - 1])
def test_a_short_direct_transfer_continues_at_an_aligned_offset(direct, op, missing):
    fd, before = direct(NUM_BLOCKS * BLOCK)
    buffer = memory(NUM_BLOCKS * BLOCK)
    asked = bytes(buffer)
    with aio_ext.Queue(block_nbytes=BLOCK) as queue:
        _aio._inject(op, 0, NUM_BLOCKS, missing)
        ticket = queue.read(fd, buffer, 0) if op == "read" else queue.write(fd, buffer, 0)
        assert ticket.wait()
        assert (bytes(buffer) == before) if op == "read" else (content(fd, len(before)) == asked)
        stats = queue.stats()
    assert stats[f"{op}_nbytes"] == len(before) and stats["num_repeats"] >= NUM_BLOCKS


def test_a_failed_request_does_not_affect_other_requests(direct):
    fd, data = direct(64 * BLOCK)
    with aio_ext.Queue(block_nbytes=BLOCK) as queue:
        _aio._inject("read", 0, 16, -errno.EIO, every=4)
        backs = [memory(BLOCK, 0) for _ in range(64)]
        tickets = [queue.read(fd, back, i * BLOCK) for i, back in enumerate(backs)]
        failed = 0
        for i, (ticket, back) in enumerate(zip(tickets, backs)):
            try:
                ticket.wait()
            except OSError:
                failed += 1
            else:
                assert back == data[i * BLOCK : (i + 1) * BLOCK]
    assert failed == 16


def test_reading_past_the_end_is_an_error(direct):
    fd, _ = direct(BLOCK + 512)
    with aio_ext.Queue(block_nbytes=BLOCK) as queue:
        for offset in (0, BLOCK, 4 * BLOCK):
            with pytest.raises(OSError, match="the file ends there") as caught:
                queue.read(fd, memory(2 * BLOCK), offset).wait()
            assert caught.value.errno == errno.EIO


def test_a_misaligned_request_names_the_alignment(direct):
    fd, _ = direct(2 * BLOCK)
    unit = aio_ext.direct_alignment(fd)[1]
    with aio_ext.Queue() as queue:
        for buffer, offset in ((memory(BLOCK + 1), 0), (memory(BLOCK), unit // 2), (memory(BLOCK + 8)[1 : BLOCK + 1], 0)):
            with pytest.raises(OSError, match=f"aligned to {aio_ext.direct_alignment(fd)[0]} bytes") as caught:
                queue.read(fd, buffer, offset).wait()
            assert caught.value.errno == errno.EINVAL


def test_a_bad_descriptor_is_an_error(direct):
    fd, _ = direct(BLOCK)
    with aio_ext.Queue() as queue:
        closed = os.dup(fd)
        os.close(closed)
        with pytest.raises(OSError) as caught:
            queue.read(closed, memory(BLOCK), 0).wait()
        assert caught.value.errno == errno.EBADF
        assert queue.read(fd, memory(BLOCK), 0).wait()


def without_libaio(monkeypatch, folder):
    """Make later processes find files with the names of libaio that are no libraries."""
    folder.mkdir()
    for name in ("libaio.so.1", "libaio.so.1t64"):
        (folder / name).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


@pytest.mark.long
def test_without_libaio_only_transfers_fail_and_name_the_package(tmp_path, monkeypatch):
    without_libaio(monkeypatch, tmp_path / "libraries")
    source = """
        import errno, os, sys
        import torch, infinity, aio_ext
        model = torch.nn.Linear(8, 8)
        infinity.offload(model, infinity.Config(device="cpu", dtype="fp32", param_tier="host", optimizer_state_tier="host"))
        optimizer = infinity.AdamW(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        print(aio_ext.crc32c(b"123456789"), aio_ext.direct_alignment(os.open(sys.argv[1], os.O_RDONLY))[0] >= 0)
        for use in (aio_ext.require_libaio, aio_ext.Queue, lambda: infinity.save(sys.argv[1] + "/saved", model, optimizer)):
            try:
                use()
            except OSError as error:
                print(error.errno == errno.ELIBACC, error)
    """
    done = run_python(source, tmp_path)
    first, *refused = done.stdout.splitlines()
    assert first == f"{0xE3069283} True", done.stderr
    assert len(refused) == 3
    for line in refused:
        assert line.startswith("True ") and "libaio.so.1: file too short" in line and "apt install libaio1" in line


def test_a_file_size_limit_is_an_error(tmp_path):
    source = """
        import aio_ext, errno, mmap, os, resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        with aio_ext.Queue() as queue:
            assert queue.write(fd, bytes(1 << 20), 0).wait()
            try:
                queue.write(fd, bytes(1 << 20), 512 << 10).wait()
            except OSError as error:
                assert error.errno in (errno.EFBIG, errno.EIO), error
                print("typed")
    """
    done = run_python(source, tmp_path / "file")
    assert done.stdout == "typed\n", done.stderr


def test_a_full_filesystem_is_an_error(tmp_path):
    source = """
        import aio_ext, errno, os, sys
        fd = os.open(sys.argv[1] + "/file", os.O_RDWR | os.O_CREAT)
        with aio_ext.Queue() as queue:
            assert queue.write(fd, bytes(512 << 10), 0).wait()
            try:
                queue.write(fd, bytes(4 << 20), 0).wait()
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
                print("typed")
    """
    mount = ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"]
    try:
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("this machine allows no private mounts")
    except FileNotFoundError:
        pytest.skip("this machine has no unshare")
    command = mount[:4] + [mount[4] + f' && exec {sys.executable} -c "$SOURCE" {tmp_path}']
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SOURCE": textwrap.dedent(source)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "typed\n", done.stderr


# ---- refusals of the kernel ----


@pytest.mark.few(1)
@pytest.mark.parametrize("result", [-errno.EAGAIN, -errno.EINTR, 0, 1], ids=["EAGAIN", "EINTR", "nothing", "partial"])
def test_a_thousand_refused_submits_lose_nothing(direct, result):
    fd, data = direct(256 * 4096)
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=8 * 4096) as queue:
        _aio._inject("io_submit", 0, 1000, result, every=2)
        fired = 0
        while fired < 1000:
            back = memory(len(data), 0)
            assert queue.read(fd, back, 0).wait(SECONDS) and back == data
            fired += _aio._inject()
            _aio._inject("io_submit", 0, 1000 - fired, result, every=2)
        stats = queue.stats()
    assert stats["num_wakeups"] < 20 * stats["num_blocks"]  # the I/O thread slept in between


def test_a_failed_submit_fails_only_its_request(direct):
    fd, data = direct(48 * 4096)
    with aio_ext.Queue(block_nbytes=4096) as queue:
        _aio._inject("io_submit", 0, 1, -errno.EIO)
        backs = [memory(16 * 4096, 0) for _ in range(3)]
        tickets = [queue.read(fd, back, number * len(back)) for number, back in enumerate(backs)]
        with pytest.raises(OSError) as caught:
            assert tickets[0].wait(SECONDS)
        assert caught.value.errno == errno.EIO
        assert tickets[1].wait(SECONDS) and tickets[2].wait(SECONDS)
        assert [bytes(back) for back in backs[1:]] == [data[16 * 4096 : 32 * 4096], data[32 * 4096 :]]
        assert queue.stats()["inflight_nbytes"] == 0


@pytest.mark.parametrize("block_kib, least", [(2048, 2), (1024, 4), (512, 4), (64, 4), (640, 6)])
def test_a_submit_of_several_blocks_has_at_most_one_mebibyte(direct, block_kib, least):
    fd, data = direct(4 << 20)
    with aio_ext.Queue(block_nbytes=block_kib << 10) as queue:
        back = memory(len(data), 0)
        assert queue.read(fd, back, 0).wait(SECONDS) and back == data
        stats = queue.stats()
    assert least <= stats["num_submits"] <= stats["num_blocks"]


def test_endless_eagain_is_an_error_without_a_busy_loop(direct):
    fd, _ = direct(BLOCK)
    with aio_ext.Queue() as queue:
        _aio._inject("io_submit", 0, -1, -errno.EAGAIN)
        with pytest.raises(OSError, match="refused the transfer for one second") as caught:
            queue.read(fd, memory(BLOCK), 0).wait()
        assert caught.value.errno == errno.EAGAIN
        assert queue.stats()["num_wakeups"] < 100
        _aio._inject()
        assert queue.read(fd, memory(BLOCK), 0).wait()


def test_interrupted_completions_are_fetched_again(direct):
    fd, data = direct(64 * 4096)
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=4096) as queue:
        _aio._inject("io_getevents", 0, 100, -errno.EINTR, every=2)
        back = memory(len(data), 0)
        assert queue.read(fd, back, 0).wait() and back == data


def test_a_broken_context_fails_all_requests_without_a_hang(direct):
    fd, data = direct(64 * 4096)
    queue = aio_ext.Queue(block_nbytes=4096, inflight_nbytes=4096)
    first = plug(queue, fd, 0.05)
    others = [queue.write(fd, memory(8192), 4096 * i) for i in range(16)]
    _aio._inject("io_getevents", 0, -1, -errno.EFAULT)
    for ticket in (first, *others):
        with pytest.raises(OSError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.EFAULT
    with pytest.raises(OSError, match="broke down earlier"):
        queue.read(fd, memory(4096), 0)
    queue.close()


def test_depth_is_halved_until_granted_with_a_warning():
    _aio._inject("io_setup", 0, 3, -errno.EAGAIN)
    with pytest.warns(RuntimeWarning, match="depth of 8 of the 64.*aio-max-nr"), aio_ext.Queue(depth=64) as queue:
        assert queue.depth == 8
    _aio._inject()
    _aio._inject("io_setup", 0, -1, -errno.EAGAIN)
    with pytest.raises(OSError, match="aio-max-nr") as caught:
        aio_ext.Queue()
    assert caught.value.errno == errno.EAGAIN


def test_a_warning_raised_as_an_error_leaves_no_queue():
    left = []
    gc.collect()  # frees queues in exceptions of earlier tests
    for _ in range(5):
        _aio._inject("io_setup", 0, 1, -errno.EAGAIN)
        with warnings.catch_warnings(), pytest.raises(RuntimeWarning):
            warnings.simplefilter("error")
            aio_ext.Queue()
        _aio._inject()
        left.append((sys.getrefcount(aio_ext.Queue), len(os.listdir("/proc/self/fd"))))
    assert left[1:] == [left[1]] * 4  # the first call fills caches of Python


# ---- signals ----


def signal_storm(direct, num_signals):
    fd, data = direct(4 << 20)
    delivered = 0

    def count(*_):
        nonlocal delivered
        delivered += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)  # SIGPROF comes with the kernel's tick only: 4 ms
    try:
        with aio_ext.Queue(block_nbytes=BLOCK) as queue:
            while delivered < num_signals:
                back = memory(len(data))
                queue.write(fd, data, 8 << 20).wait() if delivered % 7 == 0 else None
                assert queue.read(fd, back, 0).wait()
                assert back == data
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def aligned_copy(data):
    pages = memory(len(data), 0)
    pages[:] = data
    return pages


@pytest.mark.slow
def test_bytes_survive_a_storm_of_signals(direct):
    signal_storm(lambda n: (lambda fd, data: (fd, aligned_copy(data)))(*direct(n)), 500)


@pytest.mark.long
def test_bytes_survive_ten_thousand_signals(direct):
    signal_storm(lambda n: (lambda fd, data: (fd, aligned_copy(data)))(*direct(n)), 10_000)


def test_a_wait_can_be_interrupted_and_repeated(direct):
    fd, _ = direct()

    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=1) as queue:
            ticket = plug(queue, fd, 1.0)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(Alarm):
                ticket.wait()
            assert not ticket.done
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(Alarm):
                queue.close()
            assert ticket.wait()
    finally:
        signal.signal(signal.SIGALRM, before)


# ---- order ----


def ordering(fd, unit, num_rounds, seed):
    random.seed(seed)
    num_units = 64
    model = bytearray(random.randbytes(num_units * unit))
    os.pwrite(fd, aligned_copy(model), 0)
    _aio._inject("write", 0, -1, None, every=5, delay=0.002)
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=16 << 10, depth=16) as queue:
        for _ in range(num_rounds):
            reads, tickets = [], []
            for _ in range(500):
                size = random.randint(1, 12)
                start = random.randint(0, num_units - size) * unit
                end = start + size * unit
                if random.random() < 0.5:
                    data = memory(size * unit)
                    model[start:end] = data
                    tickets.append(queue.write(fd, data, start, priority=random.randrange(3)))
                else:
                    back = memory(size * unit, 0)
                    tickets.append(queue.read(fd, back, start, priority=random.randrange(3)))
                    reads.append((back, bytes(model[start:end])))
                if random.random() < 0.1:
                    random.choice(tickets).promote(random.randrange(3))
            assert all(ticket.wait() for ticket in tickets)
            assert all(back == expected for back, expected in reads)
    assert content(fd, len(model)) == model
    assert _aio._inject() > 100 * num_rounds / 5


def test_a_read_sees_the_last_write(direct):
    fd, _ = direct()
    ordering(fd, max(aio_ext.direct_alignment(fd)), 4, seed=1)


@pytest.mark.long
def test_a_read_sees_the_last_write_in_ten_thousand_operations(direct):
    fd, _ = direct()
    ordering(fd, max(aio_ext.direct_alignment(fd)), 20, seed=2)


def test_writes_of_the_same_bytes_land_in_order(direct):
    fd, _ = direct(4096)
    with aio_ext.Queue() as queue:
        _aio._inject("write", 0, 1, None, delay=0.05)
        for value in range(50):
            queue.write(fd, memory(4096, value), 0, priority=2 - value % 3)
    assert content(fd, 4096) == bytes([49]) * 4096


def test_reads_of_the_same_bytes_do_not_wait_for_each_other(direct):
    fd, _ = direct(4096)
    with aio_ext.Queue() as queue:
        _aio._inject("read", 0, 1, None, delay=0.3)
        late = queue.read(fd, memory(4096), 0)
        assert queue.read(fd, memory(4096), 0).wait() and not late.done


def test_a_failed_write_unblocks_the_requests_behind_it(direct):
    fd, data = direct(4096)
    with aio_ext.Queue() as queue:
        _aio._inject("write", 0, 1, -errno.EIO, delay=0.05)
        ticket = queue.write(fd, memory(4096, 1), 0)
        back = memory(4096, 0)
        assert queue.read(fd, back, 0).wait() and back == data
        with pytest.raises(OSError):
            ticket.wait()


def first_served(queue, submit):
    """Indices of the tickets of `submit` that fail: the first read and the first write that reach the kernel."""
    tickets = submit()
    for op in ("read", "write"):
        _aio._inject(op, 0, 1, -errno.EIO)
    failed = []
    for i, ticket in enumerate(tickets):
        try:
            ticket.wait()
        except OSError:
            failed.append(i)
    return failed


def test_requests_are_served_by_priority_then_in_order(direct):
    fd, _ = direct(64 * 4096)
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=1) as queue:
        for priorities, served in (([1, 1, 1], 0), ([2, 1, 1], 1), ([2, 1, 0, 0], 2), ([2, 2], 0)):
            plugged = plug(queue, fd)
            failed = first_served(
                queue, lambda: [queue.read(fd, memory(4096), 4096 * i, priority=p) for i, p in enumerate(priorities)]
            )
            assert plugged.wait() and failed == [served]
            _aio._inject()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "room, num_writes",
    [({"inflight_nbytes": 4 * BLOCK}, 2), ({"inflight_nbytes": 4 * BLOCK, "inflight_write_nbytes": BLOCK}, 1), ({"depth": 4}, 2)],
    ids=["bytes", "bound", "blocks"],
)
def test_waiting_reads_and_writes_share_the_bytes_in_flight(direct, room, num_writes):
    fd, _ = direct(64 * BLOCK)
    for op in ("read", "write"):
        _aio._inject(op, 0, -1, None, delay=0.05)
    num_seen = 0
    for _ in range(9):  # this thread may get no core while both requests wait
        with aio_ext.Queue(block_nbytes=BLOCK, **room) as queue:
            first = queue.read(fd, memory(4 * BLOCK), 0)
            read = queue.read(fd, memory(30 * BLOCK), 4 * BLOCK, priority=aio_ext.DEMAND)
            write = queue.write(fd, memory(30 * BLOCK), 34 * BLOCK)
            assert first.wait()
            while not read.done and not write.done:
                stats = queue.stats()
                inflight = {"write": stats["inflight_write_nbytes"]}
                inflight["read"] = stats["inflight_nbytes"] - inflight["write"]
                waiting = [stats[f"{op}_nbytes"] + inflight[op] < (34 if op == "read" else 30) * BLOCK for op in inflight]
                # before the first blocks of the write are done, earlier reads may still be in flight
                if all(waiting) and stats["write_nbytes"] >= 4 * BLOCK:
                    num_seen += 1
                    assert inflight == {"write": num_writes * BLOCK, "read": (4 - num_writes) * BLOCK}
                time.sleep(0.002)
        if num_seen:
            return
    pytest.fail("reads and writes were never in flight together")


def test_a_write_that_blocks_a_demanded_read_goes_first(direct):
    fd, _ = direct(64 * BLOCK)
    for seconds in (0.2, 1, 5, 20):
        with aio_ext.Queue(block_nbytes=BLOCK, inflight_nbytes=4 * BLOCK) as queue:
            _aio._inject("read", 0, 4, None, delay=seconds)
            _aio._inject("write", 0, 1, -errno.EIO)
            first = queue.read(fd, memory(4 * BLOCK), 0)
            while queue.stats()["inflight_nbytes"] < 4 * BLOCK and not first.done:
                time.sleep(0.002)
            writes = [queue.write(fd, memory(BLOCK, i), (4 + i) * BLOCK) for i in range(20)]
            queue.read(fd, memory(BLOCK), (4 + 15) * BLOCK, priority=aio_ext.DEMAND)
            if not first.done:
                with pytest.raises(OSError):
                    writes[15].wait()
                return
        _aio._inject()
    pytest.fail("all reads were done before the write was submitted, in each of four tries")


def test_small_writes_leave_room_for_a_block_of_the_whole_limit(direct):
    fd, _ = direct(64 * BLOCK)
    with aio_ext.Queue(block_nbytes=BLOCK, inflight_nbytes=BLOCK) as queue:
        for op in ("read", "write"):
            _aio._inject(op, 0, -1, None, delay=0.1)
        queue.read(fd, memory(BLOCK), 0)
        tickets = [queue.write(fd, memory(4096), 2 * BLOCK + 4096 * i) for i in range(64)]
        read = queue.read(fd, memory(BLOCK), BLOCK, priority=aio_ext.DEMAND)
        while not read.done:
            stats = queue.stats()
            assert read.done or not stats["inflight_write_nbytes"]
            time.sleep(0.002)
        _aio._inject()
        assert all(ticket.wait() for ticket in tickets)


def test_promote_never_lowers_a_priority(direct):
    fd, _ = direct(64 * 4096)
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=1) as queue:
        plugged = plug(queue, fd)

        def submit():
            tickets = [queue.read(fd, memory(4096), 4096 * i) for i in range(3)]
            tickets[0].promote(aio_ext.WRITE)
            return tickets

        assert first_served(queue, submit) == [0] and plugged.wait()


def test_a_promoted_read_overtakes_200_prefetches(direct):
    fd, _ = direct(256 * 4096)
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=1) as queue:
        plugged = plug(queue, fd)

        def flood():
            tickets = [queue.read(fd, memory(8192), 4096 * i) for i in range(200)]
            tickets[150].promote()
            return tickets

        assert first_served(queue, flood) == [150] and plugged.wait()


@pytest.mark.parametrize("how", ["promote", "submit"])
def test_a_demanded_read_raises_the_chain_of_writes_before_it(direct, how):
    fd, _ = direct(256 * 4096)
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=1) as queue:
        plugged = plug(queue, fd)
        tickets = [queue.write(fd, memory(4096), 4096 * i) for i in range(100)]  # 100 writes before ...
        tickets.append(queue.write(fd, memory(8192), 200 * 4096))  # ... the chain: 100 <- 101 <- 102
        tickets.append(queue.write(fd, memory(8192), 201 * 4096))
        priority = aio_ext.PREFETCH if how == "promote" else aio_ext.DEMAND
        tickets += [queue.read(fd, memory(4096), 4096 * i) for i in range(210, 240)]
        last = queue.read(fd, memory(4096), 202 * 4096, priority=priority)
        if how == "promote":
            last.promote()
        _aio._inject("write", 0, 1, -errno.EIO)
        _aio._inject("read", 0, 1, -errno.EIO)
        with pytest.raises(OSError):  # the first read in the kernel
            last.wait()
        with pytest.raises(OSError):  # the first write in the kernel
            tickets[100].wait()
        assert plugged.wait() and all(ticket.wait() for i, ticket in enumerate(tickets) if i != 100)


# ---- threads, fork, exit ----


def hammer(fd, num_threads, num_operations):
    failures = []
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=64 << 10) as queue:

        def work(index):
            chance = random.Random(index)
            data, back = memory(8192), memory(8192, 0)
            try:
                for i in range(num_operations):
                    offset = 8192 * (index * 4 + i % 4)
                    data[:8] = i.to_bytes(8, "little")
                    first = queue.write(fd, data, offset, priority=chance.randrange(3))
                    second = queue.read(fd, back, offset, priority=chance.randrange(3))
                    second.promote(chance.randrange(3))
                    assert second.wait() and first.done and back == data
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = queue.stats()
    assert not failures
    assert stats["num_writes"] == stats["num_reads"] == num_threads * num_operations


def test_many_threads_share_a_queue(direct):
    hammer(direct()[0], 32, 60)


@pytest.mark.long
def test_many_threads_share_a_queue_for_long(direct):
    hammer(direct()[0], 32, 1000)


def test_a_wait_lets_other_threads_run(direct):
    fd, _ = direct()
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=1) as queue:
        ticket = plug(queue, fd, 0.2)
        steps = []
        thread = threading.Thread(target=lambda: [steps.append(ticket.done) for _ in range(1000)])
        thread.start()
        assert ticket.wait()
        thread.join()
        assert steps.count(False) > 0


SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())


@pytest.mark.skipif(SCHED_GETATTR is None, reason="the system call number of sched_getattr is unknown for this processor")
@pytest.mark.skipif(tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 12), reason="needs Linux 6.12 or newer")
def test_the_io_thread_asks_for_short_time_slices(direct):
    fd, data = direct(4096)
    with aio_ext.Queue() as queue:
        queue.read(fd, memory(4096), 0).wait()  # the thread runs
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text() == "aio_ext\n"]
        assert threads
        for thread in [os.getpid(), *threads]:
            attributes = ctypes.create_string_buffer(48)
            assert ctypes.CDLL(None).syscall(SCHED_GETATTR, thread, attributes, 48, 0) == 0
            _, policy, _, nice, _, turn_ns, _, _ = struct.unpack("IIQiIQQQ", attributes.raw)
            assert (policy, nice) == (os.sched_getscheduler(0), os.nice(0))
            assert (turn_ns == 100_000) == (thread in threads)


def test_close_from_any_thread_finishes_all_requests(direct):
    fd, data = direct(64 * BLOCK)
    for _ in range(20):
        queue = aio_ext.Queue(block_nbytes=BLOCK)
        backs = [memory(BLOCK, 0) for _ in range(64)]
        tickets = [queue.read(fd, back, i * BLOCK) for i, back in enumerate(backs)]
        closers = [threading.Thread(target=queue.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        assert all(ticket.done for ticket in tickets) and b"".join(backs) == data
        assert queue.closed and queue.close() is None


def test_a_dropped_queue_finishes_its_writes(direct):
    fd, _ = direct()
    _aio._inject("write", 0, 1, None, delay=0.05)
    aio_ext.Queue().write(fd, memory(4 << 20, 7), 0)
    assert content(fd, 4 << 20) == bytes([7]) * (4 << 20)


def test_tickets_outlive_their_queue(direct):
    fd, data = direct(BLOCK)
    back = memory(BLOCK, 0)
    ticket = aio_ext.Queue().read(fd, back, 0)
    assert ticket.wait() and ticket.done and back == data and "done" in repr(ticket)


EXIT = """
    import aio_ext, mmap, os, sys, threading
    from aio_ext import _aio
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    _aio._inject("write", 0, -1, None, delay=0.02)
    keep = []
    for i in range(4):
        queue = aio_ext.Queue(block_nbytes=65536)
        pages = mmap.mmap(-1, 1 << 20)
        pages[:] = bytes([i + 1]) * len(pages)
        ticket = queue.write(fd, pages, i << 20)
        {keep}
"""
KEEP = {  # references that exist when the interpreter exits
    "all": "keep += [queue, ticket, pages]",
    "queue": "keep.append(queue)",
    "cycle": "me = [queue, ticket, pages]; me.append(me); del queue, ticket, pages",
    "daemon": "threading.Thread(target=ticket.wait, daemon=True).start(); keep.append(queue)",
    "leak": "import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(queue))",
    "module": "sys.modules['aio_ext'].leaked = (queue, ticket, keep); keep.append(ticket)",
}


def exit_with_io_pending(path, keep):
    done = run_python(EXIT.format(keep=KEEP[keep]), path)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes() == b"".join(bytes([i + 1]) * (1 << 20) for i in range(4))


@pytest.mark.few(2)
@pytest.mark.parametrize("keep", KEEP)
def test_interpreter_exit_finishes_pending_io(tmp_path, keep):
    exit_with_io_pending(tmp_path / "file", keep)


@pytest.mark.long
def test_a_hundred_exits_with_io_pending(tmp_path):
    for i in range(100):
        exit_with_io_pending(tmp_path / f"file{i}", list(KEEP)[i % len(KEEP)])


FORK = """
    import aio_ext, mmap, os, sys
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
    pages = mmap.mmap(-1, 1 << 20)
    queue = aio_ext.Queue(block_nbytes=65536)
    done = queue.write(fd, pages, 0)
    done.wait()
    for i in range(int(sys.argv[2])):
        pages[:8] = i.to_bytes(8, "little")
        ticket = queue.write(fd, pages, 0)
        pid = os.fork()
        if not pid:
            uses = [lambda: queue.read(fd, pages, 0), lambda: queue.write(fd, pages, 0), queue.stats, queue.close, ticket.wait,
                    ticket.promote, lambda: ticket.done, done.wait]
            for use in uses:
                try:
                    use()
                except RuntimeError as error:
                    assert "forked child" in str(error)
                else:
                    os._exit(3)
            assert ticket.nbytes == 1 << 20 and repr(ticket) and repr(queue)
            with aio_ext.Queue() as mine:  # a queue of the child works
                mine.read(fd, bytearray(4096), 0).wait()
            del queue, ticket, done
            sys.exit(0)  # with exit handlers and destructors
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert ticket.wait()
        assert os.pread(fd, 8, 0) == i.to_bytes(8, "little")
    print("done")
"""


@pytest.mark.parametrize("num_forks", [10, pytest.param(100, marks=pytest.mark.long)])
def test_a_forked_child_is_refused_and_harms_nothing(tmp_path, num_forks):
    done = run_python(FORK, tmp_path / "file", num_forks)
    assert done.stdout == "done\n", done.stderr


# ---- arguments and references ----


def wrong_arguments(queue, fd):
    numpy = pytest.importorskip("numpy")
    good = bytearray(4096)
    for method in (queue.read, queue.write):
        yield method, (), {}, TypeError
        yield method, (fd, good), {}, TypeError
        yield method, ("0", good, 0), {}, TypeError
        yield method, (fd, None, 0), {}, TypeError
        yield method, (fd, "text", 0), {}, TypeError
        yield method, (fd, good, 0.5), {}, TypeError
        yield method, (fd, good, 0, 1), {}, TypeError  # priority is keyword-only
        yield method, (fd, good, 0), {"speed": 1}, TypeError
        yield method, (-1, good, 0), {}, ValueError
        yield method, (fd, good, -1), {}, ValueError
        yield method, (fd, good, 2**63 - 1), {}, ValueError
        yield method, (fd, good, 2**64), {}, OverflowError
        yield method, (2**40, good, 0), {}, OverflowError
        yield method, (fd, good, 0), {"priority": 3}, ValueError
        yield method, (fd, good, 0), {"priority": -1}, ValueError
        yield method, (fd, memoryview(good)[::2], 0), {}, BufferError
        yield method, (fd, numpy.zeros((8, 8))[:, ::2], 0), {}, (ValueError, BufferError)
    yield queue.read, (fd, bytes(4096), 0), {}, BufferError
    yield queue.read, (fd, memoryview(good).toreadonly(), 0), {}, BufferError


def test_wrong_arguments_raise_and_leak_nothing(direct):
    fd, _ = direct(4096)
    with aio_ext.Queue() as queue:
        for method, arguments, keywords, expected in wrong_arguments(queue, fd):
            buffer = arguments[1] if len(arguments) > 1 else None
            references = sys.getrefcount(buffer), sys.getrefcount(aio_ext.Ticket)
            with pytest.raises(expected):
                method(*arguments, **keywords)
            assert (sys.getrefcount(buffer), sys.getrefcount(aio_ext.Ticket)) == references, arguments
            if isinstance(buffer, bytearray):
                buffer.append(0), buffer.pop()  # no exported buffer is left
        assert queue.stats()["num_blocks"] == 0
        ticket = queue.read(fd, memory(4096), 0)
        for call, expected in (
            (lambda: ticket.promote(3), ValueError),
            (lambda: ticket.promote(-1), ValueError),
            (lambda: ticket.promote("0"), TypeError),
            (lambda: ticket.wait("1"), TypeError),
            (lambda: ticket.wait(float("nan")), ValueError),
            (lambda: aio_ext.direct_alignment("x"), TypeError),
            (lambda: aio_ext.direct_alignment(10**6), OSError),
            (lambda: aio_ext.Ticket(), TypeError),
            (lambda: ticket.promote(0, 1), TypeError),
            (lambda: ticket.wait(1, 2), TypeError),
            (lambda: ticket.wait(seconds=1), TypeError),
            (lambda: setattr(ticket, "nbytes", 1), AttributeError),
            (lambda: setattr(queue, "depth", 1), AttributeError),
            (lambda: queue.close(1), TypeError),
            (lambda: queue.stats(1), TypeError),
            (lambda: aio_ext.Queue(inflight_write_nbytes="1"), TypeError),
            (lambda: aio_ext.Queue(inflight_write_nbytes=2**70), OverflowError),
            (lambda: _aio._inject("sleep"), ValueError),
            (lambda: _aio._inject("read", every=0), ValueError),
            (lambda: _aio._inject("read", result=1.5), ValueError),
            (lambda: _aio._inject("io_setup", delay=1.0), ValueError),
        ):
            with pytest.raises(expected):
                call()
    for submit in (queue.read, queue.write):
        buffer = bytearray(4096)
        with pytest.raises(ValueError, match="closed queue"):
            submit(fd, buffer, 0)
        buffer.append(0)


def test_requests_refused_by_the_kernel_raise_and_leak_nothing(direct, tmp_path):
    fd, _ = direct(2 * BLOCK)
    path = f"/proc/self/fd/{fd}"
    read_only, write_only, closed = os.open(path, os.O_RDONLY), os.open(path, os.O_WRONLY), os.dup2(fd, 900)
    os.close(closed)
    folder, pipe = os.open(tmp_path, os.O_RDONLY), os.pipe()
    page, odd = memory(4096), memory(4097)[1:]
    with aio_ext.Queue() as queue:
        for submit, *arguments in [
            (queue.read, fd, page, 1),
            (queue.write, fd, page, 1),
            (queue.read, fd, page[:100], 0),
            (queue.write, fd, page[:100], 0),
            (queue.read, fd, odd[:255], 0),
            (queue.read, fd, page, 2 * BLOCK),
            (queue.read, fd, page, 1 << 62),
            (queue.write, fd, page, (1 << 63) - 8192),
            (queue.read, closed, page, 0),
            (queue.write, closed, page, 0),
            (queue.read, write_only, page, 0),
            (queue.write, read_only, page, 0),
        ]:
            before = sys.getrefcount(arguments[1])
            ticket = submit(*arguments)
            for _ in range(2):
                with pytest.raises(OSError) as caught:
                    ticket.wait()
                assert caught.value.errno in (errno.EINVAL, errno.EIO, errno.EBADF, errno.EFBIG)
            assert f"file offset {arguments[2]}" in str(caught.value)
            del ticket, caught
            queue.stats()
            after = sys.getrefcount(arguments[1])
            assert after == before, arguments
        for submit, other in [(queue.read, folder), (queue.read, pipe[0]), (queue.write, pipe[1])]:
            with pytest.raises(ValueError, match="expected a regular file or a block device"):
                submit(other, page, 0)
    for other in (read_only, write_only, folder, *pipe):
        os.close(other)


@pytest.mark.parametrize(
    "settings",
    [
        {"block_nbytes": 0},
        {"block_nbytes": 4095},
        {"block_nbytes": 5000},
        {"block_nbytes": 2 << 30},
        {"inflight_nbytes": 0},
        {"inflight_write_nbytes": 0},
        {"inflight_write_nbytes": -4096},
        {"depth": 0},
        {"depth": 65537},
        {"depth": -1},
    ],
)
def test_wrong_settings_are_named(settings):
    with pytest.raises(ValueError, match=f"{list(settings)[0]}={list(settings.values())[0]}: expected"):
        aio_ext.Queue(**settings)
    with pytest.raises(TypeError):
        aio_ext.Queue(1 << 20)


def test_methods_leave_reference_counts_unchanged(direct):
    fd, _ = direct(BLOCK)
    queue, kept, buffer = aio_ext.Queue(), None, bytearray(memory(BLOCK))
    plain = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    kept = queue.read(plain, bytearray(512), 0)
    kept.wait()

    def read_and_wait():
        assert queue.read(plain, buffer, 0).wait()

    def write_and_wait():
        assert queue.write(plain, buffer, 0).wait(10)

    def submit_and_drop():
        queue.read(plain, buffer, 0)
        while any(queue.stats()[name] for name in ("queued_nbytes", "inflight_nbytes")):
            time.sleep(0.0005)

    def fail():
        with pytest.raises(OSError):
            queue.read(plain, buffer, 1 << 40).wait()

    def enter_and_exit():
        with aio_ext.Queue() as other:
            other.read(plain, buffer, 0)

    actions = [read_and_wait, write_and_wait, submit_and_drop, fail, enter_and_exit, queue.stats, kept.wait, kept.promote]
    actions += [lambda: kept.done, lambda: kept.nbytes, lambda: repr(kept), lambda: repr(queue), lambda: queue.depth]
    things = [queue, kept, buffer, aio_ext.Ticket, aio_ext.Queue, _aio]
    for action in actions:
        for num_calls in (3, 200):  # the first calls fill caches and pools
            before = [sys.getrefcount(thing) for thing in things]
            for _ in range(num_calls if action is not enter_and_exit else 20):
                action()
            queue.stats()
            after = [sys.getrefcount(thing) for thing in things]
        assert after == before, action
    buffer.append(0)  # no view holds the buffer
    queue.close()
    os.close(plain)


def test_a_buffer_is_held_from_submit_to_completion(direct):
    fd, _ = direct()
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=1) as queue:
        plugged = plug(queue, fd, 0.1)
        buffer = bytearray(4096)
        plain = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        ticket = queue.write(plain, buffer, 0)
        with pytest.raises(BufferError):
            buffer.append(0)
        del ticket
        with pytest.raises(BufferError):
            buffer.append(0)
        assert plugged.wait()
        queue.close()
        buffer.append(0)
        os.close(plain)


def test_wait_times_out_and_then_succeeds(direct):
    fd, _ = direct()
    with aio_ext.Queue(block_nbytes=4096, inflight_nbytes=1) as queue:
        ticket = plug(queue, fd, 0.2)
        assert ticket.wait(0) is False and ticket.wait(-1) is False and ticket.wait(0.001) is False and not ticket.done
        assert ticket.wait(1e12) is True and ticket.wait(0) is True and ticket.done


def test_the_steady_state_allocates_no_memory(direct):
    fd, _ = direct(BLOCK)
    back = memory(4096)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    with aio_ext.Queue() as queue:
        for _ in range(500):
            queue.read(fd, back, 0).wait()
        before = resident()
        for _ in range(5000):
            queue.read(fd, back, 0).wait()
        assert resident() - before < 256 << 10


def test_alignment_is_a_power_of_two_or_the_default(direct, tmp_path):
    fd, _ = direct()
    for value in aio_ext.direct_alignment(fd):
        assert value in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 65536)
    pipe = os.pipe()
    assert aio_ext.direct_alignment(pipe[0]) == (4096, 4096)
    for end in pipe:
        os.close(end)


def test_representations_are_short(direct):
    fd, _ = direct(4096)
    with aio_ext.Queue(depth=8) as queue:
        ticket = queue.read(fd, memory(4096), 0)
        ticket.wait()
        assert repr(ticket) == "Ticket(read of 4096 bytes at 0, done)"
        assert repr(queue) == "Queue(block_nbytes=1048576, inflight_nbytes=8388608, depth=8)"
