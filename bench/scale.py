"""Simulates a GPT of a trillion parameters on one node of eight GPUs and eight drives, and on up to 64 such nodes.

    python bench/scale.py [--params 1e12] [--machine h200x8] [--batches 2 4 8] [--nodes 1 2 ... 64] [--json FILE] [--plot FILE]

The engine itself runs, without bytes. The machine is a file, and each node has its own drives. With more nodes, each drive moves fewer bytes a step,
and each device computes as much as before.
"""

import argparse
import dataclasses
from pathlib import Path

import _common

from infinity.config import Config
from infinity.errors import BudgetError
from infinity.output import pyplot, table, write_json
from infinity.plan.tiers import DEVICE
from infinity.sizes import format_bytes
from infinity.tools.machine import Machine
from infinity.tools.predict.formulas import gpt_size
from infinity.tools.predict.meta_models import format_count, gpt
from infinity.tools.predict.prediction import predict
from infinity.tools.predict.simulated_run import TrainingStep

SEQ, VOCAB = 1024, 50257


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=_common.positive_float, default=1e12)
    parser.add_argument("--machine", type=Path, default=Path("h200x8"))
    parser.add_argument("--batches", type=_common.positive, nargs="+", default=[2, 4, 8], help="sequences a device and step")
    parser.add_argument("--nodes", type=_common.positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    options = _common.parse(parser)
    node = Machine.load(options.machine)
    hidden, layers = gpt_size(options.params)
    found = {}
    for batch in options.batches:
        subject = gpt(hidden, layers, hidden // 128, VOCAB, SEQ, batch, "bf16")
        print(subject.title)
        for nodes in options.nodes:
            machine = dataclasses.replace(node, nodes=nodes)
            try:
                prediction = predict(subject, machine, Config(), TrainingStep(recompute=True))
            except BudgetError as error:
                print(f"  {nodes} nodes: {error}")
                continue
            found[batch, nodes] = row = {
                "seconds": prediction.step_seconds,
                "compute_seconds": prediction.compute_seconds,
                "tflops": prediction.compute_seconds / prediction.step_seconds * machine.device_tflops,
                "tokens_per_second": prediction.tokens * machine.world / prediction.step_seconds,
                "bottleneck": prediction.bottleneck,
                "device_nbytes": prediction.memory[DEVICE].needed,
                "nvme_nbytes": prediction.placement.nvme_nbytes * machine.devices,
            }
            print(f"  {nodes} nodes: {row['seconds']:.3g} s a step, {row['tflops']:.0f} TFLOP/s a device, longest: {row['bottleneck']}", flush=True)
    head = ["nodes x batch", "s a step", "compute", "TFLOP/s a device", "tokens/s", "longest", "a device", "a node's drives"]
    rows = [
        [
            f"{nodes} x {batch}",
            f"{row['seconds']:.4g}",
            f"{row['compute_seconds']:.4g}",
            f"{row['tflops']:.0f}",
            f"{row['tokens_per_second']:,.0f}",
            row["bottleneck"],
            format_bytes(row["device_nbytes"]),
            format_bytes(row["nvme_nbytes"]),
        ]
        for (batch, nodes), row in found.items()
    ]
    print(table(head, rows))
    if options.json:
        write_json(options.json, [{"batch": batch, "nodes": nodes} | row for (batch, nodes), row in found.items()])
    if options.plot:
        plot(found, options, node)


def plot(found: dict, options, node: Machine) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for batch in options.batches:
        points = [(nodes, row) for (b, nodes), row in found.items() if b == batch]
        line = left.plot([nodes for nodes, _ in points], [row["tflops"] for _, row in points], "o-", label=f"{batch} sequences a device")[0]
        right.plot([nodes for nodes, _ in points], [row["seconds"] for _, row in points], "o-", color=line.get_color(), label=f"batch {batch}, step")
        right.plot([nodes for nodes, _ in points], [row["compute_seconds"] for _, row in points], ":", color=line.get_color(), label="its compute alone")
    left.axhline(node.device_tflops, color="grey", linestyle="--", linewidth=1)
    left.text(options.nodes[0], node.device_tflops, "what compute alone reaches", va="bottom", fontsize=8, color="grey")
    left.set(xscale="log", xlabel="nodes of eight GPUs and eight drives", ylabel="TFLOP/s a device", ylim=(0, 1.1 * node.device_tflops))
    right.set(xscale="log", xlabel="nodes", ylabel="seconds a step", ylim=(0, None))
    for axis in (left, right):
        axis.set_xticks(options.nodes, [str(nodes) for nodes in options.nodes])
        axis.minorticks_off()
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.suptitle(f"GPT of {format_count(options.params)} parameters, simulated: nodes of {node.name}")
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    _common.exit_with(main)
