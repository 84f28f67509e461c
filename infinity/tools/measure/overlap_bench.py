"""An engine and a model of equal layers, whose stages and passes the bench times.

Each layer has one chunk. The model runs forward through an engine that keeps no weights. Every pass reads all bytes from NVMe, and every op
compares its weights with the expected values. Depends on: the engine's weights, records, events, lanes and plan follower. Must not know how
plans are made, or how results are shown.
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

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from infinity.config import DEFAULT_SWAP_DIR, Config
from infinity.engine.access.parameter_values import InitialValues
from infinity.engine.engine import Engine
from infinity.errors import ConfigError, SwapError
from infinity.plan.packing import default_chunk_numel
from infinity.plan.record import WEIGHTS
from infinity.plan.tiers import NVME
from infinity.system.events import COMPUTE, now
from infinity.tools.measure.balanced_stages import Pace, PacedSwap

STAGES = {"nvme_read": "#4c78a8", "h2d": "#f58518", "all_gather": "#b279a2", COMPUTE: "#54a24b"}  # with the colours of the plot

_SHIFT = 68  # elements between the weights of two layers in the common random numbers
_NUM_RESIDENT = 3  # layers on the device during copies alone
_NUM_TRIALS = 3  # of each stage, to choose the time of compute, or the common time
_BALANCE_MARGIN = 1.25  # common time / time of the longest stage
_PRODUCT_SIZE = {"cpu": 256, "cuda": 2048}
_NUM_PRODUCTS = 50  # timed, to compute the number for a given time


def efficiency(stages: Sequence[float], pipelined: float) -> float:
    """See [Note: overlap efficiency]. All times in one unit. NaN if only one stage takes time."""
    hidden_at_best = sum(stages) - max(stages)
    return (sum(stages) - pipelined) / hidden_at_best if hidden_at_best else math.nan


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
        self.device = self.engine.device
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
        if self.engine.ranks.are_several:
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
