"""Bytes read and written per parameter in a steady state, by the counters of the engine and of the kernel."""

import re

import pytest
from support.helpers import NVME, training
from support.models import tokens

from infinity.model.gpt import GPT


def kernel_bytes():
    text = open("/proc/self/io").read()
    return tuple(int(re.search(rf"^{field}: (\d+)", text, re.M)[1]) for field in ("read_bytes", "write_bytes"))


def traffic(make, directory, num_steps=4, **config):
    """NVMe bytes read and written per parameter and step in a steady state, and pinned bytes per parameter.

    Asserts that the counters of the engine and of the kernel agree. Backward waits for updates and their writes. Otherwise updates would
    fall behind on a busy drive. Then weights that leave early are read again, or updates are put off to steps that are not counted."""
    with training(make, directory, dtype="bf16", chunk_mib=1 / 8, **NVME | config) as (model, engine, optimizer):
        assert len(engine.registry.chunks) >= 80

        def wait(module, grads):
            engine.updater.drain()
            engine.records.flush()

        for module in model.blocks.modules():
            module.register_full_backward_pre_hook(wait)

        def steps(first, count):
            for step in range(first, first + count):
                model(*tokens(step, vocab=256, batch=1, seq=16)).backward()
                optimizer.step()
                optimizer.zero_grad()

        def look():
            with engine.records.lock:  # under the lock no read begins
                stats = engine.stats()
                return [stats["nvme_read_nbytes"], stats["nvme_write_nbytes"], *kernel_bytes()]

        def counters():
            for chunk in engine.registry.chunks:
                if chunk.update.job is not None:
                    chunk.update.job.wait()
            engine.records.flush()
            last, found = None, look()
            while found != last:  # the kernel counts requests that have begun, the engine those that have ended
                engine.records._settler.drain()
                last, found = found, look()
            return found

        steps(0, 3)
        before = counters()
        steps(3, num_steps)
        read, written, kernel_read, kernel_written = (b - a for a, b in zip(before, counters(), strict=True))
        if kernel_read or kernel_written:
            assert read == pytest.approx(kernel_read, rel=0.01)
            assert written == pytest.approx(kernel_written, rel=0.01)
        stats = engine.stats()
        found = [nbytes / stats["num_parameters"] / num_steps for nbytes in (read, written)]
        print(f"{found[0]:.3f} read, {found[1]:.3f} written a parameter and step")
        return *found, stats["pinned_host_nbytes"] / stats["num_parameters"]


def traffic_gpt():
    return GPT(hidden=256, layers=8, heads=4, vocab=256, seq=16)
