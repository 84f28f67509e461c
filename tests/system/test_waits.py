"""Waits: a waiting thread names its wait and the waits behind it. Threads of the program and of the engine are told apart."""

import os
import threading
import time

import pytest

from infinity.system.lanes import Lane
from infinity.system.waits import of_the_program, waiting, waits

SECONDS = 20  # a thread that takes longer counts as hung


@pytest.fixture
def lanes():
    made = [Lane("copies", does="the copy"), Lane("updates", does="an update")]
    yield made
    for lane in made:
        lane.close()


def told(text):
    """Return the wait of the program, once another thread has caused this text."""
    deadline = time.monotonic() + SECONDS
    while (wait := of_the_program()) is None or str(wait) != text:
        assert time.monotonic() < deadline, f"{wait}"
        os.sched_yield()
    return wait


def test_a_wait_names_the_waits_behind_it(lanes):
    copies, updates = lanes
    gate, began = threading.Event(), time.perf_counter()

    def read():
        with waits("a read from NVMe"):
            assert gate.wait(SECONDS)

    first = copies.push(read, "chunk 1")
    update = updates.push(lambda: first.wait(), "chunk 1")
    last = updates.push(lambda: None, "chunk 2")
    waiter = threading.Thread(target=last.wait)
    waiter.start()
    wait = told("an update of chunk 2, after 1 other: the copy of chunk 1: a read from NVMe")
    assert 0 < wait.seconds < time.perf_counter() - began
    gate.set()
    waiter.join(SECONDS)
    assert update.done and of_the_program() is None


def test_nested_waits_are_one_wait_and_name_a_chunk_once(lanes):
    gate = threading.Event()

    def read():
        with waits("the weights of chunk 3"):
            assert gate.wait(SECONDS)

    def wait():
        with waits("the weights of chunk 3"):
            outer.append(waiting[threading.get_ident()])
            lanes[0].push(read, "chunk 3").wait()

    outer = []
    waiter = threading.Thread(target=wait)
    waiter.start()
    assert told("the weights of chunk 3: the copy of chunk 3").since == outer[0].since
    gate.set()
    waiter.join(SECONDS)
    assert waiter.ident not in waiting


def test_waits_of_engine_threads_are_not_waits_of_the_program(lanes):
    gate, inside = threading.Event(), threading.Event()

    def work():
        with waits("a read from NVMe"):
            inside.set()
            assert gate.wait(SECONDS)

    job = lanes[0].push(work)
    assert inside.wait(SECONDS) and of_the_program() is None
    gate.set()
    job.wait()
