"""Values of command-line options: parses text into numbers and paths.

Knows formats and limits of values. Must not know which command has which option. Each function raises argparse.ArgumentTypeError.
"""

import argparse
import math
import re
from pathlib import Path

from infinity.config import CHOICES, LARGEST_CHUNK_MIB, LARGEST_SEED, LEAST_CHUNK_MIB
from infinity.system.mounts import why_no_path


def one_of(field):
    """The choices of a field of Config, for help texts."""
    return "{" + ",".join(CHOICES[field]) + "}"


def path(text):
    if reason := why_no_path(text):
        raise argparse.ArgumentTypeError(reason)
    return Path(text)


def whole(text):
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number above zero; got {text!r}")
    return int(text)


def parameter_count(text):
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGBT]?)", text, re.IGNORECASE)
    number = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}[match[2].upper()] if match else 0
    if not 1 <= number < 1e16:
        raise argparse.ArgumentTypeError(f"expected a number of parameters such as 350M, 7B or 1T, below 10000T; got {text!r}")
    return number


def seed(text):
    if not re.fullmatch(r"\d+", text) or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {LARGEST_SEED}; got {text!r}")
    return int(text)


def seconds(text):
    return 0.0 if re.fullmatch(r"0+(\.0*)?", text) else positive(text)


def chunk_mib(text):
    value = positive(text)
    if value > LARGEST_CHUNK_MIB:
        raise argparse.ArgumentTypeError(f"expected MiB, at most {LARGEST_CHUNK_MIB}; got {text!r}")
    if value < LEAST_CHUNK_MIB:
        raise argparse.ArgumentTypeError(f"expected MiB, at least {LEAST_CHUNK_MIB}; got {text!r}")
    return value


def positive(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above zero; got {text!r}")
    return value
