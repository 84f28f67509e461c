"""What of a model is not cut by layer, and why: which of its blocks begin no segment, and for how many micro-batches there is no room. Found
in a step, which begins anew, and told once.

Knows blocks by who they are, numbers of micro-batches, and reasons. Must not know graphs, threads, or who cuts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import nn

from infinity.output import say
from infinity.system.ranks import Ranks

OFF = "Config(activation_tier='host') or 'nvme' takes what blocks are given off the device"
REST_OFF = "had no room in host memory: Config(activation_tier='nvme') takes it off the device"


class FoundError(Exception):
    """What a step by layer has done so far is of no use: begin it anew. Never leaves `infinity.accumulate`."""


class Uncut:
    """Of one engine. whole: nothing is cut. reasons: in words, each once. who: begins its lines."""

    def __init__(self, who: str = "", tell: Callable[[str], None] = say):
        self.whole = False
        self.most: int | None = None  # micro-batches for which there may be room by layer
        self.away: int | None = None  # those of which the device has none for what blocks are given
        self.reasons: list[str] = []
        self._who, self._tell = who, tell
        self._joined: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # to what comes before them
        self._known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # models that have passed, and whether cut
        self._found: set[nn.Module] = set()  # since ranks have agreed
        self.found_whole = False
        self._told_of_cache = False

    def __contains__(self, block: nn.Module) -> bool:
        """Whether no segment begins with the block."""
        return block in self._joined

    def at_once(self, num_micro_batches: int) -> int:
        """How many of a step's micro-batches there is room for by layer, in turns of about as many."""
        num_turns = -(-num_micro_batches // (self.most or num_micro_batches))
        return -(-num_micro_batches // num_turns)

    def is_away(self, num_micro_batches: int) -> bool:
        """Whether what blocks of a step of so many are given is to be in host memory."""
        return self.away is not None and num_micro_batches >= self.away

    def note_away(self, num_micro_batches: int, room: str) -> None:
        """The device has no room for what blocks of so many are given. room: for that in host memory."""
        if self.away is None:
            what = f"what the blocks of {num_micro_batches} micro-batches are given goes to host memory, which has {room} for it"
            self._tell(f"{self._who}infinity.accumulate: {what}: the device has no room")
        self.away = num_micro_batches

    def note_full(self, num_micro_batches: int, *, kept_there: bool) -> None:
        """There is none for so many at once. kept_there: on the device, as nothing else was asked for."""
        self.most = -(-num_micro_batches // 2)
        how = f"they take turns of {self.most}" if self.most > 1 else "they run one after the other"
        how += f", unless {OFF}" if kept_there else ""
        self.name(f"the device has no room for {num_micro_batches} micro-batches by layer", how)

    def is_new(self, model: nn.Module, *, is_cut: bool) -> bool:
        """Whether no step has had all its forward passes of the model; is_cut: and been cut."""
        known = self._known.get(model)
        return known is None or (is_cut and not known)

    def note_forward(self, model: nn.Module, *, is_cut: bool) -> None:
        """A step has had all of them."""
        self._known[model] = is_cut or self._known.get(model, False)

    def note(self, reason: str, blocks: Iterable[nn.Module] = ()) -> None:
        """Something cannot be cut before these blocks; without any, or with such as were no borders before, nothing can."""
        found = set(blocks).difference(self._joined)
        self._found |= found
        self.found_whole |= not found
        self.name(reason, "the parts of the model between these run as one" if found else "micro-batches run one after the other")

    def name(self, reason: str, how: str) -> None:
        """Tell what cannot be cut, and how that runs, unless it was told."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            self._tell(f"{self._who}infinity.accumulate: {reason}: {how}")

    def tell_of_cache(self) -> None:
        """The configuration of the model has use_cache=True, which is turned off for each step by layer."""
        if not self._told_of_cache:
            self._told_of_cache = True
            self._tell(
                f"{self._who}infinity.accumulate turns off the cache of the model (config.use_cache=True), because blocks run again in "
                f"backward. Some models, such as T5, then round otherwise than in the ordinary loop. Set config.use_cache=False: both are equal"
            )

    def agree(self, blocks: list[nn.Module], ranks: Ranks) -> bool:
        """Whether anything was noted since, on any rank: then it is so on all. Each gives the same blocks."""
        whole, *found = ranks.most([self.found_whole, *(block in self._found for block in blocks)])
        self.whole |= bool(whole)
        self._joined.update(block for block, there in zip(blocks, found, strict=True) if there)
        self._found, self.found_whole = set(), False
        return any((whole, *found))
