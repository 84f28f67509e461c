"""A step's backward passes, told one by one: `infinity.no_sync`.

Knows an engine's window of passes, and whether sums of gradients have a place. Must not know what a pass brings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from infinity.engine.engines import engine_of
from infinity.errors import UsageError


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside the block are not the last of their step, as with DistributedDataParallel and FSDP: the first one outside is,
    however many came. On all ranks alike.

    Raises ConfigError for a model that is in no engine, UsageError unless its optimizer was made with accumulation_steps=2 or more.
    """
    engine = engine_of(model)
    if engine.optimizer is None or not engine.accumulating:
        raise UsageError(
            "infinity.no_sync with an optimizer of one backward pass a step: sums of gradients have no place. Make it with "
            "accumulation_steps=2 or more; any number of passes may come then, as no_sync tells."
        )
    with engine.cycle.window.no_sync():
        yield
