"""Weak scaling, in which each GPU has the same work: on 1 and 2 GPUs measured, and on up to 64 nodes simulated.

    python bench/weak.py [--measured FILE] [--row "3 B, host"] [--node h200x8] [--nodes 1 4 16 64] [--json FILE] [--plot FILE]

--measured: a --json file of bench/predict.py with the row, and with the row on two GPUs. Its machine gives the predictions for 1 and 2 GPUs;
--node gives those for whole nodes. The exit status is 1 if a prediction for 1 or 2 GPUs is more than 10 % off.
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

BAR = 0.10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--row", choices=list(predict.ROWS["cuda"]), default="3 B, host")
    parser.add_argument("--node", type=Path, default=Path("h200x8"))
    parser.add_argument("--nodes", type=_common.positive, nargs="+", default=[1, 4, 16, 64])
    options = _common.parse(parser)
    row, node, found = predict.ROWS["cuda"][options.row], Machine.load(options.node), {}
    if options.measured:
        measured = json.loads(options.measured.read_text())
        machine = Machine.from_table(measured["machine"])
        for num, name in enumerate((options.row, f"{options.row}, 2 GPUs"), 1):
            seconds = measured["rows"].get(name, {}).get("measured", {}).get("s")
            found[num] = {"machine": machine.name, "measured_s": seconds} | seconds_of(row, machine, num, 1)
    for nodes in options.nodes:
        found[nodes * node.devices] = {"machine": node.name, "measured_s": None} | seconds_of(row, node, node.devices, nodes)
    rows = [
        [
            str(num),
            each["machine"],
            f"{each['predicted_s']:.3f}" if each["predicted_s"] else each["error"],
            f"{each['measured_s']:.3f}" if each["measured_s"] else "-",
            f"{error_of(each):+.1%}" if each["measured_s"] else "-",
        ]
        for num, each in found.items()
    ]
    print(table(["GPUs", "machine", "predicted, s", "measured, s", "error"], rows))
    if options.json:
        write_json(options.json, {"row": options.row, "by_gpus": found})
    if options.plot:
        plot(options, found)
    return int(any(abs(error_of(each)) > BAR for each in found.values() if each["measured_s"]))


def seconds_of(row: predict.Row, machine: Machine, devices: int, nodes: int) -> dict:
    made = predict.predicted(dataclasses.replace(row, num_ranks=devices), dataclasses.replace(machine, nodes=nodes))
    return {"predicted_s": made.get("s"), "error": made.get("error")}


def error_of(each: dict) -> float:
    """Relative; infinite without a prediction."""
    return each["predicted_s"] / each["measured_s"] - 1 if each["predicted_s"] else math.inf


def plot(options, found: dict) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    predicted = {num: each["predicted_s"] for num, each in found.items() if each["predicted_s"]}
    axis.plot(list(predicted), list(predicted.values()), "o-", label="predicted")
    if measured := {num: each["measured_s"] for num, each in found.items() if each["measured_s"]}:
        axis.plot(list(measured), list(measured.values()), "x", markersize=9, label="measured")
    axis.set(xscale="log", xlabel="GPUs", ylabel="seconds a step", ylim=(0, 1.2 * max([*predicted.values(), *measured.values()])), title=f"{options.row}: the same work for each GPU")
    axis.set_xticks(list(found), [str(num) for num in found])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(loc="lower left")
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    _common.exit_with(main)
