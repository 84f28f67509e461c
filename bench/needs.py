"""What training needs: memory by size of the model, and bandwidth by efficiency, in closed form and by the simulated engine.

    python bench/needs.py [--machine h200x8] [--tokens 1024 4096 16384] [--hidden 2048] [--layers 24] [--json FILE] [--plot FILE]

These are figures 2a, 2b and 3 and table 3 of ZeRO-Infinity, sections 3, 4 and 9. The first table has the paper's models: model states at 20 bytes
a parameter and checkpoints at batch 32, as in the paper, beside the records of this engine. The second table has the bandwidths that keep devices
efficient, for the paper's devices of 70 TFLOP/s, for this machine's, and for devices ten and a hundred times as fast. The bandwidth for optimizer
states is that of all devices together, because each device updates a part of them.

The plot has the paper's closed form for one link, in which nothing overlaps, and the engine, which trains a GPT with such a link without bytes.
The engine moves bytes of its own records, and copies in both directions at once. The efficiency of the engine is the share of a step in which the
device computes.
"""

import argparse
import dataclasses
from pathlib import Path

import _common

from infinity.config import Config
from infinity.formats.format import Format, storage_of
from infinity.output import pyplot, table, write_json
from infinity.plan.record import record_layout
from infinity.sizes import format_bytes
from infinity.tools.machine import DriveRates, Machine
from infinity.tools.meta_models import gpt, num_heads
from infinity.tools.predict import formulas
from infinity.tools.predict.prediction import predict
from infinity.tools.predict.simulated_run import TrainingStep

SIZES = {"0.1 T": (80, 10240), "0.5 T": (100, 20480), "1 T": (128, 25600), "10 T": (195, 65536), "101 T": (315, 163840)}  # layers, hidden
SEQ, CHECKPOINT_BATCH = 1024, 32
STATES = ("fp32", "bf16", "8bit")  # Config.optimizer_state_dtype
V100_TFLOPS = 70.0
SHARES = {"weights, gradients": (0.5, 1), "optimizer states": (0.9, 2)}  # efficiency, and sequences a device
LINKS, GBPS = ("h2d and d2h", "drives"), (2, 5, 10, 20, 50, 100)
NUM_DEVICES = 512  # of the paper's table 3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, default=Path("h200x8"))
    parser.add_argument("--tokens", type=_common.positive, nargs="+", default=[1024, 4096, 16384], help="of a device and step")
    parser.add_argument("--hidden", type=_common.positive, default=2048)
    parser.add_argument("--layers", type=_common.positive, default=24)
    options = _common.parse(parser)
    if wrong := [tokens for tokens in options.tokens if tokens % SEQ]:
        parser.error(f"--tokens {wrong[0]}: expected a multiple of {SEQ}, the length of a sequence")
    machine = dataclasses.replace(Machine.load(options.machine), nodes=1, devices=1)
    machine.require_rates()
    memory = [memory_of(name, layers, hidden) for name, (layers, hidden) in SIZES.items()]
    head = ["model", "states, the paper", "checkpoints", *(f"records, {kind} moments" for kind in STATES), "a linear and its gradient", "in 16 tiles"]
    print(table(head, [[each["model"], *(format_bytes(nbytes) for name, nbytes in each.items() if name != "model")] for each in memory]))
    bandwidth = [bandwidth_of(tflops) for tflops in (V100_TFLOPS, machine.device_tflops, 10 * V100_TFLOPS, 100 * V100_TFLOPS)]
    names = [f"{name}: {share:.0%} at batch {batch}" for name, (share, batch) in SHARES.items()]
    rows = [[*(f"{each:,.0f}" for each in row.values()), f"{row['optimizer states'] / NUM_DEVICES:,.1f}"] for row in bandwidth]
    print("\nGB/s", table(["TFLOP/s a device", f"{names[0]}, a device", f"{names[1]}, all", f"of {NUM_DEVICES} each"], rows), sep="\n")
    engine = {link: {tokens: efficiencies(options, machine, link, tokens) for tokens in options.tokens} for link in LINKS}
    rows = [
        [link, str(tokens), *(f"{closed:.0%} / {found:.0%}" for closed, found in points.values())]
        for link, by_tokens in engine.items()
        for tokens, points in by_tokens.items()
    ]
    print("\nefficiency: closed form / engine", table(["link", "tokens", *(f"{gbps} GB/s" for gbps in GBPS)], rows), sep="\n")
    if options.json:
        write_json(options.json, {"memory": memory, "bandwidth": bandwidth, "efficiency": engine})
    if options.plot:
        plot(options, machine, engine)


def memory_of(name: str, layers: int, hidden: int) -> dict:
    """Bytes, by name."""
    num = formulas.transformer_parameters(layers, hidden)
    checkpoints = formulas.checkpoint_nbytes(batch=CHECKPOINT_BATCH, seq=SEQ, hidden=hidden, layers=layers)
    records = {f"records_{kind}": record_layout(num, Format(storage_of("bf16", "fp32"), moments_dtype=kind)).nbytes for kind in STATES}
    working = {f"working_{tiles}": formulas.model_working_nbytes(hidden, tiles=tiles) for tiles in (1, 16)}
    return {"model": name, "states": formulas.USUAL_STATE_NBYTES * num, "checkpoints": checkpoints} | records | working


def bandwidth_of(tflops: float) -> dict:
    """GB/s that keep a device efficient without overlap; those for optimizer states are of all devices together."""
    intensities = {"weights, gradients": formulas.weights_intensity, "optimizer states": formulas.states_intensity}
    return {"tflops": tflops} | {
        name: formulas.required_bandwidth(intensities[name](batch=batch, seq=SEQ), share, tflops * 1e12) / 1e9
        for name, (share, batch) in SHARES.items()
    }


def efficiencies(options, machine: Machine, link: str, tokens: int) -> dict[float, tuple[float, float]]:
    """By GB/s of the link: the efficiency of the closed form, and of the simulated engine on one device. All else is fast."""
    subject = gpt(options.hidden, options.layers, num_heads(options.hidden), 1024, SEQ, tokens // SEQ, "bf16")
    fast = {f"{way}{all_}_gbps": 1e4 for way in ("h2d", "d2h") for all_ in ("", "_all")}
    found = {}
    for gbps in GBPS:
        slow = dict.fromkeys(fast, float(gbps)) if link != "drives" else {}
        rate = float(gbps) if link == "drives" else 1e4
        drives = (DriveRates(read_gbps=rate, write_gbps=rate, mixed_gbps=rate, capacity=10**13),)
        node = dataclasses.replace(machine, update_gparams=1e3, copy_latency_us=0.0, op_overhead_us=0.0, drives=drives, **fast | slow)
        tier = "nvme" if link == "drives" else "host"
        config = Config(param_tier=tier, optimizer_state_tier=tier, residency="none", host_memory="64GiB", dtype="bf16")
        prediction = predict(subject, node, config, TrainingStep(recompute=True))
        intensity = formulas.states_intensity(batch=1, seq=tokens) if link == "drives" else formulas.weights_intensity(batch=1, seq=tokens)
        closed = formulas.efficiency(intensity, gbps * 1e9, machine.device_tflops * 1e12)
        found[gbps] = (closed, prediction.compute_seconds / prediction.step_seconds)
    return found


def plot(options, machine: Machine, engine: dict) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, len(engine), figsize=(8.5, 4), sharey=True, layout="constrained")
    for axis, (link, by_tokens) in zip(axes, engine.items()):
        for tokens, points in by_tokens.items():
            gbps = list(points)
            (line,) = axis.plot(gbps, [100 * found for _, found in points.values()], "o-", label=f"{tokens:,} tokens, the engine")
            axis.plot(gbps, [100 * closed for closed, _ in points.values()], ":", color=line.get_color(), label="the closed form")
        axis.set(xscale="log", xlabel="GB/s of one device", ylim=(0, 100), title="all on NVMe" if link == "drives" else "all in host memory")
        axis.set_xticks(gbps, [str(each) for each in gbps])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize=8)
    axes[0].set_ylabel("share of a step, %")
    title = f"GPT of hidden {options.hidden} and {options.layers} layers on a device of {machine.device_tflops:.0f} TFLOP/s, simulated"
    figure.suptitle(title, fontsize=10)
    figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    _common.exit_with(main)
