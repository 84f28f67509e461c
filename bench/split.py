"""Steps with updates in backward, partly put off, or after step(), where drives and compute need about the same time.

    python bench/split.py [--tier nvme] [--nvme DIR] [--layers 64] [--hidden 1536] [--forward-ms 18] [--backward-ms 54] [--rounds 3] [--steps 6]

A chain of layers. A layer sleeps instead of computing, so a CPU acts as a device that needs no core. Modes alternate. With --tier nvme
everything is on NVMe and nothing is resident. `backward` is `split` with drives that never count as too slow. With --tier host everything is
in host memory, and updates follow step(): in one job, or in two, weights before moments.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
from _common import bars, directory, exit_with, given, parse, positive, positive_float, spread
from torch import nn

import infinity

MODES = {"nvme": ("backward", "split", "deferred"), "host": ("one job", "two jobs")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=MODES, default="nvme")
    parser.add_argument("--nvme", type=directory, help="a directory on the drive; a temporary one else")
    parser.add_argument("--layers", type=positive, default=64)
    parser.add_argument("--hidden", type=positive, default=1536, help="a layer has the square of it as parameters")
    parser.add_argument("--forward-ms", type=positive_float, default=18.0, help="of a layer")
    parser.add_argument("--backward-ms", type=positive_float, default=54.0)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=6, help="that count; three come before")
    options = parse(parser)
    torch.set_num_threads(1)
    compute = options.layers * (options.forward_ms + options.backward_ms) / 1e3
    found = {mode: [] for mode in MODES[options.tier]}
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        for number in range(options.rounds):
            for mode in found:
                found[mode].append(measure(options, folder, mode))
                print(f"round {number}: {mode:8s} {found[mode][-1]}", flush=True)
    seconds = {mode: [run["seconds"] for run in each] for mode, each in found.items()}
    for mode, each in seconds.items():
        print(f"{mode:8s} {spread(each, 3)} s a step, {statistics.median(each) / compute:.3f} times compute, which takes {compute:.3f} s")
    if options.json:
        options.json.write_text(json.dumps({**given(options), "compute_seconds": compute, **found}, indent=1))
    if options.plot:
        bars(options.plot, seconds, f"compute of {compute:.3g} s, tier {options.tier}")


def measure(options, folder, mode) -> dict:
    """Seconds of a step, and bytes read and written per parameter."""
    model = nn.Sequential(*(Timed(options) for _ in range(options.layers)))
    config = infinity.Config(
        swap_dirs=folder,
        param_tier=options.tier,
        optimizer_state_tier=options.tier,
        residency="none" if options.tier == "nvme" else "auto",
        compression="off",
        device="cpu",
        update="backward" if mode in ("backward", "split") else "deferred",
        host_memory="3GiB" if options.tier == "nvme" else "8GiB",
        device_memory="1GiB",
        chunk_mib=max(0.25, options.hidden**2 * 2 / 2**20),
    )
    with infinity.offload(model, config) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
        if mode == "backward":
            engine.records.is_crowded = lambda kind: False
        engine.updater.moments_follow = mode == "two jobs"
        x = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
        for step in range(3 + options.steps):
            if step == 3:
                before, begin = engine.stats()["links"], time.perf_counter()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds = (time.perf_counter() - begin) / options.steps
        after, num = engine.stats()["links"], options.layers * options.hidden**2 * options.steps
    nbytes = {name: (after[link]["nbytes"] - before[link]["nbytes"]) / num for name, link in (("read", "nvme_read"), ("written", "nvme_write"))}
    return {"seconds": round(seconds, 3)} | {name: round(number, 2) for name, number in nbytes.items()}


class Timed(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(options.hidden, options.hidden, dtype=torch.bfloat16))
        self.seconds = options.forward_ms / 1e3, options.backward_ms / 1e3

    def forward(self, x):
        return _Sleep.apply(x, self.weight, self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.save_for_backward(weight)
        ctx.seconds = seconds[1]
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        time.sleep(ctx.seconds)
        return grad, torch.full_like(weight, 1e-3), None


if __name__ == "__main__":
    exit_with(main)
