"""The `doctor` command: checks whether this machine can train, and prints one line per check, which a user can paste into a report.

Knows the list of checks and their order. Must not know how a check works. If a check fails, the line shows the error, and the next checks
still run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import aio_ext
from infinity import config_files
from infinity.config import DEFAULT_SWAP_DIR, Config
from infinity.errors import BudgetError, ConfigError
from infinity.optim import _adam
from infinity.renamed import CONFIG_FIELDS, with_new_names
from infinity.system import drives
from infinity.system.arena import Arena
from infinity.system.mounts import block_devices
from infinity.system.swap_errors import REMEDIES
from infinity.tools.doctor import devices, selftest, system, volumes
from infinity.tools.doctor.findings import Finding, Verdict, absent, attention, ok
from infinity.tools.progress import Progress

ARENA_NBYTES = 64 << 20  # of the trial region
RATES_SECONDS = 3.0  # per directory, at most

Check = tuple[str, Callable[[], Finding | list[Finding]]]


def doctor(arguments) -> int:
    """The `doctor` command; exit status 1 if anything needs attention."""
    before = signal.signal(signal.SIGTERM, _leave)  # SIGTERM raises SystemExit, so that scratch folders are removed
    try:
        return _doctor(arguments)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _doctor(arguments) -> int:
    report = _Report(shown=not arguments.json)
    cards = devices.read_cards()
    directories = list(dict.fromkeys(path.absolute() for path in arguments.directories or _default_directories()))
    report.section("system", _system(cards, directories))
    report.section("devices", _devices(cards))
    with contextlib.ExitStack() as stack:
        folders = {}
        for path in directories:
            report.section(f"directory {path}", _directory(path, folders, stack))
        if len(folders) > 1:
            report.section("directories", iter([("directories", lambda: volumes.together(folders))]))
        if arguments.seconds and folders:
            report.section("self-test", _self_test(folders, arguments.seconds), at_once=False)
    return report.close()


class _Report:
    """Findings by section, printed as they come. A terminal also shows the name of the running check until the check ends."""

    def __init__(self, shown: bool):
        self.shown = shown
        self.findings: list[tuple[str, Finding]] = []
        self._progress = Progress()

    def section(self, title: str, checks: Iterator[Check], *, at_once: bool = True) -> None:
        """at_once: print each finding at once. Otherwise all are printed after the last check, because the checks show progress."""
        self._print(f"\n{title}" if self.findings else title)
        late = []
        for finding in _findings(title, checks, self._say if at_once else None):
            self.findings.append((title, finding))
            if at_once:
                self._print(finding)
            else:
                late.append(finding)
        for finding in late:
            self._print(finding)

    def close(self) -> int:
        """Print the last line; returns the exit status."""
        self._say("")
        num = sum(finding.status is Verdict.ATTENTION for _, finding in self.findings)
        if not self.shown:
            listed = [{"section": title} | asdict(finding) | {"status": finding.status.name.lower()} for title, finding in self.findings]
            print(json.dumps({"findings": listed, "num_attention": num}, indent=2))
        self._print(f"\n{num or 'none'} of {len(self.findings)} need{'s' if num == 1 else ''} attention")
        return 1 if num else 0

    def _print(self, line) -> None:
        if self.shown:
            self._say("")
            print(line, flush=True)

    def _say(self, text: str) -> None:
        """Show the text on standard error, in place of the previous text."""
        if self._progress.live:
            self._progress.show(text, last=True)


def _findings(title: str, checks: Iterator[Check], say: Callable[[str], None] | None = None) -> Iterator[Finding]:
    """The findings of all checks. An error in a check, or between two checks, becomes a finding. say: receives the name of the next check."""
    try:
        with contextlib.closing(checks):
            for what, check in checks:
                if say is not None:
                    say(f"checking {what}")
                try:
                    found = check()
                except Exception as error:
                    found = _failed(what, error)
                yield from [found] if isinstance(found, Finding) else found
    except Exception as error:
        yield _failed(title.partition(" ")[0], error)


def _failed(what: str, error: Exception) -> Finding:
    detail = " ".join(f"{type(error).__name__}: {error}".split())
    remedy = REMEDIES.get(getattr(error, "errno", None), "see the error; if the error names no cause, report this text")
    return attention(what, f"the check failed: {detail}", remedy)


def _system(cards: list[devices.Card], directories: list[Path]) -> Iterator[Check]:
    yield "kernel", lambda: system.kernel(platform.release(), platform.machine())
    yield "versions", lambda: devices.versions(devices.read_versions(cards))
    yield "extensions", lambda: devices.kernels(_adam.isas(), platform.machine())
    yield "libaio", lambda: system.libaio(_libaio_failure())
    yield "settings", _settings
    yield "memory", lambda: system.memory(Path("/proc/meminfo").read_text(), system.read_memory_limit())
    yield "CPUs", lambda: system.processors(os.cpu_count(), len(os.sched_getaffinity(0)), system.read_cpu_quota())
    yield "NUMA", lambda: _numa(cards, directories)
    yield "huge pages", lambda: system.huge_pages(system.read_huge_pages())
    yield "arena pages", _arena_pages
    yield "memlock", _locked_memory
    yield "open files", lambda: system.open_files(*_limits(resource.RLIMIT_NOFILE))
    yield "aio-max-nr", lambda: system.aio_requests(*system.read_aio(), needed=_aio_needed(directories))


def _devices(cards: list[devices.Card]) -> Iterator[Check]:
    yield "GPU", lambda: devices.gpus(devices.read_seen(), cards, devices.cuda_version(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    for card in cards:
        yield f"PCIe {card.index}", lambda card=card: devices.link(card)
    yield "peer access", lambda: devices.peers(devices.read_reach())
    yield "distributed", lambda: devices.backends(devices.has_backend("gloo"), devices.has_backend("nccl"), devices.count())


def _directory(path: Path, folders: dict[Path, Path], stack: contextlib.ExitStack) -> Iterator[Check]:
    others = list(folders)
    try:
        folder = folders[path] = stack.enter_context(volumes.scratch(path))
    except OSError as error:
        finding = volumes.refused(path, error)
        yield "directory", lambda: finding
        return
    yield from volumes.checks(path, folder, others)


def _self_test(folders: dict[Path, Path], seconds: float) -> Iterator[Check]:
    start = time.monotonic()
    with Progress(live_seconds=0.1) as progress:
        yield from selftest.checks(list(folders.values()), seconds, progress.show)
        for path, folder in folders.items():
            left = (seconds - (time.monotonic() - start)) / len(folders)
            progress.show(f"self-test: rates of {path}")
            yield "rates", lambda: _rates(path, folder, min(left, RATES_SECONDS))


def _rates(path: Path, folder: Path, seconds: float) -> Finding:
    if seconds <= 0:
        return absent("rates", f"{path}: skipped: the time limit was reached; see --seconds")
    return volumes.rates(path, folder, seconds)


def _libaio_failure() -> OSError | None:
    try:
        aio_ext.require_libaio()
    except OSError as error:
        return error


def _settings() -> Finding:
    if not Path(config_files.DEFAULT_NAME).exists():
        return absent("settings", f"no {config_files.DEFAULT_NAME} here; `infinity calibrate DIR` writes one")
    try:
        if "config" not in config_files.read(config_files.DEFAULT_NAME):
            return absent("settings", f"{config_files.DEFAULT_NAME} has no table [config]: all settings have their defaults")
        Config.load(config_files.DEFAULT_NAME)
    except ConfigError as error:
        problems = "; ".join(str(error).splitlines())
        return attention("settings", f"{config_files.DEFAULT_NAME} cannot be used: {problems}", f"edit {config_files.DEFAULT_NAME}")
    return ok("settings", f"{config_files.DEFAULT_NAME} is valid")


def _default_directories() -> list[Path]:
    """The swap directories of training that starts here. They may be missing."""
    with contextlib.suppress(ConfigError, KeyError, TypeError):
        table = with_new_names(config_files.read(config_files.DEFAULT_NAME)["config"], CONFIG_FIELDS, f"{config_files.DEFAULT_NAME}: ")
        paths = table["swap_dirs"]
        return [Path(path).expanduser() for path in ([paths] if isinstance(paths, str) else paths)]
    return [DEFAULT_SWAP_DIR if DEFAULT_SWAP_DIR.is_dir() else Path(".")]


def _numa(cards: list[devices.Card], directories: list[Path]) -> list[Finding]:
    found = {}
    for path in filter(Path.exists, directories):
        for device in block_devices(volumes.read_mount(path)):
            found[device.name] = system.read_node_of(device)
    gpus = {f"GPU {card.index}": system.read_node_of(Path("/sys/bus/pci/devices", card.bus)) for card in cards}
    return system.numa(system.read_nodes(), os.sched_getaffinity(0), found, gpus)


def _arena_pages() -> Finding:
    arena = Arena()
    try:
        region = arena.region(ARENA_NBYTES)
        return system.arena_pages(Path("/proc/self/smaps").read_text(), region.address, region.nbytes)
    finally:
        arena.close()


def _locked_memory() -> Finding:
    num_devices, failure = devices.count(), ""
    arena = Arena(pin=num_devices > 0)
    try:
        if num_devices:
            arena.region(ARENA_NBYTES)
    except BudgetError as error:
        failure = str(error).partition(";")[0]
    finally:
        arena.close()
    return system.locked_memory(_limits(resource.RLIMIT_MEMLOCK)[0], num_devices, failure)


def _aio_needed(directories: list[Path]) -> int:
    """Requests in the queues of all ranks, with one rank per device."""
    needed = 0
    for path in directories:
        drive = None
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            drive = drives.load(fd)
        drive = drive or drives.Drive()
        needed += drive.depth * drive.num_queues
    return needed * max(1, devices.count())


def _limits(what: int) -> tuple[int | None, int | None]:
    return tuple(None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(what))


def _leave(number: int, frame) -> None:
    sys.exit(128 + number)
