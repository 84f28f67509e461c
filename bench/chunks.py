"""The quality of the chosen chunk size: a step at each of a grid of sizes and at the engine's choice, for three models.

    python bench/chunks.py [--models gpt,narrow,mlp] [--place nvme] [--fraction 0.3] [--device cpu] [--dtype fp32]
                           [--sizes 0.5,1,2,4,8] [--rounds 3] [--nvme DIR] [--json FILE]

Sizes are MiB of 16-bit weights. Places are nvme (all there, nothing resident), mixed (the engine's default with this host memory) and
host. Every round builds each engine anew, in turn, and in reverse order in the next round. The bench prints the median, least and
greatest step, and the ratio of the chosen size to the best of the grid.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch
from _common import at_least, exit_with, positive, positive_float
from torch import nn

import infinity
from infinity.model.gpt import GPT

PLACES = {
    "nvme": {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none"},
    "mixed": {"device_memory": "100MiB"},
    "host": {"param_tier": "host", "optimizer_state_tier": "host"},
}


def models(scale):
    """By name, (constructor, inputs of a step)."""

    def gpt(hidden, layers, heads, vocab, seq, batch):
        def inputs():
            x = torch.randint(0, vocab, (batch, seq))
            return x, x

        return lambda: GPT(hidden, layers, heads, vocab, seq, checkpoint_activations=True), inputs

    def mlp(size, layers):
        make = lambda: nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(size, size), nn.ReLU())))
        return make, lambda: (torch.randn(16, size),)

    return {
        "gpt": gpt(1024 * scale, 8, 16, 8192, 128, scale),
        "narrow": gpt(320 * scale, 40, 5, 4096, 64, scale),
        "mlp": mlp(2000 * scale, 12),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,narrow,mlp")
    parser.add_argument("--place", choices=PLACES, default="nvme")
    parser.add_argument("--fraction", type=positive_float, default=0.3, help="of the records that fits into host memory, unless they live there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--sizes", default="0.5,1,2,4,8")
    parser.add_argument("--scale", type=positive, default=1, help="of the models' widths")
    parser.add_argument("--nvme", default="infinity-swap", help="made if it does not exist")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=at_least(3), default=8)
    parser.add_argument("--json")
    options = parser.parse_args()
    Path(options.nvme).mkdir(parents=True, exist_ok=True)
    found = {name: measure(options, name) for name in options.models.split(",")}
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"seconds": found, "options": vars(options), "torch": torch.__version__}, file, indent=1)


def measure(options, name):
    sizes = [float(size) for size in options.sizes.split(",")] + [None]
    seconds, about = {size: [] for size in sizes}, {}
    for number in range(options.rounds):
        for size in sizes if number % 2 == 0 else reversed(sizes):
            times, about[size] = run(options, name, size)
            seconds[size] += times
    medians = {size: statistics.median(times) for size, times in seconds.items()}
    best = min(sizes[:-1], key=medians.get)
    for size in sizes:
        times = seconds[size]
        print(
            f"{name} {about[size]}: {medians[size]:.4f} s ({min(times):.4f}-{max(times):.4f}), "
            f"{medians[size] / medians[best]:.3f} of the best{'   <- chosen' if size is None else ''}",
            flush=True,
        )
    return {str(size): times for size, times in seconds.items()}


def run(options, name, size):
    """(seconds of the steps after the first two, a description) of an engine with this chunk size."""
    make, inputs = models(options.scale)[name]
    with torch.device("meta"):
        num_parameters = sum(param.numel() for param in make().parameters())
    host_memory = "auto" if options.place == "host" else int(options.fraction * 12 * num_parameters)
    config = {"swap_dirs": options.nvme, "device": options.device, "dtype": options.dtype, "host_memory": host_memory, "chunk_mib": size}
    torch.manual_seed(0)
    with infinity.init(infinity.Config(**config, **PLACES[options.place])):
        model = make()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
    engine, times = infinity.engine_of(model), []
    for _ in range(options.steps):
        arguments = [x.to(engine.device, torch.bfloat16 if x.is_floating_point() and options.dtype == "bf16" else None) for x in inputs()]
        start = time.perf_counter()
        output = model(*arguments)
        loss = output if output.dim() == 0 else output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - start)
    mib = engine.layout.chunk_numel * 2 / 2**20
    about = f"{engine.layout.num_parameters / 1e6:.0f} M, chunks of {mib:.2f} MiB: {len(engine.layout.chunks)}"
    engine.close()
    del model, optimizer, engine
    gc.collect()
    return times[2:], about


if __name__ == "__main__":
    exit_with(main)
