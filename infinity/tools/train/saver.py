"""The checkpoints of a training run: the options in each, the checkpoint to resume from, and the time of the next save.

Knows the saved options and steps of a run. Must not know how a run trains, or the layout of checkpoints on the disk.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import aio_ext
import infinity
from infinity.checkpoints.reader import Checkpoint
from infinity.errors import ConfigError
from infinity.tools.progress import bytes_progress
from infinity.tools.train.rotation import Rotation

KEEP = 2  # checkpoints
# A resumed run must have the same values of these options. as_saved adds the content of --data.
SAVED_OPTIONS = ("hidden", "layers", "heads", "vocab", "seq", "tie", "batch", "accumulate", "seed", "optimizer")


def check_options(arguments):
    path = arguments.save
    if path is None:
        given = [name for name in ("save_every", "keep", "resume") if getattr(arguments, name)]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} needs --save DIR: name the directory of the checkpoints")
        return
    if not path.is_dir():
        if os.path.lexists(path):
            raise ConfigError(f"--save {path} is not a directory; name a directory for the checkpoints")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"--save {path}: there is no directory {path.parent}; create it or name another")
    where = path if path.is_dir() else path.absolute().parent
    if not os.access(where, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"--save {path}: {where} is not writable; name another directory")


def as_saved(arguments, tokens):
    """The options that a resumed run must share with the checkpoint: numbers and strings."""
    options = {name: getattr(arguments, name) for name in SAVED_OPTIONS}
    if arguments.save is not None:
        options["data"] = "random" if tokens is None else f"of {tokens.nbytes} bytes with CRC32C {aio_ext.crc32c(tokens):08x}"
    return options


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from, and the number of steps before it."""

    path: Path
    step: int


def checkpoint_to_resume(arguments, options):
    """The checkpoint for --resume, or None. Raises ConfigError if the options differ from those in the checkpoint."""
    if arguments.save is None:
        return None
    rotation = Rotation(arguments.save)
    if not arguments.resume:
        if paths := rotation.paths():
            raise ConfigError(f"--save {arguments.save} holds {paths[-1].name}: add --resume to continue from it, or name another directory")
        return None
    path = rotation.latest()
    if path is None:
        return None
    with Checkpoint(path) as checkpoint:
        extra = checkpoint.decode(checkpoint.manifest.extra)
    try:
        step, saved = int(extra["step"]), dict(extra["options"])
    except (TypeError, KeyError, ValueError):
        raise ConfigError(f"--resume: {path} was not saved by `infinity train`; name another directory in --save") from None
    differ = [name for name in options if saved.get(name) != options[name]]
    if differ:
        there, here = (", ".join(f"--{name} {values.get(name)}" for name in differ) for values in (saved, options))
        raise ConfigError(f"--resume: {path} was saved with {there}; here it is {here}: use the saved options, or another --save")
    return Found(path, step)


class Saver:
    """Saves the checkpoints of a run while training continues. Each rank has a Saver."""

    def __init__(self, run, options):
        self.run = run
        self.options = options
        self.rotation = Rotation(run.arguments.save)
        self._saving = None
        self._last = None  # path of the last whole checkpoint
        if run.is_first:
            self.rotation.make()

    @property
    def under_way(self):
        """The name of the checkpoint that is being written, or None."""
        return self._saving.path.name if self._saving is not None and not self._saving.done else None

    @property
    def last(self):
        """The name of the last whole checkpoint, or None."""
        saving = self._saving
        path = saving.path if saving is not None and saving.done and saving.error is None else self._last
        return path.name if path is not None else None

    def step_done(self, num_steps, *, must_save):
        """Start a save if one is due. Raises the error of the previous save as soon as this save has failed."""
        if self._saving is not None and self._saving.done:
            self.finish()
        every = self.run.arguments.save_every
        if must_save or (every and num_steps % every == 0):
            self.finish()
            extra = {"step": num_steps, "options": self.options}
            path, run = self.rotation.path_of(num_steps), self.run
            self._saving = infinity.save(path, run.model, run.optimizer, extra=extra, wait=False)

    def finish(self, shown=False):
        """Wait for the current save, then remove old checkpoints. Returns the path of the last checkpoint."""
        if self._saving is not None:
            with bytes_progress(shown, "saved") as progress:
                self._saving.wait(progress)
            self._last, self._saving = self._saving.path, None
            if self.run.is_first:
                self.rotation.prune(self.run.arguments.keep or KEEP, self._last)
        return self._last
