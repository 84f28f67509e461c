"""Weak scaling, in which each GPU has the same work: measured on the GPUs of one machine, and simulated on up to 64 nodes.

    python bench/weak.py [--measured FILE] [--row "3 B, host"] [--node h200x8] [--nodes 1 4 16 64] [--json FILE] [--plot FILE]

--measured: a --json file of bench/predict.py with the row on one GPU, and on several, such as "3 B, host, 4 GPUs". The machine of that file
gives the predictions for these numbers of GPUs. --node gives the predictions for whole nodes. The exit status is 1 if a prediction for a measured
number is more than 10 % off.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path

import _common
import predict

from infinity.output import pyplot, table, write_json
from infinity.tools.machine import Machine

MOST_ERROR = 0.10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--row", choices=[name for name in predict.ON_SEVERAL if name not in predict.FOR_SEVERAL], default="3 B, host")
    parser.add_argument("--node", type=Path, default=Path("h200x8"))
    parser.add_argument("--nodes", type=_common.positive, nargs="+", default=[1, 4, 16, 64])
    options = _common.parse(parser)
    row, node, found = predict.row_of("cuda", options.row), Machine.load(options.node), []
    if options.measured:
        machine, seconds = read(parser, options)
        for num, measured_s in seconds.items():
            found.append({"gpus": num, "machine": machine.name, "measured_s": measured_s} | seconds_of(row, machine, num, 1))
    measured = {each["gpus"] for each in found}
    for nodes in options.nodes:
        if (num := nodes * node.devices) in measured:
            continue
        found.append({"gpus": num, "machine": node.name, "measured_s": None} | seconds_of(row, node, node.devices, nodes))
    rows = [
        [
            str(each["gpus"]),
            each["machine"],
            f"{each['predicted_s']:.3f}" if each["predicted_s"] else each["error"],
            f"{each['measured_s']:.3f}" if each["measured_s"] else "-",
            f"{error_of(each):+.1%}" if each["measured_s"] else "-",
        ]
        for each in found
    ]
    print(table(["GPUs", "machine", "predicted, s", "measured, s", "error"], rows))
    if options.json:
        write_json(options.json, {"row": options.row, "rows": found})
    if options.plot:
        plot(options, found)
    return int(any(abs(error_of(each)) > MOST_ERROR for each in found if each["measured_s"]))


def read(parser, options) -> tuple[Machine, dict[int, float]]:
    """The machine of --measured, and the measured seconds by number of GPUs."""
    try:
        content = json.loads(options.measured.read_text())
        rows, machine = content["rows"], Machine.from_table(content["machine"])
        names = {1: options.row} | {num: f"{options.row}, {num} GPUs" for num in range(2, machine.devices + 1)}
        seconds = {num: rows[name]["measured"]["s"] for num, name in names.items() if "s" in rows.get(name, {}).get("measured", {})}
    except (ValueError, KeyError, TypeError, AttributeError):
        parser.error(f"--measured {options.measured}: expected a --json file of bench/predict.py")
    if not seconds:
        parser.error(f"--measured {options.measured}: it has no measured row {options.row!r}, on one GPU or on several")
    return machine, seconds


def seconds_of(row: predict.Row, machine: Machine, devices: int, nodes: int) -> dict:
    made = predict.predicted(dataclasses.replace(row, num_ranks=devices), dataclasses.replace(machine, nodes=nodes))
    return {"predicted_s": made.get("s"), "error": made.get("error")}


def error_of(each: dict) -> float:
    """Relative; infinite without a prediction."""
    return each["predicted_s"] / each["measured_s"] - 1 if each["predicted_s"] else math.inf


def plot(options, found: list[dict]) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    most = 0.0
    for kind, style in (("predicted", "o-"), ("measured", "x")):
        points = [(each["gpus"], each[f"{kind}_s"]) for each in found if each[f"{kind}_s"]]
        axis.plot([num for num, _ in points], [seconds for _, seconds in points], style, label=kind)
        most = max([most, *(seconds for _, seconds in points)])
    axis.set(xscale="log", xlabel="GPUs", ylabel="seconds a step", ylim=(0, 1.2 * most), title=f"{options.row}: the same work for each GPU")
    axis.set_xticks([each["gpus"] for each in found], [str(each["gpus"]) for each in found])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(loc="lower left")
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    _common.exit_with(main)
