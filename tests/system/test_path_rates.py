"""path_rates: a path that becomes slow is named, measured again at the next start, and gets fewer bytes of new extents."""

import os
from pathlib import Path

import pytest
from support.helpers import memory

from aio_ext import _aio
from infinity.system import drives, path_rates
from infinity.system.path_rates import MEASURED_NBYTES, PathRates
from infinity.system.swap import Swap

PATHS = [Path("a"), Path("b"), Path("c")]
MIB = 1 << 20


def play(rates, *turns):
    """Measure after each turn. A turn: seconds in which each path moves its share of the bytes. Returns the paths named at each turn."""
    found, moved, busy = [], [0] * len(PATHS), [0.0] * len(PATHS)
    given = list(rates.weights)
    for seconds in turns:
        for path, taken in enumerate(seconds):
            moved[path] += int(10**9 * given[path]) if taken else 0
            busy[path] += taken
        found.append([path for path, _ in rates.measure(list(zip(moved, busy)))])
    return found


ALIKE, SLOW = (1.0, 1.0, 1.0), (1.0, 2.5, 1.0)


def test_two_measurements_find_a_path_that_has_become_slow():
    rates = PathRates(PATHS, [1.0, 2.0, 1.0])
    assert play(rates, ALIKE, SLOW, SLOW, SLOW) == [[], [], [1], []]
    assert rates.weights == pytest.approx([1.0, 0.8, 1.0])


def test_a_path_that_recovers_has_its_old_weight_and_no_other_is_named():
    rates = PathRates(PATHS, [1.0, 2.0, 1.0])
    assert play(rates, ALIKE, SLOW, SLOW, ALIKE, ALIKE, ALIKE) == [[], [], [1], [], [], []]
    assert rates.weights == [1.0, 2.0, 1.0]


def test_paths_that_differ_from_the_start_are_not_named():
    """As with another number of queues, or latencies beside different rates."""
    rates = PathRates(PATHS, [4.0, 1.0, 0.1])
    assert play(rates, *[(9.0, 1.0, 0.3)] * 5) == [[]] * 5
    assert rates.weights == [4.0, 1.0, 0.1]


def test_a_change_of_all_paths_together_is_no_fault_of_a_drive():
    rates = PathRates(PATHS, [1.0, 1.0, 1.0])
    assert play(rates, ALIKE, (5.0, 5.0, 5.0), (5.0, 5.0, 5.0), (0.2, 0.2, 1.0), (0.2, 0.2, 1.0)) == [[]] * 5


def test_a_pause_of_one_measurement_is_forgotten():
    rates = PathRates(PATHS, [1.0, 1.0, 1.0])
    assert play(rates, ALIKE, SLOW, ALIKE, SLOW, ALIKE) == [[]] * 5


def test_a_path_without_transfers_hides_no_other():
    rates = PathRates(PATHS, [1.0, 1.0, 1.0])
    assert play(rates, (1.0, 1.0, 0.0), (1.0, 9.0, 0.0), (1.0, 9.0, 0.0)) == [[], [], [1]]


def test_measurements_come_after_so_many_bytes_and_never_for_one_path():
    rates = PathRates(PATHS, [1.0, 1.0, 1.0])
    assert not rates.is_due(3 * MEASURED_NBYTES - 1) and rates.is_due(3 * MEASURED_NBYTES)
    rates.measure([(MEASURED_NBYTES, 1.0)] * 3)
    assert not rates.is_due(6 * MEASURED_NBYTES - 1) and rates.is_due(6 * MEASURED_NBYTES)
    assert not PathRates(PATHS[:1], [1.0]).is_due(1 << 50)


def test_a_drive_that_becomes_slow_is_named_and_gets_fewer_bytes(paths, monkeypatch, capsys):
    """Injected delays: both paths move 250 MiB/s, then the second one 25 MiB/s."""
    monkeypatch.setattr(path_rates, "MEASURED_NBYTES", 16 * MIB)
    for path in paths[:2]:
        fd = os.open(path, os.O_RDONLY)
        drives.store(fd, drives.Drive(nbytes_per_s=250 * MIB))
        os.close(fd)
    with Swap(paths[:2]) as swap:
        extents = [swap.allocate(8 * MIB) for _ in range(4)]
        swap.reserve()

        def write(times):
            data = memory(8 * MIB)
            for _ in range(times):
                for transfer in [swap.write(extent, data) for extent in extents]:
                    transfer.wait()

        def delays(*seconds):
            _aio._inject()
            for directory, delay in zip(swap._directories, seconds):
                _aio._inject("write", 0, -1, None, delay=delay, fd=directory.file)

        delays(0.004, 0.004)
        write(4)
        assert "slow" not in capsys.readouterr().err
        delays(0.004, 0.04)
        write(5)
        _aio._inject()
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "has become slow" in line]
        assert str(paths[1]) in line and str(paths[0]) not in line
        assert (paths[0] / drives.CACHE_NAME).exists() and not (paths[1] / drives.CACHE_NAME).exists()
        sizes = [0, 0]
        for stripe in swap.extend(20 * MIB).stripes:
            sizes[stripe.path] = stripe.nbytes
        assert sizes[0] > 5 * sizes[1]
