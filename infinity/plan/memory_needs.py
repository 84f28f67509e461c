"""What a placement is made of: what a training asks for, the memory that there is for it, and a way to cut the model.

Sizes in bytes, of one rank. Must not know how anything is placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.packing import Chunk, Layout
from infinity.plan.record import GRADIENTS, STATES, WEIGHTS, Record
from infinity.plan.tiers import Tier
from infinity.sizes import round_up

PAGE_NBYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What is asked for, however the model is cut. weights, states: the tier, None for the planner's choice. keep: use what budgets leave over.

    deferred: all gradients wait for step().
    """

    weights: Tier | None
    states: Tier | None
    keep: bool
    deferred: bool


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Of a rank. expected_nbytes: what of the device is likely to be for the engine once activations are known, where that is more than
    device_nbytes, with which all fits whatever they take. nvme_nbytes: past it, where places are for us to choose, records live on the
    device; None where it is not known. host_share: of the host budget that is for records, and for the buffers that these need if some are on NVMe."""

    device_nbytes: int
    host_nbytes: int
    expected_nbytes: int = 0
    nvme_nbytes: int | None = None
    host_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model cut into chunks, the records of this rank by chunk, and what these take beside their own bytes.

    held_nbytes: the most that nested ops hold of spans; op_gradient_nbytes: the most that gradients take which come at once;
    has_regions: modules are compiled, each as one op; buffers_nbytes: the most that gradients take before they are reduced, on
    several ranks; snapshot_nbytes: more that records on the device take, see [Note: weights written in forward] in span_state.py.
    compression_nbytes: of buffers, if some records are on NVMe. late_nbytes: of each record, about what
    a gradient takes in a pool, where moments may be late: slots of states have room for one then; late_on_nvme: so has NVMe, where
    there is no pool; late_first: a pool comes before states.
    """

    layout: Layout
    records: Sequence[Record]
    held_nbytes: int
    op_gradient_nbytes: int
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
        """Those of a copy in a slot."""
        if self.late_nbytes is None:
            return sizes
        return sizes | {STATES: tuple(n and n + record.late_gradient[2] for n, record in zip(sizes[STATES], self.records))}


def gradient_nbytes(chunk: Chunk, numel: int) -> int:
    """Bytes that the gradient of a shard of `numel` elements takes while it waits for its update; 0 for a frozen chunk."""
    return round_up(numel * chunk.format.gradient_itemsize, PAGE_NBYTES)
