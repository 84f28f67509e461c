"""The classes of an engine's parameters: an nn.Parameter while a user holds the parameter, otherwise a placeholder without a value.

Knows classes of tensors, and the engine of each parameter. Must not know where values are, or when they come.
"""

# [Note: parameters with two classes]
# A parameter of an engine has one of two classes, both derived from the original class. The parameter is *held* inside `infinity.gathered`
# and while an op that owns it runs, forward, again or backward. At all other times it is *unheld*, even if the bytes never leave the
# device. The behaviour of a parameter therefore does not depend on the place of the bytes. The object stays the same, and its class
# changes, like torch's own lazy parameters. A running op pays nothing for this.
#
# Held: an nn.Parameter, except for `.data`. Reading `.data` is `detach()`, so a write through the result is counted like any other write. A
# tensor assigned to `.data` is copied to the place of the value at once, and is then the value for all users.
#
# Unheld: a question with the same answer for a placeholder is answered. For anything else the engine is asked to `compute` the function.
# Inside one of its ops the engine holds the parameter for that one function; elsewhere the engine refuses. `detach()` and `.data`, which
# libraries call for a shape or a type, return an `Absent`. An `Absent` refuses later, if a value is asked for.
#
# Both: a hook on the accumulated gradient runs before the engine's own hook, which takes the gradient away (`LastHook`). `param.grad` names
# a gradient that has left, also while the backward pass runs. torch.autograd.grad looks at gradients: the engine takes none of them.

from __future__ import annotations

import contextlib
import functools
import weakref

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils.weak import WeakIdKeyDictionary

from infinity.errors import UsageError
from infinity.model.autograd_state import autograd_runs

set_data = torch._C.TensorBase.data.__set__  # torch's own setter, whatever the parameter's class does with `.data`
get_grad, set_grad = torch._C.TensorBase.grad.__get__, torch._C.TensorBase.grad.__set__

NO_COPY = (
    "a model whose parameters are in an engine cannot be copied or pickled: these are only placeholders. Build the second model in "
    "a separate infinity.init and load the first model's state_dict(). For a running average, copy values inside "
    "infinity.gathered."
)


class NotCopied:
    """Mixed into classes whose objects belong to one engine."""

    def __deepcopy__(self, memo):
        raise UsageError(NO_COPY)

    def __reduce_ex__(self, protocol):
        raise UsageError(NO_COPY)


_ATTRIBUTES = (
    "shape dtype device layout ndim itemsize nbytes names name requires_grad grad_fn is_leaf retains_grad output_nr _version _base "
    "is_cpu is_cuda is_xpu is_mps is_mtia is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn _backward_hooks "
    "_post_accumulate_grad_hooks"
).split()
_METHODS = (
    "size numel nelement dim ndimension stride element_size storage_offset get_device is_floating_point is_complex is_signed "
    "is_contiguous is_inference is_conj is_neg is_pinned is_shared is_coalesced is_same_size has_names dim_order _is_view __len__ __hash__ "
    "requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook new_empty new_zeros new_ones new_full new_tensor"
).split()
_FUNCTIONS = (
    "_has_compatible_shallow_copy_type is_floating_point is_complex is_signed numel is_same_size is_conj is_neg is_inference result_type empty_like zeros_like ones_like full_like "
    "rand_like randn_like randint_like"
).split()


def _metadata() -> frozenset:
    attributes = [getattr(torch.Tensor, name) for name in _ATTRIBUTES if hasattr(torch.Tensor, name)]
    found = {attribute.__get__ for attribute in attributes}
    found |= {torch.Tensor.requires_grad.__set__, torch.Tensor._backward_hooks.__set__}
    found |= {method for name in _METHODS if (method := getattr(torch.Tensor, name, None)) is not None}
    return frozenset(found | {getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)})


METADATA = _metadata()  # functions of a tensor, as in `__torch_function__`, that do not depend on the value
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name) for name in "to cpu cuda xpu type half bfloat16 float double contiguous".split() if hasattr(torch.Tensor, name)
)

_BACKWARD = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})  # take parameters for their places in the graph


_VIEWS_LIKE = frozenset({torch.Tensor.view_as, torch.Tensor.expand_as})


class LastHook(functools.partial):
    """A hook on an accumulated gradient that runs after all other hooks of the parameter, even later ones."""


def converts_to_itself(func, args: tuple, kwargs: dict) -> bool:
    """Whether a conversion (`to`, `cpu`, `half`, ...) asks for the present dtype and device of the tensor, args[0]."""
    like, found = _converted(func, args, kwargs)
    return found is like


def refuse_conversion(func, args: tuple, kwargs: dict) -> None:
    """Raise UsageError if a conversion of the tensor, args[0], asks for another dtype or device."""
    like, found = _converted(func, args, kwargs)
    if isinstance(found, torch.Tensor) and (found.dtype, found.device) != (like.dtype, like.device):
        raise UsageError(
            f".{func.__name__}() would make a parameter or a gradient of an engine {found.dtype} on {found.device}; the engine has "
            f"{like.dtype} on {like.device}. Choose these with infinity.Config(dtype=..., device=...), or convert the tensors that "
            f"model.state_dict() returns."
        )


def _converted(func, args: tuple, kwargs: dict) -> tuple[torch.Tensor, object]:
    """An empty tensor with the dtype and device of args[0], and the result of converting that tensor."""
    with DisableTorchFunctionSubclass():
        like = torch.empty((), dtype=args[0].dtype, device=args[0].device)
        return like, func(like, *args[1:], **kwargs)


def is_conversion(func) -> bool:
    return func in _CONVERSIONS


def is_metadata(func, args: tuple, kwargs: dict) -> bool:
    """Whether the function does not depend on the value of the tensor, args[0]. `type` without a target type returns a name."""
    return func in METADATA or (func is torch.Tensor.type and len(args) == 1 and not kwargs)


class Managed:
    """Mixed into both classes of a parameter: the gradient, and hooks on the gradient."""

    __slots__ = ()

    @property
    def grad(self) -> torch.Tensor | None:
        with DisableTorchFunctionSubclass():
            found = get_grad(self)
        if found is None and autograd_runs() and is_open(engine := owner_of(self)):
            return engine.parameter_values.departed_gradient(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with DisableTorchFunctionSubclass():
            set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_post_accumulate_grad_hook(self, hook):
        with DisableTorchFunctionSubclass():
            handle = torch.Tensor.register_post_accumulate_grad_hook(self, hook)
            hooks = self._post_accumulate_grad_hooks
            for key in [key for key, registered in hooks.items() if isinstance(registered, LastHook)]:
                hooks[key] = hooks.pop(key)  # autograd uses the order of insertion, which `move_to_end` does not change
        return handle


class Held(Managed):
    """Mixed into the class of a held parameter."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        engine = owner_of(self)
        if engine is None:
            self.__class__ = _made_from[type(self)]
            set_data(self, value)
        elif value is not self:
            engine.parameter_values.take(self, value)

    def set_(self, *source) -> nn.Parameter:
        with torch.no_grad():
            self.data = torch.empty((0,), dtype=self.dtype, device=self.device).set_(*source)
        return self

    def __deepcopy__(self, memo):
        copied = super().__deepcopy__(memo)
        copied.__class__ = _made_from[type(self)]
        return copied


class Unheld(Managed):
    """Mixed into the class of an unheld parameter."""

    __slots__ = ()

    @classmethod
    @torch._dynamo.disable
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_metadata(func, args, kwargs):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _CONVERSIONS and isinstance(args[0], (Unheld, Absent)) and converts_to_itself(func, args, kwargs):
            return args[0]
        if func in _BACKWARD:
            with _look_at(args, kwargs) if func is torch.autograd.grad else contextlib.nullcontext():
                return func(*_with_edges(args), **_with_edges(kwargs))
        return ask(func, args, kwargs)

    @property
    def data(self) -> torch.Tensor:
        return ask(torch.Tensor.detach, (self,), {})

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:
            return
        if is_open(owner_of(self)):
            ask(_assign, (self, value), {})
        else:  # the program's own from now on
            self.__class__ = _made_from[type(self)]
            set_data(self, value)

    def set_(self, *source) -> nn.Parameter:  # without `__torch_function__`
        return ask(_set, (self, *source), {})

    def __repr__(self, **options):
        with DisableTorchFunctionSubclass():
            return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}; in an engine, see infinity.gathered)"

    def __format__(self, spec):
        return format(repr(self), spec)

    def __deepcopy__(self, memo):
        raise UsageError(NO_COPY)

    def __reduce_ex__(self, protocol):
        raise UsageError(NO_COPY)


class Absent(torch.Tensor):
    """The result of `detach()` of an unheld parameter: shape and type."""

    param: nn.Parameter

    @staticmethod
    def __new__(cls, param: nn.Parameter):
        with DisableTorchFunctionSubclass():
            nothing = torch.full((), float("nan"), dtype=param.dtype, device=param.device).expand(param.shape)
            made = torch.Tensor._make_subclass(cls, nothing, False)
            made.param = param
            return made

    __torch_function__ = Unheld.__torch_function__

    @property
    def data(self) -> torch.Tensor:
        return self

    def __repr__(self, **options):
        return f"Absent({self.param!r})"

    def __deepcopy__(self, memo):
        raise UsageError(NO_COPY)

    def __reduce_ex__(self, protocol):
        raise UsageError(NO_COPY)


def _assign(param: nn.Parameter, value: torch.Tensor) -> None:
    param.data = value


_assign.__name__ = "data = ..."


def _set(param: nn.Parameter, *source) -> nn.Parameter:
    return param.set_(*source)


_set.__name__ = "set_"


def ask(func, args: tuple, kwargs: dict):
    """Let the engine compute a function of unheld parameters. Raises UsageError if the parameters may not be read now."""
    params = [tensor for tensor in _tensors((args, kwargs.values())) if isinstance(tensor, (Unheld, Absent))]
    absent = [tensor.param for tensor in params if isinstance(tensor, Absent)]
    engine = owner_of((absent or params)[0])
    if is_open(engine) and not absent:
        params = [param for param in params if owner_of(param) is engine]
        if engine.parameter_values.may_compute(params):
            return engine.parameter_values.compute(params, func, args, kwargs)
    if func is torch.Tensor.detach:
        return absent[0] if absent else Absent(params[0])
    if func in _VIEWS_LIKE and params and args[0] is args[1]:
        return _leading_to_gradient(func, args[0])
    if func is torch.Tensor.data_ptr:  # used to distinguish parameters
        with DisableTorchFunctionSubclass():
            return func(*args)
    name = engine.parameter_values.name_of((absent or params)[0]) if engine is not None else "a parameter"
    if not is_open(engine):
        raise UsageError(
            f"the engine is closed and {name} is only a placeholder; read values before close(), or give the model values with "
            f"load_state_dict()"
        )
    if func in _CONVERSIONS:
        refuse_conversion(func, args, kwargs)
    what = getattr(func, "__name__", str(func))
    what = getattr(getattr(func, "__self__", None), "__name__", what) if what in ("__get__", "__set__") else what
    raise UsageError(
        f"{name} has no value here ({what}): outside of the model's forward and backward passes it may be in any tier. Read and change values "
        f"inside `with infinity.gathered(parameter):`."
    )


def _leading_to_gradient(func, param: nn.Parameter) -> torch.Tensor:
    """A view of a parameter with the same shape. Programs use the view's grad_fn to find the node that accumulates the gradient."""
    with DisableTorchFunctionSubclass():
        view = func(param, param)
    view.__class__, view.param = Absent, param
    return view


@contextlib.contextmanager
def _look_at(args: tuple, kwargs: dict):
    """Inside the block, the engines of these parameters take no gradient of a backward pass. If one engine refuses, none is told."""
    params = [tensor for tensor in _tensors((args, kwargs.values())) if isinstance(tensor, Unheld)]
    with contextlib.ExitStack() as looks:
        for engine in {id(engine): engine for param in params if is_open(engine := owner_of(param))}.values():
            looks.enter_context(engine.parameter_values.look_at_gradients())
        yield


def _with_edges(value):
    """The arguments with unheld parameters replaced by their places in autograd's graph."""
    if isinstance(value, Unheld):
        with DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(value)
    if isinstance(value, dict):
        return {name: _with_edges(item) for name, item in value.items()}
    return type(value)(map(_with_edges, value)) if type(value) in (tuple, list) else value


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list, type({}.values()))):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


_made_from: dict[type, type] = {}


@functools.cache
def classes_of(base: type) -> tuple[type, type]:
    """(the class of a held parameter, the class of an unheld one) for parameters of this class."""
    found = []
    for mixin in (Held, Unheld):
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__slots__": ()}
        made = type(base)(base.__name__, (mixin, base), names)
        _made_from[made] = base
        found.append(made)
    return tuple(found)


_owners = WeakIdKeyDictionary()


def owner_of(param: torch.Tensor):
    """The engine that manages a parameter, or None."""
    reference = _owners.get(param)
    return reference() if reference is not None else None


def engine_joined(param: torch.Tensor) -> tuple[object, str] | None:
    """The engine whose model a parameter has joined since the engine's start, like an adapter does, and the parameter's name there."""
    for engine in {id(engine): engine for reference in list(_owners.values()) if is_open(engine := reference())}.values():
        if (model := engine.model) is not None:
            if name := next((name for name, found in model.named_parameters() if found is param), None):
                return engine, name
    return None


def set_owner(param: torch.Tensor, engine) -> None:
    _owners[param] = weakref.ref(engine)


def forget_owner(param: torch.Tensor) -> None:
    _owners.pop(param, None)


def is_open(engine) -> bool:
    return engine is not None and not engine.is_closed


class TiedNames:
    """The first name of each value in the present state_dict. Libraries that save files recognise tied values by their storage."""

    def __init__(self):
        self._last: tuple[weakref.ref, dict[object, str]] | None = None

    def twin(self, state_dict: dict, name: str, value: object) -> torch.Tensor | None:
        """The entry of the same value under another name, or None. value: any hashable that identifies the value."""
        if self._last is None or self._last[0]() is not state_dict:
            try:
                self._last = weakref.ref(state_dict), {}
            except TypeError:  # of a type that cannot be referenced weakly
                return None
        first = self._last[1].setdefault(value, name)
        return state_dict.get(first) if first != name else None
