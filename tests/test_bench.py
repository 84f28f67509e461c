"""The benches: each has a description and options, and runs. These tests do not assert measurements."""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity import config_files

FOLDER = Path(__file__).parent.parent / "bench"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.name.startswith("_"))
SMALL = "--hidden 64 --layers 2 --vocab 128 --seq 16 --device cpu --dtype fp32".split()


@pytest.fixture
def bench(monkeypatch):
    """Returns a function that imports a bench by name in the way of a script. Removes the modules at the end."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (FOLDER / f"{name}.py").exists():
            del sys.modules[name]


def run(*arguments):
    """Runs `python -m bench` from the checkout, with one thread per rank."""
    command = [sys.executable, "-m", "bench", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path])}
    return subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", NAMES)
def test_a_bench_has_a_description_and_options(bench, name, monkeypatch, capsys):
    module = bench(name)
    first, second = module.__doc__.split("\n")[:2]
    assert first.endswith(".") and len(first) < 140 and not second
    assert f"python bench/{name}.py" in module.__doc__
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert first[:40] in capsys.readouterr().out


def test_the_page_of_results_matches_its_data(bench):
    assert bench("_results").page() == (FOLDER / "RESULTS.md").read_text(), "bench/RESULTS.md is out of date: run python bench/_results.py"


def test_each_measurement_has_a_version_a_date_and_a_command(bench):
    results = bench("_results")
    assert sorted(results.TOPICS) == sorted(path.stem for path in FOLDER.glob("results/*.json"))
    machines = {"CPU device"} | {row["name"] for row in results.read("machines")["rows"]}
    for topic in sorted(set(results.TOPICS) - {"machines"}):
        data = results.read(topic)
        for row in data["rows"]:
            assert re.fullmatch(r"[0-9a-f]{7}", row["version"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), row
            assert row.get("command") or "command" in data or topic == "experiments", row
            if topic != "largest_by_placement":  # whose machines are those of two papers
                assert set(row.get("machine", "A").split(", ")) <= machines, row


def test_a_row_with_an_unknown_column_is_refused(bench, monkeypatch, tmp_path):
    results = bench("_results")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    (tmp_path / "odd.json").write_text('{"columns": ["a", "b"], "rows": [{"a": 0.500, "c": 1}]}')
    with pytest.raises(ValueError, match="'b', 'c'"):
        results.read("odd")


def test_python_m_bench_lists_exactly_the_benches():
    listed = run()
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()[2:]] == NAMES
    wrong = run("peer")
    assert (wrong.returncode, wrong.stderr) == (2, "python -m bench: there is no 'peer'; did you mean peers?\n")


def test_a_file_that_cannot_be_written_ends_a_bench_before_measurements(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["prefetch.py", "--json", str(tmp_path / "none" / "x.json")])
    with pytest.raises(SystemExit) as ended:
        bench("prefetch").main()
    assert ended.value.code == 2
    assert "there is no directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("finetune", "--model tiny --curve 8k,100", "--curve 100: expected a multiple of --sequence, 4096"),
        ("finetune", "--curve 8k,8q", "argument --curve: expected a whole number of at least 1, got '8q'"),
        ("peers", "--rounds 0", "argument --rounds: expected a whole number of at least 1, got '0'"),
        ("peers", "--nvme /nonexist", "argument --nvme: there is no directory /nonexist; create it or name another"),
        ("prefetch", "--steps 1", "argument --steps: expected a whole number of at least 2, got '1'"),
        ("prefetch", "--batches 1,x", "argument --batches: expected a whole number of at least 1, got 'x'"),
        ("lost_rank", "--faults kill,sleep", "--faults 'sleep': expected kill, stop"),
        ("predict", "--machine h200x8 --only '3 B, 9 GPUs'", "--only '3 B, 9 GPUs': it needs 9 GPUs, and the machine has 8"),
        ("scale", "--params nan", "argument --params: expected a number above 0, got 'nan'"),
        ("scale", "--machine /nonexist.toml", "/nonexist.toml cannot be read: No such file or directory"),
        ("gradients", "--simulate h200x8 --ranks 12", "--ranks 12: expected at most 8 ranks, or a multiple of 8, the devices of a node"),
        ("tiling", "--simulate h200x8 --least-hidden 100", "--least-hidden 100: expected a multiple of 64"),
        ("tiling", "--factors 1,2", "argument --factors: expected auto or a square number, such as 4 for 2 x 2 tiles, got '2'"),
    ],
)
def test_a_mistake_prints_one_line_and_ends_with_status_2(bench, name, options, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *shlex.split(options)])
    with pytest.raises(SystemExit) as ended:
        bench("_common").exit_with(bench(name).main)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"{name}.py: error: {says}"


SMALL_GPT = ["--simulate", "h200x8", "--dtype", "bf16", "--hidden", "512", "--layers", "2", "--vocab", "1000", "--seq", "128"]


@pytest.mark.parametrize(
    ("name", "options", "holds"),
    [
        (
            "tiling",  # a block of 64 MiB holds 2048 x 8192 elements of two bytes, and not 4096 x 16384, which are four such tiles
            ["--simulate", "h200x8", "--least-hidden", "1024", "--most-hidden", "8192", "--factors", "1,4", "--block-mib", "64"],
            lambda found: [found["results"][factor]["best"]["hidden"] for factor in ("1", "4")] == [2048, 4096],
        ),
        (
            "activations",
            [*SMALL_GPT, "--batch", "4"],
            lambda found: found["found"]["512"]["moved_nbytes"]["host"] > found["found"]["512"]["moved_nbytes"]["device"] == 0,
        ),
        (
            "gradients",
            [*SMALL_GPT, "--hidden", "2048", "--ranks", "1,8"],
            lambda found: [_owner_takes_longer(found["found"][num]["seconds"]) for num in ("1", "8")] == [False, True],
        ),
        ("throughput", [], lambda found: found["this engine, one GPU"][0]["seconds"] == found["this engine, one GPU"][0]["row"]["measured, s"]),
    ],
)
def test_a_bench_without_bytes_finds_what_is_known(bench, name, options, holds, monkeypatch, tmp_path, one_thread):
    if name == "throughput":
        pytest.importorskip("transformers")  # has the sizes of its models
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options, "--json", str(path)])
    assert not bench(name).main()
    assert holds(json.loads(path.read_text()))


def _owner_takes_longer(seconds):
    return seconds["owner"][0] > 1.05 * seconds["all"][0]


def test_losses_that_are_nan_never_agree(bench):
    common, nan = bench("_common"), float("nan")
    assert common.apart([2.0, 4.0], [2.0, 5.0]) == 0.25
    assert common.apart([1.0, nan], [1.0, nan]) == common.apart([1.0], [nan]) == float("inf")
    options = argparse.Namespace(tolerance=None, dtype="bf16")
    assert [common.agree(options, worst) for worst in (0.02, 0.021, nan)] == [True, False, False]


@pytest.mark.slow
def test_overhead_ends_with_status_1_if_losses_differ_too_much(bench, monkeypatch, tmp_path, one_thread):
    path = tmp_path / "found.json"
    options = ["--heads", "1", "--steps", "3", "--update", "deferred", "--json", str(path), "--tolerance"]
    for tolerance, status in (("0.002", 0), ("-1", 1), ("nan", 1)):
        monkeypatch.setattr(sys, "argv", ["overhead.py", *SMALL, *options, tolerance])
        assert bench("overhead").main() == status
    assert [len(times) for times in json.loads(path.read_text())["seconds"].values()] == [3, 3]


def pair_of(seconds=0.0, read=0.0, device=0.0):
    """A row of bench/predict.py with these errors."""
    measured = {"s": 2.0, "nbytes": {"nvme_read": 1e9, "h2d": 10}, "memory": {"device": 1e9}, "num_chunks": 1}
    predicted = {"s": 2 * (1 + seconds), "nbytes": {"nvme_read": 1e9 * (1 + read), "h2d": 0}, "memory": {"device": 1e9 * (1 + device)}}
    return {"measured": measured, "predicted": predicted | {"num_parameters": 10**8}}


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ([pair_of(0.08)] * 7, 0),
        ([pair_of(0.06)] * 8, 0),
        ([pair_of(-0.08)] * 8, 1),
        ([pair_of()] * 7 + [pair_of(0.16)], 1),
        ([pair_of()] * 7 + [pair_of(read=0.03)], 1),
        ([pair_of()] * 7 + [pair_of(device=-0.04)], 1),
    ],
)
def test_predict_ends_with_status_1_if_predictions_are_wrong(bench, pairs, status):
    """A link that moves few bytes does not count."""
    module = bench("predict")
    found = {str(number): pair for number, pair in enumerate(pairs)}
    assert module.judge(found, {name: module.compare(pair) for name, pair in found.items()}) == status


@pytest.mark.long
def test_predict_measures_and_predicts_rows_of_the_cpu(bench, monkeypatch, tmp_path):
    """The same layout, and the same bytes of links."""
    machine = {"device": "cpu", "device_memory": "6GB", "host_memory": "16GB", "device_tflops": 0.05, "device_update_gparams": 0.5}
    machine |= {"update_gparams": 0.5, "h2d_gbps": 5.0, "d2h_gbps": 5.0, "h2d_all_gbps": 5.0, "d2h_all_gbps": 5.0}
    machine |= {"drives": [{"read_gbps": 1.0, "write_gbps": 1.0, "mixed_gbps": 1.0}]}
    (tmp_path / "machine.toml").write_text(config_files.to_toml({"machine": machine}))
    path, rows = tmp_path / "found.json", ["host", "nvme, clipped"]
    options = ["--nvme", str(tmp_path / "a" / "b"), "--machine", str(tmp_path / "machine.toml"), "--json", str(path), "--only", *rows]
    monkeypatch.setattr(sys, "argv", ["predict.py", *options])
    assert bench("predict").main() == 0  # too few rows for the bars
    found = json.loads(path.read_text())["rows"]
    assert list(found) == rows
    for row in found.values():
        assert row["measured"]["num_chunks"] == row["predicted"]["num_chunks"]
        assert row["predicted"]["nbytes"]["update"] == pytest.approx(row["measured"]["nbytes"]["update"], rel=0.05)


def test_an_error_of_a_process_ends_the_tiling_bench(bench, monkeypatch):
    options = argparse.Namespace(device="cpu", block_mib=4, tokens=8, timeout=60)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "torch.Error: why\n"))
    with pytest.raises(SystemExit, match="^factor 4, hidden 128: exit 1: torch.Error: why$"):
        bench("tiling").in_a_process(options, "4", 128)


def test_a_pipeline_without_lookahead_prefetches_nothing(bench, monkeypatch, tmp_path, one_thread):
    path = tmp_path / "found.json"
    options = ["--batches", "1,2", "--rounds", "1", "--steps", "2", "--nvme", str(tmp_path), "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["prefetch.py", *SMALL, *options])
    bench("prefetch").main()
    found = json.loads(path.read_text())["found"]
    assert list(found) == ["1", "2"]
    for each in found.values():
        assert each["ahead"]["ahead"] > 0.9 and each["ahead"]["on demand"] == 0
        assert [len(block) for way in ("ahead", "on demand") for block in each["seconds"][way]] == [1, 1]


@pytest.mark.slow
def test_shapes_of_finetune_have_the_right_parameters_and_flops(bench):
    pytest.importorskip("transformers")
    module = bench("_shapes")
    sizes = {name: module.size_of(name, 4096) for name in module.SHAPES}
    assert {name: round(size.num_parameters / 1e9, 2) for name, size in sizes.items() if name not in ("tiny", "mixtral7b-leaves")} == {
        "1b": 1.24,
        "3b": 3.21,
        "8b": 8.03,
        "14b": 14.77,
        "22b": 22.25,
        "24b": 23.57,
        "32b": 32.76,
        "70b": 70.55,
        "qwen7b": 7.62,
        "mixtral7b": 7.08,
        "mixtral7b-modules": 7.08,
        "qwen30b": 30.53,
    }
    assert sizes["mixtral7b-modules"] == sizes["mixtral7b"]
    assert round(sizes["mixtral7b"].flops_a_token / 6e9 - 24 * 4096 * 2048 / 1e9, 2) == 2.03  # active parameters without the embedding
    assert sizes["8b"].flops_a_token == 6 * (sizes["8b"].num_parameters - 128256 * 4096) + 6 * 32 * 4096 * 4096
    assert sizes["3b"].flops_a_token == 6 * sizes["3b"].num_parameters + 6 * 28 * 4096 * 3072  # the head is tied to the embedding


def test_a_step_of_finetune_is_cut_into_few_micro_batches(bench):
    module = bench("finetune")
    options = argparse.Namespace(curve=module.tokens_of("4k,16k,64K,151552"), sequence=4096, micro_batch=4)
    cuts = [tuple(module.cut(options, tokens).values()) for tokens in options.curve]
    assert cuts == [(1, 1), (4, 1), (4, 4), (1, 37)]


def test_an_empty_report_is_an_error_that_names_the_full_disk(bench, tmp_path):
    (tmp_path / "rank0").touch()
    assert bench("_common")._left(str(tmp_path), "rank") == {"rank0": {"error": "the disk had no room for a report"}}


@pytest.mark.long
def test_partial_reports_of_a_failed_rank_are_kept(bench, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\nimport _common\n"
        "def work():\n    _common.leave_so_far({'steps': 1})\n    _common.leave_so_far({'steps': 2})\n    raise ValueError('why')\n"
        "_common.leave(work)\n"
    )
    common = bench("_common")
    with pytest.raises(common.RunError, match="^ValueError: why$") as ended:
        common.on_ranks(str(script), [], 2, 60)
    assert ended.value.so_far == [{"steps": 2}, {"steps": 2}]


@pytest.mark.long
def test_finetune_shows_the_partial_result_of_an_ended_run(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, FOLDER / "finetune.py", "--model", "tiny", "--device", "cpu", "--sequence", "32", "--engines", "infinity"]
    command += ["--steps", "1000000", "--nvme", tmp_path]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 100
        while not [*tmp_path.glob("*/so-far0")] and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(3)  # warm-up steps do not count
        process.terminate()
        shown, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert re.search(r"^128 infinity +4 x 1 ", shown, re.M) and "; ended" in shown, shown + errors


@pytest.mark.long
def test_finetune_trains_all_engines_alike_and_lists_failed_ones(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "found.json"
    common = "finetune --model tiny --device cpu --sequence 32 --micro-batch 2 --rounds 1 --steps 4".split()
    common += ["--nvme", tmp_path, "--json", path]
    plot = [] if importlib.util.find_spec("matplotlib") is None else ["--plot", tmp_path / "found.png"]
    done = run(*common, *plot, "--engines", "infinity,fsdp2,plain", "--curve", "32,128")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert [(row["tokens"], row["engine"], len(row["runs"])) for row in found["found"]] == [
        (tokens, engine, 1) for tokens in (32, 128) for engine in ("infinity", "fsdp2", "plain")
    ]
    for row in found["found"]:
        (run_,) = row["runs"]
        assert len(run_["seconds"]) == len(run_["losses"]) == 4 and run_["losses"][-1] < run_["losses"][0] and row["reason"] is None
    assert all((tmp_path / "found.png").stat().st_size > 10_000 for _ in plot)
    assert not list(tmp_path.glob("finetune-*"))

    done = run(*common, "--engines", "infinity,plain", "--device-memory", "1KiB", "--loss-tokens", "0")
    assert done.returncode == 1 and "64 infinity: BudgetError: " in done.stdout, done.stdout + done.stderr
    ours, plain = json.loads(path.read_text())["found"]
    assert not ours["runs"] and ours["reason"].startswith("BudgetError: ") and len(plain["runs"][0]["seconds"]) == 4


@pytest.mark.long
def test_one_owner_and_all_ranks_bring_the_same_gradients_to_the_host(tmp_path):
    path = tmp_path / "found.json"
    done = run("gradients", *SMALL, "--ranks", "2,3", "--rounds", 1, "--steps", 2, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["found"]
    assert list(found) == ["2", "3"]
    for report in found.values():
        assert report["difference"] < 1e-6 and [len(times) for times in report["seconds"].values()] == [1, 1]


@pytest.mark.slow
def test_a_checkpoint_has_the_same_bytes_on_another_number_of_ranks(bench, tmp_path):
    path = tmp_path / "found.json"
    sizes = ["--params", 1e6, "--ranks", 2, "--loads", "1,3", "--device", "cpu"]
    done = run("load_on_other_ranks", *sizes, "--directory", tmp_path, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["differ"] == {"1": 0, "3": 0}
    before, after = found["saved"]["checksums"], found["loaded"]["3"]["checksums"]
    assert {"state", "param_groups"} <= before.pop("optimizer").keys() == after.pop("optimizer").keys()
    assert len(before) > 10 and all(list(segments) == ["weight", "residual", "momentum", "variance"] for segments in before.values())
    name = next(iter(before))
    nbytes = before[name]["weight"][1]
    after[name]["weight"][0] ^= 1
    assert bench("load_on_other_ranks").different_nbytes(before, after) == nbytes
    del after[name]
    assert bench("load_on_other_ranks").different_nbytes(before, after) == sum(nbytes for _, nbytes in before[name].values())


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_others_end(tmp_path):
    path = tmp_path / "found.json"
    done = run("lost_rank", "--ranks", 3, "--faults", "kill", "--device", "cpu", "--directory", tmp_path, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["found"]["kill"]
    assert (found["num_named"], found["end"]) == (2, "all others end") and found["last_s"] < 30
    assert "rank 2 of 3 ended without a word" in found["line"]


@pytest.mark.long
def test_peers_trains_all_engines_alike_and_lists_failed_ones(tmp_path):
    path = tmp_path / "found.json"
    common = ["peers", *SMALL, "--heads", 2, "--rounds", 1, "--steps", 14, "--nvme", tmp_path, "--json", path]
    done = run(*common, "--engines", "infinity,fsdp2,plain")  # with 14 steps, late writes of one step matter little
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
    assert nvme["disk_nbytes"] > 12 * nvme["num_parameters"] and [len(rates) for rates in nvme["drive"]] == [3, 3]
    assert done.stdout.count("the drive alone needs") == 1
    (host,) = rows["host", "fsdp2"]
    assert 4 < host["traffic"][2] < 8 and host["traffic"][3] == 4
    assert not any(rows["device", "plain"][0]["traffic"][2:])

    (tmp_path / "traces").mkdir()
    alone = ["--engines", "infinity", "--places", "nvme"]
    done = run(*common, *alone, "--residency", "weights", "--window", "1MiB", "--trace", tmp_path / "traces")
    assert done.returncode == 0 and "; infinity: residency weights, trace " in done.stdout, done.stdout + done.stderr
    (row,) = json.loads(path.read_text())["found"]
    assert row["runs"][0]["traffic"][1] == pytest.approx(8, rel=0.2)  # momentum and variance
    assert (tmp_path / "traces" / "nvme-0.json").exists()
    done = run(*common, *alone, "--residency", "auto")
    assert done.returncode == 0 and "the drive alone" not in done.stdout, done.stdout + done.stderr
    for wrong in (["--residency", "all"], ["--window", "much"], ["--trace", tmp_path / "nowhere"]):
        done = run(*common, *alone, *wrong)
        assert done.returncode == 2 and not done.stdout, done.stdout + done.stderr

    done = run(*common, "--engines", "infinity,plain", "--places", "device", "--ranks", 2)
    assert done.returncode == 0 and "device  plain: runs on one rank only" in done.stdout, done.stdout + done.stderr

    done = run(*common, "--engines", "infinity,fsdp2", "--places", "device", "--tolerance=-1")
    assert done.returncode == 1 and "up to -1 is allowed" in done.stdout
