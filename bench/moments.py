"""The effect of the storage of moments on the loss: a byte-level GPT on text, from the same seeds.

    python bench/moments.py [--moments bf16,8bit,bitsandbytes,control] [--steps 500] [--seeds 3] [--device cuda] [--json FILE] [--plot FILE.png]

Weights, data and their order are equal. The learning rate rises in the first 100 steps and then falls to a tenth along a cosine, and gradients
are clipped at norm 1: without both, some runs have spikes of the loss. Every run is compared with one of fp32 moments. control is a run with
fp32 moments and weights that are all 1e-6 larger: its difference shows how far two runs separate without another cause. bitsandbytes is plain
PyTorch with bf16 weights, fp32 masters and `bitsandbytes.optim.AdamW8bit`. Losses are the mean of the last 50 training steps, and of 20
held-out batches. The plot (it needs matplotlib) shows the training losses, averaged over 20 steps.
"""

import argparse
import contextlib
import json
import math
import statistics
import tempfile

import torch
from _common import at_least, exit_with, positive

import infinity
from infinity.model.gpt import GPT, Batches, read_bytes, standard_library_paths

KINDS = ("bf16", "8bit", "bitsandbytes", "control")
SEQ, BATCH = 128, 16
LR, NUM_WARM = 1e-3, 100
HYPER = {"weight_decay": 0.1}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=500)
    parser.add_argument("--moments", default="bf16,control", help="runs to compare with fp32 moments")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--first-seed", type=at_least(0), default=0)
    parser.add_argument("--hidden", type=positive, default=128)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--device")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    options = parser.parse_args()
    text = read_bytes(standard_library_paths())
    kinds, results = options.moments.split(","), []
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"{unknown[0]!r} is no kind of moments: expected {', '.join(KINDS)}")
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        runs = {kind: run(options, text, seed, kind) for kind in ("fp32", *kinds)}
        results.append({"seed": seed} | runs)
        for measure in ("training", "held_out"):
            base = loss_of(runs["fp32"], measure)
            others = ", ".join(f"{kind} {loss_of(runs[kind], measure) / base - 1:+.2%}" for kind in kinds)
            print(f"seed {seed}: {measure:8s} loss, fp32 moments {base:.4f}; {others}", flush=True)
    print(f"torch {torch.__version__}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)
    if options.plot:
        plot(results, options.plot)


def loss_of(report: dict, kind: str) -> float:
    return report["held_out"] if kind == "held_out" else statistics.mean(report["losses"][-50:])


def run(options, text, seed: int, kind: str) -> dict:
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as swap, contextlib.ExitStack() as stack:
        model, step, device = plain(options) if kind == "bitsandbytes" else offloaded(options, seed, kind, swap, stack)
        losses, batches = [], batches_of(text, seed)
        for number in range(options.steps):
            loss = model(*(part.to(device) for part in batches(number)))
            loss.backward()
            step(lr_at(number, options.steps))
            losses.append(loss.item())
        held_out = batches_of(text, 10_000 + seed)
        with torch.no_grad():
            found = [model(*(part.to(device) for part in held_out(i))).item() for i in range(20)]
    return {"losses": losses, "held_out": sum(found) / len(found)}


def lr_at(step: int, steps: int) -> float:
    after = max(0.0, (step - NUM_WARM) / max(1, steps - NUM_WARM))
    return LR * min(1.0, (step + 1) / NUM_WARM) * (0.55 + 0.45 * math.cos(math.pi * after))


def batches_of(text, seed: int) -> Batches:
    return Batches(text, vocab=256, batch=BATCH, seq=SEQ, seed=seed, rank=0, world=1)


def offloaded(options, seed: int, kind: str, swap: str, stack: contextlib.ExitStack):
    """(model, step, device) of this engine."""
    moments = "fp32" if kind == "control" else kind
    config = infinity.Config(swap_dirs=swap, device=options.device, dtype="bf16", optimizer_state_dtype=moments, seed=seed)
    with infinity.init(config):
        model = GPT(options.hidden, options.layers, 4, 256, SEQ)
        with torch.no_grad():  # here, while values are fp32: a bf16 weight would not move
            for param in model.parameters():
                param.mul_(1 + 1e-6 if kind == "control" else 1.0)
    optimizer = infinity.AdamW(model.parameters(), lr=LR, **HYPER, max_grad_norm=1.0)
    engine = stack.enter_context(infinity.engine_of(model))

    def step(lr):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

    return model, step, engine.device


def plain(options):
    """(model, step, device) of plain PyTorch with fp32 masters and the 8-bit optimizer of bitsandbytes."""
    import bitsandbytes

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = GPT(options.hidden, options.layers, 4, 256, SEQ).to(device)
    params = list(model.parameters())
    masters = [param.detach().clone() for param in params]
    model.bfloat16()
    optimizer = bitsandbytes.optim.AdamW8bit(masters, lr=LR, **HYPER)

    def step(lr):
        optimizer.param_groups[0]["lr"] = lr
        for master, param in zip(masters, params):
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return model, step, device


def plot(results: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(3, 2))
    kinds = [kind for kind in results[0] if kind not in ("seed", "fp32")]
    for result in results:
        color, seed = f"C{result['seed']}", f"seed {result['seed']}"
        num = len(result["fp32"]["losses"])
        smooth = {kind: torch.tensor(result[kind]["losses"]).unfold(0, min(20, num), 1).mean(1) for kind in ("fp32", *kinds)}
        steps = range(min(20, num), num + 1)
        above.plot(steps, smooth["fp32"], color=color, linewidth=1.2, label=f"{seed}, fp32 moments")
        above.plot(steps, smooth[kinds[0]], color="black", linewidth=0.7, linestyle=":")
        for number, kind in enumerate(kinds):
            strength = {"linewidth": 1.2} if not number else {"linewidth": 0.8, "alpha": 0.5}
            name = kind if kind in ("control", "bitsandbytes") else f"{kind} moments"
            below.plot(steps, 100 * (smooth[kind] / smooth["fp32"] - 1), color=color, label=f"{seed}, {name}", **strength)
    above.plot([], [], color="black", linewidth=0.7, linestyle=":", label=f"{kinds[0]} moments")
    above.set_ylabel("training loss, mean of 20 steps")
    below.set_ylabel("difference, %")
    below.axhspan(-0.5, 0.5, color="gray", alpha=0.15)
    below.set_xlabel("step")
    for axes in (above, below):
        axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    exit_with(main)
