"""The `train` command: checked options -> Config -> a training run of a GPT -> a report. And what commands share of output:
a progress line, a JSON file written whole.

Knows the engine as any user does, through the public API only, and torch.distributed, to ask every rank for its numbers.
Must not know how options are spelled on the command line beyond naming them in an error, nor how an error ends the process.
"""

import functools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import infinity
from infinity.config import Config, format_bytes
from infinity.errors import ConfigError
from infinity.gpt import GPT, Batches, read_bytes, standard_library_paths

LINKS = {
    "nc": "NVMe to host",
    "cg": "host to device",
    "gg": "all-gather",
    "rs": "reduce-scatter",
    "gc": "device to host",
    "update": "update",
    "cn": "host to NVMe",
}
OPTIMIZERS = {
    "adamw": infinity.AdamW,
    "adam": infinity.Adam,
    "sgd": functools.partial(infinity.SGD, momentum=0.9),
    "lion": infinity.Lion,
}
LINK_COUNTERS = ("nbytes", "busy_seconds", "stall_seconds")
WARM_UP_STEPS = 2  # the first records the trace, the second is the first to follow a plan
PROGRESS_SECONDS = 5  # between progress lines where there is no terminal to rewrite one


def train(arguments) -> int:
    """The `train` command. Everything that can be refused is refused before the first byte is written."""
    if arguments.hidden % arguments.heads:
        raise ConfigError(f"--heads {arguments.heads} does not divide --hidden {arguments.hidden}; choose one that does")
    check_json_path(arguments.json)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    config = _config(arguments)
    batches = Batches(
        _tokens(arguments.data),
        vocab=arguments.vocab,
        batch=arguments.batch,
        seq=arguments.seq,
        seed=arguments.seed,
        rank=rank,
        world=world,
    )

    if config.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(config.device))
    # torchrun names a world even where it has one rank; plain `python` does not, and needs no process group.
    distributed = "RANK" in os.environ and not dist.is_initialized()
    if distributed:
        dist.init_process_group("nccl" if config.device.startswith("cuda") else "gloo")
    run = _Run(arguments, config, batches)
    if rank == 0:
        run.introduce()
    run.train(StepProgress(arguments.steps) if rank == 0 else None)
    report = run.report()
    if distributed:  # not after an error: it may wait for ranks that wait for this one
        dist.destroy_process_group()
    if rank == 0:
        print(_table(report))
        if arguments.json:
            write_json(arguments.json, report)
    return 0


def _config(arguments):
    device = arguments.device
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    values = {name: getattr(arguments, name) for name in ("host_memory", "device_memory", "weights", "states")}
    others = ("activations", "tile_above", "residency", "chunk_mib", "update", "moments", "seed")
    values |= {name: getattr(arguments, name) for name in others}
    if arguments.nvme:
        values["nvme"] = arguments.nvme
    config = Config(device=device, dtype=arguments.dtype or ("bf16" if "cuda" in device else "fp32"), **values)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: this PyTorch finds no CUDA device; use --device cpu")
    return config


def _tokens(data):
    return None if data == ["random"] else read_bytes(data or standard_library_paths())


class _Run:
    """One training run on one rank: the model in its engine, and what was measured of each step."""

    def __init__(self, arguments, config, batches):
        self.arguments = arguments
        self.config = config
        self.batches = batches
        self.losses = []  # of each step, the mean over this rank's micro-batches
        self.seconds = []  # of each step
        self.counters = []  # engine.stats() before the first step and after each
        torch.manual_seed(arguments.seed)
        with infinity.init(config):
            self.model = GPT(
                arguments.hidden,
                arguments.layers,
                arguments.heads,
                arguments.vocab,
                arguments.seq,
                checkpoint_activations=arguments.checkpoint_activations,
                tie=arguments.tie,
            )
        self.optimizer = OPTIMIZERS[arguments.optimizer](
            self.model.parameters(),
            lr=arguments.lr,
            max_grad_norm=arguments.max_grad_norm,
            accumulation_steps=arguments.accumulate,
        )
        self.engine = infinity.engine_of(self.model)
        self.counters.append(self.engine.stats())

    def introduce(self):
        stats = self.counters[0]
        world = dist.get_world_size() if dist.is_initialized() else 1
        print(
            f"GPT of {stats['num_parameters'] / 1e6:,.1f} M parameters in {self.config.dtype} on {self.config.device}: "
            f"states {format_bytes(stats['state_nbytes'])}, "
            f"device budget {format_bytes(stats['device_budget_nbytes'])}, "
            f"host arena {format_bytes(stats['host_arena_nbytes'])}{', each a rank' if world > 1 else ''}",
            flush=True,
        )

    def train(self, progress):
        """Counters and clock are read in one place, behind step(): updates may still be pending there, but from one such
        place to the next lies exactly one step's worth of them."""
        with self.engine:
            started = time.perf_counter()
            for step in range(self.arguments.steps):
                loss = self._step(step)
                now = time.perf_counter()
                self.seconds.append(now - started)
                started = now
                self.losses.append(loss)
                self.counters.append(self.engine.stats())
                if progress:
                    progress(step, loss, self.seconds)
            if progress:
                progress.finish()

    def _step(self, step):
        losses = []
        for micro in range(self.arguments.accumulate):
            x, y = (rows.to(self.config.device) for rows in self.batches(step, micro))
            loss = self.model(x, y)
            (loss / self.arguments.accumulate).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item()  # waits for the device, so that the clock means something

    def report(self):
        """What the run did, over all ranks: the value of --json. A collective, if there is a process group.

        Times, rates and stalls are of the measured steps: those after the warm-up, or all of a run that has no more.
        Bytes are of all ranks together, seconds and rates a rank's (the mean).
        """
        arguments, last = self.arguments, self.counters[-1]
        num = last["num_parameters"]
        skipped = WARM_UP_STEPS if len(self.seconds) > WARM_UP_STEPS else 0
        seconds = self.seconds[skipped:]
        median = statistics.median(seconds)

        losses = _over_ranks(self.losses).mean(0)
        state_nbytes = _over_ranks(last["state_nbytes"]).sum()
        peaks = _over_ranks([last["peak_device_nbytes"], last["host_arena_nbytes"]]).max(0)
        swapped = [[stats["nvme_read_nbytes"], stats["nvme_write_nbytes"]] for stats in self.counters]
        swapped = _over_ranks(swapped).sum(0)  # [steps + 1, read and written]
        # The mean, not the median: what is read ahead in one step is missing in the next, and cancels out.
        per_param = ((swapped[-1] - swapped[skipped]) / len(seconds) / num).tolist() if skipped else [None, None]
        links = _over_ranks([_link_counters(self.counters[skipped]), _link_counters(last)])  # [world, 2, links, counters]
        links = links[:, 1] - links[:, 0]
        world = len(links)
        nbytes = links[:, :, 0].sum(0)
        busy_seconds, stall_seconds = links[:, :, 1].mean(0), links[:, :, 2].mean(0)
        return {
            "command": "train",
            "options": {name: _plain(value) for name, value in vars(arguments).items() if name != "command"},
            "versions": {"infinity": _version(), "torch": torch.__version__, "python": platform.python_version()},
            "device": self.config.device,
            "dtype": self.config.dtype,
            "world": world,
            "num_parameters": num,
            "state_bytes": int(state_nbytes),
            "device_budget_bytes": last["device_budget_nbytes"],
            "states_over_device_budget": float(state_nbytes / world / last["device_budget_nbytes"]),
            "peak_device_bytes": int(peaks[0]),
            "host_arena_bytes": int(peaks[1]),
            "losses": losses.tolist(),
            "step_seconds": self.seconds,
            "measured_steps": len(seconds),
            "median_step_seconds": median,
            "tokens_per_second": arguments.batch * arguments.accumulate * arguments.seq / median,
            "nvme_read_bytes_per_param": per_param[0],
            "nvme_write_bytes_per_param": per_param[1],
            "stall_seconds": dict(zip(LINKS, stall_seconds.tolist())),
            "links": {
                link: {
                    "bytes_per_step": int(nbytes[i]) // len(seconds),
                    "gbps": float(nbytes[i] / world / busy_seconds[i] / 1e9) if busy_seconds[i] else 0.0,
                    "stall_share": float(stall_seconds[i] / sum(seconds)),
                }
                for i, link in enumerate(LINKS)
            },
        }


def _link_counters(stats):
    return [[stats["links"][link][counter] for counter in LINK_COUNTERS] for link in LINKS]


def _over_ranks(values):
    """The same numbers of every rank, stacked: float64 [world, ...]."""
    values = np.array(values, dtype=np.float64)
    if not dist.is_initialized():
        return values[None]
    mine = torch.from_numpy(values).to("cuda" if dist.get_backend() == "nccl" else "cpu")
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).cpu().numpy()


# Output


class Progress:
    """One line of counted work, rewritten in place on a terminal; elsewhere a line now and then. On standard error.

    Call it from one thread. Used as a context, it ends the line however the work ends, so that an error has its own.
    """

    def __init__(self, live_seconds=0.0):
        self.live = sys.stderr.isatty()
        self.pause_seconds = live_seconds if self.live else PROGRESS_SECONDS
        self.printed = -math.inf

    def show(self, line, *, last=False):
        """Write the line if one is due; the last always is."""
        now = time.monotonic()
        if now - self.printed < self.pause_seconds and not last:
            return
        self.printed = now
        sys.stderr.write(f"\r{line}\x1b[K" if self.live else f"{line}\n")
        sys.stderr.flush()

    def finish(self):
        if self.live and self.printed > -math.inf:
            sys.stderr.write("\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.finish()


class StepProgress(Progress):
    """Training: called after each step, with its number from 0, its loss and the seconds of all steps so far."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def __call__(self, step, loss, seconds):
        pace = statistics.median(seconds[-10:])
        left = pace * (self.steps - step - 1)
        line = f"step {step + 1}/{self.steps}  loss {loss:.3f}  {pace:.2f} s a step  {left:.0f} s left"
        self.show(line, last=step + 1 >= self.steps)


class BytesProgress(Progress):
    """Long file work: called with (done_nbytes, total_nbytes), as often as is handy. `done` is a verb, such as "saved".

    tqdm draws it on a terminal, where it is installed.
    """

    def __init__(self, done):
        super().__init__(live_seconds=0.1)
        self.done = done
        self.started = time.monotonic()
        self.bar = _tqdm(desc=done, unit="B", unit_scale=True) if self.live else None

    def __call__(self, done_nbytes, total_nbytes):
        if self.bar is not None:
            self.bar.total = total_nbytes
            self.bar.update(done_nbytes - self.bar.n)
            return
        seconds = time.monotonic() - self.started
        rate = done_nbytes / seconds if seconds else 0.0
        total, done = format_bytes(total_nbytes), format_bytes(done_nbytes)
        unit = total[total.index(" ") :]
        share = done_nbytes / total_nbytes if total_nbytes else 1.0
        line = f"{self.done} {done.removesuffix(unit)} of {total}  {100 * share:.0f} %"
        if rate:
            speed = f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"
            line += f"  {speed}  {(total_nbytes - done_nbytes) / rate:.0f} s left"
        self.show(line, last=done_nbytes >= total_nbytes)

    def finish(self):
        if self.bar is None:
            super().finish()
        else:
            self.bar.close()


def _tqdm(**options):
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(**options)


def _table(report):
    world = report["world"]
    ranks = f" on {world} ranks" if world > 1 else ""
    traffic = [report[f"nvme_{name}_bytes_per_param"] for name in ("read", "write")]
    lines = [
        f"loss        {report['losses'][0]:.4f} first, {report['losses'][-1]:.4f} last",
        f"step        {report['median_step_seconds']:.3f} s (median), {report['tokens_per_second']:,.0f} tokens/s{ranks}",
        f"states      {format_bytes(report['state_bytes'])}, {report['states_over_device_budget']:.1f} times the device budget",
        f"device      {format_bytes(report['peak_device_bytes'])} at most, host arena {format_bytes(report['host_arena_bytes'])}"
        + (" (a rank)" if world > 1 else ""),
    ]
    if None not in traffic:
        lines.append(f"NVMe        {traffic[0]:.2f} bytes read, {traffic[1]:.2f} written, a parameter and step")
    lines += ["", f"{'link':<16}{'a step':>12}{'GB/s' + (' a rank' if world > 1 else ''):>14}{'step waited':>14}"]
    for link, name in LINKS.items():
        row = report["links"][link]
        lines.append(
            f"{name:<16}{format_bytes(row['bytes_per_step']):>12}{row['gbps']:>14.2f}{row['stall_share']:>13.1%} "
        )
    return "\n".join(line.rstrip() for line in lines)


def check_json_path(path):
    """Raise ConfigError if write_json could not write there, before anything else is done. None is no path."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {path} is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no directory {path.parent}; create it or name another")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--json {path}: {path.parent} is not writable; name another")


def write_json(path, report):
    """Old or new, whole: written aside, then renamed."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            json.dump(report, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _plain(value):
    return str(value) if isinstance(value, Path) else value


def _version():
    try:
        return metadata.version("infinity")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return None
