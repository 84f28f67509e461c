"""An optimizer of a program's own whose update needs whole parameters: LAMB. Source: You et al. 2020, Algorithm 2.

    m = beta1 * m + (1 - beta1) * gradient          v = beta2 * v + (1 - beta2) * gradient ** 2
    r = (m / (1 - beta1 ** step)) / (sqrt(v / (1 - beta2 ** step)) + eps) + weight_decay * weight
    weight = weight - lr * |weight| / |r| * r       with the norms of the whole parameter; a factor of 1 if one of them is 0
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import infinity
from infinity.optim.rules import Rule


class LambRule(Rule):
    moments = ("momentum", "variance")
    unit = "parameter"

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {**group, "bias1": 1 - beta1**step, "bias2": 1 - beta2**step}

    def update(self, p: torch.Tensor, g: torch.Tensor, moments: dict[str, torch.Tensor], scalars: dict[str, Any]) -> None:
        beta1, beta2 = scalars["betas"]
        m = moments["momentum"].lerp_(g, 1 - beta1)
        v = moments["variance"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        direction = m / scalars["bias1"] / ((v / scalars["bias2"]).sqrt() + scalars["eps"]) + scalars["weight_decay"] * p
        norm, length = p.norm(), direction.norm()
        ratio = torch.where((norm > 0) & (length > 0), norm / length, torch.ones_like(norm))
        p -= scalars["lr"] * ratio * direction


def LAMB(
    params: ParamsT,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    **options: Any,
) -> infinity.Optimizer:
    """options: of `infinity.Optimizer`, such as accumulation_steps and max_grad_norm."""
    return infinity.Optimizer(params, LambRule(), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **options)
