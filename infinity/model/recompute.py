"""Activation checkpointing: keep a block's inputs, and compute the block again in backward.

Calls PyTorch's own function, with settings that suit the engine. Must not know where the kept inputs live.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.utils.checkpoint


def checkpoint(function: Callable, *args, preserve_rng_state: bool = True, **kwargs):
    """`function(*args, **kwargs)` for a module or any callable. Autograd keeps only the arguments until backward.

    Config(activations="host" or "nvme") moves these off the device. preserve_rng_state: draw the same random numbers in the second run,
    as dropout needs. Source: Chen et al. 2016, section 3.
    """
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
    )
