"""The finding of one check of the machine: one line of a report.

Knows the format of a finding. Must not know the checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """OK, needs ATTENTION, or does not apply here (ABSENT). The value begins the line."""

    OK = "[ok]"
    ATTENTION = "[!]"
    ABSENT = "[-]"


@dataclass(frozen=True)
class Finding:
    """`what`: name of the check. detail: the result. remedy: a command or a setting, given if and only if the status is ATTENTION."""

    status: Verdict
    what: str
    detail: str
    remedy: str = ""

    def __post_init__(self):
        assert bool(self.remedy) == (self.status is Verdict.ATTENTION), self

    def __str__(self) -> str:
        line = f"{self.status.value:<5}{self.what:<14} {self.detail}"
        return f"{line}\n     -> {self.remedy}" if self.remedy else line


def ok(what: str, detail: str) -> Finding:
    return Finding(Verdict.OK, what, detail)


def attention(what: str, detail: str, remedy: str) -> Finding:
    return Finding(Verdict.ATTENTION, what, detail, remedy)


def absent(what: str, detail: str) -> Finding:
    return Finding(Verdict.ABSENT, what, detail)
