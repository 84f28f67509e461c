"""`infinity.no_sync`: the program tells which backward passes are not the last of their step.

Knows an engine's number of passes per step, and whether the engine accumulates gradients. Must not know gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from infinity.engine.engines import engine_of
from infinity.errors import UsageError


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside the block are not the last of their step, as with DistributedDataParallel and FSDP.

    The first backward pass outside is the last one, after any number of passes inside. All ranks must make the same calls.
    Raises ConfigError for a model that is in no engine, UsageError unless its optimizer was made with accumulation_steps=2 or more.
    """
    engine = engine_of(model)
    if engine.optimizers:
        engine.start()
    if not engine.optimizers or not engine.training.accumulating:
        raise UsageError(
            "infinity.no_sync with an optimizer of one backward pass a step: the engine has planned no memory for sums of gradients. Make "
            "the optimizer with accumulation_steps=2 or more. With infinity.no_sync, a step may then have any number of passes."
        )
    with engine.cycle.passes.no_sync():
        yield
