"""Limits of layer-wise accumulation for one engine: blocks that begin no segment, and the number of micro-batches that fit on the device.

A step that meets a limit restarts. Each limit is reported once.
Knows blocks by identity, numbers of micro-batches, and reasons. Must not know graphs, threads, or how a step runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import nn

from infinity.output import say
from infinity.system.ranks import Ranks

OFFLOAD_INPUTS = "Config(activation_tier='host') or 'nvme' moves the inputs of blocks off the device"
OFFLOAD_REST = "found no room in host memory: Config(activation_tier='nvme') moves the rest off the device"


class RestartStep(Exception):
    """The step must restart. The exception never leaves `infinity.accumulate`."""


class LayerwiseLimits:
    """whole: the model is not cut at all. reasons: one text a limit. who: prefix of each message, such as "rank 1 of 2, "."""

    def __init__(self, who: str = "", tell: Callable[[str], None] = say):
        self.whole = False
        self.most: int | None = None  # micro-batches for which the device may have room at once
        self.away: int | None = None  # micro-batches whose block inputs do not fit on the device
        self.reasons: list[str] = []
        self._who, self._tell = who, tell
        self._joined: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # blocks that continue the segment before them
        self._checked: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # model -> whether a checked step cut it
        self._found: set[nn.Module] = set()  # blocks to join, until the ranks agree on them
        self.found_whole = False
        self._told_of_cache = False

    def __contains__(self, block: nn.Module) -> bool:
        """Whether the block begins no segment."""
        return block in self._joined

    def at_once(self, num_micro_batches: int) -> int:
        """Micro-batches that pass the model together. The rounds of a step have about equal sizes."""
        num_rounds = -(-num_micro_batches // (self.most or num_micro_batches))
        return -(-num_micro_batches // num_rounds)

    def is_away(self, num_micro_batches: int) -> bool:
        """Whether a step of so many micro-batches keeps block inputs in host memory."""
        return self.away is not None and num_micro_batches >= self.away

    def note_away(self, num_micro_batches: int, room: str) -> None:
        """Note that block inputs of so many micro-batches do not fit on the device. room: host memory for them, as text."""
        if self.away is None:
            self._say(
                f"the device has no room for the block inputs of {num_micro_batches} micro-batches: "
                f"they go to host memory, which has {room} for them"
            )
        self.away = num_micro_batches

    def note_full(self, num_micro_batches: int, *, kept_there: bool) -> None:
        """Note that the device has no room for so many micro-batches. kept_there: the configuration keeps block inputs on the device."""
        self.most = -(-num_micro_batches // 2)
        how = f"they run in rounds of {self.most}" if self.most > 1 else "they run one after the other"
        how += f", unless {OFFLOAD_INPUTS}" if kept_there else ""
        self.report(f"the device has no room for {num_micro_batches} micro-batches in a layer-wise step", how)

    def is_unchecked(self, model: nn.Module, *, is_cut: bool) -> bool:
        """Whether no step has completed all forward passes of the model in this form."""
        checked = self._checked.get(model)
        return checked is None or (is_cut and not checked)

    def note_checked(self, model: nn.Module, *, is_cut: bool) -> None:
        """Note that a step has completed all forward passes of the model."""
        self._checked[model] = is_cut or self._checked.get(model, False)

    def note(self, reason: str, blocks: Iterable[nn.Module] = ()) -> None:
        """Note that the model cannot be cut before these blocks. If none of them is a new border, the model cannot be cut at all."""
        found = set(blocks).difference(self._joined)
        self._found |= found
        self.found_whole |= not found
        self.report(reason, "these parts and all parts between them run as one segment" if found else "micro-batches run one after the other")

    def report(self, reason: str, how: str) -> None:
        """Report a reason, and how the step runs instead, once."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            self._say(f"{reason}: {how}")

    def report_cache(self) -> None:
        """Report once that layer-wise steps turn off the cache of a model with use_cache=True in its configuration."""
        if not self._told_of_cache:
            self._told_of_cache = True
            self._say(
                "the cache of the model (config.use_cache=True) is turned off, because blocks run again in backward. "
                "Some models, such as T5, then round differently than in the ordinary loop. With config.use_cache=False both have the same bits"
            )

    def agree(self, blocks: list[nn.Module], ranks: Ranks) -> bool:
        """Apply the limits that any rank has found since the last call. Returns whether there are any. All ranks pass the same blocks."""
        whole, *found = ranks.most([self.found_whole, *(block in self._found for block in blocks)])
        self.whole |= bool(whole)
        self._joined.update(block for block, is_found in zip(blocks, found, strict=True) if is_found)
        self._found, self.found_whole = set(), False
        return any((whole, *found))

    def _say(self, text: str) -> None:
        self._tell(f"{self._who}infinity.accumulate: {text}")
