"""The gain of fetching ahead of the ops, by batch size (figure 6d of ZeRO-Infinity, section 8).

    python bench/prefetch.py [--device cuda] [--place host] [--batches 1,2,4,8,16] [--hidden 4096] [--layers 4] [--rounds 3]
                             [--json FILE] [--plot FILE]

One engine per batch size, with all states in `--place` and nothing resident. Two ways take turns in blocks of steps; the first step is
not counted. `ahead` is the unchanged engine. `on demand` has the same plan and the same evictions, but reads, copies and gathers only
when the op that needs the weights asks. Gradients and updates overlap in both ways. The speed-up is the step on demand over the step
ahead, of the medians of a round. The bench prints median, least and greatest.
"""

import argparse
import statistics
import tempfile

import torch
from _common import at_least, directory, error_bars, exit_with, given, parse, positive, positives, spread, step

import infinity
from infinity import output
from infinity.model.gpt import GPT

WAYS = ("ahead", "on demand")


def main():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--place", choices=("host", "nvme"), default="host" if cuda else "nvme")
    parser.add_argument("--nvme", type=directory, default=".", help="a directory is made in it, and removed")
    parser.add_argument("--batches", type=positives, default="1,2,4,8,16")
    shape = (("hidden", 4096 if cuda else 512), ("layers", 4), ("vocab", 32000 if cuda else 2048), ("seq", 1024 if cuda else 64))
    for name, default in (*shape, ("rounds", 3)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--steps", type=at_least(2), default=5, help="of a block")
    parser.add_argument("--dtype", default="bf16" if cuda else "fp32")
    parser.add_argument("--host-memory", default="auto")
    options = parse(parser)
    print(f"{options.device}, states in {options.place}, hidden {options.hidden}, {options.layers} layers, {options.dtype}")
    found = {}
    for batch in options.batches:
        with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
            found[batch] = measure(options, batch, folder)
        seconds, ahead = found[batch]["seconds"], found[batch]["ahead"]
        print(
            f"batch {batch:4d}: ahead {spread(sum(seconds['ahead'], []))} s, {ahead['ahead']:.0%} of fetches issued before they were "
            f"needed; on demand {spread(sum(seconds['on demand'], []))} s, {ahead['on demand']:.0%}; speed-up {spread(speed_ups(seconds), 2)}",
            flush=True,
        )
    if options.json:
        output.write_json(options.json, {"found": found, "torch": torch.__version__, "options": given(options)})
    if options.plot:
        plot(options, found)


def measure(options, batch: int, folder: str) -> dict:
    """Seconds of steps, a list a block, and the share of fetches issued ahead, by way."""
    options = argparse.Namespace(**vars(options) | {"batch": batch})
    torch.manual_seed(0)
    config = {"device": options.device, "dtype": options.dtype, "host_memory": options.host_memory, "swap_dirs": folder}
    with infinity.init(infinity.Config(param_tier=options.place, optimizer_state_tier=options.place, residency="none", **config)):
        shape = (options.hidden, options.layers, max(1, options.hidden // 128), options.vocab, options.seq)
        model = GPT(*shape, checkpoint_activations=True)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
    with infinity.engine_of(model) as engine:
        look = Lookahead(engine)
        for number in range(2):
            step(options, model, optimizer, number)
        seconds = {way: [] for way in WAYS}
        fetches = {way: [0, 0] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                look.on = way == "ahead"
                step(options, model, optimizer, 0)
                before = engine.stats()
                seconds[way].append([step(options, model, optimizer, number)[0] for number in range(1, options.steps)])
                after = engine.stats()
                for index, name in enumerate(("num_prefetch_hits", "num_prefetch_misses")):
                    fetches[way][index] += after[name] - before[name]
    return {"seconds": seconds, "ahead": {way: ahead / max(1, ahead + late) for way, (ahead, late) in fetches.items()}}


class Lookahead:
    """Switches off, in an engine, all actions before an op needs them."""

    def __init__(self, engine):
        self.on = True
        weights, updates = engine.weights, engine.cycle.updates
        read, copy, read_states = weights.read, weights.copy, updates.read_states
        weights.read = lambda span: read(span) if self.on else None
        weights.copy = lambda span, *, needed: copy(span, needed=needed) if self.on or needed else None
        updates.read_states = lambda chunk: read_states(chunk) if self.on else None


def speed_ups(seconds: dict) -> list[float]:
    """The speed-up of each round."""
    return [statistics.median(late) / statistics.median(ahead) for ahead, late in zip(seconds["ahead"], seconds["on demand"])]


def plot(options, found: dict) -> None:
    pyplot = output.pyplot()
    figure, axes = pyplot.subplots(figsize=(5.5, 3.5), layout="constrained")
    rounds = [speed_ups(each["seconds"]) for each in found.values()]
    medians = [statistics.median(each) for each in rounds]
    axes.errorbar([str(batch) for batch in found], medians, yerr=error_bars(rounds), fmt="o-", capsize=3)
    axes.axhline(1, color="grey", linewidth=0.5)
    axes.set(xlabel="batch", ylabel="step on demand / step ahead", ylim=(0, None))
    axes.set_title(f"fetching ahead: {options.device}, states in {options.place}, hidden {options.hidden}", fontsize=10)
    figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    exit_with(main)
