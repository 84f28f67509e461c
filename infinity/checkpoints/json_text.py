"""A reader of untrusted JSON, one value at a time, with bounded memory.

Knows JSON text, and how much memory the parsed objects take. Must not know the meaning of the values.

# [Note: bounded memory for JSON]
# Parsed JSON may take fifty times as much memory as its text. Therefore the reader parses at most one window of the text at a time. The
# caller checks the objects and keeps them in a compact form before the next window. For a longer value, the count of brackets and commas
# gives an upper bound of its memory, and this bound must fit into a budget. The caller also takes each entry of a long list from a budget.
#
# The lists and dicts of JSON form no cycles, but each new one brings the next run of Python's cyclic garbage collector nearer. A run may
# visit all objects of the process. These runs took up to 90 % of the time of a read. Therefore a read pauses the collector
# (`without_collections`).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator

from infinity.errors import CheckpointError

LARGEST = 1 << 62  # the largest valid count of elements or bytes
_WINDOW_NBYTES = 1 << 16  # bytes of text that are parsed at once, enough for most values
_MOST_NBYTES = 1 << 18  # bytes of text of one value that has no budget
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN_KEY = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:')  # nearly all keys; one match is the fastest way


class Budget:
    """The memory that parsed objects may take, in bytes. `what` and `remedy` are parts of the error message."""

    def __init__(self, nbytes: int, what: str, remedy: str):
        self.left = self.nbytes = nbytes
        self.what, self.remedy = what, remedy

    def take(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise self.exceeded()

    def rest(self) -> Budget:
        """A new budget with the bytes that are left, for temporary objects."""
        part = Budget(self.nbytes, self.what, self.remedy)
        part.left = self.left
        return part

    def exceeded(self) -> CheckpointError:
        return CheckpointError(f"{self.what} would take more than {self.nbytes >> 20} MiB of memory to read; {self.remedy}")


class Text:
    """A JSON text, read one value at a time; see [Note: bounded memory for JSON]. Raises ValueError for invalid JSON."""

    def __init__(self, body: memoryview, is_open: bool = False):
        """is_open: the last brace of the text is missing."""
        self._body, self._base, self._at, self._is_open = body, 0, 0, is_open
        self._window = ""
        self._scan = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant).scan_once
        self._refill(_WINDOW_NBYTES)

    def members(self) -> Iterator[str]:
        """Yield the keys of an object. The caller reads the value of a key before the next key."""
        return self._inside("{", "}", self._key)

    def items(self) -> Iterator[None]:
        """Yield None once for each item of a list. Each time, the caller reads one value."""
        return self._inside("[", "]", lambda: None)

    def value(self, budget: Budget | None = None, texts_are_free: bool = False):
        """Parse the next value: at most 256 KiB of text, or within a budget. texts_are_free: the budget does not count the text itself."""
        self._next()
        while True:
            try:
                found, end = self._scan(self._window, self._at)
                if end < len(self._window) or self._is_last:  # a number at the end of the window may continue behind the window
                    break
            except (StopIteration, ValueError) as error:
                if self._is_last:
                    raise ValueError(f"expected a JSON value at byte {self._base + self._at}") from error
            nbytes = _WINDOW_NBYTES if self._at else 2 * self._window_nbytes
            self._refill(nbytes)
            if nbytes > _WINDOW_NBYTES and (nbytes > _MOST_NBYTES if budget is None else cost(self._window) > 2 * budget.left):
                raise CheckpointError(f"a value of more than {_MOST_NBYTES} bytes at {self._base}") if budget is None else budget.exceeded()
        if budget is not None:
            budget.take(cost(self._window[self._at : end]) - (end - self._at if texts_are_free else 0))
        self._at = end
        return found

    def peek(self) -> str:
        """The first character of the next value."""
        return self._next()

    def end(self) -> None:
        """Raise ValueError unless the text ends here."""
        if self._next():
            raise ValueError(f"expected the end of the text at byte {self._base + self._at}")

    @property
    def _is_last(self) -> bool:
        return self._base + self._window_nbytes == len(self._body)

    def _refill(self, nbytes: int) -> None:
        """Move the window to the current position. nbytes: of the new window."""
        self._base += self._at if self._window.isascii() else len(self._window[: self._at].encode())
        self._at = 0
        part = self._body[self._base : self._base + nbytes]
        self._window, self._window_nbytes = codecs.utf_8_decode(part, "strict", self._base + nbytes >= len(self._body))

    def _next(self) -> str:
        """Skip white space and return the next character, or "" at the end of the text."""
        while True:
            if (found := self._window[self._at : self._at + 1]) and found not in " \t\n\r":
                return found
            self._at = _SPACE.match(self._window, self._at).end()
            if self._at < len(self._window) or self._is_last:
                return self._window[self._at : self._at + 1]
            self._refill(_WINDOW_NBYTES)

    def _key(self) -> str:
        if plain := _PLAIN_KEY.match(self._window, self._at):
            self._at = plain.end()
            return plain[1]
        if self._next() != '"':
            raise ValueError(f"expected a key at byte {self._base + self._at}")
        key = self.value()
        if self._next() != ":":
            raise ValueError(f"expected a colon at byte {self._base + self._at}")
        self._at += 1
        return key

    def _inside(self, opening: str, closing: str, begin: Callable) -> Iterator:
        if self._next() != opening:
            raise ValueError(f"at byte {self._base + self._at}: expected a JSON {'object' if opening == '{' else 'list'}")
        self._at += 1
        if self._next() == closing:
            self._at += 1
            return
        while True:
            yield begin()
            found = self._next()
            if found == "" and closing == "}" and self._is_open:
                return
            if found not in (",", closing):
                raise ValueError(f"expected , or {closing} at byte {self._base + self._at}")
            self._at += 1
            if found == closing:
                return


def cost(text: str) -> int:
    """An upper bound of the memory that the parsed JSON text takes, in bytes."""
    nodes = 72 * text.count("[") + 240 * text.count("{") + 40 * text.count(",") + 32 * text.count('"')
    return nodes + len(text) * (4 if "\\u" in text or not text.isascii() else 1)


# Checks of a value. Each raises CheckpointError if the check fails. `what`: the name of the value in the message.


def as_number(value, what: str, least: int = 0, most: int = LARGEST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise CheckpointError(f"{what}: expected a whole number from {least} to {most}, got {short(value)}")
    return value


def as_text(value, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise CheckpointError(f"{what}: expected a text, got {short(value)}")
    return value


def as_flag(value, what: str) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{short(what)}: expected true or false, got {short(value)}")
    return value


def as_choice(value, what: str, choices) -> str:
    if not isinstance(value, str) or value not in choices:
        raise CheckpointError(f"{what}: expected one of {', '.join(choices)}, got {short(value)}")
    return value


def as_list(value, what: str, most: int = 1 << 26) -> list:
    if not isinstance(value, list) or len(value) > most:
        raise CheckpointError(f"{what}: expected a list of at most {most}, got {short(value)}")
    return value


def as_object(value, what: str) -> dict:
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected an object, got {short(value)}")
    return value


def short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unique(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return found


def _no_constant(name):
    raise ValueError(f"{name} is not a JSON number")
