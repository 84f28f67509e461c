"""The largest hidden size of a one-layer transformer that trains in fragmented device memory, by tiling factor.

    python bench/tiling.py [--device cuda] [--simulate MACHINE] [--block-mib 64] [--factors 1,4,16,auto] [--json FILE] [--plot FILE]

After figure 6b of ZeRO-Infinity (Rajbhandari et al. 2021, section 8). Before a model is built, the bench takes all device memory and
frees blocks of --block-mib. Between blocks 2 MiB stay taken, so no allocation can be larger than a block. Then hidden sizes 512, 1024,
... each train two steps in a separate process, until an allocation fails or a loss is not finite. Any other failure ends the bench with
status 1.

A factor of 4 cuts each linear layer into 2 x 2 tiles, 16 into 4 x 4. `auto` is `Config(tile_above="auto")` with a device_memory of two
blocks; the others may use all free memory. Records live in host memory. On the CPU memory is not fragmented: a block is the engine's
whole device_memory there, which weights and their gradient share.

--simulate names a machine file or a machine that the engine knows. The engine then trains without bytes on one device of that machine, where an
allocation larger than a block fails. Hidden sizes can then be larger than host memory allows here. --device and --timeout have no meaning then.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _common import add_simulate, exit_with, given, parse, positive, positive_float, where
from torch import nn

import infinity
from infinity import output
from infinity.simulation.device import DeviceMemory
from infinity.tools.machine import Machine
from infinity.tools.meta_models import Subject
from infinity.tools.predict.simulated_run import TrainingStep, world_of
from infinity.tools.predict.simulated_run import train as train_without_bytes

HEAD_DIM = 64
SEPARATOR_NBYTES = 2 << 20
WHOLE_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}  # expandable ones move pages, so nothing stays fragmented
SLACK_NBYTES = 24 << 20  # for the driver, which loads kernels at their first use
SMALL_SEGMENTS = 64  # of 2 MiB, half of each free, for tensors of up to 1 MiB: the allocator has a separate pool for these


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add_simulate(parser)
    parser.add_argument("--block-mib", type=positive_float, help="default: 64, on the CPU 4")
    parser.add_argument("--factors", type=tilings, default="1,4,16,auto", help="squares, or auto")
    parser.add_argument("--least-hidden", type=positive, help="default: 512, on the CPU 128")
    parser.add_argument("--most-hidden", type=positive, help="default: 16384, on the CPU 2048")
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--timeout", type=positive_float, default=300, help="seconds for one size")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parse(parser)
    on_cpu = options.device == "cpu" and not options.simulate
    options.block_mib = options.block_mib or (4 if on_cpu else 64)
    options.least_hidden = options.least_hidden or (128 if on_cpu else 512)
    options.most_hidden = options.most_hidden or (2048 if on_cpu else 16384)
    if options.one:
        print(json.dumps(train(options, *options.one.split(":"))))
        return 0

    if options.least_hidden % HEAD_DIM:
        parser.error(f"--least-hidden {options.least_hidden}: expected a multiple of {HEAD_DIM}")
    machine = dataclasses.replace(Machine.load(Path(options.simulate)), devices=1) if options.simulate else None
    print(f"{where(options)}, blocks of {options.block_mib:g} MiB, {options.tokens} tokens a step, bf16")
    print(f"{'factor':>7} {'hidden':>7} {'largest weight':>15} {'largest tile':>13} {'engine peak':>12}  the next size")
    results = {}
    for factor in options.factors:
        results[factor] = largest(options, machine, factor)
        best, refusal = results[factor]["best"], results[factor]["refusal"] or "was not tried"
        sizes = [best.get(key, 0) / 2**20 for key in ("weight_nbytes", "tile_nbytes", "peak_nbytes")]
        columns = f"{sizes[0]:>11.1f} MiB {sizes[1]:>9.1f} MiB {sizes[2]:>8.1f} MiB"
        print(f"{factor:>7} {best.get('hidden', 0):>7} {columns}  {refusal}", flush=True)
    if options.json:
        output.write_json(options.json, {"options": given(options), "results": results, "torch": torch.__version__})
    plot(options, {factor: result["best"].get("hidden", 0) for factor, result in results.items()})
    return 0


def tilings(text):
    """A type of options: squares or `auto`, separated by commas."""
    for factor in text.split(","):
        if factor != "auto" and not (factor.isdecimal() and int(factor) and math.isqrt(int(factor)) ** 2 == int(factor)):
            raise argparse.ArgumentTypeError(f"expected auto or a square number, such as 4 for 2 x 2 tiles, got {factor!r}")
    return text.split(",")


def largest(options, machine, factor):
    """The results of the largest size that trains, and why the next size does not train."""
    best, refusal, hidden = {}, None, options.least_hidden
    while hidden <= options.most_hidden:
        result = simulated(options, machine, factor, hidden) if machine else in_a_process(options, factor, hidden)
        if refusal := result.get("refusal"):
            refusal = f"{hidden}: {refusal}"
            break
        best, hidden = result, 2 * hidden
    return {"best": best, "refusal": refusal}


def in_a_process(options, factor, hidden):
    """The result of `train` in a separate process; any other end of that process ends the bench."""
    told = {"device": options.device, "block-mib": options.block_mib, "tokens": options.tokens, "one": f"{factor}:{hidden}"}
    command = [sys.executable, os.path.abspath(__file__), *(f"--{name}={value}" for name, value in told.items())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, env=os.environ | WHOLE_SEGMENTS)
    except subprocess.TimeoutExpired:
        sys.exit(f"factor {factor}, hidden {hidden}: not over after {options.timeout:g} s")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.splitlines() or ["no message"])[-1][:200]
        sys.exit(f"factor {factor}, hidden {hidden}: exit {done.returncode}: {said}")
    return json.loads(lines[-1])


class Layer(nn.Module):
    """Pre-norm attention and a two-layer perceptron; linear(in, out) makes their matrices."""

    def __init__(self, hidden, linear):
        super().__init__()
        self.heads = hidden // HEAD_DIM
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = linear(hidden, 3 * hidden), linear(hidden, hidden)
        self.up, self.down = linear(hidden, 4 * hidden), linear(4 * hidden, hidden)

    def forward(self, x):
        tokens, hidden = x.shape
        query, key, value = self.qkv(self.attention_norm(x)).view(tokens, 3, self.heads, -1).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(y.transpose(0, 1).reshape(tokens, hidden))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def settings(options, factor):
    """(Configuration of the engine, tiles of a linear layer in each direction)."""
    block = int(options.block_mib * 2**20)
    config = {"device": options.device, "param_tier": "host", "optimizer_state_tier": "host", "residency": "none"}
    if factor != "auto":
        config["tile_above"] = None
    if options.device == "cpu" and not options.simulate:
        config["device_memory"] = block
    elif factor == "auto":
        config["device_memory"] = 2 * block
    return config, 1 if factor == "auto" else math.isqrt(int(factor))


class Blocks(DeviceMemory):
    """Simulated memory in which an allocation has at most block_nbytes."""

    def __init__(self, capacity_nbytes, block_nbytes):
        super().__init__(capacity_nbytes)
        self.block_nbytes = block_nbytes

    def take(self, nbytes):
        if nbytes > self.block_nbytes:
            self.refuse(nbytes, f"{nbytes / 2**20:,.1f} MiB do not fit into a block")
        super().take(nbytes)


def simulated(options, machine, factor, hidden):
    """As `train`, without bytes on one device of the machine."""
    config, side = settings(options, factor)
    with torch.device("meta"):
        model = Layer(hidden, linear_of(side)).to(torch.bfloat16)
        subject = Subject("", model, {"x": torch.empty(options.tokens, hidden, dtype=torch.bfloat16)}, options.tokens)
    world = world_of(machine)
    world.memory = Blocks(world.memory.capacity_nbytes(), int(options.block_mib * 2**20))
    with tempfile.TemporaryDirectory() as directory:
        config = infinity.Config(**config | {"device": "cpu", "swap_dirs": [directory], "verbose": False})
        try:
            return train_without_bytes(world, subject, config, TrainingStep(), lambda engine, marks: sizes(hidden, engine))
        except (torch.OutOfMemoryError, infinity.BudgetError) as error:
            return refused(error)


def refused(error):
    return {"refusal": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}


def train(options, factor, hidden):
    """Two steps of one size: sizes in bytes, or why this size does not train."""
    config, side = settings(options, factor)
    block = int(options.block_mib * 2**20)
    held = None
    with tempfile.TemporaryDirectory() as directory:
        config["swap_dirs"] = directory
        try:
            if options.device != "cpu":
                steps(options, 128, 1, config | {"device_memory": "auto"})  # loads kernels, makes streams and workspaces
                held = fragment(block)
                refuse_larger(block)
                config.setdefault("device_memory", len(held.separators) * block)  # by itself the engine takes no pieces of fixed segments
            result = steps(options, int(hidden), side, config)
        except (torch.OutOfMemoryError, infinity.BudgetError) as error:
            return refused(error)
        del held
        return result


def linear_of(side):
    """Makes a linear layer of side x side tiles."""
    return functools.partial(infinity.TiledLinear, out_tiles=side, in_tiles=side) if side > 1 else nn.Linear


def steps(options, hidden, side, config):
    torch.manual_seed(0)
    with infinity.init(infinity.Config(**config)):
        model = Layer(hidden, linear_of(side))
    with infinity.engine_of(model) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            x = torch.randn(options.tokens, hidden, device=options.device, dtype=torch.bfloat16)
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not math.isfinite(loss.item()):
                return {"refusal": f"the loss is {loss.item()}"}
        engine.flush()
        return sizes(hidden, engine) | {"loss": loss.item()}


def sizes(hidden, engine):
    """Bytes of the largest weight, of the largest tensor after tiling, and of the engine's peak on the device."""
    tile = max(2 * param.numel() for param in engine.model.parameters())
    return {"hidden": hidden, "weight_nbytes": 8 * hidden**2, "tile_nbytes": tile, "peak_nbytes": engine.stats()["peak_device_nbytes"]}


class Held(NamedTuple):
    """Tensors that keep the device's memory in pieces. separators: one after each block."""

    small: list
    separators: list
    tail: list


def fragment(block):
    """Take all memory of the device except blocks of this size. The memory stays taken while the result lives.

    All memory comes from one segment of the caching allocator. The allocator can neither free the segment, because a part is in use, nor
    enlarge it, because the driver has no memory left. With blocks directly from the driver, the allocator would return free ones, and
    the driver would map their pages as one larger piece.
    """
    torch.cuda.empty_cache()
    small = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(2 * SMALL_SEGMENTS)][::2]
    free, _ = torch.cuda.mem_get_info()
    nbytes = (free - SLACK_NBYTES) // SEPARATOR_NBYTES * SEPARATOR_NBYTES
    everything = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    del everything  # the allocator keeps the memory as one free block
    blocks, separators = [], []
    for _ in range(nbytes // (block + SEPARATOR_NBYTES)):
        blocks.append(torch.empty(block, dtype=torch.uint8, device="cuda"))
        separators.append(torch.empty(SEPARATOR_NBYTES, dtype=torch.uint8, device="cuda"))
    rest = nbytes % (block + SEPARATOR_NBYTES)
    tail = [torch.empty(rest, dtype=torch.uint8, device="cuda")] if rest else []
    return Held(small, separators, tail)


def refuse_larger(block):
    """Check the fragmentation: an allocation of a block succeeds, and one byte more fails."""
    torch.empty(block, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(block + 1, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return
    raise SystemExit("the device's memory is not in pieces: an allocation larger than a block succeeded")


def plot(options, hidden):
    """Draw into the file, or print bars."""
    if not options.plot:
        most = max(hidden.values(), default=0)
        for factor, size in hidden.items():
            print(f"{factor:>7} {'#' * round(40 * size / most) if most else ''} {size}")
        return
    pyplot = output.pyplot()
    figure, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    bars = axes.bar(list(hidden), list(hidden.values()))
    axes.bar_label(bars)
    sizes = [size for size in hidden.values() if size] or [1]
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="tiles of a linear layer", ylabel="largest hidden size", ylim=(min(sizes) / 2, 1.5 * max(sizes)))
    kind = "of" if options.device == "cpu" and not options.simulate else "in blocks of"
    axes.set_title(f"{where(options)}: device memory {kind} {options.block_mib:g} MiB", fontsize=10)
    figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    exit_with(main)
