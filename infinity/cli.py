"""The command line: the options, and how a command ends. `python -m infinity`, or `infinity`.

Knows how options are spelled and which values they take, and that a mistake of the user's, and a failing disk, end in one
line and exit status 2. Must not know what a command does: that is the command's module.
"""

import argparse
import difflib
import math
import os
import re
import sys
from pathlib import Path

from infinity import checkpoints
from infinity.config import CHOICES
from infinity.conversion import EXPORT_DTYPES
from infinity.errors import CheckpointError, ConfigError, PeerError, SwapError, UsageError
from infinity.training import KEEP, OPTIMIZERS, train


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    try:
        arguments = _parser().parse_args(argv)
        return arguments.command(arguments)
    except (CheckpointError, ConfigError, PeerError, SwapError, UsageError) as error:
        where = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        print(f"infinity: error: {where}{'; '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of whoever reads our output, and has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
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

    save = command.add_argument_group("checkpoints")
    save.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="save a checkpoint in this directory at the end, and on SIGTERM, which then ends the run after a whole step",
    )
    save.add_argument("--save-every", type=_whole, metavar="N", help="and after every N steps, while training goes on")
    save.add_argument("--keep", type=_whole, metavar="N", help=f"checkpoints that stay; one more needs room (default: {KEEP})")
    save.add_argument(
        "--resume",
        action="store_true",
        help="go on from the latest checkpoint in --save, if there is one; --steps counts from the very first step",
    )

    command.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE, too")
    _add_checkpoint(commands)
    return parser


def _add_checkpoint(commands):
    """The `checkpoint` command and its own."""
    parser = commands.add_parser(
        "checkpoint", allow_abbrev=False, help="look at a checkpoint, or make something of it", description="What to do with a checkpoint."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name, run, text):
        command = commands.add_parser(name, allow_abbrev=False, help=text, description=f"{text[0].upper()}{text[1:]}.", formatter_class=_Help)
        command.set_defaults(command=run)
        command.add_argument("directory", type=Path, metavar="DIR", help="of the checkpoint")
        return command

    command = add("inspect", checkpoints.inspect, "say what a checkpoint holds")
    command.add_argument("--parameters", action="store_true", help="list the parameters instead")
    command.add_argument("--json", action="store_true", help="print JSON")
    add("verify", checkpoints.verify, "read all of a checkpoint and compare every checksum")
    command = add("export", checkpoints.export_weights, "write the weights as safetensors, as transformers' from_pretrained reads them")
    command.add_argument("target", type=Path, metavar="OUT", help="directory for the files; put the model's config.json beside them")
    command.add_argument("--dtype", choices=EXPORT_DTYPES, help="of the weights, by default the checkpoint's own; fp32: the masters")
    command.add_argument("--max-file", default="5GB", metavar="SIZE", help="size of a file, at most")
    command.add_argument("--dry-run", action="store_true", help="only say what would be written")
    command = add("reshard", checkpoints.reshard_ranks, "write a checkpoint as another number of ranks would have")
    command.add_argument("target", type=Path, metavar="OUT", help="directory of the new checkpoint")
    command.add_argument("--world", type=_whole, required=True, metavar="N", help="number of ranks")
    command.add_argument("--chunk-mib", type=_positive, metavar="X", help="size of a chunk, in MiB of 16-bit weights; by default as it was")
    command.add_argument("--dry-run", action="store_true", help="only say what would be written")


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
