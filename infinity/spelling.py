"""Finds the known name that is most similar to an unknown name.

Knows the similarity of names, and names of other libraries for our settings. Must not know the things that are named.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LEAST_ALIKE = 0.65  # "--precision" and "--residency" have a similarity of 0.6, and mean different things
_OUR_WORDS = {  # by the name in other libraries; both names in lower case, without leading dashes
    "precision": "dtype",
    "mixed_precision": "dtype",
    "torch_dtype": "dtype",
    "learning_rate": "lr",
    "max_norm": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "gradient_accumulation_steps": "accumulate",
    "output_dir": "save",
    "max_steps": "steps",
    "cpu_memory": "host_memory",
    "gpu_memory": "device_memory",
    "nvme_path": "swap_dirs",
    "swap": "swap_dirs",
}


def nearest(unknown: str, known: Iterable[str]) -> str | None:
    """The known name for an unknown one: our name for a setting of another library, or the name with the most similar spelling."""
    names = {_plain(name): name for name in known}
    word = _OUR_WORDS.get(_plain(unknown))
    if word in names:
        return names[word]
    near = difflib.get_close_matches(_plain(unknown), names, n=1, cutoff=_LEAST_ALIKE)
    return names[near[0]] if near else None


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()
