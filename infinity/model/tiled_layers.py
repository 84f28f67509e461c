"""Layers too large for the device, as a row of small modules: computation, initial values, and names in state dicts.

Knows modules, parameters and random numbers. Must not know tiers, budgets or engines. Each tile is a module, so an engine that fetches,
frees and takes the gradients of one module at a time works tile by tile. Source: Rajbhandari et al. 2021 (ZeRO-Infinity), section 5.1.3
(memory-centric tiling).
"""

# [Note: the random numbers of a tiled layer]
# With the same seed a tiled layer has the weights of the plain layer, and leaves the generator in the same state, without drawing all of
# them at once. On the CPU uniform_ takes numbers one after the other, so each stripe continues after the previous one. normal_ differs: it
# draws all uniform numbers, turns each 16 of them into 16 normal ones, and draws the last 16 again if some are left over. Stripes of normal
# numbers therefore end at multiples of 16 elements, whatever the tiles' borders, and the last stripe has 16 or more. CUDA's generators
# count differently: the weights are equally random, but not the same.
#
# [Note: how a layer becomes its tiled form]
# An existing layer is cut in place: the object stays, and its class changes. All references, under any name or in any list, then refer to
# the tiled layer. The parameters are replaced, so a layer with other references to these parameters is not cut.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.model.log_sum_exp import LogSumExpAtLabels
from infinity.model.parameters import TiedNames
from infinity.model.recompute import checkpoint

NORMAL_BLOCK = 16  # elements that normal_ makes together on the CPU

Grid = list[list[int]]  # tiles by index, one list for each row of tiles


class _LinearTile(nn.Linear):
    """A part of a TiledLinear, which draws the initial values."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)

    def reset_parameters(self) -> None:
        """No effect: the whole layer draws, in order."""


class _EmbeddingTile(nn.Embedding):
    """Some rows of a TiledEmbedding, which draws their initial values."""

    def __init__(self, weight: nn.Parameter, padding_idx: int | None):
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.weight = weight

    def reset_parameters(self) -> None:
        """No effect: the whole layer draws, in order."""


class Tiled(nn.Module):
    """Has the parameters in `tiles`, and the state dict of the plain layer."""

    def _hold(self, tiles: list[nn.Module]) -> None:
        self.tiles = nn.ModuleList(tiles)
        self.register_state_dict_post_hook(_join_entries)
        self.register_load_state_dict_pre_hook(_cut_entries)
        self.register_load_state_dict_post_hook(_forget_missing_tiles)

    def grids(self) -> dict[str, Grid]:
        """By name of a plain layer's parameter: the tiles of each part."""
        raise NotImplementedError

    def cuts(self) -> Iterator[tuple[str, tuple[int, ...], list[tuple[int, tuple[slice, ...]]]]]:
        """For each parameter of the plain layer: name, shape, and the tile of each part."""
        for name, grid in self.grids().items():
            params = [[getattr(self.tiles[index], name) for index in row] for row in grid]
            sizes = [[row[0].shape[0] for row in params]]
            if params[0][0].dim() > 1:
                sizes.append([param.shape[1] for param in params[0]])
            places = itertools.product(*map(_slices, sizes))
            yield name, tuple(map(sum, sizes)), list(zip(itertools.chain(*grid), places, strict=True))

    def _joined(self, name: str) -> torch.Tensor | None:
        grid = self.grids().get(name)
        return _join([[getattr(self.tiles[index], name) for index in row] for row in grid]) if grid else None

    @property
    def weight(self) -> torch.Tensor:
        """The tiles' weights joined: differentiable, of full size, and a new tensor each time. Writing to the result changes no tile."""
        return self._joined("weight")


class TiledLinear(Tiled):
    """nn.Linear whose weight [out_features, in_features] is cut into out_tiles x in_tiles modules, as evenly as possible.

    `tiles` holds the modules row by row; the first of each row has the row's bias. Maps [..., in_features] to [..., out_features].
    Values equal those of nn.Linear up to rounding. Products of other sizes may round differently. The gradient of the input is a sum
    over tiles, and so is the output if the layer is cut along in_features. Raises ConfigError for less than one tile or more tiles than
    features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        out_tiles: int = 1,
        in_tiles: int = 1,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        make = {"device": device, "dtype": dtype}
        rows, columns = even_sizes(out_features, out_tiles, "out_tiles"), even_sizes(in_features, in_tiles, "in_tiles")
        weights = [nn.Parameter(torch.empty(row, column, **make)) for row in rows for column in columns]
        self._lay_out(weights, [nn.Parameter(torch.empty(row, **make)) for row in rows] if bias else None, in_tiles)
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, out_tiles: int, in_tiles: int = 1) -> TiledLinear:
        """The same function, with copies of a layer's values."""
        rows = even_sizes(linear.out_features, out_tiles, "out_tiles")
        columns = even_sizes(linear.in_features, in_tiles, "in_tiles")
        tiled = cls.__new__(cls)
        nn.Module.__init__(tiled)
        tiled.training = linear.training
        tiled.in_features, tiled.out_features = linear.in_features, linear.out_features
        tiled._lay_out(_cut(linear.weight, rows, columns), None if linear.bias is None else _cut(linear.bias, rows), in_tiles)
        return tiled

    def _lay_out(self, weights: list[nn.Parameter], biases: list[nn.Parameter] | None, in_tiles: int) -> None:
        self.out_tiles, self.in_tiles = len(weights) // in_tiles, in_tiles
        first = {index * in_tiles: bias for index, bias in enumerate(biases or ())}
        self._hold([_LinearTile(weight, first.get(index)) for index, weight in enumerate(weights)])
        self.train(self.training)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new values, the same as nn.Linear would draw, see [Note: the random numbers of a tiled layer]."""
        for row in self._rows():
            if self.in_tiles == 1:
                nn.init.kaiming_uniform_(row[0].weight, a=math.sqrt(5))
                continue
            first = row[0].weight
            stripe = torch.empty(first.shape[0], self.in_features, dtype=first.dtype, device=first.device)
            nn.init.kaiming_uniform_(stripe, a=math.sqrt(5))
            for tile, part in zip(row, stripe.split([tile.in_features for tile in row], dim=1)):
                tile.weight.copy_(part)
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
        for row in self._rows():
            if row[0].bias is not None:
                nn.init.uniform_(row[0].bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        outputs = []
        for row in self._rows():
            parts = input.split([tile.in_features for tile in row], dim=-1) if self.in_tiles > 1 else (input,)
            output = row[0](parts[0])
            for tile, part in zip(row[1:], parts[1:]):
                output = output + tile(part)
            outputs.append(output)
        return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]

    @property
    def bias(self) -> torch.Tensor | None:
        """The tiles' biases joined, like `weight`."""
        return self._joined("bias")

    def _rows(self) -> Iterator[list[nn.Linear]]:
        tiles = list(self.tiles)
        return (tiles[begin : begin + self.in_tiles] for begin in range(0, len(tiles), self.in_tiles))

    def grids(self) -> dict[str, Grid]:
        indices = range(len(self.tiles))
        weight = [list(indices[begin : begin + self.in_tiles]) for begin in indices[:: self.in_tiles]]
        return {"weight": weight} | ({"bias": [row[:1] for row in weight]} if self.tiles[0].bias is not None else {})

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.tiles[0].bias is not None}"
        return f"{shape}, out_tiles={self.out_tiles}, in_tiles={self.in_tiles}"


class TiledEmbedding(Tiled):
    """nn.Embedding whose rows are cut into `tiles` modules, as evenly as possible. Maps [...] to [..., embedding_dim].

    The output has the bits of the plain layer's output. max_norm, scale_grad_by_freq and sparse are not supported. Raises ConfigError
    for less than one tile, more tiles than rows, or a padding_idx that is no row.
    """

    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        tiles: int = 1,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ConfigError(f"padding_idx={padding_idx}: expected a row of {num_embeddings} embeddings, or None")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx % num_embeddings if padding_idx is not None else None
        rows = even_sizes(num_embeddings, tiles, "tiles")
        self._lay_out([nn.Parameter(torch.empty(row, embedding_dim, device=device, dtype=dtype)) for row in rows])
        self.reset_parameters()

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, tiles: int) -> TiledEmbedding:
        """The same function, with copies of a layer's values. Raises ConfigError for an unsupported option."""
        rows = even_sizes(embedding.num_embeddings, tiles, "tiles")
        if found := unsupported_option(embedding):
            raise ConfigError(f"an embedding with {found} cannot be tiled; leave {found} out or keep the plain layer")
        tiled = cls.__new__(cls)
        nn.Module.__init__(tiled)
        tiled.training = embedding.training
        tiled.num_embeddings, tiled.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        tiled.padding_idx = embedding.padding_idx
        tiled._lay_out(_cut(embedding.weight, rows))
        return tiled

    def _lay_out(self, weights: list[nn.Parameter]) -> None:
        tiles, begin = [], 0
        for weight in weights:
            rows = weight.shape[0]
            mine = self.padding_idx is not None and begin <= self.padding_idx < begin + rows
            tiles.append(_EmbeddingTile(weight, self.padding_idx - begin if mine else None))
            begin += rows
        self._hold(tiles)
        self.train(self.training)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new values, the same as nn.Embedding would draw, see [Note: the random numbers of a tiled layer]."""
        weights = [tile.weight for tile in self.tiles]
        total = sum(weight.numel() for weight in weights)
        size = -(-max(weight.numel() for weight in weights) // NORMAL_BLOCK) * NORMAL_BLOCK
        begin = 0
        while begin < total:
            end = begin + size if begin + size + NORMAL_BLOCK <= total else total
            _copy_flat(torch.empty(end - begin, dtype=weights[0].dtype, device=weights[0].device).normal_(), weights, begin)
            begin = end
        for tile in self.tiles:
            if tile.padding_idx is not None:
                tile.weight[tile.padding_idx].fill_(0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found, begin, last = None, 0, self.tiles[-1]
        for tile in self.tiles:
            local, inside = _within(input, begin, tile.num_embeddings, is_last=tile is last)
            rows = tile(local)
            found = rows if found is None else torch.where(inside.unsqueeze(-1), rows, found)
            begin += tile.num_embeddings
        return found

    def grids(self) -> dict[str, Grid]:
        return {"weight": [[index] for index in range(len(self.tiles))]}

    def extra_repr(self) -> str:
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, tiles={len(self.tiles)}"


def become_tiled(layers: list[nn.Module], sizes: list[int]) -> None:
    """Cut plain layers with a common weight, in place, into tiles of so many rows; see [Note: how a layer becomes its tiled form]."""
    weights = _cut(layers[0].weight, sizes)
    for layer in layers:
        del layer._parameters["weight"]
        bias = layer._parameters.pop("bias", None)
        if type(layer) is nn.Embedding:
            layer.__class__ = TiledEmbedding
            layer._lay_out(weights)
        else:
            layer.__class__ = TiledLinear
            layer._lay_out(weights, None if bias is None else _cut(bias, sizes), 1)


def unsupported_option(embedding: nn.Embedding) -> str | None:
    """The name of an option that tiles lack, or None."""
    options = {"max_norm": embedding.max_norm is not None, "scale_grad_by_freq": embedding.scale_grad_by_freq}
    return next((name for name, is_set in {**options, "sparse": embedding.sparse}.items() if is_set), None)


def linear_cross_entropy(
    hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """F.cross_entropy(head(hidden).float(), labels) with only one tile's logits in memory at a time, forward and backward.

    hidden: [..., H]. head: a TiledLinear with in_tiles=1, or an nn.Linear, which is one tile. labels: int64 [...]. Returns fp32: a
    scalar for reduction="mean" or "sum", [...] for "none". Each tile's logits are computed again in backward. Raises ConfigError for
    another head, shape or reduction; on the CPU RuntimeError for a label that is no class.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction={reduction!r}: expected 'mean', 'sum' or 'none'")
    if not isinstance(head, (TiledLinear, nn.Linear)) or getattr(head, "in_tiles", 1) != 1:
        raise ConfigError(f"head={head}: expected a TiledLinear with in_tiles=1, or an nn.Linear")
    if hidden.shape[:-1] != labels.shape:
        raise ConfigError(f"labels of shape {tuple(labels.shape)}: expected {tuple(hidden.shape[:-1])}, one label per vector of hidden")
    tiles = list(head.tiles) if isinstance(head, TiledLinear) else [head]
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    ignored = targets == ignore_index
    targets = targets.masked_fill(ignored, 0)
    sums, begin = [], 0
    picked = torch.zeros(targets.shape, dtype=torch.float32, device=flat.device)
    for index, tile in enumerate(tiles):
        local, inside = _within(targets, begin, tile.out_features, is_last=index == len(tiles) - 1)
        tile_sums, at_label = checkpoint(_sums_of_tile, tile, flat, local, preserve_rng_state=False)
        sums.append(tile_sums)
        picked = torch.where(inside, at_label, picked)
        begin += tile.out_features
    losses = (torch.logsumexp(torch.stack(sums), dim=0) - picked).masked_fill(ignored, 0)
    if reduction == "none":
        return losses.reshape(labels.shape)
    return losses.sum() / (~ignored).sum() if reduction == "mean" else losses.sum()


# Cutting and joining.


def even_sizes(total: int, parts: int, what: str) -> list[int]:
    """Sizes that differ by at most one, the larger ones first."""
    if not isinstance(parts, int) or isinstance(parts, bool) or not 1 <= parts <= max(total, 1):
        raise ConfigError(f"{what}={parts!r}: expected an integer from 1 to {max(total, 1)}, the number of rows or columns")
    return [total // parts + (index < total % parts) for index in range(parts)]


def _slices(sizes: list[int]) -> list[slice]:
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends)]


def _cut(param: nn.Parameter, rows: list[int], columns: list[int] | None = None) -> list[nn.Parameter]:
    """Copies of the parts, row by row, as parameters like the whole: frozen or not, with gradient and attributes."""
    parts = []
    whole, grad = param.detach(), param.grad
    for place in itertools.product(_slices(rows), *([_slices(columns)] if columns else [])):
        part = nn.Parameter(whole[place].clone(memory_format=torch.contiguous_format), requires_grad=param.requires_grad)
        part.grad = grad[place].clone() if grad is not None else None
        vars(part).update(vars(param))
        parts.append(part)
    return parts


def _join(rows: list[list[torch.Tensor]]) -> torch.Tensor:
    joined = [torch.cat(row, dim=-1) if len(row) > 1 else row[0] for row in rows]
    return torch.cat(joined) if len(joined) > 1 else joined[0]


def _copy_flat(values: torch.Tensor, tensors: list[torch.Tensor], begin: int) -> None:
    """Write values [n] to elements begin, begin + 1, ... of contiguous tensors, counted through all of them."""
    end, at = begin + values.numel(), 0
    for tensor in tensors:
        first, last = max(begin, at), min(end, at + tensor.numel())
        if first < last:
            tensor.view(-1)[first - at : last - at].copy_(values[first - begin : last - begin])
        at += tensor.numel()


def _within(indices: torch.Tensor, begin: int, count: int, *, is_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(index in the tile, 0 if the index belongs to another tile; whether the index belongs to this tile).

    An index in no tile counts to the first or last tile, and is out of range there: this raises like the plain layer.
    """
    local = indices - begin
    inside = torch.ones_like(local, dtype=torch.bool)
    if begin:
        inside = inside & (local >= 0)
    if not is_last:
        inside = inside & (local < count)
    return local.masked_fill(~inside, 0), inside


def _sums_of_tile(tile: nn.Module, flat: torch.Tensor, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logsumexp [N] of a tile's logits, the logit [N] at each local index)."""
    return LogSumExpAtLabels.apply(tile(flat), local)


# Names in state dicts are those of the plain layer.


_tied = TiedNames()


def _join_entries(module: Tiled, state_dict, prefix: str, local_metadata) -> None:
    for name, grid in module.grids().items():
        parts = [[state_dict.pop(f"{prefix}tiles.{index}.{name}") for index in row] for row in grid]
        tiles = tuple(id(dict.get(module.tiles[index]._parameters, name)) for row in grid for index in row)
        twin = _tied.twin(state_dict, prefix + name, tiles)
        state_dict[prefix + name] = twin if twin is not None else _join(parts)
    for key in [key for key in getattr(state_dict, "_metadata", ()) if f"{key}.".startswith(f"{prefix}tiles.")]:
        del state_dict._metadata[key]


def _cut_entries(module: Tiled, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
    """Give each tile a part of `weight` and `bias`. Errors use these names."""
    unknown = [key for key in state_dict if key.startswith(f"{prefix}tiles.")]
    unexpected_keys += unknown
    for key in unknown:
        del state_dict[key]
    module._loading = prefix
    assign = local_metadata.get("assign_to_params_buffers", False)
    for name, shape, cuts in module.cuts():
        key = prefix + name
        if key not in state_dict:
            missing_keys.append(key)
            continue
        value = state_dict.pop(key)
        if not torch.overrides.is_tensor_like(value) or tuple(value.shape) != shape:
            given = tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
            error_msgs.append(f"size mismatch for {key}: {given} in the checkpoint, {shape} in the current model.")
            continue
        for index, place in cuts:
            part = value.detach()[place]
            state_dict[f"{prefix}tiles.{index}.{name}"] = part.contiguous() if assign else part


def _forget_missing_tiles(module: Tiled, incompatible_keys) -> None:
    """Drop missing keys of tiles: they were reported under the plain layer's name."""
    prefix = f"{vars(module).pop('_loading')}tiles."
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not key.startswith(prefix)]
