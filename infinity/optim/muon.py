"""Muon: the momentum of a matrix, orthogonalized by Newton-Schulz iterations, is the update. All other parameters have AdamW.

Knows matrices, hyper-parameters, and which parameters are matrices of hidden layers. Must not know chunks, ranks, tiers or how the engine
works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from infinity.errors import ConfigError
from infinity.model.hidden_matrices import hidden_matrices
from infinity.model.parameters import owner_of
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizers import Optimizer
from infinity.optim.rules import AdamRule, Rule, wrong_numbers

NS_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_OF_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class MuonRule(Rule):
    """The update of one matrix. Source: Jordan et al. 2024, Muon; the results are those of torch.optim.Muon. adjust_lr_fn: see `Muon`."""

    moments = ("momentum",)
    unit = "matrix"
    allows_eight_bit = True

    def __init__(self, adjust_lr_fn: str | None = None):
        self.adjust_lr_fn = adjust_lr_fn

    def check(self, group):
        found = wrong_numbers(group, "lr", "weight_decay", "momentum", "eps")
        if not 0 < group["ns_steps"] < 100 or group["ns_steps"] % 1:
            found.append(f"ns_steps={group['ns_steps']!r}: expected an integer from 1 to 99")
        if not isinstance(group["ns_coefficients"], tuple) or len(group["ns_coefficients"]) != 3:
            found.append(f"ns_coefficients={group['ns_coefficients']!r}: expected three numbers")
        return found

    def update(self, p, g, moments, s):
        m = moments["momentum"].lerp_(g, 1 - s["momentum"])
        ahead = g.lerp(m, s["momentum"]) if s["nesterov"] else m
        direction = orthogonalized(ahead, s["ns_coefficients"], num_steps=int(s["ns_steps"]), eps=s["eps"])
        p.mul_(1 - s["lr"] * s["weight_decay"])
        p.add_(direction, alpha=-s["lr"] * self._adjustment(*p.shape))

    def _adjustment(self, num_rows: int, num_columns: int) -> float:
        """The factor of the learning rate for a matrix of this shape."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(num_rows, num_columns))
        return math.sqrt(max(1, num_rows / num_columns))


def orthogonalized(matrix: torch.Tensor, coefficients: tuple[float, float, float], *, num_steps: int, eps: float) -> torch.Tensor:
    """[m, n] -> bf16 [m, n] with the same singular vectors, and singular values from about 0.7 to 1.2. Source: Jordan et al. 2024.

    Each of the Newton-Schulz steps is the polynomial a x + b x^3 + c x^5 of all singular values. Products are rounded to bf16.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x  # the product with its transpose is the smaller one
    x = x / x.norm().clamp(min=eps)  # the largest singular value is 1 at most
    for _ in range(num_steps):
        square = _sum(0, x, 1, x, x.T)
        x = _sum(a, x, 1, _sum(b, square, c, square, square), x)
    return x.T if is_tall else x


def _sum(beta: float, addend: torch.Tensor, alpha: float, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """beta * addend + alpha * (left @ right), all bf16 matrices, computed in fp32 and rounded once. A CPU without instructions for bf16 takes
    far longer for products of bf16 than for products of fp32."""
    if left.device.type != "cpu":
        return torch.addmm(addend, left, right, beta=beta, alpha=alpha) if beta else left @ right
    product = (left.float() @ right.float()).mul_(alpha)
    return (product.add_(addend, alpha=beta) if beta else product).bfloat16()


class Muon(Optimizer):
    """Muon for the matrices of hidden layers, with the results of torch.optim.Muon, and AdamW for all other parameters.

    Muon updates parameters of two dimensions, and stacks of matrices such as the weights of experts. AdamW updates embeddings, the output layer
    over a vocabulary, vectors and convolutions. A parameter group with "muon": True or False decides for its parameters itself. Other
    groups are divided into two: first the matrices, then the rest. Such a group may have a weight_decay for both.

    ns_coefficients, ns_steps, eps: of the Newton-Schulz iterations. adjust_lr_fn: "original" (or None) multiplies the learning rate of an
    m x n matrix by sqrt(max(1, m / n)), "match_rms_adamw" by 0.2 sqrt(max(m, n)), so that one learning rate works for both. adamw: lr, betas,
    eps and weight_decay of AdamW; missing ones have the defaults of `infinity.AdamW`. With "match_rms_adamw", its lr is the lr of Muon by
    default. Other options: see `Optimizer`.

    A record of a bf16 matrix has 8 bytes a parameter: weight, rest of the master, momentum. Newton-Schulz runs on the GPU, wherever the record
    is. Raises ConfigError for a matrix that lies in tiles (tile_above).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        loss_scale: LossScale | None = None,
    ) -> None:
        if adjust_lr_fn not in _ADJUSTMENTS:
            raise ConfigError(f"adjust_lr_fn={adjust_lr_fn!r}: expected one of {', '.join(map(repr, _ADJUSTMENTS))}")
        if not isinstance(adamw or {}, Mapping):
            raise ConfigError(f"adamw={adamw!r}: expected a dict with some of {', '.join(_OF_ADAMW)}")
        if unknown := (adamw or {}).keys() - _OF_ADAMW.keys():
            raise ConfigError(f"adamw has {', '.join(sorted(unknown))}: expected some of {', '.join(_OF_ADAMW)}")
        self._adamw, self._shares_lr = AdamRule(decoupled=True), adjust_lr_fn == "match_rms_adamw"
        of_muon = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        of_adamw = _OF_ADAMW | ({"lr": lr} if self._shares_lr else {}) | dict(adamw or {})
        self._hypers = {True: of_muon, False: of_adamw}  # by "muon" of a group
        self._has_muon: dict[int, bool] = {}  # by the id of a parameter
        groups = [part for group in _as_groups(params) for part in self._parts(group)]
        defaults = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "muon": True}
        defaults |= of_muon | {"betas": of_adamw["betas"]}
        options = {"max_grad_norm": max_grad_norm, "accumulation_steps": accumulation_steps, "loss_scale": loss_scale}
        super().__init__(groups, MuonRule(adjust_lr_fn), defaults, **options)

    def rule_of(self, group):
        has_muon = bool(group["muon"])
        if any(self._has_muon.get(id(param), has_muon) != has_muon for param in group["params"][:1]):
            raise ConfigError(f"'muon': {group['muon']} in a parameter group that began with {not has_muon}: records have the moments of that rule")
        return self.rule if has_muon else self._adamw

    def _divide(self, group):
        return [part for each in _as_groups([group]) for part in self._parts(each)]

    def _parts(self, group: dict) -> list[dict]:
        parts = list(_divided(group))
        if len(parts) == 2 and (wrong := {"eps", *(() if self._shares_lr else ("lr",))} & group.keys()):
            raise ConfigError(
                f"a parameter group with {', '.join(sorted(wrong))} has matrices for Muon and other parameters for AdamW, which need values of "
                f"their own. Make one group with 'muon': True and one with 'muon': False"
            )
        self._has_muon |= {id(param): is_muon for is_muon, members in parts for param in members}
        return [{**self._hypers[is_muon], **group, "params": members, "muon": is_muon} for is_muon, members in parts]


def _as_groups(params: ParamsT) -> Iterator[dict]:
    """Parameters, named parameters or parameter groups, as parameter groups of parameters."""
    given = list(params)
    for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        yield {**group, "params": [member[1] if isinstance(member, tuple) else member for member in members]}


def _divided(group: dict) -> Iterator[tuple[bool, list[torch.nn.Parameter]]]:
    """Yields (True, parameters of Muon) and (False, parameters of AdamW), each if there are any."""
    params = group["params"]
    if "muon" in group:
        if group["muon"] and (others := [param for param in params if param.dim() not in (2, 3)]):
            raise ConfigError(f"Muon updates matrices, and a group with 'muon': True has a parameter of shape {tuple(others[0].shape)}")
        yield bool(group["muon"]), params
        return
    models = {id(model): model for param in params if (engine := owner_of(param)) is not None and (model := engine.model) is not None}
    matrices = {id(param) for model in models.values() for param in hidden_matrices(model)}
    for is_muon in (True, False):
        if members := [param for param in params if (id(param) in matrices) == is_muon]:
            yield is_muon, members
