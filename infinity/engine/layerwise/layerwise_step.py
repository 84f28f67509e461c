"""All micro-batches of a layer-wise step: their order, forward and backward, and the completion of each chunk's gradients.

Knows micro-batches, segments, chunks, and a few calls of the engine. Must not know plans, where records are stored, or how bytes move. Tells
device_sums.py which gradients come and when they are complete. Tells activations.py the order in which saved tensors are needed.
"""

# [Note: the order of a layer-wise step]
# Each micro-batch's `loss(model, micro_batch)` has a thread, which pauses where a segment begins. Of the micro-batches with the least progress,
# the first one runs next. The called block determines the position. Each group of blocks has one position, and one more each time the model
# runs through its blocks again. So the control flow is the model's own, and may differ between micro-batches.
# The last segment of a micro-batch goes backward as soon as its loss is known. When all losses are known, segments go backward from the last
# to the first, and in each segment the micro-batches in their order. So gradients of a parameter add up in the order of the ordinary loop,
# on the device ([Note: room for sums] in device_sums.py). On several ranks, the shards of each micro-batch's reduction add up. The
# gradients of a chunk are complete when the first segment that uses the chunk has gone backward. A parameter of several segments, such as a
# tied embedding, has one gradient per micro-batch. Parts from later segments wait on the device, or where activations are kept.
#
# Every block is checkpointed, except blocks that the program checkpoints. A pass that builds no graph, such as that of a reference model,
# does not pause. The code around such a pass may expect that nothing runs in between.
# Of a model whose weights never leave the device, nothing is cut or checkpointed.

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable

import torch
from torch import nn

from infinity.engine.autograd.module_calls import CallState
from infinity.engine.layerwise.buffer_snapshots import BufferSnapshot
from infinity.engine.layerwise.graph_cuts import Segment
from infinity.engine.layerwise.limits import RestartStep
from infinity.engine.layerwise.micro_batch import MicroBatch
from infinity.engine.layerwise.pausable_thread import TorchThreadState
from infinity.engine.layerwise.rng_streams import RngState
from infinity.engine.layerwise.segments import MIN_GROUP_NBYTES, blocks_of, groups_of, intercept_calls, without_kv_caches
from infinity.engine.layerwise.state_conflicts import AttributeConflicts, BufferConflicts
from infinity.engine.steps.refusals import beside
from infinity.errors import UsageError
from infinity.plan.tiers import leaves_device
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.device_sums import DeviceSums
from infinity.tiers.parameter_state import ParameterState

_NEVER = 1 << 30  # the position of a segment that does not exist


class LayerwiseStep:
    """num: micro-batches of the step. at_once: micro-batches for which the device must have room. They pass the model together, unless the step
    is_in_turn: then each one goes forward and backward before the next.
    """

    def __init__(self, engine, model: nn.Module, num: int):
        self.engine, self.cycle, self.model = engine, engine.cycle, model
        self.limits = engine.cycle.layerwise_limits
        self.is_in_turn = engine.device_budget.in_turn and num > 1 and not self.limits.whole
        self.num, self.at_once = num, self.limits.at_once(num)
        if self.is_in_turn:
            how = "micro-batches run one after the other, because a step by layer would transfer no less"
            self.limits.report("the device has room for all weights and gradients", how)
        self.thread_state = TorchThreadState(engine.device)
        self._divide_blocks()
        is_away = self.is_cut and self.limits.is_away(num)  # an uncut step runs as the ordinary loop
        self.is_away = leaves_device(engine.config.activation_tier) or is_away  # block inputs leave the device
        self.buffers = BufferSnapshot(model, self.blocks)
        checks = bool(self.blocks) and self.limits.is_unchecked(model, is_cut=self.is_cut)
        self.attributes = AttributeConflicts(model) if checks else None
        self.buffer_conflicts = BufferConflicts(model) if checks and self.is_cut else None
        self.micro_batches: list[MicroBatch] = []  # of the current round
        self._running: MicroBatch | None = None
        self._in_backward: MicroBatch | None = None
        self.sums: DeviceSums | None = None
        self._first_two: list[MicroBatch] = []  # of the step
        self._is_last_round = False
        self._updates = False

    def _divide_blocks(self) -> None:
        """blocks: blocks whose calls are intercepted. groups: runs of blocks that are one segment. lead: position of the first group."""
        self.blocks = [] if self.limits.whole else blocks_of(self.model)
        chunk_nbytes = max(chunk.chunk.nbytes for chunk in self.engine.registry.chunks)
        full = self.is_in_turn or self.at_once == 1 < self.num
        self.groups = [[None, *self.blocks]] if full else groups_of(self.blocks, min(chunk_nbytes, MIN_GROUP_NBYTES), self.limits)
        self.lead = int(bool(self.groups) and self.groups[0][0] is not None)
        self.is_cut = len(self.groups) + self.lead > 1
        if not self.is_cut and not full:  # one segment: the ordinary loop
            if not self.blocks and not self.limits.whole:
                self.limits.report("the model has no list of modules in which two with parameters have one class", "it runs as one segment")
            self.blocks, self.groups = [], []
        self.group = {block: number for number, group in enumerate(self.groups) for block in group}

    @property
    def may_begin_anew(self) -> bool:
        """Whether the step may restart after a failure: a restart needs less memory, no weight is updated, and there is no other rank."""
        return not self._updates and self.num > 1 and (self.is_cut or self.is_in_turn) and not self.engine.ranks.are_several

    def run(self, works: list[Callable], streams: list[RngState]) -> list[torch.Tensor]:
        """Run all forward and backward passes. works: the forward passes. streams: their random numbers, changed to the last states."""
        calls, num_together = self.engine.calls, self.at_once if self.is_cut else self.num
        num_measured = num_together
        if self.is_in_turn:  # the measured step ran by layer
            num_together, num_measured = 1, self.at_once
        pairs = enumerate(zip(works, streams, strict=True))
        micro_batches = [MicroBatch(self, work, number % num_together, rng) for number, (work, rng) in pairs]
        self._first_two = micro_batches[:2]
        if num_together > 1:
            self.sums = DeviceSums(self.engine.gradients, self.engine.weights)
        before = calls.swap(CallState(calls.frames, threading.get_ident()))  # the same list: an outer caller can end the calls in this list
        if before.frames:
            calls.swap(before)
            raise UsageError(beside("infinity.accumulate"))
        try:
            with self.cycle.backward.one_backward(num_together=num_measured, withhold=self._withhold), self._activations_away():
                try:
                    losses = self._run_rounds(micro_batches, num_together)
                finally:
                    for micro in micro_batches:
                        micro.stop()
                    if self.sums is not None:
                        self.sums.abandon()
        finally:
            calls.end_all()  # recomputed blocks were called in this thread
            calls.swap(before._replace(thread=threading.get_ident()))
        streams[:] = [micro.rng for micro in micro_batches]
        return losses

    def _run_rounds(self, micro_batches: list[MicroBatch], num_together: int) -> list[torch.Tensor]:
        no_caches = without_kv_caches(self.model, self.limits.report_cache) if self.blocks else contextlib.nullcontext()
        losses = []
        with intercept_calls(self.blocks, self._call), no_caches:
            for begin in range(0, self.num, num_together):
                self.micro_batches = micro_batches[begin : begin + num_together]
                self._is_last_round = begin + num_together >= self.num
                if begin and self.sums is not None:
                    self.sums.begin_round()
                if begin and self.buffer_conflicts is not None:  # blocks that the program checkpoints have run again in the round before
                    self.buffer_conflicts = BufferConflicts(self.model)
                losses += self._forward()
                self._backward()
        return losses

    def saving(self, micro: MicroBatch) -> contextlib.AbstractContextManager:
        """Tensors that autograd saves inside the context are needed in the backward pass of the micro-batch's segment."""
        activations = self.engine.activations
        after = functools.partial(_parts_after, len(self.micro_batches))
        part = micro.position, micro.number
        return activations.parts.saving(part, after) if activations is not None else contextlib.nullcontext()

    def _activations_away(self) -> contextlib.AbstractContextManager:
        activations = self.engine.activations
        return activations.switched(self.is_away) if activations is not None else contextlib.nullcontext()

    def _forward(self) -> list[torch.Tensor]:
        """All forward passes of a round, and the backward pass of each one's last segment."""
        left, losses = list(self.micro_batches), {}
        while left:
            position = min(micro.position for micro in left)
            with self._weights_kept():
                for micro in [micro for micro in left if micro.position == position]:
                    self._run_segment(micro)
                    self._check(micro)
                    if micro.thread.is_over:
                        left.remove(micro)
                        losses[micro] = micro.thread.result.detach()
                        self._begin_sums([micro], position)
                        self._go_back(micro, position)
            if left:
                self.engine.device_budget.end_forward_segment(position)
        if self._is_last_round:
            if self.num > 1 and self.blocks:
                self.limits.note_checked(self.model, is_cut=self.is_cut)
            self.buffers.discard()
        return [losses[micro] for micro in self.micro_batches]

    def _run_segment(self, micro: MicroBatch) -> None:
        self._running = micro
        try:
            micro.run_segment()
        finally:
            self._running = None

    def _check(self, micro: MicroBatch) -> None:
        """A forward pass has paused or ended. Raises RestartStep if a place was found that cannot be cut."""
        if self.buffer_conflicts is not None:
            if micro in self._first_two and (found := self.attributes.check(micro)) is not None:
                self.limits.note(_conflict(*found))
            if (found := self.buffer_conflicts.check(micro)) is not None:
                self.limits.note(f"{_attribute_name(*found)} is written in several parts of the model, and by other micro-batches in between")
        if (micro.thread.is_over or not self.engine.ranks.are_several) and self.limits.agree(self.blocks, self.engine.ranks):
            raise RestartStep

    def check_params(self, block: nn.Module) -> None:
        """A block is called. A tensor that replaces one of its parameters for this call is missing when the block runs again."""
        if self.attributes is not None and (found := self.attributes.replaced_in(block)) is not None:
            self.limits.note(_conflict(*found))

    def restore_modules(self) -> None:
        """The step restarts: restore buffers and parameters from before the step."""
        self.buffers.restore()
        if self.attributes is not None:
            self.attributes.restore()

    def _backward(self) -> None:
        self._updates = self._is_last_round
        complete = self._chunks_by_first_use()
        here = {segment.position for micro in self.micro_batches for segment in micro.cutter.segments}.union(complete)
        (last,) = self.engine.ranks.most([max(here, default=-1)])
        there = self.engine.ranks.most([position in here for position in range(last + 1)])
        for position in (position for position in range(last, -1, -1) if there[position]):
            self._begin_sums([micro for micro in self.micro_batches if micro.position == position], position)
            with self._weights_kept():
                for micro in self.micro_batches:
                    self._go_back(micro, position)
            if self.sums is not None:
                self.sums.end(complete.get(position, []))
            if self._is_last_round:
                self.cycle.backward.complete(complete.get(position, []))
        if self.sums is not None:
            self.sums.close()

    def position(self, block: nn.Module, at: int) -> int:
        """The position of a forward pass after it calls a block at position `at`: the next position of the block's group.

        All forward passes use the same positions. So passes that skip blocks meet the others again, and gradients of a block add up in the
        order of micro-batches.
        """
        number, following = self.group[block], at + 1 - self.lead
        if at >= self.lead and (following - 1) % len(self.groups) == number and block is not self.groups[number][0]:
            return at
        return at + 1 + (number - following) % len(self.groups)

    def note_reach(self, segment: Segment, maker: Segment, name: str) -> None:
        """The graph of a segment reaches the node `name` of an earlier segment: join the segments from `maker` to `segment`."""
        groups = [self.groups[(position - self.lead) % len(self.groups)] for position in range(maker.position + 1, segment.position + 1)]
        blocks = [next(block for block in group if block is not None) for group in groups]
        self.limits.note(
            f"the part of the model after {segment.name} reaches {name} of an earlier part (which the engine cannot see: a custom function "
            f"between blocks, or a tensor that is not an argument of its block)",
            blocks,
        )

    def _weights_kept(self):
        """Weights that are fetched inside the context stay for the micro-batches that follow."""
        return self.engine.calls.segment() if len(self.micro_batches) > 1 and self.is_cut else contextlib.nullcontext()

    def _begin_sums(self, micro_batches: list[MicroBatch], position: int) -> None:
        """Begin sums of gradients, because the last segments left of these micro-batches go backward: those at this position."""
        if self.sums is None:
            return
        budget = self.engine.device_budget
        params = set().union(*(micro.params_of_last_segment() for micro in micro_batches))
        used = set().union(*(segment.touched for micro in micro_batches for segment in micro.cutter.segments[-2:]))
        rooms = budget.sum_room(self.sums.chunks_of(params), position if self._is_last_round else None)
        budget.note_sums(self.sums.begin(params, used, *rooms))

    def _go_back(self, micro: MicroBatch, position: int) -> None:
        self._in_backward = micro
        micro.backward(position)
        self.cycle.backward.reduce_all()

    def _withhold(self, state: ParameterState, gradient: torch.Tensor) -> bool:
        return refuse_gradient(self.engine) or self._in_backward.withhold(state, gradient)

    def _call(self, block: nn.Module, inner: Callable, /, *args, **kwargs):
        """A block is called, in any thread."""
        micro = self._running
        if micro is None or micro.thread.ident != threading.get_ident():
            return inner(*args, **kwargs)
        return micro.call(block, inner, args, kwargs)

    def _chunks_by_first_use(self) -> dict[int, list[ChunkState]]:
        """Chunks by the position of the first segment that uses them, in any micro-batch, on any rank."""
        first: dict[int, int] = {}
        for micro in self.micro_batches:
            for state, position in micro.first_use.items():
                first[state.index] = min(position, first.get(state.index, position))
        chunks, found = self.engine.registry.chunks, {}
        uses = [min((first[param] for param in chunk.whole_pieces if param in first), default=_NEVER) for chunk in chunks]
        for chunk, position in zip(chunks, self.engine.ranks.least(uses), strict=True):
            if position < _NEVER:
                found.setdefault(int(position), []).append(chunk)
        return found


def refuse_gradient(engine) -> bool:
    """Called when a gradient of a parameter arrives. Raises UsageError if a loss function has called backward()."""
    engine.calls.loss.refuse("backward()")
    return False


def _parts_after(num: int, part: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """Parts, (position, micro-batch), that go backward after a part, in order. num: of micro-batches."""
    position, number = part
    yield from ((position, later) for later in range(number + 1, num))
    yield from itertools.product(range(position - 1, -1, -1), range(num))


def _conflict(module: nn.Module, attribute: str) -> str:
    return f"{_attribute_name(module, attribute)} has another value for each micro-batch, and other micro-batches read this value in between"


def _attribute_name(module: nn.Module, attribute: str) -> str:
    return f"{type(module).__name__}.{attribute}"
