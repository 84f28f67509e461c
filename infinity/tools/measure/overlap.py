"""The `bench overlap` command: the share of reads, copies and gathers of weights that an engine hides behind compute of a given time.

Knows options, results and their table and plot. Must not know how a stage or a pass is run, or how an error ends the process.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence

from infinity.errors import ConfigError
from infinity.output import check_file, check_plot, give, pyplot, table
from infinity.plan.host_memory import WEIGHT_SLOTS
from infinity.plan.packing import default_chunk_numel
from infinity.sizes import format_bytes
from infinity.system.capacity import host_free_nbytes
from infinity.system.ranks import Ranks
from infinity.tools.measure.overlap_bench import STAGES, Bench
from infinity.tools.measure.probes import launched
from infinity.tools.progress import Progress

_NOISE = 0.05  # measurement error of an efficiency: within this distance of 0 to 1, values are plausible


def overlap(arguments) -> int:
    """The `bench overlap` command."""
    check_file(arguments.output, "--output")
    check_plot(arguments.plot, "--plot")
    if arguments.layers > WEIGHT_SLOTS:
        raise ConfigError(
            f"--layers {arguments.layers}: the bench measures each stage alone with all layers in host memory; give {WEIGHT_SLOTS} at most"
        )
    if min(arguments.depth) < 2:
        raise ConfigError(f"--depth {min(arguments.depth)}: copies run two layers ahead, and reads run before copies; give 2 at least")
    with launched(arguments.device) as (device, ranks):
        if arguments.balance and device.type != "cpu":
            raise ConfigError(f"--balance with device {device}: the bench extends stages only on the CPU; leave it out or give --device cpu")
        for chunk_mib in arguments.chunk_mib:
            _check_memory(chunk_mib, arguments.layers, ranks)
        rows = []
        with Progress() as progress:
            for chunk_mib in arguments.chunk_mib:
                with Bench(arguments, device, chunk_mib, ranks.world) as bench:
                    for depth in arguments.depth:
                        if ranks.is_first:
                            progress.show(f"chunks of {chunk_mib:g} MiB, {depth} ahead", last=True)
                        rows.append(bench.measure(depth, arguments.repeats))
        if ranks.is_first:
            head = {"device": str(device), "world": ranks.world, "layers": arguments.layers, "repeats": arguments.repeats}
            report = head | {"balanced": arguments.balance, "hint": hint_of(rows), "rows": rows}
            give(report, text(report), arguments.json, arguments.output)
            if arguments.plot:
                draw(report, arguments.plot)
    return 0


def text(report: dict) -> str:
    """The report as a table, in milliseconds per layer."""
    head = ["chunk", "ahead", *report["rows"][0]["stages"], "serial", "longest", "pipelined", "", "efficiency", ""]
    rows = []
    for row in report["rows"]:
        alone = list(map(min, row["stages"].values()))
        cells = [f"{1e3 * seconds / report['layers']:.2f}" for seconds in (*alone, sum(alone), max(alone))]
        pipelined = _spread([1e3 * seconds / report["layers"] for seconds in row["pipelined"]])
        rows.append([f"{row['chunk_mib']:g} MiB", str(row["depth"]), *cells, *pipelined, *_spread(row["efficiency"])])
    ranks = f"{report['world']} ranks" if report["world"] > 1 else "1 rank"
    balanced = ", all stages extended to one time" if report["balanced"] else ""
    about = f"passes over {report['layers']} layers, all weights from NVMe, {ranks} on {report['device']}{balanced}"
    how = f"ms per layer; stages alone: fastest of {report['repeats']}, pipelined: median (lowest-highest); all bytes of a pass were compared"
    hint = hint_of(report["rows"])
    return f"{about}\n{how}\n\n{table(head, rows)}" + (f"\n\n{hint}" if hint else "")


def hint_of(rows: Sequence[dict]) -> str | None:
    """An explanation of efficiencies outside 0 to 1, or None if all are inside."""
    outside = [value for row in rows for value in row["efficiency"] if not -_NOISE <= value <= 1 + _NOISE]
    if not any(map(math.isfinite, outside)):
        return None
    return (
        "efficiencies outside 0 to 1 are noise, and the other values of the row are unreliable. Above 1, other work disturbed the stages "
        "alone; below 0, the passes. Run the bench again when no other program runs here, with more --repeats. On the CPU, --balance makes "
        "stages longer than the noise."
    )


def _check_memory(chunk_mib: float, num_layers: int, ranks: Ranks) -> None:
    """Raise ConfigError if memory is too small for the layers and their expected values."""
    numel = default_chunk_numel(chunk_mib, ranks.world)
    # A rank first makes all numbers in fp32 and converts them to bf16. Later the rank holds its share of the layers beside the bf16 numbers.
    nbytes = int(2 * numel * max(3, 1 + num_layers / ranks.world) * ranks.num_local)
    if nbytes > (free_nbytes := host_free_nbytes()):
        raise ConfigError(
            f"--chunk-mib {chunk_mib:g}: {num_layers} layers and their expected values take {format_bytes(nbytes)} of host memory, "
            f"of which {format_bytes(free_nbytes)} are free; lower --layers or --chunk-mib"
        )


def _spread(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"({min(values):.2f}-{max(values):.2f})"


def draw(report: dict, path) -> None:
    """Draw the times by chunk size and depth, and the jobs of the last pass in the row with the highest efficiency."""
    pyplot_ = pyplot()
    rows, layers = report["rows"], report["layers"]
    figure, (bars, gantt) = pyplot_.subplots(2, 1, figsize=(max(8, 2 + 1.3 * len(rows)), 7.5), height_ratios=(3, 2), layout="constrained")
    width, scale, top = 0.27, 1e3 / layers, 0.0
    for place, row in enumerate(rows):
        alone, pipelined = {stage: min(seconds) for stage, seconds in row["stages"].items()}, statistics.median(row["pipelined"])
        bottom = 0.0
        for stage, seconds in alone.items():
            bars.bar(place - width, seconds * scale, 0.9 * width, bottom, color=STAGES[stage], label=None if place else stage)
            bottom += seconds * scale
        bars.bar(place, max(alone.values()) * scale, 0.9 * width, color="#bab0ac", label=None if place else "longest stage")
        spread = [[(pipelined - min(row["pipelined"])) * scale], [(max(row["pipelined"]) - pipelined) * scale]]
        style = {"color": "#4a4a4a", "ecolor": "#9a9a9a", "capsize": 3, "label": None if place else "pipelined"}
        bars.bar(place + width, pipelined * scale, 0.9 * width, yerr=spread, **style)
        highest = max(bottom, max(row["pipelined"]) * scale)
        bars.text(place, highest, f"{statistics.median(row['efficiency']):.2f}", ha="center", va="bottom")
        top = max(top, highest)
    bars.set_ylim(0, 1.25 * top)
    bars.set_xticks(range(len(rows)), [f"{row['chunk_mib']:g} MiB\n{row['depth']} ahead" for row in rows])
    bars.set_ylabel("ms per layer")
    bars.set_title("stages alone, stacked; the longest stage; a pass through the engine; above: overlap efficiency", fontsize=10)
    bars.legend(ncols=6, loc="upper center", frameon=False, fontsize=9)

    best = max(rows, key=lambda row: statistics.median(row["efficiency"]))
    for height, (stage, found) in enumerate(best["bars"].items()):
        for number, (start, end) in enumerate(found):
            gantt.barh(height, 1e3 * (end - start), 0.75, 1e3 * start, color=STAGES[stage], alpha=1 - 0.35 * (number % 2))
    gantt.set_yticks(range(len(best["bars"])), list(best["bars"]))
    gantt.invert_yaxis()
    gantt.set_xlim(0)
    gantt.set_xlabel("ms since the start of the pass")
    gantt.set_title(f"one pass over {layers} layers, chunks of {best['chunk_mib']:g} MiB, {best['depth']} ahead", fontsize=10)
    if report["hint"]:
        figure.suptitle(textwrap.fill(report["hint"], 120), fontsize=8, color="#b03a2e")
    for axes in (bars, gantt):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot_.close(figure)
