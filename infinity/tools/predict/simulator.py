"""A training run by a virtual clock: the engine's plan, slots and order of work over links of given speed.

Takes the plan that the engine itself would follow, a placement by the same planner, and a machine; gives times, what was waited
for, and memory. Pure: knows no torch, thread or file. It plays one rank; all ranks do the same at the same time, so what they share,
such as drives, is divided by their number. Over 400 lines because what it plays is a whole engine.
"""

# [Note: what is played]
# Who waits for whom is the engine's: weights.py (training thread, cg, gg), records.py (grants of slots, reads, writes), gradients.py
# (gc, rs) and updates.py are played by one generator a lane. A generator yields work on a link, or a flag that somebody else will
# raise. Work that is under way on several links at a time shares what these have in common: a drive gives reads and writes
# together its mixed rate, updates and copies share host memory, and on a machine whose device is its processors all but the drives takes
# its part of these.
# Not played: routes that differ from step to step, activations that leave the device, spilled gradients' reads by several lanes,
# faults. Every op takes its operations by the device's rate, whatever its shape.

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

from infinity.plan import schedule, slots
from infinity.plan.compression import moved_nbytes
from infinity.plan.packing import WEIGHT_NBYTES, Layout
from infinity.plan.placement import Placement, look_ahead
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.route import Route
from infinity.plan.schedule import Use

from infinity.tools.predict.machine import Machine

LINKS = ("compute", "gg", "cg", "nc", "rs", "gc", "update", "cn")
UPDATE_NBYTES = 26  # a parameter, of the update that a machine's rate is of: a bf16 record, read and written, and its gradient
READ_SHARE = 0.6  # of a drive's mixed rate, while both directions are under way


@dataclass(frozen=True)
class Step:
    """What a step does on a rank. uses: the trace. seconds: of compute, by position. gradients: parameters whose gradients are
    complete after a position. backward: the first position that is no forward. deferred: updates follow step()."""

    uses: Sequence[Use]
    seconds: Sequence[float]
    gradients: Sequence[Sequence[int]]
    backward: int
    deferred: bool
    keep: bool


@dataclass(frozen=True)
class Work:
    """Something that a link did: `what` as in the engine's trace, start and end in seconds."""

    link: str
    what: object
    start: float
    end: float
    nbytes: float


@dataclass
class Simulation:
    """What came of it, of the last step: seconds, seconds that the training thread waited for each link, bytes and busy seconds of
    each link, the most bytes of device memory held by the engine, and all the work, from the step's beginning on."""

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
    return _Rank(layout, records, placement, step, machine, frozenset(on_device), compresses).run()


# The clock


class _Flag:
    """Something that happens once."""

    __slots__ = ("raised", "waiting")

    def __init__(self, raised: bool = False):
        self.raised = raised
        self.waiting: list[Generator] = []


@dataclass(eq=False, slots=True)
class _Load:
    link: str
    left: float  # seconds at full speed
    what: object
    nbytes: float
    start: float
    flag: _Flag


class _Clock:
    """Runs generators. They yield a _Flag to wait for, or (link, seconds, what, nbytes) to be done."""

    def __init__(self, speeds: Callable[[frozenset[str]], dict[str, float]]):
        self.now = 0.0
        self.works: list[Work] = []
        self._speeds = functools.lru_cache(maxsize=None)(speeds)
        self._ready: deque[Generator] = deque()
        self._loads: list[_Load] = []

    def start(self, process: Generator) -> None:
        self._ready.append(process)

    def happen(self, flag: _Flag) -> None:
        if not flag.raised:
            flag.raised = True
            self._ready.extend(flag.waiting)
            flag.waiting.clear()

    def run(self) -> None:
        """Until nothing can happen any more."""
        while True:
            while self._ready:
                self._advance(self._ready.popleft())
            if not self._loads:
                return
            speeds = self._speeds(frozenset(load.link for load in self._loads))
            passed = min(load.left / speeds[load.link] for load in self._loads)
            self.now += passed
            for load in self._loads:
                load.left -= passed * speeds[load.link]
            over = [load for load in self._loads if load.left <= 1e-12]
            self._loads = [load for load in self._loads if load.left > 1e-12]
            for load in over:
                self.works.append(Work(load.link, load.what, load.start, self.now, load.nbytes))
                self.happen(load.flag)

    def _advance(self, process: Generator) -> None:
        for wish in process:
            if isinstance(wish, _Flag):
                if not wish.raised:
                    wish.waiting.append(process)
                    return
            else:
                link, seconds, what, nbytes = wish
                load = _Load(link, max(seconds, 1e-12), what, nbytes, self.now, _Flag())
                load.flag.waiting.append(process)
                self._loads.append(load)
                return


class _Lane:
    """Jobs, first in, first out, but for those hurried: generators that one process runs to their end, each with a flag for that."""

    def __init__(self, clock: _Clock):
        self.clock = clock
        self._jobs: dict[_Flag, tuple[Generator, Callable[[], bool]]] = {}
        self._hurried: list[_Flag] = []
        self._more = _Flag()
        clock.start(self._loop())

    def push(self, job: Generator, ready: Callable[[], bool] = lambda: False) -> _Flag:
        done = _Flag()
        self._jobs[done] = job, ready
        self.clock.happen(self._more)
        return done

    def _loop(self):
        while True:
            while not self._jobs:
                self._more = _Flag()
                yield self._more
            done = next((flag for flag in self._hurried if self._jobs[flag][1]()), next(iter(self._jobs)))
            job, _ = self._jobs.pop(done)
            if done in self._hurried:
                self._hurried.remove(done)
            yield from job
            self.clock.happen(done)

    def hurry(self, done: _Flag) -> None:
        if done in self._jobs and done not in self._hurried:
            self._hurried.append(done)


# One rank


class _Entry:
    """A host copy. ready: its bytes are there; written: and those on NVMe are the same."""

    __slots__ = ("chunk", "pins", "ready", "written")

    def __init__(self, chunk: _Chunk):
        self.chunk = chunk
        self.pins = 0
        self.ready = _Flag()
        self.written = _Flag(True)

    @property
    def is_idle(self) -> bool:
        """Nobody needs it, and NVMe has its bytes."""
        return not self.pins and self.written.raised and self.ready.raised


@dataclass(eq=False, slots=True)
class _Wish:
    """For a copy in host memory, pinned; entry once it is granted."""

    chunk: _Chunk
    urgent: bool
    entry: _Entry | None = None
    granted: _Flag = field(default_factory=_Flag)


class _Chunk:
    def __init__(self, index: int, span: _Span, record: Record, homes: dict[str, str], trainable: bool, numel: int):
        self.index = index
        self.span = span
        self.record = record
        self.homes = homes
        self.trainable = trainable
        self.numel = numel
        self.copied = self.gradient = self.updating = _Flag(True)
        self.gathered = _Flag(True)
        self.pending = self.update_expected = self.weights_expected = self.updated = self.reduced = self.received = False
        self.missing = 0


class _Span:
    def __init__(self, index: int, nbytes: int):
        self.index = index
        self.nbytes = nbytes
        self.chunks: list[_Chunk] = []
        self.presence = "away"
        self.pinned = False


class _Rank:
    def __init__(
        self, layout: Layout, records, placement: Placement, step: Step, machine: Machine, on_device: frozenset[int], compresses: bool
    ):
        self.layout, self.placement, self.step, self.machine = layout, placement, step, machine
        self.compresses = compresses
        self.cpu = machine.device == "cpu"
        machine.require_collectives()
        world, share = layout.world, machine.devices
        alone = "" if share == 1 else "_all"
        self.h2d = getattr(machine, f"h2d{alone}_gbps") * 1e9
        self.d2h = getattr(machine, f"d2h{alone}_gbps") * 1e9
        self.read, self.write, self.mixed = (machine.drive_gbps(what) * 1e9 / share for what in ("read", "write", "mixed"))
        self.update_rate = machine.update_gparams * 1e9 * UPDATE_NBYTES / share  # bytes a second
        rates = [machine.gather_gbps] if share > 1 else []
        rates += [machine.network_gbps / share * (world - 1) / (world - share)] if world > share else []  # of what a rank receives
        self.collective = min(rates, default=0.0) * 1e9
        itemsize = WEIGHT_NBYTES[layout.spans[0].dtype]
        self.spans = [_Span(span.index, span.numel * itemsize) for span in layout.spans]
        self.chunks: list[_Chunk] = []
        for chunk, record in zip(layout.chunks, records):
            homes = {kind: placement.homes[kind][chunk.index] for kind in KINDS}
            if chunk.span in on_device:
                homes = dict.fromkeys(KINDS, "device")
            made = _Chunk(chunk.index, self.spans[chunk.span], record, homes, chunk.trainable, chunk.numel)
            self.chunks.append(made)
            self.spans[chunk.span].chunks.append(made)
        for span in self.spans:
            span.pinned = placement.pinned or span.index in on_device
            span.presence = "home" if span.pinned else "away"
        self.param_chunks = [layout.chunks_of(param) for param in range(len(layout.specs))]
        self.budget = placement.device_nbytes - placement.fixed_nbytes
        self.used = self.peak = 0
        self.position = -1
        self.held: frozenset[int] = frozenset()
        self.under_way = 0
        self._plan()

        self.clock = _Clock(self._speeds)
        self.bell = _Flag()
        self.caches: dict[str, dict[int, _Entry]] = {kind: {} for kind in KINDS}
        self.free = {kind: placement.slots[kind] for kind in KINDS}
        self.pinned_requests: dict[str, deque] = {kind: deque() for kind in KINDS}
        self.ahead: list[tuple[int, str]] = []
        self.stalls = dict.fromkeys(LINKS, 0.0)
        self.cg, self.gg, self.gc, self.update = (_Lane(self.clock) for _ in range(4))
        self.reads, self.demands, self.read_more = deque(), deque(), _Flag()
        self.writer = _Lane(self.clock)
        self.clock.start(self._reader())
        self.waiting: list[_Chunk] = []
        self.begun: deque[_Flag] = deque()  # the gradient of each update in the lane: that of the first, once there, frees a slot soon

    def _plan(self) -> None:
        """Where gradients are complete follows from the ops; so, as in the engine, do reductions and updates."""
        step, left = self.step, {}
        for chunk in self.layout.chunks:
            left[chunk.index] = {piece.param for piece in chunk.pieces} if chunk.trainable else set()
        self.complete: dict[int, list[int]] = {}
        completed = []
        for position, params in enumerate(step.gradients):
            for param in params:
                for chunk in self.param_chunks[param]:
                    left[chunk].discard(param)
                    if self.layout.chunks[chunk].trainable and not left[chunk]:
                        completed.append((position, chunk))
                        self.complete.setdefault(position, []).append(chunk)
        early = [] if step.deferred else [(p, c) for p, c in completed if self.chunks[c].homes[STATES] != "device"]
        self.num_updates_begun = 0
        slots_ahead, states_ahead = look_ahead(self.placement)
        actions = schedule.plan(
            step.uses,
            nbytes={span.index: 0 if span.pinned else span.nbytes for span in self.spans},
            budget=self.budget,
            slots_ahead=slots_ahead,
            slots_of={span.index: sum(chunk.homes[WEIGHTS] == "nvme" for chunk in span.chunks) for span in self.spans},
            keep=step.keep,
            reductions=completed if self.layout.world > 1 else (),
            updates=early,
            span_of={chunk.index: chunk.span for chunk in self.layout.chunks},
            states_ahead=states_ahead,
        )
        self.route = Route(step.uses, actions, early)
        self.issue: list[list[schedule.Action]] = [[]]  # before the first op, then behind each
        for action in actions:
            if isinstance(action, schedule.Run):
                self.issue.append([])
            else:
                self.issue[-1].append(action)

    def _speeds(self, links: frozenset[str]) -> dict[str, float]:
        speeds = dict.fromkeys(links, 1.0)
        if "nc" in links and "cn" in links:
            speeds["nc"] = min(1.0, READ_SHARE * self.mixed / self.read)
            speeds["cn"] = min(1.0, (1 - READ_SHARE) * self.mixed / self.write)
        if not self.cpu and "update" in links:  # all three are bound by host memory
            copied = sum(rate for link, rate in (("cg", self.h2d), ("gc", self.d2h)) if link in links)
            demand = 1 + copied / self.update_rate
            speeds |= {link: 1 / demand for link in ("update", "cg", "gc") if link in links}
        if self.cpu:
            shares = {"compute": 1.0, "update": 1.0, "cg": 0.5, "gc": 0.5, "gg": 0.5, "rs": 0.5}
            demand = sum(shares.get(link, 0.0) for link in links)
            if demand > 1:
                speeds |= {link: 1 / demand for link in links if link in shares}
        return speeds

    def run(self) -> Simulation:
        self.starts: list[float] = [0.0]
        self.is_over = False
        self.clock.start(self._train())
        self.clock.run()
        assert self.is_over, "the simulated engine waits for what never comes"
        start, end = self.starts[-2:]
        found = Simulation(end - start, self.stalls, peak_device_nbytes=self.peak + self.placement.fixed_nbytes)
        found.host_nbytes = self.placement.host_nbytes
        busy_until = dict.fromkeys(LINKS, start)
        for work in self.clock.works:
            if work.end <= start or work.start >= end:
                continue
            found.works.append(Work(work.link, work.what, work.start - start, work.end - start, work.nbytes))
            found.nbytes[work.link] += work.nbytes * (min(work.end, end) - max(work.start, start)) / (work.end - work.start)
            found.busy_seconds[work.link] += max(0.0, min(work.end, end) - max(work.start, busy_until[work.link]))
            busy_until[work.link] = max(busy_until[work.link], work.end)
        return found

    # The training thread

    def _train(self):
        while not self._is_steady():
            self.stalls.update(dict.fromkeys(LINKS, 0.0))
            yield from self._one_step()
            self.starts.append(self.clock.now)
        self.is_over = True

    def _is_steady(self) -> bool:
        """Whether the last two steps took the same time; it takes some steps until writes are as much behind as they will be."""
        seconds = [end - start for start, end in zip(self.starts, self.starts[1:])]
        alike = len(seconds) >= LEAST_STEPS and abs(seconds[-1] - seconds[-2]) <= STEADY * seconds[-1]
        return alike or len(seconds) >= MOST_STEPS

    def _one_step(self):
        step = self.step
        self.position, self.held = -1, frozenset()
        self.route.cursor.restart()
        self.num_updates_begun = 0
        for span in self.spans:
            yield from self._evict(span)
        for position in range(-1, len(step.uses)):
            if position >= 0:
                self.position, self.held = position, frozenset({*step.uses[position].spans, *step.uses[position].held})
                self.route.cursor.advance(step.uses[position].key)
            if position == step.backward:
                self._expect_gradients()
            self._update_waiting()
            num_fetched = yield from self._issue(self.issue[position + 1])
            if position < 0:
                continue
            for index in step.uses[position].spans:
                num_fetched += yield from self._bring(self.spans[index])
            num_complete = len(self.complete.get(position, ()))
            overhead = (num_fetched + 2 * num_complete) / 4 * self.machine.chunk_overhead_us * 1e-6  # two fetches, a gradient, an update
            seconds, op_seconds = step.seconds[position], self.machine.op_overhead_us * 1e-6
            seconds = (seconds + op_seconds if self.cpu else max(seconds, op_seconds)) + overhead
            yield ("compute", seconds, step.uses[position].key, 0)
            self.held = frozenset()  # what encloses it is held again when the next op begins
            yield from self._gradients_arrive(position)
        yield from self._finish_step()

    def _issue(self, actions):
        num_fetched = 0
        for action in actions:
            match action:
                case schedule.Read(index):
                    self._read_ahead(self.spans[index])
                case schedule.Copy(index):
                    num_fetched += yield from self._copy(self.spans[index], needed=False)
                case schedule.Gather(index):
                    self._gather(self.spans[index])
                case schedule.Evict(index):
                    yield from self._evict(self.spans[index])
                case schedule.ReadStates(index):
                    chunk = self.chunks[index]
                    if chunk.homes[STATES] == "nvme" and chunk.trainable and not chunk.updated and not chunk.pending:
                        self._ask(chunk, STATES, pin=False)
                case schedule.Reduce(index):
                    self._reduce(self.chunks[index])
        return num_fetched

    def _read_ahead(self, span: _Span) -> None:
        if span.presence != "away":
            return
        for chunk in span.chunks:
            chunk.weights_expected = True
            if chunk.pending:
                self._begin_update(chunk)
            elif chunk.updating.raised and chunk.homes[WEIGHTS] == "nvme":
                self._ask(chunk, WEIGHTS, pin=False)

    def _copy(self, span: _Span, *, needed: bool):
        if span.presence != "away":
            return 0
        if not (yield from self._make_room(span, needed)):
            return 0
        self.used += span.nbytes
        self.peak = max(self.peak, self.used)
        span.presence = "fetching"
        for chunk in span.chunks:
            if chunk.pending:
                self._begin_update(chunk)
            wish = self._ask(chunk, WEIGHTS, pin=True, urgent=needed) if chunk.homes[WEIGHTS] != "device" else None
            in_backward = self.position >= self.step.backward
            chunk.weights_expected = self.route.wants_weights(chunk.index, span.index, in_backward=in_backward)
            chunk.gathered = _Flag(True)
            self.update.hurry(chunk.updating)
            chunk.copied = self.cg.push(self._run_copy(chunk, wish, chunk.updating))
        return len(span.chunks)

    def _run_copy(self, chunk: _Chunk, wish: _Wish | None, updating: _Flag):
        entry = None
        if wish is not None:
            if not wish.granted.raised:  # others wait for this lane
                self._hurry(chunk, WEIGHTS)
            yield wish.granted
            entry = wish.entry
            yield entry.ready
        yield updating
        if entry is None:
            return
        nbytes = chunk.record.weight_nbytes
        yield ("cg", nbytes / self.h2d + self.machine.copy_latency_us * 1e-6, chunk.index, nbytes)
        self._unpin(chunk, WEIGHTS, entry)

    def _gather(self, span: _Span) -> None:
        if self.layout.world == 1 or span.presence != "fetching":
            return
        for chunk in span.chunks:
            if chunk.gathered.raised:
                chunk.gathered = self.gg.push(self._run_gather(chunk, chunk.copied))

    def _run_gather(self, chunk: _Chunk, copied: _Flag):
        yield copied
        yield ("gg", self._collective_seconds(chunk), chunk.index, self._nbytes(chunk))

    def _collective_seconds(self, chunk: _Chunk) -> float:
        world = self.layout.world
        return self._nbytes(chunk) * (world - 1) / world / self.collective + self.machine.gather_latency_us * 1e-6

    def _nbytes(self, chunk: _Chunk) -> int:
        return chunk.numel * WEIGHT_NBYTES[self.layout.spans[0].dtype]

    def _bring(self, span: _Span):
        num_fetched = 0
        if span.presence == "away":
            num_fetched = yield from self._copy(span, needed=True)
        if span.presence == "fetching":
            self._gather(span)
            yield from self._settle(span)
            span.presence = "home"
        return num_fetched

    def _settle(self, span: _Span):
        for chunk in span.chunks:
            if not chunk.copied.raised:
                yield from self._wait("update", chunk.updating)
                if chunk.homes[WEIGHTS] == "nvme":
                    self._hurry(chunk, WEIGHTS)
                    while (entry := self.caches[WEIGHTS].get(chunk.index)) is None and not chunk.copied.raised:
                        yield from self._wait("nc", self.bell)
                    if entry is not None:
                        yield from self._wait("nc", entry.ready)
                yield from self._wait("cg", chunk.copied)
            yield from self._wait("gg", chunk.gathered)

    def _wait(self, link: str, flag: _Flag):
        start = self.clock.now
        yield flag
        self.stalls[link] += self.clock.now - start

    def _make_room(self, span: _Span, needed: bool):
        if self.used + span.nbytes <= self.budget:
            return True
        others = [s.index for s in self.spans if s.presence != "away" and not s.pinned and s.index not in self.held]
        for victim in slots.victims(span.index, others, self.route.to_span, needed=needed):
            yield from self._evict(self.spans[victim])
            if self.used + span.nbytes <= self.budget:
                return True
        return needed

    def _evict(self, span: _Span):
        if span.pinned or span.presence == "away" or span.index in self.held:
            return
        if span.presence == "fetching":
            yield from self._settle(span)
        self._leave(span)

    def _leave(self, span: _Span) -> None:
        span.presence = "away"
        self.used -= span.nbytes

    # Gradients and updates

    def _expect_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.update_expected = not self.step.deferred and chunk.trainable and chunk.homes[STATES] != "device"

    def _gradients_arrive(self, position: int):
        itemsize = WEIGHT_NBYTES[self.layout.spans[0].dtype]
        world = self.layout.world
        for param in self.step.gradients[position]:
            if not self.layout.specs[param].trainable:
                continue
            for index in self.param_chunks[param]:
                chunk = self.chunks[index]
                chunk.received = True
                yield from self._finish_announced(chunk)
                if world == 1 and chunk.homes[STATES] == "device":
                    chunk.gradient = _Flag(True)
                elif world == 1:
                    piece = next(piece for piece in self.layout.chunks[index].pieces if piece.param == param)
                    nbytes = piece.numel * itemsize
                    self.under_way += nbytes
                    chunk.gradient = self.gc.push(self._run_collect(chunk, nbytes, nbytes, _Flag(True)))
        for index in self.complete.get(position, ()):
            chunk = self.chunks[index]
            chunk.weights_expected = False
            if chunk.span.presence != "fetching" and (entry := self.caches[WEIGHTS].get(index)) is not None:
                self._drop(chunk, WEIGHTS, entry)
            if world == 1:
                self._ready(chunk)
        self._update_waiting()
        while self.under_way > self.placement.under_way_nbytes:
            yield from self._wait("gc", self.bell)

    def _reduce(self, chunk: _Chunk) -> None:
        def work():
            yield ("rs", self._collective_seconds(chunk), chunk.index, self._nbytes(chunk))

        nbytes = self._nbytes(chunk)
        self.under_way += nbytes
        chunk.reduced = True
        scattered = self.gg.push(work())
        chunk.gradient = self.gc.push(self._run_collect(chunk, nbytes // self.layout.world, nbytes, scattered))
        self._ready(chunk)

    def _run_collect(self, chunk: _Chunk, nbytes: int, leaving: int, before: _Flag):
        yield before
        if chunk.homes[STATES] != "device":
            if chunk.homes[GRADIENTS] == "nvme":
                yield from self._claim_gradient(chunk, patient=True)
            yield ("gc", nbytes / self.d2h + self.machine.copy_latency_us * 1e-6, chunk.index, nbytes)
            if chunk.homes[GRADIENTS] == "nvme":
                self.caches[GRADIENTS][chunk.index].pins -= 1
        self.under_way -= leaving
        self._ring()

    def _claim_gradient(self, chunk: _Chunk, *, patient: bool):
        """A slot for a gradient, pinned; one that nobody uses makes room by going to NVMe, and comes back later.

        patient: wait for the slot that the update at the head of its lane will free."""
        cache = self.caches[GRADIENTS]
        while chunk.index not in cache:
            if self.free[GRADIENTS]:
                self.free[GRADIENTS] -= 1
                cache[chunk.index] = _Entry(chunk)
            elif not (patient and self.begun and self.begun[0].raised) and (victims := [e for e in cache.values() if not e.pins]):
                victim = max(victims, key=lambda entry: entry.chunk.index)
                del cache[victim.chunk.index]
                self.free[GRADIENTS] += 1
                yield from self._transfer("cn", victim.chunk, GRADIENTS)
            else:
                yield self.bell
        cache[chunk.index].pins += 1

    def _ready(self, chunk: _Chunk) -> None:
        if not self.step.deferred and chunk.homes[STATES] != "device":
            self.waiting.append(chunk)

    def _update_waiting(self) -> None:
        for chunk in list(self.waiting):
            if chunk.span.index not in self.held:
                self.waiting.remove(chunk)
                chunk.updated = True
                self._make_stale(chunk)
                self._begin_update(chunk)

    def _make_stale(self, chunk: _Chunk) -> None:
        if not chunk.span.pinned and chunk.span.presence != "away":
            self._leave(chunk.span)

    def _begin_update(self, chunk: _Chunk) -> None:
        chunk.pending = chunk.update_expected = False
        wishes = {}
        for kind, urgent in ((WEIGHTS, not self.step.deferred), (STATES, True)):
            if chunk.homes[kind] == "nvme":
                wishes[kind] = self._ask(chunk, kind, pin=True, urgent=urgent)
        self.num_updates_begun += 1  # only now: what it asked for is nobody's victim in between
        gradient, copied = chunk.gradient, chunk.copied
        flags = [gradient, copied, *(wish.granted for wish in wishes.values())]
        gradient_stays = chunk.homes[GRADIENTS] != "nvme"
        self.begun.append(gradient)
        chunk.updating = self.update.push(
            self._run_update(chunk, wishes, gradient, copied), lambda: gradient_stays and all(flag.raised for flag in flags)
        )

    def _run_update(self, chunk: _Chunk, wishes, gradient: _Flag, copied: _Flag):
        yield gradient
        cache = self.caches[GRADIENTS]
        if chunk.homes[GRADIENTS] == "nvme":
            has_left = chunk.index not in cache
            yield from self._claim_gradient(chunk, patient=False)
            if has_left:
                yield from self._transfer("nc", chunk, GRADIENTS)
        for kind, wish in wishes.items():
            self._hurry(chunk, kind)
            yield wish.granted
            yield wish.entry.ready
            yield wish.entry.written
        yield copied
        nbytes = 2 * chunk.record.nbytes + self.placement.sizes[GRADIENTS][chunk.index]
        yield ("update", nbytes / self.update_rate, chunk.index, chunk.record.nbytes)
        if chunk.homes[GRADIENTS] == "nvme":
            del cache[chunk.index]
            self.free[GRADIENTS] += 1
        self.begun.remove(gradient)
        for kind, wish in wishes.items():
            wish.entry.written = _Flag()
            self.writer.push(self._run_write(chunk, kind, wish.entry))
        self._ring()

    def _run_write(self, chunk: _Chunk, kind: str, entry: _Entry):
        yield from self._transfer("cn", chunk, kind)
        self.clock.happen(entry.written)
        self._unpin(chunk, kind, entry)

    def _transfer(self, link: str, chunk: _Chunk, kind: str):
        nbytes = self.placement.sizes[kind][chunk.index]
        if (self.compresses or self.placement.pool_nbytes) and kind != GRADIENTS:
            late = self.placement.in_slots[kind][chunk.index] > nbytes
            how = {"codes": self.compresses, "pools": self.placement.pool_nbytes > 0}
            read, written = moved_nbytes(chunk.record.of(kind, late=late), self.placement.num_late, **how)
            nbytes = read if link == "nc" else written
        rate = self.read if link == "nc" else self.write
        yield (link, nbytes / rate, (chunk.index, kind), nbytes)

    def _finish_announced(self, chunk: _Chunk):
        if chunk.pending:
            self._begin_update(chunk)
        yield from self._wait("update", chunk.updating)

    def _finish_step(self):
        self.held = frozenset()
        for chunk in self.chunks:
            if self.layout.world > 1 and chunk.trainable and not chunk.reduced:  # what was complete only after the last op
                self._reduce(chunk)
            chunk.reduced = False
        self._update_waiting()
        numel = sum(chunk.record.numel for chunk in self.chunks if chunk.trainable and chunk.homes[STATES] == "device")
        if numel:
            yield ("compute", numel / (self.machine.device_update_gparams * 1e9), "update", 0)
        for chunk in self.chunks:
            if chunk.homes[STATES] != "device" and chunk.received and not chunk.updated:  # some parameter had no gradient
                self._make_stale(chunk)
                chunk.pending = True
                if not self.step.deferred:
                    self._begin_update(chunk)
            chunk.updated = chunk.received = False

    # Slots and reads

    def _ask(self, chunk: _Chunk, kind: str, *, pin: bool, urgent: bool = False):
        """A wish for a copy in host memory."""
        if chunk.homes[kind] != "nvme":
            wish = _Wish(chunk, urgent, _Entry(chunk), _Flag(True))
            wish.entry.ready.raised = True
            return wish
        wish = _Wish(chunk, urgent)
        if pin:
            self.ahead = [other for other in self.ahead if other != (chunk.index, kind)]
            self.pinned_requests[kind].append(wish)
        else:
            self.ahead.append((chunk.index, kind))
        self._grant()
        return wish

    def _hurry(self, chunk: _Chunk, kind: str) -> None:
        for wish in self.pinned_requests[kind]:
            wish.urgent = True
            if wish.chunk is chunk:
                break
        for read in [read for read in self.reads if read[0] is chunk and read[1] == kind]:
            self.reads.remove(read)
            self.demands.append(read)
        self._grant()

    def _grant(self) -> None:
        """Give slots to who asked first, of each kind in order; what is read ahead comes behind what is waited for."""
        for kind, wishes in self.pinned_requests.items():
            while wishes:
                wish = wishes[0]
                wish.entry = self.caches[kind].get(wish.chunk.index) or self._claim(wish.chunk, kind, wish.urgent)
                if wish.entry is None:
                    break
                wish.entry.pins += 1
                self.clock.happen(wishes.popleft().granted)
        left = []
        full = set()
        for index, kind in self.ahead:
            if kind in full:
                left.append((index, kind))
            elif index not in self.caches[kind] and self._claim(self.chunks[index], kind, False) is None:
                full.add(kind)
                left.append((index, kind))
        self.ahead = left

    def _claim(self, chunk: _Chunk, kind: str, urgent: bool) -> _Entry | None:
        cache = self.caches[kind]
        if self.free[kind]:
            self.free[kind] -= 1
        else:
            idle = [entry for entry in cache.values() if entry.is_idle]
            victim = max(idle, key=lambda entry: self._next(entry.chunk, kind), default=None)
            if victim is None or (not urgent and self._next(victim.chunk, kind) <= self._next(chunk, kind)):
                return None
            del cache[victim.chunk.index]
        entry = cache[chunk.index] = _Entry(chunk)
        (self.demands if urgent else self.reads).append((chunk, kind, entry))
        self.clock.happen(self.read_more)
        return entry

    def _next(self, chunk: _Chunk, kind: str) -> float:
        """As the pipeline's distances to the next use."""
        if kind == WEIGHTS:
            return self.route.to_weights(chunk.index, chunk.span.index, update_comes=chunk.update_expected or not chunk.updating.raised)
        return self.route.to_states(chunk.index, chunk.span.index, num_begun=self.num_updates_begun)

    def _reader(self):
        while True:
            while not (self.demands or self.reads):
                self.read_more = _Flag()
                yield self.read_more
            chunk, kind, entry = (self.demands or self.reads).popleft()
            yield from self._transfer("nc", chunk, kind)
            self.clock.happen(entry.ready)
            self._ring()

    def _unpin(self, chunk: _Chunk, kind: str, entry: _Entry) -> None:
        if chunk.homes[kind] != "nvme":
            return
        entry.pins -= 1
        self._drop(chunk, kind, entry)
        self._ring()

    def _drop(self, chunk: _Chunk, kind: str, entry: _Entry) -> None:
        """Give a copy up that nobody needs, unless it is kept anyway."""
        keeps = self.step.keep or (kind == WEIGHTS and (chunk.update_expected or chunk.weights_expected))
        if not keeps and entry.is_idle and self.caches[kind].get(chunk.index) is entry:
            del self.caches[kind][chunk.index]
            self.free[kind] += 1

    def _ring(self) -> None:
        """Something that somebody may wait for has changed."""
        self._grant()
        bell, self.bell = self.bell, _Flag()
        self.clock.happen(bell)
