"""Files of settings: reads TOML and JSON, writes TOML. Also parses a setting of the command line, NAME=VALUE.

Knows tables of numbers, strings, booleans and lists. Must not know the meaning of a setting.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from infinity.errors import ConfigError
from infinity.ordinary_file import read_ordinary

DEFAULT_NAME = "infinity.toml"  # commands read this file unless they name another one
LARGEST_NBYTES = 1 << 16  # of a file: a parser takes less than 1 s for any content of this size
# The time and the memory of tomllib grow with the square of the number of parts in a dotted key.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){8}""")


def read(path: Path | str) -> dict:
    """The tables of a file: JSON if the name ends in .json, otherwise TOML. Raises ConfigError with the position in the file."""
    suffix = Path(path).suffix
    if suffix in (".yaml", ".yml"):
        raise ConfigError(f"{path}: expected TOML, or JSON in a file whose name ends in .json; got YAML, by its name. Write it as one of these")
    return read_json(path) if suffix == ".json" else _read(path, _parse_toml, "TOML")


def read_json(path: Path | str) -> dict:
    """The tables of a JSON file with any name. Raises ConfigError with the position in the file."""
    return _read(path, json.loads, "JSON")


def assignment(text: str) -> tuple[str, object]:
    """Name and value of NAME=VALUE. A value that is no number, string, boolean or list of TOML is a string: quotes are optional."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\s*[\w.-]+\s*", name):
        raise ConfigError(f"{text!r}: expected NAME=VALUE")
    try:
        content = _parse_toml(f"value = {value}")
    except (ValueError, RecursionError):
        content = {}
    # With a newline, the text may have more than one value.
    given = content["value"] if list(content) == ["value"] else None
    return name.strip(), given if isinstance(given, (bool, int, float, str, list)) else value.strip()


def to_toml(tables: Mapping[str, object]) -> str:
    """TOML of nested tables and lists of tables. Values are numbers, strings, paths, booleans and lists of these. None is left out.

    Raises TypeError for other values, and ConfigError for a string that is not Unicode, such as some paths.
    """
    return "\n".join(_lines(tables, ())).strip() + "\n"


def _read(path: Path | str, parse: Callable[[str], object], kind: str) -> dict:
    try:
        content = parse(read_ordinary(path, LARGEST_NBYTES).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of the parser, or the bytes are no text
        raise ConfigError(f"{path} is not valid {kind}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a table of settings; got {type(content).__name__}")
    return content


def _parse_toml(text: str) -> dict:
    """Raises ValueError with the position in the text."""
    if found := _LONG_KEY.search(text):
        raise ValueError(f"expected keys of at most 8 parts; got {found[0][:40]}... (at line {text.count(chr(10), 0, found.start()) + 1})")
    return tomllib.loads(text)


def _lines(content: Mapping[str, object], path: tuple[str, ...]) -> list[str]:
    plain = {name: value for name, value in content.items() if not _is_table(value) and value is not None}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in plain.items()]
    for name, value in content.items():
        if not _is_table(value):
            continue
        here = (*path, _key(name))
        left, right = ("[", "]") if isinstance(value, Mapping) else ("[[", "]]")
        for each in [value] if isinstance(value, Mapping) else value:
            lines += ["", f"{left}{'.'.join(here)}{right}", *_lines(each, here)]
    return lines


def _is_table(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(each, Mapping) for each in value)
    return isinstance(value, Mapping)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):  # numpy's floats have a different repr
        return float.__repr__(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, (str, os.PathLike)):
        return _text(os.fspath(value))
    raise TypeError(f"{value!r} has no form in TOML")


def _text(text: str) -> str:
    if re.search("[\ud800-\udfff]", text):
        raise ConfigError(f"{text!r} is not Unicode and cannot be written to a file of settings; use another name")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
