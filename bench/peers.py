"""The same GPT, all states on NVMe, nothing resident: infinity beside DeepSpeed ZeRO-Infinity on the CPU.

    python bench/peers.py [--nvme DIR] [--dtype fp32] [--rounds 2] [--steps 6] [--json FILE]

Each round runs each engine in a process of its own, in turn, on the same tokens from the same seed. Medians are over the
steps after the second. DeepSpeed's settings are those with which it runs at all with everything on NVMe; its kernels are
compiled on its first run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HIDDEN, LAYERS, HEADS, VOCAB, SEQ, BATCH = 1024, 8, 16, 32000, 128, 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", default="infinity-swap", help="made if it does not exist")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json")
    parser.add_argument("--engine", choices=("infinity", "deepspeed"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    Path(options.nvme).mkdir(exist_ok=True)
    if options.engine:
        report = {"infinity": run_infinity, "deepspeed": run_deepspeed}[options.engine](options)
        report["peak_rss_gib"] = peak_rss_gib()
        print("RESULT " + json.dumps(report))
        return
    results = {"infinity": [], "deepspeed": []}
    for round_ in range(options.rounds):
        for engine in results:
            report = run_process(engine, options)
            results[engine].append(report)
            print(
                f"round {round_} {engine:10s} median {statistics.median(report['step_seconds'][2:]):.3f} s  "
                f"peak {report['peak_rss_gib']:.2f} GiB  losses {report['losses'][0]:.4f} .. {report['losses'][-1]:.4f}",
                flush=True,
            )
    summary = {}
    for engine, reports in results.items():
        seconds = [s for report in reports for s in report["step_seconds"][2:]]
        summary[engine] = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
        summary[engine]["peak_rss_gib"] = max(report["peak_rss_gib"] for report in reports)
        print(f"{engine:10s}", {name: round(value, 3) for name, value in summary[engine].items()})
    summary["ratio"] = summary["infinity"]["median"] / summary["deepspeed"]["median"]
    print(f"ratio {summary['ratio']:.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps({"summary": summary, "runs": results}, indent=1))


def run_process(engine: str, options) -> dict:
    command = [sys.executable, __file__, "--nvme", options.nvme, "--dtype", options.dtype]
    command += ["--steps", str(options.steps), "--engine", engine]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    os.sync()  # what the last process left to the kernel to write is not charged to this one
    environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0") if engine == "deepspeed" else None
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        sys.exit(f"{engine} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1][len("RESULT ") :])


def batches(steps):
    import torch

    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def model():
    import torch

    from infinity.gpt import GPT

    torch.manual_seed(0)
    return GPT(HIDDEN, LAYERS, HEADS, VOCAB, SEQ, checkpoint_activations=True)


def run_infinity(options) -> dict:
    import infinity

    config = infinity.Config(
        nvme=options.nvme, weights="nvme", states="nvme", residency="none", dtype=options.dtype, device="cpu"
    )
    with infinity.init(config):
        gpt = model()
    optimizer = infinity.AdamW(gpt.parameters(), lr=1e-4, weight_decay=0.01)
    seconds, losses = [], []
    for x, y in batches(options.steps):
        start = time.perf_counter()
        loss = gpt(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    stats = infinity.engine_of(gpt).stats()
    infinity.engine_of(gpt).close()
    return {"step_seconds": seconds, "losses": losses, "host_arena_nbytes": stats["host_arena_nbytes"]}


def run_deepspeed(options) -> dict:
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    settings = {
        "train_batch_size": BATCH,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "nvme", "nvme_path": options.nvme, "buffer_count": 40, "buffer_size": 40_000_000, "max_in_cpu": 0},
            "offload_optimizer": {"device": "nvme", "nvme_path": options.nvme, "buffer_count": 16, "pipeline_read": True, "pipeline_write": True},
        },
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True, "thread_count": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    }
    if options.dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        gpt = model()
    engine, *_ = deepspeed.initialize(model=gpt, model_parameters=gpt.parameters(), config=settings)
    seconds, losses = [], []
    for x, y in batches(options.steps):
        start = time.perf_counter()
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return {"step_seconds": seconds, "losses": losses, "deepspeed": deepspeed.__version__, "torch": torch.__version__}


def peak_rss_gib() -> float:
    """The most resident memory this process has had."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


if __name__ == "__main__":
    main()
