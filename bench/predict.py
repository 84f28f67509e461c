"""Predicted against achieved step times (table T4): the simulator beside the engine, in many placements on this machine.

    python bench/predict.py [--nvme DIR] [--samples 5] [--steps 3] [--only NAME...] [--json FILE] [--plot FILE]

First `infinity calibrate` finds the settings of the drive and measures the machine. Then each configuration runs in two processes, the engine
and plain PyTorch with the same model, which do some steps in turn. A machine's speed changes from second to second, so each sample takes
only a few seconds. A sample measures drive, copies and updates without an engine, and plain PyTorch's compute. From these numbers the
step is predicted. Then the engine makes the given number of steps, after one that does not count. The error of a configuration is the
median over samples. The bar is 10 % in the median of all configurations, and 20 % at worst. A miss gives exit status 1, but only with 8
configurations or more: a median of fewer has little meaning.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import _common
import torch

import infinity
from infinity.config import Config
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.model.gpt import GPT
from infinity.output import pyplot, table, write_json
from infinity.tools.measure import probes
from infinity.tools.predict.machine import Machine
from infinity.tools.predict.meta_models import gpt
from infinity.tools.predict.prediction import predict
from infinity.tools.predict.workload import workload

WARM_UP_STEPS = 3
MAX_SECONDS = 1800  # per configuration; a longer run hangs
MEDIAN_BAR, WORST_BAR = 0.1, 0.2
LEAST_CONFIGURATIONS = 8  # for the bar to count

CUDA_MODEL = {"hidden": 1536, "layers": 4, "heads": 12, "vocab": 32000, "seq": 1024, "batch": 4}
CPU_MODEL = {"hidden": 768, "layers": 6, "heads": 12, "vocab": 8000, "seq": 128, "batch": 1}

NVME = {"param_tier": "nvme", "optimizer_state_tier": "nvme"}
CONFIGURATIONS = {
    "nvme": NVME | {"residency": "none", "update": "backward"},
    "nvme, deferred": NVME | {"residency": "none", "update": "deferred"},
    "nvme, chunks of 2 MiB": NVME | {"residency": "none", "chunk_mib": 2.0},
    "nvme, chunks of 16 MiB": NVME | {"residency": "none", "chunk_mib": 16.0},
    "nvme, batch x 4": NVME | {"residency": "none", "batch": 4},
    "weights host, states nvme": {"param_tier": "host", "optimizer_state_tier": "nvme"},
    "half in host memory": {"host_share": 0.5},
    "host": {"param_tier": "host", "optimizer_state_tier": "host", "update": "backward"},
    "host, deferred": {"param_tier": "host", "optimizer_state_tier": "host", "update": "deferred"},
    "host, batch x 4": {"param_tier": "host", "optimizer_state_tier": "host", "batch": 4},
    "host, no checkpointing": {"param_tier": "host", "optimizer_state_tier": "host", "checkpoint": False},
    "device": {"param_tier": "device", "optimizer_state_tier": "device"},
}
BF16_ONLY = {"nvme, bf16 moments": NVME | {"residency": "none", "optimizer_state_dtype": "bf16"}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path("infinity-swap"), help="made if it does not exist")
    parser.add_argument("--samples", type=_common.positive, default=5)
    parser.add_argument("--steps", type=_common.positive, default=3, help="of a sample")
    parser.add_argument("--only", nargs="+", choices=[*CONFIGURATIONS, *BF16_ONLY], help="these configurations")
    parser.add_argument("--runner", help=argparse.SUPPRESS)
    options = _common.parse(parser)
    if options.runner:
        serve(**json.loads(options.runner))
        return 0
    options.nvme.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available()
    chosen = CONFIGURATIONS | (BF16_ONLY if cuda else {})
    machine = measured(options.nvme)
    rows, lines = {}, []
    for name in options.only or chosen:
        rows[name] = row = run(options, machine, CUDA_MODEL if cuda else CPU_MODEL, dict(chosen[name]))
        errors = [sample["error"] for sample in row["samples"]]
        spread = f"{min(errors):+.1%} to {max(errors):+.1%}"
        lines.append([name, f"{row['predicted']:.3f}", f"{row['achieved']:.3f}", f"{row['error']:+.1%}", spread])
        print(*lines[-1], sep=", ", file=sys.stderr, flush=True)
    print(table(["configuration", "predicted, s", "achieved, s", "error", "of all samples"], lines))
    errors = [abs(row["error"]) for row in rows.values()]
    median, worst = statistics.median(errors), max(errors)
    print(f"error: {median:.1%} in the median, {worst:.1%} at worst; {len(errors)} configurations; torch {torch.__version__}")
    if options.json:
        write_json(options.json, {"machine": machine.to_table(), "rows": rows})
    if options.plot:
        plot(rows, options.plot)
    missed = not (median <= MEDIAN_BAR and all(error <= WORST_BAR for error in errors))
    if missed:
        counts = "" if len(errors) >= LEAST_CONFIGURATIONS else f", which counts from {LEAST_CONFIGURATIONS} configurations on"
        print(f"that misses the bar of {MEDIAN_BAR:.0%} in the median and {WORST_BAR:.0%} at worst{counts}")
    return int(missed and len(errors) >= LEAST_CONFIGURATIONS)


def run(options, machine: Machine, base: dict, settings: dict) -> dict:
    """One configuration: medians of predicted and achieved seconds and of the error, and all samples."""
    model = base | {"batch": base["batch"] * settings.pop("batch", 1)}
    checkpoint = settings.pop("checkpoint", True)
    dtype = "bf16" if machine.device == "cuda" else "fp32"
    if share := settings.pop("host_share", None):
        with torch.device("meta"):
            num = sum(param.numel() for param in made(model, checkpoint).parameters())
        settings |= {"host_memory": int(share * num * 12), "device_memory": int(num * TORCH_DTYPES[dtype].itemsize * 0.6)}
    settings |= {"dtype": dtype}
    told = {"model": model, "checkpoint": checkpoint, "device": machine.device}
    samples = []
    with runner(told | {"settings": None}) as plain, runner(told | {"settings": settings | {"swap_dirs": str(options.nvme)}}) as engine:
        plain(WARM_UP_STEPS)
        engine(WARM_UP_STEPS)
        for _ in range(options.samples):
            at_hand = calibrated(machine, options.nvme)
            compute = plain(options.steps)
            sample = predicted(at_hand, model, checkpoint, settings, compute) | {"achieved": engine(options.steps)}
            samples.append(sample | {"error": sample["predicted"] / sample["achieved"] - 1})
    medians = {what: statistics.median(sample[what] for sample in samples) for what in ("predicted", "achieved", "error")}
    return medians | {"model": model, "checkpoint": checkpoint, "settings": settings, "samples": samples}


@contextlib.contextmanager
def runner(told: dict):
    """A process that trains. Returns a function: run so many steps, and return the seconds of one."""
    command = [sys.executable, __file__, "--runner", json.dumps(told)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def steps(count: int) -> float:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{count}\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the run of {told['settings'] or 'plain PyTorch'} has ended early")
            return float(line)

        limit = threading.Timer(MAX_SECONDS, process.kill)
        limit.start()
        try:
            yield steps
        finally:
            limit.cancel()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # ends the process
            try:
                process.wait(MAX_SECONDS / 10)
            except subprocess.TimeoutExpired:
                process.kill()


def serve(model: dict, checkpoint: bool, device: str, settings: dict | None) -> None:
    """In a separate process: read a number of steps from each input line, train, and print the seconds of one step.

    settings: of the engine; None for plain PyTorch, forward and backward only. One step that does not count goes first.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    tokens = torch.randint(0, model["vocab"], (model["batch"], model["seq"]), device=device)
    with torch.device(device), infinity.init(Config(**settings)) if settings else contextlib.nullcontext():
        subject = made(model, checkpoint)
    if settings:
        optimizer = infinity.AdamW(subject.parameters(), lr=1e-4)
    elif device == "cuda":
        subject.bfloat16()

    def step() -> None:
        loss = subject(tokens, tokens)
        loss.backward()
        if settings:
            optimizer.step()
            optimizer.zero_grad()
        else:
            subject.zero_grad()
        loss.item()

    with infinity.engine_of(subject) if settings else contextlib.nullcontext() as engine:
        for line in sys.stdin:
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(int(line)):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / int(line)
            if settings:  # deferred work must not disturb the next measurement
                engine.updater.drain()
                engine.records.flush()
            print(seconds, file=answers, flush=True)


def made(model: dict, checkpoint: bool) -> GPT:
    return GPT(*(model[name] for name in ("hidden", "layers", "heads", "vocab", "seq")), checkpoint_activations=checkpoint)


def measured(nvme: Path) -> Machine:
    """This machine, measured by `infinity calibrate`. If calibrate fails, its message and exit status are used."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "infinity.toml"
        done = subprocess.run([sys.executable, "-m", "infinity", "calibrate", str(nvme), "--output", str(output)])
        if done.returncode:
            sys.exit(done.returncode)
        return Machine.load(output)


def calibrated(machine: Machine, nvme: Path) -> Machine:
    """The machine with the present rates of drive, copies and updates."""
    rates = _common.drive_rates(nvme, 3)
    device = torch.device(machine.device)
    copies = {}
    for name, to_device in (("h2d", True), ("d2h", False)):
        if not copies or device.type == "cuda":
            with contextlib.closing(probes.Copies(device, 8 << 20, to_device=to_device)) as probe:
                gbps = statistics.median(probes.rates(probe, 3)) / 1e9
        copies[name] = gbps  # memory to memory, equal in both directions
    update = probes.update_rate(torch.device("cpu")) / 1e9
    return dataclasses.replace(
        machine,
        update_gparams=update,
        device_update_gparams=probes.update_rate(device) / 1e9 if device.type == "cuda" else update,
        **{f"{name}{all_}_gbps": gbps for name, gbps in copies.items() for all_ in ("", "_all")},
        drives=(dataclasses.replace(machine.drives[0], **{f"{mix}_gbps": rate / 1e9 for mix, rate in rates.items()}),),
    )


def predicted(machine: Machine, model: dict, checkpoint: bool, settings: dict, compute_seconds: float) -> dict:
    """The simulator's result."""
    subject = gpt(*(model[name] for name in ("hidden", "layers", "heads", "vocab", "seq", "batch")), settings["dtype"])
    load = workload(subject.model, subject.run, tokens=subject.tokens, recompute=checkpoint)
    machine = dataclasses.replace(machine, device_tflops=load.step_flops / compute_seconds / 1e12)
    prediction = predict(subject.model, load, machine, Config(**settings))
    simulation = prediction.simulation
    return {
        "predicted": prediction.step_seconds,
        "compute": compute_seconds,
        "busy": simulation.busy_seconds,
        "stalls": simulation.stall_seconds,
        "bytes": simulation.nbytes,
    }


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
    _common.exit_with(main)
