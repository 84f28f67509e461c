"""Loading from torch.distributed.checkpoint (DCP): `infinity.load_dcp`. [Note: entries of a DCP checkpoint] in dcp_names.py has the names.

Knows the boxes of a parameter in a record, and checks all names and shapes before any change. Must not know how DCP lays out files.
The loader fills one record after another. One saved piece of each tensor being read stays in memory.
"""

from __future__ import annotations

import io
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from infinity.checkpoints.dcp_names import METADATA, Names, boxes, defaults_of_torch, moment_names, plain
from infinity.checkpoints.files import failed
from infinity.config import checked_path
from infinity.engine.access.training_state import TrainingState, training_state_of
from infinity.errors import CheckpointError, ConfigError
from infinity.optim.rules import AdamRule
from infinity.plan.packing import Piece
from infinity.sizes import listed

_OTHER_ARITHMETIC = ("amsgrad", "maximize", "decoupled_weight_decay")  # options of torch.optim that no rule of infinity computes


def load_dcp(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    trust_pickle: bool = False,
) -> None:
    """Bring a model and its optimizer to the state of a DCP checkpoint, which FSDP2 or plain PyTorch wrote on any number of ranks.

    Reads the entries of [Note: entries of a DCP checkpoint], in any floating dtype. One name of a tied parameter is enough. The call ignores
    entries other than model.* and optim.*. Several optimizers of the model are a list of all. Moments start at zero without an
    optimizer, and for a parameter without moments in the checkpoint.
    trust_pickle must be True: DCP stores metadata as a pickle, and reading a pickle may run code from the pickle's writer. `infinity` reads
    no other pickle. Call load_dcp on all ranks, which must see the same directory. Host memory: one record, one saved piece (with FSDP2 one
    rank's shard) per state of a parameter, and a second copy of the piece being read.

    Raises ConfigError without trust_pickle. Raises CheckpointError before any change. The message lists entries that are missing, unexpected
    or of another shape, and files that are missing or truncated. For damage found after a change, the message says so; load again then.
    """
    checked_path(path)
    if trust_pickle is not True:
        raise ConfigError(
            f"{path}: torch.distributed.checkpoint stores metadata in a pickle, and reading one may run any code that the writer put "
            f"there. If you trust the writer, pass load_dcp(..., trust_pickle=True). infinity.load and load_safetensors run no code."
        )
    state = training_state_of(model)
    state.ready_to_load(optimizer)
    loading = state.ranks.together(lambda: _LoadDcp(state, _Saved(Path(path)), with_states=optimizer is not None))
    if len(set(state.ranks.exchange(loading.saved.identity.encode()))) > 1:
        raise CheckpointError(f"{path}: the ranks read different checkpoints; all must see the same directory")
    with state.loading():
        state.ranks.together(loading.run)


class _Saved:
    """An open DCP checkpoint. Raises CheckpointError for missing, truncated or damaged files, SwapError if the disk fails."""

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
            raise CheckpointError(f"{path}: there is no checkpoint of torch.distributed.checkpoint ({METADATA} is missing)") from None
        except OSError as error:
            raise failed("the checkpoint's metadata cannot be read", path / METADATA, error) from error
        except Exception as error:  # unpickling raises anything
            raise CheckpointError(f"{path / METADATA} is damaged: {type(error).__name__}: {error}") from error
        wrong = [f"{name} ({found})" for name, end in sorted(ends.items()) if (found := self._look(path / name, end))]
        if wrong:
            raise CheckpointError(f"{path}: missing or cut: {listed(wrong)}; use another checkpoint")

    @staticmethod
    def _look(path: Path, end: int) -> str:
        """Return the fault of a file of which the first `end` bytes are needed, or ""."""
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            return error.strerror
        return f"has {nbytes:,} bytes, {end:,} are needed" if nbytes < end else ""

    def tensor(self, name: str) -> dcp.TensorStorageMetadata | None:
        found = self.entries.get(name)
        return found if isinstance(found, dcp.TensorStorageMetadata) else None

    def small(self, names: Iterable[str]) -> dict[str, object]:
        """Read small tensors (in one piece each) and objects. Returns them by name."""
        targets, items = {}, []
        for name in names:
            if (saved := self.tensor(name)) is None:
                nothing = torch.Size((0,))
                items.append(dcp.ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), nothing, MetadataIndex(name), nothing, nothing))
                continue
            (chunk,) = saved.chunks
            index = MetadataIndex(name, chunk.offsets)
            targets[index] = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
            items.append(_read_item(index, chunk))
        found = self._read(items, targets).objects
        return found | {index.fqn: target for index, target in targets.items()}

    def piece(self, kind: str | None, name: str, chunk: dcp.ChunkStorageMetadata, dtype: torch.dtype) -> torch.Tensor:
        """Read one saved piece of a tensor. For each `kind`, the piece that was read last stays in memory."""
        index = MetadataIndex(name, chunk.offsets)
        if kind not in self._cached or self._cached[kind][0] != index:
            self._cached.pop(kind, None)  # freed before the allocation: memory has room for one piece
            target = torch.empty(chunk.sizes, dtype=dtype, device="cpu")
            self._read([_read_item(index, chunk)], {index: target})
            self._cached[kind] = index, target
        return self._cached[kind][1]

    def _read(self, items: list[dcp.ReadItem], targets: dict[MetadataIndex, torch.Tensor]) -> _Targets:
        into = _Targets(targets)
        try:
            self._reader.read_data(dcp.LoadPlan(items), into).wait()
        except OSError as error:
            raise failed("the checkpoint cannot be read", self.path, error) from error
        except Exception as error:
            what = items[0].storage_index.fqn + (f" or one of {len(items) - 1} more" if len(items) > 1 else "")
            raise CheckpointError(f"{self.path}: {what} is damaged: {type(error).__name__}: {error}") from error
        return into


class _Targets(dcp.DefaultLoadPlanner):
    """Gives DCP's reader the target tensors, and keeps objects. Refuses objects other than numbers, strings and their containers."""

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
    """A tensor of the checkpoint, to be read box by box. kind: as in `_Saved.piece`."""

    def __init__(self, saved: _Saved, kind: str | None, name: str):
        self.saved, self.kind, self.name = saved, kind, name
        self.chunks = sorted(saved.tensor(name).chunks, key=lambda chunk: tuple(chunk.offsets))
        self._begins = [chunk.offsets[0] if chunk.offsets else 0 for chunk in self.chunks]
        ends = (begin + (chunk.sizes[0] if chunk.sizes else 1) for begin, chunk in zip(self._begins, self.chunks))
        self._ends = list(accumulate(ends, max))

    def read(self, begin: tuple[int, ...], sizes: tuple[int, ...], into: torch.Tensor) -> None:
        """Copy a box into the tensor `into`, of shape `sizes`."""
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


class _LoadDcp:
    """Fills the records of an engine. Raises CheckpointError, before any change, if the checkpoint does not fit the model."""

    def __init__(self, state: TrainingState, saved: _Saved, *, with_states: bool):
        self.state, self.saved = state, saved
        self.names = Names(state)
        self._shapes = [tuple(info.shape) for info in state.parameters]
        self._wrong: list[str] = []
        self._known: set[str] = set()
        self._tensors: dict[tuple[str, str | None], _Tensor] = {}  # by (first name, moment); the moment of a weight is None
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
        state = self.state
        for chunk in state.chunks:
            with state.filled(chunk.index) as shard:
                for piece in chunk.pieces:
                    self._fill(shard, piece)
        state.finish_writes()
        for index, part in self.names.parts.items():
            state.set_num_updates(index, self._steps.get(part.whole.names[0], 0))
        with torch.no_grad():
            for name, value in self.names.loose.items():
                found = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                _Tensor(self.saved, "loose", f"model.{name}").read((0,) * value.dim(), tuple(value.shape), found)
                value.copy_(found)
        for group, found in zip(state.optimizers.param_groups if self._groups else (), self._groups):
            group.update(found)

    def _fill(self, shard: dict[str, torch.Tensor], piece: Piece) -> None:
        """Fill the elements of one piece in a shard. The segments of the shard are zero before."""
        part = self.names.parts[piece.param]
        where, values = slice(piece.start, piece.start + piece.numel), torch.empty(piece.numel, dtype=torch.float32, device="cpu")
        tensors = {kind: self._tensors.get((part.whole.names[0], kind)) for kind in (None, *shard)}  # no segment has the name None
        for kind, tensor in tensors.items():
            if tensor is None:
                continue
            at = 0
            for offsets, sizes in boxes(self._shapes[piece.param], piece.param_start, piece.param_start + piece.numel):
                numel = math.prod(sizes)
                begin = tuple(a + b for a, b in zip(part.begin, offsets))
                tensor.read(begin, sizes, values[at : at + numel].view(sizes))
                at += numel
            there = shard.part(where.start, where.stop)
            if kind is None:
                there.put(values)
            else:
                there.store_moment(kind, values)

    # Checks before any change.

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
            self._wrong.append(f"{name} is not a tensor{' of floating-point numbers' if floating else ''} in the checkpoint")
        elif tuple(saved.size) != shape:
            self._wrong.append(f"{name} has shape {list(saved.size)} in the checkpoint and {list(shape)} in the model")
        elif (numel := sum(math.prod(chunk.sizes) for chunk in saved.chunks)) != math.prod(shape):
            self._wrong.append(f"the checkpoint has {name} with {numel:,} of {math.prod(shape):,} elements: a rank's part is missing")
        else:
            return True
        return False

    def _match_optimizer(self) -> None:
        entries = self.saved.entries
        if not any(name.startswith("optim.") for name in entries):
            self._wrong.append("the checkpoint has no optimizer state; load without the optimizer, and moments start at zero")
            return
        steps: dict[str, str] = {}
        for whole in self.names.wholes:
            rule = self.state.rule_of(whole.parts[0].group) if whole.is_updated else self.state.optimizers.rule
            moments = moment_names(rule)
            states = (*moments.values(), "step")
            prefix = next((p for name in whole.names if any((p := f"optim.state.{name}.") + n in entries for n in states)), None)
            if prefix is None:
                continue
            if not whole.is_updated:
                self._wrong.append(f"{whole.names[0]} is trained in the checkpoint and frozen in the model")
                self._known.update(prefix + name for name in states)
                continue
            needed = [*moments.values(), *(["step"] if isinstance(rule, AdamRule) else [])]
            if missing := [prefix + name for name in needed if prefix + name not in entries]:
                self._wrong.append(f"missing: {listed(missing)}")
            self._known.update(prefix + name for name in states)
            for moment, name in moments.items():
                if prefix + name in entries and self._fits(prefix + name, whole.shape):
                    self._tensors[whole.names[0], moment] = _Tensor(self.saved, moment, prefix + name)
            if prefix + "step" not in entries:
                self._steps[whole.names[0]] = 1  # not 0: a rule may treat the first update differently
            elif self._fits(prefix + "step", ()):
                steps[prefix + "step"] = whole.names[0]
        for name, step in self.saved.small(steps).items():
            if not 0 <= step.item() < math.inf:
                self._wrong.append(f"{name} is {step.item()}")
            else:
                self._steps[steps[name]] = int(step.item())
        self._match_groups()

    def _match_groups(self) -> None:
        """Compare the parameter groups, and keep the hyper-parameters of the checkpoint for `run`."""
        optimizers = self.state.optimizers
        paths = {name: name.split(".", 3) for name in self.saved.entries if name.startswith("optim.param_groups.")}
        paths = {name: path for name, path in paths.items() if len(path) == 4 and path[2].isdigit() and "." not in path[3]}
        self._known.update(paths)
        there: list[dict] = [{} for _ in range(1 + max((int(path[2]) for path in paths.values()), default=-1))]
        for name, value in self.saved.small(paths).items():
            there[int(paths[name][2])][paths[name][3]] = plain(value)
        if len(there) != len(optimizers.param_groups):
            self._wrong.append(f"{len(there)} parameter groups in the checkpoint, {len(optimizers.param_groups)} in the optimizer")
            return
        group_of = {name: index for index, group in enumerate(there) for name in group.get("params", ())}
        for whole in self.names.wholes:
            found = next((group_of[name] for name in whole.names if name in group_of), None)
            if whole.is_updated and found != whole.parts[0].group:
                where = f"parameter group {found}" if found is not None else "no parameter group"
                self._wrong.append(f"{whole.names[0]} is in {where} in the checkpoint, in group {whole.parts[0].group} of the optimizer")
        for index, (group, found) in enumerate(zip(optimizers.param_groups, there)):
            optimizer = optimizers.owner_of(group)
            rule = optimizer.rule_of(group)
            defaults = defaults_of_torch(rule)
            for name in _OTHER_ARITHMETIC:
                if name in defaults and found.get(name, defaults[name]) != defaults[name]:
                    self._wrong.append(f"parameter group {index} has {name}={found[name]!r}, which {type(optimizer).__name__} lacks")
            only_torch = defaults.keys() - group.keys()  # not optimizer.defaults: torch's load_state_dict adds torch's defaults there
            found = {name: value for name, value in found.items() if name != "params" and name not in only_torch}
            found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
            try:
                wrong = rule.check({name: found.get(name, group[name]) for name in optimizer.defaults if name in group})
            except (TypeError, ValueError) as error:
                wrong = [str(error)]
            self._wrong += [f"parameter group {index}: {text}" for text in wrong]
            self._groups.append(found)
