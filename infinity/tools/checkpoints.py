"""The `checkpoint` command: inspects, verifies, exports and reshards checkpoints.

Uses checkpoints as any program would. Must not know engines: no subcommand needs memory for a model.
"""

import json
import time
from pathlib import Path

from infinity.checkpoints.convert import export, reshard
from infinity.checkpoints.reader import Checkpoint
from infinity.errors import printable
from infinity.sizes import format_bytes, parse_budget
from infinity.tools.progress import BytesProgress


def inspect(arguments) -> int:
    """The `inspect` command: prints a summary of the manifest as text or JSON, or the list of parameters."""
    with Checkpoint(arguments.directory) as checkpoint:
        report = _report(checkpoint)
    if arguments.parameters:
        for entry in report["parameters"]:
            kind = f"group {entry['group']}, {entry['step']} updates" if entry["trainable"] else "frozen"
            print(f"{printable(entry['name']):<48} {str(entry['shape']):<20} {kind}")
        return 0
    if arguments.json:
        print(json.dumps(report, indent=2))
        return 0
    moments = f"{', '.join(report['moments'])} in {report['moments_dtype']}" if report["moments"] else "no moments"
    parameters = report["parameters"]
    dtypes = " and ".join(dict.fromkeys([report["dtype"], *(entry["dtype"] for entry in parameters)]))
    num_frozen = sum(not entry["trainable"] for entry in parameters)
    frozen = f" ({num_frozen} frozen)" if num_frozen else ""
    print(f"checkpoint  {report['path']}, format version {report['version']}, {format_bytes(report['nbytes'])} in {report['num_files']} files")
    print(f"step        {report['step']}")
    print(f"parameters  {report['num_parameters'] / 1e6:,.2f} M in {len(parameters)} tensors{frozen}, {dtypes}; {moments}")
    print(f"saved by    {report['world']} {'rank' if report['world'] == 1 else 'ranks'}, in {report['num_chunks']} chunks")
    for index, group in enumerate(report["groups"]):
        print(printable(f"group {index:<5} {', '.join(f'{name}={value}' for name, value in group.items())}"))
    if report["extra"] is not None:
        print(f"extra       {json.dumps(report['extra'])[:200]}")
    return 0


def verify(arguments) -> int:
    """The `verify` command: reads the whole checkpoint and compares every checksum."""
    start = time.perf_counter()
    with Checkpoint(arguments.directory) as checkpoint, BytesProgress("verified") as progress:
        nbytes = checkpoint.verify(progress)
    seconds = time.perf_counter() - start
    print(f"{arguments.directory} is whole: {format_bytes(nbytes)}, step {checkpoint.manifest.step}, read in {seconds:.1f} s")
    return 0


def export_weights(arguments) -> int:
    """The `export` command."""
    with BytesProgress("written") as progress:
        files = export(
            arguments.directory,
            arguments.target,
            dtype=arguments.dtype,
            max_file_nbytes=parse_budget(arguments.max_file),
            progress=progress,
            dry_run=arguments.dry_run,
        )
    _list(files, arguments.target, arguments.dry_run)
    return 0


def reshard_ranks(arguments) -> int:
    """The `reshard` command."""
    with BytesProgress("written") as progress:
        manifest = reshard(
            arguments.directory,
            arguments.target,
            world=arguments.world,
            chunk_mib=arguments.chunk_mib,
            progress=progress,
            dry_run=arguments.dry_run,
        )
    _list([(file.name, file.nbytes) for file in manifest.files], arguments.target, arguments.dry_run)
    return 0


def _list(files: list[tuple[str, int]], target: Path, dry_run: bool) -> None:
    for name, nbytes in files:
        print(f"{format_bytes(nbytes):>12}  {printable(name)}")
    total = sum(nbytes for _, nbytes in files)
    print(f"{format_bytes(total):>12}  {'would be written to' if dry_run else 'written to'} {target}")


def _report(checkpoint: Checkpoint) -> dict:
    manifest = checkpoint.manifest
    groups = checkpoint.decode(manifest.optimizer["groups"]) if manifest.optimizer else []
    return {
        "path": str(checkpoint.path),
        "version": manifest.version,
        "step": manifest.step,
        "nbytes": manifest.nbytes,
        "num_files": len(manifest.files) + bool(manifest.tensors),
        "num_chunks": len(manifest.chunks),
        "num_parameters": sum(parameter.numel for parameter in manifest.parameters),
        "world": manifest.world,
        "dtype": manifest.dtype,
        "moments": list(manifest.moments),
        "moments_dtype": manifest.moments_dtype,
        "groups": groups,
        "parameters": [
            {"name": p.name, "shape": list(p.shape), "dtype": manifest.dtype_of(p), "trainable": p.trainable, "group": p.group, "step": p.step}
            for p in manifest.parameters
        ],
        "aliases": manifest.aliases,
        "extra": manifest.extra,
    }
