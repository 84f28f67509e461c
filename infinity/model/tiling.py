"""Chooses the layers to cut into tiles, the number of tiles, and the place of each tile's parameters in the plain layer.

Knows modules and references to their parameters. Must not know tiers, budgets or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from infinity.formats.format import SCALE_BLOCK
from infinity.model.tiled_layers import Tiled, become_tiled, even_sizes, unsupported_option
from infinity.sizes import round_up

AUTO_TILES = 8  # tiles of an "auto" size that fit the device
LEAST_AUTO_TILE_NBYTES = 64 << 10  # smaller tiles would not help: the whole budget is too small


def tile_large_layers(model: nn.Module, *, above_nbytes: int, tile_nbytes: int, itemsize: int) -> list[tuple[str, int]]:
    """Cut, in place, every nn.Linear and nn.Embedding whose weight takes more than above_nbytes into tiles of rows.

    A tile takes at most tile_nbytes, and has at least one row. itemsize: bytes of an element. Returns (name, number of tiles), by first
    names. A weight of several layers is cut once. Not cut: subclasses, layers with hooks or options that tiles lack, and weights with
    other references; see [Note: how a layer becomes its tiled form]. The parameters are new: cut before an optimizer is created.
    """
    return _cut_layers(model, lambda layer: _nbytes(layer, itemsize) > above_nbytes, tile_nbytes, itemsize)


def tile_to_fit(
    model: nn.Module, above: int | str | None, *, device_nbytes: int, itemsize: int, reduces: bool = False
) -> list[tuple[str, int]]:
    """Like `tile_large_layers`, by Config.tile_above: a number of bytes, None, or "auto" for layers that do not fit the device budget.
    reduces: gradients are summed over several ranks."""
    above_nbytes, tile_nbytes = tile_limits(above, device_nbytes)

    def is_large(layer: nn.Module) -> bool:
        # A reduction needs the buffers of this layer and of the layer before it, which are as large as the weight and its gradient.
        copies = 2 if above == "auto" and reduces and layer._parameters["weight"].requires_grad else 1
        return copies * _nbytes(layer, itemsize) > above_nbytes

    return _cut_layers(model, is_large, tile_nbytes, itemsize) if tile_nbytes else []


def _cut_layers(model: nn.Module, is_large: Callable[[nn.Module], bool], tile_nbytes: int, itemsize: int) -> list[tuple[str, int]]:
    num_tiles: dict[nn.Module, int] = {}
    for weight, layers in _weights_to_cut(model, is_large):
        num_rows, num_columns = weight.shape
        rows_a_tile = max(1, tile_nbytes // (num_columns * itemsize))
        if num_rows <= rows_a_tile:
            continue
        sizes = _rows_of_tiles(num_rows, rows_a_tile)
        become_tiled(layers, sizes)
        num_tiles |= dict.fromkeys(layers, len(sizes))
    return [(name, num_tiles[module]) for name, module in model.named_modules() if module in num_tiles]


def _rows_of_tiles(num_rows: int, most: int) -> list[int]:
    """Rows of each tile, at most `most`, about even. If tiles are large enough, no border cuts a block of elements with one scale. Then a
    checkpoint of 8-bit moments also loads where the layer is whole, or has other tiles."""
    tiles = -(-num_rows // most)
    if most < SCALE_BLOCK:
        return even_sizes(num_rows, tiles, "tiles")
    each = min(round_up(-(-num_rows // tiles), SCALE_BLOCK), most // SCALE_BLOCK * SCALE_BLOCK)
    return [min(each, num_rows - begin) for begin in range(0, num_rows, each)]


def tile_limits(above: int | str | None, device_nbytes: int) -> tuple[int, int]:
    """(bytes above which a weight is cut, bytes of a tile); 0 if no layer is cut. Arguments as of `tile_to_fit`."""
    if above != "auto":
        return above or 0, above or 0
    tile = device_nbytes // AUTO_TILES
    # With the gradient, a layer takes twice the bytes. An eighth of the budget is for the op's other memory.
    return device_nbytes * 7 // 16, tile if tile >= LEAST_AUTO_TILE_NBYTES else 0


@dataclass(frozen=True)
class Place:
    """The place of a tile's parameter in the plain layer's parameter: name and shape, and the first index in each dimension."""

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]


def places(model: nn.Module) -> dict[nn.Parameter, Place]:
    """The places of all parameters that belong to tiled layers."""
    found: dict[nn.Parameter, Place] = {}
    for param, place in _placed(model):
        found.setdefault(param, place)
    return found


def tied(model: nn.Module) -> dict[str, str]:
    """Further names of tiled layers' parameters, each with the first name, as in `places`."""
    first = places(model)
    return {place.name: first[param].name for param, place in _placed(model) if place.name != first[param].name}


def _placed(model: nn.Module) -> Iterator[tuple[nn.Parameter, Place]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, shape, cuts in module.cuts() if isinstance(module, Tiled) else ():
            for index, part in cuts:
                begin = tuple(dimension.start for dimension in part)
                yield getattr(module.tiles[index], name), Place(f"{prefix}.{name}" if prefix else name, shape, begin)


# The choice of layers.


def _weights_to_cut(model: nn.Module, is_large: Callable[[nn.Module], bool]) -> list[tuple[nn.Parameter, list[nn.Module]]]:
    """Weights of large layers that only layers with a tiled form refer to, with these layers."""
    with torch._C.DisableTorchFunction():  # inside infinity.init each getter would call `__torch_function__`
        large = [module for module in model.modules() if _has_tiled_form(module) and is_large(module)]
    if not large:  # the search for references looks at all attributes of all modules
        return []
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    elsewhere: set[int] = set()
    for module in model.modules():
        for name, param in module._parameters.items():
            users.setdefault(id(param), []).append((module, name))
        attributes = {name: value for name, value in vars(module).items() if name != "_parameters"}
        elsewhere.update(map(id, _parameters_in(attributes)))

    def is_alone(param: nn.Parameter, name: str) -> bool:
        """Whether only layers with a tiled form use the parameter, under that name."""
        hooks = param._backward_hooks or param._post_accumulate_grad_hooks
        used = all(user == name and _has_tiled_form(module) for module, user in users[id(param)])
        return type(param) is nn.Parameter and not hooks and used and id(param) not in elsewhere

    found: dict[int, tuple[nn.Parameter, list[nn.Module]]] = {}
    for module in large:
        weight = module._parameters["weight"]
        if not is_alone(weight, "weight"):
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
    """Whether a module is a plain layer without additions that the tiled form would lack."""
    if type(module) not in (nn.Linear, nn.Embedding) or (type(module) is nn.Embedding and unsupported_option(module)):
        return False
    added = set(module._parameters) - {"weight", "bias"} or module._buffers or module._modules or "forward" in vars(module)
    return not added and not any(getattr(module, hooks) for hooks in _HOOKS)


def _nbytes(module: nn.Module, itemsize: int) -> int:
    """Bytes of a layer's weight, if it has one."""
    weight = module._parameters.get("weight")
    return weight.numel() * itemsize if weight is not None else 0


def _parameters_in(value) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple, set, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parameters_in(item)
