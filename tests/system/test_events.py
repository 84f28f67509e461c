"""Meters count the reports of several threads about one link completely, and overlapping times once."""

import random
import threading

import pytest

from infinity.system.events import Events

SECONDS = 20  # a thread that takes longer counts as hung


def busy(*spells):
    events = Events()
    for start, end in spells:
        events.moved("update", 0, 1, start, end)
    return events.meters["update"].busy_seconds


@pytest.mark.parametrize(
    "spells, seconds",
    [
        ([(0, 1), (2, 4)], 3),
        ([(0, 2), (1, 4)], 4),  # overlapping transfers
        ([(5, 8), (0, 10)], 10),  # the report of the other thread came first
        ([(2, 3), (5, 8), (0, 6)], 8),
        ([(0, 10), (5, 8)], 10),
        ([(1, 2), (4, 5), (4.5, 9), (6, 7)], 6),
    ],
)
def test_a_link_is_busy_while_at_least_one_transfer_runs(spells, seconds):
    assert busy(*spells) == seconds


def test_overlapping_times_of_two_threads_count_as_their_union():
    chance = random.Random(0)
    for _ in range(50):
        spells = []
        for _ in range(2):
            at = 0
            for _ in range(40):
                start = at + chance.randrange(3)
                at = start + chance.randrange(1, 6)
                spells.append((start, at))
        spells.sort(key=lambda spell: spell[1])
        moments = {moment for start, end in spells for moment in range(start, end)}
        assert busy(*spells) == len(moments)


def test_no_report_of_two_threads_is_lost_in_a_race():
    """The update lane and the training thread (records on the device) both report updates."""
    events, gate = Events(), threading.Barrier(2)

    def report():
        gate.wait(SECONDS)
        for number in range(20_000):
            events.moved("update", 0, 1, number, number + 0.5)

    threads = [threading.Thread(target=report) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert events.meters["update"].nbytes == 40_000
