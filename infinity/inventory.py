"""What a checkpoint of an engine holds beside records: names of parameters, loose tensors, generators.

Knows modules, and how a manifest calls things. Must not know bytes, files or steps.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from infinity import manifest as manifests
from infinity import tiling
from infinity.engine import Engine
from infinity.errors import CheckpointError
from infinity.manifest import Parameter, Whole


def parameters_of(engine: Engine) -> tuple[list[Parameter], dict[str, str]]:
    """The engine's parameters as a manifest has them, but for their steps, and the other names of tied ones (of tiled layers)."""
    places = tiling.places(engine.model)
    found, names = [], {}
    for state in engine.registry.params:
        place = places.get(state.param)
        whole = Whole(place.name, place.shape, place.begin) if place is not None else None
        found.append(Parameter(state.name, tuple(state.shape), state.trainable, state.group, whole=whole))
        names[id(state.param)] = state.name
    everything = engine.model.named_parameters(remove_duplicate=False)
    aliases = {name: names[id(param)] for name, param in everything if id(param) in names and param not in places}
    return found, {name: first for name, first in aliases.items() if name != first} | tiling.tied(engine.model)


def loose_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """What of a state_dict is in no record: persistent buffers, and parameters that are no floating-point numbers or empty."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in engine.model.named_modules():
        own = {name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}
        own |= {name: param for name, param in dict.items(module._parameters) if param is not None and not engine.manages(param)}
        found |= {f"{prefix}.{name}" if prefix else name: value for name, value in own.items() if value is not None}
    return found


def with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(name, module) for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def generators(device: torch.device) -> dict:
    """The states of the random number generators of this process, in JSON."""
    kind, keys, *rest = np.random.get_state()
    found = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None,
        "numpy": (kind, keys.tobytes(), *rest),
        "python": random.getstate(),
    }
    return manifests.encode(found, lambda tensor: 0, "generators")


def set_generators(found: dict, device: torch.device) -> None:
    try:
        torch.set_rng_state(torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8))
        if found["cuda"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(found["cuda"]), dtype=torch.uint8), device)
        kind, keys, *rest = found["numpy"]
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        random.setstate(found["python"])
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, OverflowError, AttributeError) as error:
        raise CheckpointError(f"the generators' states in the checkpoint make no sense ({error})") from None
