"""AdamW and Adam as torch.optim.Optimizers whose states live in the engine's tiers.

Knows parameter groups and hyper-parameters. The engine does the work; must not know how.
"""

from __future__ import annotations

import torch

from infinity.errors import ConfigError, UsageError
from infinity.residency import owner_of

_HYPER = ("lr", "betas", "eps", "weight_decay")


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay over parameters of one engine; what plain PyTorch's AdamW computes.

    max_grad_norm: clip the global gradient norm to it; `grad_norm` then holds the norm of the last step.
    accumulation_steps: backward passes a step; their gradients are summed in fp32. Learning-rate schedulers and parameter
    groups work as usual. Raises ConfigError for hyper-parameters out of range or parameters that no engine owns.
    Source: Loshchilov & Hutter 2019, Algorithm 2.
    """

    decoupled = True

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm={max_grad_norm!r}: expected a number above zero, or None")
        if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1:
            raise ConfigError(f"accumulation_steps={accumulation_steps!r}: expected an integer of 1 or more")
        self.max_grad_norm = max_grad_norm
        self.accumulation_steps = accumulation_steps
        self.grad_norm: float | None = None
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check(group)
        engines = {id(engine): engine for engine in map(self._engine_of, self._parameters())}
        if len(engines) > 1:
            raise ConfigError("the parameters belong to several engines; make one optimizer for each")
        (self._engine,) = engines.values()
        self._engine.attach(self)

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient. Raises UsageError without a backward pass since the last step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check(group)
        self._engine.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step() has used; those of the last step() are on their way and stay."""
        self._engine.zero_grad()

    def add_param_group(self, param_group: dict) -> None:
        if getattr(self, "_engine", None) is not None:
            raise UsageError("parameter groups are fixed once the optimizer is made; give all of them to its constructor")
        super().add_param_group(param_group)

    def state_dict(self):
        raise UsageError("the optimizer's states live in the engine's tiers and are not collected in a dict")

    def load_state_dict(self, state_dict):
        raise UsageError("the optimizer's states live in the engine's tiers and are not loaded from a dict")

    def snapshot(self) -> list[dict]:
        """The hyper-parameters of each group as plain numbers."""
        return [{name: _plain(group[name]) for name in _HYPER} for group in self.param_groups]

    def _parameters(self):
        return [param for group in self.param_groups for param in group["params"]]

    @staticmethod
    def _engine_of(param):
        engine = owner_of(param)
        if engine is None:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is in no engine. Build the model inside `with "
                f"infinity.init(config):` or call infinity.offload(model, config) before making the optimizer."
            )
        return engine


class Adam(AdamW):
    """As `AdamW`, with weight decay as an L2 term of the gradient, as plain PyTorch's Adam. Source: Kingma & Ba 2015."""

    decoupled = False

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **options):
        super().__init__(params, lr, betas, eps, weight_decay, **options)


def _plain(value):
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    return float(value)


def _check(group: dict) -> None:
    try:
        lr, (beta1, beta2), eps, weight_decay = (_plain(group[name]) for name in _HYPER)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer hyper-parameters must be numbers: {error}") from None
    wrong = [
        f"{name}={value!r}: expected {expected}"
        for name, value, expected, right in (
            ("lr", lr, "0 or more", 0 <= lr < float("inf")),
            ("betas[0]", beta1, "from 0 to below 1", 0 <= beta1 < 1),
            ("betas[1]", beta2, "from 0 to below 1", 0 <= beta2 < 1),
            ("eps", eps, "0 or more", 0 <= eps < float("inf")),
            ("weight_decay", weight_decay, "0 or more", 0 <= weight_decay < float("inf")),
        )
        if not right
    ]
    if wrong:
        raise ConfigError("; ".join(wrong))
