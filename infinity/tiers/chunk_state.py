"""The state of one chunk in every tier, and the registry of all parameters, spans and chunks.

Knows records, homes and extents. Must not know plans, files or collectives: other modules move the bytes.
"""

from __future__ import annotations

import torch

from infinity.plan.packing import Chunk, Layout, Piece
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.tiers import NVME, Tier
from infinity.sizes import format_bytes
from infinity.system.arena import Area
from infinity.tiers.extents_on_demand import ExtentsOnDemand
from infinity.tiers.gradient_state import GradientState
from infinity.tiers.parameter_state import ParameterState
from infinity.tiers.span_state import SpanState
from infinity.tiers.update_state import UpdateState


class Resident(Area):
    """An area for a record that never leaves host memory. The interface is that of a slot, without a lease."""

    __slots__ = ()

    def release(self) -> None:
        """The area stays."""


class ChunkState:
    """The state of one chunk: the record, the place in each tier, and the running moves and updates."""

    def __init__(self, chunk: Chunk, record: Record, rank: int, span: SpanState):
        self.chunk = chunk
        self.index = chunk.index
        self.record = record
        self.shard = chunk.shard_in_span(rank)  # of this rank, and its pieces
        self.pieces = chunk.shard_pieces(rank)
        self.whole_pieces = {piece.param: piece for piece in chunk.pieces}  # of all shards, by parameter
        inside = [state.name for state in span.params if state.index in self.whole_pieces]
        self.title = f"chunk {chunk.index} ({inside[0]})" if inside else f"chunk {chunk.index}"  # for messages
        self.gaps = _gaps(self.pieces, record.numel)
        self.span = span
        self.homes: dict[str, Tier] = dict.fromkeys(KINDS, NVME)  # by kind; a record that visits the device keeps its homes
        self.weights_home = self.states_home = NVME  # of the present record: the device while the record visits it
        self.must_wait = False  # on some rank, the gradient can wait nowhere but on the device: so it does on all ranks
        self.has_host_place = True  # False if, on any rank, a gradient that waits for step() has no place in host memory
        self.extents: dict[str, object] = {}  # on NVMe, by kind; None for a kind without bytes
        self.redo = None  # the RedoLog of a record whose moments on NVMe may be late
        self.device_states: dict[str, torch.Tensor] | None = None
        self.steps: dict[int, int] = {piece.param: 0 for piece in chunk.pieces}
        self.num_averaged = 0  # the step of the average of the weights; 0: no average yet
        self.gradient = GradientState()
        self.copy_job = None  # the last copy of the weights to the device
        self.update = UpdateState()
        self.weights_expected = False  # a copy to the device follows soon, or an update that is not announced yet
        self.num_changes = 0  # of the record
        self.snapshot = None  # the Snapshot that has not copied the record yet

    def set_homes(self, homes: dict[str, Tier], *, must_wait: bool, has_host_place: bool) -> None:
        """Set the homes of the record. The record is at home. must_wait, has_host_place: see the attributes."""
        self.homes, self.must_wait, self.has_host_place = homes, must_wait, has_host_place
        self.return_home()

    def return_home(self) -> None:
        """Set the tiers of the present record to its homes."""
        self.weights_home, self.states_home = self.homes[WEIGHTS], self.homes[STATES if self.trainable else WEIGHTS]

    def exchange_homes(self, visitor: ChunkState, kind: str) -> None:
        """This copy has moved to the host memory of a visitor's copy, which takes the extent on NVMe instead."""
        self.homes[kind], visitor.homes[kind] = visitor.homes[kind], self.homes[kind]
        self.extents[kind], visitor.extents[kind] = None, self.extents[kind]
        if kind == STATES:
            self.redo, visitor.redo = None, self.redo
        self.return_home()

    @property
    def keep_weights(self) -> bool:
        """Whether a host copy of the weights keeps its slot, even if no host copies are kept."""
        return self.update.is_expected or self.weights_expected

    def copy_for_snapshot(self, lease=None) -> None:
        """The record is about to move or to change: a snapshot copies the record first. lease: of the whole record, if the caller has one."""
        if (snapshot := self.snapshot) is not None:
            snapshot.before_change(self, lease)

    def note_average(self, number: int) -> None:
        """The average contains the weights of `number` steps."""
        self.num_averaged = number

    def begin_change(self, lease=None) -> None:
        self.copy_for_snapshot(lease)
        self.num_changes += 1

    def note_updated(self, lease) -> None:
        """An update of the record is over. lease: of the record."""
        if (snapshot := self.snapshot) is not None:
            snapshot.after_update(self, lease)

    @property
    def weights_on_device(self) -> torch.Tensor:
        """The weights of this rank's shard in the span: 1-D, without padding. The span is allocated."""
        return self.span.flat[self.shard]

    @property
    def trainable(self) -> bool:
        return self.chunk.trainable

    @property
    def on_device(self) -> bool:
        return self.states_home.is_device

    @property
    def is_visitor(self) -> bool:
        """Whether the record is on the device and has its home elsewhere."""
        return self.on_device and not self.homes[STATES if self.trainable else WEIGHTS].is_device

    @property
    def gradient_on_device(self) -> bool:
        """Whether the gradient is on the device: the parts that have arrived, and the parts that follow."""
        return self.on_device or (self.gradient.stays and not self.gradient.is_offloaded)

    @property
    def gradient_passes(self) -> bool:
        """Whether the gradient has no planned place: [Note: gradients that pass] in placement.py."""
        return isinstance(self.extents[GRADIENTS], ExtentsOnDemand)

    @property
    def has_no_room_elsewhere(self) -> bool:
        """Whether the gradient can wait nowhere but on the device: neither host memory nor NVMe has a place."""
        return self.homes[GRADIENTS].is_device and not self.on_device

    def __repr__(self):
        names = self.span.params[0].name if self.span.params else "-"
        return f"ChunkState({self.index}, {format_bytes(self.record.nbytes)}, {self.weights_home}/{self.states_home}, {names})"


def _gaps(pieces: tuple[Piece, ...], numel: int) -> list[tuple[int, int]]:
    """The elements of a shard that belong to no piece, as [(begin, end)]."""
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
        """Free all device memory. All parameters are placeholders from now on."""
        for span in self.spans:
            span.let_go()
        for chunk in self.chunks:
            chunk.device_states = None
            chunk.gradient.free_device()

    def owner(self, tensor: torch.Tensor) -> SpanState | None:
        """The span whose storage a tensor is a view of."""
        if tensor.layout is not torch.strided:  # a sparse matrix, for example, has no storage
            return None
        return self.by_storage.get(tensor.untyped_storage()._cdata)
