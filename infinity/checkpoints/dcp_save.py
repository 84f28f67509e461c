"""To torch.distributed.checkpoint: `infinity.save_dcp`. What is written is a note in dcp_names.py.

Knows which boxes of a parameter lie in a record, and when DCP asks for their values. Must not know how DCP lays out files.

# [Note: one record at a time]
# A record holds flat intervals of parameters, and DCP knows boxes: an interval is cut into at most 2 * dimensions - 1 of them. Each
# rank offers the boxes of its own shards, record by record, and DCP asks for the values of one when it writes it: so a record is read
# once and let go. DCP's writer keeps the last tensor of each name until its file is whole; what it has written is therefore emptied
# when it asks for the next one.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType

from infinity.checkpoints.dcp_names import METADATA, Names, boxes, defaults_of_torch, moment_names, plain
from infinity.checkpoints.files import failed
from infinity.config import checked_path
from infinity.engine.access import save_window as pause
from infinity.engine.engine import Engine
from infinity.engine.engines import engine_of
from infinity.errors import CheckpointError
from infinity.plan.packing import Piece
from infinity.tiers.chunk_state import ChunkState


def save_dcp(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write a torch.distributed.checkpoint that an FSDP2 or plain PyTorch model and its optimizer load; see [Note: what is written].

    There, `dcp.load` it into {"model": m, "optim": o} with m, o = get_state_dict(model, optimizer), and set_state_dict these. Without
    an optimizer only model.* is written. Call it between step() and the next forward pass, on all ranks, which must see the same
    directory, which is made for its owner alone (0700); training waits. Host memory: one record and one part of it in fp32. Not in it,
    and in `infinity.save`: the fp16 loss scale, generators, schedulers. A tiled layer's step count is the largest of its tiles.

    Raises CheckpointError for a directory that holds such a checkpoint already, which DCP cannot replace as a whole, and for what the
    format has no place for; SwapError (an OSError) where the disk fails.
    """
    engine = engine_of(model)
    pause.ready_to_save(engine, optimizer)
    checked_path(path)
    engine.flush()

    engine.ranks.together(lambda: None if engine.ranks.rank else _make_directory(Path(path)))

    def plan() -> _Planner:
        if not Path(path).is_dir():
            raise CheckpointError(f"{path} is not there for {engine.ranks.name}: all ranks must see the same directory")
        return _Planner(engine, with_states=optimizer is not None)

    planner = engine.ranks.together(plan)
    alone = engine.ranks.world == 1
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)  # in this thread, one tensor at a time
    try:
        with planner, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({}, storage_writer=writer, planner=planner, process_group=engine.ranks.control, no_dist=alone)
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, OSError):
            raise failed(f"rank {rank} could not write the checkpoint", path, cause) from error
        raise CheckpointError(f"{path} was not written: rank {rank}: {type(cause).__name__}: {cause}") from error


def _make_directory(path: Path) -> None:
    try:
        if (path / METADATA).exists():
            raise CheckpointError(f"{path} holds a checkpoint already, which DCP replaces file by file; save elsewhere or remove it")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise failed("the checkpoint's directory cannot be made", path, error) from error


@dataclass(frozen=True)
class _Source:
    """Where the values of a box lie: `start` in a chunk's shard. kind: a moment, or None for the master."""

    chunk: ChunkState
    kind: str | None
    start: int
    sizes: tuple[int, ...]


class _Planner(dcp.DefaultSavePlanner):
    """Offers the boxes of this rank's records, and reads them as they are asked for. A context manager: it holds one record."""

    def __init__(self, engine: Engine, *, with_states: bool):
        super().__init__()
        self.engine = engine
        self.names = Names(engine)
        self.moments = moment_names(engine.optimizer.rule) if with_states else None
        self._sources: dict[MetadataIndex, _Source] = {}
        self._objects: dict[str, object] = {}
        self._record = contextlib.ExitStack()
        self._chunk: ChunkState | None = None
        self._shard: dict[str, torch.Tensor] = {}
        self._written: torch.Tensor | None = None

    def __enter__(self) -> _Planner:
        return self

    def __exit__(self, *error) -> None:
        self._close_record()

    def create_local_plan(self) -> dcp.SavePlan:
        items, paths = [], {}
        for chunk in self.engine.registry.chunks:
            for piece in chunk.pieces:
                items += self._items_of(chunk, piece, paths)
        if self.is_coordinator:
            self._add_loose(items, paths)
            if self.moments is not None:
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
        part = self._shard.part(source.start, source.start + self._written.numel())
        value = part[source.kind] if source.kind is not None else part.masters()
        return self._written.copy_(value.view(source.sizes))

    def _open_record(self, chunk: ChunkState) -> None:
        self._close_record()
        weight_only = self.moments is None and not chunk.record.format.has_master
        self._shard = self._record.enter_context(self.engine.values.shard(chunk, weight_only=weight_only))
        self._chunk = chunk

    def _close_record(self) -> None:
        self._shard, self._chunk = {}, None
        self._record.close()

    def _items_of(self, chunk: ChunkState, piece: Piece, paths: dict) -> Iterator[dcp.WriteItem]:
        state, part = self.engine.registry.params[piece.param], self.names.parts[piece.param]
        whole = part.whole
        wanted: list[tuple[tuple, str | None]] = [(("model", name), None) for name in whole.names]
        if self.moments is not None and whole.is_updated:
            wanted += [(("optim", "state", whole.names[0], there), moment) for moment, there in self.moments.items()]
        for path, kind in wanted:
            start, fqn = piece.start, _joined(path)
            paths[fqn] = path
            for offsets, sizes in boxes(tuple(state.shape), piece.param_start, piece.param_start + piece.numel):
                begin = [a + b for a, b in zip(part.begin, offsets)]
                item = _item(fqn, WriteItemType.SHARD, whole.shape, begin, sizes, torch.float32)
                self._sources[item.index] = _Source(chunk, kind, start, sizes)
                start += math.prod(sizes)
                yield item

    def _add_loose(self, items: list, paths: dict) -> None:
        for name, value in self.names.loose.items():
            self._add(items, paths, ("model", name), value)

    def _add_optimizer(self, items: list, paths: dict) -> None:
        engine = self.engine
        for whole in self.names.wholes:
            if whole.is_updated and self.moments:
                steps = (chunk.steps[state.index] for state in whole.parts for chunk in engine.registry.chunks_of(state))
                self._add(items, paths, ("optim", "state", whole.names[0], "step"), torch.tensor(float(max(steps)), dtype=torch.float32, device="cpu"))
        defaults = defaults_of_torch(engine.optimizer.rule)
        for index, group in enumerate(engine.optimizer.param_groups):
            values = defaults | {name: plain(value) for name, value in group.items() if name != "params"}
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
    # What a plain tensor would have, in the version that is installed: 2.15 added strides.
    properties = TensorProperties.create_from_tensor(torch.empty(shape, dtype=dtype, device="meta"))
    data = TensorWriteData(chunk, properties, torch.Size(shape))
    return dcp.WriteItem(MetadataIndex(fqn, torch.Size(offsets)), kind, tensor_data=data)


def _joined(path: tuple) -> str:
    return ".".join(map(str, path))
