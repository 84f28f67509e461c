"""A small training run that tests this machine: weights must have the bits of a run without NVMe, and a checkpoint must work.

Uses the engine as any program would. Must not know the properties of the machine, or how findings are shown.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import infinity
from infinity.checkpoints.reader import Checkpoint
from infinity.config import Config
from infinity.model.gpt import GPT, Batches
from infinity.plan.tiers import DEVICE, NVME
from infinity.sizes import format_bytes
from infinity.tools.doctor.findings import Finding, absent, attention, ok

STEPS = 10
REPEATED_STEPS = 2  # after the checkpoint
SIZES = {"hidden": 256, "layers": 4, "heads": 4, "vocab": 256, "seq": 64}
BATCH = 4
# Device and host memory of the run: together less than the weights and optimizer states, 38 MiB.
BUDGETS = {"device_memory": "8MiB", "host_memory": "16MiB"}
_TRAINING_SHARE = 0.4  # of the time limit, for all steps of the run with NVMe
_DIFFERENT = "look for memory or drive errors in dmesg; if there are none, report this text"


def checks(
    folders: Sequence[Path], seconds: float, say: Callable[[str], None], steps: int = STEPS
) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """The checks in order, by name. They take about `seconds` at most. folders: empty folders of the self-test, one per drive."""
    run = _SelfTest(folders, seconds, say, steps)
    with _same_bits_each_time(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about filesystems without O_DIRECT, which have their own finding
        with contextlib.ExitStack() as stack:
            yield "training", lambda: run.train(stack)
            yield "checkpoint", run.checkpoint
        yield "same bits", run.compare


class _SelfTest:
    """The model in an engine, from `train` on, and the results of the run."""

    def __init__(self, folders, seconds, say, steps):
        self.folders = folders
        self.started = time.monotonic()
        self.seconds = seconds
        self.say = say
        self.most_steps = steps
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batches = Batches(None, vocab=SIZES["vocab"], batch=BATCH, seq=SIZES["seq"], seed=0)
        self.losses = []
        self.weights = None

    def train(self, stack: contextlib.ExitStack) -> Finding:
        """Train with all weights and optimizer states on NVMe. The engine closes with the stack."""
        tiers = {"param_tier": NVME.name, "optimizer_state_tier": NVME.name, "residency": "none"}
        self.model, self.optimizer = self._build(swap_dirs=self.folders, **tiers, **BUDGETS)
        engine = stack.enter_context(infinity.engine_of(self.model))
        start = time.monotonic()
        while len(self.losses) < self.most_steps and (not self.losses or self._share() < _TRAINING_SHARE):
            self.losses += self._steps(self.model, self.optimizer, len(self.losses), 1)
            self.say(f"self-test: step {len(self.losses)} of {self.most_steps}, every state on NVMe")
        seconds = time.monotonic() - start
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        stats = engine.stats()
        self.weights = weights
        names = ("model_state_nbytes", "pinned_host_nbytes", "peak_device_nbytes", "nvme_read_nbytes", "nvme_write_nbytes")
        states, host, device, read, written = (format_bytes(stats[name]) for name in names)
        return ok(
            "training",
            f"{len(self.losses)} of {self.most_steps} steps in {seconds:.1f} s on {self.device}: "
            f"{stats['num_parameters'] / 1e6:.1f} M parameters, states of {states} on NVMe, {host} of host memory, {device} on the device; "
            f"{read} read, {written} written",
        )

    def checkpoint(self) -> Finding:
        """Save, verify, train, load the checkpoint, train again: both trainings must have the same losses."""
        if left_out := self._left_out("checkpoint"):
            return left_out
        self.say("self-test: checkpoint")
        path, number = self.folders[0] / "checkpoint", len(self.losses)
        infinity.save(path, self.model, self.optimizer)
        with Checkpoint(path) as checkpoint:
            nbytes = checkpoint.verify()
        onward = self._steps(self.model, self.optimizer, number, REPEATED_STEPS)
        infinity.load(path, self.model, self.optimizer)
        again = self._steps(self.model, self.optimizer, number, REPEATED_STEPS)
        detail = f"{format_bytes(nbytes)} saved, verified by checksums and loaded"
        if onward == again:
            return ok("checkpoint", f"{detail}; {REPEATED_STEPS} steps have the same losses before and after loading")
        return attention("checkpoint", f"{detail}; the next losses are {again} after loading, and were {onward} before", _DIFFERENT)

    def compare(self) -> Finding:
        """Train the same run with all data on the device, and compare losses and weights."""
        if left_out := self._left_out("same bits"):
            return left_out
        self.say("self-test: the same run without NVMe")
        model, optimizer = self._build(param_tier=DEVICE.name, optimizer_state_tier=DEVICE.name)
        with infinity.engine_of(model) as engine:
            losses = self._steps(model, optimizer, 0, len(self.losses))
            weights = model.state_dict()
            swapped_nbytes = engine.stats()["nvme_write_nbytes"]
        assert not swapped_nbytes
        differ = [name for name, value in weights.items() if not torch.equal(_bits(value), _bits(self.weights[name]))]
        if losses == self.losses and not differ:
            return ok("same bits", f"{len(losses)} losses and {len(weights)} weight tensors equal those of a run without NVMe")
        wrong = sum(mine != other for mine, other in zip(self.losses, losses))
        detail = f"{wrong} of {len(losses)} losses and {len(differ)} of {len(weights)} tensors differ from those of a run without NVMe"
        return attention("same bits", detail, _DIFFERENT)

    def _build(self, **places):
        torch.manual_seed(0)
        dtype = "bf16" if self.device == "cuda" else "fp32"  # many CPUs have no bf16 instructions
        with infinity.init(Config(device=self.device, dtype=dtype, chunk_mib=0.25, verbose=False, **places)):
            model = GPT(**SIZES)
        return model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

    def _steps(self, model, optimizer, first, count):
        """Train `count` steps from number `first`; returns the losses."""
        losses = []
        for step in range(first, first + count):
            x, y = (rows.to(self.device) for rows in self.batches(step))
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def _share(self) -> float:
        """The share of the time limit that has passed."""
        return (time.monotonic() - self.started) / self.seconds

    def _left_out(self, what: str) -> Finding | None:
        if self.weights is None:
            return absent(what, "skipped: the training before this check did not end")
        return absent(what, "skipped: the time limit was reached; see --seconds") if self._share() >= 1 else None


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


@contextlib.contextmanager
def _same_bits_each_time():
    """Kernels with a fixed order of sums: one thread on the CPU, and torch's deterministic kernels on CUDA."""
    num_threads, were = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(were)
        torch.set_num_threads(num_threads)
