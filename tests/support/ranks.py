"""Processes that are the ranks of a test, torchrun, and functions that run on each rank, with a small GPT."""

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.model.gpt import GPT

ROOT = Path(__file__).parents[2]
SECONDS = 40  # a rank that answers later counts as hung
ON_NVME = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none", "chunk_mib": 1 / 64}


class World:
    """`size` ranks. `run` calls a function of a module on each rank and returns all results."""

    def __init__(self, size, folder):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "infinity"])
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, f"file://{folder}/store", theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *arguments, **options):
        answers = self.attempt(function, *arguments, **options)
        errors = [f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(answers) if not good]
        assert not errors, "\n".join(errors)
        return [answer for _, answer in answers]

    def attempt(self, function, *arguments, **options):
        """Like `run`, but returns (True, result) or (False, error as text) of each rank."""
        for pipe in self.pipes:
            pipe.send((function, arguments, options))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(SECONDS):
                self.close()
                pytest.fail(f"rank {rank} did not answer within {SECONDS} s; answers of lower ranks: {answers}")
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((False, "the process has ended"))
        return answers

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes = []


def _serve(rank, size, store, pipe):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    while True:
        try:
            function, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments, **options)))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            pipe.send((False, f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"))


def gpt(checkpoint=False, tie=False):
    return GPT(hidden=48, layers=2, heads=2, vocab=61, seq=16, checkpoint_activations=checkpoint, tie=tie)


def ranks():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def tokens(step, micro, batch=4):
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    x = torch.randint(61, (batch, 16), generator=generator)
    return x, (3 * x + 1) % 61


def share(rows):
    rank, world = ranks()
    count = len(rows) // world
    return rows[rank * count : (rank + 1) * count]


def settings(folder, **changes):
    options = {"swap_dirs": folder, "dtype": "fp32", "device": "cpu", "host_memory": "16MiB", "device_memory": "4MiB", "trace": True}
    return infinity.Config(**{**options, **changes})


def total(value):
    """The mean over the ranks."""
    value = torch.tensor(float(value), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(value)
    return value.item() / ranks()[1]


def states_of(engine, model):
    """Every segment of every parameter as bytes, on every rank. Bytes compare all bits."""
    return {
        f"{name}.{kind}": bytes(value.contiguous().view(-1).view(torch.uint8).numpy())
        for name, param in model.named_parameters()
        for kind, value in engine.read_state(param).items()
    }


def num_descriptors():
    """Open descriptors, except the store's file and files in /proc, which the watch opens whenever it checks other ranks."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(not link.endswith("/store") and not link.startswith("/proc/") for link in links)


def launch(folder, source, *, nodes=1, per_node=2, environment=None, seconds=SECONDS):
    """Run a script under torchrun on localhost. Return (exit status, output) of each node."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(ROOT), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node)]
            + ["--nproc-per-node", str(per_node), "--master-addr", "127.0.0.1", "--master-port", str(port), str(script), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        for node in range(nodes)
    ]
    try:
        return [(process.communicate(timeout=seconds)[0], process.returncode)[::-1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
