"""Old public names: the new name of each, and the warning with the new name.

Knows names. Must not know the meaning of a name. The package accepts old names for one version. Delete this file with the old names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from infinity.errors import ConfigError, RenamedWarning, warn

CONFIG_FIELDS = {
    "nvme": "swap_dirs",
    "weights": "param_tier",
    "states": "optimizer_state_tier",
    "moments": "optimizer_state_dtype",
    "activations": "activation_tier",
}
STATS_KEYS = {
    "state_nbytes": "model_state_nbytes",
    "num_steps_back": "num_placement_rollbacks",
    "host_arena_nbytes": "pinned_host_nbytes",
    "compresses_nvme": "nvme_entropy_coding",
    "late_gradients_nbytes": "replay_grad_nbytes",
    "num_plans": "num_prefetch_plans",
    "num_fetches_ahead": "num_prefetch_hits",
    "num_fetches_late": "num_prefetch_misses",
    "activations": "activation_offload",
    "by_layer_speedup": "layerwise_speedup",
    "by_layer_uncut": "layerwise_unsplit_reasons",
}
LINKS = {"nc": "nvme_read", "cg": "h2d", "gg": "all_gather", "rs": "reduce_scatter", "gc": "d2h", "cn": "nvme_write"}
OPTIONS = {f"--{old}": f"--{new.replace('_', '-')}" for old, new in CONFIG_FIELDS.items()}
COMMANDS = {"tune": "calibrate"}


def warn_renamed(old: str, new: str, where: str = "") -> None:
    """Warn the program that uses an old name. where: begins the message, such as "infinity.toml: "."""
    warn(f"{where}{old} is deprecated: use {new}", RenamedWarning)


def with_new_names(values: Mapping[str, Any], names: Mapping[str, str], where: str = "") -> dict[str, Any]:
    """The values by new names, in the same order. names: old name -> new name.

    Raises ConfigError if the values contain both names of a setting.
    """
    if both := [f"{where}{old} and {new} are one setting: give {new} alone" for old, new in names.items() if old in values and new in values]:
        raise ConfigError("\n".join(both))
    for old in filter(names.get, values):
        warn_renamed(old, names[old], where)
    return {names.get(name, name): value for name, value in values.items()}


class Renamed(dict):
    """A dict whose values can also be read by old names, with a RenamedWarning. The keys are the new names only."""

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), names: Mapping[str, str] | None = None):
        super().__init__(values)
        self._names = names or {}

    def __missing__(self, key):
        return self[self._new(key)]

    def __contains__(self, key) -> bool:
        return super().__contains__(key) or super().__contains__(self._names.get(key))

    def get(self, key, default=None):
        return self[key] if key in self else default

    def __reduce__(self):
        return dict, (dict(self),)

    def _new(self, key) -> str:
        new = self._names.get(key)
        if new is None or not super().__contains__(new):
            raise KeyError(key)
        warn_renamed(f"key {key!r}", repr(new))
        return new
