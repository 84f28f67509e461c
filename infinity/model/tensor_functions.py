"""Classes of torch functions, by what they need of a parameter under construction: metadata, layout, or nothing, because they overwrite it.

Knows torch functions as `__torch_function__` gets them. Must not know where values of parameters are.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

# Attributes and functions whose result depends only on shape, dtype and device, so that a placeholder gives the right one.
_METADATA = frozenset(
    "shape dtype device layout requires_grad grad grad_fn is_leaf ndim names is_sparse is_cuda is_cpu is_meta is_quantized "
    "_backward_hooks _post_accumulate_grad_hooks _version name itemsize nbytes".split()
)
_METADATA_FUNCTIONS = frozenset(
    "size numel nelement dim ndimension is_floating_point is_complex __hash__ requires_grad_ register_hook __len__ "
    "element_size register_post_accumulate_grad_hook has_names is_inference _is_view is_pinned "
    "new_tensor new_empty new_zeros new_ones new_full empty_like zeros_like ones_like full_like".split()
)
LAYOUT_FUNCTIONS = frozenset("stride is_contiguous storage_offset".split())  # a parameter that is away is contiguous, its placeholder is not

# These overwrite their first argument: methods, and functions of torch.nn.init, which switch gradients off themselves.
_OVERWRITING = frozenset("normal_ uniform_ fill_ zero_ copy_".split())
_INITIALISERS = frozenset("normal_ uniform_ constant_ kaiming_uniform_".split())  # those that call the mode


@functools.lru_cache(1024)  # a model has few functions, and calls each for every parameter
def is_metadata(func) -> bool:
    """Whether the result depends only on shape, dtype and device of a tensor. Also true if func sets `requires_grad`: this needs no values."""
    if getattr(func, "__name__", "") in _METADATA_FUNCTIONS or attribute_of(func, "__get__") in _METADATA:
        return True
    return attribute_of(func, "__set__") == "requires_grad"


@functools.lru_cache(1024)
def attribute_of(func, access: str) -> str:
    """The name of the tensor attribute that func reads (`__get__`) or writes (`__set__`); "" for other functions."""
    return getattr(getattr(func, "__self__", None), "__name__", "") if getattr(func, "__name__", "") == access else ""


def parameters_in(values):
    """The parameters among nested arguments."""
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from parameters_in(value)
        elif isinstance(value, dict):
            yield from parameters_in(value.values())


def overwritten_by(func, args: tuple, kwargs: dict) -> nn.Parameter | None:
    """The parameter that func overwrites and does not use otherwise, if any."""
    name = getattr(func, "__name__", "")
    is_function = name in _INITIALISERS and func is getattr(nn.init, name)
    if not is_function and (name not in _OVERWRITING or getattr(func, "__objclass__", None) is not torch._C.TensorBase):
        return None
    target = args[0] if args else kwargs.get("tensor")
    if not isinstance(target, nn.Parameter) or (not is_function and torch.is_grad_enabled() and target.requires_grad):
        return None
    used = sum(param is target for param in parameters_in([*args, *kwargs.values()]))
    return target if used == 1 else None
