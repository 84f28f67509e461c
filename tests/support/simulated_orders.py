"""Trainings of a small GPT on simulated threads and a simulated drive."""

from support.helpers import NVME, states_of, training
from support.models import gpt_step, gpt_step_by_layer, tiny_gpt
from support.simulated_storage import simulated_world

import infinity

SMALL = {"chunk_mib": 1 / 512, "host_memory": "128KiB", "device_memory": "128KiB"}
VISITORS = {"param_tier": "auto", "optimizer_state_tier": "auto", "residency": "auto", "device_memory": "400KiB"}
TRAININGS = {
    "backward": {},
    "deferred": {"update": "deferred"},
    "clipped": {"options": {"max_grad_norm": 0.1}},
    "accumulated": {"options": {"accumulation_steps": 2}},
    "bf16": {"dtype": "bf16"},
    "states in host memory": {"optimizer_state_tier": "host", "host_memory": "1MiB"},
    "muon": {"optimizer": infinity.Muon, "options": {"lr": 0.02}},
    "8 bits": {"dtype": "bf16", "optimizer_state_dtype": "8bit"},
    "coded": {"dtype": "bf16", "compression": "on", "host_memory": "64MiB"},
    "activations on NVMe": {"activation_tier": "nvme", "host_memory": "512KiB"},
    "visitors": VISITORS,
    "visitors, by layer": VISITORS | {"by_layer": True, "options": {"accumulation_steps": 3}},
    "by layer": {"by_layer": True, "options": {"accumulation_steps": 3}},
    "by layer, clipped": {"by_layer": True, "options": {"accumulation_steps": 3, "max_grad_norm": 0.1}},
}


def train(directory, steps=3, by_layer=False, **config):
    step_of = gpt_step_by_layer if by_layer else gpt_step
    with training(tiny_gpt, directory, **SMALL | NVME | config) as (model, engine, optimizer):
        losses = [step_of(model, optimizer, step, optimizer.accumulation_steps) for step in range(steps)]
        return losses, states_of(engine, model)


def simulated(main, seed, fails=lambda number: False):
    """Run main() on simulated threads. Returns (result, the drive)."""
    with simulated_world(seed, fails=fails) as (world, drives):
        return world.run(main), drives[-1]
