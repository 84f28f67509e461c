"""The largest GPT by placement, on the machines of two papers: figure 6a of ZeRO-Infinity, and PatrickStar's model at 240 GB of host memory.

    python bench/largest.py [--seq 1024] [--batch 1] [--json FILE] [--plot FILE]

The engine itself registers, packs and places each model, without bytes, and refuses those without room (`infinity plan`). Sizes are found within a
fifth. Nothing trains here: rates of the machines have no meaning. "Of the paper" has the size that ZeRO-Infinity fine-tunes on such a node.
"""

import argparse
import dataclasses

import _common

from infinity.config import Config
from infinity.output import pyplot, table, write_json
from infinity.tools.machine import DriveRates, Machine
from infinity.tools.predict.largest_model import largest_parameters

VOCAB = 50257
RATES = {"device_tflops": 1.0, "device_update_gparams": 1.0, "update_gparams": 1.0, "gather_gbps": 1.0}
LINKS = dict.fromkeys(("h2d_gbps", "d2h_gbps", "h2d_all_gbps", "d2h_all_gbps"), 1.0)
DRIVE = DriveRates(read_gbps=1.0, write_gbps=1.0, mixed_gbps=1.0, capacity=28 * 10**12)
NODE = Machine(name="16 V100, 1.5 TB, 28 TB", devices=16, device_memory=32 * 10**9, host_memory=1500 * 10**9, cores=96, **RATES, **LINKS)
PATRICKSTAR = dataclasses.replace(NODE, name="8 V100, 240 GB", devices=8, host_memory=240 * 10**9)


def on(weights: str, states: str) -> dict:
    return {"param_tier": weights, "optimizer_state_tier": states}


@dataclasses.dataclass(frozen=True)
class Row:
    """paper: parameters that the paper trained, in units of 10^9, and with what."""

    name: str
    machine: Machine
    config: dict
    paper: str = ""


ROWS = [
    Row("all on the devices, with all weights on each", NODE, on("device", "device")),
    Row("all weights on each device, states in host memory", NODE, on("device", "host")),
    Row("all in host memory", NODE, on("host", "host")),
    Row("weights in host memory, states on NVMe", dataclasses.replace(NODE, drives=(DRIVE,)), on("host", "nvme")),
    Row("all on NVMe", dataclasses.replace(NODE, drives=(DRIVE,)), on("nvme", "nvme"), "1,000 (ZeRO-Infinity)"),
    Row("auto", dataclasses.replace(NODE, drives=(DRIVE,)), {}, "1,000 (ZeRO-Infinity)"),
    Row("auto, without drives", PATRICKSTAR, {}),
    Row("auto, 8-bit states, without drives", PATRICKSTAR, {"optimizer_state_dtype": "8bit"}),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=_common.positive, default=1024)
    parser.add_argument("--batch", type=_common.positive, default=1, help="sequences a device")
    parser.add_argument("--rows", type=_common.positive, default=len(ROWS), help="the first so many rows")
    options = _common.parse(parser)
    options.vocab, options.keep_activations = VOCAB, False
    found = []
    for row in ROWS[: options.rows]:
        largest = largest_parameters(row.machine, Config(**row.config), options)
        found.append(dataclasses.asdict(row) | {"machine": row.machine.name, "parameters": largest.parameters if largest else 0})
        print(f"{row.machine.name}, {row.name}: {largest}", flush=True)
    rows = [[each["machine"], each["name"], three_digits(each["parameters"] / 1e9), each["paper"] or "-"] for each in found]
    print(table(["machine", "placement", "10^9 parameters", "of the paper"], rows))
    if options.json:
        write_json(options.json, found)
    if options.plot:
        plot(found, options.plot)


def three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g}"


def plot(found: list[dict], path) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 0.5 * len(found) + 1.2), layout="constrained")
    sizes = [each["parameters"] / 1e9 for each in found]
    bars = axis.barh([f"{each['name']}\n{each['machine']}" for each in found], sizes)
    texts = [f"{three_digits(size)}{', paper: ' + each['paper'] if each['paper'] else ''}" for size, each in zip(sizes, found)]
    axis.bar_label(bars, texts, padding=3, fontsize=9)
    axis.set(xscale="log", xlabel="10^9 parameters, logarithmic", xlim=(1, 2000 * max(sizes)))
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    _common.exit_with(main)
