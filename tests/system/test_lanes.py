"""Lanes run jobs in order. Results and errors reach every waiting thread. Lanes keep nothing alive, and close() finishes all jobs."""

import threading
import time
import weakref
from unittest import mock

import pytest

from infinity.system import lanes
from infinity.system.failure import FirstFailure
from infinity.system.lanes import Job, Lane
from infinity.system.threads import SystemThreads
from infinity.system.waits import waiting, waits

SECONDS = 20  # a thread that takes longer counts as hung


@pytest.fixture
def lane():
    lane = Lane("test")
    yield lane
    lane.close()


def test_jobs_run_one_at_a_time_in_order_in_the_lanes_thread(lane):
    done, threads, running = [], set(), []

    def work(number):
        running.append(number)
        assert len(running) == 1
        threads.add(threading.current_thread().name)
        done.append(number)
        running.pop()
        return number

    jobs = [lane.push(lambda number=number: work(number)) for number in range(200)]
    assert [job.wait() for job in jobs] == done == list(range(200))
    assert threads == {"infinity-test"}


def test_push_does_not_wait(lane):
    gate = threading.Event()
    first, second = lane.push(gate.wait), lane.push(lambda: "second")
    assert not first.done and not second.done
    gate.set()
    assert second.wait() == "second" and first.done


def fall_asleep(lane) -> None:
    """Wait until the lane has run all jobs and sleeps."""
    lane.drain()
    end = time.monotonic() + SECONDS
    while not lane._changed._condition._waiters and time.monotonic() < end:
        time.sleep(0.001)
    assert lane._changed._condition._waiters


def sleeps_on(lane) -> bool:
    """Wait 50 ms. Return whether the lane has left jobs in the line."""
    time.sleep(0.05)
    return bool(lane._line)


def test_a_quiet_job_runs_before_the_next_job(lane, monkeypatch):
    monkeypatch.setattr(SystemThreads, "glance_s", SECONDS)
    fall_asleep(lane)
    done = []
    lane.push(lambda: done.append("quiet"), quiet=True)
    assert sleeps_on(lane) and done == []
    lane.push(lambda: done.append("next")).wait()
    assert done == ["quiet", "next"]


@pytest.mark.parametrize("rouse", [Job.wait, lambda job: job.lane.wake(), lambda job: job.lane.drain(), lambda job: job.lane.close()])
def test_a_quiet_job_runs_once_a_thread_waits(lane, monkeypatch, rouse):
    monkeypatch.setattr(SystemThreads, "glance_s", SECONDS)
    fall_asleep(lane)
    done = threading.Event()
    job = lane.push(done.set, quiet=True)
    assert sleeps_on(lane)
    rouse(job)
    assert done.wait(SECONDS / 2)


def test_a_quiet_job_runs_within_bounded_time(lane):
    fall_asleep(lane)
    done = threading.Event()
    lane.push(done.set, quiet=True)
    assert done.wait(SECONDS)


def test_every_wait_raises_a_jobs_error_and_other_jobs_run(lane):
    failing, following = lane.push(lambda: 1 / 0), lane.push(lambda: 3)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.wait()
    assert failing.done and following.wait() == 3


def test_a_hurried_ready_job_overtakes_others(lane):
    gate, begun, done, is_ready = threading.Event(), threading.Event(), [], set()
    lane.push(lambda: begun.set() or gate.wait())
    jobs = [lane.push(lambda n=n: done.append(n), ready=lambda n=n: n in is_ready) for n in range(6)]
    assert begun.wait(SECONDS)
    is_ready |= {3, 5}
    for number in (5, 4, 3, 3):
        lane.hurry(jobs[number])
    gate.set()
    lane.drain()
    assert done == [5, 3, 0, 1, 2, 4]  # in the order of hurry(), except 4, which was not ready before its turn
    lane.hurry(jobs[0])  # a finished job: no effect
    lane.push(lambda: done.append(6)).wait()
    assert done[-1] == 6


def test_a_hurried_job_overtakes_once_it_becomes_ready(lane):
    done, is_ready = [], set()
    gates = [threading.Event() for _ in range(2)]
    entered = [threading.Event() for _ in range(2)]
    for gate, inside in zip(gates, entered):
        lane.push(lambda g=gate, i=inside: i.set() or g.wait())
    jobs = [lane.push(lambda n=n: done.append(n), ready=lambda n=n: n in is_ready) for n in range(3)]
    lane.hurry(jobs[2])
    gates[0].set()
    assert entered[1].wait(SECONDS)  # job 2 was not ready when the lane chose the second gate
    is_ready.add(2)
    gates[1].set()
    lane.drain()
    assert done == [2, 0, 1]


def test_drain_waits_for_successful_and_failed_jobs(lane):
    done = []
    for number in range(5):
        lane.push(lambda number=number: done.append(number) or 1 / (number - 2))
    lane.drain()
    assert done == [0, 1, 2, 3, 4]


def test_a_finished_job_holds_no_references(lane):
    class Gradient:
        pass

    gradient = Gradient()
    gone = threading.Event()
    weakref.finalize(gradient, gone.set)
    job = lane.push(lambda g=gradient: None)
    del gradient
    job.wait()
    assert gone.wait(SECONDS)


def test_close_finishes_all_jobs_and_may_be_repeated(lane):
    done = []
    for number in range(50):
        lane.push(lambda number=number: done.append(number))
    lane.close()
    assert done == list(range(50))
    lane.close()


def test_on_job_runs_before_each_job_in_the_lane(lane):
    seen = []
    lane.on_job = lambda: seen.append("before")
    lane.push(lambda: seen.append("job"))
    lane.push(lambda: seen.append("job"))
    lane.drain()
    assert seen[:4] == ["before", "job", "before", "job"]


class Parts:
    """Jobs of two parts, and the order in which their parts ran."""

    def __init__(self, lane):
        self.lane, self.seen, self.gate = lane, [], threading.Event()
        runs = threading.Event()
        self.lane.push(lambda: runs.set() or self.gate.wait())  # the lane begins once all jobs are there
        assert runs.wait(SECONDS)

    def push(self, name, *, ready=True, overlaps=True, fails_in=None):
        def work():
            for part in (1, 2):
                self.seen.append(f"{name}{part}")
                if part == fails_in:
                    raise ValueError(name)
                if part == 1:
                    yield

        return self.lane.push(work, name, ready=lambda: ready, overlaps=overlaps)

    def order(self):
        self.gate.set()
        self.lane.drain()
        return " ".join(self.seen)


def test_a_job_begins_before_the_second_part_of_the_job_before_it(lane):
    parts = Parts(lane)
    jobs = [parts.push(name) for name in "abc"]
    assert parts.order() == "a1 b1 a2 c1 b2 c2" and all(job.done for job in jobs)


@pytest.mark.parametrize("how", [{"ready": False}, {"overlaps": False}])
def test_a_job_that_may_wait_begins_after_the_second_part(how, lane):
    parts = Parts(lane)
    for name, options in (("a", {}), ("b", how), ("c", {})):
        parts.push(name, **options)
    assert parts.order() == "a1 a2 b1 c1 b2 c2"


def test_other_jobs_begin_after_the_second_part(lane):
    parts = Parts(lane)
    parts.push("a")
    plain = lane.push(lambda: parts.seen.append("plain") or 7)
    assert parts.order() == "a1 a2 plain" and plain.wait() == 7


def test_a_hurried_job_begins_between_two_parts(lane):
    parts = Parts(lane)
    jobs = [parts.push(name) for name in "abc"]
    lane.hurry(jobs[2])
    lane.hurry(jobs[0])
    assert parts.order() == "c1 a1 c2 b1 a2 b2"


@pytest.mark.parametrize("part", [1, 2])
def test_an_error_of_one_part_ends_only_its_job(part, lane):
    parts = Parts(lane)
    jobs = [parts.push("a"), parts.push("b", fails_in=part), parts.push("c")]
    order = parts.order().split()
    assert [jobs[0].wait(), jobs[2].wait()] == [None, None] and order.count("a2") == order.count("c2") == 1
    with pytest.raises(ValueError, match="b"):
        jobs[1].wait()
    assert ("b2" in order) == (part == 2)


def test_close_finishes_both_parts():
    lane = Lane("test")
    parts = Parts(lane)
    jobs = [parts.push(name) for name in "ab"]
    parts.gate.set()
    lane.close()
    assert all(job.done for job in jobs) and parts.seen == ["a1", "b1", "a2", "b2"]


def test_many_threads_wait_for_one_job():
    gate, results = threading.Event(), []
    job = Job(lambda: gate.wait() and "result")
    threads = [threading.Thread(target=lambda: results.append(job.wait())) for _ in range(16)]
    for thread in threads:
        thread.start()
    runner = threading.Thread(target=job.begin)
    runner.start()
    gate.set()
    for thread in (*threads, runner):
        thread.join(SECONDS)
    assert results == ["result"] * 16


def test_the_first_error_is_reported_with_its_job_before_the_wait_ends(lane):
    told = []
    lane.failure = FirstFailure(lambda error, what: told.append((str(error), what)))
    lane.push(lambda: None, "fine").wait()
    lane.failure.check()
    first, second = lane.push(lambda: 1 / 0, "chunk 7"), lane.push(lambda: [][0], "chunk 8")
    with pytest.raises(ZeroDivisionError):
        first.wait()
    with pytest.raises(ZeroDivisionError):
        lane.failure.check()
    with pytest.raises(IndexError):
        second.wait()
    assert told == [("division by zero", "chunk 7 (test): ")] and type(lane.failure.error) is ZeroDivisionError


@pytest.mark.long
def test_waits_for_an_abandoned_lane_raise_and_close_does_not_wait():
    lane, gate = Lane("test"), threading.Event()
    stuck, behind = lane.push(gate.wait), lane.push(lambda: "done")
    threading.Timer(0.1, lane.abandon, [RuntimeError("another rank")]).start()
    for job in (stuck, behind):
        with pytest.raises(RuntimeError, match="another rank"):
            job.wait()
    assert not lane.is_stuck
    lane.close()
    assert lane.is_stuck
    gate.set()
    lane._thread.join(SECONDS)
    assert not lane.is_stuck and (stuck.wait(), behind.wait()) == (True, "done")


def test_a_thread_is_listed_as_waiting_only_while_it_waits(lane):
    inside, gate, seen = threading.Event(), threading.Event(), []
    lane.push(lambda: inside.set() or gate.wait())
    following = lane.push(lambda: seen.append(waiter.ident in waiting))
    waiter = threading.Thread(target=following.wait)
    assert inside.wait(SECONDS)
    assert threading.get_ident() not in waiting
    waiter.start()
    while waiter.ident not in waiting:  # until the thread waits
        assert waiter.is_alive()
    gate.set()
    waiter.join(SECONDS)
    assert seen == [True] and waiter.ident not in waiting


def test_a_wait_for_a_finished_job_returns_at_once(lane):
    job = lane.push(lambda: "over")
    lane.drain()
    with mock.patch("infinity.system.lanes.waits", side_effect=AssertionError):
        assert job.wait() == "over"


def test_a_failed_job_ends_the_wait(lane):
    with pytest.raises(ZeroDivisionError), waits("a job"):
        assert threading.get_ident() in waiting
        lane.push(lambda: 1 / 0).wait()
    assert threading.get_ident() not in waiting


def test_idle_jobs_run_after_all_others_the_newest_first(lane):
    order, gate = [], threading.Event()
    lane.push(gate.wait)
    for name in ("a", "b", "c"):
        lane.push(lambda name=name: order.append(name), idle=True)
        lane.push(lambda name=name: order.append(name.upper()))
    gate.set()
    lane.drain()
    assert order == ["A", "B", "C", "c", "b", "a"]


def test_a_hurried_idle_job_overtakes_once_it_is_ready(lane):
    order, gate = [], threading.Event()
    lane.push(gate.wait)
    first = lane.push(lambda: order.append("first"))
    rest = lane.push(lambda: order.append("rest"), ready=lambda: first.done, idle=True)
    lane.push(lambda: order.append("other"), idle=True)
    lane.push(lambda: order.append("last"))
    lane.hurry(rest)
    gate.set()
    rest.wait()
    lane.drain()
    assert order == ["first", "rest", "last", "other"]


def test_drain_and_close_wait_for_idle_jobs():
    done = []
    lane = Lane("test")
    for k in range(3):
        lane.push(lambda k=k: done.append(k), idle=True)
    lane.drain()
    assert sorted(done) == [0, 1, 2]
    lane.push(lambda: time.sleep(0.05))
    for k in range(3, 6):
        lane.push(lambda k=k: done.append(k), idle=True)
    lane.close()
    assert sorted(done) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ends", [Lane.drain, Lane.close])
def test_drain_and_close_wait_for_idle_jobs_that_jobs_push(ends):
    done, lane = [], Lane("test")
    lane.push(lambda: time.sleep(0.05))
    for k in range(3):
        lane.push(lambda k=k: lane.push(lambda: done.append(k), idle=True))
    ends(lane)
    assert sorted(done) == [0, 1, 2]
    lane.close()


def test_drain_ends_if_the_lane_ends_meanwhile(monkeypatch):
    lane = Lane("test")
    lane.push(lambda: None, idle=True)
    wait = Job.wait

    def closed(job):
        result = wait(job)
        lane.close()
        return result

    monkeypatch.setattr(Job, "wait", closed)
    thread = threading.Thread(target=lane.drain, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
