"""The `bench` commands of single links: the bandwidth of each link alone, by chunk size.

Knows sizes, tables and plots. Must not know how bytes move: the probes move and compare them.
"""

from __future__ import annotations

import contextlib
import statistics

import torch

from infinity.config import DEFAULT_SWAP_DIR, Config
from infinity.errors import ConfigError, UsageError
from infinity.output import check_file, check_plot, give, pyplot, table
from infinity.sizes import format_bytes, parse_bytes
from infinity.system.capacity import gauge_of, host_free_nbytes
from infinity.system.ranks import Ranks
from infinity.system.swap_directory import ALIGNMENT
from infinity.tools.measure import probes
from infinity.tools.progress import Progress

LINKS = {
    "nc": "reads from NVMe to host memory",
    "cg": "copies from host memory to the device",
    "gg": "all-gathers between devices",
    "rs": "reduce-scatters between devices",
    "gc": "copies from the device to host memory",
    "cn": "writes from host memory to NVMe",
}
NVME_LINKS, RANK_LINKS = ("nc", "cn"), ("gg", "rs")
SIZES = ("1MiB", "2MiB", "4MiB", "8MiB", "16MiB", "32MiB", "64MiB")


def transfers(arguments) -> int:
    """The `bench nc`, `cg`, `gg`, `rs`, `gc` and `cn` commands. The probes compare all received bytes with the sent bytes."""
    link, sizes = arguments.link, sorted({_size(text) for text in arguments.sizes or SIZES})
    check_file(arguments.output, "--output")
    check_plot(arguments.plot, "--plot")
    with contextlib.ExitStack() as stack:
        device, ranks = stack.enter_context(probes.launched(arguments.device))
        if link in RANK_LINKS and not ranks.are_several:
            raise UsageError(f"{link} needs two devices: run `torchrun --nproc-per-node 2 -m infinity bench {link}`, a process per device")
        _check_memory(link, sizes[-1], device, ranks)
        # Rank 0 alone measures the links of one process. The other ranks wait.
        first = ranks.is_first
        if first:
            progress = stack.enter_context(Progress())
            paths = _paths(arguments, stack) if link in NVME_LINKS else ()
        results = []
        for nbytes in sizes if first or link in RANK_LINKS else ():
            if first:
                progress.show(f"{link}: chunks of {format_bytes(nbytes)}", last=True)
            if link in NVME_LINKS:
                probe = probes.SwapTransfers(paths, nbytes, write=link == "cn")
            elif link in RANK_LINKS:
                probe = probes.Collectives(ranks, device, nbytes, reduce=link == "rs")
            else:
                probe = probes.Copies(device, nbytes, to_device=link == "cg")
            with contextlib.closing(probe):
                gbps = [rate / 1e9 for rate in probes.rates(probe, arguments.repeats)]
            results.append({"chunk_nbytes": nbytes, "gbps": gbps})
        ranks.barrier()
    if first:
        report = {"link": link, "what": LINKS[link], "device": str(device), "world": ranks.world, "sizes": results}
        give(report, _table(report), arguments.json, arguments.output)
        if arguments.plot:
            _plot(report, arguments.plot)
    return 0


def _size(text: str) -> int:
    nbytes = parse_bytes(text)
    if not nbytes or nbytes % ALIGNMENT:
        raise ConfigError(f"--sizes {text}: expected a multiple of {ALIGNMENT} bytes, the alignment of direct I/O")
    return nbytes


def _check_memory(link: str, nbytes: int, device: torch.device, ranks: Ranks) -> None:
    """Raise ConfigError if memory is too small for the number of largest chunks that a probe needs."""
    on_host = 0 if link in RANK_LINKS else probes.MIN_CHUNKS + (link in NVME_LINKS)  # one more for the comparison
    on_device = 0 if link in NVME_LINKS else probes.MIN_CHUNKS
    if device.type == "cpu":
        on_host, on_device = on_host + on_device * (ranks.num_local if link in RANK_LINKS else 1), 0
    rooms = [("host memory", on_host, host_free_nbytes())]
    if on_device:
        rooms.append((f"memory of {device}", on_device, gauge_of(device).free_nbytes()))
    for where, num_chunks, free_nbytes in rooms:
        if num_chunks * nbytes > free_nbytes:
            raise ConfigError(
                f"--sizes {format_bytes(nbytes)}: the probe needs {num_chunks} chunks, {format_bytes(num_chunks * nbytes)} of {where}, "
                f"of which {format_bytes(free_nbytes)} are free; give smaller sizes"
            )


def _paths(arguments, stack: contextlib.ExitStack):
    """The swap directories. A missing default directory is created and removed at the end."""
    paths = Config(swap_dirs=arguments.swap_dirs or (DEFAULT_SWAP_DIR,)).swap_dirs
    if paths == (DEFAULT_SWAP_DIR,) and not DEFAULT_SWAP_DIR.exists():
        DEFAULT_SWAP_DIR.mkdir()
        stack.callback(DEFAULT_SWAP_DIR.rmdir)
    return paths


def _table(report: dict) -> str:
    ranks = f", {report['world']} ranks, bytes received by each" if report["link"] == "gg" else ""
    ranks = f", {report['world']} ranks, bytes sent by each" if report["link"] == "rs" else ranks
    rows = []
    for result in report["sizes"]:
        gbps = result["gbps"]
        rows.append([format_bytes(result["chunk_nbytes"]), f"{statistics.median(gbps):.2f}", f"{min(gbps):.2f}", f"{max(gbps):.2f}"])
    return f"{report['what']}, {report['device']}{ranks}\n\n" + table(["chunk", "GB/s", "lowest", "highest"], rows) + "\n\nall bytes compared"


def _plot(report: dict, path) -> None:
    """Draw the bandwidth by chunk size: median, lowest and highest."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    sizes = [result["chunk_nbytes"] for result in report["sizes"]]
    each = [result["gbps"] for result in report["sizes"]]
    axes.fill_between(sizes, list(map(min, each)), list(map(max, each)), alpha=0.2, label=f"lowest to highest of {len(each[0])}")
    axes.plot(sizes, list(map(statistics.median, each)), marker="o", label="median")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [format_bytes(nbytes).replace(".0 ", " ") for nbytes in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("size of a chunk")
    axes.set_ylabel("GB/s")
    axes.set_title(f"{report['link']}: {report['what']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
