"""Saving to torch.distributed.checkpoint (DCP): `infinity.save_dcp`. [Note: entries of a DCP checkpoint] is in dcp_names.py.

Knows the boxes of a parameter in a record, and when DCP asks for their values. Must not know how DCP lays out files.

# [Note: one record at a time]
# A record holds flat intervals of parameters, and DCP knows boxes. The planner cuts an interval into at most 2 * dimensions - 1 boxes. Each
# rank offers the boxes of its own shards, record by record. DCP asks for a box's values when DCP writes the box. Therefore each record is
# read once, and one record is in memory at a time. DCP's writer keeps the last tensor of each name until the file is complete. Therefore
# the planner frees the memory of a written tensor when DCP asks for the next tensor.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from infinity.checkpoints.dcp_names import METADATA, Names, boxes, defaults_of_torch, moments_of, plain
from infinity.checkpoints.files import failed
from infinity.config import checked_path
from infinity.engine.access.training_state import ChunkInfo, TrainingState, training_state_of
from infinity.errors import CheckpointError
from infinity.plan.packing import Piece


def save_dcp(
    path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
) -> None:
    """Write a checkpoint for torch.distributed.checkpoint (DCP), which an FSDP2 or plain PyTorch model and its optimizer can load.

    See [Note: entries of a DCP checkpoint]. The other program calls m, o = get_state_dict(model, optimizer), then `dcp.load` into
    {"model": m, "optim": o}, then set_state_dict with m and o. Without an optimizer, only model.* is written. Several optimizers of the
    model are a list of all; their parameter groups follow each other in the order of creation. The
    checkpoint lacks the fp16 loss scale, the random number generators and schedulers; `infinity.save` has them. A tiled layer gets the
    largest step count of its tiles. Call save_dcp between step() and the next forward pass, on all ranks. All ranks must see the same
    directory, which is created with mode 0700. Training waits. Host memory: one record, and one part of a record in fp32.

    Raises CheckpointError for a state that the format lacks, and for a directory that holds a DCP checkpoint: DCP cannot replace one
    atomically. Raises SwapError (an OSError) if the disk fails.
    """
    state = training_state_of(model)
    state.ready_to_save(optimizer)
    checked_path(path)
    state.flush()

    state.ranks.together(lambda: _make_directory(Path(path)) if state.ranks.is_first else None)

    def plan() -> _Planner:
        if not Path(path).is_dir():
            raise CheckpointError(f"{path} does not exist for {state.ranks.name}: all ranks must see the same directory")
        return _Planner(state, with_states=optimizer is not None)

    planner = state.ranks.together(plan)
    alone = not state.ranks.are_several
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)  # in this thread, one tensor at a time
    try:
        with planner, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({}, storage_writer=writer, planner=planner, process_group=state.ranks.control, no_dist=alone)
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, OSError):
            raise failed(f"rank {rank} could not write the checkpoint", path, cause) from error
        raise CheckpointError(f"{path} was not written: rank {rank}: {type(cause).__name__}: {cause}") from error


def _make_directory(path: Path) -> None:
    try:
        if (path / METADATA).exists():
            raise CheckpointError(f"{path} holds a checkpoint already, and DCP cannot replace one atomically; save elsewhere or remove it")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise failed("the checkpoint's directory cannot be made", path, error) from error


@dataclass(frozen=True)
class _Source:
    """The source of a box: the elements of a chunk's shard from `start` on. kind: a moment, or None for the master."""

    chunk: ChunkInfo
    kind: str | None
    start: int
    sizes: tuple[int, ...]


class _Planner(dcp.DefaultSavePlanner):
    """Offers the boxes of this rank's records to DCP, and reads a box when DCP asks. A context manager, because it holds one record."""

    def __init__(self, state: TrainingState, *, with_states: bool):
        super().__init__()
        self.state = state
        self.names = Names(state)
        self.with_states = with_states
        self._shapes = [tuple(info.shape) for info in state.parameters]
        self._sources: dict[MetadataIndex, _Source] = {}
        self._objects: dict[str, object] = {}
        self._record = contextlib.ExitStack()
        self._chunk: ChunkInfo | None = None
        self._shard: dict[str, torch.Tensor] = {}
        self._written: torch.Tensor | None = None

    def __enter__(self) -> _Planner:
        return self

    def __exit__(self, *error) -> None:
        self._close_record()

    def create_local_plan(self) -> dcp.SavePlan:
        items, paths = [], {}
        for chunk in self.state.chunks:
            for piece in chunk.pieces:
                items += self._items_of(chunk, piece, paths)
        if self.is_coordinator:
            self._add_loose(items, paths)
            if self.with_states:
                self._add_optimizer(items, paths)
        return dcp.SavePlan(items, planner_data=paths)

    def resolve_data(self, write_item: dcp.WriteItem) -> torch.Tensor | io.BytesIO:
        fqn, source = write_item.index.fqn, self._sources.get(write_item.index)
        if source is None:
            value = self._objects[fqn]
            if isinstance(value, torch.Tensor):
                return value.detach().cpu()
            data = io.BytesIO()
            torch.save(value, data)
            return data
        if source.chunk is not self._chunk:
            self._open_record(source.chunk)
        if self._written is not None:
            self._written.untyped_storage().resize_(0)  # see [Note: one record at a time]
        self._written = torch.empty(source.sizes, dtype=torch.float32, device="cpu")
        begin = source.start - source.start % self._shard.format.block
        part = self._shard.part(begin, source.start + self._written.numel())
        value = part.moment(source.kind) if source.kind is not None else part.masters()
        return self._written.copy_(value[source.start - begin :].view(source.sizes))

    def _open_record(self, chunk: ChunkInfo) -> None:
        self._close_record()
        weight_only = not self.with_states and not chunk.record.format.has_master
        self._shard = self._record.enter_context(self.state.shard(chunk.index, weight_only=weight_only))
        self._chunk = chunk

    def _close_record(self) -> None:
        self._shard, self._chunk = {}, None
        self._record.close()

    def _items_of(self, chunk: ChunkInfo, piece: Piece, paths: dict) -> Iterator[dcp.WriteItem]:
        part = self.names.parts[piece.param]
        whole = part.whole
        wanted: list[tuple[tuple, str | None]] = [(("model", name), None) for name in whole.names]
        if self.with_states and whole.is_updated:
            wanted += [(("optim", "state", whole.names[0], there), moment) for moment, there in moments_of(self.state, whole).items()]
        for path, kind in wanted:
            start, fqn = piece.start, _joined(path)
            paths[fqn] = path
            for offsets, sizes in boxes(self._shapes[piece.param], piece.param_start, piece.param_start + piece.numel):
                begin = [a + b for a, b in zip(part.begin, offsets)]
                item = _item(fqn, WriteItemType.SHARD, whole.shape, begin, sizes, torch.float32)
                self._sources[item.index] = _Source(chunk, kind, start, sizes)
                start += math.prod(sizes)
                yield item

    def _add_loose(self, items: list, paths: dict) -> None:
        for name, value in self.names.loose.items():
            self._add(items, paths, ("model", name), value)

    def _add_optimizer(self, items: list, paths: dict) -> None:
        optimizers = self.state.optimizers
        for whole in self.names.wholes:
            if whole.is_updated and moments_of(self.state, whole):
                step = float(max(self.state.num_updates(info.index) for info in whole.parts))
                self._add(items, paths, ("optim", "state", whole.names[0], "step"), torch.tensor(step, dtype=torch.float32, device="cpu"))
        for index, group in enumerate(optimizers.param_groups):
            values = defaults_of_torch(optimizers.rule_of(group)) | {name: plain(value) for name, value in group.items() if name != "params"}
            for name, value in (values | {"params": self.names.of_group(group["params"])}).items():
                self._add(items, paths, ("optim", "param_groups", index, name), value)

    def _add(self, items: list, paths: dict, path: tuple, value: object) -> None:
        fqn = _joined(path)
        paths[fqn], self._objects[fqn] = path, value
        if isinstance(value, torch.Tensor):
            items.append(_item(fqn, WriteItemType.TENSOR, value.shape, [0] * value.dim(), value.shape, value.dtype))
        else:
            items.append(dcp.WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))


def _item(fqn: str, kind: WriteItemType, shape, offsets, sizes, dtype: torch.dtype) -> dcp.WriteItem:
    chunk = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    # Made by the installed version of torch, because the fields differ: 2.15 added strides.
    properties = TensorProperties.create_from_tensor(torch.empty(shape, dtype=dtype, device="meta"))
    data = TensorWriteData(chunk, properties, torch.Size(shape))
    return dcp.WriteItem(MetadataIndex(fqn, torch.Size(offsets)), kind, tensor_data=data)


def _joined(path: tuple) -> str:
    return ".".join(map(str, path))
