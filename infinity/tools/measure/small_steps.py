"""The time of Python in an engine, for an op and for a job of its threads, measured with steps of very small layers.

Knows engines, and the seconds of steps. Must not know the use of the numbers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from infinity.config import Config
from infinity.engine.offload import offload
from infinity.optim.optimizers import AdamW
from infinity.plan.partition import BLOCK_NUMEL
from infinity.plan.tiers import NVME
from infinity.system.ranks import Ranks, use_ranks
from infinity.system.threads import SystemThreads, using
from infinity.tools.measure import gpu_rates

NUM_LAYERS = 64
NUM_STEPS = 12  # of which the second half counts


def op_seconds(device: torch.device) -> float:
    """Seconds of the training thread per op with very little work; on the CPU, the seconds beyond those of plain PyTorch. Without the collectives
    of several ranks, which have figures of their own.

    A difference of two measurements: other work on the machine can make the difference negative.
    """
    plain = 0.0 if device.type == "cuda" else _small_step(device, None).passes_s
    return (_small_step(device, "device").passes_s - plain) / (2 * NUM_LAYERS)  # forward and backward


def job_seconds(device: torch.device, paths: Sequence[str | os.PathLike]) -> float:
    """Seconds of a job of an engine's threads with very few bytes: nearly all of them are Python, and the rest are small reads and writes.

    A step with small chunks on NVMe takes longer than the same step on the device. The difference is divided by the number of jobs. The shortest
    steps are compared, because other work has many chances to lengthen a step of many threads."""
    on_nvme, on_device = _small_step(device, NVME.name, paths), _small_step(device, "device")
    return (on_nvme.step_s - on_device.step_s) / (on_nvme.num_jobs - on_device.num_jobs)


class _Step(NamedTuple):
    """Seconds of the passes, in the median, and of the shortest step. num_jobs: number of jobs of lanes in a step."""

    passes_s: float
    step_s: float
    num_jobs: float


class _CountsJobs(SystemThreads):
    """num: number of jobs so far. Several threads add without a lock, so the number is approximate."""

    num = 0

    def begin_job(self) -> None:
        self.num += 1


def _small_step(device: torch.device, tier: str | None, paths: Sequence[str | os.PathLike] = ()) -> _Step:
    """A step of small layers in a tier, or in plain PyTorch without an optimizer. paths: swap directories."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(NUM_LAYERS)))
    with contextlib.ExitStack() as stack:
        optimizer, jobs = None, _CountsJobs()
        stack.enter_context(using(jobs))
        if tier is None:
            model.to(device)
        else:
            chunk_mib = -(-(128 * 128 + 128) // BLOCK_NUMEL) * BLOCK_NUMEL * 2 / 2**20  # one layer per chunk
            stack.callback(use_ranks, use_ranks(functools.partial(Ranks, alone=True)))
            places = {"param_tier": tier, "optimizer_state_tier": tier} | ({"residency": "none", "swap_dirs": paths} if paths else {})
            stack.enter_context(offload(model, Config(device=device.type, dtype="fp32", chunk_mib=chunk_mib, verbose=False, **places)))
            optimizer = AdamW(model.parameters())
        x, found = torch.randn(4, 128, device=device), []
        for _ in range(NUM_STEPS):
            began, before = time.perf_counter(), jobs.num
            model(x).sum().backward()
            gpu_rates.wait_for(device)
            passed = time.perf_counter()
            if optimizer is not None:
                optimizer.step()
            (optimizer or model).zero_grad()
            found.append(_Step(passed - began, time.perf_counter() - began, jobs.num - before))
        passes, steps, nums = zip(*found[NUM_STEPS // 2 :])
        return _Step(statistics.median(passes), min(steps), statistics.median(nums))
