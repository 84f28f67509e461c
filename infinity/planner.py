"""Sizes: what goes to which tier, and how much memory the pipeline's own slots take.

Pure arithmetic over the layout's sizes and the budgets. Must not know torch, files or threads.
"""

# [Note: how budgets are spent]
# First what training cannot do without: the most that one op and those around it hold on the device, and the fewest slots
# with which a record can be read, updated and written. A budget below that is refused with the number that it needs. Then
# slots that let stages overlap. What is then left of the host keeps weights (each byte saves three of NVMe traffic: read
# forward, read backward, written), then states (two).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.chunks import Layout, Record
from infinity.config import format_bytes
from infinity.errors import BudgetError

MIN_WEIGHT_SLOTS, MIN_STATE_SLOTS, MIN_GRADIENT_SLOTS = 2, 2, 2
WEIGHT_SLOTS, STATE_SLOTS, GRADIENT_SLOTS = 64, 12, 8


@dataclass(frozen=True)
class Placement:
    """Homes a chunk ("device", "host" or "nvme"), slots of each kind, and the bytes that all this takes.

    pinned: gathered weights stay on the device for good; their homes are those of the copies that updates are made from.
    gradient_areas: every trainable chunk has host memory of its own for its gradient (deferred updates).
    span_budget_nbytes: device bytes for spans that come and go. gradient_limit_nbytes: for gradients under way.
    """

    weights: tuple[str, ...]
    states: tuple[str, ...]
    weight_slots: int
    state_slots: int
    gradient_slots: int
    gradient_areas: bool
    pinned: bool
    span_budget_nbytes: int
    gradient_limit_nbytes: int
    host_nbytes: int
    nvme_nbytes: int


def place(
    layout: Layout,
    records: Sequence[Record],
    *,
    weights: str,
    states: str,
    keep: bool,
    deferred: bool,
    gradient_itemsize: int | None,
    device_budget: int,
    host_budget: int,
    held_nbytes: int,
    op_gradient_nbytes: int,
) -> Placement:
    """records: of this rank, by chunk. weights, states: auto, device, host or nvme. keep: use what budgets leave over.

    deferred: all gradients wait in host memory. gradient_itemsize: bytes of an accumulated gradient element, None for the
    weight's own. held_nbytes: the most that nested ops hold of spans; op_gradient_nbytes: the largest parameter's gradient.
    Raises BudgetError where a budget is below the least that works.
    """
    chunks = layout.chunks
    itemsize = {"bf16": 2, "fp32": 4}
    span_nbytes = sum(span.numel * itemsize[span.dtype] for span in layout.spans)
    states_nbytes = sum(record.states_nbytes for record in records)
    gradient_nbytes = [
        _page(record.numel * (gradient_itemsize or itemsize[chunk.dtype])) if chunk.trainable else 0
        for chunk, record in zip(chunks, records)
    ]
    buffers = 0 if layout.world == 1 else 2 * max(c.numel * itemsize[c.dtype] for c in chunks)
    gradient_limit = op_gradient_nbytes + buffers

    whole_nbytes = span_nbytes + states_nbytes + sum(gradient_nbytes) + gradient_limit
    if weights == "auto" and states in ("auto", "device") and keep and whole_nbytes <= device_budget:
        weights = states = "device"
    if states == "device" and weights != "device":
        states = _only_whole(states, whole_nbytes, device_budget)
        weights = "device"
    pinned = span_nbytes if weights == "device" else 0
    on_device = states_nbytes + sum(gradient_nbytes) if states == "device" else 0
    needed = pinned + on_device + (0 if pinned else held_nbytes) + gradient_limit
    if device_budget < needed:
        raise BudgetError(
            f"device_memory={format_bytes(device_budget)} is too small: this model needs {_exact(needed)} to make "
            f"progress (largest op {format_bytes(held_nbytes)}, its gradients {format_bytes(gradient_limit)}"
            f"{', weights ' + format_bytes(pinned) if pinned else ''}{', states ' + format_bytes(on_device) if on_device else ''}"
            f"). Raise device_memory{' or leave more to the host' if pinned else ', or split the largest layer'}."
        )
    spare = device_budget - needed
    gradient_limit += min(op_gradient_nbytes, spare // 3)
    span_budget = device_budget - pinned - on_device - gradient_limit

    if weights == "device" and states == "device":
        homes = ("device",) * len(chunks)
        return Placement(homes, homes, 0, 0, 0, False, True, span_budget, gradient_limit, 0, 0)

    weight_max = max(record.weight_nbytes for record in records)
    state_max = max(record.states_nbytes for record in records)
    gradient_max = max(gradient_nbytes)
    trainable = [i for i, chunk in enumerate(chunks) if chunk.trainable]
    weight_home = ["host" if weights == "host" else "nvme"] * len(chunks)
    state_home = ["host" if states == "host" else "nvme"] * len(chunks)
    if weights == "device":  # the record needs its weights beside the states
        weight_home = list(state_home)

    def slots(low_weights: int, low_states: int, low_gradients: int) -> tuple[int, int, int, int]:
        """Counts and bytes of slots and gradient memory, at most the numbers given."""
        num_weights = min(low_weights, weight_home.count("nvme"))
        num_states = min(low_states, sum(state_home[i] == "nvme" for i in trainable))
        num_gradients = 0 if deferred else min(low_gradients, len(trainable))
        nbytes = num_weights * weight_max + num_states * state_max
        nbytes += sum(gradient_nbytes) if deferred else num_gradients * gradient_max
        return num_weights, num_states, num_gradients, nbytes

    def resident_nbytes() -> int:
        return sum(r.weight_nbytes for r, home in zip(records, weight_home) if home == "host") + sum(
            r.states_nbytes for r, home in zip(records, state_home) if home == "host"
        )

    counts = slots(MIN_WEIGHT_SLOTS, MIN_STATE_SLOTS, MIN_GRADIENT_SLOTS)
    least = counts[3] + resident_nbytes()
    if host_budget < least:
        held = f"{counts[0]} weight, {counts[1]} state and {counts[2]} gradient slots"
        whole = f", all gradients {format_bytes(sum(gradient_nbytes))} (deferred update)" if deferred else ""
        raise BudgetError(
            f"host_memory={format_bytes(host_budget)} is too small: this model needs {_exact(least)} to make progress "
            f"({held}{whole}, resident {format_bytes(resident_nbytes())}). Raise host_memory or lower chunk_mib."
        )
    low = [MIN_WEIGHT_SLOTS, MIN_STATE_SLOTS, MIN_GRADIENT_SLOTS]
    high = [WEIGHT_SLOTS, STATE_SLOTS, GRADIENT_SLOTS]
    while low != high:  # grow the pools together, a tenth at a time
        wanted = [min(h, max(l + 1, l + h // 10)) for l, h in zip(low, high)]
        if slots(*wanted)[3] + resident_nbytes() > host_budget:
            break
        low = wanted
    if keep:
        left = host_budget - slots(*low)[3] - resident_nbytes()
        for choice, home, size in ((weights, weight_home, "weight_nbytes"), (states, state_home, "states_nbytes")):
            if choice != "auto":
                continue
            for index in reversed(range(len(chunks))):
                nbytes = getattr(records[index], size)
                if nbytes <= left and home[index] == "nvme":
                    home[index] = "host"
                    left -= nbytes
    num_weights, num_states, num_gradients, nbytes = slots(*low)
    nvme = sum(r.weight_nbytes for r, home in zip(records, weight_home) if home == "nvme") + sum(
        r.states_nbytes for r, home in zip(records, state_home) if home == "nvme"
    )
    return Placement(
        weights=tuple(weight_home),
        states=tuple(state_home),
        weight_slots=num_weights,
        state_slots=num_states,
        gradient_slots=num_gradients,
        gradient_areas=deferred,
        pinned=bool(pinned),
        span_budget_nbytes=span_budget,
        gradient_limit_nbytes=gradient_limit,
        host_nbytes=nbytes + resident_nbytes(),
        nvme_nbytes=nvme,
    )


def chunk_numel(num_parameters: int, *, host_budget: int, device_budget: int, world: int, unit: int) -> int:
    """A chunk size for a model: small enough for a full set of slots in half the host budget and for eight chunks on the
    device, at most 16 MiB and at least 0.25 MiB of 16-bit weights, and at least 64 chunks a model. A multiple of `unit`.
    """
    slots_nbytes = WEIGHT_SLOTS * 2 + STATE_SLOTS * 10 + GRADIENT_SLOTS * 2
    numel = min(
        8 << 20,
        host_budget * world // (2 * slots_nbytes),
        device_budget // 16,
        num_parameters // 64,
    )
    return max(numel, 128 << 10, unit) // unit * unit


def _only_whole(states: str, needed: int, budget: int) -> str:
    if needed > budget:
        raise BudgetError(
            f"states='device' needs {_exact(needed)} for weights, states and gradients on the device, but "
            f"device_memory={format_bytes(budget)}. Raise device_memory or choose states='host'."
        )
    return states


def _exact(nbytes: int) -> str:
    """A budget that can be copied from a message to the configuration."""
    return f"{nbytes} bytes ({format_bytes(nbytes)})"


def _page(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096
