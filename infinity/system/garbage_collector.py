"""Pauses Python's garbage collector, which looks at every object of the program again and again while many objects are made.

Knows the collector. Must not know which objects are made.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause Python's cyclic garbage collector for all threads, if enabled."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
