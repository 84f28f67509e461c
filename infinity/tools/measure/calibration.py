"""The `calibrate` command: finds the fastest settings of each drive, measures links and processors, and writes both to files.

Knows directories, the output and the file. Must not know how bytes move (probes), or how many tokens hide all transfers (`plan`).

# [Note: files of calibrate]
# The settings of a drive's queues go to infinity-drive.json in the swap directory, where engines look for them. The output file receives the
# directories as Config.swap_dirs, and the machine. calibrate writes all files at the end, so an interrupt changes nothing. The written rate
# of a drive is the rate while all drives work. The sum of the rates is thus the bandwidth of an engine, also with two directories on a drive.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil
import torch

from infinity import config_files
from infinity.config import Config
from infinity.errors import BudgetError, ConfigError
from infinity.output import check_file, give, write_json, write_text
from infinity.plan.tiers import NVME
from infinity.renamed import CONFIG_FIELDS, with_new_names
from infinity.system import drives
from infinity.tools.doctor.system import read_memory_limit
from infinity.tools.machine import DriveRates, Machine
from infinity.tools.measure import probes
from infinity.tools.measure.calibration_report import calibration_report, calibration_text, calibration_warnings, is_busy
from infinity.tools.measure.drive_tuning import TunedDrive, probe_in, tune_drives
from infinity.tools.measure.figures import Figure, OtherProcesses
from infinity.tools.measure.link_rates import measure_links
from infinity.tools.meta_models import gpt
from infinity.tools.predict.plan_report import when_hidden
from infinity.tools.predict.prediction import predict
from infinity.tools.predict.simulated_run import TrainingStep
from infinity.tools.progress import Progress

_GPT = {"hidden": 2048, "layers": 8, "heads": 16, "vocab": 256, "seq": 1024}
_OF_SEVERAL = ("devices", "h2d_all_gbps", "d2h_all_gbps", "gather_gbps", "gather_latency_us")
_KEPT = ("name", "nodes", "network_gbps")  # of an earlier [machine]: calibrate does not measure these


def calibrate(arguments) -> int:
    """The `calibrate` command. All arguments and the file are checked before the first measurement."""
    output = arguments.output
    check_file(output, "--output")
    content = config_files.read(output) if output.exists() else {}
    known = Machine.load(output) if "machine" in content else None
    if not isinstance(content.get("config", {}), dict):
        raise ConfigError(f"{output}: config: expected a table of settings")
    paths = Config(swap_dirs=[path.absolute() for path in arguments.directories]).swap_dirs
    try:
        config_files.to_toml(content | {"config": _settings(output, content, paths)})
    except TypeError as error:
        raise ConfigError(f"{output} contains a value that calibrate cannot write back: {error}; name another file with --output") from None
    world = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", world) != world:
        raise ConfigError("calibrate measures one node: run it on one node, then add `nodes` and `network_gbps` to [machine] in the file")
    with probes.launched(arguments.device) as (device, ranks), Progress() as progress, contextlib.ExitStack() as stack:
        found, others = [], OtherProcesses()
        if ranks.is_first:
            found = [TunedDrive(path, stack.enter_context(probe_in(path))) for path in paths]
            tune_drives(found, progress)
        ranks.barrier()
        links = measure_links(device, ranks, progress, paths)
        if ranks.is_first:
            num_busy = others.num_cores() if not ranks.are_several else 0.0
            machine = _machine(device, ranks.world, found, links, known, is_busy=is_busy(num_busy))
            progress.finish()
            warned = calibration_warnings(machine, found, links, num_busy)
            give(calibration_report(output, machine, found, links, warned), calibration_text(found, links, ranks.world), arguments.json)
            for text in warned:
                print(f"infinity: warning: {text}", file=sys.stderr)
            _write(output, config_files.read(output) if output.exists() else {}, machine, found, is_busy(num_busy))
            if not arguments.json:
                print(f"\ntokens per step of a GPT with all states on NVMe: {tokens_that_hide(machine)}")
                print(f"\nwritten to {output}, and to {drives.CACHE_NAME} in each directory")
                num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
                if num_gpus > 1 and not ranks.are_several:
                    command = f"torchrun --nproc-per-node {num_gpus} -m infinity calibrate ..."
                    print(f"\none of {num_gpus} GPUs was measured: `{command}` measures all of them at once, and their collectives")
    return 0


def _machine(
    device: torch.device, world: int, found: list[TunedDrive], links: dict[str, Figure], known: Machine | None, *, is_busy: bool = False
) -> Machine:
    """The figures as a Machine. Values that were not measured are those of `known`, from the earlier file. is_busy: other processes used the
    cores, and no figure is sure."""
    memory = min(psutil.virtual_memory().total, read_memory_limit() or math.inf)
    kept = {name: getattr(known, name) for name in _KEPT} if known else {"name": platform.node()}
    several_known = known is not None and world == 1 < known.devices  # one process measures one of several devices
    if several_known:
        kept |= {name: getattr(known, name) for name in _OF_SEVERAL}
    fields = {
        "device_tflops": ("product", 1e12),
        "attention_tflops": ("attention", 1e12),
        "device_gbps": ("device_memory", 1e9),
        "device_update_gparams": ("device_update" if "device_update" in links else "update", 1e9),
        "host_gbps": ("memory", 1e9),
        "update_gparams": ("update", 1e9),
        "h2d_gbps": ("h2d", 1e9),
        "d2h_gbps": ("d2h", 1e9),
        "h2d_all_gbps": ("h2d_all" if "h2d_all" in links else "h2d", 1e9),
        "d2h_all_gbps": ("d2h_all" if "d2h_all" in links else "d2h", 1e9),
        "gather_gbps": ("gather", 1e9),
        "copy_latency_us": ("copy_s", 1e-6),
        "op_overhead_us": ("op_s", 1e-6),
        "job_overhead_us": ("job_s", 1e-6),
        "beside_drives": ("product_beside_drives", links["product"].value),
        "gather_latency_us": ("gather_s", 1e-6),
    }
    measured = {name: (links[link], unit) for name, (link, unit) in fields.items() if link in links and not (several_known and name in _OF_SEVERAL)}
    # Figures of another type of device do not apply. Those of all devices may be of another number of devices.
    before = known if known and known.device == device.type else None
    figures = _chosen(measured, before, is_busy, other=_OF_SEVERAL)
    if before is not None:
        figures = {name: getattr(before, name) for name in fields if name not in measured} | figures
    return Machine(
        **figures | {"devices": world} | kept,
        device=device.type,
        device_memory=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else memory // 4,  # the default of an engine on the CPU
        cores=len(os.sched_getaffinity(0)),
        host_memory=memory,
        drives=_drive_rates(found, known, is_busy),
    )


def _drive_rates(found: list[TunedDrive], known: Machine | None, is_busy: bool) -> tuple[DriveRates, ...]:
    before = {drive.path: drive for drive in known.drives} if known else {}
    sharers = Counter(os.stat(each.path).st_dev for each in found)
    rates = []
    for each in found:
        status, earlier = os.statvfs(each.path), before.get(str(each.path))
        is_same = before.keys() == {str(drive.path) for drive in found}  # rates of drives that work together
        measured = {f"{mix}_gbps": (figure, 1e9) for mix, figure in each.together.items()}
        rates.append(
            DriveRates(
                path=str(each.path),
                **_chosen(measured, earlier, is_busy, other=() if is_same else measured),
                capacity=status.f_bavail * status.f_frsize // sharers[os.stat(each.path).st_dev],
                endurance=earlier.endurance if earlier else 0,
            )
        )
    return tuple(rates)


def _chosen(
    measured: dict[str, tuple[Figure, float]], before: Machine | DriveRates | None, is_busy: bool, other: Collection[str] = ()
) -> dict:
    """The fields of a Machine or of DriveRates, with the names of the unsure ones. measured: figures with their units. Sure values of
    `before`, from the earlier file, are kept instead of unsure ones, except for `other`: names with another meaning there."""
    values, unsure = {}, [] if before is None else [name for name in before.unsure if name not in measured]
    for name, (figure, unit) in measured.items():
        values[name] = figure.written(unit)
        if is_busy or not figure.repeats:
            earlier = getattr(before, name, None)
            if earlier is not None and earlier != getattr(type(before), name) and name not in (*before.unsure, *other):  # not the default
                values[name] = earlier
            else:
                unsure.append(name)
    return values | {"unsure": tuple(unsure)}


def tokens_that_hide(machine: Machine) -> str:
    """The number of tokens per step from which compute hides all transfers, in the words of `infinity plan`.

    The model is a GPT with all states on NVMe. Models of all sizes have about the same ratio of bytes to operations.
    """
    dtype, batch = ("bf16", 16) if machine.device == "cuda" else ("fp32", 1)
    subject = gpt(**_GPT, batch=batch, dtype=dtype)
    try:
        on_nvme = Config(param_tier=NVME.name, optimizer_state_tier=NVME.name, residency="none", dtype=dtype)
        found = predict(subject, machine, on_nvme, TrainingStep(recompute=True))
    except ConfigError as error:  # of a file that was written by hand
        return f"not known: {error}"
    except BudgetError as error:
        return f"not known: even a model of {sum(param.numel() for param in subject.model.parameters()):,} parameters does not fit: {error}"
    return when_hidden(found)


# Files and output


def _settings(output: Path, content: dict, paths: Iterable[Path]) -> dict:
    """The table [config] of the file with new names and these swap directories. Raises ConfigError for a setting under both names."""
    return with_new_names(content.get("config", {}), CONFIG_FIELDS, f"{output}: ") | {"swap_dirs": list(map(str, paths))}


def _write(output: Path, content: dict, machine: Machine, found: list[TunedDrive], busy: bool) -> None:
    """See [Note: files of calibrate]."""
    for each in found:
        if (busy or not each.alone["mixed"].repeats) and (each.path / drives.CACHE_NAME).exists():
            print(f"infinity: warning: {each.path / drives.CACHE_NAME} stays as it is: the new rate is unsure", file=sys.stderr)
            continue
        fd = os.open(each.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            drives.store(fd, each.drive)
            if drives.load(fd) != each.drive:
                print(f"infinity: warning: {each.path / drives.CACHE_NAME} cannot be written: engines ignore these settings", file=sys.stderr)
        finally:
            os.close(fd)
    content = content | {
        "config": _settings(output, content, [each.path for each in found]),
        "machine": machine.to_table(),
    }
    if output.suffix == ".json":
        write_json(output, content)
    else:
        write_text(output, config_files.to_toml(content))
