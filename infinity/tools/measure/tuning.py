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
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch

from infinity import config_files
from infinity.config import Config
from infinity.errors import BudgetError, ConfigError, SwapError
from infinity.output import check_file, give, table, write_json, write_text
from infinity.plan.tiers import NVME
from infinity.renamed import CONFIG_FIELDS, with_new_names
from infinity.sizes import format_bytes
from infinity.system import drives, swap_paths
from infinity.system.drives import Drive
from infinity.system.mounts import MEMORY_FILESYSTEMS, mount_at
from infinity.system.ranks import Ranks
from infinity.tools.doctor.system import read_memory_limit
from infinity.tools.measure import probes, search
from infinity.tools.measure.figures import Figure, OtherProcesses
from infinity.tools.predict.machine import DriveRates, Machine
from infinity.tools.predict.meta_models import gpt
from infinity.tools.predict.plan_report import when_hidden
from infinity.tools.predict.prediction import predict
from infinity.tools.predict.workload import workload
from infinity.tools.progress import Progress

LEAST_NBYTES = drives.SCRATCH_NBYTES  # of the measured file
MOST_NBYTES = 1 << 30
LINK_NBYTES = 32 << 20  # of a copied or gathered chunk

_GPT = {"hidden": 2048, "layers": 8, "heads": 16, "vocab": 256, "seq": 1024}
_ROUNDS, _REPEATS = 3, 3  # rounds of all figures, and repeats of one transfer in each round; see [Note: a figure that repeats] in figures.py
BUSY_SHARE = 0.1  # of the cores; above it, calibrate warns of other processes
_OF_SEVERAL = ("devices", "h2d_all_gbps", "d2h_all_gbps", "gather_gbps", "gather_latency_us")
_KEPT = ("name", "nodes", "network_gbps")  # of an earlier [machine]: calibrate does not measure these
_LINKS = [  # output: text, figure of one device, figure of all devices at once, unit, name of the unit
    ("h2d", "h2d", "h2d_all", 1e9, "GB/s"),
    ("d2h", "d2h", "d2h_all", 1e9, "GB/s"),
    ("h2d and d2h", "both", "both_all", 1e9, "GB/s"),
    ("all_gather", "", "gather", 1e9, "GB/s"),
    ("reduce_scatter", "", "reduce", 1e9, "GB/s"),
    ("products", "product", "", 1e12, "TFLOP/s"),
    ("updates, on the device", "device_update", "", 1e9, "Gparam/s"),
    ("updates, in host memory", "update", "", 1e9, "Gparam/s"),
    ("host memory, read and written", "memory", "", 1e9, "GB/s"),
    ("a small copy", "copy_s", "", 1e-6, "us"),
    ("a small all_gather", "", "gather_s", 1e-6, "us"),
    ("overhead of an op", "op_s", "", 1e-6, "us"),
    ("overhead of a chunk", "chunk_s", "", 1e-6, "us"),
]
_AXES = {"inflight_nbytes": "in the kernel", "block_nbytes": "block", "num_queues": "queues"}


@dataclass
class _Path:
    """A directory with a probe and figures. seen: rates of settings around the chosen setting. alone, together: figures by mix."""

    path: Path
    probe: drives.Probe
    drive: Drive = Drive()
    seen: dict[tuple[str, int], dict[str, float]] | None = None
    alone: dict[str, Figure] | None = None
    together: dict[str, Figure] | None = None


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
            found = [_Path(path, stack.enter_context(probe_in(path))) for path in paths]
            _find_settings(found, progress)
        ranks.barrier()
        links = _links(device, ranks, progress)
        if ranks.is_first:
            machine = _machine(device, ranks.world, found, links, known)
            progress.finish()
            warned = _warnings(found, links, others.num_cores() if not ranks.are_several else 0.0)
            give(_report(output, machine, found, links, warned), _text(found, links, ranks.world), arguments.json)
            for text in warned:
                print(f"infinity: warning: {text}", file=sys.stderr)
            _write(output, config_files.read(output) if output.exists() else {}, machine, found)
            if not arguments.json:
                print(f"\ntokens per step of a GPT with all states on NVMe: {tokens_that_hide(machine)}")
                print(f"\nwritten to {output}, and to {drives.CACHE_NAME} in each directory")
    return 0


# Drives


@contextlib.contextmanager
def probe_in(path: Path) -> Iterator[drives.Probe]:
    """A probe on a written file without a name: the kernel frees the file when the process ends. Errors name the directory."""
    with _named(path), contextlib.ExitStack() as stack:
        status = os.statvfs(path)
        free = status.f_bavail * status.f_frsize
        nbytes = min(MOST_NBYTES, free // 4) // LEAST_NBYTES * LEAST_NBYTES
        if not nbytes:
            needed, has = format_bytes(4 * LEAST_NBYTES), format_bytes(free)
            raise ConfigError(f"{path}: calibrate needs {needed} of free space, {has} are free: free space there or name another directory")
        fd, name = tempfile.mkstemp(prefix=".infinity-tune-", dir=path)
        stack.callback(os.close, fd)
        try:
            direct = _open_direct(path, name)
        finally:
            os.unlink(name)
        if direct is not None:
            stack.callback(os.close, direct)
        fd = fd if direct is None else direct
        os.posix_fallocate(fd, 0, nbytes)
        probe = stack.enter_context(contextlib.closing(drives.Probe(fd, nbytes)))
        probe.fill()
        yield probe


def _open_direct(path: Path, name: str) -> int | None:
    """Open the file for direct I/O. Returns None, with a warning, if direct I/O does not work."""
    kind = mount_at(path).kind
    reason = f"{kind} keeps files in memory"
    if kind not in MEMORY_FILESYSTEMS:
        try:
            return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            reason = f"{kind} refuses O_DIRECT ({error.strerror})"
    print(f"infinity: warning: {path}: {reason}: rates there are those of memory, not of a drive", file=sys.stderr)
    return None


@contextlib.contextmanager
def _named(path: Path):
    try:
        yield
    except OSError as error:
        if isinstance(error, SwapError):
            raise
        raise SwapError(error.errno, f"measuring failed: {error.strerror}", str(path)) from error


def _find_settings(found: list[_Path], progress: Progress) -> None:
    """Find the settings of each drive alone, then measure all drives at once."""
    for each in found:
        with _named(each.path):
            _tune_drive(each, progress)
    progress.show("all drives at once" if len(found) > 1 else f"{found[0].path}: reading and writing", last=True)
    if len(found) > 1:
        rounds = [{mix: _rates_together(found, mix) for mix in drives.MIXES} for _ in range(_ROUNDS)]
        for number, each in enumerate(found):
            each.together = {mix: Figure(tuple(rates[mix][number] for rates in rounds)) for mix in drives.MIXES}
    else:
        found[0].together = found[0].alone
    for each in found:
        with _named(each.path):
            each.probe.check()


def _tune_drive(each: _Path, progress: Progress) -> None:
    probe, number = each.probe, 0

    def rate(drive: Drive) -> float:
        nonlocal number
        number += 1
        nbytes_per_s = probe.rate("mixed", drive)
        progress.show(f"{each.path}: setting {number}  {nbytes_per_s / 1e9:.2f} GB/s")
        return nbytes_per_s

    progress.show(f"{each.path}: read time during writes", last=True)
    block_s = probe.read_seconds()
    start = Drive(inflight_write_nbytes=probe.patient_write_nbytes(block_s))
    progress.show(f"{each.path}: settings", last=True)
    chosen = search.search(start, rate)
    progress.show(f"{each.path}: settings around the best of {number} measurements", last=True)
    each.seen = {}
    for name, values in search.AXES.items():
        for value in values:
            point = replace(chosen, **{name: value})
            if search.is_possible(point):
                each.seen[name, value] = {mix: probe.rate(mix, point) for mix in drives.MIXES}
    rounds = [{mix: _median_rate(probe, mix, chosen) for mix in drives.MIXES} for _ in range(_ROUNDS)]
    each.alone = {mix: Figure(tuple(rates[mix] for rates in rounds)) for mix in drives.MIXES}
    each.drive = chosen.measured(each.alone["mixed"].value, block_s)


def _median_rate(probe: drives.Probe, mix: str, drive: Drive) -> float:
    return statistics.median(probe.rate(mix, drive) for _ in range(_REPEATS))


def _rates_together(found: list[_Path], mix: str) -> list[float]:
    """Bytes per second of each drive while all drives work."""
    starts = threading.Barrier(len(found))

    def rate(each: _Path) -> float:
        rates = []
        for _ in range(_REPEATS):
            starts.wait()
            rates.append(each.probe.rate(mix, each.drive))
        return statistics.median(rates)

    with ThreadPoolExecutor(len(found)) as pool:
        tasks = [pool.submit(_abort_on_error, starts, rate, each) for each in found]
        errors = [task.exception() for task in tasks]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error  # the first error; in the other threads it broke the barrier
        return [task.result() for task in tasks]


def _abort_on_error(starts: threading.Barrier, rate: Callable[[_Path], float], each: _Path) -> float:
    """Measure one drive. On an error, release the threads that wait at the barrier."""
    try:
        with _named(each.path):
            return rate(each)
    except BaseException:
        starts.abort()
        raise


# Links and processors


def _links(device: torch.device, ranks: Ranks, progress: Progress) -> dict[str, Figure]:
    """Figures by name: rates in units per second, and times in seconds. All ranks take part. The slowest rank counts."""
    rounds = [dict(_round(device, ranks, progress, f"round {number + 1} of {_ROUNDS}")) for number in range(_ROUNDS)]
    return {name: Figure(tuple(values[name] for values in rounds), is_time=name.endswith("_s")) for name in rounds[0]}


def _round(device: torch.device, ranks: Ranks, progress: Progress, title: str) -> Iterator[tuple[str, float]]:
    """Measure each figure once, and yield its name and value."""

    def of_one(text: str, work: Callable[[], float]) -> float:
        show(text)
        return ranks.most([work() if ranks.is_first else 0.0])[0]

    def of_all(text: str, work: Callable[[], float], slowest=ranks.least) -> float:
        show(text)
        return slowest([work()])[0]

    def show(text: str) -> None:
        if ranks.is_first:
            progress.show(f"{text}, {title}", last=True)
        ranks.barrier()

    def rate(probe, together: Ranks | None = None) -> float:
        with contextlib.closing(probe):
            return statistics.median(probes.rates(probe, _REPEATS, together))

    def copies(to_device: bool) -> probes.Copies:
        return probes.Copies(device, LINK_NBYTES, to_device=to_device)

    cuda, several = device.type == "cuda", ranks.are_several
    yield "memory", of_one("host memory", probes.memory_rate)
    yield "update", of_one("updates in host memory", lambda: probes.update_rate(torch.device("cpu")))
    yield "product", of_one("products on the device", lambda: probes.product_rate(device))
    yield "h2d", of_one("copies to the device", lambda: rate(copies(True)))
    yield "d2h", of_one("copies from the device", lambda: rate(copies(False)))
    yield "copy_s", of_one("a small copy", lambda: probes.copy_seconds(device))
    yield "op_s", of_all("small ops", lambda: probes.op_seconds(device), slowest=ranks.most)
    yield "chunk_s", of_all("small chunks", lambda: probes.chunk_seconds(device), slowest=ranks.most)
    if cuda:
        yield "device_update", of_one("updates on the device", lambda: probes.update_rate(device))
        yield "both", of_one("copies both ways", lambda: rate(probes.BothWays(device, LINK_NBYTES)))
    if several:
        yield "h2d_all", of_all("copies to all devices", lambda: rate(copies(True), ranks))
        yield "d2h_all", of_all("copies from all devices", lambda: rate(copies(False), ranks))
        if cuda:
            yield "both_all", of_all("copies both ways of all devices", lambda: rate(probes.BothWays(device, LINK_NBYTES), ranks))
        yield "gather", of_all("all-gathers", lambda: rate(probes.Collectives(ranks, device, LINK_NBYTES, reduce=False)))
        yield "reduce", of_all("reduce-scatters", lambda: rate(probes.Collectives(ranks, device, LINK_NBYTES, reduce=True)))
        yield "gather_s", of_all("a small all-gather", lambda: probes.gather_seconds(ranks, device), slowest=ranks.most)


def _machine(device: torch.device, world: int, found: list[_Path], links: dict[str, Figure], known: Machine | None) -> Machine:
    """The figures that repeat, as a Machine. All other values are those of `known`, from the earlier file."""
    memory = min(psutil.virtual_memory().total, read_memory_limit() or math.inf)
    kept = {name: getattr(known, name) for name in _KEPT} if known else {"name": platform.node()}
    if known and world == 1 < known.devices:  # one process measures one of several devices
        kept |= {name: getattr(known, name) for name in _OF_SEVERAL}
    measured = {
        "device_tflops": links["product"].written(1e12),
        "device_update_gparams": links.get("device_update", links["update"]).written(1e9),
        "host_gbps": links["memory"].written(1e9),
        "update_gparams": links["update"].written(1e9),
        "h2d_gbps": links["h2d"].written(1e9),
        "d2h_gbps": links["d2h"].written(1e9),
        "h2d_all_gbps": links.get("h2d_all", links["h2d"]).written(1e9),
        "d2h_all_gbps": links.get("d2h_all", links["d2h"]).written(1e9),
        "gather_gbps": links["gather"].written(1e9) if "gather" in links else 0.0,
        "copy_latency_us": links["copy_s"].written(1e-6),
        "op_overhead_us": links["op_s"].written(1e-6),
        "chunk_overhead_us": links["chunk_s"].written(1e-6),
        "gather_latency_us": links["gather_s"].written(1e-6) if "gather_s" in links else None,
    }
    # Figures of another type of device do not apply.
    earlier = _figures_of(known, measured) if known and known.device == device.type else {}
    return Machine(
        **earlier | {name: value for name, value in measured.items() if value is not None} | {"devices": world} | kept,
        device=device.type,
        device_memory=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else memory // 4,  # the default of an engine on the CPU
        cores=len(os.sched_getaffinity(0)),
        host_memory=memory,
        drives=_drive_rates(found, known),
    )


def _drive_rates(found: list[_Path], known: Machine | None) -> tuple[DriveRates, ...]:
    before = {drive.path: drive for drive in known.drives} if known else {}
    sharers = Counter(os.stat(each.path).st_dev for each in found)
    rates = []
    for each in found:
        status, earlier = os.statvfs(each.path), before.get(str(each.path))
        measured = {f"{mix}_gbps": figure.written(1e9) for mix, figure in each.together.items()}
        rates.append(
            DriveRates(
                path=str(each.path),
                **_figures_of(earlier, measured) | {name: value for name, value in measured.items() if value is not None},
                capacity=status.f_bavail * status.f_frsize // sharers[os.stat(each.path).st_dev],
                endurance=earlier.endurance if earlier else 0,
            )
        )
    return tuple(rates)


def _figures_of(value, names) -> dict[str, float]:
    return {name: getattr(value, name) for name in names} if value is not None else {}


def tokens_that_hide(machine: Machine) -> str:
    """The number of tokens per step from which compute hides all transfers, in the words of `infinity plan`.

    The model is a GPT with all states on NVMe. Models of all sizes have about the same ratio of bytes to operations.
    """
    dtype, batch = ("bf16", 16) if machine.device == "cuda" else ("fp32", 1)
    subject = gpt(**_GPT, batch=batch, dtype=dtype)
    load = workload(subject.model, subject.run, tokens=subject.tokens, recompute=True)
    try:
        found = predict(subject.model, load, machine, Config(param_tier=NVME.name, optimizer_state_tier=NVME.name, residency="none", dtype=dtype))
    except ConfigError as error:  # a figure that did not repeat
        return f"not known: {error}"
    except BudgetError as error:
        return f"not known: even a model of {sum(param.numel() for param in subject.model.parameters()):,} parameters does not fit: {error}"
    return when_hidden(found)


# Files and output


def _settings(output: Path, content: dict, paths: Iterable[Path]) -> dict:
    """The table [config] of the file with new names and these swap directories. Raises ConfigError for a setting under both names."""
    return with_new_names(content.get("config", {}), CONFIG_FIELDS, f"{output}: ") | {"swap_dirs": list(map(str, paths))}


def _write(output: Path, content: dict, machine: Machine, found: list[_Path]) -> None:
    """See [Note: files of calibrate]."""
    for each in found:
        if not each.alone["mixed"].repeats:
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


def _warnings(found: list[_Path], links: dict[str, Figure], num_busy: float) -> list[str]:
    """One line per figure that is not written, and per cause. num_busy: cores that other processes kept busy."""
    names = {key: (f"{text}, all at once" if all_ == key else text, unit, name) for text, one, all_, unit, name in _LINKS for key in (one, all_)}
    lines = [_unwritten(*names[key], figure) for key, figure in links.items() if not figure.repeats]
    for each in found:
        lines += [_unwritten(f"{each.path}, {mix}", 1e9, "GB/s", figure) for mix, figure in each.together.items() if not figure.repeats]
        if not each.alone["mixed"].repeats:
            lines.append(f"{each.path}: the rate varies between rounds: {drives.CACHE_NAME} is not written there")
    cores = len(os.sched_getaffinity(0))
    if num_busy > BUSY_SHARE * cores:
        lines.append(f"other processes kept {num_busy:.1f} of {cores} cores busy during calibrate: figures are lower than on an idle machine")
    again = bool(lines)
    lines += map(str, swap_paths.shared_drives([each.path for each in found]))
    if len(found) > 1:
        lines += map(str, swap_paths.slow_directories({each.path: each.alone["mixed"].value for each in found}))
    if again:
        lines.append("run calibrate again when no other program runs on this machine")
    return lines


def _unwritten(text: str, unit: float, name: str, figure: Figure) -> str:
    values = ", ".join(f"{value / unit:.3g}" for value in figure.values)
    return f"{text}: {values} {name} in {len(figure.values)} rounds: the values differ too much and are not written"


def _report(output: Path, machine: Machine, found: list[_Path], links: dict[str, Figure], warned: list[str]) -> dict:
    """The value of --json: the machine as written to `output`, and all measurements, in bytes and units per second."""
    measured = [
        {
            "path": str(each.path),
            "settings": asdict(each.drive),
            "alone": _values(each.alone),
            "together": _values(each.together),
            "around": [{"setting": name, "value": value} | rates for (name, value), rates in each.seen.items()],
        }
        for each in found
    ]
    ranges = {name: [min(figure.values), max(figure.values)] for name, figure in links.items()}
    return {
        "output": str(output),
        "machine": machine.to_table(),
        "drives": measured,
        "links": _values(links),
        "ranges": ranges,
        "warnings": warned,
    }


def _values(figures: dict[str, Figure]) -> dict[str, float]:
    return {name: figure.value for name, figure in figures.items()}


def _text(found: list[_Path], links: dict[str, Figure], world: int) -> str:
    lines = []
    for each in found:
        rows = []
        for (name, value), rates in each.seen.items():
            size = str(value) if name == "num_queues" else format_bytes(value)
            mark = " *" if getattr(each.drive, name) == value else ""
            rows.append([f"{_AXES[name]} {size}{mark}", *(f"{rates[mix] / 1e9:.2f}" for mix in drives.MIXES)])
        lines += [f"\n{each.path}: settings around the chosen ones (*), measured once each\n", table(["GB/s", *drives.MIXES], rows)]
    lines.append(f"\n{'drives, each alone and all at once' if len(found) > 1 else 'the drive'}\n")
    head = ["GB/s", "block", "in the kernel", "of which writes", "queues", *drives.MIXES]
    rows = [_row(each, each.alone) for each in found]
    if len(found) > 1:
        rows += [_row(each, each.together, " at once") for each in found]
        rows.append(["sum", *[""] * 4, *(f"{sum(each.together[mix].value for each in found) / 1e9:.2f}" for mix in drives.MIXES)])
    lines += [table(head, rows), f"\nlinks and processors{f', {world} devices' if world > 1 else ''}\n"]
    return "\n".join([*lines, table(["", "one device", "all at once, each", ""], _link_rows(links))])


def _row(each: _Path, rates: dict[str, Figure], suffix: str = "") -> list[str]:
    drive = each.drive
    sizes = [format_bytes(nbytes) for nbytes in (drive.block_nbytes, drive.inflight_nbytes, drive.inflight_write_nbytes)]
    return [f"{each.path}{suffix}", *sizes, str(drive.num_queues), *(_cell(rates[mix], 1e9) for mix in drives.MIXES)]


def _link_rows(links: dict[str, Figure]) -> list[list[str]]:
    rows = []
    for text, one, all_, unit, name in _LINKS:
        cells = [_cell(links[key], unit) if key in links else "" for key in (one, all_)]
        if any(cells):
            rows.append([text, *cells, name])
    return rows


def _cell(figure: Figure, unit: float) -> str:
    """The median with the lowest and highest value. A question mark marks a figure that does not repeat."""
    least, most = min(figure.values) / unit, max(figure.values) / unit
    return f"{figure.value / unit:.3g} ({least:.3g} to {most:.3g}){'' if figure.repeats else ' ?'}"
