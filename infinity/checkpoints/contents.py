"""The content of a checkpoint outside records: parameter names, loose tensors, values, and states of random number generators.

Knows modules, and the names in a manifest. Must not know bytes, files or steps.
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
from infinity.engine.access.training_state import TrainingState
from infinity.errors import CheckpointError
from infinity.model import tiling

_MT_WORDS = 624  # state of a Mersenne twister, in 32-bit words


def parameters_of(state: TrainingState) -> tuple[list[Parameter], dict[str, str]]:
    """Return the manifest's parameters without step counts, and {other name: first name} of tied parameters and tied tiled layers."""
    places = tiling.places(state.model)
    found, names = [], {}
    for info in state.parameters:
        place = places.get(info.param)
        whole = Whole(place.name, place.shape, place.begin) if place is not None else None
        format = state.layout.specs[info.index].format
        own_dtype = format.name if format.name != state.layout.main_storage else None
        own_moments = format.moments if info.trainable and format.moments != state.moments else None
        own = {"dtype": own_dtype, "moments": own_moments, "averaged": state.averaging.num_steps if format.averaged else None}
        found.append(Parameter(info.name, tuple(info.shape), info.trainable, info.group, whole=whole, **own))
        names[id(info.param)] = info.name
    everything = state.model.named_parameters(remove_duplicate=False)
    aliases = {name: names[id(param)] for name, param in everything if id(param) in names and param not in places}
    return found, {name: first for name, first in aliases.items() if name != first} | tiling.tied(state.model)


def draft(state: TrainingState, **rest) -> Manifest:
    """The manifest for this state, without files. rest: the fields of Manifest that do not come from the engine."""
    parameters, aliases = parameters_of(state)
    return Manifest(
        world=state.ranks.world,
        dtype=state.layout.main_storage,
        moments_dtype=state.config.optimizer_state_dtype,
        moments=state.moments,
        seed=state.config.seed if state.seed is None else state.seed,
        parameters=tuple(parameters),
        aliases=aliases,
        chunks=state.layout.chunks,
        **rest,
    )


def loose_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    """The state_dict's tensors that are in no record: persistent buffers, and parameters that are empty or not floating-point."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in state.model.named_modules():
        own = persistent_buffers(module)
        own |= {name: param for name, param in dict.items(module._parameters) if param is not None and not state.manages(param)}
        found |= {f"{prefix}.{name}" if prefix else name: value for name, value in own.items()}
    return found


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of this module that a state_dict has, without those of child modules."""
    left_out = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None and name not in left_out}


def with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(name, module) for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def values_of(state: TrainingState, put: Callable[[torch.Tensor], int], scheduler, extra) -> dict:
    """The current values that are in no record, encoded. put: see `encode`. Rank 0 adds the buffers; all ranks add the other values."""

    def put_own(tensor: torch.Tensor) -> int:
        if state.manages(tensor):
            raise CheckpointError("a parameter of the model is only a placeholder outside the model; the checkpoint has its value already")
        return put(tensor)

    extra = encode(extra, put_own, "extra")  # before the buffers: the tensors in extra then have the same indices on all ranks
    loose = loose_tensors(state) if state.ranks.is_first else {}
    buffers = {name: encode(value, put_own, f"buffer {name}") for name, value in loose.items()}
    extra_state = {name: module.get_extra_state() for name, module in with_extra_state(state.model)}
    found = {
        "model": {"buffers": buffers, "extra_state": encode(extra_state, put_own, "extra state of the model")},
        "optimizer": None,
        "scheduler": encode(None if scheduler is None else scheduler.state_dict(), put_own, "scheduler"),
        "scaler": None,
        "extra": extra,
    }
    if optimizers := state.optimizers:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizers.param_groups]
        found["optimizer"] = {"rule": type(optimizers.rule).__name__, "groups": encode(groups, put_own, "a parameter group")}
        if len(optimizers.members) > 1:
            found["optimizer"]["rules"] = optimizers.names_of_rules
    if (loss_scale := state.loss_scale) is not None:
        found["scaler"] = dict(zip(("scale", "num_clean"), loss_scale))
    return found


def digest_of(value, crcs: Sequence[int]) -> bytes:
    """A digest, equal for equal encoded values. crcs: the CRC32C of each stored tensor, by index."""

    def sums(value) -> list[int]:
        """The checksums of the tensors in a value, in order."""
        if isinstance(value, list):
            return [crc for item in value for crc in sums(item)]
        if not isinstance(value, dict):
            return []
        own = [crcs[value[name]] for name in ("$tensor", "$array") if type(value.get(name)) is int]
        return own or [crc for item in value.values() for crc in sums(item)]

    return hashlib.sha256(json.dumps([value, sums(value)]).encode()).digest()


def generators(device: torch.device) -> dict:
    """The states of the random number generators of this process, encoded for JSON."""
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
    """Return the states in the form that `set_generators` takes.

    Raises CheckpointError for an invalid state: native code would use numbers of the state as indices into memory.
    """
    try:
        kind, keys, position, *gauss = found["numpy"]
        version, words, next_gauss = found["python"]
        if not isinstance(words, bytes):  # older checkpoints store the words as a list
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
        raise CheckpointError(f"the random number generators in the checkpoint are not valid ({type(error).__name__}: {error})") from None
    if wrong := [name for name, is_right in checks.items() if not is_right]:
        raise CheckpointError(f"the random number generators in the checkpoint are not valid: {', '.join(wrong)}")
    python = (version, struct.unpack(f"<{_MT_WORDS + 1}I", words), next_gauss)
    numpy = (kind, np.frombuffer(keys, dtype=np.uint32), position, *gauss)
    return {"torch": found["torch"], "cuda": cuda, "numpy": numpy, "python": python}


def set_generators(found: dict, device: torch.device) -> None:
    """Set the random number generators of this process. found: the result of `checked_generators`."""
    torch.set_rng_state(torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8))
    if found["cuda"] is not None:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(found["cuda"]), dtype=torch.uint8), device)
    np.random.set_state(found["numpy"])
    random.setstate(found["python"])


def _is_torch_state(state: object) -> bool:
    """Whether the state is valid for torch's CPU generator.

    torch checks the number of remaining words and the index of the next word separately. This function also checks that the two agree.
    """
    here = torch.get_rng_state().numpy().tobytes()
    if not isinstance(state, bytes) or len(state) != len(here):
        return False
    left, seeded, following = struct.unpack_from("<iiQ", state, 8)
    is_fresh = (left, following) == (1, 0)
    flags = {struct.unpack_from("<i", state, 5040)[0], state[5052]}  # whether the generator holds a cached normal number
    return seeded == 1 and (is_fresh or (0 < left <= _MT_WORDS and left + following == _MT_WORDS + 1)) and flags <= {0, 1}


def _is_cuda_state(state: object, device: torch.device) -> bool:
    """Whether the state is a seed and an offset. Each draw advances the offset by a multiple of 4."""
    here = torch.cuda.get_rng_state(device).numel()
    return isinstance(state, bytes) and len(state) == here == 16 and 0 <= struct.unpack_from("<q", state, 8)[0] and not state[8] % 4
