"""`infinity calibrate`: the search finds settings as good as those of a full grid. Engines and commands read the written files."""

import json
import math
import os
import random
import signal
import statistics
from dataclasses import replace

import pytest
import torch
from support.helpers import everything_in, start_python

import infinity
from aio_ext import _aio
from infinity import config_files
from infinity.config import Config
from infinity.errors import ConfigError, RenamedWarning
from infinity.system import drives
from infinity.system.drives import Drive
from infinity.tools.cli import main
from infinity.tools.machine import DriveRates, Machine
from infinity.tools.measure import calibration, drive_tuning, figures, link_rates, probes, search, small_steps
from infinity.tools.measure.calibration_report import calibration_warnings
from infinity.tools.measure.figures import Figure, OtherProcesses

MIB = 1 << 20
START = Drive()
GRID = search.grid(START)
TENTH = search.GRID_ROUNDS * len(GRID) // 10


# The search


def around(peak, width):
    """A rate that decreases from one point in every direction."""

    def rate(drive):
        steps = (math.log2(getattr(drive, name) / getattr(peak, name)) for name in search.AXES)
        return 2e9 * math.exp(-width * sum(step * step for step in steps))

    return rate


def saturating(drive):
    """More bytes in the kernel are faster. Small blocks and many queues cost a little."""
    in_kernel = 1 - math.exp(-drive.inflight_nbytes / (4 * MIB))
    return 2e9 * in_kernel * (1 - 0.15 * (256 << 10) / drive.block_nbytes) / (1 + 0.02 * (drive.num_queues - 1))


def ridge(drive):
    """The rate depends only on the number of blocks per queue in the kernel."""
    blocks = drive.inflight_nbytes / drive.num_queues / drive.block_nbytes
    return 2e9 * math.exp(-0.05 * (math.log2(blocks) - 3) ** 2)


def searched(rate, noise=0.0, seed=0):
    """(rate of the found settings / best rate of the grid, number of measurements)."""
    generator, asked = random.Random(seed), []

    def measured(drive):
        asked.append(drive)
        return rate(drive) * math.exp(generator.gauss(0, noise))

    found = search.search(START, measured)
    assert set(asked) <= set(GRID)
    return rate(found) / max(map(rate, GRID)), len(asked)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("width", [0.002, 0.05, 0.2])
def test_the_search_finds_any_peak_within_1_percent_and_few_measurements(width):
    for peak in GRID:
        share, number = searched(around(peak, width))
        assert share >= 0.99 and number <= TENTH, (peak, share, number)


@pytest.mark.parametrize("rate", [saturating, ridge])
def test_the_search_finds_the_best_settings_of_other_shapes(rate):
    share, number = searched(rate)
    assert share >= 0.99 and number <= TENTH


def test_settings_stay_if_all_rates_are_equal():
    assert search.search(START, lambda drive: 1e9) == START


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("noise", "least"),
    [(0.01, 0.95), (0.03, 0.6)],
)
def test_noise_worsens_the_search_only_a_little(noise, least):
    """`least` is the share of 126 searches with a result within 1 %. `noise` is the deviation of a measurement."""
    for rates in ([around(peak, 0.05) for peak in GRID], [saturating] * len(GRID)):
        shares, numbers = zip(*(searched(rate, noise, seed) for seed, rate in enumerate(rates)))
        assert max(numbers) <= TENTH
        assert statistics.fmean(share >= 0.99 for share in shares) >= least
        assert statistics.fmean(shares) >= 1 - noise


def grids_choice(rate, noise, seed):
    generator = random.Random(seed)
    passes = [[rate(point) * math.exp(generator.gauss(0, noise)) for point in GRID] for _ in range(search.GRID_ROUNDS)]
    medians = [statistics.median(each) for each in zip(*passes)]
    return rate(GRID[medians.index(max(medians))]) / max(map(rate, GRID))


@pytest.mark.long
@pytest.mark.parametrize("rate", [saturating, ridge, around(GRID[60], 0.05), around(GRID[20], 0.2)], ids=range(4))
def test_with_noise_the_search_is_as_good_as_the_grid_itself(rate):
    for noise in (0.01, 0.03):
        ours = statistics.fmean(searched(rate, noise, seed)[0] for seed in range(40))
        assert ours >= statistics.fmean(grids_choice(rate, noise, seed) for seed in range(40)) - 0.01


def test_engines_accept_every_setting_of_the_search(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    for point in GRID[::5]:
        with point.queue() as queue:
            assert queue.block_nbytes == point.block_nbytes
            assert queue.inflight_nbytes == point.inflight_nbytes // point.num_queues >= 2 * point.block_nbytes
    for point in (GRID[0], GRID[-1]):
        chosen = point.measured(1.25e9, 0.001)
        drives.store(fd, chosen)
        assert drives.load(fd) == chosen and chosen.depth >= chosen.inflight_nbytes // chosen.block_nbytes
    os.close(fd)


# The command

SMALL = """
    from infinity.system import drives
    from infinity.tools.measure import probes
    from infinity.tools.measure import search
    from infinity.tools.measure import drive_tuning, figures, link_rates
    import torch
    torch.set_num_threads(1)
    drives._SECONDS = 0.001
    probes.ROUND_NBYTES, probes.UPDATE_NUMEL = 1 << 20, 1 << 16
    probes.CPU_BLOCK, probes.UPDATE_RECORDS = (64, 2, 1, 16), 4
    drive_tuning.MOST_NBYTES, link_rates.LINK_NBYTES = drive_tuning.LEAST_NBYTES, 1 << 20
    figures.NUM_ROUNDS = figures.MOST_ROUNDS = 1
"""


@pytest.fixture
def small(monkeypatch, one_thread):
    monkeypatch.setattr(drives, "_SECONDS", 0.001)
    monkeypatch.setattr(drives, "_WRITES_NBYTES", [2 * MIB, 4 * MIB])
    monkeypatch.setattr(probes, "ROUND_NBYTES", MIB)
    monkeypatch.setattr(probes, "UPDATE_NUMEL", 1 << 16)
    monkeypatch.setattr(probes, "CPU_BLOCK", (64, 2, 1, 16))
    monkeypatch.setattr(probes, "UPDATE_RECORDS", 4)
    monkeypatch.setattr(drive_tuning, "MOST_NBYTES", drive_tuning.LEAST_NBYTES)
    monkeypatch.setattr(link_rates, "LINK_NBYTES", MIB)
    monkeypatch.setattr(figures, "NUM_ROUNDS", 1)  # every figure repeats
    monkeypatch.setattr(figures, "MOST_ROUNDS", 1)
    monkeypatch.setattr(figures, "LEAST_SECONDS", math.inf)  # even an overhead of 0 repeats
    monkeypatch.setattr(search, "AXES", {"inflight_nbytes": [8 * MIB, 12 * MIB], "block_nbytes": [512 << 10, MIB], "num_queues": [1, 2]})
    monkeypatch.setattr(search, "GRID_ROUNDS", 25)


def tune(*arguments):
    return main(["calibrate", "--device", "cpu", *map(str, arguments)])


@pytest.mark.long
def test_engines_and_plan_read_the_measured_values(paths, tmp_path, small, monkeypatch, capsys):
    chosen, rates, find = [], {}, search.search

    def other_for_each_path(start, rate):
        chosen.append(replace(find(start, rate), num_queues=2 + len(chosen)))
        return chosen[-1]

    monkeypatch.setattr(search, "search", other_for_each_path)
    for name in ("memory_rate", "update_rate", "product_rate", "copy_seconds"):
        real = getattr(probes, name)
        monkeypatch.setattr(probes, name, lambda *a, real=real, name=name, **options: rates.setdefault(name, real(*a, **options)))
    output = tmp_path / "infinity.toml"
    assert tune(*paths[:2], "--output", output) == 0

    stored = [Drive(**json.loads((path / drives.CACHE_NAME).read_text())["drive"]) for path in paths[:2]]
    for drive, search_result in zip(stored, chosen):
        assert replace(drive, depth=64, nbytes_per_s=0.0, block_s=0.0) == search_result
    machine = Machine.load(output)
    assert (machine.devices, machine.device, machine.nodes) == (1, "cpu", 1)
    expected = {"host_gbps": ("memory_rate", 1e9), "update_gparams": ("update_rate", 1e9), "device_tflops": ("product_rate", 1e12)}
    expected["copy_latency_us"] = ("copy_seconds", 1e-6)
    for field, (name, unit) in expected.items():
        assert getattr(machine, field) == float(f"{rates[name] / unit:.4g}") > 0
    assert [drive.path for drive in machine.drives] == [str(path) for path in paths[:2]]
    for drive in machine.drives:
        assert min(drive.read_gbps, drive.write_gbps, drive.mixed_gbps, drive.capacity) > 0
    assert Machine.from_table(config_files.read(output)["machine"]) == machine

    shown = capsys.readouterr().out
    (tokens,) = [line for line in shown.splitlines() if line.startswith("tokens per step of a GPT with all states on NVMe: ")]
    sizes = "--hidden 2048 --layers 8 --heads 16 --vocab 256 --seq 1024 --batch 1 --set param_tier=nvme --set optimizer_state_tier=nvme --set residency=none"
    assert main(["plan", "--machine", str(output), *sizes.split()]) == 0
    (planned,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens ")]
    assert tokens.partition(": ")[2] == planned.removeprefix("tokens    ") and "tokens per step and device" in planned

    config = Config.load(output, device="cpu", param_tier="nvme", optimizer_state_tier="nvme", residency="none", host_memory="64MiB", chunk_mib=1 / 8)
    assert config.swap_dirs == tuple(paths[:2])
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    with infinity.offload(model, config) as engine:
        infinity.AdamW(model.parameters())
        model(torch.zeros(1, 256, dtype=torch.bfloat16))
        directories = engine.swap._directories
        assert [directory.drive for directory in directories] == stored
        for directory, drive in zip(directories, stored):
            assert len(directory.queues) == drive.num_queues
            for queue in directory.queues:
                assert (queue.block_nbytes, queue.depth) == (drive.block_nbytes, drive.depth)
                assert queue.inflight_nbytes == max(2 * drive.block_nbytes, drive.inflight_nbytes // drive.num_queues)
    assert everything_in(*paths) == [drives.CACHE_NAME] * 2

    assert f"{paths[0]}: settings around the chosen ones" in shown and "all at once" in shown and str(output) in shown


@pytest.mark.long
def test_other_values_of_the_file_stay(paths, tmp_path, small, capsys):
    output = tmp_path / "mine.toml"
    machine = {
        "name": "tiny", "nodes": 3, "network_gbps": 50.0, "chunk_overhead_us": 7.0, "device_memory": 1024, "device_tflops": 1.0,
        "device_update_gparams": 1.0, "host_memory": 1024, "host_gbps": 1e6, "update_gparams": 1e6, "h2d_gbps": 1.0, "d2h_gbps": 1.0,
        "h2d_all_gbps": 1.0, "d2h_all_gbps": 1.0,
        "drives": [{"path": str(paths[0]), "read_gbps": 1.0, "write_gbps": 1.0, "mixed_gbps": 1.0, "endurance": 9999}],
    }  # fmt: skip
    output.write_text(config_files.to_toml({"config": {"dtype": "fp32", "swap_dirs": ["elsewhere"]}, "plan": {"hidden": 8}, "machine": machine}))
    assert tune(paths[0], "--output", output, "--json") == 0
    report = json.loads(capsys.readouterr().out)  # standard output has only JSON
    content = config_files.read(output)
    assert report["output"] == str(output) and Machine.from_table(report["machine"]) == Machine.load(output)
    assert [drive["path"] for drive in report["drives"]] == [str(paths[0])] and report["drives"][0]["alone"]["read"] > 0
    assert content["config"] == {"dtype": "fp32", "swap_dirs": [str(paths[0])]} and content["plan"] == {"hidden": 8}
    found = Machine.load(output)
    assert (found.name, found.nodes, found.network_gbps) == ("tiny", 3, 50.0)
    assert found.drives[0].endurance == 9999 and found.host_gbps < 1e6 and found.host_memory > 1


@pytest.mark.long
def test_old_names_in_the_file_are_replaced_by_new_ones(paths, tmp_path, small):
    output = tmp_path / "mine.toml"
    output.write_text('[config]\nnvme = "elsewhere"\nseed = 1\n')
    with pytest.warns(RenamedWarning, match="nvme is deprecated: use swap_dirs"):
        assert tune(paths[0], "--output", output) == 0
    assert config_files.read(output)["config"] == {"swap_dirs": [str(paths[0])], "seed": 1}


def test_a_file_with_both_names_of_a_setting_is_refused_at_once(paths, tmp_path, capsys):
    output = tmp_path / "mine.toml"
    output.write_text('[config]\nnvme = "here"\nswap_dirs = "there"\n')
    assert tune(paths[0], "--output", output) == 2
    assert "nvme and swap_dirs are one setting: give swap_dirs alone" in capsys.readouterr().err


# Figures that do not repeat


@pytest.mark.parametrize(
    "values, is_time, repeats",
    [
        ((2e9, 2.05e9, 1.97e9), False, True),
        ((2e9, 2.2e9, 2.1e9), False, False),
        ((2e9, 2.2e9, 2.1e9, 2.1e9, 2.05e9), False, True),
        ((1e9, 2e9, 2.01e9, 2.02e9, 2.03e9, 2.04e9, 9e9), False, True),
        ((1e9, 1e9, 2.01e9, 2.02e9, 2.03e9, 2.04e9, 9e9), False, False),
        ((0.15e12, 0.0043e12, 0.15e12), False, False),
        ((0.0, 2e9, 2e9), False, False),
        ((0.0, 0.0, 0.0), False, False),
        ((1e-6, 9e-6, 15e-6), True, True),
        ((0.0, 0.0, 19e-6), True, True),
        ((300e-6, 310e-6, 305e-6), True, True),
        ((300e-6, 400e-6, 350e-6), True, False),
        ((11840e-6, 0.0, 300e-6), True, False),
        ((-4000e-6, -20e-6, -900e-6), True, False),
        ((-6e-6, -1e-6, 2e-6), True, True),
    ],
)
def test_a_figure_repeats_if_its_rounds_lie_close_together(values, is_time, repeats):
    figure = Figure(values, is_time)
    assert figure.repeats == repeats
    assert figure.written(1.0) == max(0.0, statistics.median(values))


def test_only_figures_that_do_not_repeat_are_measured_again():
    values = {"steady": [2.0] * 3, "settles": [1.0, 2.0, 3.0, 2.0, 2.01], "wild": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}
    given = {name: iter(each) for name, each in values.items()}
    asked = []

    def measure(name, number):
        asked.append((number, name))
        return [next(given[name]), 5.0]

    found = figures.in_rounds(values, measure)
    assert {name: list(each.values) for name, (each, _) in found.items()} == values
    assert [each.repeats for each, _ in found.values()] == [True, True, False] and all(other.repeats for _, other in found.values())
    assert asked[:6] == [(number, name) for number in range(2) for name in values]  # one round after the other


def slowed(real, by):
    """A measurement on a busy machine: divides the rate of every second call."""
    calls = iter(range(10**6))
    return lambda *arguments, **options: real(*arguments, **options) / (by if next(calls) % 2 else 1)


@pytest.mark.slow
def test_a_figure_that_does_not_repeat_is_written_and_named(paths, tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(figures, "NUM_ROUNDS", 2)
    monkeypatch.setattr(figures, "MOST_ROUNDS", 2)
    monkeypatch.setattr(figures, "NUM_REPEATS", 1)
    monkeypatch.setattr(figures, "LEAST_SECONDS", 20e-6)
    monkeypatch.setattr(figures, "MOST_SPREAD", 1.9)
    monkeypatch.setattr(calibration, "is_busy", lambda num_busy: False)
    monkeypatch.setattr(probes, "product_rate", slowed(probes.product_rate, 1e6))
    monkeypatch.setattr(small_steps, "op_seconds", slowed(lambda device: 500.0, 1e6))
    monkeypatch.setattr(drive_tuning, "_median_rate", slowed(drive_tuning._median_rate, 1e6))  # each of three mixes is slow in one round
    output = tmp_path / "infinity.toml"
    assert tune(paths[0], "--output", output) == 0
    shown = capsys.readouterr()
    for name in ("products", "overhead of an op", f"{paths[0]}, write"):
        (line,) = [line for line in shown.err.splitlines() if line.startswith(f"infinity: warning: {name}: ")]
        assert " in 2 rounds: the values differ by more than " in line
    assert "infinity: warning: run calibrate again when no other program runs on this machine" in shown.err
    written = config_files.read(output)["machine"]
    assert {"device_tflops", "op_overhead_us"} <= set(written["unsure"]) and "write_gbps" in written["drives"][0]["unsure"]
    assert written["device_tflops"] > 0 and written["drives"][0]["write_gbps"] > 0

    machine = Machine.load(output)
    assert f"write_gbps of {paths[0]}" in machine.unsure_names and Machine.from_table(machine.to_table()) == machine
    assert main(["plan", "--machine", str(output), "--params", "1M", "--batch", "1"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unsure ")]
    assert "device_tflops" in line and f"write_gbps of {paths[0]}" in line
    assert Config.load(output).swap_dirs == (paths[0],)


def test_a_sure_value_of_the_file_stays_before_an_unsure_one():
    names = ("memory", "update", "product", "h2d", "d2h", "copy_s", "op_s")
    links = {name: Figure((3e9, 3e9, 3e9)) for name in names} | {"product": Figure((1e9, 9e9, 5e9))}
    cpu = torch.device("cpu")
    found = calibration._machine(cpu, 1, [], links, None)
    assert found.unsure == ("device_tflops",) and found.device_tflops == 0.005
    known = Machine(device="cpu", device_memory=1024, host_memory=1024, device_tflops=0.7, update_gparams=0.7)
    found = calibration._machine(cpu, 1, [], links, known)
    assert (found.device_tflops, found.update_gparams, found.unsure) == (0.7, 3.0, ())
    unsure = replace(known, unsure=("device_tflops", "update_gparams"))
    found = calibration._machine(cpu, 1, [], links, unsure)
    assert (found.device_tflops, found.update_gparams, found.unsure) == (0.005, 3.0, ("device_tflops",))
    assert calibration._machine(cpu, 1, [], links, replace(known, device="cuda")).device_tflops == 0.005
    found = calibration._machine(cpu, 1, [], links, None, is_busy=True)
    assert {"device_tflops", "update_gparams", "h2d_gbps", "op_overhead_us"} <= set(found.unsure)
    assert calibration._machine(cpu, 1, [], links, known, is_busy=True).update_gparams == 0.7


def test_values_that_are_not_measured_stay():
    names = ("memory", "update", "product", "h2d", "d2h", "copy_s", "op_s")
    links = {name: Figure((3e9, 3e9, 3e9)) for name in names}
    known = Machine(device="cpu", device_memory=1024, host_memory=1024, attention_tflops=0.5, device_gbps=12, unsure=("attention_tflops",))
    found = calibration._machine(torch.device("cpu"), 1, [], links, known)
    assert (found.attention_tflops, found.device_gbps, found.unsure) == (0.5, 12, ("attention_tflops",))


def test_a_sure_value_of_other_devices_or_drives_does_not_stay(paths):
    names = ("memory", "update", "product", "h2d", "d2h", "copy_s", "op_s", "d2h_all", "gather", "gather_s")
    links = {name: Figure((3e9, 3e9, 3e9)) for name in names} | {"h2d_all": Figure((4e9, 5e9, 6e9))}
    one = Machine(device="cpu", device_memory=1024, host_memory=1024, h2d_all_gbps=50.0, drives=(DriveRates(path=str(paths[0]), mixed_gbps=6.0),))
    found = calibration._machine(torch.device("cpu"), 2, [], links, one)
    assert (found.h2d_all_gbps, found.unsure) == (5.0, ("h2d_all_gbps",))
    varying = dict.fromkeys(drives.MIXES, Figure((1e9, 2e9, 3e9)))
    tuned = [drive_tuning.TunedDrive(path, None, alone=varying, together=varying) for path in paths[:2]]
    for count, rate in ((1, 6.0), (2, 2.0)):  # measured alone before, and now with another drive
        assert calibration._machine(torch.device("cpu"), 1, tuned[:count], links, one).drives[0].mixed_gbps == rate


@pytest.mark.parametrize("names", ["device_tflops", [3], ["tflops"], ["devices"], ["read_gbps"], [["h2d_gbps"]], [{}]])
def test_unsure_names_are_names_of_figures(names):
    with pytest.raises(ConfigError, match="unsure: expected a list with names of device_tflops, "):
        Machine(device_memory=1024, host_memory=1024, unsure=names)


def test_warnings_name_directories_on_one_drive_and_slow_ones(paths):
    found = []
    for path, rate in zip(paths, (1e9, 0.2e9)):
        figures_of_mixes = dict.fromkeys(drives.MIXES, Figure((rate, rate, rate)))
        found.append(drive_tuning.TunedDrive(path, None, alone=figures_of_mixes, together=figures_of_mixes))
    one_drive, slow = calibration_warnings(Machine(device_memory=1024, host_memory=1024), found, {}, 0.0)
    assert one_drive.startswith(f"swap directories {paths[0]} and {paths[1]} lie on one ")
    assert slow.startswith(f"swap directory {paths[1]} is slow: 200 MB/s, and {paths[0]} reaches 1,000 MB/s. It gets 17% of the bytes; ")


def test_cores_of_other_busy_processes_are_counted():
    source = "import time; print(flush=True); end = time.monotonic() + 0.3\nwhile time.monotonic() < end: pass"
    with start_python(source) as process:
        process.stdout.readline()
        others = OtherProcesses()
        process.wait(timeout=60)
        assert others.num_cores() > 0.1
    machine = Machine(device_memory=1024, host_memory=1024, unsure=("h2d_gbps",))
    (line, names, advice) = calibration_warnings(machine, [], {}, len(os.sched_getaffinity(0)) / 2)
    assert "other processes kept" in line and names == "written as unsure: h2d_gbps" and "run calibrate again" in advice
    assert calibration_warnings(replace(machine, unsure=()), [], {}, 0.0) == []


def test_mistakes_are_refused_before_anything_is_measured(paths, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drives, "Probe", None)
    bad, odd = tmp_path / "bad.toml", tmp_path / "odd.toml"
    bad.write_text("[machine]\ndevices = 'many'\ndevice_memory = 1\nhost_memory = 1\n")
    odd.write_text("config = 3\n")
    cases = [
        ([paths[0] / "none"], "does not exist; create it"),
        ([paths[0], paths[0]], "are one directory"),
        ([paths[0], "--output", tmp_path / "none" / "f.toml"], "there is no directory"),
        ([paths[0], "--output", bad], "devices='many'"),
        ([paths[0], "--output", odd], "expected a table"),
    ]
    for arguments, text in cases:
        assert tune(*arguments) == 2
        error = capsys.readouterr().err
        assert text in error and len(error.splitlines()) == 1, error
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert tune(paths[0], "--output", tmp_path / "f.toml") == 2
    assert "one node" in capsys.readouterr().err and everything_in(*paths) == []


def test_a_full_disk_is_refused(paths, tmp_path, monkeypatch, capsys):
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real(path)[:4], 1000, *real(path)[5:10])))
    assert tune(paths[0], "--output", tmp_path / "f.toml") == 2
    assert f"{paths[0]}: calibrate needs 512.0 MiB of free space" in capsys.readouterr().err
    assert everything_in(*paths) == [] and not (tmp_path / "f.toml").exists()


def test_a_failed_drive_is_named_and_no_file_stays(paths, tmp_path, small, capsys):
    _aio._inject("read", 40, 1, -5)
    assert tune(paths[0], "--output", tmp_path / "f.toml") == 2
    error = capsys.readouterr().err
    assert "measuring failed" in error and str(paths[0]) in error
    assert everything_in(*paths) == [] and not (tmp_path / "f.toml").exists()


@pytest.mark.long
def test_an_interrupt_leaves_existing_files_unchanged(paths, tmp_path):
    output, cache = tmp_path / "f.toml", paths[0] / drives.CACHE_NAME
    output.write_text("[config]\nseed = 3\n")
    cache.write_text("{}")
    source = SMALL + """
    import sys
    from infinity.tools.cli import main
    sys.exit(main(["calibrate", "--device", "cpu", sys.argv[1], "--output", sys.argv[2]]))
    """
    with start_python(source, paths[0], output) as process:
        for line in process.stderr:
            if "settings" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in errors
    assert everything_in(paths[0]) == [drives.CACHE_NAME] and cache.read_text() == "{}"
    assert output.read_text() == "[config]\nseed = 3\n"


@pytest.mark.long
def test_a_filesystem_in_memory_is_measured_with_a_warning(tmp_path, small, capsys):
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no tmpfs here")
    folder = f"/dev/shm/infinity-test-{os.getpid()}"
    os.mkdir(folder)
    try:
        assert tune(folder, "--output", tmp_path / "f.toml") == 0
        assert "keeps files in memory" in capsys.readouterr().err
        assert os.listdir(folder) == [drives.CACHE_NAME]
    finally:
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)
