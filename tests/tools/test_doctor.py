"""doctor: findings about texts of other machines, and the report of this machine for any input.

Long because each check has the texts of several machines.
"""

import contextlib
import errno
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from support.helpers import everything_in, slow_down, start_python

from infinity.system.arena import Arena
from infinity.system.capacity import cgroup_folders
from infinity.system.mounts import Mount, mount_of
from infinity.tools.cli import main
from infinity.tools.doctor import devices, doctor, selftest, system, volumes
from infinity.tools.doctor.devices import Card
from infinity.tools.doctor.findings import Finding, Verdict, absent, attention, ok
from infinity.tools.doctor.volumes import Pass

GIB = 1 << 30

MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
29 24 0:23 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=24684096k
98 27 259:5 / /ssd0 rw,noatime shared:52 - xfs /dev/nvme1n1 rw,attr2,inode64,logbufs=8
99 27 0:45 /@swap /my\\040disk rw,relatime shared:53 - btrfs /dev/sdb1 rw,ssd,space_cache=v2
101 27 0:52 / /home rw,relatime shared:54 - nfs4 filer:/home rw,vers=4.2,rsize=1048576
102 101 0:53 / /home/me rw,nosuid,nodev,relatime shared:55 - fuse.sshfs me@far:/ rw,user_id=1000
"""
CONTAINER_MOUNTINFO = (
    "1523 1440 0:128 / / rw,relatime master:509 - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/A:/var/lib/docker/overlay2/l/B\n"
)

MEMINFO = """\
MemTotal:       131072000 kB
MemFree:         4194304 kB
MemAvailable:   104857600 kB
SwapTotal:      16777216 kB
SwapFree:       16776192 kB
HugePages_Total:       0
"""

SMAPS = """\
7f0000000000-7f0004000000 rw-p 00000000 00:00 0
Size:              65536 kB
Rss:               65536 kB
AnonHugePages:     65536 kB
VmFlags: rd wr mr mw me dc ac sd hg
7f0004000000-7f0008000000 rw-p 00000000 00:00 0
Size:              65536 kB
Rss:               65536 kB
AnonHugePages:      6144 kB
VmFlags: rd wr mr mw me dc ac sd hg
7f1000000000-7f1000021000 r-xp 00000000 103:02 3146 /usr/lib/x86_64-linux-gnu/libc.so.6
Size:                132 kB
Rss:                 100 kB
"""

NVIDIA_SMI = """\
0, 00000000:3B:00.0, 570.86.15, 1, 5, 16, 16
1, 00000000:D8:00.0, 570.86.15, 4, 5, 8, 16
2, 00000000:5E:00.0, 570.86.15, [N/A], [N/A], [N/A], [N/A]
"""


def test_a_finding_is_a_line_and_its_remedy():
    assert str(ok("CPUs", "2 of 2 CPUs")) == "[ok] CPUs           2 of 2 CPUs"
    assert str(absent("GPU", "none")) == "[-]  GPU            none"
    assert str(attention("space", "full", "rm -r /old")) == "[!]  space          full\n     -> rm -r /old"
    with pytest.raises(AssertionError):
        attention("space", "full", "")


# ---- system ----


def test_an_old_kernel_is_named():
    assert system.kernel("6.8.0-45-generic", "x86_64") == ok("kernel", "Linux 6.8.0-45-generic, x86_64")
    older = "; older than 6.1, so it does not report the alignment of direct I/O, and the engine uses 4096 bytes"
    assert system.kernel("5.15.0-1.el9", "aarch64") == ok("kernel", "Linux 5.15.0-1.el9, aarch64" + older)


def test_too_few_aio_requests_need_attention():
    assert system.aio_requests(65536, 1024, 512) == ok("aio-max-nr", "1024 of 65536 requests in use; training here needs 512")
    detail = "65500 of 65536 requests in use; training here needs 64: queues become smaller, or the kernel refuses them"
    assert system.aio_requests(65536, 65500, 64) == attention("aio-max-nr", detail, "sudo sysctl fs.aio-max-nr=1048576")


def test_a_missing_libaio_needs_attention():
    assert system.libaio(None) == ok("libaio", "found")
    missing = OSError(errno.ELIBACC, "transfers need libaio, which cannot be used (libaio.so.1: none). Install it: apt install libaio1")
    detail = "transfers need libaio, which cannot be used (libaio.so.1: none)"
    assert system.libaio(missing) == attention("libaio", detail, "Install it: apt install libaio1")
    assert doctor._libaio_failure() is None


def test_the_limit_of_locked_memory_matters_only_with_a_gpu():
    assert system.locked_memory(8 << 20, 0) == absent("memlock", "limit 8.0 MiB; without a GPU no memory is pinned")
    assert system.locked_memory(None, 8) == ok("memlock", "limit none; pinning host memory works")
    assert system.locked_memory(65536, 1) == ok("memlock", "limit 64.0 KiB; pinning host memory works")
    remedy = "ulimit -l unlimited (docker: --ulimit memlock=-1, systemd: LimitMEMLOCK=infinity)"
    assert system.locked_memory(65536, 1, "pinning 64.0 MiB of host memory failed") == attention(
        "memlock", "limit 64.0 KiB; pinning 64.0 MiB of host memory failed", remedy
    )


def test_a_low_limit_of_open_files_needs_attention():
    assert system.open_files(None, None) == ok("open files", "limit none")
    assert system.open_files(1024, 4096) == ok("open files", "limit 1024")
    assert system.open_files(256, 4096) == attention("open files", "limit 256, below 1024", "ulimit -n 1024")
    remedy = "raise the hard limit, 512, to 1024 or more (docker: --ulimit nofile=1024, systemd: LimitNOFILE)"
    assert system.open_files(256, 512) == attention("open files", "limit 256, below 1024", remedy)


def test_disabled_huge_pages_need_attention():
    assert system.huge_pages("always [madvise] never\n") == ok("huge pages", "transparent huge pages: madvise")
    assert system.huge_pages("[always] madvise never\n") == ok("huge pages", "transparent huge pages: always")
    assert system.huge_pages("always madvise [never]\n") == attention(
        "huge pages",
        "transparent huge pages: never; drives are slower with small pages",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )
    assert system.huge_pages(None).remedy == "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE"


def test_the_share_of_huge_pages_counts_mappings_of_the_arena_only():
    assert system.arena_pages(SMAPS, 0x7F0000000000, 64 << 20) == ok("arena pages", "100% of 64.0 MiB of the arena on huge pages")
    found = system.arena_pages(SMAPS, 0x7F0004000000, 64 << 20)
    assert found == attention(
        "arena pages",
        "9% of 64.0 MiB of the arena on huge pages",
        "free memory, then: echo 1 | sudo tee /proc/sys/vm/compact_memory; see also the line `huge pages`",
    )
    assert system.arena_pages(SMAPS, 0x7F0000000000, 128 << 20).detail == "55% of 128.0 MiB of the arena on huge pages"
    assert system.arena_pages("", 0x7F0000000000, 64 << 20).detail == "/proc/self/smaps does not show the arena's memory"


def test_memory_is_bounded_by_the_control_group():
    swap = ok("swap space", "1.0 MiB of 16.0 GiB of the operating system's swap space in use")
    free = "100.0 GiB of 125.0 GiB available"
    assert system.memory(MEMINFO, None) == [ok("memory", f"{free}; no control group has a lower limit"), swap]
    assert system.memory(MEMINFO, 96 * GIB) == [ok("memory", f"{free}, of which the control group allows 96.0 GiB"), swap]
    busy = system.memory(MEMINFO.replace("16776192", "1048576"), None)[1]
    assert busy == attention(
        "swap space",
        "15.0 GiB of 16.0 GiB of the operating system's swap space in use: memory is or was short",
        "end other programs, then: sudo swapoff -a && sudo swapon -a",
    )
    without = "MemTotal: 1024 kB\nMemAvailable: 512 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    assert system.memory(without, None)[1] == ok("swap space", "the operating system has none")


def test_too_few_cpus_need_attention():
    assert system.processors(16, 16, None) == ok("CPUs", "16 of 16 CPUs")
    assert system.processors(64, 16, 16.0) == ok("CPUs", "16 of 64 CPUs")
    assert system.processors(64, 64, 3.5) == attention(
        "CPUs", "64 of 64 CPUs, with time for 3.5 of them (cpu.max): a larger number of threads wait for each other", "export OMP_NUM_THREADS=3"
    )
    detail = "1 of 4 CPUs: transfers, updates and the model share it"
    assert system.processors(4, 1, None) == attention("CPUs", detail, "allow more, such as taskset -c 0-3 (docker: --cpus 4)")


def test_a_drive_or_gpu_on_another_numa_node_needs_attention():
    two = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    assert system.numa({0: {0, 1}}, {0, 1}, {"vda": -1}, {}) == [ok("NUMA", "one node")]
    found = system.numa(two, set(range(8)), {"nvme0n1": 1}, {"GPU 0": 1})
    assert found == [ok("NUMA", "2 nodes; this process may run on 0 and 1, nvme0n1 on 1, GPU 0 on 1")]
    facts = "2 nodes; this process may run on 0, nvme0n1 on 1"
    remedy = "numactl --cpunodebind=1 --membind=1 infinity ..."
    assert system.numa(two, {0, 1}, {"nvme0n1": 1}, {}) == [attention("NUMA", f"{facts}: nvme0n1 is on another node", remedy)]
    facts = "2 nodes; this process may run on 0 and 1, nvme0n1 on 1, GPU 0 on 0"
    remedy = "name a directory on a drive of node 0"
    found = system.numa(two, set(range(8)), {"nvme0n1": 1}, {"GPU 0": 0})
    assert found == [attention("NUMA", f"{facts}: no GPU is on the node of nvme0n1", remedy)]
    assert system.numa(two, set(range(8)), {"nvme0n1": 1, "md0": -1}, {"GPU 0": 0, "GPU 1": 1})[0].status is doctor.Verdict.OK


def test_lists_of_cpus_and_limits_of_control_groups_are_parsed():
    assert system.cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert system.cpu_list("\n") == set()
    version2 = "0::/user.slice/job.scope\n"
    root = Path("/sys/fs/cgroup")
    assert cgroup_folders(version2, "memory") == [root / "user.slice/job.scope", root / "user.slice", root]
    version1 = "9:name=systemd:/\n4:memory:/docker/ab12\n2:cpu,cpuacct:/\n0::/\n"
    assert cgroup_folders(version1, "memory") == [root / "memory/docker/ab12", root / "memory/docker", root / "memory", root]
    assert cgroup_folders(version1, "cpu") == [root / "cpu", root]
    assert cgroup_folders("0::/../../other\n", "memory") == [root]
    assert system.memory_limit(["max\n", "8589934592\n", "17179869184\n", ""]) == 8 * GIB
    assert system.memory_limit(["9223372036854771712\n", "max\n"]) is None
    assert system.cpu_quota(["max 100000\n", "250000 100000\n"]) == 2.5
    assert system.cpu_quota(["-1\n 100000\n"]) is None


# ---- directories ----


@pytest.mark.parametrize(
    "path, expected",
    [
        ("/ssd0/swap", Mount("/ssd0", "xfs", "/dev/nvme1n1", "rw,noatime", "259:5")),
        ("/ssd01", Mount("/", "ext4", "/dev/nvme0n1p2", "rw,relatime", "259:2")),
        ("/my disk/x", Mount("/my disk", "btrfs", "/dev/sdb1", "rw,relatime", "0:45")),
        ("/home/me", Mount("/home/me", "fuse.sshfs", "me@far:/", "rw,nosuid,nodev,relatime", "0:53")),
    ],
)
def test_the_mount_of_a_path_is_the_nearest_above_the_path(path, expected):
    assert mount_of(path, MOUNTINFO) == expected


def test_only_filesystems_of_local_drives_are_ok():
    def found(path, text=MOUNTINFO):
        return volumes.filesystem(mount_of(path, text))

    assert found("/ssd0") == ok("filesystem", "xfs on /dev/nvme1n1, mounted at /ssd0")
    detail = "tmpfs on tmpfs, mounted at /dev/shm: files stay in memory"
    assert found("/dev/shm/x") == attention("filesystem", detail, "name a directory on a local drive")
    remedy = "name a directory on ext4 or xfs on a local drive"
    detail = "nfs4 on filer:/home, mounted at /home: not a local drive"
    assert found("/home/you") == attention("filesystem", detail, remedy)
    detail = "fuse.sshfs on me@far:/, mounted at /home/me: not a local drive"
    assert found("/home/me") == attention("filesystem", detail, remedy)
    detail = "overlay on overlay, mounted at /: a layer of a container"
    remedy = "give the container a directory on a drive of the host (docker: -v /ssd0/swap:/swap) and name this directory"
    assert found("/work", CONTAINER_MOUNTINFO) == attention("filesystem", detail, remedy)
    with pytest.raises(LookupError, match="has no mount above /work"):
        found("/work", "")


def test_rotating_drives_and_slow_schedulers_need_attention():
    quiet = ok("scheduler", "none on nvme1n1")
    assert volumes.drive("nvme1n1", "0\n", "[none] mq-deadline kyber bfq\n", 3.0) == [ok("drive", "nvme1n1, not rotational"), quiet]
    assert volumes.drive("nvme1n1", "0\n", "none\n", 3.0)[1] == quiet
    remedy = "name a directory on an SSD; if this drive is an SSD: echo 0 | sudo tee /sys/block/sda/queue/rotational"
    assert volumes.drive("sda", "1\n", "mq-deadline kyber [bfq] none\n", 0.2) == [
        attention("drive", "sda is reported as rotational", remedy),
        attention("scheduler", "bfq on sda reorders requests and makes them slower", "echo none | sudo tee /sys/block/sda/queue/scheduler"),
    ]
    virtual = volumes.drive("vda", "1\n", "none [mq-deadline] kyber bfq\n", 1.4)
    assert virtual[0] == ok("drive", "vda, reported as rotational, but too fast for a rotating drive")
    assert volumes.drive("vda", "1\n", "none\n", 0.2)[0] == absent("drive", "vda, a virtual drive: the kernel does not know the type")
    assert volumes.drive("mmc", None, None, 0.0) == [absent("drive", "mmc; the kernel does not report the type")]


def test_free_space_is_given_in_parameters():
    detail = "1.1 TiB of 3.5 TiB free: room for the states of 100.0 B parameters at 12 bytes"
    assert volumes.space(1200 * 10**9, 3840 * 10**9) == ok("space", detail)
    short = volumes.space(6 * 10**9, 3840 * 10**9)
    assert short == attention(
        "space", "5.6 GiB of 3.5 TiB free: room for the states of 0.5 B parameters at 12 bytes", "free space there, or name another directory"
    )


def test_missing_direct_io_or_preallocation_needs_attention():
    remedy = "name a directory on ext4 or xfs on a local drive"
    assert volumes.direct(512, 4096) == ok("O_DIRECT", "works; memory aligned to 512 bytes, offsets to 4096")
    refused = attention("O_DIRECT", "refused (Invalid argument): swap would go through the page cache", remedy)
    assert volumes.direct(0, 0, "Invalid argument") == refused
    detail = "works; memory aligned to 512 bytes, offsets to 16384: the engine aligns to 4096 bytes only"
    assert volumes.direct(512, 16384) == attention("O_DIRECT", detail, remedy)
    assert volumes.preallocation(0) == ok("fallocate", "works")
    detail = "refused (Operation not supported): the engine writes the whole swap file once to create it"
    assert volumes.preallocation(errno.EOPNOTSUPP) == attention("fallocate", detail, remedy)
    assert volumes.preallocation(errno.ENOSPC).detail == "no space for a trial of 128.0 MiB"


def test_io_submit_that_waits_for_the_drive_needs_attention():
    remedy = "name a directory on ext4 or xfs on a local drive; if it is on such a drive, repeat the check when no other program writes there"
    fast, slow = [Pass(2.0, 0.04)], [Pass(0.5, 0.96)]
    assert volumes.asynchronous(fast, fast, fast) == [
        ok("asynchronous", "io_submit took 4% (4% to 4%) of the time of reads, 4% (4% to 4%) of writes"),
        ok("first writes", "2.00 GB/s, second writes 2.00 GB/s; io_submit took 4% (4% to 4%) of the time"),
    ]
    assert volumes.asynchronous(slow, fast, fast)[1] == attention(
        "first writes", "0.50 GB/s, second writes 2.00 GB/s; io_submit took 96% (96% to 96%) of the time: it waits for the drive", remedy
    )
    assert volumes.asynchronous(fast, fast, slow)[0] == attention(
        "asynchronous", "io_submit took 96% (96% to 96%) of the time of reads, 4% (4% to 4%) of writes: it waits for the drive", remedy
    )


def test_single_slow_passes_do_not_change_the_verdict_on_a_drive():
    shares = [0.67, 0.03, 0.03, 0.41, 0.02, 0.72, 0.75, 0.83, 0.74, 0.04, 0.58, 0.70]  # shares of successive first writes of one drive
    steady = [Pass(3.0, 0.05)] * 5
    found = set()
    for tries in itertools.combinations(shares, 5):
        waits, first = volumes.asynchronous([Pass(1.4, share) for share in tries], steady, steady)
        found.add((waits.status, first.status))
        assert f"({min(tries):.0%} to {max(tries):.0%})" in first.detail
    assert found == {(Verdict.OK, Verdict.OK)}
    disturbed = [Pass(2.0, 0.9), Pass(2.0, 0.04), Pass(2.0, 0.7), Pass(2.0, 0.04), Pass(2.0, 0.04)]
    assert volumes.asynchronous(steady, disturbed, steady)[0].status is Verdict.OK


def test_only_an_error_of_the_filesystem_counts_as_refused_o_direct(tmp_path, monkeypatch):
    real = os.open
    error = errno.EMFILE

    def refuse(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(error, os.strerror(error), path)
        return real(path, flags, *more, **named)

    def finding():
        with volumes.scratch(tmp_path) as folder, contextlib.closing(volumes.checks(tmp_path, folder)) as checks:
            return next(found for found in doctor._findings("DIR", checks) if found.what == "O_DIRECT")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert finding().remedy == "raise this process's limit of open files (ulimit -n)" and "refused" not in finding().detail
        error = errno.EINVAL
        assert finding().detail == "refused (Invalid argument): swap would go through the page cache"
    assert finding().status is Verdict.OK


# ---- devices ----


def test_a_card_with_fewer_pcie_lanes_needs_attention():
    cards = devices.cards_of(NVIDIA_SMI)
    assert cards[:2] == [
        Card(0, "0000:3b:00.0", "570.86.15", 1, 5, 16, 16),
        Card(1, "0000:d8:00.0", "570.86.15", 4, 5, 8, 16),
    ]
    assert devices.cards_of("") == []
    assert devices.link(cards[0]) == ok("PCIe 0", "generation 1 of 5 now, 16 of 16 lanes")
    remedy = "put the card into a slot of 16 lanes, or reseat it; sudo lspci -vv -s 0000:d8:00.0"
    assert devices.link(cards[1]) == attention("PCIe 1", "generation 4 of 5 now, 8 of 16 lanes: copies are slower", remedy)
    assert devices.link(cards[2]) == absent("PCIe 2", "nvidia-smi does not report the link")


def test_gpus_that_torch_does_not_see_need_attention():
    card = devices.cards_of(NVIDIA_SMI)[:1]
    seen = [("NVIDIA H200", 140 * GIB, (9, 0))]
    assert devices.gpus(seen, card, "12.8", None) == [ok("GPU 0", "NVIDIA H200, 140.0 GiB, compute capability 9.0")]
    assert devices.gpus([], [], None, None) == [absent("GPU", "none; the engine runs on the CPU")]
    (found,) = devices.gpus([], card, None, None)
    assert found.detail == "nvidia-smi lists 1, PyTorch finds none: PyTorch is built without CUDA"
    (found,) = devices.gpus([], card, "12.8", "")
    assert (found.detail, found.remedy) == ("nvidia-smi lists 1, PyTorch finds none: CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES")
    (found,) = devices.gpus([], card, "12.8", None)
    assert found.remedy == "install a driver for CUDA 12.8 or newer, or a PyTorch for driver 570.86.15"


def test_peers_backends_versions_and_kernels_are_reported():
    assert devices.peers([[True]]) == absent("peer access", "needs two GPUs or more")
    assert devices.peers([[True] * 4] * 4) == ok("peer access", "all 6 pairs of GPUs")
    found = devices.peers([[True, True, False], [True, True, True], [True, True, True]])
    assert found.detail == "1 of 3 pairs of GPUs have none (0-2): gathers go through host memory"
    assert devices.backends(True, False, 0) == ok("distributed", "torch.distributed has gloo")
    assert devices.backends(True, True, 8) == ok("distributed", "torch.distributed has gloo, nccl")
    assert devices.backends(True, False, 2).detail == "torch.distributed has gloo, and nccl is missing"
    assert devices.backends(False, False, 0).detail == "torch.distributed has none; ranks need gloo to agree"
    assert devices.versions({"Python": "3.12.3", "NCCL": None}) == ok("versions", "Python 3.12.3, NCCL -")
    assert devices.kernels(("scalar", "avx2"), "x86_64") == ok("extensions", "built; updates in host memory use avx2 (available: scalar, avx2)")
    assert devices.kernels(("scalar",), "aarch64").status is doctor.Verdict.OK
    assert devices.kernels(("scalar",), "x86_64").status is doctor.Verdict.ATTENTION


# ---- this machine ----


def test_the_readers_return_facts_of_this_machine():
    assert system.read_nodes() == {} or set().union(*system.read_nodes().values()) >= os.sched_getaffinity(0)
    limit, used = system.read_aio()
    assert 0 <= used <= limit
    arena = Arena()
    region = arena.region(4 << 20)
    assert "4.0 MiB of the arena" in system.arena_pages(Path("/proc/self/smaps").read_text(), region.address, region.nbytes).detail
    arena.close()
    assert devices.count() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.slow
def test_checks_leave_a_directory_unchanged(tmp_path):
    with volumes.scratch(tmp_path) as folder:
        found = [check() for _, check in volumes.checks(tmp_path, folder)]
        assert everything_in(folder) == []
        rates = volumes.rates(tmp_path, folder, 0.01)
    found = [finding for each in found for finding in ([each] if isinstance(each, Finding) else each)]
    names = [finding.what for finding in found]
    assert names[:6] == ["filesystem", "space", "O_DIRECT", "fallocate", "asynchronous", "first writes"] and "drive" in names
    assert rates.detail.startswith(f"{tmp_path}: read ")
    assert everything_in(tmp_path) == []


def test_directories_are_compared_and_shared_space_is_reported_once(paths, monkeypatch):
    with contextlib.ExitStack() as stack:
        folders = {path: stack.enter_context(volumes.scratch(path)) for path in paths[:2]}
        slow_down(monkeypatch, (0.0, 0.03))
        one_drive, slow = volumes.together(folders)
        with contextlib.closing(volumes.checks(paths[1], folders[paths[1]], [paths[0]])) as checks:
            space = dict(itertools.islice(checks, 2))["space"]()
    assert one_drive.detail.startswith(f"swap directories {paths[0]} and {paths[1]} lie on one ")
    assert slow.detail.startswith(f"swap directory {paths[1]} is slow: ")
    assert space == absent("space", f"the same free space as {paths[0]}: both are on one filesystem")
    assert everything_in(*paths) == []


def run(capsys, *arguments):
    """(exit status, {(section, name): finding})."""
    status = main(["doctor", "--json", *map(str, arguments)])
    report = json.loads(capsys.readouterr().out)
    findings = report["findings"]
    assert report["num_attention"] == sum(finding["status"] == "attention" for finding in findings)
    assert status == (1 if report["num_attention"] else 0)
    assert all(bool(finding["remedy"]) == (finding["status"] == "attention") for finding in findings)
    return status, {(finding["section"], finding["what"]): finding for finding in findings}


def test_each_unusable_directory_has_its_own_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    status, found = run(capsys, tmp_path / "none", tmp_path / "file", "/proc", "--seconds", 5)
    assert status == 1
    missing = found[f"directory {tmp_path}/none", "directory"]
    assert missing["detail"] == f"{tmp_path}/none: no such file or directory" and missing["remedy"] == f"mkdir -p {tmp_path}/none"
    assert found[f"directory {tmp_path}/file", "directory"]["remedy"] == "name a directory"
    assert found["directory /proc", "directory"]["status"] == "attention"
    assert not any(section == "self-test" for section, _ in found)
    assert everything_in(tmp_path) == ["file"]


def test_default_directories_come_from_settings_swap_or_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctor._default_directories() == [Path(".")]
    (tmp_path / "infinity-swap").mkdir()
    assert doctor._default_directories() == [Path("infinity-swap")]
    (tmp_path / "infinity.toml").write_text('[config]\nswap_dirs = ["gone", "/ssd0/swap"]\n')
    assert doctor._default_directories() == [Path("gone"), Path("/ssd0/swap")]
    found = doctor._settings()
    assert found.detail.startswith("infinity.toml cannot be used: ") and found.remedy == "edit infinity.toml"
    (tmp_path / "infinity.toml").write_text("[machine]\ndevices = 1\n")
    assert doctor._default_directories() == [Path("infinity-swap")]
    assert doctor._settings() == absent("settings", "infinity.toml has no table [config]: all settings have their defaults")
    (tmp_path / "infinity.toml").write_text("[config\n")
    assert doctor._default_directories() == [Path("infinity-swap")] and doctor._settings().remedy == "edit infinity.toml"
    (tmp_path / "infinity.toml").write_text("[config]\nswap_dirs = []\n")
    assert doctor._default_directories() == [] and doctor._settings().remedy == "edit infinity.toml"


def test_a_failed_check_does_not_hide_other_checks(capsys):
    def checks():
        yield "first", lambda: ok("first", "fine")
        yield "second", lambda: 1 // 0
        yield "third", lambda: [ok("third", "fine"), absent("fourth", "none")]
        raise OSError(errno.EIO, "broken")

    report = doctor._Report(shown=True)
    report.section("a section", checks())
    assert report.close() == 1
    assert capsys.readouterr().out.splitlines() == [
        "a section",
        "[ok] first          fine",
        "[!]  second         the check failed: ZeroDivisionError: integer division or modulo by zero",
        "     -> see the error; if the error names no cause, report this text",
        "[ok] third          fine",
        "[-]  fourth         none",
        "[!]  a              the check failed: OSError: [Errno 5] broken",
        "     -> the drive failed or the file was cut: see dmesg, and use another directory",
        "",
        "2 of 5 need attention",
    ]


def test_a_terminal_shows_the_running_check(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    seen = []

    def checks():
        for what in ("first", "second"):
            yield what, lambda what=what: seen.append(capsys.readouterr().err) or ok(what, "fine")

    report = doctor._Report(shown=True)
    report.section("a section", checks())
    assert report.close() == 0
    assert [text.split("\r")[-1] for text in seen] == ["checking first\x1b[K", "checking second\x1b[K"]
    assert capsys.readouterr().err.endswith("\r\x1b[K")  # the line is cleared


# ---- self-test ----


def test_the_self_test_has_the_bits_of_a_run_on_the_device(paths, monkeypatch):
    monkeypatch.setattr(selftest, "SIZES", {"hidden": 64, "layers": 2, "heads": 2, "vocab": 64, "seq": 16})
    said = []
    found = {what: check() for what, check in selftest.checks(paths[:2], 60, said.append, steps=3)}
    assert [finding.status.name for finding in found.values()] == ["OK"] * 3, found
    assert found["training"].detail.startswith("3 of 3 steps in ")
    assert found["checkpoint"].detail.endswith("2 steps have the same losses before and after loading")
    assert found["same bits"].detail == "3 losses and 29 weight tensors equal those of a run without NVMe"
    assert said[-1] == "self-test: the same run without NVMe"


def test_the_self_test_finds_other_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "SIZES", {"hidden": 32, "layers": 1, "heads": 1, "vocab": 32, "seq": 8})
    run = selftest._SelfTest([tmp_path], 60, lambda line: None, 2)
    model, _ = run._build(param_tier="device", optimizer_state_tier="device")
    run.losses, run.weights = [1.0, 2.0], {name: value.clone() for name, value in model.state_dict().items()}
    found = run.compare()
    assert found.status.name == "ATTENTION"
    assert found.detail == "2 of 2 losses and 17 of 17 tensors differ from those of a run without NVMe"


def test_the_self_test_leaves_out_checks_after_its_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "SIZES", {"hidden": 32, "layers": 1, "heads": 1, "vocab": 32, "seq": 8})
    found = {what: check() for what, check in selftest.checks([tmp_path], 1e-3, lambda line: None)}
    assert found["training"].detail.startswith("1 of 10 steps in ")
    assert found["checkpoint"] == absent("checkpoint", "skipped: the time limit was reached; see --seconds")
    assert found["same bits"] == absent("same bits", "skipped: the time limit was reached; see --seconds")


@pytest.mark.long
def test_the_self_test_passes_on_this_machine(tmp_path, capsys):
    _, found = run(capsys, tmp_path, "--seconds", 60)
    section = {what: finding["status"] for (section, what), finding in found.items() if section == "self-test"}
    assert section == {"training": "ok", "checkpoint": "ok", "same bits": "ok", "rates": "ok"}
    assert everything_in(tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_report_leaves_no_files(tmp_path, number, status):
    source = "import sys; from infinity.tools.cli import main; sys.exit(main(['doctor', sys.argv[1]]))"
    with start_python(source, tmp_path) as process:
        assert process.stderr.readline().startswith("self-test: step ")
        assert len(everything_in(tmp_path)) > 1
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == status
    assert output.splitlines()[-1] == "self-test"
    assert everything_in(tmp_path) == []
