"""Activation checkpointing: keep a block's inputs, and compute the block again in backward.

Calls PyTorch's own function, with settings that suit the engine. Must not know where the kept inputs live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.checkpoint

Result = TypeVar("Result")


def checkpoint(function: Callable[..., Result], *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Result:
    """`function(*args, **kwargs)` for a module or any callable. Autograd keeps only the arguments until backward.

    Config(activation_tier="host" or "nvme") moves these off the device. preserve_rng_state: draw the same random numbers in the second run,
    as dropout needs. Source: Chen et al. 2016, section 3.
    """
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
    )
