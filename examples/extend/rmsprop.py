"""An optimizer of a program's own: RMSprop, as torch.optim.RMSprop without momentum and centering.

    square_avg = alpha * square_avg + (1 - alpha) * gradient ** 2
    weight     = weight - lr * gradient / (sqrt(square_avg) + eps)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import infinity
from infinity.optim.rules import Rule


class RMSpropRule(Rule):
    moments = ("square_avg",)

    def check(self, group: dict[str, Any]) -> list[str]:
        return [f"{name}={group[name]!r}: expected 0 or more" for name in ("lr", "alpha", "eps") if not group[name] >= 0]

    def update(self, p: torch.Tensor, g: torch.Tensor, moments: dict[str, torch.Tensor], scalars: dict[str, Any]) -> None:
        square_avg = moments["square_avg"]
        square_avg *= scalars["alpha"]
        square_avg += g * g * (1 - scalars["alpha"])
        p -= g * scalars["lr"] / (square_avg.sqrt() + scalars["eps"])


def RMSprop(params: ParamsT, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, **options: Any) -> infinity.Optimizer:
    """options: of `infinity.Optimizer`, such as accumulation_steps and max_grad_norm."""
    return infinity.Optimizer(params, RMSpropRule(), {"lr": lr, "alpha": alpha, "eps": eps}, **options)
