"""What commands give out: files that are written whole, tables of text, and plots.

Knows paths, rows and columns. Must not know what they say.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from infinity.errors import ConfigError, UsageError


def check_file(path: Path | None, option: str) -> None:
    """Raise ConfigError if a file could not be written there, before anything else is done. None is no path."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; name a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{option} {path} is no ordinary file, and would be replaced; name another")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path  # where `write_text` writes
    if target.is_symlink():
        raise ConfigError(f"{option} {path} is a link that leads to itself; name another")
    if not target.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no directory {target.parent}; create it or name another")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: {target.parent} is not writable; name another")


def check_different(paths: Mapping[str, Path]) -> None:
    """Raise ConfigError if two options name one file. paths: by option."""
    seen = {}
    for option, path in paths.items():
        other = seen.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(f"{other} {paths[other]} and {option} {path} are one file, and one would replace the other; name two")


def write_text(path: Path, text: str) -> None:
    """Old or new, whole: written aside, then renamed. A link stays one, and a file that was there keeps its mode."""
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


def say(text: str) -> None:
    """A line on standard error, in place of what a line of progress left there."""
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{erase}infinity: {text}", file=sys.stderr, flush=True)


def write_json(path: Path, report) -> None:
    """As `write_text`."""
    write_text(path, json.dumps(report, indent=2) + "\n")


def give(report, text: str, as_json: bool, output: Path | None = None) -> None:
    """What a command found: on standard output the text, or the report in its place; the report in a file, too, where one is named."""
    print(json.dumps(report, indent=2) if as_json else text, flush=True)
    if output is not None:
        write_json(output, report)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text as wide as they must be: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def check_plot(path: Path | None, option: str) -> None:
    """As `check_file`, and that a picture of this kind can be drawn. Raises UsageError without matplotlib, too."""
    check_file(path, option)
    if path is not None:
        kinds = pyplot().gcf().canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in kinds:
            raise ConfigError(f"{option} {path}: expected a name that ends in .png, .svg or .pdf")


def pyplot():
    """matplotlib's pyplot, drawing into files. Raises UsageError, naming what to install, where there is none."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib: pip install matplotlib (the extra infinity-offload[plot]); everything else works without"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
