"""Simulates GPTs of a trillion parameters on nodes of eight GPUs and eight drives: by number of nodes, or by size.

    python bench/scale.py [--params 1e12 ...] [--machine h200x8] [--batches 2 4 8] [--nodes 1 2 ... 64] [--json FILE] [--plot FILE]

These are figures 5b and 5a of ZeRO-Infinity, section 8. The engine itself runs as one rank, without bytes. The machine is a file, and each
node has its own drives. With more nodes, each drive moves fewer bytes a step, and each device computes as much as before. The plot is by
nodes, or by size if there are several --params.
"""

import argparse
import dataclasses
import itertools
from pathlib import Path

import _common

from infinity.config import Config
from infinity.errors import BudgetError
from infinity.output import pyplot, table, write_json
from infinity.plan.tiers import DEVICE
from infinity.sizes import format_bytes
from infinity.tools.machine import Machine
from infinity.tools.meta_models import format_count, gpt, gpt_size
from infinity.tools.predict.prediction import predict
from infinity.tools.predict.simulated_run import TrainingStep

SEQ, VOCAB = 1024, 50257


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=_common.positive_float, nargs="+", default=[1e12])
    parser.add_argument("--machine", type=Path, default=Path("h200x8"))
    parser.add_argument("--batches", type=_common.positive, nargs="+", default=[2, 4, 8], help="sequences a device and step")
    parser.add_argument("--nodes", type=_common.positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    options = _common.parse(parser)
    if len(options.params) > 1 < len(options.nodes):
        parser.error("--params and --nodes: give several sizes on one number of nodes, or one size on several")
    node = Machine.load(options.machine)
    found = {}
    for size, batch, nodes in itertools.product(options.params, options.batches, options.nodes):
        hidden, layers = gpt_size(size)
        subject = gpt(hidden, layers, hidden // 128, VOCAB, SEQ, batch, "bf16")
        print(subject.title)
        machine = dataclasses.replace(node, nodes=nodes)
        try:
            prediction = predict(subject, machine, Config(), TrainingStep(recompute=True))
        except BudgetError as error:
            print(f"  {nodes} nodes: {error}")
            continue
        found[size, batch, nodes] = row = {
            "seconds": prediction.step_seconds,
            "compute_seconds": prediction.compute_seconds,
            "tflops": prediction.compute_seconds / prediction.step_seconds * machine.device_tflops,
            "tokens_per_second": prediction.tokens * machine.world / prediction.step_seconds,
            "bottleneck": prediction.bottleneck,
            "device_nbytes": prediction.memory[DEVICE].needed,
            "nvme_nbytes": prediction.placement.nvme_nbytes * machine.devices,
        }
        print(f"  {nodes} nodes: {row['seconds']:.3g} s a step, {row['tflops']:.0f} TFLOP/s a device, longest: {row['bottleneck']}", flush=True)
    head = ["parameters", "nodes x batch", "s a step", "compute", "TFLOP/s a device", "tokens/s", "longest", "a device", "a node's drives"]
    rows = [
        [
            format_count(size),
            f"{nodes} x {batch}",
            f"{row['seconds']:.4g}",
            f"{row['compute_seconds']:.4g}",
            f"{row['tflops']:.0f}",
            f"{row['tokens_per_second']:,.0f}",
            row["bottleneck"],
            format_bytes(row["device_nbytes"]),
            format_bytes(row["nvme_nbytes"]),
        ]
        for (size, batch, nodes), row in found.items()
    ]
    print(table(head, rows))
    if options.json:
        write_json(options.json, [{"parameters": size, "batch": batch, "nodes": nodes} | row for (size, batch, nodes), row in found.items()])
    if options.plot:
        plot(found, options, node)


def plot(found: dict, options, node: Machine) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    by_size = len(options.params) > 1
    xs = options.params if by_size else options.nodes
    title = f"{options.nodes[0]} nodes" if by_size else f"GPT of {format_count(options.params[0])} parameters"
    for batch in options.batches:
        rows = {}
        for (size, its_batch, nodes), row in found.items():
            if its_batch == batch and (nodes == options.nodes[0] or not by_size):
                rows[size if by_size else nodes] = row
        line = left.plot(list(rows), [row["tflops"] for row in rows.values()], "o-", label=f"{batch} sequences a device")[0]
        right.plot(list(rows), [row["seconds"] for row in rows.values()], "o-", color=line.get_color(), label=f"batch {batch}, step")
        right.plot(list(rows), [row["compute_seconds"] for row in rows.values()], ":", color=line.get_color(), label="its compute alone")
    left.axhline(node.device_tflops, color="grey", linestyle="--", linewidth=1)
    left.text(xs[0], node.device_tflops, "what compute alone reaches", va="bottom", fontsize=8, color="grey")
    name = "parameters" if by_size else "nodes of eight GPUs and eight drives"
    left.set(xscale="log", xlabel=name, ylabel="TFLOP/s a device", ylim=(0, 1.1 * node.device_tflops))
    right.set(xscale="log", xlabel=name, ylabel="seconds a step", ylim=(0, None))
    for axis in (left, right):
        axis.set_xticks(xs, [format_count(x) if by_size else str(x) for x in xs])
        axis.minorticks_off()
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.suptitle(f"{title}, simulated: {node.name} a node, sequences of {SEQ}", fontsize=10)
    figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    _common.exit_with(main)
