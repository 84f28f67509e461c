"""The effect of bf16 moments on the loss: a byte-level GPT on text, with fp32 and with bf16 moments, from the same seeds.

    python bench/moments.py [--steps 500] [--seeds 3] [--device cuda] [--json FILE] [--plot FILE.png]

Weights, data and their order are equal. A third run has fp32 moments and weights that are all 1e-6 larger: its difference shows how far
two runs separate without another cause. Losses are the mean of the last 50 training steps, and of 20 held-out batches. The plot (it
needs matplotlib) shows the training losses, averaged over 20 steps.
"""

import argparse
import json
import tempfile

import torch
from _common import exit_with, positive

import infinity
from infinity.model.gpt import GPT, Batches, read_bytes, standard_library_paths


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=500)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--hidden", type=positive, default=128)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--device")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    options = parser.parse_args()
    text = read_bytes(standard_library_paths())
    results = []
    for seed in range(options.seeds):
        runs = {moments: run(options, text, seed, moments) for moments in ("fp32", "bf16")}
        runs["control"] = run(options, text, seed, "fp32", factor=1 + 1e-6)
        results.append({"seed": seed} | runs)
        for kind in ("training", "held_out"):
            base = loss_of(runs["fp32"], kind)
            print(
                f"seed {seed}: {kind:8s} loss, fp32 moments {base:.4f}; bf16 moments {loss_of(runs['bf16'], kind) / base - 1:+.2%}, "
                f"control {loss_of(runs['control'], kind) / base - 1:+.2%}",
                flush=True,
            )
    print(f"torch {torch.__version__}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)
    if options.plot:
        plot(results, options.plot)


def loss_of(report: dict, kind: str) -> float:
    return report["held_out"] if kind == "held_out" else sum(report["losses"][-50:]) / 50


def run(options, text, seed: int, moments: str, factor: float = 1.0) -> dict:
    seq, batch = 128, 16
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as swap:
        config = infinity.Config(swap_dirs=swap, device=options.device, dtype="bf16", optimizer_state_dtype=moments, seed=seed)
        with infinity.init(config):
            model = GPT(options.hidden, options.layers, 4, 256, seq)
            with torch.no_grad():  # here, while values are fp32: a bf16 weight would not move
                for param in model.parameters():
                    param.mul_(factor)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        with infinity.engine_of(model) as engine:
            losses = []
            batches = Batches(text, vocab=256, batch=batch, seq=seq, seed=seed, rank=0, world=1)
            for step in range(options.steps):
                loss = model(*(part.to(engine.device) for part in batches(step)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            held_out = Batches(text, vocab=256, batch=batch, seq=seq, seed=10_000 + seed, rank=0, world=1)
            with torch.no_grad():
                found = [model(*(part.to(engine.device) for part in held_out(i))).item() for i in range(20)]
    return {"losses": losses, "held_out": sum(found) / len(found)}


def plot(results: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(3, 2))
    for result in results:
        color, seed = f"C{result['seed']}", f"seed {result['seed']}"
        smooth = {kind: torch.tensor(r["losses"]).unfold(0, 20, 1).mean(1) for kind, r in result.items() if kind != "seed"}
        steps = range(20, len(result["fp32"]["losses"]) + 1)
        above.plot(steps, smooth["fp32"], color=color, linewidth=1.2, label=f"{seed}, fp32 moments")
        above.plot(steps, smooth["bf16"], color="black", linewidth=0.7, linestyle=":")
        below.plot(steps, 100 * (smooth["bf16"] / smooth["fp32"] - 1), color=color, linewidth=1.2, label=f"{seed}, bf16 moments")
        if "control" in smooth:
            drift = 100 * (smooth["control"] / smooth["fp32"] - 1)
            below.plot(steps, drift, color=color, linewidth=0.8, alpha=0.5, label=f"{seed}, control")
    above.plot([], [], color="black", linewidth=0.7, linestyle=":", label="bf16 moments")
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
