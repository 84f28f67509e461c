"""The cost of checkpointed activations in host memory or on NVMe, by hidden size (figure 6e of ZeRO-Infinity, section 8).

    python bench/activations.py [--device cuda] [--simulate MACHINE] [--hidden 2048,4096,8192] [--layers 3] [--batch 8] [--rounds 5]
                                [--json FILE] [--plot FILE]

The bench trains one GPT, every block checkpointed, with the saved inputs on the device, in host memory, and on NVMe. Engines take turns
in blocks of steps; the first step of a block is not counted. Losses must agree with those of `device` within --tolerance, or the exit
status is 1. Sums in embeddings have no fixed order on CUDA. The peak is the allocator's, of a step, above the memory allocated before.

--simulate names a machine file or a machine that the engine knows. The engine then trains without bytes on one device of that machine, so hidden
sizes can be larger than memory allows here. The peak is all device memory of a step there, and there are no losses.
"""

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path

import torch
from _common import (
    add_simulate,
    add_tolerance,
    agree,
    apart,
    at_least,
    directory,
    error_bars,
    exit_with,
    given,
    parse,
    positive,
    positives,
    spread,
    step,
    where,
)

import infinity
from infinity import output
from infinity.model.gpt import GPT
from infinity.tools.machine import Machine
from infinity.tools.meta_models import gpt, num_heads
from infinity.tools.predict.simulated_run import TrainingStep, train, world_of

PLACES = ("device", "host", "nvme")
LARGEST_TILE = "8GiB"  # without bytes: this machine need not have memory for a larger tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_simulate(parser)
    parser.add_argument("--hidden", type=positives, default="2048,4096,8192" if torch.cuda.is_available() else "128,256,512")
    parser.add_argument("--nvme", type=directory, default=".", help="a directory is made in it, and removed")
    for name, default in (("layers", 3), ("vocab", 8192), ("seq", 1024), ("batch", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--steps", type=at_least(2), default=5, help="of a block")
    parser.add_argument("--dtype", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--host-memory", default="16GiB")
    add_tolerance(parser)
    options = parse(parser)
    found = {}
    for hidden in options.hidden:
        with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
            found[hidden] = (simulated if options.simulate else measure)(options, hidden, folder)
        base = statistics.median(found[hidden]["seconds"]["device"])
        for place in PLACES:
            seconds, peak = found[hidden]["seconds"][place], found[hidden]["peak_nbytes"][place]
            median = statistics.median(seconds)
            print(
                f"hidden {hidden:6d} {place:>6}: {spread(seconds)} s, {median / base:.3f}x, "
                f"peak {peak / 2**30:.2f} GiB, {found[hidden]['moved_nbytes'][place] / 2**20:.0f} MiB moved a step",
                flush=True,
            )
    if options.json:
        output.write_json(options.json, {"found": found, "torch": torch.__version__, "options": given(options)})
    if options.plot:
        plot(options, found)
    return 0 if options.simulate else int(not agree(options, max(each["difference"] for each in found.values())))


def simulated(options, hidden: int, folder: str) -> dict:
    """As `measure`, with the last step of a simulated run for each place."""
    machine = dataclasses.replace(Machine.load(Path(options.simulate)), devices=1)
    subject = gpt(hidden, options.layers, num_heads(hidden), options.vocab, options.seq, options.batch, options.dtype)
    found = {"seconds": {}, "peak_nbytes": {}, "moved_nbytes": {}}
    for place in PLACES:
        world = world_of(machine)
        common = {"device": "cpu", "dtype": options.dtype, "swap_dirs": [folder], "verbose": False, "tile_above": LARGEST_TILE}
        config = infinity.Config(activation_tier=place, **common)

        def look(engine, marks, world=world):
            moved = (engine.stats()["activation_offload"] or {}).get("moved_nbytes", 0) / (len(marks) - 1)
            return marks[-1].seconds - marks[-2].seconds, world.memory.most_nbytes(), moved

        seconds, peak, found["moved_nbytes"][place] = train(world, subject, config, TrainingStep(recompute=True), look)
        found["seconds"][place], found["peak_nbytes"][place] = [seconds], peak
    return found


def measure(options, hidden: int, folder: str) -> dict:
    """Seconds of steps, the allocator's peak and the bytes that a step moves, by place."""
    trainings = {place: training(options, hidden, folder, place) for place in PLACES}
    seconds = {place: [] for place in PLACES}
    losses = {place: [] for place in PLACES}
    peak_nbytes = dict.fromkeys(PLACES, 0)
    for _ in range(options.rounds):
        for place, (model, optimizer) in trainings.items():
            block = []
            for _ in range(options.steps):
                before = torch.cuda.memory_allocated() if options.device.startswith("cuda") else 0
                if options.device.startswith("cuda"):
                    torch.cuda.reset_peak_memory_stats()
                block.append(step(options, model, optimizer, len(losses[place])))
                losses[place].append(block[-1][1])
                if options.device.startswith("cuda"):
                    peak_nbytes[place] = torch.cuda.max_memory_allocated() - before
            seconds[place] += [each for each, _ in block[1:]]
    worst = max(apart(losses["device"], losses[place]) for place in PLACES[1:])
    print(f"hidden {hidden:6d}: losses differ by {worst:.1e}")
    num_steps = options.rounds * options.steps
    moved = {place: ((engine(model).stats()["activation_offload"] or {}).get("moved_nbytes", 0)) / num_steps for place, (model, _) in trainings.items()}
    for model, _ in trainings.values():
        engine(model).close()
    return {"seconds": seconds, "peak_nbytes": peak_nbytes, "moved_nbytes": moved, "losses": losses, "difference": worst}


def engine(model):
    return infinity.engine_of(model)


def training(options, hidden: int, folder: str, place: str):
    """(model, optimizer) of a new engine, all with the same initial weights."""
    torch.manual_seed(0)
    path = tempfile.mkdtemp(dir=folder)
    config = {"device": options.device, "dtype": options.dtype, "host_memory": options.host_memory, "swap_dirs": path}
    with infinity.init(infinity.Config(activation_tier=place, **config)):
        model = GPT(hidden, options.layers, num_heads(hidden), options.vocab, options.seq, checkpoint_activations=True)
    return model, infinity.AdamW(model.parameters(), lr=1e-4)


def plot(options, found: dict) -> None:
    pyplot = output.pyplot()
    figure, axes = pyplot.subplots(figsize=(5.5, 3.5), layout="constrained")
    most = 1.0
    for place in PLACES[1:]:
        bases = [statistics.median(each["seconds"]["device"]) for each in found.values()]
        ratios = [[taken / base for taken in each["seconds"][place]] for base, each in zip(bases, found.values())]
        medians = [statistics.median(each) for each in ratios]
        most = max(most, *map(max, ratios))
        axes.errorbar([str(hidden) for hidden in found], medians, yerr=error_bars(ratios), fmt="o-", capsize=3, label=place)
    axes.axhline(1, color="grey", linewidth=0.5)
    axes.set(xlabel="hidden size", ylabel="step, of that with activations on the device", ylim=(0, 1.2 * most))
    axes.set_title(f"activations offloaded: {where(options)}, {options.layers} layers, batch {options.batch}", fontsize=10)
    axes.legend()
    figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    exit_with(main)
