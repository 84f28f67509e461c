"""The benches: that each says what it is, takes options and runs; what they measure is not asserted here."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "bench"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.name.startswith("_"))
SMALL = "--hidden 64 --layers 2 --vocab 128 --seq 16 --device cpu --dtype fp32".split()


@pytest.fixture
def bench(monkeypatch):
    """Imports a bench by name as a script is run; the modules are forgotten again."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


def run(*arguments):
    """`python -m bench`, from the checkout; its ranks compute in one thread each."""
    command = [sys.executable, "-m", "bench", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path])}
    return subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", NAMES)
def test_a_bench_says_what_it_is_and_takes_options(bench, name, monkeypatch, capsys):
    module = bench(name)
    first, second = module.__doc__.split("\n")[:2]
    assert first.endswith(".") and len(first) < 140 and not second
    assert f"python bench/{name}.py" in module.__doc__
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert first[:40] in capsys.readouterr().out


def test_the_entry_lists_exactly_the_benches():
    listed = run()
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()[2:]] == NAMES
    wrong = run("peer")
    assert (wrong.returncode, wrong.stderr) == (2, "python -m bench: there is no 'peer'; did you mean peers?\n")


def test_files_that_cannot_be_written_end_a_bench_before_it_measures(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["prefetch.py", "--json", str(tmp_path / "none" / "x.json")])
    with pytest.raises(SystemExit) as ended:
        bench("prefetch").main()
    assert ended.value.code == 2
    assert "there is no directory" in capsys.readouterr().err


def test_a_pipeline_without_lookahead_fetches_nothing_ahead(bench, monkeypatch, tmp_path, one_thread):
    path = tmp_path / "found.json"
    options = ["--batches", "1,2", "--rounds", "1", "--steps", "2", "--nvme", str(tmp_path), "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["prefetch.py", *SMALL, *options])
    bench("prefetch").main()
    found = json.loads(path.read_text())["found"]
    assert list(found) == ["1", "2"]
    for each in found.values():
        assert each["ahead"]["ahead"] > 0.9 and each["ahead"]["on demand"] == 0
        assert [len(block) for way in ("ahead", "on demand") for block in each["seconds"][way]] == [1, 1]


@pytest.mark.long
def test_one_owner_brings_the_same_gradients_to_the_host(tmp_path):
    path = tmp_path / "found.json"
    done = run("gradients", *SMALL, "--ranks", "2,3", "--rounds", 1, "--steps", 2, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["found"]
    assert list(found) == ["2", "3"]
    for report in found.values():
        assert report["difference"] < 1e-6 and [len(times) for times in report["seconds"].values()] == [1, 1]


@pytest.mark.long
def test_peers_train_alike_and_who_cannot_is_a_row(tmp_path):
    path = tmp_path / "found.json"
    common = ["peers", *SMALL, "--heads", 2, "--rounds", 1, "--steps", 4, "--nvme", tmp_path, "--json", path]
    done = run(*common, "--engines", "infinity,fsdp2,plain")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["place"], row["engine"]): row["runs"] for row in json.loads(path.read_text())["found"]}
    assert list(rows) == [
        ("nvme", "infinity"),
        ("host", "infinity"),
        ("host", "fsdp2"),
        ("device", "infinity"),
        ("device", "fsdp2"),
        ("device", "plain"),
    ]
    (nvme,) = rows["nvme", "infinity"]
    assert nvme["traffic"][1] == pytest.approx(12, rel=0.2)  # weight, momentum and variance, padded to pages
    (host,) = rows["host", "fsdp2"]
    assert 4 < host["traffic"][2] < 8 and host["traffic"][3] == 4
    assert not any(rows["device", "plain"][0]["traffic"][2:])

    done = run(*common, "--engines", "infinity,plain", "--places", "device", "--ranks", 2)
    assert done.returncode == 0 and "device  plain: runs on one rank only" in done.stdout, done.stdout + done.stderr

    done = run(*common, "--engines", "infinity,fsdp2", "--places", "device", "--tolerance", 0)
    assert done.returncode == 1 and "up to 0 is allowed" in done.stdout
