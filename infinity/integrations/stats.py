"""The statistics of an engine as a flat dict of numbers, for loggers such as TensorBoard, Weights & Biases and MLflow.

Knows nested dicts of numbers. Must not know their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping


def flattened(stats: Mapping[str, object], prefix: str = "infinity/") -> dict[str, float]:
    """`Engine.stats()` as numbers by name, such as "infinity/links/nvme_read/nbytes". Values that are None or text are left out."""
    found: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping):
            found |= flattened(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[prefix + name] = int(value) if isinstance(value, bool) else value
    return found
