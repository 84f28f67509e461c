"""The update of one chunk's record, in the place where it was read to: obtain it, compute, hand it to the writer.

Knows a chunk's segments, its gradient shard and the hyper-parameters of the step. Must not know what is computed
(arithmetic.py), nor when a chunk is due: its callers decide that.
"""

# [Note: order of updates]
# They are begun as gradients complete: those of the last ops first. The next forward pass wants the first ops' first, and where
# updates take longer than the backward pass, it would wait for all of them. So a fetch hurries the update that it waits for:
# it passes the others, if its gradient and its record have their places in host memory already. What waits for a slot keeps its turn
# ([Note: order of grants] in slots.py).

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.optim.shard import Shard
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS
from infinity.plan.schedule import Moment, may_pass, moment
from infinity.plan.tiers import in_storage
from infinity.system.events import Events, now
from infinity.system.lanes import Job, Lane
from infinity.tiers.arithmetic import Computed, Hyper, update
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.record_mover import RecordMover
from infinity.tiers.route_position import Course
from infinity.tiers.update_state import UpdateStage


class Updater:
    """Updates chunks in one lane, in the order in which they are begun, but for those that are hurried.

    deferred: updates follow step(), and no gradient waits for them. threads: of the host kernel. seed: of the random bits that round bf16
    moments; None where moments are fp32.
    """

    def __init__(
        self,
        records: RecordMover,
        gradients: Gradients,
        course: Course,
        events: Events,
        *,
        deferred: bool,
        threads: int,
        seed: int | None,
    ):
        self.records = records
        self.gradients = gradients
        self.chunks, self.params = gradients.registry.chunks, gradients.registry.params
        self.course = course
        self.events = events
        self.deferred = deferred
        self.threads = threads
        self.seed = seed
        self.lane = Lane("update", records.failure, "an update")
        self._users = records.caches[GRADIENTS].users  # the last gradient job of each update in the lane, guarded by the records' lock

    def moment(self, chunk: ChunkState) -> Moment:
        """When it is to be updated."""
        in_memory = not in_storage((chunk.weights_home, chunk.states_home)) and (chunk.extents[GRADIENTS] is None or chunk.gradient.stays)
        return moment(deferred=self.deferred, on_device=chunk.on_device, in_memory=in_memory)

    def expect(self, chunk: ChunkState, comes: bool) -> None:
        """A backward pass begins that updates the chunk, or does not."""
        if comes and chunk.update.stage is UpdateStage.IDLE:
            chunk.update.become(UpdateStage.EXPECTED)
        elif not comes and chunk.update.stage is UpdateStage.EXPECTED:
            chunk.update.become(UpdateStage.IDLE)

    def ready(self, chunk: ChunkState) -> None:
        """Its gradients are complete; it begins as soon as nobody needs its weights."""
        chunk.update.become(UpdateStage.READY)

    def put_off(self, chunk: ChunkState) -> None:
        """It follows step() instead of this backward pass."""
        chunk.update.become(UpdateStage.PUT_OFF)
        self.course.note_update()  # its turn in this pass is over

    def announce(self, chunk: ChunkState, hyper: Hyper) -> None:
        """It begins when the chunk is next needed."""
        chunk.update.become(UpdateStage.ANNOUNCED)
        chunk.update.hyper = hyper

    def end_step(self) -> None:
        """What has begun belongs to a step that is over; what has not, and is not announced, never will."""
        for chunk in self.chunks:
            if chunk.update.stage not in (UpdateStage.IDLE, UpdateStage.ANNOUNCED):
                chunk.update.become(UpdateStage.IDLE)

    def begin(self, chunk: ChunkState, hyper: Hyper, *, early: bool = False) -> None:
        """Update a chunk once its record and gradient are in host memory; nobody holds its device copy. early: before step()."""
        self._begin(chunk, hyper, early)
        self.course.note_update()  # only now: what it asks for must not look like the last to be used again

    def begin_announced(self, chunk: ChunkState) -> None:
        """Begin the update that is announced for a chunk, of the step before."""
        self._begin(chunk, chunk.update.hyper)

    def _begin(self, chunk: ChunkState, hyper: Hyper, early: bool = False) -> None:
        gradient_job = chunk.gradient.hand_over()  # step() sees what came after
        if early or chunk.update.stage is not UpdateStage.IDLE:
            chunk.update.become(UpdateStage.EARLY if early else UpdateStage.IDLE)
        chunk.update.hyper = None
        if chunk.on_device:
            self._update_on_device(chunk, gradient_job, hyper)
        else:
            self._push(chunk, self.gradients.send(chunk, gradient_job) if chunk.gradient_on_device else gradient_job, hyper)

    def finish(self, chunk: ChunkState) -> None:
        """Wait for the chunk's update: before its next gradient arrives, or its record is read."""
        if chunk.update.is_announced:
            self.begin_announced(chunk)
        if chunk.update.job is not None:
            if chunk.update.is_running:
                self.records.hurry_all()
            self.events.wait("update", chunk.update.job, chunk.index)

    def _update_on_device(self, chunk: ChunkState, gradient_job: Job, hyper: Hyper) -> None:
        """In the training thread: on CUDA the compute stream orders it, on the CPU it has all cores."""
        gradient_job.wait()
        chunk.begin_change()
        with self.gradients.shard(chunk) as gradient:
            self._compute(chunk, self.device_state(chunk), gradient, hyper)
        self.take_snapshot(chunk)
        self.gradients.release(chunk)

    def _push(self, chunk: ChunkState, gradient_job: Job, hyper: Hyper) -> None:
        copy_job = chunk.copy_job
        with self.records.lock:  # at once, see RecordMover.obtain
            # Its record may take the slot of what is needed sooner: the weights' only where gradients wait for this update.
            weights = self.records.request(chunk, WEIGHTS, urgent=self.moment(chunk) is not Moment.FETCH)
            states = self.records.request(chunk, STATES, urgent=True)

        def work() -> None:
            self._update_on_host(chunk, weights, states, gradient_job, copy_job, hyper)

        def ready() -> bool:
            return may_pass(gradient_stays=gradient_stays, there=(job is None or job.done for job in needed))

        gradient_stays, needed = chunk.extents[GRADIENTS] is None, (gradient_job, weights, states, copy_job)
        if gradient_job.done:
            self.records.request(chunk, GRADIENTS, pin=False)  # it may have left for NVMe
        with self.records.lock:
            self._users.append(gradient_job)
        chunk.update.job = self.lane.push(lambda: self._run(work, gradient_job), chunk.title, ready=ready)

    def hurry(self, chunk: ChunkState) -> None:
        """A fetch waits for the chunk's update: see [Note: order of updates]."""
        if chunk.update.is_running:
            self.lane.hurry(chunk.update.job)

    def sum_squares(self, work: Callable[[], object]) -> Job:
        """Run in the lane what needs a gradient and leaves it where it is."""

        with self.records.lock:
            self._users.append(None)
        return self.lane.push(lambda: self._run(work, None))

    def drain(self) -> None:
        """Wait until every update that was begun is over, whether it succeeded or not."""
        self.lane.drain()

    def close(self) -> None:
        self.lane.close()

    def _run(self, work: Callable[[], object], gradient_job: Job | None) -> object:
        try:
            return work()
        finally:
            with self.records.lock:
                self._users.remove(gradient_job)
            self.records.notify_readers()

    def _update_on_host(self, chunk, weights, states, gradient_job, copy_job, hyper) -> None:
        gradient_job.wait()
        with self.gradients.shard(chunk) as gradient:  # see [Note: who holds gradients]
            self.records.hurry(weights)
            lease = self.records.granted((weights, states))
            if copy_job is not None:
                event = copy_job.wait()
                if event is not None:
                    event.synchronize()
            clean = lease.begin_change()
            computed = self._compute(chunk, lease.shard, gradient, hyper)
            catch_up = None
            if chunk.redo is not None:
                catch_up = chunk.redo.catch_up(chunk.record, lease.entries[STATES].memory.buffer, gradient, computed, was_clean=clean)
        self.gradients.release(chunk)
        chunk.note_updated(lease)
        lease.write_back(catch_up)

    def device_state(self, chunk: ChunkState) -> Shard:
        """The record of a chunk that lives on the device."""
        segments = {"weight": chunk.weights_on_device, **chunk.device_states}
        return Shard(chunk.record.format, segments)

    def take_snapshot(self, chunk: ChunkState) -> None:
        """Remember the shard's weights on the device, where that is asked for."""
        if chunk.span.snapshot is not None:
            chunk.span.snapshot[chunk.shard] = chunk.weights_on_device

    def _compute(self, chunk: ChunkState, state: Shard, gradient: torch.Tensor, hyper: Hyper) -> Computed:
        start, on_device = now(), gradient.is_cuda
        first = self.events.device_mark() if on_device else None
        seed = self.seed if chunk.record.format.rounds_moments else None
        computed = update(chunk, self.params, state, gradient, hyper, threads=self.threads, seed=seed)
        marks = (first, self.events.device_mark()) if on_device else None
        self.events.moved("update", chunk.index, chunk.record.nbytes, start, now(), marks)
        return computed
