"""Model TFLOP/s of a GPU by size of the model, on one GPU and on several, beside FSDP2 and DeepSpeed with CPU offload.

    python bench/throughput.py [--json FILE] [--plot FILE]

Figure 5c of ZeRO-Infinity shows the same, and PatrickStar shows throughput by size and by number of GPUs. The bench reads
the steps from the tables `prediction`, `finetune` and `largest` in bench/results/: those with 16,384 tokens for each GPU and the default placement.
Machines differ between tables. If a table has several rows for a point, the fastest one counts. Model TFLOP/s are 6 operations a parameter and
token, without embeddings and with the head, and causal attention. Recomputation is not counted.
"""

import argparse
import json
import re
from pathlib import Path

import _common
import predict
from _shapes import size_of

from infinity.output import pyplot, table, write_json

RESULTS = Path(__file__).parent / "results"
ROWS = ("1 B", "3 B", "8 B", "8 B, clipped", "14 B", "32 B", "32 B, bf16 moments")
PEERS = ("FSDP2 CPU offload", "DeepSpeed ZeRO-3 CPU offload")
LARGEST = {"Llama 23.57 B, 8-bit states": "24b", "Qwen2.5 32.76 B, 8-bit states, no master": "32b"}  # of the table `largest`
LLAMAS = {"Llama 1.24 B": "1b", "Llama 3.21 B": "3b", "Llama 8.03 B": "8b"}  # of the table `finetune`
TOKENS = 4 * predict.SEQUENCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = _common.parse(parser)
    found = points()
    rows = [
        [engine, f"{each['parameters'] / 1e9:.2f}", each["machine"], f"{each['seconds']:.3f}", f"{each['tflops']:.0f}"]
        for engine, line in found.items()
        for each in line
    ]
    print(table(["engine", "10^9 parameters", "machine", "s a step", "TFLOP/s a GPU"], rows))
    if options.json:
        write_json(options.json, found)
    if options.plot:
        plot(found, options.plot)


def points() -> dict[str, list[dict]]:
    """By engine: the points in the order of their sizes."""
    found = {}
    for row in rows_of("prediction"):
        name, gpus = re.fullmatch(r"(.+?)(?:, (\d+ GPUs))?", row["row"]).groups()
        if name in ROWS:
            note(found, f"this engine, {gpus or 'one GPU'}", predict.row_of("cuda", row["row"]).model, row["measured, s"], row)
    for row in rows_of("largest"):
        if row["model"] in LARGEST:
            note(found, "this engine, 8-bit states, one GPU of 80 GB", LARGEST[row["model"]], row["step, s"], row)
    for row in rows_of("finetune"):
        is_alike = row["model"] in LLAMAS and row["tokens a step"] == TOKENS and row["micro-batches"] == 1
        if is_alike and row["engine"] in PEERS:
            note(found, f"{row['engine']}, one GPU", LLAMAS[row["model"]], row["step, s"], row)
    return {engine: sorted(line.values(), key=lambda each: each["parameters"]) for engine, line in found.items()}


def rows_of(topic: str) -> list[dict]:
    return json.loads((RESULTS / f"{topic}.json").read_text())["rows"]


def note(found: dict, engine: str, model: str, seconds: float, row: dict) -> None:
    size, line = size_of(model, predict.SEQUENCE), found.setdefault(engine, {})
    if model not in line or seconds < line[model]["seconds"]:
        tflops = size.flops_a_token * TOKENS / seconds / 1e12
        line[model] = {"parameters": size.num_parameters, "seconds": seconds, "tflops": tflops, "machine": row["machine"], "row": row}


def plot(found: dict, path: Path) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    most = 0.0
    for engine, line in found.items():
        style = "s--" if engine.startswith(PEERS) else "o-"
        axis.plot([each["parameters"] / 1e9 for each in line], [each["tflops"] for each in line], style, label=engine)
        most = max([most, *(each["tflops"] for each in line)])
    sizes = sorted({round(each["parameters"] / 1e9, 1) for line in found.values() for each in line})
    axis.set(xscale="log", xlabel="10^9 parameters", ylabel="model TFLOP/s of a GPU", ylim=(0, 1.5 * most), title=f"Llamas, {TOKENS:,} tokens a GPU")
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    _common.exit_with(main)
