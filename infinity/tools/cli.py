"""The command line: options, error messages and exit status. `python -m infinity`, or `infinity`.

Knows the options of each command. A wrong input, a failing disk and gradients that are not finite end in one line and exit status 2. Must
not know how a command works: each command has a module.
"""

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

import torch

from infinity.checkpoints.convert import EXPORT_DTYPES
from infinity.config_files import DEFAULT_NAME
from infinity.errors import CheckpointError, ConfigError, NonFiniteError, PeerError, SwapError, UsageError, printable
from infinity.output import check_different
from infinity.spelling import nearest
from infinity.renamed import COMMANDS, OPTIONS, warn_renamed, with_new_names
from infinity.tools import checkpoints, completion, configuration
from infinity.tools.doctor import doctor
from infinity.tools.measure import benchmarks, breakdown, calibration, overlap
from infinity.tools.option_values import chunk_mib, one_of, parameter_count, path, positive, seconds, seed, whole
from infinity.tools.predict import planning
from infinity.tools.train import status
from infinity.tools.train.saver import KEEP
from infinity.tools.train.training import OPTIMIZERS, train
from infinity.version import __version__


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # paths may contain any bytes
    formatwarning, warnings.formatwarning = warnings.formatwarning, _warned
    try:
        parser = _parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help()
            return 0
        arguments = parser.parse_args(argv)
        given = {f"--{name}": getattr(arguments, name, None) for name in ("output", "trace", "plot")}
        check_different({option: path for option, path in given.items() if path is not None})
        return arguments.command(arguments)
    except (CheckpointError, ConfigError, NonFiniteError, PeerError, SwapError, UsageError) as error:
        return _failed(str(error))
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except KeyboardInterrupt:
        print("infinity: interrupted", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = formatwarning


def _warned(message, *_):
    """The text of a warning, without the line of source code."""
    return f"infinity: warning: {message}\n"


def _failed(text):
    where = f"rank {os.environ['RANK']}: " if "RANK" in os.environ and os.environ.get("WORLD_SIZE") not in (None, "", "1") else ""
    print(f"infinity: error: {where}{'; '.join(map(printable, text.splitlines()))}", file=sys.stderr)
    return 2


# Options


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option in one line, like other errors, with a similar option as a hint."""

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: (-[^\s=]*)", message)
        known = [name for name in self._option_string_actions if name.startswith("--")]
        if command := re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose", message):
            unknown, known = command, [name for action in self._actions if action.metavar == "COMMAND" for name in action.choices]
            message = f"there is no command {command[1]!r}"
        if "--output" in known and re.match(r"unrecognized arguments: [^\s-]\S*\.json$", message):
            message += "; --json takes no file: write one with --output"
        old_names = {old: new for old, new in OPTIONS.items() if new in known}
        near = nearest(unknown[1], [*known, *old_names]) if unknown else None
        hint = f"; did you mean {old_names.get(near, near)}?" if near else f"; see {self.prog} --help"
        raise ConfigError(message + hint)

    def parse_known_args(self, args=None, namespace=None):
        args = self._with_new_names(sys.argv[1:] if args is None else args)
        # The parser of the subcommand reports unknown options, so that the hint names an option of this subcommand.
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def _with_new_names(self, words):
        """Replace old names of options and commands by the new ones. Raises ConfigError if an option is given by both names."""
        known = self._option_string_actions
        names = {old: new for old, new in OPTIONS.items() if new in known and old not in known}
        end = words.index("--") if "--" in words else len(words)
        given = [word.partition("=")[0] for word in words[:end]]
        with_new_names(dict.fromkeys(given), names)
        found = [names.get(name, name) + word.removeprefix(name) for name, word in zip(given, words)] + words[end:]
        is_first = " " not in self.prog  # a group of commands, such as `infinity bench`, has names of its own
        if is_first and self._subparsers is not None and found and found[0] in COMMANDS:
            warn_renamed(f"infinity {found[0]}", f"infinity {COMMANDS[found[0]]}")
            found[0] = COMMANDS[found[0]]
        return found


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to the help of an option."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


def _parser():
    parser = _Parser(prog="infinity", description="Train models far larger than device memory.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"infinity {__version__}, PyTorch {torch.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_train(commands)
    _add_checkpoint(commands)
    _add_status(commands)
    _add_trace(commands)
    _add_config(commands)
    _add_doctor(commands)
    _add_calibrate(commands)
    _add_bench(commands)
    _add_plan(commands)
    _add_completion(commands)
    return parser


def _command(commands, name, run, text, description):
    """Add a command. run(arguments) runs it."""
    command = commands.add_parser(name, allow_abbrev=False, help=text, description=description, formatter_class=_Help)
    command.set_defaults(command=run)
    return command


def _group(commands, name, text, description):
    """Add a command that has subcommands."""
    parser = commands.add_parser(name, allow_abbrev=False, help=text, description=description)
    return parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)


def _add_json(command, *, with_output=False):
    """Add --json, and --output if asked; see `infinity.output.give`."""
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    if with_output:
        command.add_argument("--output", type=path, metavar="FILE", help="write the same JSON to FILE, too")


def _add_train(commands):
    """The `train` command."""
    command = _command(
        commands,
        "train",
        train,
        "train a GPT",
        "Train a GPT on bytes of text. Weights and optimizer states go to the fastest tier that has room. Also runs under torchrun.",
    )

    model = command.add_argument_group("model")
    model.add_argument("--hidden", type=whole, default=384, metavar="N", help="width")
    model.add_argument("--layers", type=whole, default=6, metavar="N", help="number of blocks")
    model.add_argument("--heads", type=whole, default=6, metavar="N", help="attention heads; must divide --hidden")
    model.add_argument("--vocab", type=whole, default=256, metavar="N", help="number of tokens; text needs 256")
    model.add_argument("--seq", type=whole, default=128, metavar="N", help="length of a sequence")
    model.add_argument("--tie", action="store_true", help="use the token embedding as the output layer")
    model.add_argument("--checkpoint-activations", action="store_true", help="recompute each block in backward")

    run = command.add_argument_group("training")
    run.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help="files of text, or `random` tokens; by default the sources of Python's standard library",
    )
    run.add_argument("--batch", type=whole, default=8, metavar="N", help="sequences in a micro-batch, over all ranks")
    run.add_argument("--accumulate", type=whole, default=1, metavar="N", help="micro-batches in a step")
    run.add_argument("--by-layer", action="store_true", help="all micro-batches pass a block before the next is fetched (infinity.accumulate)")
    run.add_argument("--steps", type=whole, default=70, metavar="N", help="optimizer steps")
    run.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="adamw, adam, sgd (momentum 0.9), lion or muon")
    run.add_argument("--lr", type=positive, default=3e-4, metavar="X", help="learning rate")
    run.add_argument("--max-grad-norm", type=positive, metavar="X", help="clip the global norm of the gradients to X")
    run.add_argument("--seed", type=seed, metavar="N", help="seed of the weights and of the data's order (default: 0)")

    _add_placement(command)
    save = command.add_argument_group("checkpoints")
    save.add_argument(
        "--save",
        type=path,
        metavar="DIR",
        help="save a checkpoint in DIR at the end of the run. SIGTERM ends the run after the current step, with a checkpoint",
    )
    save.add_argument("--save-every", type=whole, metavar="N", help="also save after every N steps, while training continues")
    save.add_argument("--keep", type=whole, metavar="N", help=f"number of checkpoints to keep; the disk needs room for N + 1 (default: {KEEP})")
    save.add_argument(
        "--resume",
        action="store_true",
        help="continue from the latest checkpoint in --save, if one exists; --steps includes the steps before it",
    )

    _add_json(command, with_output=True)
    command.add_argument("--trace", type=path, metavar="FILE", help="write a trace of all threads to FILE, for `infinity trace` and Perfetto")
    command.add_argument("--live", action="store_true", help="also show links, memory and checkpoints during the run")


def _add_placement(command):
    """Options of `train` for fields of Config."""
    place = command.add_argument_group("placement")
    place.add_argument("--dtype", metavar=one_of("dtype"), help="by default bf16 on CUDA and fp32 on the CPU")
    place.add_argument("--master", metavar=one_of("master"), help="precision of bf16 weights between steps (default: fp32)")
    place.add_argument("--optimizer-state-dtype", metavar=one_of("optimizer_state_dtype"), help="dtype of the moments (default: fp32)")
    place.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; by default CUDA where there is one")
    place.add_argument("--swap-dirs", nargs="+", metavar="DIR", help="swap directories, one a drive; by default ./infinity-swap")
    place.add_argument("--host-memory", metavar="SIZE", help="limit of a rank's pinned host memory, such as 48GiB (default: auto)")
    place.add_argument("--device-memory", metavar="SIZE", help="limit of the engine's device memory (default: auto)")
    place.add_argument("--param-tier", metavar=one_of("param_tier"), help="tier of the weights (default: auto)")
    place.add_argument("--optimizer-state-tier", metavar=one_of("optimizer_state_tier"), help="tier of the optimizer states (default: auto)")
    place.add_argument("--activation-tier", metavar=one_of("activation_tier"), help="tier of activations that backward needs (default: auto)")
    place.add_argument("--tile-above", metavar="SIZE", help="cut larger layers into tiles (default: auto, layers that do not fit)")
    place.add_argument("--residency", metavar=one_of("residency"), help="none: keep only data that is in use (default: auto)")
    place.add_argument("--chunk-mib", type=chunk_mib, metavar="X", help="size of a chunk, in MiB of 16-bit weights")
    place.add_argument("--update", metavar=one_of("update"), help="when states are updated (default: auto)")
    _add_config_options(place)


def _add_trace(commands):
    """The `trace` command."""
    command = _command(
        commands,
        "trace",
        breakdown.trace,
        "show the time of each part of a traced run",
        "Print for each lane of a trace the share of the step in which the lane was busy, and the share in which the step waited for the lane.",
    )
    command.add_argument("file", type=path, metavar="FILE", help="trace from `infinity train --trace` or infinity.save_trace")
    _add_json(command)


def _add_status(commands):
    """The `status` command."""
    command = _command(
        commands,
        "status",
        status.status,
        "show active runs",
        "List your active runs of `infinity train` on this machine, or show one of them.",
    )
    command.add_argument("run", nargs="?", metavar="RUN", help="process id or status file of a run; by default all runs are listed")
    command.add_argument("--follow", action="store_true", help="update the view until the run ends")
    _add_json(command)


def _add_checkpoint(commands):
    """The `checkpoint` command and the subcommands."""
    commands = _group(commands, "checkpoint", "inspect, verify or convert a checkpoint", "Inspect, verify or convert a checkpoint.")

    def add(name, run, text):
        command = _command(commands, name, run, text, f"{text[0].upper()}{text[1:]}.")
        command.add_argument("directory", type=path, metavar="DIR", help="directory of the checkpoint")
        return command

    command = add("inspect", checkpoints.inspect, "show the contents of a checkpoint")
    command.add_argument("--parameters", action="store_true", help="list the parameters instead")
    _add_json(command)
    add("verify", checkpoints.verify, "read a whole checkpoint and compare every checksum")
    command = add("export", checkpoints.export_weights, "write the weights as safetensors that from_pretrained of transformers reads")
    command.add_argument("target", type=path, metavar="OUT", help="directory for the files; put the model's config.json beside them")
    command.add_argument("--dtype", choices=EXPORT_DTYPES, help="dtype of the weights (default: of the checkpoint); fp32: master weights")
    command.add_argument("--max-file", default="5GB", metavar="SIZE", help="maximum size of a file")
    command.add_argument("--dry-run", action="store_true", help="only say what would be written")
    command = add("reshard", checkpoints.reshard_ranks, "rewrite a checkpoint for another number of ranks")
    command.add_argument("target", type=path, metavar="OUT", help="directory of the new checkpoint")
    command.add_argument("--world", type=whole, required=True, metavar="N", help="number of ranks")
    command.add_argument("--chunk-mib", type=chunk_mib, metavar="X", help="size of a chunk, in MiB of 16-bit weights (default: unchanged)")
    command.add_argument("--dry-run", action="store_true", help="only say what would be written")


def _add_config(commands):
    """The `config` command and the subcommands."""
    commands = _group(commands, "config", "show settings", "Show the settings of the engine.")
    command = _command(
        commands,
        "show",
        configuration.show,
        "show every setting and its origin",
        "Show every setting of the engine and its origin. --config can read the output of --json.",
    )
    command.add_argument(
        "--from-deepspeed", type=path, metavar="FILE", help="show the settings for a DeepSpeed JSON file, instead of files of settings"
    )
    _add_config_options(command)
    _add_json(command)


def _add_config_options(command):
    """Options of commands that make a Config, see `infinity.config.command_layers`."""
    files = f"settings, TOML or JSON; they override those of ./{DEFAULT_NAME}"
    command.add_argument("--config", type=path, metavar="FILE", help=files)
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, overrides files; may be given several times"
    )


def _add_calibrate(commands):
    """The `calibrate` command."""
    command = _command(
        commands,
        "calibrate",
        calibration.calibrate,
        "measure this machine",
        "Find the fastest settings of each drive, measure the bandwidth of the machine's links, and write both to a file that every "
        "command reads. Under torchrun, with one process per device, it also measures collectives, and all links at once.",
    )
    command.add_argument("directories", nargs="+", type=path, metavar="DIR", help="swap directories, one a drive")
    command.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; by default CUDA where there is one")
    command.add_argument("--output", type=path, default=Path(DEFAULT_NAME), metavar="FILE", help="file to write")
    _add_json(command)


def _add_bench(commands):
    """The `bench` command and the subcommands."""
    commands = _group(commands, "bench", "measure one transfer, or the pipeline", "Measure the bandwidth of transfers by chunk size.")
    for link, text in benchmarks.LINKS.items():
        command = _command(commands, link, benchmarks.transfers, text, f"Measure: {text}.")
        command.set_defaults(link=link)
        command.add_argument("--sizes", nargs="+", metavar="SIZE", help=f"sizes of a chunk; by default {' '.join(benchmarks.SIZES)}")
        command.add_argument("--repeats", type=whole, default=7, metavar="N", help="measurements of each size")
        command.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; by default CUDA where there is one")
        if link in benchmarks.NVME_LINKS:
            command.add_argument("--swap-dirs", nargs="+", metavar="DIR", help="swap directories, one a drive; by default ./infinity-swap")
        _add_json(command, with_output=True)
        command.add_argument("--plot", type=path, metavar="FILE", help="draw bandwidth against size into FILE, such as nc.png")
    command = _command(
        commands,
        "overlap",
        overlap.overlap,
        "measure the share of all transfers that runs behind compute",
        "Measure the whole pipeline against each stage alone. A pass runs over a model of equal layers and reads all weights from NVMe. "
        "Also runs under torchrun.",
    )
    command.add_argument("--swap-dirs", nargs="+", metavar="DIR", help="swap directories, one a drive; by default ./infinity-swap")
    command.add_argument("--chunk-mib", nargs="+", type=chunk_mib, default=[4.0, 16.0], metavar="X", help="sizes of a layer, in MiB")
    depths = "number of layers by which reads run ahead of the ops"
    command.add_argument("--depth", nargs="+", type=whole, default=[2, 4, 8], metavar="N", help=depths)
    command.add_argument("--layers", type=whole, default=32, metavar="N", help="layers of a pass")
    command.add_argument("--repeats", type=whole, default=7, metavar="N", help="measurements of each size and depth")
    command.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; by default CUDA where there is one")
    command.add_argument("--compute-ms", type=positive, metavar="X", help="compute time of a layer; by default that of the longest transfer")
    command.add_argument("--balance", action="store_true", help="on the CPU: extend every stage to the time of the longest")
    _add_json(command, with_output=True)
    command.add_argument("--plot", type=path, metavar="FILE", help="draw the times and one pass into FILE, such as overlap.png")


def _add_doctor(commands):
    """The `doctor` command."""
    command = _command(
        commands,
        "doctor",
        doctor.doctor,
        "check this machine",
        "Check this machine and the swap directories, and try a small training run. Each problem comes with a remedy. The exit status is 1 "
        "if anything needs attention.",
    )
    text = "swap directories, one a drive; by default those of infinity.toml, then ./infinity-swap, then the current directory"
    command.add_argument("directories", nargs="*", type=path, metavar="DIR", help=text)
    command.add_argument("--seconds", type=seconds, default=60.0, metavar="N", help="time limit of the self-test in seconds; 0 skips it")
    _add_json(command)


def _add_plan(commands):
    """The `plan` command."""
    command = _command(
        commands,
        "plan",
        planning.plan,
        "predict whether a model fits a machine, and the time per step",
        "Predict the bytes in every tier and on every link, the time of a step and its waits, for a model on this or another machine. "
        "The exit status is 1 if the model does not fit.",
    )
    model = command.add_argument_group("model")
    model.add_argument("--params", type=parameter_count, metavar="N", help="a GPT whose blocks have about N parameters, such as 7B or 1T")
    model.add_argument("--hidden", type=whole, metavar="N", help="width of a GPT")
    model.add_argument("--layers", type=whole, metavar="N", help="number of its blocks")
    model.add_argument("--heads", type=whole, metavar="N", help="attention heads; by default one for each 128 of the width")
    model.add_argument("--vocab", type=whole, default=50257, metavar="N", help="number of tokens")
    other = "config.json of a transformers model (text, images or sound), instead of a GPT"
    model.add_argument("--model", type=path, metavar="FILE", help=other)
    adapters = "add LoRA adapters of this rank to each linear layer of --model except the output layer; all other weights are frozen"
    model.add_argument("--adapters", type=whole, metavar="RANK", help=adapters)
    model.add_argument("--seq", type=whole, default=1024, metavar="N", help="length of a sequence")
    model.add_argument("--batch", type=whole, default=1, metavar="N", help="sequences per device and step")
    model.add_argument("--keep-activations", action="store_true", help="do not recompute blocks in backward")
    machine = command.add_argument_group("machine")
    table = f"a file with a table [machine], or h200x8; by default ./{DEFAULT_NAME}, from `infinity calibrate`"
    machine.add_argument("--machine", type=path, metavar="FILE", help=table)
    machine.add_argument("--nodes", type=whole, metavar="N", help="number of nodes")
    machine.add_argument("--devices", type=whole, metavar="N", help="devices per node")
    _add_config_options(command.add_argument_group("settings of the engine"))
    _add_json(command, with_output=True)
    command.add_argument("--plot", type=path, metavar="FILE", help="draw the efficiency of this machine by bandwidth")


def _add_completion(commands):
    """The `completion` command."""
    text = "Print a script for completion in a shell. In ~/.bashrc or ~/.zshrc: source <(infinity completion bash), or zsh."
    command = _command(commands, "completion", _completion, "complete commands and options in a shell", text)
    command.add_argument("shell", choices=completion.SHELLS, help="bash or zsh")


def _completion(arguments) -> int:
    print(completion.script(_parser(), arguments.shell), end="")
    return 0
