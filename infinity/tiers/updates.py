"""Updates one chunk's record in place: requests the record, computes in the slots of host memory, and passes the slots to the writer.

Knows the segments and the gradient shard of a chunk, and the hyper-parameters of the step. Must not know the optimizer's arithmetic
(arithmetic.py), or when a chunk is due: callers decide that.
"""

# [Note: order of updates]
# Updates begin when gradients are complete, so the chunks of the last ops come first. The next forward pass needs the chunks of the first
# ops first. If updates take longer than the backward pass, the forward pass would wait for all of them. Therefore a fetch hurries the update
# that it waits for. The hurried update overtakes other updates if its gradient and its record are in host memory, and the gradient cannot
# leave for NVMe. An update that waits for a slot keeps its turn ([Note: order of grants] in slots.py).
#
# [Note: gradients that leave the device for their update]
# Lane gc copies a gradient that stayed on the device to a slot ahead of the update. So both links work at once. But a gradient without a
# place in storage can hold its slot forever if the update lane needs another gradient first. So the update lane itself copies such a gradient,
# when its turn has come. If a model has gradients of both kinds, the update lane copies all of them. Otherwise that lane would need a slot
# while gradients of later updates fill all slots, and would write one of these to NVMe. (14.8 B parameters: 8.6 GB a step were written.)
#
# [Note: weights before moments]
# If updates follow step(), the next forward pass waits for weights, not for moments. The bandwidth of host memory limits an update. So an
# update has two jobs if the engine trains on a GPU, and host memory is the home of the record and the gradient. The first job computes the
# weights from the old moments and the gradient. It moves 18 of the 26 bytes a parameter. The second job computes the moments once more and
# stores them. The lane runs second jobs when no other job waits. Usually this is during the backward pass. The last layers come first,
# because their next gradients arrive first. `finish` waits for both jobs, and a fetch only for the first. Two jobs move 36 bytes. On the CPU,
# ops need this bandwidth, so an update has one job.

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator

import torch

from infinity.optim.shard import Shard
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS
from infinity.plan.schedule import Moment, may_pass, may_take_two_jobs, moment, updates_visitors_early
from infinity.system.events import Events, now
from infinity.system.lanes import Job, Lane
from infinity.tiers.arithmetic import Computed, Hyper, Processor, rehearse, update
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.gradients import Gradients
from infinity.tiers.late_moments import CatchUp
from infinity.tiers.record_mover import Lease, RecordMover, segments
from infinity.tiers.route_position import Course
from infinity.tiers.unit_updates import UnitUpdates
from infinity.tiers.update_state import UpdateStage


class Updater:
    """Updates chunks in one lane, in the order of `begin`. Hurried updates overtake others.

    deferred: updates follow step(), and no gradient waits for an update. moments_follow: see [Note: weights before moments]. threads: of the
    host kernel. seed: of the random bits that round bf16 moments; None for fp32 moments.
    """

    def __init__(
        self,
        records: RecordMover,
        gradients: Gradients,
        course: Course,
        events: Events,
        *,
        deferred: bool,
        moments_follow: bool,
        threads: int,
        seed: int | None,
    ):
        self.records = records
        self.gradients = gradients
        self.chunks, self.params = gradients.registry.chunks, gradients.registry.params
        self.course = course
        self.events = events
        self.deferred = deferred
        self.visitors_are_early = updates_visitors_early(deferred=deferred, is_shared=gradients.ranks.are_several)
        self.moments_follow = moments_follow
        device = gradients.device
        self.processor = Processor(threads, UnitUpdates(device))
        self.seed = seed
        self.lane = Lane("update", records.failure, "an update")
        self._users = records.caches[GRADIENTS].users  # the last gradient job of each update in the lane, guarded by the records' lock

    def rehearse(self, optimizers) -> None:
        """Compile the kernels of a GPU before the first step, while the records are written."""
        device = self.gradients.device
        formats = {chunk.record.format for chunk in self.chunks if chunk.trainable or chunk.record.format.is_coded}

        def work() -> None:
            with contextlib.suppress(Exception):  # an update will raise the error again
                rehearse(formats, list(zip(optimizers.rules, optimizers.param_groups)), device)

        if device.type == "cuda":
            self.lane.push(work, "the kernels")

    def moment(self, chunk: ChunkState) -> Moment:
        """When the chunk is updated."""
        gradient_waits = chunk.extents[GRADIENTS] is None or (chunk.gradient.stays and not chunk.gradient.is_offloaded)
        in_memory = not chunk.weights_home.is_storage and gradient_waits
        by_step = chunk.on_device and not (chunk.is_visitor and self.visitors_are_early)
        return moment(deferred=self.deferred, by_step=by_step, in_memory=in_memory)

    def expect(self, chunk: ChunkState, comes: bool) -> None:
        """A backward pass begins. comes: the pass updates the chunk."""
        if comes and chunk.update.stage is UpdateStage.IDLE:
            chunk.update.become(UpdateStage.EXPECTED)
        elif not comes and chunk.update.stage is UpdateStage.EXPECTED:
            chunk.update.become(UpdateStage.IDLE)

    def ready(self, chunk: ChunkState) -> None:
        """The gradients of the chunk are complete. The update begins as soon as no op needs the weights."""
        chunk.update.become(UpdateStage.READY)

    def put_off(self, chunk: ChunkState) -> None:
        """Move the update of the chunk from this backward pass to the time after step()."""
        chunk.update.become(UpdateStage.PUT_OFF)
        self.course.note_update()  # the chunk's turn in this pass is over

    def announce(self, chunk: ChunkState, hyper: Hyper) -> None:
        """The update of the chunk begins when the chunk is needed next."""
        chunk.update.become(UpdateStage.ANNOUNCED)
        chunk.update.hyper = hyper

    def end_step(self) -> None:
        """The step is over. Updates that have neither begun nor been announced never begin."""
        for chunk in self.chunks:
            if chunk.update.stage not in (UpdateStage.IDLE, UpdateStage.ANNOUNCED):
                chunk.update.become(UpdateStage.IDLE)

    def begin(self, chunk: ChunkState, hyper: Hyper, *, early: bool = False) -> None:
        """Update a chunk once its record and its gradient are in host memory. No op holds the device copy. early: before step()."""
        self._begin(chunk, hyper, early)
        if not chunk.on_device:
            self.course.note_update()  # after the requests: from here on, this record has the farthest next use

    def begin_announced(self, chunk: ChunkState) -> None:
        """Begin the announced update of a chunk. The update belongs to the previous step."""
        self._begin(chunk, chunk.update.hyper)

    def _begin(self, chunk: ChunkState, hyper: Hyper, early: bool = False) -> None:
        gradient_job = chunk.gradient.hand_over()  # step() sees later arrivals only
        if early or chunk.update.stage is not UpdateStage.IDLE:
            chunk.update.become(UpdateStage.EARLY if early else UpdateStage.IDLE)
        chunk.update.hyper = None
        if chunk.on_device:
            self._update_on_device(chunk, gradient_job, hyper)
        else:
            is_sent = chunk.gradient_on_device and not self._update_lane_copies
            at_home = all(home.is_host for home in chunk.homes.values())
            format = chunk.record.format
            may_take_two = may_take_two_jobs(in_host_memory=at_home, gradient=format.gradient, whole=format.changes_at_once)
            params = (self.params[index] for index in chunk.whole_pieces)
            in_two = self.moments_follow and not early and may_take_two and hyper.have_two_parts(params)
            self._push(chunk, self.gradients.send(chunk, gradient_job) if is_sent else gradient_job, hyper, in_two)

    @functools.cached_property
    def _update_lane_copies(self) -> bool:
        """Whether the lane copies gradients from the device, see [Note: gradients that leave the device for their update]."""
        return any(chunk.homes[GRADIENTS].is_device and not chunk.homes[STATES].is_device for chunk in self.chunks)

    def finish(self, chunk: ChunkState) -> None:
        """Wait for the chunk's update, before the next gradient arrives or the record is read. An announced update begins first."""
        if chunk.update.is_announced:
            self.begin_announced(chunk)
        if chunk.update.is_running:
            self.records.hurry_all()
        if chunk.update.job is not None:
            self.events.wait("update", chunk.update.job, chunk.index)
        if chunk.update.moments_job is not None:  # the first job has pushed this job
            self.lane.hurry(chunk.update.moments_job)
            self.events.wait("update", chunk.update.moments_job, chunk.index)

    def _update_on_device(self, chunk: ChunkState, gradient_job: Job, hyper: Hyper) -> None:
        """Update a record on the device, in the training thread. The compute stream of CUDA orders the update. The CPU uses all cores."""
        gradient_job.wait()
        chunk.begin_change()
        with self.gradients.shard(chunk) as gradient:
            for _ in self._compute(chunk, self.device_state(chunk), gradient, hyper, on_device=True):
                pass
        self.take_snapshot(chunk)
        self.gradients.release(chunk)

    def _push(self, chunk: ChunkState, gradient_job: Job, hyper: Hyper, in_two: bool) -> None:
        copy_job = chunk.copy_job
        with self.records.lock:  # both requests under one lock, see RecordMover.obtain
            # An urgent request may take the slot of a copy with an earlier next use. Weights are urgent only if gradients wait for the update.
            weights = self.records.request(chunk, WEIGHTS, urgent=self.moment(chunk) is not Moment.FETCH)
            states = self.records.request(chunk, STATES, urgent=True)

        def work() -> Iterator[None]:
            with self._reads_gradient(user):
                yield from self._update_on_host(chunk, weights, states, gradient_job, copy_job, hyper, in_two)

        def ready() -> bool:
            return may_pass(gradient_stays=gradient_stays, there=(job is None or job.done for job in needed))

        gradient_stays, needed = chunk.extents[GRADIENTS] is None, (gradient_job, weights, states, copy_job)
        is_copied_here = chunk.gradient_on_device and self._update_lane_copies
        if gradient_job.done and not is_copied_here:
            self.records.request(chunk, GRADIENTS, pin=False)  # the gradient may be on NVMe
        user = None if is_copied_here else gradient_job  # such an update needs a slot before it frees one
        with self.records.lock:
            self._users.append(user)
        chunk.update.moments_job = None
        # An update that copies its gradient could wait for the slot of the update before it.
        overlaps = not is_copied_here and chunk.record.format.unit != "element"
        chunk.update.job = self.lane.push(work, chunk.title, ready=ready, overlaps=overlaps)

    def hurry(self, chunk: ChunkState) -> None:
        """A fetch waits for the chunk's new weights, see [Note: order of updates]."""
        if chunk.update.job is not None:
            self.lane.hurry(chunk.update.job)

    def sum_squares(self, work: Callable[[], object]) -> Job:
        """Run a function in the lane. The function reads a gradient, and the gradient keeps its slot."""

        def read() -> object:
            with self._reads_gradient(None):
                return work()

        with self.records.lock:
            self._users.append(None)
        return self.lane.push(read)

    def drain(self) -> None:
        """Wait until all updates that have begun are over, with or without success."""
        self.lane.drain()

    def close(self) -> None:
        self.lane.close()

    @contextlib.contextmanager
    def _reads_gradient(self, gradient_job: Job | None) -> Iterator[None]:
        """A job of the lane, noted in `_users`, reads a gradient."""
        try:
            yield
        finally:
            with self.records.lock:
                self._users.remove(gradient_job)
            self.records.notify_readers()

    def _update_on_host(self, chunk, weights, states, gradient_job, copy_job, hyper, in_two) -> Iterator[None]:
        gradient_job.wait()
        if chunk.gradient_on_device:
            self.gradients.bring(chunk)
        with self.gradients.shard(chunk) as gradient:  # see [Note: who holds gradients]
            self.records.hurry(weights)
            lease = self.records.granted((weights, states))
            if copy_job is not None:
                event = copy_job.wait()
                if event is not None:
                    event.synchronize()
            clean = lease.begin_change()
            computed = yield from self._compute(chunk, lease.shard, gradient, hyper, on_device=False, keeps_moments=in_two)
            if in_two:  # pushed here, because an interrupt of the training thread could separate two jobs
                chunk.update.moments_job = self.lane.push(
                    lambda: self._update_moments_on_host(chunk, lease, computed), chunk.title, ready=lambda: True, idle=True
                )
                return
            catch_up = None
            if chunk.redo is not None:
                catch_up = chunk.redo.catch_up(chunk.record, lease.entries[STATES].memory.buffer, gradient, computed, was_clean=clean)
        self._end_update(chunk, lease, catch_up)

    def _update_moments_on_host(self, chunk: ChunkState, lease: Lease, computed: Computed) -> None:
        """Update the moments after the weights."""
        moments = segments(chunk.record, STATES, lease.entries[STATES].memory.tensor)
        with self.gradients.shard(chunk) as gradient:
            start = now()
            computed.update_moments(moments, gradient, threads=self.processor.threads)
            self.events.moved("update", chunk.index, chunk.record.moments_nbytes, start, now())
        self._end_update(chunk, lease)

    def _end_update(self, chunk: ChunkState, lease: Lease, catch_up: CatchUp | None = None) -> None:
        self.gradients.release(chunk)
        chunk.note_updated(lease)
        lease.write_back(catch_up)

    def device_state(self, chunk: ChunkState) -> Shard:
        """The segments of a chunk's record on the device."""
        segments = {"weight": chunk.weights_on_device, **chunk.device_states}
        return Shard(chunk.record.format, segments)

    def take_snapshot(self, chunk: ChunkState) -> None:
        """Copy the shard's weights to the span's snapshot on the device, if the span has one."""
        if chunk.span.snapshot is not None:
            chunk.span.snapshot[chunk.shard] = chunk.weights_on_device

    def _compute(
        self, chunk: ChunkState, state: Shard, gradient: torch.Tensor, hyper: Hyper, *, on_device: bool, keeps_moments: bool = False
    ) -> Generator[None, None, Computed]:
        start = now()
        first = self.events.device_mark() if on_device else None
        seed = self.seed if chunk.record.format.rounds else None
        computed = yield from update(chunk, self.params, state, gradient, hyper, self.processor, seed=seed, keeps_moments=keeps_moments)
        marks = (first, self.events.device_mark()) if on_device else None
        nbytes = chunk.record.nbytes - (chunk.record.moments_nbytes if keeps_moments else 0)
        self.events.moved("update", chunk.index, nbytes, start, now(), marks)
        return computed
