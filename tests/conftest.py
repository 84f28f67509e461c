"""Fixtures that several test files use."""

import datetime
import gc
import re
import signal
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from aio_ext import _aio

pytest.register_assert_rewrite("support")  # a failed assert of shared code shows its values, as in a test module

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs with SIGINT ignored, and child processes inherit this
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", type=_part, help="run every Nth test only, from the Kth on")
    parser.addoption("--record", metavar="FILE", type=Path, help="write the result of a --part to a table, replacing its old line")


def pytest_configure(config):
    config.began = time.monotonic()


def _part(text):
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--part {text}: expected K/N with K from 1 to N, such as 2/6")
    return int(found[1]), int(found[2])


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Sends neighbours (the cases of one test) to different parts. Therefore all parts take about the same time."""
    _leave_few(items)
    yield  # applies -m and -k
    if part := config.getoption("--part"):
        number, parts = part
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index % parts != number - 1])
        items[:] = items[number - 1 :: parts]


def _leave_few(items):
    """Marks all cases of a test marked few(number) as long, except `number` cases. Cases with the least used parameter values stay."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("long"):
            cases[item.path, item.originalname].append(item)
    for found in cases.values():
        (number,) = found[0].get_closest_marker("few").args
        num_come = Counter()
        for _ in range(min(number, len(found))):
            found.remove(least := min(found, key=lambda item: sum(num_come[each] for each in _values(item))))
            num_come.update(_values(least))
        for item in found:
            item.add_marker("long")


def _values(item):
    return [(name, _text(value)) for name, value in item.callspec.params.items()]


def _text(value):
    try:
        return repr(value)
    except ValueError:  # a value with an integer of more than 4,300 digits
        return f"{type(value).__name__} at {id(value)}"


def pytest_collection_finish(session):
    """Excludes tests and modules, which live to the end, from the many garbage collections of the tests."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if hasattr(config, "workerinput"):
        return  # a worker process of -n has run only a share
    path, part = config.getoption("--record"), config.getoption("--part")
    if path is None or part is None or config.getoption("-k") or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return  # interrupted runs and selections of tests are not recorded
    stats = terminalreporter.stats
    failed = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())]
    minutes = (time.monotonic() - config.began) / 60
    record(path, part, len(stats.get("passed", ())), failed, len(stats.get("skipped", ())), minutes)


def record(path, part, num_passed, failed, num_skipped, minutes):
    """Writes a line for the part into the table, and removes lines of other divisions. Makes the table if there is none."""

    def git(*command):
        return subprocess.run(["git", *command], cwd=path.parent, capture_output=True, text=True).stdout.strip()

    name = f"{part[0]}/{part[1]}"
    commit = git("rev-parse", "--short=10", "HEAD") or "unknown"
    if git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":!{path.name}"):
        commit += " and changes"
    today = datetime.date.today().isoformat()
    names = "<br>".join(f"`{nodeid}`".replace("|", "\\|") for nodeid in sorted(set(failed)))
    row = f"| {name} | {today} | {commit} | {num_passed} | {len(set(failed))} | {num_skipped} | {minutes:.0f} | {names} |"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {found[1]: line for line in lines if (found := re.match(r"\| (\d+/\d+) ", line)) and found[1].endswith(f"/{part[1]}")}
    rows[name] = row
    path.write_text(LONG_HEAD + "\n".join(rows[key] for key in sorted(rows, key=lambda key: int(key.split("/")[0]))) + "\n")


LONG_HEAD = """# Results of the long tests

`make test-long` adds one line per part (`make test-long PART=2/8`).

| part | date | commit | passed | failed | skipped | minutes | failures |
|---|---|---|---|---|---|---|---|
"""


@pytest.fixture(autouse=True)
def no_faults_left():
    """Removes all faults that the test injected into aio_ext."""
    yield
    _aio._inject()


@pytest.fixture
def paths(tmp_path):
    """Three directories on one filesystem."""
    made = [tmp_path / f"drive{i}" for i in range(3)]
    for path in made:
        path.mkdir()
    return made


@pytest.fixture
def one_thread():
    """Torch computes in one thread, with the bits of a reference on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic(monkeypatch):
    """Selects CUDA kernels that add in a fixed order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Return a function: size -> World. Each World is made once."""
    from support.ranks import World

    made = {}

    def get(size):
        if size not in made or not made[size].pipes:
            made[size] = World(size, tmp_path_factory.mktemp(f"world{size}-"))
        return made[size]

    yield get
    for world in made.values():
        world.close()


@pytest.fixture(scope="module")
def two_ranks(worlds):
    """A World of two ranks."""
    return worlds(2)


@pytest.fixture(scope="module")
def nursery():
    """A process that forks the processes of a test, which may be killed."""
    from support.nursery import Nursery

    nursery = Nursery()
    yield nursery
    nursery.close()
