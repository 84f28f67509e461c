"""The work of one step of a model: the ops in order, with the parameters, operations and activations of each.

Runs the model once on the meta device, where tensors have shapes but no bytes. Must not know tiers, links or time.
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

BACKWARD_FLOPS = 2  # relative to forward: gradients of the input and of the weight


@dataclass(frozen=True)
class Op:
    """One call of a module that owns parameters. params: indices of these parameters. held: indices of the enclosing modules' parameters.

    kept: parameters that autograd keeps for backward: the weight of a linear layer, but not the bias. flops: of forward, until the next op
    begins. block: number of the checkpointed block with this op, or None.
    """

    name: str
    params: tuple[int, ...]
    held: tuple[int, ...]
    kept: tuple[int, ...]
    flops: float
    block: int | None


@dataclass(frozen=True)
class Phase:
    """One op of a whole step, with `cost` times the flops of the op. grads: parameters whose gradients are then complete."""

    op: int
    key: tuple
    cost: int
    grads: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """The names of a model's parameters in registration order, and the ops of a forward pass.

    saved_nbytes: bytes that autograd keeps. With checkpointed blocks these are the bytes between blocks and those of the largest block.
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
        """Floating-point operations of forward, backward and recomputation."""
        return sum(self.ops[phase.op].flops * phase.cost for phase in self.phases())

    def phases(self) -> list[Phase]:
        """The ops of a step: forward, then backward from last to first. Each block is recomputed before the backward ops of the block."""
        found = [Phase(index, ("forward", index), 1, ()) for index in range(len(self.ops))]
        first = {}  # first op of each parameter: its backward completes the gradient
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
        """The trace of a step, with the flops of each use, and the parameters whose gradients are complete after the use.

        span_of: the span of each parameter. A phase without weights, such as the backward of an embedding, belongs to the previous use.
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
    """Run a model on the meta device once by `run()`, a forward pass over `tokens` tokens, and record the ops.

    recompute: each module of a ModuleList counts as a checkpointed block. The model itself must run without checkpointing. If the model reads
    the value of a tensor, the value is 1 or true.
    """
    named = list(model.named_parameters())
    index = {id(param): number for number, (_, param) in enumerate(named)}
    storages = {param.untyped_storage()._cdata: number for number, (_, param) in enumerate(named)}
    kept: list[set[int]] = []  # parameters that autograd keeps, by op
    block_of, roots = {}, set()
    if recompute:
        tiles = {id(module.tiles) for module in model.modules() if isinstance(module, Tiled)}  # tiles are no blocks: nothing checkpoints them
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and id(module) not in tiles]
        inner = {id(below) for blocks in lists for block in blocks for below in block.modules()}
        blocks = [block for blocks in lists if id(blocks) not in inner for block in blocks]
        block_of = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
        roots = {id(block) for block in blocks}
    names = {id(module): name for name, module in model.named_modules()}
    started: list[tuple[str, list[int], tuple[int, ...], int | None, float]] = []
    around: list[list[int]] = []
    saved: dict[int | None, dict[int, int]] = {}  # bytes of each storage, by the block that saved the storage
    inside: list[int | None] = []

    with contextlib.ExitStack() as stack:
        counter = FlopCounterMode(display=False)

        def keep(tensor, block):
            storage = tensor.untyped_storage()
            if storage._cdata in storages:
                param = storages[storage._cdata]
                if kept:
                    kept[-1].add(param)
                    if param not in started[-1][1] and not any(param in params for params in around):  # of another module
                        started[-1][1].append(param)
            elif storage._cdata not in buffers:
                saved.setdefault(block, {})[storage._cdata] = storage.nbytes()
                alive.append(tensor)  # a new storage could get the number of a freed one
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
        raise UsageError("the forward pass called no module that owns parameters, so the ops of the model are unknown")
    ends = [entry[-1] for entry in started[1:]] + [total]
    ops = tuple(
        Op(name, tuple(own), held, tuple(sorted(keeps)), end - start, block)
        for (name, own, held, block, start), keeps, end in zip(started, kept, ends)
    )
    by_block = {block: sum(nbytes.values()) for block, nbytes in saved.items()}
    outside = by_block.pop(None, 0)
    return Workload(tuple(name for name, _ in named), ops, tokens, outside + max(by_block.values(), default=0))


class _Ones(TorchDispatchMode):
    """Returns 1 if code reads the value of a tensor on the meta device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))
