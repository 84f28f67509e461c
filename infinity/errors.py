"""The errors that a user of the engine can meet. Knows nothing else of the package.

A message says what is wrong, what was expected, what was found and what to do about it.
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
"""What to do where a file cannot be opened for want of a descriptor, which says nothing of the file."""


def refuses_direct(error: OSError) -> bool:
    """Whether what failed says that a filesystem has no O_DIRECT; any other error would be met without it, too."""
    return error.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def printable(text: str) -> str:
    """A text with whatever could command a terminal escaped, but for ends of lines: names in files are somebody else's."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text)


class RenamedWarning(DeprecationWarning):
    """The program uses an old name; the message gives the new one. The next version removes the old name."""


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """A warning that shows the program's line, not one of this package. A thread of this package has no line of the program.

    Python shows a DeprecationWarning only for lines of `__main__`. So the program's line in `python -m infinity` is one of this package.
    """
    package = str(Path(__file__).parent) + os.sep
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package) and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    module = frame.f_globals.get("__name__")
    seen = frame.f_globals.setdefault("__warningregistry__", {}) if issubclass(category, DeprecationWarning) else None
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, seen)


class ConfigError(ValueError):
    """A setting, a path or an option is wrong; nothing has been written yet."""


class BudgetError(ConfigError):
    """A memory or disk budget is too small to make progress; the message names the size that is needed.

    least_host_nbytes: of host_memory, where that is the budget.
    """

    def __init__(self, text: str = "", least_host_nbytes: int | None = None):
        super().__init__(text)
        self.least_host_nbytes = least_host_nbytes


class UsageError(RuntimeError):
    """The engine was called in an order that has no meaning, such as `step()` without a backward pass."""


class SwapError(OSError):
    """Reading or writing state on a disk failed, swapped or saved. Carries errno and the path, as every OSError does."""


class CheckpointError(ValueError):
    """A checkpoint or model file is damaged, incomplete or of something else; the message names the file and what to do."""

    def __init__(self, text: str = ""):
        super().__init__(printable(text))


class PeerError(RuntimeError):
    """Another rank failed, so this one cannot go on; the message names that rank and repeats its error."""


class NonFiniteError(ArithmeticError):
    """A gradient is infinite or not a number, and nonfinite='raise'; the step has changed nothing."""
