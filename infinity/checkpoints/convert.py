"""Conversion of a checkpoint without an engine: to safetensors files, or to a checkpoint for another number of ranks.

Knows checkpoints and safetensors files, and holds one record or one tensor in memory. Must not know engines, tiers or devices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import aio_ext
from infinity.checkpoints.files import Directory, Progress, failed, lay_out_all
from infinity.checkpoints.manifest import LARGEST_WORLD, TENSOR_DTYPES, Manifest, Parameter, RecordPlace
from infinity.checkpoints.reader import Checkpoint, segment_bytes, segment_tensors
from infinity.checkpoints.safetensors_format import TensorSpec
from infinity.checkpoints.safetensors_writer import MAX_FILE_NBYTES, plan_files, write_files
from infinity.checkpoints.writer import Tensors, Writer
from infinity.config import LARGEST_CHUNK_MIB, LEAST_CHUNK_MIB, checked_path
from infinity.errors import CheckpointError, ConfigError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.plan.packing import ParameterSpec, default_chunk_numel, layout
from infinity.system.arena import Arena

EXPORT_DTYPES = ("bf16", "fp32", "fp16")


def export(
    path: str | os.PathLike,
    directory: str | os.PathLike,
    *,
    dtype: str | None = None,
    max_file_nbytes: int = MAX_FILE_NBYTES,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> list[tuple[str, int]]:
    """Write a checkpoint's weights and buffers as safetensors files, under the names of the model. Returns [(file, bytes of its tensors)].

    dtype: of all weights. By default each weight has the dtype in which the model computes with it; "fp32" writes the exact masters.
    Tiles of a layer are joined. A tied parameter is written once, under its first name. `__metadata__` lists the other names as
    {"tied:other": first}. With the model's config.json added, `from_pretrained` of transformers reads the folder.
    dry_run: write nothing, return the plan. Host memory: at most one tensor.

    Raises CheckpointError for a checkpoint or a directory that cannot be used. In this case the call leaves no files.
    """
    if dtype is not None and dtype not in EXPORT_DTYPES or max_file_nbytes < 1:
        raise ConfigError(f"dtype={dtype!r}, max_file_nbytes={max_file_nbytes}: expected one of {', '.join(EXPORT_DTYPES)}, and 1 or more")
    checked_path(directory)
    with Checkpoint(checked_path(path)) as checkpoint:
        wholes: dict[str, list[int]] = {}
        for index, parameter in enumerate(checkpoint.manifest.parameters):
            wholes.setdefault(parameter.canonical.name, []).append(index)
        parameters = checkpoint.manifest.parameters
        firsts = {name: parameters[tiles[0]] for name, tiles in wholes.items()}
        dtypes = {name: TORCH_DTYPES[dtype or checkpoint.manifest.format_of(first).compute] for name, first in firsts.items()}
        specs = [TensorSpec(name, dtypes[name], first.canonical.shape) for name, first in firsts.items()]
        buffers = checkpoint.buffers()
        entries = {name: checkpoint.manifest.tensors[index] for name, index in buffers.items()}
        specs += [TensorSpec(name, TENSOR_DTYPES[entry.dtype], entry.shape) for name, entry in entries.items()]

        def parts(spec: TensorSpec) -> Iterator[torch.Tensor]:
            if spec.name in buffers:
                return iter([checkpoint.tensor(buffers[spec.name]).reshape(-1)])
            return _values(checkpoint, wholes[spec.name], spec.dtype)

        if not dry_run:
            metadata = {f"tied:{alias}": name for alias, name in checkpoint.manifest.aliases.items()}
            try:
                write_files(directory, specs, parts, max_file_nbytes=max_file_nbytes, metadata=metadata, progress=progress)
            except CheckpointError:
                raise
            except OSError as error:
                raise failed("the files could not be written", directory, error) from error
            except ValueError as error:
                raise CheckpointError(f"{directory}: {error}") from error
        plan = plan_files(specs, max_file_nbytes=max_file_nbytes)
        return [(name, sum(spec.nbytes for spec in inside)) for name, inside in plan]


def reshard(
    path: str | os.PathLike,
    target: str | os.PathLike,
    *,
    world: int,
    chunk_mib: float | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Manifest:
    """Copy a checkpoint into the layout that `world` ranks would have saved. Returns the manifest of the copy.

    chunk_mib: as in Config; None keeps the size. `infinity.load` reads any checkpoint on any number of ranks. The load is faster if the
    checkpoint has the layout of the ranks that load. dry_run: write nothing. Raises CheckpointError.
    """
    if not 1 <= world <= LARGEST_WORLD:
        raise ConfigError(f"world={world}: expected 1 to {LARGEST_WORLD}")
    if chunk_mib is not None and not LEAST_CHUNK_MIB <= chunk_mib <= LARGEST_CHUNK_MIB:
        raise ConfigError(f"chunk_mib={chunk_mib!r}: expected {LEAST_CHUNK_MIB} to {LARGEST_CHUNK_MIB} MiB, or None")
    checked_path(target)
    with Checkpoint(checked_path(path)) as checkpoint:
        if Path(target).resolve() == checkpoint.path.resolve():
            raise CheckpointError(f"{target} is the checkpoint itself: name another directory")
        new = _laid_out(checkpoint.manifest, world, chunk_mib)
        return new if dry_run else _write(checkpoint, new, Path(target), progress)


def _laid_out(old: Manifest, world: int, chunk_mib: float | None) -> Manifest:
    """The manifest of the same values on `world` ranks, without checksums of the records."""
    specs = [ParameterSpec(p.name, p.numel, old.format_of(p)) for p in old.parameters]
    if chunk_mib is not None:
        chunk_numel = default_chunk_numel(chunk_mib, world)
    else:
        chunk_numel = default_chunk_numel(max((chunk.numel for chunk in old.chunks), default=1) * 2 / 2**20, world)
    chunks = layout(specs, chunk_numel=chunk_numel, world=world).chunks
    new = replace(old, world=world, chunks=chunks, rng=old.rng if world == old.world else ())
    files, places = lay_out_all(new)
    return replace(new, files=tuple(files), places=tuple(tuple(RecordPlace(*place, ()) for place in row) for row in places))


def _write(checkpoint: Checkpoint, new: Manifest, target: Path, progress: Progress | None) -> Manifest:
    """Write a checkpoint's values in the layout of the manifest `new`. Returns this manifest with folder and checksums."""
    jobs = [(chunk, rank) for chunk in new.chunks for rank in range(new.world)]
    at = {(chunk.index, rank): new.places[chunk.index][rank] for chunk, rank in jobs}
    directory, arena, writer = Directory(target), Arena(), None
    try:
        directory.check_space(new.nbytes)
        folder = directory.path / directory.folder
        writer = Writer(folder, new.files, {record: (place.file, place.offset) for record, place in at.items()})
        region = arena.region(max((new.record(chunk.index, rank).nbytes for chunk, rank in jobs), default=0) or 1)
        done = 0
        for chunk, rank in jobs:
            index, record = (chunk.index, rank), new.record(chunk.index, rank)
            _put_together(checkpoint, chunk.shard_pieces(rank), record, region)
            if record.nbytes:
                writer.write(index, 0, region.buffer[: record.nbytes]).wait()
            crcs = tuple(aio_ext.crc32c(part) for part in segment_bytes(record, region.buffer).values())
            at[index] = replace(at[index], crcs=crcs)
            done += record.nbytes
            if progress is not None:
                progress(done, new.nbytes)
        tensors = Tensors()
        for index in range(len(new.tensors)):
            tensors.put(checkpoint.tensor(index))
        tensors.write(folder)
        writer.finish()
        places = tuple(tuple(at[chunk.index, rank] for rank in range(new.world)) for chunk in new.chunks)
        new = replace(new, folder=directory.folder, places=places, tensors=tuple(tensors.entries))
        directory.commit(new)
        return new
    except BaseException:
        if writer is not None:
            writer.abort()
        directory.abort()
        raise
    finally:
        arena.close()


def _values(checkpoint: Checkpoint, tiles: list[int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The values of a whole parameter: 1-D tensors that follow each other."""
    parameters = checkpoint.manifest.parameters
    if all(parameters[index].is_rows for index in tiles):
        for index in sorted(tiles, key=lambda index: parameters[index].begin):
            yield from _tile(checkpoint, index, dtype)
        return
    whole = torch.empty(parameters[tiles[0]].canonical.shape, dtype=dtype, device="cpu")
    for index in tiles:
        tile = torch.cat([part.clone() for part in _tile(checkpoint, index, dtype)])
        _place_in(whole, parameters[index]).copy_(tile.view(parameters[index].shape))
    yield whole.reshape(-1)


def _tile(checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for _, found in checkpoint.values(index, 0, checkpoint.manifest.parameters[index].numel):
        yield found.in_dtype(dtype)


def _place_in(whole: torch.Tensor, tile: Parameter) -> torch.Tensor:
    return whole[tuple(slice(begin, begin + size) for begin, size in zip(tile.canonical.begin, tile.shape))]


def _put_together(checkpoint: Checkpoint, pieces, record, region) -> None:
    """Fill the memory of a record with the pieces of a shard."""
    region.tensor(torch.uint8, 0, region.nbytes).zero_()
    shard = segment_tensors(record, region)
    for piece in pieces:
        checkpoint.copy(shard, piece.start, piece.param, piece.param_start, piece.numel)
