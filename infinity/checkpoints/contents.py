"""What a checkpoint of an engine holds beside records: names of parameters, loose tensors, values, generators.

Knows modules, and how a manifest calls things. Must not know bytes, files or steps.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from infinity.checkpoints.encoding import encode
from infinity.checkpoints.manifest import Manifest, Parameter, Whole
from infinity.engine.engine import Engine
from infinity.errors import CheckpointError
from infinity.model import tiling

_MT_WORDS = 624  # of a Mersenne twister

def parameters_of(engine: Engine) -> tuple[list[Parameter], dict[str, str]]:
    """The engine's parameters as a manifest has them, but for their steps, and the other names of tied ones (of tiled layers)."""
    places = tiling.places(engine.model)
    found, names = [], {}
    for state in engine.registry.params:
        place = places.get(state.param)
        whole = Whole(place.name, place.shape, place.begin) if place is not None else None
        dtype = engine.layout.specs[state.index].format.name
        own_dtype = dtype if dtype != engine.layout.main_storage else None
        found.append(Parameter(state.name, tuple(state.shape), state.trainable, state.group, whole=whole, dtype=own_dtype))
        names[id(state.param)] = state.name
    everything = engine.model.named_parameters(remove_duplicate=False)
    aliases = {name: names[id(param)] for name, param in everything if id(param) in names and param not in places}
    return found, {name: first for name, first in aliases.items() if name != first} | tiling.tied(engine.model)


def draft(engine: Engine, **rest) -> Manifest:
    """The manifest of a checkpoint of the engine, which has no files yet. rest: what a Manifest has of other things than the engine."""
    parameters, aliases = parameters_of(engine)
    return Manifest(
        world=engine.ranks.world,
        dtype=engine.layout.main_storage,
        moments_dtype=engine.config.moments,
        moments=engine.moments,
        seed=engine.config.seed if engine.updater.seed is None else engine.updater.seed,
        parameters=tuple(parameters),
        aliases=aliases,
        chunks=engine.layout.chunks,
        **rest,
    )


def loose_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """What of a state_dict is in no record: persistent buffers, and parameters that are no floating-point numbers or empty."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in engine.model.named_modules():
        own = persistent_buffers(module)
        own |= {name: param for name, param in dict.items(module._parameters) if param is not None and not engine.manages(param)}
        found |= {f"{prefix}.{name}" if prefix else name: value for name, value in own.items()}
    return found


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's own ones that a state_dict has."""
    left_out = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None and name not in left_out}


def with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(name, module) for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def values_of(engine: Engine, put: Callable[[torch.Tensor], int], scheduler, extra) -> dict:
    """What a manifest has of values that are in no record, as of now. put: of `encode`. Buffers are of rank 0, the rest of every rank."""

    def put_own(tensor: torch.Tensor) -> int:
        if engine.manages(tensor):
            raise CheckpointError("a parameter of the model is only a placeholder outside of it; it is saved anyway")
        return put(tensor)

    extra = encode(extra, put_own, "extra")  # first: its tensors' indices are those of other ranks, which have no buffers
    loose = {} if engine.ranks.rank else loose_tensors(engine)
    buffers = {name: encode(value, put_own, f"buffer {name}") for name, value in loose.items()}
    extra_state = {name: module.get_extra_state() for name, module in with_extra_state(engine.model)}
    found = {
        "model": {"buffers": buffers, "extra_state": encode(extra_state, put_own, "extra state of the model")},
        "optimizer": None,
        "scheduler": encode(None if scheduler is None else scheduler.state_dict(), put_own, "scheduler"),
        "scaler": None,
        "extra": extra,
    }
    if engine.optimizer is not None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
        groups = encode(groups, put_own, "a parameter group")
        found["optimizer"] = {"rule": type(engine.optimizer.rule).__name__, "groups": groups}
    if engine.cycle.scaler is not None:
        found["scaler"] = {"scale": engine.cycle.scaler.scale, "num_clean": engine.cycle.scaler.num_clean}
    return found


def digest_of(value, crcs: Sequence[int]) -> bytes:
    """The same for the same encoded values. crcs: of its tensors, by index."""

    def sums(value) -> list[int]:
        """Of the tensors that it refers to, in order."""
        if isinstance(value, list):
            return [crc for item in value for crc in sums(item)]
        if not isinstance(value, dict):
            return []
        own = [crcs[value[name]] for name in ("$tensor", "$array") if type(value.get(name)) is int]
        return own or [crc for item in value.values() for crc in sums(item)]

    return hashlib.sha256(json.dumps([value, sums(value)]).encode()).digest()


def generators(device: torch.device) -> dict:
    """The states of the random number generators of this process, in JSON."""
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None,
        "numpy": (kind, keys.tobytes(), *rest),
        "python": (version, np.array(words, dtype=np.uint32).tobytes(), gauss),
    }
    return encode(found, lambda tensor: 0, "generators")


def checked_generators(found: object, device: torch.device) -> dict:
    """States as `set_generators` takes them. Raises CheckpointError for what is none: native code reads and writes where they say."""
    try:
        kind, keys, position, *gauss = found["numpy"]
        version, words, next_gauss = found["python"]
        if not isinstance(words, bytes):  # as it was first written
            words = np.array(words, dtype=np.uint32).tobytes() if all(type(word) is int and 0 <= word < 1 << 32 for word in words) else b""
        *_, last = struct.unpack(f"<{_MT_WORDS + 1}I", words)
        cuda = found["cuda"] if device.type == "cuda" else None
        checks = {
            "torch": _is_torch_state(found["torch"]),
            "cuda": cuda is None or _is_cuda_state(cuda, device),
            "numpy": kind == "MT19937"
            and isinstance(keys, bytes)
            and len(keys) == 4 * _MT_WORDS
            and type(position) is int
            and 0 <= position <= _MT_WORDS
            and len(gauss) == 2
            and type(gauss[0]) is int
            and gauss[0] in (0, 1)
            and type(gauss[1]) is float,
            "python": version == 3 and 0 <= last <= _MT_WORDS and (next_gauss is None or type(next_gauss) is float),
        }
    except (KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
        raise CheckpointError(f"the generators' states in the checkpoint make no sense ({type(error).__name__}: {error})") from None
    if wrong := [name for name, is_right in checks.items() if not is_right]:
        raise CheckpointError(f"the generators' states in the checkpoint make no sense: that of {', '.join(wrong)} is none")
    python = (version, struct.unpack(f"<{_MT_WORDS + 1}I", words), next_gauss)
    numpy = (kind, np.frombuffer(keys, dtype=np.uint32), position, *gauss)
    return {"torch": found["torch"], "cuda": cuda, "numpy": numpy, "python": python}


def set_generators(found: dict, device: torch.device) -> None:
    """found: of `checked_generators`."""
    torch.set_rng_state(torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8))
    if found["cuda"] is not None:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(found["cuda"]), dtype=torch.uint8), device)
    np.random.set_state(found["numpy"])
    random.setstate(found["python"])


def _is_torch_state(state: object) -> bool:
    """Whether it is one of torch's generator on the CPU. It is told how many of its words are left and which is next, each checked by
    torch for itself alone, and then draws: so many words behind the next one must be there."""
    here = torch.get_rng_state().numpy().tobytes()
    if not isinstance(state, bytes) or len(state) != len(here):
        return False
    left, seeded, following = struct.unpack_from("<iiQ", state, 8)
    is_fresh = (left, following) == (1, 0)
    flags = {struct.unpack_from("<i", state, 5040)[0], state[5052]}  # whether a normal number was drawn ahead
    return seeded == 1 and (is_fresh or (0 < left <= _MT_WORDS and left + following == _MT_WORDS + 1)) and flags <= {0, 1}


def _is_cuda_state(state: object, device: torch.device) -> bool:
    """Whether it is a seed and an offset, of which each draw takes a multiple of four."""
    here = torch.cuda.get_rng_state(device).numel()
    return isinstance(state, bytes) and len(state) == here == 16 and 0 <= struct.unpack_from("<q", state, 8)[0] and not state[8] % 4
