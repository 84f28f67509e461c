"""Simulated threads: each seed is one order of the threads, virtual time takes no time, and a deadlock is an error. Lanes in many orders."""

import random
import time

import pytest

from infinity.simulation.threads import Deadlock, SimulatedThreads
from infinity.system.failure import FirstFailure
from infinity.system.lanes import Lane
from infinity.system.threads import monitor, now, threads, using

NUM_SEEDS = 300


def simulated(main, seed=0):
    world = SimulatedThreads(seed)
    with using(world):
        return world.run(lambda: main(world))


def order_of_three(world):
    """Three threads each enter a monitor three times."""
    seen, guard = [], monitor()

    def work(name):
        for _ in range(3):
            with guard:
                seen.append(name)

    started = [threads().start(lambda name=name: work(name), name) for name in "abc"]
    for thread in started:
        thread.join()
    return "".join(seen)


def test_a_seed_repeats_one_order():
    orders = [simulated(order_of_three, seed) for seed in range(40)]
    assert orders == [simulated(order_of_three, seed) for seed in range(40)]
    assert len(set(orders)) > 20 and all(sorted(order) == sorted("aaabbbccc") for order in orders)


def test_virtual_time_takes_no_time():
    def main(world):
        changed, times = monitor(), []

        def late():
            world.sleep(100.0)
            with changed:
                changed.notify_all()

        with changed:
            in_time = [changed.wait(30.0)]
            times.append(now())
            threads().start(late, "late")
            in_time.append(changed.wait(1000.0))
            times.append(now())
            assert not changed.wait_for(lambda: False, 7.0)
            times.append(now())
        return in_time, times

    start = time.monotonic()
    assert simulated(main) == ([False, True], [30.0, 130.0, 137.0])
    assert time.monotonic() - start < 5


def test_an_old_timeout_ends_no_later_wait():
    def main(world):
        changed = monitor()

        def notify():
            with changed:
                changed.notify_all()

        with changed:
            world.call_after(1.0, lambda: threads().start(notify, "notify"))
            assert changed.wait(5.0)
            assert not changed.wait(50.0)
        return now()

    assert simulated(main) == 51.0


def test_threads_that_wait_for_each_other_are_a_deadlock():
    def main(world):
        first, second = monitor(), monitor()

        def work(outer, inner):
            with outer, inner:
                pass

        started = [threads().start(lambda: work(first, second), "one"), threads().start(lambda: work(second, first), "two")]
        for thread in started:
            thread.join()

    found = []
    for seed in range(40):
        try:
            simulated(main, seed)
        except Deadlock as error:
            found.append(str(error))
    assert 0 < len(found) < 40
    assert all("one waits for a monitor that two has" in text and "two waits for a monitor that one has" in text for text in found)


def test_a_join_ends_after_its_time():
    def main(world):
        thread = threads().start(lambda: world.sleep(10.0), "sleeper")
        thread.join(4.0)
        seen = [(now(), thread.is_alive())]
        thread.join()
        return [*seen, (now(), thread.is_alive())]

    assert simulated(main) == [(4.0, True), (10.0, False)]


class Work:
    """Random jobs of a lane, and what became of them. Three threads push jobs, and wait for some of them."""

    def __init__(self, world, seed):
        self.world, self.random = world, random.Random(seed)
        self.lane = Lane("test", FirstFailure())
        self.jobs, self.log, self.begun = {}, [], set()
        self.most_begun = 0

    def job(self, number):
        """The function of a job: of one part or two, perhaps failing, perhaps slow."""
        parts, fails_in, slow = self.random.choice((1, 2, 2)), self.random.choice((None, None, None, 1, 2)), self.random.random() < 0.3

        def run(part):
            assert (number, part) not in self.log
            self.log.append((number, part))
            if slow:
                self.world.sleep(self.random.random())
            if part == fails_in:
                self.begun.discard(number)
                raise ValueError(number)

        def two():
            self.begun.add(number)
            self.most_begun = max(self.most_begun, len(self.begun))
            run(1)
            yield
            run(2)
            self.begun.discard(number)

        def one():
            assert not self.begun, "a job of one part runs between two parts"
            run(1)
            return number

        return (one, 1, fails_in == 1) if parts == 1 else (two, 2, fails_in is not None)

    def push(self, number):
        work, parts, fails = self.job(number)
        is_ready = self.random.random() < 0.7
        how = {"ready": lambda: is_ready, "overlaps": parts == 2 and self.random.random() < 0.8}
        how |= {"idle": self.random.random() < 0.1, "quiet": self.random.random() < 0.2}
        job = self.lane.push(work, f"job {number}", **how)
        self.jobs[number] = (job, parts, fails)
        if self.random.random() < 0.3:
            self.lane.hurry(job)
        if self.random.random() < 0.4:
            self.check(number)

    def check(self, number):
        """Wait for a job. Its result and the parts that ran are right."""
        job, parts, fails = self.jobs[number]
        if fails:
            with pytest.raises(ValueError, match=f"^{number}$"):
                job.wait()
        else:
            assert job.wait() == (number if parts == 1 else None)
        assert job.done and (number, 1) in self.log
        assert fails or (number, parts) in self.log

    def run(self):
        pushing = [threads().start(lambda start=start: [self.push(n) for n in range(start, 24, 3)], f"push {start}") for start in range(3)]
        for thread in pushing:
            thread.join()
        if self.random.random() < 0.5:
            self.lane.drain()
            assert len(self.jobs) == 24 and all(job.done for job, *_ in self.jobs.values())
        self.lane.close()
        assert not self.lane._thread.is_alive()
        for number in range(24):
            self.check(number)
        assert not self.begun and self.most_begun <= 2
        return self.most_begun


@pytest.mark.slow
def test_lanes_lose_no_job_in_any_order_of_threads():
    """A failed job of a thread that pushes would end that thread, so that a job is lacking."""
    begun = [simulated(lambda world, seed=seed: Work(world, seed).run(), seed) for seed in range(NUM_SEEDS)]
    assert begun.count(2) > NUM_SEEDS / 3


def test_jobs_that_overlap_have_the_order_of_their_turns():
    def main(world):
        lane, log = Lane("test"), []

        def work(number):
            log.append((number, 1))
            yield
            log.append((number, 2))

        for number in range(6):
            lane.push(lambda number=number: work(number), ready=lambda: True, overlaps=True)
        lane.close()
        return log

    for seed in range(60):
        log = simulated(main, seed)
        for part in (1, 2):
            assert [number for number, each in log if each == part] == list(range(6))
        for number in range(5):
            assert log.index((number, 2)) < log.index((number + 1, 2)) and log.index((number, 1)) < log.index((number, 2))
            assert number > 3 or log.index((number, 2)) < log.index((number + 2, 1))
