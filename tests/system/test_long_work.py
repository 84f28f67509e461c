"""Lines about long work: none if the work is short, then one every five seconds."""

import pytest

from infinity.system import progress
from infinity.system.arena import Arena
from infinity.system.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress, "now", lambda: clock[0])
    return clock


def told_in_parts(clock, seconds):
    """The lines about eight parts of 1 GiB, each of which takes so many seconds."""
    told = []
    work = Progress("rank 0 of 2, writes the first records", 8 << 30, told.append)
    for _ in range(8):
        clock[0] += seconds
        work.add(1 << 30)
    return told


def test_short_work_says_nothing(clock):
    assert told_in_parts(clock, 0.6) == []


def test_long_work_says_a_line_every_five_seconds(clock):
    assert told_in_parts(clock, 2) == [
        "rank 0 of 2, writes the first records: 3.0 GiB of 8.0 GiB after 6 s",
        "rank 0 of 2, writes the first records: 6.0 GiB of 8.0 GiB after 12 s",
    ]


def test_more_bytes_than_expected_count_as_all(clock):
    told = []
    work = Progress("reserves host memory", 1 << 30, told.append)
    clock[0] += 5
    work.add(2 << 30)
    assert told == ["reserves host memory: 1.0 GiB of 1.0 GiB after 5 s"]


def test_an_arena_reports_each_region():
    sizes = []
    arena = Arena(on_region=sizes.append)
    for nbytes in (4096, 5000):
        arena.region(nbytes)
    arena.close()
    assert sizes == [4096, 8192]
