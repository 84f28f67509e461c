"""The inputs of a placement: the user's choices, the available memory, and one way to cut the model into chunks.

Sizes in bytes, of one rank. Must not know how chunks are placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.compression import room_nbytes
from infinity.plan.packing import Chunk, Layout
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS, Record
from infinity.plan.tiers import Tier
from infinity.sizes import round_up

PAGE_NBYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The user's choices, independent of the cut. weights, states: a tier, or None for the planner's choice. keep: use memory left over by
    budgets. deferred: all gradients wait for step(). updates_follow: all updates follow step(). accumulates: gradients of several backward
    passes add up, and should do so on the device. on_device: all records may have their home on the device. gradients_pass: gradients have
    slots, and no planned place on NVMe: [Note: gradients that pass] in placement.py.
    """

    weights: Tier | None
    states: Tier | None
    keep: bool
    deferred: bool
    updates_follow: bool = False
    accumulates: bool = False
    on_device: bool = True
    gradients_pass: bool = False


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Memory budgets of a rank. device_nbytes: sufficient whatever activations take. expected_nbytes: the engine's likely device memory once
    activations are known, if more than device_nbytes. largest_nbytes: replaces device_nbytes if host memory and NVMe are too small for the
    rest. holds_all: the device may hold all states. nvme_nbytes: records beyond this size live on the device if the user leaves the choice
    to the engine; None if unknown. host_share: share of the host budget for records, and for their buffers if some are on NVMe.
    """

    device_nbytes: int
    host_nbytes: int
    expected_nbytes: int = 0
    largest_nbytes: int = 0
    holds_all: bool = True
    nvme_nbytes: int | None = None
    host_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model cut into chunks, with the records of this rank by chunk, and the memory needs beside their own bytes.

    held_nbytes: the most bytes of spans that nested ops hold. op_gradient_nbytes: the most bytes of gradients that arrive at once.
    num_incomplete: the number of chunks that usually have a gradient at the same time, if each update begins once its gradient is complete.
    has_regions: modules are compiled, each as one op. buffers_nbytes: the most bytes of gradients before their reduction, on several ranks.
    snapshot_nbytes: extra bytes of records on the device, see [Note: weights written in forward] in span_state.py. compression_nbytes:
    buffers, if some records are on NVMe. late_nbytes: approximate bytes of each record's gradient in a pool, if moments may be late; slots
    of states then have room for one gradient. late_on_nvme: NVMe has room for one gradient if there is no pool. late_first: a pool comes
    before states.
    """

    layout: Layout
    records: Sequence[Record]
    held_nbytes: int
    op_gradient_nbytes: int
    num_incomplete: int = 0
    has_regions: bool = False
    buffers_nbytes: int = 0
    snapshot_nbytes: int = 0
    compression_nbytes: int = 0
    late_nbytes: Sequence[int] | None = None
    late_on_nvme: bool = False
    late_first: bool = False

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Bytes of each copy, by kind and chunk."""
        return {
            WEIGHTS: tuple(record.weight_nbytes for record in self.records),
            STATES: tuple(record.states_nbytes for record in self.records),
            GRADIENTS: tuple(
                gradient_nbytes(chunk, record.numel) for chunk, record in zip(self.layout.chunks, self.records)
            ),
        }

    def in_slots(self, sizes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Bytes of each copy in a slot."""
        if self.late_nbytes is None:
            return sizes
        return sizes | {STATES: tuple(n and n + record.late_gradient[2] for n, record in zip(sizes[STATES], self.records))}

    def on_nvme(self, sizes: dict[str, tuple[int, ...]], *, late: bool) -> dict[str, tuple[int, ...]]:
        """Bytes of each copy's extent on NVMe. late: with room for a gradient behind the states."""
        codes = self.compression_nbytes > 0
        found = {
            kind: tuple(n and room_nbytes(record, kind, late=late, codes=codes) for n, record in zip(sizes[kind], self.records))
            for kind in (WEIGHTS, STATES)
        }
        return sizes | found


def gradient_nbytes(chunk: Chunk, numel: int) -> int:
    """Bytes that the gradient of a shard of `numel` elements takes while it waits for its update; 0 for a frozen chunk."""
    return round_up(numel * chunk.format.gradient_itemsize, PAGE_NBYTES)
