"""The `bench overlap` command: arithmetic, table, and real passes whose bytes are compared."""

import argparse
import json
import math
import subprocess
import sys

import pytest
import torch
from support.helpers import memory

from infinity.errors import ConfigError, SwapError
from infinity.plan.record import WEIGHTS
from infinity.system.events import Events, now
from infinity.tools.cli import main
from infinity.tools.measure import overlap
from infinity.tools.measure.balanced_stages import Pace
from infinity.tools.measure.overlap_bench import Bench, efficiency

LAYERS, CHUNK_MIB = 5, 0.25
PASS_NBYTES = LAYERS * 2**18


@pytest.fixture
def make_bench(tmp_path):
    def make(**changes):
        options = {"swap_dirs": [tmp_path], "layers": LAYERS, "compute_ms": None, "balance": True} | changes
        return Bench(argparse.Namespace(**options), torch.device("cpu"), CHUNK_MIB, 1)

    return make


@pytest.mark.parametrize(
    "stages, pipelined, expected",
    [
        ([1.0, 1.0, 1.0], 1.0, 1.0),  # as long as the longest stage
        ([1.0, 1.0, 1.0], 3.0, 0.0),  # serial
        ([1.0, 1.0, 1.0], 1.5, 0.75),
        ([4.0, 1.0], 4.5, 0.5),
        ([4.0, 1.0], 6.0, -1.0),  # slower than serial
    ],
)
def test_efficiency_is_the_hidden_share_of_the_time_that_could_be_hidden(stages, pipelined, expected):
    assert efficiency(stages, pipelined) == expected


def test_a_single_stage_has_no_efficiency():
    assert math.isnan(efficiency([1.0, 0.0], 1.0))


def test_the_table_has_the_fastest_stages_and_the_median_pass_per_layer():
    row = {
        "chunk_mib": 16.0,
        "depth": 4,
        "stages": {"nvme_read": [0.2, 0.4, 0.3], "h2d": [0.1, 0.1, 0.1], "compute": [0.3, 0.35, 0.3]},
        "pipelined": [0.35, 0.5, 0.4],
        "efficiency": [0.8125, 0.375, 0.625],
    }
    report = {"device": "cpu", "world": 1, "layers": 10, "repeats": 3, "balanced": True, "rows": [row]}
    assert overlap.text(report).splitlines() == [
        "passes over 10 layers, all weights from NVMe, 1 rank on cpu, all stages extended to one time",
        "ms per layer; stages alone: fastest of 3, pipelined: median (lowest-highest); all bytes of a pass were compared",
        "",
        "chunk   ahead  nvme_read    h2d  compute  serial  longest  pipelined                 efficiency",
        "16 MiB      4      20.00  10.00    30.00   60.00    30.00      40.00  (35.00-50.00)        0.62  (0.38-0.81)",
    ]


@pytest.mark.parametrize("efficiencies, noisy", [([1.8, 0.9, 0.9], True), ([-1.6, 0.2, 0.3], True), ([1.02, -0.01, 0.5], False), ([math.nan], False)])
def test_efficiencies_below_0_or_above_1_are_called_noise(efficiencies, noisy):
    row = {"chunk_mib": 16.0, "depth": 4, "stages": {"nvme_read": [0.2], "compute": [0.3]}, "pipelined": [0.35], "efficiency": efficiencies}
    report = {"device": "cpu", "world": 1, "layers": 10, "repeats": 3, "balanced": False, "rows": [row]}
    assert ("efficiencies outside 0 to 1 are noise" in overlap.text(report)) == noisy == (overlap.hint_of([row]) is not None)


def test_a_lengthened_copy_counts_its_new_length_and_a_read_its_own():
    pace, events = Pace(), Events(tracing=True)
    pace.seconds, events.before_end = 0.02, pace.end_of
    start = now()
    events.moved("nvme_read", 0, 8, start, start + 0.001)
    events.moved("h2d", 0, 8, start, start + 0.001)
    read, copy = events.trace
    assert read.end == start + 0.001 and copy.end >= start + 0.02
    assert events.meters["h2d"].busy_seconds == copy.end - start


@pytest.mark.slow
def test_the_remedy_for_noise_brings_efficiencies_between_0_and_1(tmp_path, capsys):
    options = f"--swap-dirs {tmp_path} --balance --chunk-mib 1 --layers 8 --depth 4 --repeats 3 --device cpu --compute-ms 40"
    assert main(["bench", "overlap", *options.split()]) == 0
    assert "noise" not in capsys.readouterr().out


def test_a_pass_and_its_single_stages_move_the_same_bytes(make_bench):
    with make_bench() as bench:
        moved = lambda: (bench.engine.swap.read_nbytes, bench.engine.events.meters["h2d"].nbytes)  # noqa: E731
        before = moved()
        bench.run()
        after_pass = moved()
        seconds = bench.alone()
        after_stages = moved()
    assert [after - b for after, b in zip(after_pass, before)] == [PASS_NBYTES, PASS_NBYTES]
    assert [after - b for after, b in zip(after_stages, after_pass)] == [PASS_NBYTES, PASS_NBYTES]
    assert list(seconds) == ["nvme_read", "h2d", "compute"]


def test_the_plan_of_a_measurement_reads_ahead_by_the_given_depth(make_bench):
    with make_bench() as bench:
        for depth, reads in ((2, 2), (4, 4)):
            bench.measure(depth, repeats=1)
            first_op = bench.engine.course.route.runs[0]
            issued = [type(action).__name__ for action in bench.engine.course.route.actions[:first_op]]
            assert issued.count("Read") == reads and issued.count("Copy") == 2, issued


def test_balanced_stages_have_the_given_length_and_compute_follows_copies(make_bench):
    with make_bench(compute_ms=30.0) as bench:
        bars = bench.measure(4, repeats=1)["bars"]
    assert {stage: len(found) for stage, found in bars.items()} == {"nvme_read": LAYERS, "h2d": LAYERS, "compute": LAYERS}
    assert all(end - start >= 30e-3 for stage in ("h2d", "compute") for start, end in bars[stage])
    assert bars["nvme_read"][-1][1] >= LAYERS * 30e-3
    assert all(copy[1] <= op[0] for copy, op in zip(bars["h2d"], bars["compute"]))


@pytest.mark.parametrize(
    "balance, message",
    [
        (True, r"--compute-ms 1e-06 with --balance: (nvme_read|h2d|compute) takes \S+ ms per layer, with chunks of 0.25 MiB; give that"),
        (False, r"--compute-ms 1e-06: comparing bytes takes \S+ ms per layer, with chunks of 0.25 MiB; give that"),
    ],
)
def test_a_compute_time_below_the_real_one_is_refused(make_bench, tmp_path, balance, message):
    with pytest.raises(ConfigError, match=message):
        make_bench(compute_ms=1e-6, balance=balance).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_layers_beyond_host_memory_are_refused_before_they_are_made(monkeypatch, capsys):
    monkeypatch.setattr(overlap, "host_free_nbytes", lambda: 6 << 20)
    options = ["--device", "cpu", "--chunk-mib", "0.5", "2", "--layers", "4", "--output", "o.json"]
    assert main(["bench", "overlap", *options]) == 2
    assert capsys.readouterr().err == (
        "infinity: error: --chunk-mib 2: 4 layers and their expected values take 10.0 MiB of host memory, of which 6.0 MiB are "
        "free; lower --layers or --chunk-mib\n"
    )


def test_a_changed_byte_on_the_drive_is_found(make_bench):
    with make_bench() as bench:
        bench.run()
        extent = bench.engine.registry.chunks[3].extents[WEIGHTS].extent
        content = memory(extent.nbytes)
        bench.engine.swap.read(extent, content).wait()
        content[70_001] ^= 1
        bench.engine.swap.write(extent, content).wait()
        with pytest.raises(SwapError, match=r"layer 3 of 5 found 1 wrong words of 8 bytes"):
            bench.run()


def test_the_command_writes_the_report_that_it_prints(tmp_path, capsys):
    sizes = ["--chunk-mib", "0.125", str(CHUNK_MIB), "--depth", "2", "4", "--layers", str(LAYERS), "--repeats", "3"]
    assert main(["bench", "overlap", "--swap-dirs", str(tmp_path), "--device", "cpu", *sizes, "--output", str(tmp_path / "o.json")]) == 0
    report = json.loads((tmp_path / "o.json").read_text())
    assert overlap.text(report) in capsys.readouterr().out and report["hint"] == overlap.hint_of(report["rows"])
    assert [(row["chunk_mib"], row["depth"]) for row in report["rows"]] == [(0.125, 2), (0.125, 4), (CHUNK_MIB, 2), (CHUNK_MIB, 4)]
    for row in report["rows"]:
        assert [len(found) for found in (*row["stages"].values(), row["pipelined"])] == [3, 3, 3, 3]
        fastest = [min(seconds) for seconds in row["stages"].values()]
        assert row["compute_ms"] == 1e3 * fastest[-1] / LAYERS
        assert row["efficiency"] == [efficiency(fastest, seconds) for seconds in row["pipelined"]]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_the_title_of_the_plot_warns_of_noise(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    titles, title = [], figure.Figure.suptitle
    monkeypatch.setattr(figure.Figure, "suptitle", lambda self, text, **how: titles.append(text) or title(self, text, **how))
    for efficiency in (0.5, 1.8):
        row = {"chunk_mib": 1.0, "depth": 4, "stages": {"nvme_read": [0.2], "compute": [0.3]}, "pipelined": [0.35], "efficiency": [efficiency]}
        row["bars"] = {"nvme_read": [(0.0, 0.2)], "compute": [(0.2, 0.5)]}
        overlap.draw({"layers": 4, "hint": overlap.hint_of([row]), "rows": [row]}, tmp_path / "o.png")
    assert [" ".join(text.split()) for text in titles] == [overlap.hint_of([row])]


@pytest.mark.slow
def test_the_plot_is_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    options = ["--swap-dirs", str(tmp_path), "--device", "cpu", "--chunk-mib", "0.125", "--depth", "2", "--layers", "3", "--repeats", "1"]
    assert main(["bench", "overlap", *options, "--plot", str(tmp_path / "o.png")]) == 0
    assert (tmp_path / "o.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--depth", "4", "1"], "--depth 1: copies run two layers ahead, and reads run before copies; give 2 at least"),
        (["--layers", "65"], "--layers 65: the bench measures each stage alone with all layers in host memory; give 64 at most"),
    ],
)
def test_impossible_measurements_are_refused_in_one_line(options, message, capsys):
    assert main(["bench", "overlap", "--device", "cpu", *options]) == 2
    assert capsys.readouterr().err == f"infinity: error: {message}\n"


@pytest.mark.long
def test_all_gather_is_a_stage_with_two_ranks(tmp_path):
    options = ["--swap-dirs", tmp_path, "--device", "cpu", "--chunk-mib", "0.25", "--depth", "4", "--layers", "6", "--repeats", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "infinity", "bench", "overlap"]
    command = [*launcher, *options, "--balance", "--output", tmp_path / "o.json"]
    subprocess.run([str(word) for word in command], check=True, timeout=240)
    report = json.loads((tmp_path / "o.json").read_text())
    assert report["world"] == 2 and list(report["rows"][0]["stages"]) == ["nvme_read", "h2d", "all_gather", "compute"]
    assert [len(found) for found in report["rows"][0]["bars"].values()] == [6, 6, 6, 6]
