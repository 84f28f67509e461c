"""probes: moved bytes are counted and compared. A wrong byte is found."""

import contextlib
import os
import socket

import pytest
import torch
from support.helpers import everything_in, on_gpu, start_python, without_gloo

from infinity.errors import ConfigError, SwapError
from infinity.system import drives
from infinity.tools.measure import gpu_rates, probes, small_steps

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch, one_thread):
    monkeypatch.setattr(probes, "ROUND_NBYTES", MIB)
    monkeypatch.setattr(probes, "UPDATE_NUMEL", 1 << 16)
    monkeypatch.setattr(probes, "CPU_BLOCK", (64, 2, 1, 16))
    monkeypatch.setattr(probes, "UPDATE_RECORDS", 4)
    monkeypatch.setattr(gpu_rates, "TOKENS", 64)
    monkeypatch.setattr(gpu_rates, "SIZES", (64, 128))
    monkeypatch.setattr(gpu_rates, "ATTENTION", (1, 2, 64, 32))
    monkeypatch.setattr(gpu_rates, "MEMORY_NBYTES", MIB)
    monkeypatch.setattr(gpu_rates, "SUSTAINED_S", 0.01)


def flip_a_byte(file, offset=5):
    with open(file, "r+b", buffering=0) as opened:
        byte = os.pread(opened.fileno(), 1, offset)
        os.pwrite(opened.fileno(), bytes([byte[0] ^ 1]), offset)
        os.fsync(opened.fileno())


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("nbytes", [4096, 256 << 10, MIB])
def test_transfers_to_and_from_nvme_use_swap_files_and_are_compared(paths, write, nbytes):
    with contextlib.closing(probes.SwapTransfers(paths, nbytes, write=write)) as probe:
        assert probe.num_chunks == {4096: 64, 256 << 10: 4, MIB: 4}[nbytes]
        before = probe._swap.read_nbytes, probe._swap.write_nbytes
        probe.move(0)
        moved = probe._swap.read_nbytes - before[0], probe._swap.write_nbytes - before[1]
        assert moved == ((0, probe.num_chunks * nbytes) if write else (probe.num_chunks * nbytes, 0))
        probe.check(0)
        found = probes.rates(probe, 2 * probe.num_chunks)  # each chunk uses each buffer
        assert len(found) == 2 * probe.num_chunks and min(found) > 0
    assert everything_in(*paths) == []


@pytest.mark.parametrize("write", [False, True])
def test_a_wrong_byte_on_a_drive_is_found(paths, write):
    with contextlib.closing(probes.SwapTransfers(paths[:1], 64 << 10, write=write)) as probe:
        (file,) = paths[0].rglob("*.swap")
        if not write:
            flip_a_byte(file)
        probe.move(0)
        if write:
            flip_a_byte(file)
        with pytest.raises(SwapError, match="chunk 0 differs from the sent bytes"):
            probe.check(0)


@pytest.mark.parametrize("write", [False, True])
def test_bytes_that_were_not_moved_are_found(paths, write):
    with contextlib.closing(probes.SwapTransfers(paths[:1], 64 << 10, write=write)) as probe:
        probe.move(0)
        with pytest.raises(SwapError, match="differs from the sent bytes"):
            probe.check(1)


COPIES = [
    lambda device: probes.Copies(device, 64 << 10, to_device=True),
    lambda device: probes.Copies(device, 64 << 10, to_device=False),
    lambda device: probes.BothWays(device, 64 << 10),
]


@on_gpu
@pytest.mark.parametrize("make", COPIES)
def test_copies_are_compared_on_cuda(make):
    test_copies_are_compared(make, torch.device("cuda"))


@pytest.mark.parametrize("make", COPIES)
def test_copies_are_compared(make, device=CPU):
    with contextlib.closing(make(device)) as probe:
        assert all(rate > 0 for rate in probes.rates(probe, probe.num_chunks))
        way = probe._ways[1] if isinstance(probe, probes.BothWays) else probe
        with pytest.raises(SwapError, match="differs from the sent bytes"):
            probe.check(1)  # the last round was another one
        probe.move(1)
        probe.check(1)
        way._targets[3][17] ^= 1
        with pytest.raises(SwapError, match="chunk 2 differs from the sent bytes"):
            probe.check(1)


def test_a_wrong_byte_is_found_during_the_measurement_of_a_drive(tmp_path, monkeypatch):
    monkeypatch.setattr(drives, "_SECONDS", 0.001)
    name, nbytes = tmp_path / "scratch", 64 * MIB
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, nbytes)
    with contextlib.closing(drives.Probe(fd, nbytes)) as probe:
        probe.fill()
        for mix in drives.MIXES:
            assert probe.rate(mix, drives.Drive(num_queues=2)) > 0
        probe.check()
        flip_a_byte(name, 9 * MIB + 1)
        for look in (probe.check, lambda: probe.rate("read", drives.Drive())):
            with pytest.raises(OSError, match="the read bytes differ from the written bytes"):
                look()
        probe.fill()
        probe.check()
    os.close(fd)


def test_the_work_of_measured_processors_is_compared(monkeypatch):
    assert probes.memory_rate() > 1e6 and probes.copy_seconds(CPU) > 0
    assert probes.update_rate(CPU) > 1e4 and probes.product_rate(CPU) > 1e4
    real = probes.adam_step

    def wrong(weight, *others, **options):
        real(weight, *others, **options)
        weight.view(torch.int16)[100] ^= 0 if options else 1

    monkeypatch.setattr(probes, "adam_step", wrong)
    with pytest.raises(SwapError, match="the update on cpu"):
        probes.update_rate(CPU)


def test_the_measured_cost_of_an_op_is_plausible():
    assert -0.01 < small_steps.op_seconds(CPU) < 0.1


def test_the_cost_of_a_job_is_the_difference_of_steps_by_their_jobs(tmp_path, monkeypatch):
    steps = {"device": small_steps._Step(0.1, 0.2, 0), "nvme": small_steps._Step(0.2, 0.5, 600)}
    with monkeypatch.context() as patch:
        patch.setattr(small_steps, "_small_step", lambda device, tier, paths=(): steps[tier])
        assert small_steps.job_seconds(CPU, [tmp_path]) == pytest.approx(0.3 / 600)
    on_device, on_nvme = small_steps._small_step(CPU, "device"), small_steps._small_step(CPU, "nvme", [tmp_path])
    assert on_device.num_jobs == 0 and on_nvme.num_jobs >= 5 * small_steps.NUM_LAYERS  # read, copied, and the gradients, updates and writes


GPU = pytest.param(torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_rates_of_a_gpus_processors_are_measured_in_the_second_half(device, monkeypatch):
    """The work itself runs on the CPU, too."""
    seconds = []
    real = gpu_rates._sustained_seconds
    monkeypatch.setattr(gpu_rates, "_sustained_seconds", lambda *work: seconds.append(real(*work)) or seconds[-1])
    assert gpu_rates.product_rate(device) == pytest.approx(8 * 64 * 64 * 128 / seconds[0])
    assert gpu_rates.memory_rate(device) == pytest.approx(3 * MIB / seconds[1])
    if device.type == "cuda":
        assert gpu_rates.attention_rate(device) > 1e6


@pytest.mark.parametrize("name", ["tpu", "cuda:77", "meta", "cpuu"])
def test_a_missing_device_is_refused(name):
    with pytest.raises(ConfigError, match=f"device='{name}'"), probes.launched(name):
        pass


RANKS = """
    import contextlib, os, sys
    import torch
    from infinity.errors import SwapError
    from infinity.tools.measure import gpu_rates, probes
    torch.set_num_threads(1)
    os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    with probes.launched("cpu") as (device, ranks):
        for reduce in (False, True):
            with contextlib.closing(probes.Collectives(ranks, device, 64 << 10, reduce=reduce)) as probe:
                print(probe.chunk_nbytes, len(probes.rates(probe, 3)))
                for spoil in (lambda: None, lambda: (probe._sums if reduce else probe._chunks)[2][5].add_(1)):
                    probe.move(9)
                    spoil()
                    try:
                        probe.check(9)
                        print("right")
                    except SwapError as error:
                        print(error.strerror[:11])
                probe.move(10)
                try:
                    probe.check(9)
                except SwapError as error:
                    print("another round")
        print(probes.gather_seconds(ranks, device) > 0)
"""


@pytest.mark.long
def test_bytes_of_collectives_are_compared():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start_python(RANKS, rank, port) for rank in range(2)]
    for process in ranks:
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        assert without_gloo(output).splitlines() == ["32768 3", "right", "chunk 2 dif", "another round"] * 2 + ["True"]
