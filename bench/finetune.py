"""Fine-tuning of transformers' models with clipping, at usual tokens a step: this engine and its peers.

    python bench/finetune.py [--model 3b] [--engines infinity,fsdp2,deepspeed,plain] [--micro-batch 4] [--accumulation 1]
                             [--sequence 4096] [--lengths 256,512,1024,2048] [--clip 1.0] [--curve 8k,16k,32k,64k]
                             [--rounds 2] [--steps 6] [--limit 300] [--ranks 1]
                             [--optimizer-state-tier nvme] [--device-memory 8GiB] [--host-memory 24GiB] [--compile] [--json FILE] [--plot FILE]

Models have random weights: 1b and 3b have the shapes of Llama 3.2, 8b of Llama 3.1, qwen7b of Qwen2.5-7B. 14b is a Llama with the
dimensions of Qwen2.5-14B (48 layers, hidden 5120, MLP 13824, 40 heads, 8 of them for keys, 152,064 tokens), 14.77 B parameters.
22b is a Llama with the dimensions of Mistral Small (56 layers, hidden 6144, MLP 16384, 48 heads, 8 of them for keys, 32,768 tokens).
24b and 32b have the shapes of Mistral Small 3 and Qwen2.5-32B, 70b that of Llama 3.1.
mixtral7b has 24 layers of 8 experts (hidden 2048, MLP 5632, 32,000 tokens), 7.08 B parameters, 2.09 B of them a token.
mixtral7b-modules is the same with a module an expert, mixtral7b-leaves with `infinity.leaf` for the experts of a layer. qwen30b has the shape of Qwen3-30B-A3B. All
train in bf16 with AdamW on fp32 masters and non-reentrant checkpointing of each layer. The loss is `infinity.linear_cross_entropy` of
--loss-tokens at a time; with 0 the model computes the loss from all logits at once. With --compile each layer is compiled, for every
engine. infinity has the default configuration except for the options given, and the model is built in `infinity.init`. by-layer is
infinity with `infinity.accumulate` instead of a loop over micro-batches. muon is infinity with `infinity.Muon`. Its losses differ from those
of AdamW. FSDP2 and DeepSpeed (ZeRO-3) have everything in host memory. DeepSpeed uses NVMe with --param-tier nvme
--optimizer-state-tier nvme. Plain PyTorch has everything on the device. compute is plain PyTorch without gradients, optimizer states and
updates: the time of the passes alone. Its losses stay those of the first step.

Tokens a step are micro-batch x accumulation x sequence, per rank. --curve takes a list of tokens a step ("16k" is 16,384), with
micro-batches of up to --micro-batch sequences. With --lengths, sequences have each of these lengths for four steps, and then a random one of
them. The result then says how many times its length's best step the longest step takes. Each round runs each engine with each number of
tokens in turn, in separate processes.
Times are those of the steps after the second. A run ends after --limit seconds, the start included. A run that fails or is ended is
shown as a line with the reason, beside the finished steps. An engine that failed is not tried again with as many tokens. An engine is
not tried at all if host memory is too small, because such a run can stop the machine. The need was measured with 3.2 B: 19 bytes a
parameter for FSDP2, 24 for DeepSpeed. Files are written after every run.

Model TFLOP/s of a device: 6 per parameter and token, without embeddings and with the head, and causal attention. Recomputation is not
counted. MFU is relative to the bf16 product of 8192^3 (on the CPU 1024^3), measured at the beginning of each run. "First step" is the
time from the first module's construction to the end of the first step. Peaks are those of the whole run: resident host memory, summed
over ranks, and the allocator's memory on a device. Bytes are gigabytes a step, of all ranks: infinity's own counters; for the others the
kernel's counters for NVMe, and for FSDP2 the copies in the source code. Tokens are random with unequal frequencies, so that losses fall.
Losses must agree with the first engine's within --tolerance, or the exit status is 1.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
from _common import (
    RunEnded,
    RunError,
    add_tolerance,
    agree,
    apart,
    at_least,
    directory,
    exit_with,
    few,
    given,
    leave,
    leave_so_far,
    on_ranks,
    parse,
    positive,
    positive_float,
    spread,
    synchronize,
)
from _engines import ABSENT, TRAFFIC, Job, check_can_run, folder_on, host_peak_nbytes, join, make_ready, version_of
from _shapes import SHAPES, Size, draw_tokens, make, size_of

from infinity import output
from infinity.errors import ConfigError
from infinity.renamed import CONFIG_FIELDS
from infinity.sizes import format_bytes
from infinity.system.capacity import host_free_nbytes

ENGINES = ("infinity", "by-layer", "muon", "fsdp2", "deepspeed", "plain", "compute")
OURS = ("infinity", "by-layer", "muon")
SETTINGS = (
    *("device_memory", "host_memory", "param_tier", "optimizer_state_tier", "activation_tier", "optimizer_state_dtype", "master"),
    *("compression", "update"),
)
OLD_NAMES = {new: old for old, new in CONFIG_FIELDS.items()}  # options of commands in RESULTS.md
HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
HOST_NBYTES = {"fsdp2": 19, "deepspeed": 24}  # bytes a parameter, measured with 3.2 B
NUM_WARM = 2  # steps that are not counted
TINY = {"model": "tiny", "sequence": 32, "micro_batch": 1, "accumulation": 1, "steps": 1}


def tokens_of(text: str) -> list[int]:
    """A type of options: numbers separated by commas, such as 8k,16k."""
    return [positive(part[:-1]) << 10 if part[-1:] in ("k", "K") else positive(part) for part in text.split(",")]


def main() -> int:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="3b" if kind == "cuda" else "tiny")
    parser.add_argument("--engines", default="infinity,fsdp2,deepspeed,plain")
    parser.add_argument("--micro-batch", type=positive, default=4, help="sequences of a rank; with --curve at most")
    parser.add_argument("--accumulation", type=positive, default=1, help="micro-batches a step")
    parser.add_argument("--sequence", type=positive, default=4096, help="tokens")
    parser.add_argument("--lengths", type=tokens_of, metavar="TOKENS,...", help="of sequences, one after the other, then at random")
    parser.add_argument("--curve", type=tokens_of, metavar="TOKENS,...", help="a step and rank, instead of --accumulation")
    parser.add_argument("--clip", type=float, default=1.0, help="the global norm of gradients; 0: not")
    parser.add_argument("--loss-tokens", type=at_least(0), default=4096)
    parser.add_argument("--compile", action="store_true", help="each layer, by layer.compile(fullgraph=True)")
    for name in SETTINGS:
        names = [name, OLD_NAMES[name]] if name in OLD_NAMES else [name]
        parser.add_argument(*(f"--{each.replace('_', '-')}" for each in names), help="of infinity")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=kind)
    parser.add_argument("--ranks", type=positive, default=1)
    parser.add_argument("--nvme", type=directory, default=".", help="a directory is made in it, and removed")
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--steps", type=at_least(NUM_WARM + 1), default=6)
    parser.add_argument("--limit", type=positive_float, default=300, help="seconds for one run")
    parser.add_argument("--trace", type=directory, metavar="DIR", help="of infinity, a file a run, written after each step")
    add_tolerance(parser)
    parser.set_defaults(dtype="bf16")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parse(parser)
    if options.case:
        leave(lambda: run(argparse.Namespace(**json.loads(options.case))))
        return 0
    engines = options.engines.split(",")
    if unknown := [name for name in engines if name not in ENGINES]:
        parser.error(f"{unknown[0]!r} is no engine: expected {', '.join(ENGINES)}")
    points = options.curve or [options.micro_batch * options.accumulation * options.sequence]
    for tokens in points:
        cut(options, tokens)
    size = size_of(options.model, options.sequence)
    rows = {(tokens, engine): Row() for tokens in points for engine in engines}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # results so far are shown, and the current run is ended
    try:
        for round_ in range(options.rounds):
            for (tokens, engine), row in rows.items():
                if row.reason is None:
                    measure(options, row, engine, tokens, round_, size.num_parameters)
                    print(f"round {round_}, {tokens} tokens, {engine}: {row}", file=sys.stderr, flush=True)
                    write(options, size, rows)
    finally:
        show(options, size, rows)
    agreed = agree(options, max(apart_by_row(rows).values(), default=0.0))
    broken = [row for row in rows.values() if row.reason is not None and row.reason not in ABSENT]
    return int(not any(row.settled for row in rows.values()) or bool(broken) or not agreed)


def cut(options, tokens: int) -> dict[str, int]:
    """A step of so many tokens, in the fewest micro-batches. Raises ConfigError if the tokens are not whole sequences."""
    if options.curve is None:
        return {"micro_batch": options.micro_batch, "accumulation": options.accumulation}
    num, rest = divmod(tokens, options.sequence)
    if rest:
        raise ConfigError(f"--curve {tokens}: expected a multiple of --sequence, {options.sequence}")
    micro_batch = next(each for each in range(min(num, options.micro_batch), 0, -1) if num % each == 0)
    return {"micro_batch": micro_batch, "accumulation": num // micro_batch}


@dataclasses.dataclass
class Row:
    """The results of an engine with one number of tokens a step."""

    runs: list[dict] = dataclasses.field(default_factory=list)
    reason: str | None = None  # why the last run failed or was ended; that run holds the results until then

    @property
    def settled(self) -> list[float]:
        """Seconds of the counted steps."""
        return [each for run_ in self.runs for each in run_["seconds"][NUM_WARM:]]

    def __str__(self):
        steps = self.runs and f"steps of {few(self.runs[-1]['seconds'], 3)} s"
        return "; ".join(part for part in (steps, self.reason) if part)


def measure(options, row: Row, engine: str, tokens: int, round_: int, num_parameters: int) -> None:
    """Add one run to the row."""
    os.sync()  # pending writes of the previous process are not charged to this one
    ranks = []
    try:
        check_can_run(engine, options.ranks, options.device)
        in_host_memory = HOST_NBYTES.get(engine, 0) if place_of(engine, options) == "host" else 0
        needed, free = in_host_memory * num_parameters, host_free_nbytes()
        if needed > free:
            raise RunError(f"not tried: it would take some {format_bytes(needed)} of host memory, and {format_bytes(free)} are free")
        with folder_on(options.nvme, "finetune") as folder:
            trace = options.trace and str(Path(options.trace, f"{options.model}-{tokens}-{round_}.json").resolve())
            case = given(options) | cut(options, tokens) | {"engine": engine, "swap_dirs": folder, "trace": trace}
            if engine == "deepspeed" and not round_ and tokens == (options.curve or [tokens])[0]:
                on_ranks(__file__, ["--case", json.dumps(case | TINY)], options.ranks, options.limit)  # compiles DeepSpeed's kernels

            def told(report):
                steps = report["seconds"]
                print(f"  {engine}, step {len(steps)}: {steps[-1]:.3f} s, by rank 0", file=sys.stderr, flush=True)

            ranks = on_ranks(__file__, ["--case", json.dumps(case)], options.ranks, options.limit, told)
    except RunError as error:
        killed = "exit code -9" in str(error)
        row.reason, ranks = f"{error}{': as when host memory is used up' if killed else ''}", error.so_far
    except RunEnded as end:
        row.reason, ranks = "ended", end.so_far
        raise
    finally:
        if ranks:
            row.runs.append(together(ranks))


def together(ranks: list[dict]) -> dict:
    """The reports of a run's ranks, combined."""
    most = ("start_seconds", "first_seconds", "device_nbytes", "reserved_nbytes")
    return {
        "seconds": [max(each) for each in zip(*(rank["seconds"] for rank in ranks))],
        "losses": [statistics.mean(each) for each in zip(*(rank["losses"] for rank in ranks))],
        "nbytes": [None if None in each else sum(each) for each in zip(*(rank["nbytes"] for rank in ranks))],
        **{name: max(rank[name] for rank in ranks) for name in most},
        "host_nbytes": sum(rank["host_nbytes"] for rank in ranks),
        "product_flops": statistics.median(rank["product_flops"] for rank in ranks),
        **{name: ranks[0][name] for name in ("version", "device", "remarks")},
    }


def apart_by_row(rows: dict) -> dict:
    """The largest differences of losses from the first engine's with as many tokens, over the steps that both made."""
    found, bases = {}, {}
    for (tokens, engine), row in rows.items():
        for run_ in row.runs:
            base = run_["losses"] if engine == "compute" else bases.setdefault(tokens, run_["losses"])
            num = min(len(base), len(run_["losses"]))
            found[tokens, engine] = max(found.get((tokens, engine), 0.0), apart(base[:num], run_["losses"][:num]))
    return found


def product_flops(rows: dict) -> float:
    """FLOP/s of the bf16 product, the median of all runs."""
    return statistics.median(run_["product_flops"] for row in rows.values() for run_ in row.runs)


def show(options, size: Size, rows: dict) -> None:
    flops = product_flops(rows) if any(row.runs for row in rows.values()) else math.nan
    print(f"\n{title(options, size, rows)}; product {flops / 1e12:.4g} TFLOP/s; bytes are GB a step")
    cells, worst = [], apart_by_row(rows)
    for (tokens, engine), row in rows.items():
        if not row.settled:
            continue
        seconds, ours = statistics.median(row.settled), rows.get((tokens, "infinity"), Row()).settled
        reached = tokens * size.flops_a_token / seconds
        nbytes = ["-" if each is None else f"{each / 1e9:.2f}" for each in row.runs[-1]["nbytes"]]
        peaks = [max(run_[name] for run_ in row.runs) / 2**30 for name in ("device_nbytes", "host_nbytes")]
        cells.append(
            [f"{tokens:,} {engine} {row.runs[0]['version']}".rstrip()]
            + ["{micro_batch} x {accumulation}".format(**cut(options, tokens)), spread(row.settled, 3)]
            + [f"{seconds / statistics.median(ours):.2f}x" if ours else "-", f"{tokens * options.ranks / seconds:,.0f}"]
            + [f"{reached / 1e12:.4g}", f"{reached / flops:.0%}", f"{statistics.median(run_['first_seconds'] for run_ in row.runs):.1f}"]
            + [*(f"{peak:.1f} GiB" if peak else "-" for peak in peaks), *nbytes, f"{worst[tokens, engine]:.1e}"]
        )
    head = ("tokens a step", "sequences", "s a step", "of ours", "tokens/s", "TFLOP/s", "MFU", "first step, s")
    if cells:
        print(output.table((*head, "device peak", "host peak", *TRAFFIC, "losses"), cells))
    for (tokens, engine), row in rows.items():
        if row.runs:
            print(f"{tokens:,} {engine}, losses: {few(row.runs[0]['losses'], 4)}")
            if options.lengths:
                print(f"{tokens:,} {engine}, {worst_step(options, row.runs[-1]['seconds'])}")
            for remark in row.runs[-1]["remarks"]:
                print(f"{tokens:,} {engine}: {remark}")
        if row.reason is not None:
            print(f"{tokens:,} {engine}: {row}")


def worst_step(options, seconds: list[float]) -> str:
    """The step that takes the largest multiple of the best step of its length."""
    lengths = [length_of(options, number) for number in range(len(seconds))]
    best = {length: min(took for took, each in zip(seconds, lengths) if each == length) for length in lengths}
    number = max(range(len(seconds)), key=lambda index: seconds[index] / best[lengths[index]])
    times = seconds[number] / best[lengths[number]]
    return f"longest step: step {number + 1} of length {lengths[number]}, {seconds[number]:.3f} s, {times:.2f} times the best of its length"


def title(options, size: Size, rows: dict) -> str:
    clip = f"clipping at {options.clip:g}" if options.clip else "no clipping"
    device = next((run_["device"] for row in rows.values() for run_ in row.runs), options.device)
    told = [f"{name.replace('_', ' ')} {value}" for name in SETTINGS if (value := getattr(options, name)) is not None]
    shape = f"{options.model}, {size.num_parameters / 1e9:.3g} B parameters, sequence {options.sequence}"
    shape += ", layers compiled" if options.compile else ""
    return f"{shape}, {clip}, {options.ranks} x {device}{'; infinity: ' if told else ''}{', '.join(told)}"


def write(options, size: Size, rows: dict) -> None:
    """Write the requested files, as far as results exist."""
    if options.json:
        found = [{"tokens": tokens, "engine": engine} | dataclasses.asdict(row) for (tokens, engine), row in rows.items()]
        about = {"torch": torch.__version__, "title": title(options, size, rows), "options": given(options)}
        output.write_json(options.json, {"found": found, **dataclasses.asdict(size), **about})
    if options.plot and any(row.settled for row in rows.values()):
        plot(options, size, rows)


def plot(options, size: Size, rows: dict) -> None:
    figure, (left, right) = output.pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    flops = product_flops(rows)
    for engine in dict.fromkeys(engine for _, engine in rows):
        points = {tokens: row.settled for (tokens, name), row in sorted(rows.items()) if name == engine and row.settled}
        if not points:
            continue
        for axes, unit in ((left, options.ranks), (right, 100 * size.flops_a_token / flops)):
            least, rates, most = ([t * unit / of(seconds) for t, seconds in points.items()] for of in (max, statistics.median, min))
            bars = [[rate - low for low, rate in zip(least, rates)], [high - rate for high, rate in zip(most, rates)]]
            axes.errorbar(list(points), rates, yerr=bars, marker="o", capsize=3, label=engine)
    every = sorted({tokens for tokens, _ in rows})
    for axes, label in ((left, "tokens/s"), (right, f"MFU, % of {flops / 1e12:.3g} TFLOP/s")):
        axes.set(xscale="log", xlabel="tokens a step" + (" and device" if options.ranks > 1 else ""), ylabel=label)
        axes.set_ylim(bottom=0)
        axes.set_xticks(every, [f"{tokens >> 10}k" if tokens % 1024 == 0 else f"{tokens}" for tokens in every])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(title(options, size, rows), fontsize=10)
    figure.savefig(options.plot, dpi=150)
    output.pyplot().close(figure)


# In a rank.


def run(options) -> dict:
    """The results after the last step. Intermediate results are reported after each step."""
    cuda = options.device == "cuda"
    backend = None if options.ranks == 1 and options.engine in (*OURS, "plain") else "nccl" if cuda else "gloo"
    if options.engine == "fsdp2" and cuda:
        backend = "cpu:gloo,cuda:nccl"  # sums the norm of gradients in host memory
    device = join(options.engine, options.device, backend)
    report = {"product_flops": measured_product(device), "seconds": [], "losses": []}
    report["device"] = torch.cuda.get_device_name(device) if cuda else "CPU"  # read here, because the call may take device memory
    report["version"] = version_of(options.engine)
    start = time.perf_counter()
    trainer = make_ready(options.engine, job_of(options, device))
    synchronize(options.device)
    report["start_seconds"] = time.perf_counter() - start
    for number in range(options.steps):
        if number <= NUM_WARM:  # the last of these begins the count
            before = trainer.moved()
        batches = [tokens_at(options, number, index).to(device) for index in range(options.accumulation)]
        begin = time.perf_counter()
        losses = trainer.passes([(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in batches])
        trainer.update()
        report["losses"].append(torch.stack(losses).mean().item())
        synchronize(options.device)
        report["seconds"].append(time.perf_counter() - begin)
        report.setdefault("first_seconds", time.perf_counter() - start)
        num = max(1, number + 1 - NUM_WARM)
        report["nbytes"] = [None if now is None else (now - then) / num for then, now in zip(before, trainer.moved())]
        report["remarks"] = trainer.remarks()
        report["host_nbytes"] = host_peak_nbytes()
        report["device_nbytes"] = torch.cuda.max_memory_allocated() if cuda else 0
        report["reserved_nbytes"] = torch.cuda.max_memory_reserved() if cuda else 0
        leave_so_far(report)
        trainer.save_trace()  # a run that is ended at its limit leaves the trace so far
    trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return report


def measured_product(device) -> float:
    """FLOP/s of the bf16 product of n x n, the median of five blocks."""
    n, repeats = (8192, 40) if device.type == "cuda" else (1024, 2)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(6):  # the first one warms up
        synchronize(str(device))
        start = time.perf_counter()
        for _ in range(repeats):
            a @ b
        synchronize(str(device))
        seconds.append((time.perf_counter() - start) / repeats)
    del a, b
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * n**3 / statistics.median(seconds[1:])


def tokens_at(options, step: int, micro: int) -> torch.Tensor:
    """[micro-batch, sequence + 1] tokens of this rank on the CPU, the same for all engines."""
    seed = (step << 32) + (micro << 8) + int(os.environ["RANK"])
    return draw_tokens(options.model, options.micro_batch, length_of(options, step), seed)


def length_of(options, step: int) -> int:
    """The length of a step's sequences."""
    if not options.lengths:
        return options.sequence
    return options.lengths[step // 4 if step < 4 * len(options.lengths) else random.Random(step).randrange(len(options.lengths))]


def made(options, device):
    model = make(options.model, options.sequence, options.loss_tokens, device)
    for layer in model.model.model.layers if options.compile else ():
        layer.compile(fullgraph=True)
    return model


def place_of(engine: str, options) -> str:
    """The place of an engine's states; for infinity the configuration decides."""
    if engine == "deepspeed" and options.weights == options.states == "nvme":
        return "nvme"
    return {**dict.fromkeys(OURS, "auto"), "plain": "device"}.get(engine, "host")


def job_of(options, device) -> Job:
    told = {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}
    return Job(
        make=lambda: made(options, device),
        blocks=lambda model: model.model.model.layers,
        device=device,
        dtype="bf16",
        place=place_of(options.engine, options),
        nvme=options.nvme,
        micro_batch=options.micro_batch,
        hyper=HYPER,
        accumulation=options.accumulation,
        clip=options.clip or None,
        config={"swap_dirs": options.nvme, "device": options.device, "dtype": "bf16", **told},
        trace=options.trace,
    )


if __name__ == "__main__":
    exit_with(main)
