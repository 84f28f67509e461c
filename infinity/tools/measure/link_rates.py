"""The rates of links and processors of this machine, in rounds.

Knows probes, ranks and rounds. Must not know drives, or the files of calibrate.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from infinity.system.ranks import Ranks
from infinity.tools.measure import figures, gpu_rates, probes, small_steps
from infinity.tools.progress import Progress

LINK_NBYTES = 32 << 20  # of a copied or gathered chunk


def measure_links(device: torch.device, ranks: Ranks, progress: Progress, paths: Sequence[Path]) -> dict[str, figures.Figure]:
    """Figures by name: rates in units per second, and times in seconds. All ranks take part. The slowest rank counts. paths: swap directories."""
    measures = _measures(device, ranks, paths)

    def measure(name: str, number: int) -> list[float]:
        title, work = measures[name]
        if ranks.is_first:
            more = f"round {number + 1} of {figures.NUM_ROUNDS}" if number < figures.NUM_ROUNDS else "once more"
            progress.show(f"{title}, {more}", last=True)
        ranks.barrier()
        return [work()]

    return {name: found for name, (found,) in figures.in_rounds(measures, measure).items()}


def _measures(device: torch.device, ranks: Ranks, paths: Sequence[Path]) -> dict[str, tuple[str, Callable[[], float]]]:
    """By name: a title, and a function that measures the figure once. The value is the same on all ranks."""

    def of_one(title: str, work: Callable[[], float]) -> tuple[str, Callable[[], float]]:
        return title, lambda: ranks.most([work() if ranks.is_first else 0.0])[0]

    def of_all(title: str, work: Callable[[], float], slowest=ranks.least) -> tuple[str, Callable[[], float]]:
        return title, lambda: slowest([work()])[0]

    def rate(probe, together: Ranks | None = None) -> float:
        with contextlib.closing(probe):
            return statistics.median(probes.rates(probe, figures.NUM_REPEATS, together))

    def copies(to_device: bool) -> probes.Copies:
        return probes.Copies(device, LINK_NBYTES, to_device=to_device)

    cuda, several = device.type == "cuda", ranks.are_several
    found = {
        "memory": of_one("host memory", probes.memory_rate),
        "update": of_one("updates in host memory", lambda: probes.update_rate(torch.device("cpu"), beside_gpu=cuda)),
        "product": of_one("products on the device", lambda: probes.product_rate(device)),
        "h2d": of_one("copies to the device", lambda: rate(copies(True))),
        "d2h": of_one("copies from the device", lambda: rate(copies(False))),
        "copy_s": of_one("a small copy", lambda: probes.copy_seconds(device)),
        "op_s": of_all("small ops", lambda: small_steps.op_seconds(device), slowest=ranks.most),
        "job_s": of_one("small chunks", lambda: small_steps.job_seconds(device, paths)),
    }
    if not cuda:
        found["product_beside_drives"] = of_one("products while drives work", lambda: probes.product_rate_beside_drives(paths))
    else:
        found |= {
            "attention": of_one("attention", lambda: gpu_rates.attention_rate(device)),
            "device_memory": of_one("device memory", lambda: gpu_rates.memory_rate(device)),
            "device_update": of_one("updates on the device", lambda: probes.update_rate(device)),
            "both": of_one("copies both ways", lambda: rate(probes.BothWays(device, LINK_NBYTES))),
        }
    if several:
        found |= {
            "h2d_all": of_all("copies to all devices", lambda: rate(copies(True), ranks)),
            "d2h_all": of_all("copies from all devices", lambda: rate(copies(False), ranks)),
            "gather": of_all("all-gathers", lambda: rate(probes.Collectives(ranks, device, LINK_NBYTES, reduce=False))),
            "reduce": of_all("reduce-scatters", lambda: rate(probes.Collectives(ranks, device, LINK_NBYTES, reduce=True))),
            "gather_s": of_all("a small all-gather", lambda: probes.gather_seconds(ranks, device), slowest=ranks.most),
        }
    if several and cuda:
        found["both_all"] = of_all("copies both ways of all devices", lambda: rate(probes.BothWays(device, LINK_NBYTES), ranks))
    return found
