"""The `bench overlap` command: the share of reads, copies and gathers of weights that an engine hides behind compute of a given time.

The model has equal layers of one chunk each, and runs forward through an engine that keeps no weights. Every pass reads all bytes from NVMe,
and every op compares its weights with the expected values. Depends on: the engine's weights, records, events, lanes and plan follower. Must
not know how plans are made, or how an error ends the process. Over 500 lines because the bench also measures and extends stages alone.
"""

# [Note: overlap efficiency]
# efficiency = (serial - pipelined) / (serial - longest): 1 if a pass takes no longer than the longest stage, 0 if nothing overlaps.
#
# pipelined: time of a whole pass through the engine, from the call of the model until the device is idle. The pass includes the time to fill
# the pipeline: the engine fetches nothing before the call.
# serial: the sum of the stages. Each stage is measured alone for the same layers, right before the pass. The stages read all chunks to host
# memory, copy all to the device, gather as many, and compute as many ops. A stage alone has the drive, the memory and the processors for
# itself, receives all work at once, and waits for no other stage. If stages slow each other down in the pass, the efficiency falls. Stage
# times from a trace of the pass would hide this loss, because they would contain the slowdown and the waits. A stage alone uses device memory
# as a pass does, three layers at a time. With new pages for all layers, copies on the CPU took up to ten times as long alone as in a pass.
# Stages and passes alternate. The fastest repeat of a stage counts, and the median of the passes. Other work on the machine thus lowers the
# efficiency. Other work raises the efficiency only if it disturbs a stage in every repeat.
#
# [Note: balanced stages]
# If link times are very different, hiding the small ones proves little. On the CPU, --balance extends every job to one common time, longer
# than any job needs. The job first moves its bytes, then sleeps, and never sleeps before the input has arrived. The result shows order,
# threads and waits, not bandwidth. Two hooks of the engine do not work here. Lane.on_job runs before a copy waits for its read.
# RecordMover.on_read runs under a lock that the other stages need. PacedSwap extends reads, `Events.before_end` extends copies and gathers.

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import statistics
import sys
import textwrap
from collections.abc import Iterator, Sequence
from time import sleep

import torch
from torch import nn

from infinity.config import DEFAULT_SWAP_DIR, Config
from infinity.engine.access.parameter_values import InitialValues
from infinity.engine.engine import Engine
from infinity.errors import ConfigError, SwapError
from infinity.output import check_file, check_plot, give, pyplot, table
from infinity.plan.host_memory import WEIGHT_SLOTS
from infinity.plan.packing import default_chunk_numel
from infinity.plan.record import WEIGHTS
from infinity.plan.tiers import NVME
from infinity.sizes import format_bytes
from infinity.system.capacity import host_free_nbytes
from infinity.system.events import COMPUTE, now
from infinity.system.lanes import Lane
from infinity.system.ranks import Ranks
from infinity.tools.measure.probes import launched
from infinity.tools.progress import Progress

STAGES = {"nvme_read": "#4c78a8", "h2d": "#f58518", "all_gather": "#b279a2", COMPUTE: "#54a24b"}  # with the colours of the plot

_SHIFT = 68  # elements between the weights of two layers in the common random numbers
_NUM_RESIDENT = 3  # layers on the device during copies alone
_NUM_TRIALS = 3  # of each stage, to choose the time of compute, or the common time
_BALANCE_MARGIN = 1.25  # common time / time of the longest stage
_NOISE = 0.05  # measurement error of an efficiency: within this distance of 0 to 1, values are plausible
_PRODUCT_SIZE = {"cpu": 256, "cuda": 2048}
_NUM_PRODUCTS = 50  # timed, to compute the number for a given time


def overlap(arguments) -> int:
    """The `bench overlap` command."""
    check_file(arguments.output, "--output")
    check_plot(arguments.plot, "--plot")
    if arguments.layers > WEIGHT_SLOTS:
        raise ConfigError(
            f"--layers {arguments.layers}: the bench measures each stage alone with all layers in host memory; give {WEIGHT_SLOTS} at most"
        )
    if min(arguments.depth) < 2:
        raise ConfigError(f"--depth {min(arguments.depth)}: copies run two layers ahead, and reads run before copies; give 2 at least")
    with launched(arguments.device) as (device, ranks):
        if arguments.balance and device.type != "cpu":
            raise ConfigError(f"--balance with device {device}: the bench extends stages only on the CPU; leave it out or give --device cpu")
        for chunk_mib in arguments.chunk_mib:
            _check_memory(chunk_mib, arguments.layers, ranks)
        rows = []
        with Progress() as progress:
            for chunk_mib in arguments.chunk_mib:
                with Bench(arguments, device, chunk_mib, ranks.world) as bench:
                    for depth in arguments.depth:
                        if ranks.is_first:
                            progress.show(f"chunks of {chunk_mib:g} MiB, {depth} ahead", last=True)
                        rows.append(bench.measure(depth, arguments.repeats))
        if ranks.is_first:
            head = {"device": str(device), "world": ranks.world, "layers": arguments.layers, "repeats": arguments.repeats}
            report = head | {"balanced": arguments.balance, "hint": hint_of(rows), "rows": rows}
            give(report, text(report), arguments.json, arguments.output)
            if arguments.plot:
                draw(report, arguments.plot)
    return 0


def efficiency(stages: Sequence[float], pipelined: float) -> float:
    """See [Note: overlap efficiency]. All times in one unit. NaN if only one stage takes time."""
    hidden_at_best = sum(stages) - max(stages)
    return (sum(stages) - pipelined) / hidden_at_best if hidden_at_best else math.nan


def text(report: dict) -> str:
    """The report as a table, in milliseconds per layer."""
    head = ["chunk", "ahead", *report["rows"][0]["stages"], "serial", "longest", "pipelined", "", "efficiency", ""]
    rows = []
    for row in report["rows"]:
        alone = list(map(min, row["stages"].values()))
        cells = [f"{1e3 * seconds / report['layers']:.2f}" for seconds in (*alone, sum(alone), max(alone))]
        pipelined = _spread([1e3 * seconds / report["layers"] for seconds in row["pipelined"]])
        rows.append([f"{row['chunk_mib']:g} MiB", str(row["depth"]), *cells, *pipelined, *_spread(row["efficiency"])])
    ranks = f"{report['world']} ranks" if report["world"] > 1 else "1 rank"
    balanced = ", all stages extended to one time" if report["balanced"] else ""
    about = f"passes over {report['layers']} layers, all weights from NVMe, {ranks} on {report['device']}{balanced}"
    how = f"ms per layer; stages alone: fastest of {report['repeats']}, pipelined: median (lowest-highest); all bytes of a pass were compared"
    hint = hint_of(report["rows"])
    return f"{about}\n{how}\n\n{table(head, rows)}" + (f"\n\n{hint}" if hint else "")


def hint_of(rows: Sequence[dict]) -> str | None:
    """An explanation of efficiencies outside 0 to 1, or None if all are inside."""
    outside = [value for row in rows for value in row["efficiency"] if not -_NOISE <= value <= 1 + _NOISE]
    if not any(map(math.isfinite, outside)):
        return None
    return (
        "efficiencies outside 0 to 1 are noise, and the other values of the row are unreliable. Above 1, other work disturbed the stages "
        "alone; below 0, the passes. Run the bench again when no other program runs here, with more --repeats. On the CPU, --balance makes "
        "stages longer than the noise."
    )


class Bench:
    """An engine with a model, for one chunk size. A context manager."""

    def __init__(self, arguments, device: torch.device, chunk_mib: float, world: int):
        config = Config(
            swap_dirs=arguments.swap_dirs or DEFAULT_SWAP_DIR,
            device=str(device),
            dtype="bf16",
            param_tier=NVME.name,
            optimizer_state_tier=NVME.name,
            residency="none",
            compression="off",  # the ops compare the bytes as they lie on NVMe
            chunk_mib=chunk_mib,
            tile_above=None,
            trace=True,
            verbose=False,
        )
        self.num_layers, self.chunk_mib = arguments.layers, chunk_mib
        self.compute_ms, self.balance = arguments.compute_ms, arguments.balance
        numel = default_chunk_numel(chunk_mib, world)
        torch.manual_seed(0)  # every rank has the same weights
        numbers = torch.randn(numel + _SHIFT * arguments.layers).to(torch.bfloat16)
        self.model = nn.Sequential(*(Layer(numel) for _ in range(arguments.layers)))
        self.engine = Engine(self.model, config, _Shifted(numbers))
        self.device, self.world = self.engine.device, world
        self.cuda = self.device.type == "cuda"
        self.pace = Pace()
        self.token = torch.zeros((), device=self.device)
        numbers = numbers.to(self.device)
        self.ops = [LayerOp(numbers[_SHIFT * index :][:numel], self.pace) for index in range(arguments.layers)]
        for layer, op in zip(self.model, self.ops):
            layer.op = op
        self.swap = None
        self._num_threads = torch.get_num_threads()

    def __enter__(self) -> Bench:
        if not self.cuda:
            torch.set_num_threads(1)  # lanes copy and gather on the other processors
        try:
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error) -> None:
        self.engine.__exit__(*error)
        if self.swap is not None:
            self.swap.close()
        torch.set_num_threads(self._num_threads)

    def measure(self, depth: int, repeats: int) -> dict:
        """Measure stages alone and passes in turn, with reads `depth` layers ahead. Seconds are those of all layers on the slowest rank,
        one value per repeat. compute_ms: time of compute alone, per layer.

        Raises SwapError if an op found wrong weights.
        """
        self.engine.follower.read_so_far_ahead(depth)
        self.run()  # this pass makes a new plan
        repeated = [(self.alone(), self.run()) for _ in range(repeats)]
        stages = {name: [alone[name] for alone, _ in repeated] for name in repeated[0][0]}
        pipelined = [seconds for _, seconds in repeated]
        return {
            "chunk_mib": self.chunk_mib,
            "depth": depth,
            "compute_ms": 1e3 * min(stages[COMPUTE]) / self.num_layers,
            "stages": stages,
            "pipelined": pipelined,
            "efficiency": [efficiency(list(map(min, stages.values())), seconds) for seconds in pipelined],
            "bars": self._bars(),
        }

    def run(self) -> float:
        """Run a pass through the engine. Returns the seconds."""
        seconds = {}
        self._start_s = now()
        with self._timed(seconds, "pass"), torch.no_grad():
            self.model(self.token)
        self._check()
        return self._slowest(seconds)["pass"]

    def alone(self) -> dict[str, float]:
        """Run one stage after the other. Returns the seconds of each for all layers; see [Note: overlap efficiency]."""
        weights, records, registry = self.engine.weights, self.engine.records, self.engine.registry
        seconds = {}
        weights.evict_idle()
        with self._timed(seconds, "nvme_read"):
            requests = [records.request(chunk, WEIGHTS) for chunk in registry.chunks]
            entries = [request.wait() for request in requests]
            for entry in entries:
                records.settle(entry)
        with self._timed(seconds, "h2d"):
            for index, span in enumerate(registry.spans):
                if index >= _NUM_RESIDENT:
                    weights.evict(registry.spans[index - _NUM_RESIDENT])  # waits for the copy of this span; later copies are in flight
                weights.copy(span, needed=True)
            last = registry.spans[-_NUM_RESIDENT:]
            parts = [part for span in last for part in span.fetch]
            for part in parts:
                part.copy.wait()
        if self.world > 1:
            with self._timed(seconds, "all_gather"):
                for job in [weights.lanes.gather(part) for part in self._in_turn(parts)]:
                    job.wait()
        for span in last:
            weights.settle(span)
        with self._timed(seconds, COMPUTE):
            for span in self._in_turn(last):
                self.ops[span.index](span.flat)
        for chunk, entry in zip(registry.chunks, entries):
            records.unpin(chunk, WEIGHTS, entry)
        weights.evict_idle()
        self._check()
        return self._slowest(seconds)

    def _start(self) -> None:
        """Write the weights, and choose the time of compute, or the common time."""
        self.run()
        if (num_slots := self.engine.placement.slots[WEIGHTS]) < self.num_layers:
            raise ConfigError(
                f"{num_slots} layers of {self.chunk_mib:g} MiB fit into host memory, but all {self.num_layers} must fit: the bench measures "
                f"each stage alone; lower --layers or --chunk-mib"
            )
        self.run()  # the first pass that follows a plan
        trials = [self.alone() for _ in range(_NUM_TRIALS)]
        medians = {name: statistics.median(trial[name] for trial in trials) / self.num_layers for name in trials[0]}
        longest = max(medians, key=medians.get)
        # Compute includes the comparison of bytes, and no stage can become shorter.
        least = longest if self.balance else COMPUTE
        least_ms = 1e3 * medians[least]
        if self.compute_ms is None:
            self.compute_ms = 1e3 * medians[longest] * (_BALANCE_MARGIN if self.balance else 1)
        elif self.compute_ms < least_ms:
            what = f"{least} takes" if self.balance else "comparing bytes takes"
            raise ConfigError(
                f"--compute-ms {self.compute_ms:g}{' with --balance' if self.balance else ''}: {what} {least_ms:.3g} ms per layer, "
                f"with chunks of {self.chunk_mib:g} MiB; give that at least, better {_BALANCE_MARGIN * least_ms:.3g}"
            )
        if self.balance:
            self.pace.seconds = self.compute_ms / 1e3
            self.engine.events.before_end = self.pace.end_of
            self.swap = self.engine.records.storage = PacedSwap(self.engine.records.storage, self.pace)
        else:
            products = Products(self.device)
            products.count = round((self.compute_ms / 1e3 - medians[COMPUTE]) / products.seconds_of_one())
            for op in self.ops:
                op.products = products

    def _bars(self) -> dict[str, list[tuple[float, float]]]:
        """(start, end) of each stage's jobs in the last pass, in seconds since the start of the pass.

        Concurrent jobs of a stage are shown one after the other: a bar begins at the end of the previous bar.
        """
        self.engine.events.timeline.resolve(wait=True)
        found = {stage: [] for stage in STAGES}
        for event in self.engine.events.trace:
            start, end = event.start - self._start_s, event.end - self._start_s
            between_layers = event.lane == COMPUTE and event.what[1] == type(self.model).__name__
            if event.lane in found and start >= 0 and not between_layers:
                bars = found[event.lane]
                bars.append((max(start, bars[-1][1] if bars else 0.0), end))
        return {stage: bars for stage, bars in found.items() if bars}

    def _in_turn(self, items: Sequence) -> Iterator:
        """Repeat the items, up to the number of layers."""
        return itertools.islice(itertools.cycle(items), self.num_layers)

    @contextlib.contextmanager
    def _timed(self, seconds: dict[str, float], name: str):
        """Store the seconds of the block, including work on the device. All ranks begin together."""
        self._synchronize()
        self.engine.ranks.barrier()
        start = now()
        yield
        self._synchronize()
        seconds[name] = now() - start

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _slowest(self, seconds: dict[str, float]) -> dict[str, float]:
        return dict(zip(seconds, self.engine.ranks.most(list(seconds.values()))))

    def _check(self) -> None:
        for index, op in enumerate(self.ops):
            if num_wrong := int(op.num_wrong):
                raise SwapError(
                    errno.EIO,
                    f"layer {index} of {self.num_layers} found {num_wrong} wrong words of 8 bytes; check the drive",
                    str(self.engine.config.swap_dirs[0]),
                )


class _Shifted(InitialValues):
    """Each layer has the numbers of the previous layer, shifted by _SHIFT."""

    def __init__(self, numbers: torch.Tensor):
        self._numbers = numbers

    def value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        return self._numbers[_SHIFT * index :][: param.numel()]


class Layer(nn.Module):
    """A layer with one chunk of weights. `op` computes."""

    def __init__(self, numel: int):
        super().__init__()
        stand_in = torch.full((), float("nan"), dtype=torch.bfloat16)  # _Shifted gives the engine the values
        self.weight = nn.Parameter(stand_in.expand(numel), requires_grad=False)

    def forward(self, token):
        self.op(self.weight)
        return token


class LayerOp:
    """Compares the weights, computes the products, then sleeps until the time of a balanced stage is over."""

    def __init__(self, expected: torch.Tensor, pace: Pace):
        self.expected = expected.view(torch.int64)
        self.num_wrong = torch.zeros((), dtype=torch.int64, device=expected.device)
        self.products = None
        self.pace = pace

    def __call__(self, weight: torch.Tensor) -> None:
        start = now()
        self.num_wrong += (weight.view(torch.int64) != self.expected).count_nonzero()
        if self.products is not None:
            self.products()
        self.pace.lengthen(start)


class Products:
    """Matrix products, as many as take a given time."""

    def __init__(self, device: torch.device):
        size = _PRODUCT_SIZE[device.type]
        self.a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.out = torch.empty_like(self.a)
        self.device = device
        self.count = _NUM_PRODUCTS

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self.a, self.a, out=self.out)

    def seconds_of_one(self) -> float:
        def seconds():
            start = now()
            self()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return (now() - start) / self.count

        return min(seconds() for _ in range(_NUM_TRIALS))


class Pace:
    """Extends jobs to `seconds` by sleeping."""

    seconds = 0.0

    def lengthen(self, start: float) -> None:
        sleep(max(0.0, start + self.seconds - now()))

    def end_of(self, link: str, start: float, end: float) -> float:
        """For Events.before_end: extends copies and gathers."""
        if link not in ("h2d", "all_gather"):
            return end
        self.lengthen(start)
        return now()


class PacedSwap:
    """A swap or a compressor whose reads end one after the other, each extended."""

    def __init__(self, swap, pace: Pace):
        self.swap = swap
        self.pace = pace
        self.lane = Lane("nc-pace")

    def read(self, extent, buffer, **options) -> PacedRead:
        transfer = self.swap.read(extent, buffer, **options)

        def wait():
            start = now()
            transfer.wait()
            self.pace.lengthen(start)

        return PacedRead(transfer, self.lane.push(wait))

    def close(self) -> None:
        self.lane.close()


class PacedRead:
    """Has the interface of a Transfer."""

    def __init__(self, transfer, job):
        self.nbytes = transfer.nbytes
        self.promote = transfer.promote
        self.wait = job.wait
        self._job = job

    @property
    def done(self) -> bool:
        return self._job.done


def _check_memory(chunk_mib: float, num_layers: int, ranks: Ranks) -> None:
    """Raise ConfigError if memory is too small for the layers and their expected values."""
    numel = default_chunk_numel(chunk_mib, ranks.world)
    # A rank first makes all numbers in fp32 and converts them to bf16. Later the rank holds its share of the layers beside the bf16 numbers.
    nbytes = int(2 * numel * max(3, 1 + num_layers / ranks.world) * ranks.num_local)
    if nbytes > (free_nbytes := host_free_nbytes()):
        raise ConfigError(
            f"--chunk-mib {chunk_mib:g}: {num_layers} layers and their expected values take {format_bytes(nbytes)} of host memory, "
            f"of which {format_bytes(free_nbytes)} are free; lower --layers or --chunk-mib"
        )


def _spread(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"({min(values):.2f}-{max(values):.2f})"


def draw(report: dict, path) -> None:
    """Draw the times by chunk size and depth, and the jobs of the last pass in the row with the highest efficiency."""
    pyplot_ = pyplot()
    rows, layers = report["rows"], report["layers"]
    figure, (bars, gantt) = pyplot_.subplots(2, 1, figsize=(max(8, 2 + 1.3 * len(rows)), 7.5), height_ratios=(3, 2), layout="constrained")
    width, scale, top = 0.27, 1e3 / layers, 0.0
    for place, row in enumerate(rows):
        alone, pipelined = {stage: min(seconds) for stage, seconds in row["stages"].items()}, statistics.median(row["pipelined"])
        bottom = 0.0
        for stage, seconds in alone.items():
            bars.bar(place - width, seconds * scale, 0.9 * width, bottom, color=STAGES[stage], label=None if place else stage)
            bottom += seconds * scale
        bars.bar(place, max(alone.values()) * scale, 0.9 * width, color="#bab0ac", label=None if place else "longest stage")
        spread = [[(pipelined - min(row["pipelined"])) * scale], [(max(row["pipelined"]) - pipelined) * scale]]
        style = {"color": "#4a4a4a", "ecolor": "#9a9a9a", "capsize": 3, "label": None if place else "pipelined"}
        bars.bar(place + width, pipelined * scale, 0.9 * width, yerr=spread, **style)
        highest = max(bottom, max(row["pipelined"]) * scale)
        bars.text(place, highest, f"{statistics.median(row['efficiency']):.2f}", ha="center", va="bottom")
        top = max(top, highest)
    bars.set_ylim(0, 1.25 * top)
    bars.set_xticks(range(len(rows)), [f"{row['chunk_mib']:g} MiB\n{row['depth']} ahead" for row in rows])
    bars.set_ylabel("ms per layer")
    bars.set_title("stages alone, stacked; the longest stage; a pass through the engine; above: overlap efficiency", fontsize=10)
    bars.legend(ncols=6, loc="upper center", frameon=False, fontsize=9)

    best = max(rows, key=lambda row: statistics.median(row["efficiency"]))
    for height, (stage, found) in enumerate(best["bars"].items()):
        for number, (start, end) in enumerate(found):
            gantt.barh(height, 1e3 * (end - start), 0.75, 1e3 * start, color=STAGES[stage], alpha=1 - 0.35 * (number % 2))
    gantt.set_yticks(range(len(best["bars"])), list(best["bars"]))
    gantt.invert_yaxis()
    gantt.set_xlim(0)
    gantt.set_xlabel("ms since the start of the pass")
    gantt.set_title(f"one pass over {layers} layers, chunks of {best['chunk_mib']:g} MiB, {best['depth']} ahead", fontsize=10)
    if report["hint"]:
        figure.suptitle(textwrap.fill(report["hint"], 120), fontsize=8, color="#b03a2e")
    for axes in (bars, gantt):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot_.close(figure)
