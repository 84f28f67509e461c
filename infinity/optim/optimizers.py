"""AdamW, Adam, SGD and Lion as torch.optim.Optimizers whose states live in the engine's tiers.

Knows parameter groups and hyper-parameters. Must not know how the engine works. The updates are in rules.py; a user's own rule goes into
`Optimizer`.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import ParamsT

from infinity.errors import ConfigError, UsageError
from infinity.formats.format import AVERAGE, STORAGES, scale_name
from infinity.model import tiling
from infinity.model.parameters import engine_joined, owner_of
from infinity.optim.loss_scale import LossScale
from infinity.optim.rules import UNITS, AdamRule, LionRule, Rule, SGDRule, check_rule, failures_named

# [Note: a state_dict that refers]
# Moments are too large for a dict in memory. The dict therefore names a checkpoint: the one that infinity.save made of this state, or that
# infinity.load read. Until the next step() the dict is plain data, which any library may pickle. load_state_dict of such a dict calls
# infinity.load, unless the optimizer still has these moments, because libraries pass a dict through and back. At all other times no
# checkpoint exists, and the dict refuses to be pickled.

REMEDY = "use infinity.save and infinity.load, or infinity.save_dcp and load_dcp for other engines"

REFERENCE = "infinity"  # the key of a state_dict under which the dict names the checkpoint
_follow: Callable | None = None  # loads a checkpoint, given (reference, model, optimizer)

_OF_KERNELS = ("foreach", "fused", "capturable", "differentiable")  # arguments of torch's optimizers without effect on the results
_SEGMENTS = (segment.name for storage in STORAGES.values() if storage.trains for segment in (*storage.weight, *storage.master))
_RESERVED = tuple(dict.fromkeys((*_SEGMENTS, AVERAGE)))  # no names of moments


class Optimizer(torch.optim.Optimizer):
    """An optimizer over parameters of one engine. rule: the update, one for all parameters.

    defaults: the rule's hyper-parameters; a parameter group may override them. max_grad_norm: clips the global gradient norm (math.inf
    measures the norm only, as for torch.nn.utils.clip_grad_norm_). `grad_norm` then holds the norm of the last step, skipped or not,
    before clipping. accumulation_steps: the most backward passes per step, or as infinity.no_sync says; gradients are summed in fp32.
    loss_scale: for fp16, the initial scale and its changes. Learning-rate schedulers and parameter groups work as usual. Raises
    ConfigError for hyper-parameters out of range, parameters that no engine owns, a rule that is not elementwise, or a loss scale
    without fp16.
    """

    if not TYPE_CHECKING:  # a type checker sees __init__ alone

        def __new__(cls, *args, **options):
            """Raises TypeError for an option that __init__ does not have. The message names the option that was meant."""
            _refuse_unknown(cls, options)
            return super().__new__(cls)

    def __init__(
        self,
        params: ParamsT,
        rule: Rule,
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        loss_scale: LossScale | None = None,
    ) -> None:
        if max_grad_norm is not None and (isinstance(max_grad_norm, str) or not max_grad_norm > 0):
            raise ConfigError(f"max_grad_norm={max_grad_norm!r}: expected a number above zero, or None")
        if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1:
            raise ConfigError(f"accumulation_steps={accumulation_steps!r}: expected an integer of 1 or more")
        _check_members(rule)
        if loss_scale is not None and not isinstance(loss_scale, LossScale):
            raise ConfigError(f"loss_scale={loss_scale!r}: expected infinity.LossScale(initial=...)")
        self.rule = rule
        self.max_grad_norm = max_grad_norm
        self.accumulation_steps = accumulation_steps
        self.loss_scale = loss_scale
        self.grad_norm: float | None = None
        self._saved: tuple[dict, Callable] | None = None  # the checkpoint of this state, and the function after which it is complete
        self._names = tuple(defaults)
        super().__init__(params, {name: _tuples(value) for name, value in defaults.items()})
        self.state = States()
        self._check_rules(self.param_groups)
        engines = self._engines_of(self.param_groups)
        if not engines:
            raise ConfigError("no parameter of the optimizer can be updated; pass the trainable parameters")
        if len(engines) > 1:
            raise ConfigError("the parameters belong to several engines; make one optimizer for each")
        (self._engine,) = engines
        self._refuse_tiles(self.param_groups)
        self.made_at, self._replaced_by = _caller(), None
        self._engine.attach(self)

    def rule_of(self, group: dict) -> Rule:
        """The rule of a parameter group: `rule`, unless a subclass has several rules."""
        return self.rule

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Raises UsageError without a backward pass since the last step.

        If the model has several optimizers, the updates begin when each has called step().
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_in_force("step()")
        self.snapshot()
        self._saved = None
        self._engine.step(self)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step() has used. Gradients of the last step() stay, because their updates may still run.

        If other optimizers of the model call step(), and this one calls only zero_grad(), its parameters skip the step.
        """
        self._require_in_force("zero_grad()")
        self._engine.zero_grad(self)

    def change_weights(self, change: Callable[[torch.Tensor, dict[str, torch.Tensor], dict], object]) -> None:
        """Call change(p, moments, hyper) once for all elements of this optimizer's parameters, wherever they are. It changes p in place.

        p: some elements of a parameter in fp32, 1-D. moments: of the same elements, which keep their values. hyper: of the group. For an
        optimizer whose weights in evaluation follow from weights and moments, as in schedule-free methods. Each record is read and written
        once, as by a step. All ranks must make this call. Raises UsageError between backward() and step(), and while a module runs.
        """
        self._require_in_force("change_weights()")
        self._engine.start()
        self._saved = None
        for group, hyper in zip(self.param_groups, self.snapshot()):
            self._engine.parameter_values.change_weights(group["params"], lambda p, moments, hyper=hyper: change(p, moments, hyper))

    def _require_in_force(self, what: str) -> None:
        """Raise UsageError if the engine has another optimizer now."""
        if self._replaced_by is not None:
            raise UsageError(f"{what} of an optimizer that was replaced by the one of {self._replaced_by}. Use that one")

    def be_replaced(self, made_at: str) -> None:
        """Note that another optimizer replaces this one. made_at: file and line of the call that creates the other optimizer."""
        self._replaced_by = made_at

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, before the engine starts or between two steps. After the start, the parameters must have been trainable when the
        engine started, and have records with the moments of the group's rule: those of the optimizer's own rule, unless a group had them.

        Raises ConfigError for wrong hyper-parameters, and for parameters that are in no engine or in another optimizer. Raises UsageError for
        parameters without such records, and between a backward pass and step().
        """
        if getattr(self, "_engine", None) is None:  # a call of the constructor
            return super().add_param_group(param_group)
        self._require_in_force("add_param_group()")
        number = len(self.param_groups)
        try:
            for group in self._divide(param_group):
                super().add_param_group(group)
            added = self.param_groups[number:]
            self._check_rules(added)
            self._refuse_tiles(added)
            if any(engine is not self._engine for engine in self._engines_of(added)):
                raise ConfigError("the parameters of the new group belong to another engine; make an optimizer for that engine")
            self._engine.add_groups(self, added)
        except BaseException:
            del self.param_groups[number:]
            raise

    def _divide(self, group: dict) -> list[dict]:
        """A new parameter group, as the groups that the optimizer has for it."""
        return [group]

    def _check_rules(self, groups: list[dict]) -> None:
        """Raise ConfigError for hyper-parameters out of range, and for rules that do not keep their promises."""
        try:
            for group in groups:
                check_rule(self.rule_of(group), self.hyper_parameters(group))
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _refuse_tiles(self, groups: list[dict]) -> None:
        """Raise ConfigError if a rule of whole matrices or parameters gets the tiles of a layer."""
        whole = [param for group in groups if self.rule_of(group).unit != "element" for param in group["params"]]
        tiles = tiling.places(self._engine.model) if whole else {}
        if (tile := next((tiles[param] for param in whole if param in tiles), None)) is not None:
            raise ConfigError(
                f"{tile.name} lies in tiles, and {type(self.rule).__name__} needs the whole {self.rule.unit}. Set tile_above=None in "
                f"infinity.Config, which may need more device_memory, or give this parameter another rule"
            )

    def refer_to(self, checkpoint: dict | None, wait: Callable[[], object] = lambda: None) -> None:
        """Note the checkpoint that holds this state until the next step(), as plain data; None: no checkpoint. The checkpoint is complete
        once `wait` has returned.
        """
        self._saved = None if checkpoint is None else (checkpoint, wait)

    def state_dict(self):
        """Hyper-parameters. After infinity.save or load, until the next step(), also step counts and the name of the checkpoint, as plain
        data: see
        [Note: a state_dict that refers]. At other times reading "state" and pickling are refused, and a warning says so.
        """
        found = super().state_dict()
        if self._saved is None:
            warnings.warn(f"optimizer.state_dict() has hyper-parameters, no moments and no step counts: {REMEDY}", UserWarning, stacklevel=2)
            return HyperParameters(found | {"state": States()})
        checkpoint, wait = self._saved
        wait()
        params = [param for group in self.param_groups for param in group["params"]]
        state = {index: {"step": self._engine.parameter_values.num_updates(param)} for index, param in enumerate(params) if self._engine.manages(param)}
        return found | {"state": state, REFERENCE: dict(checkpoint)}

    def load_state_dict(self, state_dict):
        """Set hyper-parameters. If the dict names a checkpoint, call infinity.load for it, weights included, unless the optimizer still has
        these moments. All ranks must call together then. Raises CheckpointError if that checkpoint is gone or has been replaced. Raises
        UsageError for a dict with states of another kind, which `infinity.load` and `infinity.load_dcp` load.
        """
        state = state_dict.get("state")
        if (reference := state_dict.get(REFERENCE)) is not None:
            if self._saved is None or reference != self._saved[0]:
                _follow(reference, self._engine.model, self._engine.optimizer)
        elif not isinstance(state, States) and state:
            raise UsageError(f"the optimizer's states live in the engine's tiers and are not loaded from a dict: {REMEDY}")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != REFERENCE} | {"state": {}})
        self.state = States()

    def snapshot(self) -> list[dict]:
        """The hyper-parameters of each group as plain numbers. Raises ConfigError for values out of range."""
        return [self.hyper_parameters(group) for group in self.param_groups]

    def hyper_parameters(self, group: dict) -> dict:
        """The hyper-parameters of a group as plain numbers. Raises ConfigError for values out of range."""
        found = {}
        for name in self._names:
            if name not in group:
                raise ConfigError(f"a parameter group has lost its {name!r}; set it again: optimizer.param_groups[i][{name!r}] = ...")
            try:
                found[name] = _plain(group[name])
            except (TypeError, ValueError) as error:
                raise ConfigError(f"optimizer hyper-parameters must be numbers: {name}={group[name]!r}: {error}") from None
        rule = self.rule_of(group)
        try:
            with failures_named(rule, found, "check"):
                wrong = rule.check(found)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if wrong:
            raise ConfigError("; ".join(wrong))
        return found

    def _engines_of(self, groups: list[dict]) -> list:
        """The engines of parameters that can be updated. Excluded: parameters without elements, and frozen ones that are not floating-point."""
        params = [param for group in groups for param in group["params"]]
        params = [param for param in params if param.numel() and (param.is_floating_point() or param.requires_grad)]
        return list({id(engine): engine for param in params if (engine := self._engine_of(param))}.values())

    def _engine_of(self, param):
        engine, joined = owner_of(param), None
        if engine is None and (joined := engine_joined(param)) is not None and not joined[0].has_started:
            joined[0].adopt()
            engine = owner_of(param)
        if engine is None and param.is_complex():
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is of {param.dtype}, which is not supported. Make it a real parameter with a "
                f"last dimension of 2, and use torch.view_as_complex(parameter) in forward."
            )
        if engine is None:
            if joined is not None:
                raise ConfigError(
                    f"{joined[1]}, of shape {tuple(param.shape)}, is in no engine: it became the model's after the engine had started, as by "
                    f"resize_token_embeddings, a new layer or an adapter. Do this first: before the optimizer is made and the model runs, as "
                    f"before infinity.offload(model, config), or inside `with infinity.init(config):`."
                )
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is in no engine. Build the model inside `with "
                f"infinity.init(config):` or call infinity.offload(model, config) before you create the optimizer. Call "
                f"model.parameters() after that, because tiled layers have new parameters (tile_above)."
            )
        return engine


class States(dict):
    """Takes the place of an optimizer's states in PyTorch. Iteration finds nothing. A request for one state, or whether any state exists,
    is refused.
    """

    def __getitem__(self, key):
        raise UsageError(f"an optimizer's states live in the engine's tiers and not in optimizer.state or state_dict(): {REMEDY}")

    def __bool__(self):  # torch.distributed.checkpoint.state_dict asks, and would otherwise call step() to create states
        return self[None]

    def get(self, key, default=None):
        return self[key]

    __contains__ = __getitem__

    def __repr__(self):
        return f"States(in the engine's tiers: {REMEDY})"


class HyperParameters(dict):
    """The `state_dict` of an optimizer without states."""

    def __reduce_ex__(self, protocol):
        raise UsageError(
            f"optimizer.state_dict() cannot be saved or copied, because the states live in the engine's tiers: {REMEDY}. After "
            f"infinity.save(folder, model, optimizer), until the next step(), state_dict() names that folder and can be saved."
        )


def follow_references_by(load: Callable) -> None:
    """Set the function that loads the checkpoint of a state_dict: load(reference, model, optimizer)."""
    global _follow
    _follow = load


class AdamW(Optimizer):
    """Adam with decoupled weight decay, with the results of plain PyTorch's AdamW. options: see `Optimizer`.

    Source: Loshchilov & Hutter 2019, Algorithm 2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        loss_scale: LossScale | None = None,
    ) -> None:
        options = {"max_grad_norm": max_grad_norm, "accumulation_steps": accumulation_steps, "loss_scale": loss_scale}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, AdamRule(decoupled=True), defaults, **options)


class Adam(Optimizer):
    """Adam with weight decay as an L2 term of the gradient, like plain PyTorch's Adam. Arguments as of `AdamW`. Source: Kingma & Ba 2015."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        loss_scale: LossScale | None = None,
    ) -> None:
        options = {"max_grad_norm": max_grad_norm, "accumulation_steps": accumulation_steps, "loss_scale": loss_scale}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, AdamRule(decoupled=False), defaults, **options)


class SGD(Optimizer):
    """Stochastic gradient descent, with the results of plain PyTorch's SGD. options: see `Optimizer`.

    Records have a momentum only if `momentum` is above zero here. Groups may then have momenta of their own.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        loss_scale: LossScale | None = None,
    ) -> None:
        options = {"max_grad_norm": max_grad_norm, "accumulation_steps": accumulation_steps, "loss_scale": loss_scale}
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, SGDRule(with_momentum=momentum != 0), defaults, **options)


class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum. Source: Chen et al. 2023, Program 1. options: see `Optimizer`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
        loss_scale: LossScale | None = None,
    ) -> None:
        options = {"max_grad_norm": max_grad_norm, "accumulation_steps": accumulation_steps, "loss_scale": loss_scale}
        super().__init__(params, LionRule(), {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options)


def _check_members(rule: Rule) -> None:
    """Raise ConfigError for a rule whose `moments` or `unit` has a wrong value."""
    what, names = type(rule).__name__, rule.moments
    if not isinstance(names, tuple) or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise ConfigError(f"{what}.moments={names!r}: expected a tuple of names")
    if len({*names, *map(scale_name, names), *_RESERVED}) < 2 * len(names) + len(_RESERVED):
        raise ConfigError(f"{what}.moments={names!r}: expected different names, none of {', '.join(_RESERVED)}")
    if rule.unit not in UNITS:
        raise ConfigError(f"{what}.unit={rule.unit!r}: expected one of {', '.join(UNITS)}")


def _refuse_unknown(kind: type[Optimizer], options: dict[str, Any]) -> None:
    parameters = inspect.signature(kind.__init__).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    known = [name for name in parameters if name not in ("self", "params")]
    for name in [name for name in options if name not in {"params", *known}]:
        if name in _OF_KERNELS:
            remedy = "Leave the argument out: it selects a kernel of torch, and the engine has its own kernels."
        elif close := difflib.get_close_matches(name, known, 1):
            remedy = f"Did you mean {close[0]}?"
        else:
            remedy = f"The arguments are {', '.join(known)}. For another update, write an infinity.Rule."
        raise TypeError(f"infinity.{kind.__name__} has no argument {name!r}. {remedy}")


def _caller() -> str:
    """File and line of the running program, outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __name__.split(".")[0]:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _tuples(value):
    return tuple(value) if isinstance(value, list) else value


def _plain(value):
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    return float(value)
