"""The rates of links and processors of this machine, in rounds.

Knows probes, ranks and rounds. Must not know drives, or the files of calibrate.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator

import torch

from infinity.system.ranks import Ranks
from infinity.tools.measure import figures, gpu_rates, probes
from infinity.tools.progress import Progress

LINK_NBYTES = 32 << 20  # of a copied or gathered chunk


def measure_links(device: torch.device, ranks: Ranks, progress: Progress) -> dict[str, figures.Figure]:
    """Figures by name: rates in units per second, and times in seconds. All ranks take part. The slowest rank counts."""
    rounds = [dict(_round(device, ranks, progress, f"round {number + 1} of {figures.NUM_ROUNDS}")) for number in range(figures.NUM_ROUNDS)]
    return {name: figures.Figure(tuple(values[name] for values in rounds), is_time=name.endswith("_s")) for name in rounds[0]}


def _round(device: torch.device, ranks: Ranks, progress: Progress, title: str) -> Iterator[tuple[str, float]]:
    """Measure each figure once, and yield its name and value."""

    def of_one(text: str, work: Callable[[], float]) -> float:
        show(text)
        return ranks.most([work() if ranks.is_first else 0.0])[0]

    def of_all(text: str, work: Callable[[], float], slowest=ranks.least) -> float:
        show(text)
        return slowest([work()])[0]

    def show(text: str) -> None:
        if ranks.is_first:
            progress.show(f"{text}, {title}", last=True)
        ranks.barrier()

    def rate(probe, together: Ranks | None = None) -> float:
        with contextlib.closing(probe):
            return statistics.median(probes.rates(probe, figures.NUM_REPEATS, together))

    def copies(to_device: bool) -> probes.Copies:
        return probes.Copies(device, LINK_NBYTES, to_device=to_device)

    cuda, several = device.type == "cuda", ranks.are_several
    yield "memory", of_one("host memory", probes.memory_rate)
    yield "update", of_one("updates in host memory", lambda: probes.update_rate(torch.device("cpu"), beside_gpu=cuda))
    yield "product", of_one("products on the device", lambda: probes.product_rate(device))
    yield "h2d", of_one("copies to the device", lambda: rate(copies(True)))
    yield "d2h", of_one("copies from the device", lambda: rate(copies(False)))
    yield "copy_s", of_one("a small copy", lambda: probes.copy_seconds(device))
    yield "op_s", of_all("small ops", lambda: probes.op_seconds(device), slowest=ranks.most)
    if cuda:
        yield "attention", of_one("attention", lambda: gpu_rates.attention_rate(device))
        yield "device_memory", of_one("device memory", lambda: gpu_rates.memory_rate(device))
        yield "device_update", of_one("updates on the device", lambda: probes.update_rate(device))
        yield "both", of_one("copies both ways", lambda: rate(probes.BothWays(device, LINK_NBYTES)))
    if several:
        yield "h2d_all", of_all("copies to all devices", lambda: rate(copies(True), ranks))
        yield "d2h_all", of_all("copies from all devices", lambda: rate(copies(False), ranks))
        if cuda:
            yield "both_all", of_all("copies both ways of all devices", lambda: rate(probes.BothWays(device, LINK_NBYTES), ranks))
        yield "gather", of_all("all-gathers", lambda: rate(probes.Collectives(ranks, device, LINK_NBYTES, reduce=False)))
        yield "reduce", of_all("reduce-scatters", lambda: rate(probes.Collectives(ranks, device, LINK_NBYTES, reduce=True)))
        yield "gather_s", of_all("a small all-gather", lambda: probes.gather_seconds(ranks, device), slowest=ranks.most)
