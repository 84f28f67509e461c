"""The command line: options -> Config -> a training run -> a report. `python -m infinity`, or `infinity`.

Uses the engine as any user would, through the public API only. A mistake of the user's, and a failing disk, end in one
line and exit status 2.
"""

import argparse
import difflib
import functools
import json
import math
import os
import platform
import re
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
from infinity.config import CHOICES, Config, format_bytes
from infinity.errors import ConfigError, SwapError, UsageError
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


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    try:
        arguments = _parser().parse_args(argv)
        return arguments.command(arguments)
    except (ConfigError, SwapError, UsageError) as error:
        where = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        print(f"infinity: error: {where}{'; '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("infinity: interrupted", file=sys.stderr)
        return 130


# Options


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other mistake is reported, and which option may have been meant."""

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: (-[^\s=]*)", message)
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = difflib.get_close_matches(unknown[1], known, n=1) if unknown else ()
        hint = f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"
        raise ConfigError(message + hint)

    def parse_known_args(self, args=None, namespace=None):
        # A subcommand's parser is asked for what it knows; what it does not know is its own error, with its own hint.
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the default of an option that has one."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def _parser():
    parser = _Parser(prog="infinity", description="Train models far larger than device memory.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    command = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train a GPT",
        description="Train a GPT on bytes of text, with every state in the fastest tier that has room. Runs under torchrun, too.",
        formatter_class=_Help,
    )
    command.set_defaults(command=train)

    model = command.add_argument_group("model")
    model.add_argument("--hidden", type=_whole, default=384, metavar="N", help="width")
    model.add_argument("--layers", type=_whole, default=6, metavar="N", help="number of blocks")
    model.add_argument("--heads", type=_whole, default=6, metavar="N", help="attention heads; must divide --hidden")
    model.add_argument("--vocab", type=_whole, default=256, metavar="N", help="number of tokens; text needs 256")
    model.add_argument("--seq", type=_whole, default=128, metavar="N", help="length of a sequence")
    model.add_argument("--tie", action="store_true", help="use the token embedding as the output layer")
    model.add_argument("--checkpoint-activations", action="store_true", help="recompute each block in backward")

    run = command.add_argument_group("training")
    run.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help="files of text, or `random` tokens; by default the sources of Python's standard library",
    )
    run.add_argument("--batch", type=_whole, default=8, metavar="N", help="sequences in a micro-batch, over all ranks")
    run.add_argument("--accumulate", type=_whole, default=1, metavar="N", help="micro-batches in a step")
    run.add_argument("--steps", type=_whole, default=70, metavar="N", help="optimizer steps")
    run.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="adamw, adam, sgd (momentum 0.9) or lion")
    run.add_argument("--lr", type=_positive, default=3e-4, metavar="X", help="learning rate")
    run.add_argument("--max-grad-norm", type=_positive, metavar="X", help="clip the gradient's global norm to this")
    run.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the weights and of the data's order")

    place = command.add_argument_group("placement")
    place.add_argument("--dtype", metavar=_either("dtype"), help="by default bf16 on CUDA and fp32 on the CPU")
    place.add_argument("--moments", default="fp32", metavar=_either("moments"), help="dtype of the optimizer's moments")
    place.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; by default CUDA where there is one")
    place.add_argument("--nvme", nargs="+", metavar="DIR", help="swap directories, one a drive; by default ./infinity-swap")
    place.add_argument("--host-memory", default="auto", metavar="SIZE", help="bound of pinned host memory, such as 48GiB")
    place.add_argument("--device-memory", default="auto", metavar="SIZE", help="bound of the engine's device memory")
    place.add_argument("--weights", default="auto", metavar=_either("weights"), help="tier of the weights")
    place.add_argument("--states", default="auto", metavar=_either("states"), help="tier of the optimizer states")
    place.add_argument("--activations", default="auto", metavar=_either("activations"), help="tier of what backward needs of forward")
    place.add_argument("--tile-above", default="auto", metavar="SIZE", help="cut larger layers into tiles; auto: if they do not fit")
    place.add_argument("--residency", default="auto", metavar=_either("residency"), help="none: only what is in use stays")
    place.add_argument("--chunk-mib", type=_positive, metavar="X", help="size of a chunk, in MiB of 16-bit weights")
    place.add_argument("--update", default="auto", metavar=_either("update"), help="when states are updated")

    command.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE, too")
    return parser


def _either(field):
    return "{" + ",".join(CHOICES[field]) + "}"


def _whole(text):
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number above zero; got {text!r}")
    return int(text)


def _seed(text):
    if not re.fullmatch(r"\d+", text) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1; got {text!r}")
    return int(text)


def _positive(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above zero; got {text!r}")
    return value


# Training


def train(arguments) -> int:
    """The `train` command. Everything that can be refused is refused before the first byte is written."""
    if arguments.hidden % arguments.heads:
        raise ConfigError(f"--heads {arguments.heads} does not divide --hidden {arguments.hidden}; choose one that does")
    _check_report_path(arguments.json)
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
    run.train(_Progress(arguments.steps) if rank == 0 else None)
    report = run.report()
    if distributed:  # not after an error: it may wait for ranks that wait for this one
        dist.destroy_process_group()
    if rank == 0:
        print(_table(report))
        if arguments.json:
            _write_json(arguments.json, report)
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


class _Progress:
    """One line, rewritten in place on a terminal; elsewhere a line now and then. On standard error."""

    def __init__(self, steps):
        self.steps = steps
        self.live = sys.stderr.isatty()
        self.printed = -math.inf

    def __call__(self, step, loss, seconds):
        now = time.monotonic()
        if not self.live and now - self.printed < PROGRESS_SECONDS and step + 1 < self.steps:
            return
        self.printed = now
        pace = statistics.median(seconds[-10:])
        left = pace * (self.steps - step - 1)
        line = f"step {step + 1}/{self.steps}  loss {loss:.3f}  {pace:.2f} s a step  {left:.0f} s left"
        if self.live:
            sys.stderr.write(f"\r{line}\x1b[K")
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def finish(self):
        if self.live:
            sys.stderr.write("\n")


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


def _check_report_path(path):
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {path} is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no directory {path.parent}; create it or name another")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--json {path}: {path.parent} is not writable; name another")


def _write_json(path, report):
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
