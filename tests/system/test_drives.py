"""drives: measurements are stored, validated and reused; a slow path gets its share of the bytes and no more."""

import contextlib
import errno
import json
import os
import threading
import time
import warnings

import pytest
from support.helpers import everything_in, memory, slow_down

import aio_ext
from aio_ext import _aio
from infinity.errors import SwapError
from infinity.system import drives
from infinity.system import swap as swap_module
from infinity.system.drives import Drive
from infinity.system.swap import Swap

MIB = 1 << 20
MUCH = 2 << 40  # expected bytes of swap: enough for a measurement


def keep(path, **fields):
    """Store a measurement of a path."""
    fd = os.open(path, os.O_RDONLY)
    drives.store(fd, Drive(**fields))
    os.close(fd)


@contextlib.contextmanager
def file_of(path, nbytes=drives.SCRATCH_NBYTES):
    fd = os.open(path / "scratch", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, nbytes)
    yield fd
    os.close(fd)
    os.unlink(path / "scratch")


# ---- measuring ----


@pytest.mark.slow
def test_a_path_is_measured_once_and_its_settings_are_used(paths, monkeypatch):
    real, measured = drives.measure, []
    monkeypatch.setattr(drives, "measure", lambda fd, nbytes: measured.append(real(fd, nbytes)) or measured[-1])
    start = time.monotonic()
    with Swap(paths[:1], expected_nbytes=MUCH) as swap:
        print(f"measured in {time.monotonic() - start:.1f} s: {measured[0]}")
        assert time.monotonic() - start < 30
        swap.allocate(MIB)
        swap.reserve()
        (directory,) = swap._directories
        assert directory.drive == measured[0] and measured[0].nbytes_per_s > 1e6 and 1e-6 < measured[0].block_s < 1
        assert len(directory.queues) == measured[0].num_queues
        for queue in directory.queues:
            assert queue.block_nbytes == measured[0].block_nbytes and queue.depth == measured[0].depth
            assert queue.inflight_nbytes <= measured[0].inflight_nbytes
            assert queue.inflight_write_nbytes <= max(2 * queue.block_nbytes, measured[0].inflight_write_nbytes)
        assert directory.file_path.stat().st_size == MIB  # the scratch file is gone
    assert everything_in(paths[0]) == [drives.CACHE_NAME]
    assert (paths[0] / drives.CACHE_NAME).stat().st_mode & 0o777 == 0o600
    for expected_nbytes in (0, MUCH):  # a run with too little swap to measure uses the stored result, too
        with Swap(paths[:1], expected_nbytes=expected_nbytes) as swap:
            assert swap._directories[0].drive == measured[0]
    assert len(measured) == 1


def test_little_swap_is_not_worth_measuring(paths, monkeypatch):
    monkeypatch.setattr(drives, "measure", None)
    with Swap(paths, expected_nbytes=len(paths) * swap_module.MEASURE_FROM_NBYTES - 1) as swap:
        assert [directory.drive for directory in swap._directories] == [Drive()] * len(paths)
    assert everything_in(*paths) == []


def test_a_slow_path_is_found_and_named_also_with_little_swap(paths, monkeypatch):
    slow_down(monkeypatch, (0.0, 0.03))
    with pytest.warns(RuntimeWarning) as warned, Swap(paths[:2]) as swap:
        fast, slow = (sum(stripe.nbytes for stripe in swap.allocate(40 * MIB).stripes if stripe.path == path) for path in (0, 1))
    assert 2 < fast / slow
    one_drive, named = [str(warning.message) for warning in warned]
    assert one_drive.startswith(f"swap directories {paths[0]} and {paths[1]} lie on one ")
    assert named.startswith(f"swap directory {paths[1]} is slow: ") and str(paths[0]) in named
    assert everything_in(*paths) == []


def test_one_rank_warns_of_slow_paths_at_each_start(paths):
    for path, rate in zip(paths, (1e9, 1e8)):
        keep(path, nbytes_per_s=rate)
    for rank, num in ((1, 0), (0, 2)):
        with warnings.catch_warnings(record=True) as warned, Swap(paths[:2], rank=rank, world=2, run="run"):
            assert len(warned) == num
    with warnings.catch_warnings(record=True) as warned, Swap(paths[:1]):
        assert not warned


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_path_that_fails_in_the_comparison_is_named(paths, op):
    _aio._inject(op, 3, 1, -errno.EIO)
    with pytest.raises(SwapError, match="measuring the drive failed.*see dmesg") as caught:
        Swap(paths[:2])
    assert caught.value.errno == errno.EIO and caught.value.filename.startswith(str(paths[0]))
    assert everything_in(*paths) == []


def test_simultaneous_ranks_measure_once_and_share_bytes_in_flight(paths, monkeypatch):
    measured, swaps = [], {}
    found = Drive(inflight_nbytes=16 * MIB, nbytes_per_s=1e9, block_s=1e-3)
    monkeypatch.setattr(drives, "measure", lambda fd, nbytes: time.sleep(0.2) or measured.append(fd) or found)

    def arrive(rank):
        swaps[rank] = Swap(paths[:1], rank=rank, world=4, run="run", expected_nbytes=MUCH)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for swap in swaps.values():
        swap.allocate(MIB)
        swap.reserve()
        assert swap._directories[0].queues[0].inflight_nbytes == 4 * MIB
    for swap in swaps.values():
        swap.close()
    assert len(measured) == 1 and everything_in(paths[0]) == [drives.CACHE_NAME]


GOOD = {"drive": {"inflight_nbytes": 8 * MIB, "nbytes_per_s": 1e9, "block_s": 0.001}}


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "",
        lambda content: "[]",
        lambda content: json.dumps(content)[:-9],
        lambda content: "\x00" * 4096,
        lambda content: "[" * 4096,
        lambda content: json.dumps(content | {"device": content["device"] + 1}),
        lambda content: json.dumps({"drive": content["drive"]}),
        *(
            lambda content, field=field, value=value: json.dumps(content | {"drive": content["drive"] | {field: value}})
            for field, value in [
                ("block_nbytes", 0),
                ("block_nbytes", 4097),
                ("block_nbytes", 16 * MIB),
                ("inflight_nbytes", -1),
                ("inflight_nbytes", 1 << 40),
                ("inflight_nbytes", "8MiB"),
                ("inflight_nbytes", 1.5e6),
                ("inflight_write_nbytes", 10**30),
                ("depth", 0),
                ("depth", 1 << 20),
                ("num_queues", 1000),
                ("num_queues", True),
                ("nbytes_per_s", -1.0),
                ("nbytes_per_s", None),
                ("block_s", float("nan")),
                ("colour", 1),
            ]
        ),
    ],
)
def test_an_invalid_measurement_file_leads_to_a_new_measurement(paths, monkeypatch, change):
    content = GOOD | {"device": paths[0].stat().st_dev}
    (paths[0] / drives.CACHE_NAME).write_text(json.dumps(content))
    with Swap(paths[:1]) as swap:
        assert swap._directories[0].drive == Drive(**GOOD["drive"])
    (paths[0] / drives.CACHE_NAME).write_text(change(content))
    found = Drive(nbytes_per_s=2e9)
    monkeypatch.setattr(drives, "measure", lambda fd, nbytes: found)
    with Swap(paths[:1]) as swap:
        assert swap._directories[0].drive == Drive()
    for _ in range(2):
        with Swap(paths[:1], expected_nbytes=MUCH) as swap:
            assert swap._directories[0].drive == found


@pytest.mark.parametrize("what", ["symlink", "directory", "pipe"])
def test_a_link_directory_or_pipe_as_cache_is_not_read_or_written(paths, monkeypatch, what):
    cache, other = paths[0] / drives.CACHE_NAME, paths[1] / "other"
    other.write_text(json.dumps(GOOD | {"device": paths[0].stat().st_dev}))
    before = other.read_text()
    {"symlink": lambda: cache.symlink_to(other), "directory": cache.mkdir, "pipe": lambda: os.mkfifo(cache)}[what]()
    monkeypatch.setattr(drives, "measure", lambda fd, nbytes: Drive(nbytes_per_s=1.0))
    with Swap(paths[:1], expected_nbytes=MUCH) as swap:
        assert swap._directories[0].drive == Drive(nbytes_per_s=1.0)
    assert other.read_text() == before


def test_a_disk_too_full_for_a_measurement_gets_defaults(paths, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with Swap(paths[:1], expected_nbytes=MUCH) as swap:
        assert swap._directories[0].drive == Drive()
    assert everything_in(paths[0]) == []


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_drive_that_fails_in_the_measurement_is_named(paths, op):
    _aio._inject(op, 3, 1, -errno.EIO)
    with pytest.raises(SwapError, match="measuring the drive failed.*see dmesg") as caught:
        Swap(paths[:1], expected_nbytes=MUCH)
    assert caught.value.errno == errno.EIO and str(paths[0]) in caught.value.filename
    assert everything_in(paths[0]) == []


def test_a_filesystem_in_memory_is_not_measured(monkeypatch):
    monkeypatch.setattr(drives, "measure", None)
    if not os.path.ismount("/dev/shm"):
        pytest.skip("needs a tmpfs on /dev/shm")
    folder = f"/dev/shm/infinity-test-{os.getpid()}"
    os.mkdir(folder)
    try:
        with Swap([folder], expected_nbytes=MUCH) as swap:
            assert swap._directories[0].drive == Drive()
        assert os.listdir(folder) == []
    finally:
        os.rmdir(folder)


# ---- several paths ----


@pytest.mark.parametrize("rates", [(1e9, 1e9, 1e9), (3e9, 1e9, 2e9), (1e9, 5e9, 1e8), (7.3e9, 1.9e9, 0.4e9)])
def test_paths_hold_bytes_in_proportion_to_their_bandwidth(paths, rates):
    for path, rate in zip(paths, rates):
        keep(path, nbytes_per_s=rate)
    with Swap(paths) as swap:
        for nbytes in [64 * MIB] * 30 + [5 * MIB] * 20 + [64 * MIB + 4096] * 10 + [4096, 300_000] * 40:
            extent = swap.allocate(nbytes)
            assert sum(stripe.nbytes for stripe in extent.stripes) == extent.nbytes
            assert all(stripe.nbytes % MIB == 0 for stripe in extent.stripes[:-1])
        held = [directory.nbytes for directory in swap._directories]
        for nbytes, rate in zip(held, rates):
            assert abs(nbytes - sum(held) * rate / sum(rates)) <= 4 * MIB
        large = swap.allocate(100 * MIB)  # each large extent is divided in the same proportion
        for stripe in large.stripes:
            assert abs(stripe.nbytes - 100 * MIB * rates[stripe.path] / sum(rates)) <= 2 * MIB


def test_one_unmeasured_path_gives_all_paths_equal_shares(paths):
    keep(paths[0], nbytes_per_s=9e9)
    with Swap(paths) as swap:
        assert {stripe.nbytes for stripe in swap.allocate(30 * MIB).stripes} == {10 * MIB}


@pytest.mark.parametrize("by_itself", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_slow_path_gets_its_share_of_the_bytes(paths, by_itself):
    """Injected delays give the paths 250 and 62 MiB/s, both below the rate of the real drive. by_itself: rates are measured."""
    for path, delay in zip(paths, (0.004, 0.016)):
        with file_of(path) as fd:
            for op in ("read", "write"):
                _aio._inject(op, 0, -1, None, delay=delay, fd=fd)
            found = vars(drives.measure(fd, 64 * MIB)) if by_itself else {"nbytes_per_s": 2 * MIB / delay}
            keep(path, **found)
            _aio._inject()
    with Swap(paths[:2]) as swap:
        extents = [swap.allocate(8 * MIB) for _ in range(12)]
        fast, slow = (directory.nbytes for directory in swap._directories)
        assert 3 < fast / slow < 5
        swap.reserve()
        for directory, delay in zip(swap._directories, (0.004, 0.016)):
            for op in ("read", "write"):
                _aio._inject(op, 0, -1, None, delay=delay, fd=directory.file)
        data = memory(8 * MIB)
        seconds = []
        for _ in range(3):  # other work on the machine may slow down one try
            start = time.monotonic()
            for transfer in [swap.write(extent, data) for extent in extents]:
                transfer.wait()
            seconds.append(time.monotonic() - start)
        ideal = 96 / (250 + 62.5)  # MiB / (MiB/s of both paths)
        assert ideal * 0.9 < min(seconds) < ideal * 1.3  # equal shares would take 0.77 s
        back = memory(8 * MIB, 0)
        swap.read(extents[5], back).wait()
        assert back == data


@pytest.mark.slow
def test_two_queues_per_path_keep_the_order_of_overlapping_requests(paths):
    keep(paths[0], num_queues=2, block_nbytes=64 << 10, inflight_nbytes=128 << 10)
    with Swap(paths[:1]) as swap:
        extents = [swap.allocate(2 * MIB) for _ in range(6)]
        swap.reserve()
        assert len(swap._directories[0].queues) == 2
        datas = [memory(2 * MIB) for _ in range(4)]
        for round_ in range(20):
            backs = [memory(2 * MIB, 0) for _ in extents]
            for extent in extents:
                swap.write(extent, datas[round_ % 4])
            reads = [swap.read(extent, back, priority=aio_ext.DEMAND) for extent, back in zip(extents, backs)]
            assert all(read.wait() for read in reads)
            assert all(back == datas[round_ % 4] for back in backs)
        each = [queue.stats() for queue in swap._directories[0].queues]
        assert [stats["num_writes"] for stats in each] == [60, 60]
        (total,) = swap.stats().values()
        assert total["write_nbytes"] == sum(stats["write_nbytes"] for stats in each) == 240 * MIB


@pytest.mark.parametrize("op", ["read", "write"])
def test_the_failing_path_is_named(paths, op):
    with Swap(paths) as swap:
        extent = swap.allocate(6 * MIB)
        swap.reserve()
        swap.write(extent, memory(6 * MIB)).wait()
        _aio._inject(op, 0, -1, -errno.ENOSPC, fd=swap._directories[1].file)
        with pytest.raises(SwapError) as caught:
            (swap.read if op == "read" else swap.write)(extent, memory(6 * MIB)).wait()
        assert caught.value.errno == errno.ENOSPC and caught.value.filename.startswith(str(paths[1]))
