"""The cost of a tensor: a model of many small expert modules, compared with plain PyTorch.

    python bench/tensors.py [--tensors 100000] [--hidden 16] [--tier host] [--steps 5] [--json FILE]

Each expert has three linear layers without bias. All experts run in every step. The rows show seconds to construct model and optimizer, and
CPU seconds of the training thread in a step, both divided by the number of tensors. Each engine runs in a process of its own, in turn, in one
thread of PyTorch. The first two steps are not counted. Losses must agree within --tolerance, or the exit status is 1.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _common import add_tolerance, agree, apart, at_least, exit_with, given, parse, positive
from torch import nn

import infinity
from infinity import output

NUM_WARM = 2  # steps that are not counted
NUM_EXPERTS = 64  # of a layer
ENGINES = ("plain", "infinity")


class Expert(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.experts = nn.ModuleList(Expert(hidden) for _ in range(NUM_EXPERTS))

    def forward(self, x):
        return x + sum(expert(x) for expert in self.experts) / NUM_EXPERTS


class Model(nn.Module):
    def __init__(self, hidden: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=positive, default=100_000)
    parser.add_argument("--hidden", type=positive, default=16)
    parser.add_argument("--tier", choices=("device", "host"), default="host", help="of all states")
    parser.add_argument("--steps", type=at_least(NUM_WARM + 1), default=5)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)  # of a child process
    add_tolerance(parser)
    parser.set_defaults(dtype="fp32")
    options = parse(parser)
    if options.engine:
        output.write_json(options.json, measure(options))
        return 0
    reports = {engine: run(engine) for engine in ENGINES}
    print("engine     tensors   construct   of it the optimizer   a step, CPU of the training thread   (us a tensor)")
    for engine, report in reports.items():
        construct, optimizer, step = (report[name] / report["tensors"] * 1e6 for name in ("construct", "optimizer", "step"))
        print(f"{engine:9} {report['tensors']:8,}   {construct:9.0f}   {optimizer:19.0f}   {step:34.0f}")
    ratio = reports["infinity"]["step"] / reports["plain"]["step"]
    print(f"construct {reports['infinity']['construct']:.1f} s; a step takes {ratio:.2f} of plain PyTorch's CPU time")
    if options.json:
        output.write_json(options.json, {"engines": reports, "torch": torch.__version__, "options": given(options)})
    return int(not agree(options, apart(reports["plain"]["losses"], reports["infinity"]["losses"])))


def run(engine: str) -> dict:
    """The report of an engine, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--json=")]
        subprocess.run([sys.executable, __file__, *arguments, "--engine", engine, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def measure(options: argparse.Namespace) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = options.hidden, -(-options.tensors // (3 * NUM_EXPERTS))
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # imports what the first optimizer of a process imports
    start = time.perf_counter()
    if options.engine == "plain":
        model = Model(*shape)
        built = time.perf_counter()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        tiers = {"param_tier": options.tier, "optimizer_state_tier": options.tier}
        with infinity.init(infinity.Config(device="cpu", dtype="fp32", device_memory="4GiB", host_memory="4GiB", **tiers)):
            model = Model(*shape)
        built = time.perf_counter()
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
    end = time.perf_counter()
    x, seconds, losses = torch.randn(8, options.hidden), [], []
    for _ in range(options.steps):
        begin = time.thread_time()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.thread_time() - begin)
        losses.append(loss.item())
    return {
        "tensors": sum(1 for _ in model.parameters()),
        "construct": end - start,
        "optimizer": end - built,
        "step": statistics.median(seconds[NUM_WARM:]),
        "losses": losses,
    }


if __name__ == "__main__":
    exit_with(main)
