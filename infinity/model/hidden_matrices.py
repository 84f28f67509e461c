"""Finds the matrices of a model's hidden layers.

Knows modules. Must not know optimizers or the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd

from infinity.model.tiled_layers import Tiled, TiledEmbedding, TiledLinear

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag, TiledEmbedding)
_GPT2_LINEAR = "Conv1D"  # of transformers: a linear layer whose weight is transposed


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of two dimensions, and stacks of matrices, outside of embeddings, convolutions and the output layer.

    A parameter of shape [1, n, d] is rather a table of positions, and no stack.
    """
    others = {id(param) for module in _other_modules(model) for param in module.parameters()}
    shapes = ((param, param.dim(), id(param) in others) for param in model.parameters())
    return [param for param, dim, is_other in shapes if not is_other and (dim == 2 or (dim == 3 and param.shape[0] > 1))]


def hidden_linear_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers among the `hidden_matrices`, and stacks of matrices, such as the weights of experts.

    Other parameters of two dimensions may be biases of experts, or numbers whose exponential a layer computes.
    """
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear) or type(module).__name__ == _GPT2_LINEAR}
    return [param for param in hidden_matrices(model) if id(param) in linear or (param.dim() == 3 and param.shape[1] > 1)]


def _other_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Embeddings, convolutions and the output layer.

    The output layer is what `get_output_embeddings` of a transformers model returns. In other models it is the last linear layer, if this layer
    has as many outputs as some embedding has rows.
    """
    tiles = {id(tile) for module in model.modules() if isinstance(module, Tiled) for tile in module.tiles}
    modules = [module for module in model.modules() if id(module) not in tiles]
    yield from (module for module in modules if isinstance(module, (*_EMBEDDINGS, _ConvNd)))
    sizes = {module.num_embeddings for module in modules if isinstance(module, _EMBEDDINGS)}
    linears = [module for module in modules if isinstance(module, (nn.Linear, TiledLinear))]
    if (head := getattr(model, "get_output_embeddings", lambda: None)()) is not None:
        yield head
    elif linears and linears[-1].out_features in sizes:
        yield linears[-1]
