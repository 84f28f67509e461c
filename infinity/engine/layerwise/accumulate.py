"""`infinity.accumulate`: all micro-batches of a step pass a segment of the model before the next segment is fetched.

Knows micro-batches, segments, which chunks these have, whether what blocks are given leaves the device, and the engine by a few calls. Must
not know plans, where records live, or how bytes move: device_sums.py is told which gradients come, and when they are complete; activations.py in
which order what was saved is needed. Over 500 lines because a step, its micro-batches and what makes it begin anew are one protocol, whose
notes are as long as a file.
"""

# [Note: what accumulation by layer reads]
# With a micro-batches the ordinary loop fetches every weight 2a times: 4a + 10 bytes a parameter and step from NVMe. Here each segment is
# fetched once forward and once backward, whatever a is: 14, or 4t + 10 in t turns ([Note: a device that is full by layer]). The price is
# what is kept for each micro-batch: the inputs of its blocks, which run again in backward, as with activation checkpointing. Where host
# memory has no place for all gradients, each turn after the first costs some 10 more: sums are read and written again.
#
# [Note: the order of things by layer]
# Each micro-batch's `loss(model, micro_batch)` has a thread, which pauses as a segment begins: of those that have come least far the first
# goes on. How far that is, blocks tell: those of a group have a position, and in each further round through the model another one. So
# control flow is the model's own, whether or not it is the same for all. The last segment of a micro-batch goes backward as
# soon as its loss is there; when all are, the segments do so from the last to the first, in each the micro-batches in their order. So the
# gradients of a parameter add up in the order of the ordinary loop, on the device ([Note: room for sums] in device_sums.py), on several ranks as
# shards of what was reduced for each micro-batch, and its chunk is complete with the first segment that uses it. What several segments use,
# such as a tied embedding, has one gradient a micro-batch: later segments' parts of it wait on the device, or where activations are kept.
#
# Blocks are checkpointed, but those that are already, by who calls them (other hooks for saved tensors are in force) or by themselves. A
# pass that builds no graph, such as that of a reference model, does not pause: what surrounds it may be for it alone. Of a model whose
# weights never leave the device, nothing is cut or checkpointed: each micro-batch goes forward and backward as in the ordinary loop.
#
# [Note: what is not cut]
# A custom function, or a block's closure, that is given a tensor of an earlier segment is not seen, and its node leads on into that
# segment's graph, which is to go backward later. That is looked for when a forward pass is over (`_look`): the segments from the one that
# made the tensor to the one that uses it are one from then on. A tensor that is changed in place is not what it was when a block runs again
# for backward: a model that does so to what blocks are given runs as in the ordinary loop. Values of a forward pass are right in either
# case, so that it goes on to its end where there are several ranks, which tell each other then. What modules keep in attributes of their
# own, other micro-batches find there: where it changes with each, they run as in the ordinary loop, too, and so they do where several
# segments write to a buffer. That is looked for in the first step; a buffer that one segment writes and others read is not found. A
# parameter that several segments use has its gradient in parts, which the program's hooks of it are not to see. A step that finds anything
# begins anew, with what was drawn, and with buffers as they were; later ones know it (not_cut.py).
#
# [Note: a device that is full by layer]
# What blocks are given is kept for all micro-batches at the end of the forward passes, and with it the gradients that wait for earlier
# segments, such as those of a tied embedding. If the device has no room for it, the step begins anew, with that in host memory, and on the
# device what has none there, and so do later ones of as many or more. Where both have none, or host memory is not to be used, it begins anew
# in turns of half as many micro-batches, and of half of those. Sums leave the device in each turn and come back in the next ([Note: room for
# sums]): so gradients add up in the order of the ordinary loop. Updates come with the last turn. In turns of one, nothing is cut:
# micro-batches run one after the other as in the ordinary loop. Their blocks are checkpointed as before: so of one micro-batch no more is
# kept than before of two, where its whole graph may take more than that.

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from infinity.engine.layerwise.segments import LEAST_NBYTES, blocks_of, called_by, groups_of, without_caches
from infinity.engine.autograd.module_calls import Turn
from infinity.engine.layerwise.graph_cuts import Cutter, Glue, Segment
from infinity.engine.layerwise.module_state import Attributes, Buffers, BuffersInTurns, BuffersOfModel
from infinity.engine.steps.refusals import beside, refuse_loss
from infinity.engine.autograd.saved_tensors import SavedTensors
from infinity.engine.autograd.trees import containers_in, copy_of_cache, flatten, is_cache, write_back
from infinity.engine.layerwise.micro_batch_threads import Draws, Surroundings, Turns, streams
from infinity.engine.layerwise.not_cut import OFF, REST_OFF, FoundError
from infinity.errors import BudgetError, ConfigError, UsageError
from infinity.model.parameters import owner_of
from infinity.model.recompute import checkpoint
from infinity.plan.tiers import DEVICE, choice_of, leaves_device
from infinity.sizes import format_bytes
from infinity.system import interrupts
from infinity.tiers.activations import Saved
from infinity.tiers.chunk_state import ChunkState
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.device_sums import Sums


def accumulate(model: nn.Module, micro_batches: Iterable, loss: Callable[[nn.Module, object], torch.Tensor]) -> list[torch.Tensor]:
    """Forward and backward of all micro-batches of a step, layer by layer; then call step().

    loss(model, micro_batch) -> the scalar on which an ordinary loop would call backward(), such as model(**micro_batch).loss / number. It
    runs in a thread of its own, others of which run in between: what it switches in the model for a while, those find. Blocks of the model
    run again for backward, with their hooks, as with activation checkpointing. What cannot be cut between blocks is found in the first step,
    which then begins anew; it runs as one, in the end all of the model as in the ordinary loop, and is named once, and by
    stats()["by_layer_uncut"]. So does a step that finds no room on the device before its last backward passes, where there is one rank: what
    its blocks are given, and those of later steps of as many micro-batches, goes to what the engine has left of host memory, as far as there
    is room, unless Config(activations=...) names a place; where both have none, half as many micro-batches pass the model at a time, in the
    end one. Gradients are those of `for micro_batch in micro_batches: loss(model, micro_batch).backward()`, bit by bit, unless of three or more
    some leave the model after other blocks than the rest (early exits), or call one more often in a row: what they share behind these, and the
    blocks before, adds up in another order. Random numbers (dropout) are others. Returns the losses, detached.
    The optimizer's accumulation_steps is to be 2 or more, so that sums are in fp32; how many micro-batches there are may differ from it.
    Raises ConfigError or UsageError if it cannot begin; UsageError if loss returns no scalar with a gradient, or calls backward(), step() or
    zero_grad(): then call zero_grad() before anything else of a step.
    """
    if not callable(loss):
        raise ConfigError(f"infinity.accumulate: loss is a {type(loss).__name__}, expected a function loss(model, micro_batch)")
    engine, micro_batches = _engine(model), _listed(micro_batches)
    if engine.optimizer is None:
        raise UsageError("infinity.accumulate needs an optimizer: make infinity.AdamW(..., accumulation_steps=2) before it")
    if not micro_batches:
        raise ConfigError("infinity.accumulate: there are no micro-batches")
    if len(micro_batches) > 1 and not engine.accumulating:
        raise UsageError(
            "infinity.accumulate adds gradients up in fp32, for which the engine has made no room: give its optimizer "
            "accumulation_steps=2, or any larger number; how many micro-batches there are may differ from it"
        )
    if any(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in pytree.tree_leaves(micro_batches)):
        raise ConfigError("infinity.accumulate: a micro-batch has a gradient, which ends where the model begins; detach it")
    most, least = engine.ranks.most([len(micro_batches), -len(micro_batches)])
    if most != -least:
        raise UsageError(f"infinity.accumulate: one rank has {most} micro-batches, another {-least}; give each as many")
    interrupts.guard()  # forward passes, which do so as they begin, have other threads
    engine.cycle.end_interrupted()
    engine.calls.refuse_running("infinity.accumulate")
    begin = streams(len(micro_batches), engine.device)
    draws = list(begin)
    if all(span.pinned for span in engine.registry.spans):  # no weight ever moves: by layer nothing would be gained
        losses = _one_by_one(engine, _works(loss, model, micro_batches), draws)
    else:
        losses = _by_layer(engine, loss, model, micro_batches, draws)
    next((now for now, before in zip(reversed(draws), reversed(begin)) if now != before), begin[0]).resume(engine.device)
    return losses


def _engine(model: nn.Module):
    if not isinstance(model, nn.Module):
        raise ConfigError(f"infinity.accumulate: the model is a {type(model).__name__}, expected a torch.nn.Module")
    owners = {id(owner): owner for param in model.parameters() if (owner := owner_of(param))}
    if len(owners) != 1:
        raise ConfigError("infinity.accumulate: the model must hold parameters of one engine; build it with infinity.init")
    return next(iter(owners.values()))


def _listed(micro_batches: Iterable) -> list:
    if isinstance(micro_batches, (Mapping, str, bytes)) or not isinstance(micro_batches, Iterable):
        raise ConfigError(
            f"infinity.accumulate: micro_batches is a {type(micro_batches).__name__}, expected a list or another iterable of micro-batches. "
            f"A single micro-batch is a list of one: [micro_batch]"
        )
    return list(micro_batches)


def _works(loss: Callable, model: nn.Module, micro_batches: list) -> list[Callable[[], torch.Tensor]]:
    return [functools.partial(_loss, loss, model, *each) for each in enumerate(micro_batches)]


def _loss(loss: Callable, model: nn.Module, number: int, micro_batch: object) -> torch.Tensor:
    value = loss(model, micro_batch)
    refuse_loss(value, number=number)
    return value


def _refuse_gradient(engine) -> bool:
    """A gradient of a parameter comes: no micro-batch's loss has been returned yet, if its function runs."""
    engine.calls.loss.refuse("backward()")
    return False


def _one_by_one(engine, works: list[Callable], draws: list[Draws]) -> list[torch.Tensor]:
    losses = []
    with engine.cycle.backward.one_backward(withhold=lambda state, gradient: _refuse_gradient(engine)):
        for number, work in enumerate(works):
            draws[number].resume(engine.device)
            with engine.calls.loss:
                value = work()
            draws[number] = Draws.now(engine.device)
            value.backward()
            engine.cycle.backward.reduce_all()
            losses.append(value.detach())
    return losses


def _by_layer(engine, loss: Callable, model: nn.Module, micro_batches: list, draws: list[Draws]) -> list[torch.Tensor]:
    """See [Note: what is not cut] and [Note: a device that is full by layer]."""
    begin = list(draws)
    while True:
        kept = [copy.copy(each) if isinstance(each, (MutableMapping, list)) else each for each in micro_batches]  # which a loss may empty
        step = _Step(engine, model, len(micro_batches))
        try:
            return step.run(_works(loss, model, micro_batches), draws)
        except FoundError:
            pass
        except torch.OutOfMemoryError as error:
            if not step.may_begin_anew:
                if step.is_cut and not step.is_away:
                    error.add_note(f"infinity.accumulate has {step.at_once} micro-batches on the device at once: {OFF}")
                elif step.is_away and engine.activations.has_refused:
                    error.add_note(f"infinity.accumulate has on the device what {REST_OFF}")
                raise
            if not engine.cycle.uncut.agree(step.blocks, engine.ranks):  # else it was found in the same turn, and may be the reason
                _make_room(engine, step)
        engine.cycle.zero_grad()
        step.bring_back()
        draws[:], micro_batches = begin, kept
        del step
        gc.collect()  # what the step kept on the device is part of cycles
        if engine.activations is not None and not engine.activations.is_on:
            engine.activations.shrink()


def _make_room(engine, step: _Step) -> None:
    """The device had none for a step."""
    uncut = engine.cycle.uncut
    if step.is_away or choice_of(engine.config.activations) == DEVICE:
        uncut.note_full(step.at_once, kept_there=not leaves_device(engine.config.activations))
    else:
        activations = engine.activations or engine.parts.keep_activations()
        uncut.note_away(step.num, format_bytes(activations.heap.budget_nbytes))


def _parts_after(num: int, part: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """What goes backward after a segment, by its position, of a micro-batch of so many, by its number."""
    position, number = part
    yield from ((position, later) for later in range(number + 1, num))
    yield from itertools.product(range(position - 1, -1, -1), range(num))


class MicroBatch:
    """One micro-batch of a step: its forward pass, its graph, and what of its gradients waits for more."""

    def __init__(self, step: _Step, work: Callable[[], torch.Tensor], number: int, draws: Draws):
        self.step, self.number = step, number
        self.cutter = Cutter()
        self.glue = Glue(self.cutter, self._note_change)
        self.turns = Turns(work, self._surroundings, f"micro-batch-{number}")
        self.draws = draws
        self.first_use: dict[ParameterState, int] = {}  # the segment
        self._waiting: dict[ParameterState, torch.Tensor | Saved] = {}  # gradients of what earlier segments use, too
        self._given: list[tuple[weakref.ref, int, str]] = []  # to blocks: tensors, at which versions
        self._turn = Turn([], threading.get_ident(), touched=self.cutter.segments[0].touched)  # until its thread has begun
        self._in_block = False
        self._at = 0  # the segment whose backward pass runs

    @property
    def position(self) -> int:
        """Of the segment that it is at, forward, or that is the last that is left."""
        return self.cutter.segments[-1].position if self.cutter.segments else -1

    def go_on(self) -> None:
        """Run a segment."""
        calls, device = self.step.engine.calls, self.step.engine.device
        before = calls.swap(self._turn)
        self.draws.resume(device)
        self.step.running = self
        try:
            with self.step.saving(self), calls.loss:
                self.turns.go_on()
        finally:
            self.step.running = None
            self.draws = Draws.now(device)
            self._turn = calls.swap(before)._replace(touched=self.cutter.segments[-1].touched)
        if self.turns.is_over:
            self._look()

    def end(self) -> None:
        """Whatever it is at."""
        before = self.step.engine.calls.swap(self._turn)
        self.turns.end()
        self.step.engine.calls.swap(before)
        self.turns.result = None
        self.cutter.drop()
        self._waiting.clear()

    @contextlib.contextmanager
    def _surroundings(self):
        self.step.engine.calls.thread = threading.get_ident()  # so a call of any other is refused, also before the model's first one
        try:
            with self.step.surroundings.again(), self.glue:
                yield
        finally:
            self.cutter.end()
            self.step.engine.calls.end_all()

    def call(self, block: nn.Module, inner: Callable, args: tuple, kwargs: dict):
        """A block is called, in this micro-batch's thread."""
        if self._in_block or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        self._in_block = True
        try:
            with self.glue.paused():
                position = self.step.position(block, self.position)
                if position != self.position:
                    self.cutter.begin(type(block).__name__, position)
                    self.turns.pause()
                return self._call(block, inner, args, kwargs)
        finally:
            self._in_block = False

    def _call(self, block, inner, args, kwargs):
        self._look_at_given()
        self.step.look_at_params(block)
        flat, build = flatten((args, kwargs))
        given = [(x, x._version) for x in flat if isinstance(x, torch.Tensor) and not x.is_inference()]
        flat = [self.cutter.let_in(x) if self.cutter.is_earlier(x) else x for x in flat]
        caches = {index: copy_of_cache(x) for index, x in enumerate(flat) if is_cache(x)}  # as they are before the first run fills them
        first = [(args, kwargs)]  # which the caller may look into afterwards; when it runs again, nobody does
        buffers, name = Buffers(block), type(block).__name__

        def run(*flat):
            if not first:
                flat = [copy_of_cache(caches[index]) if index in caches else x for index, x in enumerate(flat)]
            own = args, kwargs = build(flat)
            containers, run_of = (containers_in(first.pop(), own), buffers.first_run) if first else ([], buffers.second_run)
            with run_of():
                output = inner(*args, **kwargs)
            write_back(containers)
            return output

        try:
            output = run(*flat) if self._is_checkpointed(block) else checkpoint(run, *flat)
        finally:
            self.step.buffers.note(buffers)
        if any(x._version != version for x, version in given):
            self._note_change(name)
        self._given += [(weakref.ref(x), version, name) for x, version in given]
        return output

    def _is_checkpointed(self, block: nn.Module) -> bool:
        hooks = _top_saved_tensors_default_hooks(True)
        by_others = hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), SavedTensors)
        return by_others or getattr(block, "gradient_checkpointing", False) is True

    def _note_change(self, what: str) -> None:
        self.step.uncut.note(f"{what} changes in place what it is given, but that is needed once more as blocks run again for backward")

    def _look(self) -> None:
        """The forward pass is over: learn from its graph which segment is the first to use a parameter, and what cannot be cut."""
        registry, last = self.step.engine.registry, self.cutter.segments[-1]
        for segment in self.cutter.segments:
            leaves, reached = segment.leaves(self.turns.result if segment is last else None)
            if reached is not None:
                self.step.note_reach(segment, self.cutter.maker(reached), reached.name())
            segment.touched.update(state for leaf in leaves if (state := registry.find(leaf)) is not None)
            for state in segment.touched:
                if self.first_use.setdefault(state, segment.position) < segment.position and state.has_hooks:
                    self.step.uncut.note(f"{state.name} has a hook, which is to see its whole gradient, and several parts of the model use it")
        self._look_at_given()

    def _look_at_given(self) -> None:
        """Blocks are called, or were."""
        self._given = [each for each in self._given if each[0]() is not None]
        for tensor, version, name in self._given:
            if tensor()._version != version and not self.step.uncut.found_whole:
                self.step.uncut.note(f"what {name} was given is changed in place behind it, but is needed as it runs again for backward")

    def backward(self, position: int) -> None:
        """Run the backward pass of a segment, the last that is left."""
        if position != self.position:
            return
        segments = self.cutter.segments
        segment, roots, self._at = segments[-1], [], position
        if self.turns.result is not None:
            roots.append((self.turns.result, None))
            self.turns.result = None
        roots += segment.roots()
        with DisableTorchFunctionSubclass():
            roots += [(get_gradient_edge(state.param), self._so_far(state)) for state in segment.touched & self._waiting.keys()]
        segments.pop()
        if roots:
            torch.autograd.backward(*zip(*roots))

    def withhold(self, state: ParameterState, gradient: torch.Tensor) -> bool:
        """Whether an earlier segment adds to a parameter's gradient, which waits for that here."""
        if self.first_use.get(state, self._at) >= self._at:
            return False
        saved = None
        if self.step.is_away:
            with contextlib.suppress(BudgetError):  # what was asked for may have had room for what blocks are given, and no more
                saved = self.step.engine.activations.save(gradient)
        self._waiting[state] = saved or gradient
        return True

    def _so_far(self, state: ParameterState) -> torch.Tensor:
        gradient = self._waiting.pop(state)
        return self.step.engine.activations.restore(gradient) if isinstance(gradient, Saved) else gradient


class _Step:
    """All micro-batches of a step, forward and backward."""

    def __init__(self, engine, model: nn.Module, num: int):
        """num: of micro-batches."""
        self.engine, self.cycle, self.model = engine, engine.cycle, model
        self.num, self.at_once = num, engine.cycle.uncut.at_once(num)
        self.surroundings = Surroundings(engine.device)
        self.uncut = engine.cycle.uncut
        self.blocks = [] if self.uncut.whole else blocks_of(model)
        chunk_nbytes = max(chunk.chunk.nbytes for chunk in engine.registry.chunks)
        full = self.at_once == 1 < num
        self.groups = [[None, *self.blocks]] if full else groups_of(self.blocks, min(chunk_nbytes, LEAST_NBYTES), self.uncut)
        self.lead = int(bool(self.groups) and self.groups[0][0] is not None)  # the position of the first group
        self.is_cut = len(self.groups) + self.lead > 1
        is_away = self.is_cut and self.uncut.is_away(num)  # else it is as in the ordinary loop, whose activations stay
        self.is_away = leaves_device(engine.config.activations) or is_away  # what blocks are given
        if not self.is_cut and not full:  # one segment: as in the ordinary loop
            if not self.blocks and not self.uncut.whole:
                self.uncut.name("the model has no list of modules with parameters of which two are of one class", "it runs as one")
            self.blocks, self.groups = [], []
        self.group = {block: number for number, group in enumerate(self.groups) for block in group}
        self.buffers = BuffersOfModel(model, self.blocks)
        is_new = bool(self.blocks) and self.uncut.is_new(model, is_cut=self.is_cut)
        self.attributes = Attributes(model) if is_new else None
        self.in_turns = BuffersInTurns(model) if is_new and self.is_cut else None
        self.micro_batches: list[MicroBatch] = []  # of the turn under way
        self.running: MicroBatch | None = None
        self._goes_back: MicroBatch | None = None
        self.sums: Sums | None = None
        self._first_two: list[MicroBatch] = []  # of the step
        self._is_last = False  # turn
        self._updates = False

    @property
    def may_begin_anew(self) -> bool:
        """Whether a step that has failed on this rank may do so, not cut: no other rank has to, and no weight is updated."""
        return not self._updates and self.num > 1 and self.is_cut and self.engine.ranks.world == 1

    def run(self, works: list[Callable], draws: list[Draws]) -> list[torch.Tensor]:
        """works: the forward passes. draws: their streams, left as they are then."""
        calls, turn = self.engine.calls, self.at_once if self.is_cut else self.num
        micro_batches = [MicroBatch(self, work, number % turn, own) for number, (work, own) in enumerate(zip(works, draws, strict=True))]
        self._first_two = micro_batches[:2]
        if turn > 1:
            self.sums = Sums(self.engine.gradients, self.engine.weights)
        before = calls.swap(Turn(calls.frames, threading.get_ident()))  # the same list: whoever has calls in it can end them
        if before.frames:
            calls.swap(before)
            raise UsageError(beside("infinity.accumulate"))
        try:
            with self.cycle.backward.one_backward(num_together=turn, withhold=self._withhold), self._kept_away():
                try:
                    with called_by(self.blocks, self._call), without_caches(self.blocks, self.model, self.uncut.tell_of_cache):
                        losses = []
                        for begin in range(0, self.num, turn):
                            self.micro_batches = micro_batches[begin : begin + turn]
                            self._is_last = begin + turn >= self.num
                            if begin:
                                self._begin_later_turn()
                            losses += self._forward()
                            self._backward()
                finally:
                    for micro in micro_batches:
                        micro.end()
                    if self.sums is not None:
                        self.sums.abandon()
        finally:
            calls.end_all()  # blocks that ran again have been called in this thread
            calls.swap(before._replace(thread=threading.get_ident()))
        draws[:] = [micro.draws for micro in micro_batches]
        return losses

    def _begin_later_turn(self) -> None:
        if self.sums is not None:
            self.sums.begin_turn()
        if self.in_turns is not None:  # in the turn before, blocks that the program checkpoints have run again, too
            self.in_turns = BuffersInTurns(self.model)

    def saving(self, micro: MicroBatch) -> contextlib.AbstractContextManager:
        """What it saves meanwhile is needed in the backward pass of its segment."""
        activations = self.engine.activations
        after = functools.partial(_parts_after, len(self.micro_batches))
        part = micro.position, micro.number
        return activations.parts.saving(part, after) if activations is not None else contextlib.nullcontext()

    def _kept_away(self) -> contextlib.AbstractContextManager:
        activations = self.engine.activations
        return activations.switched(self.is_away) if activations is not None else contextlib.nullcontext()

    def _forward(self) -> list[torch.Tensor]:
        """All forward passes of a turn, and of each the backward pass of its last segment."""
        left, losses = list(self.micro_batches), {}
        while left:
            position = min(micro.position for micro in left)
            with self._segment():
                for micro in [micro for micro in left if micro.position == position]:
                    micro.go_on()
                    self._look(micro)
                    if micro.turns.is_over:
                        left.remove(micro)
                        losses[micro] = micro.turns.result.detach()
                        self._begin_sums([micro])
                        self._go_back(micro, position)
        if self.num > 1 and self.blocks and self._is_last:
            self.uncut.note_forward(self.model, is_cut=self.is_cut)
        if self._is_last:
            self.buffers.forget()
        return [losses[micro] for micro in self.micro_batches]

    def _look(self, micro: MicroBatch) -> None:
        """A turn of a forward pass is over: raise FoundError if anything was found that cannot be cut."""
        if self.in_turns is not None and micro in self._first_two and (found := self.attributes.look(micro)) is not None:
            self.uncut.note(_another(*found))
        if self.in_turns is not None and (found := self.in_turns.look(micro)) is not None:
            self.uncut.note(f"{_in_words(*found)} is written in several parts of the model, and by others in between")
        if (micro.turns.is_over or self.engine.ranks.world == 1) and self.uncut.agree(self.blocks, self.engine.ranks):
            raise FoundError

    def look_at_params(self, block: nn.Module) -> None:
        """A block is called; when it runs again, what stands in for a parameter of it for that call no longer does."""
        if self.attributes is not None and (found := self.attributes.replaced_in(block)) is not None:
            self.uncut.note(_another(*found))

    def bring_back(self) -> None:
        """The step begins anew: what modules keep is as it was."""
        self.buffers.bring_back()
        if self.attributes is not None:
            self.attributes.bring_back()

    def _backward(self) -> None:
        self._updates = self._is_last
        complete = self._chunks_by_first_use()
        here = {segment.position for micro in self.micro_batches for segment in micro.cutter.segments}.union(complete)
        (last,) = self.engine.ranks.most([max(here, default=-1)])
        there = self.engine.ranks.most([position in here for position in range(last + 1)])
        for position in (position for position in range(last, -1, -1) if there[position]):
            self._begin_sums([micro for micro in self.micro_batches if micro.position == position])
            with self._segment():
                for micro in self.micro_batches:
                    self._go_back(micro, position)
            if self.sums is not None:
                self.sums.end(complete.get(position, []))
            if self._is_last:
                self.cycle.backward.complete(complete.get(position, []))
        if self.sums is not None:
            self.sums.close()

    def position(self, block: nn.Module, at: int) -> int:
        """Where a forward pass is that calls a block at a position: the next one that is the block's, in every forward pass. So those that
        leave blocks out meet the others again, and gradients of a block add up in the order of micro-batches."""
        number, following = self.group[block], at + 1 - self.lead
        if at >= self.lead and (following - 1) % len(self.groups) == number and block is not self.groups[number][0]:
            return at
        return at + 1 + (number - following) % len(self.groups)

    def note_reach(self, segment: Segment, maker: Segment, name: str) -> None:
        """A segment's graph leads on into that of an earlier one by a node of such a name: there is no border between these."""
        groups = [self.groups[(position - self.lead) % len(self.groups)] for position in range(maker.position + 1, segment.position + 1)]
        blocks = [next(block for block in group if block is not None) for group in groups]
        self.uncut.note(
            f"what follows {segment.name} reaches {name}, of an earlier part of the model, by a way that is not seen, such as a custom "
            f"function between blocks, or what a block finds elsewhere than in its arguments",
            blocks,
        )

    def _segment(self):
        """What is fetched inside the block stays for the micro-batches that follow."""
        return self.engine.calls.segment() if len(self.micro_batches) > 1 and self.is_cut else contextlib.nullcontext()

    def _begin_sums(self, micro_batches: list[MicroBatch]) -> None:
        """The last segment that is left of these goes backward."""
        if self.sums is not None:
            lasts = [micro.cutter.segments[-2:] for micro in micro_batches]
            self.sums.begin(set().union(*(last[-1].touched for last in lasts)), set().union(*(last[0].touched for last in lasts)))

    def _go_back(self, micro: MicroBatch, position: int) -> None:
        self._goes_back = micro
        micro.backward(position)
        self.cycle.backward.reduce_all()

    def _withhold(self, state: ParameterState, gradient: torch.Tensor) -> bool:
        return _refuse_gradient(self.engine) or self._goes_back.withhold(state, gradient)

    def _call(self, block: nn.Module, inner: Callable, /, *args, **kwargs):
        """A block is called, by whoever it is."""
        micro = self.running
        if micro is None or micro.turns.ident != threading.get_ident():
            return inner(*args, **kwargs)
        return micro.call(block, inner, args, kwargs)

    def _chunks_by_first_use(self) -> dict[int, list[ChunkState]]:
        """By the first segment that uses it, in any micro-batch, on any rank."""
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


def _another(module: nn.Module, attribute: str) -> str:
    return f"{_in_words(module, attribute)} is another one for each micro-batch, and others find it before it is read"


def _in_words(module: nn.Module, attribute: str) -> str:
    return f"{type(module).__name__}.{attribute}"


_NEVER = 1 << 30
