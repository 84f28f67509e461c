"""The loss scale of fp16 training: gradients are multiplied so that small values do not flush to zero.

Knows numbers and two autograd functions. Must not know where gradients are: the engine reports an overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The initial scale and its changes, as in torch.amp.GradScaler. Raises ConfigError for values out of range.

    After `interval` steps in a row without an overflow, the scale grows by the factor `growth`. At each overflow the scale shrinks by
    the factor `backoff`, but not below `minimum`. growth = backoff = 1 keeps the scale constant.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"loss_scale: {name}={value!r}: expected a number")
        wrong = [
            f"loss_scale: {name}={getattr(self, name)!r}: expected {expected}"
            for name, expected, right in (
                ("initial", "a finite number above zero", 0 < self.initial < float("inf")),
                ("growth", "1 or more", 1 <= self.growth < float("inf")),
                ("backoff", "above 0, at most 1", 0 < self.backoff <= 1),
                ("interval", "an integer of 1 or more", isinstance(self.interval, int) and self.interval >= 1),
                ("minimum", "above zero, at most the initial scale", 0 < self.minimum <= self.initial),
            )
            if not right
        ]
        if wrong:
            raise ConfigError("; ".join(wrong))


class Scaler:
    """The scale of one engine. Each of `world` ranks contributes its part of the mean, so the sum overflows no earlier than one rank's
    gradient.
    """

    def __init__(self, settings: LossScale, world: int):
        self.settings = settings
        self.world = world
        self.scale = settings.initial
        self.num_clean = 0  # steps since the last overflow or growth

    @property
    def factor(self) -> float:
        """The factor of this rank's gradients."""
        return self.scale / self.world

    def apply(self, output: torch.Tensor) -> torch.Tensor:
        """The output in fp32. In backward, the gradient is scaled in fp32 and only then rounded to the output's dtype."""
        return _Scaled.apply(output, self)

    def unapply(self, value: torch.Tensor) -> torch.Tensor:
        """The same value. In backward, the scale is removed from the gradient."""
        return _Unscaled.apply(value, self)

    def update(self, overflow: bool) -> None:
        settings = self.settings
        if overflow:
            self.scale = max(self.scale * settings.backoff, settings.minimum)
            self.num_clean = 0
            return
        self.num_clean += 1
        if self.num_clean == settings.interval:
            self.scale *= settings.growth
            self.num_clean = 0


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, scaler):
        ctx.scaler, ctx.dtype = scaler, output.dtype
        return output.float().view_as(output)  # an output that is an input must be a view

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.scaler.factor).to(ctx.dtype), None


class _Unscaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, scaler):
        ctx.scaler = scaler
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return (grad.float() / ctx.scaler.factor).to(grad.dtype), None
