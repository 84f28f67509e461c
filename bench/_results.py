"""Writes bench/RESULTS.md from the tables in bench/results/.

    python bench/_results.py [--check]

Knows topics.toml, which lists the topics, and one CSV file per topic. Must not know what a column means. `--check` writes nothing and
returns status 1 if the page does not match the tables.
"""

import csv
import re
import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
PAGE = FOLDER.parent / "RESULTS.md"
HEAD = """\
# Results

<!-- Written by bench/_results.py from the files in bench/results/. Edit these files, then run `python bench/_results.py`. -->

Each row is one measurement. A value is the median of the counted steps, and a range has the fastest and the slowest one. "Version" is the
commit that recorded the measurement, and "date" is the day of that commit. A table's command runs the measurement, with the options of the
row. "the same" stands for the last full list of options above. Times and rates depend on the drive, and drives of one kind differ by a
factor of two.
"""


def page() -> str:
    topics = tomllib.loads((FOLDER / "topics.toml").read_text())["topics"]
    return "\n".join([HEAD, *(section(**topic) for topic in topics)])


def section(file: str, title: str, about: str, command: str = "") -> str:
    """One topic: title, text, the command of all rows, the table without empty columns."""
    header, *rows = read(file)
    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    cells = ([_cell(header[column], row[column]) for column in used] for row in rows)
    table = [[header[column] for column in used], ["---"] * len(used), *cells]
    run = [f"Command: {command if '`' in command else f'`{command}`'}", ""] if command else []
    return "\n".join([f"## {title}", "", about.strip(), "", *run, *(f"| {' | '.join(row)} |" for row in table), ""])


def read(file: str) -> list[list[str]]:
    """The rows of a table, the header first. Raises ValueError if a row has another number of cells."""
    with open(FOLDER / file, newline="") as stream:
        rows = list(csv.reader(stream))
    wrong = [number for number, row in enumerate(rows, 1) if len(row) != len(rows[0])]
    if wrong:
        raise ValueError(f"{FOLDER / file}: lines {wrong} do not have the header's {len(rows[0])} cells")
    return rows


def _cell(column: str, text: str) -> str:
    if column not in ("options", "command"):
        return text
    return re.sub(r"^(the same )?((?:--|python |infinity |torchrun |pytest |Arena\().*)", r"\1`\2`", text)


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return PAGE.read_text() != page()
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
