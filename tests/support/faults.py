"""Checks of runs with faults: no hang, no thread or file is left, an error names a remedy. Also small models for such runs."""

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import torch
from support.models import H, Model, inputs, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity

SECONDS = 60  # a run that takes longer counts as hanging, also on a busy machine
REMEDY = re.compile(r"[;:,(] .*\b(see|use|free|raise|lower|name|end) ")


class Hang(BaseException):
    pass


@contextlib.contextmanager
def no_hang(seconds=SECONDS):
    """Raise Hang in the main thread after so many seconds, and again at each interval if the cleanup hangs. Uses a signal, no thread."""

    def ring(*_):
        raise Hang(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def our_threads():
    """The engine's threads, as objects, and the threads of I/O queues, as kernel thread numbers."""
    found = {thread for thread in threading.enumerate() if thread.name.startswith("infinity-")}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text() == "aio_ext\n":
                found.add(task.name)
    return found


@contextlib.contextmanager
def nothing_left(directory):
    """Asserts that the block leaves no new file and no new thread."""
    files, threads = set(directory.rglob("*")), our_threads()
    yield
    assert set(directory.rglob("*")) - files == set()
    deadline = time.monotonic() + 2  # the kernel removes an ended thread with a small delay
    while (left := our_threads() - threads) and time.monotonic() < deadline:
        os.sched_yield()
    assert not left


def linears(num=3, size=48):
    return nn.Sequential(*[nn.Linear(size, size) for _ in range(num)])


def assert_says_what_failed(error, code, directory):
    assert type(error) is infinity.SwapError, repr(error)
    assert error.errno == code and str(directory) in error.filename
    assert REMEDY.search(error.strerror), f"expected a remedy in the message, got: {error}"


def shared_chain():
    """Every chunk's gradient is complete late: each layer is used twice, each time in a reentrant checkpoint."""

    def build(self):
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(8))

    def run(self, x):
        x = x.requires_grad_()
        for layer in [*self.layers, *self.layers]:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
        return x

    return Model(build, run)


def chain_step(model, optimizer, step, accumulate=1):
    dtype = next(model.parameters()).dtype
    for micro in range(accumulate):
        loss = loss_of(model(inputs(model, 10 * step + micro).to(dtype))) / accumulate
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
