"""A checkpoint that some ranks save and other numbers of ranks load: bytes that differ, and seconds beside the drive's rate.

    python bench/reshard.py [--params 3e7] [--ranks 8] [--loads 4,1] [--steps 3] [--optimizer-state-dtype bf16] [--device cuda]
                            [--directory DIR] [--limit 900] [--json FILE]

--ranks ranks train a GPT of about --params parameters in bf16 for some steps, and save. Then each number of --loads makes the model and the
engine anew and loads the checkpoint. The CRC-32 of each segment of each parameter (weight, residual and moments) must be that of the ranks
that saved. If any differs, the exit status is 1. Seconds are those of the slowest rank, from the call until the checkpoint is on the drive, or
the engine has it. They do not include the making of the model. The rates of the drive are measured first, with the settings of an engine.
States that live on NVMe use the same drive during a save or a load.
"""

import argparse
import json
import os
import tempfile
import time
import zlib
from pathlib import Path

import _common
import torch
import torch.distributed as dist
from _engines import join

import infinity
from infinity.model.gpt import GPT
from infinity.output import table, write_json
from infinity.tools.meta_models import gpt_size, num_heads

VOCAB = 8192


def main() -> int:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=_common.positive_float, default=1e9 if kind == "cuda" else 3e7)
    parser.add_argument("--ranks", type=_common.positive, default=max(1, torch.cuda.device_count()), help="that train and save")
    parser.add_argument("--loads", type=_common.positives, default=[1], metavar="RANKS,...", help="that load")
    parser.add_argument("--steps", type=_common.positive, default=3)
    parser.add_argument("--sequence", type=_common.positive, default=1024 if kind == "cuda" else 32, help="tokens; one sequence a rank and step")
    parser.add_argument("--optimizer-state-dtype", default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=kind)
    parser.add_argument("--directory", type=_common.directory, default=".", help="a directory is made in it, and removed")
    parser.add_argument("--limit", type=_common.positive_float, default=900, help="seconds of the ranks that save, and of those that load")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = _common.parse(parser)
    if options.case:
        _common.leave(lambda: run(argparse.Namespace(**json.loads(options.case))))
        return 0
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="reshard-") as folder:
        rates = _common.drive_rates(Path(folder), 1)
        saved = on(options, options.ranks, Path(folder), loads=False)
        loaded = {num: on(options, num, Path(folder), loads=True) for num in options.loads}
    differ = {num: different(saved["checksums"], each["checksums"]) for num, each in loaded.items()}
    rows = [row_of(f"save by {plural(options.ranks)}", saved, rates["write"], "-")]
    rows += [row_of(f"load by {plural(num)}", each, rates["read"], f"{differ[num]:,}") for num, each in loaded.items()]
    print(table(["call", "GB", "seconds", "GB/s", "drive alone, GB/s", "bytes that differ, at most"], rows))
    if options.json:
        told = {"saved": saved, "loaded": loaded, "differ": differ, "rates": rates}
        write_json(options.json, told | {"options": _common.given(options), "torch": torch.__version__})
    return int(any(differ.values()))


def plural(num_ranks: int) -> str:
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"


def on(options, num_ranks: int, folder: Path, *, loads: bool) -> dict:
    """The results of ranks that save or load: seconds, nbytes of the checkpoint, and checksums by parameter and segment."""
    case = _common.given(options) | {"directory": str(folder), "loads": loads}
    found = _common.on_ranks(__file__, ["--case", json.dumps(case)], num_ranks, options.limit)
    checksums = {name: of for rank in found for name, of in rank["checksums"].items()}
    return {"seconds": max(rank["seconds"] for rank in found), "nbytes": found[0]["nbytes"], "checksums": checksums}


def different(saved: dict, loaded: dict) -> int:
    """Bytes of the segments whose checksums differ, or that only one side has."""
    found = 0
    for name in saved.keys() | loaded.keys():
        before, after = saved.get(name, {}), loaded.get(name, {})
        for segment in before.keys() | after.keys():
            if before.get(segment) != after.get(segment):
                found += (before.get(segment) or after.get(segment))[1]
    return found


def row_of(call: str, found: dict, rate: float, differ: str) -> list[str]:
    gigabytes = found["nbytes"] / 1e9
    return [call, f"{gigabytes:.2f}", f"{found['seconds']:.2f}", f"{gigabytes / found['seconds']:.2f}", f"{rate / 1e9:.2f}", differ]


# In a rank.


def run(options) -> dict:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    cuda = options.device == "cuda"
    device = join("infinity", options.device, None if world == 1 else "nccl" if cuda else "gloo")
    swap, path = Path(options.directory, f"swap-{options.loads}-{world}"), Path(options.directory, "saved")
    swap.mkdir(exist_ok=True)
    settings = {"device": options.device, "dtype": "bf16", "optimizer_state_dtype": options.optimizer_state_dtype, "verbose": False}
    with infinity.init(infinity.Config(swap_dirs=swap, **settings)):
        hidden, layers = gpt_size(options.params)
        model = GPT(hidden, layers, num_heads(hidden), VOCAB, options.sequence, checkpoint_activations=True)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
    engine = infinity.engine_of(model)
    for number in range(0 if options.loads else options.steps):
        generator = torch.Generator().manual_seed((number << 16) + rank)
        tokens = torch.randint(VOCAB, (1, options.sequence + 1), generator=generator).to(device)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    if world > 1:
        dist.barrier()
    begin = time.perf_counter()
    if options.loads:
        infinity.load(path, model, optimizer)
    else:
        infinity.save(path, model, optimizer)
    report = {"seconds": time.perf_counter() - begin, "checksums": {}}
    report["nbytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    for number, (name, param) in enumerate(model.named_parameters()):
        state = engine.read_state(param)  # all ranks read; one of them computes the checksums
        if number % world == rank:
            report["checksums"][name] = {segment: [checksum(tensor), tensor.nbytes] for segment, tensor in state.items()}
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return report


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


if __name__ == "__main__":
    _common.exit_with(main)
