"""Predicted against measured steps: `infinity plan`'s predictor beside the engine, after one `infinity calibrate` (table T4).

    python bench/predict.py [--nvme DIR] [--machine FILE] [--only ROW...] [--steps 8] [--limit 180] [--list] [--predict-only]
                            [--measure-only] [--json FILE] [--plot FILE]

First `infinity calibrate` measures the machine, unless --machine names a file. Then each row runs in a process of its own, and the same row is
predicted. A step's time is the median of the second half of its steps, its bytes are their mean: in the first steps the engine still tries
placements. If it has undone a placement, the two steps after that do not count, unless the run ends before. Memory is the most of a run: tensors
on a GPU, pinned host memory, files on NVMe. On a GPU the models are Llamas of transformers with random weights, 4,096 tokens a sequence, and the
loss of 4,096 tokens at a time. On the CPU the model is a GPT of 51 M parameters. An error is predicted / measured - 1.

The bars: seconds 7 % in the median and 15 % at worst, bytes of each link 2 %, memory of each tier 3 %. A link counts if it moves 5 % of the
bytes of the weights or more. A miss gives exit status 1, but only with 8 rows or more: a median of fewer has little meaning.

On a machine of N GPUs, the rows of ON_SEVERAL also run on all GPUs, as "3 B, N GPUs". --only also takes a smaller number, such as "3 B, 2 GPUs"
on a machine of eight. Each GPU has the tokens of the row for one GPU. A --json file keeps the options of its rows: a row whose options have
changed since is refused.

--measure-only and --predict-only do one half. What the --json file already has is not done again, so the halves may run on two machines:
--predict-only needs no GPU. Both halves use the machine of --machine, else that in the --json file.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _common
import torch
from _shapes import Causal, draw_tokens, make

import infinity
from infinity.config import Config
from infinity.errors import BudgetError
from infinity.model.gpt import GPT
from infinity.output import pyplot, table, write_json
from infinity.plan.tiers import DEVICE, HOST, NVME
from infinity.system.events import LINKS
from infinity.tools.machine import Machine
from infinity.tools.meta_models import Subject
from infinity.tools.predict.prediction import Prediction, predict
from infinity.tools.predict.simulated_run import TrainingStep

MEDIAN_BAR, WORST_BAR, BYTES_BAR, MEMORY_BAR = 0.07, 0.15, 0.02, 0.03
LEAST_ROWS = 8  # for the bars to count
LEAST_SHARE = 0.05  # of the bytes of the weights, for a link that counts
SEQUENCE = 4096
GPT_51M = {"hidden": 768, "layers": 6, "heads": 12, "vocab": 8000, "seq": 128}
HALVES = ("predicted", "measured")
TIERS = {"device": DEVICE, "host": HOST, "nvme": NVME}


def on(tier: str, **config) -> dict:
    return {"param_tier": tier, "optimizer_state_tier": tier} | config


@dataclasses.dataclass(frozen=True)
class Row:
    """model: of `_shapes`, or "gpt". micro_batch: sequences of a rank. config: of the engine. checkpoint: activations are recomputed."""

    model: str
    micro_batch: int
    config: dict
    num_micro_batches: int = 1
    by_layer: bool = False
    max_grad_norm: float | None = None
    checkpoint: bool = True
    num_ranks: int = 1


def llama(model: str, config: dict | None = None, micro_batch: int = 4, *, clip: bool = True, loop: int = 1, layer: int = 1) -> Row:
    return Row(model, micro_batch, config or {}, max(loop, layer), layer > 1, 1.0 if clip else None)


def small(config: dict, micro_batch: int = 1, **others) -> Row:
    return Row("gpt", micro_batch, {"dtype": "fp32"} | config, **others)


NO_CACHE = on("nvme", residency="none")
ROWS = {
    "cuda": {
        "1 B": llama("1b"),
        "1 B, 16 sequences": llama("1b", micro_batch=16),
        "1 B, host": llama("1b", on("host")),
        "1 B, nvme": llama("1b", on("nvme", host_memory="8GiB", device_memory="6GiB"), clip=False),
        "1 B, nvme, loop": llama("1b", on("nvme", host_memory="8GiB", device_memory="6GiB"), clip=False, loop=2),
        "1 B, nvme, by layer": llama("1b", on("nvme", host_memory="6GiB", device_memory="3GiB"), layer=8),
        "3 B": llama("3b"),
        "3 B, host": llama("3b", on("host")),
        "3 B, host, loop": llama("3b", on("host"), loop=4),
        "3 B, host, by layer": llama("3b", on("host"), layer=4),
        "3 B, small device": llama("3b", {"device_memory": "12GiB"}),
        "3 B, nvme": llama("3b", on("nvme", host_memory="24GiB", device_memory="10GiB"), clip=False),
        "3 B, nvme, by layer": llama("3b", on("nvme", host_memory="24GiB", device_memory="16GiB"), layer=8),
        "8 B": llama("8b", clip=False),
        "8 B, clipped": llama("8b"),
        "8 B, 8k tokens": llama("8b", micro_batch=2),
        "8 B, small device": llama("8b", {"device_memory": "30GiB"}),
        "8 B, small device, not clipped": llama("8b", {"device_memory": "30GiB"}, clip=False),
        "8 B, loop": llama("8b", {"device_memory": "40GiB"}, loop=4),
        "8 B, by layer": llama("8b", {"device_memory": "40GiB"}, layer=4),
        "8 B, by layer, 128k tokens": llama("8b", {"device_memory": "40GiB"}, layer=8),
        "14 B": llama("14b", clip=False),
    },
    "cpu": {
        "nvme": small(NO_CACHE | {"update": "backward"}),
        "nvme, deferred": small(NO_CACHE | {"update": "deferred"}),
        "nvme, chunks of 2 MiB": small(NO_CACHE | {"chunk_mib": 2.0}),
        "nvme, chunks of 16 MiB": small(NO_CACHE | {"chunk_mib": 16.0}),
        "nvme, batch x 4": small(NO_CACHE, 4),
        "nvme, clipped": small(NO_CACHE, max_grad_norm=1.0),
        "weights host, states nvme": small({"param_tier": "host", "optimizer_state_tier": "nvme"}),
        "half in host memory": small({"host_memory": "300MiB", "device_memory": "120MiB"}),
        "host": small(on("host", update="backward")),
        "host, deferred": small(on("host", update="deferred")),
        "host, batch x 4": small(on("host"), 4),
        "host, no checkpointing": small(on("host"), checkpoint=False),
        "device": small(on("device")),
        "nvme, loop": small(NO_CACHE, num_micro_batches=3),
        "nvme, by layer": small(NO_CACHE | {"device_memory": "150MiB"}, num_micro_batches=3, by_layer=True),
        "host, loop": small(on("host", device_memory="150MiB"), num_micro_batches=3),
    },
}
FOR_SEVERAL = {"32 B": llama("32b"), "32 B, bf16 moments": llama("32b", {"optimizer_state_dtype": "bf16"})}  # too large for one GPU here
ON_SEVERAL = ("1 B, host", "3 B", "3 B, host", "8 B, clipped", "8 B, small device", "8 B, by layer", "14 B", *FOR_SEVERAL)


def row_of(kind: str, name: str) -> Row:
    """The row of a name such as "3 B, host", or "3 B, host, 4 GPUs". Raises KeyError."""
    alone, num = name, 1
    if kind == "cuda" and (found := re.fullmatch(r"(.+), ([2-9]|[1-9]\d+) GPUs", name)):
        alone, num = found[1], int(found[2])
    rows = ROWS[kind] | (FOR_SEVERAL if num > 1 else {})
    return dataclasses.replace(rows[alone], num_ranks=num)


def names_on(kind: str, num_devices: int) -> list[str]:
    """All rows of a machine: those of one device, and the rows that all its GPUs run together."""
    several = [f"{name}, {num_devices} GPUs" for name in ON_SEVERAL] if kind == "cuda" and num_devices > 1 else []
    return [*ROWS[kind], *several]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path("infinity-swap"), help="made if it does not exist")
    parser.add_argument("--machine", type=Path, help="a file of infinity calibrate")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows")
    parser.add_argument("--steps", type=_common.at_least(2), default=8)
    parser.add_argument("--limit", type=_common.positive_float, default=180, help="seconds of a measured row")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    halves = parser.add_mutually_exclusive_group()
    halves.add_argument("--predict-only", action="store_true", help="measure nothing")
    halves.add_argument("--measure-only", action="store_true", help="predict nothing")
    parser.add_argument("--runner", help=argparse.SUPPRESS)
    options = _common.parse(parser)
    if options.runner:
        work = functools.partial(measure, **json.loads(options.runner))
        if "RANK" in os.environ:
            _common.leave(work)
        else:
            print("row " + json.dumps(work()), flush=True)
        os._exit(0)  # a row's swap files are gone with its directory
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() and options.json.stat().st_size else {}
    if before and "machine" not in before:
        parser.error(f"--json {options.json}: the file is of another bench; name another one")
    machine = Machine.load(options.machine) if options.machine else Machine.from_table(before["machine"]) if before else None
    if before and machine.to_table() != before["machine"]:
        parser.error(f"--json {options.json}: its rows are of another machine than --machine; name another file")
    if options.measure_only and not options.json:
        parser.error("--measure-only: name a file for the rows with --json")
    if options.predict_only and machine is None:
        parser.error("--predict-only: name a machine with --machine")
    kind = machine.device if machine else "cuda" if torch.cuda.is_available() else "cpu"
    num_devices = machine.devices if machine else max(1, torch.cuda.device_count())
    names = names_on(kind, num_devices)
    for name in options.only or ():
        try:
            row = row_of(kind, name)
        except KeyError:
            parser.error(f"--only {name!r}: the rows are {', '.join(map(repr, names))}")
        if row.num_ranks > num_devices:
            parser.error(f"--only {name!r}: it needs {row.num_ranks} GPUs, and the machine has {num_devices}")
    if options.list:
        print("\n".join(names))
        return 0
    options.nvme.mkdir(parents=True, exist_ok=True)
    machine = machine or calibrated(options.nvme)
    found = before.get("rows", {})
    for name in options.only or names:
        pair, row = found.setdefault(name, {}), row_of(kind, name)
        if pair.setdefault("row", dataclasses.asdict(row)) != dataclasses.asdict(row):
            parser.error(f"--json {options.json}: its row {name!r} had other options; name another file")
        if not options.measure_only and "s" not in pair.get("predicted", {}):
            pair["predicted"] = predicted(row, machine)
        if not options.predict_only and "s" not in pair.get("measured", {}):
            pair["measured"] = in_a_process(kind, name, options)
        print(name, *(f"{which} {told(pair[which])}" for which in HALVES if which in pair), sep="; ", flush=True)
        if options.json:
            write_json(options.json, {"machine": machine.to_table(), "rows": found, "torch": torch.__version__})
    compared = {name: compare(pair) for name, pair in found.items() if all("s" in pair.get(which, {}) for which in HALVES)}
    if options.plot and compared:
        plot(found, compared, options.plot)
    return judge(found, compared) if compared else int(not (options.predict_only or options.measure_only))


def calibrated(nvme: Path) -> Machine:
    """This machine, measured by `infinity calibrate`. If calibrate fails, its message and exit status are used."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "infinity.toml"
        num_gpus = torch.cuda.device_count()
        many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}"] if num_gpus > 1 else []
        done = subprocess.run([sys.executable, *many, "-m", "infinity", "calibrate", str(nvme), "--output", str(output)])
        if done.returncode:
            sys.exit(done.returncode)
        return Machine.load(output)


def in_a_process(kind: str, name: str, options) -> dict:
    """The measured row, or {"error": reason}."""
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        told = {"kind": kind, "name": name, "num_steps": options.steps, "folder": folder}
        arguments, num_ranks = ["--runner", json.dumps(told)], row_of(kind, name).num_ranks
        try:
            if num_ranks > 1:
                return _common.on_ranks(__file__, arguments, num_ranks, options.limit)[0]
            done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=options.limit)
        except _common.RunError as error:
            return {"error": str(error)}
        except subprocess.TimeoutExpired:
            return {"error": f"not over after {options.limit:.0f} s"}
    line = next((line for line in done.stdout.splitlines() if line.startswith("row ")), None)
    return json.loads(line[4:]) if line else {"error": (done.stderr.strip().splitlines() or ["no result"])[-1]}


def measure(kind: str, name: str, num_steps: int, folder: str) -> dict:
    """Train a row here. Returns seconds, bytes by link, and bytes of memory by tier."""
    row, device = row_of(kind, name), torch.device(kind)
    if row.num_ranks > 1:
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    with infinity.init(Config(device=kind, swap_dirs=folder, verbose=False, **row.config)):
        model = made(row, device)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-5, accumulation_steps=row.num_micro_batches, max_grad_norm=row.max_grad_norm)
    engine = infinity.engine_of(model)
    batches, seconds, moved = [batch_of(row, device, number) for number in range(row.num_micro_batches)], [], []
    rollbacks = []  # so many so far, by step
    for _ in range(num_steps):
        before, start = {link: engine.stats()["links"][link]["nbytes"] for link in LINKS}, time.perf_counter()
        if row.by_layer:
            infinity.accumulate(model, batches, lambda model, batch: model(*batch) / len(batches))
        else:
            for batch in batches:
                (model(*batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        moved.append({link: engine.stats()["links"][link]["nbytes"] - before[link] for link in LINKS})
        rollbacks.append(engine.stats()["num_placement_rollbacks"])
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    memory = {"nvme": sum(path.stat().st_blocks * 512 for path in files)}
    if kind == "cuda":
        stats = engine.stats()
        memory |= {"device": stats["peak_allocated_nbytes"], "host": stats["pinned_host_nbytes"] * row.num_ranks}
    settled = rollbacks.index(rollbacks[-1]) + 3 if rollbacks[-1] else 0
    last = range(max(num_steps // 2, min(settled, num_steps - 1)), num_steps)
    return {
        "s": statistics.median(seconds[step] for step in last),
        "steps": seconds,
        "nbytes": {link: statistics.fmean(moved[step][link] for step in last) for link in LINKS},
        "memory": memory,
        "num_chunks": len(engine.layout.chunks),
    }


def made(row: Row, device: torch.device):
    if row.model == "gpt":
        return GPT(**GPT_51M, checkpoint_activations=row.checkpoint)
    return make(row.model, SEQUENCE, SEQUENCE, device)


def batch_of(row: Row, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each int64 [micro_batch, tokens]."""
    if row.model == "gpt":
        drawn = torch.randint(GPT_51M["vocab"], (row.micro_batch, GPT_51M["seq"] + 1), generator=torch.Generator().manual_seed(seed))
    else:
        drawn = draw_tokens(row.model, row.micro_batch, SEQUENCE, seed)
    drawn = drawn.to(device)
    return drawn[:, :-1], drawn[:, 1:]


def predicted(row: Row, machine: Machine) -> dict:
    """As `measure`, without the single steps, or {"error": reason}."""
    model = made(row, torch.device("meta")) if row.model != "gpt" else None
    if model is None:
        with torch.device("meta"):
            model = made(row, torch.device("meta"))
    names = ("tokens", "following") if isinstance(model, Causal) else ("tokens", "targets")
    tokens = torch.empty(row.micro_batch, SEQUENCE if isinstance(model, Causal) else GPT_51M["seq"], dtype=torch.int64, device="meta")
    subject = Subject(row.model, model, dict.fromkeys(names, tokens), tokens.numel())
    step = TrainingStep(num_micro_batches=row.num_micro_batches, by_layer=row.by_layer, max_grad_norm=row.max_grad_norm)
    begin = time.perf_counter()
    machine = dataclasses.replace(machine, devices=row.num_ranks)
    try:
        found: Prediction = predict(subject, machine, Config(**row.config), step)
    except BudgetError as error:
        return {"error": str(error)}
    memory = {name: found.memory[tier].needed for name, tier in TIERS.items() if machine.device == "cuda" or name == "nvme"}
    nbytes = {link: found.uses[link].nbytes for link in LINKS}
    times = {"s": found.step_seconds, "compute_s": found.compute_seconds, "took_s": time.perf_counter() - begin}
    return times | {"nbytes": nbytes, "memory": memory, "num_chunks": len(found.layout.chunks), "num_parameters": found.layout.num_parameters}


def told(value: dict) -> str:
    if "error" in value:
        return value["error"]
    moved = ", ".join(f"{link} {nbytes / 1e9:.2f} GB" for link, nbytes in value["nbytes"].items() if nbytes)
    return f"{value['s']:.3f} s, {moved}, " + ", ".join(f"{tier} {nbytes / 2**30:.2f} GiB" for tier, nbytes in value["memory"].items() if nbytes)


def compare(pair: dict) -> dict:
    """Errors of a row: of seconds, of each link that counts, and of each tier."""
    before, after = pair["predicted"], pair["measured"]
    least = LEAST_SHARE * 2 * before["num_parameters"]
    links = {link: before["nbytes"][link] / nbytes - 1 for link, nbytes in after["nbytes"].items() if nbytes > least}
    tiers = {tier: before["memory"][tier] / nbytes - 1 for tier, nbytes in after["memory"].items() if nbytes > least}
    return {"s": before["s"] / after["s"] - 1, "links": links, "memory": tiers}


def judge(found: dict, compared: dict) -> int:
    """Print the table and the bars. Returns the exit status."""

    def worst(errors: dict) -> str:
        name = max(errors, key=lambda name: abs(errors[name]), default=None)
        return f"{errors[name]:+.1%} {name}" if name else "-"

    rows = []
    for name, each in compared.items():
        times = [f"{found[name][which]['s']:.3f}" for which in ("predicted", "measured")]
        rows.append([name, *times, f"{each['s']:+.1%}", worst(each["links"]), worst(each["memory"])])
    print(table(["row", "predicted, s", "measured, s", "error", "bytes, worst", "memory, worst"], rows))
    seconds = [abs(each["s"]) for each in compared.values()]
    nbytes = max((abs(error) for each in compared.values() for error in each["links"].values()), default=0.0)
    memory = max((abs(error) for each in compared.values() for error in each["memory"].values()), default=0.0)
    median = statistics.median(seconds)
    print(f"{len(rows)} rows: seconds {median:.1%} in the median, {max(seconds):.1%} at worst; bytes {nbytes:.1%}, memory {memory:.1%} at worst")
    missed = median > MEDIAN_BAR or max(seconds) > WORST_BAR or nbytes > BYTES_BAR or memory > MEMORY_BAR
    if missed:
        print(f"that misses a bar: {MEDIAN_BAR:.0%} and {WORST_BAR:.0%}, {BYTES_BAR:.0%}, {MEMORY_BAR:.0%}")
    return int(missed and len(rows) >= LEAST_ROWS)


def plot(found: dict, compared: dict, path: Path) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 6), layout="constrained")
    points = {name: (found[name]["measured"]["s"], found[name]["predicted"]["s"]) for name in compared}
    ends = [0.7 * min(map(min, points.values())), 1.4 * max(map(max, points.values()))]
    axis.plot(ends, ends, color="black", linewidth=1)
    axis.fill_between(ends, [(1 - WORST_BAR) * end for end in ends], [(1 + WORST_BAR) * end for end in ends], alpha=0.15, label="within 15 %")
    for name, point in points.items():
        axis.plot(*point, "o", markersize=4)
        axis.annotate(name, point, fontsize=7, xytext=(6, -3), textcoords="offset points")
    axis.set(xscale="log", yscale="log", xlabel="measured, s a step", ylabel="predicted, s a step", xlim=ends, ylim=ends)
    axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    _common.exit_with(main)
