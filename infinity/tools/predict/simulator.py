"""Simulates a training run on a virtual clock: the engine's plan, slots and order of work, over links of given rates.

The inputs are the engine's plan, a placement by the engine's planner, and a machine. The results are times, waits and memory. Pure: knows no
torch, thread or file. Simulates one rank, because all ranks do the same at the same time.
"""

# [Note: the simulated engine]
# Decisions come from the functions of `plan` that the engine calls. schedule.py decides the order of fetches and the time of an update,
# route.py the distance to the next use, slots.py grants of slots and their victims. One generator per lane simulates the work:
# simulated_weights.py has cg and gg, rank.py has gc, rs and update, host.py has reads and writes, this file has the training thread. A
# generator yields work on a link, or a flag that another generator raises. Links that work at the same time share capacity. A drive that
# reads and writes has the mixed rate. Updates and copies share host memory. If the device is the CPU, all links except the drives share the
# processors.
# Not simulated: routes that differ from step to step, activations that leave the device, parts of gradients that leave the device together,
# faults. Every op runs at the device's rate, whatever its shape.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from infinity.plan.packing import Layout
from infinity.plan.placement import Placement
from infinity.plan.record import Record
from infinity.tools.predict.clock import PlayedLane, Work
from infinity.tools.predict.links import LINKS, Links
from infinity.tools.predict.machine import Machine
from infinity.tools.predict.rank import Rank, Updates
from infinity.tools.predict.simulated_weights import Weights
from infinity.tools.predict.step import Step


@dataclass
class Simulation:
    """The results of the last step. stall_seconds: waits of the training thread for each link. nbytes: mean of the last two steps, because two
    steps may put off different updates. peak_device_nbytes: the engine's peak. works: all work, in seconds since the start of the step."""

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
    """Simulate steps until two steps in a row differ by at most 1 %. The last step counts. records: of the rank. on_device: spans with records
    on the device. compresses: NVMe holds coded bytes. Raises ConfigError if a rate is unknown, such as that of collectives."""
    return _Training(Rank(layout, records, placement, step, Links(machine, layout.partition.world), frozenset(on_device), compresses)).run()


class _Training:
    """Simulates the training thread: steps, and the ops of each step."""

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
        assert self.is_over, "the simulated engine waits for a flag that no process raises"
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
        """Whether the last two steps took the same time. Writes need some steps until their delay is steady."""
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
            rank.release()  # the next op holds the spans of enclosing modules again
            yield from self.updates.gradients_arrive(position)
        yield from self.updates.finish_step()
