"""The description of a started engine: sizes, tiers, bytes per step. `infinity.describe` returns it, and the start block shows it.

Knows an engine's parts and the planner's counts. Must not know hooks, steps or how bytes move.
"""

# [Note: where the start block goes]
# The block is one record of level INFO of the logger "infinity.start". The logger has a level of its own, INFO, so that the level of the root
# logger, WARNING by default, does not drop the record. If no handler of the program receives the record, the block goes to standard error.

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from infinity.engine.engines import engine_of
from infinity.engine.sizing import records_may_visit
from infinity.errors import UsageError
from infinity.formats.format import Format, scale_name
from infinity.model.tiled_layers import Tiled
from infinity.output import say, table
from infinity.plan import placement as planner
from infinity.plan.packing import Layout
from infinity.plan.record import GRADIENTS, KINDS, STATES, WEIGHTS, Record
from infinity.plan.tiers import DEVICE, HOST, NVME, TIERS, Tier, choice_of, tier_of
from infinity.plan.traffic import Step, step_nbytes
from infinity.renamed import LINKS as OLD_LINKS
from infinity.renamed import Renamed
from infinity.sizes import format_bytes

_NUM_COLUMNS = 98  # most characters of a line, indent excluded
_NO_BREAK = "\N{NO-BREAK SPACE}"

_logger = logging.getLogger("infinity.start")
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.INFO)


@dataclass(frozen=True, kw_only=True)
class TierBytes:
    """Bytes of one rank in one tier. weights, states, gradients: copies that stay there between uses. used: all reserved memory, including
    buffers and slots. left: the rest of the budget (device_memory, host_memory), or of the free space in the swap directories."""

    weights: int
    states: int
    gradients: int
    used: int
    left: int


@dataclass(frozen=True, kw_only=True)
class Description:
    """Sizes of one rank's engine as planned at the start. `str(description)` is the start block."""

    model: str
    """Name of the model's class."""

    num_parameters: int
    """Elements of all parameters that the engine manages, of all ranks together."""

    num_trainable: int
    """Elements of the parameters with requires_grad."""

    device: str
    """Where the model computes, such as "cuda:0"."""

    num_ranks: int
    """Ranks that share the parameters."""

    dtype: str
    """The dtype in which most parameters compute: bf16, fp16 or fp32."""

    dtypes: Mapping[str, int]
    """Elements of parameters by compute dtype. More than one entry: the model has different dtypes, and each parameter keeps its own."""

    stored: Mapping[str, str]
    """The dtype of each stored state of a trainable parameter, by name, such as {"weight": "bf16", "residual": "int16", ...}."""

    quantised: Mapping[str, int]
    """Elements of quantised frozen parameters by the name of the storage, such as {"nf4": 6_900_000_000}."""

    tiers: Mapping[str, TierBytes]
    """Bytes by the tier's name, the fastest tier first: device, host, nvme."""

    activations: str
    """The tier of the activations that autograd saves: device, host or nvme."""

    step_nbytes: Mapping[str, int]
    """Expected bytes per step, by link: nvme_read, h2d (host to device), all_gather, reduce_scatter, d2h (device to host), nvme_write.
    See [Note: how the bytes of a step are counted] in infinity/plan/traffic.py."""

    drive_seconds: float | None
    """Seconds that the drives need for the bytes of one step, at the measured rate. None: no bytes, or no measurement."""

    bottleneck: str | None
    """The link with the longest expected busy time: of the two NVMe links the one with more bytes; without NVMe traffic the link with the
    most bytes. None: no link carries bytes."""

    only_by_layer: bool
    """Whether several micro-batches a step need infinity.accumulate, because no tier has room for sums of gradients."""

    tiled: Mapping[str, int]
    """Layers that are cut into tiles: number of tiles by layer name. A tiled linear layer rounds differently from the whole layer."""

    def __str__(self) -> str:
        return "\n  ".join([*self._model(), *self._tiers(), *self._step(), *self._sums(), *self._tiles()])

    def _model(self) -> list[str]:
        trainable = f"{self.num_trainable:,}" if self.num_trainable < self.num_parameters else "all"
        ranks = f"; {self.num_ranks} ranks, bytes are per rank" if self.num_ranks > 1 else ""
        stored = ", ".join(f"{dtype} {name}" for name, dtype in self.stored.items())
        stored = stored.replace(", int16 residual", " + int16 residual (fp32 master)")
        others = ", ".join(f"{dtype} ({num:,} parameters)" for dtype, num in list(self.dtypes.items())[1:])
        computes = f"{self.dtype}, some parameters in their own dtype {others}" if others else self.dtype
        quantised = "".join(f"; frozen {name} ({num:,} parameters)" for name, num in self.quantised.items())
        return [
            f"{self.model}, {self.num_parameters:,} parameters ({trainable} trainable), on {self.device}{ranks}",
            *_lines(f"computes in {computes}; stores {stored}{quantised}"),
        ]

    def _tiers(self) -> list[str]:
        rows = []
        for tier in TIERS:
            found = self.tiers[tier.name]
            numbers = (found.weights, found.states, found.gradients, found.used, found.left)
            rows.append([tier.title, *(format_bytes(nbytes) if nbytes else "-" for nbytes in numbers)])
        lines = table(["tier", "weights", "states", "gradients", "used", "left"], rows).splitlines()
        return [*lines, f"activations: {tier_of(self.activations).title}"]

    def _step(self) -> list[str]:
        moved = [f"{link} {format_bytes(nbytes)}".replace(" ", _NO_BREAK) for link, nbytes in self.step_nbytes.items() if nbytes]
        if not moved:
            return ["a step moves no bytes between tiers: the step time is the compute time"]
        drives = self.step_nbytes["nvme_read"] + self.step_nbytes["nvme_write"]
        if self.drive_seconds is not None:
            rate = drives / self.drive_seconds / 1e9
            expected = f"about {self.drive_seconds:.3g} s a step for {format_bytes(drives)} at the measured {rate:.2f} GB/s"
        else:
            expected = "time per step unknown: drives are not measured" if drives else "time per step unknown before the first step"
        return [*_lines(f"a step moves about: {', '.join(moved)}"), *_lines(f"bottleneck: {self.bottleneck}; {expected}")]

    def _sums(self) -> list[str]:
        text = "several micro-batches a step need infinity.accumulate: no tier has room for sums of gradients"
        return _lines(text) if self.only_by_layer else []

    def _tiles(self) -> list[str]:
        if not self.tiled:
            return []
        num, tiles = len(self.tiled), sum(self.tiled.values())
        layers = "1 layer is" if num == 1 else f"{num} layers are"
        return _lines(f"{layers} cut into {tiles} tiles; linear ones round differently; tile_above=None keeps layers whole")


def _lines(text: str) -> list[str]:
    lines = textwrap.wrap(text, _NUM_COLUMNS, subsequent_indent="  ", break_long_words=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def describe(model: nn.Module) -> Description:
    """Sizes, tiers and bytes per step of a model's engine, as planned at the start: the values of the start block.

    Raises ConfigError for a model in no engine, UsageError before the engine has started or after it is closed.
    """
    engine = engine_of(model)
    engine.lifecycle.check_open()
    if engine.optimizers:
        engine.start()
    if not engine.has_started:
        raise UsageError("infinity.describe: the engine has not started. Create the optimizer first: the plan depends on it.")
    return description_of(engine)


def tell_start(engine) -> None:
    """Log or print the start block of an engine, on rank 0; see [Note: where the start block goes]."""
    if not engine.config.verbose or not engine.ranks.is_first or not _logger.isEnabledFor(logging.INFO):
        return
    text = str(description_of(engine))
    if _logger.hasHandlers():
        _logger.info("%s", text)
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, a full drive or a closed file: the training goes on
            say(text)


def description_of(engine) -> Description:
    """The description of an engine whose parts are built."""
    layout, placement, swap, config = engine.layout, engine.placement, engine.swap, engine.config
    model, records = engine.model, [chunk.record for chunk in engine.registry.chunks]
    moved = step_nbytes(layout, records, placement, expected_step(engine))
    drives, rate = moved["nvme_read"] + moved["nvme_write"], swap.nbytes_per_s / engine.ranks.num_local if swap is not None else 0.0
    of_one = _main_record(records)
    links = [link for link in ("nvme_read", "nvme_write") if moved[link]] or [link for link in moved if moved[link]]
    return Description(
        model=type(model).__name__,
        num_parameters=layout.num_parameters,
        num_trainable=sum(spec.numel for spec in layout.specs if spec.trainable),
        device=str(engine.device),
        num_ranks=engine.ranks.world,
        dtype=layout.main_dtype,
        dtypes=layout.dtypes,
        stored=_stored(of_one.format),
        quantised=_quantised(layout),
        tiers=_tiers(engine),
        activations=(choice_of(config.activation_tier) or DEVICE).name,
        step_nbytes=Renamed(moved, OLD_LINKS),
        drive_seconds=drives / rate if drives and rate else None,
        bottleneck=max(links, key=moved.get, default=None),
        only_by_layer=placement.only_by_layer,
        tiled={name: len(module.tiles) for name, module in model.named_modules() if isinstance(module, Tiled)},
    )


def _stored(format: Format) -> dict[str, str]:
    """The dtype of each state of a parameter, by name."""
    scales = set(map(scale_name, format.moments)) if format.has_coded_moments else set()
    coded = dict.fromkeys(format.moments, format.moments_dtype) if scales else {}
    weights = [segment for segment in format.segments if segment not in format.moment_segments]
    return {segment.name: coded.get(segment.name, segment.dtype) for segment in (*weights, *format.moment_segments) if segment.name not in scales}


def _quantised(layout: Layout) -> dict[str, int]:
    found: Counter[str] = Counter()
    for spec in layout.specs:
        if spec.format.is_coded and not spec.trainable:
            found[spec.format.name] += spec.numel
    return dict(found)


def _main_record(records: list[Record]) -> Record:
    """A record of the most frequent format: by trainable elements, or by all elements if no parameter is trainable."""
    numels = Counter()
    for record in records:
        numels[record.format] += record.numel
    main = max(numels, key=lambda format: (format.trainable, numels[format]))
    return next(record for record in records if record.format == main)


def expected_step(engine) -> Step:
    """The properties of a step that change the bytes, before the first step."""
    config, placement = engine.config, engine.placement
    return Step(
        num_passes=engine.optimizers.accumulation_steps if engine.optimizers and not placement.only_by_layer else 1,
        device_nbytes=placement.expected_nbytes,
        deferred=engine.updater.deferred,
        keep=config.residency == "auto",
        may_visit=records_may_visit(config, engine.layout),
        compresses=engine.compressor is not None and engine.compressor.codes,
        by_layer=placement.only_by_layer,
    )


def _tiers(engine) -> dict[str, TierBytes]:
    return {tier.name: _bytes_in(tier, engine.layout, engine.placement) for tier in engine.parts.tiers}


def _bytes_in(tier: Tier, layout: Layout, placement: planner.Placement) -> TierBytes:
    stored = placement.on_nvme if tier.is_storage else placement.sizes
    found = {kind: sum(nbytes for nbytes, home in zip(stored[kind], placement.homes[kind]) if home == tier) for kind in KINDS}
    if tier.is_device and placement.pinned:
        found[WEIGHTS] = sum(span.nbytes for span in layout.spans)
    used = {DEVICE: placement.fixed_nbytes, HOST: placement.host_nbytes, NVME: placement.nvme_nbytes}[tier]
    left = max(0, tier.capacity_nbytes - used)
    return TierBytes(weights=found[WEIGHTS], states=found[STATES], gradients=found[GRADIENTS], used=used, left=left)
