"""Hooks of a model whose parameters never leave the device: they only look for calls of an outermost module.

Depends on the same modules as hooks.py. The first op after a step brings all parameters to their storage. Autograd saves them itself.
"""

from __future__ import annotations

import torch
from torch import nn

from infinity.engine.autograd.hooks import Hooks
from infinity.engine.autograd.ops import FORWARD, Frame, Op
from infinity.engine.steps.step_cycle import StepCycle
from infinity.system.interrupts import uninterrupted


def hooks_for(cycle: StepCycle, model: nn.Module) -> Hooks:
    """The hooks of the model, attached to it."""
    return (ResidentHooks if _stays(cycle) else Hooks)(cycle, model)


def _stays(cycle: StepCycle) -> bool:
    """Whether no op of the model needs the engine once all parameters are on the device."""
    registry = cycle.registry
    return (
        not cycle.ranks.are_several
        and all(span.pinned for span in registry.spans)
        and all(chunk.on_device for chunk in registry.chunks)
        and not any(state.written_in_forward for state in registry.params)
        and cycle.calls.activations is None
        and not any(chunk.chunk.format.needs_loss_scale for chunk in registry.chunks)  # a loss scale needs hooks, also in recomputations
        and cycle.events.timeline is None
    )


class ResidentHooks(Hooks):
    """Only outermost calls have a frame. An outermost call holds all parameters, and needs no spans."""

    @torch._dynamo.disable
    @uninterrupted
    def _before(self, module, args, kwargs):
        phase, frames = self._next_phase(module), self.calls.frames
        op = self.op_hooks.op_of(module)
        if op is None or (frames and frames[-1].module is not module):
            return
        outermost = not frames and phase == FORWARD
        if outermost:
            self._begin_forward(args, kwargs)
        self.weights.bring_all()
        frame = Frame(module, Op(op.index, op.name), outermost=outermost, scales=False)
        if not frames:
            frame.hold(self.registry.params)
        frames.append(frame)

    @torch._dynamo.disable
    def _after(self, module, args, output):
        frames = self.calls.frames
        return super()._after(module, args, output) if frames and frames[-1].module is module else None
