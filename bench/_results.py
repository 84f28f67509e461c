"""Writes bench/RESULTS.md from the data in bench/results/.

    python bench/_results.py [--check]

Knows the topics, with one JSON file each: title, text, command, names of columns, and rows. Must not know what a column means. `--check`
writes nothing and returns status 1 if the page does not match the data.
"""

import json
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
PAGE = FOLDER.parent / "RESULTS.md"
TOPICS = (
    "machines",
    "finetune",
    "finetune_memory",
    "layerwise",
    "peers_nvme",
    "peers_memory",
    "throughput",
    "largest",
    "largest_by_placement",
    "overhead",
    "kernel",
    "drives",
    "transfers",
    "prefetch",
    "memory",
    "placement",
    "tiling",
    "activations",
    "gradients",
    "split_simulated",
    "checkpoints",
    "other_ranks",
    "lost_ranks",
    "start",
    "prediction",
    "prediction_cpu",
    "weak",
    "scale",
    "sizes",
    "needs_memory",
    "needs_bandwidth",
    "needs_efficiency",
    "trillion",
    "precision",
    "codec",
    "experiments",
)
HEAD = """\
# Results

<!-- Written by bench/_results.py from the files in bench/results/. Edit these files, then run `python bench/_results.py`. -->

Each row is one measurement. A value is the median of the counted steps, and a range has the fastest and the slowest one. "Version" is the
commit that recorded the measurement, and "date" is the day of that commit. A table's command runs the measurement, with the options of the
row. "the same" stands for the last full list of options above. Times and rates depend on the drive, and drives of one kind differ by a
factor of two. The same data, for programs: `bench/results/*.json`.
"""


def page() -> str:
    return "\n".join([HEAD, *(section(read(topic)) for topic in TOPICS)])


def read(topic: str) -> dict:
    """The data of a topic. Numbers stay as they are written, so that 0.500 does not become 0.5. Raises ValueError for a row with an unknown
    column, and for a column without values."""
    path = FOLDER / f"{topic}.json"
    data = json.loads(path.read_text(), parse_float=str, parse_int=str)
    used = {name for row in data["rows"] for name in row}
    if wrong := used ^ set(data["columns"]):
        raise ValueError(f"{path}: {sorted(wrong)} are not both in `columns` and in a row")
    return data


def section(data: dict) -> str:
    """One topic: title, text, the command of all rows, the table."""
    columns, command = data["columns"], data.get("command", "")
    table = [columns, ["---"] * len(columns), *([_cell(name, row.get(name, "")) for name in columns] for row in data["rows"])]
    run = [f"Command: {command if '`' in command else f'`{command}`'}", ""] if command else []
    return "\n".join([f"## {data['title']}", "", *data["about"], "", *run, *(f"| {' | '.join(row)} |" for row in table), ""])


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
