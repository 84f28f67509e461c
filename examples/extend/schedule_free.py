"""An optimizer of a program's own that needs no schedule of learning rates: schedule-free AdamW. Source: Defazio et al. 2024.

Training moves a sequence z as AdamW does, and averages it to x. Gradients are computed at y = (1 - beta1) z + beta1 x, the weights of the
model during training. Evaluation uses x. The record keeps the offset d = z - y, which is zero at the start. With u the normalized gradient,
plus weight_decay * y, and c the weight of the newest z in the average x:

    y = y + c * d - lr * (1 - beta1 * (1 - c)) * u          d = (1 - c) * (d - lr * beta1 * u)          x = y + (1 - 1 / beta1) * d
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import infinity
from infinity.optim.rules import Rule


class ScheduleFreeRule(Rule):
    moments = ("offset", "variance")

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        warmup = int(group["warmup_steps"])
        lr = group["lr"] * min(1.0, step / max(warmup, 1))
        before = sum((number / warmup) ** 2 for number in range(1, min(step, warmup) + 1))
        newest = min(1.0, step / max(warmup, 1)) ** 2 / (before + max(step - warmup, 0))  # z of step n has the weight lr(n) ** 2
        return {**group, "lr": lr, "newest": newest, "root": math.sqrt(1 - beta2**step), "beta1": beta1, "beta2": beta2}

    def update(self, p: torch.Tensor, g: torch.Tensor, moments: dict[str, torch.Tensor], scalars: dict[str, Any]) -> None:
        lr, newest, beta1, beta2 = scalars["lr"], scalars["newest"], scalars["beta1"], scalars["beta2"]
        offset, variance = moments["offset"], moments["variance"]
        variance *= beta2
        variance += g * g * (1 - beta2)
        direction = g / (variance.sqrt() / scalars["root"] + scalars["eps"])
        direction += p * scalars["weight_decay"]
        p += offset * newest
        p -= direction * (lr * (1 - beta1 * (1 - newest)))
        offset -= direction * (lr * beta1)
        offset *= 1 - newest


class ScheduleFreeAdamW(infinity.Optimizer):
    """options: of `infinity.Optimizer`, such as max_grad_norm. The learning rate stays constant after the warm-up.

    Call eval() before an evaluation, and before the weights are exported. Call train() before the next step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "warmup_steps": warmup_steps, "trains": True}
        super().__init__(params, ScheduleFreeRule(), defaults, **options)

    def train(self) -> None:
        """The model gets the weights y."""
        self._become(True, lambda p, moments, hyper: p.sub_(moments["offset"] * (1 - 1 / hyper["betas"][0])))

    def eval(self) -> None:
        """The model gets the averaged weights x."""
        self._become(False, lambda p, moments, hyper: p.add_(moments["offset"] * (1 - 1 / hyper["betas"][0])))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.param_groups[0]["trains"]:
            raise infinity.UsageError("step() after eval(): call optimizer.train() before the forward pass")
        return super().step(closure)

    def _become(self, trains: bool, change: Callable[[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]], object]) -> None:
        if self.param_groups[0]["trains"] != trains:
            self.change_weights(change)
            for group in self.param_groups:
                group["trains"] = trains
