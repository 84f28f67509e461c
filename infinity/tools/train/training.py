"""The `train` command: checks options, builds a Config, trains a GPT and prints a report.

Uses the public API of the engine. torch.distributed collects the numbers of all ranks, and the engine's ranks agree on the last step. Must
not know the spelling of options, except in errors, or how an error ends the process.
"""

import contextlib
import functools
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import infinity
from infinity.config import Config, command_layers
from infinity.errors import CheckpointError, ConfigError
from infinity.model.gpt import GPT, Batches, read_bytes, standard_library_paths
from infinity.output import check_file, give, if_several
from infinity.sizes import format_bytes
from infinity.system.capacity import device_of
from infinity.system.events import LINKS
from infinity.system.waits import of_the_program
from infinity.tools.progress import StepProgress, bytes_progress
from infinity.tools.train.rotation import Rotation
from infinity.tools.train.saver import Saver, as_saved, check_options, checkpoint_to_resume
from infinity.tools.train.sigterm import Sigterm
from infinity.tools.train.status import Link, LiveView, Reporter, Status
from infinity.version import __version__

OPTIMIZERS = {
    "adamw": infinity.AdamW,
    "adam": infinity.Adam,
    "sgd": functools.partial(infinity.SGD, momentum=0.9),
    "lion": infinity.Lion,
    "muon": functools.partial(infinity.Muon, adjust_lr_fn="match_rms_adamw"),  # one learning rate for matrices and all others
}
LINK_COUNTERS = ("nbytes", "busy_seconds", "stall_seconds")
WARM_UP_STEPS = 2  # the first step records the trace, the second is the first that follows a plan
RECENT_STEPS = 10  # in the medians of a status
CONFIG_OPTIONS = (  # options that are fields of Config
    *("swap_dirs", "host_memory", "device_memory", "param_tier", "optimizer_state_tier", "activation_tier", "tile_above"),
    *("dtype", "master", "optimizer_state_dtype", "residency", "chunk_mib", "device", "update", "seed"),
)

def train(arguments) -> int:
    """The `train` command. All options are checked before the first byte is written."""
    if arguments.hidden % arguments.heads:
        raise ConfigError(f"--heads {arguments.heads} does not divide --hidden {arguments.hidden}; choose one that does")
    check_file(arguments.output, "--output")
    check_file(arguments.trace, "--trace")
    check_options(arguments)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    is_first = rank == 0
    config = _config(arguments)
    arguments.seed = config.seed  # a file may have set the seed
    batches = Batches(
        _tokens(arguments.data),
        vocab=arguments.vocab,
        batch=arguments.batch,
        seq=arguments.seq,
        seed=arguments.seed,
        rank=rank,
        world=world,
    )
    options = as_saved(arguments, batches.tokens)
    found = checkpoint_to_resume(arguments, options)
    if found is not None and found.step >= arguments.steps:
        if is_first:
            report = _head(arguments, found.step, found.path) | {"losses": [], "step_seconds": []}
            give(report, f"nothing to train: {found.path} has step {found.step}, --steps {arguments.steps}", arguments.json, arguments.output)
        return 0

    if config.device.startswith("cuda"):
        device_of(config.device)
    # torchrun sets RANK, even for one rank. Plain `python` does not, and needs no process group.
    distributed = "RANK" in os.environ and not dist.is_initialized()
    if distributed:
        dist.init_process_group("nccl" if config.device.startswith("cuda") else "gloo")
    run = TrainingRun(arguments, config, batches)
    run.train(options, found)
    report = run.report()
    if distributed:  # not after an error: the call could wait for ranks that wait for this rank
        dist.destroy_process_group()
    if is_first:
        give(report, _table(report), arguments.json, arguments.output)
    return 0


def _config(arguments):
    """The Config of the run. The command has its own defaults for device and dtype."""
    layers = command_layers(arguments, CONFIG_OPTIONS)
    given = Config.layered(layers)
    own = {}
    if given.device is None:
        own["device"] = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if "dtype" not in given.origins:
        own["dtype"] = "bf16" if "cuda" in (given.device or own["device"]) else "fp32"
    traced = {"trace": True} if arguments.trace else {}
    config = Config.layered([*layers, ("default", own), ("--trace", traced)])
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"{config.origins['device']}: device={config.device!r}: this PyTorch finds no CUDA device; use --device cpu")
    return config


def _tokens(data):
    return None if data == ["random"] else read_bytes(data or standard_library_paths())


class TrainingRun:
    """One training run on one rank: the model in an engine, and the measurements of each step."""

    resumed_from_step = None
    checkpoint = None  # path of the last whole checkpoint

    def __init__(self, arguments, config, batches):
        self.arguments = arguments
        self.config = config
        self.batches = batches
        self.losses = []  # of each step: mean over this rank's micro-batches
        self.seconds = []  # of each step
        self.counters = []  # engine.stats() before the first step and after each
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
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

    def train(self, options, found):
        """Run all steps after those of `found`, or from the first. options: saved in each checkpoint.

        The run reads counters and clock right after step(). Updates may still be pending then, but two readings in a row are exactly one
        step's updates apart.
        """
        arguments, first = self.arguments, 0
        display = _Display(self) if self.is_first else contextlib.nullcontext()
        with display as shown, Sigterm(waits=self.engine.ranks.are_several, listens=arguments.save is not None) as sigterm, self.engine:
            if not self.engine.ranks.agree(-1 if found is None else found.step):
                raise CheckpointError(f"{arguments.save}: the ranks found different checkpoints; all must see the same directory")
            if found is not None:
                first = self.resumed_from_step = self._load(found)
            elif arguments.resume and self.is_first:
                _say(f"no checkpoint in {arguments.save}: starting with step 1")
            saver = Saver(self, options) if arguments.save is not None else None
            if shown:
                shown.begin(first)
            started = time.perf_counter()
            for step in range(first, arguments.steps):
                loss = self._step(step)
                now = time.perf_counter()
                self.seconds.append(now - started)
                started = now
                self.losses.append(loss)
                self.counters.append(self.engine.stats())
                if shown:
                    shown.step_done(step + 1, saver)
                if saver is not None:
                    stopped = self._any_received(sigterm) if self.engine.ranks.are_several else sigterm.received
                    saver.step_done(step + 1, must_save=stopped or step + 1 == arguments.steps)
                    if stopped:
                        break
            if shown:
                shown.finish()
            if arguments.trace:
                infinity.save_trace(arguments.trace, self.model)
            if saver is not None:
                self.checkpoint = saver.finish(shown=self.is_first)
                if step + 1 < arguments.steps and self.is_first:
                    _say(f"stopped by SIGTERM after step {step + 1}; saved {self.checkpoint}")

    def _load(self, found):
        """Load a checkpoint. Returns the number of steps before it."""
        try:
            with bytes_progress(self.is_first, "loaded") as progress:
                infinity.load(found.path, self.model, self.optimizer, progress=progress)
        except CheckpointError as error:
            # Only this function knows the older checkpoint. The error of a checkpoint that does not fit the model keeps its own remedy.
            remedy = Rotation(found.path.parent).remedy(found.path)
            raise CheckpointError(str(error).replace("use another checkpoint", remedy)) from None
        for group in self.optimizer.param_groups:
            group["lr"] = self.arguments.lr
        self.counters = [self.engine.stats()]
        if self.is_first:
            _say(f"resumed from {found.path}, step {found.step}")
        return found.step

    def status(self, num_steps, saver):
        """The status of this rank after `num_steps` steps. Rates and shares are those of the last RECENT_STEPS steps."""
        arguments, last = self.arguments, self.counters[-1]
        recent = self.seconds[-RECENT_STEPS:]
        pace = statistics.median(recent)
        before = self.counters[-1 - len(recent)]
        links = []
        for link in LINKS:
            nbytes, busy, stalled = (last["links"][link][name] - before["links"][link][name] for name in LINK_COUNTERS)
            links.append(Link(link, nbytes / busy / 1e9 if busy else 0.0, stalled / sum(recent)))
        return Status(
            step=num_steps,
            steps=arguments.steps,
            world=self.world,
            loss=self.losses[-1],
            step_seconds=pace,
            tokens_per_second=arguments.batch * arguments.accumulate * arguments.seq / pace,
            links=tuple(links),
            device_nbytes=last["device_nbytes"],
            device_budget_nbytes=last["device_budget_nbytes"],
            host_nbytes=last["pinned_host_nbytes"],
            checkpoint=saver.under_way if saver is not None else None,
            saved=saver.last if saver is not None else None,
        )

    def _any_received(self, sigterm):
        """Whether any rank has received SIGTERM. A collective; see [Note: SIGTERM]."""
        mine = sigterm.received  # read once: a signal during the exchange counts in the next step
        agreed = self.engine.ranks.agree(mine)
        return mine or not agreed

    def _step(self, step):
        num = self.arguments.accumulate
        micro_batches = ([rows.to(self.config.device) for rows in self.batches(step, micro)] for micro in range(num))
        if self.arguments.by_layer:
            losses = infinity.accumulate(self.model, micro_batches, lambda model, batch: model(*batch) / num)
        else:
            losses = []
            for batch in micro_batches:
                loss = self.model(*batch) / num
                loss.backward()
                losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum().item()  # waits for the device: the clock then includes all work of the step

    def report(self):
        """The report of the run over all ranks: the value of --json. A collective, if there is a process group.

        Times, rates and stalls are those of the measured steps: the steps after the warm-up, or all steps of a shorter run. Bytes are sums
        over ranks. Seconds and rates are those of one rank (the mean).
        """
        arguments, last = self.arguments, self.counters[-1]
        num = last["num_parameters"]
        skipped = WARM_UP_STEPS if len(self.seconds) > WARM_UP_STEPS else 0
        seconds = self.seconds[skipped:]
        median = statistics.median(seconds)

        losses = _over_ranks(self.losses).mean(0)
        state_nbytes = _over_ranks(last["model_state_nbytes"]).sum()
        peaks = _over_ranks([last["peak_device_nbytes"], last["pinned_host_nbytes"]]).max(0)
        swapped = [[stats["nvme_read_nbytes"], stats["nvme_write_nbytes"]] for stats in self.counters]
        swapped = _over_ranks(swapped).sum(0)  # [steps + 1, read and written]
        # The mean, not the median: bytes that one step reads ahead are missing in the next step, and cancel out.
        per_param = ((swapped[-1] - swapped[skipped]) / len(seconds) / num).tolist() if skipped else [None, None]
        links = _over_ranks([_link_counters(self.counters[skipped]), _link_counters(last)])  # [world, 2, links, counters]
        links = links[:, 1] - links[:, 0]
        world = len(links)
        nbytes = links[:, :, 0].sum(0)
        busy_seconds, stall_seconds = links[:, :, 1].mean(0), links[:, :, 2].mean(0)
        return _head(arguments, self.resumed_from_step, self.checkpoint) | {
            "config": self.config.to_table(),
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


class _Display:
    """The output during a run: a line or a view on standard error, and the status for `infinity status`. Only rank 0 has a display."""

    def __init__(self, run):
        self.run = run
        self.view = LiveView() if run.arguments.live else None
        self.reporter = Reporter(of_the_program, self.view or (lambda status: None))
        self.progress = StepProgress(run.arguments.steps)

    def begin(self, num_steps):
        self.reporter.tell(Status(step=num_steps, steps=self.run.arguments.steps, world=self.run.world))

    def step_done(self, num_steps, saver):
        run = self.run
        status = run.status(num_steps, saver)
        self.reporter.tell(status)
        if self.view is not None:
            self.view(status, last=num_steps == run.arguments.steps)
        else:
            self.progress(num_steps - 1, run.losses[-1], run.seconds)

    def finish(self):
        (self.view or self.progress).finish()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.reporter.close()


def _head(arguments, resumed_from_step, checkpoint):
    """The first entries of a report."""
    return {
        "command": "train",
        "options": {name: _plain(value) for name, value in vars(arguments).items() if name != "command"},
        "versions": {"infinity": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "resumed_from_step": resumed_from_step,
        "checkpoint": checkpoint and str(checkpoint),
    }


def _link_counters(stats):
    return [[stats["links"][link][counter] for counter in LINK_COUNTERS] for link in LINKS]


def _over_ranks(values):
    """The values of all ranks, stacked: float64 [world, ...]."""
    values = np.array(values, dtype=np.float64)
    if not dist.is_initialized():
        return values[None]
    mine = torch.from_numpy(values).to("cuda" if dist.get_backend() == "nccl" else "cpu")
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).cpu().numpy()


# Output


def _say(line):
    print(line, file=sys.stderr, flush=True)


def _table(report):
    world = report["world"]
    ranks, a_rank = if_several(world, f" on {world} ranks"), if_several(world, " a rank")
    traffic = [report[f"nvme_{name}_bytes_per_param"] for name in ("read", "write")]
    lines = [
        f"loss        {report['losses'][0]:.4f} first, {report['losses'][-1]:.4f} last",
        f"step        {report['median_step_seconds']:.3f} s (median), {report['tokens_per_second']:,.0f} tokens/s{ranks}",
        f"states      {format_bytes(report['state_bytes'])}, {report['states_over_device_budget']:.1f} times the device budget",
        f"device      {format_bytes(report['peak_device_bytes'])} at most, host arena {format_bytes(report['host_arena_bytes'])}"
        + if_several(world, " (a rank)"),
    ]
    if None not in traffic:
        lines.append(f"NVMe        {traffic[0]:.2f} bytes read, {traffic[1]:.2f} written, a parameter and step")
    lines += ["", f"{'link':<16}{'a step':>12}{'GB/s' + a_rank:>14}{'step waited':>14}"]
    for link in LINKS:
        row = report["links"][link]
        lines.append(
            f"{link:<16}{format_bytes(row['bytes_per_step']):>12}{row['gbps']:>14.2f}{row['stall_share']:>13.1%} "
        )
    return "\n".join(line.rstrip() for line in lines)


def _plain(value):
    return str(value) if isinstance(value, Path) else value
