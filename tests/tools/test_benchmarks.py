"""benchmarks: tables, files and plots of single links, and refusals."""

import json
import os
import socket

import pytest
from support.helpers import everything_in, start_python, without_gloo

from infinity.tools.cli import main
from infinity.tools.measure import benchmarks, probes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch, one_thread, tmp_path):
    monkeypatch.setattr(probes, "ROUND_NBYTES", MIB)
    monkeypatch.chdir(tmp_path)


def bench(*arguments):
    return main(["bench", *map(str, arguments), "--repeats", "3", "--sizes", "64KiB", "1MiB"])


@pytest.mark.slow
@pytest.mark.parametrize("link", ["nc", "cn", "cg", "gc"])
def test_each_link_is_measured_by_size(paths, tmp_path, link, capsys):
    nvme = ("--swap-dirs", *paths[:2]) if link in ("nc", "cn") else ()
    assert bench(link, "--device", "cpu", *nvme, "--output", "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["link"], report["device"], report["world"]) == (link, "cpu", 1)
    assert [result["chunk_nbytes"] for result in report["sizes"]] == [64 << 10, MIB]
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines() if "iB" in line]
    for row, result in zip(rows, report["sizes"], strict=True):
        gbps = sorted(result["gbps"])
        assert len(gbps) == 3 and gbps[0] > 0
        assert row[-3:] == [f"{value:.2f}" for value in (gbps[1], gbps[0], gbps[2])]
    assert benchmarks.LINKS[link] in shown.out and "all bytes compared" in shown.out
    assert f"{link}: chunks of 1.0 MiB" in shown.err
    assert everything_in(*paths) == []


def test_the_default_directory_is_made_and_removed_again(tmp_path, capsys):
    assert bench("nc", "--device", "cpu") == 0
    assert not (tmp_path / "infinity-swap").exists()
    (tmp_path / "infinity-swap").mkdir()
    assert bench("nc", "--device", "cpu") == 0
    assert (tmp_path / "infinity-swap").is_dir()


def test_each_size_is_measured_once_and_in_order(tmp_path, capsys):
    assert main("bench cg --device cpu --repeats 1 --sizes 64KiB 4KiB 65536 --output report.json".split()) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [result["chunk_nbytes"] for result in report["sizes"]] == [4 << 10, 64 << 10]


def test_a_wrong_byte_prints_one_line_and_leaves_no_files(paths, monkeypatch, capsys):
    real = probes.SwapTransfers.move

    def move(self, round_):
        seconds = real(self, round_)
        self._buffers[2][99] ^= 1
        return seconds

    monkeypatch.setattr(probes.SwapTransfers, "move", move)
    assert bench("nc", "--device", "cpu", "--swap-dirs", paths[0], "--output", "report.json") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("infinity: error:") and "differs from the sent bytes" in error
    assert everything_in(*paths) == [] and not os.path.exists("report.json")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gg"], "run `torchrun --nproc-per-node 2 -m infinity bench gg`"),
        (["rs"], "run `torchrun --nproc-per-node 2 -m infinity bench rs`"),
        (["nc", "--swap-dirs", "nowhere"], "nowhere does not exist; create it"),
        (["cg", "--device", "tpu"], "expected 'cpu', 'cuda' or 'cuda:N'"),
        (["cg", "--output", "no/where.json"], "there is no directory no"),
        (["cg", "--sizes", "1000"], "expected a multiple of 4096"),
        (["cg", "--sizes", "0"], "expected a multiple of 4096"),
        (["cg", "--sizes", "4M"], "expected bytes"),
        (["nc", "--sizes", "4KiB", "8192PiB"], "--sizes 8192.0 PiB: the probe needs 5 chunks, 40960.0 PiB of host memory"),
        (["cg", "--sizes", "192MiB", "--device", "cpu"], "the probe needs 8 chunks, 1.5 GiB of host memory, of which 1.0 GiB are free; give smaller"),
        (["nc", "--swap-dirs", ""], "swap_dirs=['']: a name is empty"),
        (["cg", "--swap-dirs", "here"], "unrecognized arguments: --swap-dirs"),
    ],
)
def test_mistakes_print_one_line(arguments, text, capsys, monkeypatch):
    monkeypatch.setattr(benchmarks, "host_free_nbytes", lambda: 1 << 30)
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and len(error.splitlines()) == 1


@pytest.mark.slow
def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert bench("cg", "--device", "cpu", "--plot", "cg.png") == 0
    assert (tmp_path / "cg.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


RANKS = """
    import os, sys
    import torch
    torch.set_num_threads(1)
    os.environ.update(RANK=sys.argv[1], LOCAL_RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    from infinity.tools.cli import main
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for link in ("gg", "rs", "cg"):
        assert main(["bench", link, "--device", "cpu", "--sizes", "64KiB", "256KiB", "--repeats", "2", "--output", link]) == 0
    dist.destroy_process_group()
"""


@pytest.mark.long
def test_two_ranks_measure_together_and_the_first_one_reports(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start_python(RANKS, rank, port, cwd=tmp_path) for rank in range(2)]
    outputs = []
    for process in ranks:
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        outputs.append(without_gloo(output))
    assert outputs[1] == ""
    assert "2 ranks, bytes received by each" in outputs[0] and "2 ranks, bytes sent by each" in outputs[0]
    for link in ("gg", "rs", "cg"):
        report = json.loads((tmp_path / link).read_text())
        assert report["world"] == 2 and [result["chunk_nbytes"] for result in report["sizes"]] == [64 << 10, 256 << 10]
        assert all(len(result["gbps"]) == 2 and min(result["gbps"]) > 0 for result in report["sizes"])
