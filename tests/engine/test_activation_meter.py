"""The activation meter: bytes of each op, growth of inputs and room on the device, with a scripted gauge."""

import math
import threading
import time

import pytest

from infinity.engine.memory import activation_meter
from infinity.engine.memory.activation_meter import ActivationMeter
from infinity.tiers.span_state import DeviceTier

GIB = 1 << 30
SMALL, LARGE = ((4, 128),), ((8, 128),)


class Gauge:
    """A device of `capacity` bytes, with the allocator's peak since the last reading."""

    def __init__(self, capacity=1000):
        self.capacity, self.allocated, self.peak, self.failures, self.num_capacities = capacity, 0, 0, 0, 0
        self.lock = threading.Lock()  # an allocator counts correctly in each thread

    def take(self, nbytes):
        with self.lock:
            self.allocated += nbytes
            self.peak = max(self.peak, self.allocated)

    def capacity_nbytes(self):
        self.num_capacities += 1
        return self.capacity

    def peak_nbytes(self):
        with self.lock:
            peak, self.peak = self.peak, self.allocated
        return peak

    def num_failures(self):
        return self.failures


class Measured:
    """A meter of an engine that holds 100 bytes. `run` lets an op allocate so many bytes, and free them. `ops`: bytes of all ops, in order."""

    def __init__(self, *, capacity=1000, bound=None):
        self.gauge, self.tier, self.ops = Gauge(capacity), DeviceTier(0), []
        self.engine_takes(100)
        self.meter = ActivationMeter(self.gauge, self.tier, bound, self.ops.append)

    def engine_takes(self, nbytes):
        self.tier.book(nbytes)
        self.gauge.take(nbytes)

    def engine_frees(self, nbytes):
        self.gauge.take(-nbytes)
        self.tier.book(-nbytes)

    def run(self, key, nbytes):
        self.meter.note_op(key)
        self.op_takes(nbytes)

    def op_takes(self, nbytes):
        self.gauge.take(nbytes)
        self.gauge.take(-nbytes)

    def measure(self, *passes):
        """One measured step with these (shapes, builds_graph)."""
        for shapes, builds_graph in passes:
            self.meter.growth(shapes, builds_graph)
        self.meter.begin()
        self.meter.note_measured()
        self.meter.end()


@pytest.fixture(autouse=True)
def no_slack(monkeypatch):
    monkeypatch.setattr(activation_meter, "SLACK", 0.0)


# Bytes of ops


def test_an_op_has_the_peak_beside_the_bytes_of_the_engine():
    found = Measured()
    found.meter.begin()
    found.run("same", 30)
    found.run("fetches", 50)
    found.engine_takes(40)
    found.op_takes(40)  # the op needs no more than 50 bytes at once
    found.run("evicts", 60)
    found.engine_frees(30)
    found.run("last", 45)
    found.meter.end_op()
    assert found.meter.op_nbytes == {None: 0, "same": 30, "fetches": 50, "evicts": 60, "last": 45}
    assert found.ops == [0, 30, 50, 60, 45]
    assert found.meter.activation_nbytes == 60


def test_an_op_keeps_memory_while_the_engine_takes_and_frees():
    found = Measured()
    found.meter.begin()
    found.meter.note_op("op")
    found.gauge.take(20)
    found.engine_takes(300)
    found.op_takes(15)
    found.engine_frees(400)
    found.op_takes(5)
    found.gauge.take(-20)
    found.meter.end_op()
    assert found.meter.op_nbytes == {None: 0, "op": 35}


def test_a_gradient_is_the_ops_until_the_engine_takes_it():
    found = Measured()
    found.meter.begin()
    found.meter.note_op("op")
    found.gauge.take(60)
    found.tier.book(60)
    found.op_takes(10)
    found.meter.note_op("next")
    found.op_takes(10)
    found.engine_frees(60)
    found.meter.end_op()
    assert found.meter.op_nbytes == {None: 0, "op": 60, "next": 10}


def test_changes_of_other_threads_lose_no_peak(monkeypatch):
    """Lanes end intervals while an op allocates. Each reading of the peak is slow."""
    found, read = Measured(capacity=1 << 40), Gauge.peak_nbytes
    monkeypatch.setattr(Gauge, "peak_nbytes", lambda gauge: time.sleep(1e-4) or read(gauge))
    found.meter.begin()
    found.meter.note_op("op")

    def lane():
        for _ in range(200):
            found.tier.book(0)

    threads = [threading.Thread(target=lane) for _ in range(3)]
    for thread in threads:
        thread.start()
    for nbytes in range(200):
        found.op_takes(nbytes)
        time.sleep(1e-4)
    for thread in threads:
        thread.join()
    found.meter.end_op()
    assert found.meter.op_nbytes == {None: 0, "op": 199}


def test_bytes_before_the_first_op_have_no_key():
    found = Measured()
    found.meter.begin()
    found.op_takes(20)
    found.run("first", 5)
    found.meter.note_measured()
    assert found.meter.op_nbytes == {None: 20, "first": 5}


def test_the_largest_run_of_an_op_counts():
    found = Measured()
    found.meter.begin()
    for nbytes in (30, 50, 40):
        found.run("op", nbytes)
    found.meter.note_measured()
    assert found.meter.op_nbytes["op"] == found.meter.activation_nbytes == 50
    assert found.ops == [0, 30, 50, 40]


def test_ops_outside_a_measured_step_have_no_bytes():
    found = Measured()
    assert found.meter.activation_nbytes == 0
    found.run("op", 800)
    found.run("other", 700)
    assert (found.meter.op_nbytes, found.ops) == ({}, [])
    found.meter.begin()
    found.op_takes(10)
    found.run("first", 0)
    assert found.meter.op_nbytes == {None: 10}  # the measurement began within the op `other`


def test_memory_that_the_engine_takes_between_ops_is_no_ops():
    """A gradient of 60 bytes stays on the device, and weights of 20 bytes leave, between two ops."""
    found = Measured()
    found.meter.begin()
    found.run("before", 30)
    found.meter.end_op()
    found.gauge.take(60)
    found.tier.book(60)
    found.engine_frees(20)
    found.meter.rebase()
    found.run("after", 10)
    found.meter.note_measured()
    assert found.meter.op_nbytes == {None: 0, "before": 30, "after": 10}


# Growth


def test_inputs_count_as_known_after_their_step():
    found = Measured()
    assert not found.meter.has_measured
    assert found.meter.growth(SMALL, True) == math.inf
    assert found.meter.growth(SMALL, True) == math.inf  # of the same step
    assert not found.meter.has_measured
    found.measure()
    assert found.meter.has_measured
    assert [found.meter.growth(shapes, True) for shapes in (SMALL, LARGE)] == [1, 2]


@pytest.mark.parametrize("measured, growth", [(True, {True: 2, False: 2}), (False, {True: math.inf, False: 2})])
def test_inputs_without_a_graph_say_nothing_of_passes_with_one(measured, growth):
    found = Measured()
    found.measure((SMALL, measured))
    assert {builds_graph: found.meter.growth(LARGE, builds_graph) for builds_graph in (True, False)} == growth


def test_growth_is_that_over_the_most_similar_inputs():
    found = Measured()
    found.measure((((4, 128),), True), (((2, 512),), True))
    assert [found.meter.growth(((2, size),), True) for size in (128, 512, 1024)] == [1, 1, 2]
    assert found.meter.growth(((4, 256),), True) == 2


def test_all_new_inputs_of_a_step_are_measured_together():
    found = Measured()
    found.measure((SMALL, True), (LARGE, True), (((4, 512),), True), (SMALL, False))
    known = [found.meter.growth(shapes, True) for shapes in (SMALL, LARGE, ((4, 512),), ((8, 512),))]
    assert known == [1, 1, 1, 2]


# Room


@pytest.mark.parametrize("bound, rooms", [(None, [1000, 700, 0, -200]), (600, [600, 600, 0, -200])])
def test_the_engine_has_the_room_that_activations_leave(bound, rooms):
    found = Measured(bound=bound)
    assert [found.meter.room(nbytes) for nbytes in (0, 300, 1000, 1200)] == rooms


@pytest.mark.parametrize("capacity, slack", [(20, 1), (80, 4), (100, 5), (140, 5)])
def test_the_slack_is_a_share_of_the_device_and_at_most_5_gib(capacity, slack, monkeypatch):
    monkeypatch.setattr(activation_meter, "SLACK", 0.05)
    assert Measured(capacity=capacity * GIB).meter.room(GIB) == (capacity - slack - 1) * GIB


def test_room_for_larger_inputs_falls_with_the_square_of_their_growth():
    found = Measured()
    found.meter.begin()
    found.run("op", 20)
    found.meter.note_measured()
    assert [found.meter.room_for(growth) for growth in (1, 2, 5)] == [980, 920, 500]


def test_the_capacity_is_measured_when_it_is_needed_next():
    found = Measured()
    assert [found.meter.room(0), found.meter.room(100)] == [1000, 900]
    found.gauge.capacity = 500
    assert found.meter.room(0) == 1000
    found.meter.forget_capacity()
    assert [found.meter.room(0), found.meter.room(100)] == [500, 400]
    assert found.gauge.num_capacities == 2


# Failed allocations


def test_after_a_failed_allocation_nothing_counts_as_measured():
    found = Measured()
    found.measure((SMALL, True), (SMALL, False))
    found.meter.growth(LARGE, True)  # new inputs of the failed step
    assert found.meter.room(0) == 1000
    found.gauge.failures, found.gauge.capacity = 2, 800
    assert (found.meter.has_failed(), found.meter.has_failed()) == (True, False)
    assert not found.meter.has_measured
    assert found.meter.room(0) == 800
    found.measure()
    assert not found.meter.has_measured


def test_failures_before_the_first_step_do_not_count():
    gauge = Gauge()
    gauge.failures = 3
    meter = ActivationMeter(gauge, DeviceTier(0), None, print)
    assert not meter.has_failed()
    gauge.failures = 4
    assert meter.has_failed()
