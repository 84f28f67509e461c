"""The program's access to values and gradients that are not on the device: state_dict, load_state_dict, param.grad.

Knows modules and an engine that reads and writes whole parameters. Must not know where parameters live.
"""

# [Note: values by name]
# When a module's entries in a state_dict are made, the engine's values replace them: one parameter at a time, whole, on the CPU. Loading
# removes the entry before PyTorch sees the key. PyTorch would copy the value into a placeholder, or, with assign=True, replace the
# parameter. Afterwards the key does not count as missing.
#
# [Note: gradients that have left]
# After a backward pass `param.grad` is an object with the gradient's shape, dtype and device. All such objects together give the norm, and
# accept one factor: torch.nn.utils.clip_grad_norm_ needs no more, and therefore works. Everything else is refused with a remedy, because
# code that clips, scales or sums gradients must not silently find none. The object is removed before the next gradient arrives.

from __future__ import annotations

import sys
import weakref

import torch
from torch import nn

from infinity.errors import UsageError
from infinity.model.parameters import TiedNames, converts_to_itself, is_conversion, is_metadata, refuse_conversion

_OF_ITSELF = frozenset({torch.Tensor.grad.__get__, torch.Tensor.grad.__set__, torch.Tensor.data.__set__})


NO_SCALER = (
    "torch.amp.GradScaler reads gradients in param.grad, but the engine moves them to its tiers. Leave the scaler out. With dtype='fp16' "
    "the optimizer scales the loss and skips steps that overflow: see loss_scale=infinity.LossScale(...). bf16 and fp32 need no scale."
)


class DepartedGradient(torch.Tensor):
    """Stands in `param.grad` for a gradient that the engine has taken."""

    _answers = staticmethod(lambda: None)

    @staticmethod
    def __new__(cls, like: torch.Tensor):
        return torch.Tensor._make_subclass(cls, like.detach(), False)

    def answer_by(self, answers) -> None:
        """answers: an object with `norm(gradients)` of all gradients together, and `scale(gradient, factor)`."""
        self._answers = weakref.ref(answers)

    @property
    def answers(self):
        if (answers := self._answers()) is None:
            raise UsageError("the engine of this gradient is gone")
        return answers

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if sys._getframe(1).f_globals.get("__name__") == "torch.amp.grad_scaler":
            raise UsageError(NO_SCALER)
        if func in _OF_ITSELF or is_metadata(func, args, kwargs or {}):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if is_conversion(func):
            if converts_to_itself(func, args, kwargs or {}):  # as in model.cpu()
                return args[0]
            refuse_conversion(func, args, kwargs or {})
        if func in _NORMS and _is_euclidean(*args, **(kwargs or {})):
            return PartOfNorm(args[0]) if isinstance(args[0], DepartedGradient) else tuple(map(_norm_of, args[0]))
        if func in _FACTORS and len(args) == 2 and not isinstance(args[1], (tuple, list)):
            return _scale(*args)
        raise UsageError(
            "the engine moves each gradient from param.grad to its tiers, so single gradients cannot be read or changed there. "
            "torch.nn.utils.clip_grad_norm_ clips all gradients, like max_grad_norm=... of the optimizer, which leaves the norm in "
            "optimizer.grad_norm; drop them with optimizer.zero_grad(); to look at one, use param.register_hook(...)."
        )

    def __repr__(self, **options):
        return "DepartedGradient()"

    def __deepcopy__(self, memo):
        return None


class PartOfNorm(torch.Tensor):
    """The unknown norm of one taken gradient, as a part of the norm of all gradients, which is known; or several, stacked."""

    of: DepartedGradient | list[torch.Tensor]

    @staticmethod
    def __new__(cls, of: DepartedGradient | list[torch.Tensor]):
        shape, device = ((len(of),), of[0].device) if isinstance(of, list) else ((), of.device)
        with torch._C.DisableTorchFunctionSubclass():
            nothing = torch.full(shape, float("nan"), dtype=torch.float32, device=device)
            made = torch.Tensor._make_subclass(cls, nothing, False)
            made.of = of
            return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.stack and len(args) == 1 and not kwargs:
            return cls(list(args[0]))
        if func is torch.linalg.vector_norm and isinstance(args[0].of, list) and _is_euclidean(*args, **(kwargs or {})):
            return torch.linalg.vector_norm(torch.stack(_norms(args[0].of)))
        if func is torch.Tensor.to:  # the device of the first
            return args[0]
        if is_metadata(func, args, kwargs or {}):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise UsageError(
            "the norm of one gradient is not known: the engine moves gradients to its tiers and sums the squares of all. "
            "torch.nn.utils.clip_grad_norm_ and get_total_norm give the norm of all; to look at one gradient, use param.register_hook(...)."
        )

    def __repr__(self, **options):
        return "PartOfNorm()"


def _norm_of(gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient)


def _norms(parts) -> list[torch.Tensor]:
    """The norms of all parts, summed once per engine, and the other parts."""
    norms = [part for part in parts if not isinstance(part, PartOfNorm)]
    gradients: dict[object, list[DepartedGradient]] = {}
    for part in parts:
        if isinstance(part, PartOfNorm):
            gradients.setdefault(part.of.answers, []).append(part.of)
    device = parts[0].device
    return norms + [torch.tensor(answers.norm(own), dtype=torch.float32, device=device) for answers, own in gradients.items()]


def _is_euclidean(of, ord=2, **options) -> bool:
    return ord == 2 and not any(value is not None for value in options.values())


def _scale(gradients, factor):
    number = float(factor)
    for gradient in gradients if isinstance(gradients, (tuple, list)) else [gradients]:
        gradient.answers.scale(gradient, number) if isinstance(gradient, DepartedGradient) else gradient.mul_(factor)
    return gradients


_NORMS = frozenset({torch.linalg.vector_norm, torch._foreach_norm})
_FACTORS = frozenset({torch.Tensor.mul_, torch._foreach_mul_})


class Facade:
    """Connects a model's state_dict to the engine.

    answers: an object with `manages(param)`, `is_held(param)`, `read_weight(param)` and `write_weight(param, value)`.
    """

    def __init__(self, answers):
        self._answers = weakref.ref(answers)
        self._tied = TiedNames()
        self._loaded: dict[nn.Module, list[str]] = {}
        self._away: dict[int, str] = {}  # after close: names by the address of the placeholder
        self._attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def attach(self, model: nn.Module) -> None:
        """Register hooks on modules with parameters of the engine."""
        for module in model.modules():
            own = (param for param in module._parameters.values() if param is not None)
            if module not in self._attached and any(map(self._answers().manages, own)):
                self._attached.add(module)
                module.register_state_dict_post_hook(lambda *args: self._save(*args))
                module.register_load_state_dict_pre_hook(lambda *args: self._load(*args))
                module.register_load_state_dict_post_hook(lambda *args: self._forgive(*args))

    def close(self, away: dict[int, str]) -> None:
        """The engine is closed: from now on the model keeps new values. away: placeholders, by their addresses."""
        self._answers, self._away = (lambda: None), away

    def _save(self, module: nn.Module, state_dict: dict, prefix: str, local_metadata) -> None:
        answers = self._answers()
        for name, param in self._managed(answers, module):
            if prefix + name in state_dict:
                if (twin := self._tied.twin(state_dict, prefix + name, id(param))) is not None:
                    state_dict[prefix + name] = twin
                    continue
                if answers is None:
                    name = self._away[param.data_ptr()]
                    raise UsageError(f"the engine is closed and {name} is only a placeholder; call state_dict() before")
                state_dict[prefix + name] = answers.read_weight(param)

    def _load(self, module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        answers, taken = self._answers(), []
        for name, param in self._managed(answers, module):
            value = state_dict.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue  # PyTorch reports the error
            if answers is None:
                param.data = torch.empty_like(value, dtype=param.dtype, device=param.device)
            elif answers.is_held(param):
                local_metadata["assign_to_params_buffers"] = False  # PyTorch copies into the parameter, which is held
            else:
                answers.write_weight(param, value)
                del state_dict[prefix + name]
                taken.append(prefix + name)
        self._loaded[module] = taken

    def _forgive(self, module: nn.Module, incompatible) -> None:
        for key in self._loaded.pop(module, ()):
            if key in incompatible.missing_keys:
                incompatible.missing_keys.remove(key)

    def _managed(self, answers, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """The module's own parameters that are, or may be, placeholders."""
        found = [(name, param) for name, param in dict.items(module._parameters) if param is not None]
        if answers is None:
            return [(name, param) for name, param in found if param.data_ptr() in self._away]
        return [(name, param) for name, param in found if answers.manages(param)]
