"""Which layers of a model are cut into tiles, into how many, and where each tile's parameters lie in the plain layer's.

Knows modules and what refers to their parameters. Must not know tiers, budgets or engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from infinity.model.tiled_layers import Tiled, become_tiled, unsupported_option

AUTO_TILES = 8  # tiles of an "auto" size that the device has room for
LEAST_AUTO_TILE_NBYTES = 64 << 10  # smaller ones would be no help: it is the budget that is wrong


def tile_large_layers(model: nn.Module, *, above_nbytes: int, tile_nbytes: int, itemsize: int) -> list[tuple[str, int]]:
    """Cut, in place, every nn.Linear and nn.Embedding whose weight takes more than above_nbytes into tiles of rows.

    A tile takes at most tile_nbytes, at least one row; itemsize: bytes of an element. Returns (name, number of tiles), by first
    names. What several layers share is cut once. Left alone: subclasses, layers with hooks or options that tiles lack, weights
    that anything else refers to; see [Note: how a layer becomes its tiled form]. The parameters are new ones: cut before an
    optimizer is made.
    """
    num_tiles: dict[nn.Module, int] = {}
    for weight, layers in _weights_to_cut(model):
        num_rows, num_columns = weight.shape
        rows_a_tile = max(1, tile_nbytes // (num_columns * itemsize))
        if weight.numel() * itemsize <= above_nbytes or num_rows <= rows_a_tile:
            continue
        tiles = -(-num_rows // rows_a_tile)
        become_tiled(layers, tiles)
        num_tiles |= dict.fromkeys(layers, tiles)
    return [(name, num_tiles[module]) for name, module in model.named_modules() if module in num_tiles]


def tile_to_fit(model: nn.Module, above: int | str | None, *, device_nbytes: int, itemsize: int) -> list[tuple[str, int]]:
    """As `tile_large_layers`, by Config.tile_above: above so many bytes, none, or "auto", what does not fit a budget of the device."""
    above_nbytes, tile_nbytes = tile_limits(above, device_nbytes)
    return tile_large_layers(model, above_nbytes=above_nbytes, tile_nbytes=tile_nbytes, itemsize=itemsize) if tile_nbytes else []


def tile_limits(above: int | str | None, device_nbytes: int) -> tuple[int, int]:
    """Bytes of a weight above which it is cut, and of a tile; 0 where nothing is. Arguments as of `tile_to_fit`."""
    if above != "auto":
        return above or 0, above or 0
    tile = device_nbytes // AUTO_TILES
    # With its gradient a layer takes twice its bytes; an eighth of the budget is for what else an op holds.
    return device_nbytes * 7 // 16, tile if tile >= LEAST_AUTO_TILE_NBYTES else 0


@dataclass(frozen=True)
class Place:
    """Where a tile's parameter lies in the plain layer's one: its name and shape, and the first index in each dimension."""

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]


def places(model: nn.Module) -> dict[nn.Parameter, Place]:
    """Of every parameter that is a part of a tiled layer's."""
    found: dict[nn.Parameter, Place] = {}
    for param, place in _placed(model):
        found.setdefault(param, place)
    return found


def tied(model: nn.Module) -> dict[str, str]:
    """Other names of tiled layers' parameters, with the first one of each: those that `places` has."""
    first = places(model)
    return {place.name: first[param].name for param, place in _placed(model) if place.name != first[param].name}


def _placed(model: nn.Module) -> Iterator[tuple[nn.Parameter, Place]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, shape, cuts in module.cuts() if isinstance(module, Tiled) else ():
            for index, part in cuts:
                begin = tuple(dimension.start for dimension in part)
                yield getattr(module.tiles[index], name), Place(f"{prefix}.{name}" if prefix else name, shape, begin)


# Which layers.


def _weights_to_cut(model: nn.Module) -> list[tuple[nn.Parameter, list[nn.Module]]]:
    """Weights that only layers with a tiled form refer to, with these."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    elsewhere: set[int] = set()
    for module in model.modules():
        for name, param in module._parameters.items():
            users.setdefault(id(param), []).append((module, name))
        attributes = {name: value for name, value in vars(module).items() if name != "_parameters"}
        elsewhere.update(map(id, _parameters_in(attributes)))

    def is_alone(param: nn.Parameter, name: str) -> bool:
        """Whether layers with a tiled form use it, under that name, and nothing else does."""
        hooks = param._backward_hooks or param._post_accumulate_grad_hooks
        used = all(user == name and _has_tiled_form(module) for module, user in users[id(param)])
        return type(param) is nn.Parameter and not hooks and used and id(param) not in elsewhere

    found: dict[int, tuple[nn.Parameter, list[nn.Module]]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel() or not _has_tiled_form(module) or not is_alone(weight, "weight"):
            continue
        layers = [layer for layer, _ in users[id(weight)]]
        biases = [layer._parameters["bias"] for layer in layers if layer._parameters.get("bias") is not None]
        if all(is_alone(bias, "bias") and len(users[id(bias)]) == 1 for bias in biases):
            found[id(weight)] = weight, layers
    return list(found.values())


_HOOKS = (
    "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _state_dict_hooks _state_dict_pre_hooks "
    "_load_state_dict_pre_hooks _load_state_dict_post_hooks"
).split()


def _has_tiled_form(module: nn.Module) -> bool:
    """Whether it is a plain layer, with nothing added that its tiled form would lack."""
    if type(module) not in (nn.Linear, nn.Embedding) or (type(module) is nn.Embedding and unsupported_option(module)):
        return False
    added = set(module._parameters) - {"weight", "bias"} or module._buffers or module._modules or "forward" in vars(module)
    return not added and not any(getattr(module, hooks) for hooks in _HOOKS)


def _parameters_in(value) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple, set, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parameters_in(item)
