"""QLoRA: adapters of PEFT over a frozen base in NF4, by this engine and by bitsandbytes with PEFT, on the same codes.

    python bench/qlora.py [--model 8b] [--engines infinity,bitsandbytes] [--micro-batch 4] [--sequence 4096] [--rank 64] [--steps 8] [--rounds 2]
                          [--device-memory 24GiB] [--host-memory 48GiB] [--json FILE]

Models are those of bench/finetune.py, with random weights in bf16. Adapters of --rank are beside every linear layer but the output layer. Those of
infinity are in bf16 with fp32 masters. Those of bitsandbytes are in fp32, as PEFT makes them by default, and its passes run under autocast to bf16.
So both compute in bf16, and update in fp32. Each layer is checkpointed. The loss is `infinity.linear_cross_entropy` of 4,096 tokens at a time. Both
train with AdamW. Codes and scales of both are equal: blocks of 64, without double quantisation. Each round runs each engine in turn, in processes
of their own. Times are those of the steps after the second. Peaks are those of the whole run, the construction included. The column "steps" has the
allocator's peak of the steps alone. "NVMe" has the bytes read in the whole run. Losses must agree within --tolerance, or the exit status is 1.
"""

import argparse
import json
import statistics
import time

import torch
from _common import (
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
    nbytes_of,
    on_ranks,
    parse,
    positive,
    positive_float,
    spread,
    synchronize,
)
from _engines import Trainer, folder_on, host_peak_nbytes
from _shapes import SHAPES, draw_tokens, make
from torch import nn

import infinity
from infinity import output

ENGINES = ("infinity", "bitsandbytes")
MODELS = [name for name in SHAPES if "mixtral" not in name and "30b" not in name]  # bitsandbytes quantises no packed experts
NUM_WARM = 2  # steps whose times do not count
LR = 2e-4


def main() -> int:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b" if kind == "cuda" else "tiny")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--micro-batch", type=positive, default=4, help="sequences a step")
    parser.add_argument("--sequence", type=positive, default=4096, help="tokens")
    parser.add_argument("--rank", type=positive, default=64, help="of the adapters")
    parser.add_argument("--steps", type=at_least(1), default=8)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=kind)
    parser.add_argument("--device-memory", type=nbytes_of, help="of infinity")
    parser.add_argument("--host-memory", type=nbytes_of, help="of infinity")
    parser.add_argument("--nvme", type=directory, default=".", help="a directory is made in it, and removed")
    parser.add_argument("--limit", type=positive_float, default=300, help="seconds for one run")
    add_tolerance(parser)
    parser.set_defaults(dtype="bf16", tolerance=0.01)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parse(parser)
    if options.case:
        leave(lambda: run(argparse.Namespace(**json.loads(options.case))))
        return 0
    engines = options.engines.split(",")
    if unknown := [name for name in engines if name not in ENGINES]:
        parser.error(f"{unknown[0]!r} is no engine: expected {', '.join(ENGINES)}")
    runs = {engine: [] for engine in engines}
    failed = False
    for number in range(options.rounds):
        for engine, found in runs.items():
            try:
                with folder_on(options.nvme, "qlora") as folder:
                    case = given(options) | {"engine": engine, "swap_dirs": folder}
                    found += on_ranks(__file__, ["--case", json.dumps(case)], 1, options.limit)
                print(f"round {number}, {engine}: steps of {few(found[-1]['seconds'], 3)} s", flush=True)
            except RunError as error:
                failed = True
                print(f"{engine}: {error}")
                found += error.so_far
    rows = [row(options, engine, found) for engine, found in runs.items() if found]
    if rows:
        print(output.table(("engine", "s a step", "tokens/s", "first step, s", "device peak", "steps", "host peak", "NVMe", "last loss"), rows))
    if options.json:
        output.write_json(options.json, {"runs": runs, "torch": torch.__version__, "options": given(options)})
    losses = [each["losses"] for found in runs.values() for each in found]
    worst = max(apart(*(each[: min(map(len, losses))] for each in (losses[0], other))) for other in losses) if losses else 0.0
    return int(failed or not agree(options, worst))


def row(options, engine: str, found: list[dict]) -> list[str]:
    seconds = [each for run_ in found for each in run_["seconds"][NUM_WARM:] or run_["seconds"]]
    peaks = [max(run_[name] for run_ in found) / 2**30 for name in ("device_nbytes", "device_nbytes_of_steps", "host_nbytes")]
    tokens = options.micro_batch * options.sequence / statistics.median(seconds)
    cells = [engine, spread(seconds, 3), f"{tokens:,.0f}", f"{found[0]['first_seconds']:.1f}", *(f"{peak:.1f} GiB" for peak in peaks)]
    return [*cells, f"{found[0]['nvme_nbytes'] / 1e9:.1f} GB", f"{found[0]['losses'][-1]:.4f}"]


# In a process of its own.


def adapt(causal, rank: int, *, in_fp32: bool = False):
    """Add adapters to the linear layers of a model of `_shapes`. in_fp32: as PEFT does by default; otherwise in bf16, like the model."""
    import peft

    torch.manual_seed(1)
    causal.model.enable_input_require_grads()
    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    peft.get_peft_model(causal.model, adapters, autocast_adapter_dtype=in_fp32)
    return causal


def run(options) -> dict:
    cuda = options.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    start = time.perf_counter()
    trainer = (_infinity if options.engine == "infinity" else _bitsandbytes)(options, device)
    report = {"seconds": [], "losses": [], "start_seconds": time.perf_counter() - start}
    if cuda:
        construction_nbytes = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for number in range(options.steps):
        tokens = draw_tokens(options.model, options.micro_batch, options.sequence, number).to(device)
        synchronize(options.device)
        begin = time.perf_counter()
        loss = trainer.micro(tokens[:, :-1], tokens[:, 1:])
        trainer.update()
        report["losses"].append(loss.item())
        synchronize(options.device)
        report["seconds"].append(time.perf_counter() - begin)
        report.setdefault("first_seconds", time.perf_counter() - start)
        of_steps = torch.cuda.max_memory_allocated() if cuda else 0
        report |= {"device_nbytes_of_steps": of_steps, "device_nbytes": max(of_steps, construction_nbytes) if cuda else 0}
        report |= {"host_nbytes": host_peak_nbytes(), "nvme_nbytes": trainer.moved()[0]}
        leave_so_far(report)
    trainer.close()
    return report


def _trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def _trainer(model, optimizer, *, autocast: bool, **rest) -> Trainer:
    """autocast: to bf16. rest: `moved`, with the bytes read from NVMe first, and `close`."""
    device = next(model.parameters()).device.type

    def micro(x, y):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(x, y)
        loss.backward()
        return loss.detach()

    def update():
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(micro, update, **rest)


def _infinity(options, device) -> Trainer:
    limits = {name: value for name in ("device_memory", "host_memory") if (value := getattr(options, name)) is not None}
    config = infinity.Config(swap_dirs=options.swap_dirs, device=options.device, dtype="bf16", frozen_dtype="nf4", **limits)
    with infinity.init(config):
        model = adapt(make(options.model, options.sequence, 4096, device), options.rank)
    optimizer = infinity.AdamW(_trained(model), lr=LR, weight_decay=0.0)
    engine = infinity.engine_of(model)
    return _trainer(model, optimizer, autocast=False, moved=lambda: (engine.stats()["nvme_read_nbytes"],), close=engine.close)


def _bitsandbytes(options, device) -> Trainer:
    import bitsandbytes

    causal = make(options.model, options.sequence, 4096, device)
    causal.model.is_loaded_in_4bit = True
    for layer in causal.model.model.layers:
        for name, linear in [(name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear)]:
            coded = {"quant_type": "nf4", "compress_statistics": False}
            sizes = {"bias": linear.bias is not None, "device": "meta"}  # no values are drawn
            new = bitsandbytes.nn.Linear4bit(*linear.weight.shape[::-1], **sizes, compute_dtype=torch.bfloat16, **coded)
            new.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, blocksize=64, **coded).to(device)
            new.bias = linear.bias
            parent, _, last = name.rpartition(".")
            setattr(layer.get_submodule(parent), last, new)
    model = adapt(causal, options.rank, in_fp32=True)
    optimizer = torch.optim.AdamW(_trained(model), lr=LR, weight_decay=0.0, fused=True)
    return _trainer(model, optimizer, autocast=True, moved=lambda: (0,))


if __name__ == "__main__":
    exit_with(main)
