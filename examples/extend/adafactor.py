"""An optimizer of a program's own with factored second moments: Adafactor, as torch.optim.Adafactor. Source: Shazeer & Stern 2018.

A matrix of m x n elements has m + n second moments: the means of squared gradients of each row and of each column. Their product, divided by
the mean of the rows, is the variance of an element. A vector has one variance for each element. The learning rate is relative to the root mean
square of the parameter, and an update whose root mean square exceeds d is scaled down.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import infinity
from infinity.optim.rules import Rule

EPS = (torch.finfo(torch.float32).eps, 1e-3)


class AdafactorRule(Rule):
    moments = ("row", "column", "variance")
    unit = "parameter"

    def moment_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        if len(shape) < 2:
            return {"variance": shape}
        return {"row": (*shape[:-1], 1), "column": (*shape[:-2], 1, shape[-1])}

    def check(self, group: dict[str, Any]) -> list[str]:
        wrong = [f"{name}={group[name]!r}: expected 0 or more" for name in ("lr", "weight_decay", "d") if not group[name] >= 0]
        return wrong + ([] if group["beta2_decay"] <= 0 else [f"beta2_decay={group['beta2_decay']!r}: expected 0 or less"])

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        return {**group, "new": step ** group["beta2_decay"], "rate": min(group["lr"], 1 / math.sqrt(step))}

    def update(self, p: torch.Tensor, g: torch.Tensor, moments: dict[str, torch.Tensor], scalars: dict[str, Any]) -> None:
        new, (least, least_scale) = scalars["new"], scalars["eps"]
        rate = scalars["rate"] * _root_mean_square(p).clamp_(min=least_scale)
        p *= 1 - scalars["lr"] * scalars["weight_decay"]
        if "row" in moments:
            square = g * g
            row = moments["row"].lerp_(square.mean(-1, keepdim=True), new)
            column = moments["column"].lerp_(square.mean(-2, keepdim=True), new)
            variance = row @ column / row.mean(-2, keepdim=True).clamp_(min=least)
        else:
            variance = moments["variance"].lerp_(g * g, new)
        direction = g * variance.clamp(min=least * least).rsqrt_()
        p -= direction * (rate / (_root_mean_square(direction) / scalars["d"]).clamp_(min=1.0))


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    return values.norm() / math.sqrt(values.numel())


def Adafactor(
    params: ParamsT,
    lr: float = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float, float] = EPS,
    d: float = 1.0,
    weight_decay: float = 0.0,
    **options: Any,
) -> infinity.Optimizer:
    """options: of `infinity.Optimizer`, such as accumulation_steps and max_grad_norm."""
    defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
    return infinity.Optimizer(params, AdafactorRule(), defaults, **options)
