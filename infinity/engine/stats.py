"""The statistics of `Engine.stats()`: names, units and sources of the numbers.

Knows an engine's parts. Must not know steps, or who reads the numbers.
"""

from __future__ import annotations

from typing import TypedDict, cast

from infinity.renamed import LINKS, STATS_KEYS, Renamed


class LinkStats(TypedDict):
    """One link since the engine was made. busy_seconds: time with an active transfer. stall_seconds: waiting time of the training thread."""

    nbytes: int
    busy_seconds: float
    stall_seconds: float


class ActivationStats(TypedDict):
    """Bytes of saved activations outside of the device: moved so far, in host memory now, the most in host memory, reserved on NVMe."""

    moved_nbytes: int
    host_nbytes: int
    host_peak_nbytes: int
    nvme_nbytes: int


class EngineStats(TypedDict):
    """Sizes in bytes and counts since the start, of one rank."""

    num_parameters: int
    """Elements of all parameters that the engine manages, of all ranks together."""

    model_state_nbytes: int
    """Parameters, master weights and optimizer states of this rank."""

    device_budget_nbytes: int
    """Bytes that the engine may hold on the device now."""

    device_nbytes: int
    """Bytes that the engine holds on the device now."""

    peak_device_nbytes: int
    """Most bytes that the engine has held on the device."""

    peak_activation_nbytes: int
    """Most device memory beside the engine's own; 0 on the CPU."""

    peak_allocated_nbytes: int
    """Most device memory of the process; 0 on the CPU."""

    num_placement_rollbacks: int
    """Divisions of device memory that made steps longer and were undone."""

    num_chunks_on_device: int
    """Chunks whose parameters and optimizer states stay on the device."""

    pinned_host_nbytes: int
    """Size of the pinned buffer pool."""

    nvme_read_nbytes: int
    """Bytes that were read from NVMe."""

    nvme_write_nbytes: int
    """Bytes that were written to NVMe."""

    nvme_entropy_coding: bool
    """Whether exponents are stored on NVMe in a Huffman code."""

    replay_grad_nbytes: int
    """Bytes of gradients that wait in host memory until their update is replayed and written."""

    num_prefetch_plans: int
    """Prefetch plans that were made."""

    num_prefetch_hits: int
    """Fetches to the device that began before an op needed them."""

    num_prefetch_misses: int
    """Fetches to the device that began when an op needed them."""

    loss_scale: float | None
    """The loss scale of fp16; None for other dtypes."""

    num_skipped_steps: int
    """Steps that changed nothing, because a gradient was not finite."""

    activation_offload: ActivationStats | None
    """Saved activations outside of the device; None if all stay there."""

    layerwise_speedup: float | None
    """Expected speedup by `infinity.accumulate`; None if it is not known."""

    layerwise_unsplit_reasons: list[str]
    """Reasons why `infinity.accumulate` runs parts of the model as one segment, or fewer micro-batches at a time."""

    links: dict[str, LinkStats]
    """By link: nvme_read, h2d, all_gather, reduce_scatter, d2h, update, nvme_write."""


def stats_of(engine) -> EngineStats:
    """The statistics of an engine that has started. Reading an old key gives a RenamedWarning."""
    budget, compressor, activations = engine.device_budget, engine.compressor, engine.activations
    found: EngineStats = {
        "num_parameters": engine.layout.num_parameters,
        "model_state_nbytes": sum(chunk.record.nbytes for chunk in engine.registry.chunks),
        "device_budget_nbytes": budget.budget_nbytes,
        "device_nbytes": engine.tier.held_nbytes,
        "peak_device_nbytes": engine.tier.peak_nbytes,
        "peak_activation_nbytes": budget.meter.activation_nbytes,
        "peak_allocated_nbytes": budget.gauge.most_nbytes() if budget.gauge else 0,
        "num_placement_rollbacks": budget.trial.num_failed,
        "num_chunks_on_device": sum(chunk.on_device for chunk in engine.registry.chunks),
        "pinned_host_nbytes": engine.arena.nbytes,
        "nvme_read_nbytes": engine.swap.read_nbytes if engine.swap else 0,
        "nvme_write_nbytes": engine.swap.write_nbytes if engine.swap else 0,
        "nvme_entropy_coding": compressor is not None and compressor.codes,
        "replay_grad_nbytes": compressor.pool.used_nbytes if compressor and compressor.pool else 0,
        "num_prefetch_plans": engine.follower.num_plans,
        "num_prefetch_hits": engine.weights.num_ahead,
        "num_prefetch_misses": engine.weights.num_late,
        "loss_scale": engine.cycle.scaler.scale if engine.cycle.scaler is not None else None,
        "num_skipped_steps": engine.cycle.num_skipped,
        "activation_offload": activations.stats() if activations is not None else None,
        "layerwise_speedup": engine.cycle.advice.speedup,
        "layerwise_unsplit_reasons": list(engine.cycle.layerwise_limits.reasons),
        "links": Renamed({link: meter.totals() for link, meter in engine.events.meters.items()}, LINKS),
    }
    return cast(EngineStats, Renamed(found, STATS_KEYS))
