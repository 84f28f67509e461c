"""A checkpoint that some ranks save and other numbers of ranks load: the number of bytes that differ, and rates beside the drive's.

    python bench/load_on_other_ranks.py [--params 4e7] [--ranks 8] [--loads 4,1] [--steps 3] [--optimizer-state-dtype bf16] [--device cuda]
                                        [--directory DIR] [--limit 900] [--json FILE]

--ranks ranks train a GPT of about --params parameters in bf16 for some steps, and save. Then each number of --loads makes the model and the
engine anew and loads the checkpoint. Each segment of each parameter (weight, residual and moments), the number of updates of each parameter,
and the hyper-parameters must have the CRC-32 that they have on the ranks that saved. If any differs, the exit status is 1. 8-bit moments are
compared by their fp32 values.

Seconds are those of the slowest rank. A save ends when the checkpoint is on the drive. A load ends when all records are in their tiers. The
creation of the model and the start of the engine are not included. The rates of the drive are measured first, with the settings of an engine.
States that live on NVMe use the same drive during a save or a load.
"""

import argparse
import json
import os
import shutil
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
from infinity.system import drives
from infinity.tools.meta_models import gpt_size, num_heads

VOCAB = 8192
OPTIMIZER = "optimizer"  # beside the names of parameters: numbers of updates, and hyper-parameters


def main() -> int:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=_common.positive_float, default=1e9 if kind == "cuda" else 4e7, help="embeddings included")
    parser.add_argument("--ranks", type=_common.positive, default=max(1, torch.cuda.device_count()), help="number of ranks that train and save")
    parser.add_argument("--loads", type=_common.positives, default=[1], metavar="RANKS,...", help="numbers of ranks that load")
    parser.add_argument("--steps", type=_common.positive, default=3)
    parser.add_argument("--sequence", type=_common.positive, default=1024 if kind == "cuda" else 32, help="tokens; one sequence a rank and step")
    parser.add_argument("--optimizer-state-dtype", choices=("fp32", "bf16", "8bit"), default="fp32")
    parser.add_argument("--limit", type=_common.positive_float, default=900, help="seconds of the ranks that save, and of those that load")
    _common.add_place(parser)
    options = _common.parse(parser, plots=False)
    if options.case:
        _common.leave(lambda: run(argparse.Namespace(**json.loads(options.case))))
        return 0
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="load-on-other-ranks-") as folder:
        rates = _common.drive_rates(Path(folder), 1)
        saved = on_ranks(options, options.ranks, Path(folder), is_load=False)
        loaded = {num: on_ranks(options, num, Path(folder), is_load=True) for num in options.loads}
    differ = {num: different_nbytes(saved["checksums"], each["checksums"]) for num, each in loaded.items()}
    rows = [row_of(f"save by {ranks(options.ranks)}", saved, rates["write"], "-")]
    rows += [row_of(f"load by {ranks(num)}", each, rates["read"], f"{differ[num]:,}") for num, each in loaded.items()]
    print(table(["call", "GB", "seconds", "GB/s", "drive alone, GB/s", "bytes that differ, at most"], rows))
    if options.json:
        told = {"saved": saved, "loaded": loaded, "differ": differ, "rates": rates}
        write_json(options.json, told | {"options": _common.given(options), "torch": torch.__version__})
    return int(any(differ.values()))


def ranks(num: int) -> str:
    return "1 rank" if num == 1 else f"{num} ranks"


def on_ranks(options, num: int, folder: Path, *, is_load: bool) -> dict:
    """The results of ranks that save or load: seconds, nbytes of the checkpoint, and [CRC-32, bytes] by parameter and segment."""
    case = _common.given(options) | {"directory": str(folder), "is_load": is_load}
    found = _common.on_ranks(__file__, ["--case", json.dumps(case)], num, options.limit)
    checksums = {name: of for rank in found for name, of in rank["checksums"].items()}
    return {"seconds": max(rank["seconds"] for rank in found), "nbytes": found[0]["nbytes"], "checksums": checksums}


def different_nbytes(saved: dict, loaded: dict) -> int:
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
    device = join("infinity", options.device, None if world == 1 else "nccl" if options.device == "cuda" else "gloo")
    folder = Path(options.directory)
    model, optimizer = training(options, folder, device)
    engine = infinity.engine_of(model)
    for number in range(0 if options.is_load else options.steps):
        generator = torch.Generator().manual_seed((number << 16) + rank)
        tokens = torch.randint(VOCAB, (1, options.sequence + 1), generator=generator).to(device)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    if world > 1:
        dist.barrier()
    begin = time.perf_counter()
    if options.is_load:
        infinity.load(folder / "saved", model, optimizer)
    else:
        infinity.save(folder / "saved", model, optimizer)
    seconds = time.perf_counter() - begin
    nbytes = sum(file.stat().st_size for file in (folder / "saved").rglob("*") if file.is_file())
    report = {"seconds": seconds, "nbytes": nbytes, "checksums": checksums_of(engine, model, optimizer, rank, world)}
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return report


def training(options, folder: Path, device: torch.device) -> tuple[GPT, infinity.AdamW]:
    """A new model with its optimizer. A model that loads begins with other hyper-parameters."""
    swap = Path(folder, f"swap-{os.environ['WORLD_SIZE']}{'-load' if options.is_load else ''}")
    swap.mkdir(exist_ok=True)
    if (rates := folder / drives.CACHE_NAME).exists():
        shutil.copy(rates, swap)  # so that the engine does not measure the drive again
    settings = {"device": options.device, "dtype": "bf16", "optimizer_state_dtype": options.optimizer_state_dtype, "verbose": False}
    with infinity.init(infinity.Config(swap_dirs=swap, **settings)):
        hidden, layers = gpt_size(options.params)
        layers = max(1, round((options.params - hidden * (VOCAB + options.sequence)) / (12 * hidden**2)))
        model = GPT(hidden, layers, num_heads(hidden), VOCAB, options.sequence, checkpoint_activations=True)
    return model, infinity.AdamW(model.parameters(), lr=1e-3 if options.is_load else 1e-4, max_grad_norm=1.0)


def checksums_of(engine, model, optimizer, rank: int, world: int) -> dict:
    """This rank's share of the [CRC-32, bytes] by parameter and segment. Raises RuntimeError for a parameter without a trained moment."""
    found = {}
    for number, (name, param) in enumerate(model.named_parameters()):
        state = engine.read_state(param)  # all ranks read; one of them computes the checksums
        if number % world == rank:
            if not state["weight"].any() or not state["momentum"].any():
                raise RuntimeError(f"{name} has a weight or a momentum of zeros: nothing to compare")
            found[name] = {segment: checksum(tensor) for segment, tensor in state.items()}
    if not rank:
        found[OPTIMIZER] = {key: [zlib.crc32(repr(value).encode()), 1] for key, value in optimizer.state_dict().items()}
    return found


def checksum(tensor: torch.Tensor) -> list[int]:
    return [zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()), tensor.nbytes]


if __name__ == "__main__":
    _common.exit_with(main)
