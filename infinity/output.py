"""The output of commands: files that are replaced atomically, tables of text, and plots.

Knows paths, rows, columns and standard error. Must not know the content of an output.
"""

import contextlib
import json
import os
import select
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from infinity.errors import ConfigError, UsageError


def check_file(path: Path | None, option: str) -> None:
    """Raise ConfigError if a file cannot be written there. A command calls this function first. For None, do nothing."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; name a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{option} {path} is no ordinary file, and would be replaced; name another")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path  # the path that `write_text` writes
    if target.is_symlink():
        raise ConfigError(f"{option} {path} is a link that leads to itself; name another")
    if not target.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {target.parent}; create it or name another")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: {target.parent} is not writable; name another")


def check_different(paths: Mapping[str, Path]) -> None:
    """Raise ConfigError if two options name the same file. paths: by option."""
    seen = {}
    for option, path in paths.items():
        other = seen.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(f"{other} {paths[other]} and {option} {path} are one file, and one would replace the other; name two")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: write a temporary file, then rename it. A link stays a link, and an existing file keeps its mode."""
    path = path.resolve()
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, mode)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def if_several(world: int, text: str) -> str:
    """The text if there are several ranks, or an empty one."""
    return text if world > 1 else ""


def say(text: str) -> None:
    """Print a line on standard error, in place of a line of progress."""
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{erase}infinity: {text}", file=sys.stderr, flush=True)


def say_if_possible(text: str) -> None:
    """As `say`, but without an error or a wait: no line is printed if standard error is closed, or is a pipe that nobody reads."""
    with contextlib.suppress(Exception):
        if _takes_a_line(sys.stderr):
            say(text)


def _takes_a_line(stream) -> bool:
    try:
        return bool(select.select([], [stream], [], 0)[1])
    except (OSError, ValueError):  # no file, as in a notebook
        return True


def write_json(path: Path, report) -> None:
    """As `write_text`."""
    write_text(path, json.dumps(report, indent=2) + "\n")


def give(report, text: str, as_json: bool, output: Path | None = None) -> None:
    """Print the result of a command: the text, or with as_json the report. output: a file that also receives the report."""
    print(json.dumps(report, indent=2) if as_json else text, flush=True)
    if output is not None:
        write_json(output, report)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns of minimal width. The first column is aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def check_plot(path: Path | None, option: str) -> None:
    """As `check_file`. Also raises ConfigError for an unknown kind of picture, and UsageError without matplotlib."""
    check_file(path, option)
    if path is not None:
        kinds = pyplot().gcf().canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in kinds:
            raise ConfigError(f"{option} {path}: expected a name that ends in .png, .svg or .pdf")


def pyplot():
    """matplotlib's pyplot, which draws into files. Without matplotlib, raises UsageError, which names the package to install."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib: pip install matplotlib (the extra infinity-offload[plot]); everything else works without"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
