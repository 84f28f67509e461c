"""Code shared by benches: options, exit status, medians with their spread, a training step, and processes for ranks.

Knows arguments, numbers, the loop of a step, a drive's rates, and torchrun. Must not know the compared engines.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from infinity import output
from infinity.errors import ConfigError, UsageError
from infinity.sizes import parse_bytes
from infinity.system import drives
from infinity.system.swap import MEASURE_FROM_NBYTES, Swap
from infinity.tools.measure.drive_tuning import probe_in

_REPORTS = "INFINITY_BENCH_REPORTS"  # names the directory of the ranks' reports


def parse(parser: argparse.ArgumentParser, *, plots: bool = True) -> argparse.Namespace:
    """Parse the options, with --json added, and --plot if the bench has a plot. A file that cannot be written or drawn ends the bench before any
    measurement."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)" if plots else argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot and not plots:
        parser.error("--plot: this bench draws nothing")
    try:
        output.check_file(options.json, "--json")
        output.check_plot(options.plot, "--plot")
    except (ConfigError, UsageError) as error:
        parser.error(str(error))
    return options


def at_least(least: int) -> Callable[[str], int]:
    """A type of options: whole numbers from `least` on."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return value

    return number


positive = at_least(1)


def positives(text: str) -> list[int]:
    """A type of options: positive numbers separated by commas."""
    return [positive(each) for each in text.split(",")]


def positive_float(text: str) -> float:
    """A type of options: positive numbers."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def nbytes_of(text: str) -> int:
    """A type of options: bytes, such as 60GiB."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def directory(text: str) -> str:
    """A type of options: an existing directory."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"there is no directory {text}; create it or name another")
    return text


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Run main and end with its status. Errors of the user, the system or a rank are one line and status 2, as in `infinity`."""
    try:
        sys.exit(main())
    except (ConfigError, UsageError, RunError) as error:
        said = str(error)
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    print(f"{Path(sys.argv[0]).name}: error: {'; '.join(said.splitlines())}", file=sys.stderr)
    sys.exit(2)


def given(options: argparse.Namespace) -> dict:
    """The options for JSON, without the names of files."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "plot")}


def spread(values: Sequence[float], digits: int = 4) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def few(values: Sequence[float], digits: int) -> str:
    """The first and the last values."""
    texts = [f"{value:.{digits}f}" for value in values]
    return " ".join(texts if len(texts) <= 12 else [*texts[:4], "...", *texts[-8:]])


def error_bars(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Distances from the medians to the least and the greatest, for matplotlib."""
    medians = [statistics.median(each) for each in values]
    return [[m - min(v) for m, v in zip(medians, values)], [max(v) - m for m, v in zip(medians, values)]]


def bars(path: Path, seconds: dict[str, Sequence[float]], title: str) -> None:
    """Draw the median step of each engine, with the least and the greatest."""
    pyplot = output.pyplot()
    figure, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    medians = [statistics.median(each) for each in seconds.values()]
    axes.bar_label(axes.bar(list(seconds), medians, 0.6, yerr=error_bars(list(seconds.values())), capsize=3), fmt="%.3g", padding=2)
    axes.margins(y=0.1)  # for the labels
    axes.set_ylabel("s a step")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def add_tolerance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tolerance", type=float, help="of losses, relative; default: 0.002 with --dtype fp32, else 0.02")


def add_place(parser: argparse.ArgumentParser) -> None:
    """Options of a bench that starts ranks of its own: the device, and where files go. --case is for the ranks."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", type=directory, default=".", help="the bench makes a directory there, and removes it")
    parser.add_argument("--case", help=argparse.SUPPRESS)


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulate", metavar="MACHINE", help="train without bytes on this machine")


def where(options: argparse.Namespace) -> str:
    """The device of the measurements, or the simulated machine."""
    return f"simulated {options.simulate}" if options.simulate else options.device


def apart(values: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference; infinite if a value is no number."""
    pairs = list(zip(values, others, strict=True))
    return max(abs(a - b) / abs(a) if a and math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs)


def agree(options: argparse.Namespace, worst: float, what: str = "losses") -> bool:
    """Whether a difference is within --tolerance. Prints both."""
    tolerance = options.tolerance
    if tolerance is None:
        tolerance = 0.002 if options.dtype == "fp32" else 0.02
    print(f"{what} differ by {worst:.1e} at most; up to {tolerance:g} is allowed", flush=True)
    return worst <= tolerance  # False for NaN


def synchronize(device: str) -> None:
    """Wait until the device has finished all queued work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def step(options: argparse.Namespace, model, optimizer, number: int) -> tuple[float, float]:
    """(seconds, loss) of one step with the tokens of this number, until the device has finished."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, options.vocab, (options.batch, options.seq + 1), generator=generator).to(options.device)
    start = time.perf_counter()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    synchronize(options.device)
    return time.perf_counter() - start, value


def drive_rates(path: Path, num_rounds: int) -> dict[str, float]:
    """Bytes a second of a directory's drive for each of drives.MIXES: medians, with an engine's settings."""
    folder = os.open(path, os.O_RDONLY)
    try:
        drive = drives.load(folder)
        if drive is None:
            Swap([path], expected_nbytes=MEASURE_FROM_NBYTES).close()  # measures the drives, as an engine would
            drive = drives.load(folder) or drives.Drive()
    finally:
        os.close(folder)
    with probe_in(path) as probe:
        found = [{mix: probe.rate(mix, drive) for mix in drives.MIXES} for _ in range(num_rounds)]
    return {mix: statistics.median(rates[mix] for rates in found) for mix in drives.MIXES}


class RunError(RuntimeError):
    """Ranks failed; the text is one line. so_far: each rank's report by `leave_so_far`, or nothing if a rank has none."""

    def __init__(self, reason: str, so_far: Sequence[dict] = ()):
        super().__init__(reason)
        self.so_far = list(so_far)


class RunEnded(SystemExit):
    """The bench was ended from outside. so_far: as in `RunError`."""

    def __init__(self, code: object, so_far: Sequence[dict]):
        super().__init__(code)
        self.so_far = list(so_far)


def on_ranks(
    script: str, arguments: Sequence[str], num_ranks: int, timeout: float, told: Callable[[dict], None] = lambda report: None
) -> list[dict]:
    """Run a script on ranks of this host with torchrun. Returns each rank's report by `leave`. timeout: seconds. Reports of rank 0 by
    `leave_so_far` are passed on within a second.

    Raises RunError.
    """
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": str(max(1, cores // num_ranks)), **os.environ, _REPORTS: folder}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen([*command, script, *arguments], env=environment, **pipes) as process:
            try:
                said = _follow(process, Path(folder, "so-far0"), timeout, told)
            except BaseException as error:
                process.terminate()  # torchrun ends its ranks
                process.communicate()
                so_far = _left(folder, "so-far").values()
                so_far = so_far if len(so_far) == num_ranks else ()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RunError(f"not over after {timeout:g} s", so_far) from None
                if isinstance(error, SystemExit):
                    raise RunEnded(error.code, so_far) from None
                raise
        reports, so_far = _left(folder, "rank"), _left(folder, "so-far").values()
    if len(so_far) < num_ranks:
        so_far = ()
    for report in reports.values():
        if "error" in report:
            raise RunError(report["error"], so_far)
    if process.returncode or len(reports) < num_ranks:
        codes = re.findall(r"exitcode\s*: (-?\d+)", said) or [process.returncode]
        raise RunError(f"a rank ended with exit code {codes[0]} and without a word", so_far)
    return [reports[f"rank{rank}"] for rank in range(num_ranks)]


def _follow(process: subprocess.Popen, so_far: Path, timeout: float, told: Callable[[dict], None]) -> str:
    """The output of a process until its end, while its reports are passed on. Raises TimeoutExpired."""
    end, last = time.monotonic() + timeout, None
    while True:
        try:
            said, _ = process.communicate(timeout=min(1.0, max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            said = None
        if so_far.exists() and (report := so_far.read_text()) != last:
            last = report
            told(json.loads(report))
        if said is not None:
            return said
        if time.monotonic() >= end:
            raise subprocess.TimeoutExpired(process.args, timeout)


def _left(folder: str, kind: str) -> dict[str, dict]:
    """The ranks' reports, the oldest first. On a full disk a report is an empty file."""
    paths = sorted(Path(folder).glob(f"{kind}*"), key=lambda path: path.stat().st_mtime_ns)
    return {path.name: json.loads(path.read_text() or '{"error": "the disk had no room for a report"}') for path in paths}


def leave(work: Callable[[], dict]) -> None:
    """In a rank: do the work, and report the result, or the first line of the error, to `on_ranks`."""
    path = Path(os.environ[_REPORTS], f"rank{os.environ['RANK']}")
    try:
        report = work()
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        path.write_text(json.dumps({"error": f"{type(error).__name__}: {first[:300]}"}))
        raise
    path.write_text(json.dumps(report))


def leave_so_far(report: dict) -> None:
    """In a rank: report intermediate results, for a run that does not reach the end."""
    path = Path(os.environ[_REPORTS], f"so-far{os.environ['RANK']}")
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(report))
    aside.replace(path)
