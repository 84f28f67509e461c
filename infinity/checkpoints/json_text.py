"""JSON from strangers, read one value at a time and within bounds.

Knows JSON's text, and how much memory is made of it. Must not know what it says.

# [Note: nothing is made of JSON before it is known to be small]
# JSON of a few bytes may take fifty times as much memory as objects. So no more than a window of the text is made into objects at once,
# which are checked and kept in a compact form before the next; longer values must fit into a budget by a count of their brackets and
# commas. What lists many things takes each from a budget, too.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator

from infinity.errors import CheckpointError

LARGEST = 1 << 62  # of any number of elements or bytes
_WINDOW_NBYTES = 1 << 16  # of text, for most values
_MOST_NBYTES = 1 << 18  # of text, for one entry
_SPACE = re.compile(r"[ \t\n\r]*")


class Budget:
    """What may be made of a text, in bytes of memory. `what` and `remedy` are for who hears that it was not enough."""

    def __init__(self, nbytes: int, what: str, remedy: str):
        self.left = self.nbytes = nbytes
        self.what, self.remedy = what, remedy

    def take(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise self.exceeded()

    def rest(self) -> Budget:
        """As much as is left, for what does not stay."""
        part = Budget(self.nbytes, self.what, self.remedy)
        part.left = self.left
        return part

    def exceeded(self) -> CheckpointError:
        return CheckpointError(f"{self.what} would take more than {self.nbytes >> 20} MiB of memory when it is read; {self.remedy}")


class Text:
    """JSON, read one value at a time; see [Note: nothing is made of JSON before it is known to be small]."""

    def __init__(self, body: memoryview, is_open: bool = False):
        """is_open: its last brace is missing."""
        self._body, self._base, self._at, self._is_open = body, 0, 0, is_open
        self._window, self._last_numel = "", 0
        self._scan = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant).scan_once
        self._refill(_WINDOW_NBYTES)

    def members(self) -> Iterator[str]:
        """The keys of an object; after each, its value must be read."""
        return self._inside("{", "}", self._key)

    def items(self) -> Iterator[None]:
        """As often as a list has items; each time, one must be read."""
        return self._inside("[", "]", lambda: None)

    def value(self, budget: Budget | None = None, texts_are_free: bool = False):
        """The next value, of at most 256 KiB of text, or within a budget. texts_are_free: they take no more than the file."""
        self._next()
        if len(self._window) - self._at < self._last_numel and self._at and not self._is_last:
            self._refill(_WINDOW_NBYTES)  # a value as long as the last one would be cut here, and read twice
        while True:
            try:
                found, end = self._scan(self._window, self._at)
                if end < len(self._window) or self._is_last:  # else a number may go on
                    break
            except (StopIteration, ValueError) as error:
                if self._is_last:
                    raise ValueError(f"no JSON value at byte {self._base + self._at}") from error
            nbytes = _WINDOW_NBYTES if self._at else 2 * self._window_nbytes
            self._refill(nbytes)
            if nbytes > _WINDOW_NBYTES and (nbytes > _MOST_NBYTES if budget is None else cost(self._window) > 2 * budget.left):
                raise CheckpointError(f"a value of more than {_MOST_NBYTES} bytes at {self._base}") if budget is None else budget.exceeded()
        if budget is not None:
            budget.take(cost(self._window[self._at : end]) - (end - self._at if texts_are_free else 0))
        self._last_numel, self._at = end - self._at, end
        return found

    def peek(self) -> str:
        """The first character of what comes next."""
        return self._next()

    def end(self) -> None:
        """Raises ValueError unless all has been read."""
        if self._next():
            raise ValueError(f"more behind the object, at byte {self._base + self._at}")

    @property
    def _is_last(self) -> bool:
        return self._base + self._window_nbytes == len(self._body)

    def _refill(self, nbytes: int) -> None:
        """Look at the bytes from here on."""
        self._base += self._at if self._window.isascii() else len(self._window[: self._at].encode())
        self._at = 0
        part = self._body[self._base : self._base + nbytes]
        self._window, self._window_nbytes = codecs.utf_8_decode(part, "strict", self._base + nbytes >= len(self._body))

    def _next(self) -> str:
        """The next character that is no space, or nothing at the end."""
        while True:
            if (found := self._window[self._at : self._at + 1]) and found not in " \t\n\r":
                return found
            self._at = _SPACE.match(self._window, self._at).end()
            if self._at < len(self._window) or self._is_last:
                return self._window[self._at : self._at + 1]
            self._refill(_WINDOW_NBYTES)

    def _key(self) -> str:
        if self._next() != '"':
            raise ValueError(f"no key at byte {self._base + self._at}")
        key = self.value()
        if self._next() != ":":
            raise ValueError(f"no colon at byte {self._base + self._at}")
        self._at += 1
        return key

    def _inside(self, opening: str, closing: str, begin: Callable) -> Iterator:
        if self._next() != opening:
            raise ValueError(f"what begins at byte {self._base + self._at} is not a JSON {'object' if opening == '{' else 'list'}")
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
    """At most so many bytes of memory are taken by what JSON makes of a text."""
    nodes = 72 * text.count("[") + 240 * text.count("{") + 40 * text.count(",") + 32 * text.count('"')
    return nodes + len(text) * (4 if "\\u" in text or not text.isascii() else 1)


# What a value must be. Each raises CheckpointError, which names `what` it was read for.


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
        raise ValueError("a key stands twice in one object")
    return found


def _no_constant(name):
    raise ValueError(f"{name} is no JSON number")
