"""`infinity.accumulate`: all micro-batches of a step run one segment of the model before the next segment is fetched.

Knows the program's arguments, the limits of an engine, and the restart of a step. Must not know segments, graphs, plans, or how bytes move.
"""

# [Note: the reads of a layer-wise step]
# With N micro-batches the ordinary loop fetches every weight 2N times: a step reads 4N + 10 bytes per parameter from NVMe. Layer-wise, each
# segment is fetched once forward and once backward: 14 bytes for any N, or 4R + 10 bytes in R rounds ([Note: a full device]). In return the
# engine keeps the inputs of all blocks for each micro-batch, and runs the blocks again in backward, as activation checkpointing does. If host
# memory has no place for all gradients, each round after the first costs about 10 bytes more: sums are read and written again.
#
# [Note: a full device]
# At the end of the forward passes the device holds the block inputs of all micro-batches. The device also holds gradients that wait for
# earlier segments, such as those of a tied embedding. If the device has no room, the step restarts with the inputs in host memory. Inputs
# without room there stay on the device. Later steps with as many or more micro-batches do the same. If both have no room, or the
# configuration keeps activations on the device, the step restarts in rounds. A round has half as many micro-batches, later half of those.
# Sums of gradients leave the device in each round and come back in the next ([Note: room for sums]). So gradients add up in the order of
# the ordinary loop. Updates come with the last round. In rounds of one, nothing is cut: micro-batches run one after the other, as in the
# ordinary loop. Their blocks are still checkpointed, because the whole graph of one micro-batch may need more than the inputs of two.

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.engine.layerwise.layerwise_step import LayerwiseStep, refuse_gradient
from infinity.engine.layerwise.limits import OFFLOAD_INPUTS, OFFLOAD_REST, RestartStep
from infinity.engine.layerwise.rng_streams import RngState, rng_streams
from infinity.engine.steps.refusals import refuse_loss
from infinity.errors import ConfigError, UsageError
from infinity.model.parameters import owner_of
from infinity.plan.tiers import DEVICE, choice_of, leaves_device
from infinity.sizes import format_bytes
from infinity.system import interrupts


def accumulate(model: nn.Module, micro_batches: Iterable, loss: Callable[[nn.Module, object], torch.Tensor]) -> list[torch.Tensor]:
    """Run forward and backward of all micro-batches of a step, layer by layer. Call optimizer.step() afterwards. Returns the detached losses.

    loss(model, micro_batch) returns the scalar on which an ordinary loop would call backward(), such as model(**micro_batch).loss / number.
    Each call runs in its own thread, and the calls are interleaved. So no call may change the model temporarily, for itself alone. Blocks
    of the model run again in backward, with their hooks, as with activation checkpointing.

    The first step finds the places where the model cannot be cut, and restarts. The parts around such a place run as one segment. In the worst
    case the whole model runs as in the ordinary loop. Each reason is printed once and is listed in stats()["layerwise_unsplit_reasons"].

    If the device has room for all weights and gradients, and updates wait for step(), a step by layer would transfer no less than the ordinary
    loop. In this case the micro-batches run one after the other from the second step on. Their blocks are still checkpointed.

    On one rank a step also restarts if the device has no room before the last backward passes. Then block inputs go to host memory, in
    this step and in later steps with as many micro-batches, unless Config(activation_tier=...) names a place. If host memory has no room
    either, half as many micro-batches pass the model together, and in the end one.

    Gradients are bit for bit those of `for micro_batch in micro_batches: loss(model, micro_batch).backward()`, with one exception. Some of
    three or more micro-batches leave the model after another block than the rest (early exits), or call a block more often in a row. Blocks
    that all of them use before and after then add gradients in another order. Random numbers (dropout) differ.

    The optimizer needs accumulation_steps=2 or more, so that sums are in fp32. The number of micro-batches may differ from this number.
    Raises ConfigError or UsageError if the step cannot begin. Raises UsageError if loss returns no scalar with a gradient, or calls
    backward(), step() or zero_grad(). After this error, call zero_grad() first.
    """
    if not callable(loss):
        raise ConfigError(f"infinity.accumulate: loss is a {type(loss).__name__}, expected a function loss(model, micro_batch)")
    engine, micro_batches = _engine(model), _listed(micro_batches)
    if not engine.optimizers:
        raise UsageError("infinity.accumulate needs an optimizer: make infinity.AdamW(..., accumulation_steps=2) first")
    engine.start()
    if not micro_batches:
        raise ConfigError("infinity.accumulate: there are no micro-batches")
    if len(micro_batches) > 1 and not engine.training.accumulating:
        raise UsageError(
            "infinity.accumulate adds gradients in fp32, but the engine has no room for fp32 sums. Give the optimizer accumulation_steps=2 or "
            "more. The number of micro-batches may differ from it"
        )
    if any(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in pytree.tree_leaves(micro_batches)):
        raise ConfigError("infinity.accumulate: a tensor of a micro-batch has a grad_fn, but gradients end at the model's inputs. Detach it")
    most, least = engine.ranks.most([len(micro_batches), -len(micro_batches)])
    if most != -least:
        raise UsageError(f"infinity.accumulate: one rank has {most} micro-batches, another has {-least}. Give all ranks the same number")
    interrupts.guard()  # forward passes do this when they begin, but here they run in other threads
    engine.cycle.end_interrupted()
    engine.calls.refuse_running("infinity.accumulate")
    begin = rng_streams(len(micro_batches), engine.device)
    streams = list(begin)
    has_room = len(micro_batches) == 1 or engine.device_budget.keeps_gradients  # for the sums of all micro-batches at once
    if has_room and all(span.pinned for span in engine.registry.spans):  # no weight ever moves, so a layer-wise step would save nothing
        losses = _one_by_one(engine, _works(loss, model, micro_batches), streams)
    else:
        losses = _by_layer(engine, loss, model, micro_batches, streams)
    next((now for now, before in zip(reversed(streams), reversed(begin)) if now != before), begin[0]).restore(engine.device)
    return losses


def _engine(model: nn.Module):
    if not isinstance(model, nn.Module):
        raise ConfigError(f"infinity.accumulate: the model is a {type(model).__name__}, expected a torch.nn.Module")
    owners = {id(owner): owner for param in model.parameters() if (owner := owner_of(param))}
    if len(owners) != 1:
        raise ConfigError("infinity.accumulate: the model must hold parameters of one engine; build it with infinity.init")
    return next(iter(owners.values()))


def _listed(micro_batches: Iterable) -> list:
    if isinstance(micro_batches, (Mapping, str, bytes)) or not isinstance(micro_batches, Iterable):
        raise ConfigError(
            f"infinity.accumulate: micro_batches is a {type(micro_batches).__name__}, expected a list or another iterable of micro-batches. "
            f"A single micro-batch is a list of one: [micro_batch]"
        )
    return list(micro_batches)


def _works(loss: Callable, model: nn.Module, micro_batches: list) -> list[Callable[[], torch.Tensor]]:
    return [functools.partial(_loss, loss, model, *each) for each in enumerate(micro_batches)]


def _loss(loss: Callable, model: nn.Module, number: int, micro_batch: object) -> torch.Tensor:
    value = loss(model, micro_batch)
    refuse_loss(value, number=number)
    return value


def _one_by_one(engine, works: list[Callable], streams: list[RngState]) -> list[torch.Tensor]:
    """The ordinary loop. streams: changed to the states after each forward pass."""
    losses = []
    with engine.cycle.backward.one_backward(withhold=lambda state, gradient: refuse_gradient(engine)):
        for number, work in enumerate(works):
            streams[number].restore(engine.device)
            with engine.calls.loss:
                value = work()
            streams[number] = RngState.current(engine.device)
            value.backward()
            engine.cycle.backward.reduce_all()
            losses.append(value.detach())
    return losses


def _by_layer(engine, loss: Callable, model: nn.Module, micro_batches: list, streams: list[RngState]) -> list[torch.Tensor]:
    """Run a step, and restart it after each new limit: [Note: parts that are not cut] and [Note: a full device]."""
    begin = list(streams)
    while True:
        kept = [copy.copy(each) if isinstance(each, (MutableMapping, list)) else each for each in micro_batches]  # the loss may empty these
        step = LayerwiseStep(engine, model, len(micro_batches))
        try:
            return step.run(_works(loss, model, micro_batches), streams)
        except RestartStep:
            pass
        except torch.OutOfMemoryError as error:
            if not step.may_begin_anew:
                _add_remedy(error, engine, step)
                raise
            if not engine.cycle.layerwise_limits.agree(step.blocks, engine.ranks):  # a limit that was just found may explain the error
                _make_room(engine, step)
        engine.cycle.zero_grad()
        step.restore_modules()
        streams[:], micro_batches = begin, kept
        del step
        gc.collect()  # device memory of the step is held by reference cycles
        if engine.activations is not None and not engine.activations.is_on:
            engine.activations.shrink()


def _add_remedy(error: torch.OutOfMemoryError, engine, step: LayerwiseStep) -> None:
    if step.is_cut and not step.is_away:
        error.add_note(f"infinity.accumulate has {step.at_once} micro-batches on the device at once: {OFFLOAD_INPUTS}")
    elif step.is_away and engine.activations.has_refused:
        error.add_note(f"infinity.accumulate keeps inputs of blocks on the device that {OFFLOAD_REST}")


def _make_room(engine, step: LayerwiseStep) -> None:
    """The device had no room for a step: the next one runs by layer again, runs fewer micro-batches together, or moves block inputs away."""
    limits = engine.cycle.layerwise_limits
    if step.is_in_turn:
        engine.device_budget.forbid_in_turn()
    elif step.is_away or choice_of(engine.config.activation_tier) == DEVICE:
        limits.note_full(step.at_once, kept_there=not leaves_device(engine.config.activation_tier))
    else:
        activations = engine.activations or engine.parts.keep_activations()
        limits.note_away(step.num, format_bytes(activations.store.heap.budget_nbytes))
