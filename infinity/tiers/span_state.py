"""Device memory of spans: the states of a span, which state may follow which, and the budget of all spans.

Knows spans, their parameters and device memory. Must not know plans, records or collectives: other modules move the bytes.
"""

# [Note: parameters that come and go]
# A span owns one UntypedStorage for life. Eviction resizes the storage to 0, and a fetch resizes the same object back. Views that autograd
# saved are therefore valid again after a fetch. While the span is HOME, a parameter's `.data` is a view of the storage. Otherwise the data is
# the parameter's placeholder: one element of NaN, expanded to the parameter's shape, so that shape and dtype stay true. The class of the
# parameter decides which code may use the value ([Note: parameters with two classes] in parameters.py). Code in C that ignores the class finds
# NaN instead of stale numbers, and the engine notices writes to the placeholder.
#
# The engine does not resize a storage while a tensor of the program uses the storage, as after `self.kept = self.weight.t()`. A read of such a
# tensor would crash the process. The span is AWAY then, and the memory stays until the tensor is deleted.
#
# [Note: weights written in forward]
# An embedding with max_norm scales rows of the weight in forward. A changed row loses the residual of the old value. The engine finds changed
# rows by comparing with the host copy. A split master on the device has no host copy, so a span with such a parameter keeps a snapshot.

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from torch._C import DisableTorchFunctionSubclass

from infinity.errors import BudgetError, UsageError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.model.autograd_state import autograd_runs, flat_tensor, parameter_view
from infinity.model.parameters import set_data
from infinity.plan.packing import Layout, Span
from infinity.sizes import format_bytes
from infinity.system.capacity import resize
from infinity.tiers.parameter_state import ParameterState


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
    (Presence.HOME, Presence.FETCHING),  # gathered again, because other ranks gather the span
}


class SpanState:
    """One span on the device. `holds` counts the running ops that need the span. `handles` has a handle for each view that autograd saved."""

    def __init__(self, span: Span, params: list[ParameterState], device: torch.device):
        self.span = span
        self.index = span.index
        self.params = params
        self.dtype = TORCH_DTYPES[span.format.compute]
        self.nbytes = span.nbytes
        self.storage = torch.UntypedStorage(0, device=device)
        self.flat: torch.Tensor | None = None  # [span.numel] over the storage, made at the first allocation
        self.presence = Presence.AWAY
        self.pinned = False  # the storage is never freed
        self.allocated = False
        self.evict_pending = False  # the plan evicted the span while an op held the span
        self.holds = 0
        self.handles: set = set()
        self.attached = False  # parameters point into the storage
        self.snapshot: torch.Tensor | None = None  # of `flat` after the last update, see [Note: weights written in forward]
        self.fetch: object | None = None  # of the pipeline, while FETCHING
        self.num_aliases: int | None = None  # tensors that used the storage at the first hold after the allocation

    def become(self, presence: Presence) -> None:
        assert (self.presence, presence) in _SPAN_MOVES, f"{self}: {presence} from {self.presence}"
        self.presence = presence

    def attach(self, layout: Layout) -> None:
        """Make the parameters views of the storage, which is complete."""
        if self.attached:
            return
        with DisableTorchFunctionSubclass():
            for state in self.params:
                state.check_untouched()
            for state in self.params:
                if state.view is None:
                    offset = layout.homes[state.index].offset
                    state.view = parameter_view(self.flat, state.shape, state.stride, offset)
                set_data(state.param, state.view)
                state.version = state.counter._version
        self.attached = True

    def detach(self) -> list[ParameterState]:
        """Make the parameters placeholders. Returns the parameters that were written to in place while they were home."""
        written = self.written()
        if self.attached:
            with DisableTorchFunctionSubclass():
                for state in self.params:
                    set_data(state.param, state.placeholder)
                    state.version = state.counter._version
        self.attached = False
        return written

    def let_go(self) -> None:
        """Make the parameters placeholders at the end. Other tensors may refer to pinned memory, which is freed after the last of them."""
        for state in self.params:
            state.leave()
            state.view = None
        if self.pinned or not self.storage.resizable():
            self.storage = torch.UntypedStorage(0, device=self.storage.device)
        else:
            resize(self.storage, 0)
        self.flat = self.snapshot = None
        self.presence, self.attached, self.allocated = Presence.AWAY, False, False

    def written(self) -> list[ParameterState]:
        """The parameters that were written to in place while they were home, such as by an embedding with max_norm, or that got other data.

        Raises UsageError for data of another shape, dtype or device."""
        if not self.attached:
            return []
        for state in self.params:
            state.take_replaced()
        return [state for state in self.params if state.is_written]

    def count_aliases(self) -> None:
        """Count the tensors that use the storage, before the program sees the storage."""
        if self.num_aliases is None and not self.pinned:
            self.num_aliases = self._num_aliases()

    @property
    def has_escaped(self) -> bool:
        """Whether the program has kept a tensor that uses the storage. A read of this tensor after the storage is freed would crash the
        process. False during a backward pass, because autograd has such tensors."""
        if self.allocated and not self.storage.resizable():  # a NumPy array may use the storage
            return True
        if self.num_aliases is None or (self.handles and autograd_runs()):
            return False
        return self._num_aliases() > self.num_aliases

    def _num_aliases(self) -> int:
        of_engine = self.attached * len(self.params) + sum(hold() is not None for hold in self.handles)
        return torch._C._storage_Use_Count(self.storage._cdata) - of_engine

    def __repr__(self):
        first = self.params[0].name if self.params else "-"
        return f"SpanState({self.index}, {format_bytes(self.nbytes)}, {self.presence.value}, {first})"


class DeviceTier:
    """Device memory of all spans, and the budget. The training thread allocates and frees, or a thread that the training thread waits for.
    Any thread may call `book`: before it allocates memory, and after it has freed memory.

    before_change: called under a lock, before `held_nbytes` changes; None if no caller needs this. on_allocated(nbytes): called after an
    allocation for a span; None if no caller needs this. counts_waiting: gradients that wait lower the limit of running ops. On several ranks
    they do not: a lane frees these gradients, and the ranks must evict alike.
    """

    def __init__(self, budget_nbytes: int, on_allocated: Callable[[int], None] | None = None, *, counts_waiting: bool = True):
        self.on_allocated = on_allocated
        self.counts_waiting = counts_waiting
        self.budget_nbytes = budget_nbytes  # for spans that are not pinned; `book` counts all other memory of the engine
        self.limit_nbytes = budget_nbytes  # up to this limit, running ops may hold more than the budget
        self.used_nbytes = 0
        self.other_nbytes = 0
        self.waiting_nbytes = 0  # of `other_nbytes`: gradients that wait for their updates in memory that is freed then
        self.peak_nbytes = 0
        self.before_change: Callable[[], None] | None = None
        self._lock = threading.RLock()  # `before_change` may run a finalizer, and this may free memory of the engine

    def fits(self, nbytes: int) -> bool:
        return self.used_nbytes + nbytes <= self.budget_nbytes

    def allows(self, nbytes: int) -> bool:
        """Whether an op may take these bytes if it cannot continue without them."""
        waiting = self.waiting_nbytes if self.counts_waiting else 0
        return self.used_nbytes + nbytes <= max(self.limit_nbytes - waiting, self.budget_nbytes)

    def allocate(self, span: SpanState) -> None:
        if span.allocated:
            return
        with self._counted(used=0 if span.pinned else span.nbytes):
            resize(span.storage, span.nbytes)
        if span.flat is None:
            span.flat = flat_tensor(span.storage, span.dtype, span.span.numel)
        span.allocated = True
        if self.on_allocated is not None:
            self.on_allocated(span.nbytes)

    def free(self, span: SpanState) -> None:
        assert not span.pinned
        if span.allocated and not span.has_escaped:
            resize(span.storage, 0)
            span.allocated, span.num_aliases = False, None
            self._change(used=-span.nbytes)

    def book(self, nbytes: int) -> None:
        """Count other memory of the engine: gradients in transit, pinned spans, optimizer states on the device."""
        self._change(other=nbytes)

    def booked(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        """Memory that is allocated inside the context counts as by `book`, unless the allocation fails."""
        return self._counted(other=nbytes)

    def note_waiting(self, nbytes: int) -> None:
        """Gradients of so many bytes, which `book` counts, wait for their updates. A negative number: they no longer do."""
        with self._lock:
            self.waiting_nbytes += nbytes

    def lend(self, nbytes: int) -> None:
        """Take bytes from the budget of spans for another purpose, which books them. A negative number gives the bytes back."""
        self._change(used=nbytes, other=-nbytes)

    def pin(self, span: SpanState) -> None:
        """Keep an allocated span on the device. The span no longer counts against the budget of the other spans."""
        span.pinned = True
        self._change(used=-span.nbytes, other=span.nbytes)

    def unpin(self, span: SpanState) -> None:
        span.pinned = False
        self._change(used=span.nbytes, other=-span.nbytes)

    @property
    def held_nbytes(self) -> int:
        """All device memory that the engine holds."""
        return self.used_nbytes + self.other_nbytes

    def between_changes(self, work: Callable[[], object]) -> object:
        """Run a function while `held_nbytes` does not change."""
        with self._lock:
            return work()

    @contextlib.contextmanager
    def _counted(self, *, used: int = 0, other: int = 0) -> Iterator[None]:
        self._change(used=used, other=other)
        try:
            yield
        except BaseException:
            self._change(used=-used, other=-other)
            raise

    def _change(self, *, used: int = 0, other: int = 0) -> None:
        with self._lock:
            try:
                if self.before_change is not None:
                    self.before_change()
            finally:
                self.used_nbytes += used
                self.other_nbytes += other
                self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)


def no_room(spans: Iterable[SpanState], tier: DeviceTier) -> BudgetError:
    """The error if the spans that running ops hold do not fit together. Later ops may need still more. Room for all spans is always enough."""
    passing = [span for span in spans if not span.pinned]
    needed = sum(span.nbytes for span in passing if span.holds and not span.allocated)
    lacking = tier.used_nbytes + needed - tier.limit_nbytes
    lacking, most = (-(-3 * n // 2) for n in (lacking, max(lacking, sum(span.nbytes for span in passing) - tier.limit_nbytes)))  # see `place`
    kept = [span for span in passing if span.allocated and not span.holds and span.has_escaped]
    return BudgetError(
        f"device_memory: the running ops hold {format_bytes(tier.used_nbytes)} and need {format_bytes(needed)} more. The limit for weights is "
        f"{format_bytes(tier.limit_nbytes)}. Raise device_memory by {lacking} bytes or more: {most} bytes more are enough for any op of this "
        f"model."
        + (f" The program keeps tensors in the memory of {kept[0].params[0].name}, so the engine cannot free this memory." if kept else "")
    )
