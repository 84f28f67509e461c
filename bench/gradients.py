"""Backward time with gradients offloaded by all ranks, against one owner's link (figure 6c of ZeRO-Infinity, section 8).

    python bench/gradients.py [--device cuda] [--simulate MACHINE] [--ranks 2,4] [--hidden 4096] [--layers 4] [--batch 1] [--rounds 5]
                              [--json FILE] [--plot FILE]

Weights stay on the device, so only gradients move. `all` is this engine: a chunk's gradient is reduce-scattered, and each rank copies
its slice to the host. With `owner`, the gradient is reduced to rank 0, which copies the same bytes to the host alone. Both use the same
engine on the same ranks, in turn. The learning rate is 0, so both have the same gradients. The gradients' sums of squares in host memory
must agree within --tolerance, or the exit status is 1. A time lasts from before backward() until the last byte is there, on all ranks;
the median of the --steps of a round counts. On the CPU a link is a memory copy by one thread of the rank.

--simulate names a machine file or a machine that the engine knows. One rank trains without bytes on that machine: with `all` each rank copies at
d2h_all_gbps, with `owner` this rank copies alone, at d2h_gbps. The last of the --steps counts, and there are no sums.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _common import (
    RunError,
    add_simulate,
    agree,
    apart,
    error_bars,
    exit_with,
    given,
    leave,
    on_ranks,
    parse,
    positive,
    positive_float,
    positives,
    spread,
    where,
)

import infinity
from infinity import output
from infinity.model.gpt import GPT
from infinity.system.threads import now
from infinity.tools.machine import Machine
from infinity.tools.meta_models import gpt, num_heads
from infinity.tools.predict.simulated_run import TrainingStep, started, world_of

WAYS = ("all", "owner")
PLACES = {"param_tier": "device", "optimizer_state_tier": "host", "update": "deferred"}
OWNER = 0


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    add_simulate(parser)
    parser.add_argument("--ranks", type=positives, default=str(torch.cuda.device_count()) if cuda else "2", help="numbers of them")
    shape = (("hidden", 4096 if cuda else 512), ("layers", 4), ("vocab", 32000 if cuda else 2048), ("seq", 1024 if cuda else 32))
    for name, default in (*shape, ("batch", 1), ("rounds", 5), ("steps", 3)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--dtype", default="bf16" if cuda else "fp32")
    parser.add_argument("--timeout", type=positive_float, default=600, help="seconds for one number of ranks")
    parser.add_argument("--tolerance", type=float, default=0.001, help="of sums of squares, relative")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parse(parser)
    if options.case:
        leave(lambda: measure(argparse.Namespace(**json.loads(options.case))))
        return 0
    node = Machine.load(Path(options.simulate)) if options.simulate else None
    if node and (odd := [num for num in options.ranks if num > node.devices and num % node.devices]):
        parser.error(f"--ranks {odd[0]}: expected at most {node.devices} ranks, or a multiple of {node.devices}, the devices of a node")
    case = given(options)
    found = {}
    for num_ranks in options.ranks:
        try:
            if node:
                found[num_ranks] = report = simulated(options, node, num_ranks)
            else:
                found[num_ranks] = report = on_ranks(__file__, ["--case", json.dumps(case)], num_ranks, options.timeout)[0]
        except RunError as error:
            sys.exit(f"{num_ranks} ranks: {error}")
        times, nbytes = report["seconds"], report["nbytes"]
        ratios = [owner / all_ for all_, owner in zip(*(times[way] for way in WAYS))]
        print(
            f"{num_ranks} ranks, {nbytes / 2**20:.0f} MiB of gradients: all {spread(times['all'])} s, owner {spread(times['owner'])} s, "
            f"{spread(ratios, 2)}x" + ("" if options.simulate else f"; sums of squares differ by {report['difference']:.1e}"),
            flush=True,
        )
    if options.json:
        output.write_json(options.json, {"found": found, "torch": torch.__version__, "options": case})
    if options.plot:
        plot(options, found)
    return 0 if options.simulate else int(not agree(options, max(report["difference"] for report in found.values()), "sums of squares"))


def simulated(options, node: Machine, num_ranks: int) -> dict:
    """As `measure`, on so many devices of simulated nodes, without the difference."""
    seconds = {}
    devices = min(num_ranks, node.devices)
    machine = dataclasses.replace(node, devices=devices, nodes=num_ranks // devices)
    subject = gpt(options.hidden, options.layers, num_heads(options.hidden), options.vocab, options.seq, options.batch, options.dtype)
    for way in WAYS:
        world = world_of(machine if way == "all" else dataclasses.replace(machine, d2h_all_gbps=machine.d2h_gbps))
        with tempfile.TemporaryDirectory() as folder:
            config = infinity.Config(device="cpu", dtype=options.dtype, swap_dirs=[folder], verbose=False, **PLACES)
            seconds[way] = [world.run(functools.partial(simulated_backward, options, world, subject, config, way))]
    return {"seconds": seconds, "nbytes": sum(param.nbytes for param in subject.model.parameters())}


def simulated_backward(options, world, subject, config, way: str) -> float:
    """Seconds of the last backward pass, as one rank of the world."""
    with started(world, subject, config, TrainingStep(recompute=True)) as (engine, model, optimizer, inputs):
        if way == "owner":
            owner, reduce_scatter = Owner(engine), engine.ranks.reduce_scatter

            def reduce(flat: torch.Tensor, what: str) -> torch.Tensor:
                reduce_scatter(flat, what)  # takes as long as a reduction to one rank
                return flat

            engine.ranks.reduce_scatter, engine.gradients._collect_shard = reduce, owner.collect
        for _ in range(options.steps):
            loss = model(**inputs)
            world.finish()
            start = now()
            loss.backward()
            engine.gradients.drain()
            world.finish()
            engine.gradients.adder.stream.synchronize()
            took = now() - start
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
        return took


def measure(options) -> dict:
    """In a rank: seconds of backward passes by way, a median a round, and the difference of the gradients' sums."""
    cuda = options.device == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    with infinity.init(infinity.Config(device=options.device, dtype=options.dtype, **PLACES)):
        shape = (options.hidden, options.layers, num_heads(options.hidden), options.vocab, options.seq)
        model = GPT(*shape, checkpoint_activations=True)
    optimizer = infinity.AdamW(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, options.vocab, (options.batch, options.seq + 1), generator=generator).to(device)
    with infinity.engine_of(model) as engine:
        ways = {"all": (engine.ranks.reduce_scatter, engine.gradients._collect_shard)}
        owner = Owner(engine)
        ways["owner"] = (owner.reduce, owner.collect)

        def backward(way: str) -> float:
            engine.ranks.reduce_scatter, engine.gradients._collect_shard = ways[way]
            loss = model(tokens[:, :-1], tokens[:, 1:])
            wait(engine, cuda)
            start = time.perf_counter()
            loss.backward()
            engine.gradients.drain()
            wait(engine, cuda)
            return time.perf_counter() - start

        def rest_of_step() -> None:
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()

        seconds = {way: [] for way in WAYS}
        squares = {}
        for round_ in range(options.rounds + 1):
            for way in WAYS:
                times = []
                for _ in range(options.steps):
                    times.append(backward(way))
                    if not round_ and len(times) == options.steps:
                        squares[way] = owner.squares() if way == "owner" else shards_squares(engine)
                    rest_of_step()
                if round_:  # the first one makes plans and communicators
                    seconds[way].append(statistics.median(times))
        nbytes = engine.stats()["num_parameters"] * (2 if options.dtype == "bf16" else 4)
    dist.destroy_process_group()
    return {"seconds": seconds, "nbytes": nbytes, "difference": apart([squares["all"]], [squares["owner"]])}


def wait(engine, cuda: bool) -> None:
    """Wait until all ranks are here and their devices have finished."""
    if cuda:
        torch.cuda.synchronize()
    engine.ranks.barrier()


def shards_squares(engine) -> float:
    total = torch.zeros(1, dtype=torch.float64)
    for chunk in engine.registry.chunks:
        with engine.gradients.shard(chunk) as gradient:
            total += gradient.double().square().sum().cpu()
    return engine.ranks.sum_(total).item()


class Owner:
    """One rank moves all gradients: `reduce` replaces `Ranks.reduce_scatter`, `collect` replaces `Gradients._collect_shard`. In host
    memory, the rank's own slice is in its shard, and the other slices are beside it.
    """

    def __init__(self, engine):
        self.engine = engine
        self.is_owner = engine.ranks.rank == OWNER
        self.others: dict[int, torch.Tensor] = {}  # by chunk, in host memory, [world - 1, shard_numel and some more]

    def reduce(self, flat: torch.Tensor, what: str) -> torch.Tensor:
        dist.reduce(flat, OWNER, group=self.engine.ranks.data)
        return flat

    def collect(self, chunk, scattered, params: list[int]) -> None:
        flat, done = scattered.wait()
        scattered.result = None
        gradients, rows = self.engine.gradients, flat.view(self.engine.ranks.world, -1)
        with gradients._open(chunk) as memory:
            if not self.is_owner:
                memory.zero_()
            else:
                if chunk.index not in self.others:
                    self.others[chunk.index] = torch.empty(rows[1:].shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
                gradients.adder.put(memory, rows[OWNER, : memory.numel()], True, done, on_device=False)
                gradients.adder.put(self.others[chunk.index].view(-1), rows[1:].reshape(-1), True, done, on_device=False)
        if flat.is_cuda:
            flat.record_stream(gradients.adder.stream)
        chunk.gradient.received.update(params)

    def squares(self) -> float:
        """Sum of squares of all gradients, known to every rank."""
        total = torch.zeros(1, dtype=torch.float64)
        if self.is_owner:
            for chunk in self.engine.registry.chunks:
                with self.engine.gradients.shard(chunk) as gradient:
                    total += gradient.double().square().sum()
                total += self.others[chunk.index][:, : chunk.chunk.shard_numel].double().square().sum()
        return self.engine.ranks.sum_(total).item()


def plot(options, found: dict) -> None:
    pyplot = output.pyplot()
    figure, axes = pyplot.subplots(figsize=(5.5, 3.5), layout="constrained")
    for index, way in enumerate(WAYS):
        times = [report["seconds"][way] for report in found.values()]
        at = [place + 0.4 * index - 0.2 for place in range(len(found))]
        bars = axes.bar(at, [statistics.median(each) for each in times], 0.38, yerr=error_bars(times), capsize=3)
        bars.set_label({"all": "by all ranks", "owner": "by one owner"}[way])
    axes.set_xticks(range(len(found)), [str(num_ranks) for num_ranks in found])
    axes.set(xlabel="ranks", ylabel="backward, s")
    axes.set_title(f"gradients to the host: {where(options)}, hidden {options.hidden}, {options.layers} layers", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    exit_with(main)
