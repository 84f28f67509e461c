"""The long tests in parts, and the table of their results: options of conftest.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(10))
def test_numbers(number):
    assert number != 7
"""


def run(directory, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-c", os.devnull, "--rootdir", directory, directory, *arguments]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.long
def test_parts_run_each_test_once_and_each_part_has_a_line(tmp_path):
    (tmp_path / "test_tiny.py").write_text(TESTS)
    record = tmp_path / "LONG.md"
    seen = []
    for part in (2, 1):
        done = run(tmp_path, "--part", f"{part}/2", "--record", record, "-rA")
        seen += re.findall(r"(?:PASSED|FAILED) test_tiny.py::test_numbers\[(\d)\]", done.stdout)
        assert done.returncode == (1 if part == 2 else 0), done.stdout + done.stderr
    assert sorted(seen) == list("0123456789")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in record.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [(row[0], *row[3:6]) for row in rows] == [("1/2", "5", "0", "0"), ("2/2", "4", "1", "0")]
    assert [row[7] for row in rows] == ["", "`test_tiny.py::test_numbers[7]`"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row[1]) for row in rows)
    before = record.read_text()
    run(tmp_path, "--part", "1/2", "--record", record, "-k", "3")
    assert record.read_text() == before  # a run with -k is not recorded
    assert run(tmp_path, "--part", "1/1", "--record", record).returncode == 1
    assert "/2 |" not in record.read_text() and "| 1/1 |" in record.read_text()


@pytest.mark.long
def test_few_cases_cover_all_values_and_the_other_cases_are_long(tmp_path):
    (tmp_path / "test_tiny.py").write_text(
        "import pytest\n\n@pytest.mark.few(3)\n@pytest.mark.parametrize('a', 'xyz')\n@pytest.mark.parametrize('b', 'uvw')\n"
        "def test_pairs(a, b):\n    pass\n"
    )
    short = re.findall(r"test_pairs\[(.)-(.)\]", run(tmp_path, "--collect-only", "-m", "not long").stdout)
    rest = re.findall(r"test_pairs\[(.)-(.)\]", run(tmp_path, "--collect-only", "-m", "long").stdout)
    assert len(short) == 3 and [set(values) for values in zip(*short)] == [set("uvw"), set("xyz")]
    assert len(rest) == 6 and not {*short} & {*rest}


@pytest.mark.long
def test_a_wrong_part_is_refused(tmp_path):
    done = run(tmp_path, "--part", "4/3")
    assert done.returncode == 4 and "expected K/N with K from 1 to N" in done.stderr
