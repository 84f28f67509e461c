"""The errors that the package raises for a user. Knows no other module of the package.

A message has four parts: the problem, the expected value, the given value and the remedy.
"""

import errno
import os
import sys
import warnings
from pathlib import Path

NO_DESCRIPTORS = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (sysctl fs.file-max)",
}
"""The remedy, by errno, if a process or the system has no free file descriptor. The file itself is not the cause of such an error."""


def refuses_direct(error: OSError) -> bool:
    """Whether the error means that the filesystem has no O_DIRECT. Any other error would also occur without O_DIRECT."""
    return error.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def printable(text: str) -> str:
    """The text with all control characters escaped, except newlines. Names from files may contain commands for a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text)


class RenamedWarning(DeprecationWarning):
    """The program uses an old name. The message gives the new name. The next version removes the old name."""


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn with the program's line, not a line of this package. In a thread of this package, the stack has no line of the program.

    Python shows a DeprecationWarning only for lines of `__main__`. Therefore `infinity/__main__.py` counts as the program. argparse calls
    the parser of the command line, and dataclasses.replace calls the constructor of Config: these modules do not count as the program.
    """
    package = str(Path(__file__).parent) + os.sep
    frame = sys._getframe(1)
    while frame.f_back is not None and (module := frame.f_globals.get("__name__")) != "__main__":
        if not frame.f_code.co_filename.startswith(package) and module not in ("argparse", "dataclasses"):
            break
        frame = frame.f_back
    module = frame.f_globals.get("__name__")
    seen = frame.f_globals.setdefault("__warningregistry__", {}) if issubclass(category, DeprecationWarning) else None
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, seen)


class ConfigError(ValueError):
    """A setting, a path or an option is wrong. The package has not written anything yet."""


class BudgetError(ConfigError):
    """A memory or disk budget is too small to make progress. The message names the size that is needed.

    least_host_nbytes: the smallest sufficient host_memory, if host_memory is the budget.
    """

    def __init__(self, text: str = "", least_host_nbytes: int | None = None):
        super().__init__(text)
        self.least_host_nbytes = least_host_nbytes


class UsageError(RuntimeError):
    """The program called the engine in an invalid order, such as `step()` without a backward pass."""


class SwapError(OSError):
    """A read or a write of swap or of a checkpoint failed. Has errno and the path, as every OSError."""


class CheckpointError(ValueError):
    """A checkpoint or a model file is damaged, incomplete, or not made for this model. The message names the file and the remedy."""

    def __init__(self, text: str = ""):
        super().__init__(printable(text))


class PeerError(RuntimeError):
    """Another rank failed, and this rank cannot continue. The message names the failed rank and repeats the error."""


class NonFiniteError(ArithmeticError):
    """A gradient is infinite or NaN, and nonfinite='raise'. The step has changed nothing."""
