"""Checks of the resources that Linux gives this process: limits, memory, huge pages, processors.

Knows the texts of /proc and /sys, and their meaning for an offload engine. Must not know directories, devices or models. Functions that
interpret take texts or numbers, so that tests can pass those of any machine. Functions that read are named after their file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from infinity.sizes import format_bytes
from infinity.system.capacity import UNLIMITED_NBYTES, cgroup_folders
from infinity.tools.doctor.findings import Finding, absent, attention, ok

LEAST_FILES = 1024  # the usual soft limit; data loaders, NCCL and checkpoints of many files share it
LEAST_HUGE_SHARE = 0.9


def kernel(release: str, architecture: str) -> Finding:
    version = re.match(r"(\d+)\.(\d+)", release)
    says_alignment = version is None or tuple(map(int, version.groups())) >= (6, 1)
    note = "" if says_alignment else "; older than 6.1, so it does not report the alignment of direct I/O, and the engine uses 4096 bytes"
    return ok("kernel", f"Linux {release}, {architecture}{note}")


def aio_requests(limit: int, used: int, needed: int) -> Finding:
    """limit: fs.aio-max-nr. used: fs.aio-nr. needed: requests in the queues of all ranks of this machine."""
    detail = f"{used} of {limit} requests in use; training here needs {needed}"
    if limit - used >= needed:
        return ok("aio-max-nr", detail)
    remedy = f"sudo sysctl fs.aio-max-nr={max(1 << 20, 2 * (used + needed))}"
    return attention("aio-max-nr", f"{detail}: queues become smaller, or the kernel refuses them", remedy)


def libaio(failure: OSError | None) -> Finding:
    """failure: the error of aio_ext.require_libaio(), None without an error."""
    if failure is None:
        return ok("libaio", "found")
    detail, _, remedy = failure.strerror.partition(". ")
    return attention("libaio", detail, remedy)


def locked_memory(limit: int | None, num_devices: int, failure: str = "") -> Finding:
    """limit: RLIMIT_MEMLOCK in bytes, None for no limit. failure: the reason if pinning memory for a device failed."""
    detail = f"limit {'none' if limit is None else format_bytes(limit)}"
    if not num_devices:
        return absent("memlock", f"{detail}; without a GPU no memory is pinned")
    if not failure:
        return ok("memlock", f"{detail}; pinning host memory works")
    remedy = "ulimit -l unlimited (docker: --ulimit memlock=-1, systemd: LimitMEMLOCK=infinity)"
    return attention("memlock", f"{detail}; {failure}", remedy)


def open_files(soft: int | None, hard: int | None) -> Finding:
    """RLIMIT_NOFILE; None for no limit."""
    if soft is None or soft >= LEAST_FILES:
        return ok("open files", f"limit {'none' if soft is None else soft}")
    if hard is None or hard >= LEAST_FILES:
        remedy = f"ulimit -n {LEAST_FILES}"
    else:
        remedy = f"raise the hard limit, {hard}, to {LEAST_FILES} or more (docker: --ulimit nofile={LEAST_FILES}, systemd: LimitNOFILE)"
    return attention("open files", f"limit {soft}, below {LEAST_FILES}", remedy)


def huge_pages(enabled: str | None) -> Finding:
    """enabled: the text of transparent_hugepage/enabled, such as "always [madvise] never"; None if the kernel lacks the file."""
    folder = "/sys/kernel/mm/transparent_hugepage"
    if enabled is None:
        return attention("huge pages", "this kernel has no transparent huge pages", "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE")
    chosen = re.search(r"\[(\w+)\]", enabled)
    mode = chosen[1] if chosen else enabled.strip()
    if mode in ("always", "madvise"):
        return ok("huge pages", f"transparent huge pages: {mode}")
    detail, remedy = f"transparent huge pages: {mode}; drives are slower with small pages", f"echo madvise | sudo tee {folder}/enabled"
    return attention("huge pages", detail, remedy)


def arena_pages(smaps: str, address: int, nbytes: int) -> Finding:
    """The share of an arena region that lies on huge pages, from the text of /proc/self/smaps."""
    huge, resident = 0, 0
    for begin, end, sizes in _mappings(smaps):
        if begin < address + nbytes and address < end:
            huge += sizes.get("AnonHugePages", 0)
            resident += sizes.get("Rss", 0)
    if not resident:
        detail = "/proc/self/smaps does not show the arena's memory"
        return attention("arena pages", detail, "mount /proc, or allow this process to read its smaps")
    share = huge / resident
    detail = f"{share:.0%} of {format_bytes(nbytes)} of the arena on huge pages"
    if share >= LEAST_HUGE_SHARE:
        return ok("arena pages", detail)
    return attention("arena pages", detail, "free memory, then: echo 1 | sudo tee /proc/sys/vm/compact_memory; see also the line `huge pages`")


def memory(meminfo: str, limit_nbytes: int | None) -> list[Finding]:
    """From the text of /proc/meminfo and the lowest limit of this process's control groups."""
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.M)}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    swap, swapped = sizes.get("SwapTotal", 0), sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0)
    detail = f"{format_bytes(free)} of {format_bytes(total)} available"
    if limit_nbytes is None or limit_nbytes >= total:
        findings = [ok("memory", f"{detail}; no control group has a lower limit")]
    else:
        findings = [ok("memory", f"{detail}, of which the control group allows {format_bytes(limit_nbytes)}")]
    if not swap:
        return [*findings, ok("swap space", "the operating system has none")]
    detail = f"{format_bytes(swapped)} of {format_bytes(swap)} of the operating system's swap space in use"
    if swapped <= total // 10:
        return [*findings, ok("swap space", detail)]
    remedy = "end other programs, then: sudo swapoff -a && sudo swapon -a"
    return [*findings, attention("swap space", f"{detail}: memory is or was short", remedy)]


def processors(count: int, allowed: int, quota: float | None) -> Finding:
    """count: CPUs of the machine. allowed: CPUs that this process may use. quota: CPU time of the control group, in CPUs."""
    detail = f"{allowed} of {count} CPUs"
    if quota is not None and quota < allowed:
        threads = max(1, int(quota))
        detail += f", with time for {quota:g} of them (cpu.max)"
        return attention("CPUs", f"{detail}: a larger number of threads wait for each other", f"export OMP_NUM_THREADS={threads}")
    if allowed == 1:
        remedy = "allow more, such as taskset -c 0-3 (docker: --cpus 4)" if count > 1 else "use a machine with more"
        return attention("CPUs", f"{detail}: transfers, updates and the model share it", remedy)
    return ok("CPUs", detail)


def numa(nodes: Mapping[int, set[int]], allowed: set[int], drives: Mapping[str, int], devices: Mapping[str, int]) -> list[Finding]:
    """nodes: the CPUs of each node. allowed: CPUs that this process may run on. drives, devices: the node of each, by name; -1 is unknown."""
    known = {name: node for name, node in (*drives.items(), *devices.items()) if node in nodes}
    if len(nodes) <= 1:
        return [ok("NUMA", "one node")]
    mine = {node for node, cpus in nodes.items() if cpus & allowed}
    where = "".join(f", {name} on {node}" for name, node in known.items())
    detail = f"{len(nodes)} nodes; this process may run on {_numbers(mine)}{where}"
    findings = []
    for name, node in known.items():
        if node not in mine:
            remedy = f"numactl --cpunodebind={node} --membind={node} infinity ..."
            findings.append(attention("NUMA", f"{detail}: {name} is on another node", remedy))
    beside = {devices[name] for name in devices if name in known}
    for name in drives:
        if name in known and beside and known[name] not in beside:
            remedy = f"name a directory on a drive of node {_numbers(beside)}"
            findings.append(attention("NUMA", f"{detail}: no GPU is on the node of {name}", remedy))
    return findings or [ok("NUMA", detail)]


def cpu_list(text: str) -> set[int]:
    """The CPUs of a list such as "0-3,8"."""
    pairs = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for low, _, high in pairs for cpu in range(int(low), int(high or low) + 1)}


def memory_limit(texts: list[str]) -> int | None:
    """The lowest limit in the texts of memory.max or memory.limit_in_bytes of several groups, in bytes; None without a limit."""
    limits = [int(text) for text in texts if text.strip().isdigit()]
    return min((limit for limit in limits if limit < UNLIMITED_NBYTES), default=None)


def cpu_quota(texts: list[str]) -> float | None:
    """The lowest quota in the texts of cpu.max of several groups, such as "200000 100000" (version 1: quota and period), in CPUs."""
    pairs = (text.split() for text in texts)
    return min((int(quota) / int(period) for quota, period in pairs if quota.isdigit()), default=None)


def read_memory_limit() -> int | None:
    folders = cgroup_folders(_text("/proc/self/cgroup") or "", "memory")
    return memory_limit([_text(folder / name) or "" for folder in folders for name in ("memory.max", "memory.limit_in_bytes")])


def read_cpu_quota() -> float | None:
    texts = []
    for folder in cgroup_folders(_text("/proc/self/cgroup") or "", "cpu"):
        both = (_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))
        texts += [text for text in (_text(folder / "cpu.max"), " ".join(both) if all(both) else None) if text]
    return cpu_quota(texts)


def read_nodes() -> dict[int, set[int]]:
    found = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    return {int(path.parent.name.removeprefix("node")): cpu_list(path.read_text()) for path in sorted(found)}


def read_huge_pages() -> str | None:
    return _text("/sys/kernel/mm/transparent_hugepage/enabled")


def read_aio() -> tuple[int, int]:
    """fs.aio-max-nr and fs.aio-nr. Raises OSError on a kernel without them."""
    return tuple(int(Path("/proc/sys/fs", name).read_text()) for name in ("aio-max-nr", "aio-nr"))


def read_node_of(device: Path) -> int:
    """The NUMA node of a device at a path of /sys, from the device or the nearest parent that names one; -1 for unknown."""
    real = Path(os.path.realpath(device))
    texts = (_text(folder / "numa_node") for folder in (real, *real.parents))
    return int(next(filter(None, texts), -1))


def _mappings(smaps: str):
    """(begin, end, {field: bytes}) of each mapping."""
    blocks = re.split(r"^([0-9a-f]+)-([0-9a-f]+) .*$", smaps, flags=re.M)
    for begin, end, body in zip(blocks[1::3], blocks[2::3], blocks[3::3]):
        yield int(begin, 16), int(end, 16), {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", body, re.M)}


def _numbers(values: set[int]) -> str:
    return " and ".join(map(str, sorted(values)))


def _text(path: Path | str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return None
