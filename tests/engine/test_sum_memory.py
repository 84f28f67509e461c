"""Memory of sums: the bytes of ops after each sum, and the bytes that sums need beside activations, as literal sequences."""

from types import SimpleNamespace

import pytest

from infinity.engine.memory.sum_memory import SumMemory


class Chunk:
    """A chunk whose sum has `nbytes` bytes. has_host_place: for the sum."""

    def __init__(self, name, nbytes=15, *, trainable=True, has_host_place=True):
        self.name, self.nbytes, self.trainable, self.has_host_place = name, nbytes, trainable, has_host_place
        self.gradient = SimpleNamespace(job=None)

    def __repr__(self):
        return self.name


def run_step(memory, events, *, is_measured=True):
    """Run one step. events: bytes of an op, or the list of chunks whose sums come next. Returns the chunks of the step."""
    for event in events:
        if isinstance(event, int):
            memory.note_op(event)
        else:
            memory.note_sums(event)
    return memory.end_step(is_measured=is_measured)


@pytest.fixture
def memory():
    return SumMemory(lambda chunk: chunk.nbytes, [])


@pytest.fixture
def chunks():
    return [Chunk(name) for name in "abc"]


def test_later_bytes_are_those_of_the_largest_op_after_a_sum_comes(memory, chunks):
    a, b, c = chunks
    assert run_step(memory, [10, 30, 50, [a], 40, [b], 20, [c], 10]) == [a, b, c]
    assert [memory.later_nbytes([chunk], 50) for chunk in chunks] == [40, 20, 10]
    assert memory.later_nbytes(chunks, 50) == 40


def test_a_small_op_before_a_large_one_counts_as_the_large_one(memory, chunks):
    a, b, c = chunks
    run_step(memory, [50, [a], 10, [b], 40, [c], 20])
    assert [memory.later_nbytes([chunk], 50) for chunk in chunks] == [40, 40, 20]


def test_no_op_follows_the_last_sum(memory, chunks):
    a, b, _ = chunks
    run_step(memory, [10, [a], 30, [b]])
    assert [memory.later_nbytes([chunk], 30) for chunk in (a, b)] == [30, 0]
    assert memory.needed_nbytes([a, b], 30) == (15, 30)


@pytest.mark.parametrize(
    "sizes, needed, total",
    [
        ((1, 1, 1), 0, 3),  # 41, 22 and 13 bytes: never more than the 50 of activations
        ((10, 20, 10), 0, 40),  # 50, 50 and 50
        ((15, 15, 15), 5, 45),  # 55, 50 and 55
        ((5, 26, 10), 1, 41),  # 45, 51 and 51
        ((10, 10, 60), 40, 80),  # 50, 40 and 90
    ],
)
def test_sums_need_the_bytes_that_activations_have_not_left(sizes, needed, total, memory):
    a, b, c = (Chunk(name, nbytes) for name, nbytes in zip("abc", sizes))
    sums = run_step(memory, [10, 30, 50, [a], 40, [b], 20, [c], 10])
    assert memory.needed_nbytes(sums, 50) == (needed, total)


def test_sums_that_were_not_measured_come_beside_the_largest_activations(memory, chunks):
    assert memory.later_nbytes(chunks, 50) == 50
    assert memory.needed_nbytes(chunks, 50) == (45, 45)
    assert memory.needed_nbytes([], 50) == (0, 0)


def test_a_step_without_measurement_changes_no_bytes(memory, chunks):
    a, b, c = chunks
    run_step(memory, [50, [a], 40, [b], 20])
    assert run_step(memory, [[c], [b], [a]], is_measured=False) == [c, b, a]
    assert [memory.later_nbytes([chunk], 99) for chunk in chunks] == [40, 20, 99]


def test_ops_of_a_step_without_measurement_do_not_count_later(memory, chunks):
    a, *_ = chunks
    run_step(memory, [90, 80], is_measured=False)
    run_step(memory, [10, [a], 5])
    assert memory.later_nbytes([a], 10) == 5


def test_of_several_measured_steps_the_most_bytes_count(memory, chunks):
    a, b, _ = chunks
    for events in ([50, [a], 40, [b], 20], [50, [a], 10, [b], 30], [50, [a], 5]):
        run_step(memory, events)
    assert [memory.later_nbytes([chunk], 50) for chunk in (a, b)] == [40, 30]


def test_a_sum_comes_once_in_a_step_of_several_rounds(memory, chunks):
    """The sums of the second round are added to those of the first one, which wait from then on."""
    a, b, _ = chunks
    assert run_step(memory, [10, [a], 30, [b], 20, 50, [b], 40, [a], 5]) == [a, b]
    assert [memory.later_nbytes([chunk], 50) for chunk in (a, b)] == [50, 50]


def test_in_rounds_all_sums_wait_although_updates_run_in_backward(memory, chunks):
    """Otherwise the sums of two segments are there at a time. The next step without rounds needs no more than these again."""
    order = [[a_chunk] for a_chunk in chunks]
    for position, waiting in ((None, 45), (2, 30)):
        memory.peaks_of_later(chunks[:1], position, 50, is_measured=False)
        memory.peaks_of_later(chunks[:1], 2, 50, is_measured=False)  # of the last round
        sums = run_step(memory, order, is_measured=False)
        assert memory.needed_nbytes(sums, 50, wait=False) == (waiting, waiting)


def test_frozen_chunks_have_no_sums(memory):
    frozen, trained = Chunk("frozen", trainable=False), Chunk("trained")
    assert run_step(memory, [10, [frozen, trained], 5]) == [trained]
    assert memory.later_nbytes([frozen], 10) == 10
    assert memory.needed_nbytes([trained], 10) == (10, 15)


def test_later_bytes_count_only_chunks_without_data(memory, chunks):
    """A sum that has data does not come: its memory is taken already."""
    a, b, c = chunks
    run_step(memory, [50, [a], 40, [b], 20, [c], 10])
    a.gradient.job = object()
    assert memory.later_nbytes(chunks, 50) == 20
    b.gradient.job = c.gradient.job = object()
    assert memory.later_nbytes(chunks, 50) == 50


def test_the_order_of_the_sums_is_that_of_the_step(memory, chunks):
    a, b, c = chunks
    run_step(memory, [50, [a], 40, [b], 20, [c], 10])
    assert memory.needed_nbytes([c, b, a], 50) == (35, 45)  # 25, 50 and 85
    assert run_step(memory, [50, [c], [b, a], 5]) == [c, b, a]


def test_the_peak_counts_later_sums_without_a_place_in_host_memory():
    a, b, c, d = chunks = [Chunk(name, has_host_place=name in "ad") for name in "abcd"]
    memory = SumMemory(lambda chunk: chunk.nbytes, chunks)
    run_step(memory, [50, [a], 40, [b], 38, [c], 20, [d], 10])
    assert [memory.peak_with_sums_nbytes([chunk], 50) for chunk in chunks] == [53, 38, 20, 10]  # 40, 38 + 15 or 20 + 30
    assert memory.peak_with_sums_nbytes([c, d], 50) == 20


def test_in_the_first_step_the_peak_counts_all_sums_that_have_not_come():
    a, b, c, d = chunks = [Chunk(name, has_host_place=name in "ad") for name in "abcd"]
    memory = SumMemory(lambda chunk: chunk.nbytes, chunks)
    assert memory.peak_with_sums_nbytes([a], 50) == 80
    memory.note_sums([a, b])
    assert memory.peak_with_sums_nbytes([d], 50) == 65
    assert memory.peak_with_sums_nbytes([c], 50) == 50


def test_the_peak_follows_the_sums_of_a_step_without_measurement():
    """As on the CPU, where no op is measured."""
    a, b, c = chunks = [Chunk(name, has_host_place=name == "a") for name in "abc"]
    memory = SumMemory(lambda chunk: chunk.nbytes, chunks)
    run_step(memory, [[a], [b], [c]], is_measured=False)
    assert [memory.peak_with_sums_nbytes([chunk], 0) for chunk in chunks] == [30, 15, 0]
    assert memory.peak_with_sums_nbytes([a], 0) == 30
