"""A model of a trillion parameters, really made and trained by the engine on a simulated machine: the cost of size itself.

    python bench/trillion.py [--model dense|experts|expert-modules] [--layers 128] [--ranks 8] [--steps 3] [--tokens 3072]
                             [--device-memory 100GiB] [--host-memory 230GiB] [--chunk-mib N] [--drive 6] [--json FILE]

`infinity.init` makes the model, the engine registers, packs and plans all of it, and rank 0 trains. Only bytes are missing: an operation takes
virtual time ([Note: tensors without bytes] in infinity/simulation/no_bytes.py). --drive is a rank's share of the drives in GB/s. All ranks are on
one node. Products, collectives and updates have the rates of `infinity plan --machine h200x8`. Copies to the device have that of updates.

The rows show seconds on this machine and the process's peak memory. Each step also has its virtual seconds, and the CPU seconds of the engine's
own Python. These are estimated from samples: the share in which the innermost code is the engine's, and not that of PyTorch, the model or the
simulation. The exit status is 1 if a step moves no bytes on NVMe.

Models: dense is a GPT with 12 H^2 parameters a layer. The others have 384 experts a layer, of which a token takes 8. With `experts`, each of the
three matrices of a layer is one tensor for all experts. With `expert-modules`, each expert is a module. --tokens is a multiple of 48 for both.
"""

import argparse
import collections
import contextlib
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from _common import exit_with, given, nbytes_of, parse, positive, positive_float
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import output
from infinity.model.gpt import GPT
from infinity.simulation.world import Rates, World
from infinity.system.threads import now

SAMPLE_S = 0.005
NUM_EXPERTS, NUM_CHOSEN, VOCAB = 384, 8, 51_200
PACKAGE = str(Path(infinity.__file__).parent) + os.sep
PYTORCH = str(Path(torch.__file__).parent) + os.sep


class Expert(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((hidden, inner), (hidden, inner), (inner, hidden)))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ExpertModules(nn.Module):
    """Each expert computes an equal share of the tokens."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(NUM_EXPERTS))

    def forward(self, x):
        parts = x.repeat(NUM_CHOSEN, 1).chunk(NUM_EXPERTS)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts)]).view(NUM_CHOSEN, *x.shape).sum(0)


class PackedExperts(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        sizes = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.empty(NUM_EXPERTS, *size).normal_(std=0.02)))

    def forward(self, x):
        parts = x.repeat(NUM_CHOSEN, 1).view(NUM_EXPERTS, -1, x.shape[-1])
        return ((F.silu(parts @ self.gate) * (parts @ self.up)) @ self.down).view(NUM_CHOSEN, *x.shape).sum(0)


class ExpertModel(nn.Module):
    """Layers of a router and experts; attention is left out."""

    def __init__(self, make, hidden: int, inner: int, num_layers: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, hidden), nn.Linear(hidden, VOCAB, bias=False)
        self.routers = nn.ModuleList(nn.Linear(hidden, NUM_EXPERTS, bias=False) for _ in range(num_layers))
        self.layers = nn.ModuleList(make(hidden, inner) for _ in range(num_layers))

    def forward(self, tokens, targets):
        x = self.embedding(tokens).flatten(0, 1)
        for router, layer in zip(self.routers, self.layers):
            x = x + checkpoint(layer, x, use_reentrant=False) * router(x).softmax(-1).amax(-1, keepdim=True)
        return F.cross_entropy(self.head(x), targets.flatten())


MODELS = {
    "dense": lambda layers, seq: GPT(25_600, layers, 200, VOCAB, seq, checkpoint_activations=True),
    "experts": lambda layers, seq: ExpertModel(PackedExperts, 4096, 1664, layers),
    "expert-modules": lambda layers, seq: ExpertModel(ExpertModules, 4096, 1664, layers),
}


class Sampler:
    """Counts, in the one simulated thread that runs, whose code is the innermost: of the engine, PyTorch, the simulation or the model."""

    def __init__(self, world: World):
        self.world, self.counts = world, collections.Counter()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            frames, running = sys._current_frames(), self.world.threads.running
            if running is not None and (frame := frames.get(running.ident)) is not None:
                self.counts[_owner_of(frame)] += 1

    def share(self, owner: str) -> float:
        """The share of an owner since the last call for all owners. Forgets the samples."""
        counts, self.counts = self.counts, collections.Counter()
        return counts[owner] / max(1, counts.total())


def _owner_of(frame) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PYTORCH):
            return "torch"
        if name.startswith(PACKAGE):
            inside = name[len(PACKAGE) :]
            return "simulation" if inside.startswith("simulation") else "model" if inside == os.path.join("model", "gpt.py") else "engine"
        frame = frame.f_back
    return "model"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dense")
    for name, default in (("layers", 128), ("ranks", 8), ("steps", 3), ("tokens", 3072)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--device-memory", type=nbytes_of, default="100GiB")
    parser.add_argument("--host-memory", type=nbytes_of, default="230GiB", help="of a rank")
    parser.add_argument("--chunk-mib", type=positive_float, help="by default the engine chooses")
    parser.add_argument("--drive", type=positive_float, default=6.0, help="GB/s of a rank")
    options = parse(parser)
    if options.tokens % (NUM_EXPERTS // NUM_CHOSEN):
        parser.error(f"--tokens {options.tokens}: expected a multiple of {NUM_EXPERTS // NUM_CHOSEN}, so that all experts have equally many")
    if options.plot:
        parser.error("--plot: this bench draws nothing")
    sys.setswitchinterval(SAMPLE_S / 10)
    rates = Rates(flops=600e12, device=4e12, host=28e9, collective=260e9, drive=options.drive * 1e9)
    world = World(rates, num_ranks=options.ranks, room_nbytes=int(61e12))
    with tempfile.TemporaryDirectory() as directory:
        rows = world.run(lambda: open_model(options, world, directory))
    if options.json:
        output.write_json(options.json, {"options": given(options), "rows": rows})
    if not all(row["NVMe GB"] for row in rows if row["part"].startswith("step")):
        print("a step moved no bytes on NVMe: lower --host-memory")
        return 1
    return 0


def open_model(options: argparse.Namespace, world: World, directory: str) -> list[dict]:
    sampler, rows = Sampler(world), []

    @contextlib.contextmanager
    def measured(part: str):
        drives = lambda: sum(each.read_nbytes + each.write_nbytes for each in world.drives)
        sampler.share("")
        start, cpu, virtual, moved = time.perf_counter(), time.process_time(), now(), drives()
        yield
        used = time.process_time() - cpu
        row = {"part": part, "s": time.perf_counter() - start, "CPU s": used, "engine's CPU s": used * sampler.share("engine")}
        row |= {"virtual s": now() - virtual, "NVMe GB": (drives() - moved) / 1e9}
        row["peak GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append(row)
        print("  ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{value:10}" for name, value in row.items()), flush=True)

    config = infinity.Config(
        device="cpu",
        swap_dirs=directory,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        compression="off",
        chunk_mib=options.chunk_mib,
    )
    with measured("init"), infinity.init(config):
        torch.set_default_dtype(torch.bfloat16)
        model = MODELS[options.model](options.layers, options.tokens)
        torch.set_default_dtype(torch.float32)
    with measured("optimizer"):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-5)
    with infinity.engine_of(model) as engine:
        registry = engine.registry
        num = sum(state.numel for state in registry.params)
        print(f"{num:,} parameters in {len(registry.params):,} tensors, {len(registry.chunks):,} chunks, {len(registry.spans):,} spans", flush=True)
        tokens = torch.zeros(1, options.tokens, dtype=torch.int64)
        for step in range(options.steps):
            with measured(f"step {step + 1}"):
                model(tokens, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
    return rows


if __name__ == "__main__":
    exit_with(main)
