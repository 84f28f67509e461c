"""Where each copy of a chunk is: in device memory, in host memory, on NVMe; and which moves are legal.

Holds the registry from a parameter to its state, and the spans on the device with their budget; host copies are those of plan/slots.py.
Must not know plans, files or collectives: it answers and books, others move the bytes. Over 500 lines because the moves that are legal for
a parameter, its span and its chunk are told in one place.
"""

# [Note: parameters that come and go]
#
# A span owns one UntypedStorage for life. Evicting resizes it to 0, fetching resizes it back: the same object, so views
# that autograd saved are valid again when the bytes are back. A parameter's `.data` is a view of that storage while the
# span is HOME, and its placeholder while it is not: one element of NaN, its own, expanded to the parameter's shape, so
# that shape and dtype stay true. Who may see either is the business of the parameter's class ([Note: parameters with two classes] in
# parameters.py); where code in C goes by it, it finds NaN, not stale numbers, and what it writes there is noticed.
#
# A storage is not resized while the program has a tensor of its own that looks into it, as `self.kept = self.weight.t()` leaves one: to
# read that would end the process. Its span is away, its memory stays until the tensor is gone.
#
# [Note: life of an update]
# What is due for a chunk's record. updates.py alone moves it on, in the training thread or in one that this waits for, as while a
# checkpoint is loaded; lanes look at it:
#
#     backward:  IDLE --a backward pass begins--> EXPECTED --its gradients are there--> READY --nobody needs its weights-->
#                EARLY (begun, weights are of the next step) --step()--> IDLE
#     deferred:  IDLE --step(), of what is on NVMe in part--> ANNOUNCED --begun, by what needs it--> IDLE
#     split:     READY --updates are behind--> PUT_OFF --step()--> ANNOUNCED
#
# step() also begins at once what is neither EARLY nor to be announced, such as what waits for no drive; what is given up is IDLE.
# Whether an update that has begun is over, its job knows.

# [Note: weights written in forward]
# An embedding with max_norm scales rows of its weight in forward. A row that changed loses its residual, which was of the
# old value. What changed is seen by comparing with the host copy; a split master that lives on the device has none, so
# its span keeps a snapshot if it holds such a parameter.

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Iterable

import torch
from torch._C import DisableTorchFunctionSubclass

from infinity.errors import BudgetError, UsageError
from infinity.model.parameters import classes_of, set_data
from infinity.model.state_dict import DepartedGradient
from infinity.plan.packing import Chunk, Layout, Piece, Span
from infinity.plan.record import Record
from infinity.sizes import format_bytes
from infinity.system.arena import Area

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int16": torch.int16}


class Presence(enum.Enum):
    """Of a span on the device."""

    AWAY = "away"
    FETCHING = "fetching"
    HOME = "home"


_SPAN_MOVES = {
    (Presence.AWAY, Presence.FETCHING),
    (Presence.FETCHING, Presence.HOME),
    (Presence.FETCHING, Presence.AWAY),
    (Presence.HOME, Presence.AWAY),
    (Presence.HOME, Presence.FETCHING),  # gathered once more, for the sake of other ranks
}


class UpdateStage(enum.Enum):
    """Of a chunk's update, see [Note: life of an update]."""

    IDLE = "idle"
    EXPECTED = "expected"
    READY = "ready"
    EARLY = "early"
    PUT_OFF = "put off"
    ANNOUNCED = "announced"


_UPDATE_MOVES = {
    (UpdateStage.IDLE, UpdateStage.EXPECTED),
    (UpdateStage.EXPECTED, UpdateStage.IDLE),  # no gradient came, or step() began it
    (UpdateStage.IDLE, UpdateStage.READY),  # other ranks have brought gradients
    (UpdateStage.EXPECTED, UpdateStage.READY),
    (UpdateStage.READY, UpdateStage.EARLY),
    (UpdateStage.READY, UpdateStage.IDLE),  # its weights were needed until step(), or the step was given up
    (UpdateStage.EARLY, UpdateStage.IDLE),
    (UpdateStage.READY, UpdateStage.PUT_OFF),
    (UpdateStage.PUT_OFF, UpdateStage.ANNOUNCED),
    (UpdateStage.PUT_OFF, UpdateStage.IDLE),  # the step was given up
    (UpdateStage.IDLE, UpdateStage.ANNOUNCED),
    (UpdateStage.ANNOUNCED, UpdateStage.IDLE),
}


class ParameterState:
    """What the engine knows of one parameter; the registry finds it by the parameter itself."""

    def __init__(self, index: int, name: str, param: torch.nn.Parameter, bank: torch.Tensor):
        """bank: one element a parameter, all NaN, that the placeholders expand."""
        placeholder = bank[index].expand(param.shape)
        self.index = index
        self.name = name
        self.param = param
        self.held_class, self.unheld_class = classes_of(type(param))
        self.num_holders = 0  # whoever may read it now, see [Note: parameters with two classes] in parameters.py
        self.counter = param.detach()  # shares the count of writes with the parameter, and none of its functions
        set_data(self.counter, placeholder)
        self.shape, self.stride = param.shape, torch.empty(param.shape, device="meta").stride()
        self.numel = param.numel()
        self.trainable = param.requires_grad
        self.placeholder = placeholder
        # Its bits, read without a torch operation, which would let go of the GIL and wait to have it back.
        self._bits = bank.view(torch.int16 if bank.itemsize == 2 else torch.int32).numpy() if bank.device.type == "cpu" else None
        self._untouched = self._bits[index].item() if self._bits is not None else None
        self.view: torch.Tensor | None = None  # of the span's storage, made when it is first home
        self.version = 0  # of the parameter when it last came home or left
        self.group: int | None = None  # index of the optimizer's parameter group
        self.arrivals = 0  # gradients in this backward pass
        self.arrived_last: dict[int, int] = {}  # in those of the step before, by number
        self.expected: float = 1  # gradients that this backward pass brings, as far as is known, else infinite
        self.touched = 0  # uses by ops in this step's forward passes, while it trains
        self.touched_last: dict[int, int] = {}  # in the step before, by backward pass
        self.written_in_forward = False
        self.departed = DepartedGradient(placeholder)

    def expect(self, num_gradients: float) -> None:
        """A backward pass begins that brings so many gradients of it, infinite if nobody knows."""
        self.arrivals, self.expected = 0, num_gradients

    def hold(self) -> None:
        """One more may read and change it; its span is home."""
        self.num_holders += 1
        if self.num_holders == 1:
            self.param.__class__ = self.held_class

    def release(self) -> None:
        self.num_holders -= 1
        assert self.num_holders >= 0, self
        if not self.num_holders:
            self.param.__class__ = self.unheld_class

    def leave(self) -> None:
        """Its value is in a record from now on, or nowhere."""
        self.num_holders = 0
        self.param.__class__ = self.unheld_class
        self.point_to(self.placeholder)

    def point_to(self, data: torch.Tensor) -> None:
        with DisableTorchFunctionSubclass():
            set_data(self.param, data)
        self.version = self.counter._version

    @property
    def is_written(self) -> bool:
        """Whether it was written to in place since it last came home or left."""
        return self.counter._version != self.version

    @property
    def has_hooks(self) -> bool:
        """Whether the program looks at its gradients, or changes them, beside the engine, which has one hook of each kind."""
        with DisableTorchFunctionSubclass():
            return any(len(hooks or ()) > 1 for hooks in (self.param._backward_hooks, self.param._post_accumulate_grad_hooks))

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether the program looks at accumulated gradients."""
        with DisableTorchFunctionSubclass():
            return len(self.param._post_accumulate_grad_hooks or ()) > 1

    def check_untouched(self) -> None:
        """The last guard, for what went by all others, such as code in C: raise UsageError if somebody wrote to the placeholder or put
        something else in its place. Called with torch functions of classes switched off."""
        placeholder = self.placeholder
        replaced = self.param.data_ptr() != placeholder.data_ptr()
        if not replaced and not self.is_written:
            if self._bits is None or self._bits[self.index] == self._untouched:
                return
        placeholder.as_strided((), ()).fill_(float("nan"))
        self.point_to(placeholder)
        raise UsageError(
            f"{self.name} was {'replaced' if replaced else 'written to'} while it was not on the device, where it is only "
            f"a placeholder. Change values inside `with infinity.gathered([parameter]):`."
        )

    def take_replaced(self) -> None:
        """Where the program has put other data into the parameter, which is home, as with `set_`, make that its value.

        Raises UsageError if it cannot be.
        """
        view = self.view
        with DisableTorchFunctionSubclass():
            data = self.param.detach()
            if data.data_ptr() == view.data_ptr() and (data.shape, data.dtype, data.stride()) == (view.shape, view.dtype, view.stride()):
                return
            set_data(self.param, view)
        self.put(data)

    def put(self, data: torch.Tensor) -> None:
        """Make other data the value of the parameter, which is home, counted as a write to it. Raises UsageError if it cannot be."""
        view = self.view
        if data.shape != view.shape:
            raise UsageError(
                f"{self.name} was given data of shape {tuple(data.shape)}, as by resize_token_embeddings; the engine has laid it out as "
                f"{tuple(view.shape)}, for good. Resize the model first: before infinity.offload(model, config), or inside `with "
                f"infinity.init(config):`."
            )
        if (data.dtype, data.device) != (view.dtype, view.device):
            raise UsageError(
                f"{self.name} was given data of shape {tuple(data.shape)}, {data.dtype} on {data.device}, as by model.to() or "
                f"model.float(); the engine keeps it as {tuple(view.shape)}, {view.dtype} on {view.device}. Choose the dtype "
                f"and the device in infinity.Config."
            )
        with torch.no_grad():
            view.copy_(data.clone() if data.untyped_storage()._cdata == view.untyped_storage()._cdata else data)
        torch.autograd.graph.increment_version(self.counter)

    def __repr__(self):
        return f"ParameterState({self.name}, {tuple(self.shape)})"


class SpanState:
    """One span on the device. `holds` counts the ops that need it now, `handles` has a Hold for each view that autograd saved."""

    def __init__(self, span: Span, params: list[ParameterState], device: torch.device, nbytes: int):
        self.span = span
        self.index = span.index
        self.params = params
        self.dtype = TORCH_DTYPES[span.dtype]
        self.nbytes = nbytes
        self.storage = torch.UntypedStorage(0, device=device)
        self.flat: torch.Tensor | None = None  # [span.numel] over the storage, made when it is first allocated
        self.presence = Presence.AWAY
        self.pinned = False  # its storage is never freed
        self.allocated = False
        self.evict_pending = False  # evicted by the plan while an op still held it
        self.holds = 0
        self.handles: set = set()
        self.attached = False  # parameters point into the storage
        self.snapshot: torch.Tensor | None = None  # of `flat` after the last update, see [Note: weights written in forward]
        self.fetch: object | None = None  # of the pipeline, while FETCHING
        self.num_aliases: int | None = None  # tensors that look into the storage, since it was allocated and first held

    def become(self, presence: Presence) -> None:
        assert (self.presence, presence) in _SPAN_MOVES, f"{self}: {presence} from {self.presence}"
        self.presence = presence

    def attach(self, layout: Layout) -> None:
        """Let the parameters be views of the storage, which is whole."""
        if self.attached:
            return
        with DisableTorchFunctionSubclass():
            for state in self.params:
                state.check_untouched()
            for state in self.params:
                if state.view is None:
                    offset = layout.homes[state.index].offset
                    with torch.inference_mode(False):  # an evaluation may be the first to need it
                        state.view = self.flat.as_strided(state.shape, state.stride, offset)
                set_data(state.param, state.view)
                state.version = state.counter._version
        self.attached = True

    def detach(self) -> list[ParameterState]:
        """Let the parameters be placeholders; returns those that were written to in place while they were home."""
        written = self.written()
        if self.attached:
            with DisableTorchFunctionSubclass():
                for state in self.params:
                    set_data(state.param, state.placeholder)
                    state.version = state.counter._version
        self.attached = False
        return written

    def let_go(self) -> None:
        """End: the parameters are placeholders, whatever they were. What was pinned, others may refer to: it goes when they do."""
        for state in self.params:
            state.leave()
            state.view = None
        if self.pinned or not self.storage.resizable():
            self.storage = torch.UntypedStorage(0, device=self.storage.device)
        else:
            self.storage.resize_(0)
        self.flat = self.snapshot = None
        self.presence, self.attached, self.allocated = Presence.AWAY, False, False

    def written(self) -> list[ParameterState]:
        """The parameters that were written to in place while they were home, such as by an embedding with max_norm, or given other data.

        Raises UsageError where that is of another shape, dtype or device."""
        if not self.attached:
            return []
        for state in self.params:
            state.take_replaced()
        return [state for state in self.params if state.is_written]

    def count_aliases(self) -> None:
        """Note how many tensors look into the storage before a program gets to see it."""
        if self.num_aliases is None and not self.pinned:
            self.num_aliases = self._num_aliases()

    @property
    def has_escaped(self) -> bool:
        """Whether a program has kept a tensor that looks into the storage: to read it when that is gone would end the process. In backward
        nobody can tell, for autograd has some of its own."""
        if self.allocated and not self.storage.resizable():  # a NumPy array has looked into it, and may still
            return True
        if self.num_aliases is None or (self.handles and torch._C._current_graph_task_id() != -1):
            return False
        return self._num_aliases() > self.num_aliases

    def _num_aliases(self) -> int:
        of_engine = self.attached * len(self.params) + sum(hold() is not None for hold in self.handles)
        return torch._C._storage_Use_Count(self.storage._cdata) - of_engine

    def __repr__(self):
        first = self.params[0].name if self.params else "-"
        return f"SpanState({self.index}, {format_bytes(self.nbytes)}, {self.presence.value}, {first})"


class DeviceTier:
    """Device memory of all spans, with its budget. The training thread allocates and frees, or one that it waits for; any may `book`.

    on_allocated(nbytes): called after the memory of a span was allocated; None where nobody asks.
    """

    def __init__(self, budget_nbytes: int, on_allocated: Callable[[int], None] | None = None):
        self.on_allocated = on_allocated
        self.budget_nbytes = budget_nbytes  # for spans that come and go, what else the engine holds is booked by `book`
        self.limit_nbytes = budget_nbytes  # up to which ops under way may hold more than that
        self.used_nbytes = 0
        self.other_nbytes = 0
        self.peak_nbytes = 0
        self._lock = threading.Lock()

    def fits(self, nbytes: int) -> bool:
        return self.used_nbytes + nbytes <= self.budget_nbytes

    def allows(self, nbytes: int) -> bool:
        """Whether an op that cannot go on without them may have them."""
        return self.used_nbytes + nbytes <= self.limit_nbytes

    def allocate(self, span: SpanState) -> None:
        if span.allocated:
            return
        span.storage.resize_(span.nbytes)
        if span.flat is None:
            with torch.inference_mode(False):
                span.flat = torch.empty(0, dtype=span.dtype, device=span.storage.device).set_(
                    span.storage, 0, (span.span.numel,), (1,)
                )
        span.allocated = True
        if not span.pinned:
            self.used_nbytes += span.nbytes
        self._note_peak()
        if self.on_allocated is not None:
            self.on_allocated(span.nbytes)

    def free(self, span: SpanState) -> None:
        assert not span.pinned
        if span.allocated and not span.has_escaped:
            span.storage.resize_(0)
            span.allocated, span.num_aliases = False, None
            self.used_nbytes -= span.nbytes

    def book(self, nbytes: int) -> None:
        """Count memory of the engine that is no span's: gradients under way, pinned spans, device states."""
        with self._lock:
            self.other_nbytes += nbytes
        self._note_peak()

    def lend(self, nbytes: int) -> None:
        """So much of what spans may take is something else's, which books it; less than nothing: it is given back."""
        self.used_nbytes += nbytes
        self.book(-nbytes)

    def pin(self, span: SpanState) -> None:
        """An allocated span is there to stay; it no longer counts against the budget of those that come and go."""
        span.pinned = True
        self.used_nbytes -= span.nbytes
        self.book(span.nbytes)

    def unpin(self, span: SpanState) -> None:
        span.pinned = False
        self.book(-span.nbytes)
        self.used_nbytes += span.nbytes

    @property
    def held_nbytes(self) -> int:
        """All that the engine holds on the device."""
        return self.used_nbytes + self.other_nbytes

    def _note_peak(self) -> None:
        self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)


class Resident(Area):
    """An area for what never leaves host memory; used as a slot is, but not leased."""

    __slots__ = ()

    def release(self) -> None:
        """It stays where it is."""


class GradientState:
    """What has arrived of a chunk's gradient. tiers/gradients.py alone writes it; others call what it has."""

    __slots__ = ("device_shard", "flat", "is_there", "job", "made", "missing", "number", "received", "squares", "stays", "used", "was_sent")

    def __init__(self):
        self.is_there = False  # in its shard, from the first arrival until the update
        self.job = None  # the last transfer into the shard
        self.made = None  # on CUDA the event behind the last arrival of what stays
        self.number = 0  # of the last arrival, counted over all chunks
        self.squares = None  # the job that sums them, if their norm is asked for
        self.received: set[int] = set()  # parameters with data in the shard, of any rank
        self.missing: float = 0  # parameters that lack gradients in this backward pass, infinite if nobody knows
        self.stays = False  # on the device until its update begins, though the record is not there
        self.was_sent = False  # what has arrived is not there all the same: it has followed the record, or came before it was to stay
        self.device_shard: torch.Tensor | None = None  # the shard of a record on the device, or what stays; its memory stays, too
        self.flat: torch.Tensor | None = None  # device buffer of the whole chunk, more than one rank
        self.used: set[int] = set()  # parameters with a gradient on this rank, of which that has some

    def expect(self, num_params: int) -> None:
        """A backward pass begins that brings gradients of so many parameters."""
        self.missing = num_params

    def complete_one(self) -> bool:
        """All that was expected of one parameter is there. Returns whether it was the last of the chunk's."""
        self.missing -= 1
        return not self.missing

    def exceed(self) -> None:
        """More came of a parameter than was expected: nobody knows when the chunk's gradient is complete."""
        self.missing = math.inf

    def hand_over(self):
        """The job after which an update has all of it; what comes later is of another."""
        job, self.job = self.job, None
        return job

    def sum_by(self, job) -> None:
        """What is there now has its squares summed by this job."""
        self.squares = job

    def come_by(self, job) -> None:
        """All that has come so far is in the shard after this job."""
        self.job = job

    def stay(self, *, here: bool = False) -> None:
        """From now on what arrives stays on the device until its update begins. here: what has arrived already is there, too."""
        self.stays, self.was_sent = True, self.is_there and not here

    def follow(self) -> None:
        """What stayed is on its way to the record."""
        self.is_there, self.was_sent = False, True

    def leave(self) -> tuple[torch.Tensor | None, bool]:
        """It does not stay any more. Returns the memory that it had on the device, and whether there is something in it, which is now to
        be put elsewhere."""
        memory, self.device_shard, self.stays = self.device_shard, None, False
        has_data = self.is_there and not self.was_sent
        if has_data:
            self.is_there = False
        return memory, has_data

    def free_device(self) -> None:
        self.device_shard = self.flat = None


class UpdateState:
    """The update of a chunk that is due, or the last one; see [Note: life of an update]. tiers/updates.py alone writes it."""

    __slots__ = ("hyper", "job", "stage")

    def __init__(self):
        self.stage = UpdateStage.IDLE
        self.hyper = None  # of the update that is announced
        self.job = None  # of the last one that has begun, but on the device

    def become(self, stage: UpdateStage) -> None:
        assert (self.stage, stage) in _UPDATE_MOVES, f"an update is {stage.value} after it was {self.stage.value}"
        self.stage = stage

    @property
    def is_expected(self) -> bool:
        """Whether it follows in this backward pass."""
        return self.stage in (UpdateStage.EXPECTED, UpdateStage.READY)

    @property
    def is_early(self) -> bool:
        """Whether the backward pass has begun it, before the step() that it belongs to, or has put it off: what is refused from then on does
        not depend on how fast drives are."""
        return self.stage in (UpdateStage.EARLY, UpdateStage.PUT_OFF)

    @property
    def is_put_off(self) -> bool:
        """Whether it was to begin in this backward pass, and is to be announced by step() instead."""
        return self.stage is UpdateStage.PUT_OFF

    @property
    def is_announced(self) -> bool:
        return self.stage is UpdateStage.ANNOUNCED

    @property
    def is_running(self) -> bool:
        return self.job is not None and not self.job.done


class ChunkState:
    """What the engine knows of one chunk: its record, its place in each tier, and what is under way for it."""

    def __init__(self, chunk: Chunk, record: Record, pieces: tuple[Piece, ...], span: SpanState):
        self.chunk = chunk
        self.index = chunk.index
        self.record = record
        self.pieces = pieces  # of this rank's shard
        self.whole_pieces = {piece.param: piece for piece in chunk.pieces}  # of all shards, by parameter
        inside = [state.name for state in span.params if state.index in self.whole_pieces]
        self.title = f"chunk {chunk.index} ({inside[0]})" if inside else f"chunk {chunk.index}"  # for people
        self.gaps = _gaps(pieces, record.numel)
        self.span = span
        self.weights_home = self.states_home = "nvme"  # or "host", "device"
        self.extents: dict[str, object] = {}  # on NVMe, by kind; None where there are no bytes
        self.redo = None  # the RedoLog of a record whose moments on NVMe may be late
        self.device_states: dict[str, torch.Tensor] | None = None
        self.steps: dict[int, int] = {piece.param: 0 for piece in chunk.pieces}
        self.gradient = GradientState()
        self.copy_job = None  # the last copy of its weights to the device
        self.update = UpdateState()
        self.weights_expected = False  # a copy to the device follows soon, or an update of which this step has not told yet
        self.num_changes = 0  # of its record
        # A checkpoint under way wants the record before it changes, or after the update that is announced:
        self.before_change: Callable[[ChunkState, object], None] | None = None  # with a Lease of the record, or None
        self.after_update: Callable[[ChunkState, object], None] | None = None

    @property
    def keep_weights(self) -> bool:
        """Whether a host copy of the weights is worth its slot even where nothing is kept."""
        return self.update.is_expected or self.weights_expected

    def save_first(self, lease=None) -> None:
        """The record is about to move or change. lease: of all of it, where the caller has one."""
        if self.before_change is not None:
            self.before_change(self, lease)

    def begin_change(self, lease=None) -> None:
        self.save_first(lease)
        self.num_changes += 1

    @property
    def trainable(self) -> bool:
        return self.chunk.trainable

    @property
    def on_device(self) -> bool:
        return self.states_home == "device"

    @property
    def gradient_on_device(self) -> bool:
        """What has arrived of its gradient, and what arrives next."""
        return self.on_device or (self.gradient.stays and not self.gradient.was_sent)

    def __repr__(self):
        names = self.span.params[0].name if self.span.params else "-"
        return f"ChunkState({self.index}, {format_bytes(self.record.nbytes)}, {self.weights_home}/{self.states_home}, {names})"


def _gaps(pieces: tuple[Piece, ...], numel: int) -> list[tuple[int, int]]:
    """What lies between and behind the pieces of a shard of `numel` elements."""
    gaps, end = [], 0
    for piece in pieces:
        if piece.start > end:
            gaps.append((end, piece.start))
        end = piece.start + piece.numel
    if end < numel:
        gaps.append((end, numel))
    return gaps


class Registry:
    """Parameters, spans and chunks of one engine, by index and by parameter."""

    def __init__(self, layout: Layout, params: list[ParameterState], spans: list[SpanState], chunks: list[ChunkState]):
        self.layout = layout
        self.params = params
        self.spans = spans
        self.chunks = chunks
        self._chunks_of = [[chunks[index] for index in layout.chunks_of(state.index)] for state in params]
        self.by_param = {id(state.param): state for state in params}
        self.by_storage = {span.storage._cdata: span for span in spans}

    def find(self, param: torch.Tensor) -> ParameterState | None:
        return self.by_param.get(id(param))

    def span_of(self, state: ParameterState) -> SpanState:
        return self.spans[self.layout.homes[state.index].span]

    def chunks_of(self, state: ParameterState) -> list[ChunkState]:
        return self._chunks_of[state.index]

    def chunks_in(self, span: SpanState) -> list[ChunkState]:
        return [self.chunks[index] for index in span.span.chunks]

    def free_device(self) -> None:
        """Let go of all device memory; the parameters are placeholders from now on, whatever they were."""
        for span in self.spans:
            span.let_go()
        for chunk in self.chunks:
            chunk.device_states = None
            chunk.gradient.free_device()

    def owner(self, tensor: torch.Tensor) -> SpanState | None:
        """The span whose storage a tensor looks into."""
        if tensor.layout is not torch.strided:  # such as a sparse matrix, which has none
            return None
        return self.by_storage.get(tensor.untyped_storage()._cdata)


def no_room(spans: Iterable[SpanState], tier: DeviceTier) -> BudgetError:
    """The error where those of all spans that are held do not fit together. Ops that come later may need still more: all spans are
    enough."""
    passing = [span for span in spans if not span.pinned]
    needed = sum(span.nbytes for span in passing if span.holds and not span.allocated)
    lacking = tier.used_nbytes + needed - tier.limit_nbytes
    lacking, most = (-(-3 * n // 2) for n in (lacking, max(lacking, sum(span.nbytes for span in passing) - tier.limit_nbytes)))  # see `place`
    kept = [span for span in passing if span.allocated and not span.holds and span.has_escaped]
    return BudgetError(
        f"device_memory: the ops under way hold {format_bytes(tier.used_nbytes)} and need {format_bytes(needed)} more, of "
        f"{format_bytes(tier.limit_nbytes)} for weights. Raise device_memory by {lacking} bytes or more: {most} bytes more are enough for "
        f"any op of this model."
        + (f" Tensors that the program has kept look into {kept[0].params[0].name}'s memory, which is why it cannot go." if kept else "")
    )
