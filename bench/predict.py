"""Table T4: predicted against achieved step times, the simulator beside the engine, in many placements on the machine at hand.

    python bench/predict.py [--nvme DIR] [--rounds 2] [--steps 7] [--only NAME...] [--json FILE] [--plot FILE]

First `infinity tune` finds the settings of the drive and measures the machine. Then each configuration takes its turn, a round after the
other: what a machine gives changes from minute to minute, so right before each run of the engine the drive, copies and updates are
measured once more, without an engine, and a plain PyTorch run of the same model says what its compute takes; from these the step is predicted.
Then the engine runs, in a process of its own; the achieved time is the median of its steps after the third. An error is that of the
median round. The bar: 10 % in the median of all configurations, 20 % at worst.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _common
import torch

from infinity import drives
from infinity.config import Config
from infinity.gpt import GPT
from infinity.output import pyplot, table, write_json
from infinity.residency import TORCH_DTYPES
from infinity.tools import probes
from infinity.tools.machine import Machine
from infinity.tools.planning import gpt
from infinity.tools.prediction import predict
from infinity.tools.tuning import probe_in
from infinity.tools.workload import workload

WARM_UP_STEPS = 3

CUDA_MODEL = {"hidden": 2048, "layers": 4, "heads": 16, "vocab": 32000, "seq": 1024, "batch": 4}
CPU_MODEL = {"hidden": 768, "layers": 6, "heads": 12, "vocab": 8000, "seq": 128, "batch": 1}

NVME = {"weights": "nvme", "states": "nvme"}
CONFIGURATIONS = {
    "nvme": NVME | {"residency": "none", "update": "backward"},
    "nvme, deferred": NVME | {"residency": "none", "update": "deferred"},
    "nvme, chunks of 2 MiB": NVME | {"residency": "none", "chunk_mib": 2.0},
    "nvme, chunks of 16 MiB": NVME | {"residency": "none", "chunk_mib": 16.0},
    "nvme, batch x 4": NVME | {"residency": "none", "batch": 4},
    "weights host, states nvme": {"weights": "host", "states": "nvme"},
    "half in host memory": {"host_share": 0.5},
    "host": {"weights": "host", "states": "host", "update": "backward"},
    "host, deferred": {"weights": "host", "states": "host", "update": "deferred"},
    "host, batch x 4": {"weights": "host", "states": "host", "batch": 4},
    "host, no checkpointing": {"weights": "host", "states": "host", "checkpoint": False},
    "device": {"weights": "device", "states": "device"},
}
BF16_ONLY = {"nvme, bf16 moments": NVME | {"residency": "none", "moments": "bf16"}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path("infinity-swap"), help="made if it does not exist")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=[*CONFIGURATIONS, *BF16_ONLY], help="these configurations")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    options = _common.parse(parser)
    if options.plain:
        print(json.dumps(plain_seconds(**json.loads(options.plain))))
        return
    options.nvme.mkdir(exist_ok=True)
    cuda = torch.cuda.is_available()
    base = CUDA_MODEL if cuda else CPU_MODEL
    chosen = CONFIGURATIONS | (BF16_ONLY if cuda else {})
    chosen = {name: dict(chosen[name]) for name in options.only or chosen}
    machine = measured(options.nvme)
    rows = {name: {"rounds": []} for name in chosen}
    for round_ in range(options.rounds):
        for name, settings in chosen.items():
            settings = dict(settings)
            model = base | {"batch": base["batch"] * settings.pop("batch", 1)}
            checkpoint = settings.pop("checkpoint", True)
            machine = calibrated(machine, options.nvme)
            row = predicted(machine, model, checkpoint, settings, run_plain(model, checkpoint, options.steps))
            row["achieved"] = run_engine(options, row)
            rows[name]["rounds"].append(row)
            print(f"round {round_}: {name}: {row['predicted']:.3f} s predicted, {statistics.median(row['achieved']):.3f} s achieved", flush=True)
    lines, errors = [], []
    for name, row in rows.items():
        for round_ in row["rounds"]:
            round_["error"] = round_["predicted"] / statistics.median(round_["achieved"]) - 1
        middle = sorted(row["rounds"], key=lambda round_: round_["error"])[len(row["rounds"]) // 2]
        row |= {"predicted": middle["predicted"], "achieved": statistics.median(middle["achieved"]), "error": middle["error"]}
        errors.append(abs(row["error"]))
        spread = f"{min(round_['error'] for round_ in row['rounds']):+.1%} to {max(round_['error'] for round_ in row['rounds']):+.1%}"
        lines.append([name, f"{row['predicted']:.3f}", f"{row['achieved']:.3f}", f"{row['error']:+.1%}", spread])
    print(table(["configuration", "predicted, s", "achieved, s", "error", "of all rounds"], lines))
    print(f"error: {statistics.median(errors):.1%} in the median, {max(errors):.1%} at worst; {len(errors)} configurations; torch {torch.__version__}")
    if options.json:
        write_json(options.json, {"machine": machine.to_table(), "rows": rows})
    if options.plot:
        plot(rows, options.plot)


def measured(nvme: Path) -> Machine:
    """This machine, by `infinity tune`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "infinity.toml"
        subprocess.run([sys.executable, "-m", "infinity", "tune", str(nvme), "--output", str(output)], check=True, stderr=subprocess.DEVNULL)
        return Machine.load(output)


def calibrated(machine: Machine, nvme: Path) -> Machine:
    """The same, with what its drive, copies and updates give at this moment."""
    folder = os.open(nvme, os.O_RDONLY)
    drive = drives.load(folder)
    os.close(folder)
    with probe_in(nvme) as probe:
        rates = {mix: statistics.median(probe.rate(mix, drive) for _ in range(7)) / 1e9 for mix in drives.MIXES}
    device = torch.device(machine.device)
    copies = {}
    for name, to_device in (("h2d", True), ("d2h", False)):
        with contextlib.closing(probes.Copies(device, 8 << 20, to_device=to_device)) as probe:
            copies[name] = statistics.median(probes.rates(probe, 3)) / 1e9
    return dataclasses.replace(
        machine,
        update_gparams=probes.update_rate(torch.device("cpu")) / 1e9,
        device_update_gparams=probes.update_rate(device) / 1e9,
        **{f"{name}{all_}_gbps": gbps for name, gbps in copies.items() for all_ in ("", "_all")},
        drives=(dataclasses.replace(machine.drives[0], **{f"{mix}_gbps": rate for mix, rate in rates.items()}),),
    )


def predicted(machine: Machine, model: dict, checkpoint: bool, settings: dict, compute_seconds: float) -> dict:
    """What the simulator says, and the command line that does the same in earnest."""
    dtype = "bf16" if machine.device == "cuda" else "fp32"
    settings = dict(settings)
    subject = gpt(*(model[name] for name in ("hidden", "layers", "heads", "vocab", "seq", "batch")), dtype)
    load = workload(subject.model, subject.run, tokens=subject.tokens, recompute=checkpoint)
    machine = dataclasses.replace(machine, device_tflops=load.step_flops / compute_seconds / 1e12)
    num = sum(param.numel() for param in subject.model.parameters())
    if share := settings.pop("host_share", None):
        settings |= {"host_memory": int(share * num * 12), "device_memory": int(num * TORCH_DTYPES[dtype].itemsize * 0.6)}
    config = Config(dtype=dtype, **settings)
    prediction = predict(subject.model, load, machine, config)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in (model | settings).items()]
    arguments += [f"--dtype={dtype}", "--data", "random"] + (["--checkpoint-activations"] if checkpoint else [])
    simulation = prediction.simulation
    return {
        "predicted": prediction.step_seconds,
        "compute": compute_seconds,
        "busy": simulation.busy_seconds,
        "stalls": simulation.stall_seconds,
        "bytes": simulation.nbytes,
        "arguments": arguments,
    }


def run_engine(options, row: dict) -> list[float]:
    """Seconds of the steady steps of one run of `infinity train`."""
    report = options.nvme / "report.json"
    command = [sys.executable, "-m", "infinity", "train", *row["arguments"]]
    command += ["--nvme", str(options.nvme), "--steps", str(options.steps), "--json", str(report)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(report.read_text())
    report.unlink()
    row["links"] = found["links"]
    return found["step_seconds"][WARM_UP_STEPS:]


def run_plain(model: dict, checkpoint: bool, steps: int) -> float:
    command = [sys.executable, __file__, "--plain", json.dumps(model | {"checkpoint": checkpoint, "steps": steps})]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def plain_seconds(hidden, layers, heads, vocab, seq, batch, checkpoint, steps) -> float:
    """Forward and backward of the model in plain PyTorch, the median of the steps after the third."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = GPT(hidden, layers, heads, vocab, seq, checkpoint_activations=checkpoint)
        model = model.bfloat16() if device == "cuda" else model
        tokens = torch.randint(0, vocab, (batch, seq))
    seconds = []
    for _ in range(steps + WARM_UP_STEPS):
        start = time.perf_counter()
        model(tokens, tokens).backward()
        for param in model.parameters():
            param.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP_STEPS:])


def plot(rows: dict, path: Path) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 6), layout="constrained")
    achieved = [row["achieved"] for row in rows.values()]
    times = [row["predicted"] for row in rows.values()]
    ends = [0.7 * min(achieved + times), 1.4 * max(achieved + times)]
    axis.plot(ends, ends, color="black", linewidth=1)
    axis.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], alpha=0.15, label="within 10 %")
    for (name, row), seconds in zip(rows.items(), achieved):
        axis.plot(seconds, row["predicted"], "o")
        axis.annotate(name, (seconds, row["predicted"]), fontsize=8, xytext=(6, -3), textcoords="offset points")
    axis.set(xscale="log", yscale="log", xlabel="achieved, s a step", ylabel="predicted, s a step", xlim=ends, ylim=ends)
    axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
