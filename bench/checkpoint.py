"""The speed of saving and loading a checkpoint, relative to the drive, and the cost of a save for the steps beside it.

    python bench/checkpoint.py [--directory DIR] [--hidden 1024] [--layers 12] [--rounds 5] [--batch 8] [--part speed|steps] [--json FILE]

speed: one training state of 12 bytes a parameter, with records in host memory and on NVMe, compared with torch.save and
torch.distributed.checkpoint. All take turns in one run with the ceiling: as many bytes written to new files through aio_ext with
O_DIRECT, fsync included, or read back. With records on NVMe, the ceiling does both at once. Page-cache writes end with fsync, and the
page cache is dropped before reads. steps: three kinds of blocks of steps take turns. In the first kind, the first step saves a
checkpoint with wait=False, with 64 MiB of host memory or with the checkpoint's size. The second kind waits for the checkpoint. The third
has none. The cost is the extra time of a block with a checkpoint, relative to the steps that the checkpoint spans.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from _common import directory, exit_with, positive

import aio_ext
import infinity
from infinity.model.gpt import GPT
from infinity.system.arena import Arena

_REQUEST_NBYTES = 16 << 20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", type=directory, default=".", help="a directory is made in it, and removed")
    shape = (("hidden", 1024), ("layers", 12), ("heads", 16), ("vocab", 8192), ("seq", 128))
    for name, default in (*shape, ("batch", 8), ("rounds", 5), ("block", 4)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--dtype", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--homes", default="host,nvme")
    parser.add_argument("--part", choices=("speed", "steps", "all"), default="all")
    parser.add_argument("--json")
    options = parser.parse_args()
    found = {"torch": torch.__version__, "options": vars(options)}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        folder = Path(folder)
        for home in options.homes.split(","):
            if options.part != "steps":
                found[f"speed, {home}"] = speed(options, folder, home)
            if options.part != "speed":
                found[f"steps, {home}"] = steps(options, folder, home)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


# Speed.


def speed(options, folder: Path, home: str) -> dict:
    model, optimizer = training(options, folder, home)
    engine = infinity.engine_of(model)
    nbytes = sum(chunk.record.nbytes for chunk in engine.registry.chunks)
    peers = peer_state(engine.stats()["num_parameters"])
    target = folder / "saved"
    work = {
        "ceiling": (lambda: raw(folder / "raw", nbytes, home, "write"), lambda: raw(folder / "raw", nbytes, home, "read")),
        "infinity": (lambda: infinity.save(target, model, optimizer), lambda: infinity.load(target, model, optimizer)),
        "torch.save": (lambda: torch_save(peers, folder / "peer.pt"), lambda: torch_load(folder / "peer.pt")),
        "DCP": (lambda: dcp_save(peers, folder / "peer.dcp"), lambda: dcp_load(peers, folder / "peer.dcp")),
    }
    seconds = {name: {"save": [], "load": []} for name in work}
    for round in range(options.rounds + 1):
        for name, (save, load) in work.items():
            for what, call in (("save", save), ("load", load)):
                start = time.perf_counter()
                call()
                if round:  # the first one makes files and warms up
                    seconds[name][what].append(time.perf_counter() - start)
                gc.collect()
    engine.close()
    print(f"{nbytes / 1e9:.2f} GB, records in {home}: GB/s (least-most), share of the ceiling: median of the rounds' (least-most)")
    for name, both in seconds.items():
        line = f"  {name:>10}"
        for what in ("save", "load"):
            rates = [nbytes / taken / 1e9 for taken in both[what]]
            shares = [limit / taken for taken, limit in zip(both[what], seconds["ceiling"][what])]
            line += f"   {what} {statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f}), "
            line += f"{statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f})"
        print(line, flush=True)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {"nbytes": nbytes, "seconds": seconds}


def training(options, folder: Path, home: str):
    (folder / "swap").mkdir(exist_ok=True)
    config = infinity.Config(
        swap_dirs=folder / "swap",
        device=options.device,
        dtype=options.dtype,
        param_tier=home,
        optimizer_state_tier=home,
        residency="auto" if home == "host" else "none",
    )
    torch.manual_seed(0)
    with infinity.init(config):
        model = GPT(options.hidden, options.layers, options.heads, options.vocab, options.seq)
    return model, infinity.AdamW(model.parameters())


def peer_state(num_parameters: int) -> dict[str, torch.Tensor]:
    """As many bytes as an fp32 model with AdamW's moments, in tensors of 4 M elements."""
    count = -(-num_parameters // (4 << 20))
    return {f"{kind}.{i}": torch.randn(4 << 20) for kind in ("weight", "exp_avg", "exp_avg_sq") for i in range(count)}


def raw(path: Path, nbytes: int, home: str, op: str) -> None:
    """The drive alone: write or read a new file of nbytes. With records on NVMe, move as many bytes the other way at the same time."""
    arena = Arena()
    region = arena.region(8 * _REQUEST_NBYTES)
    buffers = [region.buffer[i * _REQUEST_NBYTES : (i + 1) * _REQUEST_NBYTES] for i in range(8)]
    nbytes = max(nbytes // _REQUEST_NBYTES, 1) * _REQUEST_NBYTES
    if op == "write" and path.exists():
        path.unlink()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    other = path.with_suffix(".other")
    with aio_ext.Queue(inflight_nbytes=16 << 20, inflight_write_nbytes=16 << 20) as queue:
        other_fd = os.open(other, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        if home == "nvme" and os.fstat(other_fd).st_size < nbytes:
            os.posix_fallocate(other_fd, 0, nbytes)
            for offset in range(0, nbytes, _REQUEST_NBYTES):
                queue.write(other_fd, buffers[0], offset).wait()
        if op == "write":
            os.posix_fallocate(fd, 0, nbytes)
        tickets = []
        for number, offset in enumerate(range(0, nbytes, _REQUEST_NBYTES)):
            if number >= 4:
                for ticket in tickets.pop(0):
                    ticket.wait()
            this, that = (queue.write, queue.read) if op == "write" else (queue.read, queue.write)
            both = [this(fd, buffers[2 * (number % 4)], offset)]
            if home == "nvme":
                both.append(that(other_fd, buffers[2 * (number % 4) + 1], offset))
            tickets.append(both)
        for both in tickets:
            for ticket in both:
                ticket.wait()
        if op == "write":
            os.fsync(fd)
        os.close(other_fd)
    os.close(fd)
    arena.close()


def to_disk(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def drop(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def torch_save(state, path: Path) -> None:
    path.unlink(missing_ok=True)
    torch.save(state, path)
    to_disk(path)


def torch_load(path: Path) -> None:
    drop(path)
    torch.load(path, weights_only=True)


def dcp_save(state, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    dcp.save(state, checkpoint_id=path, no_dist=True)
    to_disk(*path.iterdir())


def dcp_load(state, path: Path) -> None:
    drop(*path.iterdir())
    dcp.load(state, checkpoint_id=path, no_dist=True)


# Steps.


def steps(options, folder: Path, home: str) -> dict:
    model, optimizer = training(options, folder, home)
    engine = infinity.engine_of(model)
    tokens = torch.randint(options.vocab, (options.batch, options.seq + 1), device=options.device)
    nbytes = sum(chunk.record.nbytes for chunk in engine.registry.chunks)
    memory = {"64 MiB": 64 << 20, "all of it": nbytes, "waited for": 64 << 20}
    seconds = {kind: [] for kind in ("without", *memory)}
    spans = {kind: [] for kind in memory}

    def block(kind: str) -> float:
        start = time.perf_counter()
        saving = None
        for number in range(options.block):
            if number == 0 and kind != "without":
                saving = infinity.save(
                    folder / "saved", model, optimizer, wait=kind == "waited for", host_memory=memory[kind]
                )
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if saving is not None and saving.done:
                spans[kind].append(number + 1)
                saving = None
        if saving is not None:
            saving.wait()
            spans[kind].append(options.block)
        if options.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(options.rounds + 1):
        for kind, taken in seconds.items():
            taken.append(block(kind))
    for taken in (*seconds.values(), *spans.values()):
        del taken[0]  # the first one makes plans and files
    engine.close()
    shutil.rmtree(folder / "saved")
    step = statistics.median(seconds["without"]) / options.block
    print(f"steps of {step:.3f} s in blocks of {options.block}, {nbytes / 1e9:.2f} GB, records in {home}; more with a checkpoint:")
    for kind, numbers in spans.items():
        extra = [taken - without for taken, without in zip(seconds[kind], seconds["without"])]
        median, num_steps = statistics.median(extra), statistics.median(numbers)
        print(
            f"  {kind:>10}: {median:+.3f} s ({min(extra):+.3f} to {max(extra):+.3f}), {median / (num_steps * step):+.1%} of the "
            f"{num_steps:.0f} steps that it spans, {median / step:+.1%} of one step",
            flush=True,
        )
    return {"seconds": seconds, "spans": spans, "nbytes": nbytes}


if __name__ == "__main__":
    exit_with(main)
