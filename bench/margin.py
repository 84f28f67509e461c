"""The gain of records in the device margin: all updates on the host, against a share of the records on the device, in turn.

    python bench/margin.py [--device cuda] [--margins 8GiB,14GiB] [--hidden 4096] [--layers 4] [--rounds 3]
                           [--json FILE] [--plot FILE]

Every record has its home in host memory. `host` means param_tier="host", optimizer_state_tier="host". The other engines get the given device memory, and
weights take their part first. Engines take turns in blocks of steps, so an update hides behind the next forward pass as in training. The
first two steps of a block are not counted. Losses must agree with those of `host` within --tolerance, or the exit status is 1.
"""

import argparse
import statistics

import torch
from _common import add_tolerance, agree, apart, at_least, bars, exit_with, given, parse, positive, spread, step

import infinity
from infinity import output
from infinity.model.gpt import GPT

NUM_WARM = 2  # steps of a block that are not counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--margins", default="8GiB,14GiB")
    parser.add_argument("--host-memory", default="auto")
    shape = (("hidden", 4096), ("layers", 4), ("heads", 32), ("vocab", 32000), ("seq", 1024))
    for name, default in (*shape, ("batch", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--steps", type=at_least(NUM_WARM + 1), default=8)
    parser.add_argument("--dtype", default="bf16")
    add_tolerance(parser)
    options = parse(parser)

    trainings = {"host": training(options, param_tier="host", optimizer_state_tier="host")}
    for margin in options.margins.split(","):
        trainings[margin] = training(options, device_memory=margin)
    seconds = {name: [] for name in trainings}
    losses = {name: [] for name in trainings}
    for _ in range(options.rounds):
        for name, (model, optimizer) in trainings.items():
            block = [step(options, model, optimizer, len(losses[name]) + i) for i in range(options.steps)]
            infinity.engine_of(model).flush()
            seconds[name] += [each for each, _ in block[NUM_WARM:]]
            losses[name] += [loss for _, loss in block]
    base = statistics.median(seconds["host"])
    worst = {name: apart(losses["host"], losses[name]) for name in trainings}
    for name, (model, _) in trainings.items():
        engine, median = infinity.engine_of(model), statistics.median(seconds[name])
        print(
            f"{name:>8}: {spread(seconds[name])} s, {base / median:.2f}x host; "
            f"{len(engine.device_budget.promoted)} of {len(engine.registry.spans)} spans' records on the device, peak "
            f"{engine.stats()['peak_device_nbytes'] / 2**30:.2f} GiB; losses differ by {worst[name]:.1e}"
        )
    if options.json:
        report = {"seconds": seconds, "losses": losses, "torch": torch.__version__, "options": given(options)}
        output.write_json(options.json, report)
    if options.plot:
        bars(options.plot, seconds, f"records on the device: {options.device}, hidden {options.hidden}, {options.layers} layers")
    return int(not agree(options, max(worst.values())))


def training(options, **config):
    """(model, optimizer) of a new engine, all with the same initial weights."""
    torch.manual_seed(0)
    config = {"device": options.device, "dtype": options.dtype, "host_memory": options.host_memory} | config
    with infinity.init(infinity.Config(**config)):
        shape = (options.hidden, options.layers, options.heads, options.vocab, options.seq)
        model = GPT(*shape, checkpoint_activations=True)
    return model, infinity.AdamW(model.parameters(), lr=1e-4)


if __name__ == "__main__":
    exit_with(main)
