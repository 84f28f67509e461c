"""Device memory over a step, with and without offload, on a simulated machine.

    python bench/memory.py [--machine h200x8] [--hidden 3072] [--layers 28] [--batch 4] [--json FILE] [--plot FILE]

PatrickStar shows such a plot for chunks. The engine trains a GPT on one device of the machine, without bytes, until its steps are steady.
Each allocation and each release of the last step is noted, at the moment at which the program asks for it. Blocks are checkpointed, except in
one case. The table has the least and the most bytes of the step, and the seconds of the step.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path

import _common

from infinity.config import Config
from infinity.output import pyplot, table, write_json
from infinity.simulation.device import DeviceMemory
from infinity.system.threads import now
from infinity.tools.machine import Machine
from infinity.tools.meta_models import gpt
from infinity.tools.predict.simulated_run import TrainingStep, train, world_of

SEQ, VOCAB = 1024, 50257
MOST_POINTS = 4000  # of a curve
ON = {tier: {"param_tier": tier, "optimizer_state_tier": tier} for tier in ("device", "host")}
CASES = {
    "all on the device, all activations": (ON["device"], False),
    "all on the device": (ON["device"], True),
    "all in host memory": (ON["host"], True),
    "all in host memory, nothing stays": (ON["host"] | {"residency": "none"}, True),
    "the same, checkpoints in host memory": (ON["host"] | {"residency": "none", "activation_tier": "host"}, True),
}


class NotedMemory(DeviceMemory):
    """Notes (seconds, allocated bytes) after each change."""

    def __init__(self, capacity_nbytes: int):
        super().__init__(capacity_nbytes)
        self.noted: list[tuple[float, int]] = []

    def _change(self, nbytes: int) -> None:
        super()._change(nbytes)
        self.noted.append((now(), self._allocated_nbytes))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, default=Path("h200x8"))
    for name, value in {"hidden": 3072, "layers": 28, "batch": 4}.items():
        parser.add_argument(f"--{name}", type=_common.positive, default=value)
    options = _common.parse(parser)
    machine = dataclasses.replace(Machine.load(options.machine), devices=1)
    subject = gpt(options.hidden, options.layers, max(1, options.hidden // 128), VOCAB, SEQ, options.batch, "bf16")
    print(subject.title)
    found = {name: noted(subject, machine, config, recompute) for name, (config, recompute) in CASES.items()}
    rows = []
    for name, points in found.items():
        least, most = (end(nbytes for _, nbytes in points) / 2**30 for end in (min, max))
        rows.append([name, f"{least:.1f}", f"{most:.1f}", f"{points[-1][0]:.3f}"])
    print(table(["", "least, GiB", "most, GiB", "step, s"], rows))
    if options.json:
        write_json(options.json, {"model": subject.title, "points": found})
    if options.plot:
        plot(options, subject.title, found)


def noted(subject, machine: Machine, config: dict, recompute: bool) -> list[tuple[float, int]]:
    """(seconds since its start, bytes) in the last step."""
    world = world_of(machine)
    world.memory = NotedMemory(world.memory.capacity_nbytes())
    with tempfile.TemporaryDirectory() as folder:
        settings = Config(device="cpu", dtype="bf16", swap_dirs=[folder], verbose=False, **config)
        # The engine frees its memory after `look`.
        (start, end), points = train(
            world, subject, settings, TrainingStep(recompute=recompute), look=lambda engine, marks: (marks[-2:], list(world.memory.noted))
        )
    points.append((end.seconds, points[-1][1]))
    return [(seconds - start.seconds, nbytes) for seconds, nbytes in points if seconds >= start.seconds]


def plot(options, title: str, found: dict) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    most = [max(nbytes for _, nbytes in points) / 2**30 for points in found.values()]
    for name, points in found.items():
        points = points[:: max(1, len(points) // MOST_POINTS)]
        axis.plot([seconds for seconds, _ in points], [nbytes / 2**30 for _, nbytes in points], linewidth=1, drawstyle="steps-post", label=name)
    axis.set(xlabel="seconds since the start of a step", ylabel="device memory, GiB", ylim=(0, 1.4 * max(most)), title=title.partition(":")[0])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    _common.exit_with(main)
