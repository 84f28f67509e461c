"""Accumulation by layer: all micro-batches pass a segment of the model before the next segment is fetched.

Knows segments, activations and their gradients, and the engine by a few calls. Must not know chunks, tiers or plans.
"""

# [Note: what vertical accumulation reads]
# With a micro-batches the ordinary loop fetches every weight 2a times: 4a + 10 bytes a parameter and step from NVMe. Here each
# segment is fetched once forward and once backward, whatever a is: 14. The price is what is kept on the device: the input of
# every segment for every micro-batch, and one segment's weights. Each segment runs forward twice, as with activation
# checkpointing; the last one runs once.

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.errors import ConfigError, UsageError
from infinity.model.parameters import owner_of


def vertical(
    segments: Sequence[torch.nn.Module],
    micro_batches: Sequence[tuple[torch.Tensor, object]],
    loss: Callable[[torch.Tensor, object], torch.Tensor],
) -> list[torch.Tensor]:
    """Forward and backward of all micro-batches of a step, segment by segment; then call step().

    segments: modules of one engine's model, each mapping one tensor to the next one's input. micro_batches: (input, target)
    each, as many as the optimizer's accumulation_steps. loss(output, target) -> scalar, to be divided by their number as in
    an ordinary loop. Gradients and random numbers (dropout) are those of `for x, y in micro_batches: loss(model(x),
    y).backward()` but for the order of the random draws, and of the sum where segments share weights; a module that counts its
    forward passes (batch norm) counts those that are repeated, too. Returns the losses, detached. Needs device memory for a segment's
    weights and for every segment's inputs. Raises ConfigError or UsageError if it cannot begin.
    """
    segments, micro_batches = list(segments), list(micro_batches)
    engine = _engine(segments)
    if engine.optimizer is None:
        raise UsageError("infinity.vertical needs an optimizer: make infinity.AdamW(..., accumulation_steps=...) before it")
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x, _ in micro_batches):
        raise ConfigError("infinity.vertical: an input needs a gradient, which ends at the first segment; detach it")
    _check_number(len(micro_batches), engine.optimizer.accumulation_steps)
    cycle, last, losses = engine.cycle, segments[-1], []
    with cycle.one_backward("infinity.vertical"):
        inputs, states = [[x for x, _ in micro_batches]], []
        for segment in segments[:-1]:
            random, outputs = [], []
            with engine.calls.segment(in_pieces=True), torch.no_grad():
                for x in inputs[-1]:
                    random.append(_random_state(engine.device))
                    version = x._version
                    outputs.append(segment(x))
                    if x._version != version:
                        raise UsageError(
                            f"infinity.vertical: {type(segment).__name__} changes its input in place, but that is needed once more in "
                            f"backward; build it with inplace=False"
                        )
            inputs.append(outputs)
            states.append(random)
        gradients: list[torch.Tensor | None] = []  # of each micro-batch, with respect to the last segment's input that was left
        with engine.calls.segment(in_pieces=True):
            for x, (_, target) in zip(inputs.pop(), micro_batches, strict=True):
                x = _leaf(x)
                value = loss(cycle.scaled(last(x)), target)
                value.backward()
                cycle.reduce_all()
                losses.append(value.detach())
                gradients.append(x.grad)
        for segment, random in zip(reversed(segments[:-1]), reversed(states), strict=True):
            with engine.calls.segment(in_pieces=True):
                for number, (x, state) in enumerate(zip(inputs.pop(), random, strict=True)):
                    x = _leaf(x)
                    with torch.random.fork_rng(devices=_devices(engine.device)):
                        _restore(state, engine.device)
                        y = segment(x)
                    if y.requires_grad and gradients[number] is not None:
                        torch.autograd.backward(y, gradients[number])
                    cycle.reduce_all()
                    gradients[number] = x.grad
                    del y
    return losses


def _check_number(given: int, declared: int) -> None:
    if given != declared:
        raise UsageError(
            f"infinity.vertical takes all {given} micro-batches of a step at once, but there is accumulation_steps={declared}. Give their "
            f"number to the optimizer's constructor."
        )


def _engine(segments):
    for number, segment in enumerate(segments):
        if not isinstance(segment, torch.nn.Module):
            kind = "a function" if callable(segment) else type(segment).__name__
            raise ConfigError(
                f"infinity.vertical: segments[{number}] is {kind}, expected a torch.nn.Module, whose parameters tell what it needs; write a "
                f"module with its code as forward, and any module that it calls as an attribute"
            )
    owners = {id(owner): owner for segment in segments for param in segment.parameters() if (owner := owner_of(param))}
    if len(owners) != 1:
        raise ConfigError("infinity.vertical: the segments must hold parameters of one engine; build the model with infinity.init")
    return next(iter(owners.values()))


def _leaf(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.requires_grad_() if x.is_floating_point() else x


def _devices(device: torch.device) -> list:
    return [device] if device.type == "cuda" else []


def _random_state(device: torch.device):
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore(state, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
