"""What the engine knows of one chunk in every tier, and the registry of all parameters, spans and chunks.

Knows records, homes and extents. Must not know plans, files or collectives: other modules move the bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.plan.packing import Chunk, Layout, Piece
from infinity.plan.record import Record
from infinity.plan.tiers import NVME
from infinity.sizes import format_bytes
from infinity.system.arena import Area
from infinity.tiers.gradient_state import GradientState
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import SpanState
from infinity.tiers.update_state import UpdateState


class Resident(Area):
    """An area for what never leaves host memory; used as a slot is, but not leased."""

    __slots__ = ()

    def release(self) -> None:
        """It stays where it is."""


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
        self.weights_home = self.states_home = NVME
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
        return self.states_home.is_device

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
