"""What records in the device margin save: all updates on the host, and a share of the records on the device, in turn.

    python bench/margin.py [--device cuda] [--margins 8GiB,14GiB] [--hidden 4096] [--layers 4] [--rounds 3] [--json FILE]

Every record has its home in host memory. `host` is weights="host", states="host"; the others are given that much device memory, of which
weights take what they need first. Engines take turns in blocks of steps, so that an update hides behind the next forward pass
as it does in training; the first two steps of a block are not counted. Losses are compared.
"""

import argparse
import json
import statistics
import time

import torch

import infinity
from infinity.gpt import GPT


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--margins", default="8GiB,14GiB")
    parser.add_argument("--host-memory", default="auto")
    shape = (("hidden", 4096), ("layers", 4), ("heads", 32), ("vocab", 32000), ("seq", 1024))
    for name, default in (*shape, ("batch", 4), ("rounds", 3), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--json")
    options = parser.parse_args()

    trainings = {"host": training(options, weights="host", states="host")}
    for margin in options.margins.split(","):
        trainings[margin] = training(options, device_memory=margin)
    seconds = {name: [] for name in trainings}
    losses = {name: [] for name in trainings}
    for _ in range(options.rounds):
        for name, (model, optimizer) in trainings.items():
            block = [step(options, model, optimizer, len(losses[name]) + i) for i in range(options.steps)]
            infinity.engine_of(model).flush()
            seconds[name] += [each for each, _ in block[2:]]
            losses[name] += [loss for _, loss in block]
    base = statistics.median(seconds["host"])
    for name, (model, _) in trainings.items():
        engine, median = infinity.engine_of(model), statistics.median(seconds[name])
        worst = max(abs(a - b) / a for a, b in zip(losses["host"], losses[name]))
        print(
            f"{name:>8}: {median:.4f} s ({min(seconds[name]):.4f}-{max(seconds[name]):.4f}), {base / median:.2f}x host; "
            f"{len(engine.margin.promoted)} of {len(engine.registry.spans)} spans' records on the device, peak "
            f"{engine.stats()['peak_device_nbytes'] / 2**30:.2f} GiB; losses differ by {worst:.1e}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"seconds": seconds, "losses": losses, "torch": torch.__version__}, file, indent=1)


def training(options, **config):
    """(model, optimizer) of an engine of its own, all with the same first weights."""
    torch.manual_seed(0)
    config = {"device": options.device, "dtype": options.dtype, "host_memory": options.host_memory} | config
    with infinity.init(infinity.Config(**config)):
        shape = (options.hidden, options.layers, options.heads, options.vocab, options.seq)
        model = GPT(*shape, checkpoint_activations=True)
    return model, infinity.AdamW(model.parameters(), lr=1e-4)


def step(options, model, optimizer, number):
    """(seconds, loss) of one step, until the device is done with it."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, options.vocab, (options.batch, options.seq + 1), generator=generator).to(options.device)
    start = time.perf_counter()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start, value


if __name__ == "__main__":
    main()
