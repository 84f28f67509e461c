"""Messages for calls that the engine refuses around passes and steps, and checks that need no step.

Knows torch's modes and the parameters. Must not know steps: step_cycle.py and backward_passes.py refuse calls that the step does not allow.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from infinity.errors import UsageError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.optim.rules import Rule, planned_moments
from infinity.plan.packing import Layout
from infinity.tiers.parameter_state import ParameterState


def refuse_modes(device_type: str, dtype: str) -> None:
    """Raise UsageError in modes of torch in which a forward pass would notice that weights move."""
    if torch._C._are_functorch_transforms_active():
        raise UsageError(
            "torch.func transforms (grad, vjp, vmap, ...) do not see when weights come and go. Use loss.backward() or "
            "torch.autograd.grad."
        )
    if torch.jit.is_tracing():
        raise UsageError(
            "torch.jit.trace records the present address of each weight, and would read there after the weight has moved. Trace a model that "
            "is in no engine. Give it the same values: plain.load_state_dict(model.state_dict())."
        )
    wanted = torch.get_autocast_dtype(device_type)
    if torch.is_autocast_enabled(device_type) and wanted is not TORCH_DTYPES[dtype]:
        name = next((name for name, known in TORCH_DTYPES.items() if known is wanted), wanted)
        raise UsageError(
            f"torch.autocast to {wanted} over an engine of dtype {dtype!r} casts weights that come and go, and caches the casts. Leave "
            f'autocast out, or use infinity.Config(dtype="{name}"): weights then have this dtype, with fp32 masters, and need no cast.'
        )


# Messages of steps and passes.

SCALED = (
    "a backward pass began after the program had clipped or multiplied gradients of the same step. The new gradients would stay as they are. "
    "Clip after the last backward pass, before step()."
)
TORN = (
    "a backward pass began after an earlier one that failed half-way and had begun to update: weights are of two steps. Load a checkpoint "
    "first."
)
NO_PLACE_FOR_SUMS = (
    "a step cannot have several backward passes: host memory, NVMe and the device have no room for sums of gradients. Use "
    "infinity.accumulate(model, micro_batches, loss), which adds up the gradients of one layer at a time. Or raise host_memory, or add a "
    "directory to swap_dirs"
)
FAILED = "after a backward pass that raised; call zero_grad() and run the pass again"
WEIGHTS_OF_TWO_STEPS = (
    "the last backward pass failed after some chunks had been updated: weights are of two steps. Load a checkpoint. With "
    "update='deferred', a failed backward pass can be repeated."
)
HALF_LOADED = "the last infinity.load failed half-way: weights are of two states. Load one complete checkpoint."
LOOK_SCALED = (
    "torch.autograd.grad of parameters with dtype='fp16': the engine scales the loss, and the gradients with it. Use "
    "infinity.Config(dtype='bf16') or 'fp32', which need no loss scale."
)
GIVEN_SCALED = (
    "param.grad was given a gradient with dtype='fp16', but the engine expects fp16 gradients that are multiplied by its loss scale. Call "
    "loss.backward() instead, or use infinity.Config(dtype='bf16') or 'fp32', which need no loss scale."
)
GIVEN_LATE = (
    "param.grad was given a gradient after a backward pass that has begun to update weights. Set param.grad before that pass, or use "
    "infinity.Config(update='deferred')."
)


def too_late_to_clip(optimizer: str, made_at: str) -> str:
    """The message for a norm, or a clip, after updates have begun. made_at: file and line where the program makes the optimizer."""
    return (
        f"clip_grad_norm_ was called, or the norm of all gradients was asked for, but the optimizer already updates weights during the "
        f"backward pass. Change the line that makes the optimizer, {made_at}: infinity.{optimizer}(..., max_grad_norm=1.0), with your "
        f"limit, and remove the call of clip_grad_norm_. To know the norm without clipping, use max_grad_norm=math.inf."
    )


def has_optimizer(made_at: str) -> str:
    """The message for a second optimizer of a model that has been trained. made_at: file and line where the program makes the first one."""
    return (
        f"the model has an optimizer already, made at {made_at}, and has been trained with it. Go on with this optimizer; parameter groups "
        f"can have different settings. For a new start, close() the engine, and build model, engine and optimizer anew."
    )


def described(optimizers: Iterable) -> list[str]:
    """The class of each optimizer, and the file and line where the program makes it."""
    return [f"{type(each).__name__} of {each.made_at}" for each in optimizers]


def shared_parameter(name: str, other) -> str:
    """The message for an optimizer with a part of the parameters of another one. name: of a shared parameter."""
    return (
        f"{name} is already in the {type(other).__name__} that was made at {other.made_at}. Optimizers of one model share no parameter. To "
        f"replace that optimizer, give the new one all of its parameters, before the model is trained. Or close() the engine, and build "
        f"model, engine and optimizers anew."
    )


def different_options(name: str, first, other) -> str:
    """The message for two optimizers of one engine that differ in an option, `name`, of all gradients."""
    values = " and ".join(f"{name}={getattr(each, name)!r} in the {type(each).__name__} of {each.made_at}" for each in (first, other))
    return f"the optimizers of one model need one {name}, but there is {values}. Give all of them the same value."


def step_is_missing(lacking: list[str]) -> str:
    """The message for a pass, or for dropped gradients, when only some optimizers have called step(). lacking: the others, described."""
    return (
        f"step() is missing: {', '.join(lacking)}. Other optimizers of the model have called it, and the engine makes one step for all. "
        f"Before the next pass of the model, call step() of each optimizer, or zero_grad() of an optimizer that skips this step."
    )


def zero_grad_is_missing(lacking: list[str]) -> str:
    """The message for a backward pass when only some optimizers have dropped the gradients of this step. lacking: the others, described."""
    return (
        f"a backward pass begins after zero_grad() of some optimizers, and the gradients of these are left: {', '.join(lacking)}. The engine "
        f"drops all gradients of a step together. Call zero_grad() of all optimizers, or step() of those with gradients."
    )


def stepped_twice(optimizer, lacking: list[str]) -> str:
    """The message for a second step() of an optimizer while others lack theirs. lacking: the others, described."""
    return (
        f"step() of the {type(optimizer).__name__} of {optimizer.made_at} was called twice, and step() is missing: {', '.join(lacking)}. The "
        f"engine makes one step for all optimizers. Call step() of each once, or zero_grad() of an optimizer that skips this step."
    )


BETWEEN_STEPS = (
    "a new optimizer, or a new parameter group, between a backward pass and step(). Add it before the backward pass, or after step() and "
    "zero_grad() of all optimizers."
)


def refuse_groups(states: Iterable[tuple[ParameterState, Rule]], layout: Layout) -> None:
    """Raise UsageError for a parameter without the records that its rule needs. states: parameters of new groups, with their rules."""
    for state, rule in states:
        format = layout.specs[state.index].format
        if not state.trainable:
            raise UsageError(
                f"{state.name} was frozen when the engine started and has no optimizer states. Call requires_grad_() before that: before the "
                f"optimizer is made and the model runs. Then the parameter may be frozen again."
            )
        planned = planned_moments(rule, state.shape)
        if (format.moments, format.unit) != (planned, rule.unit):
            pairs = (format.moments, format.unit), (planned, rule.unit)
            here, there = (f"{', '.join(moments) or 'no moments'} by {unit}" for moments, unit in pairs)
            raise UsageError(
                f"the record of {state.name} was planned with {here}, and the rule of the new group needs {there}. Give the parameter to an "
                f"optimizer before the engine starts, or choose a group with the planned moments."
            )


def planned_otherwise(made_at: str | None) -> str:
    """The message for an optimizer that needs other memory than planned. made_at: where the program makes the optimizer before it, or None."""
    if made_at is None:
        return (
            "the engine started before its optimizer was made, as by a call of the model, stats() or infinity.load, and the optimizer needs "
            "other memory than was planned then. Make the optimizer first."
        )
    return (
        f"the model has an optimizer already, made at {made_at}. The new one has another rule, max_grad_norm or accumulation_steps, for which "
        f"the engine has planned no memory. close() the engine, and build model, engine and optimizer anew. Make all optimizers of a model "
        f"before it runs."
    )


def sums_in_hook(name: str) -> str:
    """The message for a hook on an accumulated gradient in a step of several backward passes. name: of the parameter."""
    return (
        f"{name} has a hook of register_post_accumulate_grad_hook, and this is not the first backward pass of its step. In plain PyTorch the "
        f"hook finds the sum of all passes in param.grad. Here, the earlier gradients have left for the engine's tiers. Use "
        f"param.register_hook(...), which gets the gradient of each pass."
    )


def refuse_sparse(state: ParameterState, grad: torch.Tensor) -> None:
    """Raise UsageError for a sparse gradient, which no tier can hold."""
    if grad.is_sparse:
        raise UsageError(f"{state.name} has a sparse gradient, which no tier can hold; build its module with sparse=False")


def no_optimizer(name: str) -> str:
    """The message for a gradient in an engine without an optimizer. name: of the parameter."""
    return (
        f"a backward pass brings a gradient to {name}, but its engine has no optimizer. Make infinity.AdamW(model.parameters()) before the "
        f"first forward pass. If gradients only pass through the model (a critic, a reward model, a teacher), freeze the model with "
        f"model.requires_grad_(False)."
    )


def no_more_passes(num_backwards: int, num_passes: int, *, by_layer: bool) -> str:
    """The message for a backward pass after `num_backwards` passes. num_passes: passes of a step."""
    if by_layer:
        return "a backward pass after infinity.accumulate, which brings all gradients of a step: call step() first"
    return (
        f"backward pass {num_backwards + 1} since the last step, but accumulation_steps={num_passes}. Declare it: "
        f"infinity.AdamW(..., accumulation_steps=...). Or run all passes but the last inside `with infinity.no_sync(model):`."
    )


def late_gradient(name: str) -> str:
    """The message for a gradient that arrives after the update of its chunk. name: of the parameter."""
    return (
        f"{name} received a gradient after its update in this backward pass: the last step had fewer gradients. Use update='deferred' for a "
        f"model whose number of gradients changes from step to step."
    )


def not_scaled(name: str) -> str:
    """The message for an fp16 gradient outside of the model's outputs. name: of the parameter."""
    return (
        f"{name} has a gradient that comes from no output of the model, so the gradient lacks the loss scale of dtype='fp16'. Return all "
        f"tensors of the loss from the model, in tuples, lists, dicts or dataclasses. Or use dtype='bf16'."
    )


def half_updated(what: str) -> str:
    """The message for a call (`what`) between a backward pass that updates and step()."""
    return (
        f"{what} between a backward pass that has begun to update and its step(): some weights are new already. Call step() first, or use "
        f"update='deferred'. If a step has several backward passes, declare their number: infinity.AdamW(..., accumulation_steps=...)."
    )


def refuse_by_layer(*, runs: bool, failed: bool, begun: bool) -> None:
    """Raise UsageError if infinity.accumulate may not begin: this call brings all gradients of a step.

    runs: a backward pass runs. failed: a backward pass has raised. begun: a backward pass of this step is over.
    """
    if runs:
        raise UsageError("infinity.accumulate inside a backward pass or another infinity.accumulate: call it between steps")
    if failed:
        raise UsageError("infinity.accumulate after a backward pass that raised; call zero_grad() first")
    if begun:
        raise UsageError("infinity.accumulate brings all gradients of a step, but this step has had a backward pass. Call step() first")


def refuse_in_loss(what: str, *, runs: bool) -> None:
    """Raise UsageError if a loss function of infinity.accumulate runs and makes the call `what`."""
    if runs:
        raise UsageError(
            f"{what} inside the loss function of infinity.accumulate. The loss function returns the scalar loss and does nothing more: "
            f"infinity.accumulate calls backward() itself. Call step() and zero_grad() after infinity.accumulate."
        )


class LossFunction:
    """The loss function of infinity.accumulate: a context manager around the function, or around a part of it."""

    def __init__(self):
        self._runs = False

    def __enter__(self) -> None:
        self._runs = True

    def __exit__(self, *exception) -> None:
        self._runs = False

    def refuse(self, what: str) -> None:
        """Raise UsageError if the call `what` comes while the loss function runs."""
        refuse_in_loss(what, runs=self._runs)


def refuse_loss(value: object, *, number: int) -> None:
    """Raise UsageError unless the loss function's value for micro-batch `number` is a real scalar with a graph of its own."""
    problem = None
    if not isinstance(value, torch.Tensor):
        problem = f"a {type(value).__name__}, expected a tensor"
    elif value.numel() != 1:
        problem = f"a tensor of shape {list(value.shape)}, expected a scalar. Reduce it, for example with .mean()"
    elif not value.is_floating_point():
        problem = f"a tensor of {value.dtype}, expected a floating-point scalar"
    elif not value.requires_grad:
        problem = "a tensor without a gradient. Leave out .detach(), .item() and torch.no_grad() on the way from the model to the loss"
    elif value.grad_fn is not None and value.grad_fn.metadata.setdefault(_RETURNED, number) != number:
        problem = f"the loss of micro-batch {value.grad_fn.metadata[_RETURNED]} again. Compute the loss anew from each micro-batch"
    if problem is not None:
        raise UsageError(f"infinity.accumulate: for micro-batch {number}, loss returned {problem}. Example: loss=lambda model, x: model(x).mean()")


_RETURNED = "infinity: the micro-batch whose loss it made"


def beside(what: str) -> str:
    """The message for a call (`what`) while another thread is in a pass of the model."""
    return (
        f"{what} is called while another thread is in a forward or backward pass of the model. Passes of a model come one after the other: "
        f"hold one threading.Lock around each training step and around each evaluation."
    )


def refuse_thawed(frozen: Iterable[ParameterState]) -> None:
    """Raise UsageError if the program has thawed a parameter that was frozen when the engine started. frozen: all of these."""
    for state in frozen:
        if state.param.requires_grad:
            raise UsageError(
                f"{state.name} was frozen when the engine started and has no optimizer states. Call requires_grad_() before the "
                f"optimizer is made; parameters that train may be frozen, and thawed again, at any time."
            )
