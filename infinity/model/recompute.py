"""Activation checkpointing: keep what a block is given, and compute the block again in backward.

A thin name for PyTorch's own, with the settings that suit the engine. Must not know where what is kept lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.checkpoint

Result = TypeVar("Result")


def checkpoint(function: Callable[..., Result], *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Result:
    """`function(*args, **kwargs)`, a module or any callable, of which autograd keeps only the arguments until backward.

    Config(activation_tier="host" or "nvme") keeps these away from the device. preserve_rng_state: draw the same random numbers in
    the second run, as dropout needs it. Source: Chen et al. 2016, section 3.
    """
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
    )
