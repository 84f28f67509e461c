"""The search of `infinity calibrate` against a full grid of settings: the rate of each choice, and the time of each search.

    python bench/tune.py [--nvme DIR] [--rounds 3] [--pairs 41] [--json FILE] [--plot FILE]

In each round the search and a grid look for the fastest settings on the same written file. The grid measures each point three times, in
three passes, and takes the best median. Both choices are then measured in alternation. The ratio is the search's rate over the grid's,
in pairs. The bench prints median, least and greatest, and the interval of the median with a probability of 95 %. A control pairs the
grid's choice with itself, which shows the drive's own variation.
"""

import argparse
import math
import statistics
import time
from dataclasses import asdict
from pathlib import Path

from _common import exit_with, given, parse, positive, spread

from infinity import output
from infinity.sizes import format_bytes
from infinity.system.drives import Drive
from infinity.tools.measure import search
from infinity.tools.measure.drive_tuning import probe_in


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path("."), help="a file without a name is made in it")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--pairs", type=positive, default=41)
    options = parse(parser)
    report = {"options": given(options) | {"nvme": str(options.nvme)}, "rounds": []}
    with probe_in(options.nvme) as probe:
        start = Drive(inflight_write_nbytes=probe.patient_write_nbytes(probe.read_seconds()))
        points = search.grid(start)
        print(f"{len(points)} points, {search.GRID_ROUNDS} measurements each; to start with {said(start)}")
        for _ in range(options.rounds):
            found, num_measurements, seconds = searched(probe, start)
            best, rates, grid_seconds = gridded(probe, points)
            pairs = [side_by_side(probe, (found, best, best), number) for number in range(options.pairs)]
            ratios, control = [a / b for a, b, _ in pairs], [c / b for _, b, c in pairs]
            low, high = interval(ratios)
            print(f"search {said(found)} in {seconds:.1f} s, {num_measurements} measurements; grid {said(best)} in {grid_seconds:.1f} s")
            print(f"  rate of the search's over the grid's: {spread(ratios, 3)}, median within {low:.3f}-{high:.3f}")
            print(f"  of the grid's over itself: {spread(control, 3)}")
            print(f"  time of the search over the grid's: {seconds / grid_seconds:.3f}", flush=True)
            report["rounds"].append(
                {
                    "found": asdict(found),
                    "best": asdict(best),
                    "num_measurements": num_measurements,
                    "seconds": seconds,
                    "grid_seconds": grid_seconds,
                    "gbps": [[rate / 1e9 for rate in pair] for pair in pairs],
                    "grid_gbps": [{"drive": asdict(point), "gbps": rate / 1e9} for point, rate in rates.items()],
                }
            )
        probe.check()
    if options.json:
        output.write_json(options.json, report)
    if options.plot:
        plot(report, options.plot)


def searched(probe, start: Drive) -> tuple[Drive, int, float]:
    """(settings, measurements, seconds)."""
    number = 0

    def rate(drive):
        nonlocal number
        number += 1
        return probe.rate("mixed", drive)

    began = time.perf_counter()
    return search.search(start, rate), number, time.perf_counter() - began


def gridded(probe, points: list[Drive]) -> tuple[Drive, dict[Drive, float], float]:
    """(settings, rates by point, seconds)."""
    began = time.perf_counter()
    passes = [[probe.rate("mixed", point) for point in points] for _ in range(search.GRID_ROUNDS)]
    rates = {point: statistics.median(each) for point, each in zip(points, zip(*passes))}
    return max(points, key=rates.__getitem__), rates, time.perf_counter() - began


def side_by_side(probe, drives: tuple[Drive, ...], number: int) -> list[float]:
    """The rate of each drive. The number decides which is first, because a drive's speed may depend on the previous measurement."""
    order = [(number + place) % len(drives) for place in range(len(drives))]
    rates = {place: probe.rate("mixed", drives[place]) for place in order}
    return [rates[place] for place in range(len(drives))]


def said(drive: Drive) -> str:
    return f"{drive.num_queues} x {format_bytes(drive.block_nbytes)} of {format_bytes(drive.inflight_nbytes)}"


def interval(values: list[float]) -> tuple[float, float]:
    """The interval of the median with a probability of about 95 %, from order statistics."""
    values, half = sorted(values), 0.98 * math.sqrt(len(values))
    middle = (len(values) - 1) / 2
    return values[max(0, math.floor(middle - half))], values[min(len(values) - 1, math.ceil(middle + half))]


def plot(report: dict, path: Path) -> None:
    """Each round: the grid's points by rate, and both choices, measured in alternation."""
    plt = output.pyplot()
    figure, all_axes = plt.subplots(1, len(report["rounds"]), figsize=(5 * len(report["rounds"]), 4), layout="constrained", squeeze=False)
    for number, (axes, round_) in enumerate(zip(all_axes[0], report["rounds"]), start=1):
        axes.plot(sorted(point["gbps"] for point in round_["grid_gbps"]), ".", color="0.6", label="grid, by rank")
        ours, theirs, _ = zip(*round_["gbps"])
        for values, name, colour in ((ours, "search", "C0"), (theirs, "grid's best", "C1")):
            axes.axhline(statistics.median(values), color=colour, label=f"{name}, side by side")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("settings")
        axes.set_ylabel("GB/s, mixed")
        axes.set_title(f"round {number}: {round_['seconds']:.1f} s against {round_['grid_seconds']:.1f} s")
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    exit_with(main)
