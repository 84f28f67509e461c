"""aio_ext against fio's libaio engine, and the wait of a demand read behind queued writes.

    python bench/aio.py [--nvme DIR] [--rounds 9] [--seconds 1.5] [--depth 8] [--json FILE]

Both engines move the same written file with direct I/O and huge pages. Requests have one block each. Block size, number of blocks in the
kernel, memory and mix are equal. The first comparison alternates. Other users of the drive may then slow either engine. The second
comparison runs both at the same time. The drive then serves both equally, and the engine that asks again later gets less. Demand reads
are timed with the settings that the engine measures on a path. fio needs its own huge pages (`sysctl vm.nr_hugepages=64`). Without fio,
only aio_ext runs.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from _common import exit_with, positive, positive_float

import aio_ext
from infinity.system import drives
from infinity.system.arena import Arena

MIB = 1 << 20
REQUEST_NBYTES = 16 * MIB  # size of the writes before a demand read, like a chunk's segment
NUM_SLOTS = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", default="infinity-swap", help="made if it does not exist")
    parser.add_argument("--gigabytes", type=positive_float, default=2, help="size of the file")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--seconds", type=positive_float, default=1.5, help="of each measurement")
    parser.add_argument("--block-kib", type=positive, default=1024)
    parser.add_argument("--depth", type=positive, default=8, help="blocks in the kernel")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.gigabytes * 1e9 < (least := (256 * MIB // REQUEST_NBYTES + 8) * REQUEST_NBYTES):  # the writes, and reads behind them
        parser.error(f"--gigabytes {options.gigabytes:g}: expected {least / 1e9:.3f} or more")
    Path(options.nvme).mkdir(parents=True, exist_ok=True)
    fio = fio_command()
    with tempfile.NamedTemporaryFile(dir=options.nvme, prefix="aio-", suffix=".bench") as file, Bench(file.name, options) as bench:
        block_nbytes = options.block_kib << 10
        alike = {"block_nbytes": block_nbytes, "inflight_nbytes": options.depth * block_nbytes, "depth": options.depth}
        drive = drives.measure(bench.fd, bench.num_requests * REQUEST_NBYTES)
        report = {"block_kib": options.block_kib, "depth": options.depth, "fio": fio_version() if fio else None, "drive": asdict(drive)}
        print(f"{options.depth} blocks of {options.block_kib} KiB in the kernel, {report['fio']}; measured: {drive}")
        for mix in drives.MIXES:
            ours, theirs, cores = [], [], []
            for round_ in range(options.rounds):
                with aio_ext.Queue(**alike) as queue:
                    gbps, core = bench.throughput(queue, mix, options.seconds)
                ours.append(gbps)
                cores.append(core / gbps)
                if fio:
                    theirs.append(fio_gbps(fio, file.name, mix, options))
            report[mix] = {"ours_gbps": ours, "fio_gbps": theirs, "cores_a_gbps": cores}
            line = f"{mix:6s} {spread(ours)} GB/s, {100 * statistics.median(cores):.1f} % of a core a GB/s"
            if fio:
                line += f"; fio {spread(theirs)}; ratio of pairs {spread([a / b for a, b in zip(ours, theirs)])}"
            print(line, flush=True)
            if fio:
                together = [bench.beside_fio(fio, file.name, mix, alike, options) for _ in range(options.rounds)]
                report[mix]["together_gbps"] = together
                print(f"{'':6s} at the same time: ratio of pairs {spread([a / b for a, b in together])}", flush=True)
        report["latency"] = latency = bench.latency(drive)
        lone, loaded = (1e3 * statistics.median(latency[name]) for name in ("lone_s", "loaded_s"))
        print(f"demand read of 1 MiB: alone {lone:.2f} ms, behind 256 MiB of writes {loaded:.2f} ms: {loaded / lone:.2f}x")
        report["disturbed"] = [bench.disturbed(drive, options.seconds) for _ in range(options.rounds)]
        ratio = statistics.median(with_ / without for with_, without in report["disturbed"])
        print(f"mixed throughput with demand reads every 20 ms, of that without: {ratio:.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


def spread(values) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


class Bench:
    """A written file, memory on huge pages, and measurements with a queue."""

    def __init__(self, path: str, options):
        self.num_requests = round(options.gigabytes * 1e9 / REQUEST_NBYTES)
        self.arena = Arena()
        self.whole = self.arena.region(NUM_SLOTS * REQUEST_NBYTES).buffer
        self.buffers = [self.whole[i * REQUEST_NBYTES : (i + 1) * REQUEST_NBYTES] for i in range(NUM_SLOTS)]
        noise = os.urandom(MIB)
        for start in range(0, len(self.whole), MIB):
            self.whole[start : start + MIB] = noise
        self.fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(self.fd, 0, self.num_requests * REQUEST_NBYTES)
        self.demanded = self.arena.region(MIB)
        self.demand_offset = (self.num_requests - 1) * REQUEST_NBYTES
        with aio_ext.Queue() as queue:
            for number in range(self.num_requests):
                queue.write(self.fd, self.buffers[number % NUM_SLOTS], number * REQUEST_NBYTES)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        os.close(self.fd)
        self.arena.close()

    def throughput(self, queue, mix: str, seconds: float, demand_every: float = 0.0) -> tuple[float, float]:
        """(GB/s, cores used by the I/O thread and this thread). demand_every: seconds between 1 MiB demand reads beside the load.

        Requests are twice the blocks in the kernel. They complete in any order while the oldest is awaited. Two requests share a buffer,
        because the bytes are not read.
        """
        block_nbytes, before = queue.block_nbytes, queue.stats()
        depth = queue.inflight_nbytes // block_nbytes
        num_places = (self.num_requests - 1) * REQUEST_NBYTES // block_nbytes
        buffers = [self.whole[i * block_nbytes : (i + 1) * block_nbytes] for i in range(depth)]
        tickets, number = [None] * (2 * depth), 0
        start, cpu = time.perf_counter(), time.process_time()
        next_demand, num_demands = start + demand_every, 0
        while (now := time.perf_counter()) - start < seconds:
            index = number % len(tickets)
            ticket = tickets[index]
            if ticket is not None:
                while not ticket.wait(max(0.0, next_demand - time.perf_counter()) if demand_every else None):
                    queue.read(self.fd, self.demanded.buffer, self.demand_offset, priority=aio_ext.DEMAND)
                    num_demands += 1
                    next_demand += demand_every
            submit = queue.read if drives.is_read(mix, number) else queue.write
            tickets[index] = submit(self.fd, buffers[index % depth], number % num_places * block_nbytes)
            number += 1
        cpu, stats = time.process_time() - cpu, queue.stats()
        moved = sum(stats[name] - before[name] for name in ("read_nbytes", "write_nbytes")) - num_demands * MIB
        return moved / (now - start) / 1e9, cpu / (now - start)

    def beside_fio(self, fio: str, path: str, mix: str, alike: dict, options) -> tuple[float, float]:
        """(GB/s, GB/s of fio) of both at once. aio_ext runs from fio's warm-up, which takes a second, until shortly before fio's end."""
        with ThreadPoolExecutor(1) as pool, aio_ext.Queue(**alike) as queue:
            theirs = pool.submit(fio_gbps, fio, path, mix, options, ramp_seconds=1)
            self.throughput(queue, mix, 1.2)
            gbps, _ = self.throughput(queue, mix, options.seconds - 0.2)
            while not theirs.done():
                self.throughput(queue, mix, 0.05)
            return gbps, theirs.result()

    def latency(self, drive: drives.Drive, num_reads: int = 31) -> dict[str, list[float]]:
        """Seconds of a 1 MiB demand read, alone and right after 256 MiB of writes were queued; alternating."""
        seconds = {"lone_s": [], "loaded_s": []}
        with drive.queue() as queue:
            for number in range(num_reads):
                for name, load in (("lone_s", 0), ("loaded_s", 256 * MIB // REQUEST_NBYTES)):
                    writes = [
                        queue.write(self.fd, self.buffers[1 + i % (NUM_SLOTS - 1)], i * REQUEST_NBYTES) for i in range(load)
                    ]
                    if load:
                        time.sleep(0.005)  # until the kernel has its share
                    offset = (load + number % 8) * REQUEST_NBYTES
                    start = time.perf_counter()
                    queue.read(self.fd, self.buffers[0][:MIB], offset, priority=aio_ext.DEMAND).wait()
                    seconds[name].append(time.perf_counter() - start)
                    for ticket in writes:
                        ticket.wait()
        return seconds

    def disturbed(self, drive: drives.Drive, seconds: float) -> tuple[float, float]:
        """Mixed GB/s with a demand read every 20 ms, whose bytes do not count, and without."""
        with drive.queue() as queue:
            return tuple(self.throughput(queue, "mixed", seconds, every)[0] for every in (0.02, 0.0))


def fio_command() -> str | None:
    """The path of fio, if fio is installed and has huge pages."""
    fio = shutil.which("fio")
    free = next((int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("HugePages_Free")), 0)
    if fio is None:
        print("no comparison: fio is missing (apt install fio)", file=sys.stderr)
    elif free < 32:
        print(f"no comparison: fio needs 32 huge pages and {free} are free (sysctl vm.nr_hugepages=64)", file=sys.stderr)
    return fio if free >= 32 else None


def fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def fio_gbps(fio: str, path: str, mix: str, options, *, ramp_seconds: float = 0) -> float:
    """GB/s of fio's libaio engine with its default of sequential I/O, on the same file."""
    kind = {"read": ["--rw=read"], "write": ["--rw=write"], "mixed": ["--rw=rw", f"--rwmixread={100 * 14 / 26:.0f}"]}[mix]
    command = [fio, "--name=bench", f"--filename={path}", "--ioengine=libaio", "--direct=1", "--iomem=mmaphuge", *kind]
    command += [f"--bs={options.block_kib}k", f"--iodepth={options.depth}", "--time_based", f"--runtime={options.seconds}"]
    command += [f"--ramp_time={ramp_seconds}"]
    command += ["--output-format=json", "--group_reporting", "--allow_file_create=0", "--overwrite=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (job,) = json.loads(done.stdout)["jobs"]
    return (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / (max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3) / 1e9


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        exit_with(main)
