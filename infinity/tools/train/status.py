"""The status of a run: a small file that exists while the run does, the view of this file, and the `status` command.

Knows numbers of a run, the path of the file, and process ids. Must not know engines: the run passes the numbers to show.
"""

# [Note: where a run's status lies]
# The file is PID.json in a directory of the user, under XDG_RUNTIME_DIR or the directory for temporary files. A directory of another user
# is not used. The file records the start time of the process, because a later process may have the same id. A thread writes the file at
# most once per second, so training never waits for the file, and an error there does not stop training. Once per second the thread also
# checks whether the run waits for something, writes the wait into the file, and draws the wait. After kill -9 a file remains, which the
# `status` command removes.

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infinity.errors import UsageError
from infinity.ordinary_file import read_ordinary
from infinity.output import if_several, table, write_json
from infinity.sizes import format_bytes
from infinity.system.waits import Wait
from infinity.tools.progress import Progress

WRITE_SECONDS = 1.0  # between two writes, and between two reads of --follow
LARGEST_NBYTES = 1 << 20  # of a status file
SILENT_SECONDS = 60  # without an update; then the view calls the run silent


@dataclass(frozen=True)
class Link:
    """A link during the last steps: the rate in GB/s, and the share of the time that the run waited for the link."""

    title: str
    gbps: float
    waited_share: float


@dataclass(frozen=True)
class Status:
    """The status of a run after a step. step counts from 1, and is 0 before the first step. step_seconds: median of the last steps.

    Memory is that of one rank, in bytes. checkpoint: name of the checkpoint that is being written. saved: name of the last whole checkpoint.
    waits: the chain of current waits, each the reason of the one before. waits_since, updated: seconds of the wall clock.
    """

    step: int
    steps: int
    world: int
    loss: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    links: tuple[Link, ...] = ()
    device_nbytes: int = 0
    device_budget_nbytes: int = 0
    host_nbytes: int = 0
    checkpoint: str | None = None
    saved: str | None = None
    waits: tuple[str, ...] = ()
    waits_since: float = 0.0
    pid: int = field(default_factory=os.getpid)
    born: int = field(default_factory=lambda: _born(os.getpid()))
    updated: float = field(default_factory=time.time)

    @property
    def seconds_left(self) -> float | None:
        return None if self.step_seconds is None else self.step_seconds * (self.steps - self.step)


# The view, for --live and for the command.


def line(status: Status) -> str:
    """The status in one line."""
    if status.step_seconds is None:
        return f"step {status.step}/{status.steps}  starting"
    return (
        f"step {status.step}/{status.steps}  loss {status.loss:.3f}  {status.step_seconds:.2f} s a step  "
        f"{status.tokens_per_second:,.0f} tokens/s  {format_seconds(status.seconds_left)} left"
    )


def view(status: Status) -> str:
    """The status in some lines."""
    waits = _waits(status, ":\n            ")
    if status.step_seconds is None:
        return "\n".join([line(status), *waits])
    a_rank = if_several(status.world, ", each a rank")
    silent = time.time() - status.updated
    note = f"  (silent for {format_seconds(silent)})" if silent > SILENT_SECONDS else ""
    memory = f"device {format_bytes(status.device_nbytes)} of {format_bytes(status.device_budget_nbytes)}"
    saving = f"saving {status.checkpoint}" if status.checkpoint else "no save now"
    if status.saved:
        saving += f", last {status.saved}"
    lines = [line(status) + note]
    if status.links:
        rows = [[link.title, f"{link.gbps:.2f}", f"{link.waited_share:.1%}"] for link in status.links]
        lines.append(table(["link", "GB/s", "step waited"], rows))
    lines += [f"memory      {memory}, host arena {format_bytes(status.host_nbytes)}{a_rank}", f"checkpoint  {saving}"]
    return "\n".join([*lines, *waits])


def _waits(status: Status, between: str = ": ") -> list[str]:
    """A line with the chain of waits, if the run waits. between: text between two waits."""
    return [f"waits       {format_seconds(time.time() - status.waits_since)} for {between.join(status.waits)}"] if status.waits else []


def format_seconds(seconds: float) -> str:
    """A duration in the two largest units: 42 s, 5 min 3 s, 2 h 7 min, 3 d 4 h."""
    whole = round(seconds)
    for unit, large, small_unit, small in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= large:
            return f"{whole // large} {unit} {whole % large // small} {small_unit}"
    return f"{whole} s"


class LiveView(Progress):
    """Draws a status in place on a terminal; other outputs receive a line every few seconds. Any thread may call it until the last call."""

    def __init__(self, stream=None):
        super().__init__(live_seconds=0.1, stream=stream)
        self._lock = threading.Lock()
        self._is_over = False

    def __call__(self, status: Status, *, last: bool = False) -> None:
        with self._lock:
            if not self._is_over:
                self.show(view(status) if self.live else "\n".join([line(status), *_waits(status)]), last=last)
            self._is_over = self._is_over or last

    def finish(self) -> None:
        with self._lock:
            self._is_over = True
            super().finish()


# The file.


class Reporter:
    """Keeps the status of this process in a file until `close`; see [Note: where a run's status lies].

    waits(): the current wait of the run, or None. show: receives the status during a wait, and once after the wait.
    """

    def __init__(self, waits: Callable[[], Wait | None] = lambda: None, show: Callable[[Status], None] = lambda status: None):
        self._waits, self._show = waits, show
        self._status: Status | None = None
        self._told, self._ended = threading.Event(), threading.Event()
        try:
            self.path = folder() / f"{os.getpid()}.json"
        except (OSError, UsageError):  # training continues without a status file
            self.path = None
            return
        self._thread = threading.Thread(target=self._loop, name="infinity-status", daemon=True)
        self._thread.start()

    def tell(self, status: Status) -> None:
        """Set the current status."""
        self._status = status
        self._told.set()

    def close(self) -> None:
        """End the thread and remove the file. Idempotent."""
        self._ended.set()
        self._told.set()
        if self.path is not None:
            self._thread.join(WRITE_SECONDS)
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _loop(self) -> None:
        written = None
        while True:
            was_told = self._told.wait(WRITE_SECONDS)
            self._told.clear()
            if self._ended.is_set():
                return
            status = self._now()
            if status == written:
                continue
            with contextlib.suppress(OSError, ValueError):
                write_json(self.path, dataclasses.asdict(status))
            if status.waits or (written is not None and written.waits):
                self._show(status)
            written = status
            if was_told:
                self._ended.wait(WRITE_SECONDS)

    def _now(self) -> Status | None:
        """The last status, with the current wait if the wait has lasted WRITE_SECONDS."""
        status, wait = self._status, self._waits()
        if status is None or wait is None or wait.seconds < WRITE_SECONDS:
            return status
        return dataclasses.replace(status, waits=wait.texts, waits_since=time.time() - wait.seconds)


def folder() -> Path:
    """The directory of this user's status files, created if missing. Raises UsageError if another user owns it, and OSError."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = Path(runtime) / "infinity" if runtime and os.path.isdir(runtime) else Path(tempfile.gettempdir()) / f"infinity-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    found = os.lstat(own)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UsageError(f"{own} is not a directory of user {os.getuid()}: remove it, or set XDG_RUNTIME_DIR to a directory of yours")
    if stat.S_IMODE(found.st_mode) & 0o077:
        own.chmod(0o700)
    return own


def read_status(path: Path) -> Status:
    """Raises UsageError if the file is missing or is no status file."""
    try:
        value = json.loads(read_ordinary(path, LARGEST_NBYTES))
        found = Status(**value | {"links": tuple(Link(**link) for link in value["links"]), "waits": tuple(value["waits"])})
        view(found)
        return found
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such run; `infinity status` lists active runs") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not the status file of a run; give a process id that `infinity status` lists") from error


def is_running(status: Status) -> bool:
    return status.born >= 0 and status.born == _born(status.pid)


def running() -> list[Status]:
    """The active runs of this user on this machine, oldest first. Removes files of ended runs. Raises as `folder`."""
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(UsageError):  # the run has just ended, or the file is no status file
            status = read_status(path)
            if is_running(status):
                found.append(status)
            elif path.stem == str(status.pid):
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda status: status.born)


def _born(pid: int) -> int:
    """Start time of a process in clock ticks since boot; -1 if the process does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] == "Z" else int(fields[19])


# The command.


def status(arguments) -> int:
    """The `status` command."""
    if arguments.run is None:
        if arguments.follow:
            raise UsageError("--follow needs a run: give a process id that `infinity status` lists")
        _list(arguments.json)
        return 0
    path = _path(arguments.run)
    found = read_status(path)
    if not is_running(found):
        raise UsageError(f"{path}: process {found.pid} has ended; `infinity status` lists active runs")
    if not arguments.follow:
        print(json.dumps(dataclasses.asdict(found), indent=2) if arguments.json else view(found))
        return 0
    if arguments.json:
        for now in _followed(path, found):
            print(json.dumps(dataclasses.asdict(now)), flush=True)  # one line per status
        return 0
    with LiveView(sys.stdout) as show:
        for found in _followed(path, found):
            show(found)
        show(found, last=True)
    print(f"process {found.pid} has ended")
    return 0


def _followed(path: Path, found: Status) -> Iterator[Status]:
    """Statuses of the run, every WRITE_SECONDS until the run ends. The first is `found`."""
    while True:
        yield found
        time.sleep(WRITE_SECONDS)
        try:
            found = read_status(path)
        except UsageError:  # the run has ended and removed the file
            return
        if not is_running(found):
            return


def _path(run: str) -> Path:
    try:
        return folder() / f"{run}.json" if run.isdecimal() else Path(run)
    except OSError as error:
        raise UsageError(f"the directory of status files cannot be used: {error}") from error


def _list(as_json: bool) -> None:
    try:
        runs = running()
    except OSError as error:
        raise UsageError(f"the directory of status files cannot be used: {error}") from error
    if as_json:
        print(json.dumps([dataclasses.asdict(found) for found in runs], indent=2))
        return
    if not runs:
        print("you have no active run on this machine")
        return
    width = shutil.get_terminal_size().columns
    for found in runs:
        for text in [f"{found.pid:>8}  {line(found)}", *(f"{'':>8}  {text}" for text in _waits(found))]:
            print(text[:width] if sys.stdout.isatty() else text)
