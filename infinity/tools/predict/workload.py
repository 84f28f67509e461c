"""What one step of a model asks for: its ops in order, with the parameters, operations and activations of each.

Knows modules, found by running the model once on the meta device, where tensors have shapes and no bytes. Must not know tiers,
links or time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from infinity.errors import UsageError
from infinity.model.leaf_modules import is_leaf
from infinity.model.tiled_layers import Tiled
from infinity.plan.schedule import Use

BACKWARD_FLOPS = 2  # times those of forward: for the input and for the weight


@dataclass(frozen=True)
class Op:
    """One call of a module that owns parameters. params: indices of its own; held: of the modules around it; kept: those that
    autograd keeps for backward, such as a linear's weight, but not its bias.

    flops: of forward, until the next op begins. block: which checkpointed block it belongs to, or None.
    """

    name: str
    params: tuple[int, ...]
    held: tuple[int, ...]
    kept: tuple[int, ...]
    flops: float
    block: int | None


@dataclass(frozen=True)
class Phase:
    """One op of a whole step: `seconds` are counted by the op's flops times `cost`. grads: parameters whose gradients are complete."""

    op: int
    key: tuple
    cost: int
    grads: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """A model's parameters, by name in registration order, and the ops of a forward pass.

    saved_nbytes: what autograd keeps of a forward pass; with blocks, what it keeps between them and of the largest one.
    """

    names: tuple[str, ...]
    ops: tuple[Op, ...]
    tokens: int
    saved_nbytes: int

    @property
    def forward_flops(self) -> float:
        return sum(op.flops for op in self.ops)

    @property
    def step_flops(self) -> float:
        """Forward, backward, and what is computed again."""
        return sum(self.ops[phase.op].flops * phase.cost for phase in self.phases())

    def phases(self) -> list[Phase]:
        """The ops of a step: forward, then backward from the last to the first, each block computed again before its own."""
        found = [Phase(index, ("forward", index), 1, ()) for index in range(len(self.ops))]
        first = {}  # op in which a parameter is used first: there its gradient is complete
        for index, op in enumerate(self.ops):
            for param in op.params:
                first.setdefault(param, index)
        again: set[int] = set()
        for index in reversed(range(len(self.ops))):
            block = self.ops[index].block
            if block is not None and block not in again:
                again.add(block)
                found += [Phase(i, ("recompute", i), 1, ()) for i, op in enumerate(self.ops) if op.block == block]
            grads = tuple(param for param in self.ops[index].params if first[param] == index)
            found.append(Phase(index, ("backward", index), BACKWARD_FLOPS, grads))
        return found

    def trace(self, span_of: Sequence[int]) -> tuple[list[Use], list[float], list[tuple[int, ...]]]:
        """The trace of a step, with the flops of each of its uses and the parameters whose gradients are complete after it.

        span_of: the span of each parameter. What needs no weights, such as an embedding's backward, belongs to the use before it.
        """
        uses: list[Use] = []
        flops: list[float] = []
        grads: list[tuple[int, ...]] = []
        for phase in self.phases():
            op, backward = self.ops[phase.op], phase.cost == BACKWARD_FLOPS
            spans = tuple(dict.fromkeys(span_of[param] for param in (op.kept if backward else op.params)))
            if not spans:
                flops[-1] += op.flops * phase.cost
                grads[-1] += phase.grads
                continue
            held = () if backward else (span_of[param] for param in op.held)
            uses.append(Use(phase.key, spans, frozenset({*spans, *held})))
            flops.append(op.flops * phase.cost)
            grads.append(phase.grads)
        return uses, flops, grads


def workload(model: nn.Module, run: Callable[[], object], *, tokens: int, recompute: bool = False) -> Workload:
    """Run a model of the meta device once by `run()`, a forward pass over `tokens` tokens, and note what it does.

    recompute: each module of a ModuleList counts as a checkpointed block; the model itself is to run without. Where the model looks
    at a value of a tensor, it finds 1, or true.
    """
    named = list(model.named_parameters())
    index = {id(param): number for number, (_, param) in enumerate(named)}
    storages = {param.untyped_storage()._cdata: number for number, (_, param) in enumerate(named)}
    kept: list[set[int]] = []  # parameters that autograd keeps, by op
    block_of, roots = {}, set()
    if recompute:
        tiles = {id(module.tiles) for module in model.modules() if isinstance(module, Tiled)}  # no blocks: nothing checkpoints them
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and id(module) not in tiles]
        inner = {id(below) for blocks in lists for block in blocks for below in block.modules()}
        blocks = [block for blocks in lists if id(blocks) not in inner for block in blocks]
        block_of = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
        roots = {id(block) for block in blocks}
    names = {id(module): name for name, module in model.named_modules()}
    started: list[tuple[str, list[int], tuple[int, ...], int | None, float]] = []
    around: list[list[int]] = []
    saved: dict[int | None, dict[int, int]] = {}  # bytes of each storage, by the block in which it was saved
    inside: list[int | None] = []

    with contextlib.ExitStack() as stack:
        counter = FlopCounterMode(display=False)

        def keep(tensor, block):
            storage = tensor.untyped_storage()
            if storage._cdata in storages:
                param = storages[storage._cdata]
                if kept:
                    kept[-1].add(param)
                    if param not in started[-1][1] and not any(param in params for params in around):  # read by who does not own it
                        started[-1][1].append(param)
            elif storage._cdata not in buffers:
                saved.setdefault(block, {})[storage._cdata] = storage.nbytes()
                alive.append(tensor)  # a storage that is freed would give its number to another
            return tensor

        def begin(module, args):
            if id(module) in roots:
                for tensor in (value for value in args if isinstance(value, torch.Tensor)):
                    keep(tensor, None)
            inside.append(block_of.get(id(module)))
            parameters = module.parameters() if is_leaf(module) else module._parameters.values()
            own = [index[id(param)] for param in parameters if param is not None and id(param) in index]
            if own:
                held = tuple(param for params in around for param in params)
                kept.append(set())
                started.append((names[id(module)], own, held, block_of.get(id(module)), counter.get_total_flops()))
            around.append(own)

        def end(module, args, output):
            around.pop()
            inside.pop()

        def pack(tensor):
            return keep(tensor, inside[-1] if inside else None)

        buffers = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
        alive = []
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)
        with counter, _Ones(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run()
        total = counter.get_total_flops()
    if named and not started:
        raise UsageError("no module of the model that owns parameters was called, so nothing is known of its ops")
    ends = [entry[-1] for entry in started[1:]] + [total]
    ops = tuple(
        Op(name, tuple(own), held, tuple(sorted(keeps)), end - start, block)
        for (name, own, held, block, start), keeps, end in zip(started, kept, ends)
    )
    by_block = {block: sum(nbytes.values()) for block, nbytes in saved.items()}
    outside = by_block.pop(None, 0)
    return Workload(tuple(name for name, _ in named), ops, tokens, outside + max(by_block.values(), default=0))


class _Ones(TorchDispatchMode):
    """Answers who asks a tensor without bytes for its value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))
