"""What benches share: options that name files, medians with their spread, and ranks of their own.

Knows arguments, numbers and torchrun. Must not know what is measured.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from infinity import output
from infinity.errors import ConfigError, UsageError

_REPORTS = "INFINITY_BENCH_REPORTS"  # names the directory in which ranks leave theirs


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with --json and --plot added: what cannot be written or drawn ends it before anything is measured."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    options = parser.parse_args()
    try:
        output.check_file(options.json, "--json")
        output.check_plot(options.plot, "--plot")
    except (ConfigError, UsageError) as error:
        parser.error(str(error))
    return options


def given(options: argparse.Namespace) -> dict:
    """The options as JSON takes them, without those that name files."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "plot")}


def spread(values: Sequence[float], digits: int = 4) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def error_bars(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """From the medians down to the least and up to the greatest, as matplotlib takes them."""
    medians = [statistics.median(each) for each in values]
    return [[m - min(v) for m, v in zip(medians, values)], [max(v) - m for m, v in zip(medians, values)]]


class RunError(RuntimeError):
    """Ranks failed; says why in one line."""


def on_ranks(script: str, arguments: Sequence[str], num_ranks: int, timeout: float) -> list[dict]:
    """What each rank of a script left with `leave`, started by torchrun on so many ranks of this host; seconds of time.

    Raises RunError.
    """
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": str(max(1, cores // num_ranks)), **os.environ, _REPORTS: folder}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen([*command, script, *arguments], env=environment, **pipes) as process:
            try:
                said, _ = process.communicate(timeout=timeout)
            except BaseException as error:
                process.terminate()  # torchrun ends its ranks
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RunError(f"not over after {timeout:g} s") from None
                raise
        paths = sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        reports = {path.name: json.loads(path.read_text()) for path in paths}
    for report in reports.values():
        if "error" in report:
            raise RunError(report["error"])
    if process.returncode or len(reports) < num_ranks:
        codes = re.findall(r"exitcode\s*: (-?\d+)", said) or [process.returncode]
        raise RunError(f"a rank ended with exit code {codes[0]} and without a word")
    return [reports[f"rank{rank}"] for rank in range(num_ranks)]


def leave(work: Callable[[], dict]) -> None:
    """In a rank: do the work, and leave its result, or the first line of its error, to `on_ranks`."""
    path = Path(os.environ[_REPORTS], f"rank{os.environ['RANK']}")
    try:
        report = work()
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        path.write_text(json.dumps({"error": f"{type(error).__name__}: {first[:300]}"}))
        raise
    path.write_text(json.dumps(report))
