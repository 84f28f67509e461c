"""Finds parameters that are no matrices of a hidden layer: embeddings, the output layer, and convolutions.

Knows modules. Must not know optimizers or the engine.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

from infinity.model.tiled_layers import Tiled, TiledEmbedding, TiledLinear

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag, TiledEmbedding)


def vocabulary_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters of embeddings and of the output layer.

    The output layer is what `get_output_embeddings` of a transformers model returns. In other models it is the last linear layer, if this layer
    has as many outputs as some embedding has rows.
    """
    tiles = {id(tile) for module in model.modules() if isinstance(module, Tiled) for tile in module.tiles}
    modules = [module for module in model.modules() if id(module) not in tiles]
    found = [module for module in modules if isinstance(module, _EMBEDDINGS)]
    sizes = {module.num_embeddings for module in found}
    linears = [module for module in modules if isinstance(module, (nn.Linear, TiledLinear))]
    if (head := getattr(model, "get_output_embeddings", lambda: None)()) is not None:
        found.append(head)
    elif linears and linears[-1].out_features in sizes:
        found.append(linears[-1])
    return [param for module in found for param in module.parameters()]


def convolution_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters of convolutions."""
    return [param for module in model.modules() if isinstance(module, _ConvNd) for param in module.parameters(recurse=False)]
