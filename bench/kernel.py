"""Parameters per second of the update kernel, beside torch's fused fp32 AdamW on the same cores and the same kind of memory.

The kernel moves 26 bytes a parameter (bf16 split master, bf16 gradient), 18 with bf16 moments and 14 with 8-bit moments. torch's kernel moves
28 (all fp32). Every round runs each variant once over the whole working set, so a slow moment of the machine affects all variants. The ratio
is taken within a round.

    python bench/kernel.py                       # one core, then all cores
    python bench/kernel.py --cores 1 4 16 --json kernel.json
    python bench/kernel.py --values stuck        # momenta without a gradient for a thousand steps: denormals
    python bench/kernel.py --device cuda         # the kernel of the GPU
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _common import exit_with, positive, synchronize  # noqa: E402

from infinity.formats.format import SCALE_BLOCK  # noqa: E402
from infinity.optim import _adam  # noqa: E402
from infinity.optim.adam import AdamScalars, Dither, adam_step, split_master  # noqa: E402
from infinity.system.arena import Arena  # noqa: E402

HYPER = {"lr": 1e-4, "weight_decay": 0.1, "eps": 1e-8}
BETAS = (0.9, 0.95)
MOMENTS = {"fp32": ("", 26), "bf16": (" bf16 mom.", 18), "8bit": (" 8-bit mom.", 14)}
"""The end of a variant's name, and the bytes that it moves a parameter."""
SPLIT = ((torch.bfloat16, "weight"), (torch.int16, "residual"), (torch.float32, "momentum"), (torch.float32, "variance"))


VALUES = {"ordinary": (1.0, 0.0, 0.0), "faint": (1e-18, 1e-3, 1e-6), "stuck": (0.0, 6e-45, 1e-6)}
"""The factor of gradients; the moments."""


class Chunks:
    """num_chunks chunks of numel parameters: as split-master records with bf16 gradients and each kind of moments, and all in fp32.

    values: of VALUES. 8-bit moments begin at zero.
    """

    def __init__(self, num_chunks: int, numel: int, plain_memory: bool, values: str, device: str):
        self.arena = Arena()
        self.plain_memory, self.device = plain_memory or device != "cpu", device
        self.numel = num_chunks * numel
        self.step = 0
        self.ours, self.torchs = {kind: [] for kind in MOMENTS}, []
        scale, *moments = VALUES[values]
        for seed in range(num_chunks):
            generator = torch.Generator().manual_seed(seed)
            master, grad = (torch.randn(numel, generator=generator).mul_(0.02) for _ in range(2))
            grad *= scale
            record = [t for dtype, _ in SPLIT for t in self._tensors(dtype, numel)]
            for target, part in zip(record, split_master(master)):
                target.copy_(part)
            record += [t.copy_(grad) for t in self._tensors(torch.bfloat16, numel)]
            moments_of = {"fp32": record[2:4], "bf16": self._tensors(torch.bfloat16, numel, 2)}
            scales = self._tensors(torch.uint8, -(-numel // SCALE_BLOCK), 2)
            moments_of["8bit"] = [*self._tensors(torch.uint8, numel, 2), *scales]
            for kind, its_moments in moments_of.items():
                self.ours[kind].append((*record[:2], its_moments, record[4]))
            p, m, v, g = self._tensors(torch.float32, numel, 4)
            self.torchs.append((p.copy_(master), g.copy_(grad), m, v))
            for kept in (moments_of["fp32"], moments_of["bf16"], (m, v)):
                for tensor, value in zip(kept, moments):
                    tensor.fill_(value)
        self.lists = [list(tensors) for tensors in zip(*self.torchs)]

    def _tensors(self, dtype: torch.dtype, numel: int, count: int = 1) -> list[torch.Tensor]:
        if self.plain_memory:
            return [torch.zeros(numel, dtype=dtype, device=self.device) for _ in range(count)]
        return [self.arena.region(numel * dtype.itemsize).tensor(dtype, 0, numel) for _ in range(count)]

    def run_ours(self, isa: str, threads: int, kind: str) -> None:
        self.step += 1
        scalars = AdamScalars.of(**HYPER, betas=BETAS, step=self.step)
        dither = None if kind == "fp32" else Dither.of(0, "bench", self.step, 0)
        for weight, residual, moments, grad in self.ours[kind]:
            adam_step(weight, residual, moments, grad, scalars, dither=dither, threads=threads, isa=isa)

    def run_torch(self) -> None:
        self.step += 1
        steps = [torch.tensor(float(self.step), device=self.device) for _ in self.torchs]
        torch._fused_adamw_(
            *self.lists, [], steps, **HYPER, beta1=BETAS[0], beta2=BETAS[1], amsgrad=False, maximize=False
        )


def measure(chunks: Chunks, cores: list[int], isas: list[str], rounds: int) -> list[dict]:
    """One row a variant: median, least and most parameters per second, and the median ratio to torch within a round."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    variants, moved = {"torch fused fp32": chunks.run_torch}, {"torch fused fp32": 28}
    for isa, kind in itertools.product(isas, MOMENTS):
        end, nbytes = MOMENTS[kind]
        variants[isa + end] = functools.partial(chunks.run_ours, isa, len(cores), kind)
        moved[isa + end] = nbytes
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
        synchronize(chunks.device)
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            synchronize(chunks.device)
            speeds[name].append(chunks.numel / (time.perf_counter() - start))
    base = speeds["torch fused fp32"]
    rows = []
    for name, values in speeds.items():
        ratios = sorted(mine / torchs for mine, torchs in zip(values, base))
        rows.append(
            {
                "cores": len(cores),
                "variant": name,
                "params_per_s": statistics.median(values),
                "params_per_s_min": min(values),
                "params_per_s_max": max(values),
                "gbps": statistics.median(values) * moved[name] / 1e9,
                "ratio": statistics.median(ratios),
                "ratio_min": ratios[0],
                "ratio_max": ratios[-1],
            }
        )
    return rows


def main() -> None:
    all_cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=positive, nargs="+", help="numbers of cores; default: one, and all")
    parser.add_argument("--isa", nargs="+", choices=_adam.isas(), help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=positive, default=11)
    parser.add_argument("--num-chunks", type=positive, default=8)
    parser.add_argument("--chunk-numel", type=positive, default=8 << 20)
    parser.add_argument("--values", choices=VALUES, default="ordinary", help="faint: gradients whose squares are denormals")
    parser.add_argument("--plain-memory", action="store_true", help="torch's allocator in place of huge pages, for both")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()

    if args.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: this machine has no GPU that PyTorch can use")
        if args.isa is not None or args.cores is not None:
            parser.error("--device cuda has one kernel: leave out --isa and --cores")
    args.isa = args.isa or (list(_adam.isas()) if args.device == "cpu" else ["triton"])
    args.cores = args.cores or (sorted({1, len(all_cores)}) if args.device == "cpu" else [1])
    chunks = Chunks(args.num_chunks, args.chunk_numel, args.plain_memory, args.values, args.device)
    rows = []
    print(f"{chunks.numel / 1e6:.0f} M parameters, {args.rounds} rounds, torch {torch.__version__}")
    print(f"{'cores':>5}  {'variant':<18}{'Mparam/s':>9}{'min - max':>15}{'GB/s':>7}{'ratio':>8}{'min - max':>14}")
    for num_cores in sorted(args.cores):  # ascending: existing threads keep their cores
        for row in measure(chunks, all_cores[:num_cores], args.isa, args.rounds):
            rows.append(row)
            print(
                f"{row['cores']:>5}  {row['variant']:<18}{row['params_per_s'] / 1e6:>9.0f}"
                f"{row['params_per_s_min'] / 1e6:>8.0f} -{row['params_per_s_max'] / 1e6:>5.0f}{row['gbps']:>7.1f}"
                f"{row['ratio']:>8.3f}{row['ratio_min']:>8.2f} -{row['ratio_max']:>5.2f}",
                flush=True,
            )
    if args.json:
        cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
        about = {"cpu": cpu or platform.machine(), "torch": torch.__version__, "numel": chunks.numel}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    exit_with(main)
