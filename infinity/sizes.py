"""Parses and formats sizes in bytes and lists of names.

Knows units. Must not know the objects that have these sizes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from infinity.errors import ConfigError

LEAST_NBYTES = 1024  # of a budget: nothing useful fits into a smaller one
_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_bytes(value: int | str) -> int:
    """Bytes of an integer, of digits, or of a number with a unit: "20GiB", "512MiB", "1.5 GB" (decimal), in any case of letters.

    Raises ConfigError for other values, such as a unit that may be binary or decimal ("20G").
    """
    nbytes = None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        nbytes = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,100})\s*|\s*(\d{1,100}(?:\.\d{1,100})?)\s*([a-zA-Z]+)\s*", value)
        if match and match[1]:
            nbytes = int(match[1])
        elif match and match[3].lower() in _UNITS:
            nbytes = int(Fraction(match[2]) * _UNITS[match[3].lower()])
    if nbytes is not None:
        return nbytes
    raise ConfigError(f'expected bytes, such as 1073741824, "20GiB" or "4 GB"; got {repr(value):.60}')


def parse_budget(value: int | str) -> int:
    """As `parse_bytes`, for a budget of memory or files. Raises ConfigError below LEAST_NBYTES: in such a value, a unit is missing."""
    nbytes = parse_bytes(value)
    if nbytes < LEAST_NBYTES:
        number = re.match(r"\s*([\d.]+)", str(value))[1]
        raise ConfigError(f'expected at least {LEAST_NBYTES} bytes; got {value!r:.40}, which is {nbytes:,} B. Give the unit, as in "{number}GiB"')
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Bytes as text, in binary units: "812 B", "2.6 GiB"."""
    sign, size = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    if size < 1024:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1023.95:  # a larger size would print as 1024.0
            return f"{sign}{size:.1f} {unit}"
    return f"{sign}{size / 1024:.1f} PiB"


def listed(names: Sequence[str], most: int = 20) -> str:
    """Names as text, in one line: "a, b and 7 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
