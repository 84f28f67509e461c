"""To and from torch.distributed.checkpoint: `infinity.save_dcp` and `infinity.load_dcp`, so that a run can move to FSDP2 and back.

Knows what such a checkpoint calls each state, and which boxes of a parameter lie in a record. Must not know how DCP lays out
files. Longer than others because both ways share the names, and checking what comes in takes as much as reading it.

# [Note: what is written]
# What `dcp.save({"model": model_state, "optim": optimizer_state})` with `get_state_dict(model, optimizer)` of an FSDP2 run writes:
#   model.<name>                    fp32 (the masters of a bf16 or fp16 engine), under each name of a tied one; buffers as they are
#   optim.state.<name>.<moment>     fp32; torch.optim's names: exp_avg and exp_avg_sq of AdamW and Adam, momentum_buffer of SGD. Of
#   optim.state.<name>.step         Lion exp_avg, of other rules their own. Under the first name, also where no update has been
#   optim.param_groups.<index>.*    hyper-parameters, those that only torch.optim has with its defaults; `params`: names
# A tiled layer appears as the plain one.
#
# [Note: one record at a time]
# A record holds flat intervals of parameters, and DCP knows boxes: an interval is cut into at most 2 * dimensions - 1 of them. Each
# rank offers the boxes of its own shards, record by record, and DCP asks for the values of one when it writes it: so a record is read
# once and let go. DCP's writer keeps the last tensor of each name until its file is whole; what it has written is therefore emptied
# when it asks for the next one. Into the engine, records are filled one after another, and of each tensor that is being read one of
# the pieces in which it was saved stays in memory.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItemType

from infinity.checkpoints.files import failed
from infinity.config import checked_path
from infinity.engine.engine import Engine, engine_of
from infinity.errors import CheckpointError, ConfigError
from infinity.model import tiling
from infinity.optim.adam import masters
from infinity.optim.rules import AdamRule, LionRule, Rule, SGDRule
from infinity.plan.packing import Piece
from infinity.sizes import listed
from infinity.tiers.state import ChunkState, ParameterState

_METADATA = ".metadata"
_OTHER_ARITHMETIC = ("amsgrad", "maximize", "decoupled_weight_decay")  # of torch.optim: what no rule here computes

Box = tuple[tuple[int, ...], tuple[int, ...]]  # first index and size in each dimension


def save_dcp(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write a torch.distributed.checkpoint that an FSDP2 or plain PyTorch model and its optimizer load; see [Note: what is written].

    There, `dcp.load` it into {"model": m, "optim": o} with m, o = get_state_dict(model, optimizer), and set_state_dict these. Without
    an optimizer only model.* is written. Call it between step() and the next forward pass, on all ranks, which must see the same
    directory, which is made for its owner alone (0700); training waits. Host memory: one record and one part of it in fp32. Not in it, and in `infinity.save`: the fp16
    loss scale, generators, schedulers. A tiled layer's step count is the largest of its tiles.

    Raises CheckpointError for a directory that holds such a checkpoint already, which DCP cannot replace as a whole, and for what the
    format has no place for; SwapError (an OSError) where the disk fails.
    """
    engine = engine_of(model)
    engine.ready_to_save(optimizer)
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


def load_dcp(
    path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, trust_pickle: bool = False
) -> None:
    """Bring a model and its optimizer to the state of a torch.distributed.checkpoint, of any world size, FSDP2 or not.

    Reads what [Note: what is written] says, in any floating dtype, of one of the names of a tied parameter; other entries than
    model.* and optim.* are left alone. Without an optimizer, moments begin anew; so do those of a parameter that has none there.
    trust_pickle: must be True. DCP's own metadata are a pickle, which may run any code that whoever wrote it put there; nothing else
    that this package reads is one. Call it on all ranks, which must see the same directory. Host memory: a record, and of each state of one parameter a piece as it was saved (FSDP2: one rank's shard), of one twice.

    Raises ConfigError without trust_pickle; CheckpointError naming all that is missing, unexpected or of another shape, and files that are missing or cut, before
    anything changes; for what turns out to be damaged later, too, and then the model must be loaded again.
    """
    checked_path(path)
    if trust_pickle is not True:
        raise ConfigError(
            f"{path}: torch.distributed.checkpoint keeps its metadata in a pickle, and reading one may run any code that its writer put there. "
            f"If you trust who wrote it, say so: load_dcp(..., trust_pickle=True). infinity.load and load_safetensors run no code."
        )
    engine = engine_of(model)
    engine.ready_to_load(optimizer)
    loading = engine.ranks.together(lambda: _Loading(engine, _Saved(Path(path)), with_states=optimizer is not None))
    if len(set(engine.ranks.exchange(loading.saved.identity.encode()))) > 1:
        raise CheckpointError(f"{path}: the ranks read different checkpoints; all must see the same directory")
    with engine.loading():
        engine.ranks.together(loading.run)


def _make_directory(path: Path) -> None:
    try:
        if (path / _METADATA).exists():
            raise CheckpointError(f"{path} holds a checkpoint already, which DCP replaces file by file; save elsewhere or remove it")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise failed("the checkpoint's directory cannot be made", path, error) from error


# Names.


@dataclass
class _Whole:
    """A parameter as the plain model has it, in one part or in tiles. names: as in its state_dict, the first one first."""

    shape: tuple[int, ...]
    names: list[str] = field(default_factory=list)
    parts: list[ParameterState] = field(default_factory=list)

    @property
    def is_updated(self) -> bool:
        """Whether an optimizer has moments of it."""
        return self.parts[0].trainable and self.parts[0].group is not None


@dataclass(frozen=True)
class _Part:
    """Which part of a whole one the engine's parameter is."""

    whole: _Whole
    begin: tuple[int, ...]


class _Names:
    """The names of everything in an engine's model: `wholes`, `parts` by the engine's index, and `loose`, what is in no record."""

    def __init__(self, engine: Engine):
        model, places = engine.model, tiling.places(engine.model)
        states = {id(state.param): state for state in engine.registry.params}
        self.parts: dict[int, _Part] = {}
        self.loose: dict[str, torch.Tensor] = {}
        by_name: dict[str, _Whole] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise CheckpointError(f"{prefix or type(module).__name__} has extra state, which is not carried to or from DCP")
            dot = f"{prefix}." if prefix else ""
            for name, param in dict.items(module._parameters):
                state, place = states.get(id(param)), places.get(param) if param is not None else None
                if state is None:
                    if param is not None:
                        self.loose[dot + name] = param
                    continue
                first, shape = (place.name, place.shape) if place is not None else (state.name, tuple(state.shape))
                whole = by_name.setdefault(first, _Whole(shape, [first]))
                key = dot.rpartition("tiles.")[0] + name if place is not None else dot + name
                if key not in whole.names:
                    whole.names.append(key)
                if state.index not in self.parts:
                    whole.parts.append(state)
                    self.parts[state.index] = _Part(whole, place.begin if place is not None else (0,) * len(shape))
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    self.loose[dot + name] = buffer
        self.wholes = list(by_name.values())
        self._first = {id(state.param): whole.names[0] for whole in self.wholes for state in whole.parts}
        for whole in self.wholes:
            if len({(state.trainable, state.group) for state in whole.parts}) > 1:
                raise CheckpointError(f"tiles of {whole.names[0]} differ in their parameter group or in whether they are frozen")

    def of_group(self, params: Iterable[nn.Parameter]) -> list[str]:
        """The names of a parameter group's parameters, each once."""
        loose = {id(value): name for name, value in reversed(self.loose.items())}
        names = (self._first.get(id(param)) or loose.get(id(param)) for param in params)
        return [name for name in dict.fromkeys(names) if name is not None]


def _moment_names(rule: Rule) -> dict[str, str]:
    """What torch.optim calls each moment of a rule; its own name where it has no such rule."""
    known = {}
    if isinstance(rule, AdamRule):
        known = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
    elif isinstance(rule, (SGDRule, LionRule)):
        known = {"momentum": "momentum_buffer" if isinstance(rule, SGDRule) else "exp_avg"}
    return {moment: known.get(moment, moment) for moment in rule.moments}


def _defaults_of_torch(rule: Rule) -> dict:
    """The hyper-parameters that a group of torch's own optimizer has, in the version that is installed."""
    if isinstance(rule, AdamRule):
        kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
    elif isinstance(rule, SGDRule):
        kind = torch.optim.SGD
    else:
        return {}
    return {name: value for name, value in kind([nn.Parameter(torch.zeros(1))]).param_groups[0].items() if name != "params"}


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The boxes that elements [begin, end) of a tensor make up, in their order."""
    if begin == end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while begin < end:
        first, within = divmod(begin, row)
        if within or end - begin < row:
            stop = min(row, within + end - begin)
            for offsets, sizes in _boxes(shape[1:], within, stop):
                yield (first, *offsets), (1, *sizes)
            begin += stop - within
        else:
            num_rows = (end - begin) // row
            yield (first, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
            begin += num_rows * row


# Out.


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
        self.names = _Names(engine)
        self.moments = _moment_names(engine.optimizer.rule) if with_states else None
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
        self._written = torch.empty(source.sizes)
        part = {name: tensor[source.start : source.start + self._written.numel()] for name, tensor in self._shard.items()}
        value = part[source.kind] if source.kind is not None else masters(part)
        return self._written.copy_(value.view(source.sizes))

    def _open_record(self, chunk: ChunkState) -> None:
        self._close_record()
        weight_only = self.moments is None and not {s.name for s in chunk.record.segments} & {"residual", "master"}
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
            for offsets, sizes in _boxes(tuple(state.shape), piece.param_start, piece.param_start + piece.numel):
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
                self._add(items, paths, ("optim", "state", whole.names[0], "step"), torch.tensor(float(max(steps))))
        defaults = _defaults_of_torch(engine.optimizer.rule)
        for index, group in enumerate(engine.optimizer.param_groups):
            values = defaults | {name: _plain(value) for name, value in group.items() if name != "params"}
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


def _plain(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) else value


# In.


class _Saved:
    """A checkpoint open for reading. Raises CheckpointError for one that is missing, cut or damaged, SwapError for a failing disk."""

    def __init__(self, path: Path):
        self.path = path
        self._reader = dcp.FileSystemReader(path)
        self._cached: dict[str | None, tuple[MetadataIndex, torch.Tensor]] = {}
        try:
            metadata = self._reader.read_metadata()
            self.entries = dict(metadata.state_dict_metadata)
            self.identity = str(metadata.storage_meta.save_id)
            self._reader.set_up_storage_reader(metadata, False)
            ends: dict[str, int] = {}
            for info in metadata.storage_data.values():
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: there is no checkpoint of torch.distributed.checkpoint ({_METADATA} is missing)") from None
        except OSError as error:
            raise failed("the checkpoint's metadata cannot be read", path / _METADATA, error) from error
        except Exception as error:  # unpickling raises anything
            raise CheckpointError(f"{path / _METADATA} is damaged: {type(error).__name__}: {error}") from error
        wrong = [f"{name} ({found})" for name, end in sorted(ends.items()) if (found := self._look(path / name, end))]
        if wrong:
            raise CheckpointError(f"{path}: missing or cut: {listed(wrong)}; use another checkpoint")

    @staticmethod
    def _look(path: Path, end: int) -> str:
        """What is wrong with a file of which bytes up to `end` are needed."""
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            return error.strerror
        return f"has {nbytes:,} bytes, {end:,} are needed" if nbytes < end else ""

    def tensor(self, name: str) -> dcp.TensorStorageMetadata | None:
        found = self.entries.get(name)
        return found if isinstance(found, dcp.TensorStorageMetadata) else None

    def small(self, names: Iterable[str]) -> dict[str, object]:
        """Whole small tensors and objects, by name."""
        targets, items = {}, []
        for name in names:
            if (saved := self.tensor(name)) is None:
                nothing = torch.Size((0,))
                items.append(dcp.ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), nothing, MetadataIndex(name), nothing, nothing))
                continue
            (chunk,) = saved.chunks
            index = MetadataIndex(name, chunk.offsets)
            targets[index] = torch.empty(saved.size, dtype=saved.properties.dtype)
            items.append(_read_item(index, chunk))
        found = self._read(items, targets).objects
        return found | {index.fqn: target for index, target in targets.items()}

    def piece(self, kind: str | None, name: str, chunk: dcp.ChunkStorageMetadata, dtype: torch.dtype) -> torch.Tensor:
        """One of the pieces in which a tensor was saved; the last one of each kind of tensor stays in memory."""
        index = MetadataIndex(name, chunk.offsets)
        if kind not in self._cached or self._cached[kind][0] != index:
            self._cached.pop(kind, None)  # first: there is room for one
            target = torch.empty(chunk.sizes, dtype=dtype)
            self._read([_read_item(index, chunk)], {index: target})
            self._cached[kind] = index, target
        return self._cached[kind][1]

    def _read(self, items: list[dcp.ReadItem], targets: dict[MetadataIndex, torch.Tensor]) -> _Into:
        into = _Into(targets)
        try:
            self._reader.read_data(dcp.LoadPlan(items), into).wait()
        except OSError as error:
            raise failed("the checkpoint cannot be read", self.path, error) from error
        except Exception as error:
            what = items[0].storage_index.fqn + (f" or one of {len(items) - 1} more" if len(items) > 1 else "")
            raise CheckpointError(f"{self.path}: {what} is damaged: {type(error).__name__}: {error}") from error
        return into


class _Into(dcp.DefaultLoadPlanner):
    """Tells DCP's reader where tensors go, and keeps objects; these are numbers, strings and containers of them, or refused."""

    def __init__(self, targets: dict[MetadataIndex, torch.Tensor]):
        super().__init__()
        self.targets = targets
        self.objects: dict[str, object] = {}

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        return self.targets[read_item.dest_index]


def _read_item(index: MetadataIndex, chunk: dcp.ChunkStorageMetadata) -> dcp.ReadItem:
    zeros = torch.Size([0] * len(chunk.sizes))
    return dcp.ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, chunk.sizes)


class _Tensor:
    """A tensor of the checkpoint, read box by box. kind: of `_Saved.piece`."""

    def __init__(self, saved: _Saved, kind: str | None, name: str):
        self.saved, self.kind, self.name = saved, kind, name
        self.chunks = sorted(saved.tensor(name).chunks, key=lambda chunk: tuple(chunk.offsets))
        self._begins = [chunk.offsets[0] if chunk.offsets else 0 for chunk in self.chunks]
        ends = (begin + (chunk.sizes[0] if chunk.sizes else 1) for begin, chunk in zip(self._begins, self.chunks))
        self._ends = list(accumulate(ends, max))

    def read(self, begin: tuple[int, ...], sizes: tuple[int, ...], into: torch.Tensor) -> None:
        """Copy a box into a tensor of its sizes."""
        end = [a + b for a, b in zip(begin, sizes)]
        first = bisect_right(self._ends, begin[0]) if begin else 0
        last = bisect_left(self._begins, end[0]) if begin else 1
        for chunk in self.chunks[first:last]:
            low = [max(a, b) for a, b in zip(begin, chunk.offsets)]
            high = [min(a, b + c) for a, b, c in zip(end, chunk.offsets, chunk.sizes)]
            if all(a < b for a, b in zip(low, high)):
                here = tuple(slice(a - b, c - b) for a, b, c in zip(low, begin, high))
                there = tuple(slice(a - b, c - b) for a, b, c in zip(low, chunk.offsets, high))
                into[here].copy_(self.saved.piece(self.kind, self.name, chunk, into.dtype)[there])


class _Loading:
    """Filling an engine's records. Raises CheckpointError, before anything changes, if the checkpoint does not fit."""

    def __init__(self, engine: Engine, saved: _Saved, *, with_states: bool):
        self.engine, self.saved = engine, saved
        self.names = _Names(engine)
        self.moments = _moment_names(engine.optimizer.rule) if with_states else {}
        self._wrong: list[str] = []
        self._known: set[str] = set()
        self._tensors: dict[tuple[str, str | None], _Tensor] = {}  # by first name and moment; None: the weight
        self._steps: dict[str, int] = {}
        self._groups: list[dict] = []
        self._match_model()
        if with_states:
            self._match_optimizer()
        kinds = ("model.", "optim.") if with_states else ("model.",)
        if unexpected := [name for name in saved.entries if name.startswith(kinds) and name not in self._known]:
            self._wrong.append(f"unexpected: {listed(sorted(unexpected))}")
        if self._wrong:
            raise CheckpointError(f"{saved.path} does not fit the model: {'; '.join(self._wrong)}")

    def run(self) -> None:
        engine = self.engine
        for chunk in engine.registry.chunks:
            with engine.values.filled(chunk) as shard:
                for piece in chunk.pieces:
                    self._fill(shard, piece)
        engine.records.flush()
        for index, part in self.names.parts.items():
            for chunk in engine.registry.chunks_of(engine.registry.params[index]):
                chunk.steps[index] = self._steps.get(part.whole.names[0], 0)
        with torch.no_grad():
            for name, value in self.names.loose.items():
                found = torch.empty(value.shape, dtype=value.dtype)
                _Tensor(self.saved, "loose", f"model.{name}").read((0,) * value.dim(), tuple(value.shape), found)
                value.copy_(found)
        for group, found in zip(engine.optimizer.param_groups if self._groups else (), self._groups):
            group.update(found)

    def _fill(self, shard: dict[str, torch.Tensor], piece: Piece) -> None:
        """The part of one parameter in a shard, whose segments are zero."""
        part, state = self.names.parts[piece.param], self.engine.registry.params[piece.param]
        where, values = slice(piece.start, piece.start + piece.numel), torch.empty(piece.numel)
        for kind in (None, *self.moments):
            tensor = self._tensors.get((part.whole.names[0], kind))
            if tensor is None:
                continue
            at = 0
            for offsets, sizes in _boxes(tuple(state.shape), piece.param_start, piece.param_start + piece.numel):
                numel = math.prod(sizes)
                begin = tuple(a + b for a, b in zip(part.begin, offsets))
                tensor.read(begin, sizes, values[at : at + numel].view(sizes))
                at += numel
            if kind is None:
                self.engine.values.put(shard, where, values)
            else:
                shard[kind][where].copy_(values)

    # Does it fit?

    def _match_model(self) -> None:
        missing = []
        for whole in self.names.wholes:
            names = [f"model.{name}" for name in whole.names]
            self._known.update(names)
            found = next((name for name in names if name in self.saved.entries), None)
            if found is None:
                missing.append(names[0])
            elif self._fits(found, whole.shape):
                self._tensors[whole.names[0], None] = _Tensor(self.saved, None, found)
        for name, value in self.names.loose.items():
            self._known.add(f"model.{name}")
            if f"model.{name}" not in self.saved.entries:
                missing.append(f"model.{name}")
            else:
                self._fits(f"model.{name}", tuple(value.shape), floating=False)
        if missing:
            self._wrong.append(f"missing: {listed(missing)}")

    def _fits(self, name: str, shape: tuple[int, ...], *, floating: bool = True) -> bool:
        saved = self.saved.tensor(name)
        if saved is None or (floating and not saved.properties.dtype.is_floating_point):
            self._wrong.append(f"{name} is no tensor{' of floating-point numbers' if floating else ''} there")
        elif tuple(saved.size) != shape:
            self._wrong.append(f"{name} has shape {list(saved.size)} there and {list(shape)} here")
        elif (numel := sum(math.prod(chunk.sizes) for chunk in saved.chunks)) != math.prod(shape):
            self._wrong.append(f"{name} has {numel:,} of its {math.prod(shape):,} elements there: a rank's part is missing")
        else:
            return True
        return False

    def _match_optimizer(self) -> None:
        entries = self.saved.entries
        if not any(name.startswith("optim.") for name in entries):
            self._wrong.append("it was saved without an optimizer; load without one to begin anew")
            return
        steps: dict[str, str] = {}
        for whole in self.names.wholes:
            prefix = next((p for name in whole.names if any((p := f"optim.state.{name}.") + n in entries for n in self._state_names)), None)
            if prefix is None:
                continue
            if not whole.is_updated:
                self._wrong.append(f"{whole.names[0]} is trained there and not here")
                self._known.update(prefix + name for name in self._state_names)
                continue
            needed = [*self.moments.values(), *(["step"] if isinstance(self.engine.optimizer.rule, AdamRule) else [])]
            if missing := [prefix + name for name in needed if prefix + name not in entries]:
                self._wrong.append(f"missing: {listed(missing)}")
            self._known.update(prefix + name for name in self._state_names)
            for moment, name in self.moments.items():
                if prefix + name in entries and self._fits(prefix + name, whole.shape):
                    self._tensors[whole.names[0], moment] = _Tensor(self.saved, moment, prefix + name)
            if prefix + "step" not in entries:
                self._steps[whole.names[0]] = 1  # only the first one may count as such
            elif self._fits(prefix + "step", ()):
                steps[prefix + "step"] = whole.names[0]
        for name, step in self.saved.small(steps).items():
            if not 0 <= step.item() < math.inf:
                self._wrong.append(f"{name} is {step.item()}")
            else:
                self._steps[steps[name]] = int(step.item())
        self._match_groups()

    @property
    def _state_names(self) -> tuple[str, ...]:
        return (*self.moments.values(), "step")

    def _match_groups(self) -> None:
        """Parameters must be in the same groups; the hyper-parameters there become those here."""
        optimizer = self.engine.optimizer
        paths = {name: name.split(".", 3) for name in self.saved.entries if name.startswith("optim.param_groups.")}
        paths = {name: path for name, path in paths.items() if len(path) == 4 and path[2].isdigit() and "." not in path[3]}
        self._known.update(paths)
        there: list[dict] = [{} for _ in range(1 + max((int(path[2]) for path in paths.values()), default=-1))]
        for name, value in self.saved.small(paths).items():
            there[int(paths[name][2])][paths[name][3]] = _plain(value)
        if len(there) != len(optimizer.param_groups):
            self._wrong.append(f"{len(there)} parameter groups there, {len(optimizer.param_groups)} here")
            return
        group_of = {name: index for index, group in enumerate(there) for name in group.get("params", ())}
        for whole in self.names.wholes:
            found = next((group_of[name] for name in whole.names if name in group_of), None)
            if whole.is_updated and found != whole.parts[0].group:
                where = f"parameter group {found}" if found is not None else "no parameter group"
                self._wrong.append(f"{whole.names[0]} is in {where} there, in {whole.parts[0].group} here")
        defaults = _defaults_of_torch(optimizer.rule)
        for index, (group, found) in enumerate(zip(optimizer.param_groups, there)):
            for name in _OTHER_ARITHMETIC:
                if name in defaults and found.get(name, defaults[name]) != defaults[name]:
                    self._wrong.append(f"parameter group {index} has {name}={found[name]!r} there, {type(optimizer).__name__} has not")
            only_torch = defaults.keys() - optimizer.defaults.keys()
            found = {name: value for name, value in found.items() if name != "params" and name not in only_torch}
            found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
            try:
                wrong = optimizer.rule.check({name: found.get(name, group[name]) for name in optimizer.defaults})
            except (TypeError, ValueError) as error:
                wrong = [str(error)]
            self._wrong += [f"parameter group {index}: {text}" for text in wrong]
            self._groups.append(found)
