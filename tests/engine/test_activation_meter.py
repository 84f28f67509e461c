"""The activation meter: bytes of each op, growth of inputs and room on the device, with a scripted gauge."""

import math
from types import SimpleNamespace

import pytest

from infinity.engine.memory import activation_meter
from infinity.engine.memory.activation_meter import ActivationMeter

GIB = 1 << 30
SMALL, LARGE = ((4, 128),), ((8, 128),)


class Gauge:
    """A device of `capacity` bytes, with the allocator's peak since the last reading."""

    def __init__(self, capacity=1000):
        self.capacity, self.peak, self.failures, self.num_capacities = capacity, 0, 0, 0

    def capacity_nbytes(self):
        self.num_capacities += 1
        return self.capacity

    def peak_nbytes(self):
        return self.peak

    def num_failures(self):
        return self.failures


class Measured:
    """A meter. `run` lets an op reach a peak, and the engine then hold so many bytes. `ops`: bytes of all ops, in order."""

    def __init__(self, *, capacity=1000, bound=None, held=100):
        self.gauge, self.tier, self.ops = Gauge(capacity), SimpleNamespace(held_nbytes=held), []
        self.gauge.peak = held
        self.meter = ActivationMeter(self.gauge, self.tier, bound, self.ops.append)

    def run(self, key, peak, held=100):
        self.meter.note_op(key)
        self.gauge.peak, self.tier.held_nbytes = peak, held

    def measure(self, *passes):
        """One measured step with these (shapes, builds_graph)."""
        for shapes, builds_graph in passes:
            self.meter.growth(shapes, builds_graph)
        self.meter.begin()
        self.meter.note_measured()
        self.meter.is_on = False


@pytest.fixture(autouse=True)
def no_slack(monkeypatch):
    monkeypatch.setattr(activation_meter, "SLACK", 0.0)


# Bytes of ops


def test_an_op_has_the_peak_beside_the_bytes_of_the_engine():
    found = Measured()
    found.meter.begin()
    found.run("same", 130)
    found.run("fetches", 190, held=140)  # the engine holds 100 bytes at the begin, so up to 90 are the op's
    found.run("evicts", 170, held=110)
    found.run("last", 155, held=110)
    found.meter.end_op()
    assert found.meter.op_nbytes == {None: 0, "same": 30, "fetches": 90, "evicts": 60, "last": 45}
    assert found.ops == [0, 30, 90, 60, 45]
    assert found.meter.activation_nbytes == 90


def test_bytes_before_the_first_op_have_no_key():
    found = Measured()
    found.meter.begin()
    found.gauge.peak = 120
    found.run("first", 105)
    found.meter.note_measured()
    assert found.meter.op_nbytes == {None: 20, "first": 5}


def test_the_largest_run_of_an_op_counts():
    found = Measured()
    found.meter.begin()
    for peak in (130, 150, 140):
        found.run("op", peak)
    found.meter.note_measured()
    assert found.meter.op_nbytes["op"] == found.meter.activation_nbytes == 50
    assert found.ops == [0, 30, 50, 40]


def test_ops_outside_a_measured_step_have_no_bytes():
    found = Measured()
    assert found.meter.activation_nbytes == 0
    found.run("op", 900)
    found.run("other", 800)
    assert (found.meter.op_nbytes, found.ops) == ({}, [])
    found.meter.begin()
    found.gauge.peak = 110
    found.run("first", 100)
    assert found.meter.op_nbytes == {None: 10}  # the measurement began within the op `other`


def test_memory_that_the_engine_takes_between_ops_is_no_ops():
    """A gradient of 60 bytes stays on the device, and weights of 20 bytes leave, between two ops."""
    found = Measured()
    found.meter.begin()
    found.run("before", 130)
    found.meter.end_op()
    found.gauge.peak, found.tier.held_nbytes = 160, 140
    found.meter.rebase()
    found.run("after", 150, held=140)
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
    found.run("op", 120)
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
    meter = ActivationMeter(gauge, SimpleNamespace(held_nbytes=0), None, print)
    assert not meter.has_failed()
    gauge.failures = 4
    assert meter.has_failed()
