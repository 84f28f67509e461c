"""Does training suffer from bf16 moments? A byte-level GPT on text, with fp32 and with bf16 moments, from the same seeds.

    python bench/moments.py [--steps 500] [--seeds 3] [--device cuda] [--json FILE] [--plot FILE.png]

Everything else is equal: weights, data and their order. The loss is that of 20 held-out batches after the last step; the
plot (it needs matplotlib) shows the training losses, averaged over 20 steps.
"""

import argparse
import json
import tempfile

import torch

import infinity
from infinity.gpt import GPT, Batches, read_bytes, standard_library_paths


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    options = parser.parse_args()
    text = read_bytes(standard_library_paths())
    results = []
    for seed in range(options.seeds):
        runs = {moments: run(options, text, seed, moments) for moments in ("fp32", "bf16")}
        difference = runs["bf16"]["held_out"] / runs["fp32"]["held_out"] - 1
        results.append({"seed": seed, "difference": difference} | runs)
        print(
            f"seed {seed}: held-out loss fp32 moments {runs['fp32']['held_out']:.4f}, bf16 {runs['bf16']['held_out']:.4f}, "
            f"difference {difference:+.2%}",
            flush=True,
        )
    print(f"largest difference {max(abs(r['difference']) for r in results):.2%}, torch {torch.__version__}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)
    if options.plot:
        plot(results, options.plot)


def run(options, text, seed: int, moments: str) -> dict:
    seq, batch = 128, 16
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as swap:
        config = infinity.Config(nvme=swap, device=options.device, dtype="bf16", moments=moments, seed=seed)
        with infinity.init(config):
            model = GPT(options.hidden, options.layers, 4, 256, seq)
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

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for result in results:
        for moments, style in (("fp32", "-"), ("bf16", "--")):
            losses = torch.tensor(result[moments]["losses"])
            smooth = losses.unfold(0, 20, 1).mean(1)
            label = f"seed {result['seed']}, {moments} moments"
            axes.plot(range(20, len(losses) + 1), smooth, style, color=f"C{result['seed']}", linewidth=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, mean of 20 steps")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
