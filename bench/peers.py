"""One GPT trained by this engine, FSDP2 with CPU offload, DeepSpeed and plain PyTorch: a step's time, bytes and memory.

    python bench/peers.py [--engines infinity,fsdp2,deepspeed,plain] [--places nvme,host,device] [--ranks 1] [--device cuda]
                          [--hidden 4096] [--layers 4] [--batch 4] [--dtype bf16] [--no-checkpointing] [--rounds 2] [--steps 6]
                          [--host-memory 4GiB] [--device-memory 2GiB] [--moments bf16] [--residency weights] [--window 60GiB]
                          [--trace DIR] [--json FILE] [--plot FILE]

All states live in one place: on NVMe, in host memory, or on the device. On NVMe, infinity keeps only data in use or in transit, and
gradients of up to two late updates in a useful part of --host-memory. With --residency weights, infinity keeps the weights in host
memory. With --residency auto, infinity fills --device-memory and host memory. Each round runs each engine that can run, in turn, in
separate processes. All have the same initial weights (exact in bf16, if that is the dtype), tokens and AdamW, and checkpoint each block
by default. Masters are fp32 if weights are bf16. Times are those of the steps after the second. "start" is the time from the first
module's construction until the engine can train and all records are in place. Losses, means over the ranks, must agree within
--tolerance of the first engine's, or the exit status is 1. An engine that is missing or fails is a row with the reason. With --trace,
infinity records a trace, which takes time, and leaves the times of transfers in each run there, for `infinity trace`.

For infinity's steps on NVMe the bench also shows the time that the drive alone needs for the same bytes. The drive's rates for reads,
writes, and both 14 to 12 are measured right before and after each of these runs, without an engine, with the settings that
`infinity calibrate` left in --nvme. If there are none, they are measured first and left there. No step is faster than this time. A step whose
compute takes longer is slower.

Bytes are per parameter and step, of all ranks together. NVMe bytes are infinity's own counters, and for the others the kernel's counters
for the process (/proc/self/io; the JSON has the kernel's counters for infinity, too). Bytes to and from the device are infinity's own
counters. FSDP2's bytes follow from its source code: fp32 shards, twice for blocks, once for other modules, and fp32 gradients. DeepSpeed
does not report them, and its cache between uses varies. Memory: the files' size after the last step; the peak resident host memory from
the first step on, summed over ranks; the allocator's peak on a device.

DeepSpeed does not clip gradients here, unlike by default. With everything on NVMe, DeepSpeed has the smallest settings that run; their
buffers hold all weights of a small model in host memory. One DeepSpeed function is patched: version 0.19.8 stops if the prefetch list
contains a weight twice, as with checkpointing. DeepSpeed compiles kernels at their first use, so a run of a tiny model goes before the
first run and does not count. A run that is ended during compilation leaves a file `lock` in ~/.cache/torch_extensions, for which all
later runs wait: remove this file.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _common import (
    RunError,
    agree,
    apart,
    at_least,
    directory,
    drive_rates,
    error_bars,
    exit_with,
    given,
    leave,
    nbytes_of,
    on_ranks,
    parse,
    positive,
    positive_float,
    spread,
)
from _engines import ABSENT, TRAFFIC, Job, check_can_run, folder_on, host_peak_nbytes, join, kernel_io, make_ready, version_of

from infinity import output
from infinity.errors import ConfigError
from infinity.model.gpt import GPT, Batches
from infinity.system import drives

PLACES = {
    "infinity": ("nvme", "host", "device"),
    "fsdp2": ("host", "device"),
    "deepspeed": ("nvme", "host", "device"),
    "plain": ("device",),
}
TITLES = {"nvme": "all on NVMe", "host": "all in host memory", "device": "all on the device"}
HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
NUM_WARM = 2  # steps that are not counted
NUM_RATES = 9  # measurements of the drive, of which the median counts
TINY = {"hidden": 128, "layers": 1, "heads": 2, "vocab": 256, "seq": 32, "batch": 1, "steps": 1}


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(PLACES))
    parser.add_argument("--places", default="nvme,host,device")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--ranks", type=positive, default=1)
    parser.add_argument("--nvme", type=directory, default=".", help="a directory is made in it, and removed")
    small, large = (1024, 8, 16, 32000, 128, 1), (4096, 4, 32, 32000, 1024, 4)
    for name, default in zip(("hidden", "layers", "heads", "vocab", "seq", "batch"), large if cuda else small):
        parser.add_argument(f"--{name}", type=positive, default=default, help="of a rank" if name == "batch" else None)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16" if cuda else "fp32")
    parser.add_argument("--host-memory", default="auto", help="of infinity, a rank")
    parser.add_argument("--device-memory", default="auto", help="of infinity, a rank")
    parser.add_argument("--window", type=nbytes_of, help="of infinity, bytes of parameters under construction")
    parser.add_argument("--moments", choices=("fp32", "bf16"), default="fp32", help="of infinity")
    parser.add_argument("--compression", choices=("auto", "on", "off"), default="auto", help="of infinity")
    parser.add_argument("--residency", choices=("none", "weights", "auto"), default="none", help="of infinity, on NVMe")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="of each block's activations")
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--steps", type=at_least(NUM_WARM + 1), default=6)
    parser.add_argument("--tolerance", type=float, default=0.002, help="of losses, relative")
    parser.add_argument("--trace", type=directory, metavar="DIR", help="of infinity, a file for each run")
    parser.add_argument("--timeout", type=positive_float, default=1800, help="seconds for one run")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parse(parser)
    if options.case:
        leave(lambda: run(argparse.Namespace(**json.loads(options.case))))
        return 0
    engines, places = options.engines.split(","), options.places.split(",")
    if unknown := [name for name in engines if name not in PLACES] + [name for name in places if name not in PLACES["infinity"]]:
        parser.error(f"{unknown[0]!r} is no engine and no place: expected {', '.join(PLACES)}; {', '.join(PLACES['infinity'])}")
    rows = {(place, engine): [] for place in places for engine in engines if place in PLACES[engine]}
    failed = {}
    if options.trace and not os.access(options.trace, os.W_OK):
        parser.error(f"--trace: nothing can be written to {options.trace}")
    case = given(options)
    for round_ in range(options.rounds):
        for place, engine in rows:
            if (place, engine) in failed:
                continue
            try:
                if engine == "deepspeed" and not round_:
                    run_ranks(case | TINY, place, engine)
                measures = (place, engine) == ("nvme", "infinity")
                rates = [drive_rates(Path(options.nvme), NUM_RATES)] if measures else []
                traced = options.trace and str(Path(options.trace, f"{place}-{round_}.json").resolve())
                rows[place, engine].append(run_ranks(case | {"trace": traced}, place, engine))
                if measures:
                    rows[place, engine][-1]["drive"] = rates + [drive_rates(Path(options.nvme), NUM_RATES)]
            except (RunError, ConfigError, OSError) as error:
                failed[place, engine] = str(error)
            said = failed.get((place, engine)) or f"{spread(rows[place, engine][-1]['seconds'])} s"
            print(f"round {round_}, {place}, {engine}: {said}", file=sys.stderr, flush=True)
    for row in failed:
        del rows[row]
    base = next(iter(rows.values()))[0]["losses"] if rows else []
    worst = {row: max(apart(base, run_["losses"]) for run_ in runs) for row, runs in rows.items()}
    show(options, rows, failed, worst)
    if options.json:
        found = [{"place": place, "engine": engine, "runs": runs} for (place, engine), runs in rows.items()]
        found += [{"place": place, "engine": engine, "error": error} for (place, engine), error in failed.items()]
        output.write_json(options.json, {"found": found, "torch": torch.__version__, "options": case})
    if options.plot and rows:
        plot(options, rows)
    agreed = agree(options, max(worst.values(), default=0.0))
    broken = [error for error in failed.values() if error not in ABSENT]
    return int(not rows or bool(broken) or not agreed)


def run_ranks(case: dict, place: str, engine: str) -> dict:
    """One run of an engine: the combined reports of its ranks."""
    os.sync()  # pending writes of the previous process are not charged to this one
    check_can_run(engine, case["ranks"], case["device"])
    with folder_on(case["nvme"], "peers") as folder:
        told = json.dumps(case | {"place": place, "engine": engine, "swap_dirs": folder})
        ranks = on_ranks(__file__, ["--case", told], case["ranks"], case["timeout"])
    return {
        "seconds": [max(times) for times in zip(*(rank["seconds"] for rank in ranks))],
        "losses": [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in ranks))],
        "traffic": [None if None in each else sum(each) for each in zip(*(rank["traffic"] for rank in ranks))],
        "kernel_io": [sum(each) for each in zip(*(rank["kernel_io"] for rank in ranks))],
        "start_seconds": max(rank["start_seconds"] for rank in ranks),
        "host_nbytes": sum(rank["host_nbytes"] for rank in ranks),
        "disk_nbytes": ranks[0]["disk_nbytes"],
        "device_nbytes": max(rank["device_nbytes"] for rank in ranks),
        "num_parameters": ranks[0]["num_parameters"],
        "version": ranks[0]["version"],
    }


def beside_the_drive(run_: dict) -> str | None:
    """A line about a run of infinity with everything on NVMe; None if nothing moved."""
    read, written = (run_["num_parameters"] * nbytes for nbytes in run_["traffic"][:2])
    if not read + written:
        return None
    rates = {mix: statistics.mean(rates[mix] for rates in run_["drive"]) for mix in drives.MIXES}
    least = max(read / rates["read"], written / rates["write"], (read + written) / rates["mixed"])
    seconds = statistics.median(run_["seconds"])
    told = "; ".join(", ".join(f"{mix} {rate / 1e9:.2f}" for mix, rate in rates.items()) for rates in run_["drive"])
    return f"the drive alone needs {least:.3f} s, {least / seconds:.2f} of infinity's step; GB/s before and after: {told}"


def show(options, rows: dict, failed: dict, worst: dict) -> None:
    shape = (options.hidden, options.layers, options.seq, options.batch)
    num = next((f"{runs[0]['num_parameters'] / 1e9:.3f} B parameters, " for runs in rows.values()), "")
    print("{}hidden {}, {} layers, sequence {}, batch {}, ".format(num, *shape), end="")
    print(f"{options.dtype}, {options.ranks} x {options.device}{of_infinity(options)}; bytes are a parameter and step")
    cells = []
    for (place, engine), runs in rows.items():
        seconds = [each for run_ in runs for each in run_["seconds"]]
        ours = rows.get((place, "infinity"))
        base = statistics.median(each for run_ in ours for each in run_["seconds"]) if ours else None
        ratio = f"{statistics.median(seconds) / base:.2f}x" if ours else "-"
        traffic = ["-" if number is None else f"{number:.2f}" for number in runs[-1]["traffic"]]
        started = statistics.median(run_["start_seconds"] for run_ in runs)
        memory = [max(run_[name] for run_ in runs) for name in ("disk_nbytes", "host_nbytes", "device_nbytes")]
        cells.append(
            [place, f"{engine} {runs[0]['version']}".rstrip(), spread(seconds, 3), ratio, f"{worst[place, engine]:.1e}"]
            + [f"{started:.1f}", *traffic, *(f"{nbytes / 2**30:.2f} GiB" if nbytes else "-" for nbytes in memory)]
        )
    print(output.table(("", "engine", "s a step", "of ours", "losses", "start, s", *TRAFFIC, "on disk", "host peak", "device peak"), cells))
    for (place, engine), reason in failed.items():
        print(f"{place}  {engine}: {reason}")
    for run_ in rows.get(("nvme", "infinity"), ()):
        if line := beside_the_drive(run_):
            print(line)


def of_infinity(options) -> str:
    """The options of infinity that differ from the defaults."""
    usual = {"host_memory": "auto", "device_memory": "auto", "moments": "fp32", "residency": "none", "trace": None}
    told = [f"{name.replace('_', ' ')} {getattr(options, name)}" for name, value in usual.items() if getattr(options, name) != value]
    return f"; infinity: {', '.join(told)}" if told else ""


# In a rank.


def run(options) -> dict:
    """Seconds of the counted steps, all losses, bytes a parameter and step, and peaks in bytes."""
    cuda = options.device == "cuda"
    device = join(options.engine, options.device, "nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    start = time.perf_counter()
    trainer = make_ready(options.engine, job_of(options, device))
    if cuda:
        torch.cuda.synchronize()
    start_seconds = time.perf_counter() - start
    batches = Batches(None, vocab=options.vocab, batch=options.batch * world, seq=options.seq, seed=1, rank=rank, world=world)
    num = sum(param.numel() for param in made_on_meta(options).parameters())
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak after the model's construction
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for number in range(options.steps):
        if number <= NUM_WARM:  # the last of these begins the count
            before, io_before = trainer.moved(), kernel_io()
        x, y = (part.to(device) for part in batches(number))
        start = time.perf_counter()
        loss = trainer.micro(x, y)
        trainer.update()
        losses.append(loss.item())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    counted = max(1, options.steps - NUM_WARM) * num
    report = {
        "seconds": seconds[NUM_WARM:],
        "start_seconds": start_seconds,
        "losses": losses,
        "traffic": [None if b is None else (b - a) / counted for a, b in zip(before, trainer.moved())],
        "kernel_io": [(b - a) / counted for a, b in zip(io_before, kernel_io())],
        "host_nbytes": host_peak_nbytes(),
        "disk_nbytes": disk_nbytes(options.nvme),
        "device_nbytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "num_parameters": num,
        "version": version_of(options.engine),
    }
    dist.barrier()  # files are counted
    trainer.save_trace()
    trainer.close()
    dist.destroy_process_group()
    return report


def disk_nbytes(folder: str) -> int:
    """Disk space of the files below a directory."""
    return sum(512 * path.stat().st_blocks for path in Path(folder).rglob("*") if path.is_file())


def make(options) -> GPT:
    shape = (options.hidden, options.layers, options.heads, options.vocab, options.seq)
    return GPT(*shape, checkpoint_activations=options.checkpointing)


def made_on_meta(options) -> GPT:
    with torch.device("meta"):
        return make(options)


@torch.no_grad()
def same_start(options) -> GPT:
    """The model on the device, in fp32, with the initial weights of every engine."""
    torch.manual_seed(0)
    with torch.device(options.device):
        model = make(options)
    if options.dtype == "bf16":
        for param in model.parameters():
            param.copy_(param.bfloat16())
    return model


def job_of(options, device) -> Job:
    names = ("device", "dtype", "host_memory", "device_memory", "compression")
    places = {"param_tier": options.place, "optimizer_state_tier": options.place}
    if options.place == "nvme" and options.residency == "auto":
        places = {}
    elif options.place == "nvme":
        places = {"param_tier": "host" if options.residency == "weights" else "nvme", "optimizer_state_tier": "nvme", "residency": "none"}
    return Job(
        make=lambda: same_start(options),
        blocks=lambda model: model.blocks,
        device=device,
        dtype=options.dtype,
        place=options.place,
        nvme=options.nvme,
        micro_batch=options.batch,
        hyper=HYPER,
        config={name: getattr(options, name) for name in names} | {"swap_dirs": options.nvme, "optimizer_state_dtype": options.moments} | places,
        window=options.window,
        trace=options.trace,
    )


def plot(options, rows: dict) -> None:
    pyplot = output.pyplot()
    places = list(dict.fromkeys(place for place, _ in rows))
    engines = list(dict.fromkeys(engine for _, engine in rows))
    figure, axes = pyplot.subplots(figsize=(6.5, 4), layout="constrained")
    for index, engine in enumerate(engines):
        where = [place for place in places if (place, engine) in rows]
        seconds = [[each for run_ in rows[place, engine] for each in run_["seconds"]] for place in where]
        at = [places.index(place) + 0.2 * (index - (len(engines) - 1) / 2) for place in where]
        medians = [statistics.median(each) for each in seconds]
        bars = axes.bar(at, medians, 0.19, yerr=error_bars(seconds), capsize=2, label=engine)
        axes.bar_label(bars, [f"{median:.3g}" for median in medians], fontsize=8, padding=2)
    everything = [each for runs in rows.values() for run_ in runs for each in run_["seconds"]]
    axes.set_xticks(range(len(places)), [TITLES[place] for place in places])
    axes.set(ylabel="s a step", yscale="log", ylim=(min(everything) / 3, max(everything) * 2))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    title = f"hidden {options.hidden}, {options.layers} layers, {options.dtype}, {options.ranks} x {options.device}{of_infinity(options)}"
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(engines))
    figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    exit_with(main)
