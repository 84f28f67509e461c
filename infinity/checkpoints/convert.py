"""What can be made of a checkpoint without an engine: safetensors files, or a checkpoint for another number of ranks.

Knows checkpoints and files of tensors, a record or one tensor at a time. Must not know engines, tiers or devices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import aio_ext
from infinity.checkpoints.manifest import LARGEST_WORLD, TENSOR_DTYPES, Manifest, Parameter, Place
from infinity.checkpoints.safetensors import MAX_FILE_NBYTES, TensorSpec, plan_files, write_files
from infinity.checkpoints.store import QUEUE, Checkpoint, Directory, Progress, Tensors, Writer, failed, lay_out, segment_bytes
from infinity.config import LARGEST_CHUNK_MIB, LEAST_CHUNK_MIB, checked_path
from infinity.errors import CheckpointError, ConfigError
from infinity.optim.adam import masters
from infinity.plan.packing import ParameterSpec, default_chunk_numel, layout
from infinity.plan.record import record_layout
from infinity.system.arena import Arena
from infinity.tiers.state import TORCH_DTYPES

EXPORT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def export(
    path: str | os.PathLike,
    directory: str | os.PathLike,
    *,
    dtype: str | None = None,
    max_file_nbytes: int = MAX_FILE_NBYTES,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> list[tuple[str, int]]:
    """Write a checkpoint's weights and buffers as safetensors, with the model's own names; returns (file, bytes of tensors) of
    each.

    dtype: of the weights, by default the checkpoint's own; fp32 is the master, exactly; a bf16 checkpoint's bf16 the weight as
    the model computes with it. Tiles are joined. Of tied names the first is written, the others stand in `__metadata__` as
    {"tied:other": first}. The folder is what `from_pretrained` of transformers reads, beside the model's config.json. Holds one
    tensor in memory, at most.

    Raises CheckpointError for a checkpoint or a directory that cannot be used; then nothing is there.
    """
    if dtype is not None and dtype not in EXPORT_DTYPES or max_file_nbytes < 1:
        raise ConfigError(f"dtype={dtype!r}, max_file_nbytes={max_file_nbytes}: expected one of {', '.join(EXPORT_DTYPES)}, and 1 or more")
    checked_path(directory)
    with Checkpoint(checked_path(path)) as checkpoint:
        dtype = dtype or checkpoint.manifest.dtype
        wholes: dict[str, list[int]] = {}
        for index, parameter in enumerate(checkpoint.manifest.parameters):
            wholes.setdefault(parameter.canonical.name, []).append(index)
        parameters = checkpoint.manifest.parameters
        specs = [TensorSpec(name, EXPORT_DTYPES[dtype], parameters[tiles[0]].canonical.shape) for name, tiles in wholes.items()]
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
    """Write a checkpoint anew, with the same values, as `world` ranks would have saved it; returns its manifest.

    chunk_mib: as of Config; None keeps the size. `infinity.load` reads any checkpoint on any number of ranks; what is laid out as the
    ranks that load it do, it reads faster. Raises CheckpointError.
    """
    if not 1 <= world <= LARGEST_WORLD:
        raise ConfigError(f"world={world}: expected 1 to {LARGEST_WORLD}")
    if chunk_mib is not None and not LEAST_CHUNK_MIB <= chunk_mib <= LARGEST_CHUNK_MIB:
        raise ConfigError(f"chunk_mib={chunk_mib!r}: expected {LEAST_CHUNK_MIB} to {LARGEST_CHUNK_MIB} MiB, or None")
    checked_path(target)
    with Checkpoint(checked_path(path)) as checkpoint:
        old = checkpoint.manifest
        if Path(target).resolve() == checkpoint.path.resolve():
            raise CheckpointError(f"{target} is the checkpoint itself: name another directory")
        specs = [ParameterSpec(p.name, p.numel, old.dtype, p.trainable) for p in old.parameters]
        if chunk_mib is not None:
            chunk_numel = default_chunk_numel(chunk_mib, world)
        else:
            chunk_numel = default_chunk_numel(max((chunk.numel for chunk in old.chunks), default=1) * 2 / 2**20, world)
        chunks = layout(specs, chunk_numel=chunk_numel, world=world).chunks
        records = [[record_layout(c.shard_used(r), old.dtype, c.trainable, old.moments, old.moments_dtype) for c in chunks] for r in range(world)]
        plans = [lay_out(records[rank], [chunk.trainable for chunk in chunks], rank) for rank in range(world)]
        files = [file for own, _ in plans for file in own]
        first = [sum(len(own) for own, _ in plans[:rank]) for rank in range(world)]
        places = [[Place(first[r] + plans[r][1][c.index][0], plans[r][1][c.index][1], ()) for r in range(world)] for c in chunks]
        kept = {"rng": old.rng if world == old.world else (), "files": tuple(files), "chunks": chunks, "world": world}
        new = replace(old, places=tuple(map(tuple, places)), **kept)
        if dry_run:
            return new
        directory, arena, writers, queue = Directory(Path(target)), Arena(), [], None
        try:
            directory.check_space(new.nbytes)
            folder = directory.path / directory.folder
            queue = QUEUE.queue()
            writers += [Writer(folder, records[rank], *plans[rank], {}, queue) for rank in range(world)]
            region = arena.region(max((record.nbytes for own in records for record in own), default=0) or 1)
            done = 0
            for chunk in chunks:
                for rank in range(world):
                    record = records[rank][chunk.index]
                    _put_together(checkpoint, chunk.shard_pieces(rank), record, region)
                    if record.nbytes:
                        writers[rank].write(chunk.index, 0, region.buffer[: record.nbytes]).wait()
                    crcs = tuple(aio_ext.crc32c(part) for part in segment_bytes(record, region.buffer).values())
                    places[chunk.index][rank] = replace(places[chunk.index][rank], crcs=crcs)
                    done += record.nbytes
                    if progress is not None:
                        progress(done, new.nbytes)
            tensors = Tensors()
            for index in range(len(old.tensors)):
                tensors.put(checkpoint.tensor(index))
            tensors.write(folder)
            for writer in writers:
                writer.finish()
            new = replace(new, folder=directory.folder, places=tuple(map(tuple, places)), tensors=tuple(tensors.entries))
            directory.commit(new)
            return new
        except BaseException:
            for writer in writers:
                writer.abort()
            directory.abort()
            raise
        finally:
            if queue is not None:
                queue.close()
            arena.close()


def _values(checkpoint: Checkpoint, tiles: list[int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The values of a whole parameter, in parts, 1-D."""
    parameters = checkpoint.manifest.parameters
    if all(parameters[index].is_rows for index in tiles):
        for index in sorted(tiles, key=lambda index: parameters[index].begin):
            yield from _tile(checkpoint, index, dtype)
        return
    whole = torch.empty(parameters[tiles[0]].canonical.shape, dtype=dtype)
    for index in tiles:
        tile = torch.cat([part.clone() for part in _tile(checkpoint, index, dtype)])
        _place_in(whole, parameters[index]).copy_(tile.view(parameters[index].shape))
    yield whole.reshape(-1)


def _tile(checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for _, found in checkpoint.values(index, 0, checkpoint.manifest.parameters[index].numel):
        yield masters(found).to(dtype) if dtype is not found["weight"].dtype else found["weight"]


def _place_in(whole: torch.Tensor, tile: Parameter) -> torch.Tensor:
    return whole[tuple(slice(begin, begin + size) for begin, size in zip(tile.canonical.begin, tile.shape))]


def _put_together(checkpoint: Checkpoint, pieces, record, region) -> None:
    """Fill the memory of a record with the pieces of a shard."""
    region.tensor(torch.uint8, 0, region.nbytes).zero_()
    shard = {
        segment.name: region.tensor(TORCH_DTYPES[segment.dtype], offset, record.numel)
        for segment, offset in zip(record.segments, record.offsets)
    }
    for piece in pieces:
        checkpoint.copy(shard, piece.start, piece.param, piece.param_start, piece.numel)
