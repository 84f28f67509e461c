"""The skip of a step whose gradients are not finite. Such a step changes no state, on any rank.

Knows an engine's steps. Must not know how the norm of gradients is computed.
"""

from __future__ import annotations

from infinity.errors import NonFiniteError
from infinity.tiers.chunk_state import ChunkState


def skip(cycle, ready: list[ChunkState]) -> None:
    """Drop the gradients of a step, which are not finite on some rank. Raises NonFiniteError if the configuration has nonfinite="raise"."""
    cycle.state.count_skipped()
    raises = cycle.config.nonfinite == "raise"
    found = cycle.norm.first_nonfinite(ready) if raises else None
    for chunk in ready:
        cycle.gradients.wait_for(chunk)
        cycle.gradients.drop(chunk)
    cycle.end_step()
    if raises:
        raise NonFiniteError(
            f"{cycle.ranks.name}: gradients of this step are not finite; {found}. No state was changed; a lower learning rate or "
            f"max_grad_norm may help, nonfinite='skip' goes on without the step."
        )
