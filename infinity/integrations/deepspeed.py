"""Converts a configuration of DeepSpeed's ZeRO-Infinity into settings of infinity, key by key.

Knows the settings of DeepSpeed's documentation and version 0.19, and infinity's settings in their place. Must not know Config, files, or
whether a setting is right for this machine.

Each key ends in one of four lists: mapped to a setting of infinity, passed to the optimizer, unneeded, or unmatched. A key is the path of a
value in nested tables: "zero_optimization.offload_param.device". Two values count as not set: null, and "auto", which Hugging Face's
integration fills in. If a key is not set and DeepSpeed's default differs from infinity's, the conversion takes DeepSpeed's default. If
infinity has only one behaviour, the conversion lists the difference.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from infinity.errors import ConfigError
from infinity.integrations.deepspeed_keys import AUTO, UNMATCHED, UNNEEDED
from infinity.spelling import nearest

_STAGE = (
    "3. Only ZeRO-3 slices weights, gradients and states over all ranks, as infinity always does. Set stage 3 if you want this"
)
_TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}
_CLASSES = {"adamw": "AdamW", "adam": "AdamW", "sgd": "SGD", "lion": "Lion"}  # DeepSpeed's Adam is AdamW, unless adam_w_mode is false
_ARGUMENTS = {
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Lion": ("lr", "betas", "weight_decay"),
}
_LOSS_SCALE = {  # key in "fp16" -> argument of infinity.LossScale, the argument's value, and the largest valid setting
    "initial_scale_power": ("initial", lambda power: 2.0**power, 127),
    "loss_scale_window": ("interval", int, math.inf),
    "min_loss_scale": ("minimum", float, math.inf),
}
_AMOUNT = (lambda value: _is_number(value) and value >= 0, "a number, zero or above")
_VALUES = {  # argument -> check of a value, and the expected values in words
    "lr": _AMOUNT,
    "betas": (lambda value: _is_pair(value) and all(_is_number(beta) and 0 <= beta < 1 for beta in value), "two numbers from 0 to below 1"),
    "eps": _AMOUNT,
    "weight_decay": _AMOUNT,
    "momentum": _AMOUNT,
    "dampening": (lambda value: _is_number(value), "a number"),
    "nesterov": (lambda value: isinstance(value, bool), "true or false"),
}
_OTHER_DEFAULTS = {"AdamW": {"weight_decay": 0.0}, "Lion": {"lr": 1e-3}}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted configuration. Each of DeepSpeed's keys is in exactly one of the lists mapped, to_optimizer, unneeded and unmatched."""

    config: dict[str, object] = field(default_factory=dict)
    """Fields of Config."""
    arguments: dict[str, object] = field(default_factory=dict)
    """Arguments of the optimizer, without the loss scale."""
    loss_scale: dict[str, float] = field(default_factory=dict)
    """Arguments of infinity.LossScale."""
    optimizer: str | None = None
    """Name of the optimizer's class in infinity, such as "AdamW", or None."""

    mapped: dict[str, str] = field(default_factory=dict)
    """Key -> setting of Config."""
    to_optimizer: dict[str, str] = field(default_factory=dict)
    """Key -> argument of the optimizer."""
    unneeded: dict[str, str] = field(default_factory=dict)
    """Key -> why infinity needs no setting for the key."""
    unmatched: dict[str, str] = field(default_factory=dict)
    """Key -> why infinity has no counterpart, or where the program sets the value instead."""
    implied: dict[str, str] = field(default_factory=dict)
    """Setting or behaviour of infinity -> the default of DeepSpeed behind the setting, or the default that differs from the behaviour."""

    @property
    def optimizer_call(self) -> str:
        """The Python expression that makes the optimizer. OPTIMIZER stands for a class that is not set or has no counterpart."""
        arguments = [f"{name}={value!r}" for name, value in self.arguments.items()]
        if self.loss_scale:
            arguments.append(f"loss_scale={_call('LossScale', self.loss_scale)}")
        return f"infinity.{self.optimizer or 'OPTIMIZER'}({', '.join(['model.parameters()', *arguments])})"

    def __str__(self) -> str:
        parts = {
            "Mapped": self.mapped,
            "For the optimizer": self.to_optimizer,
            "Nothing to do": self.unneeded,
            "No counterpart": self.unmatched,
            "Not set, with different defaults": self.implied,
        }
        width = max((len(key) for part in parts.values() for key in part), default=0)
        texts = []
        for title, part in parts.items():
            if part:
                texts.append("\n".join([title, *(f"  {key:<{width}}  {text}" for key, text in part.items())]))
        return "\n\n".join([*texts, f"The optimizer\n  {self.optimizer_call}"])


def convert(source: Mapping) -> Conversion:
    """Convert a configuration. Raises ConfigError for a stage other than 3, for invalid values, and for values in place of tables."""
    converter = _Converter(source)
    converter.check_stage()
    converter.convert_tier("zero_optimization.offload_param", "param_tier")
    converter.convert_tier("zero_optimization.offload_optimizer", "optimizer_state_tier")
    converter.convert_dtype()
    converter.convert_activations()
    converter.convert_optimizer()
    converter.convert_clipping_and_accumulation()
    converter.sort_the_rest()
    return converter.done


class _Converter:
    """The state of a conversion. left: keys that are in no list yet. done: the result for the other keys."""

    def __init__(self, source):
        self.given = dict(_leaves(source))
        self.done = Conversion()
        self.left = {}
        self.known = {*UNNEEDED, *UNMATCHED}
        for key, value in self.given.items():
            if value is None or value == "auto":
                self.done.unneeded[key] = AUTO if value else "not set"
            else:
                self.left[key] = value

    def take(self, key, check, expected):
        """Return the value of a key, or None. The caller then adds the key to a list. Raises ConfigError unless check(value)."""
        self.known.add(key)
        value = self.left.pop(key, None)
        if value is not None and not check(value):
            raise ConfigError(f"{key}={value!r}: expected {expected}")
        return value

    def flag(self, key):
        return self.take(key, lambda value: isinstance(value, bool), "true or false")

    def number(self, key, most=math.inf):
        expected = "a number, zero or above" if most == math.inf else f"a number from 0 to {most}"
        return self.take(key, lambda value: _is_number(value) and 0 <= value <= most, expected)

    def map(self, key, name, value):
        """Add a key to `mapped`. name: a field of Config."""
        self.done.config[name] = value
        self.done.mapped[key] = f"{name} = {value}"

    def argue(self, key, name, value, note=""):
        """Add a key to `to_optimizer`. name: an argument of the optimizer."""
        self.done.arguments[name] = value
        self.done.to_optimizer[key] = f"{name} = {value}{note}"

    def check_stage(self):
        stage = self.take("zero_optimization.stage", lambda value: value == 3 and not isinstance(value, bool), _STAGE)
        if stage is None:
            raise ConfigError(f"zero_optimization.stage is not set, and the default is 0: expected {_STAGE}")
        self.done.unneeded["zero_optimization.stage"] = "weights, gradients and states are always sliced over all ranks"

    def convert_tier(self, section, name):
        device = self.take(f"{section}.device", lambda value: value in tuple(_TIERS), f"one of {', '.join(_TIERS)}")
        if device is not None:
            self.map(f"{section}.device", name, _TIERS[device])
        path = self.take(f"{section}.nvme_path", lambda value: isinstance(value, str), "a directory")
        if path is not None and device == "nvme":
            paths = self.done.config.setdefault("swap_dirs", [])
            if path not in paths:
                paths.append(path)
            self.done.mapped[f"{section}.nvme_path"] = f"swap_dirs = {path}"
        elif path is not None:
            self.done.unneeded[f"{section}.nvme_path"] = "the device of this table is not nvme"

    def convert_dtype(self):
        switches = {"fp16.enabled": "fp16", "bf16.enabled": "bf16", "bfloat16.enabled": "bf16"}
        flags = {key: self.flag(key) for key in switches}
        dtypes = {dtype for key, dtype in switches.items() if flags[key]}
        if len(dtypes) > 1:
            raise ConfigError("fp16.enabled and bf16.enabled: expected one of them at most; remove the other")
        dtype = dtypes.pop() if dtypes else None
        for key, flag in flags.items():
            if flag:
                self.map(key, "dtype", dtype)
            elif flag is False:
                self.done.unneeded[key] = "off"
        if dtype is None and all(self.given.get(key) != "auto" for key in switches):
            self.done.config["dtype"] = "fp32"
            self.done.implied["dtype = fp32"] = "neither fp16 nor bf16 is enabled"
        self.convert_loss_scale(dtype == "fp16")
        self.convert_bf16(dtype == "bf16")

    def convert_loss_scale(self, is_on):
        fixed = self.number("fp16.loss_scale")
        moving = {name: self.number(f"fp16.{name}", most) for name, (_, _, most) in _LOSS_SCALE.items()}
        scale = self.done.loss_scale
        if not is_on:
            listed = {name: "fp16 is not enabled" for name in ("loss_scale", *moving)}
        elif fixed:
            scale |= {"initial": float(fixed), "growth": 1.0, "backoff": 1.0, "minimum": float(fixed)}
            listed = {name: "the loss scale is fixed" for name in moving}
            self.done.to_optimizer["fp16.loss_scale"] = f"loss_scale = {_call('LossScale', scale)}"
        else:
            listed = {"loss_scale": "0 means a dynamic loss scale, as infinity has"}
            self.check_loss_scale(**moving)
            for name, (argument, value_of, _) in _LOSS_SCALE.items():
                if moving[name] is not None:
                    scale[argument] = value_of(moving[name])
                    self.done.to_optimizer[f"fp16.{name}"] = f"loss_scale = {_call('LossScale', {argument: scale[argument]})}"
            if "interval" not in scale:
                scale["interval"] = 1000
                self.done.implied["loss_scale = infinity.LossScale(interval=1000)"] = "from fp16.loss_scale_window; infinity's default is 2000"
            if self.given.get("fp16.hysteresis") in (None, "auto"):
                self.done.implied["the loss scale shrinks at the first overflow"] = "fp16.hysteresis is 2 in DeepSpeed and always 1 in infinity"
        for name, why in listed.items():
            if self.given.get(f"fp16.{name}") not in (None, "auto"):
                self.done.unneeded[f"fp16.{name}"] = why

    def check_loss_scale(self, initial_scale_power, loss_scale_window, min_loss_scale):
        """Raise ConfigError for values that DeepSpeed accepts and infinity.LossScale does not. None: not set."""
        if loss_scale_window is not None and (loss_scale_window < 1 or loss_scale_window % 1):
            raise ConfigError(f"fp16.loss_scale_window={loss_scale_window!r}: expected a whole number above zero")
        if min_loss_scale == 0:
            raise ConfigError(f"fp16.min_loss_scale={min_loss_scale!r}: expected a number above zero")
        initial = 2.0 ** (16 if initial_scale_power is None else initial_scale_power)
        if min_loss_scale is not None and min_loss_scale > initial:
            raise ConfigError(
                f"fp16.min_loss_scale={min_loss_scale!r}: expected at most {initial:g}, the initial scale; raise "
                f"fp16.initial_scale_power or lower fp16.min_loss_scale"
            )

    def convert_bf16(self, is_on):
        nonfinite = None
        for table in ("bf16", "bfloat16"):
            checks, small = self.flag(f"{table}.check_grad_overflow"), self.flag(f"{table}.bf16_optimizer_states")
            for key, value in ((f"{table}.check_grad_overflow", checks), (f"{table}.bf16_optimizer_states", small)):
                if value is not None and not is_on:
                    self.done.unneeded[key] = "bf16 is not enabled"
            if is_on and checks is not None:
                nonfinite = "skip" if checks else "ignore"
                self.map(f"{table}.check_grad_overflow", "nonfinite", nonfinite)
            if is_on and small is not None:
                self.map(f"{table}.bf16_optimizer_states", "optimizer_state_dtype", "bf16" if small else "fp32")
        if is_on and nonfinite is None:
            self.done.config["nonfinite"] = "skip"
            self.done.implied["nonfinite = skip"] = "from bf16.check_grad_overflow; infinity's default is ignore, as in plain PyTorch"

    def convert_activations(self):
        key = "activation_checkpointing.cpu_checkpointing"
        offload = self.flag(key)
        if offload:
            self.map(key, "activation_tier", "host")
        elif offload is False:
            self.done.unneeded[key] = "off"

    def convert_optimizer(self):
        name = self.convert_optimizer_class()
        for argument, (check, expected) in _VALUES.items():
            key, is_ours = f"optimizer.params.{argument}", argument in _ARGUMENTS.get(name, ())
            value = self.take(key, check if is_ours else lambda value: True, expected)
            if value is None:
                continue
            if is_ours:
                self.argue(key, argument, tuple(value) if isinstance(value, list) else value)
            else:
                why = f"infinity.{name} has no such argument" if name else "the optimizer has no counterpart in infinity"
                self.done.unmatched[key] = why
        given = self.done.arguments
        if given.get("nesterov") and (not given.get("momentum") or given.get("dampening")):
            raise ConfigError("optimizer.params.nesterov=True: expected optimizer.params.momentum above zero, and no dampening")
        for argument, value in _OTHER_DEFAULTS.get(name, {}).items():
            if argument not in self.done.arguments:
                self.done.arguments[argument] = value
                self.done.implied[f"{argument} = {value}"] = f"from optimizer.params.{argument}; infinity.{name} has another default"

    def convert_optimizer_class(self):
        kind = self.take("optimizer.type", lambda value: isinstance(value, str), "the name of an optimizer")
        decoupled = self.flag("optimizer.params.adam_w_mode")
        name = _CLASSES.get(str(kind).lower())
        if str(kind).lower() == "adam" and decoupled is False:
            name = "Adam"
        if name is not None:
            self.done = dataclasses.replace(self.done, optimizer=name)
            self.done.to_optimizer["optimizer.type"] = f"infinity.{name}"
        elif kind is not None:
            self.done.unmatched["optimizer.type"] = "for an elementwise optimizer, write a subclass of infinity.Rule"
        if decoupled is not None and name in ("Adam", "AdamW"):
            self.done.to_optimizer["optimizer.params.adam_w_mode"] = f"infinity.{name}"
        elif decoupled is not None:
            self.done.unmatched["optimizer.params.adam_w_mode"] = "an argument of Adam only"
        return name

    def convert_clipping_and_accumulation(self):
        norm = self.number("gradient_clipping")
        if norm:
            self.argue("gradient_clipping", "max_grad_norm", float(norm))
        elif norm is not None:
            self.done.unneeded["gradient_clipping"] = "0 switches clipping off"
        steps = self.take("gradient_accumulation_steps", lambda value: type(value) is int and value > 0, "a whole number above zero")
        if steps is not None:
            self.argue("gradient_accumulation_steps", "accumulation_steps", steps, "; your training loop divides the loss by this number")

    def sort_the_rest(self):
        """Put the remaining keys into lists, by UNNEEDED and UNMATCHED. A key in a table with "enabled": false is unneeded."""
        for key, value in self.left.items():
            sections = list(_sections(key))
            if any(known.startswith(f"{key}.") for known in self.known):
                if value != {}:
                    raise ConfigError(f"{key}={value!r}: expected a table")
                self.done.unneeded[key] = "empty"
            elif any(self.given.get(f"{section}enabled") is False for section in sections):
                self.done.unneeded[key] = "off"
            elif key in UNMATCHED:
                self.list_unmatched(key, key, value)
            elif rule := next((name for name in (key, *sections) if name in UNNEEDED), None):
                self.done.unneeded[key] = UNNEEDED[rule]
            elif rule := next((name for name in sections if name in UNMATCHED), None):
                self.list_unmatched(key, rule, value)
            else:
                self.refuse_misspelled(key)
                self.done.unmatched[key] = "infinity does not know this setting"

    def refuse_misspelled(self, key):
        """Raise ConfigError for an unknown key that is spelled like a known one, because the key would have no effect."""
        section = ""
        for name in key.split("."):
            names = {known.removeprefix(section).split(".")[0] for known in self.known if known.startswith(section)}
            if name not in names:
                if near := nearest(name, names):
                    raise ConfigError(f"{section}{name}: DeepSpeed has no such setting; did you mean {near!r}?")
                return
            section += f"{name}."

    def list_unmatched(self, key, rule, value):
        harmless, why = UNMATCHED[rule]
        if harmless is not None and value == harmless:
            self.done.unneeded[key] = "infinity always does this" if harmless is not False else "off"
        else:
            self.done.unmatched[key] = why


def _leaves(table, prefix="") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _sections(key) -> Iterator[str]:
    """The tables around a key, innermost first: "a.b.c" is in "a.b." and "a."."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield f"{key}."


def _is_number(value):
    """Whether the value is a number in the range of float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_pair(value):
    return isinstance(value, (list, tuple)) and len(value) == 2


def _call(name, arguments):
    return f"infinity.{name}({', '.join(f'{argument}={value!r}' for argument, value in arguments.items())})"
