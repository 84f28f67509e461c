"""Files of settings: TOML or JSON in, TOML out; and single settings as a command line gives them, NAME=VALUE.

Knows tables of numbers, strings, booleans and lists. Must not know what any of them means.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from infinity.errors import ConfigError

DEFAULT_NAME = "infinity.toml"  # what commands read where no other file is named


def read(path: Path | str) -> dict:
    """The tables of a file, JSON if it is named so, else TOML. Raises ConfigError, with the place in the file."""
    path = Path(path)
    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of both kinds of files, and of what is no text
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a table of settings; got {type(content).__name__}")
    return content


def assignment(text: str) -> tuple[str, object]:
    """NAME=VALUE, the value as in TOML; what is no TOML value is a string, so that quotes can be left out."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\s*[\w.-]+\s*", name):
        raise ConfigError(f"{text!r}: expected NAME=VALUE")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def to_toml(tables: Mapping[str, object]) -> str:
    """TOML of nested tables, and lists of tables, of numbers, strings, booleans and lists of these. None is left out."""
    return "\n".join(_lines(tables, ())).strip() + "\n"


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
    return isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
