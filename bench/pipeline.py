"""Reads, updates and writes back a swap file of records, compared with the drive's rate without an engine.

    python bench/pipeline.py [--nvme DIR] [--gigabytes 4] [--rounds 5] [--json FILE]

Ceiling: aio_ext alone, from huge pages, on the extents of the records, which are already written. It reads and writes the same bytes
with as many requests in flight; the best block and in-flight sizes count. Pipeline: one optimizer step in which all gradients are
available at once, until the last byte is written. Rounds alternate. The bench prints medians and spread.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from _common import exit_with, positive, positive_float
from torch import nn

import aio_ext
import infinity
from infinity.plan.record import STATES, WEIGHTS
from infinity.system.arena import Arena, Slots


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", default="infinity-swap", help="made if it does not exist")
    parser.add_argument("--gigabytes", type=positive_float, default=4)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--chunk-mib", type=positive_float)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--json")
    options = parser.parse_args()
    Path(options.nvme).mkdir(parents=True, exist_ok=True)

    num_layers = max(1, round(options.gigabytes * 1e9 / 12 / (1 << 21)))
    model = nn.ModuleList(nn.Linear(1 << 11, 1 << 10, bias=False) for _ in range(num_layers))
    config = infinity.Config(
        swap_dirs=options.nvme,
        param_tier="nvme",
        optimizer_state_tier="nvme",
        residency="none",
        compression="off",
        device="cpu",
        update="backward",
        host_memory=options.host_memory,
        device_memory="512MiB",
        chunk_mib=options.chunk_mib,
    )
    with infinity.offload(model, config) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
        nbytes = engine.stats()["model_state_nbytes"]
        settings = [(block << 20, inflight << 20) for block in (1, 2) for inflight in (4, 8, 16)]
        pipeline_seconds(engine, optimizer)  # first: a record's moments are on the drive only after an update
        raw = {setting: [raw_seconds(engine, *setting)] for setting in settings}
        best = min(raw, key=lambda setting: raw[setting][0])
        ours, ceiling = [], []
        for round_ in range(options.rounds):
            ceiling.append(raw_seconds(engine, *best))
            ours.append(pipeline_seconds(engine, optimizer))
            print(f"round {round_}: ceiling {ceiling[-1]:.3f} s, pipeline {ours[-1]:.3f} s", file=sys.stderr, flush=True)
    report = {
        "gigabytes_each_way": nbytes / 1e9,
        "ceiling_gbps": [2 * nbytes / seconds / 1e9 for seconds in ceiling],
        "pipeline_gbps": [2 * nbytes / seconds / 1e9 for seconds in ours],
        "ceiling_block_mib": best[0] >> 20,
        "ceiling_inflight_mib": best[1] >> 20,
        "ratio": statistics.median(a / b for a, b in zip(ceiling, ours)),
        "chunks": len(engine.layout.chunks),
        "torch": torch.__version__,
    }
    for name in ("ceiling_gbps", "pipeline_gbps"):
        values = report[name]
        print(f"{name:14s} median {statistics.median(values):.2f}  min {min(values):.2f}  max {max(values):.2f}")
    print(f"ratio {report['ratio']:.3f} (ceiling at {best[0] >> 20} MiB blocks, {best[1] >> 20} MiB in the kernel)")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


def pipeline_seconds(engine, optimizer) -> float:
    """Seconds of one step over all records, with bf16 gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    gradient = torch.ones(params[0].shape, dtype=torch.bfloat16)
    start = time.perf_counter()
    outputs = torch.zeros((), requires_grad=True)
    hook = outputs.register_hook(lambda _: _arrive(engine, params, gradient))
    (outputs * 1).backward()
    hook.remove()
    optimizer.step()
    optimizer.zero_grad()
    engine.flush()
    return time.perf_counter() - start


def _arrive(engine, params, gradient) -> None:
    engine.cycle.forward.num_training = 1  # as if one forward pass had used every parameter once
    for state in engine.registry.params:
        state.touched = 1
    engine.cycle.backward.begin()
    for param in params:
        engine.cycle.backward.gradient(engine.registry.find(param), gradient)


def raw_seconds(engine, block_nbytes: int, inflight_nbytes: int) -> float:
    """Seconds to read every record and write it back, six in flight, without an update. The bytes do not change."""
    swap = engine.swap
    (directory,) = swap._directories
    chunks = engine.registry.chunks
    extents = [e.extent for chunk in chunks for kind in (WEIGHTS, STATES) if (e := chunk.extents[kind]) is not None]
    arena = Arena()
    slots = Slots(arena, "raw", max(extent.nbytes for extent in extents), 16)
    with aio_ext.Queue(block_nbytes=block_nbytes, inflight_nbytes=inflight_nbytes) as queue:
        start = time.perf_counter()
        reading, writing = [], []
        for extent in extents:
            (stripe,) = extent.stripes
            slot = slots.try_acquire()
            while slot is None:
                if reading:
                    _turn(queue, directory.file, reading, writing)
                ticket, free = writing.pop(0)
                ticket.wait()
                free.release()
                slot = slots.try_acquire()
            buffer = slot.buffer[: extent.nbytes]
            reading.append((queue.read(directory.file, buffer, stripe.offset), slot, buffer, stripe.offset))
            if len(reading) > 8:
                _turn(queue, directory.file, reading, writing)
        while reading:
            _turn(queue, directory.file, reading, writing)
        for ticket, free in writing:
            ticket.wait()
            free.release()
        seconds = time.perf_counter() - start
    slots.close()
    arena.close()
    return seconds


def _turn(queue, fd: int, reading: list, writing: list) -> None:
    """Wait for the oldest read and write it back."""
    ticket, slot, buffer, offset = reading.pop(0)
    ticket.wait()
    writing.append((queue.write(fd, buffer, offset), slot))


if __name__ == "__main__":
    exit_with(main)
