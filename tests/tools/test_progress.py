"""The progress bar for bytes. `test_cli.py` tests the progress line of a training run."""

import re
import sys

import pytest

from infinity.tools import progress
from infinity.tools.progress import BytesProgress

GIB = 2**30


@pytest.fixture
def clock(monkeypatch):
    """A list with the current time in seconds, which the test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


@pytest.fixture
def no_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # an import of tqdm raises ImportError


def test_without_a_terminal_a_line_is_printed_every_few_seconds(capsys, clock):
    with BytesProgress("saved") as progress:
        for second in range(1, 13):
            clock[0] = 100.0 + second
            progress(second * GIB, 12 * GIB)
    assert capsys.readouterr().err.splitlines() == [
        "saved 1.0 of 12.0 GiB  8 %  1.1 GB/s  11 s left",
        "saved 6.0 of 12.0 GiB  50 %  1.1 GB/s  6 s left",
        "saved 11.0 of 12.0 GiB  92 %  1.1 GB/s  1 s left",
        "saved 12.0 of 12.0 GiB  100 %  1.1 GB/s  0 s left",
    ]


def test_a_terminal_without_tqdm_rewrites_one_line(capsys, monkeypatch, clock, no_tqdm):
    on_a_terminal(monkeypatch)
    with BytesProgress("read") as progress:
        for second in (0.5, 0.55, 1.0):  # the second call comes too soon
            clock[0] = 100.0 + second
            progress(int(second * 2**20), 2**20)
    first, last = "read 512.0 KiB of 1.0 MiB  50 %  1 MB/s  0 s left", "read 1.0 of 1.0 MiB  100 %  1 MB/s  0 s left"
    assert capsys.readouterr().err == f"\r{first}\x1b[K\r{last}\x1b[K\n"


@pytest.mark.parametrize("done, total, line", [(0, 600, "saved 0 of 600 B  0 %"), (0, 0, "saved 0 of 0 B  100 %")])
def test_no_rate_is_printed_before_the_first_byte(capsys, done, total, line):
    BytesProgress("saved")(done, total)
    assert capsys.readouterr().err == f"{line}\n"


def test_an_error_begins_on_its_own_line(capsys, monkeypatch, no_tqdm):
    on_a_terminal(monkeypatch)
    with pytest.raises(OSError), BytesProgress("saved") as progress:
        progress(1, 2)
        raise OSError
    assert capsys.readouterr().err.endswith("\x1b[K\n")


def test_tqdm_draws_on_a_terminal(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    on_a_terminal(monkeypatch)
    with BytesProgress("saved") as progress:
        progress(3_000_000, 12_000_000)
        progress(12_000_000, 12_000_000)
        assert (progress.bar.n, progress.bar.total, progress.bar.unit) == (12_000_000, 12_000_000, "B")
    err = capsys.readouterr().err
    assert re.search(r"saved: 100%.*12\.0M/12\.0M", err) and err.endswith("\n")


def test_tqdm_is_not_used_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_tqdm", lambda **_: pytest.fail("asked for tqdm"))
    BytesProgress("saved")(2, 2)
    assert capsys.readouterr().err.startswith("saved 2 of 2 B  100 %")
