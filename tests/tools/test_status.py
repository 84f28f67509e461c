"""The status of a running job: the status file, access to the file, and the view."""

import dataclasses
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aio_ext import _aio
from infinity.errors import UsageError
from infinity.system.waits import of_the_program, waits
from infinity.tools import progress
from infinity.tools.cli import main
from infinity.tools.train import status
from infinity.tools.train.status import (
    Link,
    LiveView,
    Reporter,
    Status,
    folder,
    format_seconds,
    is_running,
    line,
    read_status,
    running,
    view,
)

FULL = Status(
    step=3,
    steps=103,
    world=2,
    loss=4.5,
    step_seconds=1.5,
    tokens_per_second=12_345.6,
    links=(Link("NVMe to host", 1.25, 0.051), Link("update", 0.0, 0.0)),
    device_nbytes=1 << 20,
    device_budget_nbytes=1 << 30,
    host_nbytes=5 << 20,
    checkpoint="step-00000003",
    saved="step-00000002",
)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The directory of status files."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "infinity"


def wait_for(condition):
    """Waits until `condition()` is true because of another thread or process. Fails after one minute."""
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def put(place, **changes):
    """Writes a status file in the way of a run."""
    told = dataclasses.replace(FULL, **changes)
    folder()
    (place / f"{told.pid}.json").write_text(json.dumps(dataclasses.asdict(told)))
    return told


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# The view


def test_the_view_has_step_links_memory_and_checkpoint():
    fresh = dataclasses.replace(FULL, updated=time.time())
    assert view(fresh).splitlines() == [
        "step 3/103  loss 4.500  1.50 s a step  12,346 tokens/s  2 min 30 s left",
        "link          GB/s  step waited",
        "NVMe to host  1.25         5.1%",
        "update        0.00         0.0%",
        "memory      device 1.0 MiB of 1.0 GiB, host arena 5.0 MiB, each a rank",
        "checkpoint  saving step-00000003, last step-00000002",
    ]
    assert line(fresh) == view(fresh).splitlines()[0]


def test_the_view_of_a_waiting_run_shows_the_chain_of_waits(place, capsys):
    texts = ("an update of chunk 3 (a.weight)", "a write of 1.0 MiB to NVMe")
    told = put(place, waits=texts, waits_since=time.time() - 7630)
    assert read_status(place / f"{os.getpid()}.json") == told
    waits = ["waits       2 h 7 min for an update of chunk 3 (a.weight):", "            a write of 1.0 MiB to NVMe"]
    assert view(told).splitlines() == [*view(FULL).splitlines(), *waits]
    assert view(dataclasses.replace(told, step_seconds=None)).splitlines() == ["step 3/103  starting", *waits]
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{os.getpid():>8}  {line(told)}", f"{'':>8}  {' '.join([waits[0], texts[1]])}"]


def test_a_run_before_its_first_step_is_shown_as_starting():
    assert view(Status(step=7, steps=9, world=1)) == "step 7/9  starting"


def test_a_run_without_updates_is_shown_as_silent():
    assert "(silent for 2 min 0 s)" in view(dataclasses.replace(FULL, updated=time.time() - 120)).splitlines()[0]


@pytest.mark.parametrize(
    "seconds, text",
    [(0.4, "0 s"), (42, "42 s"), (59.6, "1 min 0 s"), (303, "5 min 3 s"), (7620, "2 h 7 min"), (273_600, "3 d 4 h")],
)
def test_seconds_are_formatted_for_people(seconds, text):
    assert format_seconds(seconds) == text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_the_view_is_drawn_in_place(monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 20)))
    terminal = Terminal()
    with LiveView(terminal) as show:
        show(FULL)
        show(dataclasses.replace(FULL, step=4), last=True)
    first, second = terminal.getvalue().split("\x1b[5A")  # moves the cursor up to the first of six lines
    assert first.count("\n") == 5 and second.count("\n") == 6 and second.endswith("\n")
    assert second.startswith("step 4/103")
    assert max(len(re.sub(r"\x1b\[.|\r", "", row)) for row in (first + second).splitlines()) == 39  # lines are cut at the width of the terminal


def test_without_a_terminal_the_view_is_a_line_now_and_then():
    output = io.StringIO()
    with LiveView(output) as show:
        for step in range(1, 50):
            show(dataclasses.replace(FULL, step=step), last=step == 49)
    lines = output.getvalue().splitlines()
    assert [text.split()[1] for text in lines] == ["1/103", "49/103"]


def test_nothing_is_drawn_after_the_last_view():
    terminal = Terminal()
    show = LiveView(terminal)
    show(FULL, last=True)
    drawn = terminal.getvalue()
    show(dataclasses.replace(FULL, waits=("an update",)))
    assert terminal.getvalue() == drawn


# The file


def test_a_reporter_writes_its_status_and_removes_the_file_at_the_end(place):
    with Reporter() as reporter:
        reporter.tell(FULL)
        wait_for(reporter.path.exists)
        assert read_status(reporter.path) == FULL
        assert running() == [FULL]
        assert reporter.path == place / f"{os.getpid()}.json"
    assert os.listdir(place) == []
    reporter.close()


def test_the_directory_is_accessible_to_the_user_only(place):
    folder()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    place.chmod(0o755)
    folder()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_without_a_runtime_directory_the_temporary_directory_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert folder() == tmp_path / f"infinity-{os.getuid()}"


@pytest.mark.parametrize("what", ["link", "file", "owner"])
def test_a_directory_of_another_user_is_not_used(place, capsys, monkeypatch, tmp_path, what):
    if what == "link":
        (tmp_path / "other").mkdir()
        place.symlink_to(tmp_path / "other")
    elif what == "file":
        place.write_text("")
    else:
        place.mkdir()
        monkeypatch.setattr(os, "getuid", lambda uid=os.getuid(): uid + 1)
    with pytest.raises(UsageError, match="is not a directory of user"):
        folder()
    assert main(["status"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with Reporter() as reporter:  # training continues
        reporter.tell(FULL)
    assert reporter.path is None
    assert not (tmp_path / "other").exists() or not os.listdir(tmp_path / "other")


def test_a_wait_is_written_and_shown_while_it_lasts(monkeypatch):
    monkeypatch.setattr(status, "WRITE_SECONDS", 0.15)  # longer than the least time between two drawings
    terminal, over = Terminal(), threading.Event()

    def wait():
        with waits("an update of chunk 3"):
            assert over.wait(60)

    waiter = threading.Thread(target=wait)
    with LiveView(terminal) as show, Reporter(of_the_program, show) as reporter:
        reporter.tell(FULL)
        waiter.start()
        wait_for(lambda: reporter.path.exists() and read_status(reporter.path).waits == ("an update of chunk 3",))
        wait_for(lambda: "waits       0 s for an update of chunk 3" in terminal.getvalue())
        over.set()
        waiter.join()
        wait_for(lambda: read_status(reporter.path) == FULL)
        wait_for(lambda: "waits " not in terminal.getvalue().rpartition("\r")[2])


def test_a_failed_write_is_ignored_and_the_next_one_works(place, monkeypatch):
    monkeypatch.setattr(status, "WRITE_SECONDS", 0.01)
    tried, write = threading.Event(), status.write_json

    def fail(*args):
        tried.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status, "write_json", fail)
    with Reporter() as reporter:
        reporter.tell(FULL)
        assert tried.wait(60)
        monkeypatch.setattr(status, "write_json", write)
        reporter.tell(dataclasses.replace(FULL, step=9))
        wait_for(reporter.path.exists)
        assert read_status(reporter.path).step == 9


def test_a_dead_runs_file_is_removed_and_others_stay(place, capsys):
    mine, dead = put(place), put(place, pid=dead_process())
    reused = put(place, pid=os.getppid(), born=5)  # another process has this pid now
    (place / "notes.json").write_text("mine")
    assert is_running(mine) and not is_running(dead) and not is_running(reused)
    assert main(["status"]) == 0
    assert capsys.readouterr().out == f"{os.getpid():>8}  {line(FULL)}\n"
    assert sorted(os.listdir(place)) == sorted([f"{os.getpid()}.json", "notes.json"])


def test_a_killed_run_is_dead_before_its_parent_reaps_the_process(place, capsys):
    with subprocess.Popen(["sleep", "1000"]) as process:
        put(place, pid=process.pid, born=status._born(process.pid))
        assert [told.pid for told in running()] == [process.pid]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert running() == [] and os.listdir(place) == []


# The command


def test_status_without_a_run_is_no_error(capsys):
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "you have no active run on this machine\n"
    assert main(["status", "--json"]) == 0 and json.loads(capsys.readouterr().out) == []


def test_a_run_is_shown_by_process_and_by_file(place, capsys):
    put(place)
    for run in (str(os.getpid()), str(place / f"{os.getpid()}.json")):
        assert main(["status", run]) == 0
        assert capsys.readouterr().out == view(FULL) + "\n"
        assert main(["status", run, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(dataclasses.asdict(FULL)))
    assert main(["status", "--json"]) == 0
    assert [found["pid"] for found in json.loads(capsys.readouterr().out)] == [os.getpid()]


@pytest.mark.parametrize(
    "text, expected",
    [
        (None, "there is no such run; `infinity status` lists active runs"),
        ("", "is not the status file of a run"),
        ("[]", "is not the status file of a run"),
        ('{"step": 1, "links": []}', "is not the status file of a run"),
        (json.dumps(dataclasses.asdict(dataclasses.replace(FULL, loss="low"))), "is not the status file of a run"),
        (json.dumps(dataclasses.asdict(dataclasses.replace(FULL, born=1))), "has ended"),
    ],
)
def test_the_error_for_a_run_that_is_not_there_is_one_line(tmp_path, capsys, text, expected):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    assert main(["status", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("infinity: error: ") and err.count("\n") == 1
    assert expected in err


def test_follow_with_json_prints_one_line_at_a_time(place, capsys, monkeypatch):
    with subprocess.Popen(["sleep", "1000"]) as process:
        put(place, pid=process.pid, born=status._born(process.pid))
        looks = []

        def go_on(seconds):
            looks.append(seconds)
            if len(looks) == 3:
                process.kill()
                process.wait()

        monkeypatch.setattr(status.time, "sleep", go_on)
        assert main(["status", str(process.pid), "--json", "--follow"]) == 0
    assert [json.loads(line)["pid"] for line in capsys.readouterr().out.splitlines()] == [process.pid] * 3


def test_follow_needs_a_run(capsys):
    assert main(["status", "--follow"]) == 2
    assert "--follow needs a run" in capsys.readouterr().err


def test_a_training_run_reports_its_waits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(status, "WRITE_SECONDS", 0.02)
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0)
    (tmp_path / "text").write_bytes(bytes(i * i % 251 % 97 for i in range(20_000)))
    options = "--hidden 64 --layers 2 --heads 2 --seq 16 --batch 2 --steps 4 --device cpu --dtype fp32 --live".split()
    on_nvme = "--param-tier nvme --optimizer-state-tier nvme --residency none --chunk-mib 0.0625 --host-memory 64MiB --device-memory 8MiB".split()
    _aio._inject("read", 8, 3, None, delay=0.4)
    seen, over = set(), threading.Event()

    def look():
        while not over.wait(0.005):
            seen.update(told.waits for told in running())

    looker = threading.Thread(target=look)
    looker.start()
    try:
        assert main(["train", *options, *on_nvme, "--data", str(tmp_path / "text"), "--swap-dirs", str(tmp_path)]) == 0
    finally:
        over.set()
        looker.join()
    assert any(texts and re.fullmatch(r"a read of .* from NVMe, chunk \d+ \((weights|states)\)", texts[-1]) for texts in seen), seen
    assert re.search(r"(?m)^step \d/4 .*\nwaits       0 s for .* from NVMe, chunk", capsys.readouterr().err)


@pytest.mark.long
def test_a_training_run_is_listed_followed_and_removed_at_its_end(tmp_path, place, capsys, monkeypatch):
    (tmp_path / "text").write_bytes(bytes(i * i % 251 % 97 for i in range(20_000)))
    options = "--hidden 32 --layers 1 --heads 2 --seq 16 --batch 2 --steps 1000000 --device cpu --dtype fp32 --data text".split()
    command = [sys.executable, "-m", "infinity", "train", *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **quiet) as process:
        try:
            path = place / f"{process.pid}.json"
            told = wait_for(lambda: path.exists() and (found := read_status(path)).step > 0 and found)
            assert (told.steps, told.world, told.pid) == (1000000, 1, process.pid)
            assert 0 < told.loss < 10 and told.step_seconds > 0
            assert told.tokens_per_second == pytest.approx(32 / told.step_seconds)
            assert [link.title for link in told.links][:2] == ["nvme_read", "h2d"]
            assert told.device_nbytes > 0 and told.host_nbytes >= 0
            assert main(["status"]) == 0
            assert re.match(rf" *{process.pid}  step \d+/1000000  loss", capsys.readouterr().out)

            def interrupt(seconds, sleep=time.sleep):
                monkeypatch.setattr(status.time, "sleep", sleep)
                process.send_signal(signal.SIGINT)
                sleep(seconds)

            monkeypatch.setattr(status.time, "sleep", interrupt)
            assert main(["status", str(process.pid), "--follow"]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert re.match(r"step \d+/1000000  loss", lines[0]) and lines[-1] == f"process {process.pid} has ended"
            process.wait(60)
            assert os.listdir(place) == []  # the interrupted run removed its file
        finally:
            process.kill()
