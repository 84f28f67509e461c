"""What a check of the machine found: one line of a report.

Knows how a finding reads. Must not know what is checked, nor how.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """OK, needs ATTENTION, or does not apply here (ABSENT); the value is how a line begins."""

    OK = "[ok]"
    ATTENTION = "[!]"
    ABSENT = "[-]"


@dataclass(frozen=True)
class Finding:
    """what: the name of the check. detail: what was found. remedy: a command or a setting; of what needs attention, always."""

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
