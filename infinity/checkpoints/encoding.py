"""Python values as JSON, and back: `extra` of `infinity.save`, and the states of schedulers and random number generators.

Knows Python's plain types, tensors and arrays. Must not know the place of a value in a checkpoint, or how tensors are stored.

# [Note: values in JSON]
# Numbers, strings, true, false, null, lists and objects stand for themselves. Other values are an object with one key:
#   $float "nan" | "inf" | "-inf";   $tuple [items];   $bytes base64;   $tensor, $array: an index of the manifest's `tensors`;
#   $dict [[key, value], ...] if a key is not a string or begins with $;   $counter [[key, value], ...].
# A subclass of dict is decoded as a dict, a deque as a list, a numpy number as a Python number.
"""

from __future__ import annotations

import base64
import binascii
import collections
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch

from infinity.checkpoints.json_text import as_list, as_number
from infinity.errors import CheckpointError

_MOST_ALIKE = 16  # keys of one dict that have the same hash
_MOST_DEEP = 300  # levels of nested lists and objects
_MOST_BITS = 4096  # of an integer


def encode(value, put: Callable[[torch.Tensor], int], what: str = "extra"):
    """Encode a value for JSON. put: stores a tensor and returns the tensor's index. what: the name of the value in messages.

    Raises CheckpointError for a value that a checkpoint cannot hold.
    """
    try:
        encoded = _encode(value, put, what)
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply, or contains itself") from None
    _check_depth(encoded, what)
    return encoded


def _encode(value, put: Callable[[torch.Tensor], int], what: str):
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise CheckpointError(f"{what}: an integer of {value.bit_length()} bits cannot be saved")
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        try:
            return {"$tensor": put(value)}
        except CheckpointError as error:
            raise CheckpointError(f"{what}: {error}") from None
    if type(value) in (np.ndarray, np.memmap):
        try:
            return {"$array": put(torch.from_numpy(np.array(value, order="C")))}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{what}: {error}") from None
    if type(value) is tuple:
        return {"$tuple": [_encode(item, put, f"{what}[{i}]") for i, item in enumerate(value)]}
    if type(value) in (list, collections.deque):
        return [_encode(item, put, f"{what}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and type(value) in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        name = "$counter" if type(value) is collections.Counter else "$dict"
        _check_keys(value, what)
        if name == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, put, f"{what}[{key!r}]") for key, item in value.items()}
        return {name: [[_encode(key, put, f"{what}: key"), _encode(item, put, f"{what}[{key!r}]")] for key, item in value.items()]}
    raise CheckpointError(
        f"{what} is of type {type(value).__name__}, which a checkpoint cannot hold: pass numbers, strings, bytes, tensors, arrays, "
        f"and lists, tuples and dicts of these"
    )


def decode(value, get: Callable[[int], torch.Tensor]):
    """Return the value that `encode` received. get: returns a tensor by index. Raises CheckpointError for data not made by `encode`."""
    seen: set[int] = set()

    def once(index: int) -> torch.Tensor:  # otherwise a few bytes of JSON could read one tensor a million times
        if index in seen:
            raise CheckpointError(f"small tensor {index} is used for two values")
        seen.add(index)
        return get(index)

    _check_depth(value, "a value of the manifest")
    try:
        return _decode(value, once)
    except (TypeError, ValueError, KeyError, IndexError, binascii.Error, RecursionError) as error:
        raise CheckpointError(f"a value of the manifest is not valid ({type(error).__name__}: {error})") from None


def _check_depth(value, what: str) -> None:
    """Raise CheckpointError for encoded data so deep that Python's stack may overflow. That depth differs by Python version and caller."""
    level = [value]
    for _ in range(_MOST_DEEP):
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for items in inside for item in items]
        if not level:
            return
    raise CheckpointError(f"{what} is nested more than {_MOST_DEEP} levels deep")


def _check_keys(keys: Iterable, what: str) -> None:
    """Refuse keys with colliding hashes, such as multiples of 2**61 - 1: a dict of n such keys needs n * n / 2 comparisons."""
    alike = collections.Counter(map(hash, keys))
    if alike and max(alike.values()) > _MOST_ALIKE:
        raise CheckpointError(f"{what}: more than {_MOST_ALIKE} keys of a dict have the same hash; give a list of pairs")


def _decode(value, get):
    if isinstance(value, list):
        return [_decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value), "")
    if not name.startswith("$"):
        return {key: _decode(item, get) for key, item in value.items()}
    (content,) = value.values()
    if name == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if name == "$bytes":
        return base64.b64decode(content, validate=True)
    if name == "$tuple":
        return tuple(_decode(item, get) for item in as_list(content, name))
    if name in ("$dict", "$counter"):
        pairs = [(_decode(key, get), _decode(item, get)) for key, item in as_list(content, name)]
        _check_keys((key for key, _ in pairs), name)
        return collections.Counter(dict(pairs)) if name == "$counter" else dict(pairs)
    if name in ("$tensor", "$array"):
        tensor = get(as_number(content, name))
        return tensor if name == "$tensor" else tensor.numpy()
    raise CheckpointError(f"a value of unknown kind {name!r}")
