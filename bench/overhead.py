"""The engine's overhead if everything stays on the device: compared with the plain PyTorch loop, in one process, in turn.

    python bench/overhead.py [--device cpu] [--hidden 512] [--layers 8] [--steps 12] [--json FILE] [--plot FILE]

GPT, fp32 or bf16 weights and tokens are the same; plain PyTorch uses fused AdamW. The engine's step ends when all of its updates are
done, including updates that would run in the next step. The first two steps are not counted. Losses must agree within --tolerance, or
the exit status is 1.
"""

import argparse
import statistics
import time

import torch
from _common import add_tolerance, agree, apart, at_least, bars, exit_with, given, parse, positive, synchronize

import infinity
from infinity import output
from infinity.model.gpt import GPT

NUM_WARM = 2  # steps that are not counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    for name, default in (("hidden", 512), ("layers", 8), ("heads", 8), ("vocab", 2048), ("seq", 256), ("batch", 2)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--steps", type=at_least(NUM_WARM + 1), default=12)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--update", default="auto")
    add_tolerance(parser)
    options = parse(parser)
    device = torch.device(options.device)
    shape = (options.hidden, options.layers, options.heads, options.vocab, options.seq)

    torch.manual_seed(0)
    plain = GPT(*shape).to(device, torch.float32 if options.dtype == "fp32" else torch.bfloat16)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(0)
    config = infinity.Config(device=options.device, dtype=options.dtype, update=options.update, param_tier="device", optimizer_state_tier="device")
    with infinity.init(config):
        ours = GPT(*shape)
    our_optimizer = infinity.AdamW(ours.parameters(), lr=1e-4)

    seconds = {"plain": [], "infinity": []}
    losses = {"plain": [], "infinity": []}
    for _ in range(options.steps):
        tokens = torch.randint(0, options.vocab, (options.batch, options.seq + 1), device=device)
        for name, model, optimizer in (("plain", plain, plain_optimizer), ("infinity", ours, our_optimizer)):
            synchronize(options.device)
            start = time.perf_counter()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
            if name == "infinity":
                infinity.engine_of(ours).flush()  # a deferred update is the engine's work and counts in the engine's time
            synchronize(options.device)
            seconds[name].append(time.perf_counter() - start)
    counted = {name: values[NUM_WARM:] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in counted.items()}
    ratios = [b / a for a, b in zip(counted["plain"], counted["infinity"])]
    print(f"plain {medians['plain']:.4f} s, infinity {medians['infinity']:.4f} s a step")
    print(f"ratio median {statistics.median(ratios):.3f}  min {min(ratios):.3f}  max {max(ratios):.3f}")
    if options.json:
        report = {"seconds": seconds, "ratios": ratios, "losses": losses, "torch": torch.__version__, "options": given(options)}
        output.write_json(options.json, report)
    if options.plot:
        title = f"all on the device: {options.device}, hidden {options.hidden}, {options.layers} layers, {options.dtype}"
        bars(options.plot, counted, title)
    return int(not agree(options, apart(losses["plain"], losses["infinity"])))


if __name__ == "__main__":
    exit_with(main)
