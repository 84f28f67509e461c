"""A training run by a virtual clock: the engine's plan, slots and order of work over links of given speed.

Takes the plan that the engine itself would follow, a placement by the same planner, and a machine; gives times, what was waited
for, and memory. Pure: knows no torch, thread or file. It plays one rank; all ranks do the same at the same time.
"""

# [Note: what is played]
# What is decided, the engine decides and this asks the same functions of `plan`: what is fetched when (schedule.py), how far away
# everything is (route.py), who is granted a slot and whose (slots.py), when an update runs. What is done is played by one generator a
# lane: in rank.py weights (cg, gg), gradients (gc, rs) and updates, in host.py reads and writes, here the training thread. A generator
# yields work on a link, or a flag that somebody else will raise. Work that is under way on several links at a time shares what these have
# in common: a drive gives reads and writes together its mixed rate, updates and copies share host memory, and on a machine whose device
# is its processors all but the drives takes its part of these.
# Not played: routes that differ from step to step, activations that leave the device, parts of gradients that leave it together,
# faults. Every op takes its operations by the device's rate, whatever its shape.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from infinity.plan.packing import Layout
from infinity.plan.placement import Placement
from infinity.plan.record import Record
from infinity.tools.predict.clock import PlayedLane, Work
from infinity.tools.predict.links import LINKS, Links
from infinity.tools.predict.machine import Machine
from infinity.tools.predict.rank import Rank, Step, Updates, Weights


@dataclass
class Simulation:
    """What came of it, of the last step: seconds, seconds that the training thread waited for each link, bytes (half of those of the last
    two steps, which may put off different updates) and busy seconds of each link, the most bytes of device memory held by the engine, and all
    the work, from the step's beginning on."""

    step_seconds: float = 0.0
    stall_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    busy_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    nbytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    peak_device_nbytes: int = 0
    host_nbytes: int = 0
    works: list[Work] = field(default_factory=list)


LEAST_STEPS, MOST_STEPS, STEADY = 4, 16, 0.01


def simulate(
    layout: Layout,
    records: Sequence[Record],
    placement: Placement,
    step: Step,
    machine: Machine,
    *,
    on_device: Iterable[int] = (),
    compresses: bool = False,
) -> Simulation:
    """Play steps until they take as long as the one before, to a hundredth; the last one counts. records: of the rank. on_device: spans
    whose records are on the device. compresses: what is on NVMe takes fewer bytes. Raises ConfigError for ranks without collectives."""
    return _Training(Rank(layout, records, placement, step, Links(machine, layout.partition.world), frozenset(on_device), compresses)).run()


class _Training:
    """The training thread: steps, and in each its ops."""

    def __init__(self, rank: Rank):
        self.rank, self.clock, self.step = rank, rank.clock, rank.step
        cg, gg = PlayedLane(self.clock), PlayedLane(self.clock)
        self.updates = Updates(rank, gg)
        self.weights = Weights(rank, self.updates, cg, gg)
        self.starts: list[float] = [0.0]
        self.is_over = False

    def run(self) -> Simulation:
        rank = self.rank
        self.clock.start(self._train())
        self.clock.run()
        assert self.is_over, "the simulated engine waits for what never comes"
        before, start, end = self.starts[-3:]
        found = Simulation(end - start, rank.stalls, peak_device_nbytes=rank.peak + rank.placement.fixed_nbytes)
        found.host_nbytes = rank.placement.host_nbytes
        busy_until = dict.fromkeys(LINKS, start)
        for work in self.clock.works:
            if work.end <= before or work.start >= end:
                continue
            found.nbytes[work.link] += work.nbytes * (min(work.end, end) - max(work.start, before)) / (work.end - work.start) / 2
            if work.end <= start:
                continue
            found.works.append(Work(work.link, work.what, work.start - start, work.end - start, work.nbytes))
            found.busy_seconds[work.link] += max(0.0, min(work.end, end) - max(work.start, busy_until[work.link]))
            busy_until[work.link] = max(busy_until[work.link], work.end)
        return found

    def _train(self):
        while not self._is_steady():
            self.rank.stalls.update(dict.fromkeys(LINKS, 0.0))
            yield from self._one_step()
            self.starts.append(self.clock.now)
        self.is_over = True

    def _is_steady(self) -> bool:
        """Whether the last two steps took the same time; it takes some steps until writes are as much behind as they will be."""
        seconds = [end - start for start, end in zip(self.starts, self.starts[1:])]
        alike = len(seconds) >= LEAST_STEPS and abs(seconds[-1] - seconds[-2]) <= STEADY * seconds[-1]
        return alike or len(seconds) >= MOST_STEPS

    def _one_step(self):
        rank, step, route = self.rank, self.step, self.rank.route
        rank.begin_step()
        for span in rank.spans:
            yield from self.weights.evict(span)
        yield from self.weights.issue(0)
        for position, use in enumerate(step.uses):
            rank.hold(use)
            if position == step.backward:
                self.updates.expect_gradients()
            self.updates.update_waiting()
            num_fetched = yield from self.weights.issue(route.runs[position] + 1)
            for index in use.spans:
                num_fetched += yield from self.weights.bring(rank.spans[index])
            num_complete = len(rank.complete.get(position, ()))
            yield ("compute", rank.links.compute_seconds(step.seconds[position], num_fetched, num_complete), use.key, 0)
            rank.release()  # what encloses it is held again when the next op begins
            yield from self.updates.gradients_arrive(position)
        yield from self.updates.finish_step()
