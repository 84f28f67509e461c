"""What the engine costs when everything stays on the device: the plain PyTorch loop beside it, in one process, in turn.

    python bench/overhead.py [--device cpu] [--hidden 512] [--layers 8] [--steps 12] [--json FILE]

Same GPT, same fp32 or bf16 weights, same tokens; plain PyTorch updates with its fused AdamW. Losses are compared.
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
    parser.add_argument("--device", default="cpu")
    for name, default in (("hidden", 512), ("layers", 8), ("heads", 8), ("vocab", 2048), ("seq", 256), ("batch", 2), ("steps", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--update", default="auto")
    parser.add_argument("--json")
    options = parser.parse_args()
    device = torch.device(options.device)
    shape = (options.hidden, options.layers, options.heads, options.vocab, options.seq)

    torch.manual_seed(0)
    plain = GPT(*shape).to(device, torch.float32 if options.dtype == "fp32" else torch.bfloat16)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(0)
    config = infinity.Config(device=options.device, dtype=options.dtype, update=options.update, weights="device", states="device")
    with infinity.init(config):
        ours = GPT(*shape)
    our_optimizer = infinity.AdamW(ours.parameters(), lr=1e-4)

    seconds = {"plain": [], "infinity": []}
    losses = {"plain": [], "infinity": []}
    for _ in range(options.steps):
        tokens = torch.randint(0, options.vocab, (options.batch, options.seq + 1), device=device)
        for name, model, optimizer in (("plain", plain, plain_optimizer), ("infinity", ours, our_optimizer)):
            synchronize(device)
            start = time.perf_counter()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
            synchronize(device)
            seconds[name].append(time.perf_counter() - start)
        infinity.engine_of(ours).flush()  # a deferred update is this engine's work: not to be done while the other is timed
        synchronize(device)
    medians = {name: statistics.median(values[2:]) for name, values in seconds.items()}
    ratios = [b / a for a, b in zip(seconds["plain"][2:], seconds["infinity"][2:])]
    worst = max(abs(a - b) / a for a, b in zip(losses["plain"], losses["infinity"]))
    print(f"plain {medians['plain']:.4f} s, infinity {medians['infinity']:.4f} s a step")
    print(f"ratio median {statistics.median(ratios):.3f}  min {min(ratios):.3f}  max {max(ratios):.3f}; losses differ by {worst:.1e}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"seconds": seconds, "ratios": ratios, "losses": losses, "torch": torch.__version__}, file, indent=1)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
