import math
import random
import tomllib
from pathlib import Path

import numpy as np
import pytest

from infinity import config_files
from infinity.errors import ConfigError

ODD_TEXTS = ["", " ", '"', "'", "\\", "\n", "\r\n", "\t", "\x00", "\x1f", "\x7f", "\x80", "\u2028", "é", "日本", "😀"]
ODD_TEXTS += ["a=b", "#", "[x]", "'''", '"""', "\\u0041"]
ODD_NUMBERS = [0, -1, 2**63, 10**40, 0.0, 0.1, 1e16, 1e-300, 5e-324, 1.7976931348623157e308, math.inf, -math.inf]


def in_toml(value):
    return tomllib.loads(config_files.to_toml({"value": value}))["value"]


# Round trips


@pytest.mark.parametrize("value", [*ODD_TEXTS, *ODD_NUMBERS, True, False, [], [[]], [[1], ["a", [2.5]]], ODD_TEXTS, {}], ids=repr)
def test_a_value_is_read_back_unchanged(value):
    assert in_toml(value) == value
    assert type(in_toml(value)) is type(value)


def test_zero_keeps_its_sign_and_nan_stays_nan():
    assert math.copysign(1, in_toml(-0.0)) == -1
    assert math.isnan(in_toml(math.nan))


@pytest.mark.parametrize("name", [name for name in ODD_TEXTS] + ["a.b", "1", "-", "a b", "config"], ids=repr)
def test_a_name_is_read_back_unchanged(name):
    tables = {name: {name: 1, "inner": {name: [{name: 2}, {}]}}}
    assert tomllib.loads(config_files.to_toml(tables)) == tables


def test_random_tables_are_read_back_unchanged():
    draw = random.Random(0)

    def table(depth):
        kinds = [lambda: draw.choice(ODD_TEXTS), lambda: draw.choice(ODD_NUMBERS), lambda: draw.random() < 0.5]
        kinds += [lambda: [draw.choice(kinds[:3])() for _ in range(draw.randrange(3))]]
        if depth:
            kinds += [lambda: table(depth - 1), lambda: [table(depth - 1) for _ in range(draw.randrange(3))]]
        return {draw.choice(ODD_TEXTS) + str(i): draw.choice(kinds)() for i in range(draw.randrange(5))}

    for _ in range(300):
        tables = table(3)
        assert tomllib.loads(config_files.to_toml(tables)) == tables


def test_the_written_text_is_readable():
    config = {"dtype": "fp32", "swap_dirs": ("/a", Path("/b")), "chunk_mib": None, "trace": True}
    assert config_files.to_toml({"config": config, "drives": [{"gbps": 3.5}, {"gbps": 4}]}) == (
        '[config]\ndtype = "fp32"\nswap_dirs = ["/a", "/b"]\ntrace = true\n\n[[drives]]\ngbps = 3.5\n\n[[drives]]\ngbps = 4\n'
    )


def test_plain_values_stand_before_tables_of_the_same_table():
    assert config_files.to_toml({"table": {"x": 1}, "plain": 2}) == "plain = 2\n\n[table]\nx = 1\n"


def test_floats_of_numpy_are_written_as_floats():
    assert config_files.to_toml({"x": np.float64(0.1)}) == "x = 0.1\n"


@pytest.mark.parametrize("value", [np.int64(5), object(), b"x", {1}, [1, {}], [None]], ids=lambda value: type(value).__name__)
def test_a_value_without_a_form_in_toml_is_an_error(value):
    with pytest.raises(TypeError, match="has no form in TOML"):
        config_files.to_toml({"x": value})


def test_a_path_that_is_not_unicode_is_refused():
    with pytest.raises(ConfigError, match="is not Unicode"):
        config_files.to_toml({"path": b"/swap\xff".decode(errors="surrogateescape")})


# Files


def test_a_file_is_json_by_its_name_and_otherwise_toml(tmp_path):
    (tmp_path / "a.json").write_text('{"config": {"x": [1, 2.5, "é", null]}}', encoding="utf-8")
    (tmp_path / "a.conf").write_text('[config]\nx = "é"', encoding="utf-8")
    assert config_files.read(tmp_path / "a.json") == {"config": {"x": [1, 2.5, "é", None]}}
    assert config_files.read(str(tmp_path / "a.conf")) == {"config": {"x": "é"}}
    (tmp_path / "json").write_text("{}")
    assert config_files.read_json(tmp_path / "json") == {}


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.toml", b"x = ", "a.toml is not valid TOML: Invalid value (at end of document)"),
        ("a.toml", b"x = 1\nx = 2", "a.toml is not valid TOML: Cannot overwrite a value (at end of document)"),
        ("a.toml", b"x = '\xff'", "a.toml is not valid TOML: 'utf-8' codec can't decode"),
        ("a.toml", b"x = " + b"[" * 10_000, "a.toml is not valid TOML: "),
        ("a.json", b"{,}", "a.json is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ("a.json", b"[1]", "a.json: expected a table of settings; got list"),
        ("a.json", b"", "a.json is not valid JSON: Expecting value"),
        ("a.json", b"[" * 60_000, "a.json is not valid JSON: "),
        ("a.toml", None, "a.toml cannot be read: No such file or directory"),
        (".", None, ". cannot be read: Is a directory"),
        ("a.yaml", b"x: 1", "a.yaml: expected TOML, or JSON in a file whose name ends in .json; got YAML, by its name"),
        ("a.toml", b"x = " + b"1" * 10**6, "a.toml cannot be read: expected at most 65,536 bytes"),
        ("a.toml", b"a." * 30_000 + b"a = 1", "a.toml is not valid TOML: expected keys of at most 8 parts; got a.a.a"),
    ],
)
def test_the_error_names_a_file_that_cannot_be_read_and_the_reason(tmp_path, monkeypatch, name, content, expected):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        config_files.read(name)
    assert str(raised.value).startswith(expected)


# Single settings


@pytest.mark.parametrize(
    "text, expected",
    [
        ("seed=5", ("seed", 5)),
        (" seed = 0x10 ", ("seed", 16)),
        ("chunk_mib=0.5", ("chunk_mib", 0.5)),
        ("trace=true", ("trace", True)),
        ("trace=True", ("trace", "True")),
        ("dtype=fp32", ("dtype", "fp32")),
        ('dtype="fp32"', ("dtype", "fp32")),
        ("host_memory=48GiB", ("host_memory", "48GiB")),
        ("swap_dirs=/ssd0/swap", ("swap_dirs", "/ssd0/swap")),
        ("swap_dirs=/a=b", ("swap_dirs", "/a=b")),
        ('swap_dirs=["/a", "/b"]', ("swap_dirs", ["/a", "/b"])),
        ("swap_dirs=", ("swap_dirs", "")),
        ("swap_dirs=2024-01-01", ("swap_dirs", "2024-01-01")),
        ("swap_dirs={a=1}", ("swap_dirs", "{a=1}")),
        ("seed=1\nother=2", ("seed", "1\nother=2")),
        ("seed=" + "[" * 10_000, ("seed", "[" * 10_000)),
        ("seed=" + "9" * 5000, ("seed", "9" * 5000)),
        ("a.b-c=1", ("a.b-c", 1)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_assignment_has_its_value_in_toml_or_its_text(text, expected):
    assert config_files.assignment(text) == expected


@pytest.mark.parametrize("text", ["", "seed", "=5", "a b=5", "[x]=1", "'a'=1"])
def test_text_that_is_no_assignment_is_refused(text):
    with pytest.raises(ConfigError, match="expected NAME=VALUE"):
        config_files.assignment(text)
