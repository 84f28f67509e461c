"""The output of `calibrate`: tables, warnings, and the value of --json.

Knows figures and their units. Must not know how a figure is measured, or the files of calibrate.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from infinity.output import if_several, table
from infinity.sizes import format_bytes
from infinity.system import drives, swap_paths
from infinity.tools.machine import Machine
from infinity.tools.measure.drive_tuning import TunedDrive
from infinity.tools.measure.figures import MOST_SPREAD, Figure

BUSY_SHARE = 0.1  # of the cores; above it, calibrate warns of other processes

_LINKS = [  # output: text, figure of one device, figure of all devices at once, unit, name of the unit
    ("h2d", "h2d", "h2d_all", 1e9, "GB/s"),
    ("d2h", "d2h", "d2h_all", 1e9, "GB/s"),
    ("h2d and d2h", "both", "both_all", 1e9, "GB/s"),
    ("all_gather", "", "gather", 1e9, "GB/s"),
    ("reduce_scatter", "", "reduce", 1e9, "GB/s"),
    ("products", "product", "", 1e12, "TFLOP/s"),
    ("products, while drives work", "product_beside_drives", "", 1e12, "TFLOP/s"),
    ("attention, as if not causal", "attention", "", 1e12, "TFLOP/s"),
    ("device memory, read and written", "device_memory", "", 1e9, "GB/s"),
    ("updates, on the device", "device_update", "", 1e9, "Gparam/s"),
    ("updates, in host memory", "update", "", 1e9, "Gparam/s"),
    ("host memory, read and written", "memory", "", 1e9, "GB/s"),
    ("a small copy", "copy_s", "", 1e-6, "us"),
    ("a small all_gather", "", "gather_s", 1e-6, "us"),
    ("overhead of an op", "op_s", "", 1e-6, "us"),
    ("overhead of a job on a chunk", "job_s", "", 1e-6, "us"),
]
_AXES = {"inflight_nbytes": "in the kernel", "block_nbytes": "block", "num_queues": "queues"}


def is_busy(num_busy: float) -> bool:
    """Whether other processes kept so many cores busy that no figure is sure."""
    return num_busy > BUSY_SHARE * len(os.sched_getaffinity(0))


def calibration_warnings(machine: Machine, found: list[TunedDrive], links: dict[str, Figure], num_busy: float) -> list[str]:
    """One line per figure that does not repeat, and per cause. machine: as written to the file. num_busy: cores that other processes kept
    busy."""
    names = {key: (f"{text}, all at once" if all_ == key else text, unit, name) for text, one, all_, unit, name in _LINKS for key in (one, all_)}
    lines = [_unsure(*names[key], figure) for key, figure in links.items() if not figure.repeats]
    for each in found:
        lines += [_unsure(f"{each.path}, {mix}", 1e9, "GB/s", figure) for mix, figure in each.together.items() if not figure.repeats]
    if is_busy(num_busy):
        cores = len(os.sched_getaffinity(0))
        lines.append(f"other processes kept {num_busy:.1f} of {cores} cores busy during calibrate: no new figure is sure, and sure earlier ones stay")
    if unsure := machine.unsure_names:
        lines.append(f"written as unsure: {', '.join(unsure)}")
    again = bool(lines)
    lines += map(str, swap_paths.shared_drives([each.path for each in found]))
    if len(found) > 1:
        lines += map(str, swap_paths.slow_directories({each.path: each.alone["mixed"].value for each in found}))
    if again:
        lines.append("run calibrate again when no other program runs on this machine")
    return lines


def _unsure(text: str, unit: float, name: str, figure: Figure) -> str:
    values = ", ".join(f"{value / unit:.3g}" for value in figure.values)
    return f"{text}: {values} {name} in {len(figure.values)} rounds: the values differ by more than {MOST_SPREAD:.0%}"


def calibration_report(output: Path, machine: Machine, found: list[TunedDrive], links: dict[str, Figure], warned: list[str]) -> dict:
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


def calibration_text(found: list[TunedDrive], links: dict[str, Figure], world: int) -> str:
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
    lines += [table(head, rows), f"\nlinks and processors{if_several(world, f', {world} devices')}\n"]
    return "\n".join([*lines, table(["", "one device", "all at once, each", ""], _link_rows(links))])


def _row(each: TunedDrive, rates: dict[str, Figure], suffix: str = "") -> list[str]:
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
