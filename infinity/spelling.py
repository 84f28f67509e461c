"""The known name that is most like an unknown one.

Knows how alike two names are, and other libraries' words for ours. Must not know what is named.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LEAST_ALIKE = 0.65  # "--precision" and "--residency", which mean different things, are alike by 0.6
_OUR_WORDS = {  # by other libraries' word, both without dashes and in small letters
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
    """The known name that an unknown one stands for: our word for another library's, or the one that is spelled most alike."""
    names = {_plain(name): name for name in known}
    word = _OUR_WORDS.get(_plain(unknown))
    if word in names:
        return names[word]
    near = difflib.get_close_matches(_plain(unknown), names, n=1, cutoff=_LEAST_ALIKE)
    return names[near[0]] if near else None


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()
